"""What may be wrong with the null server's answers: each fault has a name, which a request's body may give."""

from __future__ import annotations

import json
import socket
import ssl
import struct
from collections.abc import Callable
from functools import cache
from typing import Any

from gapmeter.servers.null.server import Connection, PreparedAnswer, Schedule, Server, Stream, chunk, event

# Answered at once, instead of a stream.
AT_ONCE = ("status_500", "status_404", "not_http", "close_unanswered", "silent")
# Happen after half of the tokens.
MIDWAY = ("cut", "reset", "half_event", "garbage", "error_event", "stall")
# Complete answers, told in another way.
FORMS = ("plain", "close_delimited", "split", "close_after", "drop_reused", "trailing", "interim", "uncounted")
FAULTS = ("none", *AT_ONCE, *MIDWAY, *FORMS)
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
_REFUSALS = {
    "status_500": (b"500 Internal Server Error", "out of luck"),
    "status_404": (b"404 Not Found", "no such model"),
}


class Uncoded(PreparedAnswer):
    """Without chunked coding."""

    LAST = b""

    def frame(self, data: bytes) -> bytes:
        return data

    def length(self, count: int) -> int:
        """Bytes of a whole answer of ``count`` tokens."""
        return len(self.start) + len(self.tokens(0, count - 1)) + len(self.end(count))


class Uncounted(PreparedAnswer):
    """No chunk says how many tokens there are."""

    def ending(self, count: int) -> list[bytes]:
        last, _, end = super().ending(count)
        return [last, end]

    def piece(self, number: int, finish: str | None = None) -> bytes:
        value = json.loads(super().piece(number, finish).removeprefix(b"data: "))
        del value["usage"]
        return event(value)


class Endless(PreparedAnswer):
    """Its last token is like the others: what ends the stream never comes."""

    LAST = b""

    def ending(self, count: int) -> list[bytes]:
        return [self.piece(count)]


_KINDS: dict[str, type[PreparedAnswer]] = {
    "plain": Uncoded, "close_delimited": Uncoded, "uncounted": Uncounted, **dict.fromkeys(MIDWAY, Endless),
}  # fmt: skip


@cache
def _prepared(kind: type[PreparedAnswer], named: str, most: int) -> PreparedAnswer:
    return kind(named, most)


class Misbehaving(Server):
    """A null server with the fault that a request's body asks for, else with ``fault``."""

    def __init__(self, schedule: Schedule, fault: str = "none", tls: ssl.SSLContext | None = None) -> None:
        super().__init__(schedule, tls=tls)
        self._fault = fault
        self.requests: list[str] = []  # ids in the order of arrival

    def connect(self) -> Connection:
        return _FaultyConnection(self)

    def begin(self, connection: Connection, body: dict[str, Any], path: bytes, request_id: str, now: int) -> None:
        assert isinstance(connection, _FaultyConnection)
        connection.served += 1
        if path.endswith(b"/models"):
            super().begin(connection, body, path, request_id, now)
            return
        self.requests.append(request_id)
        connection.fault = fault = str(body.get("fault", self._fault))
        if fault in AT_ONCE or fault not in FAULTS or (fault == "drop_reused" and connection.served > 1):
            connection.misbehave()
        else:
            super().begin(connection, body, path, request_id, now)

    def start(self, stream: Stream) -> None:
        assert isinstance(stream.connection, _FaultyConnection)
        fault = stream.connection.fault
        if fault in MIDWAY:
            stream.count = max(1, stream.count // 2)
        if fault in _KINDS:
            named = "chat" if stream.prepared is self._prepared["chat"] else "completion"
            stream.prepared = _prepared(_KINDS[fault], named, self.schedule.most_tokens)
        super().start(stream)


class _FaultyConnection(Connection):
    fault = "none"
    served = 0

    def head(self, stream: Stream) -> bytes:
        if isinstance(stream.prepared, Uncoded):
            if self.fault == "plain":
                return _HEAD + b"Content-Length: %d\r\n\r\n" % stream.prepared.length(stream.count)
            return _HEAD + b"Connection: close\r\n\r\n"
        return b"HTTP/1.1 100 Continue\r\n\r\n" * (self.fault == "interim") + super().head(stream)

    def write(self, data: bytes | memoryview) -> None:
        if self.fault == "split":
            for at in range(0, len(data), 7):
                super().write(data[at : at + 7])
        else:
            super().write(data)

    def finish(self) -> None:
        """All that this stream sends has been written; do what its fault wants then."""
        super().finish()
        endings: dict[str, Callable[[], None]] = {
            "close_delimited": self.transport.close,
            "close_after": self.transport.close,
            "cut": self.transport.close,
            "reset": self._reset,
            "half_event": lambda: self._end_with(event("half")[:9]),
            "garbage": lambda: self._end_with(b"data: {{{\n\n\xff\xfe\n\n"),
            "error_event": lambda: self._end_with(event({"error": {"message": "the engine has died", "code": 500}})),
            "trailing": lambda: self.transport.write(b"and more than was asked for"),
        }
        endings.get(self.fault, lambda: None)()

    def misbehave(self) -> None:
        """The faults that come instead of a stream."""
        if self.fault in _REFUSALS:
            self.refuse(*_REFUSALS[self.fault])
        elif self.fault == "not_http":
            self.transport.write(b"220 mail.example ESMTP\r\n")
        elif self.fault in ("close_unanswered", "drop_reused"):
            self.transport.close()
        elif self.fault != "silent":
            self.refuse(b"400 Bad Request", "no such fault")

    def _end_with(self, data: bytes) -> None:
        self.transport.write(chunk(data) + b"0\r\n\r\n")

    def _reset(self) -> None:
        """Close with a reset instead of an end."""
        raw = self.transport.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()
