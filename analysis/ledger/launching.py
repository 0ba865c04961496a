"""How long forwards may have waited, kernel by kernel, for the host that was still launching them; or did.

A forward that is one graph is launched at once. One that is launched kernel by kernel is done by the device as fast as
the host launches, where that is slower: the gaps are inside the forward, where no mark is. What of it passed before the
host had launched it all is an upper bound of them (``exposed``). Where that is nearly all of it, the device kept up with
its host, and waited for as long as its kernels did not run: so long as they do on average where they were sampled, in
forwards of the same kind. A profiler makes launches slower and kernels not, so their time is carried over, not a share.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gapmeter.analysis.arrays import Bools, Floats, Ints
from gapmeter.analysis.ledger.critical_path import covered, union
from gapmeter.analysis.ledger.trace import MISSING, Trace
from gapmeter.records import EntryFlag, Span

_LAUNCHING = 0.9  # of a forward that waits for its host, the least part in which the host still launches


@dataclass(frozen=True, slots=True)
class Forwards:
    """A row a forward that a device timed: its step, start and end, and ``exposed_ns`` of it.

    ``busy_ns``: how long kernels ran in it, -1 where they were not sampled throughout.
    """

    step: Ints
    start: Ints
    end: Ints
    exposed_ns: Ints
    busy_ns: Ints


def timed_forwards(trace: Trace) -> Forwards:
    """Of all steps, in the order of their start."""
    spans = trace.step_spans
    forward = spans[(spans["code"] == Span.FORWARD) & (spans["n"] == 1)]
    launch = spans[spans["code"] == Span.HOST_LAUNCH]
    launch = launch[np.argsort(launch["step"], kind="stable")]
    forward = forward[np.isin(forward["step"], launch["step"])]
    start, end = forward["start"].astype(np.int64), forward["end"].astype(np.int64)
    ended = launch["end"][np.searchsorted(launch["step"], forward["step"])]
    busy_ns = np.zeros(len(forward), np.int64)
    for name, spans in trace.process_spans.items():
        kernels = spans[spans["code"] == Span.KERNELS]
        pid = name.rpartition("-")[2]  # "None" of a process that never said which it is
        mine = trace.belong_to(forward["step"], int(pid) if pid.isdecimal() else MISSING)
        ran_ns = covered(start, end, *union(kernels["start_ns"], kernels["end_ns"]))
        busy_ns = np.maximum(busy_ns, ran_ns * mine)  # of several ranks the busiest
    sampled = np.zeros(len(forward), dtype=np.bool_)
    for note in trace.notes:
        if note.get("type") == "kernels" and note.get("kernels"):
            sampled |= (start >= note["start_ns"]) & (end <= note["end_ns"])
    return Forwards(
        step=forward["step"].astype(np.int64),
        start=start,
        end=end,
        exposed_ns=np.clip(np.minimum(ended, end) - start, 0, None),
        busy_ns=np.where(sampled, busy_ns, -1),
    )


def launch_waits(trace: Trace) -> tuple[Ints, Floats] | None:
    """Steps, and how long each's forward is estimated to have waited for launches, ns; None without sampled kernels."""
    found = timed_forwards(trace)
    sampled = found.busy_ns >= 0
    if not sampled.any():
        return None
    entries = trace.entries
    prompts = np.isin(found.step, entries["step"][(entries["flags"] & EntryFlag.PROMPT) != 0])
    busy = found.busy_ns.astype(np.float64)
    for kind in (prompts, ~prompts):
        alike = sampled & kind if (sampled & kind).any() else sampled
        busy[kind & ~sampled] = found.busy_ns[alike].mean()
    waits = np.where(host_bound(found), np.clip(found.end - found.start - busy, 0, found.exposed_ns), 0.0)
    order = np.argsort(found.step, kind="stable")
    return found.step[order], waits[order]


def host_bound(found: Forwards) -> Bools:
    """Which forwards the device ended as soon as they had been launched."""
    return found.exposed_ns >= _LAUNCHING * (found.end - found.start)
