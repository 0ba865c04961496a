"""The master of workers on other machines: ``python -P -m gapmeter.loadgen.locust.master SPEC``.

It gathers the workers, numbers them, serves each its slice, says ``ready``, and is told the start on standard input, as
a generator process is. Locust's master carries the messages; what is issued when lies in the plan alone.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from time import monotonic_ns
from typing import Any, TypeVar

import gevent
import gevent.event
import locust
from locust.env import Environment
from locust.exception import RPCError

from gapmeter.loadgen.exchange import endpoint
from gapmeter.loadgen.fleet import MasterSpec
from gapmeter.loadgen.generator import Exit, leave, listen_for_start
from gapmeter.loadgen.locust.protocol import (
    SECRET,
    TYPE,
    FileServer,
    Hello,
    Malformed,
    MasterMessage,
    Offset,
    Order,
    Result,
    Seal,
    WorkerMessage,
    clock_name,
    read,
)
from gapmeter.loadgen.locust.slice_run import Report, merged
from gapmeter.loadgen.locust.transport import GreenLoop
from gapmeter.loadgen.locust.worker import SliceUser
from gapmeter.loadgen.plan import Plan
from gapmeter.records.workers import LocustWorker, LocustWorkers

_LOOK_S = 0.05
_TRIPS = 20
_RESTING_TRIP_S = 1.0
T = TypeVar("T")


class State(StrEnum):
    WAITING = "waiting"
    READY = "ready"
    HANDED_IN = "handed in"
    FAILED = "failed"
    LOST = "lost"


_OVER = (State.HANDED_IN, State.FAILED, State.LOST)


@dataclass(slots=True)
class Member:
    """What the master knows of one worker.

    ``number`` is its place among the plan's slices, given by us: Locust numbers a worker that returns anew.
    """

    number: int
    client_id: str
    about: Hello
    planned: int
    same_clock: bool
    state: State = State.WAITING
    why: str = ""
    restarts: int = 0
    report: Report = field(default_factory=Report)
    heard_ns: int = field(default_factory=monotonic_ns)
    estimate: Offset = field(default_factory=Offset)  # from the round trips
    trips: int = 0

    @property
    def name(self) -> str:
        return f"worker {self.number} ({self.about.host}, process {self.about.pid})"

    @property
    def offset(self) -> Offset:
        """Its clock minus ours: nothing where both read the same clock."""
        return Offset() if self.same_clock else self.estimate

    def came_back(self, trip: Offset) -> None:
        """A message has been there and back."""
        self.same_clock = self.same_clock and trip.may_be_none
        self.estimate = self.estimate.after(trip) if self.trips else trip
        self.trips += 1

    def take(self, report: Report) -> None:
        """Keep the newest; an older one that comes later changes nothing."""
        if report.sequence > self.report.sequence:
            self.report = report

    def describe(self) -> LocustWorker:
        """For the manifest. What it had issued after its last report, nobody knows."""
        return LocustWorker(
            worker=self.number, host=self.about.host, pid=self.about.pid, state=self.state, why=self.why,
            planned=self.planned, reports=self.report.sequence, issued=self.report.issued,
            finished=self.report.finished, failed=self.report.failed, test_restarts=self.restarts,
            same_clock=self.same_clock, clock_offset_ns=self.offset.offset_ns,
            clock_half_width_ns=self.offset.half_width_ns, estimated_offset_ns=self.estimate.offset_ns,
            estimated_half_width_ns=self.estimate.half_width_ns, round_trips=self.trips,
        )  # fmt: skip


class Master:
    """The workers of one run. Raises OSError when a port is taken, or what Locust does."""

    def __init__(self, spec: MasterSpec, plan: Plan) -> None:
        self._spec, self._plan, self._asked = spec, plan, spec.workers
        self._env = Environment(user_classes=[SliceUser], host=spec.url)
        self._runner = self._env.create_master_runner(self._asked.listen_host, self._asked.listen_port)
        files_port = self._asked.listen_port + 1 if self._asked.listen_port else 0
        folder = Path(spec.folder)
        self._files = FileServer(self._asked.listen_host, files_port, folder, self._seal_of_number, self._finished)
        self._hear_workers_alone(self._runner.server)
        self._runner.register_message(TYPE, self._heard)
        self._env.events.worker_report.add_listener(self._reported)
        self._members: dict[str, Member] = {}
        self._armed = False
        self.stopped = gevent.event.Event()
        self._clock = clock_name()
        self._secret, self._drawn = os.environ.get(SECRET, ""), secrets.token_hex(16)

    @property
    def port(self) -> int:
        return int(self._runner.server.port)

    @property
    def members(self) -> list[Member]:
        return list(self._members.values())

    def gather(self, say: Callable[[str], None]) -> None:
        """Wait for the workers, and say so when one comes."""
        announced = -1
        while len(self._members) < self._asked.count and not self.stopped.is_set():
            if announced != len(self._members):
                announced = len(self._members)
                here = f"{announced} of {self._asked.count} workers are here"
                say(f"{here}; {endpoint(self._asked.listen_host, self.port)} listens")
            gevent.sleep(_LOOK_S)

    def arm(self) -> None:
        """Have each fetch its slice, and wait until all are connected to the target."""
        self._armed = True
        if self.stopped.is_set():
            return
        for member in self.members:
            part = self._plan.slice(member.number, self._asked.count)
            member.planned = len(part)
            path = self._files.slice_path(member.number)
            part.save(path)
            order = Order(
                worker=member.number, workers=self._asked.count, url=self._spec.url, generator=self._spec.generator,
                digest=part.digest(), size=path.stat().st_size, port=self._files.port,
            )  # fmt: skip
            self._send(member, MasterMessage("arm", order=order))
        self._await(lambda member: member.state is not State.WAITING)

    def start(self, t0_ns: int) -> None:
        """The common start, to each on its own clock; then Locust's, which may come again: a slice begins once."""
        for member in self.members:
            self._send(member, MasterMessage("start", t0_ns=t0_ns + member.offset.offset_ns))
        self._runner.start(user_count=self._runner.worker_count, spawn_rate=self._runner.worker_count)

    def stop(self) -> None:
        """Have everybody end early; what was recorded is still handed in."""
        self.stopped.set()
        for member in self.members:
            self._send(member, MasterMessage("stop"))

    def collect(self) -> None:
        """Wait until each that was armed has issued its slice and handed its records in, or is given up."""
        self._await(lambda member: member.state is not State.READY)

    def measure_clocks(self, trips: int) -> None:
        """Messages there and back to all who are still here."""
        for _ in range(trips):
            for member in self.members:
                self._send(member, MasterMessage("clock", sent_ns=monotonic_ns()))
            gevent.sleep(_LOOK_S)

    def keep_measuring(self) -> None:
        """A greenlet's work: clocks drift."""
        while True:
            gevent.sleep(_RESTING_TRIP_S)
            self.measure_clocks(1)
            self.write_report()

    def write_report(self) -> None:
        """What the manifest will say of the workers, anew while it runs; the merged histograms are beside it."""
        histograms = merged(member.report for member in self.members)
        LocustWorkers(
            locust=locust.__version__, plan=self._plan.digest(), port=self.port,
            workers=tuple(member.describe() for member in self.members),
            histograms={name: histogram.encode().decode() for name, histogram in histograms.items()},
        ).write(Path(self._spec.folder))  # fmt: skip

    def troubles(self) -> list[str]:
        """A sentence for each worker that is lost or failed."""
        open_loop = self._plan.loop == "open"
        return [
            f"{member.name} {member.why}; it had issued {member.report.issued}"
            f"{f' of {member.planned}' if open_loop else ''} requests by its last report"
            for member in self.members
            if member.why
        ]

    def close(self) -> None:
        self._files.close()
        for member in self.members:
            self._files.slice_path(member.number).unlink(missing_ok=True)
        self._runner.quit()

    def _await(self, settled: Callable[[Member], bool]) -> None:
        while not all(settled(member) or member.state in _OVER for member in self._members.values()):
            gevent.sleep(_LOOK_S)  # first of all: what they said may not have been read yet
            for member in self.members:
                silent_ns = monotonic_ns() - member.heard_ns
                if member.state not in _OVER and silent_ns > self._asked.patience_s * 1e9:
                    member.state, member.why = State.LOST, f"was not heard for {self._asked.patience_s:g} s"

    def _hear_workers_alone(self, server: Any) -> None:
        """Drop what Locust's listener would die of, and what somebody says in the name of another."""
        receive = server.recv_from_client

        def from_client() -> tuple[str, Any]:
            while True:
                try:
                    address, message = receive()
                except RPCError:
                    raise  # which the listener expects
                except Exception:  # noqa: BLE001 - what is no message of Locust's is told from one by reading it
                    continue
                calls = message.type == "client_ready" and isinstance(message.data, str)
                if message.node_id == address and (address in self._members or message.type == TYPE or calls):
                    return address, message

        server.recv_from_client = from_client

    def _heard(self, msg: Any, **_: Any) -> None:
        heard_ns, member = monotonic_ns(), self._members.get(msg.node_id)
        if member is None:
            if isinstance(msg.data, dict) and msg.data.get("word") == "hello":
                self._admit(msg.node_id, msg.data)
            return
        match self._said(member, WorkerMessage, msg.data):
            case WorkerMessage("clock", sent_ns=sent_ns, there_ns=there_ns):
                member.came_back(Offset.of(sent_ns, there_ns, heard_ns))
            case WorkerMessage("ready") if member.state is State.WAITING:
                member.state = State.READY
            case WorkerMessage("failed", why) if member.state not in _OVER:
                member.state, member.why = State.FAILED, f"could not begin: {why}"

    def _reported(self, client_id: str, data: dict[str, Any]) -> None:
        member = self._members.get(client_id)
        if member is not None and (report := self._said(member, Report, data.get(TYPE))) is not None:
            member.take(report)

    def _said(self, member: Member, kind: type[T], message: Any) -> T | None:
        """What a worker says; None for what another has sent in its name, and for nonsense, which ends its part."""
        if not self._seal(member).is_theirs(message):
            return None
        member.heard_ns = monotonic_ns()
        try:
            return read(kind, message)
        except Malformed as error:
            if member.state not in _OVER:
                member.state, member.why = State.FAILED, f"says what no worker of this version says: {error}"
            return None

    def _admit(self, client_id: str, message: dict[str, Any]) -> None:
        """Number a new worker, or refuse it: slices are dealt out once.

        It says hello twice: what it drew, and then, with what we drew, that it is no recording of another run.
        """
        seal, why = Seal(self._secret, str(message.get("nonce")), "master"), ""
        again = seal.joined(self._drawn).is_theirs(message)
        known = any(member.about.nonce == message.get("nonce") for member in self.members)
        try:
            about = Hello.read(message)
        except Malformed as error:
            why = str(error)
        else:
            if not again and not seal.is_theirs(message):
                why = f"it does not share the master's secret ({SECRET})"
            elif self._armed or known or len(self._members) >= self._asked.count:
                why = "this run has all its workers already"
            elif again:
                same_clock = bool(self._clock) and about.clock == self._clock
                self._members[client_id] = Member(len(self._members), client_id, about, 0, same_clock)
                return
        answer = MasterMessage("refuse", why=why) if why else MasterMessage("welcome", drawn=self._drawn)
        self._runner.send_message(TYPE, seal.mark(asdict(answer)), client_id)

    def _seal_of_number(self, worker: int) -> Seal | None:
        """The seal of a worker that is still one of this run's; None for one that was given up."""
        if not 0 <= worker < len(self._members) or self.members[worker].state in (State.FAILED, State.LOST):
            return None
        return self._seal(self.members[worker])

    def _finished(self, worker: int, result: Result) -> None:
        """A worker has handed in its records. It says so again when it did not hear our answer."""
        member = self.members[worker]
        member.take(result.report)
        member.state, member.restarts, member.why = State.HANDED_IN, result.restarts, "; ".join(result.troubles)

    def _send(self, member: Member, message: MasterMessage) -> None:
        self._runner.send_message(TYPE, self._seal(member).mark(asdict(message)), member.client_id)

    def _seal(self, member: Member) -> Seal:
        return Seal(self._secret, member.about.nonce, "master").joined(self._drawn)


