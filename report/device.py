"""What the device did meanwhile: its own figures beside the forwards' share of the time; and the roofline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

import numpy as np
import pandas as pd

from gapmeter.analysis.device.telemetry import Samples, read_telemetry
from gapmeter.analysis.device.telemetry_summary import cpu_series
from gapmeter.analysis.numbers import DASH, duration, share, significant
from gapmeter.analysis.requests.attempts import final
from gapmeter.report import timeline
from gapmeter.report.figure import Row, Table, Value, figure, written
from gapmeter.report.levels import Level, level_panel
from gapmeter.report.run import Run
from gapmeter.report.shell import Section
from gapmeter.report.svg import Fragment, el, group
from gapmeter.report.time_tables import levels_table

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


def device_section(run: Run) -> Section | None:
    """Telemetry: how busy the device was by several counts, and its samples over time. None when none were taken."""
    told = run.summary.get("telemetry")
    telemetry = read_telemetry(run.folder) if told else None
    if not told or telemetry is None:
        return None
    lead = f"{_capital(told['utilisation']['sentence'])}. " if told["utilisation"]["sentence"] else ""
    lead += _NVML_MISLEADS if told["gpus"] else _CPU_BESIDE
    lead += " Shaded: samples that are missing." if any(found["missed"] for found in told["sources"].values()) else ""
    parts = [written(_shares(told), run.provenance), *_panels(run, telemetry), written(_sampled(told), run.provenance)]
    return Section("device", "What the device did meanwhile", group(parts), lead, "device")


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _shares(told: Mapping[str, Any]) -> Table:
    """The same stretch of time by what each source calls busy."""
    used = told["utilisation"]
    forward = "the device's own events" if used["forward_by_device"] else "the forward call's wall time"
    found = [
        ("GPU busy by NVML", used["nvml_busy_share"], "any kernel ran"),
        ("CPU time of the server's processes", used["server_cpu_share"], "of all its cores"),
        ("a forward ran, of the time", used["forward_share_of_window"], forward),
        ("a forward ran, of each step", used["forward_share_of_step"], "the rest of a step is the host's"),
        ("kernels ran, of the forward", used["kernel_share_of_forward"], "on the steps that were sampled"),
    ]
    rows: list[Row] = [[name, words, Value(share(value), value)] for name, value, words in found if value is not None]
    return Table("How busy the device was", ["counted as", "which is", "share"], rows, words=2, css="compact")


def _sampled(told: Mapping[str, Any]) -> Table:
    """Every figure that was sampled: mean and extremes over the measured window."""
    rows: list[Row] = []
    for gpu in told["gpus"]:
        name = f"GPU {gpu['gpu']} {gpu['name'] or ''}".strip()
        rows += _spread_rows(name, gpu, _GPU_ROWS)
        if gpu["throttled"] is not None:
            told_throttled = ", ".join(f"{words} {share(part)}" for words, part in gpu["throttled"].items())
            rows.append([name, "throttled", told_throttled or "never", "", ""])
    for process in told["processes"]:
        most = process["cpu_cores_max"]
        cells = [significant(process["cpu_cores"]), "", DASH if most is None else significant(most)]
        rows.append([f"{process['name']}, pid {process['pid']}", "CPU, cores", *cells])
    if told["engine"]:
        rows += _spread_rows("engine", told["engine"], _ENGINE_ROWS)
        rows += _counted_rows(told["engine"])
    rows += [[source, f"not sampled: {found['absent']}", "", "", ""] for source, found in told["sources"].items()
             if found["absent"] and source != "pcie"]  # fmt: skip
    return Table("Samples", ["of", "what", "mean", "least", "most"], rows, words=2)


_PEAK_WORDS = {
    "bandwidth_gb_s": "the device: memory bandwidth",
    "cached_gb_s": "the device: bandwidth of the cache",
    "tflops": "the device: multiplications",
}
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


def _spread_rows(name: str, entry: Mapping[str, Any], fields: Mapping[str, tuple[str, float]]) -> Iterator[Row]:
    for key, (words, scale) in fields.items():
        if entry[key]:
            cells = [Value(significant(scale * entry[key][at]), entry[key][at]) for at in ("mean", "min", "max")]
            yield [name, words, *cells]


def _counted_rows(engine: Mapping[str, Any]) -> Iterator[Row]:
    """What the engine's counters rose by over the window."""
    if engine["preemptions"] is not None:
        yield ["engine", "preempted", f"{engine['preemptions']:,.0f} times", "", ""]
    if engine["prefix_hit_share"] is not None:
        yield ["engine", "prompt tokens found in the prefix cache", share(engine["prefix_hit_share"]), "", ""]


