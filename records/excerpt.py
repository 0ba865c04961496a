"""The part of a record file that belongs to one load of several: a server that is kept up records on, into one file."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
from gapmeter_probe.records import FILE_HEADER, HEAD, MAGIC, REQUEST, SCHEMA_VERSION, Kind

from gapmeter.records.reader import Table, dropped_records, frames, read_records

_FIRST_STEP_CODE = 100
_BLOCK = 1 << 26  # bytes that are read at once
_GAP_BYTES = 1 << 16
_GAP_S = 0.01
_GAP_TRIES = 100


class Growing:
    """One process's record file, followed as it grows; ``begin`` marks a load's start, ``cut`` copies what came since.

    A file that is none has no frames (``is_record``). Reads by system call, since a writer that closes cuts its file
    to length, which would end a process that has it mapped.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.steps = 0  # frames of kind STEP read so far
        self.closed = False  # its process has closed it, or it is no record file
        with path.open("rb", buffering=0) as file:
            self.is_record = file.read(len(MAGIC)) == MAGIC
        self._at = self._since = FILE_HEADER.size
        self._dropped_before = self._notes_before = 0
        self._notes: list[bytes] = []
        self._requests: dict[int, bytes] = {}

    def advance(self) -> None:
        """Read the whole frames that have come since the last call."""
        if self.closed or not self.is_record:
            return
        with self.path.open("rb", buffering=0) as file:
            more = True
            while more and not self.closed:
                data, more = _read_on(file.fileno(), self._at)
                others, _, used, self.closed = frames(data)
                for at, kind in others.tolist():
                    frame = data[at : at + HEAD.unpack_from(data, at)[0]]
                    if kind == Kind.JSON:
                        self._notes.append(frame)
                    elif kind == Kind.REQUEST:
                        self._requests[REQUEST.unpack_from(frame)[3]] = frame
                    self.steps += kind == Kind.STEP
                self._at += used
                more &= used > 0

    def begin(self) -> None:
        """Mark the start of a load: what is there already belongs to an earlier one."""
        self.advance()
        self._since, self._notes_before = self._at, len(self._notes)
        self._dropped_before = dropped_records(self.path)

    def grew(self) -> bool:
        """Whether anything has been read since ``begin``."""
        return self._at > self._since

    def cut(self, target: Path, *, complete: bool) -> None:
        """Copy the file's head, its notes from before, and every frame since ``begin``; ``complete``: with an END.

        Requests keep their numbers. One that was named before and is still at work since is named again, ahead of what
        refers to it. Raises OSError.
        """
        self.advance()
        head = FILE_HEADER.pack(MAGIC, SCHEMA_VERSION, dropped_records(self.path) - self._dropped_before)
        head += b"".join(self._notes[: self._notes_before])
        end = HEAD.pack(HEAD.size, Kind.END, 0) if complete or self.closed else b""
        self._copy(target, head, end)
        again = b"".join(self._requests[ref] for ref in sorted(_unnamed(target)) if ref in self._requests)
        if again:  # behind it, a large file would have to be read without a sieve
            self._copy(target, head + again, end)

    def _copy(self, target: Path, head: bytes, end: bytes) -> None:
        """What has come since ``begin``, between these."""
        with self.path.open("rb", buffering=0) as source, target.open("wb", buffering=0) as copy:
            copy.write(head)
            at = self._since
            while moved := os.sendfile(copy.fileno(), source.fileno(), at, self._at - at):  # 2 GiB at most
                at += moved
            copy.write(end)


def _read_on(fd: int, at: int) -> tuple[bytes, bool]:
    """What is written from ``at`` on, once no frame is half there, and whether there is more behind it.

    Threads of one process reserve room and then fill it: a frame may lie behind one that is not there yet.
    """
    for _ in range(_GAP_TRIES):
        left = max(os.fstat(fd).st_size - at, 0)
        data = os.pread(fd, min(left, _BLOCK), at)
        *_, used, closed = frames(data)
        if closed or len(data) < left or not data[used : used + _GAP_BYTES].strip(b"\0"):
            break
        time.sleep(_GAP_S)
    return data, len(data) < left


def _unnamed(path: Path) -> set[int]:
    """Requests that a file refers to without naming them. It may do so tens of millions of times."""
    used = set[int]()

    def note(spans: Table, _: dict[int, str]) -> None:
        used.update(np.unique(spans["ref"][spans["code"] < _FIRST_STEP_CODE]).tolist())

    file = read_records(path, take_spans=note)
    for rows in (file.counts, file.entries, file.emissions):
        used.update(np.unique(rows["ref"]).tolist())
    return used - set(file.engine_ids)
