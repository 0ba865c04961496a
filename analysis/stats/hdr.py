"""HDR histograms of nanoseconds: recorded in bulk, written as standard V2 logs.

Every histogram tracks 1 ns to 1 hour at 3 significant figures (Tene's HdrHistogram): below 2,048 ns every
nanosecond has its own counter, so that a stage that took no time reads exactly 0; above, a value and its
representative differ by less than 0.1 %. Histograms of the same shape merge without loss.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from hdrh.histogram import HdrHistogram
from hdrh.log import HistogramLogWriter
from numpy.typing import ArrayLike

from gapmeter.analysis.arrays import Floats
from gapmeter.records.histograms import nearest_rank, new_histogram

PERCENTILES: tuple[float, ...] = (50.0, 90.0, 95.0, 99.0, 99.9)


def histogram_of(values_ns: ArrayLike) -> tuple[HdrHistogram, int]:
    """A histogram of values as ``record_value`` would count them, and how many of them it refused.

    Floats are truncated to whole nanoseconds, as the package does. Refused, and not counted in the histogram, are
    NaN, infinities, negative values and values beyond the last bucket; where the package returns False for such a
    value, the caller here gets their number and has to say something about them.
    """
    histogram = new_histogram()
    values = np.sort(np.atleast_1d(np.asarray(values_ns)))
    # The least value that each counter counts, and the least that the last one does not. From twice ``half`` on,
    # buckets of ``half`` counters each have values twice as far apart as the one before.
    half = int(histogram.sub_bucket_half_count)
    index = np.arange(int(histogram.counts_len) + 1)
    bucket = np.maximum(index // half - 1, 0)
    least = (index - bucket * half) << (bucket + int(histogram.unit_magnitude))
    at = np.searchsorted(values, least)
    at[0] = np.searchsorted(values, -1, side="right")  # -0.5 truncates to 0
    counted = int(at[-1] - at[0])
    if counted:
        np.frombuffer(histogram.counts, dtype=np.uint64)[:] = np.diff(at).astype(np.uint64)
        histogram.total_count = counted
        histogram.min_value, histogram.max_value = int(values[at[0]]), int(values[at[-1] - 1])
    return histogram, len(values) - counted


def at_rank(ordered: Floats, percentile: float) -> float:
    """The value there, of one or more that ascend."""
    return float(ordered[nearest_rank(percentile, len(ordered)) - 1])


def write_hlog(path: Path, histogram: HdrHistogram, start_s: float, length_s: float, about: str = "") -> None:
    """Write one interval, tagged with the file's name, as a V2 histogram log.

    ``start_s`` is seconds since the epoch; ``about`` is one line of comment. Values are nanoseconds;
    the log's Interval_Max column is milliseconds.
    Raises ValueError for a name that cannot be a tag, OSError if the file cannot be written.
    """
    if any(c in ", \t\r\n" for c in path.stem):
        raise ValueError(f"{path.stem!r} cannot be a histogram log's tag: no commas, no white space")
    start_s = math.floor(start_s * 1000) / 1000  # as StartTime says it: readers skip an interval from before that
    with path.open("w", encoding="utf-8") as stream:
        writer = HistogramLogWriter(stream)
        writer.output_comment("[Values in nanoseconds; 1 ns to 1 h at 3 significant figures]")
        if about:
            writer.output_comment(f"[{' '.join(about.split())}]")
        writer.output_log_format_version()
        writer.output_comment(f"[StartTime: {start_s:.3f} (seconds since epoch)]")
        writer.output_legend()
        stream.write(f"Tag={path.stem},")
        writer.output_interval_histogram(histogram, start_s, start_s + length_s)
