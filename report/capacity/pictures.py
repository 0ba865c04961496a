"""A capacity search's two pictures: goodput and verdicts against rate, and where the capacity probably lies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gapmeter.analysis.capacity.trial import FAILS, HOLDS
from gapmeter.analysis.numbers import rate, share, significant, ticks
from gapmeter.report.svg import NOTHING, Fragment, chart, el, group, path, percent, stretched
from gapmeter.report.sweep.scale import Scale, along

_HEIGHT, _SHARES, _DENSITY = 260, 120, 170
_CSS = {HOLDS: "met", FAILS: "missed"}


def rate_scale(rates: Sequence[float]) -> Scale:
    """Logarithmic, as the search is, with room at both ends."""
    return Scale(min(rates) / 1.15, max(rates) * 1.15, logarithmic=True)


def goodput(part: Mapping[str, Any], name: str) -> Fragment:
    """Goodput against rate; dashed, what was asked for; shaded, the rates at which every SLO holds."""
    curve = part["curve"]
    x = rate_scale([point["rate"] for point in curve])
    y = Scale.of([end for p in curve for end in (p["goodput_ci"] or ())] + [p["rate"] for p in curve[:-1]] or [1.0])
    y = Scale(0.0, y.top, logarithmic=False)
    asked = [(1000 * x.part(r), _HEIGHT * (1 - y.part(r))) for r in _steps(x) if r <= y.top]
    known = [p for p in curve if p["goodput_per_s"] is not None]
    line = [(1000 * x.part(p["rate"]), _HEIGHT * (1 - y.part(p["goodput_per_s"]))) for p in known]
    drawn = stretched(
        _HEIGHT,
        el("path", d=path(asked), class_="curve thin", stroke_dasharray="4 4") if len(asked) > 1 else NOTHING,
        el("path", d=path(line), class_="curve") if len(line) > 1 else NOTHING,
    )
    marks = [_whisker(p["goodput_ci"], p["rate"], x, y, _HEIGHT) for p in known]
    marks += [_point(p, p["goodput_per_s"], x, y, _HEIGHT) for p in known]
    said = "Goodput by rate: " + "; ".join(f"{rate(p['rate'])} {rate(p['goodput_per_s'])}" for p in known)
    return chart(
        name, _HEIGHT + 44, "Goodput against rate", said, _compliant(part, x, _HEIGHT), _levels(y, _HEIGHT, "req/s"),
        along(x, _HEIGHT, "requests per second asked for (logarithmic)"), drawn, *marks, _estimate(part, x, _HEIGHT),
    )  # fmt: skip


def verdicts(part: Mapping[str, Any], name: str) -> Fragment:
    """How sure each trial is that every SLO holds at its rate."""
    told = [trial for trial in part["trials"] if trial["confidence"] is not None]
    x = rate_scale([point["rate"] for point in part["curve"]])
    y = Scale(0.0, 1.0, logarithmic=False)
    marks = []
    for trial in told:
        sure = trial["confidence"] if trial["leaning"] == HOLDS else 1 - trial["confidence"]
        marks.append(_point(trial, sure, x, y, _SHARES))
    said = "How sure each trial is that the SLOs hold: " + "; ".join(
        f"{rate(t['rate'])} {share(t['confidence'] if t['leaning'] == HOLDS else 1 - t['confidence'])}" for t in told
    )
    levels = group(
        el("text", text, x=-8, y=_SHARES * (1 - at) + 4, class_="tick end")
        for at, text in ((0.0, "fails"), (0.5, "?"), (1.0, "holds"))
    )
    half = el("line", x1=0, x2="100%", y1=_SHARES / 2, y2=_SHARES / 2, class_="grid")
    return chart(
        name, _SHARES + 44, "Verdict by rate", said, _compliant(part, x, _SHARES), levels, half,
        along(x, _SHARES, "requests per second asked for (logarithmic)"), *marks, _estimate(part, x, _SHARES),
    )  # fmt: skip


def density(part: Mapping[str, Any], name: str) -> Fragment:
    """The posterior over the logarithm of the rate, its interval shaded; rates that were tried as ticks below."""
    rates, masses = part["posterior"]["rates"], part["posterior"]["masses"]
    reach = (part["high"] / part["low"]) ** 0.75
    low, high = part["low"] / reach, part["high"] * reach
    x = Scale(low, high, logarithmic=True)
    heights = [mass / math.log(b / a) for mass, a, b in zip(masses, rates[:-1], rates[1:], strict=True)]
    top = max(heights) * 1.1
    corners = [(0.0, float(_DENSITY))]
    for height, a, b in zip(heights, rates[:-1], rates[1:], strict=True):
        if b > low and a < high:
            level = _DENSITY * (1 - height / top)
            corners += [(1000 * x.part(max(a, low)), level), (1000 * x.part(min(b, high)), level)]
    corners.append((1000.0, float(_DENSITY)))
    drawn = stretched(_DENSITY, el("path", d=path(corners, closed=True), class_="area"),
                      el("path", d=path(corners), class_="curve"))  # fmt: skip
    tried = [
        el("line", x1=percent(x.part(t["rate"])), x2=percent(x.part(t["rate"])), y1=_DENSITY - 8, y2=_DENSITY,
           class_="whisker")
        for t in part["trials"] if t["confidence"] is not None and low < t["rate"] < high
    ]  # fmt: skip
    said = f"The capacity's probability density: median {rate(part['rate'])}, interval {_interval(part)}."
    return chart(
        name, _DENSITY + 44, "Where the capacity lies", said, _interval_band(part, x, _DENSITY),
        _rates(x, _DENSITY, "requests per second (logarithmic)"), drawn, *tried, _estimate(part, x, _DENSITY),
    )  # fmt: skip


def _steps(x: Scale) -> list[float]:
    return [x.bottom * (x.top / x.bottom) ** (i / 60) for i in range(61)]


def _rates(x: Scale, height: int, words: str) -> Fragment:
    """Vertical lines at round rates, a constant step apart: for a narrow part of the axis."""
    step = ticks(x.top - x.bottom, 6)[1]
    parts = []
    for number in range(math.ceil(x.bottom / step), math.floor(x.top / step) + 1):
        at = percent(x.part(number * step))
        parts += [el("line", x1=at, x2=at, y1=0, y2=height, class_="grid"),
                  el("text", f"{number * step:g}", x=at, y=height + 17, class_="tick middle")]  # fmt: skip
    return group([*parts, el("text", words, x="100%", y=height + 34, class_="tick end")])


def _compliant(part: Mapping[str, Any], x: Scale, height: int) -> Fragment:
    """Shaded up to the interval's lower end, where the SLOs hold; lighter to its upper end, where they may."""
    low, high = part["low"], part["high"]
    if low is None:
        return NOTHING
    sure = el("rect", x=0, y=0, width=percent(x.part(low)), height=height, class_="band")
    if high is None:
        return sure
    maybe = el("rect", x=percent(x.part(low)), y=0, width=percent(max(x.part(high) - x.part(low), 0.0)), height=height,
               class_="band", opacity=0.45)  # fmt: skip
    return group([sure, maybe, el("text", "every SLO holds", x=8, y=16, class_="note start")])


