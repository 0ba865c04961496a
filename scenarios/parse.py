"""From a scenario file, the environment and the command line's flags to one frozen Scenario."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gapmeter.scenarios.checks import problems, whole_trace
from gapmeter.scenarios.errors import BadValue, Place, ScenarioError
from gapmeter.scenarios.fields import BY_KEY, FIELDS, REQUIRED
from gapmeter.scenarios.find import find, search_path
from gapmeter.scenarios.model import RATED_ARRIVALS, UNRATED_ARRIVALS, Cost, Load, Scenario, Server, Telemetry, Workload
from gapmeter.scenarios.source import Given, Layer, one_key, read_environment, read_file, read_flag
from gapmeter.scenarios.sweeping import Written, spelled_points

# Mappings to which a later layer may add parts that they did not have.
_GROWING = ("server.args", "load.trace", "load.onoff", "load.ramp")
_POINT = 4  # the layer of a sweep's point


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of the resolved scenario: its value as a file would spell it, and where that came from."""

    key: str
    value: object
    source: str


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The winning value of a key, and its layer: 0 default, 1 file, 2 environment, 3 flags, 4 a sweep's point."""

    given: Given
    layer: int


@dataclass(frozen=True, slots=True)
class _Rule:
    """``key`` makes sense only while ``mode`` has one of ``values``; ``remedy`` says so."""

    key: str
    mode: str
    values: tuple[str, ...]
    remedy: str


_RULES = (
    _Rule(
        "load.rate",
        "load.arrivals",
        (*RATED_ARRIVALS, *UNRATED_ARRIVALS),
        "a closed loop has no rate; write load.concurrency",
    ),
    _Rule(
        "load.rate",
        "load.arrivals",
        (*RATED_ARRIVALS, "closed"),
        "ramp, steps and trace have rates or times of their own; leave it out",
    ),
    *(
        _Rule(f"load.{shape}", "load.arrivals", (shape,), f"only {shape} arrivals have it; write arrivals: {shape}")
        for shape in ("onoff", "ramp", "steps", "diurnal", "trace")
    ),
    _Rule(
        "load.concurrency",
        "load.arrivals",
        ("closed",),
        "an open loop has no users; write load.rate, or arrivals: closed",
    ),
    _Rule("workload.file", "workload.kind", ("file",), "only kind file reads prompts; write kind: file"),
    _Rule(
        "workload.turns", "workload.kind", ("conversation",), "only conversations have turns; write kind: conversation"
    ),
    _Rule(
        "load.burstiness", "load.arrivals", ("gamma",), "only gamma arrivals have a burstiness; write arrivals: gamma"
    ),
    _Rule("server.url", "server.engine", ("attach",), "only engine attach takes an address; write engine: attach"),
    _Rule("server.tokenizer", "server.engine", ("attach",), "a model that we serve has its own; leave it out"),
    _Rule("server.dialect", "server.engine", ("attach",), "our engines know every field; leave it out"),
)


def load_scenario(
    path_or_name: str | Path,
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    search: Sequence[Path] | None = None,
) -> Scenario:
    """The scenario of a file, or of a name found in ``search``, with ``KEY=VALUE`` overrides applied.

    Precedence: defaults < file < environment (``GAPMETER_LOAD_RATE``; the process's own when None) < overrides.
    Raises ScenarioError for every mistake of the user's.
    """
    path, chosen, sections = _resolve(path_or_name, overrides, environment, search)
    return _build(path, chosen, sections)


@dataclass(frozen=True, slots=True)
class Point:
    """One point of a sweep: the values that it sets, as they were written, and the whole scenario there."""

    values: Mapping[str, object]
    scenario: Scenario


def load_points(
    path_or_name: str | Path,
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    search: Sequence[Path] | None = None,
) -> tuple[Point, ...]:
    """The points of a scenario's ``sweep`` in the order written, each resolved by itself; none for no sweep.

    Raises ScenarioError as ``load_scenario``, also for values that do not go together at one of the points.
    """
    path, layers, sections = _layers(path_or_name, overrides, environment, search)
    points = []
    for point in _spelled(layers):
        chosen = _at_point(layers, point)
        del chosen["sweep"]
        chosen["repeat"] = _Chosen(Given("repeat", 1, Place("sweep")), _POINT)
        values = {key: written.value for key, written in point.items()}
        points.append(Point(values, _build(path, _settled(chosen), sections)))
    return tuple(points)


