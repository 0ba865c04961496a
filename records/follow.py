"""A run while it goes on: counts, rates and percentiles so far, from its record files or its workers' reports."""

from __future__ import annotations

import math
import os
import time
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gapmeter_probe.records import BLOB, FILE_HEADER, HEAD, Kind, Outcome
from hdrh.histogram import HdrHistogram

from gapmeter.records.folder import RunFolder
from gapmeter.records.histograms import nearest_rank, new_histogram
from gapmeter.records.request import ISSUED, RequestRecord, decode
from gapmeter.records.stream import outcome_of, parse_answer
from gapmeter.records.workers import LocustWorkers
from gapmeter.scenarios.plain_file import open_plain
from gapmeter.scenarios.slo import LATENCIES

RATE_WINDOW_NS = 5_000_000_000
_REPORTS_WINDOW_NS = 10_000_000_000  # workers report every three seconds
_RECENT = 1000
_BLOCK = 1 << 18


@dataclass(frozen=True, slots=True)
class Answered:
    """A request that has ended, in ns from when it was due; None for what never came. ``gaps_ns``: between tokens.

    ``tpot_ns``, ``e2e_ns`` and ``gaps_ns`` are of an answer that was read to its end.
    """

    due_ns: int
    outcome: Outcome
    ttft_ns: int | None = None
    tpot_ns: int | None = None
    e2e_ns: int | None = None
    gaps_ns: tuple[int, ...] = ()


