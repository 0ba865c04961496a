"""A run in the Trace Event Format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

A track a request, in the order of due times, with its whole wait and, inside it, the stages that own it; a track for
each part of an engine's steps, and a second one where steps overlap; counters of what it had running and waiting; and
arrows from the step that made a request's first and last token to that request. Times are microseconds from the first
due time. A viewer is of no use with ten thousand tracks: 500 requests are in it (``ledger.chosen``), and of many steps
those of the slowest.

The format: Trace Event Format, Google, 2016 revision (phases X, M, C, s, f).
"""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from gapmeter.analysis.ledger.portions import chosen
from gapmeter.records import RunFolder
from gapmeter.report import marks
from gapmeter.report.run_folder import ReportedRun, whole

_REQUESTS, _STEPS = 500, 20_000  # most that are shown
REQUESTS, ENGINE = 1, 2  # process numbers: groups of tracks; further engines are counted on from the first
_PARTS = (
    "loop", "schedule", "execute", "worker", "input_prep", "forward", "sampling", "sample_call", "update", "output_put",
    "output_send",
)  # fmt: skip
_COUNTERS = {"running": "requests running", "waiting": "requests waiting", "free_blocks": "free KV blocks"}

Event = dict[str, Any]


def write_trace(folder: RunFolder, file: Path) -> None:
    """Write the file, packed by gzip. Raises FileNotFoundError when the run has not been analysed, OSError."""
    packed = json.dumps(trace(ReportedRun.read(folder)), separators=(",", ":"), allow_nan=False).encode()
    file.write_bytes(gzip.compress(packed, compresslevel=3, mtime=0))


def trace(run: ReportedRun) -> dict[str, Any]:
    """The whole document. Events are in order of time."""
    shown = run.requests[chosen(run.requests, _REQUESTS)]
    timeline = run.timeline
    if len(timeline):
        timeline = timeline[timeline["request_id"].isin(shown["request_id"])]
    if len(run.steps):
        run = replace(run, steps=run.steps.assign(engine=ENGINE + run.engine_of_step))
    run = replace(run, steps=_steps_shown(run), timeline=timeline)
    run = replace(run, steps=run.steps.assign(**{_lane(part): _lanes(run.steps, part) for part in _known_parts(run)}))
    tracks = {name: number for number, name in enumerate(shown.sort_values("due_ns")["request_id"], start=1)}
    timed = [*_requests(run, shown, tracks), *_stages(run, tracks), *_steps(run), *_counters(run), *_flows(run, tracks)]
    timed.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    about = {"requests in this file": f"{len(tracks)} of {run.issued}", "verdict": run.result.verdict}
    about |= {**run.result.provenance.facts(), "steps in this file": str(len(run.steps))}
    return {"traceEvents": [*_names(run, shown, tracks), *timed], "displayTimeUnit": "ms", "otherData": about}


def _steps_shown(run: ReportedRun) -> pd.DataFrame:
    """All steps, or those that ran from the first to the last step of the slowest requests, as many as are shown."""
    if len(run.steps) <= _STEPS:
        return run.steps
    slowest = run.of_event("last_token").nlargest(_REQUESTS, "total_ns")
    number = run.steps["step"].to_numpy()
    kept = np.zeros(len(number), dtype=np.bool_)
    for first, last in slowest[["first_step", "last_step"]].itertuples(index=False):
        low, high = np.searchsorted(number, [first, last + 1])
        if kept.sum() + high - low > _STEPS:
            break
        kept[low:high] = True
    return run.steps[kept]


def _names(run: ReportedRun, shown: pd.DataFrame, tracks: Mapping[str, int]) -> Iterator[Event]:
    valid = "" if run.result.verdict != "INVALID" else " (INVALID run)"
    engines = run.steps["engine"].unique().tolist() if len(run.steps) else [ENGINE]
    names = [f"engine {pid - ENGINE}{valid}" if len(engines) > 1 else f"engine{valid}" for pid in engines]
    for pid, text in zip([REQUESTS, *engines], [f"requests{valid}", *names], strict=True):
        yield _meta("process_name", pid, 0, name=text)
        yield _meta("process_sort_index", pid, 0, sort_index=pid)
    by_id = shown.set_index("request_id")
    for name, track in tracks.items():
        waited = (by_id.at[name, "last_token_ns"] - by_id.at[name, "due_ns"]) / 1e6
        yield _meta("thread_name", REQUESTS, track, name=f"{name} {waited:.1f} ms")
        yield _meta("thread_sort_index", REQUESTS, track, sort_index=track)
    for pid, (number, part) in itertools.product(engines, enumerate(_known_parts(run), start=1)):
        for lane in range(1 + max(run.steps.loc[run.steps["engine"] == pid, _lane(part)], default=0)):
            tid = _tid(number, lane)
            yield _meta("thread_name", pid, tid, name=part.replace("_", " ") + f" {lane + 1}" * (lane > 0))
            yield _meta("thread_sort_index", pid, tid, sort_index=100 * number + lane)


