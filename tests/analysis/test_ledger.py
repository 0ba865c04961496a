"""Hand-made timelines, written as a probe writes them, come back as the ledger that a person would write."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from gapmeter.analysis.ledger.cores import CORE, CoreUse, Culprit, ManyStretches, Reason, Stretches
from gapmeter.analysis.ledger.ledger import Ledger, LedgerInputs, make_ledger
from gapmeter.analysis.ledger.read import read_trace
from gapmeter.analysis.stages import STAGES, column
from gapmeter.analysis.tables import GeneratorFile, last_looks_ns, steps_table
from gapmeter.records import EntryFlag, RecordWriter, Span, StepFlag

PROMPT = EntryFlag.PROMPT | EntryFlag.LAST_CHUNK
Api = Callable[[RecordWriter], None]


def _requests(**changes: Any) -> pd.DataFrame:
    """One request of two tokens: due at 1000, sent at 1100, tokens received at 10_000 and 20_000."""
    row: dict[str, Any] = {
        "measured": True,
        "request_id": "r1", "outcome": "ok", "due_ns": 1000, "connect_start_ns": None, "connect_end_ns": None,
        "write_ns": 1090, "sent_ns": 1100, "first_token_ns": 10_000, "last_token_ns": 20_000, "output_tokens": 2,
        "token_ns": [10_000, 20_000],
    }  # fmt: skip
    return pd.DataFrame([row | changes])


def _api(writer: RecordWriter) -> None:
    ref = writer.request("engine-r1", "r1")
    writer.span(Span.INGRESS, ref, 1300, 2000)
    writer.span(Span.HTTP, ref, 1300, 1340)
    writer.span(Span.TEMPLATE, ref, 1400, 1500, queued_ns=1350)
    writer.span(Span.TOKENIZE, ref, 1600, 1800)
    writer.span(Span.HANDOFF, ref, 2000, 2100)
    for n, base in ((1, 9000), (2, 19_000)):
        writer.span(Span.OUTPUT_RECEIVE, ref, base, base + 100, n=n)
        writer.span(Span.DETOKENIZE, ref, base + 200, base + 300, n=n, queued_ns=base + 100)
        writer.span(Span.EGRESS, ref, base + 500, base + 700, n=n)


def _steps(writer: RecordWriter, ref: int, early: int = 0, *, worker: bool = True, timed: bool = True) -> None:
    """Two steps of the request's own: 5..8 µs and 15..18 µs, one of another's between them.

    Unless ``timed``, the device did not tell when it computed the last one, which was put on it at 15.9 µs.
    """
    other = writer.request("engine-x")
    for seq, base, entry in (
        (1, 5000, (ref, 10, 0, 0, PROMPT)), (2, 10_000, (other, 1, 5, 0, 0)), (3, 15_000, (ref, 1, 10, 0, 0)),
    ):  # fmt: skip
        writer.span(Span.LOOP, seq, base - 100, base + 3800)
        scheduled = base - (early if seq == 2 else 0)
        writer.span(Span.SCHEDULE, seq, scheduled, scheduled + 200)
        writer.step(0, seq, [entry], running=1, waiting=0, free_blocks=9, schedule_ns=base)
        writer.span(Span.EXECUTE, seq, base + 300, base + 3300)
        if worker:
            writer.span(Span.WORKER, seq, base + 400, base + 3200)
            writer.span(Span.INPUT_PREP, seq, base + 500, base + 1000)
            if timed or seq != 3:
                writer.span(Span.FORWARD, seq, base + 1000, base + 2500)
            else:
                writer.span(Span.HOST_LAUNCH, seq, base + 900, base + 1100)
            writer.span(Span.SAMPLING, seq, base + 2500, base + 3000)
        writer.span(Span.UPDATE, seq, base + 3300, base + 3500)
        writer.emit(seq, base + 3400, [(entry[0], 1)])
        writer.span(Span.OUTPUT_PUT, seq, base + 3600, base + 3700)


def _taken_in(writer: RecordWriter, received: int = 2400) -> int:
    ref = writer.request("engine-r1")
    writer.span(Span.CORE_RECEIVE, ref, 2300, received)
    writer.span(Span.CORE_ADD, ref, 3000, 3100)
    return ref


def _core(writer: RecordWriter, early: int = 0, *, received: int = 2400, worker: bool = True) -> None:
    _steps(writer, _taken_in(writer, received), early, worker=worker)


def _write(folder: Path, api: Api | None = _api, core: Api | None = _core) -> list[Path]:
    for role, fill in (("api", api), ("core", core)):
        if fill is not None:
            writer = RecordWriter(folder / f"{role}.gap", {"role": role})
            fill(writer)
            writer.close()
    return sorted(folder.glob("*.gap"))


def _ledger(folder: Path, api: Api = _api, core: Api = _core, **changes: Any) -> Ledger:
    return make_ledger(LedgerInputs.of(_requests(**changes), read_trace(_write(folder, api, core), ["r1"])))


def _row(folder: Path, event: str, api: Api = _api, core: Api = _core) -> pd.Series:
    return _ledger(folder, api, core).rows.set_index("event").loc[event]


def _and(fill: Api, *span: int, **more: int) -> Api:
    """These records, and one span more."""

    def filled(writer: RecordWriter) -> None:
        fill(writer)
        writer.span(*span, **more)

    return filled


FIRST = {
    "generator_lag": 100, "connect": 0, "network_in": 200, "ingress": 700 - 50 - 100 - 200, "template": 150,
    "tokenize": 200, "handoff": 300 + 100, "engine_wait": 600, "queue": 5000 - 3100, "other_step": 0, "prefill": 1500,
    "decode": 0, "input_prep": 500, "sampling": 500, "scheduling": 100 + 500 + 600, "output": 100 + 300 + 100,
    "detokenize": 200, "egress": 400, "network_out": 300, "preempted": 0,
}  # fmt: skip


def test_a_first_token_is_split_into_the_stages_that_were_stamped(tmp_path: Path) -> None:
    row = _row(tmp_path, "first_token")
    got = {name: row[f"{name}_ns"] for name in FIRST}
    assert got == FIRST
    assert row["unexplained_ns"] == 0
    assert row["total_ns"] == 9000 == sum(got.values())


def test_what_lies_between_processes_is_transit_and_counts_as_strict(tmp_path: Path) -> None:
    row = _row(tmp_path, "first_token")
    between = 200 + 50 + 200 + 100 + 100 + 300 + 300  # network, template's pool, handoff, executor, output, network
    assert row["transit_ns"] == row["strict_ns"] == between


def test_what_an_engine_does_in_a_call_that_returns_before_its_answer_is_no_transit(tmp_path: Path) -> None:
    """The call to its executor returns after 100 ns, when the worker begins."""
    row = _row(tmp_path, "first_token", core=_and(_core, Span.EXECUTE, 1, 5300, 8300, n=100))
    assert row["transit_ns"] == 200 + 50 + 200 + 100 + 300 + 300  # of the executor its answer's way alone
    assert row["scheduling_ns"] == FIRST["scheduling"]


def test_another_requests_step_between_own_steps_is_other_step(tmp_path: Path) -> None:
    row = _row(tmp_path, "last_token")
    assert row["other_step_ns"] == 2800  # the worker's whole stay: nothing of ours ran
    assert row["decode_ns"] == row["prefill_ns"] == 1500
    assert row["total_ns"] == 19_000


def test_a_step_of_others_under_way_when_the_first_own_one_is_scheduled_is_other_step(tmp_path: Path) -> None:
    def core(writer: RecordWriter) -> None:
        ref = _taken_in(writer)
        other = writer.request("engine-x")
        for seq, scheduled, base, entry in (
            (1, 2500, 2800, (other, 1, 5, 0, 0)),
            (2, 3200, 6000, (ref, 10, 0, 0, PROMPT)),
        ):
            writer.step(0, seq, [entry], running=1, waiting=0, free_blocks=9, schedule_ns=scheduled)
            writer.span(Span.SCHEDULE, seq, scheduled, scheduled + 200)
            writer.span(Span.EXECUTE, seq, scheduled + 300, base + 2500)
            writer.span(Span.INPUT_PREP, seq, base, base + 400)
            writer.span(Span.FORWARD, seq, base + 400, base + 2000)
            writer.span(Span.SAMPLING, seq, base + 2000, base + 2400)
            writer.emit(seq, base + 2600, [(entry[0], 1)])
            writer.span(Span.OUTPUT_PUT, seq, base + 2600, base + 2700)

    row = _row(tmp_path, "first_token", core=core)
    assert row["queue_ns"] == 100
    assert row["other_step_ns"] == 5200 - 3200
    assert row["prefill_ns"] == 1600
    assert row["scheduling_ns"] == 100 + (6000 - 5200) + 100  # taken in, between the two steps, the call's end
    assert row["unexplained_ns"] == 0


def test_every_ledger_adds_up_to_its_total(tmp_path: Path) -> None:
    ledger = _ledger(tmp_path)
    for table in (ledger.rows, ledger.gaps):
        stages = table[[c for c in table if c.endswith("_ns") and c.removesuffix("_ns") in FIRST]].sum(axis=1)
        assert (stages + table["unexplained_ns"] == table["total_ns"]).all()


# Between the two tokens: the other's step (its engine's code and loop are scheduling, its worker's stay other_step), a
# pause in which nothing was stamped, and the request's own.
GAP = {
    "other_step": 2800, "scheduling": 1000 + 600 + 600, "unexplained": 14_900 - 13_800, "input_prep": 500,
    "decode": 1500, "sampling": 500, "output": 100 + 300 + 100, "detokenize": 200, "egress": 400, "network_out": 300,
}  # fmt: skip


def test_a_gap_is_split_into_the_steps_of_others_its_own_and_what_nothing_stamped(tmp_path: Path) -> None:
    gap = _ledger(tmp_path).gaps.iloc[0]
    found = {name.removesuffix("_ns"): gap[name] for name in gap.index if name.removesuffix("_ns") in {*FIRST, *GAP}}
    assert {name: ns for name, ns in found.items() if ns} == GAP
    assert sum(GAP.values()) == gap["gap_ns"] == 10_000
    assert (gap["k"], gap["tokens"], gap["first_step"], gap["last_step"]) == (1, 1, 2, 3)


@pytest.mark.parametrize(
    ("also", "takes"),
    [
        ((Span.INPUT_PREP, 3, 15_500, 16_400), {}),
        ((Span.SAMPLING, 3, 17_100, 18_000), {}),
        ((Span.FORWARD, 2, 11_000, 15_800), {"scheduling": 600 + 600, "unexplained": 1100}),  # from 13_200 to 15_500
        ((Span.SAMPLING, 2, 12_500, 17_800), {"scheduling": 600 + 600, "unexplained": 1100}),
    ],
    ids=["own preparation", "own sampling", "another's forward", "another's sampling"],
)
def test_what_goes_on_beside_an_own_forward_or_its_preparation_takes_none_of_their_time(
    tmp_path: Path, also: tuple[int, ...], takes: dict[str, int]
) -> None:
    """A device, or another worker, that is still at what came before, takes engine code's and idle time alone."""
    gap = _ledger(tmp_path, core=_and(_core, *also)).gaps.iloc[0]
    expected = {name: ns - takes.get(name, 0) for name, ns in GAP.items()}
    expected["other_step"] += sum(takes.values())
    assert {name: gap[f"{name}_ns"] for name in GAP} == expected


