"""What other tools would have measured, worked out by hand from their sources, for answers on which they differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gapmeter.analysis.requests.definitions import (
    PEERS,
    ByTool,
    Chunk,
    chunks,
    describe_definitions,
    figures,
    pooled,
    seen,
)
from gapmeter.analysis.tables import read_requests
from gapmeter.records import Outcome, RunFolder
from gapmeter.records.request import RequestRecord
from tests.kit.loads import write_records
from tests.kit.results import manifest
from tests.kit.streams import arrived, chat, role, sse, usage_only

MS = 1_000_000
BY_KEY = {peer.key: peer for peer in PEERS}


def answer(*timed: tuple[int, dict[str, Any] | str], connect_ms: int = 0, **more: Any) -> RequestRecord:
    """Due at 0, written at 100 ms, sent at 101 ms; each event arrives at its ms, the end 5 ms after the last."""
    pieces = [sse(event)[0] for _, event in timed]
    record: dict[str, Any] = {
        "index": 0, "request_id": "r", "worker": 0, "due_ns": 1, "write_ns": 100 * MS, "sent_ns": 101 * MS,
        "connect_start_ns": connect_ms * MS, "connect_end_ns": 98 * MS if connect_ms else 0,
        "end_ns": (timed[-1][0] + 5) * MS, "status": 200, "outcome": Outcome.OK, "output_tokens": 4, "prompt_tokens": 7,
    }  # fmt: skip
    return RequestRecord(**record | arrived(pieces, [at * MS for at, _ in timed]) | more)


# A role alone, one token, three in one chunk, a finish reason alone, the usage alone, the end mark.
STREAM = (
    (150, role(0)), (200, chat("a", 1)), (300, chat("bcd", 4)), (310, chat("", 4, finish_reason="stop")),
    (330, usage_only(4)), (340, "[DONE]"),
)  # fmt: skip
# The same from a server that sends its usage at the end only.
QUIET = (
    (150, role()), (200, chat("a")), (300, chat("bcd")), (310, chat("", finish_reason="stop")), (330, usage_only(4)),
    (340, "[DONE]"),
)  # fmt: skip
ONE = ((150, role(0)), (200, chat("a", 1, finish_reason="length")), (210, usage_only(1)), (220, "[DONE]"))
# The first token's text comes with the second: half a character is none yet.
WITHHELD = (
    (150, role(0)), (200, chat("", 1)), (250, chat("é", 2)), (300, chat("x", 3, finish_reason="stop")),
    (300, usage_only(3)), (300, "[DONE]"),
)  # fmt: skip
NO_END_MARK = ((200, chat("a", 1)), (300, chat("b", 2, finish_reason="stop")))


def measured(key: str, record: RequestRecord, tokens: int | None) -> dict[str, Any]:
    """In ms, to the microsecond; what the tool does not have is left out."""
    found = BY_KEY[key].measure(seen(record, tokens))
    told = {"ttft": found.ttft, "e2e": found.e2e, "tpot": found.tpot, "itl": found.itl, "icl": found.chunk_gaps}
    return {
        name: np.round(np.asarray(value) / MS, 3).tolist() for name, value in told.items() if value not in (None, [])
    }


@pytest.mark.parametrize(
    ("key", "want"),
    [
        ("vllm_bench", {"ttft": 50, "itl": [50, 100, 10], "e2e": 210, "tpot": 53.333}),
        ("guidellm", {"ttft": 100, "itl": [33.333], "e2e": 240, "tpot": 50}),
        ("aiperf", {"ttft": 100, "itl": [33.333], "e2e": 200, "icl": [100]}),
        ("genai_bench", {"ttft": 100, "e2e": 210, "tpot": 36.667}),
    ],
)
def test_a_role_alone_several_tokens_in_a_chunk_and_a_usage_alone_are_counted_as_each_tool_does(
    key: str, want: dict[str, Any]
) -> None:
    assert measured(key, answer(*STREAM), 4) == want


def test_a_usage_that_comes_only_at_the_end_makes_an_answer_longer_for_genai_bench_alone() -> None:
    for peer in PEERS:
        early, late = measured(peer.key, answer(*STREAM), 4), measured(peer.key, answer(*QUIET), 4)
        if peer.key == "genai_bench":
            assert late == {"ttft": 100, "e2e": 230, "tpot": 43.333}
        else:
            assert late == early


@pytest.mark.parametrize(
    ("key", "want"),
    [
        ("vllm_bench", {"ttft": 50, "itl": [50], "e2e": 100}),
        ("guidellm", {"ttft": 100, "e2e": 120, "tpot": 100}),
        ("aiperf", {"ttft": 100, "e2e": 100}),
        ("genai_bench", {"ttft": 100, "e2e": 100}),
    ],
)
def test_an_answer_of_one_token_has_no_time_between_tokens_but_for_those_that_count_the_role(
    key: str, want: dict[str, Any]
) -> None:
    assert measured(key, answer(*ONE, output_tokens=1), 1) == want


@pytest.mark.parametrize(
    ("key", "ttft"), [("vllm_bench", 50), ("guidellm", 150), ("aiperf", 150), ("genai_bench", 150)]
)
def test_a_token_whose_text_is_withheld_is_seen_later_by_those_who_wait_for_text(key: str, ttft: float) -> None:
    assert measured(key, answer(*WITHHELD), 3)["ttft"] == ttft


@pytest.mark.parametrize(
    ("key", "ttft"), [("vllm_bench", 60), ("guidellm", 100), ("aiperf", 110), ("genai_bench", 110)]
)
def test_connecting_is_inside_the_latency_of_all_but_guidellm(key: str, ttft: float) -> None:
    assert measured(key, answer(*STREAM, connect_ms=90), 4)["ttft"] == ttft


@pytest.mark.parametrize(
    ("key", "e2e"), [("vllm_bench", 200), ("guidellm", 205), ("aiperf", 200), ("genai_bench", 200)]
)
def test_without_an_end_mark_an_answer_ends_with_its_stream_where_the_mark_would_have_ended_it(
    key: str, e2e: float
) -> None:
    assert measured(key, answer(*NO_END_MARK), 2)["e2e"] == e2e


def test_an_answer_without_text_has_no_figures_for_those_who_look_for_it() -> None:
    silent = answer((150, role(0)), (200, chat("", 1, finish_reason="stop")), (210, "[DONE]"))
    assert measured("vllm_bench", silent, 1)["ttft"] == 50
    assert measured("guidellm", silent, 1) == {"e2e": 110}
    assert measured("aiperf", silent, 1) == {}
    assert measured("genai_bench", silent, 1) == {}


def test_genai_bench_has_no_tpot_of_an_answer_that_came_almost_at_once() -> None:
    at_once, slower = (
        answer((200, chat("a", 1)), (end, chat("b", 2, finish_reason="stop")), (end, "[DONE]"))
        for end in (200.9, 201)
    )  # fmt: skip
    assert measured("genai_bench", at_once, 2) == {"ttft": 100, "e2e": 100.9}
    assert measured("genai_bench", slower, 2) == {"ttft": 100, "e2e": 101, "tpot": 1}


def test_a_part_of_a_tool_call_is_a_token_for_guidellm_and_aiperf() -> None:
    call = chat(None, 1)
    call["choices"][0]["delta"] = {"tool_calls": [{"index": 0}]}
    record = answer((150, role(0)), (200, call), (300, chat("x", 2, finish_reason="stop")), (310, "[DONE]"))
    assert {peer.key: measured(peer.key, record, 2)["ttft"] for peer in PEERS} == {
        "vllm_bench": 50, "guidellm": 100, "aiperf": 100, "genai_bench": 200,
    }  # fmt: skip


def test_guidellm_counts_a_mean_as_often_as_it_has_gaps_and_takes_the_first_value_that_reaches_the_share() -> None:
    answers = [ByTool(itl=[10.0 * MS], itl_weight=1), ByTool(itl=[20.0 * MS], itl_weight=9)]
    assert BY_KEY["guidellm"].measure(seen(answer(*STREAM), 4)).itl_weight == 3, "four tokens"
    values, weights = pooled(answers, "itl")
    told = figures(values, weights, differs="", weighted=True)
    assert (told.p50_ms, told.p99_ms, told.mean_ms, told.count) == (20, 20, 19, 2)
    assert figures(values, np.ones(2), differs="", weighted=False).p50_ms == 15, "the others interpolate"


def test_without_a_value_every_figure_is_null() -> None:
    none = np.zeros(0)
    found = figures(none, none, differs="so", weighted=True).to_json()
    assert set(found.values()) == {None, 0, "so"}


def test_a_stream_is_seen_event_by_event_with_what_each_carries() -> None:
    record = answer(*STREAM)
    assert list(chunks(record)) == [
        Chunk(150 * MS, choice=True, usage=0),
        Chunk(200 * MS, choice=True, text=True, usage=1),
        Chunk(300 * MS, choice=True, text=True, usage=4),
        Chunk(310 * MS, choice=True, finish=True, usage=4),
        Chunk(330 * MS, usage=4),
        Chunk(340 * MS, end=True),
    ]


@pytest.mark.parametrize("event", ["17", "[1]", "{{{", '{"choices": 3}', '{"choices": [7], "usage": []}', "null"])
def test_what_is_no_chunk_is_no_reason_to_stop(event: str) -> None:
    assert not any(chunk.text for chunk in chunks(answer((150, event))))


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Two good answers, one that failed, and one of the warm-up."""
    run = RunFolder(tmp_path)
    kinds = [(STREAM, {}), (STREAM, {}), (QUIET, {}), (STREAM, {"outcome": Outcome.CUT})]
    records = [
        answer(*timed, index=k, request_id=f"r-{k}", due_ns=1 + k, **more) for k, (timed, more) in enumerate(kinds)
    ]
    write_records(run.requests / "worker-0.gap", records)
    return run


def test_a_run_is_described_over_its_measured_successes(folder: RunFolder) -> None:
    plan = manifest(plan={"timeout_ns": 60_000 * MS, "t0_ns": 0, "warmup_ns": 0, "warmup_requests": 1}).plan
    requests, _ = read_requests(folder, plan)
    told = describe_definitions(folder, requests)
    assert list(told) == ["vllm_bench", "guidellm", "aiperf", "genai_bench"]
    assert told["vllm_bench"].version == "0.32.0"
    assert (told["vllm_bench"].ttft.count, told["vllm_bench"].itl.count) == (2, 6)
    assert told["vllm_bench"].ttft.p50_ms == 50
    assert told["genai_bench"].e2e.p50_ms == 220
    assert (told["genai_bench"].itl.count, told["genai_bench"].itl.p99_ms) == (0, None)
    assert all(getattr(told[key], metric).differs for key in told for metric in ("ttft", "itl", "tpot", "e2e"))


def test_every_tool_and_version_stands_in_the_document() -> None:
    text = (Path(__file__).parents[2] / "docs" / "definitions.md").read_text()
    for peer in PEERS:
        assert f"{peer.name} {peer.version}" in text
