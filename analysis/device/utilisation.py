"""How busy the device really was: NVML's figure, or the server's CPU, beside the time in which a forward ran.

NVML's utilisation is the share of time in which at least one kernel ran on the GPU: a single small one counts as much
as a full one, so it reads near 100 % long before the GPU is used up, and it does not see that the engine waits between
kernels. A forward's share of the step says how much of each step the device had the work at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gapmeter.analysis.ledger.critical_path import union
from gapmeter.analysis.ledger.trace import Trace
from gapmeter.records import Span

Ints = NDArray[np.int64]

_PARTS_OF_A_STEP = (
    Span.SCHEDULE, Span.EXECUTE, Span.SAMPLE_CALL, Span.UPDATE, Span.OUTPUT_PUT, Span.WORKER, Span.INPUT_PREP,
    Span.FORWARD, Span.SAMPLING,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ForwardShares:
    """Shares of time, each a fraction of 1 or None where the probe did not record what it takes.

    ``window``: a forward ran, of all the window. ``step``: of the time in which any step was under way. ``kernels``: a
    kernel ran, of the forward of the steps whose kernels were sampled. ``by_device``: the forwards were stamped by the
    device's own events, so that they hold gaps between kernels but not the host's time.
    """

    window: float | None
    step: float | None
    kernels: float | None
    by_device: bool


def forward_shares(trace: Trace | None, since_ns: int, until_ns: int) -> ForwardShares:
    """The shares between two stamps."""
    if trace is None or until_ns <= since_ns:
        return ForwardShares(None, None, None, by_device=False)
    spans = trace.step_spans
    forward = spans[spans["code"] == Span.FORWARD]
    if not len(forward):
        return ForwardShares(None, None, None, by_device=False)
    under_way = spans[np.isin(spans["code"], _PARTS_OF_A_STEP)]
    computed = _covered_ns(forward["start"], forward["end"], since_ns, until_ns)
    worked = _covered_ns(*_whole_steps(under_way["step"], under_way["start"], under_way["end"]), since_ns, until_ns)
    busy = spans[spans["code"] == Span.KERNEL_BUSY]
    return ForwardShares(
        window=computed / (until_ns - since_ns),
        step=min(computed / worked, 1.0) if worked else None,
        kernels=_kernel_share(busy["step"], busy["end"], forward["step"], forward["end"] - forward["start"]),
        by_device=bool((forward["n"] == 1).any()),
    )


def _whole_steps(step: Ints, start: Ints, end: Ints) -> tuple[Ints, Ints]:
    """From each step's first stamp to its last: what lies between two parts of a step is the step's too."""
    order = np.argsort(step, kind="stable")
    _, first = np.unique(step[order], return_index=True)
    return np.minimum.reduceat(start[order], first), np.maximum.reduceat(end[order], first)


def _covered_ns(start: Ints, end: Ints, since_ns: int, until_ns: int) -> int:
    """Nanoseconds of the window that lie in any of the spans."""
    low, high = union(np.clip(start, since_ns, until_ns).astype(np.int64), np.clip(end, since_ns, until_ns))
    return int((high - low).sum())


def _kernel_share(sampled: Ints, busy_ns: Ints, step: Ints, forward_ns: Ints) -> float | None:
    """Kernel time over forward time, of the steps that were sampled."""
    known = np.isin(sampled, step)
    total = float(forward_ns[np.isin(step, sampled[known])].sum())
    return float(busy_ns[known].sum()) / total if total > 0 else None
