"""One server, several loads: it is started (or attached to) once and kept up; every load has a run's folder of its own.

with open_session(scenario, options, home=Path("runs/my-server")) as session:
    for rate in (2, 4, 8):
        result = session.load(resolve("chat-p99", [f"load.rate={rate}"]), into=Path(f"runs/my-trials/{rate}"))
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from gapmeter import errors
from gapmeter.analysis.results import Manifest, RunResult
from gapmeter.analysis.results.manifest import OwnUsers, Placement, PlanFacts, SweepPlace, TargetFacts, TrialPlace
from gapmeter.errors import UserError, unless_refused
from gapmeter.keys import Keys
from gapmeter.loadgen import PlanError
from gapmeter.loadgen.plan import Plan
from gapmeter.loadgen.planner import make_plan
from gapmeter.loadgen.tokenizer import PromptTokenizer, load_tokenizer
from gapmeter.machine.calibration import COMMAND, read_calibration
from gapmeter.machine.hardware import gpus_here, place, suspended_ns
from gapmeter.options import Options
from gapmeter.records import RunFolder
from gapmeter.records.workers import LocustWorkers
from gapmeter.report.command import Command
from gapmeter.runs.lock import locked
from gapmeter.runs.run import Conclusion
from gapmeter.scenarios.errors import ScenarioError
from gapmeter.scenarios.model import Scenario
from gapmeter.scenarios.read import load_scenario
from gapmeter.servers.launch import ServerProcess
from gapmeter.study.companions import telemetry
from gapmeter.study.conclusion import OpenManifest, conclude, describe
from gapmeter.study.load import Load, ProbeFolder, ServerLog, StopWhen
from gapmeter.study.resolve import changes
from gapmeter.study.target import Target, find_probe_folder, listeners, prepare_target, running

# How long a server is waited for until it does nothing more; others may be asking one that is not ours all the time.
_OURS_SETTLES_S, _THEIRS_SETTLES_S = 10.0, 1.0
_BETWEEN_CLOCKS_NS = 1_000_000  # from the reading of one to that of the other
_MOST_KNOTS = 20_000  # of a rate that a manifest tells


@dataclass(frozen=True, slots=True)
class Visit:
    """One load. ``number`` is its own among all of its server, so that no two ask with the same texts.

    ``into``: the folder to make, None for one of the usual name among the runs. ``command`` repeats it alone; ``sweep``
    or ``capacity_of`` say what it is part of. ``begun`` gets the folder once it is there.
    """

    scenario: Scenario
    number: int
    into: Path | None = None
    command: Command | None = None
    sweep: SweepPlace | None = None
    capacity_of: TrialPlace | None = None
    begun: Callable[[Path], None] = lambda _: None


class Session:
    """A server that can be loaded. Made by ``open_session``, or by ``prepare_session`` before it is started.

    ``process`` is None for a server that is not ours, ``probes`` where nothing records.
    """

    def __init__(self, scenario: Scenario, options: Options, placement: Placement, target: Target) -> None:
        self.scenario, self.options, self.placement, self.target = scenario, options, placement, target
        self.say = options.say
        self.keys = Keys.within(scenario.to_dict(), options.api_key)
        self.process: ServerProcess | None = None
        self.probes: ProbeFolder | None = None
        self.loads = 0
        self._tokenizer: PromptTokenizer | None = None
        self.calibration, why = read_calibration()
        if why:
            self.say(f"without a calibration: {why}; make a new one with {COMMAND}")

    @contextlib.contextmanager
    def serving(self, home: RunFolder, *, several: bool) -> Iterator[None]:
        """The server is up while the block lasts, its log and records in ``home``.

        ``several``: every load takes its part of the records; a single one of a server of ours leaves them where they
        are. Raises UserError when it cannot be started.
        """
        cores = self.placement.server
        with running(self.target, self.scenario, cores, home, self.say, self.keys) as process:
            self.process = process
            if self.target.spec is not None and several:
                self.probes = ProbeFolder(home.probe)
            yield

    def load(
        self, scenario: Scenario, *, into: Path | None = None, stop_when: StopWhen | None = None
    ) -> Conclusion[RunResult]:
        """Load the server as ``scenario`` says, whose server must be this one's, analyse it, and print the summary.

        ``into`` is the folder to make, None for one of the usual name among the runs. ``stop_when`` ends the load early
        (about four times a second it is asked): the run is then a valid, shorter one.

        A load that was interrupted (exit code 105) or lost its server is still analysed. Raises UserError when the
        server has died before, and as a run does.
        """
        if server_key(scenario) != server_key(self.scenario):
            raise ValueError("the scenario asks for another server than this session's")
        return self.visit(Visit(scenario, self.loads, into), stop_when)

    def visit(self, visit: Visit, stop_when: StopWhen | None = None, *, alone: bool = False) -> Conclusion[RunResult]:
        """Record one load, see ``record``, analyse it, and print the summary unless it is a sweep's.

        ``alone``: the server is started for this load, and ended after it, so that its record files are whole.
        """
        with self._recorded(visit, stop_when, alone) as manifest, manifest.noting_early_end():
            quiet = self.options.quiet or visit.sweep is not None
            return conclude(manifest.folder, manifest.value, quiet=quiet, verbose=self.options.verbose)

    def record(self, visit: Visit, stop_when: StopWhen) -> OpenManifest:
        """One load with all its records, not analysed."""
        with self._recorded(visit, stop_when) as manifest:
            return manifest

    @contextlib.contextmanager
    def _recorded(self, visit: Visit, stop_when: StopWhen | None, alone: bool = False) -> Iterator[OpenManifest]:
        """The same; its folder is kept from other processes until the block ends."""
        if self.process is not None and (died := self.process.failure()):
            raise UserError(str(died), errors.UNREACHABLE)
        load = visit.scenario.load
        if load.may_last_longer and (self.options.workers is not None or self.options.locustfile):
            # Their records are not read as they come, so that nothing would tell when it is enough.
            exact = load.model_copy(update={"patience_ns": None})
            visit = replace(visit, scenario=visit.scenario.model_copy(update={"load": exact}))
        plan = self._draw(visit)
        manifest = self._begin(visit, plan)
        folder = manifest.folder
        self.loads += 1
        with locked(folder.path):
            with manifest.noting_early_end():
                manifest.write()
                visit.begun(folder.path)
                with self.serving(folder, several=False) if alone else contextlib.nullcontext():
                    self._issue(visit.scenario, plan, manifest, stop_when)
                manifest.note(files=folder.seal())
                manifest.write()
            yield manifest

    def alive(self) -> bool:
        """Whether the server has not died; one that is not ours is taken to live."""
        return self.process is None or self.process.poll() is None

    def _draw(self, visit: Visit) -> Plan:
        """The plan. Raises UserError when none can be made."""
        self.say("planning: arrivals, prompts and bodies")
        target = self.target
        try:
            if self._tokenizer is None and target.tokenizer:
                self._tokenizer = load_tokenizer(target.tokenizer)
            plan = make_plan(
                visit.scenario, self._tokenizer, model_name=target.about.model, repeat=visit.number,
                id_prefix=f"gap-{secrets.token_hex(4)}", say=self.say,
            )  # fmt: skip
            return plan.without_requests() if self.options.locustfile else plan
        except PlanError as error:
            raise UserError(str(error), errors.BAD_SCENARIO) from error

    def _begin(self, visit: Visit, plan: Plan) -> OpenManifest:
        """A fresh folder for a load, and its manifest before anything has run. Raises UserError without a folder."""
        scenario, into, sweep, path = visit.scenario, visit.into, visit.sweep, self.options.locustfile
        code = errors.USAGE if into is None else errors.NOT_VALID
        with unless_refused(f"no run's folder can be made in {into or self.options.runs}", code):
            if into is None:
                folder = RunFolder.create(self.options.runs, scenario.name, scenario.digest())
            else:
                folder = RunFolder.at(into)
        command = visit.command or self.options.command or _command_for(scenario, self.options)
        if sweep is not None:
            sweep = sweep.model_copy(update={"values": self.keys.out_of_value(sweep.values)})
        own = OwnUsers(name=path.name, sha256=hashlib.sha256(path.read_bytes()).hexdigest()) if path else None
        # Of somebody else's server the device is known where its probe writes: here.
        unseen = scenario.server.engine == "attach" and self.probes is None
        facts = PlanFacts(
            digest=plan.digest(),
            loop=plan.loop,
            planned=plan.planned,
            measured_from_ns=plan.warmup_ns,
            warmup_requests=plan.warmup_requests,
            end_ns=plan.end_ns,
            prompt_tokens_exact=plan.prompt_tokens_exact,
            prompt_tokens=int(plan.prompt_tokens.sum()),
            output_tokens=int(plan.output_tokens.sum()),
            rate_knots=plan.rate_knots if len(plan.rate_knots) <= _MOST_KNOTS else (),
            count_dispersion=plan.count_dispersion,
            prefix_share=plan.prefix_share,
            think_time_ns=plan.think_time_ns,
            conversations=int((plan.turns == 1).sum()) if len(plan.turns) else None,
            notes=plan.notes,
            warmup_auto=scenario.load.warmup_ns is None,
            warmup_ns=plan.warmup_ns,
            timeout_ns=plan.timeout_ns,
            # The users in a locustfile say how long answers are.
            output_enforced=self.target.about.dialect == "full" and own is None,
            locustfile=own,
        )
        manifest = Manifest(
            **dict(describe(scenario, command, self.keys)), repeat=visit.number, slo=scenario.slo,
            target=TargetFacts.model_validate(self.keys.out_of_value(self.target.about.to_json())),
            placement=placed(scenario), calibration=self.calibration,
            device="device" if unseen else "GPU" if gpus_here() else "CPU", plan=facts,
            sweep=sweep, capacity_of=visit.capacity_of,
        )  # fmt: skip
        return OpenManifest(folder, manifest)

    def _issue(self, scenario: Scenario, plan: Plan, manifest: OpenManifest, stop_when: StopWhen | None = None) -> None:
        """Load the server, note how that went, and bring what it recorded of that into the run's folder."""
        folder, placement, target = manifest.folder, placed(scenario), self.target
        load = Load(scenario, plan, target, self.process, placement, folder, self.options, stop_when)

        def begun(t0_ns: int) -> None:
            manifest.note_plan(t0_ns=t0_ns)
            manifest.note(started_s=time.time())
            manifest.write()

        if self.probes:
            self.probes.begin()
        log, suspended_before_ns = ServerLog(self.process, folder), suspended_ns()
        try:
            with telemetry(
                folder, scenario.telemetry, self._server_pids(), target.about.url, manifest.value.is_server_here,
                placement.generator, self.options.api_key, self.say,
            ):  # fmt: skip
                ended_because, shortened = load.run(begun)
            manifest.note(status="incomplete" if ended_because else "complete", ended_because=ended_because)
            manifest.note_plan(shortened=shortened)
        finally:
            suspended = suspended_ns() - suspended_before_ns
            manifest.note(suspended_ns=suspended if suspended > _BETWEEN_CLOCKS_NS else 0)
            if (workers := LocustWorkers.read(folder.requests)) is not None:  # their stamps are on their own clocks
                manifest.note(workers=workers)
                offsets_ns = {str(each.worker): each.clock_offset_ns for each in workers.workers}
                manifest.note_plan(clock_offsets_ns=offsets_ns)
            log.take(self.keys)
            self._take_records(manifest)

    def _server_pids(self) -> tuple[int, ...]:
        """The roots of the server's process trees; none where it is elsewhere.

        Of somebody else's server those that listen at its address, unless others record: a proxy listens before it.
        """
        if self.process is not None:
            return (self.process.pid,)
        listening = listeners(self.target.about.url)
        recording = self.probes.recording() if self.probes else ()
        return listening if not recording or set(listening) & set(recording) else recording

    def _take_records(self, manifest: OpenManifest) -> None:
        if not self.probes or not manifest.has_begun:
            return
        ours = self.target.spec is not None
        settled = self.probes.settle(_OURS_SETTLES_S if ours else _THEIRS_SETTLES_S)
        if not self.probes.take(manifest.folder, complete=settled and self.alive(), all_files=ours):
            path = self.probes.path
            self.say(f"{path} holds no records of this run; was this server started with GAPMETER_PROBE_DIR={path}?")


