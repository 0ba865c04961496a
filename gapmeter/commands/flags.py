"""Flags that several commands share, how what is written after them is read, and what outputs leave for programs."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from gapmeter import errors
from gapmeter.errors import UserError, reason_of, say_exit
from gapmeter.options import check_rate, check_seconds, check_share, tell
from gapmeter.report.command import Command
from gapmeter.report.printable import printable

if TYPE_CHECKING:  # what takes long to import comes after the user's mistakes have been reported
    from gapmeter.report.export.junit import Suite
    from gapmeter.runs.run import Conclusion

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
DEFAULT_PORT = 5557
REGRESSED = "regressed against its baseline"  # what exit code 99 means of a gate
_ADDRESS = re.compile(r"(?:\[(?P<ipv6>[^][]+)\]|(?P<host>[^][:]+|[^][:]*:[^][:]*:[^][]*))(?::(?P<port>[0-9]{1,5}))?")


def add_server(parser: argparse.ArgumentParser) -> None:
    """Which server, instead of the scenario's."""
    parser.add_argument("--engine", help="the server: transformers, vllm, simulated or attach (key server.engine)")
    parser.add_argument("--url", help="test the OpenAI-compatible server that runs there (engine attach)")
    parser.add_argument("--model", help="builtin:NAME, a folder or a hub id; with --url: the name of the model there")
    parser.add_argument("--tokenizer", help="with --url: folder or hub id of the served model's tokenizer")
    parser.add_argument(
        "--probe-dir", type=folder_of, help="with --url: the folder that the server's probe writes into"
    )
    parser.add_argument("--api-key", help="with --url: sent as a bearer token; GAPMETER_API_KEY is not seen in ps")


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """``--set``, for whatever takes a scenario."""
    what = "override any key of the scenario"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help=what)


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Where results go beside the run's folder."""
    add = parser.add_argument
    add("--json", action="store_true", help="summary.json on standard output instead of the folder")
    add("--junit", type=Path, metavar="FILE", help="write a JUnit file, one case per SLO")
    add("--markdown", type=Path, metavar="FILE", help="write a summary for a pull request")
    add("--quiet", action="store_true", help="no progress and no summary on standard error")
    add("-v", "--verbose", action="store_true", help="print the whole summary, not only the first screen")
    add("--annotations", action="store_true", help="print GitHub annotations of what failed (default: on GitHub)")


def add_runs_folder(parser: argparse.ArgumentParser, what: str = "where the runs' folders are (default: runs)") -> None:
    """``--runs``."""
    parser.add_argument("--runs", type=folder_of, default=Path("runs"), help=what)


def overrides(arguments: argparse.Namespace) -> list[str]:
    """Named flags as the ``KEY=VALUE`` that they stand for, before those that the user wrote out.

    Raises UserError for one that is there and says nothing, as a variable that was never set does: what it should have
    named must not silently be something else.
    """
    for flag in ("engine", "url", "model", "tokenizer"):
        if getattr(arguments, flag) == "":
            raise UserError(f"--{flag} is empty; give it a value, or leave it out", errors.USAGE)
    if arguments.url and arguments.engine not in (None, "attach"):
        text = f"--engine {arguments.engine} launches a server, and --url names one that runs; leave out one"
        raise UserError(text, errors.USAGE)
    written: list[str] = arguments.overrides
    named = [
        ("server.engine", "attach" if arguments.url else arguments.engine),
        ("server.url", arguments.url),
        ("server.model", arguments.model),
        ("server.tokenizer", arguments.tokenizer),
        ("load.generator", "locust" if getattr(arguments, "locustfile", None) else None),
    ]
    return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in named if value] + written


def sweep_of(over: Sequence[str]) -> str:
    """``--over KEY=VALUE,VALUE …`` as the sweep that it stands for. Raises UserError."""
    for each in over:
        if not re.fullmatch(r"\s*[\w.-]+\s*=.*\S.*", each):
            raise UserError(f"--over {each}: write KEY=VALUE,VALUE, for instance server.max_batch=4,8", errors.USAGE)
    grid = (f"{key.strip()}: [{values}]" for key, _, values in (each.partition("=") for each in over))
    return f"sweep={{{', '.join(grid)}}}"


