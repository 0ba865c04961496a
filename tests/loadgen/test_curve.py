"""Arrivals whose rate changes have the law that they claim: time-rescaled, they are one Poisson process of rate 1."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from gapmeter.loadgen.arrivals import Arrivals, Curve, count_dispersion, draw_arrivals
from gapmeter.scenarios.model import Load
from gapmeter.scenarios.shapes import Diurnal, OnOff, Ramp, Step
from gapmeter.scenarios.trace import Trace

S = 1_000_000_000
BASE = Load(arrivals="poisson", rate=20.0, duration="400s", warmup=0)


def ramp(start: float, end: float, over: str | None = None) -> Ramp:
    return Ramp.model_validate({"from": start, "to": end, "over": over} if over else {"from": start, "to": end})


def step(rate: float, lasts: str) -> Step:
    return Step.model_validate({"rate": rate, "for": lasts})


SHAPES: dict[str, dict[str, Any]] = {
    "onoff": {"onoff": OnOff(on="2s", off="6s", quiet=0.1)},
    "ramp": {"rate": None, "ramp": ramp(2, 40)},
    "ramp down to nothing": {"arrivals": "ramp", "rate": None, "ramp": ramp(40, 0, "200s")},
    "steps": {"rate": None, "steps": (step(5, "100s"), step(0, "30s"), step(60, "20s"), step(20, "1s"))},
    "diurnal": {"diurnal": Diurnal(day="2m", swing=0.8, peak=15)},
    "diurnal with a night": {"arrivals": "diurnal", "diurnal": Diurnal(day="50s", hours=(0, 0, 1, 4, 2))},
}
SEEDS = range(40)


def load(shape: str, **changes: Any) -> Load:
    return BASE.model_copy(update={"arrivals": shape} | SHAPES[shape] | changes)


def drawn(shape: str, seed: int = 1, warmup_ns: int = 0, **changes: Any) -> Arrivals:
    return draw_arrivals(load(shape, **changes), np.random.default_rng(seed), warmup_ns)


def expected_at(knots: tuple[tuple[int, float], ...], at_ns: NDArray[np.int64]) -> NDArray[np.float64]:
    """Requests expected up to each time, summed up piece by piece from what the plan says of its rate."""
    total = np.zeros(len(at_ns))
    for (start, first), (end, last) in pairwise(knots):
        if end > start:
            inside = np.clip(at_ns - start, 0, end - start) / S
            total += first * inside + (last - first) * S / (end - start) * inside**2 / 2
    return total


@pytest.mark.parametrize("shape", SHAPES)
def test_rescaled_by_the_expected_count_gaps_are_independent_exponentials(shape: str) -> None:
    for seed in range(5):
        made = drawn(shape, seed, warmup_ns=20 * S)
        gaps = np.diff(expected_at(made.knots, made.due_ns), prepend=0)
        assert stats.kstest(gaps, "expon").pvalue > 0.001
        ranks = stats.rankdata(gaps)
        assert abs(np.corrcoef(ranks[:-1], ranks[1:])[0, 1]) < 4 / len(gaps) ** 0.5


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "onoff"])
def test_counts_over_runs_have_the_mean_and_the_variance_of_a_poisson_number(shape: str) -> None:
    runs = [drawn(shape, seed) for seed in SEEDS]
    counts = np.array([len(made.due_ns) for made in runs])
    (mean,) = {float(expected_at(made.knots, np.array([400 * S]))[0]) for made in runs}
    assert counts.mean() == pytest.approx(mean, abs=4 * (mean / len(counts)) ** 0.5)
    low, high = stats.chi2.interval(0.999, len(counts) - 1)
    assert low < counts.var(ddof=1) / mean * (len(counts) - 1) < high
    assert {made.dispersion for made in runs} == {1.0}


@pytest.mark.parametrize(
    ("shape", "mean"),
    [
        ("onoff", 20.0), ("ramp", 21.0), ("ramp down to nothing", 10.0), ("diurnal with a night", 20.0),
        ("steps", (5 * 100 + 60 * 20 + 20 * 250) / 400),
    ],
)  # fmt: skip
def test_the_curve_has_the_mean_that_was_asked_for(shape: str, mean: float) -> None:
    means = [float(expected_at(drawn(shape, seed).knots, np.array([400 * S]))[0]) / 400 for seed in SEEDS]
    assert np.mean(means) == pytest.approx(mean, rel=0.05 if shape == "onoff" else 1e-9)


def test_a_day_swings_around_its_mean_with_its_peak_at_the_hour_asked_for() -> None:
    at_ns, rates = zip(*drawn("diurnal", duration_ns=120 * S).knots, strict=True)
    assert rates[15] == max(rates) == pytest.approx(36)
    assert min(rates) == pytest.approx(4)
    assert np.diff(at_ns).tolist() == [5 * S] * 24
    assert drawn("diurnal", warmup_ns=12 * S).knots[3] == (12 * S, rates[0])


@pytest.mark.parametrize(("on", "off", "quiet"), [(2, 6, 0.1), (0.5, 0.5, 0.0), (10, 1, 0.3)])
def test_bursts_have_the_dispersion_of_a_markov_modulated_poisson_process(on: float, off: float, quiet: float) -> None:
    bursts = OnOff(on=on, off=off, quiet=quiet)
    for window_s in (0.5, 2.0, 20.0):
        counts = np.concatenate(
            [
                np.bincount(
                    drawn("onoff", seed, onoff=bursts).due_ns // round(window_s * S), minlength=round(400 / window_s)
                )
                for seed in SEEDS
            ]
        )
        wanted = count_dispersion(load("onoff", onoff=bursts), window_s)
        assert wanted > 1.2
        assert counts.var() / counts.mean() == pytest.approx(wanted, rel=0.12)
    assert counts.mean() / 20 == pytest.approx(20, rel=0.03)


def test_bursts_last_for_exponential_times_and_begin_in_the_long_runs_state() -> None:
    times: dict[bool, list[float]] = {True: [], False: []}
    began = []
    for seed in range(200):
        knots = drawn("onoff", seed, duration_ns=100 * S).knots
        pieces = [((end - start) / S, rate > 20) for (start, rate), (end, _) in pairwise(knots) if end > start]
        began.append(pieces[0][1])
        for length, on in pieces[:-1]:
            times[on].append(length)
    assert np.mean(began) == pytest.approx(0.25, abs=4 * (0.25 * 0.75 / 200) ** 0.5)
    # Those that the run's end cuts off are left out, and long ones are cut off more often: compare the short ones.
    for on, mean in ((True, 2.0), (False, 6.0)):
        short = np.array([length for length in times[on] if length < mean])
        cut = 1 - np.exp(-1)
        assert stats.kstest(short, lambda x: (1 - np.exp(-x / mean)) / cut).pvalue > 1e-4  # noqa: B023


def test_counts_in_neighboring_windows_are_alike_in_bursts_and_unrelated_without() -> None:
    def correlation(shape: str, **changes: Any) -> float:
        counts = np.bincount(drawn(shape, duration_ns=4000 * S, **changes).due_ns // S, minlength=4000)
        return float(np.corrcoef(counts[:-1], counts[1:])[0, 1])

    assert correlation("onoff") > 0.4
    assert abs(correlation("steps", steps=(step(20, "1s"),))) < 4 / 4000**0.5


@pytest.mark.parametrize("shape", SHAPES)
def test_a_longer_run_begins_with_the_same_arrivals(shape: str) -> None:
    fixed = {"ramp": ramp(2, 40, "100s")} if shape == "ramp" else {}
    short, long = (drawn(shape, duration_ns=d * S, **fixed).due_ns for d in (100, 1000))
    np.testing.assert_array_equal(short, long[: len(short)])


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "ramp down to nothing"])
@pytest.mark.parametrize("requests", [1, 700])
def test_so_many_requests_are_measured_after_the_warmup(shape: str, requests: int) -> None:
    fixed = {"ramp": ramp(2, 40, "10s")} if shape == "ramp" else {}
    made = drawn(shape, warmup_ns=7 * S, duration_ns=None, requests=requests, **fixed)
    assert int(np.count_nonzero(made.due_ns >= 7 * S)) == requests
    longer = drawn(shape, warmup_ns=7 * S, **fixed).due_ns
    np.testing.assert_array_equal(made.due_ns, longer[: len(made.due_ns)])


PIECES = st.lists(
    st.tuples(st.floats(0.001, 100), st.floats(0, 1000), st.floats(0, 1000)), min_size=1, max_size=8
).filter(lambda pieces: any(first + last > 0.01 for _, first, last in pieces))


@settings(deadline=None)
@example(pieces=[(1.0, 2.225073858507e-311, 6.462161095427286e-25), (1.0, 0.0, 2.0)], shares=[2.225073858507e-311])
@given(PIECES, st.lists(st.floats(0, 1), min_size=1, max_size=50))
def test_inverting_an_expected_count_gives_the_time_at_which_it_is_reached(
    pieces: list[tuple[float, float, float]], shares: list[float]
) -> None:
    lengths, first, last = (np.array(column) for column in zip(*pieces, strict=True))
    curve = Curve(np.concatenate([[0.0], np.cumsum(lengths)]), first, last)
    wanted = np.sort(np.array(shares)) * curve.expected()[-1]
    at_s = curve.invert(wanted)
    assert (np.diff(at_s) >= -1e-9).all()
    assert at_s.min() >= 0
    assert at_s.max() <= lengths.sum() * (1 + 1e-9)
    knots = curve.knots(float(lengths.sum()))
    reached = expected_at(tuple(knots), np.rint(at_s * S).astype(np.int64))
    np.testing.assert_allclose(reached, wanted, atol=1e-4, rtol=1e-6)


def test_a_trace_is_replayed_at_its_own_times_at_the_speed_asked_for(tmp_path: Path) -> None:
    at_ns = np.sort(np.random.default_rng(1).integers(0, 300 * S, 2000))
    at_ns[0] = 0  # a trace begins with its first request
    lines = ({"timestamp": at / 1e6, "input_length": 1, "output_length": 1} for at in at_ns.tolist())
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    trace = Trace(file=str(path), speed=3.0)
    replay = BASE.model_copy(update={"arrivals": "trace", "rate": None, "trace": trace, "duration_ns": 60 * S})
    made = draw_arrivals(replay, np.random.default_rng(1), 10 * S)
    assert made.due_ns.tolist() == [round(at / 3) for at in at_ns.tolist() if round(at / 3) < 70 * S]
    assert (made.knots, made.dispersion) == ((), 0.0)
    counted = replay.model_copy(update={"duration_ns": None, "requests": 40})
    late = draw_arrivals(counted, np.random.default_rng(1), 10 * S).due_ns
    assert int(np.count_nonzero(late >= 10 * S)) == 40
