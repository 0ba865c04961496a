"""What single sections of a run say: failures, other tools' definitions, cost, the device's samples."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from gapmeter.analysis.device.telemetry import Samples, read_telemetry
from gapmeter.analysis.requests.figures import distribution
from gapmeter.analysis.results.cost import Cost, Economy, Interval, NoCost, NoEnergy, Price, SloRate, TokensPerRequest
from gapmeter.analysis.results.cost import Value as Worth
from gapmeter.analysis.results.device import Telemetry, Utilisation
from gapmeter.analysis.results.manifest import Manifest
from gapmeter.analysis.results.requests import FailureExample, Outage, PeerDefinitions, PeerFigures
from gapmeter.analysis.results.run import RunResult
from gapmeter.analysis.stats import series
from gapmeter.analysis.stats.series import Series
from gapmeter.records import RunFolder
from gapmeter.report import compute, cost, failures, html, percentiles, run, slo, terminal, trust
from gapmeter.report.device import levels_of
from gapmeter.report.document import Figure, Paragraph, Table
from gapmeter.report.run_folder import ReportedRun
from gapmeter.report.timeline import Span
from tests.kit.runs import write_run

S = 1_000_000_000


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    path = tmp_path_factory.mktemp("run") / "r"
    return write_run(path, count=900, rate=12.0, failures=30, error="<b>boom</b>")


@pytest.fixture(scope="module")
def well(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return write_run(tmp_path_factory.mktemp("run") / "r", count=60)


# --- failures


def test_the_terminal_shows_failures_with_their_first_examples_and_what_they_do_to_the_tail(failing: RunFolder) -> None:
    result = RunResult.read(failing.path)
    document = run.brief(result, Manifest.read(failing.path))
    lines = terminal.text(document).plain.splitlines()
    at = lines.index(" failed  30 of 900: 30 answered 5xx")
    assert lines[at + 1] == "         first http_5xx: <b>boom</b> (500, at 1.6 s)"
    assert lines[at + 2].startswith("         of all 900, counting failures as at least 30 s: TTFT ")
    assert "   SLO, of all 900  measured" in "\n".join(lines)
    assert "\n latency of 870 answered\n TTFT    p50 " in "\n".join(lines)


@pytest.mark.parametrize(
    ("cut", "served", "failed", "whose"),
    [
        (22, "22 of 892 failed (2.5 %)", "22 of 892: 22 cut off; also 8 aborted with the run", "all 892"),
        (0, "none failed", "0 of 870 by the server; also 30 aborted with the run", "all 870"),
    ],
)
def test_what_was_aborted_with_the_run_stands_beside_what_the_server_failed(
    failing: RunFolder, cut: int, served: str, failed: str, whose: str
) -> None:
    result = RunResult.read(failing.path)
    of = {name: count for name, count in (("cut", cut), ("aborted", 30 - cut)) if count}
    classes = tuple(result.failures[0].model_copy(update={"name": name, "count": of[name]}) for name in of)
    counts = result.counts.model_copy(update={"failed": of})
    found = result.model_copy(update={"failures": classes, "counts": counts, "slo": result.slo[:2]})
    text = terminal.text(run.brief(found, Manifest.read(failing.path))).plain
    shown = " ".join(text.split())
    assert f"prompt tok/s, {served}" in shown
    assert f"failed {failed}" in shown
    assert f"SLO, of {whose}" in shown


def test_where_failures_alone_miss_the_limits_errors_lead_and_nothing_explains_slow_requests(
    failing: RunFolder,
) -> None:
    result = RunResult.read(failing.path)
    text = terminal.text(run.brief(result, Manifest.read(failing.path))).plain
    assert [slo.status for slo in result.slo] == ["FAIL"] * 3
    assert "\nFAIL  errors 3.3 % (30 of 900), limit 1.0 %.\n failed  30 of 900" in text
    assert " x TTFT p99         no value " in text
    assert "more than 1 % failed" in text
    assert "WHY" not in text
    assert slo.headline(result).startswith("30 of 900 requests failed")
    gone = Outage(from_s=9.0, until_s=11.4, requests=30, failed={"refused": 30})
    answers = tuple(each.model_copy(update={"basis": "outage", "outage": gone}) for each in result.slo)
    killed = slo.verdict_sentence(result.model_copy(update={"slo": answers}))
    assert killed.startswith("From 9.0 s until 11.4 s all 30 requests failed (30 refused): errors 3.3 %")
    died = result.model_copy(update={"outage": gone})
    told = terminal.text(run.brief(died, Manifest.read(failing.path)), details=True).plain
    steady = told.partition(" steady ")[2].partition(" device ")[0]
    assert "; from 9.0 s until 11.4 s all 30 requests failed (30 refused)." in " ".join(steady.split())
    lasting = trust.sustained(died)
    assert str(lasting.lead).endswith(" From 9.0 s until 11.4 s all 30 requests failed (30 refused).")


def test_what_a_server_said_of_a_failure_is_wrapped_and_not_cut(failing: RunFolder) -> None:
    result = RunResult.read(failing.path)
    why = "the answer is complete without a single token, as if " + "x" * 150
    of_class = result.failures[0]
    example = of_class.examples[0].model_copy(update={"error": why})
    told = result.model_copy(update={"failures": (of_class.model_copy(update={"examples": (example,)}),)})
    lines = terminal.text(run.brief(told, Manifest.read(failing.path))).plain.splitlines()
    assert max(map(len, lines)) <= 80
    told_there = "".join(lines).replace(" ", "")
    assert f"firsthttp_5xx:{why}(500,at1.6s)".replace(" ", "") in told_there


def test_the_page_shows_failures_as_text_and_a_percentile_among_them_as_a_bound(failing: RunFolder) -> None:
    page = html.page(run.document(failing))
    assert "Requests that failed" in page
    assert "&lt;b&gt;boom&lt;/b&gt;" in page
    assert "<b>boom</b>" not in page
    bound = 'data-key="metrics_censored.e2e.p99_ms" title="so many requests failed">&gt; 30 s<'
    assert bound in page


def test_a_run_without_failures_has_no_section_of_them(well: RunFolder) -> None:
    result = RunResult.read(well.path)
    assert failures.failed(result) is failures.failed_in_short(result) is None
    page = html.page(run.document(well))
    assert "Requests that failed" not in page
    assert "at their time-out</td>" not in page


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        ('{"error": {"message": "out of luck", "code": 500}}', "out of luck"),
        ('{"error": "too long"}', "too long"),
        ('{"message": "busy"}', "busy"),
        ('{"error": {"message": "cut o', '{"error": {"message": "cut o'),
        ("[1, 2]", "[1, 2]"),
        ('{"error": "half a \\ud83d"}', "half a ?"),
        ("Bad gateway", "Bad gateway"),
    ],
)
def test_what_a_server_said_is_told_without_its_wrapping(sent: str, told: str) -> None:
    example = FailureExample(request_id="r", at_s=0.0, waited_ms=1.0, status=500, tokens=0, error=sent)
    assert failures.said_by_server(example) == told


# --- other tools' definitions


def test_other_tools_definitions_stand_beneath_ours_and_only_where_they_were_asked_for(well: RunFolder) -> None:
    result = RunResult.read(well.path)
    assert percentiles.definitions(result) is None
    theirs = PeerFigures(differs="otherwise", p50_ms=1.0, p90_ms=None, p95_ms=None, p99_ms=None, mean_ms=2.0, count=60)
    tool = PeerDefinitions(name="bench", version="1.2", ttft=theirs)
    section = percentiles.definitions(result.model_copy(update={"definitions": {"bench": tool}}))
    table = section.blocks[0]
    assert [(str(row[0]), str(row[1])) for row in table.rows[:3]] == [
        ("TTFT", "gapmeter"), ("", "gapmeter, from sent"), ("", "bench 1.2"),
    ]  # fmt: skip
    assert table.rows[2][2] == Figure(1.0, key="definitions.bench.ttft.p50_ms")
    assert table.rows[2][-1] == "otherwise"


# --- cost


def _economy(**changes: Any) -> Economy:
    price = Price(device="CPU", units=2, usd_per_unit_hour=1.8, source="the scenario's price", is_default=False,
                  utilisation=0.8, measured_on="", usd_per_hour=3.6)  # fmt: skip
    tokens = Interval(value=10.0, low=9.0, high=11.0)
    known = Cost(
        status="at_most", reason=None, price=price, rate=SloRate(low=5.0, high=None, basis="offered"),
        per_request_usd=0.00025, per_request_usd_ci=(None, 0.00025), per_million_output_tokens_usd=25.0,
        per_million_output_tokens_usd_ci=(None, 27.0), per_million_total_tokens_usd=None,
        per_million_total_tokens_usd_ci=None,
    )  # fmt: skip
    parts = {
        "tokens_per_request": TokensPerRequest(output=tokens, prompt=None, total=None),
        "cost": known,
        "energy": NoEnergy(status="unmeasured", reason="unmeasured: no counter"),
        "value": Worth(good_requests_per_usd=3920.0, reason=None),
    }
    return Economy(**{**parts, **changes})


def test_cost_efficiency_and_value_are_three_lines() -> None:
    economy = _economy()
    how = cost.how_of(economy, simulated=False)
    lines = cost.lines(economy, how)
    assert [name for name, _ in lines] == ["cost", "energy", "value"]
    assert lines[0][1].startswith("at most $250 for a million requests and $27.0 for a million output tokens")
    assert lines[1][1] == "unmeasured: no counter"
    table, chart = cost.section(economy, how).blocks
    assert [row[0] for row in table.rows][-2:] == [
        "efficiency: output tokens per joule", "value: good requests for $1",
    ]  # fmt: skip
    assert table.rows[0][2:] == [Figure(250.0, "usd"), "up to $250"]
    assert "lower end was not measured" in chart.caption


def test_a_run_without_a_cost_shows_a_dash_and_the_reason() -> None:
    economy = _economy(cost=NoCost(status="none", reason="an SLO was missed", per_request_usd=None))
    how = cost.how_of(economy, simulated=False)
    assert cost.lines(economy, how)[0] == ("cost", "–  an SLO was missed")
    (table,) = cost.section(economy, how).blocks
    assert len(table.rows) == 3
    assert [str(cell) for cell in table.rows[0]] == ["cost of a request", "an SLO was missed", "–", "–"]


# --- the device


@pytest.mark.parametrize("length_s", [4.0, 3e8])
def test_the_share_of_forwards_is_drawn_in_bins_however_long_the_run_was(well: RunFolder, length_s: float) -> None:
    """In every second of the first four a forward runs for a quarter; records may name a moment years away."""
    known = ReportedRun.read(well)
    begun = known.origin_ns + np.arange(0.0, 4.0) * S
    steps = pd.DataFrame({"forward_start_ns": begun, "forward_end_ns": begun + S / 4})
    nothing = Samples({}, (), {}, 0)
    (drawn,) = levels_of(nothing, replace(known, steps=steps), Span(length_s, 0.0, length_s), {})
    assert len(drawn.value) <= 2001
    width = drawn.at_s[1] - drawn.at_s[0]
    assert (drawn.value * width / 100).sum() == pytest.approx(1.0, rel=1e-3)
    if length_s == 4.0:
        assert drawn.value[:8].tolist() == pytest.approx([50, 0] * 4)


def test_the_engines_counters_are_drawn_as_what_they_rose_by(well: RunFolder, tmp_path: Path) -> None:
    """Two preemptions in the third second, and from then on a quarter of the prompts' tokens from the prefix cache."""
    looks = [(0, 0, 100, 0), (1, 0, 200, 0), (2, 2, 300, 25), (3, 2, 300, 25), (4, 2, 500, 75)]
    names = ("preemptions", "prefix_queries", "prefix_hits")
    sources = {"gpu": {"gpus": [], "every_ns": S}, "engine": {"every_ns": S}}
    rows: dict[str, list[dict[str, Any]]] = {
        "sampler": [{"at_ns": 0, "type": "start", "sources": sources}],
        "engine": [
            {"at_ns": second * S, "running": 4.0, "took_ns": 9, **dict(zip(names, counts, strict=True))}
            for second, *counts in looks
        ],
    }
    folder = RunFolder(tmp_path)
    folder.telemetry.mkdir()
    for source, lines in rows.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder.telemetry / f"{source}.jsonl").write_text(text)
    samples = read_telemetry(folder)
    nothing = pd.DataFrame()
    known = replace(ReportedRun.read(well), requests=pd.DataFrame({"due_ns": [0]}), steps=nothing)
    drawn = {level.key: level for level in levels_of(samples, known, Span(4.0, 0.0, 4.0), {})}
    assert set(drawn) == {"engine-running", "engine-preemptions", "engine-prefix"}
    assert drawn["engine-preemptions"].value.tolist() == [0, 2, 0, 0]
    assert drawn["engine-prefix"].value.tolist() == [0, 25, 25], "nothing was asked in the fourth second"


