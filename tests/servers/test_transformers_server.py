"""A real Transformers server on the CPU, loaded over real sockets: what it answers, and what its processes record."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
import pytest

from gapmeter.records import EntryFlag, Outcome, RecordFile, Span, read_records
from gapmeter.servers.api.text import TextModel
from gapmeter.servers.launch import Service, free_port, launch
from gapmeter.servers.transformers import transformers_command
from tests.kit.simulated import Asked, Server, ask, session

pytestmark = pytest.mark.transformers

SHARED = "the same long beginning of a conversation that many people have with the server " * 20
MAX_BATCH = 4


@dataclass(frozen=True, slots=True)
class Run(Server):
    """A server's life, with the answers by request id."""

    answers: dict[str, Asked] = field(default_factory=dict)


def _launch(folder: Path, model: Path, **args: Any) -> Run:
    port = free_port()
    spec = transformers_command(sys.executable, Service(model, "tiny", port, MAX_BATCH, "float32", args, ()))
    env = {**spec.env, "GAPMETER_PROBE_DIR": str(folder / "probe"), "OMP_NUM_THREADS": "1"}
    url = f"http://127.0.0.1:{port}"
    process = launch(spec.command, env, (), folder / "server.log", f"{url}/health", 180)
    return Run(url, folder, process)


async def _ask(client: aiohttp.ClientSession, run: Run, name: str, prompt: str, tokens: int) -> None:
    run.answers[name] = await ask(
        client, run, name, prompt=prompt, tokens=tokens, temperature=0, ignore_eos=True, return_token_ids=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )  # fmt: skip


async def _load(run: Run) -> None:
    """Prompts of all lengths (some longer than a step), more of them than run together, one client that goes away."""
    async with session() as client:
        await _ask(client, run, "alone", "hello", 5)
        await asyncio.gather(
            *(
                _ask(client, run, f"r{n}", f"{n} tell me about the engine " * (1 + 20 * (n % 4)), 4 + 3 * n)
                for n in range(10)
            )
        )
        await _ask(client, run, "shared-1", SHARED + "one", 4)
        await _ask(client, run, "shared-2", SHARED + "two", 4)
        async with client.post(
            f"{run.url}/v1/completions", json={"prompt": "x", "max_tokens": 1500, "stream": True, "ignore_eos": True},
            headers={"x-request-id": "gone"},
        ) as response:  # fmt: skip
            await response.content.readany()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Run:
    made = _launch(tmp_path_factory.mktemp("run"), model, max_batch_tokens=64, kv_tokens=8192)
    with made.process:
        asyncio.run(_load(made))
        time.sleep(0.3)  # the engine hears of the client that went away between two steps
    return made


def _spans(file: RecordFile, code: int) -> Any:
    return file.spans[file.spans["code"] == code]


def _of_requests(file: RecordFile, code: int) -> dict[str, tuple[int, int, int]]:
    """Queued, start and end of each request's span, by the engine's id."""
    rows = _spans(file, code)
    return {
        file.engine_ids[int(row["ref"])]: (int(row["queued_ns"]), int(row["start_ns"]), int(row["end_ns"]))
        for row in rows[::-1]
    }


def _by_step(file: RecordFile, code: int) -> dict[int, tuple[int, int]]:
    return {int(row["ref"]): (int(row["start_ns"]), int(row["end_ns"])) for row in _spans(file, code)}


def _engine_ids(run: Run) -> dict[str, str]:
    """Engine's id by the client's."""
    api = run.records("api")
    return {api.client_ids[ref]: engine_id for ref, engine_id in api.engine_ids.items()}


def test_every_answer_has_the_tokens_that_were_asked_for_one_a_chunk(run: Run) -> None:
    for name, answer in run.answers.items():
        wanted = {"alone": 5, "shared-1": 4, "shared-2": 4}.get(name) or 4 + 3 * int(name[1:])
        assert answer.status == 200 and answer.finish_reason == "length"
        assert answer.counts == list(range(1, wanted + 1))
        assert answer.usage["completion_tokens"] == len(answer.ids) == wanted


