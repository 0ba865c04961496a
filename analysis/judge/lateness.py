"""How much of a figure may be the load tester's own lateness, for every metric at any percentile.

Sending late is part of TTFT and E2E, which count from when a request was due. Reading late touches what the stamps of
a read can tell. Without the kernel's stamps that is every arrival, by as much as the event loop was late. With them
the last packet of a read has its own stamp, whenever it was read; a piece that lies before it in the same read takes
that stamp over. So only values that end with a read of several pieces may be too long; E2E where that brought the usage
too, by what lay between the last token and that: mostly too little to refuse a figure for it.

A figure is refused where at its percentile the load tester was late by more than a tenth of it, and by a time worth
speaking of. A percentile of lateness bounds the same percentile of a metric only if the late ones are its slow ones;
so some figures are refused that lateness did not touch, and none is kept that it moved by much more than a tenth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pandas as pd

from gapmeter.analysis.arrays import Floats
from gapmeter.analysis.requests.metrics import (
    MetricSeries,
    elapsed_ns,
    generator_lag_ns,
    in_blocks,
    reads_of,
    receive_waits_ns,
    sent_tokens,
    succeeded,
)
from gapmeter.analysis.results.distribution import AtMost, Distribution, Percentile
from gapmeter.analysis.results.run import RunResult
from gapmeter.analysis.stats.estimate import CONFIDENCE
from gapmeter.analysis.stats.hdr import at_rank
from gapmeter.records.histograms import nearest_rank
from gapmeter.scenarios.slo import BETWEEN_TOKENS

LateRule = Literal["lag", "loop_lag"]
SHARES = (0.02, 0.10)  # of a figure: worth a warning, refused
FLOORS_NS: dict[LateRule, tuple[float, float]] = {"lag": (1e6, 2e6), "loop_lag": (0.5e6, 1e6)}  # less harms nobody
STAMPED_SHARE = 0.99  # of pieces with the kernel's stamp, from which arrivals are the kernel's
_SLOW = 90.0  # from this percentile on, tokens read at once make a gap longer, never shorter
_GRID = np.linspace(0.002, 0.998, 250)


@dataclass(frozen=True, slots=True)
class Late:
    """A figure and what of it may be lateness, ns: ``late_ns`` of ``value_ns``; ``limits_ns``: a warning, refused.

    ``together``: ``late_ns`` is what requests sent late and requests read late come to when both are counted.
    """

    rule: LateRule
    metric: str
    percentile: float
    value_ns: float
    late_ns: float
    limits_ns: tuple[float, float]
    together: bool = False

    @property
    def strained(self) -> bool:
        return self.late_ns > self.limits_ns[0]

    @property
    def refused(self) -> bool:
        return self.late_ns > self.limits_ns[1]


@dataclass(frozen=True, slots=True)
class Lateness:
    """``series``: the metrics of the run. All values ascend. ``loop_ns``: samples of the loop's lag, or None.

    ``merged_ns``: with the kernel's stamps, what of a metric's values a read of several pieces may have added, 0 for
    those that end with another; None without such stamps. ``spread_ns``: what late reading may add to a TPOT;
    ``per_token``: 1 / (output tokens - 1) of the median answer.
    """

    series: MetricSeries
    sent_ns: Floats
    loop_ns: Floats | None
    merged_ns: dict[str, Floats] | None
    spread_ns: Floats
    per_token: float

    def of(self, metric: str, percentile: float) -> list[Late]:
        """Its lateness by each rule that concerns the metric; nothing for a metric that never occurred."""
        value = _at(self.series(metric).ordered, percentile)
        if value is None:
            return []
        by: dict[LateRule, float] = {}
        if metric not in BETWEEN_TOKENS:
            by["lag"] = _at(self.sent_ns, percentile) or 0.0
        by["loop_lag"] = self._read(metric, percentile)
        together = self._sent_or_read(metric, percentile) if "lag" in by else 0.0
        found = [Late(rule, metric, percentile, value, late, self._limits(rule, metric, value))
                 for rule, late in by.items()]  # fmt: skip
        if together > max(found[0].limits_ns[1], *by.values()):  # a warning is of one of them alone
            found[0] = replace(found[0], late_ns=together, together=True)
        return found

    def refused_ns(self, metric: str, percentile: float) -> float | None:
        """What of a refused figure may be lateness; None where it stands."""
        late = self.of(metric, percentile)
        return max(each.late_ns for each in late) if any(each.refused for each in late) else None

    def may_be_ns(self, metric: str, percentile: float) -> float:
        """What of a figure may be lateness that is worth speaking of, 0 where none is."""
        return max((late.late_ns for late in self.of(metric, percentile) if late.strained), default=0)

    def _read(self, metric: str, percentile: float) -> float:
        if self.loop_ns is None:
            return 0.0
        loop = _at(self.loop_ns, percentile) or 0.0
        if self.merged_ns is not None:
            loop = min(loop, _at(self.merged_ns[metric], percentile) or 0.0)
        return (_at(self.spread_ns, percentile) or 0.0) if metric == "tpot" and loop else loop

    def _sent_or_read(self, metric: str, percentile: float) -> float:
        """How late the last request within the percentile may be, counting those sent late and those read late.

        That no request was both is the worst case. 0 where it comes to nothing worth a warning.
        """
        if self.loop_ns is None or not (n := len(self.sent_ns)):
            return 0.0
        least = FLOORS_NS["loop_lag"][0]
        worth = [values[np.searchsorted(values, least) :] for values in (self.sent_ns, self.loop_ns)]
        late = np.sort(np.concatenate([[least], *worth]))
        read = _beyond(self.loop_ns, late)
        if self.merged_ns is not None:
            read = np.minimum(read, _beyond(self.merged_ns[metric], late))
        requests = np.floor(n * (_beyond(self.sent_ns, late) + read) + 1e-6)
        few = np.flatnonzero(requests <= n - nearest_rank(percentile, n))
        return float(late[few[0]]) if len(few) and few[0] else 0.0

    def _limits(self, rule: LateRule, metric: str, value: float) -> tuple[float, float]:
        part = self.per_token if metric == "tpot" else 1.0
        warn, refused = (max(part * floor, share * value) for floor, share in zip(FLOORS_NS[rule], SHARES, strict=True))
        return warn, refused


@dataclass(frozen=True, slots=True)
class ReportedLateness:
    """The lateness that results of runs report, the most of any: for figures of several runs, or of a part of one.

    A percentile that they do not report counts as refused where the nearest one that they do, on either side, is.
    """

    runs: Sequence[RunResult] = ()

    def refused_ns(self, metric: str, percentile: float | None) -> float | None:
        """What of a refused figure may be lateness; None where it stands. ``percentile``: None for the mean."""
        return max((1e6 * _reported_ms(run.metrics[metric], percentile) for run in self.runs), default=0.0) or None

    def may_be_ns(self, metric: str, percentile: float) -> float:
        """What of a figure may be lateness worth speaking of, as far as it is refused or an SLO names it; else 0."""
        named = [a for run in self.runs for a in run.slo if (a.metric, a.percentile) == (metric, percentile)]
        known = [1e6 * (answer.may_be_late or 0.0) for answer in named]
        return max([*known, self.refused_ns(metric, percentile) or 0.0])


AnyLateness = Lateness | ReportedLateness


def _reported_ms(found: Distribution, percentile: float | None) -> float:
    """What a percentile, or for None the mean, is refused for; 0 where it stands."""
    if percentile is None:
        return found.mean_late_ms or 0.0
    below = max((known for known in found.percentiles if known <= percentile), default=None)
    above = min((known for known in found.percentiles if known >= percentile), default=None)
    return max((found.at(near).late_ms or 0.0 for near in (below, above) if near is not None), default=0.0)


def shortens(metric: str, percentile: float) -> bool:
    """Whether lateness may also have made a figure smaller: it ends, or begins, with what was read late."""
    return metric == "tpot" or (metric == "itl" and percentile < _SLOW)


def moves_ns(lateness: AnyLateness, metric: str, percentile: float, *, holds: bool | None) -> list[float]:
    """How far a limit has to move to stand for the same without lateness; nothing where it makes no difference.

    ``holds``: how it was answered, None where it is undecided. Lateness adds to a slow value: a limit that is met even
    so is met, but for what it may also have shortened; one that is missed has to be missed by more.
    """
    refused_ns = lateness.refused_ns(metric, percentile) or 0.0
    back = -refused_ns if shortens(metric, percentile) else 0.0
    moves = {True: [back], None: [refused_ns, back], False: [lateness.may_be_ns(metric, percentile)]}[holds]
    return [move for move in moves if move]


def without_refused(found: Distribution, metric: str, lateness: AnyLateness, origin: str = "due") -> Distribution:
    """Without the percentiles that are refused, and the mean if they brought too much of it.

    Where lateness can only have added to a percentile, an upper bound stays. What answers that never came
    reach is no matter of lateness.
    """
    percentiles = dict(found.percentiles)
    for p, each in found.percentiles.items():
        if not each.infinite and (ns := lateness.refused_ns(metric, p)) is not None:
            only_adds = origin == "due" and not shortens(metric, p)
            percentiles[p] = Percentile(late_ms=ns / 1e6, at_most=upper_bound(each) if only_adds else None)
    kept = found.model_copy(update={"percentiles": percentiles})
    return kept if kept.mean_late_ms is None else kept.model_copy(update={"mean_ms": None})


def upper_bound(one: Percentile) -> AtMost | None:
    """Its interval's upper end, or what bounds it where it has no interval."""
    high = one.ci_ms[1] if one.ci_ms else None
    return one.at_most if high is None else AtMost(ms=high, confidence=(1 + CONFIDENCE) / 2)


