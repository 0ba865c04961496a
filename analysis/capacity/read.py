"""A capacity search's folder as values: what was asked, and every trial from its run's records."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from gapmeter.analysis.arrays import Floats
from gapmeter.analysis.capacity.curve import pace_of
from gapmeter.analysis.capacity.sample import (
    bursts_of,
    chance_if_stable,
    log_level,
    served_by,
    worth,
    worth_of_clusters,
)
from gapmeter.analysis.capacity.search import Goal
from gapmeter.analysis.capacity.trial import Count, Look, Outcome, Trial, find, plan_looks
from gapmeter.analysis.judge.arrivals import dispersion
from gapmeter.analysis.judge.evidence import Evidence, evidence_of
from gapmeter.analysis.judge.lateness import Lateness, lateness_of, moves_ns
from gapmeter.analysis.judge.validity import check_run
from gapmeter.analysis.judge.words import late_words, never_occurred
from gapmeter.analysis.requests.metrics import (
    final,
    good_requests,
    issued,
    limits_of,
    measured_requests,
    pooled_gaps,
    request_values_ns,
    resent_once,
    stamps_ns,
    succeeded,
    with_failed,
)
from gapmeter.analysis.results import NotReadable, RunResult
from gapmeter.analysis.results.capacity import FAILS, HOLDS, UNDECIDED
from gapmeter.analysis.results.manifest import Manifest, SearchManifest, TrialNote
from gapmeter.analysis.results.trust import BROKEN, Check
from gapmeter.analysis.stats.exact import chance_of_so_few_in_bursts
from gapmeter.analysis.stats.series import bursts_in, share_of
from gapmeter.analysis.tables import read_requests
from gapmeter.records import RunFolder
from gapmeter.scenarios.slo import Slo

# Rules of validity.py that speak of the load tester's own limits; and others without which nothing was measured.
CLIENT_RULES = ("delivered", "dispersion", "client_cpu", "token_rate", "request_rate")
KEPT_ARRIVALS = ("gamma", "onoff", "trace")  # by a search, at other rates; all else is searched as a Poisson process
_OTHER_RULES = ("requests", "records", "rate", "output_length", "prompt_length", "awake")
_TOO_MANY = 429  # HTTP's status of a limit on the rate
# How far services vary, as arrivals do: near its ceiling a queue's spells lengthen with the sum of both (Kingman).
_SERVICES = 1.0


@dataclass(frozen=True, slots=True)
class MeasuredTrial:
    """A trial with its number and what its run found, None where there is nothing."""

    number: int
    trial: Trial
    result: RunResult | None


def goal_of(manifest: SearchManifest) -> Goal:
    """What was searched."""
    asked = manifest.capacity
    return Goal(
        manifest.slo, asked.start, asked.confidence, asked.within, asked.longest,
        budget_s=asked.budget_s, lost_s=asked.lost_s,
    )  # fmt: skip


def read_trials(folder: Path, manifest: SearchManifest) -> list[MeasuredTrial]:
    """Every trial that the manifest lists, in the order in which they were run."""
    out = []
    for note in manifest.capacity.trials:
        outcome, result = read_outcome(folder / note.folder, manifest.slo, note), None
        looks = plan_looks(manifest.slo, note.looks[-1], note.looks[0])
        finding = find(manifest.slo, outcome.counts, looks[min(outcome.looks, len(looks)) - 1])
        with contextlib.suppress(OSError, NotReadable):
            result = RunResult.read(folder / note.folder)
        out.append(MeasuredTrial(note.number, Trial(note.rate, outcome, finding, note.looks[-1]), result))
    return out


def read_outcome(path: Path, slos: Sequence[Slo], note: TrialNote) -> Outcome:
    """What came of one trial, by its records alone: a search cannot wait for the rest of a run's analysis."""
    try:
        manifest = Manifest.read(path)
        requests, generators = read_requests(RunFolder(path), manifest.plan)
    except (OSError, ValueError):
        return Outcome(
            tuple(Count(0.0, 0, 0.0) for _ in slos), 0, 0, note.seconds, good=0, good_n_eff=0.0,
            invalid=note.reason or "it could not be analysed", died=note.died or "", interrupted=note.interrupted,
            name=note.folder,
        )  # fmt: skip
    return outcome_of(requests, evidence_of(manifest, generators, requests, ()), slos, note)


