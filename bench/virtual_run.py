"""A whole run in virtual time: arrivals from a seed, the simulated engine, and the tables that a real run leaves.

Stages come from what the engine says it did (its listener) and from the outcomes' times; they add up exactly. What is
waited for the one API server before tokenizing counts as ``tokenize``, after detokenizing as ``egress``; there is no
client and no network, so their stages are unmeasured.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from gapmeter_probe.records import Span

from bench.virtual_server import Arrival, Outcome, Settings, simulate
from gapmeter.analysis.arrays import Ints
from gapmeter.analysis.compare.sides import RunColumns, run_of
from gapmeter.analysis.stages import STAGES, UNEXPLAINED, column
from gapmeter.servers.simulated.engine_loop import Listener
from gapmeter.servers.simulated.scheduler import Emission, StepPlan

_STEP = {
    Span.SCHEDULE: 0, Span.UPDATE: 1, Span.INPUT_PREP: 2, Span.FORWARD: 3, Span.SAMPLING: 4, Span.OUTPUT_SEND: 5,
}  # fmt: skip
_SCHEDULE, _UPDATE, _PREP, _FORWARD, _SAMPLING, _SEND = range(6)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Poisson arrivals with log-normal lengths. The rate is per second."""

    requests: int = 400
    rate: float = 12.0
    prompt_median: float = 90.0
    output_median: float = 14.0
    warmup: int = 40

    def arrivals(self, seed: int) -> list[Arrival]:
        """The same ones for the same seed."""
        source, due, arrivals = random.Random(f"arrivals/{seed}"), 0.0, []
        for _ in range(self.requests + self.warmup):
            due += source.expovariate(self.rate)
            prompt = 1 + int(source.lognormvariate(np.log(self.prompt_median), 0.5))
            output = 2 + int(source.lognormvariate(np.log(self.output_median), 0.4))
            arrivals.append(Arrival(round(due * 1e9), prompt, output))
        return arrivals


class _Steps(Listener):
    """Hears how long each part of each step took, which requests were in it, and who got tokens."""

    def __init__(self, requests: int) -> None:
        self.parts: list[list[int]] = []
        self.first_step = np.full(requests, -1, dtype=np.int64)
        self.token_steps: list[list[int]] = [[] for _ in range(requests)]
        self.evictions = 0
        self._first = 0

    def end(self, stage: Span, ref: int, meant_ns: int) -> None:
        """A part of a step is over."""
        place = _STEP.get(stage)
        if place is not None:
            self.parts[ref - self._first][place] = meant_ns

    def planned(self, plan: StepPlan, asynchronous: bool) -> None:
        """A step was decided."""
        if not self.parts:
            self._first = plan.seq
        self.parts.append([0] * len(_STEP))
        self.evictions += len(plan.preempted)
        for entry in plan.entries:
            if self.first_step[entry.key] < 0:
                self.first_step[entry.key] = plan.seq - self._first

    def emitted(self, seq: int, emissions: tuple[Emission, ...]) -> None:
        """A step's tokens."""
        for emission in emissions:
            self.token_steps[emission.key].append(seq - self._first)


def virtual_run(arrivals: Sequence[Arrival], settings: Settings, name: str, warmup: int = 0) -> RunColumns:
    """Simulate, and give the run as a comparison reads it; the first ``warmup`` requests are not measured.

    Raises ValueError for settings under which steps overlap or requests are evicted: stages would not simply add up.
    """
    if settings.limits.asynchronous:
        raise ValueError("steps overlap under asynchronous scheduling; these ledgers are for steps in a row")
    steps = _Steps(len(arrivals))
    outcomes = simulate(arrivals, settings, steps)
    if steps.evictions:
        raise ValueError(f"{steps.evictions} evictions; give the engine more KV blocks")
    requests, ledger = _tables(arrivals, outcomes, steps, warmup)
    return run_of(requests, ledger, name, open_loop=True)


def _tables(
    arrivals: Sequence[Arrival], outcomes: Sequence[Outcome], steps: _Steps, warmup: int
) -> tuple[pd.DataFrame, pd.DataFrame]:
    ids = [f"r{i}" for i in range(len(arrivals))]
    requests = pd.DataFrame(
        {
            "request_id": ids, "index": np.arange(len(ids)), "turn": 0, "outcome": "ok",
            "measured": np.arange(len(ids)) >= warmup,
            "due_ns": [o.due_ns for o in outcomes], "first_token_ns": [o.first_token_ns for o in outcomes],
            "last_token_ns": [o.last_token_ns for o in outcomes], "token_ns": [np.array(o.token_ns) for o in outcomes],
            "output_tokens": [len(o.token_ns) for o in outcomes],
            "prompt_tokens_asked": [a.prompt_tokens for a in arrivals],
            "output_tokens_asked": [a.output_tokens for a in arrivals],
        }
    )  # fmt: skip
    cumulated = np.concatenate([np.zeros((1, len(_STEP)), np.int64), np.cumsum(steps.parts, axis=0)])
    ends = (("first_token", 0, requests["first_token_ns"]), ("last_token", -1, requests["last_token_ns"]))
    rows = [
        _ledger(
            event, ids, end.to_numpy(np.int64), outcomes, cumulated, steps, [own[which] for own in steps.token_steps]
        )
        for event, which, end in ends
    ]
    return requests, pd.concat(rows, ignore_index=True)


def _ledger(
    event: str, ids: list[str], end_ns: Ints, outcomes: Sequence[Outcome], cumulated: Ints, steps: _Steps,
    last: list[int],
) -> pd.DataFrame:  # fmt: skip
    """One event's ledgers. A request is in every step from its first to its last, since nobody is evicted."""
    due, received, added, scheduled = (
        np.array([getattr(o, f"{name}_ns") for o in outcomes]) for name in ("due", "received", "added", "scheduled")
    )
    first_token = np.array([own[0] for own in steps.token_steps])
    of_own = cumulated[np.array(last) + 1] - cumulated[steps.first_step]
    prompt = cumulated[first_token + 1, _FORWARD] - cumulated[steps.first_step, _FORWARD]
    sent = cumulated[np.array(last) + 1, _SEND] - cumulated[np.array(last), _SEND]
    made = scheduled + of_own[:, :_SEND].sum(axis=1)
    parts = {
        "tokenize": received - due,
        "engine_wait": added - received,
        "queue": scheduled - added,
        "prefill": prompt,
        "decode": of_own[:, _FORWARD] - prompt,
        "input_prep": of_own[:, _PREP],
        "sampling": of_own[:, _SAMPLING],
        "scheduling": of_own[:, _SCHEDULE] + of_own[:, _UPDATE],
        "output": sent,
        "egress": end_ns - made - sent,
    }
    table = pd.DataFrame({"request_id": ids, "event": event, "total_ns": end_ns - due})
    for stage in STAGES:
        table[column(stage.name)] = parts[stage.name].astype(np.float64) if stage.name in parts else np.nan
    table[column(UNEXPLAINED)] = (end_ns - due - sum(parts.values())).astype(np.float64)
    return table
