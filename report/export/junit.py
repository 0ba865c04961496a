"""Results as test suites, for programs that know nothing else: JUnit, which every CI system shows, and annotations.

A run is a suite with a case for each SLO; so is each point of a sweep; a search for capacity is one with a case for its
answer.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gapmeter.analysis.numbers import count, share
from gapmeter.analysis.results.capacity import UNMEETABLE, CapacityResult
from gapmeter.analysis.results.regression import Regression
from gapmeter.analysis.results.run import FAIL, INVALID, PASS, RunResult, SloAnswer
from gapmeter.analysis.results.sweep import Point, SweepResult
from gapmeter.report.capacity import headline
from gapmeter.report.slo import changed_meanwhile, explained, slo_interval, slo_sentence, slo_value
from gapmeter.report.words import more_requests

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
Outcome = Literal["passed", "failure", "error", "skipped"]
_LEVELS = {"FAIL": "error", "INCONCLUSIVE": "warning", "REGRESSED": "error", "UNDECIDED": "warning",
           "NOT ESTIMABLE": "warning", "NOT COMPARABLE": "error"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """One question and its answer: ``status`` in the result's own word, ``message`` what was found.

    ``details`` are further lines about a case that did not pass. ``invalid``: why nothing was measured at all, whatever
    was found. ``short``: its name where there is less room.
    """

    name: str
    outcome: Outcome
    status: str = ""
    message: str = ""
    details: Sequence[tuple[str, str]] = ()
    invalid: str = ""
    short: str = ""


@dataclass(frozen=True, slots=True)
class Suite:
    """What one run, point or search says. ``invalid``: why it is no measurement; ``about``: where it is from."""

    name: str
    cases: Sequence[Case]
    seconds: float
    invalid: Sequence[str] = ()
    about: Mapping[str, str] = field(default_factory=dict)


def suite_of_run(result: RunResult, regression: Regression | None = None) -> Suite:
    """``regression``: how it compares with its baseline, where it was given one."""
    reasons = result.invalid_reasons if result.verdict == INVALID else ()
    cases = [*_cases(result.slo, reasons, result), *(_regressions(regression) if regression else ())]
    return Suite(result.name, cases, result.load.window_s, reasons, result.provenance.facts())


def suites_of_sweep(sweep: SweepResult) -> list[Suite]:
    """One a point; a point that has no figures is a run that is not valid."""
    suites = []
    for point in sweep.sweep.points:
        known = point if isinstance(point, Point) else None
        reasons = () if known and known.verdict != INVALID else (point.reason or point.verdict,)
        about = sweep.provenance.facts()
        about |= {"load": f"{point.label} of {about['load']}", "validity": INVALID if reasons else "valid"}
        del about["n"]  # it stands with every case
        seconds = known.throughput.span_s if known else 0.0
        cases = _cases(known.slo if known else (), reasons)
        suites.append(Suite(f"{sweep.name}: {point.label}", cases, seconds, reasons, about))
    return suites


def suite_of_search(result: CapacityResult) -> Suite:
    """No rate that meets every SLO is a failure; what else was not found is a run that is not valid."""
    answer = " ".join(headline(result.capacity))
    about, name = result.provenance.facts(), f"{result.name}: capacity"
    if result.capacity.ended == UNMEETABLE:
        cases = [Case("a rate meets every SLO", "failure", FAIL, answer)]
        return Suite(name, cases, result.capacity.seconds, (), about)
    reasons = () if result.exit_code == 0 else (answer,)
    return Suite(name, _cases((), reasons), result.capacity.seconds, reasons, about)


def _cases(slos: Sequence[SloAnswer], reasons: Sequence[str], run: RunResult | None = None) -> list[Case]:
    """A missed SLO is a failure; an undecided one, and every one of a run that is not valid, is an error.

    Without SLOs there is one case, the validity, so that no file is empty. ``run``: the one that they are of, if one.
    """
    invalid = "; ".join(reasons)
    if not slos:
        name = "the run is a valid measurement"
        return [Case(name, "error", INVALID, invalid) if invalid else Case(name, "passed")]
    outcomes: dict[str, Outcome] = {} if invalid else {PASS: "passed", FAIL: "failure"}
    cases = []
    for slo in slos:
        changed = changed_meanwhile(run, slo) if run is not None else ""
        details = [
            ("expression", slo.text),
            ("value", slo_value(slo)),
            ("95 % interval", slo_interval(slo)),
            ("n", f"{count(slo.count)} (effective n {count(slo.n_eff)})"),
            ("owner", (explained(run, slo) if run is not None else "") or "not known"),
        ]
        details += [("needs", f"about {more_requests(slo.needs)}")] if slo.needs and not changed else []
        outcome = outcomes.get(slo.status, "error")
        cases.append(Case(slo.text, outcome, slo.status, slo_sentence(slo, changed), details, invalid))
    return cases


def _regressions(regression: Regression) -> list[Case]:
    """A case for each percentile that was held against a baseline, and one for what failed.

    An undecided one is skipped, with its reason.
    """
    against = f"against {regression.baseline}"
    if not regression.rows:
        return [Case(f"comparable {against}", "error", regression.status, regression.sentence)]
    outcomes: dict[str, Outcome] = {"REGRESSED": "failure", "WITHIN": "passed"}
    cases = [
        Case(
            f"{row.name} at most {share(regression.limit)} slower {against}",
            outcomes.get(row.status, "skipped"), row.status, row.sentence, short=row.name,
        )
        for row in regression.rows
    ]  # fmt: skip
    if (failed := regression.failed) is not None:
        name = f"no larger share of failed requests {against}"
        outcome = outcomes.get(failed.status, "skipped")
        cases.append(Case(name, outcome, failed.status, failed.sentence, short="failed requests"))
    return cases


def junit(suites: Sequence[Suite]) -> str:
    """One document with all of them."""
    root = ET.Element("testsuites", {"name": "gapmeter", **_counts([case for one in suites for case in one.cases])})
    for one in suites:
        name, seconds = _clean(one.name), f"{one.seconds:.3f}"
        element = ET.SubElement(root, "testsuite", {"name": name, "time": seconds, **_counts(one.cases)})
        if one.about:
            properties = ET.SubElement(element, "properties")
            for key, value in one.about.items():
                ET.SubElement(properties, "property", name=key, value=_clean(value))
        for case in one.cases:
            added = ET.SubElement(element, "testcase", classname=name, name=_clean(case.name))
            if case.outcome != "passed":
                typed = {} if case.outcome == "skipped" else {"type": INVALID if case.invalid else case.status}
                message = f"not valid as a measurement: {case.invalid}" if case.invalid else case.message
                problem = ET.SubElement(added, case.outcome, {**typed, "message": _clean(message)})
                problem.text = _clean("\n".join(f"{key}: {value}" for key, value in case.details)) or None
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _counts(cases: Sequence[Case]) -> dict[str, str]:
    return {
        "tests": str(len(cases)),
        "failures": str(sum(case.outcome == "failure" for case in cases)),
        "errors": str(sum(case.outcome == "error" for case in cases)),
    }


def _clean(text: str) -> str:
    """The text without characters that XML cannot hold."""
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text)


def annotations_of(suite: Suite) -> list[str]:
    """GitHub's workflow commands: why it is not valid; else each SLO missed or undecided; each regression."""
    lines = [_annotation("error", f"{suite.name} is not valid", reason) for reason in suite.invalid]
    return lines + [
        _annotation(_LEVELS[case.status], f"{suite.name}: {case.short or case.name} {case.status}", case.message)
        for case in suite.cases
        if case.status in _LEVELS and not case.invalid
    ]


def _annotation(level: str, title: str, message: str) -> str:
    """Percent signs and line ends are escaped as the runner decodes them; in a title, colons and commas too."""
    escaped, head = (text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A") for text in (message, title))
    return f"::{level} title={head.replace(':', '%3A').replace(',', '%2C')}::{escaped}"
