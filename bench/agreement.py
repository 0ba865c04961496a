"""Agreement with vLLM: what it reports of each request, rebuilt from our stamps alone.

vLLM's intervals (0.28 to 0.32, vllm/v1/metrics/stats.py), all on the engine process's CLOCK_MONOTONIC:

========  =====================================================  ================================================
interval  vLLM                                                   the same boundaries among our stamps
========  =====================================================  ================================================
queue     QUEUED, recorded as Scheduler.add_request returns, to  end of CORE_ADD to the start of SCHEDULE of the
          SCHEDULED, stamped as schedule() begins                first step with tokens of the request
prefill   SCHEDULED to the time stamp of the EngineCoreOutputs   start of that SCHEDULE to the emission of the
          with the first token (it calls this time to first      first token (end of UPDATE of its step)
          token), made near the end of update_from_output
decode    from there to the outputs with the last token          first to last emission
========  =====================================================  ================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bench.engine import Engine, Setting, running
from gapmeter.analysis.arrays import Bools, Floats
from gapmeter.analysis.ledger.read import read_trace
from gapmeter.analysis.ledger.trace import Trace
from gapmeter.records import RunFolder, Span

_ROUNDING_MS = 1e-3  # vLLM's are differences of seconds in double precision
_NATIVE = {"queue": "queue_time_ms", "prefill": "time_to_first_token_ms", "decode": "generation_time_ms"}
_LOAD = (
    "load.arrivals=closed", "load.rate=null", "load.duration=null", "load.requests=120",
    "load.warmup=0", 'workload.prompt_tokens={"uniform":[16,256]}', 'workload.output_tokens={"uniform":[4,24]}',
)  # fmt: skip


def measure(folder: Path) -> dict[str, Any]:
    """Launch vLLM with four places, load it, and compare. Raises UserError or ServerFailed when it cannot be had."""
    with running("vllm", folder, Setting(max_batch=4)) as engine:
        return {"vllm": engine.version, **compare(load(engine, folder, users=6))}


def load(engine: Engine, folder: Path, users: int) -> Path:
    """A run of 120 requests; its folder. So that some have to queue, more ``users`` are needed than run at once."""
    return engine.load(folder, [*_LOAD, f"load.concurrency={users}"]).folder


def compare(run: Path) -> dict[str, Any]:
    """``intervals.<name>``: requests compared, median of vLLM's figure, and p50 to worst of the difference.

    vLLM makes each of its stamps within a call that we time: ``outside`` counts its figures that are shorter or longer
    than those calls allow, ``call_p50_ms`` is the median of how long the last of them took. ``missing`` counts
    successful requests for which either side has no figure.
    """
    folder = RunFolder(run)
    requests = pd.read_parquet(run / "requests.parquet")
    trace = read_trace(folder.record_files(folder.probe), requests["request_id"].tolist())
    if trace is None:
        raise ValueError(f"{run} holds no probe records")
    good = (requests["outcome"] == "ok").to_numpy()
    ours, theirs = rebuilt(trace, len(requests)), _native(requests)
    both = {name: good & np.isfinite(ours[name].figure) & np.isfinite(theirs[name]) for name in _NATIVE}
    return {
        "intervals": {name: _difference(ours[name], theirs[name], rows) for name, rows in both.items()},
        "missing": int(sum(np.count_nonzero(good & ~rows) for rows in both.values())),
    }


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """One of vLLM's intervals from our stamps, in ms, one element a row of the client's table (NaN where unknown).

    ``least`` and ``most``: what it can be, made as it is within the calls that we time; ``call``: the last of them.
    """

    figure: Floats
    least: Floats
    most: Floats
    call: Floats


def rebuilt(trace: Trace, requests: int) -> dict[str, Rebuilt]:
    """Each of vLLM's intervals by its name."""
    calls = _calls(trace, requests)
    add, schedule, first, last = (calls[name] for name in ("add", "schedule", "first", "last"))
    return {
        "queue": _between(add, schedule, schedule["start"] - add["end"]),
        "prefill": _between(schedule, first, first["end"] - schedule["start"]),
        "decode": _between(first, last, last["end"] - first["end"]),
    }


def _between(before: pd.DataFrame, after: pd.DataFrame, figure: pd.Series[float]) -> Rebuilt:
    least, most = after["start"] - before["end"], after["end"] - before["start"]
    in_ms = (column.to_numpy(np.float64) / 1e6 for column in (figure, least, most, after["end"] - after["start"]))
    return Rebuilt(*in_ms)


def _calls(trace: Trace, requests: int) -> dict[str, pd.DataFrame]:
    """``start`` and ``end`` of the calls in which vLLM stamps a request, one row each."""
    every = range(requests)
    adds = pd.DataFrame(trace.request_spans[Span.CORE_ADD])
    adds = adds[adds["request"] >= 0].groupby("request")[["start", "end"]].min()
    entries = pd.DataFrame(trace.entries)
    scheduled = entries[(entries["tokens"] > 0) & (entries["request"] >= 0)].groupby("request")["step"].min()
    emitted = pd.DataFrame(trace.emissions)
    emitted = emitted[emitted["request"] >= 0].groupby("request")["step"].agg(["min", "max"])
    return {
        "add": adds.reindex(every),
        "schedule": _of_steps(trace, Span.SCHEDULE, scheduled.reindex(every)),
        "first": _of_steps(trace, Span.UPDATE, emitted["min"].reindex(every)),
        "last": _of_steps(trace, Span.UPDATE, emitted["max"].reindex(every)),
    }


def _of_steps(trace: Trace, code: Span, step: pd.Series[float]) -> pd.DataFrame:
    spans = pd.DataFrame(trace.step_spans[trace.step_spans["code"] == code]).set_index("step")[["start", "end"]]
    return spans.reindex(step).set_axis(step.index)


def _native(requests: pd.DataFrame) -> dict[str, Floats]:
    metrics = [value if isinstance(value, dict) else {} for value in requests["engine_metrics"]]
    return {name: np.array([each.get(field) for each in metrics], np.float64) for name, field in _NATIVE.items()}


def _difference(ours: Rebuilt, theirs: Floats, rows: Bools) -> dict[str, float | int]:
    if not rows.any():
        return {"requests": 0}
    told = theirs[rows]
    apart = np.abs(ours.figure[rows] - told)
    outside = (told < ours.least[rows] - _ROUNDING_MS) | (told > ours.most[rows] + _ROUNDING_MS)
    return {
        "requests": len(apart),
        "p50_ms": float(np.median(told)),
        "difference_p50_ms": float(np.median(apart)),
        "difference_p95_ms": float(np.percentile(apart, 95)),
        "difference_p99_ms": float(np.percentile(apart, 99)),
        "difference_max_ms": float(apart.max()),
        "outside": int(np.count_nonzero(outside)),
        "call_p50_ms": float(np.median(ours.call[rows])),
    }


def table(result: dict[str, Any]) -> list[str]:
    """Markdown rows."""
    lines = [
        f"| vLLM {result['vllm']} | requests | median, ms | difference p50, ms | p95, ms | p99, ms | worst, ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in result["intervals"].items():
        apart = " | ".join(f"{row[f'difference_{p}_ms']:.3f}" for p in ("p50", "p95", "p99", "max"))
        lines.append(f"| {name} | {row['requests']} | {row['p50_ms']:.3f} | {apart} |")
    return lines
