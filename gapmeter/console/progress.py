"""Live progress on standard error: one redrawn line on a terminal, a plain line every 10 s elsewhere.

It shares the generator's machine, so it asks for a snapshot only when a line is due: four times a second at most
on a terminal.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TextIO

from gapmeter.analysis.numbers import duration, significant

REDRAW_S = 0.25
PLAIN_S = 10.0


@dataclass(frozen=True, slots=True)
class Progress:
    """What is known at one moment of a run. Rates are requests per second over the last few seconds.

    ``phase`` is a word (warm-up, load, drain); ``remaining_s`` None when the end is not known (a count of requests);
    ``slo`` names the rolling percentile, for instance ``p99 TTFT``, ``value_ms`` is None until there is one.
    """

    phase: str
    elapsed_s: float
    remaining_s: float | None
    asked_per_s: float
    sent_per_s: float
    done_per_s: float
    issued: int
    done: int
    failed: int
    in_flight: int
    slo: str = "p99 TTFT"
    value_ms: float | None = None
    limit_ms: float | None = None
    lag_p99_ms: float | None = None


def line(now: Progress, width: int) -> str:
    """One line of at most ``width`` columns; what matters least is left off first."""
    left = f", {_clock(now.remaining_s)} left" if now.remaining_s is not None else ""
    rates = "/".join(_rate(r) for r in (now.asked_per_s, now.sent_per_s, now.done_per_s))
    parts = [
        f"{now.phase} {_clock(now.elapsed_s)}{left}",
        f"asked/sent/done {rates} per s",
        f"in flight {now.in_flight}",
        _percentile(now),
        f"{now.failed} failed" if now.failed else "no errors",
        f"lag p99 {duration(now.lag_p99_ms, 2)}",
        f"{now.done:,} of {now.issued:,} done",
    ]
    text = parts[0]
    for part in parts[1:]:
        if len(text) + 3 + len(part) <= width:
            text += f" · {part}"
    return text[:width]


def _percentile(now: Progress) -> str:
    if now.limit_ms is None or now.value_ms is None:
        return f"{now.slo} {duration(now.value_ms)}"
    sign = ">" if now.value_ms > now.limit_ms else "≤"
    return f"{now.slo} {duration(now.value_ms)} {sign} {duration(now.limit_ms)}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(max(0, round(seconds)), 60)
    return f"{minutes}:{rest:02d}"


def _rate(per_second: float) -> str:
    return significant(per_second, 2) if per_second < 10 else f"{per_second:,.0f}"


class ProgressLine:
    """Writes snapshots to a stream, no oftener than they can be read."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._terminal = stream.isatty()
        self._drawn = False
        self._next_s = clock() + (0.0 if self._terminal else PLAIN_S)

    @property
    def interval_s(self) -> float:
        """How often it is worth asking whether a line is due."""
        return REDRAW_S if self._terminal else PLAIN_S

    def offer(self, take: Callable[[], Progress]) -> bool:
        """Show a snapshot if one is due; ``take`` is called only then."""
        now = self._clock()
        if now < self._next_s:
            return False
        self._next_s = now + self.interval_s
        self._write(take())
        return True

    def _write(self, snapshot: Progress) -> None:
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            self._stream.write(f"\r{line(snapshot, width)}\x1b[K")
            self._drawn = True
        else:
            self._stream.write(f"{line(snapshot, 200)}\n")
        self._stream.flush()

    def close(self) -> None:
        """Clear the redrawn line, so that what follows starts on a clean one."""
        if self._drawn:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._drawn = False


class JsonLines:
    """One JSON object a second, for a program that watches; its keys are the fields of ``Progress``."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock, self._next_s = stream, clock, clock()

    def offer(self, take: Callable[[], Progress]) -> bool:
        """Write a snapshot if one is due; ``take`` is called only then."""
        now = self._clock()
        if now < self._next_s:
            return False
        self._next_s = now + 1.0
        self._stream.write(json.dumps({"type": "progress", **asdict(take())}) + "\n")
        self._stream.flush()
        return True

    def close(self) -> None:
        """Nothing is left to clear."""
