"""A user's own prompts are asked as they stand, in their order, and counted by the model's tokenizer."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from gapmeter.loadgen import PlanError
from gapmeter.loadgen.plan import Plan
from gapmeter.loadgen.planner import make_plan
from gapmeter.loadgen.tokenizer import PromptTokenizer, load_tokenizer
from gapmeter.scenarios.errors import BadValue, ScenarioError
from gapmeter.scenarios.files import Prompts
from gapmeter.scenarios.model import Scenario
from gapmeter.scenarios.read import load_scenario
from tests.kit.tokenizers import write_model

CHAT = [
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why? – ¿por qué?"}]},
    {"messages": [{"role": "user", "content": "one two"}], "max_tokens": 3, "id": "further keys are passed over"},
]
TEXT = [{"prompt": "Once upon"}, {"prompt": "a time\nthere", "max_tokens": 7}]


def scenario(folder: Path, lines: list[Any], *overrides: str, output: str = "output_tokens: 5") -> Scenario:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    (folder / "mine.jsonl").write_text(text)
    (folder / "s.yaml").write_text(
        f"workload: {{kind: file, file: mine.jsonl, {output}}}\nload: {{rate: 10, requests: 5, warmup: 0}}\n"
    )
    return load_scenario(folder / "s.yaml", overrides, {})


def planned(folder: Path, lines: list[Any], tokenizer: PromptTokenizer | None, *overrides: str) -> Plan:
    return make_plan(scenario(folder, lines, *overrides), tokenizer, model_name="served")


def test_messages_are_asked_as_they_stand_and_come_round_again(tmp_path: Path, tokenizer: PromptTokenizer) -> None:
    plan = planned(tmp_path, CHAT, tokenizer)  # of which one has max_tokens, and the workload output_tokens
    assert plan.path == "/v1/chat/completions"
    asked = [json.loads(body) for body in plan.bodies]
    assert [body["messages"] for body in asked] == [CHAT[i % 2]["messages"] for i in range(5)]
    assert [body["max_tokens"] for body in asked] == [5] * 5 == plan.output_tokens.tolist()
    counts = [int(tokenizer.count_messages([body["messages"]])[0]) for body in asked]
    assert plan.prompt_tokens.tolist() == counts
    assert plan.prompt_tokens_exact
    (note,) = plan.notes
    assert note.startswith("the file "), "a sentence begins with a capital, and a path may not"
    assert note.endswith("holds 2 prompts for 5 requests: they repeat, so a prefix cache will know them")
    assert plan.prefix_share == pytest.approx(sum(counts[2:]) / sum(counts))


def test_a_prompt_that_the_file_holds_twice_is_a_repeated_one(tmp_path: Path, tokenizer: PromptTokenizer) -> None:
    plan = planned(tmp_path, [*TEXT, TEXT[0]], tokenizer, "load.requests=3")
    (note,) = plan.notes
    assert "holds 2 different prompts for 3 requests" in note
    assert plan.prefix_share == pytest.approx(plan.prompt_tokens[2] / plan.prompt_tokens.sum())


def test_prompts_are_completions(tmp_path: Path, tokenizer: PromptTokenizer) -> None:
    plan = planned(tmp_path, TEXT, tokenizer, "load.requests=2")
    assert plan.path == "/v1/completions"
    assert [json.loads(body)["prompt"] for body in plan.bodies] == ["Once upon", "a time\nthere"]
    assert plan.prompt_tokens.tolist() == tokenizer.counts(["Once upon", "a time\nthere"], "completion").tolist()
    assert plan.notes == ()
    assert not planned(tmp_path, TEXT, None).prompt_tokens_exact


def test_a_closed_loop_beyond_its_bodies_asks_the_same_prompts_again(
    tmp_path: Path, tokenizer: PromptTokenizer
) -> None:
    plan = planned(tmp_path, CHAT, tokenizer, "load.arrivals=closed", "load.concurrency=2", "load.requests=5")
    assert plan.body(len(plan) + 1) == plan.bodies[1]


def test_a_closed_loop_asks_every_prompt_of_a_file_before_any_again(tmp_path: Path) -> None:
    """How many it will ask is not known: with few users it has as many bodies as the file has prompts, or more."""
    lines = [{"prompt": f"question {number}"} for number in range(3000)]
    closed = ("load.arrivals=closed", "load.rate=null", "load.requests=null", "load.duration=10s", "load.concurrency=2")
    plan = planned(tmp_path, lines, None, *closed)
    assert [json.loads(plan.body(number))["prompt"] for number in (0, 2999, 3000)] == [
        "question 0", "question 2999", "question 0",
    ]  # fmt: skip


def test_answers_are_as_long_as_a_trace_says_where_neither_file_nor_workload_does(tmp_path: Path) -> None:
    rows = [{"timestamp": 500 * at, "input_length": 50, "output_length": 20 + at} for at in range(3)]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, TEXT)))
    (tmp_path / "s.yaml").write_text(
        "workload: {kind: file, file: mine.jsonl}\nload: {arrivals: trace, trace: {file: t.jsonl}, warmup: 0}\n"
    )
    plan = make_plan(load_scenario(tmp_path / "s.yaml", (), {}), None, model_name="served")
    assert plan.output_tokens.tolist() == [20, 7, 22]
    assert [json.loads(body)["max_tokens"] for body in plan.bodies] == [20, 7, 22]


@pytest.mark.parametrize("chat", [True, False])
def test_what_prompts_begin_with_alike_is_known_to_a_prefix_cache(tmp_path: Path, chat: bool) -> None:
    system = "word " * 200
    lines: list[Any] = [{"prompt": f"{system}Question {n}?"} for n in range(20)]
    if chat:
        roles = ("system", "user")
        lines = [
            {"messages": [{"role": role, "content": text} for role, text in zip(roles, (system, f"{n}?"), strict=True)]}
            for n in range(20)
        ]
    plan = planned(tmp_path, lines, None, "load.requests=20")
    assert plan.prefix_share == pytest.approx(19 / 20, abs=0.01)
    assert plan.notes == () or "repeat" not in plan.notes[-1]


def test_prompts_of_a_file_that_would_fill_the_memory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="the prompts have 20,000,000,000 tokens"):
        planned(tmp_path, [{"prompt": "word " * 200_000}], None, "load.requests=100000")


def test_a_long_prompt_among_many_takes_no_more_memory_than_its_own(tmp_path: Path) -> None:
    lines = [*({"prompt": f"question {number}"} for number in range(2000)), {"prompt": "word " * 40_000}]
    asked = scenario(tmp_path, lines)
    tracemalloc.start()
    make_plan(asked, None, model_name="served")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50 << 20


def test_a_chat_that_the_template_refuses_is_named_with_its_line(tmp_path: Path) -> None:
    """Gemma's, for one, refuses system messages."""
    model = write_model(tmp_path / "model")
    template = model / "chat_template.jinja"
    refusal = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    template.write_text(refusal + template.read_text())
    with pytest.raises(PlanError, match=r"mine\.jsonl:2: .*no system role.*; change its messages"):
        planned(tmp_path, [CHAT[1], CHAT[0]], load_tokenizer(model))


