"""The page of a sweep: what it found, the pictures, every point, what grows, what binds, how it was run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from gapmeter.analysis.numbers import DASH, bounds, duration, significant
from gapmeter.analysis.provenance import UNKNOWN, Provenance
from gapmeter.analysis.sweep.compared import figure_key
from gapmeter.analysis.sweep.read import tokens_per_s, written_tokens
from gapmeter.records import RunFolder
from gapmeter.report import bridge, marks
from gapmeter.report.figure import Row, Table, Value, figure, written
from gapmeter.report.shell import Section, how_section, page_shell
from gapmeter.report.svg import NOTHING, Fragment, el, group
from gapmeter.report.sweep.economy import economy_section
from gapmeter.report.sweep.growth_page import growth_section
from gapmeter.report.sweep.pictures import Sight, latency, stack_columns, stages_shown, tradeoff

_NAMES = {"ttft": "TTFT", "itl": "ITL", "e2e": "E2E"}
_STACKS = {"ttft": "Time to first token (TTFT)", "itl": "A token gap (ITL)", "e2e": "The whole answer (E2E)"}
_CSS = {"PASS": "met", "FAIL": "missed", "INCONCLUSIVE": "open", "INVALID": "missed", "FAILED": "missed"}


def write_page(folder: RunFolder, summary: dict[str, Any], manifest: dict[str, Any]) -> None:
    """``report.html`` of a sweep. Raises OSError."""
    folder.report.write_text(page(summary, manifest), encoding="utf-8")


def page(summary: Mapping[str, Any], manifest: Mapping[str, Any]) -> str:
    """The page as text."""
    origin = provenance(summary, manifest)
    sweep = summary["sweep"]
    title = f"{summary['name']}: {len(sweep['points'])} points"
    header = el("header", el("h1", title), el("p", origin.load), class_="top")
    sights = {metric: sight for metric in _NAMES if (sight := _sight(sweep, summary, metric))}
    main = sights.get(sweep["metric"])
    sections = [
        _answer(summary),
        _tradeoff_section(main, origin) if main else None,
        _stacks_section(sights, summary, origin) if sights else None,
        _points_section(sweep, origin),
        growth_section(sweep, origin, summary["device"]),
        _binding_section(sweep, origin),
        economy_section(sweep, origin),
        _how_section(manifest),
    ]
    version = manifest.get("versions", {}).get("gapmeter", "")
    return page_shell(f"sweep · {summary['name']} · gapmeter", sections, origin, header=header, version=version)


def provenance(summary: Mapping[str, Any], manifest: Mapping[str, Any]) -> Provenance:
    """Where a sweep's figures are from; what differs from point to point is named with all its values."""
    scenario, sweep = manifest["scenario"], summary["sweep"]
    server = scenario["server"]
    values = {key: list(dict.fromkeys(str(p["resolved"].get(key)) for p in sweep["points"]))
              for key in {key: None for p in sweep["points"] for key in p["resolved"]}}  # fmt: skip
    n = sum(p["metrics"]["ttft"]["count"] for p in sweep["points"] if p["metrics"])
    bad = [p for p in sweep["points"] if p["verdict"] in ("INVALID", "FAILED", "MISSING")]
    return Provenance(
        scenario=str(summary["name"]),
        digest=str(manifest.get("scenario_digest", "")),
        model=str(server["model"]),
        precision=", ".join(values.get("server.precision", [str(server["precision"])])),
        engine=", ".join(values.get("server.engine", [str(server["engine"])])),
        hardware=bridge.hardware_words(manifest.get("hardware") or {}),
        load="; ".join(f"{key} {', '.join(found)}" for key, found in values.items()),
        n=str(n),
        validity=_validity(len(bad), len(sweep["points"])),
        date=str(manifest.get("started_wall", UNKNOWN)).partition("T")[0],
        command=str(manifest.get("command", UNKNOWN)),
    )


def _validity(bad: int, points: int) -> str:
    if not bad:
        return "valid"
    return "INVALID" if bad == points else f"{bad} of {points} points without valid figures"