def _panels(run: Run, telemetry: Samples) -> list[Fragment]:
    """The levels over time, those of one source in one figure; where one has no sample its line breaks."""
    span = timeline.extent(final(run.requests), run.origin_ns)
    levels = list(levels_of(run, telemetry, span.length_s))
    figures = []
    for _, together in groupby(levels, key=lambda level: level.key.partition("-")[0]):
        mine = list(together)
        drawn = [group([el("h3", _title(level)), level_panel(level, span, last=level is mine[-1])]) for level in mine]
        figures.append(figure(group(drawn), levels_table(mine, span.length_s), run.provenance, css="levels"))
    return figures


def _title(level: Level) -> str:
    return f"{level.title}, {level.unit}" if level.unit else level.title


def levels_of(run: Run, telemetry: Samples, length_s: float) -> Iterator[Level]:
    """What is drawn over time, in the order in which it is read."""
    for gpu, rows in _by(telemetry, "gpu", "gpu"):
        for column, title, unit, scale, top in (
            ("power_mw", "power", "W", 1e-3, 0.0),
            ("sm_mhz", "SM clock", "MHz", 1.0, 0.0),
            ("busy_percent", "utilisation by NVML", "%", 1.0, 100.0),
            ("memory_used_bytes", "memory used", "GiB", 2.0**-30, 0.0),
        ):
            if column in rows:
                at, value = _seconds(run, rows), rows[column].to_numpy(np.float64) * scale
                yield Level(f"gpu{gpu}-{column}", f"GPU {gpu}: {title}", unit, at, value, _usual(telemetry, "gpu"), top)
    yield from _forward_level(run, length_s)
    yield from _cpu_levels(run, telemetry, length_s)
    yield from _engine_levels(run, telemetry)


def _forward_level(run: Run, length_s: float) -> Iterator[Level]:
    """The share of each half second in which a forward ran, from the steps."""
    if not {"forward_start_ns", "forward_end_ns"} <= set(run.steps.columns):
        return
    known = run.steps.dropna(subset=["forward_start_ns", "forward_end_ns"])
    start = (known["forward_start_ns"].to_numpy(np.float64) - run.origin_ns) / 1e9
    end = (known["forward_end_ns"].to_numpy(np.float64) - run.origin_ns) / 1e9
    edges = np.arange(0.0, length_s + _BIN_S, _BIN_S)
    covered = np.asarray([np.clip(np.minimum(end, edge) - start, 0, None).sum() for edge in edges])
    value = 100 * np.minimum(np.diff(covered) / _BIN_S, 1.0)
    yield Level("cpu-forward", "A forward ran, of the time", "%", edges[:-1] + _BIN_S / 2, value, 2 * _BIN_S, 100.0)


def _cpu_levels(run: Run, telemetry: Samples, length_s: float) -> Iterator[Level]:
    gaps = tuple(
        (low, high)
        for gap in telemetry.gaps
        if gap.source == "processes"
        and (high := (gap.until_ns - run.origin_ns) / 1e9) > 0
        and (low := (gap.since_ns - run.origin_ns) / 1e9) < length_s
    )
    named = {process["pid"]: process["name"] for process in run.summary["telemetry"]["processes"]}
    shown = list(named)[:_MOST_PROCESSES]
    for pid, rows in _by(telemetry, "processes", "pid"):
        at, cores = cpu_series(rows)
        if pid in shown and len(cores):
            seconds = (at - run.origin_ns) / 1e9
            yield Level(f"cpu-{pid}", f"CPU of {named[pid]}", "cores", seconds, cores, np.inf, 1.0, gaps)


def _engine_levels(run: Run, telemetry: Samples) -> Iterator[Level]:
    rows = telemetry.tables.get("engine")
    if rows is None:
        return
    for column, title, unit, scale, top in (
        ("running", "Requests running, by /metrics", "", 1.0, 1.0),
        ("waiting", "Requests waiting, by /metrics", "", 1.0, 1.0),
        ("kv_used_share", "KV cache used, by /metrics", "%", 100.0, 100.0),
    ):
        if column in rows:
            value = rows[column].to_numpy(np.float64) * scale
            yield Level(f"engine-{column}", title, unit, _seconds(run, rows), value, _usual(telemetry, "engine"), top)
    yield from _counter_levels(run, telemetry, rows)


