"""What a reader should know beside the rules of validity: each with its likely cause, and the flag to try.

Warnings of telemetry and of a growing queue are made where those are described.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from gapmeter.analysis.judge.steady import Warmup
from gapmeter.analysis.ledger.cores import Culprit
from gapmeter.analysis.ledger.ledger import Ledger
from gapmeter.analysis.ledger.trace import Trace
from gapmeter.analysis.numbers import count, share, significant
from gapmeter.analysis.requests.metrics import stamps_ns, succeeded
from gapmeter.analysis.results.manifest import Manifest
from gapmeter.analysis.results.run import Attempts, RunWarning
from gapmeter.analysis.stages import column

Floats = NDArray[np.float64]
NOTABLE = 0.03  # of all time to first tokens
_WORTH_SAYING = 0.01  # of the answers
_SEVERAL = 1.05  # tokens a chunk, over all of them


def recording_warnings(
    trace: Trace | None, ledger: Ledger, manifest: Manifest, requests: pd.DataFrame
) -> list[RunWarning]:
    """Of the plan, of turns that were never asked, of an emulated precision, of what the probe could not stamp."""
    found = [
        RunWarning(code="plan", text=note, cause="", flag="", touches=("prompt_tokens",))
        for note in manifest.plan.notes
    ]
    found += _abandoned(requests) + emulation_warning(manifest)
    if trace is None:
        flag = "start the server with GAPMETER_PROBE_DIR=DIR and pass --probe-dir DIR"
        text, cause = "the server's stages are unmeasured", "no server process wrote probe records"
        return [*found, RunWarning(code="no-probe", text=text, cause=cause, flag=flag, touches=("stages",))]
    if not ledger.refused and (starved := core_warning(ledger.rows, ledger.held)):
        found.append(starved)
    for note in trace.notes:
        if note.get("type") == "missing":
            stages = tuple(note.get("stages", ()))
            text = f"unmeasured: {', '.join(stages)} ({note.get('hook', 'a hook')} is not in this version)"
            cause = "the engine's version moved or renamed it"
            found.append(RunWarning(code="missing-hook", text=text, cause=cause, flag="", touches=stages))
    return found


def _abandoned(requests: pd.DataFrame) -> list[RunWarning]:
    """Turns that a failure took along: the load was less than planned, which flatters whoever failed."""
    lost = int((requests["outcome"] == "abandoned").sum())
    if not lost:
        return []
    text = f"{lost} turns were never asked, since an earlier turn of their conversation had failed"
    cause = "users give up with the first failure; the load was less than planned"
    return [RunWarning(code="abandoned", text=text, cause=cause, flag="", touches=("load",))]


def emulation_warning(manifest: Manifest) -> list[RunWarning]:
    """What a result must say whose precision its device only emulates."""
    support = manifest.target.precision
    if support is None or not support.emulated:
        return []
    return [
        RunWarning(
            code="emulated",
            text=f"emulated: {support.device} has no native {support.precision} arithmetic",
            cause="its speed and cost say nothing of a device that has it",
            flag=f"--set server.precision={next(iter(support.supported), 'float32')}",
            touches=("ttft", "itl", "tpot", "e2e"),
        )
    ]


_PROCESSES = {"api": "API server", "server": "the server's other processes", "load tester": "the load tester"}
_SHARED = (
    "more of them wanted to run than it has cores; a faster device would not shorten this",
    "give the server more cores",
)
_STRANGERS = {
    "another program": ("another program runs on the server's cores", "stop it, or give the server cores of its own"),
    "load tester": ("the load tester runs on the server's cores", "load it from other cores, or another machine"),
}


def core_warning(rows: pd.DataFrame, held: Mapping[Culprit, int]) -> RunWarning | None:
    """A warning when waiting for a core is a notable part of the time to first tokens, and who had it meanwhile.

    ``rows`` and ``held`` as in a Ledger.
    """
    first = rows[rows["event"] == "first_token"]
    total = float(first["total_ns"].sum())
    waited = float(first[column("core_wait")].sum()) if column("core_wait") in first else 0.0
    if not total or waited / total < NOTABLE:
        return None
    whole = sum(held.values())
    most = [(who, ns / whole) for who, ns in held.items() if ns >= NOTABLE * whole][:3]
    names = [f"{_named(who)} ({share(part)})" for who, part in most]
    cause, flag = _STRANGERS.get(most[0][0].process, _SHARED) if most else _SHARED
    return RunWarning(
        code="cores",
        text=f"{share(waited / total)} of the time to first tokens, the server's own processes waited for a CPU core"
        + (f" that others had: {', '.join(names)}" if names else ""),
        cause=cause,
        flag=flag,
        touches=("core_wait",),
    )


def _named(who: Culprit) -> str:
    process = _PROCESSES.get(who.process, who.process)
    return f"{process} at {who.stage.replace('_', ' ')}" if who.stage else process


def warmup_warning(found: Warmup | None) -> list[RunWarning]:
    if found is None or found.state == "steady":
        return []
    touches = ("ttft", "itl", "tpot", "e2e")
    if found.state == "unsteady":
        text = f"no steady state: {found.metric.upper()} kept changing through the run (MSER-5)"
        cause = "the rate may be more than the server can do, so that latency depends on how long one looks"
        return [RunWarning(code="unsteady", text=text, cause=cause, flag="", touches=touches)]
    text = (
        f"the first {found.excluded} requests were left out: their {found.metric.upper()} was "
        f"{found.ratio:.2g} times that of the rest (MSER-5)"
    )
    cause = "compilation, cold caches or an empty queue at the start"
    return [RunWarning(code="warmup", text=text, cause=cause, flag="--set load.warmup=0", touches=touches)]


def attempts_warning(counted: Attempts, measured: int) -> list[RunWarning]:
    """What retries hide from the share of failures, said beside it. ``counted`` as from ``count_attempts``."""
    if not counted.asked_again:
        return []
    classes = ", ".join(f"{count} {name}" for name, count in counted.failed.items())
    text = (
        f"{counted.total} attempts for {measured} requests: {counted.asked_again} were asked again after a "
        f"failure ({classes}), {counted.then_succeeded} then succeeded; latency counts from the first attempt"
    )
    return [
        RunWarning(
            code="retries",
            text=text,
            cause="load.retries is set",
            flag="--set load.retries=0",
            touches=("errors", "ttft", "e2e"),
        )
    ]


def streaming_warnings(measured: pd.DataFrame) -> list[RunWarning]:
    """``measured`` as from ``measured_requests``; only answers that succeeded are looked at, and all for ``resent``."""
    good = measured[succeeded(measured)]
    found = [_whole(good), _uncounted(good), _several(good), _resent(measured)]
    return [warning for warning in found if warning is not None]


def _tokens(good: pd.DataFrame) -> Floats:
    return np.asarray(good["output_tokens"].astype("Float64").to_numpy(dtype=np.float64, na_value=np.nan))


def _chunks(good: pd.DataFrame) -> Floats:
    return np.array([len(each) for each in good["chunk_tokens"]], dtype=np.float64)


def _whole(good: pd.DataFrame) -> RunWarning | None:
    """Answers of several tokens that arrived at one moment: there is no time between their tokens."""
    at_once = stamps_ns(good, "first_token_ns") == stamps_ns(good, "last_token_ns")
    whole = int(np.count_nonzero(at_once & (_tokens(good) > 1)))
    if whole <= _WORTH_SAYING * len(good):
        return None
    text = (
        f"{count(whole)} of {count(len(good))} answers came whole instead of token by token: "
        "their TTFT is their E2E, and they have no ITL and no TPOT"
    )
    cause = "the server does not stream, or something before it holds the stream back until it is complete"
    return RunWarning(code="not-streamed", text=text, cause=cause, flag="", touches=("ttft", "itl", "tpot"))


def _uncounted(good: pd.DataFrame) -> RunWarning | None:
    unknown = int(np.isnan(_tokens(good)).sum())
    if unknown <= _WORTH_SAYING * len(good):
        return None
    text = (
        f"{count(unknown)} of {count(len(good))} answers did not say how many tokens they had: "
        "TPOT and tokens per second are unmeasured for them"
    )
    cause = "the server sends no usage with a stream, though it was asked to (stream_options.include_usage)"
    return RunWarning(code="tokens-unknown", text=text, cause=cause, flag="", touches=("tpot", "throughput"))


def _several(good: pd.DataFrame) -> RunWarning | None:
    """ITL is between arrivals: with several tokens in each, a user reads a token sooner than its gap says."""
    tokens, chunks = _tokens(good), _chunks(good)
    streamed = (chunks > 1) & ~np.isnan(tokens)
    if not streamed.any():
        return None
    each = float(tokens[streamed].sum() / chunks[streamed].sum())
    if each < _SEVERAL:
        return None
    text = f"a chunk held {significant(each)} tokens on average: ITL is the time between chunks, not between tokens"
    cause = "the server sends several tokens at once (speculative decoding, a stream interval, slow detokenization)"
    return RunWarning(code="several-tokens", text=text, cause=cause, flag="", touches=("itl",))


def _resent(measured: pd.DataFrame) -> RunWarning | None:
    again = int((measured["attempt"] > 0).sum()) if "attempt" in measured else 0
    if not again:
        return None
    text = (
        f"{count(again)} requests ({share(again / len(measured))}) were sent a second time on a new connection, since "
        "the server closed theirs at once without a word; their latency counts from due"
    )
    cause = "it closes connections that have idled; a server that drops requests it has read would look the same"
    return RunWarning(code="resent", text=text, cause=cause, flag="", touches=("errors", "ttft"))
