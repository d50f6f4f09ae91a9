"""The daemon of `lookahead-agent up` on scripted engines: its Unix socket, requests and runtime directory."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool

from lookahead_agent import ChatLookahead
from lookahead_agent.cli.app import run_command
from lookahead_agent.cli.serve import wait_for_end
from lookahead_agent.engines import ScriptedEngine, ScriptedStep, ScriptedTokenizer
from lookahead_agent.engines.scripted import reply_script
from lookahead_agent.errors import (
    ConfigurationError,
    ContextLengthError,
    EngineError,
    EngineStartError,
    LookaheadError,
    PolicyError,
)
from lookahead_agent.generation.backend import request_from_json, request_to_json
from lookahead_agent.generation.call_options import CallOptions
from lookahead_agent.generation.server_backend import (
    CHAT_PATH,
    ENGINES_HEADER,
    RUNTIME_DIR_VARIABLE,
    WARM_PATH,
    ServerBackend,
    ServerStatus,
    find_server,
    is_private,
    peer,
    server_status,
    socket_path,
)
from lookahead_agent.policy import VerifierPolicy
from lookahead_agent.runtime.engine_set import EngineSet
from lookahead_agent.server.daemon import (
    bind_socket,
    find_starting_pid,
    log_path,
    private_dir,
    start_daemon,
    start_lock,
)
from lookahead_agent.server.replies import with_pings
from lookahead_agent.system import background
from lookahead_agent.testing import scripted_chat
from tests.unit.serving import serving, serving_private_api
from tests.unit.test_streams import message_fields, summed
from tests.waiting import wait_until

LONG = "One word after another.\n\n" * 2000


@tool
def look_up(word: str) -> str:
    """Look a word up."""
    return word


@pytest.fixture(autouse=True)
def _runtime_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUNTIME_DIR_VARIABLE, str(tmp_path / "run"))
    private_dir()


@pytest.fixture
def client(tmp_path: Path) -> ChatLookahead:
    """A model that cannot start its own engines: its folder has no weights."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return ChatLookahead(model=str(tmp_path / "model"), policy="off", max_tokens=50)


def digest(client: ChatLookahead) -> str:
    """Return the digest of the engines that a model needs."""
    assert client.backend.runtime is not None
    return client.backend.runtime.spec.digest


def in_flight(llm: ChatLookahead) -> int:
    """Return the number of requests that the target is running."""
    assert llm.engines is not None
    return llm.engines.target.in_flight


def test_client_reply_equals_a_reply_of_the_daemons_model(client: ChatLookahead) -> None:
    served = scripted_chat("One.\n\nTwo.\n\nThree.", policy="exact")
    local: Any = served.invoke("?", policy="exact")
    with serving_private_api(served, digest(client)) as writer:
        reply: Any = client.bind(policy="exact").invoke("?")
        assert (reply.text, reply.usage_metadata) == (local.text, local.usage_metadata)
        received, expected = reply.response_metadata["lookahead"], local.response_metadata["lookahead"]
        assert {name: received[name] for name in ("policy", "steps", "accepted", "tokens")} == {
            name: expected[name] for name in ("policy", "steps", "accepted", "tokens")
        }
        assert received.keys() == expected.keys()
        assert received["selection_rule"] == "the call's own argument"
        assert "".join(chunk.text for chunk in client.stream("?")) == local.text
        assert "".join(chunk.text for chunk in served.stream("?")) == local.text
        assert client.explain() == served.explain()
        client.start()
        assert writer.replies == 2
        status = background.run(server_status())
        assert status is not None
        assert (status.pid, status.replies, status.running) == (os.getpid(), 2, 0)
        assert status.context_length == served.backend.context_length()
        assert socket_path().stat().st_mode & 0o777 == 0o600
    assert not socket_path().exists()


