"""What a stranger may do to whoever asks it for something else than tokens."""

from __future__ import annotations

import contextlib
import http.client
import json
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gapmeter import errors
from gapmeter.errors import UserError
from gapmeter.scenarios.model import Scenario
from gapmeter.scenarios.read import load_scenario
from gapmeter.servers.http_get import MOST_BYTES, HttpGet, NoAnswer
from gapmeter.servers.telemetry import Absent, ReadFailed
from gapmeter.servers.telemetry.sources import EngineMetrics
from gapmeter.study.target import choose_model, served_models
from tests.kit.servers import Certificate, answering

KEY = "sk-secret-0123456789"


def attached(url: str) -> Scenario:
    return load_scenario("smoke", [f"server.url={url}", "server.engine=attach"])


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_nothing_is_followed_and_a_key_stays_with_its_host(status: int) -> None:
    elsewhere: list[bytes] = []
    with answering(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", heard=elsewhere) as other:
        head = f"HTTP/1.1 {status} Found\r\nLocation: {other}/v1/models\r\nContent-Length: 0\r\n\r\n".encode()
        with answering(head) as url:
            with pytest.raises(UserError, match=f"answered {status} to {other}/v1/models") as refused:
                served_models(attached(url), KEY)
            with pytest.raises(Absent, match=f"answered {status} to"):
                EngineMetrics(url, KEY).read()
    assert refused.value.exit_code == errors.UNREACHABLE
    assert not elsewhere


HEAD = b"HTTP/1.1 200 OK\r\n\r\n"
TOO_MUCH = {
    "a body without end": ((HEAD, b"x" * 65536), 0.0, "longer than 1 MB"),
    "a body one byte at a time": ((HEAD, b" "), 0.05, "timed out"),
    "a head one byte at a time": ((b"HTTP/1.1 200 OK\r\nX: ", b"x"), 0.05, "timed out"),
    "heads without end": ((b"HTTP/1.1 200 OK\r\n", b"X: x\r\n"), 0.0, "more than 100 headers"),
    "100 Continue without end": ((b"HTTP/1.1 100 Continue\r\n\r\n",), 0.0, "timed out"),
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_an_answer_has_a_size_and_a_time_in_all(name: str) -> None:
    pieces, every_s, why = TOO_MUCH[name]
    with answering(*pieces, every_s=every_s, endless=True) as url:
        began = time.monotonic()
        with pytest.raises(NoAnswer, match=why) as failed:
            HttpGet(url, seconds=1.0).get("/v1/models")
        assert failed.value.__cause__ is not failed.value
        with pytest.raises(ReadFailed):
            EngineMetrics(url).read()
    assert time.monotonic() - began < 10  # a byte resets no clock


def test_the_largest_answer_is_read_whole() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % MOST_BYTES
    with answering(head, b"x" * MOST_BYTES) as url, contextlib.closing(HttpGet(url)) as server:
        assert len(server.get("/").body) == MOST_BYTES


def test_a_server_that_lists_no_models_is_measured_if_its_model_is_named() -> None:
    with answering(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n") as url:
        with pytest.raises(UserError, match="name its model with --model"):
            served_models(attached(url), None)
        named = load_scenario("smoke", ["server.engine=attach", f"server.url={url}", "server.model=m"])
        assert served_models(named, None) == (url, ["m"])


@settings(max_examples=30, deadline=None)
@example("m" * 200_000)
@given(st.text(min_size=1, max_size=20) | st.text(st.characters(categories=["Cs", "Cc"]), min_size=1, max_size=5))
def test_models_with_names_that_no_terminal_shows_are_refused_and_others_taken(name: str) -> None:
    body = json.dumps({"data": [{"id": name}]}).encode()
    name = json.loads(body)["data"][0]["id"]  # in JSON two halves of a character are one
    with answering(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body), body) as url:
        if name.isprintable() and len(name) <= 500:
            assert served_models(attached(url), None)[1] == [name]
        else:
            with pytest.raises(UserError) as refused:
                served_models(attached(url), None)
            assert str(refused.value).isascii() and len(str(refused.value)) < 300


def test_sentences_stay_sentences_however_much_a_server_lists() -> None:
    with pytest.raises(UserError, match="and 4,992 more, not m") as refused:
        choose_model("m", [f"model-{at}" for at in range(5000)], "http://127.0.0.1:1", asked_for=True)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/ü", "http://127.0.0.1:99999", "http://127.0.0.1:1/a b",
                                 "http://" + "ü" * 99, "http://127.0.0.1:1", "http://no-such-host.invalid",
                                 "http://[::1]:1/\x7f"])  # fmt: skip
