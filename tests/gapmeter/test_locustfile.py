"""``--locustfile``: the example of the docs through the whole command, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from tests.kit.command import gapmeter, settings

FILE = ("--locustfile", "docs/locustfile.py")
CLOSED = settings(
    "load.arrivals=closed", "load.rate=null", "load.requests=null", "load.concurrency=4", "load.duration=8s",
    "load.warmup=0",
)  # fmt: skip
RUN = ("run", "smoke", "--engine", "simulated")


@pytest.mark.whole_run
def test_the_example_of_the_docs_yields_a_ledger_like_any_other_run(tmp_path: Path) -> None:
    done = gapmeter(*RUN, *FILE, *CLOSED, runs=tmp_path)
    assert done.left == []
    summary, plan = done.summary, done.manifest["plan"]
    assert (summary["load"]["loop"], summary["load"]["locustfile"]) == ("closed", "locustfile.py")
    assert "users of locustfile.py, closed loop" in " ".join(done.err.split())
    assert summary["closed_loop"]["corrected"] is None, "nobody knows these users' pace"
    assert plan["locustfile"]["name"] == "locustfile.py"
    assert summary["counts"]["succeeded"] > 20
    assert summary["residual"]["last_token"]["unexplained"]["p50_share"] is not None
    ledger = pd.read_parquet(done.folder.path / "ledger.parquet")
    assert set(ledger["request_id"]) == set(done.requests["request_id"])
    assert done.requests["prompt_tokens"].nunique() > 2, "conversations grow"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((*RUN, *FILE), 2, "its users wait for answers, smoke is an open loop; write --set load.arrivals=closed"),
        ((*RUN, "--locustfile", "nothing.py", *CLOSED), 2, "--locustfile nothing.py: there is no such file"),
        ((*RUN, *FILE, *CLOSED, "--workers", "2"), 2, "its users live in one process"),
        (
            (*RUN, *FILE, *CLOSED[:4], "--set", "load.concurrency=2", "--set", "load.warmup=0"),
            2,
            "write a time: --set load.requests=null",
        ),
    ],
)
def test_what_it_cannot_be_combined_with_is_a_sentence(
    words: tuple[str, ...], code: int, said: str, tmp_path: Path
) -> None:
    done = gapmeter(*words, runs=tmp_path)
    assert (done.code, "Traceback" in done.err) == (code, False)
    assert said in " ".join(done.err.split())
