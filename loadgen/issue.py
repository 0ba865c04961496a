"""Issuing a plan: open loop on absolute deadlines, or a request after each answer (conversations, closed loop).

Neither waits for the answers to its last requests: that is ``Session.drain``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic_ns

from gapmeter.loadgen.exchange import Exchange
from gapmeter.loadgen.session import Session
from gapmeter.loadgen.users import Conversations, Users
from gapmeter.records import Outcome
from gapmeter.records.timer import Timer

# After so many the loop gets to read its sockets, however many more are due.
_BURST = 16
# Waking an idle core takes some 30 µs: the timer goes off this much earlier, and the rest is spun.
_EARLY_NS = 50_000

Close = Callable[[], None]


async def issue(session: Session, t0_ns: int) -> None:
    """Issue the session's plan, in asyncio. Returns when it is over, or the run is stopped.

    Open loop: each request at t0 + its due time, whatever has been answered; over when the last one has left. Closed
    loop: ``concurrency`` users, each sending its next request a think time after its answer; over at t0 + ``end_ns``,
    or where that is 0, when every body has been issued, or abandoned after an earlier turn of its conversation failed.
    """
    over = asyncio.Event()
    close = begin(session, t0_ns, over.set)
    waits = [asyncio.ensure_future(event.wait()) for event in (over, session.stopped)]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        close()
        for wait in waits:
            wait.cancel()


def begin(session: Session, t0_ns: int, done: Callable[[], None]) -> Close:
    """As ``issue``, on any event loop: calls ``done`` when the plan is over. Returns what ends the issuing."""
    plan = session.plan
    if plan.loop == "closed":
        return _after_answers(session, Users(plan, t0_ns), done)
    if len(plan.turns):
        return _after_answers(session, Conversations(plan, t0_ns), done)
    return _at_due_times(session, t0_ns, done)


def _at_due_times(session: Session, t0_ns: int, done: Callable[[], None]) -> Close:
    due = (session.plan.due_ns + t0_ns).tolist()
    at, count = 0, len(due)

    def wake() -> None:
        nonlocal at
        last = min(at + _BURST, count)
        while at < last and due[at] <= monotonic_ns() + _EARLY_NS:
            while monotonic_ns() < due[at]:
                pass
            session.send(session.exchange(at), due[at])
            at += 1
        if at < count:
            timer.arm(due[at] - _EARLY_NS)
        else:
            done()

    timer = Timer(session.loop, wake)
    timer.arm((due[0] if due else t0_ns) - _EARLY_NS)
    return timer.close


def _after_answers(session: Session, senders: Conversations | Users, done: Callable[[], None]) -> Close:
    """Requests whose due times depend on answers."""

    def wake() -> None:
        for _ in range(_BURST):
            due = senders.take(monotonic_ns() + _EARLY_NS)
            if due is None:
                break
            index, due_ns = due
            while monotonic_ns() < due_ns:
                pass
            session.send(session.exchange(index), due_ns)
        arm()

    def arm() -> None:
        at_ns = senders.next_ns
        if senders.is_over(monotonic_ns()):
            done()
        elif at_ns is not None:
            timer.arm(at_ns - _EARLY_NS)

    def close() -> None:
        session.on_finished = None
        timer.close()
        senders.close()
        if len(session.plan.turns):
            session.writer.json({"type": "conversations", "beyond_end": senders.beyond_end})

    timer = Timer(session.loop, wake)
    session.on_finished = _on_answer(session, senders, arm)
    arm()
    return close


def _on_answer(session: Session, senders: Conversations | Users, arm: Callable[[], None]) -> Callable[[Exchange], None]:
    """What follows an answer: the user's next request, or, where a turn failed, the rest of its turns as abandoned.

    Those are recorded at the time when the next of them would have been due.
    """

    def answered(exchange: Exchange) -> None:
        index = session.plan.local_index(exchange.index)
        unsent = senders.answered(index, exchange.end_ns, ok=exchange.outcome is Outcome.OK)
        if unsent is not None:
            for index in unsent.turns:
                session.abandon(index, unsent.due_ns)
        arm()

    return answered
