"""The simulated server over real sockets: what it answers, how it fails when told to, what it leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from gapmeter.records import EntryFlag, Outcome, RecordFile, Span, StepFlag
from gapmeter.servers.launch import ServerFailed, Service, launch
from gapmeter.servers.simulated import simulated_command
from gapmeter.servers.simulated.scheduler import Limits
from gapmeter.servers.simulated.settings import ServerOptions, parse_options
from tests.kit.simulated import Asked, Server, ask, session, simulated
from tests.kit.wait import eventually


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with simulated(tmp_path_factory.mktemp("simulated")) as running:
        yield running


async def test_the_same_question_gets_the_same_answer_and_another_one_another(server: Server) -> None:
    async with session() as client:
        first, again, other = [await ask(client, server, f"same-{p}", prompt=p) for p in ("x", "x", "y")]
    assert first.text == again.text != other.text


async def test_a_prompt_costs_one_token_a_byte_where_no_model_was_given(server: Server) -> None:
    async with session() as client:
        asked = await ask(client, server, "bytes", prompt="Grüße", chat=False)
    assert asked.usage["prompt_tokens"] == len("Grüße".encode())


async def test_a_client_that_leaves_frees_its_place_and_its_blocks(server: Server) -> None:
    async with session() as client:
        staying = asyncio.create_task(ask(client, server, "stays", tokens=300))
        body = {"prompt": "bye", "max_tokens": 4000, "stream": True}
        async with client.post(f"{server.url}/v1/completions", json=body) as answer:
            await answer.content.readline()
            assert await server.metric("requests_running") >= 1
        await server.until("requests_running", lambda running: running == 1)
        assert (await staying).finish_reason == "length"
        blocks = await server.metric("kv_blocks")
        await server.until("kv_blocks_free", lambda free: free == blocks)


async def test_small_kv_memory_evicts_and_every_answer_is_still_complete(tmp_path: Path) -> None:
    with simulated(tmp_path, kv_blocks=10, max_batch=4) as server:
        async with session() as client:
            asked = await asyncio.gather(*(ask(client, server, f"p{i}", prompt="x" * 20, tokens=60) for i in range(4)))
            assert await server.metric("engine_preemptions_total") > 0
    assert [len(one.token_ns) for one in asked] == [60] * 4
    core = server.records("core")
    evicted = core.spans[core.spans["code"] == Span.PREEMPT]
    flagged = core.entries["flags"] & EntryFlag.PREEMPTED != 0
    assert 0 < len(evicted) == np.count_nonzero(flagged)
    assert np.count_nonzero(core.entries["flags"] & EntryFlag.RESUMED) >= len(evicted)


async def test_a_shared_prompt_is_found_in_the_cache_and_reported_in_usage(tmp_path: Path) -> None:
    with simulated(tmp_path, prefix_caching=True) as server:
        async with session() as client:
            first, again = [await ask(client, server, f"c{i}", prompt="a long word " * 10) for i in range(2)]
    cached = [one.usage["prompt_tokens_details"]["cached_tokens"] for one in (first, again)]
    assert cached[0] == 0 < cached[1] < again.usage["prompt_tokens"]
    assert cached[1] % 16 == 0


# -- faults


async def test_it_refuses_the_share_of_requests_and_dies_at_the_one_that_it_was_told(tmp_path: Path) -> None:
    with simulated(tmp_path, fault_error_share=0.25, fault_die_at=13) as server:
        async with session() as client:
            asked = [await ask(client, server, f"e{i}", tokens=1) for i in range(12)]
            last = await ask(client, server, "e12")
        assert Counter(one.status for one in asked) == {200: 9, 500: 3}
        assert (last.token_ns, bool(last.error)) == ([], True)
        await eventually(lambda: server.process.poll() is not None)
    assert server.process.exit_code == 128 + signal.SIGKILL


def test_a_server_that_never_becomes_ready_says_so_and_is_ended(tmp_path: Path) -> None:
    with pytest.raises(ServerFailed, match="gave 503"), simulated(tmp_path, timeout_s=4, fault_never_ready=True):
        pass


async def test_a_stall_of_the_engine_delays_tokens_and_loses_none(tmp_path: Path) -> None:
    with simulated(tmp_path, fault_stall_at=2, fault_stall_s=0.4) as server:
        async with session() as client:
            asking = asyncio.create_task(ask(client, server, "early", tokens=100))
            await server.until("generation_tokens_total", lambda tokens: tokens > 0)
            late = await ask(client, server, "late", tokens=2)
            early = await asking
    assert early.finish_reason == late.finish_reason == "length"
    assert max(np.diff(early.token_ns)) >= 300_000_000  # the client may have read the token before it late


async def test_when_the_engine_process_is_killed_clients_are_told_and_the_server_ends(tmp_path: Path) -> None:
    with simulated(tmp_path) as server:
        async with session() as client:
            asking = asyncio.create_task(ask(client, server, "unlucky", tokens=4000))
            await server.until("generation_tokens_total", lambda tokens: tokens > 0)
            (engine,) = psutil.Process(server.process.pid).children()
            engine.kill()
            asked = await asking
        await eventually(lambda: server.process.poll() is not None)
    assert asked.error
    assert asked.finish_reason is None
    assert server.process.exit_code == 1
    assert "engine process ended" in (tmp_path / "server.log").read_text()


def _has_ended(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):  # also between two looks at it
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    return True


async def test_nothing_is_left_when_the_api_process_is_killed(tmp_path: Path) -> None:
    with simulated(tmp_path) as server:
        (engine,) = psutil.Process(server.process.pid).children()
        os.kill(server.process.pid, signal.SIGKILL)
        await eventually(lambda: _has_ended(engine))
    assert server.records("core").process["role"] == "core"  # readable, whichever of the two was quicker to end


# -- records and truth


@pytest.fixture(scope="module", params=["synchronous", "asynchronous"])
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Server, list[Asked]]:
    """A server that has answered 24 overlapping requests and ended, and what its clients saw."""

    async def load(server: Server) -> list[Asked]:
        async with session() as client:
            tasks = []
            for number in range(24):
                tasks.append(asyncio.create_task(ask(client, server, f"r{number}", prompt="x" * (7 * number + 1))))
                await asyncio.sleep(0.004)
            return list(await asyncio.gather(*tasks))

    folder = tmp_path_factory.mktemp(request.param)
    options = {"asynchronous": request.param == "asynchronous", "token_budget": 64, "jitter": 0.1}
    with simulated(folder, kv_blocks=48, max_model_len=512, **options) as server:
        asked = asyncio.run(load(server))
    return server, asked


def test_steps_and_emissions_on_record_are_those_of_the_truth(finished: tuple[Server, list[Asked]]) -> None:
    server, _ = finished
    core, truth = server.records("core"), server.truth()
    assert core.complete
    assert core.dropped == 0
    assert _entries(core) == {
        line["seq"]: [tuple(entry) for entry in line["entries"]] for line in truth["step"] if line["entries"]
    }
    flags = {int(step["seq"]): int(step["code"]) for step in core.steps}
    assert flags == {
        line["seq"]: StepFlag.ASYNC * line["asynchronous"]
        | StepFlag.EMPTY * (not line["prompt_tokens"] + line["decoding"])
        for line in truth["step"]
    }
    made: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for row, seq in zip(core.emissions, core.emission_step, strict=True):
        made[int(seq)].append((core.engine_ids[int(row["ref"])], int(row["tokens"])))
    assert made == {line["seq"]: [tuple(t) for t in line["tokens"]] for line in truth["emitted"] if line["tokens"]}


def _entries(core: RecordFile) -> dict[int, list[tuple[Any, ...]]]:
    found: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
    for row, seq in zip(core.entries, core.entry_step, strict=True):
        ref, *numbers = (int(row[name]) for name in ("ref", "tokens", "before", "cached", "flags"))
        found[int(seq)].append((core.engine_ids[ref], *numbers))
    return found


def test_every_stage_of_the_engine_is_on_record_and_was_stamped_inside_the_truths_edges(
    finished: tuple[Server, list[Asked]],
) -> None:
    """The truth looks at the clock before the probe does, at a stage's start as at its end."""
    server, _ = finished
    core = server.records("core")
    true: dict[tuple[str, Any], list[tuple[int, int]]] = defaultdict(list)
    for line in server.truth()["stage"]:
        true[line["stage"], line["of"]].append((line["start_ns"], line["end_ns"]))
    seen: set[tuple[str, Any]] = set()
    for span in core.spans[(core.spans["code"] < 200) & (core.spans["code"] != Span.PREEMPT)]:
        of = int(span["ref"]) if span["code"] >= 100 else core.engine_ids[int(span["ref"])]
        name = Span(int(span["code"])).name
        seen.add((name, of))
        inside = any(start <= span["start_ns"] <= end <= span["end_ns"] for start, end in true[name, of])
        assert inside, (name, of)
    engine = {Span(code).name for code in Span if code < 200} - _API_STAGES
    assert seen == {key for key in true if key[0] in engine}


