"""Generator processes that somebody has stopped and does not let go on."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

_LONGEST_NS = 5_000_000_000


class Held:
    """Looks at processes again and again. One that was stopped (SIGSTOP) for five seconds is made to go on."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        self._processes = processes
        self._since: dict[int, int] = {}

    def look(self) -> str:
        """A sentence on those that are held for too long by now; "" for none."""
        now, found = time.monotonic_ns(), []
        for number, process in enumerate(self._processes):
            if process.poll() is not None or not _is_stopped(process.pid):
                self._since.pop(number, None)
            elif now - self._since.setdefault(number, now) > _LONGEST_NS:
                process.send_signal(signal.SIGCONT)  # else it could not be told to leave
                found.append(f"generator process {number} was held (SIGSTOP) for {_LONGEST_NS // 10**9} s")
        return "; ".join(found)


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False
