from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gapmeter.analysis.compare.document import Side, compare
from gapmeter.report.comparison.page import page
from gapmeter.report.comparison.words import markdown, terminal
from hypothesis import given, settings
from hypothesis import strategies as st

from gapmeter.analysis.compare import claims
from gapmeter.analysis.compare.claims import FAMILY, NAMES, NOTHING, SLOWER
from gapmeter.analysis.compare.differences import compare_sides
from gapmeter.analysis.compare.protocol import BLOCKS, FACTOR, FOLLOWS, NOTED, NotReadable, check
from gapmeter.analysis.compare.regression import REGRESSED, UNDECIDED, UNKNOWN, WITHIN, judge_regression
from gapmeter.analysis.compare.sides import STAGE_NAMES, read_run
from tests.analysis.compared import COMMAND, folder, manifest, virtual

PERCENTILES = dict.fromkeys(NAMES, FAMILY)
VALID = {"schema_version": 2, "verdict": "PASS", "floor": None}


@pytest.mark.parametrize("paired", [True, False])
def test_swapping_the_sides_swaps_every_sign(paired: bool) -> None:
    a, b = virtual(1), virtual(1 if paired else 2, 1)
    one, other = (compare_sides([x], [y], PERCENTILES, resamples=60) for x, y in ((a, b), (b, a)))
    assert one.paired is other.paired is paired
    pairs = [(one.metrics[m][p], other.metrics[m][p]) for m in NAMES for p in FAMILY]
    pairs += [(one.stages[e][s], other.stages[e][s]) for e in one.stages for s in one.stages[e]]
    compared = [(d, opposite) for d, opposite in pairs if d.supported]
    assert len(compared) > 20
    for d, opposite in compared:
        assert d.value == pytest.approx(-(opposite.value or 0.0))
        assert d.estimate.ends == pytest.approx([-(end or 0.0) for end in reversed(opposite.estimate.ends)])
        assert d.p == pytest.approx(opposite.p)


@settings(max_examples=4, deadline=None)
@given(st.integers(0, 10_000))
def test_the_differences_of_the_stages_add_up_to_that_of_the_whole_wait(seed: int) -> None:
    a, b = virtual(seed, 0), virtual(seed, 1, forward_ns=5_500_000)
    for event in ("first_token", "last_token"):
        assert not a.ledgers[event][:, -1].any()  # nothing is left unexplained in virtual time
    found = compare_sides([a], [b], PERCENTILES, resamples=20)
    for event, total in found.totals.items():
        parts = sum(d.value or 0.0 for d in found.stages[event].values())
        assert parts == pytest.approx(total.value, abs=1e-3)


def test_a_stage_that_one_side_did_not_measure_joins_the_remainder_of_both() -> None:
    a, b = virtual(3), virtual(3, 1)
    blind = {event: table.copy() for event, table in b.ledgers.items()}
    queue = STAGE_NAMES.index("queue")
    for table in blind.values():
        table[:, -1] += table[:, queue]
        table[:, queue] = np.nan
    found = compare_sides([a], [replace(b, ledgers=blind)], PERCENTILES, resamples=20)
    assert "queue" in found.unmeasured["last_token"]
    assert "queue" not in found.stages["last_token"]
    assert found.stages["last_token"]["unexplained"].a == pytest.approx(a.ledgers["last_token"][:, queue].mean())


def test_identical_runs_differ_no_more_often_than_promised_and_a_change_of_five_percent_is_found_in_its_stage() -> None:
    """Six seeded pairs each; ``python -m bench compare`` does it with 400."""
    false, found, causes = 0, 0, []
    for seed in range(6):
        a = virtual(seed)
        for service, forward in ((1, 5_000_000), (2, 5_250_000)):
            differences = compare_sides([a], [virtual(seed, service, forward_ns=forward)], PERCENTILES, resamples=200)
            (verdict,) = claims.judge([differences], [("A", "B")], {})
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
    open_eyes, blind = (
        claims.judge([found], [("A", "B")], floors)[0] for floors in ({}, dict.fromkeys(NAMES, (1e12, 1e12)))
    )
    assert open_eyes.word == SLOWER
    assert blind.word == NOTHING