def test_daemon_carries_tool_calls_structured_output_events_and_errors(client: ChatLookahead) -> None:
    tool_calling = scripted_chat('<tool_call>{"name": "look_up", "arguments": {"word": "a"}}</tool_call>')
    with serving_private_api(tool_calling, digest(client)):
        assert client.bind_tools([look_up]).invoke("?").tool_calls[0]["args"] == {"word": "a"}
    structured = scripted_chat('{"number": 4}')
    with serving_private_api(structured, digest(client)):
        schema = {"title": "a", "type": "object", "properties": {"number": {"type": "integer"}}}
        assert client.with_structured_output(schema).invoke("?") == {"number": 4}
    stepwise = scripted_chat("One.\n\nTwo.")
    with serving_private_api(stepwise, digest(client)):
        recorder = _EventRecorder()
        client.invoke("?", {"callbacks": [recorder]}, policy="exact")
        assert recorder.kinds >= {"drafted", "accepted"}
    short = ScriptedEngine(ScriptedTokenizer(), reply_script(lambda _: "So."), context_length=3)
    with (
        serving_private_api(ChatLookahead(engines=EngineSet(short), policy="off"), digest(client)),
        pytest.raises(ContextLengthError, match="more than 3 tokens"),
    ):
        client.invoke("A question of many words, more than there is room for.")
    failing = ScriptedEngine(ScriptedTokenizer(), [ScriptedStep("So.\n\n"), ScriptedStep("x", error="no /srv/model")])
    with (
        serving_private_api(ChatLookahead(engines=EngineSet(failing), policy="off"), digest(client)),
        pytest.raises(EngineError, match="no /srv/model"),
    ):
        client.invoke("?")


@pytest.mark.parametrize(
    "text",
    [
        'I look.\n<tool_call>{"name": "look_up", "arguments": {"word": "a"}}</tool_call>\nSo.',
        '<tool_call>{"name": "look_up", "arguments": {"word": "\\ud83d"}}</tool_call>',
        '<tool_call>{"name": "look_up", "arguments": "{\\"word\\": \\"a"}</tool_call>',
        '<tool_call>{"name": "look_up", "arguments": {"word": "a',
        "Half a character: \ud83d.",
    ],
)
def test_valid_and_invalid_tool_calls_arrive_unchanged(client: ChatLookahead, text: str) -> None:
    served = scripted_chat(text)
    local = message_fields(served.bind_tools([look_up]).invoke("?"))
    with serving_private_api(served, digest(client)):
        bound = client.bind_tools([look_up])
        assert message_fields(bound.invoke("?")) == local
        assert message_fields(summed(bound.stream("?"))) == local


class _EventRecorder(BaseCallbackHandler):
    def __init__(self) -> None:
        self.kinds: set[str] = set()

    def on_custom_event(self, name: str, data: Any, **_: Any) -> None:
        self.kinds.add(data["kind"])


def test_cancelled_calls_and_dropped_streams_abort_their_requests(client: ChatLookahead) -> None:
    served = scripted_chat(LONG)

    async def cancel_call() -> None:
        call = asyncio.create_task(client.ainvoke("?", max_tokens=1_000_000))
        await wait_until(lambda: in_flight(served) > 0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    with serving_private_api(served, digest(client)) as writer:
        asyncio.run(cancel_call())
        asyncio.run(wait_until(lambda: in_flight(served) == writer.admission.running == 0))
        stream = client.stream("?", max_tokens=1_000_000)
        assert next(stream).text
        del stream
        asyncio.run(wait_until(lambda: in_flight(served) == writer.admission.running == 0))
        assert writer.replies == 0


def test_shutdown_finishes_replies_within_the_grace_period_and_aborts_the_rest(client: ChatLookahead) -> None:
    text = "One word after another.\n\n" * 30
    with serving_private_api(scripted_chat(text), digest(client)):
        stream = client.stream("?", max_tokens=1000)
        begun = next(stream).text
    assert begun + "".join(chunk.text for chunk in stream) == text
    served = scripted_chat(LONG)
    with serving_private_api(served, digest(client), grace=0.01):
        stream = client.stream("?", max_tokens=1_000_000)
        assert next(stream).text
    with pytest.raises(EngineError, match="ended while it generated"):
        list(stream)
    asyncio.run(wait_until(lambda: in_flight(served) == 0))


def test_client_ignores_a_daemon_with_other_engines(client: ChatLookahead, caplog: pytest.LogCaptureFixture) -> None:
    served = scripted_chat("These are other engines.")
    with serving_private_api(served, "others") as writer:
        assert client.explain() == "the engines are not running: call start()"
        with pytest.raises(LookaheadError):
            client.invoke("?")  # tries to start its own engines, without weights
        assert "the daemon runs other models" in caplog.text
        for path in (CHAT_PATH, WARM_PATH):
            response = post_as(client, "{}", path)
            assert (response.status_code, response.json()["error"]["type"]) == (409, "invalid_request_error")
        assert writer.replies == 0
    without_daemon = client.model_copy(update={"use_daemon": False})
    with serving_private_api(served, digest(client)):
        assert client.invoke("?").text == "These are other engines."
        with pytest.raises(LookaheadError):
            without_daemon.invoke("?")


def post_as(client: ChatLookahead, content: str, path: str = CHAT_PATH) -> httpx.Response:
    """Send a body with the engines header of a client."""
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(socket_path())), base_url="http://localhost") as sender:
        return sender.post(path, content=content, headers={ENGINES_HEADER: digest(client)})