def lateness_of(requests: pd.DataFrame, loop_ns: Floats | None, series: MetricSeries | None = None) -> Lateness:
    """``requests`` as from ``measured_requests``; ``series``: theirs."""
    good = succeeded(requests)
    tokens = sent_tokens(requests)[good]
    part, spread = 1 / (tokens[tokens >= 2] - 1), np.zeros(0)
    waits, pieces = receive_waits_ns(requests)
    merged = None
    if len(waits) and len(waits) >= STAMPED_SHARE * pieces:
        firsts, gaps = map(np.concatenate, zip(*map(_merged, in_blocks(requests[good])), strict=True))
        merged = {"ttft": np.sort(firsts), "itl": np.sort(gaps), "tpot": np.sort(firsts), "e2e": np.zeros(1)}
    sent = generator_lag_ns(requests)
    loop = None if loop_ns is None else np.sort(loop_ns)
    if loop is not None and len(part):  # both ends of a TPOT are arrivals, and any answer may be the one that was late
        spread = np.sort(np.outer(np.quantile(loop, _GRID), np.quantile(part, _GRID)).ravel())
    return Lateness(
        series or MetricSeries(requests), np.sort(sent[~np.isnan(sent)]), loop, merged, spread,
        per_token=float(np.median(part)) if len(part) else 1.0,
    )  # fmt: skip


def _at(ordered: Floats, percentile: float) -> float | None:
    return at_rank(ordered, percentile) if len(ordered) else None


def _beyond(ordered: Floats, limits: Floats) -> Floats:
    """The share of values above each limit."""
    return np.asarray(1 - np.searchsorted(ordered, limits, side="right") / max(len(ordered), 1))


def _merged(requests: pd.DataFrame) -> tuple[Floats, Floats]:
    """What a read of several pieces may have added to each first token and gap; 0 where a piece came alone."""
    whose, at_ns, chunks = reads_of(requests)
    begins, several = np.diff(whose, prepend=-1) != 0, chunks > 1
    first = np.nan_to_num(elapsed_ns(requests, "sent_ns", "first_token_ns"))
    first[~np.isin(np.arange(len(first)), whose[begins & several])] = 0.0
    return first, np.where(several, np.diff(at_ns, prepend=0), 0)[~begins].astype(np.float64)
