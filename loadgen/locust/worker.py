"""A worker on this machine for a master elsewhere: ``gapmeter worker``. Locust's worker, with one slice of a plan.

It leaves when its records are handed in, the master refuses it or is not heard any more, or a signal says so: the first
one hands in what was recorded, the second leaves at once.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from time import monotonic_ns
from typing import Any, NoReturn, TypeVar

import gevent
import gevent.event
import gevent.socket
from locust import User, task
from locust.env import Environment

from gapmeter.loadgen.exchange import endpoint
from gapmeter.loadgen.locust.protocol import (
    SECRET,
    TYPE,
    VERSION,
    Files,
    Hello,
    Malformed,
    MasterMessage,
    NotKept,
    NotTaken,
    Order,
    Result,
    Seal,
    WorkerMessage,
    clock_name,
)
from gapmeter.loadgen.locust.slice_run import Call, SliceRun
from gapmeter.loadgen.plan import NotPlan, Plan

_AGAIN_S, _LOOK_S = 1.0, 0.05
T = TypeVar("T")


class Refused(RuntimeError):
    """The master does not want this worker, or its order cannot be carried out; the text says why.

    ``records``: the record file that nobody has taken, if there is one.
    """

    def __init__(self, why: str, records: Path | None = None) -> None:
        super().__init__(why if records is None else f"{why}; its records are in {records}")


class NoSecret(RuntimeError):
    """The master is on another machine, and nothing would tell it from any other program there."""


class SliceUser(User):
    """Locust's sign that the test runs. Locust may start it again on whoever is left: a slice begins only once."""

    environment: Worker

    @task
    def issue(self) -> None:
        self.environment.spawned()
        gevent.sleep(3600)