def test_status_is_none_without_a_listening_private_socket() -> None:
    assert background.run(server_status()) is None
    socket_path().touch()
    assert not is_private(socket_path()), "a regular file is not a socket"
    assert background.run(server_status()) is None
    with bind_socket():
        assert is_private(socket_path())
        assert background.run(server_status()) is None, "the socket does not listen yet"
    with bind_socket():  # replaces the stale socket
        os.chmod(socket_path().parent, 0o755)
        assert not is_private(socket_path()), "other users could have created the socket"


def test_start_lock_is_exclusive() -> None:
    with (
        start_lock(),
        pytest.raises(ConfigurationError, match="another `up` or `down` is in progress: see `lookahead-agent status`"),
        start_lock(),
    ):
        pytest.fail("two processes have the right to the socket")
    with start_lock():
        pass


LOADING = """
import time
from lookahead_agent.server.daemon import bind_socket, start_lock
with start_lock() as lock, bind_socket():
    print("loading", flush=True)
    input()
    lock.truncate(0)
    print("listening", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("listens", [False, True])
def test_down_ends_a_loading_daemon_and_no_second_signal_disturbs_an_ending_one(
    listens: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The terminal that started a loading daemon may be gone, and its socket does not respond yet."""
    argv = [sys.executable, "-c", LOADING, "--foreground"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as daemon:
        assert daemon.stdin is not None
        assert daemon.stdout is not None
        assert daemon.stdout.readline() == "loading\n"
        if listens:
            print(file=daemon.stdin, flush=True)
            assert daemon.stdout.readline() == "listening\n"
        assert run_command(["status"]) == 3
        assert (f"process {daemon.pid} is loading them" in capsys.readouterr().err) is not listens
        assert run_command(["down"]) == 0
        if listens:
            assert daemon.poll() is None
            daemon.kill()
        daemon.wait(timeout=60)  # a process leaves its lock before its parent can reap it
    assert find_starting_pid() is None, "a file without a lock means nothing"


def test_peer_of_an_own_socket_is_this_process() -> None:
    here, there = socket.socketpair(socket.AF_UNIX)
    with here, there:
        assert peer(here) == (os.getpid(), True)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can connect as another user")
def test_daemon_refuses_connections_of_other_users(tmp_path: Path) -> None:
    with serving_private_api(scripted_chat("Mine."), "digest"):
        open_socket = tmp_path / "opened"
        for folder in (tmp_path, *tmp_path.parents[:2]):
            folder.chmod(0o755)
        os.link(socket_path(), open_socket)
        open_socket.chmod(0o666)
        script = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.sendall("
        script += "b'GET /health HTTP/1.0\\r\\n\\r\\n'); print(s.recv(100))"
        for user, expected in ((0, "200 OK"), (65534, "")):
            process = subprocess.run(
                ["/usr/bin/env", "python3", "-c", script, str(open_socket)],
                user=user,
                cwd="/",
                capture_output=True,
                text=True,
                check=False,
            )
            assert expected in process.stdout
            assert ("200 OK" in process.stdout) == (user == 0), process.stderr


def test_error_of_an_unresponsive_daemon_names_the_kill_command(client: ChatLookahead) -> None:
    with bind_socket() as listener:
        listener.listen()  # but never accepts, like a stopped process
        with pytest.raises(
            EngineError, match=rf"\(process {os.getpid()}\) has not answered for 0.2 s: `kill -9 {os.getpid()}`"
        ):
            background.run(server_status(seconds=0.2))


@pytest.mark.parametrize("answers", [False, True])
def test_a_silent_daemon_delays_a_call_by_a_moment_and_engines_here_serve_it(
    client: ChatLookahead, caplog: pytest.LogCaptureFixture, answers: bool
) -> None:
    with bind_socket() as listener:
        listener.listen()
        connections: list[socket.socket] = []

        def accept() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    connections.append(connection)
                    connection.recv(65536)
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")  # and never the rest

        if answers:
            threading.Thread(target=accept, daemon=True).start()
        assert background.run(find_server(digest(client), seconds=0.2)) is None
        assert "engines of this process generate the reply" in caplog.text
        assert f"`kill -9 {os.getpid()}`" in caplog.text
        listener.shutdown(socket.SHUT_RDWR)
    for connection in connections:
        connection.close()


def test_a_call_asks_the_daemon_for_its_status_once(client: ChatLookahead) -> None:
    paths: list[str] = []
    served = scripted_chat("Fine.")
    with serving_private_api(served, digest(client)) as writer:
        original = writer.context_length

        async def count() -> int:
            paths.append("status")
            return await original()

        writer.context_length = count  # type: ignore[method-assign]
        for calls in (1, 2):
            assert client.invoke("?").text == "Fine."
            assert len(paths) == calls


def test_a_daemon_that_goes_silent_within_a_reply_fails_it(client: ChatLookahead) -> None:
    def respond(_: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("nothing arrives")

    backend = ServerBackend(STATUS, httpx.MockTransport(respond))
    with pytest.raises(EngineError, match=r"\(process 1\) has not answered for 60 s: `kill -9 1`"):
        list(background.stream(partial(backend.emit_reply, full_request(client))))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"\xff", b'{"error": 1}', b"<html>", b"[" * (1 << 22)])
def test_an_error_that_is_none_raises_one_engine_error(client: ChatLookahead, content: bytes) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(502, content=content))
    with pytest.raises(EngineError, match="answered with status 502"):
        list(background.stream(partial(ServerBackend(STATUS, transport).emit_reply, full_request(client))))


