"""Commands on runs that are on disk: compare, explain, hand on, look up, check."""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import sys
import textwrap
from dataclasses import asdict
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gapmeter import errors
from gapmeter.commands import flags
from gapmeter.commands.flags import Commands
from gapmeter.errors import UserError, say_exit
from gapmeter.options import tell
from gapmeter.report.printable import printable

_LONGEST_REASON = 60  # characters of why a run has no figures, in the list

if TYPE_CHECKING:  # its import takes a second, which a mistake on the command line need not wait for
    from gapmeter.analysis.results.comparison import Comparison
    from gapmeter.analysis.results.cost_table import CostTable
    from gapmeter.runs.listing import ListedRun
    from gapmeter.runs.run import Conclusion


def _add_compare(commands: Commands) -> None:
    parser = commands.add_parser(
        "compare", help="runs: which differences are real; searches and sweeps: which is cheaper"
    )
    add = parser.add_argument
    add("sides", nargs="*", metavar="RUN", help="one folder or archive per side, or several separated by commas")
    add("--a", action="append", default=[], help="side A: folders; with --run, KEY=VALUE")
    add("--b", action="append", default=[], help="side B: folders; with --run, KEY=VALUE")
    add("--run", metavar="SCENARIO", help="run it with --a and with --b, alternately, and compare")
    add("--pairs", type=int, metavar="N", help="with --run: how many runs a side (default: 3)")
    flags.add_overrides(parser)
    what = "with --run, of a server that runs: the folder that its probe writes into"
    add("--probe-dir", type=flags.folder_of, help=what)
    add("--factor", action="append", default=[], metavar="KEY", help="what may differ, for instance server.max_batch")
    gate = "exit 99 if an SLO's percentile surely grew by more than this from A to B, for instance 5%%"
    add("--max-regression", metavar="SHARE", help=gate)
    add(
        "--force", action="store_true", help="compare even what is not comparable, or a single pair; the result says so"
    )
    flags.add_runs_folder(parser, "where new folders go (default: runs)")
    add("--json", action="store_true", help="compare.json on standard output instead of the folder")
    add("--markdown", type=Path, metavar="FILE", help="write a summary for a pull request")
    add("--quiet", action="store_true", help="no progress and no summary on standard error")
    parser.set_defaults(call=_compare, judges=True)


def _compare(arguments: argparse.Namespace) -> int:
    from gapmeter.keys import Keys

    flags.check_files(arguments.markdown)
    limit = arguments.max_regression
    allowed = None if limit is None else flags.share_of("--max-regression", limit)
    keys = Keys.within({})
    if arguments.run:
        from gapmeter.runs.comparison import check_percentiles
        from gapmeter.study.comparison import check_overrides
        from gapmeter.study.resolve import resolve

        check_overrides(arguments.a, arguments.b)
        sides = [resolve(arguments.run, [*arguments.overrides, *side]) for side in (arguments.a, arguments.b)]
        keys = Keys.within([side.to_dict() for side in sides])
        if allowed is not None:
            check_percentiles(sides[1].slo)
    command = str(keys.out_of_command(flags.command_of(arguments)))
    compared = _compared_in_turn(arguments, command) if arguments.run else _compared_folders(arguments, command)
    from gapmeter.analysis.results.cost_table import CostTable
    from gapmeter.report import comparison, cost_table, markdown
    from gapmeter.runs.comparison import gate, of_the_valid
    from gapmeter.study.conclusion import show

    result = compared.result
    document = cost_table.document(result) if isinstance(result, CostTable) else comparison.document(result)
    rest = None if isinstance(result, CostTable) else of_the_valid(result, compared.folder)
    if not arguments.quiet:
        show(document, compared.folder, "", *([("valid ones", str(rest))] if rest else []))
    written, code, meaning = {**result.to_json(), "folder": str(compared.folder)}, compared.exit_code, ""
    if allowed is not None:
        regression, code = gate(result, compared.folder, allowed, quiet=arguments.quiet)
        written["regression"] = regression.to_json()
        document = comparison.with_gate(document, regression)
        meaning = flags.REGRESSED if code == errors.SLO_MISSED else ""
    if code == errors.NOT_VALID and str(result.verdict).startswith("NOT COMPARABLE"):
        meaning = "not comparable"
    is_written = not arguments.markdown or flags.write_file(arguments.markdown, markdown.text(document))
    print(json.dumps(written) if arguments.json else compared.folder, flush=True)
    return flags.exit_unless_written(say_exit(code, meaning), is_written=is_written)


