"""CI: a run against its baseline, its exit code, and annotations beside the code on GitHub."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gapmeter import errors
from gapmeter.errors import UserError
from gapmeter.records import RunFolder
from gapmeter.runs.parts import parts_of, want_one_run
from gapmeter.scenarios import Scenario

if TYPE_CHECKING:
    from gapmeter.run import RunResult

DEFAULT_LIMIT = "5%"
_LEVELS = {"FAIL": "error", "INCONCLUSIVE": "warning", "REGRESSED": "error", "UNDECIDED": "warning",
           "NOT ESTIMABLE": "warning"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Baseline:
    """What a run is held against: a run's folder, the growth that is allowed (a fraction), the keys that may differ."""

    folder: Path
    limit: float
    factors: tuple[str, ...] = ()


def read_baseline(
    folder: Path | None, limit: str | None, factors: Sequence[str], scenario: Scenario
) -> Baseline | None:
    """From the command line; None without one. Raises UserError, before any load, for what could not be judged."""
    if folder is None:
        if limit is not None or factors:
            raise UserError("--max-regression and --factor go with --baseline RUN", errors.USAGE)
        return None
    for name in ("manifest.json", "summary.json"):
        if not (folder / name).is_file():
            raise UserError(f"--baseline {folder} is not an analysed run's folder: no {name}", errors.USAGE)
    want_one_run(RunFolder(folder))
    if scenario.sweep:
        raise UserError("--baseline holds one scenario against one run; leave out the sweep", errors.USAGE)
    if not any(slo.percentile is not None for slo in scenario.slo):
        text = "--baseline judges the percentiles that SLOs name, and the scenario names none"
        raise UserError(f"{text}; --set 'slo=[\"ttft p99 <= 1 s\"]'", errors.USAGE)
    return Baseline(folder, read_limit(limit or DEFAULT_LIMIT), tuple(factors))


def read_limit(text: str) -> float:
    """``5%`` as 0.05. Raises UserError for anything else."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
    if not found:
        raise UserError(f"--max-regression {text!r} is not a share; write 5%", errors.USAGE)
    return float(found[1]) / 100


def held_against(
    results: Iterable[RunResult], repeats: int, baseline: Baseline, runs: Path, *, quiet: bool
) -> Iterator[RunResult]:
    """The same results; the last of ``repeats`` also says how all of them compare with the baseline.

    Its summary has ``regression``, and its exit code is 99 for a regression, 98 where the runs are not comparable.
    Raises UserError as a comparison does.
    """
    folders: list[Path] = []
    for result in results:
        folders.append(result.folder)
        whole = len(folders) == repeats and result.exit_code != errors.INTERRUPTED
        yield _judged(result, folders, baseline, runs, quiet=quiet) if whole else result


def _judged(result: RunResult, folders: Sequence[Path], baseline: Baseline, runs: Path, *, quiet: bool) -> RunResult:
    from gapmeter.analysis.compare.regression import NOT_COMPARABLE, REGRESSED, judge_regression
    from gapmeter.compare import compare_folders

    compared = compare_folders([[baseline.folder], folders], baseline.factors, runs=runs)
    slos = [(s["metric"], float(s["percentile"])) for s in result.summary["slo"] if s["percentile"] is not None]
    told = judge_regression(compared.document, slos, baseline.limit, baseline.folder.name)
    told["folder"] = str(compared.folder)
    if not quiet:
        print(f"gapmeter: {told['status']} against {baseline.folder}: {told['sentence']}", file=sys.stderr)
        print(f"gapmeter: {compared.folder / 'report.html'}", file=sys.stderr)
    code = {REGRESSED: errors.SLO_MISSED, NOT_COMPARABLE: errors.NOT_VALID}.get(told["status"], errors.OK)
    return replace(result, summary={**result.summary, "regression": told}, exit_code=max(result.exit_code, code))


def wants_annotations(*, asked: bool) -> bool:
    """Whether somebody shows them: GitHub does, and whoever asks."""
    return asked or os.environ.get("GITHUB_ACTIONS") == "true"


def annotate(summary: Mapping[str, Any]) -> None:
    """GitHub's workflow commands on standard error, which its runner reads too: standard output is for programs."""
    for line in commands_of(summary):
        print(line, file=sys.stderr)


def commands_of(summary: Mapping[str, Any]) -> list[str]:
    """A command for each SLO that was missed or undecided, for a run that is not valid, and for each regression.

    Of a sweep, for each of its points; of a capacity search, where it did not find what was asked.
    """
    return [line for part in parts_of(summary) for line in _commands_of_run(part)]


def _commands_of_run(summary: Mapping[str, Any]) -> list[str]:
    name = summary.get("name") or "run"
    lines = [_command("error", f"{name} is not valid", reason) for reason in summary.get("invalid_reasons", ())]
    lines += [
        _command(_LEVELS[row["status"]], f"{name}: {row['text']} {row['status']}", row["sentence"])
        for row in summary.get("slo", ())
        if row["status"] in _LEVELS
    ]
    regression = summary.get("regression") or {}
    if regression.get("status") == "NOT COMPARABLE":
        lines.append(_command("error", f"{name} is not comparable with its baseline", regression["sentence"]))
    lines += [
        _command(_LEVELS[row["status"]], f"{name}: {row['name']} {row['status']}", row["sentence"])
        for row in regression.get("rows", ())
        if row["status"] in _LEVELS
    ]
    return lines


def _command(level: str, title: str, message: str) -> str:
    """Percent signs and line ends are escaped as the runner decodes them; in a title, colons and commas too."""
    escaped = message.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    head = title.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A").replace(":", "%3A").replace(",", "%2C")
    return f"::{level} title={head}::{escaped}"
