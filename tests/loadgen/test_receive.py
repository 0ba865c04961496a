"""When the kernel had the bytes: stamps with every read, on our clock, or none where they could be too early."""

from __future__ import annotations

import asyncio
import select
import socket
import struct
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from gapmeter.loadgen import transport
from gapmeter.loadgen.client import Client
from gapmeter.loadgen.connection import Connection
from gapmeter.loadgen.exchange import Exchange
from gapmeter.loadgen.transport import AsyncioLoop, WallClock, stamp_arrivals
from gapmeter.records.request import Flag, as_read, decode, encode
from gapmeter.records.stream import parse_answer
from tests.kit.loads import body
from tests.kit.servers import null_server
from tests.loadgen.test_client import asking

MS = 1_000_000
SECOND = 1_000_000_000


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a TCP connection; the second asks for the kernel's stamps."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    other.setblocking(False)
    if not stamp_arrivals(other):
        pytest.skip("the kernel's stamps are not to be had here")
    with one, other:
        one.sendall(b"first")  # the kernel begins to stamp a moment after the first socket of a machine has asked
        time.sleep(0.01)
        other.recv(100)
        yield one, other


@pytest.fixture(params=["C", "Python"])
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The read in C where it was built, and the same without it."""
    if request.param == "Python":
        monkeypatch.setattr(transport, "_native", None)
    elif transport._native is None:
        pytest.skip("the C module is not built here")


@pytest.mark.usefixtures("native")
async def test_a_read_has_the_bytes_when_the_kernel_had_them_and_when_we_did(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    one, other = pair
    came: asyncio.Queue[Any] = asyncio.Queue()
    loop = AsyncioLoop(asyncio.get_running_loop())
    read = transport.reader(other, lambda *told: came.put_nowait(told), lambda error: came.put_nowait(error))
    loop.add_reader(other.fileno(), read)
    before = time.time_ns()
    one.sendall(b"abc")
    after, mono = time.time_ns(), time.monotonic_ns()
    async with asyncio.timeout(10):
        data, now, arrived = await came.get()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        one.sendall(b"def")
        one.close()
        rest = [await came.get(), await came.get()]
    loop.remove_reader(other.fileno())
    loop.close()
    assert data == b"abc"
    assert before <= arrived <= after
    assert mono <= now <= time.monotonic_ns()
    assert rest[0][0] == b"def"
    assert isinstance(rest[1], ConnectionResetError)


def test_without_the_c_module_a_connection_has_no_buffer_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "_native", None)
    tracemalloc.start()
    with socket.socket() as sock:
        readers = [transport.reader(sock, print, print) for _ in range(100)]
        held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(readers) == 100 and held < 100 * 1024


@pytest.mark.usefixtures("native")
async def test_a_client_that_is_held_still_knows_when_an_answer_arrived(null: str) -> None:
    """Held from before its first token until 30 ms after that is there; the rest comes meanwhile, in the same read."""
    wall = WallClock()
    async with asking(null) as one:
        await one.ask(body(2))
        (connection,) = one.client._idle
        for _ in range(50):
            one.issue(body(2))
            exchange = next(iter(one.client._flying))
            if await _came(connection, exchange, one.client):  # the head, and the role
                break  # else this machine looked away until the whole answer was there
        _hold(connection.transport)
        await one.answered(len(one.records) + 1)
    record = decode(b"".join(encode(exchange.collect(wall))))
    first = int(parse_answer(record).token_ns[0])
    assert Flag.KERNEL in record.flags
    assert record.chunk_ns[-1] - first > 20 * MS
    assert first in record.arrival_ns
    assert (record.arrival_ns < record.chunk_ns).all()
    assert (record.arrival_ns >= record.write_ns).all()
    assert (np.diff(record.arrival_ns) >= 0).all()
    assert parse_answer(as_read(record)).token_ns[0] == record.chunk_ns[-1]


async def _came(connection: Connection, exchange: Exchange, client: Client) -> bool:
    """Whether something of an answer has come before it is there as a whole."""
    while exchange in client._flying and not connection._stamps:  # noqa: ASYNC110
        await asyncio.sleep(0)
    return exchange in client._flying


def _hold(transport: Any) -> None:
    select.select([transport._fd], [], [], 10)
    time.sleep(0.03)


class SetClock(WallClock):
    """A wall clock that is ``ahead`` of the monotonic one by as much as it is set to, and read ``width`` apart."""

    ahead, width = 7 * SECOND, 40

    def _pair(self) -> tuple[int, int, int]:  # type: ignore[override]
        now = time.monotonic_ns()
        return self.ahead - self.width, self.ahead + self.width, now


def test_an_arrival_is_never_earlier_than_known_and_never_later_than_the_read() -> None:
    wall = SetClock()
    read = time.monotonic_ns() + np.array([1000, 2000, 3000, 4000])
    arrived = read + 7 * SECOND - np.array([300, 500, 20, 90])
    waits = wall.waits(arrived, read, 0)
    assert waits.tolist() == [260, 460, 1, 50]  # 40 ns later than its middle, but at most at the read


def test_the_difference_of_the_clocks_is_known_ever_more_narrowly() -> None:
    wall = SetClock()
    assert wall.width_ns == 80
    wall.width, wall.ahead = 10, 7 * SECOND + 20
    wall.look()
    assert (wall.width_ns, wall.steps) == (20, 0)
    real = WallClock()
    for _ in range(100):
        real.look()
    assert real.steps == 0
    assert 0 <= real.width_ns < 20_000


def test_when_the_wall_clock_is_set_what_was_read_before_keeps_our_own_stamps() -> None:
    wall = SetClock()
    early = time.monotonic_ns()
    wall.ahead = 3 * SECOND
    wall.look()
    late = time.monotonic_ns() + 1000
    read = np.array([early, late])
    assert wall.waits(read + np.array([7, 3]) * SECOND - 500, read, 0).tolist() == [0, 460]
    assert wall.steps == 1


@pytest.mark.parametrize("step_s", [-3600, -3, -0.5, 0.5, 3, 3600])
def test_bytes_that_lay_in_the_kernel_while_the_clock_was_set_keep_our_own_stamp(step_s: float) -> None:
    """Asked 10 s ago; the first piece was stamped before the step and read after it, the second came after it."""
    wall = SetClock()
    stamped = time.monotonic_ns() + 7 * SECOND
    wall.ahead += int(step_s * SECOND)
    wall.look()
    read = time.monotonic_ns() + np.array([1, 2]) * MS
    waits = wall.waits(np.array([stamped, read[1] + wall.ahead - 500]), read, int(read[0]) - 10 * SECOND)
    assert waits[0] <= 1
    assert waits[1] in (460, 1)  # never earlier than the piece before it


@pytest.mark.parametrize(
    ("behind", "from_ns", "expected"),
    [
        ([500, 1600, 200], 0, [460, 1460, 160]),  # the second is older than the first: it came with it, at the latest
        ([500, None, 200], 0, [460, 0, 160]),
        ([None, None, None], 0, [0, 0, 0]),
        ([500, 500, 2_000_000], 1, [0, 0, 0]),  # before the request was sent
    ],
)
def test_a_stamp_that_cannot_be_is_not_taken(behind: list[int | None], from_ns: int, expected: list[int]) -> None:
    wall = SetClock()
    start = time.monotonic_ns() + 1_000_000
    read = start + np.array([0, 1000, 2000])
    arrived = np.array([0 if b is None else at + 7 * SECOND - b for at, b in zip(read.tolist(), behind, strict=True)])
    assert wall.waits(arrived, read, from_ns and start - 1_000_000).tolist() == expected


async def test_where_a_packet_overtook_another_an_answer_has_our_own_stamps() -> None:
    wall = WallClock()
    async with null_server() as (_, url), asking(url) as one:
        await one.ask(body(2))
        (connection,) = one.client._idle
        counts = iter([1, 1])
        connection.disorder = lambda: next(counts)
        kept: list[Any] = []
        for _ in range(2):
            one.issue(body(2))
            kept.append(next(iter(one.client._flying)))
            await one.answered(len(one.records) + 1)
    flags = [Flag.KERNEL in exchange.collect(wall).flags for exchange in kept]
    assert flags == [False, True]
