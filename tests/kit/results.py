"""Manifests and results for tests: whole ones in which nothing is known, but for what a test says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gapmeter.analysis.provenance import provenance_of
from gapmeter.analysis.results.cost import NoCost, NoEnergy, TokensPerRequest, Value
from gapmeter.analysis.results.device import Roofline, Weights
from gapmeter.analysis.results.latency import Compute
from gapmeter.analysis.results.manifest import Manifest
from gapmeter.analysis.results.run import LedgerFacts, MadeBy, RunFigures, RunResult
from gapmeter.analysis.results.trust import Drift, Steady, SteadyMethods
from gapmeter.report.run import words_of

WEIGHTS = Weights(
    parameters=1200, step_parameters=1000, step_bytes=4000.0, head_parameters=200, layers=2, attention_heads=2,
    kv_heads=1, head_dim=4, attention_width=8, kv_bytes=32.0, sliding_layers=0, window=None, precision="float32",
    experts=None, source="by hand",
)  # fmt: skip
_RATE = {"median": 9.0, "low": 8.0, "high": 10.0, "repeats": 5}
PEAKS: dict[str, Any] = {
    "cores": [0], "llc_bytes": 1024, "array_bytes": 4096, "triad": _RATE, "read": _RATE | {"high": 4.0}, "cached": None,
    "multiply": _RATE | {"high": 0.02}, "multiply_precision": "float32", "took_s": 0.5,
}  # fmt: skip
_MANIFEST: dict[str, Any] = {
    "schema_version": 1, "status": "complete", "scenario_digest": "59803e1742db", "command": "gapmeter run smoke",
    "scenario": {
        "name": "smoke", "summary": "", "seed": 1, "repeat": 1, "slo": [], "sweep": [],
        "server": {"engine": "transformers", "model": "builtin:tiny", "precision": "float32", "max_batch": 8,
                   "args": {}, "url": None},
        "workload": {"kind": "chat"},
        "load": {"generator": "asyncio", "arrivals": "poisson", "rate": 5.0, "burstiness": None, "concurrency": None,
                 "processes": 1},
        "cost": {"gpu": None, "usd_per_hour": None, "gpus_per_replica": None, "utilisation": 0.8},
    },
    "started_wall": "2026-01-02T03:04:05+0000", "started_wall_ns": 1_767_323_045_000_000_000, "started_ns": 1,
    "hardware": {"cpu": "A processor", "cores": 2, "affinity": [0, 1], "memory_gib": 24.0, "system": "Linux 6.1",
                 "gpus": []},
    "versions": {"python": "3.11.2", "gapmeter": "0.1.0", "transformers": "5.19.0"},
    "git": None, "repeat": 0, "slo": [],
    "placement": {"generator": [1], "server": [0], "shared": False}, "calibration": None,
    "target": {"url": "http://127.0.0.1:8000", "model": "m", "dialect": "full"}, "device": "GPU",
    "plan": {
        "digest": "8d16ea8f970e", "loop": "open", "planned": 20, "measured_from_ns": 0, "warmup_requests": 0,
        "end_ns": 0, "prompt_tokens_exact": True, "prompt_tokens": 0, "output_tokens": 0, "rate_knots": [],
        "count_dispersion": 1.0, "prefix_share": 0.0, "think_time_ns": 0, "conversations": None, "notes": [],
        "warmup_auto": False, "warmup_ns": 0, "timeout_ns": 60_000_000_000, "output_enforced": True, "t0_ns": 0,
    },
}  # fmt: skip


def manifest_document(**parts: Any) -> dict[str, Any]:
    """``manifest.json`` of a complete run; mappings in ``parts`` are merged, a None key's value is None."""
    return _merged(_MANIFEST, parts)


def manifest(**parts: Any) -> Manifest:
    """The same as a value."""
    return Manifest.model_validate(manifest_document(**parts))


def steady(state: str) -> Steady:
    """A steady state that no method said anything of."""
    none = SteadyMethods(mser5=None, pelt=None, queue_slope=None)
    return Steady(state=state, methods=none, valid_for_capacity=state == "steady")


def figure_at(document: Any, key: str) -> Any:
    """The figure at a key such as ``slo.0.value_ms``, as a page's ``data-key`` names it."""
    for part in key.split("."):
        document = document[int(part)] if isinstance(document, list) else document[part]
    return document


def _merged(value: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(value)
    for key, change in changes.items():
        both = isinstance(change, Mapping) and isinstance(out.get(key), Mapping)
        out[key] = _merged(out[key], change) if both else change
    return out


def result(figures: RunFigures, about: Manifest | None = None, **parts: Any) -> RunResult:
    """A run's result with its words: nothing is known beside ``figures`` and ``parts``."""
    about = about or manifest()
    unknown: dict[str, Any] = {
        "telemetry": None,
        "roofline": Roofline(decode=None, prefill=None, device=None, why="nobody asked"),
        "ledger": LedgerFacts(
            refused=(), unmeasured=(), clipped={}, requests=0, interference=None, killed_processes=()
        ),
        "steady": steady("unknown"),
        "drift": Drift(first_s=10.0, ttft=None, tpot=None, output_tokens_per_s=None, machine_time=None, reason=None),
        "tokens_per_request": TokensPerRequest(output=None, prompt=None, total=None),
        "cost": NoCost(status="none", reason="nobody asked", per_request_usd=None),
        "energy": NoEnergy(status="unmeasured", reason="unmeasured: nobody asked"),
        "value": Value(good_requests_per_usd=None, reason="there is no cost at the SLO"),
        "bands": {},
        "compute": Compute(),
        "explore": {},
        "made_by": MadeBy(gapmeter="0.1.0", analysis="0"),
        "provenance": provenance_of(about, figures),
    }
    found = RunResult(**dict(figures), **{**unknown, **parts})
    return found.model_copy(update={"words": words_of(found, about)})