def provenance(
    path_or_name: str | Path,
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    search: Sequence[Path] | None = None,
) -> tuple[Setting, ...]:
    """Every key of the resolved scenario, in the table's order, with where its value came from."""
    path, chosen, sections = _resolve(path_or_name, overrides, environment, search)
    document = _build(path, chosen, sections).to_dict()
    return tuple(Setting(f.key, _at(document, f.key), _source(chosen.get(f.key))) for f in FIELDS)


def place_of(path_or_name: str | Path, overrides: Sequence[str], key: str) -> Place:
    """Where a key of the resolved scenario was written: for those who know more of its value than the parser can.

    The file's beginning for a key that nobody wrote. Raises ScenarioError as ``load_scenario`` does.
    """
    path, chosen, _ = _resolve(path_or_name, overrides, None, None)
    return chosen[key].given.place if key in chosen else Place(str(path), 1, 1)


def _at(document: Mapping[str, Any], key: str) -> object:
    value: Any = document
    for part in key.split("."):
        value = value[part]
    return value


def _source(chosen: _Chosen | None) -> str:
    if chosen is None:
        return "default"
    place = chosen.given.place
    return place.source if place.line is None else f"{place.source}:{place.line}"


def _resolve(
    path_or_name: str | Path,
    overrides: Sequence[str],
    environment: Mapping[str, str] | None,
    search: Sequence[Path] | None,
) -> tuple[Path, dict[str, _Chosen], dict[str, Place]]:
    path, chosen, sections = _layers(path_or_name, overrides, environment, search)
    points = _spelled(chosen)
    return path, _settled(_at_point(chosen, points[0]) if points else chosen), sections


def _layers(
    path_or_name: str | Path,
    overrides: Sequence[str],
    environment: Mapping[str, str] | None,
    search: Sequence[Path] | None,
) -> tuple[Path, dict[str, _Chosen], dict[str, Place]]:
    """The winning value of every key, before what they mean to each other."""
    path = find(str(path_or_name), search_path() if search is None else search)
    file = read_file(path)
    variables = read_environment(os.environ if environment is None else environment)
    chosen: dict[str, _Chosen] = {}
    _overlay(chosen, file, 1)
    _overlay(chosen, variables, 2)
    for flag in overrides:
        _overlay(chosen, read_flag(flag), 3)
    return path, chosen, file.sections


def _settled(chosen: dict[str, _Chosen]) -> dict[str, _Chosen]:
    """Without what a later layer has made meaningless."""
    _attach_by_url(chosen)
    _alternatives(chosen, "load.duration", "load.requests")
    for rule in _RULES:
        _apply(rule, chosen)
    return chosen


def _spelled(chosen: Mapping[str, _Chosen]) -> list[dict[str, Written]]:
    """The points of the sweep, if there is one. A key that is swept over and set by a later layer is a mistake."""
    if "sweep" not in chosen:
        return []
    _read("sweep", chosen, {"": Place("")})
    sweep = chosen["sweep"]
    points = list(spelled_points(sweep.given.value))
    for key in {key: None for point in points for key in point}:
        if key in chosen and chosen[key].layer > sweep.layer:
            text = f"the sweep sets it; write --set sweep=[] to run one point, or leave {key} to the sweep"
            raise ScenarioError(text, place=chosen[key].given.place, key=key)
    return points


def _at_point(chosen: Mapping[str, _Chosen], point: Mapping[str, Written]) -> dict[str, _Chosen]:
    """The scenario's values with a point's over them, each with the place where it stands in the sweep."""
    sweep, there = chosen["sweep"].given, dict(chosen)
    for key, written in point.items():
        layer = one_key(key, written.value, sweep.place_of(written.path))
        _overlay(there, layer, _POINT)
    return there


def _overlay(chosen: dict[str, _Chosen], layer: Layer, level: int) -> None:
    """Later layers replace values, except that a part of a mapping (``server.args.x``) joins the mapping."""
    for key, given in layer.given.items():
        if given.value is None:  # null unsets what lower layers said
            chosen.pop(key, None)
            continue
        below = chosen.get(key)
        if below is not None and key != "sweep":
            merged = _merged(below.given.value, given.value, is_open=key in _GROWING)
            given = Given(key, merged, given.place, given.node)
        chosen[key] = _Chosen(given, level)


