"""A decode loop of known times under the device clock: a forward, a pause of the host, sampling; recorded as a run is.

What it puts on the device, how it waits and how the host passes its time are handed in, so that the same loop runs on a
GPU and on a device in virtual time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from gapmeter_probe.device import COPIED, FORWARD, FORWARD_END, SAMPLED, DeviceClock

from gapmeter.analysis.device.use import describe_device
from gapmeter.analysis.ledger.ledger import LedgerInputs, make_ledger
from gapmeter.analysis.ledger.read import read_trace
from gapmeter.analysis.results.device import DeviceUse
from gapmeter.records import EntryFlag, RecordWriter, Span

_US = 1_000
_LAST = int(EntryFlag.PROMPT | EntryFlag.LAST_CHUNK)


@dataclass(frozen=True, slots=True)
class Work:
    """What a step is made of. ``wait``: until the device is done; ``spend``: the host's time passes, in ns."""

    forward: Callable[[], None]
    sample: Callable[[], None]
    wait: Callable[[], None]
    now: Callable[[], int]
    spend: Callable[[int], None]


def event_pair_ms(torch: Any, launch: Callable[[], None], times: int = 1) -> float:
    """How long the device works on what is launched so many times, between two events around all of it."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        launch()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def work_on_a_gpu(torch: Any, *, graph: bool) -> tuple[Work, float, float]:
    """Steps of some milliseconds, and how long a forward and its sampling take alone (one after the other, ms)."""
    side, times = (2048, 60) if graph else (4096, 8)  # a host of any speed launches the few large ones well ahead
    square = torch.ones(side, side, device="cuda", dtype=torch.bfloat16)
    logits = torch.ones(32, 128_256, device="cuda")

    def launch() -> None:
        for _ in range(times):
            torch.mm(square, square)

    def sample() -> None:
        torch.argmax(logits, dim=-1)

    forward: Callable[[], None] = launch
    with torch.cuda.stream(torch.cuda.Stream()):
        launch()
        sample()
    torch.cuda.synchronize()
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            launch()
        forward = captured.replay

    def alone_ms(part: Callable[[], None]) -> float:
        return event_pair_ms(torch, part, times=50) / 50

    def spend(ns: int) -> None:
        until = time.monotonic_ns() + ns
        while time.monotonic_ns() < until:
            pass

    alone_ms(forward), alone_ms(sample)  # the first time of each is slower
    work = Work(forward, sample, torch.cuda.synchronize, time.monotonic_ns, spend)
    return work, alone_ms(forward), alone_ms(sample)


@dataclass(frozen=True, slots=True)
class Found:
    """A step's time by the ledger, ms: on the device, waiting for its host, the host's between steps, unexplained."""

    device_ms: float
    launch_gap_ms: float
    host_ms: float
    unexplained_ms: float
    use: DeviceUse | None
    refused: tuple[str, ...]


def decode(folder: Path, torch: Any, work: Work, *, steps: int, pause_us: int, between_us: int) -> Found:
    """Serve one request: after each forward is over the host pauses, then samples; then there is time between steps."""
    core = RecordWriter(folder / "core.gap", {"role": "core", "device": "cuda:0"})
    api = RecordWriter(folder / "api.gap", {"role": "api"})
    clock, now = DeviceClock(core, torch), work.now
    due = now()
    asked, ref = api.request("engine", "request"), core.request("engine")
    api.span(Span.INGRESS, asked, due, now())
    api.span(Span.HANDOFF, asked, now(), now())
    core.span(Span.CORE_RECEIVE, ref, now(), now())
    core.span(Span.CORE_ADD, ref, now(), now())
    tokens: list[int] = []
    for seq in range(1, steps + 1):
        begun = now()
        entry = (ref, 8, 0, 0, _LAST) if seq == 1 else (ref, 1, 6 + seq, 0, 0)
        core.step(0, seq, [entry], running=1, waiting=0, free_blocks=1, schedule_ns=begun)
        work.spend(20 * _US)
        core.span(Span.SCHEDULE, seq, begun, now())
        prepared = now()
        clock.begin(seq)
        launching = now()
        core.span(Span.INPUT_PREP, seq, prepared, launching)
        clock.mark(FORWARD)
        work.forward()
        clock.mark(FORWARD_END)
        core.span(Span.HOST_LAUNCH, seq, launching, now())
        work.wait()
        work.spend(pause_us * _US)
        sampling = now()
        work.sample()
        clock.mark(SAMPLED)
        work.wait()
        clock.mark(COPIED)
        core.span(Span.SAMPLING, seq, sampling, now())
        updating = now()
        core.span(Span.UPDATE, seq, updating, now())
        core.emit(seq, now(), [(ref, 1)])
        put = now()
        core.span(Span.OUTPUT_PUT, seq, put, now())
        received = now()
        api.span(Span.OUTPUT_RECEIVE, asked, received, now(), n=seq)
        api.span(Span.DETOKENIZE, asked, now(), now(), n=seq)
        api.span(Span.EGRESS, asked, now(), now(), n=seq)
        tokens.append(now())
        work.spend(between_us * _US)
        core.span(Span.LOOP, seq, begun, now())
    work.wait()
    clock.finish()
    core.close()
    api.close()
    return _found(folder, due, tokens)


def _found(folder: Path, due: int, tokens: list[int]) -> Found:
    row = {
        "measured": True,
        "request_id": "request", "outcome": "ok", "due_ns": due, "connect_start_ns": None, "connect_end_ns": None,
        "write_ns": due, "sent_ns": due, "first_token_ns": tokens[0], "last_token_ns": tokens[-1],
        "output_tokens": len(tokens), "token_ns": tokens,
    }  # fmt: skip
    trace = read_trace(sorted(folder.glob("*.gap")), ["request"])
    ledger = make_ledger(LedgerInputs.of(pd.DataFrame([row]), trace))
    whole = ledger.rows[ledger.rows["event"] == "last_token"].iloc[0]
    each = {name: float(whole[f"{name}_ns"]) / len(tokens) / 1e6 for name in (
        "prefill", "decode", "launch_gap", "scheduling", "input_prep", "sampling", "output", "unexplained",
    )}  # fmt: skip
    return Found(
        device_ms=each["prefill"] + each["decode"],
        launch_gap_ms=each["launch_gap"],
        host_ms=each["scheduling"] + each["input_prep"] + each["sampling"] + each["output"],
        unexplained_ms=each["unexplained"],
        use=describe_device(trace, (due, tokens[-1])),
        refused=ledger.refused,
    )
