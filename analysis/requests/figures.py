"""Distributions as results and HDR logs hold them: percentiles with intervals, of anything in nanoseconds; rates.

A percentile's rank is HdrHistogram's. Its value is the sample's own, the same that SLOs are judged by: ``hdr/*.hlog``,
which keep three significant digits, say up to 0.1 % more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import pandas as pd
from hdrh.histogram import HdrHistogram

from gapmeter.analysis.arrays import AnyArray, Bools, Floats, Ints
from gapmeter.analysis.requests.metrics import (
    MetricSeries,
    failures_of,
    flattened,
    issued,
    numbers_of,
    stamps_ns,
    succeeded,
)
from gapmeter.analysis.results.distribution import (
    AtMost,
    CensoredDistribution,
    Distribution,
    Needs,
    Percentile,
    percentile_key,
)
from gapmeter.analysis.stages import GROUPS, STAGE_NAMES, STAGES, column
from gapmeter.analysis.stats import hdr
from gapmeter.analysis.stats.series import Series
from gapmeter.scenarios.slo import LATENCIES

LEDGER_OF = {"ttft": "first_token", "e2e": "last_token"}  # the event to which a metric's ledgers reach
BLOCKS = 48  # of a run's window


def distribution(values: Series, percentiles: Iterable[float], requests: int, seconds: float) -> Distribution:
    """Percentiles in ms with their intervals, maximum, mean, count and n_eff of one sample in ns.

    An unsupported percentile and its interval are None, and ``needs`` says how many more of the ``requests`` that
    brought the values in so many ``seconds`` (0: not known) would support it. A percentile that answers which never
    came reach is None too, and ``infinite``.
    """
    finite = values.ordered[np.isfinite(values.ordered)]
    return Distribution(
        percentiles={p: _percentile(values, p, requests, seconds) for p in percentiles},
        max_ms=finite_ms(float(finite[-1])) if len(finite) else None,
        mean_ms=float(finite.mean()) / 1e6 if len(finite) else None,
        count=values.count,
        n_eff=values.worth.tail,
    )


def _percentile(values: Series, percentile: float, requests: int, seconds: float) -> Percentile:
    found = values.percentile(percentile)
    if found.supported:
        value, low, high = found.known
        ends = None if math.isinf(low) else (finite_ms(low), finite_ms(high))
        return Percentile(value_ms=finite_ms(value), ci_ms=ends, infinite=math.isinf(value))
    more = values.more_values(percentile)
    more = math.ceil(more * requests / values.count) if values.count else more
    minutes = more * seconds / requests / 60 if seconds and requests else None
    needs = Needs(requests=more, minutes=minutes)
    return Percentile(needs=needs, at_most=at_most_ms(values, percentile))


def at_most_ms(values: Series, percentile: float) -> AtMost | None:
    """What bounds a percentile of values in ns from above."""
    bound = values.at_most(percentile)
    return None if bound is None else AtMost(ms=bound.value / 1e6, confidence=bound.confidence)


def finite_ms(ns: float | None) -> float | None:
    """Nanoseconds as milliseconds, None where there is nothing finite to tell."""
    return None if ns is None or not math.isfinite(ns) else ns / 1e6


def bound_ns(measured: pd.DataFrame) -> float | None:
    """What every failed request took at least: the time that it was, or would have been, given. None without one."""
    bounds = stamps_ns(measured[failures_of(measured)], "censored_ns")
    return float(bounds.min()) if len(bounds) else None


def censored(found: Distribution, bound: float | None) -> CensoredDistribution:
    """A sample in which failures are infinite, said as what is known of them: longer than ``bound`` ns.

    A percentile that falls among them stays None, and ``over_ms`` names it with the bound: the percentile of any values
    that the failures may have had is at least that. ``bound`` None: nothing failed, nothing is censored.
    """
    at_ms = finite_ms(bound)
    among = [percentile_key(percentile) for percentile, each in found.percentiles.items() if each.infinite]
    over = {} if at_ms is None else dict.fromkeys(among, at_ms)
    own = {name: getattr(found, name) for name in Distribution.model_fields}
    return CensoredDistribution(**own, censored_at_ms=at_ms, over_ms=over)


def stage_series(ledgers: pd.DataFrame) -> dict[str, Series]:
    """Every stage's values, ns, over the ledgers of one event; empty where it is unmeasured. No stage without any."""
    out = {}
    for stage in STAGES if len(ledgers) else ():
        values = ledgers.get(column(stage.name), pd.Series(dtype=np.float64)).to_numpy(np.float64, na_value=np.nan)
        out[stage.name] = Series(values[~np.isnan(values)])
    return out


def group_values_ns(ledgers: pd.DataFrame) -> dict[str, tuple[Floats, list[str]]]:
    """Every group: the sum of its measured stages a request, and the names of those that are unmeasured.

    A group none of whose stages is measured has no values.
    """
    out = {}
    for group in GROUPS:
        members = [stage.name for stage in STAGES if stage.group == group]
        there = [m for m in members if column(m) in ledgers and ledgers[column(m)].notna().any()]
        parts = ledgers[[column(m) for m in there]].to_numpy(np.float64, na_value=0.0)
        sums = np.nan_to_num(parts).sum(axis=1) if there else np.zeros(0)
        out[group] = (sums, [m for m in members if m not in there])
    return out


