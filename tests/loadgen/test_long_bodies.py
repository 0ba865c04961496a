"""Bodies of 32k tokens are made before the start: in the timed window they are only sent."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from gapmeter.loadgen.plan import Plan
from gapmeter.loadgen.planner import make_plan
from gapmeter.loadgen.tokenizer import PromptTokenizer
from gapmeter.records import Outcome
from gapmeter.scenarios import load_scenario
from tests.kit.loads import bed

TOKENS = 32_000


@pytest.fixture(scope="module")
def long(tokenizer: PromptTokenizer) -> Plan:
    settings = (
        f"workload.prompt_tokens={TOKENS}", "workload.output_tokens=2", "load.rate=40", "load.requests=20",
        "load.warmup=0", "server.max_model_len=null",
    )  # fmt: skip
    made = make_plan(load_scenario("smoke", settings, {}), tokenizer, model_name="null")
    for body in made.bodies[:3]:
        assert tokenizer.counts([json.loads(body)["messages"][0]["content"]], "chat") == TOKENS
    return made


async def test_nothing_is_left_to_be_made_once_the_session_is(long: Plan, tmp_path: Path) -> None:
    """The plan's bodies are taken away before the start, and each request still leaves whole."""
    own = dataclasses.replace(long, bodies=list(long.bodies))
    sizes = [len(body) for body in own.bodies]
    async with bed(own, tmp_path) as on:
        own.bodies.clear()
        records = await on.play()
    assert min(sizes) > 100_000
    assert [record.outcome for record in records] == [Outcome.OK] * len(sizes)
    assert [record.prompt_tokens for record in records] == [TOKENS] * len(sizes)


def test_they_travel_to_another_process_as_they_are(long: Plan, tmp_path: Path) -> None:
    share = long.slice(1, 2)
    share.save(tmp_path / "share.npz")
    again = Plan.load(tmp_path / "share.npz")
    assert again.bodies == share.bodies
    assert again.digest() == share.digest()


def test_they_share_nothing_from_their_first_words_on(long: Plan) -> None:
    starts = {json.loads(body)["messages"][0]["content"][:60] for body in long.bodies}
    assert len(starts) == len(long)
    assert np.all(long.prompt_tokens == TOKENS)
