"""What the ledgers say about groups of requests: bands, the device's share, and pairs of groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from gapmeter.analysis.jsonable import json_safe
from gapmeter.analysis.ledger.bands import describe_bands, describe_compute
from gapmeter.analysis.ledger.explore import METRICS, describe_pairs
from gapmeter.analysis.requests import figures as fig
from gapmeter.analysis.requests.metrics import measured_requests


def explain_groups(
    requests: pd.DataFrame, ledger: pd.DataFrame | None, gaps: pd.DataFrame | None, steps: pd.DataFrame | None,
    limits_ns: Mapping[str, float], device: str,
) -> dict[str, Any]:  # fmt: skip
    """``bands``, ``compute`` and ``explore`` of the summary; empty where there is no ledger (None: refused)."""
    measured = measured_requests(requests)
    ledgers = {metric: fig.ledgers_of(ledger, measured, event) for metric, event in METRICS.items()}
    bands = dict(ledgers)
    if gaps is not None and len(gaps):
        bands["itl"] = gaps[gaps["request_id"].isin(measured["request_id"]).to_numpy(bool)]
    parts = {
        "bands": describe_bands(bands),
        "compute": describe_compute(ledgers, steps, device),
        "explore": describe_pairs(measured, ledgers, limits_ns),
    }
    safe: dict[str, Any] = json_safe(parts)
    return safe
