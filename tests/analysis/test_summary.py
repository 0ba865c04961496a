"""The summary is complete, is JSON, agrees with its own HDR logs, and says the same every time."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from gapmeter.analysis.judge import verdict
from gapmeter.analysis.judge.steady import Warmup
from gapmeter.analysis.load import describe_load, describe_throughput
from gapmeter.analysis.requests import figures
from gapmeter.analysis.requests.metrics import measured_requests, metric_series
from gapmeter.analysis.results import RunResult
from gapmeter.analysis.results.run import RunFigures
from gapmeter.analysis.results.trust import RunWarning
from gapmeter.analysis.run_figures import RunTables, build_figures
from gapmeter.analysis.stages import GROUPS, STAGES, column
from gapmeter.analysis.stats.series import Series
from gapmeter.report.slo import headline
from gapmeter.report.trust import trust_sentence
from tests.kit.results import result
from tests.kit.runs import EVIDENCE, SLOS, Frames, read_hlog, simulate, slo, timed


@pytest.fixture(scope="module")
def frames() -> Frames:
    return simulate(1200, rate=8.0)


@pytest.fixture(scope="module")
def told(frames: Frames) -> RunFigures:
    return build_figures(RunTables(frames.requests, frames.ledger), SLOS, EVIDENCE, name="chat-p99")


def test_every_name_that_other_programs_rely_on_is_there_in_the_file(told: RunFigures) -> None:
    document = result(told).to_json()
    names = {"p50_ms", "p90_ms", "p95_ms", "p99_ms", "p999_ms", "max_ms", "count", "p99_ci_ms"}
    assert document["schema_version"] == RunFigures.model_fields["schema_version"].default
    assert told.verdict in verdict.EXIT_CODES
    assert {"loop", "requested_rate", "delivered_rate", "dispersion", "lag_p99_ms"} <= document["load"].keys()
    assert {"planned", "issued", "succeeded", "failed"} <= document["counts"].keys()
    for part in ("metrics", "metrics_from_sent"):
        assert list(document[part]) == ["ttft", "itl", "tpot", "e2e"]
        assert all(names <= figures.keys() for figures in document[part].values())
    for part in ("stages", "stages_to_first_token"):
        assert list(document[part]) == [stage.name for stage in STAGES]
        assert all(names | {"owner", "kind"} <= figures.keys() for figures in document[part].values())
    assert list(told.groups) == list(GROUPS)
    for event in ("first_token", "last_token"):
        for which in ("unexplained", "strict", "unstamped"):
            assert {"p50_share", "p99_share", "p50_ms", "p99_ms"} <= document["residual"][event][which].keys()
    assert {"stage", "owner", "share"} <= document["tail"].keys()
    assert "p975_ms" in document["metrics"]["e2e"], "a percentile that an SLO names is printed everywhere"


def test_it_is_json_without_nan_and_comes_back_the_same(told: RunFigures) -> None:
    whole = result(told)
    assert json.loads(json.dumps(whole.to_json(), allow_nan=False)) == whole.to_json()
    assert RunResult.parse(whole.model_dump_json(), Path("summary.json")) == whole


def test_the_same_run_always_gives_the_same_summary(frames: Frames, told: RunFigures) -> None:
    shuffled = frames.requests.sample(frac=1, random_state=1)
    ledger = frames.ledger.sample(frac=1, random_state=2)
    assert build_figures(RunTables(shuffled, ledger), SLOS, EVIDENCE, name="chat-p99") == told


def test_a_run_that_met_every_slo_passes_and_says_so(told: RunFigures) -> None:
    assert (told.verdict, told.exit_code, told.invalid_reasons) == ("PASS", 0, ())
    assert [row.status for row in told.slo] == ["PASS"] * 4
    assert headline(result(told)).startswith("4 of 4 SLOs met; p99 TTFT")
    assert told.trust.valid
    assert told.warnings == ()


def test_a_missed_slo_names_stage_and_owner_of_the_excess() -> None:
    frames = simulate(6000, rate=13.0, slots=4)
    told = build_figures(RunTables(frames.requests, frames.ledger), [slo("ttft", 90.0, 30)],
                                 replace(EVIDENCE, requested_rate=13.0))  # fmt: skip
    row = told.slo[0]
    assert (told.verdict, told.exit_code, row.status) == ("FAIL", 99, "FAIL")
    assert (row.stage, row.owner) == ("queue", "capacity")
    assert row.low > row.limit == 30
    assert "beyond the limit of 30.0 ms" in headline(result(told))
    assert "contention (queue)" in headline(result(told))
    assert told.tail.metric == "ttft"


def test_percentiles_are_those_of_the_hdr_logs_within_their_three_digits(
    frames: Frames, told: RunFigures, tmp_path: Path
) -> None:
    tables = RunTables(frames.requests, frames.ledger)
    figures.write_histograms(tmp_path, tables.series, tables.ledgers, 1e9, 60.0, "")
    parts = {metric: told.metrics[metric] for metric in told.metrics}
    parts |= {f"{m}-from-sent": told.metrics_from_sent[m] for m in told.metrics_from_sent}
    parts |= {f"stage-{name}": part for name, part in told.stages.items() if part.count}
    parts |= {f"stage-{n}-to-first-token": p for n, p in told.stages_to_first_token.items() if p.count}
    parts |= {f"group-{name}": part for name, part in told.groups.items()}
    assert {path.stem for path in tmp_path.iterdir()} == set(parts)
    for name, part in parts.items():
        histogram = read_hlog(tmp_path / f"{name}.hlog")[name]
        assert histogram.get_total_count() == part.count
        for percentile in (50.0, 90.0, 95.0, 99.0):
            if (value := part.ms(percentile)) is not None:
                assert value * 1e6 <= histogram.get_value_at_percentile(percentile) <= value * 1.001e6
        assert (part.max_ms or 0) * 1e6 <= histogram.get_max_value() <= (part.max_ms or 0) * 1.001e6


def test_an_slo_tells_the_figure_that_the_tables_tell(told: RunFigures) -> None:
    (row, *_) = told.slo
    figure = told.metrics[row.metric].at(row.percentile or 0)
    assert figure.value_ms is not None
    assert (row.value, (row.low, row.high)) == (figure.value_ms, figure.ci_ms)


def test_a_percentile_that_the_sample_cannot_support_is_null_and_says_what_it_needs(told: RunFigures) -> None:
    ttft = told.metrics["ttft"]
    high_one, needs = ttft.at(99.9), ttft.at(99.9).needs
    assert (high_one.value_ms, high_one.ci_ms) == (None, None)
    assert needs.requests > 2000
    assert needs.minutes == pytest.approx(needs.requests / 8 / 60, rel=0.1)
    low, high = ttft.at(99.0).ci_ms or (None, None)
    assert low <= ttft.ms(99.0) <= high


def test_what_a_percentile_of_token_gaps_needs_is_told_in_requests_that_bring_them() -> None:
    gaps = Series(np.random.default_rng(1).exponential(1e7, 99))
    each, in_threes = (figures.distribution(gaps, (99.0,), count, 2.0 * count).at(99.0).needs for count in (99, 33))
    assert each and in_threes
    assert each.requests == gaps.more_values(99.0) > 200
    assert in_threes.requests == math.ceil(each.requests / 3)
    assert in_threes.minutes == pytest.approx(in_threes.requests * 2 / 60)
    assert figures.distribution(Series(np.zeros(0)), (99.0,), 0, 9.0).at(99.0).needs.minutes is None


def test_what_a_percentile_needs_is_told_in_requests_of_which_some_fail() -> None:
    """Sixty, of which every second one failed: they bring sixty values with failures counted, else thirty."""
    frames = simulate(60, failures=30)
    tables = RunTables(frames.requests, frames.ledger)
    told = build_figures(tables, [], EVIDENCE)
    ttft, prefill = told.metrics["ttft"], figures.stage_series(tables.ledgers["e2e"])["prefill"]
    for found, values in (
        (ttft, tables.series("ttft")), (ttft.with_failures, tables.series("ttft", failures=True)),
        (told.stages["prefill"], prefill),
    ):  # fmt: skip
        assert found and (needs := found.at(99.9).needs)
        assert needs.requests == values.more_values(99.9) * 60 / found.count
    assert ttft.with_failures and (ttft.count, ttft.with_failures.count) == (30, 60)


def test_groups_are_sums_of_their_stages_and_cover_all_but_the_remainder(frames: Frames) -> None:
    rows = figures.ledgers_of(frames.ledger, measured_requests(frames.requests), "last_token")
    groups = figures.group_values_ns(rows)
    total = sum(sums for sums, _ in groups.values())
    assert total == pytest.approx(rows["total_ns"] - rows["unexplained_ns"])
    queueing = rows[[column(s.name) for s in STAGES if s.group == "queueing"]].sum(axis=1)
    assert groups["queueing"][0] == pytest.approx(queueing)
    assert groups["framework"][1] == ["launch_gap"]


def test_an_unmeasured_stage_is_null_never_zero(told: RunFigures) -> None:
    part = told.stages["launch_gap"]
    assert (part.kind, part.count, part.max_ms, part.ms(50.0)) == ("unmeasured", 0, None, None)
    assert told.stages["preempted"].ms(50.0) == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"records_dropped": 3}, "3 records were dropped"),
        ({"incomplete": "interrupted"}, "interrupted"),
        ({"client_cpu_share": 0.97}, "97 % of a core"),
        ({"ledger_refused": ("steps differ",)}, "steps differ"),
    ],
)
def test_a_broken_rule_makes_the_run_invalid_whatever_its_slos_say(
    frames: Frames, change: dict[str, Any], says: str
) -> None:
    told = build_figures(RunTables(frames.requests, frames.ledger), SLOS, replace(EVIDENCE, **change))
    assert (told.verdict, told.exit_code) == ("INVALID", 98)
    assert says in told.invalid_reasons[0]
    assert says in headline(result(told))
    if "incomplete" in change:
        assert not next(warning.cause for warning in told.warnings if warning.code == "complete"), "the text has it"
    assert trust_sentence(told).startswith("NOT valid")
    assert bool(told.stages) is ("ledger_refused" not in change), "a refused ledger is not shown"


def test_without_a_ledger_the_client_s_figures_stand_alone(frames: Frames, told: RunFigures) -> None:
    bare = build_figures(RunTables(frames.requests), SLOS, EVIDENCE, name="chat-p99")
    assert bare.metrics == told.metrics
    assert bare.verdict == "PASS"
    assert (bare.stages, bare.groups) == ({}, {})
    assert (bare.residual.first_token, bare.residual.last_token) == (None, None)
    assert bare.tail.stage is None
    assert (bare.upgrade.ttft, bare.upgrade.e2e) == (None, None)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_run_of_hardly_any_request_still_has_a_summary(count: int) -> None:
    frames = simulate(40)
    few = pd.concat([frames.requests.iloc[:20], frames.requests.iloc[20 : 20 + count]])
    told = build_figures(RunTables(few, frames.ledger), SLOS, EVIDENCE)
    assert told.verdict == ("INVALID" if not count else "INCONCLUSIVE")
    assert told.counts.measured == count
    assert told.metrics["ttft"].ms(50.0) is None
    json.dumps(result(told).to_json(), allow_nan=False)


def test_a_run_in_which_everything_failed_has_a_summary_and_fails() -> None:
    frames = simulate(60, failures=60, error="boom")
    told = build_figures(RunTables(frames.requests, frames.ledger), SLOS, replace(EVIDENCE, slo_on_errors=True))
    assert told.counts.succeeded == 0
    assert told.verdict == "FAIL"
    assert told.throughput.requests_per_s is None


def test_tokens_that_the_server_did_not_count_in_every_answer_give_no_rate() -> None:
    frames = simulate(60)
    frames.requests["output_tokens"] = frames.requests["output_tokens"].astype("Int64")
    frames.requests.loc[40, "output_tokens"] = pd.NA
    told = build_figures(RunTables(frames.requests, frames.ledger), SLOS, EVIDENCE).throughput
    assert told.output_tokens_per_s is None
    assert told.prompt_tokens_per_s
    assert told.requests_per_s


def test_token_gaps_have_an_anatomy_of_their_own(frames: Frames) -> None:
    ids = frames.requests.loc[frames.requests["measured"], "request_id"].to_numpy()
    rng = np.random.default_rng(1)
    table = pd.DataFrame({column(s.name): rng.uniform(0, 1e5, 5000) for s in STAGES})
    table.loc[rng.permutation(5000) < 150, "interference_ns"] += 5e7
    table["unexplained_ns"] = 0.0
    table["total_ns"] = table.sum(axis=1)
    table["request_id"] = rng.choice(ids, 5000)
    table["end_ns"] = np.arange(5000) * 1_000_000
    told = build_figures(RunTables(frames.requests, frames.ledger, table), [slo("itl", 99.0, 1)], EVIDENCE)
    assert (told.tail.metric, told.tail.stage) == ("itl", "interference")
    assert (told.slo[0].status, told.slo[0].owner) == ("FAIL", "capacity")


def test_what_was_left_out_as_warm_up_is_a_warning_with_the_flag_that_keeps_it(frames: Frames) -> None:
    left_out = Warmup("warmed", 31, 0, 0, "ttft", 4.2)
    other = RunWarning(code="hook", text="a hook is missing", cause="a newer version", flag="", touches=("stages",))
    told = build_figures(RunTables(frames.requests, frames.ledger), [], EVIDENCE, warmup=left_out, warnings=[other])
    assert [w.code for w in told.warnings] == ["warmup", "hook"]
    assert "first 31 requests" in told.warnings[0].text
    assert told.warnings[0].flag == "--set load.warmup=0"


def test_verdict_json_is_the_verdict_s_part_of_summary_json(told: RunFigures, tmp_path: Path) -> None:
    whole = result(told)
    whole.write(tmp_path)
    whole.verdict_file.write(tmp_path)
    long = json.loads((tmp_path / "summary.json").read_text())
    short = json.loads((tmp_path / "verdict.json").read_text())
    assert long == whole.to_json()
    assert short.pop("words") == {key: long["words"][key] for key in ("headline", "slo")}
    assert short == {key: long[key] for key in short}
    assert {"verdict", "exit_code", "slo", "schema_version"} <= short.keys()


def test_from_sent_leaves_out_the_load_tester_s_lateness(frames: Frames) -> None:
    measured = measured_requests(frames.requests)
    due, sent = (metric_series(measured, "ttft", origin).ordered for origin in ("due", "sent"))
    assert (due - sent) == pytest.approx(60_000)


def test_what_lateness_can_only_have_added_to_keeps_its_upper_end(frames: Frames, told: RunFigures) -> None:
    """Read so late that p95 is refused, it is still no more than it was seen to be."""
    held = replace(EVIDENCE, client_loop_lag_ns=np.append(np.full(90, 1e5), np.full(10, 500e6)))
    late = build_figures(RunTables(frames.requests, frames.ledger), SLOS, held)
    for metric, bounded in (("ttft", True), ("e2e", True), ("tpot", False)):
        before, now = (known.metrics[metric].at(95.0) for known in (told, late))
        assert (now.value_ms, now.ci_ms, now.late_ms is None) == (None, None, False)
        assert (now.at_most and now.at_most.ms) == (before.ci_ms[1] if bounded else None)
    assert late.metrics_from_sent["ttft"].at(95.0).at_most is None, "what was sent late may have been answered sooner"
    usual, without = told.upgrade.ttft, late.upgrade.ttft
    assert usual is not None and without is not None and usual.percentile > 95.0 > without.percentile
    assert (without.now.p90_ms, without.now.p95_ms) == (usual.now.p90_ms, None)


def test_no_part_of_a_run_shows_a_percentile_that_the_run_refuses(frames: Frames) -> None:
    held = replace(EVIDENCE, loop="closed", concurrency=4, client_loop_lag_ns=np.full(100, 500e6))
    requests = frames.requests.assign(turn=np.arange(len(frames.requests)) % 3 + 1)
    late = build_figures(RunTables(requests, frames.ledger), SLOS, held)
    assert (late.upgrade.ttft, late.upgrade.e2e) == (None, None)
    assert (late.metrics["ttft"].ms(50.0), late.metrics["ttft"].mean_ms) == (None, None)
    assert late.metrics["ttft"].mean_late_ms is not None
    assert [turn.ttft and turn.ttft.at(50.0).late_ms for turn in late.turns] == [500] * 3
    assert late.closed_loop and (told := late.closed_loop.corrected)
    assert (told.ttft.p50_ms, told.e2e.p50_ms) == (None, None)


def served(begun_s: Sequence[float], took_s: Sequence[float], *, warmup_s: float, failed_from_s: float = 1e9) -> float:
    """Requests per second of a load whose answers take so long; those that begin at some time fail."""
    due_ns, done_ns = (np.array(begun_s) * 1e9).astype(int), ((np.array(begun_s) + took_s) * 1e9).astype(int)
    ok = np.array(begun_s) < failed_from_s
    requests = pd.DataFrame({
        "due_ns": due_ns, "last_token_ns": pd.Series(done_ns, dtype="Int64").mask(~ok), "end_ns": done_ns,
        "measured": due_ns >= warmup_s * 1e9, "outcome": np.where(ok, "ok", "http_5xx"),
        "prompt_tokens": 7, "output_tokens": 3,
    })  # fmt: skip
    told = describe_throughput(requests)
    assert told.output_tokens_per_s == pytest.approx(3 * told.requests_per_s)
    assert told.prompt_tokens_per_s == pytest.approx(7 * told.requests_per_s)
    return told.requests_per_s


def closed_loop(users: int, seconds: float) -> tuple[list[float], list[float]]:
    """Each user's requests follow one another, 3 to 5 s long."""
    rng = np.random.default_rng(8)
    begun, took = list[float](), list[float]()
    for _ in range(users):
        at = 0.0
        while at < seconds:
            begun.append(at)
            took.append(rng.uniform(3, 5))
            at += took[-1]
    return begun, took


