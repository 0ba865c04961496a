"""The master of workers on other machines: ``python -m gapmeter.loadgen.locust.master SPEC``.

It gathers the workers, numbers them, sends each its share, says ``ready``, and is told the start on standard input, as
a generator process is. Locust's master carries the messages; what is issued when lies in the plan alone.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic_ns
from typing import Any

import gevent
import gevent.event
import locust
from locust.env import Environment

from gapmeter.loadgen.locust import member as states
from gapmeter.loadgen.locust.clocks import Trip, clock_name
from gapmeter.loadgen.locust.loop import GreenLoop
from gapmeter.loadgen.locust.member import OVER, Member
from gapmeter.loadgen.locust.messages import TYPE, VERSION, NotWhole, Pull, describe_file, piece
from gapmeter.loadgen.locust.remote import ShardUser
from gapmeter.loadgen.locust.tally import METRICS, Reports
from gapmeter.loadgen.plan import Plan
from gapmeter.loadgen.share import load_share, save_share
from gapmeter.loadgen.worker import Exit, leave

_LOOK_S = 0.05
_TRIPS = 20
_RESTING_TRIP_S = 1.0


@dataclass(frozen=True, slots=True)
class Spec:
    """What the master is told. ``listen_port`` 0: any. A worker unheard for ``patience_s`` is given up."""

    url: str
    plan: str
    folder: str
    report: str
    listen_host: str
    listen_port: int
    workers: int
    generator: str
    patience_s: float

    @classmethod
    def read(cls, path: Path) -> Spec:
        """Raises OSError, or ValueError or TypeError for what is no spec."""
        return cls(**json.loads(path.read_text()))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


class Master:
    """The workers of one run."""

    def __init__(self, spec: Spec, plan: Plan) -> None:
        self._spec, self._plan = spec, plan
        self._env = Environment(user_classes=[ShardUser], host=spec.url)
        self._runner = self._env.create_master_runner(spec.listen_host, spec.listen_port)
        self._runner.register_message(TYPE, self._heard)
        self._env.events.heartbeat_sent.add_listener(lambda client_id, **_: self._alive(client_id))
        self._env.events.worker_report.add_listener(self._reported)
        self._members: dict[str, Member] = {}
        self._armed = self._ending = False
        self.stopped = gevent.event.Event()
        self.reports = Reports()
        self._clock = clock_name()
        self._words: dict[str, Callable[[Member, dict[str, Any]], None]] = {
            "hello": lambda *_: None, "clock": self._trip, "pull": self._give, "ready": self._ready,
            "failed": self._failed, "done": self._done, "piece": lambda member, message: member.pull.arrived(message),
        }  # fmt: skip

    @property
    def port(self) -> int:
        return int(self._runner.server.port)

    @property
    def members(self) -> list[Member]:
        return sorted(self._members.values(), key=lambda member: member.number)

    def gather(self, say: Callable[[str], None]) -> None:
        """Wait for the workers; each that comes is told of."""
        told = -1
        while len(self._members) < self._spec.workers and not self.stopped.is_set():
            if told != len(self._members):
                told = len(self._members)
                say(f"{told} of {self._spec.workers} workers are here; {self._spec.listen_host}:{self.port} listens")
            gevent.sleep(_LOOK_S)

    def arm(self) -> None:
        """Send each its share, and wait until all are connected to the target."""
        self._armed = True
        if self.stopped.is_set():
            return
        for member in self.members:
            share = self._plan.slice(member.number, self._spec.workers) if self._spec.workers > 1 else self._plan
            member.planned = len(share)
            save_share(share, self._share_path(member))
            order = {
                "word": "arm", "worker": member.number, "workers": self._spec.workers, "url": self._spec.url,
                "generator": self._spec.generator, "digest": share.digest(), "plan": self._plan.digest(),
                "share": describe_file(self._share_path(member)),
            }  # fmt: skip
            self._send(member, order)
        self._await(lambda member: member.state != states.WAITING)

    def start(self, t0_ns: int) -> None:
        """The common start, to each on its own clock; then Locust's, which may come again: a share begins once."""
        for member in self.members:
            self._send(member, {"word": "start", "t0_ns": t0_ns + member.offset.offset_ns})
        self._runner.start(user_count=self._runner.worker_count, spawn_rate=self._runner.worker_count)

    def stop(self) -> None:
        """Have everybody end early; what was recorded is still handed in."""
        self.stopped.set()
        for member in self.members:
            self._send(member, {"word": "stop"})

    def collect(self) -> None:
        """Wait until each has issued its share and handed its records in, or is given up."""
        self._await(lambda member: member.state in OVER)

    def measure_clocks(self, trips: int) -> None:
        """Messages there and back to all who are still here."""
        for _ in range(trips):
            for member in self.members:
                self._send(member, {"word": "clock", "sent_ns": monotonic_ns()})
            gevent.sleep(_LOOK_S)

    def keep_measuring(self) -> None:
        """A greenlet's work: clocks drift."""
        while True:
            gevent.sleep(_RESTING_TRIP_S)
            self.measure_clocks(1)
            self.write_report()

    def write_report(self) -> None:
        """What the manifest will say of the workers, anew while it runs; the merged histograms are beside it."""
        path = Path(self._spec.report)
        merged = {name: self.reports.merged(name).encode().decode() for name in METRICS}
        value = {
            "locust": locust.__version__, "plan": self._plan.digest(), "port": self.port,
            "workers": [member.describe(self.reports.of(member.number)) for member in self.members],
            "histograms": merged,
        }  # fmt: skip
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps(value, indent=1))
        os.replace(part, path)

    def close(self) -> None:
        for member in self.members:
            self._share_path(member).unlink(missing_ok=True)
        self._runner.quit()

    def troubles(self) -> list[str]:
        """A sentence for each worker that is lost or failed."""
        return [self._trouble(member) for member in self.members if member.why]

    def _trouble(self, member: Member) -> str:
        report = self.reports.of(member.number)
        open_loop = self._plan.loop == "open"
        left = f" of {member.planned}" if open_loop else ""
        return f"{member.name} {member.why}; it had issued {report['issued']}{left} requests by its last report"

    def _await(self, settled: Callable[[Member], bool]) -> None:
        while not all(settled(member) or member.state in OVER for member in self._members.values()):
            for member in self.members:
                if member.state not in OVER and member.silent_ns() > self._spec.patience_s * 1e9:
                    member.state, member.why = states.LOST, f"was not heard for {self._spec.patience_s:g} s"
            gevent.sleep(_LOOK_S)

    def _heard(self, msg: Any, **_: Any) -> None:
        client_id, message = msg.node_id, msg.data
        if client_id not in self._members and not self._admit(client_id, message):
            return
        member = self._members[client_id]
        member.heard_ns = monotonic_ns()
        self._words[message["word"]](member, message)

    def _admit(self, client_id: str, message: dict[str, Any]) -> bool:
        """Number a new worker, or refuse it: shares are dealt out once."""
        if message["word"] != "hello":
            return False
        why = f"the master speaks version {VERSION} of the protocol" if message["version"] != VERSION else ""
        if self._armed or len(self._members) >= self._spec.workers:
            why = "this run has all its workers already"
        if why:
            self._runner.send_message(TYPE, {"word": "refuse", "why": why}, client_id)
            return False
        pull = Pull(lambda value: self._runner.send_message(TYPE, value, client_id))
        member = Member(len(self._members), client_id, message, pull)
        member.same_clock = bool(self._clock) and message["clock"] == self._clock
        self._members[client_id] = member
        return True

    def _alive(self, client_id: str) -> None:
        if client_id in self._members:
            self._members[client_id].heard_ns = monotonic_ns()

    def _reported(self, client_id: str, data: dict[str, Any]) -> None:
        if client_id in self._members and TYPE in data:
            self.reports.take(self._members[client_id].number, data[TYPE])

    def _trip(self, member: Member, message: dict[str, Any]) -> None:
        member.trips.append(Trip(message["sent_ns"], message["there_ns"], monotonic_ns()))

    def _give(self, member: Member, message: dict[str, Any]) -> None:
        self._send(member, piece(self._share_path(member), message["offset"]))

    def _ready(self, member: Member, _: dict[str, Any]) -> None:
        if member.state == states.WAITING:
            member.state = states.READY

    def _failed(self, member: Member, message: dict[str, Any]) -> None:
        member.state, member.why = states.FAILED, f"could not begin: {message['why']}"

    def _done(self, member: Member, message: dict[str, Any]) -> None:
        self.reports.take(member.number, message["report"])
        if member.state == states.READY:
            member.state, member.done = states.DONE, message
            member.why = "; ".join(message["troubles"])
            gevent.spawn(self._take_records, member)
        elif member.state == states.HANDED_IN:
            self._send(member, {"word": "thanks"})

    def _take_records(self, member: Member) -> None:
        path = Path(self._spec.folder) / f"worker-{member.number}.gap"
        try:
            member.pull.into(path, member.done["file"], lambda: member.state not in OVER)
        except NotWhole as error:
            member.state, member.why = states.FAILED, f"did not hand in its records: {error}"
        else:
            member.state = states.HANDED_IN
        self._send(member, {"word": "thanks"})

    def _share_path(self, member: Member) -> Path:
        return Path(self._spec.folder) / f"worker-{member.number}.plan.npz"

    def _send(self, member: Member, message: dict[str, Any]) -> None:
        self._runner.send_message(TYPE, message, member.client_id)


