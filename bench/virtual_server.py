"""The simulated server in virtual time: a list of arrivals in, what would have come of each out.

The engine is the one that runs in real time (servers/simulated/engine_loop.py). The API server is one server, first
come, first served, which prepares requests (template, tokenize) and forwards tokens (detokenize, egress).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from gapmeter_probe.records import Span

from gapmeter.servers.simulated.engine_loop import Action, EngineLoop, Listener
from gapmeter.servers.simulated.scheduler import Emission, Limits, Request, Scheduler, StepPlan
from gapmeter.servers.simulated.settings import Durations, StageTimes


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that reaches the server at ``due_ns``; ``hashes`` as in scheduler.Request."""

    due_ns: int
    prompt_tokens: int
    output_tokens: int
    hashes: tuple[Hashable, ...] = ()


@dataclass(frozen=True, slots=True)
class Settings:
    """The simulated server: the scheduler's limits and the stages' durations."""

    limits: Limits = field(default_factory=Limits)
    times: StageTimes = field(default_factory=StageTimes)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of an arrival, in ns of the arrivals' clock.

    ``received_ns``: the engine's input queue has it; ``added_ns``: the scheduler's queue has it; ``scheduled_ns``: its
    first step is being scheduled; ``token_ns``: when each token was handed to the socket.
    """

    due_ns: int
    received_ns: int
    added_ns: int
    scheduled_ns: int
    token_ns: tuple[int, ...]
    preemptions: int
    cached_tokens: int

    @property
    def first_token_ns(self) -> int:
        """When the first token was handed to the socket."""
        return self.token_ns[0]

    @property
    def last_token_ns(self) -> int:
        """When the last token was handed to the socket."""
        return self.token_ns[-1]


def simulate(arrivals: Iterable[Arrival], settings: Settings, watch: Listener | None = None) -> list[Outcome]:
    """The outcome of each arrival, in the order given; none of them is refused for lack of room in the queue.

    ``watch`` hears what the engine does too; requests are numbered as the arrivals are.

    Deterministic for given settings. Raises ValueError for an arrival that could never run within the limits.
    """
    asked = list(arrivals)
    timeline = VirtualTimeline()
    tracker = _Tracker(timeline, len(asked))
    durations = Durations(settings.times)
    scheduler = Scheduler(settings.limits)
    api = _ApiServer(durations, timeline, tracker)
    listeners = [tracker] if watch is None else [tracker, watch]
    engine = EngineLoop(scheduler, durations, timeline, listeners, api.forward)
    for key, arrival in sorted(enumerate(asked), key=lambda item: item[1].due_ns):
        request = Request(key, arrival.prompt_tokens, arrival.output_tokens, arrival.hashes)
        scheduler.check(request)
        timeline.arrive(arrival.due_ns, lambda t, request=request: api.prepare(t, request, engine))  # type: ignore[misc]
    timeline.run()
    return [tracker.outcome(key, arrival) for key, arrival in enumerate(asked)]


class VirtualTimeline:
    """Time that jumps from one thing due to the next; things due at the same time happen in the order asked for."""

    def __init__(self) -> None:
        self._now = 0
        self._order = 0
        self._due: list[tuple[int, int, Action]] = []
        self._arrivals: deque[tuple[int, Action]] = deque()

    def now(self) -> int:
        """The virtual time, ns."""
        return self._now

    def at(self, due_ns: int, action: Action) -> None:
        """Call ``action(due_ns)`` when it is time."""
        self._order += 1
        heapq.heappush(self._due, (due_ns, self._order, action))

    def arrive(self, due_ns: int, action: Action) -> None:
        """As ``at``, for what is known beforehand and given in the order of its times; first among equals."""
        self._arrivals.append((due_ns, action))

    def run(self) -> None:
        """Until nothing is due any more."""
        due, arrivals, pop = self._due, self._arrivals, heapq.heappop
        while due or arrivals:
            if arrivals and not (due and due[0][0] < arrivals[0][0]):
                self._now, action = arrivals.popleft()
            else:
                self._now, _, action = pop(due)
            action(self._now)


class _ApiServer:
    """One server for the work on requests and on chunks, in the order in which they come."""

    def __init__(self, durations: Durations, timeline: VirtualTimeline, tracker: _Tracker) -> None:
        self._durations, self._times, self._timeline, self._tracker = durations, durations.times, timeline, tracker
        self._free = 0

    def prepare(self, t: int, request: Request, engine: EngineLoop) -> None:
        """Render and tokenize a request, then hand it to the engine."""
        draw, times = self._durations.draw, self._times
        work = draw("template", times.template_ns) + draw("tokenize", times.tokenize_ns)
        self._free = max(self._free, t) + work
        if self._free == t:
            engine.receive(request)
        else:
            self._timeline.at(self._free, lambda _: engine.receive(request))

    def forward(self, seq: int, emissions: tuple[Emission, ...]) -> None:
        """Turn an engine output into chunks."""
        draw, times, token_ns = self._durations.draw, self._times, self._tracker.token_ns
        free = max(self._free, self._timeline.now())
        for emission in emissions:
            free += draw("detokenize", times.detokenize_ns) + draw("egress", times.egress_ns)
            token_ns[emission.key].append(free)
        self._free = free


class _Tracker(Listener):
    """Notes, as the engine's listener, the few times that make an outcome."""

    def __init__(self, timeline: VirtualTimeline, requests: int) -> None:
        self._timeline = timeline
        self.token_ns: list[list[int]] = [[] for _ in range(requests)]
        self._scheduled = [-1] * requests
        self._received, self._added, self._cached, self._preemptions = ([0] * requests for _ in range(4))

    def end(self, stage: Span, ref: int, meant_ns: int) -> None:
        """Note the ends of the two stages that lead to the queue."""
        if stage is Span.CORE_ADD:
            self._added[ref] = self._timeline.now()
        elif stage is Span.CORE_RECEIVE:
            self._received[ref] = self._timeline.now()

    def planned(self, plan: StepPlan, asynchronous: bool) -> None:
        """Note first schedulings and evictions."""
        for key in plan.preempted:
            self._preemptions[key] += 1
        if plan.prompt_tokens:
            for entry in plan.entries:
                if entry.tokens and self._scheduled[entry.key] < 0:
                    self._scheduled[entry.key] = self._timeline.now()
                    self._cached[entry.key] = entry.cached

    def outcome(self, key: int, arrival: Arrival) -> Outcome:
        """What was noted for one arrival."""
        return Outcome(
            due_ns=arrival.due_ns,
            received_ns=self._received[key],
            added_ns=self._added[key],
            scheduled_ns=self._scheduled[key],
            token_ns=tuple(self.token_ns[key]),
            preemptions=self._preemptions[key],
            cached_tokens=self._cached[key],
        )