async def test_a_reply_without_events_has_signs_of_life() -> None:
    released = asyncio.Event()

    async def items() -> AsyncGenerator[int, None]:
        yield 1
        await released.wait()
        yield 2

    received: list[int | None] = []
    async for item in with_pings(items(), 0.01):
        received.append(item)
        if received.count(None) == 3:
            released.set()
    assert [item for item in received if item is not None] == [1, 2]
    assert received[0] == 1
    assert received[-1] == 2


def test_a_request_to_the_daemon_starts_no_models(client: ChatLookahead) -> None:
    target = ScriptedEngine(ScriptedTokenizer(), reply_script("Fine."))
    with serving_private_api(ChatLookahead(engines=EngineSet(target), policy="off"), digest(client)):
        assert client.invoke("?").text == "Fine."
        for policy in ("random", "balanced:depth=4", "specreason"):
            with pytest.raises(PolicyError, match=r"do not run here \(draft.*--start-models"):
                client.invoke("?", policy=policy)


@pytest.mark.parametrize("damage", ["directory", "pipe", "link", "text", "digits", "bytes", "long"])
def test_damaged_files_of_the_daemon_are_one_clear_error_or_none(damage: str) -> None:
    contents = {"text": b"no process", "digits": b"9" * 4000, "bytes": b"\xff\x00", "long": b"1" * (4 << 20)}
    for path in (private_dir() / "lock", log_path()):
        match damage:
            case "directory":
                path.mkdir()
            case "pipe":
                os.mkfifo(path)
            case "link":
                path.symlink_to("/etc/hostname")
            case _:
                path.write_bytes(contents[damage])
                path.chmod(0o666)
    with bind_socket():
        assert find_starting_pid() is None
    if damage in contents:
        with start_lock():
            assert (private_dir() / "lock").stat().st_mode & 0o777 == 0o600
        return
    with (
        pytest.raises(ConfigurationError, match=f"no server can listen in .*lock.*{RUNTIME_DIR_VARIABLE}"),
        start_lock(),
    ):
        pytest.fail("holds a lock on it")
    (private_dir() / "lock").rmdir() if damage == "directory" else (private_dir() / "lock").unlink()
    with pytest.raises(ConfigurationError, match=rf"no server can listen in .*log.*{RUNTIME_DIR_VARIABLE}"):
        start_daemon([], print)


