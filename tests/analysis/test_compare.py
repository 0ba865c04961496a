from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from bench.compare import dropping, gate_cell, queue_run, scaled, without
from gapmeter.analysis.compare import build, claims
from gapmeter.analysis.compare.aligned import align
from gapmeter.analysis.compare.build import compare, pair_of
from gapmeter.analysis.compare.claims import FAMILY, PairVerdict, judge_pair, judge_regression
from gapmeter.analysis.compare.differences import Differences, compare_sides
from gapmeter.analysis.compare.sides import RunColumns, Side, are_alike, check_protocol, read_run, run_of, words
from gapmeter.analysis.judge.lateness import ReportedLateness
from gapmeter.analysis.numbers import duration
from gapmeter.analysis.results import RunResult
from gapmeter.analysis.results.comparison import (
    BLOCKS,
    FACTOR,
    FAILS_LESS,
    FAILS_MORE,
    FASTER,
    FOLLOWS,
    MIXED,
    NOTED,
    NOTHING,
    SLOWER,
    UNKNOWN,
    Asked,
    ClaimedFigure,
    Comparability,
    Comparison,
    FailedShares,
    MetricComparison,
    PairComparison,
    SideRow,
)
from gapmeter.analysis.results.cost import Cost, NoCost
from gapmeter.analysis.results.distribution import Distribution, Percentile
from gapmeter.analysis.results.regression import NOT_ESTIMABLE, REGRESSED, UNDECIDED, WITHIN, Regression
from gapmeter.analysis.results.trust import Floor
from gapmeter.analysis.stages import STAGE_NAMES
from gapmeter.analysis.stats.bootstrap import Resampled
from gapmeter.analysis.stats.estimate import Difference, Spread
from gapmeter.analysis.stats.exact import share_bounds
from gapmeter.report import html, markdown, terminal
from gapmeter.report.comparison import document, headline, remedy, with_sentences, words_of
from gapmeter.report.differences import brief, change_of, change_sentence, not_estimable, shift, verdict_sentence
from gapmeter.report.document import Table
from gapmeter.scenarios.slo import LATENCIES
from tests.kit import results as kit
from tests.kit.compared import COMMAND, folder, manifest, virtual
from tests.kit.runs import write_run

DOCS = Path(__file__).resolve().parents[2] / "docs"
PERCENTILES = dict.fromkeys(LATENCIES, FAMILY)


def judged(
    a: Sequence[RunColumns], b: Sequence[RunColumns], resamples: int = 50
) -> tuple[Differences, PairVerdict, PairComparison]:
    found = compare_sides(a, b, PERCENTILES, resamples=resamples)
    (verdict,) = claims.judge([found], {})
    return found, verdict, pair_of(("A", "B"), found, verdict, "GPU")


@pytest.mark.parametrize("paired", [True, False])
def test_swapping_the_sides_swaps_every_sign(paired: bool) -> None:
    a, b = virtual(1), virtual(1 if paired else 2, 1)
    one, other = (compare_sides([x], [y], PERCENTILES, resamples=60) for x, y in ((a, b), (b, a)))
    assert one.paired is other.paired is paired
    pairs = [(one.metrics[m][p], other.metrics[m][p]) for m in LATENCIES for p in FAMILY]
    pairs += [(d, other.ledgers[e].stages[s]) for e, ledger in one.ledgers.items() for s, d in ledger.stages.items()]
    compared = [(d, opposite) for d, opposite in pairs if d.supported]
    assert len(compared) > 20
    for d, opposite in compared:
        assert d.value == pytest.approx(-(opposite.value or 0.0))
        assert d.estimate.ends == pytest.approx([-(end or 0.0) for end in reversed(opposite.estimate.ends)])
        assert d.p == pytest.approx(opposite.p)


def test_where_no_side_tells_a_percentile_the_one_that_says_less_is_named() -> None:
    few, more = virtual(3).rows(np.arange(24)), virtual(4).rows(np.arange(60))
    for sides in (([few], [more]), ([more], [few])):
        figure = compare_sides(*sides, PERCENTILES, resamples=2).metrics["ttft"][99.0]
        assert figure.why.startswith("24 values on a side")


@pytest.mark.parametrize(("kept", "counts"), [(170, (170, 170)), (105, (105, 105)), (60, (60, 200))])
def test_of_a_run_that_lasted_far_longer_all_is_compared_and_not_its_beginning_alone(
    kept: int, counts: tuple[int, int]
) -> None:
    a, b = virtual(3), virtual(3, 1)
    assert a.count == b.count == 200
    found = compare_sides([a.rows(np.arange(kept))], [b], PERCENTILES, resamples=20)
    assert found.counts == counts
    assert found.paired is (counts[0] == counts[1])


def test_each_turn_of_a_conversation_is_paired_with_the_same_one() -> None:
    sides = []
    for run in (virtual(3), virtual(3, 1)):
        planned = run.planned.copy()
        planned[:, 1] = np.arange(run.count) % 4 + 1
        sides.append([replace(run, planned=planned)])
    (a,), (b,), why = align(*sides)
    assert (a.count, why) == (200, "")
    assert np.array_equal(a.planned, b.planned)


def test_a_short_side_is_known_by_its_own_blocks_however_long_the_other_is() -> None:
    few, many = virtual(3), virtual(4)
    found = compare_sides([few.rows(np.arange(24))], [many, virtual(5), virtual(6)], PERCENTILES, resamples=50)
    (within, *_), blocks = found.metrics["e2e"][None].spreads, 24 / found.block
    assert blocks - 1 <= within.df < 2 * blocks, "and not those of 624 requests"


@settings(max_examples=4, deadline=None)
@given(st.integers(0, 10_000))
def test_the_differences_of_the_stages_add_up_to_that_of_the_whole_wait(seed: int) -> None:
    a, b = virtual(seed, 0), virtual(seed, 1, forward_ns=5_500_000)
    for event in ("first_token", "last_token"):
        assert not a.ledgers[event][:, -1].any()  # nothing is left unexplained in virtual time
    found = compare_sides([a], [b], PERCENTILES, resamples=20)
    for ledger in found.ledgers.values():
        parts = sum(d.value or 0.0 for d in ledger.stages.values())
        assert parts == pytest.approx(ledger.total.value, abs=1e-3)


def test_a_stage_that_one_side_did_not_measure_joins_the_remainder_of_both() -> None:
    a, b = virtual(3), virtual(3, 1)
    blind = {event: table.copy() for event, table in b.ledgers.items()}
    queue = STAGE_NAMES.index("queue")
    for table in blind.values():
        table[:, -1] += table[:, queue]
        table[:, queue] = np.nan
    found = compare_sides([a], [replace(b, ledgers=blind)], PERCENTILES, resamples=20)
    ledger = found.ledgers["last_token"]
    assert "queue" in ledger.unmeasured
    assert "queue" not in ledger.stages
    assert ledger.stages["unexplained"].a == pytest.approx(a.ledgers["last_token"][:, queue].mean())


def test_identical_runs_differ_no_more_often_than_promised_and_a_change_of_five_percent_is_found_in_its_stage() -> None:
    """Six seeded pairs each; ``python -m bench compare`` does it with 400."""
    false, found, causes = 0, 0, []
    for seed in range(6):
        a = virtual(seed)
        for service, forward in ((1, 5_000_000), (2, 5_250_000)):
            differences, verdict, _ = judged([a], [virtual(seed, service, forward_ns=forward)], resamples=200)
            if service == 1:
                false += verdict.word != NOTHING
            elif verdict.word == SLOWER:
                found += 1
                change = claims.what_changed(differences, verdict, "GPU")
                causes += [change.cause] if change and change.stage else []
    assert false <= 1
    assert found >= 5
    assert set(causes) == {"decode"}


