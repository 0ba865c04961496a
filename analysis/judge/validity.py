"""Was this a measurement at all? Rules about the load tester and its evidence, each with a value and a limit.

A broken rule makes the run INVALID, whatever the latencies say; a strained one is a warning beside the numbers that
it touches. What could not be measured is said to be unmeasured and breaks nothing. Thresholds that compare with
chance use a 1 in 10,000 two-sided level, so that each of them refuses a sound run once in ten thousand.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pandas as pd

from gapmeter.analysis.arrays import Bools, Floats, Ints
from gapmeter.analysis.judge.arrivals import check_arrivals, unmeasured
from gapmeter.analysis.judge.evidence import Evidence
from gapmeter.analysis.judge.lateness import Late, Lateness, LateRule, lateness_of
from gapmeter.analysis.numbers import count, duration, share, significant
from gapmeter.analysis.requests.metrics import ended_by_us, failures_of, flattened, percentile_of, stamps_ns, succeeded
from gapmeter.analysis.results.distribution import figure_name
from gapmeter.analysis.results.manifest import CalibratedLimit, GeneratorFloor
from gapmeter.analysis.results.requests import Outage
from gapmeter.analysis.results.run import SloAnswer
from gapmeter.analysis.results.trust import BROKEN, OK, UNMEASURED, WARN, Check, CheckStatus, Floor, RunWarning
from gapmeter.analysis.stats.hdr import PERCENTILES
from gapmeter.scenarios.model import CHANGING_ARRIVALS
from gapmeter.scenarios.slo import LATENCIES

HELD_NS = 100e6
ERROR_SHARES = (0.01, 0.10)
LENGTH_SHARES = (0.0, 0.01)
CPU_SHARES = (0.70, 0.90)
CANARY_SPREAD = 1.25
FLOOR_SHARES = (0.7, 1.0)  # of what one generator process was measured to do


def check_run(
    requests: pd.DataFrame, evidence: Evidence, answers: Sequence[SloAnswer] = (), lateness: Lateness | None = None,
    outage: Outage | None = None,
) -> list[Check]:  # fmt: skip
    """Every rule's finding. ``requests`` as from ``measured_requests``; ``answers``, of its SLOs, say what it is about.

    ``lateness`` and ``outage``: what they were judged by.
    """
    if not len(requests):
        text = "no request was issued after the warm-up"
        none = Check(rule="requests", status=BROKEN, value=0.0, limit=1.0, text=text)
        return [none, *_recording(evidence)]
    lateness = lateness or lateness_of(requests, evidence.client_loop_lag_ns)
    judged = evidence.slo_on_errors or bool(outage and answers)
    came = list(check_arrivals(requests, evidence))
    if evidence.incomplete:  # of an end that took records along, not of the plan
        came = [unmeasured(each.rule, each.text) if each.status == BROKEN else each for each in came]
    return [*came, *_instrument(evidence, answers, lateness),
            *_floor(requests, evidence.floor), *_answers(requests, evidence, judged=judged),
            *_recording(evidence)]  # fmt: skip


def _graded(
    rule: str, value: float | None, limits: tuple[float, float], text: str, *, only_warn: bool = False
) -> Check:
    """Strained beyond the first limit, broken beyond the second, or ``only_warn``; None is unmeasured."""
    status: CheckStatus = OK
    if value is None:
        status = UNMEASURED
    elif value > limits[0]:
        status = BROKEN if value > limits[1] and not only_warn else WARN
    return Check(rule=rule, status=status, value=value, limit=limits[1], text=text)


def _instrument(evidence: Evidence, answers: Sequence[SloAnswer], lateness: Lateness) -> Iterator[Check]:
    """How late and how busy the load tester was, against what it measured."""
    # Of two limits on one percentile, the one that is not judged counts.
    by_late = sorted(answers, key=lambda each: each.unjudged)
    about = {(each.metric, each.percentile): each.unjudged for each in by_late if each.percentile is not None}
    about = about or {(metric, 99.0): True for metric in LATENCIES}
    percentiles = sorted({*PERCENTILES, *(percentile for _, percentile in about)})
    always = [(metric, percentile) for metric in LATENCIES for percentile in percentiles]
    latenesses = [
        late
        for metric, percentile in dict.fromkeys([*about, *always])
        for late in lateness.of(metric, percentile)
        if (metric, percentile) in about or (late.refused and lateness.series(metric).percentile(percentile).supported)
    ]
    loop_ns = lateness.loop_ns
    yield _lateness("lag", lateness.sent_ns, latenesses, about, "generator lag")
    check = _lateness("loop_lag", loop_ns, latenesses, about, "event loop lag")
    # A stall too short for a p99, but longer than what was measured, is in the highest percentiles and the maxima.
    ttft = percentile_of(lateness.series("ttft").ordered, 99) or 0.0
    if check.status == OK and loop_ns is not None and (longest := loop_ns[-1]) > max(HELD_NS, ttft):
        stall = f"it once stalled for {duration(longest / 1e6)}"
        if evidence.loop == "open" or evidence.think_time_ns or lateness.merged_ns is None:
            # Else nothing was due meanwhile, or stamped late.
            stall += ", which shows in maxima and percentiles beyond p99"
        text = f"event loop lag p99 {duration((check.value or 0.0) / 1e6)}; {stall}"
        check = check.model_copy(update={"status": WARN, "text": text})
    yield check
    if (cpu := evidence.client_cpu_share) is None:
        yield unmeasured("client_cpu", "the load tester's CPU share was not measured")
    else:
        text = f"the busiest generator process used {share(cpu)} of a core (warning from {share(CPU_SHARES[0])})"
        yield _graded("client_cpu", cpu, CPU_SHARES, text)
    if (shared := evidence.cores_shared) is None:
        yield unmeasured("cores", "nobody knows on which cores of this machine the attached server ran")
    else:
        text = "server and load tester shared cores" if shared else "the load tester had its own cores"
        yield _graded("cores", float(shared), (0.0, 0.0), text, only_warn=True)
    if (spread := evidence.canary_spread) is not None:
        text = f"CPU speed varied {spread:.2f}-fold (a fixed task, p95 over p50)"
        yield _graded("machine", spread, (CANARY_SPREAD, CANARY_SPREAD), text, only_warn=True)


def _lateness(
    rule: LateRule, lags_ns: Floats | None, latenesses: Sequence[Late], about: Mapping[tuple[str, float], bool],
    what: str,
) -> Check:  # fmt: skip
    """Broken where a figure that the run is about is refused; a warning where another is, or one is strained.

    ``about``: (metric, percentile), and whether nothing is said of it if it is refused: an SLO that is missed by more
    than its lateness is missed all the same. ``latenesses``: that of these, and of others that are refused and would
    be shown. The sentence is about the figure that decided.
    """
    lag_ns = None if lags_ns is None else percentile_of(lags_ns, 99)
    if lag_ns is None:
        return unmeasured(rule, f"{what} unmeasured")
    found = [late for late in latenesses if late.rule == rule]
    asked = [late for late in found if (late.metric, late.percentile) in about]
    refused = [one for one in found if one.refused]
    strained = [one for one in asked if one.strained]
    broken = [one for one in refused if about.get((one.metric, one.percentile))]
    text = f"{what} p99 {duration(lag_ns / 1e6)}"
    worst = max(broken or refused or strained or asked, key=lambda one: one.late_ns / one.limits_ns[1], default=None)
    if worst is not None:
        both = " and late reading" if worst.together else ""
        text = (
            f"up to {duration(worst.late_ns / 1e6)} of {figure_name(worst.metric, worst.percentile)} "
            f"{duration(worst.value_ns / 1e6)} may be {what}{both}"
        )
    if refused:
        names = ", ".join(figure_name(one.metric, one.percentile) for one in refused)
        text += f"; refused, because too much may be the load tester's lateness: {names}"
    status: CheckStatus = BROKEN if broken else WARN if refused or strained else OK
    return Check(rule=rule, status=status, value=lag_ns, limit=worst.limits_ns[1] if worst else None, text=text)


def _floor(requests: pd.DataFrame, floor: GeneratorFloor | None) -> Iterator[Check]:
    """The busiest second against what one generator process of this machine was measured to do."""
    if floor is None:
        text = "the load tester is not calibrated on this machine; run gapmeter calibrate (four minutes)"
        yield unmeasured("floor", text)
        return
    tokens, sent = busiest_second(requests)
    yield _of_limit("token_rate", tokens, floor.tokens, "tokens")
    yield _of_limit("request_rate", sent, floor.requests, "requests")


def _of_limit(rule: str, rate: float, limit: CalibratedLimit, what: str) -> Check:
    """A limit that calibration did not reach (the null server gave out first) is higher: passing it only warns."""
    most = "more than " * (not limit.reached) + significant(limit.per_s)
    text = (
        f"a generator process had {significant(rate)} {what} in its busiest second; calibrated for {most}"
        f" ({share(rate / limit.per_s)}; warning from {share(FLOOR_SHARES[0])})"
    )
    limits = FLOOR_SHARES[0] * limit.per_s, FLOOR_SHARES[1] * limit.per_s
    return _graded(rule, rate, limits, text, only_warn=not limit.reached)


def describe_floor(floor: GeneratorFloor | None) -> Floor | None:
    """The load tester's own floor."""
    if floor is None:
        return None
    return Floor(
        **{name: getattr(floor, name) for name in Floor.model_fields.keys() & GeneratorFloor.model_fields.keys()},
        tokens_per_s=floor.tokens.per_s,
        requests_per_s=floor.requests.per_s,
        measured=floor.measured_wall,
    )


