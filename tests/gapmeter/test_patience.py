"""A run ends later than asked only where its requests are worth too little, whatever its latencies say."""

from __future__ import annotations

import heapq
import time
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from gapmeter.records import Outcome, RecordWriter
from gapmeter.records.follow import RecordTail
from gapmeter.records.request import FINISHED, ISSUED, RequestRecord, encode
from gapmeter.scenarios.model import Scenario
from gapmeter.study.load import read_on
from gapmeter.study.patience import LOOKS, Patience, shortage
from gapmeter.study.resolve import resolve
from tests.kit.streams import arrived, chat, sse

MS = 1_000_000
S = 1000 * MS
T0 = 10**12
PIECES = sse(chat("a", 1), chat("b", 2, finish_reason="length"), "[DONE]")


def test_a_look_has_read_all_that_was_written_by_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time that the clock is read, a request has just left that was due then."""
    due_ns, seen = count(T0), list[tuple[int, RequestRecord]]()
    writers = [RecordWriter(tmp_path / name, {}) for name in ("a", "b")]

    def now() -> int:
        at_ns = next(due_ns)
        for writer in writers:
            writer.blob(ISSUED, encode(RequestRecord(index=0, request_id="r", due_ns=at_ns)))
        return at_ns

    tails = [RecordTail(Path(writer.path)) for writer in writers]
    monkeypatch.setattr(time, "monotonic_ns", now)
    for _ in range(3):
        as_of_ns = read_on(tails, seen)
        assert sorted(record.due_ns for _, record in seen)[-2:] == [as_of_ns, as_of_ns]


def asked(*overrides: str) -> Scenario:
    slo = 'slo=["ttft p99 <= 50 ms"]'
    return resolve("smoke", [slo, "load.requests=null", "load.duration=20s", "load.patience=50s", *overrides])


def answered(index: int, due_ms: float, ttft_ms: float) -> RequestRecord:
    due_ns = T0 + round(due_ms * MS)
    end_ns = due_ns + round(ttft_ms * MS)
    return RequestRecord(
        index=index, request_id=f"r-{index}", worker=0, due_ns=due_ns, sent_ns=due_ns, end_ns=end_ns, status=200,
        outcome=Outcome.OK, output_tokens=2, **arrived(PIECES, [end_ns] * len(PIECES)),
    )  # fmt: skip


def ends_after_s(
    ttfts_ms: np.ndarray, *overrides: str, every_ms: float = 20.0, users: int | None = None
) -> float | None:
    """Where a load of requests so far apart ends, asked four times a second; None: at its patience.

    ``users``: a closed loop of so many, each of whom asks so long after an answer.
    """
    scenario = asked(*overrides)
    patience = Patience(scenario, T0, 0)
    free_ms, records = [0.0] * (users or 0), []
    for at, ttft in enumerate(ttfts_ms):
        due_ms = heapq.heappop(free_ms) if users else at * every_ms
        records.append(answered(at, due_ms, ttft))
        heapq.heappush(free_ms, due_ms + ttft + every_ms)
    events = [
        (at_ns, code, record)
        for record in records
        for at_ns, code in ((record.sent_ns, ISSUED), (record.end_ns, FINISHED))
    ]
    events.sort(key=lambda event: event[0])
    seen: list[tuple[int, RequestRecord]] = []
    for now_ns in range(T0, T0 + 50 * S, S // 4):
        while events and events[0][0] <= now_ns:
            _, code, record = events.pop(0)
            seen.append((code, record))
        if (until_ns := patience.until_ns(seen, now_ns)) is not None:
            return (until_ns - T0) / 1e9
    return None


def independent(count: int) -> np.ndarray:
    return np.random.default_rng(5).exponential(10, count)


def test_a_load_whose_requests_are_worth_enough_ends_when_it_was_asked_to() -> None:
    assert ends_after_s(independent(2500)) == 20


def test_the_verdict_does_not_decide_when_a_load_ends() -> None:
    assert ends_after_s(independent(2500) + 1000) == 20


def test_a_load_of_fewer_requests_goes_on_to_the_look_at_which_there_are_enough() -> None:
    ended = ends_after_s(independent(830), every_ms=60)
    assert ended in [20 + look * 10 for look in range(1, LOOKS - 1)]


@pytest.mark.parametrize(("errors", "looks"), [("5 %", {20}), ("1 %", {30, 40}), ("0.1 %", {None})])
def test_a_load_goes_on_until_there_are_as_many_requests_as_a_limit_of_errors_takes(
    errors: str, looks: set[float | None]
) -> None:
    slo = f'slo=["ttft p90 <= 1 s", "errors <= {errors}"]'
    assert ends_after_s(independent(830), slo, every_ms=60) in looks


def test_a_load_that_comes_in_long_bursts_lasts_as_long_as_its_patience() -> None:
    bursts = np.repeat(np.random.default_rng(1).exponential(10, 25), 100) + independent(2500) / 10
    assert ends_after_s(bursts) is None


def test_a_slow_start_that_the_analysis_leaves_out_makes_no_load_longer() -> None:
    start = np.where(np.arange(2500) < 150, 40.0, 0.0)
    assert ends_after_s(independent(2500) + start, "load.warmup=0") is None
    assert ends_after_s(independent(2500) + start, "load.warmup=auto") == 20


@pytest.mark.parametrize(("users", "looks"), [(1, {None}), (2, {30, 40}), (8, {20, 30})])
def test_users_who_wait_for_their_answers_end_at_the_look_at_which_there_are_enough(
    users: int, looks: set[float | None]
) -> None:
    assert ends_after_s(independent(4000), every_ms=140, users=users) in looks


def test_a_look_waits_for_the_answers_that_belong_to_it() -> None:
    scenario = asked()
    patience = Patience(scenario, T0, 0)
    waits = independent(1000)
    done = [(FINISHED, answered(at, at * 20, ttft)) for at, ttft in enumerate(waits)]
    late = answered(1000, 19_990, 3000)
    seen = [*done, (ISSUED, replace(late))]
    assert patience.until_ns(seen, T0 + 21 * S) is None
    seen.append((FINISHED, late))
    assert patience.until_ns(seen, T0 + 23 * S) == T0 + 20 * S


def test_a_look_waits_for_what_is_to_be_asked_again() -> None:
    patience = Patience(asked("load.retries=2"), T0, 0)
    done = [(FINISHED, answered(at, at * 20, ttft)) for at, ttft in enumerate(independent(1000))]
    failed = replace(answered(1000, 19_990, 5), outcome=Outcome.HTTP_5XX, status=503)
    seen = [*done, (ISSUED, replace(failed)), (FINISHED, failed)]
    assert patience.until_ns(seen, T0 + 21 * S) is None
    again = replace(answered(1000, 20_495, 5), retry=1)
    seen += [(ISSUED, replace(again)), (FINISHED, again)]
    assert patience.until_ns(seen, T0 + 22 * S) == T0 + 20 * S


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (("load.rate=1",), "14 min at 1 req/s"),
        (("load.rate=16",), "at 16 req/s"),
        (("load.rate=2", "load.duration=20s", "load.patience=20s", 'slo=["ttft p95 <= 50 ms"]'), "159 requests (80 s"),
        (("load.rate=64",), ""),
        (("load.rate=1", "load.duration=20m", "load.patience=30m"), ""),
        (("load.rate=2", 'slo=["ttft p50 <= 50 ms"]'), ""),
        (("load.rate=1", 'slo=["itl p99 <= 50 ms"]'), ""),
        (("load.rate=1", "workload.kind=conversation"), ""),
        (
            ("load.rate=2", 'slo=["ttft p50 <= 50 ms", "errors <= 1 %"]'),
            "errors <= 1 % is met only with about 368 requests (4",
        ),
        (("load.rate=8", 'slo=["errors <= 1 %"]'), ""),
        (("load.rate=1", 'slo=["errors <= 100 %"]'), ""),
    ],
)
def test_a_load_too_short_for_its_slos_is_told_so_beforehand(overrides: tuple[str, ...], told: str) -> None:
    said = shortage(asked(*overrides))
    assert told in said
    assert bool(said) is bool(told)
