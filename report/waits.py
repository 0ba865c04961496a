"""What requests waited for, stage by stage: typical against slow ones, and what a faster device could bring."""

from __future__ import annotations

from gapmeter.analysis.judge.words import PROCESSES
from gapmeter.analysis.ledger.tail import SLOW
from gapmeter.analysis.numbers import count
from gapmeter.analysis.results.distribution import percentile_key
from gapmeter.analysis.results.latency import Band
from gapmeter.analysis.results.run import INVALID, RunResult
from gapmeter.report import document as doc
from gapmeter.report import marks
from gapmeter.report.document import Block, Chart, Figure, Panel, Paragraph, Row, Section, Stage, Table, Words, in_ms
from gapmeter.report.percentiles import main_slo
from gapmeter.report.pictures import Ranks, Stacks, stages_in, visible_in
from gapmeter.report.why import most_an_upgrade_brings
from gapmeter.report.words import UNTIL

# metric: the ledger's event, what is compared
_EVENTS = {"ttft": ("first-token", "requests"), "e2e": ("last-token", "requests"), "itl": ("token-gap", "token gaps")}
_SMALL = 0.01  # stages below this share of both bands are summed into one line
_MAIN = 98.5
_KEY = (
    "Every bar is the mean of real requests (or token gaps), so its stages add up to the bar. A color means an owner. "
    "Light hatch: in transit between two processes; gray hatch: unexplained."
)
_FEW = "it takes at least 28 requests to tell typical from slow. The requests themselves are below, under One request."
_NO_PROBE = (
    "The server's stages are unmeasured here, and their time is unexplained: no probe ran in the server. For vLLM, "
    "install probe into its environment and start it with GAPMETER_PROBE_DIR; the next run then shows them."
)
_FROM_SUMS = (
    "Waits for a core come from the kernel's sums: how long they were, but not who had the core; waits between two "
    "processes' stamps are in transit. If perf_event_open is allowed, they are exact and name who had the core."
)
_BRACKET = (
    "Lower end: an idle engine, without queues and other requests' steps. Upper end: queues as they are, forward "
    "passes taken out, except for the host work that they hid."
)


def no_ledger(result: RunResult) -> str:
    """Why there are no stages to show."""
    refused = [check.text for check in result.checks if check.rule == "ledger" and check.status == "broken"]
    return refused[0] if refused else "no process of the server recorded its stages, or no request succeeded."


# --- sections


def tail(result: RunResult) -> Section | None:
    """In short: the stages that matter, of the metric that the tail is about."""
    metric = next((m for m in (result.tail.metric, "ttft", "e2e") if m in ("ttft", "e2e") and result.tail.of(m)), None)
    anatomy = result.tail.of(metric) if metric else None
    if metric is None or anatomy is None:
        return None
    device, name, typical, slow = result.device, metric.upper(), anatomy.typical, anatomy.slow
    small, rows = (0.0, 0.0), list[Row]()
    for stage, usual in typical.stages_ms.items():
        late = slow.stages_ms[stage]
        if max(abs(usual) / typical.total_ms, abs(late) / slow.total_ms) < _SMALL:
            small = (small[0] + usual, small[1] + late)
        else:
            rows.append([Stage(stage), *_compared(f"tail.{metric}", "slow", stage, usual, late, device)])
    if any(small):
        rows.append(["the rest", "", *map(Figure, (*small, small[1] - small[0]))])
    rows.append(["sum", "", *map(Figure, (typical.total_ms, slow.total_ms, anatomy.difference_ms))])
    headers: doc.Headers = [f"{name}: where it goes", "owner", "typical", "slow", "difference"]
    said = Paragraph("Means of typical (p45 to p55) and of slow (from p98.5 up, at least seven) requests:")
    return Section("tail", "", [said, Table(name, headers, rows, words=2)], on=doc.DETAILS | doc.MARKDOWN)


def where(result: RunResult) -> Section:
    """Typical against slow by stage, switched by event and by what counts as slow; the tail's own comes first."""
    title = "Where the time goes"
    metrics = [metric for metric in _EVENTS if metric in result.bands]
    if not metrics:
        none = _FEW if result.stages else no_ledger(result)
        return Section("where", title, [Paragraph(f"No bars here: {none}", "empty")])
    first = result.tail.metric if result.tail.metric in metrics else metrics[0]
    panels: list[Panel] = []
    known = set()
    for metric in metrics:
        missing = _missing(result, metric)
        for percentile in SLOW:
            key = percentile_key(percentile)
            slow: Band | None = getattr(result.bands[metric].slow, key)
            few = f"Too few {_EVENTS[metric][1]} lie above p{percentile:g} for a mean worth drawing (seven are needed)."
            drawn = _stacks(result, metric, percentile, slow) if slow else [Paragraph(few, "empty")]
            known |= {key} if slow else set()
            panels.append(Panel({"event": metric, "band": key}, [*drawn, *(missing if slow else [])]))
        everyone = [*_everyone(result, metric), *missing]
        panels.append(Panel({"event": metric, "band": "all"}, everyone))
    bands = [(percentile_key(p), f"p{p:g}+") for p in SLOW if percentile_key(p) in known]
    switches = [
        doc.Switch("event", "time", [(metric, UNTIL[metric]) for metric in metrics], str(first)),
        doc.Switch("band", "slow means", [*bands, ("all", "everyone")], percentile_key(_MAIN)),
    ]
    blocks = [doc.Choice(switches, panels), Paragraph(_KEY, "quiet"), *_who_had_the_core(result)]
    return Section("where", title, blocks, short="where the time goes")


