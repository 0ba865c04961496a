"""From a scenario's name and overrides to its values, with mistakes as sentences for the user. Quick to import."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from gapmeter import errors
from gapmeter.analysis.device.devices import UnknownDevice, find_device
from gapmeter.errors import UserError
from gapmeter.report.command import Command
from gapmeter.scenarios.checks import OF_LAUNCHED, UNCHANGEABLE
from gapmeter.scenarios.errors import ScenarioError
from gapmeter.scenarios.model import RATED_ARRIVALS, Scenario, flat
from gapmeter.scenarios.read import Point, Setting, load_points, load_scenario, place_of, provenance
from gapmeter.scenarios.shapes import FixedPause

_OURS = (*OF_LAUNCHED, "server.max_model_len")


def resolve(name: str | Path, overrides: Sequence[str] = ()) -> Scenario:
    """The scenario (a name or a file) with overrides applied. Raises UserError."""
    with _as_user_errors():
        scenario = load_scenario(name, overrides)
        if scenario.cost.gpu is not None:
            try:
                find_device(scenario.cost.gpu)  # the parser knows no catalogue of devices
            except UnknownDevice as error:
                raise ScenarioError(str(error), place=place_of(name, overrides, "cost.gpu"), key="cost.gpu") from error
    return scenario


def resolve_points(name: str | Path, overrides: Sequence[str]) -> tuple[Point, ...]:
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
        raise UserError(f"{fixed[0]} {UNCHANGEABLE}", errors.BAD_SCENARIO)


def searchable_points(name: str | Path, overrides: Sequence[str]) -> tuple[Point, ...]:
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
    return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in point.values.items()]


def changes(scenario: Scenario, other: Scenario) -> list[str]:
    """What makes one scenario the other, as overrides: null unsets a key wherever it was set."""
    before, after = flat(scenario.to_dict()), flat(other.to_dict())
    return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in after.items() if value != before[key]]


def explain_config(name: str | Path, overrides: Sequence[str]) -> tuple[Setting, ...]:
    """Each key of the resolved scenario with its value and where that came from. Raises UserError."""
    with _as_user_errors():
        return provenance(name, overrides)


@contextlib.contextmanager
def _as_user_errors() -> Iterator[None]:
    try:
        yield
    except ScenarioError as error:
        raise UserError(str(error), errors.BAD_SCENARIO) from error


def check_searchable(scenario: Scenario, name: str | Path) -> None:
    """Raises UserError for a scenario whose load has no rate to search, or without SLOs."""
    load = scenario.load
    single = Command.of("capacity", name, ["sweep=[]"] * bool(scenario.sweep))
    again = f"{single} --set load.arrivals=poisson --set load.rate=1"
    if load.think_time != FixedPause(0):
        again += " --set load.think_time=0"
    if load.loop == "closed":
        problem = (
            f"is a closed loop: its users wait for their answers, so the load never exceeds what the server can do; "
            f"capacity needs an open loop. Write: {again}"
        )
    elif load.trace is not None and not math.isfinite(load.trace.rate):
        problem = "has a trace whose requests all came at once, so it has no rate to search"
    elif load.arrivals not in (*RATED_ARRIVALS, "trace"):
        problem = f"uses {load.arrivals} arrivals, which have no single rate to search. Write: {again}"
    elif scenario.workload.kind == "conversation":
        problem = (
            "has conversations: its rate is one of conversations, and what a search finds is one of requests. "
            f"Write: {single} --set workload.kind=chat --set load.think_time=0"
        )
    elif not scenario.slo:
        problem = f"has no SLO, so any rate would pass. Write: {single} --set 'slo=[\"ttft p99 <= 500 ms\"]'"
    elif scenario.sweep:
        problem = f"is a sweep; a capacity search needs a single point. Write: {single}, or --over KEY=VALUE,VALUE"
    else:
        return
    raise UserError(f"{name} {problem}", errors.USAGE)
