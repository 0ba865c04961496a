"""Finished runs of every kind, kept with the figures that were derived from them: the same figures come out today.

``KEY.tar.xz`` holds folders as they were recorded (manifest, requests, probe, telemetry), and what analysis made of
them. Here the raw records alone are unpacked, everything is derived from them again, and compared value by value.

A figure that changes on purpose is named in ``INTENDED`` with the reason. Once that is settled, write the archive's
figures anew, from the same records: ``python -m tests.golden.record --derive KEY``. Without ``--derive`` it records
the runs anew too, with their engines. What changed when, and why, is in the history of each archive.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any
from unittest.mock import MagicMock

import jsonschema
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gapmeter.analysis.ledger import portions, processes
from gapmeter.analysis.ledger.ledger import LedgerInputs, make_ledger
from gapmeter.analysis.ledger.portions import asked_tokens
from gapmeter.analysis.ledger.read import read_trace
from gapmeter.analysis.results import Manifest
from gapmeter.analysis.results.schema import TYPES, schema
from gapmeter.analysis.tables import read_requests
from gapmeter.records import RunFolder, read_records
from gapmeter.runs.comparison import compare_folders
from gapmeter.study.conclusion import report_again

HERE = Path(__file__).parent
KEYS = sorted(path.name.removesuffix(".tar.xz") for path in HERE.glob("*.tar.xz"))
# Of an archive or ALL: a file and the start of a place in it ("summary.json: ledger.") -> why it differs on purpose.
ALL = "*"
INTENDED: dict[str, dict[str, str]] = {}
# The digest of the code of figures, and the version of gapmeter: another one is no other figure.
NOT_COMPARED = ("made_by", "schema_version")
# What analysis writes and is compared. Pages and the trace are not: they show what is in these.
DERIVED = ("summary.json", "verdict.json", "compare.json", "*.parquet", "hdr/*.hlog")
# Keys whose values are words for people, and places that are so by where they stand.
_PROSE = frozenset({
    "absent", "cause", "caveat", "caveats", "flag", "headline", "invalid_reasons", "label", "line", "meaning", "reason",
    "reasons", "sentence", "sentences", "text", "title", "why", "words",
})  # fmt: skip
_PROSE_AT = re.compile(r"warnings\[\d+\]|provenance\.load|table\.rows\[\d+\]\.load")
_SAME = 1e-9  # relative: other builds of a numerical library may differ in the last digits
_MOST_SHOWN = 20


@dataclass(slots=True)
class Compared:
    """What differs between the figures that were kept and today's, in figures and in prose; how much was compared.

    ``misfits``: places in today's documents that are not as their schema says.
    """

    figures: list[str] = field(default_factory=list)
    prose: list[str] = field(default_factory=list)
    misfits: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


@pytest.fixture(scope="module", params=KEYS)
def compared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Compared]:
    """An archive's name, and how today's figures differ from its."""
    kept, today = tmp_path_factory.mktemp("kept"), tmp_path_factory.mktemp("today")
    unpack(HERE / f"{request.param}.tar.xz", kept, today)
    derive(today, kept)
    return request.param, compare(kept, today, INTENDED.get(ALL, {}) | INTENDED.get(request.param, {}))


def test_the_same_figures_are_derived_from_the_same_records(compared: tuple[str, Compared]) -> None:
    key, found = compared
    assert not found.figures, told(key, found.figures)
    counts = found.counts
    assert counts["documents"] >= 2
    assert counts["figures"] > 2000
    assert counts["cells"] > 5000
    assert counts["histograms"] > 10


def test_the_same_words_are_said_of_them(compared: tuple[str, Compared]) -> None:
    key, found = compared
    assert not found.prose, told(key, found.prose)
    assert found.counts["prose"] > 50


def test_every_document_is_as_its_schema_says(compared: tuple[str, Compared]) -> None:
    key, found = compared
    assert not found.misfits, told(key, found.misfits)


def test_every_kind_of_result_is_kept() -> None:
    kept = (
        "attached capacity closed compare compare-pairs conversations curve failures killed locustfile simulated sweep"
    )
    assert {*kept.split(), "gpu", "transformers", "vllm", "workers"} == set(KEYS)


@pytest.mark.parametrize("key", ["gpu", "simulated", "transformers", "vllm", "workers"])
def test_what_a_probe_wrote_is_read_once_and_few_of_its_tokens_kept_without_a_ledger_changing(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpack(HERE / f"{key}.tar.xz", tmp_path / "kept", tmp_path / "today")
    (folder,) = (RunFolder(path.parent) for path in (tmp_path / "today").rglob("manifest.json"))
    manifest, files = Manifest.read(folder.path), folder.record_files(folder.probe)
    requests, _ = read_requests(folder, manifest.plan)
    of = files, requests["request_id"].tolist(), folder.telemetry, manifest.placement.server
    whole = read_trace(*of)
    monkeypatch.setattr(portions, "_MOST_GAPS", 20)
    reading = MagicMock(side_effect=read_records)
    monkeypatch.setattr(processes, "read_records", reading)
    monkeypatch.setattr("gapmeter.analysis.ledger.read._EMISSIONS", 7)
    few = read_trace(*of, asked_tokens(requests))
    assert whole is not None and few is not None and reading.call_count == len(files)
    assert len(few.emissions) < len(whole.emissions) / 2
    ledgers = [make_ledger(LedgerInputs.of(requests, trace)) for trace in (whole, few)]
    pd.testing.assert_frame_equal(*(ledger.rows for ledger in ledgers))
    pd.testing.assert_frame_equal(*(ledger.gaps for ledger in ledgers))


def told(key: str, differences: list[str]) -> str:
    """As many of them as a person reads."""
    more = [f"and {len(differences) - _MOST_SHOWN} more"] if len(differences) > _MOST_SHOWN else []
    return "\n".join([f"{key}: {len(differences)} differ", *differences[:_MOST_SHOWN], *more])


def unpack(archive: Path, kept: Path, today: Path) -> None:
    """What analysis made goes into ``kept``, the raw records and manifests into ``today``."""
    with tarfile.open(archive) as tar:
        for member in tar:
            tar.extract(member, kept if is_derived(member.name) else today, filter="data")


def is_derived(name: str) -> bool:
    """Whether analysis writes a file of this name."""
    return any(PurePath(name).match(pattern) for pattern in DERIVED)


def derive(runs: Path, asked: Path) -> None:
    """Every figure of the folders in ``runs``, from their raw records; comparisons ask what those in ``asked`` did.

    First single runs, then what is said of several: a sweep, a search, a comparison.
    """
    for folder in sorted(path.parent for path in runs.rglob("requests")):
        report_again(folder, quiet=True, definitions=True)
    for folder in sorted(runs.iterdir()):
        if not (folder / "requests").exists() and (folder / "manifest.json").exists():
            report_again(folder, quiet=True)
    for document in sorted(asked.glob("*/compare.json")):
        _compare_again(runs, document)


def _compare_again(runs: Path, document: Path) -> None:
    """Under the name that the comparison had."""
    told = json.loads(document.read_text())
    asked, folder = told["asked"], runs / document.parent.name
    sides = [[(folder / path).resolve() for path in side] for side in asked["folders"]]
    again = compare_folders(
        sides, asked["factors"], force=asked["force"], in_turn=asked["in_turn"], runs=runs, command=told["command"]
    )
    shutil.rmtree(folder, ignore_errors=True)
    again.folder.rename(folder)


def compare(kept: Path, today: Path, intended: Mapping[str, str]) -> Compared:
    """Every derived file of ``kept`` with that of the same name in ``today``; a file that is new differs, too."""
    found = Compared()
    for name in sorted(_derived(kept) | _derived(today)):
        if not (kept / name).exists() or not (today / name).exists():
            places = {"": "is new" if (today / name).exists() else "is missing"}
        elif name.endswith(".parquet"):
            places = dict(_tables(pq.read_table(kept / name), pq.read_table(today / name), found.counts))
        elif name.endswith(".hlog"):
            places = {} if _histogram(kept / name) == _histogram(today / name) else {"": "is another histogram"}
            found.counts["histograms"] += 1
        else:
            before, now = (json.loads((folder / name).read_text()) for folder in (kept, today))
            places = dict(_documents(before, now, found.counts))
        for place, said in places.items():
            if not any(f"{PurePath(name).name}: {place}".startswith(start) for start in intended):
                (found.prose if is_prose(place) else found.figures).append(f"{name}: {place} {said}")
    found.misfits = [misfit for path in sorted(today.rglob("*.json")) for misfit in _misfits(path)]
    return found


def _misfits(path: Path) -> Iterator[str]:
    """Where a document is not as the schema of its kind says; nothing for a file without one."""
    if path.name not in ("manifest.json", "summary.json", "verdict.json", "compare.json"):
        return
    document = json.loads(path.read_text())
    kind = document.get("kind") or ("capacity" if "capacity" in document else "run")
    names = {"manifest.json": "manifest" if kind == "run" else f"{kind}-manifest", "summary.json": kind}
    names |= {"verdict.json": "verdict", "compare.json": "comparison"}
    name = names[path.name]
    for error in jsonschema.Draft202012Validator(schema(name, TYPES[name])).iter_errors(document):
        yield f"{path.parent.name}/{path.name}: {error.json_path} {error.message[:200]}"


def is_prose(place: str) -> bool:
    """Whether a place in a document, such as ``warnings[0].text``, is words for people; an SLO is what a user wrote."""
    if _PROSE_AT.fullmatch(place):
        return True
    keys = re.split(r"[.\[\]]+", place)
    return not _PROSE.isdisjoint(keys) and not (keys[0] == "slo" and keys[-1] == "text")


def _derived(folder: Path) -> set[str]:
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {str(path) for path in paths if is_derived(str(path))}


def _documents(kept: Any, today: Any, counts: Counter[str]) -> Iterator[tuple[str, str]]:
    """Each place where two JSON documents differ, and how."""
    before, now = dict(_leaves(kept)), dict(_leaves(today))
    counts["documents"] += 1
    for place in {**before, **now}:
        if place.startswith(NOT_COMPARED):
            continue
        counts["prose" if is_prose(place) else "figures"] += 1
        if place not in now:
            yield place, f"was {before[place]!r}, is missing"
        elif place not in before:
            yield place, f"is new: {now[place]!r}"
        elif not _equal(before[place], now[place]):
            yield place, f"was {before[place]!r}, is {now[place]!r}"


def _leaves(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Every value in a document that holds no others, by its place: ``slo[0].limit_ms``."""
    if isinstance(value, dict) and value:
        for key, each in value.items():
            yield from _leaves(each, f"{place}.{key}" if place else key)
    elif isinstance(value, list) and value:
        for number, each in enumerate(value):
            yield from _leaves(each, f"{place}[{number}]")
    else:
        yield place, value


