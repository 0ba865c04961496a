"""The command line: flags in, one library call, an exit code out."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from gapmeter import errors
from gapmeter.commands import measure, recorded
from gapmeter.errors import UserError, reason_of, say_exit
from gapmeter.signals import ignore_signals, interrupt_on_signals, output_is_gone, tolerate_lost_stderr


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. A user's mistake is one sentence on standard error.

    A failure's last line there names its exit code, since ``make`` turns every failure into 2.
    """
    own = argv is None  # a process of its own, not a call from Python
    if own:
        interrupt_on_signals()
        tolerate_lost_stderr()
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        if own:
            ignore_signals()
        print("gapmeter: interrupted", file=sys.stderr)
        return say_exit(errors.INTERRUPTED)
    finally:
        if own:
            ignore_signals()


def _run(words: list[str]) -> int:
    arguments = parser().parse_args(words)
    arguments.words = words
    try:
        code: int = arguments.call(arguments)
        sys.stdout.flush()
    except UserError as error:
        if arguments.debug:
            raise
        print(f"gapmeter: {error}", file=sys.stderr)
        code = say_exit(error.exit_code)
    except OSError as error:
        if isinstance(error, BrokenPipeError) or output_is_gone():
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is buffered has nowhere to go
            print("gapmeter: whoever read the standard output has left", file=sys.stderr)
        elif arguments.debug or error.filename is None:
            raise
        else:  # a disk, a name or a right that no command foresaw: about the user's file, if it names one
            text = f"gapmeter: {str(error.filename)[:200]}: {reason_of(error)}; name another, or mend that"
            print(text, file=sys.stderr)
        code = say_exit(errors.USAGE)
    return code


def parser() -> argparse.ArgumentParser:
    """Every command with its flags; what one parses has ``call``, which takes it and returns an exit code."""
    whole = argparse.ArgumentParser(prog="gapmeter", description="Where every request's milliseconds went.")
    whole.set_defaults(debug=False)
    commands = whole.add_subparsers(required=True, metavar="COMMAND")
    for group in (measure, recorded):
        group.add(commands)
    for command in (whole, *commands.choices.values()):
        command.allow_abbrev = False  # an abbreviated --api-key would pass for another word
        command.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks")
    return whole


if __name__ == "__main__":
    sys.exit(main())
