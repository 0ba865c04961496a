"""Prompts share as much as they are meant to, and the plan says how much that is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from gapmeter.loadgen.plan import Plan
from gapmeter.loadgen.planner import make_plan
from gapmeter.loadgen.tokenizer import PromptTokenizer
from gapmeter.scenarios.errors import ScenarioError
from gapmeter.scenarios.read import load_scenario


def planned(tokenizer: PromptTokenizer | None, name: str, *overrides: str, repeat: int = 0) -> Plan:
    scenario = load_scenario(name, overrides, {})
    return make_plan(scenario, tokenizer, model_name="served", repeat=repeat)


def texts(plan: Plan) -> list[list[str]]:
    return [json.loads(body)["messages"][0]["content"].split() for body in plan.bodies]


def alike(one: Sequence[object], other: Sequence[object]) -> int:
    """How much of both is the same, from the start on."""
    same = (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(same, min(len(one), len(other)))


def repeated(prompts: list[list[str]]) -> list[int]:
    """Words at the start of each that stood at the start of an earlier one, by comparing all with all."""
    return [max((alike(one, other) for other in prompts[:at]), default=0) for at, one in enumerate(prompts)]


GROUPS = (
    "load.requests=120", "load.rate=100", "workload.prompt_tokens={uniform: [80, 160]}", "workload.shared_prefix=0.5",
)  # fmt: skip


def test_each_request_begins_with_one_of_the_shared_texts_drawn_evenly(tokenizer: PromptTokenizer) -> None:
    plan = planned(tokenizer, "smoke", *GROUPS, "workload.shared_prefixes=4")
    prompts = texts(plan)
    starts = {" ".join(prompt[:10]) for prompt in prompts}
    assert len(starts) == 4
    counts = [sum(" ".join(prompt[:10]) == start for prompt in prompts) for start in starts]
    assert min(counts) > len(prompts) / 4 / 2
    for body, tokens in zip(plan.bodies, plan.prompt_tokens, strict=True):
        assert tokenizer.counts([json.loads(body)["messages"][0]["content"]], "chat") == tokens


def test_one_shared_text_is_the_one_that_there_was_before_there_could_be_several(tokenizer: PromptTokenizer) -> None:
    one, four = (planned(tokenizer, "smoke", *GROUPS, f"workload.shared_prefixes={n}") for n in (1, 4))
    assert np.array_equal(one.due_ns, four.due_ns)
    assert len({" ".join(prompt[:10]) for prompt in texts(one)}) == 1
    assert " ".join(texts(one)[0][:10]) in {" ".join(prompt[:10]) for prompt in texts(four)}


@pytest.mark.parametrize("groups", [1, 3])
def test_the_share_that_a_cache_can_hit_is_what_comparing_the_prompts_gives(
    tokenizer: PromptTokenizer, groups: int
) -> None:
    plan = planned(tokenizer, "smoke", *GROUPS, f"workload.shared_prefixes={groups}")
    found = sum(repeated(texts(plan))) / plan.prompt_tokens.sum()
    assert plan.prefix_share == pytest.approx(found, abs=0.01)
    assert 0.35 < found < 0.5


def test_blocks_of_a_trace_with_equal_ids_have_equal_text(tokenizer: PromptTokenizer) -> None:
    plan = planned(tokenizer, "replay-chat")
    replayed = load_scenario("replay-chat", (), {}).load.trace
    trace = replayed.recorded
    assert plan.prompt_tokens.tolist() == list(trace.prompt_tokens)
    assert plan.output_tokens.tolist() == list(trace.output_tokens)
    prompts = texts(plan)
    for one, ids in zip(prompts, trace.blocks, strict=True):
        for other, others in zip(prompts, trace.blocks, strict=True):
            assert alike(one, other) >= min(alike(ids, others) * 512, len(one), len(other)) - 3
    found = sum(repeated(prompts)) / plan.prompt_tokens.sum()
    assert plan.prefix_share == pytest.approx(found, abs=0.02)
    assert found > 0.3


def test_requests_of_a_trace_that_have_no_ids_have_texts_of_their_own(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"timestamp": 100 * n, "input_length": 600, "output_length": 4} for n in range(5)]
    rows[0] |= {"hash_ids": [0, 1]}
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "s.yaml").write_text("load: {arrivals: trace, trace: {file: t.jsonl}, warmup: 0}\n")
    plan = make_plan(load_scenario(tmp_path / "s.yaml", (), {}), None, model_name="served")
    assert len({tuple(prompt[:20]) for prompt in texts(plan)}) == 5
    assert plan.prefix_share == 0


def test_lengths_of_the_workload_come_before_the_traces(tokenizer: PromptTokenizer) -> None:
    plan = planned(tokenizer, "replay-chat", "workload.prompt_tokens=40", "load.duration=10s")
    assert set(plan.prompt_tokens.tolist()) == {40}
    assert len(set(plan.output_tokens.tolist())) > 3
    assert plan.prefix_share == 0
    assert "hash_ids are not used" in " ".join(plan.notes)
    with pytest.raises(ScenarioError, match=r"workload\.shared_prefix: the trace's hash_ids say which text repeats"):
        load_scenario("replay-chat", ["workload.shared_prefix=0.5"], {})


def test_a_repeat_has_other_shared_texts(tokenizer: PromptTokenizer) -> None:
    first, second = (planned(tokenizer, "smoke", *GROUPS, "workload.shared_prefixes=4", repeat=r) for r in (0, 1))
    assert {tuple(prompt[:10]) for prompt in texts(first)}.isdisjoint(tuple(prompt[:10]) for prompt in texts(second))
