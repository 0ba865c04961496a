"""Where the unexplained time of a run's ledgers lies: the stretches that no activity covers, by their two neighbours.

``python -m bench.holes RUN`` prints, for each pair (class that ended before, class that began after), how many such
stretches there are and how long they are: it tells which two stamps have nothing between them.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.transit import last_tokens
from gapmeter.analysis.ledger.critical_path import Intervals
from gapmeter.analysis.ledger.intervals import CLASSES

Ints = NDArray[np.int64]


def holes(intervals: Intervals, start: Ints, end: Ints) -> dict[tuple[str, str], list[int]]:
    """Lengths in ns of each event's uncovered stretches, by the classes before and after.

    The event's own ends are called ``due`` and ``event``.
    """
    found: dict[tuple[str, str], list[int]] = defaultdict(list)
    order = np.lexsort((intervals.start, intervals.event))
    bounds = np.searchsorted(intervals.event[order], np.arange(len(start) + 1))
    for event in range(len(start)):
        covered, before = int(start[event]), "due"
        for row in order[bounds[event] : bounds[event + 1]]:
            name = CLASSES[intervals.cls[row]].name
            if intervals.start[row] > covered:
                found[before, name].append(int(intervals.start[row]) - covered)
            if intervals.end[row] > covered:
                covered, before = int(intervals.end[row]), name
        if end[event] > covered:
            found[before, "event"].append(int(end[event]) - covered)
    return found


def main(arguments: Sequence[str]) -> int:
    """``RUN``."""
    intervals, events = last_tokens(Path(arguments[0]))
    found = holes(intervals, events.start, events.end)
    print(f"{'after':<18}{'before':<18}{'a request':>10}{'p50 µs':>9}{'p99 µs':>9}{'ms a request':>14}")
    for (before, after), lengths in sorted(found.items(), key=lambda item: -sum(item[1])):
        p50, p99 = np.percentile(lengths, [50, 99]) / 1e3
        each = len(lengths) / len(events)
        print(f"{before:<18}{after:<18}{each:>10.1f}{p50:>9.1f}{p99:>9.1f}{sum(lengths) / len(events) / 1e6:>14.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
