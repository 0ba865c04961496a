"""Scenario files: which file a name means, and its YAML as nodes that know their line and column.

What no scenario needs is refused: tags, values that contain themselves, depth and aliases without end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import yaml

from gapmeter.scenarios.errors import Place, ScenarioError, nearest, quoted, unread
from gapmeter.scenarios.plain_file import read_plain

_MOST_NODES = 100_000  # with every alias written out
_DEEPEST = 30
_TOO_DEEP = f"lists and mappings in each other, more than {_DEEPEST} deep; write fewer"
_UNWRITABLE = re.compile("[\\0\ud800-\udfff]")
_TAGS = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str", "seq", "map"))


class _Loader(yaml.SafeLoader):
    """YAML 1.2's plain scalars: ``1e3`` is a number, ``1:30`` and ``no`` are text, as people who type them mean.

    What is far too deep or too long is refused while it is read: yaml looks through all open brackets at every word.
    """

    made = 0

    def fetch_flow_collection_start(self, token: type[yaml.Token]) -> None:
        if self.flow_level > 2 * _DEEPEST:
            raise RecursionError
        super().fetch_flow_collection_start(token)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.made += 1
        if self.made > _MOST_NODES:
            raise yaml.YAMLError(f"more than {_MOST_NODES:,} values; write fewer")
        return super().compose_node(parent, index)


_Loader.yaml_implicit_resolvers = {}
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(~|null|)$"), ["~", "n", ""])
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(true|false)$"), ["t", "f"])
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?(0|[1-9]\d*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\.\d+|\d+\.\d*|(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+)$"),
    list("-+.0123456789"),
)


# Where names are looked up, in order.
_FOLDERS = (Path("scenarios"), Path(__file__).resolve().parent)


def scenario_file(path_or_name: str) -> Path:
    """The file of a scenario given by name or by path; raises ScenarioError that lists those there are."""
    as_path = Path(path_or_name)
    if as_path.suffix in (".yaml", ".yml") or len(as_path.parts) > 1:
        if not _is_file(as_path):
            raise ScenarioError(_no_file(as_path), place=Place(path_or_name))
        return as_path
    for folder in _FOLDERS:
        if _is_file(folder / f"{path_or_name}.yaml"):
            return folder / f"{path_or_name}.yaml"
    if _is_file(as_path):
        text = f"no scenario of this name; for the file in this folder write ./{path_or_name}"
        raise ScenarioError(text, place=Place(path_or_name))
    if as_path.suffix and (close := nearest(path_or_name, [file.name for file in Path().glob("*.y*ml")])):
        raise ScenarioError(f"no scenario {quoted(path_or_name)}; did you mean {close}?")
    names = [known for known, _ in list_scenarios()]
    names.sort(key=lambda known: -SequenceMatcher(None, path_or_name.lower(), known).ratio())
    raise ScenarioError(f"no scenario {quoted(path_or_name)}; there are {', '.join(names)}")


def list_scenarios() -> list[tuple[str, str]]:
    """Every scenario that a name reaches, in alphabetical order: its name and its summary."""
    paths: dict[str, Path] = {}
    for folder in _FOLDERS:
        for path in sorted(folder.glob("*.yaml")):
            paths.setdefault(path.stem, path)
    return [(name, _summary(path)) for name, path in sorted(paths.items())]


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that is too long, or one that no file can have
        return False


def _no_file(path: Path) -> str:
    """Why a path does not lead to a scenario, with the nearest that does."""
    try:
        if path.is_dir():
            return "a folder, not a scenario; write the path of a .yaml file in it"
        if path.exists():
            return "it is not a plain file; write what it gives into one"
        beside = sorted(file.name for file in path.parent.glob("*.y*ml"))
    except (OSError, ValueError) as error:
        return f"no such file: {unread(error)}"
    close = nearest(path.name, beside)
    if not close and any(_is_file(folder / path.name) for folder in _FOLDERS):
        return f"no such file; the scenario of that name is written {path.stem}"
    return f"no such file; did you mean {path.parent / close}?" if close else "no such file; write its path from here"


def _summary(path: Path) -> str:
    """The file's own summary, or in brackets why it has none: a list must not fail over one file in it."""
    try:
        node = compose(read_plain(path, 1 << 20, links=True).decode("utf-8-sig"), str(path))
        document = plain(node, str(path)) if isinstance(node, yaml.MappingNode) else {}
    except (ScenarioError, OSError, ValueError) as error:
        return f"({error})"
    return str(document.get("summary", "(no summary)"))


def compose(text: str, shown: str, *, lines: bool = True) -> yaml.Node | None:
    """The node tree of a YAML text, checked for duplicate keys and for nodes that contain themselves."""
    try:
        loader = _Loader(text)
    except yaml.reader.ReaderError as error:
        before = text[: error.position].split("\n")
        place = Place(shown, len(before), len(before[-1]) + 1) if lines else Place(shown)
        unseen = f"character {ord(text[error.position]):#04x} is not allowed in a text"
        raise ScenarioError(f"not valid YAML: {unseen}; remove it", place=place) from error
    try:
        node: yaml.Node | None = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = Place(shown, mark.line + 1, mark.column + 1) if mark and lines else Place(shown)
        what = f"{error.problem} {error.context}" if error.context else str(error.problem)
        if what.startswith("found character '\\t'"):
            what = "a tab where a line begins; indent with spaces"
        raise ScenarioError(f"not valid YAML: {what}", place=place) from error
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
        raise ScenarioError(f"not plain YAML: {error.problem}", place=place_of_node(shown, node), key=key) from error
    except (ValueError, KeyError, IndexError) as error:  # a number of thousands of digits, or a tag that does not fit
        text = "a number or tag that cannot be read; write fewer digits, or the value without its tag"
        raise ScenarioError(f"not plain YAML: {text}", place=place_of_node(shown, node), key=key) from error


def node_at(node: yaml.Node | None, path: tuple[str | int, ...]) -> yaml.Node | None:
    """The node at a path from this one, or the deepest on the way to one that is not there."""
    for step in path:
        if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
            node = node.value[step]
        elif isinstance(node, yaml.MappingNode):
            node = next((value for key, value in node.value if key.value == step), node)
        else:
            break
    return node


def place_of_node(shown: str, node: yaml.Node) -> Place:
    """Where a node begins."""
    return Place(shown, node.start_mark.line + 1, node.start_mark.column + 1)


def _check_nodes(node: yaml.Node, shown: str, sizes: dict[int, int], above: list[int], key: str = "") -> None:
    """Refuse what no scenario needs and a later reader would choke on; ``sizes`` gets each node's, aliases unfolded."""

    def fail(text: str) -> ScenarioError:
        return ScenarioError(text, place=place_of_node(shown, node), key=key)

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
        raise fail(f"character {ord(bad[0]):#04x} is not allowed in a text; remove it")
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
            text = f"duplicate key, first in line {first[name].start_mark.line + 1}; remove one"
            raise ScenarioError(text, place=place_of_node(shown, key_node), key=f"{key}.{name}".lstrip("."))
        first[name] = key_node


def _children(node: yaml.Node, key: str) -> Iterator[tuple[yaml.Node, str]]:
    """The nodes in a node, each with the key that it belongs to."""
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            yield name, key
            said = name.value if str(name.value).isprintable() else quoted(name.value)
            yield value, f"{key}.{said}".lstrip(".") if isinstance(name, yaml.ScalarNode) else key
    elif isinstance(node, yaml.SequenceNode):
        for one in node.value:
            yield one, key
