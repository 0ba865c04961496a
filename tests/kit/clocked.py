"""Engines in virtual time under the real probes: what they serve, what they leave, and what was true.

An engine here is functions that do nothing but let time pass, wrapped by the probes' own hooks: the records are those
that a run leaves, and analysis reads them as it reads any other's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from gapmeter_probe.hooks import Probe
from gapmeter_probe.kernels import KernelSampler

from gapmeter.analysis.ledger.ledger import Ledger, LedgerInputs, make_ledger
from gapmeter.analysis.ledger.read import read_trace
from gapmeter.analysis.ledger.trace import Trace
from gapmeter.records import RecordWriter, Span
from tests.kit.cuda import REALTIME_NS, Device, HostClock
from tests.kit.wait import until

US = 1_000


@dataclass(slots=True)
class Request:
    """``prompt`` and ``output`` in tokens; due at ``due_ns``; when its tokens arrived."""

    name: str
    due_ns: int
    prompt: int
    output: int
    computed: int = 0
    scheduled: int = 0  # output tokens that steps have been scheduled for
    tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Run:
    """What was recorded, and what was true."""

    files: list[Path]
    device: Device
    requests: list[Request]
    launches: list[tuple[int, int]]  # of each step: the host begins to launch its forward, the device is done with it

    def trace(self) -> Trace:
        return read_trace(self.files, [r.name for r in self.requests])

    def ledger(self) -> Ledger:
        rows = [
            {
                "request_id": r.name, "outcome": "ok", "measured": True, "due_ns": r.due_ns, "connect_start_ns": None,
                "connect_end_ns": None, "write_ns": r.due_ns + 1000, "sent_ns": r.due_ns + 2000,
                "first_token_ns": r.tokens[0], "last_token_ns": r.tokens[-1], "output_tokens": r.output,
                "token_ns": r.tokens,
            }
            for r in self.requests
        ]  # fmt: skip
        return make_ledger(LedgerInputs.of(pd.DataFrame(rows), self.trace()))

    def busy_ns(self, since: int, until: int) -> int:
        """How long the device truly worked in between."""
        busy, reached = 0, since
        for work in sorted(self.device.work, key=lambda work: work.start):
            start, end = max(work.start, reached), min(work.end, until)
            busy, reached = busy + max(end - start, 0), max(reached, end)
        return busy

    def gap_ns(self) -> int:
        """How long it truly stood still between the launch of a step's forward and the step's end."""
        return sum(until - since - self.busy_ns(since, until) for since, until in self.launches)


def settle(sampler: KernelSampler) -> None:
    """Wait until the profiler runs, or has stopped, as was last asked for."""
    until(lambda: sampler._over or sampler._running == sampler._wanted)


def wrapper(*probes: Probe) -> Callable[..., Callable[..., Any]]:
    """A function that wraps another as the probes wrap the target of that name."""

    def wrap(target: str, function: Callable[..., Any]) -> Callable[..., Any]:
        for probe in probes:
            for hook in probe.hooks():
                if target in hook.targets:
                    function = hook.wrap(function)
        return function

    return wrap


@contextmanager
def virtual_time(clock: HostClock) -> Iterator[None]:
    """The probes read this clock in place of the machine's."""
    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith(("gapmeter_probe.", "gapmeter.servers.transformers.")) and hasattr(module, "now"):
                patch.setattr(module, "now", clock.now)
        patch.setattr("gapmeter_probe.calls.native", None)  # in C the probe reads the machine's clock
        patch.setattr("gapmeter_probe.kernels.realtime", lambda: clock.ns + REALTIME_NS)
        patch.setattr("gapmeter_probe.device.TIDY_S", 3600.0)  # its thread has no part in this time
        patch.setattr("gapmeter_probe.device.pause", lambda s: clock.spend(s * 1e9))
        yield


class Api:
    """The API server's records: what it does with a request before the engine, and with each token after it."""

    def __init__(self, folder: Path, requests: list[Request]) -> None:
        self._writer = RecordWriter(folder / "api.gap", {"role": "api"})
        self._refs = {
            request.name: self._writer.request(f"engine-{request.name}", request.name) for request in requests
        }
        self.close = self._writer.close

    def asked(self, request: Request) -> None:
        due, ref = request.due_ns, self._refs[request.name]
        self._writer.span(Span.INGRESS, ref, due + 20 * US, due + 280 * US)
        self._writer.span(Span.TEMPLATE, ref, due + 50 * US, due + 100 * US)
        self._writer.span(Span.TOKENIZE, ref, due + 100 * US, due + 200 * US)
        self._writer.span(Span.HANDOFF, ref, due + 280 * US, due + 300 * US)

    def deliver(self, request: Request, at: int) -> None:
        """A token whose message is read at ``at``."""
        ref, n = self._refs[request.name], len(request.tokens) + 1
        self._writer.span(Span.OUTPUT_RECEIVE, ref, at - 20 * US, at, n)
        self._writer.span(Span.DETOKENIZE, ref, at, at + 20 * US, n)
        self._writer.span(Span.EGRESS, ref, at + 20 * US, at + 40 * US, n)
        request.tokens.append(at + 60 * US)
