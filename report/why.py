"""Why slow requests are slow, by who could make them faster."""

from __future__ import annotations

from gapmeter.analysis.judge.words import held_by
from gapmeter.analysis.numbers import bounds, duration, share, significant
from gapmeter.analysis.results.distribution import figure_name
from gapmeter.analysis.results.latency import Anatomy, Band, Burst, OwnerPart, UpgradeBracket, explained_by
from gapmeter.analysis.results.run import FAIL, INVALID, RunFigures, RunResult, SloAnswer
from gapmeter.analysis.stages import UNEXPLAINED, UNEXPLAINED_OWNER, owner_of, owner_words
from gapmeter.report import document as doc
from gapmeter.report import marks
from gapmeter.report.document import Column, Figure, Row, Table
from gapmeter.report.words import WHOLE, as_sentence, part_of, signed

NOTABLE = 0.15  # of the difference: such an owner is named beside the first
_MOST_NAMED = 3
_SHOWN = 3  # owners; what the others have is summed
BASE = 0.5  # of what requests at the percentile wait, when typical ones wait that much, all requests pay it
_SLOW = {"itl": "token gaps"}
_NO_PROBE = "in the server and the network, and unmeasured: no probe timestamps the server's stages"
_BARS = 6
_SMALL = 0.01  # of what typical requests wait: nobody with less is named for it
_ROW = 0.05  # of the wait at the percentile: less is no row


def _name(part: OwnerPart, device: str) -> str:
    return "unexplained" if part.owner == UNEXPLAINED_OWNER else owner_words(part.owner, device)


def whose(part: OwnerPart, device: str) -> str:
    """An owner for people, with the stages that make most of its part: ``contention (queue, core wait)``."""
    stages = "" if part.owner == UNEXPLAINED_OWNER else ", ".join(map(marks.words, part.stages[:2]))
    return _name(part, device) + (f" ({stages})" if stages else "")


def tail_sentence(anatomy: Anatomy, metric: str, device: str, *, listed: bool = False, told: bool = False) -> str:
    """What slow requests (or token gaps) wait for beyond typical ones, and whose it is where that is clear.

    ``listed``: owners and stages stand beside it, so they are not told again. ``told``: the verdict says whose it is.
    """
    what, first = _SLOW.get(metric, "requests"), anatomy.owners[0]
    typical, longer = duration(anatomy.typical.total_ms), f"{duration(anatomy.difference_ms)} longer"
    more = f"slow {what} take {longer} than typical ones"
    if listed:
        stage, ms = _most_of_typical(anatomy) or ("", 0.0)
        # What forward passes take, the sentence after it says.
        most = f" ({duration(ms)} {marks.words(stage)})" if stage and stage not in ("prefill", "decode") else ""
        more = f"typical {what} take {typical}{most}, slow ones {longer}"
    if told:
        return more
    if is_unmeasured(anatomy):
        return f"{more}; {_part_of(first, 'that', _NO_PROBE)}"
    if anatomy.leading is not None:
        of_that = ("it", _name(first, device)) if listed else ("that", whose(first, device))
        return f"{more}; {_part_of(first, *of_that)}"
    named = [part for part in anatomy.owners if (part.share or 0.0) >= NOTABLE][:_MOST_NAMED] or [first]
    if is_probable(anatomy):
        few = f"mostly {whose(first, device)}; there are too few to be sure"
        return f"{more}, {f'probably {_name(first, device)}' if listed else few}"
    parts = [f"{whose(part, device)} {signed(part.ms)}" for part in named]
    return f"{more}, with no single cause{'' if listed else ': ' + ', '.join(parts)}"


def around_sentence(anatomy: Anatomy, metric: str) -> str:
    """What is averaged where the mean around a percentile lies far from the percentile; "" where it lies near."""
    if anatomy.at_range_ms is None:
        return ""
    low, high = anatomy.at_range_ms
    return (
        f"the {anatomy.at.count} {_SLOW.get(metric, 'requests')} around p{anatomy.percentile:g} took "
        f"{duration(low)} to {duration(high)}; shown is their mean, {duration(anatomy.at.total_ms)}, not "
        f"p{anatomy.percentile:g} itself"
    )


def _most_of_typical(anatomy: Anatomy) -> tuple[str, float] | None:
    """The stage that is most of what typical requests wait, and its ms; None without one."""
    stage, ms = max(anatomy.typical.stages_ms.items(), key=lambda each: each[1])
    return None if stage == UNEXPLAINED or ms <= anatomy.typical.total_ms / 2 else (stage, ms)


