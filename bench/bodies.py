"""Do long prompts slow the issuer? ``python -m bench.bodies``: lag with short and with 32k-token bodies, null server.

Prompts are planned as in a run, with the tokenizer of the built-in model; the server answers eight tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from gapmeter.loadgen.fleet import make_fleet
from gapmeter.loadgen.plan import Plan
from gapmeter.loadgen.planner import make_plan
from gapmeter.loadgen.tokenizer import PromptTokenizer, load_tokenizer
from gapmeter.machine.instrument import Cores, Timing, null_server
from gapmeter.records import Outcome, read_records
from gapmeter.scenarios import load_scenario
from gapmeter.servers.models import resolve_model


def main(arguments: list[str]) -> int:
    """One line for each length of prompts."""
    parser = argparse.ArgumentParser(prog="python -m bench.bodies", description=__doc__)
    parser.add_argument("--rate", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--tokens", type=int, nargs="*", default=[100, 8_000, 32_000])
    options = parser.parse_args(arguments)
    usable = sorted(os.sched_getaffinity(0))
    cores = Cores((usable[0],), (usable[-1],))
    tokenizer = load_tokenizer(resolve_model("builtin:tiny"))
    print("prompt tokens  body kB  planned in s  ready in s  lag p50 / p99 ms  write p50 / p99 ms  failed")
    for tokens in options.tokens:
        began = time.monotonic()
        plan = planned(tokenizer, tokens, options.rate, options.seconds)
        print(_line(plan, tokens, time.monotonic() - began, cores), flush=True)
    return 0


def planned(tokenizer: PromptTokenizer, tokens: int, rate: float, seconds: float) -> Plan:
    """Poisson arrivals of prompts that are all so long."""
    overrides = (
        f"workload.prompt_tokens={tokens}", "workload.output_tokens=8", f"load.rate={rate}", "load.requests=null",
        f"load.duration={seconds}s", "load.warmup=1s", "server.max_model_len=null",
    )  # fmt: skip
    return make_plan(load_scenario("smoke", overrides, {}), tokenizer, model_name="null")


def _line(plan: Plan, tokens: int, planned_s: float, cores: Cores) -> str:
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as held:
        folder = Path(name)
        port = held.enter_context(null_server(cores, Timing(5.0, 1.0), log=None))
        began = time.monotonic()
        share = dataclasses.replace(plan, notes=())
        fleet = held.enter_context(make_fleet(share, f"http://127.0.0.1:{port}", None, folder, cores.client, 1))
        ready_s = time.monotonic() - began
        fleet.start()
        fleet.wait(lambda: None, 0.5)
        found = read_records(folder / "worker-0.gap").requests()
    lag = np.array([r.sent_ns - r.due_ns - (r.connect_end_ns - r.connect_start_ns) for r in found]) / 1e6
    write = np.array([r.sent_ns - r.write_ns for r in found]) / 1e6
    failed = sum(r.outcome is not Outcome.OK for r in found)
    size = sum(map(len, plan.bodies)) / len(plan) / 1e3
    p = [float(np.percentile(values, q)) for values in (lag, write) for q in (50, 99)]
    return (
        f"{tokens:13,}  {size:7.1f}  {planned_s:12.2f}  {ready_s:10.2f}  {p[0]:8.3f} / {p[1]:.3f}  "
        f"{p[2]:8.3f} / {p[3]:.3f}  {failed} of {len(found)}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
