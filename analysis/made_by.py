"""Which state of the analysis made a summary: a version number alone does not tell two checkouts apart."""

from __future__ import annotations

import hashlib
import importlib.metadata
from functools import cache
from pathlib import Path

from gapmeter.analysis.results.run import MadeBy

_PACKAGES = ("analysis", "records")


@cache
def made_by() -> MadeBy:
    """``gapmeter``: the version installed; ``analysis``: 12 hex digits of the SHA-256 of the code of figures."""
    try:
        version = importlib.metadata.version("gapmeter")
    except importlib.metadata.PackageNotFoundError:
        version = "unknown"
    return MadeBy(gapmeter=version, analysis=_digest())


def _digest() -> str:
    root = Path(__file__).resolve().parent.parent
    files = [path for package in _PACKAGES for path in (root / package).rglob("*") if path.is_file()]
    found = hashlib.sha256()
    for path in sorted(files):
        if "__pycache__" not in path.parts:
            found.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:12]
