"""A plan is fixed by its seed, says exactly what is asked, and is the same whole however it is shared out."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from gapmeter.loadgen import PlanError
from gapmeter.loadgen.draws import draw_lengths
from gapmeter.loadgen.plan import Plan
from gapmeter.loadgen.planner import make_plan
from gapmeter.loadgen.tokenizer import PromptTokenizer
from gapmeter.scenarios.model import Scenario
from gapmeter.scenarios.read import load_scenario
from gapmeter.scenarios.shapes import Lognormal, Sampled, Uniform
from tests.kit.loads import ids

TEXT = """\
workload:
  prompt_tokens: {uniform: [40, 90]}
  output_tokens: {uniform: [4, 9]}
load: {rate: 10, duration: 10s, warmup: 2s}
seed: 3
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scenario") / "mine.yaml"
    path.write_text(TEXT)
    return path


def scenario(path: Path, *overrides: str) -> Scenario:
    return load_scenario(path, overrides, {})


def planned(path: Path, *overrides: str, tokenizer: PromptTokenizer | None = None, **more: Any) -> Plan:
    return make_plan(scenario(path, *overrides), tokenizer, model_name="served", **more)


def prompt(body: bytes) -> str:
    document = json.loads(body)
    return str(document["messages"][0]["content"] if "messages" in document else document["prompt"])


CLOSED = ("load.arrivals=closed", "load.concurrency=5")


def test_prompts_that_take_long_to_make_are_told_before_they_are(
    path: Path, tokenizer: PromptTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = list[str]()
    monkeypatch.setattr("gapmeter.loadgen.content._TAKES_LONG", (5_000, 1_000_000))
    plan = planned(path, tokenizer=tokenizer, say=said.append)
    assert said == [f"planning: the prompts have {plan.prompt_tokens.sum():,} tokens in all, which takes a while"]
    planned(path, say=said.append)
    assert len(said) == 1


def test_a_chat_body_asks_for_exactly_what_the_plan_says(path: Path, tokenizer: PromptTokenizer) -> None:
    plan = planned(path, "workload.temperature=0.7", tokenizer=tokenizer)
    assert plan.path == "/v1/chat/completions"
    for body, prompt_tokens, output_tokens in zip(plan.bodies, plan.prompt_tokens, plan.output_tokens, strict=True):
        document = json.loads(body)
        (message,) = document.pop("messages")
        assert message["role"] == "user"
        assert tokenizer.counts([message["content"]], "chat") == prompt_tokens
        assert 0 <= document.pop("seed") < 2**31
        assert document == {
            "model": "served", "max_tokens": output_tokens, "min_tokens": output_tokens, "ignore_eos": True,
            "temperature": 0.7, "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }  # fmt: skip
    assert len({json.loads(body)["seed"] for body in plan.bodies}) == len(plan)


def test_a_completion_body_carries_its_prompt(path: Path, tokenizer: PromptTokenizer) -> None:
    plan = planned(path, "workload.kind=completion", tokenizer=tokenizer)
    assert plan.path == "/v1/completions"
    counts = tokenizer.counts([json.loads(body)["prompt"] for body in plan.bodies], "completion").tolist()
    assert counts == plan.prompt_tokens.tolist()


def test_the_plain_dialect_has_no_field_that_only_some_servers_know(path: Path) -> None:
    plan = planned(path, "server.url=http://h", "server.dialect=plain")
    assert set(json.loads(plan.bodies[0])) == {
        "model", "messages", "max_tokens", "temperature", "seed", "stream", "stream_options",
    }  # fmt: skip
    assert json.loads(plan.bodies[0])["stream_options"] == {"include_usage": True}


def test_the_same_seed_gives_the_same_plan_and_another_seed_another(path: Path, tokenizer: PromptTokenizer) -> None:
    one, again = planned(path, tokenizer=tokenizer), planned(path, tokenizer=tokenizer, id_prefix="other")
    assert one.digest() == again.digest()
    assert one.bodies == again.bodies
    assert set(ids(one)).isdisjoint(ids(again))
    other = planned(path, "seed=4", tokenizer=tokenizer)
    assert other.digest() != one.digest()
    assert set(other.due_ns.tolist()).isdisjoint(one.due_ns.tolist())
    assert set(other.bodies).isdisjoint(one.bodies)


@pytest.mark.parametrize(
    ("override", "moves"),
    [
        ("workload.output_tokens={uniform: [100, 300]}", {"output_tokens", "bodies"}),
        ("workload.prompt_tokens={lognormal: {median: 60, p95: 90}}", {"prompt_tokens", "bodies"}),
        ("workload.shared_prefix=0.5", {"bodies"}),
        ("workload.kind=completion", {"bodies"}),
        ("load.timeout=5s", set()),
        ("load.processes=4", set()),
        ("server.max_batch=1", set()),
    ],
)
def test_streams_of_randomness_are_independent(path: Path, override: str, moves: set[str]) -> None:
    """Changing what one stream draws moves nothing that another draws."""
    one, other = planned(path), planned(path, override)
    columns = ("due_ns", "prompt_tokens", "output_tokens")
    moved = {name for name in columns if not np.array_equal(getattr(one, name), getattr(other, name))}
    assert moved | ({"bodies"} if one.bodies != other.bodies else set()) == moves


def test_another_rate_keeps_lengths_and_texts_of_the_requests_that_both_have(path: Path) -> None:
    one, other = planned(path), planned(path, "load.rate=20")
    assert other.bodies[: len(one)] == one.bodies
    np.testing.assert_allclose(other.due_ns[: len(one)] * 2, one.due_ns, atol=2)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("load.duration=19s", []),
        ("load.duration=60s", ["the trace ends after 19 s, and load.duration with its warm-up asks for 60 s"]),
        ("load.requests=20", []),
        ("load.requests=30", ["the trace has 20 requests after the warm-up, and load.requests asks for 30"]),
    ],
)
def test_a_trace_that_ends_before_what_was_asked_of_it_says_so(
    asked: str, said: list[str], path: Path, tmp_path: Path
) -> None:
    recorded = "".join(f"{second},9,5\n" for second in range(20))
    (tmp_path / "t.csv").write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{recorded}")
    trace = ("load.arrivals=trace", f"load.trace.file={tmp_path / 't.csv'}", "load.warmup=0")
    assert [note for note in planned(path, *trace, asked).notes if note.startswith("the trace")] == said


