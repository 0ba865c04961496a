"""What a reader should know beside the rules of validity: each with its likely cause, and the flag to try."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from gapmeter.analysis.judge.steady import Warmup
from gapmeter.analysis.judge.words import SHARED, STRANGERS, growth_text, held_by, outage_text, speed_words
from gapmeter.analysis.ledger.cores import Culprit
from gapmeter.analysis.ledger.device_time import forwards_and_window, host_bound, launched_in
from gapmeter.analysis.ledger.ledger import Ledger
from gapmeter.analysis.ledger.portions import answered
from gapmeter.analysis.ledger.trace import Trace
from gapmeter.analysis.numbers import count, counted, duration, plain, share
from gapmeter.analysis.requests.metrics import elapsed_ns, resent_once
from gapmeter.analysis.results.device import GpuSamples, Telemetry
from gapmeter.analysis.results.manifest import Manifest
from gapmeter.analysis.results.requests import Attempts, LoadFacts, Outage
from gapmeter.analysis.results.run import APPROXIMATE, Supported
from gapmeter.analysis.results.trust import Drift, RunWarning, Steady
from gapmeter.analysis.stages import column
from gapmeter.scenarios.slo import LATENCIES

_HOST_BOUND = 0.2  # of the forwards' time, so that it may be a good part of what requests wait
STARVED = 0.03  # of all time to first or last tokens, waited for a core; of that, had by one process
_WORTH_SAYING = 0.01  # of the requests
_CACHED_BEYOND = 0.1  # of the prompts' tokens, beside what the workload repeats: a template, and whole blocks
_UNANSWERED_NS = 900_000_000  # a little less than the second after which TCP asks again (RFC 6298)
_THROTTLED, _CLOCKS_FELL, _NEARLY_FULL, _MANY_GAPS, _DEAR_METRICS = 0.01, 0.03, 0.98, 0.1, 0.02


# Of several doubts those about what the server did, or the scenario asks, come first; then these, in this order.
_LATER = (
    "prompt_length", "cores", "machine", "client_cpu", "token_rate", "request_rate", "lag", "loop_lag", "plan",
    "no-probe", "approximate", "missing-hook",
)  # fmt: skip


def most_telling_first(warnings: Iterable[RunWarning]) -> tuple[RunWarning, ...]:
    """The warnings in the order in which a reader should meet them: the terminal shows one."""
    return tuple(sorted(warnings, key=lambda one: _LATER.index(one.code) if one.code in _LATER else -1))


def _warning(code: str, text: str, cause: str, flag: str = "", touches: tuple[str, ...] = LATENCIES) -> RunWarning:
    return RunWarning(code=code, text=text, cause=cause, flag=flag, touches=touches)


def recording_warnings(
    trace: Trace | None, ledger: Ledger, manifest: Manifest, requests: pd.DataFrame, window: tuple[int, int] | None
) -> Iterator[RunWarning]:
    """Warnings of the plan, of turns never sent, of an emulated precision, of what the probe could not stamp.

    ``window`` as from ``measured_window``.
    """
    for note in manifest.plan.notes:
        yield _warning("plan", note, "", touches=("prompt_tokens",))
    if lost := int((requests["outcome"] == "abandoned").sum()):
        text = f"{counted(lost, 'turn')} never sent, because an earlier turn of the conversation failed"
        cause = "users give up after the first failure; the load was less than planned"  # which flatters whoever failed
        yield _warning("abandoned", text, cause, touches=("load",))
    yield from emulation_warning(manifest)
    if trace is None:
        text = "the server's stages are unmeasured"
        cause = "no server process wrote probe records; only gapmeter's own and a vLLM with its probe do"
        flag = "GAPMETER_PROBE_DIR=DIR when that starts, and --probe-dir DIR"
        yield _warning("no-probe", text, cause, flag, ("stages",))
        return
    if not ledger.refused:
        mine = np.tile(requests["measured"].to_numpy(np.bool_)[answered(requests)], 2)  # two rows a request
        yield from core_warning(ledger.rows[mine], ledger.core_holders)
    yield from lost_switches_warning(trace)
    yield from support_warnings(ledger.support)
    yield from hook_warnings(trace.notes)
    yield from device_warnings(trace, window)


def hook_warnings(notes: Iterable[Mapping[str, Any]]) -> Iterator[RunWarning]:
    """What a probe could not stamp: its hook found nothing, or failed itself."""
    for found in notes:
        if found.get("type") != "missing":
            continue
        stages, hook = tuple(found.get("stages", ())), found.get("hook", "a hook")
        why, cause = f"{hook} is not in this version", "the engine's version moved or renamed it"
        if error := found.get("error"):
            why, cause = f"the probe failed in {hook}: {error}", "the engine's version may have changed what it reads"
        yield _warning("missing-hook", f"unmeasured: {', '.join(stages) or 'nothing'} ({why})", cause, touches=stages)


def lost_switches_warning(trace: Trace) -> Iterator[RunWarning]:
    """Where it is unknown who had the cores, because the kernel's records of it could not be read in time."""
    if not trace.cores.lost_share:
        return
    text = (
        f"who had the server's cores is unknown: in {share(trace.cores.lost_share)} of the time the kernel's records of"
        " it were lost; a wait for a core counts for the stage that waited"
    )
    cause = "the sampler had no core to read them, because others used the server's all the time; or it ended early"
    yield _warning("switches-lost", text, cause, touches=("stages", "tail"))


