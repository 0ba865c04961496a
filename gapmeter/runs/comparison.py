"""Runs in folders or archives compared, by latency or by what a request costs; and a comparison as a gate."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from gapmeter import errors
from gapmeter.analysis.results import Manifest, RunResult
from gapmeter.analysis.results.comparison import NOT_COMPARABLE, Asked, Comparison
from gapmeter.analysis.results.cost_table import CostTable
from gapmeter.analysis.results.regression import Regression
from gapmeter.analysis.results.run import INVALID, SloAnswer
from gapmeter.errors import UserError, unless_refused
from gapmeter.options import tell
from gapmeter.records import RunFolder
from gapmeter.report.command import Command
from gapmeter.runs.archive import unpacked
from gapmeter.runs.run import Conclusion, analysed, manifest_of
from gapmeter.scenarios.errors import did_you_mean
from gapmeter.scenarios.model import KEYS, SECTIONS
from gapmeter.scenarios.plain_file import read_plain
from gapmeter.scenarios.slo import Slo

if TYPE_CHECKING:
    from gapmeter.analysis.compare.searches import ServerCapacity
    from gapmeter.analysis.compare.sides import AnalysedRun


def compare_folders(
    sides: Sequence[str | Path | Sequence[str | Path]], factors: Sequence[str] = (), *, force: bool = False,
    in_turn: bool = False, runs: str | Path = "runs", command: str = "",
) -> Conclusion[Comparison] | Conclusion[CostTable]:  # fmt: skip
    """Compare what lies in folders, or in archives of some, and write ``compare.json`` and ``report.html``.

    A side is a list of them, or a single one. Runs by their latencies; where a search for capacity or a sweep is among
    them, all by what a request costs: there a side of several searches is one row, since they are searches of one and
    the same thing.

    Raises UserError for a folder that was not analysed, for one that is given twice, and for versions that cannot be
    read together.
    """
    check_factors(factors)
    paths = distinct(sides)
    command = command or str(_command_of(paths, factors, force=force))
    result = derive(paths, Asked(factors=tuple(factors), force=force, in_turn=in_turn), command)
    names = "|".join(",".join(path.resolve().name for path in side) for side in paths)
    with unless_refused(f"no comparison's folder can be made in {runs}"):
        digest = hashlib.sha256(names.encode()).hexdigest()
        folder = RunFolder.create(Path(runs), "compare", digest, parts=()).path
    with unless_refused(f"{folder} cannot be written"):
        placed = tuple(tuple(os.path.relpath(path, folder) for path in side) for side in paths)
        asked = result.asked.model_copy(update={"folders": placed})
        result = _write(folder, result.model_copy(update={"asked": asked}))
    if isinstance(result, CostTable):
        return Conclusion(folder, result, errors.NOT_VALID if result.verdict == NOT_COMPARABLE else errors.OK)
    return Conclusion(folder, result, errors.OK if result.comparable or result.forced else errors.NOT_VALID)


def of_the_valid(result: Comparison, folder: Path) -> Command | None:
    """What compares a refused comparison's sides without their runs that are not valid, where each keeps two."""
    valid = [
        [Path(os.path.normpath(path)) for path, found in zip(paths, side.verdicts, strict=True) if found != INVALID]
        for paths, side in zip(result.asked.sides(folder), result.sides, strict=True)
    ]
    all_are = sum(map(len, valid)) == sum(len(side.runs) for side in result.sides)
    if result.comparisons or all_are or min(map(len, valid), default=0) < 2:
        return None
    return _command_of(valid, result.asked.factors, force=False)


def _command_of(sides: Sequence[Sequence[Path]], factors: Iterable[str], *, force: bool) -> Command:
    """What repeats a comparison that no command asked for."""
    named = [",".join(map(str, side)) for side in sides]
    declared = [word for factor in factors for word in ("--factor", factor)]
    return Command(("gapmeter", "compare", *named, *declared, *["--force"] * force))


