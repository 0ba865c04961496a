"""What is said of a search for capacity: the answer, latency and goodput against rate, the posterior, every trial."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gapmeter.analysis.numbers import DASH, bounds, count, counted, duration, rate, share, significant
from gapmeter.analysis.results.capacity import (
    BUDGET,
    CLIENT,
    DIED,
    FOUND,
    INTERRUPTED,
    NOT_MEASURED,
    UNDECIDED,
    UNMEETABLE,
    CapacityResult,
    Fleet,
    LatencyCurve,
    Search,
    SearchWords,
    TrialResult,
)
from gapmeter.analysis.results.codec import Ends
from gapmeter.analysis.results.distribution import figure_name
from gapmeter.analysis.results.manifest import SearchManifest
from gapmeter.records import RunFolder
from gapmeter.report import cost, html, marks, pareto
from gapmeter.report import document as doc
from gapmeter.report.capacity_charts import Goodput, Latency, Posterior, measured
from gapmeter.report.document import BRIEF, TERMINAL, Chart, Column, Figure, Mark, Name, Row, Section, Table
from gapmeter.report.slo import slo_sentence
from gapmeter.report.words import low_to_high, page_of, reproduce, tone
from gapmeter.scenarios.slo import parse_slo

_NO_END = 0.01  # of a latency's upper end: far below what was tried a curve may fall to nothing
_MOST_DRIFT = 0.1  # a mean near the largest of those that are modelled, 12 %
# How often a rate held is too high, by the drift simulated: the upper end of the share's 95 % interval, as
# docs/results/capacity.json has it.
TOO_HIGH: Final[Mapping[float, float]] = {0.0: 0.0106, 0.03: 0.0075, 0.06: 0.0295}
_MOST_BURSTS = 4.0  # that were simulated


def write(folder: RunFolder, result: CapacityResult) -> CapacityResult:
    """``summary.json`` and ``report.html`` of a search's folder. Returns the result with its words. Raises OSError."""
    result = result.model_copy(update={"words": SearchWords(headline=headline(result.capacity))})
    result.write(folder.path)
    html.write(folder.report, document(result, SearchManifest.read(folder.path)))
    return result


def document(result: CapacityResult, manifest: SearchManifest) -> doc.Document:
    """The whole report; its page links to the trials' own."""
    search = result.capacity
    answer, *more = headline(search)
    return doc.Document(
        title=f"capacity · {result.name} · gapmeter",
        header=doc.Header(f"{result.name}: capacity", result.provenance.load),
        verdict=doc.Verdict(
            "", "" if search.ended == FOUND else "open", answer, more=[doc.Said(line) for line in more]
        ),
        sections=[
            _latency(search, search.latency) if search.latency and search.rate else None,
            _goodput(search) if search.curve else None,
            _posterior(search) if search.posterior and search.rate else None,
            pareto.section(search.pareto, "capacity.pareto"),
            _trials_in_short(search),
            *_economy(result, manifest),
            _trials(search),
            _how(search, manifest),
        ],
        provenance=result.provenance,
    )


def meaning(search: Search) -> str:
    """How the search ended, beside its exit code; "" where the code says all."""
    if search.ended == BUDGET and search.rate:
        return "the interval is wider than asked"
    return {
        FOUND: "capacity found",
        BUDGET: "not decided within the budget",
        CLIENT: "the load tester was the limit",
        NOT_MEASURED: "not valid as a measurement",
        UNMEETABLE: "no rate meets every SLO",
    }.get(search.ended, "")


# --- the answer in sentences


def headline(search: Search) -> tuple[str, ...]:
    """The answer first, then what binds, then what it takes."""
    if search.ended == CLIENT:
        because = f" ({search.reason})" if search.reason else ""
        found = f"at least {rate(search.low)}: beyond that" if search.low else "not found:"
        answer = f"Capacity {found} the load tester was the limit, not the server{because}."
    elif search.ended == UNMEETABLE:
        answer = _unmeetable(search)
    elif search.rate:
        answer = _interval(search)
    else:
        ends = [f"at least {rate(search.low)}"] * bool(search.low)
        ends += [f"below {rate(search.high)}, where the SLOs are proven to fail"] * bool(search.high)
        answer = f"Capacity {'; '.join(ends) or 'not found: no trial reached a decision'} ({_why(search)})."
    lines = [answer]
    if search.rate:
        lines.append(_held(search))
    if search.curve and not any(point.good_share for point in search.curve):
        lines.append("No request of any trial met every limit; the trials' pages say why.")
    if search.disturbed:
        lines.append(
            f"In {search.disturbed} of {len(search.trials)} trials another program used the server's cores, or the "
            "load tester's CPU changed its speed (see their pages), so the answer is for the machine as it was then."
        )
    if search.binding_slo:
        lines.append(_binding(search, search.binding_slo))
    if search.planning:
        lines.append(_fleet(search, search.planning))
    elif search.target_rps:
        why = "the number of servers is unknown: no rate was found at which every SLO holds"
        if search.ended == UNMEETABLE:
            why = "no number of servers is enough: even the lowest rate tried misses an SLO"
        lines.append(f"For {rate(search.target_rps)}: {why}.")
    return tuple(lines)


