"""What generator processes have in common, whatever issues their load: what they are told, and how they end.

Beside them ``Heartbeat``, which looks after the timed window.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from time import monotonic_ns
from typing import Any

from gapmeter.loadgen.client import lack_of, reason
from gapmeter.loadgen.sender import Sender
from gapmeter.records import Span
from gapmeter.records.timer import Readers, Timer

_BEAT_NS = 20_000_000
_BEATS_A_SECOND = 50
PARENT_GONE = "the process that started this one is gone"
NO_LOCUST = "Locust is not installed in this environment: make setup in a checkout, or pip install locust"


class Exit(IntEnum):
    """Exit codes. A traceback's is 1."""

    DONE = 0
    BAD_SPEC = 2
    UNREACHABLE = 3
    DISK_FULL = 4
    STOPPED = 5
    NO_CONNECTION = 6  # the machine lacks what it takes


@dataclass(frozen=True, slots=True)
class Locustfile:
    """A user's own locustfile, and what the bodies of its requests need."""

    path: str
    model: str
    dialect: str


@dataclass(frozen=True, slots=True)
class Spec:
    """What a generator process does. ``warm``: connections to open ahead; no ``cores``: run anywhere.

    ``generator``: one of GENERATORS; ``locustfile``: its users issue, not the plan.
    """

    url: str
    plan: str
    record: str
    cores: Sequence[int]
    warm: int
    generator: str
    locustfile: Locustfile | None = None

    @classmethod
    def read(cls, path: Path) -> Spec:
        """Raises OSError, or ValueError, TypeError or KeyError for what is no spec."""
        value: dict[str, Any] = json.loads(path.read_text())
        file = Locustfile(**value["locustfile"]) if value["locustfile"] else None
        return cls(**value | {"locustfile": file})

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


def exit_code(spec: Spec, sender: Sender, broken: list[BaseException]) -> int:
    """The exit code. Raises the first bug, if there was one."""
    if broken:
        raise broken[0]
    if dropped := sender.writer.dropped:
        return leave(Exit.DISK_FULL, f"the disk is full: {dropped} records did not fit into {spec.record}")
    if lack := sender.client.lack:
        sender.writer.json({"type": "lack", "what": lack})
        return leave(Exit.NO_CONNECTION, lack)
    return Exit.STOPPED if sender.stopped.is_set() else Exit.DONE


def not_connected(error: OSError) -> int:
    """Leave because no connection could be opened ahead; returns the exit code."""
    if lack := lack_of(error):
        return leave(Exit.NO_CONNECTION, lack)
    return leave(Exit.UNREACHABLE, reason(error))


def listen_for_start(loop: Readers, start: Callable[[int], None], gone: Callable[[], None]) -> None:
    """Call ``start`` with the common start from standard input, ``gone`` when that closes: our parent is gone then."""
    came = False

    def read() -> None:
        nonlocal came
        line = os.read(0, 4096)
        if not line:
            loop.remove_reader(0)
            gone()
        elif not came:
            came = True
            start(int(line))

    loop.add_reader(0, read)


class Heartbeat:
    """The timed window, and until the last answer: every 20 ms the loop's lag, its CPU, and requests whose time is up.

    ``usage`` notes hold CPU and wall time since ``t0_ns``, until ``stop_counting``. ``generator`` says who issues.
    """

    def __init__(self, sender: Sender, t0_ns: int, **generator: str) -> None:
        self._sender, self._t0 = sender, t0_ns
        self._due = t0_ns
        self._beats = 0
        self._cpu0: int | None = None
        self._counting = True
        self._timer = Timer(sender.loop, self._beat)
        self._timer.arm(self._due)
        about = {"type": "window", "t0_ns": t0_ns, "collector": "frozen and off", "loop": sender.plan.loop}
        sender.writer.json({**about, **generator})

    def stop_counting(self) -> None:
        """All has been issued: from here on only answers are awaited."""
        self._note_usage()
        self._counting = False

    def close(self) -> None:
        """All has been answered."""
        self._timer.close()
        sender = self._sender
        sender.writer.json({"type": "issued", "issued": sender.issued, "finished": sender.finished})
        wall = sender.wall
        sender.writer.json({"type": "wall_clock", "width_ns": wall.width_ns, "set": wall.steps})

    def _beat(self) -> None:
        now = monotonic_ns()
        writer = self._sender.writer
        writer.span(Span.LOOP_LAG, 0, now, now, queued_ns=self._due)
        if self._cpu0 is None:
            self._cpu0 = time.process_time_ns()
        self._sender.wall.look()
        self._sender.expire(now)
        if writer.dropped or self._sender.client.lack:
            self._sender.stop(self._sender.client.lack or "the disk is full")
        self._beats += 1
        if self._beats % _BEATS_A_SECOND == 0:
            begun = monotonic_ns()
            sum(range(1500))  # the canary: how fast the machine is just now, some 20 µs
            writer.span(Span.CANARY, 0, begun, monotonic_ns())
            if self._counting:
                self._note_usage()
        self._due += _BEAT_NS * max(1, (monotonic_ns() - self._due) // _BEAT_NS)
        self._timer.arm(self._due)

    def _note_usage(self) -> None:
        sender, now = self._sender, monotonic_ns()
        if self._cpu0 is None or now <= self._t0:
            return
        sender.writer.json(
            {
                "type": "usage",
                "cpu_ns": time.process_time_ns() - self._cpu0,
                "wall_ns": now - self._t0,
                "issued": sender.issued,
                "finished": sender.finished,
                "in_flight": sender.client.in_flight,
                "involuntary_switches": resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw,
            }
        )


def leave(code: Exit, why: str) -> int:
    """Write the reason to standard error; returns the code."""
    print(why, file=sys.stderr, flush=True)
    return code
