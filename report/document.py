"""What a report says, as plain values. ``html``, ``terminal`` and ``markdown`` print any Document.

A document is a verdict and sections; a section is blocks. Figures stay figures until a renderer writes them::

    missed, measured = Mark("missed", "bad", sign="x"), Figure(612.0, "ms", key="slo.0.value_ms")
    rows = [[missed, Code("ttft p99 <= 500 ms"), measured]]
    slo = Table("Objectives", ["answer", "objective", *in_ms("measured")], rows, words=2)
    curve = Chart("curve-ttft", PercentileCurve(values), caption="900 samples", table=percentiles, margin="levels")
    header = Header("chat-p99 @ vllm 0.32.0", "16 req/s open loop, 120 s, n = 900")
    verdict = Verdict("FAIL", "bad", "p99 TTFT 612 ms is beyond the limit of 500 ms.")
    objectives = Section("slo", "Service level objectives", [slo], short="objectives", on=EVERYWHERE)
    percentiles = Section("percentiles", "Percentiles", [curve], lead="Counted from when a request was due.")
    return Document("chat-p99", header, verdict, [objectives, percentiles], provenance)

    html.page(document); terminal.text(document, width=80); markdown.text(document)

A section is on the page only, unless ``on`` says otherwise; where the short form differs from the page's, or stands
elsewhere, it is a section of its own. A picture is any frozen value with ``draw`` (see ``Picture``; ``charts`` is what
it draws with); the terminal and Markdown print the table behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Flag
from typing import TYPE_CHECKING, Any, Literal, Protocol

from gapmeter.analysis.numbers import DASH, count, duration, large, rate, share, significant, usd
from gapmeter.report import marks

if TYPE_CHECKING:
    from markupsafe import Markup

    from gapmeter.analysis.results.run import Provenance


class Medium(Flag):
    """Where something is shown."""

    PAGE = 1
    TERMINAL = 2
    MARKDOWN = 4
    DETAILS = 8  # in the terminal, where all is asked for


PAGE, TERMINAL, MARKDOWN, DETAILS = Medium
BRIEF = TERMINAL | MARKDOWN
EVERYWHERE = PAGE | BRIEF

Tone = Literal["good", "bad", "open", ""]  # met; missed or broken; undecided or strained; says nothing of the kind
Unit = Literal["ms", "share", "count", "rate", "usd", "large", "number"]

_WRITERS: Mapping[str, Callable[[float], str]] = {
    "ms": duration, "share": share, "count": count, "rate": rate, "usd": usd, "large": large, "number": significant,
}  # fmt: skip


# --- what a sentence or a cell is made of


@dataclass(frozen=True, slots=True)
class Figure:
    """A number, and ``key``: where it stands in the result's JSON. None is a dash, with ``hint`` as the reason.

    ``text`` is written instead where the number alone would mislead (``> 60 s``), or where there is a better way.
    """

    value: float | None
    unit: Unit = "ms"
    key: str = ""
    hint: str = ""
    text: str = ""

    def __str__(self) -> str:
        if self.text:
            return self.text
        return DASH if self.value is None else _WRITERS[self.unit](self.value)


@dataclass(frozen=True, slots=True)
class _Text:
    text: str

    def __str__(self) -> str:
        return self.text


class Code(_Text):
    """Something to type."""


class Quoted(_Text):
    """What holds another's words: a word that is wider than the terminal is broken."""


@dataclass(frozen=True, slots=True)
class Unmeasured(_Text):
    """Nobody could stamp it; never 0."""

    text: str = "unmeasured"


@dataclass(frozen=True, slots=True)
class Mark(_Text):
    """An answer in a word with its tone; ``sign`` stands for it in the terminal, ``status`` in Markdown."""

    tone: Tone = ""
    sign: str = ""
    status: str = ""


@dataclass(frozen=True, slots=True)
class Name(_Text):
    """A name that is not broken over lines: of a request, a rule, a point. ``href`` makes it a link."""

    href: str = ""


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of the ledger by its name; the page puts its color beside it."""

    name: str
    meaning: str = ""

    def __str__(self) -> str:
        return marks.words(self.name)


@dataclass(frozen=True, slots=True)
class Html:
    """What only the page can show, as a cell (of the class ``css``) or as a block."""

    markup: Markup
    css: str = ""

    def __str__(self) -> str:
        return ""


Inline = str | Figure | Unmeasured | Mark | Stage | Name | Code | Html | Quoted
Words = Inline | tuple[Inline, ...]  # a sentence, or a cell
Row = Sequence[Words]


def plain(words: Words) -> str:
    """The words without what only some renderers can show."""
    return "".join(map(str, words)) if isinstance(words, tuple) else str(words)


# --- blocks


@dataclass(frozen=True, slots=True)
class Paragraph:
    """``quiet``: an explanation beside what it explains; ``empty``: why there is nothing here."""

    words: Words
    tone: Literal["", "quiet", "strong", "empty"] = ""


class Heading(_Text):
    """The name of a part of a section."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Short names, each with what is said of it: ``("trust", "valid: lag p99 0.2 ms")``, or several lines."""

    rows: Sequence[tuple[Inline, *tuple[Words, ...]]]


@dataclass(frozen=True, slots=True)
class Column:
    """``csv``: its name with its unit, where that differs. ``brief``: its name in the terminal and in Markdown.

    ``wraps``: its words stand to the left, as wide as they need. ``below``: in the terminal they are written under the
    row.
    """

    title: str
    csv: str = ""
    brief: str = ""
    wraps: bool = False
    below: bool = False


