"""Searches for capacity, sweeps and runs as one table: what a request costs on each, and which is the cheapest.

The cost of a request is price / (3600 x rate x planned utilisation), so the ratio of two costs is that of the prices
over that of the rates. The rates are independent of each other (two servers, two searches), so their errors combine on
the logarithmic scale. With a and b the logarithms of two costs, each with its own interval:

    ln ratio = a - b
    down = sqrt((a - a_low)^2 + (b_high - b)^2 + s^2)
    up = sqrt((a_high - a)^2 + (b - b_low)^2 + s^2)

which is MOVER (Zou and Donner 2008, Statistics in Medicine 27) for intervals that need not be symmetric. s is z x the
spread of searches of one server, of each side that is a single search: what moves a whole search (a machine's mood) is
in no interval of its trials. Of several searches named as one side it is in the side's own interval. The more rows, the
more pairs chance has: both distances are multiplied by z(1 - 0.025 / pairs) / z(0.975), so that with 95 % confidence
all ratios hold together, whichever row turns out to be the cheapest. Where a row has no estimate (a run that passed may
hold more), the ends are divided by each other, which is wider still: each at its distance times the same factor, where
the row has an estimate to be distant from; s is multiplied by it, too. How sure an end without an estimate is, nothing
tells: it is taken as it is, however many rows there are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from string import ascii_uppercase

from gapmeter.analysis.compare.searches import SEARCH_SPREAD, ServerCapacity, compared_by, differing
from gapmeter.analysis.compare.sides import are_alike, flatten, words_apart
from gapmeter.analysis.numbers import counted, plain
from gapmeter.analysis.pareto import merged
from gapmeter.analysis.provenance import provenance_of_several
from gapmeter.analysis.results.comparison import NOT_COMPARABLE, Asked, Fact
from gapmeter.analysis.results.cost import Interval
from gapmeter.analysis.results.cost_table import (
    CHEAPER,
    NOT_ESTABLISHED,
    CostRatio,
    CostRow,
    CostTable,
    Doubt,
    ServedRatio,
)
from gapmeter.analysis.results.pareto import Pareto
from gapmeter.analysis.stats.estimate import CONFIDENCE, t_quantile

_SURE = t_quantile(math.inf)
_NO_SETTING = ("server.engine", "server.ready_timeout")  # told by itself; changes nothing
_OTHER_REQUESTS = 1.1  # from which mean tokens of a request are told to differ


def cost_table(found: Sequence[ServerCapacity], asked: Asked = Asked(), command: str = "") -> CostTable:
    """A row for each, the first of which the others are compared with.

    ``asked.factors`` are keys that may differ, ``asked.force`` compares what must not be.
    """
    names = [ascii_uppercase[at] if at < 26 else f"row {at + 1}" for at in range(len(found))]
    facts = [compared_by(one) for one in found]
    differs = [differing(facts[0], each, asked.factors) for each in facts]
    rows = [
        _row(name, one, setting, different)
        for name, one, setting, different in zip(names, found, _settings(found, asked.factors), differs, strict=True)
    ]
    comparable = [at for at, row in enumerate(rows) if asked.force or not row.blocking]
    usable = [at for at in comparable if rows[at].per_request_usd_ci]
    best = min(usable, key=lambda at: _rank(rows[at])) if len(usable) > 1 else None
    if best is not None:
        pairs = len(usable) * (len(usable) - 1) // 2
        for at in usable:
            spread = math.hypot(found[at].spread, found[best].spread)
            ratio = ratio_of(rows[at], rows[best], spread, pairs) if at != best else _ONE
            rows[at] = rows[at].model_copy(update={"ratio": ratio})
    plane = merged([(row.name, one.pareto) for row, one in zip(rows, found, strict=True)])
    closed = [rows[at].name for at in comparable if found[at].scenario["load"]["arrivals"] == "closed"]
    refused = sum(bool(row.blocking) for row in rows)
    ratios = [row.ratio for row in rows if row.ratio]
    established = bool(ratios) and all(ratio.doubt is None for ratio in ratios)
    verdict = CHEAPER if established else NOT_ESTABLISHED
    return CostTable(
        verdict=NOT_COMPARABLE if refused == len(rows) - 1 and not asked.force else verdict,
        cheapest=None if best is None else rows[best].name,
        search_spread=SEARCH_SPREAD,
        rows=tuple(rows),
        pareto=plane,
        served=tuple(_served(plane, closed)) if plane else (),
        notes=tuple(_notes(rows, found)),
        command=command,
        provenance=provenance_of_several(
            [one.provenance for one in found], command, n=" and ".join(one.provenance.n for one in found)
        ),
        asked=asked,
    )


# --- rows and ratios


def _settings(found: Sequence[ServerCapacity], factors: Sequence[str]) -> list[str]:
    """The engine of each, and what is not the same in all rows: its server's, who had which cores, what may differ."""
    each = [flatten(one.scenario) for one in found]
    keys = dict.fromkeys(
        [*(key for one in each for key in one if key.startswith("server.")), "load.placement", *factors]
    )
    columns = {key: [one.get(key) for one in each] for key in keys if key not in _NO_SETTING}
    told = [
        [f"{key.removeprefix('server.').removeprefix('args.')} {said}" for said in words_apart(*values)]
        for key, values in columns.items()
        if not all(are_alike(values[0], other) for other in values)
    ]
    return [", ".join([str(one["server.engine"]), *said]) for one, *said in zip(each, *told, strict=True)]