@pytest.mark.parametrize(("warmup_s", "rate"), [(0.0, 20 * 23 / 25), (5.0, 20.0)])
def test_a_closed_loop_of_long_answers_is_served_at_its_users_pace_however_short_the_run(
    warmup_s: float, rate: float
) -> None:
    """80 users, 4 s an answer; over the time until the last token it would be 25 ÷ 29 of that."""
    assert served(*closed_loop(80, 25.0 + warmup_s), warmup_s=warmup_s) == pytest.approx(rate, rel=0.03)


def test_an_open_loop_that_was_warm_is_served_as_it_is_asked_and_one_that_was_not_nearly_so() -> None:
    begun = np.arange(0, 60, 0.1)
    took = np.full(len(begun), 6.0)
    assert served(begun, took, warmup_s=10.0) == pytest.approx(10, rel=0.01)
    assert served(begun, took, warmup_s=0.0) == pytest.approx(10 * 60 / 66, rel=0.01)


def test_requests_that_all_come_at_once_are_served_until_the_last_token() -> None:
    assert served(np.zeros(100), np.linspace(0.1, 10, 100), warmup_s=0.0) == pytest.approx(10)


def test_one_answer_that_takes_long_does_not_lower_what_was_served() -> None:
    begun, took = np.arange(0, 12, 0.05), np.full(240, 0.2)
    took[100] = 30.0
    assert served(begun, took, warmup_s=2.0) == pytest.approx(20, rel=0.01)


def test_a_backlog_of_the_warm_up_is_not_served_in_its_stead_beyond_what_is_left_in_flight() -> None:
    begun = np.arange(0, 17, 0.05)
    took = np.where(begun < 5, 5.1 - begun, 0.2)
    assert served(begun, took, warmup_s=5.0) == pytest.approx(20, rel=0.01)


def test_a_load_that_ends_quietly_lasted_as_long_as_it_was_planned() -> None:
    requests = timed(np.full(100, 20.0), every_ms=50).assign(measured=True, prompt_tokens=7)
    window = (10**12, 10**12 + 15 * 10**9)
    assert describe_throughput(requests, window).requests_per_s == pytest.approx(100 / 15)
    evidence = replace(EVIDENCE, arrivals="steps", requested_rate=6.67, window_ns=window)
    told = describe_load(requests.assign(connect_start_ns=-1, cached_tokens=np.nan), evidence)
    assert (told.window_s, told.delivered_rate) == (15, pytest.approx(100 / 15))


def test_the_time_in_which_a_server_failed_counts_too() -> None:
    begun = np.arange(0, 60, 0.1)
    assert served(begun, np.full(len(begun), 0.1), warmup_s=0.0, failed_from_s=30.0) == pytest.approx(5, rel=0.01)
