"""Runs of one scenario, each on a server of its own; and the report of what was run, made again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gapmeter import errors
from gapmeter.analysis.command import Command
from gapmeter.analysis.results import RunResult
from gapmeter.analysis.results.manifest import SearchManifest, SweepManifest
from gapmeter.options import Options, tell
from gapmeter.records import RunFolder
from gapmeter.runs.damage import manifest_of, unless_damaged
from gapmeter.scenarios import Scenario
from gapmeter.study.companions import address_of, locust_page, runs_page
from gapmeter.study.conclusion import Conclusion, conclude
from gapmeter.study.resolve import asks_for_model, resolve
from gapmeter.study.session import check_options, placed
from gapmeter.study.study import Visit, visit_in_turn


def run_scenario(name: str, overrides: Sequence[str] = (), options: Options = Options()) -> Conclusion[RunResult]:
    """Run a scenario (a name or a file) once, whatever its ``repeat`` says, and analyse it.

    A run that is interrupted or loses its server is still analysed. Raises UserError for what the user can mend.
    """
    (conclusion,) = _run(name, overrides, options, resolve(name, overrides), 1)
    return conclusion


def run_repeats(
    name: str, overrides: Sequence[str] = (), options: Options = Options()
) -> Iterator[Conclusion[RunResult]]:
    """The scenario's ``repeat`` runs, one after the other, each with a folder of its own and fresh prompts.

    Ends after one that was interrupted. Raises UserError as ``run_scenario``.
    """
    scenario = resolve(name, overrides)
    yield from _run(name, overrides, options, scenario, scenario.repeat)


def _run(
    name: str, overrides: Sequence[str], options: Options, scenario: Scenario, repeats: int
) -> Iterator[Conclusion[RunResult]]:
    check_options(scenario, options)
    command, say, interrupted = options.command or Command.of("run", name, overrides), options.say, False

    def visits() -> Iterator[Visit]:
        for repeat in range(repeats):
            if repeats > 1:
                say(f"run {repeat + 1} of {repeats}")
            yield Visit(scenario, repeat, command=command)

    with locust_page(options.locust_page, say) as page:
        with runs_page(options.runs, options.live_port, placed(scenario).generator, tell) as live:

            def begun(run: Path) -> None:
                if live:
                    tell(f"live: {address_of(run, live)}")

            for conclusion in visit_in_turn(
                visits(), options, model_asked_for=asks_for_model(overrides), page=page, begun=begun
            ):
                yield conclusion
                interrupted = conclusion.exit_code == errors.INTERRUPTED
        if page is not None and options.locust_page is not None and not interrupted:
            page.keep(options.locust_page.keep_ns, say)


def report_again(path: Path, *, quiet: bool = False, definitions: bool = False) -> Conclusion[Any]:
    """Analyse a run, a sweep or a search again from its folder alone; ``definitions``: also by other tools' ones.

    Raises UserError when it is no run's folder, or holds no requests.
    """
    manifest = manifest_of(path)
    if isinstance(manifest, SearchManifest):
        from gapmeter.study.capacity import report_capacity

        return report_capacity(path, quiet=quiet)
    if isinstance(manifest, SweepManifest):
        from gapmeter.study.sweep import report_sweep

        return report_sweep(path, quiet=quiet)
    folder = RunFolder(path)
    with unless_damaged(folder, manifest):
        return conclude(folder, manifest, quiet=quiet, definitions=definitions)
