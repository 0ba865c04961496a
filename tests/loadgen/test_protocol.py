"""Slices out and records in over HTTP: only for workers of the run, and only what arrived whole."""

from __future__ import annotations

import http.client
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import gevent
import pytest

from gapmeter.loadgen.locust.protocol import Files, FileServer, NotKept, NotTaken, Offset, Order, Result, Seal
from gapmeter.loadgen.locust.slice_run import Report
from gapmeter.records.follow import new_histograms
from tests.kit.command import ROOT
from tests.kit.loads import plan

RESULT = Result(["a sentence"], 1, Report(3, 2, 2, 1, {"ttft": new_histograms()["ttft"].encode().decode()}))


@dataclass
class Served:
    """A server in a thread of its own, and what it was told. It expects workers 0 and 1."""

    folder: Path
    order: Order = field(init=False)
    results: list[tuple[int, Result]] = field(default_factory=list)

    def serve(self, ready: threading.Event, over: threading.Event) -> None:
        seals = {worker: Seal("secret", f"of {worker}", "master") for worker in (0, 1)}
        server = FileServer(
            "127.0.0.1", 0, self.folder, seals.get, lambda worker, result: self.results.append((worker, result))
        )
        self.order = Order(0, 2, "http://target", "asyncio", "digest", 1 << 30, server.port)
        ready.set()
        while not over.is_set():
            gevent.sleep(0.01)
        server.close()

    @property
    def files(self) -> Files:
        return Files("127.0.0.1", self.order, Seal("secret", "of 0", "worker"))

    def records(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir() if ".gap" in path.name)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    it, ready, over = Served(tmp_path), threading.Event(), threading.Event()
    thread = threading.Thread(target=it.serve, args=(ready, over))
    thread.start()
    assert ready.wait(10)
    yield it
    over.set()
    thread.join(10)


def test_a_slice_arrives_and_records_are_handed_in_as_they_are(served: Served, tmp_path: Path) -> None:
    content = bytes(range(256)) * 9000  # more than one piece
    (served.folder / "worker-0.plan.npz").write_bytes(content)
    served.files.fetch_slice(tmp_path / "slice")
    assert (tmp_path / "slice").read_bytes() == content
    for _ in range(2):  # again, where the answer was lost on its way
        served.files.hand_in(tmp_path / "slice", RESULT)
    assert (served.folder / "worker-0.gap").read_bytes() == content
    assert served.results == [(0, RESULT)] * 2
    assert served.records() == ["worker-0.gap"]


@pytest.mark.parametrize(
    "seal",
    [Seal("guess", "of 0", "worker"), Seal("secret", "of 1", "worker"), Seal("secret", "of 0", "master")],
    ids=["another secret", "another worker", "the master itself"],
)
def test_nobody_is_served_without_the_workers_own_mark(served: Served, tmp_path: Path, seal: Seal) -> None:
    (served.folder / "worker-0.plan.npz").write_bytes(b"secret")
    stranger = replace(served.files, seal=seal)
    with pytest.raises(NotTaken, match="403"):
        stranger.fetch_slice(tmp_path / "slice")
    assert (tmp_path / "slice").read_bytes() == b""
    with pytest.raises(NotTaken, match="403"):
        stranger.hand_in(tmp_path / "slice", RESULT)
    assert served.records() == []


