from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from lookahead_agent.decoding import ReplyRequest, lookahead
from lookahead_agent.engines import Sampling
from lookahead_agent.engines.openai_http import OpenAIEngine
from lookahead_agent.engines.protocol import Delta, Engine
from lookahead_agent.engines.servers import RemoteModel
from lookahead_agent.engines.tokenizer import HFTokenizer
from lookahead_agent.errors import ConfigurationError, ContextLengthError, EngineError, EngineStartError
from lookahead_agent.generation.json_tool_parsers import JsonToolParser
from lookahead_agent.generation.tool_parsers import choose_tool_parser
from lookahead_agent.verifiers.embedding import RemoteEmbedder
from lookahead_agent.verifiers.exact import ExactVerifier
from tests.unit.fake_vllm import WORDS, FakeServer, Fleet, tokenizer_in
from tests.virtual_time import run_in_virtual_time

REPLY = "aab\n\nbca\n\ncab"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HFTokenizer:
    return tokenizer_in(tmp_path_factory.mktemp("tokenizer"))


def engine_on(servers: dict[str, FakeServer], tokenizer: HFTokenizer, **fields: Any) -> OpenAIEngine:
    (name,) = servers
    remote = RemoteModel(f"http://{name}/v1", **{"model": "model", **fields})
    return OpenAIEngine(remote, tokenizer, transport=Fleet(**servers))


async def deltas(engine: Engine, prompt: str = "?", **sampling: Any) -> list[Delta]:
    ids = engine.tokenizer.encode(prompt)
    return [delta async for delta in engine.generate(ids, Sampling(**{"max_tokens": 50, **sampling}))]


async def text(engine: Engine, prompt: str = "?", **sampling: Any) -> str:
    ids = [token for delta in await deltas(engine, prompt, **sampling) for token in delta.token_ids]
    return engine.tokenizer.decode(ids)


async def test_tokens_come_as_they_are(tokenizer: HFTokenizer) -> None:
    server = FakeServer(tokenizer, REPLY)
    engine = engine_on({"one": server}, tokenizer)
    await engine.connect()
    assert engine.context_length == 100
    assert engine.tokenizer.fingerprint == tokenizer.fingerprint
    found = await deltas(engine)
    assert [token for delta in found for token in delta.token_ids] == [*tokenizer.encode(REPLY), 0]
    assert found[-1].finish_reason == "stop"
    assert (await deltas(engine, max_tokens=2))[-1].finish_reason == "length"
    assert engine.in_flight == server.open == 0


@pytest.mark.parametrize("cached", [None, 0, 7])
async def test_a_server_may_tell_what_it_had_of_a_prompt(tokenizer: HFTokenizer, cached: int | None) -> None:
    server = FakeServer(tokenizer, REPLY)
    server.cached = cached
    engine = engine_on({"one": server}, tokenizer)
    await engine.connect()
    for most in (50, 2):
        found = await deltas(engine, max_tokens=most)
        assert [delta.cached_tokens for delta in found] == [*[None] * (len(found) - 1), cached]
        assert found[-1].finish_reason is not None, "whoever reads no further has it by then"
    assert ("stream_options" in server.requests[-1]) == (cached is not None), "others may refuse the option"
    reply = await lookahead(ReplyRequest(tuple(tokenizer.encode("?")), Sampling(max_tokens=50)), engine)
    assert tokenizer.decode(reply.token_ids) == REPLY
    assert (reply.report.target_prompt.total, reply.report.target_prompt.cached) == (1, cached)


async def test_what_is_asked_of_the_server(tokenizer: HFTokenizer) -> None:
    server = FakeServer(tokenizer, REPLY)
    engine = engine_on({"one": server}, tokenizer)
    await engine.connect()
    await deltas(
        engine, temperature=0.5, top_p=0.9, top_k=7, seed=3, stop=("b",), structured={"json": {"type": "object"}}
    )
    body = server.requests[-1]
    assert body["prompt"] == tokenizer.encode("?")
    assert {name: body[name] for name in ("temperature", "top_p", "top_k", "seed", "stop")} == {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 3, "stop": ["b"],
    }  # fmt: skip
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}
    await deltas(engine)
    assert "top_k" not in server.requests[-1], "servers that do not know an option are not asked for it in vain"
    with pytest.raises(ConfigurationError, match="regex"):
        await deltas(engine, structured={"regex": "a"})


@pytest.mark.parametrize("takes_ids", [True, False])
async def test_a_server_that_tells_only_texts(tokenizer: HFTokenizer, takes_ids: bool) -> None:
    server = FakeServer(tokenizer, REPLY, tells_ids=False, takes_ids=takes_ids)
    engine = engine_on({"one": server}, tokenizer)
    await engine.connect()
    assert engine.tokenizer.fingerprint != tokenizer.fingerprint, "nobody may exchange token ids with it"
    assert await text(engine) == REPLY
    assert isinstance(server.requests[-1]["prompt"], list if takes_ids else str)
    reply = await lookahead(ReplyRequest(tuple(tokenizer.encode("?")), Sampling(max_tokens=50)), engine)
    assert reply.text == REPLY


