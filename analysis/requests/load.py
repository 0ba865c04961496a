"""What was asked of the server and what came back: load, counts, conversations turn by turn, goodput, throughput."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from gapmeter.analysis.judge import arrivals, validity
from gapmeter.analysis.judge.evidence import Evidence
from gapmeter.analysis.requests.attempts import count_attempts, final
from gapmeter.analysis.requests.figures import distribution, plain_percentile
from gapmeter.analysis.requests.metrics import (
    generator_lag_ns,
    good_requests,
    issued,
    metric_series,
    succeeded,
    window_s,
)
from gapmeter.analysis.requests.rate_curve import lowest_and_highest
from gapmeter.analysis.results.requests import Counts, Goodput, LoadFacts, Throughput, Turn
from gapmeter.analysis.stats.series import share_of

_OF_TURNS = (50.0, 90.0, 99.0)


def describe_load(measured: pd.DataFrame, evidence: Evidence) -> LoadFacts:
    """What was asked of the server, and what was delivered of it."""
    _, delivered = arrivals.rates(measured) if len(measured) else (None, None)
    lag_ns = generator_lag_ns(measured)
    return LoadFacts(
        loop=evidence.loop,
        arrivals=evidence.arrivals,
        requested_rate=evidence.requested_rate,
        unit=evidence.unit,
        conversation_rate=arrivals.rates(arrivals.first_turns(measured))[1] if evidence.unit != "requests" else None,
        rate_range=lowest_and_highest(evidence.rate_knots, evidence.window_ns[0]) if evidence.rate_knots else None,
        concurrency=evidence.concurrency,
        prefix_share=evidence.prefix_share,
        cached_share=_cached_share(measured),
        delivered_rate=delivered,
        dispersion=arrivals.dispersion(measured)[0],
        lag_p99_ms=plain_percentile(validity.percentile_of(lag_ns, 99)),
        lag_p50_ms=plain_percentile(validity.percentile_of(lag_ns, 50)),
        window_s=window_s(measured),
        locustfile=evidence.locustfile,
    )


def _cached_share(measured: pd.DataFrame) -> float | None:
    """Prompt tokens that the server found in its prefix cache over all prompt tokens, where it tells."""
    if not {"cached_tokens", "prompt_tokens"} <= set(measured.columns):
        return None
    told = measured[["cached_tokens", "prompt_tokens"]].dropna()
    prompts = float(told["prompt_tokens"].sum())
    return float(told["cached_tokens"].sum()) / prompts if prompts else None


def count_requests(requests: pd.DataFrame, measured: pd.DataFrame, evidence: Evidence) -> Counts:
    """``planned`` and ``issued`` with the warm-up, the others without it.

    ``unissued``: planned, and not on record as sent, also where a worker took its records along; None where nothing was
    planned one by one.
    """
    failed = measured.loc[~succeeded(measured), "outcome"].value_counts()
    requests_alone = final(requests)
    sent = int(issued(requests_alone).sum())
    abandoned = int((requests["outcome"] == "abandoned").sum())
    left = None if evidence.planned is None else evidence.planned - sent - abandoned - (evidence.beyond_end or 0)
    return Counts(
        unissued=left,
        planned=len(requests_alone) if evidence.planned is None else evidence.planned,
        issued=sent,
        warmup=sent - len(measured),
        abandoned=abandoned,
        beyond_end=evidence.beyond_end,
        measured=len(measured),
        succeeded=int(succeeded(measured).sum()),
        attempts=count_attempts(requests, measured),
        failed={str(name): int(count) for name, count in failed.items()},
    )


def describe_turns(measured: pd.DataFrame) -> tuple[Turn, ...]:
    """For each turn: requests, mean prompt tokens, the share of them that was cached, and TTFT over successes.

    Empty where there are no conversations. A percentile that a turn's sample cannot support is null, as everywhere.
    """
    if "turn" not in measured or not (measured["turn"] > 0).any():
        return ()
    return tuple(_turn(int(turn), rows) for turn, rows in measured.groupby("turn"))


def _turn(turn: int, rows: pd.DataFrame) -> Turn:
    found = metric_series(rows, "ttft")
    told = rows[["prompt_tokens", "cached_tokens"]].dropna()
    prompts = float(told["prompt_tokens"].sum())
    return Turn(
        turn=turn,
        requests=len(rows),
        prompt_tokens=float(rows["prompt_tokens_asked"].mean()),
        cached_share=float(told["cached_tokens"].sum()) / prompts if prompts else None,
        ttft=distribution(found, _OF_TURNS, 1.0, window_s(rows) / len(rows)) if found.count else None,
    )


def describe_goodput(measured: pd.DataFrame, limits_ns: Mapping[str, float]) -> Goodput:
    """Good requests per second; the share's interval is Clopper and Pearson's, good ones in a row counted as alike."""
    good = good_requests(measured, limits_ns)
    if not len(good):
        return Goodput(per_s=None, share=None, share_ci=None, limits_ms={})
    share, seconds = share_of(good), window_s(measured)
    return Goodput(
        per_s=float(good.sum()) / seconds if seconds else None,
        share=share.value,
        share_ci=share.ends,
        limits_ms={metric: limit / 1e6 for metric, limit in limits_ns.items()},
    )


def describe_throughput(measured: pd.DataFrame) -> Throughput:
    """Successes and their tokens per second, from the first due time to the last token.

    A side whose tokens some success did not tell is None: a sum over the others would be too low.
    """
    good = measured[succeeded(measured)]
    span = (int(good["last_token_ns"].max()) - int(measured["due_ns"].min())) / 1e9 if len(good) else 0.0

    def per_s(total: float | None) -> float | None:
        return None if total is None or span <= 0 else total / span

    return Throughput(
        requests_per_s=per_s(float(len(good))),
        prompt_tokens_per_s=per_s(_sum(good["prompt_tokens"])),
        output_tokens_per_s=per_s(_sum(good["output_tokens"])),
        span_s=span,
    )


def _sum(tokens: pd.Series[Any]) -> float | None:
    return None if tokens.isna().any() else float(tokens.sum())