def in_ms(*names: str) -> list[Column]:
    """Columns of times."""
    return [Column(name, f"{name} (ms)") for name in names]


Headers = Sequence[str | Column]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under headers. The first ``words`` columns hold words, the others numbers (unless they wrap).

    ``name`` says what it is, for those who do not see it; rows whose numbers are in ``groups`` begin a group; ``key``
    is the id of the rows, for the page's script.
    """

    name: str
    headers: Headers
    rows: Sequence[Row]
    words: int = 1
    groups: frozenset[int] = frozenset()
    css: str = ""
    key: str = ""

    @property
    def columns(self) -> tuple[Column, ...]:
        return tuple(one if isinstance(one, Column) else Column(one) for one in self.headers)

    def is_right(self, at: int) -> bool:
        """Whether a column stands to the right, as numbers do."""
        return at >= self.words and not self.columns[at].wraps


class Picture(Protocol):
    """A frozen value that can draw itself. ``name`` makes the ids in it unique."""

    def draw(self, name: str) -> Markup: ...


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture with its caption, and the table behind it. ``margin``: the room on its left, for what it has there.

    ``stages``: those that it shows, as a legend to pick from.
    """

    key: str
    picture: Picture
    caption: str = ""
    table: Table | None = None
    margin: Literal["", "levels", "names"] = ""
    stages: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Warned:
    """What was seen, its likely cause, the flag to try."""

    text: str
    cause: str = ""
    flag: str = ""


@dataclass(frozen=True, slots=True)
class Warnings:
    items: Sequence[Warned]


class Pre(_Text):
    """Text as it is: a command, a scenario."""


@dataclass(frozen=True, slots=True)
class Folded:
    """What is seen once its summary is pressed."""

    summary: str
    blocks: Sequence[Block]


@dataclass(frozen=True, slots=True)
class Columns:
    """Parts side by side where there is room, one after the other where not."""

    parts: Sequence[Sequence[Block]]


@dataclass(frozen=True, slots=True)
class Switch:
    """Which of the panels is seen: value and words of each position; as a ``list`` for more than a handful."""

    name: str
    legend: str
    options: Sequence[tuple[str, str]]
    chosen: str
    list: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """What is seen while each named switch stands at its value."""

    at: Mapping[str, str]
    blocks: Sequence[Block]


@dataclass(frozen=True, slots=True)
class Choice:
    """Switches and their panels. Only the page has the switches; others print the panel that is chosen at first."""

    switches: Sequence[Switch]
    panels: Sequence[Panel]

    def is_chosen(self, panel: Panel) -> bool:
        return all(panel.at.get(switch.name, switch.chosen) == switch.chosen for switch in self.switches)


Block = Paragraph | Heading | Facts | Table | Chart | Warnings | Pre | Folded | Columns | Choice | Html


def flat(blocks: Iterable[Block]) -> Iterator[Block]:
    """The blocks one after the other, for what has no switches: of a choice the panel that is chosen at first."""
    for block in blocks:
        match block:
            case Choice():
                yield from flat(one for panel in block.panels if block.is_chosen(panel) for one in panel.blocks)
            case Columns():
                yield from flat(one for part in block.parts for one in part)
            case _:
                yield block


# --- the whole


@dataclass(frozen=True, slots=True)
class Section:
    """One part. ``key`` is its id in the page, ``short`` names it in the contents; without a title it has no heading.

    ``data`` is given to the page's script as JSON. ``joined``: in the terminal no empty line stands above it.
    """

    key: str
    title: str
    blocks: Sequence[Block]
    lead: str = ""
    short: str = ""
    on: Medium = Medium.PAGE
    data: Mapping[str, Any] = field(default_factory=dict)
    joined: bool = False


@dataclass(frozen=True, slots=True)
class Header:
    """What it is about: a name, how it was done, and what must be kept in mind."""

    title: str
    how: str = ""
    caveat: str = ""


@dataclass(frozen=True, slots=True)
class Said:
    """A sentence under the verdict; ``stage`` gives it that color."""

    words: str
    on: Medium = EVERYWHERE
    stage: str = ""
    strong: bool = False


@dataclass(frozen=True, slots=True)
class Trust:
    """May it be believed, in a word, and by what figures?"""

    sound: bool
    word: str
    words: str


@dataclass(frozen=True, slots=True)
class Gauge:
    """How sure an objective is: its figure and 95 % interval beside its limit, all in ``unit``.

    ``measured`` and ``interval`` are the same in words; ``never``: it never came to an end.
    """

    mark: Mark
    objective: str
    measured: str
    interval: str
    limit: Figure
    value: float | None
    low: float | None
    high: float | None
    never: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is read first. Without a ``word`` the first sentence is the answer."""

    word: str
    tone: Tone
    sentence: str
    reasons: Sequence[str] = ()
    more: Sequence[Said] = ()
    trust: Trust | None = None
    gauges: Sequence[Gauge] = ()


@dataclass(frozen=True, slots=True)
class Document:
    """``title`` is the window's; ``device`` is what computed the forwards, and so owns them (GPU, CPU)."""

    title: str
    header: Header
    verdict: Verdict | None
    sections: Sequence[Section | None]  # None: there was nothing to say
    provenance: Provenance
    device: str = "GPU"

    def on(self, medium: Medium) -> list[Section]:
        """The sections that are shown there."""
        return [section for section in self.sections if section is not None and medium & section.on]
