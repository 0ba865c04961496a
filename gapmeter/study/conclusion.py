"""What becomes of a run's folder at the end, also where the run ended early: noted, analysed, shown."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from gapmeter import errors
from gapmeter.analysis.results import Manifest, RunResult
from gapmeter.errors import UserError, reason_of
from gapmeter.records import RunFolder
from gapmeter.records.reader import NotRecords
from gapmeter.study.load import INTERRUPTED
from gapmeter.study.manifest import OpenManifest

if TYPE_CHECKING:
    from gapmeter.analysis.results.comparison import Regression

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Conclusion(Generic[R]):
    """Where a run, a sweep, a search or a comparison lies, what it found, and the exit code that says so.

    ``regression``: how a run compares with its baseline, where it was given one.
    """

    folder: Path
    result: R
    exit_code: int
    regression: Regression | None = None


@contextlib.contextmanager
def noting_early_end(manifest: OpenManifest) -> Iterator[None]:
    """What ends a run early is noted in its folder, so that it can be reported with what had happened by then."""
    path = manifest.folder.path
    report = f"gapmeter report {path}"
    try:
        yield
    except KeyboardInterrupt:
        _note(manifest, INTERRUPTED)
        text = f"; what was recorded by then: {report}" if manifest.has_begun else " before the load had begun"
        raise UserError(f"interrupted{text}", errors.INTERRUPTED) from None
    except UserError as error:
        _note(manifest, str(error))
        raise
    except OSError as error:
        _raise_if_gone(path)
        _note(manifest, str(error))
        text = f"; make room, then see what was recorded: {report}" if manifest.has_begun else ""
        raise UserError(f"{path} cannot be written: {reason_of(error)}{text}", errors.NOT_VALID) from error


def _note(manifest: OpenManifest, why: str) -> None:
    manifest.note_early_end(why)
    with contextlib.suppress(OSError):  # a full disk: the sentence that the user gets says so
        manifest.write_unless_over()


def _raise_if_gone(path: Path) -> None:
    if not path.is_dir():
        text = f"{path} was removed while the run went on; nothing of it is left"
        raise UserError(text, errors.NOT_VALID) from None


def conclude(folder: RunFolder, manifest: Manifest, *, quiet: bool, definitions: bool = False) -> Conclusion[RunResult]:
    """Analyse a run's folder and show the summary. Raises UserError when it holds nothing, or cannot be written."""
    if manifest.plan.t0_ns is None:
        why = manifest.ended_because or "the run ended before the load had begun"
        raise UserError(f"{folder.path}: no request was recorded: {why}", errors.NOT_VALID)
    try:
        # A report made again must not vouch for what has happened to the records since.
        manifest = manifest.model_copy(update={"files": manifest.files or folder.hashes()})
        manifest.write(folder.path)
        result = analyse_run(folder, definitions=definitions)
    except NotRecords as error:
        raise UserError(f"{folder.path}: the records cannot be read: {error}", errors.NOT_VALID) from error
    except OSError as error:
        _raise_if_gone(folder.path)
        if (where := str(error.filename or "")).startswith((str(folder.requests), str(folder.probe))):
            raise UserError(f"the records cannot be read: {where}: {reason_of(error)}", errors.NOT_VALID) from error
        text = f"the results cannot be written: {reason_of(error)}; the records are kept. Make room, then"
        raise UserError(f"{text} gapmeter report {folder.path}", errors.NOT_VALID) from error
    code = errors.INTERRUPTED if manifest.ended_because == INTERRUPTED else result.exit_code
    if not quiet:
        _show(folder, manifest, result, code)
    return Conclusion(folder.path, result, code)


def _show(folder: RunFolder, manifest: Manifest, result: RunResult, code: int) -> None:
    """The summary on standard error."""
    from gapmeter.report import run, terminal
    from gapmeter.report.document import Facts

    why = errors.MEANING[code]
    if code == errors.NOT_VALID:
        why = "undecided" if result.verdict == "INCONCLUSIVE" else "not valid as a measurement"
    links = Facts([("report", str(folder.report)), ("again", manifest.command)])
    terminal.show(run.brief(result, manifest), sys.stderr, links=links, end=f"exit={code} {why}")


def analyse_run(folder: RunFolder, *, definitions: bool = False) -> RunResult:
    """Everything that is derived from a run's records, and its report, into its folder. Raises NotRecords, OSError."""
    from gapmeter.analysis.analyse import analyse  # its import takes a second or two: mistakes are told before
    from gapmeter.report import write_result

    return write_result(folder, analyse(folder, definitions=definitions))
