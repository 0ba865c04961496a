"""Cost at the SLA: the formula, its interval, and when there is none."""

from __future__ import annotations

import json
import math
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapmeter.analysis.cost.cost import (
    NoRate,
    Rate,
    Tokens,
    cost_of,
    describe_cost,
    describe_tokens,
    rate_at_sla,
)
from gapmeter.analysis.cost.economics import SearchTrial, describe_economics, describe_search, describe_value
from gapmeter.analysis.cost.energy import Energy, describe_energy
from gapmeter.analysis.cost.price import NoPrice, Price, price_of
from gapmeter.analysis.stats.estimate import Estimate
from gapmeter.analysis.stats.exact import rate_bounds
from gapmeter.report.cost import cost_picture, economy_lines, economy_rows
from gapmeter.report.figure import Value

H100 = "NVIDIA H100 80GB HBM3, 81559 MiB, 570.1"
TOKENS = Tokens(Estimate(200.0, 190.0, 210.0), Estimate(1200.0, 1150.0, 1250.0))
ONE = Price("H100-SXM", 1, 2.0, "the scenario's price", is_default=False, utilisation=0.5)


def manifest(cost: dict[str, Any] | None = None, gpus: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    """A manifest's parts that a price comes from."""
    settings = {"gpu": None, "usd_per_hour": None, "gpus_per_replica": 1, "utilisation": 0.8, **(cost or {})}
    return {
        "scenario": {"cost": settings, "server": {"engine": "vllm", "precision": "bfloat16"}},
        "hardware": {"cores": 8, "gpus": list(gpus)},
        "placement": {"server": [2, 3, 4]},
        **more,
    }


def passed(**more: Any) -> dict[str, Any]:
    """The parts of an ordinary run's summary that a rate comes from."""
    load = {"loop": "open", "arrivals": "poisson", "window_s": 100.0, "dispersion": 1.1}
    tokens = {"output": {"value": 200.0, "low": 190.0, "high": 210.0}, "total": None}
    return {
        "verdict": "PASS", "slo": [{}], "load": load, "counts": {"measured": 800}, "warnings": [],
        "tokens_per_request": tokens, **more,
    }  # fmt: skip


def test_a_request_costs_g_times_the_price_over_3600_times_the_rate_times_the_planned_utilisation() -> None:
    price = Price("H100-SXM", 4, 2.49, "the scenario's price", is_default=False, utilisation=0.8)
    found = cost_of(Rate(10.0, 12.5, "capacity"), price, TOKENS)
    assert found.per_request.value == 4 * 2.49 / (3600 * 10.0 * 0.8)
    assert found.per_request.low == 4 * 2.49 / (3600 * 12.5 * 0.8)
    assert found.per_request.high == found.per_request.value
    output = found.per_million_output_tokens
    assert output is not None and output.low is not None and output.high is not None
    assert output.value == pytest.approx(found.per_request.value / 200 * 1e6)
    assert output.low == pytest.approx(4 * 2.49 / (3600 * 12.5 * 0.8) / 210 * 1e6)
    assert output.high == pytest.approx(4 * 2.49 / (3600 * 10.0 * 0.8) / 190 * 1e6)


@given(
    low=st.floats(1e-3, 1e4), factor=st.floats(1, 100), usd=st.floats(1e-3, 1e3), units=st.integers(1, 64),
    used=st.floats(0.01, 1),
)  # fmt: skip
def test_the_interval_holds_the_value_and_doubling_the_price_doubles_all_of_it(
    low: float, factor: float, usd: float, units: int, used: float
) -> None:
    rate = Rate(low, low * factor, "capacity")
    price = Price("x", units, usd, "", is_default=False, utilisation=used)
    dear = Price("x", units, 2 * usd, "", is_default=False, utilisation=used)
    once, twice = (cost_of(rate, each, TOKENS) for each in (price, dear))
    for name in ("per_request", "per_million_output_tokens", "per_million_total_tokens"):
        one, two = getattr(once, name), getattr(twice, name)
        assert 0 < one.low <= one.value <= one.high
        assert (two.low, two.value, two.high) == pytest.approx((2 * one.low, 2 * one.value, 2 * one.high))


def test_a_rate_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="a rate of 0"):
        cost_of(Rate(0.0, None, "offered"), ONE, TOKENS)


@pytest.mark.parametrize(
    ("settings", "gpus", "units", "usd", "device", "default"),
    [
        ({}, (), 3, 0.0408, "CPU", True),
        ({"usd_per_hour": 1.5}, (), 1, 1.5, "CPU", False),
        ({}, (H100,), 1, 1.69, "H100-SXM", True),
        ({"usd_per_hour": 2.49, "gpus_per_replica": 4}, (H100, H100), 4, 2.49, "H100-SXM", False),
        ({"gpu": "L4", "gpus_per_replica": 2}, (), 2, 0.7992, "L4", True),
        ({"usd_per_hour": 9.0}, ("Weird GPU 3000, 1 MiB, 1",), 1, 9.0, "Weird GPU 3000", False),
    ],
)  # fmt: skip
def test_the_price_is_the_scenario_s_own_or_the_catalogue_s_for_the_named_or_recognised_device(
    settings: dict[str, Any], gpus: tuple[str, ...], units: int, usd: float, device: str, default: bool
) -> None:
    found = price_of(manifest(settings, gpus))
    assert (found.units, found.usd_per_unit_hour, found.device, found.is_default) == (units, usd, device, default)
    assert found.usd_per_hour == units * usd


