"""Where the time goes: typical against slow ones and their difference, for other bands and other events on demand."""

from __future__ import annotations

from typing import Any

from analysis.report import head, marks, stacks
from analysis.report.figure import Table, figure
from analysis.report.run import Run
from analysis.report.shell import Section
from analysis.report.svg import Fragment, el, group
from analysis.report.tables import METRICS
from analysis.stages import UNEXPLAINED

# metric: the ledger's event, the part of the summary with its stages, what is compared
EVENTS = {
    "ttft": ("first_token", "stages_to_first_token", "requests"),
    "e2e": ("last_token", "stages", "requests"),
    "itl": ("token_gap", "stages", "token gaps"),
}
_KEY = "Light hatch: in transit between two processes. Grey hatch: unexplained."


def first_metric(summary: dict[str, Any]) -> str:
    """Of which metric the slowest requests are listed: the one that the tail is told of, for token gaps E2E."""
    return "ttft" if summary["tail"]["metric"] in ("ttft", None) else "e2e"


def where_section(run: Run) -> Section:
    """The stacks of TTFT, E2E and token gaps, the one first that the tail is told of."""
    tail = run.summary["tail"]
    order = sorted(EVENTS, key=lambda metric: metric != tail["metric"])
    parts = [_stack(run, metric) for metric in order if metric in tail or metric != "itl"]
    key = el("p", "A colour means an owner: ", marks.owner_key(), _KEY, class_="lead")
    return Section("where", "Where the time goes", group([*parts, key]), short="where the time goes")


def _stack(run: Run, metric: str) -> Fragment:
    event, part, what = EVENTS[metric]
    found = run.summary["tail"].get(metric)
    name = "a token gap (ITL)" if metric == "itl" else METRICS[metric]
    title = el("h3", f"{name}: typical against slow {what}")
    if found is None:
        why = "too few ledgers for two bands, or the slow requests are no slower."
        return group([title, el("p", f"No stack: {why if run.summary[part] else no_ledger(run.summary)}")])
    bands = (
        _band("typical", f"{what} from p45 to p55", found["typical"]),
        _band("slow", "the slowest, from p98.5 up", found["slow"]),
    )
    comparison = stacks.Comparison(METRICS[metric], event, *bands, what, head.main_limit(run.summary, metric))
    shown = [
        s
        for s, ms in comparison.slow.parts.items()
        if max(ms, comparison.typical.parts.get(s, 0)) > 0 or s == UNEXPLAINED
    ]
    lead = f"{stacks.describe(comparison)} Every bar is the mean of real {what}, so its stages add up."
    picture = stacks.picture(comparison, f"stack-{event.replace('_', '-')}", run.stamp)
    headers = ["stage", "owner", "kind", "typical", "slow", "difference"]
    table = Table(f"{name} by stage", headers, [list(row.values()) for row in stacks.table(comparison)], words=3)
    drawn = figure(picture, table, run.provenance)
    return group([title, el("p", lead, class_="lead"), drawn, marks.legend(shown), _unmeasured(run, part)])


def _unmeasured(run: Run, part: str) -> Fragment:
    missing = [marks.words(name) for name, known in run.summary[part].items() if known["kind"] == "unmeasured"]
    if not missing:
        return group([])
    return el("p", f"Unmeasured here, their time is in the residual: {', '.join(missing)}.", class_="lead")


def no_ledger(summary: dict[str, Any]) -> str:
    """Why there are no stages to show."""
    refused = [c["text"] for c in summary["checks"] if c["rule"] == "ledger" and c["status"] == "broken"]
    return refused[0] if refused else "no process of the server recorded its stages, or no request succeeded."


def _band(name: str, detail: str, found: dict[str, Any]) -> stacks.Band:
    return stacks.Band(name, detail, found["count"], found["total_ms"], found["stages_ms"])
