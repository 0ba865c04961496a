"""Flags that several commands share, and how what is written after them is read."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
from pathlib import Path
from typing import TypeAlias

from gapmeter import errors
from gapmeter.analysis.command import Command
from gapmeter.errors import UserError

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
DEFAULT_PORT = 5557


def add_server(parser: argparse.ArgumentParser) -> None:
    """Which server, instead of the scenario's."""
    parser.add_argument("--engine", help="server.engine: transformers, vllm, simulated or attach")
    parser.add_argument("--url", help="attach to the OpenAI-compatible server there (means engine attach)")
    parser.add_argument("--model", help="server.model: builtin:NAME, a folder or a hub id; attached: its name there")
    parser.add_argument("--tokenizer", help="attached: folder or hub id of the served model's tokenizer")
    parser.add_argument("--probe-dir", type=Path, help="attached: the folder that the server's probe writes into")
    parser.add_argument("--api-key", help="attached: sent as a bearer token (or GAPMETER_API_KEY)")


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """``--set``, for whatever takes a scenario."""
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help="override any key"
    )


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Where results go beside the run's folder."""
    parser.add_argument("--json", action="store_true", help="summary.json on standard output instead of the folder")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="write a JUnit file, one case per SLO")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write a summary for a pull request")
    parser.add_argument("--quiet", action="store_true", help="no progress and no summary on standard error")
    parser.add_argument("--annotations", action="store_true", help="GitHub's, of what failed (there: always)")


def add_runs_folder(parser: argparse.ArgumentParser, what: str = "where the runs' folders are (default: runs)") -> None:
    """``--runs``."""
    parser.add_argument("--runs", type=Path, default=Path("runs"), help=what)


def overrides(arguments: argparse.Namespace) -> list[str]:
    """Named flags as the ``KEY=VALUE`` that they stand for, before those that the user wrote out.

    Raises UserError for one that is there and says nothing, as a variable that was never set does: what it should have
    named must not silently be something else.
    """
    for flag in ("engine", "url", "model", "tokenizer"):
        if getattr(arguments, flag) == "":
            raise UserError(f"--{flag} is empty; write what it stands for, or leave it out", errors.USAGE)
    written: list[str] = arguments.overrides
    named = [
        ("server.engine", "attach" if arguments.url else arguments.engine),
        ("server.url", arguments.url),
        ("server.model", arguments.model),
        ("server.tokenizer", arguments.tokenizer),
        ("load.generator", "locust" if getattr(arguments, "locustfile", None) else None),
    ]
    return [f"{key}={json.dumps(value)}" for key, value in named if value] + written


def command_of(arguments: argparse.Namespace) -> Command:
    """What repeats this command: as it was typed, or the ``make`` that typed it; a key has no place in it."""
    typed = os.environ.get("GAPMETER_AGAIN")
    return (Command.parse(typed) if typed else Command(("gapmeter", *arguments.words))).without("--api-key")


def api_key_of(arguments: argparse.Namespace) -> str | None:
    """From the flag, else the environment."""
    return arguments.api_key or os.environ.get("GAPMETER_API_KEY")


def seconds_of(flag: str, text: str, *, least_s: float = 0.0, most_s: float = math.inf) -> float:
    """A time as scenarios write it, or a number of seconds. Raises UserError."""
    from gapmeter.scenarios.errors import BadValue
    from gapmeter.scenarios.values import read_duration

    try:
        value_ns = read_duration(float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else text)
    except BadValue as error:
        raise UserError(f"{flag} {error}", errors.USAGE) from error
    if not least_s <= value_ns / 1e9 <= most_s:
        upto = "" if math.isinf(most_s) else f" to {most_s / 3600:g}h"
        raise UserError(f"{flag} {text}: write a time from {least_s:g}s{upto}", errors.USAGE)
    return float(value_ns / 1e9)


def share_of(flag: str, text: str, least: float, most: float) -> float:
    """Per cent as a fraction. Raises UserError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
    value = float(found[1]) / 100 if found else math.nan
    if not least <= value <= most:
        raise UserError(f"{flag} {text}: write per cent from {100 * least:g}% to {100 * most:g}%", errors.USAGE)
    return value


def rate_of(flag: str, text: str) -> float:
    """Requests a second. Raises UserError."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1e9:
        raise UserError(f"{flag} {text}: not a rate; write requests per second above 0, for instance 50", errors.USAGE)
    return value


def port_of(flag: str, port: int) -> int:
    """A port, or 0 for any free one. Raises UserError."""
    if not 0 <= port < 65536:
        raise UserError(f"{flag} {port} is not a port; write one from 1 to 65535, or 0 for any", errors.USAGE)
    return port


def address_of(flag: str, text: str) -> tuple[str, int]:
    """HOST, or HOST:PORT. Raises UserError."""
    host, colon, port = text.rpartition(":") if text.count(":") == 1 else (text, "", "")
    if not host or (colon and not (port.isdecimal() and int(port[:9]) < 65536)):
        raise UserError(
            f"{flag} {text} is not an address; write HOST or HOST:PORT, for instance 10.0.0.5:{DEFAULT_PORT}",
            errors.USAGE,
        )
    return host, int(port) if port else DEFAULT_PORT


def cores_of(text: str) -> tuple[int, ...]:
    """Numbers of cores that this process may use, with commas between. Raises UserError."""
    usable = os.sched_getaffinity(0)
    if not all(part.isdecimal() and int(part[:9]) in usable for part in text.split(",") if text):
        raise UserError(f"--cores {text}: this machine has cores {', '.join(map(str, sorted(usable)))}", errors.USAGE)
    return tuple(int(part) for part in text.split(",") if text)
