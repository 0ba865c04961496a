"""The tables behind the charts over time."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapmeter.analysis.requests.metrics import final
from gapmeter.analysis.results.latency import Burst
from gapmeter.report.charts import Axis, Plot
from gapmeter.report.document import Chart, Figure, Table
from gapmeter.report.levels import Level, Levels
from gapmeter.report.run_folder import ReportedRun
from gapmeter.report.scale import Scale
from gapmeter.report.timeline import Counts, Span, _counts, dots_of, from_to, in_flight, over_time, stretches
from tests.kit.runs import write_run


def raw(table: Table, column: int) -> list[Any]:
    cells = [row[column] for row in table.rows]
    assert all(isinstance(cell, Figure) for cell in cells)
    return [cell.value for cell in cells if isinstance(cell, Figure)]


@given(st.floats(1e-3, 1e5))
def test_stretches_cover_the_time_axis_without_a_hole_and_are_few(length: float) -> None:
    found = stretches(length)
    assert (found[0][0], found[-1][1]) == (0.0, length)
    assert all(before[1] == after[0] for before, after in pairwise(found))
    assert all(low < high for low, high in found)
    assert len(found) <= 21
    assert not any("e" in str(cell) for ends in found for cell in from_to(*ends)), "1e+04 s"


def test_a_batch_does_not_last_through_the_time_in_which_there_is_no_step(tmp_path: Path) -> None:
    """Ten steps of 20 ms, one after the other, of 4 requests; a second without any; ten more. A step stalls for 1 s."""
    run = ReportedRun.read(write_run(tmp_path / "r", count=300, rate=20.0))
    begun_ms = np.concatenate([np.arange(10) * 21.0, 1200 + np.arange(10) * 21.0])
    lasts_ms = np.where(np.arange(20) == 19, 1000.0, 20.0)
    steps = pd.DataFrame({"schedule_ns": begun_ms, "forward_end_ns": begun_ms + lasts_ms}) * 1e6 + run.origin_ns
    both = replace(run, steps=steps.astype("int64").assign(running=4, waiting=0))
    shown = _counts(both, final(both.requests), Span(10.0, 0.0, 10.0))["running"]
    held = np.diff([*shown.at_s, 10.0])
    assert held @ shown.value == pytest.approx(4 * (2 * (9 * 0.021) + 0.02 + 1.0))
    assert shown.value.tolist().count(0.0) == 2, "none between two steps that follow each other"


@given(st.lists(st.tuples(st.floats(0.0, 90.0), st.integers(0, 50)), min_size=1, max_size=30))
def test_the_means_of_a_count_have_its_area_and_lie_between_its_extremes(changes: list[tuple[float, int]]) -> None:
    at, value = (np.asarray(part, dtype=np.float64) for part in zip(*sorted(changes), strict=True))
    table = Counts("Things", "req", Span(100.0, 0.0, 100.0), at, value).table()
    starts, ends, least, mean, most = (np.asarray(raw(table, column)) for column in range(5))
    held = np.diff([*at, 100.0])
    assert float(((ends - starts) * mean).sum()) == pytest.approx(float((held * value).sum()), abs=1e-6)
    assert np.all(least <= mean + 1e-9)
    assert np.all(mean <= most + 1e-9)
    assert most.max() >= value[-1]


def test_several_engines_are_shown_together_whose_steps_are_counted_on_from_one_to_the_next(tmp_path: Path) -> None:
    """One has 8 waiting and 4 running all the time, in 900 of 1,000 blocks; the other has 1 running, in 100."""
    run = ReportedRun.read(write_run(tmp_path / "r", count=300, rate=20.0))
    at_ns = run.origin_ns + np.arange(100) * 100_000_000
    engines = [(at_ns, 8, 4, 100), (at_ns + 10_000_000, 0, 1, 900)]
    steps = [pd.DataFrame({"schedule_ns": at, "waiting": waiting, "running": running, "free_blocks": free})
             for at, waiting, running, free in engines]  # fmt: skip
    for each in steps:
        each.loc[0, "free_blocks"] = 1000
    both = replace(run, steps=pd.concat(steps, ignore_index=True))
    span = Span(9.9, 0.0, 9.9)
    shown = {key: _counts(both, final(both.requests), span)[key] for key in ("waiting", "running", "kv")}
    for key, expected in (("waiting", 8), ("running", 5), ("kv", 1000)):
        assert set(raw(shown[key].table(), 4)[1:]) == {expected}, "the most in each stretch"
    assert shown["kv"].note == "of 2,000 that were ever free at once"


def test_every_request_is_in_one_row_and_the_largest_wait_is_there_unrounded(tmp_path: Path) -> None:
    run = ReportedRun.read(write_run(tmp_path / "r", count=300, rate=20.0, failures=4, error="x"))
    requests = final(run.requests)
    span = Span(float((requests["due_ns"].max() - run.origin_ns) / 1e9) + 1.0, 0.0, 1.0)
    dots = dots_of("TTFT", requests, span, run.origin_ns, "first_token_ns", frozenset())
    table = dots.table()
    assert sum(int(str(row[2])) for row in table.rows) == len(requests)
    assert sum(int(str(row[3])) for row in table.rows) == 4
    assert max(v for v in raw(table, 6) if v is not None) == float(dots.ms[dots.good].max())
    flights = Counts("Requests in flight", "req", span, *in_flight(run.requests, run.origin_ns))
    assert max(raw(flights.table(), 4)) == flights.value.max()


def test_a_turn_that_was_never_sent_is_neither_issued_nor_failed_and_the_last_failure_is_in_the_table(
    tmp_path: Path,
) -> None:
    folder = write_run(tmp_path / "r", count=300, rate=20.0)
    requests = pd.read_parquet(folder.path / "requests.parquet")
    due = requests["due_ns"].max()
    late = requests.index[requests["due_ns"] == due]
    requests.loc[late, ["outcome", "first_token_ns", "last_token_ns", "end_ns"]] = ["connection_lost", None, None, due]
    requests.loc[requests.index[:2], ["outcome", "first_token_ns", "last_token_ns", "sent_ns"]] = [
        "abandoned", None, None, None,
    ]  # fmt: skip
    ends = requests["last_token_ns"].notna()
    requests.loc[ends, "last_token_ns"] = np.minimum(requests.loc[ends, "last_token_ns"], due)  # nothing came later
    requests.to_parquet(folder.path / "requests.parquet")
    section = over_time(ReportedRun.read(folder))
    due_and_failed = len(requests) - 2, 1  # the warm-up's are drawn too
    assert f"{len(requests) - 2} requests issued, 1 of them failed" in str(section.lead)
    (table, *_) = [block.table for block in section.blocks if isinstance(block, Chart)]
    assert tuple(sum(int(str(row[column])) for row in table.rows) for column in (2, 3)) == due_and_failed


def test_one_request_was_issued(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", count=1, rate=20.0)
    pd.read_parquet(folder.path / "requests.parquet").tail(1).to_parquet(folder.path / "requests.parquet")
    assert "; 1 request issued, none failed." in str(over_time(ReportedRun.read(folder)).lead)


def test_what_was_in_flight_when_the_load_was_ended_is_no_failure_of_the_server(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", count=300, rate=20.0)
    requests = pd.read_parquet(folder.path / "requests.parquet")
    last = requests["due_ns"].nlargest(2).index
    requests.loc[last, ["outcome", "first_token_ns", "last_token_ns"]] = ["aborted", None, None]
    requests.to_parquet(folder.path / "requests.parquet")
    section = over_time(ReportedRun.read(folder))
    assert "issued, none failed. The load tester stopped before 2 of them ended." in str(section.lead)
    (chart, *_) = [block for block in section.blocks if isinstance(block, Chart)]
    assert chart.table
    assert sum(int(str(row[3])) for row in chart.table.rows) == 0
    assert "✕" not in chart.picture.draw("ttft")


def test_a_stretch_without_a_sample_has_a_dash_and_no_zero() -> None:
    at = np.array([0.5, 1.5, 8.5])
    level = Level("k", "power", "W", at, np.array([10.0, 30.0, 20.0]), 1.0)
    table = Levels(Span(10.0, 0.0, 10.0), [level]).table()
    assert [column.csv for column in table.columns] == ["from (s)", "to (s)", "power, W: mean", "power, W: largest"]
    frame = pd.DataFrame({"from": raw(table, 0), "mean": raw(table, 2)}).set_index("from")["mean"]
    assert frame[0.5] == 10.0
    assert np.isnan(frame[4.0])


@pytest.mark.parametrize(("unit", "value"), [("%", 100.0), ("share", 1.0)])
def test_an_axis_of_percent_ends_at_a_hundred(unit: str, value: float) -> None:
    assert Axis(Scale.linear([value]), unit, about=2).ticks(units=True)[-1] == (value, "100 %")


@given(st.floats(1e-3, 1e6))
def test_an_axis_of_few_ticks_names_two_values_at_least_and_not_many_more(largest: float) -> None:
    found = Axis(Scale.linear([largest], room=0.12), "req", about=2).ticks(units=True)
    assert 2 <= len(found) <= 4
    assert found[-1][1].endswith(" req")


@given(st.floats(min_value=1e-6, max_value=1e9))
def test_ticks_start_at_zero_stay_inside_and_are_evenly_apart(top: float) -> None:
    found = Scale("linear", 0.0, top).ticks(6)
    assert found[0] == 0
    assert found[-1] <= top * (1 + 1e-6)
    assert 3 <= len(found) <= 8
    assert all(math.isclose(b - a, found[1], rel_tol=1e-6) for a, b in pairwise(found))


def test_the_lowest_number_of_a_panel_has_a_line_between_it_and_the_panel_beneath() -> None:
    plot = Plot(Axis(Scale.linear([1.0]), labels=False), Axis(Scale.linear([1.0]), "ms"), 150)
    height = re.search(r'height="(\d+)"', plot.chart("panel", "a panel", "it"))
    assert height
    assert int(height[1]) >= 150 + 14


def test_when_the_slowest_came_together_is_marked_wide_enough_to_be_seen() -> None:
    burst = Burst(
        count=13, of=28, from_s=19.0, to_s=19.01, chance=1e-9, stage=None, share=None, slots=4, queued=True
    )  # fmt: skip
    due = np.arange(100, dtype=np.int64) * 10**9
    requests = pd.DataFrame({
        "request_id": [f"r{i}" for i in range(100)], "due_ns": due, "last_token_ns": due + 10**7, "outcome": "ok"
    })  # fmt: skip
    span = Span(100.0, 0.0, 100.0)
    marked, plain = (
        str(dots_of("TTFT", requests, span, 0, "last_token_ns", frozenset(), burst=each).draw("x"))
        for each in (burst, None)
    )
    assert "13 of the 28 slowest" in marked and "13 of the 28" not in plain
    (width,) = re.findall(r'<rect x="18.7\d*%"[^>]*width="([\d.]+)%"', marked)
    assert float(width) == pytest.approx(0.6)
