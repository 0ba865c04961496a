"""Folders that are not what they should be: one sentence on what is wrong, where a bug would be a traceback."""

from __future__ import annotations

import contextlib
import hashlib
import struct
from collections.abc import Iterator
from pathlib import Path

from gapmeter import errors
from gapmeter.analysis.results import Manifest, NotReadable
from gapmeter.analysis.results.manifest import AnyManifest, read_manifest
from gapmeter.errors import UserError, reason_of
from gapmeter.records import RunFolder

# What reading or deriving from damaged files may end in.
UNDERIVABLE = (
    LookupError, ValueError, TypeError, ArithmeticError, AttributeError, RecursionError, MemoryError, struct.error,
)  # fmt: skip


def manifest_of(path: Path) -> AnyManifest:
    """A folder's manifest. Raises UserError for a folder that has none, and for one that is damaged."""
    try:
        return read_manifest(path)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path} is not a run's folder: it has no manifest.json", errors.USAGE) from None
    except OSError as error:
        text = f"{str(path)[:200]} is not a run's folder: manifest.json: {reason_of(error)}"
        raise UserError(text, errors.USAGE) from error
    except NotReadable as error:
        what = f"manifest.json: {error.key} {error.problem}" if error.key else f"manifest.json: {error.problem}"
        if error.key in ("", "schema_version"):
            raise UserError(f"{path} is not a run's folder: {what}; {error.remedy}", errors.USAGE) from error
        raise UserError(f"{path} is damaged: {what}; {error.remedy}", errors.NOT_VALID) from error


@contextlib.contextmanager
def unless_damaged(folder: RunFolder, manifest: Manifest) -> Iterator[None]:
    """Raises UserError for a failure that damage explains; any other is a bug, and stays what it is."""
    try:
        yield
    except UNDERIVABLE as error:
        what = _changed_file(folder, manifest)
        if not what:
            raise
        text = f"{folder.path} is damaged: {what}; take it again from where it was recorded, or from an archive"
        raise UserError(text, errors.NOT_VALID) from error


@contextlib.contextmanager
def rederivable(path: Path) -> Iterator[None]:
    """Raises UserError for what cannot be read of a run's derived files: they can be made again."""
    try:
        yield
    except NotReadable as error:
        raise UserError(str(error), errors.USAGE) from error
    except UNDERIVABLE as error:
        text = f"{path} cannot be read as an analysed run: {in_a_line(error)}"
        raise UserError(f"{text}; analyse it again: gapmeter report {path}", errors.USAGE) from error


def in_a_line(error: BaseException) -> str:
    """What went wrong, short enough for a sentence."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines[0] else type(error).__name__


def _changed_file(folder: RunFolder, manifest: Manifest) -> str:
    """Which raw file is not the one it was; "" for none."""
    for name, recorded in (manifest.files or {}).items():
        path = folder.path / name
        if not path.is_file():
            return f"{name} is gone"
        if hashlib.sha256(path.read_bytes()).hexdigest() != recorded:
            return f"{name} is not what was recorded (its SHA-256 differs from the manifest's)"
    return ""
