"""Is a run's folder what it says? Hashes of the raw records, and every published figure derived from them once more."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import math
import os
import re
import struct
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gapmeter import errors
from gapmeter.analysis.provenance import made_by
from gapmeter.analysis.results import Manifest, ManifestBase, NotReadable
from gapmeter.analysis.results.study import SweepManifest, read_manifest
from gapmeter.errors import UserError
from gapmeter.machine.hardware import describe_versions
from gapmeter.records import RunFolder
from gapmeter.records.reader import NotRecords
from gapmeter.runs.archive import HASHES, is_archive, unpacked
from gapmeter.study.comparison import DOCUMENT, derive
from gapmeter.study.conclusion import analyse_run

_RAW = ("requests", "probe", "telemetry")
# What the analysis of damaged records or manifests may end in.
_UNDERIVABLE = (LookupError, ValueError, OSError, TypeError, ArithmeticError, AttributeError, struct.error)
_OTHER = "made by other versions"
_FIGURES_FROM = ("gapmeter", "analysis", "numpy", "pandas", "scipy", "pyarrow")

MAKER = "made_by"
MOST_SHOWN = 3
_SAME = 1e-9  # relative: other builds of a numerical library may differ in the last digits


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at, whether it is as it should be, and what was seen."""

    name: str
    ok: bool
    seen: str


def verify(path: str | Path) -> list[Check]:
    """Check a run's folder or an archive of one: a check for each thing that was looked at.

    A folder of several runs (a sweep, a capacity search), or a comparison of some, is checked run by run. Raises
    UserError when there is none.
    """
    with _folder_of(Path(path)) as (folder, first):
        return [*first, *check_all(folder)]


def render(path: Path, checks: list[Check]) -> str:
    """A line a check, and what they come to."""
    wide = max(len(check.name) for check in checks)
    lines = [f" {'v' if check.ok else 'x'} {check.name:<{wide}}  {check.seen}" for check in checks]
    bad = [check.name for check in checks if not check.ok]
    total = f"{len(bad)} of {len(checks)} checks failed: {', '.join(bad)}" if bad else f"all {len(checks)} checks hold"
    return "\n".join([*lines, f"{path}: {total}"])


def check_all(folder: Path) -> list[Check]:
    """Every check of a run's folder; of a folder of several, one for each run within and those of its own figures."""
    if _is_run(folder):
        return check_run(folder)
    if (folder / DOCUMENT).exists():
        return check_comparison(folder)
    inside = sorted(path.parent for path in folder.rglob("manifest.json") if _is_run(path.parent))
    if not inside:
        raise UserError(f"{folder} is not a run's folder, and holds none", errors.USAGE)
    found = [_check_whole(run, str(run.relative_to(folder))) for run in inside]
    return [*found, *check_study(folder)]


def check_comparison(folder: Path) -> list[Check]:
    """The runs that a comparison names, where they still are, and what it says of them made again."""
    from gapmeter.analysis.compare.result import Comparison
    from gapmeter.report import comparison

    try:
        kept = Comparison.read(folder)
    except (OSError, NotReadable) as error:
        return [Check(DOCUMENT, False, f"does not say where its runs are, so it cannot be derived again: {error!r}")]
    sides = [[folder / path for path in side] for side in kept.asked.folders or ()]
    paths = [path for side in sides for path in side]
    gone = [path for path in paths if not (path / "manifest.json").exists()]
    checks = [_check_whole(path, path.name) for path in paths if path not in gone]
    if gone:
        lost = "is not where the comparison found it; the comparison cannot be derived again without it"
        return [*checks, *(Check(path.name, False, lost) for path in gone)]
    with tempfile.TemporaryDirectory(prefix="gapmeter-verify-") as temporary:
        again = Path(temporary)
        try:
            comparison.write(again, *derive(sides, kept.asked, kept.command))
        except (UserError, *_UNDERIVABLE) as error:
            return [*checks, Check(DOCUMENT, False, f"cannot be derived from these runs: {error}")]
        return [*checks, *(compare_file(folder / name, again / name) for name in (DOCUMENT, "report.html"))]


