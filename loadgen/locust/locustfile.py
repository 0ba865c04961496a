"""A user's own locustfile as a Locust test: its users and its shape decide what is sent when, our client sends it.

Every stamp of their requests is on record, as a plan's are.
"""

from __future__ import annotations

import heapq
import json
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic_ns
from types import TracebackType
from typing import Any

import gevent
import gevent.event
from gevent import monkey
from locust import TaskSet, User
from locust.env import Environment
from locust.exception import StopUser
from locust.runners import LocalRunner
from locust.util.load_locustfile import load_locustfile

from gapmeter.loadgen.exchange import Exchange
from gapmeter.loadgen.generator import Locustfile
from gapmeter.loadgen.issue import AFTER_FAILURE_NS, EARLY_NS
from gapmeter.loadgen.plan import CHAT, COMPLETION
from gapmeter.loadgen.sender import Sender
from gapmeter.records import Outcome
from gapmeter.records.stream import events
from gapmeter.records.timer import Timer

# Locust's sleep is late by a millisecond: end it this much earlier, and wait for the rest on a timer.
_SLEEP_EARLY_S = 0.005
_STAGGER_S = 1.0  # over which users start


@dataclass(frozen=True, slots=True)
class Reply:
    """How a request ended. ``ok``: answered with a 2xx; otherwise ``outcome`` and ``error`` say why not."""

    request_id: str
    ok: bool
    outcome: str
    error: str
    e2e_s: float
    _exchange: Exchange

    @property
    def text(self) -> str:
        """The answer, of several the first. Parsed from the recorded bytes at every call, in the user's time."""
        return "".join(_text_of(data) for _, data in events(self._exchange.collect()))


class GapmeterUser(User):
    """A user who sends a request and waits for the answer; each is due a think time after the end of the one before.

    The think time is what ``wait_time`` says between tasks, and ``think`` or ``wait`` within them. Any other time that
    a task takes before its request makes that late, and is shown as the load tester's lag.
    """

    abstract = True
    environment: LocustfileTest

    def __init__(self, environment: LocustfileTest) -> None:
        super().__init__(environment)
        self._answered_ns = self._thought_ns = 0

    def ask(
        self, prompt: str | Sequence[str] = "", *, messages: Sequence[dict[str, Any]] | None = None,
        completion: bool = False, max_tokens: int = 64, exact: bool = False, temperature: float = 0.0, **more: Any,
    ) -> Reply:  # fmt: skip
        """Send a request and wait for the whole answer. ``messages``, instead of a prompt, continue a conversation.

        ``completion``: no chat, the prompt as it is, or several in a list. ``exact``: each answer is to have
        ``max_tokens`` tokens (vLLM's ``ignore_eos``). ``more`` goes into the body (``n=2``: two answers). A failed
        request has a reply, too. The user ends with the run.
        """
        question = {"prompt": prompt} if completion else {"messages": messages or [{"role": "user", "content": prompt}]}
        body: dict[str, Any] = {**question, "max_tokens": max_tokens, "temperature": temperature, **more}
        if exact:
            body |= {"min_tokens": max_tokens, "ignore_eos": True}
        due_ns = (self._answered_ns or monotonic_ns()) + self._thought_ns
        exchange = self.environment.requests.send(COMPLETION if completion else CHAT, body, due_ns)
        good = exchange.outcome is Outcome.OK
        self._answered_ns, self._thought_ns = exchange.end_ns, 0 if good else AFTER_FAILURE_NS
        e2e_s = (exchange.end_ns - due_ns) / 1e9
        return Reply(exchange.request_id, good, exchange.outcome.name.lower(), exchange.error, e2e_s, exchange)

    def think(self, seconds: float) -> None:
        """Pause before the next request, as somebody does who reads the answer."""
        gevent.sleep(GapmeterUser._pause(self, seconds))

    def _pause(self, seconds: float) -> float:
        """Add to the think time; returns how long to sleep for it. Before the first request there is none to add to."""
        if not self._answered_ns:
            return seconds
        self._thought_ns += round(seconds * 1e9)
        return max(0.0, (self._answered_ns + self._thought_ns - monotonic_ns()) / 1e9 - _SLEEP_EARLY_S)


def _between_tasks(tasks: Any, seconds: float) -> None:
    """In place of Locust's sleep: what a user, or a set of tasks, has as ``wait_time`` is time to think."""
    GapmeterUser.think(tasks.user, seconds)


def _text_of(data: str) -> str:
    """Of one event; "" where it is none of an answer: a failure has no text, and ends no user."""
    try:
        choices = [choice for choice in json.loads(data).get("choices") or () if not choice.get("index")] or [{}]
        part = choices[0].get("delta") or choices[0].get("message") or choices[0]
        return str(part.get("content") or part.get("text") or "")
    except (ValueError, AttributeError, LookupError, TypeError, RecursionError):
        return ""


