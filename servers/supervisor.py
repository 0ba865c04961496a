"""Stands between us and a server that we launched, so that no process of the server's tree outlives us.

Run as ``python -I supervisor.py PARENT_PID STATUS_FD CORES -- COMMAND...`` (standard library only; it starts in ten
milliseconds). It adopts every orphan of the server's tree (child subreaper), and ends the tree when asked to over
standard input, when standard input closes, when the parent dies in whatever way, or when the server itself ends.
On STATUS_FD it writes ``pid N`` at the start and ``exit CODE`` once the whole tree is gone.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_GRACE_S = 5.0  # when nobody is left to say how long


def main() -> int:
    parent, status_fd, cores = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    command = sys.argv[sys.argv.index("--") + 1 :]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if cores:
        os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signals: list[int] = []
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda signum, _: signals.append(signum))
    pid = _start(command, libc, status_fd)
    _tell(status_fd, f"pid {pid}\n")
    try:
        parent_fd = os.pidfd_open(parent)  # turns readable when the parent dies
    except OSError:
        parent_fd = -1  # a kernel without: the pipe remains
    code: int | None = None
    grace_s = 0.0
    if os.getppid() == parent:  # else it has died before we could watch it
        code, grace_s = _watch(pid, parent_fd, wake_read, signals)
    if code is None:
        code = _end_gently(pid, wake_read, grace_s)
    _kill_tree()
    _tell(status_fd, f"exit {code}\n")
    return 0


def _start(command: list[str], libc: ctypes.CDLL, status_fd: int) -> int:
    """Fork the server into a process group of its own; it dies with this supervisor, should that be killed."""
    supervisor = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != supervisor:
            os._exit(1)
        devnull = os.open(os.devnull, os.O_RDONLY)
        os.dup2(devnull, 0)
        os.set_inheritable(status_fd, False)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"cannot start {command[0]}: {error.strerror}\n".encode())
    os._exit(127)


def _watch(pid: int, parent_fd: int, wake_read: int, signals: list[int]) -> tuple[int | None, float]:
    """Wait for the server's end (its exit code) or for a reason to end it (None, and the grace in seconds)."""
    poller = select.poll()
    for fd in (0, wake_read, parent_fd):
        if fd >= 0:
            poller.register(fd, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poller.poll()}
        if wake_read in ready:  # before all else: whatever ends from here on wakes us again
            os.read(wake_read, 4096)
        code = _reap(pid)
        if code is not None:
            return code, 0.0
        if 0 in ready:
            words = os.read(0, 4096).split()
            return None, float(words[-1]) if words else _GRACE_S
        if parent_fd in ready or signals:
            return None, _GRACE_S


def _reap(pid: int) -> int | None:
    """Collect whatever has ended; the server's exit code if it is among them (128 + signal when it was killed)."""
    code = None
    while True:
        try:
            ended, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if ended == 0:
            return code
        if ended == pid:
            code = os.waitstatus_to_exitcode(status)
            code = code if code >= 0 else 128 - code


def _end_gently(pid: int, wake_read: int, grace_s: float) -> int:
    """SIGTERM to the server, then at most ``grace_s`` for it to leave; the exit code, 137 if it stayed.

    To the server alone: it ends its own children in its own order, and a second signal would kill one that is closing
    its files.
    """
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        pass  # it ended just now; the reaping below finds it
    deadline = time.monotonic() + grace_s
    while True:
        code = _reap(pid)
        if code is not None:
            return code
        left = deadline - time.monotonic()
        if left <= 0:
            return 128 + signal.SIGKILL
        select.select([wake_read], [], [], min(left, 0.5))
        try:
            os.read(wake_read, 4096)
        except BlockingIOError:
            pass  # the half second passed without a signal


def _kill_tree() -> None:
    """SIGKILL every descendant until there is none: orphans come to us, so none can slip away."""
    while True:
        for pid in _descendants(os.getpid()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        _reap(0)
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        time.sleep(0.01)


def _descendants(root: int) -> list[int]:
    """Process ids below ``root``, deepest last, from one look at /proc."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue  # gone meanwhile
            children.setdefault(int(fields[1]), []).append(int(name))
    tree = [root]
    for pid in tree:
        tree.extend(children.get(pid, []))
    return tree[1:]


def _tell(status_fd: int, line: str) -> None:
    try:
        os.write(status_fd, line.encode())
    except BrokenPipeError:
        pass  # the parent is gone; there is nobody to tell


if __name__ == "__main__":
    sys.exit(main())
