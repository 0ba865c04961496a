"""What the probe itself costs: CPU time of its hooks for each engine step, in each process.

The hooks wrap functions that do nothing, with objects of the engine's shapes, so what is left is the probe: no model,
no noise of one. Where a step does its work, 80 MB are read and some JSON is made: a forward leaves neither the probe's
code nor its data in the processor's caches, and what is cold costs several times what a loop alone would show.
``python -m bench.probe_cost [running requests [engine]]`` prints a line for each process.
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from gapmeter_probe.hooks import Probe, now
from gapmeter_probe.vllm.api import ApiProbe, Call, Generation
from gapmeter_probe.vllm.core import CoreProbe
from gapmeter_probe.vllm.steps import SEQ
from gapmeter_probe.vllm.worker import WorkerProbe
from gapmeter_probe.writer import CHUNK_BYTES, NATIVE, RecordWriter

from gapmeter.servers.api.stamps import Metrics, RequestStamps
from gapmeter.servers.transformers.probe import EngineProbe
from gapmeter.servers.transformers.probe import _Request as Known

STEPS = 150
_READ_BYTES = 80 << 20  # with this the parts add up to what pairs show


@dataclass
class Running:
    req_ids: list[str]
    num_computed_tokens: list[int]


@dataclass
class Scheduled:
    num_scheduled_tokens: dict[str, int]
    scheduled_cached_reqs: Running
    scheduled_new_reqs: list[Any] = field(default_factory=list)
    total_num_scheduled_tokens: int = 1


@dataclass
class Output:
    request_id: str
    new_token_ids: list[int]
    finish_reason: None = None


@dataclass
class Outputs:
    outputs: list[Output]


@dataclass
class State:
    queue: Holder
    request_index: int = 0


@dataclass
class Holder:
    request_id: str = ""
    output: None = None
    running: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)

    def has_work(self) -> bool:
        return True


class Future:
    def add_done_callback(self, done: Callable[[Any], None]) -> None:
        done(self)


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a step: CPU time and bytes recorded."""

    cpu_us: float
    size_bytes: int