def test_runs_that_spread_widely_about_their_side_widen_the_interval() -> None:
    steady = [[virtual(seed, service) for service in pair] for seed, pair in ((5, (0, 1)), (5, (2, 3)))]
    drifting = [[side[0], virtual(5, 7, forward_ns=6_500_000)] for side in steady]
    narrow, wide = (compare_sides(a, b, PERCENTILES, resamples=100).metrics["e2e"][50.0] for a, b in (steady, drifting))
    assert wide.df == 2
    assert wide.half_width(0.95) > 3 * narrow.half_width(0.95)


def test_a_difference_below_the_load_testers_own_floor_is_not_claimed() -> None:
    found = compare_sides([virtual(6)], [virtual(6, 1, forward_ns=6_000_000)], PERCENTILES, resamples=100)
    open_eyes, blind = (claims.judge([found], floors)[0] for floors in ({}, dict.fromkeys(LATENCIES, (1e12, 1e12))))
    assert open_eyes.word == SLOWER
    assert blind.word == NOTHING


def test_what_rounding_makes_of_equal_values_is_no_difference() -> None:
    run = virtual(6)
    (verdict,) = claims.judge([compare_sides([run], [scaled(run, 1e-15)], PERCENTILES, resamples=100)], {})
    assert any(claim.difference.value for claim in verdict.claims)
    assert verdict.word == NOTHING


def test_where_no_difference_is_found_the_figure_of_an_slo_is_told_of() -> None:
    found = compare_sides([virtual(6)], [virtual(6, 1)], PERCENTILES, resamples=100)
    for slos, told in ((), ("e2e", 50.0)), ([("tpot", 50.0)], ("tpot", 50.0)):
        (verdict,) = claims.judge([found], {}, slos)
        assert verdict.word == NOTHING
        assert (verdict.telling.metric, verdict.telling.percentile) == told


PROTOCOL: dict[str, tuple[dict[str, Any], tuple[str, ...], bool, dict[str, str | None]]] = {
    "nothing": ({}, (), True, {}),
    "a port, a summary": (
        {"target__command": [*COMMAND[:4], "5", *COMMAND[5:]], "scenario__summary": "x"}, (), True, {}
    ),
    "one key, and its command": (
        {"scenario__server__max_batch": 4, "target__command": [*COMMAND[:-1], "4"]}, (), True,
        {"server.max_batch": FACTOR, "engine.command": FOLLOWS},
    ),
    "two keys": (
        {"scenario__server__max_batch": 4, "scenario__load__rate": 9.0}, (), False,
        {"server.max_batch": BLOCKS, "load.rate": BLOCKS},
    ),
    "one key, and how long a start may take": (
        {"scenario__server__max_batch": 4, "scenario__server__ready_timeout": 9.0}, (), True,
        {"server.max_batch": FACTOR, "server.ready_timeout": NOTED},
    ),
    "the same flag as a text": ({"scenario__server__args__x": "1"}, (), True, {"server.args.x": None}),
    "a bare flag": ({"scenario__server__args__x": True}, (), True, {"server.args.x": FACTOR}),
    "a flag with the word for unset": ({"scenario__server__args__y": "none"}, (), True, {"server.args.y": FACTOR}),
    "an empty variable": ({"scenario__server__env": {"y": ""}}, (), True, {"server.env.y": FACTOR}),
    "two keys, one declared": (
        {"scenario__server__max_batch": 4, "scenario__load__rate": 9.0, "plan__digest": "x"}, ("load.rate",), False,
        {"load.rate": FACTOR, "server.max_batch": BLOCKS, "plan": FOLLOWS},
    ),
    "two keys, both declared": (
        {"scenario__server__max_batch": 4, "scenario__load__rate": 9.0}, ("load.rate", "server.max_batch"), True, {},
    ),
    "a whole section, declared": (
        {"scenario__load__rate": 9.0, "scenario__server__max_batch": 4, "target__command": [*COMMAND[:-1], "4"],
         "plan__digest": "x"},
        ("load", "server"), True,
        {"load.rate": FACTOR, "server.max_batch": FACTOR, "plan": FOLLOWS, "engine.command": FOLLOWS},
    ),
    "a whole section, declared, of which something else differs": (
        {"scenario__server__max_batch": 4, "hardware__gpus": ["B GPU"]}, ("server",), False,
        {"server.max_batch": FACTOR, "hardware.gpus": BLOCKS},
    ),
    "another seed": ({"scenario__seed": 2, "plan__digest": "x"}, (), True, {"seed": FACTOR, "plan": FOLLOWS}),
    "another law of lengths": (
        {"scenario__workload__prompt_tokens": {"lognormal": {"median": 9}}, "plan__digest": "x"}, (), True,
        {"workload.prompt_tokens": FACTOR, "plan": FOLLOWS},
    ),
    "another plan of the same scenario": ({"plan__digest": "x"}, (), False, {"plan": BLOCKS}),
    "another repeat, with fresh texts": ({"plan__digest": "x", "repeat": 1}, (), True, {"plan": NOTED}),
    "an SLO": ({"scenario__slo": []}, (), True, {"slo": NOTED}),
    "another model": ({"target__model": "n"}, (), False, {"model": BLOCKS}),
    "another precision, and a GPU": (
        {"scenario__server__precision": "float16", "hardware__gpus": ["B GPU"]}, (), False,
        {"server.precision": FACTOR, "hardware.gpus": BLOCKS},
    ),
    "other hardware, declared": ({"hardware__gpus": ["B GPU"]}, ("hardware",), True, {"hardware.gpus": FACTOR}),
    "other GPUs, declared, on another host": (
        {"hardware__gpus": ["B GPU"], "hardware__cpu": "B processor"},
        ("hardware.gpus",),
        False,
        {"hardware.gpus": FACTOR, "hardware.cpu": BLOCKS},
    ),
    "the same prompts from another folder": ({"scenario__workload__file": "/b/mine.jsonl"}, (), True, {}),
    "the same trace from another folder": ({"scenario__load__trace": {"file": "/b/t.csv", "speed": 1}}, (), True, {}),
    "the same trace, faster": (
        {"scenario__load__trace": {"file": "/b/t.csv", "speed": 2}, "plan__digest": "x"}, (), True,
        {"load.trace": FACTOR, "plan": FOLLOWS},
    ),
    "other prompts": (
        {"scenario__workload__file": "/b/mine.jsonl", "plan__digest": "x", "contents": {"workload.file": "y"}}, (),
        True, {"workload.file": FACTOR, "plan": FOLLOWS},
    ),
    "the same prompts from another folder, at another rate": (
        {"scenario__workload__file": "/b/mine.jsonl", "scenario__load__rate": 9.0, "plan__digest": "x"}, (), True,
        {"load.rate": FACTOR, "plan": FOLLOWS, "workload.file": None},
    ),
    "another gapmeter": ({"versions__gapmeter": "0.2.0"}, (), False, {"versions.gapmeter": BLOCKS}),
    "another engine flag": ({"scenario__server__args__x": 2}, (), True, {"server.args.x": FACTOR}),
    "its device's speed measured again": ({"target__peaks": kit.PEAKS}, (), True, {}),
    "settings beside none": ({"target__env": {}}, (), False, {"engine.env": BLOCKS}),
}  # fmt: skip


@pytest.mark.parametrize("case", PROTOCOL)
def test_only_what_is_meant_to_differ_may(case: str) -> None:
    changes, factors, comparable, meanings = PROTOCOL[case]
    files = {
        "scenario__workload__file": "/a/mine.jsonl", "scenario__load__trace": {"file": "/a/t.csv", "speed": 1},
        "contents": {"workload.file": "x", "load.trace": "x"},
    }  # fmt: skip
    found = check_protocol(manifest(**files), manifest(**files | changes), None, None, factors)
    assert found.comparable is comparable, found.facts
    told = {fact.key: fact.meaning for fact in found.facts}
    assert {key: told.get(key) for key in meanings} == meanings


