"""A folder that one gapmeter is at work in: kept from every other, which may ask it to stop."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from gapmeter import errors
from gapmeter.errors import UserError

_ours: set[tuple[int, int]] = set()  # folders that this process keeps to itself: device and inode
_STOP = "stop"  # a file that asks for it
_LOOK_S = 0.2  # how long a folder may be locked by one who only asks whether it is


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep a folder from every other process meanwhile. Raises UserError when another has it."""
    found = folder.stat()
    if (found.st_dev, found.st_ino) in _ours:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        until_s = time.monotonic() + _LOOK_S
        while _lock(descriptor, fcntl.LOCK_EX) is False:
            if time.monotonic() > until_s:
                text = f"another gapmeter is at work in {folder}; wait until it has ended, or name another folder"
                raise UserError(text, errors.USAGE)
            time.sleep(_LOOK_S / 10)
        _ours.add((found.st_dev, found.st_ino))
        try:
            yield
        finally:
            is_asked_to_stop(folder)  # once its load is over nobody looks
            _ours.discard((found.st_dev, found.st_ino))
    finally:
        os.close(descriptor)


def is_locked(folder: Path) -> bool | None:
    """Whether a gapmeter is at work in a folder; None on a file system without locks. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        is_free = _lock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)
    return None if is_free is None else not is_free


def ask_to_stop(folder: Path) -> None:
    """Ask the run that goes on there to end as by Ctrl-C; it looks four times a second. Raises OSError."""
    (folder / _STOP).touch()


def is_asked_to_stop(folder: Path) -> bool:
    """Whether somebody has asked so; what was asked is done with."""
    try:
        (folder / _STOP).unlink()
    except OSError:
        return False
    return True


def _lock(descriptor: int, kind: int) -> bool | None:
    """Lock it at once: False where another process has it, None on a file system without locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
