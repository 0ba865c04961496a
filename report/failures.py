"""Requests that failed: how many and how, a few of each class by name, latency with them counted."""

from __future__ import annotations

import json

from gapmeter.analysis.numbers import count, duration, over
from gapmeter.analysis.results.distribution import percentile_key
from gapmeter.analysis.results.requests import ENDED_BY_US, FailureExample
from gapmeter.analysis.results.run import RunResult
from gapmeter.records.stream import storable
from gapmeter.report import document as doc
from gapmeter.report.document import BRIEF, Facts, Figure, Name, Paragraph, Row, Section, Table, Words, in_ms
from gapmeter.report.words import as_sentence, of_all

_MOST_CLASSES = 4  # in the terminal; the page has them all
_FAILED = {
    "refused": "refused the connection",
    "timeout": "timed out",
    "stalled": "stalled mid-stream",
    "cut": "cut off",
    "http_4xx": "answered 4xx",
    "http_5xx": "answered 5xx",
    "malformed": "answered with an error, or malformed",
    "wrong_length": "answered without a token",
    "tls": "TLS failed",
    "aborted": "aborted with the run",
    "lost": "lost with the load generator",
}


def failed(result: RunResult) -> Section | None:
    """What failed, a few of each class by name."""
    if not result.failures:
        return None
    rows, groups = list[Row](), set[int]()
    for found in result.failures:
        groups.add(len(rows))
        for at, one in enumerate(found.examples):
            rows.append([
                "" if at else _FAILED.get(found.name, found.name), Name(one.request_id), _status(one),
                said_by_server(one),
                "" if at else Figure(found.count, "count"), "" if at else Figure(found.share, "share"),
                Figure(one.at_s, text=f"{one.at_s:.1f} s"), Figure(one.tokens, "count"), Figure(one.waited_ms),
            ])  # fmt: skip
    headers: doc.Headers = [
        "class", "request", "status", "what was said", "requests", "share", doc.Column("due at", "due at (s)"),
        "tokens by then", *in_ms("ended after"),
    ]  # fmt: skip
    note = "The first of each class, by due time. The percentile table shows the effect of counting failures."
    lead = " ".join(as_sentence(words) for words in (_how_many(result), _censored(result)) if words)
    table = Table("Requests that failed", headers, rows, words=4, groups=frozenset(groups))
    return Section("failed", table.name, [table, Paragraph(note, "quiet")], lead, "failures")


def failed_in_short(result: RunResult) -> Section | None:
    """How many failed and how, the first of each class, and latency with them counted."""
    if not result.failures:
        return None
    lines: list[Words] = [_how_many(result)]
    for found in result.failures[:_MOST_CLASSES]:
        for one in found.examples[:1]:
            said = " ".join(said_by_server(one).split())
            lines.append(doc.Quoted(f"first {found.name}: {said} ({_status(one)}, at {one.at_s:.1f} s)"))
    if censored := _censored(result):
        lines.append(censored)
    return Section("failed", "", [Facts([("failed", *lines)])], on=BRIEF)


def commonest(result: RunResult) -> str:
    """How most of those failed that the server failed, and what the first of them was told; "" where none did."""
    found = next((each for each in result.failures if each.name not in ENDED_BY_US), None)
    if found is None:
        return ""
    first = f"; the first: {' '.join(said_by_server(found.examples[0]).split())}" if found.examples else ""
    how = _FAILED.get(found.name, found.name)
    return f"{count(found.count)} of the {count(result.counts.failed_by_server)} that failed {how}{first}"


def _how_many(result: RunResult) -> str:
    def classes(*, ours: bool) -> str:
        of_kind = (found for found in result.failures if (found.name in ENDED_BY_US) is ours)
        return ", ".join(f"{count(found.count)} {_FAILED.get(found.name, found.name)}" for found in of_kind)

    counts = result.counts
    by_server = f"{count(counts.failed_by_server)} of {count(counts.ended)}"
    parts = [f"{by_server}: {classes(ours=False)}" if counts.failed_by_server else f"{by_server} by the server"]
    return "; ".join([*parts, *([f"also {classes(ours=True)}"] if counts.ended_by_us else ())])


def _censored(result: RunResult) -> str:
    """What the highest usual percentile that the sample supports becomes when failures count; "" when it is unknown."""
    at_ms = result.metrics_censored["ttft"].censored_at_ms
    if at_ms is None:
        return ""
    said = []
    for metric in ("ttft", "e2e"):
        with_them, name = result.metrics_censored[metric], metric.upper()
        bounded = with_them.over_ms  # by failures that lie among them
        usual = (99.0, 95.0, 90.0, 50.0)
        p = next((p for p in usual if with_them.ms(p) is not None or percentile_key(p) in bounded), None)
        if p is None:
            said.append(f"{name} not estimable")
            continue
        key = percentile_key(p)
        said.append(f"{name} {key} {over(bounded[key]) if key in bounded else duration(with_them.ms(p))}")
    return f"{of_all(result)}, counting failures as at least {over(at_ms).removeprefix('> ')}: {', '.join(said)}"


def _status(example: FailureExample) -> str:
    return str(example.status) if example.status else "no answer"


def said_by_server(example: FailureExample) -> str:
    """A server's own sentence where it came as JSON (``{"error": {"message": …}}``), else all that it sent."""
    try:
        answer = json.loads(example.error)
    except ValueError:
        return example.error
    for key in ("error", "message"):
        if isinstance(answer, dict):
            answer = answer.get(key, answer)
    return storable(answer) if isinstance(answer, str) and answer else example.error