def test_whatever_the_address_the_answer_is_a_sentence(url: str) -> None:
    with pytest.raises(NoAnswer, match=r"^[^\n]+$"):
        HttpGet(url).get("/v1/models")


def test_a_certificate_that_is_not_trusted_is_said_with_its_remedy(
    certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = b'HTTP/1.1 200 OK\r\nContent-Length: 23\r\n\r\n{"data": [{"id": "m"}]}'
    with answering(body, tls=certificate.serving) as url:
        monkeypatch.delenv("SSL_CERT_FILE", raising=False)
        with pytest.raises(UserError, match=r"certificate is not trusted: self.signed.*SSL_CERT_FILE"):
            served_models(attached(url), None)
        monkeypatch.setenv("SSL_CERT_FILE", f"{certificate.file}.mistyped")
        with pytest.raises(UserError, match=r"SSL_CERT_FILE names .*cert.pem.mistyped, which is not a file"):
            served_models(attached(url), None)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate.file))
        assert served_models(attached(url), None)[1] == ["m"]


def test_http_to_a_port_that_speaks_tls_is_answered_with_https(certificate: Certificate) -> None:
    with (
        answering(b"", tls=certificate.serving) as url,
        pytest.raises(UserError, match=r"no server answers at .*; that port may speak https: write https://"),
    ):
        served_models(attached(url.replace("https", "http")), None)


def test_a_certificate_of_another_name_is_not_mended_by_an_authority(
    certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate.file))
    with (
        answering(b"", tls=certificate.serving) as url,
        pytest.raises(UserError, match=r"not trusted: .*give the name that its certificate is for"),
    ):
        served_models(attached(url.replace("localhost", "127.0.0.1")), None)


def test_an_expired_certificate_and_a_proxy_that_is_not_used_have_remedies_of_their_own(
    expired_certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(expired_certificate.file))
    expired = pytest.raises(UserError, match=r"not trusted: certificate has expired; have it renewed there")
    with answering(b"", tls=expired_certificate.serving) as url, expired:
        served_models(attached(url), None)
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:1")
    with pytest.raises(UserError, match=r"the proxy in https_proxy is not used: write an address"):
        served_models(attached("https://127.0.0.1:2"), None)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with pytest.raises(UserError, match=r"is it running, and is the address right"):
        served_models(attached("https://127.0.0.1:2"), None)


def test_what_the_network_takes_to_bring_a_page_of_metrics_is_none_of_the_servers_time() -> None:
    page = b"vllm:num_requests_running 1.0\n"
    head = f"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {len(page)}\r\n\r\n".encode()
    with answering(head, page[:5], page[5:], every_s=0.3) as url:
        (row,) = EngineMetrics(url).read()
    assert row["running"] == 1.0
    assert 0 <= row["took_ns"] < 300_000_000


def test_an_ipv6_address_without_a_port_is_asked_at_the_default_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n") as url:
        monkeypatch.setattr(http.client.HTTPConnection, "default_port", int(url.rpartition(":")[2]))
        with contextlib.closing(HttpGet("http://[::ffff:127.0.0.1]")) as server:
            assert server.get("/v1/models").status == 200
