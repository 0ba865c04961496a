"""A run for other tools: what each of them reads is what the run's own files say."""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import re
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

import gapmeter
from gapmeter.analysis.requests.figures import distribution
from gapmeter.analysis.results import RunResult
from gapmeter.analysis.stats.series import Series, Worth
from gapmeter.analysis.tables import write_table
from gapmeter.errors import UserError
from gapmeter.records import RunFolder
from gapmeter.records.request import trace_ids
from gapmeter.report.export.csv import _write, figures
from gapmeter.report.export.otlp import spans
from gapmeter.report.export.perfetto import trace
from gapmeter.report.run_folder import ReportedRun
from tests.fuzz.targets import golden
from tests.kit.command import SIMULATED, Done
from tests.kit.command import gapmeter as command
from tests.kit.runs import write_run

pytestmark = pytest.mark.whole_run

SOON = {"OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
PERCENTILES = ("p50", "p90", "p95", "p99", "p999")
FACTS = ("scenario", "model", "precision", "engine", "hardware", "load", "n", "validity", "date", "command")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    runs = tmp_path_factory.mktemp("runs")
    return command(*SIMULATED, "--set", "load.traceparent=true", "--model", "builtin:tiny", runs=runs)


@pytest.fixture(scope="module")
def run(done: Done) -> gapmeter.runs.run.Run:
    return gapmeter.open(done.folder.path)


def test_an_opened_run_has_its_tables_figures_and_a_report_that_a_notebook_shows(done: Done) -> None:
    run = gapmeter.open(done.folder.path)
    assert run.verdict == run.summary["verdict"]
    assert len(run.requests) == 30 and set(run.ledger["event"]) == {"first_token", "last_token"}
    assert len(run.steps) and len(run.gaps) and len(run.timeline)
    shown = run.report()._repr_html_()
    assert "srcdoc=" in shown and "<script" not in shown  # the page is inside an attribute, escaped


@pytest.mark.parametrize("missing", ["manifest.json", "summary.json"])
def test_what_is_no_analysed_run_is_not_opened(done: Done, tmp_path: Path, missing: str) -> None:
    for name in ("manifest.json", "summary.json"):
        if name != missing:
            (tmp_path / name).write_text("{}")
    with pytest.raises(UserError, match=r"manifest\.json|gapmeter report"):
        gapmeter.open(tmp_path)


def events(run: Any) -> list[dict[str, Any]]:
    file = run.folder.path / "trace.json.gz"
    assert run.export(perfetto=file) == [str(file)]
    document = json.loads(gzip.decompress(file.read_bytes()))
    assert document["displayTimeUnit"] in ("ms", "ns")
    assert set(FACTS) <= set(document["otherData"])
    return list(document["traceEvents"])


NEEDED = {"X": {"name", "cat", "ts", "dur", "pid", "tid"}, "M": {"name", "pid", "args"}, "C": {"name", "ts", "args"}}
NEEDED |= {phase: {"name", "cat", "id", "ts", "pid", "tid"} for phase in "sf"}


def test_every_event_of_the_trace_has_what_its_phase_needs_and_they_are_in_order(run: Any) -> None:
    found = events(run)
    for event in found:
        assert NEEDED[event["ph"]] <= set(event), event
        assert event["ph"] != "X" or event["dur"] >= 0
        assert event["ph"] != "C" or all(isinstance(value, int | float) for value in event["args"].values())
    times = [event["ts"] for event in found if event["ph"] != "M"]
    assert times == sorted(times)
    named = {(event["pid"], event["tid"]) for event in found if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in found if event["ph"] in "Xsf"} <= named


def test_slices_of_a_track_of_the_trace_nest_and_arrows_join_slices(run: Any) -> None:
    assert arrows_between_nested_slices(events(run)) == 2 * 30


def test_steps_that_overlap_have_tracks_of_their_own_in_the_trace() -> None:
    found = trace(ReportedRun.read(RunFolder(golden("gpu"))))["traceEvents"]  # vLLM with asynchronous scheduling
    assert arrows_between_nested_slices(found)
    assert {"loop", "loop 2"} <= {event["args"]["name"] for event in found if event["name"] == "thread_name"}


def arrows_between_nested_slices(found: list[dict[str, Any]]) -> int:
    """How many arrows there are, each from a slice to one; slices of a track overlap only where one holds the other."""
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in found:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for slices in tracks.values():
        open_ends: list[float] = []
        for start, end in slices:
            while open_ends and open_ends[-1] <= start + 0.0015:  # rounded to a nanosecond, twice
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 0.0015
            open_ends.append(end)
    starts = {event["id"]: event for event in found if event["ph"] == "s"}
    ends = {event["id"]: event for event in found if event["ph"] == "f"}
    assert starts.keys() == ends.keys()
    for arrow in (*starts.values(), *ends.values()):
        around = tracks[arrow["pid"], arrow["tid"]]
        assert any(start <= arrow["ts"] <= end for start, end in around), arrow
    assert all(starts[number]["ts"] <= ends[number]["ts"] for number in starts)
    return len(starts)


def test_the_stages_on_a_requests_track_add_up_to_its_wait(run: Any) -> None:
    requests = [e for e in events(run) if e["ph"] == "X" and e["pid"] == 1]
    whole = {event["tid"]: event["dur"] for event in requests if event["name"] == "request"}
    parts: dict[int, float] = defaultdict(float)
    for event in requests:
        if event["name"] != "request":
            parts[event["tid"]] += event["dur"]
    assert whole.keys() == parts.keys() and len(whole) == 30
    assert all(math.isclose(parts[track], whole[track], abs_tol=0.5) for track in whole)


def test_each_engine_has_tracks_and_counters_of_its_own(run: Any) -> None:
    one = ReportedRun.read(run.folder)
    again = one.steps.assign(step=one.steps["step"] + one.steps["step"].max())
    both = trace(replace(one, steps=pd.concat([one.steps, again], ignore_index=True)))["traceEvents"]
    counts = [sum(event["pid"] == pid and event["ph"] in "XC" for event in both) for pid in (2, 3)]
    assert counts[0] == counts[1] > 0
    first, second = ({e["args"]["step"] for e in both if e["ph"] == "X" and e["pid"] == pid} for pid in (2, 3))
    assert len(first) == len(second) and max(first) < min(second)
    names = [e["args"]["name"].removesuffix(" (INVALID run)") for e in both if e["name"] == "process_name"]
    assert names == ["requests", "engine 0", "engine 1"]


LINE = re.compile(r'^(gapmeter_[a-z_]+)\{((?:[a-z_]+="(?:[^"\\\n]|\\["\\n])*",?)+)\} (-?[0-9.e+-]+)$')


def test_the_prometheus_file_is_well_formed_and_says_what_the_summary_says(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "run.prom"
    assert command("export", str(run.folder.path), "--prometheus", str(file), runs=tmp_path).code == 0
    text = file.read_text()
    assert text.endswith("\n")
    values: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    declared: set[str] = set()
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            declared.add(line.split()[2])
        elif not line.startswith("# HELP "):
            match = LINE.match(line)
            assert match, line
            labels = frozenset(re.findall(r'([a-z_]+)="((?:[^"\\]|\\.)*)"', match[2]))
            assert match[1] in declared and (match[1], labels) not in values
            values[match[1], labels] = float(match[3])
    wanted = {("metric", "ttft"), ("bound", "value"), ("counted_from", "due")}
    told = {
        f"p{100 * float(dict(labels)['quantile']):g}".replace(".", ""): value
        for (name, labels), value in values.items()
        if name.endswith("latency_seconds") and wanted <= labels
    }
    ttft = {key: run.summary["metrics"]["ttft"][f"{key}_ms"] for key in PERCENTILES}
    assert told == pytest.approx({key: value / 1e3 for key, value in ttft.items() if value is not None})
    (info,) = (dict(labels) for (name, labels) in values if name == "gapmeter_run_info")
    assert set(FACTS) <= set(info)


def test_csv_files_carry_where_they_are_from_and_the_runs_figures(run: Any, tmp_path: Path) -> None:
    done = command("export", str(run.folder.path), "--csv", str(tmp_path / "csv"), runs=tmp_path)
    files = {Path(line).stem: Path(line) for line in done.out.splitlines()}
    assert {"metrics", "stages", "groups", "slo", "requests", "ledger", "gaps", "timeline", "steps"} == set(files)
    for file in files.values():
        head = "".join(line for line in file.read_text().splitlines(keepends=True) if line.startswith("#"))
        assert all(f"# {fact}: " in head for fact in FACTS)
    metrics = pd.read_csv(files["metrics"], comment="#").set_index(["metric", "counted_from"])
    for key in (*(f"{p}_ms" for p in PERCENTILES), "max_ms"):
        told = run.summary["metrics"]["e2e"][
            key
        ]  # null where so small a sample cannot support it; a cell is then empty
        told = math.nan if told is None else told
        assert metrics.loc[("e2e", "due"), key] == pytest.approx(told, nan_ok=True), key
    ledger = pd.read_csv(files["ledger"], comment="#")
    assert ledger["total_ns"].tolist() == run.ledger["total_ns"].tolist()


def test_csv_has_the_bound_of_a_percentile_without_an_interval(run: Any) -> None:
    worth = Worth(middle=300.0, body=300.0, tail=300.0)
    found = distribution(Series(np.arange(1, 301) * 1e6, known=worth), (99.0,), 300, 30.0)
    bound = found.at(99.0).at_most
    assert found.ms(99.0) is None and bound is not None and bound.ms == 300.0
    result = RunResult.read(run.folder.path)
    slo = result.slo[0].model_copy(update={"at_most": bound})
    tables = figures(result.model_copy(update={"metrics": {"ttft": found}, "slo": (slo,)}))
    row, own = tables["metrics"].iloc[0], tables["slo"].iloc[0]
    assert (row["p99_at_most_ms"], row["p99_at_most_confidence"]) == (300.0, bound.confidence)
    assert (own["at_most_ms"], own["at_most_confidence"]) == (300.0, bound.confidence)


def test_an_error_with_the_mark_of_comments_cuts_no_row_short(run: Any, tmp_path: Path) -> None:
    table = pd.DataFrame({"error": ["see bug #12", ""], "measured": [True, False]})
    path = _write(tmp_path / "requests.csv", table, RunResult.read(run.folder.path).provenance)
    assert pd.read_csv(path, comment="#", keep_default_na=False).equals(table)


class Collector:
    """An OTLP/HTTP receiver, which decodes what arrives with OpenTelemetry's own messages."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resource: dict[str, str] = {}
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._ready.wait(10)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/traces", self._take)
        runner = web.AppRunner(app)
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        self._loop.run_until_complete(site.start())
        self.port = runner.addresses[0][1]
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())

    async def _take(self, request: web.Request) -> web.Response:
        body = await request.read()
        for part in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resource = {pair.key: pair.value.string_value for pair in part.resource.attributes}
            self.spans += [span for scope in part.scope_spans for span in scope.spans]
        return web.Response(content_type="application/x-protobuf")

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


def test_a_collector_receives_a_span_a_request_under_its_traceparent_and_its_stages_beneath(
    run: Any, tmp_path: Path, collector: Collector
) -> None:
    done = command("export", str(run.folder.path), "--otlp", f"http://127.0.0.1:{collector.port}", runs=tmp_path)
    assert done.code == 0, done.err
    by_id = {(span.trace_id, span.span_id): span for span in collector.spans}
    ahead = time.time_ns() - time.monotonic_ns()  # the clocks of this host, as at the run but for their drift
    first = run.requests["due_ns"].min() + ahead
    assert abs(min(span.start_time_unix_nano for span in collector.spans) - first) < 100_000_000
    assert len(by_id) == len(collector.spans)
    assert all(f"gapmeter.{fact}" in collector.resource for fact in FACTS)
    requests = run.requests.set_index("request_id")
    for name, row in requests.iterrows():
        trace, own = (n.to_bytes(size, "big") for n, size in zip(trace_ids(str(name)), (16, 8), strict=True))
        span = by_id[trace, own]
        attributes = {pair.key: pair.value for pair in span.attributes}
        assert attributes["gen_ai.usage.output_tokens"].int_value == row["output_tokens"]
        assert attributes["gen_ai.request.model"].string_value == run.manifest.target.model
        ttft = (row["first_token_ns"] - row["due_ns"]) / 1e9
        assert attributes["gen_ai.server.time_to_first_token"].double_value == pytest.approx(ttft)
        assert span.end_time_unix_nano - span.start_time_unix_nano == row["last_token_ns"] - row["due_ns"]
        parts = [other for other in collector.spans if other.parent_span_id == own and other.trace_id == trace]
        assert sum(p.end_time_unix_nano - p.start_time_unix_nano for p in parts) == row["last_token_ns"] - row["due_ns"]


def test_the_span_of_a_request_that_failed_after_some_tokens_ends_when_it_failed(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", count=60, failures=1)
    requests = pd.read_parquet(folder.path / "requests.parquet")
    failed = requests.index[requests["outcome"] != "ok"]
    requests.loc[failed, "last_token_ns"] = requests.loc[failed, "due_ns"] + 1
    write_table(folder.path / "requests.parquet", requests)
    row = requests.loc[failed[0]]
    (span,) = (span for span in spans(folder) if span.attributes.get("gapmeter.request_id") == row["request_id"])
    assert span.end_time - span.start_time == row["end_ns"] - row["due_ns"] > 1


def test_the_span_of_an_attempt_that_failed_is_as_long_as_the_attempt() -> None:
    folder = RunFolder(golden("failures"))
    requests = pd.read_parquet(folder.path / "requests.parquet").set_index("request_id")
    length_ns = {span.attributes["gapmeter.request_id"]: span.end_time - span.start_time for span in spans(folder)
                 if "gapmeter.request_id" in span.attributes}  # fmt: skip
    again = requests[(requests["outcome"] != "ok") & (requests["retry"] > 0) & requests["sent_ns"].notna()]
    assert len(again)
    for name, row in again.iterrows():
        assert length_ns[name] == row["end_ns"] - row["attempt_due_ns"] < row["end_ns"] - row["due_ns"]


def test_a_request_that_was_sent_again_is_one_request() -> None:
    run = ReportedRun.read(RunFolder(golden("failures")))
    assert run.issued == run.requests["index"].nunique() < len(run.requests)
    assert str(trace(run)["otherData"]["requests in this file"]).endswith(f" of {run.issued}")


def test_a_collector_that_is_not_there_is_one_sentence(run: Any, tmp_path: Path) -> None:
    done = command("export", str(run.folder.path), "--otlp", "http://127.0.0.1:9", runs=tmp_path, env=SOON)
    assert done.code == 2 and "127.0.0.1:9 did not take spans" in done.err
    assert "Traceback" not in done.err


def test_a_file_is_no_collector(run: Any, tmp_path: Path) -> None:
    done = command("export", str(run.folder.path), "--otlp", "spans.json", runs=tmp_path)
    assert done.code == 2 and "not exported: spans.json is no collector's address; write for instance " in done.err
    assert "Failed to export" not in done.err


def test_exporting_nothing_says_what_there_is(run: Any, tmp_path: Path) -> None:
    done = command("export", str(run.folder.path), runs=tmp_path)
    assert done.code == 2 and "--otlp" in done.err
