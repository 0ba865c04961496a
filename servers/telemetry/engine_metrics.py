"""The engine's own figures: its /metrics page in Prometheus' text format, asked at a gentler rate than the rest.

The page is made on the API server's event loop, so asking for it costs what is being measured; each row says how long
the answer took.
"""

from __future__ import annotations

import http.client
import math
import re
import time
from urllib.parse import urlsplit

from gapmeter.servers.telemetry.journal import About, Absent, ReadFailed, Row

# Our name for a figure, and what engines call it. Those that end in _share lie between 0 and 1.
NAMES = {
    "running": (
        "vllm:num_requests_running", "gapmeter_requests_running", "sglang:num_running_reqs", "tgi_batch_current_size",
    ),
    "waiting": ("vllm:num_requests_waiting", "gapmeter_requests_waiting", "sglang:num_queue_reqs", "tgi_queue_size"),
    "kv_used_share": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"),
    "kv_blocks": ("gapmeter_kv_blocks",),
    "kv_blocks_free": ("gapmeter_kv_blocks_free",),
    "preemptions": ("vllm:num_preemptions_total", "gapmeter_engine_preemptions_total"),
    "prefix_queries": ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
    "prefix_hits": ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
}  # fmt: skip
_OURS = {theirs: ours for ours, names in NAMES.items() for theirs in names}
_LINE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{.*\})?[ \t]+(\S+)")
_PATIENCE_S = 2.0
_LARGEST = 1 << 24


def parse_metrics(page: str) -> dict[str, float]:
    """The figures that we know, by our names: summed over label sets (several engines), shares averaged."""
    values_of: dict[str, list[float]] = {}
    for line in page.splitlines():
        matched = None if line.startswith("#") else _LINE.match(line)
        ours = _OURS.get(matched[1]) if matched else None
        if matched and ours and (value := _number(matched[2])) is not None:
            values_of.setdefault(ours, []).append(value)
    row = {name: sum(values) / (len(values) if name.endswith("_share") else 1) for name, values in values_of.items()}
    blocks, free = row.pop("kv_blocks", 0.0), row.pop("kv_blocks_free", None)
    if blocks and free is not None:
        row["kv_used_share"] = 1 - free / blocks
    return row


def _number(text: str) -> float | None:
    """A sample's value; None for what is none, and for NaN, by which Prometheus says that there is none."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


class EngineMetrics:
    """One kept-alive connection to a server's /metrics. ``key`` is sent as a bearer token, where there is one."""

    name = "engine"

    def __init__(self, url: str, key: str | None = None) -> None:
        parts = urlsplit(url)
        make = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = make(parts.hostname or "127.0.0.1", parts.port, timeout=_PATIENCE_S)
        self._path = f"{parts.path.rstrip('/')}/metrics"
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.about: About = {"url": f"{url.rstrip('/')}/metrics"}

    def read(self) -> list[Row]:
        began = time.monotonic_ns()
        status, page = self._ask()
        if status == 200:
            row = parse_metrics(page)
            if not row:
                raise Absent(f"{self.about['url']} has none of the figures that are known here")
            return [{**row, "took_ns": time.monotonic_ns() - began, "page_bytes": len(page)}]
        if status in (401, 403, 404, 405, 501):
            raise Absent(f"the server has no {self.about['url']} for us (it answered {status})")
        raise ReadFailed(f"{self.about['url']} answered {status}")

    def _ask(self) -> tuple[int, str]:
        try:
            try:
                return self._once()
            except ConnectionError:  # it was kept alive no longer
                self._connection.close()
                return self._once()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()  # the next request connects anew
            raise ReadFailed(f"{self.about['url']}: {str(error) or type(error).__name__}") from error

    def _once(self) -> tuple[int, str]:
        self._connection.request("GET", self._path, headers=self._headers)
        answer = self._connection.getresponse()
        return answer.status, answer.read(_LARGEST).decode("utf-8", "replace")
