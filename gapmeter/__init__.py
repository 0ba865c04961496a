"""gapmeter: where every request's milliseconds went. What the command line does, from Python.

import gapmeter
done = gapmeter.run("smoke", ["server.engine=simulated", "load.rate=4"])
run = gapmeter.open(done.folder)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gapmeter.errors import UserError
    from gapmeter.options import CapacityGoal, Options
    from gapmeter.runs.archive import archive
    from gapmeter.runs.comparison import compare_folders as compare
    from gapmeter.runs.explain import explain
    from gapmeter.runs.listing import list_runs
    from gapmeter.runs.run import open_run as open
    from gapmeter.runs.sql import ask as sql
    from gapmeter.study.capacities import find_capacities as capacities
    from gapmeter.study.capacity import find_capacity as capacity
    from gapmeter.study.comparison import compare_in_turn
    from gapmeter.study.conclusion import report_again
    from gapmeter.study.resolve import resolve as scenario
    from gapmeter.study.session import open_session as session
    from gapmeter.study.study import run_scenario as run
    from gapmeter.study.sweep import run_sweep as sweep
    from gapmeter.study.verify import verify

# Where each public name is: imported when it is first used, since some take a second.
_PLACES = {
    "CapacityGoal": ("options", "CapacityGoal"),
    "Options": ("options", "Options"),
    "UserError": ("errors", "UserError"),
    "archive": ("runs.archive", "archive"),
    "capacities": ("study.capacities", "find_capacities"),
    "capacity": ("study.capacity", "find_capacity"),
    "compare": ("runs.comparison", "compare_folders"),
    "compare_in_turn": ("study.comparison", "compare_in_turn"),
    "explain": ("runs.explain", "explain"),
    "list_runs": ("runs.listing", "list_runs"),
    "open": ("runs.run", "open_run"),
    "report_again": ("study.conclusion", "report_again"),
    "run": ("study.study", "run_scenario"),
    "scenario": ("study.resolve", "resolve"),
    "session": ("study.session", "open_session"),
    "sql": ("runs.sql", "ask"),
    "sweep": ("study.sweep", "run_sweep"),
    "verify": ("study.verify", "verify"),
}

__all__ = [
    "CapacityGoal", "Options", "UserError", "archive", "capacities", "capacity", "compare", "compare_in_turn",
    "explain", "list_runs", "open", "report_again", "run", "scenario", "session", "sql", "sweep", "verify",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'gapmeter' has no attribute {name!r}")
    module, attribute = _PLACES[name]
    return getattr(importlib.import_module(f"gapmeter.{module}"), attribute)
