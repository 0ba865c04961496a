"""What grows from point to point of a sweep, and where its curves turn: sentences, and the section."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from gapmeter.analysis.numbers import DASH, duration, share, significant, usd
from gapmeter.analysis.results.cost import Cost
from gapmeter.analysis.results.distribution import figure_name
from gapmeter.analysis.results.pareto import Pareto
from gapmeter.analysis.results.run import FAIL, INCONCLUSIVE, INVALID, PASS, Verdict
from gapmeter.analysis.results.sweep import THROUGHPUT, CurveKnee, Growth, Point, SweepFigures, SweepResult
from gapmeter.analysis.sweep.curves import KNEE, NONE, UNDECIDED
from gapmeter.analysis.sweep.growth import SLOW_LEVEL
from gapmeter.report import marks
from gapmeter.report.document import Block, Figure, Headers, Heading, Name, Paragraph, Row, Section, Table, in_ms
from gapmeter.report.words import WHOLE, both, how_much_more, interval, part_of, shares, signed

_GROWTH = (
    "From each point to the next, and which stage makes up most of it. 95 % block-bootstrap intervals, "
    "because neighboring requests are correlated. More than all: the other stages together went the other way."
)
_KNEE = (
    "The knee is one of the measured points: where throughput stops growing (doubling the load brings less than 15 % "
    "more), or where latency begins to climb (furthest below the line between the curve's ends: Kneedle, Satopää and "
    "others 2011). It is named only if 95 % of the redraws of the points, within their uncertainty, have one."
)

_LONGEST_MIN = 60  # more of a point than that is as good as never


def headline(sweep: SweepFigures, device: str) -> list[str]:
    """What a person reads first: which points meet the SLOs, a sentence a curve, and which points have no figures."""
    said = [line for line in (_answer(sweep),) if line]
    said += [line for knee in sweep.knees for line in _knee_lines(knee, sweep.growth, device)]
    if sweep.growth and not any(knee.state == KNEE for knee in sweep.knees):
        largest = [  # of each metric, of those that go beyond their interval
            max(sure, key=lambda growth: abs(growth.grows_ms or 0.0))
            for metric in dict.fromkeys((sweep.metric, "itl"))
            if (sure := [growth for growth in sweep.growth if growth.metric == metric and growth.is_sure])
        ]
        said += [f"{growth_sentence(growth, device)}." for growth in largest]
        said += [] if largest else [_no_growth(sweep.growth)]
    invalid = [point.label for point in sweep.points if point.verdict == INVALID]
    if invalid:
        said.append(f"Left out of curves and comparisons (not valid as a measurement): {_listed(invalid)}.")
    lost = [point.label for point in sweep.points if not isinstance(point, Point)]
    if lost:
        said.append(f"No figures for {len(lost)} of {len(sweep.points)} points: {_listed(lost)}.")
    return said


def _listed(labels: Sequence[str]) -> str:
    """Points' names; in brackets where a name of several values has a comma of its own."""
    if len(labels) > 1 and any(", " in label for label in labels):
        labels = [f"({label})" for label in labels]
    return ", ".join(labels)


def _no_growth(growths: Sequence[Growth]) -> str:
    """That no growth goes beyond its interval; what has none is not alike for that."""
    unknown = [growth for growth in growths if both(growth.grows_ci_ms) is None]
    names = list(dict.fromkeys(figure_name(growth.metric, growth.percentile) for growth in unknown))
    why = f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} refused or not estimable"
    if len(unknown) == len(growths):
        return f"No two neighboring points can be compared: {why}."
    alike = "No two neighboring points differ by more than the interval of their difference"
    return f"{alike}, as far as they can be compared: {why} at some." if unknown else f"{alike}."


def _answer(sweep: SweepFigures) -> str:
    """Which settings meet the SLOs, and which of these is the cheapest, or else serves most; "" without SLOs."""
    points = [point for point in sweep.points if isinstance(point, Point) and point.slo]
    if not points:
        return ""
    by = {state: [point for point in points if point.verdict == state] for state in (PASS, FAIL, INCONCLUSIVE)}

    def names(state: Verdict) -> str:
        return _listed([point.label for point in by[state]])

    rest = [f"missed at {names(FAIL)}"] if by[FAIL] else []
    undecided = [f"{point.label} ({_what_decides(point)})" for point in by[INCONCLUSIVE]]
    rest += [f"undecided at {', '.join(undecided)}"] if undecided else []
    none = "No point meets the SLOs" if len(by[FAIL]) == len(points) else "No point is shown to meet the SLOs"
    met = f"The SLOs are met at {names(PASS)}" if by[PASS] else none
    return f"{'; '.join([met, *rest])}.{_best(by[PASS], sweep.pareto)}"


