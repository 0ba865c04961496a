"""The device's share: of what requests waited, how much was it computing for them?"""

from __future__ import annotations

import math
from typing import Any

from gapmeter.analysis.numbers import duration, share
from gapmeter.analysis.stages import DECODE_COLOUR, OWNER_COLOURS
from gapmeter.report import head
from gapmeter.report.figure import Row, Table, Value, figure, panel, switch
from gapmeter.report.run import Run
from gapmeter.report.shell import Section
from gapmeter.report.svg import NOTHING, Fragment, chart, el, group, percent, stamp_across

_BANDS = {"typical": "typical", "slow": "slowest 1 %", "all": "everyone"}
_UNTIL = {"ttft": "to the first token", "e2e": "to the last token"}
_ROW, _BAR = 44, 30
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


def compute_section(run: Run) -> Section | None:
    """Shares of the wait by who was at work, typical, slowest 1 % and all; beside it how busy the device was."""
    known = run.summary.get("compute") or {}
    metrics = [m for m in _UNTIL if m in known]
    if not metrics:
        return None
    device = known["device"]
    title, short = f"How much of the wait was the {device} computing?", f"the {device}'s share"
    first = metrics[-1]
    told = known[first]["sentence"]
    if not told:
        return Section("compute", title, el("p", _UNKNOWN, class_="empty"), short=short)
    switched = switch("share", "time", [(m, _UNTIL[m]) for m in metrics], first)
    panels = [panel(_drawn(run, known[m], m, device), shown=m == first, share=m) for m in metrics]
    body = group([switched, *panels, _key(known, device), el("p", _busy(known, run), class_="lead")])
    return Section("compute", title, body, head.as_sentence(told), short)


def _busy(known: dict[str, Any], run: Run) -> str:
    device, busy = known["device"], known["busy_share"]
    words = f"A forward of the request's own counts as the {device} computing for it: "
    on_gpu = "gaps between kernels included unless sampled. "
    words += "the wall time of the call, on a CPU. " if device == "CPU" else on_gpu
    if busy is not None:
        words += f"Over the whole run some forward was going on {share(busy)} of the time, whoever it was for. "
    return words + _utilisation(run, device)


def _utilisation(run: Run, device: str) -> str:
    """What the device's own counter said, which is that some kernel ran, not for whom."""
    used = ((run.summary.get("telemetry") or {}).get("utilisation") or {}).get("nvml_busy_share")
    if used is None:
        return f"The {device}'s own utilization figure is unmeasured here."
    return f"NVML, the {device}'s own counter, calls it busy {share(used)} of the time: some kernel ran, for whomever."


def _drawn(run: Run, known: dict[str, Any], metric: str, device: str) -> Fragment:
    bands = {name: known[name] for name in _BANDS}
    parts = []
    for number, (name, found) in enumerate(bands.items()):
        parts += _bar(_name(name, known), found, number * _ROW + 8, device)
    bottom = len(bands) * _ROW + 6
    said = "; ".join(f"{_name(n, known)}: computing {share(_share(f, 'compute'))}" for n, f in bands.items())
    mark = stamp_across(run.stamp, bottom / 2 + 30)
    name = f"compute-{metric}"
    picture = chart(name, bottom + 24, f"Shares of the wait {_UNTIL[metric]}", f"{said}.", _axis(bottom), *parts, mark)
    return figure(picture, _table(known, metric, device), run.provenance, css="names")


def _name(band: str, known: dict[str, Any]) -> str:
    """What a band is called; few requests have no slowest 1 %, so there it is a number of them."""
    fewer = known["slow"]["count"] > math.ceil(known["all"]["count"] / 100)
    return f"slowest {known['slow']['count']}" if band == "slow" and fewer else _BANDS[band]


def _share(found: dict[str, Any], part: str) -> float | None:
    return found[part]["share"] if found[part] else None


def _bar(name: str, found: dict[str, Any], y: int, device: str) -> list[Fragment]:
    words = el("tspan", name, class_="strong"), el("tspan", duration(found["total_ms"]), x=-10, dy=15, class_="faint")
    parts, at = [el("text", *words, x=-10, y=y + 12, class_="end")], 0.0
    for part, (title, colour, ink) in _PARTS.items():
        known = found[part]
        if not known or known["share"] <= 0:
            continue
        low, high = known["share_ci"]
        ends = f" (95 %: {share(low)} to {share(high)})" if low is not None else ""
        label = share(known["share"])
        box = el("rect", width="100%", height="100%", fill=colour, class_="segment")
        inside = el("text", label, x="50%", y=_BAR / 2 + 4, class_="middle", style=f"fill:{ink}")
        text = inside if known["share"] > 0.05 else NOTHING
        hover = f"{title.format(device=device)}: {label}{ends}, {duration(known['ms'])}, mean of {found['count']:,}"
        parts.append(
            el("svg", el("title", hover), box, text, x=percent(at), y=y, width=percent(known["share"]), height=_BAR,
               data_part=part, data_share=f"{known['share']:.7g}")
        )  # fmt: skip
        at += known["share"]
    return parts


def _axis(bottom: int) -> Fragment:
    parts = []
    for p in (0, 25, 50, 75, 100):
        parts.append(el("line", x1=f"{p}%", x2=f"{p}%", y1=0, y2=bottom, class_="grid"))
        parts.append(el("text", f"{p} %", x=f"{p}%", y=bottom + 18, class_="tick middle"))
    return group(parts)


def _key(known: dict[str, Any], device: str) -> Fragment:
    there = [p for p in _PARTS if any((known.get(m) or {}).get("all", {}).get(p) for m in _UNTIL)]
    entries = [
        el("span", el("svg", el("rect", width=12, height=12, rx=2, fill=_PARTS[p][1], class_="segment"), width=12,
                      height=12, aria_hidden="true"), _PARTS[p][0].format(device=device), class_="owner-key")
        for p in there
    ]  # fmt: skip
    return el("p", *entries, class_="lead key")


def _table(known: dict[str, Any], metric: str, device: str) -> Table:
    rows: list[Row] = []
    for part, (title, _, _) in _PARTS.items():
        cells: list[Value | str] = [title.format(device=device)]
        for band in _BANDS:
            found = known[band][part]
            key = f"compute.{metric}.{band}.{part}.share"
            cells.append(Value(share(found["share"]), repr(found["share"]), {"data_key": key}) if found
                         else Value("unmeasured", "", {"class_": "unmeasured"}))  # fmt: skip
            low, high = found["share_ci"] if found else (None, None)
            cells.append("" if low is None else f"{share(low)} to {share(high)}")
        rows.append(cells)
    headers = ["who was at work", *(h for name in _BANDS for h in (_name(name, known), "95 %"))]
    return Table(f"Shares of the wait {_UNTIL[metric]}", headers, rows)
