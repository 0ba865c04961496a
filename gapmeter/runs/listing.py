"""The runs folder as a page shows it: entries read once until they change, and what goes on as such."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from pathlib import Path

from gapmeter.runs.history import Entry, read_entry

_FRESH_S = 120.0  # a run that goes on writes telemetry or a log more often than that
_NAMES = ("manifest.json", "compare.json", "summary.json")


@dataclass(frozen=True, slots=True)
class Listed:
    """One folder. ``state``: done, running, unfinished (killed, or not analysed) or damaged."""

    path: Path
    entry: Entry
    state: str

    @property
    def name(self) -> str:
        return self.path.name


def listing(runs: Path) -> list[Listed]:
    """Every folder of ours in ``runs``, the oldest first; none where there is no such folder."""
    folders = [path for path in runs.iterdir() if path.is_dir()] if runs.is_dir() else []
    found = [listed for path in folders if (listed := look(path)) is not None]
    return sorted(found, key=lambda each: (each.entry.started, each.name))


def look(path: Path) -> Listed | None:
    """One folder; None when it is not one of ours, or only a link to one."""
    stamps = tuple(_changed(path / name) for name in _NAMES)
    if path.is_symlink() or not any(stamps[:2]):
        return None
    entry = _read(path, stamps)
    if entry.kind == "damaged":
        return Listed(path, entry, "damaged")
    done = bool(stamps[2]) or entry.kind == "compare"
    return Listed(path, entry, "done" if done else "running" if _is_fresh(path) else "unfinished")


@functools.lru_cache(maxsize=20_000)
def _read(path: Path, stamps: tuple[int, ...]) -> Entry:
    """``stamps``: when its files were last written, so that what changed is read anew."""
    return read_entry(path)


def _changed(file: Path) -> int:
    """When a file was last written, ns; 0 when there is none."""
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0


def _is_fresh(folder: Path) -> bool:
    files = [folder / "manifest.json", *(folder / "telemetry").glob("*"), *(folder / "logs").glob("*")]
    return time.time() - max(map(_changed, files)) / 1e9 < _FRESH_S