class Worker(Environment):
    """One worker's conversation with the master. ``untaken``: its record file, from the run's end until it is taken."""

    def __init__(self, call: Call, folder: Path, say: Callable[[str], None]) -> None:
        super().__init__(user_classes=[SliceUser], catch_exceptions=False)
        self._call, self._folder, self._say = call, folder, say
        self._order, self._welcome = gevent.event.AsyncResult(), gevent.event.Event()
        self._start = gevent.event.AsyncResult()
        self._gone = gevent.event.Event()  # the master is, or we are to leave
        self._refused = ""
        self._run: SliceRun | None = None
        self.untaken: Path | None = None
        self._left = False
        self._users = 0
        self._own = self._seal = Seal(call.secret, secrets.token_hex(16), "worker")

    def serve(self) -> None:
        """Serve the master to the end.

        Raises Refused, NoSecret, ConnectionError when no master answers, KeyboardInterrupt for a signal before there
        was anything to hand in.
        """
        self._resolve()
        master = endpoint(self._call.host, self._call.port)
        self._say(f"calling the master at {master}, for five minutes if none answers")
        runner = self._unless_gone(lambda: self.create_worker_runner(self._call.host, self._call.port))
        runner.register_message(TYPE, self._heard)
        self.events.report_to_master.add_listener(self._report)
        self.events.quit.add_listener(lambda **_: self._stop())
        runner.greenlet.spawn(_until_killed, self._gone)
        try:
            order = self._join()
            files = Files(self._call.host, order, self._seal)
            run = self._prepare(order, files)
            while not run.over.is_set():
                if self._gone.is_set():
                    run.stop()
                gevent.sleep(_LOOK_S)
            late = [run.failed] if run.failed else []
            stopped = ["it was stopped by a signal"] if self._left else []
            result = Result([*run.troubles, *late, *stopped], max(0, self._users - 1), run.report())
            self.untaken = run.records
            self._insist(lambda: files.hand_in(run.records, result))
            self.untaken = None
        finally:
            if self._run is not None:
                self._run.stop()
                while not self._run.over.is_set() and not (self._left and self._gone.is_set()):
                    gevent.sleep(_LOOK_S)
            runner.quit()

    def leave(self) -> None:
        """Asked to by a signal: what has been recorded is handed in, unless it is asked again."""
        if self._run is None or self._left:
            self._gone.set()
        else:
            self._run.stop()
        self._left = True

    def spawned(self) -> None:
        """Locust has started our user: the test runs, for the first time or again."""
        self._users += 1
        self._begin()

    def _begin(self) -> None:
        if self._run is not None and self._start.ready():
            self._run.begin(self._start.get())

    def _resolve(self) -> None:
        """Locust would ask for an unknown host for five minutes; and only on this machine is a secret not needed."""
        host, port = self._call.host, self._call.port
        try:
            found = self._unless_gone(lambda: gevent.socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or "no name of a host"
            raise ConnectionError(f"no master at {endpoint(host, port)}: {reason}") from error
        ours = all(ipaddress.ip_address(address[0].partition("%")[0]).is_loopback for *_, address in found)
        if not ours and not self._call.secret:
            raise NoSecret(f"a master on another machine needs a secret: set {SECRET} to the same here and there")

    def _unless_gone(self, work: Callable[[], T], *, in_thread: bool = False) -> T:
        """What ``work``, in a greenlet of its own, returns. Raises what it raises, and as ``_check`` when we leave.

        ``in_thread``: it blocks, and must not hold up Locust's messages.
        """
        returned: list[T] = []
        raised: list[BaseException] = []

        def attempt() -> None:
            try:
                returned.append(work())
            except BaseException as error:  # noqa: BLE001 - raised again below, where it belongs
                raised.append(error)

        greenlet = gevent.spawn(gevent.get_hub().threadpool.apply, attempt) if in_thread else gevent.spawn(attempt)
        gevent.wait([greenlet, self._gone], count=1)
        if not greenlet.ready():
            greenlet.kill(block=False)
            self._check()
        if raised:
            raise raised[0]
        return returned[0]

    def _join(self) -> Order:
        """Offer ourselves until the master has an order for us."""
        about = Hello(VERSION, socket.gethostname(), os.getpid(), clock_name(), self._own.nonce)
        while not self._order.ready():
            self._check()
            self._welcome.clear()
            self._send(about)
            gevent.wait([self._order, self._welcome], timeout=_AGAIN_S, count=1)
        order: Order = self._order.get()
        self._say(f"armed as worker {order.worker} of {order.workers}")
        return order

    def _prepare(self, order: Order, files: Files) -> SliceRun:
        """Fetch the slice, and have a generator process connect to the target with it."""
        if not self._call.may_ask(order.url):
            self._fail(f"its key is for {self._call.url} alone, not for {order.url}; start it with --url {order.url}")
        path = self._folder / "slice.npz"
        try:
            self._insist(lambda: files.fetch_slice(path))
            plan = Plan.load(path)
        except NotKept as error:
            self._fail(str(error))
        except NotPlan as error:
            raise Refused(f"the master has sent no slice of a plan: {error}") from error
        if plan.digest() != order.digest:
            raise Refused(f"the slice's digest is {plan.digest()}, the master's {order.digest}")
        run = self._run = SliceRun(plan, order.url, order.generator, self._call, self._folder)
        while not (run.ready.is_set() or run.over.is_set()):
            gevent.sleep(_LOOK_S)
            if self._gone.is_set():
                self._check()
        if run.failed:
            self._fail(run.failed)
        self._send(WorkerMessage("ready"))
        return run

    def _fail(self, why: str) -> NoReturn:
        """Tell the master, and leave."""
        self._send(WorkerMessage("failed", why))
        gevent.sleep(0.5)
        raise Refused(why)

    def _insist(self, transfer: Callable[[], None]) -> None:
        """Try again until it has worked: a network may be cut for a while. Raises Refused when the master is gone."""
        while True:
            self._check()
            try:
                self._unless_gone(transfer, in_thread=True)
            except NotTaken as error:
                raise Refused(str(error), self.untaken) from error
            except OSError:
                gevent.sleep(_AGAIN_S)
            else:
                return

    def _check(self) -> None:
        if self._refused:
            raise Refused(self._refused, self.untaken)
        if self._gone.is_set() and self._left and self.untaken is None:
            raise KeyboardInterrupt
        if self._gone.is_set():
            raise Refused("it was stopped by a signal" if self._left else "the master is gone", self.untaken)

    def _heard(self, msg: Any, **_: Any) -> None:
        heard_ns = monotonic_ns()
        joined = self._seal is not self._own and self._seal.is_theirs(msg.data)
        if not joined and not self._own.is_theirs(msg.data):
            if not self._order.ready():
                master = endpoint(self._call.host, self._call.port)
                self._refused = f"who answers at {master} does not share this worker's secret ({SECRET})"
            return
        try:
            message = MasterMessage.read(msg.data)
        except Malformed as error:
            self._refused = f"the master says what no master of this version says: {error}"
            return
        match message.word:
            case "refuse":
                self._refused = message.why
            case "welcome" if self._seal is self._own:
                self._seal = self._own.joined(message.drawn)
                self._welcome.set()
            case _ if not joined:  # a master that has not drawn anything could be a recording
                pass
            case "arm" if not self._order.ready():
                self._order.set(message.order)
            case "clock":
                self._send(WorkerMessage("clock", sent_ns=message.sent_ns, there_ns=heard_ns))
            case "start" if not self._start.ready():
                self._start.set(message.t0_ns)
                self._begin()
            case "stop":
                self._stop()

    def _stop(self) -> None:
        if self._run is not None:
            gevent.spawn(self._run.stop)

    def _report(self, client_id: str, data: dict[str, Any]) -> None:
        if self._run is not None:
            data[TYPE] = self._seal.mark(asdict(self._run.report()))

    def _send(self, message: Hello | WorkerMessage) -> None:
        assert self.runner is not None
        self.runner.send_message(TYPE, self._seal.mark(asdict(message)))


def _until_killed(gone: gevent.event.Event) -> None:
    """Locust ends its worker's greenlets when the master quits or has not been heard for a minute."""
    try:
        while True:
            gevent.sleep(3600)
    finally:
        gone.set()


def serve(call: Call, say: Callable[[str], None], signals: Iterable[int]) -> None:
    """Be one worker of the master at ``call``; ``signals`` ask it to leave. Raises as ``Worker.serve``."""
    folder = Path(tempfile.mkdtemp(prefix="gapmeter-worker-"))
    worker = Worker(call, folder, say)
    for signum in signals:
        gevent.signal_handler(signum, worker.leave)
    try:
        worker.serve()
    finally:
        if worker.untaken is None:
            shutil.rmtree(folder, ignore_errors=True)
