"""Whose each nanosecond of a request was: from stamps to ledgers, bands and the tail."""
