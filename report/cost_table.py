"""What is said of devices and settings side by side: which serves a request for less, and how sure that is."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from gapmeter.analysis.numbers import DASH, counted, rate, share, significant, usd
from gapmeter.analysis.results.codec import Ends
from gapmeter.analysis.results.comparison import NOT_COMPARABLE
from gapmeter.analysis.results.cost_table import CHEAPER, CostRatio, CostRow, CostTable, CostWords
from gapmeter.records import RunFolder
from gapmeter.report import document as doc
from gapmeter.report import html, marks, pareto
from gapmeter.report.cost import price_words
from gapmeter.report.document import MARKDOWN, TERMINAL, Column, Figure, Name, Paragraph, Row, Section, Table, Words
from gapmeter.report.words import as_sentence, grouped, low_to_high, page_of, tone
from gapmeter.scenarios.errors import either

_LEAD: Final = (
    "The rate at which every SLO holds, what a request costs at that rate (the estimate, with the interval that the "
    "rate's own gives it), and that cost as a multiple of the cheapest row's."
)
_LONGEST = 40  # characters of a name in a sentence
_FEW = 6  # rows in a sentence


def write(folder: Path, result: CostTable) -> CostTable:
    """``compare.json`` and ``report.html`` of a folder; returns the result with its words. Raises OSError."""
    result = result.model_copy(update={"words": CostWords(headline=headline(result), why=tuple(_doubts(result)))})
    result.write(folder)
    html.write(RunFolder(folder).report, document(result))
    return result


def document(result: CostTable) -> doc.Document:
    """The page, and in short the terminal's and Markdown's answer."""
    doubts = [doc.Said(text) for text in _doubts(result)]
    simulated = ["the simulated engine does not represent a real one"] * any(row.simulated for row in result.rows)
    notes = [Paragraph(as_sentence(text)) for text in (*result.notes, *simulated)]
    several = len({row.device for row in result.rows}) > 1
    sides = {row.name: f"{row.device}, {row.setting}" if several else row.setting for row in result.rows}
    shown = [
        Section("costs", "Cost of a request, row by row", [_table(result), *notes], _LEAD, "costs"),
        pareto.section(result.pareto, "pareto", sides),
    ]
    return doc.Document(
        title=f"{result.verdict} · cost · gapmeter",
        header=doc.Header(f"{result.rows[0].scenario}: what a request costs"),
        verdict=doc.Verdict(result.verdict, tone(result.verdict), headline(result), more=doubts),
        sections=[
            *(shown if _has_costs(result) else reversed(shown)),
            _in_short(result, notes),
            Section("costs-md", "", [_table(result), *notes], on=MARKDOWN),
            Section("method", "How, and how to repeat it", [Paragraph(method(result)), doc.Pre(result.command)],
                    short="how", on=doc.PAGE),
        ],
        provenance=result.provenance,
    )  # fmt: skip


# --- the answer in sentences


def _paid(result: CostTable) -> list[str]:
    """What fleets of whole replicas cost for a load that every row was planned for: the order may be another."""
    fleets = [(row.fleet, row) for row in result.rows if row.fleet and row.fleet.per_request_usd and row.ratio]
    if len(fleets) < 2 or len({fleet.target_rps for fleet, _ in fleets}) > 1:
        return []
    said = [
        f"{row.name} {usd(1e6 * (fleet.per_request_usd or 0.0))} ({counted(fleet.replicas, 'replica')})"
        for fleet, row in sorted(fleets, key=lambda each: each[0].per_request_usd or 0.0)
    ]
    return [f"For {rate(fleets[0][0].target_rps)}, in whole replicas, a million requests cost {', '.join(said)}."]


def headline(result: CostTable) -> str:
    """Which row serves a request for less, or that nobody can say; then what the rows hold, the cheapest first."""
    known = [row for row in result.rows if row.capacity.low or row.capacity.high]
    if result.verdict == NOT_COMPARABLE or not known:
        return _answer(result)
    each = "; ".join(_holds(row, result) for row in sorted(known, key=_cost)[:_FEW])
    return f"{_answer(result)} Within the SLOs {each}."


def _cost(row: CostRow) -> float:
    """What rows are ordered by: the cost's estimate, else its upper end; without a price, the inverse of the rate."""
    ends = row.per_request_usd_ci
    return row.per_request_usd or (ends and ends[1]) or 1 / (row.capacity.rate or row.capacity.low or 1e-9)


