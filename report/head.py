"""What a person reads first, taken from summary.json: the verdict in sentences, the SLOs, the warnings, the trust.

The page and the terminal say the same words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gapmeter.analysis.numbers import count, duration, rate
from gapmeter.report import marks
from gapmeter.report.export.junit import slo_interval, slo_value

WORDS = {"PASS": "met", "FAIL": "missed", "INCONCLUSIVE": "undecided", "INVALID": "not measured"}
SIGNS = {"PASS": "v", "FAIL": "x", "INCONCLUSIVE": "?", "INVALID": "-"}
_CSS = {"PASS": "met", "FAIL": "missed", "INCONCLUSIVE": "open", "INVALID": "missed"}
_CHECKS = {
    "ok": ("ok", "met"),
    "warn": ("strained", "open"),
    "broken": ("broken", "missed"),
    "unmeasured": ("unmeasured", ""),
}


@dataclass(frozen=True, slots=True)
class SloLine:
    """One SLO as text. ``raw`` is the measured value as it stands in summary.json (ms, or a share)."""

    status: str
    sign: str
    word: str
    css: str
    expression: str
    measured: str
    interval: str
    n: str
    note: str
    raw: str


def sentence(summary: Mapping[str, Any]) -> str:
    """The verdict's own sentence: the SLO that decided it, or why there is none."""
    verdict, slos = summary["verdict"], summary["slo"]
    if verdict == "INVALID":
        return "Not valid as a measurement."
    telling = next((slo for slo in slos if slo["status"] == verdict), None)
    if telling is None:
        return "Measured; the scenario sets no SLO."
    told = as_sentence(telling["sentence"])
    if verdict != "PASS" or len(slos) == 1:
        return told
    return f"{len(slos)} of {len(slos)} SLOs met; the first: {told}"


def confidence_sentence(summary: Mapping[str, Any]) -> str:
    """How sure an answer is; nothing for a summary of an older version."""
    known = summary.get("confidence")
    if not known:
        return ""
    return f"Met and missed are each said at {100 * known['verdict']:g} % confidence (one side of the 95 % interval)."


def steady_sentence(summary: Mapping[str, Any]) -> str:
    """Whether there was a steady state, and how the first seconds differed; nothing for an older summary."""
    parts = (summary.get("steady"), summary.get("drift"))
    return " ".join(as_sentence(part["sentence"]) for part in parts if part and part["sentence"])


def owner_sentence(summary: Mapping[str, Any]) -> str:
    """What slow requests wait for beyond typical ones, and whose it is; nothing without a ledger."""
    told, stage = summary["tail"]["sentence"], summary["tail"]["stage"]
    return as_sentence(told.replace(f" is {stage} (", f" is {marks.words(stage)} (")) if told else ""


def reasons(summary: Mapping[str, Any]) -> list[str]:
    """Why the run is not valid, a sentence each."""
    return [as_sentence(reason) for reason in summary["invalid_reasons"]]


def upgrade_sentence(summary: Mapping[str, Any]) -> str:
    told = summary["upgrade"]["sentence"]
    return as_sentence(told) if told else ""


def trust_figures(summary: Mapping[str, Any]) -> str:
    """The figures of the trust line, without its first word."""
    return str(summary["trust"]["sentence"]).partition(": ")[2]


def target(manifest: Mapping[str, Any]) -> str:
    """What was loaded: engine and its version, model, precision, batch cap; of a foreign server, where it is."""
    server, reached = manifest["scenario"]["server"], manifest.get("target", {})
    if server["engine"] == "attach":
        return " · ".join(str(part) for part in (reached.get("url", server.get("url")), reached.get("model")) if part)
    parts = [engine_words(manifest), server.get("model"), server.get("precision")]
    parts.append(f"max batch {server['max_batch']}" if server.get("max_batch") else None)
    return " · ".join(str(part) for part in parts if part)


def engine_words(manifest: Mapping[str, Any]) -> str:
    """The engine and its version, where it is known."""
    engine, reached = str(manifest["scenario"]["server"]["engine"]), manifest.get("target", {})
    versions = {**manifest.get("versions", {}), **reached.get("versions", {})}
    return f"{engine} {versions.get(engine) or versions.get(f'{engine}-cpu') or ''}".strip()


def load(summary: Mapping[str, Any]) -> str:
    """How it was loaded: rate and loop, how long, how many requests are behind the figures."""
    known, counts = summary["load"], summary["counts"]
    opened = known["loop"] == "open"
    how = f"{_asked(known)}{_shape(known)} open loop" if opened else f"{users(known)}, closed loop"
    return f"{how}, {known['window_s']:.0f} s, n = {count(counts['measured'])}"


