"""What generators recorded of each attempt of a request, as a table; of a large run by several processes."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from gapmeter.analysis.arrays import AnyArray, Ints
from gapmeter.records import Outcome, RecordFile, read_records
from gapmeter.records.answers import parse_answers
from gapmeter.records.compression import SUFFIX
from gapmeter.records.request import (
    FINISHED,
    STAMPS,
    RequestRecord,
    columns,
    decode,
    index_of,
    on_clock,
    request_id_of,
)
from gapmeter.records.stream import Answer, outcome_of

_WHOLE = (
    *STAMPS, "first_token_ns", "first_text_ns", "last_token_ns", "prompt_tokens", "output_tokens", "hidden_tokens",
    "cached_tokens",
)  # fmt: skip
ROW = (
    "request_id", "index", "turn", "worker", "attempt", *_WHOLE, "prompt_tokens_asked", "output_tokens_asked", "retry",
    "outcome", "status", "error", "finish_reason", "counted", "token_ns", "chunk_tokens", "censored_ns",
    "engine_metrics", "receive_wait_ns",
)  # fmt: skip
_ARRAYS = ("token_ns", "chunk_tokens", "receive_wait_ns")
_AT_ONCE = 1024  # records that are parsed together
_PART = 1 << 27  # bytes of records that are worth a process of their own
_PACKED = 10  # how many times smaller compressed ones are, about
_NO_TOKEN = "the answer ended without a token"
_COMMAND = (sys.executable, "-P", "-m", "gapmeter.analysis.requests.attempts")

RowColumns = dict[str, list[Any]]  # as ``ROW`` names them, a value each attempt


@dataclass(frozen=True, slots=True)
class Part:
    """One of ``parts`` shares of the requests in some record files, by their index.

    ``offsets_ns``: of workers on other machines, how far their clocks are ahead of ours.
    """

    paths: Sequence[Path]
    timeout_ns: int
    offsets_ns: dict[str, int]
    parts: int = 1
    number: int = 0

    def has(self, payload: bytes) -> bool:
        return self.parts == 1 or index_of(payload) % self.parts == self.number


def read_attempts(
    paths: Sequence[Path], timeout_ns: int, offsets_ns: dict[str, int]
) -> tuple[pd.DataFrame, list[RecordFile]]:
    """A row each, with the columns of ``ROW``, and what else is in the files.

    Raises OSError, NotRecords, ValueError.
    """
    size = sum(path.stat().st_size * (_PACKED if path.suffix == SUFFIX else 1) for path in paths)
    parts = min(len(os.sched_getaffinity(0)), 1 + size // _PART)
    every = [Part(paths, timeout_ns, offsets_ns, parts, number) for number in range(parts)]
    with contextlib.ExitStack() as stack:
        others = [stack.enter_context(_elsewhere(part)) for part in every[1:]]
        found, files = _read(every[0])
        for part, process in zip(every[1:], others, strict=True):
            more = _received(process) or _read(part)[0]  # which raises what the process could not say
            for name, values in found.items():
                values += more[name]
    return pd.DataFrame(found | {name: pd.array(found[name], "Int64") for name in _WHOLE}), files


def _read(part: Part) -> tuple[RowColumns, list[RecordFile]]:
    """An attempt whose end is not on record is there as it was when it was issued, behind the others."""
    columns: RowColumns = {name: [] for name in ROW}
    issued: dict[str, bytes] = {}
    ended = list[RequestRecord]()

    def end(payload: bytes) -> None:
        record = decode(payload)
        ended.append(on_clock(record, part.offsets_ns.get(str(record.worker), 0)))
        if len(ended) >= _AT_ONCE:
            settle()

    def settle() -> None:
        rows = request_rows(ended, part.timeout_ns)
        for name, values in columns.items():
            values.extend([row[name] for row in rows])
        ended.clear()

    def take(code: int, payload: bytes) -> None:
        if not part.has(payload):
            return
        if code == FINISHED:
            end(payload)
        else:
            issued[request_id_of(payload)] = payload

    files = [read_records(path, take) for path in part.paths]
    settle()
    known = set(columns["request_id"])
    for payload in [payload for request_id, payload in issued.items() if request_id not in known]:
        end(payload)
    settle()
    last = {request_id: at for at, request_id in enumerate(columns["request_id"])}
    if len(last) < len(columns["request_id"]):  # a record is there twice: the later one counts
        columns = {name: [values[at] for at in last.values()] for name, values in columns.items()}
    return columns, files


@contextlib.contextmanager
def _elsewhere(part: Part) -> Iterator[subprocess.Popen[bytes]]:
    """A process that reads a part."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(_COMMAND, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
    with process:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended at once, and will send nothing
            process.stdin.write(pickle.dumps(part))
            process.stdin.close()
        try:
            yield process
        finally:
            process.kill()


def _received(process: subprocess.Popen[bytes]) -> RowColumns | None:
    """None where the process could not read its part."""
    assert process.stdout is not None
    try:
        found: RowColumns = pickle.load(process.stdout)
    except (EOFError, pickle.UnpicklingError):
        return None
    return found | {name: _apart(*found[name]) for name in _ARRAYS}


def main() -> None:
    """Read the part that stands on standard input."""
    gc.disable()  # every row is kept
    found, _ = _read(pickle.load(sys.stdin.buffer))
    packed = {name: _together(values) if name in _ARRAYS else values for name, values in found.items()}
    pickle.dump(packed, sys.stdout.buffer, pickle.HIGHEST_PROTOCOL)


def _together(arrays: list[AnyArray | None]) -> tuple[AnyArray, Ints]:
    """As one, with the length of each, -1 for None: a hundred thousand arrays take a second to send."""
    there = [array for array in arrays if array is not None]
    sizes = np.array([-1 if array is None else len(array) for array in arrays], np.int64)
    return np.concatenate(there) if there else np.zeros(0), sizes


def _apart(together: AnyArray, sizes: Ints) -> list[AnyArray | None]:
    ends = np.cumsum(np.maximum(sizes, 0)).tolist()
    return [None if size < 0 else together[end - size : end] for size, end in zip(sizes.tolist(), ends, strict=True)]


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
        "error": record.error or answer.error or (_NO_TOKEN if outcome is Outcome.WRONG_LENGTH else ""),
        "finish_reason": answer.finish_reason,
        "counted": answer.counted,
        "token_ns": arrived,
        "chunk_tokens": answer.chunk_tokens,
        "censored_ns": None if outcome is Outcome.OK else max((record.end_ns or 0) - record.due_ns, timeout_ns),
        "engine_metrics": answer.request_metrics,
        "receive_wait_ns": record.chunk_wait_ns.copy() if len(record.chunk_wait_ns) else None,  # not all of the record
    }


if __name__ == "__main__":
    from gapmeter.analysis.requests import attempts  # the module whose types are sent, not a second copy of it

    attempts.main()
