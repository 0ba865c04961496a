"""What may be claimed of a comparison: faster, slower, or no difference found; and which stage accounts for it.

The family of tests is every metric's percentiles that both sides support, over all comparisons that are told together.
Their p-values are corrected by Holm's (1979) step-down method, so that with a probability of at least 95 % not one
difference is claimed where there is none. A claim must also exceed the load tester's own floor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gapmeter.analysis.compare.differences import Differences
from gapmeter.analysis.numbers import duration, in_unit, share, significant, unit_of
from gapmeter.analysis.stages import BY_NAME, owner_words
from gapmeter.analysis.stats.difference import Difference, holm
from gapmeter.analysis.stats.estimate import CONFIDENCE

FASTER, SLOWER, MIXED, NOTHING, UNKNOWN = "faster", "slower", "mixed", "no difference found", "not estimable"
FAMILY: tuple[float, ...] = (50.0, 90.0, 99.0)
NAMES = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "e2e": "E2E"}
# Waits whose length others decide: they follow from what somebody's work takes, and are never its first cause.
LEAST_CAUSE = 0.1  # of the difference: work that changed by less is no cause of it
WAITS = frozenset(
    {"retry", "accept_wait", "core_wait", "engine_wait", "queue", "other_step", "interference", "preempted"}
)


@dataclass(frozen=True, slots=True)
class Claim:
    """One figure of the family.

    ``p_adjusted`` is Holm's; ``least_ns`` the smallest difference that would have been found with 80 % probability;
    ``floor_ns`` the load tester's own error, 0 where it is unmeasured.
    """

    metric: str
    percentile: float
    difference: Difference
    p_adjusted: float | None
    confirmed: bool
    least_ns: float | None
    floor_ns: float

    @property
    def name(self) -> str:
        return f"{NAMES[self.metric]} p{self.percentile:g}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer for one comparison: for each metric, and in all. ``family`` is the number of tests."""

    word: str
    sentence: str
    metrics: Mapping[str, str]
    claims: tuple[Claim, ...]
    family: int


@dataclass(frozen=True, slots=True)
class Change:
    """What accounts for the difference of the means to one event.

    ``stage`` has the largest share of it; ``cause`` the largest share among stages that are work and not a wait for
    others' work (None where no such stage changed beyond its interval and has a tenth of the difference). Shares are
    of the whole difference. ``stage`` is None where there is no difference to explain.
    """

    metric: str
    event: str
    stage: str | None
    owner: str | None
    share: float | None
    share_ci: tuple[float, float] | None
    cause: str | None
    cause_owner: str | None
    cause_share: float | None
    sentence: str


def judge(
    found: Sequence[Differences], names: Sequence[tuple[str, str]], floors: Mapping[str, tuple[float, float]],
    slos: Sequence[tuple[str, float]] = (),
) -> list[Verdict]:  # fmt: skip
    """A verdict for each comparison; ``names``: what its sides are called.

    ``floors[metric]``: the load tester's error at p50 and p99, ns. ``slos``: metric and percentile of each SLO, which
    join the family and are told first.
    """
    wanted = {(metric, p) for metric in NAMES for p in FAMILY} | set(slos)
    family = [
        (number, metric, p, difference)
        for number, each in enumerate(found)
        for metric, own in each.metrics.items()
        for p, difference in own.items()
        if (metric, p) in wanted
    ]
    known = [i for i, (*_, difference) in enumerate(family) if difference.p is not None]
    adjusted = dict(zip(known, holm([family[i][3].p or 0.0 for i in known]), strict=True))
    claims: list[list[Claim]] = [[] for _ in found]
    for i, (number, metric, p, difference) in enumerate(family):
        claims[number].append(_claim(metric, p, difference, adjusted.get(i), len(known), floors))
    return [_verdict(own, pair, slos, len(known)) for own, pair in zip(claims, names, strict=True)]


