"""The wire client against a server that answers well."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gapmeter.loadgen.client import Client
from gapmeter.loadgen.exchange import Address, Exchange, endpoint
from gapmeter.records import Outcome
from gapmeter.records.request import Flag, RequestRecord
from gapmeter.records.stream import parse_answer
from tests.kit.faults import Uncoded
from tests.kit.loads import PATH, body
from tests.kit.servers import listening, null_server


class Asking:
    """A client, and what became of its requests."""

    def __init__(self, url: str) -> None:
        self.address = Address.of(url)
        self.client = Client(self.address, self._finished)
        self.records: list[RequestRecord] = []
        self._news = asyncio.Event()
        self._asked = 0

    def issue(self, data: bytes | None = None, due_ns: int = 0) -> None:
        name = f"r-{self._asked}"
        exchange = Exchange(self._asked, name, self.address.request(PATH, data or body(), name))
        exchange.due_ns = due_ns or time.monotonic_ns()
        self._asked += 1
        self.client.issue(exchange)

    async def answered(self, count: int) -> list[RequestRecord]:
        async with asyncio.timeout(10):
            while len(self.records) < count:
                await self._news.wait()
                self._news.clear()
        return self.records

    async def ask(self, data: bytes | None = None) -> RequestRecord:
        before = len(self.records)
        self.issue(data)
        return (await self.answered(before + 1))[-1]

    def _finished(self, exchange: Exchange) -> None:
        self.records.append(exchange.collect())
        self._news.set()


@asynccontextmanager
async def asking(url: str, warm: int = 1) -> AsyncIterator[Asking]:
    one = Asking(url)
    if warm:
        await one.client.warm(warm)
    try:
        yield one
    finally:
        one.client.abort("the test is over")
        one.client.close()
        await asyncio.sleep(0)


async def test_an_answer_is_kept_byte_for_byte_with_the_arrival_of_each_piece() -> None:
    async with null_server() as (_, url), asking(url) as one:
        record = await one.ask(body(5))
    script = Uncoded("chat", 8)
    assert record.body == script.start + bytes(script.tokens(0, 4)) + script.end(5)
    assert record.chunk_bytes.sum() == len(record.body)
    assert len(record.chunk_ns) == len(record.chunk_bytes)
    assert len(parse_answer(record).token_ns) == 5
    stamps = [record.due_ns, record.write_ns, record.sent_ns, record.first_byte_ns, *record.chunk_ns, record.end_ns]
    assert stamps == sorted(stamps)
    assert (record.outcome, record.status, record.error) == (Outcome.OK, 200, "")


async def test_one_connection_carries_one_request_after_another() -> None:
    async with null_server() as (server, url), asking(url) as one:
        records = [await one.ask() for _ in range(3)]
        assert server.requests == ["r-0", "r-1", "r-2"]
        assert len(server.connections) == 1
    assert {record.connection for record in records} == {1}
    assert all(record.flags == Flag.REUSED for record in records)
    assert all(record.connect_start_ns == record.connect_end_ns == 0 for record in records)


async def test_a_request_that_finds_no_idle_connection_opens_one_and_its_stamps_say_so() -> None:
    async with null_server() as (server, url), asking(url) as one:
        one.issue()
        one.issue()
        first, second = sorted(await one.answered(2), key=lambda record: record.index)
        assert len(server.connections) == 2
    assert first.flags == Flag.REUSED
    assert second.flags == Flag(0)
    assert second.due_ns <= second.connect_start_ns < second.connect_end_ns <= second.write_ns


async def test_the_connection_used_last_is_reused_first() -> None:
    async with null_server(gap_ms=5) as (_, url), asking(url, warm=3) as one:
        one.issue(body(3))
        one.issue(body(1))
        *_, slow = await one.answered(2)
        assert (await one.ask()).connection == slow.connection


async def test_of_the_connections_opened_ahead_the_first_is_used_first() -> None:
    """A server with fewer threads than these has one for it, and for the last one when another has idled long."""
    async with null_server() as (_, url), asking(url, warm=3) as one:
        for _ in range(3):
            one.issue()
        records = await one.answered(3)
    assert {record.index: record.connection for record in records} == {0: 1, 1: 2, 2: 3}


async def test_many_requests_at_once_each_get_their_own_answer() -> None:
    async with null_server() as (_, url), asking(url, warm=4) as one:
        for count in range(1, 41):
            one.issue(body(count))
        records = await one.answered(40)
    got = {record.index + 1: len(parse_answer(record).token_ns) for record in records}
    assert got == {count: count for count in range(1, 41)}


@pytest.mark.parametrize("form", ["plain", "close_delimited", "split", "close_after", "trailing", "interim"])
async def test_a_complete_answer_is_complete_however_it_is_delivered(form: str) -> None:
    async with null_server(form) as (_, url), asking(url) as one:
        records = [await one.ask(), await one.ask()]
    for record in records:
        answer = parse_answer(record)
        assert (record.outcome, record.status, answer.error, len(answer.token_ns)) == (Outcome.OK, 200, "", 8)
    assert all((Flag.CLOSE_DELIMITED in record.flags) == (form == "close_delimited") for record in records)
    kept = form in ("plain", "split", "interim")
    assert (records[0].connection == records[1].connection) == kept


async def test_an_idle_connection_that_the_server_closes_is_forgotten() -> None:
    async with null_server() as (server, url), asking(url, warm=2) as one:
        for connection in list(server.connections):
            connection.abort()
        await asyncio.sleep(0.1)
        record = await one.ask()
    assert (record.outcome, record.attempt, record.connection) == (Outcome.OK, 0, 3)


@pytest.mark.parametrize(
    ("url", "prefix", "port"),
    [
        ("http://h:81", "", 81),
        ("http://h", "", 80),
        ("https://h", "", 443),
        ("http://h/v1", "", 80),
        ("http://h/v1/", "", 80),
        ("http://h/models/a/v1", "/models/a", 80),
    ],
)
def test_an_address_may_end_in_v1_or_not(url: str, prefix: str, port: int) -> None:
    address = Address.of(url)
    assert (address.prefix, address.port, address.tls is not None) == (prefix, port, url.startswith("https"))


def test_the_port_of_an_ipv6_address_stands_behind_its_brackets() -> None:
    assert (endpoint("::1", 5557), endpoint("host", 5557)) == ("[::1]:5557", "host:5557")


@pytest.mark.parametrize("url", ["h:80", "ftp://h", "http://", "/v1", ""])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="not an address"):
        Address.of(url)


@pytest.mark.parametrize("key", ["a\r\nHost: evil", "a\nb", "ключ"])
def test_a_key_that_would_break_the_request_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="Authorization"):
        Address.of("http://h", key)


def test_a_request_carries_its_id_its_length_and_the_key() -> None:
    head, sent = Address.of("http://[::1]:9/x/v1", "k-1").request(PATH, b"{}", "r-7").split(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == "POST /x/v1/chat/completions HTTP/1.1"
    assert {"Host: [::1]:9", "x-request-id: r-7", "Content-Length: 2", "Authorization: Bearer k-1"} < set(lines)
    assert sent == b"{}"
    assert b"\r\nHost: xn--bcher-kva.example\r\n" in Address.of("http://bücher.example").request(PATH, b"{}", "r")


async def test_a_request_is_sent_when_the_socket_has_taken_its_last_byte() -> None:
    """The server begins to read 80 ms after the request began to arrive, and its buffers hold a fraction of it."""
    data = body(prompt="x" * 40_000_000)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.08)
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(len(data))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        writer.close()

    async with listening(serve) as url, asking(url) as one:
        record = await one.ask(data)
    assert record.outcome is Outcome.OK
    assert record.sent_ns - record.write_ns > 70_000_000
    assert record.handed_ns == record.write_ns, "the load tester had nothing more to do"
    assert record.sent_ns <= record.first_byte_ns
