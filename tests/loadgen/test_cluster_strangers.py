"""What somebody on the network can do who hears all that a master and a worker say, and does not know their secret."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from gapmeter.loadgen.fleet import Fleet, NotStarted
from gapmeter.loadgen.generator import Exit
from gapmeter.loadgen.locust.protocol import SECRET, TYPE, VERSION, Hello, Seal
from gapmeter.loadgen.locust.slice_run import Report
from gapmeter.records.workers import LocustWorkers
from tests.kit.loads import plan, records_of
from tests.kit.wait import until
from tests.loadgen.test_cluster import Crew

pytestmark = pytest.mark.whole_run

MS = 1_000_000
LOCUST = version("locust")  # importing it would patch this process


class Tap:
    """Between a worker and its master, once: what the worker says is passed on, and heard."""

    def __init__(self, master: str) -> None:
        host, port = master.rsplit(":", 1)
        self._master = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.heard = b""
        self.over = threading.Thread(target=self._serve)
        self.over.start()

    def said(self, kind: str) -> list[Any]:
        """Messages of that type: what was said, and as whom."""
        start = msgpack.dumps((kind, None, None))[: len(kind) + 2]
        found, at = [], self.heard.find(start)
        while at >= 0:
            reader = msgpack.Unpacker()
            reader.feed(self.heard[at:])
            with contextlib.suppress(msgpack.OutOfData):
                found.append(reader.unpack()[1:])
            at = self.heard.find(start, at + 1)
        return found

    def _serve(self) -> None:
        with self._listener, self._listener.accept()[0] as worker, socket.create_connection(self._master) as master:
            back = threading.Thread(target=self._pass, args=(master, worker))
            back.start()
            self._pass(worker, master, listen=True)
            back.join()

    def _pass(self, source: socket.socket, to: socket.socket, *, listen: bool = False) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if listen:
                    self.heard += data
                to.sendall(data)
            to.shutdown(socket.SHUT_RDWR)


class Tapped(Crew):
    """One worker, which is heard."""

    tap: Tap
    master = ""

    def join(self) -> Any:
        self.master, self.tap = self.address, Tap(self.address)
        self.address = self.tap.address
        return super().join()


@contextlib.contextmanager
def tapped(url: str, folder: Path, crew: Tapped, requests: int) -> Iterator[Fleet]:
    folder.mkdir(exist_ok=True)
    with crew.at_work(plan([index * 10 * MS for index in range(requests)]), url, folder) as fleet:
        yield fleet
    crew.tap.over.join()


@contextlib.contextmanager
def stranger(master: str, name: str = "stranger") -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        sock.setsockopt(zmq.IDENTITY, name.encode())
        sock.setsockopt(zmq.LINGER, 1000)
        sock.connect(f"tcp://{master}")
        yield sock


def test_who_hears_all_changes_neither_the_load_nor_what_is_said_of_it(
    tmp_path: Path, null: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET, "theirs")
    crew = Tapped(1)
    with tapped(null, tmp_path, crew, 900) as fleet:
        fleet.start()
        (_, worker), *_ = crew.tap.said(TYPE)
        lie = asdict(Report(10**9, 10**6, 10**6, 10**6, {"ttft": "x"}))
        (report, _), *_ = until(lambda: [one for one in crew.tap.said("stats") if TYPE in one[0]])
        with stranger(crew.master) as sock:
            for kind, data, name in (
                ("stats", {TYPE: lie}, worker), ("stats", {TYPE: report[TYPE] | lie}, worker), ("quit", None, worker),
                ("client_stopped", None, worker), ("stats", {TYPE: lie}, "stranger"),
                (TYPE, {"word": "failed"}, worker),
                ("client_ready", LOCUST, "stranger"), ("client_ready", 5, "stranger"), ("exception", 5, "stranger"),
                ("logs", 5, "stranger"), ("locustfile", {"version": "3"}, "stranger"), (TYPE, 5, "stranger"),
                (TYPE, {"word": "hello"}, "stranger"),
            ):  # fmt: skip
                sock.send(msgpack.dumps((kind, data, name)))
            for garbage in (b"", b"\xc1", b"\x05", b"\x93\x01", b"\xff" * 99, msgpack.dumps((1, 2, 3, 4))):
                sock.send(garbage)
            sock.send_multipart([b"a", b"b"])
            time.sleep(0.5)
        trips = LocustWorkers.read(tmp_path).workers[0].round_trips  # the master still hears its worker
        until(lambda: LocustWorkers.read(tmp_path).workers[0].round_trips > trips + 1)
        assert fleet.wait(lambda: None, 0.05) == [Exit.DONE], fleet.troubles()
    (told,) = LocustWorkers.read(tmp_path).workers
    assert (told.state, told.issued, told.finished, told.failed) == ("handed in", 900, 900, 0)
    assert told.reports < 1000
    assert [record.index for record in records_of(tmp_path)] == list(range(900))


class Replayed(Tapped):
    """Before the worker comes a stranger with what another one said in another run."""

    def __init__(self, hellos: list[Any]) -> None:
        super().__init__(1)
        self._hellos, self.answers = hellos, list[Any]()

    def join(self) -> Any:
        for name in ("stranger", self._hellos[-1][1]):
            with stranger(self.address, name) as sock:
                sock.send(msgpack.dumps(("client_ready", LOCUST, name)))
                for said, _ in self._hellos:
                    sock.send(msgpack.dumps((TYPE, said, name)))
                while sock.poll(1500):
                    kind, data, _ = msgpack.loads(sock.recv())
                    self.answers += [data["word"]] if kind == TYPE else []
        return super().join()


def test_what_a_worker_said_in_one_run_is_no_worker_of_another(
    tmp_path: Path, null: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET, "theirs")
    first = Tapped(1)
    with tapped(null, tmp_path / "one", first, 10) as fleet:
        fleet.start()
        assert fleet.wait(lambda: None, 0.05) == [Exit.DONE], fleet.troubles()
    hellos = [one for one in first.tap.said(TYPE) if one[0]["word"] == "hello"]
    assert len(hellos) >= 2, "with what it drew, and with what the master drew"
    again = Replayed(hellos)
    with tapped(null, tmp_path / "two", again, 10) as fleet:
        fleet.start()
        assert fleet.wait(lambda: None, 0.05) == [Exit.DONE], fleet.troubles()
    assert set(again.answers) == {"welcome", "refuse"}
    assert len(LocustWorkers.read(tmp_path / "two").workers) == 1


class Babbler(Crew):
    """A worker that shares the secret, first greets as none does, and once it is taken says what none says."""

    def __init__(self, kind: str, said: dict[str, Any]) -> None:
        super().__init__(1)
        self._kind, self._said, self.refused = kind, said, ""

    def join(self) -> Any:
        seal = Seal("theirs", "n", "worker")
        hello = asdict(Hello(VERSION, "here", 1, "", seal.nonce))
        with stranger(self.address, "babbler") as sock:

            def says(kind: str, data: Any) -> None:
                sock.send(msgpack.dumps((kind, data, "babbler")))

            def hears(word: str) -> dict[str, Any]:
                while True:
                    kind, data, _ = msgpack.loads(sock.recv())
                    if kind == TYPE and data["word"] == word:
                        return dict(data)

            says("client_ready", LOCUST)
            says(TYPE, seal.mark(hello | {"pid": "many"}))
            self.refused = hears("refuse")["why"]
            says(TYPE, seal.mark(hello))
            seal = seal.joined(hears("welcome")["drawn"])
            for _ in range(2):  # again, as it does until it is armed
                says(TYPE, seal.mark(hello))
            hears("clock")
            said = seal.mark(self._said)
            says(self._kind, said if self._kind == TYPE else {TYPE: said})
        return subprocess.Popen(["true"], stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("kind", "said", "key"),
    [
        (TYPE, {"word": "clock", "sent_ns": 1, "there_ns": "soon"}, "there_ns"),
        (TYPE, {"word": "failed", "why": 5}, "why"),
        (TYPE, {}, "word"),
        ("stats", {"sequence": 1, "histograms": 5}, "histograms"),
        ("stats", {"sequence": 1, "histograms": {"ttft": "y"}}, "histograms"),
        ("stats", {"sequence": 1, "histograms": {"x": "y"}}, "histograms"),
    ],
)
def test_a_worker_that_says_what_no_worker_says_is_given_up_by_name(
    tmp_path: Path, null: str, monkeypatch: pytest.MonkeyPatch, kind: str, said: dict[str, Any], key: str
) -> None:
    monkeypatch.setenv(SECRET, "theirs")
    crew = Babbler(kind, said)
    wrong = rf"worker 0 \(here, process 1\) says what no worker of this version says: {key}: "
    with pytest.raises(NotStarted, match=wrong), crew.at_work(plan([0]), null, tmp_path):
        pass
    assert crew.refused.startswith("pid: ")
