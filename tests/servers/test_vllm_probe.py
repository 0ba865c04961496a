from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from gapmeter.records import EntryFlag, Outcome, RecordFile, Span, StepFlag
from tests.kit.vllm import GIVEN_UP_TOKENS, Run, run_vllm

pytestmark = pytest.mark.vllm

MODES = ("synchronous", "asynchronous", "worker in the engine's process")


@pytest.fixture(scope="module", params=MODES)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One real vLLM for each way of scheduling and of placing the worker."""
    folder: Path = tmp_path_factory.mktemp("vllm")
    return run_vllm(
        folder, asynchronous=request.param == "asynchronous", single_process_engine=request.param.startswith("worker")
    )


def spans(file: RecordFile, code: int, ref: int | None = None) -> NDArray[np.void]:
    rows: NDArray[np.void] = file.spans[file.spans["code"] == code]
    return rows if ref is None else rows[rows["ref"] == ref]


def refs(file: RecordFile, run: Run) -> dict[int, str]:
    """Client id of each ref of any file: by its own names for the API server's, by engine ids for the others."""
    api = run.files["api"]
    client_of = {engine: api.client_ids[ref] for ref, engine in api.engine_ids.items() if engine}
    return {ref: client_of[engine] for ref, engine in file.engine_ids.items() if engine}


def emitted(run: Run) -> dict[int, list[tuple[int, int]]]:
    """For each of the core's refs, (step, tokens so far) of every emission."""
    core = run.files["core"]
    so_far: dict[int, list[tuple[int, int]]] = {}
    for row, step in zip(core.emissions, core.emission_step, strict=True):
        known = so_far.setdefault(int(row["ref"]), [])
        known.append((int(step), int(row["tokens"]) + (known[-1][1] if known else 0)))
    return so_far


def started(file: RecordFile, code: int) -> dict[int, tuple[int, int]]:
    """First start and last end of a step's spans of one code, by step."""
    found: dict[int, tuple[int, int]] = {}
    for row in spans(file, code):
        start, end = int(row["start_ns"]), int(row["end_ns"])
        before = found.get(int(row["ref"]), (start, end))
        found[int(row["ref"])] = (min(start, before[0]), max(end, before[1]))
    return found


def test_every_request_is_joined_from_its_header_through_the_engine_to_a_workers_steps(run: Run) -> None:
    core, worker = run.files["core"], run.files["worker"]
    joined = refs(core, run)
    assert set(joined.values()) == {*run.answers, *run.aborted} - {"refused"}
    forwards = set(spans(worker, Span.FORWARD)["ref"].tolist())
    for ref, steps in emitted(run).items():
        assert {step for step, _ in steps} <= forwards, joined[ref]
    pair = [ref for ref, client in joined.items() if client == "pair"]
    assert len(pair) == 2, "each of n choices is a request of its own, under one header"


def test_a_refused_request_is_known_by_its_header_alone(run: Run) -> None:
    api = run.files["api"]
    (ref,) = [ref for ref, client in api.client_ids.items() if client == "refused"]
    assert api.engine_ids[ref] == ""
    assert len(spans(api, Span.INGRESS, ref)) == 1
    assert run.answers["refused"].status == 400


def test_no_hook_was_missing_or_failed_and_every_file_was_closed(run: Run) -> None:
    for file in run.files.values():
        assert [note for note in file.notes if note["type"] in ("missing", "warning")] == []
        assert file.complete and file.dropped == 0, file.path


def test_all_code_that_the_hooks_read_is_that_of_a_tested_version(run: Run) -> None:
    """Where it fails on a version whose other tests pass, setup/digests.py adds that version."""
    for file in run.files.values():
        told = [note for note in file.notes if note["type"] == "code"]
        assert [one for note in told for one in note["changed"]] == []
        assert sum(len(note["known"]) for note in told) > 10


