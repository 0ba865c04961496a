"""From bytes and their arrival to tokens."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapmeter.records.stream import events, parse_answer
from tests.kit.streams import ENDED_EARLY, NOT_JSON, chat, comparable, role, sse, usage_only, wire

FULL = sse(
    role(0),
    chat("Grü", 1),
    chat("ße, ", 3),
    chat("", 4),
    chat("世界", 5, finish_reason="length"),
    usage_only(5),
    "[DONE]",
)
COMPLETION = sse(
    {"choices": [{"index": 0, "text": " a", "finish_reason": None}], "usage": {"completion_tokens": 1}},
    {"choices": [{"index": 0, "text": " b", "finish_reason": "stop"}], "usage": {"completion_tokens": 2}},
    "[DONE]",
)


def test_tokens_are_the_differences_of_the_running_usage_and_a_role_chunk_is_none() -> None:
    answer = parse_answer(wire(FULL))
    assert answer.token_ns.tolist() == [20, 30, 30, 40, 50]
    assert answer.chunk_tokens.tolist() == [1, 2, 1, 1]
    assert answer.chunk_ns.tolist() == [20, 30, 40, 50]
    assert (answer.prompt_tokens, answer.output_tokens, answer.counted) == (7, 5, "usage")
    assert (answer.first_text_ns, answer.text_chars, answer.finish_reason) == (20, 9, "length")
    assert answer.done
    assert answer.error == ""


def test_a_token_whose_text_is_withheld_arrives_before_the_first_visible_text() -> None:
    answer = parse_answer(wire(sse(role(0), chat("", 1), chat("é", 2, finish_reason="stop"), "[DONE]")))
    assert answer.token_ns.tolist() == [20, 30]
    assert answer.first_text_ns == 30


@pytest.mark.parametrize("stream", [FULL, COMPLETION, sse(role(), chat("a"), chat("b"), usage_only(2), "[DONE]")])
@given(data=st.data())
def test_a_stream_cut_into_any_pieces_reads_as_it_does_whole(stream: list[bytes], data: st.DataObject) -> None:
    end = data.draw(st.sampled_from([b"\n", b"\r\n", b"\r"]))
    body = b"".join(stream).replace(b"\n", end)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(body) - 1), max_size=60)))
    pieces = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    record = wire(pieces)
    assert comparable(parse_answer(record)) == comparable(parse_answer(wire(stream)))
    # Each event is stamped with the piece that brought the byte which completed it: the first of its blank line.
    needed, at = [], 0
    for event in stream:
        at += len(event.replace(b"\n", end))
        needed.append(at - (2 if end == b"\r\n" else 1))
    ends = np.cumsum([len(piece) for piece in pieces])
    assert [stamp for stamp, _ in events(record)] == [10 * (int((ends > byte).argmax()) + 1) for byte in needed]


@pytest.mark.parametrize(
    ("body", "want"),
    [
        (b"data: one\n\n", ["one"]),
        (b"\xef\xbb\xbfdata: one\n\n", ["one"]),
        (b"data:one\r\rdata:  two\r\r", ["one", " two"]),
        (b"data: one\r\n\r\ndata: two\r\n\r\n", ["one", "two"]),
        (b": keep-alive\n\ndata: one\n\n: again\n\n", ["one"]),
        (b"event: message\nid: 4\nretry: 9\ndata: one\n\n", ["one"]),
        (b"data: one\ndata: two\ndata\n\n", ["one\ntwo\n"]),
        (b"data: one\n\n\n\n\ndata: two\n\n", ["one", "two"]),
        (b"data: one\n\ndata: half", ["one"]),
        (b"data: one\n\ndata: [DONE]", ["one", "[DONE]"]),
        (b"data: one\n\ndata: [DONE]\n", ["one", "[DONE]"]),
        (b"data: a\xffb\n\n", ["a\ufffdb"]),
        (b"dataset: one\n\n", []),
        (b"data:\n\ndata: \n\ndata\n\nevent: ping\ndata:\n\ndata: one\n\n", ["one"]),
        (b"", []),
    ],
)
def test_server_sent_events_are_read_as_the_standard_says(body: bytes, want: list[str]) -> None:
    assert [data for _, data in events(wire([body] if body else []))] == want


@pytest.mark.parametrize(
    ("stream", "counted", "tokens", "output"),
    [
        (sse(role(), chat("a"), chat("b"), "[DONE]"), "unmeasured", [1, 1], None),
        (sse(role(), chat("a"), chat("b"), usage_only(9), "[DONE]"), "unmeasured", [1, 1], 9),
        # A usage that comes only with the last content chunk is a sum, not a running total.
        (sse(role(), chat("a"), chat("b", 9, finish_reason="stop"), "[DONE]"), "unmeasured", [1, 1], 9),
        (sse(role(), chat("a", token_ids=[1, 2]), chat("b", token_ids=[3]), "[DONE]"), "token_ids", [2, 1], 3),
        (sse(chat("a", 1), chat("b"), chat("c", 4), "[DONE]"), "usage", [1, 3], 4),
        (sse(chat("a", 2), chat("b", 1), chat("c", 3), "[DONE]"), "usage", [2, 1], 3),
        (sse(chat(None, tool_calls=[]), chat("x"), "[DONE]"), "unmeasured", [1], None),
        # A usage beside the role, or beside every chunk, that does not grow with the text, is no running total either.
        (sse(role(0), chat("a"), chat("b"), usage_only(2), "[DONE]"), "unmeasured", [1, 1], 2),
        (sse(role(0), chat("a"), chat("b"), chat(None, 2, finish_reason="stop")), "unmeasured", [1, 1], 2),
        (sse(role(0), chat("a", 0), chat("b", 0), usage_only(2), "[DONE]"), "unmeasured", [1, 1], 2),
        # One that counts the role: nothing of the answer has come with it. Where it says the end, all has.
        (sse(role(1), chat("a", 2), chat("b", 3), "[DONE]"), "usage", [2, 1], 3),
        (sse(role(1), chat("a", 1), chat("b", 2), "[DONE]"), "usage", [1, 1], 2),
        (sse({**role(1), "choices": [{**role()["choices"][0], "finish_reason": "stop"}]}, "[DONE]"), "usage", [1], 1),
        (sse(role(), chat("a", 1), chat("b", 1), chat("c", 1), usage_only(3), "[DONE]"), "unmeasured", [1, 1, 1], 3),
        (sse(chat("a"), chat("b"), chat("c", 3), chat("d", 4), "[DONE]"), "unmeasured", [1, 1, 1, 1], 4),
        (sse(chat("a", 1), chat("b", 2), chat("c"), usage_only(3), "[DONE]"), "unmeasured", [1, 1, 1], 3),
        # One that runs ahead of the text: its tokens would end before the answer does.
        (sse(chat("a", 3), chat("b", 4), chat("c", 4), "[DONE]"), "unmeasured", [1, 1, 1], 4),
        (sse(*(chat("a", k) for k in (1, 2, 3, 4, 1, 2))), "unmeasured", [1] * 6, 2),
        (sse(chat("a", 8, finish_reason="stop"), "[DONE]"), "usage", [8], 8),
        # Two choices, each with a total of its own, or both with one that is common.
        (sse(chat("a", 1), chat("b", 1, index=1), chat("c", 3, index=1), chat("d", 2), usage_only(5), "[DONE]"),
         "usage", [1, 1, 2, 1], 5),
        (sse(chat("a", 1), chat("b", 2, index=1), chat("c", 4, index=1), chat("d", 5), usage_only(5), "[DONE]"),
         "usage", [1, 1, 2, 1], 5),
    ],
    ids=["no usage", "usage at the end", "usage on the last chunk", "ids", "gap", "falling usage", "no text",
         "zero beside the role", "sum beside the finish reason", "always zero", "a token for the role",
         "the first token with the role", "nothing but a role and an end", "always one", "late usage",
         "lost usage", "usage ahead of the text", "usage that begins again", "all at once", "a total for each choice",
         "one total for all choices"],
)  # fmt: skip
def test_tokens_are_counted_by_what_the_stream_says(
    stream: list[bytes], counted: str, tokens: list[int], output: int | None
) -> None:
    answer = parse_answer(wire(stream))
    assert (answer.counted, answer.chunk_tokens.tolist(), answer.output_tokens) == (counted, tokens, output)
    assert len(answer.token_ns) == sum(tokens)


@pytest.mark.parametrize(
    "delta",
    [
        {"content": "x"}, {"reasoning_content": "x", "content": None}, {"reasoning": "x"}, {"refusal": "x"},
        {"content": [{"type": "text", "text": "x"}]}, {"function_call": {"arguments": "x"}},
        {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "x"}]}]},
        {"content": "", "reasoning_details": [{"type": "reasoning.text", "index": 0, "text": "x"}]},
        {"content": None, "reasoning_details": [{"type": "reasoning.summary", "summary": "x"}]},
        {"content": [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}]}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "x"}}], "content": ""},
    ],
    ids=["text", "reasoning_content", "reasoning", "refusal", "parts", "function call", "thinking", "reasoning details",
         "a summary of reasoning", "a summary in parts", "tool call"],
)  # fmt: skip
def test_whatever_a_model_writes_is_a_token(delta: dict[str, Any]) -> None:
    chunk = {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    answer = parse_answer(wire(sse(role(), chunk, chunk, chat(None, finish_reason="stop"), "[DONE]")))
    assert (answer.token_ns.tolist(), answer.error) == ([20, 30], "")


def test_a_usage_of_nothing_does_not_count() -> None:
    nothing = {"prompt_tokens": 0, "completion_tokens": 0}
    answer = parse_answer(wire(sse(chat("a"), chat("b"), {"choices": [], "usage": nothing}, "[DONE]")))
    assert (answer.token_ns.tolist(), answer.prompt_tokens, answer.output_tokens) == ([10, 20], None, None)


AB = (chat("a"), chat("b"))
FOUR = {"completion_tokens_details": {"reasoning_tokens": 4}}
PARTS = [{"type": "thinking", "thinking": [{"type": "text", "text": "so"}]}]
IN_PARTS = {"choices": [{"index": 0, "delta": {"content": PARTS}, "finish_reason": None}]}
DETAILS, SEALED = (
    {"choices": [{"index": 0, "delta": {"reasoning_details": [detail]}, "finish_reason": None}]}
    for detail in ({"type": "reasoning.text", "text": "so"}, {"type": "reasoning.encrypted", "data": "c28="})
)
THOUGHT = {"choices": [{"index": 0, "delta": {"reasoning_content": "so"}, "finish_reason": None}]}


@pytest.mark.parametrize(
    ("chunks", "usage", "hidden"),
    [
        (AB, {"completion_tokens": 6} | FOUR, 4),
        (AB, {"completion_tokens": 6, "reasoning_tokens": 4}, 4),
        ((chat("a", 5), chat("b", 6)), {"completion_tokens": 6} | FOUR, 4),
        # These were sent: with chunks of their own, or with their text.
        ([chat("" if k < 5 else "a", k) for k in range(1, 7)], {"completion_tokens": 6} | FOUR, 0),
        ((THOUGHT, *AB), {"completion_tokens": 6} | FOUR, 0),
        ((IN_PARTS, *AB), {"completion_tokens": 6} | FOUR, 0),
        ((DETAILS, *AB), {"completion_tokens": 6} | FOUR, 0),
        ((SEALED, *AB), {"completion_tokens": 6} | FOUR, 4),
        ([chat(text) for text in "<so>ab"], {"completion_tokens": 6} | FOUR, 0),
        # The output is without them, or can have no such part.
        (AB, {"prompt_tokens": 7, "completion_tokens": 6, "total_tokens": 17} | FOUR, 0),
        (AB, {"completion_tokens": 2} | FOUR, 0),
        ((chat("a", 5), chat("b", 6)), {"completion_tokens": 2} | FOUR, 0),
        (AB, {"completion_tokens": 2, "completion_tokens_details": None}, 0),
    ],
    ids=["in details", "beside the others", "running total", "chunks of their own", "text", "thinking", "details",
         "sealed details", "in the answer", "counted apart", "too many", "more than the total", "none"],
)  # fmt: skip
def test_reasoning_that_was_counted_and_never_sent_is_hidden(
    chunks: Sequence[dict[str, Any]], usage: dict[str, Any], hidden: int
) -> None:
    answer = parse_answer(wire(sse(*chunks, {"choices": [], "usage": usage}, "[DONE]")))
    assert (answer.hidden_tokens, answer.output_tokens, answer.error) == (hidden, usage["completion_tokens"], "")


def test_a_chunk_with_several_choices_brings_a_token_whichever_of_them_speaks() -> None:
    silent, loud = ({"index": k, "delta": {"content": text}} for k, text in ((0, ""), (1, "x")))
    answer = parse_answer(wire(sse({"choices": [silent, loud]}, {"choices": [loud, silent]}, "[DONE]")))
    assert answer.token_ns.tolist() == [10, 20]


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_an_answer_that_is_not_streamed_arrives_all_at_once(kind: str) -> None:
    text: dict[str, Any] = (
        {"message": {"role": "assistant", "content": "hello"}} if kind == "chat" else {"text": "hello"}
    )
    usage = {"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
    body = json.dumps({"choices": [{"index": 0, "finish_reason": "stop"} | text], "usage": usage}).encode()
    answer = parse_answer(wire([body[:10], body[10:]]))
    assert answer.token_ns.tolist() == [20, 20, 20]
    assert (answer.cached_tokens, answer.text_chars, answer.first_text_ns, answer.error) == (4, 5, 20, "")


@pytest.mark.parametrize(
    ("pieces", "tokens", "error"),
    [
        ([], 0, "the answer is empty"),
        ([b"<html>Gateway</html>"], 0, "neither JSON nor server-sent events"),
        ([gzip.compress(b"".join(sse(chat("a", 1))))], 0, "the answer is compressed (gzip)"),
        ([b"\x00\xff" * 40], 0, "neither JSON nor server-sent events"),
        ([b'{"error": {"message": "no such model"}}'], 0, "the server said: no such model"),
        ([b'{"error": "plain"}'], 0, "the server said: plain"),
        ([b'{"detail": "Not Found"}'], 0, """JSON that is no answer: b'{"detail": "Not Found"}'"""),
        ([b'{"choices": [{"text"'], 0, NOT_JSON),
        ([b"[1, 2]"], 0, "not an object in the answer"),
        ([*sse(chat("a", 1), {"error": {"message": "engine died"}})], 1, "the server said: engine died"),
        ([*sse(chat("a", 1), {"object": "error", "message": "engine died", "code": 500}, "[DONE]")], 1,
         "the server said: engine died"),
        ([*sse(chat("a", 1)), b'event: error\ndata: {"message": "engine died"}\n\n', *sse("[DONE]")], 1,
         'the server said: {"message": "engine died"}'),
        ([*sse(chat("a", 1)), b'data: {"m": 1}\r\nevent:error\r\n\r\n', *sse("[DONE]")], 1, "the server said: "),
        ([*sse(chat("a", 1)), b'error: {"code": 500, "message": "engine died"}\n\n', *sse("[DONE]")], 1,
         "the server said: engine died"),
        ([*sse(chat("a", 1)), b"error: out of luck\r\n\r\n", *sse("[DONE]")], 1, NOT_JSON),
        ([*sse(chat("a", 1), {"error": "", "code": 1}, "[DONE]")], 1, "the server said: {'error': '', 'code': 1}"),
        ([*sse(chat("a", 1), chat(None, finish_reason="error"), "[DONE]")], 1, "the server ended the answer"),
        ([*sse(chat("a", 1), chat(None, finish_reason="insufficient_system_resource"), "[DONE]")], 1,
         "the server ended the answer"),
        ([*sse(chat("a", 1)), b"data: {{{\n\n", *sse(chat("b", 2))], 1, NOT_JSON),
        ([*sse(chat("a", 1)), b"data: 17\n\n"], 1, "not an object in the answer"),
        ([b"data: " + b"[" * 100_000 + b"\n\n"], 0, NOT_JSON),
        ([*sse(chat("a", 1), chat("b", 2))], 2, ENDED_EARLY),
        ([*sse(chat("a", 1)), b'data: {"choices": [{"del'], 1, ENDED_EARLY),
        ([*sse(role(0))], 0, ENDED_EARLY),
        ([*sse(chat("a", 10**15))], 0, "a usage of"),
        ([*sse(*(chat("a", 9_000_000 + k) for k in range(8)), "[DONE]")], 0, "a usage of 9000007 tokens in"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_an_answer_is_said_and_what_came_before_is_kept(
    pieces: list[bytes], tokens: int, error: str
) -> None:
    answer = parse_answer(wire(pieces))
    assert answer.error.startswith(error)
    assert len(answer.token_ns) == tokens


def test_what_is_no_error_is_not_taken_for_one() -> None:
    fine = chat("b", 2, finish_reason="stop") | {"error": None}
    named = b"event: errors\n" + sse(fine)[0]
    for pieces in ([*sse(chat("a", 1), fine, "[DONE]")], [*sse(chat("a", 1)), named, b"data: [DONE] \n\n"]):
        answer = parse_answer(wire(pieces))
        assert (answer.error, answer.done, len(answer.token_ns)) == ("", True, 2)


def test_an_answer_that_says_why_it_finished_needs_no_end_mark() -> None:
    assert parse_answer(wire(sse(chat("a", 1, finish_reason="stop")))).error == ""


def test_the_engines_own_metrics_are_taken_from_the_last_usage() -> None:
    metrics = {"queue_time": 0.01}
    assert parse_answer(wire(sse(chat("a", 1), usage_only(1, metrics=metrics), "[DONE]"))).request_metrics == metrics


@given(st.lists(st.binary(max_size=40), max_size=10))
def test_no_bytes_whatsoever_raise(pieces: list[bytes]) -> None:
    answer = parse_answer(wire(pieces))
    assert len(answer.token_ns) == answer.chunk_tokens.sum()


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
                        st.sampled_from(["choices", "usage", "delta", "content", "completion_tokens", "text",
                                         "finish_reason", "metrics", "token_ids", "message"]), inner, max_size=4),
                    max_leaves=12))  # fmt: skip
def test_no_json_whatsoever_raises(value: object) -> None:
    parse_answer(wire([f"data: {json.dumps(value)}\n\n".encode()]))


def test_a_glance_reads_no_further_than_the_first_token() -> None:
    answer = parse_answer(wire(FULL), first_token_only=True)
    assert answer.token_ns.tolist() == [20]
    assert answer.error == ""


def test_a_content_that_is_nested_deeper_than_calls_may_be_has_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """From Python 3.12 on, JSON is read to ten times that depth."""
    read, limit = json.loads, sys.getrecursionlimit()

    def deeper(text: str) -> Any:
        sys.setrecursionlimit(20_000)
        try:
            return read(text)
        finally:
            sys.setrecursionlimit(limit)

    monkeypatch.setattr("gapmeter.records.stream.json.loads", deeper)
    content = '[{"text": ' * 2000 + '"x"' + "}]" * 2000
    pieces = [b'data: {"choices": [{"delta": {"content": %s}}]}\n\n' % content.encode(), b"data: [DONE]\n\n"]
    answer = parse_answer(wire(pieces))
    assert (answer.text_chars, answer.done, answer.error) == (0, True, "")