def users(load: Mapping[str, Any]) -> str:
    """Who asks in a closed loop. How many users of a locustfile there are may be its shape's affair."""
    if load.get("locustfile"):
        return f"users of {load['locustfile']}"
    return f"{load['concurrency']} users{'' if load.get('unit', 'requests') == 'requests' else ' in conversations'}"


def _asked(load: Mapping[str, Any]) -> str:
    if load.get("unit", "requests") == "requests":
        return rate(load["requested_rate"] or load["delivered_rate"])
    return f"{load['requested_rate']:.3g} {load['unit']}/s, {rate(load['delivered_rate'])}"


def _shape(load: Mapping[str, Any]) -> str:
    """What a mean rate does not say of the arrivals."""
    if load.get("rate_range"):
        low, high = load["rate_range"]
        return f" on average ({load['arrivals']}, {low:.3g} to {high:.3g})"
    return f" ({load['arrivals']})" if load["arrivals"] in ("gamma", "trace") else ""


def caveat(summary: Mapping[str, Any]) -> str:
    """What a closed loop's figures are not; "" for an open loop."""
    known = summary.get("closed_loop")
    return f"{known['sentence'][:1].upper()}{known['sentence'][1:]}." if known else ""


def turns_of(summary: Mapping[str, Any]) -> str:
    """How a conversation's first turn differs from the later ones; "" where there are no conversations."""
    return str(summary["words"]["turns"] or "")


def slo_lines(summary: Mapping[str, Any]) -> list[SloLine]:
    return [_slo_line(slo) for slo in summary["slo"]]


def _slo_line(slo: Mapping[str, Any]) -> SloLine:
    value = slo["value_share" if slo["metric"] == "errors" else "value_ms"]
    status = slo["status"]
    return SloLine(
        status=status,
        sign=SIGNS[status],
        word=WORDS[status],
        css=_CSS[status],
        expression=slo["text"],
        measured=slo_value(slo),
        interval=slo_interval(slo),
        n=count(slo["count"]),
        note=_note(slo),
        raw="null" if value is None else repr(value),
    )


def _note(slo: Mapping[str, Any]) -> str:
    """What the slow ones wait for, or what it would take to decide."""
    needs = slo["needs"]
    if slo["status"] == "INCONCLUSIVE":
        if needs is None:
            return "too close to decide"
        minutes = needs["minutes"]
        span = f"~{minutes:.0f} min" if minutes and minutes >= 1 else ""
        return f"needs {span} more" if span else f"needs {count(needs['requests'])} more requests"
    if slo["status"] == "INVALID":
        return "never occurred"
    return marks.words(slo["stage"]) if slo["stage"] else ""


def limits(summary: Mapping[str, Any]) -> dict[str, list[tuple[float, float, str]]]:
    """The latency SLOs of each metric: percentile as a fraction, ms, expression."""
    found: dict[str, list[tuple[float, float, str]]] = {}
    for slo in summary["slo"]:
        if slo["metric"] != "errors":
            found.setdefault(slo["metric"], []).append((slo["percentile"] / 100, slo["limit_ms"], slo["text"]))
    return found


def main_limit(summary: Mapping[str, Any], metric: str) -> tuple[float, str] | None:
    """The SLO that a picture of slow requests shows: the one on the highest percentile."""
    known = limits(summary).get(metric, [])
    return max(known, key=lambda limit: limit[0])[1:] if known else None


@dataclass(frozen=True, slots=True)
class Advice:
    """What was seen, its likely cause, the flag to try."""

    text: str
    cause: str
    flag: str


def warnings(summary: Mapping[str, Any]) -> list[Advice]:
    return [
        Advice(as_sentence(w["text"]), f"Likely: {_stop(w['cause'])}" if w["cause"] else "", w["flag"])
        for w in summary["warnings"]
    ]


def as_sentence(text: str) -> str:
    named = text[1:2].isdigit()  # p99 stays p99
    return _stop(text if named else text[:1].upper() + text[1:])


def _stop(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."


@dataclass(frozen=True, slots=True)
class CheckLine:
    rule: str
    text: str
    word: str
    css: str


def checks(summary: Mapping[str, Any]) -> list[CheckLine]:
    return [
        CheckLine(check["rule"].replace("_", " "), check["text"], *_CHECKS[check["status"]])
        for check in summary["checks"]
    ]


@dataclass(frozen=True, slots=True)
class UpgradeRow:
    metric: str
    percentile: str
    now: str
    low: str
    high: str


def upgrade_rows(
    summary: Mapping[str, Any], percentiles: Iterable[str] = ("p50", "p90", "p95", "p99")
) -> list[UpgradeRow]:
    rows = []
    for metric in ("ttft", "e2e"):
        known = summary["upgrade"].get(metric)
        for p in percentiles if known else ():
            now, low, high = (known[end].get(f"{p}_ms") for end in ("now", "lower", "upper"))
            rows.append(UpgradeRow(metric.upper(), p, duration(now), duration(low), duration(high)))
    return rows
