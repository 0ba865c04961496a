"""Was this a measurement at all? Rules about the load tester and its evidence, each with a value and a limit.

A broken rule makes the run INVALID, whatever the latencies say; a strained one is a warning beside the numbers that
it touches. What could not be measured is said to be unmeasured and breaks nothing. Thresholds that compare with
chance use a 1 in 10,000 two-sided level, so that a sound run is refused once in ten thousand.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import special

from analysis.report.numbers import count, duration, share, significant
from analysis.requests.metrics import Bools, elapsed_ns, generator_lag_ns, stamps_ns, succeeded
from analysis.requests.rate_curve import Knots, expected_counts
from analysis.statistics.hdr import nearest_rank
from analysis.statistics.quantiles import Floats
from analysis.trust.floor import COMMAND, Floor, Limit, busiest_second

OK, WARN, BROKEN, UNMEASURED = "ok", "warn", "broken", "unmeasured"

RATE_TOLERANCE = 0.01
DELIVERED_FLOOR_NS = 20e6  # in a window of a second, one late request would otherwise look like a rate
CHANCE = 1e-4
CONSTANT_DISPERSION = 0.3
BUNCHING = (0.7, 1.4)  # dispersion of sent over that of planned requests
LAG_FLOORS_NS = (1e6, 2e6)  # warn, broken: lag below this harms nobody
LAG_SHARES = (0.02, 0.10)  # of TTFT p99
LOOP_LAG_FLOORS_NS = (2e6, 10e6)
ERROR_SHARES = (0.01, 0.10)
LENGTH_SHARES = (0.0, 0.01)
CPU_SHARES = (0.70, 0.90)
CANARY_SPREAD = 1.25
FLOOR_SHARES = (0.7, 1.0)  # of what one generator process was measured to do


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of a run beside its tables. None: not measured (or, for limits, not asked for).

    ``arrivals`` is constant, poisson, gamma, ... or closed; ``burstiness`` the squared coefficient of variation of
    gaps that was asked for. ``rate_knots`` (CLOCK_MONOTONIC ns, requests per second) are the rate that due times were
    drawn at, where it changed, ``window_ns`` the measured part then, ``prefix_share`` how much of all prompts stood at
    the start of an earlier one, ``unit`` what arrives: requests, or conversations of several, ``beyond_end`` how many
    of their turns would have been due after the run's end, ``think_time_ns`` the mean pause of a user.
    ``client_cpu_share`` is the busiest generator process's share of one core, ``client_loop_lag_ns`` samples of its
    event loop's lag. ``output_enforced`` and ``prompt_exact`` say whether lengths were forced on the server, and
    prompts made with its own tokenizer. ``canary_spread`` is p95 / p50 of the fixed piece of work. ``slo_on_errors``:
    an SLO judges them, so no rule does.
    ``floor``: what calibration found of the load tester on the machine of the run.
    """

    loop: str
    arrivals: str
    requested_rate: float | None = None
    burstiness: float | None = None
    concurrency: int | None = None
    processes: int = 1
    planned: int | None = None
    incomplete: str = ""
    client_cpu_share: float | None = None
    client_loop_lag_ns: Floats | None = None
    records_dropped: int = 0
    cores_shared: bool | None = None
    output_enforced: bool = True
    prompt_exact: bool = True
    canary_spread: float | None = None
    ledger_refused: tuple[str, ...] = ()
    slo_on_errors: bool = False
    rate_knots: Knots = ()
    window_ns: tuple[int, int] = (0, 0)
    prefix_share: float | None = None
    unit: str = "requests"
    beyond_end: int | None = None
    think_time_ns: int = 0
    floor: Floor | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """One rule: what was found, what it may be, and the plain sentence. ``value`` None where unmeasured."""

    rule: str
    status: str
    value: float | None
    limit: float | None
    text: str


@dataclass(frozen=True, slots=True)
class RunWarning:
    """What was seen, the likely cause, the exact flag to try (or nothing), and the numbers that it touches."""

    code: str
    text: str
    cause: str
    flag: str
    touches: tuple[str, ...]