def main(arguments: list[str]) -> int:
    """Entry point; exit codes as ``Exit`` has them. Lines on standard output before ``ready`` are for the user."""
    try:
        spec = MasterSpec.read(Path(arguments[0]))
        plan = Plan.load(Path(spec.plan))
    except (IndexError, OSError, ValueError, TypeError, KeyError) as error:
        return leave(Exit.BAD_SPEC, f"not a master's spec: {error}")
    try:
        master = Master(spec, plan)
    except (SystemExit, Exception) as error:  # noqa: BLE001 - Locust raises what it likes, or exits
        asked = endpoint(spec.workers.listen_host, spec.workers.listen_port)
        return leave(Exit.BAD_SPEC, f"{asked} cannot be listened on: {error}")
    start = gevent.event.AsyncResult()
    listen_for_start(GreenLoop(), start.set, lambda: gevent.spawn(master.stop))
    for signum in (signal.SIGINT, signal.SIGTERM):
        gevent.signal_handler(signum, master.stop)
    try:
        master.gather(lambda text: print(text, flush=True))
        master.measure_clocks(_TRIPS)
        measuring = gevent.spawn(master.keep_measuring)  # whose answers say who is still there, too
        master.arm()
        if master.stopped.is_set():
            master.stop()  # once more: who was being armed had nothing to stop
            master.collect()
            return Exit.STOPPED
        if troubles := master.troubles():
            master.stop()
            return leave(Exit.BAD_SPEC, "; ".join(troubles))
        print("ready", flush=True)
        gevent.wait([start, master.stopped], count=1)
        if start.ready():
            master.start(start.get())
        master.collect()
        measuring.kill()
        master.write_report()
        if troubles := master.troubles():
            return leave(Exit.BAD_SPEC, "; ".join(troubles))
        return Exit.STOPPED if master.stopped.is_set() else Exit.DONE
    finally:
        master.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
