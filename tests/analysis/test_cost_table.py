"""Which device serves a request for less: the ratio's interval, what establishes it, and what may not be compared."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from scipy import stats

from gapmeter.analysis.compare.cost_table import cost_table
from gapmeter.analysis.compare.searches import (
    SEARCH_SPREAD,
    NotOneSide,
    ServerCapacity,
    merge_searches,
    read_capacities,
)
from gapmeter.analysis.numbers import rate as rate_words
from gapmeter.analysis.numbers import significant
from gapmeter.analysis.pareto import pareto
from gapmeter.analysis.results import RunResult
from gapmeter.analysis.results.comparison import NOT_COMPARABLE, Asked
from gapmeter.analysis.results.cost import Interval
from gapmeter.analysis.results.cost_table import CHEAPER, NOT_ESTABLISHED, CostTable
from gapmeter.analysis.results.manifest import Manifest, ManifestBase, SweepManifest, SweepPoint
from gapmeter.analysis.results.pareto import ParetoPoint
from gapmeter.records import RunFolder
from gapmeter.report.cost_table import document, headline
from gapmeter.report.terminal import text
from gapmeter.study.sweep import analyse_points
from tests.kit.runs import write_run
from tests.kit.searches import write_search

ENGINES = Path(__file__).resolve().parents[2] / "docs" / "results" / "engines.md"
Z = stats.norm.ppf(0.975)
PRICES = {"gpu": "L4", "gpus_per_replica": 1}


def searched(
    home: Path, rate: float | None, low: float | None, high: float | None, usd: float = 1.0, **about: Any
) -> ServerCapacity:
    """A search that found this, on a GPU at ``usd`` an hour."""
    about.setdefault("scenario", {})
    about["scenario"] = {"cost": {**PRICES, "usd_per_hour": usd}, **about["scenario"]}
    name = str(len(list(home.iterdir())) if home.exists() else 0)
    (found,) = read_capacities(write_search(home / name, rate, low, high, **about))
    return found


def estimated(search: ServerCapacity, rate: float, low: float, high: float) -> ServerCapacity:
    """The same search, had it found this."""
    rates = {"rate": rate, "low": low, "high": high}
    return dataclasses.replace(search, capacity=search.capacity.model_copy(update=rates))


def table(*found: ServerCapacity, **asked: Any) -> CostTable:
    return cost_table(found, Asked(**asked))


def spread(*searches: int) -> float:
    return float(Z * SEARCH_SPREAD * math.sqrt(sum(1 / each for each in searches)))


def test_the_ratio_of_two_costs_is_that_of_prices_over_rates_and_both_errors_combine_on_the_logarithmic_scale(
    tmp_path: Path,
) -> None:
    """A: $1 and 50 (45 .. 60) req/s; B: $1.5 and 150 (140 .. 160): A costs 2 times as much."""
    found = table(searched(tmp_path, 50, 45, 60), searched(tmp_path, 150, 140, 160, usd=1.5))
    a, b = found.rows
    assert a.per_request_usd == pytest.approx(1 / (3600 * 50 * 0.8))
    assert b.per_request_usd == pytest.approx(1.5 / (3600 * 150 * 0.8))
    assert a.per_request_usd_ci == pytest.approx((1 / (3600 * 60 * 0.8), 1 / (3600 * 45 * 0.8)))
    assert a.per_million_output_tokens_usd == pytest.approx(1 / (3600 * 50 * 0.8) / 100 * 1e6)
    assert (found.cheapest, found.verdict) == ("B", CHEAPER)
    assert (b.ratio.value, b.ratio.low, b.ratio.high) == (1, 1, 1)
    own = [math.hypot(math.log(60 / 50), math.log(150 / 140)), math.hypot(math.log(50 / 45), math.log(160 / 150))]
    assert a.ratio.own == pytest.approx((2 * math.exp(-own[0]), 2 * math.exp(own[1])))
    whole = [math.hypot(each, spread(1, 1)) for each in own]
    ends = (2 * math.exp(-whole[0]), 2 * math.exp(whole[1]))
    assert (a.ratio.value, a.ratio.low, a.ratio.high) == pytest.approx((2, *ends))
    low, high = 1 / ends[1], 1 / ends[0]
    told = f"serves a request for 0.50 ({significant(low, 2)} to {significant(high, 2)}) of what A costs."
    each = "B holds 150 req/s (140 to 160) for $3.47 a million; A holds 50 req/s (45.0 to 60.0) for $6.94 a million"
    assert headline(found) == f"B {told} Within the SLOs {each}."


def test_what_binds_is_told_by_its_name(tmp_path: Path) -> None:
    sides = [searched(tmp_path, 50, 45, 60, binding_stage=stage) for stage in ("other_step", "core_wait")]
    told = " ".join(text(document(table(*sides))).plain.split())
    assert "ttft p99 <= 500 ms (others' steps)" in told and "ttft p99 <= 500 ms (core wait)" in told


def test_a_rate_that_is_proven_to_hold_claims_no_more_than_its_search_does(tmp_path: Path) -> None:
    """How sure that is depends on drift and bursts, which the search's own page tells."""
    told = " ".join(text(document(table(searched(tmp_path, 50, 45, 60), searched(tmp_path, 50, 45, 60)))).plain.split())
    assert "proven to hold 45 req/s" in told and "sure to hold" not in told


