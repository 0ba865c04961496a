"""Whether the SLOs hold: each answer in a sentence, what a person reads first, the table and the gauges."""

from __future__ import annotations

import math

from gapmeter.analysis.judge.words import late_words, not_judged, outage_text
from gapmeter.analysis.numbers import DASH, bounds, count, duration, share
from gapmeter.analysis.results.distribution import AtMost, figure_name
from gapmeter.analysis.results.latency import explained_by
from gapmeter.analysis.results.run import FAIL, INCONCLUSIVE, INVALID, PASS, RunResult, SloAnswer
from gapmeter.report.document import BRIEF, Code, Column, Figure, Gauge, Headers, Mark, Paragraph, Row, Section, Table
from gapmeter.report.why import (
    deciding,
    excess_sentence,
    is_probable,
    is_unmeasured,
    tail_sentence,
    through_failures,
    typical_misses,
    whose,
)
from gapmeter.report.words import about_minutes, as_sentence, how_much_more, more_requests, of_all

_MOST_DIGITS = 9
_TENTHS = 10  # of a bar
_ANSWERS = {
    PASS: Mark("met", "good", "v", PASS),
    FAIL: Mark("missed", "bad", "x", FAIL),
    INCONCLUSIVE: Mark("undecided", "open", "?", INCONCLUSIVE),
    INVALID: Mark("not measured", "bad", "-", INVALID),
}


def headline(result: RunResult) -> str:
    """What a person reads first: the verdict's reason, then what explains the slow requests."""
    if result.verdict == INVALID:
        return f"not valid as a measurement: {'; '.join(result.invalid_reasons)}"
    telling = deciding(result)
    if telling is None:
        return "measured; no SLO was set"
    text = slo_sentence(telling, changed_meanwhile(result, telling))
    if result.verdict == PASS:
        text = f"{len(result.slo)} of {len(result.slo)} SLOs met; {text}"
    slow = None if through_failures(result, telling) else result.tail.of(telling.metric)
    if slow and result.verdict == FAIL and typical_misses(slow, telling):
        text = f"{text}. {as_sentence(excess_sentence(result, telling)).removesuffix('.')}"
    return f"{text}. {as_sentence(tail_sentence(slow, telling.metric, result.device))}" if slow else f"{text}."


def verdict_sentence(result: RunResult) -> str:
    """The answer in a line: the SLO that decided it, with its figure and its limit, or why there is none."""
    if result.verdict == INVALID:
        return "Not valid as a measurement."
    telling = max(result.slo, key=_used, default=None) if result.verdict == PASS else deciding(result)
    if telling is None:
        return "Measured; the scenario sets no SLO."
    said = brief_answer(telling)
    if result.verdict == PASS:
        many = len(result.slo)
        return f"All {many} SLOs met; closest to its limit: {said}." if many > 1 else f"SLO met: {said}."
    if result.verdict == INCONCLUSIVE:
        return f"{said}: {_needed(result, telling)}."
    if telling.outage is not None:
        return as_sentence(f"{outage_text(telling.outage)}: {said}")
    excess = "" if through_failures(result, telling) else excess_sentence(result, telling)
    return f"{said}{f': {excess}' if excess else ''}."


def brief_answer(answer: SloAnswer) -> str:
    """``p99 TTFT 31.0 ms, limit 60.0 ms``: what is known, and the limit."""
    name = "errors" if answer.metric == "errors" else figure_name(answer.metric, answer.percentile)
    value, limit = slo_value(answer), str(Figure(answer.limit, answer.unit))
    if answer.metric == "errors":
        value += f" ({count(answer.beyond)} of {count(answer.count)})"
    elif answer.among_failures:
        value = f"has {value} ({_failures(answer)})"
    elif answer.status == PASS and answer.basis == "far" and answer.late is None:
        limit += f" ({share(answer.sure)} sure)"  # by how far below it all are, not by a bound
    elif answer.status == PASS and answer.at_most is not None and (answer.value is None or answer.late is not None):
        value = at_most(answer.at_most)
    elif answer.status == FAIL and answer.value is None and answer.low is not None:
        value = f"{value}, at least {_time(answer.low)}" if answer.basis == "interval" else value
    return f"{name} {value}, limit {limit}{_beyond(answer)}"


