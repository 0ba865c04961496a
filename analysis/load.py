"""What was asked of the server and what came back: load, counts, turns, failures, goodput, throughput.

And what a closed loop leaves out: the requests that its users would have sent while they waited for an answer. A user
who asks every T and once waits v > T for an answer has omitted the requests due T, 2T, … into that wait, which would
have waited v − T, v − 2T, …. HdrHistogram's correction for coordinated omission adds these, as long as they are at
least T (Tene, HdrHistogram's ``recordValueWithExpectedInterval`` and ``copyCorrectedForCoordinatedOmission``).

Here T is the users' own pace: median E2E plus mean think time. The assumption is that users go on asking at that pace
whatever happens, and that the server, once it has recovered, answers what piled up as fast as usual. So it holds for
short stalls of a server that is not saturated; it says nothing of a rate that the server could not sustain, where an
open population would wait longer and longer. Where no answer took twice T there is nothing to correct.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from gapmeter.analysis.arrays import Floats, each_of
from gapmeter.analysis.judge import arrivals
from gapmeter.analysis.judge.evidence import Evidence, lowest_and_highest
from gapmeter.analysis.judge.lateness import AnyLateness, ReportedLateness, without_refused
from gapmeter.analysis.requests.figures import distribution, finite_ms
from gapmeter.analysis.requests.metrics import (
    elapsed_ns,
    ended_by_us,
    final,
    generator_lag_ns,
    good_requests,
    issued,
    measured_requests,
    metric_series,
    outcomes_of,
    percentile_of,
    request_values_ns,
    sent_tokens,
    stamps_ns,
    succeeded,
    window_s,
)
from gapmeter.analysis.results.distribution import percentile_key
from gapmeter.analysis.results.requests import (
    ENDED_BY_US,
    Attempts,
    ClosedLoop,
    Corrected,
    Counts,
    FailureClass,
    FailureExample,
    Goodput,
    LoadFacts,
    Omission,
    Throughput,
    Turn,
)
from gapmeter.analysis.stats.series import Series, share_of

EXAMPLES = 3  # of each class of failure
_OF_TURNS = (50.0, 90.0, 99.0)


def describe_load(measured: pd.DataFrame, evidence: Evidence) -> LoadFacts:
    """What was asked of the server, and what was delivered of it."""
    lag_ns = generator_lag_ns(measured)
    in_turns, window = evidence.unit != "requests", evidence.uneven_window_ns
    return LoadFacts(
        loop=evidence.loop,
        arrivals=evidence.arrivals,
        requested_rate=evidence.requested_rate,
        unit=evidence.unit,
        conversation_rate=arrivals.sent_rate(arrivals.first_turns(measured), window) if in_turns else None,
        rate_range=lowest_and_highest(evidence.rate_knots, evidence.window_ns[0]) if evidence.rate_knots else None,
        concurrency=evidence.concurrency,
        prefix_share=evidence.prefix_share,
        cached_share=_cached_share(_counting_silence(measured)),
        delivered_rate=arrivals.sent_rate(measured, window),
        dispersion=arrivals.dispersion(measured),
        lag_p99_ms=finite_ms(percentile_of(lag_ns, 99)),
        lag_p50_ms=finite_ms(percentile_of(lag_ns, 50)),
        window_s=(window[1] - window[0]) / 1e9 if window else window_s(measured),
        locustfile=evidence.locustfile,
    )


def _cached_share(requests: pd.DataFrame) -> float | None:
    """Prompt tokens that the server found in its prefix cache over all prompt tokens, where it tells."""
    both = requests[["cached_tokens", "prompt_tokens"]].dropna()
    prompts = float(both["prompt_tokens"].sum())
    return float(both["cached_tokens"].sum()) / prompts if prompts else None


def _counting_silence(requests: pd.DataFrame) -> pd.DataFrame:
    """With 0 cached tokens where none were told of, if the server never says 0: then it tells only of those it found.

    vLLM does until mid-2026. A share of the prompts that it tells of would leave out all that were not cached.
    """
    told = requests["cached_tokens"].dropna()
    if not len(told) or (told == 0).any():
        return requests
    return requests.assign(cached_tokens=requests["cached_tokens"].fillna(0))


def count_requests(requests: pd.DataFrame, measured: pd.DataFrame, evidence: Evidence) -> Counts:
    """``planned`` and ``issued`` with the warm-up, the others without it.

    ``unissued``: planned, and not on record as sent, also where a worker took its records along; None where nothing was
    planned one by one.
    """
    good, alone = succeeded(measured), final(requests)
    sent = int(issued(alone).sum())
    warmup = alone[issued(alone) & ~alone["measured"].to_numpy(bool)]
    if len(measured):  # what was due later is left out of a load that ended early
        warmup = warmup[warmup["due_ns"] <= measured["due_ns"].max()]
    abandoned = int((requests["outcome"] == "abandoned").sum())
    left = None if evidence.planned is None else evidence.planned - sent - abandoned - (evidence.beyond_end or 0)
    return Counts(
        unissued=left,
        planned=len(alone) if evidence.planned is None else evidence.planned,
        issued=sent,
        warmup=len(warmup),
        abandoned=abandoned,
        beyond_end=evidence.beyond_end,
        measured=len(measured),
        succeeded=int(good.sum()),
        attempts=count_attempts(requests, measured),
        failed=outcomes_of(measured[~good]),
    )


def count_attempts(requests: pd.DataFrame, measured: pd.DataFrame) -> Attempts:
    """Attempts of the measured requests: in all, requests that took more than one, and those that then succeeded.

    ``failed``: the attempts that were followed by another, by class.
    """
    again = (measured["retry"] > 0).to_numpy(bool)
    earlier = requests[requests["superseded"].to_numpy(bool) & requests["index"].isin(measured["index"]).to_numpy(bool)]
    return Attempts(
        total=len(measured) + len(earlier),
        asked_again=int(again.sum()),
        then_succeeded=int((again & succeeded(measured)).sum()),
        failed=outcomes_of(earlier),
    )


def describe_failures(measured: pd.DataFrame, zero_ns: int) -> tuple[FailureClass, ...]:
    """Every class of failure, the most frequent first, each with its first examples by due time.

    ``measured`` as from ``measured_requests``. ``at_s`` counts from ``zero_ns``; ``status`` is 0 where
    no HTTP answer came; ``tokens`` had arrived before it failed.
    """
    failed = measured[~succeeded(measured)]

    def example(row: pd.Series[Any]) -> FailureExample:
        due_ns, arrived = int(row["due_ns"]), row["token_ns"]
        return FailureExample(
            request_id=str(row["request_id"]),
            at_s=(due_ns - zero_ns) / 1e9,
            waited_ms=(int(row["end_ns"]) - due_ns) / 1e6 if pd.notna(row["end_ns"]) else None,
            status=int(row["status"]),
            tokens=int(np.size(arrived)) if arrived is not None else 0,
            error=str(row["error"]),
        )

    def examples(name: str) -> tuple[FailureExample, ...]:
        return tuple(example(row) for _, row in failed[failed["outcome"] == name].head(EXAMPLES).iterrows())

    of = {True: len(measured), False: int((~ended_by_us(measured)).sum())}  # a server could fail those that we left it
    return tuple(
        FailureClass(name=name, count=count, share=count / of[name in ENDED_BY_US], examples=examples(name))
        for name, count in outcomes_of(failed).items()
    )


def describe_turns(measured: pd.DataFrame, lateness: AnyLateness = ReportedLateness()) -> tuple[Turn, ...]:
    """For each turn: requests, mean prompt tokens, the share of them that was cached, and TTFT over successes.

    Empty where there are no conversations. A percentile that a turn's sample cannot support is null, as everywhere,
    and so is one that the run refuses (``lateness``).
    """
    if not (measured["turn"] > 0).any():
        return ()
    turns = []
    for turn, rows in _counting_silence(measured).groupby("turn"):
        ttft = metric_series(rows, "ttft")
        found = distribution(ttft, _OF_TURNS, len(rows), window_s(rows))
        turns.append(
            Turn(
                turn=int(turn),
                requests=len(rows),
                prompt_tokens=float(rows["prompt_tokens_asked"].mean()),
                cached_share=_cached_share(rows),
                ttft=without_refused(found, "ttft", lateness) if ttft.count else None,
            )
        )
    return tuple(turns)


def describe_goodput(measured: pd.DataFrame, limits_ns: Mapping[str, float], served_per_s: float | None) -> Goodput:
    """Good requests per second, of those that we did not end ourselves: the good part of what was served in one.

    Over the seconds in which requests were due it would be more than that wherever a queue grows, or users wait long.
    The share's interval is Clopper and Pearson's, good ones in a row counted as alike. Unknown where a limit is on TPOT
    and a success with several arrivals did not tell its tokens.
    """
    measured = measured[~ended_by_us(measured)]
    good = good_requests(measured, limits_ns)
    several = elapsed_ns(measured, "first_token_ns", "last_token_ns") > 0
    untold = succeeded(measured) & several & np.isnan(sent_tokens(measured))
    if not len(good) or ("tpot" in limits_ns and untold.any()):
        return Goodput(per_s=None, share=None, share_ci=None, limits_ms={})
    share, served = share_of(good), int(succeeded(measured).sum())
    return Goodput(
        per_s=0.0 if not served else None if served_per_s is None else served_per_s * int(good.sum()) / served,
        share=share.value,
        share_ci=share.ends,
        limits_ms={metric: limit / 1e6 for metric, limit in limits_ns.items()},
    )


def describe_throughput(requests: pd.DataFrame, window_ns: tuple[int, int] | None = None) -> Throughput:
    """Successes and their tokens per second, by what came while requests were due, or by all until the last token.

    ``requests``: all of a run; ``window_ns``: from when to when they were due, None: the first and the last of those
    measured. The higher counts, since each can only be too low. The first includes what the warm-up had begun, in place
    of what is left in flight and no more than that, but without a warm-up there is nothing in its place, and a window
    shorter than most answers tells nothing; the second has the end, when fewer and fewer are in flight: a closed loop's
    last answers are alone with the server. A side is None where some success did not tell its tokens.
    """
    measured, good = measured_requests(requests), requests[succeeded(requests)]
    ours, done = good["measured"].to_numpy(bool), stamps_ns(good, "last_token_ns")
    if not ours.any():
        return Throughput(requests_per_s=None, prompt_tokens_per_s=None, output_tokens_per_s=None, span_s=0.0)
    begin, end = window_ns or (int(measured["due_ns"].min()), int(measured["due_ns"].max()))
    weight, span = ours.astype(np.float64), (max(int(done[ours].max()), end) - begin) / 1e9
    if end - begin >= np.median((done - stamps_ns(good, "due_ns"))[ours]):
        in_time, ended = (done > begin) & (done <= end), stamps_ns(measured, "end_ns")
        warming, in_flight = in_time & ~ours, int(((ended > end) | (ended < 0)).sum())
        share, lasted = min(in_flight / max(int(warming.sum()), 1), 1.0), (end - begin) / 1e9
        while_due = np.where(warming, share, ours & in_time)
        if while_due.sum() * span > weight.sum() * lasted:
            weight, span = while_due, lasted

    def per_s(side: str) -> float | None:
        return None if span <= 0 or good[side].isna().any() else float(good[side].to_numpy(float) @ weight) / span

    return Throughput(
        requests_per_s=float(weight.sum()) / span if span > 0 else None,
        prompt_tokens_per_s=per_s("prompt_tokens"),
        output_tokens_per_s=per_s("output_tokens"),
        span_s=span,
    )


def describe_closed_loop(
    measured: pd.DataFrame, evidence: Evidence, lateness: AnyLateness = ReportedLateness()
) -> ClosedLoop | None:
    """Corrected estimates of a closed loop's TTFT and E2E; None for an open loop.

    ``corrected`` is None where the correction does not apply: nobody's pace is known, or no answer took so long that
    anything was omitted. A percentile is there where the sample itself supports it, and the run does not refuse it.
    """
    if evidence.loop != "closed":
        return None
    good = measured[succeeded(measured)]
    usual = percentile_of(request_values_ns(good, "e2e"), 50)
    if usual is None or evidence.concurrency is None:
        return ClosedLoop(corrected=None)
    pace_ns = usual + evidence.think_time_ns
    ttft, e2e = (_corrected(good, metric, pace_ns, lateness) for metric in ("ttft", "e2e"))
    if not (ttft.added or e2e.added):
        return ClosedLoop(corrected=None)
    return ClosedLoop(corrected=Omission(expected_interval_ms=pace_ns / 1e6, ttft=ttft, e2e=e2e))


def _corrected(good: pd.DataFrame, metric: str, pace_ns: float, lateness: AnyLateness) -> Corrected:
    values = request_values_ns(good, metric)
    values = values[~np.isnan(values)]
    whole, sample, figures = with_omitted(values, pace_ns), Series(values), dict[str, float | None]()
    for p in (50.0, 90.0, 95.0, 99.0, 99.9):
        is_known = sample.percentile(p).supported and lateness.refused_ns(metric, p) is None
        figures[f"{percentile_key(p)}_ms"] = finite_ms(percentile_of(whole, p)) if is_known else None
    return Corrected(added=len(whole) - len(values), **figures)


def with_omitted(values_ns: Floats, interval_ns: float) -> Floats:
    """The values, and for each v the omitted v − T, v − 2T, … that are at least T; ascending."""
    whose, nth = each_of(np.maximum(np.floor(values_ns / interval_ns).astype(np.int64) - 1, 0))
    return np.sort(np.concatenate([values_ns, values_ns[whose] - (nth + 1) * interval_ns]))
