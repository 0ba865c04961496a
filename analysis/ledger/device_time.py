"""Where on the host's clock the device was in each step, by its own times, and how long it waited there for launches.

Its times are placed between the anchors around them. A probe keeps a device's marks as nanoseconds of the device's
clock since an anchor, and of each anchor the host's time give or take half a width (gapmeter_probe.device). The anchors
of a process are one line of device time; between two of them the clocks are taken to drift evenly, before the first and
after the last as between the nearest two. A mark between two anchors is then at most the larger of their half widths
off, beyond them by more the farther it lies, and what a drift that changes within seconds adds to it.

The parts of a step tile its stay on the device: input kernels, forward, sampling, copy. Where the device comes to the
marks of the inputs before the host has launched the forward, it waits for that: until then it is the host's time. The
same holds between the forward and the host's call that samples.

A forward that is one graph begins when it has been launched: until then an idle device waits. One that is launched
kernel by kernel is done by the device as fast as the host launches, where that is slower: the gaps are inside the
forward, where no mark is. What of it passed before the host had launched it all is an upper bound of them
(``exposed``). Where that is nearly all of it, the device kept up with its host: no faster device would have ended it
sooner, so the time is the host's, but for what kernels ran in it. Where they were sampled, forwards of the same kind
tell how long that is on average (a profiler makes launches slower and kernels not, so their time is carried over, not a
share); where they were not, it is at least what the step's bytes and operations need at the device's peaks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gapmeter_probe.records import DEVICE_PARTS

from gapmeter.analysis.arrays import Bools, Floats, Ints, distinct, places
from gapmeter.analysis.ledger.critical_path import covered, union
from gapmeter.analysis.ledger.trace import STEP_SPAN, Trace
from gapmeter.records import EntryFlag, RecordFile, Span
from gapmeter.records.reader import Table

_UNKNOWN = np.iinfo(np.int64).min
_DRIFT = 1e-4  # by which two clocks may drift apart, where a single anchor does not tell
_WIDE = 4  # anchors this much wider than the narrowest fifth place nothing: what is between narrow ones is known better
DEVICE_WORK = (Span.DEVICE_INPUT, Span.FORWARD, Span.DEVICE_SAMPLING, Span.DEVICE_COPY)
_WHOLE_GRAPH = 2  # the two highest bits of INPUT_PREP's n; 3 is one in pieces
_LAUNCHING = 0.9  # of a forward that waits for its host, the least part in which the host still launches


@dataclass(frozen=True, slots=True)
class Anchors:
    """The host's time (ns since ``origin_ns``) at points of the device's, in order, and how wrong each may be.

    ``before``: the device's time at each anchor number, also of those that place nothing.
    """

    origin_ns: int
    device: Floats
    host: Floats
    half_width: Floats
    before: Mapping[int, float]

    @property
    def drift(self) -> float | None:
        """How much faster the host's clock runs than the device's, from the first anchor to the last: a fraction of 1.

        None with fewer than two anchors.
        """
        if len(self.device) < 2:
            return None
        return float((self.host[-1] - self.host[0]) / (self.device[-1] - self.device[0])) - 1

    def place(self, at: Floats) -> tuple[Ints, Ints]:
        """Device times as host stamps, and half the width to which each is known."""
        right = np.clip(np.searchsorted(self.device, at), 1, max(len(self.device) - 1, 1))
        left = right - 1
        right = np.minimum(right, len(self.device) - 1)
        across = self.device[right] - self.device[left]
        slope = np.where(across > 0, (self.host[right] - self.host[left]) / np.maximum(across, 1), 1.0)
        host = self.host[left] + (at - self.device[left]) * slope
        width = np.maximum(self.half_width[left], self.half_width[right])
        beyond = np.maximum(np.maximum(at - self.device[right], self.device[left] - at), 0)
        width = width * (1 + 2 * beyond / np.maximum(across, 1)) if len(self.device) > 1 else width + _DRIFT * beyond
        return np.round(host).astype(np.int64) + self.origin_ns, np.ceil(width).astype(np.int64)


def anchors_of(notes: Sequence[Mapping[str, Any]]) -> Anchors | None:
    """From a process's JSON records; None where it has none."""
    found = sorted((note for note in notes if note.get("type") == "anchor"), key=lambda note: int(note["number"]))
    if not found:
        return None
    device = np.cumsum([float(note["since_ns"]) for note in found])
    width = np.array([float(note["half_width_ns"]) for note in found])
    origin = int(found[0]["host_ns"])
    host = np.array([int(note["host_ns"]) - origin for note in found], dtype=np.float64)
    kept = width <= _WIDE * np.quantile(width, 0.2)
    before = {int(note["number"]): at for note, at in zip(found, device.tolist(), strict=True)}
    return Anchors(origin, device[kept], host[kept], width[kept], before)


