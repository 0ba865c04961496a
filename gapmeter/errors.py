"""What can end a command, each with the exit code that says so."""

from __future__ import annotations

import contextlib
import errno
import sys
from collections.abc import Iterator

OK = 0
USAGE = 2
NOT_VALID = 98
SLO_MISSED = 99
BAD_SCENARIO = 104
INTERRUPTED = 105
UNREACHABLE = 106

MEANING = {
    OK: "every SLO met",
    USAGE: "wrong usage",
    NOT_VALID: "not valid as a measurement, or undecided",
    SLO_MISSED: "SLO missed",
    BAD_SCENARIO: "bad scenario",
    INTERRUPTED: "interrupted",
    UNREACHABLE: "target unreachable or never ready",
}


class UserError(Exception):
    """A mistake that the user can fix: one sentence with the remedy, and the exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def exit_words(code: int, meaning: str = "") -> str:
    """A command's last line: its exit code, and what that means."""
    return f"exit={code} {meaning or MEANING[code]}"


def say_exit(code: int, meaning: str = "") -> int:
    """The last line of a failure on standard error; returns the code."""
    if code != OK:
        print(exit_words(code, meaning), file=sys.stderr)
    return code


def reason_of(error: OSError) -> str:
    """The system's words for it."""
    return error.strerror or str(error)


def remedy_of(error: OSError) -> str:
    """What to do first when something could not be written."""
    return "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "fix that"


@contextlib.contextmanager
def unless_refused(what: str, exit_code: int = USAGE) -> Iterator[None]:
    """Raises UserError, ``what``, the file and the system's reason, where a disk, a name or a right is in the way."""
    try:
        yield
    except OSError as error:
        where = "" if error.filename is None or str(error.filename) in what else f"{error.filename}: "
        raise UserError(f"{what}: {where}{reason_of(error)}", exit_code) from error
