"""Each rule breaks on the fault that it is for, and on no other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from gapmeter.analysis.capacity.read import outcome_of
from gapmeter.analysis.capacity.trial import Outcome, Trial, find, plan_looks
from gapmeter.analysis.judge import arrivals, validity
from gapmeter.analysis.judge.evidence import Evidence, evidence_of, floor_of
from gapmeter.analysis.judge.lateness import lateness_of, shortens
from gapmeter.analysis.judge.validity import busiest_second, describe_floor
from gapmeter.analysis.judge.verdict import judge
from gapmeter.analysis.judge.warnings import connect_warning
from gapmeter.analysis.judge.words import late_words, not_judged
from gapmeter.analysis.results.manifest import CalibratedLimit, GeneratorFloor, TrialNote
from gapmeter.analysis.results.run import SloAnswer
from gapmeter.analysis.results.trust import BROKEN, OK, UNMEASURED, WARN, Check, RunWarning
from gapmeter.analysis.tables import GeneratorFile
from gapmeter.records.request import Flag
from gapmeter.report.slo import gauge, slo_interval, slo_sentence, slo_value
from gapmeter.report.trust import floor_sentence
from gapmeter.scenarios.slo import Slo
from tests.kit.results import manifest
from tests.kit.runs import slo, stamped

MS = 1_000_000
FLOOR = GeneratorFloor(
    ttft_p50_ms=0.15, ttft_p99_ms=0.4, itl_p50_ms=0.01, itl_p99_ms=0.3, e2e_p50_ms=0.15, e2e_p99_ms=0.4,
    lag_p50_ms=0.1, lag_p99_ms=0.2, chunk_us=20.0, tokens=CalibratedLimit(per_s=10_000, ended_by="client"),
    requests=CalibratedLimit(per_s=100, ended_by="client"), measured_wall="2026-11-21T12:00:00+0000", quick=False,
    cores_shared=False,
)  # fmt: skip
POISSON = Evidence(
    "open", "poisson", 20.0, client_cpu_share=0.3, client_loop_lag_ns=np.full(500, 0.1e6), cores_shared=False,
    floor=FLOOR,
)  # fmt: skip

ON_OFF = replace(POISSON, arrivals="onoff")


def users_of(count: int, **more: Any) -> Evidence:
    return Evidence("closed", "closed", concurrency=count, **more)


def poisson_run(count: int = 1500, lag_ms: float = 0.05, seed: int = 2) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    due = 10**12 + np.cumsum(rng.exponential(1e9 / 20, count)).astype(np.int64)
    return run(due, due + int(lag_ms * MS))


def run(due: np.ndarray[Any, Any], sent: np.ndarray[Any, Any]) -> pd.DataFrame:
    return stamped(
        due, sent, sent + 50 * MS, sent + 300 * MS, worker=0, prompt_tokens=100, prompt_tokens_asked=100,
        output_tokens=32, output_tokens_asked=32, status=200, error="", finish_reason="length",
    )  # fmt: skip


def states(requests: pd.DataFrame, evidence: Evidence) -> dict[str, str]:
    return {check.rule: check.status for check in validity.check_run(requests, evidence)}


def checked(rule: str, requests: pd.DataFrame, evidence: Evidence, answers: Sequence[SloAnswer] = ()) -> Check:
    (found,) = (check for check in validity.check_run(requests, evidence, answers) if check.rule == rule)
    return found


def warned(requests: pd.DataFrame, evidence: Evidence) -> list[RunWarning]:
    return list(validity.warnings_of(validity.check_run(requests, evidence), evidence, requests))


def test_a_run_whose_records_went_with_a_generator_is_incomplete_and_its_plan_not_doubted() -> None:
    half = poisson_run().iloc[::2]
    assert states(half, POISSON)["rate"] == BROKEN
    died = replace(POISSON, incomplete="generator process 0 failed")
    checks = validity.check_run(half, died)
    assert [check.rule for check in checks if check.status == BROKEN] == ["complete"]
    assert validity.invalid_reasons(checks) == ["the run is incomplete: generator process 0 failed"]


def test_a_sound_poisson_run_breaks_no_rule_and_warns_of_nothing() -> None:
    requests = poisson_run()
    checks = validity.check_run(requests, POISSON)
    assert {check.status for check in checks} == {OK}
    assert not list(validity.warnings_of(checks, POISSON, requests))
    assert validity.invalid_reasons(checks) == []


def test_of_several_generator_processes_those_that_were_killed_are_named_and_the_busiest_counts() -> None:
    times = [np.empty(0, np.int64)] * 4
    processes = [
        GeneratorFile(worker, [{"type": "usage", "cpu_ns": cpu, "wall_ns": 10}], *times, worker != 1, worker)
        for worker, cpu in enumerate((2, 8, 4))
    ]
    found = evidence_of(manifest(), processes, poisson_run().assign(measured=True), ())
    assert (found.incomplete, found.client_cpu_share) == ("generator process 1 was killed", 0.8)
    assert found.records_dropped == 3
    lacking = replace(processes[0], notes=[{"type": "lack", "what": "a port"}])
    assert evidence_of(manifest(), [lacking], poisson_run().assign(measured=True), ()).lacked and not found.lacked


@pytest.mark.parametrize(
    ("took_ns", "spread"), [(([20_000] * 20, [30_000] * 20), 1.0), (([20_000] * 20, [20_000] * 15 + [30_000] * 5), 1.5)]
)
def test_processes_on_cores_of_different_speed_are_no_core_that_changes_its_own(
    took_ns: tuple[list[int], ...], spread: float
) -> None:
    none = np.empty(0, np.int64)
    processes = [GeneratorFile(k, [], none, none, none, np.array(each), True, 0) for k, each in enumerate(took_ns)]
    assert evidence_of(manifest(), processes, poisson_run().assign(measured=True), ()).canary_spread == spread


def test_requests_that_are_sent_again_are_no_lateness_and_no_bunching_of_the_load_testers() -> None:
    requests = poisson_run()
    since = requests["due_ns"] - requests["due_ns"].min()
    back = 15_000 * MS  # when the server was there again, which then got all of them within three seconds
    later = np.where(since < back, back + since // 5 - since, 0)
    sent = {"sent_ns": requests["sent_ns"] + later, "attempt_due_ns": requests["due_ns"] + later}
    again = requests.assign(**sent)
    found = states(again, POISSON)
    assert [found[rule] for rule in ("rate", "delivered", "dispersion", "lag")] == [OK] * 4
    assert (arrivals.sent_rate(again), arrivals.dispersion(again)) == (
        arrivals.sent_rate(requests), arrivals.dispersion(requests),
    )  # fmt: skip
    late = {"sent_ns": requests["sent_ns"] + later, "attempt_due_ns": requests["due_ns"]}
    assert states(requests.assign(**late), POISSON)["dispersion"] == BROKEN


def test_what_a_long_prompt_waits_for_room_in_the_network_is_no_lateness_of_the_load_testers() -> None:
    """A write that was held up while the socket had room is."""
    requests = poisson_run(lag_ms=40)
    requests["write_ns"] = requests["due_ns"] + MS // 20
    assert states(requests.assign(flags=int(Flag.REUSED | Flag.WAITED)), POISSON)["lag"] == OK
    assert states(requests.assign(flags=int(Flag.REUSED)), POISSON)["lag"] == BROKEN
    together = (requests["due_ns"] // (1000 * MS) + 1) * 1000 * MS  # the link is free once a second
    bunched = requests.assign(sent_ns=together)
    assert states(bunched.assign(flags=int(Flag.REUSED | Flag.WAITED)), POISSON)["dispersion"] == OK
    assert states(bunched.assign(flags=int(Flag.REUSED)), POISSON)["dispersion"] == BROKEN


def test_sound_poisson_runs_are_hardly_ever_refused() -> None:
    refused = sum(BROKEN in states(poisson_run(seed=seed, count=400), POISSON).values() for seed in range(120))
    assert refused <= 1


@pytest.mark.parametrize(
    ("change", "rule", "expected"),
    [
        ({"client_cpu_share": 0.69}, "client_cpu", OK),
        ({"client_cpu_share": 0.71}, "client_cpu", WARN),
        ({"client_cpu_share": 0.89}, "client_cpu", WARN),
        ({"client_cpu_share": 0.91}, "client_cpu", BROKEN),
        ({"client_cpu_share": None}, "client_cpu", UNMEASURED),
        ({"client_loop_lag_ns": np.full(100, 3e6)}, "loop_lag", WARN),
        ({"client_loop_lag_ns": np.full(100, 20e6)}, "loop_lag", BROKEN),
        ({"client_loop_lag_ns": None}, "loop_lag", UNMEASURED),
        ({"client_loop_lag_ns": np.append(np.full(500, 0.1e6), 99e6)}, "loop_lag", OK),
        ({"client_loop_lag_ns": np.append(np.full(500, 0.1e6), 101e6)}, "loop_lag", WARN),
        ({"suspended_ns": 3_000_000_000}, "awake", BROKEN),
        ({"cores_shared": True}, "cores", WARN),
        ({"cores_shared": None}, "cores", UNMEASURED),
        ({"canary_spread": 1.24}, "machine", OK),
        ({"canary_spread": 1.26}, "machine", WARN),
        ({"records_dropped": 1}, "records", BROKEN),
        ({"incomplete": "the generator was killed"}, "complete", BROKEN),
        ({"ledger_refused": ("2 requests were not found",)}, "ledger", BROKEN),
        ({"requested_rate": 25.0}, "rate", BROKEN),
    ],
)
def test_evidence_against_a_run_touches_its_own_rule_alone(change: dict[str, Any], rule: str, expected: str) -> None:
    evidence = replace(POISSON, **change)
    found = states(poisson_run(), evidence)
    assert found.pop(rule) == expected
    assert set(found.values()) == {OK}
    told = warned(poisson_run(), evidence)
    assert [w.code for w in told] == ([rule] if expected in (WARN, BROKEN) else [])


def test_a_loop_that_stood_still_was_late_for_every_beat_meanwhile() -> None:
    due = np.array([0, 20, 40, 1020, 1040]) * MS  # held from 45 to 1,035 ms: beats 60 to 1,020 passed unseen
    at = np.array([0, 20, 1035, 1035, 1040]) * MS
    held, calm, silent = (GeneratorFile(0, [], due[:n], at[:n], due[:0], due[:0], True, 0) for n in (5, 2, 0))
    assert sorted(held.lag_ns(0)) == sorted([0, 0, *range(15 * MS, 1000 * MS, 20 * MS), 0])
    assert sorted(held.lag_ns(990 * MS)) == [0, 15 * MS, 35 * MS], "of a hold, what was due from then on"
    assert list(calm.lag_ns(0)) == [0, 0]
    assert len(silent.lag_ns(0)) == 0


def test_a_loop_that_was_late_in_the_warm_up_alone_was_late_for_nothing_that_counts() -> None:
    requests = poisson_run().assign(measured=True)
    start = int(requests["due_ns"].min())
    requests["measured"] = requests["due_ns"] >= start + 5000 * MS
    due = start + np.arange(0, 9000, 20) * MS
    at = due + np.where(due < start + 4500 * MS, 40 * MS, 1000)
    generator = GeneratorFile(0, [], due, at, due[:0], due[:0], True, 0)
    lags = evidence_of(manifest(), [generator], requests, ()).client_loop_lag_ns
    assert lags is not None and set(lags) == {1000} and len(lags) <= 200


def streamed(gaps_ms: list[float], chunks: list[int], stamped: float = 0.0) -> pd.DataFrame:
    """Answers whose reads are so far apart and bring so many chunks each; ``stamped``: the share with kernel stamps."""
    requests = poisson_run()
    at = np.concatenate([[0], np.cumsum(np.array(gaps_ms) * MS)]).astype(np.int64)
    counts = np.array([1, *chunks])
    requests["token_ns"] = [first + np.repeat(at, counts) for first in requests["first_token_ns"]]
    requests["last_token_ns"] = [stamps[-1] for stamps in requests["token_ns"]]
    requests["chunk_tokens"] = [np.ones(counts.sum(), np.int64)] * len(requests)
    requests["output_tokens"] = requests["output_tokens_asked"] = int(counts.sum())
    has = np.arange(len(requests)) < stamped * len(requests)
    requests["receive_wait_ns"] = [np.full(len(counts), 50_000, np.uint32) if one else None for one in has]
    return requests


SOMETIMES_HELD = np.append(np.zeros(900), np.linspace(0.3, 30, 100) * MS)  # for 30 ms of every 300


@pytest.mark.parametrize(
    ("chunks", "stamped", "refused"),
    [
        ([1] * 31, 0.0, {"p95 ITL", "p99 ITL", "p99.9 ITL", "p99 TPOT", "p99.9 TPOT"}),
        ([1] * 31, 0.985, {"p95 ITL", "p99 ITL", "p99.9 ITL", "p99 TPOT", "p99.9 TPOT"}),
        ([1] * 31, 0.995, set()),
        ([1] * 31, 1.0, set()),
        ([1] * 15 + [6] + [1] * 15, 1.0, {"p99 ITL", "p99.9 ITL"}),
    ],
    ids=[
        "our own stamps",
        "too few of the kernel's",
        "nearly all of the kernel's",
        "the kernel's",
        "the kernel's, with one read of six tokens",
    ],
)
def test_late_reading_refuses_the_figures_that_it_can_have_spoilt_and_no_others(
    chunks: list[int], stamped: float, refused: set[str]
) -> None:
    requests = streamed([5.0 if k == 1 else 30.0 for k in chunks], chunks, stamped)
    evidence = replace(POISSON, client_loop_lag_ns=SOMETIMES_HELD)
    lateness = lateness_of(requests, SOMETIMES_HELD)
    found = {
        f"p{p:g} {metric.upper()}"
        for metric in ("ttft", "itl", "tpot", "e2e")
        for p in (50.0, 90.0, 95.0, 99.0, 99.9)
        if lateness.refused_ns(metric, p) is not None
    }
    assert {name for name in found if "ITL" in name or "TPOT" in name} == refused
    assert not any("p50" in name for name in found)
    for slos, status in (
        ((), BROKEN),
        ((slo("itl", 99, 60),), WARN),  # met even so
        ((slo("e2e", 50, 999),), WARN),
    ):
        answers = judge(slos, requests, {}, lateness=lateness)
        check = checked("loop_lag", requests, evidence, answers)
        assert check.status == (status if refused else OK)
        assert (check.value or 0) / MS == pytest.approx(27, abs=0.1), "its p99"


def test_what_was_sent_late_and_what_was_read_late_can_spoil_a_figure_together() -> None:
    requests, fine = poisson_run(), np.full(500, 0.1e6)
    sent_late = requests.assign(sent_ns=requests["sent_ns"] + np.where(np.arange(1500) % 125 == 0, 20 * MS, 0))
    read_late = np.where(np.arange(500) % 150 == 0, 20.0 * MS, fine)  # 0.8 % each
    for one, loop in ((sent_late, fine), (requests, read_late)):
        assert lateness_of(one, loop).refused_ns("ttft", 99) is None
    both = lateness_of(sent_late, read_late)
    assert (both.refused_ns("ttft", 99), both.refused_ns("ttft", 95)) == (20 * MS, None)
    lag = checked("lag", sent_late, replace(POISSON, client_loop_lag_ns=read_late))
    assert lag.status == BROKEN and "may be generator lag and late reading" in lag.text
    assert "refused, because too much may be the load tester's lateness: p99 TTFT" in lag.text
    lag = checked("lag", sent_late, POISSON)
    assert lag.status != BROKEN and "late reading" not in lag.text
    alone = streamed([5.0], [1], stamped=1.0).assign(sent_ns=sent_late["sent_ns"])
    assert lateness_of(alone, read_late).refused_ns("ttft", 99) is None, "the kernel stamped each first token by itself"


@pytest.mark.parametrize(
    ("late", "expected", "about"), [(3, OK, "of p90 TTFT"), (40, WARN, "of p99 TTFT"), (200, WARN, "of p90 TTFT")]
)
def test_a_warning_of_lateness_is_about_a_figure_that_is_told(late: int, expected: str, about: str) -> None:
    """1,500 requests tell no p99.9; of the others the sentence names the one that is refused."""
    requests = poisson_run()
    requests.loc[np.random.default_rng(3).permutation(len(requests))[:late], "sent_ns"] += 8 * MS
    lag = checked("lag", requests, POISSON, judge([slo("ttft", 90.0, 100)], requests, {}))
    assert (lag.status, about in lag.text) == (expected, True)


def test_a_percentile_that_an_slo_names_is_said_to_be_refused_of_every_metric_of_which_it_is() -> None:
    requests, evidence = streamed([5.0] * 31, [1] * 31), replace(POISSON, client_loop_lag_ns=SOMETIMES_HELD)
    answers = judge([slo("ttft", 97, 999)], requests, {})
    assert "p97 ITL" in checked("loop_lag", requests, evidence, answers).text


@pytest.mark.parametrize("limits_ms", [(49, 100), (100, 49)])
def test_a_percentile_with_two_limits_breaks_the_rule_where_either_is_not_judged(limits_ms: tuple[int, int]) -> None:
    """TTFT is 50 ms at p90, of which 8 ms may be lag."""
    requests = poisson_run()
    requests.loc[np.random.default_rng(3).permutation(len(requests))[:200], "sent_ns"] += 8 * MS
    limits = [slo("ttft", 90, limit) for limit in limits_ms]
    answers = judge(limits, requests, {}, lateness=lateness_of(requests, None))
    assert [answer.status for answer in answers] == ["INVALID" if limit == 49 else "PASS" for limit in limits_ms]
    assert checked("lag", requests, POISSON, answers).status == BROKEN


def test_a_figure_that_lateness_can_also_shorten_is_met_only_by_more_than_that() -> None:
    """Its first token was read late: TPOT is shorter than it was."""
    requests = streamed([5.0] * 31, [1] * 31, 0.0)
    lateness = lateness_of(requests, SOMETIMES_HELD)
    late_ms = lateness.refused_ns("tpot", 99) or 0.0
    for limit_ms, status in ((5.1, "INVALID"), (5.1 + late_ms / MS, "PASS")):
        (answer,) = judge((slo("tpot", 99, limit_ms),), requests, {}, lateness=lateness)
        assert answer.status == status


def test_an_answer_that_is_open_may_be_so_by_lateness_alone() -> None:
    """A hundred answers with a TPOT of 5 ms, up to 0.9 ms of it by late reading: too few to meet a p99."""
    requests = streamed([5.0] * 31, [1] * 31).head(100)
    lateness = lateness_of(requests, SOMETIMES_HELD)
    for limit_ms, status in ((4.5, "INVALID"), (5.5, "INVALID"), (20, "INCONCLUSIVE")):
        (answer,) = judge((slo("tpot", 99, limit_ms),), requests, {}, lateness=lateness)
        assert answer.status == status


@pytest.mark.parametrize(
    ("metric", "percentile", "shorter"),
    [("tpot", 99, True), ("itl", 50, True), ("itl", 99, False), ("ttft", 50, False), ("e2e", 99, False)],
)
def test_late_reading_can_shorten_what_begins_with_it(metric: str, percentile: float, shorter: bool) -> None:
    """A read of several tokens makes a slow gap slower."""
    assert shortens(metric, percentile) is shorter


def test_a_limit_that_is_missed_by_less_than_the_lateness_is_not_judged() -> None:
    """TTFT is 350 ms at p99, of which 30 ms are lag: too little to refuse it, too much for a limit of 335 ms."""
    requests = poisson_run()
    requests["first_token_ns"] = requests["sent_ns"] + np.resize([320 * MS, 300 * MS], len(requests))
    late = np.where(np.arange(len(requests)) % 10, 0, 30 * MS)
    for name in ("sent_ns", "first_token_ns", "last_token_ns"):
        requests[name] += late
    limits = [slo("ttft", 99, limit) for limit in (300, 335, 400)]
    answers = judge(limits, requests, {}, lateness=lateness_of(requests, None))
    assert [answer.status for answer in answers] == ["FAIL", "INVALID", "PASS"]
    assert not_judged(answers[1]) == "p99 TTFT is not judged: up to 30.1 ms of it may be the load tester's own lateness"


def test_what_a_figure_is_refused_for_is_no_less_than_what_else_of_it_may_be_lateness() -> None:
    """TTFT is 6.8 ms: read 1.2 ms late, which refuses it, and sent 1.8 ms late, which alone would not."""
    requests = poisson_run(lag_ms=1.8)
    requests["first_token_ns"] = requests["sent_ns"] + 5 * MS
    lateness = lateness_of(requests, np.full(500, 1.2 * MS))
    assert lateness.refused_ns("ttft", 99) == lateness.may_be_ns("ttft", 99) == 1.8 * MS
    (answer,) = judge((slo("ttft", 99, 5.3),), requests, {}, lateness=lateness)
    assert (answer.status, answer.late) == ("INVALID", 1.8)


@pytest.mark.parametrize(("here", "shared"), [(True, None), (False, False)])
def test_nobody_knows_the_cores_of_a_server_attached_to_on_this_machine(here: bool, shared: bool | None) -> None:
    server = {"engine": "attach", "url": "http://192.168.0.7:8000"}
    about = manifest(scenario={"server": server}, placement={"server": [], "shared": False}, server_here=here)
    requests = poisson_run().assign(measured=True)
    assert evidence_of(about, (), requests, ()).cores_shared is shared
    assert evidence_of(manifest(), (), requests, ()).cores_shared is not None


@pytest.mark.parametrize("limit_ms", [1, 400])
def test_a_refused_figure_that_decides_its_limit_even_so_is_shown_as_refused(limit_ms: int) -> None:
    """TTFT is 320 ms at most, of which up to 60 ms is lag: more than a tenth."""
    requests = poisson_run(lag_ms=60)
    requests["first_token_ns"] = requests["sent_ns"] + np.resize([200 * MS, 260 * MS], len(requests))
    (answer,) = judge((slo("ttft", 99, limit_ms),), requests, {}, lateness=lateness_of(requests, None))
    assert (answer.status, answer.late) == ("FAIL" if limit_ms == 1 else "PASS", 60.0)
    assert (slo_value(answer), slo_interval(answer)) == ("refused", "at most 320 ms (98 % sure)")
    assert gauge(answer).value is None
    assert (answer.value, answer.low, answer.high) == (None, None, None), "nor has the result what is not shown"
    assert "p99 TTFT refused, since up to 60.0 ms of it may be" in slo_sentence(answer)


@pytest.mark.parametrize(("limit_ms", "verdict"), [(310, "fails"), (335, "invalid"), (400, "holds")])
def test_a_trial_that_lateness_may_have_failed_is_no_measurement(limit_ms: int, verdict: str) -> None:
    """All are sent 30 ms late, which is too little to refuse 350 ms; at 335 ms they are beyond the limit by less."""
    requests = poisson_run(lag_ms=30)
    requests["first_token_ns"] = requests["sent_ns"] + np.resize([300 * MS, *[320 * MS] * 9], len(requests))
    assert trial_verdict(requests, POISSON, slo("ttft", 99, limit_ms)) == verdict


def test_a_limit_that_is_smaller_than_what_was_read_late_is_not_met() -> None:
    """Answers of two tokens, 5 ms apart, read up to 30 ms late; then five of them, read 600 ms late."""
    requests = streamed([5.0], [1])
    held = replace(POISSON, client_loop_lag_ns=SOMETIMES_HELD)
    assert trial_verdict(requests, held, slo("tpot", 99, 6)) == "invalid"
    lateness = lateness_of(requests.head(5), np.full(100, 600.0 * MS))
    (answer,) = judge((slo("tpot", 50, 6),), requests.head(5), {}, lateness=lateness)
    assert answer.status == "INVALID"


def test_a_trial_that_is_not_judged_names_the_limit_that_lateness_may_have_kept() -> None:
    """TTFT holds in spite of it, as lateness only adds to that; TPOT may be longer than it was read to be."""
    limits = slo("ttft", 99, 80), slo("tpot", 99, 6)
    requests = streamed([5.0], [1])
    found = trial(requests, replace(POISSON, client_loop_lag_ns=SOMETIMES_HELD), *limits)
    late = lateness_of(requests, SOMETIMES_HELD).refused_ns("tpot", 99) or 0.0
    assert found.outcome.invalid == f"{limits[1].text} is not judged: {late_words(late / MS)}"


NOTE = TrialNote(rate=20.0, folder=".", looks=(1500,), ended=1, from_ns=0, seconds=75.0)
TTFT = slo("ttft", 99, 900)


def outcome(requests: pd.DataFrame, evidence: Evidence, *limits: Slo, **note: object) -> Outcome:
    """Of a trial that had these requests; all at one look unless noted otherwise."""
    whole = requests.assign(
        measured=requests.get("measured", True), index=np.arange(len(requests)), end_ns=requests["last_token_ns"]
    )
    return outcome_of(whole, evidence, limits, NOTE.model_copy(update=note))


def trial(requests: pd.DataFrame, evidence: Evidence, *limits: Slo) -> Trial:
    """One that had these requests."""
    looks = plan_looks(limits, len(requests), 20)
    found = outcome(requests, evidence, *limits, looks=tuple(look.count for look in looks), ended=len(looks))
    return Trial(20.0, found, find(limits, found.counts, looks[-1]), looks[-1].count)


def trial_verdict(requests: pd.DataFrame, evidence: Evidence, limit: Slo) -> str:
    """Of a trial that had these requests; one that is no measurement is so by the load tester's own lateness."""
    found = trial(requests, evidence, limit)
    assert found.outcome.client_limit is (found.verdict == "invalid")
    assert ("may be the load tester's own lateness" in found.outcome.invalid) is (found.verdict == "invalid")
    return found.verdict


