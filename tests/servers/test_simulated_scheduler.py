"""The scheduler keeps to its limits and loses nothing, whatever comes."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import pytest
from gapmeter_probe.records import EntryFlag
from hypothesis import given, settings
from hypothesis import strategies as st

from gapmeter.servers.simulated.scheduler import Limits, Request, Scheduler, StepPlan

PROMPT, LAST = EntryFlag.PROMPT, EntryFlag.LAST_CHUNK

limits = st.builds(
    Limits,
    max_sequences=st.integers(1, 6),
    token_budget=st.integers(6, 64),
    kv_blocks=st.integers(12, 40),
    block_tokens=st.just(4),
    chunk_tokens=st.sampled_from([0, 3]),
    reserve_prompt=st.booleans(),
    prefix_caching=st.booleans(),
    asynchronous=st.booleans(),
)
sizes = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 18), st.booleans()), min_size=1, max_size=14)


def requests_of(sizes: Sequence[tuple[int, int, bool]]) -> list[Request]:
    """Requests with keys from 0; those marked share their prompt's beginning."""
    return [
        Request(key, prompt, output, tuple(("shared", n) if shared else (key, "own", n) for n in range(prompt // 4)))
        for key, (prompt, output, shared) in enumerate(sizes)
    ]


class Run:
    """Drives a scheduler as an engine would: one step ahead when it is asynchronous. Checks every plan."""

    def __init__(self, limits: Limits, sizes: Sequence[tuple[int, int, bool]] = ()) -> None:
        self.scheduler = Scheduler(limits)
        for request in requests_of(sizes):
            self.scheduler.add(request)
        self.limits = limits
        self.flying: deque[StepPlan] = deque()
        self.plans: list[StepPlan] = []
        self.made: Counter[int] = Counter()
        self.finished: list[int] = []

    def step(self) -> None:
        depth = 2 if self.limits.asynchronous else 1
        if len(self.flying) == depth:
            self.land()
        plan = self.scheduler.schedule()
        self.check(plan)
        self.plans.append(plan)
        if plan.empty and self.flying:
            self.land()
        if not plan.empty:
            self.flying.append(plan)
            if not self.limits.asynchronous:
                self.land()

    def land(self) -> None:
        for emission in self.scheduler.update(self.flying.popleft()):
            self.made[emission.key] += emission.tokens
            if emission.finished:
                self.finished.append(emission.key)

    def check(self, plan: StepPlan) -> None:
        carried = [entry for entry in plan.entries if entry.tokens]
        assert sum(entry.tokens for entry in carried) <= self.limits.token_budget
        assert plan.running <= self.limits.max_sequences
        assert len({entry.key for entry in carried}) == len(carried) <= self.limits.max_sequences
        assert 0 <= plan.free_blocks <= self.limits.kv_blocks
        assert plan.prompt_tokens + plan.decoding == sum(entry.tokens for entry in carried)

    def finish(self) -> None:
        for _ in range(20_000):
            if not len(self.scheduler) and not self.flying:
                return
            if len(self.scheduler):
                self.step()
            else:
                self.land()
        raise AssertionError("the scheduler makes no progress")


@given(limits, sizes)
@settings(max_examples=80, deadline=None)
def test_every_request_gets_exactly_its_tokens_and_all_blocks_come_back(
    limits: Limits, sizes: list[tuple[int, int, bool]]
) -> None:
    run = Run(limits, sizes)
    run.finish()
    assert run.made == Counter({key: output for key, (_, output, _) in enumerate(sizes)})
    assert sorted(run.finished) == list(range(len(sizes)))
    assert run.scheduler.pool.free == limits.kv_blocks


@given(limits, sizes, st.lists(st.integers(0, 13), max_size=6), st.integers(0, 12))
@settings(max_examples=50, deadline=None)
def test_an_aborted_request_gets_nothing_more_and_leaves_no_block_behind(
    limits: Limits, sizes: list[tuple[int, int, bool]], victims: list[int], after: int
) -> None:
    run = Run(limits, sizes)
    for _ in range(after):
        if len(run.scheduler):
            run.step()
    before = dict(run.made)
    gone = {key for key in victims if run.scheduler.abort(key)}
    run.finish()
    assert all(run.made[key] == before.get(key, 0) for key in gone)
    assert all(run.made[key] == output for key, (_, output, _) in enumerate(sizes) if key not in gone)
    assert run.scheduler.pool.free == limits.kv_blocks


@given(limits, sizes)
@settings(max_examples=50, deadline=None)
def test_requests_are_first_scheduled_in_the_order_in_which_they_came(
    limits: Limits, sizes: list[tuple[int, int, bool]]
) -> None:
    run = Run(limits, sizes)
    run.finish()
    firsts = list(dict.fromkeys(entry.key for plan in run.plans for entry in plan.entries if entry.tokens))
    assert firsts == sorted(firsts)


@given(limits, sizes)
@settings(max_examples=50, deadline=None)
def test_what_is_computed_is_what_is_known_each_position_once_unless_evicted(
    limits: Limits, sizes: list[tuple[int, int, bool]]
) -> None:
    run = Run(limits, sizes)
    run.finish()
    at: dict[int, int] = {}
    most: dict[int, int] = {}
    for plan in run.plans:
        for entry in plan.entries:
            if entry.flags & EntryFlag.PREEMPTED:
                at[entry.key] = 0
            elif at.get(entry.key):
                assert (entry.before, entry.cached) == (at[entry.key], 0)
                at[entry.key] += entry.tokens
            else:
                assert entry.before == entry.cached
                at[entry.key] = entry.before + entry.tokens
            most[entry.key] = max(most.get(entry.key, 0), at[entry.key])
    # The last token is made, not computed.
    assert most == {key: prompt + output - 1 for key, (prompt, output, _) in enumerate(sizes)}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_prompt_longer_than_the_budget_is_computed_in_chunks_and_only_the_last_makes_a_token(
    asynchronous: bool,
) -> None:
    run = Run(Limits(token_budget=10, asynchronous=asynchronous))
    run.scheduler.add(Request(0, 25, 2))
    run.finish()
    chunks = [plan.entries[0] for plan in run.plans if plan.prompt_tokens]
    assert [(c.tokens, c.before, c.flags) for c in chunks] == [
        (10, 0, PROMPT), (10, 10, PROMPT), (5, 20, PROMPT | LAST),
    ]  # fmt: skip
    assert [plan.decoding for plan in run.plans if plan.decoding] == [1]


def test_running_requests_take_the_budget_before_waiting_ones() -> None:
    scheduler = Scheduler(Limits(max_sequences=4, token_budget=8))
    scheduler.add(Request(0, 4, 5))
    scheduler.update(scheduler.schedule())
    scheduler.add(Request(1, 20, 1))
    plan = scheduler.schedule()
    assert [(entry.key, entry.tokens) for entry in plan.entries] == [(0, 1), (1, 7)]


def test_when_blocks_run_out_the_request_admitted_last_is_evicted_and_computed_anew() -> None:
    scheduler = Scheduler(Limits(max_sequences=2, kv_blocks=4, block_tokens=4))
    for key in (0, 1):
        scheduler.add(Request(key, 8, 6))
    scheduler.update(scheduler.schedule())  # both prompts fill all four blocks
    plan = scheduler.schedule()
    assert plan.preempted == (1,)
    assert [(entry.key, entry.tokens, entry.flags) for entry in plan.entries] == [
        (1, 0, EntryFlag.PREEMPTED), (0, 1, 0),
    ]  # fmt: skip
    while 0 in {entry.key for entry in plan.entries}:
        scheduler.update(plan)
        plan = scheduler.schedule()
    again = plan.entries[0]
    assert (again.key, again.tokens, again.before) == (1, 9, 0)  # the prompt and the token that it had made
    assert again.flags == PROMPT | LAST | EntryFlag.RESUMED


def test_asynchronous_scheduling_plans_the_next_token_before_the_last_is_known_and_none_too_many() -> None:
    scheduler = Scheduler(Limits(asynchronous=True))
    scheduler.add(Request(0, 5, 2))
    first, second, third = (scheduler.schedule() for _ in range(3))
    assert [(e.tokens, e.before) for plan in (first, second) for e in plan.entries] == [(5, 0), (1, 5)]
    assert third.empty
    assert [emission.finished for plan in (first, second) for emission in scheduler.update(plan)] == [False, True]


def test_a_shared_prefix_is_computed_once_and_its_last_token_always() -> None:
    scheduler = Scheduler(Limits(prefix_caching=True, block_tokens=4))
    hashes = ("a", "b", "c")
    for key in range(3):
        scheduler.add(Request(key, 12, 1, hashes))
    plan = scheduler.schedule()
    assert [(e.key, e.tokens, e.cached) for e in plan.entries] == [(0, 12, 0), (1, 4, 8), (2, 4, 8)]
    scheduler.update(plan)
    scheduler.add(Request(3, 14, 1, hashes))  # found although nobody holds it any more
    assert [(e.tokens, e.cached) for e in scheduler.schedule().entries] == [(2, 12)]


def test_content_that_nobody_holds_gives_way_least_recently_used_first() -> None:
    scheduler = Scheduler(Limits(max_sequences=1, prefix_caching=True, block_tokens=4, kv_blocks=5))
    for key, name in enumerate("ab"):  # each leaves two named blocks behind
        scheduler.add(Request(key, 8, 1, (f"{name}0", f"{name}1")))
        scheduler.update(scheduler.schedule())
    scheduler.add(Request(2, 9, 1, ("c0", "c1")))  # needs three: the blank one, and both of a's
    scheduler.update(scheduler.schedule())
    assert scheduler.pool.find(("b0", "b1"), 8) == 2
    assert scheduler.pool.find(("a0",), 4) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_sequences": 0}, "max_sequences"),
        ({"token_budget": 4, "max_sequences": 5}, "token_budget"),
        ({"kv_blocks": 0}, "kv_blocks"),
        ({"chunk_tokens": -1}, "chunk_tokens"),
    ],
)
def test_limits_that_cannot_work_are_refused_by_name(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Limits(**change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("limits", "request_"),
    [
        (Limits(kv_blocks=2, block_tokens=4), Request(0, 6, 3)),
        (Limits(token_budget=8, chunked_prefill=False), Request(0, 8, 1)),
        (Limits(), Request(0, 0, 1)),
        (Limits(), Request(0, 1, 0)),
    ],
)
def test_a_request_that_could_never_run_is_refused_at_once(limits: Limits, request_: Request) -> None:
    scheduler = Scheduler(limits)
    with pytest.raises(ValueError, match=r"token|block"):
        scheduler.add(request_)
    assert len(scheduler) == 0


def test_where_prompts_are_not_chunked_chunk_tokens_cut_none() -> None:
    run = Run(Limits(token_budget=64, chunked_prefill=False, chunk_tokens=3), [(10, 2, False), (10, 2, False)])
    run.finish()
    assert run.made == Counter({0: 2, 1: 2})
