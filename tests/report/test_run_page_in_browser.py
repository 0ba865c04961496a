"""The report in a real browser: it opens without a complaint, and its script does what it says."""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from pathlib import Path

import pandas as pd
import pytest

from gapmeter.analysis.numbers import duration, share
from gapmeter.report import html
from gapmeter.report.run import document
from tests.kit.browser import Tab
from tests.kit.runs import write_run

pytestmark = pytest.mark.browser
_PICTURES = ("report.png", "report-dark.png", "report-phone.png", "report-print.png", "report-request.png",
             "report-time.png", "report-explore.png")  # fmt: skip


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_run(tmp_path_factory.mktemp("run") / "r", count=400, rate=22.0, failures=3, error="<b>")
    html.write(folder.report, document(folder), [html.asset("request.js")])
    return folder.report


async def test_the_page_opens_without_a_complaint_or_a_request_of_its_own(tab: Tab, report: Path) -> None:
    await tab.open(report)
    assert await tab.evaluate("document.querySelectorAll('svg.chart').length") > 15
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
        "[...document.querySelectorAll('#slow-requests > tr')].map(r => Number("
        "(r.querySelector('[data-stage=prefill]') || {dataset: {ms: 0}}).dataset.ms))"
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


async def test_the_slowest_request_opens_with_its_ledger_and_the_numbers_of_the_table(tab: Tab, report: Path) -> None:
    await tab.open(report)
    ledger = pd.read_parquet(report.parent / "ledger.parquet").query("event == 'last_token'").set_index("request_id")
    name = await tab.evaluate("document.querySelector('#slow-requests button').textContent")
    await tab.evaluate("document.querySelector('#slow-requests button').click()")
    assert await tab.evaluate("document.querySelector('#request-name').textContent") == name
    assert await tab.evaluate("document.activeElement.id") == "request-view"
    rows = "[...document.querySelectorAll('#request-drawing tbody tr')]"
    cells = await tab.evaluate(f"{rows}.map(r => [...r.cells].map(c => c.dataset.value ?? c.textContent))")
    shown = {stage: ms for stage, _, _, ms, _ in cells}
    row = ledger.loc[name]
    assert float(shown["queue"]) == pytest.approx(row["queue_ns"] / 1e6)
    assert sum(float(ms) for ms in shown.values() if ms) == pytest.approx(row["total_ns"] / 1e6)
    told = await tab.evaluate(f"{rows}.map(r => [r.cells[3].textContent, r.cells[4].textContent])")
    whole = row["total_ns"] / 1e6
    as_python = [[duration(float(ms)), share(float(ms) / whole)] for ms in shown.values() if ms]
    assert [words for words, ms in zip(told, shown.values(), strict=True) if ms] == as_python
    assert await tab.evaluate("document.querySelectorAll('#request-drawing .step.own').length") > 0
    assert tab.complaints == []


async def test_from_an_opened_request_there_is_a_way_back_to_its_dot(tab: Tab, report: Path) -> None:
    await tab.open(report)
    await tab.evaluate(
        "window.dot = document.querySelector('.dots [data-request]');"
        "dot.dispatchEvent(new MouseEvent('click', {bubbles: true}))"
    )
    assert await tab.evaluate("document.activeElement.id") == "request-view"
    for leave in (
        "document.querySelector('#request-view button.back').click()",
        "document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape', bubbles: true}))",
    ):
        await tab.evaluate("document.querySelector('#request-view').focus()")
        await tab.evaluate(leave)
        assert await tab.evaluate("document.activeElement === window.dot")
    assert tab.complaints == []


