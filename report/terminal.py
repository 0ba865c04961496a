"""The end-of-run summary: did it hold the SLOs, and where did the time go. Plain text; colours only mark owners."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from gapmeter import errors
from gapmeter.analysis.numbers import duration
from gapmeter.report import bars, failed, head, reconcile
from gapmeter.report.cost import economy_lines
from gapmeter.report.marks import words

WIDTH = 80
_LABEL = 27  # columns before a bar
_MOST_CLASSES = 4  # of failures, in the terminal; the report has them all
_TOGETHER = "\N{NO-BREAK SPACE}"  # textwrap does not break here
_VERDICT_STYLES = {"PASS": "bold green", "FAIL": "bold red", "INCONCLUSIVE": "bold yellow", "INVALID": "bold red"}
_SIGN_STYLES = {"v": "bold green", "x": "bold red", "?": "bold yellow", "-": "bold red"}


def print_summary(
    summary: Mapping[str, Any], manifest: Mapping[str, Any], report: str, again: str, exit_code: int, stream: TextIO
) -> None:
    """Write the summary to ``stream``: coloured on a terminal (unless NO_COLOR is set), plain elsewhere."""
    terminal = stream.isatty()
    console = Console(file=stream, highlight=False, soft_wrap=True, force_terminal=terminal)
    width = console.width if terminal else WIDTH
    console.print(render_summary(summary, manifest, report, again, exit_code, width))


def render_summary(
    summary: Mapping[str, Any],
    manifest: Mapping[str, Any],
    report: str,
    again: str,
    exit_code: int,
    width: int = WIDTH,
) -> Text:
    """The summary of at most ``width`` columns (paths and commands are never broken).

    ``summary`` is summary.json, ``manifest`` manifest.json, ``report`` the page's path, ``again`` the command that
    repeats the run.
    """
    width = max(60, min(width, 100))
    blocks = [
        _title(summary, manifest, width),
        _verdict(summary, width),
        _slos(summary, width),
        _failed(summary, width),
        _where(summary, width),
        _definitions(summary, width),
        _economy(summary, width),
        _facts(summary, width),
        _end(summary, report, again, exit_code),
    ]
    return Text("\n").join(block for block in blocks if block.plain)


def _title(summary: Mapping[str, Any], manifest: Mapping[str, Any], width: int) -> Text:
    left = f"{summary['name']} @ {head.target(manifest).replace(' · ', '  ')}"
    right = head.load(summary)
    if len(left) + 3 + len(right) <= width:
        return Text.assemble((left, "bold"), " " * (width - len(left) - len(right)) + right)
    return Text.assemble((_fit(left, width), "bold"), f"\n  {right}")


def _verdict(summary: Mapping[str, Any], width: int) -> Text:
    word = summary["verdict"]
    lines = _wrap(" ".join([head.sentence(summary), *head.reasons(summary)]), width, f"{word}  ", "      ")
    text = Text.assemble((lines[: len(word)], _VERDICT_STYLES[word]), lines[len(word) :])
    for said in filter(None, (head.owner_sentence(summary), head.upgrade_sentence(summary))):
        text.append(f"\n{_wrap(_unbroken(said), width, '      ', '      ')}")
    return text


def _slos(summary: Mapping[str, Any], width: int) -> Text:
    lines = head.slo_lines(summary)
    if not lines:
        return Text()
    wide = max(len("SLO"), *(len(line.expression) for line in lines))
    cells = [("SLO", "measured", "95 % interval", "n", "slow ones wait for")]
    cells += [
        (line.expression, line.measured, line.interval, line.n, line.note.replace("requests", "req")) for line in lines
    ]
    sizes = [wide, *(max(len(row[i]) for row in cells) for i in (1, 2, 3))]
    text = Text()
    for sign, row in zip((" ", *(line.sign for line in lines)), cells, strict=True):
        fixed = "  ".join(
            (row[0].ljust(sizes[0]), row[1].ljust(sizes[1]), row[2].ljust(sizes[2]), row[3].rjust(sizes[3]))
        )
        text.append("\n ").append(sign, _SIGN_STYLES.get(sign, "")).append(
            _fit(f" {fixed}  {row[4]}".rstrip(), width - 2)
        )
    return text


def _failed(summary: Mapping[str, Any], width: int) -> Text:
    """How many failed and how, the first of each class, and latency with them counted."""
    said = failed.failed_sentence(summary)
    if not said:
        return Text()
    lines = [_wrap(said, width, " failed  ", "         ")]
    for found in failed.failed_classes(summary)[:_MOST_CLASSES]:
        first = found.examples[0]
        words = f"first {found.name}: at {first.at}, {first.status}, {first.request}: {first.error}"
        lines.append(f"         {_fit(' '.join(words.split()), width - 9)}")
    lines.append(_wrap(failed.censored_sentence(summary), width, "         ", "         "))
    return Text("\n" + "\n".join(lines))


def _where(summary: Mapping[str, Any], width: int) -> Text:
    """Two bars of letters on one axis, with the SLO's place under them, and what the letters mean."""
    metric = summary["tail"]["metric"]
    if metric not in ("ttft", "e2e"):
        metric = next((m for m in ("ttft", "e2e") if m in summary["tail"]), None)
    if metric is None:
        return Text()
    found, limit = summary["tail"][metric], head.main_limit(summary, metric)
    slow = found["slow"]["total_ms"]
    top = max(slow, limit[0]) if limit and limit[0] <= 1.8 * slow else slow
    axis, ms_per_column = bars.axis(top, width - _LABEL)
    text = Text.assemble((f"\n where {metric.upper()} goes".ljust(_LABEL + 1), "bold"), axis)
    shown: set[str] = set()
    for name, band in ((" typical (p45-55)", found["typical"]), (" slow (p98.5+)", found["slow"])):
        parts = band["stages_ms"]
        label = f"{name.ljust(17)}{duration(band['total_ms']):>9} "
        text.append(f"\n{label}").append_text(bars.bar(parts, ms_per_column))
        shown |= bars.columns(parts, ms_per_column).keys()
    text.append(_slo_mark(limit, slow, ms_per_column, width))
    keys = "  ".join(f"{bars.letter(s)} {words(s)}".replace(" ", _TOGETHER) for s in parts if s in shown)
    return text.append(f"\n{_wrap(keys, width, ' ' * _LABEL, ' ' * _LABEL)}")


