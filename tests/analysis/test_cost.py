"""Cost at the SLO: the formula, its interval, and when there is none."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapmeter.analysis.cost import (
    NoPrice,
    NoRate,
    SearchTrial,
    cost_of,
    describe_cost,
    describe_economics,
    describe_energy,
    describe_search,
    describe_tokens,
    describe_value,
    hardware_units,
    offered_rate,
    price_of,
    searched_rate,
)
from gapmeter.analysis.judge.evidence import Evidence
from gapmeter.analysis.results.cost import Economy, Interval, NoEnergy, Price, SloRate, TokensPerRequest
from gapmeter.analysis.results.device import EnergyWindow
from gapmeter.analysis.results.manifest import Manifest
from gapmeter.analysis.results.requests import Goodput
from gapmeter.analysis.results.run import RunFigures, Verdict
from gapmeter.analysis.results.trust import Steady
from gapmeter.analysis.run_figures import RunTables, build_figures
from gapmeter.analysis.stats.exact import rate_at_least
from gapmeter.report.cost import cost_sentence, energy_sentence, price_words
from tests.kit import results as kit
from tests.kit.runs import simulate, slo

H100 = "NVIDIA H100 80GB HBM3, 81559 MiB, 570.1"


def tokens(output: float = 200.0, off: float = 10.0, total: Interval | None = None) -> TokensPerRequest:
    each = Interval(value=output, low=output - off, high=output + off)
    return TokensPerRequest(output=each, prompt=None, total=total)


def price(units: int = 1, usd: float = 2.0, utilisation: float = 0.5) -> Price:
    return Price(
        device="H100-SXM", units=units, usd_per_unit_hour=usd, source="the scenario's price", is_default=False,
        utilisation=utilisation, measured_on="", usd_per_hour=units * usd,
    )  # fmt: skip


def rate(low: float, high: float | None = None) -> SloRate:
    return SloRate(low=low, high=high, basis="offered" if high is None else "capacity")


TOKENS = tokens(total=Interval(value=1200.0, low=1150.0, high=1250.0))
ONE = price()
UNSTEADY = kit.steady("unsteady")


def manifest(
    cost: dict[str, Any] | None = None, gpus: tuple[str, ...] = (), here: bool | None = None, **server: Any
) -> Manifest:
    """One that a price comes from."""
    settings = {"gpu": None, "usd_per_hour": None, "gpus_per_replica": 1, "utilisation": 0.8, **(cost or {})}
    return kit.manifest(
        scenario={"cost": settings, "server": {"engine": "vllm", "precision": "bfloat16", **server}},
        hardware={"cores": 8, "gpus": list(gpus)},
        placement={"server": [2, 3, 4]},
        server_here=here,
    )


@pytest.fixture(scope="module")
def passed() -> RunFigures:
    """A run of 800 requests in 100 s that held its only SLO."""
    frames = simulate(1200, rate=8.0)
    evidence = Evidence("open", "poisson", 8.0, client_cpu_share=0.3)
    found = build_figures(RunTables(frames.requests, frames.ledger), [slo("ttft", 50.0, 500)], evidence)
    assert found.verdict == "PASS"
    load = found.load.model_copy(update={"window_s": 100.0, "dispersion": 1.1})
    return found.model_copy(update={"load": load, "counts": found.counts.model_copy(update={"measured": 800})})


def rate_of(run: RunFigures, steady: Steady | None = None) -> SloRate | NoRate:
    return offered_rate(run.verdict, run.slo, run.load, run.counts.measured, steady)


@pytest.mark.parametrize("verdict", ["INCONCLUSIVE", "FAIL"])
def test_what_no_verdict_would_give_a_cost_is_told_first(passed: RunFigures, verdict: Verdict) -> None:
    """An undecided closed loop sounded as if a longer run would have a cost."""
    for change, told in ({"loop": "closed"}, "a closed loop has"), ({"arrivals": "steps"}, "the rate changed"):
        run = passed.model_copy(update={"verdict": verdict, "load": passed.load.model_copy(update=change)})
        assert rate_of(run).why.startswith(told)


def test_a_request_costs_g_times_the_price_over_3600_times_the_rate_times_the_planned_utilisation() -> None:
    found = cost_of(rate(10.0, 12.5), price(4, 2.49, 0.8), TOKENS)
    assert found.per_request_usd == 4 * 2.49 / (3600 * 10.0 * 0.8)
    assert found.per_request_usd_ci == (4 * 2.49 / (3600 * 12.5 * 0.8), found.per_request_usd)
    assert found.per_million_output_tokens_usd == pytest.approx(found.per_request_usd / 200 * 1e6)
    low, high = found.per_million_output_tokens_usd_ci or (None, None)
    assert low == pytest.approx(4 * 2.49 / (3600 * 12.5 * 0.8) / 210 * 1e6)
    assert high == pytest.approx(4 * 2.49 / (3600 * 10.0 * 0.8) / 190 * 1e6)


@given(
    low=st.floats(1e-3, 1e4), factor=st.floats(1, 100), usd=st.floats(1e-3, 1e3), units=st.integers(1, 64),
    used=st.floats(0.01, 1),
)  # fmt: skip
def test_the_interval_holds_the_value_and_doubling_the_price_doubles_all_of_it(
    low: float, factor: float, usd: float, units: int, used: float
) -> None:
    once, twice = (cost_of(rate(low, low * factor), price(units, each, used), TOKENS) for each in (usd, 2 * usd))
    for name in ("per_request_usd", "per_million_output_tokens_usd", "per_million_total_tokens_usd"):
        one, two = ([*getattr(found, f"{name}_ci"), getattr(found, name)] for found in (once, twice))
        assert 0 < one[0] <= one[2] <= one[1]
        assert two == pytest.approx([2 * each for each in one])


def test_a_rate_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="a rate of 0"):
        cost_of(rate(0.0), ONE, TOKENS)


@pytest.mark.parametrize(
    ("settings", "gpus", "units", "usd", "device", "default"),
    [
        ({}, (), 3, 0.0408, "CPU", True),
        ({"usd_per_hour": 1.5}, (), 1, 1.5, "CPU", False),
        ({}, (H100,), 1, 1.69, "H100-SXM", True),
        ({"usd_per_hour": 2.49, "gpus_per_replica": 4}, (H100, H100), 4, 2.49, "H100-SXM", False),
        ({"gpu": "L4", "gpus_per_replica": 2}, (), 2, 0.7992, "L4", True),
        ({"usd_per_hour": 9.0}, ("Weird GPU 3000, 1 MiB, 1",), 1, 9.0, "Weird GPU 3000", False),
    ],
)  # fmt: skip
def test_the_price_is_the_scenario_s_own_or_the_catalogue_s_for_the_named_or_recognized_device(
    settings: dict[str, Any], gpus: tuple[str, ...], units: int, usd: float, device: str, default: bool
) -> None:
    found = price_of(manifest(settings, gpus))
    assert (found.units, found.usd_per_unit_hour, found.device, found.is_default) == (units, usd, device, default)
    assert found.usd_per_hour == units * usd


@pytest.mark.parametrize(
    ("flags", "gpus"),
    [({}, 1), ({"tensor_parallel_size": 4}, 4), ({"tensor-parallel-size": "2", "pipeline_parallel_size": 2}, 4),
     ({"tp": 8, "dp": 2}, 16), ({"tensor_parallel_size": "auto"}, 1)],
)  # fmt: skip
def test_a_model_that_is_split_over_gpus_costs_all_of_them(flags: dict[str, Any], gpus: int) -> None:
    assert price_of(manifest({"gpus_per_replica": None}, (H100,), args=flags)).units == gpus
    assert price_of(manifest({"gpus_per_replica": 3}, (H100,))).units == 3


def test_a_price_for_a_machine_without_a_gpu_is_for_all_of_it_however_a_model_is_split() -> None:
    split = manifest({"usd_per_hour": 1.5, "gpus_per_replica": None}, args={"tensor_parallel_size": 2})
    assert price_of(split).usd_per_hour == 1.5


def test_pricing_another_device_than_the_one_measured_is_said() -> None:
    other = price_of(manifest({"gpu": "L4"}))
    assert other.measured_on == "CPU"
    assert "Priced as L4, but measured on CPU" in cost_sentence(cost_of(rate(1.0), other, TOKENS))
    assert price_of(manifest({"gpu": "H100"}, (H100,))).measured_on == ""


def test_a_default_price_names_its_source_and_date() -> None:
    said = cost_sentence(cost_of(rate(1.0), price_of(manifest({}, (H100,))), TOKENS))
    assert "a default price (InferenceX, neocloud, 2026-04)" in said


def test_nobody_knows_the_price_of_a_gpu_outside_the_catalogue_or_of_somebody_else_s_server() -> None:
    with pytest.raises(NoPrice, match=r"Weird GPU 3000 is not in the catalogue; write cost.usd_per_hour"):
        price_of(manifest({}, ("Weird GPU 3000, 1 MiB, 1",)))
    with pytest.raises(NoPrice, match=r"device is unknown; set cost\.gpu"):
        price_of(manifest(engine="attach"))
    with pytest.raises(NoPrice, match=r"how many cores the attached server has; set cost\.usd_per_hour"):
        price_of(manifest({"gpu": "CPU"}, engine="attach"))
    assert price_of(manifest({"gpu": "CPU", "usd_per_hour": 0.5}, engine="attach")).usd_per_hour == 0.5


@pytest.mark.parametrize(("gpus", "what", "usd"), [(None, "1 x server at $3.00", 3.0), (4, "4 x GPU at $3.00", 12.0)])
def test_a_server_elsewhere_whose_price_was_said_needs_no_device(gpus: int | None, what: str, usd: float) -> None:
    """Whatever GPUs the load tester's own machine has."""
    settings = {"usd_per_hour": 3.0, "gpus_per_replica": gpus}
    for here in ((), (H100,), (H100, H100)):
        found = price_of(manifest(settings, here, engine="attach", url="http://10.0.0.5:8000"))
        assert (found.usd_per_hour, found.measured_on) == (usd, "")
        assert price_words(found).startswith(f"{what} an hour")