def _holds(row: CostRow, result: CostTable) -> str:
    """``B (max_batch 8) holds 41.0 req/s (38.0 to 44.0) for $0.120 a million``."""
    capacity = row.capacity
    if capacity.rate:
        held = f"{rate(capacity.rate)} ({_between(capacity.low, capacity.high, ' to ')})"
    else:
        held = f"{_one_end(capacity.low, capacity.high, 'below')} req/s"
    cost = _money(row.per_request_usd, None if row.per_request_usd else row.per_request_usd_ci, 1e6)
    holds = "serves about" if capacity.rate and not capacity.held else "holds"
    return f"{_called(row, result)} {holds} {held}{cost and f' for {cost} a million'}"


def _answer(result: CostTable) -> str:
    rows = {row.name: row for row in result.rows}
    priced = [(row, row.ratio) for row in result.rows if row.ratio]
    if result.verdict == NOT_COMPARABLE:
        return f"Not comparable: {'; '.join(_differences(row) for row in result.rows[1:])}."
    if result.cheapest is None:
        missing = "; ".join(_without_cost(result)) or "fewer than two rows are comparable"
        return f"Which is cheaper is not established: {missing}."
    best = rows[result.cheapest]
    others = [(row, ratio) for row, ratio in priced if row is not best]
    others.sort(key=lambda other: other[1].value or other[1].low or other[1].high or 0.0)
    if result.verdict != CHEAPER:
        close = [row.name for row, ratio in others if ratio.doubt]
        which = "Which is cheaper" if len(priced) == 2 else "Which is the cheapest"
        return f"{which} is not established: {either(sorted([best.name, *close]))} may be."
    nearest, ratio = others[0]
    what = f"{_called(best, result)} serves a request for {_inverse(ratio)} of what {_called(nearest, result)}"
    return f"{what} costs." if len(others) == 1 else f"{what}, the next cheapest, costs."


def _inverse(ratio: CostRatio) -> str:
    """The cheapest row over another: ``0.62 (0.55 to 0.70)``."""
    assert ratio.low
    if ratio.value is None:
        return f"at most {significant(1 / ratio.low, 2)}"
    least = "0" if ratio.high is None else significant(1 / ratio.high, 2)
    return f"{significant(1 / ratio.value, 2)} ({least} to {significant(1 / ratio.low, 2)})"


def _doubts(result: CostTable) -> list[str]:
    """For each row that may as well be the cheapest, why."""
    said = []
    for row in result.rows:
        if row.ratio is None or row.ratio.doubt is None:
            continue
        best, times = result.cheapest, _times(row.ratio)
        if row.ratio.doubt == "open":
            lacking = [one for one in result.rows if one.name in (row.name, best) and not one.capacity.rate]
            both = all(one.capacity.low and one.capacity.high for one in lacking)
            known, other = ("two ends are", "what lies between") if both else ("one end is", "the other")
            of = f"{' and '.join(one.name for one in lacking)}'s rate only {known} known"
            searched = all(one.kind == "capacity" for one in lacking)
            more = "--resume FOLDER with a larger --budget" if searched else "gapmeter capacity"
            said.append(f"{row.name} costs {times} times what {best} does: of {of}; {more} may find {other}.")
        elif row.ratio.doubt == "interval":
            pairs = [one.name for one in result.rows if one.name in (row.name, best) and len(one.folders) == 2]
            more = f" A third search of {' and '.join(pairs)} would tell more than the second did." if pairs else ""
            said.append(f"{row.name} costs {times} times what {best} does, which may not be a real difference.{more}")
        else:
            own = _between(*row.ratio.own, " to ")
            singles = [one.name for one in result.rows if one.name in (row.name, best) and len(one.folders) == 1]
            sides = " ".join(",".join(f"{name}{number}" for number in (1, 2, 3)) for name in singles)
            said.append(
                f"{row.name} costs {times} times what {best} does: {own} by their own intervals, but two "
                f"searches of one server have differed by some {share(2**0.5 * result.search_spread)}. Search "
                f"{' and '.join(singles)} three times, and name them as one side: {sides}."
            )
    said += _paid(result)
    if result.cheapest is not None:  # else the first sentence names them
        said += [f"{text}." for text in _without_cost(result)]
    else:
        said += _serves(result)
    if result.verdict != NOT_COMPARABLE:  # which says it first
        said += [f"Not comparable: {_differences(row)}." for row in result.rows if row.blocking]
    return said


def _has_costs(result: CostTable) -> bool:
    return any(row.per_request_usd_ci for row in result.rows)


