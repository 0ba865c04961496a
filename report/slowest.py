"""The slowest requests, one by one: each with its own ledger, on one axis."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from gapmeter.analysis.numbers import duration
from gapmeter.report import marks
from gapmeter.report.run import Run, stage_columns
from gapmeter.report.svg import Fragment, el, percent

_SHOWN = 25


@dataclass(frozen=True, slots=True)
class SlowRequest:
    """A row of the list: its figures as text, its bar, and its ledger in ms by stage (unmeasured ones left out)."""

    name: str
    ttft: str
    e2e: str
    due: str
    tokens: str
    bar: Fragment
    stages_ms: dict[str, float]


def slowest(run: Run, event: str) -> list[SlowRequest]:
    """The 25 successful measured requests that waited longest for ``event`` (first_token or last_token)."""
    ledger = run.of_event(event)
    if not len(ledger) or not run.summary["stages"]:  # a ledger that was refused is not shown
        return []
    requests = run.requests.set_index("request_id")
    measured = requests.index[requests["measured"]]
    worst = ledger[ledger["request_id"].isin(measured)].nlargest(_SHOWN, "total_ns")
    if not len(worst):
        return []
    longest = float(worst["total_ns"].iloc[0])
    columns = stage_columns(run.ledger)
    return [_slow(row, requests.loc[row["request_id"]], columns, longest, run.origin_ns) for _, row in worst.iterrows()]


def _slow(row: pd.Series, request: pd.Series, columns: dict[str, str], longest: float, origin_ns: int) -> SlowRequest:
    known = {stage: float(row[name]) for stage, name in columns.items() if pd.notna(row[name])}
    return SlowRequest(
        name=str(row["request_id"]),
        ttft=duration((request["first_token_ns"] - request["due_ns"]) / 1e6),
        e2e=duration((request["last_token_ns"] - request["due_ns"]) / 1e6),
        due=f"{(request['due_ns'] - origin_ns) / 1e9:.2f} s",
        tokens=f"{_whole(request['prompt_tokens'])} in, {_whole(request['output_tokens'])} out",
        bar=_bar(known, longest),
        stages_ms={stage: ns / 1e6 for stage, ns in known.items()},
    )


def _whole(value: object) -> str:
    return "unknown" if pd.isna(value) else f"{value:,}"


def _bar(known: dict[str, float], longest: float) -> Fragment:
    pieces, at = [], 0.0
    for stage, ns in known.items():
        if ns > 0:
            box = el("rect", width="100%", height="100%", fill=marks.fill(stage), class_="segment")
            title = el("title", f"{marks.words(stage)}: {duration(ns / 1e6)}")
            pieces.append(
                el(
                    "svg", title, box, x=percent(at / longest), width=percent(ns / longest), height=16, class_="stage",
                    data_stage=stage, data_ms=f"{ns / 1e6:.6g}",
                )
            )  # fmt: skip
            at += ns
    return el("svg", *pieces, width="100%", height=16, aria_hidden="true")
