"""The main picture: where typical and slow requests spend their time, on one axis, and what makes the difference.

A band's stack is the mean over the real requests in it, stage by stage, so that the stages add up to the bar.
"""

from __future__ import annotations

from dataclasses import dataclass

from gapmeter.analysis.numbers import duration, in_unit, share, significant, ticks, unit_of
from gapmeter.analysis.stages import UNEXPLAINED
from gapmeter.report import marks
from gapmeter.report.svg import NOTHING, Fragment, chart, el, group, percent

_BAR, _ROW, _TOP = 34, 66, 26
_WIDTHS = (320, 560, 760, 1000)  # plot widths in px from which a label that needs them is shown
_CHARACTER = 6.6  # px, of the labels' 12 px type, on the safe side


@dataclass(frozen=True, slots=True)
class Band:
    """Mean ledger of some requests: ``parts`` maps a stage (and the residual) to ms, in the order of the timeline."""

    name: str
    detail: str
    n: int
    total_ms: float
    parts: dict[str, float]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Typical against slow ones up to one event; ``limit`` is the SLO on that metric in ms and in words.

    ``what`` they are: requests, or token gaps. ``device`` is what computed the forwards.
    """

    metric: str
    event: str
    typical: Band
    slow: Band
    what: str
    limit: tuple[float, str] | None
    device: str

    def excess(self) -> list[tuple[str, float]]:
        """Slow minus typical a stage, in ms, the largest first."""
        stages = [*self.slow.parts, *(s for s in self.typical.parts if s not in self.slow.parts)]
        gain = {s: self.slow.parts.get(s, 0.0) - self.typical.parts.get(s, 0.0) for s in stages}
        return sorted(gain.items(), key=lambda item: -item[1])


@dataclass(frozen=True, slots=True)
class _Piece:
    stage: str
    start_ms: float
    length_ms: float
    label: str
    title: str


def picture(comparison: Comparison, name: str, stamp: str | None = None) -> Fragment:
    """The two stacks, their difference, the SLO line and the axis. ``stamp`` is written across (an invalid run)."""
    typical, slow = comparison.typical, comparison.slow
    longest = max(typical.total_ms, slow.total_ms) or 1e-3  # gaps of 0: tokens that came in one read
    limit = comparison.limit
    top = max(longest * 1.02, limit[0] * 1.04) if limit and limit[0] <= 1.8 * longest else longest * 1.02
    rows = [
        (_band_head(typical), _stack(typical, comparison.device)),
        (_band_head(slow), _stack(slow, comparison.device)),
        (_difference_head(comparison), _difference(comparison)),
    ]
    heads = [_head(number, head) for number, (head, _) in enumerate(rows)]
    bars = [_segment(piece, _top(number) + 20, top) for number, (_, pieces) in enumerate(rows) for piece in pieces]
    bottom = _TOP + 3 * _ROW
    return chart(
        name, bottom + 30, f"{comparison.metric}: typical against slow {comparison.what}", describe(comparison),
        _axis(top, bottom), *bars, _limit_line(limit, slow.total_ms, top, bottom), *heads, _stamp(stamp, bottom),
        css="" if limit else "bare",
    )  # fmt: skip


def describe(comparison: Comparison) -> str:
    """The picture in a sentence, for those who do not see it."""
    slow, typical = comparison.slow, comparison.typical
    stage, extra = comparison.excess()[0]
    text = f"Typical {comparison.what} take {duration(typical.total_ms)}, slow ones {duration(slow.total_ms)}"
    return f"{text}; the largest part of the difference is {marks.words(stage)}, {duration(extra)}."


def _band_head(band: Band) -> tuple[str, str]:
    return f"{band.name} {duration(band.total_ms)}", f"{band.detail}, mean of {band.n:,}"


def _difference_head(comparison: Comparison) -> tuple[str, str]:
    extra = comparison.slow.total_ms - comparison.typical.total_ms
    return f"difference {duration(extra)}", f"what slow {comparison.what} wait beyond typical ones, largest first"


def _stack(band: Band, device: str) -> list[_Piece]:
    pieces, at = [], 0.0
    for stage, ms in band.parts.items():
        if ms > 0 or stage == UNEXPLAINED:
            title = _title(stage, ms, f"{share(ms / band.total_ms)} of the bar" if band.total_ms else "", device)
            pieces.append(_Piece(stage, at, ms, marks.words(stage), title))
            at += ms
    return pieces


def _difference(comparison: Comparison) -> list[_Piece]:
    """Growth laid end to end up to the slow total; what shrank makes it begin before the typical total."""
    grown = [(stage, ms) for stage, ms in comparison.excess() if ms > 0]
    whole = comparison.slow.total_ms - comparison.typical.total_ms
    at = comparison.slow.total_ms - sum(ms for _, ms in grown)
    pieces = []
    for stage, ms in grown:
        part = share(ms / whole) if whole > 0 else ""
        title = _title(stage, ms, f"{part} of the excess", comparison.device)
        label = part if ms <= whole else f"+{duration(ms)}"  # others shrank, so that it is more than all of it
        pieces.append(_Piece(stage, at, ms, f"{marks.words(stage)} {label}", title))
        at += ms
    return pieces


def _title(stage: str, ms: float, part: str, device: str) -> str:
    return f"{marks.words(stage)}: {duration(ms)}, {part} · {marks.owner(stage, device)} · {marks.kind(stage)}"


def _top(row: int) -> int:
    return _TOP + row * _ROW


def _head(row: int, head: tuple[str, str]) -> Fragment:
    """What a bar is, above it; with a halo, since the SLO's line may pass behind."""
    strong, rest = el("tspan", head[0], class_="strong"), el("tspan", f"  {head[1]}", class_="faint rest")
    return el("text", strong, rest, x=0, y=_top(row) + 13, class_="halo")


