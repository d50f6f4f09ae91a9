"""Fetches a page from hosts that are allowed, and from no private address.

One deadline holds over resolving, connecting, redirects and reading; what is read is bounded before and after it is
unpacked. The address that was looked at is the one that is connected to, and proxies of the environment are not used.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import zlib
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import aclosing
from dataclasses import dataclass, replace

import httpx
import webencodings
from langchain_core.tools import BaseTool

from lookahead_agent.agents.tool_use import LONGEST_RESULT, cut, make_tool
from lookahead_agent.engines import background

_MOST_REDIRECTS = 5
_USUAL_PORTS = frozenset({80, 443})
# IPv6 addresses of hosts lie in this network. Addresses outside of it are local, or carry IPv4 addresses.
_IPV6_HOSTS = ipaddress.IPv6Network("2000::/3")
# These parts of it are for protocols (Teredo, ORCHID, AMT), for documentation, or carry IPv4 addresses (6to4).
_NO_IPV6_HOSTS = [ipaddress.IPv6Network(text) for text in ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")]
# Python's `is_global` lets these pass: protocols, AS112, AMT, and relays to 6to4.
_NO_IPV4_HOSTS = [
    ipaddress.IPv4Network(text)
    for text in ("192.0.0.0/24", "192.31.196.0/24", "192.52.193.0/24", "192.88.99.0/24", "192.175.48.0/24")
]
_TEXTS = frozenset({"application/json", "application/xml", "application/xhtml+xml"})
_CHARSET = re.compile(r""";\s*charset\s*=\s*["']?([\w.:-]{1,40})""", re.IGNORECASE)
Resolve = Callable[[str, int], list[str]]
"""Addresses of a host and port."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True)
class HttpLimits:
    """What a request may cost.

    Attributes:
        seconds: Time for all of it: names, connections, redirects and pages.
        size: Bytes that are read of a page, and that it may come to when it is unpacked.
        text: Characters of it that are returned, at most 50,000.
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


async def _resolved(resolving: Resolve, host: str, port: int) -> list[str]:
    """Addresses of a host.

    The system's resolver cannot be interrupted: it is left behind in a thread, which ends when that gives up.
    """
    try:
        found = await background.in_daemon_thread(lambda: resolving(host, port))
    except RuntimeError as error:
        raise ValueError(f"the host {host!r} cannot be looked up now: {error}") from error
    except Exception as error:
        raise ValueError(f"the host {host!r} cannot be looked up: {error}") from error
    if not found:
        raise ValueError(f"there is no host {host!r}")
    return found


def fetch(
    url: str,
    allowed: Collection[str],
    limits: HttpLimits | None = None,
    *,
    first_character: int = 1,
    resolving: Resolve = resolve,
    public: Callable[[Address], bool] | None = None,
    transport: httpx.AsyncBaseTransport | None = None,
) -> str:
    """The text of a page.

    Args:
        url: An http:// or https:// address.
        allowed: Hosts that may be asked at the ports 80 and 443; ".example.org" allows all below it, and
            "example.org:8080" that port alone.
        limits: What it may cost.
        first_character: From which character of the page's text, from 1.
        resolving: Finds the addresses of a host.
        public: Whether an address may be connected to; None: those that hosts of the public internet have.
        transport: Replaces the network, for tests.

    Raises:
        ValueError: The address is not allowed, or the page cannot be had; the message says which.
    """
    limits = limits or HttpLimits()
    names = [_Allowed.read(name) for name in allowed]
    try:
        page = background.run(_page(httpx.URL(url), names, limits, resolving, public or is_public, transport))
    except (httpx.InvalidURL, UnicodeError) as error:
        raise ValueError(f"this is no address: {error}") from error
    except OSError as error:
        raise ValueError(f"no page can be fetched now: {error.strerror or type(error).__name__}") from error
    text = _decoded(page.data, page.content_type)
    if page.kind in ("text/html", "application/xhtml+xml"):
        text = _visible(text)
    # Room for the line that says how to go on.
    most, left_out = min(limits.text, LONGEST_RESULT - 200), max(0, first_character - 1)
    text = cut(text[left_out:], f"fetch it again from first_character={left_out + most + 1}", most)
    return text or page.instead


@dataclass(frozen=True)
class _Page:
    data: bytes
    content_type: str
    instead: str  # of a text, where it has none

    @property
    def kind(self) -> str:
        return self.content_type.partition(";")[0].strip().lower()


