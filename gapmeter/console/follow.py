"""What is known of a run while it runs, from the generators' record files, which it follows."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gapmeter.records import Outcome
from gapmeter.records.request import ISSUED, RequestRecord
from gapmeter.records.stream import outcome_of, parse_answer
from gapmeter.records.tail import RecordTail

RATE_WINDOW_NS = 5_000_000_000
_RECENT = 1000


@dataclass(frozen=True, slots=True)
class Answered:
    """A request that has ended, in ms from when it was due; None for what never came. ``gaps_ms``: between tokens."""

    due_ns: int
    outcome: Outcome
    ttft_ms: float | None
    e2e_ms: float | None
    gaps_ms: tuple[float, ...]


class Follower:
    """Counts, rates and rolling percentiles of the last thousand requests; ``poll`` takes in what is new.

    ``whole``: read answers to their last token, for gaps and E2E, instead of the first one.
    """

    def __init__(self, paths: Iterable[Path], t0_ns: int, *, whole: bool = False) -> None:
        self._tails = [RecordTail(path) for path in paths]
        self._t0, self._whole = t0_ns, whole
        self._sent: deque[int] = deque()
        self._done: deque[int] = deque()
        self.recent: dict[str, deque[float]] = {
            name: deque(maxlen=_RECENT * (16 if name == "itl" else 1)) for name in ("ttft", "itl", "e2e", "lag")
        }
        self.failed: Counter[str] = Counter()
        self.issued = self.done = 0

    def poll(self) -> list[Answered]:
        """Read what has been written since the last call; the requests that have ended in it."""
        return [
            answered for tail in self._tails for code, record in tail.poll() for answered in self._take(code, record)
        ]

    @property
    def in_flight(self) -> int:
        return self.issued - self.done

    def sent_per_s(self, now_ns: int) -> float:
        """Requests sent a second, over the last five."""
        return rate(self._sent, now_ns, self._t0)

    def done_per_s(self, now_ns: int) -> float:
        """Requests ended a second, over the last five."""
        return rate(self._done, now_ns, self._t0)

    def percentile(self, name: str, percentile: float) -> float | None:
        """Of the last requests' ttft, e2e, lag (ms) or of their gaps (itl); None when there are none yet."""
        values = self.recent[name]
        if not values:
            return None
        ordered = sorted(values)
        return ordered[min(len(ordered) - 1, int(len(ordered) * percentile / 100))]

    def _take(self, code: int, record: RequestRecord) -> Iterator[Answered]:
        if code == ISSUED:
            self.issued += 1
            self._sent.append(record.sent_ns or record.due_ns)
            return
        if record.outcome is Outcome.ABANDONED:  # never issued
            return
        self.done += 1
        self._done.append(record.end_ns)
        answer = parse_answer(record, first_token_only=not self._whole)
        outcome = outcome_of(record, answer)
        if outcome is not Outcome.OK:
            self.failed[outcome.name.lower()] += 1
            yield Answered(record.due_ns, outcome, None, None, ())
            return
        connecting = record.connect_end_ns - record.connect_start_ns
        self.recent["lag"].append((record.sent_ns - record.due_ns - connecting) / 1e6)
        waits = (np.unique(answer.token_ns) - record.due_ns) / 1e6  # tokens that came together are one arrival
        answered = Answered(record.due_ns, outcome, waits[0], waits[-1], tuple(np.diff(waits).tolist()))
        self._note(answered)
        yield answered

    def _note(self, answered: Answered) -> None:
        assert answered.ttft_ms is not None and answered.e2e_ms is not None
        self.recent["ttft"].append(float(answered.ttft_ms))
        if self._whole:
            self.recent["e2e"].append(float(answered.e2e_ms))
            self.recent["itl"].extend(answered.gaps_ms)


def rate(stamps: deque[int], now_ns: int, t0_ns: int) -> float:
    """Stamps a second over the last five seconds, or since the start; older ones are dropped."""
    since = max(now_ns - RATE_WINDOW_NS, t0_ns)
    while stamps and stamps[0] < since:
        stamps.popleft()
    return len(stamps) / max((now_ns - since) / 1e9, 1e-9)


def phase(now_ns: int, t0_ns: int, warmup_ns: int, end_ns: int) -> str:
    """warm-up, load, or drain; ``end_ns``: when the last request is due after ``t0_ns``, 0 where that is not known."""
    if now_ns - t0_ns < warmup_ns:
        return "warm-up"
    return "drain" if end_ns and now_ns > t0_ns + end_ns else "load"
