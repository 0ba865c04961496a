"""Who may look: only a browser on this machine that was given the address with its token.

Another site's page may make a browser send requests to 127.0.0.1, and a name that it controls may be made to mean
127.0.0.1 (DNS rebinding). Against the first stand the token and a SameSite cookie, against the second the Host header,
which then names the other site; what changes something also needs our own page as its origin. The cookie is Lax, since
a link in a report, whose sandbox makes it nobody's page, is a link from another site to a browser.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from aiohttp import web

HOST = "127.0.0.1"
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class LocalAuth:
    """The server's port, and the token that lets a browser in."""

    port: int
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))

    @property
    def address(self) -> str:
        """What to open in a browser."""
        return f"http://{HOST}:{self.port}/?token={self.token}"

    @property
    def cookie(self) -> str:
        """Cookies are shared by all ports of a host, so the port is in the name."""
        return f"gapmeter-{self.port}"

    def app(self) -> web.Application:
        """An application that lets nobody else in."""

        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            response: web.StreamResponse | None = self._refusal(request) or self._sign_in(request)
            if response is None:
                try:
                    response = await handler(request)
                except web.HTTPException as error:
                    error.headers.update(_HEADERS)
                    raise
            if not response.prepared:
                response.headers.update(_HEADERS)
            return response

        return web.Application(middlewares=[guard])

    def _refusal(self, request: web.Request) -> web.Response | None:
        hosts = {f"{name}:{self.port}" for name in (HOST, "localhost")}
        if request.host not in hosts:
            return web.Response(status=421, text="this server answers to 127.0.0.1 only\n")
        given = request.query.get("token") or request.cookies.get(self.cookie, "")
        if not hmac.compare_digest(given.encode(errors="replace"), self.token.encode()):
            return web.Response(status=403, text="open the address that gapmeter printed: it has a token\n")
        # Without referrers a form's origin is "null": then the browser's own word for where it comes from counts.
        own = request.headers.get("Origin") in {f"http://{host}" for host in hosts}
        own = own or request.headers.get("Sec-Fetch-Site") == "same-origin"
        if request.method not in ("GET", "HEAD") and not own:
            return web.Response(status=403, text="only this server's own pages may ask for that\n")
        return None

    def _sign_in(self, request: web.Request) -> web.Response | None:
        """The token goes into a cookie and out of the address, where histories and screenshots would keep it."""
        if "token" not in request.query or request.method != "GET":
            return None
        rest = {key: value for key, value in request.query.items() if key != "token"}
        response = web.Response(status=303, headers={"Location": str(request.rel_url.with_query(rest))})
        response.set_cookie(self.cookie, self.token, httponly=True, samesite="Lax", path="/")
        return response
