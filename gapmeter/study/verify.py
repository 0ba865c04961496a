"""Is a run's folder what it says? Hashes of the raw records, and every published figure derived from them once more."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gapmeter import errors
from gapmeter.analysis.provenance import made_by
from gapmeter.analysis.results import Manifest, ManifestBase, NotReadable
from gapmeter.analysis.results.comparison import Comparison
from gapmeter.analysis.results.manifest import SweepManifest, read_manifest
from gapmeter.errors import UserError, unless_refused
from gapmeter.machine.hardware import describe_versions
from gapmeter.records import RunFolder
from gapmeter.records.reader import NotRecords
from gapmeter.runs.archive import HASHES, unpacked
from gapmeter.runs.comparison import compare_again, read_comparison
from gapmeter.runs.listing import is_run, run_folders
from gapmeter.runs.run import UNDERIVABLE
from gapmeter.scenarios.plain_file import check_folder, read_json, read_plain, sha256_of
from gapmeter.study.conclusion import analyse_run, why_empty

if TYPE_CHECKING:
    import pyarrow as pa

_FIGURES_FROM = ("gapmeter", "analysis", "numpy", "pandas", "scipy", "pyarrow")
_FAILURES = (UserError, NotRecords, OSError, *UNDERIVABLE)  # what deriving from damaged records may end in
_MAKER = "made_by"
_MOST_SHOWN = 3
_SAME = 1e-9  # relative: other builds of a numerical library may differ in the last digits


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at, whether it is as it should be, and what was seen.

    ``may_be_why``: it is not wrong by itself, but may be why other things are.
    """

    name: str
    ok: bool
    seen: str
    may_be_why: bool = False


def verify(path: str | Path) -> list[Check]:
    """Derive a run's figures again from its folder, or an archive of it; one Check for each thing that was compared.

    A folder of several runs (a sweep, a capacity search), or a comparison of some, is checked run by run. Raises
    UserError when there is none.
    """
    path = Path(path)
    if path.is_dir():
        with unless_refused(f"{path} cannot be checked"):
            check_folder(path)
        return check_all(path)
    with unpacked(path) as folder:
        return [_check_archive(folder), *check_all(folder)]


def render(path: Path, checks: list[Check]) -> str:
    """A line a check, and what they come to."""
    wide = max(len(check.name) for check in checks)
    lines = [f" {'v' if check.ok else 'x'} {check.name:<{wide}}  {check.seen}" for check in checks]
    bad = [check.name for check in checks if not check.ok]
    total = f"{len(bad)} of {len(checks)} checks failed: {', '.join(bad)}" if bad else f"all {len(checks)} checks hold"
    return "\n".join([*lines, f"{path}: {total}"])


def check_all(folder: Path) -> list[Check]:
    """Every check of a run's folder; of a folder of several, one for each run within and those of its own figures."""
    if is_run(folder):
        return check_run(folder)
    if (folder / Comparison.FILE).exists():
        return _check_comparison(folder)
    inside = [_check_whole(run, str(run.relative_to(folder))) for run in run_folders(folder)]
    if not (checks := inside + _check_study(folder)):  # a study without a run has figures too: of points that failed
        raise UserError(f"{folder} is not a run's folder, and holds none", errors.USAGE)
    return checks


def _check_comparison(folder: Path) -> list[Check]:
    """The runs that a comparison names, where they still are, and what it says of them made again."""
    try:
        kept = read_comparison(folder)
    except (OSError, NotReadable) as error:
        text = f"does not say where its runs are, so it cannot be derived again: {error!r}"
        return [Check(Comparison.FILE, False, text)]
    paths = [path for side in kept.asked.sides(folder) for path in side]
    lost = [path for path in paths if not (path.is_file() or (path / Manifest.FILE).exists())]
    gone = "is not where the comparison found it; the comparison cannot be derived again without it"
    checks = [Check(path.name, False, gone) if path in lost else _check_whole(path, path.name) for path in paths]
    if lost:
        return checks
    with tempfile.TemporaryDirectory(prefix="gapmeter-verify-") as temporary:
        again = Path(temporary)
        try:
            compare_again(folder, again)
        except _FAILURES as error:
            return [*checks, not_derived(Comparison.FILE, "runs", error, again)]
        made = (again / Comparison.FILE, RunFolder(again).report)
        return [*checks, *(compare_file(folder / path.name, path) for path in made)]


