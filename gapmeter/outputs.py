"""What a command leaves for programs: a line or a document on standard output, files, annotations beside the code."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gapmeter import errors
from gapmeter.errors import UserError, unless_refused

if TYPE_CHECKING:  # what takes long to import comes after the user's mistakes have been told
    from gapmeter.report.export.junit import Suite
    from gapmeter.study.conclusion import Conclusion


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
                self._tell(done)
        finally:
            if done and self.as_json:
                found = [each.result.to_json() | ({"regression": r} if (r := each.regression) else {}) for each in done]
                json.dump(found[0] if len(found) == 1 else {"runs": found}, sys.stdout)
                print(flush=True)
        return done

    def _tell(self, done: Sequence[Conclusion[Any]]) -> None:
        """The last one, and the files of all."""
        from gapmeter.report.export.junit import annotations_of, junit  # by now analysed: this costs nothing more

        last = done[-1]
        if not self.as_json:
            print(last.folder, flush=True)
        if self.junit:
            write_file(self.junit, junit([suite for each in done for suite in suites_of(each)]))
        if self.markdown:
            write_file(self.markdown, "\n".join(map(_markdown, done)))
        for suite in suites_of(last) if self.annotated else ():
            for line in annotations_of(suite):
                print(line, file=sys.stderr)  # which GitHub reads too: standard output is for programs


def write_file(path: Path, text: str) -> None:
    """Raises UserError when it cannot be written."""
    with unless_refused(f"{path} cannot be written"):
        path.write_text(text, encoding="utf-8")


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


def suites_of(conclusion: Conclusion[Any]) -> list[Suite]:
    """What it consists of for programs that know test suites only: a run, a sweep's points, or a search's answer."""
    from gapmeter.analysis.capacity.result import CapacityResult
    from gapmeter.analysis.results import RunResult
    from gapmeter.report.export.junit import suite_of_run, suite_of_search, suites_of_sweep

    result = conclusion.result
    if isinstance(result, RunResult):
        return [suite_of_run(result, conclusion.regression)]
    if isinstance(result, CapacityResult):
        return [suite_of_search(result, found=result.exit_code == errors.OK)]
    return suites_of_sweep(result)