def command_of(arguments: argparse.Namespace) -> Command:
    """What repeats this command, as it was typed, with what the environment set; a key has no place in it.

    Its scenario stands behind the verb, where ``Command`` looks for it.
    """
    name = getattr(arguments, "scenario", None) or getattr(arguments, "run", None)
    words = ["gapmeter", *(word for word in arguments.words if word != "--")]  # behind which flags are none
    spelled = (name, f"--run={name}")
    at = next((at for at, word in enumerate(words) if at > 1 and word in spelled), None)
    if name and at is not None and hasattr(arguments, "overrides"):
        if hasattr(arguments, "scenario") and words.count(name) == 1 and not words[1].startswith("-"):
            words.insert(2, words.pop(at))
            at = 2
        # What was typed wins over it.
        words[at + 1 : at + 1] = [word for each in _from_environment(name, arguments) for word in ("--set", each)]
    return Command(tuple(words)).without("--api-key")


def _from_environment(scenario: str, arguments: argparse.Namespace) -> list[str]:
    """The keys of a scenario that have their values from an environment variable."""
    from gapmeter.scenarios.errors import ScenarioError
    from gapmeter.scenarios.model import KEYS
    from gapmeter.scenarios.read import environment_name, provenance

    names = {key: environment_name(key) for key in KEYS}
    if not any(os.environ.get(name, "").strip() for name in names.values()):
        return []
    flags = overrides(arguments) if hasattr(arguments, "engine") else arguments.overrides
    try:
        settings = provenance(scenario, flags)
    except ScenarioError:  # told where the scenario is read
        return []
    return [f"{each.key}={os.environ[each.source]}" for each in settings if each.source == names[each.key]]


def api_key_of(arguments: argparse.Namespace) -> str | None:
    """The API key from the flag, else from the environment."""
    from gapmeter.records.process import API_KEY

    return arguments.api_key or os.environ.get(API_KEY)


def seconds_of(flag: str, text: str, *, least_s: float = 0.0, most_s: float = math.inf) -> float:
    """A time as scenarios write it, or a number of seconds. Raises UserError."""
    from gapmeter.scenarios.errors import BadValue
    from gapmeter.scenarios.values import read_duration

    try:
        value_ns = read_duration(float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else text)
    except BadValue as error:
        raise UserError(f"{flag} {error}", errors.USAGE) from error
    check_seconds(flag, value_ns / 1e9, text, (least_s, most_s))
    return float(value_ns / 1e9)


def share_of(flag: str, text: str) -> float:
    """Per cent as a fraction, of a flag in ``SHARES``. Raises UserError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
    value = float(f"{found[1]}e-2") if found else math.nan  # 99.9 over 100 is more than 0.999
    check_share(flag, value, text)
    return value


def rate_of(flag: str, text: str) -> float:
    """Requests a second. Raises UserError."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    check_rate(flag, value, text)
    return value


def port_of(flag: str, port: int) -> int:
    """A port, or 0 for any free one. Raises UserError."""
    if not 0 <= port < 65536:
        raise UserError(f"{flag} {port} is not a port; write one from 1 to 65535, or 0 for any", errors.USAGE)
    return port


def address_of(flag: str, text: str) -> tuple[str, int]:
    """HOST, or HOST:PORT; an IPv6 address bare, or in brackets. Raises UserError."""
    found = _ADDRESS.fullmatch(text)
    host, port = (found["ipv6"] or found["host"], found["port"]) if found else ("", None)
    if not host or int(port or 0) >= 65536:
        raise UserError(
            f"{flag} {text} is not an address; write HOST or HOST:PORT, for instance 10.0.0.5:{DEFAULT_PORT}",
            errors.USAGE,
        )
    return host, int(port) if port else DEFAULT_PORT


