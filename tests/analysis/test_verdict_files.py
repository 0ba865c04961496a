"""JUnit says what the result says, and nothing in it breaks the format."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bench.false_alarms import _run as queue_run
from gapmeter.analysis.judge.steady import describe_steady, detect_warmup
from gapmeter.analysis.results.run import RunResult
from gapmeter.analysis.run_figures import RunTables, build_figures
from gapmeter.report.export.junit import annotations_of, junit, suite_of_run
from gapmeter.report.run import _steady
from gapmeter.report.slo import headline, slo_sentence, verdict_sentence
from gapmeter.scenarios.slo import Slo, parse_slo
from tests.kit.results import result
from tests.kit.runs import EVIDENCE, simulate, slo


def told(slos: list[Slo], **changes: Any) -> RunResult:
    frames = simulate(600, rate=8.0)
    evidence = replace(EVIDENCE, **changes)
    return result(build_figures(RunTables(frames.requests, frames.ledger), slos, evidence, name="chat-p99"))


def cases(told_: RunResult) -> list[tuple[str, str]]:
    """Each case's name and what became of it."""
    suites = ET.fromstring(junit([suite_of_run(told_)]))
    found = [(c.get("name", ""), c[0].tag if len(c) else "passed") for c in suites.iter("testcase")]
    suite = suites[0]
    assert int(suite.get("tests", "")) == len(found)
    for kind, attribute in (("failure", "failures"), ("error", "errors")):
        assert int(suite.get(attribute, "")) == int(suites.get(attribute, "")) == [k for _, k in found].count(kind)
    return found


MIXED = [slo("ttft", 50.0, 1000), slo("ttft", 50.0, 1), slo("ttft", 99.9, 5000)]


@pytest.fixture(scope="module")
def mixed() -> RunResult:
    return told(MIXED)


def test_one_case_an_slo_failed_missed_or_undecided(mixed: RunResult) -> None:
    assert [kind for _, kind in cases(mixed)] == ["passed", "failure", "error"]


def test_no_case_of_an_invalid_run_passes() -> None:
    assert [kind for _, kind in cases(told(MIXED, records_dropped=2))] == ["error"] * 3
    assert cases(told([], records_dropped=2)) == [("the run is a valid measurement", "error")]
    assert cases(told([])) == [("the run is a valid measurement", "passed")]


def test_an_invalid_run_is_annotated_with_why_and_with_no_slo_that_it_missed() -> None:
    reason = "2 records were dropped because the disk was full"
    lines = annotations_of(suite_of_run(told(MIXED, records_dropped=2)))
    assert lines == [f"::error title=chat-p99 is not valid::{reason}"]
    assert len(annotations_of(suite_of_run(told(MIXED)))) == 2


def test_the_failure_text_holds_expression_value_interval_n_and_owner(mixed: RunResult) -> None:
    failure = ET.fromstring(junit([suite_of_run(mixed)])).find(".//failure")
    row = mixed.slo[1]
    assert failure.get("message") == slo_sentence(row)
    lines = dict(line.split(": ", 1) for line in (failure.text or "").splitlines())
    assert lines["expression"] == "ttft p50 <= 1 ms"
    assert lines["n"].startswith("600 (effective n ")
    assert lines["owner"] == "no single cause"
    assert f"{row.value:.1f} ms" == lines["value"]
    assert " .. " in lines["95 % interval"]


def test_whose_the_slow_requests_are_is_said_as_on_the_page() -> None:
    """On a CPU no GPU is to blame, and of a run that is not valid nobody is."""
    missed = told([slo("e2e", 50.0, 1)])
    tail = missed.tail.e2e
    front = tail.owners[0].model_copy(update={"owner": "GPU", "stages": ("decode", "input_prep")})
    led = tail.model_copy(update={"owners": (front, *tail.owners[1:]), "leading": "GPU"})
    on_cpu = missed.model_copy(update={"device": "CPU", "tail": missed.tail.model_copy(update={"e2e": led})})
    assert "owner: CPU forward pass (decode, input preparation)" in junit([suite_of_run(on_cpu)])
    assert "owner: not known" in junit([suite_of_run(on_cpu.model_copy(update={"verdict": "INVALID"}))])


@pytest.mark.parametrize("name", ["a<b>&\"c'", "bell\x07", "lone\ud800", "ünï"])
def test_any_name_gives_a_file_that_parses(mixed: RunResult, name: str) -> None:
    root = ET.fromstring(junit([suite_of_run(mixed.model_copy(update={"name": name}))]).encode())
    assert root[0].get("name") is not None


def test_junit_says_where_its_figures_are_from(mixed: RunResult) -> None:
    facts = mixed.provenance.facts()
    suite = ET.fromstring(junit([suite_of_run(mixed)]))[0]
    assert suite[0].tag == "properties"
    assert {each.get("name"): each.get("value") for each in suite[0]} == facts


def test_what_changed_during_the_run_is_not_to_be_decided_by_more_requests() -> None:
    """As the first line of the summary says: more of the same may not decide it."""
    undecided = told([slo("ttft", 99.9, 5000)])
    assert undecided.verdict == "INCONCLUSIVE"
    unsteady = undecided.model_copy(update={"steady": undecided.steady.model_copy(update={"state": "unsteady"})})
    assert "latency changed during the run" in verdict_sentence(unsteady)
    for text in (junit([suite_of_run(unsteady)]), headline(unsteady)):
        assert "latency changed during the run" in text
        assert "more request" not in text


def test_failures_are_told_as_failures() -> None:
    one = told([parse_slo("errors <= 0.1 %")])  # none of 600
    unsteady = one.model_copy(update={"steady": one.steady.model_copy(update={"state": "unsteady"})})
    assert "latency" not in verdict_sentence(unsteady) and "needs" in verdict_sentence(unsteady)
    about = {"status": "FAIL", "basis": "share", "value": 0.6, "low": 0.04, "high": 0.97, "beyond": 60, "count": 100}
    missed = one.slo[0].model_copy(update={**about, "limit": 0.05, "needs": None, "leaning": None})
    assert "exceeded" not in slo_sentence(missed)


def test_what_was_offered_is_counted_as_what_was_served() -> None:
    """Of conversations the requested rate is theirs, not their requests'."""
    queue = queue_run(np.random.default_rng(4), 1.5)
    one = told([slo("ttft", 99, 5000)])
    load = one.load.model_copy(update={"unit": "conversations", "requested_rate": 10.0, "delivered_rate": 30.0})
    growing = describe_steady(queue, detect_warmup(queue), loop="open", searched=True)
    said = _steady(one.model_copy(update={"steady": growing, "load": load}))
    assert "(30/s) was above" in said
