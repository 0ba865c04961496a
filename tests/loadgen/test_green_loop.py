"""gevent's loop as issuing uses it, in a process of its own: this one runs asyncio."""

from __future__ import annotations

import subprocess
import sys

import pytest

ORDER = """
import socket, sys, time
import gevent
from gapmeter.loadgen.locust.transport import READ, GreenLoop
from gapmeter.records.timer import Timer

seen, loop, pairs = [], GreenLoop(), [socket.socketpair() for _ in range(20)]
watchers = [loop.native.io(there.fileno(), READ) for _, there in pairs]
for watcher, (_, there) in zip(watchers, pairs):
    watcher.start(lambda there=there: seen.append("socket") if there.recv(9) else None)
timer = Timer(loop, lambda: seen.append("timer"))
gevent.sleep(0.01)  # the kernel knows them all
loop.call_soon(lambda: seen.append("record"))
acts = [lambda: timer.arm(time.monotonic_ns()), lambda: [here.send(b"x") for here, _ in pairs]]
first, then = acts[:: int(sys.argv[1])]
first()
time.sleep(0.02)  # the kernel lists what is ready in the order in which it became so
then()
time.sleep(0.02)
gevent.sleep(0.05)
print(*seen)
"""


@pytest.mark.parametrize("direction", ["1", "-1"], ids=["timer first", "sockets first"])
def test_what_is_due_comes_before_what_has_arrived_and_that_before_what_is_to_be_written(direction: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ORDER, direction], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["timer", *["socket"] * 20, "record"]


GIVEN_UP = """
import socket, time
import gevent
from gapmeter.loadgen.exchange import Address, Exchange
from gapmeter.loadgen.locust.transport import GreenPool

server = socket.create_server(("127.0.0.1", 0))
ended, address = [], Address.of(f"http://127.0.0.1:{server.getsockname()[1]}")
pool = GreenPool(address, ended.append)
exchange = Exchange(0, "x", address.request("/v1/completions", b"{}", "x"))
pool.issue(exchange)
gevent.sleep(0)  # its connection is being opened
early = pool._loop.native.timer(0.0, priority=2)  # as the heart beats: before the greenlet hears that it is open
early.start(lambda: pool.expire(time.monotonic_ns() + 1, "too late"))
gevent.sleep(0.3)
accepted, _ = server.accept()
accepted.settimeout(0.5)
print([each.outcome.name for each in ended], pool.in_flight, accepted.recv(9))
"""


def test_what_is_given_up_while_its_connection_opens_is_never_sent() -> None:
    done = subprocess.run([sys.executable, "-c", GIVEN_UP], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.split() == ["['TIMEOUT']", "0", "b''"]
