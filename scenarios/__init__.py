"""What to ask: scenario files, and the one place that reads them into plain values."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gapmeter.scenarios.errors import Place, ScenarioError

if TYPE_CHECKING:
    from gapmeter.scenarios.model import Load, Scenario, Server, Workload
    from gapmeter.scenarios.read import Point, Setting, load_points, load_scenario, place_of, provenance
    from gapmeter.scenarios.slo import Slo
    from gapmeter.scenarios.source import list_scenarios

__all__ = [
    "Load", "Place", "Point", "Scenario", "ScenarioError", "Server", "Setting", "Slo", "Workload", "list_scenarios",
    "load_points", "load_scenario", "place_of", "provenance",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """The rest, when it is asked for: pydantic takes a tenth of a second, which a list of names need not wait for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = {
        "Slo": "slo", "Load": "model", "Scenario": "model", "Server": "model", "Workload": "model",
        "list_scenarios": "source",
    }  # fmt: skip
    return getattr(import_module(f"{__name__}.{home.get(name, 'read')}"), name)