def _fleet(search: Search, plan: Fleet) -> str:
    """How many servers a load takes by what is sure, what they cost, and what to expect of each."""
    spare = f", {plan.spare} of them spare" if plan.spare else ""
    fewest = plan.needed_at_high
    fewer = f" ({fewest + plan.spare} if the estimate's upper end is right)" if fewest else ""
    expected, at = plan.expected, ""
    if search.latency and expected:  # far below the capacity the curve's lower end may be too high
        high = expected.ci_ms[1]
        most = "has no upper end yet" if high is None else f"should be at most {duration(high)}"
        at = f", where {_percentile(search.latency)} {most}"
    return (
        f"For {rate(plan.target_rps)}: {counted(plan.replicas, 'server')}{fewer}{spare}{cost.fleet_words(plan)}. "
        f"Each is planned for {rate(plan.planned_rps)}, {'the proven rate' if search.held else 'the lower end'} less "
        f"{share(plan.headroom)}{at}."
    )


def _percentile(curve: LatencyCurve) -> str:
    """``p99 TTFT``."""
    slo = parse_slo(curve.slo)
    return figure_name(slo.metric, slo.percentile)


def _ends(ends: Ends | None) -> str:
    """Of a latency's interval: without an upper end the server may not keep up, and the lower one may tell nothing."""
    low, high = ends or (None, None)
    if low is not None and high is not None and low < _NO_END * high:
        return f"{duration(high)} or less"
    return f"{duration(low)} or more" if high is None and low is not None else bounds(low, high)


def _interval(search: Search) -> str:
    """The estimate, and what it assumes; what is wider than was asked, or of a search that broke off, says so."""
    low, high = ("unknown" if end is None else significant(end) for end in (search.low, search.high))
    text = f"Capacity {rate(search.rate)}, {100 * search.confidence:g} % interval {low} .. {high}"
    if search.drift is not None:
        text += ", assuming latency grows like a queue's"
    if search.spread is None or search.spread > search.within:
        text += f" (wider than the {share(search.within)} asked: {_why(search)})"
    elif search.ended not in (FOUND, BUDGET):
        text += f" ({_why(search)})"
    return f"{text}."


def _held(search: Search) -> str:
    """What was proven without the curve, and what both rest on."""
    drift = ""
    if search.drift is not None:
        more = ", or more: the most that is modelled" if search.drift > _MOST_DRIFT else ""
        drift = f" The server's speed differs by about {share(search.drift)} between trials{more}."
    if search.held is None:
        why = ": there was not enough time left to prove one" if search.ended in (FOUND, BUDGET) else ""
        return f"No rate was proven to hold{why}.{_unproven(search)}{drift}"
    part = share(search.held / (search.rate or search.held))
    return f"Proven to hold: {rate(search.held)}, {part} of the estimate{_guarantee(search)}.{drift}"


def _guarantee(search: Search) -> str:
    """How often a rate held was too high in simulated searches, at no less drift; without a curve, the test's say."""
    if search.burstiness is None or search.burstiness > _MOST_BURSTS:
        return " (how often such a rate is too high was not simulated for bursts like these)"
    if search.drift is None:
        return " (95 % sure, less where errors come in bursts)"
    simulated = min((each for each in TOO_HIGH if each >= search.drift), default=None)
    of = max(TOO_HIGH) if simulated is None else simulated
    often = f"too high in at most {share(TOO_HIGH[of])} of searches on simulated servers"
    more = "; more was not simulated" if simulated is None else ""
    return f" ({often} whose speed differs by {100 * of:g} %{more})"


