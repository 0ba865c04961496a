"""A run's figures from its tables: verdict, latencies, stages, what slow requests wait for, how far to trust it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from gapmeter.analysis import load
from gapmeter.analysis.judge import validity, verdict
from gapmeter.analysis.judge import warnings as doubts
from gapmeter.analysis.judge.evidence import Evidence
from gapmeter.analysis.judge.lateness import Lateness, lateness_of, without_refused
from gapmeter.analysis.judge.outage import find_row, outage_of
from gapmeter.analysis.judge.steady import Warmup
from gapmeter.analysis.judge.words import not_judged
from gapmeter.analysis.ledger.ledger import Ledger
from gapmeter.analysis.ledger.tail import anatomies_of, describe_tail
from gapmeter.analysis.ledger.upgrade import describe_upgrade
from gapmeter.analysis.requests import figures as fig
from gapmeter.analysis.requests.metrics import (
    MetricSeries,
    failures_of,
    generator_lag_ns,
    itl_p99_ns,
    limits_of,
    measured_requests,
    percentile_of,
    percentiles_of,
    receive_waits_ns,
    window_s,
)
from gapmeter.analysis.results.distribution import (
    Distribution,
    GroupDistribution,
    MetricDistribution,
    StageDistribution,
)
from gapmeter.analysis.results.latency import EventResidual, Left, Residual
from gapmeter.analysis.results.run import INVALID, Confidence, RunFigures, RunVerdict, SloAnswer
from gapmeter.analysis.results.trust import WARN, Check, ReceiveWait, RunWarning, Trust
from gapmeter.analysis.stages import BY_NAME
from gapmeter.analysis.stats.estimate import CONFIDENCE
from gapmeter.analysis.stats.hdr import PERCENTILES
from gapmeter.analysis.stats.series import Series
from gapmeter.scenarios.slo import LATENCIES, Slo


@dataclass(frozen=True)
class RunTables:
    """What a run's figures are made of, without a ledger where there is none that may be shown.

    ``requests``: every request with its ``measured`` flag. ``ledger``: two rows a request (``first_token`` and
    ``last_token``); ``gaps``: a ledger row a token gap.
    """

    requests: pd.DataFrame
    ledger: pd.DataFrame | None = None
    gaps: pd.DataFrame | None = None

    @cached_property
    def measured(self) -> pd.DataFrame:
        """The measured requests, in the order in which they were due."""
        measured = measured_requests(self.requests)
        measured["itl_p99_ns"] = itl_p99_ns(measured)  # for all who ask which requests kept their limits
        return measured

    @cached_property
    def origin_ns(self) -> int:
        """The earliest due time: second 0 of all that counts from it; 0 without a request."""
        return int(self.requests["due_ns"].min()) if len(self.requests) else 0

    @cached_property
    def series(self) -> MetricSeries:
        """The measured requests' metrics."""
        return MetricSeries(self.measured)

    def with_ledger(self, ledger: Ledger) -> RunTables:
        """The same requests, whose series need not be made again, with a ledger that may be shown."""
        tables = RunTables(self.requests, ledger.rows, ledger.gaps)
        vars(tables).update(measured=self.measured, series=self.series)
        return tables

    @cached_property
    def ledgers(self) -> dict[str, pd.DataFrame]:
        """The measured requests' ledgers, by metric."""
        return fig.ledgers_by_metric(self.ledger, self.gaps, self.measured)


def build_figures(
    tables: RunTables, slos: Sequence[Slo], evidence: Evidence, *, name: str = "", device: str = "GPU",
    warmup: Warmup | None = None, warnings: Iterable[RunWarning] = (),
) -> RunFigures:  # fmt: skip
    """A run's figures from its tables: verdict, latencies, stages, what slow requests wait for, how far to trust it.

    ``device`` is what computed the forwards; ``warmup`` what ``detect_warmup`` left out (already applied to the
    ``measured`` flag); ``warnings`` those of other parts. A refused ledger is not shown.
    """
    if evidence.ledger_refused and tables.ledger is not None:
        tables = RunTables(tables.requests)
    measured, series, ledgers = tables.measured, tables.series, tables.ledgers
    asked = sorted({*PERCENTILES, *(float(slo.percentile) for slo in slos if slo.percentile is not None)})
    pools = _Pools(measured, asked)
    with ThreadPoolExecutor(2) as beside:  # they take seconds of a large run, most of them without Python's lock
        dissected = beside.submit(anatomies_of, ledgers, slos)
        to_first, to_last = (beside.submit(pools.stages, ledgers[metric]) for metric in ("ttft", "e2e"))
        row = find_row(measured, tables.origin_ns)
        outage = outage_of(row)
        lateness = lateness_of(measured, evidence.client_loop_lag_ns, series)
        metrics = {metric: pools.metric(lateness, metric, "due") for metric in LATENCIES}
        anatomies = dissected.result()
    answers = verdict.judge(slos, measured, anatomies, lateness=lateness, outage=outage, series=series)
    checks = validity.check_run(measured, evidence, answers, lateness, outage)
    decided = _decided(name, answers, checks)
    counts = load.count_requests(tables.requests, measured, evidence)
    served = load.describe_throughput(tables.requests, evidence.uneven_window_ns)
    asked_load = load.describe_load(measured, evidence)
    residual = Residual(first_token=_residual(ledgers["ttft"]), last_token=_residual(ledgers["e2e"]))
    bound = fig.bound_ns(measured)
    return RunFigures(
        **dict(decided),
        device=device,
        confidence=Confidence(interval=CONFIDENCE, verdict=CONFIDENCE),
        load=asked_load,
        counts=counts,
        metrics=metrics,
        # Gaps and TPOT know no difference between due and sent.
        metrics_from_sent=metrics | {metric: pools.metric(lateness, metric, "sent") for metric in fig.LEDGER_OF},
        metrics_censored={metric: fig.censored(each.with_failures or each, bound) for metric, each in metrics.items()},
        turns=load.describe_turns(measured, lateness),
        closed_loop=load.describe_closed_loop(measured, evidence, lateness),
        failures=load.describe_failures(measured, tables.origin_ns),
        outage=outage,
        goodput=load.describe_goodput(measured, limits_of(slos), served.requests_per_s),
        throughput=served,
        stages=to_last.result(),
        stages_to_first_token=to_first.result(),
        groups=pools.groups(ledgers["e2e"]),
        residual=residual,
        tail=describe_tail(anatomies, answers),
        upgrade=describe_upgrade(ledgers, device, lateness.refused_ns),
        checks=tuple(checks),
        warnings=doubts.most_telling_first(
            (
                *doubts.outage_warning(row),
                *doubts.connect_warning(measured),
                *validity.warnings_of(checks, evidence, measured),
                *doubts.warmup_warning(warmup),
                *doubts.cached_warning(asked_load),
                *warnings,
                *doubts.attempts_warning(counts.attempts, len(measured)),
            )
        ),
        floor=validity.describe_floor(evidence.floor),
        trust=_trust(measured, evidence, residual.last_token, checks, valid=not decided.invalid_reasons),
    )


