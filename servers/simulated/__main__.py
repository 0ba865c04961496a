"""``python -m gapmeter.servers.simulated``: the simulated server's API process (docs/simulated.md)."""

from __future__ import annotations

import contextlib
import os
import sys
import zlib
from array import array
from collections.abc import Sequence
from pathlib import Path
from time import monotonic_ns

from gapmeter.servers.api.app import ApiOptions, serve
from gapmeter.servers.engine_client import EngineClient, GenerationRequest, Message
from gapmeter.servers.simulated.engine import EngineSettings
from gapmeter.servers.simulated.options import parse_options
from gapmeter.servers.simulated.realtime import exact_timers
from gapmeter.servers.simulated.stage_times import Durations
from gapmeter.servers.simulated.timed_api import TimedHandler, TimedText, byte_model
from gapmeter.servers.simulated.truth import open_truth


def main(words: list[str]) -> int:
    """Serve until told to stop; the exit code."""
    options = parse_options(words)
    exact_timers()
    durations = Durations(options.times)
    limits = options.limits
    with contextlib.ExitStack() as stack:
        folder = options.model or Path(stack.enter_context(byte_model()))
        truth = open_truth("api")
        if truth:
            stack.callback(truth.close)
        try:
            text = TimedText(folder, durations, options.busy, truth)
        except Exception as error:  # noqa: BLE001 - the tokenizers library raises bare Exception
            print(f"cannot start the simulated server: {folder}: {error}", file=sys.stderr)
            return 2

        def encode(request: GenerationRequest) -> Message:
            """What the engine needs of a request, which is not its tokens."""
            if truth:
                truth.note("request", of=request.client_id, engine_id=request.engine_id, at_ns=monotonic_ns())
            ids = request.prompt_ids
            hashes = prefix_hashes(ids, limits.block_tokens) if limits.prefix_caching else ()
            first_word = zlib.crc32(array("q", ids).tobytes()) + (request.seed or 0)
            return len(ids), request.max_tokens, hashes, first_word

        settings = EngineSettings(limits, options.times, options.faults, options.busy, text.words())
        engine = EngineClient(
            "gapmeter.servers.simulated.engine", settings.to_json(), limits.max_sequences + options.max_queue, encode
        )
        handler = TimedHandler(durations, options.busy, options.faults, truth)
        api = ApiOptions(
            options.host,
            options.port,
            options.served_name,
            options.max_model_len,
            "simulated",
            {"model": str(folder), "cores": sorted(os.sched_getaffinity(0))},
        )
        return serve(engine, text, api, handler.around)


def prefix_hashes(ids: Sequence[int], block_tokens: int) -> tuple[int, ...]:
    """A name for each full block's content; equal names mean equal tokens from the first on."""
    names: list[int] = []
    name = 0
    for start in range(0, len(ids) - block_tokens + 1, block_tokens):
        name = hash((name, *ids[start : start + block_tokens]))
        names.append(name)
    return tuple(names)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
