"""From stamps to activities: for each event of the ledger, what was going on, when, and of which class."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from gapmeter.analysis.arrays import Bools, Ints, ranges
from gapmeter.analysis.ledger.classes import CLASS
from gapmeter.analysis.ledger.critical_path import FAR, Intervals
from gapmeter.analysis.ledger.device_time import DEVICE_WORK
from gapmeter.analysis.ledger.index import Events, Index
from gapmeter.analysis.ledger.shares import Processes
from gapmeter.analysis.ledger.steps import WORKED
from gapmeter.analysis.ledger.trace import MISSING, filled
from gapmeter.records import Span

_INGRESS = (("ingress_part", Span.HTTP), ("ingress_part", Span.APPLICATION), ("ingress_inline", Span.REQUEST))
_IN_CALL = (Span.INPUT_PREP, Span.HOST_LAUNCH, Span.SAMPLING)


@dataclass(frozen=True, slots=True)
class ClientStamps:
    """The client's stamps, one element a row of its table; ``MISSING`` where there is none.

    ``first_due``: when the first attempt was due, where earlier ones had failed; ``due`` is the attempt's own.
    ``together``: up to which token the first one's read reached, and ``looked``: until when the load tester
    had read whatever was there. ``network_ns``: what the network takes of every request, in which none can wait for the
    server.
    """

    due: Ints
    connect_start: Ints
    connect_end: Ints
    write: Ints
    sent: Ints
    first_due: Ints | None = None
    together: Ints | None = None
    looked: Ints | None = None
    network_ns: int = field(default=0, kw_only=True)


@dataclass(frozen=True, slots=True)
class Causes:
    """For each event, the stamps on its way: what the checks and the table need besides the intervals."""

    intervals: Intervals
    joined: Bools  # every process that recorded knows the request, and the token's step was found
    first_seq: Ints  # the steps whose forwards are behind the event, by sequence number; MISSING where unknown
    last_seq: Ints
    gaps: dict[str, Ints]  # causal pairs: later minus earlier stamp, MISSING pairs left out
    processes: Processes
    request: Ints  # whose token each event is: of a request with several choices, the choice


def build(index: Index | None, client: ClientStamps, events: Events, dropped: frozenset[str]) -> Causes:
    """All activities that led to the events, as intervals within each event's window.

    ``dropped`` names the classes that may not own time because a stage inside them could not be stamped.
    """
    maker = Maker(index, client, events)
    maker.beside_steps()
    if maker.has_engine:
        maker.engine_steps()
    steps = maker.seq_of(maker.behind), maker.seq_of(maker.step)
    return Causes(maker.whole(dropped), maker.joined, *steps, maker.gaps, maker.processes, maker.events.request)


@dataclass(frozen=True, slots=True)
class StepRows:
    """Steps within events' windows, a row an event and a step, by its ``position``.

    ``own``: the step has tokens of the event's request; ``prompt``: of its prompt; ``makes_it``: it makes the event's
    token. Before ``since`` nothing counts, the work in the step up to ``work_until`` and the engine's own code up to
    ``code_until``.
    """

    event: Ints
    position: Ints
    own: Bools
    prompt: Bools
    makes_it: Bools
    since: Ints
    work_until: Ints
    code_until: Ints


class Parts:
    """The intervals of one set of events, cut to their windows."""

    def __init__(self, index: Index | None, events: Events) -> None:
        self.events = events
        self.parts: list[tuple[str, Intervals]] = []
        self.traced = index is not None
        if index is not None:
            self.index, self.steps = index, index.steps

    def add(self, name: str, start: Ints, end: Ints, event: Ints | None = None) -> None:
        """Rows of one class, cut to their events' windows; a row with a missing end or start is left out."""
        low, high = self.events.start, self.events.end
        if event is not None:
            low, high = low[event], high[event]
        begun, ended = np.maximum(start, low), np.minimum(end, high)
        kept = np.flatnonzero((begun < ended) & (start != MISSING) & (end != MISSING))
        whose = kept if event is None else event[kept]
        self.parts.append((name, Intervals(whose, begun[kept], ended[kept], np.full(len(kept), CLASS[name]))))

    def whole(self, dropped: frozenset[str]) -> Intervals:
        """All rows but those of some classes."""
        return Intervals.join([part for name, part in self.parts if name not in dropped])

    def add_steps(self, rows: StepRows) -> None:
        """What went on in steps, by whether they are the event's own."""
        steps, spans, work, code = self.steps, self.steps.spans, rows.work_until, rows.code_until
        own, others, every = np.flatnonzero(rows.own), np.flatnonzero(~rows.own), np.arange(len(rows.event))
        prompts, decodes = own[rows.prompt[own]], own[~rows.prompt[own]]

        def lay(name: str, span: Span, some: Ints, until: Ints, times: tuple[Ints, Ints] | None = None) -> None:
            """``times``: of every step, in place of those of ``span``."""
            if span in steps.stamped:
                at, (start, end) = rows.position[some], times or spans[span]
                begun, ended = np.maximum(start[at], rows.since[some]), np.minimum(end[at], until[some])
                self.add(name, begun, ended, rows.event[some])

        for span in DEVICE_WORK:
            times = steps.computing if span == Span.FORWARD else None
            lay("prefill", span, prompts, work, times)
            lay("decode", span, decodes, work, times)
        lay("launch_gap", Span.DEVICE_STEP, own, work)
        lay("input_prep", Span.INPUT_PREP, own, work)
        lay("sampling", Span.SAMPLING, own, work)
        for span in (Span.FORWARD, Span.DEVICE_STEP, Span.INPUT_PREP, Span.SAMPLING, Span.WORKER):
            lay("other_step", span, others, work)
        put, updated = spans[Span.HOST_LAUNCH][0], spans[Span.UPDATE][0]
        lay("untimed", Span.HOST_LAUNCH, np.flatnonzero(steps.untimed[rows.position]), work, (put, updated))
        for span in (Span.SCHEDULE, Span.UPDATE, Span.HOST_LAUNCH):
            lay("engine_code", span, every, code)
        lay("engine_code", Span.OUTPUT_PUT, np.flatnonzero(~rows.makes_it), code)
        lay("worker", Span.WORKER, own, code)
        for span in (Span.EXECUTE, Span.SAMPLE_CALL):
            lay("executor_call", span, every, code, steps.calls[span])
            lay("executor", span, every, code)
        lay("loop", Span.LOOP, every, code)


