"""Finding scenarios by name: first in ./scenarios, then among those that come with the package."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher
from pathlib import Path

import yaml

from scenarios.errors import Place, ScenarioError, quoted
from scenarios.source import compose, plain


def search_path() -> tuple[Path, ...]:
    """The folders in which names are looked up, in order."""
    return Path("scenarios"), Path(__file__).resolve().parent


def find(path_or_name: str, search: Sequence[Path]) -> Path:
    """The file of a scenario given by name or by path; raises ScenarioError that lists those there are."""
    as_path = Path(path_or_name)
    if as_path.suffix in (".yaml", ".yml") or len(as_path.parts) > 1:
        if not as_path.is_file():
            raise ScenarioError("no such file", place=Place(path_or_name))
        return as_path
    for folder in search:
        if (folder / f"{path_or_name}.yaml").is_file():
            return folder / f"{path_or_name}.yaml"
    raise ScenarioError(_unknown(path_or_name, search))


def list_scenarios(search: Sequence[Path] | None = None) -> list[tuple[str, str]]:
    """Every scenario that a name reaches, in alphabetical order: its name and its summary."""
    paths: dict[str, Path] = {}
    for folder in search_path() if search is None else search:
        for path in sorted(folder.glob("*.yaml")):
            paths.setdefault(path.stem, path)
    return [(name, _summary(path)) for name, path in sorted(paths.items())]


def _unknown(name: str, search: Sequence[Path]) -> str:
    names = [known for known, _ in list_scenarios(search)]
    if not names:
        return f"no scenario {quoted(name)}: there are none in {', '.join(map(str, search))}"
    names.sort(key=lambda known: -SequenceMatcher(None, name.lower(), known).ratio())
    return f"no scenario {quoted(name)}; there are {', '.join(names)}"


def _summary(path: Path) -> str:
    """The file's own summary, or in brackets why it has none: a list must not fail over one file in it."""
    try:
        node = compose(path.read_text(encoding="utf-8"), str(path))
        document = plain(node, str(path)) if isinstance(node, yaml.MappingNode) else {}
    except (ScenarioError, OSError, UnicodeDecodeError) as error:
        return f"({error})"
    return str(document.get("summary", "(no summary)"))
