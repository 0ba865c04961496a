"""Where the time goes: typical against slow ones and their difference, for other bands and other events on demand."""

from __future__ import annotations

from typing import Any

from gapmeter.analysis.ledger.bands import SLOW
from gapmeter.analysis.numbers import duration
from gapmeter.analysis.results.distribution import percentile_key as slow_key
from gapmeter.analysis.stages import UNEXPLAINED
from gapmeter.report import head, marks, spread, stacks
from gapmeter.report.figure import Row, Table, Value, figure, panel, switch
from gapmeter.report.run import Run
from gapmeter.report.shell import Section
from gapmeter.report.svg import Fragment, el, group
from gapmeter.report.tables import METRICS

# metric: the ledger's event, the part of the summary with its stages, what is compared
EVENTS = {
    "ttft": ("first_token", "stages_to_first_token", "requests"),
    "e2e": ("last_token", "stages", "requests"),
    "itl": ("token_gap", "stages", "token gaps"),
}
_UNTIL = {"ttft": "to the first token", "e2e": "to the last token", "itl": "token to token"}
_MAIN = 98.5
_KEY = (
    "Every bar is the mean of real requests (or token gaps), so its stages add up to the bar. A color means an owner. "
    "Light hatch: in transit between two processes; gray hatch: unexplained."
)
_FEW = "typical and slow requests need 28 to be told apart. The requests themselves are below, under One request."
_NO_PROBE = (
    "The server's stages are unmeasured here, and their time is unexplained: no probe wrote inside the server. Install "
    "probe into its environment and start it with GAPMETER_PROBE_DIR; the next run then tells them."
)


def first_metric(summary: dict[str, Any]) -> str:
    """Of which metric the slowest requests are listed: the one that the tail is told of, for token gaps E2E."""
    return "ttft" if summary["tail"]["metric"] in ("ttft", None) else "e2e"


def where_section(run: Run) -> Section:
    """Typical against slow by stage, switched by event and by what counts as slow; the tail's own comes first."""
    metrics = [metric for metric in EVENTS if metric in run.summary.get("bands", {})]
    if not metrics:
        none = _FEW if run.summary["stages"] else no_ledger(run.summary)
        return Section("where", "Where the time goes", el("p", f"No bars here: {none}", class_="empty"))
    told = run.summary["tail"]["metric"]
    first = told if told in metrics else metrics[0]
    bands = [(slow_key(p), f"p{p:g}+") for p in SLOW if any(_slow(run, m, p) for m in metrics)]
    switches = el(
        "div",
        switch("event", "time", [(m, _UNTIL[m]) for m in metrics], first),
        switch("band", "slow means", [*bands, ("all", "everyone")], slow_key(_MAIN)),
        class_="switches",
    )
    panels = [
        panel(content, shown=(metric, band) == (first, slow_key(_MAIN)), event=metric, band=band)
        for metric in metrics
        for band, content in _panels(run, metric)
    ]
    key = el("p", _KEY, class_="lead")
    return Section("where", "Where the time goes", group([switches, *panels, key]), short="where the time goes")


def _slow(run: Run, metric: str, percentile: float) -> dict[str, Any] | None:
    found: dict[str, Any] | None = run.summary["bands"][metric]["slow"].get(slow_key(percentile))
    return found


def _panels(run: Run, metric: str) -> list[tuple[str, Fragment]]:
    """What each position of the switch shows for one metric."""
    out = []
    for percentile in SLOW:
        found = _slow(run, metric, percentile)
        drawn = _stack(run, metric, percentile, found) if found else _too_few(metric, percentile)
        out.append((slow_key(percentile), drawn))
    return [*out, ("all", _everyone(run, metric))]


def _too_few(metric: str, percentile: float) -> Fragment:
    what = EVENTS[metric][2]
    words = f"Too few {what} lie above p{percentile:g} for a mean worth drawing (seven are needed)."
    return el("p", words, class_="empty")


