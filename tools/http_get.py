"""Fetch a page from allowed hosts, and from no private address.

One timeout covers name resolution, connecting, redirects and reading. Size limits hold before and after decompression.
The client connects to the address that was checked, and ignores the environment's proxies.
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
from httpx import codes
from langchain_core.tools import BaseTool

from lookahead_agent.agents.tool_use import MAX_RESULT_LENGTH, make_tool, truncate
from lookahead_agent.errors import extra_imports
from lookahead_agent.sandbox.documents import find_declared_encoding, read_parts
from lookahead_agent.system import background

with extra_imports("the tool http_get needs its extra: pip install 'lookahead-agent[tools]'"):
    import webencodings

_MAX_REDIRECTS = 5
# Timeout of the process that reads a fetched page.
_PARSE_SECONDS = 20.0
# Fetching has an event loop of its own: it delays no reply.
_loop = background.LoopThread("lookahead-agent-http")
_DEFAULT_PORTS = frozenset({80, 443})
# Global unicast IPv6 addresses. Addresses outside are local or embed IPv4 addresses.
_GLOBAL_IPV6 = ipaddress.IPv6Network("2000::/3")
# Its special-purpose blocks: protocols (Teredo, ORCHID, AMT), documentation, embedded IPv4 addresses (6to4).
_SPECIAL_IPV6 = [ipaddress.IPv6Network(text) for text in ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")]
# Special-purpose blocks that `is_global` accepts: protocols, AS112, AMT, and 6to4 relays.
_SPECIAL_IPV4 = [
    ipaddress.IPv4Network(text)
    for text in ("192.0.0.0/24", "192.31.196.0/24", "192.52.193.0/24", "192.88.99.0/24", "192.175.48.0/24")
]
# Types of text besides text/*, *+json, *+xml and *+yaml.
_TEXT_TYPES = re.compile(
    r"text/.*|[^/]+/[^/]*\+(?:json|xml|yaml)|application/(?:x-)?(?:json|json5|jsonlines|jsonl|ndjson|json-seq|xml|xml-dtd"
    r"|yaml|toml|javascript|ecmascript|typescript|sql|graphql|sh|httpd-php|latex|tex|csv|www-form-urlencoded)"
)
# Types that say little, such as application/octet-stream or one of a vendor: the page itself shows whether it is text.
_UNKNOWN_TYPES = re.compile(r"(?:application|message|model)/.*|")
_NO_TEXT = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f]|\A%PDF-")
_HTML_TYPES = ("text/html", "application/xhtml+xml")
# Characters of the text that an error of the server shows.
_REASON = 2_000
_CHARSET = re.compile(r""";\s*charset\s*=\s*["']?([\w.:-]{1,40})""", re.IGNORECASE)
Resolve = Callable[[str, int], list[str]]
"""Returns the addresses of a host and port."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True)
class HttpLimits:
    """Limits of one request.

    Attributes:
        seconds: Timeout of the whole request: name resolution, connections, redirects and pages.
        size: Maximum number of bytes of a page, both before and after decompression.
        text: Maximum number of characters that are returned, up to 50,000.
    """

    seconds: float = 10.0
    size: int = 1 << 20
    text: int = 20_000


def resolve(host: str, port: int) -> list[str]:
    """Look up the addresses of a host.

    Raises:
        ValueError: The host has no address.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ValueError(f"there is no host {host!r}") from error
    return [str(entry[4][0]) for entry in found]


