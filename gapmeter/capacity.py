"""Capacity: one server kept up, trials at rates that a search asks for, each only as long as its verdict needs."""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from gapmeter import errors
from gapmeter.analysis.capacity import analyse_capacity, search
from gapmeter.analysis.capacity.read import goal_of, read_outcome, read_trials
from gapmeter.analysis.capacity.trial import FAILS, INVALID, Count, Enough, Outcome, Trial
from gapmeter.errors import UserError, reason_of
from gapmeter.options import Options, RunResult, silent, tell
from gapmeter.records import RunFolder
from gapmeter.scenarios import Scenario
from gapmeter.study.keys import Keys
from gapmeter.study.looks import Looks
from gapmeter.study.manifest import describe_run, without_keys
from gapmeter.study.parent import SEARCH, make_parent, take_up
from gapmeter.study.resolve import names_model, resolve
from gapmeter.study.session import Session, open_session
from gapmeter.wanted import Wanted

_WARMUP_NS = 5_000_000_000  # of a trial whose scenario leaves it to be found
_AROUND_S = 3.0  # what a trial takes before its first request and after its last
_LONGEST = 40_000
# What a run of a trial's load has no use for: flags with a value, and without.
_OF_A_SEARCH = (
    "--target-rps", "--headroom", "--spare", "--confidence", "--within", "--budget", "--resume", "--runs",
)  # fmt: skip
_SWITCHES = ("--json", "--quiet")
_ALL_RATES = ("poisson", "constant", "gamma", "onoff", "diurnal")


def find_capacity(
    name: str,
    overrides: Sequence[str] = (),
    options: Options = Options(),
    wanted: Wanted = Wanted(),
    resume: Path | None = None,
) -> RunResult:
    """Search the highest Poisson rate at which a scenario's SLOs hold. Raises UserError for what the user can mend.

    Interrupted, or with its server dead, it reports what is known by then. ``resume``: the folder of an earlier search
    of the same scenario, whose trials count, also against the budget.
    """  # fmt: skip
    scenario = resolve(name, overrides)
    check_scenario(scenario, name)
    words = ["gapmeter", "capacity", name, *(word for override in overrides for word in ("--set", override))]
    options = replace(options, command=options.command or shlex.join(words))
    if resume:
        folder, manifest = _taken_up(resume, scenario, wanted)
    else:
        folder, manifest = make_parent(options.runs, scenario, SEARCH), _manifest(scenario, options, wanted)
    folder.write_json(folder.manifest, manifest)
    say = silent if options.quiet else tell
    say(f"capacity of {scenario.name}, within {wanted.budget_s:g} s of trials: {folder.path}")
    try:
        with open_session(
            scenario, options, home=_server_home(folder.path), model_named=names_model(overrides)
        ) as session:
            oracle = Trials(session, scenario, folder, manifest, say)
            ended = _search(oracle, manifest, [each.trial for each in read_trials(folder.path, manifest)], say)
    except KeyboardInterrupt:
        ended = search.INTERRUPTED
    except UserError as error:
        if error.exit_code != errors.INTERRUPTED and not manifest["capacity"]["trials"]:
            folder.write_json(folder.manifest, manifest | {"status": "incomplete", "ended_because": str(error)})
            raise
        ended = search.INTERRUPTED if error.exit_code == errors.INTERRUPTED else search.DIED
    status = "complete" if ended not in (search.INTERRUPTED, search.DIED) else "incomplete"
    manifest["capacity"]["ended"] = ended
    folder.write_json(folder.manifest, manifest | {"status": status})
    return report_capacity(folder.path, quiet=options.quiet)


def report_capacity(path: Path, *, quiet: bool = False) -> RunResult:
    """Summary and page of a search from its folder alone. Raises UserError when they cannot be written."""
    from gapmeter.report.answer import print_capacity

    folder = RunFolder(path)
    manifest = folder.read_manifest()
    if manifest["capacity"]["ended"] is None:  # it was killed
        manifest["capacity"]["ended"] = search.INTERRUPTED
        folder.write_json(folder.manifest, manifest)
    try:
        summary = analyse_capacity(folder)
    except OSError as error:
        raise UserError(f"{path}: the results cannot be written: {reason_of(error)}", errors.NOT_VALID) from error
    code = int(summary["exit_code"])
    if not quiet:
        print_capacity(summary, path, str(manifest["command"]), code, sys.stderr)
    return RunResult(path, summary, code)


