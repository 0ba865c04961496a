"""The page of a capacity search: the answer, goodput and verdicts against rate, the posterior, every trial."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from gapmeter.analysis.capacity.trial import FAILS, HOLDS
from gapmeter.analysis.numbers import DASH, duration, rate, share, significant
from gapmeter.analysis.provenance import UNKNOWN, Provenance
from gapmeter.records import RunFolder
from gapmeter.report import bridge
from gapmeter.report.capacity.pictures import density, goodput, verdicts
from gapmeter.report.cost import economy_section
from gapmeter.report.figure import Row, Table, Value, figure, written
from gapmeter.report.shell import Section, how_section, page_shell
from gapmeter.report.svg import el, group

_CSS = {HOLDS: "met", FAILS: "missed"}


def page(summary: Mapping[str, Any], manifest: Mapping[str, Any]) -> str:
    """The page as text."""
    part = summary["capacity"]
    origin = provenance(summary, manifest)
    header = el("header", el("h1", f"{summary['name']}: capacity"), el("p", origin.load), class_="top")
    sections = [
        _answer(part),
        _curve_section(part, origin) if part["curve"] else None,
        _posterior_section(part, origin) if part["posterior"] and part["rate"] else None,
        economy_section(summary, origin),
        _trials_section(part, origin),
        _how_section(manifest, part),
    ]
    version = manifest.get("versions", {}).get("gapmeter", "")
    return page_shell(f"capacity · {summary['name']} · gapmeter", sections, origin, header=header, version=version)


def provenance(summary: Mapping[str, Any], manifest: Mapping[str, Any]) -> Provenance:
    """Where a search's figures are from."""
    scenario, part = manifest["scenario"], summary["capacity"]
    server = scenario["server"]
    return Provenance(
        scenario=str(summary["name"]),
        digest=str(manifest.get("scenario_digest", "")),
        model=str(server["model"]),
        precision=str(server["precision"]),
        engine=str(server["engine"]),
        hardware=bridge.hardware_words(manifest.get("hardware") or {}),
        load=f"Poisson, open loop, {len(part['trials'])} trials",
        n=str(part["requests"]),
        validity="valid" if part["ended"] in ("found", "budget", "unmeetable") else part["ended"].replace("_", " "),
        date=str(manifest.get("started_wall", UNKNOWN)).partition("T")[0],
        command=str(manifest.get("command", UNKNOWN)),
    )


def _answer(part: Mapping[str, Any]) -> Section:
    lines = part["headline"]
    body = el("div", el("p", lines[0], class_="sentence"), *(el("p", line, class_="owner") for line in lines[1:]),
              class_="verdict" if part["ended"] == "found" else "verdict INCONCLUSIVE")  # fmt: skip
    return Section("answer", "", body)


def _curve_section(part: Mapping[str, Any], origin: Provenance) -> Section:
    rows: list[Row] = [
        [rate(p["rate"]), p["verdict"], Value(_rate(p["goodput_per_s"]), p["goodput_per_s"]), _ends(p["goodput_ci"]),
         share(p["good_share"]), f"{p['n']:,}"]
        for p in part["curve"]
    ]  # fmt: skip
    table = Table("Goodput against rate", ["rate", "SLOs", "goodput", "95 % interval", "good", "n"], rows, words=2)
    lead = (
        "Goodput: requests per second that kept every limit themselves. Dashed: what was asked for. Shaded: where "
        "every SLO holds (light: may hold, the interval). Green: every SLO held; red: one failed; hollow: undecided."
    )
    body = group([
        figure(goodput(part, "goodput"), table, origin, css="levels"),
        el("h3", "How sure each trial is that every SLO holds at its rate"),
        figure(verdicts(part, "verdicts"), _sure_table(part), origin, css="levels"),
    ])  # fmt: skip
    return Section("curve", "Goodput against rate", body, lead, "goodput")


