"""A sweep: every point of a scenario's grid is a run of its own, on a server that is started anew only where it must.

What is finished is never run twice: ``resume`` takes up a folder where an interruption left it.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gapmeter import errors
from gapmeter.errors import UserError, reason_of
from gapmeter.options import Options, RunResult, silent, tell
from gapmeter.records import RunFolder
from gapmeter.scenarios import Point, Scenario
from gapmeter.study.keys import Keys
from gapmeter.study.manifest import describe_run, without_keys
from gapmeter.study.resolve import asks_for_model, resolve, resolve_points
from gapmeter.study.session import Session, open_session, placed
from gapmeter.study.study import SWEEP, Visit, make_parent, take_up, visits

_OURS = ("server.max_batch", "server.precision", "server.max_model_len", "server.args")
_COMPLETE, _INTERRUPTED = "complete", "interrupted"


@dataclass(frozen=True, slots=True)
class _Sweep:
    """What is run, and where it lies."""

    name: str
    overrides: tuple[str, ...]
    scenario: Scenario
    points: tuple[Point, ...]
    order: list[list[Visit]]
    folder: RunFolder
    options: Options

    def path(self, visit: Visit) -> Path:
        """The folder of one run."""
        point, repeat = visit
        return point_path(self.folder.path, point, self.points[point].values) / f"r{repeat + 1}"

    def number(self, visit: Visit) -> int:
        """Numbers a run among all, the same after a resumption: no two of them ask with the same texts."""
        return [each for group in self.order for each in group].index(visit)


def run_sweep(
    name: str, overrides: Sequence[str] = (), options: Options = Options(), resume: Path | None = None
) -> RunResult:
    """Run all points of a scenario's sweep, each ``repeat`` times, and put them side by side.

    A point that cannot be run (its server does not start, say) is a failed point with its reason, and the sweep goes
    on. ``resume``: the folder of an earlier, interrupted one of the same scenario. After Ctrl-C what was finished by
    then is reported, with exit code INTERRUPTED. Raises UserError for what the user can mend.
    """
    sweep, manifest = _prepared(name, overrides, options, resume)
    say = silent if options.quiet else tell
    say(f"sweep of {len(sweep.points)} points, {sum(map(len, sweep.order))} runs: {sweep.folder.path}")
    try:
        for group in sweep.order:
            _run_group(sweep, group, say)
        ended = _COMPLETE
    except KeyboardInterrupt:
        ended = _INTERRUPTED
    except UserError as error:
        if error.exit_code != errors.INTERRUPTED:
            raise
        ended = _INTERRUPTED
    sweep.folder.write_json(sweep.folder.manifest, manifest | {"status": ended})
    if ended == _COMPLETE:
        return report_sweep(sweep.folder.path, quiet=options.quiet)
    again = resume_command(str(manifest["command"]), sweep.folder.path)
    if not any(finished(path) for path in _all_paths(sweep)):
        raise UserError(f"interrupted before a point was finished; go on with: {again}", errors.INTERRUPTED)
    tell(f"interrupted; what is finished is kept, go on with: {again}")
    return report_sweep(sweep.folder.path, quiet=options.quiet, code=errors.INTERRUPTED)


def report_sweep(path: Path, *, quiet: bool = False, code: int | None = None) -> RunResult:
    """Summary and page of a sweep from its points' folders.

    ``code``: the exit code, None for what the points say. Raises UserError when the results cannot be written.
    """
    from gapmeter.analysis.sweep import analyse_points  # its import takes a second: mistakes are told before
    from gapmeter.report.table import print_sweep

    try:
        summary = analyse_points(RunFolder(path))
    except OSError as error:
        raise UserError(f"{path}: the results cannot be written: {reason_of(error)}", errors.NOT_VALID) from error
    code = int(summary["exit_code"]) if code is None else code
    if not quiet:
        print_sweep(summary, path, code)
    return RunResult(path, summary, code)


def point_path(folder: Path, point: int, values: Mapping[str, object]) -> Path:
    """Where the runs of a point lie: numbered, and named by its values."""
    words = "-".join(f"{key.rpartition('.')[2]}={_spelled(value)}" for key, value in values.items())
    return folder / "points" / f"{point + 1:03d}-{re.sub(r'[^A-Za-z0-9_.=-]+', '_', words)[:80]}"


def resume_command(command: str, folder: Path) -> str:
    """What takes an interrupted sweep up again."""
    flag = f"--resume {shlex.quote(str(folder))}"
    bare = re.sub(r" --resume(=| )\S+", "", command)
    return f'{bare} ARGS="{flag}"' if command.startswith("make ") else f"{bare} {flag}"


def _prepared(
    name: str, overrides: Sequence[str], options: Options, resume: Path | None
) -> tuple[_Sweep, dict[str, Any]]:
    scenario, points = resolve(name, overrides), resolve_points(name, overrides)
    _refuse_what_runs_already(points)
    order = visits([_server_key(point.scenario) for point in points], scenario.repeat, scenario.seed)
    words = ["gapmeter", "run", name, *(word for override in overrides for word in ("--set", override))]
    options = replace(options, command=options.command or shlex.join(words))
    folder, manifest = take_up(resume, scenario, SWEEP) if resume else _begun(scenario, points, order, options)
    return _Sweep(name, tuple(overrides), scenario, points, order, folder, options), manifest


def _refuse_what_runs_already(points: Sequence[Point]) -> None:
    """A server that is not ours stays as it is: points that differ in its settings would be the same one."""
    for point in points:
        fixed = [key for key in point.values if key.startswith(_OURS)]
        if point.scenario.server.engine == "attach" and fixed:
            text = f"{fixed[0]} cannot be swept over on a server that runs already; launch it, or sweep over the load"
            raise UserError(f"sweep: {text}", errors.BAD_SCENARIO)


def _begun(
    scenario: Scenario, points: Sequence[Point], order: list[list[Visit]], options: Options
) -> tuple[RunFolder, dict[str, Any]]:
    """A fresh folder with its manifest."""
    folder = make_parent(options.runs, scenario, SWEEP)
    _tell_of_unfinished(options, scenario, folder.path)
    keys = list(dict.fromkeys(key for point in points for key in point.values))
    manifest = describe_run(scenario.to_dict(), scenario.digest(), options.command) | {
        "kind": SWEEP,
        "repeat": scenario.repeat,
        "points": [
            {"values": dict(point.values), "resolved": _resolved(point, keys), "digest": point.scenario.digest(),
             "folder": str(point_path(folder.path, at, point.values).relative_to(folder.path))}
            for at, point in enumerate(points)
        ],
        "order": order,
    }  # fmt: skip
    manifest = without_keys(manifest, Keys.within(manifest["scenario"], options.api_key))
    folder.write_json(folder.manifest, manifest)
    return folder, manifest


def _tell_of_unfinished(options: Options, scenario: Scenario, own: Path) -> None:
    """Whoever begins a sweep again may have meant to go on with it."""
    for path in sorted(options.runs.glob(f"*-{scenario.name}-{SWEEP}-{scenario.digest()[:6]}*"), reverse=True):
        with contextlib.suppress(OSError, ValueError):
            if path != own and RunFolder(path).read_manifest()["status"] != _COMPLETE and not options.quiet:
                tell(f"an unfinished sweep of the same lies in {path}; to take it up instead, add --resume {path}")
                return


def _resolved(point: Point, keys: Sequence[str]) -> dict[str, Any]:
    """What a point has at every swept key, also at those that it leaves to the scenario; None where that is unset."""
    found: dict[str, Any] = {}
    for key in keys:
        value: Any = point.scenario.to_dict()
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        found[key] = point.values.get(key, value)
    return found


def _server_key(scenario: Scenario) -> str:
    """Equal for scenarios that one server can serve."""
    return json.dumps([scenario.to_dict()["server"], placed(scenario).server], sort_keys=True, default=str)


def _run_group(sweep: _Sweep, group: Sequence[Visit], say: Any) -> None:
    """All runs of one server; a server that dies is started again for what is left."""
    left = [visit for visit in group if not finished(sweep.path(visit))]
    attempts = 0
    while left:
        first = sweep.points[left[0][0]].scenario
        home = sweep.folder.path / "servers" / f"{sweep.order.index(list(group)) + 1}.{attempts}"
        attempts += 1
        try:
            with open_session(first, sweep.options, home=home, model_named=asks_for_model(sweep.overrides)) as session:
                _run_one(sweep, session, left.pop(0), say)  # even on a dead one: each start takes a run off the list
                while left and session.alive():
                    _run_one(sweep, session, left.pop(0), say)
        except UserError as error:
            _raise_if_not_a_points(error)
            for visit in left:
                _fail(sweep, visit, error)
                say(f"{_called(sweep, visit)} failed: {error}")
            return


def _run_one(sweep: _Sweep, session: Session, visit: Visit, say: Any) -> None:
    """One run. Raises KeyboardInterrupt when it was interrupted."""
    point = sweep.points[visit[0]]
    path = sweep.path(visit)
    say(_called(sweep, visit))
    shutil.rmtree(path, ignore_errors=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    more = {"sweep": {"folder": str(sweep.folder.path), "point": visit[0], "values": dict(point.values)}}
    try:
        result = session.load(
            point.scenario, sweep.number(visit), into=path, command=_command(sweep, point), more=more, show=False
        )
    except UserError as error:
        _raise_if_not_a_points(error)
        _fail(sweep, visit, error)
        say(f"{_called(sweep, visit)} failed: {error}")
        return
    if result.exit_code == errors.INTERRUPTED:
        raise KeyboardInterrupt
    if result.summary["verdict"] == "INVALID":
        say(
            f"{_called(sweep, visit, done=True)} is not valid: {'; '.join(result.summary['invalid_reasons'])}; going on"
        )


def _raise_if_not_a_points(error: UserError) -> None:
    """What would befall every point ends the sweep."""
    if error.exit_code in (errors.INTERRUPTED, errors.USAGE):
        raise error


def _fail(sweep: _Sweep, visit: Visit, error: UserError) -> None:
    """Note in the point's folder why there is no run."""
    path = sweep.path(visit)
    path.mkdir(parents=True, exist_ok=True)
    folder = RunFolder(path)
    folder.write_json(path / "failed.json", {"reason": str(error), "exit_code": error.exit_code})


