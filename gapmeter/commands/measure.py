"""Commands that put load on a server, the report of what they recorded, and what can be known before any load."""

from __future__ import annotations

import argparse
import contextlib
import gc
import ipaddress
import json
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gapmeter import errors
from gapmeter.commands import flags
from gapmeter.commands.flags import Commands
from gapmeter.errors import UserError, say_exit
from gapmeter.options import BUDGET_S, CapacityGoal, Options
from gapmeter.report.printable import printable

if TYPE_CHECKING:  # its import takes a second, which a mistake on the command line need not wait for
    from gapmeter.loadgen.fleet import Workers
    from gapmeter.runs.run import Conclusion
    from gapmeter.scenarios.model import Scenario
    from gapmeter.study.comparison import Baseline


def _add_run(commands: Commands) -> None:
    parser = commands.add_parser("run", help="run a scenario against a server and explain its latency")
    add = parser.add_argument
    add("scenario", help="a scenario's name or file")
    flags.add_server(parser)
    flags.add_overrides(parser)
    flags.add_runs_folder(parser, "where the run's folder goes (default: runs)")
    add("--resume", type=Path, metavar="FOLDER", help="continue an interrupted sweep")
    add("--workers", type=int, default=0, metavar="N", help="send the load from N gapmeter workers")
    add("--listen", default="", metavar="HOST[:PORT]", help="with --workers: listen here (default: 127.0.0.1:5557)")
    add("--live", action="store_true", help="serve the runs page during the run, and show it live")
    add("--live-port", type=int, default=0, metavar="N", help="with --live: its port (default: any free one)")
    add("--progress", choices=("auto", "json"), default="auto", help="json: one JSON object per second")
    add("--patience", metavar="TIME", help="with --workers: give up one silent for this long (default: 30s)")
    add("--locustfile", type=Path, metavar="FILE", help="use the users and load shape in this file")
    flags.add_outputs(parser)
    add("--baseline", metavar="RUN,RUN", help="make 3 runs and compare them with these: exit 99 on a regression")
    add("--force", action="store_true", help="with --baseline: accept one run a side; the result says so")
    add("--max-regression", metavar="SHARE", help="with --baseline: most an SLO's percentile may grow (default: 5%%)")
    add("--factor", action="append", default=[], metavar="KEY", help="with --baseline: what may differ from it")
    parser.set_defaults(call=_run, judges=True)


def _run(arguments: argparse.Namespace) -> int:
    from gapmeter.study.resolve import resolve

    flags.port_of("--live-port", arguments.live_port)
    if arguments.live_port and not arguments.live:
        raise UserError("--live-port goes with --live", errors.USAGE)
    changed = flags.overrides(arguments)
    scenario = resolve(arguments.scenario, changed)  # a mistake is reported before a second goes into imports
    if arguments.resume and not scenario.sweep:
        raise UserError(f"--resume: {arguments.scenario} has no sweep to resume", errors.USAGE)
    baseline = _baseline(arguments, scenario)
    from gapmeter.study.study import run_repeats
    from gapmeter.study.sweep import run_sweep

    options = Options(
        locustfile=arguments.locustfile,
        runs=arguments.runs,
        workers=workers_of(arguments.workers, arguments.listen, arguments.patience),
        probe_dir=arguments.probe_dir,
        api_key=flags.api_key_of(arguments),
        quiet=arguments.quiet,
        verbose=arguments.verbose,
        live_port=arguments.live_port if arguments.live else None,
        progress=arguments.progress,
        command=flags.command_of(arguments),
    )
    if scenario.sweep:
        if arguments.live:
            raise UserError("--live shows a single run; for a sweep's runs use gapmeter ui", errors.USAGE)
        return flags.publish(arguments, lambda: [run_sweep(arguments.scenario, changed, options, arguments.resume)])

    def conclusions() -> Iterable[Conclusion[Any]]:
        if baseline is None:
            return run_repeats(arguments.scenario, changed, options)
        from gapmeter.study.comparison import judged_against

        repeats = baseline.repeats(scenario)
        runs = run_repeats(arguments.scenario, [*changed, f"repeat={repeats}"], options, again=True)
        return judged_against(runs, repeats, baseline, arguments.runs, quiet=arguments.quiet)

    return flags.publish(arguments, conclusions)


def _baseline(arguments: argparse.Namespace, scenario: Scenario) -> Baseline | None:
    if arguments.baseline is None:
        if arguments.max_regression is not None or arguments.factor or arguments.force:
            raise UserError("--max-regression, --factor and --force go with --baseline RUN", errors.USAGE)
        return None
    from gapmeter.study.comparison import Baseline, check_baseline

    limit = flags.share_of("--max-regression", arguments.max_regression or "5%")
    folders = tuple(Path(part) for part in arguments.baseline.split(",") if part)
    baseline = Baseline(folders, limit, tuple(arguments.factor), force=arguments.force)
    check_baseline(baseline, scenario)
    return baseline