@pytest.mark.parametrize("rule", ["output", "prompt", "awake"])
def test_a_trial_of_other_requests_than_asked_for_or_with_a_suspended_machine_is_no_measurement(rule: str) -> None:
    requests, evidence = poisson_run(), POISSON
    if rule == "awake":
        evidence = replace(POISSON, suspended_ns=10**9)
    else:
        requests[f"{rule}_tokens"] = requests[f"{rule}_tokens_asked"] - 1
    found = outcome(requests, evidence, TTFT)
    told = "suspended" if rule == "awake" else f"{rule}s had a different length than asked for"
    assert told in found.invalid
    assert not found.client_limit
    said = validity.invalid_reasons(validity.check_run(requests, evidence))
    assert said == [found.invalid], "as its own page says"


@pytest.mark.parametrize(("measured", "lacked"), [(True, True), (False, True), (True, False)])
def test_a_trial_that_broke_off_is_no_measurement_and_the_load_tester_s_limit_where_its_machine_lacked_something(
    *, measured: bool, lacked: bool
) -> None:
    """Whether or not its warm-up was over by then; what was in flight counts as no failure of the server."""
    requests = poisson_run().assign(measured=measured, outcome="aborted")
    evidence = replace(POISSON, incomplete="generator process 0 failed", lacked=lacked)
    found = outcome(requests, evidence, TTFT)
    assert (found.invalid, found.client_limit) == ("generator process 0 failed", lacked)
    of_the_server = outcome(requests, evidence, TTFT, died="it died")
    assert (of_the_server.died, of_the_server.client_limit) == ("it died", False)