# --- trust


def test_the_residual_has_the_names_that_the_line_of_trust_has(well: RunFolder) -> None:
    result = RunResult.read(well.path)
    (table,) = [b for b in trust.trust(result).blocks if isinstance(b, Table) and b.name == "Residual"]
    names = {str(row[1]) for row in table.rows}
    for most in ("unexplained", "strict", "unstamped"):
        worst = result.trust.model_copy(
            update={f"{n}_p99_share": 0.5 * (n == most) for n in ("unexplained", "strict", "unstamped")}
        )
        assert trust.remainder_sentence(worst).partition(" p99 ")[0] in names


def test_how_often_a_forward_ran_is_one_figure_wherever_it_stands(well: RunFolder) -> None:
    used = Utilisation.model_construct(forward_share_of_window=0.21, nvml_busy_share=None)
    result = RunResult.read(well.path)
    result = result.model_copy(
        update={
            "telemetry": Telemetry.model_construct(utilisation=used),
            "compute": result.compute.model_copy(update={"busy_share": 0.22}),
        }
    )
    section = compute.compute(result)
    (said,) = (block.words for block in section.blocks if isinstance(block, Paragraph))
    assert "While requests were measured a forward pass was running 21 % of the time, for any request." in str(said)
    assert "22 %" not in str(said)
    assert "utilisation figure is unmeasured" in str(said), "NVML tells a GPU's; a CPU has none"
    on_cpu = result.model_copy(update={"compute": result.compute.model_copy(update={"device": "CPU"})})
    told = compute.compute(on_cpu)
    assert not any("utilisation" in str(block.words) for block in told.blocks if isinstance(block, Paragraph))