def test_a_server_that_was_attached_to_on_this_machine_costs_what_the_machine_s_gpu_does() -> None:
    attached = {"engine": "attach", "url": "http://192.168.0.7:8000", "here": True}
    one = manifest({"gpus_per_replica": None}, (H100,), **attached)
    found = price_of(one)
    assert (found.device, found.units, found.measured_on) == ("H100-SXM", 1, "")
    assert hardware_units(one) == (1, "GPU")
    two = manifest({"gpus_per_replica": None}, (H100, H100), **attached)
    with pytest.raises(NoPrice, match=r"how many of 2 GPUs .* set cost\.gpus_per_replica"):
        price_of(two)
    assert hardware_units(two) == (1, "server")
    with pytest.raises(NoPrice, match=r"how many cores the attached server has"):
        price_of(manifest(**attached))


def test_a_capacity_search_gives_both_ends_of_the_rate() -> None:
    found = searched_rate(8.0, 10.0)
    assert found == SloRate(low=8.0, high=10.0, basis="capacity")
    part = describe_cost(found, TOKENS, manifest({}, (H100,)))
    assert part.status == "bounded"
    assert part.per_request_usd_ci == (1.69 / (3600 * 10 * 0.8), 1.69 / (3600 * 8 * 0.8))


def test_a_run_that_passed_is_at_least_this_cheap(passed: RunFigures) -> None:
    part = describe_cost(rate_of(passed), TOKENS, manifest({"usd_per_hour": 2.0}, (H100,)))
    assert part.status == "at_most"
    assert part.per_request_usd == 2.0 / (3600 * 8.0 * 0.8), "8 req/s were asked for"
    assert part.per_request_usd_ci == (None, part.per_request_usd)
    assert "An upper limit: gapmeter capacity finds the highest rate" in cost_sentence(part)


