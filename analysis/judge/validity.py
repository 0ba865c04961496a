"""Was this a measurement at all? Rules about the load tester and its evidence, each with a value and a limit.

A broken rule makes the run INVALID, whatever the latencies say; a strained one is a warning beside the numbers that
it touches. What could not be measured is said to be unmeasured and breaks nothing. Thresholds that compare with
chance use a 1 in 10,000 two-sided level, so that a sound run is refused once in ten thousand.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from gapmeter.analysis.judge.arrivals import check_arrivals
from gapmeter.analysis.judge.evidence import Evidence
from gapmeter.analysis.judge.floor import COMMAND, busiest_second
from gapmeter.analysis.numbers import count, duration, share, significant
from gapmeter.analysis.requests.metrics import Bools, elapsed_ns, generator_lag_ns, succeeded
from gapmeter.analysis.results.manifest import CalibratedLimit, GeneratorFloor
from gapmeter.analysis.results.trust import BROKEN, OK, UNMEASURED, WARN, Check, CheckStatus, RunWarning
from gapmeter.analysis.stats.estimate import Floats
from gapmeter.analysis.stats.hdr import nearest_rank

LAG_FLOORS_NS = (1e6, 2e6)  # warn, broken: lag below this harms nobody
LAG_SHARES = (0.02, 0.10)  # of TTFT p99
LOOP_LAG_FLOORS_NS = (2e6, 10e6)
HELD_NS = 100e6
ERROR_SHARES = (0.01, 0.10)
LENGTH_SHARES = (0.0, 0.01)
CPU_SHARES = (0.70, 0.90)
CANARY_SPREAD = 1.25
FLOOR_SHARES = (0.7, 1.0)  # of what one generator process was measured to do


def check_run(requests: pd.DataFrame, evidence: Evidence) -> list[Check]:
    """Every rule's finding. ``requests`` as from ``measured_requests``."""
    if not len(requests):
        return [
            Check(rule="requests", status=BROKEN, value=0.0, limit=1.0, text="no request was issued after the warm-up"),
            *_recording(evidence),
        ]
    return [*check_arrivals(requests, evidence), *_instrument(requests, evidence), *_floor(requests, evidence.floor),
            *_answers(requests, evidence), *_recording(evidence)]  # fmt: skip


def invalid_reasons(checks: list[Check]) -> list[str]:
    return [check.text for check in checks if check.status == BROKEN]


def warnings_of(checks: list[Check], evidence: Evidence) -> list[RunWarning]:
    """A warning for every rule that is broken or strained, with a flag that can be typed as it stands."""
    one_rate = evidence.requested_rate is not None and evidence.arrivals not in _WITHOUT_RATE
    half = f"--set load.rate={(evidence.requested_rate or 0.0) / 2:g}" if one_rate else ""
    flags = {"LESS": half, "MORE": f"--set load.processes={evidence.processes + 1}"}
    out = []
    for check in checks:
        if check.status in (WARN, BROKEN):
            cause, flag, touches = _ADVICE[check.rule]
            out.append(
                RunWarning(code=check.rule, text=check.text, cause=cause, flag=flags.get(flag, flag), touches=touches)
            )
    return out


def percentile_of(values: Floats, percentile: float) -> float | None:
    """A plain percentile that describes this run's own instrument, not a population: no interval, any sample size."""
    known = np.sort(values[~np.isnan(values)])
    return float(known[nearest_rank(percentile, len(known)) - 1]) if len(known) else None


def _instrument(requests: pd.DataFrame, evidence: Evidence) -> Iterator[Check]:
    """How late and how busy the load tester was, against what it measured."""
    good = succeeded(requests)
    ttft = percentile_of(elapsed_ns(requests, "due_ns", "first_token_ns")[good], 99) or 0.0
    lag = percentile_of(generator_lag_ns(requests), 99)
    yield _against("lag", lag, _limits(LAG_FLOORS_NS, ttft), "requests were sent late: generator lag p99")
    loop = None if evidence.client_loop_lag_ns is None else percentile_of(evidence.client_loop_lag_ns, 99)
    check = _against("loop_lag", loop, _limits(LOOP_LAG_FLOORS_NS, ttft), "the load tester's event loop was late: p99")
    yield _held(check, evidence.client_loop_lag_ns, ttft)
    cpu = evidence.client_cpu_share
    if cpu is None:
        yield Check(
            rule="client_cpu",
            status=UNMEASURED,
            value=None,
            limit=None,
            text="the load tester's CPU share was not measured",
        )
    else:
        text = f"the busiest generator process used {share(cpu)} of a core (warning from {share(CPU_SHARES[0])})"
        yield Check(rule="client_cpu", status=_grade(cpu, CPU_SHARES), value=cpu, limit=CPU_SHARES[1], text=text)
    if evidence.cores_shared is not None:
        text = "server and load tester shared cores" if evidence.cores_shared else "the load tester had its own cores"
        yield Check(
            rule="cores",
            status=WARN if evidence.cores_shared else OK,
            value=float(evidence.cores_shared),
            limit=0.0,
            text=text,
        )
    if evidence.canary_spread is not None:
        text = f"a fixed piece of work took {evidence.canary_spread:.2f} times as long at p95 as at p50"
        status: CheckStatus = WARN if evidence.canary_spread > CANARY_SPREAD else OK
        yield Check(rule="machine", status=status, value=evidence.canary_spread, limit=CANARY_SPREAD, text=text)


