"""Fetches a page from hosts that are allowed, and from no private address.

One deadline holds over resolving, connecting, redirects and reading; what is read is bounded before and after it is
unpacked.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from urllib.parse import urljoin, urlsplit

import httpx
from langchain_core.tools import BaseTool, ToolException, tool

from lookahead_agent.isolation.deadline import DeadlineTransport

_MOST_REDIRECTS = 5
Resolve = Callable[[str, int], list[str]]
"""Addresses of a host and port."""


@dataclass(frozen=True)
class HttpLimits:
    """What a request may cost.

    Attributes:
        seconds: Time for all of it: names, connections, redirects and pages.
        size: Bytes that are read of a page, and that it may come to when it is unpacked.
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


def _resolved_until(end: float, resolving: Resolve, host: str, port: int) -> list[str]:
    """Addresses of a host, if they are found in time.

    The system's resolver cannot be interrupted: it is left behind in a thread, which ends when that gives up.
    """
    found: list[str] = []
    problem: list[Exception] = []

    def look() -> None:
        try:
            found.extend(resolving(host, port))
        except Exception as error:
            problem.append(error)

    thread = threading.Thread(target=look, name="http_get resolves a name", daemon=True)
    thread.start()
    thread.join(max(0.0, end - time.monotonic()))
    if thread.is_alive():
        raise ValueError(f"the host {host!r} was not found in time")
    if problem:
        raise problem[0]
    return found


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
    end = time.monotonic() + limits.seconds
    transport = transport or DeadlineTransport(end)
    # The transport keeps the time: httpx's own time-outs are of single reads.
    with httpx.Client(timeout=None, follow_redirects=False, transport=transport, trust_env=False) as client:
        for _ in range(_MOST_REDIRECTS + 1):
            request = _checked_request(
                client, url, allowed, lambda host, port: _resolved_until(end, resolving, host, port)
            )
            try:
                response = client.send(request, stream=True)
                try:
                    if response.is_redirect:
                        url = urljoin(url, response.headers["Location"])
                        continue
                    if response.is_error:
                        raise ValueError(f"{url} answered {response.status_code}")
                    return _text(response, limits, end)
                finally:
                    response.close()
            except httpx.HTTPError as error:
                raise ValueError(f"{url} cannot be reached: {error or type(error).__name__}") from error
            except httpx.InvalidURL as error:
                raise ValueError(f"{url!r} is not an address: {error}") from error
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
    headers["Accept-Encoding"] = "gzip, deflate"
    return client.build_request("GET", target, headers=headers, extensions={"sni_hostname": host})


def _text(response: httpx.Response, limits: HttpLimits, end: float) -> str:
    kind = response.headers.get("Content-Type", "text/plain").partition(";")[0].strip().lower()
    if not kind.startswith("text/") and kind not in ("application/json", "application/xml", "application/xhtml+xml"):
        raise ValueError(f"the page is of type {kind}, which is no text")
    data = bytearray()
    for piece in _unpacked(response, limits.size):
        data += piece
        if len(data) > limits.size:
            raise ValueError(f"the page is longer than {limits.size} bytes")
        if time.monotonic() > end:
            raise ValueError(f"the page took more than {limits.seconds:g} s")
    text = data.decode(_encoding(response), errors="replace")
    if kind in ("text/html", "application/xhtml+xml"):
        text = _visible(text)
    return text if len(text) <= limits.text else text[: limits.text] + "\n(the rest is left out)"


def _encoding(response: httpx.Response) -> str:
    try:
        "".encode(response.encoding or "utf-8")
    except (LookupError, ValueError):
        return "utf-8"
    return response.encoding or "utf-8"


def _unpacked(response: httpx.Response, most: int) -> Iterator[bytes]:
    """The page's bytes, of which no piece is much longer than what may be read."""
    packed = response.headers.get("Content-Encoding", "identity").strip().lower()
    if packed in ("identity", ""):
        yield from response.iter_raw()
        return
    if packed not in ("gzip", "x-gzip", "deflate"):
        raise ValueError(f"the page is packed as {packed}, which was not asked for")
    # 32: gzip's or zlib's own beginning says which of the two it is.
    decoder = zlib.decompressobj(32 + zlib.MAX_WBITS)
    try:
        for piece in response.iter_raw():
            yield decoder.decompress(piece, most + 1)
            if decoder.unconsumed_tail:
                raise ValueError(f"the page is longer than {most} bytes")
        yield decoder.flush()
    except zlib.error as error:
        raise ValueError(f"the page cannot be unpacked: {error}") from error


_HIDDEN = frozenset({"script", "style", "template", "noscript", "head", "iframe", "object", "svg"})
_BREAKS = frozenset({
    "p", "br", "div", "li", "tr", "h1", "h2", "h3", "h4", "h5", "h6", "section", "article", "pre",
    "blockquote", "dt", "dd",
})  # fmt: skip


def _visible(html: str) -> str:
    """What a reader sees of a page, a line for each block."""
    from lxml import etree

    # libxml2 goes 256 elements deep and leaves the rest out, so that no page takes long.
    parser = etree.HTMLParser(encoding="utf-8", no_network=True, remove_comments=True, remove_pis=True)
    tree = etree.fromstring(html.encode(), parser)
    if tree is None:
        return ""
    pieces: list[str] = []
    hidden = 0
    for event, element in etree.iterwalk(tree, events=("start", "end")):
        if element.tag in _BREAKS:
            pieces.append("\n")
        if event == "start":
            hidden += element.tag in _HIDDEN
        else:
            hidden -= element.tag in _HIDDEN
        said = element.text if event == "start" else element.tail
        if said and not hidden:
            pieces.append(said)
    lines = (" ".join(line.split()) for line in "".join(pieces).splitlines())
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
