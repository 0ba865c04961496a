"""``make gpu-proof``: what gapmeter says of a GPU, held against what can be known of it, on a machine that has one.

Parts, in the order of their value: nvml, anchors, decode, transformers, vllm, kernels. Each runs in a process of its
own and keeps its raw files in a folder of its own; one that fails is reported with its reason, and the next one runs.
What they found, expected and unexpected, is written to gpu.md beside those.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench import gpu_decode, probe_cost
from bench.engine import Setting, environment
from gapmeter.analysis.ledger.device_time import anchors_of
from gapmeter.analysis.results import RunResult
from gapmeter.machine.hardware import CHECKOUT
from gapmeter.options import Options
from gapmeter.records import RecordWriter, read_records
from gapmeter.servers.telemetry import Absent
from gapmeter.servers.telemetry.gpu import READINGS, Gpus, open_gpus
from gapmeter.study.study import run_scenario

_PART_S = 1500
_ANCHORS = 300
_DRIFT_S = 60.0
_LAUNCHES_MS = 0.15  # a step of an idle device begins when its launches have come through
_SMI = ("index", "uuid", "name", "memory.total", "clocks.sm", "temperature.gpu")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: what was found and what was to be expected, None where nothing is known before."""

    what: str
    found: str
    expected: str = ""
    holds: bool | None = None


def near(what: str, found: float, expected: float, within: float, unit: str) -> Finding:
    """A figure that is known from elsewhere, to a share of it."""
    text = f"{expected:.4g} {unit}, ± {100 * within:g} %"
    return Finding(what, f"{found:.4g} {unit}", text, abs(found - expected) <= within * abs(expected))


def most(what: str, found: float, limit: float, unit: str) -> Finding:
    """A figure that should stay below a limit."""
    return Finding(what, f"{found:.4g} {unit}", f"at most {limit:g} {unit}", found <= limit)


# -- NVML


def nvml(folder: Path) -> Iterator[Finding]:
    """The reader beside nvidia-smi; the energy counter's step, and its slope beside the power."""
    gpus = _gpus()
    asked = ["nvidia-smi", f"--query-gpu={','.join(_SMI)}", "--format=csv,noheader,nounits"]
    listed = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=60).stdout
    (folder / "nvidia-smi.csv").write_text(listed)
    (folder / "nvml.json").write_text(json.dumps({"about": gpus.about, "rows": gpus.read()}, indent=1))
    by_uuid = {line[1].strip(): [cell.strip() for cell in line] for line in csv.reader(listed.splitlines())}
    about: list[dict[str, Any]] = gpus.about["gpus"]  # type: ignore[assignment]
    for gpu, row in zip(about, gpus.read(), strict=True):
        other, name = by_uuid[gpu["uuid"]], f"GPU {gpu['gpu']}"
        yield Finding(f"{name}: name", str(gpu["name"]), other[2], gpu["name"] == other[2])
        yield Finding(f"{name}: number", str(gpu["gpu"]), other[0], str(gpu["gpu"]) == other[0])
        yield near(f"{name}: memory", float(row["memory_total_bytes"]) / 2**20, float(other[3]), 0.01, "MiB")
        yield near(f"{name}: SM clock", float(row["sm_mhz"]), float(other[4]), 0.2, "MHz")
        yield near(f"{name}: temperature", float(row["temperature_c"]), float(other[5]), 0.1, "°C")
        yield Finding(f"{name}: not supported", ", ".join(gpu["unsupported"]) or "nothing")
    yield from _energy(folder, gpus)


def _energy(folder: Path, gpus: Gpus) -> Iterator[Finding]:
    rows, until = [], time.monotonic() + 5
    while time.monotonic() < until:
        rows.append({"at_ns": time.monotonic_ns(), **gpus.read()[0]})
        time.sleep(0.005)
    (folder / "energy.json").write_text(json.dumps(rows))
    if "energy_mj" not in rows[0]:
        yield Finding("energy counter", "not supported")
        return
    at, energy = (np.array([row[name] for row in rows], dtype=np.float64) for name in ("at_ns", "energy_mj"))
    steps = np.flatnonzero(np.diff(energy))
    yield Finding("energy counter: steps every", f"{np.median(np.diff(at[steps])) / 1e6:.0f} ms")
    watts = float((energy[-1] - energy[0]) / (at[-1] - at[0])) * 1e6
    for name, within in (("power_instant_mw", 0.05), ("power_mw", 0.15)):
        if name in rows[0]:
            yield near(
                f"energy over time beside {name}", watts, float(np.mean([row[name] for row in rows])) / 1e3, within, "W"
            )


def _gpus() -> Gpus:
    return open_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER"), "gpu", READINGS)


