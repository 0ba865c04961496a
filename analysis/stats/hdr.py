"""HDR histograms of nanoseconds: recorded in bulk, written as standard V2 logs.

Every histogram tracks 1 ns to 1 hour at 3 significant figures (Tene's HdrHistogram): below 2,048 ns every
nanosecond has its own counter, so that a stage that took no time reads exactly 0; above, a value and its
representative differ by less than 0.1 %. Histograms of the same shape merge without loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from hdrh.histogram import HdrHistogram
from hdrh.log import HistogramLogWriter
from numpy.typing import ArrayLike, NDArray

from gapmeter.records.histograms import new_histogram

PERCENTILES: tuple[float, ...] = (50.0, 90.0, 95.0, 99.0, 99.9)


def record(histogram: HdrHistogram, values_ns: ArrayLike) -> int:
    """Record every value as ``record_value`` would, and return how many were refused.

    Floats are truncated to whole nanoseconds, as the package does. Refused, and not counted in the histogram, are
    NaN, infinities, negative values and values beyond the last bucket; where the package returns False for such a
    value, the caller here gets their number and has to say something about them.
    """
    values = np.atleast_1d(np.asarray(values_ns))
    refused = 0
    if values.dtype.kind == "f":
        inside = (values > -1.0) & (values < 2.0**62)  # NaN compares false; -0.5 truncates to 0
        refused = int(values.size - inside.sum())
        values = values[inside]
    values = values.astype(np.int64)
    index = _counts_index(histogram, values)
    inside = (values >= 0) & (index >= 0) & (index < histogram.counts_len)
    refused += int(values.size - inside.sum())
    values, index = values[inside], index[inside]
    if values.size:
        _counts(histogram)[:] += np.bincount(index, minlength=histogram.counts_len).astype(np.uint64)
        histogram.total_count += int(values.size)
        histogram.min_value = min(histogram.min_value, int(values.min()))
        histogram.max_value = max(histogram.max_value, int(values.max()))
    return refused


def histogram_of(values_ns: ArrayLike) -> tuple[HdrHistogram, int]:
    """A histogram of these values and the number of values that it refused."""
    histogram = new_histogram()
    return histogram, record(histogram, values_ns)


def nearest_rank(percentile: float, count: int) -> int:
    """The 1-based rank that HdrHistogram reads for a percentile of ``count`` values."""
    return min(count, max(1, int(percentile * count / 100 + 0.5)))


def write_hlog(
    path: Path, histograms: Mapping[str, HdrHistogram], start_s: float, length_s: float, about: str = ""
) -> None:
    """Write one interval a histogram, tagged with its name, as a V2 histogram log.

    ``start_s`` is seconds since the epoch; ``about`` is one line of comment. Values are nanoseconds;
    the log's Interval_Max column is milliseconds.
    Raises ValueError for a tag that the format cannot hold, OSError if the file cannot be written.
    """
    start_s = math.floor(start_s * 1000) / 1000  # as StartTime says it: readers skip an interval from before that
    with path.open("w", encoding="utf-8") as stream:
        writer = HistogramLogWriter(stream)
        writer.output_comment("[Values in nanoseconds; 1 ns to 1 h at 3 significant figures]")
        if about:
            writer.output_comment(f"[{' '.join(about.split())}]")
        writer.output_log_format_version()
        writer.output_comment(f"[StartTime: {start_s:.3f} (seconds since epoch)]")
        writer.output_legend()
        for tag, histogram in histograms.items():
            if not tag or any(c in ", \t\r\n" for c in tag):
                raise ValueError(f"{tag!r} cannot be a histogram log's tag: no commas, no white space")
            stream.write(f"Tag={tag},")
            writer.output_interval_histogram(histogram, start_s, start_s + length_s)


def _counts(histogram: HdrHistogram) -> NDArray[np.uint64]:
    """A writable view of the histogram's counters."""
    return np.frombuffer(histogram.counts, dtype=np.uint64)


def _counts_index(histogram: HdrHistogram, values: NDArray[np.int64]) -> NDArray[np.int64]:
    """HdrHistogram's index of each value's counter.

    The bucket is the position of the highest bit above the sub-bucket mask; ``frexp`` gives it exactly for values
    below 2**53, and larger ones lie far beyond the last bucket however they round.
    """
    half_magnitude = int(histogram.sub_bucket_half_count_magnitude)
    unit, half_count = int(histogram.unit_magnitude), int(histogram.sub_bucket_half_count)
    _, bits = np.frexp((values | int(histogram.sub_bucket_mask)).astype(np.float64))
    bucket = bits.astype(np.int64) - unit - (half_magnitude + 1)
    shift = np.clip(bucket + unit, 0, 62)
    return ((bucket + 1) << half_magnitude) + (values >> shift) - half_count
