"""A sweep's points side by side by cost, energy, value, the rate that they held, and latency."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from gapmeter.report.sweep.economy import describe_economy, economy_row, economy_section

from gapmeter.analysis.judge.evidence import Evidence
from gapmeter.analysis.provenance import UNKNOWN, Provenance
from gapmeter.analysis.results import Manifest, RunResult
from gapmeter.analysis.results.cost import Energy, Interval, NoEnergy, TokensPerRequest
from gapmeter.analysis.results.manifest import PrecisionSupport
from gapmeter.analysis.results.run import Goodput, Steady, SteadyMethods, Verdict
from gapmeter.analysis.stats.exact import rate_bounds
from gapmeter.analysis.summary import build_figures
from gapmeter.analysis.sweep.read import PointRun
from gapmeter.report import bridge
from tests import kit
from tests.analysis.report_frames import simulate
from tests.analysis.test_verdict import slo

ORIGIN = Provenance(**dict.fromkeys(Provenance.model_fields, UNKNOWN))
METRICS = {"ttft": {"p99_ms": 40.0, "p99_ci_ms": [35.0, 48.0]}, "itl": {"p99_ms": 9.0, "p99_ci_ms": None}}
STEADY = Steady(state="steady", methods=SteadyMethods(mser5=None, pelt=None, queue_slope=None), valid_for_capacity=True)


def run(seconds: float, joules: float | None, **more: Any) -> RunResult:
    """One that held its SLO for so long, with 100 requests of 8 tokens each."""
    figures = build_figures(
        simulate(120).requests, None, None, [slo("ttft", 50.0, 500)], Evidence("open", "poisson", 8.0)
    )
    load = figures.load.model_copy(update={"window_s": seconds, "dispersion": 1.0})
    goodput = Goodput(per_s=None, share=None, share_ci=(0.97, 1.0), limits_ms={})
    counted = Energy(
        status="measured", reason=None, source="a counter", seconds=10.0, joules=joules, joules_ci=(None, None),
        watts=None, per_request_j=joules / 100, per_request_j_ci=(None, None), per_output_token_j=None,
        per_output_token_j_ci=(None, None), tokens_per_watt=800 / joules, tokens_per_watt_ci=(None, None),
        idle_share=None,
    ) if joules else NoEnergy(status="unmeasured", reason="unmeasured")  # fmt: skip
    figures = figures.model_copy(update={"load": load, "goodput": goodput})
    return kit.result(figures, **{"steady": STEADY, "energy": counted, **more})


def manifest(precision: str, emulated: bool = False) -> Manifest:
    cost = {"gpu": "H100", "usd_per_hour": 2.0, "gpus_per_replica": 1, "utilisation": 0.5}
    support = PrecisionSupport(
        precision=precision, format="", device="H100", native=not emulated, supported=(), emulated=emulated
    )
    return kit.manifest(
        scenario={"server": {"engine": "vllm", "precision": precision}, "cost": cost},
        target={"precision": support.to_json()},
    )


def point(verdict: Verdict, precision: str = "bfloat16", joules: float | None = 400.0, **more: Any) -> dict[str, Any]:
    measured = pd.DataFrame({"outcome": ["ok"] * 200, "output_tokens": [8] * 200, "prompt_tokens": [30] * 200})
    runs = [
        PointRun(Path(), result=run(seconds, joules), typed_manifest=manifest(precision, **more))
        for seconds in (10.0, 15.0)
    ]
    answers = runs[0].result.slo if runs[0].result else ()
    economy = describe_economy(verdict, answers, runs, measured)
    return {"verdict": verdict, "metrics": METRICS, "label": precision, "economy": economy}


def test_a_point_s_repeats_count_together_but_say_no_more_of_the_rate_than_one_of_them() -> None:
    economy = point("PASS")["economy"]
    low, _ = rate_bounds(100, 12.5)
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
    eight = Interval(value=8.0, low=8.0, high=8.0)
    noted = []
    for number, (verdict, rate, n) in enumerate((("holds", 4.0, 100), ("fails", 9.0, 50), ("invalid", 5.0, 900))):
        folder = tmp_path / f"trials/{number}"
        folder.mkdir(parents=True)
        told = run(10.0, 400.0, tokens_per_request=TokensPerRequest(output=eight, prompt=None, total=None))
        told.model_copy(update={"counts": told.counts.model_copy(update={"measured": n})}).write(folder)
        manifest("bfloat16").write(folder)
        noted.append({"rate": rate, "verdict": verdict, "folder": f"trials/{number}"})
    noted.append({"rate": 6.0, "verdict": "holds", "folder": None})
    found = bridge.search_economy(tmp_path, {"capacity": {"rate": 5.0, "low": 4.5, "high": 6.0, "trials": noted}})
    assert found["cost"]["per_request_usd_ci"] == [2.0 / (3600 * 6.0 * 0.5), 2.0 / (3600 * 4.5 * 0.5)]
    assert found["energy"]["per_request_j"] == 4.0
    assert found["value"]["good_requests_per_usd"] == 0.97 / found["cost"]["per_request_usd"]
    assert bridge.search_economy(tmp_path, {"capacity": {"low": None, "high": 1.0, "trials": []}}) == {}