def check_options(scenario: Scenario, options: Options) -> None:
    """Raises UserError for options that do not go with the scenario, and for a scenario of several points."""
    if scenario.sweep:
        text = f"{scenario.name} is a sweep, which this does not run; name one point of it with --set 'sweep=[]'"
        raise UserError(text, errors.USAGE)
    if options.probe_dir is not None and scenario.server.engine != "attach":
        raise UserError("--probe-dir: a server that we launch has its own; leave it out, or write --url", errors.USAGE)
    path, load, problem = options.locustfile, scenario.load, ""
    if options.workers is not None and (problem := _not_for_workers(scenario, options.workers.count)):
        raise UserError(f"--workers {options.workers.count}: {problem}", errors.USAGE)
    if path is None:
        return
    if not path.is_file():
        raise UserError(f"--locustfile {path}: there is no such file", errors.USAGE)
    try:
        compile(path.read_bytes(), path, "exec")
    except SyntaxError as error:
        raise UserError(f"--locustfile: {path}:{error.lineno}: {error.msg}; correct it", errors.USAGE) from error
    if load.loop != "closed":
        problem = (
            f"its users wait for answers, but {scenario.name} is an open loop; write --set load.arrivals=closed --set "
            "load.rate=null --set load.concurrency=8 (the number of users, unless a shape in the file says it)"
        )
    elif load.duration_ns is None:
        problem = "its users decide how many requests there are; set a time instead: "
        problem += "--set load.requests=null --set load.duration=60s"
    elif load.generator != "locust":
        problem = "its users are Locust's; write load.generator=locust"
    elif options.workers is not None or load.processes > 1:
        problem = "its users live in one process; leave out --workers and load.processes"
    if problem:
        raise UserError(f"--locustfile: {problem}", errors.USAGE)


