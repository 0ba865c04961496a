"""asyncio and Locust issue one plan to one real engine: they differ by no more than two runs of one of them do."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd

from bench.engine import Engine
from bench.injection import Delayed
from gapmeter.analysis.results import RunResult
from gapmeter.options import Options
from gapmeter.records import RunFolder
from gapmeter.runs.run import Conclusion
from gapmeter.study.resolve import resolve
from gapmeter.study.session import open_session

ORDER = ("asyncio", "locust", "asyncio")
LOAD = (
    "load.arrivals=constant", "load.rate=4", "load.requests=20", "load.warmup=1s", "workload.prompt_tokens=48",
    "workload.output_tokens=8",
)  # fmt: skip
# Beside what the two runs of asyncio differ by: a busy machine's step may be slower in one run as a whole.
SPREADS, SHARE = 3.0, 0.35


def runs(engine: Engine, tmp_path: Path) -> list[Conclusion[RunResult]]:
    """Three runs of the same planned times and lengths on one server, texts of their own."""
    settings, options = [*engine.target, *LOAD], Options(runs=tmp_path, probe_dir=engine.probe_dir, quiet=True)
    with open_session(resolve("smoke", settings), options, home=tmp_path / "server") as session:
        return [session.load(resolve("smoke", [*settings, f"load.generator={name}"])) for name in ORDER]


def medians_ms(run: Conclusion[RunResult]) -> dict[str, float]:
    """Of the requests' own stamps: twenty may be too few for the summary to vouch for a percentile."""
    requests = pd.read_parquet(run.folder / "requests.parquet")
    gaps = np.concatenate([np.diff(tokens) for tokens in requests["token_ns"]])
    ttft = requests["first_token_ns"] - requests["due_ns"]
    return {"ttft": float(ttft.median()) / 1e6, "itl": float(np.median(gaps)) / 1e6}


def test_the_generators_differ_by_no_more_than_two_runs_do(engine: Delayed, tmp_path: Path) -> None:
    found = runs(engine.engine, tmp_path)
    plans = [json.loads(RunFolder(run.folder).manifest.read_text())["plan"] for run in found]
    assert len({(plan["planned"], plan["prompt_tokens"], plan["output_tokens"]) for plan in plans}) == 1
    assert [run.result.counts.succeeded for run in found] == [20] * 3
    assert [run.result.ledger.refused for run in found] == [()] * 3
    for metric in ("ttft", "itl"):
        one, locust, other = (medians_ms(run)[metric] for run in found)
        usual = (one + other) / 2
        assert abs(locust - usual) <= SPREADS * abs(one - other) + SHARE * usual, (metric, one, locust, other)
