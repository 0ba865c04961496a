"""How a device was used, by its own marks, and which resource binds: what an answer's time went into.

A device is busy, idle, waiting for its host, and in sampled windows at kernels. The marks tile a device's stay at a
step (gapmeter.analysis.ledger.device_time), so what no step covers is idle time, known for every step and without a
profiler. Inside a forward the gaps between kernels are not marked: as long as the host was still launching it, the
device may have waited for that, and ``launching_share`` says for how much of the forwards. Where kernels were sampled,
they say how much of it was gaps.

What binds is what more of would make an answer shorter. The rule, in this order:

1. *load tester*: it is at its limit: it did not send what was planned, its core is busy, or the rate is beyond its
   calibrated floor. The figures then describe the client.
2. Otherwise the mean ledger to the last token is summed by kind of resource, and the largest sum binds: *queue*
   (waiting for a place in the batch, behind steps of others, behind others' prompts), *KV memory* (preempted), *host*
   (API server, framework, tokenization, waits for a CPU core, gaps in which a device waited for its host), *network*,
   and *device* (the forwards themselves).
3. *device* is told apart by the roofline of its larger part (prefill or decode), where that was measured: memory
   bandwidth, cache bandwidth or compute. Where the bytes and operations explain less than half of the forward, neither
   bounds it: it stays *device*, and the time is overhead inside the forward. A PCIe link that was at least half busy
   binds instead of host or device. What was not measured is listed as unmeasured.

A queue is a symptom: requests wait because what serves them is busy. So ``behind`` names what of that binds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gapmeter.analysis.arrays import Bools, Floats, distinct
from gapmeter.analysis.ledger.critical_path import Times, covered, overlaps, union
from gapmeter.analysis.ledger.device_time import (
    DEVICE_WORK,
    Forwards,
    beside,
    busy_of,
    forwards_and_window,
    launched_in,
)
from gapmeter.analysis.ledger.trace import Trace
from gapmeter.analysis.numbers import share
from gapmeter.analysis.results.device import Binding, DeviceUse, KernelUse, Roofline, Telemetry
from gapmeter.analysis.results.trust import BROKEN, Check
from gapmeter.analysis.stages import OF_THE_CLIENT, STAGES
from gapmeter.records import Span
from gapmeter.records.reader import Table

LOAD_TESTER, QUEUE, KV_MEMORY, HOST, NETWORK, DEVICE = (
    "load tester", "queue", "KV memory", "host", "network", "device",
)  # fmt: skip
MEMORY_BANDWIDTH, COMPUTE, PCIE, UNMEASURED = "memory bandwidth", "compute", "PCIe transfer", "unmeasured"
BOUNDS = (MEMORY_BANDWIDTH, "cache bandwidth", COMPUTE)
BUSY_LINK = 0.5
_CLIENT_CHECKS = ("delivered", "client_cpu", "token_rate", "request_rate")
_BY_GROUP = {"queueing": QUEUE, "tokenization": HOST, "framework": HOST, "network": NETWORK, "load_tester": LOAD_TESTER,
             "gpu_prefill": DEVICE, "gpu_decode": DEVICE}  # fmt: skip
_BY_STAGE = {stage.name: _BY_GROUP[stage.group] for stage in STAGES} | {"preempted": KV_MEMORY, "core_wait": HOST}


def describe_device(trace: Trace | None, window: tuple[int, int]) -> DeviceUse | None:
    """Over the window (ns), the mean of engines' devices; None where no device told its times."""
    if trace is None or window[1] <= window[0]:
        return None
    every, stays = [], []
    for spans in trace.by_engine():
        own = spans[spans["code"] == Span.DEVICE_STEP]
        if len(own):
            stays.append(beside(own, window))
            every.append(_shares(spans, stays[-1], window))
    if not any(map(len, stays)):
        return None
    steps = np.concatenate(stays)
    forwards, inside = forwards_and_window(trace, window)
    lasted_ns = int((forwards.end - forwards.start)[inside].sum())
    busy, waiting, inputs, forward, sampling, copy = np.mean(every, axis=0).tolist()
    return DeviceUse(
        busy_share=busy,
        idle_share=1 - busy,
        waiting_share=waiting,
        input_share=inputs,
        forward_share=forward,
        sampling_share=sampling,
        copy_share=copy,
        launching_share=float(forwards.exposed_ns[inside].sum()) / lasted_ns if lasted_ns else None,
        steps=len(distinct(steps["step"])),
        untimed_steps=len(launched_in(trace, window)[1]),
        half_width_us=float(np.median(steps["n"])) / 1e3,
        half_width_us_max=float(steps["n"].max()) / 1e3,
        drift_ppm=max((1e6 * drift for drift in trace.drifts), key=abs, default=None),
        kernels=_kernels(trace, forwards, inside),
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


def _kernels(trace: Trace, found: Forwards, inside: Bools) -> KernelUse | None:
    """Kernels of forwards whole in what was sampled, at any time, as the others' are told by them.

    ``busy_share`` of those ``inside``, as far as some tell of them.
    """
    whole, busy, lasted = found.busy_ns >= 0, busy_of(found), found.end - found.start
    told = inside & (busy >= 0)
    if not told.any():
        return None
    notes = [note for note in trace.notes if note.get("type") == "kernels" and note.get("kernels")]
    rows = [spans[spans["code"] == Span.KERNELS] for spans in trace.process_spans.values()]
    ran_ns = sum(int((part["end_ns"] - part["start_ns"]).sum()) for part in rows)
    sums = {name: sum(float(note[f"{name}_ns"]) for note in notes) for name in ("sum", "communication", "copies")}
    return KernelUse(
        steps=len(distinct(found.step[whole])),
        busy_share=min(1.0, float(busy[told].sum()) / float(lasted[told].sum())),
        overlap=sums["sum"] / max(ran_ns, 1),
        communication_share=sums["communication"] / max(sums["sum"], 1.0),
        copies_ms=sums["copies"] / 1e6,
    )


@dataclass(frozen=True, slots=True)
class BindingEvidence:
    """What telemetry and roofline know of what binds a run; None is unmeasured.

    ``decode_bound`` and ``prefill_bound``: ``memory bandwidth``, ``cache bandwidth``, ``compute`` or ``neither``.
    ``pcie_share``: the busier direction of the link, a fraction of 1.
    """

    decode_bound: str | None = None
    prefill_bound: str | None = None
    pcie_share: float | None = None


def binding_evidence(roofline: Roofline, telemetry: Telemetry | None) -> BindingEvidence:
    """What a run's result knows of it."""
    links = [gpu.pcie for gpu in telemetry.gpus if gpu.server and gpu.pcie] if telemetry else []
    shares = [
        way.mean / link.link_gb_s for link in links if link.link_gb_s for way in (link.rx_gb_s, link.tx_gb_s) if way
    ]
    return BindingEvidence(
        decode_bound=roofline.decode.bound if roofline.decode else None,
        prefill_bound=roofline.prefill.bound if roofline.prefill else None,
        pcie_share=max(shares, default=None),
    )


def binding_of(
    stages_ms: Mapping[str, float], checks: Sequence[Check] = (),
    evidence: BindingEvidence = BindingEvidence(), *, device: str = "GPU",
) -> Binding:  # fmt: skip
    """``stages_ms``: mean time to the last token by stage; ``checks``: what the rules of validity found.

    ``evidence``: what telemetry and roofline know; ``device`` is what computed the forwards: a CPU has no PCIe link.
    """
    whole = sum(stages_ms.values())
    sums: dict[str, float] = {}
    largest: dict[str, str] = {}  # of a resource: the stage that is most of it
    for stage, ms in stages_ms.items():
        if resource := _BY_STAGE.get(stage):
            sums[resource] = sums.get(resource, 0.0) + ms
            if resource not in largest or ms > stages_ms[largest[resource]]:
                largest[resource] = stage
    shares = {name: ms / whole for name, ms in sums.items()} if whole > 0 else {}
    broken = next((check for check in checks if check.status == BROKEN and check.rule in _CLIENT_CHECKS), None)
    if broken is not None:
        return Binding(resource=LOAD_TESTER, share=None, behind=None, parts=shares, unmeasured=(), why=broken.text)
    if whole <= 0 or not stages_ms.keys() & _BY_STAGE.keys() - OF_THE_CLIENT:
        return Binding(
            resource=UNMEASURED, share=None, behind=None, parts={}, unmeasured=("the server's stages",),
            why="no stage of the server was measured",
        )  # fmt: skip
    first = max(sums, key=lambda name: sums[name])
    served = {name: ms for name, ms in sums.items() if name not in (QUEUE, NETWORK, LOAD_TESTER) and ms > 0}
    behind = max(served, key=lambda name: served[name]) if first == QUEUE and served else None
    served_by = behind or first
    why = f"{share(shares[first])} of the mean answer is {_with_stage(first, largest[first])}"
    if behind:
        why += f"; what is waited for is busy with {_with_stage(behind, largest[behind])}"
    kind, how, unmeasured = _roof(stages_ms, evidence) if served_by == DEVICE else (served_by, "", [])
    if device == "GPU" and served_by in (DEVICE, HOST):
        if evidence.pcie_share is None:
            unmeasured.append(PCIE)
        elif evidence.pcie_share >= BUSY_LINK:
            kind, how = PCIE, "; its PCIe link was busy for most of the time"
    return Binding(
        resource=first if behind else kind, share=shares[first], behind=kind if behind else None, parts=shares,
        unmeasured=tuple(unmeasured), why=why + how,
    )  # fmt: skip


def _roof(stages_ms: Mapping[str, float], evidence: BindingEvidence) -> tuple[str, str, list[str]]:
    """Which roof bounds the larger part of the forwards, how that is said, and what of it is unmeasured."""
    part = "prefill" if stages_ms.get("prefill", 0.0) > stages_ms.get("decode", 0.0) else "decode"
    bound = evidence.prefill_bound if part == "prefill" else evidence.decode_bound
    if bound in BOUNDS:
        return bound, f"; its {part} is bound by {bound}", []
    if bound == "neither":
        how = f"; neither memory bandwidth nor compute bounds its {part}: the rest is overhead in the forward"
        return DEVICE, how, []
    unmeasured = f"whether memory bandwidth or compute bounds {part}"
    return DEVICE, f"; {unmeasured} is unmeasured", [unmeasured]


def _with_stage(resource: str, stage: str) -> str:
    """``device (decode)``; the stage alone where it has the resource's name."""
    return resource if stage == resource else f"{resource} ({stage.replace('_', ' ')})"
