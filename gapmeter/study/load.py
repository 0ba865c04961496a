"""One load: a plan issued against a target that is up, until it has been answered or is ended early."""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

from gapmeter import errors
from gapmeter.errors import UserError
from gapmeter.loadgen.cluster import make_cluster, report_path
from gapmeter.loadgen.fleet import Fleet, NotStarted, Unreachable, make_fleet
from gapmeter.loadgen.plan import Plan
from gapmeter.machine.hardware import Placement
from gapmeter.options import Options, silent, tell
from gapmeter.progress import Watch
from gapmeter.records import RunFolder
from gapmeter.records.follow import WorkersFollower
from gapmeter.records.tail import RecordTail
from gapmeter.records.wire import ISSUED, WireRecord
from gapmeter.scenarios import Scenario
from gapmeter.servers.launch import ServerProcess
from gapmeter.study.companions import Page
from gapmeter.study.conclusion import INTERRUPTED
from gapmeter.study.target import Target

_LOOK_EVERY_S = 0.25
_CLOCKS_NS = 1_000_000  # between the readings of two clocks


def issue(
    scenario: Scenario, plan: Plan, target: Target, process: ServerProcess | None, placement: Placement,
    folder: RunFolder, manifest: dict[str, Any], options: Options, stop_when: StopWhen | None = None,
) -> None:  # fmt: skip
    """Issue the plan and wait for the answers; the manifest says how that ended.

    Raises UserError when the target takes no connections, or the load cannot begin.
    """
    slept_ns = _slept_ns()
    try:
        with _generators(scenario, plan, target, placement, folder, options) as fleet:
            manifest["plan"]["t0_ns"] = t0_ns = fleet.start()
            manifest["started_s"] = time.time()
            folder.write_json(folder.manifest, manifest)
            if options.page is not None:
                options.page.show(folder.path, scenario.name, target.url)
            progress = None if options.quiet else _progress(fleet, scenario, plan, t0_ns, folder, options)
            stopping = Stopping(fleet.record_paths, stop_when) if stop_when is not None else None
            _watch(fleet, process, progress, stopping, manifest, options.page)
            if options.locustfile and "ended_because" not in manifest and time.monotonic_ns() < t0_ns + plan.end_ns:
                manifest["plan"]["shortened"] = {"at_ns": ended_ns(fleet.record_paths) + 1, "in_flight": "awaited"}
    except Unreachable as error:
        died = process.failure() if process else None
        said = str(died or f"{target.url} does not take connections: {error}")
        raise UserError(said, errors.UNREACHABLE) from error
    except NotStarted as error:
        raise UserError(f"the load could not begin: {error}", errors.NOT_VALID) from error
    finally:
        _note_workers(folder, manifest)
        manifest["suspended_ns"] = slept if (slept := _slept_ns() - slept_ns) > _CLOCKS_NS else 0
    manifest["status"] = "incomplete" if "ended_because" in manifest else "complete"


