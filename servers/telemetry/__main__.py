"""``python -m gapmeter.servers.telemetry SPEC``: the sampler process."""

import sys

from gapmeter.servers.telemetry.sampler import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
