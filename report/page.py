"""The page of a run: its sections, in the order in which they are read."""

from __future__ import annotations

from collections.abc import Callable

from gapmeter.records import RunFolder
from gapmeter.report import (
    compute,
    cost,
    device,
    explorer,
    how,
    objectives,
    overtime,
    percentiles,
    requests,
    sustained,
    where,
)
from gapmeter.report.run import Run, read_run
from gapmeter.report.shell import Section, asset, page_shell

# Each takes the run and gives a section, or None when the run has nothing for it. Add yours where it should be read.
SECTIONS: tuple[Callable[[Run], Section | None], ...] = (
    objectives.verdict_section,
    where.where_section,
    compute.compute_section,
    objectives.slo_section,
    objectives.failed_section,
    cost.cost_section,
    objectives.warnings_section,
    percentiles.percentiles_section,
    percentiles.definitions_section,
    overtime.time_section,
    sustained.sustained_section,
    device.device_section,
    device.roofline_section,
    percentiles.stages_section,
    how.trust_section,
    how.upgrade_section,
    requests.requests_section,
    explorer.explorer_section,
    how.repeat_section,
)


def page(folder: RunFolder) -> str:
    """The whole page of an analysed run. Raises FileNotFoundError and ValueError as ``read_run`` does."""
    run = read_run(folder)
    scenario = run.summary["name"] or folder.path.name
    return page_shell(
        f"{run.summary['verdict']} · {scenario} · gapmeter",
        [section(run) for section in SECTIONS],
        run.provenance,
        scripts=[asset("request.js")],
        header=objectives.header_of(run),
        version=run.manifest.get("versions", {}).get("gapmeter", ""),
    )
