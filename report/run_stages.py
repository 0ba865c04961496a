"""Whose time it was: typical against slow requests by stage, the device's share, groups against groups, one request."""

from __future__ import annotations

import math

from gapmeter.analysis.ledger.tail import SLOW
from gapmeter.analysis.numbers import duration, share
from gapmeter.analysis.results.distribution import percentile_key
from gapmeter.analysis.results.latency import Band as ResultBand
from gapmeter.analysis.results.latency import Bands, ComputeBand, ComputeShares, GroupPair
from gapmeter.analysis.results.run import RunResult
from gapmeter.analysis.stages import DECODE_COLOUR, OWNER_COLOURS, owner_words
from gapmeter.report import marks, requests, run_words, words
from gapmeter.report.document import (
    BRIEF,
    Block,
    Chart,
    Choice,
    Code,
    Figure,
    Headers,
    Key,
    Panel,
    Paragraph,
    Row,
    Section,
    Stage,
    Switch,
    Table,
    Unmeasured,
    Words,
    in_ms,
)
from gapmeter.report.pictures import Band, Changes, Part, Ranks, Shares, Stacks, StageChange, stages_in
from gapmeter.report.run_folder import Run
from gapmeter.report.run_percentiles import METRICS, main_limit

# metric: the ledger's event, the part of the result with its stages, what is compared
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


def no_ledger(result: RunResult) -> str:
    """Why there are no stages to show."""
    refused = [check.text for check in result.checks if check.rule == "ledger" and check.status == "broken"]
    return refused[0] if refused else "no process of the server recorded its stages, or no request succeeded."


# --- where the time goes


def tail(result: RunResult) -> Section | None:
    """In short: the metric that the tail is told of, and in Markdown the stages that matter."""
    told = result.tail.metric
    metric = next((m for m in (told, "ttft", "e2e") if m in ("ttft", "e2e") and result.tail.of(m)), None)
    if metric is None:
        return None
    found, device = result.tail.of(metric), result.upgrade.device
    assert found is not None
    name, path = METRICS[metric], f"tail.{metric}"
    small, total, rows = (0.0, 0.0), (found.typical.total_ms, found.slow.total_ms), list[Row]()
    for stage, usual in found.typical.stages_ms.items():
        late = found.slow.stages_ms[stage]
        if max(abs(usual) / total[0], abs(late) / total[1]) < _SMALL:
            small = (small[0] + usual, small[1] + late)
        else:
            rows.append([Stage(stage), marks.owner(stage, device), *_both(path, stage, usual, late)])
    if any(small):
        rows.append(["the rest", "", *map(Figure, (*small, small[1] - small[0]))])
    rows.append(["sum", "", *map(Figure, (*total, found.difference_ms))])
    headers: Headers = [f"{name}: where it goes", "owner", "typical (p45-p55)", "slow (p98.5+)", "difference"]
    picture = Stacks(
        name, "requests", _band("typical", "", found.typical), _band("slow", "", found.slow),
        main_limit(result, metric), device,
    )  # fmt: skip
    return Section("tail", "", [Chart("tail", picture, "", Table(name, headers, rows, words=2))], on=BRIEF)


_SMALL = 0.01  # stages below this share of both bands are summed into one line


def _both(path: str, stage: str, usual: float, late: float) -> list[Figure]:
    ends = [Figure(ms, "ms", f"{path}.{band}.stages_ms.{stage}") for band, ms in (("typical", usual), ("slow", late))]
    return [*ends, Figure(late - usual)]


def where(result: RunResult, device: str) -> Section:
    """Typical against slow by stage, switched by event and by what counts as slow; the tail's own comes first."""
    title, short = "Where the time goes", "where the time goes"
    metrics = [metric for metric in EVENTS if metric in result.bands]
    if not metrics:
        none = _FEW if result.stages else no_ledger(result)
        return Section("where", title, [Paragraph(f"No bars here: {none}", "empty")])
    first = result.tail.metric if result.tail.metric in metrics else metrics[0]
    bands = [(percentile_key(p), f"p{p:g}+") for p in SLOW if any(_slow(result.bands[m], p) for m in metrics)]
    choice = Choice(
        [
            Switch("event", "time", [(m, _UNTIL[m]) for m in metrics], str(first)),
            Switch("band", "slow means", [*bands, ("all", "everyone")], percentile_key(_MAIN)),
        ],
        [
            Panel({"event": metric, "band": band}, blocks)
            for metric in metrics
            for band, blocks in _panels(result, metric, device).items()
        ],
    )
    return Section("where", title, [choice, Paragraph(_KEY, "quiet")], short=short)


