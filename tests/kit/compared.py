"""Runs to compare: from the engine in virtual time as values, and as folders on disk."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.virtual_run import Traffic, virtual_run
from bench.virtual_server import Settings
from gapmeter.analysis.compare.sides import RunColumns
from gapmeter.analysis.results import Manifest
from gapmeter.servers.simulated.scheduler import Limits
from gapmeter.servers.simulated.settings import StageTimes
from tests.kit import results as kit
from tests.kit.runs import write_run

TRAFFIC = Traffic(requests=200, rate=25.0, output_median=5.0, warmup=20)
TIMES = StageTimes(
    template_ns=0, update_ns=0, output_ns=0, detokenize_ns=0, egress_ns=0, forward_ns=5_000_000, jitter=0.1
)
COMMAND = ["python", "-m", "server", "--port", "41234", "--max-batch", "8"]


def virtual(seed: int, service: int = 0, **times: Any) -> RunColumns:
    """A run of the arrivals of ``seed``; ``service`` numbers its independent service times."""
    settings = Settings(Limits(max_sequences=4), replace(TIMES, seed=100 * seed + service, **times))
    return virtual_run(TRAFFIC.arrivals(seed), settings, f"{seed}/{service}", TRAFFIC.warmup)


def manifest(**changes: Any) -> Manifest:
    """What two comparable runs share; ``changes`` by path with points as two underscores."""
    made = kit.manifest_document(
        scenario={
            "name": "chat", "summary": "Words.", "slo": ["ttft p90 <= 1 s"], "server": {"args": {"x": 1}},
            "workload": {"prompt_tokens": {"uniform": [8, 16]}}, "load": {"rate": 8.0},
        },
        hardware={"gpus": ["A GPU"]},
        target={"command": list(COMMAND), "env": {"A": "1"}},
    )  # fmt: skip
    return Manifest.model_validate(changed(made, changes))


def changed(document: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The same with other values, by path."""
    made = copy.deepcopy(document)
    for path, value in changes.items():
        *keys, last = path.split("__")
        into = made
        for key in keys:
            into = into[key]
        into[last] = value
    return made


def folder(path: Path, *, slots: int = 8, changes: Mapping[str, Any] | None = None, **simulation: Any) -> Path:
    """A run's folder, with ``slots`` as ``server.max_batch``; the same arrivals whatever the slots."""
    made = write_run(path, slos=("ttft p90 <= 9 s", "e2e p50 <= 9 s"), slots=slots, count=240, **simulation)
    told = json.loads(made.manifest.read_text())
    told |= {"device": "CPU", "scenario_digest": f"d{slots}"}
    told["scenario"]["server"]["max_batch"] = slots
    made.manifest.write_text(json.dumps(changed(told, changes or {})))
    return path
