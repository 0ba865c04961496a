"""What a device did by its own marks: busy, idle, waiting for its host, and in sampled windows at kernels.

The marks tile a device's stay at a step (gapmeter.analysis.ledger.device_time), so what no step covers is idle time,
known for every step and without a profiler. Inside a forward the gaps between kernels are not marked: as long as the
host was still launching it, the device may have waited for that, and ``launching_share`` says for how much of the
forwards. Where kernels were sampled, they say how much of it was gaps.
"""

from __future__ import annotations

import numpy as np

from gapmeter.analysis.arrays import Bools, Floats, distinct
from gapmeter.analysis.ledger.critical_path import Times, covered, overlaps, union
from gapmeter.analysis.ledger.device_time import DEVICE_WORK, Forwards, busy_of, timed_forwards
from gapmeter.analysis.ledger.trace import Trace
from gapmeter.analysis.results.device import DeviceUse, KernelUse
from gapmeter.records import Span
from gapmeter.records.reader import Table


def describe_device(trace: Trace | None, window: tuple[int, int]) -> DeviceUse | None:
    """Over the window (ns), the mean of engines' devices; None where no device told its times."""
    if trace is None or window[1] <= window[0]:
        return None
    every, stays = [], []
    for spans in trace.by_engine():
        own = spans[spans["code"] == Span.DEVICE_STEP]
        if len(own):
            stays.append(own[(own["end"] > window[0]) & (own["start"] < window[1])])
            every.append(_shares(spans, stays[-1], window))
    if not any(map(len, stays)):
        return None
    steps, forwards = np.concatenate(stays), timed_forwards(trace)
    lasted_ns = int((forwards.end - forwards.start).sum())
    busy, waiting, inputs, forward, sampling, copy = np.mean(every, axis=0).tolist()
    return DeviceUse(
        busy_share=busy,
        idle_share=1 - busy,
        waiting_share=waiting,
        input_share=inputs,
        forward_share=forward,
        sampling_share=sampling,
        copy_share=copy,
        launching_share=float(forwards.exposed_ns.sum()) / lasted_ns if lasted_ns else None,
        steps=len(distinct(steps["step"])),
        untimed_steps=len(trace.untimed_steps),
        half_width_us=float(np.median(steps["n"])) / 1e3,
        half_width_us_max=float(steps["n"].max()) / 1e3,
        drift_ppm=max((1e6 * drift for drift in trace.drifts), key=abs, default=None),
        kernels=_kernels(trace, forwards),
    )


def _shares(spans: Table, stays: Table, window: tuple[int, int]) -> Floats:
    """Shares of the window: an engine's device busy, waiting for its host, and at each of ``DEVICE_WORK``."""
    work = [within(spans[spans["code"] == code], window) for code in DEVICE_WORK]
    busy = union(*(np.concatenate(side) for side in zip(*work, strict=True)))
    codes = Span.SCHEDULE, Span.UPDATE, Span.INPUT_PREP, Span.HOST_LAUNCH, Span.SAMPLING, Span.DEVICE_STEP
    at_step = by_step(spans, np.isin(spans["step"], stays["step"]) & np.isin(spans["code"], codes), window)
    waiting = length(at_step) - int(covered(*at_step, *busy).sum())
    return np.array([length(busy), waiting, *map(length, work)]) / (window[1] - window[0])


def within(rows: Table, window: tuple[int, int]) -> Times:
    """The part of the window that lies in any of these spans."""
    start, end = (np.clip(rows[name], *window).astype(np.int64) for name in ("start", "end"))
    return union(start[end > start], end[end > start])


def length(stretches: Times) -> int:
    """The stretches' length together, ns."""
    return int((stretches[1] - stretches[0]).sum())


def by_step(spans: Table, which: Bools, window: tuple[int, int]) -> Times:
    """From each step's first stamp of ``which`` to its last, but for what the engine's loop slept in between.

    Transformers' asynchronous batching ends a load's last step when the next request comes.
    """
    rows = spans[which]
    rows = rows[np.argsort(rows["step"], kind="stable")]
    _, first = np.unique(rows["step"], return_index=True)
    start = np.clip(np.minimum.reduceat(rows["start"], first), *window).astype(np.int64)
    steps = union(start, np.clip(np.maximum.reduceat(rows["end"], first), *window).astype(np.int64))
    loop = spans["code"] == Span.LOOP
    if not loop.any():
        return steps
    _, _, begun, ended = overlaps(*steps, *within(spans[which | loop], window))
    return begun, ended


def _kernels(trace: Trace, found: Forwards) -> KernelUse | None:
    """Kernels of forwards whole in a sampled window; ``busy_share`` also of others, as far as some tell of them."""
    whole, busy, lasted = found.busy_ns >= 0, busy_of(found), found.end - found.start
    if not whole.any():
        return None
    notes = [note for note in trace.notes if note.get("type") == "kernels" and note.get("kernels")]
    rows = [spans[spans["code"] == Span.KERNELS] for spans in trace.process_spans.values()]
    ran_ns = sum(int((part["end_ns"] - part["start_ns"]).sum()) for part in rows)
    sums = {name: sum(float(note[f"{name}_ns"]) for note in notes) for name in ("sum", "communication", "copies")}
    return KernelUse(
        steps=len(distinct(found.step[whole])),
        busy_share=min(1.0, float(busy[busy >= 0].sum()) / float(lasted[busy >= 0].sum())),
        overlap=sums["sum"] / max(ran_ns, 1),
        communication_share=sums["communication"] / max(sums["sum"], 1.0),
        copies_ms=sums["copies"] / 1e6,
    )
