"""The one way to open what a stranger may have made: run folders, archives, scenarios and the files that they name.

A FIFO, a device, a socket and a link in a run's folder are refused before a byte is read, and so is what is larger than
this machine's memory. Every refusal is an OSError that names the file and says why. And ``replace_text``, for files of
our own.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import stat
from pathlib import Path
from typing import Any

MOST_TEXT = 64 << 20
_KINDS = {
    stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder", stat.S_IFLNK: "a link",
}  # fmt: skip


def open_plain(path: str | os.PathLike[str], most: int | None = None, *, links: bool = False) -> io.BufferedReader:
    """The file, to be read from its start; ``links``: it may be a link to one. Raises OSError.

    ``most`` bytes at most, by default as many as the machine has memory.
    """
    name = os.fspath(path)
    _check(name, os.stat(name, follow_symlinks=links), most)
    fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # it may have become a pipe, which would block
    try:
        _check(name, os.fstat(fd), most)
        return open(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def read_plain(path: str | os.PathLike[str], most: int = MOST_TEXT, *, links: bool = False) -> bytes:
    """The content of a file that ``open_plain`` opens. Raises OSError."""
    with open_plain(path, most, links=links) as file:
        return file.read(min(most, os.fstat(file.fileno()).st_size))  # memory for so much and no more is taken


def read_json(path: str | os.PathLike[str]) -> Any:
    """What a JSON file says. Raises OSError, ValueError."""
    try:
        return json.loads(read_plain(path))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def replace_text(path: Path, text: str) -> None:
    """Replace ``path`` in one step, so that a reader or a kill never meets half a file. Raises OSError."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def sha256_of(path: str | os.PathLike[str]) -> str:
    """A file's SHA-256 in hexadecimal. Raises OSError."""
    with open_plain(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_folder(folder: Path) -> None:
    """Raises OSError for the first thing in a run's folder, at any depth, that is neither folder nor plain file."""
    with os.scandir(folder) as entries:
        found = list(entries)
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            check_folder(Path(entry.path))
        else:
            _check(entry.path, entry.stat(follow_symlinks=False), None)


def is_plain(path: Path) -> bool:
    """Whether it is a file, and neither a link nor anything else."""
    return path.is_file() and not path.is_symlink()


def memory_bytes() -> int:
    """This machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _check(name: str, found: os.stat_result, most: int | None) -> None:
    if not stat.S_ISREG(found.st_mode):
        what = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {what}, not a plain file", name)
    if found.st_size > (memory_bytes() if most is None else most):
        limit = "this machine's memory" if most is None else f"{most:,} bytes"
        raise OSError(errno.EFBIG, f"its {found.st_size:,} bytes are more than {limit}", name)