def not_derived(name: str, what: str, error: Exception, within: Path) -> Check:
    """What deriving ended in, in a folder of ours that nobody knows: ``within``.

    Raises UserError for a full disk of ours, for which no folder is to blame.
    """
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        text = f"{tempfile.gettempdir()} is full, where figures are derived again; free some space, or set TMPDIR"
        raise UserError(text, errors.NOT_VALID) from error
    reason = str(error) if isinstance(error, UserError | NotRecords) else repr(error)
    return Check(name, False, f"cannot be derived from these {what}: {reason.replace(f'{within}/', '')}")


def _check_whole(run: Path, name: str) -> Check:
    """All checks of one of several (a run, a study, an archive) as one; where some fail, with what may be why."""
    checks = verify(run)
    bad = [f"{check.name}: {check.seen}" for check in checks if not check.ok]
    bad += [check.seen for check in checks if bad and check.may_be_why]
    return Check(name, not bad, "; ".join(bad) if bad else f"all {len(checks)} checks hold")


def _check_study(folder: Path) -> list[Check]:
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
        except _FAILURES as error:
            return [not_derived("figures", "runs", error, again.path)]
        return [compare_file(folder / path.name, path) for path in (again.summary, again.report)]


def check_run(path: Path) -> list[Check]:
    """The checks of one run, each by itself: a first that fails hides no other."""
    folder = RunFolder(path)
    try:
        manifest = Manifest.read(path)
    except OSError as error:
        return [Check(Manifest.FILE, False, f"cannot be read: {error}")]
    except NotReadable as error:
        name = "format" if error.key == "schema_version" else Manifest.FILE
        return [Check(name, False, f"cannot be read: {error.key} {error.problem}; {error.remedy}")]
    why = f": {manifest.ended_because}" if manifest.ended_because else ""
    checks = [Check("format", True, f"version {manifest.schema_version}"), Check("run", True, manifest.status + why)]
    summary: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError, TypeError):  # what is wrong with it shows where it is compared
        summary = dict(read_json(folder.summary))
    checks += [_check_versions(manifest, summary), *_check_hashes(folder, manifest)]
    if empty := why_empty(manifest):
        return [*checks, Check("figures", False, empty)]
    parts = [part for part in (folder.requests, folder.probe, folder.telemetry, folder.logs) if part.exists()]
    with _copy(path, manifest, parts) as again:
        again.hdr.mkdir()
        try:
            analyse_run(again, definitions=bool(summary.get("definitions")))
        except _FAILURES as error:
            return [*checks, not_derived("figures", "records", error, again.path)]
        return [*checks, *_compare_derived(path, again.path)]


def _check_hashes(folder: RunFolder, manifest: Manifest) -> list[Check]:
    """The raw records against their SHA-256 in the manifest: one check where all hold, else one a file."""
    recorded = manifest.files
    if not recorded:
        return [Check("records", False, "the manifest has no hashes: the run was killed before they could be taken")]
    changed = "was changed: its SHA-256 is not the manifest's"
    bad = _unlike(recorded, folder.hashes(), "was not there when the run ended", changed)
    if bad:
        return [Check(name, False, what) for name, what in bad]
    return [Check("records", True, f"{len(recorded)} raw files have the SHA-256 that the manifest says")]