def test_both_files_are_complete_nothing_is_missing_and_nothing_was_dropped(run: Run) -> None:
    for role in ("api", "core"):
        file = run.records(role)
        assert file.complete and file.dropped == 0
        assert [note for note in file.notes if note["type"] in ("missing", "warning")] == []


def test_every_request_goes_through_all_boundaries_in_causal_order(run: Run) -> None:
    api, core = run.records("api"), run.records("core")
    of = {code: _of_requests(api, code) for code in (Span.INGRESS, Span.TEMPLATE, Span.TOKENIZE, Span.HANDOFF)}
    of |= {code: _of_requests(core, code) for code in (Span.CORE_RECEIVE, Span.CORE_ADD)}
    first_step = {}
    for entry, step in zip(core.entries[::-1], core.entry_step[::-1], strict=True):
        first_step[core.engine_ids.get(int(entry["ref"]), "")] = int(step)
    schedule = _by_step(core, Span.SCHEDULE)
    for name, engine_id in _engine_ids(run).items():
        if name == "gone":
            continue
        sent = run.answers[name].sent_ns
        template, tokenize = of[Span.TEMPLATE][engine_id], of[Span.TOKENIZE][engine_id]
        _, begun, ingress_end = of[Span.INGRESS][engine_id]
        _, handed, _ = of[Span.HANDOFF][engine_id]
        _, received, received_end = of[Span.CORE_RECEIVE][engine_id]
        _, added, added_end = of[Span.CORE_ADD][engine_id]
        way = [
            sent, begun, *template[1:], *tokenize[1:], ingress_end, received, received_end, added, added_end,
            schedule[first_step[engine_id]][0], run.answers[name].token_ns[0],
        ]  # fmt: skip
        assert way == sorted(way), (name, np.diff(way))
        assert ingress_end == handed


def test_every_token_goes_through_all_boundaries_in_causal_order(run: Run) -> None:
    api, core = run.records("api"), run.records("core")
    spans = {code: _by_step(core, code) for code in Span if 100 <= code < 200}
    step_of: dict[tuple[str, int], int] = {}
    count: dict[str, int] = defaultdict(int)
    for emission, step in zip(core.emissions, core.emission_step, strict=True):
        engine_id = core.engine_ids[int(emission["ref"])]
        count[engine_id] += int(emission["tokens"])
        step_of[engine_id, count[engine_id]] = int(step)
    out = {
        code: {(api.engine_ids[int(r["ref"])], int(r["n"])): (int(r["queued_ns"]), int(r["start_ns"]), int(r["end_ns"]))
               for r in _spans(api, code)}
        for code in (Span.OUTPUT_RECEIVE, Span.DETOKENIZE, Span.EGRESS)
    }  # fmt: skip
    for name, engine_id in _engine_ids(run).items():
        if name == "gone":
            continue
        for at, n in zip(run.answers[name].token_ns, run.answers[name].counts, strict=True):
            step = step_of[engine_id, n]
            inside = [spans[code][step] for code in (
                Span.SCHEDULE, Span.INPUT_PREP, Span.FORWARD, Span.SAMPLING, Span.UPDATE)]  # fmt: skip
            put, loop = spans[Span.OUTPUT_PUT][step], spans[Span.LOOP][step]
            _, received, received_end = out[Span.OUTPUT_RECEIVE][engine_id, n]
            queued, begun, ended = out[Span.DETOKENIZE][engine_id, n]
            formatting, handed, written = out[Span.EGRESS][engine_id, n]
            way = [
                loop[0], *(stamp for span in inside for stamp in span), put[0], received, received_end, begun, ended,
                formatting, handed, at,
            ]  # fmt: skip
            assert way == sorted(way), (name, n, np.diff(way))
            assert queued == received_end and written >= handed and loop[1] >= put[1]


