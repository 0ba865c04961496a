"""Percentiles as results hold them. In a file they stand side by side: ``p99_ms``, ``p99_ci_ms``, ``p999_ms``, …"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import GetJsonSchemaHandler, SerializerFunctionWrapHandler, model_serializer, model_validator
from pydantic_core import CoreSchema

from gapmeter.analysis.results.codec import Ends, Number, Result, left_out

_MOST_LATE = 0.1  # of a mean, as of a percentile
_KEY = re.compile(r"p(\d+)")
_SELDOM = ("needs", "at_most", "late_ms")  # what few percentiles have, by their names
_NUMBER = {"type": ["number", "null"]}
_ENDS = {"type": ["array", "null"], "items": _NUMBER, "minItems": 2, "maxItems": 2}


def percentile_key(percentile: float) -> str:
    """p50, p99, p999 for 99.9: the name without its point."""
    return f"p{percentile:g}".replace(".", "")


def figure_name(metric: str, level: float | None) -> str:
    """``p95 TTFT``, or ``mean TTFT``."""
    return f"{'mean' if level is None else f'p{level:g}'} {metric.upper()}"


def percentile_of_key(key: str) -> float:
    """Back from ``percentile_key``: two digits stand before the point. Raises ValueError."""
    match = _KEY.fullmatch(key)
    if match is None:
        raise ValueError(f"{key} is not a percentile's name, such as p99")
    digits = match[1]
    return float(digits) if len(digits) <= 2 else float(f"{digits[:2]}.{digits[2:]}")


class MainPercentiles(Result):
    """Of per-request values, None where the sample does not support one."""

    p50_ms: Number
    p90_ms: Number
    p95_ms: Number
    p99_ms: Number

    def ms(self, percentile: float) -> float | None:
        """One of them; None for any other."""
        return {50.0: self.p50_ms, 90.0: self.p90_ms, 95.0: self.p95_ms, 99.0: self.p99_ms}.get(percentile)


class Needs(Result):
    """How much more of the same would do: requests, and minutes at this rate (None: not known)."""

    requests: int
    minutes: Number


class AtMost(Result):
    """What a percentile does not exceed, with the one-sided ``confidence`` that the sample gives."""

    ms: float
    confidence: float


class KnownPercentile(Result):
    """A percentile with both ends of its 95 % interval."""

    percentile: float
    value_ms: float
    ci_ms: Ends


class Percentile(Result):
    """One percentile of a distribution, None where the sample does not support it.

    ``ci_ms``: its 95 % interval. ``infinite``: answers that never came reach it, so that it has no value. ``needs``:
    what would support it; ``at_most``: what bounds it meanwhile. ``late_ms``: it is refused, since so much of it may be
    the load tester's own lateness; ``at_most`` bounds it where that can only have added to it.
    """

    value_ms: Number = None
    ci_ms: Ends | None = None
    needs: Needs | None = None
    infinite: bool = False
    at_most: AtMost | None = None
    late_ms: Number = None


class Distribution(Result):
    """Values of one thing over the measured requests. ``max_ms`` and ``mean_ms`` are of those that are finite.

    ``mean_ms`` is None where refused percentiles brought too much of it. ``n_eff``: how many independent values they
    are worth, from p95 on.
    """

    percentiles: Mapping[float, Percentile]
    max_ms: Number
    mean_ms: Number
    count: int
    n_eff: float

    def at(self, percentile: float) -> Percentile:
        """One of ``percentiles``; without a value for one that was not asked for."""
        return self.percentiles.get(percentile, _NONE)

    def ms(self, percentile: float) -> float | None:
        """A percentile's value."""
        return self.at(percentile).value_ms

    @property
    def mean_late_ms(self) -> float | None:
        """What of the mean the refused percentiles may have brought, where that is more than a tenth of it."""
        brought, before = 0.0, 0.0
        for percentile, each in sorted(self.percentiles.items()):
            brought += (percentile - before) / 100 * (each.late_ms or 0.0)
            before = percentile
        return brought if brought > _MOST_LATE * (self.mean_ms or 0.0) else None

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, value: Any) -> Any:
        """From a file's keys."""
        if not isinstance(value, Mapping) or "percentiles" in value:
            return value
        rest = dict(value)
        infinite, seldom = rest.pop("infinite", ()), {name: rest.pop(name, {}) for name in _SELDOM}
        if not isinstance(infinite, list | tuple) or not all(isinstance(each, Mapping) for each in seldom.values()):
            raise ValueError(f"infinite is a list of percentiles' names, and {', '.join(_SELDOM)} are by such a name")
        gathered: dict[float, dict[str, Any]] = {}
        for key in value:
            name = key.removesuffix("_ms")
            if name != key and _KEY.fullmatch(name):
                gathered[percentile_of_key(name)] = {
                    "value_ms": rest.pop(key), "ci_ms": rest.pop(f"{name}_ci_ms", None),
                    "infinite": name in infinite, **{each: by_name.get(name) for each, by_name in seldom.items()},
                }  # fmt: skip
        return rest | {"percentiles": gathered}

    @model_serializer(mode="wrap")
    def _spread(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """As a file's keys."""
        rest: dict[str, Any] = handler(self)
        every = {percentile_key(float(percentile)): each for percentile, each in rest.pop("percentiles").items()}
        out: dict[str, Any] = {}
        for key, each in every.items():
            out |= {f"{key}_ms": each["value_ms"], f"{key}_ci_ms": each["ci_ms"]}

        def known(name: str) -> dict[str, Any]:
            return {key: each[name] for key, each in every.items() if each[name] is not None}

        infinite = [key for key, each in every.items() if each["infinite"]]
        seldom = {name: found for name in ("at_most", "late_ms") if (found := known(name))}
        return {**out, **rest, "needs": known("needs"), "infinite": infinite, **seldom}

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        reference = handler(schema)
        target = handler.resolve_ref_schema(reference)
        target["properties"].pop("percentiles", None)
        required = [name for name in target.get("required", ()) if name != "percentiles"]
        target["required"] = [*required, "needs", "infinite"]
        target["properties"] |= {
            "needs": {"type": "object", "additionalProperties": Needs.model_json_schema()},
            "infinite": {"type": "array", "items": {"type": "string"}},
            "at_most": {"type": "object", "additionalProperties": AtMost.model_json_schema()},
            "late_ms": {"type": "object", "additionalProperties": {"type": "number"}},
        }
        target["patternProperties"] = {r"^p\d+_ms$": _NUMBER, r"^p\d+_ci_ms$": _ENDS}
        return reference


_NONE = Percentile()


class MetricDistribution(Distribution):
    """Over the requests that succeeded; ``with_failures``: every failed one's value infinite, where requests failed."""

    with_failures: Distribution | None = left_out()


class CensoredDistribution(Distribution):
    """Over all requests, a failed one counted as at least as long as its time-out, ``censored_at_ms``.

    ``over_ms``: by name, percentiles that fall among them, with that bound.
    """

    censored_at_ms: Number
    over_ms: Mapping[str, float]


class StageDistribution(Distribution):
    """What one stage took. ``kind``: measured, transit, estimated or unmeasured."""

    owner: str
    kind: str


class GroupDistribution(Distribution):
    """The sum of a group's measured stages a request; ``unmeasured`` names the others."""

    unmeasured: tuple[str, ...]
