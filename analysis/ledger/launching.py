"""How long forwards waited, kernel by kernel, for the host that was still launching them.

A forward that is one graph begins when it has been launched: until then an idle device waits. One that is launched
kernel by kernel is done by the device as fast as the host launches, where that is slower: the gaps are inside the
forward, where no mark is. What of it passed before the host had launched it all is an upper bound of them
(``exposed``). Where that is nearly all of it, the device kept up with its host: no faster device would have ended it
sooner, so the time is the host's, but for what kernels ran in it. Where they were sampled, forwards of the same kind
tell how long that is on average (a profiler makes launches slower and kernels not, so their time is carried over, not a
share); where they were not, it is at least what the step's bytes and operations need at the device's peaks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gapmeter.analysis.arrays import Bools, Floats, Ints, places
from gapmeter.analysis.ledger.critical_path import covered, union
from gapmeter.analysis.ledger.trace import Trace
from gapmeter.records import EntryFlag, Span

_WHOLE_GRAPH = 2  # the two highest bits of INPUT_PREP's n; 3 is one in pieces
_LAUNCHING = 0.9  # of a forward that waits for its host, the least part in which the host still launches


@dataclass(frozen=True, slots=True)
class Forwards:
    """A row a forward that a device timed: its step, start and end, and ``exposed_ns`` of it.

    ``busy_ns``: how long kernels ran in it, -1 where they were not sampled throughout. ``least_ns``: how long at least,
    0 where that is not known. ``graph``: it was one launch. ``prompts``: it computed some, maybe beside others' tokens.
    """

    step: Ints
    start: Ints
    end: Ints
    exposed_ns: Ints
    busy_ns: Ints
    least_ns: Floats
    graph: Bools
    prompts: Bools


def timed_forwards(trace: Trace) -> Forwards:
    """Of all steps, in the order of their start."""
    forward, launch = trace.spans_of(Span.FORWARD), trace.spans_of(Span.HOST_LAUNCH)
    forward = forward[forward["n"] == 1]
    launch = launch[np.argsort(launch["step"], kind="stable")]
    forward = forward[np.isin(forward["step"], launch["step"])]
    start, end = forward["start"].astype(np.int64), forward["end"].astype(np.int64)
    launch = launch[np.searchsorted(launch["step"], forward["step"])]
    busy_ns, sampled = np.zeros(len(forward), np.int64), np.zeros(len(forward), np.bool_)
    windows = [note for note in trace.notes if note.get("type") == "kernels" and note.get("kernels")]
    for (_, pid), spans in trace.process_spans.items():
        kernels = spans[spans["code"] == Span.KERNELS]
        mine = trace.belong_to(forward["step"], pid)
        for window in windows:
            if window.get("pid", pid) == pid:
                sampled |= mine & (start >= window["start_ns"]) & (end <= window["end_ns"])
        ran_ns = covered(start, end, *union(kernels["start_ns"], kernels["end_ns"]))
        busy_ns = np.maximum(busy_ns, ran_ns * mine)  # of several ranks the busiest
    prepared = trace.spans_of(Span.INPUT_PREP)
    graph = np.isin(forward["step"], prepared["step"][prepared["n"] >> 30 == _WHOLE_GRAPH])
    prompts = trace.entries["step"][(trace.entries["flags"] & EntryFlag.PROMPT) != 0]
    called = launch["start"] + launch["n"]  # when the graph had been launched, where that is told; logits may follow
    ended = np.where(graph & (launch["n"] > 0), called, launch["end"])
    steps, least_ns = trace.least or (np.empty(0, np.int64), np.empty(0))
    return Forwards(
        step=forward["step"].astype(np.int64),
        start=start,
        end=end,
        exposed_ns=np.clip(np.minimum(ended, end) - start, 0, None),
        busy_ns=np.where(sampled, busy_ns, -1),
        least_ns=np.append(least_ns, 0.0)[places(steps, forward["step"])],
        graph=graph,
        prompts=np.isin(forward["step"], prompts),
    )


def launch_waits(trace: Trace) -> tuple[Ints, Floats]:
    """Steps, and how long each's forward waited for launches, ns: at most so long where no kernels were sampled."""
    found = timed_forwards(trace)
    busy = np.maximum(busy_of(found), found.least_ns)
    gaps = np.where(host_bound(found), np.clip(found.end - found.start - busy, 0, found.exposed_ns), 0.0)
    waits = np.where(found.graph, found.exposed_ns, gaps)
    order = np.argsort(found.step, kind="stable")
    return found.step[order], waits[order]


def busy_of(found: Forwards) -> Floats:
    """How long kernels ran in each forward, ns: where it was not sampled the mean of its kind, -1 where none of it was.

    A forward with a prompt takes at least as long as those without.
    """
    sampled, prompts = found.busy_ns >= 0, found.prompts
    busy = found.busy_ns.astype(np.float64)
    for kind in (prompts, ~prompts):
        for alike in (sampled & kind, sampled & ~prompts):
            if alike.any():
                busy[kind & ~sampled] = found.busy_ns[alike].mean()
                break
    return np.minimum(busy, (found.end - found.start).astype(np.float64))


def host_bound(found: Forwards) -> Bools:
    """Which forwards of many launches the device ended as soon as they had been launched."""
    return ~found.graph & (found.exposed_ns >= _LAUNCHING * (found.end - found.start))
