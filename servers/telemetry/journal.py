"""What the sampler writes: a file of JSON lines a source, each line whole, in the kernel as soon as it is made."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


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

    def write(self, source: str, rows: Iterable[Mapping[str, Any]], at_ns: int | None = None) -> None:
        """Append ``rows``, all stamped ``at_ns`` (now, when left out)."""
        stamp = time.monotonic_ns() if at_ns is None else at_ns
        with self._lock:
            for row in rows:
                line = json.dumps({"at_ns": stamp, **row}, separators=(",", ":"), allow_nan=False) + "\n"
                try:
                    os.write(self._file(source), line.encode())
                    self.lines += 1
                except OSError:
                    self.dropped += 1

    def note(self, kind: str, **told: Any) -> None:
        """A line about the sampling itself, in ``sampler.jsonl``."""
        self.write("sampler", [{"type": kind, **told}])

    def _file(self, source: str) -> int:
        if source not in self._files:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._files[source] = os.open(self._folder / f"{source}.jsonl", flags, 0o644)
        return self._files[source]
