"""Runs compared: existing ones, a scenario's own, run alternately under two sets of changes, or with a baseline."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from gapmeter import errors
from gapmeter.analysis.results import Manifest, NotReadable, RunResult
from gapmeter.analysis.results.comparison import NOT_COMPARABLE, Asked, Comparison
from gapmeter.analysis.results.costs import CostTable
from gapmeter.analysis.results.regression import Regression
from gapmeter.analysis.results.run import SloAnswer
from gapmeter.errors import UserError, unless_refused
from gapmeter.options import Options, tell
from gapmeter.records import RunFolder
from gapmeter.report.command import Command
from gapmeter.runs.archive import unpacked
from gapmeter.runs.run import UNDERIVABLE, in_a_line, manifest_of, require_one_run
from gapmeter.scenarios import Scenario
from gapmeter.scenarios.errors import did_you_mean
from gapmeter.scenarios.model import KEYS, SECTIONS
from gapmeter.scenarios.plain_file import read_plain
from gapmeter.scenarios.slo import Slo
from gapmeter.study.conclusion import Conclusion
from gapmeter.study.resolve import check_changeable, resolve

if TYPE_CHECKING:
    from gapmeter.analysis.compare.searches import Found
    from gapmeter.analysis.compare.sides import AnalysedRun

Compared = TypeVar("Compared", Comparison, CostTable)
RUNS_A_SIDE = 3  # with two, Student's t has 2 degrees of freedom and finds next to nothing


def compare_folders(
    sides: Sequence[Sequence[str | Path]], factors: Sequence[str] = (), *, force: bool = False,
    runs: str | Path = "runs", command: str = "",
) -> Conclusion[Comparison] | Conclusion[CostTable]:  # fmt: skip
    """Compare what lies in folders, or in archives of some.

    Runs by their latencies, as ``compare_runs``; where a search for capacity or a sweep is among them, all by what a
    request costs, as ``compare_costs``. Raises UserError as they do.
    """
    check_factors(factors)
    with opened(sides) as folders:
        single = all(isinstance(manifest_of(path), Manifest) for side in folders for path in side)
    compared = compare_runs if single else compare_costs
    return compared(sides, factors, force=force, runs=runs, command=command)


def compare_runs(
    sides: Sequence[Sequence[str | Path]], factors: Sequence[str] = (), *, force: bool = False, in_turn: bool = False,
    runs: str | Path = "runs", command: str = "",
) -> Conclusion[Comparison]:  # fmt: skip
    """Compare runs by their folders, each side one or several, and write ``compare.json`` and ``report.html``.

    Raises UserError for a folder that is no analysed run, for one that is given twice, and for versions that cannot be
    read together.
    """
    from gapmeter.report import comparison

    paths = _distinct(sides)
    result = derive(paths, Asked(factors=tuple(factors), force=force, in_turn=in_turn), command)
    folder, result = _written(Path(runs), paths, result, comparison.write)
    return Conclusion(folder, result, errors.OK if result.comparable or result.forced else errors.NOT_VALID)


def compare_costs(
    sides: Sequence[Sequence[str | Path]], factors: Sequence[str] = (), *, force: bool = False,
    runs: str | Path = "runs", command: str = "",
) -> Conclusion[CostTable]:  # fmt: skip
    """One table of searches for capacity, sweeps and runs, written like a comparison of runs.

    A side of several searches is one row: they are searches of one and the same thing. Raises UserError.
    """
    from gapmeter.report import costs

    paths = _distinct(sides)
    result = derive_costs(paths, Asked(factors=tuple(factors), force=force), command)
    folder, result = _written(Path(runs), paths, result, costs.write)
    return Conclusion(folder, result, errors.NOT_VALID if result.verdict == NOT_COMPARABLE else errors.OK)


def compare_again(folder: Path, into: Path) -> None:
    """What an earlier comparison's folder says, made anew from what it compared, into another folder.

    Raises UserError, and NotReadable and OSError as reading it does.
    """
    from gapmeter.report import comparison, costs

    kept = read_comparison(folder)
    sides = kept.asked.sides(folder)
    if isinstance(kept, CostTable):
        costs.write(into, derive_costs(sides, kept.asked, kept.command))
    else:
        comparison.write(into, derive(sides, kept.asked, kept.command))


def _distinct(sides: Sequence[Sequence[str | Path]]) -> list[list[Path]]:
    """The sides' paths. Raises UserError for one that is named twice."""
    paths = [[Path(path) for path in side] for side in sides]
    seen: set[Path] = set()
    for path in (path for side in paths for path in side):
        if path.resolve() in seen:
            raise UserError(f"{path} is named twice; a run cannot be compared with itself", errors.USAGE)
        seen.add(path.resolve())
    return paths


