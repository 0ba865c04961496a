"""compare.json: the whole comparison as one plain dictionary, from which page, Markdown and terminal are written.

The first side is the baseline; every other one is compared with it. Times are in ms, shares fractions; null means that
the samples cannot support a figure. Names are only ever added; ``SCHEMA_VERSION`` changes when one is renamed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from string import ascii_uppercase
from typing import Any

from gapmeter.analysis.compare import claims, protocol
from gapmeter.analysis.compare.claims import Change, Claim, Verdict
from gapmeter.analysis.compare.differences import CONFIDENCE, POWER, Difference, Differences, compare_sides
from gapmeter.analysis.compare.lineup import line_up
from gapmeter.analysis.compare.protocol import Fact, Protocol
from gapmeter.analysis.compare.sides import Run
from gapmeter.analysis.jsonable import json_safe
from gapmeter.analysis.ledger.tail import owner_of
from gapmeter.analysis.numbers import share
from gapmeter.analysis.requests.metrics import METRICS
from gapmeter.analysis.results.distribution import percentile_key
from gapmeter.report import bridge

SCHEMA_VERSION = 1
NOT_COMPARABLE = "NOT COMPARABLE"
VALIDITY, _VALID = "validity", "valid"
FORCED = "NOT COMPARABLE, forced"
_LONGEST_NAME = 40  # characters of a value that stands in table heads
_DECILES = tuple(float(p) for p in range(10, 100, 10))
_SHOWN = (50.0, 90.0, 95.0, 99.0, 99.9)
_STAGE_PERCENTILES = (50.0, 99.0)


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """One side of a comparison: runs of the same thing."""

    runs: tuple[Run, ...]

    @property
    def first(self) -> Run:
        return self.runs[0]


def compare(
    sides: Sequence[Side], factors: Sequence[str] = (), *, force: bool = False, in_turn: bool = False, command: str = ""
) -> dict[str, Any]:
    """Compare two sides or more. ``factors`` are the keys that may differ; ``force`` compares what must not be.

    ``in_turn``: the runs were made in turn (A B B A), so that a drift of the machine meets both sides alike. Raises
    protocol.NotReadable for a run of another version of the format, ValueError for fewer than two sides.
    """
    if len(sides) < 2:
        raise ValueError("a comparison has two sides or more")
    protocols = [_protocol(sides[0], side, factors) for side in sides[1:]]
    comparable = all(each.comparable for each in protocols)
    letters = [ascii_uppercase[i] if i < 26 else f"run {i + 1}" for i in range(len(sides))]
    document: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "verdict": NOT_COMPARABLE,
        "headline": _not_comparable(protocols, letters),
        "comparable": comparable,
        "forced": force and not comparable,
        "command": command,
        "sides": [_side(letter, side) for letter, side in zip(letters, sides, strict=True)],
        "protocol": [_protocol_part(letter, each) for letter, each in zip(letters[1:], protocols, strict=True)],
        "comparisons": [],
    }
    if comparable or force:
        _add_figures(document, sides, protocols, letters, in_turn=in_turn)
    safe: dict[str, Any] = json_safe(document)
    return safe


def _add_figures(
    document: dict[str, Any], sides: Sequence[Side], protocols: Sequence[Protocol], letters: Sequence[str], *,
    in_turn: bool,
) -> None:  # fmt: skip
    slos = slos_of(sides[0].first)
    percentiles = {m: tuple(sorted({*_DECILES, *_SHOWN, *(p for s, p in slos if s == m)})) for m in METRICS}
    found = [compare_sides(sides[0].runs, side.runs, percentiles, _STAGE_PERCENTILES) for side in sides[1:]]
    names = [_names(letters[0], letter, each) for letter, each in zip(letters[1:], protocols, strict=True)]
    verdicts = claims.judge(found, names, floors_of(run for side in sides for run in side.runs), slos)
    device = _device(sides)
    document["comparisons"] = [
        _comparison(pair, each, verdict, claims.what_changed(each, verdict, device), side, sides[0])
        | {"device": device}
        for pair, each, verdict, side in zip(names, found, verdicts, sides[1:], strict=True)
    ]
    document["table"] = line_up(letters, [side.runs for side in sides])
    document["method"] = _method(found, verdicts[0].family, in_turn=in_turn)
    document["warnings"] = _warnings(sides, found, in_turn=in_turn)
    words = {verdict.word for verdict in verdicts}
    document["verdict"] = FORCED if document["forced"] else (words.pop() if len(words) == 1 else claims.MIXED).upper()
    changed = document["comparisons"][0]["changed"]
    headlines = [v.sentence for v in verdicts]
    if len(verdicts) == 1 and changed and changed["stage"]:
        headlines.append(changed["sentence"])
    document["headline"] = f"{'. '.join(each[0].upper() + each[1:] for each in headlines)}."


def slos_of(run: Run) -> list[tuple[str, float]]:
    """Metric and percentile of each of a run's SLOs that has one."""
    return [
        (slo["metric"], float(slo["percentile"]))
        for slo in run.manifest.get("slo", ())
        if slo.get("percentile") is not None and slo["metric"] in METRICS
    ]