def test_settings_and_versions_are_recorded(run: Run) -> None:
    (settings,) = [note for note in run.files["core"].notes if note["type"] == "settings"]
    assert settings["scheduler"]["max_num_seqs"] == 8
    assert settings["scheduler"]["max_num_batched_tokens"] == 256
    assert settings["cache"]["num_blocks"] == 18
    assert settings["cache"]["enable_prefix_caching"] is True
    assert {"torch", "python"} <= run.files["core"].process["versions"].keys()


def test_no_interval_is_negative_and_none_starts_before_it_was_queued(run: Run) -> None:
    for file in run.files.values():
        rows = file.spans
        assert (rows["end_ns"] >= rows["start_ns"]).all()
        assert (rows["queued_ns"] <= rows["start_ns"]).all()


def test_all_processes_saw_the_same_steps(run: Run) -> None:
    core, worker = run.files["core"], run.files["worker"]
    every = set(core.steps["seq"].tolist())
    working = set(core.steps["seq"][(core.steps["code"] & StepFlag.EMPTY) == 0].tolist())
    assert sorted(every) == list(range(1, len(every) + 1))
    for code in (Span.SCHEDULE, Span.EXECUTE, Span.UPDATE, Span.LOOP):
        assert set(spans(core, code)["ref"].tolist()) == every, code.name
    assert set(spans(worker, Span.WORKER)["ref"].tolist()) == every
    for code in (Span.INPUT_PREP, Span.FORWARD, Span.SAMPLING):
        assert sorted(spans(worker, code)["ref"].tolist()) == sorted(working), code.name


def test_entries_add_up_to_each_prompt_and_name_its_last_chunk_once(run: Run) -> None:
    core = run.files["core"]
    evicted = set(spans(core, Span.PREEMPT)["ref"].tolist())
    cut = 0
    for ref, client in refs(core, run).items():
        mine = core.entries[core.entries["ref"] == ref]
        prompt = mine[(mine["flags"] & EntryFlag.PROMPT) != 0]
        if ref in evicted:
            continue
        assert prompt["before"][0] == prompt["cached"][0] and (prompt["cached"][1:] == 0).all()
        assert ((prompt["flags"] & EntryFlag.LAST_CHUNK) != 0).sum() == 1 and prompt["flags"][-1] & EntryFlag.LAST_CHUNK
        if client in run.answers and client != "pair":
            assert prompt["cached"][0] + prompt["tokens"].sum() == run.answers[client].usage["prompt_tokens"]
        cut += len(prompt) > 1
    assert cut, "no prompt was cut into chunks, so this proves nothing"


def test_cached_tokens_are_known_to_the_core_and_to_the_api_server(run: Run) -> None:
    for name in ("core", "api"):
        file = run.files[name]
        names = refs(file, run)
        cached = {names[int(row["ref"])]: int(row["cached"]) for row in file.counts if int(row["ref"]) in names}
        assert cached["last-1"] >= 128, name  # a block of the shared prefix
        assert cached["plain"] == 0, name


def test_evictions_are_recorded_and_the_recomputation_is_flagged(run: Run) -> None:
    core = run.files["core"]
    evictions = spans(core, Span.PREEMPT)
    assert len(evictions), "the cache was never too small, so this proves nothing"
    emissions, resumed = emitted(run), 0
    for ref in set(evictions["ref"].tolist()):
        mine = core.entries["ref"] == ref
        flags, steps = core.entries["flags"][mine], core.entry_step[mine]
        evicted = steps[(flags & EntryFlag.PREEMPTED) != 0]
        assert len(evicted)
        # A token that was in flight at the eviction still comes; a later one needs the request to be back.
        if emissions.get(ref) and emissions[ref][-1][0] > evicted[0]:
            assert steps[(flags & EntryFlag.RESUMED) != 0].min() > evicted[0]
            resumed += 1
    assert resumed, "none came back, so this proves nothing"
    assert (core.entries["tokens"][(core.entries["flags"] & EntryFlag.PREEMPTED) != 0] == 0).all()


