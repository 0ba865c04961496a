"""From the runs of two sides or more to their comparison. The first side is the baseline."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from string import ascii_uppercase
from typing import Any

from gapmeter.analysis.compare import claims
from gapmeter.analysis.compare.claims import Claim, PairVerdict
from gapmeter.analysis.compare.differences import Differences, LedgerDifference, compare_sides, why_refused
from gapmeter.analysis.compare.sides import AnalysedRun, Side, check_protocol, follows
from gapmeter.analysis.judge.evidence import floor_of
from gapmeter.analysis.judge.lateness import ReportedLateness
from gapmeter.analysis.provenance import device_words, provenance_of_several
from gapmeter.analysis.requests.figures import finite_ms
from gapmeter.analysis.results.comparison import (
    BLOCKS,
    FACTOR,
    FOLLOWS,
    FORCED,
    MIXED,
    NOT_COMPARABLE,
    NOTED,
    VALID,
    VALIDITY,
    Asked,
    ClaimedFigure,
    Comparability,
    Comparison,
    DecileFigure,
    DeviceSpread,
    DifferenceFigure,
    Fact,
    FigureSpread,
    Method,
    MetricComparison,
    PairComparison,
    SideEstimate,
    SideFacts,
    SidePart,
    SideRow,
    SideTable,
    StageDifference,
    StageDifferences,
)
from gapmeter.analysis.results.cost import AnyCost, AnyEnergy, Interval
from gapmeter.analysis.results.distribution import percentile_key
from gapmeter.analysis.results.run import INCONCLUSIVE, INVALID, UNKNOWN
from gapmeter.analysis.stages import owner_of
from gapmeter.analysis.stats.estimate import CONFIDENCE, POWER, Difference
from gapmeter.analysis.stats.series import Series, pooled
from gapmeter.scenarios.slo import LATENCIES

_LONGEST_NAME = 40  # characters of a value that stands in table heads
_NEARLY_ALL = 0.9  # of a side's requests
_DECILES = tuple(float(p) for p in range(10, 100, 10))
_SHOWN = (50.0, 90.0, 95.0, 99.0, 99.9)
_STAGE_PERCENTILES = (50.0, 99.0)
_REAL = frozenset({"prefill", "decode", "queue", "scheduling", "tokenize", "input_prep", "sampling", "network_in"})
_FEW_RUNS = (
    "one run per side: the intervals do not include how much repeated runs differ; gapmeter compare --run SCENARIO "
    "--a KEY=VALUE --b KEY=VALUE measures that too, with three runs per side"
)


def compare(sides: Sequence[Side], asked: Asked = Asked(), command: str = "") -> Comparison:
    """Compare two sides or more.

    ``asked.factors`` are the keys that may differ; ``force`` compares what must not be; ``in_turn``: the runs were made
    in turn (A B B A), so that a drift of the machine meets both sides alike. Raises ValueError for fewer than two.
    """
    if len(sides) < 2:
        raise ValueError("a comparison has two sides or more")
    letters = [ascii_uppercase[i] if i < 26 else f"run {i + 1}" for i in range(len(sides))]
    protocols = [
        _protocol((letters[0], sides[0]), other, asked.factors) for other in zip(letters[1:], sides[1:], strict=True)
    ]
    result = _not_compared(letters, sides, protocols, asked, command)
    if not (result.comparable or asked.force):
        return result
    asked_of = [slo for side in sides for slo in side.first.manifest.slo if slo.metric in LATENCIES]
    slos = list(dict.fromkeys((slo.metric, slo.percentile) for slo in asked_of if slo.percentile))
    percentiles = {m: tuple(sorted({*_DECILES, *_SHOWN, *(p for s, p in slos if s == m)})) for m in LATENCIES}
    runs = [[each.columns for each in side.runs] for side in sides]
    found = [
        compare_sides(runs[0], own, percentiles, _STAGE_PERCENTILES, _lateness(sides[0], side))
        for own, side in zip(runs[1:], sides[1:], strict=True)
    ]
    verdicts = claims.judge(found, floors_of(each for side in sides for each in side.runs), slos)
    words = {verdict.word for verdict in verdicts}
    names = [_names(letters[0], each) for each in protocols]
    devices = {each.manifest.device for side in sides for each in side.runs}
    device = devices.pop() if len(devices) == 1 else "device"
    pairs = zip(names, found, verdicts, strict=True)
    figures = {
        "verdict": FORCED if result.forced else (words.pop() if len(words) == 1 else MIXED).upper(),
        "comparisons": tuple(pair_of(pair, each, verdict, device) for pair, each, verdict in pairs),
        "table": side_table(letters, sides, protocols),
        "method": Method(
            estimate="Harrell-Davis", interval="stationary block bootstrap, t", confidence=CONFIDENCE, power=POWER,
            resamples=found[0].resamples, correction="Holm", family=verdicts[0].family, in_turn=asked.in_turn,
        ),
        "warnings": tuple(_warnings(letters, sides, found)),
    }  # fmt: skip
    return result.model_copy(update=figures)


def _not_compared(
    letters: Sequence[str], sides: Sequence[Side], protocols: Sequence[Comparability], asked: Asked, command: str
) -> Comparison:
    """What is said of sides before they are compared, or where they must not be."""
    comparable = all(each.comparable for each in protocols)
    return Comparison(
        verdict=NOT_COMPARABLE,
        comparable=comparable,
        forced=asked.force and not comparable,
        command=command,
        sides=tuple(
            SideFacts(
                name=letter, runs=side.names, scenario=side.first.manifest.scenario.get("name"),
                digest=side.first.manifest.scenario_digest, verdicts=tuple(each.result.verdict for each in side.runs),
                requests=side.requests, failed=side.failed,
            )
            for letter, side in zip(letters, sides, strict=True)
        ),
        protocol=tuple(protocols),
        comparisons=(),
        provenance=provenance_of_several(
            [side.first.result.provenance for side in sides], command,
            n=" and ".join(str(side.requests) for side in sides),
            validity="valid" if comparable else FORCED if asked.force else "not compared",
        ),
        asked=asked,
    )  # fmt: skip


def _lateness(*sides: Side) -> ReportedLateness:
    return ReportedLateness([each.result for side in sides for each in side.runs])


def floors_of(runs: Iterable[AnalysedRun]) -> dict[str, tuple[float, float]]:
    """The load tester's own error at p50 and p99 in ns, the largest of the runs'; nothing where it is unmeasured."""
    known = [floor for each in runs if (floor := floor_of(each.manifest)) is not None]
    if not known:
        return {}

    def most(metric: str, percentile: str) -> float:
        return float(max(getattr(floor, f"{metric}_{percentile}_ms") for floor in known)) * 1e6

    return {metric: (most(metric, "p50"), most(metric, "p99")) for metric in ("ttft", "itl", "e2e")}


# Can they be compared?


def _protocol(baseline: tuple[str, Side], other: tuple[str, Side], factors: Sequence[str]) -> Comparability:
    """What differs between the two sides' first runs; within a side nothing may differ at all."""
    (_, first), (letter, side) = baseline, other
    found = _check(first.first, side.first, factors)
    within_sides = dict.fromkeys(
        fact.model_copy(update={"meaning": BLOCKS, "within": name})
        for name, own in (baseline, other)
        for each in own.runs[1:]
        for fact in _check(own.first, each).facts
        if fact.meaning != NOTED
    )
    a, b = _validity(first), _validity(side)
    validity = [] if a == b == VALID else [Fact(key=VALIDITY, a=a, b=b, meaning=BLOCKS)]
    facts = (*within_sides, *found.facts, *validity)
    return Comparability.of(letter, facts, found.factors, recognized=found.recognized)