async def _lookup(resolving: Resolve, host: str, port: int) -> list[str]:
    """Look up a host with `resolving`.

    The system's resolver cannot be interrupted. On a timeout its daemon thread runs on until the resolver gives up.
    """
    try:
        addresses = await background.in_daemon_thread(lambda: resolving(host, port))
    except RuntimeError as error:
        raise ValueError(f"the host {host!r} cannot be looked up now: {error}") from error
    except Exception as error:
        raise ValueError(f"the host {host!r} cannot be looked up: {error}") from error
    if not addresses:
        raise ValueError(f"there is no host {host!r}")
    return addresses


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
    """Fetch the text of a page.

    Args:
        url: An http:// or https:// address.
        allowed: Hosts that may be fetched at port 80 or 443. ".example.org" allows all its subdomains, and
            "example.org:8080" only that port.
        limits: Limits of the request.
        first_character: First character of the page's text, from 1.
        resolving: Looks up the addresses of a host.
        public: Whether an address may be connected to; None: `is_public`.
        transport: Replaces the network in tests.

    Raises:
        ValueError: The address is not allowed, or the page cannot be fetched. The message says which.
    """
    limits = limits or HttpLimits()
    patterns = [_AllowedHosts.parse(name) for name in allowed]
    try:
        page = _loop.run(_page(httpx.URL(url), patterns, limits, resolving, public or is_public, transport))
    except (httpx.InvalidURL, UnicodeError) as error:
        raise ValueError(f"this is not an address: {error}") from error
    except OSError as error:
        raise ValueError(f"no page can be fetched now: {error.strerror or type(error).__name__}") from error
    text = page.text()
    if page.status >= 400:
        phrase = codes.get_reason_phrase(page.status)
        reason = truncate(text, "the rest is left out", _REASON)
        raise ValueError(
            f"{_short(page.url)} answered {page.status} {phrase}".rstrip() + (f": {reason}" if reason else "")
        )
    # 200 characters are reserved for the truncation notice.
    most, skipped = min(limits.text, MAX_RESULT_LENGTH - 200), max(0, first_character - 1)
    if skipped and skipped >= len(text):
        raise ValueError(
            f"{_short(page.url)} has {len(text)} characters: there is none from first_character={first_character} on"
        )
    text = truncate(text[skipped:], f"fetch it again from first_character={skipped + most + 1}", most)
    return text or page.instead


@dataclass(frozen=True)
class _Page:
    url: httpx.URL
    status: int
    data: bytes
    content_type: str
    instead: str  # returned for a page without text

    @property
    def kind(self) -> str:
        return self.content_type.partition(";")[0].strip().lower()

    def text(self) -> str:
        text = _decode(self.data, self.content_type)
        return _visible(text, str(self.url)) if self.kind in _HTML_TYPES else text


async def _page(
    target: httpx.URL,
    allowed: Collection[_AllowedHosts],
    limits: HttpLimits,
    resolving: Resolve,
    public: Callable[[Address], bool],
    transport: httpx.AsyncBaseTransport | None,
) -> _Page:
    timeout_message = ""
    try:
        # httpx's timeouts cover single reads only.
        async with (
            asyncio.timeout(limits.seconds),
            httpx.AsyncClient(timeout=None, transport=transport, trust_env=False) as client,
        ):
            for _ in range(_MAX_REDIRECTS + 1):
                host, port = _check_host(target, allowed)
                timeout_message = f"the host {host!r} was not found in time"
                addresses = await _lookup(resolving, host, port)
                timeout_message = f"{_short(target)} cannot be reached: the time is over"
                checked = [_check_address(host, address, public) for address in addresses]
                async with aclosing(await _send(client, target, host, port, checked)) as response:
                    if response.has_redirect_location:
                        target = target.join(response.headers["Location"])
                        continue
                    instead = f"({_short(target)} answered {response.status_code}, without text)"
                    page = _Page(
                        target,
                        response.status_code,
                        b"",
                        response.headers.get("Content-Type", "text/plain"),
                        "" if response.is_success else instead,
                    )
                    try:
                        return replace(page, data=await _read_body(response, page.kind, limits.size))
                    except ValueError:
                        if not response.is_error:
                            raise
                        return replace(page, content_type="text/plain")  # its status is the error
    except (TimeoutError, httpx.TimeoutException):
        raise ValueError(timeout_message) from None
    except (httpx.HTTPError, httpx.StreamError) as error:
        raise ValueError(f"{_short(target)} cannot be reached: {str(error)[:500] or type(error).__name__}") from error
    raise ValueError(f"more than {_MAX_REDIRECTS} redirects")


