"""Comparisons that make their runs: a scenario under two sets of changes in turn, or runs held against a baseline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from gapmeter import errors
from gapmeter.analysis.numbers import counted
from gapmeter.analysis.results import Manifest, RunResult
from gapmeter.analysis.results.comparison import Comparison
from gapmeter.errors import UserError
from gapmeter.options import Options, tell
from gapmeter.records import RunFolder
from gapmeter.report.command import Command
from gapmeter.runs.comparison import check_factors, check_percentiles, compare_folders, distinct, growth_of
from gapmeter.runs.run import Conclusion, analysed, require_one_run
from gapmeter.scenarios.model import Scenario
from gapmeter.study.resolve import check_changeable, resolve

RUNS_A_SIDE = 3  # with two, Student's t has 2 degrees of freedom and finds next to nothing


def compare_in_turn(
    scenario: str | Path, a: Sequence[str], b: Sequence[str], pairs: int = RUNS_A_SIDE, overrides: Sequence[str] = (),
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
    check_overrides(a, b)
    varied = list(dict.fromkeys(override.partition("=")[0].strip() for override in (*a, *b)))
    changes = [[*overrides, *a], [*overrides, *b]]
    scenarios = [resolve(scenario, each) for each in changes]  # a mistake is reported before a second goes into imports
    for each in scenarios:
        check_changeable(each, varied)
    from gapmeter.study.session import Visit, prepare_session
    from gapmeter.study.study import new_texts, visit_in_turn

    quiet = Options(runs=options.runs, quiet=True, api_key=options.api_key, probe_dir=options.probe_dir)
    prepare_session(scenarios[1], quiet)  # what B cannot be is told before A's first run
    common = Command.parse(command).settings if command else overrides  # what the environment set is in it, too
    made: list[list[Path]] = [[], []]
    order, first = list(alternating(pairs)), [new_texts(each) for each in scenarios]

    def visits() -> Iterator[Visit]:
        for number, side in enumerate(order, 1):
            options.say(f"run {number} of {len(order)}: {'AB'[side]}, {' '.join((a, b)[side]) or 'as it is'}")
            texts = first[side] + number if scenarios[side].server.engine == "attach" else 0
            alone = Command.of("run", scenario, [*common, *(a, b)[side]], quiet.flags)
            yield Visit(scenarios[side], texts, command=alone)

    for side, conclusion in zip(order, visit_in_turn(visits(), quiet), strict=False):
        if conclusion.exit_code == errors.INTERRUPTED:
            kept = counted(sum(map(len, made)), "whole run")
            raise UserError(f"interrupted; {kept} in {options.runs}", errors.INTERRUPTED)
        made[side].append(conclusion.folder)
        if conclusion.result.verdict == "INVALID":
            whole, why = sum(map(len, made)), "; ".join(conclusion.result.invalid_reasons)
            options.say(f"run {whole} of {len(order)} is not valid: {why}{'; going on' * (whole < len(order))}")
    differing = [*factors, *varied]
    compared = compare_folders(made, differing, force=force, in_turn=True, runs=options.runs, command=command)
    assert isinstance(compared.result, Comparison)  # since all are runs
    return Conclusion(compared.folder, compared.result, compared.exit_code)


def check_overrides(*sides: Sequence[str]) -> None:
    """Raises UserError for one that sets nothing."""
    for override in chain.from_iterable(sides):
        if "=" not in override:
            raise UserError(f"{override!r} is not KEY=VALUE; write server.max_batch=4", errors.USAGE)


def alternating(pairs: int) -> Iterator[int]:
    """0 for A and 1 for B: A B, then B A, and so on. The mean place of both sides is the same for even ``pairs``."""
    for number in range(pairs):
        yield from (0, 1) if number % 2 == 0 else (1, 0)


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
        for name in (Manifest.FILE, RunResult.FILE):
            if not (folder / name).is_file():
                raise UserError(f"--baseline {folder} is not an analysed run's folder: no {name}", errors.USAGE)
        require_one_run(folder)
    distinct([baseline.folders])
    if scenario.sweep:
        raise UserError("--baseline compares one scenario with earlier runs of it; leave out the sweep", errors.USAGE)
    check_percentiles(scenario.slo)
    from gapmeter.analysis.compare.sides import asked_otherwise

    # A comparison would take one key that differs for what is compared; but at half the rate no server is slower.
    # How long at most, which runs from several machines and locustfiles leave out, says nothing of what is asked.
    may_differ = (*baseline.factors, "load.patience")
    for folder in baseline.folders:
        with analysed(folder):
            differing = asked_otherwise(Manifest.read(folder).scenario, scenario.to_dict(), may_differ)
        if differing:
            values = "; ".join(f"{fact.key} {fact.a}, now {fact.b}" for fact in differing)
            allowed = " ".join(f"--factor {fact.key}" for fact in differing)
            raise UserError(f"--baseline {folder} had {values}; to compare all the same, add {allowed}", errors.USAGE)


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
        if len(folders) == repeats and run.exit_code != errors.INTERRUPTED:
            compared = compare_folders([baseline.folders, folders], baseline.factors, runs=runs)
            assert isinstance(compared.result, Comparison)  # since all are runs
            found, code = growth_of(
                compared.result, compared.folder, run.result, baseline.limit, baseline.folders, quiet=quiet
            )
            if not quiet:
                tell(str(RunFolder(compared.folder).report))
            run = replace(run, regression=found, exit_code=max(run.exit_code, code))
        yield run
