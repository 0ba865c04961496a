"""A run's folder as Python values: ``import gapmeter; run = gapmeter.open("runs/…")``; its tables, report and exports."""

from __future__ import annotations

import html
import json
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from gapmeter import errors
from gapmeter.errors import UserError
from gapmeter.records import RunFolder
from collections.abc import Iterator, Mapping
from typing import Any
from gapmeter.errors import UserError, reason_of
from gapmeter.study.study import NAMES, SEARCH, SWEEP
import sys
from collections.abc import Callable
from gapmeter.runs.damage import rederivable

if TYPE_CHECKING:
    import pandas as pd


class Run:
    """One analysed run. Tables are read when they are first asked for; docs/exports.md lists their columns."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    @cached_property
    def summary(self) -> dict[str, Any]:
        """``summary.json``: every figure with its interval, as docs/how-it-measures.md names them."""
        value: dict[str, Any] = json.loads(self.folder.summary.read_text())
        return value

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """``manifest.json``: the scenario, versions, hardware, command."""
        return self.folder.read_manifest()

    @property
    def verdict(self) -> str:
        """PASS, FAIL, INCONCLUSIVE or INVALID."""
        return str(self.summary["verdict"])

    @cached_property
    def requests(self) -> pd.DataFrame:
        """A row an attempt, with the client's stamps, ns."""
        return self._table("requests")

    @cached_property
    def ledger(self) -> pd.DataFrame:
        """Two rows a request (to its first and last token), a column a stage, ns."""
        return self._table("ledger")

    @cached_property
    def gaps(self) -> pd.DataFrame:
        """A row a gap between two tokens, a column a stage, ns."""
        return self._table("gaps")

    @cached_property
    def timeline(self) -> pd.DataFrame:
        """A row a stretch of a request's wait: whose it was, from when to when, ns."""
        return self._table("timeline")

    @cached_property
    def steps(self) -> pd.DataFrame:
        """A row a step of the engine. Raises UserError where no probe recorded any."""
        return self._table("steps")

    def report(self) -> Report:
        """The report; a notebook shows it."""
        return Report(self.folder.report)

    def __repr__(self) -> str:
        return f"<run {self.folder.path.name}: {self.verdict}>"

    def _table(self, name: str) -> pd.DataFrame:
        import pandas as pd

        path = self.folder.path / f"{name}.parquet"
        if not path.exists():
            raise UserError(
                f"{self.folder.path} has no {name}.parquet: nothing of that kind was recorded", errors.USAGE
            )
        return pd.read_parquet(path)


class Report:
    """``report.html``, shown by a notebook as a page of its own, whose styles and script touch nothing around it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def _repr_html_(self) -> str:
        page = html.escape(self.path.read_text(encoding="utf-8"), quote=True)
        return f'<iframe srcdoc="{page}" sandbox="allow-scripts" style="width:100%;height:900px;border:0"></iframe>'


def open_run(path: str | Path) -> Run:
    """Open an analysed run's folder. Raises UserError when it is none."""
    folder = RunFolder(Path(path))
    if not folder.manifest.exists():
        raise UserError(f"{path} is not a run's folder: it has no manifest.json", errors.USAGE)
    require_one_run(folder)
    if not folder.summary.exists():
        raise UserError(f"{path} has not been analysed; gapmeter report {path}", errors.USAGE)
    return Run(folder)


_PLACES = {SWEEP: "points", SEARCH: "trials"}


def parts_of(summary: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Each as ``export.junit`` takes a run."""
    from gapmeter.analysis.sweep.suites import suites_of

    if summary.get("kind") == SWEEP:
        yield from suites_of(summary)
    elif summary.get("kind") == SEARCH:
        yield _search(summary)
    else:
        yield summary


def require_one_run(folder: RunFolder) -> None:
    """Raises UserError for a sweep or a search: it says where its runs lie."""
    try:
        kind = folder.read_manifest().get("kind")
    except (OSError, ValueError) as error:
        why = reason_of(error) if isinstance(error, OSError) else error
        raise UserError(f"{folder.path} is not a run's folder: manifest.json: {why}", errors.USAGE) from error
    if kind not in _PLACES:
        return
    place = _PLACES[kind]
    found = sorted(path.parent for path in (folder.path / place).rglob("manifest.json"))
    each = f", for instance {found[0]}" if found else ""
    raise UserError(f"{folder.path} is {NAMES[kind]}; name one of its runs under {place}/{each}", errors.USAGE)


def _search(summary: Mapping[str, Any]) -> dict[str, Any]:
    """A search that did not find what was asked is a run that is not valid, with its answer as the reason."""
    found = summary["exit_code"] == errors.OK
    return {
        "name": f"{summary['name']}: capacity",
        "verdict": "PASS" if found else "INVALID",
        "invalid_reasons": [] if found else [" ".join(summary["headline"])],
        "slo": [],
        "provenance": summary.get("provenance"),
        "load": {"window_s": summary["capacity"]["seconds"] or 0.0},
    }


def export(run: Path, *, csv: Path | None, prometheus: Path | None, otlp: str | None, perfetto: Path | None) -> int:
    """Write what was asked for; a line with each file (or how many spans) on standard output. Raises UserError."""
    opened = open_run(run)
    wanted: list[Callable[[], list[str]]] = []
    if csv is not None:
        wanted.append(lambda: _csv(run, csv))
    if prometheus is not None:
        wanted.append(lambda: _prometheus(run, prometheus))
    if perfetto is not None:
        wanted.append(lambda: _perfetto(run, perfetto))
    if otlp is not None:
        wanted.append(lambda: _otlp(run, otlp))
    if not wanted:
        raise UserError("export what? --csv FOLDER, --prometheus FILE, --perfetto FILE or --otlp ADDRESS", errors.USAGE)
    with rederivable(run):
        verdict = opened.verdict
    if verdict == "INVALID":
        print(f"gapmeter: {run} is INVALID; every file says so", file=sys.stderr)
    for make in wanted:
        try:
            with rederivable(run):
                done = make()
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            raise UserError(
                f"not exported: {where}{error.strerror or str(error).splitlines()[0]}", errors.USAGE
            ) from error
        print(*done, sep="\n", flush=True)
    return errors.OK


def _csv(run: Path, into: Path) -> list[str]:
    from gapmeter.report.export.csv import write_csv
    from gapmeter.records import RunFolder

    return [str(path) for path in write_csv(RunFolder(run), into)]


def _prometheus(run: Path, file: Path) -> list[str]:
    from gapmeter.report.export.prometheus import prometheus

    opened = open_run(run)
    file.write_text(prometheus(opened.summary, opened.manifest), encoding="utf-8")
    return [str(file)]


def _perfetto(run: Path, file: Path) -> list[str]:
    from gapmeter.report.export.perfetto import write_trace
    from gapmeter.records import RunFolder

    write_trace(RunFolder(run), file)
    return [str(file)]


def _otlp(run: Path, address: str) -> list[str]:
    from gapmeter.report.export.otlp import NoOpenTelemetry, send
    from gapmeter.records import RunFolder

    try:
        return [f"{send(RunFolder(run), address)} spans to {address}"]
    except NoOpenTelemetry as error:
        raise UserError(str(error), errors.USAGE) from error