def check_scenario(scenario: Scenario, name: str) -> None:
    """Raises UserError for a scenario whose load has no rate to search, or without SLOs."""
    load = scenario.load
    again = f"gapmeter capacity {name}"
    if load.loop == "closed":
        raise UserError(
            f"{name} is a closed loop ({load.concurrency} users): its users wait for their answers, so it never asks "
            f"for more than the server gives; capacity needs an open loop. Write: {again} --set load.arrivals=poisson "
            f"--set load.concurrency=null --set load.rate=1",
            errors.USAGE,
        )
    if load.arrivals not in _ALL_RATES or load.rate is None:
        raise UserError(
            f"{name} has arrivals of its own ({load.arrivals}), and no one rate to search. Write: {again} "
            f"--set load.arrivals=poisson --set load.{load.arrivals}=null --set load.rate=1",
            errors.USAGE,
        )
    if not scenario.slo:
        raise UserError(
            f"{name} has no SLO, so every rate would do. Write: {again} --set 'slo=[\"ttft p99 <= 500 ms\"]'",
            errors.USAGE,
        )
    if scenario.sweep:
        raise UserError(f"{name} sweeps; capacity is of one point. Write: {again} --set 'sweep=[]'", errors.USAGE)


class Trials:
    """Runs trials for real: each is a run of its own under ``trials``, on one server that stays up."""

    def __init__(
        self, session: Session, scenario: Scenario, folder: RunFolder, manifest: dict[str, Any],
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._session, self._scenario, self._folder, self._say = session, scenario, folder, say
        self._manifest = manifest

    def run(self, rate: float, looks: Sequence[int], enough: Enough, number: int) -> Outcome:
        """One trial at ``rate``; see ``analysis.capacity.trial.Oracle``."""
        scenario = at_rate(self._scenario, rate, looks[-1], number)
        place = f"trials/{number:02d}-{rate:.4g}rps"
        noted: dict[str, Any] = {"rate": rate, "folder": place, "looks": list(looks)}
        live = Looks(self._manifest["slo"], looks, rate, _warmup_ns(scenario), enough)
        began = time.monotonic()
        try:
            path = self._folder.path / place
            path.parent.mkdir(exist_ok=True)
            more = {"capacity_of": {"folder": str(self._folder.path), "trial": number}}
            result = self._session.load(
                scenario, number, into=path, stop_when=live.look, command=_alone(self._manifest, rate, looks[-1]),
                more=more, show=False,
            )  # fmt: skip
            noted["interrupted"] = result.exit_code == errors.INTERRUPTED
            if not self._session.alive():
                noted["died"] = str(RunFolder(path).read_manifest().get("ended_because") or "the server ended")
        except UserError as error:
            if error.exit_code == errors.INTERRUPTED:
                raise
            noted["reason"] = str(error)
            if error.exit_code == errors.UNREACHABLE:
                noted["died"] = str(error)
        noted |= {"ended": live.ended, "from_ns": live.from_ns, "seconds": time.monotonic() - began}
        self._manifest["capacity"]["trials"].append(noted)
        self._folder.write_json(self._folder.manifest, self._manifest)
        return read_outcome(self._folder.path / place, self._manifest["slo"], noted)[0]


def at_rate(scenario: Scenario, rate: float, most: int, number: int) -> Scenario:
    """The scenario as a trial: Poisson at ``rate``, long enough for ``most`` requests that count, its own arrivals."""
    trial = {
        "arrivals": "poisson", "rate": rate, "burstiness": None, "onoff": None, "diurnal": None, "requests": None,
        "duration_ns": round(most / rate * 1e9), "warmup_ns": _warmup_ns(scenario),
    }  # fmt: skip
    load = scenario.load.model_copy(update=trial)
    return scenario.model_copy(update={"load": load, "seed": scenario.seed * 1000 + number})


def _warmup_ns(scenario: Scenario) -> int:
    return _WARMUP_NS if scenario.load.warmup_ns is None else scenario.load.warmup_ns


def _manifest(scenario: Scenario, options: Options, wanted: Wanted) -> dict[str, Any]:
    lost_s = _warmup_ns(scenario) / 1e9 + _AROUND_S
    asked = asdict(wanted) | {
        "start": scenario.load.rate, "longest": _LONGEST, "lost_s": lost_s, "trials": [], "ended": None,
    }  # fmt: skip
    more = {"kind": SEARCH, "slo": [asdict(slo) for slo in scenario.slo], "capacity": asked}
    manifest = describe_run(scenario.to_dict(), scenario.digest(), options.command) | more
    return without_keys(manifest, Keys.within(manifest["scenario"], options.api_key))


def _taken_up(path: Path, scenario: Scenario, wanted: Wanted) -> tuple[RunFolder, dict[str, Any]]:
    """An earlier search with what is wanted now; a trial that was interrupted, or whose server died, is run again."""
    folder, manifest = take_up(path, scenario, SEARCH)
    part = manifest["capacity"]
    part["trials"] = [noted for noted in part["trials"] if not (noted.get("interrupted") or noted.get("died"))]
    part |= asdict(wanted) | {"ended": None}
    known = {noted["folder"] for noted in part["trials"]}
    for left in (path / "trials").glob("*"):
        if f"trials/{left.name}" not in known:
            shutil.rmtree(left)
    return folder, manifest


def _server_home(folder: Path) -> Path:
    """A folder for the server's log and records: each time that a search is taken up has one of its own."""
    earlier = len(list(folder.glob("server*")))
    return folder / (f"server-{earlier + 1}" if earlier else "server")


def _search(oracle: Trials, manifest: dict[str, Any], done: list[Trial], say: Callable[[str], None]) -> str:
    """Trials until the search has ended, after those that are ``done``; returns how."""
    goal = goal_of(manifest)
    while not isinstance(ask := search.next_trial(goal, done), str):
        number, seconds = len(done) + 1, ask.most / ask.rate
        say(f"trial {number}: {ask.rate:.4g} req/s, for {seconds:.0f} s at most")
        done.append(trial := search.run_trial(goal, oracle, ask, number))
        say(f"trial {number}: {ask.rate:.4g} req/s {_told(trial, goal)}")
    return ask


def _told(trial: Trial, goal: search.Goal) -> str:
    outcome, finding = trial.outcome, trial.finding
    if trial.verdict == INVALID:
        return f"not valid: {outcome.died or outcome.invalid}"
    count: Count = outcome.counts[finding.promise]
    slo = goal.promises[finding.promise].text
    sure = f"{100 * finding.confidence:.0f} %"
    word = "fails" if finding.leaning == FAILS else "holds"
    if trial.verdict not in (FAILS, "holds"):
        word = f"undecided, leaning to {word}"
    return f"{word} ({sure}): {slo}, {count.over:g} of {count.count} beyond, {outcome.seconds:.0f} s"


def _alone(manifest: dict[str, Any], rate: float, most: int) -> str:
    """What runs a trial's load alone: the search's own words without those that only a search has."""
    words = shlex.split(str(manifest["command"]))
    own = ("load.arrivals=poisson", f"load.rate={rate:.6g}", f"load.duration={most / rate:.3g}")
    flags = [word for each in own for word in ("--set", each)]
    if words[:2] == ["make", "capacity"]:
        return shlex.join(["make", "loadtest", *words[2:], f"ARGS={shlex.join(flags)}"])
    if words[:2] != ["gapmeter", "capacity"]:
        return str(manifest["command"])
    kept = [
        word
        for at, word in enumerate(words[2:], 2)
        if word.partition("=")[0] not in (*_OF_A_SEARCH, *_SWITCHES) and words[at - 1] not in _OF_A_SEARCH
    ]
    return shlex.join(["gapmeter", "run", *kept, *flags])
