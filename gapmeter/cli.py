"""The command line: flags in, one library call, an exit code out."""

from __future__ import annotations

import argparse
import errno
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from gapmeter import errors
from gapmeter.commands import measure, recorded
from gapmeter.errors import UserError, reason_of, remedy_of, say_exit
from gapmeter.options import tell
from gapmeter.signals import LossyOutput

# Of a file system, where a write that finds it out names no file.
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE)


def main(words: Sequence[str], output: LossyOutput | None = None) -> int:
    """Run one command; returns its exit code. A user's mistake is one sentence on standard error.

    A failure's last line there names its exit code, since ``make`` turns every failure into 2. ``output``: where
    standard output goes.
    """
    arguments = argparse.Namespace(debug=False)  # until they have been read
    try:
        arguments = parser().parse_args(words)
        arguments.words = list(words)
        code: int = arguments.call(arguments)
        sys.stdout.flush()
        if output is not None and output.lost is not None:
            why = "the reader closed it" if isinstance(output.lost, BrokenPipeError) else reason_of(output.lost)
            tell(f"standard output has not been written: {why}")
            code = code if arguments.judges else say_exit(errors.USAGE, "the answer was not written")
    except (UserError, MemoryError, OSError) as error:
        if arguments.debug or (told := _sentence(error)) is None:
            raise
        tell(told[0])
        code = say_exit(told[1])
    return code


def _sentence(error: UserError | MemoryError | OSError) -> tuple[str, int] | None:
    """What is said of a failure, with its exit code; None of a bug."""
    if isinstance(error, UserError):
        return str(error), error.exit_code
    if isinstance(error, MemoryError):
        return "not enough memory; use a smaller run, or a larger machine", errors.NOT_VALID
    if error.filename:  # a disk, a name or a right that no command foresaw: about the user's file
        return f"{str(error.filename)[:200]}: {reason_of(error)}; choose another, or fix that", errors.USAGE
    return (f"{reason_of(error)}; {remedy_of(error)}", errors.NOT_VALID) if error.errno in _DISK else None


class _Parser(argparse.ArgumentParser):
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """A command tells of what it does not know itself, since only it knows its own flags."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            torn = next((key for key in getattr(found, "overrides", ()) if "=" not in key), None)
            if torn and not unknown[0].startswith("-"):
                raise UserError(f"--set {torn} {unknown[0]}: write --set {torn}={unknown[0]}", errors.USAGE)
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Raises UserError, with what to write in place of a flag that is a scenario's key, or that has a typo."""
        from gapmeter.scenarios.errors import nearest
        from gapmeter.scenarios.model import KEYS

        _, _, unknown = message.partition("unrecognized arguments: ")
        words = [word[2:].partition("=")[0] for word in unknown.split() if word.startswith("--")]
        flags = {flag[2:]: flag for flag in self._option_string_actions if flag.startswith("--")}
        leaves = {word.replace("-", "_") for word in words} if "set" in flags else set()
        meant = ", ".join(f"--set {key}=VALUE" for key in KEYS if key.rpartition(".")[2] in leaves)
        close = next((flags[flag] for word in words if (flag := nearest(word, flags))), None)
        if chosen := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            close = nearest(chosen[1], re.findall(r"[\w-]+", chosen[2]))
        remedy = f"{self.prog} --help lists the {'flags' if self._subparsers is None else 'commands'}"
        if message.endswith("required: scenario"):
            remedy = "gapmeter scenarios lists them"
        elif meant:
            remedy = f"to set a scenario's key write {meant}"
        elif close:
            remedy = f"did you mean {close}?"
        raise UserError(f"{message}; {remedy}", errors.USAGE)


class _Version(argparse.Action):
    """Prints which gapmeter this is, and ends; what tells it is imported only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from gapmeter.analysis.provenance import made_by

        made = made_by()
        print(f"gapmeter {made.gapmeter} (analysis {made.analysis})")
        parser.exit()


_EXAMPLES = """\
examples:
  gapmeter run smoke --engine simulated               a first run, in seconds
  gapmeter run chat-p99 --url http://127.0.0.1:8000   a server that already runs
  gapmeter run chat-p99 --set load.rate=4             another value for a key
  gapmeter capacity chat-p99 --engine vllm            the rate that it holds
  gapmeter compare runs/A runs/B                      two runs

gapmeter COMMAND --help: a command's flags. gapmeter config SCENARIO: its keys.
A failure's last line has its exit code: 99 an SLO was missed, 98 not valid as a
measurement or undecided, 104 a mistake in the scenario, 106 no server.
"""


def parser() -> argparse.ArgumentParser:
    """Every command with its flags; what one parses has ``call``, which takes it and returns an exit code."""
    whole: argparse.ArgumentParser = _Parser(
        prog="gapmeter", description="A load tester for LLM servers: where every request's milliseconds went.",
        epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    whole.add_argument("--version", action=_Version, nargs=0, help="print the version, with the hash of the analysis")
    whole.set_defaults(debug=False, judges=False)  # judges: what it says on standard output is not what it is for
    commands = whole.add_subparsers(required=True, metavar="COMMAND")
    for add in (*measure.COMMANDS, *recorded.COMMANDS):
        add(commands)
    for command in (whole, *commands.choices.values()):
        command.allow_abbrev = False  # an abbreviated --api-key would pass for another word
        command.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks")
    return whole
