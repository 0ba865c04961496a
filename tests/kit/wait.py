"""Waiting for what happens elsewhere, and with less than a machine has."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import resource
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")


def until(look: Callable[[], T], seconds: float = 60) -> T:
    """What ``look`` gives once it gives something."""
    deadline = time.monotonic() + seconds
    while not (seen := look()):
        assert time.monotonic() < deadline, f"it did not happen within {seconds:g} s"
        time.sleep(0.01)
    return seen


async def eventually(look: Callable[[], object], seconds: float = 10) -> None:
    """The same in an event loop, where ``look`` may be a coroutine function."""
    async with asyncio.timeout(seconds):
        while not (await seen if inspect.isawaitable(seen := look()) else seen):  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.005)


@contextlib.contextmanager
def limited(what: int, most: int) -> Iterator[None]:
    """This process and what it starts meanwhile have at most so much of a resource (RLIMIT_...)."""
    before = resource.getrlimit(what)
    resource.setrlimit(what, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, before)
