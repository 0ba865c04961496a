"""The HTTP layer over real sockets, with the simulated engine under it."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gapmeter.records import Outcome, Span
from gapmeter.servers.launch import ServerFailed, free_port
from tests.kit.simulated import Server, session, simulated

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with simulated(tmp_path_factory.mktemp("server"), max_model_len=512) as running:
        yield running


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with session() as made:
        yield made


async def _events(answer: aiohttp.ClientResponse) -> list[Any]:
    lines = (await answer.read()).decode().split("\n\n")
    assert lines[-1] == "" and all(line.startswith("data: ") for line in lines[:-1])
    words = [line.removeprefix("data: ") for line in lines[:-1]]
    assert words[-1] == "[DONE]"
    return [json.loads(word) for word in words[:-1]]


async def test_a_streamed_answer_is_the_one_that_comes_whole(client: aiohttp.ClientSession, server: Server) -> None:
    for path, question in ((CHAT, HELLO), (COMPLETION, {"prompt": "hello", "max_tokens": 6})):
        async with client.post(server.url + path, json={**question, "stream": True}) as answer:
            assert answer.status == 200 and answer.content_type == "text/event-stream"
            choices = [event["choices"][0] for event in await _events(answer)]
        async with client.post(server.url + path, json=question) as answer:
            whole = await answer.json()
        if path == CHAT:
            assert choices[0]["delta"]["role"] == "assistant" and all("role" not in c["delta"] for c in choices[1:])
            joined, text = "".join(c["delta"]["content"] for c in choices), whole["choices"][0]["message"]["content"]
        else:
            joined, text = "".join(c["text"] for c in choices), whole["choices"][0]["text"]
        assert joined == text != ""
        assert [c["finish_reason"] for c in choices] == [None] * 5 + ["length"]
        assert whole["choices"][0]["finish_reason"] == "length"
        assert whole["usage"]["completion_tokens"] == 6


async def test_usage_runs_along_or_comes_at_the_end_or_not_at_all(
    client: aiohttp.ClientSession, server: Server
) -> None:
    async def usages(**options: bool) -> list[int | None]:
        body = {**HELLO, "stream": True, "stream_options": options}
        async with client.post(server.url + CHAT, json=body) as answer:
            return [(event.get("usage") or {}).get("completion_tokens") for event in await _events(answer)]

    assert await usages() == [None] * 6
    assert await usages(include_usage=True) == [None] * 6 + [6]
    assert await usages(include_usage=True, continuous_usage_stats=True) == [1, 2, 3, 4, 5, 6, 6]


async def test_token_ids_come_with_every_chunk_when_asked_for(client: aiohttp.ClientSession, server: Server) -> None:
    body = {"prompt": [104, 105], "max_tokens": 5, "return_token_ids": True}
    async with client.post(server.url + COMPLETION, json={**body, "stream": True}) as answer:
        choices = [event["choices"][0] for event in await _events(answer)]
    async with client.post(server.url + COMPLETION, json=body) as answer:
        whole = (await answer.json())["choices"][0]
    assert [len(choice["token_ids"]) for choice in choices] == [1] * 5
    assert [token for choice in choices for token in choice["token_ids"]] == whole["token_ids"]
    assert choices[0]["prompt_token_ids"] == whole["prompt_token_ids"] == [104, 105]


async def test_generation_ends_before_a_stop_string(client: aiohttp.ClientSession, server: Server) -> None:
    body = {**HELLO, "max_tokens": 12}
    async with client.post(server.url + CHAT, json=body) as answer:
        text = (await answer.json())["choices"][0]["message"]["content"]
    stop = text[len(text) // 2 :][:3]
    async with client.post(server.url + CHAT, json={**body, "stop": stop, "stream": True}) as answer:
        choices = [event["choices"][0] for event in await _events(answer)]
    assert "".join(choice["delta"]["content"] for choice in choices) == text[: text.index(stop)]
    assert choices[-1]["finish_reason"] == "stop"


async def test_the_request_id_comes_back_and_names_the_answer(client: aiohttp.ClientSession, server: Server) -> None:
    async with client.post(server.url + CHAT, json=HELLO, headers={"x-request-id": "mine-7"}) as answer:
        assert answer.headers["x-request-id"] == "mine-7"
        assert (await answer.json())["id"] == "chatcmpl-mine-7"


HALF = b'{"messages": [{"role": "user", "content": "\\ud800"}]}'
REFUSED = [
    ("not JSON", "POST", CHAT, b"{", 400, None),
    ("a number", "POST", CHAT, b"1", 400, None),
    ("too long a prompt", "POST", COMPLETION, json.dumps({"prompt": "x" * 600}).encode(), 400, "max_tokens"),
    ("no room for the output", "POST", COMPLETION, b'{"prompt": "xx", "max_tokens": 511}', 400, "max_tokens"),
    ("half a character", "POST", COMPLETION, b'{"prompt": "a\\ud800b"}', 400, "prompt"),
    ("half a character in a chat", "POST", CHAT, HALF, 400, "messages"),
    ("a token nobody knows", "POST", COMPLETION, b'{"prompt": [99999999]}', 400, "prompt"),
    ("another model", "POST", CHAT, json.dumps({**HELLO, "model": "gpt"}).encode(), 404, "model"),
    ("a wrong method", "GET", CHAT, None, 405, None),
    ("a wrong path", "POST", "/v1/embeddings", b"{}", 404, None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "param"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED]
)
async def test_a_refusal_is_json_in_openai_s_words_and_the_connection_lives_on(
    server: Server, method: str, path: str, body: bytes | None, status: int, param: str | None
) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as client:
        async with client.request(method, server.url + path, data=body, headers={"x-request-id": "r"}) as answer:
            error = (await answer.json())["error"]
            assert (answer.status, error["param"], error["code"]) == (status, param, status)
            assert answer.headers["x-request-id"] == "r" and error["message"]
        async with client.get(server.url + "/health") as answer:
            assert answer.status == 200


async def test_models_and_metrics_say_what_is_served(client: aiohttp.ClientSession, server: Server) -> None:
    async with client.get(server.url + "/v1/models") as answer:
        (model,) = (await answer.json())["data"]
    assert model["id"] == "sim" and model["max_model_len"] == 512
    before = await server.metric("generation_tokens_total")
    async with client.post(server.url + CHAT, json=HELLO) as answer:
        assert answer.status == 200
    assert await server.metric("generation_tokens_total") == before + 6
    async with client.get(server.url + "/metrics") as answer:
        assert answer.content_type == "text/plain"
        kinds = [line.split()[2:] for line in (await answer.text()).splitlines() if line.startswith("# TYPE")]
    assert ["gapmeter_requests_finished_total", "counter"] in kinds and len(kinds) >= 10


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_frees_its_place_in_the_engine(server: Server, stream: bool) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 500, "stream": stream}).encode()
    head = f"POST {COMPLETION} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    before = await server.metric("generation_tokens_total")
    port = int(server.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head + body)
    await server.until("requests_running", lambda running: running > 0)
    writer.close()
    await server.until("requests_running", lambda running: not running)
    assert await server.metric("generation_tokens_total") < before + 500, "it was served to its end"
    del reader


async def test_a_body_in_many_packets_is_one_request(server: Server) -> None:
    body = json.dumps({**HELLO, "messages": [{"role": "user", "content": "grüße 🙂"}]}, ensure_ascii=False).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
    for byte in head + body:
        writer.write(bytes([byte]))
        await asyncio.sleep(0)
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 6


async def _raw(server: Server, *parts: bytes) -> bytes:
    """Send the parts, each after the server's answer to the one before, and read until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
    answer = b""
    for number, part in enumerate(parts):
        if number:
            answer += await reader.readuntil(b"\r\n\r\n")
        writer.write(part)
    answer += await reader.read()
    writer.close()
    return answer


