"""Device time on CUDA: event pairs around the forward, resolved later without waiting, on the host's clock.

An event knows only how long before another it happened. So every few seconds an anchor event is recorded on a stream
of its own, which is idle, and polled at once: the moment it happened lies between two host stamps a few microseconds
apart. A forward's place on the host's clock is the anchor's plus the device's own count since.

Kernel-busy time comes from the profiler (CUPTI) on every Nth step, when ``GAPMETER_PROBE_KERNELS=N`` asks for it; the
steps so sampled are slowed by it, so it is for runs of their own.
"""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Callable
from typing import Any

from gapmeter_probe.hooks import now
from gapmeter_probe.records import Span
from gapmeter_probe.writer import RecordWriter

KERNELS = "GAPMETER_PROBE_KERNELS"
_RENEW_NS = 2_000_000_000
_POLL_NS = 50_000  # how long an anchor may be polled for; a later one is tried next time
_POOL = 64
_CANARY_PRODUCTS = 4


def open_device(writer: RecordWriter, device: str) -> DeviceClock | None:
    """A clock for a CUDA device, None for others."""
    if not device.startswith("cuda"):
        return None
    import torch

    return DeviceClock(writer, torch)


def _guarded(work: Callable[..., Any]) -> Callable[..., bool]:
    """A method of a DeviceClock whose failure ends device timing: False then, and from then on."""

    @functools.wraps(work)
    def guarded(clock: DeviceClock, *args: Any) -> bool:
        if clock.broken:
            return False
        try:
            return bool(work(clock, *args))
        except Exception as error:  # noqa: BLE001 - nothing of ours may raise into the engine
            clock.broken = True
            reason = f"{type(error).__name__}: {error}"
            clock.writer.json({"type": "warning", "what": "device timing ended", "error": reason})
            return False

    return guarded


class DeviceClock:
    """Event pairs of the forwards in flight. A failure ends device timing and is recorded; it never raises."""

    def __init__(self, writer: RecordWriter, torch: Any) -> None:
        self.writer = writer
        self._torch = torch
        self.broken = False
        self._seq = 0
        self._idle = torch.cuda.Stream()
        self._anchor: Any = None
        self._anchor_ns = self._tried_ns = 0
        self._free: list[Any] = []
        # What is on the device: code, seq, start, end, the anchor it is counted from, and that one's host time.
        self._flying: deque[tuple[int, int, Any, Any, Any, int]] = deque()
        self._square: Any = None
        self._start: Any = None
        every = os.environ.get(KERNELS, "0")
        self._kernels_every = int(every) if every.isdigit() else 0
        self._profile: Any = None

    @_guarded
    def begin(self, seq: int) -> None:
        """A step's forward is about to be prepared: resolve what has finished, renew the anchor when it is old."""
        self._seq = seq
        if not self.resolve():
            return
        if now() - self._tried_ns > _RENEW_NS:
            self._renew()
            self._canary()
        if self._kernels_every and seq % self._kernels_every == 0:
            activity = self._torch.profiler.ProfilerActivity.CUDA
            self._profile = self._torch.profiler.profile(activities=[activity])
            self._profile.__enter__()

    @_guarded
    def forward_start(self) -> None:
        self._start = self._event()
        self._start.record()

    @_guarded
    def forward_end(self) -> bool:
        """True when the device's own time of this forward will be recorded."""
        if self._profile is not None:
            self._kernels()
        start, self._start = self._start, None
        if start is None or self._anchor is None:
            return False
        end = self._event()
        end.record()
        self._flying.append((int(Span.FORWARD), self._seq, start, end, self._anchor, self._anchor_ns))
        return True

    def _event(self) -> Any:
        return self._free.pop() if self._free else self._torch.cuda.Event(enable_timing=True)

    def _renew(self) -> None:
        """A new anchor, unless the device takes longer to report it than the poll may last."""
        self._tried_ns = now()
        anchor = self._torch.cuda.Event(enable_timing=True)
        before = now()
        anchor.record(self._idle)
        while not anchor.query():
            if now() - before > _POLL_NS:
                if self._anchor is None:
                    self._tried_ns = 0
                return
        after = now()
        self._anchor, self._anchor_ns = anchor, (before + after) // 2
        self.writer.json({"type": "anchor", "host_ns": self._anchor_ns, "half_width_ns": (after - before) // 2})

    def _canary(self) -> None:
        """A fixed piece of work on the idle stream: how fast the device is just now."""
        if self._anchor is None:
            return
        cuda = self._torch.cuda
        with cuda.stream(self._idle):
            if self._square is None:
                self._square = self._torch.ones(512, 512, device="cuda")
                return  # the first time would measure the making of it
            start, end = self._event(), self._event()
            start.record(self._idle)
            for _ in range(_CANARY_PRODUCTS):
                self._torch.mm(self._square, self._square)
            end.record(self._idle)
        self._flying.append((int(Span.CANARY_DEVICE), 0, start, end, self._anchor, self._anchor_ns))

    @_guarded
    def resolve(self) -> bool:
        """Record what has finished by now; what is still on the device waits for a later call."""
        waiting: deque[tuple[int, int, Any, Any, Any, int]] = deque()
        while self._flying:
            code, seq, start, end, anchor, anchor_ns = entry = self._flying.popleft()
            if not end.query():
                waiting.append(entry)
                continue
            begun = anchor_ns + round(anchor.elapsed_time(start) * 1e6)
            lasted = round(start.elapsed_time(end) * 1e6)
            self.writer.span(code, seq, begun, begun + lasted, 1)
            if len(self._free) < _POOL:
                self._free += (start, end)
        self._flying = waiting
        return True

    def _kernels(self) -> None:
        """How long any kernel ran in this step. Waits for the device: the price of a sampled step."""
        self._torch.cuda.synchronize()
        profile, self._profile = self._profile, None
        profile.__exit__(None, None, None)
        ranges = sorted(
            (event.time_range.start, event.time_range.end)
            for event in profile.events()
            if event.device_type == self._torch.autograd.DeviceType.CUDA
        )
        busy_us, reached = 0.0, float("-inf")
        for start, end in ranges:
            busy_us += max(0.0, end - max(start, reached))
            reached = max(reached, end)
        self.writer.span(Span.KERNEL_BUSY, self._seq, 0, round(busy_us * 1e3), len(ranges), 0)
