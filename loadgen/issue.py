"""Issuing a plan: open loop on absolute deadlines, conversations, or closed loop with users who wait for their answers.

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


async def issue_open(session: Session, t0_ns: int) -> None:
    """Issue each request at t0 + its due time, whatever has been answered; returns when the last one has left."""
    await _until_over(session, open_loop, t0_ns)


async def issue_closed(session: Session, t0_ns: int) -> None:
    """``concurrency`` users, each asking again a think time after the end of its answer; returns when the plan is over.

    The plan is over at t0 + ``end_ns``, or where that is 0, when every body has been issued (or abandoned, after an
    earlier turn of its conversation failed).
    """
    await _until_over(session, closed_loop, t0_ns)


def open_loop(session: Session, t0_ns: int, done: Callable[[], None]) -> Close:
    """What ``issue_open`` awaits, on any event loop: calls ``done`` once the last has left; returns what ends it."""
    if len(session.plan.turns):
        return conversations(session, t0_ns, done)
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


def conversations(session: Session, t0_ns: int, done: Callable[[], None]) -> Close:
    """An open loop whose plan has turns: first turns at their due times, each other a think time after the one before.

    What follows a failed turn is recorded as abandoned, at the time at which the next turn would have been due.
    """
    talks = Conversations(session.plan, t0_ns)

    def wake() -> None:
        for _ in range(_BURST):
            due = talks.take(monotonic_ns() + _EARLY_NS)
            if due is None:
                break
            index, due_ns = due
            while monotonic_ns() < due_ns:
                pass
            session.send(session.exchange(index), due_ns)
        arm()

    def arm() -> None:
        at_ns = talks.next_ns
        over = at_ns is None and not talks.awaits_answers()
        if over or (talks.awaits_answers() and at_ns is not None and at_ns <= monotonic_ns()):
            done()
        elif at_ns is not None:
            timer.arm(at_ns - _EARLY_NS if not talks.awaits_answers() else at_ns)

    timer = Timer(session.loop, wake)
    session.on_finished = _hearing(session, talks, arm)
    arm()
    return _closing(session, talks, timer)


def closed_loop(session: Session, t0_ns: int, done: Callable[[], None]) -> Close:
    """What ``issue_closed`` awaits, on any event loop: calls ``done`` when the plan is over; returns what ends it."""
    if not session.plan.concurrency:
        done()
        return lambda: None
    users = Users(session.plan, t0_ns)

    def wake() -> None:
        for _ in range(_BURST):
            due = users.take(monotonic_ns())
            if due is None:
                break
            session.send(session.exchange(due[0]), due[1])
        arm()

    def arm() -> None:
        at_ns = users.next_ns
        if users.is_over(monotonic_ns()):
            done()
        elif at_ns is not None:
            timer.arm(at_ns)

    timer = Timer(session.loop, wake)
    session.on_finished = _hearing(session, users, arm)
    timer.arm(t0_ns)
    return _closing(session, users, timer)


def _hearing(session: Session, asking: Conversations | Users, arm: Callable[[], None]) -> Callable[[Exchange], None]:
    """What becomes of an answer: whoever asked asks on, or what followed a failed turn is abandoned."""

    def answered(exchange: Exchange) -> None:
        index = session.plan.local_index(exchange.index)
        lost = asking.answered(index, exchange.end_ns, ok=exchange.outcome is Outcome.OK)
        if lost is not None:
            for index in lost.turns:
                session.abandon(index, lost.due_ns)
        arm()

    return answered


def _closing(session: Session, asking: Conversations | Users, timer: Timer) -> Close:
    """What ends the issuing: answers are heard no more, and turns that were never due are noted."""

    def close() -> None:
        session.on_finished = None
        timer.close()
        asking.close()
        if len(session.plan.turns):
            session.writer.json({"type": "conversations", "beyond_end": asking.beyond_end})

    return close


Begin = Callable[[Session, int, Callable[[], None]], Close]
LOOPS: dict[str, Begin] = {"open": open_loop, "closed": closed_loop}


async def _until_over(session: Session, begin: Begin, t0_ns: int) -> None:
    """Returns when all has been issued, or the run is to end early."""
    over = asyncio.Event()
    close = begin(session, t0_ns, over.set)
    waits = [asyncio.ensure_future(event.wait()) for event in (over, session.stopped)]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        close()
        for wait in waits:
            wait.cancel()
