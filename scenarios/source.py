"""From YAML text to keys with their values and places: a file, an environment variable or a ``--set`` flag."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gapmeter.scenarios.errors import Place, ScenarioError, nearest, quoted, unread
from gapmeter.scenarios.fields import BY_KEY, SECTIONS

ENVIRONMENT_PREFIX = "GAPMETER_"
_MOST_BYTES = 1_000_000
_MOST_NODES = 100_000  # with every alias written out
_DEEPEST = 30
_TOO_DEEP = f"lists and mappings in each other, more than {_DEEPEST} deep; write fewer"
_UNWRITABLE = re.compile("[\\0\ud800-\udfff]")
_TAGS = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str", "seq", "map"))


class _Loader(yaml.SafeLoader):
    """YAML 1.2's plain scalars: ``1e3`` is a number, ``1:30`` and ``no`` are text, as people who type them mean."""


_Loader.yaml_implicit_resolvers = {}
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(~|null|)$"), ["~", "n", ""])
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(true|false)$"), ["t", "f"])
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?(0|[1-9]\d*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\.\d+|\d+\.\d*|(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+)$"),
    list("-+.0123456789"),
)


@dataclass(frozen=True, slots=True)
class Given:
    """One key as somebody wrote it. ``node`` leads from a part of the value to its own line and column."""

    key: str
    value: Any
    place: Place
    node: yaml.Node | None = None

    def place_of(self, path: tuple[str | int, ...]) -> Place:
        """Where the part of the value at ``path`` was written."""
        node = _descend(self.node, path)
        return self.place if node is None or self.place.line is None else _place(self.place.source, node)


@dataclass(frozen=True, slots=True)
class Layer:
    """All that one source says: keys, and where its sections begin."""

    given: dict[str, Given]
    sections: dict[str, Place]


def read_file(path: Path) -> Layer:
    """The keys of a scenario file; lengths in a ``file:`` are found beside the scenario."""
    shown = str(path)
    try:
        if (size := path.stat().st_size) > _MOST_BYTES:
            text = f"{size:,} bytes are no scenario, which has {_MOST_BYTES:,} at most; prompts and lengths go into"
            raise ScenarioError(f"{text} files of their own", place=Place(shown))
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ScenarioError(f"cannot read it: {unread(error)}", place=Place(shown)) from error
    root = compose(text, shown)
    if root is None:
        raise ScenarioError("the file is empty; it needs at least server, workload or load", place=Place(shown, 1, 1))
    layer = Layer({}, {"": _place(shown, root)})
    _flatten(root, "", shown, layer)
    for given in list(layer.given.values()):
        layer.given[given.key] = _beside(given, path.parent)
    return layer


def read_flag(flag: str) -> Layer:
    """The key of one ``KEY=VALUE``."""
    key, equals, text = flag.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ScenarioError(
            f"{quoted(flag)} is not KEY=VALUE; write for instance --set load.rate=8", place=Place("--set")
        )
    return _one_key(key, text, "--set")


def read_environment(environment: Mapping[str, str]) -> Layer:
    """The keys that ``GAPMETER_LOAD_RATE`` and its like set; an empty one counts as unset."""
    names = {environment_name(key): key for key in BY_KEY}
    layer = Layer({}, {})
    for name, text in sorted(environment.items()):
        if name in names and text.strip():
            layer.given.update(_one_key(names[name], text, name).given)
        elif name not in names and name.startswith(tuple(f"{ENVIRONMENT_PREFIX}{s.upper()}_" for s in SECTIONS)):
            close = nearest(name, {known.lower(): known for known in names})
            hint = f"; did you mean {close.upper()}?" if close else "; `gapmeter config SCENARIO` lists the keys"
            raise ScenarioError(f"no key of a scenario has this name{hint}", place=Place(name))
    return layer


def environment_name(key: str) -> str:
    """``GAPMETER_LOAD_RATE`` for ``load.rate``."""
    return ENVIRONMENT_PREFIX + key.upper().replace(".", "_")


