"""A sweep's points side by side by cost, energy, value, the rate that they held, and latency."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from gapmeter.analysis.cost.search_economy import search_economy

from gapmeter.analysis.cost.cost import poisson_rate
from gapmeter.analysis.provenance import UNKNOWN, Provenance
from gapmeter.records import RunFolder
from gapmeter.report.sweep.economy import describe_economy, economy_row, economy_section

ORIGIN = Provenance(*[UNKNOWN] * 11)
METRICS = {"ttft": {"p99_ms": 40.0, "p99_ci_ms": [35.0, 48.0]}, "itl": {"p99_ms": 9.0, "p99_ci_ms": None}}


def summary(seconds: float, joules: float | None) -> dict[str, Any]:
    energy = {"joules": joules, "per_request_j": joules and joules / 100, "tokens_per_watt": joules and 800 / joules}
    return {
        "load": {"loop": "open", "arrivals": "poisson", "window_s": seconds, "dispersion": 1.0},
        "steady": {"state": "steady"}, "energy": energy, "goodput": {"share_ci": [0.97, 1.0]},
    }  # fmt: skip


def manifest(precision: str, emulated: bool = False) -> dict[str, Any]:
    return {
        "scenario": {"server": {"engine": "vllm", "precision": precision},
                     "cost": {"gpu": "H100", "usd_per_hour": 2.0, "gpus_per_replica": 1, "utilisation": 0.5}},
        "target": {"precision": {"emulated": emulated}}, "hardware": {"gpus": [], "cores": 2},
    }  # fmt: skip


def point(verdict: str, precision: str = "bfloat16", joules: float | None = 400.0, **more: Any) -> dict[str, Any]:
    measured = pd.DataFrame({"outcome": ["ok"] * 200, "output_tokens": [8] * 200, "prompt_tokens": [30] * 200})
    told = {"verdict": verdict, "slo": [{}], "metrics": METRICS, "label": precision}
    runs = [summary(10.0, joules), summary(15.0, joules)]
    return told | {"economy": describe_economy(told, runs, manifest(precision, **more), measured)}


def test_a_point_s_repeats_count_together_but_say_no_more_of_the_rate_than_one_of_them() -> None:
    economy = point("PASS")["economy"]
    low, _ = poisson_rate(100, 12.5)
    assert economy["cost"]["per_request_usd"] == pytest.approx(2.0 / (3600 * low * 0.5))
    assert economy["energy"] == {"per_request_j": 4.0, "tokens_per_watt": 2.0}
    assert economy["value"]["good_requests_per_usd"] == pytest.approx(0.97 * 3600 * low * 0.5 / 2.0)


def test_a_point_that_missed_its_slos_has_a_dash_and_the_reason() -> None:
    row = economy_row(point("FAIL", "float16", None, emulated=True), {"ttft": "p99", "itl": "p99"})
    said = [getattr(cell, "text", cell) for cell in row]
    assert said[1] == "float16, emulated"
    assert said[2:8] == ["–"] * 6
    assert said[8:10] == ["40.0 ms (35.0 .. 48.0 ms)", "9.00 ms (not estimable)"]
    assert "the SLOs were missed" in str(said[10])


def test_precisions_stand_side_by_side_with_the_price_that_they_are_at() -> None:
    points = [point("PASS"), point("FAIL", "float32"), {"economy": None, "label": "fp8"}]
    levels = {"ttft": 99.0, "itl": 99.0}
    section = economy_section({"points": points, "series": [{"points": [0, 1, 2]}], "levels": levels}, ORIGIN)
    assert section is not None
    assert section.lead.endswith("The price is 1 x H100-SXM at $2.00 an hour, the scenario's price.")
    assert "bfloat16" in section.body and "float32" in section.body and "fp8" not in section.body
    assert economy_section({"points": points[2:], "series": [{"points": [0]}], "levels": levels}, ORIGIN) is None


def test_a_search_takes_its_price_and_tokens_from_its_trials_folders(tmp_path: Path) -> None:
    tokens = {"output": {"value": 8.0, "low": 8.0, "high": 8.0}, "total": None}
    noted = []
    for number, (verdict, rate, n) in enumerate((("holds", 4.0, 100), ("fails", 9.0, 50), ("invalid", 5.0, 900))):
        folder = RunFolder(tmp_path / f"trials/{number}")
        folder.path.mkdir(parents=True)
        told = summary(10.0, 400.0) | {"tokens_per_request": tokens, "counts": {"measured": n}}
        folder.write_json(folder.summary, told)
        folder.write_json(folder.manifest, manifest("bfloat16"))
        noted.append({"rate": rate, "verdict": verdict, "folder": f"trials/{number}"})
    noted.append({"rate": 6.0, "verdict": "holds", "folder": None})
    found = search_economy(tmp_path, {"capacity": {"rate": 5.0, "low": 4.5, "high": 6.0, "trials": noted}})
    assert found["cost"]["per_request_usd_ci"] == [2.0 / (3600 * 6.0 * 0.5), 2.0 / (3600 * 4.5 * 0.5)]
    assert found["energy"]["per_request_j"] == 4.0
    assert found["value"]["good_requests_per_usd"] == 0.97 / found["cost"]["per_request_usd"]
    assert search_economy(tmp_path, {"capacity": {"low": None, "high": 1.0, "trials": []}}) == {}
