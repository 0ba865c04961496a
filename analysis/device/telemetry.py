"""What the sampler wrote beside a run: read back, and over the measured window means, extremes, gaps, and shares.

Nothing is filled in: a deadline that passed unread and a read that failed stay gaps. Units are in the names, as in
docs/telemetry.md; every stamp is CLOCK_MONOTONIC ns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from gapmeter.analysis.arrays import Floats, Ints, changes, runs
from gapmeter.analysis.device.use import by_step, describe_device, length, within
from gapmeter.analysis.ledger.trace import Trace
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
from gapmeter.analysis.samples import read_notes, read_rows
from gapmeter.records import RunFolder, Span

SOURCES = ("gpu", "pcie", "rapl", "processes", "engine")
# GB/s of one PCIe lane in one direction, after encoding (PCI Express base specification, by generation).
_LANE_GB_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
_DISK_FULL = "the disk was full"
_CPU_STEP_NS = 500_000_000  # psutil counts CPU time in steps of 10 ms: shorter stretches say little
_PARTS_OF_A_STEP = (
    Span.SCHEDULE, Span.EXECUTE, Span.SAMPLE_CALL, Span.UPDATE, Span.OUTPUT_PUT, Span.WORKER, Span.INPUT_PREP,
    Span.FORWARD, Span.SAMPLING, Span.HOST_LAUNCH, Span.DEVICE_STEP,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Gap:
    """A stretch of time in which ``source`` has no samples though it should have. ``missed`` deadlines, and why."""

    source: str
    since_ns: int
    until_ns: int
    missed: int
    why: str

    def missed_within(self, since_ns: int, until_ns: int, every_ns: int | None) -> int:
        """Deadlines of it, the first at its start, from ``since_ns`` to ``until_ns``, both included."""
        every = every_ns or max(self.until_ns - self.since_ns, 1)
        first = max(-(-(since_ns - self.since_ns) // every), 0)
        return max(min((until_ns - self.since_ns) // every, self.missed - 1) - first + 1, 0)


@dataclass(frozen=True)
class Samples:
    """All samples of a run. ``tables`` has a frame a source, with ``at_ns``; a source that was never read has none.

    ``absent`` says why a source is not there. ``ended``: the sampler closed its files itself.
    """

    tables: Mapping[str, pd.DataFrame]
    notes: tuple[Mapping[str, Any], ...]
    absent: Mapping[str, str]
    broken_lines: int

    @property
    def start(self) -> Mapping[str, Any]:
        """What the sampler said of itself and of its sources, {} when it did not live to."""
        return next((note for note in self.notes if note["type"] == "start"), {})

    @property
    def ended(self) -> bool:
        return any(note["type"] == "end" for note in self.notes)

    def about(self, source: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.start.get("sources", {}).get(source, {})
        return found

    def of(self, source: str, since_ns: int, until_ns: int) -> pd.DataFrame:
        """The source's samples from ``since_ns`` to ``until_ns``, both included."""
        table = self.tables.get(source, pd.DataFrame({"at_ns": np.empty(0, np.int64)}))
        return table[(table["at_ns"] >= since_ns) & (table["at_ns"] <= until_ns)]

    @cached_property
    def gaps(self) -> tuple[Gap, ...]:
        """All gaps of the samples, in the order of time."""
        gaps = []
        for note in self.notes:
            if note["type"] == "missed":
                times = note["since_ns"], note["until_ns"], note["count"]
                gaps += [Gap(source, *times, "no core, or stopped") for source in note["sources"]]
            elif note["type"] == "failed":
                every = int(self.about(note["source"]).get("every_ns", 0))
                gaps.append(Gap(note["source"], note["at_ns"], note["at_ns"] + every, 1, note["why"]))
        return tuple(sorted(gaps, key=lambda gap: (gap.since_ns, gap.source)))

    @property
    def dropped(self) -> int:
        """Lines that did not fit on the disk, as far as the sampler could say so."""
        return max((note.get("dropped", 0) for note in self.notes), default=0)

    def cpu_share(self) -> float | None:
        """What sampling cost: CPU over wall time between the sampler's start and its last word."""
        notes = [note for note in self.notes if "cpu_ns" in note]
        wall_ns = notes[-1]["at_ns"] - notes[0]["at_ns"] if notes else 0
        return float((notes[-1]["cpu_ns"] - notes[0]["cpu_ns"]) / wall_ns) if wall_ns > 0 else None


