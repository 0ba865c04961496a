"""One run: scenario → plan → server → load → records → analysis. Everything the command line does, in one call."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from gapmeter import errors
from gapmeter.errors import UserError, reason_of
from gapmeter.options import Options, RunResult, silent, tell
from gapmeter.records import RunFolder
from gapmeter.runs.damage import unless_damaged
from gapmeter.scenarios import Scenario
from gapmeter.study.companions import live_page, opened
from gapmeter.study.conclusion import noting_the_end, finish
from gapmeter.study.manifest import MANIFEST_VERSION
from gapmeter.study.resolve import asks_for_model, resolve
from gapmeter.study.session import make_folder, prepare_session
from gapmeter.study.study import SEARCH, SWEEP
from gapmeter.sweep import report_sweep


def run_scenario(name: str, overrides: Sequence[str] = (), options: Options = Options()) -> RunResult:
    """Run a scenario (a name or a file) once, whatever its ``repeat`` says, and analyse it.

    A run that is interrupted or loses its server is still analysed. Raises UserError for what the user can mend.
    """
    return _run(resolve(name, overrides), 0, _settled(options, name, overrides), asks_for_model(overrides))


def run_repeats(name: str, overrides: Sequence[str] = (), options: Options = Options()) -> Iterator[RunResult]:
    """The scenario's ``repeat`` runs, one after the other, each with a folder of its own and fresh prompts.

    Ends after one that was interrupted. Raises UserError as ``run_scenario``.
    """
    scenario = resolve(name, overrides)
    options, named = _settled(options, name, overrides), asks_for_model(overrides)
    with opened(options.ui, silent if options.quiet else tell) as page:
        options = replace(options, page=page)
        for repeat in range(scenario.repeat):
            if scenario.repeat > 1 and not options.quiet:
                tell(f"run {repeat + 1} of {scenario.repeat}")
            result = _run(scenario, repeat, options, named)
            yield result
            if result.exit_code == errors.INTERRUPTED:
                return
        if page is not None:
            page.keep()


def report_again(path: Path, *, quiet: bool = False, definitions: bool = False) -> RunResult:
    """Analyse a run again from its folder alone; ``definitions``: also by other tools' definitions.

    Raises UserError when it is no run's folder, or holds no requests.
    """
    folder = RunFolder(path)
    try:
        manifest = folder.read_manifest()
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path} is not a run's folder: it has no manifest.json", errors.USAGE) from None
    except (OSError, ValueError) as error:
        why = reason_of(error) if isinstance(error, OSError) else error
        raise UserError(f"{str(path)[:200]} is not a run's folder: manifest.json: {why}", errors.USAGE) from error
    if manifest.get("schema_version") != MANIFEST_VERSION:
        version = manifest.get("schema_version")
        raise UserError(f"{path} was written in version {version} of the format, not {MANIFEST_VERSION}", errors.USAGE)
    if manifest.get("kind") == SEARCH:
        from gapmeter.capacity import report_capacity

        return report_capacity(path, quiet=quiet)
    if manifest.get("kind") == SWEEP:
        return report_sweep(path, quiet=quiet)
    with unless_damaged(folder, manifest):
        return finish(folder, manifest, quiet=quiet, definitions=definitions)


def _settled(options: Options, name: str, overrides: Sequence[str]) -> Options:
    """With the command that repeats the run."""
    if options.command:
        return options
    words = ["gapmeter", "run", name, *(word for override in overrides for word in ("--set", override))]
    return replace(options, command=shlex.join(words))


def _run(scenario: Scenario, repeat: int, options: Options, model_named: bool) -> RunResult:
    """A session with one load; its server is ended before the analysis, so that its record files are whole."""
    session = prepare_session(scenario, options, model_named=model_named)
    plan = session.draw(scenario, repeat)
    folder = make_folder(options.runs, scenario)
    manifest = session.describe(scenario, plan, repeat)
    with noting_the_end(folder, manifest):
        folder.write_json(folder.manifest, manifest)
        with live_page(folder, options.live_port, session.placement.generator):
            with session.serving(folder, several=False):
                session.issue(scenario, plan, folder, manifest)
            return finish(folder, manifest, quiet=options.quiet)


__all__ = ["Options", "RunResult", "report_again", "run_repeats", "run_scenario"]
