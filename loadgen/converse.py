"""Which turn of which conversation is due when, and what becomes of those that never will be. No clock, no sockets."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from gapmeter.loadgen.plan import Plan


@dataclass(frozen=True, slots=True)
class Abandoned:
    """Turns that are not asked because the one before them failed, and when the next of them would have been due."""

    turns: range
    due_ns: int


class Conversations:
    """The turns that are due, the next one first: first turns by the plan, others a think time after an answer's end.

    Times are CLOCK_MONOTONIC ns. ``beyond_end`` counts turns that would have been due after the plan's end.
    """

    def __init__(self, plan: Plan, t0_ns: int) -> None:
        self._plan = plan
        self._end_ns = t0_ns + plan.end_ns if plan.end_ns else None
        first = np.flatnonzero(plan.turns == 1)
        self._waiting = [(t0_ns + int(plan.due_ns[i]), int(i)) for i in first]
        heapq.heapify(self._waiting)
        self._talking: set[int] = set()  # turns without an answer yet that others follow
        self.beyond_end = 0

    @property
    def next_ns(self) -> int | None:
        """When something is due next; the plan's end while only answers are awaited; None when all is over."""
        if self._waiting:
            return self._waiting[0][0]
        return self._end_ns if self._talking else None

    def awaits_answers(self) -> bool:
        """Whether nothing is due, but answers may bring more."""
        return not self._waiting and bool(self._talking)

    def take(self, now_ns: int) -> tuple[int, int] | None:
        """The next turn and its due time, if it is due by now."""
        if not self._waiting or self._waiting[0][0] > now_ns:
            return None
        due_ns, index = heapq.heappop(self._waiting)
        if self._plan.follower(index) is not None:
            self._talking.add(index)
        return index, due_ns

    def answered(self, index: int, end_ns: int, *, ok: bool) -> Abandoned | None:
        """A turn's fate is known; returns what it takes along when it failed."""
        following = self._plan.follower(index)
        if index not in self._talking or following is None:
            return None
        self._talking.discard(index)
        due_ns = end_ns + self._plan.pause_ns(index)
        if self._end_ns is not None and due_ns >= self._end_ns:
            self.beyond_end += self._plan.left(following)
        elif ok:
            heapq.heappush(self._waiting, (due_ns, following))
        else:
            return Abandoned(range(following, following + self._plan.left(following)), due_ns)
        return None

    def close(self) -> None:
        """Nothing more is asked: what is not answered yet ends its conversation."""
        for index in self._talking:
            self.beyond_end += self._plan.left(index + 1)
        self._talking.clear()
