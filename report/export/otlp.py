"""A run's ledgers as OpenTelemetry spans: one a request, its stages beneath it, under the traceparent that it carried.

Names are those of the GenAI semantic conventions (OpenTelemetry semantic conventions 1.37, ``gen_ai.*``), ours begin
with ``gapmeter.``. A request's trace and span are what its id decides (``records.request``): where requests carried a
``traceparent`` (``load.traceparent: true``), the server's own spans stand beneath these. Stamps are on the monotonic
clock; they are put on the wall clock by the one pair of readings that the manifest has.

The extra ``otel`` brings the SDK that this needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

import pandas as pd

from gapmeter.analysis.requests.metrics import request_values_ns
from gapmeter.records import RunFolder
from gapmeter.records.request import trace_ids
from gapmeter.report import marks
from gapmeter.report.run_folder import ReportedRun

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

_BATCH = 500


class NoOpenTelemetry(ImportError):
    """The extra is missing; the text says how to get it."""


class NotDelivered(OSError):
    """The collector did not take the spans."""


def send(folder: RunFolder, endpoint: str) -> int:
    """Send a run's spans to an OTLP/HTTP collector, such as http://127.0.0.1:4318; how many spans it took.

    Raises NoOpenTelemetry, NotDelivered, FileNotFoundError when the run has not been analysed.
    """
    _need_sdk()
    import requests
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import SpanExportResult

    if not endpoint.startswith(("http://", "https://")):
        raise NotDelivered(f"{endpoint} is no collector's address; write for instance http://127.0.0.1:4318")
    address = endpoint.rstrip("/")
    session = requests.Session()
    session.max_redirects = 0  # its headers may hold a key, which is for this host alone
    exporter = OTLPSpanExporter(address if address.endswith("/v1/traces") else f"{address}/v1/traces", session=session)
    sent = 0
    try:
        all_spans = spans(folder)
        while batch := list(islice(all_spans, _BATCH)):
            if exporter.export(batch) is not SpanExportResult.SUCCESS:
                raise NotDelivered(f"{endpoint} did not take spans {sent + 1} to {sent + len(batch)}")
            sent += len(batch)
    except requests.RequestException as error:
        raise NotDelivered(f"{endpoint} did not take the spans: {error}") from error
    finally:
        exporter.shutdown()  # type: ignore[no-untyped-call]
    return sent


def spans(folder: RunFolder) -> Iterator[ReadableSpan]:
    """Every span of a run, each request's followed by its stages'. Raises as ``send``."""
    _need_sdk()
    run = ReportedRun.read(folder)
    make = _maker(run)
    by_request = dict(iter(run.timeline.groupby("request_id", observed=True))) if len(run.timeline) else {}
    for row in run.requests.assign(tpot_ns=request_values_ns(run.requests, "tpot")).itertuples():
        if pd.isna(row.sent_ns):
            continue
        yield _request(make, run, row)
        if (mine := by_request.get(row.request_id)) is not None:
            yield from _stages(make, row.request_id, mine, run.result.device)


def _need_sdk() -> None:
    try:
        import opentelemetry.exporter.otlp.proto.http
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError as error:
        text = "OpenTelemetry's SDK is missing: make setup in a checkout, or"
        raise NoOpenTelemetry(f"{text} pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http") from error


Make = Callable[..., "ReadableSpan"]


def _maker(run: ReportedRun) -> Make:
    """What makes a span of this run from its name, ids, stamps and attributes."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

    about = run.result.provenance.facts()
    attributes = {"service.name": "gapmeter", **{f"gapmeter.{key}": value for key, value in about.items()}}
    resource, scope = Resource(attributes), InstrumentationScope("gapmeter", run.result.made_by.gapmeter)
    wall_ns = run.manifest.started_wall_ns - run.manifest.started_ns  # since the epoch

    def context(trace_id: int, span_id: int) -> SpanContext:
        return SpanContext(trace_id, span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

    def make(
        name: str, ids: tuple[int, int], parent: int | None, stretch: tuple[int, int], attributes: Mapping[str, Any],
        error: str = "",
    ) -> ReadableSpan:  # fmt: skip
        start, end = stretch
        return ReadableSpan(
            name, context(*ids), context(ids[0], parent) if parent else None, resource, dict(attributes),
            kind=SpanKind.INTERNAL if parent else SpanKind.CLIENT, instrumentation_scope=scope,
            status=Status(StatusCode.ERROR, error) if error else Status(StatusCode.OK),
            start_time=start + wall_ns, end_time=end + wall_ns,
        )  # fmt: skip

    return make


def _request(make: Make, run: ReportedRun, row: Any) -> ReadableSpan:
    kind, model = run.manifest.asked.workload.kind, run.manifest.target.model
    operation = "text_completion" if kind == "completion" else "chat"
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.request.model": model,
        "gen_ai.request.max_tokens": int(row.output_tokens_asked),
        "gapmeter.request_id": row.request_id,
        "gapmeter.outcome": row.outcome,
        "gapmeter.measured": bool(row.measured),
    }
    if pd.notna(row.prompt_tokens):
        attributes["gen_ai.usage.input_tokens"] = int(row.prompt_tokens)
    if pd.notna(row.output_tokens):
        attributes["gen_ai.usage.output_tokens"] = int(row.output_tokens)
    if pd.notna(row.first_token_ns):
        attributes["gen_ai.server.time_to_first_token"] = (row.first_token_ns - row.due_ns) / 1e9
        if pd.notna(row.tpot_ns):
            attributes["gen_ai.server.time_per_output_token"] = row.tpot_ns / 1e9
    failed = "" if row.outcome == "ok" else str(row.error or row.outcome)
    if failed:
        attributes["error.type"] = row.outcome
    stamps = (row.end_ns, row.last_token_ns, row.sent_ns) if failed else (row.last_token_ns, row.end_ns, row.sent_ns)
    ends = [int(at) for at in stamps if pd.notna(at)]
    # An answer was waited for since its first attempt was due; an attempt that failed took only its own time.
    stretch = (int(row.attempt_due_ns if failed else row.due_ns), ends[0])
    return make(f"{operation} {model}", trace_ids(row.request_id), None, stretch, attributes, failed)


def _stages(make: Make, request_id: str, mine: pd.DataFrame, device: str) -> Iterator[ReadableSpan]:
    trace, parent = trace_ids(request_id)
    for number, row in enumerate(mine.itertuples(), start=1):
        owner = marks.owner(row.stage, device)
        own = (trace, (parent + number) % 2**64 or 1)
        attributes = {"gapmeter.owner": owner, "gapmeter.kind": row.kind}
        yield make(row.stage, own, parent, (int(row.start_ns), int(row.end_ns)), attributes)
