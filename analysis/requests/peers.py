"""What other load testers would have measured of the same answers, by the definitions in their sources.

Each function here restates one tool's rules for one answer; docs/definitions.md says where they were read. All of them
count from when they begin to send, however late that is: none knows when a request was due.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from gapmeter.records.stream import Chunk


@dataclass(frozen=True, slots=True)
class Seen:
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
class Measured:
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


def vllm_bench(seen: Seen) -> Measured:
    """Any chunk with a choice is a token, also one that only names the role or the finish reason."""
    at = [chunk.at_ns for chunk in seen.chunks if chunk.choice]
    if not at:
        return Measured()
    tokens = next((c.usage for c in reversed(seen.chunks) if c.usage and not c.choice), seen.tokens)
    ttft, e2e = float(at[0] - seen.begun_ns), float(at[-1] - seen.begun_ns)
    return Measured(ttft, e2e, _per_token(e2e - ttft, tokens), itl=_gaps(at))


def guidellm(seen: Seen) -> Measured:
    """A token arrives with a chunk that has text or a tool call; ITL and TPOT are one mean a request, weighted."""
    at = [chunk.at_ns for chunk in seen.chunks if chunk.text or chunk.calls]
    end = next((chunk.at_ns for chunk in seen.chunks if chunk.end), seen.end_ns)
    e2e = float(end - seen.sent_ns)
    tokens = _last_usage(seen) or len(at) or None
    if not at or tokens is None:
        return Measured(e2e=e2e)
    mean = _per_token(float(at[-1] - at[0]), tokens)
    return Measured(
        float(at[0] - seen.sent_ns), e2e, (at[-1] - seen.sent_ns) / tokens, tokens,
        itl=[] if mean is None else [mean], itl_weight=tokens - 1,
    )  # fmt: skip


def aiperf(seen: Seen) -> Measured:
    """A chunk with text or a tool call counts; the last of them ends the request; ITL is one mean a request."""
    at = [chunk.at_ns for chunk in seen.chunks if chunk.text or chunk.calls]
    if not at:
        return Measured()
    ttft, e2e = float(at[0] - seen.begun_ns), float(at[-1] - seen.begun_ns)
    mean = _per_token(e2e - ttft, _last_usage(seen) or seen.tokens)
    return Measured(ttft, e2e, itl=[] if mean is None else [mean], chunk_gaps=_gaps(at))


def genai_bench(seen: Seen) -> Measured:
    """The first chunk with text is the first token; the request lasts until its usage has come."""
    end, tokens = seen.end_ns, seen.tokens
    finished = False
    for chunk in seen.chunks:
        finished = finished or chunk.finish
        if chunk.end or (chunk.usage is not None and finished):
            end, tokens = chunk.at_ns, tokens if chunk.end else chunk.usage
            break
    first = next((chunk.at_ns for chunk in seen.chunks if chunk.text), end if (tokens or 0) > 1 else None)
    if first is None:
        return Measured()
    ttft, e2e = float(first - seen.begun_ns), float(end - seen.begun_ns)
    return Measured(ttft, e2e, _per_token(e2e - ttft, tokens))


@dataclass(frozen=True, slots=True)
class Peer:
    """A tool: what it is called, the version whose source was read, and how each of its figures differs from ours.

    ``differs`` has a sentence for every metric, also for one that the tool does not have.
    """

    key: str
    name: str
    version: str
    measure: Callable[[Seen], Measured]
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


def _last_usage(seen: Seen) -> int | None:
    return next((chunk.usage for chunk in reversed(seen.chunks) if chunk.usage), None)
