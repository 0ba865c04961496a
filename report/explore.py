"""What makes some requests slower? Groups of requests against groups, stage by stage."""

from __future__ import annotations

from gapmeter.analysis.numbers import counted, duration
from gapmeter.analysis.results.latency import GroupDifference, GroupPair
from gapmeter.analysis.results.run import RunResult
from gapmeter.report import document as doc
from gapmeter.report import marks
from gapmeter.report.document import Block, Chart, Code, Figure, Panel, Paragraph, Section, Stage, Table, in_ms
from gapmeter.report.pictures import Changes, StageChange
from gapmeter.report.words import UNTIL, as_sentence, part_of

_SHOWN = 10
_EXPLORE = (
    "Two groups of the measured requests: how much longer one waited on average, and in which stages. Thin lines: 95 % "
    "block-bootstrap intervals, because neighboring requests are correlated."
)


def difference_sentence(difference: GroupDifference, a: str, b: str, device: str = "GPU") -> str:
    """Two groups of requests, with the difference's uncertainty; ``device`` is what computed the forwards."""
    low, high = difference.difference_ci_ms
    whole = duration(abs(difference.difference_ms))
    ends, unsure = "", "; they lie in too few stretches of the run for an interval"
    if low is not None and high is not None:
        ends, unsure = f" (95 %: {duration(low)} to {duration(high)})", ""
        if high < 0:
            ends = f" (95 %: {duration(-high)} to {duration(-low)})"
        elif low <= 0:
            return f"{a}: {duration(difference.a_ms)}, {b}: {duration(difference.b_ms)}; no difference is proven{ends}"
    more, other = ("longer", "less") if difference.difference_ms >= 0 else ("less", "longer")
    said = f"{a} waited {whole} {more} than {b}{ends}"
    first = next((row for row in difference.ranked if row.ms * difference.difference_ms > 0), None)
    if first is None:
        return f"{said}{unsure}"
    who, part = marks.with_owner(first.stage, device), duration(abs(first.ms))
    if abs(first.ms) > abs(difference.difference_ms):
        return f"{said}; {who} took {part} {more}, the other stages together {other}{unsure}"
    return f"{said}, {part} of it {who}{unsure}"


def explorer(result: RunResult) -> Section | None:
    """Pairs of groups on a switch, each with its stages ranked."""
    found = {metric: pairs for metric in ("ttft", "e2e") if (pairs := result.explore.get(metric))}
    if not found:
        return None
    metrics = list(found)
    titles = {
        pair.key: f"{pair.a.partition(' (')[0]} against {pair.b.partition(' (')[0]}"
        for pairs in found.values()
        for pair in pairs
    }
    drawn = {
        (metric, pair.key): _pair(pair, metric, result.device) for metric, pairs in found.items() for pair in pairs
    }
    none: list[Block] = [Paragraph("One of the groups is too small here.", "empty")]
    choice = doc.Choice(
        [
            doc.Switch("pair", "compare", list(titles.items()), next(iter(titles)), list=True),
            doc.Switch("pair-until", "time", [(metric, UNTIL[metric]) for metric in metrics],
                   metrics[0] if result.tail.metric == "ttft" else metrics[-1]),
        ],
        [
            Panel({"pair": key, "pair-until": metric}, drawn.get((metric, key), none))
            for metric in metrics
            for key in titles
        ],
    )  # fmt: skip
    more = Paragraph(
        ("Any other groups: ", Code("gapmeter explain RUN --group 'prompt_tokens > 64' --against rest")), "quiet"
    )
    return Section("explore", "What makes some requests slower?", [choice, more], _EXPLORE, "explore")


def _pair(pair: GroupPair, metric: str, device: str) -> list[Block]:
    said = as_sentence(difference_sentence(pair, pair.a, pair.b, device))
    sizes = f"n = {pair.a_count:,} and {pair.b_count:,}, in {counted(pair.stretches, 'stretch')}."
    ranked = [row for row in pair.ranked if row.ms != 0][:_SHOWN]
    changes = [
        StageChange(
            row.stage, row.ms, row.ci_ms, part_of(row.share) if row.share is not None and row.share > 0 else "",
            f"{duration(row.a_ms)} against {duration(row.b_ms)}",
        )
        for row in ranked
    ]  # fmt: skip
    largest = "; ".join(f"{marks.words(row.stage)} {duration(row.ms)}" for row in ranked[:4])
    picture = Changes(f"{pair.a} minus {pair.b}, by stage", f"Differences of the means: {largest}.", changes, device)
    rows: list[doc.Row] = [
        [Stage(row.stage), marks.owner(row.stage, device), *map(Figure, (row.a_ms, row.b_ms, row.ms, *row.ci_ms)),
         Figure(row.share, "share", text=part_of(row.share) if row.share is not None else "")]
        for row in pair.ranked
    ]  # fmt: skip
    names = in_ms(pair.a, pair.b, "difference", "from", "to")
    table = Table(f"{pair.a} against {pair.b}", ["stage", "owner", *names, "share"], rows, words=2)
    chart = Chart(f"explore-{metric}-{pair.key}", picture, "", table, "names")
    return [Paragraph(said, "strong"), Paragraph(sizes, "quiet"), chart]
