"""Knees are claimed where there is one and the points are known well enough, and not where there is none."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapmeter.analysis.arrays import Floats
from gapmeter.analysis.requests.figures import BLOCKS, block_rates
from gapmeter.analysis.results.distribution import Percentile, figure_name
from gapmeter.analysis.results.sweep import CurveKnee, Growth, Point, PointDistribution, SweepFigures
from gapmeter.analysis.stats.series import Level, level_of, level_of_interval
from gapmeter.analysis.sweep.build import common_level
from gapmeter.analysis.sweep.curves import (
    KNEE,
    NONE,
    UNDECIDED,
    Axis,
    CurvePoint,
    Knee,
    Rule,
    curve_point,
    find_knee,
    knees_of,
    latency_turn,
    throughput_turn,
)
from gapmeter.analysis.sweep.growth import growths_of
from gapmeter.analysis.sweep.read import Frames
from gapmeter.report.growth import headline

USERS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
REPEATS = 25
Said = Counter[tuple[str, int | None]]


def closed_loop(users: int, places: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Users who ask again when answered, a server with so many places, exponential services of mean 1.

    Waits (0.1 and what it takes until a place is free) in the order of asking, and answers a unit of time in blocks.
    """
    services = rng.exponential(1.0, 500)
    free, asking = [0.0] * places, [0.0] * users
    waits, ends = [], []
    for service in services:
        at = heapq.heappop(asking)
        start = max(at, heapq.heappop(free))
        heapq.heappush(free, start + service)
        heapq.heappush(asking, start + service)
        waits.append(start - at + 0.1)
        ends.append(start + service)
    edges = np.linspace(ends[2 * users], ends[-2 * users], BLOCKS + 1)
    found, _ = np.histogram(ends, bins=edges)
    return np.array(waits[2 * users :]), found / (edges[1] - edges[0])


def said_of(places: int, *, by_rate: bool) -> Said:
    """What is said in repeated sweeps over 1 to 32 users."""
    said: Said = Counter()
    for seed in range(REPEATS):
        rng = np.random.default_rng([seed, places])
        series = [closed_loop(int(users), places, rng)[by_rate] for users in USERS]
        knee = find_knee(USERS, known(series), throughput_turn if by_rate else latency_turn)
        said[knee.state, knee.at] += 1
    return said


def known(series: Sequence[Floats]) -> list[Level]:
    levels = [level for each in series if (level := level_of(each))]
    assert len(levels) == len(series)
    return levels


@pytest.mark.parametrize("by_rate", [True, False], ids=["throughput", "mean wait"])
def test_a_server_with_eight_places_has_its_knee_at_eight_users(by_rate: bool) -> None:
    said = said_of(8, by_rate=by_rate)
    assert said[KNEE, 3] >= 0.8 * REPEATS
    assert all(at in (3, 4, None) for _, at in said), said


@pytest.mark.parametrize("places", [1, 64], ids=["saturated from the start", "never saturated"])
def test_no_knee_is_claimed_where_there_is_none(places: int) -> None:
    """At most 5 % of claims would be false; 25 sweeps of four kinds, of which two may be."""
    rate, wait = said_of(places, by_rate=True), said_of(places, by_rate=False)
    false = sum(times for said in (rate, wait) for (state, _), times in said.items() if state == KNEE)
    assert false <= 2
    assert rate[NONE, None] >= 0.5 * REPEATS, "throughput is mostly known well enough to say that there is none"


CURVES: dict[str, tuple[Rule, Callable[[Floats], Floats]]] = {
    "throughput by a power": (throughput_turn, lambda load: load**0.6),
    "throughput by the load": (throughput_turn, lambda load: load),
    "throughput flat": (throughput_turn, lambda load: 0 * load + 1),
    "throughput that bends slowly": (throughput_turn, lambda load: load / (1 + load / 8)),
    "latency by the load": (latency_turn, lambda load: 10 + load),
    "latency flat": (latency_turn, lambda load: 0 * load + 1),
}


