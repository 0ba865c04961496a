"""Runs compared: those that are there, a scenario's own, made in turn under two sets of changes, or with a baseline."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gapmeter import errors
from gapmeter.analysis.command import Command
from gapmeter.analysis.results import NotReadable, RunResult
from gapmeter.errors import UserError, unless_refused
from gapmeter.options import Options
from gapmeter.records import RunFolder
from gapmeter.runs.run import UNDERIVABLE, in_a_line, require_one_run
from gapmeter.scenarios import Scenario
from gapmeter.study.conclusion import Conclusion
from gapmeter.study.resolve import asks_for_model, resolve

if TYPE_CHECKING:
    from gapmeter.analysis.compare.sides import AnalysedRun
    from gapmeter.analysis.results.comparison import Asked, Comparison

DOCUMENT = "compare.json"


def compare_runs(
    sides: Sequence[Sequence[str | Path]], factors: Sequence[str] = (), *, force: bool = False, in_turn: bool = False,
    runs: str | Path = "runs", command: str = "",
) -> Conclusion[Comparison]:  # fmt: skip
    """Compare runs by their folders, each side one or several, and write ``compare.json`` and ``report.html``.

    Raises UserError for a folder that is no analysed run, for one that is given twice, and for versions that cannot be
    read together.
    """
    folders = [[Path(path) for path in side] for side in sides]
    seen: set[Path] = set()
    for path in (path for side in folders for path in side):
        if path.resolve() in seen:
            raise UserError(f"{path} is named twice; a run compared with itself differs in nothing", errors.USAGE)
        seen.add(path.resolve())
    from gapmeter.analysis.results.comparison import Asked
    from gapmeter.report import comparison

    result, version = derive(folders, Asked(factors=tuple(factors), force=force, in_turn=in_turn), command)
    names = "|".join(",".join(path.resolve().name for path in side) for side in folders)
    with unless_refused(f"no comparison's folder can be made in {runs}"):
        folder = RunFolder.create(Path(runs), "compare", hashlib.sha256(names.encode()).hexdigest(), parts=()).path
    placed = tuple(tuple(os.path.relpath(path, folder) for path in side) for side in folders)
    result = result.model_copy(update={"asked": result.asked.model_copy(update={"folders": placed})})
    with unless_refused(f"{folder} cannot be written"):
        result = comparison.write(folder, result, version)
    return Conclusion(folder, result, errors.OK if result.comparable or result.forced else errors.NOT_VALID)


def derive(sides: Sequence[Sequence[Path]], asked: Asked, command: str) -> tuple[Comparison, str]:
    """A comparison from the runs' folders alone, and the version of gapmeter that ran the baseline.

    Raises UserError as ``compare_runs`` does.
    """
    from gapmeter.analysis.compare.build import compare  # its import takes a second: mistakes are told before
    from gapmeter.analysis.compare.sides import Side

    read = [Side(tuple(_read(path) for path in side)) for side in sides]
    for side, paths in zip(read, sides, strict=True):
        for each, path in zip(side.runs, paths, strict=True):
            if not each.run.count:
                raise UserError(f"{path} measured no request; there is nothing to compare", errors.NOT_VALID)
    return compare(read, asked, command), read[0].first.manifest.versions.get("gapmeter", "")


def compare_in_turn(
    scenario: str, a: Sequence[str], b: Sequence[str], pairs: int = 2, overrides: Sequence[str] = (),
    options: Options = Options(), *, factors: Sequence[str] = (), force: bool = False, command: str = "",
) -> Conclusion[Comparison]:  # fmt: skip
    """Run a scenario under two sets of overrides in the order A B B A …, so that a drift affects both sides alike.

    Then compare the runs; what ``a`` and ``b`` set may differ. Raises UserError as a run does, and when one is
    interrupted.
    """
    for override in (*a, *b):
        if "=" not in override:
            raise UserError(f"{override!r} is not KEY=VALUE; write server.max_batch=4", errors.USAGE)
    factors = [*factors, *dict.fromkeys(override.partition("=")[0].strip() for override in (*a, *b))]
    changes = [[*overrides, *a], [*overrides, *b]]
    scenarios = [resolve(scenario, each) for each in changes]  # a mistake is told before a second goes into imports
    from gapmeter.study.session import Visit
    from gapmeter.study.study import visit_in_turn

    made: list[list[Path]] = [[], []]
    order = list(order_of(pairs))

    def visits() -> Iterator[Visit]:
        for number, side in enumerate(order, 1):
            options.say(f"run {number} of {len(order)}: {'AB'[side]}, {' '.join((a, b)[side])}")
            yield Visit(scenarios[side], 0, command=Command.of("run", scenario, changes[side]))

    quiet = Options(runs=options.runs, quiet=True, api_key=options.api_key, probe_dir=options.probe_dir)
    asked_for = asks_for_model([*overrides, *a, *b])
    for side, conclusion in zip(order, visit_in_turn(visits(), quiet, model_asked_for=asked_for), strict=False):
        if conclusion.exit_code == errors.INTERRUPTED:
            whole = len(made[0]) + len(made[1])
            raise UserError(f"interrupted; {whole} runs are whole, in {options.runs}", errors.INTERRUPTED)
        made[side].append(conclusion.folder)
    return compare_runs(made, factors, force=force, in_turn=True, runs=options.runs, command=command)


def order_of(pairs: int) -> Iterator[int]:
    """0 for A and 1 for B: A B, then B A, and so on. The mean place of both sides is the same for even ``pairs``."""
    for number in range(pairs):
        yield from (0, 1) if number % 2 == 0 else (1, 0)


def _read(path: Path) -> AnalysedRun:
    from gapmeter.analysis.compare.sides import read_run

    require_one_run(path)
    try:
        return read_run(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        missing = Path(str(error.filename or RunResult.FILE)).name
        text = f"{path} is not an analysed run's folder: no {missing}; analyse it first: gapmeter report {path}"
        raise UserError(text, errors.USAGE) from error
    except NotReadable as error:
        raise UserError(f"not comparable: {error}", errors.USAGE) from error
    except (OSError, *UNDERIVABLE) as error:
        text = f"{path} cannot be read as a run: {in_a_line(error)}; analyse it again: gapmeter report {path}"
        raise UserError(text, errors.USAGE) from error


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
    from gapmeter.analysis.compare.claims import judge_regression
    from gapmeter.analysis.results.comparison import NOT_COMPARABLE, REGRESSED
    from gapmeter.report.comparison import with_sentences

    compared = compare_runs([[baseline.folder], folders], baseline.factors, runs=runs)
    slos = [(slo.metric, slo.percentile) for slo in run.result.slo if slo.percentile is not None]
    judged = judge_regression(compared.result, slos, baseline.limit, baseline.folder.name, str(compared.folder))
    regression = with_sentences(judged, compared.result)
    if not quiet:
        print(f"gapmeter: {regression.status} against {baseline.folder}: {regression.sentence}", file=sys.stderr)
        print(f"gapmeter: {compared.folder / 'report.html'}", file=sys.stderr)
    code = {REGRESSED: errors.SLO_MISSED, NOT_COMPARABLE: errors.NOT_VALID}.get(regression.status, errors.OK)
    return replace(run, regression=regression, exit_code=max(run.exit_code, code))