def test_tokens_emitted_detokenized_written_and_counted_are_the_same(run: Run) -> None:
    api, core = run.records("api"), run.records("core")
    ids = _engine_ids(run)
    for name, answer in run.answers.items():
        total = answer.usage["completion_tokens"]
        engine_ref = next(ref for ref, engine_id in core.engine_ids.items() if engine_id == ids[name])
        api_ref = next(ref for ref, engine_id in api.engine_ids.items() if engine_id == ids[name])
        assert int(core.emissions["tokens"][core.emissions["ref"] == engine_ref].sum()) == total
        for code in (Span.OUTPUT_RECEIVE, Span.DETOKENIZE, Span.EGRESS):
            rows = _spans(api, code)
            assert list(rows["n"][rows["ref"] == api_ref]) == list(range(1, total + 1))
        for file, ref in ((api, api_ref), (core, engine_ref)):
            (row,) = file.counts[file.counts["ref"] == ref]
            assert (int(row["code"]), int(row["output"])) == (Outcome.OK, total)
            assert int(row["prompt"]) == answer.usage["prompt_tokens"]
            assert int(row["cached"]) == answer.usage["prompt_tokens_details"]["cached_tokens"]


def test_steps_entries_account_for_every_token_of_every_request(run: Run) -> None:
    core = run.records("core")
    ids = _engine_ids(run)
    assert set(core.steps["seq"]) == set(_by_step(core, Span.FORWARD)) == set(_by_step(core, Span.LOOP))
    assert (np.bincount(core.entry_step)[1:] <= MAX_BATCH).all()
    for name, answer in run.answers.items():
        ref = next(ref for ref, engine_id in core.engine_ids.items() if engine_id == ids[name])
        mine = core.entries[core.entries["ref"] == ref]
        prompt, total = answer.usage["prompt_tokens"], answer.usage["completion_tokens"]
        flags = mine["flags"]
        carries = (flags & EntryFlag.PROMPT) != 0
        cached = int(mine["cached"][0])
        assert list(mine["before"]) == [cached, *(cached + np.cumsum(mine["tokens"])[:-1])]
        assert int(mine["tokens"][carries].sum()) == prompt - cached
        assert int((flags & EntryFlag.LAST_CHUNK != 0).sum()) == 1 and flags[carries][-1] & EntryFlag.LAST_CHUNK
        assert int((~carries).sum()) == total - 1 and (mine["tokens"][~carries] == 1).all()
        assert (mine["tokens"] <= 64).all()
    assert max(np.bincount(core.entry_step)) == MAX_BATCH and int(core.steps["waiting"].max()) > 0


def test_a_shared_beginning_is_taken_from_the_prefix_cache_and_said_so(run: Run) -> None:
    first, second = (
        run.answers[name].usage["prompt_tokens_details"]["cached_tokens"] for name in ("shared-1", "shared-2")
    )
    assert first == 0 and second > 100


def test_a_client_that_goes_away_is_cancelled_in_the_engine(run: Run) -> None:
    core = run.records("core")
    gone = _engine_ids(run)["gone"]
    (row,) = [r for r in core.counts if core.engine_ids[int(r["ref"])] == gone]
    assert int(row["code"]) == Outcome.ABORTED and 1 <= int(row["output"]) < 200
    assert int(core.entries["tokens"][core.entries["ref"] == row["ref"]].sum()) < 200


def test_steps_follow_each_other(run: Run) -> None:
    core = run.records("core")
    steps = np.sort(core.steps, order="seq")
    assert list(steps["seq"]) == list(range(1, len(steps) + 1))
    assert (np.diff(steps["schedule_ns"]) > 0).all()
    assert int(steps["free_blocks"].min()) >= 0
    loops = sorted(_by_step(core, Span.LOOP).values())
    assert all(later[0] >= earlier[1] for earlier, later in itertools.pairwise(loops))


def test_settings_that_a_prediction_needs_are_recorded(run: Run) -> None:
    (settings,) = [note for note in run.records("core").notes if note["type"] == "settings"]
    assert settings["scheduler"]["max_num_seqs"] == MAX_BATCH
    assert settings["scheduler"]["max_num_batched_tokens"] == 64
    assert settings["cache"]["num_blocks"] >= 8192 // settings["cache"]["block_size"]
    assert settings["model"]["dtype"] == "float32" and settings["model"]["parameters"] == 7_096_576


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Run]:
    made = _launch(tmp_path_factory.mktemp("other"), model, max_queue=2, max_model_len=256)
    with made.process:
        yield made


