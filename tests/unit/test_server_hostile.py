"""Clients that mean no good, or do not know what they do: each gets a 4xx or a reply, and nobody else notices."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from lookahead_agent.server.protocol import ChatRequestBody, CompletionRequestBody, Message

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
JSON: dict[str, Any] = {"Content-Type": "application/json"}
USER = {"role": "user", "content": "What is it?"}
REPLY = "First this.\n\nThen that.\n\nIt is 4."
ROOT = Path(__file__).parents[2]


class Running:
    """A server in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        assert process.stdout is not None
        self.process = process
        self.log = log
        self.port = int(process.stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}"
        for _ in range(600):
            try:
                assert self.health() == 200
                return
            except httpx.TransportError:
                time.sleep(0.05)
        raise AssertionError(log.read_text())

    def health(self) -> int:
        return httpx.get(self.url + "/health", timeout=20).status_code

    @property
    def memory(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def connect(self, sent: bytes = b"") -> socket.socket:
        made = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        made.sendall(sent)
        return made

    def ends_by(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        assert self.process.wait(20) in (-signal.SIGTERM, 128 + signal.SIGTERM)


@contextmanager
def running(tmp_path: Path, descriptors: int | None = None, **settings: Any) -> Iterator[Running]:
    log = tmp_path / "log"
    command = [sys.executable, "-m", "tests.unit.server_program", json.dumps(settings)]
    with log.open("w") as errors:
        process = subprocess.Popen(
            [*command, *([str(descriptors)] if descriptors else [])],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        try:
            yield Running(process, log)
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def closed(made: socket.socket) -> bool:
    """Whether the server closes a connection within the socket's timeout."""
    try:
        while made.recv(65536):
            continue
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    return True


def answer(made: socket.socket) -> bytes:
    """The first bytes that the server sends."""
    with made:
        return made.recv(65536)


def ask(server: Running, **headers: str) -> httpx.Response:
    return httpx.post(server.url + CHAT, json={"messages": [USER]}, headers=headers, timeout=20)


# Connections


def test_half_sent_requests_end_and_disturb_nobody(tmp_path: Path) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    body = head + b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
    with running(tmp_path, request_timeout=1, connections=100) as server:
        halves = [server.connect(sent) for sent in (b"", b"GET", head, body) for _ in range(75)]
        assert server.health() == 200
        assert ask(server).json()["choices"][0]["message"]["content"] == REPLY
        assert [closed(made) for made in halves] == [True] * 300
        assert b"408" in answer(server.connect(body))
        for made in halves:
            made.close()
        told = [line for line in server.log.read_text().splitlines() if "Closed" in line]
        assert len(told) == 1, "one line, however many there are"
        server.ends_by(signal.SIGTERM)


def test_half_sent_requests_without_the_key(tmp_path: Path) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with running(tmp_path, api_key="secret", request_timeout=30) as server:
        made = server.connect(head + b"Content-Length: 100000\r\n\r\n{")
        assert answer(made).startswith(b"HTTP/1.1 401"), "whose key is wrong need not send a body"
        assert ask(server).status_code == 401
        assert ask(server, Authorization="Bearer secret").status_code == 200
        halves = [server.connect(head) for _ in range(50)]
        server.ends_by(signal.SIGHUP)
        for half in halves:
            half.close()


def test_descriptors_run_out(tmp_path: Path) -> None:
    with running(tmp_path, descriptors=128) as server:
        halves = [server.connect(b"GET /health HTTP/1.1\r\n") for _ in range(300)]
        for _ in range(3):
            assert server.health() == 200
            assert ask(server).status_code == 200
        assert len(server.log.read_text().splitlines()) <= 2
        for made in halves:
            made.close()
        server.ends_by(signal.SIGTERM)


@pytest.mark.parametrize("length", [60_000, 200_000, 5_000_000])
def test_headers_have_a_bound(length: int, hostile: Running) -> None:
    made = hostile.connect()
    with closing(made):
        try:
            made.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"x" * length + b"\r\n\r\n")
            told = made.recv(65536)
        except (ConnectionResetError, BrokenPipeError):
            told = b""
    assert told == b"" or told.startswith(b"HTTP/1.1 400")
    assert hostile.health() == 200


def test_signals_end_a_server_with_half_sent_requests(tmp_path: Path) -> None:
    with running(tmp_path, request_timeout=600) as server:
        body = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        halves = [server.connect(body + b"Content-Length: 9\r\n\r\n{"), server.connect(b"GET"), server.connect()]
        assert server.health() == 200
        server.ends_by(signal.SIGHUP)
        for made in halves:
            made.close()


# Names


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("127.0.0.1:1", 200),
        ("10.0.0.7", 200),
        ("[::1]:8000", 200),
        ("models.example.com", 200),
        ("eu.models.example.org:443", 200),
        ("evil.example", 400),
        ("localhost.evil.example", 400),
        ("127.0.0.1.evil.example", 400),
        ("models.example.com.evil.example", 400),
        ("models.example.org", 400),
        ("evilmodels.example.org", 400),
        ("", 400),
        ("[", 400),
        ("a@localhost", 400),
    ],
)
def test_hosts(host: str, status: int, hostile: Running) -> None:
    told = httpx.get(hostile.url + "/health", headers={"Host": host})
    assert told.status_code == status
    if status == 400:
        assert "--allowed-host" in told.json()["error"]["message"]


