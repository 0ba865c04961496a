"""The page of a run that goes on: only its owner sees it, it tells what happens, and it ends as the report."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest

from tests.kit.browser import Tab
from tests.kit.command import Command, settings

pytestmark = [pytest.mark.whole_run, pytest.mark.browser]

LIVE = ("run", "smoke", "--engine", "simulated", "--live", "--progress", "json", *settings(
    "load.arrivals=poisson", "load.rate=20", "load.requests=null", "load.duration=8s", "load.warmup=1s",
    'slo=["ttft p90 <= 999.6 ms", "errors <= 5 %"]',
))  # fmt: skip


@pytest.fixture
def live(tmp_path: Path) -> Iterator[tuple[Command, str]]:
    started = Command(LIVE, tmp_path / "runs")
    said = iter(started.process.stderr or ())
    yield started, next(found[1] for line in said if (found := re.search(r"live: (\S+)", line)))
    if started.process.poll() is None:  # the test has failed
        started.process.kill()
        started.process.communicate()


async def test_a_run_is_seen_while_it_goes_on_and_turns_into_its_report(live: tuple[Command, str], tab: Tab) -> None:
    command, address = live
    await tab.open(address)
    assert "token" not in await tab.evaluate("location.href")
    await tab.until("document.getElementById('phase').textContent === 'load'")
    await tab.until("document.querySelectorAll('#dots circle').length > 20")
    assert await tab.evaluate("document.getElementById('metrics').rows.length") == 3
    heads = await tab.evaluate("[...document.querySelectorAll('h1')].map((head) => head.textContent)")
    assert heads == ["smoke, as it runs"]
    assert await tab.evaluate("[...document.querySelectorAll('table')].every((table) => table.ariaLabel)")
    limits = await tab.evaluate("[...document.getElementById('slos').rows].map((row) => row.cells[2].textContent)")
    assert limits == ["1 s", "5 %"]
    await tab.until("location.pathname.endsWith('/report.html') && document.readyState === 'complete'", seconds=120)
    assert await tab.evaluate("document.querySelector('.verdict') !== null")
    done = command.done()
    assert done.code in (0, 98), done.err  # beside a browser on few cores the load may come too late to be valid
    assert done.left == []
    assert tab.complaints == []
    own = urlsplit(address).netloc
    assert {urlsplit(url).netloc for url in tab.requests if url.startswith("http")} == {own}
    told = [line for line in done.err.splitlines() if line.startswith("{")]
    assert len(told) > 3


async def test_its_button_ends_a_run_as_ctrl_c_does(live: tuple[Command, str], tab: Tab) -> None:
    command, address = live
    await tab.open(address)
    await tab.until("document.querySelectorAll('#dots circle').length > 5")
    await tab.evaluate("document.querySelector('.live-stop button').click()")
    done = command.done()
    assert done.code == 105, done.err
    assert json.loads((done.folder.path / "manifest.json").read_text())["ended_because"] == "interrupted"
    assert done.folder.report.exists() and not (done.folder.path / "stop").exists()
    assert tab.complaints == []


async def test_nobody_without_the_token_sees_the_page(live: tuple[Command, str]) -> None:
    command, address = live
    base = address.split("?")[0]
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
        for url, headers, status in (
            (base, {}, 403),
            (f"{base}?token=guess", {}, 403),
            (f"{base}events", {}, 403),
            (address, {"Host": "evil.example"}, 421),
            (address, {}, 200),
        ):
            async with session.get(url, headers=headers) as answer:
                assert answer.status == status, (url, headers)
    command.process.send_signal(2)
    assert command.done().code == 105