def test_outcomes_and_counts_agree_with_what_the_client_got(run: Run) -> None:
    for name in ("core", "api"):
        file = run.files[name]
        names = refs(file, run)
        for row in file.counts:
            client = names.get(int(row["ref"]))
            if client in run.aborted:
                # Once in a while on a busy machine the engine is done before it hears that nobody listens.
                done = row["output"] == GIVEN_UP_TOKENS
                assert row["code"] == (Outcome.OK if done else Outcome.ABORTED), (name, row)
            elif client is not None and client != "pair":
                answer = run.answers[client]
                assert (row["code"], row["prompt"], row["output"]) == (
                    Outcome.OK, answer.usage["prompt_tokens"], answer.usage["completion_tokens"]
                ), (name, client)  # fmt: skip
        assert {names.get(int(r)) for r in file.counts["ref"]} >= {*run.answers, *run.aborted} - {"refused"}, name


def test_every_chunk_carries_the_count_that_the_client_read_in_it(run: Run) -> None:
    core, api = run.files["core"], run.files["api"]
    counts = {client: [n for _, n in emitted(run)[ref]] for ref, client in refs(core, run).items() if client != "pair"}
    merged = 0
    for ref, client in refs(api, run).items():
        if client not in run.answers or client == "pair":
            continue
        written = [int(n) for n in spans(api, Span.EGRESS, ref)["n"] if n]
        seen = [n for _, n in run.answers[client].chunks]
        assert written == (seen or [run.answers[client].usage["completion_tokens"]]), client
        handled = spans(api, Span.DETOKENIZE, ref)["n"].tolist()
        assert handled == spans(api, Span.OUTPUT_RECEIVE, ref)["n"].tolist() == counts[client], client
        merged += len(written) < len(handled)
    assert merged or not run.answers, "no outputs were merged into one chunk (the answer that is not streamed is)"


def test_a_whole_answer_of_two_choices_carries_the_tokens_of_both(run: Run) -> None:
    api = run.files["api"]
    written = [
        [int(n) for n in spans(api, Span.EGRESS, ref)["n"] if n]
        for ref, client in refs(api, run).items()
        if client == "pair"
    ]
    assert written == [[5], [5]]


def test_the_way_in_is_in_causal_order(run: Run) -> None:
    core, api = run.files["core"], run.files["api"]
    engine = {engine_id: ref for ref, engine_id in core.engine_ids.items()}
    for ref, client in refs(api, run).items():
        (ingress,), (handoff,) = spans(api, Span.INGRESS, ref), spans(api, Span.HANDOFF, ref)
        at = engine[api.engine_ids[ref]]
        (received,), (added,) = spans(core, Span.CORE_RECEIVE, at), spans(core, Span.CORE_ADD, at)
        if client in run.answers:
            assert run.answers[client].sent_ns <= ingress["start_ns"]
        assert ingress["end_ns"] <= handoff["start_ns"] <= received["start_ns"]
        assert received["end_ns"] <= added["start_ns"]
        stages = [s for code in (Span.TEMPLATE, Span.TOKENIZE) for s in spans(api, code, ref)]
        assert len(stages) == (1 if client == "plain" else 2)
        for stage in stages:
            assert ingress["start_ns"] <= stage["queued_ns"] and stage["end_ns"] <= ingress["end_ns"]
            assert stage["queued_ns"] < stage["start_ns"] and stage["n"] > 0, "by the pool, and back on the event loop"
        (made,) = spans(api, Span.REQUEST, ref)
        ready = max(int(stage["end_ns"] + stage["n"]) for stage in stages)
        assert ready <= made["start_ns"] < made["end_ns"] <= handoff["start_ns"]


