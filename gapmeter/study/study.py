"""Runs of a scenario, and studies: loads that are visited in an order, in one folder, resumable.

A sweep and a capacity search keep servers up for their loads; repeats, and the runs of a comparison, have a server of
their own each.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import quote, urlsplit

from gapmeter import errors
from gapmeter.analysis.results import Manifest, ManifestBase, NotReadable, RunResult
from gapmeter.analysis.results.sweep import FailedRun
from gapmeter.errors import UserError, reason_of, remedy_of, unless_refused
from gapmeter.options import Options, tell
from gapmeter.records import RunFolder
from gapmeter.report.command import Command
from gapmeter.runs.lock import locked
from gapmeter.runs.run import STUDIES, Conclusion, manifest_of
from gapmeter.scenarios.model import Scenario
from gapmeter.study.companions import page_server
from gapmeter.study.conclusion import raise_if_gone
from gapmeter.study.patience import shortage
from gapmeter.study.resolve import resolve
from gapmeter.study.session import Visit, check_options, placed, prepare_session

M = TypeVar("M", bound=ManifestBase)


def visit_in_turn(visits: Iterable[Visit], options: Options) -> Iterator[Conclusion[RunResult]]:
    """Each on a server of its own, one after the other; ends after one that was interrupted. Raises UserError."""
    for visit in visits:
        session = prepare_session(visit.scenario, options)
        yield (conclusion := session.visit(visit, alone=True))
        if conclusion.exit_code == errors.INTERRUPTED:
            return


def new_texts(scenario: Scenario) -> int:
    """A number for the first of some runs, with which they ask a server that goes on what no run before them did.

    It remembers what it was asked. At random: whoever asked it before has left no count. 0 for a server of our own.
    """
    return secrets.randbelow(1 << 31) if scenario.server.engine == "attach" else 0


class Study(Generic[M]):
    """A folder of many runs and its manifest, which says what is to be run and what has been."""

    def __init__(self, path: Path, manifest: M, options: Options) -> None:
        self.path, self.manifest, self.options = path, manifest, options

    @property
    def command(self) -> Command:
        """What started it."""
        return Command.parse(self.manifest.command)

    def note(self, **fields: Any) -> None:
        """Write into the manifest, at once. Raises UserError as ``writing``."""
        self.manifest = self.manifest.model_copy(update=fields)
        with self.writing():
            self.manifest.write(self.path)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Around what is made in its folder. Raises UserError, with what continues it, where that cannot be."""
        raise_if_gone(self.path)
        try:
            yield
        except OSError as error:
            raise_if_gone(self.path)
            text = f"{self.path} cannot be written: {reason_of(error)}; {remedy_of(error)}, then continue with:"
            raise UserError(f"{text} {self.command.resumed(self.path)}", errors.NOT_VALID) from error

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Around what is made of its loads when they are over. Raises UserError where that was interrupted."""
        try:
            yield
        except KeyboardInterrupt:
            text = f"interrupted while it was analysed; what it found: {Command.of('report', self.path)}"
            raise UserError(text, errors.INTERRUPTED) from None

    @contextlib.contextmanager
    def afresh(self, run: Path) -> Iterator[None]:
        """Around one of its loads: what an earlier attempt left in that run's folder goes.

        Raises KeyboardInterrupt when it was interrupted before it could be read, UserError as ``Session.visit``.
        """
        with self.writing():
            shutil.rmtree(run, ignore_errors=True)
            run.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield
        except UserError as error:
            if error.exit_code == errors.INTERRUPTED:
                raise KeyboardInterrupt from error
            raise


@contextlib.contextmanager
def study_folder(
    runs: Path, scenario: Scenario, manifest_type: type[M], resume: Path | None = None
) -> Iterator[tuple[Path, M | None]]:
    """A study's folder, kept from other processes meanwhile: a fresh one, or that to ``resume`` with its manifest.

    Raises UserError when none can be made, and for a folder to resume that is not of this scenario, see ``is_of``.
    """
    path, manifest = resume, None
    if path is None:
        kind = manifest_type.model_fields["kind"].default
        with unless_refused(f"no folder can be made in {runs}"):
            path = RunFolder.create(runs, f"{scenario.name}-{kind}", scenario.digest(), parts=()).path
    else:
        manifest = _manifest_to_resume(path, scenario, manifest_type)
    with locked(path):
        yield path, manifest


def _manifest_to_resume(path: Path, scenario: Scenario, manifest_type: type[M]) -> M:
    what, _ = STUDIES[str(manifest_type.model_fields["kind"].default)]
    try:
        manifest = manifest_of(path)
    except UserError as error:
        raise UserError(f"--resume: {error}", errors.USAGE) from error
    if not isinstance(manifest, manifest_type):
        raise UserError(f"--resume: {path} is not the folder of {what}", errors.USAGE)
    if not is_of(manifest, scenario):
        text = f"--resume: {path} is {what} of another scenario, price or telemetry; begun with: {manifest.command}"
        raise UserError(text, errors.USAGE)
    return manifest.model_copy(update={"status": "running"})


def is_of(manifest: ManifestBase, scenario: Scenario) -> bool:
    """Whether a study is of this scenario, at its prices and with its telemetry: what was run before keeps its own."""
    asked = scenario.to_dict()
    same = all(manifest.scenario.get(key) == asked[key] for key in ("cost", "telemetry"))  # which no digest has in it
    return same and manifest.scenario_digest == scenario.digest()


def is_finished(run: Path) -> bool:
    """Whether a run lies there that went to its end, with a server that lived, and was analysed."""
    with contextlib.suppress(OSError, NotReadable):
        is_measured = (run / RunResult.FILE).exists() and not (run / FailedRun.FILE).exists()
        return is_measured and Manifest.read(run).status == "complete"
    return False


def run_scenario(
    name: str | Path, overrides: Sequence[str] = (), options: Options = Options()
) -> Conclusion[RunResult]:
    """Run a scenario (a name or a file) once, whatever its ``repeat`` says, and analyse it.

    An interrupted run, or one that lost its server, is still analysed. Raises UserError for mistakes that the user can
    fix.
    """
    (conclusion,) = run_repeats(name, overrides, options, 1)
    return conclusion


def run_repeats(
    name: str | Path, overrides: Sequence[str] = (), options: Options = Options(), repeats: int | None = None, *,
    again: bool = False,
) -> Iterator[Conclusion[RunResult]]:  # fmt: skip
    """Runs of a scenario, one after the other, each with a folder of its own and fresh prompts.

    ``repeats``: how many, None: as the scenario says. ``again``: the server, if it goes on, has been asked what this
    scenario asks first. Ends after one that was interrupted. Raises UserError as ``run_scenario``.
    """
    scenario = resolve(name, overrides)
    count = scenario.repeat if repeats is None else repeats
    check_options(scenario, options)
    command, say = options.command or Command.of("run", name, overrides, options.flags), options.say
    first = new_texts(scenario) if again else 0
    if short := shortage(scenario):
        say(short)

    with page_server(options.runs, options.live_port, placed(scenario).generator) as live:

        def begun(run: Path) -> None:
            if live:
                tell(f"live: {urlsplit(live)._replace(path=f'/runs/{quote(run.name)}/').geturl()}")

        def visits() -> Iterator[Visit]:
            for repeat in range(count):
                if count > 1:
                    say(f"run {repeat + 1} of {count}")
                yield Visit(scenario, first + repeat, command=command, begun=begun)

        yield from visit_in_turn(visits(), options)
