"""The API process of the simulated server: a real tokenizer, template and HTTP, whose work takes a stated time."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from time import monotonic_ns as now
from typing import Any

from aiohttp import web
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gapmeter.servers.api.app import Handler
from gapmeter.servers.api.openai import ApiError
from gapmeter.servers.api.stamps import StampedRequest
from gapmeter.servers.api.text import Decoder, TextModel
from gapmeter.servers.simulated.options import Faults
from gapmeter.servers.simulated.realtime import pause_until
from gapmeter.servers.simulated.stage_times import Durations
from gapmeter.servers.simulated.truth import TruthFile

_WORD = re.compile(r"[Ġ▁][a-z]{1,12}")
_LETTER = re.compile(r"[a-z]")
_MOST_WORDS = 4096
_FEWEST_WORDS = 16
_LINES = 4  # of truth, written with each chunk: as many as one leaves behind, so that they do not heap up
_BYTE_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

_client_id: ContextVar[str] = ContextVar("simulated_request", default="")  # of the request in hand


class TimedText(TextModel):
    """A model's text side that takes as long as ``durations`` say (or as it must, if that is longer).

    ``truth`` hears of each stage by the client's request id.
    """

    def __init__(self, folder: Path, durations: Durations, busy: bool, truth: TruthFile | None) -> None:
        super().__init__(folder)
        self._durations, self._busy, self._truth = durations, busy, truth

    def template(self, messages: Sequence[dict[str, Any]]) -> str:
        """As TextModel's, in ``template_ns``."""
        with self.timed("template", self._durations.times.template_ns, _client_id.get()):
            return super().template(messages)

    def encode(self, text: str, *, templated: bool) -> list[int]:
        """As TextModel's, in ``tokenize_ns``."""
        with self.timed("tokenize", self._durations.times.tokenize_ns, _client_id.get()):
            return super().encode(text, templated=templated)

    def decoder(self) -> Decoder:
        """A decoder whose every push takes ``detokenize_ns``."""
        return _TimedDecoder(self.tokenizer, self, self._durations.times.detokenize_ns, _client_id.get())

    @contextlib.contextmanager
    def timed(self, stage: str, nominal_ns: int, who: str) -> Iterator[None]:
        """A stage of ``who``: the block ends once it has lasted as long as it should."""
        start = now()
        meant = self._durations.draw(stage, nominal_ns)
        yield
        pause_until(start + meant, busy=self._busy)
        if self._truth:
            self._truth.stage(stage.upper(), who, start, now(), meant)

    def words(self) -> tuple[int, ...]:
        """Ids of tokens that are each a plain word with a space before it; letters where there are too few."""
        by_id = sorted(self.tokenizer.get_vocab().items(), key=lambda item: item[1])
        words = [number for token, number in by_id if _WORD.fullmatch(token)][:_MOST_WORDS]
        if len(words) < _FEWEST_WORDS:
            words = [number for token, number in by_id if _LETTER.fullmatch(token)]
        return tuple(words or [number for _, number in by_id][:_MOST_WORDS])


class _TimedDecoder(Decoder):
    def __init__(self, tokenizer: Tokenizer, text: TimedText, nominal_ns: int, who: str) -> None:
        super().__init__(tokenizer)
        self._text, self._nominal_ns, self._who = text, nominal_ns, who

    def push(self, ids: Sequence[int], *, last: bool = False) -> str:
        """As Decoder's, in ``detokenize_ns``."""
        with self._text.timed("detokenize", self._nominal_ns, self._who):
            return super().push(ids, last=last)


class TimedHandler:
    """Around the handling of each request: its truth, what it takes to write a chunk, and faults.

    Pass ``around`` to servers.api.app.serve.
    """

    def __init__(self, durations: Durations, busy: bool, faults: Faults, truth: TruthFile | None) -> None:
        self._durations, self._busy, self._faults, self._truth = durations, busy, faults, truth
        self._count = 0

    def around(self, handle: Handler) -> Handler:
        """``handle`` with truth, egress times and faults."""

        async def handled(request: web.BaseRequest) -> web.StreamResponse:
            if request.method != "POST":
                return await handle(request)
            self._count += 1
            who = request.headers.get("x-request-id", f"request {self._count}")
            _client_id.set(who)
            if self._truth:
                self._truth.note("received", of=who, at_ns=now())
            if self._count == self._faults.die_at:
                if self._truth:
                    self._truth.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            if self._faults.refuses(self._count):
                if isinstance(request, StampedRequest):
                    request.finished()  # else the connection's next request would count from this one's arrival
                body = ApiError(500, "told to fail").encoded()
                return web.Response(status=500, body=body, headers={"Content-Type": "application/json"})
            for name in ("write", "write_eof"):
                setattr(request.writer, name, self._timed(getattr(request.writer, name), who))
            response = await handle(request)
            if self._truth:
                self._truth.note("answered", of=who, status=response.status, at_ns=now())
            return response

        return handled

    def _timed(self, write: Any, who: str) -> Any:
        """Each write of a body then takes ``egress_ns`` before the socket gets it."""

        async def timed(chunk: bytes = b"", *args: Any, **kwargs: Any) -> None:
            if not chunk:
                await write(chunk, *args, **kwargs)
                return
            start = now()
            meant = self._durations.draw("egress", self._durations.times.egress_ns)
            pause_until(start + meant, busy=self._busy)
            handed = now()
            await write(chunk, *args, **kwargs)
            if self._truth:
                self._truth.write(_LINES)
                self._truth.note(
                    "chunk", of=who, bytes=len(chunk), start_ns=start, handed_ns=handed, end_ns=now(), meant_ns=meant
                )

        return timed


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
