"""What is said of a comparison: the verdict, whether it may be made at all, what differs and where it comes from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gapmeter.analysis.numbers import DASH, bounds, count, duration, share
from gapmeter.analysis.results.comparison import (
    BLOCKS,
    NAMES,
    ClaimedFigure,
    Comparison,
    FigureName,
    PairComparison,
    SideRow,
    SideTable,
    StageDifference,
    StageDifferences,
)
from gapmeter.analysis.results.distribution import percentile_of_key
from gapmeter.analysis.stages import owner_words
from gapmeter.report import comparison_words as words
from gapmeter.report import html, marks
from gapmeter.report.document import (
    BRIEF,
    MARKDOWN,
    PAGE,
    TERMINAL,
    Block,
    Chart,
    Column,
    Columns,
    Document,
    Facts,
    Figure,
    Header,
    Headers,
    Heading,
    Mark,
    Medium,
    Paragraph,
    Pre,
    Row,
    Said,
    Section,
    Stage,
    Table,
    Tone,
    Trust,
    Verdict,
    Warned,
    Warnings,
    Words,
    in_ms,
)
from gapmeter.report.pictures import Changes, Decile, Shift, StageChange

_TONES: dict[str, Tone] = {"FASTER": "good", "SLOWER": "bad", "MIXED": "open", "NO DIFFERENCE FOUND": "open"}
_EVENTS = {"first_token": "the first token (TTFT)", "last_token": "the last token (E2E)"}
_STAMP = "NOT COMPARABLE"
_ONE_LINE = 70  # characters
_SAME = "Scenario, plan, model, engine, hardware and load tester are the same on all sides."
_MEANINGS = (
    "factor: what is compared; follows: differs because of it; noted: changes no latency; blocks: must not differ."
)
_HOLM = (
    "Each interval holds for itself; an answer holds for all of them together (Holm). In brackets: the smallest "
    "difference that would have been found with 80 % probability."
)
_SIDES = (
    "As each run's own report has them: percentiles are order statistics. Differences above are of smoother estimates "
    "(Harrell and Davis), so the two can lie a little apart."
)
_NO_LEDGER = "No ledger on both sides: the server's stages were not recorded, or not shown."


def write(folder: Path, result: Comparison, version: str = "") -> Comparison:
    """``compare.json`` and ``report.html`` of a folder; ``version``: of the gapmeter that ran the baseline.

    Returns the result with its words. Raises OSError.
    """
    told = result.model_copy(update={"words": words.words_of(result)})
    told.write(folder)
    (folder / "report.html").write_text(html.page(document(told, version)), encoding="utf-8")
    return told


def document(result: Comparison, version: str = "") -> Document:
    """The page, and in short the terminal's and Markdown's answer."""
    several = len(result.comparisons) > 1
    sections: list[Section | None] = [_protocol(result), _facts(result)]
    for number, pair in enumerate(result.comparisons):
        name = f" ({pair.b} against {pair.a})" if several else ""
        sections += [
            _brief(pair, number, forced=result.forced),
            _changed(pair, number, name),
            _metrics(pair, number, name, forced=result.forced),
            _shift(pair, number, name),
        ]
    if result.table:
        sections += [_sides(result.table), _sides_in_short(result.table)]
    sides = "; ".join(f"{side.name}: {', '.join(side.runs)}" for side in result.sides)
    return Document(
        title=f"{result.verdict} · comparison · gapmeter",
        header=Header(f"{result.sides[0].scenario or 'runs'}: a comparison", sides),
        verdict=_verdict(result),
        sections=[
            *sections,
            _method(result),
            _method_in_short(result, TERMINAL),
            _method_in_short(result, MARKDOWN),
            _remedy(result),
        ],
        provenance=result.provenance,
        device=result.comparisons[0].device if result.comparisons else "GPU",
        version=version,
    )


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _verdict(result: Comparison) -> Verdict:
    first, *more = [words.verdict_sentence(pair) for pair in result.comparisons] or [words.not_comparable(result)]
    changed = [said for pair in result.comparisons if (said := words.change_sentence(pair))]
    trust = Trust(sound=True, word="Comparable.", words="Only what was meant to differ does.")
    if not result.comparable:
        trust = Trust(sound=False, word="Not comparable.", words=words.remedy(result))
    return Verdict(
        word=result.verdict,
        tone=_TONES.get(result.verdict, "bad"),
        sentence=_sentence(first),
        more=[*(Said(_sentence(each)) for each in more), *(Said(_sentence(each), strong=True) for each in changed)],
        trust=trust,
    )


# --- may they be compared?


def _protocol(result: Comparison) -> Section:
    rows: list[Row] = [
        [Mark(fact.meaning, "bad" if fact.meaning == BLOCKS else ""), fact.key, fact.a, fact.b]
        for each in result.protocol
        for fact in each.facts
    ]
    if not rows:
        return Section("protocol", "May they be compared?", [Paragraph(_SAME)], short="comparable")
    other = Column("the other", brief="B" if len(result.protocol) == 1 else "")
    table = Table("What differs", ["", "what differs", "A", other], rows, words=4)
    return Section("protocol", "May they be compared?", [table], _MEANINGS, "comparable", PAGE | MARKDOWN)


def _facts(result: Comparison) -> Section | None:
    """The same in a terminal: on one line where both values fit, else a paragraph for each side."""
    several, rows = len(result.protocol) > 1, list[tuple[str, *tuple[str, ...]]]()
    for each in result.protocol:
        for fact in each.facts:
            key = f"{each.side}, {fact.key}" if several else fact.key
            line = f"{key}: {fact.a} | {fact.b}"
            sides = (key, f"{result.sides[0].name}  {fact.a}", f"{each.side}  {fact.b}")
            rows.append((fact.meaning, *((line,) if len(line) <= _ONE_LINE else sides)))
    return Section("facts", "", [Facts(rows)], on=TERMINAL) if rows else None


def _remedy(result: Comparison) -> Section | None:
    """What to type where there are no figures."""
    return None if result.comparisons else Section("remedy", "", [Paragraph(words.remedy(result))], on=TERMINAL)


# --- what differs


def _claims(pair: PairComparison) -> list[tuple[FigureName, ClaimedFigure]]:
    return [
        (FigureName(metric=metric, percentile=percentile_of_key(key)), figure)
        for metric, known in pair.metrics.items()
        for key, figure in known.percentiles.items()
        if figure.difference_ms is not None
    ]


def _answer(figure: ClaimedFigure, *, forced: bool) -> Words:
    said = f"{words.answer(figure)}{f', {_STAMP}' if forced else ''}"
    return Mark(said, "bad" if (figure.difference_ms or 0.0) > 0 else "good") if figure.confirmed else said


def _brief(pair: PairComparison, number: int, *, forced: bool) -> Section:
    """The figures that may be claimed."""
    rows: list[Row] = [
        [str(name), Figure(figure.a_ms), Figure(figure.b_ms), _difference(pair, number, name, figure),
         words.interval(figure), words.relative(figure), _answer(figure, forced=forced)]
        for name, figure in _claims(pair) if figure.in_family
    ]  # fmt: skip
    headers: Headers = [
        " ", pair.a, pair.b, "difference", "95 % interval", "relative", Column("answer", wraps=True)
    ]  # fmt: skip
    blocks: list[Block] = [Table("Percentiles", headers, rows, whole=True)] if rows else []
    missing = words.not_estimable(pair)
    return Section(f"brief-{number}", "", [*blocks, Paragraph(missing)] if missing else blocks, on=BRIEF)


def _difference(pair: PairComparison, number: int, name: FigureName, figure: ClaimedFigure) -> Figure:
    return Figure(figure.difference_ms, "ms", words.figure_path(number, name), text=words.difference(figure))


def _metrics(pair: PairComparison, number: int, name: str, *, forced: bool) -> Section:
    rows, groups, last = list[Row](), set[int](), ""
    for which, figure in _claims(pair):
        first = which.metric != last
        last = which.metric
        groups |= {len(rows)} if first else set()
        rows.append([
            NAMES[which.metric] if first else "", f"p{which.percentile:g}", _answer(figure, forced=forced),
            Figure(figure.a_ms), Figure(figure.b_ms), _difference(pair, number, which, figure),
            words.interval(figure), words.relative(figure), words.probability(figure.p_adjusted),
        ])  # fmt: skip
    headers: Headers = [
        "metric", "", "answer", *in_ms(pair.a, pair.b, "difference"), "95 % interval", "relative", "p, corrected"
    ]  # fmt: skip
    missing = words.not_estimable(pair)
    blocks: list[Block] = []
    if rows:
        blocks.append(Table("Differences of percentiles", headers, rows, words=3, groups=frozenset(groups)))
    if missing:
        blocks.append(Paragraph(missing, "quiet"))
    return Section(f"metrics-{number}", f"Percentiles{name}", blocks, _HOLM, "" if number else "percentiles")


def _changed(pair: PairComparison, number: int, name: str) -> Section:
    """The mean wait's difference by stage, to either event; the one that was claimed first."""
    title, short = f"What changed{name}", "" if number else "what changed"
    if not pair.stages:
        return Section(f"changed-{number}", title, [Paragraph(_NO_LEDGER)], short=short)
    first, blocks = pair.changed.event if pair.changed else "last_token", list[Block]()
    for event in sorted(pair.stages, key=lambda each: each != first):
        own = pair.stages[event]
        table = _stage_table(event, own, pair)
        blocks.append(Heading(f"To {_EVENTS[event]}: {words.difference(own.total)} ({words.interval(own.total)})"))
        largest = max((abs(one.difference_ms or 0.0) for one in own.stages), default=0.0)
        shown = [one for one in own.stages if largest and abs(one.difference_ms or 0.0) >= 0.01 * largest]
        blocks.append(
            Chart(f"changed-{number}-{event}", _changes(own, shown, pair.device), "", table, "names")
            if shown
            else table
        )
    lost = pair.unmeasured.get("last_token") or ()
    told = f" Not measured on both sides, so in unexplained: {', '.join(map(marks.words, lost))}." if lost else ""
    lead = f"The mean wait's difference, stage by stage; the stages add up to it exactly. Lines: 95 % intervals.{told}"
    return Section(f"changed-{number}", title, blocks, lead, short)


