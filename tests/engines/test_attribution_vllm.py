"""A known delay, put into a stage of a real vLLM or of the load generator, is found in that stage."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from gapmeter.records import Span
from tests.engines.injection import ALONE, Case, Measured, check_alone, check_crowd, in_blocks, in_turn, injected

pytestmark = pytest.mark.vllm

ROUNDS, USERS = 3, 8
SLOW_TOKENIZER, SLOW_SCHEDULER = len(ALONE) + 1, len(ALONE) + 2
# The tokenizer's delay is long, so that the users wait for it and not for the engine.
TOKENIZING_NS = 60_000_000
CROWD = (
    Case("tokenize", "sleep", ("tokenize",), "last_token", False, TOKENIZING_NS),
    Case("schedule", "busy", ("scheduling",), "last_token", False, 5_000_000),
)
NUMBER = {case.name: number for number, case in enumerate(ALONE, 1)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Measured, Measured]]:
    """One server: one request in flight, the case changing with each; then eight users, a block for each case."""
    with injected("vllm", tmp_path_factory.mktemp("engine"), [*ALONE, *CROWD]) as measure:
        alone = measure(in_turn(range(1, len(ALONE) + 1), ROUNDS), users=1, output_tokens=24, think="30ms")
        blocks = in_blocks([0, SLOW_TOKENIZER, 0, SLOW_SCHEDULER, 0], 32)
        yield alone, measure(blocks, users=USERS, output_tokens=4, think="0ms")


def test_no_table_is_refused_because_of_delays(runs: tuple[Measured, Measured]) -> None:
    for run in runs:
        assert run.ledger.refused == ()
        assert (run.requests["outcome"] == "ok").all()


@pytest.mark.parametrize("number", range(1, len(ALONE) + 1), ids=[case.name for case in ALONE])
def test_a_delay_with_one_request_in_flight_is_found_in_its_stage_alone(
    runs: tuple[Measured, Measured], number: int
) -> None:
    check_alone(runs[0].find(number), ROUNDS)


@pytest.mark.parametrize("number", [SLOW_TOKENIZER, SLOW_SCHEDULER], ids=[case.name for case in CROWD])
def test_under_load_what_the_stages_grew_by_is_what_the_whole_grew_by(
    runs: tuple[Measured, Measured], number: int
) -> None:
    check_crowd(runs[1].increase(number, USERS), CROWD[number - len(ALONE) - 1])


def test_a_tokenizer_in_a_pool_of_one_is_a_queue_and_the_wait_for_it_is_told_from_its_work(
    runs: tuple[Measured, Measured],
) -> None:
    crowd = runs[1]
    assert crowd.increase(SLOW_TOKENIZER, USERS)["tokenize"] >= 2 * TOKENIZING_NS
    assert crowd.trace is not None
    spans = crowd.trace.request_spans
    spans = spans[(spans["code"] == Span.TOKENIZE) & (crowd.case[spans["request"]] == SLOW_TOKENIZER)]
    assert np.median(spans["start"] - spans["queued"]) >= TOKENIZING_NS
    assert np.median(spans["end"] - spans["start"]) < 2 * TOKENIZING_NS


def test_a_scheduler_that_keeps_the_interpreter_lock_also_delays_outputs(runs: tuple[Measured, Measured]) -> None:
    """The thread that sends a step's outputs needs the lock that the next step's scheduling holds."""
    alone = runs[0]
    output = alone.stages("first_token")["output"]
    busy, asleep = (output[alone.case == NUMBER[f"schedule, {how}"]].min() for how in ("busy", "sleep"))
    assert busy >= asleep + 1_000_000
