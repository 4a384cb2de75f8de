"""Who may read the page: browsers on this machine, and whoever has the token.

On a loopback address the page has no token. A web site could still read it through a browser on this machine, by giving
its own name this machine's address (DNS rebinding): requests that name another host than this one are therefore
rejected. On any other address every request needs the token: once as `?token=`, which the browser keeps as a cookie, or
as `Authorization: Bearer`, as Prometheus sends it.
"""

from __future__ import annotations

import hmac
import ipaddress
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEALTH = "/healthz"  # says only that the page answers, also without the token
COOKIE = "echelon_dash"  # and the port, because a browser sends the cookies of all ports of a host
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


def is_loopback(host: str) -> bool:
    """Return whether an address or a name means this machine only."""
    if host.rstrip(".").lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_of(header: str) -> str:
    """Return the name or address in a Host header, without its port and the brackets of an IPv6 address."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]


class Guard:
    """Lets read requests of readers through to the page, and adds its security headers to every answer."""

    def __init__(self, app: ASGIApp, token: str | None, port: int) -> None:
        self._app = app
        self._token = token
        self._cookie = f"{COOKIE}_{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        refused = self._refusal(Request(scope))
        await (refused or self._app)(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        """Return the answer to a request that must not reach the page, or None."""
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("This page can only be read.\n", 405, {"Allow": "GET, HEAD"})
        if self._token is None:
            host = host_of(request.headers.get("host", ""))
            if is_loopback(host):
                return None
            return PlainTextResponse(f"This page is not served as {host!r}; open it as http://127.0.0.1.\n", 421)
        if request.url.path == HEALTH:
            return None
        given = request.query_params.get("token")
        if given is not None and self._is_token(given):
            return self._with_cookie(request)
        if self._is_token(request.cookies.get(self._cookie)) or self._is_token(_bearer(request.headers)):
            return None
        return PlainTextResponse("Open the address with ?token= that the command printed.\n", 401)

    def _is_token(self, given: str | None) -> bool:
        expected = (self._token or "").encode()
        return given is not None and hmac.compare_digest(given.encode(), expected)

    def _with_cookie(self, request: Request) -> Response:
        """Return the same address without the token, which then stays out of the history and of what is copied."""
        rest = [(name, value) for name, value in parse_qsl(request.url.query) if name != "token"]
        path = "/" + request.url.path.lstrip("/")  # "//name" would be the address of another host
        answer = RedirectResponse(path + (f"?{urlencode(rest)}" if rest else ""), 303)
        # Lax, not Strict: browsers do not send a Strict cookie after a click on the address in another site, as a chat.
        answer.set_cookie(self._cookie, self._token or "", httponly=True, samesite="lax")
        return answer


def _bearer(headers: Headers) -> str | None:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None