def _stack(run: Run, metric: str, percentile: float, slow: dict[str, Any]) -> Fragment:
    event, part, what = EVENTS[metric]
    typical = run.summary["bands"][metric]["typical"]
    bands = (
        _band("typical", f"{what} from p45 to p55", typical),
        _band("slow", f"{what} from p{percentile:g} up", slow),
    )
    name = "a token gap (ITL)" if metric == "itl" else METRICS[metric]
    comparison = stacks.Comparison(METRICS[metric], event, *bands, what, head.main_limit(run.summary, metric),
                                   run.device)  # fmt: skip
    key = f"stack-{event.replace('_', '-')}" + ("" if percentile == _MAIN else f"-{slow_key(percentile)}")
    picture = stacks.picture(comparison, key, run.stamp)
    headers = ["stage", "owner", "kind", "typical", "slow", "difference"]
    path = f"bands.{metric}"
    table = Table(
        f"{name} by stage", headers, _rows(comparison, path, slow_key(percentile)), words=3,
        csv=["stage", "owner", "kind", "typical (ms)", "slow (ms)", "difference (ms)"],
    )  # fmt: skip
    words = el("p", stacks.describe(comparison), class_="lead")
    shown = [s for s in comparison.slow.parts if _seen(comparison, s)]
    return group(
        [words, figure(picture, table, run.provenance), marks.legend(shown, run.device), _unmeasured(run, part)]
    )


def _seen(comparison: stacks.Comparison, stage: str) -> bool:
    return stage == UNEXPLAINED or max(comparison.slow.parts[stage], comparison.typical.parts.get(stage, 0)) > 0


def _rows(comparison: stacks.Comparison, path: str, band: str) -> list[Row]:
    rows: list[Row] = []
    for stage, after in comparison.slow.parts.items():
        before = comparison.typical.parts.get(stage, 0.0)
        rows.append(
            [
                marks.words(stage), marks.owner(stage, comparison.device), marks.kind(stage),
                Value(duration(before), repr(before), {"data_key": f"{path}.typical.stages_ms.{stage}"}),
                Value(duration(after), repr(after), {"data_key": f"{path}.slow.{band}.stages_ms.{stage}"}),
                Value(duration(after - before), repr(after - before)),
            ]
        )  # fmt: skip
    return rows


def _everyone(run: Run, metric: str) -> Fragment:
    event, part, what = EVENTS[metric]
    bands = [
        spread.Slice(f"p{b['from']:g}–{b['to']:g}", b["count"], b["total_ms"], b["stages_ms"])
        for b in run.summary["bands"][metric]["spread"]
    ]
    picture = spread.picture(bands, METRICS[metric], what, f"spread-{event.replace('_', '-')}", run.stamp, run.device)
    stages = [s for s in bands[-1].parts if any(b.parts[s] > 0 for b in bands) or s == UNEXPLAINED]
    rows: list[Row] = [
        [
            marks.words(stage), marks.owner(stage, run.device),
            *(Value(duration(b.parts[stage]), repr(b.parts[stage]),
                    {"data_key": f"bands.{metric}.spread.{i}.stages_ms.{stage}"}) for i, b in enumerate(bands)),
        ]
        for stage in stages
    ]  # fmt: skip
    headers = ["stage", "owner", *(b.name for b in bands)]
    csv = ["stage", "owner", *(f"{b.name} (ms)" for b in bands)]
    table = Table(f"{METRICS[metric]} by rank and stage", headers, rows, words=2, csv=csv)
    words = f"All {what}, ordered by what they waited and cut into slices; each bar is the mean of its slice."
    drawn = figure(picture, table, run.provenance, css="levels")
    return group([el("p", words, class_="lead"), drawn, marks.legend(stages, run.device), _unmeasured(run, part)])


def _unmeasured(run: Run, part: str) -> Fragment:
    missing = [marks.words(name) for name, known in run.summary[part].items() if known["kind"] == "unmeasured"]
    if not missing:
        return group([])
    if {"prefill", "decode"} <= {name for name, known in run.summary[part].items() if known["kind"] == "unmeasured"}:
        return el("p", _NO_PROBE, class_="lead")
    return el("p", f"Unmeasured here, their time is in the residual: {', '.join(missing)}.", class_="lead")


def no_ledger(summary: dict[str, Any]) -> str:
    """Why there are no stages to show."""
    refused = [c["text"] for c in summary["checks"] if c["rule"] == "ledger" and c["status"] == "broken"]
    return refused[0] if refused else "no process of the server recorded its stages, or no request succeeded."


def _band(name: str, detail: str, found: dict[str, Any]) -> stacks.Band:
    return stacks.Band(name, detail, found["count"], found["total_ms"], found["stages_ms"])