def test_from_its_launch_on_nothing_is_known_of_a_step_whose_device_told_no_times(tmp_path: Path) -> None:
    """Until the engine has its tokens, at 18_300: what the host did meanwhile may have waited for the device."""
    gap = _ledger(tmp_path, core=lambda writer: _steps(writer, _taken_in(writer), timed=False)).gaps.iloc[0]
    assert (gap["input_prep_ns"], gap["sampling_ns"]) == (15_900 - 15_500, 0)
    assert gap["unexplained_ns"] == GAP["unexplained"] + 18_300 - 15_900


def test_a_later_step_s_scheduling_delays_a_token_until_it_has_left_and_no_longer(tmp_path: Path) -> None:
    """An engine that schedules ahead: from 8550 to 8750, while the token leaves between 8600 and 8700."""
    row = _row(tmp_path, "first_token", core=functools.partial(_core, early=1450))
    assert row["output_ns"] == FIRST["output"] - (8700 - 8600)
    assert row["scheduling_ns"] == FIRST["scheduling"] + (8700 - 8600)


def test_scheduling_that_a_forward_hides_costs_nothing_but_is_known_as_hidden(tmp_path: Path) -> None:
    # The second step is scheduled while the first one computes.
    row = _row(tmp_path, "last_token", core=functools.partial(_core, early=3800))
    assert row["hidden_host_ns"] == 200
    assert row["prefill_ns"] == 1500


