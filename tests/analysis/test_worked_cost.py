"""The example that docs/cost.md works by hand is the tool's, to the last digit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from gapmeter.analysis.analyse import build_figures
from gapmeter.analysis.cost import describe_cost, describe_value, offered_rate
from gapmeter.analysis.judge.evidence import Evidence
from gapmeter.analysis.results.cost import TokensPerRequest
from gapmeter.report.cost import cost_sentence, value_sentence
from tests.kit.results import manifest
from tests.kit.runs import simulate, slo

DOCS = Path(__file__).resolve().parents[2] / "docs"
STORED: dict[str, Any] = json.loads((DOCS / "results" / "cost.json").read_text())
SUMMARY, MANIFEST = STORED["summary"], STORED["manifest"]


def test_the_tool_says_today_what_it_said_of_that_run() -> None:
    about = manifest(**{key: MANIFEST[key] for key in ("scenario", "hardware", "placement")})
    figures = build_figures(simulate(60).requests, None, None, [], Evidence("open", "poisson", 4.0))
    load = figures.load.model_copy(update=SUMMARY["load"])
    held = build_figures(simulate(60).requests, None, None, [slo("ttft", 50.0, 500)], Evidence("open", "poisson")).slo
    rate = offered_rate(SUMMARY["verdict"], held, load, SUMMARY["counts"]["measured"], None)
    found = describe_cost(rate, TokensPerRequest.model_validate(SUMMARY["tokens_per_request"]), about)
    assert found.to_json() | {"sentence": cost_sentence(found)} == SUMMARY["cost"]
    value, share_ci = describe_value(found, SUMMARY["goodput"]["share_ci"]), SUMMARY["goodput"]["share_ci"]
    assert value.to_json() | {"sentence": value_sentence(value, share_ci)} == SUMMARY["value"]


def test_by_hand_it_is_the_same_to_the_last_digit() -> None:
    count, seconds = SUMMARY["counts"]["measured"], SUMMARY["load"]["window_s"]
    rate = stats.chi2.ppf(0.025, 2 * count) / 2 / count * (count / seconds)
    assert rate == SUMMARY["cost"]["rate"]["low"]
    request = 1 * 0.0816 / (3600 * rate * 0.8)
    tokens = SUMMARY["tokens_per_request"]
    assert request == SUMMARY["cost"]["per_request_usd"]
    for name, key in (("output", "per_million_output_tokens"), ("total", "per_million_total_tokens")):
        assert request / tokens[name]["value"] * 1_000_000 == SUMMARY["cost"][f"{key}_usd"]
        assert request / tokens[name]["low"] * 1_000_000 == SUMMARY["cost"][f"{key}_usd_ci"][1]


FIGURES = {
    "window": SUMMARY["load"]["window_s"],
    "rate": SUMMARY["cost"]["rate"]["low"],
    "request": SUMMARY["cost"]["per_request_usd"],
    "output token": SUMMARY["cost"]["per_million_output_tokens_usd"],
    "dearest output token": SUMMARY["cost"]["per_million_output_tokens_usd_ci"][1],
    "token": SUMMARY["cost"]["per_million_total_tokens_usd"],
    "dearest token": SUMMARY["cost"]["per_million_total_tokens_usd_ci"][1],
    "tokens": SUMMARY["tokens_per_request"]["output"]["value"],
    "value": SUMMARY["value"]["good_requests_per_usd"],
}


@pytest.mark.parametrize("name", FIGURES)
def test_the_page_has_the_tool_s_own_digits(name: str) -> None:
    page = re.sub(r"\s+", " ", (DOCS / "cost.md").read_text())
    assert repr(FIGURES[name]) in page