def _slow(bands: Bands, percentile: float) -> ResultBand | None:
    found: ResultBand | None = getattr(bands.slow, percentile_key(percentile))
    return found


def _panels(result: RunResult, metric: str, device: str) -> dict[str, list[Block]]:
    """What each position of the switch shows for one metric."""
    bands, what = result.bands[metric], EVENTS[metric][2]
    panels: dict[str, list[Block]] = {}
    for percentile in SLOW:
        slow = _slow(bands, percentile)
        few = f"Too few {what} lie above p{percentile:g} for a mean worth drawing (seven are needed)."
        panels[percentile_key(percentile)] = (
            _stacks(result, metric, percentile, slow, device) if slow else [Paragraph(few, "empty")]
        )
    panels["all"] = _everyone(result, metric, device)
    return panels


def _band(name: str, detail: str, found: ResultBand) -> Band:
    return Band(name, detail, found.count, found.total_ms, found.stages_ms)


def _stacks(result: RunResult, metric: str, percentile: float, slow: ResultBand, device: str) -> list[Block]:
    event, _, what = EVENTS[metric]
    usual = result.bands[metric].typical
    bands = (
        _band("typical", f"{what} from p45 to p55", usual),
        _band("slow", f"{what} from p{percentile:g} up", slow),
    )
    picture = Stacks(METRICS[metric], what, *bands, main_limit(result, metric), device)
    key = f"stack-{event.replace('_', '-')}" + ("" if percentile == _MAIN else f"-{percentile_key(percentile)}")
    path, band = f"bands.{metric}", f"slow.{percentile_key(percentile)}"
    rows: list[Row] = []
    for stage, late in slow.stages_ms.items():
        before = usual.stages_ms.get(stage, 0.0)
        rows.append([
            Stage(stage), marks.owner(stage, device), marks.kind(stage),
            Figure(before, "ms", f"{path}.typical.stages_ms.{stage}"),
            Figure(late, "ms", f"{path}.{band}.stages_ms.{stage}"), Figure(late - before),
        ])  # fmt: skip
    name = "a token gap (ITL)" if metric == "itl" else METRICS[metric]
    headers: Headers = ["stage", "owner", "kind", *in_ms("typical", "slow", "difference")]
    table = Table(f"{name} by stage", headers, rows, words=3)
    chart = Chart(key, picture, "", table, stages=stages_in(bands))
    return [Paragraph(picture.sentence(), "quiet"), chart, *_unmeasured(result, metric)]


def _everyone(result: RunResult, metric: str, device: str) -> list[Block]:
    event, _, what = EVENTS[metric]
    spread = result.bands[metric].spread
    slices = [_band(f"p{one.from_percentile:g}–{one.to_percentile:g}", "", one) for one in spread]
    shown = stages_in(slices)
    rows: list[Row] = [
        [Stage(stage), marks.owner(stage, device),
         *(Figure(one.parts[stage], "ms", f"bands.{metric}.spread.{at}.stages_ms.{stage}")
           for at, one in enumerate(slices))]
        for stage in shown
    ]  # fmt: skip
    headers: Headers = ["stage", "owner", *in_ms(*(one.name for one in slices))]
    table = Table(f"{METRICS[metric]} by rank and stage", headers, rows, words=2)
    picture = Ranks(f"{METRICS[metric]} of all {what} by rank", slices, device)
    words = f"All {what}, ordered by what they waited and cut into slices; each bar is the mean of its slice."
    chart = Chart(f"spread-{event.replace('_', '-')}", picture, "", table, "levels", shown)
    return [Paragraph(words, "quiet"), chart, *_unmeasured(result, metric)]


def _unmeasured(result: RunResult, metric: str) -> list[Block]:
    known = result.stages_to_first_token if metric == "ttft" else result.stages
    missing = [name for name, found in known.items() if found.kind == "unmeasured"]
    if not missing:
        return []
    if {"prefill", "decode"} <= set(missing):
        return [Paragraph(_NO_PROBE, "quiet")]
    names = ", ".join(map(marks.words, missing))
    return [Paragraph(f"Unmeasured here, their time is in the residual: {names}.", "quiet")]


