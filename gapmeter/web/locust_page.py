"""Locust's own web page beside a run: ``python -P -m gapmeter.web.locust_page PORT``.

It prints ``ready PORT``, reads on standard input which runs to show (``{"folder", "name", "url"}``, a line each), and
prints ``stop`` when somebody presses Stop. It issues nothing: it follows the files that the generators write, at the
lowest priority, so that neither the page nor its charts stand between a due time and its send.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gevent
from flask import Flask, Response, abort, request
from gevent import pywsgi
from gevent.fileobject import FileObject
from hdrh.histogram import HdrHistogram
from locust import User
from locust.env import Environment
from locust.runners import STATE_RUNNING, STATE_STOPPED, LocalRunner
from locust.stats import stats_history

from gapmeter.analysis.numbers import DASH, significant
from gapmeter.analysis.results.run import RunResult
from gapmeter.analysis.stats.exact import values_needed
from gapmeter.errors import reason_of
from gapmeter.loadgen.generator import Exit, leave
from gapmeter.records import RunFolder
from gapmeter.records.follow import ReportFollower, count_in, follow_run, new_histograms

LOOPBACK = "127.0.0.1"
_LOOK_S = 0.5
_KEY = "gapmeter"
_PERCENTILES = {"p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "p999": 99.9}
_COLUMNS = {
    "what": "What", "owner": "Owner", "kind": "Known from", "count": "n", "p50": "p50 (ms)", "p90": "p90 (ms)",
    "p95": "p95 (ms)", "p99": "p99 (ms)", "p999": "p99.9 (ms)", "max": "Max (ms)",
}  # fmt: skip

Row = dict[str, str]
Tell = Callable[[float | None, str], None]  # E2E in ms, None for a failure; of which class the failure was


def live_rows(histograms: Mapping[str, HdrHistogram]) -> list[Row]:
    """Figures so far, the warm-up included. No stages: those are known once the server's stamps are joined to ours."""
    return [_live(name.upper(), histogram) for name, histogram in histograms.items()]


def _live(name: str, histogram: HdrHistogram) -> Row:
    count = histogram.get_total_count()

    def ms(percentile: float) -> float | None:
        return histogram.get_value_at_percentile(percentile) / 1e6 if count >= values_needed(percentile) else None

    return _row(name, "", "so far", count, ms, histogram.get_max_value() / 1e6 if count else None)


def result_rows(result: RunResult) -> list[Row]:
    """What the analysis found: the metrics, then each stage to the last token, then what nobody owns."""
    metrics = [
        _row(name.upper(), "", "result", each.count, each.ms, each.max_ms) for name, each in result.metrics.items()
    ]
    stages = [
        _row(name, each.owner, each.kind, each.count, each.ms, each.max_ms) for name, each in result.stages.items()
    ]
    if result.residual.last_token is None:
        return [*metrics, *stages]
    left = result.residual.last_token.unexplained
    rest = _row("unexplained", "", "the rest", None, {50.0: left.p50_ms, 99.0: left.p99_ms}.get, left.max_ms)
    return [*metrics, *stages, rest]


def _row(
    name: str, owner: str, kind: str, count: int | None, ms: Callable[[float], float | None], max_ms: float | None
) -> Row:
    values = {key: ms(percentile) for key, percentile in _PERCENTILES.items()} | {"max": max_ms}
    # A dash where the sample does not support a figure.
    texts = {key: significant(v) if v is not None and math.isfinite(v) else DASH for key, v in values.items()}
    return {"what": name, "owner": owner, "kind": kind, "count": DASH if count is None else f"{count:,}", **texts}


class ShownRun:
    """One run. ``look`` tells of each request that has ended since the last one.

    Of a run whose workers are elsewhere that is each new count in their histograms of E2E and of failures.
    """

    def __init__(self, folder: Path, tell: Tell) -> None:
        self._folder, self._tell = RunFolder(folder), tell
        self._follower = follow_run(self._folder, 0, whole=True)
        self._histograms = new_histograms()
        self._told: dict[int, int] = {}  # of workers elsewhere: counts by E2E in ns
        self._told_failed = 0
        self.rows = live_rows(self._histograms)
        self.over = False

    @property
    def in_flight(self) -> int:
        return self._follower.in_flight

    def look(self) -> None:
        """Read on. Cheap when nothing has happened."""
        if self.over:
            return
        for answered in self._follower.poll():
            count_in(self._histograms, answered)
            self._tell(None if answered.e2e_ns is None else answered.e2e_ns / 1e6, answered.outcome.name.lower())
        if isinstance(self._follower, ReportFollower):
            self._tell_reported(self._follower)
        self.over = self._folder.summary.exists()
        self.rows = result_rows(RunResult.read(self._folder.path)) if self.over else live_rows(self._histograms)

    def _tell_reported(self, follower: ReportFollower) -> None:
        self._histograms = follower.histograms
        steps = self._histograms["e2e"].get_recorded_iterator()
        counts = {step.value_iterated_to: step.count_added_in_this_iter_step for step in steps}
        for value_ns, count in counts.items():
            for _ in range(count - self._told.get(value_ns, 0)):
                self._tell(value_ns / 1e6, "")
        failed = follower.failed.total()
        for _ in range(failed - self._told_failed):
            self._tell(None, "failed")
        self._told, self._told_failed = counts, failed


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
        if self.state == STATE_RUNNING and not (self._page.run is not None and self._page.run.over):
            print("stop", flush=True)


def _refuse_strangers() -> None:
    """Pages of other sites may not end the run, nor read it under a name of theirs that leads here."""
    site = request.headers.get("Sec-Fetch-Site")
    own = request.method == "GET" or site not in ("cross-site", "same-site")
    if not own or request.host.rpartition(":")[0] not in (LOOPBACK, "localhost"):
        abort(403)


class Page(Environment):
    """The environment of Locust's web page, and the run that it shows, if any yet."""

    def __init__(self) -> None:
        super().__init__(user_classes=[Nobody])
        self.run: ShownRun | None = None
        self.runner = self._mirror = Mirror(self)
        self._site = self.create_web_ui(LOOPBACK, delayed_start=True)
        structure = [{"key": key, "title": title} for key, title in _COLUMNS.items()]
        self._site.template_args |= {
            "extended_tabs": [{"title": "Gapmeter", "key": _KEY}],
            "extended_tables": [{"key": _KEY, "structure": structure}],
        }
        assert isinstance(self._site.app, Flask)
        self._site.app.before_request(_refuse_strangers)
        self._site.app.after_request(self._extend)

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
        self.run = ShownRun(Path(run["folder"]), self._ended)
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
            request_type="ask", name="E2E", response_time=e2e_ms, response_length=0, context={},
            exception=RuntimeError(why) if e2e_ms is None else None,
        )  # fmt: skip

    def _extend(self, response: Response) -> Response:
        """Our table beside Locust's figures. The page sorts it by ``name``: here, the rows' own order."""
        if request.path == "/stats/requests" and response.is_json:
            rows = self.run.rows if self.run is not None else []
            table = {"key": _KEY, "data": [{"name": f"{place:03d}", **row} for place, row in enumerate(rows)]}
            response.set_data(json.dumps({**response.get_json(), "extended_stats": [table]}))
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
        return leave(Exit.BAD_SPEC, f"{LOOPBACK}:{port} cannot be listened on: {reason_of(error)}")
    print(f"ready {port}", flush=True)
    for line in FileObject(sys.stdin.fileno(), "rb", close=False):
        page.show(json.loads(line))
    return Exit.DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
