"""One plan issued by workers on several machines: the master as a child process, seen as a fleet of one."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from gapmeter.loadgen.fleet import Fleet, NotStarted, end_processes, last_line
from gapmeter.loadgen.plan import Plan

# The start must have reached every worker before it comes.
_AHEAD_NS = 3_000_000_000


@dataclass(frozen=True, slots=True)
class Workers:
    """How many workers a run waits for, and where (port 0: any). One that is silent for ``patience_s`` is given up."""

    count: int
    listen_host: str = "127.0.0.1"
    listen_port: int = 5557
    patience_s: float = 30.0


@dataclass(frozen=True, slots=True)
class MasterSpec:
    """What a master has to do. ``listen_port`` 0: any. A worker that is silent for ``patience_s`` is given up.

    Messages come in at ``listen_port``, plans and records travel by the port after it (any where that is 0).
    """

    url: str
    plan: str
    folder: str
    report: str
    listen_host: str
    listen_port: int
    workers: int
    generator: str
    patience_s: float

    @classmethod
    def read(cls, path: Path) -> MasterSpec:
        """Raises OSError, or ValueError or TypeError for what is no spec."""
        return cls(**json.loads(path.read_text()))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


@contextlib.contextmanager
def make_cluster(
    plan: Plan, url: str, folder: Path, workers: Workers, *, generator: str, say: Callable[[str], None]
) -> Iterator[Fleet]:  # fmt: skip
    """A master with all its workers connected to the target and waiting; it is not left when the block ends.

    Their record files come into ``folder`` at the end; ``report_path(folder)`` is kept up to date while the run goes
    on. ``say`` is called with who is still missing. Raises NotStarted with the reason when a worker cannot begin or a
    port is taken, OSError when files cannot be written.
    """
    spec_path, plan_path, log = folder / "master.json", folder / "master.plan.npz", folder / "master.log"
    plan.save(plan_path)
    MasterSpec(
        url=url, plan=str(plan_path), folder=str(folder), report=str(report_path(folder)),
        listen_host=workers.listen_host, listen_port=workers.listen_port, workers=workers.count, generator=generator,
        patience_s=workers.patience_s,
    ).write(spec_path)  # fmt: skip
    with log.open("wb") as errors:
        master = subprocess.Popen(
            [sys.executable, "-P", "-m", "gapmeter.loadgen.locust.master", str(spec_path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=errors, process_group=0,
        )  # fmt: skip
    try:
        _await_ready(master, log, say)
        records = tuple(folder / f"worker-{k}.gap" for k in range(workers.count))
        yield Fleet((master,), records, (log,), _AHEAD_NS)
    finally:
        end_processes([master])
        plan_path.unlink(missing_ok=True)


def report_path(folder: Path) -> Path:
    """What the master says of its workers: states, counts, clock offsets, merged histograms. JSON."""
    return folder / "workers.json"


def _await_ready(master: subprocess.Popen[bytes], log: Path, say: Callable[[str], None]) -> None:
    assert master.stdout is not None
    for line in master.stdout:
        if line == b"ready\n":
            return
        say(line.decode(errors="replace").strip())
    code = master.wait()
    raise NotStarted(last_line(log) or f"the master of the workers ended with exit code {code}")