def _unproven(search: Search) -> str:
    """Of the undecided trial in which the most were all within the limit: what they are worth, if that is little."""
    within = [trial for trial in search.trials if trial.verdict == UNDECIDED and not trial.decided_by.over]
    if not within:
        return ""
    most = max(within, key=lambda trial: trial.decided_by.count)
    values = most.decided_by
    if values.n_eff > values.count / 2:
        return ""
    return (
        f" At {rate(most.rate)} all {count(values.count)} values were within the limit, but neighbors in a queue are"
        f" alike, so they count as {count(values.n_eff)} independent ones."
    )


def _why(search: Search) -> str:
    reason = f": {search.reason}" if search.reason else ""
    return {
        FOUND: "found",
        BUDGET: "the budget ran out",
        NOT_MEASURED: f"what it measured was not valid{reason}",
        DIED: f"the server died{reason}",
        INTERRUPTED: "interrupted; this is what is known so far",
    }[search.ended]


def _unmeetable(search: Search) -> str:
    if (seen := search.best_seen) is None:
        return "No rate meets every SLO."
    over = f"{count(seen.over)} of {count(seen.count)} values beyond its limit"
    best = f" {slo_sentence(seen.answer)}." if seen.answer else ""
    if any(point.rate < seen.rate for point in search.curve):
        where = f"at {rate(seen.rate)} and below as well as above"
    else:
        where = f"even at {rate(seen.rate)}, the lowest tried"
    return f"No rate meets every SLO: {where}, {seen.slo} fails ({over}).{best}"


def _binding(search: Search, slo: str) -> str:
    text = f"Limiting SLO: {slo}"
    if parse_slo(slo).metric == "errors":  # no stage has them
        return f"{text}."
    if search.binding_stage is None or search.binding_share is None:
        return f"{text}; the limiting stage is unmeasured."
    # A stage can grow by more than the whole difference, where another shrank.
    some = search.binding_share <= 1
    much = f"{share(search.binding_share)} of" if some else "all of"
    whose = f"{marks.words(search.binding_stage)} ({search.binding_owner})"
    return f"{text}; at {rate(search.binding_rate)} {much} the extra time of slow requests is {whose}."


# --- sections


def _latency(search: Search, curve: LatencyCurve) -> Section:
    name = _percentile(curve)
    rows: list[Row] = [
        ["the curve", Figure(p.rate, "rate"), Figure(p.value_ms, key=f"capacity.latency.points.{at}.value_ms"),
         _ends(p.ci_ms), ""]
        for at, p in enumerate(curve.points) if at % 4 == 0
    ]  # fmt: skip
    rows += [
        [f"trial {trial.number}", Figure(trial.rate, "rate"), Figure(slo.value_ms), _ends(slo.ci_ms), trial.verdict]
        for trial, slo in measured(search, curve)
    ]
    table = Table(f"{name} against rate", ["", "rate", name, "95 % interval", "SLOs"], rows, words=1)
    if any(trial.rate <= curve.points[-1].rate for trial, _ in measured(search, curve)):
        seen = (
            "Points: each trial's own (green: every SLO held; red: one failed; hollow: undecided). Their intervals "
            "leave out the drift between trials; near the ceiling they tend to lie low, since a trial meets few of the "
            "long waits."
        )
    else:
        seen = "No trial at these rates has a percentile that counts, so little more than the curve's shape is known."
    lead = (
        f"Line and band: {name} by the curve, with its {100 * search.confidence:g} % interval; where it meets the "
        f"limit is the capacity. {seen}"
    )
    chart = Chart("latency", Latency(search, curve, name), table=table, margin="levels")
    return Section("latency", table.name, [chart], lead, "latency")


def _goodput(search: Search) -> Section:
    rows: list[Row] = [
        [rate(p.rate), p.verdict, Figure(p.goodput_per_s, "rate", f"capacity.curve.{at}.goodput_per_s"),
         low_to_high(p.goodput_ci) or DASH, share(p.good_share), count(p.n)]
        for at, p in enumerate(search.curve)
    ]  # fmt: skip
    table = Table("Goodput against rate", ["rate", "SLOs", "goodput", "95 % interval", "good", "n"], rows, words=2)
    shaded = "where every SLO holds (light: may hold)" if search.held else "the interval in which the capacity lies"
    lead = (
        f"Goodput: requests per second that met every limit. Dashed: the offered rate. Shaded: {shaded}. "
        "Green: every SLO held; red: one failed; hollow: undecided."
    )
    chart = Chart("goodput", Goodput(search), table=table, margin="levels")
    return Section("curve", table.name, [chart], lead, "goodput")


