"""Where requests go, and the bytes that every request starts with."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

from gapmeter.records.request import traceparent


@dataclass(frozen=True, slots=True)
class Address:
    """One server. ``prefix`` is put before every path: the address's own path, less a final ``/v1``, which paths have.

    ``tls`` checks certificates against the system's authorities, or those that SSL_CERT_FILE names.
    """

    host: str
    port: int
    tls: ssl.SSLContext | None
    prefix: str
    headers: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, url: str, headers: tuple[tuple[str, str], ...] = ()) -> Address:
        """Raises ValueError for what is not an http or https address, or for a header that would break the request."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not an address like http://127.0.0.1:8000")
        for name, value in headers:
            if not name.isascii() or not value.isprintable() or not value.isascii() or set(name) & set(" :\r\n\t"):
                raise ValueError(f"the header {name!r} cannot be sent: it has characters that HTTP does not allow")
        secure = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        tls = ssl.create_default_context() if secure else None
        return cls(parts.hostname, parts.port or (443 if secure else 80), tls, prefix, headers)

    def request(self, path: str, body: bytes, request_id: str, *, traced: bool = False) -> bytes:
        """A whole POST request, ready for one write; ``traced``: with a traceparent header that its id decides."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [
            f"POST {self.prefix}{path} HTTP/1.1",
            f"Host: {host}:{self.port}",
            "User-Agent: gapmeter",
            "Accept: text/event-stream, application/json",
            "Accept-Encoding: identity",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            f"x-request-id: {request_id}",
            *((f"traceparent: {traceparent(request_id)}",) if traced else ()),
            *(f"{name}: {value}" for name, value in self.headers),
        ]
        return "\r\n".join([*lines, "", ""]).encode() + body


def authorization(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """The header that carries an API key; none when there is no key."""
    return (("Authorization", f"Bearer {api_key}"),) if api_key else ()
