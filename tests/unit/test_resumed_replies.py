"""A reply goes on from its tokens when its engine fails: it is the reply of an engine that does not."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from langchain_core.messages import AIMessage
from langchain_core.tools import tool

from lookahead_agent import ChatLookahead
from lookahead_agent.chat.structured_output import Form
from lookahead_agent.decoding import DecodingSettings, Reply, ReplyRequest, lookahead
from lookahead_agent.engines import Sampling, ScriptedEngine, ScriptedTokenizer
from lookahead_agent.engines.affinity import AFFINITY, Affinity
from lookahead_agent.engines.chat_template import ThinkingTags
from lookahead_agent.engines.continuation import Continuation, UnavailableError
from lookahead_agent.engines.openai_http import OpenAIEngine
from lookahead_agent.engines.protocol import Delta, Engine
from lookahead_agent.engines.scripted import Script, ScriptedStep
from lookahead_agent.engines.servers import RemoteModel
from lookahead_agent.engines.vllm_config import VLLMConfig
from lookahead_agent.engines.vllm_engine import VLLMEngine
from lookahead_agent.errors import ConfigurationError, EngineError
from lookahead_agent.runtime.engine_set import EngineSet
from lookahead_agent.verifiers.model_free import ExactVerifier
from tests.unit.chat import EqualTextEmbedder
from tests.unit.test_calls_and_forms import TAGGED, Weather, thermometer
from tests.virtual_time import run_in_virtual_time

REPLY = "Two é and\n\nthree make\n\nfive."
PLACES = len(ScriptedTokenizer().encode(REPLY)) + 1


def event(**choice: Any) -> bytes:
    fields = {"index": 0, "text": "é", "finish_reason": None, **choice}
    return b"data: " + json.dumps({"choices": [fields]}, ensure_ascii=False).encode() + b"\n\n"


class DyingServer(httpx.AsyncBaseTransport):
    """A server on a scripted engine, whose streams end at given tokens.

    Args:
        engine: Generates the tokens.
        deaths: Numbers of tokens, over all requests, before which a stream ends.
        way: How it ends.
        away: Responses, or errors, of the requests after each death.
    """

    def __init__(
        self, engine: ScriptedEngine, deaths: Iterable[int] = (), way: str = "lost", away: Sequence[Any] = ()
    ) -> None:
        self.engine = engine
        self.deaths = sorted(deaths)
        self.way = way
        self.away = list(away)
        self.pending: list[Any] = []
        self.sent = 0
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[httpx.Headers] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.headers.append(request.headers)
        if self.pending:
            answer = self.pending.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return httpx.Response(**answer)
        self.bodies.append(json.loads(await request.aread()))
        return httpx.Response(200, stream=_Stream(self._events(self.bodies[-1])), headers={"X-Session-Token": "a"})

    async def _events(self, body: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        sampling = Sampling(body["max_tokens"], structured=body.get("response_format"))
        async with aclosing(self.engine.generate(body["prompt"], sampling)) as deltas:
            async for delta in deltas:
                if self.deaths and self.sent >= self.deaths[0]:
                    self.deaths.pop(0)
                    self.pending = list(self.away)
                    async for last in self._die(delta):
                        yield last
                    return
                self.sent += 1
                yield event(token_ids=delta.token_ids, finish_reason=delta.finish_reason)
        yield b"data: [DONE]\n\n"

    async def _die(self, delta: Delta) -> AsyncIterator[bytes]:
        whole = event(token_ids=delta.token_ids, finish_reason=delta.finish_reason)
        match self.way:
            case "lost":
                raise httpx.ReadError("connection lost")
            case "in a character":
                yield whole[: whole.index("é".encode()) + 1]
            case "between lines":
                yield b"data:"
            case "error":
                yield b'data: {"error": {"message": "EngineCore encountered an issue", "code": 500}}\n\n'
                yield b"data: [DONE]\n\n"
            case "abort":
                yield event(token_ids=[], finish_reason="abort")
            case "after the token":
                self.sent += 1
                yield whole
                raise httpx.RemoteProtocolError("incomplete chunked read")


class _Stream(httpx.AsyncByteStream):
    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        self._events = events

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._events:
            yield part

    async def aclose(self) -> None:
        await self._events.aclose()


def script_of(reply: str) -> Script:
    """The rest of a reply after any of its tokens."""
    return lambda _, written: [ScriptedStep(reply[len(written.removeprefix("<think>\n")) :])]


WAYS = ("lost", "ended", "in a character", "between lines", "error", "abort", "after the token")
REFUSED = httpx.ConnectError("connection refused")


def engine_on(server: DyingServer, **fields: Any) -> OpenAIEngine:
    remote = RemoteModel("http://one/v1", **{"model": "model", "timeout": 60.0, **fields})
    return OpenAIEngine(remote, server.engine.tokenizer, transport=server)  # type: ignore[arg-type]


def server_of(reply: str = REPLY, deaths: Iterable[int] = (), **fields: Any) -> DyingServer:
    return DyingServer(ScriptedEngine(ScriptedTokenizer(), script_of(reply)), deaths, **fields)


async def decode(
    target: Engine, tokenizer: ScriptedTokenizer, draft: bool = False, **sampling: Any
) -> tuple[Reply, str]:
    """The reply, and its text as it was streamed."""
    request = ReplyRequest(tuple(tokenizer.encode("user: ?\nassistant: ")), Sampling(**{"max_tokens": 50, **sampling}))
    written: list[str] = []
    helper = ScriptedEngine(tokenizer, script_of(REPLY.replace("make", "gives"))) if draft else None
    verifier = ExactVerifier() if draft else None
    settings = DecodingSettings(depth=3)
    reply = await lookahead(request, target, helper, verifier, settings, written.append)
    return reply, "".join(written)


async def decode_on(server: DyingServer, draft: bool = False, **sampling: Any) -> Reply:
    engine = engine_on(server)
    reply, streamed = await decode(engine, server.engine.tokenizer, draft, **sampling)
    assert streamed.startswith(reply.text)
    assert engine.in_flight == server.engine.in_flight == 0
    assert reply.report.target_tokens.committed + reply.report.draft_tokens.committed == len(reply.token_ids)
    return reply


@pytest.mark.parametrize("way", WAYS)
def test_a_death_at_every_token_changes_no_token(way: str) -> None:
    expected = run_in_virtual_time(decode_on(server_of()))
    assert expected.text == REPLY
    for place in range(PLACES):
        server = server_of(deaths=[place], way=way, away=[REFUSED, {"status_code": 502}] if place else [])
        reply = run_in_virtual_time(decode_on(server))
        assert server.deaths == []
        assert (reply.text, len(reply.token_ids)) == (REPLY, PLACES), place
        assert (reply.finish_reason, reply.truncated) == ("stop", False)
        # A reply whose last token has arrived is complete.
        is_complete = way == "after the token" and place == PLACES - 1
        assert reply.report.resumptions == int(not is_complete and (place > 0 or way == "after the token"))
    assert len(server.bodies[0]["prompt"]) + 50 == len(server.bodies[-1]["prompt"]) + server.bodies[-1]["max_tokens"]


@pytest.mark.parametrize(
    ("draft", "sampling"),
    [(True, {}), (False, {"stop": ("five",)}), (True, {"stop": ("make\n\nfi",)}), (False, {"max_tokens": 6})],
)
def test_steps_stop_strings_and_limits_hold_across_deaths(draft: bool, sampling: dict[str, Any]) -> None:
    expected = run_in_virtual_time(decode_on(server_of(), draft, **sampling))
    for place in range(1, expected.report.target_tokens.total):
        for deaths in ([place], [place, place + 1, place + 3]):
            reply = run_in_virtual_time(decode_on(server_of(deaths=deaths), draft, **sampling))
            assert (reply.text, reply.finish_reason, reply.truncated) == (
                expected.text, expected.finish_reason, expected.truncated,
            )  # fmt: skip
            assert len(reply.token_ids) == len(expected.token_ids)
            assert reply.report.speculation_disabled is None


async def test_200_replies_at_once_with_random_deaths_are_all_whole() -> None:
    chance = random.Random(7)
    servers = [
        server_of(REPLY.replace("five", f"number {number}"), sorted(chance.sample(range(1, 16), chance.randint(0, 4))))
        for number in range(200)
    ]
    replies = await asyncio.gather(*(decode_on(server, draft=number % 2 == 1) for number, server in enumerate(servers)))
    for number, reply in enumerate(replies):
        assert reply.text == REPLY.replace("five", f"number {number}")
    assert sum(reply.report.resumptions for reply in replies) > 100


@pytest.mark.parametrize("has_served", [True, False])
@pytest.mark.parametrize("status", [502, 503, 504, 500, None])
def test_a_new_reply_waits_for_a_balancer_that_has_served(status: int | None, has_served: bool) -> None:
    """An engine that has ended for good, or a wrong address, is an error at once."""
    server = server_of()
    engine = engine_on(server, max_retries=1)

    async def replies() -> str:
        if has_served:
            await decode(engine, server.engine.tokenizer)
        server.pending = [REFUSED if status is None else {"status_code": status}] * 9
        return (await decode(engine, server.engine.tokenizer))[0].text

    if has_served and status in (502, 503, 504):
        assert run_in_virtual_time(replies()) == REPLY
    else:
        with pytest.raises(EngineError):
            run_in_virtual_time(replies())
    assert engine.in_flight == server.engine.in_flight == 0


def llm_on(server: DyingServer, **fields: Any) -> ChatLookahead:
    draft = ScriptedEngine(server.engine.tokenizer, server.engine.script)
    return ChatLookahead(engines=EngineSet(engine_on(server), draft, EqualTextEmbedder()), temperature=0, **fields)


def thinking_server(deaths: Iterable[int] = ()) -> DyingServer:
    tokenizer = ScriptedTokenizer(ThinkingTags(), opens_thinking=True)
    script = script_of("So two.\n\nAnd three.\n</think>\n\nFive")
    return DyingServer(ScriptedEngine(tokenizer, script), deaths)


@tool
def look(place: str) -> str:
    """Look at a place."""
    return place


CHATS: dict[str, tuple[Callable[..., DyingServer], dict[str, Any], dict[str, Any]]] = {
    "steps": (server_of, {"policy": "exact", "depth": 3}, {}),
    "thinking": (thinking_server, {"policy": "off"}, {}),
    "thinking with steps": (thinking_server, {"policy": "exact", "depth": 2}, {}),
    "a call": (lambda deaths=(): server_of(TAGGED, deaths), {"policy": "off"}, {"tools": [thermometer]}),
    "a forced call": (
        lambda deaths=(): server_of(json.dumps([{"name": "thermometer", "arguments": {"city": "Bonn"}}]), deaths),
        {"policy": "off"},
        {"tools": [thermometer], "tool_choice": "any"},
    ),
    "a form": (
        lambda deaths=(): server_of('{"degrees": 17}', deaths),
        {"policy": "off"},
        {"response_format": Form.of(Weather).response_format},
    ),
}


@pytest.mark.parametrize("name", CHATS)
async def test_messages_are_the_same_with_a_death_at_every_token(name: str) -> None:
    create, fields, options = CHATS[name]

    async def reply(server: DyingServer) -> tuple[AIMessage, AIMessage]:
        llm: Any = llm_on(server, **fields)
        bound = llm.bind_tools(**options) if "tools" in options else llm.bind(**options)
        whole: Any = None
        async for chunk in bound.astream("?"):
            whole = chunk if whole is None else whole + chunk
        return whole

    server = create()
    expected: Any = await reply(server)
    for place in range(1, server.sent, 2):
        server = create(deaths=[place])
        message: Any = await reply(server)
        assert server.deaths == []
        assert message.content == expected.content
        assert message.additional_kwargs == expected.additional_kwargs
        names = [(call["name"], call["args"]) for call in message.tool_calls]
        assert names == [(call["name"], call["args"]) for call in expected.tool_calls]
        assert message.usage_metadata == expected.usage_metadata
        assert message.response_metadata["finish_reason"] == expected.response_metadata["finish_reason"]
        assert message.response_metadata["lookahead"]["resumptions"] <= 1
        assert server.engine.in_flight == 0


async def test_several_replies_of_one_call_go_on_one_by_one() -> None:
    server = server_of(deaths=[3, 9, 14])
    llm = llm_on(server, policy="off")
    assert [message.text for message in await llm.abatch(["?", "??", "???"])] == [REPLY] * 3


# Attempts, and what ends them


async def tokens_of(engine: Engine, **sampling: Any) -> list[int]:
    limits, prompt = Sampling(**{"max_tokens": 50, **sampling}), engine.tokenizer.encode("assistant: ")
    return [token for delta in [d async for d in engine.generate(prompt, limits)] for token in delta.token_ids]


def seconds_until(error: type[Exception], engine: Engine, match: str, **sampling: Any) -> float:
    async def run() -> float:
        with pytest.raises(error, match=match):
            await tokens_of(engine, **sampling)
        return asyncio.get_running_loop().time()

    return run_in_virtual_time(run())


def busy(status: int, seconds: str) -> dict[str, Any]:
    return {"status_code": status, "headers": {"Retry-After": seconds}, "text": "busy"}


def test_a_server_that_stays_away_fails_the_reply_after_the_timeout() -> None:
    gone = server_of(deaths=[3], away=[REFUSED] * 100)
    assert 40 < seconds_until(EngineError, engine_on(gone), "cannot be reached: connection refused") <= 60
    gone = server_of(deaths=[0], away=[REFUSED] * 100)
    assert seconds_until(EngineError, engine_on(gone), "refused") > 40, "it died while it read the prompt"
    never_there = server_of()
    never_there.pending = [REFUSED] * 100
    assert seconds_until(EngineError, engine_on(never_there), "connection refused") < 2, "the address may be wrong"
    never_there.pending = [REFUSED] * 100
    assert seconds_until(EngineError, engine_on(never_there), "connection refused", in_reply=True) > 40
    draft = OpenAIEngine(RemoteModel("http://one/v1", "model"), gone.engine.tokenizer, "draft", transport=gone)  # type: ignore[arg-type]
    gone.deaths, gone.sent, gone.pending = [0], 0, []
    assert seconds_until(EngineError, draft, "connection refused") < 2, "a reply does without its draft"


@pytest.mark.parametrize("way", WAYS[:-1])
def test_failures_without_a_token_between_them_end_at_max_retries(way: str) -> None:
    server = server_of(deaths=[3, 3, 3, 3, 3], way=way)
    seconds_until(EngineError, engine_on(server), "the target at http://one/v1")
    assert len(server.bodies) == 3, "the first failure came after tokens"
    server = server_of(deaths=range(1, 9), way=way)
    assert len(run_in_virtual_time(tokens_of(engine_on(server)))) == PLACES, "each attempt has a token"


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_asked_again_after_its_time_and_not_for_ever(status: int) -> None:
    server = server_of()
    server.pending = [busy(status, "20"), busy(status, "20")]
    engine = engine_on(server, max_retries=1)

    async def run() -> float:
        assert len(await tokens_of(engine)) == PLACES
        return asyncio.get_running_loop().time()

    assert 40 <= run_in_virtual_time(run()) < 41
    assert engine.healthy
    for seconds in ("0", "1", "20"):
        server.pending = [busy(status, seconds)] * 400
        assert seconds_until(EngineError, engine, f"answered {status}: busy") <= 60
    server.pending = [busy(status, "3600")]
    assert seconds_until(EngineError, engine, f"answered {status}: busy") == 0, "longer than the timeout"


def test_a_restarted_server_with_another_model_or_limit_fails_the_reply_with_its_reason() -> None:
    for answer, error, reason in (
        ({"status_code": 404, "json": {"error": {"message": "The model does not exist"}}}, ConfigurationError, "404"),
        ({"status_code": 401, "json": {"error": {"message": "no key"}}}, ConfigurationError, "refuses the API key"),
    ):
        server = server_of(deaths=[4], away=[answer])
        assert seconds_until(error, engine_on(server), reason) == 0


def test_the_name_of_a_dead_replica_is_dropped_and_the_key_stays() -> None:
    server = server_of(deaths=[4], away=[REFUSED])

    async def run() -> None:
        AFFINITY.set(Affinity("thread", None, "", None))
        await tokens_of(engine_on(server))
        await tokens_of(engine_on(server))

    run_in_virtual_time(run())
    assert [headers.get("X-Session-Token") for headers in server.headers[:3]] == [None, None, None]
    assert len({headers["X-Session-ID"] for headers in server.headers}) == 1


def test_usage_after_the_end_is_read_once_and_a_second_end_is_ignored() -> None:
    ids = [1, 2, 0]
    usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}
    body = b"".join(
        [
            event(token_ids=ids, finish_reason="stop"),
            *[b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"] * 2,
            event(token_ids=[3], finish_reason="stop"),
        ]
    )
    engine = OpenAIEngine(
        RemoteModel("http://one/v1", "model"),
        ScriptedTokenizer(),  # type: ignore[arg-type]
        transport=httpx.MockTransport(lambda _: httpx.Response(200, content=body)),
    )

    async def run() -> list[Delta]:
        return [delta async for delta in engine.generate([1], Sampling(50))]

    (delta,) = asyncio.run(run())
    assert (delta.token_ids, delta.finish_reason, delta.cached_tokens) == ((1, 2, 0), "stop", 4)


# Continuations


def continued(sampling: Sampling, received: Sequence[int], **fields: Any) -> Continuation:
    continuation = Continuation([1, 2], sampling, {0}, **fields)
    for token in received:
        continuation.take(Delta((token,)))
    continuation.resume()
    return continuation


def test_a_seed_gives_each_continuation_its_own_and_a_form_repeats_with_the_same() -> None:
    prompt, sampling = continued(Sampling(9, temperature=1.0, seed=5), [7, 8]).request
    assert (prompt, sampling.max_tokens) == ([1, 2, 7, 8], 7)
    assert sampling.seed not in (None, 5), "the same random numbers would not be independent"
    assert continued(Sampling(9, temperature=1.0, seed=5), [7, 8]).request[1] == sampling
    assert continued(Sampling(9, temperature=1.0, seed=5), [7]).request[1].seed != sampling.seed
    assert continued(Sampling(9, temperature=1.0), [7]).request[1].seed is None
    form = Sampling(9, temperature=1.0, structured={"json_object": True})
    seeded = continued(form, [7], seeds=True)
    assert seeded.can_resume
    assert seeded.request[0] == [1, 2]
    assert seeded.request[1].seed is not None
    assert not continued(form, [7]).can_resume, "nothing would repeat its tokens"
    assert continued(Sampling(9, structured={"json_object": True}), [7]).can_resume


def test_repeated_tokens_are_left_out_with_their_logprobs_and_other_ones_fail() -> None:
    form = continued(Sampling(9, structured={"json_object": True}), [7, 8])
    assert form.take(Delta((7,), cached_tokens=3)) is None
    entries = tuple({token: -1.0} for token in (8, 9))
    assert form.take(Delta((8, 9), entries)) == Delta((9,), entries[1:], resumptions=1)
    assert form.take(Delta((), None, "stop")) == Delta((), None, "stop")
    for other in (Delta((6,)), Delta((7,), None, "stop")):
        with pytest.raises(UnavailableError, match="wrote another one"):
            continued(Sampling(9, structured={"json_object": True}), [7, 8]).take(other)


@pytest.mark.parametrize(("received", "reason"), [([7, 0], "stop"), ([7, 8, 9], "length"), ([7, 8], None)])
def test_a_generation_whose_last_token_arrived_has_an_end(received: list[int], reason: str | None) -> None:
    end = continued(Sampling(3), received).end
    assert (end.finish_reason if end is not None else None) == reason


# The engine of this process


class MortalEngine(VLLMEngine):
    """An engine of this process without vLLM, whose processes end before given tokens."""

    tokenizer = ScriptedTokenizer()

    def __init__(self, deaths: Iterable[int], **fields: Any) -> None:
        self.deaths = sorted(deaths)
        self.sent = self.starts = 0
        self.script = ScriptedEngine(self.tokenizer, script_of(REPLY))
        self.start_error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.is_starting = threading.Event()
        super().__init__(VLLMConfig(Path("model")), **fields)
        self.restarts = True

    def _start(self) -> None:
        self.starts += 1
        self.is_starting.set()
        assert self.gate.wait(30)
        if self.start_error is not None:
            raise self.start_error
        self.context_length = 1000
        self._llm = SimpleNamespace(errored=False, shutdown=lambda: None)

    async def _request(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Delta, None]:
        llm = self._llm
        async with aclosing(self.script.generate(prompt_ids, sampling)) as deltas:
            async for delta in deltas:
                if self.deaths and self.sent >= self.deaths[0]:
                    self.deaths.pop(0)
                    llm.errored = True
                if llm.errored:
                    raise UnavailableError("vLLM failed on model: its process was killed")
                self.sent += 1
                yield delta
                await asyncio.sleep(0)


async def test_one_restart_serves_all_running_replies_at_every_token() -> None:
    for place in range(0, 3 * PLACES, 4):
        engine = MortalEngine([place])
        replies = await asyncio.gather(*(decode(engine, engine.tokenizer) for _ in range(3)))
        assert [(reply.text, streamed) for reply, streamed in replies] == [(REPLY, REPLY)] * 3, place
        assert engine.starts == 2
        assert engine.healthy
        assert engine.script.in_flight == 0
        assert sum(reply.report.resumptions for reply, _ in replies) <= 3
        assert all(reply.report.target_forward_passes == PLACES for reply, _ in replies)


async def test_a_second_death_is_an_error_and_a_late_one_is_not() -> None:
    now = 0.0
    engine = MortalEngine([3, 9], clock=lambda: now)
    with pytest.raises(EngineError, match="killed"):
        await tokens_of(engine)
    assert not engine.healthy, "the next call starts it anew"
    assert engine.starts == 2
    engine = MortalEngine([3, 13], clock=lambda: now)
    assert len(await tokens_of(engine)) == PLACES
    now = 3600.0
    assert len(await tokens_of(engine)) == PLACES
    assert engine.starts == 3
    draft = MortalEngine([3])
    draft.restarts = False
    with pytest.raises(EngineError, match="killed"):
        await tokens_of(draft)
    assert draft.starts == 1


async def test_a_failed_restart_fails_every_reply_with_its_reason() -> None:
    engine = MortalEngine([4])
    engine.start_error = EngineError("no memory is left")
    results = await asyncio.gather(*(tokens_of(engine) for _ in range(3)), return_exceptions=True)
    assert [str(result) for result in results] == [
        "vLLM failed on model: its process was killed; no memory is left"
    ] * 3
    assert not engine.healthy


async def test_closing_and_cancelling_during_a_restart_leave_no_reply_waiting() -> None:
    engine = MortalEngine([4])
    engine.gate.clear()
    engine.is_starting.clear()
    running = [asyncio.create_task(tokens_of(engine)) for _ in range(3)]
    await asyncio.to_thread(engine.is_starting.wait, 30)
    running[0].cancel()
    with suppress(asyncio.CancelledError):
        await running[0]
    assert engine.healthy, "its replies go on"
    engine.start_error = EngineError("killed while it started")
    engine.close()
    engine.gate.set()
    results = await asyncio.gather(*running[1:], return_exceptions=True)
    assert [str(result) for result in results] == ["the engine was shut down"] * 2
