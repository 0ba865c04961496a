"""Runs a real vLLM with the probe over a small mixed load, and hands back what client and processes recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gapmeter.records import RecordFile, read_records
from gapmeter.servers.launch import Service, free_port, launch
from gapmeter.servers.models import resolve_model
from gapmeter.servers.vllm import find_python, installed, vllm_command
from tests.kit.simulated import Asked, send, session

ROOT = Path(__file__).parents[2]
FORCED = Path(__file__).with_name("forced_scheduling.py")
SHARED = "a quick brown fox jumps over some lazy dog while wizards brew green tea; " * 15  # more than a cache block
GIVEN_UP_TOKENS = 900


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run: the client's answers by request id, and the record files, by role too (the last of several)."""

    answers: dict[str, Asked]
    aborted: frozenset[str]
    files: dict[str, RecordFile] = field(default_factory=dict)
    every: tuple[RecordFile, ...] = ()


def run_vllm(
    folder: Path, *, asynchronous: bool = False, single_process_engine: bool = False, crowd_tokens: int = 150,
    **more: object,
) -> Run:  # fmt: skip
    """Launch with the tiny model, load, stop with SIGTERM, read. ``more`` are vLLM's own arguments.

    Few cache blocks and a small token budget, so that requests are evicted and prompts are cut into chunks.
    """
    python, port = find_python(ROOT), free_port()
    found = installed(python)
    args: dict[str, Any] = {"enforce_eager": True, "max_num_batched_tokens": 256, "num_gpu_blocks_override": 18}
    args |= more
    env = {"GAPMETER_PROBE_DIR": str(folder / "probe")}
    if more:
        env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}  # several ranks want cores each
    if single_process_engine:
        args["distributed_executor_backend"] = "uni"
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    version = found.get("vllm-cpu") or found["vllm"]
    service = Service(resolve_model("builtin:tiny"), "tiny", port, 8, "float32", args, ())
    spec = vllm_command(python, service, version=version)
    command = (spec.command[0], str(FORCED), *spec.command[3:]) if asynchronous else spec.command
    url = f"http://127.0.0.1:{port}"
    with launch(command, {**spec.env, **env}, (), folder / "log", f"{url}/health", 300):
        answers, aborted = asyncio.run(_load(url, crowd_tokens))
    every = tuple(map(read_records, sorted((folder / "probe").glob("*.gap"))))
    return Run({a.request_id: a for a in answers}, frozenset(aborted), {f.process["role"]: f for f in every}, every)


async def _load(url: str, crowd_tokens: int) -> tuple[list[Asked], list[str]]:
    """Answers of everything that was let finish, and the ids of what was given up."""
    async with session() as client:

        def ask(request_id: str, body: dict[str, Any], **how: Any) -> Coroutine[Any, Any, Asked]:
            whole = {
                "model": "tiny",
                "stream": True,
                "ignore_eos": True,
                "min_tokens": body.get("max_tokens", 0),
            } | body
            if whole["stream"]:
                whole["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
            return send(client, url, request_id, whole, **how)

        answers = [await ask(f"first-{i}", _chat(f"{SHARED} question {i}", 6)) for i in range(2)]
        crowd = [ask(f"crowd-{i}", _chat(f"{i} {SHARED}", crowd_tokens)) for i in range(8)]
        others = [
            ask("plain", {"prompt": "once upon a time", "max_tokens": 9}, chat=False),
            ask("whole", {**_chat("no stream", 7), "stream": False}),
            ask("pair", {**_chat("two choices", 5), "n": 2, "stream": False}),
            ask("given-up", _chat("this one is cancelled", GIVEN_UP_TOKENS), give_up_after=2),
        ]
        answers += await asyncio.gather(*crowd, *others)
        answers.append(await ask("refused", {"messages": "not a list"}))
        answers += [await ask(f"last-{i}", _chat(f"{SHARED} {i}", 12)) for i in range(2)]
        await asyncio.sleep(0.5)  # the abort travels to the engine
    return [a for a in answers if a.request_id != "given-up"], ["given-up"]


def _chat(text: str, tokens: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": tokens}
