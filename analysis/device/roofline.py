"""The roofline of a step: what a decode step must read and a prompt must multiply, against what the device can do.

After Williams, Waterman and Patterson (2009). A decode step reads every weight that it uses once, and the keys and
values of every running sequence; a prompt's step multiplies. So, over a run's steps,

- MBU = sum of bytes / sum of forward time / bandwidth, over steps that only decode;
  bytes of a step = weights + KV bytes a token and layer x layers x tokens that each sequence attends to;
- MFU = sum of operations / sum of forward time / peak, over steps with prompts;
  operations = 2 x parameters x tokens (the head's only for the sequences that get a token from the step)
  + 4 x layers x heads x head size x pairs of a token and one that it attends to (itself included).

The interval is that of a ratio of sums (stats.means), widened by the spread of the device's own figure where that was
measured. Activations, and what is written, are not counted: the shares are lower bounds on the traffic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from gapmeter.analysis.ledger.trace import Trace
from gapmeter.analysis.stats.estimate import Floats
from gapmeter.analysis.stats.means import ratio_of_sums
from gapmeter.records import EntryFlag, Span

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Rate:
    """A device's peak: the figure, and how low it was seen too (the same where a data sheet says it)."""

    peak: float
    low: float


@dataclass(frozen=True, slots=True)
class Share:
    """Achieved over possible, with its 95 % interval; ``achieved`` in GB/s or TFLOPS."""

    share: float
    low: float
    high: float
    achieved: float
    steps: int


def step_work(trace: Trace, weights: Mapping[str, Any]) -> pd.DataFrame:
    """One row a step with a forward: what it ran, the ``bytes`` it must read and the ``operations`` it must do.

    Beside these: ``forward_ns``, ``start_ns``, ``decoding``, ``prompts``, ``prompt_tokens``, ``kv_tokens`` (tokens that
    its decoding sequences attend to). ``weights`` as the manifest's ``target`` has them.
    """
    entries = trace.entries[trace.entries["tokens"] > 0]
    seqs, at = np.unique(entries["step"], return_inverse=True)
    tokens, before = entries["tokens"].astype(np.float64), entries["before"].astype(np.float64)
    prompt = (entries["flags"] & EntryFlag.PROMPT) != 0
    emits = ~prompt | ((entries["flags"] & EntryFlag.LAST_CHUNK) != 0)

    def total(values: Any) -> Floats:
        return np.bincount(at, values, len(seqs)).astype(np.float64)

    layers, sliding, window = weights["layers"], weights["sliding_layers"], weights["window"]
    context = before + tokens
    seen = context * (layers - sliding) + (np.minimum(context, window) * sliding if sliding else 0)
    pairs = _pairs(before, tokens, None) * (layers - sliding)
    pairs = pairs + (_pairs(before, tokens, window) * sliding if sliding else 0)
    sequences, worked = total(np.ones(len(entries))), total(tokens)
    body = weights["step_parameters"] - weights["head_parameters"]
    start_ns, forward_ns = _forwards(trace, seqs)
    found = pd.DataFrame(
        {
            "step": seqs,
            "start_ns": start_ns,
            "forward_ns": forward_ns,
            "decoding": total(~prompt),
            "prompts": total(prompt),
            "prompt_tokens": total(tokens * prompt),
            "kv_tokens": total(context * ~prompt),
            "bytes": weights["step_bytes"] + _routed(weights, worked, "bytes") + total(seen) * weights["kv_bytes"],
            "operations": 2.0 * (body + _routed_active(weights)) * worked
            + 2.0 * weights["head_parameters"] * total(emits)
            + 4.0 * weights["attention_width"] * total(pairs),
            "sequences": sequences,
        }
    )
    return found[found["forward_ns"] > 0].reset_index(drop=True)


def _pairs(before: Floats, tokens: Floats, window: int | None) -> Floats:
    """Pairs of one of ``tokens`` new tokens and one that it attends to: before + 1, before + 2, ... each."""
    if window is None:
        return np.asarray(tokens * before + tokens * (tokens + 1) / 2)
    below = np.clip(window - before, 0, tokens)  # these still see everything before them
    return np.asarray(below * before + below * (below + 1) / 2 + (tokens - below) * window)


def _routed(weights: Mapping[str, Any], tokens: Floats, what: str) -> Floats | float:
    """The part of the experts that a step reads, if every token chose its own evenly: E (1 - (1 - k / E)^tokens)."""
    experts = weights.get("experts")
    if not experts:
        return 0.0
    chosen = 1.0 - (1.0 - experts["per_token"] / experts["count"]) ** tokens
    return np.asarray(experts[what] * chosen)


def _routed_active(weights: Mapping[str, Any]) -> float:
    experts = weights.get("experts")
    return experts["parameters"] * experts["per_token"] / experts["count"] if experts else 0.0


def _forwards(trace: Trace, seqs: Ints) -> tuple[Ints, Floats]:
    """Start of each step's forward, and its time in ns (0 where it was not stamped)."""
    rows = trace.step_spans[trace.step_spans["code"] == Span.FORWARD]
    at = np.searchsorted(seqs, rows["step"])
    inside = (at < len(seqs)) & (seqs[np.minimum(at, len(seqs) - 1)] == rows["step"])
    start = np.zeros(len(seqs), np.int64)
    start[at[inside]] = rows["start"][inside]
    return start, np.bincount(at[inside], (rows["end"] - rows["start"])[inside], len(seqs)).astype(np.float64)


def ratio(amount: Floats, ns: Floats, peak: Rate) -> Share:
    """``amount`` a nanosecond over the peak (in units of 10^9 a second), with its interval. Needs two steps."""
    rate, low, high = ratio_of_sums(amount, ns).known
    return Share(rate / peak.peak, max(low / peak.peak, 0.0), high / peak.low, rate, len(ns))
