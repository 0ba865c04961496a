"""Energy of a request and of a token, and tokens per watt: what telemetry counted over the measured window.

Energy is a whole machine's or device's, idle share included and stated: idle power x time, measured before the load.
Tokens per watt is output tokens per second over watts, which is output tokens per joule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gapmeter.analysis.numbers import DASH, share, significant


@dataclass(frozen=True, slots=True)
class Energy:
    """Joules over ``seconds``, between ``low_j`` and ``high_j`` (None: no counter bounds it).

    ``idle_j``: what the same time would have taken idle, None where that was not measured. ``source``: what counted.
    """

    joules: float
    low_j: float | None
    high_j: float | None
    seconds: float
    idle_j: float | None
    source: str


def describe_energy(summary: Mapping[str, Any], energy: Energy | None) -> dict[str, Any]:
    """``summary["energy"]``; every figure null where nobody measured energy, with the ``reason``.

    Needs ``throughput``. Energy is spread over the requests that succeeded, and their tokens; what failed ones took is
    in it, however long they were waited for.
    """
    names = ("joules", "per_request_j", "per_output_token_j", "tokens_per_watt", "watts", "idle_share")
    if energy is None:
        reason = "unmeasured: no counter of energy was read on this machine"
        return {"status": "unmeasured", "reason": reason, **dict.fromkeys(names), "sentence": f"energy {reason}"}
    requests, tokens = _work(summary["throughput"])
    per_request = _each(energy, requests)
    per_token = _each(energy, tokens)
    idle = None if energy.idle_j is None else energy.idle_j / energy.joules if energy.joules else None
    return {
        "status": "measured",
        "reason": None,
        "source": energy.source,
        "seconds": energy.seconds,
        "joules": energy.joules,
        "joules_ci": [energy.low_j, energy.high_j],
        "watts": energy.joules / energy.seconds if energy.seconds else None,
        "per_request_j": per_request[0],
        "per_request_j_ci": per_request[1:],
        "per_output_token_j": per_token[0],
        "per_output_token_j_ci": per_token[1:],
        "tokens_per_watt": tokens / energy.joules if tokens and energy.joules else None,
        "tokens_per_watt_ci": [tokens / j if tokens and j else None for j in (energy.high_j, energy.low_j)],
        "idle_share": idle,
        "sentence": _sentence(energy, per_request[0], tokens, idle),
    }


def _work(throughput: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Requests that succeeded and their output tokens, back from their rates."""
    rates = (throughput["requests_per_s"], throughput["output_tokens_per_s"])
    requests, tokens = (None if rate is None else rate * throughput["span_s"] for rate in rates)
    return requests, tokens


def _each(energy: Energy, count: float | None) -> list[float | None]:
    """Joules of one of ``count`` things, with its interval."""
    if not count:
        return [None, None, None]
    return [None if joules is None else joules / count for joules in (energy.joules, energy.low_j, energy.high_j)]


def _sentence(energy: Energy, per_request: float | None, tokens: float | None, idle: float | None) -> str:
    each = DASH if per_request is None else f"{significant(per_request)} J"
    rate = DASH if not tokens or not energy.joules else significant(tokens / energy.joules)
    idly = "idle share unmeasured" if idle is None else f"{share(idle)} of it idle power"
    return f"{each} a request, {rate} output tokens per joule ({idly}; {energy.source})"
