"""The report in a real browser: it opens without a complaint, and its script does what it says."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from analysis.report import write_report
from tests.analysis.report_frames import write_run

pytestmark = pytest.mark.browser

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--remote-debugging-port=0",
    "--window-size=1280,1600",
)  # fmt: skip


class Tab:
    """One page under the browser's debugging protocol."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0
        self.complaints: list[str] = []
        self.requests: list[str] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and take in events until its answer comes."""
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json(timeout=30)
            if message.get("id") == self._number:
                assert "error" not in message, message
                return dict(message["result"])
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        method, params = message.get("method"), message.get("params", {})
        if method == "Log.entryAdded" or method in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled"):
            self.complaints.append(json.dumps(params))
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    async def open(self, page: Path) -> None:
        for domain in ("Log", "Runtime", "Network", "Page"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=page.as_uri())
        async with asyncio.timeout(30):
            while await self.evaluate("document.readyState") != "complete":  # noqa: ASYNC110 - it is in the browser
                await asyncio.sleep(0.05)

    async def evaluate(self, expression: str) -> Any:
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")


@pytest.fixture
async def tab(tmp_path: Path) -> AsyncIterator[Tab]:
    program = next((found for name in _NAMES if (found := shutil.which(name))), None)
    assert program, "no Chromium on the PATH; install it (Debian: apt install chromium)"
    profile = tmp_path / "profile"
    command = [program, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
    quiet = asyncio.subprocess.DEVNULL
    browser = await asyncio.create_subprocess_exec(*command, stdout=quiet, stderr=quiet)
    try:
        port = await _port(profile / "DevToolsActivePort")
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                pages = await answer.json()
            address = next(p["webSocketDebuggerUrl"] for p in pages if p["type"] == "page")
            async with session.ws_connect(address, max_msg_size=0) as socket:
                yield Tab(socket)
    finally:
        browser.terminate()
        await asyncio.wait_for(browser.wait(), 20)


async def _port(file: Path) -> str:
    """The debugging port, once the browser has written it down."""
    async with asyncio.timeout(30):
        while True:
            lines = await asyncio.to_thread(lambda: file.read_text().split() if file.exists() else [])
            if len(lines) == 2:
                return lines[0]
            await asyncio.sleep(0.05)


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
