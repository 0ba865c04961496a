"""``python -m bench [PART ...]``: measure, print the tables, and keep them under docs/results.

Without a name the usual parts are measured; the others take long, or have a make target of their own. A part's figures
are in ``docs/results/PART.json`` with the machine that they come from; ``docs/results/figures.md`` holds the tables of
all parts that have been measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import (
    agreement,
    attribution,
    capacity,
    client,
    compare,
    coverage,
    first_run,
    growth,
    known_queue,
    peers,
    probe_cost,
    residual,
    streams,
)
from bench.engine import ENGINES
from gapmeter.loadgen.worker import GENERATORS
from gapmeter.machine.instrument import NotMeasured

RESULTS = Path("docs/results")
_RUNS = Path("runs")


def main(arguments: Sequence[str]) -> int:
    """Measure the parts named, all by default. Raises UserError or ServerFailed when an engine cannot be had."""
    usual = [name for name, part in PARTS.items() if part.usual]
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: {', '.join(usual)})")
    parser.add_argument("--engine", choices=ENGINES, help="only this engine (default: both)")
    parser.add_argument("--seconds", type=float, default=120.0, help="of bursts with and without the probe")
    parser.add_argument("--rounds", type=int, default=3, help="with other load testers; of first runs")
    parser.add_argument("--add", action="store_true", help="after what is kept already")
    parser.add_argument("--busy", action="store_true", help="first runs beside a program that works half of the time")
    parser.add_argument("--soak", type=streams.seconds, default=3600.0, metavar="60m", help="how long")
    parser.add_argument("--generator", choices=GENERATORS, default="asyncio", help="of streams and soak")
    parser.add_argument("--repeats", type=int, default=200, help="of the capacity search in virtual time, a cell")
    parser.add_argument("--minutes", type=float, default=60.0, help="for those repeats, at most")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the figures go")
    options = parser.parse_args(arguments)
    unknown = set(options.parts) - PARTS.keys()
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    options.results.mkdir(parents=True, exist_ok=True)
    failed = False
    for part in options.parts or usual:
        folder = _RUNS / f"bench-{part}-{time.strftime('%Y%m%d-%H%M%S')}"
        folder.mkdir(parents=True)
        load = os.getloadavg()[0]
        try:
            figures = PARTS[part].measure(options, folder)
        except NotMeasured as error:
            print(f"bench {part}: {error}", file=sys.stderr)
            return 1
        kept = {"machine": machine(), "load_average_before": load, "figures": figures}
        name = part if options.generator == "asyncio" else f"{part}-{options.generator}"
        name = f"{name}-{options.engine}" if part == "soak" and options.engine else name
        (options.results / f"{name}.json").write_text(json.dumps(kept, indent=1, default=str) + "\n")
        (options.results / "figures.md").write_text(page(options.results))
        print("\n".join(PARTS[part].table(figures)), flush=True)
        failed = failed or bool(PARTS[part].failures(figures))
    return int(failed)


def machine() -> dict[str, Any]:
    """What the figures depend on, in words that name nobody's computer."""
    flags = Path("/proc/cpuinfo").read_text()
    return {
        "cpu": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "avx512": "avx512f" in flags,
        "amx": "amx_tile" in flags,
        "linux": ".".join(platform.release().split(".")[:2]),
        "python": platform.python_version(),
    }


def page(results: Path) -> str:
    """All tables that have been measured, as Markdown."""
    sections = ["# Figures\n\nWritten by `make bench`; README.md beside this file says how to read them.\n"]
    for kind, part in PARTS.items():
        for name in (kind, *(f"{kind}-{other}" for other in (*GENERATORS, *ENGINES))):
            file = results / f"{name}.json"
            if file.exists():
                kept = json.loads(file.read_text())
                where = ", ".join(f"{key} {value}" for key, value in kept["machine"].items())
                sections.append(f"## {name}\n\n" + "\n".join(part.table(kept["figures"])) + f"\n\n{where}\n")
    return "\n".join(sections)


def _engines(options: argparse.Namespace) -> tuple[str, ...]:
    return (options.engine,) if options.engine else ENGINES


def _earlier(options: argparse.Namespace, part: str) -> Any:
    kept = options.results / f"{part}.json"
    return json.loads(kept.read_text())["figures"] if options.add and kept.exists() else None


def _probe_cost(options: argparse.Namespace, folder: Path) -> Any:
    return [
        probe_cost.measure(engine, folder / f"{engine}-{'c' if native else 'python'}", options.seconds, native=native)
        for engine in _engines(options)
        for native in (True, False)
    ]


@dataclass(frozen=True, slots=True)
class Part:
    """How its figures come about, from the options and a folder for what it writes, and how they are printed."""

    measure: Callable[[argparse.Namespace, Path], Any]
    table: Callable[[Any], list[str]]
    usual: bool = False  # measured when no part is named
    failures: Callable[[Any], list[str]] = lambda _: []  # what makes the command fail


# Most of those that have to be named have a make target.
PARTS = {
    "client": Part(lambda *_: client.measure(), client.table, usual=True),
    "residual": Part(
        lambda options, folder: [residual.measure(name, folder / name) for name in _engines(options)],
        residual.table,
        usual=True,
    ),
    "agreement": Part(lambda _, folder: agreement.measure(folder), agreement.table, usual=True),
    "attribution": Part(
        lambda options, folder: [attribution.measure(name, folder / name) for name in _engines(options)],
        attribution.table,
        usual=True,
    ),
    "probe_cost": Part(_probe_cost, probe_cost.table, usual=True),
    "peers": Part(
        lambda options, folder: peers.measure(folder, options.rounds, _earlier(options, "peers")), peers.table
    ),
    "streams": Part(lambda options, _: streams.measure(generator=options.generator), streams.table),
    "soak": Part(
        lambda options, _: streams.soak(options.soak, options.generator, options.engine),
        streams.soak_table,
        failures=streams.soak_failures,
    ),
    "coverage": Part(lambda *_: coverage.measure(), coverage.table),
    "compare": Part(lambda *_: compare.measure(), compare.table, usual=True),
    "gate": Part(lambda *_: compare.measure_gate(), compare.gate_table),
    "capacity": Part(
        lambda options, _: capacity.measure(options.repeats, options.minutes, _earlier(options, "capacity")),
        capacity.table,
    ),
    "known_queue": Part(lambda options, folder: known_queue.measure(folder, options.rounds), known_queue.table),
    "growth": Part(lambda _, folder: growth.measure(folder), growth.table),
    "first_run": Part(
        lambda options, folder: first_run.measure(
            _engines(options), options.rounds, folder, _earlier(options, "first_run"), busy=options.busy
        ),
        first_run.table,
    ),
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
