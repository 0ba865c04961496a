"""Cost, efficiency and value of a search for capacity, from its folder and those of its trials."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gapmeter.analysis.cost.economics import SearchTrial, describe_search
from gapmeter.analysis.jsonable import json_safe
from gapmeter.records import RunFolder

_HELD, _INVALID = "holds", "invalid"  # a trial's verdicts


def search_economy(folder: Path, summary: Mapping[str, Any]) -> dict[str, Any]:
    """The parts ``tokens_per_request``, ``cost``, ``energy`` and ``value`` for a search's summary; none without trials.

    ``summary`` has ``capacity`` with ``low``, ``high`` and ``trials``, each with ``rate``, ``verdict`` and ``folder``.
    The price follows a trial's manifest, which knows the server's cores.
    """
    trials: list[SearchTrial] = []
    manifest: Mapping[str, Any] | None = None
    for trial in summary["capacity"]["trials"]:
        run = RunFolder(folder / trial["folder"]) if trial["folder"] else None
        if run is None or trial["verdict"] == _INVALID or not run.summary.exists():
            continue
        manifest = manifest or run.read_manifest()
        trials.append(SearchTrial(float(trial["rate"]), trial["verdict"] == _HELD, json.loads(run.summary.read_text())))
    if manifest is None:
        return {}
    found: dict[str, Any] = json_safe(describe_search(summary, manifest, trials))
    return found
