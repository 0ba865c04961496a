"""What failed, in words that the page and the terminal share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gapmeter.analysis.numbers import count, duration, over, share

_WORDS = {
    "refused": "refused the connection",
    "timeout": "not complete in time",
    "stalled": "stalled mid-stream",
    "cut": "cut off",
    "http_4xx": "answered 4xx",
    "http_5xx": "answered 5xx",
    "malformed": "answered badly",
    "wrong_length": "answered without a token",
    "tls": "TLS failed",
    "aborted": "aborted with the run",
    "lost": "lost with the load generator",
}
_TOLD = ("ttft", "e2e")


@dataclass(frozen=True, slots=True)
class Example:
    """One failed request: when it was due, which, its HTTP status, the tokens that had come, what was said."""

    at: str
    request: str
    status: str
    tokens: str
    waited: str
    error: str


@dataclass(frozen=True, slots=True)
class FailedClass:
    """One class of failures; ``name`` is what the records call it."""

    name: str
    words: str
    count: str
    share: str
    examples: list[Example]


def failed_classes(summary: Mapping[str, Any]) -> list[FailedClass]:
    """Every class, the most frequent first."""
    return [
        FailedClass(
            name=found["class"],
            words=_WORDS.get(found["class"], found["class"]),
            count=count(found["count"]),
            share=share(found["share"]),
            examples=[_example(example) for example in found["examples"]],
        )
        for found in summary["failures"]
    ]


def failed_sentence(summary: Mapping[str, Any]) -> str:
    """How many failed, and how; "" when none did."""
    classes = failed_classes(summary)
    if not classes:
        return ""
    total = sum(found["count"] for found in summary["failures"])
    told = ", ".join(f"{found.count} {found.words}" for found in classes)
    return f"{count(total)} of {count(summary['counts']['measured'])}: {told}"


def censored_sentence(summary: Mapping[str, Any]) -> str:
    """What the highest usual percentiles become when failures count; "" when nothing failed."""
    known = summary["metrics_censored"]
    at_ms = known["ttft"]["censored_at_ms"]
    if at_ms is None:
        return ""
    told = [_told(metric, known[metric], summary["metrics"][metric]) for metric in _TOLD]
    return f"with these as at least {over(at_ms).removeprefix('> ')}: {', '.join(told)}"


def _told(metric: str, with_them: Mapping[str, Any], without: Mapping[str, Any]) -> str:
    """The highest percentile that the sample supports."""
    for p in ("p99", "p95", "p90", "p50"):
        if with_them[f"{p}_ms"] is not None or p in with_them["over_ms"]:
            known = with_them["over_ms"].get(p)
            text = duration(with_them[f"{p}_ms"]) if known is None else over(known)
            alone = without[f"{p}_ms"]
            return f"{metric.upper()} {p} {text}" + (f" ({duration(alone)} over successes)" if alone else "")
    return f"{metric.upper()} not estimable"


def _example(example: Mapping[str, Any]) -> Example:
    return Example(
        at=f"{example['at_s']:.1f} s",
        request=example["request_id"],
        status=str(example["status"]) if example["status"] else "no answer",
        tokens=count(example["tokens"]),
        waited=duration(example["waited_ms"]),
        error=_said(example["error"]),
    )


def _said(error: str) -> str:
    """A server's own sentence where it came as JSON (``{"error": {"message": …}}``), else all that it sent."""
    try:
        told = json.loads(error)
    except ValueError:
        return error
    for key in ("error", "message"):
        if isinstance(told, dict):
            told = told.get(key, told)
    return told if isinstance(told, str) and told else error