def read_telemetry(folder: RunFolder) -> Samples | None:
    """None when nothing was sampled. A line that a kill left half written is counted and passed over."""
    notes, broken = read_notes(folder.telemetry / "sampler.jsonl")
    if not notes:
        return None
    tables = {}
    for source in SOURCES:
        rows, bad = read_rows(folder.telemetry / f"{source}.jsonl")
        broken += bad
        if rows:
            tables[source] = pd.DataFrame(rows)
    absent = {note["source"]: note["why"] for note in notes if note["type"] == "absent"}
    return Samples(tables, tuple(notes), absent, broken)


def servers_gpus(telemetry: Samples) -> set[int]:
    """Indices of the GPUs that the server uses, or all that were sampled where NVML does not show whose they are."""
    described = telemetry.about("gpu").get("gpus", [])
    processes = telemetry.tables.get("processes")
    pids = set() if processes is None else set(processes["pid"].tolist())
    own = {int(gpu["gpu"]) for gpu in described if pids & set(gpu.get("pids") or ())}
    return own or {int(gpu["gpu"]) for gpu in described}


def measured_window(requests: pd.DataFrame) -> tuple[int, int] | None:
    """From the first measured due time to the last measured answer's end; None without a measured request."""
    measured = requests[requests["measured"]]
    if not len(measured):
        return None
    ends = measured["end_ns"].dropna()
    last = int(ends.max()) if len(ends) else int(measured["due_ns"].max())
    return int(measured["due_ns"].min()), last


def describe_telemetry(
    samples: Samples | None, trace: Trace | None, manifest: Manifest, window: tuple[int, int] | None,
    energy: EnergyWindow | None,
) -> Telemetry | None:  # fmt: skip
    """Over the measured window; None when nothing was sampled, or nothing measured. Unmeasured figures are None."""
    if samples is None or window is None:
        return None
    gpus = tuple(_gpus(samples, *window))
    processes = tuple(sorted(_processes(samples, trace, *window), key=lambda process: -process.cpu_cores))
    return Telemetry(
        window_s=(window[1] - window[0]) / 1e9,
        sources={source: _source(samples, source, *window) for source in SOURCES},
        sampler=SamplerState(
            hz=samples.start.get("hz"),
            cpu_share=samples.cpu_share(),
            nice=samples.start.get("nice"),
            cores=samples.start.get("cores"),
            complete=samples.ended,
            broken_lines=samples.broken_lines,
        ),
        gpus=gpus,
        processes=processes,
        engine=_engine(samples, *window),
        energy=energy,
        utilisation=describe_utilisation(gpus, processes, trace, window, len(manifest.placement.server)),
    )


