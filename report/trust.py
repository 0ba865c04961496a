"""How far a run's figures can be trusted: the instrument, a steady state, drift. In sentences, and as sections."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from gapmeter.analysis.judge.steady import FEWEST_REQUESTS
from gapmeter.analysis.judge.words import growth_text, outage_text
from gapmeter.analysis.numbers import DASH, counted, duration, plain, share
from gapmeter.analysis.results.run import RunFigures, RunResult
from gapmeter.analysis.results.trust import Drift, Floor, Mser5, Pelt, QueueSlope, Ratio, ReceiveWait, Steady, Trust
from gapmeter.report import document as doc
from gapmeter.report.document import Block, Figure, Heading, Mark, Name, Paragraph, Row, Section, Table, in_ms
from gapmeter.report.waits import no_ledger
from gapmeter.report.words import as_sentence, low_to_high

_NOTABLE = 0.05  # of a ratio's distance from 1, beyond its interval
_DRIFTING = {
    "ttft": "TTFT", "tpot": "TPOT", "output_tokens_per_s": "tokens/s",
    "machine_time": "time of a fixed piece of CPU work",
}  # fmt: skip
_CHECKS = {
    "ok": Mark("ok", "good"),
    "warn": Mark("strained", "open"),
    "broken": Mark("broken", "bad"),
    "unmeasured": Mark("unmeasured"),
}
_LEVELS = {
    "exact": Mark("exact", "good"),
    "approximate": Mark("approximate", "open"),
    "refused": Mark("refused", "bad"),
}
_LONGER = {"output_tokens_per_s": "output tokens a second", "machine_time": "a fixed piece of CPU work: its time"}
_UNITS: Sequence[Literal["ms", "share"]] = ("ms", "share")
_RESIDUAL = (
    "In time, and as a share of each request's own wait. Unexplained or in transit (strict): all time between two "
    "processes' stamps counts as unexplained too. Not broken down (unstamped): within a call that has no stamp inside."
)
_STATES = {"steady": "Steady", "unsteady": "No steady state", "unknown": "Too short to tell"}
_LITTLE = 0.001
_LEFT = {"unexplained": "unexplained", "strict": "unexplained or in transit", "unstamped": "not broken down"}
_RATIO_LEAD = (
    "1: the first seconds were like the rest. Above 1 for times, or below 1 for tokens per second: they were slower."
)


def trust_sentence(result: RunFigures, *, brief: bool = False) -> str:
    """One line of the figures that say how far the others can be trusted; ``brief``: of the most telling ones."""
    return f"{'valid' if result.trust.valid else 'NOT valid'}: {trust_figures(result, brief=brief)}"


def remainder_sentence(trust: Trust) -> str:
    """The part of a request's time that is least accounted for, p99, in words."""
    unexplained, strict, unstamped = (
        part or 0.0 for part in (trust.unexplained_p99_share, trust.strict_p99_share, trust.unstamped_p99_share)
    )
    if unexplained >= max(strict / 2, unstamped, _LITTLE):
        return f"unexplained p99 {share(unexplained)}"
    if strict >= unstamped:
        return f"{_LEFT['strict']} p99 {share(strict)}"
    return f"{_LEFT['unstamped']} p99 {share(unstamped)}"


def trust_figures(result: RunFigures, *, brief: bool = False) -> str:
    """The same without its first word."""
    trust, ledger = result.trust, result.residual.last_token is not None
    parts = [f"lag p99 {duration(trust.lag_p99_ms)}"]
    if ledger and any(result.stages[name].count for name in ("prefill", "decode")):
        parts.append(remainder_sentence(trust))
    else:
        parts.append("the server's stages unmeasured" if ledger else "no ledger")
    if brief:
        return ", ".join(parts)
    if trust.receive_wait is not None:
        parts.append(f"receive wait p99 {duration(trust.receive_wait.p99_ms)}")
    if trust.client_cpu_share is not None:
        parts.append(f"client CPU {share(trust.client_cpu_share)}")
    parts.append(floor_sentence(result.floor) if result.floor else "not calibrated")
    return ", ".join(parts)


def floor_sentence(floor: Floor) -> str:
    """What the load tester adds itself, at p99."""
    p99_ms = {"TTFT": floor.ttft_p99_ms, "ITL": floor.itl_p99_ms, "E2E": floor.e2e_p99_ms}
    return "floor p99 " + ", ".join(f"{metric} {duration(ms)}" for metric, ms in p99_ms.items())