def test_time_while_evicted_is_preempted(tmp_path: Path) -> None:
    row = _row(tmp_path, "last_token", core=_and(_core, Span.PREEMPT, 1, 9000, 9000))
    assert row["preempted_ns"] == 6000
    assert row["other_step_ns"] == 0


def test_an_eviction_after_a_tokens_step_was_scheduled_does_not_delay_that_token(tmp_path: Path) -> None:
    row = _row(
        tmp_path, "last_token", core=_and(_core, Span.PREEMPT, 1, 16_000, 16_000)
    )  # asynchronous: its last step is under way, it never comes back
    assert row["preempted_ns"] == 0
    assert row["decode_ns"] == 1500


@pytest.mark.parametrize(
    ("stage", "spoilt"), [("tokenize", ["ingress"]), ("detokenize", ["egress"]), ("prefill", []), ("queue", [])]
)
def test_a_stage_that_could_not_be_stamped_is_unmeasured_and_its_time_joins_the_rest(
    tmp_path: Path, stage: str, spoilt: list[str]
) -> None:
    def core(writer: RecordWriter) -> None:
        _core(writer)
        writer.json({"type": "missing", "hook": "x", "stages": [stage]})

    row = _row(tmp_path, "first_token", core=core)
    for name in [stage, *spoilt]:
        assert np.isnan(row[f"{name}_ns"])
    assert row["unexplained_ns"] >= FIRST[stage]
    known = row[[f"{name}_ns" for name in FIRST]].sum()
    assert known + row["unexplained_ns"] == row["total_ns"]


def test_where_no_worker_recorded_its_stages_are_unmeasured_and_not_the_engines(tmp_path: Path) -> None:
    row = _row(tmp_path, "first_token", core=functools.partial(_core, worker=False))
    for name in ("prefill", "decode", "input_prep", "sampling"):
        assert np.isnan(row[f"{name}_ns"])
    assert row["scheduling_ns"] == 100 + 200 + 200  # taken in, schedule, update; not the call in which they lay
    assert row["queue_ns"] == FIRST["queue"]
    assert row["unexplained_ns"] >= FIRST["input_prep"] + FIRST["prefill"] + FIRST["sampling"]


def test_without_a_probe_only_the_clients_own_stages_are_known() -> None:
    ledger = make_ledger(LedgerInputs.of(_requests(), None))
    row = ledger.rows.iloc[0]
    assert row["generator_lag_ns"] == 100
    assert row["unexplained_ns"] == 8900
    assert np.isnan(row["queue_ns"])
    assert np.isnan(row["network_in_ns"])


