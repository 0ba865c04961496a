"""The worker: its remote calls, and inside them input preparation, forward and sampling of each step.

It may be a process of its own (the usual case on a CPU and with several GPUs) or live in the engine core's.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from gapmeter_probe import calls, codes
from gapmeter_probe.appender import span
from gapmeter_probe.device import COPIED, FORWARD, FORWARD_END, SAMPLED, DeviceClock, open_device
from gapmeter_probe.hooks import Hook, Probe, now
from gapmeter_probe.vllm.core import describe, engine_of
from gapmeter_probe.vllm.steps import SEQ

# Bits of INPUT_PREP's n: ran as a captured graph; as one in pieces. The rest is the padded batch size.
GRAPH, PIECEWISE = 1 << 31, 1 << 30
_V1 = "vllm.v1.worker.gpu_model_runner:GPUModelRunner."
_V2 = "vllm.v1.worker.gpu.model_runner:GPUModelRunner."
_V1_OUTPUT = "vllm.v1.worker.gpu_model_runner:AsyncGPUModelRunnerOutput.__init__"
_V2_OUTPUT = "vllm.v1.worker.gpu.async_utils:AsyncOutput.__init__"
_COPY_STREAMS = ("async_output_copy_stream", "output_copy_stream")  # of Model Runner V1 and V2
_PROC = "vllm.v1.executor.multiproc_executor:WorkerProc."
_STEP = ("prefill", "decode")
_MOST = 2**32 - 1  # of a span's n


class _Local(threading.local):
    received_ns = 0


class WorkerProbe(Probe):
    """Records of a worker. The runner's methods run on the worker's main thread."""

    role = "worker"

    def __init__(self) -> None:
        super().__init__()
        self._local = _Local()
        self._separate = False  # a process of its own, that answers over a queue
        self._unanswered: deque[tuple[int, int, int] | None] = deque()
        self._call: tuple[int, int, int] | None = None  # start, step and number of the remote call in progress
        self._seq = self._last_seq = 0  # of the remote call in progress; of the latest execute_model
        self._prep = self._forward = 0
        self._padded = self._launched_ns = 0
        self._device: DeviceClock | None = None
        self._copies: Any = None  # the stream on which tokens go to the host, where it is not the model's
        self._spans: list[int] = []  # of a remote call, written at its end by the thread that ran it
        self._worker: Any = calls.native.Worker(_padded) if calls.native else None

    def make_hooks(self) -> list[Hook]:
        return [
            self.after((f"{_V1}__init__", f"{_V2}__init__"), (), self._opened, every=True),
            self.before("vllm.distributed.device_communicators.shm_broadcast:ShmRingBuffer.get_data", (), self._got),
            self._in_c(
                "EXECUTE",
                self.around("vllm.v1.worker.worker_base:WorkerWrapperBase.execute_model", _STEP, self._execute),
            ),
            self._in_c(
                "SAMPLE", self.around("vllm.v1.worker.gpu_worker:Worker.sample_tokens", ("sampling",), self._sample)
            ),
            self.before(f"{_PROC}worker_busy_loop", (), self._answers),
            self.before(f"{_PROC}shutdown", (), self.close),
            self.before("vllm.v1.engine.core:EngineCore.shutdown", (), self.close),
            self.before(f"{_PROC}handle_output", (), self._handing),
            self.after(f"{_PROC}enqueue_output", (), self._answered),
            self._in_c(
                "RUN", self.around((f"{_V1}execute_model", f"{_V2}execute_model"), _STEP, self._run, every=True)
            ),
            self._in_c(
                "SAMPLED",
                self.after((f"{_V1}sample_tokens", f"{_V2}sample_tokens"), ("sampling",), self._sampled, every=True),
            ),
            self.around(f"{_V1}_to_list", (), self._listing),
            self.after((_V1_OUTPUT, _V2_OUTPUT), (), self._copying, every=True),
            self._in_c("FORWARDING", self.around(f"{_V1}_model_forward", _STEP, self._forwarding)),
            self.before(
                (
                    "vllm.v1.worker.gpu.async_utils:StepTimingCollector.forward_start",
                    "vllm.v1.worker.gpu.model_runner:set_forward_context",
                ),
                _STEP,
                self._forwarding,
            ),
            self.before("vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager.run_fullgraph", (), self._forwarding),
            self._in_c("PADDING", self.after(f"{_V1}_determine_batch_execution_and_padding", (), self._padding_v1)),
            self.after("vllm.v1.worker.gpu.model_runner:dispatch_cg_and_sync_dp", (), self._padding_v2),
        ]

    def _in_c(self, kind: str, hook: Hook) -> Hook:
        """The same in C, where the worker is in the engine's process and has no device with a clock of its own."""
        worker = self._worker
        if worker is None:
            return hook
        fail = functools.partial(self.failed, hook.targets[0], hook.stages)
        return dataclasses.replace(
            hook, wrap=lambda original: calls.either(kind, original, worker, fail, hook.wrap(original))
        )

    def _opened(self, start: int, end: int, result: Any, args: tuple[Any, ...]) -> None:
        runner = args[0]
        version = 2 if ".gpu.model_runner" in "".join(c.__module__ for c in type(runner).__mro__) else 1
        device, graphs = str(getattr(runner, "device", "unknown")), _has_graphs(runner.vllm_config)
        parallel = {"engine": engine_of(runner.vllm_config), "rank": runner.vllm_config.parallel_config.rank}
        hip = getattr(getattr(sys.modules.get("torch"), "version", None), "hip", None)  # AMD's torch says cuda, too
        known = device.replace("cuda", "hip") if hip else device
        self.open({**describe(), **parallel, "model_runner": version, "device": known})
        if self.writer:
            self._device = open_device(self.writer, device, graphs=graphs)
            self._copies = next((s for name in _COPY_STREAMS if (s := getattr(runner, name, None)) is not None), None)
            if self._worker is not None and self._device is None and not self._separate:
                self._worker.writer = self.writer

    def close(self, *_: Any) -> None:
        if self._device:
            self._device.finish()
        if self.writer:
            self._flush()
        super().close()

    def _flush(self) -> None:
        assert self.writer is not None
        self.writer.spans(self._spans)
        self._spans.clear()

    # -- remote calls

    def _got(self, *_: Any) -> None:
        self._local.received_ns = now()

    def _answers(self, *_: Any) -> None:
        self._separate = True
        if self._worker is not None:
            self._worker.writer = None

    def _begin(self, seq: int, number: int) -> Callable[[], None]:
        if self._spans and self.writer:  # of a call that this rank did not answer: of several, only one does
            self._flush()
        self._call = (self._local.received_ns if self._separate else now(), seq, number)
        self._seq = seq
        return self._end

    def _end(self) -> None:
        self._seq = 0
        if not self._separate and self._call and self.writer:
            start, seq, number = self._call
            self._call = None
            self._spans += span(codes.WORKER, seq, start, now(), number)
            self._flush()

    def _execute(self, worker: Any, scheduled: Any, *_: Any) -> Callable[[], None] | None:
        seq = getattr(scheduled, SEQ, 0)
        if not self.writer or not seq:
            return None
        self._last_seq = seq
        return self._begin(seq, 0)

    def _sample(self, *_: Any) -> Callable[[], None] | None:
        return self._begin(self._last_seq, 1) if self.writer and self._last_seq else None

    def _handing(self, *_: Any) -> None:
        if self.writer:
            self._flush()
        self._unanswered.append(self._call)
        self._call = None

    def _answered(self, start: int, end: int, result: Any, args: tuple[Any, ...]) -> None:
        call = self._unanswered.popleft() if self._unanswered else None
        if self.writer and call:
            self.writer.span(codes.WORKER, call[1], call[0], end, call[2])

    # -- the model runner

    def _run(self, *_: Any) -> Callable[[], None] | None:
        if not self._seq or not self.writer:
            return None
        self._forward = self._padded = self._launched_ns = 0
        self._prep = now()
        if self._device:
            self._device.begin(self._seq)
        return self._ran

    def _forwarding(self, *_: Any) -> Callable[[], None] | None:
        if not self._seq or self._forward:
            return None
        self._forward = now()
        if not self._device:
            return None
        self._device.mark(FORWARD)
        return self._launched

    def _launched(self) -> None:
        """Model Runner V1 goes on to launch the logits in the same call, while a graph already runs."""
        self._launched_ns = min(now() - self._forward, _MOST)

    def _ran(self) -> None:
        seq, writer, forward = self._seq, self.writer, self._forward
        if not forward or not writer:
            return
        end = now()
        self._spans += span(codes.INPUT_PREP, seq, self._prep, forward, self._padded)
        if self._device:
            self._device.mark(FORWARD_END)
        code = codes.HOST_LAUNCH if self._device else codes.FORWARD
        self._spans += span(code, seq, forward, end, self._launched_ns)

    def _sampled(self, start: int, end: int, result: Any, args: tuple[Any, ...]) -> None:
        if self._seq and self.writer:
            self._spans += span(codes.SAMPLING, self._seq, start, end)
            if self._device:
                self._device.mark(SAMPLED)

    def _listing(self, *_: Any) -> Callable[[], None] | None:
        """Model Runner V1, synchronous: the host waits in this call until it has the tokens."""
        if not self._seq or not self._device:
            return None
        self._device.mark(SAMPLED)
        return functools.partial(self._device.mark, COPIED)  # comes at once: the copy ends some microseconds late

    def _copying(self, start: int, end: int, result: Any, args: tuple[Any, ...]) -> None:
        """The copy of the tokens has been put on its stream, and the host goes on."""
        if self._seq and self._device and self._copies is not None:
            self._device.mark(COPIED, self._copies)

    def _padding_v1(self, start: int, end: int, result: Any, args: tuple[Any, ...]) -> None:
        if self._seq:
            self._padded = _padded(result[0], result[1])

    def _padding_v2(self, start: int, end: int, result: Any, args: tuple[Any, ...]) -> None:
        if self._seq:
            self._padded = _padded(result[0].cg_mode, result[0])


def _has_graphs(config: Any) -> bool:
    mode = getattr(getattr(config, "compilation_config", None), "cudagraph_mode", None)
    return getattr(mode, "name", "NONE") != "NONE"


def _padded(mode: Any, batch: Any) -> int:
    return int(batch.num_tokens) | {"NONE": 0, "PIECEWISE": GRAPH | PIECEWISE}.get(mode.name, GRAPH)