def compose(text: str, shown: str, *, lines: bool = True) -> yaml.Node | None:
    """The node tree of a YAML text, checked for duplicate keys and for nodes that contain themselves."""
    try:
        loader = _Loader(text)
    except yaml.reader.ReaderError as error:
        before = text[: error.position].split("\n")
        place = Place(shown, len(before), len(before[-1]) + 1) if lines else Place(shown)
        unseen = f"character {ord(text[error.position]):#04x} cannot stand in a text"
        raise ScenarioError(f"not valid YAML: {unseen}; take it out", place=place) from error
    try:
        node: yaml.Node | None = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = Place(shown, mark.line + 1, mark.column + 1) if mark and lines else Place(shown)
        context = f" {error.context}" if error.context else ""
        raise ScenarioError(f"not valid YAML: {error.problem}{context}", place=place) from error
    except yaml.YAMLError as error:
        raise ScenarioError(f"not valid YAML: {str(error).splitlines()[0]}", place=Place(shown)) from error
    except RecursionError as error:
        raise ScenarioError(f"not a scenario: {_TOO_DEEP}", place=Place(shown)) from error
    finally:
        loader.dispose()
    if node is not None:
        _check_nodes(node, shown if lines else "", {}, [])
    return node


def plain(node: yaml.Node, shown: str, key: str = "") -> Any:
    """The node's value in Python's own types."""
    builder = yaml.constructor.SafeConstructor()
    try:
        return builder.construct_document(node)
    except yaml.constructor.ConstructorError as error:
        raise ScenarioError(f"not plain YAML: {error.problem}", place=_place(shown, node), key=key) from error
    except (ValueError, KeyError, IndexError) as error:  # a number of thousands of digits, or a tag that does not fit
        text = "a number or tag that cannot be read; write fewer digits, or the value without its tag"
        raise ScenarioError(f"not plain YAML: {text}", place=_place(shown, node), key=key) from error


def _one_key(key: str, text: str, source: str) -> Layer:
    """The layer of a flag or variable: a document with nothing but this key in it."""
    place = Place(source)
    try:
        node = compose(text, source, lines=False)
    except ScenarioError as error:
        said = "is" if error.text.startswith("not ") else "cannot be:"
        raise ScenarioError(f"{quoted(text)} {said} {error.text}", place=place, key=key) from error
    leaf = _owner(key)
    if leaf is None and key not in SECTIONS:
        raise unknown_key(key, place)
    value = None if node is None else _plain_flag(node, key, place)
    layer = Layer({}, {})
    if leaf is None:
        if not isinstance(node, yaml.MappingNode):
            raise ScenarioError("this is a group of keys; write --set GROUP.KEY=VALUE", place=place, key=key)
        _flatten(node, key, source, layer)
        layer.given.update({k: Given(k, g.value, place) for k, g in layer.given.items()})
        return layer
    return one_key(key, value, place)


def _plain_flag(node: yaml.Node, key: str, place: Place) -> Any:
    """A flag has no lines to point to."""
    try:
        return plain(node, place.source, key)
    except ScenarioError as error:
        raise ScenarioError(error.text, place=place, key=key) from error


def _owner(key: str) -> str | None:
    """The field that a dotted key belongs to: itself, or the one of which it names a part (``server.args.x``)."""
    parts = key.split(".")
    heads = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((head for head in heads if head in BY_KEY), None)


def _flatten(node: yaml.Node, prefix: str, shown: str, layer: Layer) -> None:
    """Put every key below ``node`` into the layer; sections are gone through, a field's value is kept whole."""
    if not isinstance(node, yaml.MappingNode):
        what = f"{prefix} needs keys below it" if prefix else "a scenario is a mapping of keys"
        raise ScenarioError(f"{what}, not {quoted(plain(node, shown))}", place=_place(shown, node), key=prefix)
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise ScenarioError(
                "a key must be a word, not a list or mapping", place=_place(shown, key_node), key=prefix
            )
        key = f"{prefix}.{key_node.value}" if prefix else str(key_node.value)
        if key in SECTIONS:
            layer.sections[key] = _place(shown, key_node)
            _flatten(value_node, key, shown, layer)
        elif key in BY_KEY:
            layer.given[key] = Given(key, plain(value_node, shown, key), _place(shown, value_node), value_node)
        else:
            raise unknown_key(key, _place(shown, key_node))


