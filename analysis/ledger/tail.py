"""Tail anatomy: what slow requests wait for that typical ones do not.

Two bands of real requests, ordered by what they waited in all: *typical* (p45 to p55) and *slow* (p98.5 and up, and
at least seven). A stage's bar is its mean over the band, so stages and remainder add up to the band's mean wait, and
the differences of the stages add up to the difference of the waits. Percentiles of single stages never do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from gapmeter.analysis.numbers import duration
from gapmeter.analysis.stages import BY_NAME, STAGES, UNEXPLAINED, column, owner_words
from gapmeter.analysis.stats.bootstrap import Bools, Ints, drawn_means, share_with_draws, stretches
from gapmeter.analysis.stats.estimate import Estimate, Floats

TYPICAL = (0.45, 0.55)
SLOW_FROM = 0.985
FEWEST_SLOW = 7
FEWEST = 4 * FEWEST_SLOW


@dataclass(frozen=True, slots=True)
class Anatomy:
    """Typical against slow, in ns. ``stages`` holds (stage, typical mean, slow mean) in the order of the timeline.

    The remainder is the stage ``unexplained``; unmeasured stages are left out, their time lies in the remainder.
    ``ranked`` is (stage, share of the difference), largest first. ``share`` is the first one's, with its interval from
    whole stretches of the run drawn again (stats.bootstrap); without ends where the slow rows lie in too few stretches
    to tell.
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
    share: Estimate
    sentence: str


def owner_of(stage: str) -> str:
    """The owner's key, as summary.json has it; for people see ``analysis.stages.owner_words``."""
    return BY_NAME[stage].owner if stage in BY_NAME else "nobody yet"


def anatomy(ledgers: pd.DataFrame, what: str = "requests", device: str = "GPU") -> Anatomy | None:
    """Compare the slow with the typical rows of a ledger. ``device`` is what computed the forwards, for the sentence.

    ``ledgers``: rows of one event (or token gaps) in the order of time, with ``total_ns``, ``unexplained_ns`` and a
    column a stage. None when there are fewer than 28 rows, too few for two bands, or when the slow ones are not slower.
    """
    if len(ledgers) < FEWEST:
        return None
    names = [s.name for s in STAGES if column(s.name) in ledgers and ledgers[column(s.name)].notna().any()]
    parts = ledgers[[*(column(n) for n in names), column(UNEXPLAINED)]]
    names.append(UNEXPLAINED)
    n = len(ledgers)
    total = ledgers["total_ns"].to_numpy(np.float64)
    rank = np.argsort(np.argsort(total, kind="stable"), kind="stable")
    usual, late = (rank >= int(TYPICAL[0] * n)) & (rank < np.ceil(TYPICAL[1] * n)), rank >= n - slow_count(n)
    # A stage that is unmeasured in a few rows only has its time in their remainder, so 0 there adds up.
    values = parts.to_numpy(np.float64, na_value=0.0)
    typical, slow = values[usual].mean(axis=0), values[late].mean(axis=0)
    more = slow - typical
    if more.sum() <= 0:
        return None
    shares = more / more.sum()
    ranking = np.argsort(-shares, kind="stable")
    top = int(ranking[0])
    both = np.stack([values[:, top], values.sum(axis=1)], axis=1)
    share = _share(float(shares[top]), both, usual, late, stretches(total))
    return Anatomy(
        count=n,
        typical_count=int(usual.sum()),
        slow_count=int(late.sum()),
        typical_ns=float(typical.sum()),
        slow_ns=float(slow.sum()),
        stages=tuple(zip(names, typical.tolist(), slow.tolist(), strict=True)),
        ranked=tuple((names[i], float(shares[i])) for i in ranking),
        stage=names[top],
        owner=owner_of(names[top]),
        share=share,
        sentence=f"{_share_words(share)} of what slow {what} wait beyond typical ones "
        f"({duration(float(more.sum()) / 1e6)}) is {_whose(names[top], device, inside_measured(ledgers))}",
    )


def inside_measured(ledgers: pd.DataFrame) -> bool:
    """Whether any row has a stage of the engine: without one the server's time is all in the remainder."""
    return any(column(s) in ledgers and ledgers[column(s)].notna().any() for s in ("prefill", "decode"))


def slow_count(count: int) -> int:
    """How many rows are the slow band: those from p98.5, and at least seven."""
    return max(FEWEST_SLOW, count - int(SLOW_FROM * count))


def _share(share: float, values: Floats, usual: Bools, late: Bools, stretch: Ints) -> Estimate:
    """The first column's share of the second's difference between two groups of rows."""
    drawn = [drawn_means(values, member, stretch) for member in (usual, late)]
    more = None if drawn[0] is None or drawn[1] is None else drawn[1] - drawn[0]
    return share_with_draws(share, more)


def _share_words(share: Estimate) -> str:
    value, (low, high) = share.value or 0.0, share.ends
    part = "all" if value > 0.995 else f"{100 * value:.0f} %"
    sure = "no interval" if low is None or high is None else f"{100 * low:.0f} .. {100 * high:.0f} %"
    return f"{part} ({sure})"


def _whose(stage: str, device: str, inside: bool) -> str:
    if stage == UNEXPLAINED and not inside:
        return "the server's and the network's, and unmeasured: no probe stamps the server's stages"
    return f"{stage} ({owner_words(owner_of(stage), device)})"
