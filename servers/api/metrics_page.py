"""The server's own figures in Prometheus' text format: a few counters and gauges, added to as requests pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from gapmeter.records import Outcome
from gapmeter.servers.engine_client import EngineStats


class MetricsPage:
    """The API process's counters since its start, and beside them the engine's figures."""

    def __init__(self, served_name: str) -> None:
        escaped = served_name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        self._label = f'model="{escaped}"'
        self._accepted = self._prompt_tokens = self._generated_tokens = 0
        self._finished: Counter[str] = Counter()
        self._seconds = 0.0

    def accepted(self, prompt_tokens: int) -> None:
        """The engine took a request."""
        self._accepted += 1
        self._prompt_tokens += prompt_tokens

    def generated(self, tokens: int) -> None:
        """Tokens were written to a client."""
        self._generated_tokens += tokens

    def finished(self, outcome: Outcome, lasted_ns: int) -> None:
        """A request is over, ``lasted_ns`` after its first bytes."""
        self._finished[outcome.name.lower()] += 1
        self._seconds += lasted_ns / 1e9

    def render(self, stats: EngineStats) -> str:
        """The page that Prometheus scrapes."""
        return "".join(self._lines(stats))

    def _lines(self, stats: EngineStats) -> Iterator[str]:
        for name, kind, what, value in (
            ("requests_accepted_total", "counter", "Requests that the engine took.", self._accepted),
            ("prompt_tokens_total", "counter", "Prompt tokens of these.", self._prompt_tokens),
            ("generation_tokens_total", "counter", "Tokens written to clients.", self._generated_tokens),
            ("request_seconds_total", "counter", "Seconds in requests, first byte to end.", round(self._seconds, 6)),
            ("engine_steps_total", "counter", "Steps of the engine.", stats.steps),
            ("engine_preemptions_total", "counter", "Requests evicted from the KV cache.", stats.preemptions),
            ("requests_running", "gauge", "Requests that the engine is working on.", stats.running),
            ("requests_waiting", "gauge", "Requests that wait for the engine.", stats.waiting),
            ("kv_blocks", "gauge", "KV cache blocks.", stats.kv_blocks),
            ("kv_blocks_free", "gauge", "KV cache blocks that are free.", stats.kv_blocks_free),
        ):
            if value is None:
                continue
            yield f"# HELP gapmeter_{name} {what}\n# TYPE gapmeter_{name} {kind}\n"
            yield f"gapmeter_{name}{{{self._label}}} {value}\n"
        yield "# HELP gapmeter_requests_finished_total Requests by how they ended.\n"
        yield "# TYPE gapmeter_requests_finished_total counter\n"
        for outcome, count in sorted(self._finished.items()):
            yield f'gapmeter_requests_finished_total{{{self._label},outcome="{outcome}"}} {count}\n'
