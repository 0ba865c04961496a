"""What grows from one point to the next: the stage that accounts for it, and its owner.

For p95 and above the slow bands (analysis.tail) of both points are compared, else all their requests: means over real
requests, so the stages' growths add up to the bands' growth. A percentile's own growth stands beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from analysis.figures import percentile_key
from analysis.quantiles import Floats
from analysis.report.marks import words
from analysis.report.numbers import duration, share
from analysis.stages import STAGES, UNEXPLAINED, column
from analysis.tail import FEWEST_SLOW, owner_of, slow_count

_RESAMPLES = 1000


def means_ms(ledgers: pd.DataFrame) -> dict[str, float]:
    """Mean time by stage, the residual last, in the order of the timeline; they add up to the mean total."""
    if not len(ledgers):
        return {}
    names = _names(ledgers)
    rows = ledgers[[column(name) for name in names]].to_numpy(np.float64, na_value=0.0)
    return dict(zip(names, (np.nan_to_num(rows).mean(axis=0) / 1e6).tolist(), strict=True))


def slow_band(ledgers: pd.DataFrame, percentile: float) -> pd.DataFrame:
    """The rows whose growth stands for that of a percentile."""
    if percentile < 95 or len(ledgers) < 4 * FEWEST_SLOW:
        return ledgers
    order = np.argsort(ledgers["total_ns"].to_numpy(np.float64), kind="stable")
    return ledgers.iloc[order[-slow_count(len(ledgers)) :]]


def describe_growth(
    before: Mapping[str, Any], after: Mapping[str, Any], metric: str, percentile: float,
    ledgers: tuple[pd.DataFrame, pd.DataFrame], device: str,
) -> dict[str, Any]:  # fmt: skip
    """From one point (as in summary.json) to the next; ``ledgers``: those of the metric at both.

    ``grows_ms`` is the percentile's growth with the widest interval that both ends allow; ``stages_ms`` the growth of
    every stage in the bands, ``share_ci`` a 95 % bootstrap interval of the largest one's share (rows resampled as if
    independent: too narrow where they are not).
    """
    key = percentile_key(percentile)
    one, two = before["metrics"][metric], after["metrics"][metric]
    low, high = one.get(f"{key}_ci_ms"), two.get(f"{key}_ci_ms")
    grows = None if one[f"{key}_ms"] is None or two[f"{key}_ms"] is None else two[f"{key}_ms"] - one[f"{key}_ms"]
    bands = [slow_band(rows, percentile) for rows in ledgers]
    gain = {
        stage: ms - means_ms(bands[0]).get(stage, 0.0) for stage, ms in means_ms(bands[1]).items()
    }  # fmt: skip
    whole = sum(gain.values())
    told: dict[str, Any] = {
        "from": before["label"], "to": after["label"], "metric": metric, "percentile": percentile,
        "grows_ms": grows, "grows_ci_ms": [high[0] - low[1], high[1] - low[0]] if low and high else None,
        "band_grows_ms": whole if gain else None, "stages_ms": gain,
        "stage": None, "owner": None, "share": None, "share_ci": None,
    }  # fmt: skip
    if gain and whole:
        stage = max(gain, key=lambda name: gain[name] / whole)
        told |= {"stage": stage, "owner": owner_of(stage), "share": gain[stage] / whole,
                 "share_ci": _share_interval(bands, stage)}  # fmt: skip
    return told | {"sentence": _sentence(told, device)}


def _sentence(told: Mapping[str, Any], device: str) -> str:
    grows, name = told["grows_ms"], f"p{told['percentile']:g} {told['metric'].upper()}"
    start = f"From {told['from']} to {told['to']} {name} "
    if grows is None:
        return f"{start}is not estimable at both"
    interval = told["grows_ci_ms"]
    spread = f" (95 % interval {duration(interval[0])} to {duration(interval[1])})" if interval else ""
    start += f"{'grows' if grows >= 0 else 'falls'} by {duration(abs(grows))}{spread}"
    if told["stage"] is None or grows * told["band_grows_ms"] <= 0:
        return start
    owner = device if told["owner"] == "GPU" else told["owner"]
    way = "longer" if grows > 0 else "less"
    which = (
        f"of what the slowest ones wait {way}" if told["percentile"] >= 95 else f"of what they wait {way} on average"
    )
    ends = told["share_ci"]
    between = f" ({share(ends[0])} to {share(ends[1])})" if ends else ""
    return f"{start}; {share(told['share'])}{between} {which} is {words(told['stage'])} ({owner})"


def _share_interval(bands: list[pd.DataFrame], stage: str) -> list[float] | None:
    """Both bands drawn again with replacement (percentile method, fixed seed); None for bands of a row."""
    if min(len(band) for band in bands) < 2:
        return None
    rng = np.random.default_rng(0)
    drawn = [_resampled(band, stage, rng) for band in bands]
    more = drawn[1] - drawn[0]
    more = more[more[:, 1] * np.mean(more[:, 1]) > 0]
    if len(more) < _RESAMPLES // 2:
        return None
    low, high = np.quantile(more[:, 0] / more[:, 1], [0.025, 0.975])
    return [float(low), float(high)]


def _resampled(band: pd.DataFrame, stage: str, rng: np.random.Generator) -> Floats:
    """Means of the stage and of the whole over resamples, shape (1000, 2)."""
    rows = np.nan_to_num(band[[column(stage), "total_ns"]].to_numpy(np.float64, na_value=0.0))
    if len(rows) > 2000:
        return rng.multivariate_normal(rows.mean(axis=0), np.cov(rows.T) / len(rows), _RESAMPLES, check_valid="ignore")
    return np.stack([rows[rng.integers(0, len(rows), len(rows))].mean(axis=0) for _ in range(_RESAMPLES)])


def _names(ledgers: pd.DataFrame) -> list[str]:
    """Stages with something in them, the residual last. What is unmeasured lies in the residual."""
    known = [s.name for s in STAGES if column(s.name) in ledgers and ledgers[column(s.name)].notna().any()]
    return [*known, UNEXPLAINED]
