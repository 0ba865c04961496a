"""What is known of a run beside its tables: what was asked, the rate it was drawn at, how the load tester fared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

from gapmeter.analysis.arrays import Floats, Ints
from gapmeter.analysis.requests.metrics import final
from gapmeter.analysis.results.manifest import GeneratorFloor, Manifest, PlanFacts
from gapmeter.analysis.tables import GeneratorFile, cut_short_ns
from gapmeter.scenarios.model import CHANGING_ARRIVALS

# The rate that a plan was drawn at, as the manifest tells it: (time, requests per second), straight lines between.
Knots = Sequence[tuple[int, float]]
_FEWEST_CANARIES = 10  # of a process, for a p95


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of a run beside its tables. None: not measured (or, for limits, not asked for).

    ``arrivals`` is constant, poisson, gamma, ... or closed; ``count_dispersion`` the variance over the mean of the
    number of requests that the plan lets expect. ``rate_knots`` (CLOCK_MONOTONIC ns, requests per second) are the rate
    that due times were drawn at, where it changed, ``window_ns`` the measured part then, ``prefix_share`` how much of
    all prompts stood at the start of an earlier one, ``unit`` what arrives: requests, or conversations of several,
    ``beyond_end`` how many of their turns would have been due after the run's end, ``think_time_ns`` the mean pause of
    a user. ``client_cpu_share`` is the busiest generator process's share of one core, ``client_loop_lag_ns`` samples
    of its event loop's lag. ``output_enforced`` and ``prompt_exact`` say whether lengths were forced on the server,
    and prompts made with its own tokenizer. ``canary_spread`` is p95 / p50 of a process's fixed pieces of work, the
    largest of any. ``slo_on_errors``: an SLO judges them, so no rule does. ``could_be_plain``: the server is somebody
    else's, and was asked with fields that only some know. ``locustfile``: the name of the user's own. ``floor``: what
    calibration found of the load tester on the machine of the run. ``suspended_ns``: how long that slept meanwhile.
    ``workers``: on how many the requests were sent, 0 where ``processes`` here sent them. ``lacked``: this machine
    had no file, port or memory left for a connection, which ended the run.
    """

    loop: Literal["open", "closed"]
    arrivals: str
    requested_rate: float | None = None
    count_dispersion: float | None = None
    concurrency: int | None = None
    processes: int = 1
    workers: int = 0
    planned: int | None = None
    incomplete: str = ""
    client_cpu_share: float | None = None
    client_loop_lag_ns: Floats | None = None
    records_dropped: int = 0
    cores_shared: bool | None = None  # None: the server is on this machine, and not placed by us
    output_enforced: bool = True
    prompt_exact: bool = True
    canary_spread: float | None = None
    ledger_refused: tuple[str, ...] = ()
    slo_on_errors: bool = False
    could_be_plain: bool = False
    rate_knots: Knots = ()
    window_ns: tuple[int, int] = (0, 0)
    prefix_share: float | None = None
    locustfile: str | None = None
    unit: str = "requests"
    beyond_end: int | None = None
    think_time_ns: int = 0
    floor: GeneratorFloor | None = None
    suspended_ns: int | None = None
    lacked: bool = False

    @property
    def uneven_window_ns(self) -> tuple[int, int] | None:
        """The measured part where due times alone do not tell it, since the load may be quiet at an end."""
        return self.window_ns if self.arrivals in (*CHANGING_ARRIVALS, "onoff") and any(self.window_ns) else None


