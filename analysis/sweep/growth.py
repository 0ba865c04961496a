"""What grows from one point to the next: the stage that accounts for it, and its owner.

For p95 and above the slow bands (``ledger.tail``) of both points are compared, else all their requests: means over
real requests, so the stages' growths add up to the bands' growth. A percentile's own growth stands beside it; where a
sample does not support it, that of the mean, whose interval knows that neighbors are alike (``stats.means``). The
interval of a stage's share draws stretches of consecutive requests (``stats.bootstrap``), not requests, for the same
reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from gapmeter.analysis.ledger.tail import FEWEST_SLOW, owner_of, slow_count
from gapmeter.analysis.numbers import duration, share
from gapmeter.analysis.stages import STAGES, UNEXPLAINED, column, owner_words
from gapmeter.analysis.stats.bootstrap import Bools, drawn_means, share_with_draws, stretches, with_draws
from gapmeter.analysis.stats.estimate import Estimate, Floats
from gapmeter.analysis.stats.means import Level
from gapmeter.analysis.sweep.compared import figure_words
from gapmeter.report.marks import words

_WHOLE = 1.005  # a share above this is told with what goes the other way
SLOW_LEVEL = 95.0  # from this percentile on the slow requests stand for it


def means_ms(ledgers: pd.DataFrame) -> dict[str, float]:
    """Mean time by stage, the residual last, in the order of the timeline; they add up to the mean total."""
    if not len(ledgers):
        return {}
    names = _names(ledgers)
    rows = ledgers[[column(name) for name in names]].to_numpy(np.float64, na_value=0.0)
    return dict(zip(names, (np.nan_to_num(rows).mean(axis=0) / 1e6).tolist(), strict=True))


def slow_band(ledgers: pd.DataFrame, percentile: float | None) -> pd.DataFrame:
    """The rows whose growth stands for that of a percentile (None: of the mean), in their own order."""
    return ledgers[_member(ledgers, percentile)]


def _member(ledgers: pd.DataFrame, percentile: float | None) -> Bools:
    member = np.ones(len(ledgers), dtype=np.bool_)
    if percentile is not None and percentile >= SLOW_LEVEL and len(ledgers) >= 4 * FEWEST_SLOW:
        order = np.argsort(ledgers["total_ns"].to_numpy(np.float64), kind="stable")
        member[order[: -slow_count(len(ledgers))]] = False
    return member


@dataclass(frozen=True, slots=True)
class Side:
    """One of two neighbors: its label, the figure that is compared, and its ledgers in time order."""

    label: str
    level: Level | None
    ledgers: pd.DataFrame


def describe_growth(one: Side, two: Side, metric: str, percentile: float | None, device: str) -> dict[str, Any]:
    """From one point to the next; ``percentile``: the figure that is compared, None for the mean.

    ``grows_ms`` with its 95 % interval; ``stages_ms`` the growth of every stage in the bands, ``share_ci`` a 95 %
    interval of the largest one's share, null where too few stretches of requests are in a band to tell.
    """
    known = two.level.minus(one.level) if one.level and two.level else None
    means = [means_ms(slow_band(side.ledgers, percentile)) for side in (one, two)]
    gain = {stage: ms - means[0].get(stage, 0.0) for stage, ms in means[1].items()} if means[0] else {}
    whole = sum(gain.values())
    told: dict[str, Any] = {
        "from": one.label, "to": two.label, "metric": metric, "percentile": percentile,
        "grows_ms": known and known.value, "grows_ci_ms": known and list(known.ends),
        "band_grows_ms": whole if gain else None, "stages_ms": gain,
        "stage": None, "owner": None, "share": None, "share_ci": None,
    }  # fmt: skip
    if gain and whole:
        stage = max(gain, key=lambda name: gain[name] / whole)
        share_of_stage = _share(gain[stage] / whole, one.ledgers, two.ledgers, percentile, stage)
        told |= {"stage": stage, "owner": owner_of(stage), "share": share_of_stage.value,
                 "share_ci": list(share_of_stage.ends) if share_of_stage.supported else None}  # fmt: skip
    return told | {"sentence": _sentence(told, device)}


def is_sure(told: Mapping[str, Any]) -> bool:
    """Whether a growth goes beyond its interval."""
    ends = told["grows_ci_ms"]
    return bool(ends and ends[0] * ends[1] > 0)


def _sentence(told: Mapping[str, Any], device: str) -> str:
    grows, name = told["grows_ms"], figure_words(told["metric"], told["percentile"])
    start = f"From {told['from']} to {told['to']} {name} "
    if grows is None:
        return f"{start}is not estimable at both"
    low, high = told["grows_ci_ms"]
    if not is_sure(told):
        return f"{start}differs by no more than its interval ({_signed(low)} to {_signed(high)})"
    start += f"{'grows' if grows > 0 else 'falls'} by {duration(abs(grows))} (95 % interval {_ends(low, high)})"
    ends = told["share_ci"]
    if told["stage"] is None or ends is None or grows * told["band_grows_ms"] <= 0:
        return start
    owner = owner_words(told["owner"], device)
    slowest = told["percentile"] is not None and told["percentile"] >= SLOW_LEVEL
    if told["share"] > _WHOLE:
        whose = f"{words(told['stage'])} ({owner})"
        return f"{start}; {_against(told, whose, slowest=slowest)}"
    which = f"the slowest ones wait {_way(grows)}" if slowest else f"they wait {_way(grows)} on average"
    between = f"{share(told['share'])} ({share(ends[0])} to {share(ends[1])})"
    return f"{start}; {between} of what {which} is {words(told['stage'])} ({owner})"


def _against(told: Mapping[str, Any], whose: str, *, slowest: bool) -> str:
    """A stage that changes by more than the whole does, since the others together go the other way."""
    own = told["stages_ms"][told["stage"]]
    others, (low, high) = told["band_grows_ms"] - own, told["share_ci"]
    who = "of the slowest ones " if slowest else ""
    part = f"{share(told['share'])} of the whole, {share(low)} to {share(high)}"
    one, rest = ("grows", "fall") if own > 0 else ("falls", "grow")
    beside = f"the other stages together {rest} by {duration(abs(others))}"
    return f"{who}{whose} {one} by {duration(abs(own))} ({part}), {beside}"


def _way(grows: float) -> str:
    return "longer" if grows > 0 else "less"


def _ends(low: float, high: float) -> str:
    near, far = sorted((abs(low), abs(high)))
    return f"{duration(near)} to {duration(far)}"


def _signed(ms: float) -> str:
    return f"{'−' if ms < 0 else '+'}{duration(abs(ms))}"


def _share(value: float, one: pd.DataFrame, two: pd.DataFrame, percentile: float | None, stage: str) -> Estimate:
    """A stage's share of the growth: stretches of both points drawn again, with fixed seeds."""
    drawn = [_drawn(rows, percentile, stage, seed) for seed, rows in enumerate((one, two))]
    if drawn[0] is None or drawn[1] is None:
        return with_draws(value, None)
    more = drawn[1] - drawn[0]
    return share_with_draws(value, more, float(np.nanmean(more[:, 1])))


def _drawn(rows: pd.DataFrame, percentile: float | None, stage: str, seed: int) -> Floats | None:
    """Means of the stage and of the whole over the band in every draw, shape (draws, 2)."""
    whole = rows["total_ns"].to_numpy(np.float64)
    of_stage = rows[column(stage)].to_numpy(np.float64, na_value=0.0) if column(stage) in rows else np.zeros(len(rows))
    values = np.nan_to_num(np.stack([of_stage, whole], axis=1))
    return drawn_means(values, _member(rows, percentile), stretches(whole), seed)


def _names(ledgers: pd.DataFrame) -> list[str]:
    """Stages with something in them, the residual last. What is unmeasured lies in the residual."""
    known = [s.name for s in STAGES if column(s.name) in ledgers and ledgers[column(s.name)].notna().any()]
    return [*known, UNEXPLAINED]