def _meta(kind: str, pid: int, tid: int, **args: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _requests(run: ReportedRun, shown: pd.DataFrame, tracks: Mapping[str, int]) -> Iterator[Event]:
    for row in shown.itertuples():
        args = {"prompt tokens": whole(row.prompt_tokens), "output tokens": whole(row.output_tokens)}
        args |= {"measured": bool(row.measured), "TTFT ms": (row.first_token_ns - row.due_ns) / 1e6}
        place = (REQUESTS, tracks[row.request_id])
        yield _slice(run, "request", "request", (row.due_ns, row.last_token_ns), place, args)


def _stages(run: ReportedRun, tracks: Mapping[str, int]) -> Iterator[Event]:
    for row in run.timeline.itertuples():
        owner = marks.owner(row.stage, run.result.device)
        place, args = (REQUESTS, tracks[row.request_id]), {"owner": owner, "kind": row.kind}
        yield _slice(run, row.stage, owner, (row.start_ns, row.end_ns), place, args)


def _known_parts(run: ReportedRun) -> list[str]:
    return [part for part in _PARTS if f"{part}_start_ns" in run.steps.columns]


def _lane(part: str) -> str:
    return f"{part}_lane"


def _tid(number: int, lane: int) -> int:
    return number + lane * len(_PARTS)


def _lanes(steps: pd.DataFrame, part: str) -> list[int]:
    """For each step the track of this part, from 0, on which it overlaps no other: Perfetto would discard it there."""
    start_ns, end_ns = (steps[f"{part}_{edge}_ns"].to_numpy() for edge in ("start", "end"))
    engines, lanes = steps["engine"].tolist(), [0] * len(steps)
    free_ns: dict[int, list[int]] = {}  # an engine's lanes: when the last slice of each ends
    for at in np.argsort(start_ns, kind="stable"):
        if end_ns[at] > start_ns[at]:
            ends = free_ns.setdefault(engines[at], [])
            lane = next((lane for lane, end in enumerate(ends) if end <= start_ns[at]), len(ends))
            ends[lane : lane + 1] = [end_ns[at]]
            lanes[at] = lane
    return lanes


def _steps(run: ReportedRun) -> Iterator[Event]:
    of_step = ["engine", "step", "requests", "prompt_tokens", "decode_tokens"]
    for number, part in enumerate(_known_parts(run), start=1):
        stamps = [f"{part}_start_ns", f"{part}_end_ns"]
        known = run.steps[[*of_step, _lane(part), *stamps]].dropna(subset=stamps)
        for engine, step, requests, prompt, decode, lane, start, end in known.itertuples(index=False):
            args = {"step": int(step), "requests": whole(requests)}
            args |= {"prompt tokens": whole(prompt), "decode tokens": whole(decode)}
            if end > start:
                yield _slice(run, part.replace("_", " "), "step", (start, end), (engine, _tid(number, lane)), args)


def _counters(run: ReportedRun) -> Iterator[Event]:
    for column, title in _COUNTERS.items():
        if column not in run.steps.columns:
            continue
        for engine, at, value in run.steps[["engine", "schedule_ns", column]].itertuples(index=False):
            ts = _us(run.origin_ns, at)
            yield {"ph": "C", "name": title, "pid": engine, "tid": 0, "ts": ts, "args": {column: int(value)}}


def _flows(run: ReportedRun, tracks: Mapping[str, int]) -> Iterator[Event]:
    """From the forward of the step that made a token to the request's track where that token arrived."""
    if "forward_start_ns" not in run.steps.columns or "last_step" not in run.ledger.columns:
        return
    parts = _known_parts(run)
    steps = run.steps.set_index("step")
    began = steps["forward_start_ns"].dropna()
    mine = run.ledger[run.ledger["request_id"].isin(tracks) & run.ledger["last_step"].isin(began.index)]
    due = run.requests.set_index("request_id")["due_ns"]
    for number, row in enumerate(mine.itertuples(), start=1):
        name = str(row.event).replace("_", " ")
        arrow = {"cat": "token", "name": name, "id": number}
        arrives = int(due[row.request_id]) + int(row.total_ns) - 1  # inside the request's slice, not on its end
        starts, ends = _us(run.origin_ns, began[row.last_step]), _us(run.origin_ns, arrives)
        lane = int(steps.at[row.last_step, _lane("forward")])
        source = {"pid": int(steps.at[row.last_step, "engine"]), "tid": _tid(parts.index("forward") + 1, lane)}
        yield {"ph": "s", **arrow, **source, "ts": starts}
        yield {"ph": "f", "bp": "e", **arrow, "pid": REQUESTS, "tid": tracks[row.request_id], "ts": ends}


def _slice(
    run: ReportedRun, name: str, category: str, stretch: tuple[int, int], place: tuple[int, int], args: dict[str, Any]
) -> Event:
    (start, end), (pid, tid) = stretch, place
    return {
        "ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, "ts": _us(run.origin_ns, start),
        "dur": round((int(end) - int(start)) / 1e3, 3), "args": args,
    }  # fmt: skip


def _us(origin: int, at_ns: int) -> float:
    return round((int(at_ns) - origin) / 1e3, 3)
