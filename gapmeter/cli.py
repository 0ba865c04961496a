"""The command line: flags in, one library call, an exit code out."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gapmeter import errors
from gapmeter.errors import UserError

if TYPE_CHECKING:  # its import takes a second, which a mistake on the command line need not wait for
    from gapmeter.run import RunResult


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. A user's mistake is one sentence on standard error.

    A failure's last line there names its exit code, since ``make`` turns every failure into 2.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = _parser().parse_args(words)
    arguments.words = words
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the server ended, the partial run reported
    try:
        code: int = arguments.call(arguments)
        sys.stdout.flush()
    except UserError as error:
        if arguments.debug:
            raise
        print(f"gapmeter: {error}", file=sys.stderr)
        code = _say_exit(error.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is buffered has nowhere to go
        print("gapmeter: whoever read the standard output has left", file=sys.stderr)
        code = _say_exit(errors.USAGE)
    except KeyboardInterrupt:
        print("gapmeter: interrupted", file=sys.stderr)
        code = _say_exit(errors.INTERRUPTED)
    return code


def _say_exit(code: int, meaning: str = "") -> int:
    if code != errors.OK:
        print(f"exit={code} {meaning or errors.MEANING[code]}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gapmeter", description="Where every request's milliseconds went.")
    parser.set_defaults(debug=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_run(commands.add_parser("run", help="load a server as a scenario says, and explain its latency"))
    _add_capacity(commands.add_parser("capacity", help="find the highest Poisson rate at which every SLO holds"))
    _add_report(commands.add_parser("report", help="report a run again from its folder alone"))
    _add_compare(commands.add_parser("compare", help="compare runs: what differs beyond chance, and which stage it is"))
    _add_export(commands.add_parser("export", help="a run for other tools: CSV, Prometheus, Perfetto, OpenTelemetry"))
    _add_explain(commands.add_parser("explain", help="two groups of a run's requests: what makes the one slower"))

    _add_ui(commands.add_parser("ui", help="a local page over the runs folder: search, open, compare, delete"))
    _add_config(commands.add_parser("config", help="print each value of a scenario and where it came from"))
    _add_worker(commands.add_parser("worker", help="issue a share of a run that is conducted elsewhere"))
    scenarios = commands.add_parser("scenarios", help="list the scenarios by name, a line each")
    scenarios.set_defaults(call=_scenarios)
    doctor = commands.add_parser("doctor", help="say what this machine can and cannot do, with remedies")
    doctor.add_argument("--json", action="store_true", help="one JSON document on standard output")
    doctor.set_defaults(call=_doctor)
    _add_calibrate(commands.add_parser("calibrate", help="measure the load tester itself on this machine"))
    _add_verify(commands.add_parser("verify", help="derive a run's figures again from its records, and check hashes"))
    _add_archive(commands.add_parser("archive", help="put a run's folder into one file, with hashes, without keys"))
    _add_runs(commands.add_parser("runs", help="list the runs in a folder, the newest last"))
    _add_sql(commands.add_parser("sql", help="ask all runs by SQL: runs, requests, ledger, gaps, steps"))
    for command in (parser, *commands.choices.values()):
        command.allow_abbrev = False  # an abbreviated --api-key would pass for another word
        command.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks")
    return parser


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("scenario", help="a scenario's name or file")
    _add_server(parser)
    _add_overrides(parser)
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
    _add_outputs(parser)
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
    _add_server(parser)
    _add_overrides(parser)
    parser.add_argument("--target-rps", metavar="N", help="also say how many servers a load of N requests/s takes")
    parser.add_argument("--headroom", default="20%", metavar="20%", help="of each server kept free in that")
    parser.add_argument("--spare", type=int, default=0, metavar="1", help="servers that may fail in that (1: N+1)")
    parser.add_argument("--confidence", default="95%", metavar="95%", help="of the interval")
    parser.add_argument("--within", default="10%", metavar="10%", help="found when the interval's ends are this close")
    parser.add_argument("--budget", default="7m", metavar="DURATION", help="of trials in all (default: 7m)")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs"), help="where the search's folder goes (default: runs)"
    )
    parser.add_argument("--json", action="store_true", help="summary.json on standard output instead of the folder")
    parser.add_argument("--quiet", action="store_true", help="no progress and no summary on standard error")
    parser.set_defaults(call=_capacity)


def _add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", help="server.engine: transformers, vllm, simulated or attach")
    parser.add_argument("--url", help="attach to the OpenAI-compatible server there (means engine attach)")
    parser.add_argument("--model", help="server.model: builtin:NAME, a folder or a hub id; attached: its name there")
    parser.add_argument("--tokenizer", help="attached: folder or hub id of the served model's tokenizer")
    parser.add_argument("--probe-dir", type=Path, help="attached: the folder that the server's probe writes into")
    parser.add_argument("--api-key", help="attached: sent as a bearer token (or GAPMETER_API_KEY)")


def _add_worker(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--master", required=True, metavar="HOST[:PORT]", help="where gapmeter run --workers listens")
    parser.add_argument("--cores", default="", help="run the generator on these cores only, for instance 2 or 2,3")
    parser.add_argument("--api-key", help="sent to the server as a bearer token (or GAPMETER_API_KEY)")
    parser.set_defaults(call=_worker)


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help="override any key"
    )


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="summary.json on standard output instead of the folder")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="write a JUnit file, one case per SLO")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write a summary for a pull request")
    parser.add_argument("--quiet", action="store_true", help="no progress and no summary on standard error")
    parser.add_argument("--annotations", action="store_true", help="GitHub's, of what failed (there: always)")


def _add_calibrate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="half a minute instead of two, and less exact")
    parser.add_argument("--generator", action="append", default=[], help="only this: asyncio or locust")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.set_defaults(call=_calibrate)


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--definitions", action="store_true", help="also by other load testers' definitions")
    _add_outputs(parser)
    parser.set_defaults(call=_report)


def _add_compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sides", nargs="*", metavar="RUN", help="a run's folder a side, or several with commas between")
    parser.add_argument("--a", action="append", default=[], help="side A: folders; with --run, KEY=VALUE")
    parser.add_argument("--b", action="append", default=[], help="side B: folders; with --run, KEY=VALUE")
    parser.add_argument("--run", metavar="SCENARIO", help="run it under --a and under --b, in turn, and compare")
    parser.add_argument("--pairs", type=int, default=2, metavar="N", help="with --run: how many runs of each side")
    _add_overrides(parser)
    parser.add_argument(
        "--factor", action="append", default=[], metavar="KEY", help="what may differ: server.max_batch"
    )
    parser.add_argument("--force", action="store_true", help="compare what is not comparable; every figure says so")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where folders go (default: runs)")
    parser.add_argument("--json", action="store_true", help="compare.json on standard output instead of the folder")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write it for a pull request")
    parser.add_argument("--quiet", action="store_true", help="nothing on standard error")
    parser.set_defaults(call=_compare)


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--csv", type=Path, metavar="FOLDER", help="every figure and table as CSV files")
    parser.add_argument("--prometheus", type=Path, metavar="FILE", help="the figures as a Prometheus text file")
    parser.add_argument("--perfetto", type=Path, metavar="FILE", help="the requests and steps as a trace (.json.gz)")
    parser.add_argument("--otlp", metavar="ADDRESS", help="the ledgers as spans, to an OTLP/HTTP collector")
    parser.set_defaults(call=_export)


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="the run's folder, or an archive of it")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.set_defaults(call=_verify)


def _add_archive(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="FILE.tar.gz or FILE.zip (default: its name)")
    parser.set_defaults(call=_archive)


def _add_runs(parser: argparse.ArgumentParser) -> None:
    _add_runs_folder(parser)
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.set_defaults(call=_list_runs)


def _add_sql(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("query", help="one SELECT, for instance: SELECT run, verdict, ttft_p99_ms FROM runs")
    _add_runs_folder(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--csv", dest="form", action="store_const", const="csv", default="table", help="as CSV")
    form.add_argument("--json", dest="form", action="store_const", const="json", help="as one JSON document")
    parser.set_defaults(call=_sql)


def _add_runs_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where the runs' folders are (default: runs)")


def _add_explain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--group", required=True, metavar="CONDITION", help="such as 'prompt_tokens > 64'")
    parser.add_argument("--against", default="rest", metavar="CONDITION", help="the other group (default: the rest)")
    parser.add_argument("--metric", choices=("ttft", "e2e"), default="ttft", help="the wait that is explained")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.set_defaults(call=_explain)


def _add_ui(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="the runs folder (default: runs)")
    parser.add_argument("--port", type=int, default=0, help="where to listen on 127.0.0.1 (default: any free port)")
    parser.set_defaults(call=_ui)


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("scenario", help="a scenario's name or file")
    _add_overrides(parser)
    parser.set_defaults(call=_config)


def _run(arguments: argparse.Namespace) -> int:
    from gapmeter.resolve import resolve

    overrides = _overrides(arguments)
    scenario = resolve(arguments.scenario, overrides)  # a mistake is told before a second goes into imports
    if arguments.resume and not scenario.sweep:
        raise UserError(f"--resume: {arguments.scenario} has no sweep to take up", errors.USAGE)
    from gapmeter.regression import held_against, read_baseline

    baseline = read_baseline(arguments.baseline, arguments.max_regression, arguments.factor, scenario)
    from gapmeter.locust_page import ui
    from gapmeter.locustfile import checked
    from gapmeter.run import Options, run_repeats
    from gapmeter.sweep import run_sweep
    from gapmeter.worker import workers

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
        command=os.environ.get("GAPMETER_AGAIN") or shlex.join(["gapmeter", *_without_key(arguments.words)]),
    )
    if scenario.sweep:
        return _publish(arguments, lambda: [run_sweep(arguments.scenario, overrides, options, arguments.resume)])

    def results() -> Iterable[RunResult]:
        runs = run_repeats(arguments.scenario, overrides, options)
        if baseline is None:
            return runs
        return held_against(runs, scenario.repeat, baseline, arguments.runs, quiet=arguments.quiet)

    return _publish(arguments, results)


def _capacity(arguments: argparse.Namespace) -> int:
    from gapmeter.resolve import resolve
    from gapmeter.wanted import read_wanted

    overrides = _overrides(arguments)
    wanted = read_wanted(arguments)
    scenario = resolve(arguments.scenario, overrides)  # a mistake is told before a second goes into imports
    from gapmeter.capacity import check_scenario, find_capacity
    from gapmeter.run import Options

    check_scenario(scenario, arguments.scenario)
    options = Options(
        runs=arguments.runs,
        probe_dir=arguments.probe_dir,
        api_key=arguments.api_key or os.environ.get("GAPMETER_API_KEY"),
        quiet=arguments.quiet,
        command=os.environ.get("GAPMETER_AGAIN") or shlex.join(["gapmeter", *_without_key(arguments.words)]),
    )
    result = find_capacity(arguments.scenario, overrides, options, wanted)
    print(json.dumps(result.summary) if arguments.json else result.folder, flush=True)
    return _say_exit(result.exit_code) if arguments.quiet else result.exit_code


def _worker(arguments: argparse.Namespace) -> int:
    from gapmeter.worker import serve

    return serve(arguments.master, arguments.cores, arguments.api_key or os.environ.get("GAPMETER_API_KEY"))


def _without_key(words: Sequence[str]) -> list[str]:
    """The command line for the manifest: a key has no place in a run's folder."""
    kept: list[str] = []
    hidden = False
    for word in words:
        if not hidden and not word.startswith("--api-key"):
            kept.append(word)
        hidden = word == "--api-key"
    return kept


