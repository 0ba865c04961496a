"""A model's text side: chat template, tokenizer, and turning tokens back into text as they come."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from gapmeter.records.chat_template import REFUSALS, ChatTemplate, NoTemplate, read_config, read_tokenizer

_NO_PREFIX = "Invalid prefix"  # of tokens: what DecodeStream says of bytes that it cannot go on from
_WITHHELD_MOST = 16  # tokens without a complete character after which the text is given as it is


class TemplateRefused(ValueError):
    """The chat template does not accept these messages; the message is its own."""


class TextModel:
    """Reads ``tokenizer.json`` and the chat template of a model's folder. Raises OSError, or TextUnusable."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = read_tokenizer(folder)
        self._template = ChatTemplate(folder, read_config(folder))

    def template(self, messages: Sequence[dict[str, Any]]) -> str:
        """The prompt of a chat. Raises TemplateRefused, also when the model has no chat template."""
        try:
            return self._template.render(messages)
        except NoTemplate:
            raise TemplateRefused("this model has no chat template; use /v1/completions") from None
        except REFUSALS as error:
            raise TemplateRefused(f"the model's chat template refuses these messages: {error}") from error

    def encode(self, text: str, *, templated: bool) -> list[int]:
        """Token ids; the tokenizer's own special tokens are added unless a template has put them there."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=not templated).ids
        return ids

    def decoder(self) -> Decoder:
        """A fresh incremental decoder for one answer."""
        return Decoder(self.tokenizer)

    @property
    def size(self) -> int:
        """Entries of the vocabulary, added tokens included."""
        return int(self.tokenizer.get_vocab_size())


class Decoder:
    """Turns one answer's tokens into text as they come, never splitting a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._withheld: list[int] = []

    def push(self, ids: Sequence[int], *, last: bool = False) -> str:
        """The text that became complete with ``ids``; what is left of an incomplete character comes with the last."""
        text = ""
        for token in ids:
            try:
                piece = self._stream.step(self._tokenizer, token)
            except Exception as error:  # bytes that are no character and end in none: the library has no type for it
                if _NO_PREFIX not in str(error):
                    raise
                text += self._give_up()
                piece = self._stream.step(self._tokenizer, token)
            if piece is None:
                self._withheld.append(token)
                if len(self._withheld) >= _WITHHELD_MOST:
                    text += self._give_up()
            else:
                self._withheld.clear()
                text += piece
        return text + self._give_up() if last and self._withheld else text

    def _give_up(self) -> str:
        """The withheld tokens with replacement characters; decoding starts afresh after them."""
        text: str = self._tokenizer.decode(self._withheld, skip_special_tokens=True)
        self._withheld.clear()
        self._stream = DecodeStream(skip_special_tokens=True)
        return text


class StopFinder:
    """Holds back text that could be the start of a stop string, and cuts at the first that is complete."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._margin = max(map(len, stops)) - 1
        self._unshown = ""

    def push(self, text: str, *, last: bool) -> tuple[str, bool]:
        """The text that may be shown now, and whether a stop string was found (nothing more is shown then)."""
        self._unshown += text
        places = [at for stop in self._stops if (at := self._unshown.find(stop)) >= 0]
        if places:
            return self._unshown[: min(places)], True
        shown = self._unshown[: max(0, len(self._unshown) - (0 if last else self._margin))]
        self._unshown = self._unshown[len(shown) :]
        return shown, False
