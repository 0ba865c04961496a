"""Every way in which an answer can fail, over real sockets: each has its outcome, and keeps what came."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
import ssl
import time

import pytest

from gapmeter.loadgen.generator import Exit, not_connected
from gapmeter.records import Outcome
from gapmeter.records.request import Flag
from gapmeter.records.stream import parse_answer
from gapmeter.servers.launch import free_port
from gapmeter.servers.null.server import chunk
from tests.kit.loads import body
from tests.kit.servers import Certificate, answering, listening, null_server
from tests.kit.streams import ENDED_EARLY, NOT_JSON, chat, sse
from tests.kit.wait import limited
from tests.loadgen.test_client import asking


@pytest.mark.parametrize(
    ("fault", "outcome", "status", "tokens", "error"),
    [
        ("status_500", Outcome.HTTP_5XX, 500, 0, '{"error": {"message": "out of luck"}}'),
        ("status_404", Outcome.HTTP_4XX, 404, 0, '{"error": {"message": "no such model"}}'),
        ("not_http", Outcome.MALFORMED, 0, 0, "not HTTP"),
        ("close_unanswered", Outcome.CUT, 0, 0, "the connection was closed"),
        ("cut", Outcome.CUT, 200, 4, "the connection was closed"),
        ("reset", Outcome.CUT, 200, 4, "the connection was closed"),
        ("silent", Outcome.TIMEOUT, 0, 0, "too late"),
        ("stall", Outcome.TIMEOUT, 200, 4, "too late"),
    ],
)
async def test_a_failed_answer_has_its_outcome_and_keeps_what_came_of_it(
    fault: str, outcome: Outcome, status: int, tokens: int, error: str
) -> None:
    async with null_server(fault) as (_, url), asking(url) as one:
        one.issue()
        if outcome is Outcome.TIMEOUT:
            await asyncio.sleep(0.2)
            one.client.expire(time.monotonic_ns(), "too late")
        (record,) = await one.answered(1)
    assert (record.outcome, record.status) == (outcome, status)
    assert record.error.startswith(error)
    assert len(parse_answer(record).token_ns) == tokens
    assert record.end_ns >= record.sent_ns > 0


async def test_what_is_no_answer_has_no_status_of_the_answer_before_it_on_the_same_connection() -> None:
    async with null_server() as (_, url), asking(url) as one:
        before = await one.ask(body(2, fault="status_404"))
        record = await one.ask(body(2, fault="not_http"))
    assert (before.status, before.connection) == (404, record.connection)
    assert Flag.REUSED in record.flags
    assert (record.outcome, record.status) == (Outcome.MALFORMED, 0)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("half_event", ENDED_EARLY),
        ("garbage", NOT_JSON),
        ("error_event", "the server said: the engine has died"),
    ],
)  # fmt: skip
async def test_an_answer_whole_on_the_wire_but_wrong_inside_says_so_when_it_is_read(fault: str, error: str) -> None:
    async with null_server(fault) as (_, url), asking(url) as one:
        record = await one.ask()
    answer = parse_answer(record)
    assert record.outcome is Outcome.OK
    assert answer.error.startswith(error)
    assert len(answer.token_ns) == 4


@pytest.mark.parametrize(
    ("answer", "outcome", "status", "entity"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc", Outcome.CUT, 200, b"abc"),
        (b"HTTP/1.1 200 OK\r\nContent-Le", Outcome.CUT, 200, b""),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n", Outcome.CUT, 200, b"abc"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", Outcome.MALFORMED, 200, b""),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nd\r\ndata: [DONE]\n\r\n",
            Outcome.OK,
            200,
            b"data: [DONE]\n",
        ),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n17\r\ndata: [DONE]\n\n: ping\n\n\n\r\n",
            Outcome.OK,
            200,
            b"data: [DONE]\n\n: ping\n\n\n",
        ),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\ndata: [DO\r\n", Outcome.CUT, 200, b"data: [DO"),
        (b"HTTP/1.1 200 OK\r\n\r\nuntil the end", Outcome.OK, 200, b"until the end"),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n{}", Outcome.OK, 200, b"{}"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", Outcome.OK, 204, b""),
        (b"HTTP/1.1 302 Found\r\nLocation: /\r\nContent-Length: 0\r\n\r\n", Outcome.HTTP_4XX, 302, b""),
        (b"HTTP/1.1 101 Up\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n", Outcome.MALFORMED, 101, b""),
        (b"\x16\x03\x01\x00\x02", Outcome.MALFORMED, 0, b""),
        (b"", Outcome.CUT, 0, b""),
    ],
)
async def test_raw_answers_are_told_apart(answer: bytes, outcome: Outcome, status: int, entity: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.write_eof()
        await reader.read()
        writer.close()

    async with listening(serve) as url, asking(url, warm=0) as one:
        record = await one.ask()
    assert (record.outcome, record.status, record.body) == (outcome, status, entity)
    assert record.attempt == 0


_ANSWER = b"".join(sse(chat("a", 1), chat("b", 2, finish_reason="length"), "[DONE]"))
_CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
_MANY = b"x" * (1 << 23)


@pytest.mark.parametrize(
    ("pieces", "reason", "outcome"),
    [
        ((_CHUNKED, chunk(b"data: " + _MANY), chunk(_MANY)), "the answer is longer than 64 MB", Outcome.MALFORMED),
        ((_CHUNKED, chunk(b"data: 1\n\n" * 900_000)), "the answer is longer than 64 MB", Outcome.MALFORMED),
        ((b"HTTP/1.1 200 OK\r\nX: ", _MANY), "the answer's head is longer than 1 MB", Outcome.MALFORMED),
        ((b"HTTP/1.1 100 Continue\r\n\r\n" * 9000,), "the answer's head is longer than 1 MB", Outcome.MALFORMED),
        ((_CHUNKED, chunk(_ANSWER), chunk(b": ping\n\n" * 900_000)), "the server held the body open", Outcome.OK),
    ],
    ids=["a line", "events", "a header", "interim answers", "comments behind the end mark"],
)
async def test_a_server_that_sends_for_ever_is_left_before_it_fills_the_memory(
    pieces: tuple[bytes, ...], reason: str, outcome: Outcome
) -> None:
    with answering(*pieces, endless=True) as url:
        async with asking(url) as one:
            record = await one.ask()
            later = await one.ask()  # on another connection
    assert (record.outcome, later.outcome) == (outcome, outcome)
    assert record.error.startswith(reason)
    assert len(record.body) < 65 << 20


async def test_nobody_listening_is_refused() -> None:
    async with asking(f"http://127.0.0.1:{free_port()}", warm=0) as one:
        record = await one.ask()
    assert record.outcome is Outcome.REFUSED
    assert record.sent_ns == record.write_ns == 0
    assert record.connect_start_ns > 0
    assert "refused" in record.error.lower()


async def test_files_that_this_machine_lacks_for_connections_ahead_are_no_fault_of_the_address(
    null: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with asking(null, warm=0) as one:
        taken = {int(fd) for fd in os.listdir("/proc/self/fd")}
        most = sorted(set(range(len(taken) + 4)) - taken)[3]  # three numbers below it are free
        full = pytest.raises(OSError, match="Too many open files")
        with limited(resource.RLIMIT_NOFILE, most), full as failed:
            await one.client.warm(20)
    assert not_connected(failed.value) == Exit.NO_CONNECTION
    assert "this process may open no more files" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "left_with", "why"),
    [
        (errno.EADDRNOTAVAIL, Exit.NO_CONNECTION, "no port left to connect from"),
        (errno.ECONNREFUSED, Exit.UNREACHABLE, "Connection refused"),
    ],
)
def test_only_a_server_that_takes_no_connections_is_unreachable(
    code: int, left_with: Exit, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not_connected(OSError(code, os.strerror(code))) == left_with
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    "junk",
    [
        b"HTTP/1.1 999 WAT\r\n\r\n\0",
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nno",
        b"\0\1",
        b"HTTP/1.1 500 ",
    ],
    ids=["half an answer", "another answer", "no answer", "half a head"],
)
async def test_what_comes_behind_a_whole_answer_changes_nothing_of_it(junk: bytes) -> None:
    with answering(_CHUNKED + chunk(_ANSWER) + b"0\r\n\r\n" + junk) as url:
        async with asking(url) as one:
            record = await one.ask(body(2))
    assert (record.outcome, record.status, record.error) == (Outcome.OK, 200, "")
    assert record.body == _ANSWER


@pytest.mark.parametrize(
    "reads",
    [
        [[_ANSWER]], [[_ANSWER], [b": ping\n\n"]], [[_ANSWER + b": ping\n\n"]], [[_ANSWER[:-5], _ANSWER[-5:]]],
        [[_ANSWER[:-5]], [_ANSWER[-5:]], *[[], [], [], [], [], [], [], [], [], [], [b":\n\n"]] * 7],
        [[_ANSWER[:-8]], *([bytes([byte])] for byte in _ANSWER[-8:])],
    ],
    ids=["whole", "a comment behind", "a comment beside", "in two chunks", "cut, comments behind", "byte by byte"],
)  # fmt: skip
async def test_an_answer_whose_body_the_server_holds_open_ends_in_a_second_and_later_ones_sooner(
    reads: list[list[bytes]],
) -> None:
    """Wherever its end mark is cut, and whatever comes behind it."""
    first_read, *others = [b"".join(map(chunk, pieces)) for pieces in reads]
    with answering(_CHUNKED + first_read, *others, every_s=0.002) as url:
        async with asking(url) as one:
            for too_soon_ms, late_enough_ms in (300, 800), (-1000, 20):
                one.issue(body(2))
                await asyncio.sleep(0.3)
                one.client.leave_unended(time.monotonic_ns() + too_soon_ms * 1_000_000)
                assert one.client.in_flight == 1
                one.client.leave_unended(time.monotonic_ns() + late_enough_ms * 1_000_000)
                assert one.client.in_flight == 0
    first, second = one.records
    assert [record.outcome for record in one.records] == [Outcome.OK] * 2
    assert first.body == second.body == b"".join(b"".join(pieces) for pieces in reads)
    assert "held the body open" in first.error
    assert second.connection != first.connection


async def test_a_token_that_reads_like_an_end_mark_ends_no_answer() -> None:
    token = b"".join(sse(chat("[DONE]", 1)))
    with answering(_CHUNKED + chunk(token)) as url:
        async with asking(url) as one:
            one.issue(body(2))
            await asyncio.sleep(0.1)
            one.client.leave_unended(time.monotonic_ns() + 2_000_000_000)
            assert one.client.in_flight == 1


async def test_a_connection_that_never_opens_times_out() -> None:
    """A listener whose queue is full lets further connections hang."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        with socket.create_connection(listener.getsockname()), socket.socket() as second:
            second.setblocking(False)
            second.connect_ex(listener.getsockname())
            async with asking(f"http://127.0.0.1:{listener.getsockname()[1]}", warm=0) as one:
                one.issue()
                await asyncio.sleep(0.1)
                assert not one.records
                one.client.expire(time.monotonic_ns(), "too late")
                (record,) = await one.answered(1)
    assert (record.outcome, record.connect_end_ns, record.sent_ns) == (Outcome.TIMEOUT, 0, 0)
    assert record.error.endswith(": the server had not accepted the connection")


