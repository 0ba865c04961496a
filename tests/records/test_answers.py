"""Answers that are read together say what each of them says alone."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapmeter.loadgen import transport
from gapmeter.records import answers
from gapmeter.records.request import Block, RequestRecord, encode
from gapmeter.records.stream import parse_answer
from tests.kit.streams import chat, read_together, role, same, sse, usage_only, wire

CALL = {"index": 0, "id": "call-1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def part(total: int, *, finish: str | None = None, **delta: Any) -> dict[str, Any]:
    value = chat(None, total, finish_reason=finish)
    value["choices"][0]["delta"] = delta
    return value


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": said, "finish_reason": None} | more]}


COUNTED = [role(0), chat("Grü", 1), chat("ße", 3), chat("", 4), chat("世", 5, finish_reason="length"), usage_only(5)]
ONE = b'data: {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}]}\n\n'
USUAL = {
    "counted": sse(*COUNTED, "[DONE]"),
    "counted with the role": sse(role(1), chat("a", 2), chat("b", 3, finish_reason="stop"), "[DONE]"),
    "a role and an end": sse(part(1, role="assistant", content="", finish="stop"), "[DONE]"),
    "counted at the end": sse(role(), chat("a"), chat("b"), chat(None, finish_reason="stop"), usage_only(2), "[DONE]"),
    "completion": sse(text(" a"), text(" b", finish_reason="stop", logprobs={"tokens": [" b"]}), "[DONE]"),
    "no end mark": sse(role(0), chat("a", 1, finish_reason="stop")),
    "reasoning": sse(part(1, reasoning="so", content=None), part(2, reasoning_content="\n\\"), part(3, content="é",
                     finish="stop"), "[DONE]"),
    "calls": sse(part(1, tool_calls=[CALL]), part(2, tool_calls=[], content="x"), part(3, function_call={"name": "f"},
                 finish="tool_calls"), "[DONE]"),
    "metrics": sse(chat("a", 1), chat("b", 2, finish_reason="stop"), usage_only(2, metrics={"queue_s": 0.25, "n": 1}),
                   "[DONE]"),
    "cached": sse(chat("a", 1, finish_reason="stop"), {"choices": [], "usage": {
        "prompt_tokens": 7, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 4}}}, "[DONE]"),
    "no details of reasoning": sse(part(1, reasoning="so", reasoning_details=[]), part(2, content="a", finish="stop"),
                                   "[DONE]"),
    "tokens of reasoning": sse(part(1, reasoning="so"), part(2, content="a", finish="stop"), {"choices": [], "usage": {
        "completion_tokens": 2, "completion_tokens_details": {"audio_tokens": 0, "reasoning_tokens": 1}}}, "[DONE]"),
    "no token of reasoning": sse(part(1, content="a", finish="stop"), {"choices": [], "usage": {
        "completion_tokens": 1, "completion_tokens_details": {"reasoning_tokens": 0}}}, "[DONE]"),
    "a usage of nothing": sse(chat("a"), chat("b", finish_reason="stop"), {"choices": [], "usage": {
        "prompt_tokens": 0, "completion_tokens": 0, "prompt_tokens_details": {"cached_tokens": 0}}}, "[DONE]"),
    "lines of the other kind": sse(*COUNTED, "[DONE]", end="\r\n"),
    "comments": [b": waiting\n\n", *sse(*COUNTED[:3]), b": waiting\n\n", *sse(*COUNTED[3:], "[DONE]")],
    "escapes": [ONE.replace(b'"a"', b'"\\ud83d\\ude00\\u00e9\\n"')],
}  # fmt: skip
OTHER = {
    "hidden reasoning": sse(chat("a"), chat("b", finish_reason="stop"), {"choices": [], "usage": {
        "completion_tokens": 9, "completion_tokens_details": {"reasoning_tokens": 7}}}, "[DONE]"),
    "hidden reasoning, told flatly": sse(part(9, content="a", finish="stop"), {"choices": [], "usage": {
        "completion_tokens": 9, "reasoning_tokens": 7}}, "[DONE]"),
    "details of reasoning": sse(part(1, content="", reasoning_details=[{"type": "reasoning.text", "text": "so"}]),
                                part(2, content="a", finish="stop"), "[DONE]"),
    "two choices": sse({"choices": [{"index": 0, "text": "a"}, {"index": 1, "text": "b"}]}, "[DONE]"),
    "second choice": sse(part(1, content="a") | {"choices": [{"index": 1, "text": "a"}]}, "[DONE]"),
    "ids": sse({"choices": [{"index": 0, "delta": {"content": "a"}, "token_ids": [5, 6]}]}, "[DONE]"),
    "error": sse(chat("a", 1), {"error": {"message": "out of memory"}}),
    "flat error": sse(chat("a", 1), {"object": "error", "message": "out of memory", "choices": []}),
    "given up": sse(chat("a", 1), chat(None, 1, finish_reason="abort"), "[DONE]"),
    "given up for lack of room": sse(chat("a", 1), chat(None, finish_reason="insufficient_system_resource"), "[DONE]"),
    "given up, then ended": sse(chat("a", 1, finish_reason="error"), chat("b", 2, finish_reason="stop"), "[DONE]"),
    "behind the end mark": sse(*COUNTED, "[DONE]", chat("x", 6)),
    "no end": sse(role(0), chat("a", 1)),
    "cut": [ONE[:-5]],
    "several lines": [ONE[:-1], b"event: x\n\n"],
    "one line of data, two objects": [ONE.replace(b"}\n\n", b"}{}\n\n")],
    "an object over two lines": [ONE.replace(b'"delta"', b'\n"delta"')],
    "a key twice": [ONE.replace(b'"content": "a"', b'"content": "a", "content": "bc"')],
    "a text, then null": [ONE.replace(b'"content": "a"', b'"content": "a", "content": null')],
    "an end, then null": [ONE.replace(b'"stop"', b'"stop", "finish_reason": null')],
    "calls, then none": [ONE.replace(b'"content": "a"', b'"tool_calls": [1], "tool_calls": []')],
    "a delta, then null": [ONE.replace(b'"finish_reason"', b'"text": "xy", "delta": null, "finish_reason"')],
    "a usage, then null": [ONE.replace(b"{", b'{"usage": {"prompt_tokens": 1}, "usage": null, ', 1)],
    "a count, then null": [ONE.replace(b"{", b'{"usage": {"completion_tokens": 1, "completion_tokens": null}, ', 1)],
    "details, then null": [ONE.replace(b"{", b'{"usage": {"prompt_tokens_details": {"cached_tokens": 1}, '
                                       b'"prompt_tokens_details": null}, ', 1)],
    "metrics, then null": [ONE.replace(b"{", b'{"metrics": {"n": 1}, "metrics": null, ', 1)],
    "choices twice": [ONE.replace(b"{", b'{"choices": [{"index": 0, "text": "x"}], ', 1)],
    "an escaped key": [ONE.replace(b"content", b"con\\u0074ent")],
    "half a surrogate": [ONE.replace(b'"a"', b'"\\ud83d"')],
    "broken UTF-8": [ONE.replace(b'"a"', b'"\xc3"')],
    "no number": [ONE.replace(b": 0", b": 00")],
    "a count with a fraction": sse(text("a") | {"usage": {"completion_tokens": 1.0}}, "[DONE]"),
    "a count below zero": sse(text("a") | {"usage": {"completion_tokens": -1}}, "[DONE]"),
    "too many tokens": sse(chat("a", 10_000_001), "[DONE]"),
    "more tokens than it can bring": sse(chat("a", 200_000), "[DONE]"),
    "a part that is none": [ONE.replace(b'"a"', b'["a"]')],
    "deep": [b'data: {"x": ' + b"[" * 100_000 + b"\n\n"],
    "nothing": [],
    "one piece": [json.dumps(COUNTED[1]).encode()],
}  # fmt: skip


def usual(record: RequestRecord) -> bool:
    return bool(answers.read_answers(Block.joined([b"".join(encode(record))])).usual[0])


def test_the_fast_way_is_there_wherever_modules_in_c_were_built() -> None:
    assert (answers._read is None) == (transport._native is None)


@pytest.mark.parametrize("name", USUAL)
def test_an_answer_of_a_usual_shape_is_read_by_the_fast_way_and_says_the_same(name: str) -> None:
    record = wire(USUAL[name])
    assert answers._read is None or usual(record)
    assert same(read_together([record])[0], parse_answer(record))


@pytest.mark.parametrize("name", OTHER)
def test_an_answer_of_another_shape_is_left_to_the_parser(name: str) -> None:
    record = wire(OTHER[name])
    assert not usual(record)
    assert same(read_together([record])[0], parse_answer(record))


def test_answers_keep_their_order_whatever_their_shapes() -> None:
    shapes = [*USUAL.values(), *OTHER.values()]
    records = [wire(shapes[k % len(shapes)]) for k in range(1000)]
    together = read_together(records)
    assert all(same(one, parse_answer(record)) for one, record in zip(together, records, strict=True))


def test_pieces_that_do_not_add_up_to_the_body_are_left_to_the_parser() -> None:
    record = wire(USUAL["counted"])
    record.chunk_bytes, record.chunk_ns = record.chunk_bytes[:-2], record.chunk_ns[:-2]
    assert not usual(record)
    assert same(read_together([record])[0], parse_answer(record))


@pytest.mark.skipif(answers._read is None, reason="modules in C were not built")
@pytest.mark.parametrize("wrong", [-1, 50, 1 << 62, -(1 << 63)])
@pytest.mark.parametrize("column", [0, 1, 3, 4])
def test_a_place_that_is_not_within_the_data_is_refused(column: int, wrong: int) -> None:
    place = np.array([[0, 1, 0, 12, 8]], np.int64)
    assert answers._read and answers._read(bytes(20), place)
    place[0, column] = wrong
    with pytest.raises(ValueError, match="not within the data"):
        answers._read(bytes(20), place)


TEXTS = st.lists(st.sampled_from(["", " a", "\n", '"', "世", "\\", "😀", "\ud800"]) | st.text(), min_size=1)
DAMAGE = [b"", b"", b"", b'"', b"\\", b"\x00", b"\x01", b"\xff", b"\xe4\xb8", b"\n", b"\r\n", b"0", b",", b"}", b"{",
          b"[]", b": x\n\n", b'","content":"', b"null", b"data: ", b'{"choices":[],"usage":{}}']  # fmt: skip


@settings(max_examples=1000, deadline=None)
@given(data=st.data())
def test_whatever_comes_is_read_together_as_it_is_alone(data: st.DataObject) -> None:
    texts = data.draw(TEXTS)
    ascii_only, spaced, end = (
        data.draw(st.booleans()),
        data.draw(st.booleans()),
        data.draw(st.sampled_from(["\n", "\r\n"])),
    )
    usage, key = data.draw(st.booleans()), data.draw(st.sampled_from(["text", "content", "reasoning", "refusal"]))
    lines, total = [], 0
    for said in texts:
        total += data.draw(st.sampled_from([1, 1, 1, 0, 2]))
        value = chat(None, total if usage else None)
        value["choices"] = [{"index": 0, "text": said} if key == "text" else {"index": 0, "delta": {key: said}}]
        line = json.dumps(value, ensure_ascii=ascii_only, separators=None if spaced else (",", ":"))
        lines.append(f"data: {line}{end}{end}".encode(errors="surrogatepass"))
    body = b"".join([*lines, *sse(usage_only(total), "[DONE]", end=end)])
    for _ in range(data.draw(st.integers(0, 2))):
        at, gone = data.draw(st.integers(0, len(body))), data.draw(st.sampled_from([0, 0, 1, 3]))
        body = body[:at] + data.draw(st.sampled_from(DAMAGE)) + body[at + gone :]
    cuts = sorted(data.draw(st.sets(st.integers(1, max(len(body) - 1, 1)), max_size=20)))
    record = wire([piece for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True) if (piece := body[a:b])])
    assert same(read_together([record])[0], parse_answer(record))
