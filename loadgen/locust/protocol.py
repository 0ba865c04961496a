"""What a master and its workers tell each other.

Control goes in small messages beside Locust's own: one type of message, a word in each. Plans and records go by HTTP:

    GET /slices/K     worker K's slice of the plan
    PUT /records/K    its record file, when all has been issued
    PUT /results/K    how that went (``Result``, JSON); with it the worker is done

Each message and each request carries an HMAC by the secret that both were started with, over what both have drawn for
this run (``Seal``): nothing of an earlier run is good for anything. Nothing is encrypted, as in Locust itself: a master
belongs on loopback or a private network.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import hmac
import http.client
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, Self, TypeVar
from wsgiref.util import FileWrapper

import gevent
from gevent import pywsgi
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from gapmeter.loadgen.client import reason
from gapmeter.loadgen.exchange import Address
from gapmeter.loadgen.locust.slice_run import Report

TYPE = "gapmeter"
VERSION = 7
SECRET = "GAPMETER_WORKER_SECRET"  # the environment variable; "" only where both are on one machine
_PIECE_BYTES = 1 << 20
_SILENCE_S = 10.0  # a network that is cut says nothing: try again
T = TypeVar("T")


class Malformed(ValueError):
    """A message is none of this protocol; the text says why."""


def read(cls: type[T], value: Any) -> T:
    """A value of that type from the text of JSON, or from what it held. Raises Malformed."""
    kind: Any = cls  # mypy takes no type[T] for what a cache may have as its key
    adapter = _adapter(kind)
    try:
        found: T = adapter.validate_json(value) if isinstance(value, bytes) else adapter.validate_python(value)
        return found
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        raise Malformed(f"{'.'.join(map(str, first['loc']))[:100]}: {first['msg'][:200]}".lstrip(": ")) from error


@functools.cache
def _adapter(cls: type[Any]) -> TypeAdapter[Any]:
    """It takes milliseconds to make one."""
    return TypeAdapter(cls)


def _address(url: str) -> str:
    """The address, if requests can be sent there. Raises ValueError."""
    if not (url.isascii() and url.isprintable()):
        raise ValueError("it has characters that HTTP does not allow")
    Address.of(url)
    return url


@dataclass(frozen=True, slots=True)
class Hello:
    """A worker offers itself. ``clock``: see ``clock_name``; ``nonce``: see ``Seal``."""

    version: int
    host: str
    pid: int
    clock: str
    nonce: str
    word: Literal["hello"] = "hello"

    @classmethod
    def read(cls, message: dict[str, Any]) -> Self:
        """Raises Malformed: of another version's nothing else is read."""
        if message.get("version") != VERSION:
            raise Malformed(f"the master speaks version {VERSION} of the protocol")
        return read(cls, message)


_Moment = Annotated[int, Field(ge=0, lt=1 << 62)]


@dataclass(frozen=True, slots=True)
class WorkerMessage:
    """What a worker that was taken says to its master: ``word`` (hello until it is armed), and what goes with it."""

    word: Literal["hello", "ready", "failed", "clock"]
    why: str = ""  # with failed
    sent_ns: _Moment = 0  # with clock: the master's own, sent back
    there_ns: _Moment = 0  # with clock: the worker's


