"""What lies in a folder of runs: each with its kind, its answer and its state, and the damaged ones as such."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from gapmeter import errors
from gapmeter.analysis.numbers import DASH, counted, duration, rate, significant
from gapmeter.analysis.results import NotReadable
from gapmeter.analysis.results.brief import ComparisonBrief, ManifestBrief, RunBrief, StudyBrief
from gapmeter.errors import UserError, reason_of
from gapmeter.runs.lock import is_locked
from gapmeter.scenarios.plain_file import is_plain

_FRESH_S = 120.0  # where no lock tells: a run that goes on mostly writes records, telemetry or a log more often
_MANIFEST, _SUMMARY, _COMPARISON = ManifestBrief.FILE, RunBrief.FILE, ComparisonBrief.FILE


@dataclass(frozen=True, slots=True)
class ListedRun:
    """One folder, as a list shows it. ``kind``: run, sweep, capacity, compare, or damaged (``reason`` says why).

    ``state``: done, running, unfinished (killed, or not analysed) or damaged. ``found``: of a search, the rate. None:
    not known.
    """

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
    state: str = "done"
    p99_at_most_ms: Mapping[str, float] = field(default_factory=dict)  # by metric, where only a bound is known
    p99_refused: tuple[str, ...] = ()  # metrics of which too much may be the load tester's lateness
    found: str = ""

    def p99(self, metric: str) -> str:
        """``26.8 ms``, ``≤ 31.0 ms`` where the sample gives no more, ``refused``, or a dash."""
        value = {"ttft": self.ttft_p99_ms, "itl": self.itl_p99_ms, "e2e": self.e2e_p99_ms}[metric]
        if value is None and (bound := self.p99_at_most_ms.get(metric)) is not None:
            return f"≤ {duration(bound)}"
        return "refused" if value is None and metric in self.p99_refused else duration(value)

    @property
    def path(self) -> Path:
        return Path(self.folder)

    @property
    def answer(self) -> str:
        """The verdict, or why there is none."""
        return self.verdict or self.state

    @property
    def outcome(self) -> str:
        """The answer; of a search the rate that it found."""
        return self.found if self.found and self.answer == "done" else self.answer

    @property
    def has_records(self) -> bool:
        """Whether requests of it, or of its runs, were recorded."""
        return any(is_plain(file) and file.stat().st_size for file in self.path.rglob("requests/*"))


def list_runs(runs: str | Path = "runs") -> list[ListedRun]:
    """As ``list_known``. Raises UserError when there is no such folder."""
    runs = Path(runs)
    if not runs.is_dir():
        raise UserError(f"there is no folder {runs}; name one with --runs", errors.USAGE)
    return list_known(runs)


def newest_run(runs: Path) -> Path:
    """The run, sweep or search in ``runs`` that was begun last. Raises UserError for none."""
    paths = [path for path in runs.iterdir() if not path.is_symlink()] if runs.is_dir() else []
    found = [path for path in paths if is_plain(path / _MANIFEST)]
    if not found:
        raise UserError(f"there is no run in {runs} yet; name a folder", errors.USAGE)
    return max(found, key=lambda path: (_begun(path), path.name))


def list_known(runs: Path) -> list[ListedRun]:
    """Those folders in ``runs`` that are of our making, the oldest first; none where there is no such folder."""
    paths = [path for path in runs.iterdir() if path.is_dir()] if runs.is_dir() else []
    return _sorted(listed for path in paths if (listed := find_listed(path)) is not None)


def find_listed(path: Path) -> ListedRun | None:
    """One folder; None when it is not of our making, or only a link to one."""
    with contextlib.suppress(PermissionError):  # it is listed as damaged, with the reason
        if path.is_symlink() or not path.is_dir() or not {_MANIFEST, _COMPARISON} & set(os.listdir(path)):
            return None
    return read_listed(path)


def read_listed(path: Path) -> ListedRun:
    """What a folder says of itself; read again only when one of its files was written since."""
    listed = _read(path, tuple(_written_ns(path / name) for name in (_MANIFEST, _SUMMARY, _COMPARISON)))
    if listed.kind == "damaged":
        return replace(listed, state="damaged")
    if (path / _SUMMARY).exists() or listed.kind == "compare":
        return listed
    if goes_on(path):
        return replace(listed, state="running")
    return replace(listed, state="unfinished", reason=listed.reason or "not analysed")


def goes_on(path: Path) -> bool:
    """Whether a gapmeter is at work in a folder that has no results yet."""
    with contextlib.suppress(OSError):
        if (is_at_work := is_locked(path)) is not None:
            return is_at_work
    files = [Path(base, name) for base, _, names in os.walk(path) for name in names]  # of a study also its runs'
    return time.time() - max(map(_written_ns, files), default=0) / 1e9 < _FRESH_S


def run_folders(runs: Path) -> Iterator[Path]:
    """Every folder of one run at any depth (also a sweep's points and a search's trials), by its path."""
    yield from (path.parent for path in sorted(runs.rglob(_MANIFEST)) if is_run(path.parent))


def is_run(folder: Path) -> bool:
    """Whether a folder is that of one run, readable or not, and not of several."""
    return (folder / _MANIFEST).exists() and (folder / "requests").is_dir()


def _begun(path: Path) -> str:
    """When, by the folder's name; one that was renamed was begun when its manifest was written, as far as is known."""
    return _time_of(path) or time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(_written_ns(path / _MANIFEST) / 1e9))


