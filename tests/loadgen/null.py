"""A null server in the test's own event loop, and plans of equal requests for it."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from gapmeter.loadgen.plan import Plan, Swaps
from gapmeter.servers.null.server import Schedule, Server

PATH = "/v1/chat/completions"


@contextlib.asynccontextmanager
async def null_server(
    fault: str = "none", *, first_ms: float = 1, gap_ms: float = 1, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[Server, str]]:
    """The server and its address."""
    sock = socket.create_server(("127.0.0.1", 0))
    server = Server(Schedule(first_ns=int(first_ms * 1e6), gap_ns=int(gap_ms * 1e6), fault=fault), tls=tls)
    await server.listen(sock)
    try:
        yield server, f"{'https' if tls else 'http'}://localhost:{sock.getsockname()[1]}"
    finally:
        await server.close()


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
        prompt_tokens=np.full(count, 3, np.int64),
        output_tokens=np.full(count, tokens, np.int64), prompt_tokens_exact=True, warmup_ns=0, warmup_requests=0,
        end_ns=end_ns, concurrency=users, think_time_ns=think_ns, timeout_ns=int(timeout_s * 1e9), worker=0, workers=1,
        id_prefix="r", swaps=Swaps(np.tile([at, at + 4, 0], (count, 1)), (b"word", b"fine", b"gold")), notes=(),
    )  # fmt: skip


def ids(plan: Plan) -> list[str]:
    """The x-request-id of every planned request."""
    return [plan.request_id(index) for index in range(len(plan))]
