"""What issues a plan: generator processes here, or workers elsewhere through a master process here."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path

from gapmeter.loadgen.generator import NO_LOCUST, Exit, Locustfile, Spec
from gapmeter.loadgen.plan import Plan
from gapmeter.records.process import API_KEY, allow_many_files, text_of

_START_AHEAD_NS = 200_000_000
_WORKERS_AHEAD_NS = 3_000_000_000  # the start must have reached every worker before it comes
_LEAVE_S = 5.0
_STOPPED_NS = 5_000_000_000
_LOOK_MS = 250
_MOST_WARM = 64


class Unreachable(RuntimeError):
    """The target refused the connections that are opened before the start."""


class NotStarted(RuntimeError):
    """A generator process ended before it was ready; the text is the last line that it said."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Generator processes that are ready to start; each writes one of ``record_paths``. ``stopped`` is set by us."""

    processes: tuple[subprocess.Popen[bytes], ...]
    record_paths: tuple[Path, ...]
    log_paths: tuple[Path, ...]
    ahead_ns: int = _START_AHEAD_NS
    stopped: threading.Event = field(default_factory=threading.Event)

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
        self.stopped.set()
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)

    def troubles(self) -> list[str]:
        """A sentence for every process that neither finished nor was stopped by us."""
        well = (None, Exit.DONE, Exit.STOPPED) if self.stopped.is_set() else (None, Exit.DONE)
        return [
            f"generator process {number} {_why(process.returncode, log)}"
            for number, (process, log) in enumerate(zip(self.processes, self.log_paths, strict=True))
            if process.returncode not in well
        ]


