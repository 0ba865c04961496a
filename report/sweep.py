"""What is said of a sweep: what it found, the pictures, every point, what grows, what binds, how it was run."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gapmeter.analysis.judge.words import late_words
from gapmeter.analysis.numbers import DASH, counted, duration, significant
from gapmeter.analysis.results.cost import Cost
from gapmeter.analysis.results.manifest import SweepManifest
from gapmeter.analysis.results.sweep import (
    FAILED,
    LostPoint,
    Point,
    PointWords,
    SweepFigures,
    SweepResult,
    SweepWords,
    level_key,
)
from gapmeter.records import RunFolder
from gapmeter.report import document as doc
from gapmeter.report import growth, html, marks, pareto
from gapmeter.report.cost import cost_sentence, price_words, value_sentence
from gapmeter.report.document import BRIEF, Block, Column, Figure, Mark, Name, Paragraph, Row, Section, Table, in_ms
from gapmeter.report.growth import growth_sentence, headline
from gapmeter.report.pictures import stages_in
from gapmeter.report.slo import slo_sentence
from gapmeter.report.sweep_charts import PointByPoint
from gapmeter.report.words import as_sentence, both, grouped, interval, page_of, reproduce, tone

_STACKS = {"ttft": "Time to first token (TTFT)", "itl": "A token gap (ITL)", "e2e": "The whole answer (E2E)"}
_METRICS = tuple(_STACKS)
_BINDS = (
    "The resource on which most of the mean answer is spent. A queue only shows that something else is busy, which is "
    "named behind it. docs/sweeps.md has the rule."
)
_COST = (
    "A request costs what a replica costs in an hour, over the requests that it serves in one at the planned share of "
    "a rate that held the SLOs: an upper limit, because higher rates were not tried. A point "
    "that missed them has no cost."
)


def write(folder: RunFolder, result: SweepResult) -> SweepResult:
    """``summary.json`` and ``report.html`` of a sweep's folder. Returns the result with its words. Raises OSError."""
    result = result.model_copy(update={"words": words_of(result)})
    result.write(folder.path)
    html.write(folder.report, document(result, SweepManifest.read(folder.path)))
    return result


def words_of(result: SweepResult) -> SweepWords:
    """Every sentence of a sweep, for its file."""
    points = [_words_of(point) if isinstance(point, Point) else None for point in result.sweep.points]
    return SweepWords(
        headline=tuple(headline(result.sweep, result.device)),
        growth=tuple(growth_sentence(each, result.device) for each in result.sweep.growth),
        points=tuple(points),
    )


def _words_of(point: Point) -> PointWords:
    cost, value = point.economy.cost, point.economy.value
    answers = tuple(slo_sentence(answer) for answer in point.slo)
    return PointWords(slo=answers, cost=cost_sentence(cost), value=value_sentence(value, cost))


def document(result: SweepResult, manifest: SweepManifest) -> doc.Document:
    """The page, and in short the terminal's table and Markdown."""
    sweep, title = result.sweep, f"{result.name}: {counted(len(result.sweep.points), 'point')}"
    first, *more = headline(sweep, result.device) or ["The points are below."]
    unfinished = doc.Trust(sound=False, word="Not finished.", words="Some points have not been run.")
    return doc.Document(
        title=f"sweep · {result.name} · gapmeter",
        header=doc.Header(title, result.provenance.load),
        verdict=doc.Verdict(
            word="",
            tone="open" if result.exit_code else "",
            sentence=first,
            more=[doc.Said(line, strong=True) for line in more],
            trust=unfinished if result.status != "complete" else None,
        ),
        sections=[
            _brief(sweep),
            pareto.section(sweep.pareto, "sweep.pareto"),
            _stages(result),
            _points(sweep),
            growth.section(result),
            _binding(sweep),
            _economy(sweep),
            _how(manifest),
        ],
        provenance=result.provenance,
        device=result.device,
    )


def _at_level(sweep: SweepFigures, point: Point, metric: str) -> tuple[Figure, str]:
    """The figure that the points are compared by, and its interval."""
    level = sweep.levels[metric]
    found = point.metrics[metric].at_level(level)
    key = f"sweep.points.{point.index}.metrics.{metric}.{level_key(level)}_ms"
    if found.value_ms is None and (late_ms := found.late_ms or point.metrics[metric].mean_late_ms) is not None:
        return Figure(None, "ms", key, late_words(late_ms), "refused"), f"up to {duration(late_ms)} the load tester's"
    return Figure(found.value_ms, "ms", key), interval(found.ci_ms)


def _with_interval(sweep: SweepFigures, point: Point, metric: str) -> str:
    """Both in one cell."""
    figure, ends = _at_level(sweep, point, metric)
    return DASH if figure.value is None and not figure.text else f"{figure} ({ends})"


def _latency_heads(sweep: SweepFigures, *metrics: str) -> list[str | Column]:
    """Over the cells of ``_at_level``."""
    names = [f"{metric.upper()} {level_key(sweep.levels[metric])}" for metric in metrics]
    return [head for name in in_ms(*names) for head in (name, "95 % interval")]


