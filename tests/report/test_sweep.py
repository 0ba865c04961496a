"""A sweep's document: the same points on the page, in the terminal and in Markdown, whatever became of them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapmeter.analysis.results.cost import NoCost, Value
from gapmeter.analysis.results.device import Binding
from gapmeter.analysis.results.distribution import Percentile
from gapmeter.analysis.results.manifest import SweepManifest
from gapmeter.analysis.results.run import Provenance
from gapmeter.analysis.results.sweep import (
    Batch,
    CurveKnee,
    LostPoint,
    Point,
    PointDistribution,
    PointEconomy,
    PointEnergy,
    PointThroughput,
    Repeat,
    StageMeans,
    SweepFigures,
    SweepResult,
    SweptCurve,
    SweptSlo,
)
from gapmeter.report import html, markdown, terminal
from gapmeter.report.growth import headline
from gapmeter.report.scale import Scale
from gapmeter.report.sweep import document, words_of
from gapmeter.report.sweep_charts import PointByPoint
from tests.kit import results as kit

STAGES = {"queue": 30.0, "decode": 60.0, "unexplained": 0.0}
RATES = (4.0, 8.0, 16.0, 32.0)


def facts(at: int) -> dict[str, Any]:
    rate = RATES[at]
    return {
        "index": at, "label": f"{rate:g} req/s", "values": {"load.rate": rate}, "resolved": {"load.rate": rate},
        "folder": f"points/{at}", "missing": 0, "loop": "open", "concurrency": None, "requested_rate": rate,
    }  # fmt: skip


def point(at: int, verdict: str, reason: str | None = None, level: float | None = 90.0) -> Point:
    """One at a rate; without a level no percentile of it is supported."""
    found = {level: Percentile(value_ms=50.0 * (at + 1), ci_ms=(45.0, 50.0 * (at + 2)))} if level else {}
    metric = PointDistribution(percentiles=found, max_ms=900.0, mean_ms=70.0, count=60, n_eff=9.0, mean_ci_ms=(60, 80))
    rate = 10.0 * (at + 1)
    known = {"index": at, "verdict": verdict, "reason": reason}
    return Point.model_validate({
        **facts(at), **known, "metrics": dict.fromkeys(("ttft", "itl", "tpot", "e2e"), metric), "between": None,
        "stages": dict.fromkeys(("ttft", "e2e", "itl"), StageMeans(mean_ms=90.0, stages_ms=STAGES)), "slow_stages": {},
        "repeats": [Repeat(folder=f"points/{at}/r1", reason=None, verdict="PASS")], "failed_requests": 0, "slo": (),
        "throughput": PointThroughput(
            requests_per_s=rate, prompt_tokens_per_s=None, output_tokens_per_s=rate, span_s=5.0,
            steady_tokens_per_s=rate, steady_ci=(rate - 1, rate + 1),
        ),
        "delivered_rate": rate, "goodput_per_s": None, "batch": Batch(running=3.0, waiting=0.0, steps=9),
        "binding": Binding(resource="queue", share=0.6, behind="device", parts={}, unmeasured=(), why="66 % is queue"),
        "economy": PointEconomy(
            precision="float32", emulated=False, value=Value(good_requests_per_usd=None, reason="no cost"),
            cost=NoCost(status="none", reason="the scenario sets no SLO that a rate could hold", per_request_usd=None),
            energy=PointEnergy(per_request_j=None, tokens_per_watt=None),
        ),
    })  # fmt: skip


@pytest.fixture(scope="module")
def swept() -> SweepResult:
    """Of four points the second is a knee, the third not valid, the last one lost."""
    lost = LostPoint(**facts(3), verdict="FAILED", reason="the server did not start", repeats=())
    knee = CurveKnee(
        series="", state="knee", point=1, label="8 req/s", range=(0, 1), range_labels=("4 req/s", "8 req/s"),
        by="p90 TTFT", bend=0.2, why="latency begins to climb there", certainty=0.97, after=None, or_at=(),
    )  # fmt: skip
    sweep = SweepFigures(
        key="load.rate", title="requests per second", series=(SweptCurve(name="", points=(0, 1, 2, 3)),), metric="ttft",
        levels=dict.fromkeys(("ttft", "itl", "tpot", "e2e"), 90.0), growth=(), knees=(knee,),
        points=(point(0, "PASS"), point(1, "FAIL"), point(2, "INVALID", "sent late", None), lost),
    )  # fmt: skip
    origin = Provenance(**dict.fromkeys(Provenance.model_fields, "known"))
    slo = SweptSlo(text="ttft p90 <= 80 ms", metric="ttft", percentile=90.0, limit_ms=80.0)
    return SweepResult(
        name="smoke", status="complete", exit_code=98, device="CPU", slo=(slo,), sweep=sweep, provenance=origin
    )


def manifest() -> SweepManifest:
    shared = {name: value for name, value in kit.manifest_document().items() if name in SweepManifest.model_fields}
    return SweepManifest.model_validate({**shared, "repeat": 1, "points": [], "order": [[[0, 0], [1, 0]]]})


def test_every_medium_tells_every_point_and_why_one_has_no_figures(swept: SweepResult) -> None:
    shown = document(swept, manifest())
    page, brief, told = html.page(shown), terminal.text(shown, 80).plain, markdown.text(shown)
    for text in (page, brief, told):
        assert all(f"{rate:g} req/s" in text for rate in RATES)
        assert "The knee is at 8 req/s (between 4 req/s and 8 req/s): p90 TTFT begins to climb there." in " ".join(
            text.split()
        )
        assert text.count("32 req/s: failed: the server did not start") == 1
        assert "16 req/s: invalid: sent late" in text
    wide, narrow = (terminal.text(shown, width).plain.splitlines() for width in (140, 80))
    rows = [line for line in wide if re.match(r" +\d+ req/s  ", line)]
    assert [line.split()[-1] for line in rows] == ["(decode)", "(decode)", "(decode)", "–"], "no row is cut"
    assert "FAILED" in rows[-1]
    assert max(map(len, narrow)) <= 80
    assert " ".join(" ".join(narrow).split()).count("binds: queue / device (decode)") == 3, "what has no room is below"


def test_the_page_marks_the_knee_what_is_not_valid_and_what_no_sample_supports(swept: SweepResult) -> None:
    page = html.page(document(swept, manifest()))
    assert page.count("8 req/s ◂ knee") >= 2
    assert "32 req/s ✕" in page, "a lost point has its place on the axis"
    assert ">?</text>" in page, "a point whose percentile is not supported stands at its mean"
    assert 'href="points/0/r1/report.html"' in page
    assert 'data-key="sweep.points.1.metrics.ttft.p90_ms"' in page
    drawn = re.findall(r'data-stage="(\w+)" data-ms="([^"]*)" data-point="0"', page)
    assert sum(float(ms) for _, ms in drawn) == pytest.approx(3 * 90.0), "a column's stages add up to the mean"
    assert "1 server, started one after the other" in page


def test_no_line_runs_through_a_point_whose_percentile_is_refused_and_its_mean_is_not_written(
    swept: SweepResult,
) -> None:
    def drawn(*, refused: bool) -> tuple[int, int]:
        points = [point(at, "PASS") for at in range(4)]
        if refused:
            late = (
                points[1]
                .metrics["ttft"]
                .model_copy(update={"percentiles": {90.0: Percentile(late_ms=7.5)}, "mean_ms": None})
            )
            points[1] = points[1].model_copy(update={"metrics": {**points[1].metrics, "ttft": late}})
        sweep = swept.sweep.model_copy(update={"points": tuple(points), "knees": ()})
        picture = str(PointByPoint(swept.model_copy(update={"sweep": sweep}), "ttft").draw("ttft"))
        return len(re.findall(r'<path [^>]*class="curve"', picture)), picture.count(">90.0 ms</text>")

    assert drawn(refused=False) == (1, 4)
    assert drawn(refused=True) == (2, 3)


def test_a_point_whose_percentile_is_refused_is_not_called_one_that_no_sample_supports(swept: SweepResult) -> None:
    *others, third, lost = swept.sweep.points
    late = third.metrics["ttft"].model_copy(update={"percentiles": {90.0: Percentile(late_ms=7.5)}})
    third = third.model_copy(update={"metrics": {**third.metrics, "ttft": late}})
    sweep = swept.sweep.model_copy(update={"points": (*others, third, lost)})
    page = html.page(document(swept.model_copy(update={"sweep": sweep}), manifest()))
    assert "p90 TTFT refused, mean 70.0 ms" in page
    assert "p90 TTFT not estimable" not in page


def test_the_words_of_its_file_are_those_of_its_page(swept: SweepResult) -> None:
    words = words_of(swept)
    assert list(words.headline) == headline(swept.sweep, "CPU")
    assert words.headline[1] == "Left out of curves and comparisons (not valid as a measurement): 16 req/s."
    assert words.headline[2] == "No figures for 1 of 4 points: 32 req/s."
    assert [own is None for own in words.points] == [False, False, False, True]
    again = swept.model_copy(update={"words": words})
    assert SweepResult.model_validate_json(again.model_dump_json()) == again


@given(st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=20), st.floats(1e-3, 1e6))
def test_an_axis_has_room_for_its_values_in_their_order(values: list[float], limit: float) -> None:
    scale = Scale.fitting(values, limit)
    places = [scale.at(value) for value in sorted(values)]
    assert places == sorted(places)
    assert 0 <= places[0] <= places[-1] < 1


def test_a_sweep_of_one_point_is_told_in_the_singular(swept: SweepResult) -> None:
    one = {"points": swept.sweep.points[:1], "series": (SweptCurve(name="", points=(0,)),), "knees": ()}
    alone = swept.model_copy(update={"sweep": swept.sweep.model_copy(update=one)})
    page = html.page(document(alone, manifest().model_copy(update={"order": (((0, 0),),)})))
    assert "smoke: 1 point<" in page
    assert "1 run on 1 server" in page
