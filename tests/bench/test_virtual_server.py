"""The server in virtual time gives the answers that queueing theory knows, and those that arithmetic knows."""

from __future__ import annotations

import heapq
import itertools
import random
import statistics

import pytest

from bench.virtual_server import Arrival, Outcome, Settings, simulate
from gapmeter.servers.simulated.scheduler import Limits
from gapmeter.servers.simulated.settings import StageTimes

MS = 1_000_000
NOTHING = dict.fromkeys(
    (
        "template_ns", "tokenize_ns", "handoff_ns", "schedule_ns", "input_prep_ns", "forward_ns", "sampling_ns",
        "forward_prompt_token_ns", "forward_sequence_ns", "forward_kv_token_ns", "update_ns", "output_ns",
        "detokenize_ns", "egress_ns",
    ),
    0,
)  # fmt: skip


def times(**given: object) -> StageTimes:
    return StageTimes(**{**NOTHING, **given})  # type: ignore[arg-type]


def poisson(count: int, per_s: float, seed: int, output_tokens: int = 1) -> list[Arrival]:
    source, due, arrivals = random.Random(seed), 0.0, []
    for _ in range(count):
        due += source.expovariate(per_s)
        arrivals.append(Arrival(int(due * 1e9), 1, output_tokens))
    return arrivals


def wait_ms(outcomes: list[Outcome]) -> float:
    """Mean time from arrival to first scheduling: what queueing theory calls the wait."""
    return statistics.fmean(outcome.scheduled_ns - outcome.due_ns for outcome in outcomes) / MS


@pytest.mark.parametrize(
    ("load", "count", "jitter"),
    [(0.3, 6_000, 0.0), (0.3, 6_000, 0.6), (0.3, 6_000, 1.5), (0.7, 12_000, 0.0), (0.7, 12_000, 1.0)],
)
def test_the_mean_wait_for_one_server_is_pollaczek_and_khinchines(load: float, count: int, jitter: float) -> None:
    """M/G/1: W = λ E[S²] / (2 (1 − ρ)), where E[S²] = (1 + cv²) E[S]²."""
    service_ms = 10.0
    settings = Settings(Limits(max_sequences=1), times(forward_ns=int(service_ms * MS), jitter=jitter, seed=5))
    waits = [wait_ms(simulate(poisson(count, load * 100, seed), settings)) for seed in range(2)]
    expected = load * service_ms * (1 + jitter**2) / (2 * (1 - load))
    assert statistics.fmean(waits) == pytest.approx(expected, rel=0.13)


