"""Who writes down what the engine does: the probe's records, as a real engine's probe would, and the truth file.

The truth is what the simulated server meant to do and did, apart from the probe's records: one JSON object a line, in
``truth-ROLE-PID.jsonl`` of the folder that ``GAPMETER_TRUTH_DIR`` names. Both stamp for themselves, CLOCK_MONOTONIC ns.
"""

from __future__ import annotations

import json
import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from time import monotonic_ns as now
from typing import Any

from gapmeter_probe.records import Outcome, Span, StepFlag
from gapmeter_probe.writer import RecordWriter

from gapmeter.servers.simulated.engine_loop import Listener
from gapmeter.servers.simulated.scheduler import Emission, Key, Request, StepPlan

TRUTH_DIR = "GAPMETER_TRUTH_DIR"
_BUFFER_BYTES = 1 << 20
_LOOP = Span.LOOP  # to look up a member of an enumeration costs more than to compare it


class TruthFile:
    """Lines of one process, kept in memory until ``write`` or ``close``: formatting takes longer than noting."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("x", buffering=_BUFFER_BYTES)
        self._rows: deque[tuple[Any, ...]] = deque()

    def stage(self, name: str, who: str | int, start_ns: int, end_ns: int, meant_ns: int) -> None:
        """One stage of a request (by its id) or of a step (by its number)."""
        self._rows.append((name, who, start_ns, end_ns, meant_ns))

    def note(self, kind: str, **values: Any) -> None:
        """Anything else."""
        self._rows.append((kind, values))

    def write(self, most: int) -> None:
        """Write at most ``most`` of the lines that are kept, about 3 µs each."""
        for _ in range(min(most, len(self._rows))):
            row = self._rows.popleft()
            if len(row) == 2:
                self._file.write(json.dumps({"kind": row[0], **row[1]}) + "\n")
                continue
            name, who, start, end, meant = row
            stamps = f'"start_ns":{start},"end_ns":{end},"meant_ns":{meant}'
            self._file.write(f'{{"kind":"stage","stage":"{name}","of":{json.dumps(who)},{stamps}}}\n')

    def flush(self) -> None:
        """Write all, and hand it to the kernel."""
        self.write(len(self._rows))
        self._file.flush()

    def close(self) -> None:
        """Write all and close."""
        self.flush()
        self._file.close()


def open_truth(role: str) -> TruthFile | None:
    """This process's truth file, or None when nobody asked for one."""
    folder = os.environ.get(TRUTH_DIR)
    if not folder:
        return None
    Path(folder).mkdir(parents=True, exist_ok=True)
    return TruthFile(Path(folder) / f"truth-{role}-{os.getpid()}.jsonl")


class Recorder(Listener):
    """Stamps where stages begin and end, and writes each when it is over."""

    def __init__(self) -> None:
        self._begun: dict[tuple[Span, Key], int] = {}
        self._loop_ns = 0  # an iteration of the loop begins once, and ends for each step that it touched

    def write_stage(self, stage: Span, ref: Key, start_ns: int, end_ns: int, meant_ns: int) -> None:
        """One stage of a request (by its key) or of a step (by its number)."""
        raise NotImplementedError

    def begin(self, stage: Span, ref: Key) -> None:
        if stage is _LOOP:
            self._loop_ns = now()
        else:
            self._begun[stage, ref] = now()

    def end(self, stage: Span, ref: Key, meant_ns: int) -> None:
        end = now()
        start = self._loop_ns if stage is _LOOP else self._begun.pop((stage, ref))
        self.write_stage(stage, ref, start, end, meant_ns)


class TruthRecorder(Recorder):
    """Writes the engine loop's stages, plans and emissions to a truth file."""

    def __init__(self, file: TruthFile) -> None:
        super().__init__()
        self._file = file

    def write_stage(self, stage: Span, ref: Key, start_ns: int, end_ns: int, meant_ns: int) -> None:
        self._file.stage(stage.name, ref, start_ns, end_ns, meant_ns)

    def planned(self, plan: StepPlan, asynchronous: bool) -> None:
        self._file.note(
            "step",
            seq=plan.seq,
            at_ns=now(),
            asynchronous=asynchronous,
            entries=[(e.key, e.tokens, e.before, e.cached, e.flags) for e in plan.entries],
            prompt_tokens=plan.prompt_tokens,
            decoding=plan.decoding,
            kv_tokens=plan.kv_tokens,
            free_blocks=plan.free_blocks,
            running=plan.running,
            waiting=plan.waiting,
        )

    def emitted(self, seq: int, emissions: tuple[Emission, ...]) -> None:
        self._file.note("emitted", seq=seq, at_ns=now(), tokens=[(e.key, e.tokens) for e in emissions])

    def aborted(self, key: Key) -> None:
        self._file.note("aborted", of=key, at_ns=now())


@dataclass(slots=True)
class _Recorded:
    """A request in the probe's file."""

    ref: int
    prompt: int
    made: int = 0
    cached: int | None = None


class ProbeRecorder(Recorder):
    """Writes what a real engine's probe would record."""

    def __init__(self, writer: RecordWriter) -> None:
        super().__init__()
        self._writer = writer
        self._requests: dict[Key, _Recorded] = {}

    def name(self, request: Request) -> None:
        """A request is about to arrive, with its engine id as its key."""
        self._requests[request.key] = _Recorded(self._writer.request(request.key), request.prompt_tokens)

    def write_stage(self, stage: Span, ref: Key, start_ns: int, end_ns: int, meant_ns: int) -> None:
        self._writer.span(stage, self._requests[ref].ref if stage < _LOOP else ref, start_ns, end_ns)

    def planned(self, plan: StepPlan, asynchronous: bool) -> None:
        at = now()
        requests = self._requests
        for key in plan.preempted:
            self._writer.span(Span.PREEMPT, requests[key].ref, at, at)
        for entry in plan.entries:
            if requests[entry.key].cached is None:
                requests[entry.key].cached = entry.cached
        self._writer.step(
            (StepFlag.ASYNC if asynchronous else 0) | (StepFlag.EMPTY if plan.empty else 0),
            plan.seq,
            [(requests[e.key].ref, e.tokens, e.before, e.cached, e.flags) for e in plan.entries],
            running=plan.running,
            waiting=plan.waiting,
            free_blocks=plan.free_blocks,
            schedule_ns=self._begun[Span.SCHEDULE, plan.seq],
        )

    def emitted(self, seq: int, emissions: tuple[Emission, ...]) -> None:
        at = now()
        self._writer.emit(seq, at, [(self._requests[e.key].ref, e.tokens) for e in emissions])
        for emission in emissions:
            self._requests[emission.key].made += emission.tokens
            if emission.finished:
                self._leave(emission.key, Outcome.OK, at)

    def aborted(self, key: Key) -> None:
        self._leave(key, Outcome.ABORTED, now())

    def _leave(self, key: Key, outcome: Outcome, at_ns: int) -> None:
        request = self._requests.pop(key)
        self._writer.counts(outcome, request.ref, request.prompt, request.made, request.cached or 0, at_ns)
