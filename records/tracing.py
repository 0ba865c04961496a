"""The trace context of a request (W3C Trace Context, level 1), which its id decides: nothing more needs recording."""

from __future__ import annotations

import hashlib


def ids(request_id: str) -> tuple[int, int]:
    """Trace id (128 bits) and id of the caller's span (64 bits) for a request; never 0."""
    digest = hashlib.sha256(b"gapmeter trace " + request_id.encode()).digest()
    return int.from_bytes(digest[:16], "big") or 1, int.from_bytes(digest[16:24], "big") or 1


def traceparent(request_id: str) -> str:
    """The header's value: version 00, sampled."""
    trace, span = ids(request_id)
    return f"00-{trace:032x}-{span:016x}-01"
