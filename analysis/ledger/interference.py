"""How much longer a decode step took because other requests' prompts ran in it: an estimate, and marked so."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gapmeter.analysis.ledger.critical_path import covered
from gapmeter.analysis.ledger.trace import Trace
from gapmeter.records import EntryFlag, Span

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_FEWEST_STEPS = 20


@dataclass(frozen=True, slots=True)
class Interference:
    """Forward time of a decode-only step: ``base + per_sequence * sequences + per_token * KV tokens``, in ns.

    Least squares over the run's decode-only steps; ``error_ns`` is the standard deviation of the residuals and
    ``steps`` how many steps the fit saw. ``excess`` maps a mixed step's sequence number to the time above the fit.
    """

    base_ns: float
    per_sequence_ns: float
    per_token_ns: float
    error_ns: float
    steps: int
    seqs: Ints
    excess_ns: Ints


def fit_interference(trace: Trace) -> Interference | None:
    """Fit the run's decode-only steps; None when there are fewer than twenty of them."""
    entries = trace.entries[trace.entries["tokens"] > 0]
    seqs, at = np.unique(entries["step"], return_inverse=True)
    prompt = (entries["flags"] & EntryFlag.PROMPT) != 0
    prompts = np.bincount(at, prompt, len(seqs))
    decoding = np.bincount(at, ~prompt, len(seqs))
    tokens = np.bincount(at, (entries["before"] + entries["tokens"]) * ~prompt, len(seqs))
    forward = _forward_ns(trace, seqs)
    known = forward > 0
    alone = known & (prompts == 0)
    if np.count_nonzero(alone) < _FEWEST_STEPS:
        return None
    design = np.column_stack([np.ones(len(seqs)), decoding, tokens])
    weights, *_ = np.linalg.lstsq(design[alone], forward[alone], rcond=None)
    fitted = design @ weights
    mixed = known & (prompts > 0) & (decoding > 0)
    excess = np.clip(forward - fitted, 0, None)[mixed]
    return Interference(
        base_ns=float(weights[0]),
        per_sequence_ns=float(weights[1]),
        per_token_ns=float(weights[2]),
        error_ns=float(np.std(forward[alone] - fitted[alone])),
        steps=int(np.count_nonzero(alone)),
        seqs=seqs[mixed],
        excess_ns=excess.astype(np.int64),
    )


def _forward_ns(trace: Trace, seqs: Ints) -> Floats:
    rows = trace.step_spans[trace.step_spans["code"] == Span.FORWARD]
    at = np.searchsorted(seqs, rows["step"])
    inside = (at < len(seqs)) & (seqs[np.minimum(at, len(seqs) - 1)] == rows["step"])
    lasted = rows["end"] - rows["start"]
    if trace.cores is not None and not trace.on_device:
        lasted = lasted - covered(rows["start"], rows["end"], *trace.cores.waits["engine"].whole())
    return np.bincount(at[inside], lasted[inside], len(seqs)).astype(np.float64)


def decode_excess(trace: Trace, fit: Interference, request: Ints, low: Ints, high: Ints) -> Floats:
    """Sum of the excess over own decode steps with a sequence number in ``[low, high]``, per event, in ns.

    ``request`` is the event's client row, shapes all (events,).
    """
    entries = trace.entries
    mixed = np.isin(entries["step"], fit.seqs) & ((entries["flags"] & EntryFlag.PROMPT) == 0)
    own = entries[mixed & (entries["tokens"] > 0) & (entries["request"] >= 0)]
    own = own[np.lexsort((own["step"], own["request"]))]
    excess = fit.excess_ns[np.searchsorted(fit.seqs, own["step"])]
    total = np.concatenate([[0], np.cumsum(excess)])
    big = np.int64(1) << 40
    key = own["request"] * big + own["step"]
    begin = np.searchsorted(key, request * big + np.maximum(low, 0), side="left")
    end = np.searchsorted(key, request * big + high, side="right")
    return np.where(high >= low, total[np.maximum(end, begin)] - total[begin], 0).astype(np.float64)
