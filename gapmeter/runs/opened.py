"""A run's folder as Python values: ``import gapmeter; run = gapmeter.open("runs/…")``."""

from __future__ import annotations

import html
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gapmeter import errors
from gapmeter.errors import UserError
from gapmeter.records import RunFolder
from gapmeter.runs.parts import want_one_run

if TYPE_CHECKING:
    import pandas as pd


class OpenedRun:
    """One analysed run. Tables are read when they are first asked for; docs/exports.md lists their columns."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    @cached_property
    def summary(self) -> dict[str, Any]:
        """``summary.json``: every figure with its interval, as docs/how-it-measures.md names them."""
        from gapmeter.report import bridge

        return bridge.read_run(self.folder.path)

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


def open_run(path: str | Path) -> OpenedRun:
    """Open an analysed run's folder. Raises UserError when it is none."""
    folder = RunFolder(Path(path))
    if not folder.manifest.exists():
        raise UserError(f"{path} is not a run's folder: it has no manifest.json", errors.USAGE)
    want_one_run(folder)
    if not folder.summary.exists():
        raise UserError(f"{path} has not been analysed; gapmeter report {path}", errors.USAGE)
    return OpenedRun(folder)
