from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gapmeter.servers.launch import ServerFailed, ServerProcess, check_port, free_port, launch, log_reason, start
from tests.kit.command import ROOT
from tests.kit.wait import until

# A server that answers, with a child in a session of its own and a grandchild that has lost its parent; all of them
# write their ids into a file. "stubborn" ones ignore SIGTERM, as an engine in the middle of a long kernel does.
TREE = """
import http.server, os, signal, subprocess, sys, time
port, pids, stubborn = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "stubborn"
if stubborn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
def note():
    with open(pids, "a") as file:
        file.write(f"{os.getpid()}\\n")
note()
if os.fork() == 0:
    os.setsid()
    note()
    if os.fork():
        os._exit(0)
    note()
    while True:
        time.sleep(1)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def pids_in(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def gone(pids: list[int]) -> bool:
    return not any(map(alive, pids))


def launch_tree(tmp_path: Path, manner: str = "polite", cores: tuple[int, ...] = ()) -> tuple[ServerProcess, Path]:
    port, pids = free_port(), tmp_path / "pids"
    command = [sys.executable, "-c", TREE, str(port), str(pids), manner]
    server = launch(command, {}, cores, tmp_path / "server.log", f"http://127.0.0.1:{port}/health", 20)
    until(lambda: len(pids_in(pids)) == 3, 10)
    return server, pids


@pytest.mark.parametrize("manner", ["polite", "stubborn"])
def test_stop_ends_the_whole_tree_even_children_in_sessions_of_their_own(tmp_path: Path, manner: str) -> None:
    server, pids = launch_tree(tmp_path, manner)
    first, _, orphan = pids_in(pids)
    assert alive(first) and alive(orphan)
    code = server.stop(grace_s=0.5)
    assert gone(pids_in(pids))
    assert code == 128 + (signal.SIGTERM if manner == "polite" else signal.SIGKILL)
    assert server.stop() == code


VLLM_LOG = """(EngineCore pid=7) ERROR 11-21 08:00:01 [core.py:1] ValueError: too few KV blocks
(EngineCore pid=7) Traceback (most recent call last):
(APIServer pid=5) RuntimeError: Engine core initialization failed. See root cause above.
"""

PARENT = """
import os, signal, sys, time
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs the tests in the background has it ignored
sys.path.insert(0, {root!r})
from gapmeter.servers.launch import launch
launch([sys.executable, "-c", {tree!r}, "{port}", {pids!r}, "polite"], {{}}, (), Path({log!r}),
       "http://127.0.0.1:{port}/", 20)
if {forks} and os.fork() == 0:
    time.sleep(100)  # a copy of ours that inherits every pipe must not keep the server alive
while Path({pids!r}).read_text().count("\\n") < 3:
    time.sleep(0.01)
