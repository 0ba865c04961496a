"""One load: a plan issued against a target that is up, until it has been answered or is ended early."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from typing import Any

from gapmeter import errors
from gapmeter.console.elsewhere import WorkersFollower
from gapmeter.console.locust_page import Page
from gapmeter.console.watch import Watch
from gapmeter.errors import UserError
from gapmeter.loadgen.cluster import make_cluster, report_path
from gapmeter.loadgen.fleet import Fleet, NotStarted, Unreachable, make_fleet
from gapmeter.loadgen.plan import Plan
from gapmeter.options import Options, silent, tell
from gapmeter.records import RunFolder
from gapmeter.scenarios import Scenario
from gapmeter.servers.launch import ServerProcess
from gapmeter.study.account import INTERRUPTED
from gapmeter.study.held import Held
from gapmeter.study.locustfile import ended_ns, own_users
from gapmeter.study.placement import Placement
from gapmeter.study.serve import Target
from gapmeter.study.stopping import Stop, Stopping, StopWhen

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
            plan, target.url, options.api_key, requests, cores, load.processes, generator=load.generator, locustfile=own
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
    held = Held(fleet.processes)

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
    manifest["plan"]["shortened"] = {"at_ns": time.monotonic_ns(), "in_flight": "aborted"}
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