def _check(a: AnalysedRun, b: AnalysedRun, factors: Sequence[str] = ()) -> Comparability:
    return check_protocol(a.manifest, b.manifest, a.result.floor, b.result.floor, factors)


def _validity(side: Side) -> str:
    """``valid``, or what is wrong with which of its runs."""
    bad = []
    for each in side.runs:
        why = "; ".join(each.result.invalid_reasons) if each.result.verdict == INVALID else ""
        if each.manifest.status != "complete":
            why = f"incomplete: {each.manifest.ended_because or 'killed'}"
        if why:
            bad.append(f"{each.columns.name}: {why}" if len(side.runs) > 1 else why)
    return "; ".join(bad) or VALID


def _names(a: str, found: Comparability) -> tuple[str, str]:
    """What the sides are called: their letter, and the factor's value where there is a short one."""
    facts = [fact for fact in found.facts if fact.meaning == FACTOR]
    if len(facts) != 1 or max(len(facts[0].a), len(facts[0].b)) > _LONGEST_NAME:
        return a, found.side
    key = facts[0].key.rpartition(".")[2]
    return f"{a} ({key} {facts[0].a})", f"{found.side} ({key} {facts[0].b})"


# The parts of the result


def pair_of(names: tuple[str, str], found: Differences, verdict: PairVerdict, device: str) -> PairComparison:
    """One side against the baseline. ``names`` are what they are called, ``device`` what computes, in a word."""
    by_figure = {(claim.metric, claim.percentile): claim for claim in verdict.claims}
    return PairComparison(
        a=names[0],
        b=names[1],
        verdict=verdict.word,
        telling=verdict.telling.figure if verdict.telling else None,
        paired=found.paired,
        why_not_paired=found.why_not_paired,
        requests=found.counts,
        runs=found.runs,
        block_requests=found.block,
        metrics={
            metric: MetricComparison(
                verdict=verdict.metrics[metric],
                percentiles={
                    percentile_key(p): _claimed(each, by_figure.get((metric, p)))
                    for p, each in own.items()
                    if p is not None and (p in _SHOWN or (metric, p) in by_figure)
                },
                mean=_claimed(own[None], by_figure.get((metric, None))),
                shift=tuple(DecileFigure(percentile=p, **dict(_figure(own[p]))) for p in _DECILES if p in own),
            )
            for metric, own in found.metrics.items()
        },
        errors=found.failed,
        stages={event: _stages(ledger) for event, ledger in found.ledgers.items()},
        unmeasured={event: ledger.unmeasured for event, ledger in found.ledgers.items()},
        changed=claims.what_changed(found, verdict, device),
        device=device,
    )


