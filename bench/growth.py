"""How a report's time and memory grow with the run: one run's records, repeated until they hold 10^3 to 10^7 tokens.

On the last of these folders also what other commands take; ``gapmeter runs`` on a thousand folders with its results.

The null server is loaded once, the simulated engine once, which leaves the records of a probe too and what the kernel
told of its cores. Their records are written again, later each time, under ids of their own. So the folders differ in
nothing but their length, and what grows with it is the analysis.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from gapmeter.analysis.ledger.switches import read_switches
from gapmeter.analysis.results import Manifest, RunResult
from gapmeter.machine.instrument import Cores, NotMeasured, Timing, null_server
from gapmeter.options import Options
from gapmeter.records import Outcome, RecordFile, RecordWriter, RunFolder, Span, read_records
from gapmeter.records.compression import SUFFIX, with_compressed
from gapmeter.records.request import FINISHED, STAMPS, RequestRecord, encode
from gapmeter.study.study import run_scenario

SIZES = (10**3, 10**4, 10**5, 10**6, 10**7)  # tokens
PROBED = (64 * 10**3, 64 * 10**4, 64 * 10**5)
_TOKENS, _REQUESTS, _PER_S = 64, 2000, 200
_APART_NS = 1_000_000_000
_ASKED = (f"load.rate={_PER_S}", f"load.requests={_REQUESTS}", f"workload.output_tokens={_TOKENS}",
          'slo=["ttft p99 <= 1 s", "itl p99 <= 100 ms"]')  # fmt: skip

_ASKED_PROBED = (
    "server.engine=simulated", "server.max_batch=64", f"workload.output_tokens={_TOKENS}", "load.rate=50",
    "load.requests=1000", "load.warmup=0s", 'slo=["ttft p99 <= 1 s", "itl p99 <= 100 ms"]',
)  # fmt: skip
_SPANS = 1000  # written at once
_LISTED = 1000  # folders
_TIMED = """
import resource, subprocess, sys, time
begun = time.monotonic()
code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(time.monotonic() - begun, used.ru_utime + used.ru_stime, used.ru_maxrss, code)
"""


def measure(folder: Path) -> dict[str, Any]:
    """Report a folder of each size, in a process of its own. Raises NotMeasured when a command fails."""
    with null_server(Cores((), ()), Timing(first_ms=10, gap_ms=5), log=None, most_tokens=_TOKENS) as port:
        at = f"server.url=http://127.0.0.1:{port}"
        source = RunFolder(run_scenario("bench/null.yaml", [*_ASKED, at], Options(folder, quiet=True)).folder)
    rows, kept = [_row(source, folder, tokens) for tokens in SIZES], [_kept(source)]
    source = RunFolder(run_scenario("smoke", _ASKED_PROBED, Options(folder, quiet=True)).folder)
    rows += [_row(source, folder, tokens) for tokens in PROBED]
    kept.append(_kept(source))
    powers = {"exponent": _exponent(rows[: len(SIZES)]), "probed": _exponent(rows[len(SIZES) :])}
    commands = commands_on(_target(folder, rows[-1]), folder)
    return {"rows": rows, **powers, "folder_bytes": kept, "commands": commands}


def _kept(source: RunFolder) -> float:
    """Bytes of a run's whole folder, a token."""
    return _bytes(source.path) / float(pd.read_parquet(source.path / "requests.parquet")["output_tokens"].sum())


