"""Requests that were asked again after a failure: one request, several attempts, each a record of its own."""

from __future__ import annotations

import numpy as np
import pandas as pd

from gapmeter.analysis.results.requests import Attempts


def settle(table: pd.DataFrame, timeout_ns: int) -> pd.DataFrame:
    """A row an attempt, with what makes requests of them; ``table`` has ``index``, ``retry`` and the client's stamps.

    ``attempt_due_ns`` is the attempt's own due time and ``due_ns`` becomes that of the request's first attempt, from
    which its latency counts. ``superseded``: a later attempt followed, so that this one's outcome is not the request's.
    A failed request was given ``censored_ns`` from its first due time on, at least.
    """
    table["attempt_due_ns"] = table["due_ns"]
    by_request = table.groupby("index")
    table["superseded"] = (table["retry"] < by_request["retry"].transform("max")).to_numpy(bool)
    if (table["retry"] > 0).any():
        table["due_ns"] = by_request["due_ns"].transform("min")
        waited = (table["end_ns"].fillna(0) - table["due_ns"]).clip(lower=timeout_ns)
        table["censored_ns"] = waited.where(table["censored_ns"].notna())
        table = table.sort_values(["due_ns", "index", "retry"], ignore_index=True)
    return table


def final(requests: pd.DataFrame) -> pd.DataFrame:
    """The last attempt of every request: a row a request."""
    return requests[~requests["superseded"].to_numpy(bool)] if "superseded" in requests else requests


def count_attempts(requests: pd.DataFrame, measured: pd.DataFrame) -> Attempts:
    """Of the measured requests: attempts in all, requests that took more than one, and those that then succeeded.

    ``failed``: the attempts that were followed by another, by class.
    """
    if "retry" not in measured:
        return Attempts(total=len(measured), asked_again=0, then_succeeded=0, failed={})
    again = (measured["retry"] > 0).to_numpy(bool)
    earlier = requests[requests["superseded"].to_numpy(bool) & requests["index"].isin(measured["index"]).to_numpy(bool)]
    return Attempts(
        total=len(measured) + len(earlier),
        asked_again=int(np.count_nonzero(again)),
        then_succeeded=int(np.count_nonzero(again & (measured["outcome"] == "ok").to_numpy(bool))),
        failed={str(name): int(count) for name, count in earlier["outcome"].value_counts().items()},
    )