def test_one_at_a_time_each_request_starts_when_lindley_says() -> None:
    arrivals = poisson(2_000, 70, 4, output_tokens=3)
    outcomes = simulate(arrivals, Settings(Limits(max_sequences=1), times(forward_ns=4 * MS, update_ns=MS // 10)))
    free = 0
    for outcome in outcomes:
        assert outcome.scheduled_ns == max(outcome.due_ns, free)
        free = outcome.scheduled_ns + 3 * (4 * MS + MS // 10)
        assert outcome.last_token_ns == free


def test_many_short_steps_with_a_batch_of_k_are_k_servers() -> None:
    """Each request's wait is Kiefer and Wolfowitz's on the same arrivals, up to the steps' granularity."""
    servers, load, step, mean_steps = 4, 0.85, MS // 2, 40
    source = random.Random(8)
    arrivals = [
        Arrival(a.due_ns, 1, 1 + int(source.expovariate(1 / mean_steps)))
        for a in poisson(2_000, load * servers * 1e9 / (step * (mean_steps + 0.5)), 9)
    ]
    outcomes = simulate(arrivals, Settings(Limits(max_sequences=servers), times(forward_ns=step)))
    free = [0] * servers
    waits, errors = [], []
    for outcome, arrival in zip(outcomes, arrivals, strict=True):
        start = max(arrival.due_ns, heapq.heappop(free))
        heapq.heappush(free, start + arrival.output_tokens * step)
        waits.append(start - arrival.due_ns)
        errors.append(outcome.scheduled_ns - start)
    assert statistics.fmean(waits) > 10 * step  # it was a queue
    assert -2 * step < statistics.fmean(errors) < 2 * step


def test_a_lone_request_takes_the_sum_of_its_stages() -> None:
    outcome = simulate(
        [Arrival(5 * MS, 100, 3)],
        Settings(
            Limits(),
            times(
                template_ns=1 * MS, tokenize_ns=2 * MS, handoff_ns=3 * MS, schedule_ns=4 * MS, input_prep_ns=5 * MS,
                forward_ns=6 * MS, forward_prompt_token_ns=MS // 10, forward_sequence_ns=7 * MS,
                forward_kv_token_ns=1000, sampling_ns=8 * MS, update_ns=9 * MS, output_ns=10 * MS,
                detokenize_ns=11 * MS, egress_ns=12 * MS,
            ),
        ),
    )[0]  # fmt: skip
    host = 4 + 5 + 8 + 9
    first = 5 + (1 + 2 + 3) + host + (6 + 10) + (10 + 11 + 12)
    assert outcome.first_token_ns == first * MS
    assert outcome.added_ns == outcome.scheduled_ns == (5 + 6) * MS
    # The first token's chunk (23 ms) is over when the second's leaves the engine.
    assert [b - a for a, b in itertools.pairwise(outcome.token_ns)] == [
        host * MS + 13 * MS + kv * 1000 for kv in (101, 102)
    ]


def test_asynchronous_scheduling_hides_the_host_behind_the_forward() -> None:
    host_and_forward = times(schedule_ns=1 * MS, update_ns=2 * MS, forward_ns=10 * MS)
    gaps = {}
    for asynchronous in (False, True):
        limits = Limits(asynchronous=asynchronous)
        token_ns = simulate([Arrival(0, 10, 20)], Settings(limits, host_and_forward))[0].token_ns
        gaps[asynchronous] = {b - a for a, b in itertools.pairwise(token_ns[1:])}
    assert gaps == {False: {13 * MS}, True: {10 * MS}}


def test_evictions_delay_but_lose_nothing() -> None:
    arrivals = [Arrival(n * MS, 30, 40) for n in range(12)]
    outcomes = simulate(arrivals, Settings(Limits(kv_blocks=12), times(forward_ns=2 * MS)))
    assert sum(outcome.preemptions for outcome in outcomes) > 0
    assert {len(outcome.token_ns) for outcome in outcomes} == {40}
    assert all(list(o.token_ns) == sorted(set(o.token_ns)) for o in outcomes)


def test_a_cached_prefix_spares_its_part_of_the_prefill() -> None:
    named = tuple(range(4))
    arrivals = [Arrival(0, 70, 1, named), Arrival(500 * MS, 70, 1, named)]
    first, second = simulate(
        arrivals, Settings(Limits(prefix_caching=True), times(forward_ns=MS, forward_prompt_token_ns=MS))
    )
    assert (first.cached_tokens, second.cached_tokens) == (0, 64)
    assert (first.last_token_ns, second.last_token_ns - second.due_ns) == (71 * MS, 7 * MS)


def test_the_same_settings_give_the_same_outcomes_and_another_seed_others() -> None:
    arrivals = poisson(200, 20, 3, output_tokens=8)
    one, again = (simulate(arrivals, Settings(times=StageTimes(jitter=0.1, seed=4))) for _ in range(2))
    assert one == again
    assert one != simulate(arrivals, Settings(times=StageTimes(jitter=0.1, seed=5)))


@pytest.mark.parametrize(("given", "message"), [({"update_ns": -1}, "update_ns"), ({"jitter": -0.1}, "jitter")])
def test_times_that_cannot_be_are_refused_by_name(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StageTimes(**given)  # type: ignore[arg-type]
