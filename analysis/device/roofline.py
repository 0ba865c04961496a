"""The roofline of a step: what a decode step must read and a prompt must multiply, against what the device can do.

After Williams, Waterman and Patterson (2009). A decode step reads every weight that it uses once, and the keys and
values of every running sequence; a prompt's step multiplies. So, over a run's steps,

- MBU = sum of bytes / sum of forward time / bandwidth, over steps that only decode;
  bytes of a step = weights + KV bytes a token and layer x layers x tokens that each sequence attends to;
- MFU = sum of operations / sum of forward time / peak, over steps with prompts;
  operations = 2 x parameters x tokens (the head's only for the sequences that get a token from the step)
  + 4 x layers x heads x head size x pairs of a token and one that it attends to (itself included).

The interval is that of a ratio of sums (stats.series), widened by the spread of the device's own figure where that was
measured. Activations, and what is written, are not counted: the shares are lower bounds on the traffic.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from gapmeter.analysis.arrays import AnyArray, Floats, Ints
from gapmeter.analysis.device.devices import format_of, recognize
from gapmeter.analysis.ledger.trace import Trace
from gapmeter.analysis.numbers import counted
from gapmeter.analysis.results.device import (
    AchievedShare,
    DecodeRoofline,
    ForwardTime,
    LeastTime,
    PeakRate,
    PrefillRoofline,
    Roofline,
    RooflineDevice,
    Weights,
)
from gapmeter.analysis.results.manifest import Manifest, MeasuredRate
from gapmeter.analysis.stats.series import ratio_of_sums
from gapmeter.records import EntryFlag, Span
from gapmeter.records.reader import Table

FEWEST_STEPS = 20
_BOUND_SHARE = 0.5  # of the forward that the bytes or operations must explain before they are called its bound


def peaks_of(trace: Trace | None, manifest: Manifest) -> tuple[RooflineDevice, str] | str:
    """The device's figures, from the catalogue for a GPU, as measured for a CPU; a sentence where a run has none.

    Beside them why ``tflops`` is None, else "". ``cached_gb_s`` is set where the weights fit into a CPU's last cache.
    """
    engine = manifest.asked.server.engine
    if engine == "simulated":
        return "the simulated engine computes nothing"
    if engine == "attach":
        return "the size of an attached server's model is not known"
    if manifest.target.weights is None:
        return "the model's folder does not tell its size"
    if trace is None or not trace.has_engine:
        return "no server process recorded its steps"
    if manifest.hardware.gpus:
        return _gpu_peaks(manifest, manifest.hardware.gpus[0])
    measured = manifest.target.peaks
    if measured is None:
        return "the memory bandwidth of the server's cores was not measured"
    precision, cores = manifest.asked.server.precision, len(measured.cores)
    multiplies = precision == measured.multiply_precision
    device = RooflineDevice(
        name=manifest.hardware.cpu,
        source=f"measured on {counted(cores, 'core')} before the server began",
        bandwidth_gb_s=_best(max(measured.triad, measured.read, key=lambda rate: rate.high)),
        tflops=_best(measured.multiply) if multiplies else None,
        llc_bytes=measured.llc_bytes,
        cached_gb_s=_best(measured.cached) if measured.cached else None,
    )
    return device, "" if multiplies else f"the peak of {precision} on this CPU was not measured (float32 alone is)"


def _best(rate: MeasuredRate) -> PeakRate:
    """The best of the repeats is the peak, as in STREAM; the median says how far one may be off."""
    return PeakRate(peak=rate.high, low=rate.median)


def _gpu_peaks(manifest: Manifest, name: str) -> tuple[RooflineDevice, str] | str:
    known = recognize(name)
    if known is None or known.bandwidth_gb_s is None:
        return f"{name.partition(',')[0]} is not in the catalogue (analysis/gpus.yaml)"
    count = manifest.target.tensor_parallel or 1
    precision = manifest.asked.server.precision
    tflops = (known.tflops or {}).get(format_of(precision))
    device = RooflineDevice(
        name=known.name,
        source=str(known.data_sheet),
        bandwidth_gb_s=PeakRate(peak=known.bandwidth_gb_s * count, low=known.bandwidth_gb_s * count),
        tflops=PeakRate(peak=tflops * count, low=tflops * count) if tflops else None,
        llc_bytes=None,
        cached_gb_s=None,
    )
    return device, "" if tflops else f"the catalogue has no {precision} peak of it"


def describe_roofline(trace: Trace | None, manifest: Manifest, window: tuple[int, int] | None) -> Roofline:
    """Decode, prefill, the device; None with ``why`` for what is unmeasured."""
    weights = manifest.target.weights
    peaks = peaks_of(trace, manifest)
    if isinstance(peaks, str) or trace is None or window is None or weights is None:
        why = peaks if isinstance(peaks, str) else "no request was measured"
        return Roofline(decode=None, prefill=None, device=None, why=why)
    device, no_tflops = peaks
    steps = step_work(trace, weights)
    steps = steps[(steps["start_ns"] >= window[0]) & (steps["start_ns"] <= window[1])]
    return Roofline(
        decode=_decode(steps[steps["prompts"] == 0], weights, device),
        prefill=_prefill(steps[steps["prompts"] > 0], device, no_tflops),
        device=device,
        weights=weights,
        why=None,
    )


def least_forwards(trace: Trace, manifest: Manifest) -> tuple[Ints, Floats] | None:
    """Steps, and the least time that a GPU needs for the forward of each, ns; None where its peaks are not known.

    The longer of its bytes at the peak bandwidth and its operations at the peak rate, without the head's weights, since
    the logits may be made behind the forward.
    """
    peaks = peaks_of(trace, manifest)
    weights = manifest.target.weights
    if isinstance(peaks, str) or weights is None or not manifest.hardware.gpus:
        return None
    device, _ = peaks
    steps = step_work(trace, weights)
    head = weights.step_bytes * weights.head_parameters / weights.step_parameters
    least_ns = (steps["bytes"].to_numpy(np.float64) - head) / device.bandwidth_gb_s.peak
    if device.tflops:
        least_ns = np.maximum(least_ns, steps["operations"].to_numpy(np.float64) / 1e3 / device.tflops.peak)
    return steps["step"].to_numpy(np.int64), least_ns


def _decode(steps: pd.DataFrame, weights: Weights, device: RooflineDevice) -> DecodeRoofline | None:
    """Decode-only steps against the bandwidth, and what that says of the least time for a token."""
    if len(steps) < FEWEST_STEPS:
        return None
    read, ns = steps["bytes"].to_numpy(np.float64), steps["forward_ns"].to_numpy(np.float64)
    bandwidth, resident = _bandwidth(read, device)
    mbu = ratio(read, ns, bandwidth)
    mfu = ratio(steps["operations"].to_numpy(np.float64) / 1e3, ns, device.tflops) if device.tflops else None
    least_ms = read / bandwidth.peak / 1e6
    return DecodeRoofline(
        mbu=mbu,
        mbu_of_memory=mbu.achieved / device.bandwidth_gb_s.peak,
        mfu=mfu,
        cache_resident=resident,
        bandwidth_gb_s=bandwidth.peak,
        batch_mean=float(steps["decoding"].mean()),
        kv_tokens_mean=float(steps["kv_tokens"].mean()),
        bytes_mean=float(read.mean()),
        weight_bytes=weights.step_bytes,
        forward_ms=_forward_time(ns),
        itl_least_ms=LeastTime(mean=float(least_ms.mean()), max=float(least_ms.max())),
        bound=_bound(mbu.share, mfu.share if mfu else None, resident=resident),
    )


def _bandwidth(read: Floats, device: RooflineDevice) -> tuple[PeakRate, bool]:
    """At which steps that read so much can do so, and whether all of it fits into the last-level cache."""
    resident = device.llc_bytes is not None and float(read.max()) < device.llc_bytes
    return (device.cached_gb_s if resident and device.cached_gb_s else device.bandwidth_gb_s), resident


def _forward_time(ns: Floats) -> ForwardTime:
    return ForwardTime(mean=float(ns.mean()) / 1e6, p50=float(np.median(ns)) / 1e6)


def _bound(mbu: float, mfu: float | None, *, resident: bool) -> str:
    """The roof that explains at least half of the forward time, the larger of the two; else ``neither``."""
    roof, part = ("cache bandwidth" if resident else "memory bandwidth"), mbu
    if mfu is not None and mfu > part:
        roof, part = "compute", mfu
    return roof if part >= _BOUND_SHARE else "neither"


def _prefill(steps: pd.DataFrame, device: RooflineDevice, why: str) -> PrefillRoofline | None:
    """Steps with prompts against the peak of multiplications; those without decoding where there are enough.

    ``bound`` asks of the bandwidth too: a short prompt takes about as long as the weights take to be read.
    """
    alone = steps[steps["decoding"] == 0]
    chosen = alone if len(alone) >= FEWEST_STEPS else steps
    if len(chosen) < FEWEST_STEPS:
        return None
    ns, operations = chosen["forward_ns"].to_numpy(np.float64), chosen["operations"].to_numpy(np.float64)
    mfu = ratio(operations / 1e3, ns, device.tflops) if device.tflops else None
    read = chosen["bytes"].to_numpy(np.float64)
    bandwidth, resident = _bandwidth(read, device)
    bound: str | None = _bound(ratio(read, ns, bandwidth).share, mfu.share if mfu else None, resident=resident)
    bound = None if mfu is None and bound == "neither" else bound
    return PrefillRoofline(
        mfu=mfu,
        why=why or None,
        tflops=float(operations.sum() / ns.sum()) / 1e3,
        mixed=chosen is steps and bool((steps["decoding"] > 0).any()),
        steps=len(chosen),
        tokens_mean=float(chosen["prompt_tokens"].mean()),
        forward_ms=_forward_time(ns),
        bound=bound,
    )


def step_work(trace: Trace, weights: Weights) -> pd.DataFrame:
    """One row a step with a forward: ``Trace.step_loads``, the ``bytes`` it must read and its ``operations``.

    ``weights``: the manifest's. Where the logits are made in the sampling, that is part of the forward's time here,
    since the head is part of its bytes.
    """
    steps = trace.step_loads.copy()
    if trace.logits_in_sampling:
        sampled, of_step = trace.within_steps(Span.DEVICE_SAMPLING, steps["step"].to_numpy())
        sampled_ns = np.bincount(of_step, sampled["end"] - sampled["start"], len(steps))
        steps["forward_ns"] += sampled_ns * (steps["forward_ns"] > 0)
    layers, sliding, window, experts = weights.layers, weights.sliding_layers, weights.window, weights.experts

    def work(entries: Table) -> dict[str, AnyArray]:
        tokens, before, flags = entries["tokens"].astype(float), entries["before"].astype(float), entries["flags"]
        context = before + tokens
        seen, pairs = context * (layers - sliding), _pairs(before, tokens, None) * (layers - sliding)
        if sliding:
            seen += np.minimum(context, window or 0) * sliding
            pairs += _pairs(before, tokens, window) * sliding
        emits = ((flags & EntryFlag.PROMPT) == 0) | ((flags & EntryFlag.LAST_CHUNK) != 0)
        return {"tokens": tokens, "emits": emits, "seen": seen, "pairs": pairs}

    sums = trace.step_sums(steps["step"].to_numpy(), work)
    body = float(weights.step_parameters - weights.head_parameters)
    routed_bytes: Floats | float = 0.0
    if experts:
        body += experts.parameters * experts.per_token / experts.count
        # The part of the experts that a step reads, if every token chose its own evenly: E (1 - (1 - k / E)^tokens).
        routed_bytes = experts.bytes * (1.0 - (1.0 - experts.per_token / experts.count) ** sums["tokens"])
    steps["bytes"] = weights.step_bytes + routed_bytes + sums["seen"] * weights.kv_bytes
    multiplied = 2.0 * body * sums["tokens"] + 2.0 * weights.head_parameters * sums["emits"]
    steps["operations"] = multiplied + 4.0 * weights.attention_width * sums["pairs"]
    return steps[steps["forward_ns"] > 0].reset_index(drop=True)


def _pairs(before: Floats, tokens: Floats, window: int | None) -> Floats:
    """Pairs of one of ``tokens`` new tokens and one that it attends to: before + 1, before + 2, ... each."""
    if window is None:
        return np.asarray(tokens * before + tokens * (tokens + 1) / 2)
    below = np.clip(window - before, 0, tokens)  # these still see everything before them
    return np.asarray(below * before + below * (below + 1) / 2 + (tokens - below) * window)


def ratio(amount: Floats, ns: Floats, peak: PeakRate) -> AchievedShare:
    """``amount`` a nanosecond over the peak (in units of 10^9 a second), with its interval. Needs two steps."""
    rate, low, high = ratio_of_sums(amount, ns).known
    share, least, most = rate / peak.peak, max(low / peak.peak, 0.0), high / peak.low
    return AchievedShare(share=share, low=least, high=most, achieved=rate, steps=len(ns))