def received_sentence(wait: ReceiveWait | None) -> str:
    """Whose stamps arrivals have, and how long the bytes then waited for the load tester."""
    if wait is None:
        return "Bytes count as arrived when the load tester read them: the kernel's timestamps were not available here."
    whole = "all pieces" if wait.stamped == 1 else f"{share(wait.stamped)} of the pieces"
    return (
        f"Arrival times of {whole} of answers are the client kernel's. The load tester read them "
        f"{duration(wait.p50_ms)} (p50), {duration(wait.p99_ms)} (p99), {duration(wait.max_ms)} (max) later; latencies "
        "do not include that."
    )


def steady_sentence(steady: Steady, *, measured: int, offered: float | None) -> str:
    """Whether there was a steady state, and where methods disagree; of ``measured`` requests, ``offered`` a second."""
    if steady.state == "not_applicable":
        return "the load changes by design, so there is no steady state to look for"
    mser5, pelt, slope = steady.methods.mser5, steady.methods.pelt, steady.methods.queue_slope
    if mser5 is None or pelt is None:
        if measured >= FEWEST_REQUESTS:
            return "no request succeeded, so there are no latencies to test"
        seen = counted(measured, "measured request")
        return f"too short to tell: {seen}; it takes {FEWEST_REQUESTS} to see a steady state"
    said = []
    if slope is not None and slope.grows:
        more, less = ("" if rate is None else f" ({plain(rate)}/s)" for rate in (offered, slope.served_per_s))
        said.append(f"{growth_text(slope)}; the offered load{more} was above what was served{less}")
    if mser5.state == "unsteady":
        said.append(f"no steady state: {mser5.metric.upper()} kept changing through the run (MSER-5)")
    if not said:
        first = mser5.excluded_requests
        kept = f"steady, but the first {first} measured requests differ and are kept, as load.warmup says (MSER-5)"
        said.append("steady" if not first else f"steady after the first {first} requests" if mser5.applied else kept)
    if not pelt.agrees:
        said.append(f"PELT disagrees: it sees {(_changes(pelt) or ['no change of level'])[-1]}")
    return "; ".join(said)


def drift_sentence(drift: Drift) -> str | None:
    """Every ratio with its interval; then those that lie beyond it and more than 5 % from 1. None without any."""
    listed, moved = [], []
    for key, name in _DRIFTING.items():
        ratio: Ratio | None = getattr(drift, key)
        if ratio is None or ratio.ratio is None:
            continue
        low, high = (math.inf if end is None else end for end in ratio.ratio_ci)
        listed.append(f"{name} {ratio.ratio:.2f} ({low:.2f} .. {high:.2f})")
        if 1 + _NOTABLE < low < math.inf or high < 1 - _NOTABLE:
            moved.append(name)
    if not listed:
        return None
    differs = f"; {' and '.join(moved)} differed" if moved else ""
    cause = f" ({drift.reason})" if drift.reason and moved else ""
    return f"first {drift.first_s:.0f} s vs the rest: {', '.join(listed)}{differs}{cause}"


# --- sections


def trust(result: RunResult) -> Section:
    """The residual of the ledgers and every validity rule with what it found."""
    checks: list[Row] = [[Name(one.rule.replace("_", " ")), one.text, _CHECKS[one.status]] for one in result.checks]
    validity = Table("Validity", ["rule", "what was found", "answer"], checks, words=3)
    residual: list[Block] = [Paragraph(f"There is no ledger: {no_ledger(result)}", "quiet")]
    rows: list[Row] = []
    for event in ("first_token", "last_token"):
        found = getattr(result.residual, event)
        for which, words in _LEFT.items() if found else ():
            left, key = getattr(found, which), f"residual.{event}.{which}"
            cells = [
                Figure(getattr(left, f"{p}_{unit}"), unit, f"{key}.{p}_{unit}")
                for unit in _UNITS
                for p in ("p50", "p99", "max")
            ]
            rows.append([event.replace("_", " "), words, *cells])
    if rows:
        names = ("p50", "p99", "worst")
        columns: list[str | doc.Column] = [*in_ms(*names), *(f"{name}, share" for name in names)]
        residual = [Table("Residual", ["to the", "counted", *columns], rows, words=2), Paragraph(_RESIDUAL, "quiet")]
    received = Paragraph(received_sentence(result.trust.receive_wait), "quiet")
    blocks: list[Block] = [Heading("Validity"), validity, received]
    blocks += [Heading("Residual: what the ledger could not explain"), *residual]
    blocks += _support(result)
    return Section("trust", "Can these figures be trusted?", blocks, short="trust")