def _sure_table(part: Mapping[str, Any]) -> Table:
    """Of each trial how likely it is that every SLO holds at its rate."""
    told = [trial for trial in part["trials"] if trial["confidence"] is not None]
    sure = [trial["confidence"] if trial["leaning"] == HOLDS else 1 - trial["confidence"] for trial in told]
    rows: list[Row] = [
        [str(trial["number"]), Value(rate(trial["rate"]), trial["rate"]), trial["verdict"], Value(share(held), held)]
        for trial, held in zip(told, sure, strict=True)
    ]
    headers = ["trial", "rate", "verdict", "sure that all hold"]
    return Table("How sure each trial is", headers, rows, csv=["trial", "rate (1/s)", "verdict", "share"], words=1)


def _posterior_table(part: Mapping[str, Any]) -> Table:
    """The probability between neighboring rates, where there is a thousandth of it."""
    edges, masses = part["posterior"]["rates"], part["posterior"]["masses"]
    rows: list[Row] = [
        [Value(rate(low), repr(low)), Value(rate(high), repr(high)), Value(share(mass), repr(mass))]
        for low, high, mass in zip(edges[:-1], edges[1:], masses, strict=True)
        if mass >= 0.001
    ]
    csv = ["from (1/s)", "to (1/s)", "probability"]
    return Table("Where the capacity lies", ["from", "to", "probability"], rows, csv=csv, words=0)


def _posterior_section(part: Mapping[str, Any], origin: Provenance) -> Section:
    lead = (
        f"Probabilistic bisection: each trial moves probability to the side that it points to, by its own confidence. "
        f"Shaded: {100 * part['confidence']:g} % of it. Ticks: rates that were tried."
    )
    picture = figure(density(part, "posterior"), _posterior_table(part), origin, css="levels")
    return Section("posterior", "Where the capacity lies", picture, lead, "posterior")


def _trials_section(part: Mapping[str, Any], origin: Provenance) -> Section:
    names = ["trial", "verdict", "because of", "rate", "confidence", "beyond the limit", "allowed", "worth (n eff)",
             "requests", "took"]  # fmt: skip
    table = Table("Trials", names, [_trial_row(trial) for trial in part["trials"]], words=3)
    lead = (
        "In the order in which they were run; each links to its own run's report. Beyond the limit: values of the SLO "
        "named; worth: how many independent values they count for."
    )
    return Section("trials", "Every trial", written(table, origin), lead, "trials")


def _trial_row(trial: Mapping[str, Any]) -> Row:
    name: object = str(trial["number"])
    if trial["folder"]:
        name = el("a", name, href=quote(f"{trial['folder']}/report.html"))
    word = Value(trial["verdict"], None, {"class_": f"mark {_CSS.get(trial['verdict'], 'open')}"})
    slo = next(each for each in trial["slos"] if each["text"] == trial["slo"])
    why = trial["reason"] or trial["slo"]
    return [
        Value(name), word, why, Value(rate(trial["rate"]), trial["rate"]), share(trial["confidence"]),
        f"{slo['over']:,.0f} of {slo['count']:,}", share(slo["allowed"]), f"{slo['n_eff']:,.0f}",
        f"{trial['requests']:,}", duration(trial["seconds"] * 1000),
    ]  # fmt: skip


def _how_section(manifest: Mapping[str, Any], part: Mapping[str, Any]) -> Section:
    text = (
        f"{len(part['trials'])} trials with {part['requests']:,} requests in {duration(part['seconds'] * 1000)}, one "
        f"server. A trial's looks are fixed before it starts and share its chance to be wrong, so that stopping early "
        f"does not flatter it; docs/capacity.md has the rules."
    )
    return how_section(manifest, "How it was searched", text)


def _rate(value: float | None) -> str:
    return DASH if value is None else rate(value)


def _ends(ends: list[float] | None) -> str:
    return DASH if ends is None else " .. ".join(significant(end) for end in ends)


def write_page(folder: RunFolder, summary: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
    """``report.html`` of a search. Raises OSError."""
    folder.report.write_text(page(summary, manifest), encoding="utf-8")
