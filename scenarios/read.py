"""From a scenario's file, the environment and the command line's flags to one frozen Scenario.

Each value keeps the place where it was written: a mistake in it is reported there, and `gapmeter config` shows it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError

from gapmeter.scenarios.checks import OF_LAUNCHED, ONLY_WITH, UNCHANGEABLE, problems, whole_trace
from gapmeter.scenarios.errors import BadValue, Place, ScenarioError, nearest, quoted, unread
from gapmeter.scenarios.model import KEYS, SECTIONS, Scenario, check_value, defaults, flat
from gapmeter.scenarios.plain_file import read_plain
from gapmeter.scenarios.points import PointValue, spelled_points
from gapmeter.scenarios.source import compose, node_at, place_of_node, plain, scenario_file
from gapmeter.scenarios.values import READ_FILES, bad_value

ENVIRONMENT_PREFIX = "GAPMETER_"
_MOST_BYTES = 1_000_000
# Who said it: the later wins.
_FILE, _ENVIRONMENT, _FLAG, _POINT = range(1, 5)
# Mappings to which a later layer may add parts that they did not have.
_GROWING = ("server.args", "load.trace", "load.onoff", "load.ramp")


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of the resolved scenario: its value as a file would spell it, and where that came from."""

    key: str
    value: object
    source: str


@dataclass(frozen=True, slots=True)
class Point:
    """One point of a sweep: the values that it sets, as they were written, and the whole scenario there."""

    values: Mapping[str, object]
    scenario: Scenario


