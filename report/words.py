"""What all kinds of results say alike: names of metrics, the tone of an answer, intervals, whole sentences."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import quote

from gapmeter.analysis.numbers import bounds, count, counted, duration, share, significant
from gapmeter.analysis.results.capacity import FAILS, HOLDS, INVALID_TRIAL, UNDECIDED
from gapmeter.analysis.results.codec import Ends
from gapmeter.analysis.results.distribution import Needs
from gapmeter.analysis.results.manifest import ManifestBase
from gapmeter.analysis.results.run import RunFigures
from gapmeter.records import RunFolder
from gapmeter.report.document import Block, Folded, Pre, Tone

WHOLE = 1.05  # a share above this is told in milliseconds, with what goes the other way
_ALL = 0.995
UNTIL = {"ttft": "to the first token", "e2e": "to the last token", "itl": "token to token"}
# The answers of runs, points, trials and comparisons; any other word says nothing of the kind.
_TONES: Mapping[str, Tone] = {
    "PASS": "good", "FAIL": "bad", "INVALID": "bad", "INCONCLUSIVE": "open", "FAILED": "bad", "MISSING": "open",
    HOLDS: "good", FAILS: "bad", UNDECIDED: "open", INVALID_TRIAL: "open",
    "FASTER": "good", "SLOWER": "bad", "MIXED": "open", "FAILS LESS": "good", "FAILS MORE": "bad",
    "NOT COMPARABLE": "bad", "NOT COMPARABLE, forced": "bad", "NOT ESTIMABLE": "bad",
    "CHEAPER": "good", "NOT ESTABLISHED": "open",
}  # fmt: skip


def tone(answer: str | None) -> Tone:
    return _TONES.get(answer or "", "")


def point_css(answer: str) -> str:
    """How a measured point with this answer is drawn: green, red or hollow."""
    return {"good": "point met", "bad": "point missed"}.get(tone(answer), "point open")


def grouped(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Each first of the pairs once, with its seconds: a text with the names of all that it is said of."""
    found: dict[str, list[str]] = {}
    for first, second in pairs:
        found.setdefault(first, []).append(second)
    return found


def as_sentence(text: str) -> str:
    """The text with a capital (p99 stays p99) and a full stop."""
    return stopped(text if text[1:2].isdigit() else text[:1].upper() + text[1:])


def stopped(text: str) -> str:
    return text if not text or text.endswith((".", "!", "?")) else f"{text}."


def page_of(folder: str | None) -> str:
    """The link to the page of a run or a study; "" without a folder."""
    return quote(str(RunFolder(Path(folder)).report)) if folder else ""


def about_minutes(needs: Needs) -> str:
    """How long the requests that are needed take at this rate; "" where that is unknown or no time at all."""
    return f"about {needs.minutes:.0f} min" if needs.minutes and needs.minutes >= 1 else ""


def more_requests(needs: Needs) -> str:
    """The number to two digits: it rests on how alike this run's requests are, which is known no better."""
    about = round(needs.requests, min(0, 2 - len(str(needs.requests))))
    return counted(about, "more request")


def how_much_more(needs: Needs) -> str:
    """``about 3 min more``, or where that is unknown ``200 more requests``."""
    minutes = about_minutes(needs)
    return f"{minutes} more" if minutes else more_requests(needs)


def of_all(result: RunFigures) -> str:
    """Whose percentiles: of every request, those that the server failed as if their answers never came."""
    return f"of all {count(result.counts.ended)}"


def of_answered(result: RunFigures) -> str:
    """Whose percentiles: of the requests that succeeded."""
    return f"of {count(result.counts.succeeded)} answered"


def interval(ends_ms: Ends | None) -> str:
    """``1.31 .. 1.58 ms``, or ``not estimable``."""
    low, high = ends_ms or (None, None)
    return bounds(low, high)


def signed(ms: float) -> str:
    """A difference with its sign and unit; a minus is a hyphen wherever figures are shown."""
    return f"{'+' if ms > 0 else ''}{duration(ms)}"


def part_of(value: float, ends: Ends | None = None) -> str:
    """A share of a whole, with its interval if it has one: ``22 % (12 to 34 %)``, ``all (97 % or more)``."""
    if value > WHOLE:
        return "more than all"
    said, within = "all" if value > _ALL else share(value), shares(ends)
    return said if within in ("", said) else f"{said} ({within})"


def shares(ends: Ends | None) -> str:
    """``12 to 34 %``, or ``59 % or more`` where that reaches beyond all; "" where either end is unknown.

    Shares of a difference do, since other parts may have gone the other way.
    """
    if (known := both(ends)) is None:
        return ""
    low, high = known
    if low > _ALL or high > 1:
        return "all" if low > _ALL else f"{share(low)} or more"
    return f"{share(low).removesuffix(' %')} to {share(high)}"


def low_to_high(ends: Ends | None) -> str:
    """``1.31 .. 1.58``; "" where either end is unknown."""
    return " .. ".join(map(significant, both(ends) or ()))


def both(ends: Ends | None) -> tuple[float, float] | None:
    """An interval of which both ends are known."""
    low, high = ends or (None, None)
    return None if low is None or high is None else (low, high)


def reproduce(manifest: ManifestBase) -> list[Block]:
    """The command that repeats it; folded beneath, the scenario that it resolved to, and how it ran."""
    whole = json.dumps(manifest.to_json(), indent=1, ensure_ascii=False)
    return [Pre(manifest.command), Folded("the whole manifest, with the scenario as it was resolved", [Pre(whole)])]
