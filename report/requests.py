"""One request at a time: the slowest in a list, and any that can be opened as a timeline over the engine's steps.

A few hundred can be opened: the slowest to the first and to the last token, and an even sample by rank of the others.
The sizes are bounded, so that a page stays small whatever the run; what is left out says so and is in the run's files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from gapmeter.analysis.arrays import Ints
from gapmeter.analysis.stages import STAGE_NAMES, column
from gapmeter.report import document as doc
from gapmeter.report import html, marks
from gapmeter.report.document import Block, Figure, Name, Row, Section, Table, in_ms
from gapmeter.report.pictures import ledger_bar
from gapmeter.report.run_folder import ReportedRun, whole
from gapmeter.report.svg import el

_LISTED = 25
_SLOWEST = 100  # by each of the two events
_SAMPLE = 60
_PIECES = 90_000  # stretches of time in the page, about eight bytes each
_STEPS = 9_000  # engine steps in the page, about 35 bytes each
_OF_REQUEST = ["due_ns", "first_token_ns", "last_token_ns", "prompt_tokens", "output_tokens", "token_ns"]
_IN_STEP = ("requests", "prompt_tokens", "decode_tokens", "waiting")
_INDEX = {name: i for i, name in enumerate(STAGE_NAMES)}
_LEAD = (
    "The slowest, each with its own ledger, ",
    el("span", "slowest first", id="slow-order"),
    ". Select a stage in any picture to sort by it; click a request to see what happened when, and beside which.",
)


def one_request(run: ReportedRun, names: Sequence[str]) -> Section | None:
    """The slowest requests, one by one, and the view that opens those that are embedded, by their ``names``."""
    if not run.result.stages:  # a ledger that was refused is not shown
        return None
    # Listed are the slowest by the metric that the tail is about; for token gaps by E2E.
    event = "first_token" if run.result.tail.metric in ("ttft", None) else "last_token"
    ledger = run.of_event(event)
    if len(ledger):  # of the measured ones that succeeded: the few others are sooner looked for
        others = run.requests.loc[~(run.requests["measured"] | run.requests["superseded"]), "request_id"]
        ledger = ledger[~ledger["request_id"].isin(others)].nlargest(_LISTED, "total_ns")
    if not len(ledger):
        return None
    until = f"to the {event.replace('_', ' ')}"
    blocks: list[Block] = [
        doc.Html(el("p", *_LEAD, class_="lead")),
        _list(run, ledger, frozenset(names), until),
        doc.Folded("as a table, by stage", [_by_stage(ledger, until)]),
    ]
    if not names:
        return Section("requests", "One request", blocks, short="one request")
    counts = {"embedded": f"{len(names):,}", "all": f"{run.issued:,}"}
    view = html.fill(html.asset("request.html"), **counts, origin=html.origin(run.result.provenance))
    blocks.append(doc.Html(view))
    return Section("requests", "One request", blocks, short="one request", data=request_data(run, names))


def _list(run: ReportedRun, slowest: pd.DataFrame, openable: frozenset[str], until: str) -> Table:
    requests = run.requests.set_index("request_id")
    longest_ms, rows = float(slowest["total_ns"].iloc[0]) / 1e6, list[Row]()
    for name, parts in _parts_ms(slowest):
        request = requests.loc[name]
        due = int(request["due_ns"])
        at_s = (due - run.origin_ns) / 1e9
        first, last = ((float(request[stamp]) - due) / 1e6 for stamp in ("first_token_ns", "last_token_ns"))
        tokens = f"{_written(request['prompt_tokens'])} in, {_written(request['output_tokens'])} out"
        opens = el("button", name, type="button", class_="open", data_request=name)
        if name not in openable:
            opens = el("span", name, title="not embedded in this page; its ledger is in ledger.parquet")
        rows.append([
            doc.Html(opens), Figure(at_s, text=f"{at_s:.2f} s"), Figure(first), Figure(last), Name(tokens),
            doc.Html(ledger_bar(parts, longest_ms), "bar"),
        ])  # fmt: skip
    words = [doc.Column("tokens", wraps=True), doc.Column(until, wraps=True)]
    headers: doc.Headers = ["request", doc.Column("due at", "due at (s)"), *in_ms("TTFT", "E2E"), *words]
    return Table("The slowest requests", headers, rows, css="slow", key="slow-requests")


def _by_stage(slowest: pd.DataFrame, until: str) -> Table:
    found = _parts_ms(slowest)
    stages = list(dict.fromkeys(stage for _, parts in found for stage in parts))
    rows: list[Row] = [[name, *(Figure(parts.get(stage)) for stage in stages)] for name, parts in found]
    headers: doc.Headers = ["request", *(doc.Column(marks.words(stage), f"{stage} (ms)") for stage in stages)]
    return Table(f"The slowest requests {until}, by stage", headers, rows)


def _parts_ms(ledger: pd.DataFrame) -> list[tuple[str, dict[str, float]]]:
    """Each request's measured stages."""
    columns = {name: column(name) for name in STAGE_NAMES if column(name) in ledger.columns}
    return [
        (str(row["request_id"]), {s: float(row[c]) / 1e6 for s, c in columns.items() if pd.notna(row[c])})
        for row in ledger.to_dict("records")
    ]


