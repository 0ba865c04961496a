"""One generator process: reads its slice of the plan, waits for the common start, issues, records, leaves.

``python -P -m gapmeter.loadgen.worker SPEC`` prints ``ready`` once its bodies are encoded and its connections open,
then reads the start (CLOCK_MONOTONIC ns) from standard input. When that closes, its parent is gone: it stops as on
SIGINT and SIGTERM, with what is in flight recorded as aborted.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvloop

from gapmeter.loadgen.exchange import Address
from gapmeter.loadgen.generator import (
    NO_LOCUST,
    PARENT_GONE,
    Exit,
    Heartbeat,
    Spec,
    exit_code,
    leave,
    listen_for_start,
    not_connected,
)
from gapmeter.loadgen.issue import issue
from gapmeter.loadgen.plan import Plan
from gapmeter.loadgen.sender import Sender
from gapmeter.records import RecordWriter
from gapmeter.records.process import API_KEY, allow_many_files, ask_for_short_slices, stop_collecting, too_few_files

_TOKEN_BYTES = 320  # of one token's event, its usage included, and its stamp
_MOST_RESERVED = 1 << 26
_NICER = 10
_READY_AHEAD, _READY_EVERY_S = 1 << 20, 0.02


def main(arguments: list[str]) -> int:
    """Entry point. Failures that have a cause of their own are one line on standard error."""
    try:
        spec = Spec.read(Path(arguments[0]))
        work = GENERATORS[spec.generator]
        plan = Plan.load(Path(spec.plan))
        address = Address.of(spec.url, os.environ.get(API_KEY))
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
    # A fresh page can take the file system milliseconds. At a lower priority than the loop's the thread that readies
    # them would not run while it holds the interpreter's lock, for which the loop would wait.
    writer.keep_room(_READY_AHEAD, _READY_EVERY_S, _come_first)
    try:
        return work(spec, plan, address, writer)
    finally:
        for signum in (signal.SIGINT, signal.SIGTERM):  # while Python ends, what asks us to stop would kill us
            signal.signal(signum, signal.SIG_IGN)
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
        return leave(Exit.BAD_SPEC, NO_LOCUST)
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
        return not_connected(error)
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


def _watch_for_bugs(loop: asyncio.AbstractEventLoop, sender: Sender) -> list[BaseException]:
    """An exception in a callback ends the run, with its traceback, instead of being logged and forgotten."""
    broken: list[BaseException] = []

    def on_exception(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        broken.append(context.get("exception") or RuntimeError(str(context["message"])))
        if len(broken) == 1:
            sender.stop("a bug in the load generator")

    loop.set_exception_handler(on_exception)
    return broken


def _come_first() -> int:
    """Ask to run as soon as we wake, before any other process on our core. Returns our niceness."""
    ask_for_short_slices(_NICER)
    return os.getpriority(os.PRIO_PROCESS, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
