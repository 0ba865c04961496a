"""Asking a server for what is not load: which models it serves, its /metrics, whether it is ready."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import ssl
import sys
import threading
import time
import urllib.request
from dataclasses import dataclass
from urllib.parse import urlsplit

MOST_BYTES = 1 << 20
_MIN_RTT_AT = 148  # tcpi_min_rtt, in µs, in <linux/tcp.h>'s struct tcp_info
_OF_CERTIFICATES = {  # OpenSSL's words for what no authority mends
    "certificate has expired": "have it renewed there, or set the clock here",
    "certificate is not yet valid": "set the clock here, or there",
}
_MAY_BE_TLS = "that port may speak https: write https://"
_WRONG_NAME = (62, 64)  # OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH


class NoAnswer(OSError):
    """There is no whole answer; the text says why. ``hint``: what mends it, where that is known."""

    def __init__(self, why: str, hint: str = "") -> None:
        super().__init__(why)
        self.hint = hint


@dataclass(frozen=True, slots=True)
class Answer:
    """``location``: where it would send us, "" for nowhere. ``made_ns``: how long its head took, less a round trip."""

    status: int
    reason: str
    location: str
    body: bytes
    made_ns: int

    def __str__(self) -> str:
        """``404 Not Found``, or ``302 to http://…``."""
        return f"{self.status} to {self.location}" if self.location else f"{self.status} {self.reason}".rstrip()


class HttpGet:
    """GETs to one server, over one connection that is kept alive. Redirects are not followed, proxies not used.

    ``key`` is sent to it as a bearer token. An answer takes at most ``seconds`` from the lookup of the name to its last
    byte, and holds at most MOST_BYTES.
    """

    def __init__(self, url: str, key: str | None = None, seconds: float = 10.0) -> None:
        self._parts, self._seconds = urlsplit(url), seconds
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._connection: http.client.HTTPConnection | None = None

    def get(self, path: str) -> Answer:
        """The answer to a GET of ``path`` below the server's address. Raises NoAnswer."""
        done: list[Answer | Exception] = []
        # A thread, since only that bounds the sum of a lookup, connections, a handshake and any number of reads.
        thread = threading.Thread(target=lambda: done.append(self._outcome(path)), daemon=True)
        thread.start()
        thread.join(self._seconds)
        outcome = done[0] if done else TimeoutError()
        if isinstance(outcome, Answer):
            return outcome
        self._end(thread)
        if isinstance(outcome, NoAnswer):
            raise outcome
        raise self._no_answer(outcome) from outcome

    def close(self) -> None:
        """Let go of the connection."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _end(self, thread: threading.Thread) -> None:
        """End the thread, however fast it is being sent bytes: its next read finds no socket."""
        sock = self._connection.sock if self._connection is not None else None
        if thread.is_alive() and sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            number = sock.detach()
            thread.join(1.0)
            if number >= 0:
                os.close(number)
        self.close()

    def _outcome(self, path: str) -> Answer | Exception:
        kept = self._connection is not None
        try:
            try:
                return self._ask(path)
            except ConnectionError:
                if not kept:
                    raise
                self.close()  # it was kept alive no longer
                return self._ask(path)
        except Exception as error:  # noqa: BLE001 - translated, or raised again, by the thread that waits
            return error

    def _ask(self, path: str) -> Answer:
        if self._connection is None:
            make = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
            host = self._parts.hostname or "127.0.0.1"
            port = self._parts.port or make.default_port  # without one, the end of an IPv6 address would pass for it
            self._connection = make(host, port, timeout=self._seconds)
        connection = self._connection
        if connection.sock is None:
            connection.connect()
        asked_ns, round_trip_ns = time.monotonic_ns(), _round_trip_ns(connection.sock)
        connection.request("GET", f"{self._parts.path.rstrip('/')}{path}", headers=self._headers)
        with connection.getresponse() as answer:
            made_ns = max(time.monotonic_ns() - asked_ns - round_trip_ns, 0)
            body = answer.read(MOST_BYTES + 1)
            if len(body) > MOST_BYTES:
                hint = "is that the address of a server of models?"
                raise NoAnswer(f"the answer is longer than {MOST_BYTES >> 20} MB", hint)
            sent_on = answer.getheader("Location") or "nowhere" if 300 <= answer.status < 400 else ""
            return Answer(answer.status, answer.reason[:200], sent_on[:200], body, made_ns)

    def _no_answer(self, error: Exception) -> NoAnswer:
        match error:
            case TimeoutError():
                return NoAnswer(f"no whole answer in {self._seconds:g} s: timed out")
            case ssl.SSLCertVerificationError():
                hint = _OF_CERTIFICATES.get(error.verify_message) or _unknown_authority()
                if error.verify_code in _WRONG_NAME:
                    hint = "give the name that its certificate is for"
                return NoAnswer(f"its certificate is not trusted: {error.verify_message[:200]}", hint)
            case ssl.SSLError():
                return NoAnswer(f"TLS failed: {error.reason or error}", "does that port speak https?")
            case OSError() | http.client.HTTPException() if not isinstance(error, http.client.InvalidURL):
                text = getattr(error, "strerror", None) or str(error) or type(error).__name__
                is_not_http = isinstance(error, ConnectionResetError | http.client.BadStatusLine)
                is_not_http &= self._parts.scheme == "http"
                return NoAnswer(" ".join(text.split())[:200], self._proxy() or is_not_http * _MAY_BE_TLS)
            case http.client.InvalidURL() | ValueError():  # a host, a path or a key
                return NoAnswer("HTTP does not allow its characters", "write others as %XX")
        raise error

    def _proxy(self) -> str:
        """That none is used, where the environment names one for this address."""
        named = urllib.request.getproxies()
        if self._parts.scheme not in named or urllib.request.proxy_bypass(self._parts.netloc):
            return ""
        return f"the proxy in {self._parts.scheme}_proxy is not used: write an address that is reached without one"


def _unknown_authority() -> str:
    named = os.environ.get("SSL_CERT_FILE", "")
    if named and not os.path.isfile(named):  # which OpenSSL passes over without a word
        return f"SSL_CERT_FILE names {named}, which is not a file"
    return "name a file with its authority's certificate in SSL_CERT_FILE"


def _round_trip_ns(sock: socket.socket) -> int:
    """The shortest on this connection, its handshake's among them; 0 where nobody measures it."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT_AT + 4)
    except OSError:
        return 0
    return 1000 * int.from_bytes(info[_MIN_RTT_AT : _MIN_RTT_AT + 4], sys.byteorder)
