"""A run's folder as Python values: ``import gapmeter; run = gapmeter.open("runs/…")``. Its tables, report, exports.

What is not as it should be in a folder is one sentence, where a bug would be a traceback.
"""

from __future__ import annotations

import contextlib
import html
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from gapmeter import errors
from gapmeter.analysis.results import Manifest, NotReadable, RunResult
from gapmeter.analysis.results.manifest import AnyManifest, read_manifest
from gapmeter.errors import UserError, reason_of
from gapmeter.records import RunFolder
from gapmeter.report.command import Command
from gapmeter.scenarios.plain_file import check_folder, sha256_of

if TYPE_CHECKING:
    import pandas as pd

    from gapmeter.analysis.results.regression import Regression

R = TypeVar("R")
# Kinds of folders with several runs: what it is, and where its runs lie.
STUDIES = {"sweep": ("a sweep", "points"), "capacity": ("a capacity search", "trials")}


def _table(name: str, doc: str) -> cached_property[pd.DataFrame]:
    def read(run: Run) -> pd.DataFrame:
        from gapmeter.analysis.tables import read_table

        path = run.folder.path / f"{name}.parquet"
        if not path.exists():
            raise UserError(f"{run.folder.path} has no {path.name}: nothing of that kind was recorded", errors.USAGE)
        return read_table(path)

    read.__doc__ = doc
    return cached_property(read)


