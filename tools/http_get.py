"""Fetches a page from hosts that are allowed, and from no private address."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Collection
from dataclasses import dataclass
from html.parser import HTMLParser
from urllib.parse import urljoin, urlsplit

import httpx
from langchain_core.tools import BaseTool, ToolException, tool

_MOST_REDIRECTS = 5
Resolve = Callable[[str, int], list[str]]
"""Addresses of a host and port."""


@dataclass(frozen=True)
class HttpLimits:
    """What a request may cost.

    Attributes:
        seconds: Time for all of it.
        size: Bytes that are read of a page.
        text: Characters of it that are returned.
    """

    seconds: float = 10.0
    size: int = 1 << 20
    text: int = 20_000


def resolve(host: str, port: int) -> list[str]:
    """Addresses of a host.

    Raises:
        ValueError: It has none.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ValueError(f"there is no host {host!r}") from error
    return [str(entry[4][0]) for entry in found]


def fetch(
    url: str,
    allowed: Collection[str],
    limits: HttpLimits | None = None,
    *,
    resolving: Resolve = resolve,
    transport: httpx.BaseTransport | None = None,
) -> str:
    """The text of a page.

    Args:
        url: An http:// or https:// address.
        allowed: Hosts that may be asked; ".example.org" allows all below it.
        limits: What it may cost.
        resolving: Finds the addresses of a host.
        transport: Replaces the network, for tests.

    Raises:
        ValueError: The address is not allowed, or the page cannot be had; the message says which.
    """
    limits = limits or HttpLimits()
    with httpx.Client(timeout=limits.seconds, follow_redirects=False, transport=transport, trust_env=False) as client:
        for _ in range(_MOST_REDIRECTS + 1):
            request = _checked_request(client, url, allowed, resolving)
            try:
                response = client.send(request, stream=True)
                try:
                    if response.is_redirect:
                        url = urljoin(url, response.headers["Location"])
                        continue
                    if response.is_error:
                        raise ValueError(f"{url} answered {response.status_code}")
                    return _text(response, limits)
                finally:
                    response.close()
            except httpx.HTTPError as error:
                raise ValueError(f"{url} cannot be reached: {error or type(error).__name__}") from error
    raise ValueError(f"more than {_MOST_REDIRECTS} redirects")


def _checked_request(client: httpx.Client, url: str, allowed: Collection[str], resolving: Resolve) -> httpx.Request:
    """A request to an address that was looked at: a name that resolves anew cannot lead elsewhere."""
    parts = urlsplit(url)
    host = (parts.hostname or "").rstrip(".").lower()
    if parts.scheme not in ("http", "https") or not host:
        raise ValueError(f"{url!r} is not an http:// or https:// address")
    if parts.username is not None or parts.password is not None:
        raise ValueError("an address with a user name is not fetched")
    if not any(host == name or (name.startswith(".") and host.endswith(name)) for name in allowed):
        raise ValueError(f"the host {host!r} is not allowed; allowed are {', '.join(sorted(allowed))}")
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        raise ValueError(f"{url!r} has a port that is none") from None
    addresses = resolving(host, port)
    for address in addresses:
        # An IPv4 address may be written as an IPv6 one.
        ip = ipaddress.ip_address(address.partition("%")[0])
        mapped = getattr(ip, "ipv4_mapped", None)
        if not (mapped or ip).is_global or (mapped or ip).is_multicast:
            raise ValueError(f"the host {host!r} is at a private address, which is not fetched")
    address = f"[{addresses[0]}]" if ":" in addresses[0] else addresses[0]
    target = httpx.URL(url).copy_with(host=address.strip("[]"), port=port)
    headers = {"Host": parts.netloc, "User-Agent": "lookahead-agent", "Accept": "text/*, application/json"}
    return client.build_request("GET", target, headers=headers, extensions={"sni_hostname": host})


def _text(response: httpx.Response, limits: HttpLimits) -> str:
    kind = response.headers.get("Content-Type", "text/plain").partition(";")[0].strip().lower()
    if not kind.startswith("text/") and kind not in ("application/json", "application/xml", "application/xhtml+xml"):
        raise ValueError(f"the page is of type {kind}, which is no text")
    data = b""
    for piece in response.iter_bytes():
        data += piece
        if len(data) > limits.size:
            raise ValueError(f"the page is longer than {limits.size} bytes")
    text = data.decode(response.encoding or "utf-8", errors="replace")
    if kind in ("text/html", "application/xhtml+xml"):
        text = _visible(text)
    return text if len(text) <= limits.text else text[: limits.text] + "\n(the rest is left out)"


class _Visible(HTMLParser):
    _HIDDEN = frozenset({"script", "style", "template", "noscript", "head"})
    _BREAKS = frozenset({"p", "br", "div", "li", "tr", "h1", "h2", "h3", "h4", "section", "article"})

    def __init__(self) -> None:
        super().__init__()
        self._hidden = 0
        self.pieces: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._hidden += tag in self._HIDDEN
        if tag in self._BREAKS:
            self.pieces.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self._hidden = max(0, self._hidden - (tag in self._HIDDEN))

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.pieces.append(data)


def _visible(html: str) -> str:
    parser = _Visible()
    parser.feed(html)
    lines = (" ".join(line.split()) for line in "".join(parser.pieces).splitlines())
    return "\n".join(line for line in lines if line)


def make_http_tool(allowed: Collection[str], limits: HttpLimits | None = None) -> BaseTool:
    """The tool `http_get` for some hosts.

    Raises:
        ValueError: No host.
    """
    if not allowed:
        raise ValueError("name the hosts that may be asked")

    @tool(description=f"Fetch a web page as text. Allowed hosts: {', '.join(sorted(allowed))}.")
    def http_get(url: str) -> str:
        try:
            return fetch(url, allowed, limits)
        except ValueError as error:
            raise ToolException(str(error)) from error

    http_get.handle_tool_error = True
    return http_get
