"""The page over the runs folder: a table that can be searched, with boxes to tick for comparing and deleting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from gapmeter.analysis.numbers import DASH, count
from gapmeter.analysis.results.run import UNKNOWN, Provenance
from gapmeter.report import html
from gapmeter.report.document import Document, Header, Html, Section
from gapmeter.report.words import tone
from gapmeter.runs.listing import ListedRun

PER_PAGE = 200


@dataclass(frozen=True, slots=True)
class RunFilter:
    """Which runs to show: words that must all occur, a verdict, a kind, which page (from 0)."""

    words: str = ""
    verdict: str = ""
    kind: str = ""
    page: int = 0

    @classmethod
    def of(cls, query: Mapping[str, str]) -> RunFilter:
        page = query.get("page", "0")
        number = int(page) if page.isdecimal() and len(page) < 7 else 0
        return cls(query.get("q", "").strip(), query.get("verdict", ""), query.get("kind", ""), number)

    def matches(self, run: ListedRun) -> bool:
        """Whether a run is one of them. Case does not matter."""
        text = " ".join((run.path.name, run.name, run.engine, run.model, run.load, run.outcome)).casefold()
        words = all(word in text for word in self.words.casefold().split())
        return words and self.verdict in ("", run.answer) and self.kind in ("", run.kind)


def runs_page(everything: Sequence[ListedRun], asked: RunFilter, folder: str) -> str:
    """The whole page, the newest first."""
    found = [run for run in reversed(everything) if asked.matches(run)]
    shown = found[asked.page * PER_PAGE : (asked.page + 1) * PER_PAGE]
    last = (asked.page + 1) * PER_PAGE >= len(found)
    body = fill(
        "runs.html",
        rows=[_row(run) for run in shown],
        asked=asked,
        found=count(len(found)),
        all=count(len(everything)),
        verdicts=sorted({run.answer for run in everything}),
        kinds=sorted({run.kind for run in everything}),
        older=None if last else asked.page + 1,
        newer=asked.page - 1 if asked.page else None,
    )
    return _page(f"gapmeter: {folder}", body)


def delete_page(chosen: Sequence[ListedRun]) -> str:
    """Asks once more before folders are removed for good."""
    return _page("Delete?", fill("delete.html", rows=[_row(run) for run in chosen], many=len(chosen) > 1))


def message_page(title: str, text: str) -> str:
    """A sentence, and the way back."""
    return _page(title, fill("message.html", text=text))


def fill(template: str, **context: object) -> Markup:
    """A template of this package filled in; text is escaped."""
    return html.fill(html.asset(template, "gapmeter.web"), **context)


def _row(run: ListedRun) -> dict[str, str]:
    return {
        "name": run.path.name.encode(errors="replace").decode(),  # it may be no UTF-8, an address must
        "started": run.started.replace("T", " ")[:16],
        "kind": run.kind,
        "scenario": run.name or run.path.name,
        "engine": run.engine or DASH,
        "model": run.model or DASH,
        "load": run.load or DASH,
        "verdict": run.outcome,
        "tone": tone(run.verdict),
        "n": DASH if run.measured is None else count(run.measured),
        "ttft": run.p99("ttft"),
        "itl": run.p99("itl"),
        "e2e": run.p99("e2e"),
        "note": run.reason,
    }


def _page(title: str, body: Markup) -> str:
    facts = dict.fromkeys(Provenance.model_fields, UNKNOWN)
    document = Document(title, Header(title), None, [Section("runs", "", [Html(body)])], Provenance(**facts))
    return html.page(document, policy="form-action 'self'")
