"""A run's tables from a small queueing simulation: a batch of at most eight, prompts first come, first served.

Times are made so that every ledger balances to the nanosecond, as the real one does.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from hdrh.histogram import HdrHistogram
from hdrh.log import HistogramLogReader

from gapmeter.analysis.arrays import Ints
from gapmeter.analysis.judge.evidence import Evidence
from gapmeter.analysis.ledger.explore import describe_pairs
from gapmeter.analysis.ledger.tail import describe_bands, describe_bursts
from gapmeter.analysis.ledger.upgrade import describe_compute
from gapmeter.analysis.requests.metrics import limits_of
from gapmeter.analysis.results import Manifest, RunResult
from gapmeter.analysis.run_figures import RunTables, build_figures
from gapmeter.analysis.stages import STAGES, column
from gapmeter.analysis.tables import write_table
from gapmeter.records import RunFolder
from gapmeter.records.histograms import new_histogram
from gapmeter.scenarios.slo import Slo, parse_slo
from tests.kit.results import manifest, result

_ORIGIN_NS = 5_000_000_000
_FIXED_US = {
    "generator_lag": 60, "connect": 0, "network_in": 90, "ingress": 210, "template": 120, "tokenize": 240,
    "handoff": 80, "output": 110, "detokenize": 40, "egress": 60, "network_out": 70,
}  # fmt: skip
_UNMEASURED = ("launch_gap",)
_BEFORE = ("generator_lag", "connect", "network_in", "ingress", "template", "tokenize", "handoff")
_PARTS = ("scheduling", "input_prep", "decode", "sampling")
_AFTER = ("output", "detokenize", "egress", "network_out")


@dataclass
class _Request:
    index: int
    due_ns: int
    prompt: int
    output: int
    added_ns: int = 0
    stages: dict[str, int] = field(default_factory=lambda: dict.fromkeys((s.name for s in STAGES), 0))
    first: dict[str, int] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    first_step: int = 0


@dataclass(frozen=True)
class Frames:
    requests: pd.DataFrame
    ledger: pd.DataFrame
    gaps: pd.DataFrame
    steps: pd.DataFrame
    timeline: pd.DataFrame


def simulate(
    count: int, *, rate: float = 8.0, slots: int = 8, seed: int = 1, warmup: int = 20, output: float = 32,
    failures: int = 0, error: str = "", unmeasured: tuple[str, ...] = _UNMEASURED,
) -> Frames:  # fmt: skip
    """``count`` measured requests after ``warmup`` ones; ``failures`` of them, spread out, were answered with 500."""
    rng = np.random.default_rng(seed)
    total = count + warmup
    due = _ORIGIN_NS + np.cumsum(rng.exponential(1e9 / rate, total)).astype(np.int64)
    prompts = np.clip(rng.lognormal(np.log(96), 0.6, total), 8, 1024).astype(int)
    outputs = np.clip(rng.lognormal(np.log(output), 0.42, total), 2, 256).astype(int)
    everyone = [_Request(i, int(due[i]), int(prompts[i]), int(outputs[i])) for i in range(total)]
    steps = _run(everyone, slots, rng)
    failed = set(np.linspace(warmup, total - 1, failures).astype(int).tolist()) if failures else set()
    requests = pd.DataFrame([_request_row(r, warmup, r.index in failed, error) for r in everyone])
    for name in requests.columns:
        if name.endswith("_ns") and name != "token_ns":
            requests[name] = requests[name].astype("Int64")
    good = [r for r in everyone if r.index not in failed]
    rows = [_ledger_row(r, "first_token", unmeasured) for r in good]
    rows += [_ledger_row(r, "last_token", unmeasured) for r in good]
    known = _timeline(good[:600], unmeasured)
    return Frames(requests, pd.DataFrame(rows), _gaps(good, steps, unmeasured), pd.DataFrame(steps), known)


def timed(ttft_ms: Any, *, every_ms: float = 100, stream_ms: Any = 10, tokens: int = 2, **columns: Any) -> pd.DataFrame:
    """Good requests due at equal times, with these TTFTs; the last token comes ``stream_ms`` after the first."""
    ttft = np.asarray(ttft_ms, np.float64)
    due = (np.arange(len(ttft)) * every_ms * 1e6).astype(np.int64) + 10**12
    first = due + (ttft * 1e6).astype(np.int64)
    last = first + (np.asarray(stream_ms) * 1e6).astype(np.int64)
    return stamped(due, due, first, last, **{"output_tokens": tokens, **columns})


def stamped(due: Ints, sent: Ints, first: Ints, last: Ints, **columns: Any) -> pd.DataFrame:
    """Good requests that were due, were sent and got their first and last token at these times."""
    known = {"due_ns": due, "sent_ns": sent, "first_token_ns": first, "last_token_ns": last, "end_ns": last,
             "attempt_due_ns": due, "superseded": False, "retry": 0, "turn": 0, "outcome": "ok"}  # fmt: skip
    return pd.DataFrame({**known, **columns})


def _gaps(good: list[_Request], steps: list[dict[str, int]], unmeasured: tuple[str, ...]) -> pd.DataFrame:
    """A ledger row a token gap: a request's steps follow one another, so a gap is one step."""
    counts = [r.output - 1 for r in good]
    step = np.concatenate([np.zeros(0, int), *(r.first_step + 1 + np.arange(r.output - 1) for r in good)])
    parts = {name: np.array([s[name] for s in steps], dtype=float)[step] for name in _PARTS}
    table = {column(s.name): parts.get(s.name, np.zeros(len(step))) for s in STAGES if s.name not in unmeasured}
    total = np.sum(list(parts.values()), axis=0)
    ids = np.repeat([f"r-{r.index}" for r in good], counts)
    named = {"request_id": ids, "end_ns": np.array([s["forward_end_ns"] for s in steps], dtype=np.int64)[step]}
    return pd.DataFrame({**named, **table, "unexplained_ns": 0.0, "total_ns": total, "gap_ns": total})


