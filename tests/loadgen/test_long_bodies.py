"""Bodies of 32k tokens are made before the start: in the timed window they are only sent."""

from __future__ import annotations

import json
from pathlib import Path

from gapmeter.loadgen.planner import make_plan
from gapmeter.loadgen.tokenizer import PromptTokenizer
from gapmeter.records import Outcome
from gapmeter.scenarios.read import load_scenario
from tests.kit.loads import bed

TOKENS = 32_000


async def test_nothing_is_left_to_be_made_once_the_session_is(tokenizer: PromptTokenizer, tmp_path: Path) -> None:
    """The plan's bodies are taken away before the start, and each request still leaves whole."""
    settings = (
        f"workload.prompt_tokens={TOKENS}", "workload.output_tokens=2", "load.rate=40", "load.requests=20",
        "load.warmup=0", "server.max_model_len=null",
    )  # fmt: skip
    plan = make_plan(load_scenario("smoke", settings, {}), tokenizer, model_name="null")
    texts = [json.loads(body)["messages"][0]["content"] for body in plan.bodies]
    assert tokenizer.counts(texts[:3], "chat").tolist() == [TOKENS] * 3
    async with bed(plan, tmp_path) as on:
        plan.bodies.clear()
        records = await on.play()
    assert [record.outcome for record in records] == [Outcome.OK] * len(texts)
    assert [record.prompt_tokens for record in records] == [TOKENS] * len(texts)
