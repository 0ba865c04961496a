"""What the sampler reads: /metrics pages of several engines, NVML's own names, a powercap tree."""

from __future__ import annotations

import ast
import inspect
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from gapmeter.servers.telemetry import Absent, gpu
from gapmeter.servers.telemetry.sources import Rapl, Schedstat, is_here, label, parse_metrics
from tests.kit.wait import until

# What vLLM 0.32 sent during a run of 32 users, cut down to the figures that are read and some that must not be mistaken
# for them; the lines of our own servers; the names that SGLang documents, with values chosen here.
VLLM = (Path(__file__).parent / "metrics" / "vllm-0.32.txt").read_text()

OURS = """\
# HELP gapmeter_requests_accepted_total Requests that the engine took.
# TYPE gapmeter_requests_accepted_total counter
gapmeter_requests_accepted_total{model="gapmeter"} 20
gapmeter_engine_preemptions_total{model="gapmeter"} 0
gapmeter_requests_running{model="gapmeter"} 4
gapmeter_requests_waiting{model="gapmeter"} 1
gapmeter_kv_blocks{model="gapmeter"} 256
gapmeter_kv_blocks_free{model="gapmeter"} 192
gapmeter_requests_finished_total{model="gapmeter",outcome="ok"} 20
"""

SGLANG = """\
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="llama"} 7.0
sglang:token_usage{model_name="llama"} 0.28
sglang:num_queue_reqs{model_name="llama"} 2.0
"""
HAS_NVML = True
try:
    pynvml.nvmlInit()
except pynvml.NVMLError:
    HAS_NVML = False


def test_figures_of_vllm_are_found_among_its_histograms() -> None:
    assert parse_metrics(VLLM) == {
        "running": 25.0, "waiting": 0.0, "kv_used_share": 0.006105006105006083, "preemptions": 0.0,
        "prefix_queries": 34_809.0, "prefix_hits": 0.0,
    }  # fmt: skip


def test_several_engines_behind_one_page_are_added_up_and_their_shares_averaged() -> None:
    page = VLLM + VLLM.replace('engine="0"', 'engine="1"').replace("} 0.006105006105006083", "} 0.046105006105006083")
    assert parse_metrics(page)["running"] == 50.0
    assert parse_metrics(page)["kv_used_share"] == pytest.approx(0.026105)


def test_our_servers_blocks_become_a_share_of_the_kv_cache() -> None:
    assert parse_metrics(OURS) == {"running": 4.0, "waiting": 1.0, "preemptions": 0.0, "kv_used_share": 0.25}


def test_other_engines_pages_are_read_too_and_unknown_ones_give_nothing() -> None:
    assert parse_metrics(SGLANG) == {"running": 7.0, "waiting": 2.0, "kv_used_share": 0.28}
    assert parse_metrics("# HELP up x\nup 1\nnot a metric at all\nvllm:num_requests_running{} NaNope\n") == {}
    assert parse_metrics("vllm:num_requests_running 2\nvllm:num_requests_waiting NaN\n") == {"running": 2.0}


def test_a_label_with_a_brace_or_a_space_does_not_hide_its_value() -> None:
    assert parse_metrics('vllm:num_requests_running{model_name="a } b \\" c"} 2.0 1700000000\n') == {"running": 2.0}


def names_of_nvml() -> set[str]:
    """Every attribute of NVML that the reader names."""
    tree = ast.parse(inspect.getsource(gpu))
    mine = {"nvml", "pynvml", "self._nvml"}
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) in mine}


def test_every_function_and_constant_of_nvml_that_is_used_exists() -> None:
    used = names_of_nvml()
    assert {"nvmlDeviceGetTotalEnergyConsumption", "NVMLError_LibraryNotFound", "NVML_CLOCK_SM"} <= used
    assert not [name for name in used if not hasattr(pynvml, name)]


def test_nvml_functions_take_the_arguments_that_they_are_given() -> None:
    calls = [
        node
        for node in ast.walk(ast.parse(inspect.getsource(gpu)))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.startswith("nvml")
    ]
    assert len(calls) > 15
    for call in calls:
        inspect.signature(getattr(pynvml, call.func.attr)).bind(*call.args)


def test_throttle_reasons_have_nvml_s_own_bits() -> None:
    bits = gpu.throttle_bits(pynvml)
    assert bits["power cap"] == pynvml.nvmlClocksThrottleReasonSwPowerCap
    assert bits["too hot (hardware)"] == 0x40
    assert pynvml.nvmlClocksThrottleReasonGpuIdle not in bits.values()


