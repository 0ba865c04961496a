"""What is made of a run's result for people and other programs: words, page, trace."""

from __future__ import annotations

from pathlib import Path

from gapmeter.analysis.results.manifest import Manifest
from gapmeter.analysis.results.run import RunResult
from gapmeter.records import RunFolder


def write_result(folder: RunFolder, result: RunResult) -> RunResult:
    """Everything that is made of a result, into its folder: summary.json, verdict.json, the trace, the page.

    Returns the result with its words. Raises OSError.
    """
    from gapmeter.report.export.perfetto import write_trace  # they read tables, which takes a second to import
    from gapmeter.report.words import words_of

    told = result.model_copy(update={"words": words_of(result, Manifest.read(folder.path))})
    told.write(folder.path)
    told.verdict_file.write(folder.path)
    write_trace(folder)
    write_report(folder)
    return told


def write_report(folder: RunFolder) -> Path:
    """Write ``report.html`` into a run's folder that has been analysed, and return its path.

    Raises FileNotFoundError when summary.json or manifest.json is not there, OSError when the page cannot be written.
    """
    from gapmeter.report.page import page  # the page needs the analysis, which needs this package's numbers

    folder.report.write_text(page(folder), encoding="utf-8")
    return folder.report