@pytest.mark.parametrize(
    ("flags", "gpus"),
    [({}, 1), ({"tensor_parallel_size": 4}, 4), ({"tensor-parallel-size": "2", "pipeline_parallel_size": 2}, 4),
     ({"tp": 8, "dp": 2}, 16), ({"tensor_parallel_size": "auto"}, 1)],
)  # fmt: skip
def test_a_model_that_is_split_over_gpus_costs_all_of_them(flags: dict[str, Any], gpus: int) -> None:
    run = manifest({"gpus_per_replica": None}, (H100,))
    run["scenario"]["server"]["args"] = flags
    assert price_of(run).units == gpus
    assert price_of(manifest({"gpus_per_replica": 3}, (H100,))).units == 3


def test_pricing_another_device_than_the_one_measured_is_said() -> None:
    price = price_of(manifest({"gpu": "L4"}))
    assert price.measured_on == "CPU"
    assert "Priced as L4, but measured on CPU" in cost_of(Rate(1.0, None, "offered"), price, TOKENS).sentence
    assert price_of(manifest({"gpu": "H100"}, (H100,))).measured_on == ""


def test_a_default_price_names_its_source_and_date() -> None:
    said = cost_of(Rate(1.0, None, "offered"), price_of(manifest({}, (H100,))), TOKENS).sentence
    assert "a default price (InferenceX, neocloud, 2026-04)" in said


def test_nobody_knows_the_price_of_a_gpu_outside_the_catalogue_or_of_somebody_else_s_server() -> None:
    with pytest.raises(NoPrice, match=r"Weird GPU 3000 is not in the catalogue; write cost.usd_per_hour"):
        price_of(manifest({}, ("Weird GPU 3000, 1 MiB, 1",)))
    foreign = manifest()
    foreign["scenario"]["server"]["engine"] = "attach"
    with pytest.raises(NoPrice, match=r"somebody else's server: .* write cost\.gpu"):
        price_of(foreign)


def test_a_capacity_search_gives_both_ends_of_the_rate() -> None:
    found = rate_at_sla({"capacity": {"rate": 9.0, "low": 8.0, "high": 10.0}})
    assert found == Rate(8.0, 10.0, "capacity")
    part = describe_cost({**passed(), "capacity": {"rate": 9.0, "low": 8.0, "high": 10.0}}, manifest({}, (H100,)))
    assert part["status"] == "bounded"
    assert part["per_request_usd_ci"] == [1.69 / (3600 * 10 * 0.8), 1.69 / (3600 * 8 * 0.8)]


def test_a_run_that_passed_is_at_least_this_cheap() -> None:
    part = describe_cost(passed(), manifest({"usd_per_hour": 2.0}, (H100,)))
    low, _ = rate_bounds(800, 100.0)
    assert part["status"] == "at_most"
    assert part["per_request_usd"] == 2.0 / (3600 * low * 0.8)
    assert part["per_request_usd_ci"] == [None, part["per_request_usd"]]
    assert "At least this cheap; gapmeter capacity finds the rest" in part["sentence"]


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"verdict": "FAIL"}, "the SLOs were missed"),
        ({"verdict": "INCONCLUSIVE"}, "the verdict is INCONCLUSIVE"),
        ({"verdict": "INVALID"}, "the verdict is INVALID"),
        ({"slo": []}, "sets no SLO"),
        ({"load": {"loop": "closed", "arrivals": "closed"}}, "a closed loop has no rate"),
        ({"load": {"loop": "open", "arrivals": "ramp"}}, "the rate changed through the run"),
        ({"steady": {"state": "unsteady"}}, "no steady state"),
        ({"capacity": {"low": None, "high": 3.0}}, "no rate was found"),
    ],
)
def test_what_proves_no_rate_has_no_cost_and_never_a_zero(more: dict[str, Any], why: str) -> None:
    with pytest.raises(NoRate, match=why):
        rate_at_sla(passed(**more))
    part = describe_cost(passed(**more), manifest())
    assert part["per_request_usd"] is None and why in part["reason"]
    assert describe_value(part, {"share_ci": [0.9, 1.0]})["good_requests_per_usd"] is None