def _compared_in_turn(arguments: argparse.Namespace, command: str) -> Conclusion[Comparison]:
    if arguments.sides:
        raise UserError(f"--run makes the runs itself; leave out {' '.join(arguments.sides)}", errors.USAGE)
    if not (arguments.a or arguments.b):
        raise UserError("--run needs what differs: --a server.max_batch=4 --b server.max_batch=8", errors.USAGE)
    pairs = 3 if arguments.pairs is None else arguments.pairs
    if pairs < 1:
        raise UserError(f"--pairs {pairs}: at least 1 run of each side", errors.USAGE)
    from gapmeter.options import Options
    from gapmeter.records.process import API_KEY
    from gapmeter.study.comparison import compare_in_turn

    key, probes = os.environ.get(API_KEY), arguments.probe_dir
    options = Options(runs=arguments.runs, quiet=arguments.quiet, api_key=key, probe_dir=probes)
    return compare_in_turn(
        arguments.run, arguments.a, arguments.b, pairs, arguments.overrides, options,
        factors=arguments.factor, force=arguments.force, command=command,
    )  # fmt: skip


def _compared_folders(arguments: argparse.Namespace, command: str) -> Conclusion[Comparison] | Conclusion[CostTable]:
    if arguments.overrides or arguments.pairs is not None or arguments.probe_dir is not None:
        raise UserError("--set, --pairs and --probe-dir go with --run SCENARIO", errors.USAGE)
    named = [",".join(folders) for folders in (arguments.a, arguments.b) if folders]
    sides = [[Path(part) for part in side.split(",") if part] for side in (*arguments.sides, *named)]
    if len(sides) < 2 or not all(sides):
        text = "a comparison needs two sides: gapmeter compare RUN RUN, several runs a side as RUN,RUN"
        raise UserError(text, errors.USAGE)
    from gapmeter.runs.comparison import compare_folders

    return compare_folders(sides, arguments.factor, force=arguments.force, runs=arguments.runs, command=command)


def _add_explain(commands: Commands) -> None:
    parser = commands.add_parser("explain", help="compare two groups of a run's requests: what makes one slower")
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--group", required=True, metavar="CONDITION", help="such as 'prompt_tokens > 64'")
    parser.add_argument("--against", default="rest", metavar="CONDITION", help="the other group (default: the rest)")
    parser.add_argument("--metric", choices=("ttft", "e2e"), default="ttft", help="latency to explain (default: ttft)")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.set_defaults(call=_explain)


def _explain(arguments: argparse.Namespace) -> int:
    from gapmeter.runs.explain import explain, show

    found = explain(arguments.run, arguments.group, arguments.against, arguments.metric)
    if found.provenance.stamp:
        tell(f"{arguments.run} is {found.provenance.stamp}: not valid as a measurement; its report says why")
    if arguments.json:
        print(json.dumps(found.to_json(), indent=1))
    else:
        show(found)
    return errors.OK


def _add_export(commands: Commands) -> None:
    parser = commands.add_parser("export", help="export a run to other tools: CSV, Prometheus, Perfetto, OpenTelemetry")
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--csv", type=flags.folder_of, metavar="FOLDER", help="every figure and table as CSV files")
    parser.add_argument("--prometheus", type=Path, metavar="FILE", help="the figures as a Prometheus text file")
    parser.add_argument("--perfetto", type=Path, metavar="FILE", help="the requests and steps as a trace (.json.gz)")
    parser.add_argument("--otlp", metavar="ADDRESS", help="the ledgers as spans, to an OTLP/HTTP collector")
    parser.set_defaults(call=_export)


def _export(arguments: argparse.Namespace) -> int:
    from gapmeter.runs.run import open_run

    run = open_run(arguments.run)
    asked = {name: getattr(arguments, name) for name in ("csv", "prometheus", "perfetto", "otlp")}
    if not any(asked.values()):
        raise UserError("export what? --csv FOLDER, --prometheus FILE, --perfetto FILE or --otlp ADDRESS", errors.USAGE)
    if run.verdict == "INVALID":
        tell(f"{arguments.run} is INVALID; every file says so")
    for form, where in asked.items():  # one after the other: each is told as soon as it is there
        for written in run.export(**{form: where}):
            print(written, flush=True)
    return errors.OK


def _add_ui(commands: Commands) -> None:
    parser = commands.add_parser("ui", help="a local web page of all runs: search, open, compare, delete")
    flags.add_runs_folder(parser, "the runs folder (default: runs)")
    parser.add_argument("--port", type=int, default=0, help="where to listen on 127.0.0.1 (default: any free port)")
    parser.set_defaults(call=_ui)


def _ui(arguments: argparse.Namespace) -> int:
    from gapmeter.web.server import serve_until_interrupted

    serve_until_interrupted(arguments.runs, flags.port_of("--port", arguments.port))
    return errors.OK


