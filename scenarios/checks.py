"""What no single key of a scenario can know: which keys go together, and how much they ask for together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gapmeter.scenarios.distributions import FixedPause
from gapmeter.scenarios.durations import LONGEST_NS, SECOND_NS
from gapmeter.scenarios.model import MOST_REQUESTS, RATED_ARRIVALS, UNRATED_ARRIVALS, Load, Scenario, Telemetry

_SHAPE_EXAMPLES = {
    "onoff": "onoff: {on: 2s, off: 6s}",
    "ramp": "ramp: {from: 2, to: 20}",
    "steps": "steps: [{rate: 2, for: 20s}, {rate: 8, for: 20s}]",
    "diurnal": "diurnal: {day: 4m}",
    "trace": "trace: {file: trace.jsonl}",
}
_LONGEST_TRACE_WARMUP_NS = 30 * SECOND_NS

_OFTEN_NS = 50_000_000
_MOST_CHANGES = 1_000_000


@dataclass(frozen=True, slots=True)
class Rule:
    """``key`` makes sense only while ``mode`` has one of ``values``; ``remedy`` says so."""

    key: str
    mode: str
    values: tuple[str, ...]
    remedy: str


ONLY_WITH = (
    Rule(
        "load.rate",
        "load.arrivals",
        (*RATED_ARRIVALS, *UNRATED_ARRIVALS),
        "a closed loop has no rate; write load.concurrency",
    ),
    Rule(
        "load.rate",
        "load.arrivals",
        (*RATED_ARRIVALS, "closed"),
        "ramp, steps and trace have rates or times of their own; leave it out",
    ),
    *(
        Rule(f"load.{shape}", "load.arrivals", (shape,), f"only {shape} arrivals have it; write arrivals: {shape}")
        for shape in ("onoff", "ramp", "steps", "diurnal", "trace")
    ),
    Rule(
        "load.concurrency",
        "load.arrivals",
        ("closed",),
        "an open loop has no users; write load.rate, or arrivals: closed",
    ),
    Rule("workload.file", "workload.kind", ("file",), "only kind file reads prompts; write kind: file"),
    Rule(
        "workload.turns", "workload.kind", ("conversation",), "only conversations have turns; write kind: conversation"
    ),
    Rule(
        "load.burstiness", "load.arrivals", ("gamma",), "only gamma arrivals have a burstiness; write arrivals: gamma"
    ),
    Rule("server.url", "server.engine", ("attach",), "only engine attach takes an address; write engine: attach"),
    Rule("server.tokenizer", "server.engine", ("attach",), "a model that we serve has its own; leave it out"),
    Rule("server.dialect", "server.engine", ("attach",), "our engines know every field; leave it out"),
)

Problem = tuple[str, str]


def whole_trace(load: Load) -> Load:
    """A trace without a duration lasts to its end: all of it is measured but the warm-up, auto at most 30 s."""
    if load.trace is None or load.duration_ns is not None or load.requests is not None:
        return load
    span_ns = load.trace.span_ns
    auto_ns = min(span_ns // 11, _LONGEST_TRACE_WARMUP_NS)
    warmup_ns = auto_ns if load.warmup_ns is None else load.warmup_ns
    return load.model_copy(update={"duration_ns": max(span_ns + 1 - warmup_ns, 1)})


def problems(scenario: Scenario) -> Iterator[Problem]:
    """Each mistake as the key that it is told at, and its sentence with the remedy."""
    yield from _shape(scenario.load)
    yield from _loop(scenario.load)
    yield from _size(scenario.load)
    yield from _periods(scenario.load)
    yield from _sampled(scenario.telemetry)
    yield from _lengths(scenario)
    yield from _users(scenario)
    if scenario.server.engine == "attach" and scenario.server.url is None:
        yield "server.url", "missing; engine attach needs an address, for instance http://127.0.0.1:8000"


def _loop(load: Load) -> Iterator[Problem]:
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


def _shape(load: Load) -> Iterator[Problem]:
    if load.arrivals == "gamma" and load.burstiness is None:
        yield "load.burstiness", "missing; write for instance burstiness: 4 (1 is Poisson, more comes in bursts)"
    if load.arrivals in _SHAPE_EXAMPLES and getattr(load, load.arrivals) is None:
        yield f"load.{load.arrivals}", f"missing; write for instance {_SHAPE_EXAMPLES[load.arrivals]}"
    if load.ramp is not None and load.ramp.over_ns is None and load.requests is not None:
        yield "load.ramp", "a ramp over so many requests needs its own time; write for instance over: 60s"
    if load.requests is not None and load.ramp is not None and not load.ramp.end:
        yield "load.ramp", "it ends with no requests at all; write load.duration instead of load.requests"
    if load.requests is not None and load.steps is not None and not load.steps[-1].rate:
        yield "load.steps", "the last one has no requests at all; write load.duration instead of load.requests"


def _size(load: Load) -> Iterator[Problem]:
    if load.duration_ns is None:
        yield from _unending(load)
        return
    if load.duration_ns > LONGEST_NS:
        yield "load.trace", "the trace lasts more than 30 days at this speed; write a higher speed, or load.duration"
    highest, key = load.rate or 0.0, "load.rate"
    if load.ramp is not None:
        highest, key = max(load.ramp.start, load.ramp.end), "load.ramp"
    if load.steps is not None:
        highest, key = max(step.rate for step in load.steps), "load.steps"
    if highest * load.duration_ns / 1e9 > MOST_REQUESTS:
        yield key, f"rate times duration is more than {MOST_REQUESTS:,} requests; write less of either"


def _unending(load: Load) -> Iterator[Problem]:
    """So many requests at so low a rate."""
    days = (load.requests or 0) / load.rate / 86400 if load.rate else 0.0
    if days > 30:
        yield "load.requests", f"{load.requests:,} at {load.rate:g} a second take {days:,.0f} days; write fewer"


def _periods(load: Load) -> Iterator[Problem]:
    """A rate that changes all the time is drawn change by change, before the run."""
    seconds = load.duration_ns / 1e9 if load.duration_ns else (load.requests or 0) / load.rate if load.rate else 0.0
    if load.onoff is not None and 2e9 * seconds / (load.onoff.on_ns + load.onoff.off_ns) > _MOST_CHANGES:
        yield "load.onoff", f"the rate changes more than {_MOST_CHANGES:,} times; write longer on and off"
    if load.diurnal is not None and 1e9 * seconds * len(load.diurnal.hours) / load.diurnal.day_ns > _MOST_CHANGES:
        yield "load.diurnal", f"the rate changes more than {_MOST_CHANGES:,} times; write a longer day"


def _sampled(telemetry: Telemetry) -> Iterator[Problem]:
    """How often is often: nothing within a run, or a load of its own."""
    if 0 < telemetry.hz < 0.01:
        yield (
            "telemetry.hz",
            f"{telemetry.hz:g} times a second is less than once in a run; write 0.01 or more, 0 for none",
        )
    if 0 < telemetry.metrics_every_ns < _OFTEN_NS:
        yield "telemetry.metrics_every", "so often is a load of its own; write 50ms or more, or 0 for never"


def _users(scenario: Scenario) -> Iterator[Problem]:
    """Whose think times these are, and how conversations begin."""
    load, talks = scenario.load, scenario.workload.kind == "conversation"
    if load.loop == "open" and not talks and load.think_time != FixedPause(0):
        yield "load.think_time", "an open loop has no users who think; leave it out"
    if talks and load.trace is not None:
        yield (
            "load.arrivals",
            "a trace has requests, no conversations; write for instance arrivals: poisson",
        )


def _own_prompts(scenario: Scenario) -> Iterator[Problem]:
    own, workload = scenario.workload.file, scenario.workload
    if own is None:
        yield "workload.file", "missing; write for instance file: prompts.jsonl"
        return
    if workload.prompt_tokens is not None or workload.shared_prefix:
        key = "prompt_tokens" if workload.prompt_tokens is not None else "shared_prefix"
        yield f"workload.{key}", "the prompts of a file are what they are; leave it out"
    silent = next((entry.line for entry in own.entries if entry.max_tokens is None), None)
    if silent is not None and workload.output_tokens is None and scenario.load.trace is None:
        yield "workload.output_tokens", f"missing, and {own.path}:{silent} has no max_tokens; write either"


def _lengths(scenario: Scenario) -> Iterator[Problem]:
    if scenario.workload.shared_prefixes > 1 and not scenario.workload.shared_prefix:
        yield "workload.shared_prefixes", "nothing is shared; write for instance shared_prefix: 0.5"
    own = scenario.workload.file
    if scenario.workload.kind == "file":
        yield from _own_prompts(scenario)
    if scenario.load.trace is not None or own is not None:
        return
    examples = {"prompt_tokens": 96, "output_tokens": 32}
    for name, example in examples.items():
        if getattr(scenario.workload, name) is None:
            yield f"workload.{name}", f"missing; write how many tokens, for instance {name}: {example}"
