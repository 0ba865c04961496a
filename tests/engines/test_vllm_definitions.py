"""vLLM's own benchmark and our restatement of it measure the same answers of the same servers alike.

Each request is sent several times. A busy machine makes arrivals late, never early, so the earliest of the rounds is
looked at: it is less late than events are apart (40 ms), so that another definition would be off by an event. Where
even that is late, the machine may have been busy all the while: all is asked again, three times in all.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gapmeter.analysis.requests.definitions import PERCENTILES, ByTool, chunks, figures, pooled, seen, vllm_bench
from gapmeter.loadgen.plan import PATHS
from gapmeter.machine.instrument import equal_plan
from gapmeter.records import Outcome
from gapmeter.records.request import RequestRecord
from gapmeter.records.stream import parse_answer
from gapmeter.servers.vllm import find_python
from tests.kit.servers import Timed, null_server, player
from tests.kit.streams import chat, role, usage_only
from tests.loadgen.test_generators_agree import issued

ROOT = Path(__file__).parents[2]
MS = 1_000_000
ROUNDS, EVERY_MS, APART_MS, TRIES = 5, 400, 25, 3
NEAR_MS = 30.0
FIRST_MS, GAP_MS, TOKENS = 120, 40, 6  # the null server's schedule


def text(words: str, total: int | None = None, finish: str | None = None) -> dict[str, Any]:
    """One chunk of a completion."""
    usage = {} if total is None else {"usage": {"prompt_tokens": 7, "completion_tokens": total}}
    return {"id": "c", "choices": [{"index": 0, "text": words, "finish_reason": finish}], **usage}


CALL = chat(None, 1)
CALL["choices"][0]["delta"] = {"tool_calls": [{"index": 0, "function": {"name": "f"}}]}
PLAYED: dict[str, Timed] = {
    "several tokens a chunk": (
        (40, role(0)), (120, chat("abc", 3)), (200, chat("def", 6)), (280, chat("gh", 8, finish_reason="length")),
        (320, usage_only(8)), (320, "[DONE]"),
    ),
    "a finish reason alone, the usage only at the end": (
        (40, role()), (120, chat("a")), (200, chat("bcd")), (240, chat("", finish_reason="stop")),
        (300, usage_only(4)), (340, "[DONE]"),
    ),
    "the role with the first token": ((120, chat("a", 1, role="assistant")), (200, chat("b", 2, finish_reason="stop")),
                                      (200, usage_only(2)), (200, "[DONE]")),
    "one token": ((40, role(0)), (120, chat("a", 1, finish_reason="length")), (160, usage_only(1)), (160, "[DONE]")),
    "a token without text": (
        (40, role(0)), (120, chat("", 1)), (200, chat("é", 2)), (280, chat("x", 3, finish_reason="stop")),
        (280, usage_only(3)), (280, "[DONE]"),
    ),
    "a tool call": ((40, role(0)), (120, CALL), (200, chat("x", 2, finish_reason="tool_calls")), (200, usage_only(2)),
                    (200, "[DONE]")),
    "no usage of its own, no end mark": ((80, chat("a", 1)), (160, chat("b", 2, finish_reason="stop"))),
    "a completion, several tokens a chunk": (
        (80, text("ab", 2)), (160, text("cde", 5)), (240, text("f", 6, "length")), (280, usage_only(6)),
        (280, "[DONE]"),
    ),
    "a completion, a usage in between": (
        (80, text("a")), (120, usage_only(1)), (200, text("b", finish="stop")), (240, usage_only(2)), (240, "[DONE]"),
    ),
}  # fmt: skip
COMMENTED: dict[str, Timed] = {
    "a comment that comes alone": (
        (40, role(0)), (80, "ping"), (120, chat("a", 1)), (200, chat("b", 2, finish_reason="stop")),
        (200, usage_only(2)), (200, "[DONE]"),
    ),
}  # fmt: skip
NULL = {"the null server's chat": "chat", "the null server's completion": "completion"}


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: what it is about, which server and path, and what its body says beside."""

    name: str
    url: str
    kind: str
    extra: dict[str, Any]

    def body(self) -> bytes:
        asked = {
            "model": "null-server",
            "stream": True,
            "max_tokens": TOKENS,
            "stream_options": {"include_usage": True},
        }
        return json.dumps(asked | {"messages": [], "prompt": "word"} | self.extra).encode()


