"""OpenAI's JSON: from a request's body to plain, checked values, and from pieces of an answer to what is sent.

Every mistake in a request is one ApiError that names the parameter.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gapmeter.scenarios.errors import quoted

DONE = "data: [DONE]\n\n"
_KINDS = {404: "not_found_error", 503: "overloaded_error"}
_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions
_SEED_RANGE = 1 << 63
# Accepted only where they ask for nothing: the values that mean "off", by parameter.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "response_format": ({"type": "text"},),
}
# What other parameters must be: in words, and as a test of the value.
_RULES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "stream": ("true or false", lambda given: isinstance(given, bool)),
    "ignore_eos": ("true or false", lambda given: isinstance(given, bool)),
    "return_token_ids": ("true or false", lambda given: isinstance(given, bool)),
    "stream_options": ("an object", lambda given: isinstance(given, dict)),
    "max_tokens": ("a whole number of at least 1", lambda given: type(given) is int and given >= 1),
    "min_tokens": ("a whole number of at least 0", lambda given: type(given) is int and given >= 0),
    "temperature": ("a number from 0 to 2", lambda given: type(given) in (int, float) and 0 <= given <= 2),
    "seed": ("a 64-bit whole number", lambda given: type(given) is int and -_SEED_RANGE <= given < _SEED_RANGE),
    "stop": (
        "a text or a list of texts, none of them empty",
        lambda given: given != "" and isinstance(given, str | list) and all(isinstance(s, str) and s for s in given),
    ),
}


class ApiError(Exception):
    """A refusal: HTTP status, a sentence for the user, and the parameter at fault if it is one."""

    def __init__(self, status: int, message: str, param: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.retry_after_s = status, param, retry_after_s

    def encoded(self) -> str:
        """OpenAI's ``error`` object as JSON."""
        kind = _KINDS.get(self.status) or ("server_error" if self.status >= 500 else "invalid_request_error")
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.status}
        return json.dumps({"error": error})


def bad(message: str, param: str | None = None) -> ApiError:
    """A mistake in the request (400)."""
    return ApiError(400, message, param)


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """What one request asks for, chat or plain text. Exactly one of ``messages``, ``text``, ``prompt_ids`` is set.

    ``max_tokens`` None means as many as the model has room for.
    """

    chat: bool
    messages: Sequence[dict[str, Any]] | None
    text: str | None
    prompt_ids: Sequence[int] | None
    max_tokens: int | None
    min_tokens: int
    ignore_eos: bool
    temperature: float
    seed: int | None
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool


def parse_request(body: bytes, *, chat: bool, served_name: str) -> CompletionRequest:
    """Check a request's body. Raises ApiError: 400 with the parameter, 404 for a model that is not served."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise bad(f"the body is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise bad("the body must be a JSON object")
    fields = {name: given for name, given in fields.items() if given is not None}
    if not chat:
        fields.setdefault("max_tokens", _COMPLETION_TOKENS)
    elif "max_completion_tokens" in fields:
        fields["max_tokens"] = fields["max_completion_tokens"]
    _check(fields, served_name)
    options, stops = fields.get("stream_options", {}), fields.get("stop", ())
    text, ids = (None, None) if chat else _prompt(fields.get("prompt"))
    return CompletionRequest(
        chat=chat,
        messages=_messages(fields.get("messages")) if chat else None,
        text=text,
        prompt_ids=ids,
        max_tokens=fields.get("max_tokens"),
        min_tokens=fields.get("min_tokens", 0),
        ignore_eos=fields.get("ignore_eos", False),
        temperature=float(fields.get("temperature", 1.0)),
        seed=fields.get("seed"),
        stops=(stops,) if isinstance(stops, str) else tuple(stops),
        stream=fields.get("stream", False),
        include_usage=options.get("include_usage") is True,
        continuous_usage=options.get("continuous_usage_stats") is True,
        return_token_ids=fields.get("return_token_ids", False),
    )


def room(prompt: int, min_tokens: int, max_tokens: int | None, max_model_len: int) -> int:
    """How many tokens may be generated after ``prompt`` tokens. Raises ApiError when what was asked does not fit."""
    left, asked = max_model_len - prompt, max_tokens or min_tokens
    if left < max(asked, 1):
        output = f" and {asked} output tokens" if asked else ""
        param = "max_tokens" if max_tokens or not min_tokens else "min_tokens"
        raise bad(f"{prompt} prompt tokens{output} do not fit into this server's {max_model_len} tokens", param)
    return max_tokens or left


def _check(fields: Mapping[str, Any], served_name: str) -> None:
    model = fields.get("model", served_name)
    if model != served_name:
        raise ApiError(404, f"the model {quoted(model)} is not served here; this server has {served_name!r}", "model")
    for name, given in fields.items():
        if name in _NEUTRAL and given not in _NEUTRAL[name]:
            raise bad(f"{name} = {quoted(given)} is not supported by this server", name)
        if name in _RULES:
            must, holds = _RULES[name]
            if not holds(given):
                raise bad(f"{name} must be {must}, not {quoted(given)}", name)
    if "stream_options" in fields and not fields.get("stream"):
        raise bad("stream_options is only allowed with stream = true", "stream_options")
    least, most = fields.get("min_tokens", 0), fields.get("max_tokens")
    if most is not None and least > most:
        raise bad(f"min_tokens = {least} is more than max_tokens = {most}", "min_tokens")


def _messages(messages: Any) -> list[dict[str, Any]]:
    """The messages with their contents as text: parts of type text are joined, others refused."""
    if not isinstance(messages, list) or not messages:
        raise bad("messages must be a list with at least one message", "messages")
    checked = []
    for number, message in enumerate(messages):
        at = f"messages[{number}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise bad(f"{at} must be an object with a role", "messages")
        content = message.get("content")
        if isinstance(content, list):
            parts = [part.get("text") if isinstance(part, dict) else None for part in content]
            if not all(isinstance(part, str) for part in parts):
                raise bad(f"{at}.content: only parts of type text are supported", "messages")
            content = "".join(map(str, parts))
        if not isinstance(content, str):
            raise bad(f"{at}.content must be text", "messages")
        checked.append({**message, "content": content})
    return checked


def _prompt(prompt: Any) -> tuple[str | None, Sequence[int] | None]:
    """The text, or the token ids, of a plain completion."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt, None
    if isinstance(prompt, list) and prompt and all(type(token) is int and token >= 0 for token in prompt):
        return None, prompt
    raise bad("prompt must be one text, or one list of token ids, and not empty", "prompt")


