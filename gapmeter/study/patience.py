"""When a load may end: between its duration and its patience, at looks planned beforehand.

A percentile's interval has both ends once the requests are worth enough independent ones (``n_eff``), and how many they
are worth shows only in the run. Each look, the first at ``load.duration``, the last at ``load.patience``, asks only
that, and for as many requests as a limit of errors takes if none fails: never for the percentile itself nor a verdict,
so that no run ends because it looks good. The first requests that the analysis will leave out as warm-up count at no
look.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from gapmeter.analysis.judge.steady import detect_warmup
from gapmeter.analysis.requests.attempts import request_rows
from gapmeter.analysis.requests.metrics import metric_series
from gapmeter.analysis.stats.exact import values_needed
from gapmeter.loadgen.sender import is_retryable
from gapmeter.records import Outcome
from gapmeter.records.request import FINISHED, RequestRecord
from gapmeter.scenarios.model import Scenario
from gapmeter.scenarios.slo import LATENCIES, Slo

LOOKS = 4
_PLANNED = 2.2  # times the independent values that both ends take: so many requests suffice in 19 runs of 20


class RequestsSoFar:
    """The requests of a load that goes on, by what its generators have written.

    A request is due when its first attempt was, and in flight until its last has ended, also while it waits for the
    next: ``retries`` is how many may follow the first.
    """

    def __init__(self, retries: int) -> None:
        self._read, self._retries = 0, retries
        self._due_ns: dict[int, int] = {}
        self._in_flight: set[int] = set()
        self._ended: dict[int, dict[str, Any]] = {}  # by request: its last attempt

    @property
    def oldest_in_flight_ns(self) -> int | None:
        """When the oldest request that is in flight was due."""
        return min((self._due_ns[index] for index in self._in_flight), default=None)

    def read(self, seen: Sequence[tuple[int, RequestRecord]]) -> None:
        """What has come since the last call; its answers are let go. ``seen``: all that was written, in one list."""
        ended, new = [], seen[self._read :]
        for code, record in new:
            if record.outcome is Outcome.ABANDONED:  # never asked
                continue
            due_ns = self._due_ns.setdefault(record.index, record.due_ns)
            if code == FINISHED and not (record.retry < self._retries and is_retryable(record)):
                self._in_flight.discard(record.index)
                ended.append(record if record.due_ns == due_ns else replace(record, due_ns=due_ns))
            else:
                self._in_flight.add(record.index)
        self._read = len(seen)
        self._ended.update(zip([r.index for r in ended], request_rows(ended, timeout_ns=0), strict=True))
        for _, record in new:  # its answer is read, and would be kept until the load has ended
            record.forget_answer()

    def ended(self, from_ns: int, until_ns: float) -> list[dict[str, Any]]:
        """Rows of a table of requests: the last attempts of those that were due then and have ended, by due time."""
        rows = [row for row in self._ended.values() if from_ns <= row["due_ns"] < until_ns]
        return sorted(rows, key=lambda row: row["due_ns"])


class Patience:
    """Looks at a load that began at ``t0_ns`` and was planned for ``patience_ns`` after its warm-up."""

    def __init__(self, scenario: Scenario, t0_ns: int, warmup_ns: int) -> None:
        load = scenario.load
        assert load.duration_ns is not None and load.longest_ns is not None
        self._from_ns = t0_ns + warmup_ns
        step_ns = (load.longest_ns - load.duration_ns) / (LOOKS - 1)
        self._looks_ns = [self._from_ns + load.duration_ns + round(step_ns * n) for n in range(LOOKS - 1)]
        self._asked = [
            (slo.metric, slo.percentile) for slo in scenario.slo if slo.metric in LATENCIES and slo.percentile
        ]
        self._fewest = max((_fewest(slo) for slo in scenario.slo), default=0)
        self._so_far, self._finds_warmup = RequestsSoFar(load.retries), load.warmup_ns is None

    def until_ns(self, seen: Sequence[tuple[int, RequestRecord]], now_ns: int) -> int | None:
        """Where the load may end: requests due until then are enough, and have been answered. None: it goes on.

        ``seen``: all that the generators have written by ``now_ns``, the same list every time, longer.
        """
        self._so_far.read(seen)
        if not self._looks_ns or now_ns < self._looks_ns[0]:
            return None
        look_ns, oldest_ns = self._looks_ns[0], self._so_far.oldest_in_flight_ns
        if oldest_ns is not None and oldest_ns < look_ns:
            return None  # what is still awaited belongs to this look
        self._looks_ns.pop(0)
        return look_ns if self._is_enough(look_ns) else None

    def _is_enough(self, look_ns: int) -> bool:
        table = pd.DataFrame(self._so_far.ended(self._from_ns, look_ns))
        if not len(table):
            return False
        if self._finds_warmup and (warmup := detect_warmup(table)).state == "warmed":
            table = table[table["due_ns"] >= warmup.until_ns]
        asked = ((metric_series(table, metric, failures=True), percentile) for metric, percentile in self._asked)
        return len(table) >= self._fewest and all(not values.more_values(percentile) for values, percentile in asked)


def _fewest(slo: Slo) -> int:
    """How many requests, none of which failed, show that no larger a share fails than an SLO of errors allows."""
    share = slo.limit_share
    return 0 if share is None or share >= 1 else values_needed(100 - 100 * share)


def shortage(scenario: Scenario) -> str:
    """What to say before a load that is surely too short for its SLOs; "" for any other.

    How alike neighboring requests are, and how many fail, shows only in the run; if they were independent, and none
    failed, it would take this many.
    """
    load = scenario.load
    if not load.rate or scenario.workload.kind == "conversation":  # of many turns each
        return ""
    asked = [(0, "", "", "")]
    for slo in scenario.slo:
        if slo.percentile is not None and slo.metric != "itl":  # of many gaps each
            full = f"p{slo.percentile:g} with a full interval needs about"
            count = math.ceil(_PLANNED * values_needed(slo.percentile))
            asked.append((count, full, "if latencies are correlated", "a bound or less"))
        elif fewest := _fewest(slo):
            asked.append((fewest, f"{slo.text} is met only with about", "if any fails", "it undecided"))
    needed, what, more, little = max(asked)
    planned = load.requests or load.rate * (load.longest_ns or 0) / 1e9
    if planned >= needed:
        return ""
    takes_s = math.ceil(needed / load.rate)
    minutes = math.ceil(takes_s / 60)
    takes, lasts = (f"{takes_s} s", f"{takes_s}s") if takes_s < 100 else (f"{minutes} min", f"{minutes}m")
    remedy = f"load.duration={lasts}" if load.requests is None else f"load.requests={needed}"
    return (
        f"{what} {needed:,} requests ({takes} at {load.rate:g} req/s), more {more}; "
        f"this load has about {planned:,.0f}, so expect {little} (--set {remedy})"
    )