def outcome_of(requests: pd.DataFrame, evidence: Evidence, slos: Sequence[Slo], note: TrialNote) -> Outcome:
    """What came of a trial by the table of all its requests, and whether it was a measurement."""
    measured = measured_requests(requests)
    lateness = lateness_of(measured, evidence.client_loop_lag_ns)
    invalid, client = validity(check_run(measured, evidence, lateness=lateness))
    if evidence.incomplete and not (note.died or note.interrupted):  # a generator process gave out, or was killed
        invalid, client = evidence.incomplete, evidence.lacked
    if note.ended < len(note.looks):  # what came after the look that ended it is no part of its verdict
        measured = measured[measured["due_ns"] >= note.from_ns].head(note.looks[note.ended - 1])
    good, worth = count_good(slos, measured)
    counts = count_all(slos, measured, note.rate)
    looks = plan_looks(slos, note.looks[-1], note.looks[0])
    if not invalid and len(measured):
        invalid = _late(slos, counts, measured, note.rate, looks[min(note.ended, len(looks)) - 1], lateness)
        client = bool(invalid)
    never = [slo for slo, count in zip(slos, counts, strict=True) if not count.count]
    if never and not invalid:
        invalid = never_occurred(never[0].metric, never[0].percentile)
    took, due = request_values_ns(measured, "e2e"), stamps_ns(measured, "due_ns").astype(float)
    took = np.where(succeeded(measured), took, math.inf)
    lost = float(np.isinf(took).mean()) if len(took) else 1.0
    # Who refuses requests because the server is full refuses more than may fail, and keeps up with any rate.
    full = served_by(due, due + took) if all(slo.allows(lost) for slo in slos) else None
    # What is drawn has a known dispersion; a trace has that of its requests.
    bunching = (dispersion(measured) if evidence.arrivals == "trace" else evidence.count_dispersion) or 1.0
    return Outcome(
        tuple(_kept(count, slo, lateness) for slo, count in zip(slos, counts, strict=True)),
        int(issued(final(requests)).sum()), len(measured), note.seconds,
        good=good, good_n_eff=worth, looks=note.ended, served=full,
        pace=pace_of(request_values_ns(measured, "tpot")),
        # Little's law; infinite where one failed, which may have stayed long, or not at all.
        in_flight=note.rate * float(took.mean()) / 1e9 if len(took) else math.inf, lost=lost,
        invalid=invalid or ("it was interrupted" if note.interrupted else ""), client_limit=client,
        died=note.died or "", interrupted=note.interrupted, name=note.folder, refused_all=_refused_all(measured),
        bunched=bunched(bunching),
    )  # fmt: skip


def bunched(dispersion: float) -> float:
    """By what factor arrivals of this dispersion have fewer, and longer, spells of waiting than Poisson's."""
    return max(1.0, (dispersion + _SERVICES) / (1.0 + _SERVICES))


def _refused_all(measured: pd.DataFrame) -> bool:
    """Whether errors alone came, none of them a time-out or a limit on the rate, which a lower rate may keep."""
    errors = measured["outcome"].isin(("http_4xx", "http_5xx", "malformed", "wrong_length"))
    return bool(len(measured) and errors.all() and not (measured["status"] == _TOO_MANY).any())


def validity(checks: Sequence[Check]) -> tuple[str, bool]:
    """Why a trial is no measurement ("" if it is one), and whether that is the load tester's own limit.

    Errors of the server do not make a trial invalid: they count against the SLOs. Lateness is judged with them.
    """
    for rules, client in ((_OTHER_RULES, False), (CLIENT_RULES, True)):
        if texts := [check.text for check in checks if check.status == BROKEN and check.rule in rules]:
            return "; ".join(texts), client
    return "", False


def _kept(count: Count, slo: Slo, lateness: Lateness) -> Count:
    """The count, without the percentile of a figure that is refused: the curve must not run through it."""
    is_refused = slo.percentile is not None and lateness.refused_ns(slo.metric, slo.percentile) is not None
    return replace(count, log_level=None) if is_refused else count


