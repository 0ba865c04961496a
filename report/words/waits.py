"""What requests waited for, and how they were asked."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gapmeter.analysis.numbers import count, duration
from gapmeter.analysis.results.latency import Anatomy, ComputeShares, Difference, UpgradeBracket
from gapmeter.analysis.results.requests import ClosedLoop, Corrected, Turn
from gapmeter.analysis.results.run import RunFigures
from gapmeter.analysis.stages import UNEXPLAINED, owner_words
from gapmeter.report.marks import words as stage_words

CLOSED_LOOP = (
    "closed loop: each user waited for an answer before asking again, so these latencies are not what an open "
    "population would feel at this rate"
)


def tail_sentences(result: RunFigures) -> dict[str, str]:
    """By metric, the one that matters most in front."""
    ordered = dict.fromkeys((result.tail.metric, "ttft", "e2e", "itl"))
    return {
        metric: tail_sentence(anatomy, metric, result.device)
        for metric in ordered
        if metric and (anatomy := result.tail.of(metric))
    }


def tail_sentence(anatomy: Anatomy, metric: str, device: str) -> str:
    """What slow requests (or token gaps) wait for beyond typical ones, and whose it is."""
    what = "token gaps" if metric == "itl" else "requests"
    low, high = anatomy.share_ci
    part = "all" if anatomy.share > 0.995 else f"{100 * anatomy.share:.0f} %"
    sure = "no interval" if low is None or high is None else f"{100 * low:.0f} .. {100 * high:.0f} %"
    return (
        f"{part} ({sure}) of what slow {what} wait beyond typical ones ({duration(anatomy.difference_ms)}) is "
        f"{_whose(anatomy, device)}"
    )


def _whose(anatomy: Anatomy, device: str) -> str:
    inside = any(stage in anatomy.typical.stages_ms for stage in ("prefill", "decode"))
    if anatomy.stage == UNEXPLAINED and not inside:
        return "the server's and the network's, and unmeasured: no probe stamps the server's stages"
    return f"{stage_words(anatomy.stage)} ({owner_words(anatomy.owner, device)})"


def upgrade_sentences(result: RunFigures) -> dict[str, str]:
    """By metric: what a faster device leaves of it."""
    brackets = {"ttft": result.upgrade.ttft, "e2e": result.upgrade.e2e}
    return {metric: upgrade_sentence(bracket, metric, result.device) for metric, bracket in brackets.items() if bracket}


def upgrade_sentence(bracket: UpgradeBracket, metric: str, device: str) -> str:
    now, low, high = (
        duration(end.at(bracket.percentile) or 0.0) for end in (bracket.now, bracket.lower, bracket.upper)
    )
    name = f"p{bracket.percentile:g} {metric.upper()}"
    return f"even an infinitely fast {device} leaves {name} between {low} and {high} (it is {now})"


def compute_sentence(shares: ComputeShares, metric: str, device: str) -> str | None:
    """For how much of what the slowest waited the device computed for them; None where that is unmeasured."""
    part = shares.slow.compute
    if part is None:
        return None
    who = (
        "the slowest 1 %"
        if shares.slow.count == math.ceil(shares.all.count / 100)
        else f"the slowest {shares.slow.count}"
    )
    event = {"ttft": "their first token", "e2e": "their last token", "itl": "a token"}[metric]
    low, high = part.share_ci
    ends = f" ({100 * low:.0f} to {100 * high:.0f} %)" if low is not None and high is not None else ""
    return f"of what {who} waited for {event}, the {device} computed for them during {100 * part.share:.0f} %{ends}"


def difference_sentence(difference: Difference, a: str, b: str, device: str = "GPU") -> str:
    """Two groups of requests, with the difference's uncertainty; ``device`` is what computed the forwards."""
    first = difference.ranked[0]
    low, high = difference.difference_ci_ms
    whole = duration(abs(difference.difference_ms))
    ends = ""
    if low is not None and high is not None:
        ends = f" (95 %: {duration(low)} to {duration(high)})"
        if high < 0:
            ends = f" (95 %: {duration(-high)} to {duration(-low)})"
        elif low <= 0:
            return f"{a}: {duration(difference.a_ms)}, {b}: {duration(difference.b_ms)}; no difference is proven{ends}"
    more = "longer" if difference.difference_ms >= 0 else "less"
    part = f", {duration(abs(first.ms))} of it {stage_words(first.stage)} ({owner_words(first.owner, device)})"
    return f"{a} waited {whole} {more} than {b}{ends}{part}"


def closed_loop_sentence(closed: ClosedLoop) -> str:
    """What a closed loop's figures are not, and what they would be at the users' own pace."""
    correction = closed.corrected
    if correction is None:
        return CLOSED_LOOP
    metrics = [f"TTFT {shown}"] if (shown := _corrected(correction.ttft)) else []
    metrics += [f"E2E {shown}"] if (shown := _corrected(correction.e2e)) else []
    added, pace = count(max(correction.ttft.added, correction.e2e.added)), duration(correction.expected_interval_ms)
    figures = f": {'; '.join(metrics)}" if metrics else ""
    return (
        f"{CLOSED_LOOP}; corrected for {added} requests that users at their pace of {pace} would have sent meanwhile"
        f"{figures}"
    )


def _corrected(corrected: Corrected) -> str:
    percentiles = {"p50": corrected.p50_ms, "p99": corrected.p99_ms, "p95": corrected.p95_ms, "p90": corrected.p90_ms}
    shown = [f"{name} {duration(ms)}" for name, ms in percentiles.items() if ms is not None]
    return ", ".join(shown[:2]) if corrected.added else ""


def turns_sentence(turns: Sequence[Turn]) -> str | None:
    """TTFT by turn in one line: the median, where the sample supports one; None without conversations."""
    medians = [
        f"turn {turn.turn} {duration(turn.ttft.p50_ms)} ({turn.prompt_tokens:,.0f} prompt tokens)"
        for turn in turns
        if turn.ttft and turn.ttft.p50_ms is not None
    ]
    return f"TTFT p50 by turn: {', '.join(medians)}" if medians else None
