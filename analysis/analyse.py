"""From a run's raw files to everything that is derived from them. Needs the folder and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import pandas as pd

from gapmeter.analysis.arrays import Floats
from gapmeter.analysis.cost import describe_economics
from gapmeter.analysis.device.energy import energy_of
from gapmeter.analysis.device.roofline import describe_roofline
from gapmeter.analysis.device.telemetry import describe_telemetry, measured_window, read_telemetry
from gapmeter.analysis.judge import validity, verdict
from gapmeter.analysis.judge import warnings as doubts
from gapmeter.analysis.judge.evidence import CHANGING, Evidence, evidence_of
from gapmeter.analysis.judge.lateness import Lateness, lateness_of
from gapmeter.analysis.judge.outage import find_row, outage_of
from gapmeter.analysis.judge.steady import Warmup, describe_drift, describe_steady, detect_warmup, throttled
from gapmeter.analysis.judge.words import not_judged
from gapmeter.analysis.ledger.explore import describe_pairs
from gapmeter.analysis.ledger.ledger import Ledger, LedgerInputs, chosen, make_ledger, timelines
from gapmeter.analysis.ledger.tail import anatomies_of, describe_bands, describe_tail
from gapmeter.analysis.ledger.trace import Trace, read_trace
from gapmeter.analysis.ledger.upgrade import describe_compute, describe_upgrade
from gapmeter.analysis.provenance import made_by, provenance_of
from gapmeter.analysis.requests import figures as fig
from gapmeter.analysis.requests import load
from gapmeter.analysis.requests.definitions import describe_definitions
from gapmeter.analysis.requests.metrics import (
    MetricSeries,
    ended_by_us,
    generator_lag_ns,
    itl_p99_ns,
    limits_of,
    measured_requests,
    percentile_of,
    percentiles_of,
    receive_waits_ns,
    succeeded,
    window_s,
)
from gapmeter.analysis.results.distribution import (
    Distribution,
    GroupDistribution,
    MetricDistribution,
    StageDistribution,
)
from gapmeter.analysis.results.latency import EventResidual, Left, Residual
from gapmeter.analysis.results.manifest import Manifest, PlanFacts
from gapmeter.analysis.results.run import (
    INVALID,
    Confidence,
    CoreHolder,
    LedgerFacts,
    Ranks,
    RunFigures,
    RunResult,
    RunVerdict,
    ShortenedLoad,
    SloAnswer,
    StepFit,
)
from gapmeter.analysis.results.trust import WARN, Check, ReceiveWait, RunWarning, Trust
from gapmeter.analysis.stages import BY_NAME
from gapmeter.analysis.stats.estimate import CONFIDENCE
from gapmeter.analysis.stats.hdr import PERCENTILES
from gapmeter.analysis.stats.series import Series
from gapmeter.analysis.tables import cut_short_ns, read_requests, steps_table, write_table
from gapmeter.records import RunFolder
from gapmeter.records.process import give_back_memory
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
    def series(self) -> MetricSeries:
        """Their metrics."""
        return MetricSeries(self.measured)

    def with_ledger(self, ledger: Ledger) -> RunTables:
        """The same requests, whose series need not be made again, with a ledger that may be shown."""
        tables = RunTables(self.requests, ledger.rows, ledger.gaps)
        vars(tables).update(measured=self.measured, series=self.series)
        return tables

    @cached_property
    def ledgers(self) -> dict[str, pd.DataFrame]:
        """Their ledgers, by metric."""
        return fig.ledgers_by_metric(self.ledger, self.gaps, self.measured)


def analyse(folder: RunFolder, *, definitions: bool = False) -> tuple[RunResult, MetricSeries]:
    """Derive tables and histograms, which are written into the folder, and the result, which the report writes.

    Also returns the metrics' series, which the report draws.

    ``definitions``: also TTFT, ITL, TPOT and E2E by other tools' definitions.

    Raises FileNotFoundError when this is no run's folder, NotReadable when its manifest is not one of ours,
    gapmeter.records.NotRecords when no request was recorded.
    """
    manifest = Manifest.read(folder.path)
    plan = manifest.plan
    requests, generators = read_requests(folder, plan)
    steady = manifest.asked.load.arrivals not in CHANGING
    warmup = detect_warmup(requests[requests["measured"]]) if plan.warmup_auto and steady else None
    if warmup is not None and warmup.state == "warmed":
        requests["measured"] &= requests["due_ns"] >= warmup.until_ns
    trace = read_trace(
        folder.record_files(folder.probe), requests["request_id"].tolist(), folder.telemetry, manifest.placement.server
    )
    steps = steps_table(trace) if trace is not None and trace.has_engine else None
    with ThreadPoolExecutor(2) as beside:  # what takes seconds of a large run is mostly done without Python's lock
        tables, ledger, files = _with_ledger(RunTables(requests), trace, beside)
        give_back_memory()
        if steps is not None:
            files["steps"] = steps
        measured, ledgers, window = tables.measured, tables.ledgers, measured_window(requests)
        bands = beside.submit(describe_bands, ledgers)
        pairs = beside.submit(describe_pairs, measured, ledgers, limits_of(manifest.slo))
        samples = read_telemetry(folder)
        energy = energy_of(samples, *window, plan.start_ns) if samples is not None and window is not None else None
        telemetry = describe_telemetry(samples, trace, manifest, window, energy)
        state = describe_steady(requests, warmup, loop=plan.loop, searched=steady)
        canaries = [(g.canary_at_ns, g.canary_ns) for g in generators]
        drift = describe_drift(requests, canaries, throttled(telemetry))
        figures = build_figures(
            tables, manifest.slo, evidence_of(manifest, generators, requests, ledger.refused),
            name=manifest.asked.name, device=manifest.device, warmup=warmup,
            warnings=[
                *doubts.recording_warnings(trace, ledger, manifest, requests),
                *doubts.telemetry_warnings(telemetry, manifest),
                *doubts.growth_warning(state), *doubts.short_warmup_warning(state), *doubts.speed_warning(drift),
                *doubts.streaming_warnings(measured),
            ],
        )  # fmt: skip
        provenance = provenance_of(manifest, figures)
        written = [
            beside.submit(write_table, folder.path / f"{name}.parquet", table, provenance.facts())
            for name, table in files.items()
        ]
        result = RunResult(
            **dict(figures),
            **dict(describe_economics(figures, state, manifest, measured, energy)),
            telemetry=telemetry,
            roofline=describe_roofline(trace, manifest, window),
            ledger=describe_ledger(ledger, trace, len(ledgers.get("e2e", ()))),
            steady=state,
            drift=drift,
            bands=bands.result(),
            compute=describe_compute(ledgers, steps, manifest.device),
            explore=pairs.result(),
            made_by=made_by(),
            provenance=provenance,
            shortened=_shortened(requests, plan),
            definitions=describe_definitions(folder, requests) if definitions else None,
        )
        if succeeded(measured).any():
            fig.write_histograms(
                folder.hdr, measured, tables.ledger, manifest.started_s or 0.0, window_s(measured), provenance.line(),
                tables.series,
            )  # fmt: skip
        for each in written:
            each.result()
    return result, tables.series


def _with_ledger(
    tables: RunTables, trace: Trace | None, beside: Executor
) -> tuple[RunTables, Ledger, dict[str, pd.DataFrame]]:
    """The tables with their ledger, unless it is refused; the ledger; what of both becomes a file.

    What ledgers are made from, a gigabyte in a large run, is gone when this returns.
    """
    inputs = LedgerInputs.of(tables.requests, trace)
    give_back_memory()
    made = beside.submit(make_ledger, inputs)
    tables.series.prepare()
    ledger = made.result()
    give_back_memory()
    files = {"gaps": ledger.gaps, "requests": tables.requests, "ledger": ledger.rows}
    if not ledger.refused:
        tables = tables.with_ledger(ledger)
        files["timeline"] = timelines(inputs, chosen(tables.requests))
    return tables, ledger, files


def _shortened(requests: pd.DataFrame, plan: PlanFacts) -> ShortenedLoad | None:
    """How a load ended before its plan did, because enough was known."""
    cut_ns = cut_short_ns(requests, plan)
    if cut_ns is None or plan.shortened is None:
        return None
    return ShortenedLoad(after_s=(cut_ns - plan.start_ns) / 1e9, in_flight=plan.shortened.in_flight)


def describe_ledger(ledger: Ledger, trace: Trace | None, measured: int) -> LedgerFacts:
    """The ledger itself: refusals, unmeasured stages, the estimate's error. ``measured``: requests that have one."""
    fit = ledger.interference
    return LedgerFacts(
        refused=ledger.refused,
        unmeasured=ledger.unmeasured,
        clipped=ledger.clipped,
        requests=len(ledger.rows) // 2,
        interference=None if fit is None else StepFit(
            base_ms=fit.base_ns / 1e6, per_sequence_ms=fit.per_sequence_ns / 1e6, error_ms=fit.error_ns / 1e6,
            per_kv_token_us=fit.per_token_ns / 1e3, decode_only_steps=fit.steps,
        ),
        killed_processes=trace.incomplete if trace else (),
        core_held=_core_held(ledger, measured) if trace and trace.cores and not ledger.refused else None,
        core_waits=trace.cores.known_from if trace and trace.cores else "spans",
        support=ledger.support or None,
        ranks=_ranks(trace) if trace and len(trace.ranks_apart_ns) else None,
    )  # fmt: skip