def _without_cost(result: CostTable) -> list[str]:
    """``A and B have no cost (why)``, once for each reason."""
    names = grouped((row.why_no_cost, row.name) for row in result.rows if row.why_no_cost)
    have = {why: f"{' and '.join(rows)} {'has' if len(rows) == 1 else 'have'}" for why, rows in names.items()}
    return [f"{rows} no cost ({why})" for why, rows in have.items()]


def _serves(result: CostTable) -> list[str]:
    """What each row's hardware serves over what the first one's does, load by load."""
    rows = {row.name: row for row in result.rows}
    served = grouped(
        (one.row, f"{significant(one.times.value)} ({_between(one.times.low, one.times.high, ' to ')}) at {one.point}")
        for one in result.served
    )
    unit, first = result.pareto.unit if result.pareto else "", result.served[0].over if result.served else ""
    said = [
        f"Output tokens per second and {unit}, {_called(rows[name], result)} over {_called(rows[first], result)}: "
        f"{', '.join(times)}."
        for name, times in served.items()
    ]
    return [*said, *["How much repeated runs differ is not in these intervals."] * bool(said)]


def method(result: CostTable) -> str:
    """How the ratios were made."""
    return (
        "Cost of a request: price of a replica over 3600 x rate x planned utilisation. A ratio's 95 % interval "
        "combines both rates' own on the logarithmic scale (MOVER), for a single search with what two searches of one "
        f"server differ by (a standard deviation of {share(result.search_spread)} each), and is widened for the number "
        "of pairs of rows. For several searches a side, the interval is from how far they differ, with "
        f"{share(result.search_spread)} as one difference more (Student's t). A row that has passed at its rate "
        "and was not searched has one end: it may hold more. An end without an estimate is taken as it is."
    )


def _called(row: CostRow, result: CostTable) -> str:
    """A row's letter, with the device or setting where those are short and differ."""
    for name in ("device", "setting"):
        values = [str(getattr(one, name)) for one in result.rows]
        if len(set(values)) > 1 and max(map(len, values)) <= _LONGEST:
            return f"{row.name} ({getattr(row, name)})"
    return row.name


def _differences(row: CostRow) -> str:
    facts = "; ".join(f"{fact.key}: {fact.a} | {fact.b}" for fact in row.blocking)
    return f"{row.name} differs from A in {facts}"


# --- the table


def _cells(row: CostRow) -> tuple[str, str, str, str]:
    """Capacity, cost of a million requests and of a million output tokens (or ""), ratio; each with its interval."""
    low, high = row.capacity.low, row.capacity.high
    if row.capacity.rate:
        capacity = f"{significant(row.capacity.rate)} ({_between(low, high, ' .. ')})"
    else:
        capacity = _one_end(low, high, "below") or DASH
    requests = _money(row.per_request_usd, row.per_request_usd_ci, 1e6)
    tokens = _money(row.per_million_output_tokens_usd, row.per_million_output_tokens_usd_ci)
    return capacity, requests, tokens, _ratio(row)


def _money(value: float | None, ends: Ends | None, many: float = 1.0) -> str:
    """``$3.70 (3.09 .. 4.03)``, or the end that is known; "" where neither is."""
    low, high = (None if end is None else many * end for end in ends or (None, None))
    if value is None:
        return f"at most {usd(high)}" if high else ""
    return usd(many * value) if ends is None else f"{usd(many * value)} ({_between(low, high, ' .. ')})"


def _between(low: float | None, high: float | None, joint: str) -> str:
    """Two ends, a question mark for one that is unknown."""
    return joint.join("?" if end is None else significant(end) for end in (low, high))


def _ratio(row: CostRow) -> str:
    if row.blocking and row.ratio is None:
        return "not comparable"
    if row.ratio is None:
        return DASH
    if row.ratio.value == row.ratio.low == row.ratio.high:
        return "1" if row.ratio.value else "not established"
    return _times(row.ratio)


def _is_open(row: CostRow) -> bool:
    """Whether a row's ratio has an interval that establishes nothing."""
    return row.ratio is not None and row.ratio.doubt is not None and row.ratio.low != row.ratio.high


def _times(ratio: CostRatio) -> str:
    """``1.61 (1.43 to 1.82)``, or the end that is known."""
    if ratio.value is None:
        return _one_end(ratio.low, ratio.high, "at most") or "an unknown number of"
    return f"{significant(ratio.value)} ({_between(ratio.low, ratio.high, ' to ')})"


