"""What holds for every page that the tool makes, looked at in a real browser."""

from __future__ import annotations

from pathlib import Path

from tests.browser import Tab

_EMPTY = """[...document.querySelectorAll('svg.chart')].filter(chart => {
  const box = chart.getBoundingClientRect(), drawn = chart.querySelectorAll('path, rect, circle, line.whisker');
  return chart.checkVisibility() && (box.width < 100 || box.height < 20 || !drawn.length);
}).map(chart => chart.querySelector('title').textContent)"""
_PAPER = "getComputedStyle(document.body).backgroundColor"


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
