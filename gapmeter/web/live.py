"""The page of a run that goes on: what its records say once a second, told to every browser that looks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from typing import Any

from aiohttp import web
from markupsafe import Markup

from gapmeter.analysis.provenance import provenance_as_asked
from gapmeter.analysis.results.codec import NotReadable
from gapmeter.analysis.results.manifest import Manifest
from gapmeter.analysis.results.run import UNKNOWN
from gapmeter.errors import reason_of
from gapmeter.records import RunFolder
from gapmeter.records.follow import Follower, follow_run, phase
from gapmeter.report import html
from gapmeter.report.document import Document, Header, Html, Section
from gapmeter.runs.listing import goes_on
from gapmeter.scenarios.slo import LATENCIES, Slo

_EVERY_S = 1.0
_READING_S = 0.8  # of it, at most
_PATIENCE_S = 5.0  # for open pages to fetch the report at the end
_MOST_DOTS = 2000  # that a page which comes later is given
_METRICS = ("ttft", "itl", "e2e")


class LiveRun:
    """One run that goes on: its state, and who is looking at it."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder, self._state = folder, LiveState(folder)
        self._pages: set[asyncio.Queue[dict[str, Any]]] = set()
        self._fetching = 0
        self._fetched = asyncio.Event()
        self._end: dict[str, Any] | None = None
        self.over = asyncio.Event()

    async def follow(self) -> None:
        """Look once a second until it is over or was killed; then send open pages on, until they have the report.

        Where looking fails they are told that it is over, too: nobody would tell them anything more.
        """
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        try:
            while not self.over.is_set() and await asyncio.to_thread(self._goes_on):
                self._tell(await self._state.update())
                due_s += _EVERY_S
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.over.wait(), max(0.0, due_s - loop.time()))
        finally:
            reported = await asyncio.to_thread(os.path.exists, self._folder.report)  # which never raises
            self._fetching = len(self._pages) if reported else 0
            self._end = {"phase": "over", "report": reported}
            self._tell(self._end)
        if self._fetching:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._fetched.wait(), _PATIENCE_S)

    def _goes_on(self) -> bool:
        return not self._folder.report.exists() and goes_on(self._folder.path)

    def _tell(self, state: dict[str, Any]) -> None:
        for page in self._pages:
            page.put_nowait(state)

    def report_fetched(self) -> None:
        """One of the open pages has gone on to the report."""
        self._fetching = max(0, self._fetching - 1)
        if not self._fetching:
            self._fetched.set()

    async def events(self, request: web.Request) -> web.StreamResponse:
        """The state now, and then every second, until the run is over."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        await response.prepare(request)
        queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        queue.put_nowait(self._state.all_so_far())
        if self._end is not None:
            queue.put_nowait(self._end)
        self._pages.add(queue)
        try:
            while True:
                state = await queue.get()
                await response.write(f"data: {json.dumps(state)}\n\n".encode())
                if state["phase"] == "over":
                    return response
        except (ConnectionError, asyncio.CancelledError):
            return response
        finally:
            self._pages.discard(queue)

    def page(self) -> str:
        """The page's markup, before anything has happened."""
        manifest = Manifest.read(self._folder.path)
        scenario, load = manifest.asked, manifest.asked.load
        unit = "conversations" if scenario.workload.kind == "conversation" else "req"
        how = f"{load.rate:g} {unit}/s, open loop" if load.rate else load.arrivals
        validity = "not judged yet: the run goes on"
        about = provenance_as_asked(manifest, manifest.target.model, load=how, n=UNKNOWN, validity=validity)
        body, script = Markup(html.asset("live.html", "gapmeter.web")), html.asset("live.js", "gapmeter.web")
        section, header = Section("live", "", [Html(body)]), Header(f"{scenario.name}, as it runs")
        document = Document(f"{scenario.name}: live", header, None, [section], about)
        return html.page(document, [script], "connect-src 'self'; form-action 'self'")


