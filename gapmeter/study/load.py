"""One load: a plan issued against a target that is up, until it has been answered or is ended early.

And what a server that serves several loads recorded and logged of one of them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gapmeter import errors
from gapmeter.analysis.results.manifest import Placement, Shortened
from gapmeter.errors import UserError
from gapmeter.keys import Keys
from gapmeter.loadgen.fleet import Fleet, FrozenProcesses, NotStarted, Unreachable, make_cluster, make_fleet
from gapmeter.loadgen.generator import Locustfile
from gapmeter.loadgen.plan import Plan
from gapmeter.options import Options, tell
from gapmeter.progress import Watch
from gapmeter.records import RunFolder
from gapmeter.records.excerpt import Growing
from gapmeter.records.follow import RecordTail, follow_run
from gapmeter.records.process import text_of
from gapmeter.records.request import ISSUED, RequestRecord
from gapmeter.runs.lock import is_asked_to_stop
from gapmeter.scenarios.model import Scenario
from gapmeter.scenarios.plain_file import is_plain
from gapmeter.servers.launch import ServerProcess
from gapmeter.study.conclusion import STOPPED
from gapmeter.study.patience import Patience
from gapmeter.study.target import Target

_CHECK_EVERY_S = 0.25
_SETTLE_S = 0.3  # the server's last stamps of a request come after the client has its last byte
_LOOK_S = 0.05

# Whether enough is known for a load to end now; what is in flight is given up. It gets (code, record) of all that the
# generators have written so far: gapmeter.records.request.ISSUED when a request left, FINISHED when it ended. The list
# is the same every time and only grows: remember how far you have read.
StopWhen = Callable[[Sequence[tuple[int, RequestRecord]]], bool]


@dataclass(frozen=True, slots=True)
class Load:
    """A plan, the target that it is issued against (``process``: where that is ours), and the folder for the records.

    ``stop_when`` is asked about four times a second whether it is to end early.
    """

    scenario: Scenario
    plan: Plan
    target: Target
    process: ServerProcess | None
    placement: Placement
    folder: RunFolder
    options: Options
    stop_when: StopWhen | None = None

    def run(self, on_start: Callable[[int], None]) -> tuple[str | None, Shortened | None]:
        """Issue the plan and wait for the answers; ``on_start`` gets the time that the plan counts from.

        Returns why it broke off, and where it ended early because enough was known, None for each that did not happen.
        Raises UserError when the target takes no connections or the load cannot begin, KeyboardInterrupt for a second
        Ctrl-C.
        """
        try:
            with self._generators() as fleet:
                t0_ns = fleet.start()
                on_start(t0_ns)
                return self._await_end(fleet, t0_ns)
        except Unreachable as error:
            died = self.process.failure() if self.process else None
            text = str(died or f"{self.target.about.url} does not take connections: {error}")
            raise UserError(text, errors.UNREACHABLE) from error
        except NotStarted as error:
            raise UserError(f"the load could not begin: {error}", errors.NOT_VALID) from error

    def _generators(self) -> contextlib.AbstractContextManager[Fleet]:
        """What issues the plan: processes here, or workers elsewhere."""
        load, options, target, requests = self.scenario.load, self.options, self.target, self.folder.requests
        if options.workers is not None:
            return make_cluster(
                self.plan, target.about.url, requests, options.workers, generator=load.generator, say=options.say
            )
        own = None
        if options.locustfile is not None:
            own = Locustfile(str(options.locustfile.resolve()), target.about.model, target.about.dialect)
        return make_fleet(
            self.plan, target.about.url, options.api_key, requests, self.placement.generator, load.processes,
            generator=load.generator, locustfile=own,
        )  # fmt: skip

    def _early_end(self, t0_ns: int) -> Callable[[Sequence[tuple[int, RequestRecord]], int], int | None] | None:
        """Where the load may end, given what was written by now: requests due until then count. None: it goes on."""
        if (stop_when := self.stop_when) is not None:
            return lambda seen, now_ns: now_ns if stop_when(seen) else None
        if self.scenario.load.may_last_longer:
            return Patience(self.scenario, t0_ns, self.plan.warmup_ns).until_ns
        return None

    def _await_end(self, fleet: Fleet, t0_ns: int) -> tuple[str | None, Shortened | None]:
        """Wait until every generator process has ended, by itself or when asked to. Raises a second Ctrl-C."""
        ended_because: str | None = None
        shortened: Shortened | None = None
        watch = None
        if not self.options.quiet:
            follower = follow_run(self.folder, t0_ns, whole=False)
            watch = Watch(follower, self.scenario, self.plan, t0_ns, as_json=self.options.progress == "json")
        frozen = FrozenProcesses(fleet.processes)
        tails = [RecordTail(path) for path in fleet.record_paths]
        seen: list[tuple[int, RequestRecord]] = []
        early_end = self._early_end(t0_ns)

        def check() -> None:
            nonlocal ended_because, shortened
            if watch is not None:
                watch.update()
            # Without all of its generators or without its server, nothing more is worth measuring.
            died = self.process.failure() if self.process is not None else None
            trouble = frozen.release() or "; ".join(fleet.troubles()) or str(died or "")
            if ended_because is not None:
                return
            if trouble or is_asked_to_stop(self.folder.path):
                ended_because = trouble or STOPPED
                fleet.stop()
            elif early_end is not None and shortened is None:
                as_of_ns = read_on(tails, seen)
                if (until_ns := early_end(seen, as_of_ns)) is not None:
                    # What was due later is not part of the run.
                    shortened = Shortened(at_ns=until_ns, in_flight="aborted")
                    fleet.stop()

        try:
            try:
                fleet.wait(check, _CHECK_EVERY_S)
            except KeyboardInterrupt:
                ended_because = STOPPED
                tell("stopping: what is in flight is recorded as aborted (Ctrl-C again quits at once)")
                fleet.stop()
                fleet.wait(check, _CHECK_EVERY_S)
        finally:
            if watch is not None:
                watch.close()
        if self.options.locustfile and not ended_because:
            shortened = self._cut_by_shape(fleet, t0_ns)
        return ended_because, shortened

    def _cut_by_shape(self, fleet: Fleet, t0_ns: int) -> Shortened | None:
        """Where the locustfile's shape ended before the plan's time did."""
        if time.monotonic_ns() >= t0_ns + self.plan.end_ns:
            return None
        records = (event for path in fleet.record_paths for event in RecordTail(path).poll())
        last_due_ns = max((record.due_ns for code, record in records if code == ISSUED), default=0)
        return Shortened(at_ns=last_due_ns + 1, in_flight="awaited")


def read_on(tails: Sequence[RecordTail], seen: list[tuple[int, RequestRecord]]) -> int:
    """Append to ``seen`` what has been written since; returns a time (ns) by which all that was written is in it."""
    as_of_ns = time.monotonic_ns()
    for tail in tails:
        seen += tail.poll()
    return as_of_ns


class ServerLog:
    """What the server logs from now on, where its log lies in another folder than the load's."""

    def __init__(self, process: ServerProcess | None, folder: RunFolder) -> None:
        self._to = folder.logs / "server.log"
        self._from = process.log_path if process is not None and process.log_path != self._to else None
        self._since = self._from.stat().st_size if self._from is not None else 0

    def take(self, keys: Keys) -> None:
        """Into the load's folder, without keys."""
        if self._from is not None:
            with self._from.open("rb") as source:
                source.seek(self._since)
                self._to.write_bytes(keys.out_of_bytes(source.read()))


