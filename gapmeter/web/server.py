"""A local page over the runs folder, with a run that goes on live in it: ``gapmeter ui``, or beside ``gapmeter run``.

It serves nothing outside that folder, and nothing to others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import socket
import sys
from pathlib import Path

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from gapmeter import errors
from gapmeter.analysis.results.brief import ComparisonBrief
from gapmeter.analysis.results.codec import NotReadable
from gapmeter.errors import UserError, reason_of, unless_refused
from gapmeter.options import tell
from gapmeter.records import RunFolder
from gapmeter.report.command import Command
from gapmeter.report.words import stopped
from gapmeter.runs.listing import ListedRun, find_listed, list_known
from gapmeter.runs.lock import ask_to_stop, locked
from gapmeter.signals import ending_signals
from gapmeter.web.auth import HOST, LocalAuth
from gapmeter.web.live import LiveRun
from gapmeter.web.runs_page import RunFilter, delete_page, message_page, runs_page

# What a folder holds for eyes: reports, also those of a sweep's points, and what other tools read.
_SERVED = {".html": "text/html", ".json": "application/json", ".gz": "application/gzip", ".csv": "text/csv",
           ".parquet": "application/vnd.apache.parquet", ".hlog": "text/plain"}  # fmt: skip
# A folder may be somebody else's: its page may run its script, but is no part of this site.
_SANDBOX = "sandbox allow-scripts allow-downloads allow-popups"
_NICE = 19


class RunsSite:
    """Handlers over one runs folder."""

    def __init__(self, runs: Path) -> None:
        self._runs = runs
        self._live: dict[str, tuple[LiveRun, asyncio.Task[None]]] = {}

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/", self._list),
            web.post("/compare", self._compared),
            web.post("/delete", self._delete),
            web.get("/runs/{name}/", self._open),
            web.get("/runs/{name}/events", self._events),
            web.post("/runs/{name}/stop", self._stop),
            web.get("/runs/{name}/{file:.+}", self._file),
        ]

    async def close(self) -> None:
        """End what follows runs that go on."""
        following = list(self._live.values())
        for live, _ in following:
            live.over.set()
        if following:
            await asyncio.wait([task for _, task in following])  # one that has failed is told by asyncio itself

    async def _list(self, request: web.Request) -> web.StreamResponse:
        found = await asyncio.to_thread(list_known, self._runs)
        return _html(runs_page(found, RunFilter.of(request.query), str(self._runs)))

    async def _open(self, request: web.Request) -> web.StreamResponse:
        run = await self._named(request.match_info["name"])
        if (report := RunFolder(run.path).report).is_file():
            raise web.HTTPSeeOther(report.name)
        if run.state != "running":
            why = stopped(f"{run.state.capitalize()}: {run.reason or 'it has no report'}")
            again = f"To write its report, or to see what is damaged: {Command.of('report', run.path)}"
            if (run.path / ComparisonBrief.FILE).exists():
                again = "Compare its runs again: a comparison has no records that its report could be written from."
            return _html(message_page(run.path.name, f"{why} {again}"))
        if run.kind == "run":
            with contextlib.suppress(OSError, NotReadable):  # a manifest of which some keys are wrong
                return _html(self._follow(run).page())
        return _html(message_page(run.path.name, "It is still running: its page is written when it ends."))

    async def _events(self, request: web.Request) -> web.StreamResponse:
        run = await self._named(request.match_info["name"])
        if run.kind != "run":
            raise web.HTTPNotFound(text="only a single run is followed\n")
        return await self._follow(run).events(request)

    async def _stop(self, request: web.Request) -> web.StreamResponse:
        run = await self._named(request.match_info["name"])
        if run.kind != "run" or run.state != "running":
            return _html(message_page("Not stopped", "Only a single run that goes on can be stopped here."), 409)
        try:
            with unless_refused(f"{run.path} cannot be told to stop"):
                ask_to_stop(run.path)
        except UserError as error:
            return _html(message_page("Not stopped", str(error)), 409)
        raise web.HTTPSeeOther("./")

    def _follow(self, run: ListedRun) -> LiveRun:
        """One that looks at the run once a second, for all who look at it, as long as it goes on."""
        name = run.path.name
        if name not in self._live:
            live = LiveRun(RunFolder(run.path))
            self._live[name] = live, asyncio.create_task(live.follow())
            self._live[name][1].add_done_callback(lambda _: self._live.pop(name))
        return self._live[name][0]

    async def _file(self, request: web.Request) -> web.StreamResponse:
        run = await self._named(request.match_info["name"])
        parts = Path(request.match_info["file"]).parts
        path = run.path.joinpath(*parts)
        kind = _SERVED.get(path.suffix)
        try:
            inside = path.is_file() and path.resolve().is_relative_to(run.path.resolve())
        except OSError:  # a name that no file can have
            inside = False
        if kind is None or not inside or any(part.startswith(".") for part in parts):
            raise web.HTTPNotFound(text="there is no such file in this run\n")
        if run.path.name in self._live and path == RunFolder(run.path).report:
            self._live[run.path.name][0].report_fetched()
        return web.FileResponse(path, headers={"Content-Type": kind, "Content-Security-Policy": _SANDBOX})

    async def _compared(self, request: web.Request) -> web.StreamResponse:
        chosen = await self._chosen(request)
        if len(chosen) < 2:
            return _html(message_page("Compare what?", "Tick two runs or more."), 400)
        from gapmeter.runs.comparison import compare_folders  # its import takes a second

        sides = [[run.path] for run in sorted(chosen, key=lambda run: run.started)]  # later ones against the first
        try:
            made = await asyncio.to_thread(compare_folders, sides, runs=self._runs)
        except UserError as error:
            return _html(message_page("Not compared", str(error)), 409)
        raise web.HTTPSeeOther(f"/runs/{made.folder.name}/")

    async def _delete(self, request: web.Request) -> web.StreamResponse:
        chosen = await self._chosen(request)
        if not chosen:
            return _html(message_page("Delete what?", "Tick at least one run."), 400)
        going = [run.path.name for run in chosen if run.state == "running"]
        if going:
            return _html(message_page("Not deleted", f"still running: {', '.join(going)}"), 409)
        if (await request.post()).get("sure") != "yes":  # it is kept
            return _html(delete_page(chosen))
        try:
            for run in chosen:
                await asyncio.to_thread(_delete_folder, run.path)
        except UserError as error:
            return _html(message_page("Not deleted", str(error)), 409)
        raise web.HTTPSeeOther("/")

    async def _chosen(self, request: web.Request) -> list[ListedRun]:
        """The runs that a form names, each once."""
        try:
            form = await request.post()
        except (ValueError, LookupError) as error:  # a text, a charset or parts that are none
            raise web.HTTPBadRequest(text="that form cannot be read\n") from error
        return [await self._named(str(name)) for name in dict.fromkeys(form.getall("run", []))]

    async def _named(self, name: str) -> ListedRun:
        """The folder of that name directly in the runs folder; 404 for anything else."""
        path = self._runs / name
        plain = name == Path(name).name and name not in ("", ".", "..") and "\0" not in name
        found = None
        with contextlib.suppress(OSError):  # a name that no folder can have
            found = await asyncio.to_thread(find_listed, path) if plain else None
        if found is None:
            raise web.HTTPNotFound(text="there is no such run\n")
        return found


def _delete_folder(path: Path) -> None:
    """Raises UserError where a gapmeter is at work in it."""
    with unless_refused(f"{path} cannot be deleted"), locked(path):
        shutil.rmtree(path)


def _html(text: str, status: int = 200) -> web.Response:
    body = text.encode(errors="replace")
    return web.Response(body=body, content_type="text/html", charset="utf-8", status=status)


def _is_our_fault(record: logging.LogRecord) -> bool:
    """Whether the terminal is to show it: not that somebody sent what is no HTTP, which is answered."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