def test_the_spread_of_searches_is_that_of_the_published_pairs() -> None:
    rows = re.findall(
        r"^\| (?:vLLM|Transformers) [^|]*\| ([\d.]+),[^|]*\| ([\d.]+),", ENGINES.read_text(), re.MULTILINE
    )
    pairs = [math.log(float(b) / float(a)) for a, b in rows]
    assert len(pairs) == 2
    assert pytest.approx(math.sqrt(np.mean(np.square(pairs)) / 2), abs=5e-5) == SEARCH_SPREAD


_rates = st.tuples(st.floats(1, 1e3), st.floats(1.01, 2), st.floats(1.01, 2))


@pytest.fixture(scope="module")
def any_search(tmp_path_factory: pytest.TempPathFactory) -> ServerCapacity:
    return searched(tmp_path_factory.mktemp("searches"), 50, 45, 55)


@example(a=(1000.0, 2.0, 1.5), b=(999.9999999999999, 1.5, 2.0))  # which cost the same
@given(a=_rates, b=_rates)
def test_which_of_two_rows_comes_first_changes_nothing(
    any_search: ServerCapacity, a: tuple[float, float, float], b: tuple[float, float, float]
) -> None:
    assume(a[0] != b[0])
    first, second = (estimated(any_search, rate, rate / down, rate * up) for rate, down, up in (a, b))
    one, other = table(first, second), table(second, first)
    assert (one.verdict, {row.capacity.rate: row.ratio for row in one.rows}) == (
        other.verdict,
        {row.capacity.rate: row.ratio for row in other.rows},
    )


def test_ratios_cover_the_truth_when_a_whole_search_is_off_by_what_searches_are_known_to_be_off(tmp_path: Path) -> None:
    """B's truth is 1.5 times A's; each estimate has the error of its interval, and the mood of its search."""
    base, rng, own = searched(tmp_path, 50, 45, 55), np.random.default_rng(4), 0.08
    covered = 0
    for _ in range(400):
        rates = [math.exp(math.log(truth) + rng.normal(0, math.hypot(own, SEARCH_SPREAD))) for truth in (50, 75)]
        found = table(*(estimated(base, rate, rate * math.exp(-Z * own), rate * math.exp(Z * own)) for rate in rates))
        dearer = next(row for row in found.rows if row.name != found.cheapest)
        truth = 1.5 if dearer.name == "A" else 1 / 1.5
        ratio = dearer.ratio
        covered += ratio.low <= truth <= ratio.high
    assert stats.binom.ppf(0.001, 400, 0.95) <= covered <= stats.binom.ppf(0.999, 400, 0.95)


def test_many_alike_are_told_apart_no_oftener_than_two(tmp_path: Path) -> None:
    """Eight rows of one truth, of which chance makes one the cheapest."""
    base, rng, claimed = searched(tmp_path, 50, 45, 55), np.random.default_rng(5), 0
    for _ in range(200):
        rates = [50 * math.exp(rng.normal(0, math.hypot(0.05, SEARCH_SPREAD))) for _ in range(8)]
        found = table(*(estimated(base, r, r * math.exp(-Z * 0.05), r * math.exp(Z * 0.05)) for r in rates))
        claimed += any(row.ratio and row.name != found.cheapest and row.ratio.doubt is None for row in found.rows)
    assert claimed <= stats.binom.ppf(0.999, 200, 0.05)


def test_a_difference_that_two_searches_of_one_server_may_have_is_not_established_and_repeats_establish_it(
    tmp_path: Path,
) -> None:
    """18 % apart, each known to 2 %."""
    a, b = searched(tmp_path, 50, 49, 51), searched(tmp_path, 59, 58, 60)
    found = table(a, b)
    assert found.verdict == NOT_ESTABLISHED
    assert (found.rows[0].ratio.doubt, found.cheapest) == ("spread", "B")
    shown = " ".join(text(document(found)).plain.split())
    assert "Which is cheaper is not established: A or B may be." in shown
    assert "by their own intervals, but two searches of one server have differed by some 10 %" in shown
    assert "Search A and B three times, and name them as one side: A1,A2,A3 B1,B2,B3" in shown
    again = [
        merge_searches([searched(tmp_path, rate, rate - 1, rate + 1) for rate in rates])
        for rates in ((49.5, 50, 50.5), (58.5, 59, 59.5))
    ]
    repeated = cost_table(again)
    assert repeated.verdict == CHEAPER
    assert [len(row.folders) for row in repeated.rows] == [3, 3]
    assert repeated.rows[0].capacity.rate == pytest.approx((49.5 * 50 * 50.5) ** (1 / 3))
    assert "transformers; 3 searches" in text(document(repeated)).plain
    beside = " ".join(text(document(cost_table([again[0], searched(tmp_path, 55, 54, 56)]))).plain.split())
    assert "Search B three times, and name them as one side: B1,B2,B3" in beside