def test_a_step_s_padded_batch_is_told_by_whichever_of_its_processes_knows_it(tmp_path: Path) -> None:
    def core(writer: RecordWriter) -> None:
        ref = writer.request("engine-r1")
        for seq, padded in ((1, 0), (2, 24), (3, 0)):
            writer.step(0, seq, [(ref, 10, 0, 0, PROMPT)], running=1, waiting=0, free_blocks=9, schedule_ns=5,
                        padded=padded)  # fmt: skip
        writer.span(Span.INPUT_PREP, 1, 10, 20, n=1 << 31 | 16)
        writer.span(Span.INPUT_PREP, 2, 30, 40, n=24)

    trace = read_trace(_write(tmp_path, core=core), ["r1"])
    assert steps_table(trace)["padded"].tolist() == [16, 24, 0]


def _api_of_another(writer: RecordWriter) -> None:
    writer.request("engine-r1", "somebody else")


def _worker_lost_steps(writer: RecordWriter) -> None:
    _core(writer)
    for seq in (4, 5, 6):
        writer.step(StepFlag(0), seq, [(1, 1, 1, 0, 0)], running=1, waiting=0, free_blocks=1, schedule_ns=1)


@pytest.mark.parametrize(
    ("api", "core", "reason"),
    [
        (_api_of_another, _core, "1 of 1 successful requests were not found"),
        (_api, _worker_lost_steps, "3 steps missing"),
    ],
)
def test_a_table_is_refused_with_its_reason(tmp_path: Path, api: Api, core: Api, reason: str) -> None:
    ledger = _ledger(tmp_path, api, core)
    assert any(reason in text for text in ledger.refused)


def test_a_reply_that_arrives_before_it_was_written_refuses_the_table(tmp_path: Path) -> None:
    ledger = _ledger(tmp_path, last_token_ns=18_000, token_ns=[10_000, 18_000])
    assert any("write → client: 1 negative" in text for text in ledger.refused)


def test_interference_is_the_excess_of_mixed_steps_over_what_decode_alone_takes(tmp_path: Path) -> None:
    def core(writer: RecordWriter) -> None:
        _core(writer)
        other = writer.request("engine-y")
        for seq in range(10, 40):  # decode alone takes 1000 ns, whatever is in it
            writer.step(
                0, seq, [(other, 1, seq, 0, 0)] * (1 + seq % 3), running=1, waiting=0, free_blocks=1, schedule_ns=1
            )
            writer.span(Span.FORWARD, seq, 30_000 + seq * 2000, 31_000 + seq * 2000)
        writer.step(0, 3, [(other, 5, 0, 0, PROMPT)], running=2, waiting=0, free_blocks=9, schedule_ns=15_000)

    row = _row(tmp_path, "last_token", core=core)
    assert row["interference_ns"] == pytest.approx(500, abs=60)
    assert row["decode_ns"] + row["interference_ns"] == 1500

    def without(writer: RecordWriter) -> None:
        core(writer)
        writer.json({"type": "missing", "hook": "a hook", "stages": ["decode"]})

    (tmp_path / "without").mkdir()
    assert np.isnan(_row(tmp_path / "without", "last_token", core=without)["interference_ns"]), "a part of decode"


def test_an_engine_that_takes_a_request_while_it_is_being_queued_reverses_nothing(tmp_path: Path) -> None:
    late = functools.partial(_core, received=4000)  # the queueing call returned late
    ledger = _ledger(tmp_path, core=late)
    assert ledger.refused == ()
    assert ledger.rows.iloc[0]["engine_wait_ns"] == 0
    assert ledger.rows.iloc[0]["unexplained_ns"] == 0


def test_within_ingress_what_the_event_loop_does_for_others_is_a_wait_for_it(tmp_path: Path) -> None:
    def api(writer: RecordWriter) -> None:
        _api(writer)
        other = writer.request("engine-z", "somebody else's")
        writer.span(Span.TOKENIZE, other, 1310, 1340)  # in the loop, before this one's template
        writer.span(Span.TOKENIZE, other, 1600, 1700)  # beneath this one's own

    row = _row(tmp_path, "first_token", api)
    assert row["accept_wait_ns"] == 30
    assert row["ingress_ns"] == FIRST["ingress"] - 30
    assert row["tokenize_ns"] == FIRST["tokenize"]


def test_what_the_event_loop_makes_of_the_request_itself_is_no_wait_for_it(tmp_path: Path) -> None:
    one = _and(_api, Span.REQUEST, 1, 1850, 1900)
    for number, api in enumerate((one, _and(one, Span.REQUEST, 1, 1900, 1950))):  # a list of prompts has several
        (folder := tmp_path / str(number)).mkdir()
        row = _row(folder, "first_token", api)
        assert (row["ingress_ns"], row["accept_wait_ns"]) == (FIRST["ingress"], 0)


def test_a_disk_too_full_for_a_requests_name_refuses_the_table(tmp_path: Path) -> None:
    """What is recorded of that request has a number which no name stands behind."""

    def api(writer: RecordWriter) -> None:
        _api(writer)
        writer.span(Span.INGRESS, 2, 1300, 2000)

    trace = read_trace(_write(tmp_path, api, _core), ["r1"])
    assert trace.request_spans[Span.INGRESS]["request"].tolist() == [-1, 0]


