"""What ends a command from outside: Ctrl-C, SIGTERM, a terminal that is closed. Each is one KeyboardInterrupt."""

from __future__ import annotations

import io
import os
import signal
import sys
import time
from types import FrameType
from typing import Any, TextIO

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ONCE_NS = 1_000_000_000  # a terminal that is closed says so twice: the kernel, and then the shell
_RETRY_S = 0.02
_IMPORT = "<frozen importlib._bootstrap>"
# A destructor, where an exception is shown and forgotten; pydantic's, where it is reported as a mistake in the model;
# subprocess's, where a process has been started that nobody could end yet; and where the command leaves already.
_UNBROKEN = ("__del__", "complete_model_class", "_execute_child", "ignore_signals")
_OUTERMOST = "program"  # what it does by itself is to begin and to leave


def interrupt_on_signals() -> None:
    """Signals that end a command raise KeyboardInterrupt from now on, in the main thread, never within an import.

    An import that is broken off leaves half of a module behind, and sometimes the interpreter's import lock held; the
    making of a model, on its first use, is no better. What this process was started to ignore (by ``nohup``, or in a
    script's background) stays ignored.
    """
    heard_ns = -_ONCE_NS

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal heard_ns
        if number == signal.SIGHUP:
            again = time.monotonic_ns() < heard_ns + _ONCE_NS
            heard_ns = time.monotonic_ns()
            if again:
                return
            if output_is_gone():  # what is said there has nowhere to go
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if _must_not_break(frame):
            signal.setitimer(signal.ITIMER_REAL, _RETRY_S)
        else:
            raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    for number in ending_signals():
        signal.signal(number, interrupt)


def ending_signals() -> list[signal.Signals]:
    """The signals that end this process, but for those that it was started to ignore."""
    return [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]


def ignore_signals() -> None:
    """The exit code stands: what comes now is too late to change it, and only breaks off the interpreter's leaving."""
    for number in (*_ENDING, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)


def tolerate_lost_output() -> LossyOutput:
    """What nobody reads (a closed terminal or pipe), or a full disk does not take, is lost: that ends no run.

    Returns where standard output goes from now on.
    """
    # A stream that was closed goes nowhere; else the next file opened would be in its place.
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "w" if number else "r", closefd=False))
    sys.stderr = _lossy(sys.stderr, line_buffering=True)[0]
    sys.stdout, raw = _lossy(sys.stdout, line_buffering=sys.stdout.isatty())
    return raw


def _lossy(stream: TextIO, *, line_buffering: bool) -> tuple[TextIO, LossyOutput]:
    raw = LossyOutput(stream.fileno(), "w", closefd=False)
    encoding = stream.encoding
    buffer = io.BufferedWriter(raw)
    return io.TextIOWrapper(buffer, encoding=encoding, errors="backslashreplace", line_buffering=line_buffering), raw


def output_is_gone() -> bool:
    """Whether standard output was a terminal that has been closed."""
    try:
        return os.write(1, b"") < 0
    except OSError:
        return True


class LossyOutput(io.FileIO):
    """Takes everything; ``lost``: why something of it has gone nowhere, None while nothing has."""

    lost: OSError | None = None

    def write(self, data: Any, /) -> int:
        if self.lost is None:  # what comes after a gap would pass for the whole
            try:
                return super().write(data)
            except OSError as error:
                self.lost = error
        return memoryview(data).nbytes


def _must_not_break(frame: FrameType | None) -> bool:
    """Whether an exception raised here would not end the command, or not cleanly."""
    if frame is not None and frame.f_code.co_name == _OUTERMOST:
        return True
    while frame is not None:
        if frame.f_code.co_filename == _IMPORT or frame.f_code.co_name in _UNBROKEN:
            return True
        frame = frame.f_back
    return False
