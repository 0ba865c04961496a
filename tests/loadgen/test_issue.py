"""Open loop and closed loop, over real sockets."""

from __future__ import annotations

import asyncio
import time
from array import array
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from gapmeter.loadgen.exchange import Exchange
from gapmeter.loadgen.generator import Heartbeat
from gapmeter.loadgen.issue import Users, begin, issue
from gapmeter.records import Outcome, Span, read_records
from gapmeter.records.request import FINISHED, ISSUED, RequestRecord
from gapmeter.records.stream import parse_answer
from tests.kit.loads import bed, ids, plan

MS = 1_000_000


async def test_an_open_loop_issues_everything_though_nothing_is_ever_answered(tmp_path: Path) -> None:
    what = plan([index * MS for index in range(100)])
    async with bed(what, tmp_path, "silent") as on:
        t0 = time.monotonic_ns() + 5 * MS
        await issue(on.sender, t0)
        assert sorted(await on.seen(100)) == ids(what)
        assert on.sender.client.in_flight == 100
        assert not on.records()
        issued = on.records(ISSUED)
    assert [record.due_ns for record in issued] == [t0 + index * MS for index in range(100)]


async def test_requests_are_never_early_and_leave_in_the_order_of_the_plan(tmp_path: Path) -> None:
    due = np.cumsum(np.random.default_rng(5).exponential(2 * MS, 80)).astype(int).tolist()
    async with bed(plan(due), tmp_path, warm=80) as on:
        t0 = time.monotonic_ns()
        records = await on.play(t0)
    assert [record.due_ns - t0 for record in records] == due
    sent = [record.write_ns for record in records]
    assert sent == sorted(sent)
    assert all(record.write_ns >= record.due_ns for record in records)
    assert all(record.outcome is Outcome.OK and len(parse_answer(record).token_ns) == 4 for record in records)
    assert all((record.prompt_tokens, record.output_tokens) == (3, 4) for record in records)


async def test_a_stall_does_not_move_what_was_due(tmp_path: Path) -> None:
    """The whole plan is in the past: all of it leaves at once, each with its own due time."""
    async with bed(plan([index * MS for index in range(200)]), tmp_path) as on:
        t0 = time.monotonic_ns() - 1000 * MS
        records = await on.play(t0)
    assert [record.due_ns for record in records] == [t0 + index * MS for index in range(200)]
    assert {record.outcome for record in records} == {Outcome.OK}


async def test_an_empty_plan_is_over_at_once(tmp_path: Path) -> None:
    async with bed(plan([]), tmp_path) as on:
        assert await on.play() == []
        assert on.sender.issued == 0


async def test_stopping_aborts_what_is_in_flight_and_issues_nothing_more(tmp_path: Path) -> None:
    async with bed(plan([0, MS, 2 * MS, 3_600_000 * MS]), tmp_path, "stall") as on:
        issuing = asyncio.ensure_future(issue(on.sender, time.monotonic_ns()))
        await on.seen(3)
        on.sender.stop("enough")
        await issuing
        await on.sender.drain()
        records, issued = on.records(), on.records(ISSUED)
    assert [record.outcome for record in records] == [Outcome.ABORTED] * 3
    assert len(issued) == on.sender.issued == 3


async def test_a_request_whose_time_is_up_ends_as_timed_out_with_what_came(tmp_path: Path) -> None:
    async with bed(plan([0, MS], timeout_s=0.15), tmp_path, "stall", pulse=True) as on:
        records = await on.play()
    assert [record.outcome for record in records] == [Outcome.TIMEOUT] * 2
    assert all(record.end_ns - record.due_ns >= 150 * MS for record in records)
    assert all(len(parse_answer(record).token_ns) == 2 for record in records)
    assert all("0.15 s" in record.error for record in records)


async def test_lag_speed_and_cost_are_recorded_beside_the_requests(tmp_path: Path) -> None:
    async with bed(plan([0, 1100 * MS]), tmp_path) as on:
        t0 = time.monotonic_ns()
        pulse = Heartbeat(on.sender, t0)
        await issue(on.sender, t0)
        pulse.stop_counting()
        pulse.close()
        file = read_records(on.path)
    lag = file.spans[file.spans["code"] == Span.LOOP_LAG]
    assert len(lag) > 10
    assert (lag["start_ns"] >= lag["queued_ns"]).all()
    assert (np.diff(lag["queued_ns"]) % 20_000_000 == 0).all()
    assert (file.spans["code"] == Span.CANARY).sum() >= 1
    usage = [note for note in file.notes if note["type"] == "usage"]
    assert usage[-1]["issued"] == 2
    assert 0 < usage[-1]["cpu_ns"] < usage[-1]["wall_ns"]


def overlapping(records: list[RequestRecord]) -> int:
    """The most requests that were under way at one time."""
    edges = sorted([(r.write_ns, 1) for r in records] + [(r.end_ns, -1) for r in records])
    return int(np.cumsum([step for _, step in edges]).max())


async def test_a_closed_loop_asks_each_body_once_with_no_more_in_flight_than_users(tmp_path: Path) -> None:
    async with bed(plan([-1] * 60, users=5, think_ns=MS), tmp_path) as on:
        records = await on.play()
    assert [record.request_id for record in records] == [f"r-{index:06d}" for index in range(60)]
    assert {record.outcome for record in records} == {Outcome.OK}
    assert overlapping(records) <= 5