@pytest.mark.skipif(HAS_NVML, reason="this machine has NVML")
def test_without_nvidia_s_library_there_is_no_gpu_and_a_reason() -> None:
    with pytest.raises(Absent, match="no NVIDIA GPU"):
        gpu.open_gpus(None, None, "gpu", gpu.READINGS)


@pytest.mark.skipif(HAS_NVML, reason="this machine has NVML")
def test_every_reading_of_a_gpu_that_cannot_be_asked_fails_with_nvml_s_error() -> None:
    for read in (*gpu.READINGS.values(), *gpu.PCIE_READINGS.values()):
        with pytest.raises(pynvml.NVMLError):
            read(pynvml, None)


@pytest.mark.parametrize(
    ("visible", "left"),
    [(None, [0, 1, 2]), ("", []), ("1", [1]), ("2,0", [2, 0]), ("GPU-bb", [1]), ("0,7,1", [0]), ("GPU-", [])],
)
def test_cuda_visible_devices_is_understood_as_cuda_does(visible: str | None, left: list[int]) -> None:
    assert gpu.visible_gpus(visible, {0: "GPU-aa1", 1: "GPU-bb2", 2: "GPU-cc3"}) == left


def domain(root: Path, name: str, words: str, energy: int) -> Path:
    path = root / name
    path.mkdir()
    (path / "name").write_text(words + "\n")
    (path / "max_energy_range_uj").write_text("262143328850\n")
    (path / "energy_uj").write_text(f"{energy}\n")
    return path


def test_a_powercap_tree_is_read_with_its_names_and_ranges(tmp_path: Path) -> None:
    package = domain(tmp_path, "intel-rapl:0", "package-0", 1000)
    domain(tmp_path, "intel-rapl:0:1", "dram", 500)
    rapl = Rapl(tmp_path)
    assert rapl.about["domains"][0] == {"domain": "intel-rapl:0", "name": "package-0", "range_uj": 262143328850}
    (package / "energy_uj").write_text("3000\n")
    assert rapl.read() == [
        {"domain": "intel-rapl:0", "energy_uj": 3000},
        {"domain": "intel-rapl:0:1", "energy_uj": 500},
    ]


def test_a_machine_without_powercap_says_so(tmp_path: Path) -> None:
    with pytest.raises(Absent, match="RAPL"):
        Rapl(tmp_path)


def test_a_process_is_called_by_its_module_its_script_or_its_own_title() -> None:
    def named(*words: str) -> str:
        return label(SimpleNamespace(cmdline=lambda: list(words), name=lambda: "python3.11"))  # type: ignore[arg-type]

    assert named("/usr/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--port", "1") == (
        "vllm.entrypoints.openai.api_server"
    )
    assert named("VLLM::EngineCore") == "VLLM::EngineCore"
    assert named("VLLM::EngineCore", "", "") == "VLLM::EngineCore", "what was behind it is empty"
    assert named("/usr/bin/python", "/opt/serve.py", "-m") == "serve.py"
    assert named() == "python3.11"


@pytest.mark.parametrize(
    "words",
    ["/opt/llama-server --api-key sk-secret", "llama-server -m model.gguf", "ollama serve", "python -c key='sk'"],
)
def test_a_program_without_a_script_is_called_by_its_own_name_and_not_by_an_options_value(words: str) -> None:
    process: Any = SimpleNamespace(cmdline=words.split, name=lambda: "its own name")
    assert label(process) == "its own name"


def test_what_a_thread_ran_and_waited_is_told_once_it_has_changed() -> None:
    script = "import sys, threading\nthreading.Thread(target=sys.stdin.readline).start()\nwhile True: sum(range(1000))"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) as process:
        try:
            until(lambda: len(list(Path(f"/proc/{process.pid}/task").iterdir())) == 2)
            source = Schedstat([process.pid])
            first = {row["tid"]: row for row in source.read()}
            later = []

            def told_of_the_busy_one_alone() -> bool:  # a loaded machine may let the other fall asleep late
                later[:] = source.read()
                return [row["tid"] for row in later] == [process.pid]

            until(told_of_the_busy_one_alone)
        finally:
            process.kill()
    assert len(first) == 2 and all("name" in row for row in first.values())
    (row,) = later
    assert row["tid"] == row["pid"] == process.pid and "name" not in row
    assert row["ran_ns"] > first[process.pid]["ran_ns"] and row["waited_ns"] >= first[process.pid]["waited_ns"]


def test_schedstat_of_nobody_is_absent() -> None:
    with pytest.raises(Absent, match="not on this machine"):
        Schedstat([])


def test_a_name_that_was_not_found_once_is_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as without_network:
        without_network.setattr(socket, "getaddrinfo", partial(socket.getaddrinfo, type=-1))  # which no address has
        assert not is_here("http://localhost:8000")
    assert is_here("http://localhost:8000")
