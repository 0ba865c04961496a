"""The tail explorer: two groups of requests, and which stages make one wait longer than the other.

A group is any set of measured, answered requests. The difference of the groups' mean waits is the sum of the
differences of their stages, so the stages can be ranked by what they explain. Intervals draw whole stretches of the
run again (stats.bootstrap), the same ones for both groups, so that what both shared is no difference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from gapmeter.analysis.arrays import Bools, Floats, Ranked
from gapmeter.analysis.ledger.tail import stage_parts, stages_in
from gapmeter.analysis.requests.figures import LEDGER_OF
from gapmeter.analysis.requests.metrics import good_requests
from gapmeter.analysis.results.latency import GroupDifference, GroupPair, GroupStage
from gapmeter.analysis.stages import owner_of
from gapmeter.analysis.stats.bootstrap import drawn_means, stretches, with_draws

FEWEST = 5


@dataclass(frozen=True, slots=True)
class Pair:
    """Two groups by name, and which requests are in them: bool, a row each; both may leave rows out."""

    key: str
    a_name: str
    b_name: str
    a: Bools
    b: Bools


def describe_pairs(
    requests: pd.DataFrame, ledgers: Mapping[str, pd.DataFrame], limits_ns: Mapping[str, float]
) -> dict[str, tuple[GroupPair, ...]]:
    """For TTFT and E2E the pairs with their differences. ``ledgers`` by metric, in the order of due times."""
    described = {}
    for metric in LEDGER_OF:
        rows = ledgers.get(metric)
        if rows is None or len(rows) < 4 * FEWEST:
            continue
        own = requests.iloc[pd.Index(requests["request_id"]).get_indexer(pd.Index(rows["request_id"]))]
        own_pairs = pairs(own, rows["total_ns"].to_numpy(np.float64), limits_ns)
        stages = _Stages.of(rows)
        described[metric] = tuple(
            GroupPair(**dict(stages.difference(p.a, p.b)), key=p.key, a=p.a_name, b=p.b_name) for p in own_pairs
        )
    return described


def pairs(requests: pd.DataFrame, total_ns: Floats, limits_ns: Mapping[str, float]) -> list[Pair]:
    """The pairs that are worked out for every run, those of them that it has.

    ``requests``: those with a ledger, in the order in which they were due; ``total_ns``: what each waited for the
    event; ``limits_ns``: a limit a metric, for those that broke one.
    """
    n = len(requests)
    possible = [_slowest(total_ns, 1), _slowest(total_ns, 10)]
    possible += _quarters(requests, "prompt_tokens", "prompts") + _quarters(requests, "output_tokens", "answers")
    early = np.arange(n) < n // 2
    possible.append(Pair("halves", "second half of the run", "first half", ~early, early))
    cached = requests["cached_tokens"].to_numpy(np.float64, na_value=0.0) > 0
    possible.append(Pair("cached", "prompts partly in the prefix cache", "prompts not in it", cached, ~cached))
    if limits_ns:
        good = good_requests(requests, limits_ns)
        possible.append(Pair("slo", "broke a limit that an SLO names", "kept them all", ~good, good))
    return [pair for pair in possible if min(pair.a.sum(), pair.b.sum()) >= FEWEST]


def _slowest(total_ns: Floats, percent: int) -> Pair:
    asked = math.ceil(percent * len(total_ns) / 100)
    slow = Ranked(-total_ns).below(max(FEWEST, asked))
    name = f"slowest {percent} %" if slow.sum() == asked else f"slowest {slow.sum()}"
    return Pair(f"slowest-{percent}", name, "the rest", slow, ~slow)


def _quarters(requests: pd.DataFrame, column: str, what: str) -> list[Pair]:
    values = requests[column].to_numpy(np.float64, na_value=np.nan)
    if not np.isfinite(values).all() or len(values) < 4 * FEWEST or np.ptp(values) == 0:
        return []
    low, high = np.quantile(values, [0.25, 0.75])
    long, short = values >= high, values <= low
    names = f"long {what} ({high:,.0f} tokens and more)", f"short {what} (up to {low:,.0f})"
    return [] if (long & short).any() else [Pair(what, *names, long, short)]


def difference(rows: pd.DataFrame, a: Bools, b: Bools) -> GroupDifference:
    """Group ``a`` less group ``b``, in ms: means, the stages ranked by how much of the difference they explain.

    ``rows``: ledgers to one event of measured requests in the order in which they were due, with ``total_ns``. Ranked
    by size, whatever the sign; intervals are 95 %, without ends where the groups lie in too few stretches.
    """
    return _Stages.of(rows).difference(a, b)


@dataclass(frozen=True, slots=True)
class _Stages:
    """The ledgers of some requests: ``parts`` in ns, shape (requests, stages); ``stretch``: in which of the run."""

    names: Sequence[str]
    parts: Floats
    stretch: NDArray[np.int32]

    @classmethod
    def of(cls, rows: pd.DataFrame) -> _Stages:
        names = stages_in(rows)
        return cls(names, stage_parts(rows, names), stretches(rows["total_ns"].to_numpy(np.float64)))

    def difference(self, a: Bools, b: Bools) -> GroupDifference:
        names, parts, stretch = self.names, self.parts, self.stretch
        mean_a, mean_b = parts[a].mean(axis=0), parts[b].mean(axis=0)
        more = mean_a - mean_b
        whole = float(more.sum())
        drawn = (drawn_means(parts[a], stretch, a) - drawn_means(parts[b], stretch, b)) / 1e6
        ranked = [
            GroupStage(
                stage=names[i],
                owner=owner_of(names[i]),
                a_ms=float(mean_a[i]) / 1e6,
                b_ms=float(mean_b[i]) / 1e6,
                ms=float(more[i]) / 1e6,
                ci_ms=with_draws(float(more[i]), drawn[:, i]).ends,
                share=float(more[i]) / whole if whole else None,
            )
            for i in np.argsort(-np.abs(more), kind="stable")
        ]
        return GroupDifference(
            a_count=int(a.sum()),
            b_count=int(b.sum()),
            a_ms=float(mean_a.sum()) / 1e6,
            b_ms=float(mean_b.sum()) / 1e6,
            difference_ms=whole / 1e6,
            difference_ci_ms=with_draws(whole, drawn.sum(axis=1)).ends,
            stretches=int(stretch[-1]) + 1,
            ranked=tuple(ranked),
        )
