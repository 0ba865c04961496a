"""NVML's reader with NVIDIA's own binding, which loads a library made for the test in the driver's place."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gapmeter.analysis.device.telemetry import read_telemetry
from gapmeter.records import RunFolder
from gapmeter.servers.telemetry.sampler import SamplerSettings
from gapmeter.servers.telemetry.sources import is_here

SOURCE = Path(__file__).parents[1] / "kit" / "nvml.c"
COMPILER = shutil.which("cc") or shutil.which("gcc")
READ = """
import json, os, sys
from gapmeter.servers.telemetry import Absent
from gapmeter.servers.telemetry.gpu import PCIE_READINGS, READINGS, open_gpus
named = os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER")
try:
    gpus, pcie = open_gpus(*named, "gpu", READINGS), open_gpus(*named, "pcie", PCIE_READINGS)
    print(json.dumps({"about": gpus.about, "rows": [gpus.read(), gpus.read()], "pcie": pcie.read()}))
except Absent as absent:
    print(json.dumps({"absent": str(absent)}))
"""
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler (cc) here")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the library."""
    folder = tmp_path_factory.mktemp("nvml")
    assert COMPILER is not None
    made = [COMPILER, "-shared", "-fPIC", "-w", "-o", str(folder / "libnvidia-ml.so.1"), str(SOURCE)]
    subprocess.run(made, check=True)
    return folder


def read(library: Path, machine: str, **named: str) -> dict[str, Any]:
    """What the reader finds on a machine; ``named``: CUDA's environment variables."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
    environment = kept | {"LD_LIBRARY_PATH": str(library), "FAKE_NVML": machine} | named
    done = subprocess.run([sys.executable, "-c", READ], env=environment, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_every_reading_comes_with_its_unit_and_a_counter_beyond_32_bits_is_whole(library: Path) -> None:
    found = read(library, "alike")
    first, second = found["rows"]
    assert [row["gpu"] for row in first] == [0, 1]
    assert first[0] == {
        "gpu": 0, "energy_mj": first[0]["energy_mj"], "power_mw": 500_000, "power_instant_mw": 623_456, "sm_mhz": 1980,
        "memory_mhz": 3201, "throttle_mask": 4, "temperature_c": 61, "memory_used_bytes": 100 << 30,
        "memory_total_bytes": 141 << 30, "busy_percent": 97, "memory_busy_percent": 40,
    }  # fmt: skip
    assert 7_000_000_000 <= first[0]["energy_mj"] < second[0]["energy_mj"]
    assert found["pcie"][0] == {"gpu": 0, "pcie_rx_kb_s": 2000, "pcie_tx_kb_s": 1000}
    about = found["about"]["gpus"][1]
    assert (about["name"], about["uuid"], about["pids"], about["power_limit_mw"]) == (
        "NVIDIA H200", "GPU-1", [4010], 700_000,
    )  # fmt: skip
    assert found["about"]["driver"] == "580.1"


def test_what_a_gpu_does_not_support_is_left_out_and_named(library: Path) -> None:
    found = read(library, "old")
    assert found["about"]["gpus"][0]["unsupported"] == ["energy", "instant power"]
    assert {"energy_mj", "power_instant_mw"}.isdisjoint(found["rows"][0][0])
    assert found["rows"][0][0]["power_mw"] == 500_000


@pytest.mark.parametrize(
    ("machine", "named", "numbers"),
    [
        ("alike", {"CUDA_VISIBLE_DEVICES": "1"}, [1]),
        ("alike", {"CUDA_VISIBLE_DEVICES": "GPU-1"}, [1]),
        ("unlike", {"CUDA_VISIBLE_DEVICES": "0"}, [0, 1]),  # CUDA's 0 is the faster one, NVML's the first on the bus
        ("unlike", {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, [0]),
        ("unlike", {"CUDA_VISIBLE_DEVICES": "GPU-1"}, [1]),
        ("unlike", {}, [0, 1]),
    ],
)
def test_gpus_are_those_that_cuda_shows_by_its_own_order(
    library: Path, machine: str, named: dict[str, str], numbers: list[int]
) -> None:
    found = read(library, machine, **named)
    assert [row["gpu"] for row in found["rows"][0]] == numbers


@pytest.mark.parametrize(
    ("visible", "gib", "instances", "pids"),
    [
        ("MIG-02", 9, ["MIG-02"], [4002]),
        ("MIG-01,MIG-02", 18, ["MIG-01", "MIG-02"], [4001, 4002]),
        ("MIG-GPU-0/3/0", 100, None, []),
    ],
)
def test_of_a_divided_gpu_memory_is_the_instances_and_the_rest_the_whole_ones(
    library: Path, visible: str, gib: int, instances: list[str] | None, pids: list[int]
) -> None:
    found = read(library, "divided", CUDA_VISIBLE_DEVICES=visible)
    (row,), (about,) = found["rows"][0], found["about"]["gpus"]
    assert (row["memory_used_bytes"], row["power_instant_mw"]) == (gib << 30, 623_456)
    assert "busy_percent" not in row and about["unsupported"] == ["utilisation"]
    assert (about.get("instances"), about["pids"]) == (instances, pids)


@pytest.mark.parametrize(("machine", "visible"), [("divided", "MIG-77"), ("orphaned", "MIG-01")])
def test_an_instance_that_is_not_there_or_nobodys_hides_every_gpu(library: Path, machine: str, visible: str) -> None:
    assert "hides every GPU" in read(library, machine, CUDA_VISIBLE_DEVICES=visible)["absent"]


@pytest.mark.parametrize(
    ("host", "here"), [("127.0.0.1", True), ("localhost", True), ("192.0.2.1", False), ("a..b", False)]
)
def test_this_machine_s_gpus_are_not_taken_for_those_of_a_server_on_another(
    library: Path, host: str, here: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "telemetry"
    folder.mkdir()
    url = f"http://{host}:9"
    settings = SamplerSettings(str(folder), 20.0, 0, url, is_here(url), (), (), ())
    command = [sys.executable, "-P", "-m", "gapmeter.servers.telemetry.sampler", settings.to_json()]
    environment = os.environ | {"LD_LIBRARY_PATH": str(library), "FAKE_NVML": "alike"}
    subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, check=True, start_new_session=True)
    found = read_telemetry(RunFolder(tmp_path))
    assert found.ended
    assert [source in found.tables for source in ("gpu", "pcie")] == [here, here]
    assert ("another machine" in found.absent.get("gpu", "")) is not here
    assert here or "rapl" not in found.tables
