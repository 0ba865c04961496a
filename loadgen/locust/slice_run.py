"""A worker's slice of the plan: issued by a generator process of its own, followed in its records meanwhile.

Runs in a thread; knows nothing of gevent.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from hdrh.histogram import HdrHistogram
from pydantic import AfterValidator

from gapmeter.loadgen.fleet import Fleet, FrozenProcesses, NotStarted, Unreachable, make_fleet
from gapmeter.loadgen.plan import Plan
from gapmeter.records.follow import RecordFollower, count_in, new_histograms

_FOLLOW_EVERY_S = 0.5


def _decodable(encoded: dict[str, str]) -> dict[str, str]:
    """What was given, if each is a histogram of a metric that a worker tells of. Raises ValueError."""
    total = new_histograms()
    for name, text in encoded.items():
        try:
            total[name].decode_and_add(text)
        except Exception as error:  # whatever decoding raises
            raise ValueError(f"{name[:40]!r} is no histogram") from error
    return encoded


@dataclass(frozen=True, slots=True)
class Report:
    """What a worker has seen so far. Cumulative: a report that is lost costs nothing, the next holds it all.

    Each has a higher ``sequence`` than those before it. ``histograms``: encoded, by metric.
    """

    sequence: int = 0
    issued: int = 0
    finished: int = 0
    failed: int = 0
    histograms: Annotated[dict[str, str], AfterValidator(_decodable)] = field(default_factory=dict)


def merged(reports: Iterable[Report]) -> dict[str, HdrHistogram]:
    """Over all workers, in ns, by metric: histograms are added, percentiles never."""
    total = new_histograms()
    for report in reports:
        for name, encoded in report.histograms.items():
            total[name].decode_and_add(encoded)
    return total


@dataclass(frozen=True, slots=True)
class Call:
    """Where the master is, and what this worker may use.

    ``secret`` is shared with the master; ``url``: the one server that gets ``api_key``.
    """

    host: str
    port: int
    cores: tuple[int, ...]
    api_key: str | None
    secret: str = ""
    url: str = ""

    def may_ask(self, url: str) -> bool:
        """Whether the key may be sent there, if there is one."""
        theirs, ours = urlsplit(url), urlsplit(self.url)
        return not self.api_key or (theirs.scheme, theirs.netloc) == (ours.scheme, ours.netloc)


class SliceRun:
    """First ``ready``, then begun once and for all, then ``over``.

    ``failed`` says why it could not begin or go on, ``troubles`` what went wrong in its generator process.
    """

    def __init__(self, plan: Plan, url: str, generator: str, call: Call, folder: Path) -> None:
        self.records = folder / "worker-0.gap"
        self.ready, self.over = threading.Event(), threading.Event()
        self.failed, self.troubles = "", list[str]()
        self._follower = RecordFollower([self.records], 0, whole=True)
        self._histograms = new_histograms()
        self._reports = 0
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

    def report(self) -> Report:
        """What has been seen so far."""
        self._reports += 1
        encoded = {name: histogram.encode().decode() for name, histogram in self._histograms.items()}
        seen = self._follower
        return Report(self._reports, seen.issued, seen.done, seen.failed.total(), encoded)

    def _run(self, plan: Plan, url: str, generator: str, call: Call, folder: Path) -> None:
        try:
            with make_fleet(plan, url, call.api_key, folder, call.cores, 1, generator=generator) as fleet:
                self._fleet = fleet
                self.ready.set()
                if (t0_ns := self._starts.get()) is not None:
                    frozen = FrozenProcesses(fleet.processes)
                    fleet.start(t0_ns)
                    fleet.wait(lambda: self._follow(fleet, frozen), _FOLLOW_EVERY_S)
                    self.troubles += fleet.troubles()
        except (Unreachable, NotStarted, OSError) as error:
            self.failed = str(error)
        finally:
            self.over.set()

    def _follow(self, fleet: Fleet, frozen: FrozenProcesses) -> None:
        if trouble := frozen.release():
            self.troubles.append(trouble)
            fleet.stop()
        for answered in self._follower.poll():
            count_in(self._histograms, answered)