def _held(check: Check, lag_ns: Floats | None, ttft_p99_ns: float) -> Check:
    """A stall too short for a p99, but longer than what was measured, is in the highest percentiles and the maxima."""
    if check.status != OK or lag_ns is None or (longest := lag_ns.max()) <= max(HELD_NS, ttft_p99_ns):
        return check
    text = f"{check.text}; once it stood still for {duration(longest / 1e6)}: maxima and percentiles beyond p99 have it"
    return check.model_copy(update={"status": WARN, "text": text})


def _floor(requests: pd.DataFrame, floor: GeneratorFloor | None) -> Iterator[Check]:
    """The busiest second against what one generator process of this machine was measured to do."""
    if floor is None:
        text = f"what the load tester can do on this machine is not known: {COMMAND} measures it in four minutes"
        yield Check(rule="floor", status=UNMEASURED, value=None, limit=None, text=text)
        return
    tokens, sent = busiest_second(requests)
    yield _of_limit("token_rate", tokens, floor.tokens, "tokens")
    yield _of_limit("request_rate", sent, floor.requests, "requests")


def _of_limit(rule: str, rate: float, limit: CalibratedLimit, what: str) -> Check:
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
    return Check(rule=rule, status=status, value=rate, limit=limit.per_s, text=text)


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
    yield Check(rule="errors", status=status, value=failed, limit=ERROR_SHARES[1], text=text)
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
        return Check(
            rule=rule, status=UNMEASURED, value=None, limit=None, text=f"how many tokens {name} had was not reported"
        )
    wrong = float((pair[column] != pair[f"{column}_asked"]).mean())
    status = _grade(wrong, LENGTH_SHARES)
    if status == BROKEN and not enforced:
        status = WARN
    mean = float(pair[column].astype(float).mean()), float(pair[f"{column}_asked"].astype(float).mean())
    text = (
        f"{share(wrong)} of {name} had another length than asked for"
        f" (mean {significant(mean[0])} tokens, asked {significant(mean[1])}; {share(LENGTH_SHARES[1])} allowed)"
    )
    return Check(rule=rule, status=status, value=wrong, limit=LENGTH_SHARES[1], text=text)


def _recording(evidence: Evidence) -> Iterator[Check]:
    dropped = evidence.records_dropped
    text = f"{count(dropped)} records were dropped because the disk was full" if dropped else "no record was dropped"
    yield Check(rule="records", status=BROKEN if dropped else OK, value=float(dropped), limit=0.0, text=text)
    text = f"the run is incomplete: {evidence.incomplete}" if evidence.incomplete else "the run is complete"
    yield Check(
        rule="complete",
        status=BROKEN if evidence.incomplete else OK,
        value=float(bool(evidence.incomplete)),
        limit=0.0,
        text=text,
    )
    if (slept := evidence.suspended_ns) is not None:
        text = f"the machine slept for {duration(slept / 1e6)} on the way" if slept else "the machine did not sleep"
        yield Check(rule="awake", status=BROKEN if slept else OK, value=float(slept), limit=0.0, text=text)
    refused = evidence.ledger_refused
    text = f"the ledger is refused: {'; '.join(refused)}" if refused else "the ledger was not refused"
    yield Check(rule="ledger", status=BROKEN if refused else OK, value=float(len(refused)), limit=0.0, text=text)


def _limits(floors_ns: tuple[float, float], ttft_p99_ns: float) -> tuple[float, float]:
    """Where lag is worth a warning and where it spoils the figures: a share of TTFT p99, never below the floor."""
    return max(floors_ns[0], LAG_SHARES[0] * ttft_p99_ns), max(floors_ns[1], LAG_SHARES[1] * ttft_p99_ns)


def _against(rule: str, value_ns: float | None, limits_ns: tuple[float, float], what: str) -> Check:
    if value_ns is None:
        return Check(rule=rule, status=UNMEASURED, value=None, limit=limits_ns[1], text=f"{what} unmeasured")
    warn, broken = (duration(limit / 1e6) for limit in limits_ns)
    text = f"{what} {duration(value_ns / 1e6)} (warning from {warn}, invalid from {broken})"
    return Check(rule=rule, status=_grade(value_ns, limits_ns), value=value_ns, limit=limits_ns[1], text=text)


def _grade(value: float, limits: tuple[float, float]) -> CheckStatus:
    return BROKEN if value > limits[1] else WARN if value > limits[0] else OK


_WITHOUT_RATE = ("ramp", "steps")  # their rates stand elsewhere
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
    "errors": ("the server refused or broke off; its own log says why", "LESS", _ALL),
    "output_length": ("the server ended answers on its own; lengths change what is measured", "", ("tpot", "e2e")),
    "prompt_length": ("prompts were made with another tokenizer than the server's", "--tokenizer PATH", ("ttft",)),
    "records": ("the disk is full", "", _ALL),
    "complete": ("the run was interrupted, or a process of it died", "", _ALL),
    "awake": ("it was suspended; its clocks stood still, and the server's did not", "", _ALL),
    "ledger": ("stamps are missing or contradict each other", "", ("stages", "tail", "upgrade")),
}