async def test_a_stale_connection_is_replaced_once_and_the_record_says_so() -> None:
    async with null_server("drop_reused") as (server, url), asking(url) as one:
        first, second = await one.ask(), await one.ask()
        assert server.requests == ["r-0", "r-1", "r-1"]
    assert (first.outcome, first.attempt, first.flags) == (Outcome.OK, 0, Flag.REUSED)
    assert (second.outcome, second.attempt, second.flags) == (Outcome.OK, 1, Flag.RESENT)
    assert second.connection != first.connection
    assert second.connect_start_ns > second.due_ns


async def test_a_request_that_is_dropped_on_its_new_connection_too_is_not_sent_a_third_time() -> None:
    async with null_server("close_unanswered") as (server, url), asking(url) as one:
        record = await one.ask()
        assert server.requests == ["r-0", "r-0"]
    assert (record.outcome, record.attempt) == (Outcome.CUT, 1)


async def test_the_time_that_a_dead_connection_cost_is_no_lateness_of_the_load_tester(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gapmeter.loadgen.connection.STALE_NS", 60_000_000_000)
    async with null_server("silent") as (server, url), asking(url) as one:
        one.issue()
        for times in (1, 2):
            while len(server.requests) < times:  # noqa: ASYNC110 - the server tells nobody
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            for connection in list(server.connections):
                connection.abort()
        (record,) = await one.answered(1)
    assert (record.outcome, record.attempt) == (Outcome.CUT, 1)
    assert record.due_ns <= record.connect_start_ns
    assert record.connect_end_ns - record.connect_start_ns >= 100_000_000
    assert record.sent_ns >= record.connect_end_ns


async def test_a_request_that_the_server_had_for_long_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gapmeter.loadgen.connection.STALE_NS", 50_000_000)
    async with null_server("silent") as (server, url), asking(url) as one:
        one.issue()
        await asyncio.sleep(0.15)
        for connection in list(server.connections):
            connection.abort()
        (record,) = await one.answered(1)
        assert server.requests == ["r-0"]
    assert (record.outcome, record.attempt) == (Outcome.CUT, 0)


async def test_aborting_ends_everything_in_flight_and_nothing_else() -> None:
    async with null_server("stall") as (_, url), asking(url, warm=2) as one:
        await one.ask(body(fault="none"))
        for _ in range(3):
            one.issue()
        one.client.abort("enough")
        records = await one.answered(4)
        assert one.client.in_flight == 0
    assert [record.outcome for record in records] == [Outcome.OK, *[Outcome.ABORTED] * 3]
    assert all(record.error.startswith("enough") for record in records[1:])


async def test_only_requests_that_were_due_before_the_limit_expire() -> None:
    async with null_server("silent") as (_, url), asking(url, warm=3) as one:
        one.issue()
        limit = time.monotonic_ns()
        one.issue()
        one.client.expire(limit, "too late")
        assert [record.index for record in one.records] == [0]
        assert one.client.in_flight == 1


async def test_what_was_due_first_expires_first_though_it_was_issued_last() -> None:
    async with null_server("silent") as (_, url), asking(url, warm=3) as one:
        limit = time.monotonic_ns()
        one.issue()
        one.issue(due_ns=limit - 1)
        one.client.expire(limit, "too late")
        assert [record.index for record in one.records] == [1]
        assert one.client.in_flight == 1


async def test_tls_carries_requests_and_its_handshake_is_part_of_connecting(
    certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate.file))
    async with null_server(tls=certificate.serving) as (_, url), asking(url, warm=0) as one:
        records = [await one.ask(), await one.ask()]
    assert [record.outcome for record in records] == [Outcome.OK, Outcome.OK]
    assert [record.flags for record in records] == [Flag.TLS, Flag.TLS | Flag.REUSED]
    assert records[0].connect_end_ns > records[0].connect_start_ns > 0
    assert len(parse_answer(records[1]).token_ns) == 8


