"""What a capacity search is asked for, read from its flags. Quick to import: mistakes are told before a second goes."""

from __future__ import annotations

import argparse
import math
import re
from dataclasses import dataclass

from gapmeter import errors
from gapmeter.errors import UserError

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be found. ``target_rps`` is a load to plan servers for, None for none.

    ``headroom`` and ``within`` are shares; ``budget_s`` is how long trials may take in all.
    """

    target_rps: float | None = None
    headroom: float = 0.2
    spare: int = 0
    confidence: float = 0.95
    within: float = 0.1
    budget_s: float = 420.0


def read_wanted(arguments: argparse.Namespace) -> Wanted:
    """Raises UserError for a flag that is out of range."""
    if arguments.spare < 0:
        raise UserError(f"--spare {arguments.spare}: no fewer than 0 servers; write 1 for N+1", errors.USAGE)
    return Wanted(
        target_rps=None if arguments.target_rps is None else _rate("--target-rps", arguments.target_rps),
        headroom=_share("--headroom", arguments.headroom, 0.0, 0.95),
        spare=arguments.spare,
        confidence=_share("--confidence", arguments.confidence, 0.5, 0.999),
        within=_share("--within", arguments.within, 0.005, 1.0),
        budget_s=_seconds("--budget", arguments.budget),
    )


def _rate(flag: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1e9:
        raise UserError(f"{flag} {text}: not a rate; write requests per second above 0, for instance 50", errors.USAGE)
    return value


def _share(flag: str, text: str, least: float, most: float) -> float:
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%?)\s*", text)
    value = float(found[1]) / (100 if found[2] else 1) if found else math.nan
    if not least <= value <= most:
        raise UserError(f"{flag} {text}: write per cent from {100 * least:g}% to {100 * most:g}%", errors.USAGE)
    return value


def _seconds(flag: str, text: str) -> float:
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh]?)\s*", text)
    value = float(found[1]) * _SECONDS[found[2] or "s"] if found else math.nan
    if not 30 <= value <= 86400:
        raise UserError(f"{flag} {text}: write a time from 30s to 24h, for instance 10m", errors.USAGE)
    return value
