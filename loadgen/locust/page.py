"""Locust's own web page beside a run: ``python -P -m gapmeter.loadgen.locust.page PORT``.

It prints ``ready PORT``, reads on standard input which runs to show (``{"folder", "name", "url"}``, a line each), and
prints ``stop`` when somebody presses Stop. It issues nothing: it follows the files that the generators write, at the
lowest priority, so that neither the page nor its charts stand between a due time and its send.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import gevent
import gevent.event
from flask import Flask, Response, request
from gevent import pywsgi
from locust import User
from locust.env import Environment
from locust.runners import STATE_RUNNING, STATE_STOPPED, LocalRunner
from locust.stats import stats_history

from gapmeter.loadgen.locust.figures import KEY, joined, structure
from gapmeter.loadgen.locust.follow import Followed
from gapmeter.loadgen.locust.transport import GreenLoop
from gapmeter.loadgen.worker import Exit, leave

LOOPBACK = "127.0.0.1"
_LOOK_S = 0.5
_KIND, _NAME = "ask", "E2E"


class Nobody(User):
    """Locust wants a class of users; another process issues."""

    abstract = True


class Mirror(LocalRunner):
    """What Locust's page takes for its runner: it shows another process's run, and can only ask for its end."""

    def __init__(self, environment: Page) -> None:
        super().__init__(environment)
        self._page = environment

    @property
    def user_count(self) -> int:
        """Requests in flight: an open loop has no users."""
        return self._page.run.in_flight if self._page.run is not None else 0

    def start(self, user_count: int, spawn_rate: float, wait: bool = False, user_classes: Any = None) -> None:
        """Nothing: the scenario says what is issued."""

    def stop(self) -> None:
        """Somebody pressed Stop."""
        if self.state == STATE_RUNNING and not self._page.over:
            print("stop", flush=True)


class Page(Environment):
    """The environment of Locust's web page, and the run that it shows, if any yet."""

    def __init__(self) -> None:
        super().__init__(user_classes=[Nobody])
        self.run: Followed | None = None
        self.runner = self._mirror = Mirror(self)
        self._site = self.create_web_ui(LOOPBACK, delayed_start=True)
        self._site.template_args |= {
            "extended_tabs": [{"title": "Gapmeter", "key": KEY}],
            "extended_tables": [{"key": KEY, "structure": structure()}],
        }
        assert isinstance(self._site.app, Flask)
        self._site.app.after_request(self._extend)

    @property
    def over(self) -> bool:
        """Whether the run that is shown has been analysed."""
        return self.run is not None and self.run.over

    def serve(self, port: int) -> int:
        """Listen; returns the port. Raises OSError."""
        self._site.server = server = pywsgi.WSGIServer((LOOPBACK, port), self._site.app, log=None, error_log=None)
        server.start()
        gevent.spawn(stats_history, self._mirror)
        gevent.spawn(self._follow)
        return int(server.server_port)

    def show(self, run: dict[str, str]) -> None:
        """Begin anew, with this run."""
        self.stats.clear_all()
        self.host, self.locustfile = run["url"], run["name"]
        self.run = Followed(Path(run["folder"]), self._ended)
        self._mirror.update_state(STATE_RUNNING)

    def _follow(self) -> None:
        while True:
            if self.run is not None and self._mirror.state == STATE_RUNNING:
                self.run.look()
                if self.run.over:
                    self._mirror.update_state(STATE_STOPPED)
            gevent.sleep(_LOOK_S)

    def _ended(self, e2e_ms: float | None, why: str) -> None:
        """One event a request, with what its user waited; never one a token."""
        self.events.request.fire(
            request_type=_KIND, name=_NAME, response_time=e2e_ms, response_length=0, context={},
            exception=RuntimeError(why) if e2e_ms is None else None,
        )  # fmt: skip

    def _extend(self, response: Response) -> Response:
        if request.path == "/stats/requests" and response.is_json:
            rows = self.run.rows if self.run is not None else []
            response.set_data(json.dumps({**response.get_json(), "extended_stats": joined(rows)}))
        return response


def main(arguments: list[str]) -> int:
    """Entry point; ends when standard input does."""
    logging.getLogger("locust").setLevel(logging.WARNING)
    os.nice(19)
    port = int(arguments[0])
    page = Page()
    try:
        port = page.serve(port)
    except OSError as error:
        return leave(Exit.BAD_SPEC, f"{LOOPBACK}:{port} cannot be listened on: {error.strerror or error}")
    print(f"ready {port}", flush=True)
    _listen(page)
    return Exit.DONE


def _listen(page: Page) -> None:
    over, loop, rest = gevent.event.Event(), GreenLoop(), b""

    def read() -> None:
        nonlocal rest
        data = os.read(0, 1 << 16)
        if not data:
            loop.remove_reader(0)
            over.set()
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            gevent.spawn(page.show, json.loads(line))

    loop.add_reader(0, read)
    over.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