def test_a_steady_run_is_not_called_a_capacity(well: RunFolder) -> None:
    """At 8 of 40 requests a second "these figures can be used as capacity" stood there."""
    result = RunResult.read(well.path)
    for valid, told in ((True, "may stand for a longer run"), (False, "do not stand for a longer run")):
        steady = result.steady.model_copy(update={"valid_for_capacity": valid})
        section = trust.sustained(result.model_copy(update={"steady": steady}))
        assert section is not None and told in section.lead


def test_a_bound_above_what_a_higher_percentile_has_is_not_shown_beside_it() -> None:
    """The body drifts slowly, so that it is worth four values and bounded by p95's upper end alone."""
    values = Series(np.arange(1, 1001) * 1e6, known=series.Worth(middle=4.0, body=30.0, tail=300.0))
    found = distribution(values, (50.0, 90.0), 1000, 100.0)
    low, high = found.at(50.0), found.at(90.0)
    assert low.at_most and high.value_ms and high.ci_ms and high.value_ms < low.at_most.ms <= high.ci_ms[1]
    shown = [percentiles.figure(found, p, "metrics.ttft") for p in (50.0, 90.0)]
    assert [str(each) for each in shown] == ["–", "900 ms"]
    assert shown[0].hint.startswith("≤ 912 ms, 98 % sure; no interval: needs")


def test_a_curve_is_interrupted_where_a_percentile_is_refused() -> None:
    values = Series(np.random.default_rng(1).exponential(20e6, 3000))
    whole = percentiles.curve_of("TTFT", values, [])
    middle = percentiles.curve_of("TTFT", values, [], late_ns=lambda percentile: 1e6 if 80 < percentile < 90 else None)
    tail = percentiles.curve_of("TTFT", values, [], late_ns=lambda percentile: 1e6 if percentile > 90 else None)
    drawn = [float(p) for p in middle.p[np.isfinite(middle.value_ms)]]
    assert drawn == [p for p in whole.p.tolist() if not 0.8 < p < 0.9]
    assert tail.p[-1] <= 0.9 < whole.p[-1]
    assert str(middle.draw("c")).count('class="curve"') == 2 > str(whole.draw("c")).count('class="curve"')
    assert percentiles.curve_of("TTFT", values, [], late_ns=lambda _: 1e6) is None
