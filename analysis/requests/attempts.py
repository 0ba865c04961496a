"""What generators recorded of each attempt of a request, as rows of a table; of a large run by several processes."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import subprocess
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gapmeter.records import Outcome, RecordFile, read_records
from gapmeter.records.request import FIELDS, FINISHED, RequestRecord, columns, decode, on_clock, request_id_of
from gapmeter.records.stream import outcome_of, parse_answer

ROW = (
    *(stored.column for stored in FIELDS.values() if stored.column), "first_token_ns", "first_text_ns", "last_token_ns",
    "prompt_tokens", "output_tokens", "cached_tokens", "outcome", "finish_reason", "counted", "token_ns",
    "chunk_tokens", "censored_ns", "engine_metrics", "receive_wait_ns",
)  # fmt: skip
_PART = 1 << 27  # bytes of records that are worth a process of their own
_NO_TOKEN = "the answer ended without a token"
_COMMAND = (sys.executable, "-P", "-m", "gapmeter.analysis.requests.attempts")


@dataclass(frozen=True, slots=True)
class Part:
    """One of ``parts`` shares of the attempts in some record files, by their ids.

    ``offsets_ns``: of workers on other machines, how far their clocks are ahead of ours.
    """

    paths: Sequence[Path]
    timeout_ns: int
    offsets_ns: dict[str, int]
    parts: int = 1
    number: int = 0


@dataclass(slots=True)
class Attempts:
    """By request id: rows as ``ROW`` names them, and records of attempts whose end is not on record."""

    rows: dict[str, list[Any]] = field(default_factory=dict)
    issued: dict[str, bytes] = field(default_factory=dict)

    def end(self, request_id: str, payload: bytes, part: Part) -> None:
        """Note how an attempt ended."""
        self.issued.pop(request_id, None)
        record = decode(payload)
        record = on_clock(record, part.offsets_ns.get(str(record.worker), 0))
        self.rows[request_id] = list(request_row(record, part.timeout_ns).values())


def read_attempts(
    paths: Sequence[Path], timeout_ns: int, offsets_ns: dict[str, int]
) -> tuple[list[list[Any]], list[RecordFile]]:
    """A row each, as ``ROW`` names them, and what else is in the files. Raises OSError, NotRecords, ValueError."""
    parts = min(len(os.sched_getaffinity(0)), 1 + sum(path.stat().st_size for path in paths) // _PART)
    every = [Part(paths, timeout_ns, offsets_ns, parts, number) for number in range(parts)]
    with contextlib.ExitStack() as stack:
        others = [stack.enter_context(_elsewhere(part)) for part in every[1:]]
        found, files = _read(every[0])
        for part, process in zip(every[1:], others, strict=True):
            more = _received(process) or _read(part)[0]  # which raises what the process could not say
            found.rows |= more.rows
            found.issued |= more.issued
    for request_id in [name for name in found.issued if name not in found.rows]:
        found.end(request_id, found.issued[request_id], every[0])
    return list(found.rows.values()), files


def _read(part: Part) -> tuple[Attempts, list[RecordFile]]:
    found = Attempts()

    def take(code: int, payload: bytes) -> None:
        request_id = request_id_of(payload)
        if part.parts > 1 and zlib.crc32(request_id.encode()) % part.parts != part.number:
            return
        if code == FINISHED:
            found.end(request_id, payload, part)
        elif request_id not in found.rows:
            found.issued[request_id] = payload

    return found, [read_records(path, take) for path in part.paths]


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


def _received(process: subprocess.Popen[bytes]) -> Attempts | None:
    """None where the process could not read its part."""
    assert process.stdout is not None
    try:
        found = pickle.load(process.stdout)
    except (EOFError, pickle.UnpicklingError):
        return None
    assert isinstance(found, Attempts)
    return found


def main() -> None:
    """Read the part that stands on standard input."""
    gc.disable()  # every row is kept
    found, _ = _read(pickle.load(sys.stdin.buffer))
    pickle.dump(found, sys.stdout.buffer, pickle.HIGHEST_PROTOCOL)


def request_row(record: RequestRecord, timeout_ns: int) -> dict[str, Any]:
    """What one record says of an attempt, by the names of the table's columns."""
    answer = parse_answer(record)
    outcome = outcome_of(record, answer)
    arrived = answer.token_ns if len(answer.token_ns) else None
    return {
        **columns(record),
        "first_token_ns": None if arrived is None else int(arrived[0]),
        "first_text_ns": answer.first_text_ns or None,
        "last_token_ns": None if arrived is None else int(arrived[-1]),
        "prompt_tokens": answer.prompt_tokens,
        "output_tokens": answer.output_tokens,
        "cached_tokens": answer.cached_tokens,
        "outcome": outcome.name.lower(),
        "error": record.error or answer.error or (_NO_TOKEN if outcome is Outcome.WRONG_LENGTH else ""),
        "finish_reason": answer.finish_reason,
        "counted": answer.counted,
        "token_ns": None if arrived is None else arrived,
        "chunk_tokens": answer.chunk_tokens,
        "censored_ns": None if outcome is Outcome.OK else max((record.end_ns or 0) - record.due_ns, timeout_ns),
        "engine_metrics": answer.request_metrics,
        "receive_wait_ns": record.chunk_wait_ns.copy() if len(record.chunk_wait_ns) else None,  # not all of the record
    }


if __name__ == "__main__":
    from gapmeter.analysis.requests import attempts  # the module whose types are sent, not a second copy of it

    attempts.main()
