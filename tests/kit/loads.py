"""Plans of equal requests, sessions that issue them, and the records that they leave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gapmeter.loadgen.exchange import Address
from gapmeter.loadgen.generator import Heartbeat
from gapmeter.loadgen.issue import issue
from gapmeter.loadgen.plan import Plan, Swaps
from gapmeter.loadgen.sender import Sender
from gapmeter.records import RecordFile, RecordWriter, read_records
from gapmeter.records.compression import with_compressed
from gapmeter.records.request import FINISHED, RequestRecord, encode
from tests.kit.faults import Misbehaving
from tests.kit.servers import null_server

PATH = "/v1/chat/completions"
FILE = "worker-0.gap"


def body(tokens: int = 8, **more: Any) -> bytes:
    return json.dumps({"model": "null", "messages": [], "stream": True, "max_tokens": tokens} | more).encode()


def plan(
    due_ns: list[int], *, tokens: int = 4, users: int = 0, think_ns: int = 0, end_ns: int = 0, timeout_s: float = 10
) -> Plan:
    """Equal requests due at these offsets; ``users``: a closed loop of as many requests."""
    count = len(due_ns)
    text = body(tokens, prompt="word")
    at = text.index(b"word")
    return Plan(
        loop="closed" if users else "open", path=PATH, due_ns=np.array(due_ns, np.int64), bodies=[text] * count,
        prompt_tokens=np.full(count, 3, np.int64), output_tokens=np.full(count, tokens, np.int64),
        prompt_tokens_exact=True, warmup_ns=0, warmup_requests=0, end_ns=end_ns, concurrency=users,
        think_time_ns=think_ns, timeout_ns=int(timeout_s * 1e9), worker=0, workers=1, id_prefix="r",
        swaps=Swaps(np.tile([at, at + 4, 0], (count, 1)), (b"word", b"fine", b"gold")), notes=(),
    )  # fmt: skip


def ids(plan: Plan) -> list[str]:
    """The x-request-id of every planned request."""
    return [plan.request_id(index) for index in range(len(plan))]


@contextlib.asynccontextmanager
async def sender(what: Plan, url: str, folder: Path, *, warm: int = 4, pulse: bool = False) -> AsyncIterator[Sender]:
    """One generator's, which writes ``FILE``; only with a ``pulse`` do requests run out of time."""
    writer = RecordWriter(folder / FILE, {"role": "generator"})
    made = Sender(what, Address.of(url), writer)
    if warm:
        await made.client.warm(warm)
    heartbeat = Heartbeat(made, time.monotonic_ns()) if pulse else None
    try:
        yield made
    finally:
        made.stop("the test is over")
        if heartbeat:
            heartbeat.close()
        made.client.close()
        writer.close()
        await asyncio.sleep(0.01)


@dataclass(frozen=True, slots=True)
class Bed:
    """A sender on a null server, and the file that it writes."""

    sender: Sender
    server: Misbehaving
    path: Path

    async def play(self, t0_ns: int | None = None) -> list[RequestRecord]:
        """Issue the whole plan, from now on unless told; every answer's record."""
        await issue(self.sender, time.monotonic_ns() if t0_ns is None else t0_ns)
        async with asyncio.timeout(20):
            await self.sender.drain()
        return self.records()

    def records(self, code: int = FINISHED) -> list[RequestRecord]:
        return records_of(self.path, code)

    async def seen(self, count: int) -> list[str]:
        """The ids of requests that the server has read, once there are so many of them."""
        async with asyncio.timeout(10):
            while len(self.server.requests) < count:  # noqa: ASYNC110 (the server has nobody to tell)
                await asyncio.sleep(0.005)
        return self.server.requests


@contextlib.asynccontextmanager
async def bed(
    what: Plan, folder: Path, *faults: str, warm: int = 4, first_ms: float = 1, pulse: bool = False
) -> AsyncIterator[Bed]:
    """What ``null_server`` does with the faults, and a sender that asks it."""
    async with (
        null_server(*faults, first_ms=first_ms) as (server, url),
        sender(what, url, folder, warm=warm, pulse=pulse) as made,
    ):
        yield Bed(made, server, folder / FILE)


def records_of(source: RecordFile | Path, code: int = FINISHED) -> list[RequestRecord]:
    """Of a record file, or of all in a folder, by their place in the plan; attempts of one by their time."""
    if isinstance(source, Path) and source.is_dir():
        return sorted(
            (record for path in with_compressed(source, "*.gap") for record in records_of(path, code)),
            key=lambda record: record.index,
        )
    file = read_records(source) if isinstance(source, Path) else source
    return sorted(file.requests(code), key=lambda record: record.index)


def write_records(path: Path, records: Iterable[RequestRecord | tuple[int, RequestRecord]]) -> None:
    """A generator's file with these, finished unless told otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = RecordWriter(path, {"role": "generator", "worker": 0})
    for each in records:
        code, record = each if isinstance(each, tuple) else (FINISHED, each)
        writer.blob(code, encode(record))
    writer.close()
