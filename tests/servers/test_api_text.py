from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gapmeter.records.chat_template import TextUnusable
from gapmeter.servers.api.text import StopFinder, TemplateRefused, TextModel


@pytest.fixture(scope="module")
def text(model: Path) -> TextModel:
    return TextModel(model)


def _changed(model: Path, target: Path, **config: object) -> TextModel:
    target.mkdir()
    (target / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    return TextModel(target)


@given(data=st.data(), written=st.text(max_size=40))
def test_pieces_joined_are_the_text_and_no_piece_splits_a_character(
    text: TextModel, data: st.DataObject, written: str
) -> None:
    ids = text.encode(written, templated=True)
    decoder, shown, at = text.decoder(), "", 0
    while at < len(ids):
        size = data.draw(st.integers(1, 4))
        piece = decoder.push(ids[at : at + size], last=at + size >= len(ids))
        at += size
        assert "�" not in piece or "�" in written
        shown += piece
    assert shown == written


def test_bytes_of_an_incomplete_character_are_withheld_until_it_is_complete(text: TextModel) -> None:
    ids = text.encode("🙂", templated=True)
    decoder = text.decoder()
    assert len(ids) == 4
    assert [decoder.push([token]) for token in ids] == ["", "", "", "🙂"]


def test_what_is_left_of_an_incomplete_character_comes_with_the_last_token(text: TextModel) -> None:
    decoder = text.decoder()
    assert decoder.push(text.encode("a🙂", templated=True)[:3]) == "a"
    assert decoder.push([], last=True) == "�"


def test_tokens_that_never_become_a_character_are_not_withheld_for_ever(text: TextModel) -> None:
    first = text.encode("🙂", templated=True)[0]
    decoder = text.decoder()
    shown = [decoder.push([first]) for _ in range(40)]
    assert [bool(piece) for piece in shown].count(True) >= 2
    assert "".join(shown) + decoder.push([], last=True) == "�" * 40
    assert decoder.push(text.encode(" then", templated=True)) == " then"


@example(["abba", "ab"], ["abbaab"])
@given(
    st.lists(st.text("ab\n", max_size=4), max_size=12), st.lists(st.text("ab\n", min_size=1, max_size=6), min_size=1)
)
def test_shown_text_is_what_stands_before_the_first_stop_however_it_is_cut(pieces: list[str], stops: list[str]) -> None:
    finder, shown, found = StopFinder(stops), "", False
    for number, piece in enumerate(pieces):
        more, found = finder.push(piece, last=number == len(pieces) - 1)
        shown += more
        if found:
            break
    written = "".join(pieces)
    ends = [at for stop in stops if (at := written.find(stop)) >= 0]
    assert found == bool(ends)
    if found:
        # Of two stops the one that is complete first counts, so the cut is where one of them begins.
        assert shown == written[: len(shown)] and any(written.startswith(stop, len(shown)) for stop in stops)
        assert not any(stop in shown for stop in stops)
    else:
        assert shown == written


def test_the_template_frames_every_message_and_asks_for_an_answer(text: TextModel) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "why?"}]
    assert text.template(messages) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n"
    )


TEMPLATES = [
    ("{{ bos_token }}{{ messages[0].content | tojson }}", "<s>\"<b>'é'</b>\""),
    ("{% for m in messages %}\n{% if loop.first %}\nfirst\n{% endif %}\n{% endfor %}", "first\n"),
    ("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}", "1"),
    ("{% if tools is not none %}tools {% endif %}{{ documents is none }}", "True"),
    ([{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}], "yes"),
]


@pytest.mark.parametrize(("template", "rendered"), TEMPLATES)
def test_templates_get_what_they_expect_of_their_surroundings(
    model: Path, tmp_path: Path, template: object, rendered: str
) -> None:
    other = _changed(model, tmp_path / "m", chat_template=template, bos_token={"content": "<s>"})
    assert other.template([{"role": "user", "content": "<b>'é'</b>"}]) == rendered


def test_a_template_file_wins_over_the_configuration(model: Path, tmp_path: Path) -> None:
    _changed(model, tmp_path / "m", chat_template="from the configuration")
    (tmp_path / "m" / "chat_template.jinja").write_text("from the file")
    assert TextModel(tmp_path / "m").template([]) == "from the file"


def test_files_that_cannot_be_read_are_a_typed_error(model: Path, tmp_path: Path) -> None:
    with pytest.raises(TextUnusable, match=r"chat template .* cannot be read"):
        _changed(model, tmp_path / "m", chat_template="{% for %}")
    (tmp_path / "m" / "tokenizer_config.json").write_text("{")
    with pytest.raises(TextUnusable, match=r"tokenizer_config\.json cannot be read"):
        TextModel(tmp_path / "m")
    (tmp_path / "m" / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(TextUnusable, match=r"tokenizer\.json cannot be read"):
        TextModel(tmp_path / "m")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.no_such.thing }}", "refuses these messages"),
        ("{{ ''.__class__.__mro__ }}", "refuses these messages"),
        (None, "no chat template"),
    ],
)
def test_a_template_that_refuses_is_a_typed_error(
    model: Path, tmp_path: Path, template: str | None, reason: str
) -> None:
    other = _changed(model, tmp_path / "m", chat_template=template)
    with pytest.raises(TemplateRefused, match=reason):
        other.template([{"role": "user", "content": "x"}])