def floors_of(runs: Iterable[Run]) -> dict[str, tuple[float, float]]:
    """The load tester's own error at p50 and p99 in ns, the largest of the runs'; nothing where it is unmeasured."""
    known = [floor for run in runs if (floor := bridge.floor_errors_ms(run.manifest))]
    metrics = {metric for floor in known for metric in floor}
    return {
        metric: tuple(max(f[metric][i] for f in known if metric in f) * 1e6 for i in (0, 1))  # type: ignore[misc]
        for metric in metrics
    }


def _protocol(baseline: Side, side: Side, factors: Sequence[str]) -> Protocol:
    """Of the two sides' first runs; within a side nothing may differ at all."""
    one, other = baseline.first, side.first
    found = protocol.check(one.manifest, other.manifest, one.summary, other.summary, factors)
    strays: list[Fact] = []
    for own in (baseline, side):
        for run in own.runs[1:]:
            inner = protocol.check(own.first.manifest, run.manifest, own.first.summary, run.summary)
            within = [f for f in inner.facts if f.meaning != protocol.NOTED and f.key != VALIDITY]
            strays += [Fact(f"{f.key}, within a side", f.a, f.b, protocol.BLOCKS) for f in within]
    sound = Fact(VALIDITY, _soundness(baseline), _soundness(side), protocol.BLOCKS)
    facts = [f for f in found.facts if f.key != VALIDITY]
    return Protocol(found.factors, found.recognized, (*strays, *facts, *([sound] if _unsound(sound) else ())))


def _soundness(side: Side) -> str:
    """``valid``, or what is wrong with which of its runs."""
    bad = [(run.name, protocol.unsound_because(run.manifest, run.summary)) for run in side.runs]
    several = len(side.runs) > 1
    return "; ".join(f"{name}: {why}" if several else why for name, why in bad if why) or _VALID


def _unsound(fact: Fact) -> bool:
    return fact.key == VALIDITY and (fact.a, fact.b) != (_VALID, _VALID)


def _not_comparable(protocols: Sequence[Protocol], letters: Sequence[str]) -> str:
    """What differs, in short: what is long stands once, in the protocol."""
    parts, invalid = [], set()
    for letter, each in zip(letters[1:], protocols, strict=True):
        listed = "; ".join(f"{f.key}: {_short(f.a)} | {_short(f.b)}" for f in each.blocking if f.key != VALIDITY)
        if listed:
            parts.append(f"{letters[0]} and {letter} differ in more than what is compared: {listed}")
        for fact in filter(_unsound, each.facts):
            invalid |= {side for side, said in ((letters[0], fact.a), (letter, fact.b)) if said != _VALID}
    if invalid:
        told = " and ".join(sorted(invalid))
        parts.append(f"{told} {'is' if len(invalid) == 1 else 'are'} not valid as a measurement (validity)")
    return ". ".join(parts)


