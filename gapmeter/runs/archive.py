"""A run's folder as one file to hand over, with the hashes of all that is in it, and without anybody's keys."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import os
import shlex
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, BinaryIO

from gapmeter import errors
from gapmeter.errors import UserError, unless_refused
from gapmeter.keys import REDACTED, Keys, bytes_of
from gapmeter.options import tell
from gapmeter.records import RunFolder
from gapmeter.records.compression import SUFFIX, Unpacked, most_unpacked, open_record
from gapmeter.report.command import Command
from gapmeter.runs.lock import locked
from gapmeter.scenarios.plain_file import check_folder, open_plain, read_json, sha256_of

HASHES = "hashes.json"
_MOST_FILES = 100_000
_MOST_BYTES = 64 << 30
_DEEPEST = 30  # folders in each other


def archive(folder: str | Path, target: str | Path | None = None) -> Path:
    """Write a run's folder into one file (None: its name with .tar.gz), and print its SHA-256 on standard error.

    Keys that stand in the manifest or the environment are replaced by REDACTED in every text. Raises
    UserError when there is no run, the file exists, or raw records hold a key.
    """
    folder = Path(folder)
    manifest = RunFolder(folder).manifest
    if not manifest.exists():
        raise UserError(f"{folder} is not a run's folder: it has no {manifest.name}", errors.USAGE)
    with unless_refused(f"{folder} is not a run's folder"):
        check_folder(folder)
    name = folder.resolve().name
    target = Path(f"{name}.tar.gz" if target is None else target)
    if not target.name.lower().endswith((".tar.gz", ".tgz")):
        raise UserError(f"{target}: write a name that ends in .tar.gz", errors.USAGE)
    if target.resolve().is_relative_to(folder.resolve()):
        text = f"{target} would lie in the folder that it is to hold; write another with -o, for instance"
        raise UserError(f"{text} -o {shlex.quote(str(folder.resolve().parent / target.name))}", errors.USAGE)
    if target.exists():
        raise UserError(f"{target} exists; write another with -o", errors.USAGE)
    try:
        keys = Keys.within(read_json(manifest))
    except ValueError as error:
        raise UserError(f"{folder}: {manifest.name} is damaged: {error}", errors.NOT_VALID) from error
    part = target.with_name(f".{target.name}.part")
    with locked(folder):  # without it the part may be another one's
        try:
            with unless_refused(f"{target} cannot be written"):
                with tarfile.open(part, "w:gz", compresslevel=6) as tar:
                    count = _write(tar, name, folder, keys)
                os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)
    digest, size_mb = sha256_of(target), target.stat().st_size / 1e6
    tell(f"{count} files, {size_mb:.1f} MB, SHA-256 {digest}")
    tell(f"send that hash separately from the file; to check it: {Command.of('verify', target)}")
    return target


@contextlib.contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """The folder that an archive holds, unpacked for as long as the block lasts. Raises UserError when it is none.

    Only plain files and folders below one folder are unpacked; anything else (links, devices, names that lead out,
    more than 64 GiB) raises UserError before a byte of it is written.
    """
    if not path.exists():
        raise UserError(f"{path} does not exist; write a run's folder or an archive of one", errors.USAGE)
    with unless_refused(f"{path} is not an archive"), open_plain(path, _MOST_BYTES, links=True) as file:
        start = file.read(512)
    if not start.startswith(b"\x1f\x8b") and start[257:262] != b"ustar":
        raise UserError(f"{path} is neither a folder nor an archive (.tar.gz)", errors.USAGE)
    with tempfile.TemporaryDirectory(prefix="gapmeter-archive-") as temporary:
        try:
            with tarfile.open(path) as tar:
                top = _check(path, tar)
                tar.extractall(temporary, filter="data")
        except (tarfile.TarError, EOFError, OSError, ValueError, OverflowError, MemoryError, zlib.error) as error:
            said = str(error).partition(":\n")[0] or type(error).__name__  # without what each method of packing says
            raise UserError(f"{path} cannot be unpacked: {said}", errors.NOT_VALID) from error
        folder = Path(temporary) / top
        try:
            yield folder
        except UserError as error:  # nobody but us knows where it was unpacked
            unpack = f"tar xf {shlex.quote(str(path))} && {Command.of('report', top)}"
            text = str(error).replace(str(Command.of("report", folder)), unpack)
            raise UserError(text.replace(str(folder), str(path)), error.exit_code) from error


def _check(path: Path, tar: tarfile.TarFile) -> str:
    """The one folder that all entries lie in. Raises UserError, at the first entry that a run's folder cannot have."""
    most = min(_MOST_BYTES, most_unpacked(path.stat().st_size), shutil.disk_usage(tempfile.gettempdir()).free)
    tops, size = set(), 0
    for count, entry in enumerate(tar, 1):
        parts = PurePosixPath(entry.name).parts
        size += entry.size
        if count > _MOST_FILES or len(parts) > _DEEPEST or size > most:
            text = f"{path} unpacks to more than a run's folder can be, or {tempfile.gettempdir()} has room for"
            raise UserError(text, errors.NOT_VALID)
        if not parts or entry.name.startswith("/") or ".." in parts or "\\" in entry.name:
            text = f"{path} holds {entry.name!r}, which leads out of its folder: it is not unpacked"
            raise UserError(text, errors.NOT_VALID)
        if not (entry.isreg() or entry.isdir()):
            raise UserError(f"{path} holds {entry.name!r}, which is no plain file", errors.NOT_VALID)
        tops.add(parts[0])
    if len(tops) != 1:
        raise UserError(f"{path} holds {len(tops)} folders, not a run's one", errors.NOT_VALID)
    return str(tops.pop())


