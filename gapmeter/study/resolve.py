"""From a scenario's name and overrides to its values, with mistakes as sentences for the user. Quick to import."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence

from gapmeter import errors
from gapmeter.analysis.device.devices import UnknownDevice, find_device
from gapmeter.errors import UserError
from gapmeter.scenarios import Point, Scenario, ScenarioError, Setting, load_points, load_scenario, place_of, provenance
from gapmeter.scenarios.model import RATED_ARRIVALS

_OURS = ("server.max_batch", "server.precision", "server.max_model_len", "server.args")


def resolve(name: str, overrides: Sequence[str] = ()) -> Scenario:
    """The scenario (a name or a file) with overrides applied. Raises UserError."""
    with _as_user_errors():
        scenario = load_scenario(name, overrides)
        if scenario.cost.gpu is not None:
            try:
                find_device(scenario.cost.gpu)  # the parser knows no catalogue of devices
            except UnknownDevice as error:
                raise ScenarioError(str(error), place=place_of(name, overrides, "cost.gpu"), key="cost.gpu") from error
    return scenario


def resolve_points(name: str, overrides: Sequence[str]) -> tuple[Point, ...]:
    """The points of the scenario's sweep, none for no sweep. Raises UserError."""
    with _as_user_errors():
        points = load_points(name, overrides)
    for point in points:
        check_changeable(point.scenario, list(point.values))
    return points


def check_changeable(scenario: Scenario, keys: Sequence[str]) -> None:
    """Raises UserError for a key of a launched server's that is to differ on one that runs already: nothing would."""
    fixed = [key for key in keys if key.startswith(_OURS)]
    if scenario.server.engine == "attach" and fixed:
        text = f"{fixed[0]} cannot be changed on a server that runs already; launch it, or change the load"
        raise UserError(text, errors.BAD_SCENARIO)


def searchable_points(name: str, overrides: Sequence[str]) -> tuple[Point, ...]:
    """Settings whose capacity is to be compared: the points of the scenario's sweep. Raises UserError."""
    points = resolve_points(name, overrides)
    if len(points) < 2:
        raise UserError("--over names a single setting; write two or more: --over server.max_batch=4,8", errors.USAGE)
    for point in points:
        if "load.rate" in point.values:
            raise UserError("--over load.rate: the rate is what a search finds; leave it out", errors.USAGE)
        check_searchable(point.scenario, name)
    return points


def settings_of(point: Point) -> list[str]:
    """A point's own values as overrides."""
    return [f"{key}={json.dumps(value)}" for key, value in point.values.items()]


def point_overrides(point: Point, overrides: Sequence[str]) -> list[str]:
    """What runs one point of a sweep by itself; ``overrides``: the sweep's."""
    kept = [each for each in overrides if not each.lstrip().startswith(("sweep", "repeat"))]
    return [*kept, "sweep=[]", "repeat=1", *settings_of(point)]


def explain_config(name: str, overrides: Sequence[str]) -> tuple[Setting, ...]:
    """Each key of the resolved scenario with its value and where that came from. Raises UserError."""
    with _as_user_errors():
        return provenance(name, overrides)


@contextlib.contextmanager
def _as_user_errors() -> Iterator[None]:
    try:
        yield
    except ScenarioError as error:
        raise UserError(str(error), errors.BAD_SCENARIO) from error


def check_searchable(scenario: Scenario, name: str) -> None:
    """Raises UserError for a scenario whose load has no rate to search, or without SLOs."""
    load = scenario.load
    again = f"gapmeter capacity {name}"
    if load.loop == "closed":
        raise UserError(
            f"{name} is a closed loop ({load.concurrency} users): its users wait for their answers, so the load "
            f"never exceeds what the server can do; capacity needs an open loop. Write: {again} "
            f"--set load.arrivals=poisson --set load.concurrency=null --set load.rate=1",
            errors.USAGE,
        )
    if load.arrivals not in RATED_ARRIVALS or load.rate is None:
        raise UserError(
            f"{name} has arrivals of its own ({load.arrivals}), and no single rate to search. Write: {again} "
            f"--set load.arrivals=poisson --set load.{load.arrivals}=null --set load.rate=1",
            errors.USAGE,
        )
    if not scenario.slo:
        raise UserError(
            f"{name} has no SLO, so any rate would pass. Write: {again} --set 'slo=[\"ttft p99 <= 500 ms\"]'",
            errors.USAGE,
        )
    if scenario.sweep:
        raise UserError(
            f"{name} is a sweep; a capacity search needs a single point. Write: {again} --set 'sweep=[]', "
            f"or --over KEY=VALUE,VALUE",
            errors.USAGE,
        )