def workers_of(count: int, listen: str, patience: str | None) -> Workers | None:
    """What ``--workers``, ``--listen`` and ``--patience`` ask for; None without. Raises UserError."""
    if not count:
        if listen or patience is not None:
            raise UserError("--listen and --patience go with --workers N", errors.USAGE)
        return None
    if count < 0:
        raise UserError(f"--workers {count} is not a number of workers; write for instance --workers 3", errors.USAGE)
    from gapmeter.loadgen.fleet import Workers

    host, port = flags.address_of("--listen", listen) if listen else ("127.0.0.1", flags.DEFAULT_PORT)
    ours = host == "localhost"
    with contextlib.suppress(ValueError):
        ours = ours or ipaddress.ip_address(host).is_loopback
    if not os.environ.get("GAPMETER_WORKER_SECRET") and not ours:
        text = "workers on other machines need a shared secret: set GAPMETER_WORKER_SECRET here and"
        raise UserError(f"{text} there to the same value, which you make up", errors.USAGE)
    patience_s = flags.seconds_of("--patience", "30s" if patience is None else patience, least_s=5.0)
    return Workers(count, host, port, patience_s)


def _add_capacity(commands: Commands) -> None:
    parser = commands.add_parser("capacity", help="find the highest rate that meets every SLO")
    add = parser.add_argument
    add("scenario", help="a scenario's name or file, with an open loop; the search starts at its rate")
    flags.add_server(parser)
    flags.add_overrides(parser)
    add("--target-rps", metavar="N", help="also say how many servers a load of N requests/s needs")
    what = "with --target-rps: share of each server kept free (default: what cost.utilisation leaves, 20%%)"
    add("--headroom", metavar="SHARE", help=what)
    add(
        "--spare", type=int, metavar="N", help="with --target-rps: extra servers in case some fail (1: N+1; default: 0)"
    )
    add("--confidence", default="95%", metavar="SHARE", help="of the interval (default: 95%%)")
    what = "widest interval that counts as found, plus or minus (default: 20%%)"
    add("--within", default="20%", metavar="SHARE", help=what)
    add("--budget", default="4m", metavar="TIME", help="time for all trials (default: 4m)")
    what = "search for each setting, and say which is cheapest"
    add("--over", action="append", default=[], metavar="KEY=VALUE,VALUE", help=what)
    add("--resume", metavar="FOLDER", help="continue an earlier search; with --over: several, separated by commas")
    flags.add_runs_folder(parser, "where the search's folder goes (default: runs)")
    add("--json", action="store_true", help="summary.json on standard output instead of the folder")
    add("--quiet", action="store_true", help="no progress and no summary on standard error")
    parser.set_defaults(call=_capacity, judges=True)


def _capacity(arguments: argparse.Namespace) -> int:
    from gapmeter.study.resolve import check_searchable, resolve, searchable_points

    changed, spare = flags.overrides(arguments), arguments.spare or 0
    if arguments.target_rps is None and (arguments.headroom is not None or arguments.spare is not None):
        raise UserError("--headroom and --spare go with --target-rps N", errors.USAGE)
    target_rps = None if arguments.target_rps is None else flags.rate_of("--target-rps", arguments.target_rps)
    free = arguments.headroom
    headroom = None if free is None else flags.share_of("--headroom", free)
    confidence = flags.share_of("--confidence", arguments.confidence)
    within = flags.share_of("--within", arguments.within)
    budget_s = flags.seconds_of("--budget", arguments.budget, least_s=BUDGET_S[0], most_s=BUDGET_S[1])
    goal = CapacityGoal(target_rps, headroom, spare, confidence, within, budget_s)
    goal.check()
    resumed = [Path(part) for part in (arguments.resume or "").split(",") if part]
    if arguments.resume is not None and not resumed:
        raise UserError("--resume is empty; name a folder", errors.USAGE)
    # A mistake is reported before a second goes into imports.
    if arguments.over:
        changed.append(flags.sweep_of(arguments.over))
        searchable_points(arguments.scenario, changed)
    else:
        check_searchable(resolve(arguments.scenario, changed), arguments.scenario)
        if len(resumed) > 1:
            raise UserError("--resume: one search, unless --over is given", errors.USAGE)
    from gapmeter.study.capacities import find_capacities
    from gapmeter.study.capacity import find_capacity

    options = Options(
        runs=arguments.runs,
        probe_dir=arguments.probe_dir,
        api_key=flags.api_key_of(arguments),
        quiet=arguments.quiet,
        command=flags.command_of(arguments),
    )
    found: Conclusion[Any]
    if arguments.over:
        found = find_capacities(arguments.scenario, changed, options, goal, resumed)
    else:
        found = find_capacity(arguments.scenario, changed, options, goal, *resumed)
    print(found.result.model_dump_json() if arguments.json else found.folder, flush=True)
    return say_exit(found.exit_code) if arguments.quiet else found.exit_code


