"""The served model's own tokenizer, as far as a prompt's length needs it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from gapmeter.loadgen import PlanError
from gapmeter.records.chat_template import REFUSALS, ChatTemplate, NoTemplate, TextUnusable, read_config, read_tokenizer

Message = dict[str, str]  # role and content
T = TypeVar("T")

_WORD = re.compile(r"[Ġ▁]?([a-z]{1,12})")
_MOST_WORDS = 4096
_AT_ONCE = 64
_FEWEST_WORDS = 16
_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")
_HUB_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]
# Tokenizer classes that take tokenizer.json as it stands; others may change it as they load it.
_VERBATIM = ("PreTrainedTokenizerFast", "TokenizersBackend")


class Backend(Protocol):
    """What we need of a tokenizer library."""

    def vocabulary(self) -> Mapping[str, int]: ...

    def render(self, messages: Sequence[Message]) -> str:
        """The chat template around messages, up to where the answer begins. Raises one of REFUSALS."""

    def lengths(self, texts: list[str], *, special: bool) -> list[int]:
        """Tokens of each text; ``special``: with those that the tokenizer adds by itself."""


class TemplateRefused(PlanError):
    """The chat template renders no such messages, for ``reason``."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}; write workload.kind: completion")
        self.reason = reason


class PromptTokenizer:
    """Counts tokens as the server will: ``chat`` through the chat template, ``completion`` as a bare prompt."""

    def __init__(self, backend: Backend, name: str) -> None:
        """``name`` is how messages call it."""
        self.name = name
        self._backend = backend

    def counts(self, texts: Sequence[str], kind: str) -> NDArray[np.int64]:
        """Tokens of each text, int64. Raises PlanError where a chat has no template.

        ``chat``: each as the only message of a chat, with the template's own tokens and the generation prompt's;
        ``completion``: each as a bare prompt, with the special tokens that the tokenizer adds by itself.
        """
        if kind == "chat":
            return self.count_messages([[{"role": "user", "content": text}] for text in texts])
        return self._lengths(texts, str, special=True)

    def count_messages(self, chats: Sequence[Sequence[Message]]) -> NDArray[np.int64]:
        """Tokens of each chat as the template renders it, generation prompt included. Raises PlanError without one."""
        return self._lengths(chats, self._render, special=False)

    def _render(self, chat: Sequence[Message]) -> str:
        try:
            return self._backend.render(chat)
        except REFUSALS as error:
            raise TemplateRefused(f"the chat template of {self.name} cannot be used: {error}") from error

    def _lengths(self, items: Sequence[T], render: Callable[[T], str], *, special: bool) -> NDArray[np.int64]:
        """A few at a time: a tokenizer's account of a text takes many times the memory of the text."""
        counts = list[int]()
        for at in range(0, len(items), _AT_ONCE):
            counts += self._backend.lengths(list(map(render, items[at : at + _AT_ONCE])), special=special)
        return np.array(counts, np.int64)

    def words(self) -> tuple[list[str], str]:
        """Lower-case words that cost one token each wherever they follow another, and what joins them.

        Raises PlanError when the vocabulary has too few to make prompts that differ.
        """
        vocabulary = sorted(self._backend.vocabulary().items(), key=lambda item: item[1])
        matches = (_WORD.fullmatch(token) for token, _ in vocabulary)
        candidates = list(dict.fromkeys(match[1] for match in matches if match))[:_MOST_WORDS]
        for joiner in (" ", ""):
            (lone,) = self._backend.lengths(["a"], special=False)
            doubled = self._backend.lengths([joiner.join(("a", word, word)) for word in candidates], special=False)
            words = [word for word, tokens in zip(candidates, doubled, strict=True) if tokens == lone + 2]
            if len(words) >= _FEWEST_WORDS:
                return words, joiner
        raise PlanError(f"the tokenizer of {self.name} has {len(words)} plain words, too few for prompts that differ")


def load_tokenizer(folder_or_id: str | Path) -> PromptTokenizer:
    """The tokenizer of a model's folder or hub id; raises PlanError when there is none that can be loaded.

    A folder whose tokenizer.json is used as it stands is read directly, which takes a tenth of a second; anything else
    takes Transformers, which servers use too, and several seconds for its import. A hub that cannot be reached is asked
    once, and then what was downloaded earlier is taken.
    """
    name = str(folder_or_id)
    folder = Path(os.path.expanduser(name))
    if name.startswith(("/", ".", "~")) and not folder.is_dir():
        raise PlanError(f"no tokenizer at {name}: no such folder")
    try:
        if not folder.is_dir():
            from huggingface_hub import snapshot_download  # slow to import, and only hub ids need it

            folder = Path(snapshot_download(name, allow_patterns=_HUB_FILES))
        if not any((folder / file).is_file() for file in _FILES):
            raise PlanError(f"{name} holds no tokenizer: {_FILES[0]} is missing")
        config = read_config(folder)
        generic = config.get("tokenizer_class") in _VERBATIM and not {"add_bos_token", "add_eos_token"} & config.keys()
        if generic and (folder / "tokenizer.json").is_file():
            backend: Backend = FileBackend(folder, config)
        else:
            backend = TransformersBackend(folder)
    except PlanError:
        raise
    except TextUnusable as error:
        raise PlanError(f"the tokenizer of {name} cannot be loaded: {error}") from error
    except Exception as error:  # whatever a hub or Transformers raises
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise PlanError(f"the tokenizer of {name} cannot be loaded: {reason[:200]}") from error
    return PromptTokenizer(backend, name)


class FileBackend:
    """``tokenizer.json`` and the chat template of a folder, read without Transformers."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._tokenizer = read_tokenizer(folder)
        self.render = ChatTemplate(folder, config).render

    def vocabulary(self) -> Mapping[str, int]:
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        return vocabulary

    def lengths(self, texts: list[str], *, special: bool) -> list[int]:
        return [len(encoding) for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=special)]


class TransformersBackend:
    """Any tokenizer that Transformers loads from a folder. Raises PlanError without Transformers."""

    def __init__(self, folder: Path) -> None:
        try:
            from transformers import AutoTokenizer  # imported late: it takes seconds, and an engine's extra brings it
        except ImportError as error:
            text = f"the tokenizer of {folder} needs Transformers, which is missing: make setup in a checkout, or"
            raise PlanError(f"{text} pip install transformers") from error
        self._tokenizer = AutoTokenizer.from_pretrained(folder)

    def vocabulary(self) -> Mapping[str, int]:
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        return vocabulary

    def render(self, messages: Sequence[Message]) -> str:
        if self._tokenizer.chat_template is None:
            raise NoTemplate("the model has none")
        return str(self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))

    def lengths(self, texts: list[str], *, special: bool) -> list[int]:
        if not texts:
            return []
        encoded = self._tokenizer(texts, add_special_tokens=special, return_attention_mask=False, verbose=False)
        return [len(ids) for ids in encoded["input_ids"]]
