"""Is a run's folder what it says? Hashes of the raw records, and every published figure derived from them once more."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gapmeter import errors
from gapmeter.analysis.made_by import made_by
from gapmeter.compare import DOCUMENT, derive, write_comparison
from gapmeter.errors import UserError
from gapmeter.records import RunFolder
from gapmeter.runs.archive import HASHES, is_archive, opened
from gapmeter.runs.sameness import MAKER, MOST_SHOWN, Check, compare_derived, compare_file
from gapmeter.study.manifest import MANIFEST_VERSION, describe_versions
from gapmeter.study.parent import SEARCH, SWEEP

_RAW = ("requests", "probe", "telemetry")
# What the analysis of damaged records or manifests may end in.
_UNDERIVABLE = (LookupError, ValueError, OSError, TypeError, ArithmeticError, AttributeError, struct.error)
_OTHER = "made by other versions"
_FIGURES_FROM = ("gapmeter", "analysis", "numpy", "pandas", "scipy", "pyarrow")


def verify(path: Path, *, as_json: bool = False) -> int:
    """Check a run's folder or an archive of one, and print a line a check. Returns 0, or 98 when something differs.

    A folder of several runs (a sweep, a capacity search), or a comparison of some, is checked run by run. Raises
    UserError when there is none.
    """
    with _folder_of(path) as (folder, first):
        checks = [*first, *check_all(folder)]
    if as_json:
        print(json.dumps([asdict(check) for check in checks], indent=1))
    else:
        print(render(path, checks))
    return errors.OK if all(check.ok for check in checks) else errors.NOT_VALID


def render(path: Path, checks: list[Check]) -> str:
    """A line a check, and what they come to."""
    wide = max(len(check.name) for check in checks)
    lines = [f" {'v' if check.ok else 'x'} {check.name:<{wide}}  {check.seen}" for check in checks]
    bad = [check.name for check in checks if not check.ok]
    told = f"{len(bad)} of {len(checks)} checks failed: {', '.join(bad)}" if bad else f"all {len(checks)} checks hold"
    return "\n".join([*lines, f"{path}: {told}"])


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
    return [*found, *check_table(folder)]


def check_comparison(folder: Path) -> list[Check]:
    """The runs that a comparison names, where they still are, and what it says of them made again."""
    try:
        document = json.loads((folder / DOCUMENT).read_text())
        asked, command = document["asked"], document["command"]
        sides = [[folder / path for path in side] for side in asked["folders"]]
    except (OSError, ValueError, LookupError, TypeError) as error:
        return [Check(DOCUMENT, False, f"does not say where its runs are, so it cannot be derived again: {error!r}")]
    paths = [path for side in sides for path in side]
    gone = [path for path in paths if not (path / "manifest.json").exists()]
    checks = [_check_whole(path, path.name) for path in paths if path not in gone]
    if gone:
        lost = "is not where the comparison found it; the comparison cannot be derived again without it"
        return [*checks, *(Check(path.name, False, lost) for path in gone)]
    with tempfile.TemporaryDirectory(prefix="gapmeter-verify-") as temporary:
        again = Path(temporary)
        try:
            derived, firsts = derive(sides, asked, command)
            write_comparison(again, derived, firsts)
        except (UserError, *_UNDERIVABLE) as error:
            return [*checks, Check(DOCUMENT, False, f"cannot be derived from these runs: {error}")]
        return [*checks, *(compare_file(folder / name, again / name) for name in (DOCUMENT, "report.html"))]


def _check_whole(run: Path, name: str) -> Check:
    """All checks of one run of several as one; where some fail, other versions are told with them."""
    checks = check_run(run)
    bad = [f"{check.name}: {check.seen}" for check in checks if not check.ok]
    bad += [check.seen for check in checks if bad and check.name == "versions" and _OTHER in check.seen]
    return Check(name, not bad, "; ".join(bad) if bad else f"all {len(checks)} checks hold")


def check_table(folder: Path) -> list[Check]:
    """What a sweep or a search says of its runs together, made again; nothing for another kind of folder."""
    try:
        manifest = RunFolder(folder).read_manifest()
    except (OSError, ValueError):
        return []
    if manifest.get("kind") not in (SWEEP, SEARCH):
        return []
    from gapmeter.analysis.capacity import analyse_capacity
    from gapmeter.analysis.sweep import analyse_points

    with _copy(folder, manifest, [path for path in folder.iterdir() if path.is_dir()]) as again:
        try:
            (analyse_points if manifest["kind"] == SWEEP else analyse_capacity)(again)
        except _UNDERIVABLE as error:
            return [Check("figures", False, f"cannot be derived from these runs: {error!r}")]
        return [compare_file(folder / name, again.path / name) for name in ("summary.json", "report.html")]


def check_run(path: Path) -> list[Check]:
    """The checks of one run, each by itself: a first that fails hides no other."""
    folder = RunFolder(path)
    try:
        manifest = folder.read_manifest()
    except (OSError, ValueError) as error:
        return [Check("manifest.json", False, f"cannot be read: {error}")]
    version = manifest.get("schema_version")
    if version != MANIFEST_VERSION:
        said = f"written in version {version} of the format; this gapmeter reads version {MANIFEST_VERSION}"
        return [Check("format", False, said)]
    checks = [Check("format", True, f"version {version}"), _check_complete(manifest), _check_versions(folder, manifest)]
    return [*checks, *check_hashes(folder, manifest), *check_figures(folder, manifest)]


def check_hashes(folder: RunFolder, manifest: Mapping[str, Any]) -> list[Check]:
    """The raw records against their SHA-256 in the manifest: one check where all hold, else one a file."""
    noted: dict[str, str] = manifest.get("files") or {}
    if not noted:
        return [Check("records", False, "the manifest has no hashes: the run was killed before they could be taken")]
    found = folder.hashes()
    bad = [Check(name, False, "is missing") for name in noted.keys() - found.keys()]
    bad += [Check(name, False, "was not there when the run ended") for name in found.keys() - noted.keys()]
    changed = [name for name in noted.keys() & found.keys() if noted[name] != found[name]]
    bad += [Check(name, False, "was changed: its SHA-256 is not the manifest's") for name in changed]
    if bad:
        return sorted(bad, key=lambda check: check.name)
    return [Check("records", True, f"{len(noted)} raw files have the SHA-256 that the manifest says")]


def check_figures(folder: RunFolder, manifest: Mapping[str, Any]) -> list[Check]:
    """Everything that analysis writes, derived again from the raw records in a temporary folder, and compared."""
    from gapmeter.analysis.analyse import analyse  # its import takes a second or two: mistakes are told before
    from gapmeter.records.reader import NotRecords
    from gapmeter.report import write_result

    parts = [part for part in (folder.requests, folder.probe, folder.telemetry, folder.logs) if part.exists()]
    with _copy(folder.path, manifest, parts) as again:
        again.hdr.mkdir()
        try:
            write_result(again, analyse(again, definitions=bool(_summary(folder).get("definitions"))))
        except (NotRecords, *_UNDERIVABLE) as error:
            return [Check("figures", False, f"cannot be derived from these records: {error!r}")]
        return list(compare_derived(folder.path, again.path))


def _check_complete(manifest: Mapping[str, Any]) -> Check:
    status = str(manifest.get("status"))
    because = manifest.get("ended_because")
    return Check("run", True, status if not because else f"{status}: {because}")


def _check_versions(folder: RunFolder, manifest: Mapping[str, Any]) -> Check:
    """Other versions are told, and fail nothing by themselves: figures that differ for them do."""
    then, now = dict(manifest.get("versions") or {}), describe_versions()
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
def _copy(folder: Path, manifest: Mapping[str, Any], parts: Iterable[Path]) -> Iterator[RunFolder]:
    """A temporary folder of the same name with the manifest, and the parts given as they are: nothing derived."""
    with tempfile.TemporaryDirectory(prefix="gapmeter-verify-") as temporary:
        again = RunFolder(Path(temporary) / folder.resolve().name)
        again.path.mkdir()
        again.write_json(again.manifest, manifest)
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
    with opened(path) as folder:
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
