"""Capacity: one server kept up, trials at rates that a search asks for, each only as long as its verdict needs."""

from __future__ import annotations

import contextlib
import math
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pandas as pd

from gapmeter import errors
from gapmeter.analysis.capacity import search
from gapmeter.analysis.capacity.read import KEPT_ARRIVALS, count_all, goal_of, read_outcome, read_trials
from gapmeter.analysis.capacity.trial import Ask, Enough, Outcome, Trial
from gapmeter.analysis.numbers import plain, share
from gapmeter.analysis.results import NotReadable
from gapmeter.analysis.results.capacity import (
    BROKE_OFF,
    BUDGET,
    DIED,
    FAILS,
    HOLDS,
    INTERRUPTED,
    INVALID_TRIAL,
    NOT_MEASURED,
    CapacityResult,
    Ended,
)
from gapmeter.analysis.results.manifest import Manifest, SearchFacts, SearchManifest, TrialNote, TrialPlace
from gapmeter.errors import UserError, unless_refused
from gapmeter.keys import Keys
from gapmeter.options import BUDGET_S, CapacityGoal, Options, longer, tell
from gapmeter.records import RunFolder
from gapmeter.records.request import RequestRecord
from gapmeter.report.command import Command
from gapmeter.runs.run import Conclusion
from gapmeter.scenarios.model import Scenario
from gapmeter.scenarios.slo import Slo
from gapmeter.study.conclusion import STOPPED, conclude, describe, show
from gapmeter.study.patience import RequestsSoFar
from gapmeter.study.resolve import changes, check_searchable, resolve
from gapmeter.study.session import Session, Visit, open_session
from gapmeter.study.study import Study, new_texts, study_folder
from gapmeter.study.target import why_gone

_WARMUP_NS = 5_000_000_000  # of a trial whose scenario leaves it to be found
_BRIEF_WARMUP_NS = 1_000_000_000  # at most, of one that only looks for an overload
_AROUND_S = 3.0  # what a trial takes before its first request and after its last
_LONGEST = 40_000
_GONE = 3  # requests that failed at a trial's end: the server may have died


def find_capacity(
    name: str | Path, overrides: Sequence[str] = (), options: Options = Options(), goal: CapacityGoal = CapacityGoal(),
    resume: Path | None = None,
) -> Conclusion[CapacityResult]:  # fmt: skip
    """Search for the highest rate at which a scenario's SLOs hold. Raises UserError for mistakes that the user can fix.

    If it is interrupted or its server dies, it reports what is known by then. ``resume``: the folder of an earlier
    search of the same scenario; its trials count, also against the budget.
    """
    goal.check()
    scenario = resolve(name, overrides)
    check_searchable(scenario, name)
    command = search_command(name, overrides, options, goal)
    with begin_search(scenario, command, options, goal, resume) as study:
        run_search(study, scenario)
        with study.reporting():
            return report_capacity(study.path, quiet=options.quiet)


def run_search(study: Study[SearchManifest], scenario: Scenario) -> None:
    """All trials; how they ended is in the manifest. Raises UserError where there could not be one."""
    budget_s = study.manifest.capacity.budget_s
    study.options.say(f"capacity of {scenario.name}, within {budget_s:g} s of trials: {study.path}")
    least_s = 10 * math.ceil(search.least_budget_s(goal_of(study.manifest)) / 10)
    if budget_s < least_s and not study.manifest.capacity.trials:
        takes = f"--budget {least_s}s at least" if least_s <= BUDGET_S[1] else "longer than any --budget may be"
        study.options.say(
            f"--budget {budget_s:g}s is short: one overload may use it up, and then only a rate that is too high is "
            f"known; from {plain(study.manifest.capacity.start)} req/s a search takes {takes}"
        )
    earlier = len(list(study.path.glob("server*")))  # each time that a search is taken up has a server of its own
    home = study.path / (f"server-{earlier + 1}" if earlier else "server")
    failure: UserError | None = None
    try:
        with open_session(scenario, study.options, home=home) as session:
            ended = _search(Trials(study, session, scenario))
    except KeyboardInterrupt:
        ended = INTERRUPTED
    except UserError as error:
        ended = DIED if error.exit_code == errors.UNREACHABLE else NOT_MEASURED  # a disk of ours was full
        failure = error
    facts = study.manifest.capacity.model_copy(update={"ended": ended})
    status = "incomplete" if ended in (INTERRUPTED, DIED) or failure else "complete"
    study.note(status=status, ended_because=str(failure) if failure else None, capacity=facts)
    if failure and not facts.trials:
        raise failure