def _write(tar: tarfile.TarFile, name: str, folder: Path, keys: Keys) -> int:
    """All files and their hashes, the list of hashes last. Returns how many files."""
    hashes: dict[str, str] = {}

    def add(inside: str, source: BinaryIO, modified_s: float) -> None:
        info = tarfile.TarInfo(f"{name}/{inside}")
        info.size, info.mtime, info.mode = source.seek(0, os.SEEK_END), int(modified_s), 0o644
        source.seek(0)
        tar.addfile(info, source)

    for path in sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink()):
        inside = path.relative_to(folder).as_posix()
        if inside == HASHES:  # of the archive that this was unpacked from
            continue
        clean = _without_keys(path, inside, keys)
        with open_plain(path) if clean is None else io.BytesIO(clean) as source:
            hashes[inside] = hashlib.file_digest(source, "sha256").hexdigest()
            add(inside, source, path.stat().st_mtime)
    add(HASHES, io.BytesIO(json.dumps({"version": 1, "files": hashes}, indent=1).encode()), 0.0)
    return len(hashes)


def _without_keys(path: Path, inside: str, keys: Keys) -> bytes | None:
    """A file's content without anybody's key; None for the file as it is, which holds none.

    Raises UserError where leaving it out would break the evidence.
    """
    spelled = [key for key in keys.spellings if key != REDACTED]  # as an archive's own manifest calls each
    if path.suffix == ".parquet":
        return _table_without_keys(path, spelled, keys) if spelled else None
    with open_plain(path) as file:
        zipped = file.read(2) == b"\x1f\x8b"
        try:
            with Unpacked(open_plain(path), "gzip") if zipped else open_record(path) as text:
                if not holds_any(text, list(map(bytes_of, spelled))):
                    return None
        except ValueError as error:
            raise UserError(f"{path} cannot be read as a whole: {error}", errors.NOT_VALID) from error
        if inside.split("/")[0] in ("requests", "probe", "telemetry") or path.suffix == SUFFIX:
            problem = f"{path} holds a key, and a raw record cannot be changed: do not share it"
            raise UserError(problem, errors.NOT_VALID)
        file.seek(0)
        data = file.read()
    return gzip.compress(keys.out_of_bytes(gzip.decompress(data)), mtime=0) if zipped else keys.out_of_bytes(data)


def holds_any(file: IO[bytes] | io.BufferedIOBase, words: Sequence[bytes], block: int = 1 << 22) -> bool:
    """Whether a word stands anywhere in what is left of a file, of which it reads ``block`` bytes at a time."""
    most, rest = max(map(len, words), default=0), b""
    while came := file.read(block):
        seen = rest + came
        if any(word in seen for word in words):
            return True
        rest = seen[max(len(seen) - most + 1, 0) :]  # a word may begin in one block and end in the next
    return False


def _table_without_keys(path: Path, spelled: Sequence[str], keys: Keys) -> bytes | None:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    from gapmeter.analysis.tables import check_table

    check_table(path)
    table = pq.ParquetFile(path)
    schema, kinds = table.schema_arrow, (pa.string(), pa.large_string())
    names = [column.name for column in schema if column.type in kinds]
    spelled = [key for key in spelled if key.encode(errors="ignore").decode() == key]  # what is no text is in none
    texts = (pc.unique(column) for batch in table.iter_batches(columns=names) for column in batch.columns)
    if any(pc.any(pc.match_substring(text, key)).as_py() for text in texts for key in spelled):
        raise UserError(f"{path} holds a key among its values: do not hand it over", errors.NOT_VALID)
    noted = schema.metadata or {}  # it names the command that repeats the run
    clean = {name: keys.out_of_bytes(value) for name, value in noted.items()}
    if clean == noted:
        return None
    out = pa.BufferOutputStream()
    with pq.ParquetWriter(out, schema.with_metadata(clean), compression="zstd") as writer:
        for batch in table.iter_batches():
            writer.write_batch(batch)
    return bytes(out.getvalue().to_pybytes())