def _written(tokens: object) -> str:
    return "unknown" if pd.isna(tokens) else f"{tokens:,}"


# --- what the page embeds


def picked(run: ReportedRun) -> list[str]:
    """Ids of the requests that can be opened, the most telling first; none without timelines, or stages to show."""
    if not len(run.timeline) or not run.result.stages:
        return []
    requests = run.requests[run.requests["measured"].to_numpy(bool)]
    requests = requests[requests["request_id"].isin(run.timeline["request_id"].unique())]
    by_first, by_last = (
        requests.assign(waited=requests[stamp] - requests["due_ns"])
        .sort_values("waited", ascending=False)["request_id"]
        .tolist()
        for stamp in ("first_token_ns", "last_token_ns")
    )
    worst = [name for pair in zip(by_first[:_SLOWEST], by_last[:_SLOWEST], strict=True) for name in pair]
    sample = [by_last[i] for i in np.linspace(0, len(by_last) - 1, min(_SAMPLE, len(by_last))).astype(int)]
    wanted = list(dict.fromkeys([*worst, *sample]))
    sizes = run.timeline.groupby("request_id", observed=True).size()
    room = np.cumsum([int(sizes[name]) for name in wanted]) <= _PIECES
    return [name for name, fits in zip(wanted, room, strict=True) if fits]


def request_data(run: ReportedRun, names: Sequence[str]) -> dict[str, Any]:
    """For the script: stages and their looks, the picked requests with their stretches, the steps.

    Times are microseconds from due (of a request) or from the first due time (of a step). ``sharing``: who was in them.
    """
    stretches = run.timeline[run.timeline["request_id"].isin(names)]
    stage, end_ns = stretches["stage"].map(_INDEX).to_numpy(np.int64), stretches["end_ns"].to_numpy(np.int64)
    at = stretches.groupby("request_id", observed=True).indices
    rows = run.requests.set_index("request_id").loc[list(names), _OF_REQUEST].to_dict("records")
    sums, (shown, steps) = _sums(run, names), _steps(run, names)
    return {
        "stages": STAGE_NAMES,
        "requests": {
            name: _request(row, stage[at[name]], end_ns[at[name]], sums[name], shown.get(name), run.origin_ns)
            for name, row in zip(names, rows, strict=True)
        },
        "steps": steps,
        "recorded": len(run.steps) > 0,
        "sharing": _sharing(run, steps),
        "words": [marks.words(stage) for stage in STAGE_NAMES],
        "owners": [marks.owner(stage, run.result.device) for stage in STAGE_NAMES],
        "kinds": [marks.kind(stage) for stage in STAGE_NAMES],
        "paints": [marks.paint(stage) for stage in STAGE_NAMES],
        "inks": [marks.ink(marks.paint(stage)) for stage in STAGE_NAMES],
    }


def _request(
    row: dict[str, Any], stage: Ints, end_ns: Ints, sums: list[Any], span: list[int] | None, origin: int
) -> dict[str, Any]:
    due = int(row["due_ns"])
    lengths = np.diff((end_ns - due) // 1000, prepend=0)
    tokens = row["token_ns"]
    came_us = np.zeros(0, np.int64) if tokens is None else (np.asarray(tokens, np.int64) - due) // 1000
    arrivals, together = np.unique(came_us, return_counts=True)
    return {
        "due": (due - origin) // 1000,
        "first": (int(row["first_token_ns"]) - due) // 1000,
        "last": (int(row["last_token_ns"]) - due) // 1000,
        "in": whole(row["prompt_tokens"]),
        "out": whole(row["output_tokens"]),
        "parts": np.column_stack([stage, lengths]).ravel().tolist(),
        "sums": sums,
        "tokens": np.diff(arrivals, prepend=0).tolist(),
        "together": together.tolist() if (together > 1).any() else None,
        "steps": span,
    }


def _sums(run: ReportedRun, requests: Sequence[str]) -> dict[str, list[Any]]:
    """Per request: the ledgers to the first and to the last token, ns by stage, null where unmeasured."""
    names = [column(name) for name in STAGE_NAMES]
    out: dict[str, list[Any]] = {}
    for event in ("first_token", "last_token"):
        rows = run.of_event(event)
        rows = rows[rows["request_id"].isin(requests)]
        table = rows.reindex(columns=names).to_numpy(np.float64, na_value=np.nan)
        for name, values in zip(rows["request_id"], table, strict=True):
            out.setdefault(name, []).append([None if np.isnan(v) else int(v) for v in values])
    return out


def _steps(run: ReportedRun, names: Sequence[str]) -> tuple[dict[str, list[int]], list[list[int | None]]]:
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
    content = [0 if pd.isna(row.get(name, 0)) else int(row.get(name, 0)) for name in _IN_STEP]
    return [int(row["step"]), (start - origin) // 1000, (end - start) // 1000, *forward, *content]


def _sharing(run: ReportedRun, steps: list[list[int | None]]) -> list[list[Any]]:
    """Requests that were in those steps: id, first step, the step of the first token, last step."""
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
