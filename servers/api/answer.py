"""The JSON of answers: server-sent events whose constant parts are encoded once a request, and whole answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from gapmeter.servers.api.ask import Ask

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


class Events:
    """Writes one answer as server-sent events."""

    __slots__ = ("_ask", "_first", "_head", "_mid", "_open", "_prompt_ids")

    def __init__(self, ask: Ask, answer_id: str, served_name: str, created_s: int, prompt_ids: Sequence[int]) -> None:
        kind = "chat.completion.chunk" if ask.chat else "text_completion"
        names = f'{{"id":{_quote(answer_id)},"object":"{kind}","created":{created_s},"model":{_quote(served_name)},'
        self._ask = ask
        self._head = f"data: {names}"
        self._open = '"choices":[{"index":0,' + ('"delta":{"content":' if ask.chat else '"text":')
        self._mid = '},"logprobs":null,"finish_reason":' if ask.chat else ',"logprobs":null,"finish_reason":'
        self._first = True
        self._prompt_ids = prompt_ids

    def piece(self, piece: Piece, usage: Usage) -> str:
        """The event of one piece; the first one of a chat names the role, since every event carries tokens."""
        ask, opening = self._ask, self._open
        more = ""
        if ask.return_token_ids:
            more = f',"token_ids":{_quote(list(piece.ids))}'
            if self._first:
                more += f',"prompt_token_ids":{_quote(list(self._prompt_ids))}'
        if self._first and ask.chat:
            opening = '"choices":[{"index":0,"delta":{"role":"assistant","content":'
        self._first = False
        reason = f'"{piece.finish_reason}"' if piece.finish_reason else "null"
        counts = f',"usage":{usage.encoded()}' if ask.continuous_usage else ""
        return f"{self._head}{opening}{_quote(piece.text)}{self._mid}{reason}{more}}}]{counts}}}\n\n"

    def end(self, usage: Usage) -> str:
        """What follows the last piece."""
        if not self._ask.include_usage:
            return DONE
        return f'{self._head}"choices":[],"usage":{usage.encoded()}}}\n\n{DONE}'


def whole(
    ask: Ask, answer_id: str, served_name: str, created_s: int, prompt_ids: Sequence[int], pieces: Sequence[Piece],
    usage: Usage,
) -> bytes:  # fmt: skip
    """A complete answer that was not streamed."""
    text = "".join(piece.text for piece in pieces)
    shown = f'"message":{{"role":"assistant","content":{_quote(text)}}}' if ask.chat else f'"text":{_quote(text)}'
    more = ""
    if ask.return_token_ids:
        ids = [token for piece in pieces for token in piece.ids]
        more = f',"token_ids":{_quote(ids)},"prompt_token_ids":{_quote(list(prompt_ids))}'
    return (
        f'{{"id":{_quote(answer_id)},"object":"{"chat.completion" if ask.chat else "text_completion"}",'
        f'"created":{created_s},"model":{_quote(served_name)},"choices":[{{"index":0,{shown},"logprobs":null,'
        f'"finish_reason":{_quote(pieces[-1].finish_reason)}{more}}}],"usage":{usage.encoded()}}}'
    ).encode()