def pays_sentence(anatomy: Anatomy, metric: str, device: str, *, listed: bool = False) -> str:
    """What every request pays, where that is most of what those at the percentile wait, or one stage; "" else.

    ``listed`` as in ``tail_sentence``.
    """
    all_pay, most = anatomy.typical.total_ms >= BASE * anatomy.at.total_ms, _most_of_typical(anatomy)
    if _unstamped(anatomy) or not (all_pay or most):
        return ""
    name = figure_name(metric, anatomy.percentile)
    typical, at = duration(anatomy.typical.total_ms), duration(anatomy.at.total_ms)
    said = f"typical {_SLOW.get(metric, 'requests')} take {typical}"
    if all_pay and not listed and typical != at:  # where p50 is asked for, they are the same requests
        said = f"typical {_SLOW.get(metric, 'requests')} already take {typical} of the {at} around {name}"
    if most is not None:
        stage, ms = most
        return f"{said}, {duration(ms)} of it {marks.with_owner(stage, device)}"
    ranked = sorted(anatomy.owners, key=lambda part: -part.typical_ms)
    least = _SMALL * anatomy.typical.total_ms
    ranked = [part for part in ranked[:2] if part.typical_ms >= least]
    named = [_name(part, device) + ("" if listed else f" ({duration(part.typical_ms)})") for part in ranked]
    if anatomy.payer == ranked[0].owner != UNEXPLAINED_OWNER:
        return f"{said}, most of it {named[0]}"
    return f"{said}, mostly {' and '.join(named)}"


def tail_sentences(result: RunFigures) -> dict[str, str]:
    """A sentence for each metric, the one that matters most in front; none of what is no measurement."""
    ordered = dict.fromkeys((result.tail.metric, "ttft", "e2e", "itl") if result.verdict != INVALID else ())
    return {
        metric: tail_sentence(anatomy, metric, result.device)
        for metric in ordered
        if metric and (anatomy := result.tail.of(metric))
    }


def upgrades(result: RunFigures) -> dict[str, UpgradeBracket]:
    """For each metric, what a faster device leaves of it."""
    brackets = {"ttft": result.upgrade.ttft, "e2e": result.upgrade.e2e}
    return {metric: bracket for metric, bracket in brackets.items() if bracket and result.verdict != INVALID}


def upgrade_sentence(
    bracket: UpgradeBracket, metric: str, device: str, asked: float | None = None, *, listed: bool = False
) -> str:
    """``asked``: the percentile to tell it of, where the bracket has that; else it is the bracket's own.

    ``listed``: what it is now stands above.
    """
    ends = (bracket.now, bracket.lower, bracket.upper)
    percentile = bracket.percentile
    if asked is not None and all(end.ms(asked) is not None for end in ends):
        percentile = asked
    now, low, high = (end.ms(percentile) or 0.0 for end in ends)
    cause = f"an infinitely fast {device}" if device != "CPU" else "instant forward passes"  # what else it does stays
    rest = bounds(low, high) if duration(low) != duration(high) else duration(low)
    return f"{cause} would cut {figure_name(metric, percentile)}{'' if listed else f' from {duration(now)}'} to {rest}"


def most_an_upgrade_brings(result: RunFigures, *, listed: bool = False) -> str:
    """The most that an infinitely fast device could bring, of what is explained; "" where that is not known."""
    metric, brackets = main_metric(result), upgrades(result)
    shown = next((name for name in (metric, "e2e" if metric == "itl" else "ttft", "e2e") if name in brackets), None)
    if shown is None:
        return ""
    anatomy = result.tail.of(shown) if shown == metric else None
    asked = anatomy.percentile if anatomy else None
    return as_sentence(upgrade_sentence(brackets[shown], shown, result.device, asked, listed=listed))


def excess_sentence(result: RunFigures, missed: SloAnswer) -> str:
    """For a missed limit: whose most of the excess is, in a clause; "" where nobody is to be named."""
    anatomy, what = result.tail.of(explained_by(missed.metric)), _SLOW.get(explained_by(missed.metric), "requests")
    if anatomy is not None and typical_misses(anatomy, missed):
        first, said = payer(anatomy), f"typical {what} already take {duration(anatomy.typical.total_ms)}"
        named = f", {duration(first.typical_ms)} of it {whose(first, result.device)}"
        return said if first.owner == UNEXPLAINED_OWNER else f"{said}{named}"
    if anatomy is None or anatomy.leading is None:
        return ""
    first = anatomy.owners[0]
    return _part_of(first, f"the extra time of slow {what}", whose(first, result.device))


