"""What is told of a run while it goes on means what its summary will say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from gapmeter.loadgen.locust.totals import Totals
from gapmeter.records import Outcome
from gapmeter.records.follow import RecordFollower
from gapmeter.records.request import FINISHED, ISSUED, RequestRecord
from gapmeter.records.tail import RecordTail
from tests.kit.loads import write_records
from tests.kit.streams import arrived, chat, sse

MS = 1_000_000
Event = tuple[int, RequestRecord]


def answer(index: int, pieces: Sequence[bytes], at_ms: Sequence[int], outcome: Outcome = Outcome.OK) -> RequestRecord:
    """Due and sent at 0; a piece arrives at each of ``at_ms``."""
    return RequestRecord(
        index=index, request_id=f"r-{index}", worker=0, due_ns=1, sent_ns=1, end_ns=100 * MS, outcome=outcome,
        **arrived(pieces, [at * MS + 1 for at in at_ms]),
    )  # fmt: skip


TWO_AT_ONCE = answer(0, sse(chat("a", 1), chat("b", 2), chat("c", 3, finish_reason="length")), (10, 10, 40))
BROKEN = answer(1, sse(chat("a", 1), {"error": {"message": "the engine has died"}}), (10, 20))
EMPTY = answer(2, sse(chat(finish_reason="stop"), "[DONE]"), (10, 10))
ABANDONED = answer(3, (), (), Outcome.ABANDONED)
EVENTS: list[Event] = [(code, record) for record in (TWO_AT_ONCE, BROKEN, EMPTY) for code in (ISSUED, FINISHED)]
EVENTS.append((FINISHED, ABANDONED))


@pytest.fixture
def records(tmp_path: Path) -> Path:
    path = tmp_path / "worker-0.gap"
    write_records(path, EVENTS)
    return path


@pytest.mark.parametrize("whole", [True, False])
def test_a_follower_counts_what_was_asked_and_its_failures_by_class(records: Path, whole: bool) -> None:
    follower = RecordFollower([records], 0, whole=whole)
    ended = follower.poll()
    assert (follower.issued, follower.done, follower.in_flight) == (3, 3, 0)
    broken = {"malformed": 1} if whole else {}  # who reads no further than the first token has not seen the error
    assert follower.failed == broken | {"wrong_length": 1}
    assert [each.outcome for each in ended][-1] is Outcome.WRONG_LENGTH


def test_tokens_that_came_together_are_one_arrival_also_while_the_run_goes_on(records: Path) -> None:
    follower = RecordFollower([records], 0, whole=True)
    follower.poll()
    assert list(follower.recent["itl"]) == [30.0]
    assert list(follower.recent["ttft"]) == [10.0]


def test_a_workers_totals_count_and_measures_by_the_same_rules(records: Path) -> None:
    totals = Totals()
    totals.take(RecordTail(records).poll())
    assert (totals.issued, totals.finished, totals.failed) == (3, 3, 2)
    counts = [totals.histograms[name].get_total_count() for name in ("ttft", "itl", "tpot", "e2e")]
    assert counts == [1, 1, 1, 1]
