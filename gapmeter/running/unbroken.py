"""Work that a signal must not break off in the middle."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def unbroken() -> Iterator[None]:
    """Ctrl-C and SIGTERM during the block are heard at its end: KeyboardInterrupt is raised there.

    For imports: one that is broken off leaves half of a module behind, and sometimes the interpreter's import lock
    held. Does nothing outside the main thread, where signals are never raised.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard: list[int] = []

    def hear(number: int, _: FrameType | None) -> None:
        heard.append(number)

    before = {number: signal.signal(number, hear) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if heard:
        signal.raise_signal(heard[0])