def _changes(own: StageDifferences, shown: Sequence[StageDifference], device: str) -> Changes:
    """A bar a stage, to the right where B is slower."""
    rows = [
        StageChange(
            one.stage, one.difference_ms or 0.0, low, high, "", f"{words.difference(one)} ({words.interval(one)})"
        )
        for one in shown
        for low, high in [one.ci_ms or (None, None)]
    ]
    said = f"The mean differs by {words.difference(own.total)}; a bar is what one stage adds to that."
    return Changes("What each stage adds to the difference", said, rows, device)


def _stage_table(event: str, own: StageDifferences, pair: PairComparison) -> Table:
    rows: list[Row] = []
    for one in own.stages:
        ends = f" ({share(one.share_ci[0])} .. {share(one.share_ci[1])})" if one.share_ci else ""
        inner = [one.percentiles.get(key) for key in ("p50", "p99")]
        rows.append([
            Stage(one.stage), owner_words(one.owner, pair.device), Figure(one.a_ms), Figure(one.b_ms),
            Figure(one.difference_ms, text=words.difference(one)), words.interval(one),
            f"{share(one.share)}{ends}" if ends else "", *(words.difference(each) if each else "" for each in inner),
        ])  # fmt: skip
    total = own.total
    rows.append([
        "sum", "", Figure(total.a_ms), Figure(total.b_ms), Figure(total.difference_ms, text=words.difference(total)),
        words.interval(total), "", "", "",
    ])  # fmt: skip
    headers: Headers = [
        "stage", "owner", *in_ms(f"{pair.a}, mean", f"{pair.b}, mean", "difference"), "95 % interval",
        "share of the whole", "at p50", "at p99",
    ]  # fmt: skip
    return Table(f"Stages to {_EVENTS[event]}", headers, rows, words=2)


