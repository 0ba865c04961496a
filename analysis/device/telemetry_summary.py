"""What the samples beside a run say: means and extremes over the measured window, gaps, warnings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from gapmeter.analysis.device.telemetry import SOURCES, Ints, Samples, energy_of, servers_gpus
from gapmeter.analysis.device.utilisation import ForwardShares, forward_shares
from gapmeter.analysis.ledger.trace import Trace
from gapmeter.analysis.numbers import duration, share
from gapmeter.analysis.results.device import (
    EnergyWindow,
    EngineSamples,
    GpuSamples,
    PageTime,
    PcieLink,
    ProcessSamples,
    SamplerState,
    SourceSamples,
    Spread,
    Telemetry,
    Utilisation,
)
from gapmeter.analysis.results.manifest import Manifest
from gapmeter.analysis.results.trust import RunWarning

# GB/s of one PCIe lane in one direction, after encoding (PCI Express base specification, by generation).
_LANE_GB_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
_CPU_STEP_NS = 500_000_000  # psutil counts CPU time in steps of 10 ms: shorter stretches say little
_THROTTLED, _CLOCKS_FELL, _NEARLY_FULL, _MANY_GAPS, _DEAR_METRICS = 0.01, 0.03, 0.98, 0.1, 0.02


def measured_window(requests: pd.DataFrame) -> tuple[int, int] | None:
    """From the first measured due time to the last measured answer's end; None without a measured request."""
    measured = requests[requests["measured"]]
    if not len(measured):
        return None
    ends = measured["end_ns"].dropna()
    last = int(ends.max()) if len(ends) else int(measured["due_ns"].max())
    return int(measured["due_ns"].min()), last


def describe_telemetry(
    telemetry: Samples | None, trace: Trace | None, manifest: Manifest, window: tuple[int, int] | None
) -> Telemetry | None:
    """Over the measured window; None when nothing was sampled, or nothing measured. Unmeasured figures are None."""
    if telemetry is None or window is None:
        return None
    since, until = window
    gpus, processes = _gpus(telemetry, since, until), _processes(telemetry, trace, since, until)
    energy = measured_energy(telemetry, manifest, window)
    return Telemetry(
        window_s=(until - since) / 1e9,
        sources={source: _source(telemetry, source, since, until) for source in SOURCES},
        sampler=SamplerState(
            hz=telemetry.start.get("hz"),
            cpu_share=telemetry.cpu_share(),
            nice=telemetry.start.get("nice"),
            cores=telemetry.start.get("cores"),
            complete=telemetry.ended,
            broken_lines=telemetry.broken_lines,
        ),
        gpus=gpus,
        processes=processes,
        engine=_engine(telemetry, since, until),
        energy=energy,
        utilisation=_utilisation(gpus, processes, forward_shares(trace, since, until), len(manifest.placement.server)),
    )


def measured_energy(
    telemetry: Samples | None, manifest: Manifest, window: tuple[int, int] | None
) -> EnergyWindow | None:
    """Energy of the measured window; None where nothing counted it."""
    if telemetry is None or window is None or manifest.plan.t0_ns is None:
        return None
    return energy_of(telemetry, *window, manifest.plan.t0_ns)