def _add_runs(commands: Commands) -> None:
    parser = commands.add_parser("runs", help="list the runs in a folder, the newest last")
    flags.add_runs_folder(parser)
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.set_defaults(call=_list_runs)


def _list_runs(arguments: argparse.Namespace) -> int:
    from gapmeter.analysis.numbers import count
    from gapmeter.report.terminal import print_table
    from gapmeter.runs.listing import list_runs

    listed = list_runs(arguments.runs)
    if arguments.json:
        print(json.dumps([asdict(run) for run in listed], indent=1))
    elif not listed:
        tell(f"{arguments.runs} holds no runs yet")
    else:
        rows = [
            (
                run.started[:19].replace("T", " "), run.kind, run.name, run.engine, run.outcome,
                count(run.measured), run.p99("ttft"),
                _place(run),
            )
            for run in listed
        ]  # fmt: skip
        print_table(("time", "kind", "name", "engine", "verdict", "n", "p99 TTFT", "folder"), rows, right=(5, 6))
    return errors.OK


def _place(run: ListedRun) -> str:
    """A folder; behind it why it has no figures, and what makes them."""
    if not run.reason:
        return run.folder
    reason = textwrap.shorten(run.reason, _LONGEST_REASON, placeholder=" …")
    again = "; run gapmeter report on it" * (run.state == "unfinished" and run.has_records)
    return f"{run.folder} ({reason}{again})"


def _add_sql(commands: Commands) -> None:
    parser = commands.add_parser("sql", help="query all runs with SQL: runs, requests, ledger, gaps, steps")
    parser.add_argument("query", help="one SELECT, for instance: SELECT run, verdict, ttft_p99_ms FROM runs")
    flags.add_runs_folder(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--csv", dest="form", action="store_const", const="csv", default="table", help="as CSV")
    form.add_argument("--json", dest="form", action="store_const", const="json", help="as one JSON document")
    parser.set_defaults(call=_sql)


def _sql(arguments: argparse.Namespace) -> int:
    from gapmeter.report.terminal import print_table
    from gapmeter.runs.sql import ask

    headers, rows = ask(arguments.query, arguments.runs)
    if arguments.form == "json":
        if twice := next((name for name in headers if headers.count(name) > 1), None):
            text = f"two columns are called {twice}, and JSON has room for one; write … AS another_name"
            raise UserError(text, errors.USAGE)
        print(json.dumps([dict(zip(headers, map(_plain, row), strict=True)) for row in rows], indent=1, default=str))
    elif arguments.form == "csv":
        csv.writer(sys.stdout, lineterminator="\n").writerows([headers, *rows])
    else:
        numbers = [i for i in range(len(headers)) if rows and isinstance(rows[0][i], int | float)]
        print_table(headers, [[_shown(cell) for cell in row] for row in rows], right=numbers)
    return errors.OK


def _plain(cell: Any) -> Any:
    """A cell as JSON has it: no NaN, numbers as numbers."""
    if isinstance(cell, Decimal):
        return float(cell)
    return None if isinstance(cell, float) and not math.isfinite(cell) else cell


def _shown(cell: Any) -> str:
    if cell is None:
        return "–"
    if isinstance(cell, float):
        if 1e15 <= abs(cell) < 2**63:  # as a time in ns since 1970: of these a double knows no tenths
            return f"{cell:.0f}"
        return f"{cell:.1f}" if 1e5 <= abs(cell) < 1e15 else f"{cell:g}"  # a time in ns has more than six digits
    return str(cell)


def _add_verify(commands: Commands) -> None:
    parser = commands.add_parser("verify", help="recompute a run's figures from its records, and check hashes")
    parser.add_argument("run", type=Path, help="the run's folder, or an archive of it")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.set_defaults(call=_verify)


def _verify(arguments: argparse.Namespace) -> int:
    from gapmeter.study.verify import render, verify

    checks = verify(arguments.run)
    if arguments.json:
        print(json.dumps([asdict(check) for check in checks], indent=1))
    else:
        print(printable(render(arguments.run, checks)))
    if all(check.ok for check in checks):
        return errors.OK
    return say_exit(errors.NOT_VALID, "not what its records say")


def _add_archive(commands: Commands) -> None:
    parser = commands.add_parser("archive", help="pack a run's folder into one file, with hashes, without keys")
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="the archive, .tar.gz (default: named after the folder, here)"
    )
    parser.set_defaults(call=_archive)


def _archive(arguments: argparse.Namespace) -> int:
    from gapmeter.runs.archive import archive

    print(archive(arguments.run, arguments.output))
    return errors.OK


COMMANDS = (_add_compare, _add_explain, _add_export, _add_ui, _add_runs, _add_sql, _add_verify, _add_archive)
