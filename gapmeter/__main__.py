"""``python -m gapmeter``, and the command ``gapmeter``."""

import os
import sys

from gapmeter.errors import INTERRUPTED, say_exit
from gapmeter.signals import ignore_signals, interrupt_on_signals, tolerate_lost_output


def program() -> int:
    """The command as a process of its own, which hears what ends it from its first moment on; returns its exit code."""
    try:
        interrupt_on_signals()
        output = tolerate_lost_output()
        from gapmeter.cli import main

        return main(sys.argv[1:], output)
    except KeyboardInterrupt:
        ignore_signals()
        print("gapmeter: interrupted", file=sys.stderr)
        code = say_exit(INTERRUPTED)
        sys.stdout.flush()
        os._exit(code)  # a library's thread that works on in spite of it would delay or break the interpreter's leaving
    finally:
        ignore_signals()


if __name__ == "__main__":
    sys.exit(program())
