"""Checks the head of a request before the application reads it.

Starlette's `TrustedHostMiddleware` would refuse IP addresses and requests without `Host`, and its error is not one of
OpenAI's protocol that says how to allow the name.
"""

import ipaddress
import re
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from lookahead_agent.server.errors import ErrorReplies, RefusedError

_HOST = re.compile(r"(?:\[(?P<ipv6>[0-9a-f:.]+)\]|(?P<name>[\w.-]+))(?::\d{0,5})?", re.ASCII | re.IGNORECASE)


class HeadCheck:
    """Middleware that refuses a request whose head a proxy could read in another way, and other servers' `Host`.

    Names are refused against DNS rebinding by web pages. A rebound page always sends its own name, so an IP address or
    a missing `Host` header is allowed.
    """

    def __init__(self, app: ASGIApp, allowed: Sequence[str], errors: ErrorReplies) -> None:
        self._app = app
        self._allowed = {name.lower().rstrip(".") for name in allowed}
        self._suffixes = tuple(name[1:] for name in self._allowed if name.startswith("*"))
        self._errors = errors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or respond with status 400."""
        error = self._problem(Headers(scope=scope), scope["http_version"]) if scope["type"] == "http" else None
        await (self._app if error is None else self._errors.response(error))(scope, receive, send)

    def _problem(self, headers: Headers, version: str) -> RefusedError | None:
        if "transfer-encoding" in headers and ("content-length" in headers or version == "1.0"):
            message = "the request has both Content-Length and Transfer-Encoding: send one of them"
            if version == "1.0":
                message = "the request has Transfer-Encoding, which HTTP/1.0 has not: send Content-Length"
            return RefusedError(400, message, headers={"Connection": "close"})
        host = headers.get("host")
        if host is None or self._is_allowed(host):
            return None
        message = f"the server is not called {host[:100]!r}: its owner can allow the name with --allowed-host"
        return RefusedError(400, message)

    def _is_allowed(self, host: str) -> bool:
        if (match := _HOST.fullmatch(host)) is None:
            return False
        try:
            if match["ipv6"] is not None:
                return bool(ipaddress.IPv6Address(match["ipv6"]))
            return bool(ipaddress.IPv4Address(match["name"]))
        except ValueError:
            name = (match["name"] or "").lower().rstrip(".")
            return match["name"] is not None and (name in self._allowed or name.endswith(self._suffixes))