def test_a_worker_that_was_given_up_comes_too_late(served: Served, tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(b"x" * 100_000)
    late = replace(served.files, order=replace(served.order, worker=2))
    with pytest.raises(NotTaken, match="410 Gone"):
        late.hand_in(tmp_path / "mine", RESULT)
    assert served.records() == []
    assert served.results == []


def test_records_that_did_not_arrive_as_they_were_sent_are_not_taken(served: Served) -> None:
    said = {"method": "PUT", "path": "/records/0", "digest": "sha-256=:AAAA:"}
    head = {"Authorization": served.files.seal.mark(said)["mac"], "Content-Digest": "sha-256=:AAAA:"}
    # What was heard on its way is good for no other request.
    for path, digest, status in (
        ("/records/0", "AAAA", 400), ("/records/0", "BBBB", 403), ("/results/0", "AAAA", 403),
    ):  # fmt: skip
        connection = http.client.HTTPConnection("127.0.0.1", served.order.port, timeout=10)
        connection.request("PUT", path, b"other bytes", {**head, "Content-Digest": f"sha-256=:{digest}:"})
        assert connection.getresponse().status == status
        connection.close()
    with socket.create_connection(("127.0.0.1", served.order.port)) as cut:
        lines = ["PUT /records/0 HTTP/1.1", "Host: x", "Content-Length: 100", *(f"{k}: {v}" for k, v in head.items())]
        cut.sendall("\r\n".join([*lines, "", "half"]).encode())
    (served.folder / "worker-0.plan.npz").write_bytes(b"")
    served.files.fetch_slice(served.folder / "slice")  # the server has gone on to the next request
    assert served.records() == []


def test_a_slice_without_room_or_end_is_no_cut_network(served: Served, tmp_path: Path) -> None:
    (served.folder / "worker-0.plan.npz").write_bytes(b"x" * 9)
    with pytest.raises(NotKept, match="No space left on device"):
        served.files.fetch_slice(Path("/dev/full"))
    told = replace(served.files, order=replace(served.order, size=8))
    with pytest.raises(NotKept, match="larger than the 8 bytes that it announced"):
        told.fetch_slice(tmp_path / "slice")


def test_records_that_the_master_cannot_keep_end_their_workers_part_with_the_reason(
    served: Served, tmp_path: Path
) -> None:
    (tmp_path / "mine").write_bytes(b"x" * 100_000)
    (served.folder / "worker-0.gap").mkdir()
    with pytest.raises(NotTaken, match="507 Insufficient Storage"):
        served.files.hand_in(tmp_path / "mine", RESULT)
    ((worker, result),) = served.results
    assert worker == 0
    assert re.fullmatch("has records that could not be kept here: .*: Is a directory", result.troubles[0])
    assert served.records() == ["worker-0.gap"]


def test_a_worker_whose_records_have_no_room_counts_as_over_once_it_can_hear_why(served: Served) -> None:
    body, digest = b"x" * (3 << 20), "sha-256=:AAAA:"
    mac = served.files.seal.mark({"method": "PUT", "path": "/records/0", "digest": digest})["mac"]
    head = [f"Content-Length: {len(body)}", f"Authorization: {mac}", f"Content-Digest: {digest}"]
    served.folder.rmdir()
    with socket.create_connection(("127.0.0.1", served.order.port), timeout=10) as connection:
        connection.sendall("\r\n".join(["PUT /records/0 HTTP/1.1", "Host: x", *head, "", ""]).encode() + body[:-1])
        time.sleep(0.3)
        assert served.results == []
        connection.sendall(body[-1:])
        assert connection.recv(65536).startswith(b"HTTP/1.1 507 Insufficient Storage")
    assert len(served.results) == 1
    served.folder.mkdir()


def test_an_attempt_that_finds_no_room_after_another_was_taken_changes_nothing(served: Served, tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(b"x" * 100_000)
    served.files.hand_in(tmp_path / "mine", RESULT)
    (served.folder / "worker-0.gap").unlink()
    (served.folder / "worker-0.gap").mkdir()
    with pytest.raises(NotTaken, match="507 Insufficient Storage"):
        served.files.hand_in(tmp_path / "mine", RESULT)
    assert served.results == [(0, RESULT)]


def test_a_clock_that_was_read_while_a_message_was_under_way_may_be_ours_and_no_other() -> None:
    assert all(Offset.of(10, there_ns, 15).may_be_none for there_ns in range(10, 16))
    assert not any(Offset.of(10, there_ns, 15).may_be_none for there_ns in (-1_000, 8, 16, 1_000))


def test_trips_that_contradict_each_other_widen_the_offset_until_it_holds_at_both() -> None:
    """At ten millionths a clock is 36 ms ahead after an hour."""
    hour_ns = 3_600_000_000_000
    first = Offset.of(0, 50_000, 100_000)
    assert first.after(Offset.of(10, 40_010, 80_010)).half_width_ns == 40_000, "of two that agree the narrower"
    known = first.after(Offset.of(hour_ns, hour_ns + 36_060_000, hour_ns + 120_000))
    known = known.after(Offset.of(hour_ns // 2, hour_ns // 2 + 18_000_005, hour_ns // 2 + 10))
    assert known.drifts
    assert known.offset_ns - known.half_width_ns == -50_000, "the first one's lower end"
    assert known.offset_ns + known.half_width_ns == 35_940_000, "the second one's"


FETCHES = """
import sys
from pathlib import Path
from gapmeter.loadgen.locust.protocol import Files, Order, Seal
from gapmeter.loadgen.locust.slice_run import Call
from gapmeter.loadgen.locust.worker import Refused, Worker
_, port, digest, folder = sys.argv
order = Order(0, 2, "http://127.0.0.1:1", "asyncio", digest, 1 << 20, int(port))
files = Files("127.0.0.1", order, Seal("secret", "of 0", "worker"))
try:
    Worker(Call("127.0.0.1", int(port), (), None), Path(folder), print)._prepare(order, files)
except Refused as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("is_plan", "says"),
    [
        (True, r"the slice's digest is [0-9a-f]{12}, the master's 0{12}"),
        (False, "the master has sent no slice of a plan"),
    ],
)
def test_a_worker_issues_no_other_slice_than_the_one_it_was_told(
    served: Served, tmp_path: Path, is_plan: bool, says: str
) -> None:
    sent = served.folder / "worker-0.plan.npz"
    plan([0, 1]).save(sent)
    if not is_plan:
        sent.write_bytes(sent.read_bytes()[:-9])
    (tmp_path / "worker").mkdir()
    words = [str(served.order.port), "0" * 12, str(tmp_path / "worker")]
    env = os.environ | {"LOCUST_SKIP_MONKEY_PATCH": "1"}
    done = subprocess.run(
        [sys.executable, "-c", FETCHES, *words], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60
    )
    assert re.match(says, done.stdout), done.stderr