@pytest.mark.parametrize(
    ("load", "dispersion"),
    [
        ({"unit": "conversations"}, 1.1),
        ({"arrivals": "onoff", "dispersion": 4.0}, 4.0),
        ({"requested_rate": None}, 1.1),
    ],
)
def test_a_rate_that_nobody_asked_for_is_counted_and_taken_at_its_lower_end(
    passed: RunFigures, load: dict[str, Any], dispersion: float
) -> None:
    found = rate_of(passed.model_copy(update={"load": passed.load.model_copy(update=load)}))
    assert found.low == rate_at_least(800, 100.0, dispersion)


@pytest.mark.parametrize(
    ("more", "load", "steady", "why"),
    [
        ({"verdict": "FAIL"}, {}, None, "the SLOs were missed"),
        ({"verdict": "INCONCLUSIVE"}, {}, None, "the verdict is INCONCLUSIVE"),
        ({"verdict": "INVALID"}, {}, None, "the verdict is INVALID"),
        ({"slo": ()}, {}, None, "sets no SLO"),
        ({}, {"loop": "closed", "arrivals": "closed"}, None, "a closed loop has no rate"),
        ({}, {"arrivals": "ramp"}, None, "the rate changed through the run"),
        ({}, {}, UNSTEADY, "no steady state"),
        ({}, {}, UNSTEADY.model_copy(update={"state": "steady"}), "the server failed for a time"),
    ],
)
def test_what_proves_no_rate_has_no_cost_and_never_a_zero(
    passed: RunFigures, more: dict[str, Any], load: dict[str, Any], steady: Steady | None, why: str
) -> None:
    run = passed.model_copy(update={"load": passed.load.model_copy(update=load), **more})
    no_cost(rate_of(run, steady), why)


