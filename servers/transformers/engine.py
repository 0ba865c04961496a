"""The engine process: a model, Transformers' continuous batching around it, and the socket to the API process.

Run as ``-m gapmeter.servers.transformers.engine FD SETTINGS``. The manager's own thread generates; this module gives it
a mailbox to take requests from and to put outputs into, and waits for the end.
"""

from __future__ import annotations

import gc
import json
import math
import os
import platform
import queue
import random
import select
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic_ns as now
from typing import Any

import torch
import transformers
from gapmeter_probe.hooks import install
from gapmeter_probe.writer import PROBE_DIR
from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.continuous_api import BackgroundThreadStatus, OutputRouter
from transformers.generation.continuous_batching.requests import RequestStatus

from gapmeter.servers.engine_client import Channel, Message
from gapmeter.servers.models import RANDOM_WEIGHTS_KEY, has_weights
from gapmeter.servers.transformers import TransformersSettings
from gapmeter.servers.transformers.probe import EngineProbe
from gapmeter.servers.transformers.sampling import MinTokens, Noise, Temperature

_from_config: Any = AutoModelForCausalLM.from_config
_SEED_BITS = 63
_FREE_SHARE = 0.85  # the scheduler admits no prompt into the last 15 % of its cache
_MOST_KV_TOKENS = 131_072  # beyond this, say so with --kv-tokens: on a CPU the attention mask grows with it, too
_WARMING = "warm-up-"  # how the ids of such requests begin
_WARM_UP = ((4, 4), (96, 4), (1, 8), (300, 2))  # prompt and output tokens of the requests before the first real one


class CannotServe(RuntimeError):
    """The model cannot be served as asked; the message says why and what to do."""


@dataclass(slots=True)
class OpenRequest:
    """A request in the engine: the tokens that end it, and how many of its tokens were sent."""

    end_tokens: frozenset[int]
    sent: int = 0


class Mailbox(OutputRouter):
    """Stands where Transformers' manager keeps its input queue, its wake-up event and its output router: the socket.

    The generation loop itself takes requests from it between steps and sends outputs from where they are made: no
    thread of ours competes with it for the interpreter or, on a single core, for the core. ``take`` turns a message
    into the manager's own calls, ``stats`` goes along with outputs, and ``lose_api`` is called when nobody listens any
    more. Outputs of other requests than those in ``open`` (the warm-up's) go where Transformers puts them.
    """

    def __init__(
        self, channel: Channel, probe: EngineProbe, take: Callable[[Message], None],
        stats: Callable[[], tuple[int | None, ...]], lose_api: Callable[[], None],
    ) -> None:  # fmt: skip
        super().__init__()
        self._channel, self._probe = channel, probe
        self._take, self._stats, self._lose_api = take, stats, lose_api
        self._states: deque[Any] = deque()
        self._poll = select.poll()
        self._poll.register(channel.socket, select.POLLIN)
        self.open: dict[str, OpenRequest] = {}

    # -- the input queue

    def empty(self) -> bool:
        """Read what has come; ``take`` leads to ``put`` by the manager's own ``add_request``."""
        self._probe.looking()
        for message in self._channel.receive():
            self._take(message)
        if self._channel.closed:
            self._lose_api()
        return not self._states

    def get_nowait(self) -> Any:
        """The oldest new request. Raises queue.Empty."""
        if not self._states:
            raise queue.Empty
        return self._states.popleft()

    def put(self, state: Any, block: bool = True, timeout: float | None = None) -> None:
        self._states.append(state)

    # -- the wake-up event

    def wait(self, timeout: float | None = None) -> bool:
        """Sleep until a message comes, or ``timeout`` seconds."""
        self._probe.idling()
        woken = bool(self._poll.poll(None if timeout is None else timeout * 1000))
        self._probe.woken(now() if woken else 0)
        return woken

    def set(self) -> None:
        """Nothing to do: who has something to say writes to the socket."""

    def clear(self) -> None:
        """Nothing to do: reading the socket clears it."""

    # -- the output router

    def deliver(self, output: Any) -> None:
        self.deliver_batch([output])

    def deliver_batch(self, outputs: list[Any]) -> None:
        """Send what is new in ``outputs`` (cumulative, as Transformers gives them) as one message a step."""
        start = now()
        entries, emitted, over = [], [], []
        for output in outputs:
            request = self.open.get(output.request_id)
            if request is None:  # the warm-up's, or one that was cancelled and is in its last step
                if output.request_id.startswith(_WARMING):
                    super().deliver(output)
                continue
            ids = output.generated_tokens[request.sent :]
            request.sent += len(ids)
            reason, error = None, ""
            if output.status == RequestStatus.FINISHED:
                reason = "stop" if ids and ids[-1] in request.end_tokens else "length"
            elif output.status == RequestStatus.FAILED:
                reason, error = "error", output.error or "failed"
            entries.append((output.request_id, ids, reason, self._probe.cached(output.request_id), error))
            emitted.append((output.request_id, len(ids)))
            if reason:
                del self.open[output.request_id]
                over.append((output.request_id, reason, request.sent))
        if entries:
            self._probe.emitting(start, emitted)
            try:
                self._channel.send_and_wait("outputs", entries, self._stats())
            except ConnectionError:
                self._lose_api()
            self._probe.emitted(start, over)