def test_health_checks_that_give_no_host(hostile: Running) -> None:
    for method in ("GET", "HEAD"):
        assert answer(hostile.connect(f"{method} /health HTTP/1.0\r\n\r\n".encode())).startswith(b"HTTP/1.1 200")
    told = httpx.head(hostile.url + "/health")
    assert (told.status_code, told.content) == (200, b"")


def test_web_pages_of_other_sites(hostile: Running, tmp_path: Path) -> None:
    asked = {"Origin": "https://app.example.com", "Access-Control-Request-Method": "POST"}
    assert httpx.options(hostile.url + CHAT, headers=asked).status_code == 405
    assert "access-control-allow-origin" not in httpx.get(hostile.url + "/health", headers=asked).headers
    body = json.dumps({"messages": [USER]}).encode()
    for kind in ({}, {"Content-Type": "text/plain"}, {"Content-Type": "application/x-www-form-urlencoded"}):
        told = httpx.post(hostile.url + CHAT, content=body, headers=kind)
        assert told.status_code == 415, "what a page may send without being asked is no JSON"
    with running(tmp_path, cors_origins=["https://app.example.com"], api_key="secret") as server:
        told = httpx.options(server.url + CHAT, headers=asked | {"Access-Control-Request-Headers": "authorization"})
        assert told.status_code == 200
        assert told.headers["access-control-allow-origin"] == "https://app.example.com"
        told = ask(server, Origin="https://app.example.com", Authorization="Bearer secret")
        assert told.headers["access-control-allow-origin"] == "https://app.example.com"
        assert "access-control-allow-origin" not in ask(server, Origin="https://evil.example").headers


def test_one_model(hostile: Running) -> None:
    (listed,) = httpx.get(hostile.url + "/v1/models").json()["data"]
    assert httpx.get(f"{hostile.url}/v1/models/{listed['id']}").json() == listed
    for name in ("gpt-9", "a/b", "..", "%00", "x" * 5000):
        assert httpx.get(f"{hostile.url}/v1/models/{name}").status_code == 404


def test_nulls_are_as_good_as_missing(hostile: Running) -> None:
    nothing = dict.fromkeys(ChatRequestBody.model_fields)
    part = {"type": "text", "text": "What is it?", "cache_control": {"type": "ephemeral"}, "refusal": None}
    message = dict.fromkeys(Message.model_fields) | {"role": "user", "content": [part]}
    tool = {"type": "function", "function": {"name": "f", "description": None, "parameters": None, "strict": None}}
    body = nothing | {"messages": [message], "audio": None, "functions": None}
    told = httpx.post(hostile.url + CHAT, json=body, timeout=20)
    assert told.json()["choices"][0]["message"]["content"] == REPLY
    options = {"stream_options": {"include_usage": None, "include_obfuscation": None}, "stream": True, "tools": [tool]}
    assert httpx.post(hostile.url + CHAT, json=body | options, timeout=20).status_code == 200
    nothing = dict.fromkeys(CompletionRequestBody.model_fields)
    told = httpx.post(hostile.url + TEXT, json=nothing | {"prompt": "assistant: "}, timeout=20)
    assert told.json()["usage"]["completion_tokens"] <= 16, "OpenAI's default"