def _check_whole(run: Path, name: str) -> Check:
    """All checks of one run of several as one; where some fail, other versions are told with them."""
    checks = check_run(run)
    bad = [f"{check.name}: {check.seen}" for check in checks if not check.ok]
    bad += [check.seen for check in checks if bad and check.name == "versions" and _OTHER in check.seen]
    return Check(name, not bad, "; ".join(bad) if bad else f"all {len(checks)} checks hold")


def check_study(folder: Path) -> list[Check]:
    """What a sweep or a search says of its runs together, made again; nothing for another kind of folder."""
    try:
        manifest = read_manifest(folder)
    except (OSError, NotReadable):
        return []
    if isinstance(manifest, Manifest):
        return []
    from gapmeter.study.capacity import analyse_search
    from gapmeter.study.sweep import analyse_points

    with _copy(folder, manifest, [path for path in folder.iterdir() if path.is_dir()]) as again:
        try:
            (analyse_points if isinstance(manifest, SweepManifest) else analyse_search)(again)
        except _UNDERIVABLE as error:
            return [Check("figures", False, f"cannot be derived from these runs: {error!r}")]
        return [compare_file(folder / name, again.path / name) for name in ("summary.json", "report.html")]


def check_run(path: Path) -> list[Check]:
    """The checks of one run, each by itself: a first that fails hides no other."""
    folder = RunFolder(path)
    try:
        manifest = Manifest.read(path)
    except OSError as error:
        return [Check("manifest.json", False, f"cannot be read: {error}")]
    except NotReadable as error:
        name = "format" if error.key == "schema_version" else "manifest.json"
        return [Check(name, False, f"cannot be read: {error.key} {error.problem}; {error.remedy}")]
    checks = [Check("format", True, f"version {manifest.schema_version}")]
    why = f": {manifest.ended_because}" if manifest.ended_because else ""
    checks += [Check("run", True, f"{manifest.status}{why}"), _check_versions(folder, manifest)]
    return [*checks, *check_hashes(folder, manifest), *check_figures(folder, manifest)]


def check_hashes(folder: RunFolder, manifest: Manifest) -> list[Check]:
    """The raw records against their SHA-256 in the manifest: one check where all hold, else one a file."""
    recorded = manifest.files
    if not recorded:
        return [Check("records", False, "the manifest has no hashes: the run was killed before they could be taken")]
    found = folder.hashes()
    bad = [Check(name, False, "is missing") for name in recorded.keys() - found.keys()]
    bad += [Check(name, False, "was not there when the run ended") for name in found.keys() - recorded.keys()]
    changed = [name for name in recorded.keys() & found.keys() if recorded[name] != found[name]]
    bad += [Check(name, False, "was changed: its SHA-256 is not the manifest's") for name in changed]
    if bad:
        return sorted(bad, key=lambda check: check.name)
    return [Check("records", True, f"{len(recorded)} raw files have the SHA-256 that the manifest says")]


def check_figures(folder: RunFolder, manifest: Manifest) -> list[Check]:
    """Everything that analysis writes, derived again from the raw records in a temporary folder, and compared."""
    parts = [part for part in (folder.requests, folder.probe, folder.telemetry, folder.logs) if part.exists()]
    with _copy(folder.path, manifest, parts) as again:
        again.hdr.mkdir()
        try:
            analyse_run(again, definitions=bool(_summary(folder).get("definitions")))
        except (NotRecords, *_UNDERIVABLE) as error:
            return [Check("figures", False, f"cannot be derived from these records: {error!r}")]
        return list(compare_derived(folder.path, again.path))


