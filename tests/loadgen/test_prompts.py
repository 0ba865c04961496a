"""Prompts have exactly the tokens asked for, and share no more than they are meant to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapmeter.loadgen import PlanError
from gapmeter.loadgen.draws import Seeds
from gapmeter.loadgen.prompts import make_prompts, survey
from gapmeter.loadgen.tokenizer import Message, PromptTokenizer, TransformersBackend, load_tokenizer
from gapmeter.servers.launch import free_port
from tests.kit.tokenizers import KINDS, write_model
from tests.loadgen.test_prefixes import alike


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PromptTokenizer]:
    return {kind: load_tokenizer(write_model(tmp_path_factory.mktemp(kind), kind)) for kind in KINDS}


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from(sorted(KINDS)),
    kind=st.sampled_from(["chat", "completion"]),
    asked=st.lists(st.integers(1, 600), min_size=1, max_size=20),
    share=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
    seed=st.integers(0, 1000),
)
def test_every_prompt_has_exactly_the_tokens_asked_for(
    tokenizers: dict[str, PromptTokenizer], name: str, kind: str, asked: list[int], share: float, seed: int
) -> None:
    tokenizer = tokenizers[name]
    prompts = make_prompts(tokenizer, kind, np.array(asked), share, Seeds(seed))
    shortest = prompts.words.shortest
    assert tokenizer.counts(prompts.openings.texts, kind).tolist() == [max(tokens, shortest) for tokens in asked]
    assert prompts.tokens.tolist() == [max(tokens, shortest) for tokens in asked]
    assert prompts.lengthened == sum(tokens < shortest for tokens in asked)


@pytest.mark.parametrize("name", KINDS)
def test_counts_are_those_of_transformers_one_step_call(tmp_path: Path, name: str) -> None:
    """The same texts through what servers call, however the tokenizer was read."""
    from transformers import AutoTokenizer

    folder = write_model(tmp_path, name)
    theirs = AutoTokenizer.from_pretrained(folder)
    direct, wrapped = load_tokenizer(folder), PromptTokenizer(TransformersBackend(folder), name)
    texts = ["one", "the license of this work", "a b c d e", "  spaced \n", "naïve 日本語 🙂", "<|user|> 1 {{ x }}", ""]
    chats = [[{"role": "user", "content": text}] for text in texts]
    ids = [
        theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"] for chat in chats
    ]
    for ours in (direct, wrapped):
        assert ours.counts(texts, "chat").tolist() == [len(tokens) for tokens in ids]
        assert ours.counts(texts, "completion").tolist() == [len(theirs(text)["input_ids"]) for text in texts]


def test_a_tokenizer_that_a_class_changes_as_it_loads_is_left_to_transformers(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    plain = load_tokenizer(folder).counts(["one"], "completion")
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"add_bos_token": True}))
    from transformers import AutoTokenizer

    assert load_tokenizer(folder).counts(["one"], "completion") == len(
        AutoTokenizer.from_pretrained(folder)("one")["input_ids"]
    )
    assert plain == load_tokenizer(write_model(tmp_path / "again")).counts(["one"], "completion")


@pytest.mark.parametrize("name", KINDS)
def test_prompts_differ_from_their_first_words_on(tokenizers: dict[str, PromptTokenizer], name: str) -> None:
    prompts = make_prompts(tokenizers[name], "chat", np.full(200, 100), 0.0, Seeds(1))
    assert len(set(prompts.openings.texts)) == 200
    words = [
        text.split(prompts.words.joiner)[:4] if prompts.words.joiner else list(text[:6])
        for text in prompts.openings.texts
    ]
    assert len({tuple(first) for first in words}) > 190


def test_the_shared_share_is_the_same_text_and_the_rest_differs(tokenizers: dict[str, PromptTokenizer]) -> None:
    prompts = make_prompts(tokenizers["byte-level"], "chat", np.full(50, 140), 0.5, Seeds(1))
    own_tokens = 140 - prompts.words.overhead
    shared = round(own_tokens * 0.5)
    first = prompts.openings.texts[0].split()
    for text, (word, at) in zip(prompts.openings.texts, prompts.openings.firsts, strict=True):
        assert text.split()[:shared] == first[:shared]
        assert text[at:].startswith(word)
        assert len(text[at:].split()) == own_tokens - shared
    assert len({text.split()[shared] for text in prompts.openings.texts}) > 25
    whole = make_prompts(tokenizers["byte-level"], "chat", np.full(5, 140), 1.0, Seeds(1))
    assert len(set(whole.openings.texts)) == 1


def test_a_shorter_prompt_shares_the_beginning_of_a_longer_one(tokenizers: dict[str, PromptTokenizer]) -> None:
    short, long = make_prompts(tokenizers["byte-level"], "chat", np.array([80, 400]), 0.5, Seeds(1)).openings.texts
    assert alike(short, long) >= len(" ".join(short.split()[: (len(short.split()) + 1) // 2 - 1]))


def test_what_one_prompt_says_depends_on_no_other(tokenizers: dict[str, PromptTokenizer]) -> None:
    one = make_prompts(tokenizers["byte-level"], "chat", np.array([50, 60, 70]), 0.0, Seeds(1))
    other = make_prompts(tokenizers["byte-level"], "chat", np.array([99, 60, 12]), 0.0, Seeds(1))
    assert one.openings.texts[1] == other.openings.texts[1]
    assert one.openings.texts[0] != other.openings.texts[0]


def test_without_a_tokenizer_words_are_counted_and_said_to_be_inexact() -> None:
    prompts = make_prompts(None, "chat", np.array([1, 20, 300]), 0.0, Seeds(1))
    assert [len(text.split()) for text in prompts.openings.texts] == [1, 20, 300]


def test_words_of_a_survey_cost_one_token_each_wherever_they_stand(tokenizers: dict[str, PromptTokenizer]) -> None:
    for name, tokenizer in tokenizers.items():
        words = survey(tokenizer, "chat")
        assert set(words.starters) <= set(words.joined), name
        assert tokenizer.counts([words.starters[0]], "chat") == words.shortest
        for starter in words.starters[:20]:
            text = words.joiner.join([starter, *reversed(words.joined)])
            assert tokenizer.counts([text], "chat") == words.overhead + 1 + len(words.joined), name


def test_a_model_that_cannot_chat_says_what_to_write_instead(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_model(tmp_path, template=None))
    says = r"the chat template of .* cannot be used: the model has none; write workload.kind: completion"
    with pytest.raises(PlanError, match=says):
        make_prompts(tokenizer, "chat", np.array([50]), 0.0, Seeds(1))
    made = make_prompts(tokenizer, "completion", np.array([50]), 0.0, Seeds(1))
    assert tokenizer.counts(made.openings.texts, "completion").tolist() == [50]


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('a system prompt is required') }}", "a system prompt is required; write"),
        ("{{ messages | tojson(x=2) }}", ""),
        ("{{ messages[0].content + 1 }}", ""),
        ("{{ nothing.at.all }}", ""),
        ("{{ 1 // 0 }}", ""),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", ""),
    ],
)
def test_a_template_that_breaks_is_named_whatever_it_raises(template: str, says: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_model(tmp_path, template=template))
    with pytest.raises(PlanError, match=rf"the chat template of .* cannot be used: {says}"):
        make_prompts(tokenizer, "chat", np.array([50]), 0.0, Seeds(1))


def test_a_template_may_say_how_json_is_written(tmp_path: Path) -> None:
    template = "{{ messages[0].content | tojson(ensure_ascii=false) }}"
    tokenizer = load_tokenizer(write_model(tmp_path, template=template))
    assert tokenizer.count_messages([[{"role": "user", "content": "hello"}]])[0] > 0


def test_a_folder_without_a_usable_tokenizer_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(PlanError, match=r"holds no tokenizer: tokenizer.json is missing"):
        load_tokenizer(tmp_path)
    with pytest.raises(PlanError, match="no such folder"):
        load_tokenizer(tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").write_text("{ half")
    with pytest.raises(PlanError, match=r"the tokenizer of .* cannot be loaded: "):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(PlanError, match=r"the tokenizer of .* cannot be loaded: "):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{ half")
    with pytest.raises(PlanError, match=r"tokenizer_config\.json cannot be read"):
        load_tokenizer(tmp_path)


class Words:
    """A tokenizer whose tokens are words, and the most texts that it was given at once."""

    most = 0

    def vocabulary(self) -> dict[str, int]:
        return {}

    def render(self, messages: Sequence[Message]) -> str:
        return " ".join(message["content"] for message in messages)

    def lengths(self, texts: list[str], *, special: bool) -> list[int]:
        self.most = max(self.most, len(texts))
        return [len(text.split()) for text in texts]


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_prompts_are_counted_a_few_at_a_time_so_that_many_need_no_more_memory(kind: str) -> None:
    words = Words()
    texts = ["a " * count for count in range(1000)]
    assert PromptTokenizer(words, "words").counts(texts, kind).tolist() == list(range(1000))
    assert words.most <= 64


def test_a_hub_that_cannot_be_reached_is_told_at_once(tmp_path: Path) -> None:
    script = "from gapmeter.loadgen.tokenizer import load_tokenizer\nload_tokenizer('foo/bar')"
    hub = {"HF_ENDPOINT": f"http://127.0.0.1:{free_port()}", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-P", "-c", script]
    done = subprocess.run(command, env={**os.environ, **hub}, capture_output=True, text=True, timeout=40, check=False)
    assert "PlanError: the tokenizer of foo/bar cannot be loaded: " in done.stderr
    assert "Retrying" not in done.stderr
