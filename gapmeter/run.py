"""One run: scenario → plan → server → load → records → analysis. Everything the command line does, in one call."""

from __future__ import annotations

import secrets
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from analysis.analyse import analyse
from gapmeter import errors
from gapmeter.errors import UserError
from gapmeter.manifest import describe_hardware, describe_run
from gapmeter.placement import Placement, place
from gapmeter.serve import Target, find_model, serve
from gapmeter.terminal import print_summary
from gapmeter.watch import Watch
from loadgen.errors import PlanError
from loadgen.fleet import Fleet, Unreachable, make_fleet
from loadgen.plan import Plan, make_plan
from loadgen.tokenizer import PromptTokenizer, load_tokenizer
from recording import RunFolder
from recording.reader import NotRecords
from scenarios import Scenario, ScenarioError, load_scenario, provenance

_LOOK_EVERY_S = 0.25


@dataclass(frozen=True, slots=True)
class Options:
    """What a run is told beside its scenario."""

    runs: Path = Path("runs")
    probe_dir: Path | None = None
    api_key: str | None = None
    quiet: bool = False


@dataclass(frozen=True, slots=True)
class RunResult:
    """Where a run lies, what it found, and the exit code that says so."""

    folder: Path
    summary: dict[str, Any]
    exit_code: int


def run_scenario(name: str, overrides: Sequence[str] = (), options: Options = Options()) -> RunResult:
    """Run a scenario (a name or a file) and analyse it.

    A run that is interrupted or loses its server is still analysed. Raises UserError for what the user can mend.
    """
    scenario = _scenario(name, overrides)
    folder = _folder(options.runs, scenario)
    say = _silent if options.quiet else _tell
    placement = place(scenario.load.processes, local_server=scenario.server.engine != "attach")
    manifest = describe_run(scenario.to_dict(), scenario.digest(), sys.argv)
    manifest |= {"slo": [asdict(slo) for slo in scenario.slo], "placement": placement.to_dict()}
    model = scenario.server.tokenizer if scenario.server.engine == "attach" else find_model(scenario, say)
    interrupted = False
    try:
        with serve(scenario, placement, folder, model or "", say) as target:
            plan = _plan(scenario, target, say)
            manifest |= _describe(scenario, target, plan)
            interrupted = _load(scenario, plan, target, placement, folder, manifest, options)
    except KeyboardInterrupt:
        raise UserError("interrupted before the load had begun", errors.INTERRUPTED) from None
    if options.probe_dir:
        _take_probe_files(options.probe_dir, folder, manifest["started_ns"])
    return _finish(folder, manifest, quiet=options.quiet, interrupted=interrupted)


def report_again(path: Path, *, quiet: bool = False) -> RunResult:
    """Analyse a run again from its folder alone. Raises UserError when it is no run's folder."""
    folder = RunFolder(path)
    try:
        manifest = folder.read_manifest()
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:
        raise UserError(f"{path} is not a run's folder: {error}", errors.USAGE) from error
    return _finish(folder, manifest, quiet=quiet, interrupted=manifest.get("ended_because") == "interrupted")


def explain_config(name: str, overrides: Sequence[str]) -> list[tuple[str, object, str]]:
    """Each key of the resolved scenario with its value and where that came from. Raises UserError."""
    try:
        return [(setting.key, setting.value, setting.source) for setting in provenance(name, overrides)]
    except ScenarioError as error:
        raise UserError(str(error), errors.BAD_SCENARIO) from error


def _scenario(name: str, overrides: Sequence[str]) -> Scenario:
    try:
        return load_scenario(name, overrides)
    except ScenarioError as error:
        raise UserError(str(error), errors.BAD_SCENARIO) from error


def _folder(runs: Path, scenario: Scenario) -> RunFolder:
    try:
        return RunFolder.create(runs, scenario.name, scenario.digest())
    except OSError as error:
        raise UserError(f"the run's folder cannot be made: {error}", errors.USAGE) from error


def _plan(scenario: Scenario, target: Target, say: Callable[[str], None]) -> Plan:
    say("planning: arrivals, prompts and bodies")
    try:
        tokenizer: PromptTokenizer | None = load_tokenizer(target.tokenizer) if target.tokenizer else None
        prefix = f"gap-{secrets.token_hex(4)}"
        return make_plan(scenario, tokenizer, model_name=target.model, id_prefix=prefix, dialect=target.dialect)
    except PlanError as error:
        raise UserError(str(error), errors.BAD_SCENARIO) from error


