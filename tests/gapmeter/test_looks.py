"""What a capacity trial's looks count is what its analysis counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gapmeter.analysis.capacity.trial import Count
from gapmeter.records import Outcome
from gapmeter.records.request import FINISHED, ISSUED, RequestRecord
from gapmeter.scenarios.slo import Slo
from gapmeter.study.capacity import TrialMonitor
from tests.kit.streams import arrived, chat, sse

MS = 1_000_000
SLOS = (Slo(metric="errors", percentile=None, limit_ns=None, limit_share=0.01, text="errors <= 1 %"),)


def answered(index: int, due_ms: int, *pieces: bytes, retry: int = 0, outcome: Outcome = Outcome.OK) -> RequestRecord:
    end_ns = (due_ms + 50) * MS
    return RequestRecord(
        index=index, request_id=f"r-{index}.{retry}", worker=0, due_ns=due_ms * MS, sent_ns=due_ms * MS, end_ns=end_ns,
        outcome=outcome, status=200, retry=retry, output_tokens=2, **arrived(pieces, [end_ns] * len(pieces)),
    )  # fmt: skip


def well(index: int, due_ms: int, retry: int = 0) -> RequestRecord:
    return answered(index, due_ms, *sse(chat("a", 1), chat("b", 2, finish_reason="length"), "[DONE]"), retry=retry)


def counted(events: Sequence[tuple[int, RequestRecord]], at: int) -> Count | None:
    """What a look after ``at`` requests saw; None where there was none."""
    seen: list[Count] = []

    def enough(_: int, counts: Sequence[Count]) -> bool:
        seen.extend(counts)
        return True

    monitor = TrialMonitor(SLOS, (at, 1000), 10.0, 0, enough)
    assert monitor.is_enough([(code, replace(record)) for code, record in events]) is bool(seen)  # it lets answers go
    return seen[0] if seen else None


def test_an_answer_that_breaks_off_in_an_error_has_failed_although_tokens_came() -> None:
    broken = answered(1, 200, *sse(chat("a", 1), {"error": {"message": "the engine has died"}}))
    found = counted([(FINISHED, well(0, 100)), (FINISHED, broken)], at=2)
    assert found is not None and (found.over, found.count) == (1, 2)


def test_a_request_that_is_asked_again_counts_once_by_its_last_answer_and_from_its_first_due_time() -> None:
    failed = answered(1, 200, outcome=Outcome.HTTP_5XX)
    events = [(ISSUED, well(1, 200)), (FINISHED, failed), (FINISHED, well(0, 210)), (ISSUED, well(1, 400, retry=1))]
    assert counted(events, at=1) is None, "request 0 was due after one that is still in flight"
    found = counted([*events, (FINISHED, well(1, 400, retry=1))], at=2)
    assert found is not None and (found.over, found.count) == (0, 2)


def test_turns_that_were_never_asked_do_not_count() -> None:
    abandoned = answered(1, 200, outcome=Outcome.ABANDONED)
    assert counted([(FINISHED, well(0, 100)), (FINISHED, abandoned)], at=2) is None


def test_a_server_that_accepts_no_connection_is_gone_and_one_that_fails_or_is_slow_is_not() -> None:
    for last, gone in ((Outcome.REFUSED, True), (Outcome.HTTP_5XX, False), (Outcome.TIMEOUT, False)):
        refused = [answered(at, 100 + at, outcome=Outcome.REFUSED) for at in range(19)]
        monitor = TrialMonitor(SLOS, (40, 80), 10.0, 0, lambda *_: False)
        seen = [(FINISHED, record) for record in refused]
        monitor.is_enough(seen)
        assert not monitor.is_refused(), "too few"
        monitor.is_enough([*seen, (FINISHED, answered(19, 119, outcome=last))])
        assert monitor.is_refused() is gone


def test_a_server_that_died_in_the_middle_of_a_trial_is_gone_and_one_that_came_back_is_not() -> None:
    seen = [(FINISHED, well(at, 100 + at)) for at in range(20)]
    seen += [(FINISHED, answered(at, 100 + at, outcome=Outcome.REFUSED)) for at in range(20, 23)]
    monitor = TrialMonitor(SLOS, (40, 80), 10.0, 0, lambda *_: False)
    monitor.is_enough(seen[:22])
    assert not monitor.is_refused(), "too few"
    monitor.is_enough(seen)
    assert monitor.is_refused()
    monitor.is_enough([*seen, (FINISHED, well(23, 123))])
    assert not monitor.is_refused()
