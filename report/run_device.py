"""What the device did meanwhile: its own figures beside the forwards' share of the time; and the roofline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby

import numpy as np
import pandas as pd

from gapmeter.analysis.device.telemetry import Samples, cpu_series, read_telemetry
from gapmeter.analysis.numbers import DASH, duration, share, significant
from gapmeter.analysis.requests.metrics import final
from gapmeter.analysis.results.codec import Result
from gapmeter.analysis.results.device import AchievedShare, PeakRate, Roofline, Spread, Telemetry
from gapmeter.analysis.results.run import RunResult
from gapmeter.report import run_words, words
from gapmeter.report.document import Block, Chart, Figure, Paragraph, Row, Section, Table, Words
from gapmeter.report.run_folder import Run
from gapmeter.report.timeline import Floats, Level, Levels, Span, span_of

_MOST_PROCESSES = 3
_BIN_S = 0.5
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
}


def device(run: Run) -> Section | None:
    """Telemetry: how busy the device was by several counts, and its samples over time. None when none were taken."""
    told = run.result.telemetry
    samples = read_telemetry(run.folder) if told else None
    if told is None or samples is None:
        return None
    lead = f"{run_words.stopped(_capital(words.utilisation_sentence(told.utilisation)))} ".lstrip()
    lead += _NVML_MISLEADS if told.gpus else _CPU_BESIDE
    lead += " Shaded: samples that are missing." if any(found.missed for found in told.sources.values()) else ""
    span = span_of(final(run.requests), run.origin_ns)
    levels = levels_of(samples, run, span, {one.pid: one.name for one in told.processes})
    charts = []
    for source, together in groupby(levels, key=lambda level: level.key.partition("-")[0]):
        picture = Levels(span, list(together))
        charts.append(Chart(f"telemetry-{source}", picture, "", picture.table(), "levels"))
    blocks: list[Block] = [_busy(told), *charts, _sampled(told)]
    return Section("device", "What the device did meanwhile", blocks, lead, "device")


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _busy(told: Telemetry) -> Table:
    """The same stretch of time by what each source calls busy."""
    used, key = told.utilisation, "telemetry.utilisation"
    forward = "the device's own events" if used.forward_by_device else "the forward call's wall time"
    found = [
        ("GPU busy by NVML", "nvml_busy_share", "any kernel ran"),
        ("CPU time of the server's processes", "server_cpu_share", "of all its cores"),
        ("a forward ran, of the time", "forward_share_of_window", forward),
        ("a forward ran, of each step", "forward_share_of_step", "the rest of a step is the host's"),
        ("kernels ran, of the forward", "kernel_share_of_forward", "on the steps that were sampled"),
    ]
    rows: list[Row] = [
        [name, words, Figure(value, "share", f"{key}.{field}")]
        for name, field, words in found
        if (value := getattr(used, field)) is not None
    ]
    return Table("How busy the device was", ["counted as", "which is", "share"], rows, words=2, css="compact")


def _sampled(told: Telemetry) -> Table:
    """Every figure that was sampled: mean and extremes over the measured window."""
    rows: list[Row] = []
    for gpu in told.gpus:
        name = f"GPU {gpu.gpu} {gpu.name or ''}".strip()
        rows += _spread_rows(name, gpu, _GPU_ROWS)
        if gpu.throttled is not None:
            throttled = ", ".join(f"{words} {share(part)}" for words, part in gpu.throttled.items())
            rows.append([name, "throttled", throttled or "never", "", ""])
    for one in told.processes:
        mean, most = (Figure(cores, "number") for cores in (one.cpu_cores, one.cpu_cores_max))
        rows.append([f"{one.name}, pid {one.pid}", "CPU, cores", mean, "", most])
    if told.engine:
        rows += _spread_rows("engine", told.engine, _ENGINE_ROWS)
        if told.engine.preemptions is not None:
            rows.append(["engine", "preempted", f"{told.engine.preemptions:,.0f} times", "", ""])
        if told.engine.prefix_hit_share is not None:
            hits = share(told.engine.prefix_hit_share)
            rows.append(["engine", "prompt tokens found in the prefix cache", hits, "", ""])
    rows += [
        [source, f"not sampled: {found.absent}", "", "", ""]
        for source, found in told.sources.items()
        if found.absent and source != "pcie"
    ]
    return Table("Samples", ["of", "what", "mean", "least", "most"], rows, words=2)


def _spread_rows(name: str, entry: Result, fields: Mapping[str, tuple[str, float]]) -> Iterator[Row]:
    for field, (what, scale) in fields.items():
        found: Spread | None = getattr(entry, field)
        if found:
            ends = (found.mean, found.min, found.max)
            yield [name, what, *(Figure(value, text=significant(scale * value)) for value in ends)]


def levels_of(samples: Samples, run: Run, span: Span, names: Mapping[int, str]) -> Iterator[Level]:
    """What is drawn over time, in the order in which it is read; ``names`` of the server's processes by pid."""
    for gpu, rows in _by(samples, "gpu", "gpu"):
        for column, title, unit, scale, top in (
            ("power_mw", "power", "W", 1e-3, 0.0),
            ("sm_mhz", "SM clock", "MHz", 1.0, 0.0),
            ("busy_percent", "utilisation by NVML", "%", 1.0, 100.0),
            ("memory_used_bytes", "memory used", "GiB", 2.0**-30, 0.0),
        ):
            if column in rows:
                at, value = _seconds(run, rows), rows[column].to_numpy(np.float64) * scale
                yield Level(f"gpu{gpu}-{column}", f"GPU {gpu}: {title}", unit, at, value, _usual(samples, "gpu"), top)
    yield from _forward_level(run, span)
    yield from _cpu_levels(samples, run, span, names)
    yield from _engine_levels(samples, run)


