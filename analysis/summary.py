"""summary.json and verdict.json: everything that other programs may rely on, as one plain dictionary.

Names are only ever added; ``SCHEMA_VERSION`` changes when one is renamed. Every value is JSON: no NaN, no infinity;
null means that the sample cannot support the figure, or that nobody could measure it.
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

from analysis import failures, omission, quantiles, tail, turns, upgrade, validity, verdict
from analysis import figures as fig
from analysis.attempts import attempts_warning, count_attempts, final
from analysis.floor import floor_part
from analysis.hdr import PERCENTILES
from analysis.metrics import (
    METRICS,
    generator_lag_ns,
    good_requests,
    issued,
    limits_of,
    measured_requests,
    metric_sample,
    succeeded,
    window_s,
)
from analysis.rate_curve import lowest_and_highest
from analysis.report.numbers import duration, share
from analysis.stages import BY_NAME
from analysis.steady import Warmup
from analysis.tail import Anatomy
from analysis.upgrade import Bracket
from analysis.validity import Check, Evidence, RunWarning
from analysis.verdict import SloResult

SCHEMA_VERSION = 1
CONFIDENCE_PART = {"interval": quantiles.CONFIDENCE, "verdict": 1 - quantiles.TAIL}
_LEDGER_METRICS = {"ttft": "first_token", "e2e": "last_token"}


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
    anatomies = _anatomies(ledger, gaps, measured, device)
    results = verdict.judge(slos, measured, anatomies)
    checks = validity.check_run(measured, evidence)
    reasons = validity.invalid_reasons(checks) + [r.sentence for r in results if r.status == verdict.INVALID]
    decided = verdict.overall(results, reasons)
    asked = _percentiles(slos)
    rate = window_s(measured) / len(measured) if len(measured) else 0.0
    upgrades = _upgrades(ledger, measured, device)
    counts = _counts(requests, measured, evidence)
    told = [*validity.warnings_of(checks, evidence), *_warmup_warning(warmup), *warnings]
    told += attempts_warning(counts["attempts"], len(measured))
    residual = {event: _residual(fig.ledgers_of(ledger, measured, event)) for event in fig.EVENTS}
    lag = validity.percentile_of(generator_lag_ns(measured), 99)
    metrics = {metric: _metric(measured, metric, "due", asked, rate) for metric in METRICS}
    from_sent = {metric: _metric(measured, metric, "sent", asked, rate) for metric in _LEDGER_METRICS}
    summary = {
        "schema_version": SCHEMA_VERSION,
        "name": name,
        "verdict": decided,
        "exit_code": verdict.EXIT_CODES[decided],
        "confidence": CONFIDENCE_PART,
        "headline": _headline(decided, results, reasons, anatomies),
        "invalid_reasons": reasons,
        "slo": [slo_row(result) for result in results],
        "load": _load(measured, evidence, lag),
        "counts": counts,
        "metrics": metrics,
        "metrics_from_sent": metrics | from_sent,
        "metrics_censored": _censored(measured, metrics),
        "turns": turns.describe_turns(measured),
        "closed_loop": omission.describe_closed_loop(measured, evidence),
        "failures": failures.describe_failures(measured),
        "goodput": _goodput(measured, limits_of(slos)),
        "throughput": _throughput(measured),
        "stages": _stages(fig.ledgers_of(ledger, measured, "last_token"), asked, rate),
        "stages_to_first_token": _stages(fig.ledgers_of(ledger, measured, "first_token"), asked, rate),
        "groups": _groups(fig.ledgers_of(ledger, measured, "last_token"), asked, rate),
        "residual": residual,
        "tail": _tail(anatomies, results),
        "upgrade": _upgrade_part(upgrades, device),
        "checks": [dataclasses.asdict(check) for check in checks],
        "warnings": [dataclasses.asdict(warning) for warning in told],
        "floor": floor_part(evidence.floor, measured),
        "trust": _trust(checks, reasons, residual["last_token"], lag, evidence),
    }
    safe: dict[str, Any] = json_safe(summary)
    return safe


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """``summary.json`` and ``verdict.json`` in the run's folder. Raises OSError."""
    short = ("schema_version", "name", "verdict", "exit_code", "headline", "invalid_reasons", "slo")
    for file, content in (("summary.json", summary), ("verdict.json", {key: summary[key] for key in short})):
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
        "confidence": quantiles.CONFIDENCE,
        "estimable_with": None
        if result.estimable_requests is None
        else _needs(result.estimable_requests, result.estimable_minutes),
        "needs": None if result.more_requests is None else _needs(result.more_requests, result.more_minutes),
        "stage": result.stage,
        "owner": result.owner,
        "sentence": result.sentence,
    }


def json_safe(value: Any) -> Any:
    """The same value in types that JSON has: NaN and infinities become null."""
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _needs(requests: int, minutes: float | None) -> dict[str, Any]:
    return {"requests": requests, "minutes": minutes}