def report_capacity(path: Path, *, quiet: bool) -> Conclusion[CapacityResult]:
    """Summary and page of a search from its folder alone. Raises UserError when they cannot be written."""
    manifest = SearchManifest.read(path)
    analyse_trials(path, manifest, (lambda _: None) if quiet else tell)
    with unless_refused(f"{path}: the results cannot be written", errors.NOT_VALID):
        if manifest.capacity.ended is None:  # it was killed
            manifest = manifest.with_facts(ended=INTERRUPTED)
            manifest.write(path)
        result = analyse_search(RunFolder(path))
    if not quiet:
        from gapmeter.report import capacity

        again = Command.parse(manifest.command)
        links = [("again", str(again))]
        more, ended = longer(manifest.capacity.budget_s), result.capacity.ended
        if ended in BROKE_OFF or (ended == BUDGET and more):
            links.append(("go on", str(again.resumed(path, *more))))
        end = errors.exit_words(result.exit_code, capacity.meaning(result.capacity))
        show(capacity.document(result, manifest), path, end, *links)
    return Conclusion(path, result, result.exit_code)


def analyse_trials(path: Path, manifest: SearchManifest, say: Callable[[str], None]) -> None:
    """All that a run's analysis finds, and its page, for each trial that has none: no search waits for that."""
    folders = [RunFolder(path / note.folder) for note in manifest.capacity.trials]
    left = [folder for folder in folders if folder.requests.is_dir() and not folder.report.exists()]
    for number, folder in enumerate(left, 1):
        say(f"analysing trials: {number} of {len(left)}")
        try:
            conclude(folder, Manifest.read(folder.path), quiet=True)
        except (UserError, OSError, NotReadable) as error:  # the search's answer rests on all trials' records
            say(f"trial {folder.path.name} is not analysed: {error}")


def analyse_search(folder: RunFolder) -> CapacityResult:
    """What a search found, with its page, into its folder. Raises NotReadable, OSError."""
    from gapmeter.analysis.capacity.build import analyse_capacity
    from gapmeter.report import capacity

    return capacity.write(folder, analyse_capacity(folder))


class Trials:
    """Runs trials for real: each is a run of its own under ``trials``, on one server that stays up."""

    def __init__(self, study: Study[SearchManifest], session: Session, scenario: Scenario) -> None:
        self.study, self._session, self._scenario = study, session, scenario
        self._slos = study.manifest.slo
        self._texts = new_texts(scenario)  # also where it is resumed

    def run(self, ask: Ask, looks: Sequence[int], enough: Enough, number: int) -> Outcome:
        """One trial; see ``analysis.capacity.trial.Oracle``."""
        rate, scenario = ask.rate, at_rate(self._scenario, ask, number)
        place = f"trials/{number:02d}-{rate:.4g}rps"
        path = self.study.path / place
        warmup_ns = _warmup_ns(scenario, ask)
        command = self.study.command.as_run(*changes(self._scenario, scenario))
        of = TrialPlace(folder=str(self.study.path), trial=number)
        monitor = TrialMonitor(self._slos, looks, rate, warmup_ns, enough, scenario.load.retries)
        interrupted, died, reason = False, None, None
        began_s = time.monotonic()
        try:
            visit = Visit(scenario, self._texts + number, path, command, capacity_of=of)
            with self.study.afresh(path):
                ended_because = self._session.record(visit, monitor.is_enough).value.ended_because
            interrupted = ended_because == STOPPED
            if not self._session.alive():
                died = ended_because or "the server ended"
            elif monitor.ends_in_failures():
                died = why_gone(self._session.target.about.url, self.study.options.api_key) or None
        except UserError as error:
            reason = str(error)
            died = reason if error.exit_code == errors.UNREACHABLE else None
        note = TrialNote(
            rate=rate, folder=place, looks=tuple(looks), ended=monitor.ended, from_ns=monitor.from_ns,
            seconds=time.monotonic() - began_s, interrupted=interrupted, died=died, reason=reason,
        )  # fmt: skip
        facts = self.study.manifest.capacity
        self.study.note(capacity=facts.model_copy(update={"trials": (*facts.trials, note)}))
        return read_outcome(path, self._slos, note)