def _segment(piece: _Piece, y: int, top: float) -> Fragment:
    """A piece of a bar, with its name where that fits. The residual is drawn even when it is too small to see."""
    width = piece.length_ms / top
    least = 4 if piece.stage == UNEXPLAINED and width < 0.004 else None
    box = el("rect", width=least or "100%", height="100%", fill=marks.fill(piece.stage), class_="segment")
    css = next((f"fit-{w}" for w in _WIDTHS if width * w >= _CHARACTER * len(piece.label) + 8), None)
    label = el(
        "text", piece.label, x="50%", y=_BAR / 2 + 4, text_anchor="middle", style=f"fill:{marks.ink(piece.stage)}",
        class_=f"inside {css}{' halo' if marks.hatched(piece.stage) else ''}",
    ) if css else ""  # fmt: skip
    return el(
        "svg", el("title", piece.title), box, label, x=percent(piece.start_ms / top), y=y,
        width=least or percent(width), height=_BAR, class_="stage", data_stage=piece.stage,
        data_ms=f"{piece.length_ms:.7g}",
    )  # fmt: skip


def _axis(top: float, bottom: int) -> Fragment:
    unit = unit_of(top)
    scale = in_unit(1.0, unit)[0]
    parts = []
    for value in ticks(top * scale):
        x = percent(value / (top * scale))
        text = f"{value:g}" if value else "0"
        last = value == ticks(top * scale)[-1]
        parts.append(el("line", x1=x, x2=x, y1=_TOP, y2=bottom, class_="grid"))
        parts.append(el("text", f"{text} {unit}" if last else text, x=x, y=bottom + 18, class_="tick middle"))
    return group(parts)


def _limit_line(limit: tuple[float, str] | None, slow_ms: float, top: float, bottom: int) -> Fragment:
    """The SLO across the bars, or where it lies when that is far to the right of them."""
    if limit is None:
        return NOTHING
    ms, expression = limit
    if ms > top:
        words = f"SLO {expression}: {significant(ms / (slow_ms or top))} times the slow bar →"
        return el("text", words, x="100%", y=12, class_="limit end")
    x = percent(ms / top)
    side = "end" if ms / top > 0.75 else "start"
    return group(
        [
            el("line", x1=x, x2=x, y1=_TOP - 8, y2=bottom, class_="limit"),
            el("text", f"SLO {expression}", x=x, y=12, class_=f"limit {side}"),
        ]
    )


def _stamp(word: str | None, bottom: int) -> Fragment:
    return el("text", word, x="50%", y=bottom / 2 + 34, class_="stamp", aria_hidden="true") if word else NOTHING
