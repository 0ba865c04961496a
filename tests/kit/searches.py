"""Folders of searches for capacity whose answer a test says: manifest and summary as a search leaves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gapmeter.analysis.cost import describe_cost, searched_rate
from gapmeter.analysis.provenance import provenance_as_asked
from gapmeter.analysis.results.capacity import (
    CapacityResult,
    CountedSlo,
    Ended,
    Fleet,
    Search,
    SearchedSlo,
    TrialResult,
)
from gapmeter.analysis.results.cost import Interval, NoEnergy, TokensPerRequest, Value
from gapmeter.analysis.results.manifest import Manifest, SearchFacts, SearchManifest
from gapmeter.scenarios.slo import parse_slo
from tests.kit.results import manifest_document

TOKENS = TokensPerRequest(
    output=Interval(value=100.0, low=98.0, high=102.0), prompt=Interval(value=50.0, low=50.0, high=50.0), total=None
)
SLO = "ttft p99 <= 500 ms"


def write_search(
    path: Path, rate: float | None, low: float | None, high: float | None, *, confidence: float = 0.95, slo: str = SLO,
    target_rps: float | None = None, ended: Ended = "found", binding_stage: str = "queue", **about: Any,
) -> Path:  # fmt: skip
    """One that ended with these rates. ``about``: what its manifest says, merged into a complete one."""
    document = manifest_document(**about)
    facts = SearchFacts(
        target_rps=target_rps, headroom=0.2, spare=1, confidence=confidence, within=0.1, budget_s=420.0, start=8.0,
        longest=40_000, lost_s=8.0, trials=(), ended=ended,
    )  # fmt: skip
    shared = {key: document[key] for key in SearchManifest.model_fields if key in document and key != "slo"}
    manifest = SearchManifest.model_validate({**shared, "kind": "capacity", "slo": [parse_slo(slo)], "capacity": facts})
    fleet = Fleet.plan(low, target_rps, 0.2, 1) if low and target_rps else None
    cost = describe_cost(searched_rate(low, high), TOKENS, Manifest.model_validate(document))
    if fleet and cost.status != "none":
        fleet = fleet.at_price(cost.price.usd_per_hour, 100.0)
    counted = CountedSlo(text=slo, over=0.0, count=900, n_eff=900.0, allowed=0.01)
    trial = TrialResult(
        number=1, rate=low or 1.0, verdict="holds" if low else "undecided", confidence=0.95, leaning="holds", slo=slo,
        slos=(counted,), requests=900, measured=900, seconds=60.0, reason=None, folder=None,
    )  # fmt: skip
    unknown: dict[str, Any] = dict.fromkeys(Search.model_fields)
    known = {
        "rate": rate, "low": low, "high": high, "held": low, "confidence": confidence, "within": 0.1, "ended": ended,
        "binding_slo": slo, "binding_stage": binding_stage, "planning": fleet,
        "replicas": fleet and fleet.replicas, "target_rps": target_rps, "requests": 900, "seconds": 60.0,
        "trials": (trial,), "curve": (),
    }  # fmt: skip
    result = CapacityResult(
        name="chat", exit_code=0, slo=(SearchedSlo(text=slo, metric="ttft"),), capacity=Search(**unknown | known),
        tokens_per_request=TOKENS, cost=cost, energy=NoEnergy(status="unmeasured", reason="nobody counted"),
        value=Value(good_requests_per_usd=None, reason="nobody counted"),
        provenance=provenance_as_asked(manifest, load="Poisson", n="900", validity="valid"),
    )  # fmt: skip
    path.mkdir(parents=True)
    manifest.write(path)
    result.write(path)
    return path
