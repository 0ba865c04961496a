"""``python -m gapmeter``."""

import sys

from gapmeter.cli import main

sys.exit(main())
