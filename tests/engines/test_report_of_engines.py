"""The report of a real run of a real engine, in a real browser: its numbers are the summary's, and a request opens."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from tests.kit.browser import Tab
from tests.kit.command import gapmeter
from tests.kit.results import figure_at

pytestmark = [pytest.mark.whole_run, pytest.mark.browser]

ASKED = (
    "--set", "load.rate=6", "--set", "load.requests=40", "--set", "load.warmup=2s", "--set", "load.timeout=60s",
    "--set", 'slo=["ttft p50 <= 30 s"]',
)  # fmt: skip
SHOWN = "[...document.querySelectorAll('td[data-key]')].map((cell) => [cell.dataset.key, cell.dataset.value])"
EAGER = ("--set", "server.args.enforce_eager=true")  # half the start


@pytest.mark.parametrize(
    ("engine", "more"),
    [
        pytest.param("transformers", (), marks=pytest.mark.transformers),
        pytest.param("vllm", EAGER, marks=pytest.mark.vllm),
    ],
)
async def test_the_report_of_a_real_run_shows_its_figures_and_opens_its_slowest_request(
    engine: str, more: tuple[str, ...], tab: Tab, tmp_path: Path
) -> None:
    done = gapmeter("run", "smoke", "--engine", engine, *ASKED, *more, runs=tmp_path / "runs")
    assert done.code in (0, 98), done.err  # on a busy machine the load may come too late to be valid
    await tab.open(done.folder.report)
    shown = await tab.evaluate(SHOWN)
    assert len(shown) > 500
    for key, value in shown:
        assert json.loads(value) == figure_at(done.summary, key), key
    name = await tab.evaluate("document.querySelector('#slow-requests button').textContent")
    await tab.evaluate("document.querySelector('#slow-requests button').click()")
    rows = "[...document.querySelectorAll('#request-drawing tbody tr')]"
    stages = dict(await tab.evaluate(f"{rows}.map(r => [r.cells[0].textContent, r.cells[3].dataset.value])"))
    ledger = pd.read_parquet(done.folder.path / "ledger.parquet").query("event == 'last_token'")
    (row,) = ledger[ledger["request_id"] == name].itertuples()
    assert sum(float(ms) for ms in stages.values() if ms) == pytest.approx(row.total_ns / 1e6)
    assert tab.complaints == []
    assert [url for url in tab.requests if not url.startswith(("file:", "data:"))] == []
