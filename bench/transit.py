"""Which class of interval holds a ledger's strict residual, in milliseconds, to the first and to the last token.

``python -m bench.transit RUN`` prints it for a run that lies on the disk.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from gapmeter.analysis.ledger.critical_path import Intervals, sweep
from gapmeter.analysis.ledger.intervals import CLASSES, Client, build
from gapmeter.analysis.ledger.trace import MISSING, Events, Trace, read_trace
from gapmeter.analysis.results import Manifest
from gapmeter.analysis.tables import read_requests
from gapmeter.records import RunFolder

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
STRICT = (*(c.name for c in CLASSES if c.transit), "unexplained")


def transit_table(path: Path, *, everything: bool = False) -> dict[str, list[dict[str, Any]]]:
    """For ``first_token`` and ``last_token``: one row a class of kind transit (or every class), largest p99 first.

    A row has ``name``, ``p50_ms``, ``p99_ms``, ``mean_ms``, and ``worst_percent_ms``: its mean over the 1 % of requests
    (at least one) with the largest strict share, which add up to theirs. Only measured requests count.
    """
    requests, trace, good = _read(path)
    return {
        event: _rows(*_intervals(requests, trace, good, event), everything) for event in ("first_token", "last_token")
    }


def last_tokens(path: Path) -> tuple[Intervals, Events]:
    """Every activity of each measured request that succeeded, up to its last token."""
    return _intervals(*_read(path), "last_token")


def _read(path: Path) -> tuple[pd.DataFrame, Trace | None, Ints]:
    folder = RunFolder(path)
    requests, _ = read_requests(folder, Manifest.read(folder.path).plan)
    good = requests[(requests["outcome"] == "ok") & requests["measured"]].index.to_numpy(np.int64)
    return requests, read_trace(folder.record_files(folder.probe), requests["request_id"].tolist()), good


def _intervals(requests: pd.DataFrame, trace: Trace | None, good: Ints, event: str) -> tuple[Intervals, Events]:
    client = Client(*(_integers(requests, f"{s}_ns") for s in ("due", "connect_start", "connect_end", "write", "sent")))
    n = np.ones(len(good), np.int64) if event == "first_token" else _integers(requests, "output_tokens")[good]
    events = Events(good, n, client.due[good], _integers(requests, f"{event}_ns")[good])
    return build(trace, client, events, frozenset()).intervals, events


def _rows(intervals: Intervals, events: Events, everything: bool) -> list[dict[str, Any]]:
    owned, _ = sweep(intervals, len(events), len(CLASSES))
    total = (events.end - events.start).astype(np.float64)
    times: dict[str, Floats] = {c.name: owned[:, i].astype(np.float64) for i, c in enumerate(CLASSES)}
    times["unexplained"] = total - owned.sum(axis=1)
    share = np.sum([times[name] for name in STRICT], axis=0) / np.maximum(total, 1.0)
    worst = np.argsort(share)[-max(1, len(share) // 100) :]
    rows = [_row(name, times[name], worst) for name in (times if everything else STRICT)]
    return sorted(rows, key=lambda row: -row["p99_ms"])


def _row(name: str, ns: Floats, worst: Ints) -> dict[str, Any]:
    p50, p99 = np.percentile(ns, [50, 99]) / 1e6
    return {
        "name": name,
        "p50_ms": float(p50),
        "p99_ms": float(p99),
        "mean_ms": float(ns.mean()) / 1e6,
        "worst_percent_ms": float(ns[worst].mean()) / 1e6,
    }


def _integers(requests: pd.DataFrame, name: str) -> Ints:
    return np.asarray(requests[name].fillna(MISSING), dtype=np.int64)


def print_transit(table: dict[str, list[dict[str, Any]]]) -> None:
    """The table on standard output."""
    for event, rows in table.items():
        print(f"to the {event.replace('_', ' ')}, ms{'p50':>15}{'p99':>10}{'mean':>10}{'worst 1 %':>12}")
        for row in rows:
            print(
                f"  {row['name']:<26}{row['p50_ms']:>8.3f}{row['p99_ms']:>10.3f}{row['mean_ms']:>10.3f}"
                f"{row['worst_percent_ms']:>12.3f}"
            )


def main(arguments: Sequence[str]) -> int:
    """``RUN [--all]``: all classes, not only those of kind transit."""
    print_transit(transit_table(Path(arguments[0]), everything="--all" in arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
