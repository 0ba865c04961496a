"""One answer in the making: fed by the engine on the event loop, read by the request's handler."""

from __future__ import annotations

import asyncio
from collections import deque

from gapmeter.servers.api.answer import Piece, Usage
from gapmeter.servers.api.engine import Output
from gapmeter.servers.api.stamps import RequestStamps, now
from gapmeter.servers.api.text import Decoder, StopFinder


class EngineFailed(RuntimeError):
    """The engine gave up on a request that it had accepted; the message is its own."""


class Generation:
    """Turns engine outputs into pieces of text, and wakes the one who waits for them."""

    __slots__ = (
        "_cached",
        "_decoder",
        "_error",
        "_pieces",
        "_prompt",
        "_stamps",
        "_stops",
        "_waiter",
        "done",
        "engine_done",
    )

    def __init__(self, decoder: Decoder, stops: tuple[str, ...], prompt_tokens: int, stamps: RequestStamps) -> None:
        self._decoder = decoder
        self._stops = StopFinder(stops) if stops else None
        self._prompt = prompt_tokens
        self._stamps = stamps
        self._pieces: deque[Piece] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._cached: int | None = None
        self._error = ""
        self.done = False
        self.engine_done = False  # the engine knows, too

    def deliver(self, output: Output) -> None:
        """Take one engine output; later ones than the last are ignored (the engine may not know yet that it was)."""
        reason = output.finish_reason
        self.engine_done = self.engine_done or reason is not None
        if self.done:
            return
        start = now()
        text = self._decoder.push(output.ids, last=reason is not None)
        if self._stops:
            text, found = self._stops.push(text, last=reason is not None)
            reason = "stop" if found else reason
        self._cached = self._cached if output.cached is None else output.cached
        self.done = reason is not None
        self._error = (output.error or "the engine gave up on this request") if reason == "error" else ""
        self._stamps.detokenized(
            len(output.ids), output.received_ns, output.started_ns or start, start, now(), output.cached or 0
        )
        self._pieces.append(Piece(text, output.ids, self._stamps.received, reason))
        if self._waiter and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> Piece:
        """The next piece, awaited if there is none yet. Raises EngineFailed in place of a last one that is an error."""
        while not self._pieces:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        piece = self._pieces.popleft()
        if piece.finish_reason == "error":
            raise EngineFailed(self._error)
        return piece

    @property
    def failed(self) -> bool:
        """The engine gave up on it."""
        return bool(self._error)

    def usage(self, tokens: int) -> Usage:
        """Counts when ``tokens`` have been given out."""
        return Usage(self._prompt, tokens, self._cached)
