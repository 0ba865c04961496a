"""When the device was where in a step: five event marks, resolved later without waiting, kept on the device's clock.

A step's marks are put onto its stream where its input kernels, its forward and its sampling begin and end, and onto the
stream that copies its tokens to the host. What an event knows is only how long after another it happened. So every two
seconds an anchor event is recorded on a stream of its own, which is idle, and looked for at once: the moment it
happened lies between two host stamps. Marks are kept as the device's time since such an anchor; analysis places them on
the host's clock between the anchors around them, so that the two clocks may drift apart.

A failure costs the step that it happens in; after several in a row device timing ends. Both are recorded, and nothing
ever raises into the engine.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gapmeter_probe.hooks import now
from gapmeter_probe.kernels import KernelSampler
from gapmeter_probe.writer import RecordWriter

INPUT, FORWARD, FORWARD_END, SAMPLED, COPIED = range(5)
KERNELS = "GAPMETER_PROBE_KERNELS"
_RENEW_NS = 2_000_000_000
_POLL_NS = 50_000  # how long an anchor is looked for at once; a later one is met in passing, and known less well
_POOL = 64
_MOST_FAILURES = 8  # in a row, before device timing ends
_LAST_S = 1.0  # how long the last steps are waited for when the process closes
_HOST_BOUND = 16  # forwards in a row that the device did as fast as its host launched them, before kernels are sampled
_LAUNCHING = 0.9  # for so much of such a forward the host was launching it,
_LEAST_NS = 1_000_000  # and for as long as no graph's single launch takes
TIDY_S = 0.2  # how long no mark has been made before the steps that are left are looked at
pause = time.sleep


def open_device(writer: RecordWriter, device: str, *, graphs: bool) -> DeviceClock | None:
    """A clock for a CUDA device, None for others. ``graphs``: this process has captured some."""
    if not device.startswith("cuda"):
        return None
    import torch

    return DeviceClock(writer, torch, graphs=graphs)


def _guarded(work: Callable[..., None]) -> Callable[..., None]:
    """A method of a DeviceClock that fails for the step that is open, and for no other."""

    @functools.wraps(work)
    def guarded(clock: DeviceClock, *args: Any) -> None:
        if clock.broken:
            return
        try:
            work(clock, *args)
        except Exception as error:  # noqa: BLE001 - nothing of ours may raise into the engine
            clock.fail(error)

    return guarded


@dataclass(slots=True)
class _Anchor:
    """An event that the host knows the time of, once it has been seen."""

    number: int
    event: Any
    asked_ns: int
    seen: bool = False


@dataclass(slots=True)
class _Step:
    """A step's marks: for each part the host's stamp and the event, where it was marked."""

    seq: int
    anchor: _Anchor
    marks: list[tuple[int, Any] | None] = field(default_factory=lambda: [None] * 5)


class DeviceClock:
    """The marks of the steps that are being put on the device, and of those that are on it."""

    def __init__(self, writer: RecordWriter, torch: Any, *, graphs: bool = False) -> None:
        self.writer = writer
        self._torch = torch
        self.broken = False
        self._over = threading.Event()
        self._failures = 0
        self._idle: Any = None
        self._last: _Anchor | None = None  # the newest that has been seen
        self._pending: _Anchor | None = None
        self._anchors = 0
        self._tried_ns = 0
        self._free: list[Any] = []
        self._open: _Step | None = None
        self._flying: deque[_Step] = deque()
        self._lock = threading.Lock()
        self._device: int | None = None
        self._marked_ns = 0
        every = os.environ.get(KERNELS, "")
        self.kernels = KernelSampler(writer, torch, int(every)) if every.isdigit() and int(every) else None
        # Forwards in a row that waited for their host. None: they ask for no samples; before CUDA 12.6, profilers that
        # end have crashed processes with graphs.
        self._host_bound = None if every or graphs else 0

    def begin(self, seq: int, stream: Any = None) -> None:
        """A step's inputs are about to be put on the device: resolve what is done, mark the first part."""
        with self._lock:
            self._begin(seq, stream)

    @_guarded
    def _begin(self, seq: int, stream: Any) -> None:
        if self._device is None:
            self._device = self._torch.cuda.current_device()
            threading.Thread(target=self._tidy_on, name="gapmeter-device", daemon=True).start()
        self._close()
        self.resolve()
        if self.kernels:
            self.kernels.at(seq)
        if self._pending is None and now() - self._tried_ns > _RENEW_NS:  # only one is looked for at a time
            self.anchor()
        anchor = self._last or self._pending
        if anchor:
            self._open = _Step(seq, anchor)
            self.mark(INPUT, stream)

    @_guarded
    def mark(self, part: int, stream: Any = None) -> None:
        """What is put on ``stream`` (None: the current one) from here on belongs to what follows ``part``.

        Only the first mark of a part counts.
        """
        step = self._open
        if step is None or step.marks[part] is not None:
            return
        event = self._free.pop() if self._free else self._torch.cuda.Event(enable_timing=True)
        at = now()
        event.record() if stream is None else event.record(stream)
        step.marks[part] = at, event
        self._marked_ns = at

    @_guarded
    def resolve(self) -> None:
        """Record the steps that are over by now; what is still on the device waits for a later call."""
        if self._pending:
            self._look(self._pending)
        while self._flying:
            step = self._flying[0]
            last = [mark[1] for mark in step.marks[SAMPLED:] if mark] or [mark[1] for mark in step.marks if mark][-1:]
            try:
                if not step.anchor.seen or not all(event.query() for event in last):
                    return
                self._write(self._flying.popleft())
                self._failures = 0
            except Exception:
                if self._flying and self._flying[0] is step:
                    self._flying.popleft()
                raise

    def tidy(self) -> None:
        """Resolve the last steps of a load, that no other step follows for a while."""
        if now() - self._marked_ns < TIDY_S * 1e9 or not (self._open or self._flying):
            return
        with self._lock:
            sampled = self._open.marks[SAMPLED] if self._open else None
            if sampled and sampled[1].query():
                self._close()
            self.resolve()

    def _tidy_on(self) -> None:
        self._torch.cuda.set_device(self._device)
        while not self._over.wait(TIDY_S) and not self.broken:
            try:
                self.tidy()
            except Exception as error:  # noqa: BLE001 - as in _guarded
                self.fail(error)

    def finish(self) -> None:
        """The process closes: give the last steps the time that they need, and a last anchor to be placed by."""
        with self._lock:
            if self._over.is_set():
                return
            self._over.set()
            self._close()
            self.anchor()
            waited = 0.0
            while (self._flying or self._pending) and not self.broken and waited < _LAST_S:
                self.resolve()
                if self._flying or self._pending:
                    pause(1e-3)
                    waited += 1e-3
            if self.kernels:
                self.kernels.finish()

    def fail(self, error: BaseException) -> None:
        """Give up the step that is open; after several failures in a row, give up."""
        self._open = None
        self._failures += 1
        self.broken = self._failures >= _MOST_FAILURES
        if self._failures == 1 or self.broken:
            what = "device timing ended" if self.broken else "device timing failed in a step"
            self.writer.json({"type": "warning", "what": what, "error": f"{type(error).__name__}: {error}"})

    def _close(self) -> None:
        """Nothing more is put on the device for the step that was open."""
        if self._open:
            self._flying.append(self._open)
        self._open = None

    def _write(self, step: _Step) -> None:
        marks: list[int] = []
        for mark in step.marks:
            if mark is None:
                marks += (0, 0)
                continue
            at, event = mark
            marks += (at, round(step.anchor.event.elapsed_time(event) * 1e6))
            if len(self._free) < _POOL:
                self._free.append(event)
        self.writer.device(step.seq, step.anchor.number, marks)
        if self._host_bound is not None and step.marks[FORWARD] and step.marks[FORWARD_END]:
            self._watch(
                marks[2 * FORWARD_END] - marks[2 * FORWARD], marks[2 * FORWARD_END + 1] - marks[2 * FORWARD + 1]
            )

    def _watch(self, launching_ns: int, took_ns: int) -> None:
        """Where forwards wait for their host, kernel by kernel, look once how long their kernels run."""
        waits = launching_ns >= max(_LEAST_NS, _LAUNCHING * took_ns)
        self._host_bound = (self._host_bound or 0) + 1 if waits else 0
        if self._host_bound == _HOST_BOUND:
            self._host_bound = None
            self.kernels = KernelSampler(self.writer, self._torch, 0)

    # -- anchors

    @_guarded
    def anchor(self) -> None:
        """Look for a new anchor now, for as long as a look may last; one that takes longer is met in passing."""
        if self._pending:
            return
        cuda = self._torch.cuda
        self._idle = self._idle or cuda.Stream()
        event = cuda.Event(enable_timing=True)
        self._anchors += 1
        asked = self._tried_ns = now()
        event.record(self._idle)
        self._pending = anchor = _Anchor(self._anchors, event, asked)
        while not self._look(anchor) and now() - asked < _POLL_NS:
            pass

    def _look(self, anchor: _Anchor) -> bool:
        """Whether the anchor has happened: then its host time lies between the asking and now."""
        if not anchor.event.query():
            return False
        seen = now()
        since = round(self._last.event.elapsed_time(anchor.event) * 1e6) if self._last else 0
        self.writer.json(
            {
                "type": "anchor",
                "number": anchor.number,
                "host_ns": (anchor.asked_ns + seen) // 2,
                "half_width_ns": (seen - anchor.asked_ns + 1) // 2,
                "since_ns": since,
            }
        )
        anchor.seen = True
        self._last, self._pending = anchor, None
        return True
