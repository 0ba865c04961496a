"""How two sides differ, figure by figure: sentences, tables and pictures."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

from gapmeter.analysis.numbers import DASH, bounds, counted, duration, share, significant
from gapmeter.analysis.results.comparison import (
    FAILS_LESS,
    FAILS_MORE,
    FASTER,
    MIXED,
    NOT_COMPARABLE,
    NOTHING,
    SLOWER,
    UNKNOWN,
    ClaimedFigure,
    DifferenceFigure,
    FailedShares,
    FigureName,
    PairComparison,
    StageDifferences,
)
from gapmeter.analysis.results.distribution import percentile_of_key
from gapmeter.analysis.stages import UNEXPLAINED
from gapmeter.analysis.stats.estimate import CONFIDENCE
from gapmeter.report import document as doc
from gapmeter.report import marks
from gapmeter.report.charts import Point
from gapmeter.report.document import (
    MARKDOWN,
    TERMINAL,
    Block,
    Chart,
    Figure,
    Heading,
    Paragraph,
    Row,
    Section,
    Table,
    Words,
    in_ms,
)
from gapmeter.report.pictures import Changes, Shift, StageChange
from gapmeter.report.words import WHOLE, both, part_of, signed

_EVENTS = {"first_token": "the first token (TTFT)", "last_token": "the last token (E2E)"}
_HOLM = (
    "Intervals are for each figure by itself; answers are corrected for all figures together (Holm). In brackets: the "
    "smallest difference that would have been found 80 % of the time."
)
_NO_LEDGER = "No ledger on both sides: the server's stages were not recorded, or not shown."


def verdict_sentence(pair: PairComparison) -> str:
    """What was found, by the figure that says it best, and what failed; where nothing was, what would have been.

    Failures come first where a side has more of them than chance explains.
    """
    found = _found_sentence(pair)
    if not pair.errors.a_share and not pair.errors.b_share:
        return found
    failed = failed_sentence(pair.b, pair.a, pair.errors)
    return f"{failed}; {found}" if pair.errors.more else f"{found}; {failed}"


def failed_sentence(b: str, a: str, failed: FailedShares) -> str:
    """``B failed 2.0 % of its requests, A none``; and whether that is beyond chance."""
    one, other = (share(each) if each else "none" for each in (failed.b_share, failed.a_share))
    said = f"{b} failed {one} of its requests, {a} {other}"
    return f"{said}, {'more' if failed.more == 'b' else 'fewer'} than chance explains" if failed.more else said


def _found_sentence(pair: PairComparison) -> str:
    family = pair.family()
    figures = dict(family)
    if pair.telling is None:
        if any(figure.ci_ms is not None and not figure.failed for figure in figures.values()):
            return NOTHING
        means_first = sorted(figures, key=lambda each: each.percentile is not None)  # they ask for less
        why = next((figures[each].why for each in means_first if figures[each].why), "no values")
        return f"no percentile and no mean can be compared: {why}"
    name = pair.telling
    figure = figures[name]
    if figure.confirmed:
        others = [str(other) for other, each in figures.items() if each.confirmed and not each.failed and other != name]
        rest = f"; also significant: {', '.join(others)}" if others else ""
        return f"{_head(pair, figure)}{change_of(name, figure)}{rest}"
    able = sum(each.least_ms is not None and bool(each.a_ms) and not each.failed for each in figures.values())
    count = counted(able, "figure")
    if able < len(figures):
        count = f"the {able} of {len(figures)} figures that can be estimated"
    least = figure.least_ms or 0.0
    part = f" ({share(least / figure.a_ms)})" if figure.a_ms else ""
    unknown = [metric.upper() for metric, known in pair.metrics.items() if known.verdict == UNKNOWN]
    of_these = f". Of {', '.join(unknown)} nothing can be said" if unknown else ""
    return (
        f"{NOTHING} in {count}; {change_of(name, figure)}. A difference of {duration(least)}{part} in {name} would "
        f"have been found with 80 % probability{of_these}"
    )


def _head(pair: PairComparison, figure: DifferenceFigure) -> str:
    """What a difference in latency, which ``figure`` says best, comes to; what failed stands before it."""
    if pair.verdict in (FAILS_MORE, FAILS_LESS):
        is_slower = (figure.difference_ms or 0.0) > 0
        return "counting these, " if is_slower is (pair.verdict == FAILS_MORE) else "other requests: "
    signs = {(figure.difference_ms or 0.0) > 0 for _, figure in pair.family() if figure.confirmed and not figure.failed}
    if pair.verdict == MIXED and len(signs) > 1:
        return f"{pair.b} is faster in some, slower in others: "
    word = pair.verdict if pair.verdict != MIXED else SLOWER if True in signs else FASTER
    only = pair.runs == (1, 1)  # repeated runs may differ by more than these
    return f"{pair.b} {'was' if only else 'is'} {word} than {pair.a}{' in these two runs' if only else ''}: "


def change_sentence(pair: PairComparison) -> str:
    """Which stage accounts for the difference of the means, or why none does; "" without a ledger."""
    change = pair.changed
    if change is None:
        return ""
    own = pair.stages[change.event]
    of_answered = " of answered requests" if pair.errors.a_share or pair.errors.b_share else ""
    name = f"the mean {change.metric.upper()}{of_answered}"
    told = pair.telling == FigureName(metric=change.metric, percentile=None)  # in the sentence before this one
    mean = f"the difference of {name}" if told else change_of(name, own.total)
    if change.unexplained == "opposite":
        known = pair.metrics[change.metric].mean
        doubt = f", though {known.why}" if known.why else ""
        return f"{mean}: it moves the other way than {change.claim}{doubt}"
    if change.unexplained == "uncertain":
        return f"{mean}: its interval includes 0, so no stage is named"
    if change.stage is None:
        interval = both(own.total.ci_ms)
        clear = interval is not None and interval[0] * interval[1] > 0
        none = "beyond its own interval, but not significant among all figures, so no stage is named"
        return f"{mean}: {none if clear else 'no difference to explain'}"
    owner = "" if change.stage == UNEXPLAINED else f" ({change.owner})"
    stage = f"{marks.words(change.stage)}{owner}"
    said = f"{mean}: {part_of(change.share or 0.0, change.share_ci)} of that is {stage}"
    if change.share is not None and change.share > WHOLE:
        moved = next(each.difference_ms or 0.0 for each in own.stages if each.stage == change.stage)
        others = (own.total.difference_ms or 0.0) - moved
        said = f"{mean}: {signed(moved)} is {stage}, {signed(others)} all other stages"
    if change.cause is None or change.cause == change.stage:
        return said
    cause = next(each for each in own.stages if each.stage == change.cause)
    return (
        f"{said}, a wait that others' work causes; of the work itself, {marks.words(change.cause)} "
        f"({change.cause_owner}) changed most: {signed(cause.difference_ms or 0.0)}"
    )


def not_estimable(pair: PairComparison) -> str:
    """Which figures nothing can be said of, and why; "" where there are none. The page has each one's own reason."""
    small, late, failed = list[str](), list[str](), list[str]()
    for metric, known in pair.metrics.items():
        missing = {key: figure for key, figure in known.percentiles.items() if figure.difference_ms is None}
        refused = [key for key, figure in missing.items() if figure.late_ms is not None]
        of_failed = [key for key, figure in missing.items() if figure.failed and key not in refused]
        of_few = [key for key in missing if key not in refused and key not in of_failed]
        for listed, keys in ((small, of_few), (late, refused), (failed, of_failed)):
            listed += [_names(metric, keys)] if keys else []
    said = [f"Samples too small: {'; '.join(small)}."] if small else []
    said += [f"Among the requests that failed, on both sides: {'; '.join(failed)}."] if failed else []
    means = [(metric.upper(), known.mean) for metric, known in pair.metrics.items()]
    lacking = [(name, mean) for name, mean in means if mean.difference_ms is None and mean.late_ms is None]
    said += [f"No mean of {', '.join(name for name, _ in lacking)}: {lacking[0][1].why}."] if lacking else []
    said += [f"Refused, since too much may be the load tester's own lateness: {'; '.join(late)}."] if late else []
    return " ".join(said)