@pytest.mark.parametrize(
    ("env", "told"), [(None, "not recorded"), ({}, "none"), ({"A": "1", "B": "2"}, "A=1 B=2")], ids=str
)
def test_what_was_not_recorded_is_told_from_what_was_not_set(env: dict[str, str] | None, told: str) -> None:
    (fact,) = check_protocol(manifest(target__env={"C": "3"}), manifest(target__env=env), None, None).facts
    assert (fact.key, fact.a, fact.b) == ("engine.env", "C=3", told)


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("scenario__server__args__y", "none", ("null", '"none"')),
        ("scenario__server__max_batch", None, ("8", "none")),
        ("scenario__server__args__x", {"to": None}, ("1", "{to: none}")),
        ("scenario__server__args__y", 2, ("none", "2")),
        ("scenario__cost__usd_per_hour", 2.5, ("none", "2.5")),
        ("scenario__load__traceparent", True, ("not recorded", "true")),
    ],
)
def test_what_a_scenario_does_not_set_is_none_and_what_a_manifest_lacks_is_unknown(
    key: str, value: Any, told: tuple[str, str]
) -> None:
    (fact,) = check_protocol(manifest(), manifest(**{key: value}), None, None).facts
    assert (fact.a, fact.b) == told


@pytest.mark.parametrize(
    ("a", "b", "alike"),
    [
        (8, "8", True), ("8.0", 8.0, True), ("0.5", 0.5, True), (8, 8.0, True), ("8", "8.0", False),
        (True, "true", False), (True, 1, False), (None, "none", False), (None, "", False), ("", "none", False),
        ({"x": 8}, {"x": "8"}, False),
    ],
)  # fmt: skip
def test_of_two_kinds_of_values_only_a_number_and_its_text_are_alike(a: Any, b: Any, alike: bool) -> None:
    assert are_alike(a, b) is alike is are_alike(b, a)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"uniform": [16, 48]}, "{uniform: [16, 48]}"), ([], "[]"), (True, "true"), (9.0, "9"), (0.3, "0.3"),
        (0.1 + 0.2, str(0.1 + 0.2)),
    ],
)  # fmt: skip
def test_a_value_is_written_as_in_a_scenario_and_two_numbers_that_differ_do_so_in_words(value: Any, told: str) -> None:
    assert words(value) == told


def test_an_invalid_run_is_told(folders: list[Path]) -> None:
    a, b = (read_run(path) for path in folders[1:])
    invalid = b.result.model_copy(update={"verdict": "INVALID", "invalid_reasons": ("late",)})
    killed = b.manifest.model_copy(update={"status": "incomplete", "ended_because": "killed"})
    for other, why in ((replace(b, result=invalid), "late"), (replace(b, manifest=killed), "incomplete: killed")):
        (protocol,) = compare([Side((a,)), Side((other,))]).protocol
        assert [(fact.a, fact.b) for fact in protocol.facts if fact.key == "validity"] == [("valid", why)]
        assert not protocol.comparable


def test_what_only_the_second_side_s_slos_name_is_compared_too(folders: list[Path]) -> None:
    a, b = (read_run(path) for path in folders[:2])
    slo = b.manifest.slo[0].model_copy(update={"percentile": 97.0, "text": "ttft p97 <= 9 s"})
    asked = replace(b, manifest=b.manifest.model_copy(update={"slo": (slo,)}))
    result = compare([Side((a,)), Side((asked,))])
    (row,) = judge_regression(result, [("ttft", 97.0)], 0.05, "base", "compare/1").rows
    assert row.name == "ttft p97"


def test_a_comparison_of_two_models_is_from_both(folders: list[Path]) -> None:
    a, b = (read_run(path) for path in folders[:2])
    origin = b.result.provenance.model_copy(update={"model": "another"})
    other = replace(b, result=b.result.model_copy(update={"provenance": origin}))
    found = compare([Side((a,)), Side((other,))])
    assert found.provenance.model == f"{a.result.provenance.model}, another"


def test_another_floor_of_the_load_tester_is_told() -> None:
    about = manifest()
    floor = Floor(
        ttft_p50_ms=0.1, ttft_p99_ms=0.2, itl_p50_ms=0.1, itl_p99_ms=0.1, e2e_p50_ms=0.1, e2e_p99_ms=0.2, chunk_us=9.0,
        tokens_per_s=1e5, requests_per_s=1e3, quick=False, measured="",
    )  # fmt: skip
    near, far = (floor.model_copy(update={"ttft_p99_ms": ms}) for ms in (0.2, 0.5))
    assert blocking(check_protocol(about, about, near, far)) == ["floor"]
    one = check_protocol(about, about, near, None)
    assert one.comparable
    assert [fact.meaning for fact in one.facts] == [NOTED]


def blocking(found: Comparability) -> list[str]:
    return [fact.key for fact in found.blocking]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    home = tmp_path_factory.mktemp("runs")
    return [folder(home / "three", slots=3), folder(home / "eight", slots=8), folder(home / "six", slots=6)]


def sides(paths: Sequence[Path]) -> list[Side]:
    return [Side((read_run(path),)) for path in paths]


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"max_batch": 4}, ("A (max_batch 8)", "B (max_batch 4)")),
        ({"max_batch": 4, "precision": "float16"}, ("A", "B")),
        ({"model": 9 * "a long name "}, ("A", "B")),
        ({}, ("A", "B")),
    ],
    ids=["one key", "two keys", "a long value", "nothing"],
)
def test_sides_are_called_by_the_one_short_value_that_differs(changes: dict[str, Any], names: tuple[str, str]) -> None:
    other = manifest(**{f"scenario__server__{key}": value for key, value in changes.items()})
    found = check_protocol(manifest(), other, None, None, ("server",))
    assert build._names("A", found.model_copy(update={"side": "B"})) == names


def test_folders_are_compared_told_and_drawn_with_no_figure_that_json_lacks(folders: list[Path]) -> None:
    result = compare(sides(folders[:2]), command="gapmeter compare three eight")
    told = result.model_copy(update={"words": words_of(result)})
    assert Comparison.parse(told.model_dump_json(), Path("compare.json")) == told
    found = result.comparisons[0]
    assert result.verdict == "MIXED"
    assert found.paired
    assert (found.a, found.b) == ("A (max_batch 3)", "B (max_batch 8)")
    assert found.changed.stage == "queue"
    own = found.stages["last_token"]
    assert sum(stage.difference_ms or 0.0 for stage in own.stages) == pytest.approx(own.total.difference_ms)
    shown = document(result)
    page = html.page(shown)
    assert 'data-verdict="MIXED"' in page
    assert page.count('role="img"') >= 6
    assert "http-equiv" in page
    assert "TTFT p90" in markdown.text(shown)
    assert "faster" in terminal.text(shown).plain
    promise = "without the shares that failed: the chance that any of these is claimed to differ that does not is at"
    assert promise in told.words.method


def test_requests_that_only_one_side_issued_are_told_where_the_differences_leave_out_many(folders: list[Path]) -> None:
    one, other = sides(folders[:2])
    whole = other.requests
    short = Side((replace(one.first, columns=one.first.columns.rows(np.arange(round(0.7 * whole)))),))
    said = f"differences are of the requests that both sides issued, which leaves out {whole - short.requests} of B's"
    assert any(warning.startswith(said) for warning in compare([short, other]).warnings)
    assert not any("leaves out" in warning for warning in compare([one, other]).warnings)


def test_a_side_without_a_steady_state_is_told(folders: list[Path]) -> None:
    one, other = sides(folders[:2])
    steady = one.first.result.steady.model_copy(update={"state": "unsteady"})
    grown = Side((replace(one.first, result=one.first.result.model_copy(update={"steady": steady})),))
    said = "A had no steady state, so its TTFT and E2E depend on how long the load lasted"
    assert compare([grown, other]).warnings[0].startswith(said)
    assert not any("steady" in warning for warning in compare([one, other]).warnings)