def due_ms(count: int) -> list[int]:
    """Each of ``count`` requests once a round."""
    return [EVERY_MS * number + APART_MS * place for number in range(ROUNDS) for place in range(count)]


def ask_vllm(asked: Sequence[Asked], folder: Path) -> dict[str, Any]:
    """By vLLM's own function; its answers to one request stand ``len(asked)`` apart."""
    words = [
        {"due_s": at / 1e3, "url": one.url + PATHS[one.kind], "tokens": TOKENS, "extra": one.extra}
        for at, one in zip(due_ms(len(asked)), list(asked) * ROUNDS, strict=True)
    ]
    (folder / "asked.json").write_text(json.dumps(words))
    command = [find_python(ROOT), "tests/engines/vllm_requests.py", str(folder / "asked.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def ask_ourselves(asked: Sequence[Asked], folder: Path) -> list[RequestRecord]:
    """By our client, a process for each server and path; the records in the order of ``asked``, round after round."""
    every, due = list(asked) * ROUNDS, due_ms(len(asked))

    def issue(target: tuple[str, str]) -> dict[int, RequestRecord]:
        mine = [k for k, one in enumerate(every) if (one.url, one.kind) == target]
        plan = equal_plan(np.array([due[k] for k in mine], np.int64) * MS, TOKENS)
        plan = replace(plan, path=PATHS[target[1]], bodies=[every[k].body() for k in mine])
        own = issued(plan, target[0], folder / f"{target[1]}-{target[0].rpartition(':')[2]}", "asyncio")
        return dict(zip(mine, own, strict=True))

    targets = sorted({(one.url, one.kind) for one in asked})
    with ThreadPoolExecutor(len(targets)) as pool:
        records = {k: record for found in pool.map(issue, targets) for k, record in found.items()}
    return [records[k] for k in range(len(due))]


def sent_ms(asked: Asked) -> list[int]:
    """When the server sends what has a choice, after the request: a role, tokens, a finish reason."""
    if asked.name in NULL:
        role_ms = [0] if asked.kind == "chat" else []
        return role_ms + [FIRST_MS + GAP_MS * k for k in range(TOKENS)]
    return [ms for ms, event in PLAYED[asked.name] if isinstance(event, dict) and event["choices"]]


@dataclass(frozen=True, slots=True)
class Both:
    """What vLLM and we made of the same request, once a round."""

    asked: Asked
    theirs: list[dict[str, Any]]
    records: list[RequestRecord]

    @property
    def ours(self) -> list[ByTool]:
        return [vllm_bench(seen(record, parse_answer(record).output_tokens)) for record in self.records]

    @property
    def late_ms(self) -> Any:
        """How late their and our earliest arrival of every counted chunk was, shape (2, chunks)."""
        theirs = [np.cumsum([told["ttft"], *told["itl"]]) * 1e3 for told in self.theirs]
        ours = [np.cumsum([one.ttft or 0, *one.itl]) / MS for one in self.ours]
        return np.stack([np.min(theirs, axis=0), np.min(ours, axis=0)]) - sent_ms(self.asked)


@dataclass(frozen=True, slots=True)
class Found:
    """``each`` that both can read, the one that is ``commented``, and the ``metrics`` that vLLM prints of its own."""

    each: list[Both]
    commented: Both
    metrics: dict[str, Any]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Every request by both clients."""
    for _ in range(TRIES):
        found = asyncio.run(_ask(tmp_path_factory.mktemp("both")))
        if all((both.late_ms < NEAR_MS).all() for both in found.each):
            break
    return found


async def _ask(folder: Path) -> Found:
    answers = PLAYED | COMMENTED
    async with null_server(first_ms=FIRST_MS, gap_ms=GAP_MS) as (_, null), player(answers) as played:
        asked = [Asked(name, null, kind, {}) for name, kind in NULL.items()]
        for name in answers:
            kind = "completion" if name.startswith("a completion") else "chat"
            asked.append(Asked(name, played, kind, {"answer": name}))
        told = await asyncio.to_thread(ask_vllm, asked, folder)
        records = await asyncio.to_thread(ask_ourselves, asked, folder)
    count = len(asked)
    both = [Both(one, told["requests"][k::count], records[k::count]) for k, one in enumerate(asked)]
    return Found(both[:-1], both[-1], told["metrics"])


pytestmark = pytest.mark.vllm


def test_both_clients_had_every_answer_whole(found: Found) -> None:
    for both in found.each:
        assert [told["error"] for told in both.theirs] == [""] * ROUNDS, both.asked.name
        assert all(told["success"] for told in both.theirs)
        assert [record.outcome for record in both.records] == [Outcome.OK] * ROUNDS, both.asked.name


def test_the_same_chunks_count_as_tokens_and_the_same_usage_as_their_number(found: Found) -> None:
    for both in found.each:
        for told, ours, record in zip(both.theirs, both.ours, both.records, strict=True):
            assert len(told["itl"]) == len(ours.itl), both.asked.name
            alone = [chunk.usage for chunk in chunks(record) if chunk.usage and not chunk.choice]
            assert told["output_tokens"] == (alone[-1] if alone else 0), both.asked.name


def test_each_counted_chunk_is_the_one_that_the_server_sent_then(found: Found) -> None:
    """First token, every gap and the last token in one: nothing arrives early, and some round is not late."""
    for both in found.each:
        assert ((both.late_ms > -1) & (both.late_ms < NEAR_MS)).all(), (both.asked.name, both.late_ms)


def test_the_last_counted_chunk_ends_a_request_and_tokens_after_the_first_share_the_rest(found: Found) -> None:
    for both in found.each:
        for told, ours in zip(both.theirs, both.ours, strict=True):
            assert told["latency"] == pytest.approx(told["ttft"] + sum(told["itl"]), abs=1e-9)
            assert ours.e2e == pytest.approx((ours.ttft or 0) + sum(ours.itl))
            if told["output_tokens"] > 1:  # without a usage it counts by its tokenizer, which is not imitated
                after_first = told["output_tokens"] - 1
                assert told["tpot_ms"] * after_first == pytest.approx(sum(told["itl"]) * 1e3), both.asked.name
                assert ours.tpot * after_first == pytest.approx(sum(ours.itl)), both.asked.name
            elif told["output_tokens"] == 1:
                assert (told["tpot_ms"], ours.tpot) == (0, None)


def test_the_role_alone_makes_its_first_token_early_and_is_none_of_ours(found: Found) -> None:
    both = found.each[0]
    assert both.asked.name == "the null server's chat"
    assert len(both.theirs[0]["itl"]) == len(parse_answer(both.records[0]).token_ns) == TOKENS
    assert min((parse_answer(record).token_ns[0] - record.write_ns) / MS for record in both.records) >= FIRST_MS
    assert min(told["ttft"] * 1e3 for told in both.theirs) < NEAR_MS


def test_its_percentiles_and_means_of_its_own_values_are_ours(found: Found) -> None:
    every = [
        ByTool(told["ttft"] * 1e9, told["latency"] * 1e9, told["tpot_ms"] * MS if told["output_tokens"] > 1 else None,
                 itl=[gap * 1e9 for gap in told["itl"]])
        for both in [*found.each, found.commented] for told in both.theirs if told["success"]
    ]  # fmt: skip
    for metric, printed in found.metrics.items():
        ours = figures(*pooled(every, metric), differs="", weighted=False)
        want = {f"p{p:g}": getattr(ours, f"p{p:g}_ms") for p in PERCENTILES} | {"mean": ours.mean_ms}
        assert printed == pytest.approx(want, rel=1e-9), metric


def test_a_comment_that_comes_alone_costs_it_what_follows(found: Found) -> None:
    """Its reader strips the blank line off and glues the next events on. docs/definitions.md: not imitated."""
    both = found.commented
    assert [record.outcome for record in both.records] == [Outcome.OK] * ROUNDS
    assert [len(ours.itl) for ours in both.ours] == [2] * ROUNDS
    assert statistics.median(len(told["itl"]) for told in both.theirs) == 0
    assert statistics.median(told["latency"] for told in both.theirs) * 1e3 < 80  # the comment's own time
