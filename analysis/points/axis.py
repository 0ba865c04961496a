"""How a sweep's points are put in order: which key is the load, which others make separate curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from analysis.report.numbers import significant

# What a load is, then the server's size, then whatever else has numbers.
_FIRST = ("load.concurrency", "load.rate", "server.max_batch", "workload.prompt_tokens", "workload.output_tokens")
_WORDS = {
    "load.concurrency": "{} users", "load.rate": "{} req/s", "server.max_batch": "max batch {}",
    "workload.prompt_tokens": "prompt {}", "workload.output_tokens": "output {}", "server.precision": "{}",
    "server.engine": "{}", "server.model": "{}",
}  # fmt: skip
_TITLES = {
    "load.concurrency": "users (closed loop)", "load.rate": "requests per second asked for (open loop)",
    "server.max_batch": "max batch", "workload.prompt_tokens": "prompt tokens",
    "workload.output_tokens": "output tokens",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Axis:
    """What orders a sweep's points, and the curves that they make.

    ``key`` is the swept key that orders them, None where none has numbers; ``series`` has the points (positions in the
    sweep) of each curve in its order, after the words for the values that they share.
    """

    key: str | None
    title: str
    series: tuple[tuple[str, tuple[int, ...]], ...]


def axis_of(points: Sequence[Mapping[str, Any]]) -> Axis:
    """``points`` as in a sweep's manifest: mappings with ``values`` and ``loop``."""
    keys = list(dict.fromkeys(key for point in points for key in point["values"]))
    ordering = next((k for k in (*_FIRST, *keys) if k in keys and _numeric(points, k)), None)
    groups: dict[str, list[int]] = {}
    for at, point in enumerate(points):
        rest = {key: value for key, value in point["values"].items() if key != ordering}
        name = label(rest)
        if len({p["loop"] for p in points}) > 1:
            name = ", ".join(filter(None, (name, f"{point['loop']} loop")))
        groups.setdefault(name, []).append(at)

    def place(at: int) -> float:
        return float(points[at]["values"][ordering]) if ordering else at

    return Axis(
        ordering, _TITLES.get(ordering or "", (ordering or "").rpartition(".")[2]),
        tuple((name, tuple(sorted(group, key=place))) for name, group in groups.items()),
    )  # fmt: skip


def label(values: Mapping[str, Any]) -> str:
    """A point's values in words: ``8 users, float32``."""
    return ", ".join(_word(key, value) for key, value in values.items())


def _word(key: str, value: Any) -> str:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if key == "load.concurrency" and value == 1:
        return "1 user"
    text = significant(value, 4).rstrip("0").rstrip(".") if isinstance(value, float) and number else str(value)
    return _WORDS.get(key, f"{key.rpartition('.')[2].replace('_', ' ')} {{}}").format(text)


def _numeric(points: Sequence[Mapping[str, Any]], key: str) -> bool:
    """Whether every point has a number here, and they differ."""
    found = [point["values"].get(key) for point in points]
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in found)
    return numbers and len({str(value) for value in found}) > 1
