"""A run as Markdown, for a comment on a pull request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gapmeter.analysis.results import Manifest, RunResult
from gapmeter.analysis.results.regression import Regression, RegressionRow
from gapmeter.report import markdown, run
from tests.kit.runs import write_run

MIXED = ("ttft p50 <= 5000 ms", "ttft p50 <= 1 ms", "ttft p99.9 <= 300 ms", "errors <= 50 %")


def _told(path: Path, regression: Regression | None = None, **options: Any) -> tuple[str, dict[str, Any]]:
    folder = write_run(path / "r", count=400, rate=12.0, **options)
    document = run.brief(RunResult.read(folder.path), Manifest.read(folder.path), regression)
    return markdown.text(document), json.loads(folder.summary.read_text())


def _tables(text: str) -> list[list[list[str]]]:
    """Every table as rows of cells."""
    out: list[list[list[str]]] = [[]]
    for line in text.splitlines():
        if line.startswith("| "):
            out[-1].append([cell.strip() for cell in line.strip("|").split(" | ")])
        elif out[-1]:
            out.append([])
    return [table for table in out if table]


def test_it_has_verdict_load_slos_composition_and_percentiles(tmp_path: Path) -> None:
    text, summary = _told(tmp_path, slos=MIXED)
    assert text.startswith(f"### {summary['verdict']}: chat-p99 @ transformers 5.19.0 · builtin:tiny")
    assert "\n\n12 req/s open loop, 33 s, n = 400\n\n" in text
    why, slos, composition, percentiles = _tables(text)
    assert [row[0] for row in slos[2:]] == [row["status"] for row in summary["slo"]]
    assert [row[1] for row in slos[2:]] == ["TTFT p50", "TTFT p50", "TTFT p99.9", "errors"]
    assert [row[4] for row in slos[2:]] == ["5.00 s", "1.00 ms", "300 ms", "50 %"]
    assert why[0][0] == "WHY TTFT", "above the objectives, since one was missed"
    assert "**served** 12" in text
    assert [row[0] for row in percentiles[2:]] == ["TTFT", "ITL", "TPOT", "E2E"]
    assert composition[-1][0] == "sum"
    assert all(len(row) == len(table[0]) for table in (why, slos, composition, percentiles) for row in table)
    assert "**trust** valid: lag p99 60.0 µs" in text
    assert "baseline" not in text


def test_warnings_reach_it_with_their_cause(tmp_path: Path) -> None:
    text, _ = _told(tmp_path, failures=80)
    assert text.startswith("### INVALID")
    assert text.count("80 of 400 requests failed") == 1, "as the reason, beside the verdict"
    assert "- Errors. Likely: the server failed; its own log says why." in text


def test_how_it_compares_with_its_baseline_stands_in_it(tmp_path: Path) -> None:
    row = RegressionRow.model_construct(
        status="REGRESSED", name="ttft p99", a_ms=100.0, b_ms=150.0, relative=0.5, relative_ci=(0.31, 0.72)
    )
    regression = Regression.model_construct(status="REGRESSED", baseline="main", sentence="p99 TTFT grew", rows=(row,))
    text, _ = _told(tmp_path, regression)
    assert text.startswith("### PASS, REGRESSED: chat-p99 @ ")
    assert "**REGRESSED** against main: p99 TTFT grew." in text
    assert text.index("**REGRESSED**") < text.index("| SLO |"), "it is what a pull request is judged by"
    assert "| REGRESSED | ttft p99 | 100 ms | 150 ms | +50 % | +31 % .. +72 % |" in text


def test_a_run_that_did_not_regress_is_headed_by_its_own_verdict(tmp_path: Path) -> None:
    regression = Regression.model_construct(status="WITHIN", baseline="main", sentence="it did not grow", rows=())
    text, _ = _told(tmp_path, regression)
    assert text.startswith("### PASS: chat-p99 @ ")
    assert "**WITHIN** against main: it did not grow." in text
