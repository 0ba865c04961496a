"""The load tester run against the null server, whose log says what left when: what calibration and benches share."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gapmeter.analysis.arrays import Ints
from gapmeter.loadgen.fleet import Fleet, make_fleet
from gapmeter.loadgen.plan import PATHS, Plan, Swaps
from gapmeter.records import Outcome, RecordFile, Span, read_records
from gapmeter.records.request import RequestRecord, as_read
from gapmeter.records.stream import parse_answer


@dataclass(frozen=True, slots=True)
class Cores:
    """Where the null server and the generator run. Empty: anywhere."""

    server: tuple[int, ...]
    client: tuple[int, ...]

    @classmethod
    def apart(cls) -> Cores:
        """One core each, the first and the last of this process's."""
        usable = sorted(os.sched_getaffinity(0))
        return cls((usable[0],), (usable[-1],))


@dataclass(frozen=True, slots=True)
class Timing:
    """The null server's schedule."""

    first_ms: float = 50.0
    gap_ms: float = 10.0


@dataclass(frozen=True, slots=True)
class NullRun:
    """What both sides recorded; ``cpu_ns`` of the generator process from just before the start, kernel included."""

    records: list[RequestRecord]
    server: RecordFile
    cpu_ns: int

    @property
    def chunk_us(self) -> float:
        """CPU time over the reads that brought a chunk or more."""
        return self.cpu_ns / sum(len(record.chunk_ns) for record in self.records) / 1e3


@dataclass(frozen=True, slots=True)
class Errors:
    """How far the client's stamps are from the server's log, int64 ns.

    One a request: ``ttft`` and ``e2e`` (the client's, from *due*, minus the log's, from the request's receipt to the
    start of the write) and ``lag`` (due to sent, a new connection's time left out). One a token: ``late``, from the
    start of its write until the client had read it, and the ``stamps`` of its arrival. One a gap: ``itl``,
    how far both gaps differ.
    """

    ttft: Ints
    e2e: Ints
    itl: Ints
    late: Ints
    lag: Ints
    stamps: Ints


class NotMeasured(RuntimeError):
    """The null server or answers of it failed, or are missing: nothing can be said of the client."""


class TooBusy(NotMeasured):
    """The machine's other work drowns what is to be measured."""


@contextlib.contextmanager
def kept_to(cores: Iterable[int]) -> Iterator[None]:
    """This process runs on these cores meanwhile."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def equal_plan(due_ns: Ints, tokens: int, model: str | None = None) -> Plan:
    """An open loop of requests that are all alike, due at these offsets from the start; of the null server's model."""
    count = len(due_ns)
    asked = (
        {"messages": [{"role": "user", "content": "How are you?"}], "ignore_eos": True} if model else {"messages": []}
    )
    body = json.dumps({"model": model or "null", **asked, "stream": True, "max_tokens": tokens}).encode()
    return Plan(
        loop="open", path=PATHS["chat"], due_ns=due_ns.astype(np.int64),
        bodies=[body] * count,
        prompt_tokens=np.ones(count, np.int64), output_tokens=np.full(count, tokens, np.int64),
        prompt_tokens_exact=False, warmup_ns=0, warmup_requests=0, end_ns=0, concurrency=0, think_time_ns=0,
        timeout_ns=60_000_000_000, worker=0, workers=1, id_prefix="null",
        swaps=Swaps(np.full((count, 3), -1, np.int64), ()), notes=(),
    )  # fmt: skip


def poisson(rate: float, count: int, seed: Sequence[int]) -> Ints:
    """Due offsets of a Poisson process."""
    return np.cumsum(np.random.default_rng(seed).exponential(1e9 / rate, count)).astype(np.int64)


def issue(
    cores: Cores, plan: Plan, timing: Timing, *, generator: str = "asyncio", warm: int, measure_cpu: bool = False
) -> NullRun:
    """Issue the plan from one process against a fresh null server. Raises NotMeasured unless every answer is whole."""
    with tempfile.TemporaryDirectory(prefix="gapmeter-null-") as folder:
        path = Path(folder)
        with null_server(cores, timing, log=path, most_tokens=int(plan.output_tokens.max())) as port:
            url = f"http://127.0.0.1:{port}"
            with make_fleet(plan, url, None, path, cores.client, 1, warm=warm, generator=generator) as fleet:
                cpu_ns = _run(fleet, measure_cpu=measure_cpu)
        records = read_records(path / "worker-0.gap").requests()
        (server,) = (read_records(file) for file in path.glob("null-*.gap"))
    failed = [record for record in records if record.outcome is not Outcome.OK]
    if failed or len(records) != len(plan):
        why = f": {failed[0].outcome.name} {failed[0].error}" if failed else ""
        raise NotMeasured(f"{len(records)} of {len(plan)} answers of the null server came, {len(failed)} failed{why}")
    return NullRun(records, server, cpu_ns)


