"""What the device and the server's processes did."""

from __future__ import annotations

from gapmeter.analysis.numbers import duration, share
from gapmeter.analysis.results.device import (
    AchievedShare,
    DecodeRoofline,
    EnergyWindow,
    Roofline,
    Telemetry,
    Utilisation,
)


def telemetry_sentence(telemetry: Telemetry) -> str:
    """One line: what was there, what it did, and what is missing."""
    parts = []
    if not telemetry.gpus:
        parts.append(telemetry.sources["gpu"].absent or "no GPU was sampled")
    parts.append(utilisation_sentence(telemetry.utilisation))
    if telemetry.energy:
        parts.append(_energy_of(telemetry.energy))
    if missed := sum(source.missed for source in telemetry.sources.values()):
        parts.append(f"{missed} samples missed")
    return "; ".join(part for part in parts if part)


def _energy_of(energy: EnergyWindow) -> str:
    idle = "" if energy.idle_share is None else f", {share(energy.idle_share)} of it idle"
    return f"{energy.joules:.0f} J ({energy.source}{idle})"


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
        parts.append(f"a token takes {real} of forward and at full bandwidth {least}")
    if prefill and prefill.mfu:
        parts.append(f"prefill computes at {share(prefill.mfu.share)} of the peak")
    return ", ".join(parts) or None


def _decode(decode: DecodeRoofline) -> str:
    of = "the last-level cache's" if decode.cache_resident else "memory's"
    said = f"decode reads at {_interval(decode.mbu)} of {of} bandwidth (MBU)"
    if decode.cache_resident:
        said += f": the {_megabytes(decode.bytes_mean)} of a step fit into that cache, so memory is no bound"
    bound = {
        "memory bandwidth": "it is bound by memory bandwidth",
        "cache bandwidth": "it is bound by the cache's bandwidth",
        "compute": "it is bound by computing, not by reading",
        "neither": "neither reading nor computing explains half of its time",
    }[decode.bound]
    least, real = duration(decode.itl_least_ms.mean), duration(decode.forward_ms.mean)
    batch = f"with {decode.batch_mean:.1f} sequences at once"
    return f"{said}; {bound}; even at full bandwidth a token takes at least {least} {batch} (the forward took {real})"


def _megabytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _interval(achieved: AchievedShare) -> str:
    return f"{share(achieved.share)} ({share(achieved.low)} to {share(achieved.high)})"