def _overrides(arguments: argparse.Namespace) -> list[str]:
    """Named flags as the ``KEY=VALUE`` that they stand for, before those that the user wrote out."""
    written: list[str] = arguments.overrides
    named = [
        ("server.engine", "attach" if arguments.url else arguments.engine),
        ("server.url", arguments.url),
        ("server.model", arguments.model),
        ("server.tokenizer", arguments.tokenizer),
        ("load.generator", "locust" if getattr(arguments, "locustfile", None) else None),
    ]
    return [f"{key}={json.dumps(value)}" for key, value in named if value] + written


def _report(arguments: argparse.Namespace) -> int:
    from gapmeter.run import report_again

    quiet, definitions = arguments.quiet, arguments.definitions
    return _publish(arguments, lambda: [report_again(arguments.run, quiet=quiet, definitions=definitions)])


def _publish(arguments: argparse.Namespace, results: Callable[[], Iterable[RunResult]]) -> int:
    """Standard output is for programs: a line with each run's folder, or one document; the worst exit code."""
    from gapmeter.publish import Outlets, print_document, publish
    from gapmeter.regression import annotate, wants_annotations

    outlets = Outlets(arguments.json, arguments.junit, arguments.markdown)
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
    meaning = "SLO missed, or a regression" if judged and code == errors.SLO_MISSED else ""
    last = arguments.quiet or annotated or judged or len(done) > 1  # else a single summary ends with it
    return _say_exit(code, meaning) if last else code


