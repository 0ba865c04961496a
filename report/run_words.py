"""What a run's documents say beside the sentences of ``words``: who was asked what, answers, failures, the machine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from gapmeter.analysis.numbers import bounds, count, duration, over, share, usd
from gapmeter.analysis.provenance import engine_words, load_words
from gapmeter.analysis.results.distribution import percentile_key
from gapmeter.analysis.results.manifest import Manifest
from gapmeter.analysis.results.requests import FailureExample
from gapmeter.analysis.results.run import INCONCLUSIVE, INVALID, PASS, RunResult, SloAnswer
from gapmeter.report import marks, words

_FAILED = {
    "refused": "refused the connection",
    "timeout": "not complete in time",
    "stalled": "stalled mid-stream",
    "cut": "cut off",
    "http_4xx": "answered 4xx",
    "http_5xx": "answered 5xx",
    "malformed": "answered badly",
    "wrong_length": "answered without a token",
    "tls": "TLS failed",
    "aborted": "aborted with the run",
    "lost": "lost with the load generator",
}


def as_sentence(text: str) -> str:
    """With a capital (p99 stays p99) and a full stop."""
    first = text if text[1:2].isdigit() else text[:1].upper() + text[1:]
    return stopped(first)


def stopped(text: str) -> str:
    return text if not text or text.endswith((".", "!", "?")) else f"{text}."


# --- the verdict


def verdict(result: RunResult) -> str:
    """The SLO that decided it, or why there is none."""
    if result.verdict == INVALID:
        return "Not valid as a measurement."
    telling = next((slo for slo in result.slo if slo.status == result.verdict), None)
    if telling is None:
        return "Measured; the scenario sets no SLO."
    told, many = as_sentence(words.slo_sentence(telling)), len(result.slo)
    return told if result.verdict != PASS or many == 1 else f"{many} of {many} SLOs met; the first: {told}"


def owner(result: RunResult) -> str:
    """What slow requests wait for beyond typical ones, and whose it is; "" without a ledger that tells."""
    metric = result.tail.metric
    found = result.tail.of(metric) if metric else None
    return as_sentence(words.tail_sentence(found, metric, result.device)) if found and metric else ""


def upgrade(result: RunResult) -> str:
    """The most that an infinitely fast device could bring; "" where that cannot be told."""
    return as_sentence(next(iter(words.upgrade_sentences(result).values()), ""))


def cost_at_most(result: RunResult) -> str:
    """The figure, where there is one."""
    cost = result.cost
    if cost.per_request_usd is None:
        return ""
    output = cost.per_million_output_tokens_usd_ci
    tokens = f", a million output tokens {usd(output[1])}" if output else ""
    many, _ = words.many_requests(cost.per_request_usd)
    who, costs = ("a million requests", "cost") if many > 1 else ("a request", "costs")
    return f"At this SLA {who} {costs} at most {usd(many * cost.per_request_usd)}{tokens}."


def confidence(result: RunResult) -> str:
    share_sure = 100 * result.confidence.verdict
    return f"Met and missed are each said at {share_sure:g} % confidence (one side of the 95 % interval)."


def steady(result: RunResult) -> str:
    """Whether there was a steady state, and how the first seconds differed."""
    measured, offered = result.counts.measured, result.load.requested_rate
    steady_state = words.steady_sentence(result.steady, measured=measured, offered=offered)
    parts = (steady_state, words.drift_sentence(result.drift))
    return " ".join(as_sentence(part) for part in parts if part)


# --- what was asked of whom


def target(manifest: Manifest) -> str:
    """What was loaded: engine and its version, model, precision, batch cap; of a foreign server, where it is."""
    server = manifest.scenario["server"]
    parts: list[str | None]
    if server["engine"] == "attach":
        parts = [manifest.target.url, manifest.target.model]
    else:
        parts = [engine_words(manifest), server.get("model"), server.get("precision")]
        parts.append(f"max batch {server['max_batch']}" if server.get("max_batch") else None)
    return " · ".join(str(part) for part in parts if part)


def load(result: RunResult) -> str:
    """How it was loaded: rate and loop, how long, how many requests are behind the figures."""
    return f"{load_words(result.load)}, n = {count(result.counts.measured)}"


def closed_loop(result: RunResult) -> str:
    """What a closed loop's figures are not; "" for an open loop."""
    return as_sentence(words.closed_loop_sentence(result.closed_loop)) if result.closed_loop else ""