def _ranks(trace: Trace) -> Ranks:
    p50, p99 = np.percentile(trace.ranks_apart_ns, [50, 99]) / 1e6
    return Ranks(steps=len(trace.ranks_apart_ns), begun_apart_p50_ms=float(p50), begun_apart_p99_ms=float(p99))


def _core_held(ledger: Ledger, measured: int) -> tuple[CoreHolder, ...]:
    whole = sum(ledger.held.values())
    return tuple(
        CoreHolder(
            process=who.process, stage=who.stage, program=who.program, share=ns / whole, mean_ms=ns / measured / 1e6
        )
        for who, ns in ledger.held.items()
    )


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
    with ThreadPoolExecutor(1) as beside:  # both take seconds of a large run, most of them without Python's lock
        dissected = beside.submit(anatomies_of, ledgers, slos)
        begun = tables.requests["due_ns"].min()
        zero_ns = 0 if pd.isna(begun) else int(begun)  # from where the report's charts count, too
        row = find_row(measured, zero_ns)
        outage = outage_of(row)
        lateness = lateness_of(measured, evidence.client_loop_lag_ns, series)
        pools = _Pools(measured, series, lateness, asked)
        metrics = {metric: pools.metric(metric, "due") for metric in LATENCIES}
        anatomies = dissected.result()
    answers = verdict.judge(slos, measured, anatomies, lateness=lateness, outage=outage, series=series)
    checks = validity.check_run(measured, evidence, answers, lateness, outage, series)
    decided = _decided(name, answers, checks)
    counts = load.count_requests(tables.requests, measured, evidence)
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
        metrics_from_sent=metrics | {metric: pools.metric(metric, "sent") for metric in fig.LEDGER_OF},
        metrics_censored={metric: fig.censored(each.with_failures or each, bound) for metric, each in metrics.items()},
        turns=load.describe_turns(measured),
        closed_loop=load.describe_closed_loop(measured, evidence),
        failures=load.describe_failures(measured, zero_ns),
        outage=outage,
        goodput=load.describe_goodput(measured, limits_of(slos)),
        throughput=load.describe_throughput(measured),
        stages=pools.stages(ledgers["e2e"]),
        stages_to_first_token=pools.stages(ledgers["ttft"]),
        groups=pools.groups(ledgers["e2e"]),
        residual=residual,
        tail=describe_tail(anatomies, answers),
        upgrade=describe_upgrade(ledgers, device),
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
    series: MetricSeries
    lateness: Lateness
    percentiles: Sequence[float]

    def of(self, values: Floats | Series, per_request: float = 1.0) -> Distribution:
        series = values if isinstance(values, Series) else Series(values)
        request_s = window_s(self.measured) / len(self.measured) if len(self.measured) else 0.0
        return fig.distribution(series, self.percentiles, per_request, request_s)

    def metric(self, metric: str, origin: str) -> MetricDistribution:
        """Over successes; ``with_failures`` beside it where requests failed, those counted as infinite."""
        measured = self.measured
        values = self.series(metric, origin)
        per_request = values.count / len(measured) if len(measured) else 1.0
        failing = None
        if not (succeeded(measured) | ended_by_us(measured)).all():
            failing = self.of(self.series(metric, origin, failures=True), per_request)
        late_ns = partial(self.lateness.refused_ns, metric)
        whole = MetricDistribution(**dict(self.of(values, per_request)))
        failing = failing and fig.refused(failing, late_ns)
        return fig.refused(whole, late_ns).model_copy(update={"with_failures": failing})

    def stages(self, rows: pd.DataFrame) -> dict[str, StageDistribution]:
        """By stage; empty without a ledger."""
        return {
            stage: StageDistribution(
                owner=BY_NAME[stage].owner,
                kind=BY_NAME[stage].kind if len(values) else "unmeasured",
                **dict(self.of(values)),
            )
            for stage, values in (fig.stage_values_ns(rows) if len(rows) else {}).items()
        }

    def groups(self, rows: pd.DataFrame) -> dict[str, GroupDistribution]:
        """By group of stages; empty without a ledger."""
        groups = fig.group_values_ns(rows) if len(rows) else {}
        return {
            group: GroupDistribution(unmeasured=tuple(missing), **dict(self.of(sums)))
            for group, (sums, missing) in groups.items()
        }


def _trust(
    measured: pd.DataFrame, evidence: Evidence, left: EventResidual | None, checks: Sequence[Check], *, valid: bool
) -> Trust:
    return Trust(
        valid=valid,
        lag_p99_ms=fig.finite_ms(percentile_of(generator_lag_ns(measured), 99)),
        unexplained_p99_share=left.unexplained.p99_share if left else None,
        strict_p99_share=left.strict.p99_share if left else None,
        unstamped_p99_share=left.unstamped.p99_share if left else None,
        client_cpu_share=evidence.client_cpu_share,
        receive_wait=_receive_wait(measured),
        strained=tuple(check.rule for check in checks if check.status == WARN),
    )


def _receive_wait(measured: pd.DataFrame) -> ReceiveWait | None:
    waits, pieces = receive_waits_ns(measured)
    if not len(waits):
        return None
    p50, p99, most = map(fig.finite_ms, percentiles_of(waits, 50.0, 99.0, 100.0))
    return ReceiveWait(stamped=len(waits) / pieces, p50_ms=p50, p99_ms=p99, max_ms=most)


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