# Bodies


def texts() -> Iterator[bytes]:
    """Bodies that are no JSON, or of a kind that JSON readers differ about."""
    chat = json.dumps({"messages": [USER]})
    yield from (b"", b" ", b"null", b"[]", b"{", b"1", b'"a"', b"{}", b"\x00", b"\xff\xfe{}", b"\xef\xbb\xbf{}", b"nul")
    yield chat.encode("utf-16")
    yield chat.encode("utf-32")
    yield chat.replace("What", "\xe9").encode("latin-1")
    yield chat.encode()[:-1]
    yield chat.encode() + b"{}"
    yield b"\x1f\x8b" + chat.encode()
    for text in ("\\ud800", "\\udfff a", "\\ud83d\\ud83d", "\\u0000", "\\u2028", "\\uFFFF", "\\x", "\n"):
        yield chat.replace("What", text).encode()
        yield chat.replace("role", f"role{text}").encode()
        yield f'{{"messages": [], "{text}": 1}}'.encode()
        yield f'{{"messages": [{{"role": "{text}", "content": "a"}}]}}'.encode()
    yield b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}'
    yield b'{"messages": [{"role": "user", "content": "a", "content": {}}], "messages": 1}'
    for number in (
        "NaN",
        "Infinity",
        "-Infinity",
        "1e999",
        "-1e999",
        "9" * 30,
        "9" * 5000,
        "1e-999",
        "0x10",
        "01",
        "1.",
    ):
        for field in ("temperature", "max_tokens", "top_k", "seed", "n", "logprobs"):
            yield f'{{"messages": [{json.dumps(USER)}], "{field}": {number}}}'.encode()
    for depth in (50, 101, 900, 5000, 200_000):
        yield b'{"messages": ' + b"[" * depth + b"]" * depth + b"}"
        yield b'{"messages": ' + b'{"a":' * depth + b"1" + b"}" * depth + b"}"
        yield b"[" * depth


def sizes() -> Iterator[tuple[str, bytes]]:
    """Bodies that cost more than they weigh."""

    def many(item: str, count: int) -> str:
        return ",".join([item] * count)

    user = json.dumps(USER)
    yield CHAT, f'{{"messages": [{many("{}", 340_000)}]}}'.encode()
    yield CHAT, f'{{"messages": [{many("[]", 340_000)}]}}'.encode()
    yield CHAT, f'{{"messages": [{many("1", 500_000)}]}}'.encode()
    yield CHAT, f'{{"messages": [{many(user, 12_000)}]}}'.encode()
    yield TEXT, f'{{"prompt": [{many("[]", 340_000)}, [1]]}}'.encode()
    yield TEXT, f'{{"prompt": [{many("[1]", 240_000)}]}}'.encode()
    yield TEXT, f'{{"prompt": [{many("1.5", 240_000)}]}}'.encode()
    yield TEXT, f'{{"prompt": {many("", 1_000_000)}}}'.encode()
    yield TEXT, ('{"prompt": "' + "a" * 4_100_000 + '"}').encode()
    yield TEXT, ('{"prompt": "' + "a" * 5_000_000 + '"}').encode()
    yield CHAT, json.dumps({"messages": [USER, {"role": "user", "content": "a, " * 1_300_000}]}).encode()
    yield CHAT, json.dumps(dict.fromkeys(map(str, range(90_000)), 1)).encode()
    yield CHAT, json.dumps({"messages": [dict.fromkeys(map(str, range(90_000)), 1)]}).encode()
    yield CHAT, json.dumps({"messages": [USER], "tools": [dict.fromkeys(map(str, range(90_000)), 1)]}).encode()
    yield CHAT, json.dumps({"messages": [USER], "stop": ["a"] * 90_000}).encode()
    yield CHAT, json.dumps({"messages": [USER], "stop": list(range(90_000))}).encode()
    yield CHAT, json.dumps({"messages": [USER], "logit_bias": dict.fromkeys(map(str, range(90_000)), "x")}).encode()
    yield CHAT, json.dumps({"messages": [USER], "metadata": dict.fromkeys(map(str, range(90_000)), 1)}).encode()
    yield CHAT, json.dumps({"messages": [USER], "model": "x" * 1_000_000}).encode()
    yield CHAT, json.dumps({"messages": [USER], "policy": "x" * 1_000_000}).encode()
    yield CHAT, json.dumps({"messages": [USER], "policy": "off" + ":=/" * 300_000}).encode()
    yield CHAT, json.dumps({"messages": [USER], "chat_template_kwargs": {"enable_thinking": "x" * 1_000_000}}).encode()
    yield CHAT, json.dumps({"messages": [{"role": "x" * 1_000_000, "content": "a"}]}).encode()
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    yield CHAT, json.dumps({"messages": [USER], "tools": [tool] * 20_000}).encode()
    part = {"type": "text", "text": "a"}
    yield CHAT, json.dumps({"messages": [{"role": "user", "content": [part] * 25_000}]}).encode()


