"""Conversations, turn by turn: histories grow, and what that costs shows in the later turns' TTFT."""

from __future__ import annotations

import pandas as pd

from gapmeter.analysis.requests.figures import distribution
from gapmeter.analysis.requests.metrics import metric_series, window_s
from gapmeter.analysis.results.run import Turn

_PERCENTILES = (50.0, 90.0, 99.0)


def describe_turns(measured: pd.DataFrame) -> tuple[Turn, ...]:
    """For each turn: requests, mean prompt tokens, the share of them that was cached, and TTFT over successes.

    Empty where there are no conversations. A percentile that a turn's sample cannot support is null, as everywhere.
    """
    if "turn" not in measured or not (measured["turn"] > 0).any():
        return ()
    return tuple(_describe(int(turn), rows) for turn, rows in measured.groupby("turn"))


def _describe(turn: int, rows: pd.DataFrame) -> Turn:
    sample = metric_series(rows, "ttft")
    told = rows[["prompt_tokens", "cached_tokens"]].dropna()
    prompts = float(told["prompt_tokens"].sum())
    return Turn(
        turn=turn,
        requests=len(rows),
        prompt_tokens=float(rows["prompt_tokens_asked"].mean()),
        cached_share=float(told["cached_tokens"].sum()) / prompts if prompts else None,
        ttft=distribution(sample, _PERCENTILES, 1.0, window_s(rows) / len(rows)) if sample.count else None,
    )