def _check_versions(folder: RunFolder, manifest: Manifest) -> Check:
    """Other versions are told, and fail nothing by themselves: figures that differ for them do."""
    then, now = dict(manifest.versions), describe_versions()
    then, now = then | dict(_summary(folder).get(MAKER) or {}), now | made_by().to_json()
    changed = [
        f"{name} {then[name]} then, {now[name]} now"
        for name in _FIGURES_FROM
        if name in then and name in now and then[name] != now[name]
    ]
    if changed:
        said = f"figures {_OTHER} may differ for that alone: {'; '.join(changed)}"
        return Check("versions", True, f"{said}; gapmeter report makes them anew")
    return Check("versions", True, f"gapmeter {now['gapmeter']}, analysis {now['analysis']}, as they are here")


def _summary(folder: RunFolder) -> dict[str, Any]:
    try:
        loaded = json.loads(folder.summary.read_text())
    except (OSError, ValueError):
        return {}
    return loaded if isinstance(loaded, dict) else {}


@contextlib.contextmanager
def _copy(folder: Path, manifest: ManifestBase, parts: Iterable[Path]) -> Iterator[RunFolder]:
    """A temporary folder of the same name with the manifest, and the parts given as they are: nothing derived."""
    with tempfile.TemporaryDirectory(prefix="gapmeter-verify-") as temporary:
        again = RunFolder(Path(temporary) / folder.resolve().name)
        again.path.mkdir()
        manifest.write(again.path)
        for part in parts:
            os.symlink(part.resolve(), again.path / part.name)
        yield again


@contextlib.contextmanager
def _folder_of(path: Path) -> Iterator[tuple[Path, list[Check]]]:
    """The folder to look at: the path itself, or what an archive holds, unpacked for as long as the block lasts."""
    if path.is_dir():
        yield path, []
        return
    if not path.exists():
        raise UserError(f"{path} does not exist; write a run's folder or an archive of one", errors.USAGE)
    if not is_archive(path):
        raise UserError(f"{path} is no folder and no archive (.tar.gz or .zip)", errors.USAGE)
    with unpacked(path) as folder:
        yield folder, [check_archive(folder)]


