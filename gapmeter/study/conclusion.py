"""A run's folder: described so that it can be repeated and compared, kept up to date, and analysed at the end.

Also where the run ends early: why is noted, what was recorded by then is analysed.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gapmeter import errors
from gapmeter.analysis.results import Manifest, ManifestBase, RunResult
from gapmeter.analysis.results.manifest import Git, SearchManifest, SweepManifest
from gapmeter.errors import UserError, reason_of, remedy_of
from gapmeter.keys import Keys
from gapmeter.machine.hardware import describe_hardware, describe_versions, output_of
from gapmeter.records import RunFolder
from gapmeter.records.reader import NotRecords
from gapmeter.report.command import Command
from gapmeter.runs.lock import locked
from gapmeter.runs.run import STUDIES, Conclusion, manifest_of, unless_damaged
from gapmeter.scenarios.model import Scenario

if TYPE_CHECKING:
    from gapmeter.report.document import Document

STOPPED = "interrupted"


def describe(scenario: Scenario, command: Command, keys: Keys) -> ManifestBase:
    """What every manifest says before anything has run.

    Without anybody's key: not in the scenario, nor in the command that repeats it.
    """
    from gapmeter.servers.telemetry.sources import is_here  # a report made again need not wait for its import

    wall_ns, monotonic_ns = time.time_ns(), time.monotonic_ns()
    commit = output_of(["git", "rev-parse", "HEAD"])  # of the scenario author's checkout, none outside one
    changed = bool(commit and output_of(["git", "status", "--porcelain", "--untracked-files=no"]))
    return ManifestBase(
        status="running",  # until the end is written
        scenario=keys.out_of_value(scenario.to_dict()),
        scenario_digest=scenario.digest(),
        contents=scenario.contents() or None,
        command=str(keys.out_of_command(command)),
        started_wall=time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(wall_ns / 1e9)),
        started_wall_ns=wall_ns,
        started_ns=monotonic_ns,
        hardware=describe_hardware(),
        versions=describe_versions(),
        git=Git(commit=commit, changed=changed) if commit else None,
        server_here=scenario.server.engine != "attach" or is_here(scenario.server.url or ""),
    )


class OpenManifest:
    """The manifest of a run that is not over: what is known so far, and what of that is on disk."""

    def __init__(self, folder: RunFolder, value: Manifest) -> None:
        self.folder, self.value = folder, value
        self._written: Manifest | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the load has."""
        return self.value.plan.t0_ns is not None

    def note(self, **fields: Any) -> None:
        """What is known now, or is known better."""
        self.value = self.value.model_copy(update=fields)

    def note_plan(self, **fields: Any) -> None:
        """Note it of the plan."""
        self.note(plan=self.value.plan.model_copy(update=fields))

    def write(self) -> None:
        """Raises OSError."""
        self.value.write(self.folder.path)
        self._written = self.value

    @contextlib.contextmanager
    def noting_early_end(self) -> Iterator[None]:
        """What ends a run early is noted in its folder, so that it can be reported with what had happened by then."""
        path = self.folder.path
        report = Command.of("report", path)
        try:
            yield
        except KeyboardInterrupt:
            self._note_end(STOPPED)
            text = f"; what was recorded by then: {report}" if self.has_begun else " before the load had begun"
            raise UserError(f"interrupted{text}", errors.INTERRUPTED) from None
        except UserError as error:
            self._note_end(str(error))
            raise
        except OSError as error:
            raise_if_gone(path)
            self._note_end(str(error))
            text = f"; {remedy_of(error)}, then see what was recorded: {report}" if self.has_begun else ""
            raise UserError(f"{path} cannot be written: {reason_of(error)}{text}", errors.NOT_VALID) from error

    def _note_end(self, why: str) -> None:
        """Unless the load is over already; an earlier reason stays, and so does a load that is over on disk."""
        if self.value.status == "running":
            self.note(status="incomplete", ended_because=self.value.ended_because or why)
        if self._written is None or self._written.status == "running":
            with contextlib.suppress(OSError):  # a full disk: the sentence that the user gets says so
                self.write()


def raise_if_gone(path: Path) -> None:
    """Raises UserError where the folder of a run, or of several, is not there any more."""
    if not path.is_dir():
        text = f"{path} was deleted or renamed during the run: nothing can be written there"
        raise UserError(text, errors.NOT_VALID) from None