@dataclass(frozen=True, slots=True)
class Seal:
    """Marks messages as coming from who knows the secret. The secret itself is never sent.

    ``nonce`` is drawn by the worker, so that a message to it is good for no other, nor for a later one; once the master
    has answered, what it drew is behind it (``joined``), for the same reason. ``own`` says who marks with this: master
    or worker. What comes from there must be the other's.
    """

    secret: str
    nonce: str
    own: Literal["master", "worker"]

    def joined(self, drawn: str) -> Seal:
        """The seal of all that follows, with what the master has drawn."""
        return replace(self, nonce=f"{self.nonce} {drawn}")

    def mark(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message with its mark."""
        return message | {"mac": self._mac(message, self.own)}

    def is_theirs(self, message: Any) -> bool:
        """Whether the other one has marked it, and nobody changed it since."""
        if not isinstance(message, dict) or not isinstance(message.get("mac"), str):
            return False
        bare = {key: value for key, value in message.items() if key != "mac"}
        try:
            theirs = self._mac(bare, "worker" if self.own == "master" else "master")
        except (TypeError, ValueError, RecursionError):  # what JSON has not, nobody of ours has marked
            return False
        return hmac.compare_digest(message["mac"].encode(errors="replace"), theirs.encode())

    def _mac(self, message: dict[str, Any], who: str) -> str:
        text = json.dumps([who, self.nonce, message], sort_keys=True)
        return hmac.new(self.secret.encode(), text.encode(), "sha256").hexdigest()


@dataclass(frozen=True, slots=True)
class Order:
    """What the master has a worker issue: slice ``worker`` of ``workers``, its digest and its ``size`` in bytes."""

    worker: Annotated[int, Field(ge=0)]
    workers: Annotated[int, Field(ge=1)]
    url: Annotated[str, AfterValidator(_address)]
    generator: str
    digest: str
    size: Annotated[int, Field(ge=1)]
    port: Annotated[int, Field(ge=1, le=65_535)]


@dataclass(frozen=True, slots=True)
class MasterMessage:
    """What a master says to a worker: ``word``, and what goes with it."""

    word: Literal["welcome", "arm", "refuse", "clock", "start", "stop"]
    drawn: str = ""  # with welcome: see Seal
    order: Order | None = None  # with arm
    why: str = ""  # with refuse
    sent_ns: int = 0  # with clock
    t0_ns: int = 0  # with start, on the worker's clock

    @classmethod
    def read(cls, message: Any) -> Self:
        """Raises Malformed."""
        said = read(cls, message)
        if (said.word == "arm") != (said.order is not None):
            raise Malformed(f"an order belongs to arm, and to nothing else; this is {said.word}")
        return said


@dataclass(frozen=True, slots=True)
class Result:
    """How a worker's slice went. ``restarts``: how often Locust started the test again."""

    troubles: list[str]
    restarts: int
    report: Report


class NotTaken(RuntimeError):
    """The master has refused a request; the text says why."""


class NotKept(RuntimeError):
    """This machine has no room for a slice or for records, or a slice is larger than announced; the text says why."""


class FileServer:
    """The master's side: slices out of ``folder``, records into it. Raises OSError when the port is taken.

    ``seal_of`` gives the seal of a worker whose records are still wanted, ``finished`` is told its result.
    """

    def __init__(
        self, host: str, port: int, folder: Path, seal_of: Callable[[int], Seal | None],
        finished: Callable[[int, Result], None],
    ) -> None:  # fmt: skip
        self._folder, self._seal_of, self._finished = folder, seal_of, finished
        self._handed_in: set[int] = set()  # workers whose results are here
        self._server = pywsgi.WSGIServer((host, port), self._serve, log=None, error_log=None)
        self._server.start()

    @property
    def port(self) -> int:
        return int(self._server.server_port)

    def slice_path(self, worker: int) -> Path:
        return self._folder / f"worker-{worker}.plan.npz"

    def close(self) -> None:
        self._server.stop(timeout=1)

    def _serve(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        status, path = self._answer(environ)
        size = path.stat().st_size if path is not None else 0
        start_response(status, [("Content-Length", str(size)), ("Content-Type", "application/octet-stream")])
        return FileWrapper(path.open("rb"), _PIECE_BYTES) if path is not None else ()

    def _answer(self, environ: dict[str, Any]) -> tuple[str, Path | None]:
        """Status, and the file to send, if any."""
        method, path, digest = (
            environ.get(name, "") for name in ("REQUEST_METHOD", "PATH_INFO", "HTTP_CONTENT_DIGEST")
        )
        kind, _, number = path.removeprefix("/").partition("/")
        worker = int(number) if number.isdecimal() else -1
        if (seal := self._seal_of(worker)) is None:
            return "410 Gone", None
        if not seal.is_theirs({**_request(method, path, digest), "mac": environ.get("HTTP_AUTHORIZATION", "")}):
            return "403 Forbidden", None
        match method, kind:
            case "GET", "slices":
                return "200 OK", self.slice_path(worker)
            case "PUT", "records":
                try:
                    taken = self._take_records(worker, environ["wsgi.input"], digest)
                except NotKept as error:
                    while environ["wsgi.input"].read(_PIECE_BYTES):  # a worker that still sends hears no answer, and
                        gevent.sleep(0)  # this server may end as soon as it counts as over
                    if worker not in self._handed_in:  # else this is what was left of an earlier attempt
                        text = f"has records that could not be kept here: {error}"
                        self._finished(worker, Result([text], 0, Report()))
                    return "507 Insufficient Storage", None
                return ("204 No Content" if taken else "400 Bad Request"), None
            case "PUT", "results":
                said = environ["wsgi.input"].read()
                try:
                    result = read(Result, said)
                except Malformed:
                    return "400 Bad Request", None
                if _content_digest(hashlib.sha256(said).digest()) != digest:
                    return "400 Bad Request", None
                self._handed_in.add(worker)
                self._finished(worker, result)
                return "204 No Content", None
        return "404 Not Found", None

    def _take_records(self, worker: int, body: BinaryIO, expected: str) -> bool:
        """Whether they arrived as they were sent. Two attempts may overlap: each writes a file of its own.

        Raises NotKept.
        """
        part = self._folder / f"worker-{worker}.gap.{secrets.token_hex(4)}.part"
        digest = hashlib.sha256()
        try:
            while data := body.read(_PIECE_BYTES):
                with _own(part), part.open("ab") as file:
                    file.write(data)
                digest.update(data)
                gevent.sleep(0)
            if _content_digest(digest.digest()) != expected:
                return False
            with _own(kept := self._folder / f"worker-{worker}.gap"):
                os.replace(part, kept)
        finally:
            part.unlink(missing_ok=True)
        return True


@dataclass(frozen=True, slots=True)
class Files:
    """A worker's side. Calls block; they raise OSError when the master does not answer, NotTaken when it refuses."""

    host: str
    order: Order
    seal: Seal

    def fetch_slice(self, into: Path) -> None:
        """Raises NotKept when it cannot be written, or does not end where it should."""
        with _own(into):
            into.write_bytes(b"")

        def take(data: bytes) -> None:
            with _own(into), into.open("ab") as file:
                file.write(data)
                if file.tell() > self.order.size:
                    raise NotKept(f"the master's slice is larger than the {self.order.size} bytes that it announced")

        self._ask("GET", "slices", take=take)

    def hand_in(self, records: Path, result: Result) -> None:
        """The record file first: with its result the worker is done."""
        with records.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").digest()
        with records.open("rb") as file:
            self._ask("PUT", "records", file, digest, size=records.stat().st_size)
        body = json.dumps(asdict(result)).encode()
        self._ask("PUT", "results", body, hashlib.sha256(body).digest(), size=len(body))

    def _ask(
        self, method: str, kind: str, body: BinaryIO | bytes | None = None, sha256: bytes = b"", *, size: int = 0,
        take: Callable[[bytes], None] = lambda _: None,
    ) -> None:  # fmt: skip
        connection = http.client.HTTPConnection(self.host, self.order.port, timeout=_SILENCE_S)
        path, digest = f"/{kind}/{self.order.worker}", _content_digest(sha256)
        mark = self.seal.mark(_request(method, path, digest))["mac"]
        head = {"Authorization": mark, "Content-Length": str(size), "Content-Digest": digest}
        try:
            connection.request(method, path, body, head)
            answer = connection.getresponse()
            if answer.status >= 400:
                raise NotTaken(f"the master answered {answer.status} {answer.reason} to {method} /{kind}")
            while data := answer.read(_PIECE_BYTES):
                take(data)
        except http.client.HTTPException as error:
            raise ConnectionError(str(error)) from error
        finally:
            connection.close()


@contextlib.contextmanager
def _own(path: Path) -> Iterator[None]:
    """Raises NotKept where an OSError is about our own disk: no network that may come back."""
    try:
        yield
    except OSError as error:
        raise NotKept(f"{path}: {reason(error)}") from error


def _request(method: str, path: str, digest: str) -> dict[str, Any]:
    """What a request's mark is over; the digest stands for its body."""
    return {"method": method, "path": path, "digest": digest}


def _content_digest(sha256: bytes) -> str:
    """The header of RFC 9530."""
    return f"sha-256=:{base64.b64encode(sha256).decode()}:"


@dataclass(frozen=True, slots=True)
class Offset:
    """Their clock minus ours. The truth lies within ``half_width_ns`` of it, however long either way took.

    ``drifts``: it is not the same at all times.
    """

    offset_ns: int = 0
    half_width_ns: int = 0
    drifts: bool = False

    @classmethod
    def of(cls, sent_ns: int, there_ns: int, heard_ns: int) -> Offset:
        """From a message and its answer (Cristian 1989): ``there_ns`` was stamped at some moment in between."""
        return cls(there_ns - (sent_ns + heard_ns) // 2, (heard_ns - sent_ns + 1) // 2)

    def after(self, trip: Offset) -> Offset:
        """What is known once another message has been there and back: the narrower one, while both hold.

        Where no offset is within both, one of the clocks runs faster. Then it reaches from one to the other, and a
        narrow one of some moment never holds for the whole run again.
        """
        low = min(self.offset_ns - self.half_width_ns, trip.offset_ns + trip.half_width_ns)
        high = max(self.offset_ns + self.half_width_ns, trip.offset_ns - trip.half_width_ns)
        if high - low > 2 * self.half_width_ns:
            return Offset((low + high) // 2, (high - low + 1) // 2, drifts=True)
        return self if self.drifts or trip.half_width_ns >= self.half_width_ns else trip

    @property
    def may_be_none(self) -> bool:
        """Whether both may read one clock: two machines restored from one memory share a boot's name, and none."""
        return abs(self.offset_ns) <= self.half_width_ns


def clock_name() -> str:
    """Equal where CLOCK_MONOTONIC is the same clock: the kernel's boot and its time namespace; "" when unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/time').readlink()}"
    except OSError:
        return ""