def _support(result: RunResult) -> list[Block]:
    """What the server was, and how well the ledger knows that; nothing of a server that does not say."""
    if not result.ledger.support:
        return []
    rows: list[Row] = [[Name(one.feature), one.detail, _LEVELS[one.level], one.text] for one in result.ledger.support]
    blocks: list[Block] = [
        Heading("What the server was"),
        Table("Support", ["", "here", "ledger", "that is"], rows, words=4),
    ]
    if ranks := result.ledger.ranks:
        p50, p99 = duration(ranks.begun_apart_p50_ms), duration(ranks.begun_apart_p99_ms)
        said = f"Its ranks began a step's forward {p50} apart (p50), {p99} (p99), over {ranks.steps:,} steps."
        blocks.append(Paragraph(said, "quiet"))
    return blocks


def sustained(result: RunResult) -> Section | None:
    """Was there a steady state, and what would the first seconds alone have told? None for a load that changes."""
    steady, drift = result.steady, result.drift
    if steady.state == "not_applicable":
        return None
    found = steady.methods
    answers: list[Row] = [
        [Name("MSER-5"), _mser(found.mser5)],
        [Name("PELT"), _pelt(found.pelt)],
        [Name("queue's slope"), _slope(found.queue_slope, result.load.loop)],
    ]
    methods = Table("Steady state", ["method", "what it found"], answers, words=2)
    rows: list[Row] = []
    for key, name in (_DRIFTING | _LONGER).items():
        ratio: Ratio | None = getattr(drift, key)
        figure = Figure(ratio.ratio, "number", f"drift.{key}.ratio") if ratio else DASH
        rows.append([name, figure, low_to_high(ratio.ratio_ci if ratio else None) or "not estimable"])
    headers = ["of the run", f"first {drift.first_s:.0f} s over the rest", "95 % interval"]
    ratios = Table("First seconds over the rest", headers, rows)
    columns = doc.Columns([
        [Heading("Was there a steady state?"), methods],
        [Heading("First seconds against sustained"), ratios, Paragraph(_RATIO_LEAD, "quiet")],
    ])  # fmt: skip
    lasting = "may stand for" if steady.valid_for_capacity else "do not stand for"
    lead = f"{_STATES[steady.state]}: these figures {lasting} a longer run at this load."
    lead += f" {as_sentence(outage_text(result.outage))}" if result.outage is not None else ""
    return Section("steady", "Sustained", [columns], lead, "sustained")


def _mser(found: Mser5 | None) -> str:
    if found is None:
        return "not asked"
    if found.state == "unsteady":
        return f"{found.metric.upper()} kept changing"
    if not found.excluded_requests:
        return "no start that differs"
    done = "left out" if found.applied else "kept, because the scenario fixes its warm-up"
    times = f"{found.metric.upper()} {plain(found.ratio, 2)} times the rest"
    return f"the first {found.excluded_requests} requests differ ({times}); {done}"


def _pelt(found: Pelt | None) -> str:
    if found is None:
        return "not asked"
    seen = "; ".join(_changes(found)) or "no certain change of level"
    return f"{seen} ({'agrees' if found.agrees else 'disagrees'})"


def _changes(found: Pelt) -> list[str]:
    return [
        f"{one.metric.upper()} at {plain(one.ratio, 2)} times its level from request {one.request} on"
        for one in found.changes
        if one.certain
    ]


def _slope(found: QueueSlope | None, loop: str) -> str:
    if found is None:
        return "not tested: closed loop" if loop == "closed" else "not asked"
    low, high = found.per_s_ci
    grew = "grew" if found.grows else "grew no more than in a steady queue"
    interval = f"95 % interval {plain(low, 2)} .. {plain(high, 2)}"
    return f"requests in flight {grew}: {'+' if found.per_s > 0 else ''}{plain(found.per_s, 2)} a second ({interval})"