def _names(metric: str, keys: Iterable[str]) -> str:
    """``TTFT p99, p99.9``."""
    return f"{metric.upper()} {', '.join(f'p{percentile_of_key(key):g}' for key in keys)}"


# --- figures


def change_of(name: FigureName | str, figure: DifferenceFigure) -> str:
    """``E2E p50 298 ms -> 312 ms, +14.1 ms (9.0 .. 19.2 ms), +4.7 %``; from double on, ``6.1 times (5.2 to 7.2)``.

    Of a mean with requests that failed, what it is at least.
    """
    if figure.difference_ms is None or figure.ci_ms is None:
        return f"{name} refused" if figure.late_ms is not None else f"{name} not estimable"
    if figure.failed and isinstance(name, FigureName) and name.percentile is None:
        return f"{name} {duration(figure.a_ms)} -> at least {duration(figure.b_ms)}"
    values = f"{name} {_side(figure, 'a')} -> {_side(figure, 'b')}"
    if figure.failed:
        return values
    text = f"{values}, {signed(figure.difference_ms)} ({bounds(*figure.ci_ms)})"
    if figure.relative is None:
        return text
    if (ends := figure.relative_ci) is None or abs(math.log1p(figure.relative)) < math.log(2):
        return f"{text}, {signed_share(figure.relative)}"
    times, low, high = (significant(1 + each, 2) for each in (figure.relative, *ends))
    return f"{text}, {times} times ({low} to {high})"


