"""One connection, one open file: asking for as many as a process may have, and saying so when that is too few."""

from __future__ import annotations

import resource

SPARE = 240  # the loop's own, records, logs, libraries


def allow_many_files() -> int:
    """Raise this process's limit of open files to the highest that it may have; returns that."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


def too_few_files(streams: int, most: int) -> str:
    """Why a process that may open ``most`` files cannot hold so many streams at once, with the remedy; "" if it can."""
    wanted = streams + SPARE
    if most in (resource.RLIM_INFINITY, -1) or most >= wanted:
        return ""
    return (
        f"{streams:,} streams at once need {wanted:,} open files, and a process may have {most:,} here: raise the limit"
        f" (as root: ulimit -Hn {wanted}; in a container: --ulimit nofile={wanted}), or use more generator processes"
    )
