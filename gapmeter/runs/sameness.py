"""What was published against what was derived again: file by file, and value by value where the bytes differ."""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAKER = "made_by"
MOST_SHOWN = 3
_SAME = 1e-9  # relative: other builds of a numerical library may differ in the last digits


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at, whether it is as it should be, and what was seen."""

    name: str
    ok: bool
    seen: str


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
