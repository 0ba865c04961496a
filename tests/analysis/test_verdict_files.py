"""JUnit and Markdown say what the summary says, and nothing in them breaks their formats."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gapmeter.analysis.results.manifest import Slo
from gapmeter.analysis.summary import build_figures
from gapmeter.report import bridge
from gapmeter.report.export.junit import junit, write_junit
from gapmeter.report.export.markdown import markdown
from tests.analysis.report_frames import simulate
from tests.analysis.test_summary import EVIDENCE
from tests.analysis.test_verdict import slo
from tests.kit import result


def told(slos: list[Slo], count: int = 600, **changes: Any) -> dict[str, Any]:
    name = changes.pop("name", "chat-p99")
    frames = simulate(count, rate=8.0, failures=changes.pop("failures", 0))
    figures = build_figures(frames.requests, frames.ledger, None, slos, replace(EVIDENCE, **changes), name=name)
    return bridge.run_document(result(figures))


def cases(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Each case's name and what became of it."""
    suites = ET.fromstring(junit(summary))
    found = [(c.get("name", ""), c[0].tag if len(c) else "passed") for c in suites.iter("testcase")]
    suite = suites[0]
    assert int(suite.get("tests", "")) == len(found)
    for kind, attribute in (("failure", "failures"), ("error", "errors")):
        assert int(suite.get(attribute, "")) == int(suites.get(attribute, "")) == [k for _, k in found].count(kind)
    return found


MIXED = [slo("ttft", 50.0, 1000), slo("ttft", 50.0, 1), slo("ttft", 99.9, 5000)]


def test_one_case_an_slo_failed_missed_or_undecided() -> None:
    assert [kind for _, kind in cases(told(MIXED))] == ["passed", "failure", "error"]


def test_no_case_of_an_invalid_run_passes() -> None:
    assert [kind for _, kind in cases(told(MIXED, records_dropped=2))] == ["error"] * 3
    assert cases(told([], records_dropped=2)) == [("the run is a valid measurement", "error")]
    assert cases(told([])) == [("the run is a valid measurement", "passed")]


def test_the_failure_text_holds_expression_value_interval_n_and_owner(tmp_path: Path) -> None:
    summary = told(MIXED)
    write_junit(tmp_path / "junit.xml", summary)
    failure = ET.parse(tmp_path / "junit.xml").getroot().find(".//failure")
    assert failure is not None
    row = summary["slo"][1]
    assert failure.get("message") == row["sentence"]
    lines = dict(line.split(": ", 1) for line in (failure.text or "").splitlines())
    assert lines["expression"] == "ttft p50 <= 1 ms"
    assert lines["n"].startswith("600 (worth ")
    assert lines["owner"] == f"{row['owner']} ({row['stage']})"
    assert f"{row['value_ms']:.1f} ms" == lines["value"]
    assert " .. " in lines["95 % interval"]


@pytest.mark.parametrize("name", ["a<b>&\"c'", "bell\x07", "lone\ud800", "ünï"])
def test_any_name_gives_a_file_that_parses(name: str) -> None:
    root = ET.fromstring(junit(told(MIXED, name=name)).encode())
    assert root[0].get("name") is not None


def tables(text: str) -> list[list[list[str]]]:
    """Every Markdown table as rows of cells."""
    out: list[list[list[str]]] = [[]]
    for line in text.splitlines():
        if line.startswith("| "):
            out[-1].append([cell.strip() for cell in line.strip("|").split(" | ")])
        elif out[-1]:
            out.append([])
    return [table for table in out if table]


def test_the_markdown_has_verdict_slos_composition_and_percentiles() -> None:
    summary = told([*MIXED, slo("errors", None, 0.5)], failures=6)
    text = markdown(summary)
    assert text.startswith(f"### {summary['verdict']}: chat-p99\n\n")
    slos, composition, percentiles = tables(text)
    assert [row[0] for row in slos[2:]] == [row["status"] for row in summary["slo"]]
    assert [row[1] for row in slos[2:]] == [f"`{row['text']}`" for row in summary["slo"]]
    assert [row[0] for row in percentiles[2:]] == ["TTFT", "ITL", "TPOT", "E2E"]
    assert composition[-1][0] == "**sum**"
    assert all(len(row) == len(table[0]) for table in (slos, composition, percentiles) for row in table)
    assert "6 failed" in text


def test_warnings_reach_the_markdown_with_their_flag() -> None:
    text = markdown(told(MIXED, client_cpu_share=0.95))
    assert "### INVALID" in text
    assert "- the busiest generator process used 95 % of a core" in text
    assert "Try `--set load.processes=2`." in text


def test_markup_in_a_name_stays_text() -> None:
    assert "<script>" not in markdown(told(MIXED, name="<script>"))


def test_junit_says_where_its_figures_are_from() -> None:
    facts = {"scenario": "chat", "model": "<b>", "command": "gapmeter run chat"}
    suite = ET.fromstring(junit({**told(MIXED), "provenance": facts}))[0]
    assert suite[0].tag == "properties"
    assert {each.get("name"): each.get("value") for each in suite[0]} == facts
