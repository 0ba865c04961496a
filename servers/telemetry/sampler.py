"""The sampler process: sources in lanes, each lane a thread on absolute deadlines of CLOCK_MONOTONIC.

``-m gapmeter.servers.telemetry.sampler SETTINGS`` (JSON) prints ``ready`` once it samples, and leaves when its standard
input closes, that is also when its parent is killed. It never hurries to catch up: deadlines that have passed (it was
stopped, or got no core) are written down as missed, and the next one is kept.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from gapmeter.records.process import API_KEY
from gapmeter.servers.telemetry import Absent, Journal, ReadFailed, Source
from gapmeter.servers.telemetry.gpu import PCIE_READINGS, READINGS, open_gpus
from gapmeter.servers.telemetry.sources import CpuLimits, EngineMetrics, Processes, Rapl, Schedstat
from gapmeter.servers.telemetry.switches import Switches, open_switches

_NICE = 10
_PCIE_EVERY_NS = 1_000_000_000
_IDLE_S = 2.0  # of the server before its load, where an energy counter can tell what that costs
_DEVICES = ("gpu", "pcie", "rapl")


@dataclass(frozen=True, slots=True)
class SamplerSettings:
    """What a sampler does. ``hz``: of everything but /metrics, which is asked every ``metrics_every_ns`` (0: never).

    ``pids``: the roots of the server's process trees; ``beside``: of the load tester's own, whose use of the cores is
    watched too; ``cores``: where to run (empty: anywhere).
    """

    folder: str
    hz: float
    metrics_every_ns: int
    url: str
    server_here: bool
    pids: Sequence[int]
    beside: Sequence[int]
    cores: Sequence[int]

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class Lane:
    """Sources that are read one after the other at each deadline."""

    name: str
    every_ns: int
    sources: list[Source] = field(default_factory=list)


def main(arguments: Sequence[str]) -> int:
    """Sample until standard input closes."""
    settings = SamplerSettings(**json.loads(arguments[0]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the run's; it ends us when its answers are in
    if settings.cores:
        os.sched_setaffinity(0, settings.cores)
    os.nice(_NICE)  # the session keeps its weight: with less, a program that never sleeps starves it
    journal = Journal(Path(settings.folder))
    lanes = open_lanes(settings, journal)
    about = {"pid": os.getpid(), "hz": settings.hz, "metrics_every_ns": settings.metrics_every_ns, "nice": os.nice(0)}
    sources = {source.name: {"every_ns": lane.every_ns, **source.about} for lane in lanes for source in lane.sources}
    cores = sorted(os.sched_getaffinity(0))
    journal.note("start", **about, cores=cores, cpu_ns=time.process_time_ns(), sources=sources)
    over = threading.Event()
    threads = [threading.Thread(target=sample, args=(lane, journal, over), daemon=True) for lane in lanes]
    for thread in threads:
        thread.start()
    over.wait(_IDLE_S if {"rapl", "gpu"} & sources.keys() else 0)
    with contextlib.suppress(BrokenPipeError):
        print("ready", flush=True)
    ended = threading.Event()

    def listen() -> None:
        sys.stdin.buffer.read()
        ended.set()

    threading.Thread(target=listen, daemon=True).start()
    while not ended.wait(1.0):  # what sampling costs is written down meanwhile, for a killed run
        journal.note("alive", cpu_ns=time.process_time_ns(), lines=journal.lines, dropped=journal.dropped)
    over.set()
    for thread in threads:
        thread.join(1.0)
    for source in (source for lane in lanes for source in lane.sources if isinstance(source, Switches)):
        try:
            journal.write(source.name, source.read(), time.monotonic_ns())  # what came since its last look
        except Absent as absent:
            journal.note("absent", source=source.name, why=str(absent))
    journal.note("end", cpu_ns=time.process_time_ns(), lines=journal.lines, dropped=journal.dropped)
    return 0


def open_lanes(settings: SamplerSettings, journal: Journal) -> list[Lane]:
    """What can be sampled here; what can not is written down once, with its reason."""
    every_ns = round(1e9 / settings.hz)
    fast = Lane("fast", every_ns)
    pcie = Lane("pcie", max(_PCIE_EVERY_NS, every_ns))
    engine = Lane("engine", max(settings.metrics_every_ns, 1))
    named = os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER")
    openers: list[tuple[Lane, str, Callable[[], Source]]] = [
        (fast, "gpu", lambda: open_gpus(*named, "gpu", READINGS)),
        (pcie, "pcie", lambda: open_gpus(*named, "pcie", PCIE_READINGS)),
        (fast, "rapl", Rapl),
        (fast, "processes", lambda: Processes(settings.pids)),
        (fast, "limits", lambda: CpuLimits(settings.pids)),
        (fast, "switches", lambda: open_switches(Path(settings.folder), settings.pids, settings.beside)),
    ]
    for lane, name, open_source in openers:
        try:
            if name in _DEVICES and not settings.server_here:
                raise Absent("the server is on another machine, and the devices of this one are not its own")
            lane.sources.append(open_source())
        except Absent as absent:
            journal.note("absent", source=name, why=str(absent))
            if name == "switches":
                openers.append((fast, "schedstat", lambda: Schedstat(settings.pids)))
    if settings.metrics_every_ns:
        engine.sources.append(EngineMetrics(settings.url, os.environ.get(API_KEY)))
    else:
        journal.note("absent", source="engine", why="telemetry.metrics_every is 0")
    return [lane for lane in (fast, pcie, engine) if lane.sources]


def sample(lane: Lane, journal: Journal, over: threading.Event) -> None:
    """Read the lane's sources at every deadline until ``over``; a source that turns out absent is left out."""
    due_ns = time.monotonic_ns()
    while lane.sources and not over.wait(max(0.0, (due_ns - time.monotonic_ns()) / 1e9)):
        missed = (time.monotonic_ns() - due_ns) // lane.every_ns
        if missed > 0:
            names, since_ns = [source.name for source in lane.sources], due_ns
            due_ns += missed * lane.every_ns
            journal.note("missed", lane=lane.name, sources=names, count=missed, since_ns=since_ns, until_ns=due_ns)
        for source in tuple(lane.sources):
            at_ns = time.monotonic_ns()
            try:
                journal.write(source.name, source.read(), at_ns)
            except ReadFailed as failed:
                journal.note("failed", source=source.name, why=str(failed))
            except Absent as absent:
                journal.note("absent", source=source.name, why=str(absent))
                lane.sources.remove(source)
        due_ns += lane.every_ns


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
