"""A worker's share of the plan, issued by a generator process of its own. Runs in a thread; knows nothing of gevent."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from pathlib import Path

from gapmeter.loadgen.fleet import Fleet, NotStarted, Unreachable, make_fleet
from gapmeter.loadgen.locust.tally import Tally
from gapmeter.loadgen.plan import Plan
from gapmeter.records.tail import RecordTail

_LOOK_EVERY_S = 0.5


class Shard:
    """Ready, then begun once and for all, then over.

    ``failed`` says why it could not begin, ``troubles`` what went wrong later.
    """

    def __init__(self, plan: Plan, url: str, api_key: str | None, folder: Path, cores: Sequence[int], by: str) -> None:
        self.plan, self.tally = plan, Tally()
        self.record = folder / "worker-0.gap"
        self.ready, self.over = threading.Event(), threading.Event()
        self.failed, self.troubles = "", list[str]()
        self._told: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._fleet: Fleet | None = None
        self._begun = self._stopped = False
        self._thread = threading.Thread(target=self._run, args=(url, api_key, folder, cores, by), daemon=True)
        self._thread.start()

    def begin(self, t0_ns: int) -> bool:
        """Issue from then on (this machine's clock); False, and nothing happens, when it has begun before."""
        begun, self._begun = self._begun, True
        if not begun:
            self._told.put(t0_ns)
        return not begun

    def stop(self) -> None:
        """End early; what is in flight is recorded as aborted."""
        self._stopped = True
        if not self._begun:
            self._begun = True
            self._told.put(None)
        if self._fleet is not None:
            self._fleet.stop()

    def _run(self, url: str, api_key: str | None, folder: Path, cores: Sequence[int], by: str) -> None:
        try:
            with make_fleet(self.plan, url, api_key, folder, cores, 1, generator=by) as fleet:
                self._fleet = fleet
                self.ready.set()
                t0_ns = self._told.get()
                if t0_ns is not None:
                    self._issue(fleet, t0_ns)
        except (Unreachable, NotStarted, OSError) as error:
            self.failed = str(error)
        finally:
            self.over.set()

    def _issue(self, fleet: Fleet, t0_ns: int) -> None:
        tail = RecordTail(fleet.record_paths[0])
        fleet.start(t0_ns)
        fleet.wait(lambda: self.tally.take(tail.poll()), _LOOK_EVERY_S)
        self.troubles = fleet.troubles()
