"""The truth file: what the simulated server meant to do and did, written apart from the probe's records.

One JSON object a line, in ``truth-ROLE-PID.jsonl`` of the folder that ``GAPMETER_TRUTH_DIR`` names. Stamps are
CLOCK_MONOTONIC ns, read for this file alone.
"""

from __future__ import annotations

import json
import os
from collections import deque
from pathlib import Path
from time import monotonic_ns as now
from typing import Any

from gapmeter_probe.records import Span

from gapmeter.servers.simulated.engine_loop import Listener
from gapmeter.servers.simulated.scheduler import Emission, Request, StepPlan

TRUTH_DIR = "GAPMETER_TRUTH_DIR"
_BUFFER_BYTES = 1 << 20


class TruthFile:
    """Lines of one process, kept in memory until ``write`` or ``close``: formatting takes longer than noting."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("x", buffering=_BUFFER_BYTES)
        self._rows: deque[tuple[Any, ...]] = deque()

    def stage(self, name: str, who: str | int, start_ns: int, end_ns: int, meant_ns: int | None = None) -> None:
        """One stage of a request (by its id) or of a step (by its number)."""
        self._rows.append((name, who, start_ns, end_ns, meant_ns))

    def note(self, kind: str, **values: Any) -> None:
        """Anything else."""
        self._rows.append((kind, values))

    def write(self, most: int) -> None:
        """Write at most ``most`` of the lines that are kept, about 3 µs each."""
        rows = self._rows
        for _ in range(min(most, len(rows))):
            self._file.write(_line(rows.popleft()))

    def flush(self) -> None:
        """Write all, and hand it to the kernel."""
        self.write(len(self._rows))
        self._file.flush()

    def close(self) -> None:
        """Write all and close."""
        self.flush()
        self._file.close()


def _line(row: tuple[Any, ...]) -> str:
    if len(row) == 2:
        return json.dumps({"kind": row[0], **row[1]}) + "\n"
    name, who, start, end, meant = row
    of, meant = json.dumps(who), "null" if meant is None else meant
    return f'{{"kind":"stage","stage":"{name}","of":{of},"start_ns":{start},"end_ns":{end},"meant_ns":{meant}}}\n'


def open_truth(role: str) -> TruthFile | None:
    """This process's truth file, or None when nobody asked for one."""
    folder = os.environ.get(TRUTH_DIR)
    if not folder:
        return None
    Path(folder).mkdir(parents=True, exist_ok=True)
    return TruthFile(Path(folder) / f"truth-{role}-{os.getpid()}.jsonl")


class TruthListener(Listener):
    """Writes the engine loop's stages, plans and emissions to a truth file."""

    def __init__(self, file: TruthFile) -> None:
        self._file = file
        self._names: dict[int, str] = {}
        self._begun: dict[tuple[int, int], int] = {}
        self._loop_ns = 0

    def name(self, request: Request, engine_id: str) -> None:
        """A request is about to arrive under this id."""
        self._names[request.key] = engine_id

    def begin(self, stage: Span, ref: int) -> None:
        """A stage starts."""
        if stage is Span.LOOP:
            self._loop_ns = now()
        else:
            self._begun[stage, ref] = now()

    def end(self, stage: Span, ref: int, meant_ns: int) -> None:
        """A stage ends."""
        end = now()
        if stage is Span.LOOP:
            self._file.stage("LOOP", ref, self._loop_ns, end)
            return
        who = self._names[ref] if stage < Span.LOOP else ref
        self._file.stage(stage.name, who, self._begun.pop((stage, ref)), end, meant_ns)

    def planned(self, plan: StepPlan, asynchronous: bool) -> None:
        """A step was decided."""
        at, names = now(), self._names
        self._file.note(
            "step",
            seq=plan.seq,
            at_ns=at,
            asynchronous=asynchronous,
            entries=[(names[e.key], e.tokens, e.before, e.cached, e.flags) for e in plan.entries],
            prompt_tokens=plan.prompt_tokens,
            decoding=plan.decoding,
            kv_tokens=plan.kv_tokens,
            free_blocks=plan.free_blocks,
            running=plan.running,
            waiting=plan.waiting,
        )

    def emitted(self, seq: int, emissions: tuple[Emission, ...]) -> None:
        """A step's tokens left the scheduler."""
        at = now()
        self._file.note("emitted", seq=seq, at_ns=at, tokens=[(self._names[e.key], e.tokens) for e in emissions])
        for emission in emissions:
            if emission.finished:
                del self._names[emission.key]

    def aborted(self, key: int) -> None:
        """A request was forgotten."""
        self._file.note("aborted", of=self._names.pop(key), at_ns=now())