_API_STAGES = {"INGRESS", "TEMPLATE", "TOKENIZE", "HANDOFF", "OUTPUT_RECEIVE", "DETOKENIZE", "EGRESS"}


def test_the_api_process_stamps_around_what_the_truth_says_was_done(finished: tuple[Server, list[Asked]]) -> None:
    server, asked = finished
    api, truth = server.records("api"), server.truth()
    true = defaultdict(list)
    for line in truth["stage"]:
        true[line["stage"], line["of"]].append((line["start_ns"], line["end_ns"]))
    for line in truth["chunk"]:
        true["EGRESS", line["of"]].append((line["start_ns"], line["end_ns"]))
    for name in ("TEMPLATE", "TOKENIZE", "DETOKENIZE", "EGRESS"):
        for ref, client_id in api.client_ids.items():
            spans = api.spans[(api.spans["code"] == Span[name]) & (api.spans["ref"] == ref)]
            inner = true[name, client_id]
            assert len(spans) == len(inner) == (8 if name in ("DETOKENIZE", "EGRESS") else 1)
            for span, (start, end) in zip(spans, inner, strict=True):
                assert span["start_ns"] <= start <= end <= span["end_ns"]
    assert set(api.client_ids.values()) == {one.request_id for one in asked}


def test_counts_on_record_are_those_that_the_client_was_told(finished: tuple[Server, list[Asked]]) -> None:
    server, asked = finished
    api, core = server.records("api"), server.records("core")
    told = {one.request_id: (one.usage["prompt_tokens"], one.usage["completion_tokens"]) for one in asked}
    client_of = {api.engine_ids[ref]: client_id for ref, client_id in api.client_ids.items()}
    for file in (api, core):
        rows = {client_of[file.engine_ids[int(row["ref"])]]: row for row in file.counts}
        assert {int(row["code"]) for row in rows.values()} == {Outcome.OK}
        assert {who: (int(row["prompt"]), int(row["output"])) for who, row in rows.items()} == told