def _merged(below: Any, above: Any, *, is_open: bool) -> Any:
    if not isinstance(below, dict) or not isinstance(above, dict) or not (is_open or above.keys() <= below.keys()):
        return above
    inner = {key: _merged(below[key], value, is_open=False) if key in below else value for key, value in above.items()}
    return below | inner


def _attach_by_url(chosen: dict[str, _Chosen]) -> None:
    """An address from a later layer than the engine's means attach: ``--set server.url=…`` alone is enough."""
    url, engine = chosen.get("server.url"), chosen.get("server.engine")
    if url is not None and url.layer > (engine.layer if engine else 0):
        chosen["server.engine"] = _Chosen(Given("server.engine", "attach", url.given.place), url.layer)


def _alternatives(chosen: dict[str, _Chosen], one: str, other: str) -> None:
    """Of two keys that exclude each other the later layer's wins; two in one layer are a mistake."""
    a, b = chosen.get(one), chosen.get(other)
    if a is None or b is None:
        return
    if a.layer == b.layer:
        raise ScenarioError(f"write {one} or {other}, not both", place=b.given.place, key=other)
    del chosen[one if a.layer < b.layer else other]


def _apply(rule: _Rule, chosen: dict[str, _Chosen]) -> None:
    """A key that the mode has no use for is a mistake, unless a later layer changed the mode under it."""
    key, mode = chosen.get(rule.key), chosen.get(rule.mode)
    value = mode.given.value if mode else BY_KEY[rule.mode].default
    if key is None or value in rule.values or value not in BY_KEY[rule.mode].type.schema["enum"]:
        return
    if key.given.value == BY_KEY[rule.key].default:  # says what holds anyway
        return
    if mode is not None and key.layer < mode.layer:
        del chosen[rule.key]
        return
    raise ScenarioError(f"{rule.remedy}", place=key.given.place, key=rule.key)


def _build(path: Path, chosen: Mapping[str, _Chosen], sections: Mapping[str, Place]) -> Scenario:
    values = {field.key: _read(field.key, chosen, sections) for field in FIELDS}

    def section(name: str, make: Callable[..., Any]) -> Any:
        ns = {"ready_timeout", "duration", "warmup", "timeout", "stall", "retry_pause", "metrics_every"}
        mine = {f.leaf: values[f.key] for f in FIELDS if f.section == name}
        return make(**{f"{leaf}_ns" if leaf in ns else leaf: value for leaf, value in mine.items()})

    scenario = Scenario(
        name=values["name"] or path.stem,
        summary=values["summary"],
        server=section("server", Server),
        workload=section("workload", Workload),
        load=whole_trace(section("load", Load)),
        slo=values["slo"],
        seed=values["seed"],
        repeat=values["repeat"],
        telemetry=section("telemetry", Telemetry),
        cost=section("cost", Cost),
        source=path,
        sweep=values["sweep"],
    )
    _check(scenario, chosen, sections, path)
    return scenario


def _read(key: str, chosen: Mapping[str, _Chosen], sections: Mapping[str, Place]) -> Any:
    field, winner = BY_KEY[key], chosen.get(key)
    if winner is None:
        if field.default is REQUIRED:
            raise ScenarioError(f"missing; {field.doc}", place=sections.get(field.section, sections[""]), key=key)
        return None if field.default is None else field.type.read(field.default)
    try:
        return field.type.read(winner.given.value)
    except BadValue as error:
        names = [str(part) for part in error.path if isinstance(part, str)]
        raise ScenarioError(error.text, place=winner.given.place_of(error.path), key=".".join([key, *names])) from error


def _check(scenario: Scenario, chosen: Mapping[str, _Chosen], sections: Mapping[str, Place], path: Path) -> None:
    """What no single key can know."""

    def fail(key: str, text: str) -> ScenarioError:
        place = chosen[key].given.place if key in chosen else sections.get(key.split(".")[0], Place(str(path), 1, 1))
        return ScenarioError(text, place=place, key=key)

    for key, text in problems(scenario):
        raise fail(key, text)
