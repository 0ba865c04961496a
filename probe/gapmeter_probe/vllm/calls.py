"""One HTTP request and the engine requests that it became: how many tokens have come how far."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any


class Generation:
    """One engine request of a call: what has come of it so far, in tokens."""

    __slots__ = ("collector", "finished", "put", "received", "ref", "state", "written")

    def __init__(self, ref: int, state: Any) -> None:
        self.ref = ref
        self.state = state  # the output processor's own, None where it could not be had
        self.collector = getattr(state, "queue", None)  # outputs lie here until the code that formats chunks takes them
        self.received = 0  # tokens that the engine has delivered
        self.put = 0  # of these, put into the collector
        self.written = 0  # of these, gone out in chunks
        self.finished = False

    def taken(self) -> int:
        """Tokens that the formatting code has: all that were put, but for those that still lie in the collector."""
        lying = getattr(self.collector, "output", None)
        if lying is None:
            return self.put
        mine = (output for output in getattr(lying, "outputs", ()) if output.index == self.state.request_index)
        return self.put - sum(len(output.token_ids) for output in mine)


class Call:
    """One HTTP request."""

    __slots__ = ("begun_ns", "client_id", "engine_ids", "generations", "opened", "stages")

    def __init__(self, begun_ns: int, client_id: str) -> None:
        self.begun_ns = begun_ns
        self.client_id = client_id
        self.stages: list[tuple[int, list[int]]] = []  # code, [queued, start, end]
        self.generations: list[Generation] = []
        self.engine_ids: list[str] = []
        self.opened = False  # a chunk with a token has been written

    def carries(self, body: bytes) -> Generation | None:
        """Whose tokens this piece of the answer carries; None when it carries none."""
        if not self.opened and _tokenless(body):
            return None
        for generation in self.generations:
            if generation.taken() > generation.written:
                self.opened = True
                return generation
        return None


current: ContextVar[Call | None] = ContextVar("gapmeter_call", default=None)


def _tokenless(body: bytes) -> bool:
    """An event that opens a chat answer (the role alone), or a comment. A quote inside text would be escaped."""
    return body.startswith(b":") or (body.startswith(b"data: ") and b'"role":' in body)