def device_warnings(trace: Trace, window: tuple[int, int] | None) -> Iterator[RunWarning]:
    """What a device did not tell of its steps, and why; what of its forwards may have been its host's.

    ``window``: of which steps, ns; None: of none.
    """
    said = [note for note in trace.notes if note.get("type") == "warning"]
    window = window or (0, 0)
    launched, untimed = launched_in(trace, window)
    if lost := len(untimed):
        steps = f"{count(lost)} of {count(len(launched))} steps"
        text = f"the device reported no times for {steps}: their time is unexplained"
        errors = [str(note.get("error")) for note in said if str(note.get("what", "")).startswith("device timing")]
        cause = errors[-1] if errors else "the server was killed, or closed before the device was done"
        yield _warning("device-untimed", text, cause, touches=("prefill", "decode", "launch_gap"))
    found, inside = forwards_and_window(trace, window)
    lasted, bound = (found.end - found.start) * inside, host_bound(found) & inside
    for kind in (found.prompts, ~found.prompts):
        if (found.busy_ns[kind] >= 0).any():
            bound &= ~kind
    if lasted[bound].sum() >= _HOST_BOUND * lasted.sum() > 0:
        part = share(float(lasted[bound].sum() / lasted.sum()))
        least = ", but for the least that the GPU's peaks allow" if found.least_ns[bound].any() else ""
        text = f"for {part} of the forwards' time the GPU only kept up with its host: that counts as the host's{least}"
        cause = "kernels were launched one by one; how long they ran was not sampled"
        yield _warning("host-bound", text, cause, "GAPMETER_PROBE_KERNELS=100", ("prefill", "decode", "launch_gap"))
    for note in said:
        if note.get("what") == "kernel sampling ended":
            yield _warning("no-kernels", "kernels were not sampled", str(note.get("error")), touches=())


def support_warnings(support: Sequence[Supported]) -> Iterator[RunWarning]:
    """What the ledger knows only approximately of a server that was such."""
    for one in support:
        if one.level == APPROXIMATE:
            detail = f" ({one.detail})" if one.detail else ""
            yield _warning(
                "approximate", f"approximate with {one.feature}{detail}: {one.text}", "", touches=one.touches
            )


def emulation_warning(manifest: Manifest) -> Iterator[RunWarning]:
    """What a result must say whose precision its device only emulates."""
    support = manifest.target.precision
    if support is not None and support.emulated:
        text = f"emulated: {support.device} has no native {support.precision} arithmetic"
        flag = f"--set server.precision={next(iter(support.supported), 'float32')}"
        yield _warning("emulated", text, "its speed and cost say nothing about a device that has it", flag)


def core_warning(rows: pd.DataFrame, core_holders: Mapping[Culprit, int]) -> Iterator[RunWarning]:
    """Where waiting for a core is a notable part of the time to first or last tokens, and who had it meanwhile.

    ``rows`` and ``core_holders`` as in a Ledger, of measured requests.
    """
    if column("core_wait") not in rows:
        return
    sums = rows.groupby("event")[[column("core_wait"), "total_ns"]].sum()
    parts = sums[column("core_wait")] / sums["total_ns"]
    part, event = max(((float(parts[event]), event) for event in parts.index), default=(0.0, ""))
    if not part >= STARVED:
        return
    whole = sum(core_holders.values())
    most = [(who, ns / whole) for who, ns in core_holders.items() if ns >= STARVED * whole][:3]
    names = ", ".join(f"{held_by(who.process, who.stage, who.program)} ({share(part)})" for who, part in most)
    cause, flag = STRANGERS.get(most[0][0].process, SHARED) if most else SHARED
    text = f"the server waited for a CPU core for {share(part)} of the time to the {event.replace('_', ' ')}"
    yield _warning("cores", text + (f"; the cores were running {names}" if names else ""), cause, flag, ("core_wait",))