def test_repeats_that_lie_far_apart_count_for_what_they_show_in_the_rate_the_cost_and_the_ratio(tmp_path: Path) -> None:
    """Two of one server, 37.2 (31.9 .. 43.7) and 22.6 (19.8 .. 28.6): t with 2 degrees of freedom is 4.30."""
    ends = (37.2, 31.9, 43.7), (22.6, 19.8, 28.6)
    sides = [[searched(tmp_path, *each) for each in ends], [searched(tmp_path, rate, 50, 60) for rate in (54, 56)]]
    found = cost_table([merge_searches(side) for side in sides])
    row = found.rows[0]
    rate, low, high = row.capacity.rate, row.capacity.low, row.capacity.high
    between = 4.3027 * math.sqrt(SEARCH_SPREAD**2 + 2 * (math.log(37.2 / 22.6) / 2) ** 2) / 2
    within = [math.hypot(*(math.log(each[0] / each[end]) for each in ends)) / 2 for end in (1, 2)]
    assert rate == pytest.approx(math.sqrt(37.2 * 22.6))
    assert rate is not None and low == pytest.approx(rate * math.exp(-math.hypot(between, within[0])), rel=1e-4)
    assert high == pytest.approx(rate * math.exp(math.hypot(between, within[1])), rel=1e-4)
    assert row.per_request_usd_ci == pytest.approx((1 / (3600 * (high or 0) * 0.8), 1 / (3600 * (low or 0) * 0.8)))
    assert (row.ratio.low, row.ratio.high) == row.ratio.own, "they have it in them"
    assert (found.verdict, row.ratio.doubt) == (NOT_ESTABLISHED, "interval")
    told = " ".join(text(document(found)).plain.split())
    assert "which may not be a real difference. A third search of A and B would tell more than the second did." in told


def test_a_side_of_several_searches_keeps_the_fleet_of_the_one_that_proved_least(tmp_path: Path) -> None:
    def side(*planned: tuple[float, float | None]) -> ServerCapacity:
        return merge_searches([searched(tmp_path, low + 5, low, low + 9, target_rps=target) for low, target in planned])

    rows = cost_table([side((50, 200), (40, 200)), side((50, 200), (50, 100)), side((50, 200), (50, None))]).rows
    assert [row.fleet and row.fleet.replicas for row in rows] == [8, None, None], "200 / (40 x 0.8) and one to spare"


def test_a_side_of_several_searches_has_the_tokens_and_the_energy_of_all_of_them(tmp_path: Path) -> None:
    """Their median, from the lowest to the highest of their ends, as of several runs."""
    searches = [
        dataclasses.replace(
            searched(tmp_path, 50, 45, 55), tokens=Interval(value=many, low=many - 2, high=many + 2),
            energy=Interval(value=many / 10, low=None, high=many),
        )
        for many in (90.0, 110.0, 100.0)
    ]  # fmt: skip
    other = searched(tmp_path, 50, 45, 55)
    found = cost_table([merge_searches(searches), other])
    assert found.provenance.n == f"{' + '.join(one.provenance.n for one in searches)} and {other.provenance.n}"
    row = found.rows[0]
    assert row.per_million_output_tokens_usd == pytest.approx(row.per_request_usd / 100 * 1e6)
    ends = [1e6 * (usd or 0.0) / many for usd, many in zip(row.per_request_usd_ci, (112, 88), strict=True)]
    assert row.per_million_output_tokens_usd_ci == pytest.approx(ends)
    assert (row.energy_per_request_j, row.energy_per_request_j_ci) == (10.0, (None, 110.0))
    searches[1] = dataclasses.replace(searches[1], energy=None)
    assert cost_table([merge_searches(searches), other]).rows[0].energy_per_request_j is None


@pytest.mark.parametrize("spread", [0.0, 0.03, 0.07, 0.15])
@pytest.mark.parametrize("searches", [2, 3])
def test_sides_of_several_searches_cover_the_truth_however_far_those_are_off(
    spread: float, searches: int, tmp_path: Path
) -> None:
    """The rate, the cost and the ratio; each search off by its own error of 5 %, and by what moves the whole search."""
    base, rng, own, sides = searched(tmp_path, 50, 45, 55), np.random.default_rng(8), 0.05, 300
    rates, ratios = 0, 0

    def search(truth: float) -> ServerCapacity:
        rate = truth * math.exp(rng.normal(0, math.hypot(own, spread)))
        return estimated(base, rate, rate * math.exp(-Z * own), rate * math.exp(Z * own))

    for _ in range(sides):
        found = cost_table([merge_searches([search(truth) for _ in range(searches)]) for truth in (50, 75)])
        for row, truth in zip(found.rows, (50, 75), strict=True):
            low, high = row.per_request_usd_ci or (None, None)
            assert low and high
            rates += low <= 1 / (3600 * truth * 0.8) <= high
        dearer = next(row for row in found.rows if row.name != found.cheapest)
        assert dearer.ratio.low and dearer.ratio.high
        ratios += dearer.ratio.low <= (1.5 if dearer.name == "A" else 1 / 1.5) <= dearer.ratio.high
    assert rates >= stats.binom.ppf(0.01, 2 * sides, 0.95)
    assert ratios >= stats.binom.ppf(0.01, sides, 0.95)


