"""The loop of our Transformers server in virtual time, under its real probe: what a device did is known.

See tests.kit.clocked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gapmeter_probe.device import DeviceClock

from gapmeter.records import RecordWriter
from gapmeter.servers.transformers.probe import EngineProbe
from tests.kit.clocked import US, Api, Request, Run, virtual_time, wrapper
from tests.kit.cuda import Device, Event, HostClock

_CB = "transformers.generation.continuous_batching."
_API = f"{_CB}continuous_api:ContinuousBatchProcessor."
_RUNNER = f"{_CB}model_runner:ModelRunner."


@dataclass(frozen=True, slots=True)
class Loop:
    """How the loop runs, and how long its parts take (µs). ``graph``: forward and sampling are one launch."""

    asynchronous: bool = False
    graph: bool = False
    schedule_us: int = 200
    prepare_us: int = 300
    kernels: int = 60
    kernel_us: int = 50
    sampling_us: int = 100
    copy_us: int = 8
    update_us: int = 150
    send_us: int = 30  # until the call that sends outputs has returned
    replay_us: int = 20  # the host's part of launching a graph


def run(folder: Path, loop: Loop, requests: Sequence[Request], device: Device | None = None) -> Run:
    """Serve these requests; the records are in ``folder``."""
    device = device or Device(HostClock())
    with virtual_time(device.clock), pytest.MonkeyPatch.context() as patch:
        patch.setenv("GAPMETER_PROBE_KERNELS", "0")
        server = _Server(folder, loop, device, list(requests))
        server.serve()
    return Run(sorted(folder.glob("*.gap")), device, list(requests), server.launches)


class _Server:
    def __init__(self, folder: Path, loop: Loop, device: Device, requests: list[Request]) -> None:
        self.loop, self.device, self.clock = loop, device, device.clock
        self.api = Api(folder, requests)
        self.arriving = deque(sorted(requests, key=lambda request: request.due_ns))
        self.running: list[Request] = []
        self.flying: deque[tuple[list[Request], Event | None]] = deque()
        self.launches: list[tuple[int, int]] = []
        probe = self.probe = EngineProbe()
        wrap = wrapper(probe)
        self.prepare = wrap(f"{_API}prepare_next_batch", self._prepare)
        self.add = wrap(f"{_CB}scheduler:Scheduler.add_waiting_request", lambda scheduler, state: None)
        self.schedule = wrap(f"{_CB}scheduler:FIFOScheduler.schedule_batch", self._schedule)
        self.compute = wrap(f"{_RUNNER}compute_batch", self._compute)
        self.process = wrap(
            f"{_CB}cb_logits_processors:ContinuousBatchingLogitsProcessorList.__call__", lambda processors: None
        )
        self.sample = wrap(f"{_RUNNER}_sample", self._sample)
        which = "ContinuousBatchingAsyncIOs" if loop.asynchronous else "ContinuousBatchingIOs"
        self.retrieve = wrap(f"{_CB}input_outputs:{which}.retrieve_device_outputs", self._retrieve)
        self.update = wrap(f"{_API}update_batch", self._update)
        io = SimpleNamespace(use_block_table=True, num_q_tokens=1)
        self.runner = SimpleNamespace(
            inputs_and_outputs=io, use_cuda_graph_decode=loop.graph, use_cuda_graph_varlen=loop.graph, pad_inputs=False
        )
        if loop.asynchronous:
            self._bootstrap()
        probe.writer = RecordWriter(folder / "core.gap", {"role": "core"})
        probe._device = DeviceClock(probe.writer, device.torch)
        probe._compute = device.main
        probe._copies = device.copies if loop.asynchronous else None

    def _bootstrap(self) -> None:
        """The loop's first step has no update, which comes with its second: a request before the first recorded one."""
        self.running.append(Request("warm-up", 0, 4, 1))
        with self.clock.at(self.clock.ns - 20_000_000):
            self._step()
        self.running.clear()
        self.launches.clear()
        self.device.work.clear()

    def serve(self) -> None:
        while self.arriving or self.running:
            self._arrivals()
            self._step()
            self.update(None)
        self.clock.spend(1e6)
        self.probe.close()
        self.api.close()

    def _step(self) -> None:
        self.prepare(None)
        self.compute(self.runner)
        self.retrieve(None)

    def _arrivals(self) -> None:
        if not self.running:
            self.probe.idling()
            self.clock.wait_until(self.arriving[0].due_ns + 350 * US)
            self.probe.woken(self.clock.ns)
        self.probe.looking()
        while self.arriving and self.arriving[0].due_ns + 350 * US <= self.clock.ns:
            request = self.arriving.popleft()
            self.api.asked(request)
            self.clock.spend(10 * US)
            self.probe.arrived(f"engine-{request.name}", request.prompt, request.due_ns + 300 * US)
            self.clock.spend(10 * US)
            self.add(None, SimpleNamespace(request_id=f"engine-{request.name}"))
            self.running.append(request)

    def _prepare(self, processor: Any) -> None:
        scheduler = SimpleNamespace(active_requests=self.running, waiting_requests=[])
        self.batch = self.schedule(scheduler)[1]
        self.clock.spend(self.loop.prepare_us * US)

    def _schedule(self, scheduler: Any) -> Any:
        self.clock.spend(self.loop.schedule_us * US)
        batch, items = [], []
        for request in self.running:
            tokens = 1 if request.computed else request.prompt
            state = SimpleNamespace(request_id=f"engine-{request.name}", position_offset=request.computed)
            items.append(SimpleNamespace(state=state, query_length=tokens, has_new_token=True))
            request.computed += tokens
            request.scheduled += 1
            batch.append(request)
        return items, batch

    def _compute(self, runner: Any) -> None:
        self.launches.append((self.clock.ns, 0))
        kernels = [self.loop.kernel_us * US] * self.loop.kernels
        if self.loop.graph:
            self.device.replay("forward", [*kernels, self.loop.sampling_us * US], 0, host_ns=self.loop.replay_us * US)
            return
        for ns in kernels:
            self.device.launch("forward", ns, host_ns=10 * US)
        self.process(None)
        self.sample(runner)

    def _sample(self, runner: Any) -> None:
        self.device.launch("sampling", self.loop.sampling_us * US)

    def _retrieve(self, io: Any) -> None:
        event = Event(self.device)
        if self.loop.asynchronous:
            self.device.copies.wait_stream(self.device.main)
            self.device.launch("copy", self.loop.copy_us * US, self.device.copies)
            event.record(self.device.copies)
        else:
            event.record(self.device.main)
            event.synchronize()
        self.launches[-1] = self.launches[-1][0], max(self.device.main.free_ns, self.device.copies.free_ns)
        self.flying.append((self.batch, event))

    def _update(self, processor: Any) -> None:
        batch, event = self.flying.popleft()
        event.synchronize()
        self.clock.spend(self.loop.update_us * US)
        start, over = self.clock.ns, []
        batch = [request for request in batch if request in self.running]  # the others ended with the step before
        if not batch:
            return
        self.probe.emitting(start, [(f"engine-{request.name}", 1) for request in batch])
        for request in batch:
            self.api.deliver(request, start + 60 * US)
            if len(request.tokens) == request.output:
                self.running.remove(request)
                over.append((f"engine-{request.name}", "length", request.output))
        self.clock.spend(self.loop.send_us * US)
        self.probe.emitted(start, over)
