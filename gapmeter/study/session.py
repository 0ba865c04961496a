"""One server, several loads: it is started (or attached to) once and kept up; every load has a run's folder of its own.

with open_session(scenario, options, home=Path("runs/my-server")) as session:
    for rate in (2, 4, 8):
        result = session.load(resolve("chat-p99", [f"load.rate={rate}"]), into=Path(f"runs/my-trials/{rate}"))
"""

from __future__ import annotations

import contextlib
import importlib
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gapmeter import errors
from gapmeter.errors import UserError, reason_of
from gapmeter.loadgen import PlanError
from gapmeter.loadgen.plan import Plan
from gapmeter.loadgen.planner import make_plan
from gapmeter.loadgen.tokenizer import PromptTokenizer, load_tokenizer
from gapmeter.machine.calibration import load_calibration
from gapmeter.options import Options, RunResult, silent, tell
from gapmeter.records import RunFolder
from gapmeter.scenarios import Scenario
from gapmeter.servers.launch import ServerProcess
from gapmeter.study.account import accounted_for, finish
from gapmeter.study.attach import find_probe_folder
from gapmeter.study.keys import Keys
from gapmeter.study.load import issue
from gapmeter.study.locustfile import note_locustfile
from gapmeter.study.manifest import describe_hardware, describe_run, without_keys
from gapmeter.study.placement import Placement, place
from gapmeter.study.probes import ProbeFolder
from gapmeter.study.sampling import sampling
from gapmeter.study.serve import Target, prepare, running
from gapmeter.study.stopping import StopWhen

# How long a server is waited for until it does nothing more; others may be asking one that is not ours all the time.
_OURS_SETTLES_S, _THEIRS_SETTLES_S = 10.0, 1.0


class Session:
    """A server that can be loaded. Made by ``open_session``, or by ``prepare_session`` where it is yet to be started.

    ``process`` is None for a server that is not ours, ``probes`` where nothing records.
    """

    def __init__(self, scenario: Scenario, options: Options, placement: Placement, target: Target) -> None:
        self.scenario, self.options, self.placement, self.target = scenario, options, placement, target
        self.say = silent if options.quiet else tell
        self.keys = Keys.within(scenario.to_dict(), options.api_key)
        self.process: ServerProcess | None = None
        self.probes: ProbeFolder | None = None
        self.loads = 0
        self._tokenizer: PromptTokenizer | None = None

    @contextlib.contextmanager
    def serving(self, home: RunFolder, *, several: bool) -> Iterator[None]:
        """The server is up while the block lasts, its log and records in ``home``.

        ``several``: every load takes its part of the records; a single one of a server of ours leaves them where they
        are. Raises UserError when it cannot be started.
        """
        cores = self.placement.server
        with running(self.target, self.scenario, cores, home, self.say, self.keys, _import_analysis) as process:
            self.process = process
            if self.target.spec is not None and several:
                self.probes = ProbeFolder(home.probe)
            yield

    def load(
        self, scenario: Scenario, repeat: int | None = None, *, into: Path | None = None,
        stop_when: StopWhen | None = None, command: str = "", more: dict[str, Any] | None = None, show: bool = True,
    ) -> RunResult:  # fmt: skip
        """Load the server as ``scenario`` says, whose server must be this one's, and analyse it.

        ``into`` is the folder to make, None for one of the usual name among the runs. ``repeat`` numbers the texts, so
        that no prefix cache knows them; None: by the loads so far. ``stop_when`` ends the load early (about four times
        a second it is asked): the run is then a valid, shorter one. ``command`` repeats this load, ``more`` joins the
        manifest, ``show``: print the summary.

        A load that was interrupted (exit code 105) or lost its server is still analysed. Raises UserError when the
        server has died before, and as a run does.
        """
        if not self.serves(scenario):
            raise ValueError("the scenario asks for another server than this session's")
        if self.process is not None and (died := self.process.failure()):
            raise UserError(str(died), errors.UNREACHABLE)
        plan = self.draw(scenario, self.loads if repeat is None else repeat)
        folder = make_folder(self.options.runs, scenario, into)
        manifest = self.describe(scenario, plan, self.loads if repeat is None else repeat, command)
        manifest |= self.keys.out_of_value(more or {})
        self.loads += 1
        with accounted_for(folder, manifest):
            folder.write_json(folder.manifest, manifest)
            self.issue(scenario, plan, folder, manifest, stop_when)
            return finish(folder, manifest, quiet=self.options.quiet or not show)

    def serves(self, scenario: Scenario) -> bool:
        """Whether this session's server is the one that a scenario asks for."""
        return scenario.server == self.scenario.server and placed(scenario).server == self.placement.server

    def alive(self) -> bool:
        """Whether the server has not died; one that is not ours is taken to live."""
        return self.process is None or self.process.poll() is None

    def draw(self, scenario: Scenario, repeat: int) -> Plan:
        """The plan. Raises UserError when none can be made."""
        self.say("planning: arrivals, prompts and bodies")
        target = self.target
        try:
            if self._tokenizer is None and target.tokenizer:
                self._tokenizer = load_tokenizer(target.tokenizer)
            plan = make_plan(
                scenario, self._tokenizer, model_name=target.model, repeat=repeat,
                id_prefix=f"gap-{secrets.token_hex(4)}", dialect=target.dialect,
            )  # fmt: skip
            return plan.without_requests() if self.options.locustfile else plan
        except PlanError as error:
            raise UserError(str(error), errors.BAD_SCENARIO) from error

    def describe(self, scenario: Scenario, plan: Plan, repeat: int, command: str = "") -> dict[str, Any]:
        """A load's manifest before anything has run."""
        manifest = describe_run(scenario.to_dict(), scenario.digest(), command or self.options.command)
        manifest |= {"repeat": repeat, "slo": [asdict(slo) for slo in scenario.slo]}
        manifest |= {"placement": placed(scenario).to_dict(), "calibration": load_calibration()}
        manifest = note_locustfile(
            manifest | _describe(scenario, self.target, plan, probed=self.probes is not None), self.options.locustfile
        )
        return without_keys(manifest, self.keys)

    def issue(
        self, scenario: Scenario, plan: Plan, folder: RunFolder, manifest: dict[str, Any],
        stop_when: StopWhen | None = None,
    ) -> None:  # fmt: skip
        """Load the server and bring what it recorded of that into the run's folder."""
        if self.probes:
            self.probes.begin()
        placement = placed(scenario)
        log = _LogPart(self.process, folder, self.keys)
        try:
            with sampling(folder, scenario.telemetry, self.process, self.target.url, placement.generator, self.options):
                issue(scenario, plan, self.target, self.process, placement, folder, manifest, self.options, stop_when)
        finally:
            log.take()
            self._take_records(folder, manifest)

    def _take_records(self, folder: RunFolder, manifest: dict[str, Any]) -> None:
        if not self.probes or "t0_ns" not in manifest["plan"]:
            return
        ours = self.target.spec is not None
        settled = self.probes.settle(_OURS_SETTLES_S if ours else _THEIRS_SETTLES_S)
        if not self.probes.take(folder, complete=settled and self.alive(), all_files=ours):
            path = self.probes.path
            self.say(f"{path} holds no records of this run; was this server started with GAPMETER_PROBE_DIR={path}?")