def _describe(scenario: Scenario, target: Target, plan: Plan) -> dict[str, Any]:
    """The manifest's part that is known once the server answers and the plan is drawn."""
    return {
        "target": {"url": target.url, "model": target.model, "dialect": target.dialect, **target.facts},
        "device": _device(scenario),
        "plan": {
            **plan.describe(),
            "warmup_auto": scenario.load.warmup_ns is None,
            "warmup_ns": plan.warmup_ns,
            "timeout_ns": plan.timeout_ns,
            "output_enforced": target.dialect == "full",
        },
    }


def _device(scenario: Scenario) -> str:
    """What computes the forwards, in a word. A server of somebody else's is taken to have a GPU."""
    return "CPU" if scenario.server.engine != "attach" and not describe_hardware()["gpus"] else "GPU"


def _load(
    scenario: Scenario, plan: Plan, target: Target, placement: Placement, folder: RunFolder, manifest: dict[str, Any],
    options: Options,
) -> bool:  # fmt: skip
    """Issue the plan and wait for the answers; True when the user interrupted it."""
    processes = scenario.load.processes
    try:
        with make_fleet(plan, target.url, options.api_key, folder.requests, placement.generator, processes) as fleet:
            t0_ns = fleet.start()
            manifest["plan"]["t0_ns"] = t0_ns
            manifest["started_s"] = time.time()
            folder.write_json(folder.manifest, manifest)
            interrupted = _watch(fleet, scenario, plan, t0_ns, target, manifest, options)
    except Unreachable as error:
        raise UserError(f"{target.url} refused the connections: {error}", errors.UNREACHABLE) from error
    manifest["status"] = "incomplete" if manifest.get("ended_because") else "complete"
    return interrupted


def _watch(
    fleet: Fleet, scenario: Scenario, plan: Plan, t0_ns: int, target: Target, manifest: dict[str, Any],
    options: Options,
) -> bool:  # fmt: skip
    """Show progress until the load has ended; note why, if it ended early."""
    progress = None if options.quiet else Watch(fleet.record_paths, scenario, plan, t0_ns)

    def look() -> None:
        if progress is not None:
            progress.update()
        if target.process is not None and not manifest.get("ended_because"):
            failure = target.process.failure()
            if failure is not None:
                manifest["ended_because"] = str(failure)
                fleet.stop()

    interrupted = False
    while True:
        try:
            codes = fleet.wait(look, _LOOK_EVERY_S)
            break
        except KeyboardInterrupt:
            if interrupted:
                raise
            interrupted = True
            manifest["ended_because"] = "interrupted"
            _tell("stopping: what is in flight is recorded as aborted (Ctrl-C again leaves at once)")
            fleet.stop()
    if progress is not None:
        progress.close()
    if any(code not in (0, 1) for code in codes) and not manifest.get("ended_because"):
        manifest["ended_because"] = f"a generator process ended with exit code {max(codes, key=abs)}"
    return interrupted


def _take_probe_files(source: Path, folder: RunFolder, since_ns: int) -> None:
    """Copy what an attached server's probe wrote. Raises UserError when it wrote nothing."""
    files = sorted(source.glob("*.gap"))
    if not files:
        raise UserError(f"{source} holds no probe records; was the server started with it?", errors.USAGE)
    for file in files:
        shutil.copy2(file, folder.probe / file.name)


def _finish(folder: RunFolder, manifest: dict[str, Any], *, quiet: bool, interrupted: bool) -> RunResult:
    try:
        folder.write_json(folder.manifest, manifest | {"files": folder.hashes()})
        summary = analyse(folder)
    except (NotRecords, KeyError) as error:
        raise UserError(f"{folder.path}: nothing was recorded that could be analysed ({error})", errors.NOT_VALID) from error
    except OSError as error:
        raise UserError(f"the results cannot be written: {error}", errors.NOT_VALID) from error
    code = errors.INTERRUPTED if interrupted else int(summary["exit_code"])
    if not quiet:
        again = str(manifest["command"])
        print_summary(summary, manifest, str(folder.report), again, code, sys.stderr)
    return RunResult(folder.path, summary, code)


def _tell(text: str) -> None:
    print(f"gapmeter: {text}", file=sys.stderr, flush=True)


def _silent(_: str) -> None:
    """For --quiet."""
