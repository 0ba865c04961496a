"""Energy of a request and of a token, and tokens per watt: what telemetry counted over the measured window.

Energy is a whole machine's or device's, idle share included and stated: idle power x time, measured before the load.
Tokens per watt is output tokens per second over watts, which is output tokens per joule.
"""

from __future__ import annotations

from gapmeter.analysis.results.cost import Energy, NoEnergy
from gapmeter.analysis.results.device import EnergyWindow
from gapmeter.analysis.results.requests import Throughput

UNMEASURED = "unmeasured: no counter of energy was read on this machine"


def describe_energy(window: EnergyWindow | None, throughput: Throughput) -> Energy | NoEnergy:
    """Energy spread over the requests that succeeded, and their tokens.

    What failed ones took is in it, however long they were waited for.
    """
    if window is None:
        return NoEnergy(status="unmeasured", reason=UNMEASURED)
    requests, tokens = (
        None if rate is None else rate * throughput.span_s
        for rate in (throughput.requests_per_s, throughput.output_tokens_per_s)
    )
    joules, low, high = window.joules, window.low_j, window.high_j
    return Energy(
        status="measured",
        reason=None,
        source=window.source,
        seconds=window.seconds,
        joules=joules,
        joules_ci=(low, high),
        watts=_over(joules, window.seconds),
        per_request_j=_over(joules, requests),
        per_request_j_ci=(_over(low, requests), _over(high, requests)),
        per_output_token_j=_over(joules, tokens),
        per_output_token_j_ci=(_over(low, tokens), _over(high, tokens)),
        tokens_per_watt=_over(tokens or None, joules),
        tokens_per_watt_ci=(_over(tokens or None, high), _over(tokens or None, low)),
        idle_share=_over(window.idle_j, joules),
    )


def _over(amount: float | None, count: float | None) -> float | None:
    """A quotient; None where either is unknown, or there is nothing to divide by."""
    return None if amount is None or not count else amount / count