class TransformersEngine:
    """Transformers' manager of continuous batching, its queues replaced."""

    def __init__(self, channel: Channel, settings: TransformersSettings) -> None:
        self._channel = channel
        self._settings = settings
        self._probe = EngineProbe()
        self._draw = random.Random(settings.seed)
        self._api_gone = False
        if os.environ.get(PROBE_DIR):
            install([self._probe])
        self._model = load_model(settings)
        self._end_tokens = _end_tokens(self._model)
        defaults: Any = GenerationConfig(do_sample=False, eos_token_id=-1)  # type: ignore[no-untyped-call]
        self._manager: Any = self._model.init_continuous_batching(
            generation_config=defaults, continuous_batching_config=batching_config(settings, self._model.device.type)
        )
        manager = self._manager
        graphs = any(manager.continuous_batching_config.cuda_graph_booleans)
        ours = [MinTokens(graphs, sorted(self._end_tokens)), Temperature(graphs), Noise(graphs)]
        processors = manager.logit_processor
        processors.logits_processor.extend(ours)
        processors.tensors_required += len(ours)
        processors.do_processing = True
        processors._retrieve_processors_kwargs()
        self._mailbox = Mailbox(channel, self._probe, self._take, self._stats, self._lose_api)
        manager.input_queue = manager._wake_up_loop = manager.output_router = self._mailbox

    def run(self) -> int:
        """Warm up, say that we are ready, and serve until the socket closes or a signal asks us to stop."""
        manager = self._manager
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._stop())
        manager.warmup()
        manager.start()
        try:
            self._warm_up()
            gc.collect()
            gc.freeze()
            versions = {"transformers": transformers.__version__, "torch": torch.__version__}
            versions["python"] = platform.python_version()
            head = {"server": "transformers", "versions": versions}
            self._probe.begin(head, self._describe(), manager.batch_processor, self._model.device)
            self._channel.send_and_wait("ready", self._stats())
            while manager.is_running():
                manager._generation_thread.join(0.5)
        finally:
            self._stop()
            if manager.is_running():
                manager._generation_thread.join(5)
            self._probe.close()
        error = manager.background_thread_status.fatal_error
        if error is not None and not self._api_gone:
            self._channel.send_and_wait("failed", f"{type(error).__name__}: {error}")
            return 1
        return 0

    def _stop(self) -> None:
        if self._manager.is_running():
            self._manager.background_thread_status.request_stop(BackgroundThreadStatus.HARD_STOP, 0)

    # -- on the generation thread

    def _take(self, message: Message) -> None:
        name, engine_id, *rest = message
        if name == "cancel":
            request = self._mailbox.open.pop(engine_id, None)
            if request:
                scheduler = self._manager.batch_processor.scheduler
                scheduler.block_new_requests = False  # set by an eviction; Transformers resets it where one finishes
                if (state := scheduler.active_requests.get(engine_id)) is not None:
                    state.status = RequestStatus.FINISHED  # a step in flight passes it over: its blocks are about to go
                self._manager.cancel_request(engine_id)
                self._probe.cancelled(engine_id, request.sent)
            return
        prompt_ids, max_tokens, min_tokens, ignore_eos, temperature, seed, sent_ns = rest
        self._probe.arrived(engine_id, len(prompt_ids), sent_ns)
        ends = frozenset() if ignore_eos else self._end_tokens
        self._mailbox.open[engine_id] = OpenRequest(ends)
        self._manager.add_request(
            prompt_ids, engine_id, max_tokens, streaming=True, eos_token_id=sorted(ends) or -1, temperature=temperature,
            seed=self._draw.getrandbits(_SEED_BITS) if seed is None else seed,
            min_length=len(prompt_ids) + min_tokens if ends else 0,
        )  # fmt: skip

    def _lose_api(self) -> None:
        """The API process is gone: nobody is left to generate for."""
        self._api_gone = True
        self._stop()

    def _stats(self) -> tuple[int | None, ...]:
        processor = self._manager.batch_processor
        scheduler, cache = processor.scheduler, processor.cache
        free = self._probe.free_blocks = round(cache.compute_free_capacity() * cache.num_blocks)
        return (
            len(scheduler.active_requests), len(scheduler.waiting_requests), cache.num_blocks, free,
            self._manager.current_batch, self._probe.preemptions,
        )  # fmt: skip

    # -- before the first request

    def _warm_up(self) -> None:
        """What torch and the model do once only, on shapes like those to come."""
        manager, longest = self._manager, self._settings.max_model_len
        vocabulary = self._model.config.get_text_config().vocab_size
        for number, (prompt, output) in enumerate(_WARM_UP):
            output = min(output, longest - 1)
            ids = [(7 * at + number) % vocabulary for at in range(min(prompt, longest - output))]
            for twin in range(1 + number % 2):
                manager.add_request(ids, f"{_WARMING}{number}-{twin}", output, temperature=0.5 * number, seed=1)
            left = 1 + number % 2
            while left:
                output = manager.get_result(timeout=1)
                if output is not None and output.is_finished():
                    left -= 1
                    if output.error:
                        raise CannotServe(f"the model failed on its first request: {output.error}")
                elif not manager.is_running():
                    error = manager.background_thread_status.fatal_error
                    raise CannotServe(f"the generation loop ended: {type(error).__name__}: {error}")

    def _describe(self) -> dict[str, Any]:
        manager, model = self._manager, self._model
        on_cuda = model.device.type == "cuda"
        config = manager.continuous_batching_config
        return {
            "scheduler": {
                "max_num_seqs": config.max_requests_per_batch, "max_num_batched_tokens": config.max_batch_tokens,
                "policy": config.scheduler_type, "class": type(manager.batch_processor.scheduler).__name__,
                "enable_chunked_prefill": True, "async_scheduling": bool(config.use_async_batching),
                "safety_margin": manager.batch_processor.scheduler.safety_margin,
            },
            "cache": {
                "block_size": config.page_size, "num_blocks": manager.batch_processor.cache.num_blocks,
                "enable_prefix_caching": manager.batch_processor.cache.use_prefix_sharing,
            },
            "model": {
                "model": self._settings.model, "dtype": str(model.dtype).removeprefix("torch."),
                "max_model_len": self._settings.max_model_len, "attention": model.config._attn_implementation,
                "parameters": sum(p.numel() for p in model.parameters()),
                "seed": self._settings.seed,
            },
            "device": torch.cuda.get_device_name(model.device) if on_cuda else f"cpu ({platform.machine()})",
            "graphs": list(config.cuda_graph_booleans),
            "threads": torch.get_num_threads(),
        }  # fmt: skip