def _claim(
    metric: str, p: float, difference: Difference, adjusted: float | None, family: int,
    floors: Mapping[str, tuple[float, float]],
) -> Claim:  # fmt: skip
    floor = floors.get(metric, (0.0, 0.0))[0 if p <= 50 else 1]
    if adjusted is None or difference.value is None:
        return Claim(metric, p, difference, None, False, None, floor)
    confirmed = bool(adjusted <= 1 - CONFIDENCE and abs(difference.value) > floor)
    least = max(difference.least(1 - (1 - CONFIDENCE) / family), floor)
    return Claim(metric, p, difference, float(adjusted), confirmed, least, floor)


def _verdict(
    claims: Sequence[Claim], names: tuple[str, str], slos: Sequence[tuple[str, float]], family: int
) -> Verdict:
    metrics = {metric: _word([c for c in claims if c.metric == metric]) for metric in NAMES}
    word = _word(claims)
    confirmed = [c for c in claims if c.confirmed]
    if confirmed:
        first = min(confirmed, key=lambda c: ((c.metric, c.percentile) not in slos, -_size(c)))
        sentence = _claim_sentence(word, first, confirmed, names)
    else:
        sentence = _nothing_sentence(word, claims, slos)
    return Verdict(word, sentence, metrics, tuple(claims), family)


def _size(claim: Claim) -> float:
    """How far beyond chance, in standard errors."""
    d = claim.difference
    return abs(d.value or 0.0) / d.error if d.error else 0.0


def _word(claims: Sequence[Claim]) -> str:
    if not any(c.difference.supported for c in claims):
        return UNKNOWN
    signs = {(c.difference.value or 0.0) > 0 for c in claims if c.confirmed}
    if len(signs) == 2:
        return MIXED
    return (SLOWER if True in signs else FASTER) if signs else NOTHING


def _claim_sentence(word: str, first: Claim, confirmed: Sequence[Claim], names: tuple[str, str]) -> str:
    head = (
        f"{names[1]} is {word} than {names[0]}" if word != MIXED else f"{names[1]} is faster in some, slower in others"
    )
    others = [c.name for c in confirmed if c is not first]
    rest = f"; also beyond chance: {', '.join(others)}" if others else ""
    return f"{head}: {told(first.name, first.difference)}{rest}"


def _nothing_sentence(word: str, claims: Sequence[Claim], slos: Sequence[tuple[str, float]]) -> str:
    if word == UNKNOWN:
        why = next((c.difference.why for c in claims if c.difference.why), "no values")
        return f"no percentile can be compared: {why}"
    able = [c for c in claims if c.least_ns is not None and c.difference.a]
    named = [c for c in able if (c.metric, c.percentile) in slos] or [c for c in able if c.metric == "e2e"] or able
    if not named:
        return NOTHING
    c = named[0]
    least = c.least_ns or 0.0
    part = f" ({share(least / c.difference.a)})" if c.difference.a else ""
    figures = "1 figure" if len(able) == 1 else f"{len(able)} figures"
    if len(able) < len(claims):
        figures = f"{len(able)} of {len(claims)} figures, the others being not estimable"
    return (
        f"{NOTHING} in {figures}; {told(c.name, c.difference)}. One of {duration(least / 1e6)}{part} "
        f"in {c.name} would have been found with 80 % probability"
    )


def told(name: str, d: Difference) -> str:
    """``E2E p50 298 ms -> 312 ms, +14.1 ms (9.0 .. 19.2), +4.7 %``."""
    low, high = d.estimate.ends
    if d.value is None or d.a is None or d.b is None or low is None or high is None:
        return f"{name} not estimable"
    ends = between(low / 1e6, high / 1e6)
    text = f"{name} {duration(d.a / 1e6)} -> {duration(d.b / 1e6)}, {signed(d.value)} ({ends})"
    return f"{text}, {signed_share(d.value / d.a)}" if d.a else text