def _check_archive(folder: Path) -> Check:
    """Every file of an unpacked archive against the list of hashes that travelled in it."""
    try:
        noted = dict(read_json(folder / HASHES)["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return Check("archive", False, f"it has no {HASHES}: it was not made by gapmeter archive")
    files = [path for path in folder.rglob("*") if path.is_file() and path != folder / HASHES]
    found = {str(path.relative_to(folder)): sha256_of(path) for path in files}
    bad = _unlike(noted, found, "was added", "was changed")
    return _summed_up("archive", bad, f"{len(noted)} files have the SHA-256 that the archive says")


def _unlike(
    expected: Mapping[str, object], found: Mapping[str, object], added: str, changed: str
) -> list[tuple[str, str]]:
    """The names at which two sets of things differ, each with how."""
    return [
        (name, "is missing" if name not in found else changed if name in expected else added)
        for name in sorted({*expected, *found})
        if name not in found or name not in expected or expected[name] != found[name]
    ]


def _summed_up(name: str, bad: list[tuple[str, str]], holds: str) -> Check:
    return Check(name, not bad, _first_of([f"{part} {what}" for part, what in bad]) if bad else holds)


def _first_of(differs: list[str]) -> str:
    more = f", and {len(differs) - _MOST_SHOWN} more" if len(differs) > _MOST_SHOWN else ""
    return f"{'; '.join(differs[:_MOST_SHOWN])}{more}"


def _check_versions(manifest: Manifest, summary: Mapping[str, Any]) -> Check:
    """Other versions are named, and fail nothing by themselves; figures that differ because of them do."""
    then = {**manifest.versions, **(summary.get(_MAKER) or {})}
    now = describe_versions() | made_by().to_json()
    changed = [
        f"{name} {then[name]} then, {now[name]} now"
        for name in _FIGURES_FROM
        if name in then and name in now and then[name] != now[name]
    ]
    if changed:
        text = f"figures made by other versions may differ for that alone: {'; '.join(changed)}"
        return Check("versions", True, f"{text}; gapmeter report recomputes them", may_be_why=True)
    return Check("versions", True, f"gapmeter {now['gapmeter']}, analysis {now['analysis']}, as they are here")


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


def _compare_derived(published: Path, derived: Path) -> Iterator[Check]:
    """A check for each file of a run's folder that analysis writes."""
    for path in sorted(derived.glob("*")):
        if path.is_file() and not path.is_symlink() and path.name != Manifest.FILE:
            yield compare_file(published / path.name, path)
    for path in sorted(published.glob("*.parquet")):
        if not (derived / path.name).exists():
            yield Check(path.name, False, "is not of these records")
    # Histograms byte for byte: the encoding has one form.
    ours, theirs = ({f.name: read_plain(f) for f in (side / "hdr").glob("*.hlog")} for side in (derived, published))
    bad = _unlike(ours, theirs, "is not of these records", "differs")
    yield _summed_up("hdr", bad, f"{len(ours)} histograms derived again, byte for byte the same")


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
    return Check(name, False, f"differs from what the records say: {_first_of(differs)}")


def _differences(published: Path, derived: Path) -> list[str]:
    """What differs between two files of one kind; empty where they hold the same values. Raises ValueError."""
    if published.suffix == ".json":
        values = [read_json(path) for path in (published, derived)]
        for value in values:
            if isinstance(value, dict):
                value.pop(_MAKER, None)  # the check of versions speaks of it
        return list(differing(*values))
    if published.suffix == ".parquet":
        return _different_columns(published, derived)
    return ["its content"]


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
    elif isinstance(published, float) and isinstance(derived, float | int):
        if not math.isclose(published, derived, rel_tol=_SAME):
            yield f"{where} is {published}, derived {derived}"
    elif type(published) is not type(derived) or published != derived:
        shown = [text if len(text) <= 40 else f"{text[:37]}..." for text in map(json.dumps, (published, derived))]
        yield f"{where} is {shown[0]}, derived {shown[1]}"


def _different_columns(published: Path, derived: Path) -> list[str]:
    import pyarrow.parquet as pq
    from pyarrow import ArrowException

    from gapmeter.analysis.tables import check_table

    check_table(published)
    try:
        found, expected = pq.read_table(published), pq.read_table(derived)
    except ArrowException as error:
        raise ValueError(str(error)) from error
    if found.num_rows != expected.num_rows:
        return [f"{found.num_rows} rows, derived {expected.num_rows}"]
    ours = set(expected.column_names)
    alike = {name: name not in ours or _is_alike(found[name], expected[name]) for name in found.column_names}
    bad = _unlike(dict.fromkeys(expected.column_names, True), alike, "is not of these records", "differs")
    return [f"column {name} {what}" for name, what in bad]


def _is_alike(column: pa.ChunkedArray, other: pa.ChunkedArray) -> bool:
    """Whether two columns hold the same values: fractions to a relative 1e-9, all else exactly; NaN is one value."""
    import numpy as np
    import pyarrow as pa

    if not (pa.types.is_floating(column.type) and pa.types.is_floating(other.type)):
        return column.equals(other) or repr(column.to_pylist()) == repr(other.to_pylist())
    values, others = column.to_numpy(), other.to_numpy()
    same = column.is_null() == other.is_null() and np.allclose(values, others, rtol=_SAME, atol=0.0, equal_nan=True)
    return bool(same)