@pytest.mark.parametrize(("dispersion", "factor"), [(None, 1.0), (0.0, 1.0), (1.0, 1.0), (16.0, 8.5)])
def test_a_trial_of_arrivals_in_bursts_meets_fewer_spells(dispersion: float | None, factor: float) -> None:
    assert outcome(poisson_run(), replace(POISSON, count_dispersion=dispersion), TTFT).bunched == factor


@pytest.mark.parametrize(("again", "verdict"), [(False, "holds"), (True, "undecided")])
def test_a_trial_keeps_an_slo_on_errors_only_if_it_would_with_every_resent_request_counted_as_failed(
    again: bool, verdict: str
) -> None:
    """One in twenty was sent a second time, as where a busy server closes connections that it has read from."""
    requests = poisson_run()
    requests = requests.assign(attempt=again * (np.arange(len(requests)) % 20 == 0).astype(int))
    assert trial_verdict(requests, POISSON, slo("errors", None, 0.01)) == verdict


@pytest.mark.parametrize(("failing", "known"), [(0.0, True), (0.03, True), (0.3, False)])
def test_a_trial_shows_that_the_server_is_full_though_some_requests_failed(failing: float, known: bool) -> None:
    """A place that takes 100 ms for each, asked for 20 a second. Who fails more than may fail may have refused them."""
    requests, rng = poisson_run(400), np.random.default_rng(1)
    failed, took = rng.random(400) < failing, rng.integers(80 * MS, 120 * MS, 400)
    due, done = requests["due_ns"].to_numpy(), np.zeros(400, dtype=np.int64)
    for at in np.flatnonzero(~failed):
        done[at] = max(due[at], done.max()) + took[at]
    requests = requests.assign(
        first_token_ns=np.where(failed, due + MS, done), last_token_ns=np.where(failed, due + MS, done),
        outcome=np.where(failed, "cut", "ok"),
    )  # fmt: skip
    found = trial(requests, POISSON, slo("e2e", 90, 5_000), slo("errors", None, 0.05)).outcome
    assert (found.served is not None and found.served.saturated) is known
    if found.served:
        assert found.served.rate == pytest.approx(10 / (1 - failing), rel=0.03)
        assert found.counts[0].stable < 0.01, "fewer completed than were asked for, beside those that failed"