def stamp_errors(run: NullRun) -> Errors:
    """The client's stamps against the server's log, over all requests."""
    logged = departures(run.server)
    ttft, e2e, itl, late, lag, arrived = [], [], [], [], [], []
    for record in run.records:
        received, left = logged[record.request_id]
        stamps = parse_answer(record).token_ns
        ttft.append(stamps[0] - record.due_ns - (left[0] - received))
        e2e.append(stamps[-1] - record.due_ns - (left[-1] - received))
        arrived.append(stamps)
        itl.append(np.abs(np.diff(stamps) - np.diff(left)))
        late.append(parse_answer(as_read(record)).token_ns - left)
        lag.append(record.sent_ns - record.due_ns - (record.connect_end_ns - record.connect_start_ns))
    return Errors(
        np.array(ttft), np.array(e2e), np.concatenate(itl), np.concatenate(late), np.array(lag), np.concatenate(arrived)
    )


def departures(server: RecordFile) -> dict[str, tuple[int, Ints]]:
    """Request id → when its last byte was read, and when the write of each of its tokens began."""
    return {server.client_ids[ref]: found for ref, found in departures_by_ref(server).items()}


def departures_by_ref(server: RecordFile) -> dict[int, tuple[int, Ints]]:
    """As ``departures``, by the server's own number of each request, in order of arrival: a client may send no id."""
    spans = server.spans
    received = spans[spans["code"] == Span.INGRESS]
    read_ns = dict(zip(received["ref"].tolist(), received["start_ns"].tolist(), strict=True))
    writes = spans[spans["code"] == Span.EGRESS]
    writes = writes[np.argsort(writes["ref"], kind="stable")]
    refs, at = np.unique(writes["ref"], return_index=True)
    found: dict[int, tuple[int, Ints]] = {}
    if not len(writes):
        return found
    for ref, own in zip(refs.tolist(), np.split(writes, at[1:]), strict=True):
        sizes = np.diff(np.concatenate(([0], own["n"].astype(np.int64))))  # tokens that left in each write
        found[ref] = read_ns[ref], np.repeat(own["start_ns"], sizes).astype(np.int64)
    return found


@contextlib.contextmanager
def null_server(
    cores: Cores, timing: Timing, *, log: Path | None, most_tokens: int = 4096, port: int = 0, places: int = 0
) -> Iterator[int]:
    """The null server on its cores; yields its port (0: any free one). ``places``: answers at once (0: any number)."""
    command = [sys.executable, "-P", "-m", "gapmeter.servers.null", "--with-parent", "--most-tokens", str(most_tokens)]
    command += ["--first-ms", str(timing.first_ms), "--gap-ms", str(timing.gap_ms), "--port", str(port)]
    command += ["--places", str(places)]
    command += ["--core", str(cores.server[0])] if cores.server else []
    command += ["--log", str(log)] if log is not None else []
    with subprocess.Popen(command, stdout=subprocess.PIPE, process_group=0) as process:  # Ctrl-C is for its parent
        try:
            assert process.stdout is not None
            if not (port_line := process.stdout.readline()):
                raise NotMeasured("the null server ended before it listened")
            yield int(port_line)
        finally:
            process.terminate()
            process.wait()  # after Ctrl-C Popen would give it a quarter of a second; it still writes into ``log``


def cpu_time_ns(pid: int) -> int:
    """User and system time of a process so far. Raises OSError once it has gone."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0])


def _run(fleet: Fleet, *, measure_cpu: bool) -> int:
    """Run to the end; CPU ns of the one process from just before the start, as the scheduler counts it."""
    pid = fleet.processes[0].pid
    before, last = cpu_time_ns(pid), [0]

    def look() -> None:
        with contextlib.suppress(OSError, IndexError):  # it has ended since
            last[0] = cpu_time_ns(pid)

    run_to_end(fleet, look, 0.01 if measure_cpu else 1.0)
    return last[0] - before


def run_to_end(fleet: Fleet, look: Callable[[], None], every_s: float) -> None:
    """Start it and wait for its end, with a look every so often. Raises NotMeasured when a process failed."""
    fleet.start()
    if any(codes := fleet.wait(look, every_s)):
        raise NotMeasured("; ".join(fleet.troubles()) or f"exit codes {codes}")
