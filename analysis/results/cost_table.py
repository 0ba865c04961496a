"""Which device or setting serves a request for less, a row each: ``compare.json`` of its folder.

Rates are requests per second, money USD, shares fractions; None means that nothing tells.
"""

from __future__ import annotations

from typing import ClassVar, Final, Literal

from gapmeter.analysis.results.capacity import Fleet
from gapmeter.analysis.results.codec import Ends, Number, Result, ResultFile, left_out
from gapmeter.analysis.results.comparison import BLOCKS, Asked, Fact
from gapmeter.analysis.results.cost import Interval, Price
from gapmeter.analysis.results.pareto import Pareto
from gapmeter.analysis.results.run import Provenance

CHEAPER: Final = "CHEAPER"
NOT_ESTABLISHED: Final = "NOT ESTABLISHED"

# Why a ratio does not tell which is cheaper: 1 lies in the interval that both capacities give; only in the one that is
# wide enough for what two searches of one server differ by; an end is missing.
Doubt = Literal["interval", "spread", "open"]


class HeldRate(Result):
    """The highest rate at which every SLO holds: ``rate`` between ``low`` and ``high``, with ``confidence``.

    ``held``: the highest rate that was tried and surely held. ``why`` there is no ``low``, else "".
    """

    rate: Number
    low: Number
    high: Number
    held: Number
    confidence: float
    why: str


class CostRatio(Result):
    """What a request costs, as a multiple of what it costs in the cheapest row, with its 95 % interval.

    ``own``: the interval without the allowance for single searches. ``doubt``: None where it is established that this
    row is dearer (or it is the cheapest itself).
    """

    value: Number
    low: Number
    high: Number
    own: Ends
    doubt: Doubt | None


class CostRow(Result):
    """A device with a setting. ``folders``: the searches, or the run or the sweep, that it is from.

    ``differs``: from the first row, in what must be the same for a comparison. Costs are those at the capacity's
    estimate, each with its interval; without an estimate there is only the interval. ``why_no_cost``: "" with a cost.
    """

    name: str
    folders: tuple[str, ...]
    kind: Literal["run", "sweep", "capacity"]
    scenario: str
    device: str
    setting: str
    simulated: bool
    differs: tuple[Fact, ...]
    capacity: HeldRate
    price: Price | None
    why_no_cost: str
    per_request_usd: Number
    per_request_usd_ci: Ends | None
    per_million_output_tokens_usd: Number
    per_million_output_tokens_usd_ci: Ends | None
    energy_per_request_j: Number
    energy_per_request_j_ci: Ends | None
    binding_slo: str | None
    binding_stage: str | None
    fleet: Fleet | None
    ratio: CostRatio | None

    @property
    def blocking(self) -> tuple[Fact, ...]:
        """What keeps it from being compared with the first row."""
        return tuple(fact for fact in self.differs if fact.meaning == BLOCKS)


class ServedRatio(Result):
    """Output tokens per second and unit of hardware in ``row``, over those of the row ``over`` with as many users.

    ``times``: with its 95 % interval, from both loads' own; how much repeated runs differ is not in it.
    """

    row: str
    over: str
    point: str
    times: Interval


class CostWords(Result):
    """The answer in sentences, for people who read the file."""

    headline: str
    why: tuple[str, ...]


class CostTable(ResultFile):
    """Devices and settings side by side, each at the rate that holds its SLOs. ``cheapest``: a row's name.

    ``search_spread``: the standard deviation, on the logarithmic scale, of searches of one and the same server: every
    ratio allows for it, and every interval of several searches named as one side.
    """

    FILE: ClassVar[str] = "compare.json"
    REMEDY: ClassVar[str] = "compare them again: gapmeter compare"

    schema_version: Literal[1] = 1  # names are only ever added; counted up when one is renamed
    kind: Literal["costs"] = "costs"
    verdict: Literal["CHEAPER", "NOT ESTABLISHED", "NOT COMPARABLE"]
    cheapest: str | None
    search_spread: float
    rows: tuple[CostRow, ...]
    pareto: Pareto | None = left_out()
    served: tuple[ServedRatio, ...] = ()
    notes: tuple[str, ...]
    command: str
    provenance: Provenance
    asked: Asked
    words: CostWords | None = left_out()