def test_a_difference_within_both_intervals_is_not_established(tmp_path: Path) -> None:
    found = table(searched(tmp_path, 50, 40, 60), searched(tmp_path, 55, 45, 70))
    assert (found.verdict, found.rows[0].ratio.doubt) == (NOT_ESTABLISHED, "interval")


def test_a_search_at_another_confidence_is_widened_to_the_same(tmp_path: Path) -> None:
    z = stats.norm.ppf(0.9)  # of 80 %
    sure = table(
        searched(tmp_path, 50, 50 * math.exp(-Z * 0.1), 50 * math.exp(Z * 0.1)), searched(tmp_path, 150, 140, 160)
    )
    less = table(
        searched(tmp_path, 50, 50 * math.exp(-z * 0.1), 50 * math.exp(z * 0.1), confidence=0.8),
        searched(tmp_path, 150, 140, 160),
    )
    assert sure.rows[0].ratio and less.rows[0].ratio
    assert sure.rows[0].ratio.own == pytest.approx(less.rows[0].ratio.own)


DIFFERENCES: dict[str, tuple[dict[str, Any], str]] = {
    "another SLO": ({"slo": "ttft p99 <= 900 ms"}, "slo: ttft p99 <= 500 ms | ttft p99 <= 900 ms"),
    "another workload": (
        {"scenario": {"workload": {"kind": "chat", "prompt_tokens": 64}}},
        "workload.prompt_tokens: none | 64",
    ),
    "another share of it planned": (
        {"scenario": {"cost": {**PRICES, "usd_per_hour": 1.0, "utilisation": 0.5}}},
        "cost.utilisation: 0.8 | 0.5",
    ),
    "other time-outs": ({"scenario": {"load": {"timeout": 9.0}}}, "load.timeout: 60 | 9"),
}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_rows_of_other_workloads_or_slos_are_not_comparable_and_the_difference_is_named(
    case: str, tmp_path: Path
) -> None:
    about, told = DIFFERENCES[case]
    rows = [searched(tmp_path, 50, 45, 55), searched(tmp_path, 150, 140, 160, **about)]
    found = table(*rows)
    assert found.verdict == NOT_COMPARABLE
    assert (found.cheapest, [row.ratio for row in found.rows]) == (None, [None, None])
    assert headline(found) == f"Not comparable: B differs from A in {told}."
    assert "not comparable" in text(document(found)).plain
    assert table(*rows, force=True).verdict == table(*rows, factors=(told.partition(":")[0],)).verdict == CHEAPER
    beside = table(*rows, searched(tmp_path, 150, 140, 160))
    assert (beside.verdict, beside.cheapest) == (CHEAPER, "C"), "the two that are comparable"
    assert f"Not comparable: B differs from A in {told}." in " ".join(text(document(beside)).plain.split())


def test_arrivals_that_a_search_does_not_ask_with_are_not_comparable(tmp_path: Path) -> None:
    """A search keeps bursts, and asks at Poisson's times whatever else the scenario says; a run does what it says."""
    even, bursty = {"load": {"arrivals": "constant"}}, {"load": {"arrivals": "gamma", "burstiness": 4.0}}
    plain = searched(tmp_path, 150, 140, 160)
    assert table(searched(tmp_path, 50, 45, 55, scenario=even), plain).verdict == CHEAPER
    told = headline(table(plain, searched(tmp_path, 50, 45, 55, scenario=bursty)))
    assert "load.arrivals: poisson | gamma" in told
    run = read_capacities(write_run(tmp_path / "run", slos=("ttft p99 <= 500 ms",), count=240).path)
    steady = dataclasses.replace(run[0], scenario={**run[0].scenario, **even})
    assert "load.arrivals: poisson | constant" in headline(table(searched(tmp_path, 50, 45, 55), steady))


def test_a_row_without_a_price_says_so_and_has_its_capacity_all_the_same(tmp_path: Path) -> None:
    free: dict[str, Any] = {
        "scenario": {"cost": {"gpu": None, "usd_per_hour": None}},
        "hardware": {"gpus": ["Weird GPU 3000, 1 MiB, 1"]},
    }
    found = table(searched(tmp_path, 50, 45, 55), searched(tmp_path, 70, 65, 75, **free))
    assert found.verdict == NOT_ESTABLISHED
    assert headline(found).startswith("Which is cheaper is not established: B has no cost (Weird GPU 3000 is not in")
    assert found.rows[1].capacity.rate == 70
    assert "holds 70 req/s (65.0 to 75.0)" in headline(found)
    assert "70.0 (65.0 .. 75.0)" in text(document(found)).plain


def test_an_estimate_that_no_trial_held_is_not_called_one_that_holds_and_disturbed_trials_are_kept_in_mind(
    tmp_path: Path,
) -> None:
    a, b = searched(tmp_path, 50, 45, 55), searched(tmp_path, 150, 140, 160)
    unproven = dataclasses.replace(a, capacity=a.capacity.model_copy(update={"held": None}), disturbed=2)
    found = table(unproven, b)
    assert "A serves about 50 req/s" in headline(found)
    assert "B holds 150 req/s" in headline(found)
    assert [note for note in found.notes if note.startswith("in 2 trials of A another program")]


