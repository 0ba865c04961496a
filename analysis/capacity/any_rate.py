"""Errors that come at every rate alike, which no load explains: from what all trials of a search say together."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from gapmeter.analysis.capacity.trial import (
    MOST_SURE,
    SURE,
    Count,
    Promise,
    Trial,
    chance_if_broken,
    chance_if_kept,
)
from gapmeter.analysis.stats.exact import chance_of_so_few


def fails_too_many(promises: Sequence[Promise], valid: Sequence[Trial], high: float) -> bool:
    """Whether no trial kept a limit on errors, and all up to the rate ``high`` broke it together: lower rates may."""
    for at, promise in enumerate(promises):
        counts = [trial.outcome.counts[at] for trial in valid if trial.rate <= high]
        together = _together(counts)
        broken = together.over > promise.share * together.count
        if promise.metric == "errors" and broken and not _is_kept(counts, promise):
            return True
    return False


def fails_at_any_rate(promises: Sequence[Promise], valid: Sequence[Trial]) -> tuple[int, Count, float] | None:
    """The number of a promise on errors that surely fails whatever the load, what low rates say of it, and the highest.

    It fails there, none kept it, and above no more fail. Of a full server's requests the more fail, the higher the
    rate: the least so with a single place and no queue, where failed ones over others are as many as the load (Erlang).
    """
    rates = sorted({trial.rate for trial in valid})
    for at, promise in enumerate(promises):
        counts = [(trial.rate, trial.outcome.counts[at]) for trial in valid]
        if promise.metric != "errors" or _is_kept([count for _, count in counts], promise):
            continue
        for most, top in itertools.combinations(rates, 2):
            low, lower = (_together([count for rate, count in counts if rate <= end]) for end in (most, most / 2))
            # A brief trial may end before the queue is full that a longer one at a lower rate filled.
            if chance_if_kept(low, promise.share) > 1 - SURE or (
                lower.count and lower.over <= promise.share * lower.count
            ):
                continue
            above, share = [(rate / most, count) for rate, count in counts if most < rate <= top], low.over / low.count
            both = _together([low, *(count for _, count in above)])
            grown = sum(count.count * times / (1 + (times - 1) * share) for times, count in above)
            part = grown / (grown + low.count)
            if chance_of_so_few(both.over - low.over, round(both.over), both.bursts or 0, part) <= 1 - MOST_SURE:
                return at, low, most
    return None


def _is_kept(counts: Sequence[Count], promise: Promise) -> bool:
    """Whether one of several trials surely kept it."""
    return any(chance_if_broken(count, promise.share) <= 1 - SURE for count in counts)


def _together(counts: Sequence[Count]) -> Count:
    """Of several trials."""
    over, count, n_eff = (sum(getattr(each, name) for each in counts) for name in ("over", "count", "n_eff"))
    bursts = sum(each.over if each.bursts is None else each.bursts for each in counts)
    return Count(over, count, n_eff, bursts=round(bursts))
