"""The null server keeps its schedule and logs what left when."""

from __future__ import annotations

import http.client
import json
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gapmeter.records import Outcome, RecordFile, Span, read_records
from gapmeter.records.stream import parse_answer
from gapmeter.servers.null.server import PreparedAnswer
from tests.kit.faults import Uncoded
from tests.kit.servers import faulty, null_process
from tests.kit.streams import wire

MS = 1_000_000


def ask(
    port: int, request_id: str = "a", path: str = "/v1/chat/completions", text: str | None = None, **body: Any
) -> tuple[int, bytes]:
    """One request on a connection of its own: status and entity."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    text = text or json.dumps({"model": "null", "messages": [], "stream": True} | body)
    connection.request("POST", path, text, {"x-request-id": request_id})
    answer = connection.getresponse()
    entity = answer.read()
    connection.close()
    return answer.status, entity


def tokens(entity: bytes) -> int:
    answer = parse_answer(wire([entity]))
    assert answer.error == ""
    return len(answer.token_ns)


def logged(folder: Path) -> list[RecordFile]:
    return [read_records(path) for path in sorted(folder.glob("*.gap"))]


def test_answers_beyond_its_places_wait_their_turn(tmp_path: Path) -> None:
    timing = ("--first-ms", "20", "--gap-ms", "10", "--places", "2", "--log", str(tmp_path))
    with null_process(*timing) as (process, port), ThreadPoolExecutor(5) as clients:
        answers = clients.map(lambda number: ask(port, f"r-{number}", max_tokens=3)[1], range(5))
        assert [tokens(entity) for entity in answers] == [3] * 5
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    (file,) = logged(tmp_path)
    writes = file.spans[file.spans["code"] == Span.EGRESS]
    first_ns = np.sort(writes[writes["n"] == 1]["start_ns"])
    begun_ns = file.spans[file.spans["code"] == Span.INGRESS]["start_ns"].min()
    assert len(first_ns) == 5
    for number, at_ns in enumerate(first_ns):
        assert at_ns >= begun_ns + 20 * MS + number // 2 * 40 * MS


def test_no_token_leaves_early_and_the_log_counts_them_all(tmp_path: Path) -> None:
    with null_process("--first-ms", "20", "--gap-ms", "3", "--log", str(tmp_path)) as (process, port):
        for number in range(1, 6):
            assert tokens(ask(port, f"r-{number}", max_tokens=number)[1]) == number
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    (file,) = logged(tmp_path)
    assert file.complete
    assert sorted(file.client_ids.values()) == [f"r-{number}" for number in range(1, 6)]
    for ref, name in file.client_ids.items():
        own = file.spans[file.spans["ref"] == ref]
        (received,) = own[own["code"] == Span.INGRESS]["start_ns"]
        writes = own[own["code"] == Span.EGRESS]
        assert writes["n"].max() == int(name[2:])
        assert (np.diff(writes["n"].astype(int)) > 0).all()
        due = received + 20 * MS + (writes["n"].astype(np.int64) - 1) * 3 * MS
        assert (writes["start_ns"] >= due).all()
        assert (writes["end_ns"] >= writes["start_ns"]).all()
    assert {int(row["output"]) for row in file.counts} == {1, 2, 3, 4, 5}
    assert {int(code) for code in file.counts["code"]} == {Outcome.OK}


def test_with_no_gap_a_whole_answer_is_one_write(tmp_path: Path) -> None:
    with null_process("--first-ms", "1", "--gap-ms", "0", "--log", str(tmp_path)) as (process, port):
        assert tokens(ask(port, max_tokens=500)[1]) == 500
        process.terminate()
        process.wait(10)
    (file,) = logged(tmp_path)
    assert file.spans[file.spans["code"] == Span.EGRESS]["n"].tolist() == [500]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [True, False])
def test_chats_and_completions_streamed_or_not_have_the_tokens_asked(path: str, stream: bool) -> None:
    with null_process("--first-ms", "1", "--gap-ms", "0") as (_, port):
        status, entity = ask(port, path=path, stream=stream, max_tokens=7)
    assert (status, tokens(entity)) == (200, 7)
    assert b'"prompt_tokens":1,' in entity.replace(b" ", b"")


def test_an_answer_is_never_longer_than_allowed() -> None:
    with null_process("--first-ms", "1", "--gap-ms", "0", "--most-tokens", "5") as (_, port):
        assert tokens(ask(port, max_tokens=1000)[1]) == 5


def test_a_client_that_goes_away_ends_its_stream(tmp_path: Path) -> None:
    body = json.dumps({"messages": [], "stream": True, "max_tokens": 4000}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nx-request-id: gone\r\nContent-Length: %d\r\n\r\n" % len(body)
    with null_process("--first-ms", "1", "--gap-ms", "5", "--log", str(tmp_path)) as (process, port):
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.sendall(head + body)
            assert sock.recv(1000)
        assert tokens(ask(port, "next", max_tokens=20)[1]) == 20
        process.terminate()
        process.wait(10)
    (file,) = logged(tmp_path)
    ended = {file.client_ids[int(row["ref"])]: Outcome(int(row["code"])) for row in file.counts}
    assert ended == {"gone": Outcome.ABORTED, "next": Outcome.OK}


@pytest.mark.parametrize(("text", "status"), [("not JSON", 400), ("{}", 200)])
def test_requests_are_answered_by_what_they_say(text: str, status: int) -> None:
    with null_process("--first-ms", "1", "--gap-ms", "0") as (_, port):
        assert ask(port, path="/v1/completions", text=text)[0] == status


def test_what_is_not_http_is_answered_with_400_and_closed() -> None:
    with null_process() as (_, port), socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(b"\x16\x03\x01\x02\x00 this is no request \r\n\r\n")
        assert b"400 Bad Request" in sock.makefile("rb").read()


@pytest.mark.parametrize("kind", ["chat", "completion"])
@pytest.mark.parametrize("script", [PreparedAnswer, Uncoded])
def test_a_script_is_the_same_bytes_however_it_is_sliced(kind: str, script: type[PreparedAnswer]) -> None:
    made = script(kind, 12)
    whole = bytes(made.tokens(0, 9))
    assert whole == b"".join(bytes(made.tokens(at, at + 1)) for at in range(9))
    if isinstance(made, Uncoded):
        assert made.length(10) == len(made.start + whole + made.end(10))


@pytest.mark.parametrize(("fault", "status"), [("unheard of", 400), ("status_500", 500)])
def test_a_fault_has_a_name_that_is_known(fault: str, status: int) -> None:
    with faulty([fault]) as url:
        assert ask(int(url.rpartition(":")[2]), "r-0", path="/v1/completions")[0] == status