def _tokens(point: Point) -> Figure:
    """Output tokens a second with half the width of the 95 % interval: ``867 ± 12``."""
    found, ends = point.tokens_per_s, both(point.throughput.steady_ci)
    if found is None or ends is None:
        return Figure(found, "number")
    half = (ends[1] - ends[0]) / 2
    decimals = min(max(0, 1 - math.floor(math.log10(half))) if half > 0 else 0, 2)
    return Figure(found, "number", text=f"{found:,.{decimals}f} ± {half:,.{decimals}f}")


def _binds(point: Point) -> str:
    found = point.binding
    return f"{found.resource} / {found.behind}" if found.behind else found.resource


def _brief(sweep: SweepFigures) -> Section:
    """A row a point; p50 beside the percentile that all points support, unless that is it."""
    ttft, itl = (level_key(sweep.levels[metric]) for metric in ("ttft", "itl"))
    beside = ttft != "p50"
    rows: list[Row] = []
    for point in sweep.in_order():
        if isinstance(point, LostPoint):
            rows.append([point.label, Mark(point.verdict, tone(point.verdict)), *[DASH] * (5 + beside)])
            continue
        stages = point.stages["e2e"].stages_ms if "e2e" in point.stages else {}
        largest = max(stages, key=lambda stage: stages[stage], default=point.binding.resource)
        most = "" if largest == point.binding.resource else f" ({marks.words(largest)})"
        rows.append([
            point.label, Mark(point.verdict, tone(point.verdict)), _tokens(point),
            _with_interval(sweep, point, "ttft"), *([Figure(point.metrics["ttft"].ms(50.0))] if beside else []),
            _with_interval(sweep, point, "itl"), Figure(point.batch.running, "number"), f"{_binds(point)}{most}",
        ])  # fmt: skip
    headers: doc.Headers = [
        "point", "verdict", "tokens/s", f"TTFT {ttft} (95 % interval)", *(["TTFT p50"] if beside else []),
        f"ITL {itl}", "batch", Column("binds", wraps=True),
    ]  # fmt: skip
    return Section("brief", "", [Table("Points", headers, rows, words=2), *_reasons(sweep)], on=BRIEF)


def _reasons(sweep: SweepFigures) -> list[Block]:
    """Why points have no figures, or none that count; those with one reason together."""
    alike = grouped((f"{p.verdict.lower()}: {p.reason}", p.label) for p in sweep.in_order() if p.reason)
    return [doc.Warnings([doc.Warned(f"{', '.join(labels)}: {why}") for why, labels in alike.items()])] if alike else []


def _stages(result: SweepResult) -> Section | None:
    """Latency point by point, and beneath it on the same order where the mean goes."""
    title = "Where the time goes, point by point"
    in_order = sorted(_METRICS, key=lambda metric: metric != result.sweep.metric)
    every = [PointByPoint(result, metric) for metric in in_order]
    if not every[0].points:
        return None
    shown = [(picture, stages_in(map(picture.stages, picture.points))) for picture in every]
    known = [(picture, stages) for picture, stages in shown if stages]
    if not known:
        return Section("stages", title, [Paragraph("No stage of the server was measured.")])
    blocks: list[Block] = []
    for picture, stages in known:
        metric, level = picture.metric, level_key(picture.level)
        thin = "" if picture.level == 50 else ", p50 thin"
        blocks.append(doc.Heading(f"{_STACKS[metric]}: {level} with its interval{thin}; below, the mean by stage"))
        last = list(dict.fromkeys(stage for _, each in known for stage in each)) if picture is known[-1][0] else []
        table = _stage_table(picture, stages)
        blocks.append(doc.Chart(metric, picture, table=table, margin="levels", stages=last))
    lead = (
        "Points are compared by the highest percentile that every one's sample supports, else by the mean. Small "
        "dots: from repeat to repeat. A column is the mean over real requests (or token gaps), so its stages add up to "
        "it."
    )
    return Section("stages", title, blocks, lead, "stages")


def _stage_table(picture: PointByPoint, stages: Sequence[str]) -> Table:
    shown, device = picture.points, picture.result.device
    ends = [picture.interval(point) or (None, None) for point in shown]
    rows: list[Row] = [
        [f"{level_key(picture.level)} of the whole", "", *(Figure(picture.value(point)) for point in shown)],
        ["its 95 % interval, from", "", *(Figure(low) for low, _ in ends)],
        ["its 95 % interval, to", "", *(Figure(high) for _, high in ends)],
    ]
    for stage in stages:
        means = [Figure(picture.stages(point).get(stage, 0.0)) for point in shown]
        rows.append([doc.Stage(stage), marks.owner(stage, device), *means])
    headers: doc.Headers = ["stage", "owner", *in_ms(*(point.label for point in shown))]
    return Table(f"Mean {picture.metric.upper()} by stage", headers, rows, words=2, groups=frozenset({3}))