def typical_misses(anatomy: Anatomy, missed: SloAnswer) -> bool:
    """Whether not only slow requests (or token gaps) are beyond a limit of latency, but typical ones too."""
    return missed.percentile is not None and anatomy.typical.total_ms > missed.limit


def payer(anatomy: Anatomy) -> OwnerPart:
    """The owner with most of what typical requests wait, with the stages that make it, the largest first."""
    first = max(anatomy.owners, key=lambda part: part.typical_ms)
    return first.model_copy(update={"stages": _most_of(anatomy.typical, first.owner)})


def _most_of(band: Band, owner: str) -> tuple[str, ...]:
    """The stages that make most of what an owner has of a band, the largest first."""
    mine = sorted((-ms, stage) for stage, ms in band.stages_ms.items() if owner_of(stage) == owner)
    return tuple(stage for ms, stage in mine if ms < NOTABLE * sum(ms for ms, _ in mine))


def is_probable(anatomy: Anatomy) -> bool:
    """Whether one owner has most of the difference, by too few slow ones to be sure."""
    first, *others = anatomy.owners
    return anatomy.leading is None and None in first.share_ci and all((p.share or 0.0) < NOTABLE for p in others)


def is_unmeasured(anatomy: Anatomy) -> bool:
    """Whether most of what slow ones wait longer for went by where no probe stamps it."""
    return anatomy.owners[0].owner == UNEXPLAINED_OWNER and _unstamped(anatomy)


def _unstamped(anatomy: Anatomy) -> bool:
    """Whether no probe stamped the server's stages."""
    return not {"prefill", "decode"} & set(anatomy.typical.stages_ms)


def _part_of(part: OwnerPart, whole: str, who: str) -> str:
    """A share with its interval; in milliseconds where it is more than the whole, since others went the other way."""
    value = part.share or 0.0
    if value > WHOLE:
        return f"{who} takes {duration(part.ms)} longer; the other stages together take less"
    return f"{part_of(value, part.share_ci)} of {whole} is {who}"


def deciding(result: RunFigures) -> SloAnswer | None:
    """The first SLO whose answer is the verdict; errors where that one is missed only because requests failed."""
    of_it = [slo for slo in result.slo if slo.status == result.verdict]
    if of_it and through_failures(result, of_it[0]):
        return next((slo for slo in of_it if slo.metric == "errors"), of_it[0])
    return of_it[0] if of_it else None


def through_failures(result: RunFigures, slo: SloAnswer) -> bool:
    """Whether requests that failed miss a limit of latency: without them no more exceed it than may."""
    if slo.status != FAIL or slo.percentile is None or slo.beyond is None:
        return False
    answered = result.metrics[slo.metric].count
    failed = slo.count - answered
    return failed > 0 and slo.beyond - failed <= (1 - slo.percentile / 100) * answered


# --- the section


def main_metric(result: RunFigures) -> str | None:
    """The metric that the first screen explains; None where not slow requests but failed ones missed the limit."""
    decided = deciding(result) if result.verdict == FAIL else None
    if decided is not None and (decided.metric == "errors" or through_failures(result, decided)):
        return None
    metrics = (explained_by(decided.metric),) if decided is not None else (result.tail.metric, "ttft", "e2e")
    return next((metric for metric in metrics if metric and result.tail.of(metric)), None)


def _explained(result: RunResult) -> tuple[str, Anatomy] | None:
    """The metric whose owners are named, with its anatomy; None where nobody is to be named."""
    metric = main_metric(result)
    anatomy = result.tail.of(metric) if metric else None
    return None if result.verdict == INVALID or metric is None or anatomy is None else (metric, anatomy)


