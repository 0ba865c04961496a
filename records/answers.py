"""Many answers at once: the same as ``parse_answer`` of each, in a fraction of the time.

What most servers send, a small C module (``_events.c``) reads into a row an event, and what the rows say of tokens is
then worked out for all answers together. Other answers, and all of them where it was not built, are left to
``parse_answer``.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gapmeter.records.request import RequestRecord
from gapmeter.records.stream import MOST_TOKENS, Answer, Ints, engine_metrics, parse_answer, storable

Bools = NDArray[np.bool_]
_Read = tuple[bytes, bytes | None, bytes | None, int, int, int, int]
_events: Callable[[bytes], _Read | None] | None = None
with contextlib.suppress(ImportError):  # it was built where a compiler was
    from gapmeter.records._events import events as _events

_EVENT = np.dtype([("blank", "<i4"), ("characters", "<i4"), ("total", "<i4"), ("said", "<i4")])
_FEW = 256  # whose bodies are joined to be worked on


def parse_answers(records: Sequence[RequestRecord]) -> list[Answer]:
    """What ``parse_answer`` says of each, in their order."""
    answers = list[Answer]()
    for at in range(0, len(records), _FEW):
        some = records[at : at + _FEW]
        read = [_read(record) for record in some]
        known = iter(_answers([(record, one) for record, one in zip(some, read, strict=True) if one]))
        answers += [next(known) if one else parse_answer(record) for record, one in zip(some, read, strict=True)]
    return answers


def _read(record: RequestRecord) -> _Read | None:
    """The events; None where their shape is unknown, a piece has no arrival on record, or the last one never ended."""
    found = _events(record.body) if _events else None
    if found is None or not (found[-1] or found[1]):
        return None
    return found if int(record.chunk_bytes.sum()) == len(record.body) else None


def _answers(found: Sequence[tuple[RequestRecord, _Read]]) -> list[Answer]:
    if not found:
        return []
    pieces = _pieces(found)
    by_usage, new = pieces.new_tokens()
    brought = new > 0
    chunk_ns, chunk_tokens = pieces.arrival_ns[brought], new[brought]
    token_ns = np.repeat(chunk_ns, chunk_tokens)
    texts, first_text, _ = _marked(pieces.characters > 0, pieces.begins)
    columns = (
        np.cumsum(np.add.reduceat(brought, pieces.begins, dtype=np.int64)),
        np.cumsum(np.add.reduceat(new, pieces.begins)),
        np.add.reduceat(pieces.characters, pieces.begins),
        np.where(texts > 0, pieces.arrival_ns[first_text], 0),
        by_usage,
    )
    answers, chunk, token = list[Answer](), 0, 0
    for (_, read), *row in zip(found, *(column.tolist() for column in columns), strict=True):
        chunk_end, token_end, characters, first_text_ns, counted = row
        _, finish_reason, metrics, prompt, output, cached, done = read
        answers.append(
            Answer(
                token_ns=token_ns[token:token_end],
                chunk_tokens=chunk_tokens[chunk:chunk_end],
                chunk_ns=chunk_ns[chunk:chunk_end],
                first_text_ns=first_text_ns,
                text_chars=characters,
                prompt_tokens=prompt if prompt > 0 else None,
                output_tokens=output if output > 0 else token_end - token if counted else None,
                cached_tokens=cached if cached >= 0 else None,
                finish_reason=storable((finish_reason or b"").decode()),
                counted="usage" if counted else "unmeasured",
                request_metrics=engine_metrics(json.loads(metrics)) if metrics else None,
                done=bool(done),
            )
        )
        chunk, token = chunk_end, token_end
    return answers


def _marked(flags: Bools, begins: Ints) -> tuple[Ints, Ints, Ints]:
    """How many pieces of each answer are marked, and the first and the last of these (any piece, if none is)."""
    counts = np.add.reduceat(flags, begins, dtype=np.int64)
    marked, behind = np.append(np.flatnonzero(flags), 0), np.cumsum(counts)
    return counts, marked[behind - counts], marked[behind - 1]


@dataclass(frozen=True, slots=True)
class _Pieces:
    """The events with a choice, a column each: ``totals`` of tokens so far, -1 where it is not said.

    ``begins``: where each answer's begin.
    """

    arrival_ns: Ints
    characters: Ints
    content: Bools
    totals: Ints
    begins: Ints

    def new_tokens(self) -> tuple[Bools, Ints]:
        """Whether usage counts the tokens of each answer, and how many each piece brought (as ``stream.py`` has it)."""
        sizes = np.diff(self.begins, append=len(self.totals))
        answer = np.repeat(np.arange(len(sizes)), sizes)
        apart = answer * (MOST_TOKENS + 1)  # so that no total of an answer exceeds those of the next
        most = np.maximum.accumulate(np.maximum(self.totals, 0) + apart) - apart
        new = np.diff(most, prepend=0)
        new[self.begins] = most[self.begins]
        speaking, first, last = _marked(self.content, self.begins)
        grew = np.add.reduceat(self.content & (new > 0), self.begins, dtype=np.int64)
        running = (self.totals[first] > 0) & (new[last] > 0) & (2 * grew >= speaking)
        by_usage = (np.maximum.reduceat(new, self.begins) > 0) & (running | (speaking == 0))
        return by_usage, np.where(by_usage[answer], new, self.content)


def _pieces(found: Sequence[tuple[RequestRecord, _Read]]) -> _Pieces:
    events = np.frombuffer(b"".join(read[0] for _, read in found), _EVENT)
    sizes = np.array([len(read[0]) // _EVENT.itemsize for _, read in found], np.int64)
    bodies = np.array([len(record.body) for record, _ in found], np.int64)
    ends = np.cumsum(np.concatenate([record.chunk_bytes for record, _ in found]), dtype=np.int64)
    blank = events["blank"] + np.repeat(np.cumsum(bodies) - bodies, sizes)
    arrival_ns = np.concatenate([record.arrival_ns for record, _ in found])[np.searchsorted(ends, blank, side="right")]
    choice = events["said"] > 0
    counts = np.add.reduceat(choice, np.cumsum(sizes) - sizes, dtype=np.int64)
    pieces = events[choice]
    return _Pieces(
        arrival_ns[choice], pieces["characters"].astype(np.int64), pieces["said"] > 1, pieces["total"].astype(np.int64),
        np.cumsum(counts) - counts,
    )  # fmt: skip