def _tables(kept: pa.Table, today: pa.Table, counts: Counter[str]) -> Iterator[tuple[str, str]]:
    """Each column in which two tables differ, with the first row that does."""
    for name in dict.fromkeys([*kept.column_names, *today.column_names]):
        if name not in today.column_names or name not in kept.column_names:
            yield name, "is new" if name in today.column_names else "is missing"
            continue
        before, now = kept[name].to_pylist(), today[name].to_pylist()
        counts["cells"] += len(before)
        if kept.schema.field(name).type != today.schema.field(name).type:
            yield name, f"was of type {kept.schema.field(name).type}, is {today.schema.field(name).type}"
        elif len(before) != len(now):
            yield name, f"had {len(before)} rows, has {len(now)}"
        elif (
            row := next((row for row, pair in enumerate(zip(before, now, strict=True)) if not _equal(*pair)), -1)
        ) >= 0:
            yield name, f"in row {row} was {before[row]!r}, is {now[row]!r}"


def _equal(before: Any, now: Any) -> bool:
    if isinstance(before, float | int) and isinstance(now, float | int) and float in (type(before), type(now)):
        return math.isclose(before, now, rel_tol=_SAME) or (math.isnan(before) and math.isnan(now))  # JSON: 1.0 is 1
    if isinstance(before, list) and isinstance(now, list):
        return len(before) == len(now) and all(map(_equal, before, now))
    return type(before) is type(now) and bool(before == now)


def _histogram(path: Path) -> list[str]:
    """A histogram log without its comments, which say where it is from."""
    return [line for line in path.read_text().splitlines() if not line.startswith("#")]
