"""Runs a real vLLM with the probe over a small mixed load, and hands back what client and processes recorded."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gapmeter.records import RecordFile, read_records
from gapmeter.servers.launch import Service, free_port, launch
from gapmeter.servers.models import resolve_model
from gapmeter.servers.vllm import find_python, installed, vllm_command

ROOT = Path(__file__).parents[2]
FORCED = Path(__file__).with_name("forced_scheduling.py")
SHARED = "a quick brown fox jumps over some lazy dog while wizards brew green tea; " * 15  # more than a cache block
GIVEN_UP_TOKENS = 900


@dataclass(frozen=True, slots=True)
class Answer:
    """What the client saw of one request. ``chunks`` are (arrival ns, output tokens so far by the server's usage)."""

    request_id: str
    status: int
    sent_ns: int
    end_ns: int
    chunks: list[tuple[int, int]]
    output_tokens: int
    prompt_tokens: int
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run: the client's answers by request id, and the record files, by role too (the last of several)."""

    answers: dict[str, Answer]
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
    with launch(command, {**spec.env, **env}, (), folder / "log", f"http://127.0.0.1:{port}/health", 300):
        answers, aborted = asyncio.run(_load(port, crowd_tokens))
    every = tuple(map(read_records, sorted((folder / "probe").glob("*.gap"))))
    return Run({a.request_id: a for a in answers}, frozenset(aborted), {f.process["role"]: f for f in every}, every)


async def _load(port: int, crowd_tokens: int) -> tuple[list[Answer], list[str]]:
    """Answers of everything that was let finish, and the ids of what was given up."""
    answers = [await _ask(port, f"first-{i}", _chat(f"{SHARED} question {i}", 6)) for i in range(2)]
    crowd = [_ask(port, f"crowd-{i}", _chat(f"{i} {SHARED}", crowd_tokens)) for i in range(8)]
    others = [
        _ask(port, "plain", {"prompt": "once upon a time", "max_tokens": 9}, "/v1/completions"),
        _ask(port, "whole", {**_chat("no stream", 7), "stream": False}),
        _ask(port, "pair", {**_chat("two choices", 5), "n": 2, "stream": False}),
        _ask(port, "given-up", _chat("this one is cancelled", GIVEN_UP_TOKENS), give_up_after=2),
    ]
    answers += await asyncio.gather(*crowd, *others)
    answers.append(await _ask(port, "refused", {"messages": "not a list"}))
    answers += [await _ask(port, f"last-{i}", _chat(f"{SHARED} {i}", 12)) for i in range(2)]
    await asyncio.sleep(0.5)  # the abort travels to the engine
    return [a for a in answers if a.request_id != "given-up"], ["given-up"]


def _chat(text: str, tokens: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": tokens}


async def _ask(
    port: int, request_id: str, body: dict[str, Any], path: str = "/v1/chat/completions", give_up_after: int = 0
) -> Answer:
    whole = {"model": "tiny", "stream": True, "ignore_eos": True, "min_tokens": body.get("max_tokens", 0), **body}
    if whole["stream"]:
        whole["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    payload = json.dumps(whole).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nX-Request-Id: {request_id}\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    sent = time.monotonic_ns()
    writer.write(f"{head}Connection: close\r\nContent-Length: {len(payload)}\r\n\r\n".encode() + payload)
    pieces: list[tuple[int, bytes]] = []
    while piece := await reader.read(1 << 16):
        pieces.append((time.monotonic_ns(), piece))
        if give_up_after and len(pieces) >= give_up_after:
            break
    writer.close()
    return _answer(request_id, sent, pieces, whole=not give_up_after)


def _answer(request_id: str, sent: int, pieces: list[tuple[int, bytes]], *, whole: bool) -> Answer:
    """What came; of an answer that was given up (not ``whole``) the last line may be a part."""
    text = b"".join(piece for _, piece in pieces)
    status = int(text.split(b" ", 2)[1])
    chunks: list[tuple[int, int]] = []
    metrics: dict[str, float] = {}
    output = prompt = end = 0
    lines = _lines(pieces)
    for arrived, line in lines if whole else lines[:-1]:
        end = arrived
        if not line.startswith((b"data: {", b"{")):
            continue
        event = json.loads(line.removeprefix(b"data: "))
        usage = event.get("usage") or {}
        metrics = event.get("metrics") or metrics
        if usage:
            output, prompt = usage["completion_tokens"], usage["prompt_tokens"]
        if event.get("choices") and usage and output > (chunks[-1][1] if chunks else 0):
            chunks.append((arrived, output))
    return Answer(request_id, status, sent, end, chunks, output, prompt, metrics)


def _lines(pieces: list[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """Whole lines with the arrival of the piece that ended them (chunk-size lines pass through, and match nothing)."""
    found, rest = [], b""
    for arrived, piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        found += [(arrived, line.strip()) for line in whole]
    return [*found, (pieces[-1][0] if pieces else 0, rest.strip())]
