"""What a generator process does under Locust: the same as ``loadgen.worker``, on gevent, inside a Locust test."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import TracebackType
from typing import Any

import gevent
import gevent.event
import locust
from locust import User, task
from locust.env import Environment
from locust.exception import StopUser
from locust.runners import LocalRunner

from gapmeter.loadgen.exchange import Address
from gapmeter.loadgen.generator import (
    PARENT_GONE,
    Exit,
    Heartbeat,
    Spec,
    exit_code,
    leave,
    listen_for_start,
    not_connected,
)
from gapmeter.loadgen.issue import begin
from gapmeter.loadgen.locust.locustfile import BadLocustfile, LocustfileTest
from gapmeter.loadgen.locust.transport import GreenLoop, GreenPool
from gapmeter.loadgen.plan import Plan
from gapmeter.loadgen.sender import Sender
from gapmeter.records import RecordWriter
from gapmeter.records.process import stop_collecting


class PlanTest(Environment):
    """A Locust test whose load is a sender's plan. Locust's own clock has no part in it.

    Its user waits for ``t0_ns`` (CLOCK_MONOTONIC), and sets ``over`` when all has been issued.
    """

    def __init__(self, sender: Sender, url: str) -> None:
        super().__init__(user_classes=[PlanUser], host=url, catch_exceptions=False)
        self.sender = sender
        self.t0_ns = gevent.event.AsyncResult()
        self.over = gevent.event.Event()

    def begin(self) -> LocalRunner:
        """Have Locust start the user, which waits."""
        runner = self.create_local_runner()
        runner.start(user_count=1, spawn_rate=1)
        return runner

    def issue(self, t0_ns: int) -> None:
        """Returns when the plan has been issued, or the run is stopped."""
        self.t0_ns.set(t0_ns)
        gevent.wait([self.over, self.sender.stopped], count=1)


class PlanUser(User):
    """Issues the whole plan. One is enough, since it never waits for an answer itself."""

    environment: PlanTest

    @task
    def issue(self) -> Any:
        test = self.environment
        close = begin(test.sender, test.t0_ns.get(), test.over.set)
        try:
            gevent.wait([test.over, test.sender.stopped], count=1)
        finally:
            close()
        raise StopUser


def work(spec: Spec, plan: Plan, address: Address, writer: RecordWriter) -> int:
    """Connect, report ready, issue from the common start. Returns the exit code."""
    own = spec.locustfile
    sender = Sender(plan, address, writer, loop=GreenLoop(), client=GreenPool, event=gevent.event.Event)
    broken = _watch_for_bugs(sender.stop)
    for signum in (signal.SIGINT, signal.SIGTERM):
        gevent.signal_handler(signum, sender.stop, "the run was stopped")
    try:
        sender.client.warm(spec.warm)
    except OSError as error:
        return not_connected(error)
    try:
        test = PlanTest(sender, spec.url) if own is None else LocustfileTest(sender, spec.url, own)
    except BadLocustfile as error:
        return leave(Exit.BAD_SPEC, str(error))
    runner = test.begin()
    stop_collecting()
    print("ready", flush=True)
    os.dup2(2, 1)  # what a user's tasks print goes into the log: nobody reads it from here
    start = gevent.event.AsyncResult()
    listen_for_start(sender.loop, start.set, lambda: gevent.spawn(sender.stop, PARENT_GONE))
    gevent.wait([start, sender.stopped], count=1)
    if start.ready():
        heartbeat = Heartbeat(sender, start.get(), generator="locust", locust=locust.__version__)
        test.issue(start.get())
        heartbeat.stop_counting()
        while sender.awaited:
            sender.drained.clear()
            sender.drained.wait()
        sender.write_all()
        heartbeat.close()
    runner.quit()
    sender.client.close()
    if isinstance(test, LocustfileTest) and test.failed:
        return leave(Exit.BAD_SPEC, test.failed)
    return exit_code(spec, sender, broken)


def _watch_for_bugs(stop: Callable[[str], None]) -> list[BaseException]:
    """An exception in a callback ends the run, with its traceback, instead of being printed and forgotten."""
    broken: list[BaseException] = []

    def on_error(_: Any, kind: type, value: BaseException | None, trace: TracebackType | None) -> None:
        broken.append((value or kind()).with_traceback(trace))
        if len(broken) == 1:
            gevent.spawn(stop, "a bug in the load generator")

    gevent.get_hub().handle_error = on_error
    return broken
