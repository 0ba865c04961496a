"""The points of a sweep as they are written: a grid, or a list."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gapmeter.scenarios.errors import BadValue, quoted

MOST_POINTS = 1000
_EXAMPLE = "sweep: {load.concurrency: [1, 2, 4, 8]}"


@dataclass(frozen=True, slots=True)
class PointValue:
    """One value of one point, and where in the sweep it stands."""

    value: object
    path: tuple[str | int, ...]


def spelled_points(value: Any) -> Iterator[dict[str, PointValue]]:
    """Each point, its values as they were written. Raises BadValue for what is neither a grid nor a list of points."""
    if isinstance(value, dict) and value:
        for key, values in value.items():
            if not isinstance(values, list) or not values:
                raise BadValue(f"{quoted(values)} is not a list of values; write for instance {_EXAMPLE}", (key,))
        if (count := math.prod(len(values) for values in value.values())) > MOST_POINTS:
            raise BadValue(f"these are {count} points, more than {MOST_POINTS}; write fewer values")
        rows = ([PointValue(v, (key, at)) for at, v in enumerate(values)] for key, values in value.items())
        yield from (dict(zip(value, row, strict=True)) for row in itertools.product(*rows))
    elif isinstance(value, list):
        if len(value) > MOST_POINTS:
            raise BadValue(f"these are {len(value)} points, more than {MOST_POINTS}; write fewer")
        for at, point in enumerate(value):
            if not isinstance(point, dict) or not point:
                text = f"{quoted(point)} is no point; write for instance {{server.max_batch: 8, load.rate: 16}}"
                raise BadValue(text, (at,))
            yield {key: PointValue(v, (at, key)) for key, v in point.items()}
    else:
        raise BadValue(f"{quoted(value)} is neither a grid nor a list of points; write for instance {_EXAMPLE}")


def read_points(value: object, check: Callable[[str, object], None]) -> tuple[Mapping[str, object], ...]:
    """The points as values, empty for no sweep; ``check`` raises BadValue for what a key cannot take.

    Raises BadValue, also for a point that appears twice.
    """
    points: list[Mapping[str, object]] = []
    for spelled in spelled_points(value):
        for key, part in spelled.items():
            try:
                check(key, part.value)
            except BadValue as error:
                raise BadValue(error.text, (*part.path, *error.path)) from error
        point = {key: part.value for key, part in spelled.items()}
        if point in points:
            named = ", ".join(f"{key}: {quoted(part)}" for key, part in point.items())
            raise BadValue(f"{named} appears twice; repeat: 2 repeats every point")
        points.append(point)
    return tuple(points)
