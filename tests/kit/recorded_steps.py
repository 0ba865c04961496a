"""Runs the vLLM probe's hooks over functions and objects of vLLM's shapes: ``python recorded_steps.py FILE [python]``.

With ``python`` the probe's C module is hidden first. The last line says whether it was used.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import struct
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

if "python" in sys.argv[2:]:
    sys.modules["gapmeter_probe._native"] = None  # type: ignore[assignment]

from gapmeter_probe import calls
from gapmeter_probe.hooks import Probe
from gapmeter_probe.records import Outcome
from gapmeter_probe.vllm.api import ApiProbe, Call, Generation
from gapmeter_probe.vllm.core import CoreProbe
from gapmeter_probe.vllm.worker import WorkerProbe
from gapmeter_probe.writer import NATIVE, RecordWriter

Function = Callable[..., Any]


class Queue(deque[int]):
    """vLLM's queue of requests that wait is a deque with a length of its own."""

    def __len__(self) -> int:
        return super().__len__()


def wrapped(probe: Probe, name: str, function: Function) -> Function:
    for hook in probe.hooks():
        if any(target.endswith((f".{name}", f":{name}")) for target in hook.targets):
            function = hook.wrap(function)
    return function


def engine(writer: RecordWriter) -> None:
    """Two prompts, one in chunks, decoding, an eviction, an empty step, futures that come late, what nobody expects."""
    probe = CoreProbe()
    probe.writer = probe._steps.writer = writer
    loop = SimpleNamespace(running=[1, 2], waiting=Queue([3]), has_work=lambda: False, requests={})
    probe._scheduler = probe._steps.scheduler = loop
    probe._steps.blocks = SimpleNamespace(num_free_blocks=77)
    requests = {name: SimpleNamespace(request_id=name, num_prompt_tokens=size) for name, size in (("a", 4), ("b", 10))}
    for request in requests.values():
        wrapped(probe, "add_request", lambda *_: None)(None, request)
        loop.requests[request.request_id] = SimpleNamespace(num_tokens=request.num_prompt_tokens)
    look = wrapped(probe, "_process_input_queue", lambda core: None)
    put, encode = wrapped(probe, "post_step", lambda core, ran: None), wrapped(probe, "encode_into", lambda *_: None)
    send = wrapped(probe, "_send_msg_tracking_payload", lambda *_: None)
    sample = wrapped(probe, "sample_tokens", lambda executor, grammar: executor)
    late: Future[int] = Future()
    done: Future[int] = Future()
    done.set_result(1)
    executed = iter([late, done, 5, done, done, done, done, done])
    execute = wrapped(probe, "execute_model", lambda executor, output: next(executed))

    def step(
        fresh: list[tuple[str, int, int]], running: list[tuple[str, int, int]], made: list[tuple[str, int]]
    ) -> None:
        tokens = {name: count for name, count, _ in fresh + running}
        output = SimpleNamespace(
            num_scheduled_tokens=tokens, total_num_scheduled_tokens=sum(tokens.values()),
            scheduled_new_reqs=[SimpleNamespace(req_id=n, num_computed_tokens=before) for n, _, before in fresh],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[n for n, _, _ in running], num_computed_tokens=[before for _, _, before in running]
            ),
        )  # fmt: skip
        message = SimpleNamespace(
            outputs=[SimpleNamespace(request_id=n, new_token_ids=[0] * count) for n, count in made]
        )
        outputs = {0: message} if made else {}

        def one(core: Any) -> Any:
            scheduled = wrapped(probe, "schedule", lambda scheduler: output)(loop)
            execute(None, scheduled)
            sample(done, None)
            return wrapped(probe, "update_from_output", lambda *_: outputs)(loop, scheduled, None)

        look(loop)

        def whole(core: Any) -> None:
            wrapped(probe, "step", one)(core)
            put(core, True)

        wrapped(probe, "_process_engine_step", whole)(loop)
        if made:
            encode(None, message, None)
            send(None)

    step([("a", 4, 0), ("b", 6, 0)], [], [("a", 1)])
    step([], [("a", 1, 4), ("b", 4, 6)], [("a", 1), ("b", 2)])
    late.set_result(1)
    wrapped(probe, "_preempt_request", lambda *_: None)(loop, requests["b"])
    step([], [("a", 1, 5)], [("a", 1), ("b", 0)])
    step([], [("a", 1, 6), ("b", 10, 2)], [("a", 1), ("b", 1)])
    requests["a"].status, requests["a"].num_output_tokens = SimpleNamespace(name="FINISHED_STOPPED"), 4
    wrapped(probe, "_free_request", lambda *_: None)(loop, requests["a"])
    loop.running = []
    step([], [("b", 1, 10)], [("a", 1), ("b", 1)])
    step([], [], [])
    encode(None, object(), None)  # of no step
    send(None)
    for _ in range(40):  # no loop around them, as where vLLM answers within its caller's process
        output = SimpleNamespace(
            num_scheduled_tokens={"b": 1}, total_num_scheduled_tokens=1, scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(req_ids=["b"], num_computed_tokens=[20]),
        )  # fmt: skip
        wrapped(probe, "schedule", lambda scheduler, output=output: output)(loop)
        wrapped(probe, "update_from_output", lambda *_: {})(loop, output, None)
    step([], [("nobody", 1, 3)], [])  # our own failure: told once, and the engine goes on
    step([], [("nobody", 1, 3)], [])