def finished(path: Path) -> bool:
    """Whether a run lies there that went to its end and was analysed."""
    with contextlib.suppress(OSError, ValueError):
        return (path / "summary.json").exists() and RunFolder(path).read_manifest().get("status") == _COMPLETE
    return False


def _called(sweep: _Sweep, visit: Visit, *, done: bool = False) -> str:
    point, repeat = visit
    values = ", ".join(f"{key} {_spelled(value)}" for key, value in sweep.points[point].values.items())
    ended = sum(finished(sweep.path(each)) for group in sweep.order for each in group)
    of = f", repeat {repeat + 1} of {sweep.scenario.repeat}" if sweep.scenario.repeat > 1 else ""
    return f"run {ended + (not done)} of {sum(map(len, sweep.order))}: {values}{of}"


def _command(sweep: _Sweep, point: Point) -> str:
    """What runs this point alone."""
    kept = [each for each in sweep.overrides if not each.lstrip().startswith(("sweep", "repeat"))]
    own = [f"{key}={json.dumps(value)}" for key, value in point.values.items()]
    words = [word for each in (*kept, "sweep=[]", "repeat=1", *own) for word in ("--set", each)]
    return shlex.join(["gapmeter", "run", sweep.name, *words])


def _spelled(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _all_paths(sweep: _Sweep) -> Iterator[Path]:
    return (sweep.path(visit) for group in sweep.order for visit in group)