def _sorted(listed: Iterator[ListedRun]) -> list[ListedRun]:
    return sorted(listed, key=lambda each: (each.started, each.folder))


def _written_ns(file: Path) -> int:
    """When a file was last written; 0 when there is none."""
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0


@functools.lru_cache(maxsize=20_000)
def _read(path: Path, written_ns: tuple[int, ...]) -> ListedRun:
    try:
        if (path / _COMPARISON).exists():
            compared = ComparisonBrief.read(path)
            name = next((side.scenario or "" for side in compared.sides), "")
            return ListedRun("compare", str(path), _time_of(path), name=name, verdict=compared.verdict)
        manifest = ManifestBrief.read(path)
        asked = manifest.target.model if manifest.target else ""
        model = asked if manifest.engine == "attach" else manifest.model  # which an attached server need not have
        listed = ListedRun(
            manifest.kind, str(path), manifest.started_wall, name=manifest.name, engine=manifest.engine,
            model=model, load=_load(manifest),
        )  # fmt: skip
        if not (path / _SUMMARY).exists():
            return replace(listed, reason=manifest.ended_because or "")
        if manifest.kind != "run":
            study = StudyBrief.read(path)
            validity = study.provenance.validity
            if manifest.engine == "attach" and study.provenance.model:
                listed = replace(listed, model=study.provenance.model)
            if (found := study.capacity) is not None and found.rate is not None:
                ends = (DASH if end is None else significant(end) for end in (found.low, found.high))
                listed = replace(listed, found=f"{rate(found.rate)} ({' .. '.join(ends)})")
            reason = manifest.ended_because or ("" if validity in ("valid", "INVALID") else validity)
            return replace(listed, verdict=validity if validity == "INVALID" else None, reason=reason)
        result = RunBrief.read(path)
        p99_ms = {name: metric.p99_ms for name, metric in result.metrics.items()}
        return replace(
            listed, verdict=result.verdict, measured=result.measured,
            p99_at_most_ms={name: m.at_most["p99"].ms for name, m in result.metrics.items() if "p99" in m.at_most},
            p99_refused=tuple(name for name, m in result.metrics.items() if "p99" in m.late_ms),
            ttft_p99_ms=p99_ms.get("ttft"), itl_p99_ms=p99_ms.get("itl"), e2e_p99_ms=p99_ms.get("e2e"),
        )  # fmt: skip
    except NotReadable as error:
        reason = f"{error.path.name}: {error.key} {error.problem}".replace(":  ", ": ")
    except OSError as error:
        reason = f"{Path(error.filename or path).name}: {reason_of(error)}"
    except MemoryError:
        reason = "more than this machine's memory holds"
    return ListedRun("damaged", str(path), _time_of(path), reason=reason)


def _load(manifest: ManifestBrief) -> str:
    """The rate or the users; of a sweep what it sweeps, of a search that it looks for one."""
    load, points = manifest.load, manifest.sweep
    if manifest.kind == "sweep" and points:
        first, last = points[0], points[-1]
        return ", ".join(f"{key.rpartition('.')[2]} {first[key]} .. {last.get(key)}" for key in first)
    if manifest.kind == "capacity":
        return "searched"
    if load.rate:
        return f"{load.rate:g} {'conversations' if manifest.workload.kind == 'conversation' else 'req'}/s"
    users = load.concurrency
    return counted(users, "user") if users else load.arrivals or ""


def _time_of(path: Path) -> str:
    """From the folder's name (20260102-030405-...), which sorts as a manifest's own; else nothing."""
    stamp = path.name[:15]
    if len(stamp) < 15 or not (stamp[:8] + stamp[9:]).isdigit():
        return ""
    return f"{stamp[:4]}-{stamp[4:6]}-{stamp[6:8]}T{stamp[9:11]}:{stamp[11:13]}:{stamp[13:15]}"
