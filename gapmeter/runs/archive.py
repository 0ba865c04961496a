"""A run's folder as one file to hand over, with the hashes of all that is in it, and without anybody's keys."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import lzma
import os
import shutil
import stat
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import IO

from gapmeter import errors
from gapmeter.errors import UserError, unless_refused
from gapmeter.options import tell
from gapmeter.scenarios.plain_file import check_folder, open_plain, read_plain, sha256_of, unzipped
from gapmeter.study.keys import Keys

HASHES = "hashes.json"
_MOST_FILES = 100_000
_MOST_BYTES = 64 << 30
_UNREADABLE = (RuntimeError, ValueError, zlib.error, lzma.LZMAError)  # a password, an unknown method, damage


def archive(folder: str | Path, target: str | Path | None = None) -> Path:
    """Write a run's folder into one file (None: its name with .tar.gz), and print its SHA-256 on standard error.

    Keys that stand in the manifest or the environment are replaced by REDACTED in every text. Raises
    UserError when there is no run, the file exists, or raw records hold a key.
    """
    folder = Path(folder)
    if not (folder / "manifest.json").exists():
        raise UserError(f"{folder} is not a run's folder: it has no manifest.json", errors.USAGE)
    with unless_refused(f"{folder} is not a run's folder"):
        check_folder(folder)
    name = folder.resolve().name
    target = Path(f"{name}.tar.gz" if target is None else target)
    if not target.name.lower().endswith((".tar.gz", ".tgz", ".zip")):
        raise UserError(f"{target}: write a name that ends in .tar.gz or .zip", errors.USAGE)
    if target.exists():
        raise UserError(f"{target} exists; write another with -o", errors.USAGE)
    try:
        keys = Keys.within(json.loads(read_plain(folder / "manifest.json")))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{folder}: manifest.json is damaged: {error}", errors.NOT_VALID) from error
    part = target.with_name(f".{target.name}.part")
    try:
        with unless_refused(f"{target} cannot be written"):
            with part.open("wb") as file:
                count = _write(file, name, folder, keys, as_zip=target.suffix.lower() == ".zip")
            os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
    digest, size_mb = sha256_of(target), target.stat().st_size / 1e6
    tell(f"{count} files, {size_mb:.1f} MB, SHA-256 {digest}")
    tell(f"say that hash by another way than the file; then gapmeter verify {target}")
    return target


@contextlib.contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """The folder that an archive holds, unpacked for as long as the block lasts. Raises UserError when it is none.

    Only plain files and folders below one folder are unpacked; anything else (links, devices, names that lead out,
    more than 64 GiB) raises UserError before a byte of it is written.
    """
    if not path.exists():
        raise UserError(f"{path} does not exist; write a run's folder or an archive of one", errors.USAGE)
    with unless_refused(f"{path} is no archive"), open_plain(path, _MOST_BYTES, links=True) as file:
        start = file.read(512)
    if not start.startswith((b"PK", b"\x1f\x8b")) and start[257:262] != b"ustar":
        raise UserError(f"{path} is no folder and no archive (.tar.gz or .zip)", errors.USAGE)
    with tempfile.TemporaryDirectory(prefix="gapmeter-archive-") as temporary:
        try:
            if zipfile.is_zipfile(path):
                with zipfile.ZipFile(path) as pack:
                    modes = [(entry.external_attr >> 16) & 0o170000 for entry in pack.infolist()]
                    top = _check(path, [
                        (entry.filename, entry.file_size, mode in (0, stat.S_IFREG, stat.S_IFDIR))
                        for entry, mode in zip(pack.infolist(), modes, strict=True)
                    ])  # fmt: skip
                    pack.extractall(temporary)
            else:
                with tarfile.open(path) as tar:
                    top = _check(path, [(each.name, each.size, each.isreg() or each.isdir()) for each in tar])
                    tar.extractall(temporary, filter="data")
        except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError, *_UNREADABLE) as error:
            raise UserError(f"{path} cannot be unpacked: {error}", errors.NOT_VALID) from error
        yield Path(temporary) / top


def _check(path: Path, entries: Sequence[tuple[str, int, bool]]) -> str:
    """The one folder that all entries (name, size, whether it is a plain file or a folder) lie in. Raises UserError."""
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if len(entries) > _MOST_FILES or sum(size for _, size, _ in entries) > min(_MOST_BYTES, free):
        raise UserError(f"{path} unpacks to more than a run's folder can be, or {tempfile.gettempdir()} has room for", errors.NOT_VALID)
    tops = set()
    for name, _, is_plain in entries:
        parts = PurePosixPath(name).parts
        if not parts or name.startswith("/") or ".." in parts or "\\" in name or "\0" in name:
            text = f"{path} holds {name!r}, which leads out of its folder: it is not unpacked"
            raise UserError(text, errors.NOT_VALID)
        if not is_plain:
            raise UserError(f"{path} holds {name!r}, which is no plain file", errors.NOT_VALID)
        tops.add(parts[0])
    if len(tops) != 1:
        raise UserError(f"{path} holds {len(tops)} folders, not a run's one", errors.NOT_VALID)
    return str(tops.pop())


def _write(file: IO[bytes], name: str, folder: Path, keys: Keys, *, as_zip: bool) -> int:
    """All files and their hashes, the list of hashes last. Returns how many files."""
    hashes: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        if as_zip:
            pack = stack.enter_context(zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED))
        else:
            tar = stack.enter_context(tarfile.open(fileobj=file, mode="w:gz", compresslevel=6))

        def add(inside: str, data: bytes, modified_s: float) -> None:
            if as_zip:
                pack.writestr(f"{name}/{inside}", data)
                return
            info = tarfile.TarInfo(f"{name}/{inside}")
            info.size, info.mtime, info.mode = len(data), int(modified_s), 0o644
            tar.addfile(info, io.BytesIO(data))

        for path in sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink()):
            inside = path.relative_to(folder).as_posix()
            data = _without_keys(path, inside, keys)
            hashes[inside] = hashlib.sha256(data).hexdigest()
            add(inside, data, path.stat().st_mtime)
        add(HASHES, json.dumps({"version": 1, "files": hashes}, indent=1).encode(), 0.0)
    return len(hashes)


def _without_keys(path: Path, inside: str, keys: Keys) -> bytes:
    """A file's content without anybody's key. Raises UserError where leaving it out would break the evidence."""
    with open_plain(path) as file:
        data = file.read()
    zipped = data.startswith(b"\x1f\x8b")
    text = unzipped(data) if zipped else data
    clean = keys.out_of_bytes(text)
    if clean == text:
        return data
    if inside.split("/")[0] in ("requests", "probe", "telemetry"):
        raise UserError(
            f"{path} holds a key, and a raw record cannot be changed: do not hand it over", errors.NOT_VALID
        )
    if path.suffix != ".parquet":
        return gzip.compress(clean, mtime=0) if zipped else clean
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(path)  # its metadata names the command that repeats the run
    about = {key: keys.out_of_bytes(value) for key, value in (table.schema.metadata or {}).items()}
    out = pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata(about), out)
    data = bytes(out.getvalue().to_pybytes())
    if keys.out_of_bytes(data) != data:
        raise UserError(f"{path} holds a key among its values: do not hand it over", errors.NOT_VALID)
    return data