def folder_of(text: str) -> Path:
    """A folder; an empty text is none, though Python takes it for the current one."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty; name a folder")
    return Path(text)


def cores_of(text: str) -> tuple[int, ...]:
    """Numbers of cores that this process may use, with commas between. Raises UserError."""
    usable = os.sched_getaffinity(0)
    if not all(part.isdecimal() and int(part[:9]) in usable for part in text.split(",") if text):
        raise UserError(f"--cores {text}: this machine has cores {', '.join(map(str, sorted(usable)))}", errors.USAGE)
    return tuple(int(part) for part in text.split(",") if text)


def check_files(*paths: Path | None) -> None:
    """Before the load, not after it: raises UserError for a file that could not be written."""
    for path in paths:
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise UserError(f"{path} cannot be written: no such folder, or it is one itself", errors.USAGE)
    given = [path.resolve() for path in paths if path is not None]
    if len(set(given)) < len(given):
        raise UserError(f"{given[0]} cannot be both files; write two names", errors.USAGE)


def publish(arguments: argparse.Namespace, conclusions: Callable[[], Iterable[Conclusion[Any]]]) -> int:
    """Each as it comes: its folder as a line at once, the files anew with all so far. Returns the worst exit code.

    Standard output is for programs. The document, where it is asked for, comes at the end, also when a later run fails.
    """
    check_files(arguments.junit, arguments.markdown)
    annotated = arguments.annotations or os.environ.get("GITHUB_ACTIONS") == "true"
    done: list[Conclusion[Any]] = []
    is_written = True
    try:
        for conclusion in conclusions():
            done.append(conclusion)
            if not arguments.json:
                print(conclusion.folder, flush=True)
            if annotated:
                from gapmeter.report.export.junit import annotations_of

                for line in (line for suite in suites_of(conclusion) for line in annotations_of(suite)):
                    print(printable(line), file=sys.stderr)  # which GitHub reads too
            is_written = _write_files(arguments, done)
    finally:
        if done and arguments.json:
            found = [
                each.result.to_json() | ({"regression": r.to_json()} if (r := each.regression) else {}) for each in done
            ]
            json.dump(found[0] if len(found) == 1 else {"runs": found}, sys.stdout)
            print(flush=True)
    code = max(conclusion.exit_code for conclusion in done)
    regression = done[-1].regression
    regressed = regression and regression.status == "REGRESSED" and code == errors.SLO_MISSED
    last = arguments.quiet or annotated or regression or len(done) > 1  # else a single summary ends with it
    code = say_exit(code, REGRESSED if regressed else "") if last else code
    return exit_unless_written(code, is_written=is_written)


def _write_files(arguments: argparse.Namespace, done: list[Conclusion[Any]]) -> bool:
    """The files of all so far: whether they could be written."""
    is_written = True
    if arguments.junit:
        from gapmeter.report.export.junit import junit

        is_written &= write_file(arguments.junit, junit([suite for each in done for suite in suites_of(each)]))
    if arguments.markdown:
        judged_first = sorted(done, key=lambda each: each.regression is None)  # what a pull request is asked for
        is_written &= write_file(arguments.markdown, "\n".join(map(_markdown, judged_first)))
    return is_written


def write_file(path: Path, text: str) -> bool:
    """Write it; where that fails, say so and return False. What the file tells of stands all the same."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        tell(f"{path} cannot be written: {reason_of(error)}")
        return False
    return True


def exit_unless_written(code: int, *, is_written: bool) -> int:
    """The exit code of a command; that of a success changes where one of its files could not be written."""
    return code if code != errors.OK or is_written else say_exit(errors.USAGE, "a file was not written")


def _markdown(conclusion: Conclusion[Any]) -> str:
    from gapmeter.analysis.results import Manifest, RunResult
    from gapmeter.analysis.results.capacity import CapacityResult
    from gapmeter.analysis.results.manifest import SearchManifest, SweepManifest
    from gapmeter.report import capacity, markdown, run, sweep

    result, folder = conclusion.result, conclusion.folder
    if isinstance(result, RunResult):
        return markdown.text(run.brief(result, Manifest.read(folder), conclusion.regression))
    if isinstance(result, CapacityResult):
        return markdown.text(capacity.document(result, SearchManifest.read(folder)))
    return markdown.text(sweep.document(result, SweepManifest.read(folder)))


def suites_of(conclusion: Conclusion[Any]) -> list[Suite]:
    """What it consists of for programs that know test suites only: a run, a sweep's points, or a search's answer."""
    from gapmeter.analysis.results import RunResult
    from gapmeter.analysis.results.capacity import CapacityResult
    from gapmeter.report.export.junit import suite_of_run, suite_of_search, suites_of_sweep

    result = conclusion.result
    if isinstance(result, RunResult):
        return [suite_of_run(result, conclusion.regression)]
    if isinstance(result, CapacityResult):
        return [suite_of_search(result)]
    return suites_of_sweep(result)
