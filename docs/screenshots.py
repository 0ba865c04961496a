"""Takes the pictures of docs/images from runs' reports: ``python -m docs.screenshots runs/FOLDER [runs/FOLDER …]``.

Of the first run: the first screen light and dark, on a phone, one request opened, dots over time, and on paper; of
every further one the first screen, named after its engine. Needs Chromium (Debian: apt install chromium) and nothing
from a network.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from gapmeter.doctor import BROWSERS
from tests.browser import Tab, browser_tab

IMAGES = Path(__file__).parent / "images"
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


def pictures_of(runs: list[Path]) -> list[tuple[Path, Picture]]:
    """Which picture is taken from which run's page."""
    wanted = [(runs[0].resolve() / "report.html", picture) for picture in FIRST]
    for run in runs[1:]:
        engine = json.loads((run / "manifest.json").read_text())["scenario"]["server"]["engine"]
        wanted.append((run.resolve() / "report.html", Picture(f"report-{engine}.png", 1240, 1060, 1.25)))
    return wanted


async def _take_all(runs: list[Path], out: Path) -> None:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        async with browser_tab(Path(profile) / "browser") as tab:
            await _take_each(tab, runs, out)


async def _take_each(tab: Tab, runs: list[Path], out: Path) -> None:
    for page, picture in pictures_of(runs):
        print(await take(tab, page, picture, out) or f"{page} has no {picture.part}: {picture.file} is left out")


def main() -> int:
    """Take every picture of the runs that are named."""
    parser = argparse.ArgumentParser(description="Pictures for the docs, from runs' reports.")
    parser.add_argument("run", type=Path, nargs="+", help="a run's folder with report.html")
    parser.add_argument("--out", type=Path, default=IMAGES)
    arguments = parser.parse_args()
    absent = [run / "report.html" for run in arguments.run if not (run / "report.html").exists()]
    if absent or not any(map(shutil.which, BROWSERS)):
        missing = f"{absent[0]} does not exist" if absent else "no Chromium on the PATH (Debian: apt install chromium)"
        print(f"screenshots: {missing}", file=sys.stderr)
        return 2
    arguments.out.mkdir(parents=True, exist_ok=True)
    asyncio.run(_take_all(arguments.run, arguments.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
