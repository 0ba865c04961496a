"""Arrivals have the rate, the gaps and the dispersion that they claim, also when several processes share them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from gapmeter.loadgen import PlanError
from gapmeter.loadgen.arrivals import draw_arrivals, warmup_span
from gapmeter.scenarios.model import Load
from gapmeter.scenarios.read import load_scenario

S = 1_000_000_000
BASE = Load(arrivals="poisson", rate=20.0, duration="1000s", warmup=0)

CLOSED = {"arrivals": "closed", "rate": None, "concurrency": 4}


def drawn(seed: int = 1, warmup_ns: int = 0, **changes: object) -> NDArray[np.int64]:
    load = BASE.model_copy(update=changes)
    return draw_arrivals(load, np.random.default_rng(seed), warmup_ns).due_ns


def gaps_s(due: NDArray[np.int64]) -> NDArray[np.float64]:
    """Gaps in seconds, the first from the start of the run."""
    return np.diff(due, prepend=0) / S


def dispersion(due: NDArray[np.int64], span_ns: int, window_ns: int = 2 * S) -> float:
    """Variance over mean of the counts per window: 1 for a Poisson process."""
    counts = np.bincount(due // window_ns, minlength=span_ns // window_ns)
    return float(counts.var(ddof=1) / counts.mean())


SEEDS = range(40)


def test_poisson_gaps_are_exponential() -> None:
    """Over 40 seeds the KS p-values are themselves uniform: nothing is scaled or forced to fit."""
    p_values = [stats.kstest(gaps_s(drawn(seed)), "expon", args=(0, 1 / 20)).pvalue for seed in SEEDS]
    assert stats.kstest(p_values, "uniform").pvalue > 0.001


def test_poisson_counts_vary_as_they_must() -> None:
    """A rate that is forced to fit would give every seed the same count."""
    counts = np.array([len(drawn(seed, duration_ns=100 * S)) for seed in range(200)])
    assert (
        stats.kstest(counts + np.random.default_rng(0).uniform(-0.5, 0.5, 200), "norm", args=(2000, 2000**0.5)).pvalue
        > 0.001
    )
    assert abs(counts.mean() - 2000) < 4 * (2000 / 200) ** 0.5


def test_poisson_arrivals_have_dispersion_1_and_no_memory() -> None:
    values = [dispersion(drawn(seed), 1000 * S) for seed in SEEDS]
    assert np.mean(values) == pytest.approx(1, abs=4 * (2 / 499 / 40) ** 0.5)
    lagged = [np.corrcoef(gaps[:-1], gaps[1:])[0, 1] for gaps in (gaps_s(drawn(seed)) for seed in SEEDS)]
    assert abs(np.mean(lagged)) < 4 / (20_000 * 40) ** 0.5


def test_the_last_arrival_lies_anywhere_before_the_end() -> None:
    """The time from the last arrival to the end is exponential too, as in a process that was merely cut off."""
    rest = [(100 * S - drawn(seed, duration_ns=100 * S)[-1]) / S for seed in range(200)]
    assert stats.kstest(rest, "expon", args=(0, 1 / 20)).pvalue > 0.001


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0, 8.0])
def test_gamma_gaps_have_the_rate_and_the_squared_cv_asked_for(burstiness: float) -> None:
    wanted = stats.gamma(1 / burstiness, 0, burstiness / 20)
    shortest = 1e-6  # due times are whole nanoseconds, and where bursts are dense many gaps are shorter than one
    for seed in range(5):
        gaps = gaps_s(drawn(seed, arrivals="gamma", burstiness=burstiness))
        cut = float(wanted.cdf(shortest))
        share = np.mean(gaps < shortest)
        assert share == pytest.approx(cut, abs=4 * (cut * (1 - cut) / len(gaps)) ** 0.5 + 1e-4)
        longer = gaps[gaps >= shortest]
        assert stats.kstest(longer, lambda x: (wanted.cdf(x) - cut) / (1 - cut)).pvalue > 0.001  # noqa: B023
    gaps = np.concatenate([gaps_s(drawn(seed, arrivals="gamma", burstiness=burstiness)) for seed in SEEDS])
    assert gaps.var() / gaps.mean() ** 2 == pytest.approx(burstiness, rel=0.05)
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.02)


def test_gamma_arrivals_come_in_bursts_where_asked() -> None:
    """For windows of many gaps the dispersion of a renewal process tends to the squared cv of its gaps."""
    values = [dispersion(drawn(seed, arrivals="gamma", burstiness=4.0), 1000 * S, 10 * S) for seed in SEEDS]
    assert np.mean(values) == pytest.approx(4, rel=0.15)


@settings(deadline=None)
@given(rate=st.floats(0.1, 5000), seconds=st.floats(0.01, 50))
def test_constant_arrivals_are_exact(rate: float, seconds: float) -> None:
    due = drawn(arrivals="constant", rate=rate, duration_ns=round(seconds * S))
    exact = np.arange(len(due)) * (S / rate)
    assert np.abs(due - exact).max(initial=0) <= 0.5
    assert len(due) * S / rate >= round(seconds * S) - 1
    assert due[-1] < round(seconds * S)


@settings(deadline=None, max_examples=60)
@given(
    arrivals=st.sampled_from(["constant", "poisson", "gamma"]),
    rate=st.floats(0.5, 500),
    span=st.one_of(
        st.builds(lambda n: {"requests": n, "duration_ns": None}, st.integers(1, 3000)),
        st.builds(lambda s: {"duration_ns": round(s * S)}, st.floats(0.1, 20)),
    ),
    warmup_ns=st.integers(0, 5 * S),
    seed=st.integers(0, 2**32),
)
def test_the_warmup_comes_on_top_of_what_is_measured(
    arrivals: str, rate: float, span: dict[str, int | None], warmup_ns: int, seed: int
) -> None:
    due = drawn(seed, warmup_ns, arrivals=arrivals, rate=rate, burstiness=4.0, **span)
    assert due.dtype == np.int64
    assert (np.diff(due) >= 0).all()
    measured = int(np.count_nonzero(due >= warmup_ns))
    if span.get("requests"):
        assert measured == span["requests"]
    else:
        assert due.max(initial=0) < warmup_ns + (span["duration_ns"] or 0)


def test_a_longer_run_begins_with_the_same_arrivals() -> None:
    short, long = drawn(duration_ns=10 * S), drawn(duration_ns=900 * S)
    np.testing.assert_array_equal(short, long[: len(short)])


@pytest.mark.parametrize(
    ("changes", "span"),
    [
        ({"warmup_ns": 3 * S}, (3 * S, 0)),
        ({"warmup_ns": 0}, (0, 0)),
        ({"warmup_ns": None, "duration_ns": 75 * S}, (7_500_000_000, 0)),
        ({"warmup_ns": None, "duration_ns": 1 * S}, (2 * S, 0)),
        ({"warmup_ns": None, "duration_ns": 3600 * S}, (30 * S, 0)),
        ({"warmup_ns": None, "duration_ns": None, "requests": 1000}, (5 * S, 0)),
        ({"warmup_ns": None, "duration_ns": None, "requests": 9, **CLOSED}, (0, 8)),
        ({"warmup_ns": None, "duration_ns": 75 * S, **CLOSED}, (7_500_000_000, 0)),
    ],
)  # fmt: skip
def test_auto_warmup_is_a_tenth_within_bounds(changes: dict[str, object], span: tuple[int, int]) -> None:
    assert warmup_span(BASE.model_copy(update=changes)) == span


@pytest.mark.parametrize("start", ["0", "55m"])
def test_auto_warmup_of_a_traces_requests_is_by_its_rate_wherever_it_starts(start: str, tmp_path: Path) -> None:
    rows = [{"timestamp": 1000 * second, "input_length": 50, "output_length": 20} for second in range(3600)]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "s.yaml").write_text(
        f"load: {{arrivals: trace, trace: {{file: t.jsonl, start: {start}}}, requests: 200}}\n"
    )
    assert warmup_span(load_scenario(tmp_path / "s.yaml", (), {}).load)[0] == pytest.approx(20 * S, rel=0.01)


def test_a_curve_that_brings_more_requests_than_can_be_drawn_is_refused_in_words() -> None:
    day = {"day": "24h", "hours": [1, *[0] * 23]}
    load = Load(arrivals="diurnal", rate=2000, duration="900s", warmup=0, diurnal=day)
    with pytest.raises(PlanError, match=r"so long a load\.diurnal brings more than 20,000,000 requests"):
        draw_arrivals(load, np.random.default_rng(1), 0)
