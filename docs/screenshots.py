"""Takes the pictures of docs/images from runs' pages: ``python -m docs.screenshots [runs/FOLDER …]``.

Of the first run: the first screen light and dark, on a phone, one request opened, dots over time, two groups, and on
paper; of every further run, sweep, capacity search or comparison the first screen, named after its engine or its kind.
Without names: the newest valid run of every engine, the newest sweep, search and comparison, and the list of all runs.
Needs Chromium (Debian: apt install chromium) and nothing from a network.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from gapmeter.runs.listing import ListedRun, find_listed, list_known
from gapmeter.web.runs_page import RunFilter, runs_page
from tests.kit.browser import BROWSERS, Tab, browser_tab

_UNSOUND = ("INVALID", "NOT COMPARABLE")
IMAGES, RUNS = Path(__file__).parent / "images", Path("runs")
OPEN = "document.querySelector('#slow-requests button')?.click(); document.activeElement.blur()"


@dataclass(frozen=True, slots=True)
class Picture:
    """A file, the window it is taken from in CSS pixels, and what is done first; ``part`` is a part of the page."""

    file: str
    width: int
    height: int
    scale: float = 1.0
    dark: bool = False
    media: str = ""
    script: str = ""
    part: str = ""


FIRST = (
    Picture("report.png", 1240, 1060, 1.25),
    Picture("report-dark.png", 1240, 1060, 1.25, dark=True),
    Picture("report-phone.png", 390, 1100, 1.5),
    Picture("report-print.png", 794, 1123, 1.25, media="print"),
    Picture("report-request.png", 1240, 1000, script=OPEN, part="#request-view"),
    Picture("report-time.png", 1240, 1000, 0.85, part="#time"),
    Picture("report-explore.png", 1240, 1000, part="#explore"),
)


async def take(tab: Tab, page: Path, picture: Picture, out: Path) -> Path | None:
    """Write one picture; its path, or None when the page has no such part."""
    scheme = [{"name": "prefers-color-scheme", "value": "dark" if picture.dark else "light"}]
    await tab.call("Emulation.setScrollbarsHidden", hidden=True)
    await tab.call("Emulation.setEmulatedMedia", media=picture.media, features=scheme)
    await tab.call(
        "Emulation.setDeviceMetricsOverride", width=picture.width, height=picture.height,
        deviceScaleFactor=picture.scale, mobile=False,
    )  # fmt: skip
    await tab.open(page)
    await tab.evaluate(picture.script or "scrollTo(0, 0)")
    await asyncio.sleep(0.3)
    clip = await _clip(tab, picture)
    if clip is None:
        return None
    shot = await tab.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
    target = out / picture.file
    target.write_bytes(base64.b64decode(shot["data"]))
    return target


async def _clip(tab: Tab, picture: Picture) -> dict[str, float] | None:
    if not picture.part:
        return {"x": 0, "y": 0, "width": picture.width, "height": picture.height, "scale": 1}
    where = f"document.querySelector({picture.part!r})?.getBoundingClientRect()"
    box = await tab.evaluate(f"(b => b && [b.top + scrollY, b.height])({where})")
    return box and {"x": 0, "y": box[0] - 12, "width": picture.width, "height": box[1] + 24, "scale": 1}


def chosen(names: list[Path], runs: Path) -> list[ListedRun]:
    """The folders that are named, or the newest of each kind. Raises ValueError for one that has no page."""
    if not names:
        return newest(list_known(runs))
    found = []
    for name in names:
        listed = find_listed(name)
        if listed is None or not _page(listed).exists():
            raise ValueError(f"{name / 'report.html'} does not exist; gapmeter report {name} makes it")
        found.append(listed)
    return sorted(found, key=lambda each: each.kind != "run")


def newest(known: list[ListedRun]) -> list[ListedRun]:
    """The newest valid run of every engine, the newest engine's first, then the newest of every other kind."""
    first: dict[tuple[str, str], ListedRun] = {}
    for each in reversed(known):
        if each.state == "done" and each.verdict not in _UNSOUND and _page(each).exists():
            first.setdefault((each.kind, each.engine if each.kind == "run" else ""), each)
    return sorted(first.values(), key=lambda each: each.kind != "run")


def _page(listed: ListedRun) -> Path:
    return listed.path.resolve() / "report.html"


def pictures_of(shown: list[ListedRun]) -> list[tuple[Path, Picture]]:
    """Which picture is taken from which page."""
    first = shown[0].kind == "run"
    wanted = [(_page(shown[0]), picture) for picture in FIRST] if first else []
    for each in shown[1:] if first else shown:
        name = each.engine if each.kind == "run" else each.kind
        wanted.append((_page(each), Picture(f"report-{name}.png", 1240, 1060, 1.25)))
    return wanted


async def _take_all(shown: list[ListedRun], listed: list[ListedRun], out: Path) -> None:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        wanted = pictures_of(shown)
        if listed:
            runs = Path(folder) / "runs.html"
            runs.write_text(runs_page(listed[-12:], RunFilter(), RUNS.name), encoding="utf-8")
            wanted.append((runs, Picture("runs.png", 1240, 520, 1.25)))
        async with browser_tab(Path(folder) / "browser") as tab:
            await _take_each(tab, wanted, out)


async def _take_each(tab: Tab, wanted: list[tuple[Path, Picture]], out: Path) -> None:
    for page, picture in wanted:
        made = await take(tab, page, picture, out)
        source = page.parent.name if page.name == "report.html" else "the list of runs"
        print(f"{made}  from {source}" if made else f"{picture.file} is left out: {source} has no {picture.part}")


def main() -> int:
    """Take every picture of what is named, or of the newest."""
    parser = argparse.ArgumentParser(description="Pictures for the docs, from runs' pages.")
    parser.add_argument("run", type=Path, nargs="*", help="folders with report.html (default: the newest of each kind)")
    parser.add_argument("--out", type=Path, default=IMAGES)
    parser.add_argument("--runs", type=Path, default=RUNS, help="where the newest are looked for")
    arguments = parser.parse_args()
    try:
        shown = chosen(arguments.run, arguments.runs)
    except ValueError as error:
        return _refused(str(error))
    if not shown:
        return _refused(f"no run in {arguments.runs} that is valid and has a page; gapmeter run chat-p99 makes one")
    if not any(map(shutil.which, BROWSERS)):
        return _refused("no Chromium on the PATH (Debian: apt install chromium)")
    arguments.out.mkdir(parents=True, exist_ok=True)
    asyncio.run(_take_all(shown, [] if arguments.run else list_known(arguments.runs), arguments.out))
    return 0


def _refused(why: str) -> int:
    print(f"screenshots: {why}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
