"""summary.json and verdict.json: everything that other programs may rely on, as one plain dictionary.

Every value is JSON: no NaN, no infinity; null means that the sample cannot support the figure, or that nobody could
measure it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from gapmeter.analysis.jsonable import SCHEMA_VERSION, json_safe
from gapmeter.analysis.judge import validity, verdict
from gapmeter.analysis.judge.evidence import WARN, Check, Evidence, RunWarning
from gapmeter.analysis.judge.floor import floor_part
from gapmeter.analysis.judge.steady import Warmup
from gapmeter.analysis.judge.verdict import SloResult
from gapmeter.analysis.ledger.tail import Anatomy, inside_measured
from gapmeter.analysis.ledger.tail_summary import LEDGER_OF, anatomies_of, tail_part, upgrade_part, upgrades_of
from gapmeter.analysis.numbers import duration, share
from gapmeter.analysis.requests import failures, omission, turns
from gapmeter.analysis.requests import figures as fig
from gapmeter.analysis.requests.attempts import attempts_warning
from gapmeter.analysis.requests.load_summary import counts_part, goodput_part, load_part, throughput_part
from gapmeter.analysis.requests.metrics import (
    METRICS,
    generator_lag_ns,
    limits_of,
    measured_requests,
    metric_series,
    succeeded,
    window_s,
)
from gapmeter.analysis.stages import BY_NAME
from gapmeter.analysis.stats.estimate import CONFIDENCE, TAIL
from gapmeter.analysis.stats.hdr import PERCENTILES
from gapmeter.analysis.stats.series import Series

CONFIDENCE_PART = {"interval": CONFIDENCE, "verdict": 1 - TAIL}


def build_summary(
    requests: pd.DataFrame,
    ledger: pd.DataFrame | None,
    gaps: pd.DataFrame | None,
    slos: Sequence[Mapping[str, Any]],
    evidence: Evidence,
    *,
    name: str = "",
    device: str = "GPU",
    warmup: Warmup | None = None,
    warnings: Iterable[RunWarning] = (),
) -> dict[str, Any]:
    """The summary of a run.

    ``requests``: every request with its ``measured`` flag; ``ledger``: two rows a request (``first_token`` and
    ``last_token``) or None; ``gaps``: a ledger row a token gap, or None; ``slos``: mappings with metric, percentile,
    limit_ns or limit_share, text; ``device`` is what computed the forwards; ``warmup`` what ``detect_warmup`` left out
    (already applied to ``measured``); ``warnings`` those of other parts. A refused ledger is not shown.
    """
    measured = measured_requests(requests)
    if evidence.ledger_refused:
        ledger = gaps = None
    anatomies = anatomies_of(ledger, gaps, measured, device)
    results = verdict.judge(slos, measured, anatomies)
    checks = validity.check_run(measured, evidence)
    reasons = validity.invalid_reasons(checks) + [r.sentence for r in results if r.status == verdict.INVALID]
    decided = verdict.overall(results, reasons)
    asked = _percentiles(slos)
    rate = window_s(measured) / len(measured) if len(measured) else 0.0
    upgrades = upgrades_of(ledger, measured, device)
    counts = counts_part(requests, measured, evidence)
    told = [*validity.warnings_of(checks, evidence), *_warmup_warning(warmup), *warnings]
    told += attempts_warning(counts["attempts"], len(measured))
    stages = _ledger_parts(ledger, measured, asked, rate)
    lag = validity.percentile_of(generator_lag_ns(measured), 99)
    summary = {
        "schema_version": SCHEMA_VERSION,
        "name": name,
        "verdict": decided,
        "exit_code": verdict.EXIT_CODES[decided],
        "confidence": CONFIDENCE_PART,
        "headline": _headline(decided, results, reasons, anatomies),
        "invalid_reasons": reasons,
        "slo": [slo_row(result) for result in results],
        "load": load_part(measured, evidence, lag),
        "counts": counts,
        **_metrics_parts(measured, asked, rate),
        "turns": turns.describe_turns(measured),
        "closed_loop": omission.describe_closed_loop(measured, evidence),
        "failures": failures.describe_failures(measured),
        "goodput": goodput_part(measured, limits_of(slos)),
        "throughput": throughput_part(measured),
        **stages,
        "tail": tail_part(anatomies, results),
        "upgrade": upgrade_part(upgrades, device),
        "checks": [dataclasses.asdict(check) for check in checks],
        "warnings": [dataclasses.asdict(warning) for warning in told],
        "floor": floor_part(evidence.floor, measured),
        "trust": _trust(
            checks, reasons, stages["residual"]["last_token"], lag, evidence, ledger is None or inside_measured(ledger)
        ),
    }
    safe: dict[str, Any] = json_safe(summary)
    return safe


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """``summary.json`` and ``verdict.json`` in the run's folder. Raises OSError."""
    short = ("schema_version", "name", "verdict", "exit_code", "headline", "invalid_reasons", "slo", "provenance")
    for file, content in (
        ("summary.json", summary),
        ("verdict.json", {key: summary[key] for key in short if key in summary}),
    ):
        (folder / file).write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def slo_row(result: SloResult) -> dict[str, Any]:
    """One SLO's answer as JSON: times in ms, shares as fractions."""
    unit, scale = ("share", 1.0) if result.metric == "errors" else ("ms", 1e6)
    value, low, high = (None if x is None else x / scale for x in (result.value, result.low, result.high))
    return {
        "text": result.text,
        "metric": result.metric,
        "percentile": result.percentile,
        "status": result.status,
        f"limit_{unit}": result.limit / scale,
        f"value_{unit}": value,
        f"low_{unit}": low,
        f"high_{unit}": high,
        "infinite": result.value == math.inf or result.low == math.inf,
        "count": result.count,
        "n_eff": result.n_eff,
        "confidence": CONFIDENCE,
        "estimable_with": None
        if result.estimable_requests is None
        else _needs(result.estimable_requests, result.estimable_minutes),
        "needs": None if result.more_requests is None else _needs(result.more_requests, result.more_minutes),
        "stage": result.stage,
        "owner": result.owner,
        "sentence": result.sentence,
    }