async def test_a_client_that_asks_before_it_sends_the_body_is_told_to_go_on(server: Server) -> None:
    body = json.dumps(HELLO).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nExpect: 100-continue\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode()
    answer = await _raw(server, head, body)
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")


async def test_a_request_id_of_any_bytes_is_served(server: Server) -> None:
    body = json.dumps(HELLO).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n".encode()
    answer = await _raw(server, head + b"x-request-id: \xff\xfe\xc3\xbc\r\n\r\n" + body)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n") and "x-request-id: ??ü\r\n".encode() in answer


async def test_requests_beyond_the_bound_are_told_to_come_back_later(tmp_path: Path) -> None:
    with simulated(tmp_path, max_batch=1, max_queue=1) as server:
        async with session() as client:

            async def post() -> tuple[int, str | None]:
                async with client.post(server.url + CHAT, json={**HELLO, "max_tokens": 60}) as answer:
                    await answer.read()
                    return answer.status, answer.headers.get("Retry-After")

            answers = await asyncio.gather(*(post() for _ in range(5)))
            assert sorted(answers, key=str) == [(200, None)] * 2 + [(503, "1")] * 3
            assert await post() == (200, None)


async def test_every_request_is_recorded_with_how_it_ended(tmp_path: Path) -> None:
    with simulated(tmp_path) as server:
        async with session() as client:
            for name, body in (("good", HELLO), ("bad", {}), ("long", {**HELLO, "max_tokens": 99999})):
                async with client.post(server.url + CHAT, json=body, headers={"x-request-id": name}) as answer:
                    await answer.read()
            async with client.post(
                server.url + CHAT, json={**HELLO, "stream": True, "max_tokens": 400}, headers={"x-request-id": "gone"}
            ) as answer:
                await answer.content.readany()
        await server.until("requests_running", lambda running: not running)
    file = server.records("api")
    assert file.complete
    outcomes = {file.client_ids[int(row["ref"])]: Outcome(int(row["code"])) for row in file.counts}
    assert outcomes == {
        "good": Outcome.OK, "bad": Outcome.HTTP_4XX, "long": Outcome.HTTP_4XX, "gone": Outcome.ABORTED,
    }  # fmt: skip
    ingress = file.spans[file.spans["code"] == Span.INGRESS]
    assert sorted(file.client_ids[int(ref)] for ref in ingress["ref"]) == sorted(outcomes)


