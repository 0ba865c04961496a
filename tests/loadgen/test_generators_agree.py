"""Two generators, one plan: what goes wrong on the wire has the same outcome, and what goes well the same stamps."""

from __future__ import annotations

import asyncio
import dataclasses
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from gapmeter.loadgen.fleet import make_fleet
from gapmeter.loadgen.plan import Plan
from gapmeter.loadgen.worker import GENERATORS
from gapmeter.records import Outcome, read_records
from gapmeter.records.request import Flag, RequestRecord
from gapmeter.records.stream import parse_answer
from tests.kit.command import answers_in
from tests.kit.faults import FAULTS
from tests.kit.loads import body, plan, records_of
from tests.kit.servers import Certificate, null_server
from tests.kit.wait import eventually

MS = 1_000_000


def issued(what: Plan, url: str, folder: Path, generator: str) -> list[RequestRecord]:
    """What a generator process makes of a plan, in the plan's order."""
    folder.mkdir(exist_ok=True)
    with make_fleet(what, url, None, folder, (), 1, warm=1, generator=generator) as fleet:
        fleet.start()
        assert fleet.wait(lambda: None, 0.02) == [0], fleet.troubles()
    file = read_records(folder / "worker-0.gap")
    assert file.complete
    return records_of(file)


async def of_each(what: Plan, url: str, folder: Path) -> list[list[RequestRecord]]:
    """The same plan issued by each generator, one after the other."""
    return [await asyncio.to_thread(issued, what, url, folder / name, name) for name in sorted(GENERATORS)]


async def test_every_fault_has_the_same_outcome_whoever_asks(tmp_path: Path) -> None:
    what = plan([index * 40 * MS for index in range(len(FAULTS))], timeout_s=1)
    what.bodies[:] = [body(8, fault=fault) for fault in FAULTS]
    async with null_server() as (_, url):
        one, other = await of_each(what, url, tmp_path)
    for fault, mine, theirs in zip(FAULTS, one, other, strict=True):
        kept, also = parse_answer(mine), parse_answer(theirs)
        assert (mine.outcome, mine.status, mine.error) == (theirs.outcome, theirs.status, theirs.error), fault
        # Whether a connection is free again after 40 ms, and so may turn out stale, is the machine's affair.
        either = Flag.REUSED | Flag.RESENT
        assert (mine.flags | either, mine.body) == (theirs.flags | either, theirs.body), fault
        assert mine.flags != theirs.flags or mine.attempt == theirs.attempt, fault
        assert (len(kept.token_ns), kept.error) == (len(also.token_ns), also.error), fault
    assert len({record.outcome for record in one}) >= 6


async def test_requests_that_no_socket_takes_at_once_arrive_whole(tmp_path: Path) -> None:
    what = plan([0, MS])
    what.bodies[:] = [body(8, prompt="word " * 4_000_000)] * 2
    async with null_server() as (server, url):
        records = await of_each(what, url, tmp_path)
        assert len(server.requests) == 4
    assert [record.outcome for each in records for record in each] == [Outcome.OK] * 4


async def test_tls_is_spoken_and_its_failures_are_told(
    tmp_path: Path, certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate.file))
    what = plan([index * 20 * MS for index in range(5)], tokens=200)
    what.bodies[1] = body(200, fault="cut")
    async with null_server(tls=certificate.serving, gap_ms=0.1) as (_, url):
        one, other = await of_each(what, url, tmp_path)
    for mine, theirs in zip(one, other, strict=True):
        assert (mine.outcome, len(parse_answer(mine).token_ns)) == (theirs.outcome, len(parse_answer(theirs).token_ns))
        assert Flag.TLS in mine.flags
        assert Flag.TLS in theirs.flags
    assert [record.outcome for record in one] == [Outcome.OK, Outcome.CUT, *[Outcome.OK] * 3]
    assert len(parse_answer(other[0]).token_ns) == 200


async def test_a_server_that_goes_away_refuses_what_comes_later(tmp_path: Path) -> None:
    what = plan([0, 600 * MS])
    for name in sorted(GENERATORS):
        async with null_server() as (_, url):
            asking = asyncio.ensure_future(asyncio.to_thread(issued, what, url, tmp_path / name, name))
            await eventually(lambda folder=tmp_path / name: answers_in(folder), 20)
        first, second = await asking
        assert (first.outcome, second.outcome) == (Outcome.OK, Outcome.REFUSED), name
        assert second.error == "Connection refused"
        assert second.sent_ns == 0


async def test_a_closed_loop_of_either_keeps_its_users_their_conversations_and_pauses(tmp_path: Path) -> None:
    what = plan([-1] * 40, users=4, think_ns=10 * MS)
    what = dataclasses.replace(what, turns=np.array([1, 2, 3, 1] * 10, np.int64))
    async with null_server() as (_, url):
        for records in await of_each(what, url, tmp_path):
            assert [record.turn for record in records] == [1, 2, 3, 1] * 10
            for before, after in pairwise(records):
                if after.turn > 1:
                    assert after.due_ns == before.end_ns + 10 * MS
            assert [record.index for record in records] == list(range(40))
            ends = {record.end_ns for record in records}
            dues = sorted(record.due_ns for record in records)[4:]
            assert {due - 10 * MS for due in dues} <= ends
            assert len(set(dues)) == 36