def _needs(requests: int, minutes: float | None) -> dict[str, Any]:
    return {"requests": requests, "minutes": minutes}


def _percentiles(slos: Sequence[Mapping[str, Any]]) -> list[float]:
    """Those that are always printed, and any that an SLO names."""
    return sorted({*PERCENTILES, *(float(slo["percentile"]) for slo in slos if slo.get("percentile") is not None)})


def _metrics_parts(measured: pd.DataFrame, asked: list[float], rate: float) -> dict[str, Any]:
    """``metrics`` and the same from *sent* (gaps and TPOT know no difference) and over failed requests too."""
    metrics = {metric: _metric(measured, metric, "due", asked, rate) for metric in METRICS}
    from_sent = {metric: _metric(measured, metric, "sent", asked, rate) for metric in LEDGER_OF}
    return {
        "metrics": metrics,
        "metrics_from_sent": metrics | from_sent,
        "metrics_censored": _censored(measured, metrics),
    }


def _ledger_parts(
    ledger: pd.DataFrame | None, measured: pd.DataFrame, asked: list[float], rate: float
) -> dict[str, Any]:
    """``stages``, ``stages_to_first_token``, ``groups`` and ``residual``; empty or null without a ledger."""
    first, last = (fig.ledgers_of(ledger, measured, event) for event in fig.EVENTS)
    return {
        "stages": _stages(last, asked, rate),
        "stages_to_first_token": _stages(first, asked, rate),
        "groups": _groups(last, asked, rate),
        "residual": {event: _residual(rows) for event, rows in zip(fig.EVENTS, (first, last), strict=True)},
    }


def _metric(measured: pd.DataFrame, metric: str, origin: str, asked: list[float], rate: float) -> dict[str, Any]:
    """Figures over successes; ``with_failures`` beside them where requests failed, those counted as infinite."""
    values = metric_series(measured, metric, origin)
    per_request = values.count / len(measured) if len(measured) else 1.0
    out = fig.figures(values, asked, per_request, rate)
    if not bool(succeeded(measured).all()):
        censored = metric_series(measured, metric, origin, failures=True)
        out["with_failures"] = fig.figures(censored, asked, per_request, rate)
    return out


