"""gapmeter and other load testers side by side against the null server's log: ``make bench-peers``.

Each runs as its own documentation says, in its own environment (``make bench-peers`` installs them), all its processes
on one core, the null server on another; in turn, several rounds. Two loads: *open*, Poisson arrivals at 20 requests a
second, 64 tokens 10 ms apart, the first after 50 ms; and *intake*, 64 streams whose tokens are due every 0.1 ms.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.peer_tools import TOOLS, Load, Reported, Tool
from gapmeter.machine.instrument import Cores, Timing, departures_by_ref, null_server
from gapmeter.records import read_records
from gapmeter.servers.models import resolve_model

OPEN = Load("open", rate=20.0, requests=400, tokens=64, streams=14)
INTAKE = Load("intake", rate=0.0, requests=128, tokens=1000, streams=64)
TIMINGS = {"open": Timing(), "intake": Timing(first_ms=5, gap_ms=0.1)}
_MOST_S = 180
_LEGEND = (
    "TTFT and ITL: the tool's own figure minus the null server's log, ms. Requests/s: as the server saw them, 20"
    " asked; dispersion: variance over mean of their counts, 1 asked. CPU: of the whole command at 20 requests/s, its"
    " start and its report included. Medians of {} rounds (lowest .. highest)."
)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended: its exit code, the CPU time of all its processes, and the last line that it said."""

    code: int
    cpu_s: float
    said: str


def measure(folder: Path, rounds: int = 3, earlier: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Every tool in turn, so many times, the seed one higher each time; ``folder`` gets what they write.

    ``earlier``: what it returned before; the new rounds come after its rounds.

    Its ``rounds`` hold one mapping a round, tool → figures or the reason why there are none.
    """
    placed = Cores.apart()
    tokenizer = resolve_model("builtin:tiny")
    found: dict[str, Any] = {
        "versions": {tool.name: tool.version() for tool in TOOLS},
        "commands": {tool.name: {load.name: _shown(tool, load) for load in (OPEN, INTAKE)} for tool in TOOLS},
        "notes": {tool.name: tool.note for tool in TOOLS if tool.note},
        "rounds": list(earlier["rounds"]) if earlier else [],
    }
    for number in range(len(found["rounds"]), len(found["rounds"]) + rounds):
        turn = TOOLS if number % 2 == 0 else TOOLS[::-1]
        own = folder / f"round-{number}"
        found["rounds"].append({tool.name: _both(tool, 1 + number, placed, tokenizer, own) for tool in turn})
    return found


def _both(tool: Tool, seed: int, cores: Cores, tokenizer: Path, folder: Path) -> dict[str, Any]:
    if not tool.python.exists():
        return {"missing": "not installed here"}
    try:
        opened = _one(tool, replace(OPEN, seed=seed), cores, tokenizer, folder)
        intake = _one(tool, replace(INTAKE, seed=seed), cores, tokenizer, folder)
        return opened | {"tokens_per_s": intake["tokens_per_s"]}
    except (RuntimeError, OSError, KeyError, ValueError) as error:
        return {"missing": f"{type(error).__name__}: {error}"[:300]}


def _one(tool: Tool, load: Load, cores: Cores, tokenizer: Path, folder: Path) -> dict[str, float | None]:
    """One load by one tool: its own percentiles beside the log's. Raises RuntimeError when it fails."""
    out = folder / f"{tool.name}-{load.name}"
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="gapmeter-peers-") as log:
        with null_server(cores, TIMINGS[load.name], log=Path(log), most_tokens=load.most_tokens) as port:
            words = tool.command(f"http://127.0.0.1:{port}", load, tokenizer, out)
            ended = _run(words, tool.environment, cores.client[0], out)
        logged = departures_by_ref(read_records(next(Path(log).glob("null-*.gap"))))
    try:
        reported = tool.read(out)
    except (OSError, KeyError, ValueError, IndexError, StopIteration) as error:
        raise RuntimeError(f"exit code {ended.code}: {ended.said}") from error
    return _figures(reported, _counted(list(logged.values()), len(reported.ttft_ms))) | {"cpu_s": ended.cpu_s}


