"""One generator process that issues through Locust: ``-m gapmeter.loadgen.locust SPEC``, as ``loadgen.worker`` is."""

from __future__ import annotations

import os
import sys

from gapmeter.loadgen import worker

_MISSING = "Locust is not installed in this environment: make setup, or pip install 'gapmeter[locust]'"


def main(arguments: list[str]) -> int:
    """Entry point; the exit codes of ``loadgen.worker``."""
    os.environ["LOCUST_SKIP_MONKEY_PATCH"] = "1"  # nothing here blocks, and a thread that readies pages must be one
    try:
        from gapmeter.loadgen.locust.generator import work
    except ModuleNotFoundError as error:
        if error.name not in ("gevent", "locust"):
            raise
        return worker.leave(worker.Exit.BAD_SPEC, _MISSING)
    return worker.main(arguments, work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
