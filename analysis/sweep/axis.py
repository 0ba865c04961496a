"""How a sweep's points are put in order: which key is the load, which others make separate curves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gapmeter.analysis.numbers import significant
from gapmeter.analysis.sweep.result import PointFacts

# What a load is, then the server's size, then whatever else has numbers.
_FIRST = ("load.concurrency", "load.rate", "server.max_batch", "workload.prompt_tokens", "workload.output_tokens")
LOAD = "load"  # the key that orders points of both loops: users of the one, requests per second of the other
_WORDS = {
    "load.concurrency": "{} users", "load.rate": "{} req/s", "server.max_batch": "max batch {}",
    "workload.prompt_tokens": "prompt {}", "workload.output_tokens": "output {}", "server.precision": "{}",
    "server.engine": "{}", "server.model": "{}",
}  # fmt: skip
_TITLES = {
    LOAD: "users, or requests per second",
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


def axis_of(points: Sequence[PointFacts]) -> Axis:
    """The axis of these points, which have the same swept keys."""
    keys = list(dict.fromkeys(key for point in points for key in point.resolved))
    loops = {point.loop for point in points}
    ordering = next((k for k in (LOAD, *_FIRST, *keys) if (k in keys or k == LOAD) and _numeric(points, k)), None)
    ordered_by = ("load.concurrency", "load.rate", "load.arrivals") if ordering == LOAD else (ordering,)
    groups: dict[str, list[int]] = {}
    for at, point in enumerate(points):
        name = label({key: value for key, value in point.resolved.items() if key not in ordered_by})
        if len(loops) > 1:
            name = ", ".join(filter(None, (name, f"{point.loop} loop")))
        groups.setdefault(name, []).append(at)

    def rank(at: int) -> float:
        return place(points[at], ordering) if ordering else at

    return Axis(
        ordering, _TITLES.get(ordering or "", (ordering or "").rpartition(".")[2]),
        tuple((name, tuple(sorted(group, key=rank))) for name, group in groups.items()),
    )  # fmt: skip


def is_load(key: str | None) -> bool:
    """Whether a key says how much load there is, so that its curve may have a knee."""
    return key in (LOAD, "load.concurrency", "load.rate")


def place(point: PointFacts, key: str) -> float:
    """Where a point lies along the key that orders it."""
    return float(_value(point, key))


def _value(point: PointFacts, key: str) -> Any:
    """A point's value; its load is how many users or requests per second its loop asked for, where both loops occur."""
    if key != LOAD:
        return point.resolved.get(key)
    swept = {"load.concurrency", "load.rate"} <= set(point.resolved)
    return point.resolved.get("load.concurrency" if point.loop == "closed" else "load.rate") if swept else None


def label(values: Mapping[str, Any]) -> str:
    """A point's name, from its values: ``8 users, float32``."""
    return ", ".join(_word(key, value) for key, value in values.items() if value is not None)


def _word(key: str, value: Any) -> str:
    if key == "load.concurrency" and value == 1:
        return "1 user"
    if isinstance(value, float):
        text = significant(value, 4).rstrip("0").rstrip(".")
    else:
        text = value if isinstance(value, str) else json.dumps(value)
    return _WORDS.get(key, f"{key.rpartition('.')[2].replace('_', ' ')} {{}}").format(text)


def _numeric(points: Sequence[PointFacts], key: str) -> bool:
    """Whether every point has a number here, and they differ."""
    found = [_value(point, key) for point in points]
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in found)
    return numbers and len({str(value) for value in found}) > 1