def test_a_step_is_in_causal_order_from_scheduling_to_sending(run: Run) -> None:
    core, worker = run.files["core"], run.files["worker"]
    of = {code: started(core, code) for code in Span if 100 <= code < 110}
    of |= {code: started(worker, code) for code in Span if 110 <= code < 120}
    assert len(of[Span.FORWARD]) > 10
    for seq in of[Span.FORWARD]:
        at = {code: found[seq] for code, found in of.items() if seq in found}
        ends = [
            (at[Span.SCHEDULE][1], at[Span.EXECUTE][0]),
            (at[Span.EXECUTE][0], at[Span.WORKER][0]),
            (at[Span.WORKER][0], at[Span.INPUT_PREP][0]),
            (at[Span.INPUT_PREP][1], at[Span.FORWARD][0]),
            (at[Span.FORWARD][1], at[Span.SAMPLING][0]),
            (at[Span.SAMPLING][1], at[Span.SAMPLE_CALL][1]),
            (at[Span.SAMPLE_CALL][1], at[Span.UPDATE][0]),
            (at[Span.UPDATE][1], at[Span.OUTPUT_PUT][0]),
            (at[Span.OUTPUT_PUT][0], at[Span.OUTPUT_SEND][0]),
            (at[Span.LOOP][0], at[Span.SCHEDULE][0]),
            (at[Span.OUTPUT_PUT][1], at[Span.LOOP][1]),
        ]
        assert all(earlier <= later for earlier, later in ends), (seq, at)


def test_the_way_out_is_in_causal_order(run: Run) -> None:
    core, api = run.files["core"], run.files["api"]
    sent = started(core, Span.OUTPUT_SEND)
    steps = {core.engine_ids[ref]: {n: s for s, n in found} for ref, found in emitted(run).items()}
    assert set(run.answers) & set(refs(api, run).values())
    for ref, client in refs(api, run).items():
        if client == "pair":
            continue
        handled = {int(row["n"]): row for row in spans(api, Span.DETOKENIZE, ref)}
        for row in spans(api, Span.OUTPUT_RECEIVE, ref):
            n = int(row["n"])
            assert sent[steps[api.engine_ids[ref]][n]][0] <= row["start_ns"]
            assert row["end_ns"] <= handled[n]["queued_ns"] <= handled[n]["start_ns"]
        for row in spans(api, Span.EGRESS, ref):
            if row["n"]:
                assert handled[int(row["n"])]["end_ns"] <= row["queued_ns"] <= row["start_ns"]
        if client in run.answers:
            arrived = {n: at for at, n in run.answers[client].chunks}
            written = {int(r["n"]): int(r["start_ns"]) for r in spans(api, Span.EGRESS, ref)}
            assert all(written[n] <= at for n, at in arrived.items())


def test_scheduling_ahead_is_flagged_only_where_it_happens(run: Run) -> None:
    ahead = (run.files["core"].steps["code"] & StepFlag.ASYNC) != 0
    (settings,) = [note for note in run.files["core"].notes if note["type"] == "settings"]
    if settings["scheduler"]["async_scheduling"]:
        assert ahead.mean() > 0.5
    else:
        assert not ahead.any()


def test_the_engines_own_per_request_metrics_are_met(run: Run) -> None:
    """Queue: added .. scheduled; generation: first update .. last. As vLLM defines them, from our stamps."""
    core = run.files["core"]
    schedule, update = started(core, Span.SCHEDULE), started(core, Span.UPDATE)
    emissions, off = emitted(run), []
    names = {client: ref for ref, client in refs(core, run).items() if client != "pair"}
    for client, answer in run.answers.items():
        if not answer.metrics:
            continue
        ref = names[client]
        mine = np.flatnonzero(core.entries["ref"] == ref)
        (added,) = spans(core, Span.CORE_ADD, ref)
        queue = schedule[int(core.entry_step[mine[0]])][0] - int(added["end_ns"])
        first, last = emissions[ref][0][0], emissions[ref][-1][0]
        generation = update[last][1] - update[first][1]
        off.append(abs(queue / 1e6 - answer.metrics["queue_time_ms"]))
        off.append(abs(generation / 1e6 - answer.metrics["generation_time_ms"]))
    assert len(off) >= 20
    assert np.median(off) < 0.1, "milliseconds"
