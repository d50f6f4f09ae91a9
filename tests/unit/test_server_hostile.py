"""Hostile and broken clients: each gets a 4xx or a reply, and other clients are not affected."""

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
RESPONSES = "/v1/responses"
JSON: dict[str, Any] = {"Content-Type": "application/json"}
USER = {"role": "user", "content": "What is it?"}
REPLY = "First this.\n\nThen that.\n\nIt is 4."
ROOT = Path(__file__).parents[2]


class ServerProcess:
    """A server in a separate process."""

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

    def connect(self, data: bytes = b"") -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        connection.sendall(data)
        return connection

    def assert_ends_on(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        assert self.process.wait(60) in (-signal.SIGTERM, 128 + signal.SIGTERM)


@contextmanager
def serve(tmp_path: Path, descriptors: int | None = None, **settings: Any) -> Iterator[ServerProcess]:
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
            yield ServerProcess(process, log)
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def closed(connection: socket.socket) -> bool:
    """Whether the server closes a connection within the socket's timeout."""
    try:
        while connection.recv(65536):
            continue
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    return True


def receive(connection: socket.socket) -> bytes:
    """The first bytes that the server sends."""
    with connection:
        return connection.recv(65536)


def post_chat(server: ServerProcess, **headers: str) -> httpx.Response:
    return httpx.post(server.url + CHAT, json={"messages": [USER]}, headers=headers, timeout=20)


# Connections


def test_half_sent_requests_time_out_and_block_no_other_client(tmp_path: Path) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    body = head + b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
    with serve(tmp_path, request_timeout=1, connections=100) as server:
        half_sent = [server.connect(sent) for sent in (b"", b"GET", head, body) for _ in range(75)]
        assert server.health() == 200
        assert post_chat(server).json()["choices"][0]["message"]["content"] == REPLY
        assert [closed(connection) for connection in half_sent] == [True] * 300
        assert b"408" in receive(server.connect(body))
        for connection in half_sent:
            connection.close()
        closed_lines = [line for line in server.log.read_text().splitlines() if "Closed" in line]
        assert len(closed_lines) == 1, "one log line for all of them"
        server.assert_ends_on(signal.SIGTERM)


def test_a_missing_key_is_rejected_before_the_body_arrives(tmp_path: Path) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with serve(tmp_path, api_key="secret", request_timeout=30) as server:
        connection = server.connect(head + b"Content-Length: 100000\r\n\r\n{")
        assert receive(connection).startswith(b"HTTP/1.1 401"), "the key is checked before the body"
        assert post_chat(server).status_code == 401
        assert post_chat(server, Authorization="Bearer secret").status_code == 200
        half_sent = [server.connect(head) for _ in range(50)]
        server.assert_ends_on(signal.SIGHUP)
        for each in half_sent:
            each.close()


def test_the_server_still_answers_without_free_file_descriptors(tmp_path: Path) -> None:
    with serve(tmp_path, descriptors=128) as server:
        half_sent = [server.connect(b"GET /health HTTP/1.1\r\n") for _ in range(300)]
        for _ in range(3):
            assert server.health() == 200
            assert post_chat(server).status_code == 200
        assert len(server.log.read_text().splitlines()) <= 2
        for connection in half_sent:
            connection.close()
        server.assert_ends_on(signal.SIGTERM)


@pytest.mark.parametrize("length", [60_000, 200_000, 5_000_000])
def test_oversized_headers_are_rejected(length: int, shared: ServerProcess) -> None:
    connection = shared.connect()
    with closing(connection):
        try:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"x" * length + b"\r\n\r\n")
            response = connection.recv(65536)
        except (ConnectionResetError, BrokenPipeError):
            response = b""
    assert response == b"" or response.startswith(b"HTTP/1.1 400")
    assert shared.health() == 200


def test_sighup_ends_a_server_with_half_sent_requests(tmp_path: Path) -> None:
    with serve(tmp_path, request_timeout=600) as server:
        body = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        half_sent = [server.connect(body + b"Content-Length: 9\r\n\r\n{"), server.connect(b"GET"), server.connect()]
        assert server.health() == 200
        server.assert_ends_on(signal.SIGHUP)
        for connection in half_sent:
            connection.close()


# Hosts, origins and models


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
def test_only_allowed_hosts_are_served(host: str, status: int, shared: ServerProcess) -> None:
    response = httpx.get(shared.url + "/health", headers={"Host": host})
    assert response.status_code == status
    if status == 400:
        assert "--allowed-host" in response.json()["error"]["message"]


def test_health_checks_work_without_a_host_and_with_head(shared: ServerProcess) -> None:
    for method in ("GET", "HEAD"):
        assert receive(shared.connect(f"{method} /health HTTP/1.0\r\n\r\n".encode())).startswith(b"HTTP/1.1 200")
    response = httpx.head(shared.url + "/health")
    assert (response.status_code, response.content) == (200, b"")