def between(low_ms: float, high_ms: float) -> str:
    """An interval of differences, which may be negative, in the unit of its larger end: ``-2.43 .. -1.10 ms``."""
    unit = unit_of(max(abs(low_ms), abs(high_ms)))
    low, high = (significant(in_unit(end, unit)[0]) for end in (low_ms, high_ms))
    return f"{low} .. {high} {unit}"


def signed(ns: float) -> str:
    """A difference with its sign and unit."""
    return f"{'+' if ns > 0 else ''}{duration(ns / 1e6)}"


def signed_share(fraction: float) -> str:
    """A relative difference with its sign."""
    percent = 100 * fraction
    return f"{'+' if percent > 0 else ''}{significant(percent, 2 if abs(percent) < 99.5 else 3)} %"


def what_changed(found: Differences, verdict: Verdict, device: str) -> Change | None:
    """The stage that accounts for the difference, of TTFT or E2E, whichever's claim is surer; None without a ledger.

    ``device`` is what computed the forwards, in a word.
    """
    if not found.totals:
        return None
    confirmed = [c for c in verdict.claims if c.confirmed]
    surest = max(confirmed, key=lambda c: (c.metric in ("ttft", "e2e"), _size(c)), default=None)
    metric = "ttft" if surest is not None and surest.metric == "ttft" and "first_token" in found.totals else "e2e"
    event = "first_token" if metric == "ttft" else "last_token"
    total = found.totals[event]
    if surest is not None and (surest.difference.value or 0.0) * (total.value or 0.0) < 0:
        told_apart = f"{told(f'the mean {NAMES[metric]}', total)}: it moves the other way than {surest.name}"
        return Change(metric, event, None, None, None, None, None, None, None, told_apart)
    if surest is None or not total.estimate.excludes(0.0):
        nothing = _unexplained(metric, total, claimed=surest is not None)
        return Change(metric, event, None, None, None, None, None, None, None, nothing)
    return _change(found, metric, event, total, device)


def _unexplained(metric: str, total: Difference, *, claimed: bool) -> str:
    mean = told(f"the mean {NAMES[metric]}", total)
    if claimed:
        return (
            f"{mean}: not beyond its interval, so its stages explain nothing; the difference lies in other percentiles"
        )
    return f"{mean}: no difference to explain"


def _change(found: Differences, metric: str, event: str, total: Difference, device: str) -> Change:
    whole = total.value or 0.0
    shares = {name: (d.value or 0.0) / whole for name, d in found.stages[event].items()}
    stage = max(shares, key=lambda name: shares[name])
    work = [
        name
        for name in shares
        if name not in WAITS and shares[name] > 0 and found.stages[event][name].estimate.excludes(0.0)
    ]
    work = [name for name in work if shares[name] >= LEAST_CAUSE]
    cause = max(work, key=lambda name: shares[name], default=None)
    part = found.shares[event][stage]
    interval = part.known[1:] if part else None
    sentence = f"{told(f'the mean {NAMES[metric]}', total)}: {_part(stage, shares[stage], interval, device)}"
    if cause is not None and cause != stage:
        follows = (
            f", a wait that others' work causes; of the work itself, {cause} ({_owner(cause, device)}) changed most"
        )
        sentence += f"{follows}: {signed(found.stages[event][cause].value or 0.0)}"
    return Change(
        metric, event, stage, _owner(stage, device), shares[stage], interval, cause,
        None if cause is None else _owner(cause, device), None if cause is None else shares[cause], sentence,
    )  # fmt: skip


def _part(stage: str, part: float, interval: tuple[float, float] | None, device: str) -> str:
    between = f" ({share(interval[0])} .. {share(interval[1])})" if interval else ""
    return f"{share(part)}{between} of that is {stage} ({_owner(stage, device)})"


def _owner(stage: str, device: str) -> str:
    owner = BY_NAME[stage].owner if stage in BY_NAME else "nobody yet"
    return owner_words(owner, device)