def warmup_warning(warmup: Warmup | None) -> Iterator[RunWarning]:
    if warmup is None or warmup.state != "warmed":
        return
    text = (
        f"the first {warmup.excluded} requests were left out: their {warmup.metric.upper()} was "
        f"{plain(warmup.ratio, 2)} times that of the rest (MSER-5)"
    )
    yield _warning("warmup", text, "compilation, cold caches or an empty queue at the start", "--set load.warmup=0")


def short_warmup_warning(steady: Steady) -> Iterator[RunWarning]:
    """Where latency still changed after the warm-up that the scenario fixes: nothing was left out for it."""
    seen = steady.methods.mser5
    if seen is None or seen.applied or seen.state != "warmed":
        return
    metric = seen.metric.upper()
    text = (
        f"the warm-up was too short: {metric} of the first {count(seen.excluded_requests)} requests after it was "
        f"{plain(seen.ratio or 0, 2)} times that of the rest (MSER-5), and they count"
    )
    cause = "compilation, cold caches or a queue that was still filling; set a longer one, or let gapmeter find it"
    yield _warning("short-warmup", text, cause, "--set load.warmup=auto")


def changing_warning(steady: Steady) -> Iterator[RunWarning]:
    """Where latency kept changing, or changed its level behind the start; the direction says what may have done it."""
    mser5, pelt = steady.methods.mser5, steady.methods.pelt
    if mser5 is None or pelt is None:
        return
    changes = [(change, change.ratio) for change in pelt.changes if change.certain and change.ratio]
    if mser5.state == "unsteady":
        code, rose = "unsteady", (mser5.ratio or 0) < 1
        text = f"no steady state: {mser5.metric.upper()} kept changing through the run"
    elif changes and not pelt.agrees:
        last, ratio = changes[-1]
        code, rose = "level", ratio > 1
        text = (
            f"{last.metric.upper()} had no steady level: from request {count(last.request)} on it was "
            f"{plain(ratio, 2)} times what it had been (PELT)"
        )
    else:
        return
    if rose:
        cause = "the server slowed down, or the load is more than it can do, so latency depends on how long the run is"
        yield _warning(code, text, f"it rose: {cause}")
    else:
        cause = "it fell: compilation or cold caches at the start, or a stall or other work on the machine that ended"
        yield _warning(code, text, cause, "a longer load.warmup, if the start was slow")


def cached_warning(load: LoadFacts) -> Iterator[RunWarning]:
    """Where the server found more of the prompts in its cache than this load repeats."""
    if load.cached_share is None or load.prefix_share is None:
        return
    if load.cached_share > load.prefix_share + _CACHED_BEYOND:
        text = (
            f"{share(load.cached_share)} of the prompts' tokens were in the server's prefix cache, where the workload "
            f"repeats {share(load.prefix_share)}: their prefill was spared, and TTFT is shorter than fresh prompts'"
        )
        cause = "an earlier run with this seed sent the same prompts; or a chat template is most of each"
        yield _warning("cached", text, cause, "--set seed=N with another N, or restart the server", ("ttft", "e2e"))


def growth_warning(steady: Steady) -> Iterator[RunWarning]:
    """Where the queue grew through the run."""
    slope = steady.methods.queue_slope
    if slope is not None and slope.grows:
        cause = "the load is more than the server can do, so latency depends on how long the run is"
        yield _warning("overload", growth_text(slope), cause, "a lower load.rate", ("ttft", "e2e", "capacity"))


def speed_warning(drift: Drift) -> Iterator[RunWarning]:
    """When the machine became slower or faster."""
    if (change := drift.machine_change) is not None:
        text = (
            f"the machine became {speed_words(change)}: from {change.after_s:.0f} s on, a fixed piece of CPU work took "
            f"{change.ratio:.2f} times as long as before"
        )
        cause = "other work on the machine or its host, or the CPU's clock; how long each speed lasts decides the tail"
        yield _warning("speed", text, cause)


def outage_warning(row: Outage | None) -> Iterator[RunWarning]:
    """Requests that failed in a row, as from ``find_row``."""
    if row is not None:
        refused = "refused" in row.failed
        cause = "the server died" if refused else "the server stopped serving; its own log says why"
        if row.until_s is not None and refused:
            cause = "the server, or whatever is in front of it, was started again"
        elif row.until_s is not None:
            cause = "the server was overloaded or away for a time; its own log says which"
        yield _warning("outage", outage_text(row), cause, touches=("errors", *LATENCIES))


