"""A run as a Prometheus text file (exposition format 0.0.4), for a node exporter's textfile collector.

Times are seconds, shares fractions, as Prometheus wants base units. A figure that the sample does not support has no
sample line; its interval's ends stand beside it as ``bound="low"`` and ``bound="high"``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

from gapmeter.analysis.results.run import RunResult

_QUANTILES = {50.0: "0.5", 90.0: "0.9", 95.0: "0.95", 99.0: "0.99", 99.9: "0.999"}
_VERDICTS = ("PASS", "FAIL", "INCONCLUSIVE", "INVALID")

Labels = Mapping[str, str]
Sample = tuple[Labels, float | None]


def prometheus(result: RunResult) -> str:
    """The file's text; every sample carries the scenario, the engine and the verdict as labels."""
    about = result.provenance.facts()
    base = {"scenario": about["scenario"], "engine": about["engine"], "verdict": result.verdict}
    verdicts: list[Sample] = [({"is": verdict}, float(result.verdict == verdict)) for verdict in _VERDICTS]
    load = result.load
    rates = {
        "requested": load.requested_rate if load.unit == "requests" else None, "delivered": load.delivered_rate,
        "good": result.goodput.per_s,
    }  # fmt: skip
    outcomes = {"ok": result.counts.succeeded, **result.counts.failed}
    families: list[tuple[str, str, Iterable[Sample]]] = [
        ("run_info", "What was measured, as labels.", [(about, 1.0)]),
        ("verdict", "1 for the run's verdict.", verdicts),
        ("latency_seconds", "Percentiles of TTFT, ITL, TPOT, E2E, and their 95 % intervals.", _latency(result)),
        ("stage_seconds", "Percentiles of each stage's time to the last token.", _stages(result)),
        ("requests", "Requests of the measured window, by outcome.",
         [({"outcome": outcome}, float(count)) for outcome, count in outcomes.items()]),
        ("rate", "Requests a second: asked for, delivered, good.", [({"of": of}, rate) for of, rate in rates.items()]),
        ("slo_limit", "Limit of each SLO (seconds, or a share).", _slos(result, "limit")),
        ("slo_value", "What was measured for each SLO (seconds, or a share).", _slos(result, "value")),
        ("residual_share", "Share of a request's wait that no stage explains, at p99.", _residual(result)),
    ]  # fmt: skip
    lines: list[str] = []
    for name, doc, samples in families:
        known = [
            f"gapmeter_{name}{{{_labels({**base, **labels})}}} {value!r}"
            for labels, value in samples
            if value is not None
        ]
        lines += [f"# HELP gapmeter_{name} {doc}", f"# TYPE gapmeter_{name} gauge", *known] if known else []
    return "\n".join([*lines, ""])


def _labels(labels: Labels) -> str:
    escapes = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    return ",".join(f'{name}="{str(value).translate(escapes)}"' for name, value in labels.items())


def _latency(result: RunResult) -> Iterator[Sample]:
    for origin, part in (("due", result.metrics), ("sent", result.metrics_from_sent)):
        for metric, found in part.items():
            for percentile, quantile in _QUANTILES.items():
                labels = {"metric": metric, "counted_from": origin, "quantile": quantile}
                one = found.at(percentile)
                low, high = one.ci_ms or (None, None)
                for bound, value in (("value", one.value_ms), ("low", low), ("high", high)):
                    yield {**labels, "bound": bound}, _seconds(value)


def _stages(result: RunResult) -> Iterator[Sample]:
    for stage, found in result.stages.items():
        for percentile, quantile in _QUANTILES.items():
            labels = {"stage": stage, "owner": found.owner, "kind": found.kind, "quantile": quantile}
            yield labels, _seconds(found.ms(percentile))


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1e3


def _slos(result: RunResult, which: Literal["limit", "value"]) -> Iterator[Sample]:
    for slo in result.slo:
        found = slo.limit if which == "limit" else slo.value
        yield {"slo": slo.text, "status": slo.status}, found if slo.unit == "share" else _seconds(found)


def _residual(result: RunResult) -> Iterator[Sample]:
    for event, found in (("first_token", result.residual.first_token), ("last_token", result.residual.last_token)):
        for kind in ("unexplained", "strict", "unstamped") if found else ():
            yield {"event": event, "kind": kind}, getattr(found, kind).p99_share