def _source(telemetry: Samples, source: str, since: int, until: int) -> SourceSamples:
    """How many samples lie in the window and what is missing there; ``absent`` says why there are none at all."""
    at = np.unique(telemetry.of(source, since, until)["at_ns"].to_numpy(np.int64))
    gaps = [gap for gap in telemetry.gaps if gap.source == source and since <= gap.since_ns <= until]
    every = telemetry.about(source).get("every_ns")
    silent_ns = 0 if every is None or telemetry.ended else until - int(at[-1] if len(at) else since)
    unseen = max(0, silent_ns // every - 1) if every else 0  # a sampler that was killed noted no gap
    longest_ns = max([silent_ns if unseen else 0, *np.diff(at).tolist()])
    return SourceSamples(
        absent=telemetry.absent.get(source) if not len(at) else None,
        samples=len(at),
        expected=None if every is None else int((until - since) // every),
        missed=sum(gap.missed for gap in gaps) + unseen,
        gaps=len(gaps) + bool(unseen),
        longest_gap_s=longest_ns / 1e9 if longest_ns and len(at) else None,
        why=next((gap.why for gap in gaps), "the sampler was ended before the run" if unseen else None),
    )


def _spread(values: pd.Series, scale: float = 1.0) -> Spread | None:
    known = values.dropna().to_numpy(np.float64) * scale
    if not len(known):
        return None
    return Spread(mean=float(known.mean()), min=float(known.min()), max=float(known.max()))


def _gpus(telemetry: Samples, since: int, until: int) -> tuple[GpuSamples, ...]:
    """One entry a GPU that was sampled; ``server``: whether the server is known to use it."""
    rows, pcie = telemetry.of("gpu", since, until), telemetry.of("pcie", since, until)
    own, bits = servers_gpus(telemetry), telemetry.about("gpu").get("throttle_bits", {})
    found = []
    for about in telemetry.about("gpu").get("gpus", []):
        mine = rows[rows["gpu"] == about["gpu"]] if "gpu" in rows else rows

        def spread(column: str, scale: float = 1.0, mine: pd.DataFrame = mine) -> Spread | None:
            return _spread(mine[column], scale) if column in mine else None

        found.append(
            GpuSamples(
                gpu=about["gpu"],
                name=about.get("name"),
                server=about["gpu"] in own,
                power_w=spread("power_mw", 1e-3),
                sm_mhz=spread("sm_mhz"),
                memory_mhz=spread("memory_mhz"),
                temperature_c=spread("temperature_c"),
                memory_used_gib=spread("memory_used_bytes", 2.0**-30),
                memory_total_gib=spread("memory_total_bytes", 2.0**-30),
                busy_share=spread("busy_percent", 0.01),
                memory_busy_share=spread("memory_busy_percent", 0.01),
                throttled=_throttled(mine, bits),
                sm_fell_share=_fell(mine["sm_mhz"]) if "sm_mhz" in mine else None,
                pcie=_pcie(pcie[pcie["gpu"] == about["gpu"]] if "gpu" in pcie else pcie, about),
            )
        )
    return tuple(found)


def _throttled(rows: pd.DataFrame, bits: Mapping[str, int]) -> dict[str, float] | None:
    """Share of the samples in which each reason slowed the GPU down; reasons that never did are left out."""
    if "throttle_mask" not in rows or not len(rows):
        return None
    mask = rows["throttle_mask"].to_numpy(np.int64)
    shares = {words: float(np.mean((mask & bit) != 0)) for words, bit in bits.items()}
    return {words: part for words, part in shares.items() if part > 0}


def _fell(clock: pd.Series) -> float | None:
    """By how much the mean clock of the window's last fifth lies below that of its first."""
    known = clock.dropna().to_numpy(np.float64)
    fifth = len(known) // 5
    if fifth < 3:
        return None
    return float(1 - known[-fifth:].mean() / known[:fifth].mean())


def _pcie(rows: pd.DataFrame, about: Mapping[str, Any]) -> PcieLink | None:
    lane, width = _LANE_GB_S.get(about.get("pcie_generation") or 0), about.get("pcie_width")
    if not len(rows):
        return None
    rx, tx = (_spread(rows[name], 1e-6) if (name := f"pcie_{way}_kb_s") in rows else None for way in ("rx", "tx"))
    return PcieLink(rx_gb_s=rx, tx_gb_s=tx, link_gb_s=lane * width if lane and width else None)


def cpu_series(rows: pd.DataFrame) -> tuple[Ints, Any]:
    """Ends of stretches of half a second or more, and the cores that one process used in each on average."""
    at, cpu = rows["at_ns"].to_numpy(np.int64), rows["cpu_ns"].to_numpy(np.float64)
    kept = [0]
    for i in range(1, len(at)):
        if at[i] - at[kept[-1]] >= _CPU_STEP_NS:
            kept.append(i)
    cores = [(cpu[b] - cpu[a]) / (at[b] - at[a]) for a, b in pairwise(kept)]
    return at[kept[1:]], np.asarray(cores, np.float64)


def _processes(telemetry: Samples, trace: Trace | None, since: int, until: int) -> tuple[ProcessSamples, ...]:
    """One entry a process of the server, by its CPU time; CPU in cores, switches per second."""
    rows = telemetry.of("processes", since, until)
    found = []
    for pid, mine in rows.groupby("pid") if "pid" in rows else ():
        first, last = mine.iloc[0], mine.iloc[-1]
        seconds = (last["at_ns"] - first["at_ns"]) / 1e9
        if seconds <= 0:
            continue
        _, cores = cpu_series(mine)
        found.append(
            ProcessSamples(
                pid=int(pid),
                name=process_name(int(pid), str(last["name"]), trace),
                cpu_cores=float((last["cpu_ns"] - first["cpu_ns"]) / 1e9 / seconds),
                cpu_cores_max=float(cores.max()) if len(cores) else None,
                rss_gib=float(mine["rss_bytes"].max()) / 2**30,
                threads=int(mine["threads"].max()),
                voluntary_per_s=float((last["voluntary"] - first["voluntary"]) / seconds),
                involuntary_per_s=float((last["involuntary"] - first["involuntary"]) / seconds),
                samples=len(mine),
            )
        )
    return tuple(sorted(found, key=lambda process: -process.cpu_cores))


def process_name(pid: int, name: str, trace: Trace | None) -> str:
    """What the process is for, where its probe said so, and what it is called."""
    roles = [label.rpartition("-")[0] for label in trace.process_spans if label.endswith(f"-{pid}")] if trace else []
    return f"{roles[0]} ({name})" if roles else name


def _engine(telemetry: Samples, since: int, until: int) -> EngineSamples | None:
    rows = telemetry.of("engine", since, until)
    if not len(rows):
        return None
    asked, hits = _grown(rows, "prefix_queries"), _grown(rows, "prefix_hits")
    took = rows["took_ns"].to_numpy(np.float64) / 1e6
    running, waiting, kv_used = (
        _spread(rows[name]) if name in rows else None for name in ("running", "waiting", "kv_used_share")
    )
    return EngineSamples(
        running=running,
        waiting=waiting,
        kv_used_share=kv_used,
        preemptions=_grown(rows, "preemptions"),
        prefix_hit_share=hits / asked if asked and hits is not None else None,
        took_ms=PageTime(p50=float(np.median(took)), max=float(took.max())),
    )


def _grown(rows: pd.DataFrame, name: str) -> float | None:
    """How far a counter rose between the window's first and last sample that have it."""
    known = rows[name].dropna() if name in rows else pd.Series(dtype=float)
    return float(known.iloc[-1] - known.iloc[0]) if len(known) > 1 else None


def _utilisation(
    gpus: Sequence[GpuSamples], processes: Sequence[ProcessSamples], shares: ForwardShares, cores: int
) -> Utilisation:
    busy = [gpu.busy_share.mean for gpu in gpus if gpu.server and gpu.busy_share]
    used = sum(process.cpu_cores for process in processes) if processes else None
    return Utilisation(
        nvml_busy_share=float(np.mean(busy)) if busy else None,
        server_cpu_cores=used,
        server_cores=cores or None,
        server_cpu_share=used / cores if used is not None and cores else None,
        forward_share_of_window=shares.window,
        forward_share_of_step=shares.step,
        kernel_share_of_forward=shares.kernels,
        forward_by_device=shares.by_device,
    )


def telemetry_warnings(telemetry: Telemetry | None, manifest: Manifest) -> list[RunWarning]:
    """What in the samples puts a figure in doubt."""
    if telemetry is None:
        return []
    found = [warning for gpu in telemetry.gpus if gpu.server for warning in _gpu_warnings(gpu)]
    memory = manifest.hardware.memory_gib
    rss = sum(process.rss_gib for process in telemetry.processes)
    if memory and rss > 0.9 * memory:
        found.append(_warning("host-memory", f"the server's processes filled {rss:.1f} of {memory} GiB of memory",
                              "the next allocation may swap, or kill it"))  # fmt: skip
    return [*found, *_sampling_warnings(telemetry)]


def _gpu_warnings(gpu: GpuSamples) -> list[RunWarning]:
    name, found = f"GPU {gpu.gpu}", []
    for words, part in (gpu.throttled or {}).items():
        if part > _THROTTLED:
            text = f"{name} was throttled for {share(part)} of the run: {words}"
            found.append(_warning("throttled", text, "a cooler or less limited one would have been faster"))
    if gpu.sm_fell_share is not None and gpu.sm_fell_share > _CLOCKS_FELL:
        text = f"{name}: the SM clock fell by {share(gpu.sm_fell_share)} from the run's first fifth to its last"
        found.append(_warning("clocks", text, "it grew warm: a longer run is slower than this one"))
    used, total = gpu.memory_used_gib, gpu.memory_total_gib
    if used and total and used.max > _NEARLY_FULL * total.max:
        text = f"{name}: {used.max:.1f} of {total.max:.1f} GiB of memory were used"
        found.append(_warning("gpu-memory", text, "longer contexts may not fit"))
    return found


def _sampling_warnings(telemetry: Telemetry) -> list[RunWarning]:
    found = []
    for name, source in telemetry.sources.items():
        if source.expected and source.missed > _MANY_GAPS * source.expected:
            missed = min(source.missed, source.expected)
            text = f"telemetry of {name}: {missed} of {source.expected} samples are missing"
            longest = duration(1e3 * source.longest_gap_s) if source.longest_gap_s else "all of it"
            found.append(_warning("telemetry-gaps", text, f"{source.why}; the longest gap is {longest}"))
    engine, asked = telemetry.engine, telemetry.sources["engine"].expected
    if engine and asked and engine.took_ms.p50 / 1e3 * asked > _DEAR_METRICS * telemetry.window_s:
        text = f"each /metrics page took {duration(engine.took_ms.p50)} to come"
        cause = "it is made where tokens are sent from, and holds them up, unless it was the sampler that had to wait"
        flag = "--set telemetry.metrics_every=15s"
        found.append(RunWarning(code="metrics-cost", text=text, cause=cause, flag=flag, touches=("itl", "ttft")))
    return found


def _warning(code: str, text: str, cause: str) -> RunWarning:
    return RunWarning(code=code, text=text, cause=cause, flag="", touches=("ttft", "itl", "tpot", "e2e"))
