"""What a run's result says, in sentences: of each part, from its figures.

``Words`` of a result go into ``summary.json``. Texts that a rule made of what it found (checks, warnings, reasons) are
data and stand in the result; here they are only put together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from gapmeter.analysis.device.devices import CPU
from gapmeter.analysis.judge.steadiness import FEWEST_REQUESTS, growth_text
from gapmeter.analysis.numbers import DASH, count, duration, large, share, significant, usd
from gapmeter.analysis.results.cost import Cost, Energy, NoCost, NoEnergy, Price, Value
from gapmeter.analysis.results.device import (
    AchievedShare,
    DecodeRoofline,
    EnergyWindow,
    Roofline,
    Telemetry,
    Utilisation,
)
from gapmeter.analysis.results.distribution import Needs
from gapmeter.analysis.results.latency import Anatomy, ComputeShares, Difference, UpgradeBracket
from gapmeter.analysis.results.manifest import Manifest
from gapmeter.analysis.results.run import (
    FAIL,
    INVALID,
    PASS,
    ClosedLoop,
    Corrected,
    Drift,
    FloorShares,
    Pelt,
    Ratio,
    RunFigures,
    RunResult,
    SloAnswer,
    Steady,
    Turn,
)
from gapmeter.analysis.results.words import Words
from gapmeter.analysis.stages import UNEXPLAINED, owner_words
from gapmeter.report.marks import words as stage_words

CLOSED_LOOP = (
    "closed loop: each user waited for an answer before asking again, so these latencies are not what an open "
    "population would feel at this rate"
)
MILLION = 1_000_000
_CHEAP_USD = 0.001  # from which a request's own cost is told
_NOTABLE = 0.05  # of a ratio's distance from 1, beyond its interval
_DRIFTING = {
    "ttft": "TTFT", "tpot": "TPOT", "output_tokens_per_s": "tokens/s",
    "machine_time": "time of a fixed piece of CPU work",
}  # fmt: skip


def words_of(result: RunResult, manifest: Manifest) -> Words:
    """Everything that is said of a run."""
    telemetry, compute = result.telemetry, result.compute
    per_metric = {"ttft": compute.ttft, "e2e": compute.e2e}
    return Words(
        headline=headline(result),
        slo=tuple(slo_sentence(answer) for answer in result.slo),
        trust=trust_sentence(result),
        steady=steady_sentence(result.steady, measured=result.counts.measured, offered=result.load.requested_rate),
        drift=drift_sentence(result.drift),
        closed_loop=closed_loop_sentence(result.closed_loop) if result.closed_loop else None,
        turns=turns_sentence(result.turns),
        tail=tail_sentences(result),
        upgrade=upgrade_sentences(result),
        compute={
            metric: said
            for metric, found in per_metric.items()
            if found and (said := compute_sentence(found, metric, result.device))
        },
        telemetry=telemetry_sentence(telemetry) if telemetry else None,
        utilisation=utilisation_sentence(telemetry.utilisation) if telemetry else None,
        roofline=roofline_sentence(result.roofline),
        cost=cost_sentence(result.cost, simulated=manifest.scenario["server"]["engine"] == "simulated"),
        energy=energy_sentence(result.energy),
        value=value_sentence(result.value, result.goodput.share_ci),
    )


# The verdict


def headline(result: RunFigures) -> str:
    """What a person reads first: the verdict's reason, then what explains the slow requests."""
    if result.verdict == INVALID:
        return f"not valid as a measurement: {'; '.join(result.invalid_reasons)}"
    telling = next((answer for answer in result.slo if answer.status == result.verdict), None)
    if telling is None:
        return "measured; no SLO was set"
    text = slo_sentence(telling)
    if result.verdict == PASS:
        text = f"{len(result.slo)} of {len(result.slo)} SLOs met; {text}"
    slow = result.tail.of(telling.metric)
    return f"{text}. {tail_sentence(slow, telling.metric, result.device)}." if slow else f"{text}."


