"""Issuing a plan: open loop on absolute deadlines, or closed loop with users who wait for their answers.

Neither waits for the answers to its last requests: that is ``Session.drain``.
"""

from __future__ import annotations

import asyncio
import heapq
from time import monotonic_ns

from loadgen.exchange import Exchange
from loadgen.session import Session
from recording import Outcome
from recording.timer import Timer

# After so many the loop gets to read its sockets, however many more are due.
_BURST = 16
# Waking an idle core takes some 30 µs: the timer goes off this much earlier, and the rest is spun.
_EARLY_NS = 50_000
# A user whose request failed asks again no sooner: a server that refuses at once would eat the plan in a second.
_AFTER_FAILURE_NS = 100_000_000
_STAGGER_NS = 1_000_000_000


async def issue_open(session: Session, t0_ns: int) -> None:
    """Issue each request at t0 + its due time, whatever has been answered; returns when the last one has left."""
    due = (session.plan.due_ns + t0_ns).tolist()
    done = asyncio.Event()
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
            done.set()

    timer = Timer(asyncio.get_running_loop(), wake)
    timer.arm((due[0] if due else t0_ns) - _EARLY_NS)
    try:
        await _first(done, session.stopped)
    finally:
        timer.close()


async def issue_closed(session: Session, t0_ns: int) -> None:
    """``concurrency`` users, each asking again a think time after the end of its answer; returns when the plan is over.

    The plan is over at t0 + ``end_ns``, or where that is 0, when every body has been issued. Users start one after the
    other over the think time, at most a second and a tenth of the run, so that they do not march in step.
    """
    plan = session.plan
    if not plan.concurrency:
        return
    limit = None if plan.end_ns else len(plan)
    end_ns = t0_ns + plan.end_ns if plan.end_ns else None
    over_ns = min(_STAGGER_NS, plan.think_time_ns or _STAGGER_NS, plan.end_ns // 10 or _STAGGER_NS)
    waiting = [t0_ns + user * over_ns // plan.concurrency for user in range(plan.concurrency)]
    done = asyncio.Event()
    issued = 0

    def wake() -> None:
        nonlocal issued
        for _ in range(_BURST):
            now = monotonic_ns()
            if issued == limit or (end_ns is not None and now >= end_ns):
                done.set()
                return
            if not waiting or waiting[0] > now:
                break
            issued += 1
            session.send(session.exchange(issued - 1), heapq.heappop(waiting))
        arm()

    def arm() -> None:
        if waiting:
            timer.arm(waiting[0] if end_ns is None else min(waiting[0], end_ns))
        elif end_ns is not None:
            timer.arm(end_ns)

    def ask_again(exchange: Exchange) -> None:
        pause = plan.think_time_ns
        if exchange.outcome is not Outcome.OK:
            pause = max(pause, _AFTER_FAILURE_NS)
        heapq.heappush(waiting, exchange.end_ns + pause)
        arm()

    timer = Timer(asyncio.get_running_loop(), wake)
    session.on_finished = ask_again
    timer.arm(t0_ns)
    try:
        await _first(done, session.stopped)
    finally:
        session.on_finished = None
        timer.close()


async def _first(*events: asyncio.Event) -> None:
    """Returns as soon as one of the events is set."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
