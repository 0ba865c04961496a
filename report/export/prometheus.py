"""A run as a Prometheus text file (exposition format 0.0.4), for a node exporter's textfile collector.

Times are seconds, shares fractions, as Prometheus wants base units. A figure that the sample does not support has no
sample line; its interval's ends stand beside it as ``bound="low"`` and ``bound="high"``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
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
    families = [
        _family("run_info", "What was measured, as labels.", [(about, 1.0)]),
        _family("verdict", "1 for the run's verdict.",
                [({"is": verdict}, float(result.verdict == verdict)) for verdict in _VERDICTS]),
        _family("latency_seconds", "Percentiles of TTFT, ITL, TPOT, E2E, and their 95 % intervals.", _latency(result)),
        _family("stage_seconds", "Percentiles of each stage's time to the last token.", _stages(result)),
        _family("requests", "Requests of the measured window, by outcome.", _requests(result)),
        _family("rate", "Requests a second: asked for, delivered, good.", _rates(result)),
        _family("slo_limit", "Limit of each SLO (seconds, or a share).", _slos(result, "limit")),
        _family("slo_value", "What was measured for each SLO (seconds, or a share).", _slos(result, "value")),
        _family("residual_share", "Share of a request's wait that no stage explains, at p99.", _residual(result)),
    ]  # fmt: skip
    return "".join(family(base) for family in families)


def _family(name: str, doc: str, samples: Iterable[Sample]) -> Callable[[Labels], str]:
    known = [(labels, value) for labels, value in samples if value is not None]

    def text(base: Labels) -> str:
        lines = [f"# HELP gapmeter_{name} {doc}", f"# TYPE gapmeter_{name} gauge"]
        lines += [f"gapmeter_{name}{{{_labels({**base, **labels})}}} {value!r}" for labels, value in known]
        return "\n".join(lines) + "\n" if known else ""

    return text


def _labels(labels: Labels) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())


def _escaped(value: str) -> str:
    return str(value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


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


def _requests(result: RunResult) -> Iterator[Sample]:
    yield {"outcome": "ok"}, float(result.counts.succeeded)
    for outcome, count in result.counts.failed.items():
        yield {"outcome": outcome}, float(count)


def _rates(result: RunResult) -> Iterator[Sample]:
    yield {"of": "requested"}, result.load.requested_rate
    yield {"of": "delivered"}, result.load.delivered_rate
    yield {"of": "good"}, result.goodput.per_s


def _slos(result: RunResult, which: Literal["limit", "value"]) -> Iterator[Sample]:
    for slo in result.slo:
        found = slo.limit if which == "limit" else slo.value
        yield {"slo": slo.text, "status": slo.status}, found if slo.unit == "share" else _seconds(found)


def _residual(result: RunResult) -> Iterator[Sample]:
    for event, found in (("first_token", result.residual.first_token), ("last_token", result.residual.last_token)):
        for kind, part in (("unexplained", found.unexplained), ("strict", found.strict)) if found else ():
            yield {"event": event, "kind": kind}, part.p99_share
