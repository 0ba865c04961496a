"""The page over the runs folder: it shows, searches, compares and deletes, for its owner only and nowhere else."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from yarl import URL

from gapmeter.runs.lock import locked
from tests.kit.browser import Tab
from tests.kit.command import SIMULATED, Command, settings
from tests.kit.command import gapmeter as command
from tests.kit.wait import eventually

pytestmark = [pytest.mark.whole_run, pytest.mark.browser]

NASTY = '<img src=x onerror="alert(1)"><script>alert(2)</script>'


@dataclass(frozen=True, slots=True)
class Site:
    """A page that is being served. ``address`` has the token."""

    runs: Path
    address: str

    @property
    def base(self) -> str:
        return self.address.split("?")[0].rstrip("/")


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("two")
    for batch in (4, 8):
        done = command(*SIMULATED, "--set", f"server.max_batch={batch}", runs=runs)
        assert done.code in (0, 98, 99), done.err
    return runs


@pytest.fixture
def site(two_runs: Path, tmp_path: Path) -> Iterator[Site]:
    runs = tmp_path / "runs"
    shutil.copytree(two_runs, runs)
    (tmp_path / "secret.html").write_text("secret")
    broken = runs / "20200101-000000-broken-abc"
    broken.mkdir()
    (broken / "manifest.json").write_text("{")
    started = Command(("ui", "--runs", str(runs)), runs)
    yield Site(runs, started.process.stdout.readline().strip())
    started.process.send_signal(2)
    done = started.done()
    assert done.left == [] and "Traceback" not in done.err


@pytest.fixture
async def visitor(site: Site) -> AsyncIterator[aiohttp.ClientSession]:
    """One who has opened the address with its token."""
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
        async with session.get(site.address) as answer:
            assert answer.status == 200 and "token" not in str(answer.url)
        yield session


def names(site: Site) -> list[str]:
    return sorted(path.name for path in site.runs.iterdir() if "smoke" in path.name)


async def test_strangers_other_hosts_and_other_origins_are_turned_away(
    site: Site, visitor: aiohttp.ClientSession
) -> None:
    async with aiohttp.ClientSession() as stranger:
        for path in ("/", f"/runs/{names(site)[0]}/report.html", "/?token=wrong"):
            async with stranger.get(site.base + path) as answer:
                assert answer.status == 403
    async with visitor.get(site.base, headers={"Host": "rebound.example"}) as answer:
        assert answer.status == 421
    form = {"run": names(site)[0], "sure": "yes"}
    for headers in ({}, {"Origin": "http://evil.example"}, {"Origin": "null"}):
        async with visitor.post(f"{site.base}/delete", data=form, headers=headers) as answer:
            assert answer.status == 403
    assert len(names(site)) == 2


@pytest.mark.parametrize(
    "path",
    [
        "/runs/../secret.html", "/runs/%2e%2e/secret.html", "/runs/NAME/../../secret.html",
        "/runs/NAME/%2e%2e/%2e%2e/secret.html", "/runs/NAME/..%2f..%2fsecret.html", "/runs/NAME/link.html",
        "/runs/linked/report.html", "/runs/NAME/%2fetc%2fpasswd", "/runs/NAME/requests/worker-0.gap", "/runs/%00/",
        "/runs/NAME/%00.json", "/runs/NAME/loop.html", "/runs/NAME/" + 300 * "x" + ".json", "/runs/" + 300 * "x" + "/",
        "/compare?run=NAME&run=NAME",
        "/runs/nothing/",
    ],
)  # fmt: skip
async def test_nothing_outside_the_runs_and_no_raw_record_is_served(
    site: Site, visitor: aiohttp.ClientSession, path: str
) -> None:
    first = site.runs / names(site)[0]
    (first / "link.html").symlink_to(site.runs.parent / "secret.html")
    (first / "loop.html").symlink_to(first / "loop.html")
    (site.runs / "linked").symlink_to(first)
    async with visitor.get(URL(site.base + path.replace("NAME", first.name), encoded=True)) as answer:
        assert answer.status in (400, 404, 405), path
        assert "secret" not in await answer.text()


@pytest.mark.parametrize("line", [b"X: " + b"a" * 70_000, b": "], ids=["long", "nameless"])
async def test_a_request_that_is_no_http_is_answered_without_a_traceback(site: Site, line: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", URL(site.address).port)
    writer.write(b"GET / HTTP/1.1\r\n" + line + b"\r\n\r\n")  # what the terminal shows is looked at when it ends
    assert b" 400 " in await reader.readline()
    writer.close()


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("application/x-www-form-urlencoded", b"run=\xff"),
        ("application/x-www-form-urlencoded", b"run=" + 3000 * b"x"),
        ("application/x-www-form-urlencoded; charset=nonsense", b"run=x"),
        ("multipart/form-data; boundary=x", b"no parts"),
    ],
    ids=["no text", "no folder's name", "no charset", "no parts"],
)
async def test_a_form_that_says_nothing_is_turned_away(
    site: Site, visitor: aiohttp.ClientSession, kind: str, body: bytes
) -> None:
    headers = {"Origin": site.base, "Content-Type": kind}
    for path in ("/compare", "/delete"):
        async with visitor.post(site.base + path, data=body, headers=headers) as answer:
            assert answer.status in (400, 404), await answer.text()


async def test_a_cookie_of_other_letters_lets_nobody_in(site: Site) -> None:
    port = URL(site.base).port
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\nCookie: gapmeter-{port}="
    writer.write(head.encode() + b"\xff\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 403 ")
    writer.close()


async def test_what_is_served_carries_what_a_browser_needs_to_be_careful(
    site: Site, visitor: aiohttp.ClientSession
) -> None:
    async with visitor.get(f"{site.base}/runs/{names(site)[0]}/report.html") as answer:
        assert answer.status == 200
        assert answer.headers["Content-Security-Policy"].startswith("sandbox ")
        assert "allow-same-origin" not in answer.headers["Content-Security-Policy"]
        assert answer.headers["X-Content-Type-Options"] == "nosniff"


async def test_runs_are_listed_searched_and_opened(site: Site, tab: Tab) -> None:
    manifest = site.runs / names(site)[0] / "manifest.json"
    about = json.loads(manifest.read_text())
    about["scenario"]["name"] = about["scenario"]["server"]["model"] = NASTY
    manifest.write_text(json.dumps(about))
    await tab.open(site.address)
    rows = "document.querySelectorAll('table.runs tbody tr').length"
    assert await tab.evaluate(rows) == 3
    assert NASTY in await tab.evaluate("document.querySelector('table.runs').textContent")
    assert await tab.evaluate("document.querySelector('table.runs img, table.runs script')") is None
    assert "damaged" in await tab.evaluate("document.querySelector('table.runs').textContent")
    await tab.evaluate(
        "document.querySelector('[name=q]').value = 'onerror'; document.querySelector('.runs-search').submit()"
    )
    await tab.until("location.search.includes('onerror') && document.readyState === 'complete'")
    assert await tab.evaluate(rows) == 1
    await tab.evaluate("document.querySelector('table.runs a').click()")
    await tab.until("location.pathname.endsWith('report.html') && document.querySelector('.verdict') !== null")
    assert tab.complaints == []


async def test_a_folder_whose_name_is_no_utf_8_is_listed_and_hides_no_other(
    site: Site, visitor: aiohttp.ClientSession
) -> None:
    foreign = site.runs / os.fsdecode(b"20200101-000001-\xff")
    foreign.mkdir()
    (foreign / "manifest.json").write_text("{")
    async with visitor.get(site.base) as answer:
        assert answer.status == 200
        page = await answer.text()
    assert all(name in page for name in [*names(site), "20200101-000001-?"])


async def test_a_run_without_a_report_is_told_why_and_what_writes_it(
    site: Site, visitor: aiohttp.ClientSession
) -> None:
    killed = site.runs / names(site)[0]
    for name in ("report.html", "summary.json"):
        (killed / name).unlink()
    told = {}
    for state, manifest in (("going on", None), ("over", None), ("odd", {"plan": {}})):
        if manifest is not None:  # without what the live page needs
            about = json.loads((killed / "manifest.json").read_text())
            (killed / "manifest.json").write_text(json.dumps(about | manifest))
        with contextlib.nullcontext() if state == "over" else locked(killed):
            async with visitor.get(f"{site.base}/runs/{killed.name}/") as answer:
                assert answer.status == 200, state
                told[state] = await answer.text()
    assert "as it runs" in told["going on"]
    why = "Unfinished: not analysed. To write its report, or to see what is damaged"
    assert f"{why}: gapmeter report {killed}" in told["over"]
    assert "It is still running" in told["odd"]


@pytest.mark.parametrize("text", ['{"sides": [], "verdict": "MIXED"}', "{"], ids=["whole", "damaged"])
async def test_a_comparison_without_a_report_is_no_run_that_can_be_reported(
    site: Site, visitor: aiohttp.ClientSession, text: str
) -> None:
    made = site.runs / "20200102-000000-compare-abc"
    made.mkdir()
    (made / "compare.json").write_text(text)
    async with visitor.get(f"{site.base}/runs/{made.name}/") as answer:
        told = await answer.text()
    assert "Compare its runs again" in told and "gapmeter report" not in told


async def test_a_link_in_a_report_is_followed(site: Site, tab: Tab) -> None:
    await tab.open(site.address)
    await tab.open(f"{site.base}/runs/{names(site)[0]}/report.html")
    await tab.evaluate('[...document.links].find((link) => link.href.endsWith("/verdict.json")).click()')
    shown = await tab.until('location.pathname.endsWith("/verdict.json") && document.body.innerText')
    assert '"verdict"' in shown


async def test_ticked_runs_are_compared(site: Site, tab: Tab) -> None:
    await tab.open(site.address)
    for name in names(site):
        await tab.evaluate(f"document.querySelector('input[value=\"{name}\"]').click()")
    await tab.evaluate("document.querySelector('.runs-do button').click()")
    await tab.until("location.pathname.endsWith('report.html') && document.readyState === 'complete'")
    assert "server.max_batch" in await tab.evaluate("document.body.textContent")


async def test_deleting_asks_first_and_leaves_the_others(site: Site, tab: Tab) -> None:
    await tab.open(site.address)
    gone, kept = names(site)
    await tab.evaluate(f"document.querySelector('input[value=\"{gone}\"]').click()")
    await tab.evaluate("document.querySelector('.runs-do .runs-delete').click()")
    await tab.until("location.pathname === '/delete' && document.readyState === 'complete'")
    assert gone in await tab.evaluate("document.body.textContent")
    assert names(site) == [gone, kept]
    await tab.evaluate("document.querySelector('button.runs-delete').click()")
    await tab.until("location.pathname === '/' && document.readyState === 'complete'")
    assert names(site) == [kept]


async def test_a_pipe_in_place_of_a_run_s_record_holds_up_nobody(site: Site, visitor: aiohttp.ClientSession) -> None:
    path = site.runs / names(site)[0]
    for made in ("report.html", "summary.json"):
        (path / made).unlink()
    (record,) = (path / "requests").glob("*.gap*")
    record.unlink()
    os.mkfifo(record.with_suffix(""))
    with locked(path):
        async with asyncio.timeout(20), visitor.get(f"{site.base}/runs/{path.name}/events") as answer:
            said = b""
            while b"it is a pipe, not a plain file" not in said:
                said = await answer.content.readline()


@pytest.mark.parametrize("killed", [True, False])
async def test_who_follows_a_run_that_is_over_is_told_so_and_kept_no_longer(
    site: Site, visitor: aiohttp.ClientSession, killed: bool
) -> None:
    path = site.runs / names(site)[0]
    if killed:
        for made in ("report.html", "summary.json"):
            (path / made).unlink()
    async with asyncio.timeout(20), visitor.get(f"{site.base}/runs/{path.name}/events") as answer:
        last = (await answer.text()).split("data: ")[-1]
    assert json.loads(last) == {"phase": "over", "report": not killed}


@pytest.mark.parametrize("summary", [True, False])
async def test_a_folder_that_a_gapmeter_is_at_work_in_is_not_deleted(
    site: Site, visitor: aiohttp.ClientSession, summary: bool
) -> None:
    """Whether or not it has results already, as a sweep that is taken up has, and however old its files are."""
    held, *_ = (site.runs / name for name in names(site))
    if not summary:
        (held / "summary.json").unlink()
    for path in held.rglob("*"):
        os.utime(path, (1, 1))
    form = {"run": held.name, "sure": "yes"}
    with locked(held):
        async with visitor.post(f"{site.base}/delete", data=form, headers={"Origin": site.base}) as answer:
            assert answer.status == 409 and re.search("still running|is at work in", await answer.text())
    assert held.exists()
    async with visitor.post(f"{site.base}/delete", data=form, headers={"Origin": site.base}) as answer:
        assert answer.status == 200
    assert not held.exists()


async def test_a_run_that_goes_on_is_shown_live_and_not_deleted(site: Site, tab: Tab) -> None:
    going = Command(
        ("run", "smoke", "--engine", "simulated", "--runs", str(site.runs),
         *settings("load.duration=10m", "load.requests=null", "load.rate=10")), site.runs,
    )  # fmt: skip
    await eventually(lambda: len(names(site)) == 3, 60)
    name = names(site)[-1]
    await eventually((site.runs / name / "manifest.json").exists, 60)
    await tab.open(site.address)
    await tab.open(f"{site.base}/runs/{name}/")
    await tab.until("document.querySelectorAll('#dots circle').length > 3", 60)
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
        async with session.get(site.address):
            pass
        form = {"run": name, "sure": "yes"}
        async with session.post(f"{site.base}/delete", data=form, headers={"Origin": site.base}) as answer:
            assert answer.status == 409 and re.search("still running", await answer.text())
    going.process.send_signal(signal.SIGINT)
    await tab.until("location.pathname.endsWith('report.html') && document.querySelector('.verdict') !== null", 90)
    done = going.done()
    assert (done.code, done.left) == (105, []), done.err