def _add_worker(commands: Commands) -> None:
    parser = commands.add_parser("worker", help="send part of a run's load from this machine")
    parser.add_argument("--master", required=True, metavar="HOST[:PORT]", help="where gapmeter run --workers listens")
    parser.add_argument("--cores", default="", help="run the generator on these cores only, for instance 2 or 2,3")
    parser.add_argument("--api-key", help="sent to the server as a bearer token; GAPMETER_API_KEY is not seen in ps")
    parser.add_argument("--url", default="", help="with a key: the one server that gets it, as gapmeter run names it")
    parser.set_defaults(call=_worker)


def _worker(arguments: argparse.Namespace) -> int:
    from gapmeter.loadgen.exchange import endpoint
    from gapmeter.options import tell
    from gapmeter.signals import ending_signals

    host, port = flags.address_of("--master", arguments.master)
    os.environ["LOCUST_SKIP_MONKEY_PATCH"] = "1"  # the generator is a process of its own; threads here must be threads
    try:
        from gapmeter.loadgen.locust import protocol, slice_run, worker
    except ModuleNotFoundError as error:
        text = f"{error.name} is missing: make setup in a checkout, or pip install locust"
        raise UserError(text, errors.USAGE) from error
    key, url = flags.api_key_of(arguments), arguments.url
    if key and not url:
        raise UserError("a key is sent to one server only; name it with --url", errors.USAGE)
    secret = os.environ.get(protocol.SECRET, "")
    try:
        call = slice_run.Call(host, port, flags.cores_of(arguments.cores), key, secret, url)
        # The last is one of the others that came within an import.
        worker.serve(call, tell, [*ending_signals(), signal.SIGALRM])
    except worker.NoSecret as error:
        raise UserError(str(error), errors.USAGE) from error
    except worker.Refused as error:
        raise UserError(str(error), errors.NOT_VALID) from error
    except ConnectionError as error:
        raise UserError(str(error) or f"no master answers at {endpoint(host, port)}", errors.UNREACHABLE) from error
    return errors.OK


def _add_report(commands: Commands) -> None:
    parser = commands.add_parser("report", help="write a run's report again, from its folder alone")
    parser.add_argument("run", type=Path, nargs="?", help="the run's folder (default: the newest in runs)")
    parser.add_argument("--definitions", action="store_true", help="add figures by other load testers' definitions")
    flags.add_outputs(parser)
    parser.set_defaults(call=_report, judges=True)


def _report(arguments: argparse.Namespace) -> int:
    gc.disable()  # what a report makes it keeps until it ends: looking for what could go costs a tenth of its time
    from gapmeter.study.conclusion import report_again

    if (folder := arguments.run) is None:
        from gapmeter.runs.listing import newest_run

        folder = newest_run(Path("runs"))
    asked = {name: getattr(arguments, name) for name in ("quiet", "verbose", "definitions")}
    return flags.publish(arguments, lambda: [report_again(folder, **asked)])


def _add_config(commands: Commands) -> None:
    parser = commands.add_parser("config", help="print each value of a scenario and where it came from")
    parser.add_argument("scenario", help="a scenario's name or file")
    flags.add_overrides(parser)
    parser.set_defaults(call=_config)


def _config(arguments: argparse.Namespace) -> int:
    from gapmeter.study.resolve import explain_config

    for setting in explain_config(arguments.scenario, arguments.overrides):
        print(f"{setting.key:<24} {json.dumps(setting.value):<28} {setting.source}")
    return errors.OK


def _add_scenarios(commands: Commands) -> None:
    parser = commands.add_parser("scenarios", help="list the scenarios by name, a line each")
    parser.set_defaults(call=_scenarios)


def _scenarios(_: argparse.Namespace) -> int:
    from gapmeter.scenarios.source import list_scenarios

    for name, summary in list_scenarios():
        print(f"{printable(name):<16} {printable(summary)}")
    return errors.OK


def _add_doctor(commands: Commands) -> None:
    parser = commands.add_parser("doctor", help="check what works on this machine and how to fix the rest")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.set_defaults(call=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    from gapmeter.machine.doctor import print_findings

    return say_exit(print_findings(as_json=arguments.json))


def _add_calibrate(commands: Commands) -> None:
    parser = commands.add_parser("calibrate", help="measure the load tester itself on this machine")
    parser.add_argument("--quick", action="store_true", help="half a minute instead of four, and less exact")
    parser.add_argument("--generator", action="append", default=[], help="only this one: asyncio or locust")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.set_defaults(call=_calibrate)


def _calibrate(arguments: argparse.Namespace) -> int:
    from gapmeter.machine.calibration import run_calibration

    return run_calibration(arguments.generator, quick=arguments.quick, as_json=arguments.json)


COMMANDS = (
    _add_run, _add_capacity, _add_report, _add_worker, _add_config, _add_scenarios, _add_doctor, _add_calibrate,
)  # fmt: skip
