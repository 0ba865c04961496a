"""Tail anatomy: what slow requests wait for that typical ones do not.

Two bands of real requests, ordered by what they waited in all: *typical* (p45 to p55) and *slow* (p98.5 and up, and
at least seven). A stage's bar is its mean over the band, so stages and remainder add up to the band's mean wait, and
the differences of the stages add up to the difference of the waits. Percentiles of single stages never do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from gapmeter.analysis.requests.figures import ledgers_of
from gapmeter.analysis.results.latency import Anatomy, Band, RankedStage, Tail
from gapmeter.analysis.results.run import FAIL, SloAnswer
from gapmeter.analysis.stages import BY_NAME, STAGES, UNEXPLAINED, column
from gapmeter.analysis.stats.bootstrap import drawn_means, share_with_draws, stretches
from gapmeter.analysis.stats.estimate import Bools, Estimate, Floats, Ints

TYPICAL = (0.45, 0.55)
SLOW_FROM = 0.985
FEWEST_SLOW = 7
FEWEST = 4 * FEWEST_SLOW
LEDGER_OF = {"ttft": "first_token", "e2e": "last_token"}


def owner_of(stage: str) -> str:
    """The owner's key, as summary.json has it; for people see ``analysis.stages.owner_words``."""
    return BY_NAME[stage].owner if stage in BY_NAME else "nobody yet"


def anatomies_of(ledger: pd.DataFrame | None, gaps: pd.DataFrame | None, measured: pd.DataFrame) -> dict[str, Anatomy]:
    """By metric, of those that have one."""
    found = {metric: anatomy(ledgers_of(ledger, measured, event)) for metric, event in LEDGER_OF.items()}
    if gaps is not None and len(gaps):
        inside = gaps["request_id"].isin(measured["request_id"]).to_numpy(bool)
        found["itl"] = anatomy(gaps[inside].sort_values("end_ns", kind="stable"))  # those of one step side by side
    return {metric: each for metric, each in found.items() if each is not None}


def describe_tail(anatomies: Mapping[str, Anatomy], answers: Sequence[SloAnswer]) -> Tail:
    """Every metric's anatomy; in front the one that matters most: a failed SLO's, else the first SLO's, else TTFT."""
    failed = [answer.metric for answer in answers if answer.status == FAIL]
    first = next((m for m in (*failed, *(a.metric for a in answers), *anatomies) if m in anatomies), None)
    front = anatomies[first] if first is not None else None
    return Tail(
        metric=first,
        stage=front.stage if front else None,
        owner=front.owner if front else None,
        share=front.share if front else None,
        share_ci=front.share_ci if front else None,
        ttft=anatomies.get("ttft"),
        e2e=anatomies.get("e2e"),
        itl=anatomies.get("itl"),
    )


def anatomy(ledgers: pd.DataFrame) -> Anatomy | None:
    """Compare the slow with the typical rows of a ledger.

    ``ledgers``: rows of one event (or token gaps) in the order of time, with ``total_ns``, ``unexplained_ns`` and a
    column a stage. None when there are fewer than 28 rows, too few for two bands, or when the slow ones are not slower.
    The remainder is the stage ``unexplained``; unmeasured stages are left out, their time lies in the remainder.
    ``share_ci`` is from whole stretches of the run drawn again (stats.bootstrap), without ends where the slow rows lie
    in too few stretches to tell.
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
        typical=_band(names, typical, int(usual.sum())),
        slow=_band(names, slow, int(late.sum())),
        difference_ms=float(more.sum()) / 1e6,
        ranked=tuple(
            RankedStage(
                stage=names[i],
                owner=owner_of(names[i]),
                share=float(shares[i]),
                ms=float(shares[i]) * float(more.sum()) / 1e6,
            )
            for i in ranking
        ),
        stage=names[top],
        owner=owner_of(names[top]),
        share=float(shares[top]),
        share_ci=share.ends,
    )


def _band(names: Sequence[str], means_ns: Floats, count: int) -> Band:
    return Band(
        count=count,
        total_ms=float(means_ns.sum()) / 1e6,
        stages_ms={name: ns / 1e6 for name, ns in zip(names, means_ns.tolist(), strict=True)},
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
