"""How far a run's figures can be trusted: the instrument, a steady state, drift."""

from __future__ import annotations

import math

from gapmeter.analysis.judge.steady import FEWEST_REQUESTS
from gapmeter.analysis.judge.warnings import growth_text
from gapmeter.analysis.numbers import duration, share
from gapmeter.analysis.results.run import RunFigures
from gapmeter.analysis.results.trust import Drift, FloorShares, Pelt, Ratio, Steady

_NOTABLE = 0.05  # of a ratio's distance from 1, beyond its interval
_DRIFTING = {
    "ttft": "TTFT", "tpot": "TPOT", "output_tokens_per_s": "tokens/s",
    "machine_time": "time of a fixed piece of CPU work",
}  # fmt: skip


def trust_sentence(result: RunFigures) -> str:
    """One line of the figures that say how far the others can be trusted."""
    return f"{'valid' if result.trust.valid else 'invalid'}: {trust_figures(result)}"


def trust_figures(result: RunFigures) -> str:
    """The same without its first word."""
    trust, ledger = result.trust, result.residual.last_token is not None
    parts = [f"lag p99 {duration(trust.lag_p99_ms)}"]
    if ledger and any(result.stages[name].count for name in ("prefill", "decode")):
        parts += [f"unexplained p99 {share(trust.unexplained_p99_share)}", f"strict {share(trust.strict_p99_share)}"]
    else:
        parts.append("the server's stages unmeasured" if ledger else "no ledger")
    if trust.client_cpu_share is not None:
        parts.append(f"client CPU {share(trust.client_cpu_share)}")
    parts.append(floor_sentence(result.floor) if result.floor else "floor unmeasured")
    return ", ".join(parts)


def floor_sentence(floor: FloorShares) -> str:
    """What the load tester adds itself, at p99."""
    p99_ms = {"TTFT": floor.ttft_p99_ms, "ITL": floor.itl_p99_ms, "E2E": floor.e2e_p99_ms}
    return "floor p99 " + ", ".join(f"{metric} {duration(ms)}" for metric, ms in p99_ms.items())


def steady_sentence(steady: Steady, *, measured: int, offered: float | None) -> str:
    """Whether there was a steady state, and where methods disagree; of ``measured`` requests, ``offered`` a second."""
    if steady.state == "not_applicable":
        return "the load was meant to change, so there is no steady state to look for"
    mser5, pelt, slope = steady.methods.mser5, steady.methods.pelt, steady.methods.queue_slope
    if mser5 is None or pelt is None:
        return _unknown_state(measured)
    said = []
    if slope is not None and slope.grows:
        said.append(f"{growth_text(slope)}; more was offered{_per_s(offered)} than served{_per_s(slope.served_per_s)}")
    if mser5.state == "unsteady":
        said.append(f"no steady state: {mser5.metric.upper()} kept changing through the run (MSER-5)")
    if not said:
        said.append(_steady(steady))
    if not pelt.agrees:
        said.append(_disagreement(pelt))
    return "; ".join(said)


def _unknown_state(measured: int) -> str:
    if measured >= FEWEST_REQUESTS:
        return "no request succeeded, so there is no latency that could be steady"
    were = "request was" if measured == 1 else "requests were"
    return f"too short to tell: {measured} {were} measured, a steady state takes {FEWEST_REQUESTS} to see"


def _steady(steady: Steady) -> str:
    mser5 = steady.methods.mser5
    if mser5 is None or not mser5.excluded_requests:
        return "steady"
    first = mser5.excluded_requests
    if mser5.applied:
        return f"steady after the first {first} requests"
    return f"steady, but the first {first} measured requests differ and are kept, as load.warmup says (MSER-5)"


def _disagreement(pelt: Pelt) -> str:
    certain = [change for change in pelt.changes if change.certain]
    if not certain:
        return "PELT disagrees: it sees no change of level"
    last = certain[-1]
    return (
        f"PELT disagrees: it sees {last.metric.upper()} at {last.ratio:.2g} times its level from request "
        f"{last.request} on"
    )


def _per_s(rate: float | None) -> str:
    return "" if rate is None else f" ({rate:.3g}/s)"


def drift_sentence(drift: Drift) -> str | None:
    """Every ratio with its interval; then those that lie beyond it and more than 5 % from 1. None without any."""
    ratios = {
        name: ratio for key, name in _DRIFTING.items() if (ratio := getattr(drift, key)) and ratio.ratio is not None
    }
    if not ratios:
        return None
    listed = ", ".join(f"{name} {_times(ratio)}" for name, ratio in ratios.items())
    moved = [name for name, ratio in ratios.items() if _moved(ratio)]
    differs = f"; {' and '.join(moved)} differed" if moved else ""
    cause = f" ({drift.reason})" if drift.reason and moved else ""
    return f"first {drift.first_s:.0f} s over the rest: {listed}{differs}{cause}"


def _moved(ratio: Ratio) -> bool:
    low, high = ratio.ratio_ci
    return (low is not None and low > 1 + _NOTABLE) or (high is not None and high < 1 - _NOTABLE)


def _times(ratio: Ratio) -> str:
    low, high = (math.inf if end is None else end for end in ratio.ratio_ci)
    return f"{ratio.ratio:.2f} ({low:.2f} .. {high:.2f})"