def _who_had_the_core(result: RunResult) -> list[Block]:
    """Whom the server's threads waited for, where that is known and anybody is worth a row."""
    held = result.ledger.core_held or ()
    rows: list[Row] = [
        [" ".join(filter(None, (PROCESSES.get(one.process, one.process), one.program))),
         marks.words(one.stage) if one.stage else "none of its stages" if one.process in ("api", "engine") else "",
         Figure(one.share, "share", f"ledger.core_held.{at}.share"),
         Figure(one.mean_ms, "ms", f"ledger.core_held.{at}.mean_ms")]
        for at, one in enumerate(held) if one.share >= _SMALL
    ]  # fmt: skip
    if not rows:
        return []
    headers: doc.Headers = ["who had the core", "at", "share of the wait", *in_ms("a request")]
    if result.ledger.core_waits == "sums":
        return [Paragraph(_FROM_SUMS, "quiet")]
    lead = "While a thread of the server was ready but had no core (core wait), the core was used by:"
    return [Paragraph(lead), Table("Who had the core", headers, rows, words=2, css="compact")]


def _compared(path: str, slow: str, stage: str, usual: float, late: float, device: str, *kind: str) -> list[Words]:
    """The cells of a stage in typical and in slow requests, which stand at ``path`` in the result."""
    ends = (("typical", usual), (slow, late))
    figures = [Figure(ms, "ms", f"{path}.{band}.stages_ms.{stage}") for band, ms in ends]
    return [marks.owner(stage, device), *kind, *figures, Figure(late - usual)]


def _stacks(result: RunResult, metric: str, percentile: float, slow: Band) -> list[Block]:
    event, what = _EVENTS[metric]
    usual, requests = result.bands[metric].typical, result.bands[metric].count
    slo = main_slo(result, metric)
    picture = Stacks(metric.upper(), what, usual, slow, percentile, slo, result.device, requests)
    path, band = f"bands.{metric}", f"slow.{percentile_key(percentile)}"
    rows: list[Row] = []
    for stage, late in slow.stages_ms.items():
        before, kind = usual.stages_ms.get(stage, 0.0), marks.kind(stage)
        rows.append([Stage(stage), *_compared(path, band, stage, before, late, result.device, kind)])
    name = "a token gap (ITL)" if metric == "itl" else metric.upper()
    headers: doc.Headers = ["stage", "owner", "kind", *in_ms("typical", "slow", "difference")]
    table = Table(f"{name} by stage", headers, rows, words=3)
    key = f"stack-{event}" + ("" if percentile == _MAIN else f"-{percentile_key(percentile)}")
    said = [] if result.verdict == INVALID else [Paragraph(picture.sentence(), "quiet")]
    return [*said, Chart(key, picture, "", table, stages=visible_in([usual, slow]))]


def _everyone(result: RunResult, metric: str) -> list[Block]:
    event, what = _EVENTS[metric]
    slices = {f"p{one.from_percentile:g}–{one.to_percentile:g}": one for one in result.bands[metric].spread}
    shown = stages_in(one.stages_ms for one in slices.values())
    rows: list[Row] = [
        [Stage(stage), marks.owner(stage, result.device),
         *(Figure(one.stages_ms[stage], "ms", f"bands.{metric}.spread.{at}.stages_ms.{stage}")
           for at, one in enumerate(slices.values()))]
        for stage in shown
    ]  # fmt: skip
    headers: doc.Headers = ["stage", "owner", *in_ms(*slices)]
    table = Table(f"{metric.upper()} by rank and stage", headers, rows, words=2)
    picture = Ranks(f"{metric.upper()} of all {what} by rank", slices, result.device)
    said = f"All {what}, ordered by what they waited and cut into slices; each bar is the mean of its slice."
    chart = Chart(f"spread-{event}", picture, "", table, "levels", visible_in(slices.values()))
    return [Paragraph(said, "quiet"), chart]


def _missing(result: RunResult, metric: str) -> list[Block]:
    """Which token gaps are not in the bars, and which stages are unmeasured."""
    said = []
    if metric == "itl" and result.ledger.gaps_of is not None:
        said.append(f"These are the token gaps of {count(result.ledger.gaps_of)} requests, drawn at random from all.")
    known = result.stages_to_first_token if metric == "ttft" else result.stages
    missing = [name for name, found in known.items() if found.kind == "unmeasured"]
    if {"prefill", "decode"} <= set(missing):
        said.append(_NO_PROBE)
    elif missing:
        said.append(f"Unmeasured here, their time is in the residual: {', '.join(map(marks.words, missing))}.")
    return [Paragraph(text, "quiet") for text in said]


def upgrade(result: RunResult) -> Section | None:
    """The bracket on what a faster device could bring."""
    rows: list[Row] = []
    for metric in ("ttft", "e2e"):
        found = getattr(result.upgrade, metric)
        for p in ("p50", "p90", "p95", "p99") if found else ():
            ends = [
                Figure(getattr(getattr(found, end), f"{p}_ms"), "ms", f"upgrade.{metric}.{end}.{p}_ms")
                for end in ("now", "lower", "upper")
            ]
            rows.append([metric.upper(), p, *ends])
    if not rows:
        return None
    headers: doc.Headers = ["metric", "percentile", *in_ms("now", "lower end", "upper end")]
    table = Table("What a faster device could bring", headers, rows, words=2, css="compact")
    lead = f"{most_an_upgrade_brings(result)} {_BRACKET}".lstrip()
    return Section("upgrade", f"What a faster {result.device} could bring", [table], lead, "faster device")