async def _post(run: Run, **body: Any) -> tuple[int, Any, str | None]:
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"{run.url}/v1/completions", json={"prompt": "hello", **body}) as response,
    ):
        return response.status, await response.json(), response.headers.get("Retry-After")


def _text(answer: tuple[int, Any, str | None]) -> str:
    assert answer[0] == 200, answer
    return str(answer[1]["choices"][0]["text"])


async def test_greedy_answers_repeat_also_beside_others(other: Run) -> None:
    alone = _text(await _post(other, max_tokens=12, temperature=0))
    beside = await asyncio.gather(*(_post(other, max_tokens=12, temperature=0) for _ in range(4)))
    assert {_text(answer) for answer in beside} == {alone}


async def test_a_seed_repeats_its_answer_also_beside_others_and_another_seed_does_not(other: Run) -> None:
    ask = {"max_tokens": 12, "temperature": 1.0}
    alone = _text(await _post(other, seed=5, **ask))
    beside = await asyncio.gather(*(_post(other, seed=seed, **ask) for seed in (5, 6, 7, 5)))
    texts = [_text(answer) for answer in beside]
    assert texts[0] == texts[3] == alone and len(set(texts)) == 3
    assert len({_text(await _post(other, **ask)) for _ in range(3)}) == 3


async def test_requests_beyond_queue_and_batch_are_told_to_come_back(other: Run) -> None:
    answers = await asyncio.gather(*(_post(other, max_tokens=100, ignore_eos=True) for _ in range(MAX_BATCH + 4)))
    assert sorted(answer[0] for answer in answers) == [200] * (MAX_BATCH + 2) + [503] * 2
    assert {answer[2] for answer in answers if answer[0] == 503} == {"1"}


def _copy(model: Path, folder: Path, **changed: Any) -> Path:
    shutil.copytree(model, folder)
    for name, value in changed.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


async def test_the_end_of_sequence_ends_an_answer_unless_told_otherwise(model: Path, tmp_path: Path) -> None:
    """Every token ends the sequence here, so each rule shows at once."""
    run = _launch(tmp_path, _copy(model, tmp_path / "m", generation_config={"eos_token_id": list(range(4, 8192))}))
    with run.process:

        async def ended(**body: Any) -> tuple[int, str]:
            status, answer, _ = await _post(run, max_tokens=6, temperature=0, **body)
            assert status == 200
            return answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]

        assert await ended() == (1, "stop")
        assert await ended(ignore_eos=True) == (6, "length")
        tokens, _ = await ended(min_tokens=4)
        assert tokens >= 5  # four that may not end it, and one that may


async def _ended(run: Run) -> None:
    while run.process.poll() is None:  # noqa: ASYNC110 - what is awaited happens in another process
        await asyncio.sleep(0.02)


async def test_a_killed_engine_fails_its_requests_and_ends_the_server_with_the_reason(
    model: Path, tmp_path: Path
) -> None:
    run = _launch(tmp_path, model)
    with run.process:
        engine = next(
            child
            for child in psutil.Process(run.process.pid).children()
            if "gapmeter.servers.transformers.engine" in child.cmdline()
        )
        asked = asyncio.create_task(_post(run, max_tokens=1500, ignore_eos=True))
        await asyncio.sleep(0.5)
        os.kill(engine.pid, signal.SIGKILL)
        status, answer, _ = await asked
        assert status == 500 and answer["error"]["message"] == "the engine process ended with signal 9"
        await _ended(run)
        failed = run.process.failure()
    assert failed is not None and "cannot go on: the engine process ended with signal 9" in str(failed)


def test_sigterm_ends_both_processes_in_seconds_while_requests_run(model: Path, tmp_path: Path) -> None:
    run = _launch(tmp_path, model)
    with run.process:
        server = psutil.Process(run.process.pid)
        tree = [server, *server.children(recursive=True)]

        async def interrupt() -> float:
            asked = [asyncio.create_task(_post(run, max_tokens=1500, ignore_eos=True)) for _ in range(6)]
            await asyncio.sleep(0.5)
            begun = time.monotonic()
            server.send_signal(signal.SIGTERM)
            await _ended(run)
            await asyncio.gather(*asked, return_exceptions=True)
            return time.monotonic() - begun

        assert asyncio.run(interrupt()) < 5
    assert run.process.exit_code == 0 and not any(process.is_running() for process in tree)
    api, core = run.records("api"), run.records("core")
    assert api.complete and core.complete
    assert [int(code) for code in api.counts["code"]] == [Outcome.ABORTED] * 6
    assert "Traceback" not in (tmp_path / "server.log").read_text()