def _failures(answer: SloAnswer) -> str:
    """Why a percentile has no value."""
    what = "never came" if answer.metric == "itl" else "failed"
    return f"more than {100 - (answer.percentile or 0.0):.6g} % {what}"


def _used(answer: SloAnswer) -> float:
    """How much of its limit an SLO takes up, by the highest that is known of it; infinite where that is nothing."""
    high = answer.high if answer.high is not None else answer.at_most.ms if answer.at_most else answer.sample
    if high is None or answer.infinite:
        return math.inf
    return high / answer.limit if answer.limit else math.inf if high else 0.0


def slo_sentence(answer: SloAnswer, changed: str = "") -> str:
    """What was found of one SLO, and what that says of its limit; ``changed``: why more requests may not decide it."""
    if answer.metric == "errors":
        said = f"{count(answer.beyond)} of {count(answer.count)} requests failed"
        said += f" ({slo_value(answer)}, 95 % interval {slo_interval(answer)})" if answer.count else ""
        limit = f"the limit of {share(answer.limit)}"
    else:
        said, limit = _latency(answer), f"the limit of {_time(answer.limit)}"
        if answer.status == INVALID:
            return said
    if answer.resent is not None:
        said += f"; {_in_doubt(answer)}: undecided against {limit}"
    elif answer.status == INCONCLUSIVE and changed:
        said += f": undecided against {limit}; {changed}"
    elif answer.status != INCONCLUSIVE or answer.needs is None:
        sure = f", {share(answer.sure)} sure" if answer.sure and answer.basis in ("far", "share") else ""
        said += {
            PASS: f": within {limit}{sure}",
            FAIL: f": beyond {limit}{sure}",
            INVALID: ": no request was measured",
            INCONCLUSIVE: f": too close to {limit} for any sample of reasonable size to decide",
        }[answer.status]
    else:
        minutes = f" ({about})" if (about := about_minutes(answer.needs)) else ""
        needs = f"needs about {more_requests(answer.needs)}{minutes}"
        said += f": {'; '.join(filter(None, (f'undecided against {limit}', leaning(answer), needs)))}"
    if answer.outage is not None:
        said += f", since {outage_text(answer.outage)}"
    if (far := answer.far) is not None:
        few = count(far.beyond) if far.beyond else "none"
        near = f"{few} exceeded half of it" if far.part == 0.5 else f"none took over {_time(far.part * answer.limit)}"
        said += f"; no request exceeded it, and {near}"
    return said + _beyond(answer)


def _in_doubt(answer: SloAnswer) -> str:
    """What the share of failures may be, if the server dropped the requests that were sent a second time."""
    again = answer.resent or 0
    most = share((again + (answer.beyond or 0)) / answer.count)
    return f"{most} if the {count(again)} resent requests count as dropped"


def leaning(answer: SloAnswer) -> str:
    """What an undecided one probably is: ``probably met, 89 % sure``; "" where that is open."""
    if (leans := answer.leaning) is None:
        return ""
    return f"probably {'met' if leans.status == PASS else 'missed'}, {share(leans.sure)} sure"


def _beyond(answer: SloAnswer) -> str:
    """How many exceeded the limit, where that decided."""
    if answer.basis != "share" or not answer.beyond or answer.metric == "errors":  # which are its figure
        return ""
    of = "token gaps" if answer.metric == "itl" else "requests"
    return f"; {share(answer.beyond / answer.count)} of the {of} exceeded it"


