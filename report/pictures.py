"""The pictures of where time goes: each a frozen value that draws itself on the page, some in the terminal too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rich.text import Text

from gapmeter.analysis.numbers import duration, share
from gapmeter.analysis.stages import UNEXPLAINED
from gapmeter.report import bars, marks
from gapmeter.report.charts import Axis, Plot, Scale, Segment, bar, head, limit
from gapmeter.report.svg import Fragment

Limit = tuple[float, str]  # ms, the objective in words
_FAR = 1.8  # times the longest bar: an objective farther off is told in words, so that bars stay long
_THICK, _ROW = 34, 66
_LABEL = 27  # columns of the terminal before a bar


def segment(stage: str, ms: float, device: str, whole: str, *, label: str = "", of: str = "") -> Segment:
    """A stage's piece of a bar; ``whole``: what part it is of what. The residual is drawn however small it is."""
    words = marks.words(stage)
    told = ", ".join(filter(None, (f"{of}{words}: {duration(ms)}", whole)))
    return Segment(
        ms, marks.fill(stage), label, f"{told} · {marks.owner(stage, device)} · {marks.kind(stage)}", marks.ink(stage),
        least_px=4 if stage == UNEXPLAINED else None, data={"data_stage": stage, "data_ms": f"{ms:.7g}"},
    )  # fmt: skip


def segments(
    parts: Mapping[str, float], total_ms: float, device: str, *, labels: bool = False, of: str = ""
) -> list[Segment]:
    """A whole bar in the order of the timeline."""
    return [
        segment(stage, ms, device, f"{share(ms / total_ms)} of the bar" if total_ms else "",
                label=marks.words(stage) if labels else "", of=of)
        for stage, ms in parts.items() if ms > 0 or stage == UNEXPLAINED
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Band:
    """The mean ledger of some requests; ``parts`` maps a stage (and the residual) to ms, in the timeline's order."""

    name: str
    detail: str
    count: int
    total_ms: float
    parts: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Stacks:
    """Where typical and slow requests spend their time, on one axis, and what makes the difference.

    A band's stack is the mean over the real requests in it, so that its stages add up to the bar. ``what`` they are:
    requests, or token gaps.
    """

    metric: str
    what: str
    typical: Band
    slow: Band
    limit: Limit | None
    device: str

    def draw(self, name: str, stamp: str | None) -> Fragment:
        longest = max(self.typical.total_ms, self.slow.total_ms) or 1e-3  # gaps of 0: tokens that came in one read
        ends = [longest, self.limit[0]] if self.limit and self.limit[0] <= _FAR * longest else [longest]
        plot = Plot(
            Axis(Scale.linear(ends, room=0.02), "ms"),
            Axis(Scale.categories([("typical", "slow", "difference")]), labels=False),
            3 * _ROW,
        )
        bands = (self.typical, self.slow)
        stacks = [
            bar(plot, row, segments(band.parts, band.total_ms, self.device, labels=True), _THICK)
            for row, band in enumerate(bands)
        ]
        heads = [
            head(plot, row, _THICK, f"{band.name} {duration(band.total_ms)}", f"{band.detail}, mean of {band.count:,}")
            for row, band in enumerate(bands)
        ]
        extra = self.slow.total_ms - self.typical.total_ms
        told = f"what slow {self.what} wait beyond typical ones, largest first"
        grown = self._grown()
        return plot.chart(
            name, f"{self.metric}: typical against slow {self.what}", self.sentence(),
            *stacks,
            bar(plot, 2, grown, _THICK, start=self.slow.total_ms - sum(piece.size for piece in grown)),
            limit(plot, f"SLO {self.limit[1]}", x=self.limit[0]) if self.limit else Fragment(),
            *heads, head(plot, 2, _THICK, f"difference {duration(extra)}", told),
            stamp=stamp,
        )  # fmt: skip

    def sentence(self) -> str:
        """The picture for those who do not see it."""
        stage, extra = self._excess()[0]
        waits = f"Typical {self.what} take {duration(self.typical.total_ms)}, slow ones {duration(self.slow.total_ms)}"
        return f"{waits}; the largest part of the difference is {marks.words(stage)}, {duration(extra)}."

    def _excess(self) -> list[tuple[str, float]]:
        """Slow minus typical a stage, in ms, the largest first."""
        stages = dict.fromkeys([*self.slow.parts, *self.typical.parts])
        gain = {s: self.slow.parts.get(s, 0.0) - self.typical.parts.get(s, 0.0) for s in stages}
        return sorted(gain.items(), key=lambda item: -item[1])

    def _grown(self) -> list[Segment]:
        """What grew, laid end to end up to the slow total; what shrank makes it begin before the typical total."""
        whole = self.slow.total_ms - self.typical.total_ms
        pieces = []
        for stage, ms in self._excess():
            if ms > 0:
                part = share(ms / whole) if whole > 0 else ""
                more = part if ms <= whole else f"+{duration(ms)}"  # others shrank: it is more than all of it
                label = f"{marks.words(stage)} {more}"
                pieces.append(segment(stage, ms, self.device, f"{part} of the excess", label=label))
        return pieces

    def sketch(self, width: int) -> Text:
        """Two bars of letters on one axis, with the objective's place under them, and what the letters mean."""
        slow, limit = self.slow.total_ms, self.limit
        top = max(slow, limit[0]) if limit and limit[0] <= _FAR * slow else slow
        axis, ms_per_column = bars.axis(top, width - _LABEL)
        text = Text.assemble((f" where {self.metric} goes".ljust(_LABEL), "bold"), axis)
        shown: set[str] = set()
        for name, band in ((" typical (p45-55)", self.typical), (" slow (p98.5+)", self.slow)):
            label = f"{name.ljust(17)}{duration(band.total_ms):>9} "
            text.append(f"\n{label}").append_text(bars.bar(band.parts, ms_per_column))
            shown |= bars.columns(band.parts, ms_per_column).keys()
        text.append(self._limit_mark(ms_per_column, width))
        return text.append("\n" + bars.key([s for s in self.slow.parts if s in shown], width, _LABEL))

    def _limit_mark(self, ms_per_column: float, width: int) -> str:
        if self.limit is None:
            return ""
        mark, times = f"SLO {duration(self.limit[0])}", self.limit[0] / self.slow.total_ms
        if times > _FAR:
            return f"\n{f'{mark}, {times:.1f} times as far'.rjust(width)}"
        at = _LABEL + round(self.limit[0] / ms_per_column)
        return "\n" + (f"{' ' * at}^ {mark}" if at + 2 + len(mark) <= width else f"{mark} ^".rjust(at + 1))


def stages_in(bands: Iterable[Band]) -> list[str]:
    """The stages that any of the bars shows, in the order of the timeline; the residual always."""
    known = list(bands)
    names = dict.fromkeys(stage for band in known for stage in band.parts)
    return [s for s in names if s == UNEXPLAINED or any(band.parts.get(s, 0) > 0 for band in known)]