async def test_every_button_and_dot_is_reached_and_worked_by_keyboard_alone(tab: Tab, report: Path) -> None:
    await tab.open(report)

    async def press(key: str, code: int, text: str = "") -> None:
        for kind in ("rawKeyDown", "char", "keyUp") if text else ("rawKeyDown", "keyUp"):
            await tab.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, text=text
            )

    async def tab_to(selector: str) -> None:
        for _ in range(400):
            await press("Tab", 9)
            if await tab.evaluate(f"document.activeElement.matches({json.dumps(selector)})"):
                return
        raise AssertionError(f"Tab never reached {selector}")

    await tab_to("input[name=event]")
    await press("ArrowRight", 39)
    chosen = await tab.evaluate("document.querySelector('input[name=event]:checked').value")
    seen = "[...document.querySelectorAll('[data-panel*=\"event=\"]:not([hidden])')].map(p => p.dataset.panel)"
    assert await tab.evaluate(seen) == [f"event={chosen} band=p985"]
    ring = "getComputedStyle(document.activeElement.nextElementSibling).outlineStyle"
    assert await tab.evaluate(ring) == "solid"
    await tab_to(".dots [data-request]")
    first = await tab.evaluate("document.activeElement.dataset.request")
    await press("ArrowRight", 39)
    second = await tab.evaluate("document.activeElement.dataset.request")
    assert second != first
    await press("Enter", 13, "\r")
    assert await tab.evaluate("document.querySelector('#request-name').textContent") == second
    await tab_to("#slow-requests button, button.copy")
    assert tab.complaints == []


async def test_a_table_is_copied_as_csv_with_where_it_is_from(tab: Tab, report: Path) -> None:
    await tab.open(report)
    await tab.evaluate(
        "window.copied = null;"
        "document.execCommand = () => { window.copied = document.activeElement.value; return true };"
        "const writeText = t => { window.copied = t; return Promise.resolve() };"
        "Object.defineProperty(navigator, 'clipboard', {value: {writeText}});"
        "document.querySelector('#where [data-panel]:not([hidden]) button.copy').click()"
    )
    lines = str(await tab.evaluate("window.copied")).splitlines()
    assert lines[0].startswith("# chat-p99 ")
    assert "gapmeter run chat-p99" in lines[0]
    assert lines[1] == "stage,owner,kind,typical (ms),slow (ms),difference (ms)"
    tail = json.loads((report.parent / "summary.json").read_text())["bands"]
    queue = next(line.split(",") for line in lines if line.startswith("queue,"))
    metric = str(await tab.evaluate("document.querySelector('input[name=event]:checked').value"))
    assert float(queue[4]) == tail[metric]["slow"]["p985"]["stages_ms"]["queue"]


async def test_it_is_dark_where_that_is_wanted_and_light_on_paper(tab: Tab, report: Path) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    await tab.open(report)
    await tab.call("Emulation.setEmulatedMedia", features=dark)
    assert await tab.evaluate(paper) == "rgb(20, 23, 27)"
    await tab.call("Emulation.setEmulatedMedia", media="print", features=dark)
    assert await tab.evaluate(paper) == "rgb(255, 255, 255)"
    printed = base64.b64decode((await tab.call("Page.printToPDF", printBackground=True))["data"])
    assert printed.startswith(b"%PDF-")
    assert len(printed) > 50_000


@pytest.mark.parametrize("width", [360, 800, 1280])
async def test_nothing_is_wider_than_the_window_and_no_label_is_cut(tab: Tab, report: Path, width: int) -> None:
    await tab.open(report)
    await tab.call("Emulation.setDeviceMetricsOverride", width=width, height=1200, deviceScaleFactor=1, mobile=False)
    await tab.evaluate(
        "document.querySelector('#slow-requests button').click();"
        "document.querySelectorAll('details').forEach(d => d.open = false)"
    )
    assert await tab.evaluate("document.documentElement.scrollWidth") <= width
    cut = """[...document.querySelectorAll('svg.stage text.inside')].filter(t => {
      if (getComputedStyle(t).display === 'none') return false;
      const box = t.parentNode.getBoundingClientRect(), own = t.getBoundingClientRect();
      return own.left < box.left || own.right > box.right;
    }).map(t => t.textContent)"""
    assert await tab.evaluate(cut) == []


async def test_the_script_for_the_pictures_takes_them_from_a_run_s_folder(report: Path, tmp_path: Path) -> None:
    root, words = Path(__file__).parents[2], ("-m", "docs.screenshots", str(report.parent), "--out", str(tmp_path))
    process = await asyncio.create_subprocess_exec(sys.executable, *words, cwd=root)
    assert await asyncio.wait_for(process.wait(), 60) == 0
    heads = [(tmp_path / name).read_bytes()[:8] for name in _PICTURES]
    assert heads == [b"\x89PNG\r\n\x1a\n"] * len(_PICTURES)
