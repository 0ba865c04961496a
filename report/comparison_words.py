"""A comparison in sentences, and its figures as people write them."""

from __future__ import annotations

from gapmeter.analysis.numbers import DASH, duration, in_unit, share, significant, unit_of
from gapmeter.analysis.results.comparison import (
    BLOCKS,
    MIXED,
    NAMES,
    NOT_ESTIMABLE,
    NOTHING,
    REGRESSED,
    UNDECIDED,
    UNKNOWN,
    VALID,
    VALIDITY,
    ClaimedFigure,
    Comparison,
    ComparisonWords,
    DifferenceFigure,
    FigureName,
    PairComparison,
    PairWords,
    Regression,
    RegressionRow,
    SidePart,
    SideTable,
)
from gapmeter.analysis.results.distribution import percentile_key
from gapmeter.report import marks

_LONGEST = 40  # characters of a value in a sentence


def words_of(result: Comparison) -> ComparisonWords:
    """Every sentence of a comparison, for its file."""
    pairs = [
        PairWords(verdict=verdict_sentence(pair), changed=change_sentence(pair) or None) for pair in result.comparisons
    ]
    return ComparisonWords(
        headline=headline(result), comparisons=tuple(pairs), method=method_sentence(result) if result.method else None
    )


# The answer


def headline(result: Comparison) -> str:
    """What a person reads first."""
    if not result.comparisons:
        return not_comparable(result)
    said = [verdict_sentence(pair) for pair in result.comparisons]
    changed = result.comparisons[0].changed
    if len(said) == 1 and changed and changed.stage:
        said.append(change_sentence(result.comparisons[0]))
    return f"{'. '.join(each[0].upper() + each[1:] for each in said)}."


def not_comparable(result: Comparison) -> str:
    """What differs, in short: what is long stands once, in the protocol."""
    parts, invalid, first = [], set(), result.sides[0].name
    for each in result.protocol:
        listed = "; ".join(f"{f.key}: {_short(f.a)} | {_short(f.b)}" for f in each.blocking if f.key != VALIDITY)
        if listed:
            parts.append(f"{first} and {each.side} differ in more than what is compared: {listed}")
        for fact in each.facts:
            if fact.key == VALIDITY:
                invalid |= {side for side, said in ((first, fact.a), (each.side, fact.b)) if said != VALID}
    if invalid:
        are = "is" if len(invalid) == 1 else "are"
        parts.append(f"{' and '.join(sorted(invalid))} {are} not valid as a measurement (validity)")
    return ". ".join(parts)


def _short(value: str) -> str:
    return value if len(value) <= _LONGEST else f"{value[: _LONGEST - 3]}..."


def verdict_sentence(pair: PairComparison) -> str:
    """What was found, by the figure that says it best; where nothing was, what would have been."""
    family = pair.family()
    figures = {str(name): figure for name, figure in family}
    if pair.telling is None:
        if pair.verdict != UNKNOWN:
            return NOTHING
        why = next((figure.why for figure in figures.values() if figure.why), "no values")
        return f"no percentile can be compared: {why}"
    name = str(pair.telling)
    figure = figures[name]
    if figure.confirmed:
        head = f"{pair.b} is {pair.verdict} than {pair.a}"
        if pair.verdict == MIXED:
            head = f"{pair.b} is faster in some, slower in others"
        others = [other for other, each in figures.items() if each.confirmed and other != name]
        rest = f"; also beyond chance: {', '.join(others)}" if others else ""
        return f"{head}: {change_of(name, figure)}{rest}"
    able = sum(each.least_ms is not None and bool(each.a_ms) for each in figures.values())
    count = "1 figure" if able == 1 else f"{able} figures"
    if able < len(figures):
        count = f"{able} of {len(figures)} figures, the others being not estimable"
    least = figure.least_ms or 0.0
    part = f" ({share(least / figure.a_ms)})" if figure.a_ms else ""
    return (
        f"{NOTHING} in {count}; {change_of(name, figure)}. One of {duration(least)}{part} in {name} would have been "
        f"found with 80 % probability"
    )


