"""SLOs in the field's words: ``ttft p99 <= 500 ms``, ``errors <= 1 %``."""

from __future__ import annotations

import re
from typing import Any

from gapmeter.scenarios.errors import BadValue, either, nearest, quoted
from gapmeter.scenarios.model import Slo
from gapmeter.scenarios.values import Type

TIMES = ("ttft", "itl", "tpot", "e2e")
METRICS = (*TIMES, "errors")

_UNIT_NS = {"us": 1_000, "µs": 1_000, "ms": 1_000_000, "s": 1_000_000_000}
_LONGEST_NS = 86_400_000_000_000
_SHAPE = re.compile(
    r"(?P<metric>[A-Za-z]\w*)\s*(?P<percentile>[pP][\d.]+)?\s*(?P<sign>[<>=]{1,2})\s*(?P<value>[\d.]+)\s*(?P<unit>\S*)"
)
_EXAMPLE = "ttft p99 <= 500 ms or errors <= 1 %"


def slos() -> Type:
    """A list of SLOs."""
    times, units = "|".join(TIMES), "|".join(_UNIT_NS)
    number = r"\d+(\.\d+)?"
    pattern = rf"^\s*(({times})\s+p{number}\s*<=\s*{number}\s*({units})|errors\s*<=\s*{number}\s*%)\s*$"
    return Type(_read_all, {"type": "array", "items": {"type": "string", "pattern": pattern}})


def _read_all(value: Any) -> tuple[Slo, ...]:
    if not isinstance(value, list):
        raise BadValue(f"{quoted(value)} is not a list of SLOs; write [{quoted('ttft p99 <= 500 ms')}]")
    return tuple(parse_slo(item, at) for at, item in enumerate(value))


def parse_slo(value: object, at: int = 0) -> Slo:
    """One SLO, the ``at``-th of its list; raises BadValue."""
    found = _SHAPE.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is None:
        raise BadValue(f"{quoted(value)} is not an SLO; write {_EXAMPLE}", (at,))
    metric, sign = found["metric"].lower(), found["sign"]
    if metric not in METRICS:
        close = nearest(metric, METRICS)
        hint = f"did you mean {close}? " if close else ""
        raise BadValue(f"{quoted(found['metric'])} is not a metric; {hint}write {either(METRICS)}", (at,))
    if sign != "<=":
        raise BadValue(f"{quoted(sign)} is not a comparison; an SLO is an upper limit, write <=", (at,))
    limit = _number(found["value"], at)
    if metric == "errors":
        return _errors(found, limit, at)
    return _time(metric, found, limit, at)


def _errors(found: re.Match[str], limit: float, at: int) -> Slo:
    if found["percentile"]:
        raise BadValue("errors is a share and has no percentile; write errors <= 1 %", (at,))
    if found["unit"] != "%":
        raise BadValue(
            f"the limit {quoted(found['value'] + found['unit'])} lacks its unit; write {limit:.12g} %", (at,)
        )
    if limit > 100:
        raise BadValue(f"{limit:.12g} % is more than every request; write at most 100 %", (at,))
    return Slo("errors", None, None, limit / 100, f"errors <= {limit:.12g} %")


def _time(metric: str, found: re.Match[str], limit: float, at: int) -> Slo:
    if not found["percentile"]:
        raise BadValue(f"{metric} lacks its percentile; write {metric} p99 <= {limit:.12g} ms", (at,))
    percentile = _number(found["percentile"][1:], at)
    if not 0 < float(f"{percentile:.12g}") < 100:
        raise BadValue(
            f"p{percentile:.12g} is not a percentile; write one between p0 and p100, for instance p99", (at,)
        )
    unit = found["unit"]
    if unit not in _UNIT_NS:
        problem = f"{quoted(unit)} is not a unit of time" if unit else f"the limit {limit:.12g} lacks its unit"
        raise BadValue(f"{problem}; write {limit:.12g} ms or {limit:.12g} s", (at,))
    if limit * _UNIT_NS[unit] < 1:
        raise BadValue(
            f"a limit of {limit:.12g} {unit} can never hold; write what users can wait, for instance 500 ms", (at,)
        )
    if limit * _UNIT_NS[unit] > _LONGEST_NS:
        raise BadValue(f"the limit {limit:.12g} {unit} is out of range; write at most 24 hours (86400 s)", (at,))
    text = f"{metric} p{percentile:.12g} <= {limit:.12g} {unit}"
    return Slo(metric, percentile, round(limit * _UNIT_NS[unit]), None, text)


def _number(digits: str, at: int) -> float:
    try:
        return float(digits)
    except ValueError:
        raise BadValue(f"{quoted(digits)} is not a number; write for instance {_EXAMPLE}", (at,)) from None