def test_cross_origin_requests_need_an_allowed_origin(shared: ServerProcess, tmp_path: Path) -> None:
    preflight = {"Origin": "https://app.example.com", "Access-Control-Request-Method": "POST"}
    assert httpx.options(shared.url + CHAT, headers=preflight).status_code == 405
    assert "access-control-allow-origin" not in httpx.get(shared.url + "/health", headers=preflight).headers
    body = json.dumps({"messages": [USER]}).encode()
    for content_type in ({}, {"Content-Type": "text/plain"}, {"Content-Type": "application/x-www-form-urlencoded"}):
        response = httpx.post(shared.url + CHAT, content=body, headers=content_type)
        assert response.status_code == 415, "content types that need no preflight are rejected"
    with serve(tmp_path, cors_origins=["https://app.example.com"], api_key="secret") as server:
        response = httpx.options(
            server.url + CHAT, headers=preflight | {"Access-Control-Request-Headers": "authorization"}
        )
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "https://app.example.com"
        response = post_chat(server, Origin="https://app.example.com", Authorization="Bearer secret")
        assert response.headers["access-control-allow-origin"] == "https://app.example.com"
        assert "access-control-allow-origin" not in post_chat(server, Origin="https://evil.example").headers


def test_only_the_listed_model_can_be_retrieved(shared: ServerProcess) -> None:
    (listed,) = httpx.get(shared.url + "/v1/models").json()["data"]
    assert httpx.get(f"{shared.url}/v1/models/{listed['id']}").json() == listed
    for name in ("gpt-9", "a/b", "..", "%00", "x" * 5000):
        assert httpx.get(f"{shared.url}/v1/models/{name}").status_code == 404


def test_null_fields_count_as_missing(shared: ServerProcess) -> None:
    nulls = dict.fromkeys(ChatRequestBody.model_fields)
    part = {"type": "text", "text": "What is it?", "cache_control": {"type": "ephemeral"}, "refusal": None}
    message = dict.fromkeys(Message.model_fields) | {"role": "user", "content": [part]}
    tool = {"type": "function", "function": {"name": "f", "description": None, "parameters": None, "strict": None}}
    body = nulls | {"messages": [message], "audio": None, "functions": None}
    response = httpx.post(shared.url + CHAT, json=body, timeout=20)
    assert response.json()["choices"][0]["message"]["content"] == REPLY
    options = {"stream_options": {"include_usage": None, "include_obfuscation": None}, "stream": True, "tools": [tool]}
    assert httpx.post(shared.url + CHAT, json=body | options, timeout=20).status_code == 200
    nulls = dict.fromkeys(CompletionRequestBody.model_fields)
    response = httpx.post(shared.url + TEXT, json=nulls | {"prompt": "assistant: "}, timeout=20)
    assert response.json()["usage"]["completion_tokens"] <= 16, "OpenAI's default"


# Bodies


def malformed_bodies() -> Iterator[bytes]:
    """Bodies that are not JSON, or on which JSON parsers disagree."""
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


def expensive_bodies() -> Iterator[tuple[str, bytes]]:
    """Bodies that cost more to process than to send."""

    def repeat(item: str, count: int) -> str:
        return ",".join([item] * count)

    user = json.dumps(USER)
    yield CHAT, f'{{"messages": [{repeat("{}", 340_000)}]}}'.encode()
    yield CHAT, f'{{"messages": [{repeat("[]", 340_000)}]}}'.encode()
    yield CHAT, f'{{"messages": [{repeat("1", 500_000)}]}}'.encode()
    yield CHAT, f'{{"messages": [{repeat(user, 12_000)}]}}'.encode()
    yield TEXT, f'{{"prompt": [{repeat("[]", 340_000)}, [1]]}}'.encode()
    yield TEXT, f'{{"prompt": [{repeat("[1]", 240_000)}]}}'.encode()
    yield TEXT, f'{{"prompt": [{repeat("1.5", 240_000)}]}}'.encode()
    yield TEXT, f'{{"prompt": {repeat("", 1_000_000)}}}'.encode()
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
    responses = ("input", "instructions", "max_output_tokens", "previous_response_id", "tools", "tool_choice", "text")
    for field in (*responses, "reasoning", "store", "metadata", "include", "truncation"):
        for value in VALUES[::2]:
            yield RESPONSES, {"input": "a", field: value}
            yield RESPONSES, {"input": "a", field: {"type": value, "format": value, "effort": value, "name": value}}
    for kind in ("message", "reasoning", "function_call", "function_call_output"):
        item = {"type": kind, "role": "user", "content": "a", "call_id": "1", "name": "f", "arguments": "{}"}
        for field in (*item, "output", "summary"):
            for value in VALUES[::4]:
                yield RESPONSES, {"input": [USER, item | {"output": "a", field: value}]}
                yield RESPONSES, {"input": [USER, item | {field: [value, {"type": value, "text": value}]}]}
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


