"""A sweep: every point of a scenario's grid is a run of its own, on a server that is started anew only where it must.

What is finished is never run twice: ``resume`` takes up a folder where an interruption left it.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gapmeter import errors
from gapmeter.analysis.judge.words import outage_text
from gapmeter.analysis.numbers import counted, plain
from gapmeter.analysis.results.manifest import SweepManifest, SweepPlace, SweepPoint
from gapmeter.analysis.results.sweep import FailedRun, SweepResult
from gapmeter.errors import UserError, unless_refused
from gapmeter.keys import Keys
from gapmeter.loadgen.arrivals import warmup_span
from gapmeter.options import Options, tell
from gapmeter.records import RunFolder
from gapmeter.report.command import Command
from gapmeter.runs.run import Conclusion
from gapmeter.scenarios.model import Load, Scenario
from gapmeter.scenarios.read import Point
from gapmeter.study.conclusion import describe, show
from gapmeter.study.resolve import resolve, resolve_points, settings_of
from gapmeter.study.session import Session, Visit, check_options, open_session, server_key
from gapmeter.study.study import Study, is_finished, new_texts, study_folder
from gapmeter.study.target import why_gone

Place = tuple[int, int]  # a point and a repeat, both from 0


def order_of(servers: Sequence[Hashable], repeats: int, seed: int) -> list[list[Place]]:
    """Which point is run when: a list for each server that is started. ``servers``: each point's, equal for one.

    A machine's speed drifts: with points in the order of their values the drift would look like an effect. Every
    repeat visits all points of its server in an order of its own before the next one begins; the servers' order is
    drawn too. The same seed gives the same order.
    """
    rng = random.Random(f"sweep {seed}")
    by_server: dict[Hashable, list[int]] = {}
    for point, server in enumerate(servers):
        by_server.setdefault(server, []).append(point)
    groups = list(by_server.values())
    rng.shuffle(groups)
    return [[(point, repeat) for repeat in range(repeats) for point in rng.sample(group, len(group))]
            for group in groups]  # fmt: skip


def run_sweep(
    name: str | Path, overrides: Sequence[str] = (), options: Options = Options(), resume: Path | None = None
) -> Conclusion[SweepResult]:
    """Run all points of a scenario's sweep, each ``repeat`` times, and put them side by side.

    A point that cannot be run (its server does not start, say) is a failed point with its reason, and the sweep goes
    on. ``resume``: the folder of an earlier, interrupted one of the same scenario. After Ctrl-C what was finished by
    then is reported, with exit code INTERRUPTED. Raises UserError for mistakes that the user can fix.
    """
    with _prepared(name, tuple(overrides), options, resume) as sweep:
        study, runs = sweep.study, len(sweep.places)
        takes = _takes([point.scenario.load for point in sweep.points], sweep.scenario.repeat)
        options.say(f"sweep of {counted(len(sweep.points), 'point')}, {counted(runs, 'run')}{takes}: {study.path}")
        try:
            for number, group in enumerate(sweep.order, 1):
                sweep.run_group(number, group)
            study.note(status="complete")
        except KeyboardInterrupt:
            study.note(status="interrupted")
            again = study.command.resumed(study.path)
            if not any(is_finished(sweep.path(place)) for place in sweep.places):
                text = f"interrupted before a point was finished; continue with: {again}"
                raise UserError(text, errors.INTERRUPTED) from None
            tell(f"interrupted; what is finished is kept, continue with: {again}")
        with study.reporting():
            return report_sweep(study.path, quiet=options.quiet)


def report_sweep(path: Path, *, quiet: bool) -> Conclusion[SweepResult]:
    """Summary and page of a sweep from its points' folders. Raises UserError when they cannot be written."""
    with unless_refused(f"{path}: the results cannot be written", errors.NOT_VALID):
        result = analyse_points(RunFolder(path))
    code = result.exit_code
    if not quiet:
        from gapmeter.report import sweep

        meanings = {errors.OK: "every point was measured", errors.NOT_VALID: "not every point is a valid measurement"}
        document = sweep.document(result, SweepManifest.read(path))
        show(document, path, errors.exit_words(code, meanings.get(code, "")))
    return Conclusion(path, result, code)