def ledgers_of(ledger: pd.DataFrame | None, requests: pd.DataFrame, event: str) -> pd.DataFrame:
    """The ledgers to one event of these requests, in the requests' order; no rows without a ledger."""
    if ledger is None or not len(ledger):
        return pd.DataFrame({"request_id": [], "total_ns": []})
    rows = ledger[(ledger["event"] == event).to_numpy(bool)]
    at = pd.Index(rows["request_id"]).get_indexer(pd.Index(requests["request_id"]))
    return rows.iloc[at[at >= 0]].reset_index(drop=True)


def ledgers_by_metric(
    ledger: pd.DataFrame | None, gaps: pd.DataFrame | None, requests: pd.DataFrame
) -> dict[str, pd.DataFrame]:
    """TTFT's and E2E's ledgers of these requests, and ITL's, which are those of token gaps, where there are any."""
    ledgers = {metric: ledgers_of(ledger, requests, event) for metric, event in LEDGER_OF.items()}
    if gaps is not None and len(gaps):
        times = [name for stage in STAGE_NAMES if (name := column(stage)) in gaps]
        known = [name for name in times if gaps[name].notna().any()]
        whose = gaps["request_id"].astype("category").cat
        mine = _rows((pd.Index(requests["request_id"]).get_indexer(whose.categories) >= 0)[whose.codes])
        names = [*(name for name in ("end_ns",) if name in gaps), "total_ns", *known]
        ledgers["itl"] = pd.DataFrame({name: _taken(gaps[name].to_numpy(), mine) for name in names}, copy=False)
    return ledgers


def _rows(marked: Bools) -> Ints | slice:
    """Which are marked; as a slice, which takes no memory, where they lie side by side."""
    first, last = (int(np.argmax(end)) for end in (marked, marked[::-1]))
    within = slice(first, len(marked) - last)
    return within if marked[within].all() else np.flatnonzero(marked)


def _taken(values: AnyArray, rows: Ints | slice) -> AnyArray:
    """Some rows of a column; one value that is repeated stays that, and takes no memory."""
    repeated = len(values) > 0 and values.strides == (0,)
    return np.broadcast_to(values[:1], rows.shape) if repeated and not isinstance(rows, slice) else values[rows]


def write_histograms(
    folder: Path, series: MetricSeries, ledgers: Mapping[str, pd.DataFrame], start_s: float, length_s: float, about: str
) -> None:
    """One V2 log for each metric, stage and group under ``folder``, of the measured requests that succeeded.

    Names: ``ttft``, ``ttft-from-sent``, ``stage-queue``, ``stage-queue-to-first-token``, ``group-queueing``; the tag in
    the file is the same. ``about`` says in each file where its values are from, and how many it could not hold.
    """
    samples: dict[str, Floats] = {}
    for metric in LATENCIES:
        samples[metric], samples[f"{metric}-from-sent"] = series(metric).ordered, series(metric, "sent").ordered
    for metric, suffix in (("e2e", ""), ("ttft", "-to-first-token")):
        stages = stage_series(ledgers[metric])
        samples |= {f"stage-{name}{suffix}": own.values for name, own in stages.items() if own.count}
    samples |= {f"group-{name}": sums for name, (sums, _) in group_values_ns(ledgers["e2e"]).items() if len(sums)}
    folder.mkdir(parents=True, exist_ok=True)
    made = dict[int, tuple[HdrHistogram, int]]()  # gaps and TPOT are the same from due and from sent
    for name, values in samples.items():
        histogram, lost = made.get(id(values)) or made.setdefault(id(values), hdr.histogram_of(values))
        beyond = f"; {lost:,} values beyond one hour are not counted" if lost else ""
        hdr.write_hlog(folder / f"{name}.hlog", histogram, start_s, length_s, f"{about}{beyond}")


def block_rates(requests: pd.DataFrame) -> Floats | None:
    """Output tokens a second in 48 equal blocks of a run, from the first due time that counts to the last.

    ``requests``: all of the run. Tokens of warm-up requests that arrive within that time count, those that arrive after
    it do not: how a load begins and ends is not what the server settled at. A request's tokens are spread evenly over
    the arrivals that were stamped. None where an answer's tokens are not known.
    """
    counted = requests[requests["measured"].to_numpy(bool) & issued(requests)]
    due = stamps_ns(counted, "due_ns")
    if len(due) < 2 or due.max() <= due.min():
        return None
    good = requests[succeeded(requests)]
    (at_ns, counts), tokens = flattened(good, "token_ns"), numbers_of(good, "output_tokens")
    if not counts.any() or np.isnan(tokens).any():
        return None
    edges = np.linspace(due.min(), due.max(), BLOCKS + 1)
    found, _ = np.histogram(at_ns, bins=edges, weights=np.repeat(tokens / np.maximum(counts, 1), counts))
    return np.asarray(found / ((edges[1] - edges[0]) / 1e9), dtype=np.float64)
