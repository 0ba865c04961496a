"""What is said of a comparison: the verdict, whether it may be made at all, all sides in a table, the method."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from gapmeter.analysis.numbers import DASH, bounds, count, duration, share, significant
from gapmeter.analysis.results.comparison import (
    BLOCKS,
    VALID,
    VALIDITY,
    Comparison,
    ComparisonWords,
    Fact,
    PairWords,
    SideFacts,
    SideRow,
    SideTable,
)
from gapmeter.analysis.results.regression import (
    MOST_RUNS,
    NOT_ESTIMABLE,
    REGRESSED,
    UNDECIDED,
    Regression,
    RegressionRow,
)
from gapmeter.analysis.results.run import INVALID
from gapmeter.records import RunFolder
from gapmeter.report import differences, html
from gapmeter.report import document as doc
from gapmeter.report.differences import change_sentence, failed_sentence, growth_interval, relative, verdict_sentence
from gapmeter.report.document import BRIEF, MARKDOWN, TERMINAL, Figure, Paragraph, Row, Said, Section, Table, Words
from gapmeter.report.words import as_sentence, grouped, low_to_high, tone

_LONGEST = 40  # characters of a value in a sentence
_NAMED = 4  # of what differs, in a sentence
_ONE_LINE = 70  # characters
_SAME = "Scenario, plan, model, engine, hardware and load tester are the same on all sides."
_MEANINGS = (
    "factor: what is compared; follows: differs because of it; noted: changes no latency; blocks: must not differ."
)
_SIDES = (
    "As each run's own report has them: percentiles are order statistics. Differences above are of smoother estimates "
    "(Harrell and Davis), so the two may differ slightly."
)
_ONE_RUN = "one run per side: the interval leaves out how much repeated runs differ"
_RARE: doc.Headers = ["per request at the SLO", "energy a request"]


def write(folder: Path, result: Comparison) -> Comparison:
    """``compare.json`` and ``report.html`` of a folder; returns the result with its sentences. Raises OSError."""
    result = result.model_copy(update={"words": words_of(result)})
    result.write(folder)
    html.write(RunFolder(folder).report, document(result))
    return result


def document(result: Comparison) -> doc.Document:
    """The page, and in short the terminal's and Markdown's answer."""
    several, sections = len(result.comparisons) > 1, list[Section | None]()
    checked = [_protocol(result), _facts(result)]
    for number, pair in enumerate(result.comparisons):
        name = f" ({pair.b} against {pair.a})" if several else ""
        sections += [
            *differences.brief(pair, number, forced=result.forced),
            differences.changed(pair, number, name),
            differences.metrics(pair, number, name),
            differences.shift(pair, number, name),
        ]
    if result.table:
        sections += [_sides(result.table), _sides_in_short(result.table)]
    # What was found comes first; where nothing was compared, why not.
    sections = [*sections, *checked] if result.comparisons else [*checked, *sections]
    # What to type where there are no figures.
    remedied = None if result.comparisons else Section("remedy", "", [Paragraph(remedy(result))], on=TERMINAL)
    sides = "; ".join(f"{side.name}: {', '.join(side.runs)}" for side in result.sides)
    return doc.Document(
        title=f"{result.verdict} · comparison · gapmeter",
        header=doc.Header(f"{result.sides[0].scenario or 'runs'}: a comparison", sides),
        verdict=_verdict(result),
        sections=[*sections, *_method(result), remedied],
        provenance=result.provenance,
        device=result.comparisons[0].device if result.comparisons else "GPU",
    )


def with_gate(document: doc.Document, regression: Regression) -> doc.Document:
    """The document, with what a gate found."""
    assert document.verdict is not None
    said = Said(as_sentence(f"{regression.status}: {regression.sentence}"), strong=True)
    return replace(document, verdict=replace(document.verdict, more=[*document.verdict.more, said]))


def _verdict(result: Comparison) -> doc.Verdict:
    first, *more = [verdict_sentence(pair) for pair in result.comparisons] or [not_comparable(result)]
    said = [Said(as_sentence(each)) for each in more]
    said += [Said(as_sentence(text), strong=True) for pair in result.comparisons if (text := change_sentence(pair))]
    trust = doc.Trust(sound=True, word="Comparable.", words="Only what is compared differs.")
    if not result.comparable:
        trust = doc.Trust(sound=False, word="Not comparable.", words=remedy(result))
    return doc.Verdict(
        word=result.verdict, tone=tone(result.verdict), sentence=as_sentence(first), more=said, trust=trust
    )


# --- the answer in sentences


def words_of(result: Comparison) -> ComparisonWords:
    """Every sentence of a comparison, for its file."""
    pairs = [
        PairWords(verdict=verdict_sentence(pair), changed=change_sentence(pair) or None) for pair in result.comparisons
    ]
    return ComparisonWords(
        headline=headline(result), comparisons=tuple(pairs), method=method_sentence(result) if result.method else None
    )


def headline(result: Comparison) -> str:
    """What a person reads first."""
    if not result.comparisons:
        return not_comparable(result)
    said = [verdict_sentence(pair) for pair in result.comparisons]
    changed = result.comparisons[0].changed
    if len(said) == 1 and changed and changed.stage:
        said.append(change_sentence(result.comparisons[0]))
    return " ".join(map(as_sentence, said))


def not_comparable(result: Comparison) -> str:
    """What differs, in short: what is long stands once, in the protocol."""
    invalid, first = set(), result.sides[0].name
    differing: dict[tuple[str, str], None] = {}
    for each in result.protocol:
        between = f"{first} and {each.side} differ in more than what is compared"
        for fact in each.facts:
            if fact.key == VALIDITY:
                invalid |= {side for side, said in ((first, fact.a), (each.side, fact.b)) if said != VALID}
            elif fact.meaning == BLOCKS:
                who = f"{fact.within}'s own runs differ" if fact.within else between
                differing[who, f"{fact.key}: {_short(fact.a)} | {_short(fact.b)}"] = None
    parts = [
        f"{who}: {'; '.join(said[:_NAMED])}{f'; and {len(said) - _NAMED} more' if len(said) > _NAMED else ''}"
        for who, said in grouped(differing).items()
    ]
    if invalid:
        named = " and ".join(_invalid(one) for one in result.sides if one.name in invalid)
        parts.append(f"{named} {'is' if len(invalid) == 1 else 'are'} not valid as a measurement (validity)")
    return ". ".join(parts)


def _invalid(side: SideFacts) -> str:
    """``B``; where some of its runs are valid, with those that are not: ``B (20260102-…-a1b2c3)``."""
    bad = [run for run, verdict in zip(side.runs, side.verdicts, strict=True) if verdict == INVALID]
    return f"{side.name} ({', '.join(bad)})" if 0 < len(bad) < len(side.runs) else side.name


def _short(value: str) -> str:
    return value if len(value) <= _LONGEST else f"{value[: _LONGEST - 3]}..."


def method_sentence(result: Comparison) -> str:
    """How the differences were made, and what the correction promises."""
    method, first = result.method, result.comparisons[0]
    assert method is not None
    how = (
        "resampled in pairs, since both sides issued the same plan"
        if first.paired
        else "each side resampled separately"
    )
    why = f" ({first.why_not_paired})" if first.why_not_paired else ""
    turn = " run alternately" if method.in_turn else ""
    several = max(first.runs) > 1
    counted = (
        f"; {first.runs[0]} and {first.runs[1]} runs{turn}: the wider interval, of within and between runs, counts"
    )
    return (
        f"{method.resamples:,} stationary block resamples (blocks of {first.block_requests:.0f} requests on average, "
        f"{how}{why}) of Harrell-Davis percentiles and of means{counted if several else ''}. Holm's correction over "
        f"{method.family} figures, without the shares that failed: the chance that any of these is claimed to differ "
        f"that does not is at most {share(1 - method.confidence)}"
        f"{'' if several else ', for these runs alone: repeated ones may differ by more'}"
    )


def remedy(result: Comparison) -> str:
    """What to type where runs were refused."""
    blocking = [fact for each in result.protocol for fact in each.blocking]
    forced = "or --force compares anyway, and marks every table of differences"
    if any(fact.key == VALIDITY for fact in blocking):
        return f"repeat the runs that are not valid; {forced}"
    if any(fact.within for fact in blocking):
        return f"name only runs of one and the same thing as a side; {forced}"
    declared = sorted({fact.key for fact in blocking})
    groups = [(head, list(group)) for head, group in itertools.groupby(declared, lambda key: key.partition(".")[0])]
    factors = [name for head, group in groups for name in (group if len(group) < 3 else [head])]
    listed = " ".join(f"--factor {name}" for name in factors)
    return f"if that is what you compare: {listed}; {forced}"


def _figure_head(key: str) -> str:
    """``TTFT p99`` of ``ttft_p99``."""
    metric, _, percentile = key.partition("_")
    return f"{metric.upper()} {percentile}"


def with_sentences(found: Regression, result: Comparison) -> Regression:
    """The regression with its sentences; ``result`` is the comparison with the baseline."""
    if not result.comparable:
        return found.model_copy(update={"sentence": not_comparable(result)})
    rows = tuple(row.model_copy(update={"sentence": _regression_row(row, found)}) for row in found.rows)
    sentences = [row.sentence for row in rows if row.status == found.status or row.late_ms is not None]
    failed = found.failed
    if failed is not None:
        failed = failed.model_copy(update={"sentence": failed_sentence("the new side", "the baseline", failed)})
        sentences += [failed.sentence] if failed.a_share or failed.b_share else []
    changed = result.comparisons[0].changed
    if found.status == REGRESSED and changed and changed.stage:
        sentences.append(change_sentence(result.comparisons[0]))
    sentences += [_ONE_RUN] if found.one_run_a_side else []
    return found.model_copy(update={"rows": rows, "failed": failed, "sentence": "; ".join(sentences)})


def _regression_row(row: RegressionRow, found: Regression) -> str:
    is_mean = row.name == f"mean {row.metric}"
    name = row.name.replace(row.metric, row.metric.upper())
    if row.status == NOT_ESTIMABLE:
        return f"{name} cannot be compared: {row.why or 'its baseline is 0'}"
    a, b = ("at least " if side in (row.failed or "") else "" for side in "ab")
    grew = f"{name} {a}{duration(row.a_ms)} -> {b}{duration(row.b_ms)}"
    grew += "" if row.failed else f", {relative(row)} (95 % interval {growth_interval(row)})"
    meaning = {REGRESSED: ": a regression", UNDECIDED: f": undecided; {_what_decides(row, found)}"}.get(row.status, "")
    stands_in = ", judged by the mean: the sample is too small for the percentile" if is_mean else ""
    return f"{grew}, allowed +{share(found.limit)}{meaning}{stands_in}"


def _what_decides(row: RegressionRow, found: Regression) -> str:
    """How many runs a side would decide it, and the smallest regression that these would find."""
    if row.failed:
        return "its interval reaches requests that failed, of which nobody knows how long they would have taken"
    a, b = reversed(found.runs or (1, 1))
    seen = f"{a} against {b} runs find a regression of {share(row.least)} or more 80 % of the time"
    if row.floor_ms is not None:
        floor = f"the load tester's own floor of {duration(row.floor_ms)}"
        return f"{seen}; at this growth, which is within {floor}, no number of runs decides it"
    if row.runs_needed is not None:
        return f"{seen}; to decide this one takes about {row.runs_needed} per side, at this growth and spread"
    if found.one_run_a_side:
        return f"{seen}, if runs did not differ; three runs per side would show how much they do"
    return f"{seen}; to decide this one takes more than {MOST_RUNS} per side, at this growth and spread"


# --- may they be compared?


def _protocol(result: Comparison) -> Section:
    rows: list[Row] = [
        [doc.Mark(fact.meaning, "bad" if fact.meaning == BLOCKS else ""), what,
         *(f"{fact.within}: {value}" if fact.within else value for value in (fact.a, fact.b))]
        for what, fact in _facts_once(result)
    ]  # fmt: skip
    if not rows:
        return Section("protocol", "Can they be compared?", [Paragraph(_SAME)], short="comparable")
    other = doc.Column("the other", brief="B" if len(result.protocol) == 1 else "")
    table = Table("What differs", ["", "what differs", "A", other], rows, words=4)
    return Section("protocol", "Can they be compared?", [table], _MEANINGS, "comparable", doc.PAGE | MARKDOWN)


def _facts(result: Comparison) -> Section | None:
    """The same in a terminal, a line each; values that do not fit there are in the report."""
    rows = list[tuple[str, str]]()
    for what, fact in _facts_once(result):
        line = f"{what}: {fact.a} | {fact.b}"
        rows.append((fact.meaning, line if len(line) <= _ONE_LINE else f"{what} (the report has the values)"))
    return Section("facts", "", [doc.Facts(rows)], on=TERMINAL) if rows else None


def _facts_once(result: Comparison) -> Iterable[tuple[str, Fact]]:
    """Every fact after what it is of: its key, with the side whose own runs differ in it, or which of several does."""
    several = len(result.protocol) > 1
    of_each = [(each.side, fact) for each in result.protocol for fact in each.facts]
    return dict.fromkeys(
        (f"{fact.key}, within {fact.within}" if fact.within else f"{side}, {fact.key}" if several else fact.key, fact)
        for side, fact in of_each
    )


# --- all sides


def _rare(row: SideRow) -> list[Words]:
    """Figures that only some runs have, each with its interval; a dash where there is none."""
    cells: list[Words] = []
    for part, unit in ((row.cost, "USD"), (row.energy, "J")):
        ends = f" ({within})" if (within := low_to_high(part.ci)) else ""
        text = DASH if part.value is None else f"{significant(part.value)}{ends} {unit}"
        cells.append(Figure(part.value, "number", hint=part.why, text=text))
    return cells


def _notes(table: SideTable, tone: Literal["", "quiet"] = "") -> list[doc.Block]:
    """Why a dash stands where it does, and how far sides on devices of one name, under one scenario, lie apart."""
    parts = [(name, getattr(row, name)) for row in table.rows for name in ("cost", "energy")]
    why = sorted({f"{name}: {part.why}" for name, part in parts if part.why and part.value is None})
    notes = [f"{DASH} {'; '.join(why)}."] if why else []
    notes += [f"{row.name}'s cost is {row.cost.why}." for row in table.rows if row.cost.why and row.cost.value]
    blocks: list[doc.Block] = [Paragraph(text, tone) for text in notes]
    for each in table.devices:
        said = ", ".join(f"{_figure_head(key)} {share(found.relative)}" for key, found in each.figures.items())
        where = f"{', '.join(each.sides)}, each on {each.device}"
        blocks += [Paragraph(f"Spread between identical devices ({where}): {said}.")] if said else []
    return blocks


def _sides(table: SideTable) -> Section:
    keys, rows = list(table.rows[0].figures), list[Row]()
    for row in table.rows:
        figures: list[Words] = []
        for one in row.figures.values():
            text = f"{duration(one.value_ms)} ({bounds(*one.ci_ms)})" if one.ci_ms else ""
            late = "" if one.late_ms is None else f"refused: {duration(one.late_ms)} late"
            figures.append(Figure(one.value_ms, hint=one.why, text=late or text))
        rows.append([row.name, row.device, row.engine, count(row.requests), *figures, *_rare(row)])
    headers: doc.Headers = ["", "device", "engine", "n", *doc.in_ms(*map(_figure_head, keys)), *_RARE]
    blocks = [Table("All sides", headers, rows, words=3, css="dense"), *_notes(table, "quiet")]
    return Section("sides", "All sides in one table", blocks, _SIDES, "all sides")


def _sides_in_short(table: SideTable) -> Section | None:
    """Three sides or more in a few columns."""
    if len(table.rows) < 3:
        return None
    rows: list[Row] = [[row.name, count(row.requests), *_rare(row), row.device] for row in table.rows]
    headers: doc.Headers = [" ", "n", *_RARE, doc.Column("device", wraps=True)]
    blocks = [Table("All sides", headers, rows), *_notes(table)]
    return Section("sides-in-short", "", blocks, on=BRIEF)


# --- how


def _method(result: Comparison) -> list[Section]:
    warnings = [doc.Warnings([doc.Warned(text) for text in result.warnings])] if result.warnings else []
    how = [Paragraph(f"{method_sentence(result)}.")] if result.method else []
    return [
        Section("method", "How, and how to repeat it", [*warnings, *how, doc.Pre(result.command)], short="how"),
        Section("how", "", warnings, on=TERMINAL),
        Section("how", "", [*warnings, *how], on=MARKDOWN),
    ]
