"""How a scenario is run: what is asked beside the scenario itself, and how a run speaks meanwhile."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gapmeter.report.printable import printable

if TYPE_CHECKING:
    from gapmeter.loadgen.fleet import Workers
    from gapmeter.report.command import Command

Say = Callable[[str], None]
_LONGEST = 2000  # letters of a line for people


@dataclass(frozen=True, slots=True)
class Options:
    """How a run is done, beside its scenario. ``command``: what repeats it, for the manifest; None: derived.

    ``live_port``: where a page shows the run as it goes, 0 for any free port, None for no page. ``progress``: auto, or
    json for an object a second. ``verbose``: the whole summary, not its first screen.
    """

    runs: Path = Path("runs")
    probe_dir: Path | None = None
    api_key: str | None = None
    quiet: bool = False
    verbose: bool = False
    command: Command | None = None
    workers: Workers | None = None
    live_port: int | None = None
    progress: str = "auto"
    locustfile: Path | None = None

    def __post_init__(self) -> None:
        """Who calls from Python may name folders by texts, as everywhere."""
        for name in ("runs", "probe_dir", "locustfile"):
            if isinstance(value := getattr(self, name), str):
                object.__setattr__(self, name, Path(value))

    @property
    def say(self) -> Say:
        """What tells people how it goes: on standard error, or nothing for ``quiet``."""
        return (lambda _: None) if self.quiet else tell


def tell(text: str) -> None:
    """Print a line for people; what a terminal would obey is shown as text, since the words may be a stranger's."""
    print(f"gapmeter: {printable(text[:_LONGEST])}{'…' * (len(text) > _LONGEST)}", file=sys.stderr, flush=True)