def test_a_stopped_daemon_ends_down_with_an_error_at_once() -> None:
    process = subprocess.Popen(["sleep", "100"])
    try:
        daemon = psutil.Process(process.pid)
        daemon.suspend()
        asyncio.run(wait_until(lambda: daemon.status() == psutil.STATUS_STOPPED))
        with pytest.raises(EngineError, match=rf"process {process.pid} is stopped: `kill -9 {process.pid}`"):
            wait_for_end(daemon)
    finally:
        process.kill()
        process.wait()
    wait_for_end(daemon)


@pytest.mark.parametrize("body", ["{}", '{"pid": 1, "models": "' + "x" * (4 << 20)])
def test_server_of_another_version_is_an_error_for_commands_and_none_for_calls(
    client: ChatLookahead, caplog: pytest.LogCaptureFixture, body: str
) -> None:
    with bind_socket() as listener:
        listener.listen()

        def respond() -> None:
            for _ in range(2):
                listener.accept()[0].close()
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65536)
                    length = len(body) if len(body) < 100 else 1 << 40  # the long one is endless
                    with suppress(ConnectionError):
                        connection.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n{body}".encode())

        thread = threading.Thread(target=respond)
        thread.start()
        problem = f"not a server of this version: `kill {os.getpid()}`"
        with pytest.raises(EngineError, match=problem):
            background.run(server_status())
        assert background.run(find_server(digest(client))) is None
        assert f"engines of this process generate the reply: process {os.getpid()}" in caplog.text
        assert problem in caplog.text
        thread.join()


SERVER = """
import sys
from lookahead_agent.server.daemon import bind_socket, daemon_settings
from lookahead_agent.server.uvicorn_server import run_server
from lookahead_agent.testing import scripted_chat

llm = scripted_chat("One word after another.\\n\\n" * 500, policy="off")
with bind_socket() as listener:
    listener.listen()
    print("ready", flush=True)
    run_server(llm, daemon_settings(sys.argv[1]), listener, grace=60)
"""


