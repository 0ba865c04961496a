"""What the device and the server's processes did meanwhile: telemetry over time, and the roofline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import numpy as np
import pandas as pd

from gapmeter.analysis.arrays import Floats
from gapmeter.analysis.device.telemetry import Samples, cpu_series, read_telemetry
from gapmeter.analysis.numbers import counted, duration, share, significant
from gapmeter.analysis.requests.metrics import final
from gapmeter.analysis.results.codec import Result
from gapmeter.analysis.results.device import AchievedShare, DecodeRoofline, PeakRate, Roofline, Telemetry, Utilisation
from gapmeter.analysis.results.run import RunResult
from gapmeter.report import document as doc
from gapmeter.report.document import Chart, Figure, Paragraph, Row, Section, Table, Words
from gapmeter.report.levels import Level, Levels
from gapmeter.report.run_folder import ReportedRun
from gapmeter.report.timeline import Span, span_of
from gapmeter.report.words import as_sentence

_MOST_PROCESSES = 3
_BIN_S, _MOST_BINS = 0.5, 2000
_NVML_MISLEADS = (
    "NVML's utilisation is the share of time in which any kernel ran at all: it is near 100 % long before a GPU is "
    "used up, and does not see the host's part of a step."
)
_CPU_BESIDE = (
    "CPU time counts the host's work too; a forward's share of the time is what the model itself ran. Forwards that "
    "last longer than their process had CPU time waited for a core."
)
_GPU_ROWS = {
    "power_w": ("power, W", 1.0),
    "sm_mhz": ("SM clock, MHz", 1.0),
    "memory_mhz": ("memory clock, MHz", 1.0),
    "temperature_c": ("temperature, °C", 1.0),
    "memory_used_gib": ("memory used, GiB", 1.0),
    "busy_share": ("utilisation by NVML, %", 100.0),
}
_ENGINE_ROWS = {
    "running": ("running", 1.0),
    "waiting": ("waiting", 1.0),
    "kv_used_share": ("KV cache used, %", 100.0),
}  # fmt: skip
_Sampled = tuple[str, str, str, float, float]  # column, title, unit, scale, what the axis reaches at least
_GPU_LEVELS: Sequence[_Sampled] = (
    ("power_instant_mw", "power", "W", 1e-3, 0.0),
    ("power_mw", "power, mean of a second", "W", 1e-3, 0.0),
    ("sm_mhz", "SM clock", "MHz", 1.0, 0.0),
    ("busy_percent", "utilisation by NVML", "%", 1.0, 100.0),
    ("memory_used_bytes", "memory used", "GiB", 2.0**-30, 0.0),
)
_ENGINE_LEVELS: Sequence[_Sampled] = (
    ("running", "Requests running", "", 1.0, 1.0),
    ("waiting", "Requests waiting", "", 1.0, 1.0),
    ("kv_used_share", "KV cache used", "%", 100.0, 100.0),
)
_PEAKS = {
    "bandwidth_gb_s": ("the device: memory bandwidth", "GB/s"),
    "cached_gb_s": ("the device: bandwidth of the cache", "GB/s"),
    "tflops": ("the device: multiplications", "TFLOPS"),
}


def telemetry_sentence(telemetry: Telemetry) -> str:
    """One line: what was there, what it did, and what is missing."""
    parts = []
    if not telemetry.gpus:
        parts.append(telemetry.sources["gpu"].absent or "no GPU was sampled")
    parts.append(utilisation_sentence(telemetry.utilisation))
    if telemetry.energy:
        energy = telemetry.energy
        idle = "" if energy.idle_share is None else f", {share(energy.idle_share)} of it idle"
        parts.append(f"{energy.joules:.0f} J ({energy.source}{idle})")
    if missed := sum(source.missed for source in telemetry.sources.values()):
        parts.append(f"{counted(missed, 'sample')} missed")
    return "; ".join(part for part in parts if part)


def utilisation_sentence(used: Utilisation) -> str:
    """How busy the device was, by several counts."""
    parts = []
    if used.nvml_busy_share is not None:
        parts.append(f"NVML calls the GPU busy {share(used.nvml_busy_share)} of the time")
    elif used.server_cpu_cores is not None:
        of = f" of its {used.server_cores}" if used.server_cores and used.server_cores > 1 else ""
        parts.append(f"the server's processes used {used.server_cpu_cores:.2f}{of} cores")
    if used.forward_share_of_window is None:
        return "; ".join(parts)
    if used.device:
        parts.append(f"by its own marks it was at a step {share(used.device.busy_share)} of the time")
        parts.append(f"and waited for its host between them {share(used.device.waiting_share)}")
    parts.append(f"a forward ran {share(used.forward_share_of_window)} of the time")
    if used.forward_share_of_step is not None:
        parts.append(f"{share(used.forward_share_of_step)} of each step")
    if used.kernel_share_of_forward is not None:
        parts.append(f"kernels {share(used.kernel_share_of_forward)} of the forward")
    elif used.forward_by_device:
        parts.append("gaps between kernels included")
    return ", ".join(parts)


def roofline_sentence(roofline: Roofline) -> str | None:
    """Decode against the bandwidth, prefill against the peak, with intervals; None where neither is known."""
    prefill = roofline.prefill
    parts = [_decode(roofline.decode)] if roofline.decode else []
    if prefill and prefill.mfu:
        parts.append(f"prefill computes at {_interval(prefill.mfu)} of the peak (MFU)")
    elif prefill:
        parts.append(f"MFU unmeasured: {prefill.why}")
    return "; ".join(parts) or None


def roofline_line(roofline: Roofline) -> str | None:
    """The same for the terminal, where the interval and the reasons are left to the report."""
    decode, prefill = roofline.decode, roofline.prefill
    parts = []
    if decode:
        of = "the cache's" if decode.cache_resident else "memory's"
        least, real = duration(decode.itl_least_ms.mean), duration(decode.forward_ms.mean)
        parts.append(f"decode reads at {share(decode.mbu.share)} of {of} bandwidth")
        parts.append(f"a token takes {real} of forward time, {least} at full bandwidth")
    if prefill and prefill.mfu:
        parts.append(f"prefill computes at {share(prefill.mfu.share)} of the peak")
    return ", ".join(parts) or None


def _decode(decode: DecodeRoofline) -> str:
    of = "the last-level cache's" if decode.cache_resident else "memory's"
    said = f"decode reads at {_interval(decode.mbu)} of {of} bandwidth (MBU)"
    if decode.cache_resident:
        said += f": the {_size(decode.bytes_mean)} of a step fit into that cache, so memory is not the limit"
    bound = {
        "memory bandwidth": "it is bound by memory bandwidth",
        "cache bandwidth": "it is bound by the cache's bandwidth",
        "compute": "it is bound by computing, not by reading",
        "neither": "neither reading nor computing explains half of its time",
    }[decode.bound]
    least, real = duration(decode.itl_least_ms.mean), duration(decode.forward_ms.mean)
    batch = f"with {decode.batch_mean:.1f} sequences at once"
    return f"{said}; {bound}; even at full bandwidth a token takes at least {least} {batch} (the forward took {real})"


def _size(in_bytes: float) -> str:
    return f"{in_bytes / 1e9:.1f} GB" if in_bytes >= 999.95e6 else f"{in_bytes / 1e6:.1f} MB"


def _interval(achieved: AchievedShare) -> str:
    return f"{share(achieved.share)} ({_ends(achieved)})"


def _ends(achieved: AchievedShare) -> str:
    """As it is: what exceeds a peak says that the peak is higher."""
    return f"{share(achieved.low)} to {share(achieved.high)}"


# --- over time


def device(run: ReportedRun) -> Section | None:
    """Telemetry: how busy the device was by several counts, and its samples over time. None when none were taken."""
    telemetry = run.result.telemetry
    samples = read_telemetry(run.folder) if telemetry else None
    if telemetry is None or samples is None:
        return None
    lead = f"{as_sentence(utilisation_sentence(telemetry.utilisation))} ".lstrip()
    lead += _NVML_MISLEADS if telemetry.gpus else _CPU_BESIDE
    lead += " Shaded: samples that are missing." if any(found.missed for found in telemetry.sources.values()) else ""
    span = span_of(final(run.requests), run.origin_ns)
    levels = levels_of(samples, run, span, {one.pid: one.name for one in telemetry.processes})
    charts = []
    for source, together in groupby(levels, key=lambda level: level.key.partition("-")[0]):
        picture = Levels(span, list(together))
        charts.append(Chart(f"telemetry-{source}", picture, "", picture.table(), "levels"))
    blocks: list[doc.Block] = [_busy(telemetry.utilisation), *charts, _sampled(telemetry)]
    return Section("device", "What the device did during the run", blocks, lead, "device")


def _busy(used: Utilisation) -> Table:
    """The same stretch of time by what each source calls busy."""
    forward = "the device's own events" if used.forward_by_device else "the forward call's wall time"
    counted = [
        ("GPU busy by NVML", "nvml_busy_share", "any kernel ran"),
        ("CPU time of the server's processes", "server_cpu_share", "of all its cores"),
        ("a forward ran, of the time", "forward_share_of_window", forward),
        ("a forward ran, of each step", "forward_share_of_step", "the rest of a step is the host's"),
        ("kernels ran, of the forward", "kernel_share_of_forward", "as where they were sampled"),
        ("the device was at a step", "device.busy_share", "by its own marks, waits inside forwards included"),
        ("it waited for its host", "device.waiting_share", "between its parts of steps, while the engine was at one"),
        ("the host still launched, of the forward", "device.launching_share", "gaps between kernels are in here"),
    ]
    rows: list[Row] = []
    for name, field, words in counted:
        of = used.device if field.startswith("device.") else used
        if of is not None and (value := getattr(of, field.removeprefix("device."))) is not None:
            rows.append([name, words, Figure(value, "share", f"telemetry.utilisation.{field}")])
    return Table("How busy the device was", ["counted as", "which is", "share"], rows, words=2, css="compact")


def _sampled(telemetry: Telemetry) -> Table:
    """Every figure that was sampled: mean and extremes over the measured window."""
    rows: list[Row] = []

    def add(name: str, samples: Result, fields: Mapping[str, tuple[str, float]]) -> None:
        for field, (what, scale) in fields.items():
            if spread := getattr(samples, field):
                ends = (spread.mean, spread.min, spread.max)
                rows.append([name, what, *(Figure(scale * value, "number") for value in ends)])

    for gpu in telemetry.gpus:
        name = f"GPU {gpu.gpu} {gpu.name or ''}".strip()
        add(name, gpu, _GPU_ROWS)
        if gpu.throttled is not None:
            throttled = ", ".join(f"{words} {share(part)}" for words, part in gpu.throttled.items())
            rows.append([name, "throttled", throttled or "never", "", ""])
    for one in telemetry.processes:
        mean, most = (Figure(cores, "number") for cores in (one.cpu_cores, one.cpu_cores_max))
        rows.append([f"{one.name}, pid {one.pid}", "CPU, cores", mean, "", most])
    if engine := telemetry.engine:
        add("engine", engine, _ENGINE_ROWS)
        if engine.preemptions is not None:
            rows.append(["engine", "preempted", f"{engine.preemptions:,.0f} times", "", ""])
        if engine.prefix_hit_share is not None:
            rows.append(["engine", "prompt tokens found in the prefix cache", share(engine.prefix_hit_share), "", ""])
    for source, found in telemetry.sources.items():
        if found.absent and source != "pcie":
            rows.append([source, f"not sampled: {found.absent}", "", "", ""])
    return Table("Samples", ["of", "what", "mean", "least", "most"], rows, words=2)


def levels_of(samples: Samples, run: ReportedRun, span: Span, names: Mapping[int, str]) -> Iterator[Level]:
    """What is drawn over time, in the order in which it is read; ``names`` of the server's processes by pid."""
    for gpu, rows in _by(samples, "gpu", "gpu"):
        yield from _sampled_levels(samples, run, "gpu", rows, f"gpu{gpu}", f"GPU {gpu}: {{}}", _GPU_LEVELS)
    if {"forward_start_ns", "forward_end_ns"} <= set(run.steps.columns):
        known = run.steps.dropna(subset=["forward_start_ns", "forward_end_ns"])
        start, end = (_seconds(run, known[f"forward_{side}_ns"]) for side in ("start", "end"))
        width = max(_BIN_S, span.length_s / _MOST_BINS)
        edges = np.arange(0.0, span.length_s + width, width)
        engines = run.result.compute.engines or 1  # their mean, as of the figures above
        ran = np.minimum(np.diff(_elapsed(start, edges) - _elapsed(end, edges)) / width / engines, 1.0)
        yield Level(
            "cpu-forward", "A forward ran, of the time", "%", edges[:-1] + width / 2, 100 * ran, 2 * width, 100.0
        )
    gaps = tuple(
        (low, high)
        for gap in samples.gaps
        if gap.source == "processes"
        and (high := (gap.until_ns - run.origin_ns) / 1e9) > 0
        and (low := (gap.since_ns - run.origin_ns) / 1e9) < span.length_s
    )
    shown = list(names)[:_MOST_PROCESSES]
    for pid, rows in _by(samples, "processes", "pid"):
        at, cores = cpu_series(rows)
        if pid in shown and len(cores):
            seconds = (at - run.origin_ns) / 1e9
            yield Level(f"cpu-{pid}", f"CPU of {names[pid]}", "cores", seconds, cores, np.inf, 1.0, gaps)
    engine = samples.tables.get("engine")
    if engine is not None:
        yield from _sampled_levels(samples, run, "engine", engine, "engine", "{}, by /metrics", _ENGINE_LEVELS)
        yield from _counted_levels(samples, run, engine) if len(engine) > 1 else ()