print("ready", flush=True)
time.sleep(100)
"""


@contextlib.contextmanager
def a_parent(tmp_path: Path, forks: bool) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    pids = tmp_path / "pids"
    code = PARENT.format(
        root=str(ROOT), tree=TREE, port=free_port(), pids=str(pids), log=str(tmp_path / "log"), forks=forks
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert parent.stdout.readline() == "ready\n"
        yield parent, pids_in(pids)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)
        parent.wait()
        parent.stdout.close()


@pytest.mark.parametrize("forks", [False, True])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_orphan_is_left_when_the_parent_dies(tmp_path: Path, how: signal.Signals, forks: bool) -> None:
    with a_parent(tmp_path, forks) as (parent, pids):
        first, _, orphan = pids
        assert alive(first) and alive(orphan)
        os.kill(parent.pid, how)
        parent.wait()
        until(lambda: gone(pids), 20)


def test_a_command_that_ends_at_once_gives_its_reason(tmp_path: Path) -> None:
    code = "import sys; print('loading'); raise ValueError('no such quantization: fp3')"
    begun = time.monotonic()
    with pytest.raises(ServerFailed, match=r"exit code 1: ValueError: no such quantization: fp3 \(log: "):
        launch([sys.executable, "-c", code], {}, (), tmp_path / "log", "http://127.0.0.1:9/", 60)
    assert time.monotonic() - begun < 30  # noticed when it happened, not when the time was up


def test_a_reason_is_the_servers_own_though_an_earlier_one_wrote_into_the_same_log(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("torch.OutOfMemoryError: CUDA out of memory\n")
    code = "raise ValueError('no such quantization: fp3')"
    with pytest.raises(ServerFailed, match=r"exit code 1: ValueError: no such quantization: fp3 \(log: "):
        launch([sys.executable, "-c", code], {}, (), tmp_path / "log", "http://127.0.0.1:9/", 60)
    assert "out of memory" in (tmp_path / "log").read_text()


def test_a_program_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ServerFailed, match="cannot start /no/such/python: No such file"):
        launch(["/no/such/python"], {}, (), tmp_path / "log", "http://127.0.0.1:9/", 60)


def test_a_server_that_never_answers_times_out_with_what_was_asked_and_its_last_words(tmp_path: Path) -> None:
    code = "import os, time; print('waiting for weights', os.getpid(), flush=True); time.sleep(100)"
    log = tmp_path / "log"
    sentence = r"not ready within 0.5 s: GET http://127.0.0.1:9/health gave Connection refused.*waiting for weights"
    with pytest.raises(ServerFailed, match=sentence):
        launch([sys.executable, "-c", code], {}, (), log, "http://127.0.0.1:9/health", 0.5)
    assert gone([int(log.read_text().split()[-1])])


def test_a_server_that_answers_but_not_200_is_not_ready(tmp_path: Path) -> None:
    code = "import http.server as h,sys; h.test(HandlerClass=h.BaseHTTPRequestHandler, port=int(sys.argv[1]))"
    port = free_port()
    with pytest.raises(ServerFailed, match="gave 501"):
        launch([sys.executable, "-c", code, str(port)], {}, (), tmp_path / "log", f"http://127.0.0.1:{port}/", 1)


def test_a_death_in_mid_run_is_seen_and_explained(tmp_path: Path) -> None:
    server, pids = launch_tree(tmp_path)
    with server:
        assert server.poll() is None and server.failure() is None
        os.kill(server.pid, signal.SIGKILL)
        until(lambda: gone(pids_in(pids)), 20)
        until(lambda: server.poll() is not None, 10)
        failure = server.failure()
        assert failure is not None and server.exit_code == 137 and "signal 9" in str(failure)


def test_a_server_that_ends_with_a_number_that_is_no_signals_has_an_exit_code(tmp_path: Path) -> None:
    with start(["sh", "-c", "echo boom; exit 255"], {}, (), tmp_path / "log") as server:
        until(lambda: server.poll() is not None, 10)
        assert str(server.failure()).startswith("the server ended with exit code 255: boom")


@pytest.mark.parametrize("own", ["", "3"])
def test_the_server_runs_on_the_cores_it_was_given_with_as_many_threads_unless_the_user_says_how_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if own:
        monkeypatch.setenv("OMP_NUM_THREADS", own)
    core = min(os.sched_getaffinity(0))
    code = "import os; print('cores', os.sched_getaffinity(0), os.environ['OMP_NUM_THREADS'], os.environ['X'])"
    server = start([sys.executable, "-c", code], {"X": "set"}, (core,), tmp_path / "log")
    until(lambda: server.poll() is not None)
    assert (tmp_path / "log").read_text() == f"cores {{{core}}} {own or 1} set\n"
    assert server.stop() == 0


def test_a_port_in_use_is_an_error_and_a_free_one_is_none() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ServerFailed, match=f"port {port} on 127.0.0.1 cannot be used"):
            check_port(port)
    check_port(free_port())


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("", ""),
        ("one\ntwo\n\nthree\n\n", "two | three"),
        ("usage: api_server.py\napi_server.py: error: unrecognized arguments: --bogus\n",
         "api_server.py: error: unrecognized arguments: --bogus"),
        (VLLM_LOG, "ValueError: too few KV blocks"),
        ("\x1b[31mtorch.OutOfMemoryError: CUDA out of memory\x1b[0m\nnothing else\n",
         "torch.OutOfMemoryError: CUDA out of memory"),
        ("AError: 1\nBError: 2\nCError: 3\n", "AError: 1 | CError: 3"),
    ],
)  # fmt: skip
def test_the_reason_is_the_root_cause_of_the_log(tmp_path: Path, log: str, reason: str) -> None:
    path = tmp_path / "log"
    path.write_text(log)
    assert log_reason(path) == reason


def test_a_missing_log_has_no_reason(tmp_path: Path) -> None:
    assert log_reason(tmp_path / "none") == ""