class Collector:
    def __init__(self, request_id: str) -> None:
        self.request_id, self.output = request_id, None

    def put(self, output: Any) -> None:
        self.output = output

    async def get(self) -> Any:
        await asyncio.sleep(0)
        taken, self.output = self.output, None
        return taken

    def get_nowait(self) -> Any:
        taken, self.output = self.output, None
        return taken


class Cycle:
    gapmeter_call: Call | None = None

    async def send(self, message: Any) -> str:
        await asyncio.sleep(0)
        if message.get("body") == b"gone":
            raise ConnectionError
        return "written"


async def written(
    cycle: Cycle, collector: Collector, get: Function, nowait: Function, send: Function, *bodies: bytes
) -> None:
    """These pieces of an answer one after the other; some stand for the taking of an output."""
    for body in bodies:
        if body == b"data: get":
            await get(collector)
        elif body == b"data: now":
            nowait(collector)
            nowait(collector)
        else:
            with contextlib.suppress(ConnectionError):
                assert await send(cycle, {"body": body}) == "written"


def api(writer: RecordWriter) -> None:
    """One answer, then two choices of one request; chunks that carry nothing, several tokens, or come too late."""
    probe = ApiProbe()
    probe.writer = probe._answers.writer = writer

    put, get = wrapped(probe, "put", Collector.put), wrapped(probe, "get", Collector.get)
    nowait, send = wrapped(probe, "get_nowait", Collector.get_nowait), wrapped(probe, "send", Cycle.send)
    choices = [("one", ["one"]), ("two", ["two-0", "two-1"])]
    for ref, (name, engine_ids) in enumerate(choices, 1):
        collector, call, cycle = Collector(name), Call(1, name), Cycle()
        cycle.gapmeter_call = call
        for index, engine_id in enumerate(engine_ids):
            generation = Generation(10 * ref + index, SimpleNamespace(queue=collector, request_index=index))
            call.generations.append(generation)
            probe._generations[engine_id] = generation

        def message(*counts: int, over: str | None = None, ids: list[str] = engine_ids) -> Any:
            made = zip(ids, counts, strict=False)
            return SimpleNamespace(
                outputs=[
                    SimpleNamespace(request_id=n, new_token_ids=[0] * count, finish_reason=over) for n, count in made
                ]
            )

        def deliver(message: Any, collector: Collector = collector) -> None:
            def all_of_them(processor: Any, outputs: Any) -> None:
                for output in outputs:
                    part = SimpleNamespace(index=int(output.request_id[-1] == "1"), token_ids=output.new_token_ids)
                    put(collector, SimpleNamespace(outputs=[part]))

            wrapped(probe, "decode", lambda *_: message)(None)
            wrapped(probe, "process_outputs", all_of_them)(None, message.outputs)

        write = functools.partial(written, cycle, collector, get, nowait, send)
        asyncio.run(write(b'data: {"role": "assistant"}'))
        deliver(message(1, 1))
        asyncio.run(write(b"data: get", b"data: {}", b"data: [DONE]"))
        deliver(message(3, 1))
        asyncio.run(write(b"data: now", b"data: {}", b"data: {}", b""))
        deliver(message(1, 2, over="stop"))
        asyncio.run(write(b"data: {}", b"data: get", b"gone", b"data: {}"))
        deliver(message(1))  # of a request that is over
    cycle.gapmeter_call = None
    asyncio.run(write(b"data: {}"))


