"""The ledger made from the probe's records says what the simulated server's own truth says, stage by stage."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from gapmeter.analysis.ledger import ledger as making
from gapmeter.analysis.ledger import portions
from gapmeter.analysis.ledger.ledger import Ledger, LedgerInputs, make_ledger, shown_timelines, timelines
from gapmeter.analysis.ledger.portions import asked_tokens, first_tokens
from gapmeter.analysis.ledger.read import read_trace
from gapmeter.analysis.ledger.trace import Trace
from gapmeter.records import EntryFlag, Span
from tests.kit.simulated import Asked, Server, ask, session, simulated

pytestmark = pytest.mark.alone  # who shares the machine delays every hop
TOKENS = 12
MODES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "asynchronous": {"asynchronous": True},
    "evicting": {"kv_blocks": 12, "max_model_len": 192},
}
# Truth and probe look at the clock one after the other, at every boundary. Medians are compared: on a machine that
# runs other things, now and then one of them comes between the two looks.
AGREE_NS = 30_000


@dataclass(frozen=True, slots=True)
class Case:
    """A finished run: its ledger's rows to the last token, and the truth's stages of the same requests, ns."""

    requests: pd.DataFrame
    files: list[Path]
    trace: Trace | None
    ledger: Ledger
    rows: pd.DataFrame
    timelines: pd.DataFrame
    truth: pd.DataFrame
    evicting: bool


@pytest.fixture(scope="module", params=MODES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder: Path = tmp_path_factory.mktemp(request.param)
    with simulated(folder, token_budget=64, jitter=0.1, **MODES[request.param]) as server:
        asked = asyncio.run(_load(server))
    files = sorted((folder / "probe").glob("*.gap"))
    trace = read_trace(files, [one.request_id for one in asked])
    table = _client_table(asked)
    ledger = make_ledger(LedgerInputs.of(table, trace))
    rows = ledger.rows[ledger.rows["event"] == "last_token"].set_index("request_id")
    stretches = timelines(LedgerInputs.of(table, trace), np.ones(len(table), dtype=np.bool_))
    truth = _true_stages(server.truth(), asked)
    return Case(table, files, trace, ledger, rows, stretches, truth, request.param == "evicting")


async def _load(server: Server) -> list[Asked]:
    """40 requests about 6 ms apart, and behind them four that hold all places while a fifth has to queue."""
    source = random.Random(6)
    async with session() as client:
        tasks = []
        for number in range(40):
            prompt = "x" * source.randint(5, 100)
            tasks.append(asyncio.create_task(ask(client, server, f"r{number}", prompt=prompt, tokens=TOKENS)))
            await asyncio.sleep(source.expovariate(150))
        tasks += [asyncio.create_task(ask(client, server, f"long{k}", tokens=80)) for k in range(5)]
        return list(await asyncio.gather(*tasks))


def _client_table(asked: list[Asked]) -> pd.DataFrame:
    rows = [
        {
            "measured": True,
            "request_id": one.request_id, "outcome": "ok", "due_ns": one.sent_ns, "connect_start_ns": None,
            "connect_end_ns": None, "write_ns": one.sent_ns, "sent_ns": one.sent_ns,
            "first_token_ns": one.token_ns[0], "last_token_ns": one.token_ns[-1], "output_tokens": len(one.token_ns),
            "token_ns": np.asarray(one.token_ns), "counted": "usage",
        }
        for one in asked
    ]  # fmt: skip
    return pd.DataFrame(rows)


class _Truth:
    """The truth's lines by what they are about."""

    def __init__(self, lines: dict[str, list[dict[str, Any]]]) -> None:
        self.stages: dict[tuple[str, Any], list[tuple[int, int]]] = defaultdict(list)
        self.meant: dict[tuple[str, Any], int] = {}
        for line in lines["stage"]:
            self.stages[line["stage"], line["of"]].append((line["start_ns"], line["end_ns"]))
            self.meant[line["stage"], line["of"]] = line["meant_ns"]
        self.chunks: dict[str, list[int]] = defaultdict(list)
        for line in lines["chunk"]:
            self.chunks[line["of"]].append(line["end_ns"])
        self.entries: dict[str, list[tuple[int, int, int]]] = defaultdict(list)  # step, tokens, flags
        self.planned = {line["seq"]: line["at_ns"] for line in lines["step"]}
        for line in lines["step"]:
            for engine_id, tokens, _, _, flags in line["entries"]:
                self.entries[engine_id].append((line["seq"], tokens, flags))
        self.names = {line["engine_id"]: line["of"] for line in lines["request"]}

    def lasted(self, stage: str, of: Any) -> int:
        (span,) = self.stages[stage, of]
        return span[1] - span[0]

    def span(self, stage: str, of: Any) -> tuple[int, int]:
        (span,) = self.stages[stage, of]
        return span


