"""When a server's own processes wait for CPU cores often enough to say so."""

from __future__ import annotations

import pandas as pd

from gapmeter.analysis.numbers import share
from gapmeter.analysis.results.run import RunWarning
from gapmeter.analysis.stages import column

NOTABLE = 0.03  # of all time to first tokens


def core_warning(rows: pd.DataFrame) -> RunWarning | None:
    """A warning when waiting for a core is a notable part of the time to first tokens; ``rows`` as in a Ledger."""
    first = rows[rows["event"] == "first_token"]
    total = float(first["total_ns"].sum())
    waited = float(first[column("core_wait")].sum()) if column("core_wait") in first else 0.0
    if not total or waited / total < NOTABLE:
        return None
    return RunWarning(
        code="cores",
        text=f"{share(waited / total)} of the time to first tokens, the server's own processes waited for a CPU core",
        cause="more of them wanted to run than it has cores; a faster device would not shorten this",
        flag="give the server more cores",
        touches=("core_wait",),
    )