def test_a_pair_of_stamps_out_of_order_is_counted_once(tmp_path: Path) -> None:

    def api(writer: RecordWriter) -> None:
        ref = writer.request("engine-r1", "r1")
        writer.span(Span.INGRESS, ref, 1300, 2000)
        writer.span(Span.HANDOFF, ref, 2350, 2360)  # the engine has it at 2300
        for n, base in ((1, 9000), (2, 19_000)):
            writer.span(Span.OUTPUT_RECEIVE, ref, base, base + 100, n=n)
            writer.span(Span.DETOKENIZE, ref, base + 200, base + 300, n=n, queued_ns=base + 100)
            writer.span(Span.EGRESS, ref, base + 500, base + 700, n=n)

    assert _ledger(tmp_path, api).clipped == {"handoff → engine": 1}


def test_a_message_that_arrives_while_the_event_loop_works_for_others_has_waited_for_that(tmp_path: Path) -> None:
    def api(writer: RecordWriter) -> None:
        _api(writer)
        other = writer.request("engine-z", "somebody else's")
        writer.span(Span.EGRESS, other, 1050, 1180, n=1)
        writer.span(Span.DETOKENIZE, other, 8900, 8950, n=1, queued_ns=8850)

    row = _row(tmp_path, "first_token", api)
    assert row["accept_wait_ns"] == 80  # of network_in, 1100..1300
    assert row["network_in_ns"] == FIRST["network_in"] - 80
    assert row["output_ns"] == FIRST["output"]
    between = 200 + 50 + 200 + 100 + 100 + 300 + 300  # as it is without somebody else
    assert row["transit_ns"] == between - 80 - 100  # the output also found the loop at work, 8850..8950


@pytest.mark.parametrize(("requests", "attached"), [(20, True), (19, True), (20, False)])
def test_what_the_network_takes_of_every_request_is_no_wait_for_the_servers_event_loop(
    tmp_path: Path, requests: int, attached: bool
) -> None:
    """Behind a proxy that takes 20 ms: the loop is at work 5 to 12 ms and 21 to 23 ms after a request left."""
    ms = 1_000_000
    due = [(k + 1) * 100 * ms for k in range(requests)]

    def api(writer: RecordWriter) -> None:
        for k, at in enumerate(due):
            ref = writer.request(f"engine-{k}", f"r{k}")
            writer.span(Span.INGRESS, ref, at + (25 if k else 20) * ms, at + (26 if k else 21) * ms)
            writer.span(Span.EGRESS, ref, at + 28 * ms, at + 29 * ms, n=1)
            other = writer.request(f"other-{k}", f"somebody else's {k}")
            for begun, ended in ((5, 12), (21, 23)):
                writer.span(Span.EGRESS, other, at + begun * ms, at + ended * ms, n=1)

    table = pd.concat([
        _requests(request_id=f"r{k}", due_ns=at, write_ns=at, sent_ns=at, output_tokens=1, token_ns=[at + 30 * ms],
                  first_token_ns=at + 30 * ms, last_token_ns=at + 30 * ms)
        for k, at in enumerate(due)
    ], ignore_index=True)  # fmt: skip
    trace = read_trace(_write(tmp_path, api, None), table["request_id"].tolist())
    ledger = make_ledger(LedgerInputs.of(table, trace, attached=attached)).rows
    rows = ledger[ledger["event"] == "first_token"].set_index("request_id").loc[table["request_id"]]
    network = 7 * ms if attached and requests == 20 else 0  # of fewer, or a server on loopback, nothing is concluded
    assert rows["accept_wait_ns"].tolist() == [7 * ms - network] + [9 * ms - network] * (requests - 1)
    assert (rows["accept_wait_ns"] + rows["network_in_ns"]).tolist() == [20 * ms] + [25 * ms] * (requests - 1)


@pytest.mark.parametrize("refused", [False, True])
def test_requests_that_were_refused_or_have_several_choices_change_nothing_of_what_the_network_takes(
    tmp_path: Path, refused: bool
) -> None:
    """Behind a proxy that takes 20 ms, with the loop at work for others meanwhile; the later refused one ends first."""
    ms, good = 1_000_000, 20
    due = [(k + 1) * 100 * ms for k in range(good + 2)]

    def api(writer: RecordWriter) -> None:
        for k, at in enumerate(due[:good]):
            for choice in range(2):
                ref = writer.request(f"{choice}_engine-{k}", f"r{k}")
                writer.span(Span.INGRESS, ref, at + 20 * ms, at + 21 * ms)
                writer.span(Span.EGRESS, ref, at + 28 * ms, at + 29 * ms, n=1)
            other = writer.request(f"other-{k}", f"somebody else's {k}")
            writer.span(Span.EGRESS, other, at + 5 * ms, at + 12 * ms, n=1)
        if refused:  # vLLM has no id of its own for them
            writer.span(Span.INGRESS, writer.request("", f"r{good + 1}"), due[-1] + 20 * ms, due[-1] + 21 * ms)
            writer.span(Span.INGRESS, writer.request("", f"r{good}"), due[-2] + 20 * ms, due[-1] + 25 * ms)

    table = pd.concat([
        _requests(request_id=f"r{k}", due_ns=at, write_ns=at, sent_ns=at, token_ns=[at + 30 * ms] * 2,
                  outcome="ok" if k < good else "http_4xx", first_token_ns=at + 30 * ms, last_token_ns=at + 30 * ms)
        for k, at in enumerate(due)
    ], ignore_index=True)  # fmt: skip
    trace = read_trace(_write(tmp_path, api, None), table["request_id"].tolist())
    rows = make_ledger(LedgerInputs.of(table, trace, attached=True)).rows
    assert set(rows["accept_wait_ns"]) == {0}
    assert set(rows["network_in_ns"]) == {20 * ms}