async def _page(
    target: httpx.URL,
    allowed: Collection[_Allowed],
    limits: HttpLimits,
    resolving: Resolve,
    public: Callable[[Address], bool],
    transport: httpx.AsyncBaseTransport | None,
) -> _Page:
    late = ""
    try:
        # httpx's own time-outs are of single reads.
        async with (
            asyncio.timeout(limits.seconds),
            httpx.AsyncClient(timeout=None, transport=transport, trust_env=False) as client,
        ):
            for _ in range(_MOST_REDIRECTS + 1):
                host, port = _checked(target, allowed)
                late = f"the host {host!r} was not found in time"
                addresses = await _resolved(resolving, host, port)
                late = f"{_short(target)} cannot be reached: the time is over"
                checked = [_checked_address(host, address, public) for address in addresses]
                async with aclosing(await _answer(client, target, host, port, checked)) as response:
                    if response.has_redirect_location:
                        target = target.join(response.headers["Location"])
                        continue
                    if response.is_error:
                        raise ValueError(f"{_short(target)} answered {response.status_code}")
                    instead = f"({_short(target)} answered {response.status_code}, without text)"
                    return await _read(response, limits.size, "" if response.is_success else instead)
    except (TimeoutError, httpx.TimeoutException):
        raise ValueError(late) from None
    except (httpx.HTTPError, httpx.StreamError) as error:
        raise ValueError(f"{_short(target)} cannot be reached: {str(error)[:500] or type(error).__name__}") from error
    raise ValueError(f"more than {_MOST_REDIRECTS} redirects")


@dataclass(frozen=True)
class _Allowed:
    """Hosts that may be asked: one, or those below it, at one port or the usual ones."""

    host: str
    below: bool
    port: int | None

    @classmethod
    def read(cls, name: str) -> _Allowed:
        """Read "example.org", ".example.org", "example.org:8080", "::1" or "[::1]:8080".

        Raises:
            ValueError: It is none of these.
        """
        below = name.startswith(".")
        text = name.removeprefix(".").rstrip(".")
        text = f"[{text}]" if text.count(":") > 1 and not text.startswith("[") else text
        try:
            # A port that is http's own would be left out of an http:// address.
            url = httpx.URL(f"none://{text}")
        except (httpx.InvalidURL, UnicodeError) as error:
            raise ValueError(f"{name[:200]!r} is no host: {error}") from error
        wrong_port = url.port is not None and not 0 < url.port < 1 << 16
        if not url.host or url.path.strip("/") or url.query or url.fragment or url.userinfo or wrong_port:
            raise ValueError(f"{name[:200]!r} is no host: name it as example.org, .example.org or example.org:8080")
        return cls(_name(url), below, url.port)

    def allows(self, host: str, port: int) -> bool:
        """Whether a host may be asked at a port."""
        if port not in (_USUAL_PORTS if self.port is None else {self.port}):
            return False
        return host.endswith(f".{self.host}") if self.below else host == self.host

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return ("." if self.below else "") + host + ("" if self.port is None else f":{self.port}")


def _name(url: httpx.URL) -> str:
    """An address's host as it goes over the wire: small letters, IDNA, without a closing dot."""
    host = url.raw_host.decode("ascii").lower().removesuffix(".")
    return str(ipaddress.IPv6Address(host)) if ":" in host else host


def _short(url: httpx.URL) -> str:
    text = str(url)
    return text if len(text) <= 500 else f"{text[:500]}…"


def _checked(url: httpx.URL, allowed: Collection[_Allowed]) -> tuple[str, int]:
    """The host and port of an address that may be fetched."""
    host = _name(url)
    if url.scheme not in ("http", "https") or not host:
        raise ValueError(f"{_short(url)!r} is not an http:// or https:// address")
    if url.userinfo:
        raise ValueError("an address with a user name is not fetched")
    port = url.port if url.port is not None else 443 if url.scheme == "https" else 80
    if not 0 < port < 1 << 16:
        raise ValueError(f"{_short(url)!r} has a port that is none")
    if not any(name.allows(host, port) for name in allowed):
        names = ", ".join(sorted(map(str, allowed)))
        at = "" if port in _USUAL_PORTS else f" at the port {port}"
        raise ValueError(f"the host {host[:300]!r} is not allowed{at}; allowed are {names}")
    return host, port


