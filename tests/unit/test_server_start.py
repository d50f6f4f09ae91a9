"""A server answers while its models load, tells a target that gives nothing, and ends replies with an error."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import httpx
import pytest

from lookahead_agent import ChatLookahead
from lookahead_agent.cli.serve import _listen
from lookahead_agent.engines import ScriptedEngine, ScriptedStep, ScriptedTokenizer
from lookahead_agent.errors import ConfigurationError, EngineError, EngineStartError
from lookahead_agent.runtime.engine_set import EngineSet
from lookahead_agent.server import ServerSettings
from lookahead_agent.server.app import create_app
from lookahead_agent.server.health import StallMonitor
from lookahead_agent.server.start import EngineStart
from lookahead_agent.server.uvicorn_server import BoundedServer, ServerConfig, run_server
from tests.unit.chat import scripted_chat
from tests.unit.serving import serving
from tests.waiting import wait_until

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "?"}]}


class SlowStart(ChatLookahead):
    """Starts when the test allows it."""

    def start(self, progress: Any = None) -> None:
        """Wait for the test, and fail if it says so."""
        begin, error = GATES[self.model]
        assert begin.wait(30)
        if error is not None:
            raise error


GATES: dict[str, tuple[threading.Event, Exception | None]] = {}


def slow_start(error: Exception | None = None) -> tuple[ChatLookahead, threading.Event]:
    engines = scripted_chat("Fine.").engines
    llm = SlowStart(engines=engines, policy="off", max_tokens=20)
    GATES[llm.model] = (threading.Event(), error)
    return llm, GATES[llm.model][0]


@contextmanager
def early_server(llm: ChatLookahead, on_end: Callable[[Exception | None], None], **settings: Any) -> Iterator[str]:
    """Serve as `run_server` does, in a thread."""
    server_settings = ServerSettings.model_validate(settings)
    app = create_app(llm, server_settings, EngineStart(llm, on_end))
    server = BoundedServer(ServerConfig(app, server_settings, log_level="error"))
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()


def test_a_server_answers_503_while_its_models_load() -> None:
    llm, begin = slow_start()
    ended: list[Exception | None] = []
    with early_server(llm, ended.append, api_key="key") as url, httpx.Client(base_url=url, timeout=30) as client:
        authorized = {"Authorization": "Bearer key"}
        for response in (
            client.post(CHAT, json=BODY, headers=authorized),
            client.post(CHAT, json=BODY | {"stream": True}, headers=authorized),
            client.post("/v1/completions", json={"prompt": "?"}, headers=authorized),
            client.get("/v1/models", headers=authorized),
        ):
            assert response.status_code == 503
            assert int(response.headers["Retry-After"]) > 0
            assert response.json()["error"]["code"] == "loading"
        assert client.post(CHAT, json=BODY).status_code == 401
        health = client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "loading")
        assert health.headers["Retry-After"]
        begin.set()
        asyncio.run(wait_until(lambda: bool(ended)))
        assert client.get("/health").json()["status"] == "ok"
        assert client.post(CHAT, json=BODY, headers=authorized).status_code == 200
    assert ended == [None]


def test_a_failed_start_ends_the_server_with_its_error() -> None:
    llm, begin = slow_start(EngineStartError("no memory for /srv/secret"))
    ended: list[Exception | None] = []
    with early_server(llm, ended.append) as url:
        assert httpx.get(url + "/health").json()["status"] == "loading"
        begin.set()
        asyncio.run(wait_until(lambda: bool(ended)))
        response = httpx.post(url + CHAT, json=BODY)
        assert response.status_code == 503
        assert "secret" not in response.text
        assert httpx.get(url + "/health").json()["status"] == "failing"
    begin.set()
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        with pytest.raises(EngineStartError, match="no memory"):
            run_server(llm, ServerSettings(), listener, grace=1)


def hanging_chat(timeout: float | None = None) -> ChatLookahead:
    engine = ScriptedEngine(ScriptedTokenizer(), [ScriptedStep("One.\n\n"), ScriptedStep("Two ", hangs=True)])
    return ChatLookahead(engines=EngineSet(engine), policy="off", max_tokens=50, timeout=timeout)


def test_health_tells_a_target_that_gives_nothing() -> None:
    with serving(hanging_chat(timeout=0.2)) as (url, writer):
        assert httpx.get(url + "/health").json()["status"] == "ok"
        assert httpx.post(url + CHAT, json=BODY).status_code == 500
        health = httpx.get(url + "/health")
        assert (health.status_code, health.json()["status"]) == (503, "failing")
        assert "no token" in health.json()["reason"]
        assert httpx.post(url + CHAT, json=BODY | {"max_tokens": 2}).status_code == 200
        assert httpx.get(url + "/health").status_code == 200, "a reply is complete"
        assert writer.failure() is None


def test_stalls_are_noticed_with_and_without_a_timeout_and_forgotten() -> None:
    now = 0.0
    monitor = StallMonitor(lambda: now)

    def fail_after(seconds: float, message: str) -> None:
        nonlocal now
        with suppress(EngineError), monitor.watch(5):
            now += seconds
            raise EngineError(message)

    fail_after(2, "at once: the engine says why")
    assert not monitor.is_stalled
    with monitor.watch(None) as progress, monitor.watch(None):
        now += 119
        assert not monitor.is_stalled
        progress()
        now += 119
        assert not monitor.is_stalled, "another reply goes on"
        now += 2
        assert monitor.is_stalled
    assert not monitor.is_stalled
    fail_after(6, "timed out")
    assert monitor.is_stalled
    now += 61
    assert not monitor.is_stalled, "requests show whether it works again"


@pytest.mark.parametrize("stream", [True, False])
def test_replies_end_with_an_error_after_the_grace_period(stream: bool) -> None:
    llm, settings = hanging_chat(), ServerSettings(concurrent=1)
    app = create_app(llm, settings)
    server = BoundedServer(ServerConfig(app, settings, log_level="error", timeout_graceful_shutdown=0.2))
    texts: list[tuple[int, str]] = []
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        asyncio.run(wait_until(lambda: server.started))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"

        def ask() -> None:
            response = httpx.post(url + CHAT, json=BODY | {"stream": stream}, timeout=30)
            texts.append((response.status_code, response.text))

        clients = [threading.Thread(target=ask) for _ in range(2)]  # one of them waits for a slot
        for client in clients:
            client.start()
        admission = app.state.writer.admission
        asyncio.run(wait_until(lambda: (admission.running, admission.waiting) == (1, 1)))
        server.should_exit = True
        for each in (*clients, thread):
            each.join(30)
            assert not each.is_alive()
    texts.sort()
    if stream:
        lines = [line for line in texts[0][1].splitlines() if line]
        assert lines[-1] == "data: [DONE]"
        assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "shutdown"
        assert [status for status, _ in texts] == [200, 503], "the waiting one had no event yet"
    else:
        assert [status for status, _ in texts] == [503, 503]
    assert "its shutdown is over" in texts[-1][1]


# Requests on the wire


def exchange(url: str, data: bytes, seconds: float = 20) -> bytes:
    """Send bytes, and receive until the server closes the connection."""
    host, _, port = url.removeprefix("http://").partition(":")
    received = b""
    with socket.create_connection((host, int(port)), timeout=seconds) as connection:
        connection.sendall(data)
        while part := connection.recv(65536):
            received += part
    return received


HEAD = b"Host: localhost\r\nContent-Type: application/json\r\n"
CONTENT = json.dumps(BODY).encode()
POST = b"POST /v1/chat/completions HTTP/1.1\r\n" + HEAD


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(scripted_chat("Fine.", max_tokens=20)) as (address, _):
        yield address


def test_a_length_beside_a_transfer_encoding_is_refused_and_nothing_after_it_is_read(url: str) -> None:
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(CONTENT), CONTENT)
    smuggled = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    for length in (len(chunked) + len(smuggled), 4, 0):
        head = POST + b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n" % length
        answer = exchange(url, head + chunked + smuggled)
        assert answer.count(b"HTTP/1.1 ") == 1
        assert answer.startswith(b"HTTP/1.1 400")
        assert b"both Content-Length and Transfer-Encoding" in answer
    old = POST.replace(b"HTTP/1.1", b"HTTP/1.0") + b"Transfer-Encoding: chunked\r\n\r\n"
    answer = exchange(url, old + chunked + smuggled)
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"which HTTP/1.0 has not" in answer
    for head in (
        b"Content-Length: %d\r\n\r\n%s" % (len(CONTENT), CONTENT),
        b"Transfer-Encoding: chunked\r\n\r\n" + chunked,
    ):
        assert exchange(url, POST + b"Connection: close\r\n" + head).startswith(b"HTTP/1.1 200"), "each alone"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *(("localhost", 200), ("127.0.0.1:8000", 200), ("[::1]", 200), ("[::1]:8000", 200), ("[2001:db8::2]", 200)),
        *(("[::1]evil.example", 400), ("[::1].evil.example", 400), ("[::1]:80.evil.example", 400), ("[::1]x:1", 400)),
        *(("[127.0.0.1]", 400), ("[localhost]", 400), ("::1", 400), ("127.0.0.1x", 400), ("2130706433", 400)),
        *(("localhost:80:80", 400), ("localhost:x", 400), ("localhost, evil.example", 400), ("a@localhost", 400)),
        *(("localhost/evil", 400), ("testserver", 400), ("localhost evil", 400), ("[::1", 400), ("::1]", 400)),
    ],
)
def test_a_host_is_parsed_strictly(url: str, host: str, status: int) -> None:
    assert httpx.get(url + "/health", headers={"Host": host}).status_code == status


@pytest.mark.parametrize(
    "content",
    [
        b'{"messages": [{"role": "user", "content": "a"}], "messages": [{"role": "user", "content": "b"}]}',
        b'{"max_tokens": 1, "messages": [{"role": "user", "content": "a"}], "max_tokens": 40}',
        b'{"messages": [{"role": "user", "role": "system", "content": "a"}]}',
        b'{"messages": [{"role": "user", "content": "a"}], "\\u006dessages": []}',
        b'{"messages": [{"role": "user", "content": "a"}], "metadata": {"a": {"b": 1, "b": 1}}}',
    ],
)
def test_a_name_that_occurs_twice_is_refused(url: str, content: bytes) -> None:
    response = httpx.post(url + CHAT, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert "twice" in response.json()["error"]["message"]


async def test_a_client_that_hangs_up_behind_a_second_request_ends_its_reply() -> None:
    with serving(hanging_chat()) as (address, writer):
        first = POST + b"Content-Length: %d\r\n\r\n%s" % (len(CONTENT), CONTENT)
        for following in (b"", b"GET /hea", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", first):
            port = int(address.rpartition(":")[2])
            connection = socket.create_connection(("127.0.0.1", port))
            connection.sendall(first + following)
            await wait_until(lambda: writer.admission.running == 1)
            connection.close()
            await wait_until(lambda: writer.admission.running == writer.admission.waiting == 0)


def test_endless_requests_behind_one_that_runs_end_the_connection() -> None:
    with serving(hanging_chat()) as (address, writer):
        connection = socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=20)
        connection.sendall(POST + b"Content-Length: %d\r\n\r\n%s" % (len(CONTENT), CONTENT))
        many = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1_000_000
        with pytest.raises(ConnectionError):
            connection.sendall(many)
        connection.close()
        asyncio.run(wait_until(lambda: writer.admission.running == 0))
        assert httpx.get(address + "/health").status_code == 200


def test_pipelined_requests_are_answered_in_order(url: str) -> None:
    get = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    post = POST + b"Content-Length: %d\r\n\r\n%s" % (len(CONTENT), CONTENT)
    end = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    answer = exchange(url, get + post + get + end)
    assert answer.count(b"HTTP/1.1 200") == 4
    assert answer.index(b'"object":"list"') < answer.index(b"Fine.") < answer.rindex(b'"object":"list"')


async def test_long_bodies_hold_no_short_one() -> None:
    """Clients send long bodies slowly, up to the bytes that the server buffers; another sends a short one."""
    with serving(scripted_chat("Fine.", max_tokens=20), max_body_bytes=2 << 20) as (address, _):
        port = int(address.rpartition(":")[2])
        connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
        part = b"[" + b" " * ((2 << 20) - 10)
        try:
            for connection in connections:
                connection.sendall(POST + b"Content-Length: %d\r\n\r\n" % (2 << 20))
                connection.settimeout(0.2)
                try:
                    connection.sendall(part)
                except OSError:  # refused, or not yet read
                    continue
            async with httpx.AsyncClient(base_url=address, timeout=30) as client:
                body = BODY | {"messages": [{"role": "user", "content": "word " * 3000}]}
                for each in (BODY, body):
                    response = await client.post(CHAT, json=each)
                    assert response.status_code in (200, 400), response.text  # 400: longer than the context
        finally:
            for connection in connections:
                connection.close()


def test_a_second_server_on_an_address_ends_at_once() -> None:
    with closing(_listen("127.0.0.1", 0)) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigurationError, match=rf"cannot listen on 127\.0\.0\.1, port {port}"):
            _listen("127.0.0.1", port)
        began = time.monotonic()
        socket.create_connection(("127.0.0.1", port), timeout=10).close()
        assert time.monotonic() - began < 10, "it listens"