def check_archive(folder: Path) -> Check:
    """Every file of an unpacked archive against the list of hashes that travelled in it."""
    try:
        noted = json.loads((folder / HASHES).read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return Check("archive", False, f"it has no {HASHES}: it was not made by gapmeter archive")
    found = {str(p.relative_to(folder)): p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != HASHES}
    bad = [f"{name} is missing" for name in sorted(noted.keys() - found.keys())]
    bad += [f"{name} was added" for name in sorted(found.keys() - noted.keys())]
    both = [name for name in found if name in noted]
    bad += [f"{n} was changed" for n in both if hashlib.sha256(found[n].read_bytes()).hexdigest() != noted[n]]
    if bad:
        return Check("archive", False, "; ".join(bad[:MOST_SHOWN]))
    return Check("archive", True, f"{len(noted)} files have the SHA-256 that the archive says")


def _is_run(folder: Path) -> bool:
    """Whether a folder is that of one run, readable or not, and not of several."""
    if not (folder / "manifest.json").exists():
        return False
    return any((folder / part).is_dir() for part in _RAW) and (folder / "requests").is_dir()


def compare_derived(published: Path, derived: Path) -> Iterator[Check]:
    """A check for each file of a run's folder that analysis writes."""
    for path in sorted(derived.glob("*")):
        if path.is_symlink() or path.name == "manifest.json" or path.is_dir():
            continue
        yield compare_file(published / path.name, path)
    for path in sorted(published.glob("*.parquet")):
        if not (derived / path.name).exists():
            yield Check(path.name, False, "is not of these records")
    yield _compare_histograms(published / "hdr", derived / "hdr")


def compare_file(published: Path, derived: Path) -> Check:
    """The check of one of them."""
    name = published.name
    if not published.exists():
        return Check(name, False, "is missing")
    if published.read_bytes() == derived.read_bytes():
        return Check(name, True, "derived again, byte for byte the same")
    try:
        differs = _differences(published, derived)
    except (ValueError, OSError) as error:
        return Check(name, False, f"cannot be read: {error}")
    if not differs:
        return Check(name, True, "derived again, the same values")
    more = f", and {len(differs) - MOST_SHOWN} more" if len(differs) > MOST_SHOWN else ""
    return Check(name, False, f"differs from what the records say: {'; '.join(differs[:MOST_SHOWN])}{more}")


def _differences(published: Path, derived: Path) -> list[str]:
    """What differs between two files of one kind; empty where they hold the same values."""
    if published.suffix == ".json":
        values = [json.loads(path.read_text()) for path in (published, derived)]
        for value in values:
            if isinstance(value, dict):
                value.pop(MAKER, None)  # the check of versions speaks of it
        return list(differing(*values))
    if published.suffix == ".parquet":
        return _different_columns(published, derived)
    if published.suffix == ".gz" and _unzipped(published) == _unzipped(derived):
        return []
    if published.suffix == ".html" and _unnamed(published) == _unnamed(derived):
        return []
    return ["its content"]


def _unnamed(path: Path) -> str:
    """A page without its folder's name, which stands in a command to copy: the folder may have been renamed."""
    return re.sub(r"gapmeter explain \S+", "gapmeter explain RUN", path.read_text(encoding="utf-8"))


def _unzipped(path: Path) -> bytes:
    """Raises ValueError for a damaged file."""
    try:
        return gzip.decompress(path.read_bytes())
    except (EOFError, zlib.error) as error:
        raise ValueError(str(error)) from error


def differing(published: Any, derived: Any, where: str = "") -> Iterator[str]:
    """Each place where two JSON values differ by more than a relative 1e-9: ``load.rate is 9, derived 8``."""
    if isinstance(published, dict) and isinstance(derived, dict):
        for key in {**published, **derived}:
            inside = f"{where}.{key}" if where else str(key)
            if key not in published or key not in derived:
                yield f"{inside} is {'missing' if key not in published else 'not of these records'}"
            else:
                yield from differing(published[key], derived[key], inside)
    elif isinstance(published, list) and isinstance(derived, list) and len(published) == len(derived):
        for i, (one, other) in enumerate(zip(published, derived, strict=True)):
            yield from differing(one, other, f"{where}[{i}]")
    elif not _equal(published, derived):
        yield f"{where} is {_short(published)}, derived {_short(derived)}"


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float | int):
        return math.isclose(one, other, rel_tol=_SAME)
    return type(one) is type(other) and bool(one == other)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _different_columns(published: Path, derived: Path) -> list[str]:
    import pyarrow.parquet as pq
    from pyarrow import ArrowException

    try:
        one, other = pq.read_table(published), pq.read_table(derived)
    except ArrowException as error:
        raise ValueError(str(error)) from error
    if one.num_rows != other.num_rows:
        return [f"{one.num_rows} rows, derived {other.num_rows}"]
    there, expected = set(one.column_names), set(other.column_names)
    lost = [f"column {name} is missing" for name in sorted(expected - there)]
    lost += [f"column {name} is not of these records" for name in sorted(there - expected)]
    both = [name for name in one.column_names if name in expected]
    # As text, since a NaN is not equal to itself.
    return lost + [f"column {name}" for name in both if repr(one[name].to_pylist()) != repr(other[name].to_pylist())]


def _compare_histograms(published: Path, derived: Path) -> Check:
    """Every .hlog, byte for byte: the encoding has one form."""
    names = {path.name for path in derived.glob("*.hlog")}
    there = {path.name for path in published.glob("*.hlog")}
    bad = [f"{name} is missing" for name in sorted(names - there)]
    bad += [f"{name} is not of these records" for name in sorted(there - names)]
    both = sorted(names & there)
    bad += [f"{name} differs" for name in both if (published / name).read_bytes() != (derived / name).read_bytes()]
    if bad:
        more = f", and {len(bad) - MOST_SHOWN} more" if len(bad) > MOST_SHOWN else ""
        return Check("hdr", False, f"{'; '.join(bad[:MOST_SHOWN])}{more}")
    return Check("hdr", True, f"{len(names)} histograms derived again, byte for byte the same")
