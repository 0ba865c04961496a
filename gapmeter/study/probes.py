"""The probe files of a server that serves several loads: what was recorded since one of them began."""

from __future__ import annotations

import time
from pathlib import Path

from gapmeter.records import RunFolder
from gapmeter.records.excerpt import Growing

_SETTLE_S = 0.3  # the server's last stamps of a request come after the client has its last byte
_LOOK_S = 0.05
_PATIENCE_S = 10.0


class ProbeFolder:
    """Where a server's processes record. ``begin`` marks a load's start, ``take`` copies what came since."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[str, Growing] = {}

    def begin(self) -> None:
        """A load begins."""
        for file in self._all():
            file.begin()

    def settle(self, patience_s: float = _PATIENCE_S) -> bool:
        """Wait until no step has been recorded for a moment; False when there still are some at the end."""
        end = time.monotonic() + patience_s
        since, steps = time.monotonic(), self._steps()
        while (now := time.monotonic()) < end:
            if now - since >= _SETTLE_S:
                return True
            time.sleep(_LOOK_S)
            if (count := self._steps()) != steps:
                since, steps = time.monotonic(), count
        return False

    def take(self, folder: RunFolder, *, complete: bool, all_files: bool) -> int:
        """Copy what came since ``begin`` into a run's folder; how many files that was.

        ``complete``: their processes live and have nothing of this load left to write. ``all_files``: also of a process
        that recorded nothing meanwhile, for what it said of itself. Raises OSError.
        """
        taken = 0
        for file in self._all():
            file.advance()
            if file.is_record and (all_files or file.grew()):
                file.cut(folder.probe / file.path.name, complete=complete)
                taken += 1
        return taken

    def _all(self) -> list[Growing]:
        for path in sorted(self.path.glob("*.gap")):
            if path.name not in self._files:
                self._files[path.name] = Growing(path)
        return list(self._files.values())

    def _steps(self) -> int:
        for file in self._all():
            file.advance()
        return sum(file.steps for file in self._files.values())