def test_a_trial_in_which_an_slo_s_metric_never_occurred_is_no_measurement() -> None:
    """Answers of one token have no TPOT: whatever the rate, nobody would know whether its limit is kept."""
    requests = poisson_run().assign(output_tokens=1, output_tokens_asked=1)
    requests["last_token_ns"] = requests["first_token_ns"]
    limits = (TTFT, slo("tpot", 99, 30))
    found = outcome(requests, POISSON, *limits)
    assert (found.invalid, found.client_limit) == ("p99 TPOT never occurred: no request had one", False)
    assert found.invalid == not_judged(judge(limits, requests, {})[1]), "as its own page says"


@pytest.mark.parametrize(
    ("outcomes", "status", "refused"),
    [
        (["http_5xx", "malformed"], 500, True),
        (["http_4xx"], 400, True),
        (["http_4xx"], 429, False),
        (["http_5xx", "timeout"], 500, False),
        (["http_5xx", "ok"], 500, False),
    ],
)
def test_a_trial_is_refused_where_errors_alone_came_that_no_load_explains(
    outcomes: list[str], status: int, refused: bool
) -> None:
    requests = poisson_run().assign(outcome=np.resize(outcomes, 1500), status=status)
    assert outcome(requests, POISSON, slo("ttft", 99, 300)).refused_all is refused