def _written(
    runs: Path, sides: list[list[Path]], result: Compared, write: Callable[[Path, Compared], Compared]
) -> tuple[Path, Compared]:
    """The folder that is made for it, and the result with what was written there."""
    names = "|".join(",".join(path.resolve().name for path in side) for side in sides)
    with unless_refused(f"no comparison's folder can be made in {runs}"):
        folder = RunFolder.create(runs, "compare", hashlib.sha256(names.encode()).hexdigest(), parts=()).path
    with unless_refused(f"{folder} cannot be written"):
        placed = tuple(tuple(os.path.relpath(path, folder) for path in side) for side in sides)
        asked = result.asked.model_copy(update={"folders": placed})
        return folder, write(folder, result.model_copy(update={"asked": asked}))


@contextlib.contextmanager
def opened(sides: Sequence[Sequence[str | Path]]) -> Iterator[list[list[Path]]]:
    """The sides' folders; those of archives are unpacked for as long as the block lasts. Raises UserError."""
    with contextlib.ExitStack() as stack:
        yield [
            [stack.enter_context(unpacked(path)) if path.is_file() else path for path in map(Path, side)]
            for side in sides
        ]


def derive_costs(sides: Sequence[Sequence[Path]], asked: Asked, command: str) -> CostTable:
    """A table of costs from the folders alone. Raises UserError."""
    from gapmeter.analysis.compare.costs import cost_table
    from gapmeter.analysis.compare.searches import NotOneSide

    with opened(sides) as folders:
        found = [[_read_found(path) for path in side] for side in folders]
    try:
        return cost_table(found, asked, command)
    except NotOneSide as error:
        raise UserError(f"not comparable: {error}", errors.USAGE) from error


def derive(sides: Sequence[Sequence[Path]], asked: Asked, command: str) -> Comparison:
    """A comparison from the runs' folders alone. Raises UserError as ``compare_runs`` does."""
    from gapmeter.analysis.compare.build import compare  # its import takes a second: mistakes are reported before
    from gapmeter.analysis.compare.sides import Side

    with opened(sides) as folders:
        read = [Side(tuple(_read(path) for path in side)) for side in folders]
    for side, paths in zip(read, sides, strict=True):
        for each, path in zip(side.runs, paths, strict=True):
            if not each.run.count:
                raise UserError(f"{path} measured no request; there is nothing to compare", errors.NOT_VALID)
    return compare(read, asked, command)


def compare_in_turn(
    scenario: str, a: Sequence[str], b: Sequence[str], pairs: int = RUNS_A_SIDE, overrides: Sequence[str] = (),
    options: Options = Options(), *, factors: Sequence[str] = (), force: bool = False, command: str = "",
) -> Conclusion[Comparison]:  # fmt: skip
    """Run a scenario under two sets of overrides in the order A B B A …, so that a drift affects both sides alike.

    Then compare the runs; what ``a`` and ``b`` set may differ. Raises UserError as a run does, when one is interrupted,
    and for a single pair that is not forced.
    """
    check_factors(factors)
    if pairs == 1 and not force:
        text = f"--pairs 1 cannot show how much repeated runs differ; use {RUNS_A_SIDE}, or add --force"
        raise UserError(text, errors.USAGE)
    for override in (*a, *b):
        if "=" not in override:
            raise UserError(f"{override!r} is not KEY=VALUE; write server.max_batch=4", errors.USAGE)
    varied = list(dict.fromkeys(override.partition("=")[0].strip() for override in (*a, *b)))
    changes = [[*overrides, *a], [*overrides, *b]]
    scenarios = [resolve(scenario, each) for each in changes]  # a mistake is reported before a second goes into imports
    for each in scenarios:
        check_changeable(each, varied)
    from gapmeter.study.session import Visit, prepare_session
    from gapmeter.study.study import visit_in_turn

    quiet = Options(runs=options.runs, quiet=True, api_key=options.api_key, probe_dir=options.probe_dir)
    prepare_session(scenarios[1], quiet)  # what B cannot be is told before A's first run
    made: list[list[Path]] = [[], []]
    order = list(alternating(pairs))

    def visits() -> Iterator[Visit]:
        for number, side in enumerate(order, 1):
            options.say(f"run {number} of {len(order)}: {'AB'[side]}, {' '.join((a, b)[side])}")
            # A server that goes on remembers what it was asked: each run there has texts of its own.
            texts = number if scenarios[side].server.engine == "attach" else 0
            yield Visit(scenarios[side], texts, command=Command.of("run", scenario, changes[side]))

    for side, conclusion in zip(order, visit_in_turn(visits(), quiet), strict=False):
        if conclusion.exit_code == errors.INTERRUPTED:
            whole = len(made[0]) + len(made[1])
            raise UserError(f"interrupted; {whole} runs are whole, in {options.runs}", errors.INTERRUPTED)
        made[side].append(conclusion.folder)
        if conclusion.result.verdict == "INVALID":
            whole, why = sum(map(len, made)), "; ".join(conclusion.result.invalid_reasons)
            options.say(f"run {whole} of {len(order)} is not valid: {why}{'; going on' * (whole < len(order))}")
    return compare_runs(made, [*factors, *varied], force=force, in_turn=True, runs=options.runs, command=command)


