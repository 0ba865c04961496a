"""Takes the pictures of docs/images from a run's report: ``python docs/screenshots.py runs/FOLDER``.

Needs Chromium (Debian: apt install chromium); nothing is fetched from a network.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

IMAGES = Path(__file__).parent / "images"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--force-device-scale-factor=1.5",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Picture:
    """A file and the window it is taken from, in CSS pixels."""

    file: str
    width: int
    height: int
    flags: tuple[str, ...] = ()


PICTURES = (
    Picture("report.png", 1240, 1000),
    Picture("report-dark.png", 1240, 1000, ("--blink-settings=preferredColorScheme=0",)),
)


def take(browser: str, page: Path, picture: Picture, out: Path) -> Path:
    """Write one picture; returns its path. Raises subprocess.CalledProcessError when the browser fails."""
    target = out / picture.file
    with tempfile.TemporaryDirectory() as profile:
        size = f"--window-size={picture.width},{picture.height}"
        command = [browser, *FLAGS, *picture.flags, size, f"--user-data-dir={profile}", f"--screenshot={target}"]
        subprocess.run([*command, page.resolve().as_uri()], check=True, capture_output=True, timeout=120)
    return target


def main() -> int:
    """Take every picture of the run that is named."""
    parser = argparse.ArgumentParser(description="Pictures for the README, from a run's report.")
    parser.add_argument("run", type=Path, help="a run's folder with report.html")
    parser.add_argument("--out", type=Path, default=IMAGES)
    arguments = parser.parse_args()
    page = arguments.run / "report.html"
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None or not page.exists():
        missing = f"{page} does not exist" if browser else "no Chromium on the PATH (Debian: apt install chromium)"
        print(f"screenshots: {missing}", file=sys.stderr)
        return 2
    arguments.out.mkdir(parents=True, exist_ok=True)
    for picture in PICTURES:
        print(take(browser, page, picture, arguments.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