VALUES: list[Any] = [
    *(
        None,
        True,
        -1,
        0,
        1.5,
        2**31,
        2**53,
        2**63,
        -(2**63),
        2**64 - 1,
        1e300,
        "",
        "x",
        "1",
        [],
        {},
        [None],
        [[]],
        [{}],
    ),
    *({"a": 1}, {"type": "text"}, ["a", 1], [1, "a"], {"": ""}, {"type": "function"}, {"__class__": 1}),
]


def wrong_types() -> Iterator[tuple[str, dict[str, Any]]]:
    """A value of each kind in each field."""
    both = [
        *("temperature", "top_p", "top_k", "seed", "n", "stop", "stream", "stream_options", "presence_penalty"),
        *("frequency_penalty", "logit_bias", "user", "policy", "node", "response_format", "max_tokens", "model"),
    ]
    chat = [
        *("messages", "max_completion_tokens", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs"),
        *("logprobs", "top_logprobs", "store", "metadata", "nope"),
    ]
    for field in both + chat:
        for value in VALUES:
            yield CHAT, {"messages": [USER], field: value}
    for field in [*both, "prompt", "echo", "suffix", "best_of", "logprobs"]:
        for value in VALUES:
            yield TEXT, {"prompt": "assistant: ", field: value}
    for field in ("role", "content", "name", "tool_calls", "tool_call_id", "function_call", "reasoning_content"):
        for value in VALUES:
            for role in ("user", "assistant", "tool"):
                yield CHAT, {"messages": [USER, {"role": role, "content": "a", field: value}]}
    for value in VALUES:
        function: dict[str, Any] = {"name": "f", "parameters": value}
        yield CHAT, {"messages": [USER], "tools": [{"type": "function", "function": function}]}
        yield CHAT, {"messages": [USER], "tools": [{"type": "function", "function": value}]}
        yield CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": value}]}]}
        yield CHAT, {"messages": [{"role": "user", "content": [value]}]}
        for key in ("id", "type", "function", "index"):
            call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}, key: value}
            yield CHAT, {"messages": [USER, {"role": "assistant", "tool_calls": [call]}]}
        for key in ("name", "arguments"):
            call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}", key: value}}
            yield CHAT, {"messages": [USER, {"role": "assistant", "tool_calls": [call]}]}


