"""Where users' own requests wait until they are due, and users for their answers."""

from __future__ import annotations

import heapq
import json
from time import monotonic_ns
from typing import Any

import gevent.event
from locust.exception import StopUser

from gapmeter.loadgen.exchange import Exchange
from gapmeter.loadgen.session import Session
from gapmeter.records.timer import Timer

# As an open loop's: the timer goes off a little earlier, and the rest is spun.
_EARLY_NS = 50_000


class Desk:
    """Sends each request when it is due, from the event loop; ``model`` and ``dialect`` complete the bodies."""

    def __init__(self, session: Session, model: str, dialect: str) -> None:
        self._session, self._model, self._dialect = session, model, dialect
        self._due: list[tuple[int, int, Exchange]] = []
        self._answers: dict[int, Any] = {}  # by the request's index: who waits for it
        self._made = 0
        self._closed = False
        self._timer = Timer(session.loop, self._wake)
        session.on_finished = self._answered

    def ask(self, path: str, ask: dict[str, Any], due_ns: int) -> Exchange:
        """Have it sent at ``due_ns``, at once if that has passed; returns when its fate is known.

        Raises StopUser when nothing more is to be issued.
        """
        if self._closed:
            raise StopUser
        stream = {"include_usage": True} | ({"continuous_usage_stats": True} if self._dialect == "full" else {})
        body = {"model": self._model, "stream": True, "stream_options": stream, **ask}
        exchange = self._session.compose(self._made, path, json.dumps(body).encode(), int(ask.get("min_tokens", 0)))
        self._made += 1
        answer = self._answers[exchange.index] = gevent.event.AsyncResult()
        try:
            self._put(due_ns, exchange)
            found: Exchange = answer.get()
        finally:  # a user whom a shape takes away leaves; what has been sent is still answered, and recorded
            self._answers.pop(exchange.index, None)
        return found

    def close(self) -> None:
        """Nothing more is sent: users who have not asked yet end."""
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
