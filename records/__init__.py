"""The shared language: record types, and the files of a run's folder.

The record types and their writer live in the probe's own distribution, since servers that are not ours need them
without the rest of gapmeter; they are re-exported here for everyone else.
"""

from gapmeter_probe.records import SCHEMA_VERSION, EntryFlag, Kind, Outcome, Span, StepFlag
from gapmeter_probe.writer import RecordWriter

from gapmeter.records.folder import RunFolder
from gapmeter.records.reader import RecordFile, read_records

__all__ = [
    "SCHEMA_VERSION", "EntryFlag", "Kind", "Outcome", "RecordFile", "RecordWriter", "RunFolder", "Span", "StepFlag",
    "read_records",
]  # fmt: skip
