"""Everyone by rank: a bar a slice of the distribution, each the mean of the requests in it, stage by stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gapmeter.analysis.numbers import duration, in_unit, share, ticks, unit_of
from gapmeter.analysis.stages import UNEXPLAINED
from gapmeter.report import marks
from gapmeter.report.svg import Fragment, chart, el, group, percent, stamp_across

_BAR, _ROW, _TOP = 24, 34, 6
_TAIL = 0.13  # of the width is kept free for the number behind the longest bar


@dataclass(frozen=True, slots=True)
class Slice:
    """The mean ledger of the requests between two percentiles; ``parts`` maps a stage to ms."""

    name: str
    count: int
    total_ms: float
    parts: dict[str, float]


def picture(slices: Sequence[Slice], metric: str, what: str, name: str, stamp: str | None, device: str) -> Fragment:
    """One bar a slice on one axis from 0, fastest first; its name before it, its mean and size behind."""
    top = max(s.total_ms for s in slices) / (1 - _TAIL) or 1.0
    bottom = _TOP + _ROW * len(slices)
    rows = [part for number, s in enumerate(slices) for part in _row(s, _TOP + number * _ROW, top, device)]
    said = "; ".join(f"{s.name} {duration(s.total_ms)}" for s in slices)
    mark = stamp_across(stamp, bottom / 2 + 30)
    return chart(
        name, bottom + 26, f"{metric} of all {what} by rank", f"Means by rank: {said}.", _axis(top, bottom), *rows, mark
    )


def _row(found: Slice, y: int, top: float, device: str) -> list[Fragment]:
    parts, at = [el("text", found.name, x=-8, y=y + 17, class_="tick end")], 0.0
    for stage, ms in found.parts.items():
        if ms <= 0 and stage != UNEXPLAINED:
            continue
        width = ms / top
        least = 4 if stage == UNEXPLAINED and width < 0.004 else None
        words = f"{found.name}, {marks.words(stage)}: {duration(ms)}, {share(ms / (found.total_ms or 1.0))} of the bar"
        title = el("title", f"{words} · {marks.owner(stage, device)} · {marks.kind(stage)}")
        box = el("rect", width=least or "100%", height="100%", fill=marks.fill(stage), class_="segment")
        parts.append(
            el("svg", title, box, x=percent(at / top), y=y, width=least or percent(width), height=_BAR, class_="stage",
               data_stage=stage, data_ms=f"{ms:.7g}")
        )  # fmt: skip
        at += ms
    size = el("tspan", f"  n = {found.count:,}", class_="faint")
    mean = el("tspan", duration(found.total_ms), class_="strong")
    parts.append(el("text", mean, size, x=percent(at / top), dx=8, y=y + 17, class_="after"))
    return parts


def _axis(top: float, bottom: int) -> Fragment:
    unit = unit_of(top)
    scale = in_unit(1.0, unit)[0]
    parts, values = [], ticks(top * (1 - _TAIL) * scale)
    for value in values:
        x = percent(value / (top * scale))
        text = f"{value:g} {unit}" if value == values[-1] else f"{value:g}"
        parts.append(el("line", x1=x, x2=x, y1=0, y2=bottom, class_="grid"))
        parts.append(el("text", text, x=x, y=bottom + 18, class_="tick middle"))
    return group(parts)