def _source(telemetry: Samples, source: str, since: int, until: int) -> SourceSamples:
    """How many samples lie in the window and what is missing there; ``absent`` says why there are none at all."""
    at = np.unique(telemetry.of(source, since, until)["at_ns"].to_numpy(np.int64))
    every = telemetry.about(source).get("every_ns")
    own = [(gap, gap.missed_within(since, until, every)) for gap in telemetry.gaps if gap.source == source]
    gaps = [(gap, missed) for gap, missed in own if missed]
    silent_ns = 0 if every is None or telemetry.ended else until - int(at[-1] if len(at) else since)
    unseen = max(0, silent_ns // every - 1) if every else 0  # a sampler that was killed noted no gap
    expected = None if every is None else int((until - since) // every)
    missed = sum(missed for _, missed in gaps) + unseen
    lost = max(0, expected - len(at) - missed) if expected and telemetry.dropped else 0
    missed += lost
    whys = [gap.why for gap, _ in gaps]
    whys += [_DISK_FULL] * bool(lost) + [f"the sampler was ended before the run, or {_DISK_FULL}"] * bool(unseen)
    edges = [since, *at.tolist(), until] if missed else at  # where some are missing, they may be so at either end
    longest_ns = max(np.diff(edges).tolist(), default=0)
    return SourceSamples(
        absent=telemetry.absent.get(source) if not len(at) else None,
        samples=len(at),
        expected=expected,
        missed=missed,
        gaps=len(gaps) + bool(unseen) + bool(lost),
        longest_gap_s=longest_ns / 1e9 if longest_ns and len(at) else None,
        why=next(iter(whys), None),
    )


def _known(rows: pd.DataFrame, column: str) -> Floats:
    """The values of a column that were sampled, in time order; none where the source has no such column."""
    return rows[column].dropna().to_numpy(np.float64) if column in rows else np.zeros(0)


def _spread(rows: pd.DataFrame, column: str, scale: float = 1.0) -> Spread | None:
    values = _known(rows, column) * scale
    return Spread(mean=float(values.mean()), min=float(values.min()), max=float(values.max())) if len(values) else None


def _gpus(telemetry: Samples, since: int, until: int) -> Iterator[GpuSamples]:
    """One entry a GPU that was sampled; ``server``: whether the server is known to use it."""
    rows, pcie = telemetry.of("gpu", since, until), telemetry.of("pcie", since, until)
    own, bits = servers_gpus(telemetry), telemetry.about("gpu").get("throttle_bits", {})
    for about in telemetry.about("gpu").get("gpus", []):
        mine = rows[rows["gpu"] == about["gpu"]] if "gpu" in rows else rows
        clock = _known(mine, "sm_mhz")
        fifth = len(clock) // 5
        yield GpuSamples(
            gpu=about["gpu"],
            name=about.get("name"),
            server=about["gpu"] in own,
            power_w=_spread(mine, "power_instant_mw", 1e-3) or _spread(mine, "power_mw", 1e-3),
            sm_mhz=_spread(mine, "sm_mhz"),
            memory_mhz=_spread(mine, "memory_mhz"),
            temperature_c=_spread(mine, "temperature_c"),
            memory_used_gib=_spread(mine, "memory_used_bytes", 2.0**-30),
            memory_total_gib=_spread(mine, "memory_total_bytes", 2.0**-30),
            busy_share=_spread(mine, "busy_percent", 0.01),
            memory_busy_share=_spread(mine, "memory_busy_percent", 0.01),
            throttled=_throttled(mine, bits),
            sm_fell_share=float(1 - clock[-fifth:].mean() / clock[:fifth].mean()) if fifth >= 3 else None,
            pcie=_pcie(pcie[pcie["gpu"] == about["gpu"]] if "gpu" in pcie else pcie, about),
        )


def _throttled(rows: pd.DataFrame, bits: Mapping[str, int]) -> dict[str, float] | None:
    """Share of the samples in which each reason slowed the GPU down; reasons that never did are left out."""
    mask = _known(rows, "throttle_mask").astype(np.uint64)  # whose highest bit says that nobody knows why
    if not len(mask):
        return None
    shares = {words: float(np.mean((mask & bit) != 0)) for words, bit in bits.items()}
    return {words: part for words, part in shares.items() if part > 0}


def _pcie(rows: pd.DataFrame, about: Mapping[str, Any]) -> PcieLink | None:
    if not len(rows):
        return None
    lane, width = _LANE_GB_S.get(about.get("pcie_generation") or 0), about.get("pcie_width")
    rx, tx = (_spread(rows, f"pcie_{way}_kb_s", 1e-6) for way in ("rx", "tx"))
    return PcieLink(rx_gb_s=rx, tx_gb_s=tx, link_gb_s=lane * width if lane and width else None)


def cpu_series(rows: pd.DataFrame) -> tuple[Ints, Floats]:
    """Ends of stretches of half a second or more, and the cores that one process used in each on average."""
    at, cpu = rows["at_ns"].to_numpy(np.int64), rows["cpu_ns"].to_numpy(np.float64)
    kept = [0]
    for i in range(1, len(at)):
        if at[i] - at[kept[-1]] >= _CPU_STEP_NS:
            kept.append(i)
    return at[kept[1:]], np.diff(cpu[kept]) / np.diff(at[kept])


def _processes(telemetry: Samples, trace: Trace | None, since: int, until: int) -> Iterator[ProcessSamples]:
    """One entry a process of the server; CPU in cores, switches per second, over all samples' time.

    So they add up to what the server used, also where a process was there for a while only.
    """
    rows = telemetry.of("processes", since, until)
    seconds = float(np.ptp(rows["at_ns"])) / 1e9 if len(rows) else 0.0
    roles = list(trace.process_spans) if trace else []
    for pid, mine in rows.groupby("pid") if "pid" in rows else ():
        first, last = mine.iloc[0], mine.iloc[-1]
        if last["at_ns"] <= first["at_ns"]:
            continue
        _, cores = cpu_series(mine)
        stops = _stops(mine, telemetry.about("processes").get("every_ns", 0))
        # What the process is for, where its probe said so.
        role = next((role for role, own in roles if own == pid), None)
        yield ProcessSamples(
            pid=int(pid),
            name=f"{role} ({last['name']})" if role else str(last["name"]),
            cpu_cores=float((last["cpu_ns"] - first["cpu_ns"]) / 1e9 / seconds),
            cpu_cores_max=float(cores.max()) if len(cores) else None,
            rss_gib=float(mine["rss_bytes"].max()) / 2**30,
            threads=int(mine["threads"].max()),
            voluntary_per_s=float((last["voluntary"] - first["voluntary"]) / seconds),
            involuntary_per_s=float((last["involuntary"] - first["involuntary"]) / seconds),
            samples=len(mine),
            stopped_s=stops or None,
        )


def _stops(rows: pd.DataFrame, every_ns: int) -> tuple[float, ...]:
    """How long each stop of one process lasted: a sample's time for each that found it stopped."""
    if "stopped" not in rows:
        return ()
    stopped = rows["stopped"].notna().to_numpy()
    first, last = runs(changes(stopped))
    return tuple(((last - first + 1)[stopped[first]] * every_ns / 1e9).tolist())


def _engine(telemetry: Samples, since: int, until: int) -> EngineSamples | None:
    rows = telemetry.of("engine", since, until)
    if not len(rows):
        return None

    def grown(column: str) -> float | None:
        """How far a counter rose between the window's first and last sample that have it."""
        values = _known(rows, column)
        return float(values[-1] - values[0]) if len(values) > 1 else None

    asked, hits = grown("prefix_queries"), grown("prefix_hits")
    took = rows["took_ns"].to_numpy(np.float64) / 1e6
    return EngineSamples(
        running=_spread(rows, "running"),
        waiting=_spread(rows, "waiting"),
        kv_used_share=_spread(rows, "kv_used_share"),
        preemptions=grown("preemptions"),
        prefix_hit_share=hits / asked if asked and hits is not None else None,
        took_ms=PageTime(p50=float(np.median(took)), max=float(took.max())),
    )


def describe_utilisation(
    gpus: Sequence[GpuSamples], processes: Sequence[ProcessSamples], trace: Trace | None, window: tuple[int, int],
    cores: int,
) -> Utilisation:  # fmt: skip
    """How busy the device really was: NVML's figure, or the server's CPU, beside the time in which a forward ran.

    NVML's utilisation is the share of time in which at least one kernel ran on the GPU: a single small one counts as
    much as a full one, so it reads near 100 % long before the GPU is used up, and it does not see that the engine waits
    between kernels. A forward's share of the step says how much of each step the device had the work at all; kernels'
    share of the forwards is carried over from those that were sampled. ``forward_by_device``: the forwards were
    stamped by the device's own events, so that they hold gaps between kernels but not the host's time; ``device`` is
    then what else it marked. Of several engines it is their mean. Shares are None where the probe did not record what
    they take.
    """
    busy = [gpu.busy_share.mean for gpu in gpus if gpu.server and gpu.busy_share]
    used = sum(process.cpu_cores for process in processes) if processes else None
    engines = [] if trace is None else trace.by_engine()
    forwards = [spans[spans["code"] == Span.FORWARD] for spans in engines]
    forwards = [rows for rows in forwards if len(rows)]
    computed, of_steps = None, None
    if forwards and window[1] > window[0]:
        computed = sum(length(within(rows, window)) for rows in forwards)
        # What lies between two parts of a step is the step's too.
        worked = sum(length(by_step(spans, np.isin(spans["code"], _PARTS_OF_A_STEP), window)) for spans in engines)
        of_steps = min(computed / worked, 1.0) if worked else None
    device = describe_device(trace, window)
    return Utilisation(
        nvml_busy_share=float(np.mean(busy)) if busy else None,
        server_cpu_cores=used,
        server_cores=cores or None,
        server_cpu_share=used / cores if used is not None and cores else None,
        forward_share_of_window=None if computed is None else computed / len(forwards) / (window[1] - window[0]),
        forward_share_of_step=of_steps,
        kernel_share_of_forward=device.kernels.busy_share if device and device.kernels else None,
        forward_by_device=len(forwards) > 0 and all((rows["n"] == 1).all() for rows in forwards),
        device=device,
    )
