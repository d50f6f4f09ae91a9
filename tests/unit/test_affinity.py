"""All requests of a reply, and replies of one thread, have one key, which tells nothing of the prompt."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from langchain_core.runnables import RunnableConfig
from langgraph.graph import START, MessagesState, StateGraph
from starlette.testclient import TestClient

from lookahead_agent.chat.model import ChatLookahead
from lookahead_agent.engines import Sampling, ScriptedEngine
from lookahead_agent.engines.affinity import AFFINITY, Affinity, affinity_key
from lookahead_agent.engines.openai_http import OpenAIEngine
from lookahead_agent.engines.protocol import Delta, Engine
from lookahead_agent.engines.servers import RemoteModel, Server
from lookahead_agent.engines.tokenizer import HFTokenizer
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.server import ServerSettings
from lookahead_agent.server.app import create_app
from lookahead_agent.testing import scripted_engines
from tests.unit.fake_vllm import FakeServer, tokenizer_in

SYSTEM = {"role": "system", "content": "Be short."}
FIRST = [SYSTEM, {"role": "user", "content": "What is 2 + 2?"}]
LATER = [*FIRST, {"role": "assistant", "content": "4"}, {"role": "user", "content": "And 3 + 3?"}]


@contextmanager
def keep_together(affinity: Affinity) -> Iterator[None]:
    token = AFFINITY.set(affinity)
    try:
        yield
    finally:
        AFFINITY.reset(token)


def key_of(
    thread: str | None = None, messages: Any = None, prompt: Any = "", salt: str | None = None, key: str | None = None
) -> str:
    with keep_together(Affinity(thread, messages, prompt, salt)):
        found = affinity_key(key)
    assert found is not None
    return found


def test_key_is_that_of_the_thread_or_of_the_conversations_first_question() -> None:
    assert affinity_key(None) is None, "outside a reply"
    assert key_of(messages=FIRST) == key_of(messages=LATER)
    assert key_of(messages=FIRST) != key_of(messages=[SYSTEM, {"role": "user", "content": "What is 2 + 3?"}])
    assert key_of("1", FIRST) == key_of("1", [SYSTEM]) != key_of("2", FIRST)
    assert key_of(prompt="a" * 2000) == key_of(prompt="a" * 2000 + "b") != key_of(prompt="b")
    assert key_of(prompt=[1, 2]) == key_of(prompt=[1, 2]) != key_of(prompt=[1])
    assert len({key_of("1", salt=salt) for salt in (None, "a", "b")}) == 3, "clients share no key"
    assert len({key_of(messages=FIRST, salt=salt) for salt in (None, "a", "b")}) == 3


def test_key_of_a_prompt_cannot_be_computed_elsewhere_and_that_of_a_thread_needs_the_api_key() -> None:
    found = key_of(messages=FIRST)
    assert len(found) == 32
    content = Affinity(None, FIRST, "", None).content
    plain = {hashlib.sha256(text).hexdigest()[:32] for text in (content, b"", json.dumps(FIRST).encode())}
    assert found not in plain
    assert key_of(messages=FIRST, key="secret") == found, "the salt of the process decides"
    assert key_of("1", key="secret") != key_of("1", key="other")


def transport_of(seen: list[httpx.Headers], **sent: Any) -> httpx.MockTransport:
    def respond(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers)
        return httpx.Response(200, json={"data": []}, headers=sent)

    return httpx.MockTransport(respond)


async def ask(server: Server, *threads: str) -> None:
    for thread in threads:
        with keep_together(Affinity(thread, None, "", None)):
            await asyncio.create_task(server.ask("/models"))


async def test_requests_of_a_reply_have_the_named_headers() -> None:
    seen: list[httpx.Headers] = []
    server = Server(RemoteModel("http://one/v1"), "target", transport_of(seen))
    await ask(server, "1", "1", "2")
    await server.ask("/models")
    names = ("X-Session-ID", "X-SMG-Routing-Key")
    keys = [[headers.get(name) for name in names] for headers in seen]
    assert keys == [[key_of("1")] * 2, [key_of("1")] * 2, [key_of("2")] * 2, [None, None]]
    for headers, expected in ((("X-My-Key",), key_of("1")), ((), None)):
        seen.clear()
        other = Server(RemoteModel("http://one/v1", affinity_headers=headers), "draft", transport_of(seen))
        await ask(other, "1")
        assert (seen[0].get("X-My-Key"), seen[0].get("X-Session-ID")) == (expected, None)


async def test_names_of_replicas_go_back_with_the_requests_of_their_reply_only() -> None:
    seen: list[httpx.Headers] = []
    sent = {"X-Session-Token": "cG9kLTE=", "Set-Cookie": "replica=a1; Path=/"}
    server = Server(RemoteModel("http://one/v1"), "target", transport_of(seen, **sent))
    await ask(server, "1", "1", "2")
    await server.ask("/models")
    assert [headers.get("X-Session-Token") for headers in seen] == [None, "cG9kLTE=", None, None]
    assert [headers.get("Cookie") for headers in seen] == [None, "replica=a1", None, None]


@pytest.mark.parametrize("sent", [{"X-Session-Token": "é"}, {"X-Session-Token": "a" * 5000}, {"Set-Cookie": "a=é"}])
async def test_names_of_replicas_that_no_request_can_carry_are_dropped(sent: dict[str, str]) -> None:
    seen: list[httpx.Headers] = []
    raw = {name: value.encode() for name, value in sent.items()}
    await ask(Server(RemoteModel("http://one/v1"), "target", transport_of(seen, **raw)), "1", "1")
    assert [(headers.get("X-Session-Token"), headers.get("Cookie")) for headers in seen] == [(None, None)] * 2


class RankedServer(FakeServer):
    """A vLLM server of data-parallel ranks, which refuses the others."""

    fingerprint: str | None = None
    ranks = 4

    def __init__(self, tokenizer: HFTokenizer, reply: str) -> None:
        super().__init__(tokenizer, reply)
        self.seen: list[str | None] = []
        """Ranks of the requests so far."""

    def __call__(self, request: httpx.Request) -> httpx.Response:
        rank = request.headers.get("X-data-parallel-rank")
        self.seen.append(rank)
        if rank is not None and int(rank) >= self.ranks:
            return httpx.Response(400, json={"error": {"message": "data_parallel_rank is out of range"}})
        response = super().__call__(request)
        if response.headers.get("Content-Type", "").startswith("application/json"):
            return httpx.Response(response.status_code, json=response.json() | {"system_fingerprint": self.fingerprint})
        return response


@pytest.mark.parametrize(
    ("fingerprint", "ranks", "used"),
    [
        ("vllm-0.32.0-tp2-dp4-0123abcd", 4, 4),
        ("vllm-0.32.0-dp4-ep-0123abcd", 2, 1),  # a server of the first half of the ranks
        ("vllm-0.32.0-0123abcd", 4, 1),
        ("another-dp4-server", 4, 1),
        (None, 4, 1),
    ],
)
async def test_rank_of_a_reply_follows_from_its_key_where_the_server_tells_its_ranks(
    tmp_path_factory: pytest.TempPathFactory, fingerprint: str | None, ranks: int, used: int
) -> None:
    tokenizer: HFTokenizer = tokenizer_in(tmp_path_factory.mktemp("tokenizer"))
    server = RankedServer(tokenizer, "aab")
    server.fingerprint, server.ranks = fingerprint, ranks
    engine = OpenAIEngine(RemoteModel("http://one/v1", "model"), tokenizer, transport=httpx.MockTransport(server))
    await engine.connect()
    assert engine.server.ranks == used
    server.seen.clear()
    for thread in map(str, range(32)):
        await ask(engine.server, thread, thread)
    assert server.seen[::2] == server.seen[1::2]
    assert set(server.seen) == ({None} if used == 1 else {"0", "1", "2", "3"})


def test_names_of_headers_are_checked() -> None:
    url = "http://there/v1"
    for name in ("", "X Session", "Authorization", "cookie", "X-A\r\nB", "é"):
        with pytest.raises(ConfigurationError, match="names of HTTP headers"):
            ChatLookahead(base_url=url, policy="off", affinity_headers=(name,))
    with pytest.raises(ConfigurationError, match="affinity_headers is for models behind servers"):
        ChatLookahead(affinity_headers=("X-A",))


def watch(engine: Engine, name: str, seen: list[tuple[str, str | None]]) -> None:
    """Record the keys of an engine's requests."""
    assert isinstance(engine, ScriptedEngine)
    generate = engine.generate

    def recorded(prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Delta, None]:
        seen.append((name, affinity_key(None)))
        return generate(prompt_ids, sampling)

    engine.generate = recorded  # type: ignore[method-assign]