def _by(samples: Samples, source: str, column: str) -> Iterator[tuple[int, pd.DataFrame]]:
    table = samples.tables.get(source)
    if table is not None:
        for key, rows in table.groupby(column):
            yield int(key), rows


def _elapsed(since: Floats, edges: Floats) -> Floats:
    """At every edge: the time since each earlier moment of ``since``, summed."""
    moments = np.sort(since)
    earlier = np.searchsorted(moments, edges)
    return np.asarray(earlier * edges - np.concatenate([[0.0], np.cumsum(moments)])[earlier])


def _seconds(run: ReportedRun, at_ns: pd.Series) -> Floats:
    return np.asarray((at_ns.to_numpy(np.float64) - run.origin_ns) / 1e9)


def _usual(samples: Samples, source: str) -> float:
    return float(samples.about(source).get("every_ns", 1e8)) / 1e9


def _sampled_levels(
    samples: Samples, run: ReportedRun, source: str, rows: pd.DataFrame, key: str, title: str,
    columns: Sequence[_Sampled],
) -> Iterator[Level]:  # fmt: skip
    at, usual = _seconds(run, rows["at_ns"]), _usual(samples, source)
    for column, words, unit, scale, top in columns:
        if column in rows:
            value = rows[column].to_numpy(np.float64) * scale
            yield Level(f"{key}-{column}", title.format(words), unit, at, value, usual, top)