def _forward_level(run: Run, span: Span) -> Iterator[Level]:
    """The share of each half second in which a forward ran, from the steps."""
    if not {"forward_start_ns", "forward_end_ns"} <= set(run.steps.columns):
        return
    known = run.steps.dropna(subset=["forward_start_ns", "forward_end_ns"])
    start, end = ((known[f"forward_{side}_ns"].to_numpy(np.float64) - run.origin_ns) / 1e9 for side in ("start", "end"))
    edges = np.arange(0.0, span.length_s + _BIN_S, _BIN_S)
    covered = np.asarray([np.clip(np.minimum(end, edge) - start, 0, None).sum() for edge in edges])
    value = 100 * np.minimum(np.diff(covered) / _BIN_S, 1.0)
    yield Level("cpu-forward", "A forward ran, of the time", "%", edges[:-1] + _BIN_S / 2, value, 2 * _BIN_S, 100.0)


def _cpu_levels(samples: Samples, run: Run, span: Span, names: Mapping[int, str]) -> Iterator[Level]:
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


def _engine_levels(samples: Samples, run: Run) -> Iterator[Level]:
    rows = samples.tables.get("engine")
    if rows is None:
        return
    at, usual = _seconds(run, rows), _usual(samples, "engine")
    for column, title, unit, scale, top in (
        ("running", "Requests running, by /metrics", "", 1.0, 1.0),
        ("waiting", "Requests waiting, by /metrics", "", 1.0, 1.0),
        ("kv_used_share", "KV cache used, by /metrics", "%", 100.0, 100.0),
    ):
        if column in rows:
            value = rows[column].to_numpy(np.float64) * scale
            yield Level(f"engine-{column}", title, unit, at, value, usual, top)
    if len(rows) < 2:
        return
    # Of counters, what they rose by from one look to the next; one that never rose is not drawn.
    if "preemptions" in rows and (times := np.diff(rows["preemptions"].to_numpy(np.float64))).any():
        per_s = times / np.diff(at)
        yield Level("engine-preemptions", "Preemptions, by /metrics", "a second", at[1:], per_s, usual, 1.0)
    if {"prefix_hits", "prefix_queries"} <= set(rows.columns):
        hits, asked = (np.diff(rows[name].to_numpy(np.float64)) for name in ("prefix_hits", "prefix_queries"))
        known = asked > 0
        if hits.any() and known.any():
            value = 100 * hits[known] / asked[known]
            title = "Prompt tokens found in the prefix cache, by /metrics"
            yield Level("engine-prefix", title, "%", at[1:][known], value, usual, 100.0)