def attempts_warning(counted: Attempts, measured: int) -> Iterator[RunWarning]:
    """What retries hide from the share of failures, said beside it. ``counted`` as from ``count_attempts``."""
    if counted.asked_again:
        classes = ", ".join(f"{n} {name}" for name, n in counted.failed.items())
        text = (
            f"{counted.total:,} attempts for {measured:,} requests: {counted.asked_again:,} retried after a "
            f"failure ({classes}), {counted.then_succeeded:,} then succeeded; latency counts from the first attempt"
        )
        yield _warning("retries", text, "load.retries is set", "--set load.retries=0", ("errors", "ttft", "e2e"))


def connect_warning(measured: pd.DataFrame) -> Iterator[RunWarning]:
    """Where the server let requests wait for their connection. ``measured`` as from ``measured_requests``."""
    waited = elapsed_ns(measured, "connect_start_ns", "connect_end_ns")
    never = np.isnan(waited)  # accepted: what was given up while it waited
    waited = np.where(never, elapsed_ns(measured, "connect_start_ns", "end_ns"), waited)
    slow = (waited >= _UNANSWERED_NS) & ~resent_once(measured)
    if (found := int(slow.sum())) > _WORTH_SAYING * len(measured):
        text = (
            f"{count(found)} of {count(len(measured))} requests ({share(found / len(measured))}) waited"
            f" {duration(_UNANSWERED_NS / 1e6)} or more until the server accepted their connection"
            f" (p50 {duration(float(np.median(waited[slow])) / 1e6)}); the load tester asked for them in time"
        )
        if lost := int((slow & never).sum()):
            text += f", and {count(lost)} were given up before it did"
        cause = "the server's queue of connections was full (its listen backlog), or its host was hard to reach"
        yield _warning("connect", text, cause, touches=("ttft", "e2e", "load"))


def telemetry_warnings(telemetry: Telemetry | None, manifest: Manifest) -> Iterator[RunWarning]:
    """What in the samples puts a figure in doubt."""
    if telemetry is None:
        return
    for gpu in telemetry.gpus:
        if gpu.server:
            yield from _gpu_warnings(gpu)
    if any(process.stopped_s for process in telemetry.processes):
        stops = max((process.stopped_s or () for process in telemetry.processes), key=sum)
        text = (
            f"the server was stopped {counted(len(stops), 'time')}, for about "
            f"{duration(1e3 * sum(stops))} of {duration(1e3 * telemetry.window_s)}, "
            f"at most {duration(1e3 * max(stops))} at a time"
        )
        yield _warning("stopped", text, *STRANGERS["stopped"])
    memory = manifest.hardware.memory_gib
    rss = sum(process.rss_gib for process in telemetry.processes)
    if memory and rss > 0.9 * memory:
        text = f"the server's processes filled {rss:.1f} of {memory} GiB of memory"
        yield _warning("host-memory", text, "the next allocation may swap, or kill it")
    for name, source in telemetry.sources.items():
        if source.expected and source.missed > _MANY_GAPS * source.expected:
            missed = min(source.missed, source.expected)
            text = f"telemetry of {name}: {missed} of {source.expected} samples are missing"
            longest = duration(1e3 * source.longest_gap_s) if source.longest_gap_s else "all of it"
            yield _warning("telemetry-gaps", text, f"{source.why}; the longest gap is {longest}")
    engine, asked = telemetry.engine, telemetry.sources["engine"].expected
    if engine and asked and engine.took_ms.p50 / 1e3 * asked > _DEAR_METRICS * telemetry.window_s:
        text = f"each scrape of /metrics took {duration(engine.took_ms.p50)}"
        cause = "the server makes that page on the thread that sends tokens and delays them; or the network is slow, "
        cause += "or the sampler had to wait"
        yield _warning("metrics-cost", text, cause, "--set telemetry.metrics_every=15s", ("itl", "ttft"))


def _gpu_warnings(gpu: GpuSamples) -> Iterator[RunWarning]:
    name = f"GPU {gpu.gpu}"
    for words, part in (gpu.throttled or {}).items():
        if part > _THROTTLED:
            text = f"{name} was throttled for {share(part)} of the run: {words}"
            yield _warning("throttled", text, "a cooler or less limited one would have been faster")
    if gpu.sm_fell_share is not None and gpu.sm_fell_share > _CLOCKS_FELL:
        text = f"{name}: the SM clock fell by {share(gpu.sm_fell_share)} from the run's first fifth to its last"
        yield _warning("clocks", text, "it got hotter: a longer run would be slower than this one")
    used, total = gpu.memory_used_gib, gpu.memory_total_gib
    if used and total and used.max > _NEARLY_FULL * total.max:
        text = f"{name}: {used.max:.1f} of {total.max:.1f} GiB of memory were used"
        yield _warning("gpu-memory", text, "longer contexts may not fit")
