"""From a request's JSON to plain, checked values. Every mistake is one ApiError that names the parameter."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_KINDS = {404: "not_found_error", 503: "overloaded_error"}
_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions
_SEED_RANGE = 1 << 63
# Accepted only where they ask for nothing: the value that means "off", by parameter.
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


class ApiError(Exception):
    """A refusal: HTTP status, a sentence for the user, and the parameter at fault if it is one."""

    def __init__(self, status: int, message: str, param: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def encoded(self) -> str:
        """OpenAI's ``error`` object as JSON."""
        kind = _KINDS.get(self.status) or ("server_error" if self.status >= 500 else "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.status}
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
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise bad(f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise bad("the body must be a JSON object")
    _check_model(value, served_name)
    for name, neutral in _NEUTRAL.items():
        if (given := value.get(name)) is not None and given not in neutral:
            raise bad(f"{name} = {_short(given)} is not supported by this server", name)
    options = _stream_options(value)
    text, ids = (None, None) if chat else _prompt(value)
    most = value.get("max_completion_tokens") if chat else None
    most = most if most is not None else value.get("max_tokens")
    request = CompletionRequest(
        chat=chat,
        messages=_messages(value) if chat else None,
        text=text,
        prompt_ids=ids,
        max_tokens=_whole("max_tokens", most, 1, None if chat else _COMPLETION_TOKENS),
        min_tokens=_whole("min_tokens", value.get("min_tokens"), 0, 0) or 0,
        ignore_eos=_flag(value, "ignore_eos"),
        temperature=_temperature(value),
        seed=_seed(value),
        stops=_stops(value),
        stream=_flag(value, "stream"),
        include_usage=options.get("include_usage") is True,
        continuous_usage=options.get("continuous_usage_stats") is True,
        return_token_ids=_flag(value, "return_token_ids"),
    )
    if request.max_tokens is not None and request.min_tokens > request.max_tokens:
        raise bad(f"min_tokens = {request.min_tokens} is more than max_tokens = {request.max_tokens}", "min_tokens")
    return request


def room(prompt: int, max_tokens: int | None, max_model_len: int) -> int:
    """How many tokens may be generated after ``prompt`` tokens. Raises ApiError when what was asked does not fit."""
    left = max_model_len - prompt
    if left < 1 or (max_tokens or 1) > left:
        wanted = f" and {max_tokens} output tokens" if max_tokens else ""
        raise bad(f"{prompt} prompt tokens{wanted} do not fit into this server's {max_model_len} tokens", "max_tokens")
    return max_tokens or left


def _check_model(value: Mapping[str, Any], served_name: str) -> None:
    model = value.get("model")
    if model is not None and model != served_name:
        raise ApiError(404, f"the model {_short(model)} is not served here; this server has {served_name!r}", "model")


def _messages(value: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    messages = value.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad("messages must be a list with at least one message", "messages")
    return [_message(number, message) for number, message in enumerate(messages)]


def _message(number: int, message: Any) -> dict[str, Any]:
    """A message with its content as text: parts of type text are joined, others refused."""
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
    return {**message, "content": content}


def _prompt(value: Mapping[str, Any]) -> tuple[str | None, Sequence[int] | None]:
    prompt = value.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt, None
    if isinstance(prompt, list) and prompt and all(type(token) is int and token >= 0 for token in prompt):
        return None, prompt
    raise bad("prompt must be one text, or one list of token ids, and not empty", "prompt")


def _stream_options(value: Mapping[str, Any]) -> Mapping[str, Any]:
    options = value.get("stream_options")
    if options is None:
        return {}
    if not isinstance(options, dict):
        raise bad("stream_options must be an object", "stream_options")
    if not value.get("stream"):
        raise bad("stream_options is only allowed with stream = true", "stream_options")
    return options


def _flag(value: Mapping[str, Any], name: str) -> bool:
    given = value.get(name)
    if given is not None and not isinstance(given, bool):
        raise bad(f"{name} must be true or false, not {_short(given)}", name)
    return bool(given)


def _whole(name: str, given: Any, least: int, default: int | None) -> int | None:
    if given is None:
        return default
    if type(given) is not int or given < least:
        raise bad(f"{name} must be a whole number of at least {least}, not {_short(given)}", name)
    return given


def _temperature(value: Mapping[str, Any]) -> float:
    given = value.get("temperature")
    if given is None:
        return 1.0
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given <= 2:
        raise bad(f"temperature must be a number from 0 to 2, not {_short(given)}", "temperature")
    return float(given)


def _seed(value: Mapping[str, Any]) -> int | None:
    given = value.get("seed")
    if given is None:
        return None
    if type(given) is not int or not -_SEED_RANGE <= given < _SEED_RANGE:
        raise bad(f"seed must be a 64-bit whole number, not {_short(given)}", "seed")
    return given


def _stops(value: Mapping[str, Any]) -> tuple[str, ...]:
    given = value.get("stop")
    stops = [given] if isinstance(given, str) else given or []
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise bad("stop must be a text or a list of texts, none of them empty", "stop")
    return tuple(stops)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
