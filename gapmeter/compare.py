"""``gapmeter compare``: runs that are there, or runs of a scenario made in turn, compared and written down."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gapmeter import errors
from gapmeter.errors import UserError
from gapmeter.records import RunFolder
from gapmeter.runs.damage import UNDERIVABLE, in_a_line
from gapmeter.study.resolve import resolve

if TYPE_CHECKING:
    from gapmeter.analysis.compare.result import Asked, Comparison
    from gapmeter.analysis.compare.sides import AnalysedRun

DOCUMENT = "compare.json"


@dataclass(frozen=True, slots=True)
class Outputs:
    """Where a comparison goes beside its folder."""

    as_json: bool = False
    markdown: Path | None = None
    quiet: bool = False

    def check(self) -> None:
        """Before any run, not after it: raises UserError for a file that could not be written."""
        path = self.markdown
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise UserError(f"{path} cannot be written: no such folder, or it is one itself", errors.USAGE)


@dataclass(frozen=True, slots=True)
class Compared:
    """A comparison's folder, its result, and the exit code that says how it went."""

    folder: Path
    result: Comparison
    exit_code: int


def compare_folders(
    sides: Sequence[Sequence[Path]], factors: Sequence[str] = (), *, force: bool = False, in_turn: bool = False,
    runs: Path = Path("runs"), command: str = "",
) -> Compared:  # fmt: skip
    """Compare runs by their folders, each side one or several, and write ``compare.json`` and ``report.html``.

    Raises UserError for a folder that is no analysed run, for one that is given twice, and for versions that cannot be
    read together.
    """
    _distinct(sides)
    from gapmeter.analysis.compare.result import Asked

    result, version = derive(sides, Asked(factors=tuple(factors), force=force, in_turn=in_turn), command)
    folder = _folder(runs, sides)
    from gapmeter.report import comparison

    folders = tuple(tuple(os.path.relpath(path, folder) for path in side) for side in sides)
    placed = result.model_copy(update={"asked": result.asked.model_copy(update={"folders": folders})})
    try:
        told = comparison.write(folder, placed, version)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror or error}", errors.USAGE) from error
    return Compared(folder, told, errors.OK if told.comparable or told.forced else errors.NOT_VALID)


def derive(sides: Sequence[Sequence[Path]], asked: Asked, command: str) -> tuple[Comparison, str]:
    """A comparison from the runs' folders alone, and the version of gapmeter that ran the baseline.

    Raises what ``compare_folders`` does.
    """
    from gapmeter.analysis.compare.build import compare  # its import takes a second: mistakes are told before
    from gapmeter.analysis.compare.sides import Side

    read = [Side(tuple(_read(path) for path in side)) for side in sides]
    for side, paths in zip(read, sides, strict=True):
        for each, path in zip(side.runs, paths, strict=True):
            if not each.run.count:
                raise UserError(f"{path} measured no request; there is nothing to compare", errors.NOT_VALID)
    return compare(read, asked, command), read[0].first.manifest.versions.get("gapmeter", "")


def compare_as_asked(asked: argparse.Namespace, command: str) -> int:
    """What ``gapmeter compare`` was told on its command line; returns the exit code. Raises UserError."""
    outputs = Outputs(asked.json, asked.markdown, asked.quiet)
    outputs.check()
    factors = list(asked.factor)
    if asked.run:
        factors += keys_of([*asked.a, *asked.b])
        sides = _runs_asked(asked)
    else:
        sides = _folders_asked(asked)
    result = compare_folders(
        sides, factors, force=asked.force, in_turn=bool(asked.run), runs=asked.runs, command=command
    )
    show(result, outputs)
    return result.exit_code


def _runs_asked(asked: argparse.Namespace) -> list[list[Path]]:
    if asked.sides:
        raise UserError(f"--run makes the runs itself; leave out {' '.join(asked.sides)}", errors.USAGE)
    if not (asked.a or asked.b):
        raise UserError("--run needs what differs: --a server.max_batch=4 --b server.max_batch=8", errors.USAGE)
    if asked.pairs < 1:
        raise UserError(f"--pairs {asked.pairs}: at least 1 run of each side", errors.USAGE)
    return run_in_turn(asked.run, asked.a, asked.b, asked.pairs, asked.overrides, asked.runs, quiet=asked.quiet)


def _folders_asked(asked: argparse.Namespace) -> list[list[Path]]:
    if asked.overrides:
        raise UserError("--set changes a scenario; it goes with --run SCENARIO", errors.USAGE)
    given = [*asked.sides, *([",".join(asked.a)] if asked.a else []), *([",".join(asked.b)] if asked.b else [])]
    sides = [[Path(part) for part in side.split(",") if part] for side in given]
    if len(sides) < 2 or not all(sides):
        text = "a comparison needs two sides: gapmeter compare RUN RUN, several runs a side as RUN,RUN"
        raise UserError(text, errors.USAGE)
    return sides


