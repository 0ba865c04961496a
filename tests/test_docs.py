"""What the documents tell a reader to type exists: targets, variables, subcommands, flags, scenarios, modules."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from gapmeter.cli import main
from gapmeter.scenarios.source import list_scenarios

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "LICENSE"])
MAKEFILE = (ROOT / "Makefile").read_text()
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
TYPED = re.compile(r"^(?:\$ )?((?:[A-Z_]+=\S+ )*(?:make|gapmeter) .*)$")


def commands(text: str) -> Iterator[str]:
    """Lines of fenced blocks, and whole code spans, that begin with make or gapmeter."""
    for language, block in FENCED.findall(text):
        if language in ("", "sh", "bash", "console", "shell"):
            for line in block.splitlines():
                if found := TYPED.match(line.strip()):
                    yield found.group(1)
    for span in re.findall(r"`([^`\n]+)`", FENCED.sub("", text)):
        if found := TYPED.match(span):
            yield found.group(1)


def words(command: str) -> list[str]:
    """The words of a command without its comment, environment and the brackets of what may be left out."""
    return shlex.split(re.sub(r"[\[\]]|…|\.\.\.(?=\s|$)", " ", command), comments=True)


def sections(text: str) -> set[str]:
    """What a link may name of a page: its headings as GitHub spells them."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def typed(program: str) -> list[tuple[str, str]]:
    """(page, command) for every command of ``program`` in every page."""
    found = [(page.name, command) for page in PAGES for command in commands(page.read_text())]
    return [(name, command) for name, command in found if program in words(command)[:3]]


@pytest.mark.parametrize(("page", "command"), typed("make"))
def test_every_make_command_names_targets_variables_and_scenarios_that_exist(page: str, command: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    given = words(command)
    for word in given[given.index("make") + 1 :]:
        variable, equals, value = word.partition("=")
        if equals:
            assert re.search(rf"\b{variable}\b", MAKEFILE), f"{page}: make knows no variable {variable}"
        elif not word.startswith("-"):
            assert word in targets, f"{page}: make has no target {word}"
        if variable == "SCENARIO" and value.islower():
            assert value in dict(list_scenarios()), f"{page}: {value}"


@pytest.mark.parametrize(("page", "command"), typed("gapmeter"))
def test_every_gapmeter_command_names_a_subcommand_and_flags_that_exist(
    page: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = words(command)
    given = given[given.index("gapmeter") + 1 :]
    with pytest.raises(SystemExit) as left:
        main([given[0], "--help"] if not given[0].startswith("-") else ["--help"])
    assert left.value.code == 0, f"{page}: gapmeter has no command {given[0]}"
    known = set(re.findall(r"--[a-z][a-z-]*", capsys.readouterr().out))
    used = {word.partition("=")[0] for word in given if word.startswith("--")}
    assert used <= known, f"{page}: {given[0]} knows no {', '.join(used - known)}"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "```python" in page.read_text()], ids=lambda page: page.name
)
def test_python_in_the_documents_imports_what_exists(page: Path) -> None:
    for language, block in FENCED.findall(page.read_text()):
        if language == "python":
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and node.module:
                    module = importlib.import_module(node.module)
                    missing = [name.name for name in node.names if not hasattr(module, name.name)]
                    assert not missing, f"{node.module} has no {', '.join(missing)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_to_a_file_leads_to_one(page: Path) -> None:
    text = FENCED.sub("", page.read_text())
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    broken = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_to_a_section_leads_to_one(page: Path) -> None:
    text = FENCED.sub("", page.read_text())
    broken = [
        f"{link}#{section}"
        for link, section in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", text)
        if "://" not in link and section not in sections((page.parent / link).read_text() if link else text)
    ]
    assert not broken


def test_every_test_that_a_page_names_exists() -> None:
    """By its file below tests/ and how its name begins."""
    named = [found for page in PAGES for found in re.findall(r"`(\w+(?:/\w+)*)::(\w+)`", page.read_text())]
    assert len(named) > 50
    missing = [
        f"{file}::{name}" for file, name in named
        if f"def test_{name}" not in (ROOT / "tests" / f"{file}.py").read_text()
    ]  # fmt: skip
    assert not missing


def test_every_page_can_be_reached_from_the_readme() -> None:
    seen, left = set[Path](), [ROOT / "README.md"]
    while left:
        page = left.pop()
        if page not in seen and page.suffix == ".md":
            seen.add(page)
            links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", FENCED.sub("", page.read_text()))
            left += [(page.parent / link).resolve() for link in links if "://" not in link]
    assert not {page for page in (ROOT / "docs").rglob("*.md") if page not in seen}


def test_what_may_be_missing_is_named_by_the_packages_that_an_index_has() -> None:
    """Not as an extra of ours: gapmeter is on no index."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    known = {Requirement(each).name for extra in extras.values() for each in extra}
    folders = ("analysis", "gapmeter", "loadgen", "records", "report", "scenarios", "servers")
    named = {
        (str(path.relative_to(ROOT)), name)
        for path in [*PAGES, *(path for folder in folders for path in (ROOT / folder).rglob("*.py"))]
        for listed in re.findall(r"pip install '?([a-z][\w\[\] -]*)", path.read_text())
        for name in listed.split()
    }
    assert named and not {(path, name) for path, name in named if name not in known}


def test_help_lists_every_target_and_every_scenario() -> None:
    described = set(re.findall(r"^([a-z-]+):.*## ", MAKEFILE, re.MULTILINE))
    phony = re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    assert phony
    assert described == set(phony.group(1).split())
    for name, summary in list_scenarios():
        assert not summary.startswith("("), f"{name} has no summary for make help"