def test_where_nobody_watched_the_cores_waits_for_them_are_unmeasured(tmp_path: Path) -> None:
    ledger = _ledger(tmp_path)
    assert "core_wait" in ledger.unmeasured
    assert ledger.rows["core_wait_ns"].isna().all()


def test_engine_code_counts_until_the_api_server_has_the_token(tmp_path: Path) -> None:
    row = _row(
        tmp_path, "first_token", core=_and(_core, Span.OUTPUT_PUT, 1, 8600, 9500)
    )  # the engine lost its core inside the call that sent the token
    assert row["output_ns"] == FIRST["output"]  # 8600 to 9000, and the API server's own 100
    assert row["detokenize_ns"] == FIRST["detokenize"]
    assert row["unexplained_ns"] == 0


@pytest.mark.parametrize(
    ("scheduled", "worked", "told"),
    [
        (range(1, 21), range(1, 21), ""),
        (range(1, 21), range(1, 19), ""),  # asynchronous: two were in flight when the processes ended
        (range(5, 21), range(1, 21), ""),  # of a server that was busy before, each file's part begins when it was cut
        (range(1, 21), range(8, 21), ""),
        (range(1, 21), range(1, 18), "3 steps missing and 0 unknown"),
        (range(1, 21), [*range(1, 8), *range(11, 21)], "3 steps missing and 0 unknown"),
        (range(1, 18), range(1, 21), "0 steps missing and 3 unknown"),
    ],
)
def test_processes_may_disagree_on_the_steps_in_flight_at_either_end_alone(
    tmp_path: Path, scheduled: Sequence[int], worked: Sequence[int], told: str
) -> None:
    core, worker = (RecordWriter(tmp_path / f"{role}.gap", {"role": role}) for role in ("core", "worker"))
    for seq in scheduled:
        core.step(0, seq, [(1, 1, 1, 0, 0)], running=1, waiting=0, free_blocks=1, schedule_ns=seq)
    core.request("engine-r1")
    for seq in worked:
        worker.span(Span.FORWARD, seq, 10 * seq, 10 * seq + 5)
    core.close()
    worker.close()
    trace = read_trace(sorted(tmp_path.glob("*.gap")), ["r1"])
    assert [told in problem for problem in trace.problems] == [True] * bool(told)


def test_each_eviction_ends_when_its_own_request_is_scheduled_again(tmp_path: Path) -> None:
    def core(writer: RecordWriter) -> None:
        ref = _taken_in(writer)
        other = writer.request("engine-x")
        own, others = (ref, 5, 0, 0, PROMPT), (other, 1, 5, 0, 0)
        for seq, (at, entry) in enumerate([(5000, own), (7000, others), (8000, own), (9000, others), (15_000, own)], 1):
            writer.step(0, seq, [entry], running=1, waiting=0, free_blocks=9, schedule_ns=at)
            writer.span(Span.SCHEDULE, seq, at, at + 100)
            writer.span(Span.FORWARD, seq, at + 200, at + 500)
            writer.emit(seq, at + 600, [(entry[0], 1)] if seq in (1, 5) else [])
        for at in (5500, 8500):
            writer.span(Span.PREEMPT, ref, at, at)
        writer.span(Span.PREEMPT, other, 9500, 9500)  # never back

    rows = _ledger(tmp_path, core=core).rows.set_index("event")
    assert rows.loc["last_token", "preempted_ns"] == (8000 - 5500) + (15_000 - 8500)
    assert rows.loc["first_token", "preempted_ns"] == 0


def _in_one_chunk(*tokens: tuple[int, int, int]) -> Api:
    """The answer leaves with its second token. ``tokens``: when each was received, had been, and was detokenized."""

    def api(writer: RecordWriter) -> None:
        ref = writer.request("engine-r1", "r1")
        writer.span(Span.INGRESS, ref, 1300, 2000)
        writer.span(Span.HANDOFF, ref, 2000, 2100)
        for n, (received, came, begun) in enumerate(tokens, 1):
            writer.span(Span.OUTPUT_RECEIVE, ref, received, came, n=n)
            writer.span(Span.DETOKENIZE, ref, begun, begun + 100, n=n, queued_ns=came)
        writer.span(Span.EGRESS, ref, 19_500, 19_700, n=2)

    return api


def test_a_first_token_that_leaves_with_a_later_one_has_waited_for_that_ones_steps(tmp_path: Path) -> None:
    api = _in_one_chunk((9000, 9100, 9200), (19_000, 19_100, 19_200))
    ledger = _ledger(tmp_path, api=api, first_token_ns=20_000, token_ns=[20_000, 20_000])
    rows = ledger.rows.set_index("event")
    assert ledger.refused == ()
    assert rows.loc["first_token", "decode_ns"] == rows.loc["last_token", "decode_ns"] == 1500
    assert rows.loc["first_token", "other_step_ns"] == 2800
    assert rows.loc["first_token", "egress_ns"] == FIRST["egress"]


