"""One run: scenario → plan → server → load → records → analysis. Everything the command line does, in one call."""

from __future__ import annotations

import contextlib
import json
import secrets
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gapmeter import errors
from gapmeter.attach import find_probe_folder, take_probe_files
from gapmeter.calibration import load_calibration
from gapmeter.errors import UserError
from gapmeter.manifest import MANIFEST_VERSION, describe_hardware, describe_run
from gapmeter.placement import Placement, place
from gapmeter.resolve import names_model, resolve
from gapmeter.serve import Target, prepare, running
from gapmeter.watch import Watch
from loadgen.cluster import Workers, make_cluster, report_path
from loadgen.errors import PlanError
from loadgen.fleet import Fleet, NotStarted, Unreachable, make_fleet
from loadgen.plan import Plan, make_plan
from loadgen.tokenizer import PromptTokenizer, load_tokenizer
from recording import RunFolder
from recording.reader import NotRecords
from scenarios import Scenario
from servers.launch import ServerProcess

_LOOK_EVERY_S = 0.25
_INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class Options:
    """What a run is told beside its scenario. ``command`` is what repeats it, for the manifest; "" to derive it."""

    runs: Path = Path("runs")
    probe_dir: Path | None = None
    api_key: str | None = None
    quiet: bool = False
    command: str = ""
    workers: Workers | None = None


@dataclass(frozen=True, slots=True)
class RunResult:
    """Where a run lies, what it found, and the exit code that says so."""

    folder: Path
    summary: dict[str, Any]
    exit_code: int


def run_scenario(name: str, overrides: Sequence[str] = (), options: Options = Options()) -> RunResult:
    """Run a scenario (a name or a file) once, whatever its ``repeat`` says, and analyse it.

    A run that is interrupted or loses its server is still analysed. Raises UserError for what the user can mend.
    """
    return _run(resolve(name, overrides), 0, _settled(options, name, overrides), names_model(overrides))


def run_repeats(name: str, overrides: Sequence[str] = (), options: Options = Options()) -> Iterator[RunResult]:
    """The scenario's ``repeat`` runs, one after the other, each with a folder of its own and fresh prompts.

    Ends after one that was interrupted. Raises UserError as ``run_scenario``.
    """
    scenario = resolve(name, overrides)
    options, named = _settled(options, name, overrides), names_model(overrides)
    for repeat in range(scenario.repeat):
        if scenario.repeat > 1 and not options.quiet:
            _tell(f"run {repeat + 1} of {scenario.repeat}")
        result = _run(scenario, repeat, options, named)
        yield result
        if result.exit_code == errors.INTERRUPTED:
            return


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
        raise UserError(f"{path} is not a run's folder: manifest.json: {error}", errors.USAGE) from error
    if manifest.get("schema_version") != MANIFEST_VERSION:
        version = manifest.get("schema_version")
        raise UserError(f"{path} was written in version {version} of the format, not {MANIFEST_VERSION}", errors.USAGE)
    return _finish(folder, manifest, quiet=quiet, definitions=definitions)


def _run(scenario: Scenario, repeat: int, options: Options, model_named: bool) -> RunResult:
    say = _silent if options.quiet else _tell
    placement = place(
        scenario.load.processes,
        local_server=scenario.server.engine != "attach",
        share=scenario.load.placement == "shared",
    )
    target = prepare(scenario, placement.server, say, api_key=options.api_key, model_named=model_named)
    probe = None if target.spec else find_probe_folder(target.url, options.probe_dir)
    plan = _plan(scenario, target, repeat, say)
    folder = _folder(options.runs, scenario)
    manifest = describe_run(scenario.to_dict(), scenario.digest(), options.command) | {"repeat": repeat}
    manifest |= {"slo": [asdict(slo) for slo in scenario.slo], "placement": placement.to_dict()}
    manifest |= {"calibration": load_calibration()}
    manifest |= _describe(scenario, target, plan)
    with _accounted_for(folder, manifest):
        folder.write_json(folder.manifest, manifest)
        with running(target, scenario, placement.server, folder, say) as process:
            _load(scenario, plan, target, process, placement, folder, manifest, options)
        if probe and not take_probe_files(probe, folder, manifest["started_ns"]):
            say(f"{probe} holds no records of this run; was this server started with GAPMETER_PROBE_DIR={probe}?")
        return _finish(folder, manifest, quiet=options.quiet)