def alternating(pairs: int) -> Iterator[int]:
    """0 for A and 1 for B: A B, then B A, and so on. The mean place of both sides is the same for even ``pairs``."""
    for number in range(pairs):
        yield from (0, 1) if number % 2 == 0 else (1, 0)


def _read(path: Path) -> AnalysedRun:
    from gapmeter.analysis.compare.sides import read_run

    require_one_run(path)
    with _unless_unreadable(path):
        return read_run(path)


def _read_found(path: Path) -> list[Found]:
    from gapmeter.analysis.compare.searches import read_found

    manifest_of(path)
    with _unless_unreadable(path):
        found = read_found(path)
    if not found:
        raise UserError(f"{path} has no point with figures; there is nothing to compare", errors.NOT_VALID)
    return found


@contextlib.contextmanager
def _unless_unreadable(path: Path) -> Iterator[None]:
    """Raises UserError where an analysed folder cannot be read."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        missing = Path(str(error.filename or RunResult.FILE)).name
        text = f"{path} is not an analysed run's folder: no {missing}; analyse it first: gapmeter report {path}"
        raise UserError(text, errors.USAGE) from error
    except NotReadable as error:
        raise UserError(f"not comparable: {error}", errors.USAGE) from error
    except (OSError, *UNDERIVABLE) as error:
        text = f"{path} cannot be read as a run: {in_a_line(error)}; analyse it again: gapmeter report {path}"
        raise UserError(text, errors.USAGE) from error


def read_comparison(folder: Path) -> Comparison | CostTable:
    """An earlier comparison's ``compare.json``. Raises NotReadable, OSError."""
    text = read_plain(folder / Comparison.FILE)
    of_costs = b'"kind": "costs"' in text[:200]  # a comparison of runs has no kind
    return (CostTable if of_costs else Comparison).parse(text, folder / Comparison.FILE)


@dataclass(frozen=True, slots=True)
class Baseline:
    """What runs are held against: other runs' folders, the growth that is allowed (a fraction), what may differ.

    ``force``: one run a side may be judged, though nothing then tells how much runs of the same thing differ.
    """

    folders: tuple[Path, ...]
    limit: float
    factors: tuple[str, ...] = ()
    force: bool = False

    def repeats(self, scenario: Scenario) -> int:
        """How many runs to hold against it: as many as the scenario says; three where it says nothing."""
        return scenario.repeat if self.force or scenario.repeat > 1 else RUNS_A_SIDE


def check_baseline(baseline: Baseline, scenario: Scenario) -> None:
    """Raises UserError, before any load, for what could not be judged."""
    check_factors(baseline.factors)
    if not baseline.folders:
        raise UserError("--baseline names no run's folder", errors.USAGE)
    for folder in baseline.folders:
        for name in ("manifest.json", "summary.json"):
            if not (folder / name).is_file():
                raise UserError(f"--baseline {folder} is not an analysed run's folder: no {name}", errors.USAGE)
        require_one_run(folder)
    _distinct([baseline.folders])
    if scenario.sweep:
        raise UserError("--baseline compares one scenario with earlier runs of it; leave out the sweep", errors.USAGE)
    check_percentiles(scenario.slo)
    for folder in baseline.folders:
        _check_same(folder, scenario, baseline.factors)