def _late(
    slos: Sequence[Slo], counts: Sequence[Count], requests: pd.DataFrame, rate: float, look: Look, lateness: Lateness
) -> str:
    """Why a trial's finding may be the load tester's own lateness, as of a run's SLOs (``judge.verdict``); "" if not.

    What fails, or leans to it on a refused figure, must do so without it; what holds must hold in spite of it.
    """
    found = find(slos, counts, look)
    if found.verdict == UNDECIDED and found.leaning == HOLDS:
        return ""  # it only adds
    holds = {HOLDS: True, FAILS: False}.get(found.verdict)
    moves, moved = [], []
    for slo in slos:
        late = moves_ns(lateness, slo.metric, slo.percentile, holds=holds) if slo.percentile is not None else []
        moves.append(late[0] if late else 0.0)
        # Lateness beyond the limit leaves none that anything meets.
        limit_ns = max(slo.limit_ns + round(moves[-1]), 1) if slo.limit_ns else None
        moved.append(slo.model_copy(update={"limit_ns": limit_ns}))
    again = find(moved, count_all(moved, requests, rate), look) if any(moves) else found
    if (again.verdict, again.leaning) == (found.verdict, found.leaning):
        return ""
    at = again.slo if holds else found.slo
    if not moves[at]:  # it leans as it does beside another
        at = max(range(len(moves)), key=lambda other: abs(moves[other]))
    return f"{slos[at].text} is not judged: {late_words(abs(moves[at]) / 1e6)}"


def count_all(slos: Sequence[Slo], requests: pd.DataFrame, rate: float) -> tuple[Count, ...]:
    """One count an SLO; ``requests`` as from ``measured_requests``, asked for at ``rate`` per second.

    A failed request exceeds every limit.
    """
    return tuple(_count(slo, requests, rate) if len(requests) else Count(0.0, 0, 0.0) for slo in slos)


def count_values(values: Floats, due_ns: Floats, limit_ns: float, percentile: float, rate: float) -> Count:
    """What latencies from due times on, ns, say about a limit; in the order of their due times, infinite: never."""
    if not len(values):
        return Count(0.0, 0, 0.0)
    return Count(
        float((values > limit_ns).sum()), len(values), worth(values, percentile),
        float((values > limit_ns / 2).sum()), chance_if_stable(values, due_ns, limit_ns, rate),
        bursts_of(values, limit_ns), log_level(values, percentile, limit_ns),
    )  # fmt: skip


def count_good(slos: Sequence[Slo], requests: pd.DataFrame) -> tuple[int, float]:
    """How many requests kept every limit themselves, and how many independent ones all of them are worth."""
    if not len(requests):
        return 0, 0.0
    good = good_requests(requests, limits_of(slos))
    return int(good.sum()), share_of(good).n_eff or 0.0


def _count(slo: Slo, requests: pd.DataFrame, rate: float) -> Count:
    failed = ~succeeded(requests)
    if slo.metric == "errors":
        bursts, resent = bursts_of(failed.astype(float), 0.0), ~failed & resent_once(requests)
        perhaps, share = failed | resent, slo.limit_share or 0.0
        n_eff = share_of(perhaps).n_eff or 0.0
        few = chance_of_so_few_in_bursts(float(perhaps.sum()), len(failed), bursts_in(perhaps, n_eff), share)
        return Count(
            float(failed.sum()), len(failed), n_eff, bursts=bursts, in_doubt=float(resent.sum()), in_bursts=few
        )
    limit, percentile = float(slo.limit_ns or 0), slo.percentile or 0.0
    if slo.metric == "itl":
        gaps, clusters = pooled_gaps(requests, ~failed, failures=True)
        if not len(gaps):
            return Count(0.0, 0, 0.0)
        over, half = ((gaps > each).sum() for each in (limit, limit / 2))
        n_eff = worth_of_clusters(gaps, clusters, percentile)
        longest = pd.Series(gaps).groupby(clusters[0]).max().to_numpy()  # of each request
        return Count(
            float(over), len(gaps), n_eff, float(half), bursts=bursts_of(longest, limit),
            log_level=log_level(gaps, percentile, limit, n_eff),
        )  # fmt: skip
    values = with_failed(requests, slo.metric, request_values_ns(requests, slo.metric), ~failed)
    known = ~np.isnan(values)
    count = count_values(values[known], stamps_ns(requests, "due_ns")[known].astype(float), limit, percentile, rate)
    # What tells of a queue, and what is far below a limit, does so of times that run from the due time on.
    return replace(count, over_half=None, stable=1.0) if slo.metric == "tpot" else count