async def _serve(runs: Path, port: int, over: asyncio.Event) -> None:
    """Print the address and serve until it is over; ``port`` 0: any free one. Raises OSError when it is taken."""
    sock = socket.create_server((HOST, port))
    auth = LocalAuth(sock.getsockname()[1])
    site = RunsSite(runs)
    app = auth.app()
    app.add_routes(site.routes())
    logging.getLogger("aiohttp.server").addFilter(_is_our_fault)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.SockSite(runner, sock).start()
        print(auth.address, flush=True)
        await over.wait()
    finally:
        await site.close()
        await runner.cleanup()


def serve_until_interrupted(runs: Path, port: int) -> None:
    """``gapmeter ui``; the address is on standard output. Raises UserError when the port is taken."""
    if not runs.is_dir():
        raise UserError(f"{runs} is no folder; name another with --runs", errors.USAGE)
    tell(f"the runs in {runs}, for this machine only; Ctrl-C ends it")

    async def serve() -> None:
        over = asyncio.Event()
        for number in ending_signals():
            asyncio.get_running_loop().add_signal_handler(number, over.set)
        await _serve(runs, port, over)

    with contextlib.suppress(KeyboardInterrupt):
        try:
            asyncio.run(serve())
        except OSError as error:
            raise UserError(f"--port {port}: {reason_of(error)}", errors.USAGE) from error


def main(runs: str, port: str, *cores: str) -> int:
    """``python -m gapmeter.web.server RUNS PORT CORE…``: serve until standard input ends; 1 when the port is taken."""
    os.nice(_NICE)
    os.sched_setaffinity(0, map(int, cores))

    async def serve() -> None:
        over = asyncio.Event()
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), over.set)
        await _serve(Path(runs), int(port), over)

    try:
        asyncio.run(serve())
    except OSError as error:
        print(reason_of(error), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