def _shift(pair: PairComparison, number: int, name: str) -> Section:
    parts = []
    for metric, known in pair.metrics.items():
        rows: list[Row] = [
            [f"p{one.percentile:g}", Figure(one.a_ms), Figure(one.b_ms),
             Figure(one.difference_ms, text=words.difference(one)), words.interval(one)]
            for one in known.shift
        ]  # fmt: skip
        headers: Headers = ["decile", *in_ms(pair.a, pair.b, "difference"), "95 % interval"]
        table = Table(f"Shift of {NAMES[metric]}", headers, rows)
        body: Block = Paragraph("No decile is supported.")
        deciles = [
            Decile(
                f"p{one.percentile:g}", one.difference_ms, one.ci_ms, f"{words.difference(one)} ({words.interval(one)})"
            )
            for one in known.shift
        ]
        if any(one.ci_ms is not None for one in known.shift):
            body = Chart(f"shift-{number}-{metric}", Shift(NAMES[metric], deciles), "", table, "levels")
        parts.append([Heading(NAMES[metric]), body])
    lead = f"{pair.b} minus {pair.a} at every decile, with its 95 % interval: above the line is slower."
    return Section(f"shift-{number}", f"Shift{name}", [Columns(parts)], lead, "" if number else "shift")


# --- all sides