def _decided(name: str, answers: Sequence[SloAnswer], checks: Sequence[Check]) -> RunVerdict:
    """The verdict, and the reasons if there is none."""
    unanswered = [not_judged(answer) for answer in answers if answer.status == INVALID]
    reasons = (*validity.invalid_reasons(checks), *unanswered)
    word = verdict.overall(answers, reasons)
    return RunVerdict(
        name=name, verdict=word, exit_code=verdict.EXIT_CODES[word], invalid_reasons=reasons, slo=tuple(answers)
    )


@dataclass(frozen=True, slots=True)
class _Pools:
    """Values of the measured requests as distributions, at the percentiles asked for."""

    measured: pd.DataFrame
    percentiles: Sequence[float]

    def of(self, values: Series) -> Distribution:
        return fig.distribution(values, self.percentiles, len(self.measured), window_s(self.measured))

    def metric(self, lateness: Lateness, metric: str, origin: str) -> MetricDistribution:
        """Over successes; ``with_failures`` beside it where requests failed, those counted as infinite."""

        def kept(*, failures: bool) -> Distribution:
            values = lateness.series(metric, origin, failures=failures)
            return without_refused(self.of(values), metric, lateness, origin)

        failing = kept(failures=True) if failures_of(self.measured).any() else None
        return MetricDistribution(**dict(kept(failures=False)), with_failures=failing)

    def stages(self, rows: pd.DataFrame) -> dict[str, StageDistribution]:
        """The distribution of each stage; empty without a ledger."""
        return {
            stage: StageDistribution(
                owner=BY_NAME[stage].owner,
                kind=BY_NAME[stage].kind if values.count else "unmeasured",
                **dict(self.of(values)),
            )
            for stage, values in fig.stage_series(rows).items()
        }

    def groups(self, rows: pd.DataFrame) -> dict[str, GroupDistribution]:
        """The distribution of each group of stages; empty without a ledger."""
        groups = fig.group_values_ns(rows) if len(rows) else {}
        return {
            group: GroupDistribution(unmeasured=tuple(missing), **dict(self.of(Series(sums))))
            for group, (sums, missing) in groups.items()
        }


def _trust(
    measured: pd.DataFrame, evidence: Evidence, left: EventResidual | None, checks: Sequence[Check], *, valid: bool
) -> Trust:
    waits, pieces = receive_waits_ns(measured)
    p50, p99, most = map(fig.finite_ms, percentiles_of(waits, 50.0, 99.0, 100.0))
    received = ReceiveWait(stamped=len(waits) / pieces, p50_ms=p50, p99_ms=p99, max_ms=most) if len(waits) else None
    return Trust(
        valid=valid,
        lag_p99_ms=fig.finite_ms(percentile_of(generator_lag_ns(measured), 99)),
        unexplained_p99_share=left.unexplained.p99_share if left else None,
        strict_p99_share=left.strict.p99_share if left else None,
        unstamped_p99_share=left.unstamped.p99_share if left else None,
        client_cpu_share=evidence.client_cpu_share,
        receive_wait=received,
        strained=tuple(check.rule for check in checks if check.status == WARN),
    )


def _residual(ledgers: pd.DataFrame) -> EventResidual | None:
    """What the ledgers leave open.

    It describes the ledgers of this run, all of them, so it stands whatever the sample's size.
    """
    if not len(ledgers):
        return None
    total_ns = np.maximum(ledgers["total_ns"].to_numpy(np.float64), 1.0)

    def left(column: str) -> Left:
        left_ns = ledgers[column].to_numpy(np.float64)
        p50, p99, most = percentiles_of(left_ns, 50.0, 99.0, 100.0)
        p50_share, p99_share, max_share = percentiles_of(left_ns / total_ns, 50.0, 99.0, 100.0)
        return Left(
            p50_ms=fig.finite_ms(p50), p99_ms=fig.finite_ms(p99), max_ms=fig.finite_ms(most),
            p50_share=p50_share, p99_share=p99_share, max_share=max_share,
        )  # fmt: skip

    return EventResidual(unexplained=left("unexplained_ns"), strict=left("strict_ns"), unstamped=left("unstamped_ns"))
