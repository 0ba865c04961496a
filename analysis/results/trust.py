"""How far a run's figures can be trusted: checks, warnings, the load tester's own floor, steadiness, drift."""

from __future__ import annotations

from typing import Final, Literal

from gapmeter.analysis.results.codec import Ends, Number, Result, left_out
from gapmeter.analysis.results.manifest import FloorFigures

CheckStatus = Literal["ok", "warn", "broken", "unmeasured"]
OK: Final = "ok"
WARN: Final = "warn"
BROKEN: Final = "broken"
UNMEASURED: Final = "unmeasured"


class Check(Result):
    """One rule: what was found, what it may be, and the plain sentence. ``value`` None where unmeasured.

    ``value`` and ``limit`` are in the rule's unit: ns for ``lag``, ``loop_lag`` and ``awake``, else a share,
    a ratio or a number.
    """

    rule: str
    status: CheckStatus
    value: Number
    limit: Number
    text: str


class RunWarning(Result):
    """What was seen, the likely cause, the exact flag to try (or nothing), and the numbers that it touches."""

    code: str
    text: str
    cause: str
    flag: str
    touches: tuple[str, ...]


class Floor(FloorFigures):
    """What the load tester itself adds on this machine, and what one of its processes can do."""

    tokens_per_s: float
    requests_per_s: float
    measured: str


class ReceiveWait(Result):
    """How long what arrived lay in the client's kernel until the load tester read it: in no latency.

    ``stamped``: the share of all pieces of the measured requests' answers that have the kernel's stamp.
    """

    stamped: float
    p50_ms: Number
    p99_ms: Number
    max_ms: Number


class Trust(Result):
    """How far the other figures can be trusted. ``strained``: the rules that warn.

    ``receive_wait`` None: unmeasured, and bytes had arrived when the load tester read them.
    """

    valid: bool
    lag_p99_ms: Number
    unexplained_p99_share: Number
    strict_p99_share: Number
    unstamped_p99_share: Number
    client_cpu_share: Number
    receive_wait: ReceiveWait | None = None
    strained: tuple[str, ...]


class Mser5(Result):
    """What MSER-5 would leave out; ``applied``: and did."""

    state: str
    excluded_requests: int
    metric: str
    ratio: Number
    applied: bool


class LevelChange(Result):
    """A change of level: the first request after it, and the ratio of after to before."""

    request: int
    metric: str
    ratio: Number
    certain: bool


class Pelt(Result):
    """The changes that PELT sees, and whether they tell what MSER-5 tells."""

    changes: tuple[LevelChange, ...]
    agrees: bool


class QueueSlope(Result):
    """Growth of the number in flight, a second. ``in_flight``: on the fitted line, at its ends.

    ``steady_most``: the growth over the window that a steady queue seldom exceeds; ``served_per_s``: answers that ended
    within the window.
    """

    per_s: float
    per_s_ci: tuple[float, float]
    confidence: float
    in_flight: tuple[float, float]
    grows: bool
    steady_most: float
    served_per_s: Number


class SteadyMethods(Result):
    """None where a method was not asked."""

    mser5: Mser5 | None
    pelt: Pelt | None
    queue_slope: QueueSlope | None


class Steady(Result):
    """Whether there was a steady state."""

    state: Literal["steady", "unsteady", "unknown", "not_applicable"]
    methods: SteadyMethods
    valid_for_capacity: bool

    @property
    def lasts(self) -> bool:
        """Whether nothing that was found speaks against a longer run like this one."""
        return self.valid_for_capacity or self.state in ("unknown", "not_applicable")


class Ratio(Result):
    """Of the first seconds to the rest, with its 95 % interval."""

    ratio: Number
    ratio_ci: Ends


class SpeedChange(Result):
    """When the machine became slower or faster: seconds after the first due time, and how many times the time before.

    ``ratio``: of what a fixed piece of CPU work took after it to what it took before, geometric means.
    """

    after_s: float
    ratio: float


class Drift(Result):
    """The first seconds against the rest; None where nothing supports a ratio. ``machine_change``: None for none."""

    first_s: float
    ttft: Ratio | None
    tpot: Ratio | None
    output_tokens_per_s: Ratio | None
    machine_time: Ratio | None
    reason: str | None
    machine_change: SpeedChange | None = left_out()
