"""Streams that stall and requests that are asked again, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from gapmeter.loadgen.exchange import Address, Exchange
from gapmeter.loadgen.issue import issue
from gapmeter.loadgen.plan import Plan
from gapmeter.loadgen.session import Session, is_retryable
from gapmeter.loadgen.worker import Heartbeat
from gapmeter.records import Outcome, RecordWriter, read_records
from gapmeter.records.request import ISSUED, RequestRecord, decode, encode
from gapmeter.records.stream import parse_answer
from gapmeter.servers.null.server import Connection, PreparedAnswer, Schedule, Server, chunk
from tests.loadgen.null import plan

MS = 1_000_000


class Flaky(Server):
    """Attempt k of every request meets fault k; those after the last meet the last."""

    def __init__(self, faults: Sequence[str], schedule: Schedule) -> None:
        super().__init__(schedule)
        self._faults = faults

    def begin(self, connection: Connection, body: dict[str, Any], path: bytes, request_id: str, now: int) -> None:
        attempt = int(request_id.partition(".")[2] or 0)
        fault = self._faults[min(attempt, len(self._faults) - 1)]
        super().begin(connection, body | {"fault": fault}, path, request_id, now)


@dataclass(frozen=True, slots=True)
class Done:
    """What a session has left: its records by the time they ended, and the ids that the server has read."""

    finished: list[RequestRecord]
    issued: list[RequestRecord]
    asked: list[str]
    session: Session


@contextlib.asynccontextmanager
async def running(what: Plan, url: str, path: Path, warm: int = 2) -> AsyncIterator[Session]:
    writer = RecordWriter(path / "worker-0.gap", {"role": "generator"})
    session = Session(what, Address.of(url), writer)
    await session.client.warm(warm)
    pulse = Heartbeat(session, time.monotonic_ns())
    try:
        yield session
    finally:
        session.stop("the test is over")
        pulse.close()
        session.client.close()
        writer.close()
        await asyncio.sleep(0.01)


async def issue_all(what: Plan, path: Path, *faults: str, first_ms: float = 1) -> Done:
    """The whole plan against a server with these faults, one an attempt."""
    sock = socket.create_server(("127.0.0.1", 0))
    server = Flaky(faults, Schedule(first_ns=int(first_ms * MS), gap_ns=MS))
    await server.listen(sock)
    try:
        async with running(what, f"http://127.0.0.1:{sock.getsockname()[1]}", path) as session:
            await issue(session, time.monotonic_ns())
            async with asyncio.timeout(20):
                await session.drain()
            file = read_records(path / "worker-0.gap")
            return Done(file.requests(), file.requests(ISSUED), server.requests, session)
    finally:
        await server.close()
        await asyncio.sleep(0)


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


async def test_comments_that_keep_a_connection_alive_are_no_tokens(tmp_path: Path) -> None:
    script = PreparedAnswer("chat", 1, 8, coded=True)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + script.start + script.tokens(0, 3))
            while not writer.is_closing():
                await asyncio.sleep(0.03)
                writer.write(chunk(b": still here\n\n"))
                await writer.drain()
        writer.close()
        over.set()

    over = asyncio.Event()
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listener:
        url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        async with running(replace(plan([0]), stall_ns=200 * MS), url, tmp_path, warm=1) as session:
            await issue(session, time.monotonic_ns())
            async with asyncio.timeout(10):
                await session.drain()
                await over.wait()
    (record,) = read_records(tmp_path / "worker-0.gap").requests()
    assert record.outcome is Outcome.STALLED
    assert record.body.count(b"still here") >= 3


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
    assert (done.session.issued, done.session.finished) == (1, 1), "one request, three attempts"


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
    sock = socket.create_server(("127.0.0.1", 0))
    server = Server(Schedule(first_ns=MS, gap_ns=MS))
    await server.listen(sock)
    async with running(asking(2, pause_ms=5), f"http://127.0.0.1:{sock.getsockname()[1]}", tmp_path) as session:
        await server.close()
        await asyncio.sleep(0.05)
        await issue(session, time.monotonic_ns())
        await session.drain()
    assert [(record.outcome, record.retry) for record in read_records(tmp_path / "worker-0.gap").requests()] == [
        (Outcome.REFUSED, k) for k in range(3)
    ]


async def test_a_closed_loop_s_user_waits_until_the_last_attempt_has_ended(tmp_path: Path) -> None:
    what = asking(1, [-1] * 3, users=1)
    done = await issue_all(what, tmp_path, "status_500", "none")
    assert done.asked == ["r-000000", "r-000000.1", "r-000001", "r-000001.1", "r-000002", "r-000002.1"]
    by_id = {record.request_id: record for record in done.finished}
    assert by_id["r-000001"].due_ns >= by_id["r-000000.1"].end_ns


async def test_stopping_asks_nothing_again_and_ends_at_once(tmp_path: Path) -> None:
    sock = socket.create_server(("127.0.0.1", 0))
    server = Flaky(["status_500"], Schedule(first_ns=MS, gap_ns=MS))
    await server.listen(sock)
    what = asking(5, pause_ms=60_000)
    async with running(what, f"http://127.0.0.1:{sock.getsockname()[1]}", tmp_path) as session:
        await issue(session, time.monotonic_ns())
        async with asyncio.timeout(10):
            while session.client.in_flight:  # noqa: ASYNC110 (nobody tells when an attempt fails)
                await asyncio.sleep(0.005)
        assert session.awaited == 1
        drained = asyncio.ensure_future(session.drain())
        await asyncio.sleep(0.02)
        session.stop("enough")
        async with asyncio.timeout(5):
            await drained
    await server.close()
    assert [record.outcome for record in read_records(tmp_path / "worker-0.gap").requests()] == [Outcome.HTTP_5XX]


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
