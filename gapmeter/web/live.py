"""The live page of one run: a process of its own that follows the run's records and tells browsers, once a second.

``python -m gapmeter.web.live SPEC``; it prints its address and serves until standard input ends, then sends every open
page on to the report and leaves when they have it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from aiohttp import web
from markupsafe import Markup

from gapmeter.analysis.provenance import UNKNOWN, Provenance
from gapmeter.records import RunFolder
from gapmeter.report import html
from gapmeter.report.document import Document, Header, Html, Section
from gapmeter.web.door import HOST, Door
from gapmeter.web.stream import Stream

_EVERY_S = 1.0
_PATIENCE_S = 5.0  # for open pages to fetch the report at the end
_NICE = 19


@dataclass(frozen=True, slots=True)
class Spec:
    """What the process is told. ``port`` 0: any free one; no ``cores``: run anywhere."""

    folder: str
    port: int
    cores: tuple[int, ...]

    @classmethod
    def of(cls, text: str) -> Spec:
        value = json.loads(text)
        return cls(value["folder"], value["port"], tuple(value["cores"]))


class LivePage:
    """One run that goes on: what its page shows, and who is looking."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder, self._stream = folder, Stream(folder)
        self._pages: set[asyncio.Queue[dict[str, Any]]] = set()
        self._fetching = 0
        self._fetched = asyncio.Event()
        self.over = asyncio.Event()

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/", self._page), web.get("/events", self.events), web.get("/report.html", self._report)]

    async def run(self) -> None:
        """Look once a second until it is over; then send open pages on, and wait until they have the report."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while not self._is_over():
            told = self._stream.look()
            for page in self._pages:
                page.put_nowait(told)
            due += _EVERY_S
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.over.wait(), max(0.0, due - loop.time()))
        self._fetching = len(self._pages) if self._folder.report.exists() else 0
        for page in self._pages:
            page.put_nowait({"phase": "over", "report": self._folder.report.exists()})
        with contextlib.suppress(TimeoutError):
            if self._fetching:
                await asyncio.wait_for(self._fetched.wait(), _PATIENCE_S)

    def markup(self) -> str:
        """The page, before anything has happened."""
        return page(self._folder)

    def _is_over(self) -> bool:
        """Told so, or there is a report."""
        if self._folder.report.exists():
            self.over.set()
        return self.over.is_set()

    async def _page(self, _: web.Request) -> web.StreamResponse:
        if self.over.is_set() and self._folder.report.exists():
            raise web.HTTPSeeOther("/report.html")
        return web.Response(text=self.markup(), content_type="text/html")

    async def _report(self, _: web.Request) -> web.StreamResponse:
        if not self._folder.report.exists():
            raise web.HTTPSeeOther("/")
        response = web.Response(body=self._folder.report.read_bytes(), content_type="text/html", charset="utf-8")
        self._fetching -= 1
        if self._fetching == 0:
            self._fetched.set()
        return response

    async def events(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        await response.prepare(request)
        queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        queue.put_nowait(self._stream.all_so_far())
        self._pages.add(queue)
        try:
            while True:
                told = await queue.get()
                await response.write(f"data: {json.dumps(told)}\n\n".encode())
                if told["phase"] == "over":
                    return response
        except (ConnectionError, asyncio.CancelledError):
            return response
        finally:
            self._pages.discard(queue)


def page(folder: RunFolder) -> str:
    """The live page's markup, before anything has happened."""
    manifest = folder.read_manifest()
    name = str(manifest["scenario"]["name"])
    body = Markup((files("gapmeter.web") / "assets" / "live.html").read_text(encoding="utf-8"))
    script = (files("gapmeter.web") / "assets" / "live.js").read_text(encoding="utf-8")
    section = Section("live", f"{name}, as it runs", [Html(body)])
    document = Document(f"{name}: live", Header(""), None, [section], _provenance(manifest))
    return html.page(document, [script], "connect-src 'self'")


def _provenance(manifest: dict[str, Any]) -> Provenance:
    scenario = manifest["scenario"]
    server, load = scenario["server"], scenario["load"]
    how = f"{load['rate']:g} req/s, open loop" if load.get("rate") else str(load["arrivals"])
    return Provenance(
        scenario=str(scenario["name"]), digest=str(manifest["scenario_digest"]), model=str(server["model"]),
        precision=str(server["precision"]), engine=str(server["engine"]), hardware=UNKNOWN, load=how, n=UNKNOWN,
        validity="not judged yet: the run goes on", date=str(manifest["started_wall"]).partition("T")[0],
        command=str(manifest["command"]),
    )  # fmt: skip


async def _serve(spec: Spec) -> None:
    live = LivePage(RunFolder(Path(spec.folder)))
    loop = asyncio.get_running_loop()
    sock = socket.create_server((HOST, spec.port))
    door = Door.make(sock.getsockname()[1])
    app = door.app()
    app.add_routes(live.routes())
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.SockSite(runner, sock).start()
        print(door.address, flush=True)
        loop.add_reader(sys.stdin.fileno(), live.over.set)
        await live.run()
    finally:
        await runner.cleanup()


def main(arguments: list[str]) -> int:
    """Entry point; 1 when the port is taken."""
    spec = Spec.of(arguments[0])
    os.nice(_NICE)
    if spec.cores:
        os.sched_setaffinity(0, spec.cores)
    try:
        asyncio.run(_serve(spec))
    except OSError as error:
        print(error.strerror or error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