PROTOCOL: dict[str, tuple[dict[str, Any], tuple[str, ...], bool, dict[str, str]]] = {
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
    "two keys, one declared": (
        {"scenario__server__max_batch": 4, "scenario__load__rate": 9.0, "plan__digest": "x"}, ("load.rate",), False,
        {"load.rate": FACTOR, "server.max_batch": BLOCKS, "plan": FOLLOWS},
    ),
    "two keys, both declared": (
        {"scenario__server__max_batch": 4, "scenario__load__rate": 9.0}, ("load.rate", "server.max_batch"), True, {},
    ),
    "another seed": ({"scenario__seed": 2, "plan__digest": "x"}, (), True, {"seed": FACTOR, "plan": FOLLOWS}),
    "another plan of the same scenario": ({"plan__digest": "x"}, (), False, {"plan": BLOCKS}),
    "another repeat, with fresh texts": ({"plan__digest": "x", "repeat": 1}, (), True, {"plan": NOTED}),
    "an SLO": ({"scenario__slo": []}, (), True, {"slo": NOTED}),
    "another model": ({"target__model": "n"}, (), False, {"model": BLOCKS}),
    "another precision, and a GPU": (
        {"scenario__server__precision": "float16", "hardware__gpus": ["B GPU"]}, (), False,
        {"server.precision": FACTOR, "hardware.gpus": BLOCKS},
    ),
    "other hardware, declared": ({"hardware__gpus": ["B GPU"]}, ("hardware",), True, {"hardware.gpus": FACTOR}),
    "another gapmeter": ({"versions__gapmeter": "0.2.0"}, (), False, {"versions.gapmeter": BLOCKS}),
    "another engine flag": ({"scenario__server__args__x": 2}, (), True, {"server.args.x": FACTOR}),
    "its device's speed measured again": ({"target__peaks": {"read": {"median": 39.0}}}, (), True, {}),
    "an incomplete run": ({"status": "incomplete", "ended_because": "killed"}, (), False, {"validity": BLOCKS}),
}  # fmt: skip


@pytest.mark.parametrize("case", PROTOCOL)
def test_only_what_is_meant_to_differ_may(case: str) -> None:
    changes, factors, comparable, meanings = PROTOCOL[case]
    found = check(manifest(), manifest(**changes), VALID, VALID, factors)
    assert found.comparable is comparable, found.blocking
    told = {fact.key: fact.meaning for fact in found.facts}
    assert {key: told.get(key) for key in meanings} == meanings


def test_an_invalid_run_and_another_floor_of_the_load_tester_are_told() -> None:
    floor = {"ttft_p99_ms": 0.2, "itl_p99_ms": 0.1, "e2e_p99_ms": 0.2}
    slow = {**floor, "ttft_p99_ms": 0.5}
    invalid = {**VALID, "verdict": "INVALID", "invalid_reasons": ["late"]}
    assert [f.key for f in check(manifest(), manifest(), VALID, invalid).blocking] == ["validity"]
    floors = check(manifest(), manifest(), VALID | {"floor": floor}, VALID | {"floor": slow})
    assert [f.key for f in floors.blocking] == ["floor"]
    one = check(manifest(), manifest(), VALID | {"floor": floor}, VALID)
    assert one.comparable
    assert [f.meaning for f in one.facts] == [NOTED]


@pytest.mark.parametrize("part", ["manifest", "summary"])
def test_a_run_of_another_version_of_the_format_is_refused_by_its_version(part: str) -> None:
    other, summary = manifest(), dict(VALID)
    (other if part == "manifest" else summary)["schema_version"] = 7
    with pytest.raises(NotReadable, match=rf"{part}.json is in version 7 .*reads [12]"):
        check(manifest(), other, VALID, summary)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    home = tmp_path_factory.mktemp("runs")
    return [folder(home / "three", slots=3), folder(home / "eight", slots=8), folder(home / "six", slots=6)]