def analyse_points(folder: RunFolder) -> SweepResult:
    """What the points say together, with its page, into the sweep's folder. Raises NotReadable, OSError."""
    from gapmeter.analysis.sweep.build import analyse_sweep  # its import takes a second: mistakes are reported before
    from gapmeter.report import sweep

    return sweep.write(folder, analyse_sweep(folder))


@dataclass(frozen=True)
class _Sweep:
    """What is run, and where it lies. ``texts``: added to each run's number, by which its texts are new."""

    texts: int
    scenario: Scenario
    points: tuple[Point, ...]
    order: list[list[Place]]
    study: Study[SweepManifest]

    @cached_property
    def places(self) -> list[Place]:
        """All in their order, the same after a resumption."""
        return [place for group in self.order for place in group]

    def path(self, place: Place) -> Path:
        """The folder of one run."""
        point, repeat = place
        return self.study.path / _folder_name(point, self.points[point].values) / f"r{repeat + 1}"

    def run_group(self, number: int, group: Sequence[Place]) -> None:
        """All runs of one server; a server that dies is started again for what is left."""
        left = [place for place in group if not is_finished(self.path(place))]
        attempts = 0
        while left:
            home = self.study.path / "servers" / f"{number}.{attempts}"
            attempts += 1
            with self.study.writing():
                home.mkdir(parents=True, exist_ok=True)
            try:
                with open_session(self.points[left[0][0]].scenario, self.study.options, home=home) as session:
                    self._run(session, left.pop(0))  # even on a dead one: each start takes a run off the list
                    while left and session.alive():
                        self._run(session, left.pop(0))
            except UserError as error:
                for place in left:
                    self._note_failure(place, error)
                return

    def _run(self, session: Session, place: Place) -> None:
        """One run. Raises KeyboardInterrupt when it was interrupted, UserError when somebody else's server is gone."""
        point = self.points[place[0]]
        self.study.options.say(self._title(place, ended=False))
        of = SweepPlace(folder=str(self.study.path), point=place[0], values=dict(point.values))
        alone = self.study.command.of_one_point(*settings_of(point))
        visit = Visit(point.scenario, self.texts + self.places.index(place), self.path(place), alone, sweep=of)
        try:
            with self.study.afresh(self.path(place)):
                result = session.visit(visit)
        except UserError as error:
            self._note_failure(place, error)
            return
        if result.exit_code == errors.INTERRUPTED:
            raise KeyboardInterrupt
        url, outage = session.target.about.url, result.result.outage
        if session.process is None and (outage or not result.result.counts.succeeded):
            gone = why_gone(url, self.study.options.api_key)
            away = outage_text(outage) if outage and "refused" in outage.failed else ""  # started again since
            if why := gone or away:
                lost = UserError(f"the server at {url} was gone: {why}", errors.UNREACHABLE)
                self._note_failure(place, lost)
                if gone:
                    raise lost
                return
        if result.result.verdict == "INVALID":
            why = "; ".join(result.result.invalid_reasons)
            self.study.options.say(f"{self._title(place, ended=True)} is not valid: {why}; going on")

    def _note_failure(self, place: Place, error: UserError) -> None:
        """Say why there is no run, in the point's folder too; what would fail every point ends the sweep."""
        if error.exit_code == errors.USAGE:
            raise error
        path = self.path(place)
        with self.study.writing():
            path.mkdir(parents=True, exist_ok=True)
            FailedRun(reason=str(error), exit_code=error.exit_code).write(path)
        self.study.options.say(f"{self._title(place, ended=False)} failed: {error}")

    def _title(self, place: Place, *, ended: bool) -> str:
        point, repeat = place
        values = ", ".join(f"{key} {_spelled(value)}" for key, value in self.points[point].values.items())
        number = sum(is_finished(self.path(each)) for each in self.places) + (not ended)
        of = f", repeat {repeat + 1} of {self.scenario.repeat}" if self.scenario.repeat > 1 else ""
        return f"run {number} of {len(self.places)}: {values}{of}"