def _slept_ns() -> int:
    """How long the machine was suspended since it was started: one of the clocks goes on meanwhile."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns()


def _progress(
    fleet: Fleet, scenario: Scenario, plan: Plan, t0_ns: int, folder: RunFolder, options: Options
) -> Watch:  # fmt: skip
    """From the record files; those of workers elsewhere come at the end, until then their histograms are known."""
    follower = WorkersFollower(report_path(folder.requests), t0_ns) if options.workers is not None else None
    as_json = options.progress == "json"
    return Watch(fleet.record_paths, scenario, plan, t0_ns, as_json=as_json, follower=follower)


def _generators(
    scenario: Scenario, plan: Plan, target: Target, placement: Placement, folder: RunFolder, options: Options
) -> contextlib.AbstractContextManager[Fleet]:
    """What issues the plan: processes here, or workers elsewhere."""
    load, requests = scenario.load, folder.requests
    if options.workers is None:
        cores, own = placement.generator, own_users(options.locustfile, target.model, target.dialect)
        return make_fleet(
            plan, target.url, options.api_key, requests, cores, load.processes, generator=load.generator, own=own
        )
    say = silent if options.quiet else tell
    return make_cluster(plan, target.url, requests, options.workers, generator=load.generator, say=say)


def _note_workers(folder: RunFolder, manifest: dict[str, Any]) -> None:
    """What the master knows of each worker, if there was one; what they stamped is on their own clocks."""
    path = report_path(folder.requests)
    if path.exists():
        manifest["workers"] = told = json.loads(path.read_text())
        offsets = {str(worker["worker"]): worker["clock_offset_ns"] for worker in told["workers"]}
        manifest["plan"]["clock_offsets_ns"] = offsets


def _watch(
    fleet: Fleet, process: ServerProcess | None, progress: Watch | None, stopping: Stopping | None,
    manifest: dict[str, Any], page: Page | None,
) -> None:  # fmt: skip
    """Show progress until the load has ended; note why, if it ended early."""
    held = StoppedProcesses(fleet.processes)

    def look() -> None:
        if progress is not None:
            progress.update()
        if trouble := held.look() or "; ".join(fleet.troubles()):  # without it all, nothing more is worth measuring
            if "ended_because" not in manifest:
                fleet.stop()
            manifest.setdefault("ended_because", trouble)
        if process is not None and "ended_because" not in manifest and (failure := process.failure()):
            manifest["ended_because"] = str(failure)
            fleet.stop()
        if stopping is not None and "ended_because" not in manifest:
            _shorten(fleet, stopping.look(), manifest)
        if page is not None and page.asked_to_stop() and "ended_because" not in manifest:
            manifest["ended_because"] = INTERRUPTED
            fleet.stop()

    try:
        _wait(fleet, look, manifest)
    finally:
        if progress is not None:
            progress.close()


def _shorten(fleet: Fleet, stop: Stop, manifest: dict[str, Any]) -> None:
    """End the load because enough is known; what was due later is not part of the run."""
    if stop is Stop.GO_ON or "t0_ns" not in manifest["plan"]:
        return
    manifest["plan"]["shortened"] = {
        "at_ns": time.monotonic_ns(),
        "in_flight": "awaited" if stop is Stop.AWAIT else "aborted",
    }
    if stop is Stop.AWAIT:
        fleet.finish_early()
    else:
        fleet.stop()


def _wait(fleet: Fleet, look: Callable[[], None], manifest: dict[str, Any]) -> None:
    """Until every generator process has ended: by itself, or asked to by Ctrl-C. A second Ctrl-C is raised."""
    try:
        fleet.wait(look, _LOOK_EVERY_S)
    except KeyboardInterrupt:
        manifest["ended_because"] = INTERRUPTED
        tell("stopping: what is in flight is recorded as aborted (Ctrl-C again leaves at once)")
        fleet.stop()
        fleet.wait(look, _LOOK_EVERY_S)


class Stop(IntEnum):
    """Whether a load ends now, and what becomes of what is in flight. True means AWAIT, False GO_ON."""

    GO_ON = 0
    AWAIT = 1  # nothing more is issued; what is in flight is awaited
    ABORT = 2  # nothing more is issued; what is in flight is given up


# Given (code, record) of all that the generators have written so far: gapmeter.records.wire.ISSUED when a request left,
# FINISHED when it ended. It is the same list every time, longer: remember how far you have read.
StopWhen = Callable[[Sequence[tuple[int, WireRecord]]], Stop | bool]


class Stopping:
    """Asks ``when`` each time ``look`` is called, until it has said that the load is to end."""

    def __init__(self, paths: Sequence[Path], when: StopWhen) -> None:
        self._tails = [RecordTail(path) for path in paths]
        self._when = when
        self._seen: list[tuple[int, WireRecord]] = []
        self._said = Stop.GO_ON

    def look(self) -> Stop:
        """What was decided just now; GO_ON ever after."""
        if self._said is not Stop.GO_ON:
            return Stop.GO_ON
        for tail in self._tails:
            self._seen.extend(tail.poll())
        self._said = Stop(self._when(self._seen))
        return self._said


_LONGEST_NS = 5_000_000_000


class StoppedProcesses:
    """TrialMonitor at processes again and again. One that was stopped (SIGSTOP) for five seconds is made to go on."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        self._processes = processes
        self._since: dict[int, int] = {}

    def look(self) -> str:
        """A sentence on those that are held for too long by now; "" for none."""
        now, found = time.monotonic_ns(), []
        for number, process in enumerate(self._processes):
            if process.poll() is not None or not _is_stopped(process.pid):
                self._since.pop(number, None)
            elif now - self._since.setdefault(number, now) > _LONGEST_NS:
                process.send_signal(signal.SIGCONT)  # else it could not be told to leave
                found.append(f"generator process {number} was held (SIGSTOP) for {_LONGEST_NS // 10**9} s")
        return "; ".join(found)


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False


_CLOSED = (
    "write --set load.arrivals=closed --set load.rate=null --set load.concurrency=8 (the number of users, unless a "
    "shape in the file says it)"
)


def checked(path: Path | None, scenario: Scenario, workers: int) -> Path | None:
    """The file, absolute; None for none. Raises UserError where it cannot be used with this scenario."""
    if path is None:
        return None
    if not path.is_file():
        raise UserError(f"--locustfile {path}: there is no such file", errors.USAGE)
    load = scenario.load
    if load.loop != "closed":
        raise UserError(
            f"--locustfile: its users wait for answers, {scenario.name} is an open loop; {_CLOSED}", errors.USAGE
        )
    if load.duration_ns is None:
        raise UserError(
            "--locustfile: how many requests there will be is its users' affair; write a time: --set "
            "load.requests=null --set load.duration=60s",
            errors.USAGE,
        )
    if workers or load.processes > 1:
        raise UserError(
            "--locustfile: its users live in one process; leave out --workers and load.processes", errors.USAGE
        )
    return path.resolve()


def own_users(path: Path | None, model: str, dialect: str) -> dict[str, str] | None:
    """What the generator process is told of it."""
    return None if path is None else {"path": str(path), "model": model, "dialect": dialect}


def ended_ns(records: Iterable[Path]) -> int:
    """When the last request was due; a shape may end before the plan's time does. CLOCK_MONOTONIC."""
    dues = [record.due_ns for path in records for code, record in RecordTail(path).poll() if code == ISSUED]
    return max(dues, default=0)


def note_locustfile(manifest: dict[str, Any], path: Path | None) -> dict[str, Any]:
    """The manifest with what the file was; lengths are not enforced, since the file says them."""
    if path is not None:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        manifest["plan"] |= {"output_enforced": False, "locustfile": {"name": path.name, "sha256": digest}}
    return manifest