def test_where_chunks_do_not_tell_their_tokens_the_last_that_had_been_written_is_the_one(tmp_path: Path) -> None:
    """The first token's chunk had no text, so that the client saw none in it, and so has the last one's."""
    api = _and(_api, Span.EGRESS, 1, 21_500, 21_700, n=3)
    ledger = _ledger(tmp_path, api=api, first_token_ns=20_000, token_ns=[20_000], output_tokens=3, counted="unmeasured")
    rows = ledger.rows.set_index("event")
    assert ledger.refused == ()
    for event in ("first_token", "last_token"):
        assert (rows.loc[event, "decode_ns"], rows.loc[event, "network_out_ns"]) == (1500, 300)


def test_a_first_token_that_leaves_late_with_one_that_came_together_with_it_has_waited_for_its_turn(
    tmp_path: Path,
) -> None:
    api = _in_one_chunk((19_000, 19_050, 19_050), (19_000, 19_050, 19_150))
    row = _ledger(tmp_path, api=api, first_token_ns=20_000, token_ns=[20_000, 20_000]).rows.iloc[0]
    assert row["decode_ns"] == 0
    assert row["output_ns"] > 10_000


@pytest.mark.parametrize("counted", ["usage", "unmeasured"])
def test_a_first_token_that_was_read_with_a_later_one_had_come_and_waited_for_the_load_tester(
    tmp_path: Path, counted: str
) -> None:
    row = _ledger(tmp_path, first_token_ns=20_000, token_ns=[20_000, 20_000], counted=counted).rows.iloc[0]
    assert row["generator_lag_ns"] == FIRST["generator_lag"] + (19_500 - 9700)  # since it was written
    assert row["network_out_ns"] == 20_000 - 19_500
    assert row["unexplained_ns"] == 0


def test_of_chunks_read_together_that_do_not_tell_their_tokens_as_many_had_been_written_last(tmp_path: Path) -> None:
    """The first of three had no text."""
    api = _and(_api, Span.EGRESS, 1, 19_800, 19_850, n=3)
    row = _ledger(tmp_path, api, first_token_ns=20_000, token_ns=[20_000] * 2, counted="unmeasured").rows.iloc[0]
    assert (row["decode_ns"], row["generator_lag_ns"]) == (1500, FIRST["generator_lag"] + (19_800 - 19_700))


@pytest.mark.parametrize("counted", ["usage", "unmeasured"])
def test_what_the_load_tester_looked_for_and_did_not_find_had_been_held_back_on_its_way(
    tmp_path: Path, counted: str
) -> None:
    """A proxy that passes an answer on as a whole: all tokens come at once, and nobody reads late."""
    requests = _requests(first_token_ns=20_000, token_ns=[20_000, 20_000], counted=counted)
    inputs = LedgerInputs.of(requests, read_trace(_write(tmp_path), ["r1"]), looked_ns=np.array([19_000]))
    row = make_ledger(inputs).rows.iloc[0]
    assert row["generator_lag_ns"] == FIRST["generator_lag"] + (19_500 - 19_000)
    assert row["network_out_ns"] == (19_000 - 9700) + (20_000 - 19_500)


def test_a_load_tester_had_read_what_was_there_when_the_beat_before_the_last_was_due() -> None:
    due, at, none = np.array([0, 20, 40]), np.array([0, 21, 90]), np.empty(0, np.int64)
    requests = pd.DataFrame({"worker": [3] * 5 + [4], "first_token_ns": [0, 10, 22, 89, 91, 91]})
    found = last_looks_ns(requests, [GeneratorFile(3, [], due, at, none, none, True, 0)])
    assert found.tolist() == [-1, -1, 0, 0, 20, -1]


def test_a_template_counts_until_the_event_loop_went_on_even_if_that_was_seconds_later(tmp_path: Path) -> None:
    late = 3_000_000_000

    def api(writer: RecordWriter) -> None:
        ref = writer.request("engine-r1", "r1")
        writer.span(Span.INGRESS, ref, 1300, late + 2000)
        writer.span(Span.TEMPLATE, ref, 1400, 1500, queued_ns=1350, n=late)
        writer.span(Span.EGRESS, ref, late + 9500, late + 9700, n=1)

    came = [late + 10_000, late + 20_000]
    ledger = _ledger(tmp_path, api, lambda _: None, first_token_ns=came[0], last_token_ns=came[1], token_ns=came)
    assert ledger.rows.iloc[0]["template_ns"] == 50 + 100 + late
    assert ledger.rows.iloc[0]["ingress_ns"] == 50 + 500


def test_each_prompt_of_a_list_is_tokenized_in_its_own_time(tmp_path: Path) -> None:
    later = _and(_api, Span.TOKENIZE, 1, 1850, 1950, queued_ns=1600)  # the pool's only thread was at the first one
    row = _row(tmp_path, "first_token", later)
    assert row["tokenize_ns"] == FIRST["tokenize"] + 50 + 100
    assert row["ingress_ns"] == FIRST["ingress"] - 150
    assert row["template_ns"] == FIRST["template"]