@pytest.mark.parametrize(
    ("rule", "first_ms", "late_ms", "expected"),
    [
        # Of a quick answer too little to speak of.
        ("lag", 5, 0.9, OK),
        ("lag", 5, 1.1, WARN),
        ("lag", 5, 1.9, WARN),
        ("lag", 5, 2.1, BROKEN),
        ("loop_lag", 5, 0.45, OK),
        ("loop_lag", 5, 0.55, WARN),
        ("loop_lag", 5, 0.95, WARN),
        ("loop_lag", 5, 1.05, BROKEN),
        # Of a slow one 2 % and 10 %.
        ("lag", 500, 9.5, OK),
        ("lag", 500, 11, WARN),
        ("lag", 500, 54, WARN),
        ("lag", 500, 57, BROKEN),
        ("loop_lag", 500, 9.5, OK),
        ("loop_lag", 500, 11, WARN),
        ("loop_lag", 500, 49, WARN),
        ("loop_lag", 500, 51, BROKEN),
    ],
)
def test_lateness_is_warned_of_from_a_fiftieth_and_refused_from_a_tenth_of_a_figure(
    rule: str, first_ms: float, late_ms: float, expected: str
) -> None:
    requests, evidence = poisson_run(lag_ms=late_ms if rule == "lag" else 0.05), POISSON
    requests["first_token_ns"] = requests["sent_ns"] + first_ms * MS
    requests["last_token_ns"] = requests["first_token_ns"] + 250 * MS
    if rule == "loop_lag":
        evidence = replace(POISSON, client_loop_lag_ns=np.full(500, late_ms * MS))
    answers = judge([slo("ttft", 99.0, 1)], requests, {})
    unjudged = [answer.model_copy(update={"status": "INVALID", "late": late_ms}) for answer in answers]
    assert checked(rule, requests, evidence, unjudged).status == expected


