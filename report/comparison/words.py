"""A comparison in words: a few lines for the terminal, Markdown for a pull request."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gapmeter.analysis.compare.claims import NAMES, between, signed, signed_share
from gapmeter.analysis.compare.protocol import BLOCKS
from gapmeter.analysis.numbers import DASH, duration, share, significant
from gapmeter.report.export.markdown import origin_line

_WIDTH = 100
RARE = (("capacity", "req/s"), ("cost", "USD"), ("energy", "J"))  # figures that only some runs have
Figure = Mapping[str, Any]


def difference(figure: Figure) -> str:
    """``+14.1 ms``, a dash where it is not estimable."""
    ms = figure["difference_ms"]
    return DASH if ms is None else signed(ms * 1e6)


def interval(figure: Figure) -> str:
    """``9.0 .. 19.2 ms``."""
    return DASH if figure["ci_ms"] is None else between(*figure["ci_ms"])


def relative(figure: Figure) -> str:
    """``+4.7 %``."""
    return DASH if figure["relative"] is None else signed_share(figure["relative"])


def answer(figure: Figure) -> str:
    """What may be said of one figure."""
    if figure["difference_ms"] is None:
        return figure["why"] or "not estimable"
    if not figure.get("in_family"):
        return "shown, not tested"
    if figure["confirmed"]:
        return "slower" if figure["difference_ms"] > 0 else "faster"
    return f"no difference found (one of {duration(figure['least_ms'])} would be)"


def probability(p: float | None) -> str:
    """A p-value, ``< 0.0001`` below that."""
    return DASH if p is None else "< 0.0001" if p < 1e-4 else significant(p, 2)


def money(value: float | None) -> str:
    return DASH if value is None else f"{significant(value)} USD"


def part(known: Mapping[str, Any], unit: str) -> str:
    """A figure that only some runs have, with its interval; a dash where there is none."""
    if known["value"] is None:
        return DASH
    low, high = known["ci"] or (None, None)
    ends = "" if low is None or high is None else f" ({significant(low)} .. {significant(high)})"
    return f"{significant(known['value'])}{ends} {unit}"


def not_estimable(found: Mapping[str, Any]) -> str:
    """Which percentiles nothing can be said of, and why, once for all of a metric; "" where there are none."""
    told = []
    for metric, known in found["metrics"].items():
        missing = [(key, f) for key, f in known["percentiles"].items() if f["difference_ms"] is None]
        if missing:
            names = ", ".join(key.replace("p999", "p99.9") for key, _ in missing)
            reasons = [(f["why"] or "not estimable").partition(" do not support")[0].rstrip(",") for _, f in missing]
            told.append(f"{NAMES[metric]} {names} ({reasons[0]})")
    return f"Not estimable, the samples being too small: {'; '.join(told)}." if told else ""


def terminal(document: Mapping[str, Any], report: str) -> str:
    """The comparison in a few lines, plain text."""
    lines = _wrapped(f"{document['verdict']}  {document['headline']}", "", "  ")
    for each in document["protocol"]:
        lines += [""] if each["facts"] else []
        for fact in each["facts"]:
            lines += _fact(fact, document["sides"][0]["name"], each["side"])
    for found in document["comparisons"]:
        lines += [
            "",
            f"  {'':<10} {found['a'].split()[0]:>12} {found['b'].split()[0]:>12} {'difference':>12}  95 % interval",
        ]
        for metric, known in found["metrics"].items():
            for key, figure in known["percentiles"].items():
                if figure["in_family"] and figure["difference_ms"] is not None:
                    lines.append(_line(metric, key, figure, forced=document["forced"]))
        if missing := not_estimable(found):
            lines += _wrapped(missing, "  ", "  ")
        if found["changed"] and found["changed"]["sentence"].lower() not in document["headline"].lower():
            lines += ["", *_wrapped(found["changed"]["sentence"], "  ", "  ")]
    lines += _sides(document)
    for text in document.get("warnings", ()):
        lines += _wrapped(text, "  ! ", "    ")
    if document["verdict"] == "NOT COMPARABLE":
        lines += ["", "  " + remedy(document)]
    return "\n".join([*lines, f"  report  {report}"])


def _sides(document: Mapping[str, Any]) -> list[str]:
    """Three sides or more in a few columns, and how far those on devices of one name lie apart."""
    if len(document["sides"]) < 3 or not document.get("table"):
        return []
    lines = ["", f"  {'':<3} {'n':>6}  {'capacity':<24} {'per request at the SLA':<24} {'energy a request':<18} device"]
    for row in document["table"]["rows"]:
        capacity, cost, energy = (part(row[name], unit) for name, unit in RARE)
        lines.append(
            f"  {row['name']:<3} {row['requests']:>6,}  {capacity:<24} {cost:<24} {energy:<18} {row['device']}"
        )
    why = {f"{name}: {row[name]['why']}" for row in document["table"]["rows"] for name, _ in RARE if row[name]["why"]}
    lines += _wrapped(f"{DASH} {'; '.join(sorted(why))}", "  ", "    ") if why else []
    for text in spreads(document):
        lines += _wrapped(text, "  ", "    ")
    return lines


def spreads(document: Mapping[str, Any]) -> list[str]:
    """How far sides on devices of one name, under one scenario, lie apart, a sentence a device."""
    told = []
    for each in document["table"]["devices"]:
        said = ", ".join(
            f"{NAMES[key.partition('_')[0]]} {key.partition('_')[2]} {share(found['relative'])}"
            for key, found in each["figures"].items()
        )
        if said:
            where = f"{', '.join(each['sides'])}, each on {each['device']}"
            told.append(f"Spread between identical devices ({where}): {said}.")
    return told


def _wrapped(text: str, first: str, others: str) -> list[str]:
    """Lines of at most 100 columns, but for words that are longer."""
    return textwrap.wrap(
        text, _WIDTH, initial_indent=first, subsequent_indent=others, break_long_words=False, break_on_hyphens=False
    )


def _fact(fact: Mapping[str, Any], a: str, b: str) -> list[str]:
    """On one line where it fits, else a paragraph for each side."""
    head = f"  {fact['meaning']:<8} {fact['key']}"
    line = f"{head}: {fact['a']} | {fact['b']}"
    if len(line) <= _WIDTH:
        return [line]
    sides = [_wrapped(f"{side:<2} {fact[key]}", " " * 11, " " * 14) for side, key in ((a, "a"), (b, "b"))]
    return [head, *sides[0], *sides[1]]


def _line(metric: str, key: str, figure: Figure, *, forced: bool) -> str:
    name = f"{NAMES[metric]} {key}"
    values = f"{duration(figure['a_ms']):>12} {duration(figure['b_ms']):>12} {difference(figure):>12}"
    return f"  {name:<10} {values}  {interval(figure):<22} {answer(figure)}{'  NOT COMPARABLE' if forced else ''}"


def remedy(document: Mapping[str, Any]) -> str:
    """What to type where runs were refused."""
    keys = {f["key"] for each in document["protocol"] for f in each["facts"] if f["meaning"] == BLOCKS}
    declared = sorted(key for key in keys if key != "validity" and ", within" not in key)
    if "validity" in keys or not declared:
        return "run again what is not valid; --force compares all the same, and marks every figure"
    listed = " ".join(f"--factor {key}" for key in declared)
    return f"if that is what you compare: {listed}; --force compares all the same, and marks every figure"


def markdown(document: Mapping[str, Any]) -> str:
    """A heading with the verdict, the metrics, what changed, warnings. Ends with a line feed."""
    parts = [f"### {document['verdict']}", _plain(document["headline"])]
    facts = [(f["meaning"], f["key"], f["a"], f["b"]) for each in document["protocol"] for f in each["facts"]]
    if facts:
        parts.append(table(("", "what differs", "A", "B"), facts))
    for found in document["comparisons"]:
        rows = [
            _row(metric, key, f, forced=document["forced"])
            for metric, known in found["metrics"].items()
            for key, f in known["percentiles"].items()
            if f["in_family"]
        ]
        head = ("", found["a"], found["b"], "difference", "95 % interval", "relative", "answer")
        parts.append(table(head, rows))
        if found["changed"]:
            parts.append(_plain(found["changed"]["sentence"]))
    parts += [f"- {_plain(text)}" for text in document.get("warnings", ())]
    if document.get("method"):
        parts.append(_plain(document["method"]["sentence"]) + ".")
    if document.get("provenance"):
        parts.append(origin_line(document["provenance"]))
    return "\n\n".join(parts) + "\n"


def _row(metric: str, key: str, f: Figure, *, forced: bool) -> tuple[str, ...]:
    said = f"{answer(f)} (NOT COMPARABLE)" if forced else answer(f)
    ends = (duration(f["a_ms"]), duration(f["b_ms"]))
    return (f"{NAMES[metric]} {key}", *ends, difference(f), interval(f), relative(f), said)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_plain(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def _plain(text: str) -> str:
    """Text that Markdown and HTML leave as it is, on one line."""
    return " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