def test_killed_daemon_raises_engine_error_and_its_stale_socket_is_replaced(client: ChatLookahead) -> None:
    for _ in range(2):
        process = subprocess.Popen([sys.executable, "-c", SERVER, digest(client)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", "the stale socket of a killed daemon does not block a start"
        reply = client.stream("?", max_tokens=10_000)
        assert next(reply).text
        process.kill()
        with pytest.raises(EngineError, match="ended while it generated"):
            list(reply)
        process.communicate()
        assert background.run(server_status()) is None
        assert socket_path().exists()
    with pytest.raises(LookaheadError):
        client.invoke("?")  # tries to start its own engines, without weights


def test_start_daemon_forwards_its_log_until_ready_and_reports_a_failed_start() -> None:
    log_lines: list[str] = []
    loading = (
        'import sys, time; print("Loading …"); print("half", end="", flush=True); time.sleep(0.5); print(" a line")'
    )
    pid = start_daemon(["digest"], log_lines.append, loading + SERVER)
    try:
        status = background.run(server_status())
        assert status is not None
        assert (status.pid, status.engines) == (pid, "digest")
        assert log_lines[:2] == ["Loading …", "half a line"]
    finally:
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)
    assert background.run(server_status()) is None
    with pytest.raises(EngineStartError, match="did not start: no memory") as error:
        start_daemon([], log_lines.append, "import sys; print('Loading …'); sys.exit('Error: no memory')")
    assert str(log_path()) in str(error.value)


FORKED = """
import multiprocessing, sys
from lookahead_agent import ChatLookahead
from lookahead_agent.cli.app import run_command

llm = ChatLookahead(model=sys.argv[1], policy="off", max_tokens=50)
assert llm.invoke("q").text == "Fine."

def ask(_):
    return llm.invoke("q").text

with multiprocessing.get_context("fork").Pool(2) as pool:
    print(pool.map_async(ask, range(4)).get(60) == ["Fine."] * 4)
print(llm.invoke("q").text == "Fine.", flush=True)
"""


def test_forked_processes_use_the_daemon(client: ChatLookahead) -> None:
    with serving_private_api(scripted_chat("Fine."), digest(client)) as writer:
        process = subprocess.run(
            [sys.executable, "-c", FORKED, client.model], capture_output=True, text=True, timeout=100, check=False
        )
        assert process.stdout.split() == ["True", "True"], process.stderr
        assert writer.replies == 6


@pytest.mark.parametrize(
    "content", ["", "{[", "[]", "{}", '{"lookahead": 1}', '{"lookahead": {"id": "1"}}', "[" * 100_000, '"\\ud800"']
)
def test_malformed_requests_get_400_and_the_daemon_keeps_serving(client: ChatLookahead, content: str) -> None:
    with serving_private_api(scripted_chat("Fine."), digest(client)):
        for path in (CHAT_PATH, WARM_PATH):
            response = post_as(client, content, path)
            assert response.status_code == 400
            assert "cannot be read" in response.json()["error"]["message"]
        assert client.invoke("?").text == "Fine."


def test_clients_without_the_engines_header_get_the_public_api(client: ChatLookahead) -> None:
    body = {"messages": [{"role": "user", "content": "?"}], "stream": True}
    with serving_private_api(scripted_chat("One.\n\nTwo."), digest(client)):
        transport = httpx.HTTPTransport(uds=str(socket_path()))
        with httpx.Client(transport=transport, base_url="http://localhost") as http_client:
            stream = http_client.post(CHAT_PATH, json=body).text
            assert http_client.post(WARM_PATH, json=body).status_code == 409
    chunks = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    assert all(chunk["choices"] for chunk in chunks), "no chunk carries only step events"
    assert [chunk["lookahead"].keys() for chunk in chunks if "lookahead" in chunk] == [
        {"policy", "steps", "accepted", "acceptance_rate", "thinking_ended_by_budget", "speculation_disabled"}
    ]
    with serving(scripted_chat("Fine.")) as (url, _):  # the public server, for other programs
        extra = {**body, "lookahead": {}}
        response = httpx.post(url + CHAT_PATH, json=extra, headers={ENGINES_HEADER: digest(client)})
        assert response.status_code == 400
        assert httpx.get(url + "/v1/lookahead/status").status_code == 404
        assert httpx.post(url + WARM_PATH, json=extra, headers={ENGINES_HEADER: digest(client)}).status_code == 404


STATUS = ServerStatus(
    pid=1, engines="", models="", reason="", context_length=1, version="", seconds=0, replies=0, running=0
)


@pytest.mark.parametrize(
    "data", ["{", "[]", "1", "{}", '{"choices": [{}]}', '{"choices": [], "lookahead": {"reply": {}}}', "[" * 200_000]
)
def test_malformed_events_raise_engine_error(client: ChatLookahead, data: str) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=f"data: {data}\n\n".encode()))
    with pytest.raises(EngineError, match="no event of this version"):
        list(background.stream(partial(ServerBackend(STATUS, transport).emit_reply, full_request(client))))


def test_event_without_an_end_raises_engine_error(client: ChatLookahead) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=b"x" * (17 << 20)))
    with pytest.raises(EngineError, match="sent an event of more than 16 MiB"):
        list(background.stream(partial(ServerBackend(STATUS, transport).emit_reply, full_request(client))))


