"""What is known of a run beside its tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gapmeter.analysis.requests.rate_curve import Knots
from gapmeter.analysis.results.manifest import GeneratorFloor
from gapmeter.analysis.stats.estimate import Floats


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of a run beside its tables. None: not measured (or, for limits, not asked for).

    ``arrivals`` is constant, poisson, gamma, ... or closed; ``count_dispersion`` the variance over the mean of the
    number of requests that the plan lets expect. ``rate_knots`` (CLOCK_MONOTONIC ns, requests per second) are the rate
    that due times were drawn at, where it changed, ``window_ns`` the measured part then, ``prefix_share`` how much of
    all prompts stood at the start of an earlier one, ``unit`` what arrives: requests, or conversations of several,
    ``beyond_end`` how many of their turns would have been due after the run's end, ``think_time_ns`` the mean pause of
    a user. ``client_cpu_share`` is the busiest generator process's share of one core, ``client_loop_lag_ns`` samples
    of its event loop's lag. ``output_enforced`` and ``prompt_exact`` say whether lengths were forced on the server,
    and prompts made with its own tokenizer. ``canary_spread`` is p95 / p50 of the fixed piece of work.
    ``slo_on_errors``: an SLO judges them, so no rule does.
    ``locustfile``: the name of the user's own. ``floor``: what calibration found of the load tester on the machine of
    the run. ``suspended_ns``: how long that slept meanwhile.
    """

    loop: Literal["open", "closed"]
    arrivals: str
    requested_rate: float | None = None
    count_dispersion: float | None = None
    concurrency: int | None = None
    processes: int = 1
    planned: int | None = None
    incomplete: str = ""
    client_cpu_share: float | None = None
    client_loop_lag_ns: Floats | None = None
    records_dropped: int = 0
    cores_shared: bool | None = None
    output_enforced: bool = True
    prompt_exact: bool = True
    canary_spread: float | None = None
    ledger_refused: tuple[str, ...] = ()
    slo_on_errors: bool = False
    rate_knots: Knots = ()
    window_ns: tuple[int, int] = (0, 0)
    prefix_share: float | None = None
    locustfile: str | None = None
    unit: str = "requests"
    beyond_end: int | None = None
    think_time_ns: int = 0
    floor: GeneratorFloor | None = None
    suspended_ns: int | None = None