@contextlib.contextmanager
def _accounted_for(folder: RunFolder, manifest: dict[str, Any]) -> Iterator[None]:
    """What ends a run early is noted in its folder, so that it can be reported with what had happened by then."""
    report = f"gapmeter report {folder.path}"
    try:
        yield
    except KeyboardInterrupt:
        _note_end(folder, manifest, _INTERRUPTED)
        text = f"; what was recorded by then: {report}" if _has_begun(manifest) else " before the load had begun"
        raise UserError(f"interrupted{text}", errors.INTERRUPTED) from None
    except UserError as error:
        _note_end(folder, manifest, str(error))
        raise
    except OSError as error:
        _note_end(folder, manifest, str(error))
        text = f"; make room, then see what was recorded: {report}" if _has_begun(manifest) else ""
        raise UserError(f"{folder.path} cannot be written: {_reason(error)}{text}", errors.NOT_VALID) from error


def _note_end(folder: RunFolder, manifest: dict[str, Any], why: str) -> None:
    """Why a run ended early, unless its load is over already, or an earlier reason is there."""
    if manifest["status"] != "running":
        return
    manifest["status"] = "incomplete"
    manifest.setdefault("ended_because", why)
    with contextlib.suppress(OSError):  # a full disk: the sentence that the user gets says so
        folder.write_json(folder.manifest, manifest)


def _has_begun(manifest: dict[str, Any]) -> bool:
    return "t0_ns" in manifest.get("plan", {})


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _settled(options: Options, name: str, overrides: Sequence[str]) -> Options:
    """With the command that repeats the run."""
    if options.command:
        return options
    words = ["gapmeter", "run", name, *(word for override in overrides for word in ("--set", override))]
    return replace(options, command=shlex.join(words))


def _folder(runs: Path, scenario: Scenario) -> RunFolder:
    try:
        return RunFolder.create(runs, scenario.name, scenario.digest())
    except OSError as error:
        raise UserError(f"no run's folder can be made in {runs}: {_reason(error)}", errors.USAGE) from error


def _plan(scenario: Scenario, target: Target, repeat: int, say: Callable[[str], None]) -> Plan:
    say("planning: arrivals, prompts and bodies")
    try:
        tokenizer: PromptTokenizer | None = load_tokenizer(target.tokenizer) if target.tokenizer else None
        return make_plan(
            scenario, tokenizer, model_name=target.model, repeat=repeat, id_prefix=f"gap-{secrets.token_hex(4)}",
            dialect=target.dialect,
        )  # fmt: skip
    except PlanError as error:
        raise UserError(str(error), errors.BAD_SCENARIO) from error


def _describe(scenario: Scenario, target: Target, plan: Plan) -> dict[str, Any]:
    """The manifest's part that is known once the target is and the plan is drawn."""
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
    scenario: Scenario, plan: Plan, target: Target, process: ServerProcess | None, placement: Placement,
    folder: RunFolder, manifest: dict[str, Any], options: Options,
) -> None:  # fmt: skip
    """Issue the plan and wait for the answers; the manifest says how that ended."""
    try:
        with _generators(scenario, plan, target, placement, folder, options) as fleet:
            manifest["plan"]["t0_ns"] = t0_ns = fleet.start()
            manifest["started_s"] = time.time()
            folder.write_json(folder.manifest, manifest)
            here = not options.quiet and options.workers is None
            progress = Watch(fleet.record_paths, scenario, plan, t0_ns) if here else None
            _watch(fleet, process, progress, manifest)
    except Unreachable as error:
        died = process.failure() if process else None
        said = str(died or f"{target.url} does not take connections: {error}")
        raise UserError(said, errors.UNREACHABLE) from error
    except NotStarted as error:
        raise UserError(f"the load could not begin: {error}", errors.NOT_VALID) from error
    finally:
        _note_workers(folder, manifest)
    manifest["status"] = "incomplete" if "ended_because" in manifest else "complete"