class ProbeFolder:
    """Where a server's processes record. ``begin`` marks a load's start, ``take`` copies what came since."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[str, Growing] = {}

    def begin(self) -> None:
        """A load begins."""
        for file in self._all():
            file.begin()

    def recording(self) -> tuple[int, ...]:
        """The local processes that record here now: ids in the files' names, of processes that have the file mapped."""
        named = [(path.name.split("-")[1:2], path) for path in (file.path for file in self._all())]
        known = [(pid[0], str(path.resolve())) for pid, path in named if pid and pid[0].isdigit()]
        return tuple(sorted({int(pid) for pid, path in known if path in text_of(f"/proc/{pid}/maps")}))

    def settle(self, patience_s: float) -> bool:
        """Wait until no step has been recorded for a moment; False when there still are some at the end."""
        end = time.monotonic() + patience_s
        since, steps = time.monotonic(), self._steps()
        while (now := time.monotonic()) < end:
            if now - since >= _SETTLE_S:
                return True
            time.sleep(_LOOK_S)
            if (count := self._steps()) != steps:
                since, steps = time.monotonic(), count
        return False

    def take(self, folder: RunFolder, *, complete: bool, all_files: bool) -> int:
        """Copy what came since ``begin`` into a run's folder; how many files that was.

        ``complete``: their processes live and have nothing of this load left to write. ``all_files``: also of a process
        that recorded nothing meanwhile, for what it said of itself. Raises OSError.
        """
        taken = 0
        for file in self._all():
            file.advance()
            if file.is_record and (all_files or file.grew()):
                file.cut(folder.probe / file.path.name, complete=complete)
                taken += 1
        return taken

    def _all(self) -> list[Growing]:
        for path in sorted(self.path.glob("*.gap")):
            if path.name not in self._files and is_plain(path):  # a pipe would never be read to its end
                self._files[path.name] = Growing(path)
        return list(self._files.values())

    def _steps(self) -> int:
        for file in self._all():
            file.advance()
        return sum(file.steps for file in self._files.values())
