"""What no single key of a scenario can know: which keys go together, and how much they ask for together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gapmeter.scenarios.model import (
    DTYPES,
    MOST_REQUESTS,
    OPEN_ARRIVALS,
    RATED_ARRIVALS,
    Load,
    Scenario,
    Server,
    Workload,
)
from gapmeter.scenarios.shapes import FixedPause
from gapmeter.scenarios.values import LONGEST_NS, SECOND_NS

_SHAPE_EXAMPLES = {
    "onoff": "onoff: {on: 2s, off: 6s}",
    "ramp": "ramp: {from: 2, to: 20}",
    "steps": "steps: [{rate: 2, for: 20s}, {rate: 8, for: 20s}]",
    "diurnal": "diurnal: {day: 4m}",
    "trace": "trace: {file: trace.jsonl}",
}
_MOST_CHANGES = 1_000_000
# What means nothing to a server that we do not launch.
OF_LAUNCHED = ("server.max_batch", "server.precision", "server.args")
UNCHANGEABLE = "cannot be changed on a server that runs already; launch it, or change the load"
# By engine, the flags that keys become. None: a name that only our own requests use.
_OF_ALL = {"model": "server.model", "max_model_len": "server.max_model_len"}
_SAID_BY_KEYS: dict[str, dict[str, str | None]] = {
    "transformers": {
        **_OF_ALL, "max_batch": "server.max_batch", "precision": "server.precision", "served_model_name": None,
    },
    "vllm": {
        **_OF_ALL, "max_num_seqs": "server.max_batch", "quantization": "server.precision", "dtype": "server.precision",
        "served_model_name": None,
    },
    "simulated": {**_OF_ALL, "max_batch": "server.max_batch", "served_name": None},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class OnlyWith:
    """``key`` makes sense only while its group's mode has one of ``values``; ``remedy`` says so."""

    key: str
    values: tuple[str, ...]
    remedy: str

    @property
    def mode(self) -> str:
        """The key that decides."""
        return {"load": "load.arrivals", "workload": "workload.kind", "server": "server.engine"}[self.key.split(".")[0]]


ONLY_WITH = (
    OnlyWith("load.rate", OPEN_ARRIVALS, "a closed loop has no rate; write load.concurrency"),
    OnlyWith(
        "load.rate", (*RATED_ARRIVALS, "closed"), "ramp, steps and trace have rates or times of their own; leave it out"
    ),
    *(
        OnlyWith(f"load.{shape}", (shape,), f"only {shape} arrivals have it; write arrivals: {shape}")
        for shape in _SHAPE_EXAMPLES
    ),
    OnlyWith("load.concurrency", ("closed",), "an open loop has no users; write load.rate, or arrivals: closed"),
    OnlyWith("load.burstiness", ("gamma",), "only gamma arrivals have a burstiness; write arrivals: gamma"),
    OnlyWith("workload.file", ("file",), "only kind file reads prompts; write kind: file"),
    OnlyWith("workload.turns", ("conversation",), "only conversations have turns; write kind: conversation"),
    OnlyWith("server.url", ("attach",), "only engine attach takes an address; write engine: attach"),
    OnlyWith("server.tokenizer", ("attach",), "a model that we serve has its own; leave it out"),
    OnlyWith("server.dialect", ("attach",), "our engines know every field; leave it out"),
)


