"""What a search's answer says in sentences."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from gapmeter.analysis.numbers import rate
from gapmeter.analysis.results.capacity import (
    BUDGET,
    DIED,
    FAILS,
    HOLDS,
    UNDECIDED,
    UNMEETABLE,
    CapacityResult,
    CountedSlo,
    Ended,
    ExpectedLatency,
    Fleet,
    LatencyCurve,
    RatePoint,
)
from gapmeter.analysis.results.manifest import SearchManifest
from gapmeter.analysis.stats.exact import share_bounds
from gapmeter.report import document as doc
from gapmeter.report import html
from gapmeter.report.capacity import TOO_HIGH, document, headline
from tests.kit.searches import SLO, write_search

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("good", "said"), [(0.0, True), (0.01, False)])
def test_a_search_whose_every_request_was_beyond_a_limit_says_so(tmp_path: Path, good: float, said: bool) -> None:
    """Such a server may be broken: that a lower rate would do is not to be read from it."""
    search = CapacityResult.read(write_search(tmp_path / "s", None, None, 8.0)).capacity
    points = tuple(
        RatePoint(rate=at, good_share=share, goodput_per_s=at * share, goodput_ci=None, verdict="fails", n=60)
        for at, share in ((8.0, 0.0), (4.0, good))
    )
    told = headline(search.model_copy(update={"curve": points, "ended": BUDGET}))
    assert told[0].startswith("Capacity below 8 req/s")
    assert any("No request of any trial met every limit" in line for line in told) is said


def test_how_often_a_proven_rate_is_too_high_is_what_the_published_searches_showed() -> None:
    cells = json.loads((ROOT / "docs" / "results" / "capacity.json").read_text())["figures"]["cells"]
    for drift, most in TOO_HIGH.items():
        own = [cell for cell in cells if cell["drift"] == drift]
        above, searches = (sum(cell[name] for cell in own) for name in ("held_above", "searches"))
        assert most == pytest.approx(share_bounds(above, searches)[1], abs=5e-5)
    assert set(TOO_HIGH) == {cell["drift"] for cell in cells}


@pytest.mark.parametrize(
    ("burstiness", "drift", "said"),
    [
        (1.0, None, "89 % of the estimate (95 % sure, less where errors come in bursts)."),
        (4.0, 0.005, "(too high in at most 0.75 % of searches on simulated servers whose speed differs by 3 %)."),
        (1.0, 0.031, "(too high in at most 2.9 % of searches on simulated servers whose speed differs by 6 %)."),
        (8.0, 0.031, "(how often such a rate is too high was not simulated for bursts like these)."),
        (None, 0.031, "was not simulated for bursts like these)."),
        (1.0, 0.062, "whose speed differs by 6 %; more was not simulated). The server's speed differs by about 6.2 %"),
    ],
)
def test_a_proven_rate_is_as_sure_as_on_simulated_servers_that_drift_no_less(
    tmp_path: Path, burstiness: float | None, drift: float | None, said: str
) -> None:
    search = CapacityResult.read(write_search(tmp_path / "s", 9.0, 8.0, 10.0)).capacity
    assert said in headline(search.model_copy(update={"held": 8.0, "drift": drift, "burstiness": burstiness}))[1]


RATES = (2.0, 4.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0)


def with_curve(path: Path, *, planned: Fleet | None = None) -> CapacityResult:
    """A search whose p99 TTFT is 50 / (10 - rate) ms over 0.1, so 500 ms at 9 req/s; from 10 on there is none."""
    points = []
    for at in RATES:
        value = 500 / (10 - at) if at < 10 else None
        ends = (value and 0.8 * value, value and 1.25 * value if at < 9 else None)
        points.append(ExpectedLatency(rate=at, value_ms=value, ci_ms=ends))
    result = CapacityResult.read(write_search(path, 9.0, 8.0, 10.0, target_rps=50.0))
    curve = LatencyCurve(slo=SLO, limit_ms=500.0, points=tuple(points))
    (trial,) = result.capacity.trials
    counted = CountedSlo(text=SLO, over=0.0, count=900, n_eff=900.0, allowed=0.01, value_ms=240.0, ci_ms=(200.0, 300.0))
    trials = (
        trial.model_copy(update={"slos": (counted,)}),
        trial.model_copy(update={
            "number": 2, "rate": 9.5, "verdict": FAILS,
            "slos": (counted.model_copy(update={"value_ms": 1800.0, "ci_ms": (1200.0, 2700.0)}),),
        }),
        trial.model_copy(update={"number": 3, "rate": 40.0, "verdict": FAILS}),
    )  # fmt: skip
    update = {"latency": curve, "trials": trials, "planning": planned or result.capacity.planning}
    return result.model_copy(update={"capacity": result.capacity.model_copy(update=update)})


def fleet(high: float | None, *, expected: ExpectedLatency | None) -> Fleet:
    return Fleet.plan(8.0, 50.0, 0.2, 1, high).model_copy(update={"expected": expected})


AT_PLANNED = ExpectedLatency(rate=6.4, value_ms=139.0, ci_ms=(111.0, 174.0))


@pytest.mark.parametrize(
    ("planned", "fewer", "expected"),
    [
        (
            fleet(10.0, expected=AT_PLANNED),
            " (8 if the estimate's upper end is right)",
            ", where p99 TTFT should be at most 174 ms",
        ),
        (
            fleet(8.1, expected=AT_PLANNED.model_copy(update={"ci_ms": (111.0, None)})),
            "",
            ", where p99 TTFT has no upper end yet",
        ),
        (fleet(None, expected=None), "", ""),
    ],
    ids=["an interval", "no upper end", "no curve"],
)
def test_a_fleet_is_told_with_what_to_expect_of_each_server_and_how_few_may_do(
    tmp_path: Path, planned: Fleet, fewer: str, expected: str
) -> None:
    said = headline(with_curve(tmp_path / "s", planned=planned).capacity)[-1]
    assert said == (
        f"For 50 req/s: 9 servers{fewer}, 1 of them spare. Each is planned for 6.4 req/s, the proven rate less 20 %"
        f"{expected}."
    )


def test_the_chart_of_latency_has_the_curve_the_trials_on_its_axes_and_where_it_meets_the_limit(tmp_path: Path) -> None:
    """A trial's value beyond the picture is told at its edge, and one at a far higher rate in the table alone."""
    path = tmp_path / "s"
    result = with_curve(path, planned=fleet(10.0, expected=AT_PLANNED))
    section = next(each for each in document(result, SearchManifest.read(path)).on(doc.PAGE) if each.key == "latency")
    assert section.title == "p99 TTFT against rate"
    (chart,) = section.blocks
    assert isinstance(chart, doc.Chart) and chart.table
    drawn = str(chart.picture.draw("latency"))
    dots = re.findall(r'data-rate="([^"]+)" data-value="([^"]+)"', drawn)
    assert dots == [("8.0", "240.0"), ("9.5", "1800.0")]
    assert all(
        said in drawn for said in ("1.80 s ↑", "planned 6.4 req/s: at most 174 ms", f"SLO {SLO}".replace("<", "&lt;"))
    )
    (line,) = re.findall(r'<path d="([^"]+)" class="curve"', drawn)
    heights = [float(corner.split()[1]) for corner in line[1:].split("L")]
    assert heights == sorted(heights, reverse=True) and heights[-1] == 0.0, "up to the picture's edge"
    rows = [[str(cell) for cell in row] for row in chart.table.rows]
    assert ["the curve", rate(2.0), "62.5 ms", "50.0 .. 78.1 ms", ""] in rows
    assert ["trial 2", "9.5 req/s", "1.80 s", "1.20 .. 2.70 s", "fails"] in rows


