"""The scenarios that a name reaches: first those in ./scenarios, then those that come with the package."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher
from pathlib import Path

import yaml

from gapmeter.scenarios.errors import Place, ScenarioError, nearest, quoted, unread
from gapmeter.scenarios.source import compose, plain


def search_path() -> tuple[Path, ...]:
    """The folders in which names are looked up, in order."""
    return Path("scenarios"), Path(__file__).resolve().parent


def scenario_file(path_or_name: str, search: Sequence[Path]) -> Path:
    """The file of a scenario given by name or by path; raises ScenarioError that lists those there are."""
    as_path = Path(path_or_name)
    if as_path.suffix in (".yaml", ".yml") or len(as_path.parts) > 1:
        if not _is_file(as_path):
            raise ScenarioError(_no_file(as_path, search), place=Place(path_or_name))
        return as_path
    for folder in search:
        if _is_file(folder / f"{path_or_name}.yaml"):
            return folder / f"{path_or_name}.yaml"
    if _is_file(as_path):
        raise ScenarioError(f"no scenario of this name; for the file in this folder write ./{path_or_name}",
                            place=Place(path_or_name))  # fmt: skip
    raise ScenarioError(_unknown(path_or_name, search))


def list_scenarios(search: Sequence[Path] | None = None) -> list[tuple[str, str]]:
    """Every scenario that a name reaches, in alphabetical order: its name and its summary."""
    paths: dict[str, Path] = {}
    for folder in search_path() if search is None else search:
        for path in sorted(folder.glob("*.yaml")):
            paths.setdefault(path.stem, path)
    return [(name, _summary(path)) for name, path in sorted(paths.items())]


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that is too long, or one that no file can have
        return False


def _no_file(path: Path, search: Sequence[Path]) -> str:
    """Why a path does not lead to a scenario, with the nearest that does."""
    try:
        if path.is_dir():
            return "a folder, not a scenario; write the path of a .yaml file in it"
        beside = sorted(file.name for file in path.parent.glob("*.y*ml"))
    except (OSError, ValueError) as error:
        return f"no such file: {unread(error)}"
    close = nearest(path.name, beside)
    if not close and any(_is_file(folder / path.name) for folder in search):
        return f"no such file; the scenario of that name is written {path.stem}"
    return f"no such file; did you mean {path.parent / close}?" if close else "no such file; write its path from here"


def _unknown(name: str, search: Sequence[Path]) -> str:
    names = [known for known, _ in list_scenarios(search)]
    if not names:
        return f"no scenario {quoted(name)}: there are none in {', '.join(map(str, search))}"
    names.sort(key=lambda known: -SequenceMatcher(None, name.lower(), known).ratio())
    return f"no scenario {quoted(name)}; there are {', '.join(names)}"


def _summary(path: Path) -> str:
    """The file's own summary, or in brackets why it has none: a list must not fail over one file in it."""
    try:
        node = compose(path.read_text(encoding="utf-8-sig"), str(path))
        document = plain(node, str(path)) if isinstance(node, yaml.MappingNode) else {}
    except (ScenarioError, OSError, ValueError) as error:
        return f"({error})"
    return str(document.get("summary", "(no summary)"))
