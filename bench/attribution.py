"""A known delay in one stage of a real engine: how much of what it added to a request does the ledger find there?

Requests with a delay and requests without take turns in one run, so that whatever disturbs the machine disturbs both.
A delay is work (a busy loop) at every call of a function that lies deeper than the probes' hooks. What it adds may be
in its own stage, or in ``core_wait`` with that stage named as who had the core: work in one process keeps others from
theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bench.injection import Case, Delayed, Measured, delayed, in_blocks

_BUSY_NS = 1_000_000
_ONCE_NS = 6_000_000  # where the function runs but once or twice a request: less is lost in the machine's noise
_OUTPUT_TOKENS = 14
_PAIRS = 40  # requests with each delay, and as many without
_WARM = 6
_COMPUTED = ("prefill", "decode", "interference")
# A point: its stages in the ledger, and as whose work it keeps others from a core.
_POINTS: dict[str, tuple[tuple[str, ...], tuple[str, str]]] = {
    "template": (("template",), ("api", "template")),
    "tokenize": (("tokenize",), ("api", "tokenize")),
    "schedule": (("scheduling",), ("engine", "scheduling")),
    "forward": (_COMPUTED, ("engine", "forward")),
    "sample": (("sampling",), ("engine", "sampling")),
    "detokenize": (("detokenize",), ("api", "detokenize")),
    "format": (("egress",), ("api", "egress")),
}
_TWO = (("detokenize", "schedule"), ("format", "forward"))
# With several users, a request also waits while a delay holds up others: in their steps, in queues, behind a loop.
_SHARED_WAITS = ("queue", "other_step", "engine_wait", "accept_wait", "lock_wait")


@dataclass(frozen=True, slots=True)
class Row:
    """Of what a case added to the time to the last token (ms a request): shares, and where the rest went.

    ``put_in_ms``: the work that the delays were, by their own log. ``added_se_ms``: the standard error of ``added_ms``.
    """

    case: str
    users: int
    put_in_ms: float
    added_ms: float
    added_se_ms: float
    own_share: float
    held_share: float
    shared_share: float
    elsewhere: Mapping[str, float]


def _case(points: Sequence[str]) -> Case:
    stages = tuple(stage for point in points for stage in _POINTS[point][0])
    busy_ns = _ONCE_NS if set(points) <= {"template", "tokenize"} else _BUSY_NS
    return Case("+".join(points), "busy", stages, "last_token", False, busy_ns)


CASES = tuple(map(_case, [*([point] for point in _POINTS), *_TWO]))


def measure(name: str, folder: Path) -> dict[str, Any]:
    """All cases, with one user and with four. Raises UserError or ServerFailed when the engine cannot be had."""
    with delayed(name, folder, CASES) as engine:
        rows = [_row(_run(engine, case, users), case, users) for users in (1, 4) for case in CASES]
        return {"engine": name, "version": engine.engine.version, "rows": [asdict(row) for row in rows]}


def _run(engine: Delayed, case: Case, users: int) -> Measured:
    """Requests with the delay and without: in turn for one user, in blocks for several, whose requests would mix."""
    if users == 1:
        schedule, think = [None] * _WARM + [None, case] * _PAIRS, "5ms"
    else:
        schedule, think = in_blocks([None, case] * 4, 20), "0ms"
    return engine.measure(schedule, users=users, output_tokens=_OUTPUT_TOKENS, think=think)


def _row(run: Measured, case: Case, users: int) -> Row:
    stages = run.stages("last_token").fillna(0.0)
    steady = np.arange(len(stages)) >= _WARM
    with_it, without = (stages[run.of(one) & steady] for one in (case, None))
    grown: pd.Series = (with_it.mean() - without.mean()) / 1e6
    added = float(grown["e2e"])
    error = np.hypot(*(each["e2e"].sem() / 1e6 for each in (with_it, without)))
    core_holders = {who: ns / 1e6 for who, ns in run.core_holders(case).items()}
    before = {who: ns / 1e6 for who, ns in run.core_holders(None).items()}
    culprits = [_POINTS[point][1] for point in case.point.split("+")]
    by_case = sum(ms - before.get(who, 0.0) for who, ms in core_holders.items() if (who.process, who.stage) in culprits)
    others = grown.drop(["e2e", *case.stages])
    others["core_wait"] -= by_case
    shared = others[list(_SHARED_WAITS)].sum() if users > 1 else 0.0
    if users > 1:
        others = others.drop(list(_SHARED_WAITS))
    return Row(
        case=case.point, users=users, put_in_ms=run.put_in_ns(case) / 1e6, added_ms=added,
        added_se_ms=float(error),
        own_share=float(grown[list(case.stages)].sum()) / added, held_share=by_case / added,
        shared_share=float(shared) / added,
        elsewhere={str(name): ms / added for name, ms in others.items() if abs(ms) >= 0.01 * abs(added)},
    )  # fmt: skip


def table(results: list[dict[str, Any]]) -> list[str]:
    """Markdown rows of several engines' results."""
    lines = [
        "| engine | users | work | put in, ms | found, ms | added, ms | own | core_wait | shared | all | elsewhere |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        for row in result["rows"]:
            added, error = row["added_ms"], 1.96 * row["added_se_ms"]
            parts = [row["own_share"], row["held_share"], row["shared_share"]]
            most = sorted(row["elsewhere"].items(), key=lambda each: -abs(each[1]))[:3]
            shares = [f"{part:.1%}" for part in (*parts, sum(parts))]
            shares.append(", ".join(f"{name} {part:+.1%}" for name, part in most))
            if abs(added) <= error:  # a share of it says nothing
                shares = ["–"] * len(shares)
            lines.append(
                f"| {result['engine']} {result['version']} | {row['users']} | {row['case'].replace('+', ' and ')} "
                f"| {row['put_in_ms']:.1f} | {sum(parts[:2]) * added:.1f} | {added:.1f} ± {error:.1f} "
                f"| {' | '.join(shares)} |"
            )
    return lines
