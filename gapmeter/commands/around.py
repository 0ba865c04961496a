"""Commands around a measurement: what scenarios say, and what this machine can do."""

from __future__ import annotations

import argparse
import json

from gapmeter import errors
from gapmeter.commands.flags import Commands, add_overrides


def add(commands: Commands) -> None:
    """Their words and flags."""
    _add_config(commands.add_parser("config", help="print each value of a scenario and where it came from"))
    scenarios = commands.add_parser("scenarios", help="list the scenarios by name, a line each")
    scenarios.set_defaults(call=_scenarios)
    doctor = commands.add_parser("doctor", help="say what this machine can and cannot do, with remedies")
    doctor.add_argument("--json", action="store_true", help="one JSON document on standard output")
    doctor.set_defaults(call=_doctor)
    _add_calibrate(commands.add_parser("calibrate", help="measure the load tester itself on this machine"))


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("scenario", help="a scenario's name or file")
    add_overrides(parser)
    parser.set_defaults(call=_config)


def _add_calibrate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="half a minute instead of four, and less exact")
    parser.add_argument("--generator", action="append", default=[], help="only this: asyncio or locust")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.set_defaults(call=_calibrate)


def _config(arguments: argparse.Namespace) -> int:
    from gapmeter.study.resolve import explain_config

    for key, value, source in explain_config(arguments.scenario, arguments.overrides):
        print(f"{key:<32} {json.dumps(value):<36} {source}")
    return errors.OK


def _scenarios(_: argparse.Namespace) -> int:
    from gapmeter.scenarios import list_scenarios

    for name, summary in list_scenarios():
        print(f"{name:<16} {summary}")
    return errors.OK


def _doctor(arguments: argparse.Namespace) -> int:
    from gapmeter.machine.doctor import print_findings

    return print_findings(as_json=arguments.json)


def _calibrate(arguments: argparse.Namespace) -> int:
    from gapmeter.machine.calibration import run_calibration

    return run_calibration(arguments.generator, quick=arguments.quick, as_json=arguments.json)
