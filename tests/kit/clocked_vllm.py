"""vLLM's engine loop and worker in virtual time, under its real probes: what a device did is known.

See tests.kit.clocked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gapmeter_probe.device import DeviceClock
from gapmeter_probe.vllm.core import CoreProbe
from gapmeter_probe.vllm.worker import WorkerProbe

from gapmeter.records import RecordWriter
from tests.kit.clocked import US, Api, Request, Run, settle, virtual_time, wrapper
from tests.kit.cuda import Device, Event, HostClock

_RUNNER = {1: "vllm.v1.worker.gpu_model_runner:GPUModelRunner.", 2: "vllm.v1.worker.gpu.model_runner:GPUModelRunner."}
_OUTPUT = {
    1: "vllm.v1.worker.gpu_model_runner:AsyncGPUModelRunnerOutput.__init__",
    2: "vllm.v1.worker.gpu.async_utils:AsyncOutput.__init__",
}
_CORE = "vllm.v1.engine.core:EngineCore."
_PROC = "vllm.v1.engine.core:EngineCoreProc."
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler."
_UNI = "vllm.v1.executor.uniproc_executor:UniProcExecutor."
_MULTI = "vllm.v1.executor.multiproc_executor:MultiprocExecutor."
_WORKER_PROC = "vllm.v1.executor.multiproc_executor:WorkerProc."


@dataclass(frozen=True, slots=True)
class Engine:
    """How the engine runs, and how long its parts take (µs).

    ``graph``: the forward is one launch of many kernels; else ``kernels`` launches. ``pause_us``: between the two calls
    of a step, while the host does something else. ``number``: of a server's engines which one it is.
    """

    runner: int = 1
    asynchronous: bool = False
    separate: bool = False
    graph: bool = True
    schedule_us: int = 300
    prepare_us: int = 400
    input_us: int = 20  # each of three input kernels
    kernels: int = 50
    kernel_us: int = 60
    kernel_pause_us: int = 0
    logits_us: int = 250
    replay_us: int = 20  # the host's part of launching a graph,
    logits_launch_us: int = 4  # and of launching the logits
    sampling_us: int = 30  # each of four kernels
    copy_us: int = 8
    pause_us: int = 0
    bookkeeping_us: int = 80
    update_us: int = 200
    idle_us: int = 0  # between two steps
    steps_end_us: int = 150
    number: int = 0


@dataclass(slots=True)
class Future:
    """The result of a call that is not waited for."""

    ready_ns: int
    callbacks: list[Callable[[Any], None]] = field(default_factory=list)

    def add_done_callback(self, done: Callable[[Any], None]) -> None:
        self.callbacks.append(done)


def run(
    folder: Path, engine: Engine, requests: Sequence[Request], device: Device | None = None,
    kernels_every: int | str = 0,
) -> Run:  # fmt: skip
    """Serve these requests; the records are in ``folder``. ``kernels_every``: "" leaves it to the probe."""
    device = device or Device(HostClock())
    with virtual_time(device.clock), pytest.MonkeyPatch.context() as patch:
        patch.setenv("GAPMETER_PROBE_KERNELS", str(kernels_every))
        server = _Server(folder, engine, device)
        server.serve(list(requests))
    return Run(sorted(folder.glob("*.gap")), device, list(requests), server.launches)


class _Server:
    def __init__(self, folder: Path, engine: Engine, device: Device) -> None:
        self.engine, self.device, self.clock = engine, device, device.clock
        self.core, self.worker = CoreProbe(), WorkerProbe()
        head = {"engine": engine.number}
        self.core.writer = RecordWriter(folder / "core.gap", {"role": "core", **head})
        head |= {"model_runner": engine.runner}
        self.worker.writer = RecordWriter(folder / "worker.gap", {"role": "worker", **head})
        self.folder = folder
        self.running: list[Request] = []
        scheduler = self.core._scheduler = SimpleNamespace(running=self.running, waiting=[], requests={})
        steps = self.core._steps
        steps.writer, steps.scheduler, steps.blocks = self.core.writer, scheduler, SimpleNamespace(num_free_blocks=100)
        self.clocked = self.worker._device = DeviceClock(self.worker.writer, device.torch)
        self.worker._copies = device.copies if engine.asynchronous or engine.runner == 2 else None
        self.launches: list[tuple[int, int]] = []
        self._worker_ns = 0
        self._wrap()

    def _wrap(self) -> None:
        core, both, e = wrapper(self.core), wrapper(self.core, self.worker), self.engine
        worker, runner = wrapper(self.worker), _RUNNER[e.runner]
        self.decode = core("vllm.v1.serial_utils:MsgpackDecoder.decode", lambda decoder, message: None)
        self.preprocess = core(f"{_CORE}preprocess_add_request", lambda engine, request: (request, 0))
        self.add = core(f"{_CORE}add_request", lambda engine, request: self.clock.spend(10 * US))
        self.look = core(f"{_PROC}_process_input_queue", self._take)
        self.handle = core(f"{_PROC}_handle_client_request", lambda engine: None)
        self.schedule = core(f"{_SCHEDULER}schedule", self._schedule)
        self.free = core(f"{_SCHEDULER}_free_request", lambda scheduler, request: None)
        self.update = core(f"{_SCHEDULER}update_from_output", self._update)
        step = "step_with_batch_queue" if e.asynchronous else "step"
        self.step = core(f"{_CORE}{step}", self._step_ahead if e.asynchronous else self._step)
        self.put = core(f"{_CORE}post_step", lambda engine, ran: self.clock.spend(20 * US))
        self.loop = core(f"{_PROC}_process_engine_step", self._loop)
        executor = _MULTI if e.separate else _UNI
        self.execute = core(f"{executor}execute_model", self._execute)
        self.sample = core(f"{executor}sample_tokens", self._sample)
        self.get_data = worker(
            "vllm.distributed.device_communicators.shm_broadcast:ShmRingBuffer.get_data", lambda ring: None
        )
        worker(f"{_WORKER_PROC}worker_busy_loop", lambda proc: None)
        if e.separate:
            self.worker._separate = True
        self.hand = worker(f"{_WORKER_PROC}handle_output", lambda proc, output: None)
        self.answer = worker(f"{_WORKER_PROC}enqueue_output", lambda proc, output: None)
        self.worker_execute = worker(
            "vllm.v1.worker.worker_base:WorkerWrapperBase.execute_model", lambda w, out: self.run_model(None, out)
        )
        self.worker_sample = worker("vllm.v1.worker.gpu_worker:Worker.sample_tokens", lambda w: self.run_sampler(None))
        self.run_model = both(f"{runner}execute_model", self._run_model)
        self.run_sampler = both(f"{runner}sample_tokens", self._run_sampler)
        forward = (
            f"{_RUNNER[1]}_model_forward"
            if e.runner == 1
            else "vllm.v1.worker.gpu.async_utils:StepTimingCollector.forward_start"
        )
        launched = SimpleNamespace(name="FULL" if e.graph else "NONE")
        batch = SimpleNamespace(num_tokens=8, cg_mode=launched)
        padding = (
            f"{_RUNNER[1]}_determine_batch_execution_and_padding"
            if e.runner == 1
            else "vllm.v1.worker.gpu.model_runner:dispatch_cg_and_sync_dp"
        )
        self.padding = worker(padding, lambda: (launched, batch) if e.runner == 1 else (batch,))
        self.forward = worker(forward, (lambda runner: self._forward()) if e.runner == 1 else (lambda runner: None))
        self.to_list = worker(f"{_RUNNER[1]}_to_list", lambda runner: self._copy(self.device.main).synchronize())
        self.output = worker(_OUTPUT[e.runner], lambda output: self._copy(self.device.copies))

    # -- the engine

    def serve(self, requests: list[Request]) -> None:
        self.arriving = deque(sorted(requests, key=lambda request: request.due_ns))
        self.queue: deque[tuple[Any, Future]] = deque()
        self.api = Api(self.folder, requests)
        engine = SimpleNamespace(has_work=lambda: bool(self.running or self.queue))
        while self.arriving or self.running or self.queue:
            self.look(engine)
            self.loop(engine)
        self.clock.spend(1e6)
        self.worker.close()
        self.core.close()
        self.api.close()

    def _take(self, engine: Any) -> None:
        if not self.running and not self.queue:
            self.clock.wait_until(self.arriving[0].due_ns + 400 * US)
            self.handle(None)
        while self.arriving and self.arriving[0].due_ns + 400 * US <= self.clock.ns:
            request = self.arriving.popleft()
            self.api.asked(request)
            named = SimpleNamespace(request_id=f"engine-{request.name}", num_prompt_tokens=request.prompt)
            with self.clock.at(request.due_ns + 350 * US):
                self.decode(None, None)
                self.clock.spend(20 * US)
                self.preprocess(None, named)
            self.add(None, named)
            self.running.append(request)

    def _loop(self, engine: Any) -> None:
        _, ran = self.step(None)
        if self.clocked.kernels:
            settle(self.clocked.kernels)
        self.put(None, ran)
        self.clock.spend((self.engine.steps_end_us + self.engine.idle_us) * US)

    def _schedule(self, scheduler: Any) -> Any:
        self.clock.spend(self.engine.schedule_us * US)
        new, ids, before, tokens, emits = [], [], [], {}, []
        for request in self.running:
            if request.scheduled >= request.output:
                continue
            name = f"engine-{request.name}"
            prompt = not request.computed
            tokens[name] = request.prompt if prompt else 1
            if prompt:
                new.append(SimpleNamespace(req_id=name, num_computed_tokens=0))
            else:
                ids.append(name)
                before.append(request.computed)
            request.computed += tokens[name]
            request.scheduled += 1
            emits.append(request)
        return SimpleNamespace(
            num_scheduled_tokens=tokens, total_num_scheduled_tokens=sum(tokens.values()), scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(req_ids=ids, num_computed_tokens=before), emits=emits,
        )  # fmt: skip

    def _step(self, engine: Any) -> Any:
        out = self.schedule(None)
        self._wait(self.execute(None, out))
        self.clock.spend(self.engine.pause_us * US)
        self._wait(self.sample(None, out))
        return self.update(None, out), True

    def _step_ahead(self, engine: Any) -> Any:
        if any(request.scheduled < request.output for request in self.running):
            out = self.schedule(None)
            self.execute(None, out)
            self.clock.spend(self.engine.pause_us * US)
            self.queue.append((out, self.sample(None, out)))
            if len(self.queue) < 2 and any(request.scheduled < request.output for request in self.running):
                return {}, True
        out, future = self.queue.popleft()
        self._wait(future)
        return self.update(None, out), True

    def _wait(self, result: Any) -> None:
        """What is done when the result is there is done by another thread, at that time."""
        if isinstance(result, Future):
            with self.clock.at(result.ready_ns):
                for done in result.callbacks:
                    done(result)
            self.clock.wait_until(result.ready_ns)

    def _update(self, scheduler: Any, out: Any) -> Any:
        self.clock.spend(self.engine.update_us * US)
        outputs = []
        for request in out.emits:
            self.api.deliver(request, self.clock.ns + 200 * US)
            outputs.append(SimpleNamespace(request_id=f"engine-{request.name}", new_token_ids=[1]))
            if len(request.tokens) == request.output:
                self.running.remove(request)
        return {0: SimpleNamespace(outputs=outputs)}

    # -- the executor and the worker

    def _execute(self, executor: Any, out: Any) -> Any:
        return self._remote(lambda: self.worker_execute(None, out), None)

    def _sample(self, executor: Any, out: Any) -> Any:
        return self._remote(lambda: self.worker_sample(None), self.engine)

    def _remote(self, call: Callable[[], Any], sampling: Any) -> Any:
        """In this thread, or in the worker's; the tokens of an asynchronous copy are waited for by another thread."""
        if not self.engine.separate:
            copied = call()
            if isinstance(copied, Event):
                ready = Future(max(copied.happens, self.clock.ns) + 15 * US)
                return ready if self.engine.asynchronous else self._wait(ready)
            return None
        self.clock.spend(30 * US)
        with self.clock.at(max(self._worker_ns, self.clock.ns + 40 * US)):
            self.get_data(None)
            copied = call()
            self.hand(None, None)
            free = self.clock.ns
            if isinstance(copied, Event):
                copied.synchronize()
                free = free if self.engine.asynchronous else self.clock.ns
            self.answer(None, None)
            answered, self._worker_ns = self.clock.ns, free
        return Future(answered + 40 * US)

    def _run_model(self, runner: Any, out: Any) -> None:
        e, device = self.engine, self.device
        self.clock.spend(e.prepare_us * US)
        for _ in range(3):
            device.launch("input", e.input_us * US)
        self.padding()
        self.launches.append((self.clock.ns, 0))
        self.forward(None)
        if e.runner == 1:
            device.launch("logits", e.logits_us * US, host_ns=e.logits_launch_us * US)
        else:
            self._forward()
        self.clock.spend(20 * US)

    def _forward(self) -> None:
        e, device = self.engine, self.device
        if e.graph:
            device.replay("forward", [e.kernel_us * US] * e.kernels, e.kernel_pause_us * US, host_ns=e.replay_us * US)
            return
        for _ in range(e.kernels):
            device.launch("forward", e.kernel_us * US, host_ns=8 * US)

    def _run_sampler(self, runner: Any) -> Event | None:
        e, device = self.engine, self.device
        self.clock.spend(10 * US)
        if e.runner == 2:
            device.launch("logits", e.logits_us * US)
        for _ in range(4):
            device.launch("sampling", e.sampling_us * US)
        copied = None
        if e.runner == 1 and not e.asynchronous:
            self.to_list(None)
        else:
            self.output(None)
            copied = self.copied
        self.clock.spend(e.bookkeeping_us * US)
        self.launches[-1] = (self.launches[-1][0], max(device.main.free_ns, device.copies.free_ns))
        return copied

    def _copy(self, stream: Any) -> Event:
        stream.wait_stream(self.device.main)
        self.device.launch("copy", self.engine.copy_us * US, stream)
        self.copied = Event(self.device)
        self.copied.record(stream)
        return self.copied
