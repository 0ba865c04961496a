"""What is told of a run while it goes on means what its summary will say."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from gapmeter_probe.records import HEAD, Kind
from hypothesis import example, given
from hypothesis import strategies as st

from gapmeter.analysis.stats.hdr import at_rank
from gapmeter.records import Outcome, RecordWriter
from gapmeter.records.compression import compress
from gapmeter.records.follow import RecordFollower, RecordTail, count_in, new_histograms
from gapmeter.records.reader import dropped_records
from gapmeter.records.request import FINISHED, ISSUED, RequestRecord, encode
from gapmeter.scenarios.slo import LATENCIES
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


@pytest.mark.parametrize("written_late", [False, True])
def test_a_request_that_is_asked_again_counts_once_by_its_last_attempt(tmp_path: Path, written_late: bool) -> None:
    """``written_late``: an attempt's end stands behind its successor's beginning, as where there is no pause."""
    first = replace(answer(0, (), (), Outcome.HTTP_5XX), due_ns=1)
    second = replace(TWO_AT_ONCE, retry=1, due_ns=6 * MS + 1)
    given_up = [replace(answer(1, (), (), Outcome.REFUSED), retry=k) for k in range(3)]
    begun, failed = [(ISSUED, first)], [(FINISHED, first)]
    again = [(ISSUED, second)]
    events = [*begun, *((again + failed) if written_late else (failed + again))]
    write_records(tmp_path / "under way", events)
    write_records(tmp_path / "over", [*events, (FINISHED, second),
                                      *((code, each) for each in given_up for code in (ISSUED, FINISHED))])  # fmt: skip
    follower = RecordFollower([tmp_path / "under way"], 0)
    follower.poll()
    assert (follower.issued, follower.done, follower.in_flight, follower.failed) == (1, 0, 1, {})
    follower = RecordFollower([tmp_path / "over"], 0)
    follower.poll()
    assert (follower.issued, follower.done, follower.in_flight, follower.failed) == (2, 2, 0, {"refused": 1})
    assert list(follower.recent["ttft"]) == [10.0], "from when its first attempt was due"


def test_tokens_that_came_together_are_one_arrival_also_while_the_run_goes_on(records: Path) -> None:
    follower = RecordFollower([records], 0, whole=True)
    follower.poll()
    assert list(follower.recent["itl"]) == [30.0]
    assert list(follower.recent["ttft"]) == [10.0]


def test_reasoning_that_was_never_sent_is_in_no_tpot_while_the_run_goes_on(tmp_path: Path) -> None:
    usage = {"completion_tokens": 6, "completion_tokens_details": {"reasoning_tokens": 4}}
    ended = answer(0, sse(chat("a"), chat("b"), {"choices": [], "usage": usage}, "[DONE]"), (10, 40, 40, 40))
    write_records(tmp_path / "a", [(FINISHED, ended)])
    follower = RecordFollower([tmp_path / "a"], 0, whole=True)
    follower.poll()
    assert list(follower.recent["tpot"]) == [30.0]


def test_who_may_not_read_for_long_says_as_of_when_it_is_and_reads_on_the_next_time(tmp_path: Path) -> None:
    body = arrived(sse(chat("a" * 2000, 1), chat("b", 2, finish_reason="length"), "[DONE]"), (10, 10, 10))
    ended = [RequestRecord(index=k, request_id=f"r-{k}", outcome=Outcome.OK, due_ns=1, end_ns=k + 1, **body)
             for k in range(1000)]  # fmt: skip
    for name in ("a", "b"):
        write_records(tmp_path / name, [(FINISHED, record) for record in ended])
    follower = RecordFollower([tmp_path / "a", tmp_path / "b"], 0)
    assert 0 < len(follower.poll(1e-9)) == follower.done < 2000
    assert follower.as_of_ns == follower.done // 2, "as far as it came in each"
    while follower.done < 2000:
        assert follower.as_of_ns < 1000
        assert follower.poll(1e-9)
    assert follower.poll(1e-9) == []
    assert follower.as_of_ns > 1000, "all has been read"


def test_answers_beyond_what_can_be_read_are_counted_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock goes on by a second with each look at it, which is one for a block and one before."""
    ended = [replace(answer(k, sse(chat("a" * 2000, finish_reason="length"), "[DONE]"), (10, 10))) for k in range(900)]
    write_records(tmp_path / "a", [(FINISHED, record) for record in [*ended, answer(900, (), (), Outcome.CUT)]])
    seconds = count()
    monkeypatch.setattr(time, "monotonic_ns", lambda: next(seconds) * 10**9)
    follower = RecordFollower([tmp_path / "a"], 0)
    came = follower.poll(100.0)
    assert (len(came), follower.done, follower.unread) == (901, 901, 0)
    follower = RecordFollower([tmp_path / "a"], 0)
    came = follower.poll(10.0)  # so that five blocks are read, of eight or nine
    assert 300 < len(came) < 700
    assert (follower.done, follower.unread, follower.failed) == (901, 901 - len(came), {"cut": 1})


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=1000), st.floats(0, 100, exclude_min=True))
@example(list(range(1, 101)), 99.0)
def test_a_percentile_while_the_run_goes_on_is_that_of_its_summary(values: list[int], percentile: float) -> None:
    follower = RecordFollower([], 0)
    follower.recent["ttft"].extend(values)
    assert follower.percentile("ttft", percentile) == at_rank(np.sort(values), percentile)


def test_every_latency_of_the_last_requests_is_followed(records: Path) -> None:
    follower = RecordFollower([records], 0, whole=True)
    follower.poll()
    assert all(follower.percentile(name, 99) is not None for name in LATENCIES)


