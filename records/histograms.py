"""The one shape of HDR histogram that everything here uses, so that any two can be added without loss."""

from __future__ import annotations

from hdrh.histogram import HdrHistogram

LOWEST_NS = 1
HIGHEST_NS = 3_600_000_000_000
SIGNIFICANT_FIGURES = 3


def nearest_rank(percentile: float, count: int) -> int:
    """The 1-based rank that HdrHistogram reads for a percentile of ``count`` values."""
    return min(count, max(1, int(percentile * count / 100 + 0.5)))


def new_histogram() -> HdrHistogram:
    """An empty histogram of nanoseconds."""
    return HdrHistogram(LOWEST_NS, HIGHEST_NS, SIGNIFICANT_FIGURES)