def test_the_devices_and_the_settings_that_differ_are_named(tmp_path: Path) -> None:
    gpus: list[dict[str, Any]] = [{"hardware": {"gpus": [f"NVIDIA {name}, 1 MiB, 1"]}} for name in ("L4", "H200")]
    sizes = [{"max_batch": size, "args": {"x": size}} for size in (8, 32)]
    servers: list[dict[str, Any]] = [{"scenario": {"server": size}} for size in sizes]
    found = table(
        *(searched(tmp_path, r, r - 2, r + 2, **g, **s) for r, g, s in zip((50, 150), gpus, servers, strict=True))
    )
    assert [row.device for row in found.rows] == ["NVIDIA L4", "NVIDIA H200"]
    assert [row.setting for row in found.rows] == ["transformers, max_batch 8, x 8", "transformers, max_batch 32, x 32"]
    assert headline(found).startswith("B (NVIDIA H200) serves a request for 0.33 (")


@pytest.mark.parametrize(("values", "told"), [((None, "none"), ["null", '"none"']), ((8, "8", 16), ["8", "8", "16"])])
def test_settings_that_differ_are_told_apart_and_those_that_are_alike_are_not(
    values: tuple[Any, ...], told: list[str], tmp_path: Path
) -> None:
    sizes: list[dict[str, Any]] = [{"scenario": {"server": {"args": {"x": value}}}} for value in values]
    found = table(*(searched(tmp_path, 50, 45, 55, **size) for size in sizes))
    assert [row.setting for row in found.rows] == [f"transformers, x {each}" for each in told]


def test_requests_of_another_length_are_told_beside_their_costs(tmp_path: Path) -> None:
    same = searched(tmp_path, 50, 45, 55)
    longer = dataclasses.replace(same, tokens=Interval(value=120.0, low=118.0, high=122.0))
    told = "a request of B has 120 output tokens, one of A 100"
    assert [note for note in table(same, longer, same).notes if "tokens" in note] == [told]


def test_a_setting_that_is_not_the_servers_is_named_where_it_may_differ(tmp_path: Path) -> None:
    loads: list[dict[str, Any]] = [{"scenario": {"load": {"timeout": limit}}} for limit in (5.0, 9.0)]
    found = table(*(searched(tmp_path, 50, 45, 55, **load) for load in loads), factors=("load.timeout",))
    assert [row.setting for row in found.rows] == ["transformers, load.timeout 5", "transformers, load.timeout 9"]
    loads = [{"scenario": {"load": {"placement": which}}} for which in ("auto", "shared")]
    cores = table(*(searched(tmp_path, 50, 45, 55, **load) for load in loads))  # a server of other cores
    assert [row.setting for row in cores.rows] == [
        "transformers, load.placement auto",
        "transformers, load.placement shared",
    ]


def test_a_limit_is_the_same_in_whatever_unit_it_is_written(tmp_path: Path) -> None:
    limits = ("ttft p99 <= 500 ms", "ttft p99 <= 0.5 s", "ttft p99 <= 0.6 s")
    _, same, other = table(*(searched(tmp_path, 50, 45, 55, slo=limit) for limit in limits)).rows
    assert same.differs == ()
    assert [(fact.key, fact.a, fact.b) for fact in other.differs] == [
        ("slo", "ttft p99 <= 500 ms", "ttft p99 <= 600 ms")
    ]


def test_files_that_hold_the_same_are_the_same_workload_wherever_they_lie(tmp_path: Path) -> None:
    def asked_from(path: str, held: str) -> ServerCapacity:
        asked = {"workload": {"prompt_tokens": {"file": path}}}
        return searched(tmp_path, 50, 45, 55, scenario=asked, contents={"workload.prompt_tokens": held})

    here, elsewhere = asked_from("/a/lengths.txt", "59803e1742db"), asked_from("/b/lengths.txt", "59803e1742db")
    assert table(here, elsewhere).rows[1].differs == ()
    assert merge_searches([here, elsewhere]).folders == (*here.folders, *elsewhere.folders), "they may be one side"
    (fact,) = table(here, asked_from("/a/lengths.txt", "8d16ea8f970e")).rows[1].differs
    assert fact.key == "workload.prompt_tokens"
    assert (fact.a, fact.b) == ("/a/lengths.txt (59803e1742db)", "/a/lengths.txt (8d16ea8f970e)")
    silent = dataclasses.replace(here, contents={})
    for told, differ in ((here, []), (elsewhere, ["workload.prompt_tokens"])):
        for sides in ((silent, told), (told, silent)):
            assert [fact.key for fact in table(*sides).rows[1].differs] == differ, "where one does not tell, by name"


def test_searches_that_replay_other_traces_are_not_comparable_and_of_one_trace_they_are_at_any_speed(
    tmp_path: Path,
) -> None:
    plain = searched(tmp_path, 50, 45, 55)

    def replayed(held: str, speed: int, path: str = "/a/trace.csv") -> ServerCapacity:
        trace = {"arrivals": "trace", "trace": {"file": path, "speed": speed}}
        scenario = {**plain.scenario, "load": {**plain.scenario["load"], **trace}}
        return dataclasses.replace(plain, scenario=scenario, contents={"load.trace": held} if held else {})

    one = replayed("59803e1742db", 1)
    assert table(one, replayed("59803e1742db", 2)).rows[1].differs == ()
    (fact,) = table(one, replayed("8d16ea8f970e", 1)).rows[1].differs
    assert (fact.key, fact.b) == ("load.trace", "/a/trace.csv (8d16ea8f970e)")
    for other in one, replayed("", 2, "/b/trace.csv"):
        assert table(replayed("", 1), other).rows[1].differs == (), "older folders do not say what it held"
    assert [fact.key for fact in table(one, plain).rows[1].differs] == ["load.arrivals"]


