"""One generator process: reads its slice of the plan, waits for the common start, issues, records, leaves.

``python -P -m gapmeter.loadgen.worker SPEC`` prints ``ready`` once its bodies are encoded and its connections open,
then reads the start (CLOCK_MONOTONIC ns) from standard input. When that closes, its parent is gone: it stops as on
SIGINT and SIGTERM, with what is in flight recorded as aborted.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from enum import IntEnum
from pathlib import Path
from time import monotonic_ns
from typing import Any

import uvloop

from gapmeter.loadgen.client import reason
from gapmeter.loadgen.exchange import Address, authorization
from gapmeter.loadgen.issue import issue
from gapmeter.loadgen.plan import Plan
from gapmeter.loadgen.sender import Sender
from gapmeter.records import RecordWriter, Span
from gapmeter.records.process import allow_many_files, ask_for_short_slices, too_few_files
from gapmeter.records.timer import Readers, Timer

_TOKEN_BYTES = 320  # of one token's event, its usage included, and its stamp
_MOST_RESERVED = 1 << 26
_NICER = 10
_BEAT_NS = 20_000_000
_BEATS_A_SECOND = 50
_READY_AHEAD, _READY_EVERY_S = 1 << 20, 0.02
_NO_LOCUST = "Locust is not installed in this environment: make setup, or pip install 'gapmeter[locust]'"
PARENT_GONE = "the process that started this one is gone"
API_KEY = "GAPMETER_API_KEY"  # in the environment: a key has no place in a run's folder


class Exit(IntEnum):
    """Exit codes. A traceback's is 1."""

    DONE = 0
    BAD_SPEC = 2
    UNREACHABLE = 3
    DISK_FULL = 4
    STOPPED = 5
    NO_CONNECTION = 6  # the machine lacks what it takes


@dataclass(frozen=True, slots=True)
class Locustfile:
    """A user's own locustfile, and what the bodies of its requests need."""

    path: str
    model: str
    dialect: str


@dataclass(frozen=True, slots=True)
class Spec:
    """What a generator process does. ``warm``: connections to open ahead; no ``cores``: run anywhere.

    ``generator``: one of GENERATORS; ``locustfile``: its users issue, not the plan.
    """

    url: str
    plan: str
    record: str
    cores: tuple[int, ...]
    warm: int
    generator: str
    locustfile: Locustfile | None = None

    @classmethod
    def read(cls, path: Path) -> Spec:
        """Raises OSError, or ValueError or TypeError for what is no spec."""
        value: dict[str, Any] = json.loads(path.read_text())
        if set(value) != {field.name for field in fields(cls)}:
            raise ValueError(f"{path}: keys {sorted(value)}")
        file = Locustfile(**value["locustfile"]) if value["locustfile"] else None
        return cls(**value | {"cores": tuple(value["cores"]), "locustfile": file})

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