SCHEMAS: list[Any] = [
    {"type": "object", "properties": {"a": {"type": "str"}}},
    {"type": ["object", "nope"]},
    {"enum": []},
    {"type": "object", "properties": {"a": {"enum": []}}},
    {"type": "string", "pattern": "([a"},
    {"type": "string", "pattern": "(?:.+)+\x00"},
    {"type": "string", "pattern": "a{1000000}"},
    {"type": "object", "properties": {"a": {"$ref": "#/$defs/missing"}}},
    {"$ref": "#"},
    {"$ref": "http://example.com/schema"},
    {"$ref": "file:///etc/passwd"},
    {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    {"allOf": []},
    {"anyOf": []},
    {"not": {}},
    {"type": "string", "minLength": 5, "maxLength": 1},
    {"type": "string", "maxLength": 10**9},
    {"type": "array", "minItems": 10**7},
    {"type": "array", "items": [], "minItems": -1},
    {"type": "integer", "minimum": 10, "maximum": 1},
    {"type": "number", "multipleOf": 0},
    {"properties": {"a" * 10_000: {}}},
    {"required": ["missing"]},
    {"additionalProperties": "yes"},
    {"const": {"a": [None]}},
    {"enum": [str(number) for number in range(5000)]},
    {"oneOf": [{"type": "object"}] * 200},
    {"properties": {"a": {"properties": {"a": {"properties": {"a": {"properties": {"a": {}}}}}}}}},
    True,
    False,
    "object",
]


def schemas() -> Iterator[dict[str, Any]]:
    """Forms and tools with schemas that cannot be, in each way to ask for one."""
    for schema in SCHEMAS:
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        form = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}
        yield {"response_format": form}
        yield {"tools": [tool]}
        yield {"tools": [tool], "tool_choice": "required"}
        yield {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "f"}}}
        yield {"tools": [tool], "response_format": form}
    for kind in ("json_schema", "json_object", "text", "xml", "", None, 1, [], {}):
        yield {"response_format": {"type": kind}}
        yield {"response_format": {"type": kind, "json_schema": {}}}
        yield {"response_format": {"type": "json_schema", "json_schema": kind}}


def policies() -> Iterator[tuple[dict[str, str], dict[str, Any]]]:
    """Policies by header and by body, and what chooses one."""
    names = [
        *(
            "off",
            "exact",
            "",
            " ",
            "lenient",
            "balanced:",
            "balanced:depth=1e9",
            "balanced:depth",
            ":",
            "=",
            "risk=",
            "risk=x",
        ),
        *(r"balanced:delimiter=/(?:.+)+\x00/", "judge:p_aligned={target:>400000000}{draft}", "exact:delimiter=/(/"),
        *("certified", "a" * 3000, "\x7f", "off" + ":a=/" * 2000, "{target.__class__}", "caf\xe9"),
    ]
    for name in names:
        if name == name.strip() and name.isprintable():  # what the client's library lets through
            yield {"X-Lookahead-Policy": name}, {}
            yield {"X-Lookahead-Node": name}, {}
        yield {}, {"policy": name}
        yield {}, {"node": name}
    for fields in ({}, {"verifier": "judge"}, {"verifier": "nope"}, {"depth": 10**18}, {"delimiter": "("}, {"a": {}}):
        yield {}, {"policy": fields}
    for name in (
        "chat_template",
        "tokenize",
        "padding",
        "truncation",
        "return_tensors",
        "tools",
        "messages",
        "documents",
        "self",
    ):
        for value in (True, "{% for a in range(99999) %}{% endfor %}", [], {}, 1):
            yield {}, {"chat_template_kwargs": {name: value}}