def _not_for_workers(scenario: Scenario, workers: int) -> str:
    """What keeps so many workers from sending this load; "" for nothing."""
    load = scenario.load
    if load.concurrency is not None and workers > load.concurrency:
        return f"they cannot share {load.concurrency} users; write fewer"
    if load.processes > 1:
        return f"each sends from one process; leave out load.processes ({load.processes}), or have more workers"
    return ""


def prepare_session(scenario: Scenario, options: Options) -> Session:
    """Prepare all that needs no running server. Raises UserError as ``prepare_target`` does."""
    check_options(scenario, options)
    placement = placed(scenario)
    target = prepare_target(scenario, placement.server, options.say, options.api_key)
    session = Session(scenario, options, placement, target)
    if target.spec is None and (folder := find_probe_folder(target.about.url, options.probe_dir)):
        session.probes = ProbeFolder(folder)
    return session


@contextlib.contextmanager
def open_session(scenario: Scenario, options: Options = Options(), *, home: Path) -> Iterator[Session]:
    """A server that is up for several loads; ``home`` is the folder for its log and records.

    The records are removed at the end: each load has its part. Raises UserError when it cannot be started, or the
    folder cannot be made.
    """
    session = prepare_session(scenario, options)
    folder = RunFolder(home)
    with unless_refused(f"{home} cannot be made"):
        if folder.probe.exists():  # of a server whose session was killed
            shutil.rmtree(folder.probe)
        for part in (folder.logs, folder.probe):
            part.mkdir(parents=True, exist_ok=True)
    try:
        with session.serving(folder, several=True):
            yield session
    finally:
        shutil.rmtree(folder.probe, ignore_errors=True)


def _command_for(scenario: Scenario, options: Options) -> Command:
    """What runs a scenario by itself: one of its name, changed to be it."""
    try:
        named = load_scenario(scenario.name, environment={})
    except ScenarioError:  # its file lies elsewhere
        return Command.of("run", scenario.name, flags=options.flags)
    return Command.of("run", scenario.name, changes(named, scenario), options.flags)


def placed(scenario: Scenario) -> Placement:
    """Who gets which cores. A server stays on those that it was started on."""
    load = scenario.load
    return place(load.processes, local_server=scenario.server.engine != "attach", share=load.placement == "shared")


def server_key(scenario: Scenario) -> str:
    """Equal for scenarios that one server can serve."""
    return json.dumps([scenario.to_dict()["server"], placed(scenario).server], sort_keys=True, default=str)