class Run:
    """One analysed run. Tables are read when they are first asked for; docs/exports.md lists their columns."""

    def __init__(self, folder: RunFolder, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest

    @cached_property
    def result(self) -> RunResult:
        """Every figure with its interval, as docs/how-it-measures.md names them. Raises UserError for a damaged one."""
        with rederivable(self.folder.path):
            return RunResult.read(self.folder.path)

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The same as ``summary.json`` has it: plain values."""
        return self.result.to_json()

    @property
    def verdict(self) -> str:
        """PASS, FAIL, INCONCLUSIVE or INVALID."""
        return self.result.verdict

    requests = _table("requests", "A row an attempt, with the client's stamps, ns.")
    ledger = _table("ledger", "Two rows a request (to its first and last token), a column a stage, ns.")
    gaps = _table("gaps", "A row a gap between two tokens, a column a stage, ns.")
    timeline = _table("timeline", "A row a stretch of a request's wait: whose it was, from when to when, ns.")
    steps = _table("steps", "A row a step of the engine. Raises UserError where no probe recorded any.")

    def report(self) -> Report:
        """The report; a notebook shows it. Raises UserError where there is none."""
        if not self.folder.report.exists():
            path = self.folder.path
            text = f"{path} has no {self.folder.report.name}; {Command.of('report', path)}"
            raise UserError(text, errors.USAGE)
        return Report(self.folder.report)

    def export(
        self, *, csv: str | Path | None = None, prometheus: str | Path | None = None,
        perfetto: str | Path | None = None, otlp: str | None = None,
    ) -> list[str]:  # fmt: skip
        """Write what is asked for; returns each file, or how many spans went to ``otlp``. Raises UserError."""
        written = list[str]()
        if csv is not None:
            from gapmeter.report.export.csv import write_csv

            written += map(str, self._exported(lambda: write_csv(self.folder, Path(csv))))
        if prometheus is not None:
            from gapmeter.report.export.prometheus import prometheus as text_of

            result = self.result
            self._exported(lambda: Path(prometheus).write_text(text_of(result), encoding="utf-8"))
            written.append(str(prometheus))
        if perfetto is not None:
            from gapmeter.report.export.perfetto import write_trace

            self._exported(lambda: write_trace(self.folder, Path(perfetto)))
            written.append(str(perfetto))
        if otlp is not None:
            from gapmeter.report.export.otlp import NoOpenTelemetry, send

            try:
                written.append(f"{self._exported(lambda: send(self.folder, otlp))} spans to {otlp}")
            except NoOpenTelemetry as error:
                raise UserError(str(error), errors.USAGE) from error
        return written

    def _exported(self, write: Callable[[], Any]) -> Any:
        try:
            with rederivable(self.folder.path):
                return write()
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            reason = error.strerror or str(error).splitlines()[0]
            raise UserError(f"not exported: {where}{reason}", errors.USAGE) from error

    def __repr__(self) -> str:
        return f"<run {self.folder.path.name}: {self.verdict}>"


class Report:
    """``report.html``, shown by a notebook as a page of its own, whose styles and script touch nothing around it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def _repr_html_(self) -> str:
        page = html.escape(self.path.read_text(encoding="utf-8"), quote=True)
        return f'<iframe srcdoc="{page}" sandbox="allow-scripts" style="width:100%;height:900px;border:0"></iframe>'


@dataclass(frozen=True, slots=True)
class Conclusion(Generic[R]):
    """Where a run, a sweep, a search or a comparison lies, what it found, and the exit code that says so.

    ``regression``: how a run compares with its baseline, where it was given one.
    """

    folder: Path
    result: R
    exit_code: int
    regression: Regression | None = None


def open_run(path: str | Path) -> Run:
    """Open an analysed run's folder. Raises UserError when it is none."""
    manifest = require_one_run(Path(path))
    folder = RunFolder(Path(path))
    if not folder.summary.exists():
        raise UserError(f"{path} has not been analysed; {Command.of('report', path)}", errors.USAGE)
    return Run(folder, manifest)


def require_one_run(path: Path) -> Manifest:
    """Its manifest. Raises UserError for a sweep or a search, whose runs it names, and as ``manifest_of``."""
    manifest = manifest_of(path)
    if isinstance(manifest, Manifest):
        return manifest
    what, place = STUDIES[manifest.kind]
    runs = sorted(found.parent for found in (path / place).rglob(Manifest.FILE))
    example = f", for instance {runs[0]}" if runs else ""
    raise UserError(f"{path} is {what}; name one of its runs under {place}/{example}", errors.USAGE)


# What reading or deriving from damaged files may end in.
UNDERIVABLE = (
    LookupError, ValueError, TypeError, ArithmeticError, AttributeError, RecursionError, MemoryError, struct.error,
)  # fmt: skip


def manifest_of(path: Path) -> AnyManifest:
    """A folder's manifest. Raises UserError for a folder that has none, and for one that is damaged."""
    try:
        manifest = read_manifest(path)
        check_folder(path)
        return manifest
    except (FileNotFoundError, NotADirectoryError):
        there, gone = f"is not a run's folder: it has no {Manifest.FILE}", "does not exist; name a run's folder"
        raise UserError(f"{path} {there if path.exists() else gone}", errors.USAGE) from None
    except OSError as error:
        inside = os.path.relpath(error.filename or path, path)
        text = f"{str(path)[:200]} is not a run's folder: {inside[:200]}: {reason_of(error)}"
        raise UserError(text, errors.USAGE) from error
    except NotReadable as error:
        what = f"{Manifest.FILE}: {' '.join(filter(None, (error.key, error.problem)))}"
        if error.key in ("", "schema_version"):
            raise UserError(f"{path} is not a run's folder: {what}; {error.remedy}", errors.USAGE) from error
        raise UserError(f"{path} is damaged: {what}; {error.remedy}", errors.NOT_VALID) from error


@contextlib.contextmanager
def unless_damaged(path: Path, manifest: AnyManifest) -> Iterator[None]:
    """Raises UserError for a failure that the folder may be to blame for: with the file that is not what was recorded.

    A folder's hashes may have been made after its records were changed, so they acquit no folder: --debug shows a bug.
    """
    try:
        yield
    except UNDERIVABLE as error:
        recorded = manifest.files if isinstance(manifest, Manifest) else None
        for name, sha256 in (recorded or {}).items():
            what = ""
            if not (path / name).is_file():
                what = f"{name} is gone"
            elif sha256_of(path / name) != sha256:
                what = f"{name} is not what was recorded (its SHA-256 differs from the manifest's)"
            if what:
                text = f"{path} is damaged: {what}; copy it again from where it was recorded, or from an archive"
                raise UserError(text, errors.NOT_VALID) from error
        if isinstance(error, MemoryError):
            raise
        text = f"{path} cannot be analysed: {in_a_line(error)}; what it holds does not fit together, or this is a bug"
        raise UserError(f"{text} of gapmeter, which --debug shows", errors.NOT_VALID) from error


@contextlib.contextmanager
def rederivable(path: Path) -> Iterator[None]:
    """Raises UserError for what cannot be read of a run's derived files: they can be made again."""
    try:
        yield
    except NotReadable as error:
        raise UserError(str(error), errors.USAGE) from error
    except UNDERIVABLE as error:
        text = f"{path} cannot be read as an analysed run: {in_a_line(error)}"
        raise UserError(f"{text}; analyse it again: {Command.of('report', path)}", errors.USAGE) from error


@contextlib.contextmanager
def analysed(path: Path) -> Iterator[None]:
    """As ``rederivable``; also for a folder where one of these files is missing or cannot be opened."""
    again = Command.of("report", path)
    try:
        with rederivable(path):
            yield
    except (FileNotFoundError, NotADirectoryError) as error:
        missing = Path(str(error.filename or RunResult.FILE)).name
        text = f"{path} is not an analysed run's folder: no {missing}; analyse it first: {again}"
        raise UserError(text, errors.USAGE) from error
    except OSError as error:
        where = f"{Path(str(error.filename)).name}: " if error.filename else ""
        text = f"{path} cannot be read as an analysed run: {where}{reason_of(error)}; analyse it again: {again}"
        raise UserError(text, errors.USAGE) from error


def in_a_line(error: BaseException) -> str:
    """What went wrong, short enough for a sentence."""
    lines = str(error).splitlines() or [""]
    if isinstance(error, KeyError) and str(error.args[0]).isidentifier():  # a table's column, or a key of its facts
        return f"it has no {lines[0][:200]}"
    return f"{type(error).__name__}: {lines[0][:200]}" if lines[0] else type(error).__name__