def heads() -> Iterator[bytes]:
    """What is hardly HTTP."""
    body = json.dumps({"messages": [USER]}).encode()
    yield from (
        b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
    )
    for line in ("GET /%ff%fe HTTP/1.1", "GET /%00 HTTP/1.1", "GET //health HTTP/1.1", "GET /../health HTTP/1.1"):
        yield f"{line}\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
    for method in ("PUT", "PATCH", "DELETE", "TRACE", "CONNECT", "OPTIONS", "NOPE"):
        for path in ("/health", CHAT, "/v1/models", "*", "http://evil.example/", "evil.example:443"):
            yield f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
    for header in (
        *("Content-Length: -1", "Content-Length: x", "Content-Length: 99999999999999999999999", "Content-Length: 1e3"),
        *("Transfer-Encoding: nope", "Transfer-Encoding: chunked\r\nContent-Length: 5", "Upgrade: websocket"),
        *("Upgrade: h2c\r\nConnection: Upgrade", "Expect: 100-continue", "Expect: nope", "Range: bytes=0-1"),
        *(
            "Content-Encoding: gzip",
            "Authorization: Bearer \xff",
            "Authorization: \xff",
            "Host: localhost",
            "X: " + "y" * 9000,
        ),
    ):
        begun = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
        yield (begun + header + "\r\n\r\n").encode("latin-1") + body
    for chunk in (b"zz\r\n", b"-1\r\n", b"ffffffffffffffff\r\n", b"5\r\nhello\r\n0\r\n\r\n"):
        yield f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n".encode() + (
            b"Content-Type: application/json\r\nConnection: close\r\n\r\n" + chunk
        )


class Fuzz:
    """Sends requests, and sees that none makes the server fail or others wait."""

    def __init__(self, server: Running, client: httpx.Client) -> None:
        self._server = server
        self._client = client
        self.sent = 0
        self.failures: list[str] = []
        self.statuses: dict[int, int] = {}

    def send(self, path: str, content: bytes, named: dict[str, str]) -> None:
        headers = JSON | {name: value.encode("latin-1") for name, value in named.items()}
        told = self._client.post(path, content=content, headers=headers)
        self._count(told.status_code, f"{headers} {content[:300]!r} {told.text[:300]}")
        assert len(told.content) < 20_000

    def send_raw(self, sent: bytes) -> None:
        try:
            made = self._server.connect(sent)
            made.shutdown(socket.SHUT_WR)
            told = answer(made)
        except (ConnectionResetError, BrokenPipeError, OSError):
            return
        if told:
            self._count(int(told.split(b" ")[1]), f"{sent!r} {told[:200]!r}")

    def _count(self, status: int, what: str) -> None:
        self.sent += 1
        self.statuses[status] = self.statuses.get(status, 0) + 1
        if status >= 500:
            self.failures.append(what)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    hosts = ["localhost", "models.example.com", "*.models.example.org"]
    with running(tmp_path_factory.mktemp("server"), allowed_hosts=hosts, max_tokens=100, request_timeout=2) as server:
        yield server


def test_no_request_of_a_hostile_client_makes_the_server_fail(tmp_path: Path) -> None:
    with (
        running(tmp_path, max_tokens=20, request_timeout=5) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        fuzz = Fuzz(server, client)
        fuzz.send(CHAT, json.dumps({"messages": [USER]}).encode(), {})
        before, ended, unwell = server.memory, threading.Event(), list[str]()

        def look() -> None:
            with httpx.Client(base_url=server.url, timeout=20) as other:
                while not ended.wait(0.02):
                    try:
                        if other.get("/health").status_code != 200:
                            unwell.append("failing")
                    except httpx.HTTPError as error:
                        unwell.append(repr(error))

        watching = threading.Thread(target=look)
        watching.start()
        try:
            requests = [(path, body, {}) for body in texts() for path in (CHAT, TEXT)]
            requests += [(path, json.dumps(fields).encode(), {}) for path, fields in wrong_types()]
            asked = [*(({}, fields) for fields in schemas()), *policies()]
            requests += [(CHAT, json.dumps({"messages": [USER], **fields}).encode(), named) for named, fields in asked]
            with ThreadPoolExecutor(8) as threads:
                for sending in [threads.submit(fuzz.send, *each) for each in requests]:
                    sending.result()
            for sent in heads():
                fuzz.send_raw(sent)
            for path, body in sizes():
                fuzz.send(path, body, {})
        finally:
            ended.set()
            watching.join()
        assert fuzz.failures == [], "\n".join(fuzz.failures)
        assert unwell == []
        assert fuzz.sent > 1000
        assert set(fuzz.statuses) >= {200, 400, 413}
        assert ask(server).json()["choices"][0]["message"]["content"].startswith("First this.")
        assert server.memory - before < 200 << 20
        server.ends_by(signal.SIGTERM)