def test_a_repeat_that_found_no_rate_is_of_the_same_thing_and_says_why_the_side_has_no_cost(tmp_path: Path) -> None:
    nothing = searched(tmp_path, None, None, 40, status="incomplete", ended_because="the server died")
    for side in [searched(tmp_path, 50, 45, 55), nothing], [nothing, searched(tmp_path, 50, 45, 55)]:
        row = cost_table([merge_searches(side), searched(tmp_path, 70, 65, 75)]).rows[0]
        assert (row.per_request_usd_ci, row.why_no_cost) == (None, "the server died")
        assert row.price is not None


def test_a_row_without_a_cost_is_named_beside_the_cheapest_of_the_others(tmp_path: Path) -> None:
    nothing = searched(tmp_path, None, None, 40, status="incomplete", ended_because="the server died")
    found = table(searched(tmp_path, 50, 45, 55), searched(tmp_path, 150, 140, 160), nothing)
    assert (found.verdict, found.cheapest) == (CHEAPER, "B")
    assert "C has no cost (the server died)." in text(document(found)).plain


def test_searches_of_two_things_are_not_one_side(tmp_path: Path) -> None:
    searches = [searched(tmp_path, 50, 45, 55, scenario={"server": {"max_batch": batch}}) for batch in (8, 4)]
    with pytest.raises(NotOneSide, match=r"0 and 1 are not of one thing: server.max_batch: 8 \| 4; name them as sides"):
        merge_searches(searches)
    flags: tuple[tuple[object, object, str], ...] = (
        (True, "true", r"server.args.x: true \| \"true\""), (None, "none", r"server.args.x: null \| \"none\""),
        (8, "8", ""),
    )  # fmt: skip
    for a, b, differs in flags:
        pair = [searched(tmp_path, 50, 45, 55, scenario={"server": {"args": {"x": value}}}) for value in (a, b)]
        with pytest.raises(NotOneSide, match=differs) if differs else contextlib.nullcontext():
            merge_searches(pair)
    patient = searched(tmp_path, 50, 45, 55, scenario={"server": {"max_batch": 8, "ready_timeout": 900.0}})
    assert merge_searches([searches[0], patient]).folders == ("0", "8"), "which changes nothing of what is measured"


def test_a_run_that_passed_costs_at_most_so_much_which_may_be_enough(tmp_path: Path) -> None:
    """240 requests at 8 req/s held the SLO; the searched server holds 2 req/s for twice the price."""
    slo = "ttft p50 <= 900 ms"
    run = read_capacities(write_run(tmp_path / "run", slos=(slo,), count=240).path)[0]
    assert (run.capacity.low, run.capacity.high, run.capacity.rate) == (8.0, None, None)
    usd = 2 * run.price.usd_per_hour
    dear = searched(tmp_path, 2, 1.9, 2.1, usd=usd, slo=slo)
    found = table(dear, run)
    ratio = found.rows[0].ratio
    assert (found.cheapest, found.verdict) == ("B", CHEAPER)
    assert (ratio.value, ratio.high) == (None, None)
    assert ratio.low == pytest.approx(2 * 8 / 2.1 * math.exp(-spread(1, 1)))
    assert f"serves a request for at most {1 / (ratio.low or 1):.2g} of what A" in headline(found)
    close = searched(tmp_path, 15, 14, 16, usd=usd, slo=slo)
    undecided = table(close, run)
    assert undecided.verdict == NOT_ESTABLISHED
    told = " ".join(text(document(undecided)).plain.split())
    assert "of B's rate only one end is known; gapmeter capacity may find the other." in told
    begun = table(searched(tmp_path, 15, 14, 16, slo=slo), searched(tmp_path, None, 8, None, slo=slo))
    told = " ".join(text(document(begun)).plain.split())
    assert "of B's rate only one end is known; --resume FOLDER with a larger --budget may find the other." in told
    between = table(searched(tmp_path, 15, 14, 16, slo=slo), searched(tmp_path, None, 8, 15, slo=slo))
    told = " ".join(text(document(between)).plain.split())
    assert "of B's rate only two ends are known; --resume FOLDER with a larger --budget may find what lies" in told