def _timeline(good: list[_Request], unmeasured: tuple[str, ...]) -> pd.DataFrame:
    """Stretches of time that add up to each ledger: all of a stage at once, in the order of the timeline."""
    rows = []
    for request in good:
        at, end = request.due_ns, request.tokens[-1]
        for name, ns in request.stages.items():
            if ns > 0 and name not in unmeasured:
                rows.append((f"r-{request.index}", name, "measured", at, at + ns))
                at += ns
        if at < end:
            rows.append((f"r-{request.index}", "unexplained", "unexplained", at, end))
    return pd.DataFrame(rows, columns=["request_id", "stage", "kind", "start_ns", "end_ns"])


def _run(everyone: list[_Request], slots: int, rng: np.random.Generator) -> list[dict[str, int]]:
    """Advance the engine step by step, adding each step's parts to the ledgers of those inside."""
    before_ns = sum(_FIXED_US[name] for name in _BEFORE) * 1000
    for request in everyone:
        request.added_ns = request.due_ns + before_ns
        for name in _BEFORE:
            request.stages[name] = _FIXED_US[name] * 1000
    waiting, running, steps = deque(everyone), [], []
    arrivals = [r.added_ns for r in everyone]
    now = waiting[0].added_ns
    while waiting or running:
        if not running and waiting[0].added_ns > now:
            now = waiting[0].added_ns
        started = []
        while waiting and len(running) + len(started) < slots and waiting[0].added_ns <= now:
            started.append(waiting.popleft())
        prompt_tokens = sum(r.prompt for r in started)
        parts = {
            "scheduling": int(rng.normal(300_000, 20_000)),
            "input_prep": int(rng.normal(1_900_000, 100_000)),
            "decode": int(rng.normal(5_500_000, 200_000)) + 40_000 * len(running) + 25_000 * prompt_tokens,
            "sampling": int(rng.normal(200_000, 10_000)),
        }
        for request in started:
            request.stages["queue"] = now - request.added_ns
            request.first_step = len(steps)
        for request in (*running, *started):
            for name, ns in parts.items():
                own = "prefill" if name == "decode" and request in started else name
                request.stages[own] += ns
        behind = bisect_right(arrivals, now) - (len(everyone) - len(waiting))
        batch = len(running) + len(started)
        steps.append(
            {
                "step": len(steps),
                "schedule_ns": now,
                "forward_start_ns": now + parts["scheduling"] + parts["input_prep"],
                "forward_end_ns": now + sum(parts.values()) - parts["sampling"],
                "running": batch,
                "waiting": behind,
                **parts,
            }
        )
        now += sum(parts.values())
        running = _emit(running + started, now)
    return steps


