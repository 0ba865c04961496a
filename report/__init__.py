"""How results are shown: a document of plain values for each kind, printed as a page, as text and as Markdown."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gapmeter.analysis.results.run import RunResult
    from gapmeter.analysis.run_figures import RunTables
    from gapmeter.records import RunFolder


def write_result(folder: RunFolder, result: RunResult, tables: RunTables) -> RunResult:
    """Everything that is made of a result, into its folder: summary.json, verdict.json, the page.

    ``tables``: the run's. Returns the result with its words. Raises OSError.
    """
    from gapmeter.analysis.results.manifest import Manifest
    from gapmeter.report.run import words_of  # it reads tables, which takes a second to import

    result = result.model_copy(update={"words": words_of(result, Manifest.read(folder.path))})
    result.write(folder.path)
    result.verdict_file.write(folder.path)
    write_report(folder, tables)
    return result


def write_report(folder: RunFolder, tables: RunTables | None = None) -> Path:
    """Write ``report.html`` into a run's folder that has been analysed, and return its path.

    Raises FileNotFoundError when summary.json or manifest.json is not there, NotReadable when they are not of this
    version, OSError when the page cannot be written.
    """
    from gapmeter.report import html, run  # these take long to import

    html.write(folder.report, run.document(folder, tables), scripts=[html.asset("request.js")])
    return folder.report