def _compare(arguments: argparse.Namespace) -> int:
    from gapmeter.compare import compare_as_asked

    return _say_exit(compare_as_asked(arguments, shlex.join(["gapmeter", *arguments.words])))


def _export(arguments: argparse.Namespace) -> int:
    from gapmeter.export import export

    a = arguments
    return export(a.run, csv=a.csv, prometheus=a.prometheus, otlp=a.otlp, perfetto=a.perfetto)


def _verify(arguments: argparse.Namespace) -> int:
    from gapmeter.verify import verify

    code = verify(arguments.run, as_json=arguments.json)
    if code != errors.OK:
        print(f"exit={code} not what its records say", file=sys.stderr)
    return code


def _archive(arguments: argparse.Namespace) -> int:
    from gapmeter.archive import archive

    print(archive(arguments.run, arguments.output))
    return errors.OK


def _list_runs(arguments: argparse.Namespace) -> int:
    from gapmeter.history import print_runs

    return print_runs(arguments.runs, as_json=arguments.json)


def _sql(arguments: argparse.Namespace) -> int:
    from gapmeter.sql import print_answer

    return print_answer(arguments.query, arguments.runs, form=arguments.form)


def _explain(arguments: argparse.Namespace) -> int:
    from gapmeter.explain import explain

    return explain(arguments.run, arguments.group, arguments.against, arguments.metric, as_json=arguments.json)


def _ui(arguments: argparse.Namespace) -> int:
    from gapmeter.ui import serve_ui

    return serve_ui(arguments.runs, arguments.port)


def _config(arguments: argparse.Namespace) -> int:
    from gapmeter.resolve import explain_config

    for key, value, source in explain_config(arguments.scenario, arguments.overrides):
        print(f"{key:<32} {json.dumps(value):<36} {source}")
    return errors.OK


def _scenarios(_: argparse.Namespace) -> int:
    from scenarios import list_scenarios

    for name, summary in list_scenarios():
        print(f"{name:<16} {summary}")
    return errors.OK


def _calibrate(arguments: argparse.Namespace) -> int:
    from gapmeter.calibrate import run_calibration

    return run_calibration(arguments.generator, quick=arguments.quick, as_json=arguments.json)


def _doctor(arguments: argparse.Namespace) -> int:
    from gapmeter.doctor import print_findings

    return print_findings(as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