def _percentiles(slos: Sequence[Mapping[str, Any]]) -> list[float]:
    """Those that are always printed, and any that an SLO names."""
    return sorted({*PERCENTILES, *(float(slo["percentile"]) for slo in slos if slo.get("percentile") is not None)})


def _load(measured: pd.DataFrame, evidence: Evidence, lag_ns: float | None) -> dict[str, Any]:
    _, delivered = validity.rates(measured) if len(measured) else (None, None)
    return {
        "loop": evidence.loop,
        "arrivals": evidence.arrivals,
        "requested_rate": evidence.requested_rate,
        "unit": evidence.unit,
        "conversation_rate": validity.rates(validity.first_turns(measured))[1] if evidence.unit != "requests" else None,
        "rate_range": lowest_and_highest(evidence.rate_knots, evidence.window_ns[0]) if evidence.rate_knots else None,
        "concurrency": evidence.concurrency,
        "prefix_share": evidence.prefix_share,
        "cached_share": _cached_share(measured),
        "delivered_rate": delivered,
        "dispersion": validity.dispersion(measured)[0],
        "lag_p99_ms": fig.plain_percentile(lag_ns),
        "lag_p50_ms": fig.plain_percentile(validity.percentile_of(generator_lag_ns(measured), 50)),
        "window_s": window_s(measured),
    }


def _cached_share(measured: pd.DataFrame) -> float | None:
    """Prompt tokens that the server found in its prefix cache over all prompt tokens, where it tells."""
    if not {"cached_tokens", "prompt_tokens"} <= set(measured.columns):
        return None
    told = measured[["cached_tokens", "prompt_tokens"]].dropna()
    prompts = float(told["prompt_tokens"].sum())
    return float(told["cached_tokens"].sum()) / prompts if prompts else None


def _counts(requests: pd.DataFrame, measured: pd.DataFrame, evidence: Evidence) -> dict[str, Any]:
    """``planned`` and ``issued`` with the warm-up, the others without it.

    ``unissued``: planned, and not on record as sent, also where a worker took its records along; None where nothing was
    planned one by one.
    """
    failed = measured.loc[~succeeded(measured), "outcome"].value_counts()
    requests_alone = final(requests)
    sent = int(issued(requests_alone).sum())
    abandoned = int((requests["outcome"] == "abandoned").sum())
    left = None if evidence.planned is None else evidence.planned - sent - abandoned - (evidence.beyond_end or 0)
    return {
        "unissued": left,
        "planned": len(requests_alone) if evidence.planned is None else evidence.planned,
        "issued": sent,
        "warmup": sent - len(measured),
        "abandoned": abandoned,
        "beyond_end": evidence.beyond_end,
        "measured": len(measured),
        "succeeded": int(succeeded(measured).sum()),
        "attempts": count_attempts(requests, measured),
        "failed": {str(name): int(count) for name, count in failed.items()},
    }


def _metric(measured: pd.DataFrame, metric: str, origin: str, asked: list[float], rate: float) -> dict[str, Any]:
    """Figures over successes; ``with_failures`` beside them where requests failed, those counted as infinite."""
    values = metric_sample(measured, metric, origin)
    per_request = values.count / len(measured) if len(measured) else 1.0
    out = fig.figures(values, asked, per_request, rate)
    if not bool(succeeded(measured).all()):
        censored = metric_sample(measured, metric, origin, failures=True)
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
        found = fig.figures(quantiles.sample(values), asked, 1.0, rate)
        out[name] = {"owner": stage.owner, "kind": kind, **found}
    return out