def owners(result: RunResult, *, in_letters: bool = False) -> Table | None:
    """A row an owner: its time at the limit's percentile and beyond typical requests; None where nobody can be named.

    ``in_letters``: with bars, for the terminal and for Markdown.
    """
    if (explained := _explained(result)) is None or is_unmeasured(explained[1]):
        return None
    metric, anatomy = explained
    name = metric.upper()
    parts = [part for part in anatomy.owners if max(part.at_ms, abs(part.ms)) > _ROW * anatomy.at.total_ms]
    longest = max((part.ms for part in parts), default=0.0)
    largest = sorted(parts[1:], key=lambda part: -max(part.at_ms, abs(part.ms)))  # what everybody waits for, too
    shown = [*parts[:1], *largest[: _SHOWN - 1]]
    rows: list[Row] = []
    for at, part in enumerate(anatomy.owners):
        if part not in shown:
            continue
        key = f"tail.{metric}.owners.{at}"
        most = part.stages or _most_of(anatomy.at, part.owner)
        length = round(_BARS * max(part.ms, 0.0) / longest) if longest > 0 else 0
        rows.append([
            _name(part, result.device), Figure(part.at_ms, "ms", f"{key}.at_ms"),
            Figure(part.ms, "ms", f"{key}.ms", text=signed(part.ms)),
            *(["#" * length] if in_letters else []), ", ".join(map(marks.words, most[:2])),
        ])  # fmt: skip
    rest = [part for part in parts if part not in shown]
    at_ms, ms = sum(part.at_ms for part in rest), sum(part.ms for part in rest)
    if max(at_ms, abs(ms)) > 2 * _ROW * anatomy.at.total_ms:
        rows.append(["the rest", Figure(at_ms), signed(ms), *([""] if in_letters else []), ""])
    where = "at" if anatomy.at_range_ms is None else "around"
    headers: doc.Headers = [
        Column("owner", brief=f"WHY {name}"),
        Column(f"{where} p{anatomy.percentile:g}", f"{where} p{anatomy.percentile:g} (ms)"),
        Column("slow vs typical", "slow vs typical (ms)"),
        *([Column(" ", wraps=True)] if in_letters else []),
        Column("mostly", wraps=True),
    ]
    return Table(f"Why: {name} by who could shorten it", headers, rows, words=1, css="compact")


def unprobed_sentence(result: RunResult) -> str:
    """What is known where no probe stamped the server's stages, in short; else ""."""
    if (explained := _explained(result)) is None or not is_unmeasured(explained[1]):
        return ""
    metric, anatomy = explained
    usual, at = (duration(ms) for ms in (anatomy.owners[0].typical_ms, anatomy.owners[0].at_ms))
    name, what = figure_name(metric, anatomy.percentile), _SLOW.get(metric, "requests")
    return f"No probe: server and network {at} at {name}, {usual} of typical {what}."


def said_of(result: RunResult, *, listed: bool = False) -> list[str]:
    """What every request pays, and what slow ones wait for beyond that; nothing where nobody is to be named.

    ``listed``: the owners' table stands above it, and what to try beneath, which say some of this; so does the verdict.
    """
    if (explained := _explained(result)) is None:
        return []
    metric, anatomy = explained
    burst = (result.bursts or {}).get(metric)
    decided = deciding(result) if result.verdict == FAIL else None
    told = decided is not None and bool(excess_sentence(result, decided))
    all_miss = decided is not None and typical_misses(anatomy, decided)
    pays = "" if all_miss or (listed and not told) else pays_sentence(anatomy, metric, result.device, listed=listed)
    brief = listed and not all_miss
    slow = tail_sentence(anatomy, metric, result.device, listed=brief, told=told and not all_miss)
    said = (
        "" if listed else around_sentence(anatomy, metric),
        pays,
        "" if brief and told else slow,
        burst_sentence(burst, result.device) if burst else "",
        "" if listed else cores_sentence(result, anatomy),
    )
    return [one for one in said if one]


def burst_sentence(burst: Burst, device: str) -> str:
    """How many of the slowest were due within how long, when; what held them up then, as far as that is known."""
    lasted, begun = duration(1000 * (burst.to_s - burst.from_s)), significant(burst.from_s)
    said = f"{burst.count} of the {burst.of} slowest requests were due within {lasted} (t = {begun} s)"
    if burst.slots is not None:
        said += f", when all {burst.slots} slots were taken"
    elif burst.queued:
        said += ", when requests waited in the scheduler's queue"
    if burst.stage is None or (burst.stage == "queue" and (burst.slots is not None or burst.queued)):
        return said
    return f"{said}; most of their extra time was {marks.with_owner(burst.stage, device)}"


def cores_sentence(result: RunResult, anatomy: Anatomy) -> str:
    """Who had the cores, where waiting for one is among the causes; "" where it is not, or that is not known."""
    held = [one for one in result.ledger.core_held or () if one.share >= NOTABLE][:_MOST_NAMED]
    if not held or anatomy.at.stages_ms.get("core_wait", 0.0) < NOTABLE * anatomy.at.total_ms:
        return ""
    names = ", ".join(f"{held_by(one.process, one.stage, one.program)} ({share(one.share)})" for one in held)
    return f"the cores that the server waited for were used by {names}"
