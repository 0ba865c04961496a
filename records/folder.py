"""A run's folder: where each file lies. Nothing here interprets what is in them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from gapmeter.records.compression import compress, with_compressed
from gapmeter.scenarios.plain_file import replace_text, sha256_of

PARTS = ("requests", "probe", "telemetry", "hdr", "logs")


class RunFolder:
    """The layout under ``runs/<time>-<scenario>-<short hash>/``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.requests, self.probe, self.telemetry, self.hdr, self.logs = (path / part for part in PARTS)
        self.manifest, self.summary, self.report = (
            path / name for name in ("manifest.json", "summary.json", "report.html")
        )

    @classmethod
    def create(cls, runs: Path, scenario: str, digest: str, parts: tuple[str, ...] = PARTS) -> RunFolder:
        """Make a fresh folder with folders for ``parts`` in it; a second run within the same second gets a suffix.

        Raises OSError when the folder cannot be made.
        """
        stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{scenario}-{digest[:6]}"
        for attempt in range(1000):
            path = runs / (stem if attempt == 0 else f"{stem}.{attempt}")
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                continue
            return cls(path)._furnished(parts)
        raise FileExistsError(f"{runs / stem}: a thousand runs of this name exist")

    @classmethod
    def at(cls, path: Path) -> RunFolder:
        """Make this very folder. Raises OSError when it cannot be made, or is there."""
        path.mkdir(parents=True)
        return cls(path)._furnished(PARTS)

    def _furnished(self, parts: tuple[str, ...]) -> RunFolder:
        for part in parts:
            (self.path / part).mkdir()
        return self

    def record_files(self, part: Path) -> list[Path]:
        """Compressed, or as they were written."""
        return with_compressed(part, "*.gap")

    def seal(self) -> dict[str, str]:
        """The run is over: compress its raw records; then as ``hashes``. Raises OSError."""
        switches = with_compressed(self.telemetry, "switches-*.bin")
        for path in (*self.record_files(self.requests), *self.record_files(self.probe), *switches):
            compress(path)
        return self.hashes()

    def hashes(self) -> dict[str, str]:
        """SHA-256 of every raw file, by its path in the folder."""
        raw = [file for part in (self.requests, self.probe, self.telemetry) for file in sorted(part.rglob("*"))]
        return {str(f.relative_to(self.path)): sha256_of(f) for f in raw if f.is_file()}


def write_json(path: Path, value: Any) -> None:
    """Replace ``path`` as ``replace_text``."""
    replace_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")
