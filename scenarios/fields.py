"""Every key that a scenario may have, once: what it means, how it is written, what it is when left out.

The parser, the JSON Schema and the documentation are all made from this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from gapmeter.scenarios.prompt_files import prompts
from gapmeter.scenarios.shapes import diurnal, onoff, ramp, steps, trace
from gapmeter.scenarios.slo import slos
from gapmeter.scenarios.sweeping import SAME_FOR_ALL, sweep
from gapmeter.scenarios.thinking import pause
from gapmeter.scenarios.values import (
    MOST_RATE,
    Type,
    arguments,
    choice,
    duration,
    flag,
    lengths,
    positive,
    precision,
    share,
    text,
    url,
    whole,
)

REQUIRED: Final = object()


@dataclass(frozen=True, slots=True)
class Field:
    """One key. ``default`` is spelled as in a file; None means unset, REQUIRED that a file must say."""

    key: str
    type: Type
    default: Any
    doc: str

    @property
    def section(self) -> str:
        return self.key.rpartition(".")[0]

    @property
    def leaf(self) -> str:
        return self.key.rpartition(".")[2]


SECTIONS = {
    "server": "Who answers.",
    "workload": "What is asked.",
    "load": "How it is asked.",
    "telemetry": "What is watched meanwhile.",
    "cost": "What serving costs.",
}

_NAME = text("a name", "chat-p99", r"^[a-z0-9][a-z0-9._-]{0,99}$")
_WORDS = text("text", "a line of text")
_COUNT = 2_000_000

_ALONE: tuple[Field, ...] = (
    Field("name", _NAME, None, "Names the scenario in its run's folder; the file's own name when left out."),
    Field(
        "summary",
        text("a line of text", "one sentence", r"^(\S(.*\S)?)?$"),
        "",
        "One line that says which question this scenario answers.",
    ),
    Field(
        "server.engine",
        choice(("transformers", "vllm", "attach", "simulated")),
        "transformers",
        "transformers and vllm are launched; attach asks a server that already runs at server.url; "
        "simulated is a server of known stage times that proves the measurement itself.",
    ),
    Field("server.model", _WORDS, "builtin:tiny", "builtin:NAME, a folder, or a hub id."),
    Field("server.precision", precision(), "float32", "float32, bfloat16, float16, or a word of the engine's own."),
    Field(
        "server.emulation",
        choice(("refuse", "mark")),
        "refuse",
        "What happens when the device has no native arithmetic of that precision: refuse ends the run before it "
        "begins, mark runs it and marks every result as emulated.",
    ),
    Field(
        "server.max_batch",
        whole("a batch size", 1, 65536, 8),
        8,
        "The engine's cap on requests that run together.",
    ),
    Field(
        "server.max_model_len",
        whole("a context length", 2, 10_000_000, 2048),
        None,
        "Cap on prompt and output tokens of one request; longer prompts are cut to fit. The model's own when left out.",
    ),
    Field("server.args", arguments(), {}, "Further engine flags by name, passed through and recorded."),
    Field("server.url", url(), None, "The address of a running server; engine attach only."),
    Field("server.tokenizer", _WORDS, None, "Folder or hub id of the served model's tokenizer; engine attach only."),
    Field(
        "server.dialect",
        choice(("full", "plain")),
        "full",
        "full asks for exact output lengths and running token counts (vLLM's fields ignore_eos, min_tokens and "
        "continuous_usage_stats); plain leaves these out for servers that refuse them; engine attach only.",
    ),
    Field("server.ready_timeout", duration(least_ns=1), "10m", "How long a launched server may take until it answers."),
    Field(
        "workload.kind",
        choice(("chat", "completion", "conversation", "file")),
        "chat",
        "chat asks /v1/chat/completions with one user message, completion asks /v1/completions. conversation: several "
        "turns of one user, each with all that was said before it; load.rate is then conversations per second, and a "
        "closed loop's users hold one conversation after another. file: "
        "prompts of your own.",
    ),
    Field(
        "workload.prompt_tokens",
        lengths(),
        None,
        "Prompt length in the served model's tokens, the chat template's own included; in a conversation that of each "
        "question as if it were asked alone. Left out only where a trace gives it.",
    ),
    Field(
        "workload.output_tokens",
        lengths(),
        None,
        "Length of the answer in tokens. Left out only where a trace gives it.",
    ),
    Field(
        "workload.file",
        prompts(),
        None,
        "JSON lines with prompt or messages, and max_tokens where output_tokens does not say it (kind file only), "
        "asked in their order, again from the start when they end.",
    ),
    Field("workload.turns", lengths(), 1, "How many turns a conversation has (conversation only)."),
    Field("workload.shared_prefix", share(), 0.0, "Share of each prompt that is the same text in every request."),
    Field(
        "workload.shared_prefixes",
        whole("a number of texts", 1, 100_000, 4),
        1,
        "How many such shared texts there are; each request begins with one of them, drawn evenly.",
    ),
    Field(
        "workload.temperature",
        share(most=2),
        0.0,
        "Sampling temperature; 0 takes the likeliest token, so that equal requests get equal answers.",
    ),
    Field("load.generator", choice(("asyncio", "locust")), "asyncio", "What issues the requests."),
    Field(
        "load.arrivals",
        choice(("constant", "poisson", "gamma", "onoff", "ramp", "steps", "diurnal", "trace", "closed")),
        "poisson",
        "closed: each of load.concurrency users asks again when answered. All others are open loops: arrivals do not "
        "wait for answers. onoff, ramp, steps, diurnal and trace have a shape under their own name.",
    ),
    Field(
        "load.rate",
        positive("a rate", "requests per second", "20", least=1e-5, most=MOST_RATE),
        None,
        "Requests per second (open loop): the mean where the rate changes by chance or through a day. ramp, steps and "
        "trace have rates or times of their own.",
    ),
    Field(
        "load.burstiness",
        positive(
            "a burstiness", "squared coefficient of variation of the gaps; 1 is Poisson", "4", least=0.001, most=1000
        ),
        None,
        "Squared coefficient of variation of the gaps between arrivals (gamma only): 1 is Poisson, above 1 comes in "
        "bursts, below 1 is steadier. It is 1 / shape, the inverse of what vLLM's bench calls burstiness.",
    ),
    Field(
        "load.onoff",
        onoff(),
        None,
        "Bursts (onoff only): the rate is high and low in turn, each for an exponential time with mean on and off; "
        "quiet is the low rate as a share of the high one. Their mean over time is load.rate.",
    ),
    Field(
        "load.ramp",
        ramp(),
        None,
        "Requests per second from and to (ramp only), in a straight line over the measured part, or over a time after "
        "which the rate stays.",
    ),
    Field(
        "load.steps", steps(), None, "Rates one after the other, each for a time; the last one holds on (steps only)."
    ),
    Field(
        "load.diurnal",
        diurnal(),
        None,
        "A day's curve compressed into a time, again and again (diurnal only): swing around load.rate with its peak at "
        "an hour, or hours with relative rates through the day.",
    ),
    Field(
        "load.trace",
        trace(),
        None,
        "Requests recorded elsewhere, issued at their own times, speed times as fast (trace only): JSON lines with "
        "timestamp (ms), input_length, output_length and hash_ids, or a CSV with TIMESTAMP, ContextTokens and "
        "GeneratedTokens. Lengths that the workload does not give are the trace's.",
    ),
    Field("load.concurrency", whole("a number of users", 1, 100_000, 16), None, "Users of the closed loop."),
    Field(
        "load.think_time",
        pause(),
        0,
        "From an answer's end until the same user's next request: in a closed loop, and between the turns of a "
        "conversation.",
    ),
    Field("load.duration", duration(least_ns=1), None, "How long the measured part lasts; or load.requests."),
    Field(
        "load.requests",
        whole("a number of requests", 1, _COUNT, 500),
        None,
        "How many requests are measured; or load.duration.",
    ),
    Field(
        "load.warmup",
        duration(auto=True),
        "auto",
        "Load before the measured part, on top of it. auto: a tenth of the measured part, 2 s to 30 s "
        "(closed loop of so many requests: two for each user).",
    ),
    Field(
        "load.timeout",
        duration(least_ns=1),
        "60s",
        "How long after it was due an answer is awaited; one that takes longer counts as failed.",
    ),
    Field(
        "load.stall",
        duration(least_ns=1),
        None,
        "How long a stream that has begun may bring no token before it is given up as stalled; never when left out. "
        "The wait for the first token has no limit but load.timeout.",
    ),
    Field(
        "load.retries",
        whole("a number of retries", 0, 100, 2),
        0,
        "How often a request is issued again that was refused, answered 5xx, 408, 425 or 429, or cut or timed out "
        "before anything had come. Every attempt is a record; latency counts from when the first was due.",
    ),
    Field(
        "load.retry_pause",
        duration(),
        "500ms",
        "From a failed attempt's end until the next one is due; doubled each time, up to 8 s.",
    ),
    Field(
        "load.traceparent",
        flag(),
        False,
        "Whether requests carry a traceparent header (W3C Trace Context), so that the server's own OpenTelemetry spans "
        "stand under ours.",
    ),
    Field("load.processes", whole("a number of processes", 1, 1024, 1), 1, "Generator processes that share the plan."),
    Field(
        "load.placement",
        choice(("auto", "shared")),
        "auto",
        "auto gives the generator cores of its own where the machine has enough; shared lets generator and server "
        "use all of them, which suits a server of several processes on a small machine.",
    ),
    Field(
        "telemetry.hz",
        share(most=100),
        10,
        "How often a second GPU, CPU energy and the server's processes are sampled; 0 switches telemetry off.",
    ),
    Field(
        "telemetry.metrics_every",
        duration(),
        "1s",
        "How often the engine's /metrics page is asked for, which costs its API server; 0 for never.",
    ),
    Field(
        "cost.gpu",
        text("a device's name", "H100-SXM"),
        None,
        "The device that is paid for, by a name of the catalogue; the machine's own when left out.",
    ),
    Field(
        "cost.usd_per_hour",
        positive("a price", "USD per hour", "2.49", least=1e-6, most=1e6),
        None,
        "Price of one GPU for an hour, or of the whole server where there is none; the catalogue's when left out.",
    ),
    Field(
        "cost.gpus_per_replica",
        whole("a number of GPUs", 1, 4096, 1),
        None,
        "GPUs that serve together as one replica; as many as the engine's flags split the model over when left out.",
    ),
    Field(
        "cost.utilisation",
        share(above_zero=True),
        0.8,
        "Share of the rate that holds the SLOs which the service is planned to carry.",
    ),
    Field("slo", slos(), [], "Limits that must hold, for instance ttft p99 <= 500 ms or errors <= 1 %."),
    Field("seed", whole("a seed", 0, 2**63 - 1, 1), 1, "Everything random in the plan follows from it."),
    Field(
        "repeat",
        whole("a number of repeats", 1, 1000, 3),
        1,
        "How often the same trace is run, each time with fresh text.",
    ),
)

FIELDS: tuple[Field, ...] = (
    *_ALONE,
    Field(
        "sweep",
        sweep({field.key: field.type for field in _ALONE if field.key not in SAME_FOR_ALL}),
        [],
        "Runs the scenario at many points: a mapping of keys to lists (every combination), or a list of mappings. The "
        "server is started anew only where one of its keys changes; repeat runs every point so often.",
    ),
)

BY_KEY: dict[str, Field] = {field.key: field for field in FIELDS}