@pytest.mark.parametrize("error", [0.02, 0.2])
@pytest.mark.parametrize("curve", CURVES)
def test_noise_makes_no_knee(curve: str, error: float) -> None:
    """25 sweeps of a curve that has none, its points estimated with this relative error."""
    rule, shape = CURVES[curve]
    rng, false = np.random.default_rng(1), 0
    for _ in range(REPEATS):
        levels = [
            Level(
                value * float(np.exp(error * rng.standard_normal())), error * float((rng.chisquare(12) / 12) ** 0.5), 12
            )
            for value in shape(np.array(USERS))
        ]
        false += find_knee(USERS, levels, rule).state == KNEE
    assert false <= 4, "5 % of 25 and the noise of counting"


@pytest.mark.parametrize("error", [0.03, 3.0])
def test_a_knee_of_percentiles_is_found_where_their_intervals_are_narrow_enough(error: float) -> None:
    """Waits of an open queue near its ceiling, each with this relative error at the end of its interval."""
    waits = (10.0, 10.2, 10.5, 12.0, 60.0, 140.0)
    levels = [level_of_interval(wait, wait / (1 + error), wait * (1 + error)) for wait in waits]
    found = find_knee(USERS, levels, latency_turn)
    assert (found.state, found.at) == ((KNEE, 3) if error < 1 else (UNDECIDED, None))


def test_points_that_are_known_badly_leave_it_undecided() -> None:
    levels = [Level(min(users, 8) * 100, 0.5, 12) for users in USERS]
    assert find_knee(USERS, levels, throughput_turn).state == UNDECIDED
    assert find_knee(USERS[:3], levels[:3], throughput_turn) == Knee(
        UNDECIDED, "only 3 of the 4 points that it takes", 0.0
    )


@pytest.mark.parametrize(
    ("turn", "values", "says"),
    [
        (throughput_turn, [10, 20, 40, 80, 160, 320], "still grows at the last point"),
        (throughput_turn, [10, 10.5, 10.2, 10.1, 10.4, 10], "does not grow from the first point on"),
        (throughput_turn, [10, 12.5, 15.5, 19, 19.2, 19.3], "no place where it turns"),
        (latency_turn, [10, 10, 10, 11, 11, 12], "hardly rises"),
        (latency_turn, [10 * users for users in USERS], "in proportion"),
        (latency_turn, [1, 8, 12, 14, 15, 16], "in proportion"),
    ],
)
def test_where_there_is_no_knee_the_reason_is_told(turn: Rule, values: list[float], says: str) -> None:
    found = turn(USERS, values)
    assert found.at is None
    assert says in found.why


@given(st.floats(0.01, 100), st.floats(0.01, 100))
def test_where_throughput_turns_does_not_depend_on_units(of_load: float, of_rate: float) -> None:
    rate = [258, 372, 545, 846, 864, 867]
    assert throughput_turn([x * of_load for x in USERS], [y * of_rate for y in rate]).at == 3


@given(st.lists(st.floats(1, 1e4), min_size=4, max_size=12), st.floats(0.01, 100), st.floats(0.01, 100))
def test_where_latency_turns_does_not_depend_on_units(latency: list[float], of_load: float, of_latency: float) -> None:
    load = [float(2**at) for at in range(len(latency))]
    one = latency_turn(load, latency)
    other = latency_turn([x * of_load for x in load], [y * of_latency for y in latency])
    assert (one.bend is None) == (other.bend is None)
    if one.bend is not None:
        assert one.bend == pytest.approx(other.bend, abs=1e-9)


def test_a_latency_turns_where_its_curve_lies_furthest_below_the_straight_line() -> None:
    """At 8 of 1 to 32 users: 7/31 of the way, and 10/130 of the rise."""
    found = latency_turn(USERS, [10, 10, 11, 20, 60, 140])
    assert (found.at, found.bend) == (3, pytest.approx(7 / 31 - 10 / 130))


