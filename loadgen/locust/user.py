"""The base class of users in a locustfile: every stamp of their requests is on record, as a plan's are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

import gevent
from locust import User

from gapmeter.loadgen.content import CHAT, COMPLETION
from gapmeter.loadgen.exchange import Exchange
from gapmeter.records import Outcome
from gapmeter.records.stream import events

if TYPE_CHECKING:
    from gapmeter.loadgen.locust.locustfile import LocustfileTest

# Locust's sleep is late by a millisecond: end it this much earlier, and wait for the rest on a timer.
_EARLY_S = 0.005
# A user whose request failed sends the next one no sooner: else a server that refuses at once gets no pause.
_AFTER_FAILURE_NS = 100_000_000


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
        """The answer. Parsed from the recorded bytes at every call, which takes a little of the user's time."""
        return "".join(_text(data) for _, data in events(self._exchange.collect()))


class GapmeterUser(User):
    """A user who sends a request and waits for the answer; each is due a think time after the end of the one before.

    The think time is what ``wait_time`` says between tasks, and ``think`` within them. Any other time that a task takes
    before its request makes that late, and is shown as the load tester's lag.
    """

    abstract = True
    environment: LocustfileTest

    def __init__(self, environment: LocustfileTest) -> None:
        super().__init__(environment)
        self._answered_ns = self._thought_ns = 0
        drawn = self.wait_time
        self.wait_time = lambda: self._pause(drawn())  # type: ignore[method-assign]

    def ask(
        self, prompt: str = "", *, messages: Sequence[dict[str, Any]] | None = None, completion: bool = False,
        max_tokens: int = 64, exact: bool = False, temperature: float = 0.0, **more: Any,
    ) -> Reply:  # fmt: skip
        """Send a request and wait for the whole answer. ``messages``, instead of a prompt, continue a conversation.

        ``completion``: no chat, the prompt as it is. ``exact``: the answer is to have ``max_tokens`` tokens (vLLM's
        ``ignore_eos``). ``more`` goes into the body. A failed request has a reply, too. The user ends with the run.
        """
        said = {"prompt": prompt} if completion else {"messages": messages or [{"role": "user", "content": prompt}]}
        body: dict[str, Any] = {**said, "max_tokens": max_tokens, "temperature": temperature, **more}
        if exact:
            body |= {"min_tokens": max_tokens, "ignore_eos": True}
        due_ns = (self._answered_ns or monotonic_ns()) + self._thought_ns
        exchange = self.environment.requests.send(COMPLETION if completion else CHAT, body, due_ns)
        good = exchange.outcome is Outcome.OK
        self._answered_ns, self._thought_ns = exchange.end_ns, 0 if good else _AFTER_FAILURE_NS
        e2e_s = (exchange.end_ns - due_ns) / 1e9
        return Reply(exchange.request_id, good, exchange.outcome.name.lower(), exchange.error, e2e_s, exchange)

    def think(self, seconds: float) -> None:
        """Pause before the next request, as somebody does who reads the answer."""
        gevent.sleep(self._pause(seconds))

    def _pause(self, seconds: float) -> float:
        """Add to the think time; returns how long to sleep for it."""
        self._thought_ns += round(seconds * 1e9)
        if not self._answered_ns:
            return seconds
        return max(0.0, (self._answered_ns + self._thought_ns - monotonic_ns()) / 1e9 - _EARLY_S)


def _text(data: str) -> str:
    if data == "[DONE]":
        return ""
    choices = json.loads(data).get("choices") or [{}]
    part = choices[0].get("delta") or choices[0].get("message") or choices[0]
    return str(part.get("content") or part.get("text") or "")