def _groups(ledgers: pd.DataFrame, asked: list[float], rate: float) -> dict[str, Any]:
    if not len(ledgers):
        return {}
    return {
        group: {**fig.figures(quantiles.sample(sums), asked, 1.0, rate), "unmeasured": missing}
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


def _goodput(measured: pd.DataFrame, limits_ns: Mapping[str, float]) -> dict[str, Any]:
    """Good requests per second; the share's interval is Clopper and Pearson's, good ones in a row counted as alike."""
    good = good_requests(measured, limits_ns)
    n, seconds = len(good), window_s(measured)
    if not n:
        return {"per_s": None, "share": None, "share_ci": None, "limits_ms": {}}
    worth = n / quantiles.autocorrelation_time(good.astype(np.float64))
    low, high = quantiles.share_bounds(float(good.mean()) * worth, worth)
    return {
        "per_s": float(good.sum()) / seconds if seconds else None,
        "share": float(good.mean()),
        "share_ci": [low, high],
        "limits_ms": {metric: limit / 1e6 for metric, limit in limits_ns.items()},
    }


def _throughput(measured: pd.DataFrame) -> dict[str, Any]:
    """Successes and their tokens per second, from the first due time to the last token."""
    good = measured[succeeded(measured)]
    span = (int(good["last_token_ns"].max()) - int(measured["due_ns"].min())) / 1e9 if len(good) else 0.0
    rates = {"requests_per_s": float(len(good))}
    rates |= {f"{side}_tokens_per_s": float(good[f"{side}_tokens"].sum()) for side in ("prompt", "output")}
    return {key: value / span if span > 0 else None for key, value in rates.items()} | {"span_s": span}


def _anatomies(
    ledger: pd.DataFrame | None, gaps: pd.DataFrame | None, measured: pd.DataFrame, device: str
) -> dict[str, Anatomy | None]:
    out = {
        m: tail.anatomy(fig.ledgers_of(ledger, measured, event), device=device) for m, event in _LEDGER_METRICS.items()
    }
    if gaps is not None and len(gaps):
        inside = gaps["request_id"].isin(measured["request_id"]).to_numpy(bool)
        out["itl"] = tail.anatomy(gaps[inside], "token gaps", device)
    return out


def _tail(anatomies: Mapping[str, Anatomy | None], results: Sequence[SloResult]) -> dict[str, Any]:
    """Every metric's anatomy; in front the one that matters most: a failed SLO's, else the first SLO's, else TTFT."""
    known = {metric: found for metric, found in anatomies.items() if found is not None}
    out: dict[str, Any] = {metric: anatomy_part(found) for metric, found in known.items()}
    ordered = [r.metric for r in results if r.status == verdict.FAIL] + [r.metric for r in results] + list(known)
    first = next((metric for metric in ordered if metric in known), None)
    if first is None:
        return {"metric": None, "stage": None, "owner": None, "share": None, "share_ci": None, "sentence": None}
    told = ("stage", "owner", "share", "share_ci", "sentence")
    return {"metric": first, **{key: out[first][key] for key in told}, **out}


def anatomy_part(found: Anatomy) -> dict[str, Any]:
    """One anatomy as JSON: the two bands in ms by stage, and the stages ranked by their share of the difference."""
    more = found.slow_ns - found.typical_ns
    return {
        "count": found.count,
        "typical": {
            "count": found.typical_count,
            "total_ms": found.typical_ns / 1e6,
            "stages_ms": {stage: usual / 1e6 for stage, usual, _ in found.stages},
        },
        "slow": {
            "count": found.slow_count,
            "total_ms": found.slow_ns / 1e6,
            "stages_ms": {stage: late / 1e6 for stage, _, late in found.stages},
        },
        "difference_ms": more / 1e6,
        "ranked": [
            {"stage": stage, "owner": tail.owner_of(stage), "share": part, "ms": part * more / 1e6}
            for stage, part in found.ranked
        ],
        "stage": found.stage,
        "owner": found.owner,
        "share": found.share,
        "share_ci": [found.share_low, found.share_high],
        "sentence": found.sentence,
    }


def _upgrades(ledger: pd.DataFrame | None, measured: pd.DataFrame, device: str) -> dict[str, Bracket]:
    found = {
        m: upgrade.bracket(fig.ledgers_of(ledger, measured, event), m, device) for m, event in _LEDGER_METRICS.items()
    }
    return {metric: bracket for metric, bracket in found.items() if bracket is not None}


def _upgrade_part(brackets: Mapping[str, Bracket], device: str) -> dict[str, Any]:
    out: dict[str, Any] = {"device": device, "sentence": None}
    for metric, bracket in brackets.items():
        ends = {"now": bracket.now, "lower": bracket.lower, "upper": bracket.upper}
        out[metric] = {
            end: {
                f"{fig.percentile_key(p)}_ms": fig.plain_percentile(e.value) if e.supported else None
                for p, e in sorted(estimates.items())
            }
            for end, estimates in ends.items()
        }
        out[metric] |= {"percentile": bracket.percentile, "sentence": bracket.sentence}
    first = next(iter(brackets.values()), None)
    return out | {"sentence": first.sentence if first else None}


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
    evidence: Evidence,
) -> dict[str, Any]:  # fmt: skip
    """The figures that say how far the others can be trusted, and one line of them."""
    unexplained = residual["unexplained"]["p99_share"] if residual else None
    strict = residual["strict"]["p99_share"] if residual else None
    parts = [f"lag p99 {duration(fig.plain_percentile(lag_ns))}"]
    parts += [f"unexplained p99 {share(unexplained)}", f"strict {share(strict)}"] if residual else ["no ledger"]
    parts += [f"client CPU {share(evidence.client_cpu_share)}"] if evidence.client_cpu_share is not None else []
    parts.append(evidence.floor.sentence if evidence.floor else "floor unmeasured")
    strained = [check.rule for check in checks if check.status == validity.WARN]
    return {
        "valid": not reasons,
        "lag_p99_ms": fig.plain_percentile(lag_ns),
        "unexplained_p99_share": unexplained,
        "strict_p99_share": strict,
        "client_cpu_share": evidence.client_cpu_share,
        "strained": strained,
        "sentence": f"{'invalid' if reasons else 'valid'}: {', '.join(parts)}",
    }
