"""Conversations: each turn a think time after the answer before it, whole in one process, nothing lost silently."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapmeter.loadgen import PlanError
from gapmeter.loadgen.issue import Conversations, Users, issue
from gapmeter.loadgen.plan import Plan
from gapmeter.loadgen.planner import make_plan
from gapmeter.loadgen.tokenizer import PromptTokenizer
from gapmeter.records import Outcome, read_records
from gapmeter.records.request import ISSUED, RequestRecord
from gapmeter.scenarios.read import load_scenario
from tests.kit.loads import bed, plan

MS = 1_000_000
SETTINGS = (
    "workload.kind=conversation", "workload.turns={uniform: [1, 5]}", "workload.prompt_tokens={uniform: [40, 70]}",
    "load.rate=5", "load.requests=40", "load.think_time={exponential: 2s}", "load.warmup=20s",
)  # fmt: skip


def planned(tokenizer: PromptTokenizer | None, *overrides: str) -> Plan:
    scenario = load_scenario("smoke", [*SETTINGS, *overrides], {})
    return make_plan(scenario, tokenizer, model_name="served")


CLOSED = ("load.rate=null", "load.arrivals=closed", "load.concurrency=3", "load.warmup=auto")


def test_each_of_several_processes_has_a_conversation_for_its_users(tokenizer: PromptTokenizer) -> None:
    made = planned(tokenizer, *CLOSED, "load.requests=null", "load.duration=5s", "workload.turns=100")
    assert all(len(made.slice(process, 3)) for process in range(3))


def talks(turns: list[int], *, pause_ns: int = 0, end_ns: int = 0, users: int = 0) -> Plan:
    """Equal conversations of so many turns each, beginning a millisecond apart, or with whichever user is free."""
    place = [turn for count in turns for turn in range(1, count + 1)]
    starts = iter(range(0, len(turns) * MS, MS))
    due = [next(starts) if turn == 1 and not users else -1 for turn in place]
    made = plan(due, think_ns=pause_ns, end_ns=end_ns, users=users)
    return dataclasses.replace(made, turns=np.array(place, np.int64))


def messages(body: bytes) -> list[dict[str, str]]:
    found: list[dict[str, str]] = json.loads(body)["messages"]
    return found


def test_every_turn_has_the_whole_conversation_before_it(tokenizer: PromptTokenizer) -> None:
    made = planned(tokenizer)
    assert set(made.turns.tolist()) == {1, 2, 3, 4, 5}
    for at, body in enumerate(made.bodies):
        said = messages(body)
        assert [m["role"] for m in said] == ["user", "assistant"] * (made.turn(at) - 1) + ["user"]
        assert int(tokenizer.count_messages([said])[0]) == made.prompt_tokens[at]
        if made.turn(at) > 1:
            before = messages(made.bodies[at - 1])
            assert said[: len(before)] == before
            assert len(said[-2]["content"].split()) == made.output_tokens[at - 1]
    firsts = {messages(body)[0]["content"] for body in made.bodies}
    assert len(firsts) == (made.turns == 1).sum()


def test_only_first_turns_have_due_times_and_they_are_the_arrivals_of_the_rate(tokenizer: PromptTokenizer) -> None:
    made = planned(tokenizer)
    plain = make_plan(
        load_scenario("smoke", ["load.rate=5", "load.requests=40", "load.warmup=20s"], {}), tokenizer, model_name="m"
    )
    np.testing.assert_array_equal(made.due_ns[made.turns == 1], plain.due_ns)
    assert set(made.due_ns[made.turns > 1].tolist()) == {-1}
    assert made.pauses_ns.mean() == pytest.approx(2e9, rel=0.5)
    assert len(set(made.pauses_ns.tolist())) == len(made)


def test_what_does_not_fit_the_context_ends_its_conversation_and_is_said(tokenizer: PromptTokenizer) -> None:
    whole, cut = planned(tokenizer), planned(tokenizer, "server.max_model_len=200")
    assert int((cut.prompt_tokens + cut.output_tokens).max()) <= 200
    assert (cut.turns == 1).sum() == (whole.turns == 1).sum()
    assert all(b == a + 1 or b == 1 for a, b in pairwise(cut.turns.tolist()))
    (note,) = cut.notes
    assert note == (
        f"{len(whole) - len(cut)} of {len(whole)} turns were left out: their history does not fit max_model_len 200"
    )
    with pytest.raises(PlanError, match=r"first turns of up to \d+ tokens.* do not fit server.max_model_len 50"):
        planned(tokenizer, "server.max_model_len=50")


def test_a_warmup_that_is_shorter_than_a_conversation_is_said(tokenizer: PromptTokenizer) -> None:
    (note,) = planned(tokenizer, "load.warmup=1s").notes
    assert "the load still grows while it is measured; write a longer load.warmup" in note


@pytest.mark.parametrize("length", ["80", "{uniform: [60, 100]}"], ids=["equal", "of any length"])
def test_conversations_may_begin_with_shared_texts(tokenizer: PromptTokenizer, length: str) -> None:
    shared = ("workload.shared_prefix=0.5", "workload.shared_prefixes=2")
    made = planned(tokenizer, *shared, f"workload.prompt_tokens={length}")
    starts = [" ".join(messages(body)[0]["content"].split()[:10]) for body in made.bodies]
    assert len(set(starts)) == 2
    assert made.prefix_share is not None
    assert planned(tokenizer, "workload.prompt_tokens=80").prefix_share < made.prefix_share < 1  # type: ignore[operator]


@pytest.mark.parametrize("workers", [2, 3])
def test_shares_hold_whole_conversations_and_together_are_the_plan(
    tokenizer: PromptTokenizer, workers: int, tmp_path: Path
) -> None:
    made = planned(tokenizer)
    shares = [made.slice(worker, workers) for worker in range(workers)]
    together = sorted((share.global_index(i), share.bodies[i]) for share in shares for i in range(len(share)))
    assert together == list(enumerate(made.bodies))
    for share in shares:
        assert all(b == a + 1 or b == 1 for a, b in pairwise(share.turns.tolist()))
        share.save(tmp_path / "share.npz")
        assert Plan.load(tmp_path / "share.npz").digest() == share.digest()
    firsts = [share.due_ns[share.turns == 1] for share in shares]
    np.testing.assert_array_equal(np.sort(np.concatenate(firsts)), made.due_ns[made.turns == 1])


TURNS = st.lists(st.integers(1, 4), min_size=1, max_size=8)


@given(turns=TURNS, end_ms=st.sampled_from([0, 3, 40]), data=st.data())
def test_every_turn_is_asked_or_abandoned_or_beyond_the_end(turns: list[int], end_ms: int, data: st.DataObject) -> None:
    made = talks(turns, pause_ns=2 * MS, end_ns=end_ms * MS)
    state, now, flying = Conversations(made, 0), 0, list[tuple[int, int]]()
    asked, abandoned = [], []
    while (at_ns := state.next_ns) is not None or flying:
        now = max(now, at_ns or 0) + MS
        while taken := state.take(now):
            asked.append(taken[0])
            flying.append((taken[0], taken[1]))
        if not flying:
            break
        index, due_ns = flying.pop(data.draw(st.integers(0, len(flying) - 1)))
        assert due_ns <= now
        lost = state.answered(index, now, ok=data.draw(st.booleans()))
        abandoned += list(lost.turns) if lost else []
    state.close()
    assert len(set(asked)) == len(asked)
    assert set(asked).isdisjoint(abandoned)
    assert len(asked) + len(abandoned) + state.beyond_end == len(made)
    assert end_ms or not state.beyond_end


async def test_a_turn_is_due_a_think_time_after_the_answer_before_it_ended(tmp_path: Path) -> None:
    made = talks([3, 1, 2], pause_ns=3 * MS)
    async with bed(made, tmp_path) as on:
        t0 = time.monotonic_ns() + 5 * MS
        records = await on.play(t0)
    assert [r.turn for r in records] == [1, 2, 3, 1, 1, 2]
    assert [r.due_ns - t0 for r in records if r.turn == 1] == [0, MS, 2 * MS]
    for before, after in pairwise(records):
        if after.turn > 1:
            assert after.due_ns == before.end_ns + 3 * MS
    assert all(r.write_ns >= r.due_ns for r in records)


async def test_first_turns_do_not_wait_for_answers(tmp_path: Path) -> None:
    async with bed(talks([2] * 30, end_ns=100 * MS), tmp_path, "silent") as on:
        t0 = time.monotonic_ns() + 5 * MS
        await issue(on.sender, t0)
        assert len(await on.seen(30)) == 30
        assert time.monotonic_ns() >= t0 + 100 * MS
        issued = on.records(ISSUED)
    assert [r.due_ns - t0 for r in issued] == [index * MS for index in range(30)]
    assert {r.turn for r in issued} == {1}


async def test_what_follows_a_failed_turn_is_on_record_as_abandoned(tmp_path: Path) -> None:
    async with bed(talks([3, 1], pause_ns=2 * MS), tmp_path, "status_500") as on:
        records, issued = await on.play(), on.records(ISSUED)
    assert [r.outcome for r in records] == [
        Outcome.HTTP_5XX, Outcome.ABANDONED, Outcome.ABANDONED, Outcome.HTTP_5XX,
    ]  # fmt: skip
    assert [r.due_ns for r in records[1:3]] == [records[0].end_ns + 2 * MS] * 2
    assert all("an earlier turn" in r.error and not r.sent_ns for r in records[1:3])
    assert [r.index for r in issued] == [0, 3]


async def test_turns_that_would_be_due_after_the_end_are_counted_and_not_asked(tmp_path: Path) -> None:
    async with bed(talks([5, 5], pause_ns=30 * MS, end_ns=50 * MS), tmp_path) as on:
        t0 = time.monotonic_ns()
        records = await on.play(t0)
        (note,) = [note for note in read_records(on.path).notes if note["type"] == "conversations"]
    assert all(r.due_ns < t0 + 50 * MS for r in records)
    assert note["beyond_end"] == 10 - len(records)
    assert 2 < len(records) < 10


async def test_stopping_asks_no_further_turn(tmp_path: Path) -> None:
    async with bed(talks([3, 3], pause_ns=2 * MS), tmp_path, "stall") as on:
        issuing = asyncio.ensure_future(issue(on.sender, time.monotonic_ns()))
        await on.seen(2)
        on.sender.stop("enough")
        await issuing
        await on.sender.drain()
        records: list[RequestRecord] = on.records()
    assert [r.outcome for r in records] == [Outcome.ABORTED] * 2


def test_a_closed_loop_measures_so_many_conversations_after_its_users_first_ones(tokenizer: PromptTokenizer) -> None:
    made = planned(tokenizer, *CLOSED)
    assert (made.loop, made.concurrency, (made.turns == 1).sum()) == ("closed", 3, 40 + 2 * 3)
    assert (made.turns[made.warmup_requests :] == 1).sum() == 40
    assert made.turn(made.warmup_requests) == 1
    assert not made.notes


def test_conversations_that_come_round_again_begin_otherwise_in_all_their_turns(tokenizer: PromptTokenizer) -> None:
    made = planned(tokenizer, *CLOSED, "load.requests=null", "load.duration=10s", "workload.shared_prefix=0.3")
    shares = [made.slice(worker, 3) for worker in range(3)]
    for share in shares:
        assert share.concurrency == 1
        firsts = set()
        for at in range(3 * len(share)):
            said = messages(share.body(at))
            assert int(tokenizer.count_messages([said])[0]) == share.prompt_tokens[at % len(share)]
            before = messages(share.body(at - 1)) if share.turn(at) > 1 else []
            assert said[: len(before)] == before
            firsts.add(said[0]["content"])
        assert len(firsts) == 3 * (share.turns == 1).sum()
    indices = [share.global_index(at) for share in shares for at in range(2 * len(share))]
    assert sorted(indices) == list(range(2 * len(made)))


@given(turns=TURNS, users=st.integers(1, 4), end_ms=st.sampled_from([0, 40]), data=st.data())
def test_a_user_holds_one_conversation_after_another(
    turns: list[int], users: int, end_ms: int, data: st.DataObject
) -> None:
    made = talks(turns, pause_ns=2 * MS, end_ns=end_ms * MS, users=users)
    state, now, flying = Users(made, 0), 0, list[int]()
    asked, abandoned = list[int](), list[int]()
    while not state.is_over(now):
        now = max(now + MS, 0 if flying else state.next_ns or 0)
        while taken := state.take(now):
            assert taken[1] <= now
            if made.turn(taken[0]) > 1:
                assert taken[0] - 1 in asked
            asked.append(taken[0])
            flying.append(taken[0])
        assert len(flying) <= users
        if flying:
            index = flying.pop(data.draw(st.integers(0, len(flying) - 1)))
            lost = state.answered(index, now, ok=data.draw(st.booleans()))
            abandoned += list(lost.turns) if lost else []
    state.close()
    assert len(set(asked)) == len(asked)
    assert set(asked).isdisjoint(abandoned)
    if not end_ms:
        assert sorted(asked + abandoned) == list(range(len(made)))
        assert not state.beyond_end


@pytest.mark.parametrize(("failed_ms", "beyond"), [(199, 0), (200, 2), (299, 2)])
def test_turns_behind_a_failure_that_would_be_due_after_a_closed_loops_end_are_counted_as_such(
    failed_ms: int, beyond: int
) -> None:
    state = Users(talks([3], end_ns=300 * MS, users=1), 0)
    assert state.take(0) == (0, 0)
    abandoned = state.answered(0, failed_ms * MS, ok=False)
    state.close()
    assert state.beyond_end == beyond
    assert len(abandoned.turns if abandoned else ()) == 2 - beyond


async def test_a_closed_loops_user_asks_turn_after_turn_and_then_begins_anew(tmp_path: Path) -> None:
    made = talks([3, 1, 2, 2, 1], pause_ns=3 * MS, users=2)
    async with bed(made, tmp_path) as on:
        records = {record.index: record for record in await on.play(time.monotonic_ns() + 5 * MS)}
    assert [records[index].turn for index in range(9)] == made.turns.tolist()
    ends = {record.end_ns: record for record in records.values()}
    followed = [ends.pop(record.due_ns - 3 * MS) for record in records.values() if record.due_ns - 3 * MS in ends]
    assert len(followed) == len(records) - 2
    for index in range(1, 9):
        if records[index].turn > 1:
            assert records[index].due_ns == records[index - 1].end_ns + 3 * MS


async def test_a_failed_turn_frees_its_user_for_the_next_conversation(tmp_path: Path) -> None:
    async with bed(talks([3, 2], pause_ns=2 * MS, users=1), tmp_path, "status_500") as on:
        records, issued = await on.play(), on.records(ISSUED)
    lost = Outcome.ABANDONED
    assert [r.outcome for r in records] == [Outcome.HTTP_5XX, lost, lost, Outcome.HTTP_5XX, lost]
    assert [r.index for r in issued] == [0, 3]
    assert records[3].due_ns == records[0].end_ns + 100 * MS