def _emit(batch: list[_Request], now: int) -> list[_Request]:
    after_ns = sum(_FIXED_US[name] for name in _AFTER) * 1000
    for request in batch:
        request.tokens.append(now + after_ns)
        if len(request.tokens) == 1:
            request.first = {**request.stages, **{name: _FIXED_US[name] * 1000 for name in _AFTER}}
        if len(request.tokens) == request.output:
            request.stages.update({name: _FIXED_US[name] * 1000 for name in _AFTER})
    return [r for r in batch if len(r.tokens) < r.output]


def _request_row(r: _Request, warmup: int, failed: bool, error: str) -> dict[str, object]:
    sent = r.due_ns + 60_000
    return {
        "request_id": f"r-{r.index}", "index": r.index, "worker": 0, "due_ns": r.due_ns, "write_ns": sent - 5_000,
        "attempt_due_ns": r.due_ns, "superseded": False, "retry": 0, "turn": 0,
        "sent_ns": sent, "connect_start_ns": None, "connect_end_ns": None,
        "first_byte_ns": None if failed else r.tokens[0] - 1_000, "end_ns": sent + 900_000 if failed else r.tokens[-1],
        "first_token_ns": None if failed else r.tokens[0], "first_text_ns": None if failed else r.tokens[0],
        "last_token_ns": None if failed else r.tokens[-1], "prompt_tokens": r.prompt, "prompt_tokens_asked": r.prompt,
        "output_tokens": 0 if failed else r.output, "output_tokens_asked": r.output, "cached_tokens": 0,
        "outcome": "http_5xx" if failed else "ok", "status": 500 if failed else 200, "error": error if failed else "",
        "finish_reason": "" if failed else "length", "counted": "usage", "attempt": 0, "engine_metrics": None,
        "token_ns": None if failed else r.tokens, "chunk_tokens": None if failed else [1] * r.output,
        "censored_ns": 30_000_000_000 if failed else None, "measured": r.index >= warmup,
    }  # fmt: skip


def _ledger_row(r: _Request, event: str, unmeasured: tuple[str, ...]) -> dict[str, object]:
    stages = r.first if event == "first_token" else r.stages
    total = r.tokens[0 if event == "first_token" else -1] - r.due_ns
    values = {name: np.nan if name in unmeasured else float(ns) for name, ns in stages.items()}
    unexplained = total - sum(ns for name, ns in stages.items() if name not in unmeasured)
    transit = sum(stages[s.name] for s in STAGES if s.kind == "transit" and s.name not in unmeasured)
    return {
        "request_id": f"r-{r.index}", "event": event, **{column(name): ns for name, ns in values.items()},
        "unexplained_ns": unexplained, "transit_ns": transit, "strict_ns": unexplained + transit, "total_ns": total,
        "unstamped_ns": 0.0, "hidden_host_ns": 0, "joined": True, "first_step": r.first_step,
        "last_step": r.first_step + (0 if event == "first_token" else r.output - 1),
    }  # fmt: skip


