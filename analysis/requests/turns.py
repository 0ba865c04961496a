"""Conversations, turn by turn: histories grow, and what that costs shows in the later turns' TTFT."""

from __future__ import annotations

from typing import Any

import pandas as pd

from gapmeter.analysis.numbers import duration
from gapmeter.analysis.requests import figures
from gapmeter.analysis.requests.metrics import metric_series, window_s

_PERCENTILES = (50.0, 90.0, 99.0)


def describe_turns(measured: pd.DataFrame) -> list[dict[str, Any]]:
    """For each turn: requests, mean prompt tokens, the share of them that was cached, and TTFT over successes.

    Empty where there are no conversations. A percentile that a turn's sample cannot support is null, as everywhere.
    """
    if "turn" not in measured or not (measured["turn"] > 0).any():
        return []
    return [_describe(int(turn), rows) for turn, rows in measured.groupby("turn")]


def _describe(turn: int, rows: pd.DataFrame) -> dict[str, Any]:
    sample = metric_series(rows, "ttft")
    told = rows[["prompt_tokens", "cached_tokens"]].dropna()
    prompts = float(told["prompt_tokens"].sum())
    return {
        "turn": turn,
        "requests": len(rows),
        "prompt_tokens": float(rows["prompt_tokens_asked"].mean()),
        "cached_share": float(told["cached_tokens"].sum()) / prompts if prompts else None,
        "ttft": figures.figures(sample, _PERCENTILES, 1.0, window_s(rows) / len(rows)) if sample.count else None,
    }


def turns_sentence(turns: list[dict[str, Any]]) -> str:
    """TTFT by turn in one line: the median, where the sample supports one; "" without conversations."""
    told = [
        f"turn {each['turn']} {duration(each['ttft']['p50_ms'])} ({each['prompt_tokens']:,.0f} prompt tokens)"
        for each in turns
        if each["ttft"] and each["ttft"]["p50_ms"] is not None
    ]
    return f"TTFT p50 by turn: {', '.join(told)}" if told else ""