def test_beside_more_rows_the_ratio_to_one_without_an_estimate_is_wider_as_all_others_are(tmp_path: Path) -> None:
    """Of a search, its end at a distance of three pairs' quantile, and that of the spread; of the run its only end."""
    slo = "ttft p50 <= 900 ms"
    run = read_capacities(write_run(tmp_path / "run", slos=(slo,), count=240).path)[0]

    def at(z: float, confidence: float) -> ServerCapacity:
        ends, usd = (2 * math.exp(-z * 0.1), 2 * math.exp(z * 0.1)), run.price.usd_per_hour
        return searched(tmp_path / "searches", 2, *ends, confidence=confidence, usd=usd, slo=slo)

    one, other = at(stats.norm.ppf(0.9), 0.8), at(Z, 0.95)
    for search in (one, other):
        low = table(search, run).rows[0].ratio.low
        assert low == pytest.approx(8 / 2 * math.exp(-Z * 0.1 - spread(1, 1)))
    wide = stats.norm.ppf(1 - 0.025 / 3)
    for row in table(one, other, run).rows[:2]:
        assert row.ratio.low == pytest.approx(8 / 2 * math.exp(-wide * 0.1 - wide / Z * spread(1, 1)))


def test_a_side_of_runs_of_which_one_is_not_decided_costs_what_the_others_do(tmp_path: Path) -> None:
    slo = "ttft p50 <= 900 ms"
    paths = [write_run(tmp_path / name, slos=(slo,), count=240).path for name in ("passed", "undecided", "missed")]
    results = [RunResult.read(path) for path in paths]
    results[1].model_copy(update={"verdict": "INCONCLUSIVE"}).write(paths[1])
    results[2].model_copy(update={"verdict": "FAIL"}).write(paths[2])
    passed, undecided, missed = (read_capacities(path)[0] for path in paths)
    other = searched(tmp_path / "searches", 2, 1.9, 2.1, slo=slo)
    row = cost_table([merge_searches([passed, undecided]), other]).rows[0]
    assert (row.capacity.low, row.why_no_cost, row.per_request_usd_ci is None) == (8.0, "", False)
    for side in ([undecided, undecided], [passed, missed]):
        assert cost_table([merge_searches(side), other]).rows[0].per_request_usd_ci is None


def test_a_search_that_ended_without_a_finding_takes_nothing_from_what_the_others_of_its_side_found(
    tmp_path: Path,
) -> None:
    first, second, other = (searched(tmp_path, rate, 0.9 * rate, 1.1 * rate) for rate in (50, 54, 20))
    nothing = searched(tmp_path, None, None, None, ended="interrupted")
    for known in ([first], [first, second]):
        alone, beside = (cost_table([merge_searches(side), other]).rows for side in (known, [*known, nothing]))
        assert beside == alone
    unmeetable = searched(tmp_path, None, None, None, ended="unmeetable")
    row = cost_table([merge_searches([first, unmeetable]), other]).rows[0]
    assert (row.per_request_usd_ci, row.why_no_cost) == (None, "no rate was found at which the SLOs hold")