def signed_share(fraction: float) -> str:
    """A relative difference with its sign."""
    percent = 100 * fraction
    return f"{'+' if percent > 0 else ''}{significant(percent, 2 if abs(percent) < 99.5 else 3)} %"


def difference(figure: DifferenceFigure) -> str:
    """``+14.1 ms``, a dash where it is not estimable, or a side's requests failed."""
    if figure.late_ms is not None:
        return "refused"
    return DASH if figure.difference_ms is None or figure.failed else signed(figure.difference_ms)


def interval(figure: DifferenceFigure) -> str:
    """``9.0 .. 19.2 ms``."""
    return DASH if figure.ci_ms is None or figure.failed else bounds(*figure.ci_ms)


def relative(figure: DifferenceFigure) -> str:
    """``+4.7 %``."""
    return DASH if figure.relative is None or figure.failed else signed_share(figure.relative)


def growth_interval(figure: DifferenceFigure) -> str:
    """``-14 % .. -2.4 %``."""
    return DASH if figure.relative_ci is None or figure.failed else " .. ".join(map(signed_share, figure.relative_ci))


def _side(figure: DifferenceFigure, side: Literal["a", "b"]) -> Figure:
    """``14.1 ms``; with a sign where it, or an end of its interval, is of requests that failed: at least so much."""
    ms, failed = getattr(figure, f"{side}_ms"), side in (figure.failed or "")
    return Figure(ms, text="" if not failed else "failed" if ms is None else f"≥ {duration(ms)}")


def _with_interval(figure: DifferenceFigure) -> str:
    return f"{difference(figure)} ({interval(figure)})"


# --- sections


def _claims(pair: PairComparison) -> list[tuple[FigureName, ClaimedFigure]]:
    """What was compared; a mean is that of answers, whatever failed beside them."""
    return [
        (name, figure if name.percentile is not None else figure.model_copy(update={"failed": None}))
        for name, figure in pair.figures()
        if figure.difference_ms is not None
    ]


