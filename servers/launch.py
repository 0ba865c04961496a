"""Launching a server as a child: on cores of its own, its log kept, awaited until it answers, and ended for certain.

Between us and the server stands a supervisor (servers/supervisor.py), so that Ctrl-C, a crash or ``kill -9`` of ours
leaves nothing of the server's tree behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from gapmeter.servers.http_get import HttpGet, NoAnswer

LOOPBACK = "127.0.0.1"
_SUPERVISOR = Path(__file__).with_name("supervisor.py")
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_POLL_S = 0.05
_DECORATION = re.compile(
    r"\x1b\[[0-9;]*m|^(\(\w+(?: pid=\d+)?\)\s*)+|^(ERROR|CRITICAL)\s+\d\d-\d\d [\d:]+ \[[^\]]*\]\s*"
)
_CAUSE = re.compile(r"^[\w.]*(Error|Exception|Exit|Failed|Failure|Interrupt)\b(:| \().*|.*\berror: .+|^cannot start .*")
_CONSEQUENCE = re.compile(r"Engine core initialization failed|See root cause above|WorkerProc initialization failed")

Clean = Callable[[bytes], bytes]


class ServerFailed(RuntimeError):
    """A server did not start, never became ready, or died. The message is a sentence for the user."""


@dataclass(frozen=True, slots=True)
class Service:
    """What a server is launched for: to serve ``model``, a folder or a hub id, as ``name``.

    ``max_batch`` caps the requests that run together. ``args`` are further flags of the engine (``{"max_queue": 64}``;
    True is a bare flag, False its negation, None leaves it out), which win over ours. ``cores``: those that the server
    may use; empty: any.
    """

    model: Path | str | None
    name: str
    port: int
    max_batch: int
    precision: str
    args: Mapping[str, object] = field(default_factory=dict)
    cores: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """What to execute, and the environment variables that it needs beside ours."""

    command: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)


def with_user_flags(flags: Mapping[str, object], args: Mapping[str, object]) -> dict[str, object]:
    """An engine's flags with the user's over them, which may be written with dashes or underscores."""
    return {**flags, **{key.lstrip("-").replace("_", "-"): value for key, value in args.items()}}


def flag_words(flags: Mapping[str, object]) -> list[str]:
    """``--flag value`` words: True is the bare flag, False its negation, None leaves it out, structures are JSON."""
    words: list[str] = []
    for name, value in flags.items():
        if value is True:
            words.append(f"--{name}")
        elif value is False:
            words.append(f"--no-{name}")
        elif value is not None:
            words += [f"--{name}", json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return words


class ServerProcess:
    """A running child and its supervisor. Use as a context manager, or call ``stop``."""

    def __init__(
        self, supervisor: subprocess.Popen[bytes], status_fd: int, log_path: Path, log_from: int, clean: Clean
    ) -> None:
        self._supervisor = supervisor
        self.clean = clean
        self._status_fd = status_fd
        self._said = b""
        self.log_path, self._log_from = log_path, log_from  # an earlier server may have written before that
        self.pid = 0
        self.exit_code: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def poll(self) -> int | None:
        """The exit code once the whole tree is gone (128 + signal for a kill), None while it runs. Never blocks."""
        self._listen(0)
        return self.exit_code

    def failure(self) -> ServerFailed | None:
        """What to tell the user when the server has died by itself; None while it runs."""
        code = self.poll()
        if code is None:
            return None
        ending = f"signal {code - 128}" if 128 < code <= 192 else f"exit code {code}"
        return self.failed(f"the server ended with {ending}")

    def failed(self, what: str, before_reason: str = ": ") -> ServerFailed:
        """``what`` went wrong, with the reason that the log gives."""
        reason = log_reason(self.log_path, self.clean, self._log_from)
        why = f"{before_reason}{reason}" if reason else ", and its log is empty"
        return ServerFailed(f"{what}{why} (log: {self.log_path})")

    def stop(self, grace_s: float = 10.0) -> int:
        """SIGTERM to the server, ``grace_s`` to leave, then SIGKILL to what is left of its tree. Returns the exit code.

        A second call does nothing. Raises ServerFailed if even the supervisor does not answer.
        """
        self._supervisor.send_signal(signal.SIGCONT)  # a supervisor that is held could not hear us
        if self._supervisor.stdin and not self._supervisor.stdin.closed:
            with contextlib.suppress(BrokenPipeError), self._supervisor.stdin as pipe:  # broken: it has ended by itself
                pipe.write(f"stop {grace_s}\n".encode())
        deadline = time.monotonic() + grace_s + 30
        while self.exit_code is None and time.monotonic() < deadline:
            self._listen(0.5)
        if self.exit_code is None:
            self._supervisor.kill()  # the server dies with it (PR_SET_PDEATHSIG)
            raise ServerFailed(f"process {self.pid} could not be ended")
        self._supervisor.wait()
        with contextlib.suppress(OSError):  # a full disk, or a folder that somebody has removed
            said = self.log_path.read_bytes()
            if (clean := self.clean(said)) != said:
                self.log_path.write_bytes(clean)
        return self.exit_code

    def _listen(self, timeout_s: float) -> None:
        if self.exit_code is not None or not select.select([self._status_fd], [], [], timeout_s)[0]:
            return
        heard = os.read(self._status_fd, 4096)
        self._said += heard
        for line in self._said.decode().splitlines():
            word, number = line.split()
            if word == "pid":
                self.pid = int(number)
            else:
                self.exit_code = int(number)
        if not heard and self.exit_code is None:
            self.exit_code = 128 + 9  # the supervisor was killed, and the server with it
        if self.exit_code is not None:
            os.close(self._status_fd)


def launch(
    command: Sequence[str],
    env: Mapping[str, str],
    cores: Sequence[int],
    log_path: Path,
    ready_url: str,
    timeout_s: float,
    *,
    meanwhile: Callable[[], None] | None = None,
    on_wait: Callable[[float], None] | None = None,
    clean: Clean = bytes,
) -> ServerProcess:
    """Start ``command`` on ``cores`` (empty: anywhere) and return once ``ready_url`` answers 200.

    ``env`` is added to ours; thread counts follow ``cores`` unless either names them. ``meanwhile`` is called once,
    while it starts: work that then costs nobody time. ``on_wait`` hears the seconds waited so far, about once a
    second. ``clean`` takes keys out of what the server says: out of a failure's reason at once, out of its log when
    it has ended. Raises ServerFailed when the server ends first or is not ready in ``timeout_s``; by then nothing
    of it runs any more, as on any other exception.
    """
    server = start(command, env, cores, log_path, clean)
    try:
        if meanwhile:
            meanwhile()
        _await_ready(server, ready_url, timeout_s, on_wait)
    except BaseException:
        server.stop(grace_s=3.0)
        raise
    return server


def start(
    command: Sequence[str], env: Mapping[str, str], cores: Sequence[int], log_path: Path, clean: Clean = bytes
) -> ServerProcess:
    """Start ``command`` under a supervisor without waiting for it. Raises ServerFailed if the log cannot be made."""
    threads = {name: str(len(cores)) for name in _THREAD_VARIABLES} if cores else {}
    status_read, status_write = os.pipe()
    arguments = [str(os.getpid()), str(status_write), ",".join(map(str, cores)), "--", *command]
    try:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            log_from = log.tell()
            supervisor = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_SUPERVISOR), *arguments],
                env={**threads, **os.environ, **env},
                stdin=subprocess.PIPE, stdout=log, stderr=log,
                bufsize=0, pass_fds=(status_write,), start_new_session=True,
            )  # fmt: skip
    except OSError as error:
        os.close(status_read)
        raise ServerFailed(f"cannot start the server: {error}") from error
    finally:
        os.close(status_write)
    return ServerProcess(supervisor, status_read, log_path, log_from, clean)


def _await_ready(server: ServerProcess, url: str, timeout_s: float, on_wait: Callable[[float], None] | None) -> None:
    begun = last_said = now = time.monotonic()
    answer = ""
    while now - begun <= timeout_s:
        failure = server.failure()
        if failure:
            raise failure
        answer = _ask(url)
        if answer == "200":
            return
        now = time.monotonic()
        if on_wait and now - last_said >= 1:
            last_said = now
            on_wait(now - begun)
        time.sleep(_POLL_S)
    late = f"the server was not ready within {timeout_s:g} s: GET {url} gave {answer}"
    raise server.failed(late, "; its log ends with: ")


def _ask(url: str) -> str:
    """The status code of a GET as text, or the plain name of what went wrong."""
    with contextlib.closing(HttpGet(url, seconds=2)) as server:
        try:
            return str(server.get("").status)
        except NoAnswer as error:
            return str(error)


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as sock:
        sock.bind((LOOPBACK, 0))
        port: int = sock.getsockname()[1]
        return port


def check_port(port: int) -> None:
    """Raises ServerFailed when a server could not listen on ``port``."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((LOOPBACK, port))
        except OSError as error:
            raise ServerFailed(
                f"port {port} on {LOOPBACK} cannot be used ({error.strerror}); name another, or none to have a "
                "free one picked"
            ) from error


def log_reason(log_path: Path, clean: Clean = bytes, from_byte: int = 0) -> str:
    """What in a log, ``from_byte`` on, best says why its process ended: errors of the last 400 lines, root cause first.

    Falls back to the last lines that are not blank; "" for an empty or missing log.
    """
    try:
        with log_path.open("rb") as file:
            file.seek(max(from_byte, file.seek(0, os.SEEK_END) - 200_000))
            text = clean(file.read()).decode(errors="replace")
    except OSError:
        return ""
    lines = []
    for line in text.splitlines()[-400:]:
        while (plain := _DECORATION.sub("", line, count=1)) != line:  # vLLM's colors, process and level marks
            line = plain
        if line.strip():
            lines.append(line)
    causes = list(dict.fromkeys(line.strip() for line in lines if _CAUSE.match(line)))
    roots = [line for line in causes if not _CONSEQUENCE.search(line)] or causes
    picked = roots if len(roots) <= 2 else [roots[0], roots[-1]]
    return " | ".join(line[:500] for line in picked or [line.strip() for line in lines[-2:]])