def _posterior(search: Search) -> Section:
    assert search.posterior is not None
    edges, masses = search.posterior.rates, search.posterior.masses
    rows: list[Row] = [
        [Figure(low, "rate"), Figure(high, "rate"), Figure(mass, "share")]
        for low, high, mass in zip(edges[:-1], edges[1:], masses, strict=True)
        if mass >= 0.001
    ]
    heads: doc.Headers = [Column("from", "from (1/s)"), Column("to", "to (1/s)"), "probability"]
    table = Table("Where the capacity lies", heads, rows, words=0)
    by = (
        "Between a rate that did not fail and one that failed or was more than the server could do"
        if search.drift is None
        else "By the trials' percentiles, if they follow a queue's curve up to the server's ceiling "
        f"({rate(search.ceiling)})"
    )
    lead = f"{by}. Shaded: {100 * search.confidence:g} % of it. Ticks: rates that were tried."
    chart = Chart("posterior", Posterior(search), table=table, margin="levels")
    return Section("posterior", table.name, [chart], lead, "posterior")


def _economy(result: CapacityResult, manifest: SearchManifest) -> list[Section]:
    """Cost, efficiency and value: a table on the page; in the terminal the cost, and the energy if it was measured."""
    economy = result.economy
    if economy is None:
        return []
    simulated, proven = manifest.asked.server.engine == "simulated", result.capacity.held is not None
    how = cost.how_of(economy, simulated=simulated, proven=proven)
    brief = cost.lines(economy, how)[: 2 if economy.energy.per_request_j is not None else 1]
    whole = cost.section(economy, how, result.capacity.confidence, proven=proven)
    return [Section("cost", "", [doc.Facts(brief)], on=TERMINAL), whole]


def _trials_in_short(search: Search) -> Section:
    rows: list[Row] = []
    for trial in search.trials:
        seen, slo = trial.reason or "", trial.decided_by if trial.confidence is not None else None
        if slo:
            which = f"{slo.text}: " if len(trial.slos) > 1 and slo.text != search.binding_slo else ""
            beyond = f"{count(slo.over)} of {count(slo.count)} over, effective n {count(slo.n_eff)}"
            grew = ", but the queue grew" if trial.overloaded else ""
            seen = f"{which}{beyond}{grew}"
        rows.append([str(trial.number), Figure(trial.rate, "rate"), *_found(trial), seen])
    headers: doc.Headers = ["", "rate", Column("verdict", wraps=True), "confidence", Column("evidence", wraps=True)]
    return Section("in-short", "", [Table("Trials", headers, rows, words=1)], on=BRIEF)


def _found(trial: TrialResult) -> tuple[Mark, str]:
    """A trial's verdict, or to which side it leans, and how sure that is."""
    leans = trial.verdict == UNDECIDED and (trial.confidence or 0.0) > 0.5
    lean = f", probably {trial.leaning}" if leans else ""
    sure = DASH if trial.verdict == UNDECIDED and not leans else share(trial.confidence)
    return Mark(f"{trial.verdict}{lean}", tone(trial.verdict)), sure


def _trials(search: Search) -> Section:
    rows: list[Row] = []
    for at, trial in enumerate(search.trials):
        slo, grew = trial.decided_by, "; but the queue grew" if trial.overloaded else ""
        href = page_of(trial.folder)
        verdict, sure = _found(trial)
        rows.append([
            Name(str(trial.number), href), verdict,
            trial.reason or f"{trial.slo}{grew}", Figure(trial.rate, "rate", f"capacity.trials.{at}.rate"),
            sure, f"{count(slo.over)} of {count(slo.count)}", share(slo.allowed), count(slo.n_eff),
            count(trial.requests), duration(1000 * trial.seconds),
        ])  # fmt: skip
    headers = ["trial", "verdict", "because of", "rate", "confidence", "beyond the limit", "allowed", "effective n",
               "requests", "took"]  # fmt: skip
    lead = (
        "In the order in which they ran. Each links to its run's report, which judges it like any other run, so it may "
        "differ from the search. Beyond the limit: values of the SLO named; effective n: how many independent values "
        "they are worth."
    )
    return Section("trials", "Every trial", [Table("Trials", headers, rows, words=3)], lead, "trials")


def _how(search: Search, manifest: SearchManifest) -> Section:
    text = (
        f"{counted(len(search.trials), 'trial')} with {counted(search.requests, 'request')} in "
        f"{duration(1000 * search.seconds)}, one server. A trial's looks are fixed before it starts and share the "
        "allowed error (alpha spending), so stopping early adds no bias. docs/capacity.md has the rules."
    )
    return Section("how", "How it was searched", reproduce(manifest), text, "how")