# --- objectives


def slo_value(slo: SloAnswer) -> str:
    """What was measured for an SLO."""
    if slo.unit == "share":
        return share(slo.value)
    return "never" if slo.infinite else duration(slo.value)


def slo_interval(slo: SloAnswer) -> str:
    """Its 95 % interval; one end where there is only one."""
    if slo.unit == "share":
        return f"{share(slo.low)} .. {share(slo.high)}"
    if slo.low is not None and slo.high is None:
        return f"above {duration(slo.low)}"
    return bounds(slo.low, slo.high)


def slo_note(slo: SloAnswer) -> str:
    """What the slow ones wait for, or what it would take to decide."""
    if slo.status == INCONCLUSIVE:
        if slo.needs is None:
            return "too close to decide"
        minutes = slo.needs.minutes
        return (
            f"needs ~{minutes:.0f} min more"
            if minutes and minutes >= 1
            else f"needs {count(slo.needs.requests)} more requests"
        )
    if slo.status == INVALID:
        return "never occurred"
    return marks.words(slo.stage) if slo.stage else ""


# --- failures


def failed_class(name: str) -> str:
    return _FAILED.get(name, name)


def failed(result: RunResult) -> str:
    """How many failed, and how; "" when none did."""
    if not result.failures:
        return ""
    total = sum(found.count for found in result.failures)
    told = ", ".join(f"{count(found.count)} {failed_class(found.name)}" for found in result.failures)
    return f"{count(total)} of {count(result.counts.measured)}: {told}"


def censored(result: RunResult) -> str:
    """What the highest usual percentiles become when failures count; "" when nothing failed."""
    at_ms = result.metrics_censored["ttft"].censored_at_ms
    if at_ms is None:
        return ""
    told = [_censored(result, metric) for metric in ("ttft", "e2e")]
    return f"with these as at least {over(at_ms).removeprefix('> ')}: {', '.join(told)}"


def _censored(result: RunResult, metric: str) -> str:
    """The highest percentile that the sample supports."""
    with_them, without = result.metrics_censored[metric], result.metrics[metric]
    for p in (99.0, 95.0, 90.0, 50.0):
        key = percentile_key(p)
        if with_them.ms(p) is not None or key in with_them.over_ms:
            text = over(with_them.over_ms[key]) if key in with_them.over_ms else duration(with_them.ms(p))
            alone = without.ms(p)
            return f"{metric.upper()} {key} {text}" + (f" ({duration(alone)} over successes)" if alone else "")
    return f"{metric.upper()} not estimable"


def status(example: FailureExample) -> str:
    return str(example.status) if example.status else "no answer"


def error(example: FailureExample) -> str:
    """A server's own sentence where it came as JSON (``{"error": {"message": …}}``), else all that it sent."""
    try:
        told = json.loads(example.error)
    except ValueError:
        return example.error
    for key in ("error", "message"):
        if isinstance(told, dict):
            told = told.get(key, told)
    return told if isinstance(told, str) and told else example.error


# --- where it ran


def cores(numbers: Sequence[int] | None) -> str:
    """By their numbers, which begin with 0."""
    return f"core{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}" if numbers else ""


_WHOSE = {
    "transformers": "Transformers' own continuous batching, behind gapmeter's own HTTP server (not transformers serve)",
    "simulated": "gapmeter's simulated engine: its times are given, and stand for no real one",
}


def where_it_ran(manifest: Manifest) -> list[tuple[str, str]]:
    """The machine, the cores and the versions; what is not known is left out."""
    hardware, git = manifest.hardware, manifest.git
    versions: Mapping[str, str] = {**manifest.versions, **(manifest.target.versions or {})}
    facts = [
        ("started", manifest.started_wall),
        ("server", manifest.target.url),
        ("whose server", _WHOSE.get(manifest.scenario["server"]["engine"], "")),
        ("processor", f"{hardware.cpu}, {hardware.cores} cores"),
        ("memory", f"{hardware.memory_gib} GiB"),
        ("GPU", ", ".join(hardware.gpus) or "none"),
        ("system", hardware.system),
        ("load generator ran on", cores(manifest.placement.generator)),
        ("server ran on", cores(manifest.placement.server)),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("commit", f"{git.commit[:12]}{' with changes' if git.changed else ''}" if git else ""),
    ]
    return [(name, value) for name, value in facts if value]
