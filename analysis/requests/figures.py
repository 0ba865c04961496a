"""Distributions as results and HDR logs hold them: percentiles with intervals, of anything in nanoseconds.

A percentile's value is the one that HdrHistogram gives for the same data (its rank, its rounding to 3 significant
figures), so summary and ``hdr/*.hlog`` agree to the last digit; ends of intervals are rounded the same way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from gapmeter.analysis.requests.metrics import METRICS, metric_series
from gapmeter.analysis.results.distribution import Distribution, Needs, Percentile
from gapmeter.analysis.stages import GROUPS, STAGES, column
from gapmeter.analysis.stats import hdr
from gapmeter.analysis.stats.estimate import Estimate, Floats
from gapmeter.analysis.stats.series import Series

EVENTS: tuple[str, ...] = ("first_token", "last_token")


def distribution(
    values: Series, percentiles: Iterable[float], per_request: float, seconds_per_request: float
) -> Distribution:
    """Percentiles in ms with their intervals, maximum, mean, count and n_eff of one sample in ns.

    An unsupported percentile and its interval are None, and ``needs`` says how many more requests, and minutes at this
    rate (None where that is 0: not known), would support it; ``per_request`` is how many values a request brings. A
    percentile that answers which never came reach is None too, and ``infinite``.
    """
    found = {p: _percentile(values, p, per_request, seconds_per_request) for p in percentiles}
    finite = values.ordered[np.isfinite(values.ordered)]
    return Distribution(
        percentiles=found,
        max_ms=_ms(float(finite[-1])) if len(finite) else None,
        mean_ms=float(finite.mean()) / 1e6 if len(finite) else None,
        count=values.count,
        n_eff=values.worth.tail,
    )


def _percentile(values: Series, percentile: float, per_request: float, seconds_per_request: float) -> Percentile:
    found = values.percentile(percentile)
    if found.supported:
        return Percentile(value_ms=_ms(found.value), ci_ms=_interval_ms(found), infinite=found.value == math.inf)
    more = values.more_values(percentile)
    more = math.ceil(more / per_request) if per_request else more
    minutes = more * seconds_per_request / 60 if seconds_per_request else None
    return Percentile(ci_ms=_interval_ms(found), needs=Needs(requests=more, minutes=minutes))


def plain_percentile(ns: float | None) -> float | None:
    """Nanoseconds as milliseconds, None where there is nothing finite to tell."""
    return None if ns is None or not math.isfinite(ns) else ns / 1e6


def stage_values_ns(ledgers: pd.DataFrame) -> dict[str, Floats]:
    """Every stage's values over the ledgers of one event, in their order; empty where it is unmeasured."""
    out = {}
    for stage in STAGES:
        if column(stage.name) in ledgers:
            values = ledgers[column(stage.name)].to_numpy(np.float64, na_value=np.nan)
            out[stage.name] = values[~np.isnan(values)]
        else:
            out[stage.name] = np.zeros(0)
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
    rows = ledger[(ledger["event"] == event).to_numpy(bool)].set_index("request_id")
    ids = requests["request_id"]
    return rows.loc[ids[ids.isin(rows.index)]].reset_index()


def write_histograms(
    folder: Path, requests: pd.DataFrame, ledger: pd.DataFrame | None, start_s: float, length_s: float,
    about: str = "",
) -> dict[str, int]:  # fmt: skip
    """One V2 log for each metric, stage and group under ``folder``; return the values refused for each, if any.

    ``requests`` as from ``measured_requests``; successes only. Names: ``ttft``, ``ttft-from-sent``, ``stage-queue``,
    ``stage-queue-to-first-token``, ``group-queueing``; the tag in the file is the same.
    ``about`` says in each file where its values are from.
    """
    folder.mkdir(parents=True, exist_ok=True)
    refused = {}
    for name, values in _distributions(requests, ledger).items():
        histogram, lost = hdr.histogram_of(values)
        hdr.write_hlog(folder / f"{name}.hlog", {name: histogram}, start_s, length_s, about)
        if lost:
            refused[name] = lost
    return refused


def _distributions(requests: pd.DataFrame, ledger: pd.DataFrame | None) -> Mapping[str, Floats]:
    out: dict[str, Floats] = {}
    for metric in METRICS:
        out[metric] = metric_series(requests, metric).ordered
        out[f"{metric}-from-sent"] = metric_series(requests, metric, "sent").ordered
    for event, suffix in (("last_token", ""), ("first_token", "-to-first-token")):
        values = stage_values_ns(ledgers_of(ledger, requests, event))
        out |= {f"stage-{name}{suffix}": found for name, found in values.items() if len(found)}
    groups = group_values_ns(ledgers_of(ledger, requests, "last_token"))
    return out | {f"group-{name}": sums for name, (sums, _) in groups.items() if len(sums)}


def _interval_ms(found: Estimate) -> tuple[float | None, float | None] | None:
    if found.low is None or found.high is None or math.isinf(found.low):
        return None
    return _ms(found.low), _ms(found.high)


def _ms(ns: float | None) -> float | None:
    return None if ns is None or math.isinf(ns) else hdr.rounded_up(ns) / 1e6
