"""What vLLM's own benchmark makes of a few requests. Run by vLLM's interpreter: it imports nothing of gapmeter.

``python tests/engines/vllm_requests.py ASKED.json``: sends each of the list's requests at its time with the request
function of ``vllm bench serve``, on a session like its own, and prints one line of JSON. ``requests`` has what the
function returned of each (times in s), with the TPOT in ms that ``calculate_metrics`` makes of it alone (0: none);
``metrics`` what that makes of all that succeeded.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

PERCENTILES = [50.0, 90.0, 95.0, 99.0]


async def measure(asked: list[dict[str, Any]]) -> dict[str, Any]:
    """``asked``: ``due_s`` from the start, ``url`` with its path, ``tokens``, and ``extra`` for the body."""
    import aiohttp

    connector = aiohttp.TCPConnector(limit=0, limit_per_host=0, keepalive_timeout=60)
    async with aiohttp.ClientSession(connector=connector, trust_env=True) as session:
        start = asyncio.get_running_loop().time() + 0.1
        outputs = await asyncio.gather(*(_send(session, one, start) for one in asked))
    return {"requests": [_told(output) for output in outputs], "metrics": _metrics(outputs)}


async def _send(session: Any, one: dict[str, Any], start: float) -> Any:
    from vllm.benchmarks.lib import endpoint_request_func as vllm

    chat = one["url"].endswith("/chat/completions")
    send = vllm.async_request_openai_chat_completions if chat else vllm.async_request_openai_completions
    given = vllm.RequestFuncInput(
        prompt="word", api_url=one["url"], prompt_len=1, output_len=one["tokens"], model="null-server",
        extra_body=one["extra"],
    )  # fmt: skip
    await asyncio.sleep(start + one["due_s"] - asyncio.get_running_loop().time())
    return await send(given, session)


def _told(output: Any) -> dict[str, Any]:
    kept = ("success", "error", "ttft", "itl", "latency", "output_tokens")
    return {name: getattr(output, name) for name in kept} | {"tpot_ms": _metrics([output])["tpot"]["mean"]}


def _metrics(outputs: list[Any]) -> dict[str, dict[str, float]]:
    """ms; without a tokenizer, an answer whose usage vLLM did not see counts as one token there."""
    from vllm.benchmarks.serve import calculate_metrics

    found, _ = calculate_metrics([], outputs, 1.0, None, PERCENTILES, {})
    told = {}
    for ours, theirs in (("ttft", "ttft"), ("itl", "itl"), ("tpot", "tpot"), ("e2e", "e2el")):
        percentiles = getattr(found, f"percentiles_{theirs}_ms")
        told[ours] = {f"p{p:g}": float(value) for p, value in percentiles}
        told[ours]["mean"] = float(getattr(found, f"mean_{theirs}_ms"))
    return told


def main() -> None:
    """Import first, so that nothing but sending happens while requests are under way."""
    import vllm.benchmarks.serve  # noqa: F401

    print(json.dumps(asyncio.run(measure(json.loads(Path(sys.argv[1]).read_text())))))


if __name__ == "__main__":
    main()
