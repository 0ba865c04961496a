"""When a load may end: not before its duration, and at most as late as its patience, in looks planned beforehand.

A percentile's interval has both ends once the requests are worth enough independent ones (``n_eff``), and how many they
are worth shows only in the run. So at each look, the first at ``load.duration``, the last at ``load.patience``, that
alone is asked: never the percentile itself nor its verdict, so that a run does not end because it looks good.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from gapmeter.analysis.requests.attempts import request_rows
from gapmeter.analysis.requests.metrics import METRICS, metric_series
from gapmeter.analysis.stats.exact import values_needed
from gapmeter.records import Outcome
from gapmeter.records.request import FINISHED, RequestRecord
from gapmeter.scenarios import Scenario

LOOKS = 4
_PLANNED = (
    2.2  # times the independent values that both ends take: with so many requests nineteen runs of twenty have them
)


class Patience:
    """Looks at a load that goes on: from ``t0_ns`` on it was planned for ``patience_ns`` after its warm-up."""

    def __init__(self, scenario: Scenario, t0_ns: int, warmup_ns: int) -> None:
        load = scenario.load
        assert load.duration_ns is not None and load.longest_ns is not None
        self._from_ns = t0_ns + warmup_ns
        step_ns = (load.longest_ns - load.duration_ns) / (LOOKS - 1)
        self._looks_ns = [self._from_ns + load.duration_ns + round(step_ns * n) for n in range(LOOKS - 1)]
        self._asked = [(slo.metric, slo.percentile) for slo in scenario.slo if slo.metric in METRICS and slo.percentile]
        self._read = 0
        self._due_ns: dict[int, int] = {}  # by request: when its first attempt was due
        self._in_flight: set[int] = set()
        self._rows: dict[int, dict[str, object]] = {}

    def until_ns(self, seen: Sequence[tuple[int, RequestRecord]], now_ns: int) -> int | None:
        """Where the load may end: requests due until then are enough, and have been answered. None: it goes on.

        ``seen``: all that the generators have written by ``now_ns``, the same list every time, longer.
        """
        self._take(seen)
        if not self._looks_ns or now_ns < self._looks_ns[0]:
            return None
        look_ns = self._looks_ns[0]
        if any(self._due_ns[index] < look_ns for index in self._in_flight):
            return None  # what is still awaited belongs to this look
        self._looks_ns.pop(0)
        return look_ns if self._is_enough(look_ns) else None

    def _take(self, seen: Sequence[tuple[int, RequestRecord]]) -> None:
        ended = list[RequestRecord]()
        for code, record in seen[self._read :]:
            if record.outcome is Outcome.ABANDONED:  # never asked
                continue
            index, due_ns = record.index, self._due_ns.setdefault(record.index, record.due_ns)
            if code == FINISHED:
                self._in_flight.discard(index)
                ended.append(replace(record, due_ns=due_ns))
            else:
                self._in_flight.add(index)
        self._rows.update(zip([r.index for r in ended], request_rows(ended, timeout_ns=0), strict=True))
        self._read = len(seen)

    def _is_enough(self, look_ns: int) -> bool:
        rows = [row for index, row in self._rows.items() if self._from_ns <= self._due_ns[index] < look_ns]
        if not rows:
            return False
        table = pd.DataFrame(rows).sort_values("due_ns", ignore_index=True)
        asked = ((metric_series(table, metric, failures=True), percentile) for metric, percentile in self._asked)
        return all(not values.more_values(percentile) for values, percentile in asked)


def shortage(scenario: Scenario) -> str:
    """What is said before a load of which it is known that it is too short for its SLOs' percentiles; "" otherwise.

    How alike neighbours are shows only in the run; independent ones take this many at least.
    """
    load = scenario.load
    asked = [slo.percentile for slo in scenario.slo if slo.percentile is not None]
    if not asked or not load.rate:
        return ""
    highest, longest_s = max(asked), (load.longest_ns or 0) / 1e9
    planned = load.requests or load.rate * longest_s
    needed = _PLANNED * values_needed(highest)
    if planned >= needed:
        return ""
    minutes = math.ceil(needed / load.rate / 60)
    remedy = f"load.duration={minutes}m" if load.requests is None else f"load.requests={math.ceil(needed)}"
    return (
        f"a full interval of p{highest:g} takes about {needed:,.0f} requests, {minutes} min at {load.rate:g} req/s, "
        f"more if neighboring requests are alike; this load has about {planned:,.0f}, so expect a bound or less "
        f"(--set {remedy})"
    )
