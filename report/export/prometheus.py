"""A run as a Prometheus text file (exposition format 0.0.4), for a node exporter's textfile collector.

Times are seconds, shares fractions, as Prometheus wants base units. A figure that the sample does not support has no
sample line; its interval's ends stand beside it as ``bound="low"`` and ``bound="high"``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gapmeter.report import bridge

_QUANTILES = {"p50": "0.5", "p90": "0.9", "p95": "0.95", "p99": "0.99", "p999": "0.999"}
_VERDICTS = ("PASS", "FAIL", "INCONCLUSIVE", "INVALID")

Labels = Mapping[str, str]
Sample = tuple[Labels, float | None]


def prometheus(summary: Mapping[str, Any], manifest: Mapping[str, Any]) -> str:
    """The file's text; every sample carries the scenario, the engine and the verdict as labels."""
    about = bridge.provenance(summary).facts()
    base = {"scenario": about["scenario"], "engine": about["engine"], "verdict": str(summary["verdict"])}
    families = [
        _family("run_info", "What was measured, as labels.", [(about, 1.0)]),
        _family("verdict", "1 for the run's verdict.", _verdicts(summary)),
        _family("latency_seconds", "Percentiles of TTFT, ITL, TPOT, E2E, and their 95 % intervals.", _latency(summary)),
        _family("stage_seconds", "Percentiles of each stage's time to the last token.", _stages(summary)),
        _family("requests", "Requests of the measured window, by outcome.", _requests(summary)),
        _family("rate", "Requests a second: asked for, delivered, good.", _rates(summary)),
        _family("slo_limit", "Limit of each SLO (seconds, or a share).", _slos(summary, "limit")),
        _family("slo_value", "What was measured for each SLO (seconds, or a share).", _slos(summary, "value")),
        _family("residual_share", "Share of a request's wait that no stage explains, at p99.", _residual(summary)),
    ]
    return "".join(family(base) for family in families)


def _family(name: str, doc: str, samples: Any) -> Any:
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


def _verdicts(summary: Mapping[str, Any]) -> Iterator[Sample]:
    return (({"is": verdict}, float(summary["verdict"] == verdict)) for verdict in _VERDICTS)


def _latency(summary: Mapping[str, Any]) -> Iterator[Sample]:
    for origin, part in (("due", "metrics"), ("sent", "metrics_from_sent")):
        for metric, found in summary[part].items():
            for key, quantile in _QUANTILES.items():
                labels = {"metric": metric, "counted_from": origin, "quantile": quantile}
                low, high = found.get(f"{key}_ci_ms") or (None, None)
                for bound, value in (("value", found.get(f"{key}_ms")), ("low", low), ("high", high)):
                    yield {**labels, "bound": bound}, _seconds(value)


def _stages(summary: Mapping[str, Any]) -> Iterator[Sample]:
    for stage, found in summary["stages"].items():
        for key, quantile in _QUANTILES.items():
            labels = {"stage": stage, "owner": found["owner"], "kind": found["kind"], "quantile": quantile}
            yield labels, _seconds(found.get(f"{key}_ms"))


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1e3


def _requests(summary: Mapping[str, Any]) -> Iterator[Sample]:
    counts = summary["counts"]
    yield {"outcome": "ok"}, float(counts["succeeded"])
    for outcome, count in counts["failed"].items():
        yield {"outcome": outcome}, float(count)


def _rates(summary: Mapping[str, Any]) -> Iterator[Sample]:
    yield {"of": "requested"}, summary["load"]["requested_rate"]
    yield {"of": "delivered"}, summary["load"]["delivered_rate"]
    yield {"of": "good"}, summary["goodput"]["per_s"]


def _slos(summary: Mapping[str, Any], which: str) -> Iterator[Sample]:
    for row in summary["slo"]:
        labels = {"slo": row["text"], "status": row["status"]}
        share = row.get(f"{which}_share")
        yield labels, share if f"{which}_share" in row else _seconds(row[f"{which}_ms"])


def _residual(summary: Mapping[str, Any]) -> Iterator[Sample]:
    for event, found in (summary["residual"] or {}).items():
        for kind, part in (found or {}).items():
            yield {"event": event, "kind": kind}, part["p99_share"]
