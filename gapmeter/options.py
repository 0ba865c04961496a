"""What a run is told beside its scenario, what it gives back, and how it speaks meanwhile."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gapmeter.console.locust_page import Page, Ui
from gapmeter.loadgen.cluster import Workers


@dataclass(frozen=True, slots=True)
class Options:
    """What a run is told beside its scenario. ``command`` is what repeats it, for the manifest; "" to derive it.

    ``live_port``: where a page shows the run as it goes, 0 for any free port, None for no page. ``progress``: auto, or
    json for an object a second.
    """

    runs: Path = Path("runs")
    probe_dir: Path | None = None
    api_key: str | None = None
    quiet: bool = False
    command: str = ""
    workers: Workers | None = None
    live_port: int | None = None
    progress: str = "auto"
    ui: Ui | None = None
    locustfile: Path | None = None
    page: Page | None = None


@dataclass(frozen=True, slots=True)
class RunResult:
    """Where a run lies, what it found, and the exit code that says so."""

    folder: Path
    summary: dict[str, Any]
    exit_code: int


def tell(text: str) -> None:
    """A line for people."""
    print(f"gapmeter: {text}", file=sys.stderr, flush=True)


def silent(_: str) -> None:
    """For --quiet."""