def test_a_mean_that_moves_the_other_way_says_where_nothing_supports_it(folders: list[Path]) -> None:
    (found,) = compare(sides(folders[:2])).comparisons
    e2e = found.metrics["e2e"]
    changed = found.changed.model_copy(update={"metric": "e2e", "claim": "TPOT p50", "unexplained": "opposite"})
    mean = e2e.mean.model_copy(update={"why": "3 independent requests do not support a mean"})
    metrics = {**found.metrics, "e2e": e2e.model_copy(update={"mean": mean})}
    told = change_sentence(found.model_copy(update={"changed": changed, "metrics": metrics}))
    assert told.endswith("it moves the other way than TPOT p50, though 3 independent requests do not support a mean")


def test_more_than_two_runs_share_one_family_and_one_table(folders: list[Path]) -> None:
    result = compare(sides(folders))
    assert [found.b for found in result.comparisons] == ["B (max_batch 8)", "C (max_batch 6)"]
    assert result.method.family > 9
    assert [row.name for row in result.table.rows] == ["A", "B", "C"]


def test_a_side_of_several_runs_has_the_cost_the_energy_and_the_verdict_of_all_of_them(folders: list[Path]) -> None:
    runs = [read_run(path) for path in folders]
    cheap = Cost.model_construct(per_request_usd=2.0, per_request_usd_ci=(1.0, 3.0), reason=None)
    dear = Cost.model_construct(per_request_usd=6.0, per_request_usd_ci=(4.0, None), reason=None)
    none = NoCost(status="none", reason="an SLO is missed", per_request_usd=None)

    def row(*costs: Cost | NoCost, verdicts: tuple[str, ...] = ("PASS", "FAIL", "PASS")) -> SideRow:
        own = zip(costs, runs, verdicts, strict=False)
        each = [(run, run.result.model_copy(update={"cost": cost, "verdict": verdict})) for cost, run, verdict in own]
        return build._row("A", Side(tuple(replace(run, result=result) for run, result in each)))

    several = row(cheap, dear, cheap)
    assert (several.cost.value, several.cost.ci, several.verdict) == (2.0, (1.0, None), "2 PASS, 1 FAIL")
    assert (row(dear).cost.ci, row(dear).verdict) == ((4.0, None), "PASS")
    lacking = row(cheap, none).cost
    assert (lacking.value, lacking.why) == (None, "an SLO is missed (in 1 of 2 runs)")
    undecided = row(cheap, none, cheap, verdicts=("PASS", "INCONCLUSIVE", "PASS")).cost
    assert (undecided.value, undecided.ci) == (2.0, (1.0, 3.0))
    assert undecided.why == "of 2 of 3 runs; the other is INCONCLUSIVE"
    assert row(none, none, verdicts=("INCONCLUSIVE", "INCONCLUSIVE")).cost.value is None
    assert row(none, none, cheap, verdicts=("INCONCLUSIVE", "FAIL", "PASS")).cost.value is None


def test_identical_devices_are_told_how_far_they_lie_apart(tmp_path: Path) -> None:
    """Of other software nobody says that it is the device's."""
    changes = {}, {"hardware__system": "another kernel"}, {"versions__engine": "2"}, {"versions__engine": "2"}
    paths = [folder(tmp_path / str(at), changes=each) for at, each in enumerate(changes)]
    one, two = compare(sides(paths), Asked(factors=("hardware", "versions"))).table.devices
    assert (one.sides, two.sides) == (("A", "B"), ("C", "D"))
    assert one.figures["e2e_p50"].relative == 0
    asked = {"scenario__server__engine": "vllm", "versions__vllm": "0.27.0", "versions__torch": "2.8"}
    changes = {}, asked, asked | {"versions__vllm": "0.28.0"}, asked | {"versions__torch": "2.9"}
    paths = [folder(tmp_path / f"engine{at}", changes=each) for at, each in enumerate(changes)]
    table = compare(sides(paths), Asked(factors=("server.engine",))).table
    assert [each.sides for each in table.devices] == [("B", "D")], "another engine, which follows from the factor"
    server = {"scenario__server__engine": "attach", "scenario__server__url": "http://10.0.0.5:8000"}
    table = compare(sides([folder(tmp_path / name, changes=server) for name in ("three", "four")])).table
    assert ([row.device for row in table.rows], table.devices) == (["unknown"] * 2, ())


def test_what_is_not_comparable_has_no_figures_unless_forced_and_then_every_table_is_marked(tmp_path: Path) -> None:
    paths = [folder(tmp_path / "a"), folder(tmp_path / "b", slots=3, changes={"versions__gapmeter": "9"})]
    refused, forced = compare(sides(paths)), compare(sides(paths), Asked(force=True))
    assert refused.verdict == "NOT COMPARABLE"
    assert refused.comparisons == ()
    assert "versions.gapmeter: 0.1.0 | 9" in headline(refused)
    assert "--factor versions.gapmeter" in terminal.text(document(refused)).plain
    assert forced.verdict == "NOT COMPARABLE, forced"
    gated = with_sentences(judge_regression(forced, [("ttft", 90.0)], 0.05, "base", "compare/1"), forced)
    assert (gated.status, gated.sentence) == ("NOT COMPARABLE", headline(refused)), "not which side is slower"
    shown = terminal.text(document(forced)).plain
    assert max(map(len, shown.splitlines())) <= 80
    assert re.search(r"^ NOT COMPARABLE  .*difference  answer", shown, re.MULTILINE), "the head of the figures"
    assert "\n| NOT COMPARABLE | A" in markdown.text(document(forced))
    page = html.page(document(forced))
    assert page.count('<div class="across"') == page.count("<table") + page.count("<figure>") > 1


def test_of_many_differences_few_are_named_and_one_factor_stands_for_those_of_a_group(tmp_path: Path) -> None:
    other = {f"versions__part{at}": str(at) for at in range(6)}
    refused = compare(sides([folder(tmp_path / "a"), folder(tmp_path / "b", changes=other)]))
    assert "versions.part3: not recorded | 3; and 2 more" in headline(refused)
    told = " ".join(terminal.text(document(refused)).plain.split())
    assert "if that is what you compare: --factor versions; or" in told


def test_runs_of_one_side_that_are_not_alike_are_no_matter_of_a_factor(tmp_path: Path) -> None:
    one, other = sides([folder(tmp_path / "a"), folder(tmp_path / "b", changes={"versions__part": "1"})])
    mixed = Side((*one.runs, *other.runs, *other.runs))
    refused = compare([mixed, one])
    (fact,) = refused.protocol[0].blocking
    assert (fact.key, fact.within) == ("versions.part", "A")
    assert "within" not in check_protocol(one.first.manifest, other.first.manifest, None, None).facts[0].to_json()
    assert remedy(refused).startswith("name only runs of one and the same thing as a side; or --force")
    own = "'s own runs differ: versions.part: not recorded | 1"
    assert (headline(refused), headline(compare([one, mixed]))) == (f"A{own}", f"B{own}")
    several = compare([mixed, one, other])
    both = "A and C differ in more than what is compared: versions.part: not recorded | 1"
    assert headline(several) == f"A{own}. {both}", "each once"
    plain = terminal.text(document(several)).plain
    assert plain.count("versions.part, within A: not recorded | 1") == 1
    assert "C, versions.part: not recorded | 1" in plain


