"""Record the runs of ``tests/golden``, or derive their figures anew from the same records: see ``test_golden``.

``python -m tests.golden.record [--derive] KEY …`` in a checkout with both engines; every KEY when none is named.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq

from gapmeter.servers.launch import Service, free_port, launch
from gapmeter.servers.models import resolve_model
from gapmeter.servers.null.server import Schedule
from gapmeter.servers.simulated import simulated_command
from tests.golden.test_golden import HERE, compare, derive, told, unpack
from tests.kit.command import Command, Done, await_gone, crew, gapmeter, settings
from tests.kit.servers import faulty

Recipe = Callable[[Path], None]


SMALL = settings(
    "load.arrivals=poisson", "load.rate=16", "load.requests=48", "load.warmup=1s", "load.timeout=9s",
    "workload.prompt_tokens={uniform: [16, 48]}", "workload.output_tokens={uniform: [3, 9]}",
    'slo=["ttft p90 <= 200 ms", "itl p90 <= 90 ms", "errors <= 20 %"]',
)  # fmt: skip
TINY = (*SMALL, *settings("load.requests=32"))
# Steps so long that a busy machine's hiccups are small against them: most of these runs are valid.
SLOW = settings("server.engine=simulated", "server.args.forward_ms=40")
SIMULATED = ("run", "smoke", *SLOW)
WORKERS = settings("load.generator=locust", "load.arrivals=constant")


def run(*words: str) -> Recipe:
    """One command that ends as a measurement does."""

    def record(runs: Path) -> None:
        _ended(gapmeter(*words, "--runs", str(runs), runs=runs))

    return record


def attached(runs: Path) -> None:
    """A server that somebody else has started, without a probe."""
    spec = simulated_command(
        sys.executable,
        Service(resolve_model("builtin:tiny"), "served", port := free_port(), 8, "float32", {"forward_ms": 40}),
    )
    url = f"http://127.0.0.1:{port}"
    log = Path(tempfile.mkdtemp()) / "server.log"
    with launch(spec.command, spec.env, (), log, f"{url}/health", 60):
        run("run", "smoke", "--url", url, *SMALL)(runs)


def failures(runs: Path) -> None:
    """Every fault that a server has, and retries, of which some help."""
    faults = ("none", "status_500", "status_404", "close_unanswered", "cut", "garbage", "stall", "none")
    retries = settings("load.retries=2", "load.retry_pause=20ms", "load.timeout=1s")
    with faulty(faults, schedule=Schedule(first_ns=80_000_000, gap_ns=20_000_000), lasting=2) as url:
        run("run", "smoke", "--url", url, *SMALL, *retries)(runs)


def killed(runs: Path) -> None:
    """The whole command, in the middle of its load."""
    command = Command((*SIMULATED, *SMALL), runs)
    command.await_load(30)
    command.process.kill()
    command.process.communicate()
    assert await_gone(command.mark) == []


def workers(runs: Path) -> None:
    """Locust's master and two workers of its own."""
    command = Command((*SIMULATED, *SMALL, *WORKERS, "--workers", "2", "--listen", "127.0.0.1:0"), runs)
    with crew(command, ((), ())) as processes:
        _ended(command.done())
        assert [process.wait(30) for process in processes] == [0, 0]


def compared(runs: Path) -> None:
    """Two runs that were there, of which the second has a slower server."""
    for forward_ms in (40, 55):
        run(*SIMULATED, *SMALL, *settings(f"server.args.forward_ms={forward_ms}", "load.requests=72"))(runs)
    sides = map(str, sorted(runs.iterdir()))
    run("compare", *sides, "--factor", "server.args.forward_ms")(runs)


def gpu(runs: Path) -> None:
    """vLLM without graphs, whose forwards wait for their host: on a machine with an NVIDIA GPU only."""
    if shutil.which("nvidia-smi") is None:
        sys.exit("gpu is recorded on a machine with an NVIDIA GPU; --derive keeps its records")
    run("run", "chat-p99", "--engine", "vllm", *settings(
        "server.model=builtin:llama-1b", "server.precision=bfloat16", "server.max_batch=8",
        "server.args={enforce_eager: true}", "load.arrivals=closed", "load.rate=null",
        "load.duration=null", "load.concurrency=8", "load.requests=64", "load.warmup=auto",
        "workload.output_tokens={uniform: [100, 140]}", "slo=[]",
    ))(runs)  # fmt: skip


