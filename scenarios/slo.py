"""SLOs in the field's words: ``ttft p99 <= 500 ms``, ``errors <= 1 %``."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, PlainSerializer, PlainValidator, WithJsonSchema

from gapmeter.scenarios.errors import BadValue, did_you_mean, either, quoted
from gapmeter.scenarios.values import Wording

LATENCIES = ("ttft", "itl", "tpot", "e2e")
BETWEEN_TOKENS = ("itl", "tpot")  # of these: the same whenever a request was due, or sent
_METRICS = (*LATENCIES, "errors")

_UNIT_NS = {"us": 1_000, "µs": 1_000, "ms": 1_000_000, "s": 1_000_000_000}
_LONGEST_NS = 86_400_000_000_000
_SHAPE = re.compile(
    r"(?P<metric>[A-Za-z]\w*)\s*(?P<percentile>[pP][\d.]+)?\s*(?P<sign>[<>=]{1,2})\s*(?P<limit>[\d.]+)\s*(?P<unit>\S*)"
)
_EXAMPLE = "ttft p99 <= 500 ms or errors <= 1 %"
_NUMBER = r"\d+(\.\d+)?"
_ROUNDING = 1e-9

# What an SLO looks like, for a JSON Schema.
_TIME = rf"({'|'.join(LATENCIES)})\s+p{_NUMBER}\s*<=\s*{_NUMBER}\s*({'|'.join(_UNIT_NS)})"
SLO_PATTERN = rf"^\s*({_TIME}|errors\s*<=\s*{_NUMBER}\s*%)\s*$"


class Slo(BaseModel):
    """One limit. Times have ``limit_ns`` and a percentile (99.9 for p99.9), ``errors`` has ``limit_share``."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    metric: str
    percentile: float | None
    limit_ns: int | None
    limit_share: float | None
    text: str

    @property
    def allowed(self) -> float:
        """The share of values that may exceed the limit: 0.01 of a p99, of errors the limit itself."""
        return self.limit_share if self.limit_share is not None else 1 - (self.percentile or 0) / 100

    def allows(self, share: float) -> bool:
        """Whether so large a share may exceed the limit: 20 of 200 of a p90, too, for which 1 - 0.9 is too small."""
        return share <= self.allowed + _ROUNDING


def parse_slo(value: object) -> Slo:
    """One SLO; raises BadValue."""
    words = _SHAPE.fullmatch(value.strip()) if isinstance(value, str) else None
    if words is None:
        raise BadValue(f"{quoted(value)} is not an SLO; write {_EXAMPLE}")
    metric, percentile, unit, limit = words["metric"].lower(), words["percentile"], words["unit"], words["limit"]
    unit = unit.replace("\u03bc", "µ")  # the Greek letter, which looks like the sign
    if metric not in _METRICS:
        hint = did_you_mean(metric, _METRICS)
        raise BadValue(f"{quoted(words['metric'])} is not a metric; {hint}write {either(_METRICS)}")
    if words["sign"] != "<=":
        raise BadValue(f"{quoted(words['sign'])} is not a comparison; an SLO is an upper limit, write <=")
    if metric != "errors":
        return _time(metric, percentile, _number(limit), unit)
    percent = _number(limit)
    if percentile:
        raise BadValue("errors is a share and has no percentile; write errors <= 1 %")
    if unit != "%":
        raise BadValue(f"the limit {quoted(limit + unit)} lacks its unit; write {percent:.12g} %")
    if not percent:
        raise BadValue("no run can show that nothing ever fails; write for instance errors <= 0.1 %")
    if percent > 100:
        raise BadValue(f"{percent:.12g} % is more than every request; write at most 100 %")
    text = f"errors <= {_plain(percent)} %"
    return Slo(metric=metric, percentile=None, limit_ns=None, limit_share=percent / 100, text=text)


def _time(metric: str, percentile: str | None, limit: float, unit: str) -> Slo:
    if not percentile:
        raise BadValue(f"{metric} lacks its percentile; write {metric} p99 <= {limit:.12g} ms")
    rank = _number(percentile[1:])
    if not 0 < float(f"{rank:.12g}") < 100:
        raise BadValue(f"p{rank:.12g} is not a percentile; write one between p0 and p100, for instance p99")
    if float(f"{rank:g}") != rank or (rank < 10 and rank % 1):
        raise BadValue(f"p{rank:.12g} has too many digits; write whole ones below p10, and at most six digits above")
    if unit not in _UNIT_NS:
        problem = f"{quoted(unit)} is not a unit of time" if unit else f"the limit {limit:.12g} lacks its unit"
        raise BadValue(f"{problem}; write {limit:.12g} ms or {limit:.12g} s")
    limit_ns = limit * _UNIT_NS[unit]
    if limit_ns < 1:
        raise BadValue(f"a limit of {limit:.12g} {unit} can never hold; write what users can wait, for instance 500 ms")
    if limit_ns > _LONGEST_NS:
        raise BadValue(f"the limit {limit:.12g} {unit} is out of range; write at most 24 hours (86400 s)")
    text = f"{metric} p{_plain(rank)} <= {_plain(limit)} {unit}"
    return Slo(metric=metric, percentile=rank, limit_ns=round(limit_ns), limit_share=None, text=text)


def _plain(number: float) -> str:
    """A number as it can be read back: 0.00005 and not 5e-05."""
    return format(Decimal(f"{number:.12g}"), "f")


def _number(digits: str) -> float:
    try:
        return float(digits)
    except ValueError:
        raise BadValue(f"{quoted(digits)} is not a number; write for instance {_EXAMPLE}") from None


_WrittenSlo = Annotated[
    Slo,
    PlainValidator(parse_slo),
    PlainSerializer(lambda slo: slo.text),
    WithJsonSchema({"type": "string", "pattern": SLO_PATTERN}),
]


def _check_once(slos: tuple[Slo, ...]) -> tuple[Slo, ...]:
    """Results list SLOs by their texts (Prometheus, JUnit): two of one text could not be told apart."""
    texts = [slo.text for slo in slos]
    for at, text in enumerate(texts):
        if text in texts[:at]:
            raise BadValue(f"{text} appears twice; remove one", (at,))
    return slos


Slos = Annotated[
    tuple[_WrittenSlo, ...],
    AfterValidator(_check_once),
    Wording("a list of SLOs", 'for instance ["ttft p99 <= 500 ms"]'),
]
