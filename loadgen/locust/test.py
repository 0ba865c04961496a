"""The plan as a Locust test: an environment, its runner, and the user that issues."""

from __future__ import annotations

from typing import Any

import gevent
import gevent.event
from locust import User, task
from locust.env import Environment
from locust.exception import StopUser

from gapmeter.loadgen.issue import LOOPS
from gapmeter.loadgen.session import Session


class Test(Environment):
    """A Locust test whose load is a session's share of a plan. Locust's own clock has no part in it.

    Users wait for ``t0_ns`` (CLOCK_MONOTONIC), and set ``over`` when all has been issued.
    """

    def __init__(self, session: Session, url: str) -> None:
        super().__init__(user_classes=[Dispatcher], host=url, catch_exceptions=False)
        self.session = session
        self.t0_ns = gevent.event.AsyncResult()
        self.over = gevent.event.Event()

    def begin(self) -> None:
        """Have Locust start its users; they wait."""
        self.create_local_runner().start(user_count=1, spawn_rate=1)

    def issue(self, t0_ns: int) -> None:
        """Returns when the plan has been issued, or the run is to end early."""
        self.t0_ns.set(t0_ns)
        gevent.wait([self.over, self.session.stopped], count=1)

    def end(self) -> None:
        """End Locust's users and its runner."""
        if self.runner is not None:
            self.runner.quit()


class Dispatcher(User):
    """Issues the whole plan, whatever is answered: one user is enough, since it never waits for an answer itself."""

    environment: Test

    @task
    def issue(self) -> Any:
        test = self.environment
        close = LOOPS[test.session.plan.loop](test.session, test.t0_ns.get(), test.over.set)
        try:
            gevent.wait([test.over, test.session.stopped], count=1)
        finally:
            close()
        raise StopUser
