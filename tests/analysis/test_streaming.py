"""Servers whose streams say less than others: what cannot be known from them is null, and said."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from gapmeter.analysis.judge.evidence import Evidence
from gapmeter.analysis.judge.streaming import choices_warning, streaming_warnings
from gapmeter.analysis.ledger.ledger import LedgerInputs, make_ledger, timelines
from gapmeter.analysis.load import describe_throughput
from gapmeter.analysis.requests import metrics
from gapmeter.analysis.requests.attempts import request_rows
from gapmeter.analysis.requests.metrics import measured_requests, metric_series
from gapmeter.analysis.results.requests import Throughput
from gapmeter.analysis.run_figures import RunTables, build_figures
from gapmeter.analysis.sweep.build import _throughput
from gapmeter.analysis.sweep.read import Frames
from gapmeter.analysis.tables import read_requests
from gapmeter.records import Outcome, RunFolder
from gapmeter.records.request import RequestRecord
from tests.kit.loads import write_records
from tests.kit.results import manifest, result
from tests.kit.streams import arrived, chat, sse, usage_only

MS = 1_000_000
PLAN = manifest(plan={"timeout_ns": 1000 * MS, "t0_ns": 0, "warmup_ns": 0, "warmup_requests": 0}).plan
COUNTED = sse(chat("a", 1), chat("b", 2, finish_reason="length"), "[DONE]")
UNCOUNTED = sse(chat("a"), chat("b", finish_reason="length"), "[DONE]")
SEVERAL = sse(chat("a"), chat("b", finish_reason="length"), usage_only(8), "[DONE]")
DIVIDED = sse(*(chat("a") for _ in range(5)), chat("b", finish_reason="length"), usage_only(2), "[DONE]")
HIDDEN = sse(chat("a"), chat("b", finish_reason="stop"), {"choices": [], "usage": {
    "completion_tokens": 20, "completion_tokens_details": {"reasoning_tokens": 18}}}, "[DONE]")  # fmt: skip
WHOLE = [json.dumps({"choices": [{"message": {"content": "a b"}, "finish_reason": "stop"}],
                     "usage": {"completion_tokens": 2, "prompt_tokens": 7}}).encode()]  # fmt: skip
TWICE = sse(chat("a b", finish_reason="length"), "[DONE]")  # two tokens were asked for


def gathered(each: int) -> list[bytes]:
    """Sixteen tokens, so many in a read."""
    events = sse(*(chat("a", k + 1) for k in range(15)), chat("b", 16, finish_reason="length"))
    return [b"".join(events[k : k + each]) for k in range(0, 16, each)] + sse("[DONE]")


def table(folder: Path, *answers: list[bytes], attempt: int = 0, first_ms: int = 40) -> pd.DataFrame:
    """Each answer's pieces arrive 10 ms apart, from 40 ms after it was due."""
    run = RunFolder(folder)
    records = []
    for index, pieces in enumerate(answers):
        due = (100 + index) * MS
        at = [due + (first_ms + 10 * k) * MS for k in range(len(pieces))]
        records.append(RequestRecord(
            index=index, request_id=f"r-{index}", worker=0, attempt=attempt, due_ns=due, write_ns=due, sent_ns=due + 1,
            end_ns=due + 200 * MS, status=200, outcome=Outcome.OK, prompt_tokens=7, output_tokens=2,
            **arrived(pieces, at),
        ))  # fmt: skip
    write_records(run.requests / "worker-0.gap", records)
    return measured_requests(read_requests(run, PLAN)[0])


def codes(requests: pd.DataFrame) -> list[str]:
    return [warning.code for warning in streaming_warnings(requests)]


def test_an_answer_that_does_not_say_how_many_tokens_it_has_still_has_a_ledger(tmp_path: Path) -> None:
    requests = table(tmp_path, COUNTED, UNCOUNTED)
    rows = make_ledger(LedgerInputs.of(requests, None)).rows
    assert (rows[rows["event"] == "last_token"]["total_ns"] / MS).tolist() == [50, 50]
    stretches = timelines(LedgerInputs.of(requests, None), np.array([True, True]))
    assert set(stretches["request_id"]) == {"r-0", "r-1"}


