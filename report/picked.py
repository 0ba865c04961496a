"""Which requests can be opened in the page, and what the page's script needs to draw them.

A few hundred: the slowest to the first and to the last token, and an even sample by rank of the others. The sizes
are bounded, so that a page stays small whatever the run; what is left out says so and is in the run's files.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from gapmeter.analysis.stages import STAGES, UNEXPLAINED, column
from gapmeter.report.run import Run

Ints = NDArray[np.int64]

_SLOWEST = 100  # by each of the two events
_SAMPLE = 60
_PIECES = 90_000  # stretches of time in the page, about eight bytes each
_STEPS = 9_000  # engine steps in the page, about 35 bytes each
STAGE_NAMES = [*(stage.name for stage in STAGES), UNEXPLAINED]
_HELD = ("requests", "prompt_tokens", "decode_tokens", "waiting")
_INDEX = {name: i for i, name in enumerate(STAGE_NAMES)}


def picked(run: Run) -> list[str]:
    """Ids of the requests that can be opened, the most telling first; none without timelines."""
    if not len(run.timeline) or not run.summary["stages"]:
        return []
    waited = _waited(run)
    by_first = waited.sort_values("first_ns", ascending=False)["request_id"].tolist()
    by_last = waited.sort_values("last_ns", ascending=False)["request_id"].tolist()
    worst = [name for pair in zip(by_first[:_SLOWEST], by_last[:_SLOWEST], strict=True) for name in pair]
    sample = [by_last[i] for i in np.linspace(0, len(by_last) - 1, min(_SAMPLE, len(by_last))).astype(int)]
    wanted = list(dict.fromkeys([*worst, *sample]))
    sizes = run.timeline.groupby("request_id").size()
    room = np.cumsum([int(sizes[name]) for name in wanted]) <= _PIECES
    return [name for name, fits in zip(wanted, room, strict=True) if fits]


def _waited(run: Run) -> pd.DataFrame:
    """Measured requests that have a timeline, with their two waits."""
    requests = run.requests[run.requests["measured"].to_numpy(bool)]
    requests = requests[requests["request_id"].isin(run.timeline["request_id"].unique())]
    due = requests["due_ns"]
    return pd.DataFrame(
        {
            "request_id": requests["request_id"],
            "first_ns": (requests["first_token_ns"] - due).astype("int64"),
            "last_ns": (requests["last_token_ns"] - due).astype("int64"),
        }
    )


def request_data(run: Run, names: list[str]) -> dict[str, Any]:
    """For the script: stages, the picked requests with their stretches, the engine's steps, who was in them.

    Times are microseconds from due (of a request) or from the first due time (of a step).
    """
    stretches = dict(list(run.timeline[run.timeline["request_id"].isin(names)].groupby("request_id")))
    requests, sums = run.requests.set_index("request_id"), _sums(run)
    shown, steps = _steps(run, names)
    return {
        "stages": STAGE_NAMES,
        "requests": {
            name: _request(requests.loc[name], stretches[name], sums[name], shown.get(name), run.origin_ns)
            for name in names
        },
        "steps": steps,
        "sharing": _sharing(run, steps),
    }


def _request(
    row: pd.Series, stretches: pd.DataFrame, sums: list[Any], span: list[int] | None, origin: int
) -> dict[str, Any]:
    due = int(row["due_ns"])
    ends = ((stretches["end_ns"].to_numpy(np.int64) - due) // 1000).tolist()
    lengths = np.diff([0, *ends]).tolist()
    tokens = row["token_ns"]
    arrivals = [] if tokens is None else np.unique((np.asarray(tokens, np.int64) - due) // 1000).tolist()
    return {
        "due": (due - origin) // 1000,
        "first": (int(row["first_token_ns"]) - due) // 1000,
        "last": (int(row["last_token_ns"]) - due) // 1000,
        "in": _whole(row["prompt_tokens"]),
        "out": _whole(row["output_tokens"]),
        "parts": [n for pair in zip(_codes(stretches), lengths, strict=True) for n in pair],
        "sums": sums,
        "tokens": np.diff([0, *arrivals]).tolist(),
        "steps": span,
    }


def _codes(stretches: pd.DataFrame) -> list[int]:
    return [_INDEX[stage] for stage in stretches["stage"]]


def _whole(value: object) -> int | None:
    return None if pd.isna(value) else int(value)  # type: ignore[call-overload]


def _sums(run: Run) -> dict[str, list[Any]]:
    """Per request: the ledgers to the first and to the last token, ns by stage, null where unmeasured."""
    names = [column(name) for name in STAGE_NAMES]
    out: dict[str, list[Any]] = {}
    for event in ("first_token", "last_token"):
        rows = run.of_event(event)
        table = rows.reindex(columns=names).to_numpy(np.float64, na_value=np.nan)
        for name, values in zip(rows["request_id"], table, strict=True):
            out.setdefault(name, []).append([None if np.isnan(v) else int(v) for v in values])
    return out


def _steps(run: Run, names: list[str]) -> tuple[dict[str, list[int]], list[list[int | None]]]:
    """Each request's first and last step number, and the steps: number, start, length, forward, what they held."""
    rows = run.of_event("last_token").set_index("request_id")
    if not len(run.steps) or "first_step" not in rows or "forward_start_ns" not in run.steps:
        return {}, []
    wanted: set[int] = set()
    shown: dict[str, list[int]] = {}
    for name in names:
        first, last = int(rows.loc[name, "first_step"]), int(rows.loc[name, "last_step"])
        span = set(range(max(first - 3, 0), last + 1))  # a few earlier ones: whom it waited for
        if first < 0 or len(wanted | span) > _STEPS:
            continue
        wanted |= span
        shown[name] = [first, last]
    steps = run.steps[run.steps["step"].isin(wanted)]
    return shown, [_step(row, run.origin_ns) for row in steps.to_dict("records")]


def _step(row: dict[str, Any], origin: int) -> list[int | None]:
    ends = [row.get(f"{part}_end_ns") for part in ("loop", "update", "output_put", "sampling", "forward")]
    known = [int(end) for end in ends if end is not None and not pd.isna(end) and end > 0]
    start, end = int(row["schedule_ns"]), max(known, default=int(row["schedule_ns"]))
    stamps = [row[f"forward_{side}_ns"] for side in ("start", "end")]
    forward = [None if pd.isna(stamp) else (int(stamp) - origin) // 1000 for stamp in stamps]
    held = [0 if pd.isna(row.get(name, 0)) else int(row.get(name, 0)) for name in _HELD]
    return [int(row["step"]), (start - origin) // 1000, (end - start) // 1000, *forward, *held]


def _sharing(run: Run, steps: list[list[int | None]]) -> list[list[Any]]:
    """Who was in those steps: id, first step, the step of the first token, last step."""
    if not steps:
        return []
    numbers = np.array(sorted(int(step[0] or 0) for step in steps))
    firsts = run.of_event("first_token").set_index("request_id")["last_step"]
    rows = run.of_event("last_token")
    low = np.searchsorted(numbers, rows["first_step"].to_numpy(np.int64))
    high = np.searchsorted(numbers, rows["last_step"].to_numpy(np.int64), side="right")
    rows = rows[high > low]
    return [
        [name, int(first), int(firsts[name]), int(last)]
        for name, first, last in zip(rows["request_id"], rows["first_step"], rows["last_step"], strict=True)
    ]
