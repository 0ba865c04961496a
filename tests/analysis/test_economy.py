"""A sweep's points side by side by cost, energy, value, the rate that they held, and latency."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from gapmeter.analysis.judge.evidence import Evidence
from gapmeter.analysis.results import Manifest, RunResult
from gapmeter.analysis.results.cost import Energy, NoEnergy
from gapmeter.analysis.results.distribution import Percentile
from gapmeter.analysis.results.manifest import PrecisionSupport
from gapmeter.analysis.results.requests import Goodput
from gapmeter.analysis.results.run import Verdict
from gapmeter.analysis.results.sweep import (
    LostPoint,
    Point,
    PointDistribution,
    PointEconomy,
    PointEnergy,
    SweepFigures,
    SweptCurve,
)
from gapmeter.analysis.run_figures import RunTables, build_figures
from gapmeter.analysis.sweep.build import describe_economy
from gapmeter.analysis.sweep.read import MeasuredRun
from gapmeter.report.document import Section, plain
from gapmeter.report.sweep import _economy
from tests.kit import results as kit
from tests.kit.runs import simulate, slo

STEADY = kit.steady("steady")


def run(seconds: float, joules: float | None, about: Manifest | None = None, **more: Any) -> RunResult:
    """One that held its SLO for so long, with 100 requests of 8 tokens each."""
    figures = build_figures(
        RunTables(simulate(120).requests), [slo("ttft", 50.0, 500)], Evidence("open", "poisson", 8.0)
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
    return kit.result(figures, about, **{"steady": STEADY, "energy": counted, **more})


def manifest(precision: str, emulated: bool = False, engine: str = "vllm") -> Manifest:
    cost = {"gpu": "H100", "usd_per_hour": 2.0, "gpus_per_replica": 1, "utilisation": 0.5}
    support = PrecisionSupport(
        precision=precision, format="", device="H100", native=not emulated, supported=(), emulated=emulated
    )
    return kit.manifest(
        scenario={"server": {"engine": engine, "precision": precision}, "cost": cost},
        target={"precision": support.to_json()},
    )


def distribution(value_ms: float, ends: tuple[float, float] | None) -> PointDistribution:
    p99 = Percentile(value_ms=value_ms, ci_ms=ends)
    return PointDistribution(
        percentiles={99.0: p99}, max_ms=99.0, mean_ms=9.0, count=200, n_eff=9.0, mean_ci_ms=None
    )  # fmt: skip


def economy(verdict: Verdict, precision: str = "bfloat16", joules: float | None = 400.0, **more: Any) -> PointEconomy:
    """Of two repeats."""
    measured = pd.DataFrame({"outcome": ["ok"] * 200, "output_tokens": [8] * 200, "prompt_tokens": [30] * 200})
    about = manifest(precision, **more)
    runs = [MeasuredRun(Path(), run(seconds, joules, about), about) for seconds in (10.0, 15.0)]
    return describe_economy(verdict, runs[0].result.slo, runs, measured)


def section(*points: PointEconomy) -> Section | None:
    """Of a sweep of these points, and one that was lost."""
    metrics = {"ttft": distribution(40.0, (35.0, 48.0)), "itl": distribution(9.0, None)}
    known = [Point.model_construct(index=at, label=one.precision, economy=one, metrics=metrics)
             for at, one in enumerate(points)]  # fmt: skip
    shown = (*known, LostPoint.model_construct(index=len(known), label="fp8"))
    series = (SweptCurve(name="", points=tuple(range(len(shown)))),)
    return _economy(
        SweepFigures.model_construct(points=shown, series=series, levels={"ttft": 99.0, "itl": 99.0})
    )  # fmt: skip


def test_a_point_s_repeats_count_together_at_the_rate_that_was_asked_for() -> None:
    found = economy("PASS")
    assert found.cost.per_request_usd == pytest.approx(2.0 / (3600 * 8.0 * 0.5)), "8 req/s were asked for"
    assert found.energy == PointEnergy(per_request_j=4.0, tokens_per_watt=2.0)
    assert found.value.good_requests_per_usd == pytest.approx(0.97 * 3600 * 8.0 * 0.5 / 2.0)


@pytest.mark.parametrize("unknown", ["energy", "tokens"])
def test_energy_is_told_only_of_a_point_all_of_whose_repeats_tell_theirs(unknown: str) -> None:
    first, second = run(10.0, 400.0), run(10.0, None if unknown == "energy" else 400.0)
    if unknown == "tokens":
        second = second.model_copy(update={"energy": second.energy.model_copy(update={"tokens_per_watt": None})})
    runs = [MeasuredRun(Path(), each, manifest("float16")) for each in (first, second)]
    measured = pd.DataFrame({"outcome": ["ok"] * 200, "output_tokens": [8] * 200, "prompt_tokens": [30] * 200})
    found = describe_economy("PASS", first.slo, runs, measured)
    assert found.energy == PointEnergy(per_request_j=None, tokens_per_watt=None)


def test_a_point_that_missed_its_slos_has_a_dash_and_the_reason() -> None:
    found = section(economy("FAIL", "float16", 400.0, emulated=True))
    (table,) = found.blocks
    assert [column.title for column in table.columns[:3]] == ["point", "precision", "why there is no cost"]
    (row,) = table.rows
    cells = [plain(cell) for cell in row]
    assert cells[1] == "float16, emulated"
    assert "the SLOs were missed" in cells[2]
    assert cells[3:9] == ["–", "–", "4.00", "2.00", "–", "–"]
    assert cells[9:] == ["40.0 ms", "35.0 .. 48.0 ms", "9.00 ms", "not estimable"]


def test_an_attached_server_has_not_the_precision_that_the_scenario_would_have_launched() -> None:
    assert economy("PASS", "float32", engine="attach").precision == "unknown"


def test_precisions_stand_side_by_side_with_the_price_that_they_are_at() -> None:
    found = section(economy("PASS"), economy("FAIL", "float32"))
    assert found.lead.endswith("The price is 1 x H100-SXM at $2.00 an hour, the scenario's price.")
    (table,) = found.blocks
    assert [plain(row[0]) for row in table.rows] == ["bfloat16", "float32"], "a lost point has no economy"
    assert section() is None


def test_prices_that_differ_are_all_told() -> None:
    two = economy("PASS", "float16")
    price = two.cost.price.model_copy(update={"units": 2, "usd_per_hour": 4.0})
    two = two.model_copy(update={"cost": two.cost.model_copy(update={"price": price})})
    assert "2 x H100-SXM" in section(economy("PASS"), two).lead
