"""What a command leaves for programs: a line or a document on standard output, files, annotations beside the code."""

from __future__ import annotations

import json
import os
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gapmeter import errors
from gapmeter.errors import UserError

if TYPE_CHECKING:  # what takes long to import comes after the user's mistakes have been told
    from gapmeter.study.conclusion import Conclusion

_COUNTS = ("tests", "failures", "errors")
_LEVELS = {"FAIL": "error", "INCONCLUSIVE": "warning", "REGRESSED": "error", "UNDECIDED": "warning",
           "NOT ESTIMABLE": "warning"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Outputs:
    """Where results go beside their folders."""

    as_json: bool = False
    junit: Path | None = None
    markdown: Path | None = None
    annotations: bool = False

    @property
    def annotated(self) -> bool:
        """Whether somebody shows annotations: GitHub does, and where they are asked for."""
        return self.annotations or os.environ.get("GITHUB_ACTIONS") == "true"

    def check(self) -> None:
        """Before the load, not after it: raises UserError for a file that could not be written."""
        for path in (self.junit, self.markdown):
            if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
                raise UserError(f"{path} cannot be written: no such folder, or it is one itself", errors.USAGE)

    def publish(self, conclusions: Iterable[Conclusion[Any]]) -> list[Conclusion[Any]]:
        """Each as it comes: its folder as a line at once, the files anew with all so far. Raises UserError.

        The document, where it is asked for, comes at the end, also when a later run fails.
        """
        done: list[Conclusion[Any]] = []
        try:
            for conclusion in conclusions:
                done.append(conclusion)
                if not self.as_json:
                    print(conclusion.folder, flush=True)
                if self.junit:
                    write_file(self.junit, junit_of(done))
                if self.markdown:
                    write_file(self.markdown, "\n".join(map(_markdown, done)))
                if self.annotated:
                    for line in annotations_of(conclusion):
                        print(line, file=sys.stderr)  # which GitHub reads too: standard output is for programs
        finally:
            if done and self.as_json:
                summaries = [document_of(each) for each in done]
                json.dump(summaries[0] if len(summaries) == 1 else {"runs": summaries}, sys.stdout)
                print(flush=True)
        return done


def document_of(conclusion: Conclusion[Any]) -> dict[str, Any]:
    """What it found, as one JSON document."""
    document: dict[str, Any] = conclusion.result.to_json()
    return document if conclusion.regression is None else {**document, "regression": conclusion.regression}


def write_file(path: Path, text: str) -> None:
    """Raises UserError when it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{error.filename} cannot be written: {error.strerror}", errors.USAGE) from error


def _markdown(conclusion: Conclusion[Any]) -> str:
    from gapmeter.analysis.capacity.result import CapacityResult  # by now analysed: these imports cost nothing more
    from gapmeter.analysis.results import Manifest, RunResult
    from gapmeter.analysis.results.study import SearchManifest, SweepManifest
    from gapmeter.report import capacity, markdown, run, sweep

    result, folder = conclusion.result, conclusion.folder
    if isinstance(result, RunResult):
        return markdown.text(run.brief(result, Manifest.read(folder), conclusion.regression))
    if isinstance(result, CapacityResult):
        return markdown.text(capacity.document(result, SearchManifest.read(folder)))
    return markdown.text(sweep.document(result, SweepManifest.read(folder)))


def junit_of(conclusions: Sequence[Conclusion[Any]]) -> str:
    """One JUnit document with a suite a run, a point of a sweep, or a search."""
    from gapmeter.report.export.junit import junit

    first, *others = (ET.fromstring(junit(suite)) for each in conclusions for suite in _suites_of(each))
    for root in others:
        first.extend(root)
        for name in _COUNTS:
            first.set(name, str(int(first.get(name, "0")) + int(root.get(name, "0"))))
    return ET.tostring(first, encoding="unicode", xml_declaration=True) + "\n"


def _suites_of(conclusion: Conclusion[Any]) -> Iterator[Mapping[str, Any]]:
    """What it consists of for programs that know runs only: a run itself, a sweep's points, or a search's answer."""
    from gapmeter.analysis.capacity.result import CapacityResult
    from gapmeter.analysis.results import RunResult
    from gapmeter.report import bridge
    from gapmeter.report.export.junit import suites_of

    result = conclusion.result
    if isinstance(result, RunResult):
        yield {**bridge.run_document(result), "regression": conclusion.regression}
    elif isinstance(result, CapacityResult):  # one that did not find what was asked is a run that is not valid
        found = result.exit_code == errors.OK
        headline = " ".join(result.words.headline) if result.words else result.capacity.ended
        yield {
            "name": f"{result.name}: capacity",
            "verdict": "PASS" if found else "INVALID",
            "invalid_reasons": [] if found else [headline],
            "slo": [],
            "provenance": result.provenance.to_json(),
            "load": {"window_s": result.capacity.seconds or 0.0},
        }
    else:
        yield from suites_of(result)


def annotations_of(conclusion: Conclusion[Any]) -> list[str]:
    """GitHub's workflow commands: for each SLO missed or undecided, each run that is not valid, each regression.

    Of a sweep, for each of its points; of a capacity search, where it did not find what was asked.
    """
    return [line for suite in _suites_of(conclusion) for line in annotations_of_suite(suite)]


def annotations_of_suite(summary: Mapping[str, Any]) -> list[str]:
    """Of one run, as ``junit`` takes it."""
    name = summary.get("name") or "run"
    lines = [_annotation("error", f"{name} is not valid", reason) for reason in summary.get("invalid_reasons", ())]
    lines += [
        _annotation(_LEVELS[row["status"]], f"{name}: {row['text']} {row['status']}", row["sentence"])
        for row in summary.get("slo", ())
        if row["status"] in _LEVELS
    ]
    regression = summary.get("regression") or {}
    if regression.get("status") == "NOT COMPARABLE":
        lines.append(_annotation("error", f"{name} is not comparable with its baseline", regression["sentence"]))
    lines += [
        _annotation(_LEVELS[row["status"]], f"{name}: {row['name']} {row['status']}", row["sentence"])
        for row in regression.get("rows", ())
        if row["status"] in _LEVELS
    ]
    return lines


def _annotation(level: str, title: str, message: str) -> str:
    """Percent signs and line ends are escaped as the runner decodes them; in a title, colons and commas too."""
    escaped = message.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    head = title.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A").replace(":", "%3A").replace(",", "%2C")
    return f"::{level} title={head}::{escaped}"
