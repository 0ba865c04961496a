"""One request on its way: where it goes, the bytes that are sent, and its record as it grows."""

from __future__ import annotations

import ssl
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import numpy as np

from gapmeter.loadgen.transport import WallClock
from gapmeter.records import Outcome
from gapmeter.records.request import Flag, RequestRecord, traceparent

if TYPE_CHECKING:
    from gapmeter.loadgen.connection import Connection

_NO_READS: array[int] = array("q")
_NO_MARKS: list[int] = []
_NO_PARTS: list[bytes] = []


@dataclass(frozen=True, slots=True)
class Address:
    """One server. ``prefix`` is put before every path: the address's own path, less a final ``/v1``, which paths have.

    ``tls`` checks certificates against the system's authorities, or those that SSL_CERT_FILE names.
    """

    host: str
    port: int
    tls: ssl.SSLContext | None
    prefix: str
    api_key: str | None = None

    @classmethod
    def of(cls, url: str, api_key: str | None = None) -> Address:
        """Raises ValueError for what is not an http or https address, or for a key that would break the request."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not an address like http://127.0.0.1:8000")
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise ValueError("the header 'Authorization' cannot be sent: it has characters that HTTP does not allow")
        try:
            host = parts.hostname if parts.hostname.isascii() else parts.hostname.encode("idna").decode()
        except UnicodeError as error:
            raise ValueError(f"{url!r} has a host that no name can be") from error
        secure = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        tls = ssl.create_default_context() if secure else None
        return cls(host, parts.port or (443 if secure else 80), tls, prefix, api_key)

    def request(self, path: str, body: bytes, request_id: str, *, traced: bool = False) -> bytes:
        """A whole POST request, ready for one write; ``traced``: with a traceparent header that its id decides."""
        named = endpoint(self.host, self.port).removesuffix(":443" if self.tls else ":80")  # as other clients name it
        lines = [
            f"POST {self.prefix}{path} HTTP/1.1",
            f"Host: {named}",
            "User-Agent: gapmeter",
            "Accept: text/event-stream, application/json",
            "Accept-Encoding: identity",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            f"x-request-id: {request_id}",
            *((f"traceparent: {traceparent(request_id)}",) if traced else ()),
            *((f"Authorization: Bearer {self.api_key}",) if self.api_key else ()),
        ]
        return "\r\n".join([*lines, "", ""]).encode() + body


def endpoint(host: str, port: int) -> str:
    """Both as addresses have them: an IPv6 one in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Exchange(RequestRecord):
    """The record of a request that is still under way, and the bytes to send.

    ``carrier`` is the connection that carries it, or what cancels the opening of one, None before and after. What was
    read lies in ``stamps``, ``marks`` and ``parts`` until ``collect`` makes the record's chunks and body of it.
    ``own_index`` is its index in this process's slice of the plan. Another try of a request that has failed is another
    exchange.
    """

    __slots__ = ("__weakref__", "arrived", "carrier", "data", "done", "marks", "own_index", "parts", "stamps")

    def __init__(
        self, index: int, request_id: str, data: bytes, *, own_index: int = 0, worker: int = 0,
        prompt_tokens: int = 0, output_tokens: int = 0, turn: int = 0, retry: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(
            index=index, request_id=request_id, worker=worker, prompt_tokens=prompt_tokens,
            output_tokens=output_tokens, turn=turn, retry=retry,
        )  # fmt: skip
        self.data, self.done, self.own_index = data, False, own_index
        self.carrier: Connection | Callable[[], object] | None = None
        self.stamps, self.arrived, self.marks, self.parts = _NO_READS, _NO_READS, _NO_MARKS, _NO_PARTS

    def keep(self, stamps: array[int], arrived: array[int], marks: list[int], parts: list[bytes]) -> None:
        """Copy what a connection gathered: read i was at ``stamps[i]``, after it the body had ``marks[i]`` parts.

        ``arrived[i]``: the kernel's stamp of what it brought, CLOCK_REALTIME, 0 for none; empty: of no read.
        """
        if stamps:
            self.first_byte_ns = stamps[0]
            self.stamps, self.arrived, self.marks, self.parts = stamps[:], arrived[:], marks[:], parts[:]

    def end(self, outcome: Outcome, error: str, at_ns: int) -> None:
        """Note how it ended, and when."""
        self.outcome, self.error, self.end_ns, self.done = outcome, error, at_ns, True
        self.carrier = None

    def is_plainly_none(self) -> bool:
        """Whether what came is no answer at first sight: it has no choices, but is nothing, a page, or an error."""
        return all(b'"choices"' not in b"".join(parts) for parts in (self.parts[:2], self.parts))

    def collect(self, wall: WallClock | None = None) -> RequestRecord:
        """Make the record's chunks and body of what was read; reads that brought no body (the head) are left out.

        ``wall`` puts the kernel's stamps on our clock; without it there are only our own. Takes some 50 µs for
        an answer of 64 chunks: not for the moment at which it ends.
        """
        if self.parts:
            total = list(accumulate(map(len, self.parts), initial=0))
            ends = np.array([total[mark] for mark in self.marks], np.int64)
            sizes = ends.copy()
            sizes[1:] -= ends[:-1]
            brought = sizes.nonzero()[0]
            read = np.frombuffer(self.stamps, np.int64)
            self.chunk_ns = read[brought]
            if wall is not None and self.arrived:
                waits = wall.waits(np.frombuffer(self.arrived, np.int64), read, self.write_ns)[brought]
                if waits.any():
                    self.chunk_wait_ns = waits
                    self.flags |= Flag.KERNEL
            self.chunk_bytes = sizes[brought].astype(np.uint32)
            self.body = b"".join(self.parts)
        return self

    def again(self) -> Exchange:
        """Another try of a request that has failed, under an id of its own: ``ID.1``, ``ID.2`` and so on."""
        first = self.request_id.removesuffix(f".{self.retry}") if self.retry else self.request_id
        name = f"{first}.{self.retry + 1}"
        end = self.data.index(b"\r\n\r\n") + 2  # of the head's last line
        head = self.data[:end]
        for old, new in zip(_lines(self.request_id), _lines(name), strict=True):
            head = head.replace(old, new)
        return Exchange(
            self.index, name, head + self.data[end:], own_index=self.own_index, worker=self.worker,
            prompt_tokens=self.prompt_tokens, output_tokens=self.output_tokens, turn=self.turn, retry=self.retry + 1,
        )  # fmt: skip


def _lines(request_id: str) -> tuple[bytes, bytes]:
    """The lines of a head that the id decides, with the ends of the lines around them."""
    named = f"x-request-id: {request_id}", f"traceparent: {traceparent(request_id)}"
    first, second = (f"\r\n{line}\r\n".encode() for line in named)
    return first, second
