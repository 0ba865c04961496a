"""Commands that put load on a server, and the report of what they recorded."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from gapmeter import errors
from gapmeter.commands.flags import Commands, add_outputs, add_overrides, add_server, overrides, without_key
from gapmeter.errors import UserError, say_exit

if TYPE_CHECKING:  # its import takes a second, which a mistake on the command line need not wait for
    from gapmeter.run import RunResult


def add(commands: Commands) -> None:
    """Their words and flags."""
    _add_run(commands.add_parser("run", help="load a server as a scenario says, and explain its latency"))
    _add_capacity(commands.add_parser("capacity", help="find the highest Poisson rate at which every SLO holds"))
    _add_report(commands.add_parser("report", help="report a run again from its folder alone"))
    _add_worker(commands.add_parser("worker", help="issue a share of a run that is conducted elsewhere"))


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("scenario", help="a scenario's name or file")
    add_server(parser)
    add_overrides(parser)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where the run's folder goes (default: runs)")
    parser.add_argument("--resume", type=Path, metavar="FOLDER", help="take up an interrupted sweep, where it was left")
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="load from N gapmeter workers instead")
    parser.add_argument("--listen", default="", metavar="HOST[:PORT]", help="with --workers (default: 127.0.0.1:5557)")
    parser.add_argument("--live", action="store_true", help="serve a page that shows the run as it goes")
    parser.add_argument("--live-port", type=int, default=0, metavar="N", help="its port (default: any free one)")
    parser.add_argument("--progress", choices=("auto", "json"), default="auto", help="json: an object a second")
    parser.add_argument("--patience", default="30s", metavar="TIME", help="give a worker up unheard for so long (30s)")
    parser.add_argument("--locustfile", type=Path, metavar="FILE", help="load by the users and the shape in this file")
    parser.add_argument("--ui", action="store_true", help="show the run on Locust's web page, on 127.0.0.1")
    parser.add_argument("--ui-port", type=int, default=8089, metavar="PORT", help="with --ui (default: 8089)")
    parser.add_argument("--ui-keep", metavar="TIME", help="with --ui: end it so long after the run (default: Ctrl-C)")
    add_outputs(parser)
    parser.add_argument(
        "--baseline", type=Path, metavar="RUN", help="hold it against this run: exit 99 if it regressed"
    )
    parser.add_argument(
        "--max-regression", metavar="SHARE", help="by how much an SLO's percentile may grow (default: 5%%)"
    )
    parser.add_argument(
        "--factor", action="append", default=[], metavar="KEY", help="what may differ from the baseline"
    )
    parser.set_defaults(call=_run)


def _add_capacity(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("scenario", help="a scenario's name or file, with an open loop; the search starts at its rate")
    add_server(parser)
    add_overrides(parser)
    parser.add_argument("--target-rps", metavar="N", help="also say how many servers a load of N requests/s takes")
    parser.add_argument("--headroom", default="20%", metavar="20%", help="of each server kept free in that")
    parser.add_argument("--spare", type=int, default=0, metavar="1", help="servers that may fail in that (1: N+1)")
    parser.add_argument("--confidence", default="95%", metavar="95%", help="of the interval")
    parser.add_argument("--within", default="10%", metavar="10%", help="found when the interval's ends are this close")
    parser.add_argument("--budget", default="7m", metavar="DURATION", help="of trials in all (default: 7m)")
    parser.add_argument("--resume", type=Path, metavar="FOLDER", help="go on with an earlier search; its trials count")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs"), help="where the search's folder goes (default: runs)"
    )
    parser.add_argument("--json", action="store_true", help="summary.json on standard output instead of the folder")
    parser.add_argument("--quiet", action="store_true", help="no progress and no summary on standard error")
    parser.set_defaults(call=_capacity)


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--definitions", action="store_true", help="also by other load testers' definitions")
    add_outputs(parser)
    parser.set_defaults(call=_report)


def _add_worker(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--master", required=True, metavar="HOST[:PORT]", help="where gapmeter run --workers listens")
    parser.add_argument("--cores", default="", help="run the generator on these cores only, for instance 2 or 2,3")
    parser.add_argument("--api-key", help="sent to the server as a bearer token (or GAPMETER_API_KEY)")
    parser.set_defaults(call=_worker)


def _run(arguments: argparse.Namespace) -> int:
    from gapmeter.study.resolve import resolve

    if not 0 <= arguments.live_port < 65536:
        raise UserError(f"--live-port {arguments.live_port} is not a port; write one from 1 to 65535", errors.USAGE)
    changed = overrides(arguments)
    scenario = resolve(arguments.scenario, changed)  # a mistake is told before a second goes into imports
    if arguments.resume and not scenario.sweep:
        raise UserError(f"--resume: {arguments.scenario} has no sweep to take up", errors.USAGE)
    from gapmeter.runs.baseline import held_against, read_baseline

    baseline = read_baseline(arguments.baseline, arguments.max_regression, arguments.factor, scenario)
    from gapmeter.run import Options, run_repeats
    from gapmeter.study.companions import ui
    from gapmeter.study.load import checked
    from gapmeter.study.worker import workers
    from gapmeter.sweep import run_sweep

    options = Options(
        locustfile=checked(arguments.locustfile, scenario, arguments.workers),
        ui=ui(arguments.ui_port, arguments.ui_keep) if arguments.ui else None,
        runs=arguments.runs,
        workers=workers(arguments.workers, arguments.listen, arguments.patience),
        probe_dir=arguments.probe_dir,
        api_key=arguments.api_key or os.environ.get("GAPMETER_API_KEY"),
        quiet=arguments.quiet,
        live_port=arguments.live_port if arguments.live else None,
        progress=arguments.progress,
        command=os.environ.get("GAPMETER_AGAIN") or shlex.join(["gapmeter", *without_key(arguments.words)]),
    )
    if scenario.sweep:
        return _publish(arguments, lambda: [run_sweep(arguments.scenario, changed, options, arguments.resume)])

    def results() -> Iterable[RunResult]:
        runs = run_repeats(arguments.scenario, changed, options)
        if baseline is None:
            return runs
        return held_against(runs, scenario.repeat, baseline, arguments.runs, quiet=arguments.quiet)

    return _publish(arguments, results)


def _capacity(arguments: argparse.Namespace) -> int:
    from gapmeter.study.resolve import resolve
    from gapmeter.wanted import read_wanted

    changed = overrides(arguments)
    wanted = read_wanted(arguments)
    scenario = resolve(arguments.scenario, changed)  # a mistake is told before a second goes into imports
    from gapmeter.capacity import check_scenario, find_capacity
    from gapmeter.run import Options

    check_scenario(scenario, arguments.scenario)
    options = Options(
        runs=arguments.runs,
        probe_dir=arguments.probe_dir,
        api_key=arguments.api_key or os.environ.get("GAPMETER_API_KEY"),
        quiet=arguments.quiet,
        command=os.environ.get("GAPMETER_AGAIN") or shlex.join(["gapmeter", *without_key(arguments.words)]),
    )
    result = find_capacity(arguments.scenario, changed, options, wanted, arguments.resume)
    print(json.dumps(result.summary) if arguments.json else result.folder, flush=True)
    return say_exit(result.exit_code) if arguments.quiet else result.exit_code


def _worker(arguments: argparse.Namespace) -> int:
    from gapmeter.study.worker import serve

    return serve(arguments.master, arguments.cores, arguments.api_key or os.environ.get("GAPMETER_API_KEY"))


def _report(arguments: argparse.Namespace) -> int:
    from gapmeter.run import report_again

    quiet, definitions = arguments.quiet, arguments.definitions
    return _publish(arguments, lambda: [report_again(arguments.run, quiet=quiet, definitions=definitions)])


def _publish(arguments: argparse.Namespace, results: Callable[[], Iterable[RunResult]]) -> int:
    """Standard output is for programs: a line with each run's folder, or one document; the worst exit code."""
    from gapmeter.outputs import Outputs, print_document, publish
    from gapmeter.runs.baseline import annotate, wants_annotations

    outlets = Outputs(arguments.json, arguments.junit, arguments.markdown)
    outlets.check()
    done: list[RunResult] = []
    annotated = wants_annotations(asked=arguments.annotations)
    try:
        for result in results():
            publish(result, done, outlets)
            done.append(result)
            if annotated:
                annotate(result.summary)
    finally:
        if done and arguments.json:
            print_document(done)
    code = max(result.exit_code for result in done)
    judged = done[-1].summary.get("regression")
    regressed = judged and judged["status"] == "REGRESSED" and code == errors.SLO_MISSED
    meaning = "regressed against its baseline" if regressed else ""
    last = arguments.quiet or annotated or judged or len(done) > 1  # else a single summary ends with it
    return say_exit(code, meaning) if last else code