def _takes(loads: Sequence[Load], repeats: int) -> str:
    """How long all loads take, without the starts of servers; "" where it is requests that end one."""
    spans_ns = [(load.duration_ns, load.longest_ns) for load in loads if load.duration_ns and load.longest_ns]
    if len(spans_ns) < len(loads):
        return ""
    warmups_ns = sum(warmup_span(load)[0] for load in loads)
    all_ns = [repeats * (warmups_ns + sum(each)) for each in zip(*spans_ns, strict=True)]
    per_ns, unit = (60e9, "min") if all_ns[-1] >= 100e9 else (1e9, "s")
    least, most = (plain(ns / per_ns, 2) for ns in all_ns)
    return f", {least} {unit} of load" if least == most else f", {least} to {most} {unit} of load"


@contextlib.contextmanager
def _prepared(name: str | Path, overrides: tuple[str, ...], options: Options, resume: Path | None) -> Iterator[_Sweep]:
    scenario, points = resolve(name, overrides), resolve_points(name, overrides)
    for point in points:
        check_options(point.scenario, options)
    order = order_of([server_key(point.scenario) for point in points], scenario.repeat, scenario.seed)
    with study_folder(options.runs, scenario, SweepManifest, resume) as (path, manifest):
        if manifest is None:
            _mention_unfinished(options, scenario, path)
            swept = list(dict.fromkeys(key for point in points for key in point.values))
            keys = Keys.within(scenario.to_dict(), options.api_key)
            described = tuple(
                SweepPoint(
                    values=keys.out_of_value(point.values),
                    resolved=keys.out_of_value(_resolved(point, swept)),
                    digest=point.scenario.digest(),
                    folder=keys.out_of(_folder_name(number, point.values)),
                )
                for number, point in enumerate(points)
            )
            command = options.command or Command.of("run", name, overrides, options.flags)
            manifest = SweepManifest(
                **dict(describe(scenario, command, keys)), repeat=scenario.repeat, points=described,
                order=tuple(map(tuple, order)),
            )  # fmt: skip
        study = Study(path, manifest, options)
        study.note()
        yield _Sweep(new_texts(scenario) if resume else 0, scenario, points, order, study)


def _mention_unfinished(options: Options, scenario: Scenario, own: Path) -> None:
    """A sweep that is begun again may have been meant to go on."""
    for path in sorted(options.runs.glob(f"*-{scenario.name}-sweep-{scenario.digest()[:6]}*"), reverse=True):
        with contextlib.suppress(OSError, ValueError):
            if path != own and SweepManifest.read(path).status != "complete":
                options.say(
                    f"an unfinished sweep of the same points is in {path}; to continue it instead, add --resume {path}"
                )
                return


def _resolved(point: Point, keys: Sequence[str]) -> dict[str, Any]:
    """What a point has at every swept key, also at those that it leaves to the scenario; None where that is unset."""
    resolved: dict[str, Any] = {}
    for key in keys:
        value: Any = point.scenario.to_dict()
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        resolved[key] = point.values.get(key, value)
    return resolved


def _folder_name(point: int, values: Mapping[str, object]) -> str:
    """Where the runs of a point lie: numbered, and named by its values."""
    words = "-".join(f"{key.rpartition('.')[2]}={_spelled(value)}" for key, value in values.items())
    return f"points/{point + 1:03d}-{re.sub(r'[^A-Za-z0-9_.=-]+', '_', words)[:80]}"


def _spelled(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