def _slo_mark(limit: tuple[float, str] | None, slow: float, ms_per_column: float, width: int) -> str:
    if limit is None:
        return ""
    mark = f"SLO {duration(limit[0])}"
    if limit[0] > 1.8 * slow:
        return f"\n{f'{mark}, {limit[0] / slow:.1f} times as far'.rjust(width)}"
    at = _LABEL + round(limit[0] / ms_per_column)
    line = f"{' ' * at}^ {mark}" if at + 2 + len(mark) <= width else f"{mark} ^".rjust(at + 1)
    return f"\n{line}"


def _definitions(summary: Mapping[str, Any], width: int) -> Text:
    """The same requests by other tools' definitions, where they were asked for."""
    rows = reconcile.definition_rows(summary)
    if not rows:
        return Text()
    titles = "".join(f"{name:>9}" for name in ("p50", "p99", "mean", "n"))
    lines = [f"\n {'by definition of':<30}{titles}"]
    for row in rows:
        label = f"{row.metric if row.first else '':<5}{row.who}"
        lines.append(f" {label:<30}{row.p50:>9}{row.p99:>9}{row.mean:>9}{row.n:>9}")
        lines.append(_wrap(row.differs, width, " " * 8, " " * 8))
    return Text("\n".join(lines))


def _economy(summary: Mapping[str, Any], width: int) -> Text:
    """Cost, efficiency and value: three lines, never one."""
    lines = [_wrap(_unbroken(said), width, f" {name:<8}", " " * 9) for name, said in economy_lines(summary)]
    return Text("\n" + "\n".join(lines)) if lines else Text()


def _facts(summary: Mapping[str, Any], width: int) -> Text:
    trust = "valid" if summary["trust"]["valid"] else "NOT valid"
    text = Text(f"\n{_wrap(f'{trust}: {head.trust_figures(summary)}', width, ' trust   ', '         ')}")
    if steady := head.steady_sentence(summary):
        text.append(f"\n{_wrap(steady, width, ' steady  ', '         ')}")
    for name, part, key in (("device", "telemetry", "sentence"), ("roof", "roofline", "line")):
        if said := (summary.get(part) or {}).get(key):
            text.append(f"\n{_wrap(_unbroken(said), width, f' {name:<8}', ' ' * 9)}")
    if by_turn := head.turns_of(summary):
        text.append(f"\n{_wrap(by_turn, width, ' turns   ', '         ')}")
    if caveat := head.caveat(summary):
        text.append(f"\n{_wrap(caveat, width, ' loop    ', '         ')}")
    for warning in head.warnings(summary):
        said = " ".join(part for part in (warning.text, warning.cause) if part)
        text.append(f"\n{_wrap(said, width, ' ! ', '   ')}")
        text.append(f"\n   try {warning.flag}" if warning.flag else "")
    return text


def _end(summary: Mapping[str, Any], report: str, again: str, exit_code: int) -> Text:
    why = errors.MEANING[exit_code]
    if exit_code == errors.NOT_VALID:
        why = "undecided" if summary["verdict"] == "INCONCLUSIVE" else "not valid as a measurement"
    return Text(f" report  {report}\n again   {again}\n ").append(f"exit={exit_code} {why}", "bold")


def _unbroken(text: str) -> str:
    """A number and its per cent sign stay on one line."""
    return text.replace(" %", f"{_TOGETHER}%")


def _wrap(text: str, width: int, first: str, later: str) -> str:
    filled = textwrap.fill(
        text, width, initial_indent=first, subsequent_indent=later, break_long_words=False, break_on_hyphens=False
    )
    return filled.replace(_TOGETHER, " ")


def _fit(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"
