"""A worker on this machine for a master elsewhere: ``gapmeter worker``. Locust's worker, with one slice of a plan.

It leaves when its records are handed in, the master refuses it, or the master is not heard any more.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from time import monotonic_ns
from typing import Any

import gevent
import gevent.event
from locust import User, task
from locust.env import Environment

from gapmeter.loadgen.locust.protocol import TYPE, VERSION, Files, Hello, NotTaken, Order, Result, clock_name
from gapmeter.loadgen.locust.slice_run import Call, SliceRun
from gapmeter.loadgen.plan import Plan

_AGAIN_S, _LOOK_S = 1.0, 0.05


class Refused(RuntimeError):
    """The master does not want this worker, or its order cannot be carried out; the text says why.

    ``records``: the record file that nobody has taken, if there is one; it is kept.
    """

    def __init__(self, why: str, records: Path | None = None) -> None:
        super().__init__(why if records is None else f"{why}; its records are in {records}")
        self.records = records


class SliceUser(User):
    """Locust's sign that the test runs. Locust may start it again on whoever is left: a slice begins only once."""

    environment: Worker

    @task
    def issue(self) -> None:
        self.environment.spawned()
        gevent.sleep(3600)


class Worker(Environment):
    """One worker's conversation with the master."""

    def __init__(self, call: Call, folder: Path, say: Callable[[str], None]) -> None:
        super().__init__(user_classes=[SliceUser], catch_exceptions=False)
        self._call, self._folder, self._say = call, folder, say
        self._order = gevent.event.AsyncResult()
        self._start = gevent.event.AsyncResult()
        self._gone = gevent.event.Event()  # the master is, or we are to leave
        self._refused = ""
        self._run: SliceRun | None = None
        self._left = False
        self._users = 0

    def serve(self) -> None:
        """Serve the master to the end. Raises Refused, ConnectionError when no master answers."""
        self._say(f"calling the master at {self._call.host}:{self._call.port}, for five minutes if none answers")
        runner = self.create_worker_runner(self._call.host, self._call.port)
        runner.register_message(TYPE, self._heard)
        self.events.report_to_master.add_listener(self._report)
        self.events.quit.add_listener(lambda **_: self._stop())
        runner.greenlet.spawn(_until_killed, self._gone)
        try:
            order = self._join()
            files = Files(self._call.host, order)
            run = self._prepare(order, files)
            while not run.over.is_set():
                if self._gone.is_set():
                    run.stop()
                gevent.sleep(_LOOK_S)
            late = [run.failed] if run.failed else []
            stopped = ["it was stopped by a signal"] if self._left else []
            result = Result([*run.troubles, *late, *stopped], max(0, self._users - 1), run.report())
            self._insist(lambda: files.hand_in(run.records, result), run.records)
        finally:
            if self._run is not None:
                self._run.stop()
                while not self._run.over.is_set():
                    gevent.sleep(_LOOK_S)
            runner.quit()

    def leave(self) -> None:
        """Asked to by a signal: what has been recorded is handed in."""
        if self._run is None:
            self._gone.set()
        else:
            self._left = True
            self._run.stop()

    def spawned(self) -> None:
        """Locust has started our user: the test runs, for the first time or again."""
        self._users += 1
        self._begin()

    def _begin(self) -> None:
        if self._run is not None and self._start.ready():
            self._run.begin(self._start.get())

    def _join(self) -> Order:
        """Offer ourselves until the master has an order for us."""
        about = Hello(VERSION, socket.gethostname(), os.getpid(), clock_name())
        while not self._order.ready():
            self._check()
            self._send("hello", **asdict(about))
            self._order.wait(_AGAIN_S)
        order: Order = self._order.get()
        self._say(f"armed as worker {order.worker} of {order.workers}")
        return order

    def _prepare(self, order: Order, files: Files) -> SliceRun:
        """Fetch the slice, and have a generator process connect to the target with it."""
        path = self._folder / "slice.npz"
        self._insist(lambda: files.fetch_slice(path))
        plan = Plan.load(path)
        if plan.digest() != order.digest:
            raise Refused(f"the slice's digest is {plan.digest()}, the master's {order.digest}")
        run = self._run = SliceRun(plan, order.url, order.generator, self._call, self._folder)
        while not (run.ready.is_set() or run.over.is_set()):
            gevent.sleep(_LOOK_S)
        if run.failed:
            self._send("failed", why=run.failed)
            gevent.sleep(0.5)
            raise Refused(run.failed)
        self._send("ready")
        return run

    def _insist(self, transfer: Callable[[], None], records: Path | None = None) -> None:
        """Try again until it has worked: a network may be cut for a while. Raises Refused when the master is gone."""
        while True:
            self._check(records)
            try:
                _in_thread(transfer)
            except NotTaken as error:
                raise Refused(str(error), records) from error
            except OSError:
                gevent.sleep(_AGAIN_S)
            else:
                return

    def _check(self, records: Path | None = None) -> None:
        if self._refused:
            raise Refused(self._refused)
        if self._gone.is_set():
            raise Refused("the master is gone", records)

    def _heard(self, msg: Any, **_: Any) -> None:
        message: dict[str, Any] = msg.data
        match message["word"]:
            case "arm" if not self._order.ready():
                self._order.set(Order(**message["order"]))
            case "refuse":
                self._refused = message["why"]
            case "clock":
                self._send("clock", sent_ns=message["sent_ns"], there_ns=monotonic_ns())
            case "start" if not self._start.ready():
                self._start.set(message["t0_ns"])
                self._begin()
            case "stop":
                self._stop()

    def _stop(self) -> None:
        if self._run is not None:
            gevent.spawn(self._run.stop)

    def _report(self, client_id: str, data: dict[str, Any]) -> None:
        if self._run is not None:
            data[TYPE] = asdict(self._run.report())

    def _send(self, word: str, **values: Any) -> None:
        assert self.runner is not None
        self.runner.send_message(TYPE, {"word": word, **values})


def _until_killed(gone: gevent.event.Event) -> None:
    """Locust ends its worker's greenlets when the master quits or has not been heard for a minute."""
    try:
        while True:
            gevent.sleep(3600)
    finally:
        gone.set()


def _in_thread(work: Callable[[], None]) -> None:
    """Do what blocks without holding up Locust's messages. Raises what it raises."""
    raised: list[BaseException] = []

    def attempt() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again below, where it belongs
            raised.append(error)

    gevent.get_hub().threadpool.apply(attempt)
    if raised:
        raise raised[0]


def serve(call: Call, say: Callable[[str], None]) -> None:
    """Be one worker of the master at ``call``. Raises Refused, or ConnectionError when there is no master."""
    folder = Path(tempfile.mkdtemp(prefix="gapmeter-worker-"))
    worker = Worker(call, folder, say)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is not signal.SIG_IGN:  # by nohup
            gevent.signal_handler(signum, worker.leave)
    keep = False
    try:
        worker.serve()
    except Refused as error:
        keep = error.records is not None
        raise
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
