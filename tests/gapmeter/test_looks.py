"""What a capacity trial's looks count is what its analysis counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from gapmeter.analysis.capacity.trial import Count
from gapmeter.records import Outcome
from gapmeter.records.request import FINISHED, ISSUED, RequestRecord
from gapmeter.scenarios.slo import Slo
from gapmeter.servers.launch import free_port
from gapmeter.study import target
from gapmeter.study.capacity import TrialMonitor
from tests.kit.servers import answering
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


def counted(events: Sequence[tuple[int, RequestRecord]], at: int, retries: int = 1) -> Count | None:
    """What a look after ``at`` requests saw; None where there was none."""
    seen: list[Count] = []

    def enough(_: int, counts: Sequence[Count]) -> bool:
        seen.extend(counts)
        return True

    monitor = TrialMonitor(SLOS, (at, 1000), 10.0, 0, enough, retries)
    assert monitor.is_enough([(code, replace(record)) for code, record in events]) is bool(seen)  # it lets answers go
    return seen[0] if seen else None


def test_an_answer_that_breaks_off_in_an_error_has_failed_although_tokens_came() -> None:
    broken = answered(1, 200, *sse(chat("a", 1), {"error": {"message": "the engine has died"}}))
    found = counted([(FINISHED, well(0, 100)), (FINISHED, broken)], at=2)
    assert (found.over, found.count) == (1, 2)


def test_a_request_that_is_asked_again_counts_once_by_its_last_answer_and_from_its_first_due_time() -> None:
    failed = answered(1, 200, outcome=Outcome.HTTP_5XX)
    events = [(ISSUED, well(1, 200)), (FINISHED, failed), (FINISHED, well(0, 210)), (ISSUED, well(1, 400, retry=1))]
    assert counted(events, at=1) is None, "request 0 was due after one that is still in flight"
    found = counted([*events, (FINISHED, well(1, 400, retry=1))], at=2)
    assert (found.over, found.count) == (0, 2)


def test_a_request_that_waits_to_be_asked_again_has_not_failed_yet() -> None:
    other = [(ISSUED, well(1, 200)), (FINISHED, well(1, 200))]
    events = [(ISSUED, well(0, 100)), (FINISHED, answered(0, 100, outcome=Outcome.HTTP_5XX)), *other]
    assert counted(events, at=1) is None
    found = counted(events, at=1, retries=0)
    assert (found.over, found.count) == (1, 1)
    found = counted([*events, (FINISHED, answered(0, 400, retry=1, outcome=Outcome.HTTP_5XX))], at=2)
    assert (found.over, found.count) == (1, 2)
    malformed = answered(0, 100, outcome=Outcome.MALFORMED)
    assert counted([(FINISHED, malformed), *other], at=2) is not None, "nobody asks that again"


def test_turns_that_were_never_asked_do_not_count() -> None:
    abandoned = answered(1, 200, outcome=Outcome.ABANDONED)
    assert counted([(FINISHED, well(0, 100)), (FINISHED, abandoned)], at=2) is None


@pytest.mark.parametrize(
    ("last", "suspect"),
    [
        ([Outcome.REFUSED] * 3, True),
        ([Outcome.OK, Outcome.CUT, Outcome.HTTP_5XX, Outcome.REFUSED], True),
        ([Outcome.OK, *[Outcome.REFUSED] * 2], False),
        ([*[Outcome.REFUSED] * 9, Outcome.OK], False),
        ([Outcome.TIMEOUT] * 3, False),
        ([Outcome.HTTP_4XX] * 3, False),
        ([], False),
    ],
)
def test_a_server_whose_last_requests_failed_like_those_of_a_dead_one_is_asked_whether_it_is_there(
    last: list[Outcome], suspect: bool
) -> None:
    monitor = TrialMonitor(SLOS, (40, 80), 10.0, 0, lambda *_: False)
    monitor.is_enough([
        (FINISHED, well(at, 100 + at) if outcome is Outcome.OK else answered(at, 100 + at, outcome=outcome))
        for at, outcome in enumerate(last)
    ])  # fmt: skip
    assert monitor.ends_in_failures() is suspect


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n", "it answers 502 Bad Gateway"),
        (b"HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n", ""),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", ""),
        (b"", ""),
    ],
    ids=["a proxy before none", "one that fails", "one that lists no models", "one that is busy"],
)
def test_a_server_that_gives_any_answer_of_its_own_is_there(
    answer: bytes, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "_ASK_AGAIN_S", (0.01,))
    monkeypatch.setattr(target, "_ANSWER_S", 0.5)
    with answering(answer) as url:
        assert target.why_gone(url, None) == why


def test_where_nobody_listens_no_server_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "_ASK_AGAIN_S", (0.01,))
    assert target.why_gone(f"http://127.0.0.1:{free_port()}", None) == "Connection refused"
