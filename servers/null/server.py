"""The null server: answers prepared as bytes, streams on absolute deadlines, and the log of what left when."""

from __future__ import annotations

import asyncio
import heapq
import json
import socket
import ssl
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, count
from time import monotonic_ns
from typing import Any, cast

import httptools

from gapmeter.records import Outcome, RecordWriter, Span
from gapmeter.records.timer import Timer

WORD = " né世"  # several bytes a character, so that a cut can fall inside one
_ID = "null-0"
_PROMPT_TOKENS = 1  # what usage says of every prompt: none is read
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
_MODELS = b'{"object": "list", "data": [{"id": "null-server", "object": "model", "owned_by": "gapmeter"}]}'


def chunk(data: bytes) -> bytes:
    """One chunk of HTTP's chunked transfer coding."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(value: dict[str, Any] | str) -> bytes:
    """One server-sent event."""
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return f"data: {text}\n\n".encode()


class PreparedAnswer:
    """The stream of one kind of answer (chat or completion), up to ``most`` tokens: k of them are one slice.

    ``start`` is what precedes the first token: the role, for a chat. ``LAST`` is what ends the chunked coding.
    """

    LAST = b"0\r\n\r\n"

    def __init__(self, kind: str, most: int) -> None:
        self._kind = kind
        named = "chat.completion.chunk" if kind == "chat" else "text_completion"
        self._head: dict[str, Any] = {"id": _ID, "object": named, "created": 0, "model": "null"}
        pieces = [self.frame(self.piece(number)) for number in range(1, most + 1)]
        self._buffer = memoryview(b"".join(pieces))
        self._ends = list(accumulate(map(len, pieces), initial=0))
        self.most = most
        self.start = self.frame(self.piece(0)) if kind == "chat" else b""
        self.end = lru_cache(maxsize=1024)(self._end)

    def tokens(self, after: int, upto: int) -> memoryview:
        """The chunks of tokens ``after`` + 1 … ``upto``, none of them the answer's last."""
        return self._buffer[self._ends[after] : self._ends[upto]]

    def whole(self, count: int) -> bytes:
        """The answer as one JSON document, not streamed."""
        text = WORD * count
        said = {"message": {"role": "assistant", "content": text}} if self._kind == "chat" else {"text": text}
        choices = [{"index": 0, "finish_reason": "length", **said}]
        named = self._head["object"].removesuffix(".chunk")
        value = {**self._head, "object": named, "choices": choices, "usage": self.usage(count)}
        return json.dumps(value, ensure_ascii=False).encode()

    def _end(self, count: int) -> bytes:
        """The last token, the usage and the end mark."""
        return b"".join(map(self.frame, self.ending(count))) + self.LAST

    def ending(self, count: int) -> list[bytes]:
        """The events that end the stream."""
        usage = event({**self._head, "choices": [], "usage": self.usage(count)})
        return [self.piece(count, finish="length"), usage, event("[DONE]")]

    def piece(self, number: int, finish: str | None = None) -> bytes:
        """The event of token ``number``; 0 is the one that only names the role."""
        delta = {"content": WORD} if number else {"role": "assistant", "content": ""}
        said = {"delta": delta} if self._kind == "chat" else {"text": WORD}
        choices = [{"index": 0, "finish_reason": finish, **said}]
        return event({**self._head, "choices": choices, "usage": self.usage(number)})

    def usage(self, count: int) -> dict[str, int]:
        return {"prompt_tokens": _PROMPT_TOKENS, "completion_tokens": count, "total_tokens": _PROMPT_TOKENS + count}

    def frame(self, data: bytes) -> bytes:
        """An event as it is sent."""
        return chunk(data)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Token k leaves ``first_ns`` + (k - 1) * ``gap_ns`` after the request's last byte was read.

    With ``places``, no more answers than that are under way: others wait, first come, first served, and that time
    begins when the answer before has ended (0: none waits).
    """

    first_ns: int = 50_000_000
    gap_ns: int = 10_000_000
    most_tokens: int = 4096
    places: int = 0


@dataclass(slots=True, eq=False)
class Stream:
    """One answer under way, of ``count`` tokens."""

    connection: Connection
    prepared: PreparedAnswer
    count: int
    ref: int
    begun_ns: int
    sent: int = 0


class Server:
    """Streams of all connections on one timer. ``records`` None: nothing is logged."""

    def __init__(
        self, schedule: Schedule, records: RecordWriter | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        self.schedule, self.records, self._tls = schedule, records, tls
        self._prepared = {kind: PreparedAnswer(kind, schedule.most_tokens) for kind in ("chat", "completion")}
        self._due: list[tuple[int, int, Stream]] = []
        self._waiting = deque[Stream]()
        self._ticket = count()
        self._armed_ns = 0
        self._timer: Timer | None = None
        self._listener: asyncio.Server | None = None
        self.connections: set[Connection] = set()

    async def listen(self, sock: socket.socket) -> None:
        """Serve on a bound socket until ``close``."""
        loop = asyncio.get_running_loop()
        self._timer = Timer(loop, self._wake)
        self._listener = await loop.create_server(self.connect, sock=sock, backlog=4096, ssl=self._tls)

    def connect(self) -> Connection:
        """What serves a client that has connected."""
        return Connection(self)

    async def close(self) -> None:
        """Stop listening and drop every connection."""
        assert self._listener is not None
        assert self._timer is not None
        self._listener.close()
        for connection in list(self.connections):
            connection.abort()
        await self._listener.wait_closed()
        self._timer.close()

    def begin(self, connection: Connection, body: dict[str, Any], path: bytes, request_id: str, now: int) -> None:
        """A request is here: answer it at once, or put its first token on the timer."""
        if path.endswith(b"/models"):  # other load testers ask what is served
            connection.answer(b"200 OK", _MODELS)
            return
        ref = 0
        if self.records is not None:
            ref = self.records.request(request_id, request_id)
            self.records.span(Span.INGRESS, ref, now, now)
        prepared = self._prepared["chat" if b"chat" in path else "completion"]
        asked = body.get("max_tokens") or body.get("max_completion_tokens") or 16
        tokens = min(max(1, int(asked)), prepared.most)
        if body.get("stream"):
            self.start(Stream(connection, prepared, tokens, ref, now))
        else:
            connection.answer(b"200 OK", prepared.whole(tokens))

    def start(self, stream: Stream) -> None:
        """Send its head, and put its first token on the timer, or have it wait for a place."""
        stream.connection.start(stream)
        if self.schedule.places and len(self._due) >= self.schedule.places:
            self._waiting.append(stream)
        else:
            self._put(stream)
            self._arm()

    def _put(self, stream: Stream) -> None:
        """Its first token on the timer."""
        heapq.heappush(self._due, (stream.begun_ns + self.schedule.first_ns, next(self._ticket), stream))

    def _arm(self) -> None:
        if self._due and self._due[0][0] != self._armed_ns and self._timer is not None:
            self._armed_ns = self._due[0][0]
            self._timer.arm(self._armed_ns)

    def _wake(self) -> None:
        """Send every token that is due, all due tokens of a stream in one write."""
        self._armed_ns = 0
        due, now = self._due, monotonic_ns()
        first_ns, gap_ns = self.schedule.first_ns, self.schedule.gap_ns
        while due and due[0][0] <= now:
            stream = due[0][2]
            upto = stream.count
            if gap_ns:
                upto = min(upto, 1 + (monotonic_ns() - stream.begun_ns - first_ns) // gap_ns)
            if self._send(stream, upto):
                following = stream.begun_ns + first_ns + upto * gap_ns
                heapq.heapreplace(due, (following, next(self._ticket), stream))
            else:
                heapq.heappop(due)
                if self._waiting:
                    after = self._waiting.popleft()
                    after.begun_ns = stream.begun_ns + first_ns + (upto - 1) * gap_ns
                    self._put(after)
        self._arm()

    def _send(self, stream: Stream, upto: int) -> bool:
        """Write tokens up to this one; False when the stream is over."""
        connection = stream.connection
        if connection.stream is not stream:  # the client has gone
            self._log_end(stream, Outcome.ABORTED)
            return False
        if upto < stream.count:
            data: bytes | memoryview = stream.prepared.tokens(stream.sent, upto)
        else:
            data = b"".join((stream.prepared.tokens(stream.sent, upto - 1), stream.prepared.end(upto)))
        begun = monotonic_ns()
        connection.write(data)
        if self.records is not None:
            self.records.span(Span.EGRESS, stream.ref, begun, monotonic_ns(), upto)
        stream.sent = upto
        if upto < stream.count:
            return True
        connection.finish()
        self._log_end(stream, Outcome.OK)
        return False

    def _log_end(self, stream: Stream, outcome: Outcome) -> None:
        if self.records is not None:
            self.records.counts(outcome, stream.ref, _PROMPT_TOKENS, stream.sent, 0, monotonic_ns())


class Connection(asyncio.Protocol):
    """One client connection: reads requests, writes answers."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.stream: Stream | None = None
        self._now = 0
        self._path, self._request_id = b"", ""
        self._body: list[bytes] = []
        self._parser = httptools.HttpRequestParser(self)
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=0)
        self._server.connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self.stream = None
        self._server.connections.discard(self)

    def data_received(self, data: bytes) -> None:
        self._now = monotonic_ns()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.refuse(b"400 Bad Request", "not HTTP")
            self.transport.close()

    def on_url(self, url: bytes) -> None:
        self._path = url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-request-id":
            self._request_id = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        raw, self._body = b"".join(self._body), []
        try:
            body = json.loads(raw or b"{}")
        except ValueError:
            self.refuse(b"400 Bad Request", "the body is not JSON")
            return
        self._server.begin(self, body, self._path, self._request_id, self._now)

    def start(self, stream: Stream) -> None:
        """The head, and the chunk that precedes the first token."""
        self.stream = stream
        self.transport.write(self.head(stream) + stream.prepared.start)

    def head(self, stream: Stream) -> bytes:
        """Of its answer."""
        return _HEAD

    def write(self, data: bytes | memoryview) -> None:
        self.transport.write(data)

    def finish(self) -> None:
        """All of its stream has been written."""
        self.stream = None

    def refuse(self, status: bytes, message: str) -> None:
        self.answer(status, json.dumps({"error": {"message": message}}).encode())

    def answer(self, status: bytes, body: bytes) -> None:
        """A whole JSON answer."""
        head = b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (status, len(body))
        self.transport.write(head + body)

    def abort(self) -> None:
        self.transport.abort()
