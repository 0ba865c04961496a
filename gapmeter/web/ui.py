"""``gapmeter ui``: a local page over the runs folder. It serves nothing outside that folder, and nothing to others."""

from __future__ import annotations

import asyncio
import shutil
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from aiohttp import web

from gapmeter.errors import UserError
from gapmeter.records import RunFolder
from gapmeter.runs.listing import Listed, listing, look
from gapmeter.signals import ending
from gapmeter.web.door import HOST, Door
from gapmeter.web.live import LivePage
from gapmeter.web.runs_page import Wish, delete_page, message_page, runs_page

# What a folder holds for eyes: reports, also those of a sweep's points, and what other tools read.
_SERVED = {".html": "text/html", ".json": "application/json", ".gz": "application/gzip", ".csv": "text/csv",
           ".parquet": "application/vnd.apache.parquet", ".hlog": "text/plain"}  # fmt: skip
# A folder may be somebody else's: its page may run its script, but is no part of this site.
_SANDBOX = "sandbox allow-scripts allow-downloads allow-popups"

Compare = Callable[[Sequence[Path], Path], Path]


class RunsSite:
    """Handlers over one runs folder. ``compare`` makes a comparison's folder from runs' folders."""

    def __init__(self, runs: Path, compare: Compare) -> None:
        self._runs, self._compare = runs, compare
        self._live: dict[str, tuple[LivePage, asyncio.Task[None]]] = {}

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/", self._list),
            web.get("/compare", self._compared),
            web.post("/delete", self._delete),
            web.get("/runs/{name}/", self._open),
            web.get("/runs/{name}/events", self._events),
            web.get("/runs/{name}/{file:.+}", self._file),
        ]

    async def close(self) -> None:
        """End what follows runs that go on."""
        for page, task in self._live.values():
            page.over.set()
            await task

    async def _list(self, request: web.Request) -> web.StreamResponse:
        found = await asyncio.to_thread(listing, self._runs)
        return _html(runs_page(found, Wish.of(request.query), str(self._runs)))

    async def _open(self, request: web.Request) -> web.StreamResponse:
        run = await self._named(request.match_info["name"])
        if (run.path / "report.html").is_file():
            raise web.HTTPSeeOther("report.html")
        if run.state == "running":
            return _html(self._follow(run).markup())
        return _html(
            message_page(run.name, f"{run.state}: {run.entry.reason or 'no report yet'}. gapmeter report {run.path}")
        )

    async def _events(self, request: web.Request) -> web.StreamResponse:
        run = await self._named(request.match_info["name"])
        return await self._follow(run).events(request)

    def _follow(self, run: Listed) -> LivePage:
        """One that looks at the run once a second, for all who look at it, until it has a report."""
        if run.name not in self._live or self._live[run.name][1].done():
            page = LivePage(RunFolder(run.path))
            self._live[run.name] = page, asyncio.create_task(page.run())
        return self._live[run.name][0]

    async def _file(self, request: web.Request) -> web.StreamResponse:
        run = await self._named(request.match_info["name"])
        parts = Path(request.match_info["file"]).parts
        path = run.path.joinpath(*parts)
        kind = _SERVED.get(path.suffix)
        inside = path.resolve().is_relative_to(run.path.resolve())
        if kind is None or not inside or any(part.startswith(".") for part in parts) or not path.is_file():
            raise web.HTTPNotFound(text="there is no such file in this run\n")
        return web.FileResponse(path, headers={"Content-Type": kind, "Content-Security-Policy": _SANDBOX})

    async def _compared(self, request: web.Request) -> web.StreamResponse:
        chosen = [await self._named(name) for name in request.query.getall("run", [])]
        if len(chosen) < 2:
            return _html(message_page("Compare what?", "Tick two runs or more."), 400)
        try:
            made = await asyncio.to_thread(self._compare, [run.path for run in chosen], self._runs)
        except UserError as error:
            return _html(message_page("Not compared", str(error)), 409)
        raise web.HTTPSeeOther(f"/runs/{made.name}/")

    async def _delete(self, request: web.Request) -> web.StreamResponse:
        form = await request.post()
        chosen = [await self._named(str(name)) for name in form.getall("run", [])]
        if not chosen:
            return _html(message_page("Delete what?", "Tick at least one run."), 400)
        going = [run.name for run in chosen if run.state == "running"]
        if going:
            return _html(message_page("Not deleted", f"still running: {', '.join(going)}"), 409)
        if form.get("sure") != "yes":
            return _html(delete_page(chosen))
        for run in chosen:
            await asyncio.to_thread(shutil.rmtree, run.path)
        raise web.HTTPSeeOther("/")

    async def _named(self, name: str) -> Listed:
        """The folder of that name directly in the runs folder; 404 for anything else."""
        path = self._runs / name
        plain = name == Path(name).name and name not in ("", ".", "..") and "\0" not in name
        found = await asyncio.to_thread(look, path) if plain else None
        if found is None:
            raise web.HTTPNotFound(text="there is no such run\n")
        return found


def _html(text: str, status: int = 200) -> web.Response:
    return web.Response(text=text, content_type="text/html", status=status)


async def serve(runs: Path, port: int, compare: Compare, say: Callable[[str], None]) -> None:
    """Serve until a signal ends it; ``port`` 0: any free one. Raises OSError when it is taken."""
    over = asyncio.Event()
    for number in ending():
        asyncio.get_running_loop().add_signal_handler(number, over.set)
    sock = socket.create_server((HOST, port))
    door = Door.make(sock.getsockname()[1])
    site = RunsSite(runs, compare)
    app = door.app()
    app.add_routes(site.routes())
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.SockSite(runner, sock).start()
        say(door.address)
        await over.wait()
    finally:
        await site.close()
        await runner.cleanup()