def _names(a: str, b: str, found: Protocol) -> tuple[str, str]:
    """What the sides are called: their letter, and the factor's value where there is a short one."""
    facts = [f for f in found.facts if f.meaning == protocol.FACTOR]
    if len(facts) != 1 or max(len(facts[0].a), len(facts[0].b)) > _LONGEST_NAME:
        return a, b
    key = facts[0].key.rpartition(".")[2]
    return f"{a} ({key} {facts[0].a})", f"{b} ({key} {facts[0].b})"


def _short(value: str) -> str:
    return value if len(value) <= _LONGEST_NAME else f"{value[: _LONGEST_NAME - 3]}..."


def _device(sides: Sequence[Side]) -> str:
    known = {str(run.manifest.get("device", "GPU")) for side in sides for run in side.runs}
    return known.pop() if len(known) == 1 else "device"


def _side(letter: str, side: Side) -> dict[str, Any]:
    return {
        "name": letter,
        "runs": [run.name for run in side.runs],
        "scenario": side.first.manifest.get("scenario", {}).get("name"),
        "digest": side.first.manifest.get("scenario_digest"),
        "verdicts": [run.summary.get("verdict") for run in side.runs],
        "requests": sum(run.count for run in side.runs),
        "failed": sum(int((~run.good).sum()) for run in side.runs),
    }


def _protocol_part(letter: str, found: Protocol) -> dict[str, Any]:
    return {
        "side": letter,
        "comparable": found.comparable,
        "factors": list(found.factors),
        "recognized": found.recognized,
        "facts": [asdict(fact) for fact in found.facts],
    }


def _comparison(
    names: tuple[str, str], found: Differences, verdict: Verdict, change: Change | None, side: Side, baseline: Side
) -> dict[str, Any]:
    by_figure = {(c.metric, c.percentile): c for c in verdict.claims}
    return {
        "a": names[0],
        "b": names[1],
        "verdict": verdict.word,
        "sentence": verdict.sentence,
        "paired": found.paired,
        "why_not_paired": found.why_not_paired,
        "requests": list(found.counts),
        "runs": list(found.runs),
        "block_requests": found.block,
        "metrics": {metric: _metric(metric, found, verdict, by_figure) for metric in METRICS},
        "errors": _errors(baseline, side),
        "stages": {event: _stages(event, found) for event in found.stages},
        "unmeasured": {event: list(names) for event, names in found.unmeasured.items()},
        "changed": None if change is None else asdict(change),
    }


def _metric(
    metric: str, found: Differences, verdict: Verdict, claimed: Mapping[tuple[str, float], Claim]
) -> dict[str, Any]:
    own = found.metrics[metric]
    shown = {p: d for p, d in own.items() if p in _SHOWN or (metric, p) in claimed}
    return {
        "verdict": verdict.metrics[metric],
        "percentiles": {
            percentile_key(p): _figure(d) | _claim_part(claimed.get((metric, p))) for p, d in shown.items()
        },
        "shift": [{"percentile": p, **_figure(own[p])} for p in _DECILES],
    }


def _figure(d: Difference) -> dict[str, Any]:
    """One difference in ms, and as a share of the baseline's value."""
    ci = None if d.low is None or d.high is None else [d.low / 1e6, d.high / 1e6]
    relative = None if not d.a or d.difference is None else d.difference / d.a
    return {
        "a_ms": _ms(d.a) if d.supported else None,
        "b_ms": _ms(d.b) if d.supported else None,
        "difference_ms": _ms(d.difference),
        "ci_ms": ci,
        "relative": relative,
        "relative_ci": None if ci is None or not d.a else [end * 1e6 / d.a for end in ci],
        "p": d.p,
        "df": d.df,
        "why": d.why,
    }


