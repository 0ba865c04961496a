"""The tail explorer: two groups of requests, and the stages ranked by what explains their difference."""

from __future__ import annotations

from typing import Any

from gapmeter.analysis.numbers import duration, in_unit, share, ticks, unit_of
from gapmeter.analysis.stages import owner_words
from gapmeter.report import head, marks
from gapmeter.report.bridge import difference_sentence as sentence
from gapmeter.report.figure import Row, Table, Value, chooser, figure, panel, switch
from gapmeter.report.run import Run
from gapmeter.report.shell import Section
from gapmeter.report.svg import Fragment, chart, el, group, percent, stamp_across

_UNTIL = {"ttft": "to the first token", "e2e": "to the last token"}
_SHOWN, _ROW, _BAR = 10, 30, 18
_LEAD = (
    "Two groups of the measured requests: by how much longer the one waited on average, and which stages that was. "
    "Thin lines: 95 % intervals from drawing whole stretches of the run again, since neighbors are alike."
)
_MORE = "Any other groups: "


def explorer_section(run: Run) -> Section | None:
    """Pairs of groups on a switch, each with its stages ranked."""
    known: dict[str, list[dict[str, Any]]] = run.summary.get("explore") or {}
    metrics = [metric for metric in _UNTIL if known.get(metric)]
    if not metrics:
        return None
    names = {pair["key"]: _title(pair) for metric in metrics for pair in known[metric]}
    first = (metrics[0] if run.summary["tail"]["metric"] == "ttft" else metrics[-1]), next(iter(names))
    switches = el(
        "div",
        chooser("pair", "compare", list(names.items()), first[1]),
        switch("pair-until", "time", [(m, _UNTIL[m]) for m in metrics], first[0]),
        class_="switches",
    )
    drawn = {(m, pair["key"]): _pair(run, pair, m) for m in metrics for pair in known[m]}
    none = el("p", "One of the groups is too small here.", class_="empty")
    panels = [
        panel(drawn.get((m, key), none), shown=(m, key) == first, **{"pair": key, "pair-until": m})
        for m in metrics
        for key in names
    ]
    command = f"gapmeter explain {run.folder.path.name} --group 'prompt_tokens > 64' --against rest"
    more = el("p", _MORE, el("code", command), class_="lead")
    return Section("explore", "What makes some requests slower?", group([switches, *panels, more]), _LEAD, "explore")


def _title(pair: dict[str, Any]) -> str:
    return f"{pair['a'].partition(' (')[0]} against {pair['b'].partition(' (')[0]}"


def _pair(run: Run, found: dict[str, Any], metric: str) -> Fragment:
    words = head.as_sentence(sentence(found, found["a"], found["b"], run.device))
    sizes = f" n = {found['a_count']:,} and {found['b_count']:,}, in {found['stretches']} stretches."
    name = f"explore-{metric}-{found['key']}"
    drawn = figure(picture(found, name, run), table(found, run.device), run.provenance, css="names")
    return group([el("p", words, el("span", sizes, class_="faint"), class_="told"), drawn])


def picture(found: dict[str, Any], name: str, run: Run) -> Fragment:
    """A bar a stage from 0, to the right where group a waits longer, with its interval; the ten largest."""
    rows = [row for row in found["ranked"] if row["ms"] != 0][:_SHOWN]
    ends = [end for row in rows for end in (row["ms"], *row["ci_ms"]) if end is not None]
    low, high = min([0.0, *ends]), max([0.0, *ends]) or 1e-6
    room = 0.12 * (high - low)
    low, high = low - (room if low < 0 else 0.0), high + room
    bottom = _ROW * len(rows) + 6
    said = "; ".join(f"{marks.words(r['stage'])} {duration(r['ms'])}" for r in rows[:4])
    bars = [part for i, row in enumerate(rows) for part in _bar(row, found, _ROW * i + 6, (low, high), run.device)]
    title = f"{found['a']} less {found['b']}, by stage"
    return chart(
        name, bottom + 26, title, f"Differences of the means: {said}.", _axis(low, high, bottom), *bars,
        stamp_across(run.stamp, bottom / 2 + 24),
    )  # fmt: skip


def _bar(row: dict[str, Any], found: dict[str, Any], y: int, span: tuple[float, float], device: str) -> list[Fragment]:
    low, high = span

    def x(ms: float) -> float:
        return (ms - low) / (high - low)

    ms, (least, most) = row["ms"], row["ci_ms"]
    ends = "" if least is None else f" (95 %: {duration(least)} to {duration(most)})"
    words = (
        f"{marks.words(row['stage'])}: {duration(ms)}{ends}; {duration(row['a_ms'])} against {duration(row['b_ms'])}"
    )
    title = el("title", f"{words} · {owner_words(row['owner'], device)} · {marks.kind(row['stage'])}")
    box = el("rect", width="100%", height="100%", fill=marks.fill(row["stage"]), class_="segment")
    parts = [
        el("text", marks.words(row["stage"]), x=-10, y=y + 13, class_="end"),
        el("svg", title, box, x=percent(x(min(ms, 0))), y=y, width=percent(abs(ms) / (high - low)), height=_BAR,
           class_="stage", data_stage=row["stage"], data_ms=f"{ms:.7g}"),
    ]  # fmt: skip
    if least is not None:
        middle = y + _BAR / 2
        parts.append(el("line", x1=percent(x(least)), x2=percent(x(most)), y1=middle, y2=middle, class_="whisker ink"))
    at = max(ms, most if most is not None else ms, 0)
    part = f"  {share(row['share'])}" if row["share"] is not None and row["share"] > 0 else ""
    label = el("tspan", duration(ms), class_="strong"), el("tspan", part, class_="faint")
    parts.append(el("text", *label, x=percent(x(at)), dx=8, y=y + 13))
    return parts


def _axis(low: float, high: float, bottom: int) -> Fragment:
    unit = unit_of(max(high, -low))
    size = in_unit(1.0, unit)[0]
    up, down = ticks(high * size, 6), ticks(-low * size, 6) if low < 0 else [0.0]
    step = max(up[-1] / max(len(up) - 1, 1), down[-1] / max(len(down) - 1, 1)) or 1.0
    values = [step * i for i in range(-int(-low * size / step), int(high * size / step) + 1)]
    parts = []
    for value in values:
        x = percent((value / size - low) / (high - low))
        parts.append(el("line", x1=x, x2=x, y1=0, y2=bottom, class_="grid" if value else "zero"))
        text = (f"{value:+g}" if value else "0") + (f" {unit}" if value == values[-1] else "")
        parts.append(el("text", text, x=x, y=bottom + 18, class_="tick middle"))
    return group(parts)


def table(found: dict[str, Any], device: str) -> Table:
    """Every stage with both means, the difference, its interval and its share of the whole difference."""
    rows: list[Row] = []
    for row in found["ranked"]:
        numbers = (row["a_ms"], row["b_ms"], row["ms"], *row["ci_ms"])
        cells = [Value(duration(ms), "" if ms is None else repr(ms)) for ms in numbers]
        part = Value(share(row["share"]), "" if row["share"] is None else repr(row["share"]))
        rows.append([marks.words(row["stage"]), owner_words(row["owner"], device), *cells, part])
    headers = ["stage", "owner", found["a"], found["b"], "difference", "from", "to", "share"]
    csv = ["stage", "owner", *(f"{name} (ms)" for name in headers[2:7]), "share"]
    return Table(f"{found['a']} against {found['b']}", headers, rows, csv=csv, words=2)