@dataclass(frozen=True, slots=True)
class Piece:
    """What one engine message added to an answer.

    ``tokens`` counts from the answer's start, this piece included; ``cached`` is how many of the prompt's tokens came
    from the prefix cache (None: unknown).
    """

    text: str
    ids: Sequence[int]
    tokens: int
    cached: int | None
    finish_reason: str | None


class AnswerJson:
    """What a client is sent: server-sent events whose constant parts are encoded once, or a whole answer."""

    __slots__ = ("_first", "_names", "_prompt_ids", "_request")

    def __init__(self, request: CompletionRequest, answer_id: str, served_name: str, prompt_ids: Sequence[int]) -> None:
        chat = "chat.completion.chunk" if request.stream else "chat.completion"
        names = {"id": answer_id, "object": chat if request.chat else "text_completion", "created": int(time.time())}
        self._names = json.dumps({**names, "model": served_name}, separators=(",", ":"))[:-1]
        self._request = request
        self._prompt_ids = prompt_ids
        self._first = True

    def event(self, piece: Piece) -> str:
        """The event of one piece, and after the last one what ends the stream.

        The first one of a chat names the role, since every event carries tokens.
        """
        request, text = self._request, json.dumps(piece.text)
        role = '"role":"assistant",' if self._first else ""
        content = f'"delta":{{{role}"content":{text}}}' if request.chat else f'"text":{text}'
        counts = f',"usage":{self._usage(piece)}' if request.continuous_usage else ""
        choice = self._choice(content, piece.ids, piece.finish_reason, self._first)
        event = f'data: {self._names},"choices":[{choice}]{counts}}}\n\n'
        self._first = False
        if piece.finish_reason is None:
            return event
        if request.include_usage:
            event += f'data: {self._names},"choices":[],"usage":{self._usage(piece)}}}\n\n'
        return event + DONE

    def whole(self, pieces: Sequence[Piece]) -> str:
        """The complete answer, not streamed."""
        text = json.dumps("".join(piece.text for piece in pieces))
        content = f'"message":{{"role":"assistant","content":{text}}}' if self._request.chat else f'"text":{text}'
        ids = [token for piece in pieces for token in piece.ids]
        choice = self._choice(content, ids, pieces[-1].finish_reason, True)
        return f'{self._names},"choices":[{choice}],"usage":{self._usage(pieces[-1])}}}'

    def _choice(self, content: str, ids: Sequence[int], finish_reason: str | None, with_prompt: bool) -> str:
        token_ids = ""
        if self._request.return_token_ids:
            token_ids = f',"token_ids":{json.dumps(list(ids))}'
            if with_prompt:
                token_ids += f',"prompt_token_ids":{json.dumps(list(self._prompt_ids))}'
        reason = f'"{finish_reason}"' if finish_reason else "null"
        return f'{{"index":0,{content},"logprobs":null,"finish_reason":{reason}{token_ids}}}'

    def _usage(self, piece: Piece) -> str:
        prompt, output = len(self._prompt_ids), piece.tokens
        details = "null" if piece.cached is None else f'{{"cached_tokens":{piece.cached}}}'
        return (
            f'{{"prompt_tokens":{prompt},"completion_tokens":{output},'
            f'"total_tokens":{prompt + output},"prompt_tokens_details":{details}}}'
        )
