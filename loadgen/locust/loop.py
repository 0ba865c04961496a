"""gevent's event loop, as much of it as issuing needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gevent

READ, WRITE = 1, 2
_BEFORE_READING = 2  # libev's highest: within one priority it takes what became ready last first, and a timer waits
_AFTER_READING = -2  # libev's lowest priority: within a round of the loop it comes after what has arrived


class GreenLoop:
    """Callbacks run in gevent's hub: they must not wait. What they raise goes to the hub's ``handle_error``."""

    def __init__(self) -> None:
        self.native = gevent.get_hub().loop
        self._readers: dict[int, Any] = {}

    def add_reader(self, fd: int, callback: Callable[[], Any]) -> None:
        watcher = self.native.io(fd, READ)
        watcher.priority = _BEFORE_READING
        watcher.start(callback)
        self._readers[fd] = watcher

    def remove_reader(self, fd: int) -> None:
        watcher = self._readers.pop(fd)
        watcher.stop()
        watcher.close()

    def call_soon(self, callback: Callable[[], Any]) -> None:
        """In the loop's next round, after the sockets: gevent's own callbacks would all run before they are read."""
        self.native.timer(0.0, 0.0, True, _AFTER_READING).start(callback)
