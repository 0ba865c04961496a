"""The example that docs/cost.md works by hand is the tool's, to the last digit."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from gapmeter.analysis.cost import cost_of, describe_cost, describe_value, offered_rate
from gapmeter.analysis.judge.evidence import Evidence
from gapmeter.analysis.results.capacity import Fleet
from gapmeter.analysis.results.cost import Price, SloRate, TokensPerRequest
from gapmeter.analysis.run_figures import RunTables, build_figures
from gapmeter.report.cost import cost_sentence, fleet_words, value_sentence
from tests.kit.results import manifest
from tests.kit.runs import simulate, slo

DOCS = Path(__file__).resolve().parents[2] / "docs"
STORED: dict[str, Any] = json.loads((DOCS / "results" / "cost.json").read_text())
SUMMARY, MANIFEST = STORED["summary"], STORED["manifest"]


def test_the_tool_says_today_what_it_said_of_that_run() -> None:
    about = manifest(**{key: MANIFEST[key] for key in ("scenario", "hardware", "placement")})
    figures = build_figures(RunTables(simulate(60).requests), [], Evidence("open", "poisson", 4.0))
    load = figures.load.model_copy(update=SUMMARY["load"])
    held = build_figures(RunTables(simulate(60).requests), [slo("ttft", 50.0, 500)], Evidence("open", "poisson")).slo
    rate = offered_rate(SUMMARY["verdict"], held, load, SUMMARY["counts"]["measured"], None)
    found = describe_cost(rate, TokensPerRequest.model_validate(SUMMARY["tokens_per_request"]), about)
    assert found.to_json() | {"sentence": cost_sentence(found)} == SUMMARY["cost"]
    value = describe_value(found, SUMMARY["goodput"]["share_ci"])
    assert value.to_json() | {"sentence": value_sentence(value, found)} == SUMMARY["value"]


def test_by_hand_it_is_the_same_to_the_last_digit() -> None:
    rate = SUMMARY["load"]["requested_rate"]
    assert rate == SUMMARY["cost"]["rate"]["low"] == 4
    request = 1 * 0.0816 / (3600 * rate * 0.8)
    tokens = SUMMARY["tokens_per_request"]
    assert request == SUMMARY["cost"]["per_request_usd"]
    for name, key in (("output", "per_million_output_tokens"), ("total", "per_million_total_tokens")):
        assert request / tokens[name]["value"] * 1_000_000 == SUMMARY["cost"][f"{key}_usd"]
        assert request / tokens[name]["low"] * 1_000_000 == SUMMARY["cost"][f"{key}_usd_ci"][1]


FIGURES = {
    "request": f"${1e6 * SUMMARY['cost']['per_request_usd']:.4f}",
    "output token": f"${SUMMARY['cost']['per_million_output_tokens_usd']:.4f}",
    "dearest output token": f"${SUMMARY['cost']['per_million_output_tokens_usd_ci'][1]:.4f}",
    "token": f"${SUMMARY['cost']['per_million_total_tokens_usd']:.5f}",
    "dearest token": f"${SUMMARY['cost']['per_million_total_tokens_usd_ci'][1]:.5f}",
    "tokens": f"{SUMMARY['tokens_per_request']['output']['value']:.4f}",
    "value": f"{SUMMARY['value']['good_requests_per_usd']:,.0f}",
}


@pytest.mark.parametrize("name", FIGURES)
def test_the_page_has_the_tool_s_own_digits(name: str) -> None:
    assert FIGURES[name] in page()


def page() -> str:
    return re.sub(r"\s+", " ", (DOCS / "cost.md").read_text())


def test_a_fleet_by_hand_costs_what_a_search_prints_and_the_page_has_it() -> None:
    """The lower bound of the search that docs/results/engines.md shows, and the price of a core there."""
    low, target, usd = 57.1, 50, 0.0408
    replicas = math.ceil(target / (low * 0.8)) + 1
    each = replicas * usd / (3600 * target)
    fleet = Fleet.plan(low, target, 0.2, 1).at_price(usd, None)
    assert (fleet.replicas, fleet.per_request_usd, fleet.usd_per_hour) == (replicas, each, replicas * usd)
    assert fleet_words(fleet) == f", which is ${1e6 * each:.3f} for a million requests in whole replicas"
    assert "3 × 0.0408 ÷ (3600 × 50) = $0.00000068 a request" in page()
    assert each == pytest.approx(0.00000068)
    assert f"that is ${1e6 * each:.3f} for a million requests" in page()
    alone = cost_of(SloRate(low=low, high=None, basis="capacity"), kit_price(usd), NO_TOKENS).per_request_usd
    assert f"${1e6 * alone:.3f}" == "$0.248"
    assert "$0.248" in page()


NO_TOKENS = TokensPerRequest(output=None, prompt=None, total=None)


def kit_price(usd: float) -> Price:
    return Price(
        device="CPU", units=1, usd_per_unit_hour=usd, source="", is_default=True, utilisation=0.8, measured_on="",
        usd_per_hour=usd,
    )  # fmt: skip
