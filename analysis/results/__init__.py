"""Results are types: what a run says of itself and what it found, as its files hold it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gapmeter.analysis.results.codec import Ends, NotReadable, Number, Result, ResultFile

if TYPE_CHECKING:
    from gapmeter.analysis.results.manifest import Manifest, ManifestBase
    from gapmeter.analysis.results.run import RunResult

__all__ = ["Ends", "Manifest", "ManifestBase", "NotReadable", "Number", "Result", "ResultFile", "RunResult"]
_PLACES = {"Manifest": "manifest", "ManifestBase": "manifest", "RunResult": "run"}


def __getattr__(name: str) -> Any:
    """The large types when they are first used: a list of runs needs none of them, and they take half a second."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
