"""What the summary says of the roofline: the device's peaks, shares of them with intervals, what bounds a token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from gapmeter.analysis.device.devices import UnknownDevice, find_device, recognise
from gapmeter.analysis.device.roofline import Rate, ratio, step_work
from gapmeter.analysis.ledger.trace import Trace
from gapmeter.analysis.numbers import duration, share

FEWEST_STEPS = 20
_BOUND_SHARE = 0.5  # of the forward that the bytes or operations must explain before they are called its bound
_FORMATS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "fp8": "fp8"}


@dataclass(frozen=True, slots=True)
class Peaks:
    """What the device can do. ``cached_gb_s`` is set where the weights fit into the last-level cache of a CPU."""

    device: str
    source: str
    bandwidth_gb_s: Rate | None
    tflops: Rate | None
    llc_bytes: int | None
    cached_gb_s: Rate | None
    no_tflops: str = ""


def peaks_of(manifest: Mapping[str, Any]) -> Peaks | str:
    """The device's figures, from the catalogue for a GPU, as measured for a CPU; a sentence when there are none."""
    target = manifest.get("target", {})
    gpus = manifest.get("hardware", {}).get("gpus") or []
    if gpus:
        return _gpu_peaks(manifest, str(gpus[0]))
    measured = target.get("peaks")
    if not measured:
        return "the memory bandwidth of the server's cores was not measured"
    best = max(measured["triad"], measured["read"], key=lambda found: float(found["high"]))
    precision = manifest["scenario"]["server"]["precision"]
    known = precision == measured["multiply_precision"]
    return Peaks(
        device=str(manifest["hardware"].get("cpu")),
        source=f"measured on {_cores(len(measured['cores']))} before the server began",
        bandwidth_gb_s=_measured(best),
        tflops=_measured(measured["multiply"]) if known else None,
        llc_bytes=measured["llc_bytes"],
        cached_gb_s=_measured(measured["cached"]) if measured["cached"] else None,
        no_tflops="" if known else f"the peak of {precision} on this CPU was not measured (float32 alone is)",
    )


def _cores(count: int) -> str:
    return "1 core" if count == 1 else f"{count} cores"


def _measured(rate: Mapping[str, float]) -> Rate:
    """The best of the repeats is the peak, as in STREAM; the median says how far one may be off."""
    return Rate(float(rate["high"]), float(rate["median"]))


def _gpu_peaks(manifest: Mapping[str, Any], name: str) -> Peaks | str:
    device = recognise(name)
    asked = (manifest["scenario"].get("cost") or {}).get("gpu")
    if device is None and asked:
        try:
            device = find_device(str(asked))
        except UnknownDevice:
            device = None
    if device is None or device.bandwidth_gb_s is None:
        return f"{name.partition(',')[0]} is not in the catalogue (analysis/gpus.yaml)"
    count = int(manifest["target"].get("tensor_parallel") or 1)
    precision = manifest["scenario"]["server"]["precision"]
    tflops = (device.tflops or {}).get(_FORMATS.get(precision, ""))
    return Peaks(
        device=device.name,
        source=str(device.data_sheet),
        bandwidth_gb_s=Rate(device.bandwidth_gb_s * count, device.bandwidth_gb_s * count),
        tflops=Rate(tflops * count, tflops * count) if tflops else None,
        llc_bytes=None,
        cached_gb_s=None,
        no_tflops="" if tflops else f"the catalogue has no {precision} peak of it",
    )


def describe_roofline(
    trace: Trace | None, manifest: Mapping[str, Any], window: tuple[int, int] | None
) -> dict[str, Any]:
    """``summary["roofline"]``: decode, prefill, the device, a sentence; null with ``why`` for what is unmeasured."""
    peaks = _missing(trace, manifest) or peaks_of(manifest)
    if isinstance(peaks, str) or trace is None or window is None:
        return {"decode": None, "prefill": None, "device": None, "why": str(peaks), "sentence": None, "line": None}
    weights = manifest["target"]["weights"]
    steps = step_work(trace, weights)
    steps = steps[(steps["start_ns"] >= window[0]) & (steps["start_ns"] <= window[1])]
    decode = _decode(steps[steps["prompts"] == 0], weights, peaks)
    prefill = _prefill(steps[steps["prompts"] > 0], peaks)
    device: dict[str, Any] = {"name": peaks.device, "source": peaks.source, "llc_bytes": peaks.llc_bytes}
    device |= {name: _rate_part(getattr(peaks, name)) for name in ("bandwidth_gb_s", "cached_gb_s", "tflops")}
    told = {"decode": decode, "prefill": prefill, "device": device, "weights": weights, "why": None}
    return told | {"sentence": _sentence(told), "line": _line(told)}


def _missing(trace: Trace | None, manifest: Mapping[str, Any]) -> str:
    server = manifest["scenario"]["server"]
    if server["engine"] == "simulated":
        return "the simulated engine computes nothing"
    if server["engine"] == "attach":
        return "of an attached server neither the model's size nor the device is known"
    if not manifest.get("target", {}).get("weights"):
        return "the model's folder does not tell its size"
    if trace is None or not trace.has_engine:
        return "no server process recorded its steps"
    return ""


def _rate_part(rate: Rate | None) -> dict[str, float] | None:
    return asdict(rate) if rate else None