# --- of what was waited, how much was the device computing?

_BANDS = {"typical": "typical", "slow": "slowest 1 %", "all": "everyone"}
# part: words, colour, ink
_PARTS = {
    "compute": ("{device} computing for the request", DECODE_COLOUR, "#fff"),
    "launch_gap": ("{device} waiting for the host to launch", "#B07A00", "#fff"),
    "host": ("host: API server and framework", OWNER_COLOURS["framework"], "#000"),
    "queue": ("waiting for capacity: queue, others' work", OWNER_COLOURS["capacity"], "#000"),
    "network": ("network", OWNER_COLOURS["network"], "#000"),
    "load_tester": ("load tester", OWNER_COLOURS["load tester"], "#fff"),
    "unexplained": ("unexplained", "url(#hatch-unexplained)", "var(--ink)"),
}
_UNKNOWN = "Unmeasured: no process of the server stamped its forwards. With its probe installed, this tells."


def compute(result: RunResult) -> Section | None:
    """Shares of the wait by who was at work, typical, slowest 1 % and all; beside it how busy the device was."""
    device, known = result.compute.device, {"ttft": result.compute.ttft, "e2e": result.compute.e2e}
    found = {metric: shares for metric, shares in known.items() if shares is not None}
    if not found or device is None:
        return None
    title, short = f"How much of the wait was the {device} computing?", f"the {device}'s share"
    first = list(found)[-1]
    if not (lead := words.compute_sentence(found[first], first, device)):
        return Section("compute", title, [Paragraph(_UNKNOWN, "empty")], short=short)
    choice = Choice(
        [Switch("share", "time", [(metric, _UNTIL[metric]) for metric in found], first)],
        [Panel({"share": metric}, [_shares(shares, metric, device)]) for metric, shares in found.items()],
    )
    there = [
        (paint, words.format(device=device))
        for part, (words, paint, _) in _PARTS.items()
        if any(getattr(shares.all, part) for shares in found.values())
    ]
    blocks: list[Block] = [choice, Key(there), Paragraph(_busy(result, device), "quiet")]
    return Section("compute", title, blocks, run_words.as_sentence(lead), short)


def _busy(result: RunResult, device: str) -> str:
    words = f"A forward of the request's own counts as the {device} computing for it: "
    on_gpu = "gaps between kernels included unless sampled. "
    words += "the wall time of the call, on a CPU. " if device == "CPU" else on_gpu
    if (busy := result.compute.busy_share) is not None:
        words += f"Over the whole run some forward was going on {share(busy)} of the time, whoever it was for. "
    used = result.telemetry.utilisation.nvml_busy_share if result.telemetry else None
    if used is None:
        return words + f"The {device}'s own utilization figure is unmeasured here."
    # NVML says that some kernel ran, not for whom.
    return words + f"NVML, the {device}'s own counter, calls it busy {share(used)} of the time, for whomever."


def _shares(found: ComputeShares, metric: str, device: str) -> Chart:
    bands: dict[str, ComputeBand] = {name: getattr(found, name) for name in _BANDS}
    # Few requests have no slowest 1 %: there it is a number of them.
    few = found.slow.count > math.ceil(found.all.count / 100)
    names = _BANDS | ({"slow": f"slowest {found.slow.count}"} if few else {})
    shown = [(names[key], band.total_ms, band.count, _parts(band, device)) for key, band in bands.items()]
    computing = [
        f"{names[key]}: computing {share(one.compute.share) if one.compute else 'unmeasured'}"
        for key, one in bands.items()
    ]
    rows: list[Row] = []
    for part, (who, _, _) in _PARTS.items():
        row: list[Words] = [who.format(device=device)]
        for key, band in bands.items():
            one = getattr(band, part)
            low, high = one.share_ci if one else (None, None)
            row.append(Figure(one.share, "share", f"compute.{metric}.{key}.{part}.share") if one else Unmeasured())
            row.append("" if low is None else f"{share(low)} to {share(high)}")
        rows.append(row)
    title = f"Shares of the wait {_UNTIL[metric]}"
    headers: Headers = ["who was at work", *(header for key in bands for header in (names[key], "95 %"))]
    picture = Shares(title, f"{'; '.join(computing)}.", shown)
    return Chart(f"compute-{metric}", picture, "", Table(title, headers, rows))


