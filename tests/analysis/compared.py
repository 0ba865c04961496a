"""Runs to compare: from the engine in virtual time as values, and as folders on disk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.virtual_run import Traffic, virtual_run
from bench.virtual_server import Settings
from gapmeter.analysis.compare.sides import Run
from gapmeter.servers.simulated.scheduler import Limits
from gapmeter.servers.simulated.stage_times import StageTimes
from tests.analysis.report_frames import write_run

TRAFFIC = Traffic(requests=200, rate=25.0, output_median=5.0, warmup=20)
TIMES = StageTimes(
    template_ns=0, update_ns=0, output_ns=0, detokenize_ns=0, egress_ns=0, forward_ns=5_000_000, jitter="lognormal"
)
COMMAND = ["python", "-m", "server", "--port", "41234", "--max-batch", "8"]


def virtual(seed: int, service: int = 0, traffic: Traffic = TRAFFIC, **times: Any) -> Run:
    """A run of the arrivals of ``seed``; ``service`` numbers its independent service times."""
    settings = Settings(Limits(max_sequences=4), replace(TIMES, seed=100 * seed + service, **times))
    return virtual_run(traffic.arrivals(seed), settings, f"{seed}/{service}", traffic.warmup)


def manifest(**changes: Any) -> dict[str, Any]:
    """What two comparable runs share; ``changes`` by path with points as two underscores."""
    made: dict[str, Any] = {
        "schema_version": 1,
        "status": "complete",
        "repeat": 0,
        "scenario": {
            "name": "chat", "summary": "Words.", "seed": 1, "slo": ["ttft p90 <= 1 s"], "repeat": 1,
            "server": {"engine": "transformers", "max_batch": 8, "precision": "float32", "args": {"x": 1}},
            "workload": {"prompt_tokens": {"uniform": [8, 16]}}, "load": {"rate": 8.0, "generator": "asyncio"},
        },
        "hardware": {"cpu": "A processor", "cores": 2, "system": "Linux 6.1", "gpus": ["A GPU"]},
        "versions": {"gapmeter": "0.1.0", "torch": "2.13"},
        "target": {"url": "http://127.0.0.1:41234", "model": "m", "command": list(COMMAND), "env": {"A": "1"}},
        "placement": {"generator": [1]},
        "plan": {"digest": "abc", "loop": "open", "t0_ns": 0},
        "device": "GPU",
    }  # fmt: skip
    for path, value in changes.items():
        put(made, path.split("__"), value)
    return made


def put(into: dict[str, Any], keys: list[str], value: Any) -> None:
    """Set a value deep in a dictionary."""
    for key in keys[:-1]:
        into = into.setdefault(key, {})
    into[keys[-1]] = value


def folder(path: Path, *, slots: int = 8, changes: Mapping[str, Any] | None = None, **simulation: Any) -> Path:
    """A run's folder, with ``slots`` as ``server.max_batch``; the same arrivals whatever the slots."""
    made = write_run(path, slos=("ttft p90 <= 9 s", "e2e p50 <= 9 s"), slots=slots, count=240, **simulation)
    told = json.loads(made.manifest.read_text())
    told |= {"status": "complete", "repeat": 0, "device": "CPU", "scenario_digest": f"d{slots}"}
    told |= {"plan": {"digest": "abc", "loop": "open", "t0_ns": 0}}
    told["scenario"]["server"]["max_batch"] = slots
    told["slo"] = [{"metric": "ttft", "percentile": 90.0}, {"metric": "e2e", "percentile": 50.0}]
    for key, value in (changes or {}).items():
        put(told, key.split("__"), value)
    made.manifest.write_text(json.dumps(told))
    return path
