"""A real vLLM of several ranks, and one of several engines: every process tells its part, and the parts fit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gapmeter.analysis.ledger.read import read_trace
from gapmeter.analysis.ledger.support import support_of
from gapmeter.analysis.ledger.trace import Trace
from gapmeter.records import RecordFile, Span
from tests.kit.vllm import Run, run_vllm

pytestmark = pytest.mark.vllm


def traced(run: Run) -> Trace:
    return read_trace([Path(file.path) for file in run.every], list(run.answers))


def of(run: Run, role: str) -> list[RecordFile]:
    return [file for file in run.every if file.process["role"] == role]


def steps(file: RecordFile, code: Span) -> set[int]:
    return set(file.spans["ref"][file.spans["code"] == code].tolist())


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_vllm(tmp_path_factory.mktemp("ranks"), crowd_tokens=8, tensor_parallel_size=2)


def test_every_rank_writes_its_steps_and_one_of_them_answers(ranks: Run) -> None:
    workers = sorted(of(ranks, "worker"), key=lambda file: int(file.process["rank"]))
    assert [file.process["rank"] for file in workers] == [0, 1]
    assert steps(workers[0], Span.FORWARD) == steps(workers[1], Span.FORWARD) != set()
    assert [bool(steps(file, Span.WORKER)) for file in workers] == [True, False]
    assert all(file.complete for file in ranks.every)


def test_the_steps_of_two_ranks_are_told_once(ranks: Run) -> None:
    trace = traced(ranks)
    assert trace.problems == ()
    forwards = trace.step_spans["step"][trace.step_spans["code"] == Span.FORWARD]
    assert len(forwards) == len(np.unique(forwards)) == len(trace.ranks_apart_ns)
    assert {one.feature: one.detail for one in support_of(trace)}["tensor parallel"] == "2 ranks"


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_vllm(tmp_path_factory.mktemp("engines"), crowd_tokens=8, data_parallel_size=2)


def test_each_engine_has_its_own_steps_and_every_request_is_found_in_one_of_them(engines: Run) -> None:
    trace = traced(engines)
    assert trace.problems == ()
    assert sorted(int(file.process["engine"]) for file in of(engines, "core")) == [0, 1]
    seqs = trace.steps["seq"].tolist()
    assert len(seqs) == len(set(seqs)) == trace.engine_steps[1]
    first = trace.engine_steps[0]
    good = [row for row, answer in enumerate(engines.answers.values()) if answer.status == 200]
    for row in good:
        mine = trace.emissions["step"][trace.emissions["request"] == row]
        assert len(mine)
        assert (mine <= first).all() or (mine > first).all(), "one engine's"
    for code in (Span.INGRESS, Span.HANDOFF, Span.CORE_ADD, Span.EGRESS):
        found = set(trace.request_spans[code]["request"].tolist())
        assert found >= set(good), code.name