def load_scenario(
    path_or_name: str | Path, overrides: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Scenario:
    """The scenario of a file or a name, with ``KEY=VALUE`` overrides applied.

    Precedence: defaults < file < environment (``GAPMETER_LOAD_RATE``; the process's own when None) < overrides.
    Raises ScenarioError for every mistake of the user's.
    """
    return _read(path_or_name, overrides, environment).resolved().scenario()


def load_points(
    path_or_name: str | Path, overrides: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> tuple[Point, ...]:
    """The points of a scenario's ``sweep`` in the order written, each resolved by itself; none for no sweep.

    Raises ScenarioError as ``load_scenario``, also for values that do not go together at one of the points.
    """
    draft = _read(path_or_name, overrides, environment)
    points = []
    for point in draft.points():
        entries = dict(draft.at(point).entries) | {"repeat": _Entry("repeat", 1, Place("sweep"), _POINT)}
        del entries["sweep"]
        scenario = replace(draft, entries=entries).settled().scenario()
        points.append(Point({key: value.value for key, value in point.items()}, scenario))
    return tuple(points)


def provenance(
    path_or_name: str | Path, overrides: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> tuple[Setting, ...]:
    """Every key of the resolved scenario, in the model's order, with where its value came from."""
    draft = _read(path_or_name, overrides, environment).resolved()
    values = flat(draft.scenario().to_dict())
    return tuple(Setting(key, values[key], draft.source_of(key)) for key in KEYS)


def place_of(path_or_name: str | Path, overrides: Sequence[str], key: str) -> Place:
    """Where a key of the resolved scenario was written: for those who know more of its value than its model does.

    The file's beginning for a key that nobody wrote. Raises ScenarioError as ``load_scenario`` does.
    """
    draft = _read(path_or_name, overrides, None).resolved()
    return draft.entries[key].place if key in draft.entries else Place(str(draft.path), 1, 1)


def environment_name(key: str) -> str:
    """``GAPMETER_LOAD_RATE`` for ``load.rate``."""
    return ENVIRONMENT_PREFIX + key.upper().replace(".", "_")


@dataclass(frozen=True, slots=True)
class _Entry:
    """One key as somebody wrote it. ``node`` leads from a part of the value to its own line and column.

    ``layers``: of a mapping that several layers wrote, which wrote each part last.
    """

    key: str
    value: Any
    place: Place
    layer: int
    node: yaml.Node | None = None
    layers: Mapping[str, int] = field(default_factory=dict)

    def layer_of(self, part: str) -> int:
        """Which layer wrote a mapping's part, or all of it (""); below every layer where it has no such part."""
        if part and not (isinstance(self.value, dict) and part in self.value):
            return -1
        return self.layers.get(part, self.layer)

    def place_in(self, path: tuple[str | int, ...]) -> Place:
        """Where the part of the value at ``path`` was written."""
        node = node_at(self.node, path)
        return self.place if node is None or self.place.line is None else place_of_node(self.place.source, node)


@dataclass(frozen=True, slots=True)
class _Draft:
    """What was written of a scenario, before pydantic reads it: each key's winning entry, and where groups begin."""

    path: Path
    entries: Mapping[str, _Entry]
    groups: Mapping[str, Place]

    def place(self, key: str) -> Place:
        """Where to tell a mistake in a key: at its value, or where its group begins."""
        if key in self.entries:
            return self.entries[key].place
        return self.groups.get(key.partition(".")[0], Place(str(self.path), 1, 1))

    def source_of(self, key: str) -> str:
        """``FILE:LINE``, the flag or variable, or ``default``."""
        if key not in self.entries:
            return "default"
        place = self.entries[key].place
        return place.source if place.line is None else f"{place.source}:{place.line}"

    def points(self) -> list[dict[str, PointValue]]:
        """The points of the sweep, if there is one. A key that it sets and a later layer too is a mistake."""
        if "sweep" not in self.entries:
            return []
        sweep = self.entries["sweep"]
        try:
            check_value("sweep", sweep.value)
        except BadValue as error:
            raise self.mistake(BadValue(error.text, ("sweep", *error.path))) from error
        points = list(spelled_points(sweep.value))
        for key in {key: None for point in points for key in point}:
            whole = next((known for known in self.entries if key == known or key.startswith(f"{known}.")), None)
            if whole and self.entries[whole].layer_of(key[len(whole) + 1 :].partition(".")[0]) > sweep.layer:
                text = f"the sweep sets it; write --set sweep=[] to run one point, or leave {key} to the sweep"
                raise ScenarioError(text, place=self.entries[whole].place, key=key)
        return points

    def at(self, point: Mapping[str, PointValue]) -> _Draft:
        """The draft of one point: its values over the others, each with the place where it stands in the sweep."""
        sweep = self.entries["sweep"]
        layer = (_of_key(key, value.value, sweep.place_in(value.path), _POINT) for key, value in point.items())
        return replace(self, entries=_overlaid(self.entries, layer))

    def resolved(self) -> _Draft:
        """The draft without its sweep: settled, with the values of the first point where there is one."""
        points = self.points()
        return (self.at(points[0]) if points else self).settled()

    def settled(self) -> _Draft:
        """Drop what a later layer has made meaningless. Two keys of one layer that exclude each other are a mistake."""
        entries = dict(self.entries)
        url, engine = entries.get("server.url"), entries.get("server.engine")
        attached = engine is not None and engine.value == "attach"
        if url is not None and not attached and url.layer > (engine.layer if engine else 0):  # server.url means attach
            entries["server.engine"] = _Entry("server.engine", "attach", url.place, url.layer)
        duration, requests = entries.get("load.duration"), entries.get("load.requests")
        if duration is not None and requests is not None:
            if duration.layer == requests.layer:
                text = "write load.duration or load.requests, not both"
                raise ScenarioError(text, place=requests.place, key="load.requests")
            del entries["load.duration" if duration.layer < requests.layer else "load.requests"]
        patience, lasts = entries.get("load.patience"), entries.get("load.duration") or entries.get("load.requests")
        if patience is not None and lasts is not None and patience.layer < lasts.layer:
            del entries["load.patience"]  # a length that was asked for later is meant as it is
        for rule in ONLY_WITH:
            key, mode = entries.get(rule.key), entries.get(rule.mode)
            value = mode.value if mode else defaults()[rule.mode]
            is_mode = value in get_args(KEYS[rule.mode].annotation)  # what is none is a mistake of its own
            if key is None or not is_mode or value in rule.values or key.value == defaults()[rule.key]:
                continue
            if mode is None or key.layer >= mode.layer:
                raise ScenarioError(rule.remedy, place=key.place, key=rule.key)
            del entries[rule.key]
        return replace(self, entries=entries)

    def scenario(self) -> Scenario:
        """The scenario. Raises ScenarioError for a value that is wrong, or that does not go with another."""
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", self.path.stem).strip("._-")[:100]
        document: dict[str, Any] = {"name": name or "scenario"} | {section: {} for section in SECTIONS}
        for key, entry in self.entries.items():
            group, _, leaf = key.rpartition(".")
            (document[group] if group else document)[leaf] = entry.value
        try:
            scenario = Scenario.model_validate(document, context=READ_FILES)
        except ValidationError as error:
            raise self.mistake(bad_value(error)) from error
        model, engine = self.entries.get("server.model"), self.entries.get("server.engine")
        of_its_server = engine is not None and engine.value == "attach" and engine.layer == _FILE
        scenario = scenario.model_copy(
            update={
                "load": whole_trace(scenario.load),
                "source": self.path,
                "model_asked_for": model is not None and (model.layer > _FILE or of_its_server),
            }
        )
        for key in OF_LAUNCHED if scenario.server.engine == "attach" else ():
            if key in self.entries and _FILE < self.entries[key].layer < _POINT:
                raise ScenarioError(f"{key} {UNCHANGEABLE}", place=self.entries[key].place)
        for key, text in problems(scenario):
            raise ScenarioError(text, place=self.place(key), key=key)
        return scenario

    def mistake(self, error: BadValue) -> ScenarioError:
        """The error for a bad value, whose path begins with its key's parts."""
        depth = 2 if error.path[0] in SECTIONS else 1
        key, path = ".".join(map(str, error.path[:depth])), error.path[depth:]
        names = [part for part in path if isinstance(part, str) and part != "[key]"]  # pydantic's mark of a key itself
        return ScenarioError(error.text, place=self.entries[key].place_in(path), key=".".join([key, *names]))


def _read(path_or_name: str | Path, overrides: Sequence[str], environment: Mapping[str, str] | None) -> _Draft:
    """Everything that was written, before what the keys mean to each other."""
    path = scenario_file(str(path_or_name))
    file = list(_read_file(path))
    written: dict[str, _Entry] = {}
    for entry in file:
        if (first := written.setdefault(entry.key, entry)) is not entry:  # in its group, and as load.rate
            text = f"duplicate key, first in line {first.place.line}; remove one"
            raise ScenarioError(text, place=entry.place, key=entry.key)
    groups = {entry.key: entry.place for entry in file if entry.key in SECTIONS}
    entries = _overlaid({}, (entry for entry in file if entry.key in KEYS))
    entries = _overlaid(entries, _read_environment(os.environ if environment is None else environment))
    for flag in overrides:
        key, equals, text = flag.partition("=")
        if not equals or not key.strip():
            wrong = f"{quoted(flag)} is not KEY=VALUE; write for instance --set load.rate=8"
            raise ScenarioError(wrong, place=Place("--set"))
        entries = _overlaid(entries, _of_text(key.strip(), text, Place("--set"), _FLAG))
    return _Draft(path, entries, groups)


def _overlaid(below: Mapping[str, _Entry], layer: Iterable[_Entry]) -> dict[str, _Entry]:
    """A later layer replaces values, except that a part of a mapping (``server.args.x``) joins the mapping."""
    entries = dict(below)
    for entry in layer:
        key, lower = entry.key, entries.pop(entry.key, None)
        if entry.value is None:  # null unsets what lower layers said
            continue
        if lower is not None and key != "sweep":
            value = _merged(lower.value, entry.value, may_grow=key in _GROWING)
            if value is not entry.value:  # both are mappings
                parts = {part: lower.layer_of(part) for part in lower.value} | dict.fromkeys(entry.value, entry.layer)
                entry = replace(entry, value=value, layers=parts)
        entries[key] = entry
    return entries


def _merged(below: Any, above: Any, *, may_grow: bool) -> Any:
    if not isinstance(below, dict) or not isinstance(above, dict) or not (may_grow or above.keys() <= below.keys()):
        return above
    inner = {key: _merged(below[key], value, may_grow=False) if key in below else value for key, value in above.items()}
    return below | inner


def _read_file(path: Path) -> Iterator[_Entry]:
    """The keys and groups of a scenario file."""
    shown = str(path)
    try:
        if (size := path.stat().st_size) > _MOST_BYTES:
            text = f"{size:,} bytes are too many for a scenario ({_MOST_BYTES:,} at most); put prompts and lengths into"
            raise ScenarioError(f"{text} separate files", place=Place(shown))
        text = read_plain(path, _MOST_BYTES, links=True).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise ScenarioError(f"cannot read it: {unread(error)}", place=Place(shown)) from error
    root = compose(text, shown)
    if root is None:
        raise ScenarioError("the file is empty; it needs at least server, workload or load", place=Place(shown, 1, 1))
    return _entries(root, "", shown, _FILE)


def _read_environment(environment: Mapping[str, str]) -> Iterator[_Entry]:
    """The keys that ``GAPMETER_LOAD_RATE`` and its like set; an empty one counts as unset."""
    names = {environment_name(key): key for key in KEYS}
    groups = tuple(f"{section.upper()}_" for section in SECTIONS)
    words = (*SECTIONS, *(key for key in KEYS if "." not in key))
    for name, text in sorted(environment.items()):
        word = name.removeprefix(ENVIRONMENT_PREFIX)
        if name in names and text.strip():
            yield from _of_text(names[name], text, Place(name), _ENVIRONMENT)
        elif name not in names and word != name and (word.startswith(groups) or nearest(word, words)):
            close = nearest(name, {known.lower(): known for known in names})
            hint = f"did you mean {close.upper()}?" if close else "`gapmeter config SCENARIO` lists the keys"
            raise ScenarioError(f"no key of a scenario has this name; {hint}", place=Place(name))


def _of_text(key: str, text: str, place: Place, layer: int) -> Iterator[_Entry]:
    """What a flag or variable says of a key or a group: a YAML text without lines to point to."""
    try:
        node = compose(text, place.source, lines=False)
    except ScenarioError as error:
        said = "is" if error.text.startswith("not ") else "cannot be:"
        raise ScenarioError(f"{quoted(text)} {said} {error.text}", place=place, key=key) from error
    try:
        if key not in SECTIONS:
            yield _of_key(key, None if node is None else plain(node, place.source), place, layer)
        elif isinstance(node, yaml.MappingNode):
            for entry in _entries(node, key, place.source, layer):
                yield replace(entry, place=place, node=None)
        else:
            raise ScenarioError("this is a group of keys; write --set GROUP.KEY=VALUE", place=place, key=key)
    except ScenarioError as error:
        raise ScenarioError(error.text, place=place, key=error.key or key) from error


def _of_key(key: str, value: Any, place: Place, layer: int) -> _Entry:
    """A key, or a part of one (``server.args.x``), with a value; files that a file names lie beside it."""
    parts = key.split(".")
    heads = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    owner = next((head for head in heads if head in KEYS), None)
    if owner is None:
        raise _unknown_key(key, place)
    for part in reversed(key[len(owner) :].split(".")[1:]):
        value = {part: value}
    return _Entry(owner, _beside(owner, value, place), place, layer)


def _entries(node: yaml.Node, prefix: str, shown: str, layer: int) -> Iterator[_Entry]:
    """Every group and key below a node; groups are gone through, a key's value is kept whole."""
    if not isinstance(node, yaml.MappingNode):
        what = f"{prefix} needs keys below it" if prefix else "a scenario is a mapping of keys"
        text = f"{what}, not {quoted(plain(node, shown))}"
        raise ScenarioError(text, place=place_of_node(shown, node), key=prefix)
    for key_node, value_node in node.value:
        place = place_of_node(shown, key_node)
        if not isinstance(key_node, yaml.ScalarNode):
            raise ScenarioError("a key must be a word, not a list or mapping", place=place, key=prefix)
        key = f"{prefix}.{key_node.value}".lstrip(".")
        if key in SECTIONS:
            yield _Entry(key, None, place, layer)
            yield from _entries(value_node, key, shown, layer)
        elif key in KEYS:
            place = place_of_node(shown, value_node)
            yield _Entry(key, _beside(key, plain(value_node, shown, key), place), place, layer, value_node)
        else:
            raise _unknown_key(key, place)


def _beside(key: str, value: Any, place: Place) -> Any:
    """Paths in a scenario file count from its folder, those in a flag or variable from the working directory."""
    if place.line is None:
        return value
    folder = Path(place.source).parent
    if key == "workload.file" and isinstance(value, str):
        return str(folder / value)
    names_file = key.startswith("workload.") or key == "load.trace"
    if names_file and isinstance(value, dict) and isinstance(value.get("file"), str):
        return value | {"file": str(folder / value["file"])}
    return value


def _unknown_key(key: str, place: Place) -> ScenarioError:
    """The error for a key that there is not, with the nearest that there is."""
    section, _, leaf = key.rpartition(".")
    siblings = [known.rpartition(".")[2] for known in KEYS if known.rpartition(".")[0] == section]
    if not section:
        siblings += list(SECTIONS)
    places = {known.rpartition(".")[2]: known for known in KEYS}
    close = nearest(leaf, siblings)
    meant = places.get(leaf) or (f"{section}.{close}".lstrip(".") if close else places.get(nearest(leaf, places) or ""))
    hint = f"; did you mean {meant}?" if meant else ""
    listed = f" ({section or 'the file'} has {', '.join(siblings)})" if section in ("", *SECTIONS) else ""
    return ScenarioError(f"no such key{hint}{listed}", place=place, key=key)
