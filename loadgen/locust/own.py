"""A user's own locustfile as a Locust test: Locust's users and shapes decide who asks, our client asks."""

from __future__ import annotations

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
from locust.util.load_locustfile import load_locustfile

from gapmeter.loadgen.locust.desk import Desk
from gapmeter.loadgen.locust.user import GapmeterUser
from gapmeter.loadgen.session import Session

_STAGGER_S = 1.0


class BadLocustfile(Exception):
    """The file cannot be used; the text says why."""


class OwnTest(Environment):
    """A Locust test of the users and the shape in a file. ``over``: the shape, or the plan's time, has ended.

    ``failed`` is what a task raised, with its place; the run ends then. Raises BadLocustfile.
    """

    def __init__(self, session: Session, url: str, path: Path, model: str, dialect: str) -> None:
        monkey.patch_time()  # a task that sleeps must not stop all others
        users, shape = load(path)
        super().__init__(user_classes=users, shape_class=shape, host=url)
        self.session, self._path = session, path
        self.desk = Desk(session, model, dialect)
        self.over = gevent.event.Event()
        self.failed = ""
        self.events.user_error.add_listener(self._raised)
        self.events.test_stop.add_listener(lambda **_: self.over.set())

    def begin(self) -> None:
        """Make the runner; its users come with the start."""
        runner = self.create_local_runner()
        if self.shape_class is not None:
            self.shape_class.runner = runner

    def issue(self, t0_ns: int) -> None:
        """Returns when the time is over, the shape has ended, or the run is to end early."""
        plan, session = self.session.plan, self.session
        gevent.sleep(max(0.0, (t0_ns - monotonic_ns()) / 1e9))
        assert self.runner is not None
        if self.shape_class is not None:
            self.runner.start_shape()
        else:
            self.runner.start(plan.concurrency, max(1.0, plan.concurrency / _STAGGER_S))
        left_s = max(0.0, (t0_ns + plan.end_ns - monotonic_ns()) / 1e9)
        gevent.wait([self.over, session.enough, session.stopped], timeout=left_s, count=1)
        self.desk.close()

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
    users: list[type[User]] = [found for found in classes.values() if issubclass(found, GapmeterUser)]
    others = [name for name, found in classes.items() if not issubclass(found, GapmeterUser)]
    if others or not users:
        seen = f"{others[0]} does not derive from" if others else "no class here derives from"
        raise BadLocustfile(
            f"{path}: {seen} gapmeter.locust.GapmeterUser, so that no request would be on record"
        )
    if len(shapes) > 1:
        raise BadLocustfile(f"{path}: {len(shapes)} shapes; leave one")
    return users, shapes[0] if shapes else None


def _place(path: Path, trace: TracebackType | None) -> str:
    """Where in the user's own file it happened."""
    lines = [frame.lineno for frame in traceback.extract_tb(trace) if Path(frame.filename).name == path.name]
    return f"{path}:{lines[-1]}" if lines else str(path)
