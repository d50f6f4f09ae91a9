"""Engines that another process keeps: the socket between, with scripted engines behind it."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool

from lookahead_agent import ChatLookahead
from lookahead_agent.engines import background
from lookahead_agent.errors import ConfigurationError, ContextLengthError, EngineError, LookaheadError
from lookahead_agent.generation.backend import (
    Backend,
    GenerateEvent,
    GenerateRequest,
    TextDelta,
    request_from_json,
    request_to_json,
)
from lookahead_agent.generation.call_options import CallOptions
from lookahead_agent.policy import VerifierPolicy
from lookahead_agent.running.address import (
    FOLDER_VARIABLE,
    is_private,
    listening,
    private_folder,
    socket_path,
)
from lookahead_agent.running.connection import ask_keeper
from lookahead_agent.running.keeper import Keeper
from lookahead_agent.running.report import StartReport, follow
from tests.unit.chat import scripted_chat
from tests.unit.test_streams import said, summed
from tests.waiting import becomes


@tool
def look_up(word: str) -> str:
    """Look a word up."""
    return word


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "running"))
    private_folder()


@pytest.fixture
def client(tmp_path: Path) -> ChatLookahead:
    """A model whose engines could not start: a folder with nothing in it."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return ChatLookahead(model=str(tmp_path / "model"), policy="off", max_tokens=50)


class Generating:
    """A backend whose replies a function generates."""

    def __init__(self, generate: Callable[[GenerateRequest], AsyncGenerator[GenerateEvent, None]]) -> None:
        self.generate = generate


@contextmanager
def keeping(backend: Backend, digest: str, grace: float = 60.0) -> Iterator[Keeper]:
    """A keeper in the background loop."""
    keeper = Keeper(
        backend, digest, lambda: {"engines": digest, "models": "these", "reason": "so", "context_length": 7}
    )
    keeper._grace = grace
    ready = threading.Event()
    with listening() as listener:
        serving = background.submit(keeper.serve(listener, ready.set))
        assert ready.wait(10)
        try:
            yield keeper
        finally:
            background.background_loop().call_soon_threadsafe(keeper.stop)
            serving.result(10)


def test_a_reply_is_that_of_the_engines_themselves(client: ChatLookahead) -> None:
    behind = scripted_chat("One.\n\nTwo.\n\nThree.", policy="exact")
    own: Any = behind.invoke("?", policy="exact")
    with keeping(behind.backend, client.backend.runtime.spec.digest) as keeper:
        reply: Any = client.bind(policy="exact").invoke("?")
        assert (reply.text, reply.usage_metadata) == (own.text, own.usage_metadata)
        told, expected = reply.response_metadata["lookahead"], own.response_metadata["lookahead"]
        assert {name: told[name] for name in ("policy", "steps", "accepted", "tokens")} == {
            name: expected[name] for name in ("policy", "steps", "accepted", "tokens")
        }
        assert told["selection_rule"] == "the call's own argument"
        assert "".join(chunk.text for chunk in client.stream("?")) == own.text
        assert "".join(chunk.text for chunk in behind.stream("?")) == own.text
        assert client.explain() == "so"
        client.start()
        assert keeper._replies == 2
    assert not socket_path().exists()


