"""How sure each objective is: its figure and 95 % interval on a line that ends beyond the limit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gapmeter.analysis.numbers import duration, share
from gapmeter.report.head import SloLine, slo_lines
from gapmeter.report.svg import Fragment, el, group, percent

_LIMIT_AT = 0.78  # of the width; beyond it is what breaks the objective
_HEIGHT, _MIDDLE = 20, 10.0


def gauges(summary: Mapping[str, Any]) -> Fragment:
    """A row an objective: its answer, what was measured, and where that lies; nothing without objectives."""
    rows = [_row(line, slo) for line, slo in zip(slo_lines(summary), summary["slo"], strict=True)]
    return el("ul", *rows, class_="gauges", aria_label="Objectives") if rows else group([])


def _row(line: SloLine, slo: Mapping[str, Any]) -> Fragment:
    told = line.interval if line.raw == "null" and not slo["infinite"] else line.measured
    spoken = el("i", f", 95 % interval {line.interval}", class_="hidden")
    head = (el("b", line.word, class_=f"mark {line.css}"), f" {line.expression}", el("span", told), spoken)
    return el("li", el("p", *head), _line(line, slo))


def _line(line: SloLine, slo: Mapping[str, Any]) -> Fragment:
    unit, write = ("share", share) if slo["metric"] == "errors" else ("ms", duration)
    value, low, high, limit = (slo[f"{name}_{unit}"] for name in ("value", "low", "high", "limit"))
    top = limit / _LIMIT_AT if limit > 0 else 1.0

    def x(at: float) -> float:
        return min(1.0, max(0.0, at / top))

    parts = [
        el("rect", x=0, y=_MIDDLE - 3, width="100%", height=6, rx=3, class_="track"),
        el("rect", x=percent(x(limit)), y=_MIDDLE - 3, width=percent(1 - x(limit)), height=6, class_="beyond"),
    ]
    if low is not None:
        end = 1.0 if high is None else x(high)
        open_ = " open" if high is None else ""
        width = percent(max(end - x(low), 0.004))
        parts.append(el("rect", x=percent(x(low)), y=_MIDDLE - 5, width=width, height=10, class_=f"sure{open_}"))
    if slo["infinite"]:
        parts.append(_value(1.0, outside=True))
    elif value is not None:
        parts.append(_value(x(value), outside=value > top))
    parts.append(el("line", x1=percent(x(limit)), x2=percent(x(limit)), y1=1, y2=_HEIGHT - 1, class_="limit"))
    words = f"{line.measured}, 95 % interval {line.interval}; the limit is {write(limit)}"
    return el("svg", el("title", words), *parts, width="100%", height=_HEIGHT, aria_hidden="true")


def _value(at: float, *, outside: bool) -> Fragment:
    if outside:
        return el("text", "▸", x="100%", y=_MIDDLE + 5, class_="end off")
    return el("circle", cx=percent(at), cy=_MIDDLE, r=4.5, class_="at")