@dataclass(frozen=True)
class _AllowedHosts:
    """A pattern of allowed hosts: one host or its subdomains, at one port or the default ports."""

    host: str
    subdomains: bool
    port: int | None

    @classmethod
    def parse(cls, name: str) -> _AllowedHosts:
        """Parse "example.org", ".example.org", "example.org:8080", "::1" or "[::1]:8080".

        Raises:
            ValueError: The name has none of these forms.
        """
        subdomains = name.startswith(".")
        text = name.removeprefix(".").rstrip(".")
        text = f"[{text}]" if text.count(":") > 1 and not text.startswith("[") else text
        try:
            # With the scheme http, httpx would drop port 80.
            url = httpx.URL(f"none://{text}")
        except (httpx.InvalidURL, UnicodeError) as error:
            raise ValueError(f"{name[:200]!r} is not a host: {error}") from error
        wrong_port = url.port is not None and not 0 < url.port < 1 << 16
        if not url.host or url.path.strip("/") or url.query or url.fragment or url.userinfo or wrong_port:
            raise ValueError(f"{name[:200]!r} is not a host: name it as example.org, .example.org or example.org:8080")
        return cls(_hostname(url), subdomains, url.port)

    def allows(self, host: str, port: int) -> bool:
        """Whether a host may be fetched at a port."""
        if port not in (_DEFAULT_PORTS if self.port is None else {self.port}):
            return False
        return host.endswith(f".{self.host}") if self.subdomains else host == self.host

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return ("." if self.subdomains else "") + host + ("" if self.port is None else f":{self.port}")


def _hostname(url: httpx.URL) -> str:
    """Return a URL's host in wire form: lower case, IDNA, without a trailing dot."""
    host = url.raw_host.decode("ascii").lower().removesuffix(".")
    return str(ipaddress.IPv6Address(host)) if ":" in host else host


def _short(url: httpx.URL) -> str:
    text = str(url)
    return text if len(text) <= 500 else f"{text[:500]}…"


def _check_host(url: httpx.URL, allowed: Collection[_AllowedHosts]) -> tuple[str, int]:
    """Return the host and port of a URL that may be fetched."""
    host = _hostname(url)
    if url.scheme not in ("http", "https") or not host:
        raise ValueError(f"{_short(url)!r} is not an http:// or https:// address")
    if url.userinfo:
        raise ValueError("an address with a user name is not fetched")
    port = url.port if url.port is not None else 443 if url.scheme == "https" else 80
    if not 0 < port < 1 << 16:
        raise ValueError(f"{_short(url)!r} has a port that is none")
    if not any(name.allows(host, port) for name in allowed):
        names = ", ".join(sorted(map(str, allowed)))
        at = "" if port in _DEFAULT_PORTS else f" at the port {port}"
        raise ValueError(f"the host {host[:300]!r} is not allowed{at}; allowed are {names}")
    return host, port


def is_public(ip: Address) -> bool:
    """Whether an address can be a public host's: not local, and not reserved for protocols or documentation."""
    if isinstance(ip, ipaddress.IPv4Address):
        return ip.is_global and not ip.is_multicast and not any(ip in network for network in _SPECIAL_IPV4)
    return ip in _GLOBAL_IPV6 and ip.scope_id is None and not any(ip in network for network in _SPECIAL_IPV6)


def _check_address(host: str, address: str, public: Callable[[Address], bool]) -> str:
    """Return the address, or the IPv4 address that it embeds.

    Raises:
        ValueError: The address is not public.
    """
    ip = ipaddress.ip_address(address)
    ip = getattr(ip, "ipv4_mapped", None) or ip
    if not public(ip):
        raise ValueError(f"the host {host!r} is at a private address, which is not fetched")
    return str(ip)