def _counted_levels(samples: Samples, run: ReportedRun, engine: pd.DataFrame) -> Iterator[Level]:
    """How much each counter rose from one sample to the next; one that never rose is not drawn."""
    at, usual = _seconds(run, engine["at_ns"]), _usual(samples, "engine")
    if "preemptions" in engine and (times := np.diff(engine["preemptions"].to_numpy(np.float64))).any():
        per_s = times / np.diff(at)
        yield Level("engine-preemptions", "Preemptions, by /metrics", "a second", at[1:], per_s, usual, 1.0)
    if {"prefix_hits", "prefix_queries"} <= set(engine.columns):
        hits, asked = (np.diff(engine[name].to_numpy(np.float64)) for name in ("prefix_hits", "prefix_queries"))
        known = asked > 0
        if hits.any() and known.any():
            value = 100 * hits[known] / asked[known]
            title = "Prompt tokens found in the prefix cache, by /metrics"
            yield Level("engine-prefix", title, "%", at[1:][known], value, usual, 100.0)


# --- against what the device could do


def roofline(result: RunResult) -> Section:
    """The roofline's figures, or in one line why there are none."""
    known, title = result.roofline, "Against what the device could do"
    sentence = roofline_sentence(known)
    if sentence is None:
        return Section("roofline", title, [Paragraph(f"Unmeasured: {known.why or 'too few steps'}.", "quiet")])
    table = Table("Roofline", ["what", "how", "figure", "95 % interval"], list(_roofline_rows(known)), words=2)
    return Section("roofline", title, [table], as_sentence(sentence), "roofline")


