"""gapmeter's probe: binary records of what happens inside a server process. Standard library only.

The package is idle until the environment variable ``GAPMETER_PROBE_DIR`` names a folder to write into.
"""

from gapmeter_probe.records import SCHEMA_VERSION, Kind, Outcome, Span, StepFlag
from gapmeter_probe.writer import RecordWriter, open_probe

__all__ = ["SCHEMA_VERSION", "Kind", "Outcome", "RecordWriter", "Span", "StepFlag", "open_probe"]