class RequestQueue:
    """Users' own requests until they are due, and users until they are answered. ``file`` completes the bodies."""

    def __init__(self, sender: Sender, file: Locustfile) -> None:
        self._sender, self._file = sender, file
        self._due: list[tuple[int, int, Exchange]] = []
        self._answers: dict[int, Any] = {}  # by the request's index
        self._composed = self._of_several = self._most_choices = 0
        self._closed = False
        self._timer = Timer(sender.loop, self._wake)
        sender.on_finished = self._answered

    def send(self, path: str, fields: dict[str, Any], due_ns: int) -> Exchange:
        """Have a request with these fields sent at ``due_ns``, or at once if that has passed; returns when it ended.

        Raises StopUser when nothing more is to be issued.
        """
        if self._closed or self._sender.stopped.is_set():
            raise StopUser
        stream = {"include_usage": True} | ({"continuous_usage_stats": True} if self._file.dialect == "full" else {})
        body = {"model": self._file.model, "stream": True, "stream_options": stream, **fields}
        prompts = fields.get("prompt")
        choices = int(fields.get("n", 1))
        if isinstance(prompts, list | tuple) and not all(isinstance(part, int) for part in prompts):  # not one's ids
            choices *= len(prompts)
        self._of_several += choices > 1
        self._most_choices = max(self._most_choices, choices)
        asked = choices * int(fields.get("min_tokens", 0))
        exchange = self._sender.compose(self._composed, path, json.dumps(body).encode(), asked)
        self._composed += 1
        answer = self._answers[exchange.index] = gevent.event.AsyncResult()
        try:
            if due_ns <= monotonic_ns():
                self._sender.send(exchange, due_ns)
            else:
                heapq.heappush(self._due, (due_ns, exchange.index, exchange))
                self._timer.arm(self._due[0][0] - EARLY_NS)
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
        if self._of_several:
            note = {"type": "choices", "requests": self._of_several, "most": self._most_choices}
            self._sender.writer.json(note)

    def _wake(self) -> None:
        if self._sender.stopped.is_set():
            return
        while self._due and self._due[0][0] <= monotonic_ns() + EARLY_NS:
            due_ns, index, exchange = heapq.heappop(self._due)
            if index not in self._answers:
                continue
            while monotonic_ns() < due_ns:
                pass
            self._sender.send(exchange, due_ns)
        if self._due:
            self._timer.arm(self._due[0][0] - EARLY_NS)

    def _answered(self, exchange: Exchange) -> None:
        if (answer := self._answers.get(exchange.index)) is not None:
            answer.set(exchange)


class BadLocustfile(Exception):
    """The file cannot be used; the text says why."""


class LocustfileTest(Environment):
    """A Locust test of the users and the shape in a file. ``over``: the shape, or the plan's time, has ended.

    ``failed`` is what a task raised, with its place; it ends the run. Raises BadLocustfile.
    """

    def __init__(self, sender: Sender, url: str, file: Locustfile) -> None:
        monkey.patch_time()  # a task that sleeps must not stop all others
        every_set: Any = TaskSet
        every_set._sleep = _between_tasks
        path = Path(file.path)
        users, shape = load(path)
        super().__init__(user_classes=users, shape_class=shape, host=url)
        self.sender, self._path = sender, path
        self.requests = RequestQueue(sender, file)
        self.over = gevent.event.Event()
        self.failed = ""
        self.events.user_error.add_listener(self._raised)
        self.events.test_stop.add_listener(lambda **_: self.over.set())

    def begin(self) -> LocalRunner:
        """Make the runner; users come with the start."""
        runner = self.create_local_runner()
        if self.shape_class is not None:
            self.shape_class.runner = runner
        return runner

    def issue(self, t0_ns: int) -> None:
        """Returns when the time is over, the shape has ended, or the run is stopped."""
        plan, sender = self.sender.plan, self.sender
        gevent.sleep(max(0.0, (t0_ns - monotonic_ns()) / 1e9))
        assert self.runner is not None
        if self.shape_class is not None:
            self.runner.start_shape()
        else:
            self.runner.start(plan.concurrency, max(1.0, plan.concurrency / _STAGGER_S))
        left_s = max(0.0, (t0_ns + plan.end_ns - monotonic_ns()) / 1e9)
        gevent.wait([self.over, sender.stopped], timeout=left_s, count=1)
        self.requests.close()

    def _raised(self, user_instance: Any, exception: BaseException, tb: TracebackType | None, **_: Any) -> None:
        if not self.failed:
            self.failed = f"{_place(self._path, tb)}: {type(exception).__name__}: {exception}"
            gevent.spawn(self.sender.stop, "a task of the locustfile failed")


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