def evidence_of(
    manifest: Manifest, generators: Sequence[GeneratorFile], requests: pd.DataFrame, ledger_refused: tuple[str, ...]
) -> Evidence:
    """What a run's manifest and its generator processes say; ``requests``: all of the run."""
    load, plan = manifest.asked.load, manifest.plan
    canaries = [g.canary_ns for g in generators if len(g.canary_ns) >= _FEWEST_CANARIES]
    knots = [(at + plan.start_ns, rate) for at, rate in plan.rate_knots]
    window = _window(plan, requests, complete=manifest.status == "complete")
    lag_ns = np.concatenate([np.empty(0), *(g.lag_ns(window[0]) for g in generators)])
    notes = [note for g in generators for note in g.notes if note.get("type") == "conversations"]
    killed = [str(g.worker) for g in generators if not g.complete]
    incomplete = f"generator process {', '.join(killed)} was killed" if killed else ""
    if manifest.status != "complete":
        incomplete = manifest.ended_because or "the run was killed; this is what had happened by then"
    return Evidence(
        loop=plan.loop,
        arrivals=load.arrivals,
        requested_rate=_requested_rate(None if load.arrivals == "diurnal" else load.rate, knots, window),
        count_dispersion=plan.count_dispersion,
        concurrency=None if plan.locustfile else load.concurrency,  # its users, or its shape's, are its own
        processes=load.processes,
        workers=len(manifest.workers.workers) if manifest.workers else 0,
        planned=None if plan.shortened else plan.planned,
        incomplete=incomplete,
        client_cpu_share=max((share for g in generators if (share := g.cpu_share()) is not None), default=None),
        client_loop_lag_ns=lag_ns if len(lag_ns) else None,
        records_dropped=sum(g.dropped for g in generators),
        cores_shared=manifest.placement.shared if manifest.placement.server or not manifest.is_server_here else None,
        output_enforced=plan.output_enforced,
        prompt_exact=plan.prompt_tokens_exact,
        canary_spread=max((float(np.percentile(each, 95) / np.median(each)) for each in canaries), default=None),
        ledger_refused=ledger_refused,
        slo_on_errors=any(slo.metric == "errors" for slo in manifest.slo),
        could_be_plain=manifest.asked.server.engine == "attach" and manifest.target.dialect == "full",
        floor=floor_of(manifest),
        suspended_ns=manifest.suspended_ns,
        lacked=any(note.get("type") == "lack" for g in generators for note in g.notes),
        rate_knots=knots,
        window_ns=window,
        prefix_share=plan.prefix_share,
        unit="conversations" if plan.conversations else "requests",
        think_time_ns=plan.think_time_ns,
        beyond_end=sum(int(note["beyond_end"]) for note in notes) if plan.conversations else None,
        locustfile=plan.locustfile.name if plan.locustfile else None,
    )


def floor_of(manifest: Manifest) -> GeneratorFloor | None:
    """The run's generator's floor; None when its machine was not calibrated for it."""
    calibration = manifest.calibration
    return calibration.generators.get(manifest.asked.load.generator) if calibration else None


def _window(plan: PlanFacts, requests: pd.DataFrame, *, complete: bool) -> tuple[int, int]:
    """From when to when requests were measured: what a slow start took away is left out; CLOCK_MONOTONIC ns.

    A run that was cut off, or that ended with its last request, reaches to the last due time.
    """
    start = plan.start_ns + plan.warmup_ns
    whole = final(requests)
    left_out = whole[~whole["measured"] & (whole["due_ns"] >= start).fillna(False)]
    first = requests.loc[requests["measured"], "due_ns"]
    if len(left_out) and len(first):
        start = int(first.min())
    if (cut_ns := cut_short_ns(requests, plan)) is not None:
        return start, cut_ns
    if plan.end_ns and complete:
        return start, plan.start_ns + plan.end_ns
    return start, int(requests["due_ns"].max()) + 1 if len(requests) else start


def _requested_rate(rate: float | None, knots: Knots, window: tuple[int, int]) -> float | None:
    """Requests per second: as asked for, or the mean of a rate that was asked for as a curve; None for a trace."""
    if rate is not None or not knots:
        return rate
    low, high = expected_counts(knots, np.array(window))
    return float(high - low) / max((window[1] - window[0]) / 1e9, 1e-9)


def expected_counts(knots: Knots, at_ns: Ints | Floats) -> Floats:
    """Requests expected from the first knot to each time: the integral of the rate; constant beyond the last knot.

    A Poisson process with this rate is one of rate 1 on the scale that this gives (time rescaling), so that everything
    known of a constant rate can be asked of it there.
    """
    start, rate = (np.array(column, np.float64) for column in zip(*knots, strict=True))
    spans, middles = np.diff(start) / 1e9, (rate[1:] + rate[:-1]) / 2
    reached = np.concatenate([[0.0], np.cumsum(spans * middles)])
    at = np.clip(np.asarray(at_ns, np.float64), start[0], start[-1])
    piece = np.clip(np.searchsorted(start, at, side="right") - 1, 0, len(spans) - 1)
    inside = (at - start[piece]) / 1e9
    slope = np.divide(np.diff(rate), spans, out=np.zeros_like(spans), where=spans > 0)[piece]
    return np.asarray(reached[piece] + rate[piece] * inside + slope * inside**2 / 2)


def lowest_and_highest(knots: Knots, from_ns: int) -> tuple[float, float]:
    """The rates between which the curve moves from a time on."""
    rates = [rate for at, rate in knots if at >= from_ns] or [knots[-1][1]]
    return min(rates), max(rates)
