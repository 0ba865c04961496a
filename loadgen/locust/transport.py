"""What a generator needs of gevent: its event loop, and a pool of connections."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

import gevent
from gevent.socket import wait_read, wait_write

from gapmeter.loadgen.client import AHEAD_S, FIRST_S, Pool
from gapmeter.loadgen.connection import Connection
from gapmeter.loadgen.exchange import Address, Exchange

T = TypeVar("T")
READ, WRITE = 1, 2
_BEFORE_READING = 2  # libev's highest: within one priority it takes what became ready last first, and a timer waits
_AFTER_READING = -2  # libev's lowest priority: within a round of the loop it comes after what has arrived


class GreenLoop:
    """Callbacks run in gevent's hub: they must not wait. What they raise goes to the hub's ``handle_error``.

    Those of timers come before those of sockets, which have ``priority`` 0.
    """

    def __init__(self, priority: int = _BEFORE_READING) -> None:
        self.native = gevent.get_hub().loop
        self._priority = priority
        self._watchers: dict[tuple[int, int], Any] = {}

    def add_reader(self, fd: int, callback: Callable[[], Any]) -> None:
        self._watch(fd, READ, callback)

    def remove_reader(self, fd: int) -> None:
        self._leave(fd, READ)

    def add_writer(self, fd: int, callback: Callable[[], Any]) -> None:
        self._watch(fd, WRITE, callback)

    def remove_writer(self, fd: int) -> None:
        self._leave(fd, WRITE)

    def call_soon(self, callback: Callable[..., Any], *arguments: Any) -> None:
        """Call it in the loop's next round, after the sockets; gevent itself would call it before they are read."""
        self.native.timer(0.0, 0.0, True, _AFTER_READING).start(callback, *arguments)

    def _watch(self, fd: int, what: int, callback: Callable[[], Any]) -> None:
        watcher = self.native.io(fd, what)
        watcher.priority = self._priority
        watcher.start(callback)
        self._watchers[fd, what] = watcher

    def _leave(self, fd: int, what: int) -> None:
        watcher = self._watchers.pop((fd, what))
        watcher.stop()
        watcher.close()


class GreenPool(Pool):
    """A pool whose connections are opened by greenlets; what happens on them is the same as with asyncio."""

    def __init__(self, address: Address, on_finished: Callable[[Exchange], None]) -> None:
        super().__init__(address, on_finished)
        self._loop = GreenLoop(priority=0)

    def warm(self, connections: int) -> None:
        first = _finished(self._reach())
        others = [gevent.spawn(lambda: _finished(self._try_open())) for _ in range(connections - 1)]
        gevent.joinall(others, timeout=AHEAD_S, raise_error=True)
        self._add_idle([first, *(other.value for other in others if other.ready())])
        gevent.killall(others)

    def _begin(self, exchange: Exchange) -> Callable[[], object]:
        return partial(gevent.spawn(lambda: _finished(self._open_and_send(exchange))).kill, block=False)

    async def _look_up(self) -> Sequence[Any]:
        return socket.getaddrinfo(self._address.host, self._address.port, type=socket.SOCK_STREAM)

    async def _in_time(self, opening: Coroutine[Any, Any, Connection]) -> Connection:
        with gevent.Timeout(FIRST_S, OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))):
            return await opening

    async def _until(self, fd: int, what: Literal["readable", "writable"]) -> None:
        (wait_read if what == "readable" else wait_write)(fd)


def _finished(work: Coroutine[Any, Any, T]) -> T:
    """What a pool's coroutine returns: here it never suspends, since what it awaits blocks the greenlet instead."""
    try:
        work.send(None)
    except StopIteration as over:
        result: T = over.value
        return result
    raise AssertionError("a coroutine has awaited what gevent does not know")