def device_spans(file: RecordFile, samplings: Table) -> Table:
    """What the device did for each step, by its own marks; none without a device. ``samplings``: the host's.

    FORWARD has n = 1, DEVICE_STEP half its width in ns. A step that lacks a mark at which its forward begins or ends
    is left out: it is unmeasured.
    """
    anchors = anchors_of(file.notes)
    rows = file.device
    if anchors is None or not len(rows):
        return np.empty(0, STEP_SPAN)
    rows = rows[np.isin(rows["anchor"], list(anchors.before))]
    base = np.array([anchors.before[number] for number in rows["anchor"].tolist()])
    host, at = {}, {}
    width = np.zeros(len(rows), np.int64)
    for part in DEVICE_PARTS:
        host[part] = rows[f"{part}_host_ns"].astype(np.int64)
        placed, half = anchors.place(base + rows[f"{part}_device_ns"])
        at[part] = np.where(host[part] > 0, placed, _UNKNOWN)
        width = np.maximum(width, np.where(host[part] > 0, half, 0))
    samplings = samplings[np.argsort(samplings["ref"], kind="stable")]
    began = np.append(samplings["start_ns"], _UNKNOWN)[places(samplings["ref"], rows["seq"])]
    return _parts(rows["seq"].astype(np.int64), host, at, width, began)


def _parts(step: Ints, host: Mapping[str, Ints], at: Mapping[str, Ints], width: Ints, sampling: Ints) -> Table:
    forward = at["forward"]
    computed = _first_known(at["forward_end"], at["sampled"], at["copied"])
    known = (forward != _UNKNOWN) & (computed != _UNKNOWN)
    begun = _first_known(at["input"], forward)
    last = np.maximum.reduce([computed, at["sampled"], at["copied"]])
    sampled = np.where(at["forward_end"] != _UNKNOWN, at["sampled"], _UNKNOWN)
    until_sampled = np.maximum(computed, sampled)
    is_sampled, is_copied = known & (sampled != _UNKNOWN), known & (at["copied"] != _UNKNOWN)
    one, none = np.ones(len(step), np.int64), np.zeros(len(step), np.int64)
    launched = np.maximum(begun, np.minimum(host["forward"], forward))
    asked = np.maximum(computed, np.minimum(sampling, sampled))
    spans: tuple[tuple[Span, Ints, Ints, Ints, Bools], ...] = (
        (Span.DEVICE_STEP, width, begun, last, known),
        (Span.DEVICE_INPUT, none, launched, forward, known),
        (Span.FORWARD, one, forward, computed, known),
        (Span.DEVICE_SAMPLING, none, asked, sampled, is_sampled),
        (Span.DEVICE_COPY, none, np.minimum(until_sampled, at["copied"]), at["copied"], is_copied),
    )
    parts = []
    for code, n, start, end, kept in spans:
        rows = np.empty(int(kept.sum()), STEP_SPAN)
        rows["step"], rows["code"], rows["n"] = step[kept], code, n[kept]
        rows["start"], rows["end"] = start[kept], end[kept]
        parts.append(rows)
    return np.concatenate(parts)


def _first_known(*choices: Ints) -> Ints:
    """Of each, the first that is known."""
    return np.select([choice != _UNKNOWN for choice in choices], choices, _UNKNOWN)


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


def beside(rows: Table, window: tuple[int, int]) -> Table:
    """The spans that lie in the window (ns), or reach into it."""
    return rows[(rows["end"] > window[0]) & (rows["start"] < window[1])]


def launched_in(trace: Trace, window: tuple[int, int]) -> tuple[Ints, Ints]:
    """Steps that were put on a device in the window, and those of them of which it told no times."""
    launched = distinct(beside(trace.spans_of(Span.HOST_LAUNCH), window)["step"])
    return launched, launched[np.isin(launched, trace.untimed_steps)]


def forwards_and_window(trace: Trace, window: tuple[int, int]) -> tuple[Forwards, Bools]:
    """All forwards that were timed, and which of them are of steps at which a device was in the window."""
    found = timed_forwards(trace)
    return found, np.isin(found.step, beside(trace.spans_of(Span.DEVICE_STEP), window)["step"])


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