def _claim_part(claim: Claim | None) -> dict[str, Any]:
    """What Holm's correction left of it; a figure outside the family is shown, never claimed."""
    if claim is None:
        return {"in_family": False, "p_adjusted": None, "confirmed": False, "least_ms": None, "floor_ms": None}
    return {
        "in_family": True,
        "p_adjusted": claim.p_adjusted,
        "confirmed": claim.confirmed,
        "least_ms": _ms(claim.least_ns),
        "floor_ms": _ms(claim.floor_ns),
    }


def _stages(event: str, found: Differences) -> dict[str, Any]:
    """The mean ledgers' difference: stages in the order of the timeline, which add up to ``total``."""
    whole = found.totals[event].difference
    rows = []
    for name, d in found.stages[event].items():
        interval = found.shares[event][name]
        told = found.shares[event][name] is not None
        rows.append(
            {
                "stage": name,
                "owner": owner_of(name),
                **_figure(d),
                "share": (d.difference or 0.0) / whole if told and whole else None,
                "share_ci": list(interval) if interval else None,
                "percentiles": {
                    percentile_key(p): _figure(each)
                    for p, each in found.stage_percentiles.get(event, {}).get(name, {}).items()
                },
            }
        )
    return {"total": _figure(found.totals[event]), "stages": rows}


def _errors(a: Side, b: Side) -> dict[str, Any]:
    shares = [sum(int((~r.good).sum()) for r in s.runs) / max(1, sum(r.count for r in s.runs)) for s in (a, b)]
    return {"a_share": shares[0], "b_share": shares[1]}


def _method(found: Sequence[Differences], family: int, *, in_turn: bool) -> dict[str, Any]:
    first = found[0]
    return {
        "estimate": "Harrell-Davis",
        "interval": "stationary block bootstrap, t",
        "confidence": CONFIDENCE,
        "power": POWER,
        "resamples": first.resamples,
        "correction": "Holm",
        "family": family,
        "in_turn": in_turn,
        "sentence": _method_sentence(first, family, in_turn=in_turn),
    }


def _method_sentence(first: Differences, family: int, *, in_turn: bool) -> str:
    how = "drawn in pairs, since both sides issued the same plan" if first.paired else "each side drawn by itself"
    why = f" ({first.why_not_paired})" if first.why_not_paired else ""
    turn = " made in turn" if in_turn else ""
    counted = f"; {first.runs[0]} and {first.runs[1]} runs{turn}, whose spread counts where it is larger"
    runs = counted if max(first.runs) > 1 else ""
    return (
        f"{first.resamples:,} stationary block resamples (blocks of {first.block:.0f} requests on average, {how}{why}) "
        f"of Harrell-Davis percentiles{runs}. Holm's correction over {family} figures: the chance that any "
        f"difference is claimed where there is none is at most {share(1 - CONFIDENCE)}"
    )


def _warnings(sides: Sequence[Side], found: Sequence[Differences], *, in_turn: bool) -> list[str]:
    told = []
    if all(len(side.runs) == 1 for side in sides):
        told.append(
            "one run a side: the intervals hold for these runs, and do not contain how much a repeated run differs on "
            "this machine; gapmeter compare --run SCENARIO --a KEY=VALUE --b KEY=VALUE --pairs 2 measures that too"
        )
    failed = [sum(int((~r.good).sum()) for r in s.runs) / max(1, sum(r.count for r in s.runs)) for s in sides]
    if max(failed) - min(failed) > 0.01:
        told.append(
            f"between {share(min(failed))} and {share(max(failed))} of the requests failed: latencies are those of "
            "successes, and a side that drops its slowest requests looks faster"
        )
    for each in found:
        lost = set(each.unmeasured.get("last_token", ())) & _REAL
        if lost and len(lost) < len(_REAL):
            told.append(f"not measured on both sides, so part of unexplained: {', '.join(sorted(lost))}")
            break
    return told


_REAL = frozenset({"prefill", "decode", "queue", "scheduling", "tokenize", "input_prep", "sampling", "network_in"})


def _ms(ns: float | None) -> float | None:
    return None if ns is None else ns / 1e6