def busiest_second(requests: pd.DataFrame) -> tuple[float, float]:
    """Tokens that arrived, and requests that were sent, in the busiest second of the busiest generator process."""
    tokens = sent = 0.0
    for _, own in requests.groupby("worker"):
        left = stamps_ns(own, "sent_ns")
        tokens = max(tokens, _most_in_a_second(flattened(own, "token_ns")[0]))
        sent = max(sent, _most_in_a_second(left[left >= 0]))
    return tokens, sent


def _most_in_a_second(at_ns: Ints) -> float:
    return float(np.bincount((at_ns - at_ns.min()) // 1_000_000_000).max()) if len(at_ns) else 0.0


def _answers(requests: pd.DataFrame, evidence: Evidence, *, judged: bool) -> Iterator[Check]:
    """Failures, and whether answers and prompts had the lengths that were asked for."""
    requests = requests[~ended_by_us(requests)]
    good = succeeded(requests)
    failed = float(1 - good.mean()) if len(good) else None
    classes = requests.loc[~good, "outcome"].value_counts()
    worst = f", {count(classes.iloc[0])} of them {classes.index[0]}" if len(classes) else ""
    text = f"{count((~good).sum())} of {count(len(good))} requests failed ({share(failed)}{worst})"
    yield _graded("errors", failed, ERROR_SHARES, text, only_warn=judged)
    yield _lengths(requests, good, "output", enforced=evidence.output_enforced)
    yield _lengths(requests, good, "prompt", enforced=evidence.prompt_exact)


def _lengths(requests: pd.DataFrame, good: Bools, side: str, *, enforced: bool) -> Check:
    rule, names = f"{side}_length", (f"{side}_tokens", f"{side}_tokens_asked")
    pair = requests.loc[good, list(names)].dropna().astype(float)
    had, asked = (pair.loc[pair[names[1]] > 0, name] for name in names)  # 0: it was left open
    if not len(had):
        return unmeasured(rule, f"how many tokens {side}s had was not reported")
    wrong = float((had != asked).mean())
    allowed = f"; {share(LENGTH_SHARES[1])} allowed" if enforced else ""
    text = (
        f"{share(wrong)} of {side}s had a different length than asked for"
        f" (mean {significant(had.mean())} tokens, asked {significant(asked.mean())}{allowed})"
    )
    return _graded(rule, wrong, LENGTH_SHARES, text, only_warn=not enforced)


def _recording(evidence: Evidence) -> Iterator[Check]:
    """What may not have happened at all."""
    dropped, incomplete, slept = evidence.records_dropped, evidence.incomplete, evidence.suspended_ns
    refused = evidence.ledger_refused
    found = {
        "records": (dropped, f"{count(dropped)} records were dropped because the disk was full",
                    "no record was dropped"),
        "complete": (bool(incomplete), f"the run is incomplete: {incomplete}", "the run is complete"),
        "awake": (slept, f"the machine was suspended for {duration((slept or 0) / 1e6)} during the run",
                  "the machine was not suspended"),
        "ledger": (len(refused), f"the ledger is refused: {'; '.join(refused)}", "the ledger was not refused"),
    }  # fmt: skip
    for rule, (value, happened, did_not) in found.items():
        if value is not None:
            yield _graded(rule, float(value), (0.0, 0.0), happened if value else did_not)


def invalid_reasons(checks: Sequence[Check]) -> list[str]:
    return [check.text for check in checks if check.status == BROKEN]


def warnings_of(checks: Sequence[Check], evidence: Evidence, requests: pd.DataFrame) -> Iterator[RunWarning]:
    """A warning for every rule that is broken or strained, with a flag that can be typed as it stands.

    ``requests`` as from ``measured_requests``: what most of them failed of decides what to try.
    """
    one_rate = evidence.requested_rate is not None and evidence.arrivals not in CHANGING_ARRIVALS
    half = f"--set load.rate={(evidence.requested_rate or 0.0) / 2:g}" if one_rate else ""
    senders = evidence.workers or evidence.processes
    can_be_more = not evidence.locustfile and senders < (evidence.concurrency or math.inf)
    more = f"{'--workers ' if evidence.workers else '--set load.processes='}{senders + 1}"
    flags = {"LESS": half, "MORE": more if can_be_more else ""}
    for check in checks:
        told = check.rule == "prompt_length" and not evidence.prompt_exact  # by the plan
        if check.status in (WARN, BROKEN) and not told:
            cause, flag, touches = _ADVICE[check.rule]
            if check.rule in _BY_REQUESTS:
                cause, flag = _BY_REQUESTS[check.rule](requests, evidence) or (cause, flag)
            used = evidence.client_cpu_share
            if check.rule in ("delivered", "lag", "loop_lag") and used is not None and used < _BUSY:
                flag = ""  # it waited for something else than its own work
            flag = flags.get(flag, flag)
            yield RunWarning(code=check.rule, text=check.text, cause=cause, flag=flag, touches=touches)


def _failing(requests: pd.DataFrame, evidence: Evidence) -> tuple[str, str] | None:
    """The likely cause of the most frequent failure, and what to try; None: nothing better than of any other."""
    failed = requests[failures_of(requests)]
    outcome, status = failed.groupby(["outcome", "status"]).size().idxmax()
    if evidence.could_be_plain and status in (400, 422):
        said = failed.loc[failed["status"] == status, "error"].astype(str)
        if said.str.contains(_UNKNOWN_FIELD, case=False).mean() > 0.5:
            return "the server refuses fields that it does not know; without them, lengths are only limits", _PLAIN
    for statuses, advice in _BY_STATUS.items():
        if status in statuses:
            return advice
    return _BY_OUTCOME.get(outcome)


def _other_length(requests: pd.DataFrame, evidence: Evidence) -> tuple[str, str] | None:
    """Why most answers had another length, where they say: longer ones were not the model's choice."""
    pair = requests.loc[succeeded(requests), ["output_tokens", "output_tokens_asked"]].dropna().astype(float)
    beyond = np.sign(pair["output_tokens"] - pair["output_tokens_asked"])[pair["output_tokens_asked"] > 0].sum()
    if beyond > 0:
        return "answers were longer than asked for: the server does not keep to max_tokens", ""
    short = pair.index[pair["output_tokens"] < pair["output_tokens_asked"]]
    reasons = requests.loc[short, "finish_reason"].dropna().mode()
    if len(reasons) and reasons[0] not in ("stop", "length"):
        reason = f"with finish_reason {reasons[0]!r}" if reasons[0] else "without a finish_reason"
        return f"most short answers ended {reason}: the server cut them off", ""
    if evidence.could_be_plain:
        return "the server ended answers on its own: it ignores ignore_eos and min_tokens; without them it may", _PLAIN
    return None


_PLAIN = "--set server.dialect=plain"
_UNKNOWN_FIELD = (
    "ignore_eos|min_tokens|continuous_usage_stats|unrecognized|unknown (?:field|parameter|argument)"
    "|extra (?:inputs|fields)"
)
_BY_REQUESTS = {"errors": _failing, "output_length": _other_length}
# What most failures were: likely cause, flag to try.
_BY_STATUS: dict[tuple[int, ...], tuple[str, str]] = {
    (301, 302, 303, 307, 308): ("it redirects requests, and gapmeter follows no redirects", "--url with that address"),
    (401, 403): ("the server wants a key, or another one", "--api-key KEY"),
    (404, 405): ("the server does not know this path or this model", "--model NAME, or another --url"),
    (400, 413, 422): ("the server rejects such requests; the failures say why", ""),
    (429,): ("the server limits the rate of requests", "LESS"),
    (503,): ("the server, or something in front of it, was overloaded", "LESS"),
}
_BY_OUTCOME = {
    "refused": ("nothing listened at that address: the server was gone, or its connection queue was full", ""),
    "tls": ("the TLS handshake failed; the failures say why", ""),
    "timeout": ("the server did not finish in load.timeout", "LESS"),
    "stalled": ("the server sent no token for load.stall", "LESS"),
    "http_5xx": ("the server failed; its own log says why", ""),
    "malformed": (
        "the server, or something in front of it, answered with an error or with something else; the failures say what",
        "",
    ),
    "wrong_length": ("the server ended answers without a token", ""),
}
_BUSY = 0.5  # of a core, over the run: below, more processes would hardly help
# rule: likely cause, flag to try (MORE: another generator process or worker, LESS: half the rate), numbers touched
_ADVICE: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "requests": ("the run ended during its warm-up, or every request was left out", "--set load.warmup=0", LATENCIES),
    "rate": ("the plan does not have the requested rate: a bug in the load tester", "", ("load",)),
    "delivered": ("the load tester could not keep up with its plan", "MORE", ("load", *LATENCIES)),
    "dispersion": ("requests were bunched or evened out on their way to the socket", "MORE", ("load", *LATENCIES)),
    "lag": ("the load tester was busy, or another process held its core", "MORE", ("ttft", "e2e")),
    "loop_lag": ("the load tester was busy, or another process held its core", "MORE", LATENCIES),
    "client_cpu": ("one generator process is not enough for this many tokens a second", "MORE", LATENCIES),
    "token_rate": ("one generator process is not enough for this many tokens a second", "MORE", LATENCIES),
    "request_rate": (
        "one generator process is not enough for this many requests a second",
        "MORE",
        ("load", *LATENCIES),
    ),
    "cores": ("this machine has too few cores to keep them apart", "--url http://HOST:PORT", LATENCIES),
    "machine": ("another job ran beside this one, or the CPU changed its clock", "", LATENCIES),
    "errors": ("the server refused or cut off requests; its log says why", "", LATENCIES),
    "output_length": ("the server ended answers on its own; lengths change what is measured", "", ("tpot", "e2e")),
    "prompt_length": ("prompts were made with another tokenizer than the server's", "--tokenizer PATH", ("ttft",)),
    "records": ("the disk is full", "", LATENCIES),
    "complete": ("", "", LATENCIES),  # its text says why
    "awake": ("it was suspended; its clocks stood still, and the server's did not", "", LATENCIES),
    "ledger": ("stamps are missing or contradict each other", "", ("stages", "tail", "upgrade")),
}