def _decode(steps: pd.DataFrame, weights: Mapping[str, Any], peaks: Peaks) -> dict[str, Any] | None:
    """Decode-only steps against the bandwidth, and what that says of the least time for a token."""
    if len(steps) < FEWEST_STEPS or peaks.bandwidth_gb_s is None:
        return None
    read, ns = steps["bytes"].to_numpy(np.float64), steps["forward_ns"].to_numpy(np.float64)
    largest = float(read.max())
    resident = peaks.llc_bytes is not None and largest < peaks.llc_bytes
    bandwidth = peaks.cached_gb_s if resident and peaks.cached_gb_s else peaks.bandwidth_gb_s
    mbu = ratio(read, ns, bandwidth)
    compute = ratio(steps["operations"].to_numpy(np.float64) / 1e3, ns, peaks.tflops) if peaks.tflops else None
    least_ms = read / bandwidth.peak / 1e6
    found = {
        "mbu": asdict(mbu),
        "mbu_of_memory": mbu.achieved / peaks.bandwidth_gb_s.peak,
        "mfu": asdict(compute) if compute else None,
        "cache_resident": resident,
        "bandwidth_gb_s": bandwidth.peak,
        "batch_mean": float(steps["decoding"].mean()),
        "kv_tokens_mean": float(steps["kv_tokens"].mean()),
        "bytes_mean": float(read.mean()),
        "weight_bytes": weights["step_bytes"],
        "forward_ms": {"mean": float(ns.mean()) / 1e6, "p50": float(np.median(ns)) / 1e6},
        "itl_least_ms": {"mean": float(least_ms.mean()), "max": float(least_ms.max())},
    }
    return found | {"bound": _bound(mbu.share, compute.share if compute else None, resident)}


def _bound(mbu: float, mfu: float | None, resident: bool) -> str:
    """The roof that explains at least half of the forward time, the larger of the two; else ``neither``."""
    roof, part = ("cache bandwidth" if resident else "memory bandwidth"), mbu
    if mfu is not None and mfu > part:
        roof, part = "compute", mfu
    return roof if part >= _BOUND_SHARE else "neither"


def _prefill(steps: pd.DataFrame, peaks: Peaks) -> dict[str, Any] | None:
    """Steps with prompts against the peak of multiplications; those without decoding where there are enough."""
    alone = steps[steps["decoding"] == 0]
    chosen = alone if len(alone) >= FEWEST_STEPS else steps
    if len(chosen) < FEWEST_STEPS:
        return None
    ns, operations = chosen["forward_ns"].to_numpy(np.float64), chosen["operations"].to_numpy(np.float64)
    mfu = ratio(operations / 1e3, ns, peaks.tflops) if peaks.tflops else None
    return {
        "mfu": asdict(mfu) if mfu else None,
        "why": peaks.no_tflops or None,
        "tflops": float(operations.sum() / ns.sum()) / 1e3,
        "mixed": chosen is steps and bool((steps["decoding"] > 0).any()),
        "steps": len(chosen),
        "tokens_mean": float(chosen["prompt_tokens"].mean()),
        "forward_ms": {"mean": float(ns.mean()) / 1e6, "p50": float(np.median(ns)) / 1e6},
        "bound": None if mfu is None else ("compute" if mfu.share >= _BOUND_SHARE else "neither"),
    }


def _sentence(told: Mapping[str, Any]) -> str | None:
    decode, prefill = told["decode"], told["prefill"]
    parts = [_decode_words(decode)] if decode else []
    if prefill and prefill["mfu"]:
        parts.append(f"prefill computes at {_interval(prefill['mfu'])} of the peak (MFU)")
    elif prefill:
        parts.append(f"MFU unmeasured: {prefill['why']}")
    return "; ".join(parts) or None


def _line(told: Mapping[str, Any]) -> str | None:
    """The same for the terminal, where the interval and the reasons are left to the report."""
    decode, prefill = told["decode"], told["prefill"]
    parts = []
    if decode:
        of = "the cache's" if decode["cache_resident"] else "memory's"
        least, real = duration(decode["itl_least_ms"]["mean"]), duration(decode["forward_ms"]["mean"])
        parts.append(f"decode reads at {share(decode['mbu']['share'])} of {of} bandwidth")
        parts.append(f"a token takes {real} of forward and at full bandwidth {least}")
    if prefill and prefill["mfu"]:
        parts.append(f"prefill computes at {share(prefill['mfu']['share'])} of the peak")
    return ", ".join(parts) or None


def _decode_words(decode: Mapping[str, Any]) -> str:
    of = "the last-level cache's" if decode["cache_resident"] else "memory's"
    words = f"decode reads at {_interval(decode['mbu'])} of {of} bandwidth (MBU)"
    if decode["cache_resident"]:
        words += f": the {_megabytes(decode['bytes_mean'])} of a step fit into that cache, so memory is no bound"
    told = {
        "memory bandwidth": "it is bound by memory bandwidth",
        "cache bandwidth": "it is bound by the cache's bandwidth",
        "compute": "it is bound by computing, not by reading",
        "neither": "neither reading nor computing explains half of its time",
    }[decode["bound"]]
    least, real = duration(decode["itl_least_ms"]["mean"]), duration(decode["forward_ms"]["mean"])
    batch = f"with {decode['batch_mean']:.1f} sequences at once"
    return f"{words}; {told}; even at full bandwidth a token takes at least {least} {batch} (the forward took {real})"


def _megabytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _interval(found: Mapping[str, float]) -> str:
    return f"{share(found['share'])} ({share(found['low'])} to {share(found['high'])})"