def _figure(found: Difference) -> DifferenceFigure:
    ends = found.estimate.known[1:] if found.supported else None
    return DifferenceFigure(
        a_ms=finite_ms(found.a) if found.supported else None,
        b_ms=finite_ms(found.b) if found.supported else None,
        difference_ms=finite_ms(found.value),
        ci_ms=(ends[0] / 1e6, ends[1] / 1e6) if ends else None,
        relative=found.value / found.a if found.a and found.value is not None else None,
        relative_ci=found.growth_ends,
        p=found.p,
        df=found.df,
        why=found.why,
        late_ms=finite_ms(found.late),
        failed=found.failed or None,
    )


def _claimed(found: Difference, claim: Claim | None) -> ClaimedFigure:
    return ClaimedFigure(
        **dict(_figure(found)),
        in_family=claim is not None,
        p_adjusted=claim.p_adjusted if claim else None,
        confirmed=claim is not None and claim.confirmed,
        least_ms=finite_ms(claim.least_ns) if claim else None,
        floor_ms=finite_ms(claim.floor_ns) if claim else None,
        growth_error=found.growth.error if found.growth else None,
        growth_df=found.growth.df if found.growth else None,
    )


def _stages(found: LedgerDifference) -> StageDifferences:
    rows = (
        StageDifference(
            stage=name,
            owner=owner_of(name),
            **dict(_figure(each)),
            share=part.value if (part := found.shares[name]) else None,
            share_ci=part.known[1:] if part else None,
            percentiles={percentile_key(p): _figure(own) for p, own in found.percentiles.get(name, {}).items()},
        )
        for name, each in found.stages.items()
    )
    return StageDifferences(total=_figure(found.total), stages=tuple(rows))


def _warnings(letters: Sequence[str], sides: Sequence[Side], found: Sequence[Differences]) -> Iterable[str]:
    unsteady = [
        letter
        for letter, side in zip(letters, sides, strict=True)
        if any(each.result.steady.state == "unsteady" for each in side.runs)
    ]
    if unsteady:
        its = "its" if len(unsteady) == 1 else "their"
        yield (
            f"{' and '.join(unsteady)} had no steady state, so {its} TTFT and E2E depend on how long the load lasted: "
            "what differs there may be far more than what is claimed"
        )
    if all(len(side.runs) == 1 for side in sides):
        yield _FEW_RUNS
    if any(side.failed for side in sides):
        yield (
            "requests failed: in percentiles each counts as slower than any success, and a percentile among them is at "
            "least the time-out; means and stages cover successful requests only"
        )
    for letter, side, each in zip(letters[1:], sides[1:], found, strict=True):
        pairs = zip((letters[0], letter), (sides[0], side), each.counts, strict=True)
        if left_out := [
            f"{own.requests - count:,} of {name}'s {own.requests:,}"
            for name, own, count in pairs if count < _NEARLY_ALL * own.requests
        ]:  # fmt: skip
            yield f"differences are of the requests that both sides issued, which leaves out {' and '.join(left_out)}"
    for ledger in (each.ledgers.get("last_token") for each in found):
        lost = set(ledger.unmeasured) & _REAL if ledger else set()
        if lost and len(lost) < len(_REAL):
            yield f"not measured on both sides, so part of unexplained: {', '.join(sorted(lost))}"
            return


_IN_TABLE = (("ttft", 50.0), ("ttft", 99.0), ("itl", 99.0), ("e2e", 50.0), ("e2e", 99.0))
_OF_HOSTS = ("hardware.", "placement.")
_NO_ENERGY = "not in this run: no energy counter was read"