def _latency(answer: SloAnswer) -> str:
    name = figure_name(answer.metric, answer.percentile)
    if answer.status == INVALID:
        return not_judged(answer)
    worth = count(answer.n_eff) if answer.n_eff >= 1 else "less than one"
    size = f"n = {count(answer.count)}, effective n = {worth}"
    if answer.among_failures:
        least = f", and is at least {_time(answer.low)}" if answer.low is not None else ""
        return f"{name} is undefined, since {_failures(answer)}{least} ({size})"
    if answer.late is not None:
        most = f"; it is {bound}" if (bound := at_most(answer.at_most)) else ""
        return f"{name} refused, since {late_words(answer.late)}{most} ({size})"
    if answer.value is not None:
        # An end above the value that is no number is one that answers which never came reach.
        low, high = (_time(ms if ms is not None else math.inf) for ms in (answer.low, answer.high))
        return f"{name} {slo_value(answer)}, 95 % interval {low} .. {high} ({size})"
    if answer.status == INCONCLUSIVE and answer.needs is None and (needs := answer.estimable_with):
        span = f", {about}," if (about := about_minutes(needs)) else ""
        size += f"; an estimate needs {more_requests(needs)}{span} like these"
    known = f"; {highest}" if (highest := highest_known(answer)) else ""
    least = f", at least {_time(answer.low)}" if answer.low is not None else ""
    most = f", {bound}" if (bound := at_most(answer.at_most)) else ", no upper bound from this sample"
    return f"{name} about {duration(answer.sample)}{least}{most} ({size}{known})"


def at_most(bound: AtMost | None) -> str:
    """``at most 31.0 ms (97 % sure)``; "" without a bound."""
    return f"at most {duration(bound.ms)} ({share(bound.confidence)} sure)" if bound else ""


def highest_known(answer: SloAnswer) -> str:
    """``p95 22.9 ms, 20.1 .. 25.3 ms``: the highest percentile that has both ends, where the SLO's own has not."""
    if (known := answer.highest) is None:
        return ""
    return f"p{known.percentile:g} {duration(known.value_ms)}, {bounds(*known.ci_ms)}"


def _time(ms: float) -> str:
    return "never (failed requests)" if math.isinf(ms) else duration(ms)


def slo_value(slo: SloAnswer) -> str:
    """What was measured for an SLO; ``~`` marks what the sample has where it does not support the percentile.

    One that misses its limit by little has as many digits as tell it from that.
    """
    if slo.late is not None:
        return "refused"
    if slo.among_failures:
        return "no value"
    if slo.value is None:
        return DASH if slo.sample is None else f"~{duration(slo.sample)}"
    words, fewest = (share, 2) if slo.unit == "share" else (duration, 3)
    most = _MOST_DIGITS if slo.status == FAIL and slo.value > slo.limit else fewest
    said = ((words(slo.value, digits), words(slo.limit, digits)) for digits in range(fewest, most + 1))
    return next((value for value, limit in said if value != limit), words(slo.value, fewest))


def slo_interval(slo: SloAnswer) -> str:
    """Its 95 % interval; where it lacks an end the bound that there is, but where it is missed the lower end."""
    if slo.late is not None:
        return at_most(slo.at_most) or DASH
    if slo.unit == "share":
        return f"{share(slo.low)} .. {share(slo.high)}" if slo.count else "not estimable"
    if slo.basis == "share" and slo.beyond and (slo.low or 0.0) <= slo.limit:  # what decides, not an end that may not
        return f"{share(slo.beyond / slo.count)} beyond the limit"
    if slo.low is not None and slo.high is None and (slo.at_most is None or slo.status == FAIL):
        return f"{duration(slo.low)} or more"
    return at_most(slo.at_most) or bounds(slo.low, slo.high)


def gauge(slo: SloAnswer) -> Gauge:
    """How sure an SLO is, beside its limit. Its band ends at what is proven: a bound, or a limit far away."""
    limit = Figure(slo.limit, slo.unit)
    value = slo.value if slo.value is not None or slo.infinite else slo.sample
    value, low, high = (None, None, None) if slo.late is not None else (value, slo.low, slo.high)
    if high is None:
        high = slo.at_most.ms if slo.at_most else slo.limit if slo.basis == "far" else None
    return Gauge(
        _ANSWERS[slo.status], slo.text, slo_value(slo), slo_interval(slo), limit, value, low, high, slo.infinite,
    )  # fmt: skip