async def test_a_server_that_counts_other_tokens_gets_texts(tokenizer: HFTokenizer) -> None:
    server = FakeServer(tokenizer, REPLY, tells_ids=False)
    server.counts = 2
    engine = engine_on({"one": server}, tokenizer)
    await engine.connect()
    assert await text(engine) == REPLY
    assert isinstance(server.requests[-1]["prompt"], str)


async def test_a_server_that_refuses_what_it_does_not_know(tokenizer: HFTokenizer) -> None:
    server = FakeServer(tokenizer, REPLY, tells_ids=False)

    def strict(request: httpx.Request) -> httpx.Response:
        if b"return_token_ids" in request.content:
            return httpx.Response(400, json={"error": {"message": "Extra inputs are not permitted"}})
        return server(request)

    engine = OpenAIEngine(RemoteModel("http://one/v1", "model"), tokenizer, transport=Fleet(one=strict))
    await engine.connect()
    assert await text(engine) == REPLY


async def test_behind_such_a_server_a_tool_parser_is_not_ignored(tokenizer: HFTokenizer) -> None:
    engine = engine_on({"one": FakeServer(tokenizer, REPLY, tells_ids=False)}, tokenizer)
    await engine.connect()
    assert engine.tokenizer.fingerprint != tokenizer.fingerprint, "nobody exchanges token ids with it"
    assert isinstance(choose_tool_parser(None, engine.tokenizer), JsonToolParser)
    with pytest.raises(ConfigurationError, match="no_such_parser"):
        choose_tool_parser("no_such_parser", engine.tokenizer)


async def test_steps_are_exchanged_as_text_with_such_a_draft(tokenizer: HFTokenizer) -> None:
    target = engine_on({"one": FakeServer(tokenizer, REPLY)}, tokenizer)
    draft = engine_on({"two": FakeServer(tokenizer, REPLY, tells_ids=False)}, tokenizer)
    for engine in (target, draft):
        await engine.connect()
    prompt = tuple(tokenizer.encode("?"))
    request = ReplyRequest(prompt, Sampling(max_tokens=50), draft_prompt_ids=prompt)
    reply = await lookahead(request, target, draft, ExactVerifier())
    assert reply.text == REPLY
    assert reply.report.speculation_disabled is None


async def test_the_models_name(tokenizer: HFTokenizer) -> None:
    server = FakeServer(tokenizer, REPLY)
    engine = engine_on({"one": server}, tokenizer, model="other name")
    await engine.connect()
    await deltas(engine)
    assert server.requests[-1]["model"] == "model", "a server's only model is meant"
    server.models.append({"id": "second"})
    with pytest.raises(ConfigurationError, match="it has model, second"):
        await engine_on({"one": server}, tokenizer, model="other name").connect()


async def test_another_tokenizer_is_found_out(tokenizer: HFTokenizer, tmp_path: Path) -> None:
    other = tokenizer_in(tmp_path, [*WORDS[:2], *reversed(WORDS[2:])])
    with pytest.raises(ConfigurationError, match="another tokenizer"):
        await engine_on({"one": FakeServer(tokenizer, REPLY)}, other).connect()


async def test_log_probabilities(tokenizer: HFTokenizer) -> None:
    for tells_ids in (True, False):
        engine = engine_on({"one": FakeServer(tokenizer, REPLY, tells_ids=tells_ids)}, tokenizer)
        await engine.connect()
        (delta,) = await deltas(engine, max_tokens=1, logprobs=20)
        assert delta.logprobs == ({2: -0.1, 3: -2.0},)
    (delta,) = await deltas(engine_on({"one": FakeServer(tokenizer, REPLY)}, tokenizer), "ab?", prompt_logprobs=True)
    assert delta.prompt_logprobs == (None, -0.5, -0.5)
    with pytest.raises(EngineError, match="vLLM's does"):
        await deltas(engine, "ab?", prompt_logprobs=True)


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        (400, "the maximum context length is 100", ContextLengthError),
        (400, "unknown field", ConfigurationError),
        (401, "no key", ConfigurationError),
        (404, "no such model", ConfigurationError),
        (500, "out of memory", EngineError),
    ],
)
async def test_refusals_are_not_tried_again(
    tokenizer: HFTokenizer, status: int, message: str, kind: type[Exception]
) -> None:
    server = FakeServer(tokenizer, REPLY)
    server.answers = [httpx.Response(status, json={"error": {"message": message}})]
    with pytest.raises(kind, match=message):
        await deltas(engine_on({"one": server}, tokenizer))
    assert server.requests == []


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ({"message": "a schema is refused", "type": "BadRequestError", "code": 400}, ConfigurationError),
        ({"message": "a schema is refused", "type": "InternalServerError", "code": 500}, EngineError),
        ({"message": "a schema is refused"}, EngineError),
        ("a schema is refused", EngineError),
    ],
)
async def test_an_error_in_a_stream_is_whose_it_is(tokenizer: HFTokenizer, error: Any, kind: type[Exception]) -> None:
    server = FakeServer(tokenizer, REPLY)
    engine = engine_on({"one": server}, tokenizer)
    await engine.connect()
    server.answers = [httpx.Response(200, text=f"data: {json.dumps({'error': error})}\n\n")]
    with pytest.raises(kind, match="a schema is refused"):
        await deltas(engine, structured={"json": {"type": "str"}})


