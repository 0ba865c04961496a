"""What generators recorded of each attempt of a request, as a table."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from gapmeter.analysis.arrays import Ints, folded
from gapmeter.records import Outcome, RecordFile, read_records
from gapmeter.records.answers import UNKNOWN, read_answers
from gapmeter.records.request import (
    FIELDS,
    FINISHED,
    STAMPS,
    Block,
    RequestRecord,
    columns,
    encode,
    on_clock,
    request_id_of,
    split,
)
from gapmeter.records.stream import Answer, outcome_of, parse_answer

_WHOLE = (
    *STAMPS, "first_token_ns", "first_text_ns", "last_token_ns", "prompt_tokens", "output_tokens", "hidden_tokens",
    "cached_tokens",
)  # fmt: skip
ROW = (
    "request_id", "index", "turn", "worker", "attempt", "flags", *_WHOLE, "prompt_tokens_asked", "output_tokens_asked",
    "retry", "outcome", "status", "error", "finish_reason", "counted", "token_ns", "chunk_tokens", "censored_ns",
    "engine_metrics", "receive_wait_ns",
)  # fmt: skip
_Column = list[Any] | Ints
_AT_ONCE = 2  # blocks of a file that are parsed while the next one is read
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
    issued: dict[str, bytes] = {}
    parts = list[dict[str, _Column]]()
    reading = deque[Future[dict[str, _Column]]]()

    def take(data: bytes, codes: Ints, begins: Ints, ends: Ints) -> None:
        ended = codes == FINISHED
        for begin, end in zip(begins[~ended].tolist(), ends[~ended].tolist(), strict=True):
            payload = data[begin:end]
            issued[request_id_of(payload)] = payload
        block = Block.of(data, begins[ended], ends[ended])
        reading.append(beside.submit(_columns, block, timeout_ns, offsets_ns))
        if len(reading) > _AT_ONCE:
            parts.append(reading.popleft().result())

    with ThreadPoolExecutor(_AT_ONCE) as beside:  # which is mostly done without Python's lock
        files = [read_records(path, take) for path in paths]
        parts += [each.result() for each in reading]
    known = {request_id for part in parts for request_id in part["request_id"]}
    lost = [payload for request_id, payload in issued.items() if request_id not in known]
    parts.append(_columns(Block.joined(lost), timeout_ns, offsets_ns))
    columns = {name: _joined([part.pop(name) for part in parts]) for name in ROW}
    last = {request_id: at for at, request_id in enumerate(columns["request_id"])}
    if len(last) < len(columns["request_id"]):  # a record is there twice: the later one counts
        columns = {name: _joined([values[at : at + 1] for at in last.values()]) for name, values in columns.items()}
    return pd.DataFrame(columns | {name: _whole(columns[name]) for name in _WHOLE}), files


def _joined(parts: Sequence[_Column]) -> _Column:
    return np.concatenate(parts) if isinstance(parts[0], np.ndarray) else list(chain.from_iterable(parts))


def _whole(values: _Column) -> pd.arrays.IntegerArray:
    unknown = np.asarray(values) == UNKNOWN
    return pd.arrays.IntegerArray(np.where(unknown, 1, values), unknown)


def _columns(block: Block, timeout_ns: int, offsets_ns: Mapping[str, int]) -> dict[str, _Column]:
    """What the records of a block say of an attempt each, by the names of the table's columns; ``UNKNOWN`` for None."""
    heads, answers = block.heads, read_answers(block)
    said, count = answers.said, len(heads)
    ahead_ns = np.array([offsets_ns.get(str(worker), 0) for worker in heads["worker"].tolist()], np.int64)
    token_ns = answers.token_ns - np.repeat(ahead_ns, said["tokens"])
    stamped, ends = np.append(token_ns, 0), np.cumsum(said["tokens"])
    columns: dict[str, _Column] = {
        **{stored.column: heads[name].astype(np.int64) for name, stored in FIELDS.items() if stored.column},
        **{name: _if_stamped(heads[name], ahead_ns) for name in STAMPS},
        "request_id": block.request_ids,
        "error": block.errors(),
        "first_token_ns": stamped[ends - said["tokens"]],
        "first_text_ns": _if_stamped(np.where(said["characters"] > 0, said["first_text_ns"], 0), ahead_ns),
        "last_token_ns": stamped[ends - 1],
        "prompt_tokens": answers.prompt_tokens(),
        "output_tokens": answers.output_tokens(),
        "hidden_tokens": np.zeros(count, np.int64),
        "cached_tokens": answers.cached_tokens(),
        "outcome": ["ok"] * count,
        "finish_reason": answers.finish_reasons(),
        "counted": answers.counted(),
        "token_ns": split(token_ns, said["tokens"]),
        "chunk_tokens": split(folded(answers.chunk_tokens), said["chunks"]),
        "censored_ns": [None] * count,
        "engine_metrics": answers.request_metrics(),
        "receive_wait_ns": [waits if len(waits) else None for waits in block.waits_ns()],
    }
    good = answers.usual & (heads["outcome"] == Outcome.OK) & (said["tokens"] > 0)
    for number in np.flatnonzero(~good).tolist():
        record = on_clock(block.record(number), int(ahead_ns[number]))
        for name, value in _row(record, parse_answer(record), timeout_ns).items():
            columns[name][number] = UNKNOWN if value is None and name in _WHOLE else value
    return columns


def _if_stamped(stamps_ns: Ints, ahead_ns: Ints) -> Ints:
    """On our clock, ``UNKNOWN`` where it is 0."""
    on_clock_ns = np.where(stamps_ns != 0, stamps_ns - ahead_ns, 0)
    return np.where(on_clock_ns != 0, on_clock_ns, UNKNOWN)


def request_rows(records: Sequence[RequestRecord], timeout_ns: int) -> list[dict[str, Any]]:
    """What each record says of an attempt, by the names of the table's columns."""
    columns = _columns(Block.joined([b"".join(encode(record)) for record in records]), timeout_ns, {})
    for name in _WHOLE:
        columns[name] = [None if value == UNKNOWN else value for value in np.asarray(columns[name]).tolist()]
    return [dict(zip(ROW, row, strict=True)) for row in zip(*(columns[name] for name in ROW), strict=True)]


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
