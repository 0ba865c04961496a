"""A known delay, put into a stage of a real engine's server or of the load tester, is found in that stage."""

from __future__ import annotations

import numpy as np
import pytest

from bench.injection import Case, Delayed, Measured, in_blocks, in_turn
from gapmeter.records import Span
from tests.engines.cases import ALONE, CROWDS, on

ROUNDS = 3


@pytest.fixture(scope="module")
def alone(engine: Delayed) -> Measured:
    """One request in flight, the case changing with each."""
    return engine.measure(in_turn(ALONE, ROUNDS), users=1, output_tokens=24, think="30ms")


@pytest.fixture(scope="module")
def crowd(engine: Delayed) -> Measured:
    """Several users at once, a block for each case, and blocks without any delay between them."""
    asked = CROWDS[engine.name]
    slow, other = asked.cases
    blocks = in_blocks([None, slow, None, other, None], asked.block)
    return engine.measure(blocks, users=asked.users, output_tokens=asked.output_tokens, think="0ms")


def test_no_table_is_refused_because_of_delays(alone: Measured, crowd: Measured) -> None:
    for run in (alone, crowd):
        assert run.ledger.refused == ()
        assert (run.requests["outcome"] == "ok").all()


@pytest.mark.parametrize("case", ALONE, ids=[case.name for case in ALONE])
def test_a_delay_with_one_request_in_flight_is_found_in_its_stage_nearly_whole_and_hardly_elsewhere(
    alone: Measured, case: Case
) -> None:
    found = alone.find(case)
    assert found.requests == ROUNDS and found.added_ns >= case.delay_ns, "the delay was not put in: this proves nothing"
    # While the delay lasts, its thread may be kept from the core or the interpreter: for as long as its own clock says.
    kept = {name: found.elsewhere.pop(name, 0.0) for name in ("core_wait", "lock_wait")}
    assert found.owned + sum(kept.values()) >= 0.95
    assert max(found.elsewhere.values(), default=0) <= 0.05
    assert found.owned >= found.true - 0.05, f"{kept} of it was no wait of its thread"
    assert found.seen >= found.true - 0.05


@pytest.mark.parametrize("which", [0, 1], ids=["a slow tokenizer", "a slow engine"])
def test_under_load_what_the_stages_grew_by_is_what_the_whole_grew_by(
    engine: Delayed, crowd: Measured, which: int
) -> None:
    """In a closed loop a delay also shortens the queues behind it: stages may shrink, and still the sum holds."""
    case = CROWDS[engine.name].cases[which]
    grown = crowd.increase(case, CROWDS[engine.name].users)
    assert grown[list(case.stages)].sum() >= 0.95 * case.delay_ns
    assert abs(grown.drop(["e2e", "unexplained"]).sum() - grown["e2e"]) <= 0.01 * case.delay_ns


@on("transformers")
def test_a_tokenizer_that_holds_the_event_loop_also_delays_those_who_wait_for_the_loop(crowd: Measured) -> None:
    """It sleeps on the loop: others wait there to be read, others' outputs to be passed on, and nobody for a core."""
    asked = CROWDS["transformers"]
    slow_tokenizer = asked.cases[0]
    grown = crowd.increase(slow_tokenizer, asked.users)
    assert grown["tokenize"] >= 0.95 * slow_tokenizer.delay_ns
    waits = grown[["accept_wait", "output"]].sum()
    assert waits >= slow_tokenizer.delay_ns
    assert grown["core_wait"] < 0.2 * waits, "what little there is, other programs took"


@on("vllm")
def test_a_tokenizer_in_a_pool_of_one_is_a_queue_and_the_wait_for_it_is_told_from_its_work(crowd: Measured) -> None:
    asked = CROWDS["vllm"]
    slow_tokenizer = asked.cases[0]
    spans = crowd.trace.request_spans[Span.TOKENIZE]
    spans = spans[crowd.of(slow_tokenizer)[spans["request"]]]
    queued, start, end = (np.asarray(spans[name])[np.argsort(spans["start"])] for name in ("queued", "start", "end"))
    assert (start[1:] >= end[:-1]).all(), "one at a time"
    behind = queued[1:] < end[:-1]
    assert np.median((start[1:] - end[:-1])[behind]) < 0.1 * slow_tokenizer.delay_ns, "the next begins at once"
    # How many meet there depends on how long the rest of a request takes on this machine.
    assert behind.mean() >= 0.5
    assert np.median(end - start) < 1.5 * slow_tokenizer.delay_ns
    # Whoever has the cores meanwhile, the wait is for the pool.
    of = np.asarray(spans["request"])
    ledger = crowd.stages("last_token")["tokenize"].to_numpy()[of]
    assert np.median(ledger / np.asarray(spans["end"] - spans["queued"])) >= 0.9


@on("vllm")
def test_a_scheduler_that_keeps_the_interpreter_lock_also_delays_outputs(alone: Measured) -> None:
    """The thread that sends a step's outputs needs the lock that the next step's scheduling holds."""
    waited = alone.stages("first_token")["lock_wait"]
    case = {case.how: case for case in ALONE if case.point == "schedule"}
    busy, asleep = (waited[alone.of(case[how])].min() for how in ("busy", "sleep"))
    assert busy >= asleep + 1_000_000