class RecordTail:
    """The request records of one generator process, as they appear.

    Reads by system call: a mapping of a file that its writer cuts to length could end this process. The file is kept
    open, so that its last records are found though it has been compressed meanwhile.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = FILE_HEADER.size
        self._fd: int | None = None

    def poll(self) -> list[tuple[int, RequestRecord]]:
        """(code, record) of what has been written since the last call; nothing while the file is not there yet."""
        return [record for block in self.blocks() for record in block]

    def blocks(self) -> Iterator[list[tuple[int, RequestRecord]]]:
        """The same, block by block: a caller that stops between two goes on from there the next time."""
        fd = self._fd if self._fd is not None else self._open()
        size = _BLOCK
        while fd is not None and size:
            block = os.pread(fd, size, self._at)
            came, used, size = _read_block(block, is_last=len(block) < size)
            self._at += used
            yield came

    def _open(self) -> int | None:
        try:
            with open_plain(self._path) as file:
                self._fd = os.dup(file.fileno())
        except FileNotFoundError:
            return None
        weakref.finalize(self, os.close, self._fd)
        return self._fd


def _read_block(block: bytes, *, is_last: bool) -> tuple[list[tuple[int, RequestRecord]], int, int]:
    """The records in a block, the bytes of its whole frames, and how many to read next: 0 when that was all there is.

    Another core may see a frame's size before the rest of it: one whose kind or record is not there yet ends the
    reading, and is read again later.
    """
    records: list[tuple[int, RequestRecord]] = []
    at = 0
    while at + HEAD.size <= len(block):
        size, kind, code = HEAD.unpack_from(block, at)
        if size < (BLOB.size if kind == Kind.BLOB else HEAD.size) or not kind:
            return records, at, 0
        if at + size > len(block):
            return records, at, 0 if is_last else max(size, _BLOCK)
        if kind == Kind.BLOB:
            length = BLOB.unpack_from(block, at)[3]
            try:
                records.append((code, decode(block[at + BLOB.size : at + BLOB.size + length])))
            except ValueError:
                return records, at, 0
        at += size
    return records, at, 0 if is_last else _BLOCK


class RecordFollower:
    """Follows the generators' record files: rates of the last five seconds, percentiles of the last thousand requests.

    ``whole``: read answers to their last token, for gaps, TPOT and E2E, instead of the first one. ``unread``: answers
    that were only counted, since more came than could be read. ``as_of_ns``: what was written by then has been read.
    Requests are counted, not attempts: one that failed has not ended, nor failed, once its next attempt is sent.
    """

    def __init__(self, paths: Iterable[Path], t0_ns: int, *, whole: bool = False) -> None:
        self._tails = [RecordTail(path) for path in paths]
        self._t0, self._whole = t0_ns, whole
        self.as_of_ns = t0_ns
        self._sent: deque[int] = deque()
        self._ended: deque[int] = deque()
        self.recent: dict[str, deque[float]] = {
            name: deque(maxlen=_RECENT * (16 if name == "itl" else 1)) for name in (*LATENCIES, "lag")
        }
        self.failed: Counter[str] = Counter()
        self.issued = self.done = self.unread = 0
        self._failed_as: dict[int, str] = {}  # by index, of its last attempt; "": of an earlier one, not read yet
        self._first_due_ns: dict[int, int] = {}  # by index, of a request that has failed so far

    @property
    def in_flight(self) -> int:
        return self.issued - self.done

    def poll(self, within_s: float = math.inf) -> list[Answered]:
        """Read what has been written since the last call, for at most ``within_s``; returns the requests that ended.

        More may have been written than can be read in that time: in its second half answers are only counted, and
        what is left at its end is read by the next call.
        """
        begun_ns = self.as_of_ns = time.monotonic_ns()
        answered = list[Answered]()
        for number, tail in enumerate(self._tails):
            used = 0.0  # of this file's part of the time
            for block in tail.blocks():
                answered += [ended for code, record in block for ended in self._take(code, record, read=used < 0.5)]
                used = (time.monotonic_ns() - begun_ns) / 1e9 / within_s * len(self._tails) - number
                if block and used >= 1.0:
                    last = block[-1][1]
                    self.as_of_ns = min(self.as_of_ns, last.end_ns or last.sent_ns or last.due_ns)
                    break
        for stamps in (self._sent, self._ended):  # also where nobody asks for rates
            self._drop_older(stamps)
        return answered

    def sent_per_s(self) -> float:
        """Attempts sent a second, over the five before ``as_of_ns``."""
        return self._rate(self._sent)

    def done_per_s(self) -> float:
        """Attempts ended a second, over the five before ``as_of_ns``."""
        return self._rate(self._ended)

    def percentile(self, name: str, percentile: float) -> float | None:
        """A percentile of the last requests' ttft, tpot, e2e, lag or gaps (itl), ms; None when there are none yet."""
        values = sorted(self.recent[name])
        return values[nearest_rank(percentile, len(values)) - 1] if values else None

    def _take(self, code: int, record: RequestRecord, *, read: bool) -> Iterator[Answered]:
        if code == ISSUED:
            self._sent.append(record.sent_ns or record.due_ns)
            if not record.retry:
                self.issued += 1
                return
            self.done -= 1
            if record.index in self._failed_as:
                self.failed -= Counter([self._failed_as.pop(record.index)])
            else:  # the attempt before has ended, and is written behind this
                self._failed_as[record.index] = ""
            return
        if record.outcome is Outcome.ABANDONED:  # never issued
            return
        self.done += 1
        self._ended.append(record.end_ns)
        if not read and record.outcome is Outcome.OK:
            self.unread += 1
            return
        answer = parse_answer(record, first_token_only=not self._whole)
        outcome = outcome_of(record, answer)
        due_ns = self._first_due_ns.pop(record.index, record.due_ns)
        if outcome is not Outcome.OK:
            self._first_due_ns[record.index] = due_ns
            if self._failed_as.pop(record.index, None) != "":
                self._failed_as[record.index] = outcome.name.lower()
                self.failed[outcome.name.lower()] += 1
                yield Answered(due_ns, outcome)
            return
        connecting_ns = record.connect_end_ns - record.connect_start_ns
        self.recent["lag"].append((record.handed_ns - record.due_ns - connecting_ns) / 1e6)
        arrivals_ns = np.unique(answer.token_ns)  # tokens that came together are one arrival
        first_ns, last_ns = int(arrivals_ns[0]), int(arrivals_ns[-1])
        ttft_ns, tpot_ns, e2e_ns, gaps_ns = first_ns - due_ns, None, None, tuple(np.diff(arrivals_ns).tolist())
        self.recent["ttft"].append(ttft_ns / 1e6)
        if self._whole:
            e2e_ns = last_ns - due_ns
            self.recent["e2e"].append(e2e_ns / 1e6)
            self.recent["itl"].extend(gap / 1e6 for gap in gaps_ns)
            sent = (answer.output_tokens or 0) - answer.hidden_tokens
            if sent > 1 and last_ns > first_ns:
                tpot_ns = (last_ns - first_ns) // (sent - 1)
                self.recent["tpot"].append(tpot_ns / 1e6)
        yield Answered(due_ns, outcome, ttft_ns, tpot_ns, e2e_ns, gaps_ns)

    def _drop_older(self, stamps: deque[int]) -> int:
        """Drop stamps from before the last five seconds; returns when those began."""
        since_ns = max(self.as_of_ns - RATE_WINDOW_NS, self._t0)
        while stamps and stamps[0] < since_ns:
            stamps.popleft()
        return since_ns

    def _rate(self, stamps: deque[int]) -> float:
        """Stamps a second in the last five that have been read, or since the start."""
        since_ns = self._drop_older(stamps)
        return sum(at <= self.as_of_ns for at in stamps) / max((self.as_of_ns - since_ns) / 1e9, 1e-9)


