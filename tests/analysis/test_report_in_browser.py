"""The report in a real browser: it opens without a complaint, and its script does what it says."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from analysis.report import write_report
from tests.analysis.report_frames import write_run
from tests.browser import Tab, browser_tab

pytestmark = pytest.mark.browser


@pytest.fixture
async def tab(tmp_path: Path) -> AsyncIterator[Tab]:
    async with browser_tab(tmp_path / "profile") as made:
        yield made


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(write_run(tmp_path_factory.mktemp("run") / "r", count=400, rate=22.0, failures=3, error="<b>"))


async def test_the_page_opens_without_a_complaint_or_a_request_of_its_own(tab: Tab, report: Path) -> None:
    await tab.open(report)
    assert await tab.evaluate("document.querySelectorAll('svg.chart').length") == 12
    assert tab.complaints == []
    assert [url for url in tab.requests if not url.startswith("data:")] == [report.as_uri()]


@pytest.fixture
def tampered(report: Path, tmp_path: Path) -> Path:
    page = tmp_path / "tampered.html"
    page.write_text(report.read_text().replace("</body>", "<script>document.title = 'owned'</script></body>"))
    return page


async def test_a_script_that_is_not_the_page_s_own_is_refused_and_heard_of(tab: Tab, tampered: Path) -> None:
    await tab.open(tampered)
    assert await tab.evaluate("document.title") != "owned"
    assert "Content Security Policy" in "".join(tab.complaints)


async def test_picking_a_stage_dims_the_others_and_sorts_the_slow_requests_by_it(tab: Tab, report: Path) -> None:
    await tab.open(report)
    sizes = (
        "[...document.querySelectorAll('#slow-requests > details')].map(r => Number("
        "(r.querySelector('summary [data-stage=prefill]') || {dataset: {ms: 0}}).dataset.ms))"
    )
    before = await tab.evaluate(sizes)
    await tab.evaluate("document.querySelector('.legend [data-stage=prefill]').click()")
    after = await tab.evaluate(sizes)
    assert after == sorted(before, reverse=True)
    assert after != before
    opacity = "getComputedStyle(document.querySelector('.row, svg.chart [data-stage=queue]')).opacity"
    await asyncio.sleep(0.3)
    assert float(await tab.evaluate(opacity)) < 0.5
    await tab.evaluate("document.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape', bubbles: true}))")
    assert await tab.evaluate(sizes) == before
    assert not await tab.evaluate("document.body.classList.contains('focused')")


@pytest.mark.parametrize("width", [360, 800, 1280])
async def test_nothing_is_wider_than_the_window_and_no_label_is_cut(tab: Tab, report: Path, width: int) -> None:
    await tab.open(report)
    await tab.call("Emulation.setDeviceMetricsOverride", width=width, height=1200, deviceScaleFactor=1, mobile=False)
    await tab.evaluate("document.querySelectorAll('details').forEach(d => d.open = false)")
    assert await tab.evaluate("document.documentElement.scrollWidth") <= width
    cut = """[...document.querySelectorAll('svg.stage text.inside')].filter(t => {
      if (getComputedStyle(t).display === 'none') return false;
      const box = t.parentNode.getBoundingClientRect(), own = t.getBoundingClientRect();
      return own.left < box.left || own.right > box.right;
    }).map(t => t.textContent)"""
    assert await tab.evaluate(cut) == []


async def test_the_script_for_the_pictures_takes_them_from_a_run_s_folder(report: Path, tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "docs" / "screenshots.py"
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(script), str(report.parent), "--out", str(tmp_path)
    )
    assert await asyncio.wait_for(process.wait(), 60) == 0
    heads = [(tmp_path / name).read_bytes()[:8] for name in ("report.png", "report-dark.png")]
    assert heads == [b"\x89PNG\r\n\x1a\n"] * 2