def _points(sweep: SweepFigures) -> Section:
    beside = sweep.levels["ttft"] != 50
    rows: list[Row] = []
    for point in sweep.in_order():
        # The page of its first run that has one.
        runs = [run.folder for run in point.repeats if run.verdict != FAILED]
        name = Name(point.label, page_of(runs[0] if runs else ""))
        if isinstance(point, LostPoint):
            dashes = [DASH] * (4 + beside + 2 * len(_METRICS))
            rows.append([name, Mark(point.verdict, tone(point.verdict)), "", *dashes])
            continue
        rows.append([
            name, Mark(point.verdict, tone(point.verdict)), Name(_binds(point)), f"{point.metrics['ttft'].count:,}",
            Figure(point.throughput.requests_per_s, "number"), _tokens(point), Figure(point.batch.running, "number"),
            *([Figure(point.metrics["ttft"].ms(50.0))] if beside else []),
            *(cell for metric in _METRICS for cell in _at_level(sweep, point, metric)),
        ])  # fmt: skip
    headers: doc.Headers = [
        "point", "verdict", "binds", "n", "req/s", "output tokens/s", "mean batch",
        *(in_ms("TTFT p50") if beside else []),
        *_latency_heads(sweep, *_METRICS),
    ]  # fmt: skip
    table = Table("Points", headers, rows, words=3, css="dense")
    lead = (
        "Figures over requests that succeeded; each point links to its own report. Behind a queue: what is busy there."
    )
    return Section("points", "Every point", [*_reasons(sweep), table], lead, "points")


def _binding(sweep: SweepFigures) -> Section | None:
    rows: list[Row] = [
        [Name(p.label), p.binding.resource, p.binding.behind or "", p.binding.why, ", ".join(p.binding.unmeasured)]
        for p in sweep.in_order() if isinstance(p, Point)
    ]  # fmt: skip
    headers = ["point", "binds", "behind the queue", "why", "unmeasured"]
    table = Table("What binds", headers, rows, words=5)
    return Section("binding", "Which resource binds", [table], _BINDS, "what binds") if rows else None


# --- what a precision or a batch buys


def _economy(sweep: SweepFigures) -> Section | None:
    """Cost, energy, the rate that held the SLOs, latency, of every point side by side."""
    name = "Cost, efficiency and value"
    shown = [point for point in sweep.in_order() if isinstance(point, Point)]
    if not shown:
        return None
    if all(p.economy.cost.per_request_usd is None and p.economy.energy.per_request_j is None for p in shown):
        reasons = grouped((point.economy.cost.reason or "", point.label) for point in shown)
        said = [reason if len(reasons) == 1 else f"{', '.join(labels)}: {reason}" for reason, labels in reasons.items()]
        none = f"No point has a cost at the SLO, and energy was not measured. {as_sentence('; '.join(said))}"
        return Section("economy", name, [Paragraph(none)], short="cost")
    why = any(point.economy.cost.reason for point in shown)
    headers: doc.Headers = [
        "point", "precision", *(["why there is no cost"] if why else []), "cost of a million requests",
        "of a million output tokens", "J a request", "output tokens per J", "good requests for $1", "SLOs held at",
        *_latency_heads(sweep, "ttft", "itl"),
    ]  # fmt: skip
    rows = [_economy_row(sweep, point, why=why) for point in shown]
    table = Table(name, headers, rows, words=2 + why, css="dense")
    costs = [(point.label, cost.price) for point in shown if isinstance(cost := point.economy.cost, Cost)]
    paid = grouped((price_words(price), label) for label, price in costs)
    prices = [words if len(paid) == 1 else f"{words} ({', '.join(labels)})" for words, labels in paid.items()]
    say = "; set yours with cost.usd_per_hour" if any(price.is_default for _, price in costs) else ""
    told = f" The price is {'; '.join(prices)}{say}." if prices else ""
    return Section("economy", name, [table], f"{_COST}{told}", "cost")


def _economy_row(sweep: SweepFigures, point: Point, *, why: bool) -> Row:
    economy, key = point.economy, f"sweep.points.{point.index}.economy"
    cost = economy.cost if isinstance(economy.cost, Cost) else None
    held = cost.rate.low if cost else None
    return [
        point.label, f"{economy.precision}{', emulated' if economy.emulated else ''}",
        *([economy.cost.reason or ""] if why else []),
        Figure(1e6 * cost.per_request_usd if cost else None, "usd"),
        Figure(cost.per_million_output_tokens_usd if cost else None, "usd"),
        Figure(economy.energy.per_request_j, "number", f"{key}.energy.per_request_j"),
        Figure(economy.energy.tokens_per_watt, "number", f"{key}.energy.tokens_per_watt"),
        Figure(economy.value.good_requests_per_usd, "large", f"{key}.value.good_requests_per_usd"),
        Figure(held, "number", text="" if held is None else f"{significant(held)} req/s"),
        *_at_level(sweep, point, "ttft"), *_at_level(sweep, point, "itl"),
    ]  # fmt: skip


def _how(manifest: SweepManifest) -> Section:
    servers, runs = len(manifest.order), sum(map(len, manifest.order))
    text = (
        f"{counted(runs, 'run')} on {counted(servers, 'server')}, started one after the other; the points of one "
        f"server in an order drawn from the seed, each repeat in an order of its own."
    )
    return Section("how", "How it was run", [Paragraph(text), *reproduce(manifest)], short="how")
