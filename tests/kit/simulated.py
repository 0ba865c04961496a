"""Starts a simulated server as its own processes, asks it over real sockets, and reads what it left behind."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from gapmeter.records import RecordFile, read_records
from gapmeter.servers.launch import ServerProcess, Service, free_port, launch
from gapmeter.servers.simulated import simulated_command
from tests.kit.wait import eventually

# Short enough that a test is quick, with every stage long enough to be seen.
QUICK: dict[str, Any] = {
    "forward_ms": 1, "forward_prompt_token_ms": 0.01, "forward_sequence_ms": 0.05, "input_prep_ms": 0.4,
    "schedule_ms": 0.2, "sampling_ms": 0.3, "update_ms": 0.2, "output_ms": 0.2, "handoff_ms": 0.2,
    "template_ms": 0.2, "tokenize_ms": 0.3, "detokenize_ms": 0.05, "egress_ms": 0.05,
}  # fmt: skip


@dataclass(slots=True)
class Asked:
    """One streamed answer as its client saw it, stamps in CLOCK_MONOTONIC ns."""

    request_id: str
    sent_ns: int
    status: int = 0
    text: str = ""
    token_ns: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)  # of tokens, as the usage beside each stamp has it
    ids: list[int] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    finish_reason: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    error: str = ""

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """Those with new tokens: when each came, and how many tokens there were by then."""
        return [
            (at, count)
            for at, before, count in zip(self.token_ns, (0, *self.counts), self.counts, strict=False)
            if count > before
        ]


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answers, and the folder where it records and keeps its log."""

    url: str
    folder: Path
    process: ServerProcess

    def records(self, role: str) -> RecordFile:
        """The record file of the process with this role (the server must have ended)."""
        (path,) = (self.folder / "probe").glob(f"{role}-*.gap")
        return read_records(path)

    def truth(self) -> dict[str, list[dict[str, Any]]]:
        """All lines of truth by their kind (the server must have ended)."""
        lines: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for path in sorted((self.folder / "truth").glob("*.jsonl")):
            for line in path.read_text().splitlines():
                value = json.loads(line)
                lines[value["kind"]].append(value)
        return lines

    async def metric(self, name: str) -> float:
        """One figure of the server's own metrics."""
        async with aiohttp.request("GET", f"{self.url}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return float(next(line.split()[-1] for line in lines if line.startswith(f"gapmeter_{name}{{")))

    async def until(self, name: str, check: Callable[[float], bool], seconds: float = 10) -> None:
        """Wait until a figure of its metrics is so."""

        async def is_so() -> bool:
            return check(await self.metric(name))

        await eventually(is_so, seconds)


@contextlib.contextmanager
def simulated(folder: Path, *, timeout_s: float = 20.0, max_batch: int = 4, **flags: Any) -> Iterator[Server]:
    """A server with ``QUICK`` times and ``flags``, recording probe and truth into ``folder``."""
    port = free_port()
    spec = simulated_command(sys.executable, Service(None, "sim", port, max_batch, "any", {**QUICK, **flags}))
    env = {**spec.env, "GAPMETER_PROBE_DIR": str(folder / "probe"), "GAPMETER_TRUTH_DIR": str(folder / "truth")}
    url = f"http://127.0.0.1:{port}"
    with launch(spec.command, env, (), folder / "server.log", f"{url}/health", timeout_s) as process:
        yield Server(url, folder, process)


@contextlib.asynccontextmanager
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    """A client without a limit on connections."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        yield client


async def ask(
    client: aiohttp.ClientSession, server: Server, request_id: str, *, prompt: str = "hello", tokens: int = 8,
    chat: bool = True, **more: Any,
) -> Asked:  # fmt: skip
    """Ask for ``tokens`` tokens and read the stream to its end, or to the server's."""
    question: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    body = {**question, "max_tokens": tokens, "stream": True, "stream_options": {"include_usage": True}, **more}
    return await send(client, server.url, request_id, body, chat=chat)


async def send(
    client: aiohttp.ClientSession, url: str, request_id: str, body: dict[str, Any], *, chat: bool = True,
    give_up_after: int = 0,
) -> Asked:  # fmt: skip
    """The answer to a request, read to its end, or for so many lines."""
    path = "/v1/chat/completions" if chat else "/v1/completions"
    asked, lines = Asked(request_id, time.monotonic_ns()), 0
    try:
        async with client.post(f"{url}{path}", json=body, headers={"x-request-id": request_id}) as answer:
            asked.status = answer.status
            async for line in answer.content:
                _read(asked, line)
                lines += 1
                if lines == give_up_after:
                    break
    except (aiohttp.ClientError, ConnectionError) as error:
        asked.error = type(error).__name__
    return asked


def _read(asked: Asked, line: bytes) -> None:
    at = time.monotonic_ns()
    if not line.startswith((b"data: {", b"{")):
        return
    event = json.loads(line.removeprefix(b"data: "))
    asked.usage = event.get("usage") or asked.usage
    asked.metrics = event.get("metrics") or asked.metrics
    asked.error = event.get("error", {}).get("message", asked.error)
    for choice in event.get("choices", ()):
        part = choice.get("delta") or choice.get("message") or choice
        asked.text += part.get("content") or part.get("text") or ""
        asked.finish_reason = choice["finish_reason"] or asked.finish_reason
        asked.ids += choice.get("token_ids") or ()
        asked.token_ns.append(at)
        asked.counts.append(asked.usage.get("completion_tokens", 0))