def _one_end(low: float | None, high: float | None, upper: str) -> str:
    """``at least 4``, ``at most 5``, or both; "" where neither is known."""
    least, most = low and f"at least {significant(low)}", high and f"{upper} {significant(high)}"
    return ", ".join(end for end in (least, most) if end)


def _energy(row: CostRow) -> str:
    if row.energy_per_request_j is None:
        return DASH
    ends = low_to_high(row.energy_per_request_j_ci)
    return f"{significant(row.energy_per_request_j)} J{ends and f' ({ends})'}"


def _binds(row: CostRow) -> str:
    stage = f" ({marks.words(row.binding_stage)})" if row.binding_stage else ""
    return f"{row.binding_slo}{stage}" if row.binding_slo else DASH


def _set(row: CostRow) -> str:
    """Its setting, and how many of one side it is of."""
    many = "searches" if row.kind == "capacity" else f"{row.kind}s"
    return row.setting if len(row.folders) == 1 else f"{row.setting}; {len(row.folders)} {many}"


def _table(result: CostTable) -> Table:
    """All that is known of every row."""
    rows: list[Row] = []
    fleets = any(row.fleet for row in result.rows)
    for at, row in enumerate(result.rows):
        capacity, requests, tokens, ratio = _cells(row)
        ratio += ", not established" * _is_open(row)
        # The page of its only search, sweep or run; of several, or of an archive, there is none.
        own = [path for side in result.asked.folders or () for path in side if Path(path).name in row.folders]
        cells: list[Words] = [
            Name(row.name, page_of(own[0] if len(own) == 1 else "")), row.device, _set(row),
            Figure(row.capacity.rate, "rate", f"rows.{at}.capacity.rate", text=capacity),
            Figure(row.capacity.held, "number"), price_words(row.price) if row.price else row.why_no_cost or DASH,
            Figure(row.per_request_usd, "usd", f"rows.{at}.per_request_usd", text=requests),
            Figure(row.per_million_output_tokens_usd, "usd", text=tokens), _energy(row),
            doc.Mark(ratio, "good" if row.name == result.cheapest and result.verdict == CHEAPER else ""), _binds(row),
        ]  # fmt: skip
        rows.append([*cells, _fleet(row)] if fleets else cells)
    headers: doc.Headers = [
        "", "device", "setting", "within the SLO (req/s)", "proven to hold (req/s)", Column("price", wraps=True),
        "a million requests", "a million output tokens", "energy a request", "times the cheapest",
        Column("what binds", wraps=True), *([Column("in whole replicas", wraps=True)] if fleets else []),
    ]  # fmt: skip
    return Table("What a request costs", headers, rows, words=3, css="dense")


def _fleet(row: CostRow) -> str:
    if not row.fleet:
        return DASH
    each = row.fleet.per_request_usd
    cost = "" if each is None else f": {usd(1e6 * each)} a million requests"
    return f"{row.fleet.replicas} for {rate(row.fleet.target_rps)}{cost}"


def _in_short(result: CostTable, notes: list[Paragraph]) -> Section:
    """The terminal's: figures in columns, and what they are of beneath; without any cost, what was served."""
    rows: list[Row] = []
    told: list[tuple[str, str]] = []
    for row in result.rows:
        capacity, requests, tokens, ratio = _cells(row)
        price = price_words(row.price) if row.price else row.why_no_cost or "no price"
        more = [*(["ratio not established"] if _is_open(row) else []), f"{row.device}; {_set(row)}; {price}"]
        if row.price and row.why_no_cost and (result.cheapest or not result.served):
            more.append(f"no cost: {row.why_no_cost}")
        more += [f"proven to hold {rate(row.capacity.held)}"] * (row.capacity.held is not None)
        more += [f"{tokens} a million output tokens"] * bool(tokens)
        more += [f"energy a request {_energy(row)}"] * (row.energy_per_request_j is not None)
        more += [f"binds: {_binds(row)}"] * bool(row.binding_slo)
        more += [f"in whole replicas: {_fleet(row)}"] * bool(row.fleet)
        told.append((row.name, "; ".join(more)))
        rows.append([Name(row.name), capacity, requests or DASH, ratio, "; ".join(more)])
    headers: doc.Headers = [
        "", "req/s within the SLO", "a million requests", "times the cheapest", Column("", below=True)
    ]  # fmt: skip
    blocks: list[doc.Block] = [Table("What a request costs", headers, rows, words=1), *notes]
    if result.pareto and result.served and not _has_costs(result):
        blocks = [pareto.in_short(result.pareto), doc.Facts(told), *notes]
    return Section("costs-brief", "", blocks, on=TERMINAL)