def _import_analysis() -> None:
    """What the end of a load needs takes a second to import: had while a server starts, it costs nobody time.

    Not in a thread: a signal may find the main thread in an import of its own and keep the interpreter's import lock,
    for which the other would wait for ever.
    """
    importlib.import_module("gapmeter.analysis.analyse")


class _LogPart:
    """What the server logged during one load, where its log lies in another folder."""

    def __init__(self, process: ServerProcess | None, folder: RunFolder, keys: Keys) -> None:
        self._keys = keys
        self._from = process.log_path if process is not None else None
        self._to = folder.logs / "server.log"
        self._since = 0
        if self._from == self._to:
            self._from = None
        if self._from is not None:
            self._since = self._from.stat().st_size

    def take(self) -> None:
        if self._from is not None:
            with self._from.open("rb") as source:
                source.seek(self._since)
                self._to.write_bytes(self._keys.out_of_bytes(source.read()))


def prepare_session(scenario: Scenario, options: Options, *, model_named: bool = False) -> Session:
    """Everything that can be known before a server is started. Raises UserError as ``serve.prepare``."""
    if options.probe_dir is not None and scenario.server.engine != "attach":
        raise UserError("--probe-dir: a server that we launch has its own; leave it out, or write --url", errors.USAGE)
    placement = placed(scenario)
    say = silent if options.quiet else tell
    target = prepare(scenario, placement.server, say, api_key=options.api_key, model_named=model_named)
    session = Session(scenario, options, placement, target)
    if target.spec is None and (found := find_probe_folder(target.url, options.probe_dir)):
        session.probes = ProbeFolder(found)
    return session


@contextlib.contextmanager
def open_session(
    scenario: Scenario, options: Options = Options(), *, home: Path, model_named: bool = False
) -> Iterator[Session]:
    """A server that is up for several loads; ``home`` is the folder for its log and records.

    The records are removed at the end: each load has its part. Raises UserError when it cannot be started, or the
    folder cannot be made.
    """
    session = prepare_session(scenario, options, model_named=model_named)
    folder = RunFolder(home)
    try:
        for part in (folder.logs, folder.probe):
            part.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{home} cannot be made: {reason_of(error)}", errors.USAGE) from error
    try:
        with session.serving(folder, several=True):
            yield session
    finally:
        shutil.rmtree(folder.probe, ignore_errors=True)


def make_folder(runs: Path, scenario: Scenario, into: Path | None = None) -> RunFolder:
    """A fresh folder for a run. Raises UserError when it cannot be made."""
    try:
        if into is None:
            return RunFolder.create(runs, scenario.name, scenario.digest())
        return RunFolder.at(into)
    except OSError as error:
        place = into or runs
        raise UserError(f"no run's folder can be made in {place}: {reason_of(error)}", errors.USAGE) from error


def placed(scenario: Scenario) -> Placement:
    """Who gets which cores. A server stays on those that it was started on."""
    load = scenario.load
    return place(load.processes, local_server=scenario.server.engine != "attach", share=load.placement == "shared")


def _describe(scenario: Scenario, target: Target, plan: Plan, *, probed: bool) -> dict[str, Any]:
    """The manifest's part that is known once the target is and the plan is drawn."""
    return {
        "target": {"url": target.url, "model": target.model, "dialect": target.dialect, **target.facts},
        "device": _device(scenario, probed=probed),
        "plan": {
            **plan.describe(),
            "warmup_auto": scenario.load.warmup_ns is None,
            "warmup_ns": plan.warmup_ns,
            "timeout_ns": plan.timeout_ns,
            "output_enforced": target.dialect == "full",
        },
    }


def _device(scenario: Scenario, *, probed: bool) -> str:
    """What computes the forwards, in a word; of somebody else's server it is known where its probe writes: here."""
    if scenario.server.engine == "attach" and not probed:
        return "device"
    return "GPU" if describe_hardware()["gpus"] else "CPU"