def compare_again(folder: Path, into: Path) -> None:
    """What an earlier comparison's folder says, made anew from what it compared, into another folder.

    Raises UserError, and NotReadable and OSError as reading it does.
    """
    kept = read_comparison(folder)
    _write(into, derive(kept.asked.sides(folder), kept.asked, kept.command))


def _write(folder: Path, result: Comparison | CostTable) -> Comparison | CostTable:
    from gapmeter.report import comparison, cost_table

    return cost_table.write(folder, result) if isinstance(result, CostTable) else comparison.write(folder, result)


def distinct(sides: Sequence[str | Path | Sequence[str | Path]]) -> list[list[Path]]:
    """The sides' paths; a side may be a single one. Raises UserError for one that is named twice."""
    paths = [[Path(path) for path in ([side] if isinstance(side, str | Path) else side)] for side in sides]
    seen: set[Path] = set()
    for path in (path for side in paths for path in side):
        if path.resolve() in seen:
            raise UserError(f"{path} is named twice; a run cannot be compared with itself", errors.USAGE)
        seen.add(path.resolve())
    return paths


@contextlib.contextmanager
def opened(sides: Sequence[Sequence[Path]]) -> Iterator[list[list[Path]]]:
    """The sides' folders; those of archives are unpacked for as long as the block lasts. Raises UserError."""
    with contextlib.ExitStack() as stack:
        yield [[stack.enter_context(unpacked(path)) if path.is_file() else path for path in side] for side in sides]


def derive(sides: Sequence[Sequence[Path]], asked: Asked, command: str) -> Comparison | CostTable:
    """A comparison from the folders alone. Raises UserError."""
    with opened(sides) as folders:
        if all(isinstance(manifest_of(path), Manifest) for side in folders for path in side):
            from gapmeter.analysis.compare.build import compare  # its import takes a second: mistakes are told before
            from gapmeter.analysis.compare.sides import Side

            read = [Side(tuple(map(_read_run, side))) for side in folders]
            for run, path in zip(chain(*(side.runs for side in read)), chain(*sides), strict=True):
                if not run.columns.count:
                    raise UserError(f"{path} measured no request; there is nothing to compare", errors.NOT_VALID)
            return compare(read, asked, command)
        from gapmeter.analysis.compare.cost_table import cost_table

        return cost_table([row for side in folders for row in _read_rows(side)], asked, command)


def _read_run(path: Path) -> AnalysedRun:
    from gapmeter.analysis.compare.sides import read_run

    with analysed(path):
        return read_run(path)


def _read_rows(side: Sequence[Path]) -> Sequence[ServerCapacity]:
    """What one folder says, of a sweep once for each setting; several are searches of one thing, and one row."""
    from gapmeter.analysis.compare.searches import NotOneSide, merge_searches

    found = [_read_capacities(path) for path in side]
    try:
        return found[0] if len(found) == 1 else [merge_searches(list(chain(*found)))]
    except NotOneSide as error:
        raise UserError(f"not comparable: {error}", errors.USAGE) from error


def _read_capacities(path: Path) -> list[ServerCapacity]:
    from gapmeter.analysis.compare.searches import read_capacities

    with analysed(path):
        found = read_capacities(path)
    if not found:
        raise UserError(f"{path} has no point with figures; there is nothing to compare", errors.NOT_VALID)
    return found


def read_comparison(folder: Path) -> Comparison | CostTable:
    """An earlier comparison's ``compare.json``. Raises NotReadable, OSError."""
    text = read_plain(folder / Comparison.FILE)
    of_costs = b'"kind": "costs"' in text[:200]  # a comparison of runs has no kind
    return (CostTable if of_costs else Comparison).parse(text, folder / Comparison.FILE)


def check_factors(factors: Iterable[str]) -> None:
    """Raises UserError, before any load, for a word that no run could have differed in."""
    from gapmeter.analysis.compare.sides import OPEN_FACTORS, OWN_FACTORS

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
    return growth_of(result, folder, run, limit, baseline, quiet=quiet)


def growth_of(
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
