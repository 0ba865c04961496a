"""What stands where Transformers' generation loop keeps its queues: the socket that leads to the API process.

The loop itself takes requests from the socket between steps and sends outputs from where they are made: no thread of
ours competes with it for the interpreter or, on a single core, for the core.
"""

from __future__ import annotations

import queue
import select
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic_ns as now
from typing import Any

from gapmeter.servers.engine_client import Channel, Message
from gapmeter.servers.transformers.probe import EngineProbe


@dataclass(slots=True)
class OpenRequest:
    """A request in the engine: the tokens that end it, and how many of its tokens were sent."""

    end_tokens: frozenset[int]
    sent: int = 0


class Inbox:
    """Stands where the manager keeps its queue of new requests: looking into it reads the socket."""

    def __init__(
        self,
        channel: Channel,
        probe: EngineProbe,
        handle: Callable[[Message], None],
        gone: Callable[[], None],
    ) -> None:
        self._channel = channel
        self._probe = probe
        self._handle = handle
        self._gone = gone
        self._states: deque[Any] = deque()

    def empty(self) -> bool:
        """Read what has come; ``handle`` turns requests into states by the manager's own ``add_request``.

        ``gone`` is called when the other side is gone.
        """
        self._probe.looking()
        for message in self._channel.receive():
            self._handle(message)
        if self._channel.closed:
            self._gone()
        return not self._states

    def get_nowait(self) -> Any:
        """The oldest new request. Raises queue.Empty."""
        if not self._states:
            raise queue.Empty
        return self._states.popleft()

    def put(self, state: Any, block: bool = True, timeout: float | None = None) -> None:
        """Called by the manager's ``add_request``."""
        self._states.append(state)


class WakeEvent:
    """Stands where the manager keeps its wake-up event: an idle loop sleeps on the socket."""

    def __init__(self, channel: Channel, probe: EngineProbe) -> None:
        self._poll = select.poll()
        self._poll.register(channel.socket, select.POLLIN)
        self._probe = probe

    def wait(self, timeout: float | None = None) -> bool:
        """Sleep until a message comes, or ``timeout`` seconds."""
        self._probe.idling()
        woken = bool(self._poll.poll(None if timeout is None else timeout * 1000))
        self._probe.woken(now() if woken else 0)
        return woken

    def set(self) -> None:
        """Nothing to do: who has something to say writes to the socket."""

    def clear(self) -> None:
        """Nothing to do: reading the socket clears it."""


class Outbox:
    """Turns the loop's outputs into one message a step."""

    def __init__(
        self,
        channel: Channel,
        probe: EngineProbe,
        stats: Callable[[], tuple[int | None, ...]],
        gone: Callable[[], None],
    ) -> None:
        self._channel = channel
        self._probe = probe
        self._stats = stats
        self._gone = gone
        self.open: dict[str, OpenRequest] = {}

    def send(self, outputs: list[Any], finished: int, failed: int) -> list[Any]:
        """Send what is new in ``outputs`` (cumulative, as Transformers gives them); returns those that are not ours.

        ``finished`` and ``failed`` are the statuses that end a request; ``gone`` is called when nobody listens.
        """
        start = now()
        entries, emitted, others, over = [], [], [], []
        for output in outputs:
            request = self.open.get(output.request_id)
            if request is None:
                others.append(output)
                continue
            ids = output.generated_tokens[request.sent :]
            request.sent += len(ids)
            reason, error = None, ""
            if output.status == finished:
                reason = "stop" if ids and ids[-1] in request.end_tokens else "length"
            elif output.status == failed:
                reason, error = "error", output.error or "failed"
            entries.append((output.request_id, ids, reason, self._probe.cached(output.request_id), error))
            emitted.append((output.request_id, len(ids)))
            if reason:
                del self.open[output.request_id]
                over.append((output.request_id, reason, request.sent))
        if entries:
            self._probe.emitting(start, emitted)
            try:
                self._channel.send_and_wait("outputs", entries, self._stats())
            except ConnectionError:
                self._gone()
            self._probe.emitted(start, over)
        return others