def test_a_trace_that_loops_fills_any_duration(path: Path, tmp_path: Path) -> None:
    rows = "".join(f"{second},{20 + second},{second + 1}\n" for second in range(5))
    (tmp_path / "t.csv").write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}")
    looped = {"file": str(tmp_path / "t.csv"), "speed": 2, "start": "3s", "loop": True}
    words = ("load.arrivals=trace", f"load.trace={json.dumps(looped)}", "load.warmup=1s", "load.duration=3s")
    plan = planned(path, *words, "workload.prompt_tokens=null", "workload.output_tokens=null")
    assert plan.due_ns.tolist() == [k * 500_000_000 for k in range(8)]
    assert plan.output_tokens.tolist() == [4, 5, 1, 2, 3, 4, 5, 1]
    assert not [note for note in plan.notes if note.startswith("the trace")]


def test_a_repeat_is_the_same_trace_with_fresh_text(path: Path, tokenizer: PromptTokenizer) -> None:
    first, second = planned(path, tokenizer=tokenizer), planned(path, tokenizer=tokenizer, repeat=1)
    for name in ("due_ns", "prompt_tokens", "output_tokens"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
    assert {prompt(body) for body in first.bodies}.isdisjoint(prompt(body) for body in second.bodies)


def test_warmup_comes_first_and_on_top(path: Path) -> None:
    plan = planned(path)
    assert (plan.warmup_ns, plan.warmup_requests, plan.end_ns) == (2_000_000_000, 0, 12_000_000_000)
    assert plan.due_ns[0] < 2_000_000_000 < plan.due_ns[-1] < 12_000_000_000
    counted = planned(path, "load.requests=50")
    assert int(np.count_nonzero(counted.due_ns >= counted.warmup_ns)) == 50
    assert counted.end_ns == counted.due_ns[-1] + 1


@settings(deadline=None, max_examples=30)
@given(workers=st.integers(1, 9), closed=st.booleans())
def test_shares_together_are_the_plan(path: Path, workers: int, closed: bool) -> None:
    plan = planned(path, "load.arrivals=closed", "load.concurrency=10") if closed else planned(path)
    shares = [plan.slice(worker, workers) for worker in range(workers)]
    order = np.argsort([share.global_index(index) for share in shares for index in range(len(share))])
    for name in ("due_ns", "prompt_tokens", "output_tokens"):
        np.testing.assert_array_equal(np.concatenate([getattr(s, name) for s in shares])[order], getattr(plan, name))
    assert [[body for s in shares for body in s.bodies][i] for i in order] == plan.bodies
    assert [[rid for s in shares for rid in ids(s)][i] for i in order] == ids(plan)
    assert sum(share.concurrency for share in shares) == plan.concurrency
    assert len({share.digest() for share in shares}) == workers


def test_a_slice_of_a_slice_is_refused(path: Path) -> None:
    plan = planned(path)
    with pytest.raises(ValueError, match="cannot take slice 0 of 2 of slice 1 of 2"):
        plan.slice(1, 2).slice(0, 2)
    with pytest.raises(ValueError, match="cannot take slice 2 of 2"):
        plan.slice(2, 2)


@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_a_closed_loop_never_runs_out_of_prompts_that_differ(
    path: Path, tokenizer: PromptTokenizer, kind: str, share: float
) -> None:
    plan = planned(
        path, *CLOSED, f"workload.kind={kind}", f"workload.shared_prefix={share}", tokenizer=tokenizer
    ).slice(1, 2)
    n = len(plan)
    bodies = [plan.body(index) for index in range(20 * n)]
    assert bodies[:n] == plan.bodies
    assert len({prompt(body) for body in bodies}) == 20 * n
    for index in [*range(n, n + 60), *range(19 * n, 19 * n + 60)]:
        assert tokenizer.counts([prompt(bodies[index])], kind) == plan.prompt_tokens[index % n]
        assert json.loads(bodies[index])["max_tokens"] == plan.output_tokens[index % n]
    assert plan.request_id(n) == f"gap-{1 + 2 * n:06d}"


def test_rounds_of_a_closed_loop_differ_from_their_first_own_word(path: Path, tokenizer: PromptTokenizer) -> None:
    """What a prefix cache sees: nothing beyond the template (and the shared share) is the same twice."""
    plan = planned(path, *CLOSED, tokenizer=tokenizer)
    firsts = {prompt(plan.body(round_ * len(plan) + 7)).split()[0] for round_ in range(30)}
    assert len(firsts) == 30


def test_a_closed_loop_of_so_many_requests_plans_each_of_them(path: Path) -> None:
    plan = planned(path, *CLOSED, "load.requests=40", "load.warmup=auto", "load.think_time=0.5")
    assert (len(plan), plan.warmup_requests, plan.warmup_ns, plan.end_ns) == (50, 10, 0, 0)
    assert (plan.loop, plan.concurrency, plan.think_time_ns) == ("closed", 5, 500_000_000)
    assert (plan.due_ns == -1).all()
    assert plan.planned == 50
    assert planned(path, *CLOSED).planned is None


def test_prompts_are_cut_to_the_context_and_said_so(path: Path, tokenizer: PromptTokenizer) -> None:
    plan = planned(path, "server.max_model_len=70", tokenizer=tokenizer)
    assert int((plan.prompt_tokens + plan.output_tokens).max()) == 70
    (note,) = plan.notes
    cut = int(np.count_nonzero(planned(path).prompt_tokens > plan.prompt_tokens))
    assert 0 < cut < len(plan)
    assert note == f"{cut} of {len(plan)} prompts were cut to fit server.max_model_len 70"
    with pytest.raises(PlanError, match=r"answers of up to 9 tokens leave no room for a prompt in .*max_model_len 9"):
        planned(path, "server.max_model_len=9", tokenizer=tokenizer)
    with pytest.raises(PlanError, match=r"the shortest prompt .*; they do not fit server.max_model_len 20"):
        planned(path, "server.max_model_len=20", tokenizer=tokenizer)


def test_prompts_shorter_than_the_template_are_lengthened_and_said_so(path: Path, tokenizer: PromptTokenizer) -> None:
    plan = planned(path, "workload.prompt_tokens=2", tokenizer=tokenizer)
    (note,) = plan.notes
    shortest = int(plan.prompt_tokens[0])
    assert shortest > 2
    assert note.startswith(f"{len(plan)} of {len(plan)} prompts were asked shorter than the chat template's minimum")
    assert note.endswith(f"they have {shortest} tokens")


def test_a_few_tokens_more_in_the_shortest_prompts_are_no_other_load(path: Path, tokenizer: PromptTokenizer) -> None:
    def lengths(median: int) -> tuple[int, int, tuple[str, ...]]:
        draw = f"workload.prompt_tokens={{lognormal: {{median: {median}, p95: {10 * median}}}}}"
        plan = planned(path, draw, tokenizer=tokenizer)
        shortest = int(plan.prompt_tokens.min())
        asked = planned(path, draw).prompt_tokens  # without a tokenizer, as they were drawn
        return shortest, int(np.count_nonzero(asked < shortest)), plan.notes

    shortest, several, notes = lengths(54)
    assert several > 5 and notes == (), "they are few tokens of all"
    same, most, (note,) = lengths(12)
    assert same == shortest and most > several and note.startswith(f"{most} of ")


def test_without_a_tokenizer_the_plan_says_that_lengths_are_not_exact(path: Path) -> None:
    plan = planned(path)
    assert not plan.prompt_tokens_exact
    assert plan.notes == (
        "prompt lengths are counted in words, not tokens: no tokenizer is known; name one with --tokenizer",
    )


def test_a_run_too_short_for_any_request_is_refused(path: Path) -> None:
    with pytest.raises(PlanError, match="no request falls into the measured part"):
        planned(path, "load.rate=0.001", "load.duration=1s", "load.warmup=0")


@pytest.mark.parametrize(
    "shape",
    ["load.steps=[{rate: 10, for: 5s}, {rate: 0.00001, for: 5s}]", "load.ramp={from: 10, to: 0.00001, over: 10s}"],
)
def test_a_number_of_requests_that_takes_longer_than_a_run_may_last_is_refused(path: Path, shape: str) -> None:
    arrivals = shape.partition("=")[0].removeprefix("load.")
    words = (f"load.arrivals={arrivals}", shape, "load.rate=null", "load.duration=null", "load.requests=100")
    with pytest.raises(PlanError, match=rf"100 requests take \d\d days with this load.{arrivals}; write fewer"):
        planned(path, *words)


def test_an_open_loop_plans_each_of_its_requests(path: Path) -> None:
    plan = planned(path)
    assert plan.planned == len(plan) > 0


def test_the_digest_sees_every_column(path: Path) -> None:
    plan = planned(path)
    later = dataclasses.replace(plan, due_ns=plan.due_ns + 1)
    longer = dataclasses.replace(plan, output_tokens=plan.output_tokens + 1)
    other = dataclasses.replace(plan, bodies=[*plan.bodies[:-1], b"{}"])
    assert len({p.digest() for p in (plan, later, longer, other)}) == 4


def test_lengths_follow_their_distribution(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    drawn = draw_lengths(Lognormal(lognormal={"median": 96, "p95": 256}), 100_000, rng)
    assert np.median(drawn) == pytest.approx(96, rel=0.02)
    assert np.percentile(drawn, 95) == pytest.approx(256, rel=0.02)
    assert drawn.min() >= 1
    assert draw_lengths(Lognormal(lognormal={"median": 96, "p95": 256, "max": 300}), 10_000, rng).max() == 300
    counts = np.bincount(draw_lengths(Uniform(uniform=(3, 7)), 50_000, rng))[3:]
    assert stats.chisquare(counts).pvalue > 0.001
    (tmp_path / "lengths.txt").write_text("5 7 7", encoding="utf-8-sig")
    sampled = draw_lengths(Sampled(file=str(tmp_path / "lengths.txt")), 30_000, rng)
    assert set(sampled.tolist()) == {5, 7}
    assert np.mean(sampled == 7) == pytest.approx(2 / 3, abs=0.02)
