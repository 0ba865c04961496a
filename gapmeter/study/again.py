"""A run, a sweep or a search that lies in a folder, analysed again."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from gapmeter.analysis.results.manifest import SearchManifest, SweepManifest
from gapmeter.records import RunFolder
from gapmeter.runs.run import Conclusion, hold, manifest_of, unless_damaged
from gapmeter.study.conclusion import conclude


def report_again(
    path: str | Path, *, quiet: bool = False, verbose: bool = False, definitions: bool = False
) -> Conclusion[Any]:
    """Analyse a run, a sweep or a search again from its folder alone; ``definitions``: also by other tools' ones.

    Raises UserError when it is no run's folder, or holds no requests.
    """
    path = Path(path)
    manifest = manifest_of(path)
    is_study = isinstance(manifest, SearchManifest | SweepManifest)
    with unless_damaged(path, manifest), hold(path) if is_study else contextlib.nullcontext():
        if isinstance(manifest, SearchManifest):
            from gapmeter.study.capacity import report_capacity  # its import takes a second

            return report_capacity(path, quiet=quiet)
        if isinstance(manifest, SweepManifest):
            from gapmeter.study.sweep import report_sweep

            return report_sweep(path, quiet=quiet)
        return conclude(RunFolder(path), manifest, quiet=quiet, verbose=verbose, definitions=definitions)