def no_cost(found: SloRate | NoRate, why: str) -> None:
    part = describe_cost(found, TOKENS, manifest())
    assert why in part.reason
    assert describe_value(part, (0.9, 1.0)).good_requests_per_usd is None


@pytest.mark.parametrize("share", [None, (None, 1.0)], ids=str)
def test_value_is_null_where_nobody_knows_how_many_requests_were_good(share: tuple[None, float] | None) -> None:
    value = describe_value(cost_of(rate(4.0), price(), tokens()), share)
    assert (value.good_requests_per_usd, "unmeasured" in str(value.reason)) == (None, True)


def test_a_search_that_found_no_rate_has_no_cost() -> None:
    no_cost(searched_rate(None, 3.0), "no rate was found")


def test_tokens_per_request_are_means_with_student_s_interval_and_a_failed_request_is_paid_for_too() -> None:
    measured = pd.DataFrame(
        {"outcome": ["ok"] * 4 + ["aborted"], "output_tokens": [10, 12, 14, 16, 1], "prompt_tokens": [5] * 4 + [9]}
    )
    found = describe_tokens(measured)
    assert found.output.value == 13.0 and found.total.value == 18.0
    assert found.prompt == Interval(value=5.0, low=5.0, high=5.0)
    assert found.output.high - 13.0 >= 3.182 * math.sqrt(20 / 3) / 2 - 1e-3  # t(3) at 97.5 %, tau at least 1
    one_unknown = measured.assign(output_tokens=[10, None, 14, 16, 1])
    assert describe_tokens(one_unknown).output is None
    failed = describe_tokens(measured.assign(outcome=["ok"] * 4 + ["cut"]))
    assert (failed.output.value, failed.total.value) == (52 / 5, 72 / 5), "of what it had brought, too, nothing counts"


def window(joules: float, low: float | None, high: float | None, idle: float | None, source: str) -> EnergyWindow:
    return EnergyWindow(
        joules=joules, low_j=low, high_j=high, seconds=10.0, method="counter", source=source, idle_w=None, parts_j={},
        idle_j=idle, idle_share=None if idle is None else idle / joules,
    )  # fmt: skip


def test_energy_is_spread_over_requests_and_tokens_and_its_idle_share_is_stated() -> None:
    """The window is 2 s longer than the answers took: a request that failed was waited for."""
    part = describe_energy(window(3000.0, 2970.0, 3030.0, 900.0, "NVML's counter"), 40, 1000.0)
    assert (part.per_request_j, part.per_request_j_ci) == (75.0, (74.25, 75.75))
    assert (part.per_output_token_j, part.tokens_per_watt) == (3.0, 1 / 3)
    assert (part.per_output_token_j_ci, part.tokens_per_watt_ci) == ((2.97, 3.03), (1000 / 3030, 1000 / 2970))
    assert (part.idle_share, part.watts) == (0.3, 300.0)
    said = "75.0 J a request, 0.333 output tokens per joule (30 % of it idle power; NVML's counter)"
    assert energy_sentence(part) == said


def test_unmeasured_energy_is_none_and_says_so() -> None:
    part = describe_energy(None, 40, 1000.0)
    assert isinstance(part, NoEnergy) and part.per_request_j is None
    assert energy_sentence(part).startswith("energy unmeasured")


