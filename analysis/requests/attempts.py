"""What generators recorded of each attempt of a request, as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from gapmeter.records import Outcome, RecordFile, read_records
from gapmeter.records.answers import parse_answers
from gapmeter.records.request import FINISHED, STAMPS, RequestRecord, columns, decode, on_clock, request_id_of
from gapmeter.records.stream import Answer, outcome_of

_WHOLE = (
    *STAMPS, "first_token_ns", "first_text_ns", "last_token_ns", "prompt_tokens", "output_tokens", "hidden_tokens",
    "cached_tokens",
)  # fmt: skip
ROW = (
    "request_id", "index", "turn", "worker", "attempt", "flags", *_WHOLE, "prompt_tokens_asked", "output_tokens_asked",
    "retry", "outcome", "status", "error", "finish_reason", "counted", "token_ns", "chunk_tokens", "censored_ns",
    "engine_metrics", "receive_wait_ns",
)  # fmt: skip
_AT_ONCE = 1024  # records that are parsed together
_WHY = {
    Outcome.WRONG_LENGTH: "the answer ended without a token",
    Outcome.LOST: "its generator process ended before it did",
}


def read_attempts(
    paths: Sequence[Path], timeout_ns: int, offsets_ns: Mapping[str, int]
) -> tuple[pd.DataFrame, list[RecordFile]]:
    """A row each, with the columns of ``ROW``, and what else is in the files.

    An attempt whose end is not on record is there as it was when it was issued, behind the others. ``offsets_ns``: of
    workers on other machines, how far their clocks are ahead of ours. Raises OSError, NotRecords, ValueError.
    """
    columns: dict[str, list[Any]] = {name: [] for name in ROW}
    issued: dict[str, bytes] = {}
    ended = list[RequestRecord]()

    def end(payload: bytes) -> None:
        record = decode(payload)
        ended.append(on_clock(record, offsets_ns.get(str(record.worker), 0)))
        if len(ended) >= _AT_ONCE:
            settle()

    def settle() -> None:
        rows = request_rows(ended, timeout_ns)
        for name, values in columns.items():
            values.extend([row[name] for row in rows])
        ended.clear()

    def take(code: int, payload: bytes) -> None:
        if code == FINISHED:
            end(payload)
        else:
            issued[request_id_of(payload)] = payload

    files = [read_records(path, take) for path in paths]
    settle()
    known = set(columns["request_id"])
    for payload in [payload for request_id, payload in issued.items() if request_id not in known]:
        end(payload)
    settle()
    last = {request_id: at for at, request_id in enumerate(columns["request_id"])}
    if len(last) < len(columns["request_id"]):  # a record is there twice: the later one counts
        columns = {name: [values[at] for at in last.values()] for name, values in columns.items()}
    return pd.DataFrame(columns | {name: pd.array(columns[name], "Int64") for name in _WHOLE}), files


def request_rows(records: Sequence[RequestRecord], timeout_ns: int) -> list[dict[str, Any]]:
    """What each record says of an attempt, by the names of the table's columns."""
    return [_row(record, answer, timeout_ns) for record, answer in zip(records, parse_answers(records), strict=True)]


def _row(record: RequestRecord, answer: Answer, timeout_ns: int) -> dict[str, Any]:
    outcome = outcome_of(record, answer)
    arrived = answer.token_ns if len(answer.token_ns) else None
    return {
        **columns(record),
        "first_token_ns": None if arrived is None else int(arrived[0]),
        "first_text_ns": answer.first_text_ns or None,
        "last_token_ns": None if arrived is None else int(arrived[-1]),
        "prompt_tokens": answer.prompt_tokens,
        "output_tokens": answer.output_tokens,
        "hidden_tokens": answer.hidden_tokens,
        "cached_tokens": answer.cached_tokens,
        "outcome": outcome.name.lower(),
        "error": record.error or _WHY.get(outcome, answer.error),
        "finish_reason": answer.finish_reason,
        "counted": answer.counted,
        "token_ns": arrived,
        "chunk_tokens": answer.chunk_tokens,
        "censored_ns": None if outcome is Outcome.OK else max((record.end_ns or 0) - record.due_ns, timeout_ns),
        "engine_metrics": answer.request_metrics,
        "receive_wait_ns": record.chunk_wait_ns.copy() if len(record.chunk_wait_ns) else None,  # not all of the record
    }