def why_empty(manifest: Manifest) -> str:
    """Why a run has no request, "" once its load has begun."""
    if manifest.plan.t0_ns is not None:
        return ""
    return f"no request was recorded: {manifest.ended_because or 'the run ended before the load had begun'}"


def conclude(
    folder: RunFolder, manifest: Manifest, *, quiet: bool, verbose: bool = False, definitions: bool = False
) -> Conclusion[RunResult]:
    """Analyse a run's folder and show the summary; ``verbose``: all of it, not its first screen.

    Raises UserError when the folder holds nothing, or cannot be written.
    """
    if empty := why_empty(manifest):
        raise UserError(f"{folder.path}: {empty}", errors.NOT_VALID)
    try:
        # A report made again must not vouch for what has happened to the records since.
        manifest = manifest.model_copy(update={"files": manifest.files or folder.hashes()})
        manifest.write(folder.path)
        result = analyse_run(folder, definitions=definitions)
    except NotRecords as error:
        why = f"; {manifest.ended_because}" if manifest.ended_because else ""
        raise UserError(f"{folder.path}: the records cannot be read: {error}{why}", errors.NOT_VALID) from error
    except OSError as error:
        raise_if_gone(folder.path)
        if (where := str(error.filename or "")).startswith((str(folder.requests), str(folder.probe))):
            raise UserError(f"the records cannot be read: {where}: {reason_of(error)}", errors.NOT_VALID) from error
        text = f"the results cannot be written: {reason_of(error)}; the records are kept; {remedy_of(error)}, then"
        raise UserError(f"{text} {Command.of('report', folder.path)}", errors.NOT_VALID) from error
    code = errors.INTERRUPTED if manifest.ended_because == STOPPED else result.exit_code
    if not quiet:
        from gapmeter.report import run

        why = "" if result.slo or code != errors.OK else "measured; no SLO was set"
        if code == errors.NOT_VALID:
            why = "undecided" if result.verdict == "INCONCLUSIVE" else "not valid as a measurement"
        again = [("again", manifest.command)] if verbose else []
        show(run.brief(result, manifest), folder.path, errors.exit_words(code, why), *again, details=verbose)
    return Conclusion(folder.path, result, code)


def show(document: Document, folder: Path, end: str = "", *links: tuple[str, str], details: bool = False) -> None:
    """A summary on standard error, with where its page lies and what the user may run next."""
    from gapmeter.report import terminal
    from gapmeter.report.document import Facts

    terminal.show(
        document, sys.stderr, links=Facts([("report", str(RunFolder(folder).report)), *links]), end=end, details=details
    )


def analyse_run(folder: RunFolder, *, definitions: bool) -> RunResult:
    """Everything that is derived from a run's records, and its report, into its folder. Raises NotRecords, OSError."""
    from gapmeter.analysis.analyse import analyse  # its import takes a second or two: mistakes are reported before
    from gapmeter.report import run

    return run.write(folder, *analyse(folder, definitions=definitions))


def report_again(
    path: str | Path, *, quiet: bool = False, verbose: bool = False, definitions: bool = False
) -> Conclusion[Any]:
    """Analyse a run, a sweep or a search again from its folder alone; ``definitions``: also by other tools' ones.

    Raises UserError when it is no run's folder, holds no requests, or is not of one run where ``verbose`` or
    ``definitions`` is asked for.
    """
    path = Path(path)
    manifest = manifest_of(path)
    if not isinstance(manifest, Manifest) and (verbose or definitions):
        text = f"{path} is {STUDIES[manifest.kind][0]}, and -v and --definitions are for a single run's report"
        raise UserError(f"{text}; leave them out, or name one of its runs", errors.USAGE)
    with unless_damaged(path, manifest), locked(path):
        if isinstance(manifest, SearchManifest):
            from gapmeter.study.capacity import report_capacity  # its import takes a second

            return report_capacity(path, quiet=quiet)
        if isinstance(manifest, SweepManifest):
            from gapmeter.study.sweep import report_sweep

            return report_sweep(path, quiet=quiet)
        return conclude(RunFolder(path), manifest, quiet=quiet, verbose=verbose, definitions=definitions)