def test_tokens_per_second_are_unknown_where_an_answer_did_not_tell_its_tokens(tmp_path: Path) -> None:
    requests = table(tmp_path, COUNTED, UNCOUNTED)
    told = describe_throughput(requests)
    assert told.output_tokens_per_s is None
    assert told.prompt_tokens_per_s is None
    assert told.requests_per_s == pytest.approx(2 / 0.051)
    assert describe_throughput(requests.iloc[:1]).output_tokens_per_s == pytest.approx(2 / 0.05)


@pytest.mark.parametrize(("rates", "pooled"), [((10.0, 20.0), 17.5), ((10.0, None), None)])
def test_runs_are_pooled_over_their_time_unless_one_does_not_know_its_rate(
    tmp_path: Path, rates: tuple[float | None, ...], pooled: float | None
) -> None:
    figures = build_figures(RunTables(table(tmp_path, COUNTED)), [], Evidence("open", "poisson"))
    runs = [
        result(figures.model_copy(update={"throughput": Throughput(
            requests_per_s=1.0, prompt_tokens_per_s=None, output_tokens_per_s=rate, span_s=span
        )}))
        for rate, span in zip(rates, (1.0, 3.0), strict=True)
    ]  # fmt: skip
    nothing = pd.DataFrame()
    frames = Frames(nothing, {}, nothing, None)
    assert _throughput(runs, frames).output_tokens_per_s == pooled


def test_a_run_that_served_nothing_is_pooled_with_the_time_in_which_it_was_asked(tmp_path: Path) -> None:
    run = result(build_figures(RunTables(table(tmp_path, COUNTED)), [], Evidence("open", "poisson")))
    rates = Throughput(requests_per_s=1.0, prompt_tokens_per_s=None, output_tokens_per_s=10.0, span_s=1.0)
    served = run.model_copy(update={"throughput": rates})
    counts, load = run.counts.model_copy(update={"succeeded": 0}), run.load.model_copy(update={"window_s": 3.0})
    failed = run.model_copy(update={"counts": counts, "load": load})
    nothing = pd.DataFrame()
    found = _throughput([served, failed], Frames(nothing, {}, nothing, None))
    assert (found.output_tokens_per_s, found.span_s) == (2.5, 4.0)


def test_an_answer_that_came_whole_has_neither_tpot_nor_itl(tmp_path: Path) -> None:
    requests = table(tmp_path, WHOLE, COUNTED)
    assert metric_series(requests, "tpot").ordered.tolist() == [10.0 * MS]
    assert metric_series(requests, "itl").count == 1
    assert (
        metric_series(requests, "ttft").ordered.tolist() == metric_series(requests.iloc[:1], "e2e").ordered.tolist() * 2
    )


def test_reasoning_that_was_never_sent_does_not_shorten_tpot_and_counts_as_output(tmp_path: Path) -> None:
    requests = table(tmp_path, HIDDEN)
    assert metric_series(requests, "tpot").ordered.tolist() == [10.0 * MS]
    assert describe_throughput(requests).output_tokens_per_s == pytest.approx(20 / 0.05)