async def _send(
    client: httpx.AsyncClient, url: httpx.URL, host: str, port: int, addresses: list[str]
) -> httpx.Response:
    """Send the request to the first of a host's addresses that accepts a connection."""
    headers = {
        "Host": url.netloc.decode("ascii"),
        "User-Agent": "lookahead-agent",
        "Accept": "text/html, text/*, application/json, application/xml;q=0.9, */*;q=0.5",
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


async def _read_body(response: httpx.Response, kind: str, limit: int) -> bytes:
    is_named = _TEXT_TYPES.fullmatch(kind) is not None
    if not is_named and not _UNKNOWN_TYPES.fullmatch(kind):
        raise ValueError(f"the page is of type {kind[:100]}, which is not text")
    data = bytearray()
    try:
        async for piece in _decompress(response, limit):
            data += piece
            if len(data) > limit:
                raise ValueError(f"the page is longer than {limit} bytes")
    except ValueError:
        if not response.is_error or not data:
            raise
        # The beginning of an error's page says what went wrong.
    if not is_named and not _is_text(bytes(data[:limit])):
        raise ValueError(f"the page is of type {kind[:100]}, which is not text")
    return bytes(data[:limit])


def _is_text(data: bytes) -> bool:
    """Whether the data is UTF-8 without control characters, so that a type says too little of it."""
    try:
        return _NO_TEXT.search(data.decode("utf-8", errors="strict")) is None
    except UnicodeDecodeError:
        return False


def _decode(data: bytes, content_type: str) -> str:
    """Decode a page by its byte order mark, its charset or its own declaration, or else as UTF-8.

    Python's other codecs do not decode text (zlib, rot13) or take hours for a megabyte (punycode).
    """
    if found := _CHARSET.search(content_type):
        label = found[1]
    else:
        declared = find_declared_encoding(data)
        label = declared if declared is not None and b"\0" not in data[:4] else _detect_encoding(data)
        label = "utf-8" if label.lower().startswith("utf-16") else label  # it was read as ASCII
    encoding = webencodings.lookup(label)
    text: str = webencodings.decode(data, encoding or webencodings.UTF8, errors="replace")[0]
    return text


def _detect_encoding(data: bytes) -> str:
    """Return the encoding of a page that names none: UTF-8, or what browsers take other pages for."""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        # A page that is cut in the middle of a character is UTF-8 all the same.
        return "utf-8" if error.end == len(data) and error.start > 0 else "windows-1252"
    return "utf-8"


async def _decompress(response: httpx.Response, limit: int) -> AsyncIterator[bytes]:
    """Yield a page's bytes, in pieces that are not much longer than `limit`."""
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding in ("identity", ""):
        async for piece in response.aiter_raw():
            yield piece
        return
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise ValueError(f"the page is packed as {encoding[:100]}, which was not asked for")
    # 32: zlib detects by the header whether the data is gzip or zlib.
    decoder = zlib.decompressobj(32 + zlib.MAX_WBITS)
    read = 0
    try:
        async for piece in response.aiter_raw():
            # Count compressed bytes too: some decompress to nothing.
            read += len(piece)
            if read > limit:
                raise ValueError(f"the page is longer than {limit} bytes")
            yield decoder.decompress(piece, limit + 1)
            if decoder.unconsumed_tail:
                raise ValueError(f"the page is longer than {limit} bytes")
            if decoder.eof:
                return  # trailing data is not part of the page
        yield decoder.flush()
    except zlib.error as error:
        raise ValueError(f"the page cannot be unpacked: {error}") from error


def _visible(html: str, address: str = "", seconds: float = _PARSE_SECONDS) -> str:
    """Return what a browser shows of a page as Markdown, with absolute links; a process of its own reads the page."""
    parts, problem = read_parts(html.encode(errors="replace"), "html", seconds, address)
    if problem is not None:
        raise ValueError(f"the page cannot be read: {problem}")
    return "\n".join(part.text for part in parts)


def make_http_tool(allowed: Collection[str], limits: HttpLimits | None = None) -> BaseTool:
    """Create the tool `http_get` for some hosts.

    Args:
        allowed: See `fetch`.
        limits: Limits of each request.

    Raises:
        ValueError: `allowed` is empty or has an invalid name.
    """
    if not allowed:
        raise ValueError("name the hosts that may be asked")
    names = ", ".join(sorted(str(_AllowedHosts.parse(name)) for name in allowed))

    description = f"Fetch a web page as text, from a character of it on. Allowed hosts: {names}."

    @make_tool(description=description, rest="fetch it again from a later first_character", read_only=True)
    def http_get(url: str, first_character: int = 1) -> str:
        return fetch(url, allowed, limits, first_character=first_character) or "(the page has no text)"

    return http_get