class Work:
    """What else a step does to the caches; ``spent_ns`` of CPU time so far is taken out of what is measured."""

    def __init__(self) -> None:
        self._data = np.ones(_READ_BYTES // 8)
        self._answer = {"choices": [{"delta": {"content": "text"}, "index": n} for n in range(40)]}
        self.spent_ns = 0

    def __call__(self) -> None:
        begun = time.thread_time_ns()
        self._data.sum()
        json.loads(json.dumps(self._answer))
        self.spent_ns += time.thread_time_ns() - begun


def hooked(probe: Probe, bare: bool) -> Callable[[str, Callable[..., Any]], Callable[..., Any]]:
    """A function that wraps another as the probe wraps vLLM's of that name; not at all when ``bare``."""

    def wrap(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        for hook in probe.hooks():
            if not bare and any(target.endswith((f".{name}", f":{name}")) for target in hook.targets):
                function = hook.wrap(function)
        return function

    return wrap


def core(count: int, work: Work, writer: RecordWriter, bare: bool) -> Callable[[], None]:
    probe, engine = CoreProbe(), Holder(running=list(range(count)))
    probe.writer = probe._steps.writer = writer
    probe._steps.scheduler, probe._steps.blocks = engine, SimpleNamespace(num_free_blocks=100)
    ids = [f"chatcmpl-request-{n}-abcdef01" for n in range(count)]
    probe._requests.update({name: (n + 1, 10) for n, name in enumerate(ids)})
    wrap = hooked(probe, bare)
    future, blocks = Future(), probe._steps.blocks
    look = wrap("_process_input_queue", lambda engine: None)

    def decide(scheduler: Any) -> Scheduled:  # an engine, too, has in its caches what it has just looked at and made
        assert len(scheduler.running) + len(scheduler.waiting) + blocks.num_free_blocks
        return Scheduled(dict.fromkeys(ids, 1), Running(list(ids), [50] * count))

    schedule = wrap("schedule", decide)

    def forward(executor: Any, output: Any) -> Future:
        work()
        return future

    execute = wrap("execute_model", forward)
    sample = wrap("sample_tokens", lambda executor, grammar: future)
    update = wrap("update_from_output", lambda *_: {0: Outputs([Output(name, [1]) for name in ids])})
    put = wrap("post_step", lambda engine, ran: None)
    encode = wrap("encode_into", lambda encoder, outputs: None)
    made: list[Any] = []
    send = wrap("_send_msg_tracking_payload", lambda socket: None)

    def engine_step(engine: Any) -> Any:
        output = schedule(engine)
        execute(engine, output)
        sample(engine, None)
        made[:] = [update(engine, output, None)]
        return made[0], True

    step = wrap("step", engine_step)
    loop = wrap("_process_engine_step", lambda engine: (step(engine), put(engine, True)))

    def once() -> None:
        work()
        look(engine)
        loop(engine)
        encode(engine, made[0][0])
        send(engine)

    return once


def worker(work: Work, writer: RecordWriter, bare: bool) -> Callable[[], None]:
    probe = WorkerProbe()
    probe.writer = writer
    if probe._worker is not None:
        probe._worker.writer = writer
    wrap = hooked(probe, bare)
    forward = wrap("_model_forward", lambda runner: work())
    pad = wrap("_determine_batch_execution_and_padding", lambda runner: padding)
    padding = SimpleNamespace(name="NONE"), SimpleNamespace(num_tokens=4)
    scheduled = Scheduled({}, Running([], []))
    setattr(scheduled, SEQ, 1)
    run = next(h for h in probe.hooks() if h.every and h.targets[0].endswith("GPUModelRunner.execute_model"))
    call = next(h for h in probe.hooks() if h.targets[0].endswith("WorkerWrapperBase.execute_model"))

    def model(runner: Any) -> None:
        pad(runner)
        forward(runner)

    runner: Callable[..., Any] = model if bare else run.wrap(model)
    execute: Callable[..., Any] = (lambda w, s: runner(w)) if bare else call.wrap(lambda w, s: runner(w))
    sampled = next(h for h in probe.hooks() if h.targets[0].endswith("GPUModelRunner.sample_tokens"))
    asked = next(h for h in probe.hooks() if h.targets[0].endswith("Worker.sample_tokens"))
    inner: Callable[..., Any] = (lambda runner: None) if bare else sampled.wrap(lambda runner: None)
    sample: Callable[..., Any] = (lambda w: inner(w)) if bare else asked.wrap(lambda w: inner(w))

    def once() -> None:
        execute(None, scheduled)
        sample(None)

    return once


def api(count: int, work: Work, writer: RecordWriter, bare: bool) -> Callable[[], None]:
    probe = ApiProbe()
    probe.writer = probe._answers.writer = writer
    ids = [f"chatcmpl-request-{n}-abcdef01" for n in range(count)]
    collectors, calls = [Holder(name) for name in ids], []
    for n, name in enumerate(ids):
        call = Call(0, "")
        call.opened = True
        call.generations = [Generation(n + 1, State(collectors[n]))]
        probe._generations[name] = call.generations[0]
        calls.append(call)
    wrap = hooked(probe, bare)
    decode = wrap("decode", lambda decoder, frames: Outputs([Output(name, [1]) for name in ids]))
    put = wrap("put", lambda collector, output: setattr(collector, "output", None))
    nowait = wrap("get_nowait", lambda collector: None)

    async def get_result(collector: Any) -> Any:
        return None

    async def send_nothing(cycle: Any, message: Any) -> None:
        return None

    get, send = wrap("get", get_result), wrap("send", send_nothing)
    body = b'data: {"choices": []}\n\n'

    def put_all(processor: Any, outputs: Any) -> None:
        for collector in collectors:
            put(collector, None)

    process = wrap("process_outputs", put_all)
    cycles = [SimpleNamespace(gapmeter_call=call) for call in calls]

    async def deliver() -> None:
        for cycle, collector in zip(cycles, collectors, strict=True):
            nowait(collector)
            await get(collector)
            assert cycle.gapmeter_call
            await send(cycle, {"type": "http.response.body", "body": body})

    def once() -> None:
        work()
        message = decode(None, None)
        process(None, message.outputs)
        coroutine = deliver()
        try:
            coroutine.send(None)
        except StopIteration:
            return

    return once


def engine(count: int, work: Work, writer: RecordWriter, bare: bool) -> Callable[[], None]:
    """The process of our Transformers server that schedules and computes."""
    probe = EngineProbe()
    probe.writer = writer
    ids = [f"chatcmpl-request-{n}-abcdef01" for n in range(count)]
    probe._requests = {name: Known(n + 1, 10, 0, added=True, seen=True) for n, name in enumerate(ids)}
    wrap = hooked(probe, bare)
    scheduler = SimpleNamespace(active_requests=dict.fromkeys(ids), waiting_requests={})
    states = [SimpleNamespace(position_offset=50, request_id=name) for name in ids]
    batch = [SimpleNamespace(state=state, query_length=1, has_new_token=True) for state in states]
    runner = SimpleNamespace(
        inputs_and_outputs=SimpleNamespace(use_block_table=True, num_q_tokens=count),
        use_cuda_graph_decode=False, use_cuda_graph_varlen=False, pad_inputs=False,
    )  # fmt: skip
    emitted = [(name, 1) for name in ids]
    looped = wrap("prepare_next_batch", lambda processor: schedule(scheduler))
    schedule = wrap("schedule_batch", lambda scheduler: (batch,))
    sample = wrap("_sample", lambda runner: None)

    def forward(runner: Any) -> None:
        work()
        sample(runner)

    compute = wrap("compute_batch", forward)

    def send_outputs(processor: Any) -> None:
        if not bare:
            probe.emitting(now(), emitted)
            probe.emitted(now(), ())

    update = wrap("update_batch", send_outputs)

    def once() -> None:
        work()
        looped(None)
        compute(runner)
        update(None)

    return once


def server(count: int, work: Work, writer: RecordWriter, bare: bool) -> Callable[[], None]:
    """The process of our Transformers server that speaks HTTP."""
    metrics = Metrics()
    requests = [RequestStamps(None if bare else writer, metrics, f"request-{n}", "", 1) for n in range(count)]

    def once() -> None:
        work()
        for stamps in requests:
            stamps.detokenized(1, 1, 2, 3, 4, 0)
        for stamps in requests:
            stamps.egress(stamps.received, 1, 2)

    return once


Make = Callable[[Work, RecordWriter, bool], Callable[[], None]]


def measure(name: str, count: int, folder: Path) -> dict[str, Cost]:
    """The price of a step with ``count`` requests running, by process of the engine called ``name``."""
    roles: dict[str, Make] = {
        "core": functools.partial(core, count), "worker": worker, "api": functools.partial(api, count)
    }  # fmt: skip
    if name == "transformers":
        roles = {"core": functools.partial(engine, count), "api": functools.partial(server, count)}
    folder.mkdir(parents=True, exist_ok=True)
    return {role: _cost(make, folder / f"{role}.gap") for role, make in roles.items()}


def _cost(make: Make, path: Path) -> Cost:
    """Steps with the hooks and without take turns; the difference of their medians."""
    writer, work = RecordWriter(path, {}), Work()
    writer.prefault(CHUNK_BYTES)
    steps = {bare: make(work, writer, bare) for bare in (True, False)}
    taken: dict[bool, list[int]] = {True: [], False: []}
    size = 0
    for _ in range(STEPS):
        for bare, once in steps.items():
            before, spent, start = writer._pos, work.spent_ns, time.thread_time_ns()
            once()
            taken[bare].append(time.thread_time_ns() - start - (work.spent_ns - spent))
            size = size if bare else writer._pos - before
    writer.close()
    path.unlink()
    return Cost(float(np.median(taken[False]) - np.median(taken[True])) / 1e3, size)


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    engines = sys.argv[2:] or ("vllm", "transformers")
    print(f"{count} requests running, the probe {'in C' if NATIVE else 'in Python only'}")
    with tempfile.TemporaryDirectory() as folder:
        for name in engines:
            for role, cost in measure(name, count, Path(folder)).items():
                print(f"{name:12s} {role:7s} {cost.cpu_us:6.1f} µs of CPU and {cost.size_bytes:5d} bytes a step")


if __name__ == "__main__":
    main()