class TrialMonitor:
    """Ends a trial as soon as enough is known: asked about four times a second, it judges after ``looks`` requests.

    The requests that count were due after the warm-up (``warmup_ns`` from the first due time) and before the oldest
    one still in flight, so nothing is left out for being slow. An overloaded server's queue shows at once, since it
    answers in the order of its queue. What is in flight when enough is known came later, and is given up. The last
    of ``looks`` is the trial's end, which is not judged here. ``ended``: the number of the look that ended it, from 1;
    ``from_ns``: requests due from then on count.
    """

    def __init__(
        self, slos: Sequence[Slo], looks: Sequence[int], rate: float, warmup_ns: int, enough: Enough, retries: int = 0
    ) -> None:
        self._slos, self._looks, self._rate, self._warmup_ns = slos, looks, rate, warmup_ns
        self._enough, self._next = enough, 0
        self.ended = len(looks)
        self.from_ns = 0
        self._so_far = RequestsSoFar(retries)

    def ends_in_failures(self) -> bool:
        """Whether the last requests failed as those of a server do that is gone, behind a proxy or not."""
        last = [row["outcome"] for row in self._so_far.ended(0, math.inf)[-_GONE:]]
        return len(last) == _GONE and set(last) <= {"refused", "cut", "http_5xx"}

    def is_enough(self, seen: Sequence[tuple[int, RequestRecord]]) -> bool:
        """A ``StopWhen``."""
        if not seen:
            return False
        self.from_ns = seen[0][1].due_ns + self._warmup_ns
        self._so_far.read(seen)
        if self._next >= len(self._looks) - 1:
            return False
        until_ns = self._so_far.oldest_in_flight_ns or math.inf
        counted = self._so_far.ended(self.from_ns, until_ns)
        if len(counted) < self._looks[self._next]:
            return False
        while self._next < len(self._looks) - 1 and self._looks[self._next] <= len(counted):
            at, self._next = self._next, self._next + 1
        table = pd.DataFrame(counted[: self._looks[at]])
        if not self._enough(at, count_all(self._slos, table, self._rate)):
            return False
        self.ended = at + 1
        return True


def at_rate(scenario: Scenario, ask: Ask, number: int) -> Scenario:
    """The scenario as a trial: long enough for the requests that count, with arrivals of its own.

    Bursts (gamma, onoff) stay as they are, at another mean rate, and so does a trace, from another place in it; all
    else arrives as a Poisson process.
    """
    load = scenario.load
    seed = (scenario.seed * 1000 + number) % 2**63  # the largest that a scenario may have is one less
    trial: dict[str, object] = {
        "rate": ask.rate, "diurnal": None, "requests": None, "duration_ns": round(ask.most / ask.rate * 1e9),
        "patience_ns": None, "warmup_ns": _warmup_ns(scenario, ask),
    }  # fmt: skip
    if load.trace is not None:
        trial |= {"rate": None, "trace": load.trace.at_rate(ask.rate, random.Random(seed).random())}
    elif load.arrivals not in KEPT_ARRIVALS:
        trial |= {"arrivals": "poisson", "burstiness": None, "onoff": None}
    return scenario.model_copy(update={"load": load.model_copy(update=trial), "seed": seed, "repeat": 1})


def _warmup_ns(scenario: Scenario, ask: Ask | None = None) -> int:
    asked = scenario.load.warmup_ns
    if asked is None or (asked == 0 and scenario.load.trace is not None):  # none is meant for a trace replayed once
        asked = _WARMUP_NS
    return min(asked, _BRIEF_WARMUP_NS) if ask and ask.aim == "ceiling" else asked