def _by(samples: Samples, source: str, column: str) -> Iterator[tuple[int, pd.DataFrame]]:
    table = samples.tables.get(source)
    if table is not None:
        for key, rows in table.groupby(column):
            yield int(key), rows


def _seconds(run: Run, rows: pd.DataFrame) -> Floats:
    return np.asarray((rows["at_ns"].to_numpy(np.float64) - run.origin_ns) / 1e9)


def _usual(samples: Samples, source: str) -> float:
    return float(samples.about(source).get("every_ns", 1e8)) / 1e9


# --- against what the device could do

_PEAKS = {
    "bandwidth_gb_s": ("the device: memory bandwidth", "GB/s"),
    "cached_gb_s": ("the device: bandwidth of the cache", "GB/s"),
    "tflops": ("the device: multiplications", "TFLOPS"),
}


def roofline(result: RunResult) -> Section:
    """The roofline's figures, or in one line why there are none."""
    told, title = result.roofline, "Against what the device could do"
    sentence = words.roofline_sentence(told)
    if sentence is None:
        return Section("roofline", title, [Paragraph(f"Unmeasured: {told.why or 'too few steps'}.", "quiet")])
    table = Table("Roofline", ["what", "how", "figure", "95 % interval"], _roofline_rows(told), words=2)
    return Section("roofline", title, [table], f"{_capital(sentence)}.", "roofline")


def _roofline_rows(told: Roofline) -> list[Row]:
    peaks, decode, prefill = told.device, told.decode, told.prefill
    rows: list[Row] = []
    if decode and peaks:
        key = "roofline.decode"
        rows.append(["decode: bandwidth used (MBU)", *_achieved(decode.mbu, f"{key}.mbu", "GB/s")])
        if decode.cache_resident:
            memory = f"{significant(peaks.bandwidth_gb_s.peak)} GB/s" if peaks.bandwidth_gb_s else DASH
            of = f"{memory}: no bound here, what a step reads stays in the cache"
            part = Figure(decode.mbu_of_memory, "share", f"{key}.mbu_of_memory")
            rows.append(["the same, of memory's bandwidth", of, part, ""])
        least = decode.itl_least_ms
        how = f"bytes over bandwidth; at most {duration(least.max)} in this run"
        rows.append(["least time for a token", how, Figure(least.mean, "ms", f"{key}.itl_least_ms.mean"), ""])
        read = f"weights {decode.weight_bytes / 1e6:,.1f} MB, the rest KV of {decode.kv_tokens_mean:,.0f} tokens"
        size = Figure(decode.bytes_mean, key=f"{key}.bytes_mean", text=f"{decode.bytes_mean / 1e6:,.1f} MB")
        rows.append(["bytes that a decode step reads", read, size, ""])
        batch = Figure(decode.batch_mean, "number", f"{key}.batch_mean")
        rows.append(["sequences in a decode step", "mean", batch, ""])
    if prefill and prefill.mfu:
        kind = "steps with prompts and decoding" if prefill.mixed else "steps with prompts alone"
        cells = _achieved(prefill.mfu, "roofline.prefill.mfu", "TFLOPS", kind)
        rows.append(["prefill: computing used (MFU)", *cells])
    elif prefill:
        rows.append(["prefill: computing used (MFU)", str(prefill.why), "unmeasured", ""])
    for name, (what, unit) in _PEAKS.items():
        rate: PeakRate | None = getattr(peaks, name, None)
        if rate and peaks:
            peak = Figure(rate.peak, key=f"roofline.device.{name}.peak", text=f"{significant(rate.peak)} {unit}")
            low = "" if rate.low == rate.peak else f"{significant(rate.low)} at the median"
            rows.append([what, f"{peaks.name}, {peaks.source}", peak, low])
    return rows


def _achieved(found: AchievedShare, key: str, unit: str, kind: str = "steps that only decode") -> list[Words]:
    interval = f"{share(found.low)} to {share(found.high)}"
    how = f"{significant(found.achieved)} {unit} over {found.steps:,} {kind}"
    return [how, Figure(found.share, "share", f"{key}.share"), interval]
