"""A real Chromium without a window, one page of it, and what holds for every page that the tool makes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--remote-debugging-port=0",
    "--window-size=1280,1600",
)  # fmt: skip
_EMPTY = """[...document.querySelectorAll('svg.chart')].filter(chart => {
  const box = chart.getBoundingClientRect(), drawn = chart.querySelectorAll('path, rect, circle, line.whisker');
  return chart.checkVisibility() && (box.width < 100 || box.height < 20 || !drawn.length);
}).map(chart => chart.querySelector('title').textContent)"""
_PAPER = "getComputedStyle(document.body).backgroundColor"


class WentElsewhere(Exception):
    """The page left while an expression was evaluated in it."""


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
                error = message.get("error")
                if error and "navigated" in error["message"]:
                    raise WentElsewhere
                assert not error, message
                return dict(message["result"])
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        method, params = message.get("method"), message.get("params", {})
        if method == "Log.entryAdded" or method in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled"):
            self.complaints.append(json.dumps(params))
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    async def open(self, page: Path | str) -> None:
        """Go to a file or an address, and wait until it has loaded."""
        for domain in ("Log", "Runtime", "Network", "Page"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=page.as_uri() if isinstance(page, Path) else page)
        await self.until("document.readyState === 'complete'")

    async def until(self, expression: str, seconds: float = 30) -> Any:
        """Wait until an expression is true in the page, also in one that it goes on to meanwhile; its value."""
        async with asyncio.timeout(seconds):
            while True:
                with contextlib.suppress(WentElsewhere):
                    if found := await self.evaluate(expression):
                        return found
                await asyncio.sleep(0.05)

    async def evaluate(self, expression: str) -> Any:
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")


@contextlib.asynccontextmanager
async def browser_tab(profile: Path) -> AsyncIterator[Tab]:
    """A browser of its own with one empty page; ``profile`` is a folder that it may make."""
    program = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    assert program, "no Chromium on the PATH; install it (Debian: apt install chromium)"
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


async def opens_well(tab: Tab, page: Path, *, charts: int) -> None:
    """It opens without a complaint or a request, draws every chart, has an end by keyboard, and can be dark."""
    await tab.open(page)
    assert tab.complaints == []
    assert [url for url in tab.requests if not url.startswith("data:")] == [page.as_uri()]
    assert await tab.evaluate("document.querySelectorAll('svg.chart').length") >= charts
    assert await tab.evaluate(_EMPTY) == []
    await _reaches(tab, "button.copy")
    await tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    assert await tab.evaluate(_PAPER) == "rgb(20, 23, 27)"
    await tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}])
    for width in (360, 1280):
        await tab.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        assert await tab.evaluate("document.documentElement.scrollWidth") <= width


async def _reaches(tab: Tab, selector: str) -> None:
    """Tab alone gets there, and what has the focus shows it."""
    for _ in range(200):
        for kind in ("rawKeyDown", "keyUp"):
            await tab.call("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)
        if await tab.evaluate(f"document.activeElement.matches({selector!r})"):
            assert await tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
            return
    raise AssertionError(f"Tab never reached {selector}")
