"""The proof for a GPU, as far as it goes without one: its decode loop in virtual time, its page, its refusal."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bench import gpu_decode, gpu_proof
from tests.kit.clocked import virtual_time
from tests.kit.cuda import Device, HostClock

COMPILER = shutil.which("cc") or shutil.which("gcc")
NVML = Path(__file__).parents[1] / "kit" / "nvml.c"
SMI = """#!/bin/sh
echo '0, GPU-0, NVIDIA H200, 144384, 1965, 60'
echo '1, GPU-1, NVIDIA H200, 144384, 1965, 60'
"""


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize(("pause_us", "between_us"), [(500, 0), (2000, 0), (0, 2000)])
def test_the_decode_loop_finds_its_own_pauses_and_kernels(
    tmp_path: Path, graph: bool, pause_us: int, between_us: int
) -> None:
    device = Device(HostClock(), drift_ppm=30)

    def forward() -> None:
        if graph:
            device.replay("forward", [50_000] * 60, 0)
            return
        for _ in range(60):
            device.launch("forward", 50_000)

    work = gpu_decode.Work(
        forward,
        lambda: device.launch("sampling", 200_000) and None,
        lambda: device.clock.wait_until(device.main.free_ns),
        device.clock.now,
        device.clock.spend,
    )
    with virtual_time(device.clock):
        found = gpu_decode.decode(tmp_path, device.torch, work, steps=100, pause_us=pause_us, between_us=between_us)
    assert found.refused == ()
    assert found.device_ms == pytest.approx(3.2, rel=0.01)
    assert found.launch_gap_ms == pytest.approx(pause_us / 1e3, rel=0.02, abs=0.02)
    assert found.host_ms == pytest.approx(between_us / 1e3, abs=0.08)
    assert found.unexplained_ms < 0.01
    assert found.use.drift_ppm == pytest.approx(-30, abs=5)


def test_an_anchor_that_its_neighbors_place_elsewhere_is_not_as_expected() -> None:
    notes = [
        {"type": "anchor", "number": n, "host_ns": n * 2_000_040_000, "half_width_ns": 4_000, "since_ns": 2_000_000_000}
        for n in range(1, 20)
    ]
    held = {finding.what: finding.holds for finding in gpu_proof._drift(notes)}
    assert held["an anchor placed by its neighbors, beyond what both widths allow"] is True
    notes[9]["host_ns"] += 50_000
    found = list(gpu_proof._drift(notes))
    assert [finding.holds for finding in found if "beyond" in finding.what] == [False]
    assert "20.0" in found[0].found and np.isfinite(float(found[0].found.split()[0]))


def test_without_a_gpu_it_says_so_in_a_sentence(tmp_path: Path) -> None:
    done = _proof(tmp_path, {"LD_LIBRARY_PATH": ""})
    if done.returncode == 0:
        pytest.skip("this machine has a GPU")
    assert done.stderr.startswith("nothing was proven: ")
    assert not (tmp_path / "raw").exists()


@pytest.mark.skipif(COMPILER is None, reason="no C compiler (cc) here")
def test_a_part_that_fails_is_reported_with_its_reason_and_the_others_are_kept(tmp_path: Path) -> None:
    assert COMPILER is not None
    made = [COMPILER, "-shared", "-fPIC", "-w", "-o", str(tmp_path / "libnvidia-ml.so.1"), str(NVML)]
    subprocess.run(made, check=True)
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = _proof(tmp_path, {"LD_LIBRARY_PATH": str(tmp_path), "FAKE_NVML": "alike", "PATH": path})
    assert done.returncode == 1
    text = (tmp_path / "raw" / "gpu.md").read_text()
    assert "NVIDIA H200, NVIDIA H200; driver 580.1" in text
    assert "| GPU 1: memory | 1.444e+05 MiB | 1.444e+05 MiB, ± 1 % | as expected |" in text
    assert "| decode: ended before its end | " in text and "**not as expected**" in text
    assert (tmp_path / "raw" / "nvml" / "energy.json").exists() and (tmp_path / "raw" / "decode" / "log.txt").exists()


def _proof(folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
    command = [sys.executable, "-m", "bench.gpu_proof", "nvml", "decode", "--folder", str(folder / "raw")]
    return subprocess.run(command, env=kept | environment, capture_output=True, text=True, timeout=300)
