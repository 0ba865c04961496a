"""What this machine's cores can do at most: memory bandwidth and multiplications, measured for about a second.

``-m gapmeter.servers.cpu_peaks SETTINGS`` (JSON) prints one JSON document. One thread a core, all at once, each on
arrays of its own; a rate is the sum over threads. The figures are those of the cores that a server of ours will get.

- triad: a = b + s c (McCalpin's STREAM) as two passes of numpy, 5 x 8 bytes an element, what a write allocates not
  counted, over arrays of four times the last-level cache;
- read: the dot product of two such arrays, 2 x 8 bytes an element: a decode step mostly reads;
- cached: the same dot product over as many bytes as the model has weights, where these fit into the cache;
- multiply: C = A B of single-precision matrices, 2 n^3 operations. numpy has no 16-bit arithmetic that an engine uses,
  so other precisions have no figure here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_BUDGET_S = 0.22  # a kernel, once its arrays are there
_FEWEST = 3
_LARGEST_BYTES = 1 << 30
_SIZE = 768  # of the matrices
_CACHES = Path("/sys/devices/system/cpu")
_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")

Work = Callable[[], None]
Floats = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Rate:
    """Over repeats: GB/s (10^9 bytes), or TFLOPS for a multiplication."""

    median: float
    low: float
    high: float
    repeats: int


@dataclass(frozen=True, slots=True)
class CpuPeaks:
    """``cached`` is None when the model's weights do not fit into the last-level cache."""

    cores: tuple[int, ...]
    llc_bytes: int | None
    array_bytes: int
    triad: Rate
    read: Rate
    cached: Rate | None
    multiply: Rate
    multiply_precision: str
    took_s: float

    def to_dict(self) -> dict[str, Any]:
        """As the manifest holds it."""
        return asdict(self)


def measure_peaks(cores: Sequence[int], weight_bytes: float | None, timeout_s: float = 15.0) -> CpuPeaks | None:
    """The peaks of these cores in a process of their own; None when they could not be measured."""
    settings = json.dumps({"cores": list(cores), "weight_bytes": weight_bytes})
    single = dict.fromkeys(_THREAD_VARIABLES, "1")  # the threads are ours
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "gapmeter.servers.cpu_peaks", settings],
            capture_output=True, text=True, timeout=timeout_s, check=True, env={**os.environ, **single},
        )  # fmt: skip
        value = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    rates = {name: Rate(**value[name]) for name in ("triad", "read", "cached", "multiply") if value[name]}
    return CpuPeaks(**{"cached": None, **value, **rates, "cores": tuple(value["cores"])})


def main(arguments: Sequence[str]) -> int:
    settings = json.loads(arguments[0])
    if settings["cores"]:
        os.sched_setaffinity(0, settings["cores"])
    began = time.perf_counter()
    cores = tuple(sorted(os.sched_getaffinity(0)))
    cache = last_level_cache(cores)
    length = max(1 << 16, min(4 * (cache or 1 << 25), _LARGEST_BYTES) // 8 // len(cores))  # of one array of one core
    parts = [[np.ones(length) for _ in range(3)] for _ in cores]
    squares = [[np.ones((_SIZE, _SIZE), np.float32) for _ in range(3)] for _ in cores]
    peaks = CpuPeaks(
        cores=cores,
        llc_bytes=cache,
        array_bytes=8 * length * len(cores),
        triad=measure_rate([partial(_triad, *part) for part in parts], 40.0 * length * len(cores) / 1e9),
        read=measure_rate([partial(np.dot, part[1], part[2]) for part in parts], 16.0 * length * len(cores) / 1e9),
        cached=_cached(parts, settings["weight_bytes"], cache),
        multiply=measure_rate(
            [partial(np.matmul, a, b, out=c) for c, a, b in squares], 2.0 * _SIZE**3 * len(cores) / 1e12
        ),
        multiply_precision="float32",
        took_s=0.0,
    )
    print(json.dumps(replace(peaks, took_s=time.perf_counter() - began).to_dict()))
    return 0


def last_level_cache(cores: Sequence[int], root: Path = _CACHES) -> int | None:
    """Bytes of the last-level caches that these cores have, each shared one counted once; None where unknown."""
    sizes: dict[str, int] = {}
    for core in cores:
        entries = [(int(_text(p / "level") or 0), p) for p in (root / f"cpu{core}" / "cache").glob("index*")]
        level, path = max(entries, default=(0, root), key=lambda entry: entry[0])
        size = _text(path / "size")
        if level and size.endswith("K") and size[:-1].isdigit():
            sizes[_text(path / "shared_cpu_list") or str(core)] = int(size[:-1]) * 1024
    return sum(sizes.values()) or None


def measure_rate(work: Sequence[Work], amount: float) -> Rate:
    """``amount`` per second over repeats in which every thread does its work once; the first is not counted."""
    times: list[float] = []
    together = threading.Barrier(len(work) + 1)
    over = threading.Event()

    def thread(mine: Work) -> None:
        while True:
            together.wait()
            if over.is_set():
                return
            mine()
            together.wait()

    threads = [threading.Thread(target=thread, args=(mine,), daemon=True) for mine in work]
    for each in threads:
        each.start()
    until = time.perf_counter() + _BUDGET_S
    while len(times) <= _FEWEST or time.perf_counter() < until:
        began = time.perf_counter()
        together.wait()
        together.wait()
        times.append(time.perf_counter() - began)
    over.set()
    together.wait()
    rates = sorted(amount / took for took in times[1:])
    return Rate(float(np.median(rates)), rates[0], rates[-1], len(rates))


def _cached(parts: list[list[Floats]], weight_bytes: float | None, cache: int | None) -> Rate | None:
    """Read bandwidth over as many bytes as a step reads, from two arrays of half that each."""
    if not weight_bytes or not cache or weight_bytes >= cache:
        return None
    length = max(1024, int(weight_bytes / 16 / len(parts)))
    small = [(part[1][:length].copy(), part[2][:length].copy()) for part in parts]
    return measure_rate([partial(np.dot, *pair) for pair in small], 16.0 * length * len(parts) / 1e9)


def _triad(a: Floats, b: Floats, c: Floats) -> None:
    np.multiply(c, 3.0, out=a)
    np.add(a, b, out=a)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