def search_command(name: str | Path, overrides: Sequence[str], options: Options, goal: CapacityGoal) -> Command:
    """What repeats a search, of one setting or of several."""
    return options.command or Command.of("capacity", name, overrides, (*options.flags, *goal.flags))


@contextlib.contextmanager
def begin_search(
    scenario: Scenario, command: Command, options: Options, goal: CapacityGoal, resume: Path | None
) -> Iterator[Study[SearchManifest]]:
    """A new search, or an earlier one that goes on with this goal. Raises UserError."""
    rate = scenario.load.trace.rate if scenario.load.trace else scenario.load.rate
    assert rate is not None
    goal = replace(goal, headroom=goal.headroom_of(scenario.cost))
    keys = Keys.within(scenario.to_dict(), options.api_key)
    with study_folder(options.runs, scenario, SearchManifest, resume) as (path, manifest):
        if manifest is not None:
            # A trial that was interrupted, whose server died or that could not be recorded is run again, and so is one
            # that was no measurement twice.
            earlier, trials = manifest.capacity, manifest.capacity.trials
            if earlier.ended == NOT_MEASURED and manifest.ended_because is None:
                trials = trials[:-1]
            kept = tuple(each for each in trials if not (each.interrupted or each.died or each.reason))
            manifest = manifest.with_facts(**asdict(replace(goal, start=earlier.start)), trials=kept, ended=None)
            again = str(keys.out_of_command(command.without("--resume")))
            manifest = manifest.model_copy(update={"ended_because": None, "command": again})
            for folder in (path / "trials").glob("*"):
                if f"trials/{folder.name}" not in {trial.folder for trial in kept}:
                    shutil.rmtree(folder)
        else:
            facts = SearchFacts(
                **asdict(replace(goal, start=goal.start or rate)), longest=_LONGEST,
                trace_rate=rate if scenario.load.trace else None,
                lost_s=_warmup_ns(scenario) / 1e9 + _AROUND_S, trials=(), ended=None,
            )  # fmt: skip
            manifest = SearchManifest(**dict(describe(scenario, command, keys)), slo=scenario.slo, capacity=facts)
        study = Study(path, manifest, options)
        study.note()
        yield study


def _search(trials: Trials) -> Ended:
    """Trials until the search has ended, after those that are done; returns how."""
    study = trials.study
    goal, say = goal_of(study.manifest), study.options.say
    done = [each.trial for each in read_trials(study.path, study.manifest)]
    while not isinstance(ask := search.next_trial(goal, done), str):
        number, seconds = next_number(study.manifest.capacity.trials), ask.most / ask.rate
        say(f"trial {number}: {plain(ask.rate, 4)} req/s ({_AIMS[ask.aim]}), {seconds:.0f} s of load at most")
        done.append(trial := search.run_trial(goal, trials, ask, number))
        say(f"trial {number}: {plain(ask.rate, 4)} req/s {_verdict(trial, goal)}")
        if (known := search.posterior(goal, done)) is not None:
            low, high = known.interval(goal.confidence)
            say(f"so far {plain(known.quantile(0.5))} req/s ({plain(low)} .. {plain(high)})")
    return ask


def next_number(trials: Sequence[TrialNote]) -> int:
    """The number of the trial to run: beyond the last, where one was left out too, since folder and seed are by it."""
    return 1 + max((each.number for each in trials), default=0)


_AIMS = {"ceiling": "is it overloaded?", "curve": "how slow is it there?", "hold": "does it hold?"}


def _verdict(trial: Trial, goal: search.Goal) -> str:
    outcome, finding = trial.outcome, trial.finding
    if trial.verdict == INVALID_TRIAL:
        return f"not valid: {outcome.died or outcome.invalid}"
    count, slo = outcome.counts[finding.slo], goal.slos[finding.slo].text
    word = "fails" if finding.leaning == FAILS else "holds"
    said = f"{word} ({share(finding.confidence)})"
    if trial.verdict not in (FAILS, HOLDS):
        said = f"undecided, probably {said}" if finding.confidence > 0.5 else "undecided"
    return f"{said}: {slo}, {count.over:g} of {count.count} over the limit, {outcome.seconds:.0f} s"
