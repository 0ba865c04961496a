"""How a scenario is run: what is asked beside the scenario itself, and how a run speaks meanwhile."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gapmeter import errors
from gapmeter.errors import UserError
from gapmeter.report.printable import printable

if TYPE_CHECKING:
    from gapmeter.loadgen.fleet import Workers
    from gapmeter.report.command import Command
    from gapmeter.scenarios.model import Cost

Say = Callable[[str], None]
_LONGEST = 2000  # letters of a line for people
# What may be asked for.
SHARES = {
    "--headroom": (0.0, 0.95), "--confidence": (0.5, 0.999), "--within": (0.005, 1.0), "--max-regression": (0.0, 10.0),
}  # fmt: skip
BUDGET_S = (30.0, 86400.0)


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

    @property
    def flags(self) -> list[str]:
        """Those of a command line that change what is measured."""
        words = ["--probe-dir", str(self.probe_dir)] if self.probe_dir is not None else []
        words += ["--locustfile", str(self.locustfile)] if self.locustfile is not None else []
        if (asked := self.workers) is not None:
            host = f"[{asked.listen_host}]" if ":" in asked.listen_host else asked.listen_host
            words += ["--workers", str(asked.count), "--listen", f"{host}:{asked.listen_port}"]
            words += ["--patience", f"{asked.patience_s:.15g}s"]
        return words


@dataclass(frozen=True, slots=True)
class CapacityGoal:
    """What to find, and how exactly. ``target_rps``: a load to plan servers for; None: no plan.

    ``headroom`` and ``within`` are shares of 1; ``budget_s`` is how long all trials may take together. ``start``: the
    first rate. None: the scenario's, and as much headroom as its ``cost.utilisation`` leaves.
    """

    target_rps: float | None = None
    headroom: float | None = None
    spare: int = 0
    confidence: float = 0.95
    within: float = 0.2
    budget_s: float = 240.0
    start: float | None = None

    def headroom_of(self, cost: Cost) -> float:
        """The share of each server that is to stay free."""
        return round(1 - cost.utilisation, 9) if self.headroom is None else self.headroom

    def check(self) -> None:
        """Raises UserError for a goal that no search can have."""
        for flag, rate in (("--target-rps", self.target_rps), ("start", self.start)):
            if rate is not None:
                check_rate(flag, rate, f"{rate:g}")
        if self.spare < 0:
            raise UserError(f"--spare {self.spare}: no fewer than 0 servers; write 1 for N+1", errors.USAGE)
        shares = {"--headroom": self.headroom, "--confidence": self.confidence, "--within": self.within}
        for flag, share in shares.items():
            if share is not None:
                check_share(flag, share, f"{100 * share:g}%")
        check_seconds("--budget", self.budget_s, f"{self.budget_s:g}s", BUDGET_S)

    @property
    def flags(self) -> list[str]:
        """What asks for it on a command line; which rate to start at is the scenario's to say there."""
        usual, words = CapacityGoal(), list[str]()
        if self.target_rps is not None:
            words += ["--target-rps", f"{self.target_rps:.15g}"]
            words += ["--headroom", _percentage(self.headroom)] if self.headroom is not None else []
            words += ["--spare", str(self.spare)] if self.spare else []
        for flag, share, default in (
            ("--confidence", self.confidence, usual.confidence), ("--within", self.within, usual.within)
        ):  # fmt: skip
            words += [flag, _percentage(share)] if share != default else []
        return words + (["--budget", f"{self.budget_s:.15g}s"] if self.budget_s != usual.budget_s else [])


def longer(budget_s: float) -> tuple[str, ...]:
    """The flags that give a search more time: twice as much, as far as one may ask for; none where it has that."""
    most_s = BUDGET_S[1]
    return ("--budget", f"{math.ceil(min(2 * budget_s, most_s) / 60)}m") if budget_s < most_s else ()


def _percentage(share: float) -> str:
    return f"{100 * share:.9f}".rstrip("0").rstrip(".") + "%"


def check_rate(flag: str, rate: float, text: str) -> None:
    """Raises UserError, which quotes ``text``."""
    if not 0 < rate < 1e9:
        raise UserError(f"{flag} {text}: not a rate; write requests per second above 0, for instance 50", errors.USAGE)


def check_share(flag: str, share: float, text: str) -> None:
    """Raises UserError, which quotes ``text``."""
    least, most = SHARES[flag]
    if not least <= share <= most:
        raise UserError(f"{flag} {text}: write a percentage from {100 * least:g}% to {100 * most:g}%", errors.USAGE)


def check_seconds(flag: str, seconds: float, text: str, ends: tuple[float, float]) -> None:
    """Raises UserError, which quotes ``text``."""
    least_s, most_s = ends
    if not least_s <= seconds <= most_s:
        upto = "" if math.isinf(most_s) else f" to {most_s / 3600:g}h"
        raise UserError(f"{flag} {text}: write a time from {least_s:g}s{upto}", errors.USAGE)


def tell(text: str) -> None:
    """Print a line for people; what a terminal would obey is shown as text, since the words may be a stranger's."""
    print(f"gapmeter: {printable(text[:_LONGEST])}{'…' * (len(text) > _LONGEST)}", file=sys.stderr, flush=True)
