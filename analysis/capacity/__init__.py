"""The highest Poisson rate at which every SLO holds: a search over trials, with an interval that keeps its promise.

Values in, the next rate or the answer out; nothing here reads a file, a clock or a server. Who runs the trials is an
``Oracle`` (trial.py).
"""

from __future__ import annotations

import json
from typing import Any

from gapmeter.records import RunFolder


def analyse_capacity(folder: RunFolder) -> dict[str, Any]:
    """``summary.json`` and ``report.html`` of a search's folder, from it alone; returns the summary. Raises OSError."""
    from gapmeter.analysis.capacity.read import goal_of, read_trials
    from gapmeter.analysis.capacity.summary import build_summary
    from gapmeter.report.bridge import search_economy
    from gapmeter.report.capacity.page import (  # what only searches needs neither pictures nor tables
        provenance,
        write_page,
    )

    manifest = folder.read_manifest()
    summary = build_summary(goal_of(manifest), read_trials(folder.path, manifest), manifest)
    summary |= search_economy(folder.path, summary)
    summary["provenance"] = provenance(summary, manifest).facts()
    folder.summary.write_text(json.dumps(summary, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    write_page(folder, summary, manifest)
    return summary