class LiveState:
    """What pages are told of a run: ``update`` what is new, ``all_so_far`` what a page that has just come needs."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._begun: tuple[Manifest, Follower, int] | None = None  # since ``t0_ns``
        self._dots: list[list[Any]] = []
        self._last: dict[str, Any] = {"phase": "starting"}

    async def update(self) -> dict[str, Any]:
        """The state now; ``dots`` are those since the last call: [seconds, TTFT in ms or null, outcome]."""
        state, dots = await asyncio.to_thread(self._read)  # as much as came meanwhile: others need not wait for it
        self._last, self._dots = state, _thinned(self._dots + dots)
        return {**state, "dots": dots}

    def _read(self) -> tuple[dict[str, Any], list[list[Any]]]:
        """State and dots; nothing that pages are told changes here, in another thread."""
        self._begun = self._begun or self._begin()
        if self._begun is None:
            return {"phase": "starting"}, []
        manifest, follower, t0_ns = self._begun
        dots: list[list[Any]] = []
        try:
            came = follower.poll(_READING_S)
        except OSError as error:  # what stands in a record's place is no file
            return {"phase": f"not followed: {error.filename}: {reason_of(error)}"}, []
        for answered in came:
            ttft_ms = None if answered.ttft_ns is None else round(answered.ttft_ns / 1e6, 3)
            dots.append([round((answered.due_ns - t0_ns) / 1e9, 3), ttft_ms, answered.outcome.name.lower()])
        return _state(manifest, follower, t0_ns, time.monotonic_ns()), dots

    def all_so_far(self) -> dict[str, Any]:
        """The last state, with every dot that is kept."""
        return {**self._last, "dots": self._dots}

    def _begin(self) -> tuple[Manifest, Follower, int] | None:
        """None before the load has begun: the manifest has no start, or there is no record yet."""
        try:
            manifest = Manifest.read(self._folder.path)
        except (OSError, NotReadable):
            return None
        t0_ns = manifest.plan.t0_ns
        return None if t0_ns is None else (manifest, follow_run(self._folder, t0_ns, whole=True), t0_ns)


def _state(manifest: Manifest, seen: Follower, t0_ns: int, now_ns: int) -> dict[str, Any]:
    end_ns, warmup_ns = manifest.plan.end_ns, manifest.plan.warmup_ns
    return {
        "phase": phase(now_ns, t0_ns, warmup_ns, end_ns),
        "elapsed_s": round((now_ns - t0_ns) / 1e9, 1),
        "end_s": end_ns / 1e9 if end_ns else None,
        "warmup_s": warmup_ns / 1e9,
        "asked_per_s": None if manifest.asked.workload.kind == "conversation" else manifest.asked.load.rate,
        "sent_per_s": round(seen.sent_per_s(), 2),
        "done_per_s": round(seen.done_per_s(), 2),
        "in_flight": seen.in_flight,
        "issued": seen.issued,
        "done": seen.done,
        "failed": dict(seen.failed),
        "lag_p99_ms": seen.percentile("lag", 99),
        "behind_s": round((now_ns - seen.as_of_ns) / 1e9, 1),
        "unread": seen.unread,
        "metrics": {name: {f"p{p}": seen.percentile(name, p) for p in (50, 99)} for name in _METRICS},
        "slo": [_slo(seen, slo) for slo in manifest.slo],
    }


def _slo(seen: Follower, slo: Slo) -> dict[str, Any]:
    """An SLO beside what has been seen of the last requests (of all, where workers send them): no verdict yet."""
    if slo.limit_ns is None:
        share = seen.failed.total() / seen.done if seen.done else None
        return {"text": slo.text, "value_share": share, "limit_share": slo.limit_share}
    value_ms = None
    if slo.percentile is not None and slo.metric in LATENCIES:
        value_ms = seen.percentile(slo.metric, slo.percentile)
    return {"text": slo.text, "value_ms": value_ms, "limit_ms": slo.limit_ns / 1e6}


def _thinned(dots: list[list[Any]]) -> list[list[Any]]:
    """At most so many: failures and the slowest stay, of the others every second one goes when there are too many."""
    while len(dots) > _MOST_DOTS:
        waits_ms = sorted(dot[1] for dot in dots if dot[1] is not None)
        slow_ms = waits_ms[-len(waits_ms) // 10] if waits_ms else 0.0
        dropped = {id(dot) for dot in [dot for dot in dots if dot[1] is not None and dot[1] < slow_ms][::2]}
        if not dropped:
            return dots[-_MOST_DOTS:]
        dots = [dot for dot in dots if id(dot) not in dropped]
    return dots