def change_sentence(pair: PairComparison) -> str:
    """Which stage accounts for the difference of the means, or why none does; "" without a ledger."""
    change = pair.changed
    if change is None:
        return ""
    own = pair.stages[change.event]
    mean = change_of(f"the mean {NAMES[change.metric]}", own.total)
    if change.unexplained == "opposite":
        return f"{mean}: it moves the other way than {change.claim}"
    if change.unexplained == "uncertain":
        return (
            f"{mean}: not beyond its interval, so its stages explain nothing; the difference lies in other percentiles"
        )
    if change.stage is None:
        return f"{mean}: no difference to explain"
    ends = f" ({share(change.share_ci[0])} .. {share(change.share_ci[1])})" if change.share_ci else ""
    said = f"{mean}: {share(change.share)}{ends} of that is {marks.words(change.stage)} ({change.owner})"
    if change.cause is None or change.cause == change.stage:
        return said
    cause = next(each for each in own.stages if each.stage == change.cause)
    return (
        f"{said}, a wait that others' work causes; of the work itself, {marks.words(change.cause)} "
        f"({change.cause_owner}) changed most: {signed(cause.difference_ms or 0.0)}"
    )


def method_sentence(result: Comparison) -> str:
    """How the differences were made, and what the correction promises."""
    method, first = result.method, result.comparisons[0]
    assert method is not None
    how = "drawn in pairs, since both sides issued the same plan" if first.paired else "each side drawn by itself"
    why = f" ({first.why_not_paired})" if first.why_not_paired else ""
    turn = " made in turn" if method.in_turn else ""
    counted = f"; {first.runs[0]} and {first.runs[1]} runs{turn}, whose spread counts where it is larger"
    return (
        f"{method.resamples:,} stationary block resamples (blocks of {first.block_requests:.0f} requests on average, "
        f"{how}{why}) of Harrell-Davis percentiles{counted if max(first.runs) > 1 else ''}. Holm's correction over "
        f"{method.family} figures: the chance that any difference is claimed where there is none is at most "
        f"{share(1 - method.confidence)}"
    )


def remedy(result: Comparison) -> str:
    """What to type where runs were refused."""
    keys = {fact.key for each in result.protocol for fact in each.facts if fact.meaning == BLOCKS}
    declared = sorted(key for key in keys if key != VALIDITY and ", within" not in key)
    if VALIDITY in keys or not declared:
        return "run again what is not valid; --force compares all the same, and marks every figure"
    listed = " ".join(f"--factor {key}" for key in declared)
    return f"if that is what you compare: {listed}; --force compares all the same, and marks every figure"


def not_estimable(pair: PairComparison) -> str:
    """Which percentiles nothing can be said of, and why, once for all of a metric; "" where there are none."""
    told = []
    for metric, known in pair.metrics.items():
        missing = [(key, figure) for key, figure in known.percentiles.items() if figure.difference_ms is None]
        if missing:
            names = ", ".join(key.replace("p999", "p99.9") for key, _ in missing)
            reason = (missing[0][1].why or "not estimable").partition(" do not support")[0].rstrip(",")
            told.append(f"{NAMES[metric]} {names} ({reason})")
    return f"Not estimable, the samples being too small: {'; '.join(told)}." if told else ""


def spreads(table: SideTable) -> list[str]:
    """How far sides on devices of one name, under one scenario, lie apart, a sentence a device."""
    told = []
    for each in table.devices:
        said = ", ".join(f"{figure_head(key)} {share(found.relative)}" for key, found in each.figures.items())
        if said:
            where = f"{', '.join(each.sides)}, each on {each.device}"
            told.append(f"Spread between identical devices ({where}): {said}.")
    return told


# Against a baseline


def with_sentences(found: Regression, result: Comparison) -> Regression:
    """The same with its sentences; ``result`` is the comparison with the baseline."""
    if not result.comparable:
        return found.model_copy(update={"sentence": headline(result)})
    rows = tuple(row.model_copy(update={"sentence": _regression_row(row, found.limit)}) for row in found.rows)
    sentence = "; ".join(row.sentence for row in rows if row.status == found.status)
    changed = result.comparisons[0].changed
    if found.status == REGRESSED and changed and changed.stage:
        sentence += f"; {change_sentence(result.comparisons[0])}"
    return found.model_copy(update={"rows": rows, "sentence": sentence})


