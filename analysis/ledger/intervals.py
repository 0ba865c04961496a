"""From stamps to activities: for each event of the ledger, what was going on, when, and of which class.

``CLASSES`` are in the order in which overlapping ones own time. Scheduler states come first (they hold only before the
first scheduling and while preempted); then own forward, own input preparation and sampling, another's step, code inside
a process, executor messages, the engine loop's own time, and last the stretches between two causally adjacent stamps of
different processes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gapmeter.analysis.arrays import Bools, Ints, each_of
from gapmeter.analysis.ledger.critical_path import Intervals
from gapmeter.analysis.ledger.trace import FAR, MISSING, Events, Index, Trace
from gapmeter.records import CoreThread, EntryFlag, Span


@dataclass(frozen=True, slots=True)
class Class:
    """A priority class: the stage that its time belongs to, and whether it is transit."""

    name: str
    stage: str
    transit: bool = False


_WORK: tuple[Class, ...] = (
    Class("queue", "queue"),
    Class("preempted", "preempted"),
    Class("engine_wait", "engine_wait"),
    Class("prefill", "prefill"),
    Class("decode", "decode"),
    Class("input_prep", "input_prep"),
    Class("sampling", "sampling"),
    Class("other_step", "other_step"),
    Class("template", "template"),
    Class("tokenize", "tokenize"),
    Class("pool_core_wait", "core_wait"),
    Class("template_wait", "template", transit=True),
    Class("tokenize_wait", "tokenize", transit=True),
    Class("detokenize", "detokenize"),
    Class("engine_code", "scheduling"),
    Class("handoff", "handoff"),
    Class("output", "output"),
    Class("ingress", "ingress"),
    Class("egress", "egress"),
    Class("connect", "connect"),
    Class("generator_lag", "generator_lag"),
    Class("retry", "retry"),
    Class("worker", "scheduling"),
    Class("executor", "scheduling", transit=True),
    Class("loop", "scheduling"),
    Class("core_wait", "core_wait"),
    Class("accept_wait", "accept_wait"),
    Class("output_loop", "output"),
    Class("handoff_transit", "handoff", transit=True),
    Class("output_transit", "output", transit=True),
    Class("network_in", "network_in", transit=True),
    Class("network_out", "network_out", transit=True),
)
# Whose core a class of activity needs: what it waited for that thread's core, put off it, is no time of its stage.
_BY_THREAD = {
    "engine": "engine_wait prefill decode input_prep sampling other_step engine_code worker executor loop",
    "pool": "template tokenize",
    "loop": "detokenize ingress egress accept_wait output_loop",
}
THREADS: dict[str, str] = {name: thread for thread, names in _BY_THREAD.items() for name in names.split()}
# Which thread should take what lies between two processes' or threads' stamps.
WOKEN: dict[str, str] = {
    "network_in": "loop woken",
    "output_transit": "loop woken",
    "handoff_transit": "engine woken",
}
# Its wait for a core comes directly before each class that has a thread.
CLASSES: tuple[Class, ...] = tuple(
    part
    for work in _WORK
    for part in ((Class(f"{work.name}_core", "core_wait"), work) if work.name in {**THREADS, **WOKEN} else (work,))
)
CLASS = {c.name: number for number, c in enumerate(CLASSES)}
# Stretches between two processes' or threads' stamps, whose core those who receive there may have had to wait for.
CORE_WAITS: dict[str, tuple[str, tuple[CoreThread, ...]]] = {
    "network_in": ("core_wait", (CoreThread.LOOP,)),
    "template_wait": ("pool_core_wait", (CoreThread.POOL, CoreThread.LOOP)),
    "tokenize_wait": ("pool_core_wait", (CoreThread.POOL, CoreThread.LOOP)),
    "handoff_transit": ("core_wait", (CoreThread.INPUT,)),
    "output_transit": ("core_wait", (CoreThread.OUTPUT, CoreThread.LOOP)),
}
# Such stretches that end when the API server's event loop looks, and what it is when the loop worked for others then.
LOOP_WAITS = {"network_in": "accept_wait", "output_transit": "output_loop"}
DEVICE_CLASSES = frozenset({"prefill", "decode", "other_step"})
FORWARD_CLASSES = np.array([CLASS["prefill"], CLASS["decode"]])
HOST_CLASSES = np.array([CLASS["engine_code"], CLASS["input_prep"], CLASS["sampling"], CLASS["output"]])


@dataclass(frozen=True, slots=True)
class Client:
    """The client's stamps, one element a row of its table; ``MISSING`` where there is none.

    ``first_due``: when the first attempt was due, where earlier ones had failed; ``due`` is the attempt's own.
    """

    due: Ints
    connect_start: Ints
    connect_end: Ints
    write: Ints
    sent: Ints
    first_due: Ints | None = None


@dataclass(frozen=True, slots=True)
class Causes:
    """For each event, the stamps on its way: what the checks and the table need besides the intervals."""

    intervals: Intervals
    joined: Bools  # every process that recorded knows the request, and the token's step was found
    first_seq: Ints  # the steps behind the event, by sequence number; MISSING where unknown
    last_seq: Ints
    gaps: dict[str, Ints]  # causal pairs: later minus earlier stamp, MISSING pairs left out


def build(trace: Trace | None, client: Client, events: Events, dropped: frozenset[str]) -> Causes:
    """All activities that led to the events, as intervals within each event's window.

    ``dropped`` names the classes that may not own time because a stage inside them could not be stamped.
    """
    maker = _Maker(trace, client, events)
    maker.client_side()
    if trace is not None:
        maker.api_side()
        if trace.has_engine:
            maker.engine_waits()
            maker.engine_steps()
        for name, (cls, threads) in CORE_WAITS.items():
            maker.divide(name, cls, *trace.core_waits(threads))
        for name, cls in LOOP_WAITS.items():
            maker.divide(name, cls, *trace.loop_work())
        for name, thread in (THREADS | WOKEN).items():
            if trace.cores is not None and not (trace.on_device and name in DEVICE_CLASSES):
                maker.divide(name, f"{name}_core", *trace.cores.waits[thread].whole())
    parts = [part for name, part in maker.parts if name not in dropped]
    whole = Intervals.join(parts).clip(events.start, events.end)
    return Causes(whole, maker.joined, maker.seq_of(maker.low), maker.seq_of(maker.step), maker.gaps)


class _Maker:
    """Collects the intervals of one set of events; each method adds one part of the way."""

    def __init__(self, trace: Trace | None, client: Client, events: Events) -> None:
        self.client, self.events, self.trace = client, events, trace
        self.parts: list[tuple[str, Intervals]] = []
        self.gaps: dict[str, Ints] = {}
        self.joined = np.ones(len(events), dtype=np.bool_)
        self.low = self.step = np.full(len(events), MISSING)
        self.all = np.arange(len(events))
        if trace is not None:
            self.index = Index(trace, len(client.due))
            self.ingress = self.index.of_request(Span.INGRESS)[events.request]
            self.receive = self.index.of_token(Span.OUTPUT_RECEIVE, events)
            self.detokenize = self.index.of_token(Span.DETOKENIZE, events)
            self.egress = self.index.of_token(Span.EGRESS, events)

    def add(self, name: str, start: Ints, end: Ints, event: Ints | None = None) -> None:
        """Rows of one class; a row with a missing end or start is left out."""
        event = self.all if event is None else event
        kept = (start != MISSING) & (end != MISSING) & (end > start)
        cls = np.full(int(kept.sum()), CLASS[name])
        self.parts.append((name, Intervals(event[kept], start[kept], end[kept], cls)))

    def divide(self, name: str, cls: str, start: Ints, end: Ints) -> None:
        """Give what of a class's rows lies in these stretches to another class."""
        self.parts += [(cls, part.within(start, end, CLASS[cls])) for own, part in self.parts if own == name]

    def causal(self, name: str, earlier: Ints, later: Ints) -> None:
        """Note how far apart two stamps are that cannot be the other way round."""
        both = (earlier != MISSING) & (later != MISSING)
        self.gaps[name] = (later - earlier)[both]

    def seq_of(self, position: Ints) -> Ints:
        """Sequence numbers of steps given by position."""
        if self.trace is None or not len(self.index.seqs):
            return position
        return np.where(position == MISSING, MISSING, self.index.seqs[np.minimum(position, len(self.index.seqs) - 1)])

    def client_side(self) -> None:
        c, who = self.client, self.events.request
        due, write, sent = c.due[who], c.write[who], c.sent[who]
        opened = (c.connect_start[who] != MISSING) & (c.connect_end[who] > due)
        if self.trace is not None:
            seen = self.ingress["start"]
            sent = np.where((seen != MISSING) & (seen < sent), np.maximum(seen, write), sent)
            self.causal("write → server", write, seen)
            self.add("network_in", sent, seen)
        connect_start, connect_end = (np.where(opened, at[who], MISSING) for at in (c.connect_start, c.connect_end))
        self.add("connect", connect_start, connect_end)
        if c.first_due is not None:
            self.add("retry", c.first_due[who], due)
        self.add("generator_lag", due, np.where(opened, connect_start, sent))
        self.add("generator_lag", connect_end, np.where(opened, sent, MISSING))

    def api_side(self) -> None:
        self.joined &= self.ingress["start"] != MISSING
        self.add("ingress", self.ingress["start"], self.ingress["end"])
        for name, code in (("template", Span.TEMPLATE), ("tokenize", Span.TOKENIZE)):
            span = self.index.of_request(code)[self.events.request]
            self.add(f"{name}_wait", span["queued"], span["start"])
            self.add(name, span["start"], span["end"])
        self.arrived = np.where(self.receive["start"] != MISSING, self.receive["start"], self.detokenize["queued"])
        self.add("output", self.receive["start"], self.receive["end"])
        self.add("detokenize", self.detokenize["queued"], self.detokenize["end"])
        written = np.minimum(self.egress["end"], self.events.end)
        self.add("egress", self.detokenize["end"], written)
        self.add("network_out", written, self.events.end)
        self.causal("write → client", self.egress["start"], self.events.end)
        self.causal("detokenize → egress", self.detokenize["end"], self.egress["end"])
        self.joined &= self.egress["start"] != MISSING

    def engine_waits(self) -> None:
        """From the hand-over to the first scheduling, and while preempted: the scheduler's state decides."""
        who, index = self.events.request, self.index
        hand, receive, add = (index.of_request(code)[who] for code in (Span.HANDOFF, Span.CORE_RECEIVE, Span.CORE_ADD))
        handed = np.where(receive["start"] != MISSING, np.minimum(hand["end"], receive["start"]), hand["end"])
        self.add("handoff", hand["start"], handed)
        self.add("handoff_transit", hand["start"], receive["start"])
        taken = add["start"] != MISSING  # the engine may take it before the call that queued it has returned
        queued = np.where(taken, np.minimum(receive["end"], add["start"]), receive["end"])
        self.add("handoff", receive["start"], queued)
        self.add("engine_wait", queued, add["start"])
        self.add("engine_code", add["start"], add["end"])
        self.causal("handoff → engine", hand["start"], receive["start"])
        self.causal("engine queue → engine", receive["start"], add["start"])
        self.first = index.first_step()[who]
        schedule, _ = index.step_spans[Span.SCHEDULE]
        self.scheduled = np.where(self.first == MISSING, MISSING, schedule[self.first])
        self.add("queue", add["end"], self.scheduled)
        self.causal("scheduler queue → scheduled", add["end"], self.scheduled)
        self._preemptions(schedule)

    def _preemptions(self, schedule: Ints) -> None:
        """From each eviction to the next scheduling, for the tokens that were made after it."""
        index = self.index
        made = index.step_of_token(self.events)
        for row in index.spans[index.spans["code"] == Span.PREEMPT]:
            mine = index.entries[index.entries["request"] == row["request"]]
            starts = schedule[index.position(mine["step"])]
            later = starts[starts > row["start"]]
            if not len(later):  # its last token was in flight already
                continue
            back = int(later.min())
            events = np.flatnonzero((self.events.request == row["request"]) & (made != MISSING))
            events = events[schedule[made[events]] >= back]
            self.add("preempted", np.full(len(events), row["start"]), np.full(len(events), back), events)

    def engine_steps(self) -> None:
        """From the first scheduling to the token's sampling, and on to the API server."""
        index, events = self.index, self.events
        self.step = index.step_of_token(events)
        ok = (self.step != MISSING) & (self.first != MISSING)
        self.joined &= ok
        spans = index.step_spans
        made = np.maximum(spans[Span.FORWARD][1], spans[Span.SAMPLING][1])
        made = np.where(made == MISSING, spans[Span.WORKER][1], made)
        sampled = np.where(ok, made[self.step], MISSING)
        put_start, put_end = (np.where(ok, side[self.step], MISSING) for side in spans[Span.OUTPUT_PUT])
        self.causal("sampled → output", sampled, put_end)
        self.causal("output → API server", put_start, self.arrived)
        self.add("output_transit", sampled, self.arrived)
        for code in (Span.OUTPUT_PUT, Span.OUTPUT_SEND):
            start, end = (np.where(ok, side[self.step], MISSING) for side in spans[code])
            self.add("output", start, np.minimum(end, np.where(self.arrived == MISSING, end, self.arrived)))
        # An engine that is kept from its core inside the call that sends may return long after the token has arrived.
        over = (put_end == MISSING) | ((self.arrived != MISSING) & (self.arrived < put_end))
        self._steps_between(ok, sampled, np.where(over, self.arrived, put_end))

    def _steps_between(self, ok: Bools, sampled: Ints, left: Ints) -> None:
        """Every step from the first own one to the one that made the token, for each event.

        Work of a step counts until the token is ``sampled``, the engine's own code until the token has ``left``.
        """
        spans = self.index.step_spans
        done = np.maximum.accumulate(np.maximum.reduce([end for _, end in spans.values()]))
        low = np.maximum(self.first, np.searchsorted(done, self.events.start))
        self.low = np.where(ok, np.minimum(low, self.step), MISSING)
        event, nth = each_of(np.where(ok, np.maximum(self.step - low + 1, 0), 0))
        position = nth + low[event]
        own, prompt = self._membership(event, position)
        last_of_work = np.where(position == self.step[event], sampled[event], np.iinfo(np.int64).max)
        last_of_code = np.where(left[event] == MISSING, np.iinfo(np.int64).max, left[event])

        def lay(name: str, code: Span, rows: Bools, until: Ints) -> None:
            start, end = spans[code][0][position[rows]], spans[code][1][position[rows]]
            start = np.maximum(start, np.where(start == MISSING, MISSING, self.scheduled[event[rows]]))
            self.add(name, start, np.minimum(end, until[rows]), event[rows])

        every = np.ones(len(event), dtype=np.bool_)
        lay("prefill", Span.FORWARD, own & prompt, last_of_work)
        lay("decode", Span.FORWARD, own & ~prompt, last_of_work)
        lay("input_prep", Span.INPUT_PREP, own, last_of_work)
        lay("sampling", Span.SAMPLING, own, last_of_work)
        for code in (Span.FORWARD, Span.INPUT_PREP, Span.SAMPLING, Span.WORKER):
            lay("other_step", code, ~own, last_of_work)
        for code in (Span.SCHEDULE, Span.UPDATE, Span.HOST_LAUNCH):
            lay("engine_code", code, every, last_of_code)
        lay("engine_code", Span.OUTPUT_PUT, position < self.step[event], last_of_code)
        lay("worker", Span.WORKER, own, last_of_code)
        for code in (Span.EXECUTE, Span.SAMPLE_CALL):
            lay("executor", code, every, last_of_code)
        lay("loop", Span.LOOP, every, last_of_code)

    def _membership(self, event: Ints, position: Ints) -> tuple[Bools, Bools]:
        """Whether each (event, step) pair is an own step, and whether it carries the prompt."""
        index = self.index
        if not len(index.entry_key):
            return (none := np.zeros(len(event), dtype=np.bool_)), none
        key = self.events.request[event] * FAR + index.seqs[position]
        at = np.minimum(np.searchsorted(index.entry_key, key), len(index.entry_key) - 1)
        own = index.entry_key[at] == key
        return own, own & ((index.entry_flags[at] & EntryFlag.PROMPT) != 0)