def test_the_knee_of_an_open_queue_lies_before_its_pole() -> None:
    """M/M/1 with service rate 10: the wait bends up towards rate 10."""
    rates = [1, 2, 3, 4, 5, 6, 7, 8, 9, 9.5]
    knee = latency_turn(rates, [1 / (10 - rate) for rate in rates])
    assert 6 <= rates[knee.at] <= 9


def test_throughput_counts_what_arrives_while_the_load_is_on() -> None:
    """A token every 10 ms; requests of the warm-up still bring some, and after the last due time none counts."""
    at = np.arange(0, 20_000_000_000, 10_000_000)
    requests = pd.DataFrame({
        "due_ns": at[:: 10] , "measured": at[::10] >= 5_000_000_000, "outcome": "ok",
        "token_ns": [at[i : i + 10] + 30_000_000 for i in range(0, len(at), 10)], "output_tokens": 10,
    })  # fmt: skip
    rates = block_rates(requests)
    assert rates.mean() == pytest.approx(100, rel=0.01)
    assert block_rates(requests.assign(output_tokens=None)) is None


def point(supported: float | None, verdict: str = "INCONCLUSIVE", count: int = 9) -> Point:
    """One whose sample supports TTFT up to this percentile."""
    percentiles = {p: Percentile(value_ms=1.0) for p in (99.0, 95.0, 90.0, 50.0) if supported and p <= supported}
    ttft = PointDistribution(percentiles=percentiles, max_ms=1.0, mean_ms=1.0, count=count, n_eff=9.0, mean_ci_ms=None)
    return Point.model_construct(verdict=verdict, metrics={"ttft": ttft})


def test_one_figure_is_compared_that_every_valid_point_has() -> None:
    assert common_level([point(99), point(90)], "ttft") == 90
    assert common_level([point(99), point(50, "INVALID")], "ttft") == 99
    assert common_level([point(99), point(None)], "ttft") is None
    assert common_level([point(99), failed := point(None, "FAIL", count=0)], "ttft") == 99
    assert curve_point(failed, frames(1.0), {}) is None, "no request was answered there"
    assert [figure_name("ttft", level) for level in (99.0, None)] == ["p99 TTFT", "mean TTFT"]


def points_along(key: str, labels: Mapping[str, float]) -> list[Point]:
    """Points in order, of which little else is known."""
    return [
        Point.model_construct(
            index=at, label=name, resolved={key: value}, loop="closed", metrics={}, verdict="PASS", slo=()
        )
        for at, (name, value) in enumerate(labels.items())
    ]


def said(points: list[Point], knees: Sequence[CurveKnee], growths: Sequence[Growth] = ()) -> list[str]:
    sweep = SweepFigures.model_construct(points=tuple(points), knees=tuple(knees), growth=tuple(growths), metric="ttft")
    return headline(sweep, "GPU")


def swept(waits: Sequence[float], rates: Sequence[float], error: float) -> list[str]:
    """The sentences of a sweep whose points are known to this error; no percentile is supported."""
    points = points_along("load.concurrency", {f"{users:g} users": users for users in USERS})
    empty = Frames(pd.DataFrame(), {}, pd.DataFrame(), None)
    on_curve = [
        CurvePoint(point, {"ttft": Level(wait, error, 12), "throughput": Level(rate, error, 12)}, empty)
        for point, wait, rate in zip(points, waits, rates, strict=True)
    ]
    axis = Axis("load.concurrency", "users", (("", tuple(range(len(USERS)))),))
    return said(points, list(knees_of(axis, points, on_curve, "ttft", {"ttft": None})))