class ReportFollower:
    """Follows what the master of a run on several machines keeps: its workers' counts, their histograms added up.

    Their record files come at the end. Everything is as of each worker's last report.
    """

    def __init__(self, requests: Path, t0_ns: int) -> None:
        self._requests = requests
        self.as_of_ns, self.unread = t0_ns, 0
        self._counts: deque[tuple[int, int, int]] = deque([(t0_ns, 0, 0)])  # when, issued, done
        self.histograms = new_histograms()
        self.issued = self.done = 0
        self.failed: Counter[str] = Counter()

    @property
    def in_flight(self) -> int:
        return self.issued - self.done

    def poll(self, within_s: float = math.inf) -> list[Answered]:
        """Read the last report, which is short; single requests are not in it."""
        report = LocustWorkers.read(self._requests)
        if report is None:
            return []
        self.issued = sum(worker.issued for worker in report.workers)
        self.done = sum(worker.finished for worker in report.workers)
        self.failed = Counter(failed=sum(worker.failed for worker in report.workers))
        self.histograms = {name: HdrHistogram.decode(text) for name, text in report.histograms.items()}
        self.as_of_ns = now_ns = time.monotonic_ns()
        self._counts.append((now_ns, self.issued, self.done))
        while len(self._counts) > 2 and self._counts[0][0] < now_ns - _REPORTS_WINDOW_NS:
            self._counts.popleft()
        return []

    def sent_per_s(self) -> float:
        """Between the oldest and the newest report of the last ten seconds."""
        return self._rate(1)

    def done_per_s(self) -> float:
        """As ``sent_per_s``."""
        return self._rate(2)

    def percentile(self, name: str, percentile: float) -> float | None:
        """A percentile over all answers so far, ms; None for what workers do not report."""
        histogram = self.histograms.get(name)
        if histogram is None or not histogram.get_total_count():
            return None
        return float(histogram.get_value_at_percentile(percentile)) / 1e6

    def _rate(self, place: int) -> float:
        first, last = self._counts[0], self._counts[-1]
        return float(last[place] - first[place]) / max((last[0] - first[0]) / 1e9, 1e-9)


Follower = RecordFollower | ReportFollower


def follow_run(folder: RunFolder, t0_ns: int, *, whole: bool) -> Follower:
    """Follow a load that has begun; ``whole``: see RecordFollower. Workers elsewhere are followed by their master."""
    if (folder.requests / "master.json").exists():
        return ReportFollower(folder.requests, t0_ns)
    return RecordFollower(folder.record_files(folder.requests), t0_ns, whole=whole)


def new_histograms() -> dict[str, HdrHistogram]:
    """Empty ones, of each of LATENCIES."""
    return {name: new_histogram() for name in LATENCIES}


def count_in(histograms: Mapping[str, HdrHistogram], answered: Answered) -> None:
    """Add a request's values, nothing of one that failed."""
    values = {"ttft": answered.ttft_ns, "tpot": answered.tpot_ns, "e2e": answered.e2e_ns}
    for name, value_ns in values.items():
        if value_ns is not None:
            histograms[name].record_value(value_ns)
    for gap_ns in answered.gaps_ns:
        histograms["itl"].record_value(gap_ns)


def phase(now_ns: int, t0_ns: int, warmup_ns: int, end_ns: int) -> str:
    """warm-up, load, or drain; ``end_ns``: when the last request is due after ``t0_ns``, 0 where that is not known."""
    if now_ns - t0_ns < warmup_ns:
        return "warm-up"
    return "drain" if end_ns and now_ns > t0_ns + end_ns else "load"