def _row(source: RunFolder, folder: Path, tokens: int) -> dict[str, Any]:
    row: dict[str, Any] = {"tokens": tokens, "probed": bool(source.record_files(source.probe))}
    target = RunFolder.at(_target(folder, row))
    repeat(source, target, -(-tokens // _TOKENS))
    records = sum(map(_bytes, (target.requests, target.probe, target.telemetry)))
    took, why = timed("report", str(target.path))
    if not target.report.exists():
        raise NotMeasured(f"{target.path} was not reported: {why}")
    return {**row, **took, "record_bytes": records / tokens,
            "table_bytes": sum(map(_bytes, target.path.glob("*.parquet"))) / tokens,
            "page_mb": _bytes(target.report) / 1e6}  # fmt: skip


def _target(folder: Path, row: Mapping[str, Any]) -> Path:
    return folder / f"{row['tokens']}-tokens{'-probed' * row['probed']}"


def commands_on(reported: Path, folder: Path) -> list[dict[str, Any]]:
    """What other commands take on a run that has been reported; ``folder`` is for what they need beside it.

    It is compared with a copy of itself, and listed a thousand times. Raises NotMeasured.
    """
    copied, listed = folder / "copied", folder / "listed"
    copied.mkdir()
    for path in (path for path in reported.iterdir() if path.is_file()):
        shutil.copy(path, copied)
    for number in range(_LISTED):
        (one := listed / f"{number:04}").mkdir(parents=True)
        for name in (Manifest.FILE, RunResult.FILE):
            os.link(reported / name, one / name)
    run, tokens = str(reported), int(pd.read_parquet(reported / "requests.parquet")["output_tokens"].sum())
    commands = {
        "verify": ("verify", run),
        "compare": ("compare", run, str(copied), "--force", "--quiet", "--runs", str(folder)),
        "explain": ("explain", run, "--group", "rank_percent > 50"),
        "runs": ("runs", "--runs", str(listed)),
    }
    rows = []
    for name, words in commands.items():
        took, why = timed(*words)
        if why:
            raise NotMeasured(f"gapmeter {' '.join(words)}: {why}")
        rows.append({"command": name, "of": f"{_LISTED:,} folders" if name == "runs" else f"{tokens:,} tokens", **took})
    return rows


def _exponent(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Of the last two."""
    less, most = rows[-2:]
    times = math.log(most["tokens"] / less["tokens"])
    return {what: math.log(most[what] / less[what]) / times for what in ("cpu_s", "peak_gb")}


def repeat(source: RunFolder, target: RunFolder, requests: int) -> None:
    """Write a run's records into another folder again and again, each time later, until there are so many requests.

    A generator's, a probe's without a device, and the kernel's of who ran. Raises OSError, NotRecords.
    """
    (file,) = (read_records(path) for path in source.record_files(source.requests))
    records = sorted(file.requests(), key=lambda record: record.index)
    length_ns = max(r.end_ns for r in records) - min(r.due_ns for r in records) + _APART_NS
    about = ("role", "worker", "cores", "nice")
    writer = RecordWriter(target.requests / "worker-0.gap", {name: file.process[name] for name in about})
    for number in range(requests):
        again, index = divmod(number, len(records))
        if index == 0:
            for span in file.spans.tolist():
                _, _, code, ref, n, *stamps = span
                queued_ns, start_ns, end_ns = (at + again * length_ns for at in stamps)
                writer.span(code, ref, start_ns, end_ns, n, queued_ns)
        writer.blob(FINISHED, encode(_later(records[index], number, again * length_ns)))
    for note in file.notes[1:]:
        writer.json({name: value for name, value in note.items() if name != "at_ns"})
    writer.close()
    times = -(-requests // len(records))
    for path in source.record_files(source.probe):
        named = target.probe / path.name.removesuffix(SUFFIX)
        _repeat_probe(read_records(path), named, times, length_ns, len(records))
    for path in with_compressed(source.telemetry, "switches-*.bin"):
        _repeat_switches(path, target.telemetry / path.name.removesuffix(SUFFIX), times, length_ns)
        shutil.copy(source.telemetry / "switches.jsonl", target.telemetry)
    manifest = Manifest.read(source.path)
    manifest.model_copy(update={"files": None}).write(target.path)


def _later(record: RequestRecord, number: int, ns: int) -> RequestRecord:
    stamps: dict[str, Any] = {name: at + ns for name in STAMPS if (at := getattr(record, name))}
    name = _numbered_on(record.request_id, number - record.index)
    return replace(record, index=number, request_id=name, chunk_ns=record.chunk_ns + ns, **stamps)


def _repeat_probe(file: RecordFile, target: Path, times: int, length_ns: int, requests: int) -> None:
    """A server process's records; its requests and steps are numbered on."""
    writer = RecordWriter(target, {name: value for name, value in file.process.items() if name != "at_ns"})
    for note in file.notes[1:]:
        writer.json({name: value for name, value in note.items() if name != "at_ns"})
    last = int(file.steps["seq"].max()) if len(file.steps) else 0
    entries = np.split(file.entries, file.steps["entries"].cumsum()[:-1])
    emissions = np.split(file.emissions, file.emits["entries"].cumsum()[:-1])
    refs = np.zeros(max(file.engine_ids, default=0) + 1, np.uint32)
    for again in range(times):
        ns, seqs = again * length_ns, again * last
        for ref, engine_id in file.engine_ids.items():
            names = (_numbered_on(name, again * requests) for name in (engine_id, file.client_ids[ref]))
            refs[ref] = writer.request(*names)
        spans, of_request = file.spans.copy(), file.spans["code"] < Span.LOOP
        spans["ref"][of_request] = refs[spans["ref"][of_request]]
        spans["ref"][(spans["code"] >= Span.LOOP) & (spans["code"] < Span.LOOP_LAG)] += seqs
        for name in ("queued_ns", "start_ns", "end_ns"):
            spans[name] += ns
        for at in range(0, len(spans), _SPANS):
            writer.spans([number for span in spans[at : at + _SPANS].tolist() for number in span])
        for step, rows in zip(file.steps, entries, strict=False):
            own = [(refs[ref], *row) for ref, *row in rows.tolist()]
            about = {name: int(step[name]) for name in ("running", "waiting", "free_blocks", "padded")}
            writer.step(int(step["code"]), int(step["seq"]) + seqs, own, **about, schedule_ns=step["schedule_ns"] + ns)
        for emit, rows in zip(file.emits, emissions, strict=False):
            tokens = [(refs[ref], count) for ref, count in rows.tolist()]
            writer.emit(int(emit["seq"]) + seqs, int(emit["at_ns"]) + ns, tokens)
        for _, _, code, ref, prompt, output, cached, at_ns in file.counts.tolist():
            writer.counts(Outcome(code), int(refs[ref]), prompt, output, cached, at_ns + ns)
    writer.close()


def _repeat_switches(source: Path, target: Path, times: int, length_ns: int) -> None:
    """The kernel's records of who ran."""
    if not (parts := list(read_switches(source))):
        return
    switches = np.concatenate(parts)
    switches = switches[switches["size"] == switches.itemsize]  # without what the kernel lost
    with target.open("wb") as file:
        for _ in range(times):
            file.write(switches.tobytes())
            switches["time"] += length_ns


def _numbered_on(name: str, by: int) -> str:
    """A request's id, alone or in an engine's, with a larger number in it."""
    return re.sub(r"(?<=gap-........-)\d{6,}", lambda found: f"{int(found[0]) + by:06}", name)


def timed(*words: str) -> tuple[dict[str, float], str]:
    """What a command of gapmeter takes: seconds, CPU seconds, the most memory of its largest process; why it failed.

    By a small process between: what a process had in memory when it began another counts as that one's, too.
    """
    command = [sys.executable, "-c", _TIMED, sys.executable, "-m", "gapmeter", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    *figures, code = done.stdout.split()
    wall_s, cpu_s, peak_kib = map(float, figures)
    why = "" if code == "0" else f"exit code {code}: {done.stderr[-300:]}"
    return {"wall_s": wall_s, "cpu_s": cpu_s, "peak_gb": peak_kib * 1024 / 1e9}, why


def _bytes(path: Path) -> int:
    return sum(map(_bytes, path.iterdir())) if path.is_dir() else path.stat().st_size


def table(found: Mapping[str, Any]) -> list[str]:
    """A row a size; of the last two, the power of the tokens by which it grows."""
    lines = [
        "| tokens | probe | took, s | CPU, s | memory, GB | records, B a token | tables, B a token | report.html, MB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in found["rows"]:
        lines.append(
            f"| {row['tokens']:,} | {'yes' if row['probed'] else 'no'} | {row['wall_s']:.1f} | {row['cpu_s']:.1f} "
            f"| {row['peak_gb']:.2f} | {row['record_bytes']:.0f} | {row['table_bytes']:.0f} | {row['page_mb']:.2f} |"
        )
    lines += ["", f"`gapmeter report` of answers of {_TOKENS} tokens; records as they are written."]
    kept = [f"{each:.0f} B a token" for each in found["folder_bytes"]]
    lines.append(f"A run's whole folder takes {', with a probe '.join(kept)}, once its records are compressed.")
    for which, power in (("without a probe", found["exponent"]), ("with its records", found["probed"])):
        said = f"From the last size {which} but one to the last, CPU time grows as tokens to the power"
        lines.append(f"{said} {power['cpu_s']:.2f}, memory to the power {power['peak_gb']:.2f}.")
    return [*lines, "", *commands_table(found["commands"])]


def commands_table(commands: Sequence[Mapping[str, Any]]) -> list[str]:
    """A row a command."""
    return [
        "| command | of | took, s | CPU, s | memory, MB |", "| --- | --- | --- | --- | --- |",
        *(f"| {row['command']} | {row['of']} | {row['wall_s']:.1f} | {row['cpu_s']:.1f} | {1000 * row['peak_gb']:.0f} |"
          for row in commands),
    ]  # fmt: skip
