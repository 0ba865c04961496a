"""What a check of the machine found: a plain value, and how a list of them is shown."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

_NAME_WIDTH = 17
_WIDTH = 100


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    ``seen`` is what is there, in words; ``remedy`` what to do about a miss ("" when ``ok``); ``needed`` marks what no
    run can do without.
    """

    name: str
    ok: bool
    seen: str
    remedy: str = ""
    needed: bool = False


def judged(name: str, ok: bool, seen: str, remedy: str, *, needed: bool = False) -> Finding:
    """A finding that keeps its remedy only for a miss."""
    return Finding(name, ok, seen, "" if ok else remedy, needed)


def render(findings: Sequence[Finding]) -> str:
    """A line a finding: v holds, ! a miss, x a miss without which no run is possible; its remedy beneath."""
    lines = [line for finding in findings for line in _lines(finding)]
    return "\n".join([*lines, "", _total(findings)])


def _lines(finding: Finding) -> list[str]:
    sign = "v" if finding.ok else "x" if finding.needed else "!"
    indent = " " * (_NAME_WIDTH + 4)
    first = f" {sign} {finding.name:<{_NAME_WIDTH}} "
    seen = textwrap.wrap(finding.seen, _WIDTH, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False)
    arrow = f"{indent}-> "
    remedy = textwrap.wrap(finding.remedy, _WIDTH, initial_indent=arrow, subsequent_indent=f"{indent}   ")
    return seen + remedy


def _total(findings: Sequence[Finding]) -> str:
    stop = [finding.name for finding in findings if finding.needed and not finding.ok]
    if stop:
        return f"No run can be measured here before this is mended: {', '.join(stop)}."
    misses = sum(not finding.ok for finding in findings)
    if not misses:
        return "Everything that was looked at is as it should be."
    return f"Runs can be measured here; {misses} of {len(findings)} things could be better."