def _two_choices(longer: int) -> tuple[Api, Api]:
    """Of an answer that is not streamed: one choice ends with step 1, the longer one with step 2; then both leave."""

    def api(writer: RecordWriter) -> None:
        for number in (0, 1):
            ref = writer.request(f"{number}_engine-r1", "r1")
            writer.span(Span.INGRESS, ref, 1300, 2000)
            writer.span(Span.HANDOFF, ref, 2000, 2100)
            for n, base in ((1, 9000), (2, 19_000))[: 1 + (number == longer)]:
                writer.span(Span.OUTPUT_RECEIVE, ref, base, base + 100, n=n)
                writer.span(Span.DETOKENIZE, ref, base + 200, base + 300, n=n, queued_ns=base + 100)
            writer.span(Span.EGRESS, ref, 19_500, 19_700, n=1 + (number == longer))

    def core(writer: RecordWriter) -> None:
        both = [writer.request(f"{number}_engine-r1") for number in (0, 1)]
        for ref in both:
            writer.span(Span.CORE_RECEIVE, ref, 2300, 2400)
            writer.span(Span.CORE_ADD, ref, 3000, 3100)
        for seq, base, refs in ((1, 5000, both), (2, 15_000, [both[longer]])):
            writer.span(Span.LOOP, seq, base - 100, base + 3800)
            writer.span(Span.SCHEDULE, seq, base, base + 200)
            entries = [(ref, 10, 0, 0, PROMPT) if seq == 1 else (ref, 1, 10, 0, 0) for ref in refs]
            writer.step(0, seq, entries, running=len(refs), waiting=0, free_blocks=9, schedule_ns=base)
            writer.span(Span.EXECUTE, seq, base + 300, base + 3300)
            writer.span(Span.FORWARD, seq, base + 1000, base + 2500)
            writer.emit(seq, base + 3400, [(ref, 1) for ref in refs])
            writer.span(Span.OUTPUT_PUT, seq, base + 3600, base + 3700)

    return api, core


@pytest.mark.parametrize("longer", [0, 1])
def test_choices_of_an_answer_that_came_whole_have_waited_for_the_longest(tmp_path: Path, longer: int) -> None:
    came = {"first_token_ns": 20_000, "token_ns": [20_000] * 3, "output_tokens": 3}
    rows = _ledger(tmp_path, *_two_choices(longer), **came).rows
    assert rows["decode_ns"].tolist() == [1500, 1500]
    assert rows["egress_ns"].tolist() == [400, 400]


def test_what_the_event_loop_does_for_other_choices_of_a_request_is_no_work_for_another(tmp_path: Path) -> None:
    """The last choice is handed over behind the first; at 19_000 come its token, a stranger's and the first one's."""

    def api(writer: RecordWriter) -> None:
        first, own = (writer.request(name, "r1") for name in ("engine-r0", "engine-r1"))
        stranger = writer.request("engine-z", "somebody else's")
        for ref, handed in ((first, 2000), (own, 2150)):
            writer.span(Span.INGRESS, ref, 1300, handed)
            writer.span(Span.HANDOFF, ref, handed, handed + 100)
        for ref, begun, written in ((own, 19_200, 19_600), (stranger, 19_240, 19_400), (first, 19_280, 19_450)):
            writer.span(Span.OUTPUT_RECEIVE, ref, 19_000, 19_100, n=1)
            writer.span(Span.DETOKENIZE, ref, begun, begun + 40, n=1, queued_ns=19_100)
            writer.span(Span.EGRESS, ref, written, written + 50, n=1)

    row = _ledger(tmp_path, api).rows.iloc[1]
    assert row["accept_wait_ns"] == 40 + 50  # what is done for the stranger
    assert (row["ingress_ns"], row["handoff_ns"]) == (850 - 100, 100 + 250)
    assert row["detokenize_ns"] == 140 + 40
    assert row["egress_ns"] == 19_650 - 19_240 - 40 - (40 + 50)


def test_waits_that_the_kernel_told_of_count_where_no_engine_recorded(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "api.gap", {"role": "api", "pid": 10})
    _api(writer)
    writer.close()
    waits = ManyStretches(Stretches(*(np.array([at]) for at in (1850, 1950, 0))).packed())
    use = CoreUse((Reason(CORE, Culprit("load tester")),), {("loop turn", 10): waits}, "switches")
    trace = replace(read_trace([tmp_path / "api.gap"], ["r1"]), cores=use)
    rows = make_ledger(LedgerInputs.of(_requests(), trace)).rows
    stages = rows[[column(stage.name) for stage in STAGES]].sum(axis=1)
    assert rows["core_wait_ns"].tolist() == [100, 100]
    assert (stages + rows["unexplained_ns"] == rows["total_ns"]).all()


def test_of_a_message_between_an_engine_and_its_worker_what_it_waited_for_a_core_is_no_scheduling(
    tmp_path: Path,
) -> None:
    waits = ManyStretches(Stretches(*(np.array(at) for at in ((5350, 8220), (5380, 8280), (0, 0)))).packed())
    use = CoreUse((Reason(CORE, Culprit("load tester")),), {("executor", os.getpid()): waits}, "switches")
    trace = replace(read_trace(_write(tmp_path), ["r1"]), cores=use)
    row = make_ledger(LedgerInputs.of(_requests(), trace)).rows.iloc[0]
    assert row["core_wait_ns"] == 30 + 60
    assert row["scheduling_ns"] == FIRST["scheduling"] - 30 - 60
