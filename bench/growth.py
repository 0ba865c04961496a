"""How a report's time and memory grow with the run: one run's records, repeated until they hold 10^3 to 10^7 tokens.

The null server is loaded once; its records are written again, later each time, under ids of their own. So the folders
differ in nothing but their length, and what grows with it is the analysis.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gapmeter.analysis.results.manifest import Manifest
from gapmeter.machine.instrument import Cores, NotMeasured, Timing, null_server
from gapmeter.options import Options
from gapmeter.records import RecordWriter, RunFolder, read_records
from gapmeter.records.request import FINISHED, STAMPS, RequestRecord, encode
from gapmeter.study.study import run_scenario

SIZES = (10**3, 10**4, 10**5, 10**6, 10**7)  # tokens
_TOKENS, _REQUESTS, _PER_S = 64, 2000, 200
_APART_NS = 1_000_000_000
_ASKED = (f"load.rate={_PER_S}", f"load.requests={_REQUESTS}", f"workload.output_tokens={_TOKENS}",
          'slo=["ttft p99 <= 1 s", "itl p99 <= 100 ms"]')  # fmt: skip


def measure(folder: Path, sizes: tuple[int, ...] = SIZES) -> dict[str, Any]:
    """Report a folder of each size, in a process of its own. Raises NotMeasured when one cannot be reported."""
    with null_server(Cores((), ()), Timing(first_ms=10, gap_ms=5), log=None, most_tokens=_TOKENS) as port:
        at = f"server.url=http://127.0.0.1:{port}"
        source = RunFolder(run_scenario("bench/null.yaml", [*_ASKED, at], Options(folder, quiet=True)).folder)
    rows = []
    for tokens in sizes:
        target = RunFolder.at(folder / f"{tokens}-tokens")
        repeat(source, target, -(-tokens // _TOKENS))
        records = _bytes(target.requests)
        rows.append({"tokens": tokens, **_reported(target), "record_bytes": records / tokens,
                     "table_bytes": sum(map(_bytes, target.path.glob("*.parquet"))) / tokens,
                     "page_mb": _bytes(target.report) / 1e6})  # fmt: skip
    less, most = rows[-2:]
    times = math.log(most["tokens"] / less["tokens"])
    exponent = {what: math.log(most[what] / less[what]) / times for what in ("cpu_s", "peak_gb")}
    return {"rows": rows, "exponent": exponent}


def repeat(source: RunFolder, target: RunFolder, requests: int) -> None:
    """Write a run's records into another folder again and again, each time later, until there are so many requests.

    Only a generator's records: a run with a probe is not to be had this way. Raises OSError, NotRecords.
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
    manifest = Manifest.read(source.path)
    manifest.model_copy(update={"files": None}).write(target.path)


def _later(record: RequestRecord, number: int, ns: int) -> RequestRecord:
    stamps: dict[str, Any] = {name: at + ns for name in STAMPS if (at := getattr(record, name))}
    name = f"{record.request_id}-{number}"
    return replace(record, index=number, request_id=name, chunk_ns=record.chunk_ns + ns, **stamps)


def _reported(folder: RunFolder) -> dict[str, float]:
    """CPU seconds and the most memory of ``gapmeter report``, of all its processes the largest."""
    command = [sys.executable, "-m", "gapmeter", "report", str(folder.path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        said = process.stderr.read()
        _, _, used = os.wait4(process.pid, 0)
        process.returncode = 0  # it has been waited for
    if not folder.report.exists():
        raise NotMeasured(f"{folder.path} was not reported: {said[-300:].decode(errors='replace')}")
    return {"cpu_s": used.ru_utime + used.ru_stime, "peak_gb": used.ru_maxrss * 1024 / 1e9}


def _bytes(path: Path) -> int:
    return sum(map(_bytes, path.iterdir())) if path.is_dir() else path.stat().st_size


def table(found: Mapping[str, Any]) -> list[str]:
    """A row a size; of the last two, the power of the tokens by which it grows."""
    lines = [
        "| tokens | CPU, s | memory, GB | records, B a token | tables, B a token | report.html, MB |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in found["rows"]:
        lines.append(
            f"| {row['tokens']:,} | {row['cpu_s']:.1f} | {row['peak_gb']:.2f} | {row['record_bytes']:.0f} "
            f"| {row['table_bytes']:.0f} | {row['page_mb']:.2f} |"
        )
    power = found["exponent"]
    said = (
        f"`gapmeter report` of answers of {_TOKENS} tokens. From the last size but one to the last, CPU time grows as"
    )
    return [*lines, "", f"{said} tokens to the power {power['cpu_s']:.2f}, memory to the power {power['peak_gb']:.2f}."]