# -- the clocks


def anchors(folder: Path) -> Iterator[Finding]:
    """How narrow anchors are, idle and beside a full GPU; how the clocks drift; event pairs of known length."""
    import torch

    square = torch.ones(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for name, products in (("idle", 0), ("beside a full GPU", 40)):
        notes = _take(folder / f"{name.replace(' ', '-')}.gap", torch, _ANCHORS, 0.002, products, square)
        widths = np.array([note["half_width_ns"] for note in notes]) / 1e3
        yield most(f"half width of an anchor, {name}, p50", float(np.quantile(widths, 0.5)), 25, "µs")
        yield Finding(
            "the same, p99; wider than 25 µs", f"{np.quantile(widths, 0.99):.1f} µs; {np.mean(widths > 25):.1%}"
        )
    notes = _take(folder / "drift.gap", torch, int(_DRIFT_S / 2), 2.0, 0, square)
    yield from _drift(notes)
    yield from _event_pairs(torch)


def _take(path: Path, torch: Any, count: int, every_s: float, products: int, square: Any) -> list[dict[str, Any]]:
    """The notes of ``count`` anchors; before each, ``products`` matrix products keep the device busy."""
    from gapmeter_probe.device import DeviceClock

    writer = RecordWriter(path, {"role": "worker"})
    clock = DeviceClock(writer, torch)
    torch.cuda.synchronize()
    for _ in range(count):
        for _ in range(products):
            torch.mm(square, square)
        clock.anchor()
        if products:
            torch.cuda.synchronize()
        clock.resolve()
        time.sleep(every_s)
    writer.close()
    return [note for note in read_records(path).notes if note["type"] == "anchor"]


def _drift(notes: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Each anchor placed by its two neighbors, without itself."""
    found = anchors_of(notes)
    if found is None or len(found.device) < 5:
        yield Finding("drift", "too few anchors", "at least 5", False)
        return
    yield Finding("drift between the clocks", f"{1e6 * (found.drift or 0):.2f} ppm")
    device, host, width = found.device, found.host, found.half_width
    share = (device[1:-1] - device[:-2]) / (device[2:] - device[:-2])
    between = host[:-2] + share * (host[2:] - host[:-2])
    error = np.abs(between - host[1:-1])
    allowed = width[1:-1] + np.maximum(width[:-2], width[2:])
    yield most(
        "an anchor placed by its neighbors, beyond what both widths allow", float(np.mean(error > allowed)), 0, ""
    )
    yield Finding("the same, p99", f"{np.quantile(error, 0.99) / 1e3:.1f} µs")


def _event_pairs(torch: Any) -> Iterator[Finding]:
    """The device sleeps for so many of its cycles: twenty times as many take twenty times as long."""

    def lasted_ms(cycles: int) -> float:
        return statistics.median(gpu_decode.event_pair_ms(torch, lambda: torch.cuda._sleep(cycles)) for _ in range(5))

    ratios = [lasted_ms(40_000_000) / lasted_ms(2_000_000) for _ in range(6)][1:]  # its clock rises at first
    yield near("twenty times the cycles, by event pairs", statistics.median(ratios), 20, 0.01, "times")


# -- a decode loop of known times


def decode(folder: Path) -> Iterator[Finding]:
    """A graph, half a millisecond or more of the host's, sampling: is the pause the gap, are the kernels the GPU's?"""
    import torch

    for name, graph, pause_us, between_us in (
        ("graph", True, 500, 0), ("graph, pauses of 2 ms", True, 2000, 0), ("graph, 2 ms between steps", True, 0, 2000),
        ("kernel by kernel", False, 500, 0),
    ):  # fmt: skip
        work, forward_ms, sample_ms = gpu_decode.work_on_a_gpu(torch, graph=graph)
        own = folder / name.replace(" ", "-").replace(",", "")
        own.mkdir()
        found = gpu_decode.decode(own, torch, work, steps=300, pause_us=pause_us, between_us=between_us)
        (own / "found.json").write_text(json.dumps(asdict(found), default=lambda value: value.to_json()))
        yield Finding(f"{name}: ledger", "; ".join(found.refused) or "not refused", "not refused", not found.refused)
        more = found.device_ms - forward_ms - sample_ms
        alone = f"{forward_ms + sample_ms:.4g} ms alone, and at most {_LAUNCHES_MS} ms for its launches"
        yield Finding(f"{name}: device, a step", f"{found.device_ms:.4g} ms", alone, 0 <= more <= _LAUNCHES_MS)
        if pause_us:
            yield near(f"{name}: launch gap, a step", found.launch_gap_ms, pause_us / 1e3, 0.1, "ms")
        if between_us:
            yield near(f"{name}: host, a step", found.host_ms, between_us / 1e3, 0.1, "ms")
        yield most(f"{name}: unexplained", found.unexplained_ms, 0.01, "ms")


# -- servers


def transformers(folder: Path) -> Iterator[Finding]:
    """Our own server, with graphs and asynchronous batching on and off; what its probe costs."""
    for asynchronous in (False, True):
        for graphs in (False, True):
            args = {"async_batching": asynchronous, "cuda_graphs": graphs}
            name = f"async {'on' if asynchronous else 'off'}, graphs {'on' if graphs else 'off'}"
            yield from _served(folder, f"transformers, {name}", "transformers", "builtin:llama-1b", 8, args)
    setting = Setting("builtin:llama-1b", "bfloat16", probe_cost.USERS)
    yield _cost_found("transformers", probe_cost.measure("transformers", folder / "cost", 60.0, setting))


def vllm(folder: Path) -> Iterator[Finding]:
    """Both model runners, alone and in a batch of 32; what the probe costs."""
    from gapmeter.servers.vllm import find_python, installed

    if "vllm" not in installed(find_python(CHECKOUT)):
        yield Finding("vLLM", "its CUDA build is not installed here (make vllm)")
        return
    args = {"load_format": "dummy"}
    for runner in ("0", "1"):
        with environment(VLLM_USE_V2_MODEL_RUNNER=runner):
            for batch in (1, 32):
                name = f"vLLM, Model Runner V{1 + int(runner)}, batch {batch}"
                yield from _served(folder, name, "vllm", "builtin:llama-8b", batch, args)
    setting = Setting("builtin:llama-1b", "bfloat16", probe_cost.USERS, args)
    yield _cost_found("vLLM", probe_cost.measure("vllm", folder / "cost", 60.0, setting))


def kernels(folder: Path) -> Iterator[Finding]:
    """Kernels in windows of steps: how much of a forward they fill, and what looking costs the gaps between tokens."""
    gaps: dict[str, float] = {}
    for every in ("0", "100"):  # of graphs; without them the probe looks once by itself
        with environment(GAPMETER_PROBE_KERNELS=every):
            name = f"transformers, kernels sampled every {every} steps" if every != "0" else "transformers, no samples"
            result = _run(folder, "transformers", "builtin:llama-1b", 8, {"cuda_graphs": True})
            yield from _described(name, result)
            gaps[every] = result.metrics["itl"].ms(50.0) or float("nan")
            use = result.telemetry.utilisation.device if result.telemetry else None
            if every != "0":
                found = use.kernels if use else None
                text = f"{found.busy_share:.1%} of forwards, by {found.steps} of them" if found else "none"
                yield Finding(f"{name}: kernels ran", text, "found", found is not None)
    yield Finding("ITL p50 with samples over without", f"{gaps['100'] / gaps['0']:.3f} times")


def _served(folder: Path, name: str, engine: str, model: str, batch: int, args: Mapping[str, Any]) -> Iterator[Finding]:
    """One load on one server. What cannot be served is one finding, and the next is tried."""
    try:
        result = _run(folder, engine, model, batch, args)
    except Exception as error:  # noqa: BLE001 - the next server may do
        yield Finding(name, f"{type(error).__name__}: {error}", "a run", False)
        return
    yield from _described(name, result)


def _run(folder: Path, engine: str, model: str, batch: int, args: Mapping[str, Any]) -> RunResult:
    overrides = [
        f"server.engine={engine}", f"server.model={model}", "server.precision=bfloat16", f"server.max_batch={batch}",
        f"server.args={json.dumps(dict(args))}", "load.arrivals=closed", "load.rate=null", "load.duration=null",
        f"load.concurrency={batch}", f"load.requests={max(40, 8 * batch)}", "load.warmup=auto",
        'workload.output_tokens={"uniform":[100,140]}', "slo=[]",
    ]  # fmt: skip
    return run_scenario("chat-p99", overrides, Options(folder, quiet=True)).result


def _described(name: str, result: RunResult) -> Iterator[Finding]:
    device = result.telemetry.utilisation.device if result.telemetry else None
    refused = "; ".join(result.ledger.refused)
    yield Finding(f"{name}: ledger", refused or "not refused", "not refused", not refused)
    if device is None:
        yield Finding(f"{name}: device", "no step has device time", "every step", False)
        return
    share = device.untimed_steps / max(device.steps + device.untimed_steps, 1)
    yield most(f"{name}: steps without device time", share, 0.001, "of all")
    yield Finding(
        f"{name}: device",
        f"busy {device.busy_share:.1%}, waiting for its host {device.waiting_share:.1%}; forward "
        f"{device.forward_share:.1%}, sampling {device.sampling_share:.1%}, inputs {device.input_share:.1%}, copies "
        f"{device.copy_share:.1%}; width {device.half_width_us:.1f} µs; drift {device.drift_ppm or 0:.1f} ppm",
    )
    left = result.residual.last_token
    if left is not None:
        for which in ("unexplained", "strict"):
            p99 = getattr(left, which).p99_share
            yield most(f"{name}: {which}, p99", float(p99), 0.05, "of E2E")
    roofline = result.roofline.decode
    if roofline is not None:
        yield most(f"{name}: MBU", roofline.mbu.share, 1, "of the peak")
    if (e2e := result.compute.e2e) is not None:
        parts = ("compute", "launch_gap", "host", "queue")
        shares = [f"{part} {got.share:.1%}" for part in parts if (got := getattr(e2e.typical, part)) is not None]
        yield Finding(f"{name}: what typical requests waited for", ", ".join(shares).replace("launch_gap", "launches"))
    for warning in result.warnings:
        yield Finding(f"{name}: {warning.code}", warning.text)


def _cost_found(name: str, cost: Mapping[str, Any]) -> Finding:
    speed = cost["parts"]["all"]["tokens_per_s"]
    text = f"{speed['ratio']:.4f} ({speed['low']:.4f} .. {speed['high']:.4f}) of its tokens a second"
    return Finding(f"{name}: with the probe", text, "0.98 or more", speed["ratio"] >= 0.98)


PARTS: dict[str, Callable[[Path], Iterator[Finding]]] = {
    "nvml": nvml, "anchors": anchors, "decode": decode, "transformers": transformers, "vllm": vllm, "kernels": kernels,
}  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Run the parts named, all by default, and write the page. 1 when something was not as expected, or no GPU is."""
    parser = argparse.ArgumentParser(prog="make gpu-proof", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)")
    parser.add_argument("--folder", type=Path, help="where gpu.md and the raw files go (default: runs/gpu-proof-TIME)")
    parser.add_argument("--one", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - PARTS.keys():
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if options.one:
        _keep(options.one, options.folder)
        return 0
    try:
        about: list[dict[str, Any]] = _gpus().about["gpus"]  # type: ignore[assignment]
    except Absent as absent:
        print(f"nothing was proven: {absent}", file=sys.stderr)
        return 1
    folder = options.folder or Path("runs") / f"gpu-proof-{time.strftime('%Y%m%d-%H%M%S')}"
    found = {part: _in_a_process(part, folder / part) for part in options.parts or PARTS}
    driver = _gpus().about["driver"]
    text = page(", ".join(str(gpu["name"]) for gpu in about), str(driver), found)
    (folder / "gpu.md").write_text(text)
    print(text)
    print(f"raw files: {folder}")
    return int(any(finding.holds is False for findings in found.values() for finding in findings))


def _keep(part: str, folder: Path) -> None:
    """Run a part in this process; what it has found so far is kept, whatever comes."""
    findings: list[Finding] = []
    for finding in PARTS[part](folder):
        findings.append(finding)
        (folder / "findings.json").write_text(json.dumps([asdict(one) for one in findings], indent=1))


def _in_a_process(part: str, folder: Path) -> list[Finding]:
    folder.mkdir(parents=True)
    print(f"{part} …", flush=True)
    command = [sys.executable, "-m", "bench.gpu_proof", "--one", part, "--folder", str(folder)]
    with (folder / "log.txt").open("w") as log:
        try:
            ended = subprocess.run(command, stdout=log, stderr=log, timeout=_PART_S).returncode
        except subprocess.TimeoutExpired:
            ended = None
    kept = folder / "findings.json"
    findings = [Finding(**one) for one in json.loads(kept.read_text())] if kept.exists() else []
    if ended != 0:
        words = (folder / "log.txt").read_text().strip().splitlines()
        why = f"took longer than {_PART_S} s" if ended is None else words[-1] if words else f"exit code {ended}"
        findings.append(Finding(f"{part}: ended before its end", why, "its end", False))
    return findings


def page(gpus: str, driver: str, found: Mapping[str, Sequence[Finding]]) -> str:
    """All that was found, as Markdown."""
    lines = ["# On a GPU", "", f"Written by `make gpu-proof` on: {gpus}; driver {driver}.", ""]
    for part, findings in found.items():
        lines += [f"## {part}", "", "| what | found | expected | |", "| --- | --- | --- | --- |"]
        for one in findings:
            verdict = "" if one.holds is None else "as expected" if one.holds else "**not as expected**"
            lines.append(f"| {one.what} | {one.found} | {one.expected} | {verdict} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