def test_a_prompt_that_does_not_fit_is_named_with_its_line(tmp_path: Path, tokenizer: PromptTokenizer) -> None:
    lines = [CHAT[1], "", {"messages": [{"role": "user", "content": "one " * 200}]}]
    with pytest.raises(PlanError, match=r"mine\.jsonl:3: prompt and answer have \d+ tokens; they do not fit .* 150"):
        planned(tmp_path, lines, tokenizer, "server.max_model_len=150")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{half", "mine.jsonl:2: not JSON: "),
        ({"text": "x"}, 'mine.jsonl:2: {"text": "x"} is not an object with either prompt or messages'),
        ({"prompt": "x", "messages": []}, "is not an object with either prompt or messages"),
        ({"messages": []}, "mine.jsonl:2: messages [] is not a list with at least one message"),
        ({"messages": [{"role": "user"}]}, "mine.jsonl:2: messages content is missing; write {role: user, content: "),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]},
            '[{"type": "text", "text": "x"}] is not a text; write content as one text in quotes; lists of',
        ),
        ({"messages": [{"role": 5, "content": "x"}]}, "messages 5 is not a text; write a role in quotes"),
        ({"prompt": "x", "temperature": 1}, 'mine.jsonl:2: "temperature" is not sent; remove it'),
        ({"prompt": "x", "maxtokens": 9}, 'mine.jsonl:2: "maxtokens" is not sent; remove it'),
        (
            {"messages": [{"role": "tool", "content": "x", "tool_call_id": "c"}]},
            'mine.jsonl:2: messages "tool_call_id" is not sent; remove it',
        ),
        ({"prompt": ""}, 'mine.jsonl:2: prompt "" is not a text'),
        ({"prompt": "x"}, "mine.jsonl:2: prompt and messages in one file; write all lines the one way or the other"),
        ({"messages": CHAT[1]["messages"], "max_tokens": 0}, "mine.jsonl:2: max_tokens 0 is not a number of tokens"),
    ],
)
def test_a_bad_line_is_named_with_its_file_and_number(tmp_path: Path, line: Any, says: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        scenario(tmp_path, [CHAT[1], line])
    assert says in str(caught.value)
    assert "s.yaml:1:" in str(caught.value)


@pytest.mark.parametrize("line", ['{"prompt": %s}', '{"messages": %s}', "%s"])
def test_a_line_of_any_depth_is_named(tmp_path: Path, line: str) -> None:
    """JSON may be read to a depth at which it can no longer be quoted."""
    file = tmp_path / "mine.jsonl"
    for depth in range(800, 1000):
        file.write_text(line % ("[" * depth + "]" * depth))
        with pytest.raises(BadValue, match=r"mine\.jsonl:1: "):
            _ = Prompts(str(file)).entries


def test_an_answer_without_a_length_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"workload.output_tokens: missing, and .*mine\.jsonl:1 has no max_tokens"):
        scenario(tmp_path, CHAT, output="temperature: 0")
    assert scenario(tmp_path, [CHAT[1]], output="temperature: 0").workload.output_tokens is None
    with pytest.raises(ScenarioError, match=r"workload.prompt_tokens: a prompt file already fixes this"):
        scenario(tmp_path, CHAT, "workload.prompt_tokens=7")
    with pytest.raises(ScenarioError, match=r"workload.file: missing; write for instance file: prompts.jsonl"):
        load_scenario("smoke", ["workload.kind=file"], {})


def test_what_the_file_says_is_part_of_the_digest(tmp_path: Path) -> None:
    digest = scenario(tmp_path, TEXT).digest()
    assert digest != scenario(tmp_path, TEXT[:1]).digest()
    (tmp_path / "elsewhere").mkdir()
    assert digest == scenario(tmp_path / "elsewhere", TEXT).digest()
