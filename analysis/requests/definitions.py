"""TTFT, ITL, TPOT and E2E of a run by other tools' definitions, from the same records, so that two tools reconcile.

Percentiles are taken as each tool takes them: numpy's linear interpolation, or for GuideLLM the first value whose
cumulated weight reaches the share. They have no intervals, since theirs have none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from gapmeter.analysis.requests.metrics import measured_requests, succeeded
from gapmeter.analysis.requests.peers import PEERS, Measured, Peer, Seen
from gapmeter.analysis.results.run import PeerDefinitions, PeerFigures
from gapmeter.records import RunFolder, read_records
from gapmeter.records.request import FINISHED, RequestRecord, decode
from gapmeter.records.stream import chunks

PERCENTILES = (50.0, 90.0, 95.0, 99.0)
WEIGHTED = "guidellm"
Floats = NDArray[np.float64]


def describe_definitions(folder: RunFolder, requests: pd.DataFrame) -> dict[str, PeerDefinitions]:
    """By tool: its figures, and how each of its definitions differs from ours.

    Over the measured requests that succeeded. Reads every record once more: about as long as the analysis took.
    """
    measured = measured_requests(requests)
    good = measured[succeeded(measured)]
    tokens = dict(zip(good["request_id"], good["output_tokens"], strict=True))
    answers = [[peer.measure(seen) for peer in PEERS] for seen in _seen(folder, tokens)]
    return {peer.key: _describe(peer, [row[k] for row in answers]) for k, peer in enumerate(PEERS)}


def _seen(folder: RunFolder, tokens: dict[str, Any]) -> Iterator[Seen]:
    for path in folder.record_files(folder.requests):
        for code, payload in read_records(path).blobs:
            if code == FINISHED:
                record = decode(payload)
                if record.request_id in tokens:
                    count = tokens[record.request_id]
                    yield seen(record, None if pd.isna(count) else int(count))


def seen(record: RequestRecord, tokens: int | None) -> Seen:
    """One answer as any client could have seen it."""
    begun = record.connect_start_ns or record.write_ns
    return Seen(begun, record.write_ns, record.end_ns, tokens, tuple(chunks(record)))


def _describe(peer: Peer, answers: list[Measured]) -> PeerDefinitions:
    metrics = {
        metric: figures(*pooled(answers, metric), differs=sentence, weighted=peer.key == WEIGHTED)
        for metric, sentence in peer.differs.items()
    }
    return PeerDefinitions(
        name=peer.name, version=peer.version, ttft=metrics.get("ttft"), itl=metrics.get("itl"),
        icl=metrics.get("icl"), tpot=metrics.get("tpot"), e2e=metrics.get("e2e"),
    )  # fmt: skip


def pooled(answers: Iterable[Measured], metric: str) -> tuple[Floats, Floats]:
    """The values of a metric over all answers, and how often each counts."""
    values: list[float] = []
    weights: list[float] = []
    for answer in answers:
        if metric in ("itl", "icl"):
            more = answer.itl if metric == "itl" else answer.chunk_gaps
        else:
            one: float | None = getattr(answer, metric)
            more = [] if one is None else [one]
        values += more
        weight = {"itl": answer.itl_weight, "tpot": answer.tpot_weight}.get(metric, 1.0)
        weights += [weight] * len(more)
    return np.asarray(values, np.float64), np.asarray(weights, np.float64)


def figures(values: Floats, weights: Floats, *, differs: str, weighted: bool) -> PeerFigures:
    """Percentiles and mean in ms and the number of values; all None without one."""
    if not len(values):
        return PeerFigures(
            differs=differs, p50_ms=None, p90_ms=None, p95_ms=None, p99_ms=None, mean_ms=None, count=0
        )  # fmt: skip
    at = _weighted(values, weights) if weighted else np.percentile(values, PERCENTILES)
    p50, p90, p95, p99 = (float(value) / 1e6 for value in at)
    mean_ms = float(np.average(values, weights=weights)) / 1e6
    return PeerFigures(
        differs=differs, p50_ms=p50, p90_ms=p90, p95_ms=p95, p99_ms=p99, mean_ms=mean_ms, count=len(values)
    )  # fmt: skip


def _weighted(values: Floats, weights: Floats) -> Floats:
    order = np.argsort(values, kind="stable")
    cumulated = np.cumsum(weights[order])
    ranks = np.searchsorted(cumulated, np.asarray(PERCENTILES) / 100 * cumulated[-1], side="left")
    return np.asarray(values[order][np.minimum(ranks, len(values) - 1)], np.float64)
