"""Tail anatomy: what slow requests wait for that typical ones do not.

Two bands of real requests, ordered by what they waited in all: *typical* (p45 to p55) and *slow* (p98.5 and up, and
at least seven). A stage's bar is its mean over the band, so stages and remainder add up to the band's mean wait, and
the differences of the stages add up to the difference of the waits. Percentiles of single stages never do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.report.numbers import duration
from analysis.stages import BY_NAME, STAGES, UNEXPLAINED, column, owner_words
from analysis.statistics.quantiles import Floats

TYPICAL = (0.45, 0.55)
SLOW_FROM = 0.985
FEWEST_SLOW = 7
FEWEST = 4 * FEWEST_SLOW
_RESAMPLES = 1000


@dataclass(frozen=True, slots=True)
class Anatomy:
    """Typical against slow, in ns. ``stages`` holds (stage, typical mean, slow mean) in the order of the timeline.

    The remainder is the stage ``unexplained``; unmeasured stages are left out, their time lies in the remainder.
    ``ranked`` is (stage, share of the difference), largest first. ``share_low`` and ``share_high`` are a 95 % bootstrap
    interval (percentile method, 1,000 resamples of both bands, fixed seed) of the first one's share; it takes rows for
    independent, so for token gaps it is too narrow.
    """

    count: int
    typical_count: int
    slow_count: int
    typical_ns: float
    slow_ns: float
    stages: tuple[tuple[str, float, float], ...]
    ranked: tuple[tuple[str, float], ...]
    stage: str
    owner: str
    share: float
    share_low: float
    share_high: float
    sentence: str


def owner_of(stage: str) -> str:
    """The owner's key, as summary.json has it; for people see ``analysis.stages.owner_words``."""
    return BY_NAME[stage].owner if stage in BY_NAME else "nobody yet"


def anatomy(ledgers: pd.DataFrame, what: str = "requests", device: str = "GPU") -> Anatomy | None:
    """Compare the slow with the typical rows of a ledger. ``device`` is what computed the forwards, for the sentence.

    ``ledgers``: rows of one event (or token gaps), with ``total_ns``, ``unexplained_ns`` and a column a stage. None
    when there are fewer than 28 rows, too few for two bands, or when the slow ones are not slower.
    """
    if len(ledgers) < FEWEST:
        return None
    names = [s.name for s in STAGES if column(s.name) in ledgers and ledgers[column(s.name)].notna().any()]
    parts = ledgers[[*(column(n) for n in names), column(UNEXPLAINED)]]
    names.append(UNEXPLAINED)
    n = len(ledgers)
    order = np.argsort(ledgers["total_ns"].to_numpy(np.float64), kind="stable")
    # A stage that is unmeasured in a few rows only has its time in their remainder, so 0 there adds up.
    typical, slow = (
        parts.iloc[band].to_numpy(np.float64, na_value=0.0)
        for band in (order[int(TYPICAL[0] * n) : int(np.ceil(TYPICAL[1] * n))], order[-slow_count(n) :])
    )
    more = slow.mean(axis=0) - typical.mean(axis=0)
    if more.sum() <= 0:
        return None
    shares = more / more.sum()
    ranking = np.argsort(-shares, kind="stable")
    top = int(ranking[0])
    low, high = _bootstrap_share(typical, slow, top)
    return Anatomy(
        count=n,
        typical_count=len(typical),
        slow_count=len(slow),
        typical_ns=float(typical.mean(axis=0).sum()),
        slow_ns=float(slow.mean(axis=0).sum()),
        stages=tuple(zip(names, typical.mean(axis=0).tolist(), slow.mean(axis=0).tolist(), strict=True)),
        ranked=tuple((names[i], float(shares[i])) for i in ranking),
        stage=names[top],
        owner=owner_of(names[top]),
        share=float(shares[top]),
        share_low=low,
        share_high=high,
        sentence=_sentence(names[top], float(shares[top]), float(more.sum()), what, device, inside_measured(ledgers)),
    )


def inside_measured(ledgers: pd.DataFrame) -> bool:
    """Whether any row has a stage of the engine: without one the server's time is all in the remainder."""
    return any(column(s) in ledgers and ledgers[column(s)].notna().any() for s in ("prefill", "decode"))


def slow_count(count: int) -> int:
    """How many rows are the slow band: those from p98.5, and at least seven."""
    return max(FEWEST_SLOW, count - int(SLOW_FROM * count))


def _bootstrap_share(typical: Floats, slow: Floats, stage: int) -> tuple[float, float]:
    """95 % interval of a stage's share of the difference, both bands drawn again with replacement."""
    rng = np.random.default_rng(0)
    usual, late = (
        _resampled_means(np.stack([band[:, stage], band.sum(axis=1)], axis=1), rng) for band in (typical, slow)
    )
    more = late - usual
    more = more[more[:, 1] > 0]
    low, high = np.quantile(more[:, 0] / more[:, 1], [0.025, 0.975])
    return float(low), float(high)


def _resampled_means(rows: Floats, rng: np.random.Generator) -> Floats:
    """Means of resamples, shape (1000, columns); beyond 1,000 rows drawn from their normal limit, which is as good."""
    if len(rows) > 1000:
        return rng.multivariate_normal(rows.mean(axis=0), np.cov(rows.T) / len(rows), _RESAMPLES, check_valid="ignore")
    return np.stack([rows[rng.integers(0, len(rows), len(rows))].mean(axis=0) for _ in range(_RESAMPLES)])


def _sentence(stage: str, share: float, more_ns: float, what: str, device: str, inside: bool) -> str:
    part = "all" if share > 0.995 else f"{100 * share:.0f} %"
    whose = f"{stage} ({owner_words(owner_of(stage), device)})"
    if stage == UNEXPLAINED and not inside:
        whose = "the server's and the network's, and unmeasured: no probe stamps the server's stages"
    return f"{part} of what slow {what} wait beyond typical ones ({duration(more_ns / 1e6)}) is {whose}"
