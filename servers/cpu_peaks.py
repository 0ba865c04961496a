"""What this machine's cores can do at most: memory bandwidth and multiplications, measured for about a second.

``-m servers.cpu_peaks SPEC`` (JSON) prints one JSON document. One thread a core, all at once, each on arrays of its
own; a rate is the sum over threads. The figures are those of the cores that a server of ours is about to get.

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
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

_BUDGET_S = 0.22  # a kernel, once its arrays are there
_FEWEST = 3
_LARGEST_BYTES = 1 << 30
_SIZE = 768  # of the matrices
_CACHES = Path("/sys/devices/system/cpu")
_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")

Work = Callable[[], None]


def measure_peaks(cores: Sequence[int], weight_bytes: float | None, timeout_s: float = 15.0) -> dict[str, Any] | None:
    """The peaks of these cores in a process of their own; None when it could not be measured.

    Rates are ``{"median", "low", "high", "repeats"}``: GB/s (10^9 bytes) for ``triad``, ``read`` and ``cached``, TFLOPS
    for ``multiply``. ``cached`` is None when ``weight_bytes`` do not fit into the last-level cache.
    """
    spec = json.dumps({"cores": list(cores), "weight_bytes": weight_bytes})
    single = dict.fromkeys(_THREAD_VARIABLES, "1")  # the threads are ours
    try:
        done = subprocess.run([sys.executable, "-P", "-m", "gapmeter.servers.cpu_peaks", spec], capture_output=True,
                              text=True,
                              timeout=timeout_s, check=True, env={**os.environ, **single})  # fmt: skip
        found: dict[str, Any] = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return found


def main(arguments: Sequence[str]) -> int:
    spec = json.loads(arguments[0])
    if spec["cores"]:
        os.sched_setaffinity(0, spec["cores"])
    began = time.perf_counter()
    cores = sorted(os.sched_getaffinity(0))
    cache = last_level_cache(cores)
    length = _elements(4 * (cache or 1 << 25), len(cores))
    parts = [[np.ones(length) for _ in range(3)] for _ in cores]
    found: dict[str, Any] = {"cores": cores, "llc_bytes": cache, "array_bytes": 8 * length * len(cores)}
    found["triad"] = rate([partial(_triad, *part) for part in parts], 40.0 * length * len(cores) / 1e9)
    found["read"] = rate([partial(_read, part[1], part[2]) for part in parts], 16.0 * length * len(cores) / 1e9)
    found["cached"] = _cached(parts, spec["weight_bytes"], cache)
    squares = [[np.ones((_SIZE, _SIZE), np.float32) for _ in range(3)] for _ in cores]
    operations = 2.0 * _SIZE**3 * len(cores) / 1e12
    found["multiply"] = rate([partial(_multiply, *square) for square in squares], operations)
    found["multiply_precision"] = "float32"
    print(json.dumps(found | {"took_s": time.perf_counter() - began}))
    return 0


def last_level_cache(cores: Sequence[int], root: Path = _CACHES) -> int | None:
    """Bytes of the last-level caches that these cores have, each shared one counted once; None where unknown."""
    found: dict[str, int] = {}
    for core in cores:
        entries = [(int(_text(p / "level") or 0), p) for p in (root / f"cpu{core}" / "cache").glob("index*")]
        level, path = max(entries, default=(0, root), key=lambda entry: entry[0])
        size = _text(path / "size")
        if level and size.endswith("K") and size[:-1].isdigit():
            found[_text(path / "shared_cpu_list") or str(core)] = int(size[:-1]) * 1024
    return sum(found.values()) or None


def rate(work: Sequence[Work], amount: float) -> dict[str, float]:
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
    return {"median": float(np.median(rates)), "low": rates[0], "high": rates[-1], "repeats": len(rates)}


def _elements(total_bytes: int, cores: int) -> int:
    """Doubles in one array of one core, so that one array of all cores has ``total_bytes``, within reason."""
    return max(1 << 16, min(total_bytes, _LARGEST_BYTES) // 8 // cores)


def _cached(parts: list[list[Any]], weight_bytes: float | None, cache: int | None) -> dict[str, float] | None:
    """Read bandwidth over as many bytes as a step reads, from two arrays of half that each."""
    if not weight_bytes or not cache or weight_bytes >= cache:
        return None
    length = max(1024, int(weight_bytes / 16 / len(parts)))
    small = [(part[1][:length].copy(), part[2][:length].copy()) for part in parts]
    return rate([partial(_read, *pair) for pair in small], 16.0 * length * len(parts) / 1e9)


def _triad(a: Any, b: Any, c: Any) -> None:
    np.multiply(c, 3.0, out=a)
    np.add(a, b, out=a)


def _read(b: Any, c: Any) -> None:
    np.dot(b, c)


def _multiply(a: Any, b: Any, c: Any) -> None:
    np.matmul(a, b, out=c)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
