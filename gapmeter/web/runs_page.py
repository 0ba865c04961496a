"""The page over the runs folder: a table that can be searched, with boxes to tick for comparing and deleting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from gapmeter.analysis.numbers import DASH, count, duration
from gapmeter.analysis.provenance import UNKNOWN, Provenance
from gapmeter.report.shell import Section, page_shell
from gapmeter.runs.listing import Listed

PER_PAGE = 200
# A comparison's answer in the colour of a run's.
_TONES = {"FASTER": "PASS", "SLOWER": "FAIL", "MIXED": "INCONCLUSIVE", "NOT COMPARABLE": "INVALID"}


@dataclass(frozen=True, slots=True)
class RunFilter:
    """What is asked to be shown: words that must all occur, a verdict, a kind, which page (from 0)."""

    words: str = ""
    verdict: str = ""
    kind: str = ""
    page: int = 0

    @classmethod
    def of(cls, query: Mapping[str, str]) -> RunFilter:
        page = query.get("page", "0")
        number = int(page) if page.isdecimal() and len(page) < 7 else 0
        return cls(query.get("q", "").strip(), query.get("verdict", ""), query.get("kind", ""), number)

    def fits(self, run: Listed) -> bool:
        """Whether a folder is wanted. Case does not matter."""
        known = run.entry
        text = " ".join((run.name, known.name, known.engine, known.model, known.load, _answer(run))).casefold()
        words = all(word in text for word in self.words.casefold().split())
        return words and self.verdict in ("", _answer(run)) and self.kind in ("", known.kind)


def runs_page(everything: Sequence[Listed], wish: RunFilter, folder: str) -> str:
    """The whole page, the newest first."""
    found = [run for run in reversed(everything) if wish.fits(run)]
    shown = found[wish.page * PER_PAGE : (wish.page + 1) * PER_PAGE]
    last = (wish.page + 1) * PER_PAGE >= len(found)
    body = fill(
        "runs.html",
        rows=[_row(run) for run in shown],
        wish=wish,
        found=count(len(found)),
        all=count(len(everything)),
        verdicts=sorted({_answer(run) for run in everything}),
        kinds=sorted({run.entry.kind for run in everything}),
        older=None if last else wish.page + 1,
        newer=wish.page - 1 if wish.page else None,
    )
    return _page(f"gapmeter: {folder}", body)


def delete_page(chosen: Sequence[Listed]) -> str:
    """Asks once more before folders are removed for good."""
    return _page("Delete?", fill("delete.html", rows=[_row(run) for run in chosen], many=len(chosen) > 1))


def message_page(title: str, text: str) -> str:
    """A sentence, and the way back."""
    return _page(title, fill("message.html", text=text))


def fill(template: str, **context: object) -> Markup:
    """A template of this package filled in; text is escaped."""
    source = (files("gapmeter.web") / "assets" / template).read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return Markup(environment.from_string(source).render(**context))


def _answer(run: Listed) -> str:
    """The verdict, or why there is none."""
    return run.entry.verdict or run.state


def _row(run: Listed) -> dict[str, str]:
    known = run.entry
    return {
        "name": run.name,
        "started": known.started.replace("T", " ")[:16],
        "kind": known.kind,
        "scenario": known.name or run.name,
        "engine": known.engine or DASH,
        "model": known.model or DASH,
        "load": known.load or DASH,
        "verdict": _answer(run),
        "tone": _TONES.get(known.verdict or "", known.verdict or ""),
        "n": DASH if known.measured is None else count(known.measured),
        "ttft": duration(known.ttft_p99_ms),
        "itl": duration(known.itl_p99_ms),
        "e2e": duration(known.e2e_p99_ms),
        "note": known.reason,
    }


def _page(title: str, body: Markup) -> str:
    facts = dict.fromkeys((field.name for field in fields(Provenance)), UNKNOWN)
    about = Provenance(**facts | {"validity": "each run's own", "command": "gapmeter ui"})
    return page_shell(title, [Section("runs", title, body)], about, policy="form-action 'self'")