def _rare(row: SideRow) -> list[Words]:
    """Figures that only some runs have."""
    return [
        Figure(row.capacity.value, "number", hint=row.capacity.why, text=words.part(row.capacity, "req/s")),
        Figure(row.cost.value, "number", hint=row.cost.why, text=words.part(row.cost, "USD")),
        Figure(row.energy.value, "number", hint=row.energy.why, text=words.part(row.energy, "J")),
    ]


def _why_not(table: SideTable) -> str:
    """Why a dash stands where it does."""
    parts = {"capacity": [r.capacity for r in table.rows], "cost": [r.cost for r in table.rows],
             "energy": [r.energy for r in table.rows]}  # fmt: skip
    why = {f"{name}: {part.why}" for name, found in parts.items() for part in found if part.why}
    return f"{DASH} {'; '.join(sorted(why))}." if why else ""


_RARE: Headers = ["capacity", "per request at the SLA", "energy a request"]


def _sides(table: SideTable) -> Section:
    keys, rows = list(table.rows[0].figures), list[Row]()
    for row in table.rows:
        figures: list[Words] = [
            Figure(one.value_ms, text=f"{duration(one.value_ms)} ({bounds(*one.ci_ms)})" if one.ci_ms else "")
            for one in row.figures.values()
        ]
        rows.append([row.name, row.device, row.engine, count(row.requests), *figures, *_rare(row)])
    headers: Headers = ["", "device", "engine", "n", *in_ms(*map(words.figure_head, keys)), *_RARE]
    why = _why_not(table)
    blocks: list[Block] = [Table("All sides", headers, rows, words=3, css="dense")]
    blocks += [Paragraph(why, "quiet")] if why else []
    return Section(
        "sides", "All sides in one table", [*blocks, *map(Paragraph, words.spreads(table))], _SIDES, "all sides"
    )


def _sides_in_short(table: SideTable) -> Section | None:
    """Three sides or more in a few columns, and how far those on devices of one name lie apart."""
    if len(table.rows) < 3:
        return None
    rows: list[Row] = [[row.name, count(row.requests), *_rare(row), row.device] for row in table.rows]
    why = _why_not(table)
    blocks: list[Block] = [
        Table("All sides", [" ", "n", *_RARE, Column("device", wraps=True)], rows, whole=True),
        *([Paragraph(why)] if why else []),
        *map(Paragraph, words.spreads(table)),
    ]
    return Section("sides-in-short", "", blocks, on=BRIEF)


# --- how


def _method(result: Comparison) -> Section:
    blocks = [*_warnings(result), *_how(result), Pre(result.command)]
    return Section("method", "How, and how to repeat it", blocks, short="how")


def _method_in_short(result: Comparison, on: Medium) -> Section:
    return Section("how", "", [*_warnings(result), *(_how(result) if on is MARKDOWN else ())], on=on)


def _how(result: Comparison) -> list[Block]:
    return [Paragraph(f"{words.method_sentence(result)}.")] if result.method else []


def _warnings(result: Comparison) -> list[Block]:
    return [Warnings([Warned(text) for text in result.warnings])] if result.warnings else []
