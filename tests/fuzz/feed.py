"""One request on one connection, answered with given bytes: the client's own code, without a socket."""

from __future__ import annotations

from time import monotonic_ns

from gapmeter.loadgen.client import Pool
from gapmeter.loadgen.connection import Connection
from gapmeter.loadgen.exchange import Address, Exchange
from gapmeter.loadgen.transport import Transport
from gapmeter.records import Outcome
from gapmeter.records.request import NO_FLAG, RequestRecord, decode, encode

ENDED = frozenset({Outcome.OK, Outcome.CUT, Outcome.HTTP_4XX, Outcome.HTTP_5XX, Outcome.MALFORMED, Outcome.TIMEOUT})


class Wire(Transport):
    """A transport that nothing leaves."""

    def __init__(self) -> None:
        pass

    def write(self, data: bytes) -> None:
        pass

    def abort(self) -> None:
        pass


class Silent(Pool):
    """A pool that opens nothing: what it is told to send again waits for ever."""

    def _send_on_new(self, exchange: Exchange) -> None:
        pass


def feed(pieces: list[bytes], *, ends: bool = True) -> RequestRecord:
    """One request on one connection, answered with these pieces; then the peer closes, or time is up."""
    done: list[Exchange] = []
    pool = Silent(Address.of("http://h"), done.append)
    connection = Connection(pool, 1)
    connection.transport = Wire()
    pool._idle.append(connection)
    exchange = Exchange(0, "r-0", b"POST")
    pool.issue(exchange)
    exchange.flags = NO_FLAG  # as on a connection of its own: silence is a failure, not a stale connection
    for piece in pieces:
        connection.received(piece, monotonic_ns(), 0)
        if connection.closed:
            break
    if ends and not connection.closed:
        connection.connection_lost(None)
    elif not done:
        pool.give_up(exchange, Outcome.TIMEOUT, "time is up")
    (finished,) = done
    return decode(b"".join(encode(finished.collect())))