def test_folders_are_compared_told_and_drawn_with_no_figure_that_json_lacks(folders: list[Path]) -> None:
    sides = [Side((read_run(path),)) for path in folders[:2]]
    document = compare(sides, command="gapmeter compare three eight")
    json.dumps(document, allow_nan=False)
    found = document["comparisons"][0]
    assert document["verdict"] == "MIXED"
    assert found["paired"]
    assert (found["a"], found["b"]) == ("A (max_batch 3)", "B (max_batch 8)")
    assert found["changed"]["stage"] == "queue"
    parts = sum(stage["difference_ms"] for stage in found["stages"]["last_token"]["stages"])
    assert parts == pytest.approx(found["stages"]["last_token"]["total"]["difference_ms"])
    html = page(document, [side.first for side in sides])
    assert 'data-verdict="MIXED"' in html
    assert html.count("<svg") >= 6
    assert "http-equiv" in html
    assert "TTFT p90" in markdown(document)
    assert "faster" in terminal(document, "report.html")


def test_more_than_two_runs_share_one_family_and_one_table(folders: list[Path]) -> None:
    document = compare([Side((read_run(path),)) for path in folders])
    assert [found["b"] for found in document["comparisons"]] == ["B (max_batch 8)", "C (max_batch 6)"]
    assert document["method"]["family"] > 9
    rows = document["table"]["rows"]
    assert [row["name"] for row in rows] == ["A", "B", "C"]
    assert rows[0]["capacity"]["value"] is None
    assert "capacity" in rows[0]["capacity"]["why"]


def test_identical_devices_are_told_how_far_they_lie_apart(tmp_path: Path) -> None:
    paths = [folder(tmp_path / name, rate=rate) for name, rate in (("one", 8.0), ("two", 8.1))]
    table = compare([Side((read_run(path),)) for path in paths], ["load.rate"])["table"]
    (spread,) = table["devices"]
    assert spread["sides"] == ["A", "B"]
    assert spread["figures"]["e2e_p50"]["relative"] >= 0


def test_what_is_not_comparable_has_no_figures_unless_forced_and_then_every_one_is_marked(tmp_path: Path) -> None:
    paths = [folder(tmp_path / "a"), folder(tmp_path / "b", slots=4, changes={"versions__gapmeter": "9"})]
    sides = [Side((read_run(path),)) for path in paths]
    refused, forced = compare(sides), compare(sides, force=True)
    assert refused["verdict"] == "NOT COMPARABLE"
    assert refused["comparisons"] == []
    assert "versions.gapmeter: 0.1.0 | 9" in refused["headline"]
    assert "--factor versions.gapmeter" in terminal(refused, "report.html")
    assert forced["verdict"] == "NOT COMPARABLE, forced"
    told = [line for line in markdown(forced).splitlines() if line.startswith(("| TTFT", "| ITL", "| TPOT", "| E2E"))]
    assert told
    assert all("NOT COMPARABLE" in line for line in told)


def figure(relative: float | None, p: float | None, floor_ms: float = 0.0) -> dict[str, Any]:
    a = 100.0
    ms = None if relative is None else a * relative
    return {
        "a_ms": a, "b_ms": None if ms is None else a + ms, "difference_ms": ms, "p": p, "relative": relative,
        "ci_ms": None if ms is None else [ms - 1, ms + 1], "relative_ci": None, "why": "too few", "floor_ms": floor_ms,
    }  # fmt: skip


REGRESSIONS = {
    "beyond the limit and beyond chance": (figure(0.08, 0.001), REGRESSED),
    "beyond the limit, not beyond chance": (figure(0.08, 0.2), UNDECIDED),
    "beyond chance, not beyond the limit": (figure(0.04, 0.001), WITHIN),
    "an improvement": (figure(-0.3, 0.001), WITHIN),
    "below the load tester's floor": (figure(0.08, 0.001, floor_ms=9.0), UNDECIDED),
    "not supported": (figure(None, None), UNKNOWN),
}


@pytest.mark.parametrize("case", REGRESSIONS)
def test_a_regression_is_beyond_the_limit_and_beyond_its_interval(case: str) -> None:
    told, status = REGRESSIONS[case]
    metrics = {"ttft": {"percentiles": {"p90": told}}}
    document = {"comparable": True, "comparisons": [{"metrics": metrics, "changed": None}]}
    found = judge_regression(document, [("ttft", 90.0)], 0.05, "base")
    assert found["status"] == found["rows"][0]["status"] == status