def test_energy_is_shared_by_all_that_was_answered_meanwhile(passed: RunFigures) -> None:
    """A request of the warm-up has half of its tokens after the first measured one was due."""
    rows = [(False, 0, [5, 15]), (True, 10, [20, 30]), (True, 20, [30, 40]), (False, 60, [70, 80])]
    requests = pd.DataFrame({
        "measured": [measured for measured, *_ in rows], "due_ns": [due for _, due, _ in rows],
        "token_ns": [at for *_, at in rows], "end_ns": [at[-1] for *_, at in rows],
        "output_tokens": [2.0] * 4, "prompt_tokens": [3.0] * 4, "outcome": ["ok"] * 4,
    })  # fmt: skip
    used = window(50.0, 50.0, 50.0, None, "a counter")
    steady = Steady.model_construct(state="steady", valid_for_capacity=True)
    found = describe_economics(passed, steady, manifest({"usd_per_hour": 3.6}), RunTables(requests), used).energy
    assert (found.per_request_j, found.per_output_token_j) == (20.0, 10.0)


LONGEST = Interval(value=10.0, low=9.0, high=11.0)


@pytest.fixture
def trials(passed: RunFigures) -> list[SearchTrial]:
    """Two that held, and an overload, which refused most requests. Each took 100 J in 10 s."""
    counted = window(100.0, None, None, None, "a counter")

    def trial(per_s: float, held: bool, n: int, good: float, total: Interval | None) -> SearchTrial:
        figures = passed.model_copy(
            update={
                "counts": passed.counts.model_copy(update={"measured": n}),
                "goodput": Goodput(per_s=None, share=good, share_ci=(good, 1.0), limits_ms={}),
            }
        )
        energy = describe_energy(counted, round(10 * per_s), 90.0)
        found = kit.result(figures, tokens_per_request=tokens(10.0, 1.0, total), energy=energy)
        return SearchTrial(per_s, held, found)

    return [
        trial(4.0, True, 100, 0.99, None), trial(7.0, True, 900, 0.97, LONGEST), trial(9.0, False, 2000, 0.5, None),
    ]  # fmt: skip


def searched(low: float | None, high: float | None, trials: list[SearchTrial]) -> Economy:
    return describe_search(low, high, manifest({"usd_per_hour": 3.6}), trials)


def undecided(trials: list[SearchTrial]) -> list[SearchTrial]:
    """Those that held are."""
    return [SearchTrial(trial.rate, trial.held and None, trial.result) for trial in trials]


def test_a_search_for_capacity_has_a_cost_between_both_ends(trials: list[SearchTrial]) -> None:
    found = searched(6.5, 8.0, trials)
    assert found.cost.per_request_usd_ci == (3.6 / (3600 * 8.0 * 0.8), 3.6 / (3600 * 6.5 * 0.8))


def test_tokens_of_a_search_s_requests_are_those_of_the_longest_trial_that_held(trials: list[SearchTrial]) -> None:
    assert searched(6.5, 8.0, trials).tokens_per_request.total == LONGEST


def test_value_and_energy_of_a_search_are_those_of_the_highest_rate_that_held(trials: list[SearchTrial]) -> None:
    found = searched(6.5, 8.0, trials)
    assert found.value.good_requests_per_usd == 0.97 / found.cost.per_request_usd
    assert (found.energy.per_request_j, found.energy.source) == (100 / 70, "a counter, at 7 req/s")


def test_a_trial_that_held_beyond_a_search_s_answer_tells_neither_its_value_nor_its_energy(
    trials: list[SearchTrial],
) -> None:
    low, middle, high = trials
    lucky = [low, middle, SearchTrial(high.rate, True, high.result)]
    one, other = (searched(6.5, 8.0, each) for each in (lucky, trials))
    assert (one.value, one.energy) == (other.value, other.energy)


def test_where_no_trial_held_the_undecided_one_nearest_to_the_answer_tells_value_and_energy(
    trials: list[SearchTrial],
) -> None:
    nearest, held = searched(6.5, 8.0, undecided(trials)), searched(6.5, 8.0, trials)
    assert (nearest.energy, nearest.value) == (held.energy, held.value)


def test_an_undecided_trial_below_the_rate_that_is_paid_for_tells_energy_and_no_value(
    trials: list[SearchTrial],
) -> None:
    """At that rate fewer requests may be within their limits."""
    below = searched(7.5, 8.0, undecided(trials)[:2])
    assert below.energy.source == "a counter, at 7 req/s"
    assert below.value.good_requests_per_usd is None


def test_a_search_without_an_answer_has_no_energy(trials: list[SearchTrial]) -> None:
    missed = searched(None, 3.0, undecided(trials))
    assert missed.energy.reason == "unmeasured: no trial's load is known to lie near the answer"
