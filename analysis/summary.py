"""A run's figures from its tables: the verdict, latencies, stages, what slow requests wait for, how far to trust it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd

from gapmeter.analysis.judge import validity, verdict
from gapmeter.analysis.judge.evidence import Evidence
from gapmeter.analysis.judge.floor import describe_floor
from gapmeter.analysis.judge.steady import Warmup
from gapmeter.analysis.judge.warnings import attempts_warning, warmup_warning
from gapmeter.analysis.ledger.tail import LEDGER_OF, anatomies_of, describe_tail
from gapmeter.analysis.ledger.upgrade import describe_upgrade
from gapmeter.analysis.requests import figures as fig
from gapmeter.analysis.requests.failures import bound_ns, censored, describe_failures
from gapmeter.analysis.requests.load import (
    count_requests,
    describe_goodput,
    describe_load,
    describe_throughput,
    describe_turns,
)
from gapmeter.analysis.requests.metrics import (
    METRICS,
    generator_lag_ns,
    limits_of,
    measured_requests,
    metric_series,
    succeeded,
    window_s,
)
from gapmeter.analysis.requests.omission import describe_closed_loop
from gapmeter.analysis.results.distribution import GroupDistribution, MetricDistribution, StageDistribution
from gapmeter.analysis.results.latency import EventResidual, Left, Residual
from gapmeter.analysis.results.manifest import Slo
from gapmeter.analysis.results.run import INVALID, Confidence, RunFigures
from gapmeter.analysis.results.trust import WARN, Check, RunWarning, Trust
from gapmeter.analysis.stages import BY_NAME
from gapmeter.analysis.stats.estimate import CONFIDENCE, TAIL, Floats
from gapmeter.analysis.stats.hdr import PERCENTILES
from gapmeter.analysis.stats.series import Series


def build_figures(
    requests: pd.DataFrame,
    ledger: pd.DataFrame | None,
    gaps: pd.DataFrame | None,
    slos: Sequence[Slo],
    evidence: Evidence,
    *,
    name: str = "",
    device: str = "GPU",
    warmup: Warmup | None = None,
    warnings: Iterable[RunWarning] = (),
) -> RunFigures:
    """``requests``: every request with its ``measured`` flag.

    ``ledger``: two rows a request (``first_token`` and ``last_token``) or None; ``gaps``: a ledger row a token gap, or
    None; ``device`` is what computed the forwards; ``warmup`` what ``detect_warmup`` left out (already applied to
    ``measured``); ``warnings`` those of other parts. A refused ledger is not shown.
    """
    measured = measured_requests(requests)
    if evidence.ledger_refused:
        ledger = gaps = None
    anatomies = anatomies_of(ledger, gaps, measured)
    answers = verdict.judge(slos, measured, anatomies)
    checks = validity.check_run(measured, evidence)
    reasons = (
        *validity.invalid_reasons(checks),
        *(verdict.never_occurred(answer) for answer in answers if answer.status == INVALID),
    )
    decided = verdict.overall(answers, reasons)
    counts = count_requests(requests, measured, evidence)
    asked = sorted({*PERCENTILES, *(float(slo.percentile) for slo in slos if slo.percentile is not None)})
    rate = window_s(measured) / len(measured) if len(measured) else 0.0
    metrics = {metric: _metric(measured, metric, "due", asked, rate) for metric in METRICS}
    to_first, to_last = (fig.ledgers_of(ledger, measured, event) for event in fig.EVENTS)
    residual = Residual(first_token=_residual(to_first), last_token=_residual(to_last))
    lag_ns, bound = validity.percentile_of(generator_lag_ns(measured), 99), bound_ns(measured)
    return RunFigures(
        name=name,
        verdict=decided,
        exit_code=verdict.EXIT_CODES[decided],
        invalid_reasons=reasons,
        slo=answers,
        device=device,
        confidence=Confidence(interval=CONFIDENCE, verdict=1 - TAIL),
        load=describe_load(measured, evidence),
        counts=counts,
        metrics=metrics,
        # Gaps and TPOT know no difference between due and sent.
        metrics_from_sent=metrics | {metric: _metric(measured, metric, "sent", asked, rate) for metric in LEDGER_OF},
        metrics_censored={metric: censored(each.with_failures or each, bound) for metric, each in metrics.items()},
        turns=describe_turns(measured),
        closed_loop=describe_closed_loop(measured, evidence),
        failures=describe_failures(measured),
        goodput=describe_goodput(measured, limits_of(slos)),
        throughput=describe_throughput(measured),
        stages=_stages(to_last, asked, rate),
        stages_to_first_token=_stages(to_first, asked, rate),
        groups=_groups(to_last, asked, rate),
        residual=residual,
        tail=describe_tail(anatomies, answers),
        upgrade=describe_upgrade(ledger, measured, device),
        checks=tuple(checks),
        warnings=(
            *validity.warnings_of(checks, evidence),
            *warmup_warning(warmup),
            *warnings,
            *attempts_warning(counts.attempts, len(measured)),
        ),
        floor=describe_floor(evidence.floor, measured),
        trust=_trust(checks, reasons, residual.last_token, lag_ns, evidence.client_cpu_share),
    )


def _metric(measured: pd.DataFrame, metric: str, origin: str, asked: list[float], rate: float) -> MetricDistribution:
    """Over successes; ``with_failures`` beside it where requests failed, those counted as infinite."""
    values = metric_series(measured, metric, origin)
    per_request = values.count / len(measured) if len(measured) else 1.0
    successes = fig.distribution(values, asked, per_request, rate)
    if bool(succeeded(measured).all()):
        return MetricDistribution(**dict(successes))
    failing = metric_series(measured, metric, origin, failures=True)
    return MetricDistribution(**dict(successes), with_failures=fig.distribution(failing, asked, per_request, rate))


def _stages(ledgers: pd.DataFrame, asked: list[float], rate: float) -> dict[str, StageDistribution]:
    """By stage; empty without a ledger."""
    if not len(ledgers):
        return {}
    return {
        name: StageDistribution(
            owner=BY_NAME[name].owner,
            kind=BY_NAME[name].kind if len(values) else "unmeasured",
            **dict(fig.distribution(Series(values), asked, 1.0, rate)),
        )
        for name, values in fig.stage_values_ns(ledgers).items()
    }


def _groups(ledgers: pd.DataFrame, asked: list[float], rate: float) -> dict[str, GroupDistribution]:
    """By group of stages; empty without a ledger."""
    if not len(ledgers):
        return {}
    return {
        group: GroupDistribution(unmeasured=tuple(missing), **dict(fig.distribution(Series(sums), asked, 1.0, rate)))
        for group, (sums, missing) in fig.group_values_ns(ledgers).items()
    }


def _residual(ledgers: pd.DataFrame) -> EventResidual | None:
    """What the ledgers leave open.

    It describes the ledgers of this run, all of them, so it stands whatever the sample's size.
    """
    if not len(ledgers):
        return None
    total = np.maximum(ledgers["total_ns"].to_numpy(np.float64), 1.0)
    unexplained, strict = (
        _left(ledgers[f"{which}_ns"].to_numpy(np.float64), total) for which in ("unexplained", "strict")
    )
    return EventResidual(unexplained=unexplained, strict=strict)


def _left(left_ns: Floats, total_ns: Floats) -> Left:
    (p50, p50_share), (p99, p99_share), (most, most_share) = (
        (fig.plain_percentile(validity.percentile_of(left_ns, p)), validity.percentile_of(left_ns / total_ns, p))
        for p in (50.0, 99.0, 100.0)
    )
    return Left(p50_ms=p50, p99_ms=p99, max_ms=most, p50_share=p50_share, p99_share=p99_share, max_share=most_share)


def _trust(
    checks: Sequence[Check], reasons: Sequence[str], residual: EventResidual | None, lag_ns: float | None,
    client_cpu_share: float | None,
) -> Trust:  # fmt: skip
    return Trust(
        valid=not reasons,
        lag_p99_ms=fig.plain_percentile(lag_ns),
        unexplained_p99_share=residual.unexplained.p99_share if residual else None,
        strict_p99_share=residual.strict.p99_share if residual else None,
        client_cpu_share=client_cpu_share,
        strained=tuple(check.rule for check in checks if check.status == WARN),
    )