def slo_sentence(answer: SloAnswer) -> str:
    """What was found of one SLO, and what that says of its limit."""
    if answer.metric == "errors":
        found, limit = _errors(answer), share(answer.limit)
    else:
        found, limit = _latency(answer), _time(answer.limit)
    if answer.metric != "errors" and answer.status == INVALID:
        return found
    said = f"{found}{_outcome(answer, f'the limit of {limit}')}"
    if answer.beyond_half is not None:
        said += (
            f", which no request exceeded, and {count(answer.beyond_half) if answer.beyond_half else 'none'} its half"
        )
    return said


def _latency(answer: SloAnswer) -> str:
    name = f"p{answer.percentile:g} {answer.metric.upper()}"
    if answer.status == INVALID:
        return f"{name} never occurred: no request had one"
    worth = count(answer.n_eff) if answer.n_eff >= 1 else "less than one"
    size = f"n = {count(answer.count)}, worth {worth} independent"
    if answer.infinite and answer.low is None:
        return f"{name} never: more requests failed than it may leave out ({size})"
    if answer.value is not None or answer.infinite:
        # An end above the value that is no number is one that answers which never came reach.
        value, low, high = (_time(ms if ms is not None else math.inf) for ms in (answer.value, answer.low, answer.high))
        return f"{name} {value}, 95 % interval {low} .. {high} ({size})"
    # What decides is said after this, and is what counts.
    if answer.needs is None and answer.beyond_half is None and answer.estimable_with is not None:
        size += f"; {_longer(answer.estimable_with)}"
    if answer.low is not None:
        return f"{name} above {_time(answer.low)}, no upper end from this sample ({size})"
    return f"{name} not estimable ({size})"


def _errors(answer: SloAnswer) -> str:
    said = f"{count(round((answer.value or 0.0) * answer.count))} of {count(answer.count)} requests failed"
    if not answer.count:
        return said
    return f"{said} ({share(answer.value)}, 95 % interval {share(answer.low)} .. {share(answer.high)})"


def _longer(needs: Needs) -> str:
    """The run length from which the interval would have both ends."""
    span = f", about {needs.minutes:.0f} min," if needs.minutes and needs.minutes >= 1 else ""
    return f"estimable with {count(needs.requests)} more requests{span} like these"


def _outcome(answer: SloAnswer, limit: str) -> str:
    if answer.status == PASS:
        return f": within {limit}"
    if answer.status == FAIL:
        return f": beyond {limit}"
    if answer.status == INVALID:
        return ": no request was measured"
    if answer.needs is None:
        return f": too close to {limit} for any sample of reasonable size to decide"
    minutes = answer.needs.minutes
    span = f" (about {minutes:.0f} min)" if minutes and minutes >= 1 else ""
    return f": undecided against {limit}; needs about {count(answer.needs.requests)} more requests{span}"


def _time(ms: float) -> str:
    return "never (failed requests)" if math.isinf(ms) else duration(ms)


# Can it be trusted?


def trust_sentence(result: RunFigures) -> str:
    """One line of the figures that say how far the others can be trusted."""
    return f"{'valid' if result.trust.valid else 'invalid'}: {trust_figures(result)}"


def trust_figures(result: RunFigures) -> str:
    """The same without its first word."""
    trust, ledger = result.trust, result.residual.last_token is not None
    parts = [f"lag p99 {duration(trust.lag_p99_ms)}"]
    if ledger and any(result.stages[name].count for name in ("prefill", "decode")):
        parts += [f"unexplained p99 {share(trust.unexplained_p99_share)}", f"strict {share(trust.strict_p99_share)}"]
    else:
        parts.append("the server's stages unmeasured" if ledger else "no ledger")
    if trust.client_cpu_share is not None:
        parts.append(f"client CPU {share(trust.client_cpu_share)}")
    parts.append(floor_sentence(result.floor) if result.floor else "floor unmeasured")
    return ", ".join(parts)


