"""The served model's own tokenizer, as far as a prompt's length needs it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from loadgen.errors import PlanError

_WORD = re.compile(r"[Ġ▁]?([a-z]{1,12})")
_MOST_WORDS = 4096
_FEWEST_WORDS = 16
_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


class PromptTokenizer:
    """Counts tokens as the server will: ``chat`` through the chat template, ``completion`` as a bare prompt."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        """``tokenizer`` is a Transformers tokenizer; ``name`` is how messages call it."""
        self.name = name
        self._tokenizer = tokenizer

    def count_chat(self, text: str) -> int:
        """Tokens of a chat whose only message is ``text``, the template's and the generation prompt's included."""
        return int(self.counts([text], "chat")[0])

    def count_text(self, text: str) -> int:
        """Tokens of a completion's prompt, with the special tokens that the tokenizer adds by itself."""
        return int(self.counts([text], "completion")[0])

    def counts(self, texts: Sequence[str], kind: str) -> NDArray[np.int64]:
        """Tokens of each text, int64, for kind ``chat`` or ``completion``. Raises PlanError without a template."""
        rendered = [self._render(text) for text in texts] if kind == "chat" else list(texts)
        return self._lengths(rendered, special=kind != "chat")

    def words(self) -> tuple[list[str], str]:
        """Lower-case words that cost one token each wherever they follow another, and what joins them.

        Raises PlanError when the vocabulary has too few to make prompts that differ.
        """
        vocabulary = sorted(self._tokenizer.get_vocab().items(), key=lambda item: item[1])
        matches = (_WORD.fullmatch(token) for token, _ in vocabulary)
        candidates = list(dict.fromkeys(match[1] for match in matches if match))[:_MOST_WORDS]
        for joiner in (" ", ""):
            found = self._single_tokens(candidates, joiner)
            if len(found) >= _FEWEST_WORDS:
                return found, joiner
        raise PlanError(
            f"the tokenizer of {self.name} has {len(found)} plain words, too few for prompts that differ; "
            "name another with --set server.tokenizer=FOLDER"
        )

    def _single_tokens(self, candidates: list[str], joiner: str) -> list[str]:
        lone = self._lengths(["a"], special=False)[0]
        doubled = self._lengths([joiner.join(("a", word, word)) for word in candidates], special=False)
        return [word for word, tokens in zip(candidates, doubled, strict=True) if tokens == lone + 2]

    def _render(self, text: str) -> str:
        message = [{"role": "user", "content": text}]
        try:
            return str(self._tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))
        except (ValueError, TemplateError) as error:
            if self._tokenizer.chat_template is None:
                reason = f"{self.name} has no chat template, so it cannot chat"
            else:
                reason = f"the chat template of {self.name} fails: {error}"
            raise PlanError(f"{reason}; write workload.kind: completion") from error

    def _lengths(self, texts: list[str], *, special: bool) -> NDArray[np.int64]:
        if not texts:
            return np.zeros(0, np.int64)
        ids = self._tokenizer(
            texts, add_special_tokens=special, return_attention_mask=False, return_token_type_ids=False, verbose=False
        )["input_ids"]
        return np.fromiter(map(len, ids), np.int64, len(texts))


def load_tokenizer(folder_or_id: str | Path) -> PromptTokenizer:
    """The tokenizer of a model's folder or hub id; raises PlanError when there is none that can be loaded."""
    from transformers import AutoTokenizer  # seconds to import, and only those who plan need it

    name = str(folder_or_id)
    if name.startswith(("/", ".", "~")) and not Path(name).expanduser().is_dir():
        raise PlanError(f"no tokenizer at {name}: no such folder")
    source = str(Path(name).expanduser()) if name.startswith("~") else name
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise PlanError(_why_not(Path(source), error)) from error
    return PromptTokenizer(tokenizer, name)


def _why_not(source: Path, error: Exception) -> str:
    if not source.is_dir():
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        return f"cannot get the tokenizer of {source} from the model hub: {reason[:200]}"
    if not any((source / name).is_file() for name in _FILES):
        return f"the folder {source} holds no tokenizer ({_FILES[0]} is missing); name one with server.tokenizer"
    return f"the tokenizer in {source} cannot be loaded: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
