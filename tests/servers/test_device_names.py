"""What the device's marks call by name is there: torch's events, streams and profiler, vLLM's runners and outputs."""

from __future__ import annotations

import ast
import inspect
import subprocess
from pathlib import Path

import pytest
from gapmeter_probe.vllm.worker import _COPY_STREAMS, WorkerProbe

from gapmeter.servers.vllm import find_python

DEVICE_HOOKS = (
    "_to_list",
    "AsyncGPUModelRunnerOutput.__init__",
    "AsyncOutput.__init__",
    "sample_tokens",
    "execute_model",
)
CHECKOUT = Path(__file__).parents[2]


def test_torch_has_the_events_the_streams_and_the_profiler_that_are_used() -> None:
    import torch  # it takes seconds, in every process that collects the tests
    from torch._C._autograd import _KinetoEvent
    from torch.autograd.profiler import profile

    assert {"record", "query", "elapsed_time"} <= set(dir(torch.cuda.Event))
    assert all(callable(getattr(torch.cuda, name)) for name in ("Stream", "current_device", "set_device"))
    assert {"use_cpu", "use_device", "use_kineto"} <= set(inspect.signature(profile).parameters)
    assert {"activity_type", "name", "start_ns", "duration_ns"} <= set(dir(_KinetoEvent))


@pytest.mark.vllm
def test_both_of_vllms_model_runners_have_what_is_hooked_for_a_device() -> None:
    where = "import importlib.util as u; print(u.find_spec('vllm').submodule_search_locations[0])"
    found = subprocess.run([find_python(CHECKOUT), "-c", where], capture_output=True, text=True, check=True)
    package = Path(found.stdout.strip())
    targets = [target for hook in WorkerProbe().hooks() for target in hook.targets if target.endswith(DEVICE_HOOKS)]
    assert len(targets) >= 7
    missing = []
    for target in targets:
        module, _, name = target.partition(":")
        path = package.joinpath(*module.split(".")[1:]).with_suffix(".py")
        scope = ast.parse(path.read_text()).body
        for part in name.split("."):
            scope = next(([*node.body] for node in scope if getattr(node, "name", None) == part), [])  # type: ignore[attr-defined]
        if not scope:
            missing.append(target)
    assert not missing
    runners = [(package / "v1/worker" / name).read_text() for name in ("gpu_model_runner.py", "gpu/model_runner.py")]
    assert all(f"self.{stream} " in text for stream, text in zip(_COPY_STREAMS, runners, strict=True))
