"""A study: loads that are visited in an order on servers that are kept up meanwhile, in one folder, resumable.

Under a sweep and a capacity search; the runs of a scenario's repeats and of a comparison are visited in turn, each on a
server of its own.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from gapmeter import errors
from gapmeter.analysis.command import Command
from gapmeter.analysis.results import Manifest, ManifestBase, NotReadable, RunResult
from gapmeter.analysis.results.manifest import SweepPlace, TrialPlace
from gapmeter.errors import UserError, reason_of
from gapmeter.options import Options
from gapmeter.records import RunFolder
from gapmeter.scenarios import Scenario
from gapmeter.study.companions import LocustPage
from gapmeter.study.conclusion import Conclusion, conclude, noting_early_end
from gapmeter.study.load import StopWhen
from gapmeter.study.session import Session, open_session, placed, prepare_session

M = TypeVar("M", bound=ManifestBase)
KINDS = {"sweep": "a sweep", "capacity": "a capacity search"}


@dataclass(frozen=True, slots=True)
class Visit:
    """One load of a study. ``number`` tells it from all others, so that no two ask with the same texts.

    ``into``: the folder to make, None for one of the usual name among the runs. ``command`` repeats it alone; ``sweep``
    or ``capacity_of`` say what it is part of.
    """

    scenario: Scenario
    number: int
    into: Path | None = None
    command: Command | None = None
    sweep: SweepPlace | None = None
    capacity_of: TrialPlace | None = None


def visit_in_turn(
    visits: Iterable[Visit], options: Options, *, model_asked_for: bool, page: LocustPage | None = None,
    begun: Callable[[Path], None] = lambda _: None,
) -> Iterator[Conclusion[RunResult]]:  # fmt: skip
    """Each on a server of its own, one after the other; ends after one that was interrupted. Raises UserError.

    A server is ended before its run is analysed, so that its record files are whole. ``page`` shows each load,
    ``begun`` is told of each run's folder.
    """
    for visit in visits:
        session = prepare_session(visit.scenario, options, model_asked_for=model_asked_for)
        session.page = page
        plan = session.draw(visit.scenario, visit.number)
        manifest = session.begin(visit.scenario, plan, visit.number, into=visit.into, command=visit.command)
        with noting_early_end(manifest):
            manifest.write()
            begun(manifest.folder.path)
            with session.serving(manifest.folder, several=False):
                session.issue(visit.scenario, plan, manifest)
            conclusion = conclude(manifest.folder, manifest.value, quiet=options.quiet)
        yield conclusion
        if conclusion.exit_code == errors.INTERRUPTED:
            return


class Study(Generic[M]):
    """A folder of many runs and its manifest, which says what is to be run and what has been."""

    def __init__(self, folder: RunFolder, manifest: M, options: Options, *, model_asked_for: bool) -> None:
        self.folder, self.manifest, self.options = folder, manifest, options
        self._model_asked_for = model_asked_for

    @property
    def path(self) -> Path:
        return self.folder.path

    @property
    def command(self) -> Command:
        """What it was begun with."""
        return Command.parse(self.manifest.command)

    def note(self, **fields: Any) -> None:
        """Into the manifest, at once."""
        self.manifest = self.manifest.model_copy(update=fields)
        self.manifest.write(self.path)

    @contextlib.contextmanager
    def server(self, scenario: Scenario, home: Path) -> Iterator[Session]:
        """A server that is up for several visits. Raises UserError when it cannot be started."""
        with open_session(scenario, self.options, home=home, model_asked_for=self._model_asked_for) as session:
            yield session

    def visit(self, session: Session, visit: Visit, stop_when: StopWhen | None = None) -> Conclusion[RunResult]:
        """One load; what an earlier attempt left in its folder goes.

        Raises KeyboardInterrupt when it was interrupted before it could be analysed, UserError as ``Session.load``.
        """
        if visit.into is not None:
            shutil.rmtree(visit.into, ignore_errors=True)
            visit.into.parent.mkdir(parents=True, exist_ok=True)
        try:
            return session.load(
                visit.scenario, visit.number, into=visit.into, stop_when=stop_when, command=visit.command,
                sweep=visit.sweep, capacity_of=visit.capacity_of, show=False,
            )  # fmt: skip
        except UserError as error:
            if error.exit_code == errors.INTERRUPTED:
                raise KeyboardInterrupt from error
            raise


def make_folder(runs: Path, scenario: Scenario, kind: str) -> RunFolder:
    """A fresh one for a study. Raises UserError when it cannot be made."""
    try:
        return RunFolder.create(runs, f"{scenario.name}-{kind}", scenario.digest(), parts=())
    except OSError as error:
        raise UserError(f"no folder can be made in {runs}: {reason_of(error)}", errors.USAGE) from error


def resume(path: Path, scenario: Scenario, manifest_type: type[M]) -> M:
    """The manifest of a study of the same scenario that was begun earlier, to go on. Raises UserError for any other."""
    kind = str(manifest_type.model_fields["kind"].default)
    what = KINDS[kind]
    try:
        if RunFolder(path).read_manifest().get("kind") != kind:
            raise UserError(f"--resume: {path} is not the folder of {what}", errors.USAGE)
        manifest = manifest_type.read(path)
    except (OSError, ValueError) as error:
        raise UserError(f"--resume: {path} is not the folder of {what}: {error}", errors.USAGE) from error
    if manifest.scenario_digest != scenario.digest():
        text = f"--resume: {path} is {what} of another scenario; begun with: {manifest.command}"
        raise UserError(text, errors.USAGE)
    return manifest.model_copy(update={"status": "running"})


def is_finished(run: Path) -> bool:
    """Whether a run lies there that went to its end and was analysed."""
    with contextlib.suppress(OSError, NotReadable):
        return (run / RunResult.FILE).exists() and Manifest.read(run).status == "complete"
    return False


def server_key(scenario: Scenario) -> str:
    """Equal for scenarios that one server can serve."""
    return json.dumps([scenario.to_dict()["server"], placed(scenario).server], sort_keys=True, default=str)
