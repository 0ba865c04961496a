"""A capacity search's answer in the terminal: sentences, where the capacity probably lies, a line a trial."""

from __future__ import annotations

import math
import re
import shlex
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from gapmeter import errors
from gapmeter.analysis.numbers import duration, rate, share, significant
from gapmeter.report.cost_old import economy_lines

_WIDTH = 100
_COLUMNS = 60
_BLOCKS = " ▁▂▃▄▅▆▇█"
_STYLES = {"holds": "green", "fails": "red", "undecided": "yellow", "invalid": "red"}


def print_capacity(summary: Mapping[str, Any], folder: Path, again: str, code: int, stream: TextIO) -> None:
    """Write the answer to ``stream``: coloured on a terminal (unless NO_COLOR is set), plain elsewhere."""
    console = Console(file=stream, highlight=False, soft_wrap=True, force_terminal=stream.isatty())
    console.print(render(summary, folder, again, code))


def render(summary: Mapping[str, Any], folder: Path, again: str, code: int) -> Text:
    """The answer, the sketch, the trials, where the page lies."""
    part = summary["capacity"]
    text = Text.assemble((f"{summary['name']}: capacity", "bold"), "\n")
    for at, line in enumerate(part["headline"]):
        text.append("\n" + textwrap.fill(line, _WIDTH), "bold" if not at else "")
    if part["rate"] is not None:
        text.append("\n\n" + sketch(part))
    text.append("\n")
    for trial in part["trials"]:
        text.append("\n " + _line(trial), _STYLES[trial["verdict"]])
    for name, said in economy_lines(summary):
        text.append("\n" + textwrap.fill(said, _WIDTH, initial_indent=f" {name:<8}", subsequent_indent=" " * 9))
    total = f"{part['requests']:,} requests, {duration(part['seconds'] * 1000)}"
    text.append(f"\n\n trials  {len(part['trials'])}: {total}\n report  {folder / 'report.html'}\n again   {again}\n ")
    if part["ended"] in _UNFINISHED:
        text.append(f"go on   {_going_on(part, folder, again)}\n ")
    meaning = "capacity found" if code == errors.OK else _MEANING.get(part["ended"], errors.MEANING[code])
    if part["ended"] == "budget" and part["rate"]:
        meaning = "the interval is wider than asked"
    return text.append(f"exit={code} {meaning}", "bold")


_MEANING = {
    "budget": "not decided within the budget",
    "client_limit": "the load tester was the limit",
    "not_measured": "not valid as a measurement",
    "unmeetable": "no rate holds every SLO",
}


_UNFINISHED = ("budget", "interrupted", "died")


def _going_on(part: Mapping[str, Any], folder: Path, again: str) -> str:
    """The command that takes the search up with a budget that may suffice; twice what was spent where none is known."""
    needed = (part["needs"] or {}).get("budget_s") or 2 * part["seconds"]
    bare = re.sub(r" --(budget|resume)(=| )\S+", "", again)
    flags = f"--budget {math.ceil(needed / 60) or 1}m --resume {shlex.quote(str(folder))}"
    return f'{bare} ARGS="{flags}"' if bare.startswith("make ") else f"{bare} {flags}"


def sketch(part: Mapping[str, Any]) -> str:
    """The posterior around its interval, a column a share of the rate; beneath it the interval's ends and the rate."""
    low, high = part["low"], part["high"]
    reach = math.log(high / low) or 0.01
    start, end = math.log(low) - reach / 3, math.log(high) + reach / 3
    edges = [math.log(at) for at in part["posterior"]["rates"]]
    heights = [m / (b - a) for m, a, b in zip(part["posterior"]["masses"], edges[:-1], edges[1:], strict=True)]
    levels = []
    for column in range(_COLUMNS):
        at = start + (column + 0.5) / _COLUMNS * (end - start)
        levels.append(next((h for h, a, b in zip(heights, edges[:-1], edges[1:], strict=True) if a <= at < b), 0.0))
    top = max(levels) or 1.0
    bars = "".join(_BLOCKS[round(8 * level / top)] for level in levels)
    feet = [" "] * (_COLUMNS + 12)
    for value in (low, part["rate"], high):
        words = significant(value)
        place = round((math.log(value) - start) / (end - start) * _COLUMNS) - len(words) // 2
        if not "".join(feet[place - 1 : place + len(words) + 1]).strip():
            feet[place : place + len(words)] = words
    return f"  {bars}\n  {''.join(feet).rstrip()} req/s"


def _line(trial: Mapping[str, Any]) -> str:
    head = f"{trial['number']:>2}  {rate(trial['rate']):>12}  {trial['verdict']:<9}"
    if trial["confidence"] is None:
        return f"{head}  {trial['reason']}"
    slo = next(each for each in trial["slos"] if each["text"] == trial["slo"])
    lean = f" (leaning to {trial['leaning']})" if trial["verdict"] == "undecided" else ""
    return (
        f"{head} {share(trial['confidence']):>6}{lean}  {trial['slo']}: {slo['over']:,.0f} of {slo['count']:,} beyond, "
        f"worth {slo['n_eff']:,.0f}; {duration(trial['seconds'] * 1000)}"
    )
