"""What the telemetry sampler costs the load generator: lag with it and without it, in pairs.

One simulated server stays up; short loads of the same plan go to it one after the other, with the sampler beside them
or without, in the order ABBA, so that each pair meets the same state of the machine. Over the pairs' differences stand
the Hodges-Lehmann estimate and the 95 % interval of Wilcoxon's signed ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bench.probe_pairs import hodges_lehmann
from gapmeter.analysis.requests.metrics import generator_lag_ns, measured_requests
from gapmeter.analysis.results import RunResult
from gapmeter.options import Options
from gapmeter.study.conclusion import Conclusion
from gapmeter.study.resolve import resolve
from gapmeter.study.session import Session, Visit, open_session

PAIRS = 10
HZ = 10
SECONDS, RATE = 6, 60
_LEVELS = (50, 99)
_LOAD = (
    "server.engine=simulated", "workload.output_tokens=4", f"load.rate={RATE}", f"load.duration={SECONDS}s",
    "load.warmup=1s",
)  # fmt: skip


def measure(folder: Path, pairs: int = PAIRS) -> dict[str, Any]:
    """``pairs`` is even. Raises UserError when the server cannot be had."""
    lags: dict[bool, list[list[float]]] = {True: [], False: []}
    shares: list[float] = []
    with open_session(resolve("smoke", _LOAD), Options(folder, quiet=True), home=folder / "server") as session:
        _load(session, 0, sampled=True)  # the first load of a server meets cold paths
        for number in range(pairs):
            for sampled in (True, False) if number % 2 == 0 else (False, True):
                result = _load(session, number, sampled=sampled)
                lags[sampled].append(_lag_ms(result))
                if sampled:
                    shares.append(float(result.result.to_json()["telemetry"]["sampler"]["cpu_share"]))
    with_it, without = np.array(lags[True]), np.array(lags[False])
    return {
        "pairs": pairs, "seconds": SECONDS, "rate": RATE, "hz": HZ,
        "cpu_share": [float(np.median(shares)), min(shares), max(shares)],
        **{f"lag_p{level}_ms": _compared(with_it[:, k], without[:, k]) for k, level in enumerate(_LEVELS)},
    }  # fmt: skip


def _load(session: Session, number: int, *, sampled: bool) -> Conclusion[RunResult]:
    scenario = resolve("smoke", [*_LOAD, f"telemetry.hz={HZ if sampled else 0}"])
    return session.visit(Visit(scenario, number))


def _lag_ms(result: Conclusion[RunResult]) -> list[float]:
    lag = generator_lag_ns(measured_requests(pd.read_parquet(result.folder / "requests.parquet")))
    return [float(np.nanpercentile(lag, level)) / 1e6 for level in _LEVELS]


def _compared(with_it: Any, without: Any) -> dict[str, float]:
    more, low, high = hodges_lehmann(with_it - without)
    medians = {"with": float(np.median(with_it)), "without": float(np.median(without))}
    return medians | {"more": more, "low": low, "high": high}


def table(found: Mapping[str, Any]) -> list[str]:
    """Markdown rows."""
    middle, low, high = found["cpu_share"]
    said = (
        f"{found['pairs']} pairs of {found['seconds']} s at {found['rate']} requests/s, in the order ABBA; the sampler "
        f"at {found['hz']} Hz took {middle:.2%} of a core ({low:.2%} to {high:.2%})."
    )
    head = "| lag of the load generator | without | with the sampler | difference (95 % interval) |"
    lines = [said, "", head, "|---|---|---|---|"]
    for level in _LEVELS:
        row = found[f"lag_p{level}_ms"]
        difference = f"{row['more']:+.3f} ms ({row['low']:+.3f} to {row['high']:+.3f})"
        lines.append(f"| p{level} | {row['without']:.3f} ms | {row['with']:.3f} ms | {difference} |")
    return lines