def is_public(ip: Address) -> bool:
    """Whether hosts of the public internet have such addresses: none that is local, for protocols or documentation."""
    if isinstance(ip, ipaddress.IPv4Address):
        return ip.is_global and not ip.is_multicast and not any(ip in network for network in _NO_IPV4_HOSTS)
    return ip in _IPV6_HOSTS and ip.scope_id is None and not any(ip in network for network in _NO_IPV6_HOSTS)


def _checked_address(host: str, address: str, public: Callable[[Address], bool]) -> str:
    """The address, or the IPv4 address that it carries, if that is public.

    Raises:
        ValueError: It is not.
    """
    ip = ipaddress.ip_address(address)
    ip = getattr(ip, "ipv4_mapped", None) or ip
    if not public(ip):
        raise ValueError(f"the host {host!r} is at a private address, which is not fetched")
    return str(ip)


async def _answer(
    client: httpx.AsyncClient, url: httpx.URL, host: str, port: int, addresses: list[str]
) -> httpx.Response:
    """The answer of the first of a host's addresses that can be connected to."""
    headers = {
        "Host": url.netloc.decode("ascii"),
        "User-Agent": "lookahead-agent",
        "Accept": "text/*, application/json",
        "Accept-Encoding": "gzip, deflate",
    }
    for number, address in enumerate(addresses, 1):
        target = url.copy_with(host=address, port=port)
        request = client.build_request("GET", target, headers=headers, extensions={"sni_hostname": host})
        try:
            return await client.send(request, stream=True)
        except httpx.ConnectError:
            if number == len(addresses):
                raise
    raise AssertionError("a host has an address")


async def _read(response: httpx.Response, most: int, instead: str) -> _Page:
    page = _Page(b"", response.headers.get("Content-Type", "text/plain"), instead)
    if not page.kind.startswith("text/") and page.kind not in _TEXTS:
        raise ValueError(f"the page is of type {page.kind[:100]}, which is no text")
    data = bytearray()
    async for piece in _unpacked(response, most):
        data += piece
        if len(data) > most:
            raise ValueError(f"the page is longer than {most} bytes")
    return replace(page, data=bytes(data))


def _decoded(data: bytes, content_type: str) -> str:
    """The page as text, by its byte order mark or its charset; UTF-8 if that is none of the web's.

    Python has other codecs, which do not decode text (zlib, rot13) or take hours for a megabyte of it (punycode).
    """
    found = _CHARSET.search(content_type)
    encoding = webencodings.lookup(found[1]) if found else None
    text: str = webencodings.decode(data, encoding or webencodings.UTF8, errors="replace")[0]
    return text


async def _unpacked(response: httpx.Response, most: int) -> AsyncIterator[bytes]:
    """The page's bytes, of which no piece is much longer than what may be read."""
    packed = response.headers.get("Content-Encoding", "identity").strip().lower()
    if packed in ("identity", ""):
        async for piece in response.aiter_raw():
            yield piece
        return
    if packed not in ("gzip", "x-gzip", "deflate"):
        raise ValueError(f"the page is packed as {packed[:100]}, which was not asked for")
    # 32: gzip's or zlib's own beginning says which of the two it is.
    decoder = zlib.decompressobj(32 + zlib.MAX_WBITS)
    read = 0
    try:
        async for piece in response.aiter_raw():
            # Also what comes to nothing when it is unpacked.
            read += len(piece)
            if read > most:
                raise ValueError(f"the page is longer than {most} bytes")
            yield decoder.decompress(piece, most + 1)
            if decoder.unconsumed_tail:
                raise ValueError(f"the page is longer than {most} bytes")
            if decoder.eof:
                return  # what follows is none of the page's
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
    try:
        tree = etree.fromstring(html.encode(), parser)
    except etree.XMLSyntaxError:
        tree = None
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

    Args:
        allowed: See `fetch`.
        limits: What a request may cost.

    Raises:
        ValueError: No host, or a name that is none.
    """
    if not allowed:
        raise ValueError("name the hosts that may be asked")
    names = ", ".join(sorted(str(_Allowed.read(name)) for name in allowed))

    description = f"Fetch a web page as text, from a character of it on. Allowed hosts: {names}."

    @make_tool(description=description, rest="fetch it again from a later first_character", read_only=True)
    def http_get(url: str, first_character: int = 1) -> str:
        return fetch(url, allowed, limits, first_character=first_character) or "(there is no more text)"

    return http_get