def _roofline_rows(known: Roofline) -> Iterator[Row]:
    peaks, decode, prefill = known.device, known.decode, known.prefill
    if decode and peaks:
        key = "roofline.decode"
        yield ["decode: bandwidth used (MBU)", *_achieved(decode.mbu, f"{key}.mbu", "GB/s", "steps that only decode")]
        if decode.cache_resident:
            of = f"{significant(peaks.bandwidth_gb_s.peak)} GB/s: no bound here, what a step reads stays in the cache"
            part = Figure(decode.mbu_of_memory, "share", f"{key}.mbu_of_memory")
            yield ["the same, of memory's bandwidth", of, part, ""]
        least = decode.itl_least_ms
        how = f"bytes over bandwidth; at most {duration(least.max)} in this run"
        yield ["least time for a token", how, Figure(least.mean, "ms", f"{key}.itl_least_ms.mean"), ""]
        read = f"weights {_size(decode.weight_bytes)}, the rest KV of {decode.kv_tokens_mean:,.0f} tokens"
        size = Figure(decode.bytes_mean, key=f"{key}.bytes_mean", text=_size(decode.bytes_mean))
        yield ["bytes that a decode step reads", read, size, ""]
        yield ["sequences in a decode step", "mean", Figure(decode.batch_mean, "number", f"{key}.batch_mean"), ""]
    if prefill and prefill.mfu:
        kind = "steps with prompts and decoding" if prefill.mixed else "steps with prompts alone"
        yield ["prefill: computing used (MFU)", *_achieved(prefill.mfu, "roofline.prefill.mfu", "TFLOPS", kind)]
    elif prefill:
        yield ["prefill: computing used (MFU)", str(prefill.why), "unmeasured", ""]
    for name, (what, unit) in _PEAKS.items():
        rate: PeakRate | None = getattr(peaks, name, None)
        if rate and peaks:
            peak = Figure(rate.peak, key=f"roofline.device.{name}.peak", text=f"{significant(rate.peak)} {unit}")
            low = "" if rate.low == rate.peak else f"{significant(rate.low)} at the median"
            yield [what, f"{peaks.name}, {peaks.source}", peak, low]


def _achieved(found: AchievedShare, key: str, unit: str, kind: str) -> list[Words]:
    how = f"{significant(found.achieved)} {unit} over {found.steps:,} {kind}"
    return [how, Figure(found.share, "share", f"{key}.share"), _ends(found)]
