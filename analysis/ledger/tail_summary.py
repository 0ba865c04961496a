"""The summary's parts on what slow requests wait for, and what a faster device would leave of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from gapmeter.analysis.judge import verdict
from gapmeter.analysis.judge.verdict import SloResult
from gapmeter.analysis.ledger import tail, upgrade
from gapmeter.analysis.ledger.tail import Anatomy
from gapmeter.analysis.ledger.upgrade import Bracket
from gapmeter.analysis.requests import figures as fig

LEDGER_OF = {"ttft": "first_token", "e2e": "last_token"}


def anatomies_of(
    ledger: pd.DataFrame | None, gaps: pd.DataFrame | None, measured: pd.DataFrame, device: str
) -> dict[str, Anatomy | None]:
    out = {m: tail.anatomy(fig.ledgers_of(ledger, measured, event), device=device) for m, event in LEDGER_OF.items()}
    if gaps is not None and len(gaps):
        inside = gaps["request_id"].isin(measured["request_id"]).to_numpy(bool)
        in_time = gaps[inside].sort_values("end_ns", kind="stable")  # those of one engine step side by side
        out["itl"] = tail.anatomy(in_time, "token gaps", device)
    return out


def tail_part(anatomies: Mapping[str, Anatomy | None], results: Sequence[SloResult]) -> dict[str, Any]:
    """Every metric's anatomy; in front the one that matters most: a failed SLO's, else the first SLO's, else TTFT."""
    known = {metric: found for metric, found in anatomies.items() if found is not None}
    out: dict[str, Any] = {metric: anatomy_part(found) for metric, found in known.items()}
    ordered = [r.metric for r in results if r.status == verdict.FAIL] + [r.metric for r in results] + list(known)
    first = next((metric for metric in ordered if metric in known), None)
    if first is None:
        return {"metric": None, "stage": None, "owner": None, "share": None, "share_ci": None, "sentence": None}
    told = ("stage", "owner", "share", "share_ci", "sentence")
    return {"metric": first, **{key: out[first][key] for key in told}, **out}


def anatomy_part(found: Anatomy) -> dict[str, Any]:
    """One anatomy as JSON: the two bands in ms by stage, and the stages ranked by their share of the difference."""
    more = found.slow_ns - found.typical_ns
    return {
        "count": found.count,
        "typical": {
            "count": found.typical_count,
            "total_ms": found.typical_ns / 1e6,
            "stages_ms": {stage: usual / 1e6 for stage, usual, _ in found.stages},
        },
        "slow": {
            "count": found.slow_count,
            "total_ms": found.slow_ns / 1e6,
            "stages_ms": {stage: late / 1e6 for stage, _, late in found.stages},
        },
        "difference_ms": more / 1e6,
        "ranked": [
            {"stage": stage, "owner": tail.owner_of(stage), "share": part, "ms": part * more / 1e6}
            for stage, part in found.ranked
        ],
        "stage": found.stage,
        "owner": found.owner,
        "share": found.share.value,
        "share_ci": list(found.share.ends),
        "sentence": found.sentence,
    }


def upgrades_of(ledger: pd.DataFrame | None, measured: pd.DataFrame, device: str) -> dict[str, Bracket]:
    found = {m: upgrade.bracket(fig.ledgers_of(ledger, measured, event), m, device) for m, event in LEDGER_OF.items()}
    return {metric: bracket for metric, bracket in found.items() if bracket is not None}


def upgrade_part(brackets: Mapping[str, Bracket], device: str) -> dict[str, Any]:
    out: dict[str, Any] = {"device": device, "sentence": None}
    for metric, bracket in brackets.items():
        ends = {"now": bracket.now, "lower": bracket.lower, "upper": bracket.upper}
        out[metric] = {
            end: {
                f"{fig.percentile_key(p)}_ms": fig.plain_percentile(e.value) if e.supported else None
                for p, e in sorted(estimates.items())
            }
            for end, estimates in ends.items()
        }
        out[metric] |= {"percentile": bracket.percentile, "sentence": bracket.sentence}
    first = next(iter(brackets.values()), None)
    return out | {"sentence": first.sentence if first else None}