def test_settings_are_on_record(finished: tuple[Server, list[Asked]]) -> None:
    (settings,) = [note for note in finished[0].records("core").notes if note["type"] == "settings"]
    assert settings["cache"] == {"block_size": 16, "num_blocks": 48, "enable_prefix_caching": False}
    assert settings["scheduler"]["max_num_batched_tokens"] == 64
    assert settings["times"]["forward_ns"] == 1_000_000


# -- options


def test_flags_become_options_and_a_command_becomes_flags() -> None:
    args = {"forward_ms": 2.5, "asynchronous": True, "kv_blocks": 128, "fault_die_at": 7, "chunked_prefill": False}
    spec = simulated_command("python", Service("/models/m", "name", 1234, 6, "float32", args))
    options = parse_options(spec.command[4:])
    assert options == ServerOptions(
        model=Path("/models/m"), served_name="name", port=1234, max_model_len=2048,
        limits=Limits(max_sequences=6, asynchronous=True, kv_blocks=128, chunked_prefill=False),
        times=options.times, faults=options.faults,
    )  # fmt: skip
    assert (options.times.forward_ns, options.faults.die_at) == (2_500_000, 7)


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"forward": 3}, "ambiguous option|unrecognized arguments"),
        ({"jitter": "normal"}, "invalid float value"),
        ({"max_batch": 0}, "max_sequences"),
        ({"forward_ms": -1}, "forward_ms is -1; a duration is not negative"),
        ({"kv_blocks": 4, "max_model_len": 100}, "does not fit"),
        ({"chunked_prefill": False, "token_budget": 64}, "without chunked prefill"),
    ],
)
def test_a_mistake_in_the_flags_is_one_sentence_that_names_it(
    args: dict[str, Any], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_options(simulated_command("python", Service(None, "sim", 1, 4, "any", args)).command[4:])
    assert re.search(f"error: .*({reason})", capsys.readouterr().err)


def test_a_model_without_a_tokenizer_ends_the_server_with_that_reason(tmp_path: Path) -> None:
    spec = simulated_command(sys.executable, Service(tmp_path, "sim", 1, 4, "any", {}))
    with pytest.raises(ServerFailed, match=re.escape(str(tmp_path))):
        launch(spec.command, spec.env, (), tmp_path / "log", "http://127.0.0.1:1/health", 10)
