"""``python -m gapmeter.servers.simulated``: the simulated server's API process (docs/simulated.md).

A real tokenizer, chat template and HTTP, whose work takes a stated time.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import tempfile
import zlib
from array import array
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from time import monotonic_ns as now
from typing import Any

from aiohttp import web
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gapmeter.servers.api.app import ApiOptions, Handler, serve
from gapmeter.servers.api.openai import ApiError
from gapmeter.servers.api.text import Decoder, TextModel
from gapmeter.servers.engine_client import EngineClient, GenerationRequest, Message
from gapmeter.servers.simulated.realtime import exact_timers, pause_until
from gapmeter.servers.simulated.recorders import TruthFile, open_truth
from gapmeter.servers.simulated.settings import Durations, ServerOptions, parse_options

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


class _Clock:
    """Makes work last as long as it should, or as it must, if that is longer; the truth hears of each stage."""

    def __init__(self, options: ServerOptions, truth: TruthFile | None) -> None:
        self.times, self.truth = options.times, truth
        self._durations, self._busy = Durations(options.times), options.busy

    def wait(self, stage: str, nominal_ns: int, start_ns: int) -> int:
        """Return when the stage has lasted a duration drawn around ``nominal_ns``; that duration."""
        meant_ns = self._durations.draw(stage, nominal_ns)
        pause_until(start_ns + meant_ns, busy=self._busy)
        return meant_ns

    @contextlib.contextmanager
    def stage(self, name: str, nominal_ns: int, who: str) -> Iterator[None]:
        """The block ends once this stage of ``who`` has lasted as long as it should."""
        start = now()
        yield
        meant = self.wait(name, nominal_ns, start)
        if self.truth:
            self.truth.stage(name.upper(), who, start, now(), meant)


class TimedText(TextModel):
    """A model's text side that takes its time."""

    def __init__(self, folder: Path, clock: _Clock) -> None:
        super().__init__(folder)
        self._clock = clock

    def template(self, messages: Sequence[dict[str, Any]]) -> str:
        with self._clock.stage("template", self._clock.times.template_ns, _client_id.get()):
            return super().template(messages)

    def encode(self, text: str, *, templated: bool) -> list[int]:
        with self._clock.stage("tokenize", self._clock.times.tokenize_ns, _client_id.get()):
            return super().encode(text, templated=templated)

    def decoder(self) -> Decoder:
        return _TimedDecoder(self.tokenizer, self._clock)

    def words(self) -> tuple[int, ...]:
        """Ids of tokens that are each a plain word with a space before it; letters where there are too few."""
        by_id = sorted(self.tokenizer.get_vocab().items(), key=lambda item: item[1])
        words = [number for token, number in by_id if _WORD.fullmatch(token)][:_MOST_WORDS]
        if len(words) < _FEWEST_WORDS:
            words = [number for token, number in by_id if _LETTER.fullmatch(token)]
        return tuple(words or [number for _, number in by_id][:_MOST_WORDS])


class _TimedDecoder(Decoder):
    def __init__(self, tokenizer: Tokenizer, clock: _Clock) -> None:
        super().__init__(tokenizer)
        self._clock, self._who = clock, _client_id.get()

    def push(self, ids: Sequence[int], *, last: bool = False) -> str:
        with self._clock.stage("detokenize", self._clock.times.detokenize_ns, self._who):
            return super().push(ids, last=last)


class TimedHandler:
    """Around the handling of each request: its truth, what it takes to write a chunk, and faults."""

    def __init__(self, options: ServerOptions, clock: _Clock) -> None:
        self._faults, self._clock, self._truth = options.faults, clock, clock.truth
        self._count = 0

    def around(self, handle: Handler) -> Handler:
        """``handle`` with all of this, for servers.api.app.serve."""

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
            meant = self._clock.wait("egress", self._clock.times.egress_ns, start)
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
    (Path(folder.name) / "tokenizer_config.json").write_text(json.dumps({"chat_template": _BYTE_TEMPLATE}))
    return folder


def prefix_hashes(ids: Sequence[int], block_tokens: int) -> tuple[int, ...]:
    """A name for each full block's content; equal names mean equal tokens from the first on."""
    names: list[int] = []
    name = 0
    for start in range(0, len(ids) - block_tokens + 1, block_tokens):
        name = hash((name, *ids[start : start + block_tokens]))
        names.append(name)
    return tuple(names)


def main(flags: list[str]) -> int:
    """Serve until told to stop; the exit code."""
    options = parse_options(flags)
    exact_timers()
    limits = options.limits
    with contextlib.ExitStack() as stack:
        folder = options.model or Path(stack.enter_context(byte_model()))
        truth = open_truth("api")
        if truth:
            stack.callback(truth.close)
        clock = _Clock(options, truth)
        try:
            text = TimedText(folder, clock)
        except (OSError, ValueError) as error:
            print(f"cannot start the simulated server: {folder}: {error}", file=sys.stderr)
            return 2

        def encode(request: GenerationRequest) -> Message:
            """What the engine needs of a request, which is not its tokens."""
            if truth:
                truth.note("request", of=request.client_id, engine_id=request.engine_id, at_ns=now())
            ids = request.prompt_ids
            hashes = prefix_hashes(ids, limits.block_tokens) if limits.prefix_caching else ()
            first_word = zlib.crc32(array("q", ids).tobytes()) + (request.seed or 0)
            return len(ids), request.max_tokens, hashes, first_word

        settings = json.dumps([flags, text.words()])
        most = limits.max_sequences + options.max_queue
        engine = EngineClient("gapmeter.servers.simulated.engine", settings, most, encode)
        about = {"model": str(folder), "cores": sorted(os.sched_getaffinity(0))}
        api = ApiOptions(options.host, options.port, options.served_name, options.max_model_len, "simulated", about)
        return serve(engine, text, api, TimedHandler(options, clock).around)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