def _counted(logged: list[tuple[int, Any]], answers: int) -> list[tuple[int, Any]]:
    """The last whole answers: some tools ask once before they begin, some cut answers off as they end."""
    most = max((len(left) for _, left in logged), default=0)
    return [one for one in logged if len(one[1]) == most][-answers:]


def _figures(reported: Reported, sent: list[tuple[int, Any]]) -> dict[str, float | None]:
    """What the tool says minus what the log says; the rate and dispersion of arrivals as the server saw them."""
    ttft = np.array([left[0] - read for read, left in sent]) / 1e6
    gaps = [np.diff(left) / 1e6 for _, left in sent]
    itl = np.array([own.mean() for own in gaps]) if reported.itl_is_mean else np.concatenate(gaps)
    at = np.sort([read for read, _ in sent])
    figures: dict[str, float | None] = {
        "rate": (len(at) - 1) / float(at[-1] - at[0]) * 1e9,
        "dispersion": _dispersion(at),
        "tokens_per_s": sum(len(left) for _, left in sent) / reported.span_s,
    }
    for p in (50, 99):
        figures[f"ttft_p{p}_ms"] = float(np.percentile(reported.ttft_ms, p) - np.percentile(ttft, p))
        figures[f"itl_p{p}_ms"] = float(np.percentile(reported.itl_ms, p) - np.percentile(itl, p))
    return figures


def _dispersion(at_ns: Any) -> float:
    """Variance over mean of arrivals in equal windows of five on average: 1 for a Poisson process."""
    counts, _ = np.histogram(at_ns, bins=max(2, len(at_ns) // 5))
    return float(counts.var(ddof=1) / counts.mean())


def _run(words: Sequence[str], environment: Mapping[str, str], core: int, out: Path) -> Ended:
    """The command on one core, its output kept in ``out``."""
    with (out / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            ["taskset", "-c", str(core), *words], stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            env={**os.environ, **environment}, process_group=0,
        )  # fmt: skip
        until = time.monotonic() + _MOST_S
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() > until:
                os.killpg(process.pid, 9)
            time.sleep(0.1)
    process.returncode = os.waitstatus_to_exitcode(status)
    lines = [line for line in (out / "output.txt").read_text(errors="replace").splitlines() if line.strip()]
    return Ended(process.returncode, usage.ru_utime + usage.ru_stime, lines[-1][:200] if lines else "")


def _shown(tool: Tool, load: Load) -> str:
    words = tool.command("http://127.0.0.1:PORT", load, Path("TOKENIZER"), Path("OUT"))
    named = [str(Path(word).relative_to(Path.cwd())) if word.startswith(str(Path.cwd())) else word for word in words]
    return shlex.join([*(f"{key}={value}" for key, value in tool.environment.items()), *named])


def table(found: Mapping[str, Any]) -> list[str]:
    """A row a tool: medians of the rounds, with lowest and highest; below, the commands."""
    lines = [
        _LEGEND.format(len(found["rounds"])), "",
        "| tool | TTFT p50 | TTFT p99 | ITL p50 | ITL p99 | requests/s | dispersion | tokens/s, a core | CPU s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, version in found["versions"].items():
        rounds = [turn[name] for turn in found["rounds"] if name in turn]
        good = [turn for turn in rounds if "missing" not in turn]
        if not good:
            why = rounds[0]["missing"] if rounds else "not run"
            lines.append(f"| {name} {version} | not measured: {why} |" + " |" * 7)
            continue
        keys = ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "rate", "dispersion", "tokens_per_s", "cpu_s")
        mark = "¹" if name in found["notes"] else ""
        cells = [_spread([turn[key] for turn in good]) for key in keys]
        lines.append(f"| {name} {version}{mark} | " + " | ".join(cells) + " |")
    lines += ["", *(f"¹ {name}: {note}" for name, note in found["notes"].items()), ""]
    lines += ["```", *(text for own in found["commands"].values() for text in own.values()), "```"]
    return lines


def _spread(values: list[float]) -> str:
    middle, low, high = (_number(float(f(values))) for f in (np.median, min, max))
    return middle if low == high else f"{middle} ({low} .. {high})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