def test_tokens_per_request_are_means_over_successes_with_student_s_interval() -> None:
    measured = pd.DataFrame(
        {"outcome": ["ok"] * 4 + ["timeout"], "output_tokens": [10, 12, 14, 16, 1], "prompt_tokens": [5] * 4 + [9]}
    )
    found = describe_tokens(measured)
    assert found["output"]["value"] == 13.0 and found["total"]["value"] == 18.0
    assert found["prompt"] == {"value": 5.0, "low": 5.0, "high": 5.0}
    assert found["output"]["high"] - 13.0 >= 3.182 * math.sqrt(20 / 3) / 2 - 1e-3  # t(3) at 97.5 %, tau at least 1
    untold = describe_tokens(measured.assign(prompt_tokens=[5, None, 5, 5, 9]))
    assert (untold["prompt"], untold["total"]) == (None, None)


def test_energy_is_spread_over_requests_and_tokens_and_its_idle_share_is_stated() -> None:
    """The window is 2 s longer than the answers took: a request that failed was waited for."""
    summary = {"throughput": {"requests_per_s": 5.0, "output_tokens_per_s": 125.0, "span_s": 8.0}}
    part = describe_energy(summary, Energy(3000.0, 2970.0, 3030.0, 10.0, 900.0, "NVML's counter"))
    assert (part["per_request_j"], part["per_request_j_ci"]) == (75.0, [74.25, 75.75])
    assert (part["per_output_token_j"], part["tokens_per_watt"]) == (3.0, 1 / 3)
    assert (part["idle_share"], part["watts"]) == (0.3, 300.0)
    assert part["sentence"] == "75.0 J a request, 0.333 output tokens per joule (30 % of it idle power; NVML's counter)"


def test_unmeasured_energy_is_null_and_says_so() -> None:
    part = describe_energy({}, None)
    assert part["status"] == "unmeasured" and part["per_request_j"] is None
    assert part["sentence"].startswith("energy unmeasured")


def test_cost_efficiency_and_value_are_three_lines() -> None:
    measured = pd.DataFrame({"outcome": ["ok"] * 3, "output_tokens": [8, 9, 7], "prompt_tokens": [5, 6, 7]})
    run = passed(goodput={"share_ci": [0.98, 1.0]})
    summary = run | describe_economics(run, manifest({"usd_per_hour": 3.6}), measured, None)
    lines = economy_lines(summary)
    assert [name for name, _ in lines] == ["cost", "energy", "value"]
    assert lines[1][1].startswith("unmeasured")
    assert summary["value"]["good_requests_per_usd"] == 0.98 / summary["cost"]["per_request_usd"]
    assert [row[0] for row in economy_rows(summary)][-2:] == [
        "efficiency: output tokens per joule", "value: good requests for $1",
    ]  # fmt: skip
    assert "not looked for" in cost_picture(summary["cost"])


def test_a_search_for_capacity_has_a_cost_between_both_ends_and_the_value_of_its_best_trial() -> None:
    tokens = {"output": {"value": 10.0, "low": 9.0, "high": 11.0}, "total": None}
    counted = Energy(100.0, None, None, 10.0, None, "a counter")
    runs = [
        {
            "counts": {"measured": n},
            "goodput": {"share_ci": [good, 1.0]},
            "tokens_per_request": tokens | {"total": total},
            "energy": describe_energy(
                {"throughput": {"requests_per_s": rate, "output_tokens_per_s": 9.0, "span_s": 10.0}}, counted
            ),
        }
        for n, good, rate, total in ((100, 0.99, 4.0, None), (900, 0.97, 7.0, tokens["output"]), (50, 0.5, 9.0, None))
    ]  # fmt: skip
    trials = [SearchTrial(4.0, True, runs[0]), SearchTrial(7.0, True, runs[1]), SearchTrial(9.0, False, runs[2])]
    search = {"capacity": {"rate": 7.5, "low": 6.5, "high": 8.0}}
    found = describe_search(search, manifest({"usd_per_hour": 3.6}), trials)
    assert found["cost"]["per_request_usd_ci"] == [3.6 / (3600 * 8.0 * 0.8), 3.6 / (3600 * 6.5 * 0.8)]
    assert found["value"]["good_requests_per_usd"] == 0.97 / found["cost"]["per_request_usd"]
    assert found["energy"]["per_request_j"] == 100 / 70
    assert found["tokens_per_request"]["total"] == tokens["output"]
    assert describe_search(search, manifest(), []) == {}


def test_a_run_without_a_cost_shows_a_dash_and_the_reason() -> None:
    measured = pd.DataFrame({"outcome": ["ok"] * 3, "output_tokens": [8, 9, 7], "prompt_tokens": [5, 6, 7]})
    run = passed(verdict="FAIL")
    summary = run | describe_economics(run, manifest(), measured, None)
    rows = economy_rows(summary)
    assert len(rows) == 3
    said, figure = rows[0][1:3]
    assert isinstance(figure, Value) and figure.text == "–" and "missed" in str(said)
    assert json.loads(json.dumps(summary))["cost"]["per_request_usd"] is None
