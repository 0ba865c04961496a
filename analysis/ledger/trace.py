"""What every server process recorded, as one trace keyed by the client's requests and the engine's steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from gapmeter.analysis.arrays import AnyArray, Bools, Floats, Ints, distinct
from gapmeter.analysis.ledger.cores import NOTHING_KNOWN, CoreUse
from gapmeter.analysis.ledger.critical_path import covered
from gapmeter.records import EntryFlag, Span
from gapmeter.records.reader import ENTRY_DTYPE, Table


def _dtype(numbers: str, times: str = "") -> np.dtype[Any]:
    """A run has millions of these rows, so numbers are narrow."""
    fields = [(name, "<i4") for name in numbers.split()] + [(name, "<i8") for name in times.split()]
    return np.dtype(fields, align=True)


REQUEST_SPAN = _dtype("request process", "n queued start end")  # n may be a time as well
STEP_SPAN = _dtype("step code", "n start end")
_OF_FILE = {"step": "cached", "request": "ref", "tokens": "tokens", "before": "before", "flags": "flags"}
_LAYOUT: Mapping[str, Any] = ENTRY_DTYPE.fields or {}
_OFFSETS = [_LAYOUT[name][1] for name in _OF_FILE.values()]  # it lies in the file's own table
ENTRY = np.dtype({"names": [*_OF_FILE], "formats": ["<i4"] * len(_OFFSETS), "offsets": _OFFSETS})
EMISSION = _dtype("step request n")

MISSING = -1
MOST_TOKENS = np.int64(1) << 40  # more tokens than any request has
FIRST_STEP_CODE, FIRST_PROCESS_CODE = 100, 200
_ENTRIES = 1_000_000  # that are added up at once


def filled(values: Ints, otherwise: Ints | int) -> Ints:
    """The values; where one is MISSING, ``otherwise``."""
    return np.where(values == MISSING, otherwise, values)


def engines_of(steps: Ints, engine_steps: Sequence[int]) -> Ints:
    """The place of each step's engine, by the last step of each; beyond these it is the last engine's."""
    return np.searchsorted(engine_steps[:-1], steps)


def as_key(request: Ints, n: Ints | int) -> Ints:
    """Requests, and of each one of its tokens, its steps or its moments, as one number each: in the order of both."""
    return np.asarray(request * MOST_TOKENS + n, np.int64)


def from_key(key: Ints) -> tuple[Ints, Ints]:
    """What ``as_key`` was given."""
    return np.divmod(key, MOST_TOKENS)


@dataclass(frozen=True)
class Trace:
    """What the server's processes stamped. ``request`` is a row number of the client's table, -1 for a stranger.

    ``request_spans`` by what they time, each kind's in the order of requests and tokens; ``emissions`` the same, ``n``
    the tokens so far; both as far as tokens were asked for. The further choices of one request (n > 1, a list of
    prompts) are requests of their own: the numbers behind the table's last row, whose row is in ``choices``.
    ``step`` counts through all engines of the server: ``engine_steps`` has each one's last. Of an engine's ranks the
    one that answers it tells the steps; ``ranks_apart_ns`` is how far apart they began a step's forward.

    All times are CLOCK_MONOTONIC ns. ``unmeasured``: the stages that a probe said it could not stamp.
    """

    request_spans: Mapping[int, Table]
    step_spans: Table
    process_spans: Mapping[tuple[str, int], Table]  # by role and process id
    steps: Table
    entries: Table
    emissions: Table
    unmeasured: frozenset[str]
    notes: list[dict[str, Any]]
    problems: tuple[str, ...] = ()
    incomplete: tuple[str, ...] = ()
    cores: CoreUse = NOTHING_KNOWN
    choices: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    engine_steps: tuple[int, ...] = ()
    engine_of: Mapping[int, int] = field(default_factory=dict)  # by process id, its engine's place among those
    ranks_apart_ns: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    drifts: tuple[float, ...] = ()  # of each device's clock against the host's, a fraction of 1
    least: tuple[Ints, Floats] | None = None  # steps, and the least that their device needs for a forward, ns

    @property
    def has_api(self) -> bool:
        return bool(self.request_spans.keys() & {Span.INGRESS, Span.EGRESS})

    @property
    def has_engine(self) -> bool:
        return len(self.steps) > 0

    @property
    def on_device(self) -> bool:
        """Whether a device computes the forwards: it goes on while the host's thread has no core."""
        return bool(self.spans_of(Span.FORWARD)["n"].any() or len(self.spans_of(Span.HOST_LAUNCH)))

    @property
    def logits_in_sampling(self) -> bool:
        """Whether the device makes the logits in its sampling, as vLLM's Model Runner V2 does."""
        return self.on_device and any(note.get("model_runner") == 2 for note in self.notes)

    @property
    def untimed_steps(self) -> Ints:
        """Steps that were put on a device, and of which it is not known when it computed them."""
        launched = distinct(self.spans_of(Span.HOST_LAUNCH)["step"])
        return launched[~np.isin(launched, self.spans_of(Span.FORWARD)["step"])]

    def without_tokens(self) -> Trace:
        """What is asked once the ledgers are made: without what is there for every token, or that only they need."""
        spans = {code: spans[:0].copy() for code, spans in self.request_spans.items()}
        prompts = self.entries[(self.entries["flags"] & EntryFlag.PROMPT) != 0]
        emissions = self.emissions[:0].copy()
        cores = replace(self.cores, of={})
        return replace(self, request_spans=spans, entries=prompts, emissions=emissions, cores=cores)

    def spans_of(self, code: Span) -> Table:
        """Those of ``step_spans`` that time one thing."""
        spans: Table = self.step_spans[self.step_spans["code"] == code]
        return spans

    def within_steps(self, code: Span, steps: Ints) -> tuple[Table, Ints]:
        """``spans_of`` the given steps (in order), and the place of each one's step among these."""
        spans = self.spans_of(code)
        spans = spans[np.isin(spans["step"], steps)]
        return spans, np.searchsorted(steps, spans["step"])

    def belong_to(self, steps: Ints, process: int) -> Bools:
        """Which steps are those of a process's engine; all of them where that is not known."""
        if process not in self.engine_of:
            return np.ones(len(steps), np.bool_)
        return np.asarray(engines_of(steps, self.engine_steps) == self.engine_of[process])

    def by_engine(self) -> list[Table]:
        """``step_spans``, apart for each engine: they compute side by side."""
        if len(self.engine_steps) < 2:
            return [self.step_spans]
        engine = engines_of(self.step_spans["step"], self.engine_steps)
        return [self.step_spans[engine == one] for one in range(len(self.engine_steps))]

    @cached_property
    def step_loads(self) -> pd.DataFrame:
        """A row a step that ran tokens, by ``step``: what was in it. Made once, for all who ask.

        ``start_ns`` and ``forward_ns`` are its forward's, 0 where that was not stamped; what its thread waited for a
        core meanwhile is no part of it. ``decoding`` and ``prompts``: how many sequences of each kind;
        ``decode_tokens`` and ``prompt_tokens``: theirs; ``kv_tokens``: what the decoding ones attend to. ``graph``: how
        it was launched, 0 where not as a captured graph.
        """
        seqs = distinct(self.entries["step"][self.entries["tokens"] > 0])
        (forwards, of_step), (launched, of_launch) = (
            self.within_steps(code, seqs) for code in (Span.FORWARD, Span.INPUT_PREP)
        )
        start_ns, graph = np.zeros(len(seqs), np.int64), np.zeros(len(seqs), np.int64)
        start_ns[of_step], graph[of_launch] = forwards["start"], launched["n"] >> 30
        lasted_ns = forwards["end"] - forwards["start"]
        if not self.on_device:
            for (kind, pid), waits in self.cores.of.items():
                if kind == "forward":
                    own = waits.near(forwards["start"], forwards["end"])
                    kept_ns = covered(forwards["start"], forwards["end"], own.start, own.end)
                    lasted_ns = lasted_ns - kept_ns * self.belong_to(forwards["step"], pid)

        def load(entries: Table) -> dict[str, AnyArray]:
            tokens, prompt = entries["tokens"], (entries["flags"] & EntryFlag.PROMPT) != 0
            return {
                "decoding": ~prompt,
                "prompts": prompt,
                "decode_tokens": tokens * ~prompt,
                "prompt_tokens": tokens * prompt,
                "kv_tokens": (entries["before"] + tokens) * ~prompt,
            }

        forward_ns = np.bincount(of_step, lasted_ns, len(seqs)).astype(np.float64)
        about: dict[str, AnyArray] = {"step": seqs, "start_ns": start_ns, "forward_ns": forward_ns, "graph": graph}
        return pd.DataFrame(about | self.step_sums(seqs, load))

    def step_sums(self, steps: Ints, of: Callable[[Table], Mapping[str, AnyArray]]) -> dict[str, Floats]:
        """What ``of`` says of entries, added up for each of the steps that ran tokens (all of them, in order).

        Some entries at a time: there is one for each token of a run.
        """
        sums = defaultdict[str, Floats](lambda: np.zeros(len(steps)))
        for low in range(0, max(len(self.entries), 1), _ENTRIES):
            entries = self.entries[low : low + _ENTRIES]
            entries = entries[entries["tokens"] > 0]
            at = np.searchsorted(steps, entries["step"])
            for name, values in of(entries).items():
                sums[name] += np.bincount(at, values, len(steps))
        return sums