def _interval_band(part: Mapping[str, Any], x: Scale, height: int) -> Fragment:
    if part["rate"] is None:
        return NOTHING
    low, high = x.part(part["low"]), x.part(part["high"])
    return el("rect", x=percent(low), y=0, width=percent(max(high - low, 0.0)), height=height, class_="band",
              opacity=0.6)  # fmt: skip


def _estimate(part: Mapping[str, Any], x: Scale, height: int) -> Fragment:
    if part["rate"] is None:
        return NOTHING
    at = x.part(part["rate"])
    side, dx = ("start", 6) if at < 0.75 else ("end", -6)
    return group([
        el("line", x1=percent(at), x2=percent(at), y1=0, y2=height, class_="limit"),
        el("text", f"{rate(part['rate'])}", x=percent(at), dx=dx, y=height - 10, class_=f"limit {side} halo"),
    ])  # fmt: skip


def _interval(part: Mapping[str, Any]) -> str:
    return " .. ".join("unknown" if end is None else significant(end) for end in (part["low"], part["high"]))


def _levels(y: Scale, height: int, unit: str) -> Fragment:
    parts = []
    marks = ticks(y.top, 5)
    for value in marks:
        at = height * (1 - y.part(value))
        text = f"{value:g} {unit}" if value == marks[-1] else f"{value:g}"
        parts += [el("line", x1=0, x2="100%", y1=at, y2=at, class_="grid"),
                  el("text", text, x=-8, y=at + 4, class_="tick end")]  # fmt: skip
    return group(parts)


def _whisker(ends: Sequence[float] | None, at: float, x: Scale, y: Scale, height: int) -> Fragment:
    if ends is None:
        return NOTHING
    place = percent(x.part(at))
    return el("line", x1=place, x2=place, y1=height * (1 - y.part(ends[0])), y2=height * (1 - y.part(ends[1])),
              class_="whisker")  # fmt: skip


def _point(point: Mapping[str, Any], value: float, x: Scale, y: Scale, height: int) -> Fragment:
    words, css = el("title", f"{rate(point['rate'])}: {point['verdict']}"), _CSS.get(point["verdict"], "open")
    return el("circle", words, cx=percent(x.part(point["rate"])), cy=height * (1 - y.part(value)), r=5,
              class_=f"point {css}", data_rate=repr(point["rate"]), data_value=repr(value))  # fmt: skip
