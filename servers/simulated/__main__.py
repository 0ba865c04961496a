"""``python -m gapmeter.servers.simulated``: the simulated server (docs/simulated.md)."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from gapmeter.servers.api.app import serve
from gapmeter.servers.api.options import ApiOptions
from gapmeter.servers.simulated.engine import SimulatedEngine
from gapmeter.servers.simulated.front import Front
from gapmeter.servers.simulated.options import ServerOptions, parse_options
from gapmeter.servers.simulated.pause import Pause, exact_timers
from gapmeter.servers.simulated.text import TimedText, byte_model
from gapmeter.servers.simulated.times import Durations
from gapmeter.servers.simulated.truth import open_truth


def main(words: list[str]) -> int:
    """Serve until told to stop; the exit code."""
    options = parse_options(words)
    exact_timers()
    with contextlib.ExitStack() as stack:
        folder = options.model or Path(stack.enter_context(byte_model()))
        return _serve(options, folder)


def _serve(options: ServerOptions, folder: Path) -> int:
    truth = open_truth("api")
    durations, pause = Durations(options.times), Pause(busy=options.busy)
    try:
        text = TimedText(folder, durations, pause, truth)
    except Exception as error:  # noqa: BLE001 - the tokenizers library raises bare Exception
        print(f"cannot start the simulated server: {folder}: {error}", file=sys.stderr)
        return 2
    engine = SimulatedEngine(
        options.limits, options.times, text.words(), faults=options.faults, busy=options.busy,
        max_queue=options.max_queue, truth=truth,
    )  # fmt: skip
    front = Front(durations, pause, options.faults, truth)
    api = ApiOptions(
        options.host, options.port, options.served_name, options.max_model_len, "simulated",
        {"model": str(folder), "cores": sorted(os.sched_getaffinity(0))},
    )  # fmt: skip
    try:
        return serve(engine, text, api, front.around)
    finally:
        if truth:
            truth.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