def main(arguments: list[str]) -> int:
    """Entry point; the exit codes of ``loadgen.worker``. Lines on standard output before ``ready`` are for the user."""
    try:
        spec = Spec.read(Path(arguments[0]))
        plan = load_share(Path(spec.plan))
    except (IndexError, OSError, ValueError, TypeError, KeyError) as error:
        return leave(Exit.BAD_SPEC, f"not a master's spec: {error}")
    try:
        master = Master(spec, plan)
    except (SystemExit, Exception) as error:  # noqa: BLE001 - Locust raises what it likes, or exits
        return leave(Exit.BAD_SPEC, f"{spec.listen_host}:{spec.listen_port} cannot be listened on: {error}")
    told = _listen_to_parent(master)
    for signum in (signal.SIGINT, signal.SIGTERM):
        gevent.signal_handler(signum, master.stop)
    try:
        return _conduct(master, told)
    finally:
        master.close()


def _conduct(master: Master, told: Any) -> int:
    master.gather(lambda text: print(text, flush=True))
    master.measure_clocks(_TRIPS)
    master.arm()
    if master.stopped.is_set():
        master.collect()
        return Exit.STOPPED
    if troubles := master.troubles():
        master.stop()
        return leave(Exit.BAD_SPEC, "; ".join(troubles))
    print("ready", flush=True)
    gevent.wait([told, master.stopped], count=1)
    measuring = gevent.spawn(master.keep_measuring)
    if told.ready():
        master.start(told.get())
    master.collect()
    measuring.kill()
    master.write_report()
    if troubles := master.troubles():
        return leave(Exit.BAD_SPEC, "; ".join(troubles))
    return Exit.STOPPED if master.stopped.is_set() else Exit.DONE


def _listen_to_parent(master: Master) -> Any:
    """The start, once standard input tells it; when that closes, our parent is gone and everybody stops."""
    told, loop = gevent.event.AsyncResult(), GreenLoop()

    def heard() -> None:
        line = os.read(0, 4096)
        if not line:
            loop.remove_reader(0)
            gevent.spawn(master.stop)
        elif not told.ready():
            told.set(int(line))

    loop.add_reader(0, heard)
    return told


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