async def test_in_a_closed_loop_due_is_the_end_before_plus_the_think_time(tmp_path: Path) -> None:
    async with bed(plan([-1] * 10, users=1, think_ns=3 * MS), tmp_path) as on:
        t0 = time.monotonic_ns()
        records = await on.play(t0)
    assert records[0].due_ns == t0
    assert [record.due_ns for record in records[1:]] == [record.end_ns + 3 * MS for record in records[:-1]]


async def test_a_users_next_request_leaves_before_its_last_answer_is_written_down(tmp_path: Path) -> None:
    async with bed(plan([-1] * 10, users=1), tmp_path) as on:
        await on.play()
        kinds = [code for code, _ in read_records(on.path).blobs]
    assert kinds == [ISSUED, *[ISSUED, FINISHED] * 9, FINISHED]


async def test_users_do_not_start_in_step(tmp_path: Path) -> None:
    async with bed(plan([-1] * 4, users=4, think_ns=40 * MS), tmp_path) as on:
        t0 = time.monotonic_ns()
        records = await on.play(t0)
    assert [record.due_ns - t0 for record in records[:4]] == [0, 10 * MS, 20 * MS, 30 * MS]


async def test_a_closed_loop_that_lasts_a_time_goes_on_beyond_its_planned_bodies(tmp_path: Path) -> None:
    async with bed(plan([-1] * 3, users=2, end_ns=200 * MS), tmp_path) as on:
        t0 = time.monotonic_ns()
        records = await on.play(t0)
    assert len(records) > 6
    assert len({record.request_id for record in records}) == len(records)
    assert all(record.due_ns < t0 + 200 * MS for record in records)
    assert {record.outcome for record in records} == {Outcome.OK}


async def test_a_closed_loop_whose_answers_never_come_is_over_at_its_end(tmp_path: Path) -> None:
    async with bed(plan([-1] * 9, users=2, end_ns=100 * MS), tmp_path, "silent") as on:
        await issue(on.sender, time.monotonic_ns())
        assert on.sender.issued == on.sender.client.in_flight == 2


async def test_a_user_whose_request_failed_waits_before_it_asks_again(tmp_path: Path) -> None:
    async with bed(plan([-1] * 3, users=1), tmp_path, "status_500") as on:
        records = await on.play()
    assert [record.outcome for record in records] == [Outcome.HTTP_5XX] * 3
    assert all(b.due_ns - a.end_ns == 100 * MS for a, b in pairwise(records))


@pytest.mark.parametrize("workers", [1, 3])
async def test_the_index_on_disk_is_the_place_in_the_whole_plan(tmp_path: Path, workers: int) -> None:
    share = plan([index * MS for index in range(9)]).slice(workers - 1, workers)
    async with bed(share, tmp_path) as on:
        records = await on.play()
    assert [record.index for record in records] == list(range(workers - 1, 9, workers))
    assert all(record.request_id == f"r-{record.index:06d}" for record in records)
    assert {record.worker for record in records} == {workers - 1}


async def test_what_falls_due_after_the_stop_is_not_sent(tmp_path: Path) -> None:
    async with bed(plan([0, 40 * MS, 41 * MS]), tmp_path, "stall") as on:
        over = asyncio.Event()
        close = begin(on.sender, time.monotonic_ns(), over.set)
        await on.seen(1)
        on.sender.stop("enough")  # nobody has closed the timer yet
        await asyncio.sleep(0.1)
        close()
        assert on.sender.issued == 1


@pytest.mark.parametrize(
    ("body", "none"),
    [(b"", True), (b"<html>log in", True), (b'{"error": "no"}', True), (b'data: {"error": {}}\n\n', True),
     (b'data: {"choices": []}\n\n', False), (b'{"choices": []}', False),
     (b'data: {"error": null, "choices": []}', False),
     (b'{ "error" : "no"}', True), (b"event: error\ndata: {}", True),
     (b'error: {"code": 503}\n\n', True), (b'{"code": 50000, "msg": "busy"}', True),
     (b'data: {"error_code": 336003, "error_msg": "no quota"}\n\ndata: [DONE]\n\n', True),
     (b": ping\n\n: ping\n\n" + b'data: {"id": 1, "choices": []}\n\n', False)],
)  # fmt: skip
@pytest.mark.parametrize("piece", [4, 1000])
def test_a_200_that_is_plainly_no_answer_is_told_from_one(body: bytes, none: bool, piece: int) -> None:
    exchange = Exchange(0, "r0", b"")
    parts = [body[at : at + piece] for at in range(0, len(body), piece)]
    exchange.keep(array("q", [1] * len(parts)), array("q"), [*range(1, len(parts) + 1)], parts)
    assert exchange.is_plainly_none() is none


def test_users_of_several_processes_do_not_start_in_step() -> None:
    whole = plan([-1] * 8, users=4, think_ns=40 * MS)
    starts = sorted(Users(whole.slice(worker, 2), 0).next_ns or 0 for worker in range(2))
    assert starts == [0, 10 * MS]