def test_a_run_whose_rate_nobody_asked_for_is_a_point_by_the_rate_that_came(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", slos=("ttft p50 <= 900 ms",), count=240).path
    result = RunResult.read(path)
    load = result.load.model_copy(update={"requested_rate": None, "arrivals": "trace"})
    result.model_copy(update={"load": load}).write(path)
    (found,) = read_capacities(path)
    assert [point.name for point in found.pareto.points] == [rate_words(load.delivered_rate)]


@pytest.mark.parametrize(
    ("of", "high"), [({}, 8.0), ({"unit": "conversations"}, None), ({"loop": "closed"}, None)], ids=str
)
def test_a_rate_of_requests_that_was_missed_bounds_the_one_that_is_held(
    of: dict[str, Any], high: float | None, tmp_path: Path
) -> None:
    """A rate of conversations is none of requests, and a closed loop asks for none."""
    path = write_run(tmp_path / "run", slos=("ttft p50 <= 1 ms",), count=240).path
    result = RunResult.read(path)
    result.model_copy(update={"load": result.load.model_copy(update=of)}).write(path)
    (found,) = read_capacities(path)
    assert (found.capacity.low, found.capacity.high) == (None, high)


def test_a_ratio_of_which_nothing_is_known_is_no_ratio_of_one(tmp_path: Path) -> None:
    found = table(searched(tmp_path, None, 20, None), searched(tmp_path, None, 40, None, usd=7))
    assert (found.verdict, found.cheapest) == (NOT_ESTABLISHED, "A")
    rows = re.findall(r"^ [AB]  .*at most \S+ +(.*?) *$", text(document(found)).plain, re.MULTILINE)
    assert rows == ["1", "not established"]


@pytest.mark.parametrize("level", ["load.rate", "load.concurrency"])
def test_points_of_a_sweep_that_differ_in_their_load_alone_are_one_row_between_what_held_and_what_failed(
    tmp_path: Path, level: str
) -> None:
    home = RunFolder(tmp_path / "sweep")
    points = []
    slos = ("ttft p50 <= 900 ms", "errors <= 10 %")
    for number, (rate, failures) in enumerate(((4.0, 0), (8.0, 0), (9.0, 120), (10.0, 120))):
        place = f"points/00{number}"
        judged = {"slo_on_errors": True}
        run = write_run(
            home.path / place / "r1", slos=slos, rate=rate, count=240, failures=failures, evidence=judged
        ).path
        (run / "steps.parquet").unlink()  # which say nothing of a batch
        values = {level: rate}
        points.append(SweepPoint(values=values, resolved=values, digest="a", folder=place))
    of_run = Manifest.read(run)
    common = {name: getattr(of_run, name) for name in ManifestBase.model_fields}
    SweepManifest(**common, repeat=1, points=tuple(points), order=(((0, 0), (1, 0), (2, 0), (3, 0)),)).write(home.path)
    swept = analyse_points(home)
    assert [point.verdict for point in swept.sweep.points] == ["PASS", "PASS", "FAIL", "FAIL"]
    (row,) = read_capacities(home.path)
    assert (row.capacity.low, row.capacity.high, row.capacity.held) == (8.0, 9.0, 8.0)
    assert row.binding[0] == "errors <= 10 %"


def test_a_rate_of_conversations_is_called_one_wherever_a_point_is_named(tmp_path: Path) -> None:
    home, made = RunFolder(tmp_path / "sweep"), write_run(tmp_path / "run", count=240).path
    talks = {**Manifest.read(made).scenario, "workload": {"kind": "conversation"}}
    about = Manifest.read(made).model_copy(update={"scenario": talks})
    about.write(made)
    found = RunResult.read(made)
    load = found.load.model_copy(update={"unit": "conversations", "requested_rate": 2.0})
    found.model_copy(update={"load": load}).write(made)
    (made / "steps.parquet").unlink()  # which say nothing of a batch
    points = []
    for number, batch in enumerate((2, 4, 8)):
        values = {"server.max_batch": batch, "load.rate": 2.0 + number}
        points.append(SweepPoint(values=values, resolved=values, digest="a", folder=f"points/{number}"))
        if number < 2:  # the last one never ran
            shutil.copytree(made, home.path / f"points/{number}/r1")
    common = {name: getattr(about, name) for name in ManifestBase.model_fields}
    SweepManifest(**common, repeat=1, points=tuple(points), order=(((0, 0), (1, 0), (2, 0)),)).write(home.path)
    swept = analyse_points(home).sweep
    assert [point.label.rpartition(", ")[2] for point in swept.points] == [f"{n} conversations/s" for n in (2, 3, 4)]
    (of_run,) = read_capacities(made)
    assert [point.name for point in (*swept.pareto.points, *of_run.pareto.points)] == [
        "2 conversations/s", "3 conversations/s", "2 conversations/s",
    ]  # fmt: skip
    count = str(swept.points[0].metrics["ttft"].count)
    assert [row.provenance.n for row in read_capacities(home.path)] == [count, count], "each row its own"


def users(name: str, per_unit: Interval, usd: float) -> ParetoPoint:
    """A point of a sweep over users in a closed loop."""
    pace, cost = (Interval(value=value, low=None, high=None) for value in (90.0, usd))
    return ParetoPoint(
        name=name, side="", folder=name, verdict="INCONCLUSIVE", tokens_per_s_user=pace, tokens_per_s_unit=per_unit,
        by_median=pace, by_mean=None, units=1, usd_per_million_output_tokens=cost,
    )  # fmt: skip


def test_sweeps_of_closed_loops_have_no_cost_but_say_what_each_served_at_the_same_load(tmp_path: Path) -> None:
    """B over A at 8 users: 120 / 100, and both errors combine: exp(sqrt(2) ln 1.1) = 1.144 down and up."""
    rows = []
    for served in (100.0, 120.0):
        shared = Interval(value=served, low=served / 1.1, high=served * 1.1)
        alone = Interval(value=30.0, low=None, high=31.0)
        points = [users("1 user", alone, 3.0), users("8 users", shared, 0.5)]
        one = searched(tmp_path, None, None, None)
        capacity = one.capacity.model_copy(update={"why": "a closed loop has no rate"})
        scenario = {**one.scenario, "load": {**one.scenario["load"], "arrivals": "closed"}}
        rows.append(dataclasses.replace(one, scenario=scenario, capacity=capacity, pareto=pareto(points, "GPU", None)))
    result = table(*rows)
    (at_one, at_eight) = result.served
    assert (at_one.row, at_one.over, at_one.point) == ("B", "A", "1 user")
    assert at_one.times == Interval(value=1.0, low=None, high=None)
    times, wide = at_eight.times, math.exp(math.sqrt(2) * math.log(1.1))
    assert (times.value, times.low, times.high) == pytest.approx((1.2, 1.2 / wide, 1.2 * wide))
    assert headline(result) == (
        "Which is cheaper is not established: A and B have no cost (a closed loop has no rate)."
    )
    shown = text(document(result), 100).plain
    assert "B over A: 1.00 (? to ?) at 1 user, 1.20 (1.05 to 1.37) at 8 users." in " ".join(shown.split())
    assert re.search(r"8 users +A .* 100 \(90.9 .. 110\) +\$0.500\n +8 users +B .* 120 \(109 .. 132\)", shown)
    assert max(map(len, text(document(result)).plain.splitlines())) <= 80
    other = dataclasses.replace(rows[1], slos=frozenset({"e2e p50 <= 1 s"}))
    assert not table(rows[0], other).served
    assert table(rows[0], other, force=True).served == result.served
    offered = [
        dataclasses.replace(row, scenario={**row.scenario, "load": {**row.scenario["load"], "arrivals": "poisson"}})
        for row in rows
    ]
    assert not table(*offered).served, "of an offered rate everybody serves as much"
