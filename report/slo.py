"""Whether the SLOs hold: each answer in a sentence, what a person reads first, the table and the gauges."""

from __future__ import annotations

import math

from gapmeter.analysis.numbers import bounds, count, duration, share
from gapmeter.analysis.results.run import FAIL, INCONCLUSIVE, INVALID, PASS, RunFigures, RunResult, SloAnswer
from gapmeter.report import marks
from gapmeter.report.document import (
    PAGE,
    Code,
    Column,
    Figure,
    Gauge,
    Headers,
    Mark,
    Medium,
    Paragraph,
    Row,
    Section,
    Table,
)
from gapmeter.report.waits import tail_sentence
from gapmeter.report.words import about_minutes, as_sentence

_ANSWERS = {
    PASS: Mark("met", "good", "v", PASS),
    FAIL: Mark("missed", "bad", "x", FAIL),
    INCONCLUSIVE: Mark("undecided", "open", "?", INCONCLUSIVE),
    INVALID: Mark("not measured", "bad", "-", INVALID),
}


def headline(result: RunFigures) -> str:
    """What a person reads first: the verdict's reason, then what explains the slow requests."""
    if result.verdict == INVALID:
        return f"not valid as a measurement: {'; '.join(result.invalid_reasons)}"
    telling = next((answer for answer in result.slo if answer.status == result.verdict), None)
    if telling is None:
        return "measured; no SLO was set"
    text = slo_sentence(telling)
    if result.verdict == PASS:
        text = f"{len(result.slo)} of {len(result.slo)} SLOs met; {text}"
    slow = result.tail.of(telling.metric)
    return f"{text}. {tail_sentence(slow, telling.metric, result.device)}." if slow else f"{text}."


def verdict_sentence(result: RunResult) -> str:
    """The SLO that decided the verdict, or why there is none."""
    if result.verdict == INVALID:
        return "Not valid as a measurement."
    telling = next((slo for slo in result.slo if slo.status == result.verdict), None)
    if telling is None:
        return "Measured; the scenario sets no SLO."
    sentence, many = as_sentence(slo_sentence(telling)), len(result.slo)
    return sentence if result.verdict != PASS or many == 1 else f"{many} of {many} SLOs met; the first: {sentence}"


def slo_sentence(answer: SloAnswer) -> str:
    """What was found of one SLO, and what that says of its limit."""
    if answer.metric == "errors":
        said = f"{count(round((answer.value or 0.0) * answer.count))} of {count(answer.count)} requests failed"
        said += f" ({share(answer.value)}, 95 % interval {slo_interval(answer)})" if answer.count else ""
        limit = f"the limit of {share(answer.limit)}"
    else:
        said, limit = _latency(answer), f"the limit of {_time(answer.limit)}"
        if answer.status == INVALID:
            return said
    if answer.status != INCONCLUSIVE or answer.needs is None:
        said += {
            PASS: f": within {limit}",
            FAIL: f": beyond {limit}",
            INVALID: ": no request was measured",
            INCONCLUSIVE: f": too close to {limit} for any sample of reasonable size to decide",
        }[answer.status]
    else:
        minutes = f" ({about})" if (about := about_minutes(answer.needs)) else ""
        said += f": undecided against {limit}; needs about {count(answer.needs.requests)} more requests{minutes}"
    if answer.beyond_half is not None:
        half = count(answer.beyond_half) if answer.beyond_half else "none"
        said += f", which no request exceeded, and {half} its half"
    return said


def _latency(answer: SloAnswer) -> str:
    name = f"p{answer.percentile:g} {answer.metric.upper()}"
    if answer.status == INVALID:
        return f"{name} never occurred: no request had one"
    worth = count(answer.n_eff) if answer.n_eff >= 1 else "less than one"
    size = f"n = {count(answer.count)}, worth {worth} independent"
    if answer.infinite and answer.low is None:
        return f"{name} never: more requests failed than it may leave out ({size})"
    if answer.value is not None or answer.infinite:
        # An end above the value that is no number is one that answers which never came reach.
        value, low, high = (_time(ms if ms is not None else math.inf) for ms in (answer.value, answer.low, answer.high))
        return f"{name} {value}, 95 % interval {low} .. {high} ({size})"
    # What decides is said after this, and is what counts.
    if answer.needs is None and answer.beyond_half is None and (needs := answer.estimable_with):
        span = f", {about}," if (about := about_minutes(needs)) else ""
        size += f"; estimable with {count(needs.requests)} more requests{span} like these"
    if answer.low is not None:
        return f"{name} above {_time(answer.low)}, no upper end from this sample ({size})"
    return f"{name} not estimable ({size})"


def _time(ms: float) -> str:
    return "never (failed requests)" if math.isinf(ms) else duration(ms)


def slo_value(slo: SloAnswer) -> str:
    """What was measured for an SLO."""
    return share(slo.value) if slo.unit == "share" else "never" if slo.infinite else duration(slo.value)


def slo_interval(slo: SloAnswer) -> str:
    """Its 95 % interval; one end where there is only one."""
    if slo.unit == "share":
        return f"{share(slo.low)} .. {share(slo.high)}"
    if slo.low is not None and slo.high is None:
        return f"above {duration(slo.low)}"
    return bounds(slo.low, slo.high)


def gauge(slo: SloAnswer) -> Gauge:
    """How sure an SLO is, beside its limit."""
    limit = Figure(slo.limit, slo.unit)
    return Gauge(
        _ANSWERS[slo.status], slo.text, slo_value(slo), slo_interval(slo), limit, slo.value, slo.low, slo.high,
        slo.infinite,
    )  # fmt: skip


def objectives(result: RunResult, on: Medium) -> Section:
    """Every objective with what was measured, its interval, and what the slow ones wait for or what would decide it."""
    rows: list[Row] = []
    for at, slo in enumerate(result.slo):
        note = marks.words(slo.stage) if slo.stage else ""
        if slo.status == INVALID:
            note = "never occurred"
        elif slo.status == INCONCLUSIVE and slo.needs:
            requests = f"{count(slo.needs.requests)} more {'requests' if on is PAGE else 'req'}"
            minutes = about_minutes(slo.needs).replace("about ", "~")
            note = f"needs {f'{minutes} more' if minutes else requests}"
        elif slo.status == INCONCLUSIVE:
            note = "too close to decide"
        measured = Figure(slo.value, slo.unit, f"slo.{at}.value_{slo.unit}", text=slo_value(slo))
        rows.append([_ANSWERS[slo.status], Code(slo.text), measured, slo_interval(slo), count(slo.count), note])
    headers: Headers = [
        Column("answer", brief=" "), Column("objective", brief="SLO"), Column("measured", wraps=True),
        Column("95 % interval", wraps=True), "n",
        Column("largest part, or what is missing", brief="slow ones wait for", wraps=True),
    ]  # fmt: skip
    title, sure = "Service level objectives", 100 * result.confidence.verdict
    if rows:
        lead = f"Met and missed are each said at {sure:g} % confidence (one side of the 95 % interval)."
        return Section("slo", title, [Table(title, headers, rows, words=2)], lead, "objectives", on)
    none = [Paragraph("The scenario names none, so there is nothing to pass or fail.")] if on is PAGE else []
    return Section("slo", title, none, "", "objectives", on)
