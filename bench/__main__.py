"""``python -m bench [PART ...]``: measure, print the tables, and keep them under docs/results.

Parts: client, residual, agreement, attribution, probe_pairs, compare; and, only when they are named, peers, streams,
soak, sampler, coverage, gate, capacity, generators, growth, probe_parts, first_runs. A part's figures are in
``docs/results/PART.json`` with the machine that they come from; ``docs/results/figures.md`` holds the tables of all
parts that have been measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench import (
    agreement,
    attribution,
    capacity,
    client,
    compare,
    coverage,
    first_runs,
    generators,
    growth,
    peers,
    probe_pairs,
    probe_parts,
    residual,
    sampler,
    soak,
    streams,
)
from bench.engine import ENGINES
from gapmeter.loadgen.worker import GENERATORS
from gapmeter.machine.instrument import NotMeasured

# Most have a make target.
ON_REQUEST = (
    "peers",
    "streams",
    "soak",
    "sampler",
    "coverage",
    "gate",
    "capacity",
    "generators",
    "growth",
    "probe_parts",
    "first_runs",
)
RESULTS = Path("docs/results")
_RUNS = Path("runs")


def main(arguments: Sequence[str]) -> int:
    """Measure the parts named, all by default. Raises UserError or ServerFailed when an engine cannot be had."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: without {', '.join(ON_REQUEST)})"
    )
    parser.add_argument("--engine", choices=ENGINES, help="only this engine (default: both)")
    parser.add_argument("--seconds", type=float, default=120.0, help="of load for the pairs with and without the probe")
    parser.add_argument(
        "--rounds", type=int, default=3, help="of the comparison with other load testers; first runs of each engine"
    )
    parser.add_argument("--add", action="store_true", help="after what is kept already")
    parser.add_argument("--soak", type=soak.seconds, default=3600.0, metavar="60m", help="how long")
    parser.add_argument("--generator", choices=GENERATORS, default="asyncio", help="of streams and soak")
    parser.add_argument("--repeats", type=int, default=200, help="of the capacity search in virtual time, a cell")
    parser.add_argument("--minutes", type=float, default=60.0, help="for those repeats, at most")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the figures go")
    options = parser.parse_args(arguments)
    unknown = set(options.parts) - PARTS.keys()
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    options.results.mkdir(parents=True, exist_ok=True)
    for part in options.parts or [part for part in PARTS if part not in ON_REQUEST]:
        folder = _RUNS / f"bench-{part}-{time.strftime('%Y%m%d-%H%M%S')}"
        folder.mkdir(parents=True)
        load = os.getloadavg()[0]
        try:
            figures = PARTS[part](options, folder)
        except NotMeasured as error:
            print(f"bench {part}: {error}", file=sys.stderr)
            return 1
        kept = {"machine": machine(), "load_average_before": load, "figures": figures}
        name = part if options.generator == "asyncio" else f"{part}-{options.generator}"
        (options.results / f"{name}.json").write_text(json.dumps(kept, indent=1, default=str) + "\n")
        (options.results / "figures.md").write_text(page(options.results))
        print("\n".join(TABLES[part](figures)), flush=True)
    return 0


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
    for part, table in TABLES.items():
        for name in (part, *(f"{part}-{other}" for other in GENERATORS)):
            file = results / f"{name}.json"
            if file.exists():
                told = json.loads(file.read_text())
                where = ", ".join(f"{key} {value}" for key, value in told["machine"].items())
                sections.append(f"## {name}\n\n" + "\n".join(table(told["figures"])) + f"\n\n{where}\n")
    return "\n".join(sections)


def _engines(options: argparse.Namespace) -> tuple[str, ...]:
    return (options.engine,) if options.engine else ENGINES


def _client(_: argparse.Namespace, folder: Path) -> Any:
    mine = os.sched_getaffinity(0)
    client.main(["--json", str(folder / "client.json")])
    os.sched_setaffinity(0, mine)  # it moves to the null server's core
    return json.loads((folder / "client.json").read_text())["figures"]


def _residual(options: argparse.Namespace, folder: Path) -> Any:
    return [residual.measure(engine, folder / engine) for engine in _engines(options)]


def _agreement(_: argparse.Namespace, folder: Path) -> Any:
    return agreement.measure(folder)


def _attribution(options: argparse.Namespace, folder: Path) -> Any:
    return [attribution.measure(engine, folder / engine) for engine in _engines(options)]


def _pairs(options: argparse.Namespace, folder: Path) -> Any:
    return [
        probe_pairs.measure(engine, folder / f"{engine}-{'c' if native else 'python'}", options.seconds, native=native)
        for engine in _engines(options)
        for native in (True, False)
    ]


def _parts(options: argparse.Namespace, folder: Path) -> Any:
    return [probe_parts.measure(engine, folder / engine, options.seconds) for engine in _engines(options)]


def _peers(options: argparse.Namespace, folder: Path) -> Any:
    return peers.measure(folder, options.rounds, _earlier(options, "peers"))


def _earlier(options: argparse.Namespace, part: str) -> Any:
    kept = options.results / f"{part}.json"
    return json.loads(kept.read_text())["figures"] if options.add and kept.exists() else None


def _streams(options: argparse.Namespace, _: Path) -> Any:
    return streams.measure(generator=options.generator)


def _sampler(_: argparse.Namespace, folder: Path) -> Any:
    return sampler.measure(folder)


def _soak(options: argparse.Namespace, _: Path) -> Any:
    return soak.measure(options.soak, options.generator)


def _coverage(_: argparse.Namespace, __: Path) -> Any:
    return coverage.measure()


def _compare(_: argparse.Namespace, __: Path) -> Any:
    return compare.measure()


def _gate(_: argparse.Namespace, __: Path) -> Any:
    return compare.measure_gate()


def _capacity(options: argparse.Namespace, _: Path) -> Any:
    return capacity.measure(options.repeats, options.minutes, _earlier(options, "capacity"))


def _generators(_: argparse.Namespace, __: Path) -> Any:
    return generators.measure()


def _client_table(figures: dict[str, list[float]]) -> list[str]:
    return ["```", *client.table(figures).splitlines(), "```"]


def _first_runs(options: argparse.Namespace, folder: Path) -> Any:
    return [first_runs.measure(engine, folder / engine, options.rounds) for engine in _engines(options)]


def _growth(_: argparse.Namespace, folder: Path) -> Any:
    return growth.measure(folder)


PARTS: dict[str, Callable[[argparse.Namespace, Path], Any]] = {
    "client": _client, "residual": _residual, "agreement": _agreement, "attribution": _attribution,
    "probe_pairs": _pairs, "peers": _peers,
    "streams": _streams, "soak": _soak, "sampler": _sampler, "coverage": _coverage, "compare": _compare,
    "gate": _gate, "capacity": _capacity, "generators": _generators, "growth": _growth,
    "probe_parts": _parts, "first_runs": _first_runs,
}  # fmt: skip
TABLES: dict[str, Callable[[Any], list[str]]] = {
    "client": _client_table, "residual": residual.table, "agreement": agreement.table,
    "attribution": attribution.table,
    "probe_pairs": probe_pairs.table, "probe_parts": probe_parts.table, "peers": peers.table, "streams": streams.table,
    "soak": soak.table,
    "sampler": sampler.table,
    "coverage": coverage.table, "compare": compare.table,
    "gate": compare.gate_table,
    "capacity": capacity.table, "generators": generators.table, "growth": growth.table,
    "first_runs": first_runs.table,
}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