class FrozenProcesses:
    """Generator processes that somebody has stopped (SIGSTOP) and not continued."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        self._processes = processes
        self._since_ns: dict[int, int] = {}

    def release(self) -> str:
        """Continue those that have been stopped for five seconds, so that they can be asked to end; says which."""
        now_ns, found = time.monotonic_ns(), []
        for number, process in enumerate(self._processes):
            if process.poll() is not None or not _is_stopped(process.pid):
                self._since_ns.pop(number, None)
            elif now_ns - self._since_ns.setdefault(number, now_ns) > _STOPPED_NS:
                process.send_signal(signal.SIGCONT)
                found.append(f"generator process {number} was stopped (SIGSTOP) for {_STOPPED_NS // 10**9} s")
        return "; ".join(found)


def _is_stopped(pid: int) -> bool:
    return text_of(f"/proc/{pid}/stat").rpartition(")")[2].split()[:1] in (["T"], ["t"])


@contextlib.contextmanager
def make_fleet(
    plan: Plan, url: str, api_key: str | None, folder: Path, cores: Sequence[int], processes: int,
    *, generator: str, warm: int | None = None, locustfile: Locustfile | None = None,
) -> Iterator[Fleet]:  # fmt: skip
    """Generator processes with their slices of the plan, connected and waiting; none is left when the block ends.

    Each gets one of ``cores`` in turn, or all of them where there are fewer cores than processes. A closed loop gets no
    more processes than users, but one where a slice has none. ``warm``: connections that each opens ahead;
    ``generator``: one of worker.GENERATORS; ``locustfile``: as in Spec. Raises Unreachable when the target refuses
    them, NotStarted when a process ends before it is ready for another reason, OSError when files cannot be written.
    """
    if plan.loop == "closed":
        processes = max(1, min(processes, plan.concurrency))
    allow_many_files()  # each process has three of ours
    environment = {name: value for name, value in os.environ.items() if name != API_KEY}
    if api_key:
        environment[API_KEY] = api_key
    started: list[subprocess.Popen[bytes]] = []
    records = [folder / f"worker-{k}.gap" for k in range(processes)]
    logs = [record.with_suffix(".log") for record in records]
    plans = [record.with_suffix(".plan.npz") for record in records]
    try:
        for k, (record, log, plan_path) in enumerate(zip(records, logs, plans, strict=True)):
            part = plan.slice(k, processes)
            mine = (cores[k],) if len(cores) == processes else tuple(cores)
            part.save(plan_path)
            # Ahead: as given, or a closed loop's users, or enough for an open loop's first moments.
            users = part.concurrency if part.loop == "closed" else 32
            ahead = users if locustfile else min(users, len(part))
            warmed = max(1, min(ahead, _MOST_WARM)) if warm is None else warm
            spec = Spec(url, str(plan_path), str(record), mine, warmed, generator, locustfile)
            spec.write(record.with_suffix(".json"))
            started.append(_spawn("gapmeter.loadgen.worker", record.with_suffix(".json"), log, environment))
        frozen = FrozenProcesses(started)
        for process, log in zip(started, logs, strict=True):
            _await_ready(process, log, frozen)
        yield Fleet(tuple(started), tuple(records), tuple(logs))
    finally:
        end_processes(started)
        for plan_path in plans:  # several times as large as the records, and drawn anew from the scenario's seed
            plan_path.unlink(missing_ok=True)
        for log in logs:
            if log.exists() and not log.stat().st_size:
                log.unlink()


@dataclass(frozen=True, slots=True)
class Workers:
    """How many workers a run waits for, and where (port 0: any). One that is silent for ``patience_s`` is given up."""

    count: int
    listen_host: str = "127.0.0.1"
    listen_port: int = 5557
    patience_s: float = 30.0


@dataclass(frozen=True, slots=True)
class MasterSpec:
    """What a master does. ``folder`` takes the workers' record files and what it says of them.

    Messages come in at ``workers.listen_port``, plans and records travel by the port after it (any where that is 0).
    """

    url: str
    plan: str
    folder: str
    generator: str
    workers: Workers

    @classmethod
    def read(cls, path: Path) -> MasterSpec:
        """Raises OSError, or ValueError, TypeError or KeyError for what is no spec."""
        value = json.loads(path.read_text())
        return cls(**value | {"workers": Workers(**value["workers"])})

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


@contextlib.contextmanager
def make_cluster(
    plan: Plan, url: str, folder: Path, workers: Workers, *, generator: str, say: Callable[[str], None]
) -> Iterator[Fleet]:
    """A master with all its workers connected to the target and waiting; it is not left when the block ends.

    As a fleet it is one process. The workers' record files come into ``folder`` at the end; ``workers.json`` there is
    kept up to date while the run goes on. ``say`` is called with who is still missing. Raises NotStarted with the
    reason when a worker cannot begin, a port is taken or Locust is missing, OSError when files cannot be written.
    """
    if find_spec("locust") is None:
        raise NotStarted(NO_LOCUST)
    spec_path, plan_path, log = folder / "master.json", folder / "master.plan.npz", folder / "master.log"
    plan.save(plan_path)
    MasterSpec(url, str(plan_path), str(folder), generator, workers).write(spec_path)
    master = _spawn("gapmeter.loadgen.locust.master", spec_path, log)
    try:
        _await_ready(master, log, FrozenProcesses([master]), say)
        records = tuple(folder / f"worker-{k}.gap" for k in range(workers.count))
        yield Fleet((master,), records, (log,), _WORKERS_AHEAD_NS)
    finally:
        end_processes([master])
        plan_path.unlink(missing_ok=True)


def _spawn(module: str, spec: Path, log: Path, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    with log.open("wb") as errors:
        # A process group of its own: Ctrl-C reaches the parent, which decides.
        return subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(spec)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=errors, env=environment, process_group=0,
        )  # fmt: skip


def _await_ready(
    process: subprocess.Popen[bytes], log: Path, frozen: FrozenProcesses, say: Callable[[str], None] = lambda _: None
) -> None:
    """``say`` is called with each line before ``ready``. Raises as ``make_fleet``, also where one is in ``frozen``."""
    assert process.stdout is not None
    poll, text = select.poll(), b""
    poll.register(process.stdout, select.POLLIN)
    while True:
        if trouble := frozen.release():
            raise NotStarted(trouble)
        if not poll.poll(_LOOK_MS):
            continue
        if not (read := os.read(process.stdout.fileno(), 4096)):
            break
        *lines, text = (text + read).split(b"\n")
        for line in lines:
            if line == b"ready":
                return
            say(line.decode(errors="replace").strip())
    code = process.wait()
    reason = last_line(log)
    if code == Exit.UNREACHABLE:
        raise Unreachable(reason)
    raise NotStarted(reason or f"{log.stem} ended with exit code {code}")


def _why(code: int, log: Path) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    if code == Exit.STOPPED:
        return "was told to end (SIGTERM or SIGINT)"
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
