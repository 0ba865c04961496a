"""CI: a run judged against its baseline, and the exit code that says whether it regressed."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gapmeter import errors
from gapmeter.analysis.results import RunResult
from gapmeter.errors import UserError
from gapmeter.runs.run import require_one_run
from gapmeter.scenarios import Scenario
from gapmeter.study.conclusion import Conclusion


@dataclass(frozen=True, slots=True)
class Baseline:
    """What a run is held against: a run's folder, the growth that is allowed (a fraction), the keys that may differ."""

    folder: Path
    limit: float
    factors: tuple[str, ...] = ()


def check_baseline(baseline: Baseline, scenario: Scenario) -> None:
    """Raises UserError, before any load, for what could not be judged."""
    folder = baseline.folder
    for name in ("manifest.json", "summary.json"):
        if not (folder / name).is_file():
            raise UserError(f"--baseline {folder} is not an analysed run's folder: no {name}", errors.USAGE)
    require_one_run(folder)
    if scenario.sweep:
        raise UserError("--baseline holds one scenario against one run; leave out the sweep", errors.USAGE)
    if not any(slo.percentile is not None for slo in scenario.slo):
        text = "--baseline judges the percentiles that SLOs name, and the scenario names none"
        raise UserError(f"{text}; --set 'slo=[\"ttft p99 <= 1 s\"]'", errors.USAGE)

def judged_against(
    conclusions: Iterable[Conclusion[RunResult]], repeats: int, baseline: Baseline, runs: Path, *, quiet: bool
) -> Iterator[Conclusion[RunResult]]:
    """The same runs; the last of ``repeats`` also says how all of them compare with the baseline.

    It has ``regression``, and its exit code is 99 for a regression, 98 where the runs are not comparable. Raises
    UserError as a comparison does.
    """
    folders: list[Path] = []
    for run in conclusions:
        folders.append(run.folder)
        whole = len(folders) == repeats and run.exit_code != errors.INTERRUPTED
        yield _judged(run, folders, baseline, runs, quiet=quiet) if whole else run


def _judged(
    run: Conclusion[RunResult], folders: Sequence[Path], baseline: Baseline, runs: Path, *, quiet: bool
) -> Conclusion[RunResult]:
    from gapmeter.analysis.compare.regression import REGRESSED, judge_regression
    from gapmeter.analysis.compare.result import NOT_COMPARABLE
    from gapmeter.report.comparison import regression_document
    from gapmeter.study.comparison import compare_runs

    compared = compare_runs([[baseline.folder], folders], baseline.factors, runs=runs)
    slos = [(slo.metric, slo.percentile) for slo in run.result.slo if slo.percentile is not None]
    judged = judge_regression(compared.result, slos, baseline.limit, baseline.folder.name)
    regression = regression_document(judged, compared.result) | {"folder": str(compared.folder)}
    if not quiet:
        print(f"gapmeter: {regression['status']} against {baseline.folder}: {regression['sentence']}", file=sys.stderr)
        print(f"gapmeter: {compared.folder / 'report.html'}", file=sys.stderr)
    code = {REGRESSED: errors.SLO_MISSED, NOT_COMPARABLE: errors.NOT_VALID}.get(regression["status"], errors.OK)
    return replace(run, regression=regression, exit_code=max(run.exit_code, code))
