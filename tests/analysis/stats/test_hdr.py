"""Bulk recording equals the package's own recording, and its files are read by the package's own reader."""

from __future__ import annotations

import math
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hdrh.histogram import HdrHistogram
from hdrh.log import HistogramLogReader
from hypothesis import given, settings
from hypothesis import strategies as st

from gapmeter.analysis.stats import hdr
from gapmeter.records.histograms import HIGHEST_NS, nearest_rank
from tests.kit.runs import read_hlog

LAST_COUNTED = hdr.new_histogram().get_highest_equivalent_value(
    hdr.new_histogram().get_value_from_index(hdr.new_histogram().counts_len - 1)
)
edges = st.sampled_from(
    [0, 1, 2047, 2048, 2049, 4095, 4096, (1 << 31) - 1, 1 << 31, HIGHEST_NS, LAST_COUNTED, LAST_COUNTED + 1]
    + [(1 << k) + d for k in range(10, 50) for d in (-1, 0, 1)]
)
nanoseconds = st.one_of(edges, st.integers(-5, 1 << 44), st.integers(0, (1 << 62)))


def recorded_one_by_one(values: list[int] | list[float]) -> tuple[HdrHistogram, int]:
    histogram = hdr.new_histogram()
    refused = 0
    for value in values:
        refused += not histogram.record_value(int(value))
    return histogram, refused


@given(st.lists(nanoseconds, max_size=60))
@settings(deadline=None, max_examples=150)
def test_bulk_recording_is_byte_identical_to_recording_one_by_one(values: list[int]) -> None:
    expected, expected_refused = recorded_one_by_one(values)
    bulk, refused = hdr.histogram_of(np.array(values, dtype=np.int64))
    assert bulk.encode() == expected.encode()
    assert refused == expected_refused
    assert (bulk.total_count, bulk.min_value, bulk.max_value) == (
        expected.total_count,
        expected.min_value,
        expected.max_value,
    )


@given(st.lists(st.floats(0, 1e13), min_size=1, max_size=40))
@settings(deadline=None, max_examples=50)
def test_fractions_of_a_nanosecond_are_truncated_as_the_package_does(values: list[float]) -> None:
    expected, expected_refused = recorded_one_by_one(values)
    bulk, refused = hdr.histogram_of(np.array(values))
    assert bulk.encode() == expected.encode()
    assert refused == expected_refused


def read(histogram: HdrHistogram) -> list[int]:
    return [histogram.get_value_at_percentile(percentile) for percentile in hdr.PERCENTILES]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1.0, -1e9, 1e18, 9e15])
def test_a_value_that_no_histogram_holds_is_refused_and_counted(bad: float) -> None:
    histogram, refused = hdr.histogram_of(np.array([5e6, bad, 7e6]))
    assert (histogram.total_count, refused) == (2, 1)
    assert histogram.get_max_value() == histogram.get_highest_equivalent_value(7_000_000)


@given(st.lists(st.integers(0, HIGHEST_NS), min_size=1, max_size=80), st.floats(0.1, 100))
@settings(deadline=None, max_examples=50)
def test_a_percentile_by_its_rank_is_the_one_that_the_package_reads(values: list[int], percentile: float) -> None:
    histogram, _ = hdr.histogram_of(values)
    asked = [percentile, 50.0, 99.0, 99.9, 100.0]
    ordered = sorted(values)
    for each in asked:
        exact = ordered[nearest_rank(each, len(values)) - 1]
        assert exact <= histogram.get_value_at_percentile(each) <= exact * 1.001


def test_a_stage_that_took_no_time_reads_zero_not_one_unit() -> None:
    histogram, _ = hdr.histogram_of([0] * 10)
    assert read(histogram) == [0] * 5


def test_the_package_reads_back_every_tag_and_count_from_a_log(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    written = {name: hdr.histogram_of(rng.lognormal(16, 1, 500))[0] for name in ("ttft", "itl", "stage-queue")}
    for name, histogram in written.items():
        hdr.write_hlog(tmp_path / f"{name}.hlog", histogram, 1_700_000_000.25, 90.5)
    found = {tag: own for name in written for tag, own in read_hlog(tmp_path / f"{name}.hlog").items()}
    for histogram in found.values():
        assert histogram.get_start_time_stamp() == pytest.approx(1_700_000_000_250)
        assert histogram.get_end_time_stamp() == pytest.approx(1_700_000_090_750)
    assert list(found) == list(written)
    for name, histogram in written.items():
        assert found[name].get_total_count() == 500
        assert read(found[name]) == read(histogram)


@given(st.floats(1.6e9, 2.5e9))
def test_readers_find_the_interval_whatever_fraction_of_a_second_the_run_began_at(start_s: float) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "ttft.hlog"
        hdr.write_hlog(path, hdr.histogram_of([5])[0], start_s, 2.0)
        found = read_hlog(path)["ttft"]
    assert found.get_start_time_stamp() == pytest.approx(1000 * start_s, abs=2)


def test_logs_of_two_parts_merge_into_the_log_of_the_whole(tmp_path: Path) -> None:
    values = np.random.default_rng(4).lognormal(16, 1, 1001).astype(np.int64)
    merged = hdr.new_histogram()
    for name, part in (("a", values[:400]), ("b", values[400:])):
        hdr.write_hlog(tmp_path / name, hdr.histogram_of(part)[0], 1.0, 1.0)
        reader = HistogramLogReader(str(tmp_path / name), hdr.new_histogram())
        reader.add_next_interval_histogram(merged)
        reader.close()
    assert read(merged) == read(hdr.histogram_of(values)[0])


def test_a_tag_with_a_comma_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tag"):
        hdr.write_hlog(tmp_path / "a,b.hlog", hdr.new_histogram(), 0.0, 1.0)