def _row(name: str, found: ServerCapacity, setting: str, differs: tuple[Fact, ...]) -> CostRow:
    rate, price, tokens = found.capacity, found.price, found.tokens

    def at(per_s: float | None, many: float | None = 1.0) -> float | None:
        """What a request costs at a rate, over ``many``."""
        return None if price is None or not per_s or not many else price.of_request(per_s) / many

    ends = (at(rate.high), at(rate.low))
    output, output_ci = None, None
    if tokens and tokens.low and tokens.high and ends[1] is not None:
        scaled = [many / 1e6 for many in (tokens.value, tokens.high, tokens.low)]
        output, output_ci = at(rate.rate, scaled[0]), (at(rate.high, scaled[1]), at(rate.low, scaled[2]))
    return CostRow(
        name=name,
        folders=found.folders,
        kind=found.kind,
        scenario=str(found.scenario["name"]),
        device=found.device,
        setting=setting,
        simulated=found.scenario["server"]["engine"] == "simulated",
        differs=differs,
        capacity=rate,
        price=price,
        why_no_cost=rate.why or found.why_no_price,
        per_request_usd=at(rate.rate),
        per_request_usd_ci=ends if ends[1] is not None else None,
        per_million_output_tokens_usd=output,
        per_million_output_tokens_usd_ci=output_ci,
        energy_per_request_j=found.energy.value if found.energy else None,
        energy_per_request_j_ci=(found.energy.low, found.energy.high) if found.energy else None,
        binding_slo=found.binding[0],
        binding_stage=found.binding[1],
        fleet=found.fleet,
        ratio=None,
    )


_ONE = CostRatio(value=1.0, low=1.0, high=1.0, own=(1.0, 1.0), doubt=None)


def _rank(row: CostRow) -> tuple[float, float]:
    """The estimate, else the most that it costs; of two that cost the same, the higher rate comes first."""
    ends = row.per_request_usd_ci
    return row.per_request_usd or (ends[1] if ends and ends[1] else math.inf), -(row.capacity.rate or 0.0)


def ratio_of(a: CostRow, b: CostRow, spread: float, pairs: int) -> CostRatio:
    """What a request costs in one row over what it costs in the cheapest; the formula is this module's.

    ``spread``: of both rates, what moves whole searches (see ServerCapacity).
    """
    wide = t_quantile(math.inf, 1 - (1 - CONFIDENCE) / pairs) / _SURE
    own = _ends(a, b, wide, 0.0)
    low, high = _ends(a, b, wide, _SURE * spread)
    value = a.per_request_usd / b.per_request_usd if a.per_request_usd and b.per_request_usd else None
    doubt: Doubt | None = "spread"
    if low is not None and low > 1:
        doubt = None
    elif low is None or value is None:
        doubt = "open"
    elif own[0] is None or own[0] <= 1:
        doubt = "interval"
    return CostRatio(value=value, low=low, high=high, own=own, doubt=doubt)