def _true_stages(lines: dict[str, list[dict[str, Any]]], asked: list[Asked]) -> pd.DataFrame:
    truth = _Truth(lines)
    ends = {one.request_id: one.token_ns[-1] for one in asked}
    rows = [_stages_of(truth, engine_id, who, ends[who]) for engine_id, who in truth.names.items()]
    return pd.DataFrame(rows).set_index("request_id")


def _stages_of(truth: _Truth, engine_id: str, client_id: str, end_ns: int) -> dict[str, Any]:
    """One request's stages to its last token, by adding up what the server says that it did."""
    own = [(seq, flags) for seq, tokens, flags in truth.entries[engine_id] if tokens]
    begun = truth.span("SCHEDULE", own[0][0])[0]
    updated = truth.span("UPDATE", own[-1][0])[1]
    received, added = truth.span("CORE_RECEIVE", engine_id), truth.span("CORE_ADD", engine_id)
    work = {s: sum(truth.lasted(s, seq) for seq, _ in own) for s in ("INPUT_PREP", "SAMPLING")}
    prompt = sum(truth.lasted("FORWARD", seq) for seq, flags in own if flags & EntryFlag.PROMPT)
    decode = sum(truth.lasted("FORWARD", seq) for seq, flags in own if not flags & EntryFlag.PROMPT)
    away = _preempted(truth, engine_id)
    others = _other_steps(truth, {seq for seq, _ in own}, (begun, truth.span("SAMPLING", own[-1][0])[1]), away)
    evicted = sum(back - gone for gone, back in away)
    worked = prompt + decode + work["INPUT_PREP"] + work["SAMPLING"]
    return {
        "request_id": client_id,
        "steps": len(own),
        "template": truth.lasted("TEMPLATE", client_id),
        "tokenize": truth.lasted("TOKENIZE", client_id),
        "engine_wait": added[0] - received[1],
        "queue": begun - added[1],
        "prefill": prompt,
        "decode": decode,
        "input_prep": work["INPUT_PREP"],
        "sampling": work["SAMPLING"],
        "preempted": evicted,
        "other_step": others,
        "scheduling": updated - begun - worked - evicted - others + added[1] - added[0],
        # A write may return after its bytes have been read.
        "egress": min(truth.chunks[client_id][-1], end_ns) - truth.stages["DETOKENIZE", client_id][-1][1],
        "output": truth.meant["OUTPUT_SEND", own[-1][0]],
    }


def _preempted(truth: _Truth, engine_id: str) -> list[tuple[int, int]]:
    """From each eviction to the start of the next scheduling that gives the request tokens again."""
    away, gone = list[tuple[int, int]](), 0
    for seq, _, flags in truth.entries[engine_id]:
        if flags & EntryFlag.PREEMPTED:
            gone = truth.planned[seq]
        elif gone:
            away.append((gone, truth.span("SCHEDULE", seq)[0]))
            gone = 0
    return away