async def test_of_a_prompt_that_a_pool_tokenizes_it_is_told_when_the_event_loop_went_on(tmp_path: Path) -> None:
    with simulated(tmp_path, max_model_len=65_536) as server:
        async with aiohttp.ClientSession() as client:
            for words in (1, 4000):
                messages = [{"role": "user", "content": "word " * words}]
                async with client.post(server.url + CHAT, json={**HELLO, "messages": messages}) as answer:
                    assert answer.status == 200
                    await answer.read()
    spans = server.records("api").spans
    inline, pooled = spans[spans["code"] == Span.TOKENIZE]
    assert (inline["queued_ns"] == inline["start_ns"], int(inline["n"])) == (True, 0)
    assert pooled["queued_ns"] < pooled["start_ns"] <= pooled["end_ns"] < pooled["end_ns"] + pooled["n"]
    end_ns = spans["end_ns"][(spans["code"] == Span.INGRESS) & (spans["ref"] == pooled["ref"])]
    assert pooled["end_ns"] + pooled["n"] <= end_ns


async def test_on_one_connection_each_request_begins_after_the_answer_before(tmp_path: Path) -> None:
    with simulated(tmp_path) as server:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as client:
            for number in range(6):
                body = {**HELLO, "stream": number % 2 == 0}
                async with client.post(server.url + CHAT, json=body, headers={"x-request-id": str(number)}) as answer:
                    await answer.read()
                await asyncio.sleep(0.05)
    file = server.records("api")
    rows = {code: file.spans[file.spans["code"] == code] for code in (Span.INGRESS, Span.EGRESS)}
    for ref in range(2, 7):
        begun = int(rows[Span.INGRESS]["start_ns"][rows[Span.INGRESS]["ref"] == ref][0])
        before = int(rows[Span.EGRESS]["end_ns"][rows[Span.EGRESS]["ref"] == ref - 1].max())
        assert begun - before > 40_000_000


async def test_the_wait_for_the_rest_of_a_body_is_the_networks(tmp_path: Path) -> None:
    with simulated(tmp_path) as server:
        body = json.dumps(HELLO).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nx-request-id: r\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as raw:
            raw.sendall(head + body[:9])
            await asyncio.sleep(0.3)
            last_ns = time.monotonic_ns()
            raw.sendall(body[9:])
            assert raw.recv(65536).startswith(b"HTTP/1.1 200")
    file = server.records("api")
    (ingress,), (http,) = (file.spans[file.spans["code"] == code] for code in (Span.INGRESS, Span.HTTP))
    assert last_ns <= ingress["start_ns"] == http["start_ns"] <= http["end_ns"] <= ingress["end_ns"]


async def test_chunks_are_counted_in_tokens_and_written_one_after_the_other(tmp_path: Path) -> None:
    with simulated(tmp_path) as server:
        port = int(server.url.rpartition(":")[2])
        body = json.dumps({**HELLO, "stream": True, "max_tokens": 40}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nx-request-id: r\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.sendall(head + body)
            data = b""
            while b"[DONE]" not in data:
                data += raw.recv(65536)
    spans = server.records("api").spans
    chunks = spans[(spans["code"] == Span.EGRESS) & (spans["n"] > 0)]
    assert list(chunks["n"]) == list(range(1, 41))
    assert (chunks["end_ns"] >= chunks["start_ns"]).all() and (chunks["start_ns"] >= chunks["queued_ns"]).all()
    assert (chunks["queued_ns"][1:] >= chunks["end_ns"][:-1]).all()


def test_a_port_that_is_taken_ends_the_server_with_a_sentence(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
        taken.listen()
        with (
            pytest.raises(ServerFailed, match=r"cannot listen on .*Address already in use"),
            simulated(tmp_path, port=taken.getsockname()[1]),
        ):
            pass