def main(arguments: list[str]) -> int:
    """Entry point. Failures that have a cause of their own are one line on standard error."""
    try:
        spec = Spec.read(Path(arguments[0]))
        work = GENERATORS[spec.generator]
        plan = Plan.load(Path(spec.plan))
        address = Address.of(spec.url, authorization(os.environ.get(API_KEY)))
    except (IndexError, OSError, ValueError, TypeError, KeyError) as error:
        return leave(Exit.BAD_SPEC, f"not a generator's spec: {error}")
    if spec.cores:
        os.sched_setaffinity(0, spec.cores)
    if few := too_few_files(plan.concurrency, allow_many_files()):
        return leave(Exit.BAD_SPEC, few)
    try:
        about = {"role": "generator", "worker": plan.worker, "cores": spec.cores, "nice": _come_first()}
        writer = RecordWriter(spec.record, about)
    except OSError as error:
        return leave(Exit.DISK_FULL, f"{spec.record} cannot be written: {error.strerror or error}")
    # About what the records of an open loop will take; beyond the most that is reserved the file grows as it goes.
    tokens = int(plan.output_tokens.sum()) if plan.loop == "open" else 0
    expected = min(1000 * len(plan) + _TOKEN_BYTES * tokens, _MOST_RESERVED)
    writer.reserve(min(expected, shutil.disk_usage(Path(spec.record).parent).free // 4))
    over = threading.Event()
    threading.Thread(target=_ready_pages, args=(writer, over), daemon=True).start()
    try:
        return work(spec, plan, address, writer)
    finally:
        over.set()
        writer.close()


def _on_uvloop(spec: Spec, plan: Plan, address: Address, writer: RecordWriter) -> int:
    return uvloop.run(_work(spec, plan, address, writer))


def _on_locust(spec: Spec, plan: Plan, address: Address, writer: RecordWriter) -> int:
    os.environ["LOCUST_SKIP_MONKEY_PATCH"] = "1"  # nothing here blocks, and the thread that readies pages must be one
    try:
        from gapmeter.loadgen.locust.generator import work
    except ModuleNotFoundError as error:
        if error.name not in ("gevent", "locust"):
            raise
        return leave(Exit.BAD_SPEC, _NO_LOCUST)
    return work(spec, plan, address, writer)


# What issues the plan between its record file's opening and closing, by load.generator.
GENERATORS: dict[str, Callable[[Spec, Plan, Address, RecordWriter], int]] = {
    "asyncio": _on_uvloop,
    "locust": _on_locust,
}


async def _work(spec: Spec, plan: Plan, address: Address, writer: RecordWriter) -> int:
    loop = asyncio.get_running_loop()
    sender = Sender(plan, address, writer)
    broken = _watch_for_bugs(loop, sender)
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, sender.stop, "the run was stopped")
    try:
        await sender.client.warm(spec.warm)
    except OSError as error:
        return leave(Exit.UNREACHABLE, reason(error))
    stop_collecting()
    print("ready", flush=True)
    start: asyncio.Future[int] = loop.create_future()
    listen_for_start(loop, start.set_result, lambda: sender.stop(PARENT_GONE))
    stopped = asyncio.ensure_future(sender.stopped.wait())
    either: list[asyncio.Future[Any]] = [start, stopped]
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if start.done():
        heartbeat = Heartbeat(sender, start.result(), generator="asyncio")
        await issue(sender, start.result())
        heartbeat.stop_counting()
        await sender.drain()
        heartbeat.close()
    sender.client.close()
    return exit_code(spec, sender, broken)


def stop_collecting() -> None:
    """Garbage collection pauses; counting references is enough to free what a request leaves behind."""
    gc.collect()
    gc.freeze()
    gc.disable()


def exit_code(spec: Spec, sender: Sender, broken: list[BaseException]) -> int:
    """The exit code. Raises the first bug, if there was one."""
    if broken:
        raise broken[0]
    if dropped := sender.writer.dropped:
        return leave(Exit.DISK_FULL, f"the disk is full: {dropped} records did not fit into {spec.record}")
    if lack := sender.client.lack:
        return leave(Exit.NO_CONNECTION, lack)
    return Exit.STOPPED if sender.stopped.is_set() else Exit.DONE


def listen_for_start(loop: Readers, start: Callable[[int], None], gone: Callable[[], None]) -> None:
    """Call ``start`` with the common start from standard input, ``gone`` when that closes: our parent is gone then."""
    came = False

    def read() -> None:
        nonlocal came
        line = os.read(0, 4096)
        if not line:
            loop.remove_reader(0)
            gone()
        elif not came:
            came = True
            start(int(line))

    loop.add_reader(0, read)


class Heartbeat:
    """The timed window, and until the last answer: every 20 ms the loop's lag, its CPU, and requests whose time is up.

    ``usage`` notes hold CPU and wall time since ``t0_ns``, until ``stop_counting``. ``generator`` says who issues.
    """

    def __init__(self, sender: Sender, t0_ns: int, **generator: str) -> None:
        self._sender, self._t0 = sender, t0_ns
        self._due = t0_ns
        self._beats = 0
        self._cpu0: int | None = None
        self._counting = True
        self._timer = Timer(sender.loop, self._beat)
        self._timer.arm(self._due)
        about = {"type": "window", "t0_ns": t0_ns, "collector": "frozen and off", "loop": sender.plan.loop}
        sender.writer.json({**about, **generator})

    def stop_counting(self) -> None:
        """All has been issued: from here on only answers are awaited."""
        self._note_usage()
        self._counting = False

    def close(self) -> None:
        """All has been answered."""
        self._timer.close()
        sender = self._sender
        sender.writer.json({"type": "issued", "issued": sender.issued, "finished": sender.finished})
        wall = sender.wall
        sender.writer.json({"type": "wall_clock", "width_ns": wall.width_ns, "set": wall.steps})

    def _beat(self) -> None:
        now = monotonic_ns()
        writer = self._sender.writer
        writer.span(Span.LOOP_LAG, 0, now, now, queued_ns=self._due)
        if self._cpu0 is None:
            self._cpu0 = time.process_time_ns()
        self._sender.wall.look()
        self._sender.expire(now)
        if writer.dropped or self._sender.client.lack:
            self._sender.stop(self._sender.client.lack or "the disk is full")
        self._beats += 1
        if self._beats % _BEATS_A_SECOND == 0:
            begun = monotonic_ns()
            sum(range(1500))  # the canary: how fast the machine is just now, some 20 µs
            writer.span(Span.CANARY, 0, begun, monotonic_ns())
            if self._counting:
                self._note_usage()
        self._due += _BEAT_NS * max(1, (monotonic_ns() - self._due) // _BEAT_NS)
        self._timer.arm(self._due)

    def _note_usage(self) -> None:
        sender, now = self._sender, monotonic_ns()
        if self._cpu0 is None or now <= self._t0:
            return
        sender.writer.json(
            {
                "type": "usage",
                "cpu_ns": time.process_time_ns() - self._cpu0,
                "wall_ns": now - self._t0,
                "issued": sender.issued,
                "finished": sender.finished,
                "in_flight": sender.client.in_flight,
                "involuntary_switches": resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw,
            }
        )


def _watch_for_bugs(loop: asyncio.AbstractEventLoop, sender: Sender) -> list[BaseException]:
    """An exception in a callback ends the run, with its traceback, instead of being logged and forgotten."""
    broken: list[BaseException] = []

    def on_exception(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        broken.append(context.get("exception") or RuntimeError(str(context["message"])))
        if len(broken) == 1:
            sender.stop("a bug in the load generator")

    loop.set_exception_handler(on_exception)
    return broken


def _ready_pages(writer: RecordWriter, over: threading.Event) -> None:
    """In a thread: make pages of the record file ready, since a fresh one can take the file system milliseconds.

    At the loop's own priority: at a lower one the loop would wait for an interpreter lock whose holder does not run.
    """
    _come_first()
    while not over.wait(_READY_EVERY_S):
        writer.prefault(_READY_AHEAD)


def _come_first() -> int:
    """Ask to run as soon as we wake, before any other process on our core. Returns our niceness."""
    ask_for_short_slices(_NICER)
    return os.getpriority(os.PRIO_PROCESS, 0)


def leave(code: Exit, why: str) -> int:
    """Write the reason to standard error; returns the code."""
    print(why, file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    from gapmeter.loadgen import worker  # the module that generators import, not a second copy of it

    sys.exit(worker.main(sys.argv[1:]))