def worker(writer: RecordWriter) -> None:
    """Steps of a worker in the engine's process, one that fails, one without a number; padded in two ways."""
    probe = WorkerProbe()
    probe.writer = writer
    if probe._worker is not None:
        probe._worker.writer = writer
    modes = {name: SimpleNamespace(name=name) for name in ("NONE", "FULL")}
    pad = wrapped(probe, "_determine_batch_execution_and_padding", lambda mode, batch: (mode, batch, None))
    forward = wrapped(probe, "_model_forward", lambda runner: None)

    def run_model(runner: Any, mode: str, tokens: int, outcome: str) -> str:
        if tokens:
            pad(modes[mode], SimpleNamespace(num_tokens=tokens))
        if outcome != "nothing to run":
            forward(runner)
            forward(runner)
        if outcome == "fails":
            raise ValueError(outcome)
        return outcome

    run = wrapped(probe, "GPUModelRunner.execute_model", run_model)
    execute = wrapped(probe, "WorkerWrapperBase.execute_model", lambda _, scheduled, *how: run(None, *how))
    sampled = wrapped(probe, "GPUModelRunner.sample_tokens", lambda runner: "tokens")
    sample = wrapped(probe, "Worker.sample_tokens", lambda _: sampled(None))
    assert execute(None, SimpleNamespace(), "NONE", 3, "unnumbered") == "unnumbered"
    assert sample(None) == "tokens"
    for seq, how in enumerate([("NONE", 3, "a"), ("FULL", 8, "b"), ("FULL", 4, "c"), ("NONE", 0, "nothing to run")], 1):
        assert execute(None, SimpleNamespace(gapmeter_seq=seq), *how) == how[2]
        assert sample(None) == "tokens"
    with contextlib.suppress(ValueError):
        execute(None, SimpleNamespace(gapmeter_seq=9), "NONE", 2, "fails")
        raise AssertionError("the runner's own failure is the caller's")


def main(path: str) -> None:
    writer = RecordWriter(path, {})
    engine(writer)
    worker(writer)
    api(writer)
    stamps = calls.Stamps(3)
    thing = SimpleNamespace()
    calls.note(lambda one, two: two, stamps, 0, 1)(1, thing)
    assert 0 < stamps[0] <= stamps[1] and stamps[2] == id(thing)
    writer.counts(Outcome.OK, 1, 2, 3, 4, 5)
    writer.blob(3, [b"some", b"bytes"])
    writer.spans([])
    writer.step(1, 99, [], running=1, waiting=2, free_blocks=3, schedule_ns=4, padded=5)
    for refused in (  # what fits into no record leaves none, and no hole
        functools.partial(writer.counts, Outcome.OK, 1, 2, 3, -4, 5),
        functools.partial(writer.spans, [40, 2, 1, 1, -1, 1, 1, 1]),
        functools.partial(writer.emit, 1, 2, [(1, -1)]),
        functools.partial(writer.step, 1, 98, [(1, -1, 0, 0, 0)], running=1, waiting=2, free_blocks=3, schedule_ns=4),
    ):
        with contextlib.suppress(OverflowError, struct.error):
            refused()
            raise AssertionError("a number below 0 was recorded")
    for code in range(3000):  # beyond the first reserved part of the file, many times over
        writer.emit(code, code + 1, [(n, 1) for n in range(500)])
    writer.close()
    writer.span(1, 2, 3, 4)
    print("native" if NATIVE else "python")


if __name__ == "__main__":
    main(sys.argv[1])