def test_a_generator_that_falls_behind_is_caught_by_the_delivered_rate() -> None:
    requests = poisson_run()
    behind = (requests["due_ns"] - requests["due_ns"].min()) // 20
    requests["sent_ns"] = requests["due_ns"] + behind
    found = states(requests, POISSON)
    assert found["delivered"] == BROKEN
    assert found["rate"] == OK


@pytest.mark.parametrize("at", [slice(0, 2), slice(99, 101), slice(198, 200)], ids=["start", "middle", "end"])
def test_one_stall_is_no_other_rate_wherever_it_falls(at: slice) -> None:
    """Two of 200 requests leave 0.2 s late, 2 % of the ten seconds that the run lasts."""
    requests = poisson_run(count=200)
    requests.loc[requests.index[at], "sent_ns"] += 200 * MS
    assert checked("delivered", requests, POISSON).status == OK
    never = np.arange(200) % 20 == 0
    requests.loc[never, "sent_ns"] = -1
    assert checked("delivered", requests, POISSON).status == BROKEN


@pytest.mark.parametrize("together", [1, 150], ids=["here and there", "for a while"])
def test_connections_that_a_server_refused_are_no_lateness_of_the_load_tester(together: int) -> None:
    """An SLO on errors has to judge them: a rule that is broken would leave it no verdict."""
    requests = poisson_run()
    refused = (np.arange(len(requests)) // together) % (20 if together == 1 else 5) == 0
    requests["connect_start_ns"] = np.where(refused, requests["sent_ns"], -1)
    requests.loc[refused, ["sent_ns", "first_token_ns", "last_token_ns"]] = -1
    requests.loc[refused, "outcome"] = "refused"
    found = states(requests, replace(POISSON, slo_on_errors=True))
    assert found.pop("errors") == WARN
    assert set(found.values()) == {OK}
    assert arrivals.sent_rate(requests) < 20, "what was sent is told as it was"


def test_a_server_that_does_not_accept_connections_is_no_lateness_of_the_load_tester() -> None:
    requests = poisson_run()
    called = requests["sent_ns"].copy()
    waited = np.where(np.arange(len(requests)) % 3 == 0, 2000, 1) * MS
    requests = requests.assign(connect_start_ns=called, connect_end_ns=called + waited)
    for stamp in ("sent_ns", "first_token_ns", "last_token_ns"):
        requests[stamp] += waited
    assert set(states(requests, POISSON).values()) == {OK}
    (warning,) = connect_warning(requests)
    assert "500 of 1,500 requests (33 %) waited 900 ms or more until the server accepted" in warning.text
    assert "given up" not in warning.text
    never = np.arange(len(requests)) % 6 == 0  # half of those that waited
    requests.loc[never, ["connect_end_ns", "sent_ns", "first_token_ns", "last_token_ns"]] = -1
    requests.loc[never, "outcome"] = "timeout"
    (warning,) = connect_warning(requests.assign(end_ns=requests["due_ns"] + 9000 * MS))
    assert "500 of 1,500 requests (33 %) waited 900 ms or more" in warning.text
    assert warning.text.endswith("in time, and 250 were given up before it did")
    assert not list(connect_warning(poisson_run()))


def test_a_few_late_turns_of_conversations_are_not_excused_by_how_few_conversations_there_are() -> None:
    requests = poisson_run(count=400).assign(turn=np.arange(400) % 20 + 1)
    requests["sent_ns"] = requests["due_ns"] + (requests["due_ns"] - requests["due_ns"].min()) // 50
    assert states(requests, replace(POISSON, unit="conversations", requested_rate=None))["delivered"] == BROKEN


@pytest.mark.parametrize("law", ["poisson", "constant"])
def test_bunched_arrivals_are_not_what_was_asked_for(law: str) -> None:
    rng = np.random.default_rng(1)
    due = 10**12 + np.repeat(np.cumsum(rng.exponential(0.25e9, 300)), 5).astype(np.int64)
    assert states(run(due, due), replace(POISSON, arrivals=law))["dispersion"] == BROKEN
    assert arrivals.dispersion(run(due, due)) == pytest.approx(5, rel=0.35)


def test_evenly_spaced_arrivals_are_no_poisson_process() -> None:
    due = 10**12 + np.arange(1500, dtype=np.int64) * 50 * MS
    assert states(run(due, due), POISSON)["dispersion"] == BROKEN
    assert states(run(due, due), replace(POISSON, arrivals="constant"))["dispersion"] == OK


def test_bursty_gamma_arrivals_may_stray_further_from_the_rate() -> None:
    refused = 0
    for seed in range(80):
        gaps = np.random.default_rng(seed).gamma(0.25, 0.05 / 0.25, 300) * 1e9
        due = 10**12 + np.cumsum(gaps).astype(np.int64)
        refused += states(run(due, due), replace(POISSON, arrivals="gamma", count_dispersion=4.0))["rate"] == BROKEN
    assert refused == 0


def test_bursts_whose_curve_is_too_long_for_the_manifest_may_stray_as_far_as_the_plan_lets_expect() -> None:
    rng, refused = np.random.default_rng(3), 0
    for _ in range(40):
        bursts = np.cumsum(rng.exponential(0.5e9, 40)).repeat(10)  # ten requests each, 20 a second on average
        due = 10**12 + (bursts + rng.uniform(0, 1e6, 400)).astype(np.int64)
        refused += states(run(np.sort(due), np.sort(due)), replace(ON_OFF, count_dispersion=10.0))["rate"] == BROKEN
    assert refused == 0


@pytest.mark.parametrize(
    ("held_s", "status", "users"),
    [
        ((0.0, 0.0), OK, 4.0),
        ((3.0, 3.5), WARN, 3.8),
        ((3.0, 6.0), BROKEN, 2.8),
        ((6.0, 9.5), BROKEN, 2.6),
        ((9.9, 13.9), OK, 4.0),
    ],
    ids=[
        "never",
        "half a second of ten",
        "three seconds",
        "until shortly before the end",
        "when the last had been sent",
    ],
)
def test_users_whose_answers_are_read_late_are_fewer_than_were_asked_for(
    held_s: tuple[float, float], status: str, users: float
) -> None:
    """The kernel's stamps keep the wait out of every latency; the server had fewer requests meanwhile."""
    begin, end = (int(each * 1e9) for each in held_s)
    due, waits = [], []
    for user in range(4):
        at = user * 25 * MS
        while at < 10_000 * MS:
            due.append(at)
            answered = at + 100 * MS
            waits.append(end - answered if begin <= answered < end else 20_000)
            at = answered + waits[-1]
    order = np.argsort(due)
    came = np.array(due)[order] + 10**12
    requests = run(came, came + 50_000).assign(
        end_ns=came + 100 * MS + np.array(waits)[order],
        receive_wait_ns=[np.array([9_000, waits[k]], np.uint32) for k in order],
        token_ns=[np.array([at + 50 * MS]) for at in came], chunk_tokens=[np.array([1])] * len(came),
    )  # fmt: skip
    delivered = checked("delivered", requests, users_of(4))
    assert (delivered.status, delivered.value, delivered.limit) == (status, pytest.approx(users, abs=0.05), 4)


@pytest.mark.parametrize(("think_ns", "shows"), [(0, False), (50 * MS, True)])
def test_a_stall_lengthens_the_latency_of_users_who_were_to_ask_meanwhile(think_ns: int, shows: bool) -> None:
    """Their requests are due a think time after an answer, and without one as soon as that is read."""
    requests = poisson_run()
    requests = requests.assign(
        receive_wait_ns=[np.array([9_000], np.uint32)] * len(requests), chunk_tokens=[np.array([1])] * len(requests),
        token_ns=[np.array([at]) for at in requests["last_token_ns"]], end_ns=requests["last_token_ns"] + 9_000,
    )  # fmt: skip
    lag_ns = np.append(np.full(500, 0.1e6), 400e6)
    check = checked("loop_lag", requests, users_of(8, think_time_ns=think_ns, client_loop_lag_ns=lag_ns))
    assert check.text.startswith("event loop lag p99 0.100 ms; it once stalled for 400 ms"), "not of what it left alone"
    assert ("which shows in maxima" in check.text) is shows


@pytest.mark.parametrize("count", [1, 8])
def test_of_users_who_asked_once_nobody_can_tell_how_many_could_have_asked_again(count: int) -> None:
    due = 10**12 + np.arange(count) * MS
    delivered = checked("delivered", run(due, due + 3 * MS), users_of(8))
    assert delivered.status == UNMEASURED
    assert "8 users" in delivered.text


def test_users_are_at_most_held_up_all_the_time() -> None:
    due = 10**12 + np.array([0, 1, 2, 9]) * MS
    assert checked("delivered", run(due, due + 30 * MS), users_of(3)).value == pytest.approx(3 - 24 / 9)


@pytest.mark.parametrize(("users", "said"), [(1, "1 user was asked for; "), (2, "2 users were asked for; ")])
def test_one_user_was_asked_for_not_one_users_were(users: int, said: str) -> None:
    assert checked("delivered", poisson_run(), users_of(users)).text.startswith(said)


def test_a_closed_loop_has_no_rate_to_keep() -> None:
    found = states(poisson_run(), users_of(8))
    assert "rate" not in found
    assert "dispersion" not in found


@pytest.mark.parametrize(
    ("failed", "slo_on_errors", "expected"),
    [(0, False, OK), (14, False, OK), (16, False, WARN), (150, False, WARN), (151, False, BROKEN), (200, True, WARN)],
)
def test_many_failures_spoil_a_run_unless_an_slo_judges_them(failed: int, slo_on_errors: bool, expected: str) -> None:
    requests = poisson_run()
    requests.loc[: failed - 1, "outcome"] = "http_5xx"
    found = checked("errors", requests, replace(POISSON, slo_on_errors=slo_on_errors))
    assert found.status == expected
    assert ("http_5xx" in found.text) == (failed > 0)


def test_of_failures_the_most_frequent_class_is_said_with_how_many_it_has() -> None:
    requests = poisson_run()
    requests.loc[:9, "outcome"], requests.loc[10:19, "outcome"] = "http_5xx", "cut"
    assert ", 10 of them http_5xx)" in checked("errors", requests, POISSON).text, "as many were cut"


@pytest.mark.parametrize("side", ["output", "prompt"])
@pytest.mark.parametrize(
    ("wrong", "enforced", "expected"),
    [(0, True, OK), (1, True, WARN), (15, True, WARN), (16, True, BROKEN), (50, False, WARN)],
)
def test_lengths_other_than_asked_for_spoil_a_run_that_enforced_them(
    side: str, wrong: int, enforced: bool, expected: str
) -> None:
    requests = poisson_run()
    requests.loc[: wrong - 1, f"{side}_tokens"] = 7
    name = "output_enforced" if side == "output" else "prompt_exact"
    checks = validity.check_run(requests, replace(POISSON, **{name: enforced}))
    (found,) = (check for check in checks if check.rule == f"{side}_length")
    assert found.status == expected
    assert ("; 1.0 % allowed)" in found.text) is enforced, "any are allowed that nobody enforced"


@pytest.mark.parametrize(
    ("tokens", "reason", "could_be_plain", "cause", "flag"),
    [
        (40, "stop", True, "does not keep to max_tokens", ""),
        (3, "stop", True, "ended answers on its own", "--set server.dialect=plain"),
        (3, "stop", False, "ended answers on its own", ""),
        (3, None, False, "ended answers on its own", ""),
        (3, "content_filter", True, "ended with finish_reason 'content_filter'", ""),
        (3, "", True, "ended without a finish_reason", ""),
    ],
)
def test_why_answers_had_another_length_is_said_by_its_direction_and_their_own_word(
    tokens: int, reason: str | None, could_be_plain: bool, cause: str, flag: str
) -> None:
    requests = poisson_run().assign(output_tokens=tokens, finish_reason=reason)
    evidence = replace(POISSON, could_be_plain=could_be_plain)
    (warning,) = warned(requests, evidence)
    assert (warning.code, cause in warning.cause, warning.flag) == ("output_length", True, flag)


def test_that_prompts_counted_in_words_had_another_length_is_told_once_by_the_plan() -> None:
    requests = poisson_run().assign(prompt_tokens=7)
    (warning,) = warned(requests, POISSON)
    assert "another tokenizer" in warning.cause and warning.flag == "--tokenizer PATH"
    assert warned(requests, replace(POISSON, prompt_exact=False)) == []


def test_why_answers_were_cut_short_is_asked_of_those_alone() -> None:
    short = np.arange(1500) % 10 == 0
    requests = poisson_run().assign(
        output_tokens=np.where(short, 3, 32), finish_reason=np.where(short, "content_filter", "length")
    )
    (warning,) = warned(requests, POISSON)
    assert "ended with finish_reason 'content_filter'" in warning.cause


def test_lengths_that_no_server_reported_are_unmeasured() -> None:
    requests = poisson_run().assign(output_tokens=pd.array([None] * 1500, dtype="Int64"))
    assert states(requests, POISSON)["output_length"] == UNMEASURED


def test_a_run_without_a_measured_request_is_no_measurement() -> None:
    checks = validity.check_run(poisson_run().iloc[:0], POISSON)
    assert validity.invalid_reasons(checks) == ["no request was issued after the warm-up"]


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({}, "--set load.processes=2"),
        ({"workers": 3}, "--workers 4"),
        ({"client_cpu_share": 0.03}, ""),
        ({"locustfile": "users.py"}, ""),
        ({"concurrency": 1}, ""),
    ],
)
def test_more_processes_are_advised_where_they_can_be_and_would_help(change: dict[str, Any], flag: str) -> None:
    evidence = replace(POISSON, **{"client_cpu_share": 0.6, "client_loop_lag_ns": np.full(500, 60e6)} | change)
    told = warned(poisson_run(), evidence)
    assert [w.flag for w in told if w.code == "loop_lag"] == [flag]


