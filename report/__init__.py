"""report.html: one self-contained page, built from a run's folder alone."""

from __future__ import annotations

from pathlib import Path

from gapmeter.records import RunFolder


def write_report(folder: RunFolder) -> Path:
    """Write ``report.html`` into a run's folder that has been analysed, and return its path.

    Raises FileNotFoundError when summary.json or manifest.json is not there, OSError when the page cannot be written.
    """
    from gapmeter.report.page import page  # the page needs the analysis, which needs this package's numbers

    folder.report.write_text(page(folder), encoding="utf-8")
    return folder.report
