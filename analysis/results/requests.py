"""What was asked of the server and what came of it, as the client saw it: load, counts, failures, throughput."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from gapmeter.analysis.results.codec import Ends, Number, Result, left_out, stands_as
from gapmeter.analysis.results.distribution import Distribution, MainPercentiles

ENDED_BY_US = ("aborted", "lost")  # no server failed these: the run was stopped, or their recorder died


class LoadFacts(Result):
    """What was asked of the server, and what was delivered of it. Rates in requests a second, or in conversations."""

    loop: Literal["open", "closed"]
    arrivals: str
    requested_rate: Number
    unit: str
    conversation_rate: Number
    rate_range: tuple[float, float] | None
    concurrency: int | None
    prefix_share: Number
    cached_share: Number
    delivered_rate: Number
    dispersion: Number
    lag_p99_ms: Number
    lag_p50_ms: Number
    window_s: float
    locustfile: str | None = left_out()


class Attempts(Result):
    """Of the measured requests. ``failed``: attempts that were followed by another, by class."""

    total: int
    asked_again: int
    then_succeeded: int
    failed: Mapping[str, int]


class Counts(Result):
    """Requests: ``planned`` and ``issued`` with the warm-up, the others without it; ``failed`` by class."""

    unissued: int | None
    planned: int
    issued: int
    warmup: int
    abandoned: int
    beyond_end: int | None
    measured: int
    succeeded: int
    attempts: Attempts
    failed: Mapping[str, int]

    @property
    def ended_by_us(self) -> int:
        """Of the failed ones, those that no server failed."""
        return sum(self.failed.get(name, 0) for name in ENDED_BY_US)

    @property
    def failed_by_server(self) -> int:
        """The other failed ones."""
        return sum(self.failed.values()) - self.ended_by_us

    @property
    def ended(self) -> int:
        """Measured requests whose end was the server's doing: what shares of good and of failed ones are of."""
        return self.measured - self.ended_by_us


class Turn(Result):
    """One turn of the conversations; ``ttft`` over those that succeeded."""

    turn: int
    requests: int
    prompt_tokens: float
    cached_share: Number
    ttft: Distribution | None


class Corrected(MainPercentiles):
    """Percentiles with the ``added`` requests in them that users at their own pace would have sent meanwhile."""

    added: int
    p999_ms: Number


class Omission(Result):
    """A closed loop's figures, corrected for coordinated omission at the users' own pace."""

    expected_interval_ms: float
    ttft: Corrected
    e2e: Corrected


class ClosedLoop(Result):
    """``corrected`` is None where nothing was omitted, or nobody's pace is known."""

    corrected: Omission | None


class Outage(Result):
    """So many requests in a row failed, by class, from a moment on: seconds after the first due time of all.

    ``until_s``: when the first was due that did not, None where that never came.
    """

    from_s: float
    until_s: Number
    requests: int
    failed: Mapping[str, int]


class FailureExample(Result):
    """One failed request. ``at_s`` from the first due time of all; ``status`` 0 where no HTTP answer came."""

    request_id: str
    at_s: float
    waited_ms: Number
    status: int
    tokens: int
    error: str


class FailureClass(Result):
    """Failures of one kind, with the first of them to look at."""

    name: str = stands_as("class")
    count: int
    share: float
    examples: tuple[FailureExample, ...]


class Goodput(Result):
    """Requests within every limit that an SLO names, of those that we did not end ourselves.

    ``per_s``: so many of what was served in a second (``Throughput``).
    """

    per_s: Number
    share: Number
    share_ci: Ends | None
    limits_ms: Mapping[str, float]


class Throughput(Result):
    """Successes and their tokens per second, of ``span_s`` seconds.

    Either those in which requests were due, or all to the last token: what gives the higher rate.
    """

    requests_per_s: Number
    prompt_tokens_per_s: Number
    output_tokens_per_s: Number
    span_s: float


class PeerFigures(MainPercentiles):
    """A metric by another tool's definition, which ``differs`` from ours so."""

    differs: str
    mean_ms: Number
    count: int


class PeerDefinitions(Result):
    """All metrics of one tool."""

    name: str
    version: str
    ttft: PeerFigures | None = left_out()
    itl: PeerFigures | None = left_out()
    icl: PeerFigures | None = left_out()
    tpot: PeerFigures | None = left_out()
    e2e: PeerFigures | None = left_out()
