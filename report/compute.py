"""Of what requests waited, how much was the device computing for them?"""

from __future__ import annotations

import math

from gapmeter.analysis.numbers import duration, share
from gapmeter.analysis.results.latency import ComputeBand, ComputeShares
from gapmeter.analysis.results.run import RunResult
from gapmeter.analysis.stages import DECODE_COLOR, OWNER_COLORS
from gapmeter.report import document as doc
from gapmeter.report import marks
from gapmeter.report.charts import Segment
from gapmeter.report.document import Chart, Figure, Panel, Paragraph, Section, Table, Words
from gapmeter.report.pictures import Shares
from gapmeter.report.words import UNTIL, as_sentence, part_of, shares

# part: words, color
_PARTS = {
    "compute": ("{device} computing for the request", DECODE_COLOR),
    "launch_gap": ("{device} waiting for the host to launch", "#B07A00"),
    "host": ("host: API server and framework", OWNER_COLORS["framework"]),
    "queue": ("contention: queue, others' work", OWNER_COLORS["capacity"]),
    "network": ("network", OWNER_COLORS["network"]),
    "load_tester": ("load tester", OWNER_COLORS["load tester"]),
    "unexplained": ("unexplained", "url(#hatch-unexplained)"),
}
_UNKNOWN = "Unmeasured: no process of the server stamped its forwards. Install its probe to see this."


def compute_sentence(found: ComputeShares, metric: str, device: str) -> str | None:
    """For how much of what the slowest waited the device computed for them; None where that is unmeasured."""
    part = found.slow.compute
    if part is None:
        return None
    during = part_of(part.share, part.share_ci)
    return f"the {device} computed for the {_slowest(found)} during {during} of their time {UNTIL[metric]}"


def _slowest(found: ComputeShares) -> str:
    """Few requests have no slowest 1 %: there it is a number of them."""
    return "slowest 1 %" if found.slow.count == math.ceil(found.all.count / 100) else f"slowest {found.slow.count}"


def compute(result: RunResult) -> Section | None:
    """Shares of the wait by who was at work, typical, slowest 1 % and all; beside it how busy the device was."""
    device, known = result.compute.device, {"ttft": result.compute.ttft, "e2e": result.compute.e2e}
    found = {metric: each for metric, each in known.items() if each is not None}
    if not found or device is None:
        return None
    who = "the forward pass" if device == "CPU" else f"the {device} computing"  # a CPU computes all the time
    title, short = f"How much of the wait was {who}?", f"the {device}'s share"
    first = list(found)[-1]
    if not (lead := compute_sentence(found[first], first, device)):
        return Section("compute", title, [Paragraph(_UNKNOWN, "empty")], short=short)
    choice = doc.Choice(
        [doc.Switch("share", "time", [(metric, UNTIL[metric]) for metric in found], first)],
        [Panel({"share": metric}, [_shares(each, metric, device)]) for metric, each in found.items()],
    )
    there = [
        (paint, words.format(device=device))
        for part, (words, paint) in _PARTS.items()
        if any(getattr(each.all, part) for each in found.values())
    ]
    busy = f"The {device} computes for a request during its own forwards: "
    on_gpu = "in one that waited for its launches only while kernels ran (after the launches, if not sampled). "
    busy += "on a CPU, the wall time of the call. " if device == "CPU" else on_gpu
    sampled = result.telemetry.utilisation if result.telemetry else None
    part, when = sampled.forward_share_of_window if sampled else None, "While requests were measured"
    if part is None:  # of the warm-up, too
        part, when = result.compute.busy_share, "From the first to the last"
    if part is not None:
        mean = f" (the mean of {result.compute.engines} engines)" if result.compute.engines else ""
        busy += f"{when} a forward pass was running {share(part)} of the time{mean}, for any request. "
    used = sampled.nvml_busy_share if sampled else None
    if used is None and device == "GPU":
        busy += "The GPU's own utilisation figure is unmeasured here."
    elif used is not None:  # NVML says that some kernel ran, not for whom
        busy += f"NVML reports the {device} busy {share(used)} of the time, for any work."
    blocks: list[doc.Block] = [choice, doc.Html(marks.key(there)), Paragraph(busy, "quiet")]
    return Section("compute", title, blocks, as_sentence(lead), short)


def _shares(found: ComputeShares, metric: str, device: str) -> Chart:
    names = {"typical": "typical", "slow": _slowest(found), "all": "everyone"}
    bands: dict[str, ComputeBand] = {name: getattr(found, name) for name in names}
    computing, shown, rows = [], [], dict[str, list[Words]]()
    for key, band in bands.items():
        computing.append(f"{names[key]}: computing {share(band.compute.share) if band.compute else 'unmeasured'}")
        parts = []
        for part, (words, paint) in _PARTS.items():
            who, one = words.format(device=device), getattr(band, part)
            cell = Figure(one.share, "share", f"compute.{metric}.{key}.{part}.share") if one else doc.Unmeasured()
            within = shares(one.share_ci) if one else ""
            rows.setdefault(part, [who]).extend([cell, within])
            if one and one.share > 0:
                said, data = share(one.share), {"data_share": f"{one.share:.7g}"}
                ends = f" (95 %: {within})" if within else ""
                title = f"{who}: {said}{ends}, {duration(one.ms)}, mean of {band.count:,}"
                parts.append(Segment(one.share, paint, said if one.share > 0.05 else "", title, "part", data=data))
        shown.append((names[key], band.total_ms, band.count, parts))
    title = f"Shares of the wait {UNTIL[metric]}"
    headers = ["who was at work", *(header for key in bands for header in (names[key], "95 %"))]
    picture = Shares(title, f"{'; '.join(computing)}.", shown)
    return Chart(f"compute-{metric}", picture, "", Table(title, headers, list(rows.values())))