def whole_trace(load: Load) -> Load:
    """A trace without a duration lasts to its end: all of it is measured but the warm-up, auto at most 30 s."""
    if load.trace is None or load.duration_ns is not None or load.requests is not None:
        return load
    span_ns = load.trace.span_ns
    warmup_ns = min(span_ns // 11, 30 * SECOND_NS) if load.warmup_ns is None else load.warmup_ns
    return load.model_copy(update={"duration_ns": max(span_ns + 1 - warmup_ns, 1)})


def problems(scenario: Scenario) -> Iterator[tuple[str, str]]:
    """Each mistake as the key that it is reported at, and its sentence with the remedy."""
    load, workload = scenario.load, scenario.workload
    yield from _shape(load)
    yield from _loop(load)
    yield from _size(load)
    yield from _workload(workload, load)
    talks = workload.kind == "conversation"
    if load.loop == "open" and not talks and load.think_time != FixedPause(0):
        yield "load.think_time", "an open loop has no users who think; leave it out"
    if talks and load.trace is not None:
        yield "load.arrivals", "a trace has requests, no conversations; write for instance arrivals: poisson"
    if scenario.server.engine == "attach" and scenario.server.url is None:
        yield "server.url", "missing; engine attach needs an address, for instance http://127.0.0.1:8000"
    yield from _args(scenario.server)


def _args(server: Server) -> Iterator[tuple[str, str]]:
    """Flags that say again, perhaps otherwise, what a key or another spelling says."""
    if len(server.flags) < len(server.args):
        yield "server.args", f"two of {', '.join(server.args)} are one flag; remove one"
    for name, key in _SAID_BY_KEYS.get(server.engine, {}).items():
        if name not in server.flags or (name == "dtype" and server.precision not in DTYPES):
            continue
        said = f"{key} says, and figures go by that; write it there" if key else "requests call the model; leave it out"
        yield "server.args", f"{name} is what {said}"


def _shape(load: Load) -> Iterator[tuple[str, str]]:
    if load.arrivals == "gamma" and load.burstiness is None:
        yield "load.burstiness", "missing; write for instance burstiness: 4 (1 is Poisson, more comes in bursts)"
    if load.arrivals in _SHAPE_EXAMPLES and getattr(load, load.arrivals) is None:
        yield f"load.{load.arrivals}", f"missing; write for instance {_SHAPE_EXAMPLES[load.arrivals]}"
    if load.requests is None:
        return
    if load.ramp is not None and load.ramp.over_ns is None:
        yield "load.ramp", "a ramp over so many requests needs its own time; write for instance over: 60s"
    if load.ramp is not None and not load.ramp.end:
        yield "load.ramp", "it ends with no requests at all; write load.duration instead of load.requests"
    if load.steps is not None and not load.steps[-1].rate:
        yield "load.steps", "the last one has no requests at all; write load.duration instead of load.requests"


def _loop(load: Load) -> Iterator[tuple[str, str]]:
    if load.arrivals in RATED_ARRIVALS and load.rate is None:
        yield "load.rate", "missing; write how many requests per second arrive, for instance rate: 8"
    if load.loop == "closed" and load.concurrency is None:
        yield "load.concurrency", "missing; write how many users ask, for instance concurrency: 16"
    if load.duration_ns is None and load.requests is None:
        yield "load.duration", "missing; write how long to measure, for instance duration: 75s, or requests: 500"
    if load.loop == "closed" and load.requests is not None and load.warmup_ns:
        yield "load.warmup", "a closed loop of so many requests warms up by requests; write auto or 0"
    if load.concurrency is not None and load.processes > load.concurrency:
        yield "load.processes", f"{load.processes} processes cannot share {load.concurrency} users; write fewer"


def _size(load: Load) -> Iterator[tuple[str, str]]:
    """How much it all is: every request is planned before the run, and so is every change of the rate."""
    first = highest = load.rate or 0.0  # the first rate is the warm-up's
    key, warmup_s = "load.rate", (load.warmup_ns or 0) / SECOND_NS
    if load.ramp is not None:
        first, highest, key = load.ramp.start, max(load.ramp.start, load.ramp.end), "load.ramp"
    if load.steps is not None:
        first, highest, key = load.steps[0].rate, max(step.rate for step in load.steps), "load.steps"
    if load.trace is not None and load.trace.loop:
        first, highest, key = load.trace.rate, load.trace.rate, "load.trace"
    if load.longest_ns is not None:
        seconds = load.longest_ns / SECOND_NS
        if first * warmup_s + highest * seconds > MOST_REQUESTS:
            yield key, f"rate times duration is more than {MOST_REQUESTS:,} requests; write less of either"
        if load.longest_ns > LONGEST_NS:
            text = "the trace lasts more than 30 days at this speed; write a higher speed, or load.duration"
            yield "load.trace", text
    else:
        seconds = (load.requests or 0) / load.rate if load.rate else 0.0
        if first * warmup_s + (load.requests or 0) > MOST_REQUESTS:
            yield "load.warmup", f"with it there are more than {MOST_REQUESTS:,} requests; write a shorter one"
        if seconds * SECOND_NS > LONGEST_NS:
            days = f"{seconds / 86400:,.0f} days"
            yield "load.requests", f"{load.requests:,} at {load.rate:g} a second take {days}; write fewer"
    seconds += warmup_s
    if load.onoff is not None and 2e9 * seconds / (load.onoff.on_ns + load.onoff.off_ns) > _MOST_CHANGES:
        yield "load.onoff", f"the rate changes more than {_MOST_CHANGES:,} times; write longer on and off"
    if load.diurnal is not None and 1e9 * seconds * len(load.diurnal.hours) / load.diurnal.day_ns > _MOST_CHANGES:
        yield "load.diurnal", f"the rate changes more than {_MOST_CHANGES:,} times; write a longer day"


def _workload(workload: Workload, load: Load) -> Iterator[tuple[str, str]]:
    own = workload.file
    if workload.shared_prefixes > 1 and not workload.shared_prefix:
        yield "workload.shared_prefixes", "nothing is shared; write for instance shared_prefix: 0.5"
    if workload.kind == "file" and own is None:
        yield "workload.file", "missing; write for instance file: prompts.jsonl"
    if own is not None and (workload.prompt_tokens is not None or workload.shared_prefix):
        key = "prompt_tokens" if workload.prompt_tokens is not None else "shared_prefix"
        yield f"workload.{key}", "a prompt file already fixes this; remove it"
    if load.trace is not None:
        if workload.shared_prefix and load.trace.recorded.blocks:
            text = "the trace's hash_ids say which text repeats; remove it, or hash_ids from the trace"
            yield "workload.shared_prefix", text
        return
    if own is not None:
        silent = next((entry.line for entry in own.entries if entry.max_tokens is None), None)
        if silent is not None and workload.output_tokens is None:
            yield "workload.output_tokens", f"missing, and {own.path}:{silent} has no max_tokens; write either"
        return
    for name, example in (("prompt_tokens", 96), ("output_tokens", 32)):
        if getattr(workload, name) is None:
            yield f"workload.{name}", f"missing; write how many tokens, for instance {name}: {example}"
