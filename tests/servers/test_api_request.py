from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapmeter.servers.api.openai import ApiError, parse_request, room

HELLO = {"messages": [{"role": "user", "content": "hello"}]}


def _ask(chat: bool, **fields: Any) -> Any:
    return parse_request(json.dumps(fields).encode(), chat=chat, served_name="m")


# what is wrong, chat or completion, the body's fields, the parameter that the error names
BAD = [
    ("no messages", True, {}, "messages"),
    ("messages that are none", True, {"messages": []}, "messages"),
    ("messages of a wrong kind", True, {"messages": "hello"}, "messages"),
    ("a message without role", True, {"messages": [{"content": "x"}]}, "messages"),
    ("a message without text", True, {"messages": [{"role": "user", "content": None}]}, "messages"),
    ("a picture", True, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ("no prompt", False, {}, "prompt"),
    ("an empty prompt", False, {"prompt": ""}, "prompt"),
    ("two prompts", False, {"prompt": ["a", "b"]}, "prompt"),
    ("a negative token", False, {"prompt": [1, -2]}, "prompt"),
    ("a token that is true", False, {"prompt": [True]}, "prompt"),
    ("no room for output", True, {**HELLO, "max_tokens": 0}, "max_tokens"),
    ("a share of a token", True, {**HELLO, "max_tokens": 1.5}, "max_tokens"),
    ("a number in words", True, {**HELLO, "max_completion_tokens": "9"}, "max_tokens"),
    ("more at least than at most", True, {**HELLO, "max_tokens": 3, "min_tokens": 4}, "min_tokens"),
    ("more at least than a plain completion has", False, {"prompt": "x", "min_tokens": 17}, "min_tokens"),
    ("a negative minimum", True, {**HELLO, "min_tokens": -1}, "min_tokens"),
    ("heat beyond two", True, {**HELLO, "temperature": 2.1}, "temperature"),
    ("heat below zero", True, {**HELLO, "temperature": -0.1}, "temperature"),
    ("heat that is true", True, {**HELLO, "temperature": True}, "temperature"),
    ("no number at all", True, {**HELLO, "temperature": float("nan")}, "temperature"),
    ("a seed of 65 bits", True, {**HELLO, "seed": 1 << 64}, "seed"),
    ("a seed in words", True, {**HELLO, "seed": "1"}, "seed"),
    ("an empty stop", True, {**HELLO, "stop": [""]}, "stop"),
    ("a stop of a wrong kind", True, {**HELLO, "stop": 3}, "stop"),
    ("a flag that is a number", True, {**HELLO, "ignore_eos": 1}, "ignore_eos"),
    ("stream in words", True, {**HELLO, "stream": "yes"}, "stream"),
    ("stream options without a stream", True, {**HELLO, "stream_options": {"include_usage": True}}, "stream_options"),
    ("stream options of a wrong kind", True, {**HELLO, "stream": True, "stream_options": 1}, "stream_options"),
    ("two answers", True, {**HELLO, "n": 2}, "n"),
    ("a nucleus", True, {**HELLO, "top_p": 0.9}, "top_p"),
    ("log probabilities", True, {**HELLO, "logprobs": True}, "logprobs"),
    ("tools", True, {**HELLO, "tools": [{"type": "function"}]}, "tools"),
    ("another model", True, {**HELLO, "model": "gpt"}, "model"),
]  # fmt: skip


@pytest.mark.parametrize(("chat", "fields", "param"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_a_mistake_names_its_parameter(chat: bool, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        _ask(chat, **fields)
    error = json.loads(caught.value.encoded())["error"]
    assert caught.value.status == (404 if param == "model" else 400)
    assert error["param"] == param and error["code"] == caught.value.status and error["message"]


@given(st.one_of(st.binary(max_size=30), st.from_type(type(None)).map(lambda _: b"[" * 100_000)))
def test_whatever_the_body_is_it_is_read_or_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_request(body, chat=True, served_name="m")
    assert caught.value.status == 400


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
_NAMES = st.sampled_from(sorted({row[3] for row in BAD} | {"max_completion_tokens", "logit_bias", "echo", "suffix"}))


@given(st.booleans(), st.dictionaries(_NAMES, _JSON, max_size=6))
def test_fields_of_any_kind_are_read_or_refused_never_a_crash(chat: bool, fields: dict[str, Any]) -> None:
    try:
        asked = _ask(chat, **fields)
    except ApiError as error:
        status = error.status
    else:
        status = 400 if asked.chat is chat else 500
    assert 400 <= status < 500


def test_defaults_are_those_of_openai() -> None:
    chat, completion = _ask(True, **HELLO), _ask(False, prompt="x")
    assert (chat.max_tokens, completion.max_tokens) == (None, 16)
    assert chat.temperature == 1.0 and chat.seed is None and not chat.stream and not chat.ignore_eos


def test_values_that_ask_for_nothing_are_accepted() -> None:
    asked = _ask(True, **HELLO, n=1, top_p=1.0, presence_penalty=0, logprobs=False, tools=[], stop=None, model="m")
    assert asked.stops == ()


def test_content_in_parts_is_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert _ask(True, messages=[{"role": "user", "content": parts}]).messages == [{"role": "user", "content": "ab"}]


def test_a_prompt_of_token_ids_stays_as_it_is() -> None:
    for prompt in ([1, 2, 3], [[1, 2, 3]]):
        asked = _ask(False, prompt=prompt)
        assert asked.text is None and asked.prompt_ids == [1, 2, 3]


@pytest.mark.parametrize(
    ("prompt", "least", "most", "given"),
    [(10, 0, 5, 5), (10, 0, None, 10), (10, 10, None, 10), (19, 1, 1, 1), (1, 0, 19, 19)],
)
def test_output_gets_the_room_that_is_left(prompt: int, least: int, most: int | None, given: int) -> None:
    assert room(prompt, least, most, 20) == given


@pytest.mark.parametrize(
    ("prompt", "least", "most", "param"),
    [
        (20, 0, None, "max_tokens"),
        (10, 0, 11, "max_tokens"),
        (10, 11, 11, "max_tokens"),
        (30, 0, 1, "max_tokens"),
        (10, 11, None, "min_tokens"),
    ],
)
def test_what_does_not_fit_is_refused(prompt: int, least: int, most: int | None, param: str) -> None:
    with pytest.raises(ApiError, match="do not fit") as refused:
        room(prompt, least, most, 20)
    assert refused.value.param == param