def test_chance_alone_hardly_ever_breaks_the_rule_of_the_rate() -> None:
    rng = np.random.default_rng(5)
    for count in (3, 20, 100):
        drawn = 10**12 + np.cumsum(rng.exponential(1e9 / 20, (4000, count)), axis=1)
        rates = (count - 1) * 1e9 / (drawn[:, -1] - drawn[:, 0])
        broken = sum(arrivals._rate(rate, 20.0, count, POISSON).status == BROKEN for rate in rates.tolist())
        assert broken <= 5  # 0.4 are expected
        assert arrivals._rate(20.0 * 8, 20.0, max(count, 10), POISSON).status == BROKEN


def test_a_few_bunched_arrivals_may_come_at_any_rate() -> None:
    bunched = replace(POISSON, arrivals="gamma", count_dispersion=400.0)
    found = arrivals._rate(20.0, 16.0, 5, bunched)
    assert (found.status, found.text.endswith("and any more)")) == (OK, True)


def test_one_conversation_has_no_rate_that_could_be_wrong() -> None:
    requests = poisson_run(count=4).assign(turn=[1, 2, 3, 4])
    assert states(requests, replace(POISSON, arrivals="constant", unit="conversations"))["rate"] == UNMEASURED


def test_a_warning_names_a_flag_that_can_be_typed_as_it_stands() -> None:
    evidence = replace(POISSON, client_cpu_share=0.95, processes=2)
    requests = poisson_run()
    requests.loc[:199, "outcome"] = "timeout"
    told = warned(requests.assign(status=0), evidence)
    flags = {w.code: w.flag for w in told}
    assert flags == {"client_cpu": "--set load.processes=3", "errors": "--set load.rate=10"}