def run_in_turn(
    scenario: str, a: Sequence[str], b: Sequence[str], pairs: int, overrides: Sequence[str] = (),
    runs: Path = Path("runs"), *, quiet: bool = False,
) -> list[list[Path]]:  # fmt: skip
    """Run a scenario under two sets of overrides in the order A B B A …, so that a drift meets both sides alike.

    Returns the folders by side. Raises UserError as a run does, and when one is interrupted.
    """
    changes = [[*overrides, *a], [*overrides, *b]]
    for each in changes:
        resolve(scenario, each)
    from gapmeter.options import Options
    from gapmeter.run import run_scenario

    made: list[list[Path]] = [[], []]
    for number, side in enumerate(order_of(pairs)):
        _tell(f"run {number + 1} of {2 * pairs}: {'AB'[side]}, {' '.join((a, b)[side])}", quiet=quiet)
        options = Options(runs=runs, quiet=True, api_key=os.environ.get("GAPMETER_API_KEY"))
        result = run_scenario(scenario, changes[side], options)
        if result.exit_code == errors.INTERRUPTED:
            raise UserError(f"interrupted; {len(made[0]) + len(made[1])} runs are whole, in {runs}", errors.INTERRUPTED)
        made[side].append(result.folder)
    return made


def order_of(pairs: int) -> Iterator[int]:
    """0 for A and 1 for B: A B, then B A, and so on. The mean place of both sides is the same for even ``pairs``."""
    for number in range(pairs):
        yield from (0, 1) if number % 2 == 0 else (1, 0)


def keys_of(overrides: Sequence[str]) -> list[str]:
    """The scenario's keys that overrides set. Raises UserError for one that sets nothing."""
    for override in overrides:
        if "=" not in override:
            raise UserError(f"{override!r} is not KEY=VALUE; write server.max_batch=4", errors.USAGE)
    return list(dict.fromkeys(override.partition("=")[0].strip() for override in overrides))


def show(compared: Compared, outputs: Outputs) -> None:
    """Standard output for programs: the folder, or the document; people read standard error. Raises UserError."""
    from gapmeter.report import comparison, markdown, terminal
    from gapmeter.report.document import Facts

    document = comparison.document(compared.result)
    if outputs.markdown:
        try:
            outputs.markdown.write_text(markdown.text(document), encoding="utf-8")
        except OSError as error:
            raise UserError(f"{outputs.markdown} cannot be written: {error.strerror}", errors.USAGE) from error
    if outputs.as_json:
        json.dump({**compared.result.to_json(), "folder": str(compared.folder)}, sys.stdout)
        print(flush=True)
    else:
        print(compared.folder, flush=True)
    if not outputs.quiet:
        terminal.show(document, sys.stderr, links=Facts([("report", str(compared.folder / "report.html"))]))


def _distinct(sides: Sequence[Sequence[Path]]) -> None:
    seen: set[Path] = set()
    for path in (path for side in sides for path in side):
        if path.resolve() in seen:
            raise UserError(f"{path} is named twice; a run compared with itself differs in nothing", errors.USAGE)
        seen.add(path.resolve())


def _read(path: Path) -> AnalysedRun:
    from gapmeter.analysis.compare.sides import read_run
    from gapmeter.analysis.results import NotReadable

    try:
        return read_run(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        missing = Path(str(error.filename or "manifest.json")).name
        remedy = "" if missing == "manifest.json" else f"; analyse it first: gapmeter report {path}"
        raise UserError(f"{path} is not an analysed run's folder: no {missing}{remedy}", errors.USAGE) from error
    except NotReadable as error:
        raise UserError(f"not comparable: {error}", errors.NOT_VALID) from error
    except (OSError, *UNDERIVABLE) as error:
        text = f"{path} cannot be read as a run: {in_a_line(error)}; analyse it again: gapmeter report {path}"
        raise UserError(text, errors.USAGE) from error


def _folder(runs: Path, sides: Sequence[Sequence[Path]]) -> Path:
    names = "|".join(",".join(path.resolve().name for path in side) for side in sides)
    try:
        return RunFolder.create(runs, "compare", hashlib.sha256(names.encode()).hexdigest(), parts=()).path
    except OSError as error:
        text = f"no comparison's folder can be made in {runs}: {error.strerror or error}"
        raise UserError(text, errors.USAGE) from error


def _tell(text: str, *, quiet: bool) -> None:
    if not quiet:
        print(f"gapmeter: {text}", file=sys.stderr, flush=True)
