"""What becomes of a run's folder at the end, also where the run ended early: noted, analysed, shown."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from gapmeter import errors
from gapmeter.errors import UserError, reason_of
from gapmeter.options import RunResult
from gapmeter.records import RunFolder
from gapmeter.records.reader import NotRecords

if TYPE_CHECKING:
    from gapmeter.analysis import results

INTERRUPTED = "interrupted"


@contextlib.contextmanager
def accounted_for(folder: RunFolder, manifest: dict[str, Any]) -> Iterator[None]:
    """What ends a run early is noted in its folder, so that it can be reported with what had happened by then."""
    report = f"gapmeter report {folder.path}"
    try:
        yield
    except KeyboardInterrupt:
        _note_end(folder, manifest, INTERRUPTED)
        text = f"; what was recorded by then: {report}" if _has_begun(manifest) else " before the load had begun"
        raise UserError(f"interrupted{text}", errors.INTERRUPTED) from None
    except UserError as error:
        _note_end(folder, manifest, str(error))
        raise
    except OSError as error:
        _raise_if_gone(folder)
        _note_end(folder, manifest, str(error))
        text = f"; make room, then see what was recorded: {report}" if _has_begun(manifest) else ""
        raise UserError(f"{folder.path} cannot be written: {reason_of(error)}{text}", errors.NOT_VALID) from error


def _raise_if_gone(folder: RunFolder) -> None:
    if not folder.path.is_dir():
        text = f"{folder.path} was removed while the run went on; nothing of it is left"
        raise UserError(text, errors.NOT_VALID) from None


def _note_end(folder: RunFolder, manifest: dict[str, Any], why: str) -> None:
    """Why a run ended early, unless its load is over already, or an earlier reason is there."""
    if manifest["status"] == "running":
        manifest["status"] = "incomplete"
        manifest.setdefault("ended_because", why)
    with contextlib.suppress(OSError):  # a full disk: the sentence that the user gets says so
        if not _is_settled(folder):
            folder.write_json(folder.manifest, manifest)


def _is_settled(folder: RunFolder) -> bool:
    """Whether the manifest on disk is the one of a load that is over."""
    try:
        return bool(folder.read_manifest()["status"] != "running")
    except (OSError, ValueError):
        return False


def _has_begun(manifest: dict[str, Any]) -> bool:
    return "t0_ns" in manifest.get("plan", {})


def finish(folder: RunFolder, manifest: dict[str, Any], *, quiet: bool, definitions: bool = False) -> RunResult:
    """Analyse the folder and show the summary. Raises UserError when it holds nothing, or cannot be written."""
    if not _has_begun(manifest):
        why = manifest.get("ended_because", "the run ended before the load had begun")
        raise UserError(f"{folder.path}: no request was recorded: {why}", errors.NOT_VALID)
    from gapmeter.analysis.analyse import analyse  # its import takes a second or two: mistakes are told before
    from gapmeter.report import bridge, write_result

    try:
        # A report made again must not vouch for what has happened to the records since.
        folder.write_json(folder.manifest, manifest | {"files": manifest.get("files") or folder.hashes()})
        result = write_result(folder, analyse(folder, definitions=definitions))
        summary = bridge.run_document(result)
    except NotRecords as error:
        raise UserError(f"{folder.path}: the records cannot be read: {error}", errors.NOT_VALID) from error
    except OSError as error:
        _raise_if_gone(folder)
        if (where := str(error.filename or "")).startswith((str(folder.requests), str(folder.probe))):
            raise UserError(f"the records cannot be read: {where}: {reason_of(error)}", errors.NOT_VALID) from error
        text = f"the results cannot be written: {reason_of(error)}; the records are kept. Make room, then"
        raise UserError(f"{text} gapmeter report {folder.path}", errors.NOT_VALID) from error
    interrupted = manifest.get("ended_because") == INTERRUPTED
    code = errors.INTERRUPTED if interrupted else int(summary["exit_code"])
    if not quiet:
        _show(folder, result, code)
    return RunResult(folder.path, summary, code)


def _show(folder: RunFolder, result: results.RunResult, code: int) -> None:
    """The summary on standard error."""
    from gapmeter.analysis.results.manifest import Manifest
    from gapmeter.report import run, terminal
    from gapmeter.report.document import Facts

    manifest = Manifest.read(folder.path)
    why = errors.MEANING[code]
    if code == errors.NOT_VALID:
        why = "undecided" if result.verdict == "INCONCLUSIVE" else "not valid as a measurement"
    links = Facts([("report", str(folder.report)), ("again", manifest.command)])
    terminal.show(run.brief(result, manifest), sys.stderr, links=links, end=f"exit={code} {why}")