def _counter_levels(run: Run, telemetry: Samples, rows: pd.DataFrame) -> Iterator[Level]:
    """What the engine's counters rose by from one look to the next; one that never rose is not drawn."""
    at, usual = _seconds(run, rows), _usual(telemetry, "engine")
    if "preemptions" in rows and len(rows) > 1 and (times := np.diff(rows["preemptions"].to_numpy(np.float64))).any():
        per_s = times / np.diff(at)
        yield Level("engine-preemptions", "Preemptions, by /metrics", "a second", at[1:], per_s, usual, 1.0)
    if {"prefix_hits", "prefix_queries"} <= set(rows.columns) and len(rows) > 1:
        hits, asked = (np.diff(rows[name].to_numpy(np.float64)) for name in ("prefix_hits", "prefix_queries"))
        known = asked > 0
        if hits.any() and known.any():
            found = 100 * hits[known] / asked[known]
            title = "Prompt tokens found in the prefix cache, by /metrics"
            yield Level("engine-prefix", title, "%", at[1:][known], found, usual, 100.0)


def _by(telemetry: Samples, source: str, column: str) -> Iterator[tuple[int, pd.DataFrame]]:
    table = telemetry.tables.get(source)
    if table is not None:
        for key, rows in table.groupby(column):
            yield int(key), rows


def _seconds(run: Run, rows: pd.DataFrame) -> Any:
    return (rows["at_ns"].to_numpy(np.float64) - run.origin_ns) / 1e9


def _usual(telemetry: Samples, source: str) -> float:
    return float(telemetry.about(source).get("every_ns", 1e8)) / 1e9


def roofline_section(run: Run) -> Section | None:
    """The roofline's figures, or in one line why there are none."""
    told = run.summary.get("roofline")
    if not told:
        return None
    title = "Against what the device could do"
    if told["sentence"] is None:
        return Section("roofline", title, el("p", f"Unmeasured: {told['why'] or 'too few steps'}.", class_="lead"))
    table = Table("Roofline", ["what", "how", "figure", "95 % interval"], _roofline_rows(told), words=2)
    return Section("roofline", title, written(table, run.provenance), f"{_capital(told['sentence'])}.", "roofline")


def _roofline_rows(told: Mapping[str, Any]) -> list[Row]:
    device, decode, prefill = told["device"], told["decode"], told["prefill"]
    rows: list[Row] = []
    if decode:
        rows.append(["decode: bandwidth used (MBU)", *_shared(decode["mbu"], "GB/s")])
        if decode["cache_resident"]:
            of = f"{_gb_s(device['bandwidth_gb_s'])}: no bound here, what a step reads stays in the cache"
            rows.append(["the same, of memory's bandwidth", of, share(decode["mbu_of_memory"]), ""])
        least = decode["itl_least_ms"]
        how = f"bytes over bandwidth; at most {duration(least['max'])} in this run"
        rows.append(["least time for a token", how, duration(least["mean"]), ""])
        read = f"weights {decode['weight_bytes'] / 1e6:,.1f} MB, the rest KV of {decode['kv_tokens_mean']:,.0f} tokens"
        rows.append(["bytes that a decode step reads", read, f"{decode['bytes_mean'] / 1e6:,.1f} MB", ""])
        rows.append(["sequences in a decode step", "mean", significant(decode["batch_mean"]), ""])
    if prefill and prefill["mfu"]:
        kind = "steps with prompts and decoding" if prefill["mixed"] else "steps with prompts alone"
        rows.append(["prefill: computing used (MFU)", *_shared(prefill["mfu"], "TFLOPS", kind)])
    elif prefill:
        rows.append(["prefill: computing used (MFU)", str(prefill["why"]), "unmeasured", ""])
    for name, unit in (("bandwidth_gb_s", "GB/s"), ("cached_gb_s", "GB/s"), ("tflops", "TFLOPS")):
        if rate := device[name]:
            of = f"{device['name']}, {device['source']}"
            rows.append([_PEAK_WORDS[name], of, f"{significant(rate['peak'])} {unit}", _seen(rate)])
    return rows


def _seen(rate: Mapping[str, float]) -> str:
    return "" if rate["low"] == rate["peak"] else f"{significant(rate['low'])} at the median"


def _shared(found: Mapping[str, Any], unit: str, kind: str = "steps that only decode") -> list[Value | str]:
    interval = f"{share(found['low'])} to {share(found['high'])}"
    how = f"{significant(found['achieved'])} {unit} over {found['steps']:,} {kind}"
    return [how, Value(share(found["share"]), found["share"]), interval]


def _gb_s(rate: Mapping[str, float] | None) -> str:
    return DASH if rate is None else f"{significant(rate['peak'])} GB/s"
