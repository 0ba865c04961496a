"""What lies in a folder of runs: each with its kind, its answer and its state, and the damaged ones as such."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from gapmeter import errors
from gapmeter.errors import UserError
import functools
import time
from dataclasses import dataclass

DASH = "–"


@dataclass(frozen=True, slots=True)
class Entry:
    """One folder. ``kind``: run, sweep, capacity, compare, or damaged (``reason`` says why). None: not known."""

    kind: str
    folder: str
    started: str
    name: str = ""
    engine: str = ""
    verdict: str | None = None
    measured: int | None = None
    ttft_p99_ms: float | None = None
    reason: str = ""
    model: str = ""
    load: str = ""
    itl_p99_ms: float | None = None
    e2e_p99_ms: float | None = None


def print_runs(runs: Path, *, as_json: bool) -> int:
    """List a folder of runs on standard output, the newest last. Raises UserError when there is no such folder."""
    entries = list_runs(runs)
    if as_json:
        print(json.dumps([asdict(entry) for entry in entries], indent=1))
    elif entries:
        _print_table(entries)
    else:
        print(f"gapmeter: {runs} holds no runs yet", file=sys.stderr)
    return errors.OK


def list_runs(runs: Path) -> list[Entry]:
    """Every folder in ``runs``, oldest first. Raises UserError when there is no such folder."""
    if not runs.is_dir():
        raise UserError(f"there is no folder {runs}; name one with --runs", errors.USAGE)
    folders = [path for path in runs.iterdir() if path.is_dir() and not path.name.startswith(".")]
    return sorted((read_entry(path) for path in folders), key=lambda entry: (entry.started, entry.folder))


def read_entry(path: Path) -> Entry:
    """What a folder says of itself."""
    try:
        manifest = read_object(path / "manifest.json", missing_ok=(path / "compare.json").exists())
        told = "compare.json" if (path / "compare.json").exists() else "summary.json"
        summary = read_object(path / told, missing_ok=True)
        return _entry(path, manifest, summary)
    except (OSError, ValueError) as error:
        return Entry("damaged", str(path), _time_of(path), reason=str(error))
    except (AttributeError, TypeError, KeyError) as error:  # JSON of another shape than ours
        return Entry("damaged", str(path), _time_of(path), reason=f"not as a run's files are: {error}")


def _entry(path: Path, manifest: Mapping[str, Any], summary: Mapping[str, Any]) -> Entry:
    if "schema_version" not in manifest and not (path / "compare.json").exists():
        return Entry("damaged", str(path), _time_of(path), reason="manifest.json says no schema_version")
    scenario = manifest.get("scenario") or {}
    server, metrics = scenario.get("server") or {}, summary.get("metrics") or {}
    reason = str(manifest.get("ended_because") or "")
    if not summary and not (path / "compare.json").exists():
        reason = reason or "not analysed: gapmeter report makes its figures"
    kind = kind_of(path, manifest, summary)
    sides = summary.get("sides") or [{}]  # of a comparison
    return Entry(
        kind=kind,
        folder=str(path),
        started=str(manifest.get("started_wall") or _time_of(path)),
        name=str(scenario.get("name") or summary.get("name") or sides[0].get("scenario") or ""),
        engine=str(server.get("engine") or ""),
        verdict=summary.get("verdict"),
        measured=(summary.get("counts") or {}).get("measured"),
        ttft_p99_ms=(metrics.get("ttft") or {}).get("p99_ms"),
        reason=reason,
        model=str(server.get("model") or ""),
        load=_load(scenario, kind),
        itl_p99_ms=(metrics.get("itl") or {}).get("p99_ms"),
        e2e_p99_ms=(metrics.get("e2e") or {}).get("p99_ms"),
    )


def _load(scenario: Mapping[str, Any], kind: str) -> str:
    """The rate or the users; of a sweep what it sweeps, of a search that it looks for one."""
    load, points = scenario.get("load") or {}, scenario.get("sweep") or []
    if kind == "sweep" and points:
        first, last = points[0], points[-1]
        return ", ".join(f"{key.rpartition('.')[2]} {first[key]} .. {last.get(key)}" for key in first)
    if kind == "capacity":
        return "searched"
    if load.get("rate"):
        return f"{load['rate']:g} req/s"
    users = load.get("concurrency")
    return f"{users} user{'s' if users != 1 else ''}" if users else str(load.get("arrivals") or "")


def kind_of(path: Path, manifest: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """run, or what the manifest says, or what the folder holds beside."""
    if manifest.get("kind"):
        return str(manifest["kind"])
    if (path / "compare.json").exists():
        return "compare"
    return next((kind for kind in ("capacity", "sweep") if kind in summary), "run")


def run_folders(runs: Path) -> Iterator[Path]:
    """Every folder of one run at any depth (also a sweep's points and a search's trials), by its path."""
    for manifest in sorted(runs.rglob("manifest.json")):
        if (manifest.parent / "requests").is_dir():
            yield manifest.parent


def read_object(path: Path, *, missing_ok: bool = False) -> dict[str, Any]:
    """A JSON object. Raises OSError when it cannot be read, ValueError when it is none."""
    if missing_ok and not path.exists():
        return {}
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"no {path.name}") from None
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"{path.name} is not a JSON object")
    return loaded


def _time_of(path: Path) -> str:
    """From the folder's name (20260102-030405-...), which sorts as a manifest's own; else nothing."""
    stamp = path.name[:15]
    if len(stamp) < 15 or not (stamp[:8] + stamp[9:]).isdigit():
        return ""
    return f"{stamp[:4]}-{stamp[4:6]}-{stamp[6:8]}T{stamp[9:11]}:{stamp[11:13]}:{stamp[13:15]}"


def _print_table(entries: list[Entry]) -> None:
    from gapmeter.analysis.numbers import count, duration
    from gapmeter.report.sheet import print_table

    rows = [
        (
            entry.started[:19].replace("T", " "),
            entry.kind,
            entry.name,
            entry.engine,
            entry.verdict or DASH,
            count(entry.measured),
            duration(entry.ttft_p99_ms),
            entry.folder if not entry.reason else f"{entry.folder} ({entry.reason})",
        )
        for entry in entries
    ]
    print_table(("time", "kind", "name", "engine", "verdict", "n", "p99 TTFT", "folder"), rows, right=(5, 6))


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
