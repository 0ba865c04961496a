"""Streams that stall and requests that are asked again, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gapmeter.loadgen.exchange import Address, Exchange
from gapmeter.loadgen.issue import issue
from gapmeter.loadgen.plan import Plan
from gapmeter.loadgen.sender import Sender, Stalls, is_retryable
from gapmeter.records import Outcome
from gapmeter.records.request import ISSUED, RequestRecord, decode, encode
from gapmeter.records.stream import parse_answer
from gapmeter.records.timer import Timer
from gapmeter.servers.launch import free_port
from gapmeter.servers.null.server import PreparedAnswer, chunk
from tests.kit.faults import Uncoded
from tests.kit.loads import FILE, bed, plan, records_of, sender
from tests.kit.servers import listening
from tests.kit.wait import eventually

MS = 1_000_000
_HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Done:
    """What a sender has left: its records by the time they ended, and the ids that the server has read."""

    finished: list[RequestRecord]
    issued: list[RequestRecord]
    asked: list[str]
    sender: Sender


async def issue_all(what: Plan, path: Path, *faults: str, first_ms: float = 1) -> Done:
    """The whole plan against a server with these faults, one an attempt."""
    async with bed(what, path, *faults, first_ms=first_ms, warm=2, pulse=True) as on:
        return Done(await on.play(), on.records(ISSUED), on.server.requests, on.sender)


def asking(retries: int, due_ns: Sequence[int] = (0,), pause_ms: int = 30, **more: Any) -> Plan:
    return replace(plan(list(due_ns), **more), retries=retries, retry_pause_ns=pause_ms * MS)


async def test_a_stream_that_brings_no_token_for_too_long_has_stalled_and_keeps_what_came(tmp_path: Path) -> None:
    done = await issue_all(replace(plan([0, MS, 2 * MS], tokens=8), stall_ns=200 * MS), tmp_path, "stall")
    assert [record.outcome for record in done.finished] == [Outcome.STALLED] * 3
    for record in done.finished:
        assert record.error == "no token for 0.2 s"
        assert len(parse_answer(record).token_ns) == 4
        silence = record.end_ns - int(record.chunk_ns[-1])
        assert 200 * MS <= silence < 1000 * MS


async def test_a_slow_stream_has_not_stalled_however_long_it_takes(tmp_path: Path) -> None:
    done = await issue_all(replace(plan([0], tokens=400), stall_ns=150 * MS), tmp_path, "none")
    assert [record.outcome for record in done.finished] == [Outcome.OK]
    assert done.finished[0].end_ns - done.finished[0].due_ns > 300 * MS


async def test_waiting_for_the_first_token_is_no_stall_though_the_role_has_come(tmp_path: Path) -> None:
    done = await issue_all(replace(plan([0]), stall_ns=60 * MS), tmp_path, "none", first_ms=400)
    (record,) = done.finished
    assert record.outcome is Outcome.OK
    assert parse_answer(record).token_ns[0] - record.chunk_ns[0] > 300 * MS, "the role came long before"


async def test_without_a_limit_a_stream_that_hangs_is_a_time_out(tmp_path: Path) -> None:
    done = await issue_all(plan([0], timeout_s=0.3), tmp_path, "stall")
    assert [record.outcome for record in done.finished] == [Outcome.TIMEOUT]


@pytest.mark.parametrize(
    "alive",
    [
        [b": still here\n\n"],
        [b": still", b" here\n\n"],
        [b'event: ping\ndata: {"type": "ping"}\n\n'],
        [b'data: {"choices": [{"index": 0, "delta": {"content": ""}}], "still here": 1}\n\n'],
    ],
    ids=["comments", "comments in pieces", "pings", "chunks without text"],
)
async def test_what_keeps_a_connection_alive_is_no_token(tmp_path: Path, alive: list[bytes]) -> None:
    script = PreparedAnswer("chat", 8)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(_HEAD + script.start + script.tokens(0, 3))
            while not writer.is_closing():
                for piece in alive:
                    await asyncio.sleep(0.03)
                    writer.write(chunk(piece))
                    await writer.drain()
        writer.close()
        over.set()

    over = asyncio.Event()
    what = replace(plan([0]), stall_ns=200 * MS)
    async with listening(serve) as url, sender(what, url, tmp_path, warm=1, pulse=True) as asking:
        await issue(asking, time.monotonic_ns())
        async with asyncio.timeout(10):
            await asking.drain()
            await over.wait()
    (record,) = records_of(tmp_path)
    assert record.outcome is Outcome.STALLED
    assert record.body.count(b"".join(alive)) >= 3


async def test_a_stream_whose_texts_are_cut_into_pieces_has_not_stalled(tmp_path: Path) -> None:
    answer = PreparedAnswer("chat", 8)
    whole = answer.start + answer.tokens(0, 8)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(_HEAD)
            for at in range(0, len(whole), 16):  # no read holds a text as a whole
                writer.write(whole[at : at + 16])
                await writer.drain()
                await asyncio.sleep(0.005)
        writer.close()

    async with (
        listening(serve) as url,
        sender(replace(plan([0]), stall_ns=150 * MS), url, tmp_path, pulse=True) as asking,
    ):
        await issue(asking, time.monotonic_ns())
        async with asyncio.timeout(10):
            await asking.drain()
    (record,) = records_of(tmp_path)
    assert record.end_ns - int(record.chunk_ns[0]) > 300 * MS
    assert record.outcome is not Outcome.STALLED and len(parse_answer(record).token_ns) == 8


def test_a_request_is_not_kept_for_a_check_that_comes_long_after_its_answer() -> None:
    stalls, exchange = Stalls(3600_000 * MS), Exchange(0, "r-0", b"")
    before = sys.getrefcount(exchange)
    stalls.watch(exchange)
    assert sys.getrefcount(exchange) == before
    del exchange
    assert stalls.find(7200_000 * MS) == []


async def test_nothing_is_asked_again_unless_told_to(tmp_path: Path) -> None:
    done = await issue_all(plan([0]), tmp_path, "status_500")
    assert [(record.outcome, record.retry) for record in done.finished] == [(Outcome.HTTP_5XX, 0)]
    assert done.asked == ["r-000000"]


async def test_every_attempt_is_a_record_with_an_id_and_a_due_time_of_its_own(tmp_path: Path) -> None:
    done = await issue_all(asking(3), tmp_path, "status_500", "status_500", "none")
    assert done.asked == ["r-000000", "r-000000.1", "r-000000.2"]
    assert [record.request_id for record in done.issued] == done.asked
    assert [(r.outcome, r.retry, r.index) for r in done.finished] == [
        (Outcome.HTTP_5XX, 0, 0), (Outcome.HTTP_5XX, 1, 0), (Outcome.OK, 2, 0),
    ]  # fmt: skip
    first, second, third = done.finished
    assert second.due_ns == first.end_ns + 30 * MS
    assert third.due_ns == second.end_ns + 60 * MS, "the pause doubles"
    assert second.write_ns >= second.due_ns
    assert (done.sender.issued, done.sender.finished) == (1, 1), "one request, three attempts"


@pytest.mark.parametrize(
    ("fault", "attempts"),
    [
        ("status_500", 3), ("close_unanswered", 3), ("silent", 3),
        ("status_404", 1), ("cut", 1), ("reset", 1), ("stall", 1), ("not_http", 1), ("none", 1),
    ],
)  # fmt: skip
async def test_only_what_had_brought_nothing_is_asked_again_and_no_more_often_than_told(
    fault: str, attempts: int, tmp_path: Path
) -> None:
    done = await issue_all(asking(2, pause_ms=5, timeout_s=0.3), tmp_path, fault)
    assert [record.retry for record in done.finished] == list(range(attempts))


async def test_a_server_that_refuses_is_asked_again(tmp_path: Path) -> None:
    async with sender(asking(2, pause_ms=5), f"http://127.0.0.1:{free_port()}", tmp_path, warm=0) as refused:
        await issue(refused, time.monotonic_ns())
        await refused.drain()
    assert [(r.outcome, r.retry) for r in records_of(tmp_path)] == [(Outcome.REFUSED, k) for k in range(3)]


async def test_a_closed_loop_s_user_waits_until_the_last_attempt_has_ended(tmp_path: Path) -> None:
    what = asking(1, [-1] * 3, users=1)
    done = await issue_all(what, tmp_path, "status_500", "none")
    assert done.asked == ["r-000000", "r-000000.1", "r-000001", "r-000001.1", "r-000002", "r-000002.1"]
    by_id = {record.request_id: record for record in done.finished}
    assert by_id["r-000001"].due_ns >= by_id["r-000000.1"].end_ns


async def test_stopping_asks_nothing_again_and_ends_at_once(tmp_path: Path) -> None:
    async with bed(asking(5, pause_ms=60_000), tmp_path, "status_500", warm=2, pulse=True) as on:
        await issue(on.sender, time.monotonic_ns())
        await eventually(lambda: not on.sender.client.in_flight)
        assert on.sender.awaited == 1
        drained = asyncio.ensure_future(on.sender.drain())
        await asyncio.sleep(0.02)
        on.sender.stop("enough")
        async with asyncio.timeout(5):
            await drained
    assert [record.outcome for record in records_of(tmp_path)] == [Outcome.HTTP_5XX]


@pytest.mark.parametrize(("status", "again"), [(400, False), (404, False), (408, True), (425, True), (429, True)])
def test_of_refusals_only_those_that_say_not_now_are_asked_again(status: int, again: bool) -> None:
    failed = Exchange(0, "r-0", b"")
    failed.status, failed.parts = status, [b'{"error": {}}']
    failed.end(Outcome.HTTP_4XX, "", 1)
    assert is_retryable(failed) is again


def test_an_attempt_differs_from_the_one_before_in_its_id_alone() -> None:
    data = Address.of("http://h").request("/v1/x", b'{"x-request-id: r-7\\r\\n": 1}', "r-7")
    third = Exchange(7, "r-7", data, prompt_tokens=3, output_tokens=4).again().again()
    assert (third.request_id, third.index, third.retry, third.prompt_tokens, third.output_tokens) == (
        "r-7.2", 7, 2, 3, 4,
    )  # fmt: skip
    assert third.data == data.replace(b"x-request-id: r-7\r\n", b"x-request-id: r-7.2\r\n", 1)


def test_a_record_carries_how_often_the_request_had_failed_before() -> None:
    record = RequestRecord(index=0, request_id="r-0.2", due_ns=5, retry=2)
    assert decode(b"".join(encode(record))).retry == 2


@pytest.mark.parametrize(("timeout_s", "stall_ms", "first_ms"), [(30, 0, 1000), (30, 200, 200), (0.3, 0, 250)])
async def test_users_go_on_behind_the_end_mark_of_a_body_that_the_server_holds_open(
    tmp_path: Path, timeout_s: float, stall_ms: int, first_ms: int
) -> None:
    """Also with the next turn of their conversation."""
    answer = Uncoded("chat", 4)
    asked = list[str]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            asked.append((await reader.readuntil(b"\r\n\r\n")).decode())
            writer.write(_HEAD + chunk(answer.start + bytes(answer.tokens(0, 3)) + answer.end(4)))
            await reader.read()
        writer.close()

    what = plan([-1] * 6, users=1, timeout_s=timeout_s)
    what = replace(what, turns=np.array([1, 2, 3] * 2, np.int64), stall_ns=stall_ms * MS)
    async with listening(serve) as url, sender(what, url, tmp_path, warm=1, pulse=True) as one:
        begun = time.monotonic()
        await issue(one, time.monotonic_ns())
        await one.drain()
        assert time.monotonic() - begun < 5
    records = records_of(tmp_path / FILE)
    assert [(record.outcome, record.turn) for record in records] == [(Outcome.OK, turn) for turn in (1, 2, 3) * 2]
    assert len(asked) == 6
    assert len({record.connection for record in records}) == 6
    first, *others = (record.end_ns - int(record.chunk_ns[-1]) for record in records)
    assert first >= first_ms * MS
    assert max(others) < 190 * MS


async def test_the_timer_of_what_is_sent_again_leaves_nothing_that_only_a_collector_frees() -> None:
    """A generator's is off, and each pause in which anything waits has a timer of its own."""
    loop = asyncio.get_running_loop()
    Timer(loop, lambda: None).close()
    gc.collect()
    gc.disable()
    try:
        for _ in range(9):
            Timer(loop, lambda: None).close()
        assert gc.collect() == 0
    finally:
        gc.enable()
