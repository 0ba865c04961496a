"""One document in all renderers: what is a figure, a warning or a mark in it arrives in each, and nothing is markup."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from markupsafe import Markup

from gapmeter.analysis.results.run import Provenance
from gapmeter.report import html, markdown, terminal
from gapmeter.report.document import (
    BRIEF,
    EVERYWHERE,
    MARKDOWN,
    TERMINAL,
    Chart,
    Choice,
    Code,
    Column,
    Document,
    Facts,
    Figure,
    Header,
    Mark,
    Panel,
    Paragraph,
    Pre,
    Quoted,
    Section,
    Switch,
    Table,
    Unmeasured,
    Verdict,
    Warned,
    Warnings,
)

EVIL = "</script><img src=x>|\"'&"


@dataclass(frozen=True)
class _Picture:
    def draw(self, name: str) -> Markup:
        return Markup('<svg id="{}"></svg>').format(name)


def _provenance(validity: str = "valid") -> Provenance:
    return Provenance(
        scenario="chat", digest="d1", model="tiny", precision="float32", engine="vllm", hardware="CPU", load="8 req/s",
        n="9", validity=validity, date="2026-01-02", command="again",
    )  # fmt: skip


def _document(validity: str = "valid") -> Document:
    table = Table(
        "Objectives",
        [Column("answer", brief=" "), "objective", Column("measured", csv="measured (ms)"), Column("why", below=True)],
        [
            [Mark("missed", "bad", "x", "FAIL"), Code("ttft p99 <= 500 ms"), Figure(612.0, key="slo.0.value_ms"), EVIL],
            [Mark("met", "good", "v", "PASS"), Code("errors <= 1 %"), Figure(None, "share", hint="too few"), ""],
            [Mark("open", "open", "?", "OPEN"), Code("itl"), Unmeasured(), ""],
        ],
        words=2,
    )
    chart = Chart("stack", _Picture(), table=Table("Behind", ["stage", "ms"], [["queue", Figure(3.0)]]))
    panels = [Panel({"band": band}, [Paragraph(f"only {band}")]) for band in ("slow", "all")]
    choice = Choice([Switch("band", "show", [("slow", "slow ones"), ("all", "all")], "slow")], panels)
    return Document(
        "a title", Header("chat @ vllm", "8 req/s"), Verdict("FAIL", "bad", "p99 TTFT 612 ms."),
        [
            Section("slo", "Objectives", [table], on=EVERYWHERE),
            Section("where", "Where", [chart, choice], on=EVERYWHERE),
            None,
            Section("facts", "", [Facts([("failed", "two", Quoted("y" * 90 + " and" * 9), "and so on")])], on=TERMINAL),
            Section("more", "", [Paragraph(f"for a comment {EVIL}")], on=MARKDOWN),
            Section("warn", "Warnings", [Warnings([Warned("It was late.", "Likely: busy.", "--set a=1")])], on=BRIEF),
        ],
        _provenance(validity),
    )  # fmt: skip


def test_the_page_has_every_figure_with_its_place_in_the_result_and_only_the_sections_meant_for_it() -> None:
    page = html.page(_document())
    assert '<td class="n" data-value="612.0" data-key="slo.0.value_ms">612 ms</td>' in page
    assert '<th scope="col" class="n" data-csv="measured (ms)">measured</th>' in page
    assert '<td class="n" data-value="" title="too few">–</td>' in page
    assert "for a comment" not in page
    assert "It was late" not in page
    assert "&lt;/script&gt;&lt;img src=x&gt;" in page
    assert "<img" not in page
    assert page.count('class="panel"') == 2
    assert page.count('hidden="hidden"') == 1


def test_nobody_meets_half_a_page(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("the page before")
    path.with_suffix(".html.part").mkdir()  # where it is written first
    with pytest.raises(IsADirectoryError):
        html.write(path, _document())
    assert path.read_text() == "the page before"


def test_the_terminal_has_signs_for_answers_tables_for_pictures_and_no_line_that_is_too_long() -> None:
    said = terminal.text(_document(), 70, links=Facts([("again", "gapmeter run " + "x" * 90)]), end="exit=99").plain
    lines = said.splitlines()
    assert lines[0].startswith("chat @ vllm ")
    assert lines[0].endswith(" 8 req/s")
    assert lines[1] == "FAIL  p99 TTFT 612 ms."
    assert " x ttft p99 <= 500 ms      612 ms" in lines
    assert f"        {EVIL}" in lines
    assert " queue  3.00 ms" in lines
    assert "only slow" in said
    assert "only all" not in said
    assert [line for line in lines if line.startswith(" failed  two")]
    assert max(len(line) for line in lines if "xxx" not in line) <= 70
    assert lines[-2:] == [" again   gapmeter run " + "x" * 90, " exit=99"]


def test_markdown_has_the_tables_behind_the_pictures_and_cannot_be_broken_out_of() -> None:
    assert markdown.escaped("[x](http://y) `c` **b** <i>") == r"\[x\](http://y) \`c\` \*\*b\*\* &lt;i&gt;"
    said = markdown.text(_document())
    assert said.startswith("### FAIL: chat @ vllm\n\n8 req/s\n\np99 TTFT 612 ms.\n")
    assert "| FAIL | `ttft p99 <= 500 ms` | 612 ms | &lt;/script&gt;&lt;img src=x&gt;\\|\"'&amp; |" in said
    assert "| queue | 3.00 ms |" in said
    assert "- It was late. Likely: busy. Try `--set a=1`." in said
    assert said.endswith(
        "<sub>chat d1 · tiny · float32 · vllm · CPU · 8 req/s · n = 9 · valid · 2026-01-02 · again</sub>\n"
    )


@pytest.mark.parametrize(
    ("foreign", "shown"),
    [
        ("@team, me@home, chat @ vllm", "@&#8203;team, me@home, chat @ vllm"),
        ("like org/it#12", "like org/it#&#8203;12"),
        ("# loud", r"\# loud"),
        ("---", r"\---"),
        ("-0.5 ms", "-0.5 ms"),
        ("__so__ ~~not~~ server.max_batch", r"\_\_so\_\_ \~\~not\~\~ server.max_batch"),
        ("![](http://y)", r"!\[\](http://y)"),
    ],
)
def test_foreign_text_calls_nobody_in_a_pull_request_and_has_no_form_of_its_own(foreign: str, shown: str) -> None:
    assert markdown.escaped(foreign) == shown


def test_code_in_markdown_ends_where_it_ends() -> None:
    section = Section("again", "", [Paragraph(Code("a``")), Pre("gapmeter run '```'\n@team")], on=MARKDOWN)
    said = markdown.text(Document("t", Header("chat"), None, [section], _provenance()))
    assert "\n``` a`` ```\n" in said
    assert "\n````\ngapmeter run '```'\n@team\n````\n" in said


@pytest.mark.parametrize(("validity", "stamped"), [("valid", 0), ("INVALID", 1)])
def test_what_must_not_be_believed_is_stamped_on_every_picture_and_table(validity: str, stamped: int) -> None:
    page = html.page(_document(validity))
    pictures, tables = page.count("<svg id="), page.count("<table")
    assert (pictures, tables) == (1, 2)
    assert page.count('<div class="across" aria-hidden="true"><span>INVALID</span>') == 3 * stamped
    assert page.count('class="across"') == 3 * stamped


def test_columns_line_up_beside_letters_that_take_two_columns_of_a_terminal() -> None:
    table = Table("Points", ["point", "ms"], [["模型", Figure(1.0)], ["tiny", Figure(22.0)]])
    section = Section("points", "", [table], on=TERMINAL)
    said = terminal.text(Document("", Header("t"), None, [section], _provenance())).plain
    assert said.splitlines()[-2:] == [" 模型   1.00 ms", " tiny   22.0 ms"]
