"""Where on the host's clock the device was in each step: its own times, placed between the anchors around them.

A probe keeps a device's marks as nanoseconds of the device's clock since an anchor, and of each anchor the host's time
give or take half a width (gapmeter_probe.device). The anchors of a process are one line of device time; between two of
them the clocks are taken to drift evenly, before the first and after the last as between the nearest two. A mark
between two anchors is then at most the larger of their half widths off, beyond them by more the farther it lies, and
what a drift that changes within seconds adds to it.

The parts of a step tile its stay on the device: input kernels, forward, sampling, copy. Where the device comes to the
marks of the inputs before the host has launched the forward, it waits for that: until then it is the host's time. The
same holds between the forward and the host's call that samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gapmeter_probe.records import DEVICE_PARTS
from numpy.typing import NDArray

from gapmeter.analysis.arrays import Bools, Floats, Ints, places
from gapmeter.analysis.ledger.trace import STEP_SPAN
from gapmeter.records import RecordFile, Span
from gapmeter.records.reader import Table

_UNKNOWN = np.iinfo(np.int64).min
_DRIFT = 1e-4  # by which two clocks may drift apart, where a single anchor does not tell
_WIDE = 4  # anchors this much wider than the narrowest fifth place nothing: what is between narrow ones is known better
DEVICE_WORK = (Span.DEVICE_INPUT, Span.FORWARD, Span.DEVICE_SAMPLING, Span.DEVICE_COPY)


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
    return _parts(rows["seq"].astype(np.int64), host, at, width, _sampling_began(samplings, rows["seq"]))


def _sampling_began(spans: Table, seqs: NDArray[Any]) -> Ints:
    """When the host began to sample each step; unknown where it did not say."""
    order = np.argsort(spans["ref"], kind="stable")
    return np.append(spans["start_ns"][order], _UNKNOWN)[places(spans["ref"][order], seqs)]


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