def test_tools_structures_events_and_errors_cross_over(client: ChatLookahead) -> None:
    calling = scripted_chat('<tool_call>{"name": "look_up", "arguments": {"word": "a"}}</tool_call>')
    with keeping(calling.backend, client.backend.runtime.spec.digest):
        assert client.bind_tools([look_up]).invoke("?").tool_calls[0]["args"] == {"word": "a"}
    structured = scripted_chat('{"number": 4}')
    with keeping(structured.backend, client.backend.runtime.spec.digest):
        schema = {"title": "a", "type": "object", "properties": {"number": {"type": "integer"}}}
        assert client.with_structured_output(schema).invoke("?") == {"number": 4}
    stepwise = scripted_chat("One.\n\nTwo.")
    with keeping(stepwise.backend, client.backend.runtime.spec.digest):
        listener = _Listener()
        client.invoke("?", {"callbacks": [listener]}, policy="exact")
        assert listener.kinds >= {"drafted", "accepted"}

    async def refuse(request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        raise ContextLengthError("too long by 3")
        yield

    with (
        keeping(Generating(refuse), client.backend.runtime.spec.digest),
        pytest.raises(ContextLengthError, match="too long by 3"),
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
def test_calls_cross_over_as_they_are(client: ChatLookahead, text: str) -> None:
    behind = scripted_chat(text)
    own = said(behind.bind_tools([look_up]).invoke("?"))
    with keeping(behind.backend, client.backend.runtime.spec.digest):
        bound = client.bind_tools([look_up])
        assert said(bound.invoke("?")) == own
        assert said(summed(bound.stream("?"))) == own


class _Listener(BaseCallbackHandler):
    def __init__(self) -> None:
        self.kinds: set[str] = set()

    def on_custom_event(self, name: str, data: Any, **_: Any) -> None:
        self.kinds.add(data["kind"])


def test_a_client_that_leaves_leaves_nothing_running(client: ChatLookahead) -> None:
    started, ended = threading.Event(), threading.Event()

    async def write(request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        yield TextDelta("answer", "never")

    async def leave() -> None:
        call = asyncio.create_task(client.ainvoke("?"))
        await asyncio.to_thread(started.wait, 10)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    with keeping(Generating(write), client.backend.runtime.spec.digest) as keeper:
        asyncio.run(leave())
        assert ended.wait(10)
        asyncio.run(becomes(lambda: not keeper._running))


def test_replies_that_take_too_long_at_the_end_are_ended(client: ChatLookahead) -> None:
    started = threading.Event()

    async def write(request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        started.set()
        await asyncio.Event().wait()
        yield TextDelta("answer", "never")

    with keeping(Generating(write), client.backend.runtime.spec.digest, grace=0.01):
        future = background.submit(client.ainvoke("?"))
        assert started.wait(10)
    with pytest.raises(EngineError, match="stopped"):
        future.result(10)


def test_other_engines_are_not_taken(client: ChatLookahead, caplog: pytest.LogCaptureFixture) -> None:
    behind = scripted_chat("These are other engines.")
    with keeping(behind.backend, "others"):
        assert client.explain() == "the engines are not running: call start()"
        with pytest.raises(LookaheadError):
            client.invoke("?")  # it starts engines of its own, of a folder with nothing in it
        assert "are not these" in caplog.text
    without = client.model_copy(update={"use_daemon": False})
    with keeping(behind.backend, client.backend.runtime.spec.digest):
        assert client.invoke("?").text == "These are other engines."
        with pytest.raises(LookaheadError):
            without.invoke("?")


def test_nobody_there() -> None:
    assert background.run(ask_keeper("status")) is None
    socket_path().touch()
    assert not is_private(socket_path()), "a file is no socket"
    assert background.run(ask_keeper("status")) is None
    with listening():
        assert is_private(socket_path())
    with listening():  # in place of what was left
        os.chmod(socket_path().parent, 0o755)
        assert not is_private(socket_path()), "others could have put it there"


def test_a_keeper_that_does_not_answer_is_named_with_how_to_end_it(client: ChatLookahead) -> None:
    with listening() as listener:
        listener.listen()  # and nobody accepts, as of a process that is stopped
        with pytest.raises(
            EngineError, match=rf"\({os.getpid()}\) has not answered for 0.2 s: `kill -9 {os.getpid()}`"
        ):
            background.run(ask_keeper("status", patience=0.2))


KEEPER = """
import os, sys
from lookahead_agent.engines import background
from lookahead_agent.running.address import listening
from lookahead_agent.running.keeper import Keeper
from lookahead_agent.testing import scripted_chat

llm = scripted_chat("One word after another.\\n\\n" * 500, policy="off")
about = lambda: {"engines": sys.argv[1], "models": "these", "reason": "so", "context_length": 7}
keeper = Keeper(llm.backend, sys.argv[1], about)
with listening() as listener:
    background.run(keeper.serve(listener, lambda: print("ready", flush=True)))
"""


def test_a_keeper_that_is_killed_while_it_writes_is_one_clear_error_and_leaves_nothing_in_the_way(
    client: ChatLookahead,
) -> None:
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", KEEPER, client.backend.runtime.spec.digest], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", "the socket that a killed keeper has left is not in the way"
        reply = client.stream("?", max_tokens=10_000)
        assert next(reply).text
        process.kill()
        with pytest.raises(EngineError, match=r"ended (while they wrote|in the middle)"):
            list(reply)
        process.communicate()
        assert background.run(ask_keeper("status")) is None
        assert socket_path().exists()
    with pytest.raises(LookaheadError):
        client.invoke("?")  # it starts engines of its own, of a folder with nothing in it


def test_bad_frames_end_their_connection_only(client: ChatLookahead) -> None:
    behind = scripted_chat("Fine.")

    async def send(content: bytes) -> bytes:
        reader, writer = await asyncio.open_unix_connection(socket_path())
        writer.write(content)
        writer.write_eof()
        answer = await reader.read()
        writer.close()
        return answer

    with keeping(behind.backend, client.backend.runtime.spec.digest):
        for content in (
            b"",
            b"\x00",
            b"\xff\xff\xff\xff",
            b"\x00\x00\x00\x02[]",
            b"\x00\x00\x00\x02{}",
            b"\x00\x00\x00\x02{[",
        ):
            answer = asyncio.run(send(content))
            assert b"reply" not in answer
        assert client.invoke("?").text == "Fine."


def test_orders_arrive_as_they_were(client: ChatLookahead) -> None:
    for policy in (
        VerifierPolicy(verifier="exact", delimiter=re.compile(r"\n+", re.MULTILINE)),
        VerifierPolicy(verifier="off").with_selection_rule("a rule"),
        VerifierPolicy(verifier="cascade", similarity=0.9, depth=3),
    ):
        request = client.request([HumanMessage("?")], _options(policy))
        arrived = request_from_json(_through_json(request_to_json(request)))
        assert arrived == request
        assert arrived.selection_rule == request.policy.rule is not None


def test_what_json_cannot_say_is_an_error(client: ChatLookahead) -> None:
    behind = scripted_chat("Fine.")
    with (
        keeping(behind.backend, client.backend.runtime.spec.digest),
        pytest.raises(ConfigurationError, match="use_daemon"),
    ):
        client.bind(template_arguments={"now": object()}).invoke("?")


def _options(policy: VerifierPolicy) -> Any:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    return CallOptions(policy=policy, tools=tools, template_arguments={"enable_thinking": False}, seed=3, stop=["stop"])


def _through_json(frame: dict[str, Any]) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(json.dumps(frame))
    return read


class _Seen:
    def __init__(self) -> None:
        self.told: list[str] = []

    @contextmanager
    def task(self, description: str, total: float | None = None) -> Iterator[Any]:
        self.told.append(f"{description} of {total}")
        yield self
        self.told.append(f"{description} done")

    def advance(self, done: float) -> None:
        self.told.append(str(done))


def test_a_start_is_followed() -> None:
    reader, writer = os.pipe()
    report = StartReport(writer)
    with report.task("Loading", 3) as task:
        task.advance(2)
    report.ready(42)
    with report.task("later"):  # nobody listens, and nobody minds
        pass
    seen = _Seen()
    with os.fdopen(reader) as lines:
        assert follow(lines, seen) == 42
    assert seen.told == ["Loading of 3", "2", "Loading done"]
    assert follow(io.StringIO('{"task": 0, "begins": "Loading", "total": null}\n'), _Seen()) is None


def test_a_start_that_nobody_follows_goes_on() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    report = StartReport(writer)
    with report.task("Loading"):
        pass
    report.ready(1)


def test_a_folder_that_cannot_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / ("long" * 40)))
    with pytest.raises(ConfigurationError, match=FOLDER_VARIABLE):
        private_folder()


def test_a_link_in_the_folders_place_is_refused_and_its_target_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.mkdir()
    target.chmod(0o755)
    link.symlink_to(target)
    monkeypatch.setenv(FOLDER_VARIABLE, str(link))
    with pytest.raises(ConfigurationError, match=f"is a symbolic link: set {FOLDER_VARIABLE}"):
        private_folder()
    assert target.stat().st_mode & 0o777 == 0o755
    assert list(target.iterdir()) == []
    target.chmod(0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(target / "engines.sock"))
        assert is_private(target / "engines.sock")
        assert not is_private(link / "engines.sock"), "the link could lead elsewhere tomorrow"
    link.unlink()
    link.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigurationError, match="is a symbolic link"):
        private_folder()
    assert not (tmp_path / "nowhere").exists()


def test_a_folder_of_ones_own_is_closed_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "mine"
    folder.mkdir(mode=0o777)
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder))
    assert private_folder() == folder
    assert folder.stat().st_mode & 0o777 == 0o700


def test_what_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("of somebody")
    for place, message in ((file, "is a file"), (file / "below", "File exists")):
        monkeypatch.setenv(FOLDER_VARIABLE, str(place))
        with pytest.raises(ConfigurationError, match=f"{message}.*{FOLDER_VARIABLE}"):
            private_folder()
    assert file.read_text() == "of somebody"


def test_a_folder_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o755)
    if os.getuid() == 0:
        os.chown(folder, 65534, 65534)
    else:
        folder = Path("/usr")
    before = folder.stat().st_mode
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder))
    with pytest.raises(ConfigurationError, match="another user's"):
        private_folder()
    assert folder.stat().st_mode == before


def test_a_folder_in_the_sockets_place(tmp_path: Path) -> None:
    socket_path().mkdir()
    with pytest.raises(ConfigurationError, match=r"engines\.sock"), listening():
        pytest.fail("listens")
