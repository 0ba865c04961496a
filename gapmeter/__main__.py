"""``python -m gapmeter``."""

import sys

from gapmeter.signals import be_deaf, hear


def program() -> int:
    """The command as a process of its own, which hears what ends it from its first moment on."""
    hear()
    try:
        from gapmeter.cli import main

        return main()
    except KeyboardInterrupt:  # between the import and the call
        be_deaf()
        return 105


sys.exit(program())
