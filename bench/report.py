"""The report of a run of 10,000 requests: how large it is, and how soon a real Chromium shows it."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gapmeter.machine.instrument import NotMeasured
from gapmeter.options import Options
from gapmeter.study.study import run_scenario
from tests.kit.browser import browser_tab

REQUESTS, LOADS = 10_000, 5
_SETTINGS = (
    "server.engine=simulated", "load.rate=250", "load.warmup=0",
    "workload.prompt_tokens=32", "workload.output_tokens=8", "server.max_batch=16", 'slo=["ttft p99 <= 500 ms"]',
)  # fmt: skip
_TIMES = "[performance.getEntriesByName('first-contentful-paint')[0], performance.getEntriesByType('navigation')[0]]"
_READ = f"(([paint, all]) => paint && all.loadEventEnd && [paint.startTime, all.loadEventEnd])({_TIMES})"


def measure(folder: Path, requests: int = REQUESTS) -> dict[str, Any]:
    """Load the simulated engine with so many requests, and open the run's page a few times.

    Raises NotMeasured when the run has no page.
    """
    run = run_scenario("smoke", [*_SETTINGS, f"load.requests={requests}"], Options(folder, quiet=True))
    page = run.folder / "report.html"
    if not page.exists():
        raise NotMeasured(f"{run.folder} has no report.html")
    shown = asyncio.run(_opened(page.resolve()))
    first, complete = (sorted(times) for times in zip(*shown, strict=True))
    return {
        "requests": requests,
        "size_mb": page.stat().st_size / 1e6,
        "first_content_ms": {"median": float(np.median(first)), "least": first[0], "most": first[-1]},
        "complete_ms": {"median": float(np.median(complete)), "least": complete[0], "most": complete[-1]},
        "loads": len(shown),
    }


async def _opened(page: Path) -> list[tuple[float, float]]:
    """Milliseconds to the first content and to the end of loading, a pair a load."""
    times = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        async with browser_tab(Path(profile) / "browser") as tab:
            for _ in range(LOADS):
                await tab.open("about:blank")
                await tab.open(page)
                first, complete = await tab.until(_READ)
                times.append((float(first), float(complete)))
    return times


def table(found: Mapping[str, Any]) -> list[str]:
    """The figures in two lines."""
    first, complete = found["first_content_ms"], found["complete_ms"]
    return [
        f"report.html of a run of {found['requests']:,} requests: {found['size_mb']:.2f} MB;",
        f"in headless Chromium, {found['loads']} loads: first content after {_spread(first)},",
        f"complete after {_spread(complete)}.",
    ]


def _spread(found: Mapping[str, float]) -> str:
    return f"{found['median']:.0f} ms ({found['least']:.0f} to {found['most']:.0f})"