def test_a_rate_that_stands_elsewhere_is_not_halved_by_a_flag_that_would_be_refused() -> None:
    requests = poisson_run()
    requests.loc[:199, "outcome"] = "timeout"
    evidence = replace(POISSON, arrivals="steps")
    (told,) = [w for w in warned(requests, evidence) if w.code == "errors"]
    assert told.flag == ""


@pytest.mark.parametrize("count", [0, 1, 2, 40])
def test_few_requests_leave_rate_and_dispersion_unmeasured_without_an_error(count: int) -> None:
    requests = poisson_run().iloc[:count]
    assert arrivals.dispersion(requests) is None
    assert (arrivals.sent_rate(requests) is None) == (count < 2)


def test_requests_that_were_never_sent_count_in_no_rate() -> None:
    requests = poisson_run()
    requests.loc[700:, "sent_ns"] = -1
    assert arrivals.sent_rate(requests) == pytest.approx(arrivals.sent_rate(requests.iloc[:700]))
    assert arrivals.dispersion(requests) == arrivals.dispersion(requests.iloc[:700])


@pytest.mark.parametrize(
    ("per_s", "reached", "expected"),
    [(100, True, OK), (75, True, OK), (60, True, WARN), (49, True, BROKEN), (49, False, WARN), (100, False, OK)],
)
@pytest.mark.parametrize(("rule", "thing"), [("request_rate", "requests"), ("token_rate", "tokens")])
def test_a_run_near_the_clients_limit_warns_and_one_beyond_it_is_invalid(
    rule: str, thing: str, per_s: float, reached: bool, expected: str
) -> None:
    due = 10**12 + np.arange(1000, dtype=np.int64) * 20 * MS  # 50 requests in every second
    requests = run(due, due).assign(token_ns=[np.array([at + 50 * MS]) for at in due])
    limit = CalibratedLimit(per_s=per_s, ended_by="client" if reached else "server")
    floor = FLOOR.model_copy(update={thing: limit})
    assert states(requests, replace(POISSON, floor=floor))[rule] == expected


def test_each_generator_process_is_held_to_its_own_limit() -> None:
    due = 10**12 + np.arange(1000, dtype=np.int64) * 20 * MS
    requests = run(due, due).assign(token_ns=[np.array([at, at]) for at in due])
    assert busiest_second(requests) == (100, 50)
    assert busiest_second(requests.assign(worker=np.arange(1000) % 2)) == (50, 25)


def test_a_machine_that_was_not_calibrated_leaves_the_limit_unmeasured_and_says_what_to_type() -> None:
    check = checked("floor", poisson_run(), replace(POISSON, floor=None))
    assert check.status == UNMEASURED
    assert "gapmeter calibrate" in check.text


def test_the_floor_is_that_of_the_generator_in_the_run() -> None:
    machine = {"cpu": "c", "cores": 2, "system": "s", "python": "3", "gapmeter": "0"}
    known = {"machine": machine, "most_error_ms": 1.0, "generators": {"asyncio": FLOOR.to_json()}}
    assert floor_of(manifest(calibration=known)) == FLOOR
    assert floor_of(manifest(calibration=known, scenario={"load": {"generator": "locust"}})) is None
    assert floor_of(manifest()) is None
    assert floor_sentence(describe_floor(FLOOR)) == "floor p99 TTFT 0.400 ms, ITL 0.300 ms, E2E 0.400 ms"


@pytest.mark.parametrize("per_s", [0, -1])
def test_a_limit_of_nothing_is_no_limit(per_s: float) -> None:
    with pytest.raises(ValueError, match="greater than 0"):
        CalibratedLimit(per_s=per_s, ended_by="client")