def figure(
    growth: float | None, error: float = 0.01, df: float = 4.0, floor_ms: float = 0.0,
    failed: Literal["a", "b", "ab"] | None = None, a: float = 100.0,
) -> ClaimedFigure:  # fmt: skip
    """A baseline of ``a`` ms, how much it grew, and how far log(B / A) moves by chance."""
    b = None if growth is None else a * (1 + growth)
    found = (
        Difference(a, b, (Spread(a * error, df),), (Spread(error, df),)) if b else Difference(a, None, why="too few")
    )
    ms = found.value
    return ClaimedFigure(
        a_ms=a, b_ms=b, difference_ms=ms, p=found.p, df=df, relative=growth, ci_ms=None if ms is None else (ms, ms),
        relative_ci=found.growth_ends, why=found.why, floor_ms=floor_ms, in_family=True, p_adjusted=None,
        confirmed=False, least_ms=None, growth_error=error if b else None, growth_df=df,
        failed=failed,
    )  # fmt: skip


NONE_FAILED = FailedShares(a_share=0.0, b_share=0.0, a_ci=(0.0, 0.003), b_ci=(0.0, 0.003))


def held(
    *figures: ClaimedFigure, errors: FailedShares = NONE_FAILED, runs: tuple[int, int] = (3, 3),
    mean: ClaimedFigure = figure(None), allowed: float = 0.05,
    slos: Sequence[tuple[str, float]] = (("ttft", 90.0), ("ttft", 50.0)),
) -> Regression:  # fmt: skip
    """TTFT p90, p50, or what ``slos`` name, of B against A."""
    named = dict(zip(slos, figures, strict=False))
    metrics = {
        metric: MetricComparison(
            verdict="slower", shift=(), mean=mean,
            percentiles={f"p{p:g}": figure for (of, p), figure in named.items() if of == metric},
        )
        for metric, _ in named
    }  # fmt: skip
    pair = PairComparison.model_construct(metrics=metrics, changed=None, errors=errors, runs=runs)
    result = Comparison.model_construct(comparable=True, comparisons=(pair,))
    return with_sentences(judge_regression(result, list(named), allowed, "base", "compare/1"), result)


# Student's t with 4 degrees of freedom: 2.776 standard errors.
REGRESSIONS = {
    "the whole interval beyond the limit": (figure(0.10), REGRESSED),
    "a growth beyond chance, and beyond the limit, but not beyond the limit by more than chance": (
        figure(0.07),
        UNDECIDED,
    ),
    "less than the limit, the interval reaching beyond it": (figure(0.03), UNDECIDED),
    "the whole interval below the limit": (figure(0.01), WITHIN),
    "no growth, but so wide an interval that twice the limit is in it": (figure(0.0, 0.04), UNDECIDED),
    "an improvement": (figure(-0.3), WITHIN),
    "below the load tester's floor": (figure(0.10, floor_ms=11.0), UNDECIDED),
    "below the limit, in reach of requests that the new side failed": (figure(0.01, failed="b"), UNDECIDED),
    "an improvement on what the baseline failed": (figure(-0.3, failed="a"), WITHIN),
    "beyond the limit by requests that failed": (figure(0.10, failed="b"), REGRESSED),
    "beyond the limit, in reach of requests that the baseline failed": (figure(0.10, failed="a"), UNDECIDED),
    "not supported": (figure(None), NOT_ESTIMABLE),
}


@pytest.mark.parametrize("case", REGRESSIONS)
def test_a_regression_is_an_interval_beyond_the_limit_and_within_is_one_below_it(case: str) -> None:
    told, status = REGRESSIONS[case]
    found = held(told)
    assert found.status == found.rows[0].status == status
    assert found.sentence == found.rows[0].sentence
    assert found.sentence.startswith("TTFT p90 ")


def test_what_did_not_grow_at_all_is_within_a_limit_of_nothing() -> None:
    assert held(figure(0.0, 0.0), allowed=0.0).status == WITHIN


def test_a_time_out_is_told_as_no_latency_of_the_baseline() -> None:
    failed = held(figure(-0.3, failed="a"))
    assert failed.sentence.startswith("TTFT p90 at least 100 ms -> 70.0 ms, allowed")
    both = held(figure(0.01, failed="ab"))
    assert both.rows[0].runs_needed is None
    told = "TTFT p90 at least 100 ms -> at least 101 ms, allowed +5.0 %: undecided; its interval reaches requests that"
    assert both.sentence.startswith(told)


def test_of_two_percentiles_each_must_regress_more_surely_and_both_must_be_within() -> None:
    alone, beside = held(figure(0.084)), held(figure(0.084), figure(0.0))
    assert (alone.status, beside.status) == (REGRESSED, UNDECIDED)
    assert held(figure(0.0), figure(0.0)).status == WITHIN
    assert held(figure(0.0), figure(0.03)).status == UNDECIDED


def test_what_is_undecided_says_how_many_runs_would_decide_it_and_what_these_could_see() -> None:
    (row,) = held(figure(0.08, 0.02)).rows
    error_of_a_run = 0.02 * (3 / 2) ** 0.5
    enough, fewer = (
        stats.t.ppf([0.975, 0.8], 2 * count - 2).sum() * error_of_a_run * (2 / count) ** 0.5
        for count in (row.runs_needed, row.runs_needed - 1)
    )
    assert enough <= np.log(1.08 / 1.05) < fewer
    assert row.least == pytest.approx(1.05 * np.exp(stats.t.ppf([0.975, 0.8], 4).sum() * 0.02) - 1)
    assert f"takes about {row.runs_needed} per side" in row.sentence
    assert held(figure(0.0505, 0.02)).rows[0].runs_needed is None
    assert held(figure(0.0)).rows[0].runs_needed is None


def test_the_runs_that_would_decide_are_more_than_there_are_and_by_the_degrees_of_freedom_of_the_figure() -> None:
    (row,) = held(figure(0.10, 0.012, df=2.0)).rows
    error_of_a_run = 0.012 * (3 / 2) ** 0.5
    enough, fewer = (
        stats.t.ppf([0.975, 0.8], count - 1).sum() * error_of_a_run * (2 / count) ** 0.5
        for count in (row.runs_needed, row.runs_needed - 1)
    )
    assert enough <= np.log(1.10 / 1.05) < fewer, "of three runs a side it has half of what Student's test has"
    assert row.runs_needed > 3, "which did not decide it"


def test_what_the_examples_of_the_documentation_promise_is_what_is_said_of_their_intervals() -> None:
    slos, told = (("ttft", 90.0), ("e2e", 50.0)), (DOCS / "comparing.md").read_text(encoding="utf-8")
    of_three = held(figure(0.0169, 0.0237, a=20.04), figure(0.0), slos=slos)
    of_one = held(figure(0.0), figure(0.0621, 0.0453, 40.0, a=256.2), slos=slos, runs=(1, 1))
    for found in (of_three, of_one):
        assert f"\nUNDECIDED: {found.sentence}\n" in told


def test_a_growth_that_is_no_more_than_the_load_testers_floor_is_decided_by_no_number_of_runs() -> None:
    (row,) = held(figure(0.10, floor_ms=11.0)).rows
    assert (row.status, row.runs_needed) == (UNDECIDED, None)
    assert row.least == pytest.approx(1.11 * np.exp(stats.t.ppf(0.8, 4) * 0.01) - 1), "half of those of 11 % are found"
    told = "find a regression of 12 % or more 80 % of the time; at this growth, which is within the load tester's own"
    assert row.sentence.endswith(f"{told} floor of 11.0 ms, no number of runs decides it")
    assert held(figure(0.03, floor_ms=11.0)).rows[0].runs_needed is not None, "it may be found to be within the limit"
    assert held(figure(0.08, 0.02, floor_ms=1.0)).rows[0].runs_needed == held(figure(0.08, 0.02)).rows[0].runs_needed


def test_beside_another_percentile_a_regression_must_be_larger_to_be_found_and_takes_more_runs() -> None:
    (alone,), (beside, _) = held(figure(0.08, 0.02)).rows, held(figure(0.08, 0.02), figure(0.0, 0.02)).rows
    assert beside.least == pytest.approx(1.05 * np.exp(stats.t.ppf([1 - 0.025 / 2, 0.8], 4).sum() * 0.02) - 1)
    assert beside.runs_needed > alone.runs_needed
    (alone,), (beside, _) = held(figure(0.03, 0.02)).rows, held(figure(0.03, 0.02), figure(0.0, 0.02)).rows
    assert beside.runs_needed == alone.runs_needed, "each interval below the limit is within it, however many there are"