def _cells(figure: DifferenceFigure, key: str = "") -> list[Words]:
    """Both sides, and how they differ; the difference stands at ``key`` in the result."""
    changed = Figure(figure.difference_ms, "ms", key, text=difference(figure))
    return [_side(figure, "a"), _side(figure, "b"), changed, interval(figure)]


def _claimed_cells(number: int, name: FigureName, figure: ClaimedFigure) -> list[Words]:
    return [*_cells(figure, f"comparisons.{number}.{name.key}.difference_ms"), relative(figure)]


def _answer(figure: ClaimedFigure) -> Words:
    """What may be said of one figure."""
    if not figure.in_family:
        said = "shown, not tested"
    elif figure.confirmed:
        said = "slower" if (figure.difference_ms or 0.0) > 0 else "faster"
        said += ", by what failed" if figure.failed else ""
    elif figure.failed:
        said = NOTHING
    else:  # its own interval may leave 0 out where the correction for so many figures does not
        low, high = figure.ci_ms or (0.0, 0.0)
        alone = low * high > 0 and figure.p_adjusted is not None and figure.p_adjusted > 1 - CONFIDENCE
        said = "not significant among all figures" if alone else NOTHING
        said += f" ({duration(figure.least_ms)} would show)"
    return doc.Mark(said, "bad" if (figure.difference_ms or 0.0) > 0 else "good") if figure.confirmed else said


def brief(pair: PairComparison, number: int, *, forced: bool) -> list[Section]:
    """The figures that may be claimed; in the terminal of each metric the median and the highest percentile.

    ``forced``: they are not comparable, which the page has stamped across every table, and the head says here.
    """
    claims = [(name, figure) for name, figure in _claims(pair) if figure.in_family]
    ends, missing = list[tuple[FigureName, ClaimedFigure]](), not_estimable(pair)
    for metric in pair.metrics:
        own = [claim for claim in claims if claim[0].metric == metric]
        own = [claim for claim in own if claim[0].percentile is not None] or own
        ends += [*own[:1], *own[1:][-1:]]
    rest = f"{counted(len(claims) - len(ends), 'more figure')} in the report." if len(ends) < len(claims) else ""
    answer = doc.Column("answer", wraps=True)
    head = NOT_COMPARABLE if forced else " "
    headers: doc.Headers = [head, pair.a, pair.b, "difference", answer, "95 % interval", "relative"]
    sections = []
    for on, shown, said in ((TERMINAL, ends, f"{rest} {missing}".strip()), (MARKDOWN, claims, missing)):
        rows: list[Row] = []
        for name, figure in shown:
            *figures, interval_, share = _claimed_cells(number, name, figure)
            rows.append([str(name), *figures, _answer(figure), interval_, share])
        blocks: list[Block] = [Table("Percentiles and means", headers, rows)] if rows else []
        sections.append(Section(f"brief-{number}", "", [*blocks, *([Paragraph(said)] if said else [])], on=on))
    return sections


def metrics(pair: PairComparison, number: int, name: str) -> Section:
    """Every percentile, and every mean, that both sides support."""
    rows, groups, last = list[Row](), set[int](), ""
    for which, figure in _claims(pair):
        first = which.metric != last
        last = which.metric
        groups |= {len(rows)} if first else set()
        p = figure.p_adjusted
        rows.append([
            which.metric.upper() if first else "", "mean" if which.percentile is None else f"p{which.percentile:g}",
            _answer(figure), *_claimed_cells(number, which, figure),
            DASH if p is None else "< 0.0001" if p < 1e-4 else significant(p, 2),
        ])  # fmt: skip
    times = in_ms(pair.a, pair.b, "difference")
    headers: doc.Headers = ["metric", "", "answer", *times, "95 % interval", "relative", "p, corrected"]
    missing, title = not_estimable(pair), "Differences of percentiles and means"
    blocks: list[Block] = [Table(title, headers, rows, words=3, groups=frozenset(groups))] if rows else []
    blocks += [Paragraph(missing, "quiet")] if missing else []
    return Section(f"metrics-{number}", f"Percentiles and means{name}", blocks, _HOLM, "" if number else "percentiles")


