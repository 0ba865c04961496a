"""Issuing a plan: open loop on absolute deadlines, or a request after each answer (conversations, closed loop).

Neither waits for the last answers: ``Sender.drain`` does.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic_ns

import numpy as np

from gapmeter.loadgen.exchange import Exchange
from gapmeter.loadgen.plan import Plan
from gapmeter.loadgen.sender import Sender
from gapmeter.records import Outcome
from gapmeter.records.timer import Timer

# After this many requests the loop reads its sockets, even if more are due.
_BURST = 16
# Waking an idle core takes some 30 µs: the timer goes off this much earlier, and the rest is spun.
EARLY_NS = 50_000
# A user whose request failed sends the next one no sooner: a server that refuses at once would use up the plan.
AFTER_FAILURE_NS = 100_000_000
_STAGGER_NS = 1_000_000_000
_ANEW = -1  # in place of a request: whatever comes next in the plan

Close = Callable[[], None]


async def issue(sender: Sender, t0_ns: int) -> None:
    """Issue the sender's plan, in asyncio. Returns when it is over, or the run is stopped.

    Open loop: each request at t0 + its due time, whatever has been answered; over when the last one has left. Closed
    loop: ``concurrency`` users, each sending its next request a think time after its answer; over at t0 + ``end_ns``,
    or where that is 0, when every body has been issued, or abandoned after an earlier turn of its conversation failed.
    """
    over = asyncio.Event()
    close = begin(sender, t0_ns, over.set)
    waits = [asyncio.ensure_future(event.wait()) for event in (over, sender.stopped)]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        close()
        for wait in waits:
            wait.cancel()


def begin(sender: Sender, t0_ns: int, done: Callable[[], None]) -> Close:
    """As ``issue``, on any event loop: calls ``done`` when the plan is over. Returns what ends the issuing."""
    plan = sender.plan
    if plan.loop == "closed":
        return _after_answers(sender, Users(plan, t0_ns), done)
    if len(plan.turns):
        return _after_answers(sender, Conversations(plan, t0_ns), done)
    return _at_due_times(sender, t0_ns, done)


def _at_due_times(sender: Sender, t0_ns: int, done: Callable[[], None]) -> Close:
    due = (sender.plan.due_ns + t0_ns).tolist()
    at, count = 0, len(due)

    def wake() -> None:
        nonlocal at
        if sender.stopped.is_set():
            return
        last = min(at + _BURST, count)
        while at < last and due[at] <= monotonic_ns() + EARLY_NS:
            while monotonic_ns() < due[at]:
                pass
            sender.send(sender.exchange(at), due[at])
            at += 1
        if at < count:
            timer.arm(due[at] - EARLY_NS)
        else:
            done()

    timer = Timer(sender.loop, wake)
    timer.arm((due[0] if due else t0_ns) - EARLY_NS)
    return timer.close


def _after_answers(sender: Sender, users: Conversations | Users, done: Callable[[], None]) -> Close:
    """Requests whose due times depend on answers."""

    def wake() -> None:
        if sender.stopped.is_set() or sender.on_finished is None:  # closed meanwhile
            return
        for _ in range(_BURST):
            due = users.take(monotonic_ns() + EARLY_NS)
            if due is None:
                break
            index, due_ns = due
            while monotonic_ns() < due_ns:
                pass
            sender.send(sender.exchange(index), due_ns)
        arm()

    def arm() -> None:
        at_ns = users.next_ns
        if users.is_over(monotonic_ns()):
            done()
        elif at_ns is not None and at_ns <= monotonic_ns() + EARLY_NS:
            sender.loop.call_soon(wake)  # a timer would go off behind all that the loop has to do already
        elif at_ns is not None:
            timer.arm(at_ns - EARLY_NS)

    def close() -> None:
        sender.on_finished = None
        timer.close()
        users.close()
        if len(sender.plan.turns):
            sender.writer.json({"type": "conversations", "beyond_end": users.beyond_end})

    timer = Timer(sender.loop, wake)
    sender.on_finished = _on_answer(sender, users, arm)
    arm()
    return close


def _on_answer(sender: Sender, users: Conversations | Users, arm: Callable[[], None]) -> Callable[[Exchange], None]:
    """What follows an answer: the user's next request, or, where a turn failed, the rest of its turns as abandoned.

    Those are recorded at the time when the next of them would have been due.
    """

    def answered(exchange: Exchange) -> None:
        good = exchange.outcome is Outcome.OK and not exchange.is_plainly_none()
        unsent = users.answered(exchange.own_index, exchange.end_ns, ok=good)
        if unsent is not None:
            for index in unsent.turns:
                sender.abandon(index, unsent.due_ns)
        arm()

    return answered


@dataclass(frozen=True, slots=True)
class Abandoned:
    """Turns that are never sent because the one before them failed, and when the next of them would have been due."""

    turns: range
    due_ns: int


class Conversations:
    """The turns that are due, the next one first: first turns by the plan, others a think time after an answer's end.

    Times are CLOCK_MONOTONIC ns. ``beyond_end`` counts turns that would have been due after the plan's end.
    """

    def __init__(self, plan: Plan, t0_ns: int) -> None:
        self._plan = plan
        self._end_ns = t0_ns + plan.end_ns if plan.end_ns else None
        first = np.flatnonzero(plan.turns == 1)
        self._waiting = [(t0_ns + int(plan.due_ns[i]), int(i)) for i in first]
        heapq.heapify(self._waiting)
        self._unanswered: set[int] = set()  # turns without an answer yet that others follow
        self.beyond_end = 0

    @property
    def next_ns(self) -> int | None:
        """When something is due next; the plan's end while only answers are awaited; None when all is over."""
        if self._waiting:
            return self._waiting[0][0]
        return self._end_ns if self._unanswered else None

    def is_over(self, now_ns: int) -> bool:
        """Whether nothing more is sent: nothing is due, and no answer can bring more before the plan's end."""
        if self._waiting:
            return False
        return not self._unanswered or (self._end_ns is not None and now_ns >= self._end_ns)

    def take(self, now_ns: int) -> tuple[int, int] | None:
        """The next turn and its due time, if it is due by now."""
        if not self._waiting or self._waiting[0][0] > now_ns:
            return None
        due_ns, index = heapq.heappop(self._waiting)
        if self._plan.follower(index) is not None:
            self._unanswered.add(index)
        return index, due_ns

    def answered(self, index: int, end_ns: int, *, ok: bool) -> Abandoned | None:
        """A turn has ended. Returns the turns that its failure leaves unsent, if there are any."""
        following = self._plan.follower(index)
        if index not in self._unanswered or following is None:
            return None
        self._unanswered.discard(index)
        due_ns = end_ns + self._plan.pause_ns(index)
        if self._end_ns is not None and due_ns >= self._end_ns:
            self.beyond_end += len(self._plan.turns_from(following))
        elif ok:
            heapq.heappush(self._waiting, (due_ns, following))
        else:
            return Abandoned(self._plan.turns_from(following), due_ns)
        return None

    def close(self) -> None:
        """Send nothing more: a turn that has not been answered yet is its conversation's last."""
        for index in self._unanswered:
            self.beyond_end += len(self._plan.turns_from(index + 1))
        self._unanswered.clear()


