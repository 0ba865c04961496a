"""A worker's slice of the plan, issued by a generator process of its own. Runs in a thread; knows nothing of gevent."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from pathlib import Path

from gapmeter.loadgen.fleet import Fleet, NotStarted, Unreachable, make_fleet
from gapmeter.loadgen.locust.totals import Totals
from gapmeter.loadgen.plan import Plan
from gapmeter.records.tail import RecordTail

_TOTALS_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class Call:
    """Where the master is, and what this worker may use."""

    host: str
    port: int
    cores: tuple[int, ...]
    api_key: str | None


class SliceRun:
    """First ``ready``, then begun once and for all, then ``over``.

    ``failed`` says why it could not begin or go on, ``troubles`` what went wrong in its generator process.
    """

    def __init__(self, plan: Plan, url: str, generator: str, call: Call, folder: Path) -> None:
        self.totals = Totals()
        self.records = folder / "worker-0.gap"
        self.ready, self.over = threading.Event(), threading.Event()
        self.failed, self.troubles = "", list[str]()
        self._starts: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._fleet: Fleet | None = None
        self._begun = False
        threading.Thread(target=self._run, args=(plan, url, generator, call, folder), daemon=True).start()

    def begin(self, t0_ns: int | None) -> bool:
        """Issue from then on (this machine's clock); None: never. False if it has begun already."""
        if self._begun:
            return False
        self._begun = True
        self._starts.put(t0_ns)
        return True

    def stop(self) -> None:
        """End early; what is in flight is recorded as aborted."""
        self.begin(None)
        if self._fleet is not None:
            self._fleet.stop()

    def _run(self, plan: Plan, url: str, generator: str, call: Call, folder: Path) -> None:
        try:
            with make_fleet(plan, url, call.api_key, folder, call.cores, 1, generator=generator) as fleet:
                self._fleet = fleet
                self.ready.set()
                if (t0_ns := self._starts.get()) is not None:
                    tail = RecordTail(fleet.record_paths[0])
                    fleet.start(t0_ns)
                    fleet.wait(lambda: self.totals.take(tail.poll()), _TOTALS_EVERY_S)
                    self.troubles = fleet.troubles()
        except (Unreachable, NotStarted, OSError) as error:
            self.failed = str(error)
        finally:
            self.over.set()