def _parts(band: ComputeBand, device: str) -> list[Part]:
    return [
        Part(part, words.format(device=device), paint, ink, one.ms, one.share, *one.share_ci)
        for part, (words, paint, ink) in _PARTS.items()
        if (one := getattr(band, part))
    ]


# --- what makes some requests slower?

_SHOWN = 10
_EXPLORE = (
    "Two groups of the measured requests: by how much longer the one waited on average, and which stages that was. "
    "Thin lines: 95 % intervals from drawing whole stretches of the run again, since neighbors are alike."
)


def explorer(result: RunResult, name: str, device: str) -> Section | None:
    """Pairs of groups on a switch, each with its stages ranked."""
    found = {metric: pairs for metric in ("ttft", "e2e") if (pairs := result.explore.get(metric))}
    if not found:
        return None
    metrics = list(found)
    titles = {pair.key: _against(pair) for pairs in found.values() for pair in pairs}
    drawn = {(metric, pair.key): _pair(pair, metric, device) for metric, pairs in found.items() for pair in pairs}
    none: list[Block] = [Paragraph("One of the groups is too small here.", "empty")]
    choice = Choice(
        [
            Switch("pair", "compare", list(titles.items()), next(iter(titles)), list=True),
            Switch("pair-until", "time", [(metric, _UNTIL[metric]) for metric in metrics],
                   metrics[0] if result.tail.metric == "ttft" else metrics[-1]),
        ],
        [
            Panel({"pair": key, "pair-until": metric}, drawn.get((metric, key), none))
            for metric in metrics
            for key in titles
        ],
    )  # fmt: skip
    command = f"gapmeter explain {name} --group 'prompt_tokens > 64' --against rest"
    more = Paragraph(("Any other groups: ", Code(command)), "quiet")
    return Section("explore", "What makes some requests slower?", [choice, more], _EXPLORE, "explore")


def _against(pair: GroupPair) -> str:
    return f"{pair.a.partition(' (')[0]} against {pair.b.partition(' (')[0]}"


def _pair(pair: GroupPair, metric: str, device: str) -> list[Block]:
    told = run_words.as_sentence(words.difference_sentence(pair, pair.a, pair.b, device))
    sizes = f"n = {pair.a_count:,} and {pair.b_count:,}, in {pair.stretches} stretches."
    ranked = [row for row in pair.ranked if row.ms != 0][:_SHOWN]
    changes = [
        StageChange(
            row.stage, row.ms, *row.ci_ms, share(row.share) if row.share is not None and row.share > 0 else "",
            f"{duration(row.a_ms)} against {duration(row.b_ms)}",
        )
        for row in ranked
    ]  # fmt: skip
    largest = "; ".join(f"{marks.words(row.stage)} {duration(row.ms)}" for row in ranked[:4])
    picture = Changes(f"{pair.a} less {pair.b}, by stage", f"Differences of the means: {largest}.", changes, device)
    rows: list[Row] = [
        [Stage(row.stage), owner_words(row.owner, device), *map(Figure, (row.a_ms, row.b_ms, row.ms, *row.ci_ms)),
         Figure(row.share, "share")]
        for row in pair.ranked
    ]  # fmt: skip
    names = in_ms(pair.a, pair.b, "difference", "from", "to")
    table = Table(f"{pair.a} against {pair.b}", ["stage", "owner", *names, "share"], rows, words=2)
    chart = Chart(f"explore-{metric}-{pair.key}", picture, "", table, "names")
    return [Paragraph(told, "strong"), Paragraph(sizes, "quiet"), chart]


# --- one request


def one_request(run: Run) -> Section | None:
    """The slowest requests, one by one, and the view that opens any of the embedded ones."""
    if not run.result.stages:  # a ledger that was refused is not shown
        return None
    # Listed are the slowest by the metric that the tail is told of; for token gaps by E2E.
    event = "first_token" if run.result.tail.metric in ("ttft", None) else "last_token"
    return requests.section(run, event)
