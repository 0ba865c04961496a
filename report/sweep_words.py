"""What a sweep found, in sentences: where its curves turn, what grows, what was left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gapmeter.analysis.numbers import duration, share
from gapmeter.analysis.results.cost import Cost, Price
from gapmeter.analysis.results.run import INVALID
from gapmeter.analysis.stages import owner_words
from gapmeter.analysis.sweep.growth import SLOW_LEVEL
from gapmeter.analysis.sweep.knee import KNEE, NONE, UNDECIDED
from gapmeter.analysis.sweep.result import (
    THROUGHPUT,
    CurveKnee,
    Growth,
    Point,
    PointEconomy,
    PointWords,
    SweepFigures,
    SweepResult,
    SweepWords,
    figure_name,
)
from gapmeter.report import marks
from gapmeter.report.cost import cost_sentence, price_words, value_sentence
from gapmeter.report.slo import slo_sentence

_WHOLE = 1.005  # a share above this is told with what goes the other way


def words_of(result: SweepResult) -> SweepWords:
    """Every sentence of a sweep, for its file."""
    points = [
        PointWords(
            slo=tuple(slo_sentence(answer) for answer in point.slo),
            cost=cost_sentence(point.economy.cost),
            value=value_sentence(point.economy.value, _good_share(point.economy)),
        )
        if isinstance(point, Point)
        else None
        for point in result.sweep.points
    ]
    return SweepWords(
        headline=tuple(headline(result.sweep, result.device)),
        growth=tuple(growth_sentence(growth, result.device) for growth in result.sweep.growth),
        points=tuple(points),
    )


def _good_share(economy: PointEconomy) -> tuple[float, float] | None:
    """The share of requests within their limits that the value rests on: at least so many."""
    worth, cost = economy.value.good_requests_per_usd, economy.cost
    return (worth * cost.per_request_usd, 1.0) if isinstance(cost, Cost) and worth is not None else None


# The answer


def headline(sweep: SweepFigures, device: str) -> list[str]:
    """What a person reads first: a sentence a curve, and which points have no figures."""
    said = [line for knee in sweep.knees for line in _knee_lines(knee, sweep.growth, device)]
    if sweep.growth and not any(knee.state == KNEE for knee in sweep.knees):
        said += _largest_changes(sweep, device)
    invalid = [point.label for point in sweep.points if point.verdict == INVALID]
    if invalid:
        said.append(f"Left out of curves and comparisons, since not valid as a measurement: {', '.join(invalid)}.")
    lost = [point.label for point in sweep.points if not isinstance(point, Point)]
    if lost:
        said.append(f"No figures for {len(lost)} of {len(sweep.points)} points: {', '.join(lost)}.")
    return said


def _knee_lines(knee: CurveKnee, growths: Sequence[Growth], device: str) -> Iterator[str]:
    lead = f"{knee.series}: " if knee.series else ""
    by = "" if knee.by == THROUGHPUT or not knee.certainty else f" (by {knee.by})"
    if knee.state == UNDECIDED:
        yield f"{lead}Whether there is a knee is not decided: {knee.why}{by}. Longer points or repeats tell."
        return
    if knee.state == NONE:
        yield f"{lead}No knee among these points: {knee.why}{by}."
        return
    first, last = knee.range_labels or ("", "")
    where = "" if first == last else f" (between {first} and {last})"
    if knee.or_at:
        where += f", or at {' or '.join(knee.or_at)}, of which there are no valid figures"
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
    low, high = (_percent(end) for end in after.ratio_ci)
    # What still grows, but by less than the rule asks for, has not stopped.
    turned = "beyond it throughput grows little" if after.ratio_ci[0] > 1 else "throughput stops to grow there"
    return f"{turned} (to {after.to} {_percent(after.ratio)}, 95 % interval {low} to {high})"


def _percent(ratio: float) -> str:
    change = 100 * (ratio - 1)
    return f"{'−' if change < 0 else '+'}{abs(change):.1f} %"


def _largest_changes(sweep: SweepFigures, device: str) -> list[str]:
    """The largest difference between neighbors that is beyond its interval, by metric."""
    said = []
    for metric in dict.fromkeys((sweep.metric, "itl")):
        sure = [growth for growth in sweep.growth if growth.metric == metric and growth.is_sure]
        if sure:
            largest = max(sure, key=lambda growth: abs(growth.grows_ms or 0.0))
            said.append(f"{growth_sentence(largest, device)}.")
    return said or ["Between no two neighboring points does the difference go beyond its interval."]


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
    """From one point to the next; ``device``: what computed the forwards."""
    start = f"From {growth.from_} to {growth.to} {figure_name(growth.metric, growth.percentile)} "
    grows, ends = growth.grows_ms, growth.interval_ms
    if grows is None or ends is None:
        return f"{start}is not estimable at both"
    if not growth.is_sure:
        low, high = (f"{'−' if end < 0 else '+'}{duration(abs(end))}" for end in ends)
        return f"{start}differs by no more than its interval ({low} to {high})"
    near, far = sorted(map(abs, ends))
    way = "grows" if grows > 0 else "falls"
    start += f"{way} by {duration(abs(grows))} (95 % interval {duration(near)} to {duration(far)})"
    if growth.stage is None or growth.owner is None or growth.share_ci is None or growth.share is None:
        return start
    if grows * (growth.band_grows_ms or 0.0) <= 0:
        return start
    whose = f"{marks.words(growth.stage)} ({owner_words(growth.owner, device)})"
    slowest = growth.percentile is not None and growth.percentile >= SLOW_LEVEL
    low, high = map(share, growth.share_ci)
    if growth.share > _WHOLE:
        # A stage that changes by more than the whole does, since the others together go the other way.
        own = growth.stages_ms[growth.stage]
        others = abs((growth.band_grows_ms or 0.0) - own)
        one, rest = ("grows", "fall") if own > 0 else ("falls", "grow")
        who = "of the slowest ones " if slowest else ""
        part = f"{share(growth.share)} of the whole, {low} to {high}"
        beside = f"the other stages together {rest} by {duration(others)}"
        return f"{start}; {who}{whose} {one} by {duration(abs(own))} ({part}), {beside}"
    way = "longer" if grows > 0 else "less"
    which = f"the slowest ones wait {way}" if slowest else f"they wait {way} on average"
    return f"{start}; {share(growth.share)} ({low} to {high}) of what {which} is {whose}"


# What it costs


def price_note(price: Price) -> str:
    """Whose price a table is at."""
    return f"{price_words(price)}{'; say yours with cost.usd_per_hour' if price.is_default else ''}"
