"""The verdict as a JUnit file, which every CI system shows: one case an SLO."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gapmeter.analysis.numbers import bounds, count, duration, share
from gapmeter.analysis.results.run import FAIL, INVALID, PASS

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def write_junit(path: Path, summary: Mapping[str, Any]) -> None:
    """Write the cases of a summary (see ``build_summary``). Raises OSError."""
    path.write_text(junit(summary), encoding="utf-8")


def junit(summary: Mapping[str, Any]) -> str:
    """A missed SLO is a failure; an undecided one, and every one of a run that is not valid, is an error.

    A run without SLOs has one case, its validity, so that no file is empty.
    """
    invalid = "; ".join(summary["invalid_reasons"]) if summary["verdict"] == INVALID else ""
    name = _clean(summary["name"] or "run")
    cases = [_case(name, row, invalid) for row in summary["slo"]] or [_validity(name, invalid)]
    cases += _regressions(name, summary.get("regression"))
    found = {kind: sum(case.find(kind) is not None for case in cases) for kind in ("failure", "error")}
    attributes = {"tests": str(len(cases)), "failures": str(found["failure"]), "errors": str(found["error"])}
    suites = ET.Element("testsuites", {"name": "gapmeter", **attributes})
    seconds = f"{summary['load']['window_s']:.3f}"
    suite = ET.SubElement(suites, "testsuite", {"name": name, "time": seconds, **attributes})
    suite.extend(_properties(summary.get("provenance")))
    suite.extend(cases)
    ET.indent(suites)
    return ET.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def _properties(provenance: Mapping[str, Any] | None) -> list[ET.Element]:
    """Where the figures are from, as properties of the suite: JUnit has them before the first case."""
    if not provenance:
        return []
    known = ET.Element("properties")
    for key, value in provenance.items():
        ET.SubElement(known, "property", name=key, value=_clean(str(value)))
    return [known]


def slo_value(row: Mapping[str, Any]) -> str:
    """What was measured for an SLO's row of the summary, for people."""
    if row["metric"] == "errors":
        return share(row["value_share"])
    return "never" if row["infinite"] else duration(row["value_ms"])


def slo_interval(row: Mapping[str, Any]) -> str:
    """Its 95 % interval, for people; one end where there is only one."""
    if row["metric"] == "errors":
        return f"{share(row['low_share'])} .. {share(row['high_share'])}"
    low, high = row["low_ms"], row["high_ms"]
    if low is not None and high is None:
        return f"above {duration(low)}"
    return bounds(low, high)


def _case(suite: str, row: Mapping[str, Any], invalid: str) -> ET.Element:
    case = ET.Element("testcase", classname=suite, name=_clean(row["text"]))
    if not invalid and row["status"] == PASS:
        return case
    kind = "failure" if not invalid and row["status"] == FAIL else "error"
    message = f"not valid as a measurement: {invalid}" if invalid else row["sentence"]
    problem = ET.SubElement(case, kind, type=INVALID if invalid else row["status"], message=_clean(message))
    problem.text = _clean("\n".join(f"{key}: {value}" for key, value in _details(row)))
    return case


def _regressions(suite: str, regression: Mapping[str, Any] | None) -> list[ET.Element]:
    """A case for each percentile that was held against a baseline; an undecided one is skipped, with its reason."""
    if regression is None:
        return []
    against = f"against {regression['baseline']}"
    if not regression["rows"]:
        case = ET.Element("testcase", classname=suite, name=_clean(f"comparable {against}"))
        ET.SubElement(case, "error", type=regression["status"], message=_clean(regression["sentence"]))
        return [case]
    cases = []
    for row in regression["rows"]:
        name = f"{row['name']} at most {share(regression['limit'])} slower {against}"
        case = ET.Element("testcase", classname=suite, name=_clean(name))
        if row["status"] == "REGRESSED":
            ET.SubElement(case, "failure", type=row["status"], message=_clean(row["sentence"]))
        elif row["status"] != "WITHIN":
            ET.SubElement(case, "skipped", message=_clean(row["sentence"]))
        cases.append(case)
    return cases


def _details(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    needs = row["needs"]
    details = [
        ("expression", row["text"]),
        ("value", slo_value(row)),
        ("95 % interval", slo_interval(row)),
        ("n", f"{count(row['count'])} (worth {count(row['n_eff'])} independent ones)"),
        ("owner", f"{row['owner']} ({row['stage']})" if row["owner"] else "not known"),
    ]
    return [*details, ("needs", f"about {count(needs['requests'])} more requests")] if needs else details


def _validity(suite: str, invalid: str) -> ET.Element:
    case = ET.Element("testcase", classname=suite, name="the run is a valid measurement")
    if invalid:
        ET.SubElement(case, "error", type=INVALID, message=_clean(invalid))
    return case


def _clean(text: str) -> str:
    """The text without characters that XML cannot hold."""
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text)
