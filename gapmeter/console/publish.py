"""What a command leaves for programs: a line or a document on standard output, JUnit and Markdown files."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gapmeter import errors
from gapmeter.errors import UserError
from gapmeter.runs.parts import parts_of
from gapmeter.study.parent import SEARCH, SWEEP

if TYPE_CHECKING:  # what takes long to import comes after the user's mistakes have been told
    from gapmeter.run import RunResult

_COUNTS = ("tests", "failures", "errors")


@dataclass(frozen=True, slots=True)
class Outlets:
    """Where results go beside the run's folder."""

    as_json: bool = False
    junit: Path | None = None
    markdown: Path | None = None

    def check(self) -> None:
        """Before the load, not after it: raises UserError for a file that could not be written."""
        for path in (self.junit, self.markdown):
            if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
                raise UserError(f"{path} cannot be written: no such folder, or it is one itself", errors.USAGE)


def publish(result: RunResult, earlier: Sequence[RunResult], outlets: Outlets) -> None:
    """One more result: its folder as a line at once, the files anew with all so far. Raises UserError."""
    if not outlets.as_json:
        print(result.folder, flush=True)
    summaries = [each.summary for each in (*earlier, result)]
    try:
        if outlets.junit:
            outlets.junit.write_text(join_junit(summaries), encoding="utf-8")
        if outlets.markdown:
            outlets.markdown.write_text("\n".join(map(_markdown, (*earlier, result))), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{error.filename} cannot be written: {error.strerror}", errors.USAGE) from error


def print_document(results: Sequence[RunResult]) -> None:
    """One JSON document: the summary, or ``{"runs": [...]}`` with those of a scenario's repeats."""
    summaries = [result.summary for result in results]
    json.dump(summaries[0] if len(summaries) == 1 else {"runs": summaries}, sys.stdout)
    print(flush=True)


def _markdown(result: RunResult) -> str:
    from gapmeter.analysis import results  # by now analysed: these imports cost nothing more
    from gapmeter.report import markdown, run
    from gapmeter.report.capacity.markdown import markdown_of_search
    from gapmeter.report.sweep.markdown import markdown_of_points

    kind = result.summary.get("kind", "")
    if kind in (SWEEP, SEARCH):
        return {SWEEP: markdown_of_points, SEARCH: markdown_of_search}[kind](result.summary)
    found, manifest = results.RunResult.read(result.folder), results.Manifest.read(result.folder)
    return markdown.text(run.brief(found, manifest, result.summary.get("regression")))


def join_junit(summaries: Sequence[Mapping[str, Any]]) -> str:
    """One JUnit document with a suite a run, a point of a sweep, or a search."""
    from gapmeter.report.export.junit import junit

    roots = [ET.fromstring(junit(part)) for summary in summaries for part in parts_of(summary)]
    first = roots[0]
    for root in roots[1:]:
        first.extend(root)
        for name in _COUNTS:
            first.set(name, str(int(first.get(name, "0")) + int(root.get(name, "0"))))
    return ET.tostring(first, encoding="unicode", xml_declaration=True) + "\n"