def _sight(sweep: Mapping[str, Any], summary: Mapping[str, Any], metric: str) -> Sight | None:
    if not any(point["metrics"] for point in sweep["points"]):
        return None
    level = sweep["levels"][metric]
    ordered = sweep["key"] is not None
    points = [{**point, "ordered": ordered} for point in sweep["points"]]
    series = [(entry["name"], [points[at] for at in entry["points"]]) for entry in sweep["series"]]
    knees = frozenset(k["point"] for k in sweep["knees"] if k["point"] is not None)
    limits = [s for s in summary["slo"] if s["metric"] == metric and s["limit_ms"] is not None]
    limit = max(limits, key=lambda s: s["percentile"]) if limits else None
    return Sight(metric, level, series, knees, (limit["limit_ms"], limit["text"]) if limit else None,
                 summary["device"])  # fmt: skip


def _answer(summary: Mapping[str, Any]) -> Section:
    """What the sweep found, in sentences."""
    lines = summary["sweep"]["headline"] or ["The points are below."]
    first = el("p", lines[0], class_="sentence")
    rest = [el("p", line, class_="owner") for line in lines[1:]]
    note = NOTHING
    if summary["status"] != "complete":
        note = el("p", el("b", "Not finished. ", class_="unsound"), "Some points have not been run.", class_="trust")
    css = "verdict INCONCLUSIVE" if summary["exit_code"] else "verdict"
    return Section("answer", "", el("div", first, *rest, note, class_=css))


def _tradeoff_section(sight: Sight, origin: Provenance) -> Section:
    name = _NAMES[sight.metric]
    lead = (
        f"Every point is one setting; lines join points of one curve in their order, and never a closed loop "
        f"with an open one. Vertical bars: the 95 % interval of {sight.words}{_why(sight)}. "
        f"Horizontal ones: that of throughput. Small dots: from repeat to repeat. Green: SLOs met; red: "
        f"missed; hollow: undecided; ✕: not valid as a measurement."
    )
    picture = figure(tradeoff(sight, "tradeoff"), _tradeoff_table(sight), origin, css="levels")
    return Section("tradeoff", f"Throughput against {name}", picture, lead, "throughput and latency")


def _why(sight: Sight) -> str:
    if sight.level is None:
        return ", since no percentile is supported at every point (too short, or a queue without a steady state)"
    return ", the highest percentile that every point's sample supports"


def _tradeoff_table(sight: Sight) -> Table:
    level = sight.words
    rows: list[Row] = []
    for point in sight.shown():
        value, tokens = sight.value(point), tokens_per_s(point)
        interval = bounds(*(sight.interval(point) or (None, None)))
        rows.append([
            point["label"], point["verdict"], _number(tokens),
            Value(duration(value), _raw(value), {"data_point": point["index"]}), interval,
        ])  # fmt: skip
    names = ["point", "verdict", "output tokens/s", level, "95 % interval"]
    return Table(f"Throughput against {level}", names, rows, words=2)


def _stacks_section(sights: Mapping[str, Sight], summary: Mapping[str, Any], origin: Provenance) -> Section:
    """Latency point by point, and beneath it on the same order where the mean goes."""
    parts: list[Fragment] = []
    shown: dict[str, None] = {}
    order = sorted(sights, key=lambda metric: metric != summary["sweep"]["metric"])
    for metric in order:
        sight = sights[metric]
        stages = stages_shown(sight, metric)
        if not stages:
            continue
        shown |= dict.fromkeys(stages)
        thin = "" if sight.level == 50 else ", p50 thin"
        parts += [
            el("h3", f"{_STACKS[metric]}: {figure_key(sight.level)} with its interval{thin}; below, the mean by stage"),
            figure(group([latency(sight, f"latency-{metric}"), stack_columns(sight, metric, f"columns-{metric}")]),
                   _stack_table(sight, metric, stages), origin, css="levels"),
        ]  # fmt: skip
    if not parts:
        return Section("stages", "Where the time goes, point by point", el("p", "No stage of the server was measured."))
    lead = "A column is the mean over real requests (or token gaps), so its stages add up to the mean."
    return Section(
        "stages",
        "Where the time goes, point by point",
        group([*parts, marks.legend(shown, summary["device"])]),
        lead,
        "stages",
    )


def _stack_table(sight: Sight, metric: str, stages: Sequence[str]) -> Table:
    points = sight.shown()
    ends = [sight.interval(p) or (None, None) for p in points]
    level = figure_key(sight.level)
    rows: list[Row] = [
        [f"{level} of the whole", "", *(Value(duration(ms), _raw(ms)) for ms in map(sight.value, points))]
    ]
    for at, side in enumerate(("from", "to")):
        bound = [Value(duration(pair[at]), _raw(pair[at])) for pair in ends]
        rows.append([f"its 95 % interval, {side}", "", *bound])
    rows += [
        [marks.words(stage), marks.owner(stage, sight.device),
         *(Value(duration(ms), _raw(ms)) for p in points
           for ms in [p["stages"][metric]["stages_ms"].get(stage, 0.0)])]
        for stage in stages
    ]  # fmt: skip
    labels = [str(p["label"]) for p in points]
    csv = ["stage", "owner", *(f"{label} (ms)" for label in labels)]
    name = f"Mean {_NAMES[metric]} by stage"
    return Table(name, ["stage", "owner", *labels], rows, csv=csv, words=2, groups=frozenset({3}))


