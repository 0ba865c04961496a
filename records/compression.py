"""Raw records once their run is over: each file compressed with Zstandard, under its name with ``.zst`` behind it.

Readers take either, since a run that was killed leaves its files as they were. What was written while the run went on
is never changed: a file is replaced once its compressed copy is whole.
"""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path

from gapmeter.scenarios.plain_file import open_plain

SUFFIX = ".zst"
_BLOCK = 1 << 22
_LITTLE = 1 << 30  # bytes that any file may hold
_MOST_TIMES = 200  # its own size that a larger one may hold: records take a tenth to a third


def compress(path: Path) -> Path:
    """Put ``path`` compressed in its place, if it is not yet; its new name.

    It stays as it is where the disk has no room for both, or where it is so uniform that ``open_record`` would refuse
    it. Raises OSError.
    """
    import pyarrow as pa

    if path.suffix == SUFFIX:
        return path
    target = path.with_name(path.name + SUFFIX)
    part = target.with_name(target.name + ".part")
    try:
        with open_plain(path) as source, part.open("wb") as file, pa.CompressedOutputStream(file, "zstd") as packed:
            while block := source.read(_BLOCK):
                packed.write(block)
        if path.stat().st_size > most_unpacked(part.stat().st_size):
            part.unlink()
            return path
        os.replace(part, target)
    except BaseException as error:
        part.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return path
        raise
    path.unlink()
    return target


def with_compressed(folder: Path, pattern: str) -> list[Path]:
    """Files of ``folder`` that match, each in the one form in which it is there, sorted."""
    plain = {path.name: path for path in folder.glob(pattern)}
    packed = {path.name.removesuffix(SUFFIX): path for path in folder.glob(pattern + SUFFIX)}
    return [path for _, path in sorted((packed | plain).items())]


def open_record(path: str | os.PathLike[str]) -> io.BufferedIOBase:
    """A raw file's content from its start. Raises OSError; reading raises ValueError where it cannot be unpacked."""
    file = open_plain(path)
    if not os.fspath(path).endswith(SUFFIX):
        return file
    return Unpacked(file)


class Unpacked(io.BufferedIOBase):
    """What a file that is compressed ``by`` zstd or gzip holds, unless that is more than records could be."""

    def __init__(self, file: io.BufferedReader, by: str = "zstd") -> None:
        import pyarrow as pa

        self._file, self._stream = file, pa.CompressedInputStream(pa.PythonFile(file), by)
        self._left = most_unpacked(os.fstat(file.fileno()).st_size)

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> bytes:
        if size is None or size < 0:
            return b"".join(iter(lambda: self._take(_BLOCK), b""))
        data = self._take(size)
        while len(data) < size and (more := self._take(size - len(data))):
            data += more
        return data

    def close(self) -> None:
        self._file.close()
        super().close()

    def _take(self, size: int) -> bytes:
        try:
            data: bytes = self._stream.read(size)
        except OSError as error:
            raise ValueError(f"it cannot be unpacked: {error}") from error
        self._left -= len(data)
        if self._left < 0:
            raise ValueError("it unpacks to more than records can be")
        return data


def most_unpacked(size: int) -> int:
    """How many bytes a compressed file of ``size`` may hold."""
    return max(_LITTLE, _MOST_TIMES * size)