def side_table(letters: Sequence[str], sides: Sequence[Side], protocols: Sequence[Comparability]) -> SideTable:
    """A row a side; for each device that more than one side ran on, alike but for the host, their spread."""
    rows = [_row(letter, side) for letter, side in zip(letters, sides, strict=True)]
    groups: dict[tuple[Any, ...], list[SideRow]] = {}
    for row, facts in zip(rows, [(), *(each.facts for each in protocols)], strict=True):
        real = [fact for fact in facts if _is_of_more_than_the_host(fact)]
        if row.device != UNKNOWN:
            groups.setdefault((row.device, row.digest, *((fact.key, fact.b) for fact in real)), []).append(row)
    return SideTable(rows=tuple(rows), devices=tuple(_spread(own) for own in groups.values() if len(own) > 1))


def _is_of_more_than_the_host(fact: Fact) -> bool:
    """Also what follows from a factor may be, as an engine's version: another host alone does not change that."""
    if fact.key.startswith(_OF_HOSTS):
        return False
    return fact.meaning in (FACTOR, BLOCKS) or (fact.meaning == FOLLOWS and not follows(fact.key, "hardware"))


def _row(letter: str, side: Side) -> SideRow:
    manifest, result = side.first.manifest, side.first.result
    series = {
        metric: pooled([each.columns.series(metric) for each in side.runs])
        for metric in {name for name, _ in _IN_TABLE}
    }
    verdicts = Counter(each.result.verdict for each in side.runs).most_common()
    return SideRow(
        name=letter,
        runs=side.names,
        device=device_words(manifest),
        engine=result.provenance.engine,
        load=result.provenance.load,
        digest=manifest.scenario_digest,
        verdict=verdicts[0][0] if len(verdicts) == 1 else ", ".join(f"{many} {verdict}" for verdict, many in verdicts),
        requests=side.requests,
        figures={
            f"{metric}_{percentile_key(p)}": _estimate(side, series[metric], metric, p) for metric, p in _IN_TABLE
        },
        cost=_cost(side),
        energy=_median_of([each.result.energy for each in side.runs], "per_request_j", _NO_ENERGY),
    )


def _estimate(side: Side, series: Series, metric: str, percentile: float) -> SideEstimate:
    found = series.percentile(percentile)
    if (late := _lateness(side).refused_ns(metric, percentile)) is not None:
        return SideEstimate(value_ms=None, ci_ms=None, why=why_refused(late), late_ms=late / 1e6)
    if not found.supported:
        return SideEstimate(value_ms=None, ci_ms=None, why="the sample is too small")
    if math.inf in found.known:
        return SideEstimate(value_ms=None, ci_ms=None, why="it reaches requests that failed")
    value, low, high = (ns / 1e6 for ns in found.known)
    return SideEstimate(value_ms=value, ci_ms=(low, high), why="")


def _cost(side: Side) -> SidePart:
    """Of the runs that were decided: one that was not says nothing against the rate that the others held."""
    decided = [each.result.cost for each in side.runs if each.result.verdict != INCONCLUSIVE]
    found = _median_of(decided or [each.result.cost for each in side.runs], "per_request_usd")
    if found.value is None or len(decided) == len(side.runs):
        return found
    others = "the other is" if len(side.runs) - len(decided) == 1 else "the others are"
    return found.model_copy(update={"why": f"of {len(decided)} of {len(side.runs)} runs; {others} INCONCLUSIVE"})


def _median_of(runs: Sequence[AnyCost | AnyEnergy], figure: str, why: str = "") -> SidePart:
    """The runs' median, from the lowest to the highest end of theirs; none, and why, where one of them has none."""
    lacking = [each for each in runs if getattr(each, figure) is None]
    if lacking:
        of = f" (in {len(lacking)} of {len(runs)} runs)" if len(lacking) < len(runs) else ""
        return SidePart(value=None, ci=None, why=f"{lacking[0].reason or why}{of}")
    known = ((getattr(each, figure), getattr(each, f"{figure}_ci")) for each in runs)
    found = Interval.of_all([Interval(value=value, low=low, high=high) for value, (low, high) in known])
    return SidePart(value=found.value, ci=(found.low, found.high), why="")


def _spread(rows: Sequence[SideRow]) -> DeviceSpread:
    """How far the sides lie apart, in each figure that all of them have."""
    known = {key: [value for row in rows if (value := row.figures[key].value_ms)] for key in rows[0].figures}
    spreads = {
        key: FigureSpread(low_ms=min(values), high_ms=max(values), relative=max(values) / min(values) - 1)
        for key, values in known.items()
        if len(values) == len(rows)
    }
    return DeviceSpread(device=rows[0].device, sides=tuple(row.name for row in rows), figures=spreads)
