"""What to ask: scenario files, and the one place that parses them into plain values."""

from gapmeter.scenarios.errors import Place, ScenarioError
from gapmeter.scenarios.find import list_scenarios
from gapmeter.scenarios.model import (
    Constant,
    Cost,
    Lengths,
    Load,
    Lognormal,
    Sampled,
    Scenario,
    Server,
    Slo,
    Uniform,
    Workload,
)
from gapmeter.scenarios.parse import Point, Setting, load_points, load_scenario, place_of, provenance

__all__ = [
    "Constant",
    "Cost",
    "Lengths",
    "Load",
    "Lognormal",
    "Place",
    "Point",
    "Sampled",
    "Scenario",
    "ScenarioError",
    "Server",
    "Setting",
    "Slo",
    "Uniform",
    "Workload",
    "list_scenarios",
    "load_points",
    "load_scenario",
    "place_of",
    "provenance",
]