def _points_section(sweep: Mapping[str, Any], origin: Provenance) -> Section:
    levels = {m: figure_key(sweep["levels"][m]) for m in ("ttft", "itl", "e2e")}
    heads = [f"{_NAMES[m]} {key}" for m, key in levels.items()]
    names = ["point", "verdict", "binds", "n", "req/s", "output tokens/s", "mean batch"]
    names += [] if levels["ttft"] == "p50" else ["TTFT p50"]
    names += [name for head in heads for name in (head, "95 % interval")]
    rows = [_point_row(sweep["points"][at], levels) for entry in sweep["series"] for at in entry["points"]]
    lead = (
        "Figures over requests that succeeded; each point links to its own report. Behind a queue: what is busy there."
    )
    table = Table("Points", names, rows, words=3, css="dense")
    return Section("points", "Every point", written(table, origin), lead, "points")


def _point_row(point: Mapping[str, Any], levels: Mapping[str, str]) -> Row:
    first = next((run for run in point["repeats"] if run["verdict"] != "FAILED"), None)
    link: object = point["label"]
    if first is not None:
        link = el("a", point["label"], href=quote(f"{first['folder']}/report.html"))
    word = Value(point["verdict"], None, {"class_": f"mark {_CSS.get(point['verdict'], 'open')}"})
    name = Value(link, None, {"class_": "name"})
    middle = () if levels["ttft"] == "p50" else (Value(""),)
    if not point["metrics"]:
        return [name, word, str(point["reason"] or ""), *[DASH] * (4 + len(middle) + 2 * len(levels))]
    cells: list[Value | str] = []
    for metric, key in levels.items():
        found = point["metrics"][metric]
        value = found[f"{key}_ms"]
        cells.append(Value(duration(value), _raw(value), {"data_metric": f"{point['index']}.{metric}.{key}_ms"}))
        cells.append(bounds(*(found[f"{key}_ci_ms"] or (None, None))))
    binding = point["binding"]
    binds = f"{binding['resource']} / {binding['behind']}" if binding["behind"] else str(binding["resource"])
    middle = middle and (Value(duration(point["metrics"]["ttft"]["p50_ms"])),)
    return [
        name, word, Value(binds, None, {"class_": "name"}), f"{point['metrics']['ttft']['count']:,}",
        _number(point["throughput"]["requests_per_s"]), written_tokens(point),
        _number(point["batch"]["running"]), *middle, *cells,
    ]  # fmt: skip


def _binding_section(sweep: Mapping[str, Any], origin: Provenance) -> Section | None:
    shown = [sweep["points"][at] for entry in sweep["series"] for at in entry["points"]]
    rows: list[Row] = [
        [Value(p["label"], None, {"class_": "name"}), p["binding"]["resource"], p["binding"]["behind"] or "",
         p["binding"]["why"], ", ".join(p["binding"]["unmeasured"])]
        for p in shown if p["binding"]
    ]  # fmt: skip
    if not rows:
        return None
    lead = (
        "The resource on which most of the mean answer is spent. A queue only says that something else is busy: what "
        "that is stands behind it. docs/sweeps.md has the rule."
    )
    table = Table("What binds", ["point", "binds", "behind the queue", "why", "unmeasured"], rows, words=5)
    return Section("binding", "Which resource binds", written(table, origin), lead, "what binds")


def _how_section(manifest: Mapping[str, Any]) -> Section:
    groups = manifest["order"]
    runs = sum(map(len, groups))
    text = (
        f"{runs} runs on {len(groups)} server{'s' if len(groups) != 1 else ''}, started one after the other; the "
        f"points of one server in an order drawn from the seed, each repeat in an order of its own."
    )
    return how_section(manifest, "How it was run", text)


def _number(value: float | None) -> str:
    return DASH if value is None else significant(value)


def _raw(value: float | None) -> str | None:
    """A number for the CSV, with all its digits."""
    return None if value is None else repr(float(value))