def test_stream_without_a_reply_raises_engine_error(client: ChatLookahead) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=b"data: [DONE]\n\n"))
    with pytest.raises(EngineError, match="ended while it generated"):
        list(background.stream(partial(ServerBackend(STATUS, transport).emit_reply, full_request(client))))


def full_request(client: ChatLookahead, policy: VerifierPolicy | None = None) -> Any:
    """Return a request that sets every option."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    options = CallOptions(
        policy=policy, tools=tools, template_arguments={"enable_thinking": False}, seed=3, stop=["stop"]
    )
    return client.request([HumanMessage("?")], options)


def test_requests_survive_a_json_round_trip(client: ChatLookahead) -> None:
    for policy in (
        VerifierPolicy(verifier="exact", delimiter=re.compile(r"\n+", re.MULTILINE)),
        VerifierPolicy(verifier="off").with_selection_rule("a rule"),
        VerifierPolicy(verifier="cascade", similarity=0.9, depth=3),
    ):
        request = full_request(client, policy)
        arrived = request_from_json(json.loads(json.dumps(request_to_json(request))))
        assert arrived == request
        assert arrived.selection_rule == request.policy.rule is not None


def test_arguments_that_json_cannot_encode_raise_configuration_error(client: ChatLookahead) -> None:
    with (
        serving_private_api(scripted_chat("Fine."), digest(client)),
        pytest.raises(ConfigurationError, match="use_daemon"),
    ):
        client.bind(template_arguments={"now": object()}).invoke("?")


def test_runtime_dir_with_a_path_that_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(RUNTIME_DIR_VARIABLE, str(tmp_path / ("long" * 40)))
    with pytest.raises(ConfigurationError, match=RUNTIME_DIR_VARIABLE):
        private_dir()


def test_symlinked_runtime_dir_is_refused_and_its_target_left_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.mkdir()
    target.chmod(0o755)
    link.symlink_to(target)
    monkeypatch.setenv(RUNTIME_DIR_VARIABLE, str(link))
    with pytest.raises(ConfigurationError, match=f"is a symbolic link: set {RUNTIME_DIR_VARIABLE}"):
        private_dir()
    assert target.stat().st_mode & 0o777 == 0o755
    assert list(target.iterdir()) == []
    target.chmod(0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(target / "server.sock"))
        assert is_private(target / "server.sock")
        assert not is_private(link / "server.sock"), "the link could point elsewhere later"
    link.unlink()
    link.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigurationError, match="is a symbolic link"):
        private_dir()
    assert not (tmp_path / "nowhere").exists()


def test_own_runtime_dir_is_restricted_to_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "mine"
    folder.mkdir(mode=0o777)
    monkeypatch.setenv(RUNTIME_DIR_VARIABLE, str(folder))
    assert private_dir() == folder
    assert folder.stat().st_mode & 0o777 == 0o700


def test_runtime_dir_at_or_below_a_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("of somebody")
    for path, message in ((file, "is a file"), (file / "below", "File exists")):
        monkeypatch.setenv(RUNTIME_DIR_VARIABLE, str(path))
        with pytest.raises(ConfigurationError, match=f"{message}.*{RUNTIME_DIR_VARIABLE}"):
            private_dir()
        assert find_starting_pid() is None
    assert file.read_text() == "of somebody"


def test_runtime_dir_of_another_user_is_left_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o755)
    if os.getuid() == 0:
        os.chown(folder, 65534, 65534)
    else:
        folder = Path("/usr")
    before = folder.stat().st_mode
    monkeypatch.setenv(RUNTIME_DIR_VARIABLE, str(folder))
    with pytest.raises(ConfigurationError, match="another user's"):
        private_dir()
    assert folder.stat().st_mode == before


def test_directory_at_the_socket_path_is_refused(tmp_path: Path) -> None:
    socket_path().mkdir()
    with pytest.raises(ConfigurationError, match=r"server\.sock"), bind_socket():
        pytest.fail("listens")
