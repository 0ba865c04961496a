"""A device with a clock of its own, in virtual time: what the probes see of torch, and what the device really did.

Streams are queues: work begins when what was put on its stream before is over, and no sooner than it was launched. The
host's time passes only where it is spent: a call costs what it costs, waiting ends with what was waited for. Nothing
here sleeps, so a minute of a server takes a moment, and every figure can be compared with the truth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

LAUNCH_NS = 4_000  # the host's part of putting a kernel onto a stream
EVENT_NS = 1_500
QUERY_NS = 1_000
LATENCY_NS = 3_000  # until an idle device begins with what was launched
REALTIME_NS = 1_700_000_000_000_000_000  # how far the profiler's clock is ahead of the host's


class HostClock:
    """The time of the thread that runs, ns; threads have their own, and meet where one waits for the other."""

    def __init__(self) -> None:
        self.ns = 1_000_000_000_000

    def now(self) -> int:
        return self.ns

    def spend(self, ns: float) -> None:
        self.ns += round(ns)

    def wait_until(self, ns: int) -> None:
        self.ns = max(self.ns, ns)

    @contextmanager
    def at(self, ns: int) -> Iterator[None]:
        """Another thread does something at ``ns``; this one goes on where it was."""
        here, self.ns = self.ns, ns
        yield
        self.ns = here


@dataclass(frozen=True, slots=True)
class Work:
    """What the device did from ``start`` to ``end`` in the host's time: a kernel, a copy, a whole graph."""

    name: str
    start: int
    end: int


@dataclass(slots=True)
class Faults:
    """What goes wrong: what a query costs at the host's time, and whether it fails."""

    query_ns: Callable[[int], int] = lambda at: QUERY_NS
    fails: Callable[[int], bool] = lambda at: False


@dataclass(eq=False, slots=True)
class Stream:
    name: str
    free_ns: int = 0  # when all that is on it will be done

    def wait_stream(self, other: Stream) -> None:
        self.free_ns = max(self.free_ns, other.free_ns)


class Event:
    """Happens when what its stream held at the time of recording is done."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.happens = -1

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self._device.current
        self.happens = max(self._device.clock.ns + LATENCY_NS, stream.free_ns)
        self._device.clock.spend(EVENT_NS)

    def query(self) -> bool:
        device = self._device
        device.queries += 1
        device.clock.spend(device.faults.query_ns(device.clock.ns))
        if device.faults.fails(device.clock.ns):
            raise RuntimeError("CUDA error: unspecified launch failure")
        return device.clock.ns >= self.happens

    def synchronize(self) -> None:
        self._device.clock.wait_until(self.happens)

    def elapsed_time(self, later: Event) -> float:
        """Milliseconds between two events, as a float of 32 bits: that is what the driver returns."""
        device = self._device
        assert min(self.happens, later.happens) >= 0, "an event that was not recorded"
        assert device.clock.ns >= max(self.happens, later.happens), "CUDA refuses to time events that have not happened"
        return float(np.float32((device.own_ns(later.happens) - device.own_ns(self.happens)) / 1e6))


class Device:
    """One GPU. ``drift_ppm``: by how much its clock runs faster than the host's; ``wobble_us``: and sways by, a minute.

    ``work`` and ``kernels`` are the truth: a graph is one piece of work, and many kernels.
    """

    def __init__(self, clock: HostClock, *, drift_ppm: float = 0.0, wobble_us: float = 0.0) -> None:
        self.clock = clock
        self.faults = Faults()
        self.work: list[Work] = []
        self.kernels: list[Work] = []
        self.queries = 0
        self.main, self.copies = Stream("main"), Stream("copies")
        self.current = self.main
        self._origin, self._drift, self._wobble = clock.ns, drift_ppm * 1e-6, wobble_us * 1e3
        self.torch = SimpleNamespace(
            cuda=SimpleNamespace(
                Event=self._event,
                Stream=lambda: Stream("idle"),
                current_device=lambda: 0,
                set_device=lambda number: None,
            ),
            autograd=SimpleNamespace(
                profiler=SimpleNamespace(profile=lambda **_: Profile(self)), DeviceType=SimpleNamespace(CUDA="cuda")
            ),
        )

    def own_ns(self, at: int) -> float:
        """What the device's clock shows at the host's time ``at``."""
        since = at - self._origin
        return 7e12 + since * (1 + self._drift) + self._wobble * math.sin(2 * math.pi * since / 60e9)

    def _event(self, *, enable_timing: bool) -> Event:
        assert enable_timing
        return Event(self)

    def launch(self, name: str, ns: int, stream: Stream | None = None, host_ns: int = LAUNCH_NS) -> Work:
        """One kernel or copy."""
        return self.replay(name, [ns], 0, stream, host_ns)

    def replay(
        self, name: str, kernels: Sequence[int], pause_ns: int, stream: Stream | None = None, host_ns: int = LAUNCH_NS
    ) -> Work:
        """A graph of kernels one after another, launched by one call."""
        stream = stream or self.current
        self.clock.spend(host_ns)
        start = at = max(self.clock.ns + LATENCY_NS, stream.free_ns)
        for ns in kernels:
            self.kernels.append(Work(name, at, at + ns))
            at += ns + pause_ns
        stream.free_ns = at - pause_ns
        self.work.append(Work(name, start, stream.free_ns))
        return self.work[-1]


@dataclass
class Profile:
    """What the profiler saw between its start and its end."""

    device: Device
    since: int = 0
    until: int = 0
    kineto_results: Any = field(default_factory=SimpleNamespace)

    def __enter__(self) -> Profile:
        self.since = self.device.clock.ns
        return self

    def __exit__(self, *_: object) -> None:
        self.until = self.device.clock.ns
        found = [
            Activity(k) for k in self.device.kernels if k.end > self.since and k.start < self.until
        ]  # it does not wait: kernels that it met half-way are in it
        self.kineto_results.events = lambda: found


@dataclass
class Activity:
    """A kernel as the profiler tells of it, on its own clock."""

    work: Work

    def device_type(self) -> str:
        return "cuda"

    def is_user_annotation(self) -> bool:
        return False

    def name(self) -> str:
        return "Memcpy DtoH (Device -> Pinned)" if "copy" in self.work.name else self.work.name

    def start_ns(self) -> int:
        return self.work.start + REALTIME_NS

    def duration_ns(self) -> int:
        return self.work.end - self.work.start
