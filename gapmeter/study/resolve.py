"""From a scenario's name and overrides to its values, with mistakes as sentences for the user. Quick to import."""

from __future__ import annotations

from collections.abc import Sequence

from gapmeter import errors
from gapmeter.analysis.device.devices import UnknownDevice, find_device
from gapmeter.errors import UserError
from gapmeter.scenarios import Point, Scenario, ScenarioError, load_points, load_scenario, place_of, provenance


def resolve(name: str, overrides: Sequence[str]) -> Scenario:
    """The scenario (a name or a file) with overrides applied. Raises UserError."""
    try:
        scenario = load_scenario(name, overrides)
        _check_device(scenario, name, overrides)
    except ScenarioError as error:
        raise UserError(str(error), errors.BAD_SCENARIO) from error
    return scenario


def _check_device(scenario: Scenario, name: str, overrides: Sequence[str]) -> None:
    """The parser knows no catalogue of devices."""
    if scenario.cost.gpu is None:
        return
    try:
        find_device(scenario.cost.gpu)
    except UnknownDevice as error:
        raise ScenarioError(str(error), place=place_of(name, overrides, "cost.gpu"), key="cost.gpu") from error


def resolve_points(name: str, overrides: Sequence[str]) -> tuple[Point, ...]:
    """The points of the scenario's sweep, none for no sweep. Raises UserError."""
    try:
        return load_points(name, overrides)
    except ScenarioError as error:
        raise UserError(str(error), errors.BAD_SCENARIO) from error


def explain_config(name: str, overrides: Sequence[str]) -> list[tuple[str, object, str]]:
    """Each key of the resolved scenario with its value and where that came from. Raises UserError."""
    try:
        return [(setting.key, setting.value, setting.source) for setting in provenance(name, overrides)]
    except ScenarioError as error:
        raise UserError(str(error), errors.BAD_SCENARIO) from error


def asks_for_model(overrides: Sequence[str]) -> bool:
    """Whether the overrides ask for a model, beyond what the scenario's file says."""
    return any(override.partition("=")[0].strip() == "server.model" for override in overrides)