@pytest.mark.parametrize(
    ("whole", "counts"),
    [(True, dict.fromkeys(LATENCIES, 1)), (False, dict.fromkeys(LATENCIES, 0) | {"ttft": 2})],  # BROKEN's too
)
def test_histograms_count_what_was_answered_and_read_and_nothing_that_failed(
    records: Path, whole: bool, counts: dict[str, int]
) -> None:
    histograms = new_histograms()
    for answered in RecordFollower([records], 0, whole=whole).poll():
        count_in(histograms, answered)
    assert {name: histogram.get_total_count() for name, histogram in histograms.items()} == counts


def record(index: int, size: int = 10) -> RequestRecord:
    return RequestRecord(
        index=index, request_id=f"r-{index}", worker=0, due_ns=index, outcome=Outcome.OK, body=b"x" * size,
        chunk_ns=np.array([index], np.int64), chunk_bytes=np.array([size], np.uint32),
    )  # fmt: skip


def test_each_poll_gives_what_was_written_since_the_last_one(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.gap"
    tail = RecordTail(path)
    assert tail.poll() == []
    writer = RecordWriter(path, {"role": "generator"})
    assert tail.poll() == []
    writer.blob(ISSUED, encode(record(1)))
    writer.json({"type": "usage"})
    writer.blob(FINISHED, encode(record(1)))
    assert [(code, found.index) for code, found in tail.poll()] == [(ISSUED, 1), (FINISHED, 1)]
    assert tail.poll() == []
    writer.blob(ISSUED, encode(record(2)))
    writer.close()
    assert [(code, found.index) for code, found in tail.poll()] == [(ISSUED, 2)]
    assert tail.poll() == []


def test_the_last_records_are_found_though_the_file_was_compressed_before_the_last_poll(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.gap"
    writer = RecordWriter(path, {})
    writer.blob(ISSUED, encode(record(1)))
    tail = RecordTail(path)
    assert len(tail.poll()) == 1
    writer.blob(FINISHED, encode(record(1)))
    writer.close()
    assert compress(path) != path
    assert not path.exists()
    assert [(code, found.index) for code, found in tail.poll()] == [(FINISHED, 1)]


@pytest.mark.parametrize("size", [100, 5000, 262_000, 262_144, 1_000_000, 9_000_000])
def test_records_of_any_size_are_read_whole(tmp_path: Path, size: int) -> None:
    path = tmp_path / "worker-0.gap"
    writer = RecordWriter(path, {})
    for index in range(30 if size < 10_000 else 3):
        writer.blob(FINISHED, encode(record(index, size + index)))
    found = [found for _, found in RecordTail(path).poll()]
    assert [len(one.body) for one in found] == [size + index for index in range(len(found))]
    assert len(found) == (30 if size < 10_000 else 3)
    writer.close()


def test_a_file_cut_anywhere_gives_its_whole_records_and_never_fails(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "whole.gap", {})
    for index in range(5):
        writer.blob(FINISHED, encode(record(index, 50)))
    writer.close()
    whole = (tmp_path / "whole.gap").read_bytes()
    counts = []
    for length in range(0, len(whole), 3):
        (tmp_path / "cut.gap").write_bytes(whole[:length])
        counts.append(len(RecordTail(tmp_path / "cut.gap").poll()))
    assert counts == sorted(counts)
    assert set(counts) == set(range(6))


def test_records_that_are_half_written_are_read_once_they_are_whole(tmp_path: Path) -> None:
    """What another process may see: the size of a frame before its payload."""
    writer = RecordWriter(tmp_path / "whole.gap", {})
    writer.blob(FINISHED, encode(record(7, 50)))
    writer.close()
    whole = (tmp_path / "whole.gap").read_bytes()
    half = bytearray(whole)
    at = whole.index(b"r-7") - 200
    half[at:] = bytes(len(half) - at)
    path = tmp_path / "growing.gap"
    path.write_bytes(half)
    tail = RecordTail(path)
    assert tail.poll() == []
    shutil.copy(tmp_path / "whole.gap", path)
    assert [found.index for _, found in tail.poll()] == [7]


def test_a_frame_too_short_to_hold_a_record_ends_the_reading(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "broken.gap", {})
    writer.blob(FINISHED, encode(record(7, 50)))
    writer.close()
    with (tmp_path / "broken.gap").open("r+b") as file:
        file.seek(-HEAD.size, 2)  # where the END is
        file.write(HEAD.pack(HEAD.size, Kind.BLOB, FINISHED))
    assert [found.index for _, found in RecordTail(tmp_path / "broken.gap").poll()] == [7]


def test_how_many_records_were_dropped_is_in_the_files_head(tmp_path: Path) -> None:
    assert dropped_records(tmp_path / "none.gap") == 0
    writer = RecordWriter(tmp_path / "worker-0.gap", {})
    writer.close()
    assert dropped_records(tmp_path / "worker-0.gap") == 0


def test_a_rate_is_of_the_time_that_has_been_read_however_long_reading_takes(tmp_path: Path) -> None:
    """A hundred a second for four seconds, of which the next lie beyond the look into the file."""
    now = time.monotonic_ns()
    sent = [replace(record(k), sent_ns=now - 4000 * MS + 10 * MS * k, end_ns=1) for k in range(400)]
    later = [replace(record(k), sent_ns=now + 3_600_000 * MS, end_ns=1) for k in range(400, 500)]
    path = tmp_path / "worker-0.gap"
    write_records(path, [(ISSUED, one) for one in sent + later])
    follower = RecordFollower([path], now - 4000 * MS)
    follower.poll()
    took_s = (follower.as_of_ns - now) / 1e9
    time.sleep(0.5)  # whoever shows it comes later
    assert follower.sent_per_s() == pytest.approx(400 / (4 + took_s), rel=0.01)
    assert follower.issued == 500
