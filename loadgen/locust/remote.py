"""A worker on this machine for a master elsewhere: ``gapmeter worker``. Locust's worker, with one share of a plan.

It leaves when its share is handed in, the master refuses it, or the master is not heard any more.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic_ns
from typing import Any

import gevent
import gevent.event
import locust
from locust import User, task
from locust.env import Environment

from gapmeter.loadgen.locust.clocks import clock_name
from gapmeter.loadgen.locust.messages import TYPE, VERSION, NotWhole, Pull, describe_file, piece
from gapmeter.loadgen.locust.shard import Shard
from gapmeter.loadgen.share import load_share

_HELLO_EVERY_S, _LOOK_S = 1.0, 0.05


@dataclass(frozen=True, slots=True)
class Call:
    """Where the master is, and what this worker may use."""

    host: str
    port: int
    cores: tuple[int, ...]
    api_key: str | None


class Refused(RuntimeError):
    """The master does not want this worker, or its order cannot be carried out; the text says why."""


class ShardUser(User):
    """Locust's sign that the test runs. Locust may start it again on whoever is left: a share begins only once."""

    environment: Remote

    @task
    def issue(self) -> None:
        self.environment.spawned()
        gevent.sleep(3600)


class Remote(Environment):
    """One worker's conversation with the master."""

    def __init__(self, call: Call, folder: Path, say: Callable[[str], None]) -> None:
        super().__init__(user_classes=[ShardUser], catch_exceptions=False)
        self._call, self._folder, self._say = call, folder, say
        self._order: dict[str, Any] | None = None
        self._refused = ""
        self._start = gevent.event.AsyncResult()
        self._over = gevent.event.Event()
        self._told_off = gevent.event.Event()
        self._shard: Shard | None = None
        self._pull = Pull(self._send)
        self._left = False
        self._users = 0
        self._words: dict[str, Callable[[dict[str, Any]], None]] = {
            "arm": self._armed, "refuse": self._refuse, "clock": self._clock, "piece": self._pull.arrived,
            "start": self._started, "stop": self._stop, "pull": self._give, "thanks": lambda _: self._over.set(),
        }  # fmt: skip

    def work(self) -> None:
        """Serve the master to the end. Raises Refused, ConnectionError when no master answers."""
        self._say(f"calling the master at {self._call.host}:{self._call.port}, for five minutes if none answers")
        runner = self.create_worker_runner(self._call.host, self._call.port)
        runner.register_message(TYPE, lambda msg, **_: self._words[msg.data["word"]](msg.data))
        self.events.report_to_master.add_listener(self._report)
        self.events.quit.add_listener(lambda **_: self._stop({}))
        runner.greenlet.spawn(runner_gone, runner, self._told_off)
        try:
            self._hello()
            self._shard = self._take_share()
            self._issue(self._shard)
            self._hand_in(self._shard)
        finally:
            if self._shard is not None:
                self._shard.stop()
                while not self._shard.over.is_set():
                    gevent.sleep(_LOOK_S)
            runner.quit()

    def leave(self) -> None:
        """Asked to by a signal: what has been recorded is handed in."""
        if self._shard is None:
            self._told_off.set()
        else:
            self._left = True
            self._shard.stop()

    def spawned(self) -> None:
        """Locust has started our user: the test runs, for the first time or again."""
        self._users += 1
        self._begin()

    @property
    def restarts(self) -> int:
        """How often Locust started the test again, on whoever was left."""
        return max(0, self._users - 1)

    def _begin(self) -> None:
        if self._shard is not None and self._start.ready():
            self._shard.begin(self._start.get())

    def _hello(self) -> None:
        about = {
            "word": "hello", "version": VERSION, "host": socket.gethostname(), "pid": os.getpid(),
            "clock": clock_name(), "locust": locust.__version__,
        }  # fmt: skip
        while self._order is None:
            self._check()
            self._send(about)
            gevent.sleep(_HELLO_EVERY_S)
        self._say(f"armed as worker {self._order['worker']} of {self._order['workers']}")

    def _take_share(self) -> Shard:
        assert self._order is not None
        path = self._folder / "share.npz"
        try:
            self._pull.into(path, self._order["share"], lambda: not self._gone())
        except NotWhole as error:
            raise Refused(str(error)) from error
        plan = load_share(path)
        if plan.digest() != self._order["digest"]:
            raise Refused(f"the share's digest is {plan.digest()}, the master's {self._order['digest']}")
        call, order = self._call, self._order
        shard = Shard(plan, order["url"], call.api_key, self._folder, call.cores, order["generator"])
        while not (shard.ready.is_set() or shard.over.is_set()):
            gevent.sleep(_LOOK_S)
        if shard.failed:
            self._send({"word": "failed", "why": shard.failed})
            gevent.sleep(0.5)
            raise Refused(shard.failed)
        self._send({"word": "ready", "digest": plan.digest()})
        return shard

    def _issue(self, shard: Shard) -> None:
        while not shard.over.is_set():
            if self._gone():
                shard.stop()
            gevent.sleep(_LOOK_S)

    def _hand_in(self, shard: Shard) -> None:
        """The master takes the record file, then lets us go."""
        done = {
            "word": "done", "troubles": [*shard.troubles, *(["it was stopped by a signal"] if self._left else [])],
            "file": describe_file(shard.record), "restarts": self.restarts,
        }  # fmt: skip
        while not self._over.is_set():
            self._check(shard.record)
            self._send(done | {"report": shard.tally.report()})
            self._over.wait(_HELLO_EVERY_S * 2)

    def _armed(self, message: dict[str, Any]) -> None:
        self._order = self._order or message

    def _refuse(self, message: dict[str, Any]) -> None:
        self._refused = message["why"]

    def _clock(self, message: dict[str, Any]) -> None:
        self._send(message | {"there_ns": monotonic_ns()})

    def _started(self, message: dict[str, Any]) -> None:
        if not self._start.ready():
            self._start.set(message["t0_ns"])
            self._begin()

    def _stop(self, _: dict[str, Any]) -> None:
        if self._shard is not None:
            gevent.spawn(self._shard.stop)

    def _give(self, message: dict[str, Any]) -> None:
        assert self._shard is not None
        self._send(piece(self._shard.record, message["offset"]))

    def _report(self, client_id: str, data: dict[str, Any]) -> None:
        if self._shard is not None:
            data[TYPE] = self._shard.tally.report()

    def _send(self, message: dict[str, Any]) -> None:
        assert self.runner is not None
        self.runner.send_message(TYPE, message)

    def _gone(self) -> bool:
        return bool(self._told_off.is_set())

    def _check(self, record: Path | None = None) -> None:
        if self._refused:
            raise Refused(self._refused)
        if self._gone():
            kept = f"; its records are in {record}" if record else ""
            raise Refused(f"the master is gone{kept}")


def runner_gone(runner: Any, told: gevent.event.Event) -> None:
    """Locust ends its worker's greenlets when the master quits or has not been heard for a minute."""
    try:
        while True:
            gevent.sleep(3600)
    finally:
        told.set()


def work(call: Call, say: Callable[[str], None]) -> None:
    """Be one worker of the master at ``call``. Raises Refused, or ConnectionError when there is no master."""
    folder = Path(tempfile.mkdtemp(prefix="gapmeter-worker-"))
    remote = Remote(call, folder, say)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is not signal.SIG_IGN:  # by nohup
            gevent.signal_handler(signum, remote.leave)
    kept = False
    try:
        remote.work()
    except Refused as error:
        kept = "its records are in" in str(error)
        raise
    finally:
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)