def _what_decides(point: Point) -> str:
    """How much longer an undecided point would have to be measured, where that is worth saying."""
    needs = [answer.needs for answer in point.slo if answer.status == INCONCLUSIVE]
    known = [each for each in needs if each is not None and (each.minutes or 0) <= _LONGEST_MIN]
    if not known or len(known) < len(needs):
        return "longer runs would hardly decide it"
    return f"needs {how_much_more(max(known, key=lambda each: each.requests))}"


def _best(met: Sequence[Point], pareto: Pareto | None) -> str:
    """Which of the points that meet the SLOs is the cheapest: for a request at its rate, else for an output token."""
    if other := _different_requests(met):
        return f" They are not ranked, because their requests differ ({', '.join(other)})."
    priced = [(cost.per_request_usd, point.label) for point in met if isinstance(cost := point.economy.cost, Cost)]
    if priced and len(priced) == len(met):
        least = min(priced)[0]
        cheapest = [label for usd_each, label in priced if math.isclose(usd_each, least)]
        if len(cheapest) == len(priced) > 1:  # asked at one rate, all cost the same
            return ""
        which = f"{met[0].label} costs" if len(met) == 1 else f"Cheapest: {_listed(cheapest)},"
        return f" {which} at most {usd(1e6 * least)} for a million requests."
    costs = {each.folder: each.usd_per_million_output_tokens for each in pareto.points} if pareto else {}
    known = [(paid, point) for point in met if (paid := costs.get(point.folder)) is not None]
    if not known or len(known) < len(met):
        return _most_served(met)
    least_paid, best = min(known, key=lambda each: each[0].value)
    alike = [point.label for other, point in known if point is not best and not other.is_above(least_paid)]
    also = f"; {_listed(alike)} may be as cheap" if alike else ""
    tokens = significant(best.tokens_per_s or 0)
    which = f"{best.label} serves" if len(met) == 1 else f"Cheapest: {best.label},"
    return f" {which} {tokens} output tokens/s at {usd(least_paid.value)} a million{also}."


def _most_served(met: Sequence[Point]) -> str:
    served = [(tokens, point.label) for point in met if (tokens := point.tokens_per_s) is not None]
    if len(served) < 2:
        return ""
    tokens, label = max(served)
    return f" Highest throughput of these: {label}, {significant(tokens)} output tokens/s."


def _different_requests(points: Sequence[Point]) -> list[str]:
    """The workload's keys that differ between points: neither costs nor rates of different requests compare."""
    keys = dict.fromkeys(key for point in points for key in point.resolved if key.startswith("workload."))
    differ = [key for key in keys if len({str(point.resolved.get(key)) for point in points}) > 1]
    return [key.rpartition(".")[2] for key in differ]


def _knee_lines(knee: CurveKnee, growths: Sequence[Growth], device: str) -> Iterator[str]:
    lead = f"{knee.series}: " if knee.series else ""
    by = "" if knee.by == THROUGHPUT or not knee.certainty else f" (by {knee.by})"
    if knee.state == UNDECIDED:
        more = " Longer points or more repeats would decide it." if knee.certainty else ""
        yield f"{lead}Not decided whether there is a knee: {knee.why}{by}.{more}"
        return
    if knee.state == NONE:
        yield f"{lead}No knee among these points: {knee.why}{by}."
        return
    first, last = knee.range_labels or ("", "")
    where = "" if first == last else f" (between {first} and {last})"
    if knee.or_at:
        where += f", or at {' or '.join(knee.or_at)}, without valid figures"
    yield f"{lead}The knee is at {knee.label}{where}: {_turned(knee)}."
    beyond = [growth for growth in growths if growth.at_knee and growth.series == knee.series]
    for growth in beyond:
        if growth.is_sure or growth is beyond[0]:
            yield f"{lead}{growth_sentence(growth, device)}."


def _turned(knee: CurveKnee) -> str:
    if knee.by != THROUGHPUT:
        return f"{knee.by} begins to climb there"
    after = knee.after
    if after is None:
        return knee.why
    changes = [100 * (ratio - 1) for ratio in (after.ratio, *after.ratio_ci)]
    much, low, high = (f"{change:+.1f} %" for change in changes)
    # What still grows, but by less than the rule asks for, has not stopped.
    turned = "beyond it throughput grows little" if after.ratio_ci[0] > 1 else "throughput stops growing there"
    return f"{turned} (to {after.to} {much}, 95 % interval {low} to {high})"