def check_run(requests: pd.DataFrame, evidence: Evidence) -> list[Check]:
    """Every rule's finding. ``requests`` as from ``measured_requests``."""
    if not len(requests):
        return [Check("requests", BROKEN, 0.0, 1.0, "no request was issued after the warm-up"), *_recording(evidence)]
    return [*_arrivals(requests, evidence), *_instrument(requests, evidence), *_floor(requests, evidence.floor),
            *_answers(requests, evidence), *_recording(evidence)]  # fmt: skip


def invalid_reasons(checks: list[Check]) -> list[str]:
    return [check.text for check in checks if check.status == BROKEN]


def warnings_of(checks: list[Check], evidence: Evidence) -> list[RunWarning]:
    """A warning for every rule that is broken or strained, with a flag that can be typed as it stands."""
    half = f"--set load.rate={evidence.requested_rate / 2:g}" if evidence.requested_rate else ""
    flags = {"LESS": half, "MORE": f"--set load.processes={evidence.processes + 1}"}
    out = []
    for check in checks:
        if check.status in (WARN, BROKEN):
            cause, flag, touches = _ADVICE[check.rule]
            out.append(RunWarning(check.rule, check.text, cause, flags.get(flag, flag), touches))
    return out


def rates(requests: pd.DataFrame) -> tuple[float | None, float | None]:
    """Requests per second as planned (by due times) and as delivered (by sent times), from first to last."""
    both = []
    for name in ("due_ns", "sent_ns"):
        at = stamps_ns(requests, name)
        at = at[at >= 0]
        span = float(at.max() - at.min()) if len(at) > 1 else 0.0
        both.append((len(at) - 1) / span * 1e9 if span else None)
    return both[0], both[1]


def first_turns(requests: pd.DataFrame) -> pd.DataFrame:
    """What came by the arrivals' law: all requests, or of conversations the first ones."""
    if "turn" not in requests:
        return requests
    return requests[(requests["turn"] <= 1).to_numpy(bool)]


def dispersion(requests: pd.DataFrame) -> tuple[float | None, int]:
    """Index of dispersion of sent requests (variance over mean of counts in equal windows), and the windows.

    Windows hold five requests on average, at most 200 of them. Poisson arrivals give 1: (windows - 1) x index is then
    chi-squared with windows - 1 degrees of freedom (Cox and Lewis 1966). None below ten windows.
    """
    return _index(_on_scale(requests, "sent_ns"))


def _on_scale(requests: pd.DataFrame, stamp: str, knots: Knots = ()) -> Floats:
    """What was stamped, on the scale on which requests come at a constant rate: time, or the expected count."""
    known = stamps_ns(requests, stamp)
    known = known[known >= 0]
    return expected_counts(knots, known) if knots else (known - known.min(initial=2**62)).astype(np.float64)