@pytest.mark.parametrize("held", [8.0, None])
def test_goodput_is_not_joined_from_rates_that_hold_to_one_that_fails_and_where_slos_hold_is_what_was_proven(
    tmp_path: Path, held: float | None
) -> None:
    path = write_search(tmp_path / "s", 9.0, 8.0, 10.0)
    result = CapacityResult.read(path)
    points = tuple(
        RatePoint(rate=at, good_share=1.0, goodput_per_s=good, goodput_ci=None, verdict=found, n=60)
        for at, good, found in ((4.0, 4.0, HOLDS), (8.0, 8.0, HOLDS), (64.0, 1.0, FAILS), (99.0, 0.0, FAILS))
    )
    search = result.capacity.model_copy(update={"curve": points, "held": held})
    shown = document(result.model_copy(update={"capacity": search}), SearchManifest.read(path))
    section = next(each for each in shown.on(doc.PAGE) if each.key == "curve")
    drawn = str(section.blocks[0].picture.draw("goodput"))
    assert len(re.findall(r'<path [^>]*class="curve"', drawn)) == 2
    assert ("every SLO holds" in drawn) is ("SLOs hold" in html.page(shown)) is (held is not None)


def test_without_a_curve_the_page_begins_with_goodput(tmp_path: Path) -> None:
    path = write_search(tmp_path / "s", 9.0, 8.0, 10.0)
    result = CapacityResult.read(path)
    point = RatePoint(rate=8.0, good_share=1.0, goodput_per_s=8.0, goodput_ci=(7.0, 8.0), verdict=HOLDS, n=60)
    search = result.capacity.model_copy(update={"curve": (point,)})
    shown = document(result.model_copy(update={"capacity": search}), SearchManifest.read(path))
    assert next(iter(shown.on(doc.PAGE))).key == "curve"


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


def test_what_slow_requests_wait_for_where_a_search_ends_is_told_by_its_name(tmp_path: Path) -> None:
    search = CapacityResult.read(write_search(tmp_path / "s", 9.0, 8.0, 10.0, binding_stage="other_step")).capacity
    bound = {"binding_share": 0.6, "binding_rate": 10.0, "binding_owner": "contention"}
    said = "; at 10 req/s 60 % of the extra time of slow requests is others' steps (contention)."
    assert any(line.endswith(said) for line in headline(search.model_copy(update=bound)))


def test_a_search_of_one_trial_is_told_in_the_singular(tmp_path: Path) -> None:
    path = write_search(tmp_path / "s", 9.0, 8.0, 10.0)
    shown = document(CapacityResult.read(path), SearchManifest.read(path))
    (how,) = [section for section in shown.on(doc.PAGE) if section.key == "how"]
    assert how.lead.startswith("1 trial with 900 requests in 60.0 s, one server.")