def _other_steps(truth: _Truth, own: set[int], within: tuple[int, int], away: list[tuple[int, int]]) -> int:
    """How long the worker was at steps without the request, while that was not evicted."""
    total = 0
    for (stage, of), spans in truth.stages.items():
        for start, end in spans if stage in ("INPUT_PREP", "FORWARD", "SAMPLING") and of not in own else ():
            low, high = max(start, within[0]), min(end, within[1])
            if low < high:
                total += high - low - sum(max(min(high, back) - max(low, gone), 0) for gone, back in away)
    return total


def test_ledgers_are_the_same_whatever_the_blocks_that_they_are_made_by(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(portions, "_BLOCK", 50)
    monkeypatch.setattr(portions, "_REQUESTS", 7)
    again = make_ledger(LedgerInputs.of(case.requests, case.trace))
    pd.testing.assert_frame_equal(again.rows, case.ledger.rows)
    pd.testing.assert_frame_equal(again.gaps, case.ledger.gaps)
    stretches = timelines(LedgerInputs.of(case.requests, case.trace), np.ones(len(case.requests), dtype=np.bool_))
    pd.testing.assert_frame_equal(stretches, case.timelines)


def test_a_request_that_queued_through_many_steps_is_no_more_work_than_another(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a server that was asked for more than it can do, a hundred thousand took forty seconds."""
    index = LedgerInputs.of(case.requests, case.trace).index
    assert index is not None
    longest = int(case.rows["queue_ns"].to_numpy().argmax())
    events = first_tokens(case.requests, np.full(3, longest), index)
    since, until = np.searchsorted(index.scheduled_ns, [events.start[0], index.scheduled_of(events.request)[0]])
    assert until - since > 20, "steps that it waited through"
    monkeypatch.setattr(portions, "_BLOCK", 3 * (until - since))
    assert [len(portion.events) for portion in portions.Portion(events).blocks(index)] == [3]


def test_of_very_many_gaps_those_of_requests_drawn_at_random_are_divided(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert case.ledger.gaps_of is None
    monkeypatch.setattr(portions, "_MOST_GAPS", len(case.ledger.gaps) // 2)
    asked = asked_tokens(case.requests)
    trace = read_trace(case.files, case.requests["request_id"].tolist(), asked=asked)
    written, all_written = (len(each.request_spans[Span.EGRESS]) for each in (trace, case.trace))
    assert written < 0.8 * all_written, "what no ledger is made from is not kept"
    inputs = LedgerInputs.of(case.requests, trace)
    pd.testing.assert_frame_equal(timelines(inputs, np.ones(len(case.requests), dtype=np.bool_)), case.timelines)
    some = make_ledger(inputs)
    whose = some.gaps["request_id"].unique()
    assert some.gaps_of == len(whose) < len(case.requests)
    assert len(case.ledger.gaps) / 4 < len(some.gaps) < len(case.ledger.gaps) / 2
    same = case.ledger.gaps[case.ledger.gaps["request_id"].isin(whose)].reset_index(drop=True)
    pd.testing.assert_frame_equal(some.gaps, same, check_categorical=False)
    pd.testing.assert_frame_equal(some.rows, case.ledger.rows)
    monkeypatch.setattr(portions, "_MOST_GAPS", 1)
    one = make_ledger(LedgerInputs.of(case.requests, case.trace))
    assert one.gaps_of == 1 and one.gaps["request_id"].nunique() == 1, "however many gaps a single request has"


def test_decoding_told_at_once_is_what_each_requests_own_steps_say(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = LedgerInputs.of(case.requests, case.trace)
    monkeypatch.setattr(making, "_shares_of_decoding", lambda *_: None)
    each = make_ledger(inputs)
    pd.testing.assert_frame_equal(each.rows, case.ledger.rows)
    assert each.core_holders == case.ledger.core_holders


def test_the_ledger_is_accepted_and_leaves_next_to_nothing_unexplained(case: Case) -> None:
    assert case.ledger.refused == ()
    assert len(case.rows) == 45
    assert case.rows["joined"].all()
    assert (case.rows["unexplained_ns"] / case.rows["total_ns"]).quantile(0.75) < 0.002


ONCE = ("template", "tokenize", "engine_wait", "queue", "preempted")
EACH_STEP = ("prefill", "decode", "input_prep", "sampling", "scheduling", "other_step")


def test_a_timeline_covers_the_wait_once_and_sums_to_the_ledgers_row(case: Case) -> None:
    table = case.timelines.assign(ns=case.timelines["end_ns"] - case.timelines["start_ns"])
    assert set(table["request_id"]) == set(case.rows.index)
    for name, mine in table.groupby("request_id"):
        assert (mine["start_ns"].to_numpy()[1:] == mine["end_ns"].to_numpy()[:-1]).all()
        named = mine["stage"].astype(str) + mine["kind"].astype(str)
        assert (named.to_numpy()[1:] != named.to_numpy()[:-1]).all(), "what is one stretch is one row"
        summed, row = mine.groupby("stage")["ns"].sum(), case.rows.loc[name]
        for stage, ns in summed.items():
            excess = row["interference_ns"] if stage == "decode" and pd.notna(row["interference_ns"]) else 0
            assert ns == row[f"{stage}_ns"] + excess
        assert summed.sum() == row["total_ns"]


def test_of_requests_with_very_many_stretches_fewer_are_shown(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = LedgerInputs.of(case.requests, case.trace)
    pd.testing.assert_frame_equal(shown_timelines(inputs), case.timelines)
    monkeypatch.setattr("gapmeter.analysis.ledger.ledger._MOST_STRETCHES", len(case.timelines) // 5)
    some = shown_timelines(inputs)
    assert 0 < some["request_id"].nunique() < len(case.rows) / 2
    whole = case.timelines[case.timelines["request_id"].isin(some["request_id"])]
    assert some[["start_ns", "end_ns"]].to_numpy().tolist() == whole[["start_ns", "end_ns"]].to_numpy().tolist()


def found(case: Case, stage: str) -> pd.Series[float]:
    """The ledger's time for a stage of the truth; the ledger divides one of them further."""
    parts = {"decode": ("decode", "interference")}.get(stage, (stage,))
    return sum((case.rows[f"{part}_ns"] for part in parts[1:]), case.rows[f"{parts[0]}_ns"])


@pytest.mark.parametrize("stage", ONCE)
def test_the_ledger_gives_a_stage_what_the_truth_gives_it(case: Case, stage: str) -> None:
    error = (found(case, stage) - case.truth[stage]).abs()[(case.truth[stage] > 0) | (found(case, stage) > 0)]
    assert error.empty or error.median() < AGREE_NS


def test_from_its_text_to_its_write_a_chunk_is_at_its_egress_or_waits_until_the_loop_is_done_with_others(
    case: Case,
) -> None:
    egress, truth = found(case, "egress"), case.truth["egress"]
    assert (egress - truth).median() < AGREE_NS
    assert (truth - egress - found(case, "accept_wait")).median() < AGREE_NS
    assert egress.median() > 0.5 * 50_000  # what a write takes here, at the median


@pytest.mark.parametrize("stage", EACH_STEP)
def test_the_ledger_gives_the_stages_of_steps_what_the_truth_gives_them(case: Case, stage: str) -> None:
    error = (found(case, stage) - case.truth[stage]).abs() / case.truth["steps"]
    assert error.median() < AGREE_NS


def test_the_hop_back_to_the_api_server_is_output(case: Case) -> None:
    """The hop itself, and what two processes need to hand a message over: seen where neither waited for a core."""
    added = case.rows["output_ns"] - case.truth["output"]
    assert added.median() > -AGREE_NS
    assert added.min() < 20 * AGREE_NS


def test_each_way_of_running_shows_what_it_is_there_to_show(case: Case) -> None:
    assert case.truth["queue"].max() > 5_000_000
    evicted = case.truth["preempted"] > 0
    assert evicted.any() == case.evicting
    assert (case.rows["preempted_ns"] > 0).equals(evicted.reindex(case.rows.index))