@pytest.mark.parametrize(
    ("answers", "want"),
    [
        ([COUNTED] * 3, []),
        ([COUNTED, UNCOUNTED], ["tokens-unknown"]),
        ([COUNTED, WHOLE], ["not-streamed"]),
        ([SEVERAL, SEVERAL], ["several-tokens"]),
        ([HIDDEN, HIDDEN], []),
        ([DIVIDED, COUNTED], ["divided-tokens"]),
        ([COUNTED] * 200 + [WHOLE, UNCOUNTED], []),
        ([gathered(1)], []),
        ([gathered(4)], ["gathered"]),
        ([TWICE], ["tokens-unknown", "several-tokens"]),
    ],
    ids=[
        "all is told",
        "no usage",
        "not streamed",
        "four tokens a chunk",
        "nine of ten tokens hidden",
        "three chunks a token",
        "too few to matter",
        "a read a token",
        "four tokens a read",
        "two tokens a chunk, uncounted",
    ],
)
def test_what_a_stream_does_not_tell_is_said(
    tmp_path: Path, answers: list[list[bytes]], want: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = table(tmp_path, *answers)
    assert codes(requests) == want
    monkeypatch.setattr(metrics, "_BLOCK", 2)  # a few requests at a time, as of a large run
    assert codes(requests) == want


@pytest.mark.parametrize(("first_ms", "is_cache"), [(5, True), (40, False)])
def test_whole_answers_that_come_sooner_than_others_first_tokens_are_a_caches(
    tmp_path: Path, first_ms: int, is_cache: bool
) -> None:
    parts = [table(tmp_path / "a", *[COUNTED] * 5), table(tmp_path / "b", *[WHOLE] * 3, first_ms=first_ms)]
    (warning,) = streaming_warnings(pd.concat(parts, ignore_index=True))
    assert warning.code == "not-streamed"
    assert ("probably cached answers" in warning.cause) is is_cache


def test_whole_answers_that_fit_into_a_chunk_of_others_are_no_lack_of_streaming(tmp_path: Path) -> None:
    four_in_two, two_in_one = SEVERAL[:2] + sse(usage_only(4), "[DONE]"), WHOLE
    assert codes(table(tmp_path, *[four_in_two] * 3, two_in_one)) == ["several-tokens"]


def test_whole_answers_in_several_events_are_not_called_a_caches(tmp_path: Path) -> None:
    parts = [table(tmp_path / "a", *[COUNTED] * 5), table(tmp_path / "b", *[gathered(16)] * 3, first_ms=5)]
    told = {one.code: one.cause for one in streaming_warnings(pd.concat(parts, ignore_index=True))}
    assert "the load tester read late" in told["not-streamed"]


def test_a_stream_that_was_read_at_once_is_not_blamed_on_a_server_that_does_not_stream(tmp_path: Path) -> None:
    parts = [table(tmp_path / name, *[answer] * 3) for name, answer in (("whole", WHOLE), ("late", gathered(16)))]
    whole, late = (warning.cause for part in parts for warning in streaming_warnings(part))
    assert ("does not stream" in whole, "does not stream" in late, "read late" in late) == (True, False, True)


def test_requests_that_were_sent_twice_are_told(tmp_path: Path) -> None:
    (warning,) = streaming_warnings(table(tmp_path, COUNTED, COUNTED, attempt=1))
    assert (warning.code, warning.text[:20]) == ("resent", "100 % of requests we")


@pytest.mark.parametrize(
    ("pieces", "outcome", "expected"),
    [
        (COUNTED, Outcome.TIMEOUT, "ok"),
        (COUNTED, Outcome.STALLED, "ok"),
        (COUNTED[:-1], Outcome.TIMEOUT, "timeout"),
        (COUNTED, Outcome.CUT, "cut"),
        (sse(chat(finish_reason="stop"), "[DONE]"), Outcome.OK, "wrong_length"),
    ],
)
def test_an_answer_whose_end_mark_came_counts_though_its_body_was_never_ended(
    pieces: list[bytes], outcome: Outcome, expected: str
) -> None:
    at = [(140 + 10 * k) * MS for k in range(len(pieces))]
    error = "" if outcome is Outcome.OK else "no complete answer in 2 s"
    record = RequestRecord(
        index=0, request_id="r", due_ns=100 * MS, end_ns=2100 * MS, status=200, outcome=outcome, error=error,
        **arrived(pieces, at),
    )  # fmt: skip
    (row,) = request_rows([record], 2000 * MS)
    assert row["outcome"] == expected
    assert row["error"]
    if expected == "ok":
        told = streaming_warnings(pd.DataFrame([{**row, "output_tokens_asked": 2}]))
        assert [warning.code for warning in told] == ["unended"]


def test_requests_for_several_answers_are_told_with_what_they_shorten() -> None:
    notes = [{"type": "window"}, {"type": "choices", "requests": 40, "most": 2}]
    (told,) = choices_warning(notes)
    assert told.text.startswith("40 requests asked for up to 2 answers at once")
    assert (told.code, told.touches) == ("choices", ("itl", "tpot"))