def floor_sentence(floor: FloorShares) -> str:
    """What the load tester adds itself, at p99."""
    known = {"TTFT": floor.ttft_p99_ms, "ITL": floor.itl_p99_ms, "E2E": floor.e2e_p99_ms}
    return "floor p99 " + ", ".join(f"{metric} {duration(ms)}" for metric, ms in known.items())


def steady_sentence(steady: Steady, *, measured: int, offered: float | None) -> str:
    """Whether there was a steady state, and where methods disagree; of ``measured`` requests, ``offered`` a second."""
    if steady.state == "not_applicable":
        return "the load was meant to change, so there is no steady state to look for"
    mser5, pelt, slope = steady.methods.mser5, steady.methods.pelt, steady.methods.queue_slope
    if mser5 is None or pelt is None:
        return _unknown_state(measured)
    said = []
    if slope is not None and slope.grows:
        said.append(f"{growth_text(slope)}; more was offered{_per_s(offered)} than served{_per_s(slope.served_per_s)}")
    if mser5.state == "unsteady":
        said.append(f"no steady state: {mser5.metric.upper()} kept changing through the run (MSER-5)")
    if not said:
        said.append(_steady(steady))
    if not pelt.agrees:
        said.append(_disagreement(pelt))
    return "; ".join(said)


def _unknown_state(measured: int) -> str:
    if measured >= FEWEST_REQUESTS:
        return "no request succeeded, so there is no latency that could be steady"
    were = "request was" if measured == 1 else "requests were"
    return f"too short to tell: {measured} {were} measured, a steady state takes {FEWEST_REQUESTS} to see"


def _steady(steady: Steady) -> str:
    mser5 = steady.methods.mser5
    if mser5 is None or not mser5.excluded_requests:
        return "steady"
    first = mser5.excluded_requests
    if mser5.applied:
        return f"steady after the first {first} requests"
    return f"steady, but the first {first} measured requests differ and are kept, as load.warmup says (MSER-5)"


def _disagreement(pelt: Pelt) -> str:
    certain = [change for change in pelt.changes if change.certain]
    if not certain:
        return "PELT disagrees: it sees no change of level"
    last = certain[-1]
    return (
        f"PELT disagrees: it sees {last.metric.upper()} at {last.ratio:.2g} times its level from request "
        f"{last.request} on"
    )


def _per_s(rate: float | None) -> str:
    return "" if rate is None else f" ({rate:.3g}/s)"


def drift_sentence(drift: Drift) -> str | None:
    """Every ratio with its interval; then those that lie beyond it and more than 5 % from 1. None without any."""
    known = {
        name: ratio for key, name in _DRIFTING.items() if (ratio := getattr(drift, key)) and ratio.ratio is not None
    }
    if not known:
        return None
    told = ", ".join(f"{name} {_times(ratio)}" for name, ratio in known.items())
    moved = [name for name, ratio in known.items() if _moved(ratio)]
    differs = f"; {' and '.join(moved)} differed" if moved else ""
    cause = f" ({drift.reason})" if drift.reason and moved else ""
    return f"first {drift.first_s:.0f} s over the rest: {told}{differs}{cause}"


def _moved(ratio: Ratio) -> bool:
    low, high = ratio.ratio_ci
    return (low is not None and low > 1 + _NOTABLE) or (high is not None and high < 1 - _NOTABLE)


def _times(ratio: Ratio) -> str:
    low, high = (math.inf if end is None else end for end in ratio.ratio_ci)
    return f"{ratio.ratio:.2f} ({low:.2f} .. {high:.2f})"


# What requests waited for


def tail_sentences(result: RunFigures) -> dict[str, str]:
    """By metric, the one that matters most in front."""
    ordered = dict.fromkeys((result.tail.metric, "ttft", "e2e", "itl"))
    return {
        metric: tail_sentence(found, metric, result.device)
        for metric in ordered
        if metric and (found := result.tail.of(metric))
    }


