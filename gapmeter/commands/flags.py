"""Flags that several commands share, and what a command line says in the scenario's own words."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from gapmeter import errors
from gapmeter.errors import UserError

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


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


def add_runs_folder(parser: argparse.ArgumentParser) -> None:
    """``--runs``, for whatever reads many of them."""
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where the runs' folders are (default: runs)")


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


def without_key(words: Sequence[str]) -> list[str]:
    """The command line for the manifest: a key has no place in a run's folder."""
    kept: list[str] = []
    hidden = False
    for word in words:
        if not hidden and not word.startswith("--api-key"):
            kept.append(word)
        hidden = word == "--api-key"
    return kept
