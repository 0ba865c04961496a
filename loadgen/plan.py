"""The plan of a run: everything that is issued, with its due time, fixed before the clock starts."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from gapmeter.scenarios.plain_file import open_plain

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
PATHS = {"chat": CHAT, "completion": COMPLETION}
_ARRAYS = ("due_ns", "prompt_tokens", "output_tokens", "turns", "pauses_ns", "places")
_APART = (*_ARRAYS, "bodies", "swaps")


class NotPlan(ValueError):
    """The file holds no plan."""


def _none() -> NDArray[np.int64]:
    """A column that a plan does not have."""
    return np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Swaps:
    """Where each body's first own word stands, and the words that may stand there instead.

    ``at``: int64 (n, 3): first byte, byte after the last, the word's index in ``words`` (-1: nothing to swap).
    """

    at: NDArray[np.int64]
    words: tuple[bytes, ...]

    def apply(self, body: bytes, index: int, cycle: int) -> bytes:
        """The body as it is in the given round; the first round's is the body itself."""
        start, end, word = (int(value) for value in self.at[index])
        if cycle == 0 or word < 0:
            return body
        return body[:start] + self.words[(word + cycle) % len(self.words)] + body[end:]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What one generator process issues. Index i of every column belongs to the same request.

    Open loop: request i is due at t0 + ``due_ns[i]``; each is issued once. Closed loop: ``due_ns`` is -1 and
    ``concurrency`` users take the next index whenever they are free: until every body is issued where ``end_ns`` is 0,
    else until t0 + ``end_ns``, with ``body`` and ``request_id`` for any index, also beyond the columns.

    Conversations: ``turns`` has each request's place in its conversation, from 1; conversations stand one after the
    other. Only first turns have due times. An issuer sends each later turn ``pause_ns`` after the end of the answer
    before it, if that is before ``end_ns`` (0: always), and records turns whose predecessor failed as ABANDONED. A
    closed loop's user thinks for ``pause_ns`` of the request that was answered, and holds one conversation after the
    other. ``places``: in a slice, each request's index in the whole plan, which has ``planned_in_all``, and
    ``users_in_all``.

    A request is measured when its global index is at least ``warmup_requests`` and it was due at or after
    t0 + ``warmup_ns``. ``end_ns`` is the end of the measured part, from t0 (0: when the last body is issued).
    ``rate_knots`` and ``count_dispersion`` say what the due times were drawn from (``Arrivals``), ``prefix_share`` how
    much of all prompts stood at the start of an earlier one (None: not known before the run); no issuer needs them.
    """

    loop: Literal["open", "closed"]
    path: str
    due_ns: NDArray[np.int64]
    bodies: list[bytes]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    prompt_tokens_exact: bool
    warmup_ns: int
    warmup_requests: int
    end_ns: int
    concurrency: int
    think_time_ns: int
    timeout_ns: int
    worker: int
    workers: int
    id_prefix: str
    swaps: Swaps
    notes: tuple[str, ...]
    stall_ns: int = 0
    retries: int = 0
    retry_pause_ns: int = 0
    traceparent: bool = False
    rate_knots: tuple[tuple[int, float], ...] = ()
    count_dispersion: float = 1.0
    prefix_share: float | None = None
    turns: NDArray[np.int64] = field(default_factory=_none)
    pauses_ns: NDArray[np.int64] = field(default_factory=_none)
    places: NDArray[np.int64] = field(default_factory=_none)
    planned_in_all: int = 0
    users_in_all: int = 0

    def __len__(self) -> int:
        return len(self.bodies)

    @property
    def planned(self) -> int | None:
        """How many requests are planned one by one; None where users ask until a time is over."""
        return len(self) if self.loop == "open" or not self.end_ns else None

    def global_index(self, index: int) -> int:
        """The request's place in the whole plan, over all generator processes."""
        if not len(self.places):
            return self.worker + index * self.workers
        cycle, at = divmod(index, len(self.places))
        return cycle * self.planned_in_all + int(self.places[at])

    def turn(self, index: int) -> int:
        """The request's place in its conversation, from 1; 0 where there is none. Any index."""
        return int(self.turns[index % len(self.turns)]) if len(self.turns) else 0

    def follower(self, index: int) -> int | None:
        """The next turn of the same conversation; any index."""
        return index + 1 if self.turn(index + 1) > 1 else None

    def turns_from(self, index: int) -> range:
        """This turn and those behind it in its conversation."""
        last = index
        while (following := self.follower(last)) is not None:
            last = following
        return range(index, last + 1)

    def pause_ns(self, index: int) -> int:
        """The think time after the answer to this request; any index."""
        return int(self.pauses_ns[index % len(self.pauses_ns)]) if len(self.pauses_ns) else self.think_time_ns

    def request_id(self, index: int) -> str:
        """The x-request-id of any index."""
        return f"{self.id_prefix}-{self.global_index(index):06d}"

    def body(self, index: int) -> bytes:
        """The body of any index.

        Beyond the columns the bodies are used again, each time with another first word, so that no prompt repeats and
        no prefix cache knows it.
        """
        cycle, at = divmod(index, len(self.bodies))
        return self.swaps.apply(self.bodies[at], at, cycle)

    def slice(self, worker: int, workers: int) -> Plan:
        """Worker k of n's slice: requests k, k + n, k + 2n … of this one plan, and its part of the users.

        Conversations are sliced as wholes: k, k + n …, each with all its turns. All slices together are this plan.
        The only one of one is the plan itself, also of a slice. Raises ValueError for any other slice of a slice.
        """
        if (worker, workers) == (0, 1):
            return self
        if self.workers != 1 or not 0 <= worker < workers:
            raise ValueError(f"cannot take slice {worker} of {workers} of slice {self.worker} of {self.workers}")
        has_turns = len(self.turns) > 0
        number = np.cumsum(self.turns == 1) - 1 if has_turns else np.arange(len(self))  # of each request's conversation
        mine = np.flatnonzero(number % workers == worker)
        columns = {name: getattr(self, name) for name in _ARRAYS}
        taken: dict[str, Any] = {name: column[mine] if len(column) else column for name, column in columns.items()}
        if has_turns:
            taken |= {"places": mine, "planned_in_all": len(self)}
        return replace(
            self, **taken, bodies=[self.bodies[i] for i in mine], swaps=replace(self.swaps, at=self.swaps.at[mine]),
            concurrency=self.concurrency // workers + (worker < self.concurrency % workers), worker=worker,
            workers=workers, users_in_all=self.concurrency,
        )  # fmt: skip

    def without_requests(self) -> Plan:
        """The same times, users and ids, for a generator that composes its requests while it runs."""
        return replace(
            self, due_ns=_none(), bodies=[], prompt_tokens=_none(), output_tokens=_none(),
            prompt_tokens_exact=False, swaps=Swaps(np.zeros((0, 3), np.int64), ()), notes=(), pauses_ns=_none(),
            prefix_share=None, turns=_none(), places=_none(),
        )  # fmt: skip

    def save(self, path: Path) -> None:
        """Write it as numpy arrays and JSON, so that loading it can run nothing. Raises OSError."""
        plain = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _APART}
        plain["words"] = [word.decode("latin-1") for word in self.swaps.words]
        arrays: dict[str, NDArray[Any]] = {name: getattr(self, name) for name in _ARRAYS}
        arrays["swaps_at"] = self.swaps.at
        arrays["body_bytes"] = np.array([len(body) for body in self.bodies], np.int64)
        arrays["bodies"] = np.frombuffer(b"".join(self.bodies), np.uint8)
        arrays["plain"] = np.frombuffer(json.dumps(plain).encode(), np.uint8)
        with path.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)

    @classmethod
    def load(cls, path: Path) -> Plan:
        """Read what ``save`` wrote. Raises OSError, or NotPlan for something else."""
        with open_plain(path) as file:
            try:
                return cls._read(file)
            except Exception as error:  # NumPy, zipfile and what they stand on raise a dozen kinds for damage
                lines = str(error).splitlines() or [""]
                raise NotPlan(f"{path} holds no plan: {type(error).__name__}: {lines[0][:200]}") from error

    @classmethod
    def _read(cls, file: BinaryIO) -> Plan:
        with np.load(file, allow_pickle=False) as arrays:
            plain = json.loads(arrays["plain"].tobytes())
            words = tuple(word.encode("latin-1") for word in plain.pop("words"))
            ends = np.cumsum(arrays["body_bytes"]).tolist()
            joined = arrays["bodies"].tobytes()
            bodies = [joined[start:end] for start, end in zip([0, *ends], ends, strict=False)]
            columns = {name: arrays[name] for name in _ARRAYS}
            swaps = Swaps(arrays["swaps_at"], words)
        for name, column in {**columns, "swaps_at": swaps.at}.items():
            if column.dtype != np.int64 or len(column) not in (0, len(bodies)):
                raise ValueError(f"{name} has {column.shape} of {column.dtype} for {len(bodies)} bodies")
        plain["notes"] = tuple(plain["notes"])
        plain["rate_knots"] = tuple((at, rate) for at, rate in plain["rate_knots"])
        return cls(**plain, **columns, bodies=bodies, swaps=swaps)

    def digest(self) -> str:
        """12 hex digits of the SHA-256 over what is issued and when; ids, which differ from run to run, left out."""
        window = (self.loop, self.path, self.warmup_ns, self.warmup_requests, self.end_ns)
        digest = hashlib.sha256(repr(window).encode())
        digest.update(repr((self.concurrency, self.think_time_ns, self.worker, self.workers)).encode())
        for column in (self.due_ns, self.prompt_tokens, self.output_tokens, self.turns, self.pauses_ns):
            digest.update(column.astype("<i8").tobytes())
        for body in self.bodies:
            digest.update(len(body).to_bytes(8, "little") + body)
        return digest.hexdigest()[:12]
