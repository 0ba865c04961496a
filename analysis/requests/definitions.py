"""TTFT, ITL, TPOT and E2E of a run by other tools' definitions, from the same records, so that two tools reconcile.

Each tool's function restates its rules for one answer; docs/definitions.md says where they were read. All of them count
from when they begin to send, however late that is: none knows when a request was due. Percentiles are taken as each
tool takes them: numpy's linear interpolation, or for GuideLLM the first value whose cumulated weight reaches the share.
They have no intervals, since theirs have none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from gapmeter.analysis.arrays import Floats, Ints
from gapmeter.analysis.requests.metrics import measured_requests, succeeded
from gapmeter.analysis.results.requests import PeerDefinitions, PeerFigures
from gapmeter.records import RunFolder, read_records
from gapmeter.records.request import FINISHED, RequestRecord, decode
from gapmeter.records.stream import REASONING, events

PERCENTILES = (50.0, 90.0, 95.0, 99.0)
WEIGHTED = "guidellm"


@dataclass(frozen=True, slots=True)
class Chunk:
    """One event as clients look at it that do not know which chunks carry tokens: they go by what is in it.

    ``at_ns``: when the piece that completed it arrived. ``choice``: it has a choice, be it empty (a role alone, a
    finish reason alone); ``text``: with visible or reasoning text; ``calls``: with a part of a tool call; ``finish``:
    with a finish reason. ``usage``: the completion tokens that it reports, None if it reports none. ``end``: the end
    mark of the stream, and nothing else.
    """

    at_ns: int
    choice: bool = False
    text: bool = False
    calls: bool = False
    finish: bool = False
    usage: int | None = None
    end: bool = False


@dataclass(frozen=True, slots=True)
class OneAnswer:
    """One complete answer.

    ``begun_ns``: the client turned to sending the request (to connecting, where it had to); ``sent_ns``: it began to
    write it; ``end_ns``: the answer was over; ``tokens``: in it, None if nobody said.
    """

    begun_ns: int
    sent_ns: int
    end_ns: int
    tokens: int | None
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class ByTool:
    """What a tool makes of one answer, in ns; None or nothing where it has no such figure.

    ``itl`` are the values that it pools over answers, each counted ``itl_weight`` times in percentiles and mean;
    ``chunk_gaps`` those of a figure beside its ITL.
    """

    ttft: float | None = None
    e2e: float | None = None
    tpot: float | None = None
    tpot_weight: float = 1.0
    itl: list[float] = field(default_factory=list)
    itl_weight: float = 1.0
    chunk_gaps: list[float] = field(default_factory=list)


def vllm_bench(seen: OneAnswer) -> ByTool:
    """Any chunk with a choice is a token, also one that only names the role or the finish reason."""
    at = [chunk.at_ns for chunk in seen.chunks if chunk.choice]
    if not at:
        return ByTool()
    tokens = next((c.usage for c in reversed(seen.chunks) if c.usage and not c.choice), seen.tokens)
    ttft, e2e = float(at[0] - seen.begun_ns), float(at[-1] - seen.begun_ns)
    return ByTool(ttft, e2e, _per_token(e2e - ttft, tokens), itl=_gaps(at))


def guidellm(seen: OneAnswer) -> ByTool:
    """A token arrives with a chunk that has text or a tool call; ITL and TPOT are one mean a request, weighted."""
    at = [chunk.at_ns for chunk in seen.chunks if chunk.text or chunk.calls]
    end = next((chunk.at_ns for chunk in seen.chunks if chunk.end), seen.end_ns)
    e2e = float(end - seen.sent_ns)
    tokens = _last_usage(seen) or len(at) or None
    if not at or tokens is None:
        return ByTool(e2e=e2e)
    mean = _per_token(float(at[-1] - at[0]), tokens)
    return ByTool(
        float(at[0] - seen.sent_ns), e2e, (at[-1] - seen.sent_ns) / tokens, tokens,
        itl=[] if mean is None else [mean], itl_weight=tokens - 1,
    )  # fmt: skip


def aiperf(seen: OneAnswer) -> ByTool:
    """A chunk with text or a tool call counts; the last of them ends the request; ITL is one mean a request."""
    at = [chunk.at_ns for chunk in seen.chunks if chunk.text or chunk.calls]
    if not at:
        return ByTool()
    ttft, e2e = float(at[0] - seen.begun_ns), float(at[-1] - seen.begun_ns)
    mean = _per_token(e2e - ttft, _last_usage(seen) or seen.tokens)
    return ByTool(ttft, e2e, itl=[] if mean is None else [mean], chunk_gaps=_gaps(at))


def genai_bench(seen: OneAnswer) -> ByTool:
    """The first chunk with text is the first token; the request lasts until its usage has come.

    Of answers whose tokens after the first took less than 1 ms it drops the TPOT (``filter_metrics``).
    """
    end, tokens = seen.end_ns, seen.tokens
    finished = False
    for chunk in seen.chunks:
        finished = finished or chunk.finish
        if chunk.end or (chunk.usage is not None and finished):
            end, tokens = chunk.at_ns, tokens if chunk.end else chunk.usage
            break
    first = next((chunk.at_ns for chunk in seen.chunks if chunk.text), end if (tokens or 0) > 1 else None)
    if first is None:
        return ByTool()
    ttft, e2e = float(first - seen.begun_ns), float(end - seen.begun_ns)
    return ByTool(ttft, e2e, None if e2e - ttft < 1e6 else _per_token(e2e - ttft, tokens))


@dataclass(frozen=True, slots=True)
class Peer:
    """A tool: what it is called, the version whose source was read, and how each of its figures differs from ours.

    ``differs`` has a sentence for every metric, also for one that the tool does not have.
    """

    key: str
    name: str
    version: str
    measure: Callable[[OneAnswer], ByTool]
    differs: dict[str, str]


PEERS: tuple[Peer, ...] = (
    Peer(
        "vllm_bench", "vLLM bench serve", "0.32.0", vllm_bench,
        {
            "ttft": "from the (late) send to the first chunk with a choice, which may only name the role",
            "itl": "gaps between chunks with a choice, pooled: from the role, and to a finish reason, alone too",
            "tpot": "(E2E - TTFT) / (tokens - 1) by its own TTFT and E2E; none for one token",
            "e2e": "from the (late) send to the last chunk with a choice",
        },
    ),
    Peer(
        "guidellm", "GuideLLM", "0.8.1", guidellm,
        {
            "ttft": "from the first byte sent, connecting left out, to the first chunk with text or a tool call",
            "itl": "one mean a request, (last - first) / (tokens - 1), counted tokens - 1 times",
            "tpot": "(last - sent) / tokens, TTFT included, counted as often as it has tokens",
            "e2e": "from the first byte sent to the stream's end mark",
        },
    ),
    Peer(
        "aiperf", "AIPerf", "0.13.0", aiperf,
        {
            "ttft": "from the (late) send to the first chunk with text or a tool call",
            "itl": "one mean a request, (E2E - TTFT) / (tokens - 1): what others call TPOT",
            "tpot": "has none by this name: its ITL is one",
            "e2e": "from the (late) send to the last chunk with text or a tool call",
            "icl": "its inter-chunk latency: gaps between chunks with text or a tool call, pooled",
        },
    ),
    Peer(
        "genai_bench", "genai-bench", "0.0.5", genai_bench,
        {
            "ttft": "from the (late) send to the first chunk with text; each request connects anew there",
            "itl": "has none",
            "tpot": "(E2E - TTFT) / (tokens - 1), the wait for the usage included; none for one token",
            "e2e": "from the (late) send until the usage has come with or after the finish reason, or the end mark",
        },
    ),
)  # fmt: skip


def _per_token(span: float, tokens: int | None) -> float | None:
    """A span over the tokens after the first; None where there is no second."""
    return None if tokens is None or tokens < 2 else span / (tokens - 1)


def _gaps(at_ns: list[int]) -> list[float]:
    return [float(later - earlier) for earlier, later in pairwise(at_ns)]


def _last_usage(seen: OneAnswer) -> int | None:
    return next((chunk.usage for chunk in reversed(seen.chunks) if chunk.usage), None)


def describe_definitions(folder: RunFolder, requests: pd.DataFrame) -> dict[str, PeerDefinitions]:
    """By tool: its figures, and how each of its definitions differs from ours.

    Over the measured requests that succeeded. Reads every record once more: about as long as the analysis took.
    """
    measured = measured_requests(requests)
    good = measured[succeeded(measured)]
    counts = zip(good["request_id"], good["output_tokens"], strict=True)
    tokens = {request_id: None if pd.isna(count) else int(count) for request_id, count in counts}
    answers: dict[str, list[ByTool]] = {peer.key: [] for peer in PEERS}

    def take(data: bytes, codes: Ints, begins: Ints, ends: Ints) -> None:
        ended = codes == FINISHED
        for begin, end in zip(begins[ended].tolist(), ends[ended].tolist(), strict=True):
            record = decode(data[begin:end])
            if record.request_id in tokens:
                answer = seen(record, tokens[record.request_id])
                for peer in PEERS:
                    answers[peer.key].append(peer.measure(answer))

    for path in folder.record_files(folder.requests):
        read_records(path, take)
    described = {}
    for peer in PEERS:
        metrics = {
            metric: figures(*pooled(answers[peer.key], metric), differs=sentence, weighted=peer.key == WEIGHTED)
            for metric, sentence in peer.differs.items()
        }
        described[peer.key] = PeerDefinitions(name=peer.name, version=peer.version, **metrics)
    return described


def seen(record: RequestRecord, tokens: int | None) -> OneAnswer:
    """One answer as any client could have seen it."""
    begun = record.connect_start_ns or record.write_ns
    return OneAnswer(begun, record.write_ns, record.end_ns, tokens, tuple(chunks(record)))


def pooled(answers: Iterable[ByTool], metric: str) -> tuple[Floats, Floats]:
    """The values of a metric over all answers, and how often each counts."""
    values: list[float] = []
    weights: list[float] = []
    for answer in answers:
        own: Mapping[str, Sequence[float | None]] = {
            "ttft": [answer.ttft], "e2e": [answer.e2e], "tpot": [answer.tpot], "itl": answer.itl,
            "icl": answer.chunk_gaps,
        }  # fmt: skip
        more = [value for value in own[metric] if value is not None]
        values += more
        weights += [{"itl": answer.itl_weight, "tpot": answer.tpot_weight}.get(metric, 1.0)] * len(more)
    return np.asarray(values, np.float64), np.asarray(weights, np.float64)


def figures(values: Floats, weights: Floats, *, differs: str, weighted: bool) -> PeerFigures:
    """Percentiles and mean in ms and the number of values; all None without one."""
    mean_ms: float | None = None
    at_ms: list[float | None] = [None] * len(PERCENTILES)
    if len(values):
        how: dict[str, Any] = {"weights": weights, "method": "inverted_cdf"} if weighted else {}
        at = np.percentile(values, PERCENTILES, **how)
        at_ms, mean_ms = (at / 1e6).tolist(), float(np.average(values, weights=weights)) / 1e6
    p50, p90, p95, p99 = at_ms
    return PeerFigures(
        differs=differs, p50_ms=p50, p90_ms=p90, p95_ms=p95, p99_ms=p99, mean_ms=mean_ms, count=len(values)
    )


def chunks(record: RequestRecord) -> Iterator[Chunk]:
    """Every event of an answer up to its end mark; what is no JSON object is left out."""
    for at_ns, data in events(record):
        if data == "[DONE]":
            yield Chunk(at_ns, end=True)
            return
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            yield _chunk(at_ns, value)


def _chunk(at_ns: int, value: dict[str, Any]) -> Chunk:
    usage, choices = value.get("usage"), value.get("choices")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    tokens = tokens if type(tokens) is int else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict):
        return Chunk(at_ns, choice=choice is not None, usage=tokens)
    part = choice.get("delta") or choice.get("message") or choice
    part = part if isinstance(part, dict) else {}
    text = any(part.get(name) for name in ("content", "text", *REASONING))
    return Chunk(at_ns, True, bool(text), bool(part.get("tool_calls")), bool(choice.get("finish_reason")), tokens)