RECIPES: dict[str, Recipe] = {
    "attached": attached,
    "capacity": run(
        "capacity", "smoke", *SLOW, "--within", "80%", "--budget", "60s", "--target-rps", "100",
        *settings(
            "load.rate=20", "load.warmup=0", "workload.prompt_tokens=16", "workload.output_tokens=2",
            "server.max_batch=2", 'slo=["ttft p50 <= 150 ms"]',
        ),
    ),
    "closed": run(*SIMULATED, *SMALL, *settings(
        "load.arrivals=closed", "load.rate=null", "load.concurrency=4", "load.warmup=auto", "load.requests=80",
    )),
    "compare": compared,
    "compare-pairs": run(
        "compare", "--run", "smoke", "--pairs", "2", "--a", "server.max_batch=8", "--b", "server.max_batch=2", *TINY,
        *SLOW,
    ),
    "conversations": run("run", "dialogue", *SLOW, *settings(
        "load.duration=8s", "load.warmup=1s", "load.rate=2", "load.think_time={exponential: 500ms}",
    )),
    "curve": run(*SIMULATED, *SMALL, *settings(
        "load.rate=null", "load.arrivals=steps", "load.requests=null", "load.duration=5s",
        "load.steps=[{rate: 10, for: 2s}, {rate: 30, for: 2s}]",
    )),
    "failures": failures,
    "gpu": gpu,
    "killed": killed,
    "locustfile": run(*SIMULATED, *SMALL, "--locustfile", "docs/locustfile.py", *settings(
        "load.arrivals=closed", "load.rate=null", "load.requests=null", "load.concurrency=4", "load.duration=6s",
    )),
    "simulated": run(*SIMULATED, *SMALL, *settings("load.requests=96")),
    "sweep": run(*SIMULATED, *TINY, *settings("sweep={load.rate: [10, 20]}", "repeat=2")),
    "transformers": run("run", "smoke", "--engine", "transformers", *SMALL),
    "vllm": run("run", "smoke", "--engine", "vllm", *SMALL),
    "workers": workers,
}  # fmt: skip
_LEFT_OUT = ("report.html", "trace.json.gz", "logs", "server", "servers")  # large, and not read


def main() -> None:
    """What the words ask for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("keys", nargs="*", metavar="KEY", help=", ".join(RECIPES))
    parser.add_argument("--derive", action="store_true", help="keep the records, derive their figures anew")
    asked = parser.parse_args()
    for key in asked.keys or RECIPES:
        runs = Path("runs/golden") / key
        shutil.rmtree(runs, ignore_errors=True)
        runs.mkdir(parents=True)
        if asked.derive:
            unpack(HERE / f"{key}.tar.xz", runs, runs)
            for stale in list(runs.rglob("hdr")):  # a stage may have none any more
                shutil.rmtree(stale)
        else:
            RECIPES[key](runs)
        manifests = {path: path.read_bytes() for path in runs.rglob("manifest.json")}
        derive(runs, runs)
        for path, recorded in manifests.items():  # a report completes that of a killed run
            path.write_bytes(recorded)
        archive = pack(key, runs)
        check(key, archive)
        print(f"{archive}: {archive.stat().st_size / 1e3:.0f} kB", file=sys.stderr)


def check(key: str, archive: Path) -> None:
    """Whether what was packed is derived again from what was packed."""
    with tempfile.TemporaryDirectory() as kept, tempfile.TemporaryDirectory() as today:
        unpack(archive, Path(kept), Path(today))
        derive(Path(today), Path(kept))
        found = compare(Path(kept), Path(today), {})
        assert not found.figures + found.prose, told(key, found.figures + found.prose)
        print(key, dict(found.counts), file=sys.stderr)


def pack(key: str, runs: Path) -> Path:
    """``KEY.tar.xz`` with what the test reads of the folders in ``runs``."""
    target = HERE / f"{key}.tar.xz"
    with tarfile.open(target, "w:xz", preset=9) as tar:
        for path in sorted(path for path in runs.rglob("*") if path.is_file()):
            name = path.relative_to(runs)
            if not set(name.parts) & set(_LEFT_OUT):
                data = _uncompressed(path) if path.suffix == ".parquet" else path.read_bytes()
                about = tarfile.TarInfo(str(name))
                about.size, about.mode = len(data), 0o644
                tar.addfile(about, io.BytesIO(data))
    return target


def _uncompressed(path: Path) -> bytes:
    """A table as the archive compresses it best."""
    out = io.BytesIO()
    pq.write_table(pq.read_table(path), out, compression="none")
    return out.getvalue()


def _ended(done: Done) -> None:
    assert done.code in (0, 98, 99) and not done.left, done.err


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