def objectives(result: RunResult) -> Section:
    """On the page: every objective with what was measured, its interval, and whose the slow ones are."""
    rows: list[Row] = [
        [_ANSWERS[slo.status], Code(slo.text), _measured(at, slo), slo_interval(slo), count(slo.count),
         "; ".join(filter(None, (_missing(result, slo), highest_known(slo), explained(result, slo))))]
        for at, slo in enumerate(result.slo)
    ]  # fmt: skip
    headers: Headers = [
        "answer", _of("objective", result), Column("measured", wraps=True),
        Column("95 % interval, or bound", wraps=True), "n",
        Column("what is missing, or explains the slow ones", wraps=True),
    ]  # fmt: skip
    title, sure = "Service level objectives", 100 * result.confidence.verdict
    if not rows:
        none = [Paragraph("The scenario names none, so there is nothing to pass or fail.")]
        return Section("slo", title, none, short="objectives")
    lead = f"Met and missed mean {sure:g} % confidence or more, one-sided"
    if any(slo.basis == "share" and 100 * (slo.sure or 0.0) < sure for slo in result.slo):
        lead += "; a limit that most requests exceed is missed in any case"
    return Section("slo", title, [Table(title, headers, rows, words=2)], f"{lead}.", "objectives")


def objectives_in_short(result: RunResult) -> Section | None:
    """For the terminal and Markdown: a line an objective, with how much of its limit is used, or what is missing."""
    rows: list[Row] = [
        [_ANSWERS[slo.status], _name(slo), _measured(at, slo), slo_interval(slo), Figure(slo.limit, slo.unit),
         _missing(result, slo, leans=False) or _bar(slo)]
        for at, slo in enumerate(result.slo)
    ]  # fmt: skip
    headers: Headers = [
        Column("answer", brief=" "), _of("SLO", result), "measured", Column("95 % interval", wraps=True), "limit",
        Column("used", wraps=True),
    ]  # fmt: skip
    return Section("slo", "", [Table("Objectives", headers, rows, words=2)], on=BRIEF) if rows else None


def _of(name: str, result: RunResult) -> str:
    """The name, with how many requests are judged where failed ones are among them."""
    return f"{name}, {of_all(result)}" if result.failures else name


def _measured(at: int, slo: SloAnswer) -> Figure:
    return Figure(slo.value, slo.unit, f"slo.{at}.value_{slo.unit}", text=slo_value(slo))


def _name(slo: SloAnswer) -> str:
    return "errors" if slo.metric == "errors" else f"{slo.metric.upper()} p{slo.percentile:g}"


def _missing(result: RunResult, slo: SloAnswer, *, leans: bool = True) -> str:
    """What would decide an SLO that is not, and which way it leans; why a percentile has no value."""
    if slo.status == INVALID:
        return "never occurred" if slo.late is None else late_words(slo.late)
    none = late_words(slo.late) if slo.late is not None else _failures(slo) if slo.among_failures else ""
    return "; ".join(filter(None, (none, _needed(result, slo, leans=leans) if slo.status == INCONCLUSIVE else "")))


def changed_meanwhile(result: RunResult, answer: SloAnswer) -> str:
    """Why more of the same may not decide what is undecided; "" where it may, as it does of failures."""
    if answer.metric == "errors":
        return ""
    if any(one.code == "short-warmup" for one in result.warnings):
        return "load.warmup=auto may decide it"
    return "latency changed during the run" if result.steady.state == "unsteady" else ""


def _needed(result: RunResult, slo: SloAnswer, *, leans: bool = True) -> str:
    if slo.resent is not None:
        return _in_doubt(slo)
    if changed := changed_meanwhile(result, slo):
        return changed
    needs = f"needs {how_much_more(slo.needs)}" if slo.needs else "too close to decide"
    return "; ".join(filter(None, (leaning(slo) if leans else "", needs)))


def explained(result: RunResult, slo: SloAnswer) -> str:
    """The owner of the extra time of slow ones, where one clearly leads, or probably; or that nothing measured it."""
    slow = result.tail.of(explained_by(slo.metric))
    if slow is None or result.verdict == INVALID:
        return ""
    known, probably = slow.leading is not None or is_unmeasured(slow), is_probable(slow)
    named = f"{'probably ' * probably}{whose(slow.owners[0], result.device)}"
    return named if known or probably else "no single cause"


def _bar(slo: SloAnswer) -> str:
    """How much of its limit it uses, by the highest that is known; ``!`` goes beyond it."""
    used = _used(slo)
    if math.isinf(used) or used > 1:
        return f"|{'#' * _TENTHS}|!"
    tenths = round(_TENTHS * used)
    return f"|{'#' * tenths}{'.' * (_TENTHS - tenths)}|"
