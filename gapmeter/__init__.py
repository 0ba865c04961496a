"""gapmeter: where every request's milliseconds went. ``gapmeter.open(FOLDER)`` opens a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from gapmeter.runs.run import Run


def open(path: str | Path) -> Run:
    """Open an analysed run's folder: its figures, tables and report. Raises gapmeter.errors.UserError."""
    from gapmeter.runs.run import open_run

    return open_run(path)
