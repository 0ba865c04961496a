"""Did requests come at the rate, and bunched in the way, that was asked for? An open loop's rules of validity.

Thresholds that compare with chance use a 1 in 10,000 two-sided level, as everywhere in ``validity.py``. What is judged
is when the load tester let a request go: a server that refuses connections, or is slow to accept them, is no fault of
its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pandas as pd
from scipy import special

from gapmeter.analysis.arrays import Floats, Ints
from gapmeter.analysis.judge.evidence import Evidence, Knots, expected_counts
from gapmeter.analysis.judge.lateness import SHARES
from gapmeter.analysis.numbers import count, counted, share, significant
from gapmeter.analysis.requests.metrics import generator_lag_ns, handed_ns, last_waits_ns, stamps_ns
from gapmeter.analysis.results.trust import BROKEN, OK, UNMEASURED, WARN, Check

RATE_TOLERANCE = 0.01
DELIVERED_FLOOR_NS = 20e6  # in a window of a second, one late request would otherwise look like a rate
LATE_NS = 1e6  # of a user's time: less harms nobody
CHANCE = 1e-4
CONSTANT_DISPERSION = 0.3
BUNCHING = (0.7, 1.4)  # dispersion of sent over that of planned requests


def check_arrivals(requests: pd.DataFrame, evidence: Evidence) -> Iterator[Check]:
    """Whether an open loop's requests came at the rate and in the way that was asked for, and a closed one's users."""
    if evidence.loop != "open":
        if evidence.concurrency is not None:
            yield _users(requests, evidence.concurrency)
        return
    starts = first_turns(requests)
    left = _left_ns(requests)
    planned, delivered = _per_s(stamps_ns(requests, "due_ns")), _per_s(left[left >= 0])
    if planned is None or delivered is None:
        yield unmeasured("rate", "too few requests to tell the delivered rate")
        return
    if evidence.rate_knots:
        yield _curve(len(starts), evidence)
    elif evidence.requested_rate is not None:
        begun = _per_s(stamps_ns(starts, "due_ns"))
        too_few = unmeasured("rate", f"too few {evidence.unit} to tell their rate")
        yield too_few if begun is None else _rate(begun, evidence.requested_rate, len(starts), evidence)
    late = abs(delivered / planned - 1)
    allowed = max(RATE_TOLERANCE, DELIVERED_FLOOR_NS * planned / 1e9 / max(len(requests) - 1, 1))
    if late > allowed >= abs((pace := _pace(requests)) - 1):  # one stall at an end is no other rate
        delivered, late = pace * planned, abs(pace - 1)
    yield Check(
        rule="delivered", status=BROKEN if late > allowed else OK, value=delivered, limit=planned,
        text=f"{significant(planned)} requests per second were due, {significant(delivered)} were sent"
        f" ({share(late)} off; {share(allowed)} allowed)",
    )  # fmt: skip
    yield from _dispersion(starts, evidence)


def unmeasured(rule: str, text: str) -> Check:
    """A rule that nothing can be said of."""
    return Check(rule=rule, status=UNMEASURED, value=None, limit=None, text=text)


def _users(requests: pd.DataFrame, asked: int) -> Check:
    """How many users there were on average, less those who could have asked again, had the load tester been on time.

    What reads or sends late within the measured part counts, from a millisecond on. With the kernel's stamps late
    reading is in no latency, but the server has fewer requests meanwhile.
    """
    if len(requests) <= asked:
        return unmeasured("delivered", f"too few requests of {counted(asked, 'user')} to tell how many of them asked")
    due, read = stamps_ns(requests, "due_ns"), stamps_ns(requests, "end_ns")
    last = due.max()
    read_late = (np.minimum(read, last) - (read - last_waits_ns(requests)))[read >= 0]
    sent_late = np.minimum(generator_lag_ns(requests), last - stamps_ns(requests, "attempt_due_ns"))
    lost_ns = sum(float(each[each >= LATE_NS].sum()) for each in (read_late, sent_late))
    lost = lost_ns / max(asked * int(last - due.min()), 1)
    most = SHARES[1]
    return Check(
        rule="delivered", status=BROKEN if lost > most else WARN if lost > SHARES[0] else OK,
        value=asked * (1 - lost), limit=float(asked),
        text=f"{count(asked)} {'user was' if asked == 1 else 'users were'} asked for; less the time that the load"
        f" tester read or sent late, {significant(asked * (1 - lost))} asked on average"
        f" ({share(lost)} off; {share(most)} allowed)",
    )  # fmt: skip


def _rate(planned: float, asked: float, n: int, evidence: Evidence) -> Check:
    """The sum of so many gaps is a gamma variable: exactly for Poisson arrivals, nearly for those that bunch."""
    variation = {"constant": 0.0, "poisson": 1.0}.get(evidence.arrivals, evidence.count_dispersion or 1.0)
    least, most = asked / (1 + RATE_TOLERANCE), asked * (1 + RATE_TOLERANCE)
    if variation:
        gaps = (n - 1) / variation
        shortest, longest = special.gammaincinv(gaps, [CHANCE / 2, 1 - CHANCE / 2]) / gaps
        least, most = float(least / longest), float(most / shortest) if shortest else math.inf
    return Check(
        rule="rate", status=OK if least <= planned <= most else BROKEN, value=planned, limit=asked,
        text=f"{significant(asked)} {evidence.unit} per second were asked for, {significant(planned)} were due"
        f" (chance and rounding allow {significant(least)}"
        f" {f'.. {significant(most)}' if most < 1000 * asked else 'and any more'})",
    )  # fmt: skip


def _curve(n: int, evidence: Evidence) -> Check:
    """As many requests were due as the rate that changes lets expect: a Poisson number with that mean."""
    start, end = expected_counts(evidence.rate_knots, np.array(evidence.window_ns))
    expected = float(end - start)
    low, high = (max(float(special.pdtrik(p, expected)), 0.0) for p in (CHANCE / 2, 1 - CHANCE / 2))
    return Check(
        rule="rate", status=OK if math.floor(low) <= n <= math.ceil(high) else BROKEN, value=float(n), limit=expected,
        text=f"at the planned rate {significant(expected)} {evidence.unit} were expected, {count(n)} were due"
        f" (chance allows {math.floor(low):,} .. {math.ceil(high):,})",
    )  # fmt: skip


def _dispersion(requests: pd.DataFrame, evidence: Evidence) -> Iterator[Check]:
    """Poisson arrivals in windows of equal expected count, constant ones in equal times; others as planned."""
    left = _left_ns(requests)
    index, windows = _index(_on_scale(left[left >= 0], evidence.rate_knots))
    if index is None:
        yield unmeasured("dispersion", "too few requests to tell how evenly they were sent")
        return
    low, high = 0.0, CONSTANT_DISPERSION
    if evidence.rate_knots or evidence.arrivals == "poisson":
        above = np.array([1 - CHANCE / 2, CHANCE / 2])
        low, high = (special.chdtri(windows - 1, above) / (windows - 1)).tolist()
    elif evidence.arrivals != "constant":
        index, as_planned = _both_indices(requests)
        low = min(BUNCHING[0] * as_planned, as_planned - CONSTANT_DISPERSION)
        high = max(BUNCHING[1] * as_planned, as_planned + CONSTANT_DISPERSION)
    yield Check(
        rule="dispersion", status=OK if low <= index <= high else BROKEN, value=index, limit=high,
        text=f"index of dispersion of {evidence.arrivals} arrivals {index:.2f}, expected {low:.2f} .. {high:.2f}",
    )  # fmt: skip


def sent_rate(requests: pd.DataFrame, window_ns: tuple[int, int] | None = None) -> float | None:
    """Requests per second that were sent: in all of a window, or from the first to the last."""
    sent = _sent_ns(requests)
    return _per_s(sent) if window_ns is None else len(sent) / max(window_ns[1] - window_ns[0], 1) * 1e9


def _per_s(at_ns: Ints) -> float | None:
    span = float(at_ns.max() - at_ns.min()) if len(at_ns) > 1 else 0.0
    return (len(at_ns) - 1) / span * 1e9 if span else None


def _pace(requests: pd.DataFrame) -> float:
    """How fast requests left against the plan: the slope of due over leaving times, times the share that left."""
    left = _left_ns(requests)
    went = left >= 0
    (_, together), (_, spread) = np.cov(stamps_ns(requests, "due_ns")[went], left[went])
    return float(together / spread * went.mean())


def first_turns(requests: pd.DataFrame) -> pd.DataFrame:
    """What came by the arrivals' law: all requests, or of conversations the first ones."""
    return requests[(requests["turn"] <= 1).to_numpy(bool)]


