"""What follows a run for its page: it holds up nobody, and ends when the run does, however that is."""

from __future__ import annotations

import asyncio
import gc
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from gapmeter_probe.records import FILE_HEADER

from gapmeter.records import RunFolder
from gapmeter.records.compression import open_record
from gapmeter.runs.lock import locked
from gapmeter.web.live import LiveRun, LiveState
from gapmeter.web.server import RunsSite

pytestmark = pytest.mark.whole_run
Copy = Callable[[], Path]


@pytest.fixture
def going_on(run_copy: Copy) -> RunFolder:
    """A run as it is before its report, with thousands of answers that nobody has read."""
    folder = RunFolder(run_copy())
    folder.report.unlink()
    folder.summary.unlink()
    (packed,) = folder.record_files(folder.requests)
    with open_record(packed) as file:
        whole = file.read()
    packed.unlink()
    many = whole[: FILE_HEADER.size] + 200 * whole[FILE_HEADER.size :]
    packed.with_suffix("").write_bytes(many)
    return folder


async def test_whoever_asks_for_another_page_does_not_wait_for_what_is_read(going_on: RunFolder) -> None:
    turns = 0

    async def other_pages() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    others = asyncio.create_task(other_pages())
    await asyncio.sleep(0)
    before = turns
    state = await LiveState(going_on).update()
    assert turns > before and state["done"] > 1000
    others.cancel()


async def test_a_run_that_was_killed_is_followed_no_further_and_its_files_are_let_go(going_on: RunFolder) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with locked(going_on.path):
        live = LiveRun(going_on)
        following = asyncio.create_task(live.follow())
        await asyncio.sleep(1.5)
        assert not following.done()
    await asyncio.wait_for(following, 20)
    del live, following
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


async def test_open_pages_are_told_that_it_is_over_where_what_follows_a_run_fails(going_on: RunFolder) -> None:
    manifest = json.loads(going_on.manifest.read_text())
    manifest["scenario"]["workload"]["kind"] = "nothing known"
    going_on.manifest.write_text(json.dumps(manifest))
    site = RunsSite(going_on.path.parent)
    app = web.Application()
    app.add_routes(site.routes())
    with locked(going_on.path):
        async with TestClient(TestServer(app)) as client:
            answer = await client.get(f"/runs/{going_on.path.name}/events")
            told = await asyncio.wait_for(answer.text(), 20)
    await site.close()
    assert json.loads(told.split("data: ")[-1])["phase"] == "over"


async def test_the_site_ends_in_order_though_what_followed_a_run_has_failed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail() -> None:
        raise ValueError("a bug")

    site = RunsSite(tmp_path)
    for name in ("one", "other"):
        site._live[name] = LiveRun(RunFolder(tmp_path / name)), asyncio.create_task(fail())
    await site.close()
    site._live.clear()
    gc.collect()
    assert caplog.text.count("Task exception was never retrieved") == 2, "and it is told"