def _check_same(folder: Path, scenario: Scenario, factors: Sequence[str]) -> None:
    """Raises UserError where a run was asked otherwise than this scenario asks, beside ``factors``.

    A comparison would take one key that differs for what is compared; but at half the rate no server is slower.
    """
    from gapmeter.analysis.compare.protocol import asked_otherwise

    with _unless_unreadable(folder):
        before = Manifest.read(folder).scenario
    # How long at most, which runs from several machines and locustfiles leave out, says nothing of what is asked.
    if differing := asked_otherwise(before, scenario.to_dict(), (*factors, "load.patience")):
        values = "; ".join(f"{fact.key} {fact.a}, now {fact.b}" for fact in differing)
        allowed = " ".join(f"--factor {fact.key}" for fact in differing)
        raise UserError(f"--baseline {folder} had {values}; to compare all the same, add {allowed}", errors.USAGE)


def check_factors(factors: Iterable[str]) -> None:
    """Raises UserError, before any load, for a word that no run could have differed in."""
    from gapmeter.analysis.compare.protocol import OPEN_FACTORS, OWN_FACTORS

    names = (*KEYS, *SECTIONS, *OWN_FACTORS)
    for factor in factors:
        if factor not in names and not factor.startswith(OPEN_FACTORS):
            meant = did_you_mean(factor, names) or "write one such as server.max_batch, or hardware"
            raise UserError(f"--factor {factor}: nothing of that name can differ; {meant}".rstrip(), errors.USAGE)


def check_percentiles(slos: Iterable[Slo | SloAnswer]) -> None:
    """Raises UserError where a gate would have nothing to judge."""
    if all(slo.percentile is None for slo in slos):
        text = "a regression check needs an SLO on a percentile; these runs have none"
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
    compared = compare_runs([baseline.folders, folders], baseline.factors, runs=runs)
    found, code = _growth(compared.result, compared.folder, run.result, baseline.limit, baseline.folders, quiet=quiet)
    if not quiet:
        tell(f"{compared.folder / 'report.html'}")
    return replace(run, regression=found, exit_code=max(run.exit_code, code))


def gate(result: Comparison | CostTable, folder: Path, limit: float, *, quiet: bool) -> tuple[Regression, int]:
    """A comparison of two sides as a gate: is B slower than A by surely more than ``limit`` (a fraction)?

    Judged by the SLOs of B's first run; with the exit code. Raises UserError.
    """
    sides = result.asked.sides(folder)
    if isinstance(result, CostTable) or len(sides) != 2:
        raise UserError("--max-regression judges runs, B against A", errors.USAGE)
    with opened(sides) as folders:
        run = RunResult.read(folders[1][0])
    check_percentiles(run.slo)
    baseline = [Path(os.path.normpath(path)) for path in sides[0]]
    return _growth(result, folder, run, limit, baseline, quiet=quiet)


def _growth(
    result: Comparison, folder: Path, run: RunResult, limit: float, baseline: Sequence[Path], *, quiet: bool
) -> tuple[Regression, int]:
    """Whether the second side grew by more than ``limit``, by the SLOs of ``run``; its exit code."""
    from gapmeter.analysis.compare.claims import judge_regression
    from gapmeter.analysis.results.regression import REGRESSED
    from gapmeter.report.comparison import with_sentences

    slos = [(slo.metric, slo.percentile) for slo in run.slo if slo.percentile is not None]
    names = ", ".join(path.name for path in baseline)
    found = with_sentences(judge_regression(result, slos, limit, names, str(folder)), result)
    if not quiet:
        tell(f"{found.status} against {', '.join(map(str, baseline))}: {found.sentence}")
    code = {REGRESSED: errors.SLO_MISSED, NOT_COMPARABLE: errors.NOT_VALID}.get(found.status, errors.OK)
    if code == errors.OK and any(row.late_ms is not None for row in found.rows):
        code = errors.NOT_VALID  # nobody knows what was asked
    return found, code