def tail_sentence(found: Anatomy, metric: str, device: str) -> str:
    """What slow requests (or token gaps) wait for beyond typical ones, and whose it is."""
    what = "token gaps" if metric == "itl" else "requests"
    low, high = found.share_ci
    part = "all" if found.share > 0.995 else f"{100 * found.share:.0f} %"
    sure = "no interval" if low is None or high is None else f"{100 * low:.0f} .. {100 * high:.0f} %"
    return (
        f"{part} ({sure}) of what slow {what} wait beyond typical ones ({duration(found.difference_ms)}) is "
        f"{_whose(found, device)}"
    )


def _whose(found: Anatomy, device: str) -> str:
    inside = any(stage in found.typical.stages_ms for stage in ("prefill", "decode"))
    if found.stage == UNEXPLAINED and not inside:
        return "the server's and the network's, and unmeasured: no probe stamps the server's stages"
    return f"{stage_words(found.stage)} ({owner_words(found.owner, device)})"


def upgrade_sentences(result: RunFigures) -> dict[str, str]:
    """By metric: what a faster device leaves of it."""
    known = {"ttft": result.upgrade.ttft, "e2e": result.upgrade.e2e}
    return {metric: upgrade_sentence(found, metric, result.device) for metric, found in known.items() if found}


def upgrade_sentence(found: UpgradeBracket, metric: str, device: str) -> str:
    now, low, high = (duration(end.at(found.percentile) or 0.0) for end in (found.now, found.lower, found.upper))
    name = f"p{found.percentile:g} {metric.upper()}"
    return f"even an infinitely fast {device} leaves {name} between {low} and {high} (it is {now})"


def compute_sentence(found: ComputeShares, metric: str, device: str) -> str | None:
    """For how much of what the slowest waited the device computed for them; None where that is unmeasured."""
    part = found.slow.compute
    if part is None:
        return None
    who = (
        "the slowest 1 %" if found.slow.count == math.ceil(found.all.count / 100) else f"the slowest {found.slow.count}"
    )
    event = {"ttft": "their first token", "e2e": "their last token", "itl": "a token"}[metric]
    low, high = part.share_ci
    ends = f" ({100 * low:.0f} to {100 * high:.0f} %)" if low is not None and high is not None else ""
    return f"of what {who} waited for {event}, the {device} computed for them during {100 * part.share:.0f} %{ends}"


def difference_sentence(found: Difference, a: str, b: str, device: str = "GPU") -> str:
    """Two groups of requests, with the difference's uncertainty; ``device`` is what computed the forwards."""
    first = found.ranked[0]
    low, high = found.difference_ci_ms
    whole = duration(abs(found.difference_ms))
    ends = ""
    if low is not None and high is not None:
        ends = f" (95 %: {duration(low)} to {duration(high)})"
        if high < 0:
            ends = f" (95 %: {duration(-high)} to {duration(-low)})"
        elif low <= 0:
            return f"{a}: {duration(found.a_ms)}, {b}: {duration(found.b_ms)}; no difference is proven{ends}"
    more = "longer" if found.difference_ms >= 0 else "less"
    part = f", {duration(abs(first.ms))} of it {stage_words(first.stage)} ({owner_words(first.owner, device)})"
    return f"{a} waited {whole} {more} than {b}{ends}{part}"


# How it was asked


def closed_loop_sentence(closed: ClosedLoop) -> str:
    """What a closed loop's figures are not, and what they would be at the users' own pace."""
    found = closed.corrected
    if found is None:
        return CLOSED_LOOP
    told = [f"TTFT {shown}"] if (shown := _corrected(found.ttft)) else []
    told += [f"E2E {shown}"] if (shown := _corrected(found.e2e)) else []
    added, pace = count(max(found.ttft.added, found.e2e.added)), duration(found.expected_interval_ms)
    figures = f": {'; '.join(told)}" if told else ""
    return (
        f"{CLOSED_LOOP}; corrected for {added} requests that users at their pace of {pace} would have sent meanwhile"
        f"{figures}"
    )


