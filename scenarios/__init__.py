"""What to ask: scenario files, and the one place that parses them into plain values."""

from scenarios.errors import Place, ScenarioError
from scenarios.find import list_scenarios
from scenarios.model import (
    Constant,
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
from scenarios.parse import Setting, load_scenario, provenance

__all__ = [
    "Constant",
    "Lengths",
    "Load",
    "Lognormal",
    "Place",
    "Sampled",
    "Scenario",
    "ScenarioError",
    "Server",
    "Setting",
    "Slo",
    "Uniform",
    "Workload",
    "list_scenarios",
    "load_scenario",
    "provenance",
]
