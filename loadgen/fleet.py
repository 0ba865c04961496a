"""Several generator processes issuing one plan from one start."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gapmeter.loadgen.plan import Plan
from gapmeter.loadgen.worker import API_KEY, Exit, Locustfile, Spec
from gapmeter.records.tail import dropped_records

_START_AHEAD_NS = 200_000_000
_LEAVE_S = 5.0
_MOST_WARM = 64
# What issues the plan, by load.generator: a module that runs as a process and takes the same spec as loadgen.worker.
GENERATORS = {"asyncio": "gapmeter.loadgen.worker", "locust": "gapmeter.loadgen.locust"}


class Unreachable(RuntimeError):
    """The target refused the connections that are opened before the start."""


class NotStarted(RuntimeError):
    """A generator process ended before it was ready; the text is the last line that it said."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Generator processes that are ready to start; each writes one of ``record_paths``."""

    processes: tuple[subprocess.Popen[bytes], ...]
    record_paths: tuple[Path, ...]
    log_paths: tuple[Path, ...]
    ahead_ns: int = _START_AHEAD_NS

    def start(self, t0_ns: int | None = None) -> int:
        """Give all the same start, without one a little ahead; returns it (CLOCK_MONOTONIC ns)."""
        t0_ns = time.monotonic_ns() + self.ahead_ns if t0_ns is None else t0_ns
        for process in self.processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has died since, as its exit code will say
                process.stdin.write(b"%d\n" % t0_ns)
                process.stdin.flush()
        return t0_ns

    def wait(self, look: Callable[[], None], every_s: float) -> list[int]:
        """Exit codes, once all have ended; ``look`` is called while they run, and once after.

        May be called again after an exception from ``look``, or KeyboardInterrupt, has left it.
        """
        while running := [process for process in self.processes if process.poll() is None]:
            look()
            with contextlib.suppress(subprocess.TimeoutExpired):
                running[0].wait(every_s)
        look()
        return [process.returncode for process in self.processes]

    def stop(self) -> None:
        """Ask all to record what is in flight as aborted, and leave."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)

    @property
    def dropped(self) -> int:
        """Records that did not fit on the disk."""
        return sum(map(dropped_records, self.record_paths))

    def troubles(self) -> list[str]:
        """A sentence for every process that neither finished nor was stopped."""
        return [
            f"generator process {number} {_why(process.returncode, log)}"
            for number, (process, log) in enumerate(zip(self.processes, self.log_paths, strict=True))
            if process.returncode not in (None, Exit.DONE, Exit.STOPPED)
        ]


@contextlib.contextmanager
def make_fleet(
    plan: Plan, url: str, api_key: str | None, folder: Path, cores: Sequence[int], processes: int,
    *, warm: int | None = None, generator: str = "asyncio", locustfile: Locustfile | None = None,
) -> Iterator[Fleet]:  # fmt: skip
    """Generator processes with their slices of the plan, connected and waiting; none is left when the block ends.

    Each gets one of ``cores`` in turn, or all of them where there are fewer cores than processes. A closed loop gets no
    more processes than users. ``warm``: connections that each opens ahead; ``generator``: one of GENERATORS;
    ``locustfile``: as in Spec. Raises Unreachable when the target refuses them, NotStarted when a process ends before
    it is ready for another reason, OSError when files cannot be written.
    """
    if plan.loop == "closed":
        processes = min(processes, plan.concurrency)
    started: list[subprocess.Popen[bytes]] = []
    records = [folder / f"worker-{k}.gap" for k in range(processes)]
    logs = [folder / f"worker-{k}.log" for k in range(processes)]
    try:
        for k in range(processes):
            part = plan.slice(k, processes) if processes > 1 else plan
            mine = (cores[k % len(cores)],) if len(cores) >= processes else tuple(cores)
            plan_path = str(records[k].with_suffix(".plan.npz"))
            spec = Spec(url, plan_path, str(records[k]), mine, _warm(part, warm), locustfile)
            started.append(_spawn(GENERATORS[generator], part, spec, api_key, logs[k]))
        for process, log in zip(started, logs, strict=True):
            _await_ready(process, log)
        yield Fleet(tuple(started), tuple(records), tuple(logs))
    finally:
        end_processes(started)
        for log in logs:
            if log.exists() and not log.stat().st_size:
                log.unlink()


def _warm(plan: Plan, connections: int | None) -> int:
    """Connections to open ahead: as given, or a closed loop's users, or enough for an open loop's first moments."""
    if connections is not None:
        return connections
    return max(1, min(plan.concurrency if plan.loop == "closed" else 32, len(plan), _MOST_WARM))


def _spawn(module: str, part: Plan, spec: Spec, api_key: str | None, log: Path) -> subprocess.Popen[bytes]:
    spec_path = Path(spec.record).with_suffix(".json")
    part.save(Path(spec.plan))
    spec.write(spec_path)
    environment = {name: value for name, value in os.environ.items() if name != API_KEY}
    if api_key:
        environment[API_KEY] = api_key
    with log.open("wb") as errors:
        # A process group of its own: Ctrl-C reaches the parent, which decides.
        return subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(spec_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=errors, env=environment, process_group=0,
        )  # fmt: skip


def _await_ready(process: subprocess.Popen[bytes], log: Path) -> None:
    assert process.stdout is not None
    if process.stdout.readline() == b"ready\n":
        return
    code = process.wait()
    said = last_line(log)
    if code == Exit.UNREACHABLE:
        raise Unreachable(said)
    raise NotStarted(said or f"a generator process ended with exit code {code}")


def _why(code: int, log: Path) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"failed: {last_line(log) or f'exit code {code}'}"


def last_line(log: Path) -> str:
    """The last line that a process has written, "" for none."""
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    return next((line for line in reversed(lines) if line.strip()), "")


def end_processes(processes: list[subprocess.Popen[bytes]]) -> None:
    """End them all: ask first (SIGTERM), then kill."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + _LEAVE_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
