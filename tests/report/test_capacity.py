"""What a search's answer says in sentences."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gapmeter.analysis.numbers import share
from gapmeter.analysis.results.capacity import (
    BUDGET,
    DIED,
    FAILS,
    UNDECIDED,
    UNMEETABLE,
    CapacityResult,
    Ended,
    RatePoint,
)
from gapmeter.analysis.results.manifest import SearchManifest
from gapmeter.report import document as doc
from gapmeter.report.capacity import document, headline
from tests.kit.searches import write_search

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("good", "said"), [(0.0, True), (0.01, False)])
def test_a_search_whose_every_request_was_beyond_a_limit_says_so(tmp_path: Path, good: float, said: bool) -> None:
    """Such a server may be broken: that a lower rate would do is not to be read from it."""
    search = CapacityResult.read(write_search(tmp_path / "s", None, None, 8.0)).capacity
    points = tuple(
        RatePoint(rate=rate, good_share=share, goodput_per_s=rate * share, goodput_ci=None, verdict="fails", n=60)
        for rate, share in ((8.0, 0.0), (4.0, good))
    )
    told = headline(search.model_copy(update={"curve": points, "ended": BUDGET}))
    assert told[0].startswith("Capacity below 8 req/s")
    assert any("No request of any trial met every limit" in line for line in told) is said


def test_how_often_a_proven_rate_is_too_high_is_what_the_published_searches_showed(tmp_path: Path) -> None:
    published = json.loads((ROOT / "docs" / "results" / "capacity.json").read_text())["figures"]["stationary"]
    search = CapacityResult.read(write_search(tmp_path / "s", 9.0, 8.0, 10.0)).capacity
    proven = headline(search.model_copy(update={"held": 8.0}))[1]
    assert f"too high in at most {share(published['held_above_ci'][1])} of searches" in proven


@pytest.mark.parametrize(("ended", "why"), [(BUDGET, ": there was not enough time left"), (DIED, ".")])
def test_only_a_budget_that_ran_out_is_why_no_rate_was_proven(tmp_path: Path, ended: Ended, why: str) -> None:
    search = CapacityResult.read(write_search(tmp_path / "s", 9.0, 8.0, 10.0)).capacity
    told = headline(search.model_copy(update={"held": None, "spread": 0.1, "ended": ended}))
    assert told[1].startswith(f"No rate was proven to hold{why}")


@pytest.mark.parametrize(("n_eff", "said"), [(38.0, True), (800.0, False)])
def test_values_that_were_all_within_the_limit_and_prove_nothing_are_told_what_they_are_worth(
    tmp_path: Path, n_eff: float, said: bool
) -> None:
    search = CapacityResult.read(write_search(tmp_path / "s", 9.0, 8.0, 10.0)).capacity
    (trial,) = search.trials
    values = trial.decided_by.model_copy(update={"n_eff": n_eff})
    undecided = trial.model_copy(update={"verdict": UNDECIDED, "slos": (values,)})
    told = headline(search.model_copy(update={"held": None, "trials": (undecided,)}))[1]
    assert ("At 8 req/s all 900 values were within the limit, but" in told) is said
    assert ("count as 38 independent ones." in told) is said


@pytest.mark.parametrize(("within", "said"), [(0.1, " ("), (0.05, " (wider than the 5.0 % asked: ")])
def test_an_estimate_of_a_search_whose_server_died_says_so_however_narrow_it_is(
    tmp_path: Path, within: float, said: str
) -> None:
    search = CapacityResult.read(write_search(tmp_path / "s", 9.0, 8.1, 9.9)).capacity
    broken = {"ended": DIED, "reason": "exit status 1", "spread": 0.1, "within": within}
    told = headline(search.model_copy(update=broken))[0]
    assert told == f"Capacity 9 req/s, 95 % interval 8.10 .. 9.90{said}the server died: exit status 1)."


@pytest.mark.parametrize(
    ("ended", "said"),
    [
        (BUDGET, "For 50 req/s: the number of servers is unknown: no rate was found at which every SLO holds."),
        (UNMEETABLE, "For 50 req/s: no number of servers is enough: even the lowest rate tried misses an SLO."),
    ],
)
def test_a_load_to_plan_for_has_an_answer_where_no_rate_was_found_too(tmp_path: Path, ended: Ended, said: str) -> None:
    search = CapacityResult.read(write_search(tmp_path / "s", None, None, 8.0, target_rps=50.0)).capacity
    assert headline(search.model_copy(update={"ended": ended}))[-1] == said


def test_the_page_gives_rates_their_own_unit_and_says_to_which_side_an_undecided_trial_leans(tmp_path: Path) -> None:
    """Goodput's interval was in ms, and "undecided, 76 %" left open of what."""
    path = write_search(tmp_path / "s", 9.0, 8.0, 10.0)
    result = CapacityResult.read(path)
    trial = result.capacity.trials[0].model_copy(
        update={"verdict": UNDECIDED, "confidence": 0.76, "leaning": FAILS, "reason": None}
    )
    point = RatePoint(rate=8.0, good_share=0.5, goodput_per_s=4.0, goodput_ci=(1.39, 9.81), verdict=UNDECIDED, n=60)
    search = result.capacity.model_copy(update={"trials": (trial,), "curve": (point,)})
    shown = document(result.model_copy(update={"capacity": search}), SearchManifest.read(path))
    tables = {
        block.name: block
        for section in shown.on(doc.PAGE)
        for block in (each.table if isinstance(each, doc.Chart) else each for each in section.blocks)
        if isinstance(block, doc.Table)
    }
    assert tables["Goodput against rate"].rows[0][3] == "1.39 .. 9.81"
    assert str(tables["Trials"].rows[0][1]) == "undecided, probably fails"
    assert tables["Trials"].rows[0][4] == "76 %"


@pytest.mark.parametrize(
    ("slo", "said"), [("ttft p99 <= 500 ms", "; the limiting stage is unmeasured."), ("errors <= 2 %", ".")]
)
def test_no_stage_is_missed_where_errors_limit_a_search(tmp_path: Path, slo: str, said: str) -> None:
    told = headline(CapacityResult.read(write_search(tmp_path / "s", 9.0, 8.0, 10.0, slo=slo)).capacity)
    assert f"Limiting SLO: {slo}{said}" in told


def test_a_search_of_one_trial_is_told_in_the_singular(tmp_path: Path) -> None:
    path = write_search(tmp_path / "s", 9.0, 8.0, 10.0)
    shown = document(CapacityResult.read(path), SearchManifest.read(path))
    (how,) = [section for section in shown.on(doc.PAGE) if section.key == "how"]
    assert how.lead.startswith("1 trial with 900 requests in 60.0 s, one server.")
