"""aiohttp's low-level server, with a stamp on the first bytes of every request and writes that leave at once."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web
from gapmeter_probe.cores import CoreWaits

from gapmeter.records import CoreThread
from gapmeter.servers.api.stamps import now

_MOST_BODY_BYTES = 64 << 20
_LOOP = int(CoreThread.LOOP)


class StampedHandler(web.RequestHandler):
    """A connection. ``first_ns``: when bytes of the request that is being read, or comes next, were first seen."""

    __slots__ = ("_waits", "first_ns")

    def __init__(self, waits: CoreWaits, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._waits = waits
        self.first_ns = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if isinstance(transport, asyncio.WriteTransport):
            # uvloop gathers writes until its loop comes round, except beyond this mark: what a write call returned
            # from has left, and the stamp after it tells the truth.
            transport.set_write_buffer_limits(high=0)

    def data_received(self, data: bytes) -> None:
        if not self.first_ns:
            self.first_ns = now()
            self._waits.woken(_LOOP, self.first_ns)
        super().data_received(data)


class StampedRequest(web.BaseRequest):
    """A request that knows when its first bytes were seen."""

    ATTRS = web.BaseRequest.ATTRS | frozenset(("begun_ns",))
    begun_ns: int

    def finished(self) -> None:
        """The request has been read and answered: the next bytes belong to another one."""
        if isinstance(self.protocol, StampedHandler):
            self.protocol.first_ns = 0


class StampedServer(web.Server):
    """Makes the two of them."""

    def __init__(self, handler: Any, waits: CoreWaits, **kwargs: Any) -> None:
        super().__init__(handler, **kwargs)
        self._waits = waits

    def __call__(self) -> StampedHandler:
        return StampedHandler(self._waits, self, loop=self._loop, **self._kwargs)

    def _make_request(
        self, message: Any, payload: Any, protocol: web.RequestHandler, writer: Any, task: asyncio.Task[None]
    ) -> StampedRequest:
        request = StampedRequest(message, payload, protocol, writer, task, self._loop, client_max_size=_MOST_BODY_BYTES)
        request.begun_ns = (protocol.first_ns if isinstance(protocol, StampedHandler) else 0) or now()
        return request