def _corrected(found: Corrected) -> str:
    known = {"p50": found.p50_ms, "p99": found.p99_ms, "p95": found.p95_ms, "p90": found.p90_ms}
    shown = [f"{name} {duration(ms)}" for name, ms in known.items() if ms is not None]
    return ", ".join(shown[:2]) if found.added else ""


def turns_sentence(turns: Sequence[Turn]) -> str | None:
    """TTFT by turn in one line: the median, where the sample supports one; None without conversations."""
    told = [
        f"turn {turn.turn} {duration(turn.ttft.p50_ms)} ({turn.prompt_tokens:,.0f} prompt tokens)"
        for turn in turns
        if turn.ttft and turn.ttft.p50_ms is not None
    ]
    return f"TTFT p50 by turn: {', '.join(told)}" if told else None


# The device


def telemetry_sentence(telemetry: Telemetry) -> str:
    """One line: what was there, what it did, and what is missing."""
    parts = []
    if not telemetry.gpus:
        parts.append(telemetry.sources["gpu"].absent or "no GPU was sampled")
    parts.append(utilisation_sentence(telemetry.utilisation))
    if telemetry.energy:
        parts.append(_energy_of(telemetry.energy))
    if missed := sum(source.missed for source in telemetry.sources.values()):
        parts.append(f"{missed} samples missed")
    return "; ".join(part for part in parts if part)


def _energy_of(energy: EnergyWindow) -> str:
    idle = "" if energy.idle_share is None else f", {share(energy.idle_share)} of it idle"
    return f"{energy.joules:.0f} J ({energy.source}{idle})"


def utilisation_sentence(used: Utilisation) -> str:
    """How busy the device was, by several counts."""
    parts = []
    if used.nvml_busy_share is not None:
        parts.append(f"NVML calls the GPU busy {share(used.nvml_busy_share)} of the time")
    elif used.server_cpu_cores is not None:
        of = f" of its {used.server_cores}" if used.server_cores and used.server_cores > 1 else ""
        parts.append(f"the server's processes used {used.server_cpu_cores:.2f}{of} cores")
    if used.forward_share_of_window is None:
        return "; ".join(parts)
    parts.append(f"a forward ran {share(used.forward_share_of_window)} of the time")
    if used.forward_share_of_step is not None:
        parts.append(f"{share(used.forward_share_of_step)} of each step")
    if used.kernel_share_of_forward is not None:
        parts.append(f"kernels {share(used.kernel_share_of_forward)} of the forward")
    elif used.forward_by_device:
        parts.append("gaps between kernels included")
    return ", ".join(parts)


def roofline_sentence(roofline: Roofline) -> str | None:
    """Decode against the bandwidth, prefill against the peak, with intervals; None where neither is known."""
    prefill = roofline.prefill
    parts = [_decode(roofline.decode)] if roofline.decode else []
    if prefill and prefill.mfu:
        parts.append(f"prefill computes at {_interval(prefill.mfu)} of the peak (MFU)")
    elif prefill:
        parts.append(f"MFU unmeasured: {prefill.why}")
    return "; ".join(parts) or None


def roofline_line(roofline: Roofline) -> str | None:
    """The same for the terminal, where the interval and the reasons are left to the report."""
    decode, prefill = roofline.decode, roofline.prefill
    parts = []
    if decode:
        of = "the cache's" if decode.cache_resident else "memory's"
        least, real = duration(decode.itl_least_ms.mean), duration(decode.forward_ms.mean)
        parts.append(f"decode reads at {share(decode.mbu.share)} of {of} bandwidth")
        parts.append(f"a token takes {real} of forward and at full bandwidth {least}")
    if prefill and prefill.mfu:
        parts.append(f"prefill computes at {share(prefill.mfu.share)} of the peak")
    return ", ".join(parts) or None