def load_model(settings: TransformersSettings) -> Any:
    """The model on its device; one without weights gets random ones, drawn on the device from the seed that it names.

    Raises CannotServe.
    """
    folder = Path(settings.model)
    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, settings.precision)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    try:
        config = AutoConfig.from_pretrained(folder)
        if has_weights(folder):
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
        else:
            torch.manual_seed(getattr(config, RANDOM_WEIGHTS_KEY))
            with torch.device(device):
                model = _from_config(config, dtype=dtype, attn_implementation="sdpa")
        return model.to(device).eval()
    except (OSError, ValueError, KeyError, torch.OutOfMemoryError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise CannotServe(f"{folder} cannot be loaded: {type(error).__name__}: {reason}") from error


def batching_config(settings: TransformersSettings, device: str) -> ContinuousBatchingConfig:
    """How Transformers is to batch. On a CPU the cache must be sized for it: it would claim most of the memory.

    Raises CannotServe when a single request of full length would not fit into the cache.
    """
    tokens = settings.kv_tokens or min(
        _MOST_KV_TOKENS, math.ceil(settings.max_batch * settings.max_model_len / _FREE_SHARE)
    )
    blocks = math.ceil(max(tokens, settings.max_model_len / _FREE_SHARE) / settings.page_size) + 1
    if settings.kv_tokens and settings.kv_tokens < settings.max_model_len:
        raise CannotServe(
            f"--kv-tokens {settings.kv_tokens} cannot hold one request of {settings.max_model_len} tokens; "
            "raise it or lower --max-model-len"
        )
    sized = device == "cpu" or settings.kv_tokens > 0
    return ContinuousBatchingConfig(
        page_size=settings.page_size,
        num_blocks=blocks if sized else None,
        max_batch_tokens=max(settings.max_batch_tokens, settings.max_batch) if device == "cpu" else None,
        max_requests_per_batch=settings.max_batch,
        scheduler_type=settings.scheduler,
        allow_block_sharing=settings.prefix_cache,
        use_async_batching=settings.async_batching,
        use_cuda_graph=settings.cuda_graphs,
        seed=settings.seed,
    )


def _end_tokens(model: Any) -> frozenset[int]:
    ends = model.generation_config.eos_token_id
    if ends is None:
        ends = model.config.get_text_config().eos_token_id
    return frozenset([ends] if isinstance(ends, int) else ends or ())


def main() -> int:
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        return TransformersEngine(channel, TransformersSettings(**json.loads(sys.argv[2]))).run()
    except CannotServe as error:
        channel.send_and_wait("failed", str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main())