async def test_a_full_context_is_noticed_here(tokenizer: HFTokenizer) -> None:
    engine = engine_on({"one": FakeServer(tokenizer, REPLY)}, tokenizer)
    await engine.connect()
    with pytest.raises(ContextLengthError):
        await deltas(engine, "a" * 100)


def test_a_busy_server_is_asked_again_when_it_says(tokenizer: HFTokenizer) -> None:
    server = FakeServer(tokenizer, REPLY)
    busy = httpx.Response(429, headers={"Retry-After": "3"}, json={"error": {"message": "busy"}})
    server.answers = [busy, httpx.Response(503, text="starting")]
    engine = engine_on({"one": server}, tokenizer)

    async def run() -> tuple[str, float]:
        return await text(engine), asyncio.get_running_loop().time()

    written, seconds = run_in_virtual_time(run())
    assert written == REPLY
    assert 3.3 < seconds < 3.8, "3 s, then about half a second"


def test_retries_end(tokenizer: HFTokenizer) -> None:
    server = FakeServer(tokenizer, REPLY)
    server.down = True

    async def run(retries: int) -> float:
        with pytest.raises(EngineError, match="the target at http://one/v1 cannot be reached: connection refused"):
            await text(engine_on({"one": server}, tokenizer, max_retries=retries))
        return asyncio.get_running_loop().time()

    assert run_in_virtual_time(run(0)) == 0
    assert run_in_virtual_time(run(2)) > 0.5
    with pytest.raises(EngineStartError):
        asyncio.run(engine_on({"one": server}, tokenizer, max_retries=0).connect())


async def test_a_server_that_goes_and_comes_back(tokenizer: HFTokenizer) -> None:
    server = FakeServer(tokenizer, REPLY)
    engine = engine_on({"one": server}, tokenizer, max_retries=0)
    server.down = True
    with pytest.raises(EngineError):
        await text(engine)
    assert not engine.healthy
    server.down = False
    assert await text(engine) == REPLY
    assert engine.healthy


async def test_a_reply_that_breaks_off_fails_and_is_not_written_twice(tokenizer: HFTokenizer) -> None:
    server = FakeServer(tokenizer, REPLY)
    server.breaks_after = 4
    with pytest.raises(EngineError, match="cannot be reached"):
        await text(engine_on({"one": server}, tokenizer))
    assert len(server.requests) == 1


async def test_closing_a_generator_closes_the_connection(tokenizer: HFTokenizer) -> None:
    server = FakeServer(tokenizer, REPLY)
    engine = engine_on({"one": server}, tokenizer)
    running = engine.generate(tokenizer.encode("?"), Sampling(max_tokens=50))
    await anext(running)
    assert (engine.in_flight, server.open) == (1, 1)
    await running.aclose()
    assert (engine.in_flight, server.open) == (0, 0)


async def test_a_draft_server_that_goes_and_comes_back(tokenizer: HFTokenizer) -> None:
    target = engine_on({"one": FakeServer(tokenizer, REPLY)}, tokenizer)
    server = FakeServer(tokenizer, REPLY)
    draft = engine_on({"two": server}, tokenizer, max_retries=0)
    request = ReplyRequest(tuple(tokenizer.encode("?")), Sampling(max_tokens=50))
    for down in (False, True, False):
        server.down = down
        reply = await lookahead(request, target, draft, ExactVerifier())
        assert reply.text == REPLY
        assert (reply.report.speculation_disabled is not None) == down
        assert target.in_flight == draft.in_flight == 0


async def test_embeddings_from_a_server() -> None:
    vectors = {"x": [1.0, 0.0], "y": [1.0, 1.0], "none": [0.0, 0.0]}
    bodies: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        import json

        bodies.append(json.loads(request.content))
        data = [{"index": n, "embedding": vectors[text]} for n, text in enumerate(bodies[-1]["input"])]
        return httpx.Response(200, json={"data": data[::-1]})

    embedder = RemoteEmbedder(RemoteModel("http://one/v1", "minilm"), httpx.MockTransport(answer))
    pairs = [("x", "x"), ("x", "y"), ("x", "none")]
    values = await asyncio.gather(*(embedder.similarity(*pair) for pair in pairs))
    assert values == [pytest.approx(1.0), pytest.approx(0.5**0.5), 0.0]
    assert len(bodies) < len(pairs), "pairs that wait go together"
    assert bodies[0]["model"] == "minilm"
    bad = httpx.MockTransport(lambda _: httpx.Response(200, json={}))
    with pytest.raises(EngineError, match="/embeddings"):
        await RemoteEmbedder(RemoteModel("http://one/v1", "m"), bad).similarity("x", "y")