MEANS = {
    "beyond the limit": (figure(5.1), REGRESSED, ["ttft p90", "mean ttft"]),
    "at least so much, since requests failed": (figure(5.1, failed="b"), REGRESSED, ["ttft p90", "mean ttft"]),
    "perhaps beyond it": (figure(0.06), NOT_ESTIMABLE, ["ttft p90"]),
    "within it, which says nothing of a percentile": (figure(0.0), NOT_ESTIMABLE, ["ttft p90"]),
}


@pytest.mark.parametrize("case", MEANS)
def test_where_no_percentile_can_be_estimated_a_mean_may_prove_a_regression_and_nothing_else(case: str) -> None:
    mean, status, rows = MEANS[case]
    found = held(figure(None), mean=mean)
    assert (found.status, [row.name for row in found.rows]) == (status, rows)
    if status == REGRESSED:
        assert found.sentence.startswith(f"mean TTFT 100 ms -> {'at least ' if mean.failed else ''}610 ms")
        assert "the sample is too small for the percentile" in found.sentence
    estimable = held(figure(0.0), mean=mean)
    assert [row.name for row in estimable.rows] == ["ttft p90"]


@pytest.mark.parametrize(("growth", "status"), [(0.03, UNDECIDED), (0.10, REGRESSED)])
def test_a_refused_percentile_is_told_also_where_another_ones_answer_is_worse(growth: float, status: str) -> None:
    """For a gate ends with 98 because of it."""
    refused = figure(None).model_copy(update={"why": "refused: up to 2.00 ms", "late_ms": 2.0})
    found = held(figure(growth), refused)
    assert found.status == status
    assert found.sentence == f"{found.rows[0].sentence}; TTFT p50 cannot be compared: refused: up to 2.00 ms"


def test_one_run_a_side_is_marked_and_asks_for_three() -> None:
    found = held(figure(0.04), runs=(1, 1))
    assert "one run per side: the interval leaves out" in found.sentence
    assert "three runs per side would show how much they do" in found.rows[0].sentence
    assert found.rows[0].runs_needed is None


FAILURES = {
    "more in B, beyond chance": ((0.0, 0.02), REGRESSED),
    "one more in B": ((0.0, 0.001), UNDECIDED),
    "as many": ((0.01, 0.01), WITHIN),
    "fewer in B": ((0.05, 0.0), WITHIN),
}


@pytest.mark.parametrize("case", FAILURES)
def test_a_side_that_fails_more_requests_is_never_within(case: str) -> None:
    (a, b), status = FAILURES[case]
    a_ci, b_ci = share_bounds(1000 * a, 1000), share_bounds(1000 * b, 1000)
    found = held(figure(-0.2), errors=FailedShares(a_share=a, b_share=b, a_ci=a_ci, b_ci=b_ci))
    assert found.status == status
    assert found.rows[0].status == WITHIN
    assert "of its requests" in found.sentence


@pytest.mark.parametrize(("a", "b", "more"), [(0, 8, True), (0, 4, False), (4, 8, False), (2, 14, True)])
def test_a_few_requests_show_that_more_failed_as_soon_as_their_difference_does(a: int, b: int, more: bool) -> None:
    a_ci, b_ci = share_bounds(a, 60), share_bounds(b, 60)
    assert FailedShares(a_share=a / 60, b_share=b / 60, a_ci=a_ci, b_ci=b_ci).more == ("b" if more else None)
    assert FailedShares(a_share=b / 60, b_share=a / 60, a_ci=b_ci, b_ci=a_ci).more == ("a" if more else None)


def failing_at_random(run: RunColumns, given_ns: float = 60e9) -> RunColumns:
    """The same run, but of twenty requests one fails, whatever it would have taken."""
    return without(run, np.arange(run.count) % 20 == 0, given_ns)


@pytest.mark.parametrize("given_ns", [2e9, 300e9])
def test_a_server_that_only_fails_more_is_told_so_and_its_time_out_moves_no_other_percentile(given_ns: float) -> None:
    whole = virtual(1)
    failing = failing_at_random(whole, given_ns=given_ns)
    for one, other, word, said in (
        (whole, failing, FAILS_MORE, "B failed 5.0 % of its requests, A none, more than chance explains; "),
        (failing, whole, FAILS_LESS, "B failed none of its requests, A 5.0 %, fewer than chance explains; "),
    ):
        found, verdict, pair = judged([one], [other], resamples=200)
        assert verdict.word == word
        assert verdict_sentence(pair).startswith(said)
        for percentile, each in found.metrics["ttft"].items():
            if percentile is not None and each.supported and not each.failed:
                longest = float(whole.values["ttft"].max())
                assert max(abs(end or 0.0) for end in (each.a, each.b, *each.estimate.known[1:])) <= 1.5 * longest


@pytest.mark.parametrize(("apart", "more"), [(1, None), (10, "b")])
def test_failures_of_one_burst_are_no_more_than_chance_explains_where_the_other_side_met_none(
    apart: int, more: str | None
) -> None:
    """Twenty of one run, in a row or one in ten: a side without any cannot know that they come in rows."""
    a, b = ([virtual(seed, service) for seed in range(3)] for service in (0, 1))
    number = np.arange(b[1].count)
    b[1] = without(b[1], (number < 20 * apart) & (number % apart == 0), 60e9)
    for one, other, expected in ((a, b, more), (b, a, more and "a")):
        found = compare_sides(one, other, PERCENTILES, resamples=50).failed
        assert max(found.a_share, found.b_share) == pytest.approx(20 / sum(run.count for run in b))
        assert found.more == expected
    down = [*b[:2], replace(b[2], down=True)]
    assert compare_sides(a, down, PERCENTILES, resamples=50).failed.more == "b", "a server that went down is no burst"


def test_of_too_few_requests_more_failures_are_told_and_no_lack_of_a_difference() -> None:
    few = virtual(1).rows(np.arange(5))
    _, verdict, pair = judged([few], [without(few, np.ones(5, bool), 60e9)], resamples=20)
    said = verdict_sentence(pair)
    assert (verdict.word, verdict.telling) == (FAILS_MORE, None)
    assert said.startswith(
        "B failed 100 % of its requests, A none, more than chance explains; no percentile and no mean "
    )


def test_of_a_side_that_failed_every_request_nothing_but_that_is_told() -> None:
    whole = virtual(1)
    failed = without(whole, np.ones(whole.count, bool), 60e9)
    _, verdict, pair = judged([failed], [whole])
    said = verdict_sentence(pair)
    assert verdict.word == FAILS_LESS
    assert said.endswith("; no percentile and no mean can be compared: requests failed, and a mean leaves them out")


@pytest.mark.parametrize(("factor", "more", "less"), [(2.0, SLOWER, FAILS_LESS), (0.5, FAILS_MORE, MIXED)])
def test_a_server_that_fails_more_is_never_faster_and_one_that_fails_less_may_be_slower(
    factor: float, more: str, less: str
) -> None:
    whole = virtual(1)
    failing = failing_at_random(scaled(whole, math.log(factor)))
    for one, other, word in ((whole, failing, more), (failing, whole, less)):
        assert judged([one], [other], resamples=200)[1].word == word