def invalid_schemas() -> Iterator[dict[str, Any]]:
    """Response formats and tools with invalid schemas, in each option that takes one."""
    for schema in SCHEMAS:
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        json_format = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}
        yield {"response_format": json_format}
        yield {"tools": [tool]}
        yield {"tools": [tool], "tool_choice": "required"}
        yield {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "f"}}}
        yield {"tools": [tool], "response_format": json_format}
    for kind in ("json_schema", "json_object", "text", "xml", "", None, 1, [], {}):
        yield {"response_format": {"type": kind}}
        yield {"response_format": {"type": kind, "json_schema": {}}}
        yield {"response_format": {"type": "json_schema", "json_schema": kind}}


def policies() -> Iterator[tuple[dict[str, str], dict[str, Any]]]:
    """Policies and nodes in headers and bodies, and template variables; most are invalid."""
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
        if name == name.strip() and name.isprintable():  # the HTTP client rejects the others
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


def malformed_heads() -> Iterator[bytes]:
    """Malformed or unusual HTTP requests."""
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
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
        if "Content-Length" not in header:
            head += f"Content-Length: {len(body)}\r\n"
        yield (head + header + "\r\n\r\n").encode("latin-1") + body
    for chunk in (b"zz\r\n", b"-1\r\n", b"ffffffffffffffff\r\n", b"5\r\nhello\r\n0\r\n\r\n"):
        yield f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n".encode() + (
            b"Content-Type: application/json\r\nConnection: close\r\n\r\n" + chunk
        )


class Fuzz:
    """Sends requests, and collects those that cause a server error."""

    def __init__(self, server: ServerProcess, client: httpx.Client) -> None:
        self._server = server
        self._client = client
        self.sent = 0
        self.failures: list[str] = []
        self.statuses: dict[int, int] = {}

    def send(self, path: str, content: bytes, extra: dict[str, str]) -> None:
        headers = JSON | {name: value.encode("latin-1") for name, value in extra.items()}
        response = self._client.post(path, content=content, headers=headers)
        self._count(response.status_code, f"{headers} {content[:300]!r} {response.text[:300]}")
        assert len(response.content) < 20_000

    def send_raw(self, data: bytes) -> None:
        response = receive(self._server.connect(data))
        assert response.startswith(b"HTTP/1.1 "), f"{data!r} {response[:200]!r}"
        self._count(int(response.split(b" ")[1]), f"{data!r} {response[:200]!r}")

    def _count(self, status: int, description: str) -> None:
        self.sent += 1
        self.statuses[status] = self.statuses.get(status, 0) + 1
        if status >= 500:
            self.failures.append(description)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    hosts = ["localhost", "models.example.com", "*.models.example.org"]
    with serve(tmp_path_factory.mktemp("server"), allowed_hosts=hosts, max_tokens=100, request_timeout=2) as server:
        yield server


def test_fuzzed_requests_cause_no_server_error_and_no_outage(tmp_path: Path) -> None:
    with (
        serve(tmp_path, max_tokens=20, request_timeout=5) as server,
        httpx.Client(base_url=server.url, timeout=300) as client,
    ):
        fuzz = Fuzz(server, client)
        fuzz.send(CHAT, json.dumps({"messages": [USER]}).encode(), {})
        fuzz.send(RESPONSES, b'{"input": "a"}', {})  # imports OpenAI's SDK
        before, stop, outages = server.memory, threading.Event(), list[str]()

        def poll_health() -> None:
            with httpx.Client(base_url=server.url, timeout=60) as other:
                while not stop.wait(0.02):
                    try:
                        if other.get("/health").status_code != 200:
                            outages.append("failing")
                    except httpx.HTTPError as error:
                        outages.append(repr(error))

        poller = threading.Thread(target=poll_health)
        poller.start()
        try:
            requests = [(path, body, {}) for body in malformed_bodies() for path in (CHAT, TEXT, RESPONSES)]
            requests += [(path, json.dumps(fields).encode(), {}) for path, fields in wrong_types()]
            cases = [*(({}, fields) for fields in invalid_schemas()), *policies()]
            requests += [(CHAT, json.dumps({"messages": [USER], **fields}).encode(), extra) for extra, fields in cases]
            with ThreadPoolExecutor(8) as threads:
                futures = [threads.submit(fuzz.send_raw, sent) for sent in malformed_heads()]
                for future in [*futures, *(threads.submit(fuzz.send, *each) for each in requests)]:
                    future.result()
            for path, body in expensive_bodies():
                fuzz.send(path, body, {})
        finally:
            stop.set()
            poller.join()
        assert fuzz.failures == [], "\n".join(fuzz.failures)
        assert outages == []
        assert fuzz.sent > 1000
        assert set(fuzz.statuses) >= {200, 400, 413}
        assert post_chat(server).json()["choices"][0]["message"]["content"].startswith("First this.")
        assert server.memory - before < 200 << 20
        server.assert_ends_on(signal.SIGTERM)
