"""``python -m gapmeter``."""

import sys

from gapmeter.signals import ignore_signals, interrupt_on_signals


def program() -> int:
    """The command as a process of its own, which hears what ends it from its first moment on."""
    interrupt_on_signals()
    try:
        from gapmeter.cli import main

        return main()
    except KeyboardInterrupt:  # between the import and the call
        ignore_signals()
        return 105


sys.exit(program())
