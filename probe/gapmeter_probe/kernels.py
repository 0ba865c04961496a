"""Which stretches of time the device spent in kernels, in windows of steps: from the profiler (CUPTI), off the path.

A thread of its own starts and stops the profiler, and reads what it found; the engine's thread only says which step it
is at. Nothing is waited for, no step is cut: a kernel is kept with its own time, and analysis lays them beside the
steps that were whole inside a window. What the profiler costs is in the steps of a window, so there is one at most,
and only where forwards wait for their host; ``GAPMETER_PROBE_KERNELS=N`` asks for the first 20 of every N steps, 0 for
none.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from gapmeter_probe import codes
from gapmeter_probe.appender import span
from gapmeter_probe.hooks import now
from gapmeter_probe.writer import RecordWriter

WINDOW = 20  # steps
_PAUSE_NS = 500  # kernels that follow one another more closely than this count as one stretch, the pause as a pause
_COPIES = ("memcpy", "memset")
_COMMUNICATION = ("nccl", "all_reduce", "allreduce", "all_gather", "reduce_scatter")
_NAMED = 12
_PATIENCE_S = 30.0
realtime = time.time_ns


class KernelSampler:
    """Windows of ``WINDOW`` steps, one every ``every`` steps, or one at once (0). A failure ends it and is recorded."""

    def __init__(self, writer: RecordWriter, torch: Any, every: int) -> None:
        self._writer, self._torch = writer, torch
        self._every = every and max(every, WINDOW + 1)
        self._left = WINDOW  # steps of the only window
        self._device = 0  # the engine's thread's: the profiler waits for that of its own thread at a window's end
        self._asked = threading.Condition()
        self._wanted = self._running = self._over = False
        self._thread = threading.Thread(target=self._run, name="gapmeter-kernels", daemon=True)
        self._thread.start()

    def at(self, seq: int) -> None:
        """The engine is at step ``seq``."""
        if self._every:
            wanted = seq % self._every < WINDOW
        else:
            self._left -= self._running
            wanted = self._left > 0
        if wanted != self._wanted:
            with self._asked:
                self._wanted, self._device = wanted, self._torch.cuda.current_device()
                self._asked.notify_all()

    def finish(self) -> None:
        """End the window that is open, and sampling; waits for what has been taken to be written."""
        with self._asked:
            self._wanted, self._over = False, True
            self._asked.notify_all()
        self._thread.join(_PATIENCE_S)

    def _run(self) -> None:
        try:
            while self._wait(True):
                self._window()
        except Exception as error:  # noqa: BLE001 - nothing of ours may raise into the engine
            self._over = True
            reason = f"{type(error).__name__}: {error}"
            self._writer.json({"type": "warning", "what": "kernel sampling ended", "error": reason})

    def _wait(self, wanted: bool) -> bool:
        """Until a window is asked for, or its end is; False when there will be none."""
        with self._asked:
            self._running = not wanted
            self._asked.wait_for(lambda: self._over or self._wanted is wanted)
            return self._wanted is wanted and not (wanted and self._over)

    def _window(self) -> None:
        self._torch.cuda.set_device(self._device)
        profile = self._torch.autograd.profiler.profile(use_cpu=False, use_device="cuda", use_kineto=True)
        profile.__enter__()
        try:
            start = now()
            self._wait(False)
            end = now()
        finally:
            profile.__exit__(None, None, None)
        offset = realtime() - now()  # the profiler's times are since 1970
        self._write(start, end, offset, profile.kineto_results.events())

    def _write(self, start: int, end: int, offset: int, events: Iterable[Any]) -> None:
        kernels, copies = [], 0
        named: Counter[str] = Counter()
        communication, on_device = 0, self._torch.autograd.DeviceType.CUDA
        for event in events:
            if event.device_type() != on_device or event.is_user_annotation():
                continue
            name = event.name().lower()
            if name.startswith(_COPIES):  # torch 2.11 does not tell what an activity was
                copies += event.duration_ns()
                continue
            kernels.append(((first := event.start_ns() - offset), first + event.duration_ns()))
            named[event.name()] += event.duration_ns()
            if name.startswith(_COMMUNICATION):
                communication += event.duration_ns()
        kernels.sort()
        flat: list[int] = []
        begun = reached = count = 0
        for first, last in kernels:
            if count and first - reached > _PAUSE_NS:
                flat += span(codes.KERNELS, 0, begun, reached, count)
                count = 0
            begun, reached, count = (first, last, 1) if not count else (begun, max(reached, last), count + 1)
        if count:
            flat += span(codes.KERNELS, 0, begun, reached, count)
        self._writer.spans(flat)
        self._writer.json(
            {
                "type": "kernels", "pid": os.getpid(), "start_ns": start, "end_ns": end, "kernels": len(kernels),
                "sum_ns": sum(last - first for first, last in kernels), "copies_ns": copies,
                "communication_ns": communication, "most": dict(named.most_common(_NAMED)),
            }
        )  # fmt: skip
