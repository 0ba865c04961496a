"""What telemetry and the roofline know of the resource that binds a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class BindingEvidence:
    """What telemetry and roofline know of what binds a run; None is unmeasured. Shares are fractions of 1.

    ``decode_bound`` and ``prefill_bound``: ``memory bandwidth``, ``cache bandwidth``, ``compute`` or ``neither``.
    ``forward_share_of_step``: the rest of a step is the host's. ``pcie_share``: the busier direction of the link.
    """

    mbu: float | None
    mfu: float | None
    decode_bound: str | None
    prefill_bound: str | None
    forward_share_of_step: float | None
    forward_share_of_window: float | None
    server_cpu_share: float | None
    pcie_share: float | None


def binding_evidence(summary: Mapping[str, Any]) -> BindingEvidence:
    """Evidence for the resource that binds, from ``summary.json`` alone."""
    roofline, telemetry = summary.get("roofline") or {}, summary.get("telemetry") or {}
    decode, prefill = roofline.get("decode") or {}, roofline.get("prefill") or {}
    used = telemetry.get("utilisation") or {}
    return BindingEvidence(
        mbu=(decode.get("mbu") or {}).get("share"),
        mfu=(prefill.get("mfu") or {}).get("share"),
        decode_bound=decode.get("bound"),
        prefill_bound=prefill.get("bound"),
        forward_share_of_step=used.get("forward_share_of_step"),
        forward_share_of_window=used.get("forward_share_of_window"),
        server_cpu_share=used.get("server_cpu_share"),
        pcie_share=_pcie_share(telemetry.get("gpus") or []),
    )


def _pcie_share(gpus: list[Mapping[str, Any]]) -> float | None:
    shares = [
        pcie[way]["mean"] / pcie["link_gb_s"]
        for gpu in gpus
        if (pcie := gpu.get("pcie")) and pcie.get("link_gb_s")
        for way in ("rx_gb_s", "tx_gb_s")
        if pcie.get(way)
    ]
    return max(shares, default=None)