@pytest.mark.parametrize("known", [True, False])
def test_an_open_loops_throughput_does_not_tell_that_latency_has_no_knee(known: bool) -> None:
    """Below the ceiling it grows with the rate that is asked for, whatever latency does."""
    rates = (5.0, 10.0, 20.0, 40.0, 60.0, 80.0)
    points = [
        each.model_copy(update={"loop": "open"}) for each in points_along("load.rate", {f"{r:g}": r for r in rates})
    ]
    empty = Frames(pd.DataFrame(), {}, pd.DataFrame(), None)
    on_curve = [
        CurvePoint(each, {"ttft": Level(wait, 2.0, 12) if known else None, "throughput": Level(rate, 0.1, 12)}, empty)
        for each, wait, rate in zip(points, (20, 20, 21, 22, 27, 34), rates, strict=True)
    ]
    (knee,) = knees_of(Axis("load.rate", "", (("", tuple(range(6))),)), points, on_curve, "ttft", {"ttft": None})
    assert (knee.state, knee.by) == (UNDECIDED, "mean TTFT")


def test_the_sentence_names_what_shows_the_knee() -> None:
    """As Transformers did: waits known by their mean only, throughput flat after 8 users."""
    waits, rates = [11, 16, 22, 27, 184, 507], [200, 299, 443, 670, 631, 628]
    [line] = swept(waits, rates, 0.01)
    assert line.startswith("The knee is at 8 users: throughput stops growing there (to 32 users -6.3 %, 95 % interval ")
    [line] = swept(waits, [200, 299, 443, 670, 715, 740], 0.01)
    assert line.startswith("The knee is at 8 users: beyond it throughput grows little (to 32 users +10.4 %, ")
    [line] = swept(waits, rates, 0.5)
    assert line.startswith("Not decided whether there is a knee")
    assert "lies before" not in line
    [line] = swept([10, 10, 10, 10, 10, 10], [20, 40, 80, 160, 320, 640], 0.01)
    assert line == "No knee among these points: throughput still grows at the last point: the knee lies beyond it."


def test_what_a_batch_brought_up_to_its_knee_is_told_and_what_a_load_costs_beyond_it() -> None:
    """Throughput turns at the fourth point; 16 users wait in a queue below it."""
    queue_ms, rates = [400.0, 200.0, 90.0, 10.0, 10.0, 10.0], [100.0, 180.0, 330.0, 600.0, 601.0, 602.0]
    for key, told in (("server.max_batch", (2, 3)), ("load.concurrency", (3, 4))):
        points = points_along(key, {f"p{k}": 2.0**k for k in range(6)})
        on_curve = [CurvePoint(point, {"ttft": Level(wait, 0.01, 12), "itl": None, "throughput": Level(rate, 0.01, 12)},
                       frames(wait)) for point, wait, rate in zip(points, queue_ms, rates, strict=True)]  # fmt: skip
        axis, levels = Axis(key, "", (("", tuple(range(6))),)), {"ttft": None, "itl": None}
        knees = list(knees_of(axis, points, on_curve, "ttft", levels))
        growths = list(growths_of(axis, on_curve, knees, "ttft", levels))
        assert {(g.from_point, g.to_point) for g in growths if g.at_knee} == {told}
        assert knees[0].label == "p3"
    lines = said(points, knees, growths)
    assert lines[1] == "From p3 to p4 mean TTFT shows no clear change (95 % interval -0.308 ms to +0.308 ms)."


def frames(queue_ms: float) -> Frames:
    """A hundred requests that spent this in the queue, give or take."""
    queue = np.random.default_rng(1).normal(queue_ms, 1, 100) * 1e6
    rows = pd.DataFrame({"queue_ns": queue, "unexplained_ns": 0.0, "total_ns": queue})
    return Frames(pd.DataFrame(), dict.fromkeys(("ttft", "e2e", "itl"), rows), pd.DataFrame(), None)


def test_that_there_is_no_knee_is_said_whatever_the_reasons() -> None:
    """Throughput whose last doubling brings 15 %: half of the draws grow ever more slowly, half still grow."""
    levels = [Level(each, 0.01, 12) for each in (10, 12.5, 15.5, 19, 22.5, 25.875)]
    found = find_knee(USERS, levels, throughput_turn)
    assert (found.state, found.certainty) == (NONE, 1.0)