@pytest.mark.parametrize("share", [0.01, 0.02, 0.05])
@pytest.mark.parametrize("count", [1, 3])
def test_dropping_the_slowest_requests_is_neither_faster_nor_within(share: float, count: int) -> None:
    for seed in range(2):
        a = [virtual(seed, service) for service in range(count)]
        b = [dropping(run, share) for run in a]
        found, verdict, pair = judged(a, b, resamples=60)
        assert verdict.word not in (FASTER, MIXED)
        assert judge_pair(pair, [("ttft", 90.0)], 0.05, "", "").status in (REGRESSED, UNDECIDED)
        assert "B failed" in verdict_sentence(pair)
        means = {metric: {None: found.metrics[metric][None]} for metric in LATENCIES}
        assert claims.judge([replace(found, metrics=means)], {})[0].word not in (FASTER, MIXED)


def test_a_side_of_few_runs_that_vary_more_than_the_others_many_is_not_judged_by_theirs() -> None:
    """Two runs 20 % apart tell little of their mean, however alike six others are."""
    a = [scaled(virtual(seed), factor) for seed, factor in enumerate((-0.1, 0.1))]
    b = [scaled(virtual(seed), factor) for seed, factor in enumerate((-0.01, 0.01) * 3, 10)]
    for one, other in ((a, b), (b, a)):
        growth = compare_sides(one, other, PERCENTILES, resamples=50).metrics["ttft"][50.0].growth
        assert growth is not None and growth.half_width(0.95) > 0.5


def alike(seed: int, count: int, log_factor: float = 0.0) -> RunColumns:
    """The last requests of a queue that is nearly full, whose neighbors are too alike for a percentile."""
    rng = np.random.default_rng(seed)
    run = queue_run(rng, load=0.95)
    return scaled(run.rows(np.arange(run.count - count, run.count)), log_factor)


def test_six_times_slower_is_told_by_the_mean_where_no_percentile_can_be_estimated() -> None:
    alone, verdict, _ = judged([alike(0, 40)], [alike(10, 40, math.log(6))], resamples=100)
    assert "independent ones, do not support a mean of one run a side" in alone.metrics["ttft"][None].why
    assert verdict.word == UNKNOWN
    a, b = ([alike(10 * side + i, 40, side * math.log(6)) for i in range(3)] for side in (0, 1))
    found, verdict, pair = judged(a, b, resamples=100)
    assert not any(found.metrics["ttft"][p].supported for p in FAMILY)
    assert verdict.word == SLOWER
    assert str(verdict.telling.figure if verdict.telling else "") == "mean TTFT"
    mean = pair.metrics["ttft"].mean
    assert mean.relative_ci is not None and mean.relative_ci[0] < 5 < mean.relative_ci[1]
    told = r"B is slower than A: mean TTFT .* -> .*, \+.* \(.*\), [\d.]+ times \([\d.]+ to [\d.]+\)$"
    assert re.search(told, verdict_sentence(pair))


def test_a_mean_of_one_short_run_tells_six_times_and_identical_runs_no_difference() -> None:
    told = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        a, same, slow = (queue_run(rng, load=0.3).rows(np.arange(30)) for _ in range(3))
        for b in (same, scaled(slow, math.log(6))):
            mean = compare_sides([a], [b], dict.fromkeys(LATENCIES, ()), resamples=60).metrics["ttft"][None]
            told.append((b is same, (mean.p if mean.supported else 1.0) < 0.05 / 16))
    assert sum(claimed for same, claimed in told if same) <= 1
    assert sum(claimed for same, claimed in told if not same) >= 30


def test_a_mean_is_of_what_succeeded_and_so_proves_nothing_but_slower() -> None:
    a = virtual(1)
    slow = dropping(scaled(a, 2.0), 0.05)
    for one, other, claimed in ((a, slow, SLOWER), (slow, a, None), (slow, slow, None), (a, dropping(a, 0.05), None)):
        found = compare_sides([one], [other], PERCENTILES, resamples=60)
        mean = found.metrics["ttft"][None]
        (verdict,) = claims.judge([replace(found, metrics={"ttft": {None: mean}})], {})
        if claimed:
            assert verdict.word == claimed and mean.failed == "b"
            assert mean.b == pytest.approx(slow.values["ttft"][slow.good].mean())
            pair = pair_of(("A", "B"), found, verdict, "GPU")
            assert change_of(*next(each for each in pair.figures() if str(each[0]) == "mean TTFT")).endswith(
                f"-> at least {duration((mean.b or 0.0) / 1e6)}"
            )
        else:
            assert not mean.supported and "failed" in mean.why and verdict.word not in (FASTER, SLOWER, MIXED)


def test_a_mean_is_that_of_all_values_and_its_interval_sees_what_blocks_do_not() -> None:
    a, b = virtual(4), virtual(4, 1)
    found = compare_sides([a], [b], PERCENTILES, resamples=100)
    for metric, values in {**a.values, "itl": a.gaps_ns}.items():
        mean = found.metrics[metric][None]
        assert mean.a == pytest.approx(np.nanmean(values))
        assert len(mean.spreads) == len(mean.log_spreads) == 2
    for means in (found.ledgers["last_token"].stages.values(), [each.total for each in found.ledgers.values()]):
        assert {len(each.spreads) for each in means} == {2}
    few = [run.rows(np.arange(11)) for run in (a, b)]
    assert not compare_sides(few[:1], few[1:], PERCENTILES, resamples=10).metrics["ttft"][None].supported


def test_a_failed_request_is_infinite_and_counts_as_what_it_was_given() -> None:
    run = dropping(virtual(1), 0.05, given_ns=30e9)
    assert (~run.good).sum() == round(0.05 * run.count)
    for metric in ("ttft", "e2e", "tpot"):
        assert np.isinf(run.values[metric][~run.good]).all()
        assert set(run.at_least_ns(metric)[~run.good]) == {30e9}
    assert np.isinf(run.gaps_ns).sum() == (run.gaps_at_least_ns() == 30e9).sum() > 0
    assert run.series("ttft").percentile(99.0).value == np.inf
    kept = run.rows(np.flatnonzero(~run.good).astype(np.int64))
    assert np.isinf(kept.values["ttft"]).all() and np.isinf(kept.gaps_ns).all()


def test_a_percentile_that_is_a_failed_request_on_both_sides_cannot_be_compared() -> None:
    a, b = (dropping(virtual(1, service), 0.2) for service in (0, 1))
    found, _, pair = judged([a], [b])
    told = found.metrics["ttft"]
    assert "failed" in told[90.0].why
    assert told[50.0].supported
    said = not_estimable(pair)
    assert "Among the requests that failed, on both sides: TTFT p90" in said
    assert "p90" not in said.partition("Samples too small")[2].partition(".")[0]
    (deciles,) = shift(pair, 0, "").blocks
    (drawn,) = (block for part in deciles.parts for block in part if getattr(block, "key", "") == "shift-0-ttft")
    assert [str(cell) for cell in drawn.table.rows[-1][:3]] == ["p90", "failed", "failed"]


def test_a_percentile_that_one_side_failed_is_shown_as_a_bound_and_makes_the_other_no_faster() -> None:
    """The time-out that it was given is nobody's latency."""
    whole = virtual(1)
    for given_ns in (5e9, 30e9):
        found, verdict, pair = judged([dropping(whole, 0.2, given_ns=given_ns)], [whole])
        assert (found.metrics["ttft"][50.0].failed, found.metrics["ttft"][90.0].failed) == ("", "a")
        reached = {metric: {90.0: found.metrics[metric][90.0]} for metric in LATENCIES}
        assert claims.judge([replace(found, metrics=reached)], {})[0].word not in (FASTER, MIXED)
        assert not verdict.telling.difference.failed
        told = pair.metrics["ttft"].percentiles["p90"]
        assert change_of("TTFT p90", told) == f"TTFT p90 ≥ {duration(given_ns / 1e6)} -> {duration(told.b_ms)}"
        assert "A 20 %" in verdict_sentence(pair)


