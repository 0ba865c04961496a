"""A user's own locustfile as a Locust test: its users and its shape decide what is sent when, our client sends it."""

from __future__ import annotations

import heapq
import json
import traceback
from pathlib import Path
from time import monotonic_ns
from types import TracebackType
from typing import Any

import gevent
import gevent.event
from gevent import monkey
from locust import User
from locust.env import Environment
from locust.exception import StopUser
from locust.util.load_locustfile import load_locustfile

from gapmeter.loadgen.exchange import Exchange
from gapmeter.loadgen.locust.user import GapmeterUser
from gapmeter.loadgen.session import Session
from gapmeter.loadgen.worker import Locustfile
from gapmeter.records.timer import Timer

# As an open loop's: the timer goes off a little earlier, and the rest is spun.
_EARLY_NS = 50_000
_STAGGER_S = 1.0  # over which users start


class RequestQueue:
    """Users' own requests until they are due, and users until they are answered. ``file`` completes the bodies."""

    def __init__(self, session: Session, file: Locustfile) -> None:
        self._session, self._file = session, file
        self._due: list[tuple[int, int, Exchange]] = []
        self._answers: dict[int, Any] = {}  # by the request's index
        self._composed = 0
        self._closed = False
        self._timer = Timer(session.loop, self._wake)
        session.on_finished = self._answered

    def send(self, path: str, fields: dict[str, Any], due_ns: int) -> Exchange:
        """Have a request with these fields sent at ``due_ns``, or at once if that has passed; returns when it ended.

        Raises StopUser when nothing more is to be issued.
        """
        if self._closed:
            raise StopUser
        stream = {"include_usage": True} | ({"continuous_usage_stats": True} if self._file.dialect == "full" else {})
        body = {"model": self._file.model, "stream": True, "stream_options": stream, **fields}
        exchange = self._session.compose(
            self._composed, path, json.dumps(body).encode(), int(fields.get("min_tokens", 0))
        )
        self._composed += 1
        answer = self._answers[exchange.index] = gevent.event.AsyncResult()
        try:
            self._put(due_ns, exchange)
            answered: Exchange = answer.get()
        finally:  # a shape may end a user who waits; the request that was sent is still answered, and recorded
            self._answers.pop(exchange.index, None)
        return answered

    def close(self) -> None:
        """Nothing more is sent: users whose request is not due yet end."""
        self._closed = True
        self._timer.close()
        for _, _, exchange in self._due:
            if (answer := self._answers.get(exchange.index)) is not None:
                answer.set_exception(StopUser())
        self._due.clear()

    def _put(self, due_ns: int, exchange: Exchange) -> None:
        if due_ns <= monotonic_ns():
            self._session.send(exchange, due_ns)
            return
        heapq.heappush(self._due, (due_ns, exchange.index, exchange))
        self._timer.arm(self._due[0][0] - _EARLY_NS)

    def _wake(self) -> None:
        while self._due and self._due[0][0] <= monotonic_ns() + _EARLY_NS:
            due_ns, index, exchange = heapq.heappop(self._due)
            if index not in self._answers:
                continue
            while monotonic_ns() < due_ns:
                pass
            self._session.send(exchange, due_ns)
        if self._due:
            self._timer.arm(self._due[0][0] - _EARLY_NS)

    def _answered(self, exchange: Exchange) -> None:
        if (answer := self._answers.get(exchange.index)) is not None:
            answer.set(exchange)


class BadLocustfile(Exception):
    """The file cannot be used; the text says why."""


class LocustfileTest(Environment):
    """A Locust test of the users and the shape in a file. ``over``: the shape, or the plan's time, has ended.

    ``failed`` is what a task raised, with its place; it ends the run. Raises BadLocustfile.
    """

    def __init__(self, session: Session, url: str, file: Locustfile) -> None:
        monkey.patch_time()  # a task that sleeps must not stop all others
        path = Path(file.path)
        users, shape = load(path)
        super().__init__(user_classes=users, shape_class=shape, host=url)
        self.session, self._path = session, path
        self.requests = RequestQueue(session, file)
        self.over = gevent.event.Event()
        self.failed = ""
        self.events.user_error.add_listener(self._raised)
        self.events.test_stop.add_listener(lambda **_: self.over.set())

    def begin(self) -> None:
        """Make the runner; users come with the start."""
        runner = self.create_local_runner()
        if self.shape_class is not None:
            self.shape_class.runner = runner

    def issue(self, t0_ns: int) -> None:
        """Returns when the time is over, the shape has ended, or the run is stopped."""
        plan, session = self.session.plan, self.session
        gevent.sleep(max(0.0, (t0_ns - monotonic_ns()) / 1e9))
        assert self.runner is not None
        if self.shape_class is not None:
            self.runner.start_shape()
        else:
            self.runner.start(plan.concurrency, max(1.0, plan.concurrency / _STAGGER_S))
        left_s = max(0.0, (t0_ns + plan.end_ns - monotonic_ns()) / 1e9)
        gevent.wait([self.over, session.stopped], timeout=left_s, count=1)
        self.requests.close()

    def end(self) -> None:
        """End Locust's users and its runner."""
        if self.runner is not None:
            self.runner.quit()

    def _raised(self, user_instance: Any, exception: BaseException, tb: TracebackType | None, **_: Any) -> None:
        if not self.failed:
            self.failed = f"{_place(self._path, tb)}: {type(exception).__name__}: {exception}"
            gevent.spawn(self.session.stop, "a task of the locustfile failed")


def load(path: Path) -> tuple[list[type[User]], Any]:
    """The users and the shape (None for none) that a file defines. Raises BadLocustfile."""
    try:
        classes, shapes = load_locustfile(str(path))
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, gevent.GreenletExit)):
            raise
        place = _place(path, error.__traceback__)
        raise BadLocustfile(f"{place}: {type(error).__name__}: {error}") from error
    users: list[type[User]] = [user for user in classes.values() if issubclass(user, GapmeterUser)]
    others = [name for name, user in classes.items() if not issubclass(user, GapmeterUser)]
    if others or not users:
        problem = f"{others[0]} does not derive from" if others else "no class here derives from"
        raise BadLocustfile(f"{path}: {problem} gapmeter.locust.GapmeterUser, so that no request would be on record")
    if len(shapes) > 1:
        raise BadLocustfile(f"{path}: {len(shapes)} shapes; leave one")
    return users, shapes[0] if shapes else None


def _place(path: Path, trace: TracebackType | None) -> str:
    """Where in the user's own file it happened."""
    lines = [frame.lineno for frame in traceback.extract_tb(trace) if Path(frame.filename).name == path.name]
    return f"{path}:{lines[-1]}" if lines else str(path)