def _generators(
    scenario: Scenario, plan: Plan, target: Target, placement: Placement, folder: RunFolder, options: Options
) -> contextlib.AbstractContextManager[Fleet]:
    """What issues the plan: processes here, or workers elsewhere."""
    load, requests = scenario.load, folder.requests
    if options.workers is None:
        cores = placement.generator
        return make_fleet(plan, target.url, options.api_key, requests, cores, load.processes, generator=load.generator)
    say = _silent if options.quiet else _tell
    return make_cluster(plan, target.url, requests, options.workers, generator=load.generator, say=say)


def _note_workers(folder: RunFolder, manifest: dict[str, Any]) -> None:
    """What the master knows of each worker, if there was one; what they stamped is on their own clocks."""
    path = report_path(folder.requests)
    if path.exists():
        manifest["workers"] = told = json.loads(path.read_text())
        offsets = {str(worker["worker"]): worker["clock_offset_ns"] for worker in told["workers"]}
        manifest["plan"]["clock_offsets_ns"] = offsets


def _watch(fleet: Fleet, process: ServerProcess | None, progress: Watch | None, manifest: dict[str, Any]) -> None:
    """Show progress until the load has ended; note why, if it ended early."""

    def look() -> None:
        if progress is not None:
            progress.update()
        if process is not None and "ended_because" not in manifest and (failure := process.failure()):
            manifest["ended_because"] = str(failure)
            fleet.stop()

    try:
        _wait(fleet, look, manifest)
    finally:
        if progress is not None:
            progress.close()
    troubles = fleet.troubles()
    if troubles:
        manifest.setdefault("ended_because", "; ".join(troubles))


def _wait(fleet: Fleet, look: Callable[[], None], manifest: dict[str, Any]) -> None:
    """Until every generator process has ended: by itself, or asked to by Ctrl-C. A second Ctrl-C is raised."""
    try:
        fleet.wait(look, _LOOK_EVERY_S)
    except KeyboardInterrupt:
        manifest["ended_because"] = _INTERRUPTED
        _tell("stopping: what is in flight is recorded as aborted (Ctrl-C again leaves at once)")
        fleet.stop()
        fleet.wait(look, _LOOK_EVERY_S)


def _finish(folder: RunFolder, manifest: dict[str, Any], *, quiet: bool, definitions: bool = False) -> RunResult:
    """Analyse the folder and show the summary. Raises UserError when it holds nothing, or cannot be written."""
    if not _has_begun(manifest):
        why = manifest.get("ended_because", "the run ended before the load had begun")
        raise UserError(f"{folder.path}: no request was recorded: {why}", errors.NOT_VALID)
    from analysis.analyse import analyse  # its import takes a second or two: mistakes are told before
    from gapmeter.terminal import print_summary

    try:
        folder.write_json(folder.manifest, manifest | {"files": folder.hashes()})
        summary = analyse(folder, definitions=definitions)
    except NotRecords as error:
        raise UserError(f"{folder.path}: the records cannot be read: {error}", errors.NOT_VALID) from error
    except OSError as error:
        text = f"the results cannot be written: {_reason(error)}; the records are kept. Make room, then"
        raise UserError(f"{text} gapmeter report {folder.path}", errors.NOT_VALID) from error
    interrupted = manifest.get("ended_because") == _INTERRUPTED
    code = errors.INTERRUPTED if interrupted else int(summary["exit_code"])
    if not quiet:
        print_summary(summary, manifest, str(folder.report), str(manifest["command"]), code, sys.stderr)
    return RunResult(folder.path, summary, code)


def _tell(text: str) -> None:
    print(f"gapmeter: {text}", file=sys.stderr, flush=True)


def _silent(_: str) -> None:
    """For --quiet."""
