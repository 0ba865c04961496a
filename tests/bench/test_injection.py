from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from bench import injection


def test_delays_of_an_earlier_run_with_the_same_numbers_are_not_this_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes of one engine log all its runs into one file each."""
    case = injection.Case("tokenize", "busy", ("tokenize",), "last_token", False, 6_000)
    requests = pd.DataFrame({"request_id": ["gap-x-000000"], "due_ns": [40_000]})
    monkeypatch.setattr(injection, "read_requests", lambda *_: (requests, None))
    monkeypatch.setattr(injection, "Manifest", SimpleNamespace(read=lambda _: SimpleNamespace(plan=None)))
    monkeypatch.setattr(injection, "LedgerInputs", SimpleNamespace(of=lambda *_: None))
    monkeypatch.setattr(injection, "make_ledger", lambda _: None)
    monkeypatch.setattr(injection.Measured, "_trace", lambda *_: None)
    rows = np.array([(1, 7, 1_000, 7_000, 6_000), (1, 1, 50_000, 56_000, 6_000)], injection._ADDED)
    (tmp_path / "added-1").write_bytes(rows.tobytes())
    assert injection.Measured(tmp_path, tmp_path, [case], [1]).put_in_ns(case) == 6_000