def test_a_percentile_of_which_only_an_end_reaches_what_failed_is_at_least_what_was_measured() -> None:
    """8.5 % failed: the p90 was answered, and may be a request that was not."""
    whole = virtual(1)
    failing = without(whole, np.random.default_rng(3).random(whole.count) < 0.085, 30e9)
    _, _, pair = judged([failing], [virtual(1, 1)])
    p90 = failing.series("e2e").percentile(90.0)
    assert p90.value is not None and math.isfinite(p90.value) and p90.high == math.inf
    told = pair.metrics["e2e"].percentiles["p90"]
    assert told.a_ms == pytest.approx(p90.value / 1e6, rel=0.2)
    assert change_of("E2E p90", told) == f"E2E p90 ≥ {duration(told.a_ms)} -> {duration(told.b_ms)}"


@pytest.mark.parametrize(
    ("ci_ms", "p_adjusted", "failed", "answer"),
    [
        ((-0.1, 10.5), 0.3, None, "no difference found (9.37 ms would show)"),
        ((0.1, 10.5), 0.3, None, "not significant among all figures (9.37 ms would show)"),
        ((0.1, 10.5), 0.01, None, "no difference found (9.37 ms would show)"),  # less than the load tester's floor
        ((-9.0, 99.0), 0.3, "b", "no difference found"),  # in milliseconds of a time-out nothing would be found
    ],
)
def test_the_answer_to_a_figure_does_not_contradict_its_interval(
    ci_ms: tuple[float, float], p_adjusted: float, failed: str | None, answer: str
) -> None:
    _, _, pair = judged([virtual(1)], [virtual(1, 1)])
    figure = (
        pair.metrics["ttft"]
        .percentiles["p50"]
        .model_copy(
            update={"ci_ms": ci_ms, "p_adjusted": p_adjusted, "failed": failed, "confirmed": False, "least_ms": 9.37}
        )
    )
    ttft = pair.metrics["ttft"].model_copy(update={"percentiles": {"p50": figure}})
    for section in brief(pair.model_copy(update={"metrics": {"ttft": ttft}}), 0, forced=False):
        (table,) = (each for each in section.blocks if isinstance(each, Table))
        assert dict(zip([column.title for column in table.columns], table.rows[0], strict=True))["answer"] == answer


def test_the_terminal_has_the_median_and_the_highest_percentile_of_each_metric_and_markdown_has_all() -> None:
    _, _, pair = judged([virtual(1)], [virtual(1, 1)])
    claimed = [str(name) for name, figure in pair.family() if figure.difference_ms is not None]
    terminal, markdown = ([str(row[0]) for row in section.blocks[0].rows] for section in brief(pair, 0, forced=False))
    assert markdown == claimed
    assert set(terminal) < set(claimed)
    for metric in ("TTFT", "ITL", "TPOT", "E2E"):
        own = [name for name in claimed if name.startswith(f"{metric} ")]
        assert [name for name in terminal if metric in name] == [own[0], own[-1]]


def test_requests_that_we_ended_ourselves_are_no_failures_of_a_side(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", count=400)
    requests = pd.read_parquet(run.path / "requests.parquet")
    rest = requests[:-24].copy()
    requests.loc[requests.index[-24:], "outcome"] = "aborted"
    whole, ended = (run_of(table, None, "run", open_loop=True) for table in (rest, requests))
    assert (ended.count, ended.good.all()) == (whole.count, True)
    assert all(np.array_equal(ended.values[name], of, equal_nan=True) for name, of in whole.values.items())


def test_stages_are_said_to_be_of_answered_requests_where_some_failed_and_what_is_unexplained_has_no_owner() -> None:
    a, slow = virtual(1), virtual(1, forward_ns=30e6)
    for b, answered in ((slow, ""), (dropping(slow, 0.05), " of answered requests")):
        _, _, pair = judged([a], [b], resamples=100)
        assert re.match(f"(the difference of )?the mean (TTFT|E2E){answered}(:| \\d)", change_sentence(pair))
        nobodys = pair.changed.model_copy(
            update={"stage": "unexplained", "owner": "nobody yet", "cause": None, "share": 1.0}
        )
        nobodys = nobodys.model_copy(update={"unexplained": None})
        assert change_sentence(pair.model_copy(update={"changed": nobodys})).endswith("of that is unexplained")


def test_a_stage_that_changes_by_more_than_the_whole_is_told_in_milliseconds_with_what_goes_the_other_way() -> None:
    a, b = virtual(1), virtual(1, forward_ns=30e6)
    _, _, pair = judged([a], [b], resamples=100)
    own = pair.stages[pair.changed.event]
    moved = next(each.difference_ms or 0.0 for each in own.stages if each.stage == pair.changed.stage)
    more = own.model_copy(update={"total": own.total.model_copy(update={"difference_ms": moved - 1.5})})
    beyond = pair.changed.model_copy(update={"share": 1.2, "cause": None})
    said = change_sentence(pair.model_copy(update={"changed": beyond, "stages": {pair.changed.event: more}}))
    assert said.endswith(
        f"+{duration(moved)} is {pair.changed.stage} ({pair.changed.owner}), -1.50 ms all other stages"
    )


def test_a_percentile_that_a_run_refuses_is_said_to_be_refused_though_its_sample_is_too_small_besides() -> None:
    a, b = (virtual(1, service).rows(np.arange(40)) for service in (0, 1))
    late = Distribution.model_construct(percentiles={99.0: Percentile.model_construct(late_ms=2.0)}, mean_ms=9.0)
    lateness = ReportedLateness((RunResult.model_construct(metrics=dict.fromkeys(LATENCIES, late)),))
    told = (compare_sides([a], [b], PERCENTILES, (), each, resamples=20) for each in (ReportedLateness(), lateness))
    small, refused = (each.metrics["ttft"][99.0] for each in told)
    assert (small.supported, small.late, refused.supported, refused.late) == (False, None, False, 2e6)
    assert "worth" in small.why and refused.why.startswith("refused: up to 2.00 ms")


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10_000))
def test_with_several_runs_nothing_is_surer_than_students_test_of_the_runs_own_figures(seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = ([scaled(queue_run(rng), rng.normal(0, 0.03)) for _ in range(3)] for _ in range(2))
    found = compare_sides(a, b, {**dict.fromkeys(LATENCIES, ()), "ttft": (50.0,)}, resamples=40).metrics["ttft"][50.0]
    once = np.ones((a[0].count, 1), np.int32)
    own = [[Resampled(run.values["ttft"]).harrell_davis(once, (50.0,)).item() for run in side] for side in (a, b)]
    theirs = stats.ttest_ind(own[1], own[0])
    assert found.spreads[1].p(float(np.mean(own[1]) - np.mean(own[0]))) == pytest.approx(theirs.pvalue)
    assert found.p >= found.spreads[1].p(found.value or 0.0)
    logs = stats.ttest_ind(np.log(own[1]), np.log(own[0])).confidence_interval(0.95)
    assert np.diff(np.log1p(found.growth_ends))[0] >= 0.999 * (logs.high - logs.low)


def test_runs_that_differ_from_run_to_run_raise_no_alarm_and_hide_no_regression() -> None:
    """Twenty gates at each growth; ``python -m bench gate`` does it with 400 at four spreads."""
    found = gate_cell(0.02, 20)
    assert found["regressed"]["0"]["hits"] <= 1
    assert found["any_difference"]["hits"] <= 2
    assert found["within"]["0.1"]["hits"] <= 1
    assert found["regressed"]["0.2"]["hits"] >= 15


def test_a_single_request_a_side_has_no_interval_and_no_error() -> None:
    a, b = (alike(seed, 1) for seed in (1, 2))
    found = compare_sides([a], [b], dict.fromkeys(LATENCIES, (50.0,)), resamples=20)
    assert not found.metrics["ttft"][None].spreads
    nothing = a.rows(np.empty(0, np.int64))
    empty = compare_sides([nothing], [b], dict.fromkeys(LATENCIES, (50.0,)), resamples=20)
    assert (empty.failed.a_share, empty.failed.a_ci) == (0.0, (0.0, 1.0))