def _censored(measured: pd.DataFrame, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Every metric over all requests, a failed one counted as at least as long as its time-out."""
    bound = failures.bound_ns(measured)
    return {metric: failures.censored(found.get("with_failures", found), bound) for metric, found in metrics.items()}


def _stages(ledgers: pd.DataFrame, asked: list[float], rate: float) -> dict[str, Any]:
    if not len(ledgers):
        return {}
    out = {}
    for name, values in fig.stage_values_ns(ledgers).items():
        stage = BY_NAME[name]
        kind = stage.kind if len(values) else "unmeasured"
        found = fig.figures(Series(values), asked, 1.0, rate)
        out[name] = {"owner": stage.owner, "kind": kind, **found}
    return out


def _groups(ledgers: pd.DataFrame, asked: list[float], rate: float) -> dict[str, Any]:
    if not len(ledgers):
        return {}
    return {
        group: {**fig.figures(Series(sums), asked, 1.0, rate), "unmeasured": missing}
        for group, (sums, missing) in fig.group_values_ns(ledgers).items()
    }


def _residual(ledgers: pd.DataFrame) -> dict[str, Any] | None:
    """What the ledgers leave open, in ms and as a share of each request's own wait: p50, p99 and worst.

    They describe the ledgers of this run, all of them, so they stand whatever the sample's size.
    """
    if not len(ledgers):
        return None
    total = np.maximum(ledgers["total_ns"].to_numpy(np.float64), 1.0)
    out = {}
    for which in ("unexplained", "strict"):
        left = ledgers[f"{which}_ns"].to_numpy(np.float64)
        parts = {"p50": 50.0, "p99": 99.0, "max": 100.0}
        out[which] = {f"{key}_ms": fig.plain_percentile(validity.percentile_of(left, p)) for key, p in parts.items()}
        out[which] |= {f"{key}_share": validity.percentile_of(left / total, p) for key, p in parts.items()}
    return out


def _warmup_warning(found: Warmup | None) -> list[RunWarning]:
    if found is None or found.state == "steady":
        return []
    touches = ("ttft", "itl", "tpot", "e2e")
    if found.state == "unsteady":
        text = f"no steady state: {found.metric.upper()} kept changing through the run (MSER-5)"
        cause = "the rate may be more than the server can do, so that latency depends on how long one looks"
        return [RunWarning("unsteady", text, cause, "", touches)]
    text = (
        f"the first {found.excluded} requests were left out: their {found.metric.upper()} was "
        f"{found.ratio:.2g} times that of the rest (MSER-5)"
    )
    cause = "compilation, cold caches or an empty queue at the start"
    return [RunWarning("warmup", text, cause, "--set load.warmup=0", touches)]


def _headline(
    decided: str, results: Sequence[SloResult], reasons: Sequence[str], anatomies: Mapping[str, Anatomy | None]
) -> str:
    """What a person reads first: the verdict's reason, then what explains the slow requests."""
    if decided == verdict.INVALID:
        return f"not valid as a measurement: {'; '.join(reasons)}"
    telling = next((r for r in results if r.status == decided), None)
    if telling is None:
        return "measured; no SLO was set"
    text = (
        telling.sentence
        if decided != verdict.PASS
        else f"{len(results)} of {len(results)} SLOs met; {telling.sentence}"
    )
    found = anatomies.get(telling.metric)
    return f"{text}. {found.sentence}." if found else f"{text}."


def _trust(
    checks: Sequence[Check], reasons: Sequence[str], residual: Mapping[str, Any] | None, lag_ns: float | None,
    evidence: Evidence, inside: bool,
) -> dict[str, Any]:  # fmt: skip
    """The figures that say how far the others can be trusted, and one line of them.

    ``inside``: whether any of the engine's stages was stamped; without, the remainder says nothing.
    """
    unexplained = residual["unexplained"]["p99_share"] if residual else None
    strict = residual["strict"]["p99_share"] if residual else None
    parts = [f"lag p99 {duration(fig.plain_percentile(lag_ns))}"]
    if residual and inside:
        parts += [f"unexplained p99 {share(unexplained)}", f"strict {share(strict)}"]
    else:
        parts.append("the server's stages unmeasured" if residual else "no ledger")
    parts += [f"client CPU {share(evidence.client_cpu_share)}"] if evidence.client_cpu_share is not None else []
    parts.append(evidence.floor.sentence if evidence.floor else "floor unmeasured")
    strained = [check.rule for check in checks if check.status == WARN]
    return {
        "valid": not reasons,
        "lag_p99_ms": fig.plain_percentile(lag_ns),
        "unexplained_p99_share": unexplained,
        "strict_p99_share": strict,
        "client_cpu_share": evidence.client_cpu_share,
        "strained": strained,
        "sentence": f"{'invalid' if reasons else 'valid'}: {', '.join(parts)}",
    }
