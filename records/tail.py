"""Follows a record file that a running process is writing."""

from __future__ import annotations

import os
from pathlib import Path

from gapmeter_probe.records import BLOB, FILE_HEADER, HEAD, Kind

from gapmeter.records.request import RequestRecord, decode

_BLOCK = 1 << 18


class RecordTail:
    """The request records of one generator process, as they appear.

    Reads by system call: a mapping of a file that its writer cuts to length could end this process.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = FILE_HEADER.size

    def poll(self) -> list[tuple[int, RequestRecord]]:
        """(code, record) of what has been written since the last call; nothing while the file is not there yet."""
        try:
            file = self._path.open("rb", buffering=0)
        except FileNotFoundError:
            return []
        found: list[tuple[int, RequestRecord]] = []
        with file:
            want = _BLOCK
            while want:
                block = os.pread(file.fileno(), want, self._at)
                used, want = _take(block, want, found)
                self._at += used
        return found


def _take(block: bytes, want: int, found: list[tuple[int, RequestRecord]]) -> tuple[int, int]:
    """Bytes of the whole frames at the start of ``block``, and how many to read next: 0 when that was all there is.

    A block shorter than what was wanted is the file's last.

    Another core may see a frame's size before the rest of it: one whose kind or record is not there yet ends the
    reading, and is read again later.
    """
    at, more = 0, len(block) == want
    while at + HEAD.size <= len(block):
        size, kind, code = HEAD.unpack_from(block, at)
        if size < HEAD.size or not kind:
            return at, 0
        if at + size > len(block):
            return at, max(size, _BLOCK) if more else 0
        if kind == Kind.BLOB:
            length = BLOB.unpack_from(block, at)[3]
            try:
                found.append((code, decode(block[at + BLOB.size : at + BLOB.size + length])))
            except ValueError:
                return at, 0
        at += size
    return at, _BLOCK if more else 0


def dropped_records(path: Path) -> int:
    """How many records found no room on the disk, as the file's own head says; 0 when there is no file."""
    try:
        with path.open("rb") as file:
            head = file.read(FILE_HEADER.size)
    except FileNotFoundError:
        return 0
    return int(FILE_HEADER.unpack(head)[2]) if len(head) == FILE_HEADER.size else 0