def dispersion(requests: pd.DataFrame) -> float | None:
    """Index of dispersion of sent requests: variance over mean of their counts in equal windows.

    Windows hold five requests on average, at most 200 of them. Poisson arrivals give 1: (windows - 1) x index is then
    chi-squared with windows - 1 degrees of freedom (Cox and Lewis 1966). None below ten windows.
    """
    return _index(_on_scale(_sent_ns(requests)))[0]


def _sent_ns(requests: pd.DataFrame) -> Ints:
    """When requests that reached the server were sent."""
    sent = _without_retries(requests, stamps_ns(requests, "sent_ns"))
    return sent[sent >= 0]


def _left_ns(requests: pd.DataFrame) -> Ints:
    """When the load tester did its part: called the server where it lacked a connection, else wrote to its socket."""
    called = stamps_ns(requests, "connect_start_ns")
    return _without_retries(requests, np.where(called >= 0, called, handed_ns(requests)))


def _without_retries(requests: pd.DataFrame, at_ns: Ints) -> Ints:
    """A retry is our own plan, not the arrivals': a last attempt counts as if it were the first."""
    waited = stamps_ns(requests, "attempt_due_ns") - stamps_ns(requests, "due_ns")
    return np.where(at_ns >= 0, at_ns - waited, at_ns)


def _on_scale(at_ns: Ints, knots: Knots = ()) -> Floats:
    """Stamps on the scale on which requests come at a constant rate: time, or the expected count."""
    return expected_counts(knots, at_ns) if knots else (at_ns - at_ns.min(initial=2**62)).astype(np.float64)


def _index(at: Floats) -> tuple[float | None, int]:
    windows = min(len(at) // 5, 200)
    if windows < 10:
        return None, windows
    return _over_mean(np.histogram(at - at.min(), bins=windows)[0]), windows


def _over_mean(counts: Ints) -> float:
    """The counts' variance over their mean."""
    return float(counts.var(ddof=1) / counts.mean())


def _both_indices(requests: pd.DataFrame) -> tuple[float, float]:
    """Index of dispersion of requests as they left and as they were due, in the same windows.

    Recorded requests come in groups at regular times: the windows begin a twentieth of their length before the first,
    so that no such time is the edge between two.
    """
    sent, due = (at[at >= 0].astype(np.float64) for at in (_left_ns(requests), stamps_ns(requests, "due_ns")))
    windows = min(len(sent) // 5, 200)
    before = (due.max() - due.min()) / windows / 20
    whole = (due.min() - before, max(due.max(), sent.max()) + before)
    as_sent, as_due = (_over_mean(np.histogram(at, bins=windows, range=whole)[0]) for at in (sent, due))
    return as_sent, as_due
