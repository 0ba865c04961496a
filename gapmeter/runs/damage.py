"""Files that are not what they were: told in a sentence, where a bug would be a traceback."""

from __future__ import annotations

import contextlib
import hashlib
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gapmeter import errors
from gapmeter.errors import UserError
from gapmeter.records import RunFolder

# What reading or deriving from damaged files may end in.
UNDERIVABLE = (
    LookupError, ValueError, TypeError, ArithmeticError, AttributeError, RecursionError, MemoryError, struct.error,
)  # fmt: skip
_NUMBER = (int, float)
# Of what a run that had begun says of itself, all that no figure can be derived without.
_HELD: Mapping[str, type | tuple[type, ...]] = {
    "command": str, "status": str, "slo": list, "scenario": dict, "scenario.name": str, "scenario.server": dict,
    "scenario.workload": dict, "scenario.load": dict, "scenario.load.arrivals": str, "plan": dict, "plan.loop": str,
    "plan.t0_ns": _NUMBER, "plan.warmup_ns": _NUMBER, "plan.end_ns": _NUMBER, "plan.timeout_ns": _NUMBER,
    "plan.planned": (int, type(None)), "plan.notes": list, "plan.prompt_tokens_exact": bool,
    "plan.output_enforced": bool, "plan.warmup_auto": bool,
}  # fmt: skip


@contextlib.contextmanager
def unless_damaged(folder: RunFolder, manifest: Mapping[str, Any]) -> Iterator[None]:
    """Raises UserError for a failure that damage explains; any other is a bug, and stays what it is."""
    try:
        yield
    except UNDERIVABLE as error:
        what = damage(folder, manifest)
        if not what:
            raise
        text = f"{folder.path} is damaged: {what}; take it again from where it was recorded, or from an archive"
        raise UserError(text, errors.NOT_VALID) from error


@contextlib.contextmanager
def rederivable(path: Path) -> Iterator[None]:
    """Raises UserError for what cannot be read of a run's derived files: they can be made again."""
    try:
        yield
    except UNDERIVABLE as error:
        text = f"{path} cannot be read as an analysed run: {in_a_line(error)}"
        raise UserError(f"{text}; analyse it again: gapmeter report {path}", errors.USAGE) from error


def in_a_line(error: BaseException) -> str:
    """What went wrong, short enough for a sentence."""
    said = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {said[0][:200]}" if said[0] else type(error).__name__


def damage(folder: RunFolder, manifest: Mapping[str, Any]) -> str:
    """What is missing or wrong in the manifest, or which raw file is not the one it was; "" for nothing."""
    if what := lacking(manifest):
        return what
    hashes = manifest.get("files")
    for name, recorded in hashes.items() if isinstance(hashes, Mapping) else ():
        path = folder.path / str(name)
        if not path.is_file():
            return f"{name} is gone"
        if hashlib.sha256(path.read_bytes()).hexdigest() != recorded:
            return f"{name} is not what was recorded (its SHA-256 differs from the manifest's)"
    return ""


def lacking(manifest: Mapping[str, Any]) -> str:
    """What is missing or wrong in a manifest; "" for nothing."""
    for key, kind in _HELD.items():
        value: Any = manifest
        for part in key.split("."):
            value = value.get(part, _NOTHING) if isinstance(value, Mapping) else _NOTHING
        if value is _NOTHING:
            return f"manifest.json says no {key}"
        if not isinstance(value, kind):
            return f"{key} in manifest.json is {str(value)[:40]!r}, not what was written there"
    return ""


_NOTHING = object()