class Users:
    """The plan's users, in the order of their next requests. Times are CLOCK_MONOTONIC ns.

    A user is due a think time after the end of its last answer: with the next turn of its conversation, or where that
    was the last or the plan has none, with whatever comes next in the plan. After a failure the rest of a conversation
    is abandoned. Users start one after the other over the think time, at most a second and a tenth of the run, so that
    they do not send in step. ``beyond_end`` counts the turns of conversations that the plan's end broke off.
    """

    def __init__(self, plan: Plan, t0_ns: int) -> None:
        self._plan = plan
        self._end_ns = t0_ns + plan.end_ns if plan.end_ns else None
        over_ns = min(_STAGGER_NS, plan.think_time_ns or _STAGGER_NS, plan.end_ns // 10 or _STAGGER_NS)
        numbers = [nth * plan.workers + plan.worker for nth in range(plan.concurrency)]  # others' are between them
        waits_ns = [number * over_ns // (plan.users_in_all or plan.concurrency) for number in numbers]
        self._waiting: list[tuple[int, int]] = [(t0_ns + wait_ns, _ANEW) for wait_ns in waits_ns]
        self._firsts = np.flatnonzero(plan.turns == 1) if len(plan.turns) else None
        self._begun = 0
        self._unanswered: set[int] = set()  # turns without an answer yet that others follow
        self.beyond_end = 0

    @property
    def next_ns(self) -> int | None:
        """When the next request is due, or the plan's time is over; None while only answers can bring more."""
        times = [due_ns for due_ns, _ in self._waiting[:1]] + ([] if self._end_ns is None else [self._end_ns])
        return min(times, default=None)

    def is_over(self, now_ns: int) -> bool:
        """Whether nothing more is sent: the plan's time is over, or all of it has been sent."""
        if not self._plan.concurrency:  # a slice may have none of the users
            return True
        if self._end_ns is not None:
            return now_ns >= self._end_ns
        return self._used_up() and not self._unanswered and all(index == _ANEW for _, index in self._waiting)

    def take(self, now_ns: int) -> tuple[int, int] | None:
        """The next request and when it was due, if one is due by now."""
        while self._waiting and self._waiting[0][0] <= now_ns and not self.is_over(now_ns):
            due_ns, index = heapq.heappop(self._waiting)
            if index == _ANEW:
                if self._used_up():
                    continue  # this user leaves
                index = self._begin()
            if self._plan.follower(index) is not None:
                self._unanswered.add(index)
            return index, due_ns
        return None

    def answered(self, index: int, end_ns: int, *, ok: bool) -> Abandoned | None:
        """A request has ended, its user is free. Returns the turns that its failure leaves unsent, if there are any."""
        pause_ns = self._plan.pause_ns(index)
        following = self._plan.follower(index)
        self._unanswered.discard(index)
        if ok:
            heapq.heappush(self._waiting, (end_ns + pause_ns, _ANEW if following is None else following))
            return None
        due_ns = end_ns + max(pause_ns, AFTER_FAILURE_NS)
        heapq.heappush(self._waiting, (due_ns, _ANEW))
        if following is None:
            return None
        unsent = self._plan.turns_from(following)
        if self._end_ns is not None and due_ns >= self._end_ns:
            self.beyond_end += len(unsent)
            return None
        return Abandoned(unsent, due_ns)

    def close(self) -> None:
        """Send nothing more."""
        broken_off = [index + 1 for index in self._unanswered] + [index for _, index in self._waiting if index != _ANEW]
        self.beyond_end += sum(len(self._plan.turns_from(index)) for index in broken_off)
        self._unanswered.clear()
        self._waiting.clear()

    def _used_up(self) -> bool:
        each = len(self._plan) if self._firsts is None else len(self._firsts)
        return self._end_ns is None and self._begun >= each

    def _begin(self) -> int:
        """The next request of the plan that follows no other; after the last one they come round again, changed."""
        number, self._begun = self._begun, self._begun + 1
        if self._firsts is None:
            return number
        cycle, at = divmod(number, len(self._firsts))
        return cycle * len(self._plan) + int(self._firsts[at])