def one_key(key: str, value: Any, place: Place) -> Layer:
    """The layer in which a key, or a part of one (``server.args.x``), has this value; files lie beside the place's."""
    leaf = _owner(key)
    if leaf is None:
        raise unknown_key(key, place)
    for part in reversed(key[len(leaf) :].split(".")[1:]):
        value = {part: value}
    given = Given(leaf, value, place)
    return Layer({leaf: given if place.line is None else _beside(given, Path(place.source).parent)}, {})


def unknown_key(key: str, place: Place) -> ScenarioError:
    """The error for a key that no field has, with the nearest that one has."""
    section, _, leaf = key.rpartition(".")
    siblings = [field.leaf for field in BY_KEY.values() if field.section == section]
    if not section:
        siblings += list(SECTIONS)
    elsewhere = [field.key for field in BY_KEY.values() if field.leaf == leaf]
    close = nearest(leaf, siblings)
    found = (f"{section}.{close}" if section else close) if close else nearest(key, BY_KEY)
    found = elsewhere[0] if elsewhere else found
    hint = f"; did you mean {found}?" if found else ""
    listed = f" ({section or 'the file'} has {', '.join(siblings)})" if section in ("", *SECTIONS) else ""
    return ScenarioError(f"no such key{hint}{listed}", place=place, key=key)


def _beside(given: Given, folder: Path) -> Given:
    value = given.value
    holds = given.key.startswith("workload.") or given.key == "load.trace"
    if isinstance(value, dict) and holds and isinstance(value.get("file"), str):
        value = value | {"file": str(folder / value["file"])}
    if given.key == "workload.file" and isinstance(value, str):
        value = str(folder / value)
    return Given(given.key, value, given.place, given.node)


def _check_nodes(node: yaml.Node, shown: str, sizes: dict[int, int], above: list[int], key: str = "") -> None:
    """Refuse what no scenario needs and a later reader would choke on; ``sizes`` gets each node's, aliases unfolded."""

    def fail(text: str) -> ScenarioError:
        return ScenarioError(text, place=_place(shown, node), key=key)

    if id(node) in above:
        raise fail("this value contains itself; write it out")
    if id(node) in sizes:
        return
    if len(above) > _DEEPEST:
        raise fail(_TOO_DEEP)
    if node.tag not in _TAGS:
        tag = node.tag.replace("tag:yaml.org,2002:", "!!")
        raise fail(f"{quoted(tag)} is not for scenarios; write the value without a tag")
    if isinstance(node, yaml.ScalarNode) and (bad := _UNWRITABLE.search(node.value)):
        raise fail(f"character {ord(bad[0]):#04x} cannot stand in a text; take it out")
    children = list(_children(node, key))
    for child, name in children:
        _check_nodes(child, shown, sizes, [*above, id(node)], name)
    sizes[id(node)] = 1 + sum(sizes[id(child)] for child, _ in children)
    if sizes[id(node)] > _MOST_NODES:
        raise fail(f"more than {_MOST_NODES:,} values with its aliases (*name) written out; write fewer")
    if isinstance(node, yaml.MappingNode):
        _check_duplicates(node, shown, key)


def _check_duplicates(node: yaml.MappingNode, shown: str, key: str) -> None:
    first: dict[str, yaml.Node] = {}
    for key_node, _ in node.value:
        name = str(key_node.value)
        if name in first:
            text = f"the key stands twice, first in line {first[name].start_mark.line + 1}; take one out"
            raise ScenarioError(text, place=_place(shown, key_node), key=f"{key}.{name}".lstrip("."))
        first[name] = key_node


def _children(node: yaml.Node, key: str) -> Iterator[tuple[yaml.Node, str]]:
    """The nodes in a node, each with the key that it belongs to."""
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            yield name, key
            yield value, f"{key}.{name.value}".lstrip(".") if isinstance(name, yaml.ScalarNode) else key
    elif isinstance(node, yaml.SequenceNode):
        for one in node.value:
            yield one, key


def _descend(node: yaml.Node | None, path: tuple[str | int, ...]) -> yaml.Node | None:
    """The node at ``path``: the key's for the last name of a mapping that has no such value, else the value's."""
    for step in path:
        if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
            node = node.value[step]
        elif isinstance(node, yaml.MappingNode):
            node = next((value for key, value in node.value if key.value == step), node)
        else:
            break
    return node


def _place(shown: str, node: yaml.Node) -> Place:
    return Place(shown, node.start_mark.line + 1, node.start_mark.column + 1)