def _regression_row(row: RegressionRow, limit: float) -> str:
    name = f"{NAMES[row.metric]} {row.name.partition(' ')[2]}"
    if row.status == NOT_ESTIMABLE:
        return f"{name} cannot be compared: {row.why or 'its baseline is 0'}"
    grew = f"{name} {duration(row.a_ms)} -> {duration(row.b_ms)}, {relative(row)}"
    meaning = {
        REGRESSED: ": a regression",
        UNDECIDED: ": more than is allowed, but not beyond chance; longer runs, or several, would tell",
    }.get(row.status, "")
    return f"{grew} ({difference(row)}, 95 % interval {interval(row)}), allowed +{share(limit)}{meaning}"


# Figures


def change_of(name: str, figure: DifferenceFigure) -> str:
    """``E2E p50 298 ms -> 312 ms, +14.1 ms (9.0 .. 19.2 ms), +4.7 %``."""
    if figure.difference_ms is None or figure.ci_ms is None:
        return f"{name} not estimable"
    values = f"{name} {duration(figure.a_ms)} -> {duration(figure.b_ms)}"
    text = f"{values}, {signed(figure.difference_ms)} ({between(*figure.ci_ms)})"
    return text if figure.relative is None else f"{text}, {signed_share(figure.relative)}"


def signed(ms: float) -> str:
    """A difference with its sign and unit."""
    return f"{'+' if ms > 0 else ''}{duration(ms)}"


def signed_share(fraction: float) -> str:
    """A relative difference with its sign."""
    percent = 100 * fraction
    return f"{'+' if percent > 0 else ''}{significant(percent, 2 if abs(percent) < 99.5 else 3)} %"


def between(low_ms: float, high_ms: float) -> str:
    """An interval of differences, which may be negative, in the unit of its larger end: ``-2.43 .. -1.10 ms``."""
    unit = unit_of(max(abs(low_ms), abs(high_ms)))
    low, high = (significant(in_unit(end, unit)[0]) for end in (low_ms, high_ms))
    return f"{low} .. {high} {unit}"


def difference(figure: DifferenceFigure) -> str:
    """``+14.1 ms``, a dash where it is not estimable."""
    return DASH if figure.difference_ms is None else signed(figure.difference_ms)


def interval(figure: DifferenceFigure) -> str:
    """``9.0 .. 19.2 ms``."""
    return DASH if figure.ci_ms is None else between(*figure.ci_ms)


def relative(figure: DifferenceFigure) -> str:
    """``+4.7 %``."""
    return DASH if figure.relative is None else signed_share(figure.relative)


def answer(figure: ClaimedFigure) -> str:
    """What may be said of one figure."""
    if figure.difference_ms is None:
        return figure.why or "not estimable"
    if not figure.in_family:
        return "shown, not tested"
    if figure.confirmed:
        return "slower" if figure.difference_ms > 0 else "faster"
    return f"no difference found (one of {duration(figure.least_ms)} would be)"


def probability(p: float | None) -> str:
    """A p-value, ``< 0.0001`` below that."""
    return DASH if p is None else "< 0.0001" if p < 1e-4 else significant(p, 2)


def part(known: SidePart, unit: str) -> str:
    """A figure that only some runs have, with its interval; a dash where there is none."""
    if known.value is None:
        return DASH
    low, high = known.ci or (None, None)
    ends = "" if low is None or high is None else f" ({significant(low)} .. {significant(high)})"
    return f"{significant(known.value)}{ends} {unit}"


def figure_head(key: str) -> str:
    """``TTFT p99`` of ``ttft_p99``."""
    metric, _, percentile = key.partition("_")
    return f"{NAMES[metric]} {percentile}"


def figure_path(pair: int, name: FigureName) -> str:
    """Where a difference stands in the result."""
    return f"comparisons.{pair}.metrics.{name.metric}.percentiles.{percentile_key(name.percentile)}.difference_ms"
