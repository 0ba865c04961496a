"""Ending a load early because enough is known: a callable looks at what has been recorded so far and says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from pathlib import Path

from gapmeter.records.request import RequestRecord
from gapmeter.records.tail import RecordTail


class Stop(IntEnum):
    """Whether a load ends now. True means ABORT, False GO_ON."""

    GO_ON = 0
    ABORT = 1  # nothing more is issued; what is in flight is given up


# Given (code, record) of all that the generators have written so far: ISSUED (gapmeter.records.request) when a request
# left, FINISHED when it ended. It is the same list every time, longer: remember how far you have read.
StopWhen = Callable[[Sequence[tuple[int, RequestRecord]]], Stop | bool]


class Stopping:
    """Asks ``when`` each time ``look`` is called, until it has said that the load is to end."""

    def __init__(self, paths: Sequence[Path], when: StopWhen) -> None:
        self._tails = [RecordTail(path) for path in paths]
        self._when = when
        self._seen: list[tuple[int, RequestRecord]] = []
        self._said = Stop.GO_ON

    def look(self) -> Stop:
        """What was decided just now; GO_ON ever after."""
        if self._said is not Stop.GO_ON:
            return Stop.GO_ON
        for tail in self._tails:
            self._seen.extend(tail.poll())
        self._said = Stop(self._when(self._seen))
        return self._said
