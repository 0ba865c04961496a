"""``gapmeter export``: a run for other tools, each named by a flag."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from gapmeter import errors
from gapmeter.errors import UserError
from gapmeter.runs.damage import rederivable
from gapmeter.runs.opened import open_run


def export(run: Path, *, csv: Path | None, prometheus: Path | None, otlp: str | None, perfetto: Path | None) -> int:
    """Write what was asked for; a line with each file (or how many spans) on standard output. Raises UserError."""
    opened = open_run(run)
    wanted: list[Callable[[], list[str]]] = []
    if csv is not None:
        wanted.append(lambda: _csv(run, csv))
    if prometheus is not None:
        wanted.append(lambda: _prometheus(run, prometheus))
    if perfetto is not None:
        wanted.append(lambda: _perfetto(run, perfetto))
    if otlp is not None:
        wanted.append(lambda: _otlp(run, otlp))
    if not wanted:
        raise UserError("export what? --csv FOLDER, --prometheus FILE, --perfetto FILE or --otlp ADDRESS", errors.USAGE)
    with rederivable(run):
        verdict = opened.verdict
    if verdict == "INVALID":
        print(f"gapmeter: {run} is INVALID; every file says so", file=sys.stderr)
    for make in wanted:
        try:
            with rederivable(run):
                done = make()
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            raise UserError(
                f"not exported: {where}{error.strerror or str(error).splitlines()[0]}", errors.USAGE
            ) from error
        print(*done, sep="\n", flush=True)
    return errors.OK


def _csv(run: Path, into: Path) -> list[str]:
    from gapmeter.records import RunFolder
    from gapmeter.report.export.csv import write_csv

    return [str(path) for path in write_csv(RunFolder(run), into)]


def _prometheus(run: Path, file: Path) -> list[str]:
    from gapmeter.analysis.results.run import RunResult
    from gapmeter.report.export.prometheus import prometheus

    file.write_text(prometheus(RunResult.read(run)), encoding="utf-8")
    return [str(file)]


def _perfetto(run: Path, file: Path) -> list[str]:
    from gapmeter.records import RunFolder
    from gapmeter.report.export.perfetto import write_trace

    write_trace(RunFolder(run), file)
    return [str(file)]


def _otlp(run: Path, address: str) -> list[str]:
    from gapmeter.records import RunFolder
    from gapmeter.report.export.otlp import NoOpenTelemetry, send

    try:
        return [f"{send(RunFolder(run), address)} spans to {address}"]
    except NoOpenTelemetry as error:
        raise UserError(str(error), errors.USAGE) from error
