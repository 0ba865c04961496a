"""Capacity of several settings: a search for each, and one table of what a request costs on which."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gapmeter import errors
from gapmeter.analysis.results.capacity import BROKE_OFF, BUDGET, DIED, INTERRUPTED, UNMEETABLE, CapacityResult
from gapmeter.analysis.results.cost_table import CostTable
from gapmeter.analysis.results.manifest import SearchManifest
from gapmeter.errors import UserError
from gapmeter.keys import Keys
from gapmeter.options import CapacityGoal, Options, longer
from gapmeter.report import cost_table
from gapmeter.report.capacity import headline
from gapmeter.report.command import Command
from gapmeter.runs.comparison import compare_folders
from gapmeter.runs.run import Conclusion, manifest_of
from gapmeter.scenarios.read import Point
from gapmeter.study.capacity import begin_search, report_capacity, run_search, search_command
from gapmeter.study.conclusion import show
from gapmeter.study.resolve import resolve, searchable_points, settings_of
from gapmeter.study.study import is_of


def find_capacities(
    name: str | Path, overrides: Sequence[str], options: Options = Options(), goal: CapacityGoal = CapacityGoal(),
    resume: Sequence[Path] = (),
) -> Conclusion[CostTable]:  # fmt: skip
    """Search every point of a scenario's sweep ``repeat`` times, each with ``goal``, and put them into one table.

    A machine's speed drifts, so every round visits all settings in an order of its own. A search begins at the rate
    that the one before found. ``resume``: earlier searches of these settings that count; unfinished ones are resumed.
    A setting that cannot be served is a row without a rate. Raises UserError for mistakes that the user can fix.
    """
    goal.check()
    scenario, points = resolve(name, overrides), searchable_points(name, overrides)
    earlier = _by_point(resume, points)
    rng = random.Random(f"settings {scenario.seed}")
    order = [at for _ in range(scenario.repeat) for at in rng.sample(range(len(points)), len(points))]
    found: list[list[Conclusion[CapacityResult]]] = [[] for _ in points]
    rate, unseen = goal.start, list[Path]()
    whole = search_command(name, overrides, options, goal)
    options.say(f"capacity of {len(points)} settings: {len(order)} searches, {goal.budget_s:g} s of trials each")
    for number, at in enumerate(order, 1):
        point, resumable = points[at], earlier[at]
        title = f"search {number} of {len(order)}, {', '.join(settings_of(point))}"
        folder = resumable.pop(0) if resumable else None
        if folder is None or _goes_on(SearchManifest.read(folder), goal):
            options.say(title)
            single = whole.of_one_point(*settings_of(point))
            with begin_search(point.scenario, single, options, replace(goal, start=rate), folder) as study:
                folder = study.path
                try:
                    run_search(study, point.scenario)
                except UserError as error:
                    if error.exit_code in (errors.USAGE, errors.INTERRUPTED):  # every setting would fail likewise
                        raise
                    options.say(f"{title} failed: {error}")
        elif goal.target_rps is not None:
            _plan_for(folder, goal)
        try:
            found[at].append(one := report_capacity(folder, quiet=True))
        except KeyboardInterrupt:  # its trials are there: resumed, it is only analysed
            unseen.append(folder)
            break
        rate = one.result.capacity.rate or one.result.capacity.low or rate
        options.say(f"{title}: {headline(one.result.capacity)[0]}")
        if one.result.capacity.ended == INTERRUPTED:
            break
    command = Keys.within(scenario.to_dict(), options.api_key).out_of_command(whole)
    is_stopped = bool(unseen)
    unseen += [path for each in earlier for path in each]
    return compared(points, found, options, command, goal, unseen, is_stopped=is_stopped)


def compared(
    points: Sequence[Point], found: Sequence[Sequence[Conclusion[CapacityResult]]], options: Options, command: Command,
    goal: CapacityGoal, unseen: Sequence[Path], *, is_stopped: bool = False,
) -> Conclusion[CostTable]:  # fmt: skip
    """Make and show the table of what was searched.

    ``unseen``: earlier searches whose turn did not come, and one in whose analysis the user stopped (``is_stopped``).
    """
    sides = [[one.folder for one in each] for each in found if each]
    searches = [one.result.capacity for each in found for one in each]
    more = longer(goal.budget_s) if any(s.ended == BUDGET for s in searches) else ()
    folders = [*(path for side in sides for path in side), *unseen]
    again = command.resumed(Path(",".join(map(str, folders))), *more)
    if len(sides) < 2:
        raise UserError(f"interrupted before a second setting; continue with: {again}", errors.INTERRUPTED)
    factors = list(dict.fromkeys(key for point in points for key in point.values))
    table = compare_folders(sides, factors, runs=options.runs, command=str(command))
    assert isinstance(table.result, CostTable)  # since these are searches
    code = table.exit_code
    if is_stopped or any(s.ended == INTERRUPTED for s in searches):
        code = errors.INTERRUPTED
    elif any(s.ended == DIED or (not s.low and s.ended != UNMEETABLE) for s in searches):
        code = errors.NOT_VALID
    elif all(s.ended == UNMEETABLE for s in searches):
        code = errors.SLO_MISSED
    if not options.quiet:
        end = errors.exit_words(code, "" if code else "every setting was searched")
        go_on = [("go on", str(again))] * bool(is_stopped or more or any(s.ended in BROKE_OFF for s in searches))
        show(cost_table.document(table.result), table.folder, end, *go_on)
    return Conclusion(table.folder, table.result, code)


def _by_point(folders: Sequence[Path], points: Sequence[Point]) -> list[list[Path]]:
    """The earlier searches of each setting. Raises UserError for a folder that is of none of them."""
    earlier: list[list[Path]] = [[] for _ in points]
    for folder in folders:
        manifest = manifest_of(folder)
        own = (at for at, point in enumerate(points) if is_of(manifest, point.scenario))
        at = next(own, None) if isinstance(manifest, SearchManifest) else None
        if at is None:
            raise UserError(f"--resume: {folder} is no search of one of these settings", errors.USAGE)
        earlier[at].append(folder)
    return earlier


def _plan_for(folder: Path, goal: CapacityGoal) -> None:
    """Servers for another load, of a search that is over: that takes no further trial."""
    manifest = SearchManifest.read(folder)
    headroom = goal.headroom_of(manifest.asked.cost)
    manifest.with_facts(target_rps=goal.target_rps, headroom=headroom, spare=goal.spare).write(folder)


def _goes_on(manifest: SearchManifest, goal: CapacityGoal) -> bool:
    """Whether an earlier search has found no end, or has more time now."""
    facts = manifest.capacity
    more_time = facts.ended == BUDGET and goal.budget_s > facts.budget_s
    return more_time or facts.ended in (None, *BROKE_OFF)
