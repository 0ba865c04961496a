"""What the machine and the server did while a run lasted: one process beside it that samples at fixed deadlines.

Everything it reads is somebody else's counter (NVML, RAPL, /proc, the engine's /metrics); it stamps each sample with
CLOCK_MONOTONIC and writes it as a line of JSON under the run's ``telemetry/``. What could not be read is a gap.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

Row = dict[str, int | float | str]
About = dict[str, object]
NO_PROCESSES = "the server's processes are not on this machine, or may not be seen by this user"


class Absent(Exception):
    """There is no such source here; the message says why, for the user."""


class ReadFailed(Exception):
    """This one sample could not be had; the message says why."""


class Source(Protocol):
    """Something that can be sampled. ``about`` is written once, at the start: names, limits, units that a row lacks."""

    name: str
    about: About

    def read(self) -> list[Row]:
        """The rows of one sample, without their stamp. Raises ReadFailed, or Absent when it will never be had."""


class Journal:
    """Appends rows to ``<source>.jsonl`` in a folder. Safe to call from several threads.

    A line is one write, so a killed process leaves at most one broken line. Lines that do not fit on the disk are
    counted, not raised: a full disk must not end the run that is being watched.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, int] = {}
        self._lock = threading.Lock()
        self.lines = 0
        self.dropped = 0

    def write(self, source: str, rows: Iterable[Mapping[str, object]], at_ns: int) -> None:
        """Append ``rows``, all stamped ``at_ns``."""
        with self._lock:
            for row in rows:
                text = json.dumps({"at_ns": at_ns, **row}, separators=(",", ":"), allow_nan=False)
                line = f"{text}\n".encode()
                try:
                    if source not in self._files:
                        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                        self._files[source] = os.open(self._folder / f"{source}.jsonl", flags, 0o644)
                    written = os.write(self._files[source], line)
                    if written == len(line):
                        self.lines += 1
                    else:  # the disk had room for a part: the next line must not follow that
                        os.ftruncate(self._files[source], os.fstat(self._files[source]).st_size - written)
                        self.dropped += 1
                except OSError:
                    self.dropped += 1

    def note(self, kind: str, **values: object) -> None:
        """A line about the sampling itself, in ``sampler.jsonl``."""
        self.write("sampler", [{"type": kind, **values}], time.monotonic_ns())