def changed(pair: PairComparison, number: int, name: str) -> Section:
    """The mean wait's difference by stage, to either event; the one that was claimed first."""
    title, short = f"What changed{name}", "" if number else "what changed"
    if not pair.stages:
        return Section(f"changed-{number}", title, [Paragraph(_NO_LEDGER)], short=short)
    first, blocks = pair.changed.event if pair.changed else "last_token", list[Block]()
    for event in sorted(pair.stages, key=lambda each: each != first):
        own = pair.stages[event]
        total, table = _with_interval(own.total), _stage_table(event, own, pair)
        blocks.append(Heading(f"To {_EVENTS[event]}: {total}"))
        largest = max((abs(one.difference_ms or 0.0) for one in own.stages), default=0.0)
        shown = [  # a bar a stage, to the right where B is slower
            StageChange(one.stage, one.difference_ms or 0.0, one.ci_ms, "", _with_interval(one))
            for one in own.stages
            if largest and abs(one.difference_ms or 0.0) >= 0.01 * largest
        ]
        said = f"The mean differs by {difference(own.total)}; a bar is what one stage adds to that."
        picture = Changes("What each stage adds to the difference", said, shown, pair.device)
        blocks.append(Chart(f"changed-{number}-{event}", picture, "", table, "names") if shown else table)
    lost = pair.unmeasured.get("last_token") or ()
    missing = f" Not measured on both sides, so in unexplained: {', '.join(map(marks.words, lost))}." if lost else ""
    lead = "The mean wait's difference, stage by stage; the stages add up to it exactly. Lines: 95 % intervals."
    return Section(f"changed-{number}", title, blocks, f"{lead}{missing}", short)


def _stage_table(event: str, own: StageDifferences, pair: PairComparison) -> Table:
    rows: list[Row] = []
    for one in own.stages:
        inner = [difference(known) if (known := one.percentiles.get(key)) else "" for key in ("p50", "p99")]
        part = part_of(one.share or 0.0, one.share_ci) if one.share_ci else ""
        rows.append([doc.Stage(one.stage), marks.owner(one.stage, pair.device), *_cells(one), part, *inner])
    rows.append(["sum", "", *_cells(own.total), "", "", ""])
    times = in_ms(f"{pair.a}, mean", f"{pair.b}, mean", "difference")
    headers: doc.Headers = ["stage", "owner", *times, "95 % interval", "share of the whole", "at p50", "at p99"]
    return Table(f"Stages to {_EVENTS[event]}", headers, rows, words=2)


def shift(pair: PairComparison, number: int, name: str) -> Section:
    """Every decile of every metric."""
    parts: list[list[Block]] = []
    for metric, known in pair.metrics.items():
        rows: list[Row] = []
        deciles, dots = list[str](), list[Point]()
        for one in known.shift:
            percentile = f"p{one.percentile:g}"
            rows.append([percentile, *_cells(one)])
            if one.failed:
                continue
            if one.difference_ms is not None and one.ci_ms is not None:
                said = f"{percentile}: {_with_interval(one)}"
                dots.append(Point(len(deciles), one.difference_ms, y_ends=one.ci_ms, title=said))
            deciles.append(percentile)
        headers: doc.Headers = ["decile", *in_ms(pair.a, pair.b, "difference"), "95 % interval"]
        table = Table(f"Shift of {metric.upper()}", headers, rows)
        drawn = Chart(f"shift-{number}-{metric}", Shift(metric.upper(), deciles, dots), "", table, "levels")
        parts.append([Heading(metric.upper()), drawn if dots else Paragraph("No decile is supported.")])
    lead = f"{pair.b} minus {pair.a} at every decile, with its 95 % interval: above the line is slower."
    return Section(f"shift-{number}", f"Shift{name}", [doc.Columns(parts)], lead, "" if number else "shift")