def _index(at: Floats) -> tuple[float | None, int]:
    windows = min(len(at) // 5, 200)
    if windows < 10:
        return None, windows
    counts, _ = np.histogram(at - at.min(), bins=windows)
    return float(counts.var(ddof=1) / counts.mean()), windows


def _both_indices(requests: pd.DataFrame) -> tuple[float, float]:
    """Index of dispersion of sent and of due requests, in the same windows.

    Recorded requests come in groups at regular times: the windows begin a twentieth of their length before the first,
    so that no such time is the edge between two.
    """
    sent, due = (stamps_ns(requests, name).astype(np.float64) for name in ("sent_ns", "due_ns"))
    sent = sent[sent >= 0]
    windows = min(len(sent) // 5, 200)
    before = (due.max() - due.min()) / windows / 20
    whole = (due.min() - before, max(due.max(), sent.max()) + before)
    counts = [np.histogram(at, bins=windows, range=whole)[0] for at in (sent, due)]
    return float(counts[0].var(ddof=1) / counts[0].mean()), float(counts[1].var(ddof=1) / counts[1].mean())


def percentile_of(values: Floats, percentile: float) -> float | None:
    """A plain percentile that describes this run's own instrument, not a population: no interval, any sample size."""
    known = np.sort(values[~np.isnan(values)])
    return float(known[nearest_rank(percentile, len(known)) - 1]) if len(known) else None


def _arrivals(requests: pd.DataFrame, evidence: Evidence) -> Iterator[Check]:
    if evidence.loop != "open":
        return
    starts = first_turns(requests)
    n = len(starts)
    planned, delivered = rates(requests)
    if planned is None or delivered is None:
        yield Check("rate", UNMEASURED, None, None, "too few requests to tell the delivered rate")
        return
    if evidence.rate_knots:
        yield _curve(n, evidence)
    elif evidence.requested_rate is not None:
        yield _rate(rates(starts)[0] or 0.0, evidence.requested_rate, n, evidence)
    late = abs(delivered / planned - 1)
    allowed = max(RATE_TOLERANCE, DELIVERED_FLOOR_NS * planned / 1e9 / max(n - 1, 1))
    yield Check(
        "delivered", BROKEN if late > allowed else OK, delivered, planned,
        f"{significant(planned)} requests per second were due, {significant(delivered)} were sent"
        f" ({share(late)} off; {share(allowed)} allowed)",
    )  # fmt: skip
    yield from _dispersion(starts, evidence)


def _rate(planned: float, asked: float, n: int, evidence: Evidence) -> Check:
    variation = {"constant": 0.0, "poisson": 1.0}.get(evidence.arrivals, evidence.burstiness or 1.0)
    slack = RATE_TOLERANCE + float(special.ndtri(1 - CHANCE / 2)) * math.sqrt(variation / max(n - 1, 1))
    off = abs(planned / asked - 1)
    return Check(
        "rate", BROKEN if off > slack else OK, planned, asked,
        f"{significant(asked)} {evidence.unit} per second were asked for, {significant(planned)} were due"
        f" ({share(off)} off; chance and rounding allow {share(slack)})",
    )  # fmt: skip


def _curve(n: int, evidence: Evidence) -> Check:
    """As many requests were due as the rate that changes lets expect: a Poisson number with that mean."""
    start, end = expected_counts(evidence.rate_knots, np.array(evidence.window_ns))
    wanted = float(end - start)
    low, high = (max(float(special.pdtrik(p, wanted)), 0.0) for p in (CHANCE / 2, 1 - CHANCE / 2))
    return Check(
        "rate", OK if math.floor(low) <= n <= math.ceil(high) else BROKEN, float(n), wanted,
        f"the planned rate lets {significant(wanted)} {evidence.unit} expect, {count(n)} were due"
        f" (chance allows {math.floor(low):,} .. {math.ceil(high):,})",
    )  # fmt: skip


def _dispersion(requests: pd.DataFrame, evidence: Evidence) -> Iterator[Check]:
    """Poisson arrivals in windows of equal expected count, constant ones in equal times; others as planned."""
    index, windows = _index(_on_scale(requests, "sent_ns", evidence.rate_knots))
    if index is None:
        yield Check("dispersion", UNMEASURED, None, None, "too few requests to tell how evenly they were sent")
        return
    low, high = 0.0, CONSTANT_DISPERSION
    if evidence.rate_knots or evidence.arrivals == "poisson":
        low, high = (
            float(special.chdtri(windows - 1, above)) / (windows - 1) for above in (1 - CHANCE / 2, CHANCE / 2)
        )
    elif evidence.arrivals != "constant":
        index, as_planned = _both_indices(requests)
        low = min(BUNCHING[0] * as_planned, as_planned - CONSTANT_DISPERSION)
        high = max(BUNCHING[1] * as_planned, as_planned + CONSTANT_DISPERSION)
    yield Check(
        "dispersion", OK if low <= index <= high else BROKEN, index, high,
        f"index of dispersion of {evidence.arrivals} arrivals {index:.2f}, expected {low:.2f} .. {high:.2f}",
    )  # fmt: skip


def _instrument(requests: pd.DataFrame, evidence: Evidence) -> Iterator[Check]:
    """How late and how busy the load tester was, against what it measured."""
    good = succeeded(requests)
    ttft = percentile_of(elapsed_ns(requests, "due_ns", "first_token_ns")[good], 99) or 0.0
    lag = percentile_of(generator_lag_ns(requests), 99)
    yield _against("lag", lag, _limits(LAG_FLOORS_NS, ttft), "requests were sent late: generator lag p99")
    loop = None if evidence.client_loop_lag_ns is None else percentile_of(evidence.client_loop_lag_ns, 99)
    yield _against("loop_lag", loop, _limits(LOOP_LAG_FLOORS_NS, ttft), "the load tester's event loop was late: p99")
    cpu = evidence.client_cpu_share
    if cpu is None:
        yield Check("client_cpu", UNMEASURED, None, None, "the load tester's CPU share was not measured")
    else:
        text = f"the busiest generator process used {share(cpu)} of a core (warning from {share(CPU_SHARES[0])})"
        yield Check("client_cpu", _grade(cpu, CPU_SHARES), cpu, CPU_SHARES[1], text)
    if evidence.cores_shared is not None:
        text = "server and load tester shared cores" if evidence.cores_shared else "the load tester had its own cores"
        yield Check("cores", WARN if evidence.cores_shared else OK, float(evidence.cores_shared), 0.0, text)
    if evidence.canary_spread is not None:
        text = f"a fixed piece of work took {evidence.canary_spread:.2f} times as long at p95 as at p50"
        status = WARN if evidence.canary_spread > CANARY_SPREAD else OK
        yield Check("machine", status, evidence.canary_spread, CANARY_SPREAD, text)


def _floor(requests: pd.DataFrame, floor: Floor | None) -> Iterator[Check]:
    """The busiest second against what one generator process of this machine was measured to do."""
    if floor is None:
        text = f"what the load tester can do on this machine is not known: {COMMAND} measures it in four minutes"
        yield Check("floor", UNMEASURED, None, None, text)
        return
    tokens, sent = busiest_second(requests)
    yield _of_limit("token_rate", tokens, floor.tokens, "tokens")
    yield _of_limit("request_rate", sent, floor.requests, "requests")


def _of_limit(rule: str, rate: float, limit: Limit, what: str) -> Check:
    """A limit that calibration did not reach (the null server gave out first) is higher: passing it only warns."""
    part = rate / limit.per_s
    status = _grade(part, FLOOR_SHARES)
    if status == BROKEN and not limit.reached:
        status = WARN
    most = "more than " * (not limit.reached) + significant(limit.per_s)
    text = (
        f"a generator process had {significant(rate)} {what} in its busiest second; calibrated for {most}"
        f" ({share(part)}; warning from {share(FLOOR_SHARES[0])})"
    )
    return Check(rule, status, rate, limit.per_s, text)


def _answers(requests: pd.DataFrame, evidence: Evidence) -> Iterator[Check]:
    """Failures, and whether answers and prompts had the lengths that were asked for."""
    good = succeeded(requests)
    failed = float(1 - good.mean())
    status = _grade(failed, ERROR_SHARES)
    if evidence.slo_on_errors and status == BROKEN:
        status = WARN
    classes = requests.loc[~good, "outcome"].value_counts()
    worst = f", most of them {classes.index[0]}" if len(classes) else ""
    text = f"{count((~good).sum())} of {count(len(good))} requests failed ({share(failed)}{worst})"
    yield Check("errors", status, failed, ERROR_SHARES[1], text)
    for rule, column, enforced in (
        ("output_length", "output_tokens", evidence.output_enforced),
        ("prompt_length", "prompt_tokens", evidence.prompt_exact),
    ):
        yield _lengths(requests, good, rule, column, enforced)


def _lengths(requests: pd.DataFrame, good: Bools, rule: str, column: str, enforced: bool) -> Check:
    name = rule.replace("_length", "s")
    pair = requests.loc[good, [column, f"{column}_asked"]].dropna()
    pair = pair[pair[f"{column}_asked"] > 0]  # 0: it was left open
    if not len(pair):
        return Check(rule, UNMEASURED, None, None, f"how many tokens {name} had was not reported")
    wrong = float((pair[column] != pair[f"{column}_asked"]).mean())
    status = _grade(wrong, LENGTH_SHARES)
    if status == BROKEN and not enforced:
        status = WARN
    mean = float(pair[column].astype(float).mean()), float(pair[f"{column}_asked"].astype(float).mean())
    text = (
        f"{share(wrong)} of {name} had another length than asked for"
        f" (mean {significant(mean[0])} tokens, asked {significant(mean[1])}; {share(LENGTH_SHARES[1])} allowed)"
    )
    return Check(rule, status, wrong, LENGTH_SHARES[1], text)


def _recording(evidence: Evidence) -> Iterator[Check]:
    dropped = evidence.records_dropped
    text = f"{count(dropped)} records were dropped because the disk was full" if dropped else "no record was dropped"
    yield Check("records", BROKEN if dropped else OK, float(dropped), 0.0, text)
    text = f"the run is incomplete: {evidence.incomplete}" if evidence.incomplete else "the run is complete"
    yield Check("complete", BROKEN if evidence.incomplete else OK, float(bool(evidence.incomplete)), 0.0, text)
    refused = evidence.ledger_refused
    text = f"the ledger is refused: {'; '.join(refused)}" if refused else "the ledger was not refused"
    yield Check("ledger", BROKEN if refused else OK, float(len(refused)), 0.0, text)


def _limits(floors_ns: tuple[float, float], ttft_p99_ns: float) -> tuple[float, float]:
    """Where lag is worth a warning and where it spoils the figures: a share of TTFT p99, never below the floor."""
    return max(floors_ns[0], LAG_SHARES[0] * ttft_p99_ns), max(floors_ns[1], LAG_SHARES[1] * ttft_p99_ns)


def _against(rule: str, value_ns: float | None, limits_ns: tuple[float, float], what: str) -> Check:
    if value_ns is None:
        return Check(rule, UNMEASURED, None, limits_ns[1], f"{what} unmeasured")
    warn, broken = (duration(limit / 1e6) for limit in limits_ns)
    text = f"{what} {duration(value_ns / 1e6)} (warning from {warn}, invalid from {broken})"
    return Check(rule, _grade(value_ns, limits_ns), value_ns, limits_ns[1], text)


def _grade(value: float, limits: tuple[float, float]) -> str:
    return BROKEN if value > limits[1] else WARN if value > limits[0] else OK


_ALL = ("ttft", "itl", "tpot", "e2e")
# rule: likely cause, flag to try (MORE: another generator process, LESS: half the rate), numbers touched
_ADVICE: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "requests": ("the run ended during its warm-up, or every request was left out", "--set load.warmup=0", _ALL),
    "rate": ("the plan does not hold the rate that was asked for; a defect of the load tester", "", ("load",)),
    "delivered": ("the load tester could not keep up with its plan", "MORE", ("load", *_ALL)),
    "dispersion": ("requests were bunched or evened out on their way to the socket", "MORE", ("load", *_ALL)),
    "lag": ("the load tester was busy, or another process held its core", "MORE", ("ttft", "e2e")),
    "loop_lag": ("the load tester was busy, or another process held its core", "MORE", _ALL),
    "client_cpu": ("one generator process is not enough for this many tokens a second", "MORE", _ALL),
    "token_rate": ("one generator process is not enough for this many tokens a second", "MORE", _ALL),
    "request_rate": ("one generator process is not enough for this many requests a second", "MORE", ("load", *_ALL)),
    "cores": ("this machine has too few cores to keep them apart", "--url http://HOST:PORT", _ALL),
    "machine": ("another job ran beside this one, or the CPU changed its clock", "", _ALL),
    "errors": ("the server refused or broke off; its log lies in the run's folder", "LESS", _ALL),
    "output_length": ("the server ended answers on its own; lengths change what is measured", "", ("tpot", "e2e")),
    "prompt_length": ("prompts were made with another tokenizer than the server's", "--tokenizer PATH", ("ttft",)),
    "records": ("the disk is full", "", _ALL),
    "complete": ("the run was interrupted, or a process of it died", "", _ALL),
    "ledger": ("stamps are missing or contradict each other", "", ("stages", "tail", "upgrade")),
}