class Maker(Parts):
    """Collects the intervals that led to tokens; each method adds one part of the way.

    Its arrays have an element an event, as what is looked up for them; ``event`` in a method numbers these, a row an
    event and a span, a step or an eviction. ``row``: of the client's table. ``first``, ``behind`` and ``step`` are
    positions of steps: the first with tokens of the request, the first whose forward is behind the event, and the one
    that made its token.
    """

    def __init__(self, index: Index | None, client: ClientStamps, events: Events) -> None:
        super().__init__(index, events)
        self.client, self.row, self.has_engine = client, events.request, index is not None and index.has_engine
        self.gaps: dict[str, Ints] = {}
        self.joined = np.ones(len(events), dtype=np.bool_)
        self.behind = self.step = np.full(len(events), MISSING)
        self.processes = Processes(np.full(len(events), MISSING), np.full(len(events), MISSING))
        if index is not None:
            last = events.n if client.together is None else np.maximum(events.n, client.together[self.row])
            self.read_with = self.index.located(replace(events, n=last))
            events = self.index.located(events)
            self.ingress = self.index.of_request(Span.INGRESS)[events.request]
            self.processes = self.processes._replace(api=self.ingress["process"])
            self.egress = self.index.of_token(Span.EGRESS, events)
            self.events = events = self.index.awaited(events, self.egress["n"])
            self.receive = self.index.of_token(Span.OUTPUT_RECEIVE, events)
            self.detokenize = self.index.of_token(Span.DETOKENIZE, events)
            self.step = self.index.step_of_token(events)

    def causal(self, name: str, earlier: Ints, later: Ints) -> None:
        """Note how far apart two stamps are that cannot be the other way round."""
        both = (earlier != MISSING) & (later != MISSING)
        self.gaps[name] = (later - earlier)[both]

    def seq_of(self, position: Ints) -> Ints:
        """Sequence numbers of steps given by position."""
        if not self.has_engine:
            return position
        return np.where(position == MISSING, MISSING, self.steps.seqs[position])

    def beside_steps(self) -> None:
        """All but the engine's steps."""
        self.client_side()
        if self.traced:
            self.api_side()
        if self.has_engine:
            self.engine_waits()

    def client_side(self) -> None:
        c, who = self.client, self.row
        due, write, sent = c.due[who], c.write[who], c.sent[who]
        opened = (c.connect_start[who] != MISSING) & (c.connect_end[who] > due)
        if self.traced:
            seen = self.ingress["start"]
            sent = np.where((seen != MISSING) & (seen < sent), np.maximum(seen, write), sent)
            self.causal("write → server", write, seen)
            arrived = np.where(sent != MISSING, np.minimum(sent + self.client.network_ns, seen), MISSING)
            self.add("network", sent, arrived)
            self.add("network_in", arrived, seen)
        connect_start, connect_end = (np.where(opened, at[who], MISSING) for at in (c.connect_start, c.connect_end))
        self.add("connect", connect_start, connect_end)
        if c.first_due is not None:
            self.add("retry", c.first_due[who], due)
        self.add("generator_lag", due, np.where(opened, connect_start, sent))
        self.add("generator_lag", connect_end, np.where(opened, sent, MISSING))

    def api_side(self) -> None:
        self.joined &= self.ingress["start"] != MISSING
        self.add("ingress", self.ingress["start"], self.ingress["end"])
        for name, code in _INGRESS:
            event, part = self.index.all_of_request(code, self.events)  # each of a list of prompts has its own
            self.add(name, part["start"], part["end"], event)
        for name, code in (("template", Span.TEMPLATE), ("tokenize", Span.TOKENIZE)):
            event, span = self.index.all_of_request(code, self.events)
            inline = span["queued"] == span["start"]
            self.add(f"{name}_wait", span["queued"], span["start"], event)
            self.add(name, np.where(inline, MISSING, span["start"]), span["end"], event)
            self.add(f"{name}_back", np.where(inline, MISSING, span["end"]), span["end"] + span["n"], event)
            self.add(f"{name}_inline", np.where(inline, span["start"], MISSING), span["end"], event)
        self.arrived = filled(self.receive["start"], self.detokenize["queued"])
        self.add("output_receive", self.receive["start"], self.receive["end"])
        self.add("detokenize", self.detokenize["queued"], self.detokenize["end"])
        written = np.minimum(self.egress["end"], self.events.end)
        self.add("egress_turn", self.detokenize["end"], written)
        self.add("egress", self.egress["queued"], written)
        ready = filled(self.detokenize["end"], written)
        for name, code, low, high in (  # what the loop does for other choices meanwhile is the request's own
            ("handoff", Span.HANDOFF, self.ingress["start"], self.ingress["end"]),
            ("detokenize", Span.DETOKENIZE, ready, written),
            ("egress", Span.EGRESS, ready, written),
        ):
            event, span = self.index.of_choices(code, self.row, low, high)
            self.add(name, np.maximum(span["start"], low[event]), np.minimum(span["end"], high[event]), event)
        # Of several pieces in one read all have the last one's stamp: the first ones had come, and were not read, or
        # something in between, such as a proxy, had held them back.
        unread = written
        if self.client.looked is not None:
            unread = np.where(written == MISSING, MISSING, np.maximum(written, self.client.looked[self.row]))
        self.add("read_late", unread, self.index.of_token(Span.EGRESS, self.read_with)["start"])
        self.add("network_out", written, self.events.end)
        self.causal("write → client", self.egress["start"], self.events.end)
        self.causal("detokenize → egress", self.detokenize["end"], self.egress["end"])
        self.joined &= self.egress["start"] != MISSING

    def engine_waits(self) -> None:
        """From the hand-over to the first scheduling, and while preempted: the scheduler's state decides."""
        who, index = self.events.request, self.index
        hand, receive, add = (index.of_request(code)[who] for code in (Span.HANDOFF, Span.CORE_RECEIVE, Span.CORE_ADD))
        self.processes = self.processes._replace(engine=filled(add["process"], receive["process"]))
        self.add("handoff", hand["start"], np.minimum(hand["end"], filled(receive["start"], FAR)))
        self.add("handoff_transit", hand["start"], receive["start"])
        # The engine may take it before the call that queued it has returned.
        queued = np.minimum(receive["end"], filled(add["start"], FAR))
        self.add("handoff_receive", receive["start"], queued)
        self.add("engine_wait", queued, add["start"])
        self.add("engine_code", add["start"], add["end"])
        self.causal("handoff → engine", hand["start"], receive["start"])
        self.causal("engine queue → engine", receive["start"], add["start"])
        self.first = index.first_step[who]
        self.scheduled = index.scheduled_of(who)
        self.add("queue", add["end"], self.scheduled)
        self.causal("scheduler queue → scheduled", add["end"], self.scheduled)
        self._preemptions()

    def _preemptions(self) -> None:
        """From each eviction to the next scheduling, for the tokens that were made after it."""
        schedule, _ = self.steps.spans[Span.SCHEDULE]
        whose, evicted, again = self.index.evictions
        event, which = ranges(*(np.searchsorted(whose, self.events.request, side=side) for side in ("left", "right")))
        made = self.step[event]
        after = (made != MISSING) & (schedule[made] >= again[which])
        self.add("preempted", evicted[which[after]], again[which[after]], event[after])

    def engine_steps(self) -> None:
        """From the first scheduling to the token's sampling, and on to the API server."""
        steps, spans = self.steps, self.steps.spans
        ok = (self.step != MISSING) & (self.first != MISSING)
        self.joined &= ok

        def of_step(values: Ints) -> Ints:
            """Of the step that made each event's token."""
            return np.where(ok, values[self.step], MISSING)

        sampled, width = of_step(steps.made), of_step(steps.device_width)  # to which a device's stamps are known
        (put_start, put_end), (send_start, send_end) = (
            map(of_step, spans[code]) for code in (Span.OUTPUT_PUT, Span.OUTPUT_SEND)
        )
        launched, began = (of_step(spans[code][0]) for code in (Span.HOST_LAUNCH, Span.FORWARD))
        self.causal("sampled → output", np.where(sampled == MISSING, MISSING, sampled - width), put_end)
        self.causal("launched → forward", launched, np.where(began == MISSING, MISSING, began + width))
        self.causal("output → API server", put_start, self.arrived)
        for name, start, end in (("output_put", put_start, put_end), ("output_send", send_start, send_end)):
            self.add(name, start, np.minimum(end, filled(self.arrived, FAR)))
        self.add("output_ready", sampled, filled(send_start, put_end))
        self.add("output_transit", sampled, self.arrived)
        # An engine that is kept from its core inside the call that sends may return long after the token has arrived.
        over = (put_end == MISSING) | ((self.arrived != MISSING) & (self.arrived < put_end))
        self._steps_between(ok, sampled, np.where(over, self.arrived, put_end))

    def _steps_between(self, ok: Bools, sampled: Ints, left: Ints) -> None:
        """Every step from the first own one to the one that made the token, for each event.

        Work of a step counts until the token is ``sampled``, the engine's own code until the token has ``left``.
        """
        steps, window = self.steps, self.events
        low, self.behind = (  # the first own step that is not over, or whose forward is not, when the window begins
            np.where(ok, np.clip(steps.first_beside(self.first, ended, window.start), self.first, self.step), MISSING)
            for ended in (steps.over, steps.forwards_over)
        )
        last = np.minimum(self.step, steps.first_beside(self.first, steps.untouched, window.end) - 1)
        event, position = ranges(low, np.where(ok, last + 1, low))
        own, prompt = self.index.carried(self.events.request[event], position)
        makes_it = position == self.step[event]
        rows = StepRows(
            event, position, own, prompt, makes_it,
            since=self.scheduled[event],
            work_until=np.where(makes_it, sampled[event], FAR),
            code_until=filled(left, FAR)[event],
        )  # fmt: skip
        self.add_steps(rows)
        self._before_own(ok)
        self._steps_after(ok, left)

    def _steps_after(self, ok: Bools, left: Ints) -> None:
        """What an engine that schedules ahead does for later steps before a token that is there is let out.

        Where the device waits for their launches, so does the token.
        """
        steps, spans = self.steps, self.steps.spans
        upto = steps.first_beside(self.step, steps.begun, left)
        event, position = ranges(self.step + 1, np.where(ok, upto, 0))
        waits = spans[Span.FORWARD][0][position], np.minimum(steps.computing[0][position], left[event])
        self.add("launch_gap", *waits, event)
        elsewhere = spans[Span.EXECUTE][0][position] != MISSING  # a worker of its own may do what is in the call
        for code in (Span.SCHEDULE, Span.UPDATE, Span.EXECUTE, Span.SAMPLE_CALL, *_IN_CALL):
            start, end = (side[position] for side in steps.calls.get(code, spans[code]))
            start = np.where(elsewhere, MISSING, start) if code in _IN_CALL else start
            self.add("engine_code", start, np.minimum(end, left[event]), event)

    def _before_own(self, ok: Bools) -> None:
        """Steps of others that a worker or a device is still at when an event's first own step is put behind them."""
        first = self.steps.first_beside(self.first, self.steps.worked, self.scheduled + 1)
        event, position = ranges(first, np.where(ok, self.first, first))
        for code in WORKED:
            start, end = (side[position] for side in self.steps.spans[code])
            self.add("other_step", np.maximum(start, self.scheduled[event]), end, event)