def knee_details(knee: CurveKnee) -> str:
    """How sure the answer is, and of what."""
    lead = f"{knee.series}: " if knee.series else ""
    if knee.state == UNDECIDED:
        return f"{lead}Knee: not decided ({share(knee.certainty)} of draws have one): {knee.why}."
    ends = knee.range_labels
    between = f", between {ends[0]} and {ends[1]}" if ends and ends[0] != ends[1] else ""
    return f"{lead}Knee: {knee.label or 'none'}{between}, by {knee.by} ({share(knee.certainty)} of draws): {knee.why}."


# What grows


def growth_sentence(growth: Growth, device: str) -> str:
    """What grew from one point to the next; ``device``: what computed the forwards."""
    start = f"From {growth.from_} to {growth.to} {figure_name(growth.metric, growth.percentile)} "
    grows, ends = growth.grows_ms, both(growth.grows_ci_ms)
    if grows is None or ends is None:
        return f"{start}is not estimable at both"
    if not growth.is_sure:
        low, high = map(signed, ends)
        return f"{start}shows no clear change (95 % interval {low} to {high})"
    near, far = sorted(map(abs, ends))
    way = "grows" if grows > 0 else "falls"
    start += f"{way} by {duration(abs(grows))} (95 % interval {duration(near)} to {duration(far)})"
    if growth.stage is None or growth.share_ci is None or growth.share is None:
        return start
    if grows * (growth.band_grows_ms or 0.0) <= 0:
        return start
    stage = marks.with_owner(growth.stage, device)
    slowest = growth.percentile is not None and growth.percentile >= SLOW_LEVEL
    if growth.share > WHOLE:
        # A stage that changes by more than the whole does, since the others together go the other way.
        own = growth.stages_ms[growth.stage]
        others = abs((growth.band_grows_ms or 0.0) - own)
        one, rest = ("grows", "fall") if own > 0 else ("falls", "grow")
        who = "of the slowest ones " if slowest else ""
        beside = f"the other stages together {rest} by {duration(others)}"
        return f"{start}; {who}{stage} {one} by {duration(abs(own))} in the mean, {beside}"
    change = f"the {'extra' if grows > 0 else 'saved'} {'time of the slowest ones' if slowest else 'mean time'}"
    return f"{start}; {part_of(growth.share, growth.share_ci)} of {change} is {stage}"


# The section


def section(result: SweepResult) -> Section | None:
    """A table for each metric that is compared; None where no two points lie on one curve."""
    growth, blocks = result.sweep.growth, list[Block]()
    for metric in dict.fromkeys(each.metric for each in growth):
        own = [each for each in growth if each.metric == metric]
        level = own[0].percentile
        what = figure_name(metric, level)
        kind = "token gaps" if metric == "itl" else "requests"
        slow = level is not None and level >= SLOW_LEVEL
        which = f"the slowest {kind} (p98.5 and up, at least seven)" if slow else f"all {kind}"
        headers: Headers = [
            "from → to", *in_ms(f"{what} grows by"), "95 % interval", "largest stage", "owner", "its share",
            "95 % interval",
        ]  # fmt: skip
        rows = [_growth_row(each, result.device) for each in own]
        blocks.append(Heading(f"{what}; stages of the mean over {which}"))
        blocks.append(Table(f"What grows: {what}", headers, rows, words=1))
    knees = [Paragraph(knee_details(knee)) for knee in result.sweep.knees]
    notes = [*knees, Paragraph(_KNEE, "quiet")] if knees else []
    return Section("growth", "What grows", [*blocks, *notes], _GROWTH, "growth") if blocks else None


def _growth_row(growth: Growth, device: str) -> Row:
    same_way = (growth.grows_ms or 0.0) * (growth.band_grows_ms or 0.0) > 0  # else its stages do not tell of it
    stage = growth.stage if growth.is_sure and same_way else None
    nobody = DASH if growth.is_sure else "not beyond its interval"
    within = shares(growth.share_ci) if stage else ""  # a share without an interval is not shown
    part = part_of(growth.share or 0.0)
    if stage and (growth.share or 0.0) > WHOLE:
        part, within = f"{signed(growth.stages_ms[stage])}, {part}", within and DASH
    return [
        Name(f"{growth.from_} → {growth.to}{' (knee)' if growth.at_knee else ''}"), Figure(growth.grows_ms),
        interval(growth.grows_ci_ms),
        marks.words(stage) if stage else nobody, marks.owner(stage, device) if stage else DASH,
        Figure(growth.share, "share", text=part) if within else Figure(None), within or DASH,
    ]  # fmt: skip