def _decode(decode: DecodeRoofline) -> str:
    of = "the last-level cache's" if decode.cache_resident else "memory's"
    said = f"decode reads at {_interval(decode.mbu)} of {of} bandwidth (MBU)"
    if decode.cache_resident:
        said += f": the {_megabytes(decode.bytes_mean)} of a step fit into that cache, so memory is no bound"
    bound = {
        "memory bandwidth": "it is bound by memory bandwidth",
        "cache bandwidth": "it is bound by the cache's bandwidth",
        "compute": "it is bound by computing, not by reading",
        "neither": "neither reading nor computing explains half of its time",
    }[decode.bound]
    least, real = duration(decode.itl_least_ms.mean), duration(decode.forward_ms.mean)
    batch = f"with {decode.batch_mean:.1f} sequences at once"
    return f"{said}; {bound}; even at full bandwidth a token takes at least {least} {batch} (the forward took {real})"


def _megabytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _interval(found: AchievedShare) -> str:
    return f"{share(found.share)} ({share(found.low)} to {share(found.high)})"


# What it costs


def cost_sentence(cost: Cost | NoCost, *, simulated: bool = False) -> str:
    """The figure with what it rests on, or why there is none. ``simulated``: no real engine served."""
    if isinstance(cost, NoCost):
        return f"no cost: {cost.reason}"
    price, rate = cost.price, cost.rate
    many, who = many_requests(cost.per_request_usd)
    dearest, output = cost.per_request_usd_ci[1], cost.per_million_output_tokens_usd_ci
    said = f"at most {usd(None if dearest is None else many * dearest)} {who}"
    if output is not None:
        said += f" and {usd(output[1])} for a million output tokens"
    held = f"the SLOs hold at {significant(rate.low)} req/s, {share(price.utilisation)} of it planned"
    found = "" if rate.basis == "capacity" else ". At least this cheap; gapmeter capacity finds the rest"
    other = f". Priced as {price.device}, but measured on {price.measured_on}" if price.measured_on else ""
    real = ". The simulated engine stands for no real one" if simulated else ""
    return f"{said} ({held}; {price_words(price)}){found}{other}{real}"


def many_requests(per_request: float) -> tuple[float, str]:
    """How many requests' cost is told, so that few zeros are: one, or a million of cheap ones."""
    return (1.0, "a request") if per_request >= _CHEAP_USD else (float(MILLION), "for a million requests")


def price_words(price: Price) -> str:
    """``1 x H100-SXM at $2.49 an hour, the scenario's price``; a default says so, with date and source."""
    per_core = price.device == CPU and price.is_default
    what = f"{price.units} core{'s' if price.units > 1 else ''}" if per_core else f"{price.units} x {price.device}"
    each = " each" if price.units > 1 else ""
    return f"{what} at {usd(price.usd_per_unit_hour)} an hour{each}, {price.source}"


def energy_sentence(energy: Energy | NoEnergy) -> str:
    """Joules of a request, output tokens of a joule; or why nobody knows."""
    if isinstance(energy, NoEnergy):
        return f"energy {energy.reason}"
    each = DASH if energy.per_request_j is None else f"{significant(energy.per_request_j)} J"
    rate = DASH if energy.tokens_per_watt is None else significant(energy.tokens_per_watt)
    idle = "idle share unmeasured" if energy.idle_share is None else f"{share(energy.idle_share)} of it idle power"
    return f"{each} a request, {rate} output tokens per joule ({idle}; {energy.source})"


def value_sentence(value: Value, goodput_ci: Sequence[float | None] | None) -> str:
    """How many good requests a dollar buys; ``goodput_ci``: the share of requests that are good."""
    if value.good_requests_per_usd is None:
        return f"none: {value.reason}"
    least = share(goodput_ci[0] if goodput_ci else None)
    worth = large(value.good_requests_per_usd)
    return f"at least {worth} requests within their own limits for a dollar ({least} or more are)"
