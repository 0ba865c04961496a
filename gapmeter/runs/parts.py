"""What a summary consists of for programs that know runs only: itself, a sweep's points, or a search's answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gapmeter import errors
from gapmeter.errors import UserError, reason_of
from gapmeter.records import RunFolder
from gapmeter.study.parent import NAMES, SEARCH, SWEEP

_PLACES = {SWEEP: "points", SEARCH: "trials"}


def parts_of(summary: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Each as ``export.junit`` takes a run."""
    from gapmeter.analysis.sweep.suites import suites_of

    if summary.get("kind") == SWEEP:
        yield from suites_of(summary)
    elif summary.get("kind") == SEARCH:
        yield _search(summary)
    else:
        yield summary


def want_one_run(folder: RunFolder) -> None:
    """Raises UserError for a sweep or a search: it says where its runs lie."""
    try:
        kind = folder.read_manifest().get("kind")
    except (OSError, ValueError) as error:
        why = reason_of(error) if isinstance(error, OSError) else error
        raise UserError(f"{folder.path} is not a run's folder: manifest.json: {why}", errors.USAGE) from error
    if kind not in _PLACES:
        return
    place = _PLACES[kind]
    found = sorted(path.parent for path in (folder.path / place).rglob("manifest.json"))
    each = f", for instance {found[0]}" if found else ""
    raise UserError(f"{folder.path} is {NAMES[kind]}; name one of its runs under {place}/{each}", errors.USAGE)


def _search(summary: Mapping[str, Any]) -> dict[str, Any]:
    """A search that did not find what was asked is a run that is not valid, with its answer as the reason."""
    found = summary["exit_code"] == errors.OK
    return {
        "name": f"{summary['name']}: capacity",
        "verdict": "PASS" if found else "INVALID",
        "invalid_reasons": [] if found else [" ".join(summary["headline"])],
        "slo": [],
        "provenance": summary.get("provenance"),
        "load": {"window_s": summary["capacity"]["seconds"] or 0.0},
    }
