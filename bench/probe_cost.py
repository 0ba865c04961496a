"""What the vLLM probe itself costs: CPU time of its hooks for each engine step, in each process.

The hooks wrap functions that do nothing, with objects of vLLM's shapes, so what is left is the probe: no model, no
noise of one. ``python bench/probe_cost.py [running requests]`` prints a line for each process.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gapmeter_probe.hooks import Probe
from gapmeter_probe.vitals import CoreWaits
from gapmeter_probe.vllm.api import ApiProbe, Call, Generation
from gapmeter_probe.vllm.core import SEQ, CoreProbe
from gapmeter_probe.vllm.worker import WorkerProbe
from gapmeter_probe.writer import RecordWriter

STEPS = 2_000


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


def hooked(probe: Probe, bare: bool) -> Callable[[str, Callable[..., Any]], Callable[..., Any]]:
    """A function that wraps another as the probe wraps vLLM's of that name; not at all when ``bare``."""

    def wrap(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        for hook in probe.hooks():
            if not bare and any(target.endswith((f".{name}", f":{name}")) for target in hook.targets):
                function = hook.wrap(function)
        return function

    return wrap


def core(count: int, writer: RecordWriter, bare: bool) -> Callable[[], None]:
    probe, engine = CoreProbe(), Holder(running=list(range(count)))
    probe._waits = CoreWaits(writer)
    probe.writer, probe._scheduler, probe._free_blocks = writer, engine, lambda: 100
    ids = [f"chatcmpl-request-{n}-abcdef01" for n in range(count)]
    probe._requests = {name: (n + 1, 10) for n, name in enumerate(ids)}
    wrap = hooked(probe, bare)
    output = Scheduled(dict.fromkeys(ids, 1), Running(ids, [50] * count))
    done = {0: Outputs([Output(name, [1]) for name in ids])}
    setattr(output, SEQ, 1)
    future = Future()
    look = wrap("_process_input_queue", lambda engine: None)
    schedule = wrap("schedule", lambda scheduler: output)
    execute = wrap("execute_model", lambda executor, output: future)
    sample = wrap("sample_tokens", lambda executor, grammar: future)
    update = wrap("update_from_output", lambda scheduler, output, tokens: done)
    put = wrap("post_step", lambda engine, ran: None)
    encode = wrap("encode_into", lambda encoder, outputs: None)
    send = wrap("_send_msg_tracking_payload", lambda socket: None)

    def engine_step(engine: Any) -> Any:
        execute(engine, schedule(engine))
        sample(engine, None)
        return update(engine, output, None), True

    step = wrap("step", engine_step)
    loop = wrap("_process_engine_step", lambda engine: (step(engine), put(engine, True)))

    def once() -> None:
        look(engine)
        loop(engine)
        encode(engine, done[0])
        send(engine)

    return once


def worker(writer: RecordWriter, bare: bool) -> Callable[[], None]:
    probe = WorkerProbe()
    probe.writer, probe._separate = writer, True
    wrap = hooked(probe, bare)
    got = wrap("get_data", lambda ring: None)
    forward = wrap("_model_forward", lambda runner: None)
    hand, answer = wrap("handle_output", lambda proc: None), wrap("enqueue_output", lambda proc: None)
    scheduled = Scheduled({}, Running([], []))
    setattr(scheduled, SEQ, 1)
    run = next(h for h in probe.hooks() if h.every and h.targets[0].endswith("GPUModelRunner.execute_model"))
    call = next(h for h in probe.hooks() if h.targets[0].endswith("WorkerWrapperBase.execute_model"))
    runner: Callable[..., Any] = (lambda runner: forward(runner)) if bare else run.wrap(lambda runner: forward(runner))
    execute: Callable[..., Any] = (lambda w, s: runner(w)) if bare else call.wrap(lambda w, s: runner(w))
    sampled = next(h for h in probe.hooks() if h.targets[0].endswith("GPUModelRunner.sample_tokens"))
    asked = next(h for h in probe.hooks() if h.targets[0].endswith("Worker.sample_tokens"))
    inner: Callable[..., Any] = (lambda runner: None) if bare else sampled.wrap(lambda runner: None)
    sample: Callable[..., Any] = (lambda w: inner(w)) if bare else asked.wrap(lambda w: inner(w))

    works: tuple[Callable[[], Any], ...] = (lambda: execute(None, scheduled), lambda: sample(None))

    def once() -> None:
        for work in works:
            got(None)
            work()
            hand(None)
            got(None)
            answer(None)

    return once


def api(count: int, writer: RecordWriter, bare: bool) -> Callable[[], None]:
    probe = ApiProbe()
    probe.writer, probe._waits = writer, CoreWaits(writer)
    ids = [f"chatcmpl-request-{n}-abcdef01" for n in range(count)]
    collectors, calls = [Holder(name) for name in ids], []
    for n, name in enumerate(ids):
        call = Call(0, "")
        call.opened = True
        call.generations = [Generation(n + 1, State(collectors[n]))]
        probe._generations[name] = call.generations[0]
        calls.append(call)
    wrap = hooked(probe, bare)
    message = Outputs([Output(name, [1]) for name in ids])
    decode = wrap("decode", lambda decoder, frames: message)
    put = wrap("put", lambda collector, output: None)
    nowait = wrap("get_nowait", lambda collector: None)

    async def get_result(collector: Any) -> Any:
        return None

    async def send_nothing(cycle: Any, message: Any) -> None:
        return None

    get, send = wrap("get", get_result), wrap("send", send_nothing)
    body = {"type": "http.response.body", "body": b'data: {"choices": []}\n\n'}

    def put_all(processor: Any, outputs: Any) -> None:
        for collector in collectors:
            put(collector, None)

    process = wrap("process_outputs", put_all)
    cycles = [SimpleNamespace(gapmeter_call=call) for call in calls]

    async def deliver() -> None:
        for cycle, collector in zip(cycles, collectors, strict=True):
            nowait(collector)
            await get(collector)
            await send(cycle, body)

    def once() -> None:
        decode(None, None)
        process(None, message.outputs)
        coroutine = deliver()
        try:
            coroutine.send(None)
        except StopIteration:
            return

    return once


def cost_us(make: Callable[[RecordWriter, bool], Callable[[], None]], folder: Path) -> tuple[float, float]:
    """CPU time of the hooks in µs a step, and bytes recorded a step.

    The least of seven attempts on either side: what else runs on the machine can only add.
    """
    taken, size = {True: float("inf"), False: float("inf")}, 0.0
    for attempt in range(7):
        for bare in (True, False):
            writer = RecordWriter(folder / f"{make.__name__}-{attempt}-{bare}.gap", {})
            once = make(writer, bare)
            for _ in range(200):
                once()
            before, start = writer._pos, time.thread_time_ns()
            for _ in range(STEPS):
                once()
            taken[bare] = min(taken[bare], time.thread_time_ns() - start)
            size = (writer._pos - before) / STEPS
            writer.close()
    return (taken[False] - taken[True]) / STEPS / 1e3, size


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    asyncio.set_event_loop(asyncio.new_event_loop())
    made = {
        "core": lambda writer, bare: core(count, writer, bare),
        "worker": worker,
        "api": lambda writer, bare: api(count, writer, bare),
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, make in made.items():
            make.__name__ = name
            us, size = cost_us(make, Path(folder))
            print(f"{name:7s} {us:6.1f} µs of CPU and {size:5.0f} bytes a step, {count} requests running")


if __name__ == "__main__":
    main()
