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
    """Issue each request at t0 + its due time, whatever has been answered. Returns when the last one has left."""
    await _until_over(session, open_loop, t0_ns)


async def issue_closed(session: Session, t0_ns: int) -> None:
    """``concurrency`` users, each sending its next request a think time after its answer. Returns at the plan's end.

    The plan is over at t0 + ``end_ns``, or where that is 0, when every body has been issued (or abandoned, after an
    earlier turn of its conversation failed).
    """
    await _until_over(session, closed_loop, t0_ns)


def open_loop(session: Session, t0_ns: int, done: Callable[[], None]) -> Close:
    """An open loop on any event loop: calls ``done`` once the last request has left. Returns what ends it."""
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

    What would have followed a failed turn is recorded as abandoned, at the time when the next turn would have been due.
    """
    turns = Conversations(session.plan, t0_ns)

    def wake() -> None:
        for _ in range(_BURST):
            due = turns.take(monotonic_ns() + _EARLY_NS)
            if due is None:
                break
            index, due_ns = due
            while monotonic_ns() < due_ns:
                pass
            session.send(session.exchange(index), due_ns)
        arm()

    def arm() -> None:
        at_ns = turns.next_ns
        over = at_ns is None and not turns.awaits_answers()
        if over or (turns.awaits_answers() and at_ns is not None and at_ns <= monotonic_ns()):
            done()
        elif at_ns is not None:
            timer.arm(at_ns - _EARLY_NS if not turns.awaits_answers() else at_ns)

    timer = Timer(session.loop, wake)
    session.on_finished = _on_answer(session, turns, arm)
    arm()
    return _closer(session, turns, timer)


def closed_loop(session: Session, t0_ns: int, done: Callable[[], None]) -> Close:
    """A closed loop on any event loop: calls ``done`` when the plan is over. Returns what ends it."""
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
    session.on_finished = _on_answer(session, users, arm)
    timer.arm(t0_ns)
    return _closer(session, users, timer)


def _on_answer(session: Session, senders: Conversations | Users, arm: Callable[[], None]) -> Callable[[Exchange], None]:
    """What follows an answer: the user's next request, or, where a turn failed, the rest of its turns as abandoned."""

    def answered(exchange: Exchange) -> None:
        index = session.plan.local_index(exchange.index)
        lost = senders.answered(index, exchange.end_ns, ok=exchange.outcome is Outcome.OK)
        if lost is not None:
            for index in lost.turns:
                session.abandon(index, lost.due_ns)
        arm()

    return answered


def _closer(session: Session, senders: Conversations | Users, timer: Timer) -> Close:
    """What ends the issuing: no answer leads to another request, and turns that were never due are counted."""

    def close() -> None:
        session.on_finished = None
        timer.close()
        senders.close()
        if len(session.plan.turns):
            session.writer.json({"type": "conversations", "beyond_end": senders.beyond_end})

    return close


Begin = Callable[[Session, int, Callable[[], None]], Close]
LOOPS: dict[str, Begin] = {"open": open_loop, "closed": closed_loop}


async def _until_over(session: Session, begin: Begin, t0_ns: int) -> None:
    """Returns when all has been issued, or the run is stopped."""
    over = asyncio.Event()
    close = begin(session, t0_ns, over.set)
    waits = [asyncio.ensure_future(event.wait()) for event in (over, session.stopped)]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        close()
        for wait in waits:
            wait.cancel()