def _ends(a: CostRow, b: CostRow, wide: float, spread: float) -> tuple[float | None, float | None]:
    """Both ends of the ratio of two costs; None where one of the costs lacks the end that it takes."""
    a_ends, b_ends = a.per_request_usd_ci or (None, None), b.per_request_usd_ci or (None, None)

    def end(numerator: int) -> float | None:
        """0: the low end, from the cheapest of a and the dearest of b; 1: the other way round."""
        sign, top, bottom = (-1, 1)[numerator], a_ends[numerator], b_ends[1 - numerator]
        if top is None or bottom is None:
            return None
        distances = [wide * each for each in (_at_95(a, top), _at_95(b, bottom), spread)]
        away = math.hypot(*distances) if a.per_request_usd and b.per_request_usd else sum(distances)
        return (a.per_request_usd or top) / (b.per_request_usd or bottom) * math.exp(sign * away)

    return end(0), end(1)


def _at_95(row: CostRow, end: float) -> float:
    """How far an end lies from its estimate, on the logarithmic scale, if its interval were a 95 % one; 0 without."""
    if row.per_request_usd is None:
        return 0.0
    return abs(math.log(end / row.per_request_usd)) * _SURE / t_quantile(math.inf, row.capacity.confidence)


def _served(plane: Pareto, names: Sequence[str]) -> Iterable[ServedRatio]:
    """What rows of these served of what the first of them did, where both had as many users in a closed loop."""
    points = [point for point in plane.points if point.is_valid and point.side in names]
    first = {point.name: point.tokens_per_s_unit for point in points if point.side == names[0]}
    for point in points:
        served, by_first = point.tokens_per_s_unit, first.get(point.name)
        if point.side != names[0] and served and by_first:
            yield ServedRatio(row=point.side, over=names[0], point=point.name, times=_over(served, by_first))


def _over(a: Interval, b: Interval) -> Interval:
    """Their ratio, with the interval that both of theirs give; the formula is this module's."""

    def end(sign: int, top: float | None, bottom: float | None) -> float | None:
        if not top or not bottom:
            return None
        return a.value / b.value * math.exp(sign * math.hypot(math.log(top / a.value), math.log(bottom / b.value)))

    return Interval(value=a.value / b.value, low=end(-1, a.low, b.high), high=end(1, a.high, b.low))


# --- the rest


def _notes(rows: Sequence[CostRow], found: Sequence[ServerCapacity]) -> Iterable[str]:
    """What must be kept in mind."""
    if defaults := [row.name for row in rows if row.price and row.price.is_default]:
        have = "has a default price" if len(defaults) == 1 else "have default prices"
        yield f"{' and '.join(defaults)} {have}; set yours with cost.usd_per_hour"
    for row in rows:
        if row.price and row.price.measured_on:
            yield f"{row.name} is priced as {row.price.device}, but was measured on {row.price.measured_on}"
    for row, one in zip(rows, found, strict=True):
        if one.disturbed:
            yield (
                f"in {counted(one.disturbed, 'trial')} of {row.name} another program used the server's cores, or the "
                "load tester's CPU changed its speed, so its rate is for the machine as it was then"
            )
    first, ours = found[0], [one for one in found if one.is_server_here]
    if any(one.hardware.gpus for one in ours):
        hosts = dict.fromkeys(f"{one.hardware.cpu}, {counted(one.hardware.cores, 'core')}" for one in ours)
        if len(hosts) > 1:
            yield f"the machines differ in more than their GPUs: {' | '.join(hosts)}"
    for row, one in zip(rows[1:], found[1:], strict=True):
        for side, a, b in (
            ("prompt", first.prompt_tokens, one.prompt_tokens),
            ("output", first.tokens and first.tokens.value, one.tokens and one.tokens.value),
        ):
            if a and b and max(a, b) > _OTHER_REQUESTS * min(a, b):
                yield f"a request of {row.name} has {plain(b)} {side} tokens, one of {rows[0].name} {plain(a)}"
