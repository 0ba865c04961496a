"""Commands on runs that are on disk: compare, explain, hand on, look up, check."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from gapmeter import errors
from gapmeter.commands.flags import Commands, add_overrides, add_runs_folder
from gapmeter.errors import say_exit


def add(commands: Commands) -> None:
    """Their words and flags."""
    _add_compare(commands.add_parser("compare", help="compare runs: what differs beyond chance, and which stage it is"))
    _add_explain(commands.add_parser("explain", help="two groups of a run's requests: what makes the one slower"))
    _add_export(commands.add_parser("export", help="a run for other tools: CSV, Prometheus, Perfetto, OpenTelemetry"))
    _add_ui(commands.add_parser("ui", help="a local page over the runs folder: search, open, compare, delete"))
    _add_runs(commands.add_parser("runs", help="list the runs in a folder, the newest last"))
    _add_sql(commands.add_parser("sql", help="ask all runs by SQL: runs, requests, ledger, gaps, steps"))
    _add_verify(commands.add_parser("verify", help="derive a run's figures again from its records, and check hashes"))
    _add_archive(commands.add_parser("archive", help="put a run's folder into one file, with hashes, without keys"))


def _add_compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sides", nargs="*", metavar="RUN", help="a run's folder a side, or several with commas between")
    parser.add_argument("--a", action="append", default=[], help="side A: folders; with --run, KEY=VALUE")
    parser.add_argument("--b", action="append", default=[], help="side B: folders; with --run, KEY=VALUE")
    parser.add_argument("--run", metavar="SCENARIO", help="run it under --a and under --b, in turn, and compare")
    parser.add_argument("--pairs", type=int, default=2, metavar="N", help="with --run: how many runs of each side")
    add_overrides(parser)
    parser.add_argument(
        "--factor", action="append", default=[], metavar="KEY", help="what may differ: server.max_batch"
    )
    parser.add_argument("--force", action="store_true", help="compare what is not comparable; every figure says so")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where folders go (default: runs)")
    parser.add_argument("--json", action="store_true", help="compare.json on standard output instead of the folder")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write it for a pull request")
    parser.add_argument("--quiet", action="store_true", help="nothing on standard error")
    parser.set_defaults(call=_compare)


def _add_explain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--group", required=True, metavar="CONDITION", help="such as 'prompt_tokens > 64'")
    parser.add_argument("--against", default="rest", metavar="CONDITION", help="the other group (default: the rest)")
    parser.add_argument("--metric", choices=("ttft", "e2e"), default="ttft", help="the wait that is explained")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.set_defaults(call=_explain)


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--csv", type=Path, metavar="FOLDER", help="every figure and table as CSV files")
    parser.add_argument("--prometheus", type=Path, metavar="FILE", help="the figures as a Prometheus text file")
    parser.add_argument("--perfetto", type=Path, metavar="FILE", help="the requests and steps as a trace (.json.gz)")
    parser.add_argument("--otlp", metavar="ADDRESS", help="the ledgers as spans, to an OTLP/HTTP collector")
    parser.set_defaults(call=_export)


def _add_ui(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="the runs folder (default: runs)")
    parser.add_argument("--port", type=int, default=0, help="where to listen on 127.0.0.1 (default: any free port)")
    parser.set_defaults(call=_ui)


def _add_runs(parser: argparse.ArgumentParser) -> None:
    add_runs_folder(parser)
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.set_defaults(call=_list_runs)


def _add_sql(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("query", help="one SELECT, for instance: SELECT run, verdict, ttft_p99_ms FROM runs")
    add_runs_folder(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--csv", dest="form", action="store_const", const="csv", default="table", help="as CSV")
    form.add_argument("--json", dest="form", action="store_const", const="json", help="as one JSON document")
    parser.set_defaults(call=_sql)


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="the run's folder, or an archive of it")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.set_defaults(call=_verify)


def _add_archive(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="FILE.tar.gz or FILE.zip (default: its name)")
    parser.set_defaults(call=_archive)


def _compare(arguments: argparse.Namespace) -> int:
    from gapmeter.compare import compare_as_asked
    from gapmeter.study.keys import Keys

    command = Keys.within({}).out_of_command(shlex.join(["gapmeter", *arguments.words]))
    return say_exit(compare_as_asked(arguments, command))


def _explain(arguments: argparse.Namespace) -> int:
    from gapmeter.runs.explain import explain

    return explain(arguments.run, arguments.group, arguments.against, arguments.metric, as_json=arguments.json)


def _export(arguments: argparse.Namespace) -> int:
    from gapmeter.runs.run import export

    a = arguments
    return export(a.run, csv=a.csv, prometheus=a.prometheus, otlp=a.otlp, perfetto=a.perfetto)


def _ui(arguments: argparse.Namespace) -> int:
    from gapmeter.web.server import serve_ui

    return serve_ui(arguments.runs, arguments.port)


def _list_runs(arguments: argparse.Namespace) -> int:
    from gapmeter.runs.listing import print_runs

    return print_runs(arguments.runs, as_json=arguments.json)


def _sql(arguments: argparse.Namespace) -> int:
    from gapmeter.runs.sql import print_answer

    return print_answer(arguments.query, arguments.runs, form=arguments.form)


def _verify(arguments: argparse.Namespace) -> int:
    from gapmeter.runs.verify import verify

    code = verify(arguments.run, as_json=arguments.json)
    if code != errors.OK:
        print(f"exit={code} not what its records say", file=sys.stderr)
    return code


def _archive(arguments: argparse.Namespace) -> int:
    from gapmeter.runs.archive import archive

    print(archive(arguments.run, arguments.output))
    return errors.OK
