"""Around the handling of each request: its truth, what it takes to write a chunk, and faults."""

from __future__ import annotations

import os
import signal
from typing import Any

from aiohttp import web

from gapmeter.servers.api.app import Handler
from gapmeter.servers.api.errors import ApiError
from gapmeter.servers.api.http import StampedRequest
from gapmeter.servers.simulated.faults import Faults
from gapmeter.servers.simulated.pause import Pause, now
from gapmeter.servers.simulated.text import current
from gapmeter.servers.simulated.times import Durations
from gapmeter.servers.simulated.truth import TruthFile

_LINES = 4  # of truth, written with each chunk: as many as one leaves behind, so that they do not heap up


class Front:
    """Pass ``around`` to servers.api.app.serve."""

    def __init__(self, durations: Durations, pause: Pause, faults: Faults, truth: TruthFile | None) -> None:
        self._durations, self._pause, self._faults, self._truth = durations, pause, faults, truth
        self._count = 0

    def around(self, handle: Handler) -> Handler:
        """``handle`` with truth, egress times and faults."""

        async def handled(request: web.BaseRequest) -> web.StreamResponse:
            if request.method != "POST":
                return await handle(request)
            self._count += 1
            who = request.headers.get("x-request-id", f"request {self._count}")
            current.set(who)
            if self._truth:
                self._truth.note("received", of=who, at_ns=now())
            if self._faults.dies(self._count):
                if self._truth:
                    self._truth.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            if self._faults.refuses(self._count):
                if isinstance(request, StampedRequest):
                    request.finished()  # else the connection's next request would count from this one's arrival
                body = ApiError(500, "told to fail").encoded()
                return web.Response(status=500, body=body, headers={"Content-Type": "application/json"})
            self._time_writes(request.writer, who)
            response = await handle(request)
            if self._truth:
                self._truth.note("answered", of=who, status=response.status, at_ns=now())
            return response

        return handled

    def _time_writes(self, writer: Any, who: str) -> None:
        """Each write of a body then takes ``egress_ns`` before the socket gets it."""
        for name in ("write", "write_eof"):
            setattr(writer, name, self._timed(getattr(writer, name), who))

    def _timed(self, write: Any, who: str) -> Any:
        async def timed(chunk: bytes = b"", *args: Any, **kwargs: Any) -> None:
            if not chunk:
                await write(chunk, *args, **kwargs)
                return
            start = now()
            meant = self._durations.draw("egress", self._durations.times.egress_ns)
            self._pause.until(start + meant)
            handed = now()
            await write(chunk, *args, **kwargs)
            if self._truth:
                self._truth.write(_LINES)
                self._truth.note(
                    "chunk", of=who, bytes=len(chunk), start_ns=start, handed_ns=handed, end_ns=now(), meant_ns=meant
                )

        return timed