async def test_a_certificate_that_nobody_vouches_for_is_a_tls_failure(
    certificate: Certificate, capsys: pytest.CaptureFixture[str]
) -> None:
    async with (
        null_server(tls=certificate.serving) as (_, url),
        asking(url.replace("localhost", "127.0.0.1"), warm=0) as one,  # the only address that is tried
    ):
        record = await one.ask()
        with pytest.raises(ssl.SSLError) as failed:
            await one.client.warm(1)
    assert record.outcome is Outcome.TLS
    assert not_connected(failed.value) == Exit.UNREACHABLE
    assert record.error == capsys.readouterr().err.rstrip() == "the TLS handshake failed: CERTIFICATE_VERIFY_FAILED"


async def test_a_server_that_does_not_speak_tls_is_a_tls_failure() -> None:
    async with null_server() as (_, url), asking(url.replace("http:", "https:"), warm=0) as one:
        record = await one.ask()
    assert record.outcome is Outcome.TLS


async def test_an_answer_without_a_body_says_nothing_of_the_next_one_on_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gapmeter.loadgen.connection.STALE_NS", 50_000_000)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(len(body()))
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.15)
        writer.close()

    async with listening(serve) as url, asking(url) as one:
        first, second = await one.ask(), await one.ask()
    assert (first.status, first.connection) == (204, second.connection)
    assert (second.outcome, second.status, second.flags) == (Outcome.CUT, 0, Flag.REUSED)