def test_an_engine_whose_api_process_was_killed_ends_by_itself(model: Path, tmp_path: Path) -> None:
    port = free_port()
    spec = transformers_command(sys.executable, Service(model, "tiny", port, MAX_BATCH, "float32", {}, ()))
    env = {**os.environ, **spec.env, "GAPMETER_PROBE_DIR": str(tmp_path / "probe"), "OMP_NUM_THREADS": "1"}
    server = psutil.Popen(spec.command, env=env)
    try:
        deadline = time.monotonic() + 120
        while not list((tmp_path / "probe").glob("core-*")) and time.monotonic() < deadline:
            time.sleep(0.1)
        (engine,) = server.children()
    finally:
        server.kill()
        server.wait()
    engine.wait(5)
    (path,) = (tmp_path / "probe").glob("core-*")
    assert read_records(path).complete


async def test_a_configuration_alone_is_served_with_weights_drawn_from_its_seed(model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    folder = _copy(model, tmp_path / "m", config={**config, "gapmeter_random_weights": 7})
    (folder / "model.safetensors").unlink()
    run = _launch(tmp_path, folder, precision="bfloat16")
    with run.process:
        answers = [_text(await _post(run, max_tokens=8, temperature=0)) for _ in range(2)]
    assert answers[0] == answers[1] != ""
    (settings,) = [note for note in run.records("core").notes if note["type"] == "settings"]
    assert settings["model"]["dtype"] == "bfloat16" and settings["model"]["parameters"] == 7_096_576


def test_our_text_side_agrees_with_transformers_own(model: Path) -> None:
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(model), TextModel(model)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "grüße 🙂 the <b>engine</b>"}]
    rendered = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours.template(messages) == rendered
    assert ours.encode(rendered, templated=True) == theirs(rendered, add_special_tokens=False)["input_ids"]
    assert ours.encode("hello there", templated=False) == theirs("hello there")["input_ids"]
    ids = ours.encode("hello 🙂 there", templated=True)
    assert ours.decoder().push(ids, last=True) == theirs.decode(ids, skip_special_tokens=True)


async def _crowd(run: Run) -> None:
    async with session() as client:
        await asyncio.gather(*(_ask(client, run, f"c{n}", f"{n} is my number " * 30, 160) for n in range(MAX_BATCH)))


def test_evicted_requests_are_recorded_begin_again_and_lose_no_token(model: Path, tmp_path: Path) -> None:
    """Four requests of some 280 tokens in a cache for 640: they fit when they begin, and not when they have grown."""
    run = _launch(tmp_path, model, kv_tokens=640, max_model_len=512, page_size=16, prefix_cache=False)
    with run.process:
        asyncio.run(_crowd(run))
    core = run.records("core")
    evicted = [int(ref) for ref in _spans(core, Span.PREEMPT)["ref"]]
    assert evicted
    flags, refs = core.entries["flags"], core.entries["ref"]
    assert sorted(refs[flags & EntryFlag.PREEMPTED != 0]) == sorted(evicted)
    resumed = flags & EntryFlag.RESUMED != 0
    assert set(refs[resumed]) == set(evicted)
    assert int((resumed & (flags & EntryFlag.LAST_CHUNK != 0)).sum()) == len(evicted)
    for answer in run.answers.values():
        assert answer.counts == list(range(1, 161)) and len(answer.ids) == 160
    emitted = np.bincount(core.emissions["ref"], weights=core.emissions["tokens"])
    assert list(emitted[1:]) == [160] * MAX_BATCH
    for ref in set(evicted):
        back = core.entries[(refs == ref) & resumed & (core.entries["tokens"] > 0)]
        assert int(back["before"][0]) == 0 and (back["flags"] & EntryFlag.PROMPT != 0).all()
