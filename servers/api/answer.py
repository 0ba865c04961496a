"""One answer: pieces of text as the engine makes them, and the JSON that they become, streamed or whole."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic_ns as now

from gapmeter.servers.api.completion_request import CompletionRequest
from gapmeter.servers.api.stamps import RequestStamps
from gapmeter.servers.api.text import Decoder, StopFinder
from gapmeter.servers.engine_client import Output

DONE = "data: [DONE]\n\n"
_quote = json.dumps


@dataclass(frozen=True, slots=True)
class Piece:
    """What one engine message added to an answer; ``tokens`` counts from its start, this piece included."""

    text: str
    ids: Sequence[int]
    tokens: int
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of an answer so far."""

    prompt: int
    output: int
    cached: int | None

    def encoded(self) -> str:
        """OpenAI's ``usage`` object."""
        details = "null" if self.cached is None else f'{{"cached_tokens":{self.cached}}}'
        return (
            f'{{"prompt_tokens":{self.prompt},"completion_tokens":{self.output},'
            f'"total_tokens":{self.prompt + self.output},"prompt_tokens_details":{details}}}'
        )


class EngineFailed(RuntimeError):
    """The engine gave up on a request that it had accepted; the message is its own."""


class Generation:
    """Turns engine outputs into pieces of text, and wakes the one who waits for them."""

    __slots__ = (
        "_cached", "_decoder", "_error", "_pieces", "_prompt", "_stamps", "_stops", "_waiter", "done", "engine_done",
    )  # fmt: skip

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
            len(output.ids), output.received_ns, output.started_ns, start, now(), output.cached or 0
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


class AnswerJson:
    """What a client is sent: server-sent events whose constant parts are encoded once, or a whole answer."""

    __slots__ = ("_first", "_names", "_open", "_prompt_ids", "_request")

    def __init__(
        self, request: CompletionRequest, answer_id: str, served_name: str, created_s: int, prompt_ids: Sequence[int]
    ) -> None:
        kind = "chat.completion" if request.chat else "text_completion"
        if request.chat and request.stream:
            kind += ".chunk"
        model = _quote(served_name)
        self._names = f'{{"id":{_quote(answer_id)},"object":"{kind}","created":{created_s},"model":{model},'
        self._open = '"choices":[{"index":0,' + ('"delta":{"content":' if request.chat else '"text":')
        self._request = request
        self._prompt_ids = prompt_ids
        self._first = True

    def event(self, piece: Piece, usage: Usage) -> str:
        """The event of one piece; the first one of a chat names the role, since every event carries tokens."""
        request, opening = self._request, self._open
        token_ids = ""
        if request.return_token_ids:
            token_ids = f',"token_ids":{_quote(list(piece.ids))}'
            if self._first:
                token_ids += f',"prompt_token_ids":{_quote(list(self._prompt_ids))}'
        if self._first and request.chat:
            opening = '"choices":[{"index":0,"delta":{"role":"assistant","content":'
        self._first = False
        closing = '},"logprobs":null' if request.chat else ',"logprobs":null'
        reason = f'"{piece.finish_reason}"' if piece.finish_reason else "null"
        counts = f',"usage":{usage.encoded()}' if request.continuous_usage else ""
        return (
            f"data: {self._names}{opening}{_quote(piece.text)}{closing},"
            f'"finish_reason":{reason}{token_ids}}}]{counts}}}\n\n'
        )

    def end(self, usage: Usage) -> str:
        """What follows the last event."""
        if not self._request.include_usage:
            return DONE
        return f'data: {self._names}"choices":[],"usage":{usage.encoded()}}}\n\n{DONE}'

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> str:
        """The complete answer, not streamed."""
        text = _quote("".join(piece.text for piece in pieces))
        shown = f'"message":{{"role":"assistant","content":{text}}}' if self._request.chat else f'"text":{text}'
        token_ids = ""
        if self._request.return_token_ids:
            ids = [token for piece in pieces for token in piece.ids]
            token_ids = f',"token_ids":{_quote(ids)},"prompt_token_ids":{_quote(list(self._prompt_ids))}'
        return (
            f'{self._names}"choices":[{{"index":0,{shown},"logprobs":null,'
            f'"finish_reason":{_quote(pieces[-1].finish_reason)}{token_ids}}}],"usage":{usage.encoded()}}}'
        )
