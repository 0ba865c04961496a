"""What lies in a runs folder: a line a run, sweep, capacity search or comparison, without reading any of them whole."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

_FRESH_S = 120.0  # a run that goes on writes telemetry or a log more often than that
_TITLES = {"manifest.json": "run", "compare.json": "compare"}  # the file that a folder of ours has


@dataclass(frozen=True, slots=True)
class Listed:
    """One folder. ``state``: done, running, unfinished (killed, not analysed) or damaged, which ``note`` explains.

    What is not known is "" or None; times are ms.
    """

    path: Path
    kind: str
    state: str
    started: str
    scenario: str = ""
    engine: str = ""
    model: str = ""
    load: str = ""
    verdict: str = ""
    n: int | None = None
    ttft_p99_ms: float | None = None
    itl_p99_ms: float | None = None
    e2e_p99_ms: float | None = None
    note: str = ""

    @property
    def name(self) -> str:
        return self.path.name


def listing(runs: Path) -> list[Listed]:
    """Every folder of ours in ``runs``, the oldest first; none where there is no such folder."""
    found = [look(path) for path in _folders(runs)]
    return sorted((each for each in found if each is not None), key=lambda each: (each.started, each.name))


def look(path: Path) -> Listed | None:
    """One folder; None when it is not one of ours."""
    file = next((path / name for name in _TITLES if (path / name).is_file()), None)
    if file is None or path.is_symlink():
        return None
    summary = path / "summary.json"
    stamps = tuple(_changed(each) for each in (file, summary))
    known = _read(file, summary, stamps)
    if known.state != "unfinished":
        return known
    return replace(known, state="running") if _is_fresh(path) else known


@functools.lru_cache(maxsize=20_000)
def _read(file: Path, summary: Path, stamps: tuple[int, int]) -> Listed:
    """``stamps``: when the two were last written, so that what changed is read anew."""
    folder, kind = file.parent, _TITLES[file.name]
    try:
        about = _mapping(file)
        told = _mapping(summary) if stamps[1] else {}
        return _listed(folder, str(about.get("kind", kind)), about, told)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        return Listed(folder, kind, "damaged", _started_by_name(folder), note=why[:200])


def _listed(folder: Path, kind: str, about: Mapping[str, Any], told: Mapping[str, Any]) -> Listed:
    scenario = about.get("scenario") or {}
    server = scenario.get("server") or {}
    metrics = told.get("metrics") or {}
    done = bool(told) or kind == "compare"
    return Listed(
        path=folder,
        kind=kind,
        state="done" if done else "unfinished",
        started=str(about.get("started_wall") or _started_by_name(folder)),
        scenario=str(scenario.get("name") or about.get("name") or ""),
        engine=str(server.get("engine") or ""),
        model=str(server.get("model") or ""),
        load=_load(scenario.get("load") or {}),
        verdict=str(told.get("verdict") or ""),
        n=(told.get("counts") or {}).get("measured"),
        ttft_p99_ms=(metrics.get("ttft") or {}).get("p99_ms"),
        itl_p99_ms=(metrics.get("itl") or {}).get("p99_ms"),
        e2e_p99_ms=(metrics.get("e2e") or {}).get("p99_ms"),
        note=str(about.get("ended_because") or ""),
    )


def _load(load: Mapping[str, Any]) -> str:
    if load.get("rate"):
        return f"{load['rate']:g} req/s"
    return f"{load['concurrency']} users" if load.get("concurrency") else str(load.get("arrivals") or "")


def _folders(runs: Path) -> Iterator[Path]:
    return (path for path in runs.iterdir() if path.is_dir()) if runs.is_dir() else iter(())


def _mapping(file: Path) -> Mapping[str, Any]:
    value = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f"{file.name} is not a JSON object")
    return value


def _changed(file: Path) -> int:
    """When a file was last written, ns; 0 when there is none."""
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0


def _is_fresh(folder: Path) -> bool:
    files = [folder / "manifest.json", *(folder / "telemetry").glob("*"), *(folder / "logs").glob("*")]
    return time.time() - max(map(_changed, files)) / 1e9 < _FRESH_S


def _started_by_name(folder: Path) -> str:
    """20260131-120000-… as 2026-01-31T12:00:00; "" for a folder of another name."""
    digits = folder.name[:15]
    try:
        return time.strftime("%Y-%m-%dT%H:%M:%S", time.strptime(digits, "%Y%m%d-%H%M%S"))
    except ValueError:
        return ""
