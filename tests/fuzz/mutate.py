"""Valid examples made wrong as random bytes seldom are: in their structure, down to the files in archives."""

from __future__ import annotations

import gzip
import io
import json
import random
import struct
import tarfile
import warnings
import zipfile
from typing import Any

import numpy as np
from gapmeter_probe.records import FILE_HEADER, HEAD, MAGIC, SPAN

from gapmeter.records.reader import frames

# What stands where something else should; DEEP and LONG are written out when the text is made.
_DEEP, _LONG = "\x00deep\x00", "\x00long\x00"
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**53 + 1, -(2**63), 2**63, 2**64, 10**30, 10**400, 0.5, -0.0, 1e-320, 1e308,
    float("nan"), float("inf"), float("-inf"), "", " ", "0", "-5", "1e999", "nan", "ä", "\ud800", "\x00", "\x1b[2J",
    "\u202e", "../../x", "/dev/zero", "x" * 5_000, [], [[]], {}, {"": None}, [None], [0, 0], [-1, 1], {"a": 1}, _DEEP,
    _LONG,
)  # fmt: skip
_WORDS = (0, 1, 7, 0x7F, 0xFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
_PIECES = (
    b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\xc3", b"\r\n", b"\n\n", b"{", b"[" * 3_000, b'"', b"]",
    b"}", b",", b": ", b"- ", b"&a ", b"*a", b"!!python/x ", b"? ", b"null", b"NaN", b"-1", b"9" * 5_000, b"1e999",
    b".inf", b"\t", b"#",
)  # fmt: skip


def mutated(data: bytes, at: random.Random) -> bytes:
    """The data with one to four things wrong, in its structure where it has one that is known, else in its bytes."""
    for _ in range(at.choice((1, 1, 1, 2, 4))):
        data = _mutated_once(data, at)
    return data


def _mutated_once(data: bytes, at: random.Random) -> bytes:
    is_tar = data[257:262] == b"ustar"
    if at.random() < (0.01 if is_tar else 0.2):
        return _bytes(data, at)
    try:
        if data.startswith(b"PK"):
            return _zip(data, at)
        if data.startswith(b"\x1f\x8b"):
            return gzip.compress(_mutated_once(gzip.decompress(data), at), 1, mtime=0)
        if is_tar:
            return _tar(data, at)
        if data.startswith(b"PAR1"):
            return _parquet(data, at)
        if data.startswith(MAGIC):
            return _frame(data, at)
        head, gap, body = data.partition(b"\r\n\r\n")
        if gap and head.startswith(b"HTTP/1"):
            return _answer(head, body, at)
        if data.lstrip()[:1] in (b"{", b"["):
            return _json(data, at)
    except Exception:  # noqa: BLE001 - it was mutated before, and has that structure no longer
        return _bytes(data, at)
    return _bytes(data, at)


def _bytes(data: bytes, at: random.Random) -> bytes:
    place, other = at.randrange(len(data) + 1), at.randrange(len(data) + 1)
    length = at.choice((0, 1, 4, 8, 64))
    match at.randrange(9):
        case 0:
            return data[:place]
        case 1:
            return data[:place] + data[place + length :]
        case 2:
            return data[:place] + data[other : other + length] + data[place:]
        case 3:
            return data[:place] + at.choice(_PIECES) + data[place + at.choice((0, length)) :]
        case 4:
            return data[:place] + at.randbytes(length) + data[place + length :]
        case 5 | 6:  # a number in its place, as binary records have them
            size = at.choice((2, 4, 8))
            place -= place % size
            number = struct.pack("<Q", at.choice(_WORDS))[:size]
            return data[:place] + number + data[place + size :]
        case 7:
            lines = data.splitlines(keepends=True) or [b""]
            line = at.randrange(len(lines))
            lines[line:line] = [at.choice(lines)] * at.choice((1, 1, 50))
            return b"".join(lines)
        case _:
            try:
                return data.decode().encode(at.choice(("utf-16", "utf-32", "latin-1", "utf-8-sig")))
            except UnicodeError:
                return data[::-1]


def _frame(data: bytes, at: random.Random) -> bytes:
    """One frame of a record file gone, there again elsewhere, or with another number in its head."""
    whole = frames(data[FILE_HEADER.size :])
    spans = [np.arange(begin, end, SPAN.size) for begin, end in whole.spans]
    starts = (FILE_HEADER.size + np.sort(np.concatenate([whole.others[:, 0], *spans]))).tolist()
    frame, other = at.choice(starts), at.choice(starts)
    end = frame + HEAD.unpack_from(data, frame)[0]
    match at.randrange(8):
        case 0:
            return data[:frame] + data[end:]
        case 1:
            return data[:other] + data[frame:end] + data[other:]
        case 2:
            return data[:frame] + _bytes(data[frame:end], at) + data[end:]
    size = at.choice((1, 2, 4, 8))
    place = frame + at.randrange(0, min(end - frame, 160), size)
    return data[:place] + struct.pack("<Q", at.choice(_WORDS))[:size] + data[place + size :]


def _json(data: bytes, at: random.Random) -> bytes:
    value = _changed(json.loads(data), at)
    text = json.dumps(value, ensure_ascii=at.random() < 0.7)
    text = text.replace(json.dumps(_DEEP), "[" * 50_000 + "]" * 50_000)
    text = text.replace(json.dumps(_LONG), "[" + "0," * 20_000 + "0]")
    return text.encode("utf-8", "surrogatepass")


def _changed(value: Any, at: random.Random) -> Any:
    """A copy with one place in it changed, each depth as likely as its neighbors."""
    if isinstance(value, dict) and value and at.random() < 0.85:
        key = at.choice(list(value))
        match at.randrange(12):
            case 0:
                return {name: one for name, one in value.items() if name != key}
            case 1:
                return {
                    at.choice((f"{key}x", "", "\ud800")) if name == key else name: one for name, one in value.items()
                }
            case 2:
                return value | {key: at.choice(list(value.values()))}
        return value | {key: _changed(value[key], at)}
    if isinstance(value, list) and value and at.random() < 0.85:
        place = at.randrange(len(value))
        match at.randrange(10):
            case 0:
                return value[:place] + value[place + 1 :]
            case 1:
                return value[:place] * at.choice((2, 100))
            case 2:
                return [*value[:place], at.choice(value), at.choice(_VALUES), *value[place:]]
        return [*value[:place], _changed(value[place], at), *value[place + 1 :]]
    if isinstance(value, int | float) and not isinstance(value, bool) and at.random() < 0.4:
        return at.choice((value + 1, -value, value * 1_000, value / 1_000, value * 10**9, str(value), [value]))
    return at.choice(_VALUES)


def _answer(head: bytes, body: bytes, at: random.Random) -> bytes:
    if at.random() < 0.2:
        return _bytes(head, at) + b"\r\n\r\n" + body
    body = _mutated_once(body, at)
    lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"content-length")]
    return b"\r\n".join([*lines, b"Content-Length: %d" % len(body), b"", body])


def _zip(data: bytes, at: random.Random) -> bytes:
    with zipfile.ZipFile(io.BytesIO(data)) as pack:
        parts = [(entry.filename, pack.read(entry)) for entry in pack.infolist()]
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as pack, warnings.catch_warnings(action="ignore"):  # of names that stand twice
        for name, content in _parts(parts, at):
            pack.writestr(name, content)
    return made.getvalue()


def _tar(data: bytes, at: random.Random) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        parts = [(entry.name, file.read()) for entry in tar if (file := tar.extractfile(entry))]
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name, content in _parts(parts, at):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            info.type = at.choice((tarfile.REGTYPE,) * 500 + (tarfile.SYMTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE))
            tar.addfile(info, io.BytesIO(content))
    return made.getvalue()


def _parts(parts: list[tuple[str, bytes]], at: random.Random) -> list[tuple[str, bytes]]:
    """An archive's files with one of them gone, twice there, of another name, or mutated itself."""
    place = at.randrange(len(parts))
    name, content = parts[place]
    match at.randrange(15):
        case 0:
            return parts[:place] + parts[place + 1 :]
        case 1:
            return [*parts, parts[place]]
        case 2:
            other = at.choice(
                (f"../{name}", f"/{name}", f"{name}/x", name.rpartition("/")[0] or "x", "x" * 300, "a\ud800b")
            )
            return [*parts[:place], (other, content), *parts[place + 1 :]]
    return [*parts[:place], (name, _mutated_once(content, at)), *parts[place + 1 :]]


def _parquet(data: bytes, at: random.Random) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(io.BytesIO(data))
    place = at.randrange(table.num_columns)
    name, column, rows = table.column_names[place], table.column(place), table.num_rows
    match at.randrange(8):
        case 0:
            table = table.drop_columns([name])
        case 1:
            table = table.slice(0, at.randrange(2) * rows // 2)
        case 2:
            table = pa.concat_tables([table, table])
        case 3:
            table = table.take(at.sample(range(rows), rows))
        case 4:
            table = table.set_column(place, name, column.take([at.randrange(rows) for _ in range(rows)]))
        case 5:
            table = table.set_column(place, name, pa.array([str(one) for one in column.to_pylist()]))
        case 6:
            table = table.set_column(place, name, pa.nulls(rows, at.choice((column.type, pa.int64(), pa.float64()))))
        case _:
            values = [at.choice((0, -1, 2**62, -(2**63))) for _ in range(rows)]
            table = table.set_column(place, name, pa.array(values, pa.int64()))
    made = io.BytesIO()
    pq.write_table(table, made)
    return made.getvalue()
