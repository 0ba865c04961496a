"""A process of ours beside a run: off the generator's cores, unheard by Ctrl-C, and gone when the block ends."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path


def cores_off(generator: Sequence[int]) -> tuple[int, ...]:
    """All cores that this process may use but the generator's; all of them where it has every one."""
    usable = os.sched_getaffinity(0)
    return tuple(sorted(usable - set(generator) or usable))


@contextlib.contextmanager
def beside(
    module: str, spec: str, log: Path, *, grace_s: float, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """``python -m MODULE SPEC``, what it says of itself in ``log``, for as long as the block lasts.

    It is in a session of its own, so that Ctrl-C is for the run. Its standard input ends with the block; what has not
    left ``grace_s`` later is killed.
    """
    with log.open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, spec], env=environment, bufsize=0, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=said, start_new_session=True,
        )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    try:
        yield process
    finally:
        process.stdin.close()
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def first_line(process: subprocess.Popen[bytes], patience_s: float) -> str:
    """What it prints first, without the line's end; "" when it ends or the time is over before."""
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], patience_s)
    return process.stdout.readline().decode().strip() if readable else ""