def test_a_server_passes_its_clients_keys_on_to_the_servers_of_its_engines() -> None:
    seen: list[tuple[str, str | None]] = []
    engines = scripted_engines("It is 4.")
    watch(engines.target, "target", seen)
    app = create_app(ChatLookahead(engines=engines, policy="off"), ServerSettings())
    with TestClient(app, base_url="http://localhost") as client:
        for number, headers in enumerate(
            ({"X-Session-ID": "a"}, {"x-session-id": "a"}, {"X-SMG-Routing-Key": "b"}, {})
        ):
            body = {"messages": [{"role": "user", "content": f"Question {number}"}]}
            assert client.post("/v1/chat/completions", headers=headers, json=body).status_code == 200
    assert [key for _, key in seen[:3]] == [key_of("a"), key_of("a"), key_of("b")]
    assert seen[3][1] not in (None, key_of("a"), key_of("b"))


def test_every_request_of_replies_in_threads_has_the_key_of_its_thread() -> None:
    """Target and draft of a graph's replies, with draft steps, in several threads at once."""
    seen: list[tuple[str, str | None]] = []

    engines = scripted_engines("First this.\n\nThen that.\n\nIt is 4.")
    assert engines.draft is not None
    watch(engines.target, "target", seen)
    watch(engines.draft, "draft", seen)
    llm = ChatLookahead(engines=engines, policy="exact", depth=3)
    builder = StateGraph(MessagesState)
    builder.add_node("writer", lambda state: {"messages": [llm.invoke(state["messages"])]})
    builder.add_edge(START, "writer")
    graph = builder.compile()
    question: Any = {"messages": [("human", "What is 2 + 2?")]}
    with ThreadPoolExecutor(4) as threads:
        configs: list[RunnableConfig] = [{"configurable": {"thread_id": name}} for name in "abab"]
        replies = list(threads.map(lambda config: graph.invoke(question, config)["messages"][-1], configs))
        streamed = list(threads.map(lambda config: [*graph.stream(question, config, stream_mode="messages")], configs))
    assert all(reply.response_metadata["lookahead"]["steps"] > 1 for reply in replies)
    assert all(streamed)
    expected = {(role, key_of(name)) for role in ("target", "draft") for name in "ab"}
    assert set(seen) == expected
