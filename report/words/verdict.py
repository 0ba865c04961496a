"""Whether the SLOs hold: the answers, and what a person reads first."""

from __future__ import annotations

import math

from gapmeter.analysis.numbers import count, duration, share
from gapmeter.analysis.results.distribution import Needs
from gapmeter.analysis.results.run import FAIL, INVALID, PASS, RunFigures, SloAnswer
from gapmeter.report.words.waits import tail_sentence


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


def slo_sentence(answer: SloAnswer) -> str:
    """What was found of one SLO, and what that says of its limit."""
    if answer.metric == "errors":
        measured, limit = _errors(answer), share(answer.limit)
    else:
        measured, limit = _latency(answer), _time(answer.limit)
    if answer.metric != "errors" and answer.status == INVALID:
        return measured
    said = f"{measured}{_outcome(answer, f'the limit of {limit}')}"
    if answer.beyond_half is not None:
        said += (
            f", which no request exceeded, and {count(answer.beyond_half) if answer.beyond_half else 'none'} its half"
        )
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
    if answer.needs is None and answer.beyond_half is None and answer.estimable_with is not None:
        size += f"; {_longer(answer.estimable_with)}"
    if answer.low is not None:
        return f"{name} above {_time(answer.low)}, no upper end from this sample ({size})"
    return f"{name} not estimable ({size})"


def _errors(answer: SloAnswer) -> str:
    said = f"{count(round((answer.value or 0.0) * answer.count))} of {count(answer.count)} requests failed"
    if not answer.count:
        return said
    return f"{said} ({share(answer.value)}, 95 % interval {share(answer.low)} .. {share(answer.high)})"


def _longer(needs: Needs) -> str:
    """The run length from which the interval would have both ends."""
    span = f", about {needs.minutes:.0f} min," if needs.minutes and needs.minutes >= 1 else ""
    return f"estimable with {count(needs.requests)} more requests{span} like these"


def _outcome(answer: SloAnswer, limit: str) -> str:
    if answer.status == PASS:
        return f": within {limit}"
    if answer.status == FAIL:
        return f": beyond {limit}"
    if answer.status == INVALID:
        return ": no request was measured"
    if answer.needs is None:
        return f": too close to {limit} for any sample of reasonable size to decide"
    minutes = answer.needs.minutes
    span = f" (about {minutes:.0f} min)" if minutes and minutes >= 1 else ""
    return f": undecided against {limit}; needs about {count(answer.needs.requests)} more requests{span}"


def _time(ms: float) -> str:
    return "never (failed requests)" if math.isinf(ms) else duration(ms)
