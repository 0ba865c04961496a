"""The text side of the simulated server: a real tokenizer and template, whose work takes a stated time."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gapmeter.servers.api.text import Decoder, TextModel
from gapmeter.servers.simulated.pause import Pause, now
from gapmeter.servers.simulated.times import Durations
from gapmeter.servers.simulated.truth import TruthFile

_WORD = re.compile(r"[Ġ▁][a-z]{1,12}")
_LETTER = re.compile(r"[a-z]")
_MOST_WORDS = 4096
_FEWEST_WORDS = 16
_BYTE_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

current: ContextVar[str] = ContextVar("simulated_request", default="")  # the client's id of the request in hand


class TimedText(TextModel):
    """A model's text side that takes as long as ``durations`` say (or as it must, if that is longer).

    ``truth`` hears of each stage by the client's request id.
    """

    def __init__(self, folder: Path, durations: Durations, pause: Pause, truth: TruthFile | None) -> None:
        super().__init__(folder)
        self._durations, self._pause, self._truth = durations, pause, truth

    def template(self, messages: Sequence[dict[str, Any]]) -> str:
        """As TextModel's, in ``template_ns``."""
        timed = self.timed("template", self._durations.times.template_ns, current.get())
        text = super().template(messages)
        timed()
        return text

    def encode(self, text: str, *, templated: bool) -> list[int]:
        """As TextModel's, in ``tokenize_ns``."""
        timed = self.timed("tokenize", self._durations.times.tokenize_ns, current.get())
        ids = super().encode(text, templated=templated)
        timed()
        return ids

    def decoder(self) -> Decoder:
        """A decoder whose every push takes ``detokenize_ns``."""
        return _TimedDecoder(self._tokenizer, self, current.get())

    def timed(self, stage: str, nominal_ns: int, who: str) -> Callable[[], None]:
        """Begin a stage of ``who``; calling the result ends it, once the stage has lasted as long as it should."""
        start = now()
        meant = self._durations.draw(stage, nominal_ns)

        def end() -> None:
            self._pause.until(start + meant)
            if self._truth:
                self._truth.stage(stage.upper(), who, start, now(), meant)

        return end

    @property
    def detokenize_ns(self) -> int:
        """Nominal duration of detokenizing a chunk."""
        return self._durations.times.detokenize_ns

    def words(self) -> list[int]:
        """Ids of tokens that are each a plain word with a space before it; letters where there are too few."""
        by_id = sorted(self._tokenizer.get_vocab().items(), key=lambda item: item[1])
        found = [number for token, number in by_id if _WORD.fullmatch(token)][:_MOST_WORDS]
        if len(found) < _FEWEST_WORDS:
            found = [number for token, number in by_id if _LETTER.fullmatch(token)]
        return found or [number for _, number in by_id][:_MOST_WORDS]


class _TimedDecoder(Decoder):
    def __init__(self, tokenizer: Tokenizer, text: TimedText, who: str) -> None:
        super().__init__(tokenizer)
        self._text, self._who = text, who

    def push(self, ids: Sequence[int], *, last: bool = False) -> str:
        """As Decoder's, in ``detokenize_ns``."""
        timed = self._text.timed("detokenize", self._text.detokenize_ns, self._who)
        piece = super().push(ids, last=last)
        timed()
        return piece


def byte_model() -> tempfile.TemporaryDirectory[str]:
    """A folder with a tokenizer of one token a byte and a plain chat template, for a server that was given none."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder = tempfile.TemporaryDirectory(prefix="gapmeter-bytes-")
    tokenizer.save(str(Path(folder.name) / "tokenizer.json"))
    config = {"chat_template": _BYTE_TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
    (Path(folder.name) / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
