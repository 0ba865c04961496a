"""Many runs of one scenario at different points: read, put side by side, drawn. Needs the folder and nothing else."""

from __future__ import annotations

import json
from typing import Any

from gapmeter.analysis.sweep.build import build_summary
from gapmeter.records import RunFolder
from gapmeter.report.sweep.page import provenance, write_page


def analyse_points(folder: RunFolder) -> dict[str, Any]:
    """``summary.json`` and ``report.html`` of a sweep's folder; returns the summary. Raises OSError."""
    manifest = folder.read_manifest()
    summary = build_summary(folder.path, manifest)
    summary["provenance"] = provenance(summary, manifest).facts()
    folder.summary.write_text(json.dumps(summary, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    write_page(folder, summary, manifest)
    return summary


__all__ = ["analyse_points"]
