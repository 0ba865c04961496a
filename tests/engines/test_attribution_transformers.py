"""A known delay, put into a stage of a real Transformers server or of the load generator, is found in that stage."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engines.injection import ALONE, Case, Measured, check_alone, check_crowd, in_blocks, in_turn, injected

pytestmark = pytest.mark.transformers

ROUNDS, USERS = 3, 4
SLOW_TOKENIZER, SLOW_FORWARD = len(ALONE) + 1, len(ALONE) + 2
# The tokenizer's delay is long, so that the users wait for it and not for the engine.
CROWD = (
    Case("tokenize", "sleep", ("tokenize",), "last_token", False, 40_000_000),
    Case("forward", "sleep", ("prefill", "decode", "interference"), "last_token", False, 5_000_000),
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Measured, Measured]]:
    """One server: one request in flight, the case changing with each; then four users, a block for each case."""
    with injected("transformers", tmp_path_factory.mktemp("engine"), [*ALONE, *CROWD]) as measure:
        alone = measure(in_turn(range(1, len(ALONE) + 1), ROUNDS), users=1, output_tokens=24, think="30ms")
        blocks = in_blocks([0, SLOW_TOKENIZER, 0, SLOW_FORWARD, 0], 24)
        yield alone, measure(blocks, users=USERS, output_tokens=8, think="0ms")


def test_no_table_is_refused_because_of_delays(runs: tuple[Measured, Measured]) -> None:
    for run in runs:
        assert run.ledger.refused == ()
        assert (run.requests["outcome"] == "ok").all()


@pytest.mark.parametrize("number", range(1, len(ALONE) + 1), ids=[case.name for case in ALONE])
def test_a_delay_with_one_request_in_flight_is_found_in_its_stage_alone(
    runs: tuple[Measured, Measured], number: int
) -> None:
    check_alone(runs[0].find(number), ROUNDS)


@pytest.mark.parametrize("number", [SLOW_TOKENIZER, SLOW_FORWARD], ids=[case.name for case in CROWD])
def test_under_load_what_the_stages_grew_by_is_what_the_whole_grew_by(
    runs: tuple[Measured, Measured], number: int
) -> None:
    check_crowd(runs[1].increase(number, USERS), CROWD[number - len(ALONE) - 1])


def test_a_tokenizer_that_holds_the_event_loop_also_delays_those_who_wait_for_the_loop(
    runs: tuple[Measured, Measured],
) -> None:
    """It runs on the loop: others' requests wait there to be read and parsed, others' outputs to be passed on."""
    grown = runs[1].increase(SLOW_TOKENIZER, USERS)
    assert grown["tokenize"] >= 38_000_000
    assert grown[["network_in", "ingress", "output", "egress"]].sum() >= 2_000_000