def write_run(
    path: Path, *, slos: tuple[str, ...] = ("ttft p99 <= 500 ms", "itl p99 <= 100 ms", "errors <= 1 %"),
    name: str = "chat-p99", model: str = "builtin:tiny", evidence: dict[str, Any] | None = None,
    with_ledger: bool = True, rate: float = 8.0, **simulation: Any,
) -> RunFolder:  # fmt: skip
    """Simulate a run and write its folder as the analysis leaves it, summary.json by the real analysis."""
    made = _analysed(
        slos, name, model, tuple((evidence or {}).items()), with_ledger, rate, tuple(sorted(simulation.items()))
    )
    folder = RunFolder(path)
    path.mkdir(parents=True)
    for name, table in made.tables.items():
        write_table(path / f"{name}.parquet", table)
    for document in (made.result, made.result.verdict_file, made.about):
        document.write(path)
    return folder


@dataclass(frozen=True)
class _Analysed:
    tables: dict[str, pd.DataFrame]
    result: RunResult
    about: Manifest


@functools.lru_cache(maxsize=8)
def _analysed(
    slos: tuple[str, ...], name: str, model: str, evidence: tuple[tuple[str, Any], ...], with_ledger: bool,
    rate: float, simulation: tuple[tuple[str, Any], ...],
) -> _Analysed:  # fmt: skip
    """What is in such a run's folder: several tests want the same one, and it takes seconds."""
    frames = simulate(rate=rate, **dict(simulation))
    tables = {"requests": frames.requests, "steps": frames.steps, "timeline": frames.timeline}
    tables |= {"ledger": frames.ledger} if with_ledger else {}
    known = Evidence(loop="open", arrivals="poisson", requested_rate=rate, client_cpu_share=0.31, **dict(evidence))
    about = manifest(
        command=f"gapmeter run {name}",
        scenario={"name": name, "load": {"rate": rate}, "server": {"model": model}},
        slo=[parse_slo(text).model_dump() for text in slos],
    )
    shown = (frames.ledger, frames.gaps) if with_ledger and not known.ledger_refused else (None, None)
    made = RunTables(frames.requests, *shown)
    figures = build_figures(made, about.slo, known, name=name)
    explained = {
        "bands": describe_bands(made.ledgers),
        "compute": describe_compute(made.ledgers, frames.steps, "GPU"),
        "explore": describe_pairs(made.measured, made.ledgers, limits_of(about.slo)),
        "bursts": describe_bursts(
            made.measured, made.ledgers, int(frames.requests["due_ns"].min()), frames.steps,
            about.asked.server.max_batch,
        ) or None,
    }  # fmt: skip
    return _Analysed(tables, result(figures, about, **explained), about)


def read_hlog(path: Path) -> dict[str, HdrHistogram]:
    """Its histograms by their tags, as the package's own reader reads them."""
    reader = HistogramLogReader(str(path), new_histogram())
    histograms = iter(reader.get_next_interval_histogram, None)
    found = {histogram.get_tag(): histogram for histogram in histograms}
    reader.close()
    return found


def slo(metric: str, percentile: float | None, limit: float) -> Slo:
    """A limit in ms, or a share for errors."""
    of = "" if percentile is None else f"p{percentile:g} "
    return parse_slo(f"{metric} {of}<= {limit:g} ms" if metric != "errors" else f"errors <= {limit * 100:g} %")


SLOS = [slo("ttft", 99.0, 500), slo("itl", 99.0, 100), slo("e2e", 97.5, 3000), slo("errors", None, 0.01)]
# Of the 1200 measured requests and 20 of warm-up that ``simulate`` makes of 1200.
EVIDENCE = Evidence(
    "open", "poisson", 8.0, planned=1220, client_cpu_share=0.3, client_loop_lag_ns=np.full(9, 1e5), cores_shared=False
)
