from __future__ import annotations

import asyncio
import gzip
import html
import json
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from lookahead_agent.decoding import ReplyRequest, lookahead
from lookahead_agent.engines import Sampling
from lookahead_agent.engines.openai_http import OpenAIEngine
from lookahead_agent.engines.protocol import Delta, Engine, sequence_logprobs
from lookahead_agent.engines.servers import RemoteModel
from lookahead_agent.engines.tokenizer import HFTokenizer
from lookahead_agent.errors import ConfigurationError, ContextLengthError, EngineError, EngineStartError
from lookahead_agent.generation.json_tool_parsers import JsonToolParser
from lookahead_agent.generation.tool_parsers import choose_tool_parser
from lookahead_agent.verifiers.embedding import RemoteEmbedder
from lookahead_agent.verifiers.model_free import ExactVerifier
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


async def test_token_ids_and_finish_reasons_pass_through_unchanged(tokenizer: HFTokenizer) -> None:
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
async def test_the_last_delta_has_the_count_of_cached_tokens(tokenizer: HFTokenizer, cached: int | None) -> None:
    server = FakeServer(tokenizer, REPLY)
    server.cached = cached
    engine = engine_on({"one": server}, tokenizer)
    await engine.connect()
    for limit in (50, 2):
        found = await deltas(engine, max_tokens=limit)
        assert [delta.cached_tokens for delta in found] == [*[None] * (len(found) - 1), cached]
        assert found[-1].finish_reason is not None, "a reader may stop at the finish reason"
    assert ("stream_options" in server.requests[-1]) == (cached is not None), "other servers may reject the option"
    reply = await lookahead(ReplyRequest(tuple(tokenizer.encode("?")), Sampling(max_tokens=50)), engine)
    assert tokenizer.decode(reply.token_ids) == REPLY
    assert (reply.report.target_prompt.total, reply.report.target_prompt.cached) == (1, cached)


@pytest.mark.parametrize("usage", [7, [], "x", {"prompt_tokens_details": 3}])
@pytest.mark.parametrize("cached", [-5, "many", None, [1], 1.5])
async def test_a_damaged_usage_fails_no_finished_reply(tokenizer: HFTokenizer, usage: Any, cached: Any) -> None:
    server = FakeServer(tokenizer, REPLY)
    server.cached = 0
    engine = engine_on({"one": server}, tokenizer)
    await engine.connect()
    for damaged in (usage, {"prompt_tokens_details": {"cached_tokens": cached}}):
        body = event_of(token_ids=[2], finish_reason="stop") + f"data: {json.dumps({'usage': damaged})}\n\n"
        server.answers = [httpx.Response(200, text=f"{body}data: [DONE]\n\n")]
        (delta,) = await deltas(engine)
        assert (delta.token_ids, delta.finish_reason, delta.cached_tokens) == ((2,), "stop", None)


@pytest.mark.parametrize("is_vllm", [True, False])
async def test_a_cache_salt_is_sent_and_without_its_effect_no_cached_tokens_are_told(
    tokenizer: HFTokenizer, is_vllm: bool
) -> None:
    server = FakeServer(tokenizer, REPLY, returns_token_ids=is_vllm)
    server.cached = 7
    engine = engine_on({"one": server}, tokenizer)
    await engine.connect()
    found = await deltas(engine, cache_salt="client 1")
    assert server.requests[-1]["cache_salt"] == "client 1"
    assert found[-1].cached_tokens == (7 if is_vllm else None), "another server may share its cache between salts"
    assert (await deltas(engine))[-1].cached_tokens == 7
    assert "cache_salt" not in server.requests[-1]
    with suppress(EngineError):  # this server gives no log-probabilities
        await sequence_logprobs(engine, (1,), (2,), "client 2")
    assert server.requests[-1]["cache_salt"] == "client 2"


async def test_sampling_options_are_sent_in_the_request_body(tokenizer: HFTokenizer) -> None:
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
    assert "top_k" not in server.requests[-1], "unset options are omitted: some servers reject unknown ones"
    with pytest.raises(ConfigurationError, match="regex"):
        await deltas(engine, structured={"regex": "a"})


@pytest.mark.parametrize("accepts_token_ids", [True, False])
async def test_a_text_only_server_still_writes_the_reply(tokenizer: HFTokenizer, accepts_token_ids: bool) -> None:
    server = FakeServer(tokenizer, REPLY, returns_token_ids=False, accepts_token_ids=accepts_token_ids)
    engine = engine_on({"one": server}, tokenizer)
    await engine.connect()
    assert engine.tokenizer.fingerprint != tokenizer.fingerprint, "its token ids cannot be exchanged"
    assert await text(engine) == REPLY
    assert isinstance(server.requests[-1]["prompt"], list if accepts_token_ids else str)
    reply = await lookahead(ReplyRequest(tuple(tokenizer.encode("?")), Sampling(max_tokens=50)), engine)
    assert reply.text == REPLY


async def test_a_server_that_counts_tokens_differently_gets_text_prompts(tokenizer: HFTokenizer) -> None:
    server = FakeServer(tokenizer, REPLY, returns_token_ids=False)
    server.counts = 2
    engine = engine_on({"one": server}, tokenizer)
    await engine.connect()
    assert await text(engine) == REPLY
    assert isinstance(server.requests[-1]["prompt"], str)


async def test_a_server_that_rejects_return_token_ids_still_works(tokenizer: HFTokenizer) -> None:
    server = FakeServer(tokenizer, REPLY, returns_token_ids=False)

    def strict(request: httpx.Request) -> httpx.Response:
        if b"return_token_ids" in request.content or b"cache_salt" in request.content:
            return httpx.Response(400, json={"error": {"message": "Extra inputs are not permitted"}})
        return server(request)

    engine = OpenAIEngine(RemoteModel("http://one/v1", "model"), tokenizer, transport=Fleet(one=strict))
    await engine.connect()
    assert await text(engine, cache_salt="client 1") == REPLY


async def test_a_text_only_server_still_validates_the_tool_parser(tokenizer: HFTokenizer) -> None:
    engine = engine_on({"one": FakeServer(tokenizer, REPLY, returns_token_ids=False)}, tokenizer)
    await engine.connect()
    assert engine.tokenizer.fingerprint != tokenizer.fingerprint, "its token ids cannot be exchanged"
    assert isinstance(choose_tool_parser(None, engine.tokenizer), JsonToolParser)
    with pytest.raises(ConfigurationError, match="no_such_parser"):
        choose_tool_parser("no_such_parser", engine.tokenizer)


async def test_steps_are_exchanged_as_text_with_a_text_only_draft(tokenizer: HFTokenizer) -> None:
    target = engine_on({"one": FakeServer(tokenizer, REPLY)}, tokenizer)
    draft = engine_on({"two": FakeServer(tokenizer, REPLY, returns_token_ids=False)}, tokenizer)
    for engine in (target, draft):
        await engine.connect()
    prompt = tuple(tokenizer.encode("?"))
    request = ReplyRequest(prompt, Sampling(max_tokens=50), draft_prompt_ids=prompt)
    reply = await lookahead(request, target, draft, ExactVerifier())
    assert reply.text == REPLY
    assert reply.report.speculation_disabled is None


async def test_an_unknown_model_name_is_accepted_only_by_a_server_with_one_model(tokenizer: HFTokenizer) -> None:
    server = FakeServer(tokenizer, REPLY)
    engine = engine_on({"one": server}, tokenizer, model="other name")
    await engine.connect()
    await deltas(engine)
    assert server.requests[-1]["model"] == "model", "the only model of the server is used"
    server.models.append({"id": "second"})
    with pytest.raises(ConfigurationError, match="it has model, second"):
        await engine_on({"one": server}, tokenizer, model="other name").connect()


async def test_connect_rejects_a_server_with_another_tokenizer(tokenizer: HFTokenizer, tmp_path: Path) -> None:
    other = tokenizer_in(tmp_path, [*WORDS[:2], *reversed(WORDS[2:])])
    with pytest.raises(ConfigurationError, match="another tokenizer"):
        await engine_on({"one": FakeServer(tokenizer, REPLY)}, other).connect()


async def test_logprobs_work_with_every_server_and_prompt_logprobs_only_with_vllm(tokenizer: HFTokenizer) -> None:
    for returns_token_ids in (True, False):
        engine = engine_on({"one": FakeServer(tokenizer, REPLY, returns_token_ids=returns_token_ids)}, tokenizer)
        await engine.connect()
        (delta,) = await deltas(engine, max_tokens=1, logprobs=20)
        assert delta.logprobs == ({2: -0.1, 3: -2.0},)
    (delta,) = await deltas(engine_on({"one": FakeServer(tokenizer, REPLY)}, tokenizer), "ab?", prompt_logprobs=True)
    assert delta.prompt_logprobs == (None, -0.5, -0.5)
    with pytest.raises(EngineError, match="vLLM's does"):
        await deltas(engine, "ab?", prompt_logprobs=True)


@pytest.mark.parametrize(
    ("status", "message", "error_type"),
    [
        (400, "the maximum context length is 100", ContextLengthError),
        (500, "the request exceeds the available context size", ContextLengthError),
        (502, "ContextWindowExceededError: too long", ContextLengthError),
        (500, "CUDA context is lost", EngineError),
        (400, "unknown field", ConfigurationError),
        (401, "no key", ConfigurationError),
        (404, "no such model", ConfigurationError),
        (500, "out of memory", EngineError),
    ],
)
async def test_client_and_server_errors_raise_without_a_retry(
    tokenizer: HFTokenizer, status: int, message: str, error_type: type[Exception]
) -> None:
    server = FakeServer(tokenizer, REPLY)
    server.answers = [httpx.Response(status, json={"error": {"message": message}})]
    with pytest.raises(error_type, match=message):
        await deltas(engine_on({"one": server}, tokenizer))
    assert server.requests == []


@pytest.mark.parametrize(
    ("error", "error_type"),
    [
        ({"message": "a schema is refused", "type": "BadRequestError", "code": 400}, ConfigurationError),
        ({"message": "a schema is refused", "type": "InternalServerError", "code": 500}, EngineError),
        ({"message": "a schema is refused"}, EngineError),
        ("a schema is refused", EngineError),
        (
            {"message": "a schema is refused", "type": "invalid_request_error", "code": "invalid_value"},
            ConfigurationError,
        ),
        ({"message": "a schema is refused", "type": "rate_limit", "code": "rate_limit_exceeded"}, EngineError),
        ({"message": "a schema is refused", "code": "context_length_exceeded"}, ContextLengthError),
        ({"message": "a schema is refused: too many input tokens", "code": 500}, ContextLengthError),
    ],
)
async def test_an_error_code_in_a_stream_sets_the_exception(
    tokenizer: HFTokenizer, error: Any, error_type: type[Exception]
) -> None:
    server = FakeServer(tokenizer, REPLY)
    engine = engine_on({"one": server}, tokenizer)
    await engine.connect()
    server.answers = [httpx.Response(200, text=f"data: {json.dumps({'error': error})}\n\n")]
    with pytest.raises(error_type, match="a schema is refused") as raised:
        await deltas(engine, structured={"json": {"type": "str"}})
    assert isinstance(raised.value, ContextLengthError) is (error_type is ContextLengthError)


async def test_a_prompt_beyond_the_context_raises_on_the_client(tokenizer: HFTokenizer) -> None:
    engine = engine_on({"one": FakeServer(tokenizer, REPLY)}, tokenizer)
    await engine.connect()
    with pytest.raises(ContextLengthError):
        await deltas(engine, "a" * 100)


def test_busy_servers_are_retried_after_retry_after_or_a_backoff(tokenizer: HFTokenizer) -> None:
    server = FakeServer(tokenizer, REPLY)
    busy = httpx.Response(429, headers={"Retry-After": "3"}, json={"error": {"message": "busy"}})
    server.answers = [busy, httpx.Response(503, text="starting")]
    engine = engine_on({"one": server}, tokenizer)

    async def run() -> tuple[str, float]:
        return await text(engine), asyncio.get_running_loop().time()

    reply, seconds = run_in_virtual_time(run())
    assert reply == REPLY
    assert 3.3 < seconds < 3.8, "Retry-After, then a backoff of about half a second"


@pytest.mark.parametrize("retries", [0, 2])
def test_retries_end_at_max_retries(tokenizer: HFTokenizer, retries: int) -> None:
    server = FakeServer(tokenizer, REPLY)
    server.down = True
    engine = engine_on({"one": server}, tokenizer, max_retries=retries)
    with pytest.raises(EngineError, match="the target at http://one/v1 cannot be reached: connection refused"):
        run_in_virtual_time(text(engine))
    assert server.attempts == retries + 1
    with pytest.raises(EngineStartError):
        run_in_virtual_time(engine.connect())
    assert server.attempts == 2 * (retries + 1)


async def test_healthy_follows_a_server_that_goes_down_and_returns(tokenizer: HFTokenizer) -> None:
    server = FakeServer(tokenizer, REPLY)
    engine = engine_on({"one": server}, tokenizer, max_retries=0)
    server.down = True
    with pytest.raises(EngineError):
        await text(engine)
    assert not engine.healthy
    server.down = False
    assert await text(engine) == REPLY
    assert engine.healthy


async def test_a_reply_goes_on_after_a_lost_connection_unless_retries_are_off(tokenizer: HFTokenizer) -> None:
    server = FakeServer(tokenizer, REPLY)
    server.disconnects_after = 4
    assert await text(engine_on({"one": server}, tokenizer)) == REPLY
    assert len(server.requests) == 2
    server.disconnects_after = 4
    with pytest.raises(EngineError, match="cannot be reached"):
        await text(engine_on({"one": server}, tokenizer, max_retries=0))
    assert len(server.requests) == 3


async def test_closing_a_generator_closes_the_connection(tokenizer: HFTokenizer) -> None:
    server = FakeServer(tokenizer, REPLY)
    engine = engine_on({"one": server}, tokenizer)
    generation = engine.generate(tokenizer.encode("?"), Sampling(max_tokens=50))
    await anext(generation)
    assert (engine.in_flight, server.open) == (1, 1)
    await generation.aclose()
    assert (engine.in_flight, server.open) == (0, 0)


async def test_an_unreachable_draft_disables_speculation_only_for_that_reply(tokenizer: HFTokenizer) -> None:
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


async def test_remote_embedder_batches_pairs_and_returns_cosine_similarities() -> None:
    vectors = {"x": [1.0, 0.0], "y": [1.0, 1.0], "none": [0.0, 0.0]}
    bodies: list[dict[str, Any]] = []

    def respond(request: httpx.Request) -> httpx.Response:
        import json

        bodies.append(json.loads(request.content))
        data = [{"index": n, "embedding": vectors[text]} for n, text in enumerate(bodies[-1]["input"])]
        return httpx.Response(200, json={"data": data[::-1]})

    embedder = RemoteEmbedder(RemoteModel("http://one/v1", "minilm"), httpx.MockTransport(respond))
    pairs = [("x", "x"), ("x", "y"), ("x", "none")]
    values = await asyncio.gather(*(embedder.similarity(*pair) for pair in pairs))
    assert values == [pytest.approx(1.0), pytest.approx(0.5**0.5), 0.0]
    assert len(bodies) < len(pairs), "waiting pairs share a request"
    assert bodies[0]["model"] == "minilm"
    rows = [
        None, 7, [], "xy", [{"index": 0, "embedding": [1.0]}], [{"index": 0, "embedding": [1.0]}, {"index": 1}],
        *([{"index": place, "embedding": each} for place, each in enumerate(pair)] for pair in (
            ([1.0], [1.0, 2.0]), (["x"], ["y"]), ([10**400], [1]), (7, 8),
        )),
    ]  # fmt: skip
    for answer in rows:
        bad = httpx.MockTransport(partial(lambda data, _: httpx.Response(200, json={"data": data}), answer))
        with pytest.raises(EngineError, match="/embeddings"):
            await RemoteEmbedder(RemoteModel("http://one/v1", "m"), bad).similarity("x", "y")


KEY = "sk-SECRET.7/+=~<'\\&"


async def outcome(respond: Callable[[httpx.Request], httpx.Response], tokenizer: HFTokenizer, **remote: Any) -> str:
    """The text of a reply and of everything that is printed about its error."""
    fields = {"url": "http://one/v1", "model": "model", "api_key": KEY, "max_retries": 0, **remote}
    try:
        engine = OpenAIEngine(RemoteModel(**fields), tokenizer, transport=Fleet(one=respond))
        await engine.connect()
        return await text(engine)
    except (EngineError, ConfigurationError) as error:
        causes = [error, error.__cause__]
        return "\n".join([*map(repr, causes), *map(str, causes), *traceback.format_exception(error, chain=True)])


def raising(error: BaseException) -> Callable[[httpx.Request], httpx.Response]:
    def respond(request: httpx.Request) -> httpx.Response:
        raise error

    return respond


def ends_badly(tokenizer: HFTokenizer, body: str | bytes, **fields: Any) -> Callable[[httpx.Request], httpx.Response]:
    """A server that sends `body` in place of the events of a reply."""
    server = FakeServer(tokenizer, REPLY)

    def respond(request: httpx.Request) -> httpx.Response:
        if b'"stream":true' in request.content.replace(b" ", b""):
            return httpx.Response(**{"status_code": 200, "content": body, **fields})
        return server(request)

    return respond


def event_of(**choice: Any) -> str:
    return f"data: {json.dumps({'choices': [{'text': '', 'index': 0, **choice}]})}\n\n"


FAILURES: dict[str, tuple[Any, str]] = {
    "an echo of the key": (httpx.Response(401, json={"error": {"message": f"Incorrect key {KEY}"}}), "<API key>"),
    "an echo in a text": (httpx.Response(500, text=f"no {KEY} " * 99), "<API key>"),
    "an echo in a server's only model": (
        httpx.Response(200, json={"data": [{"id": KEY}], "choices": [{"prompt_token_ids": [7], "token_ids": [7]}]}),
        "name the tokenizer of '<API key>'",
    ),
    "an echo in Python's notation": (httpx.Response(400, json={"detail": [{"msg": f"no {KEY}"}]}), "no <API key>"),
    "an echo in HTML": (httpx.Response(500, text=f"<p>{html.escape(KEY)}</p>"), "<p><API key></p>"),
    "an echo in an address": (httpx.Response(500, text=f"/?key={quote(KEY, safe='')}"), "?key=<API key>"),
    "a transport's error with bytes": (httpx.LocalProtocolError(f"Illegal header {KEY.encode()!r}"), "<API key>"),
    "an echo in a model's name": (httpx.Response(200, json={"data": [{"id": KEY}, {"id": "b"}]}), "<API key>"),
    "a transport's error": (RuntimeError(f"header Bearer {KEY}"), "<API key>"),
    "a transport's HTTP error": (httpx.LocalProtocolError(f"Illegal header b'{KEY}'"), "<API key>"),
    "a transport that exits": (SystemExit(f"bad {KEY}"), "failed: SystemExit: bad <API key>"),
    "a transport that is cancelled": (asyncio.CancelledError(), "failed: CancelledError"),
    "models that are no list": (httpx.Response(200, json={"data": 7}), "no model"),
    "models of other types": (httpx.Response(200, json={"data": [None, 3, {"id": [1]}, {}]}), "no model"),
    "models that are a list": (httpx.Response(200, json=[1]), "no model"),
    "deep JSON": (httpx.Response(200, text="[" * 100_000), "not JSON"),
    "bytes": (httpx.Response(200, content=b"\xff\xfe\x00"), "not JSON"),
    "a redirect": (
        httpx.Response(307, headers={"Location": f"https://u:SECRET@two/v1?key={KEY}"}),
        "to https://two/v1",
    ),
    "a redirect to no address": (
        httpx.Response(307, headers={"Location": f"https://u:{KEY}@two/v1"}),
        "an invalid address",
    ),
    "a redirect to nowhere": (httpx.Response(302), "redirects to another address"),
}


@pytest.mark.parametrize("name", FAILURES)
async def test_no_error_of_a_server_has_the_key_and_each_says_what_happened(tokenizer: HFTokenizer, name: str) -> None:
    answer, message = FAILURES[name]
    respond = raising(answer) if isinstance(answer, BaseException) else lambda _: answer
    for url in ("http://one/v1", "http://user:SECRET@one/v1"):
        shown = await outcome(respond, tokenizer, url=url)
        assert message in shown
        assert "SECRET" not in shown


STREAM_FAILURES: dict[str, tuple[str | bytes, dict[str, Any], str]] = {
    "a compressed reply": (
        gzip.compress(event_of(token_ids=[2]).encode()),
        {"headers": {"Content-Encoding": "gzip"}},
        "sent a compressed response (200)",
    ),
    "an aborted reply": (event_of(finish_reason="abort"), {}, "finish_reason 'abort'"),
    "a failed reply": (event_of(finish_reason="error", message=f"out of memory {KEY}"), {}, "'error': out of memory"),
    "vLLM's older error": ('data: {"object": "error", "message": "no memory", "code": 500}\n\n', {}, "no memory"),
    "a context that is too short": (
        'data: {"error": {"message": "the maximum context length is 9", "code": 400}}\n\n', {}, "ContextLengthError"),
    "a line without an end": (b"data: " + b"x" * (17 << 20), {}, "more than 16 MiB"),
    "an event without an end": (b"data: xxxxxxxxxxxx\n" * (1 << 20), {}, "more than 16 MiB"),
    "a redirect": ("", {"status_code": 307, "headers": {"Location": "http://two"}}, "redirects to http://two (307)"),
    "an error of many bytes": (b"x" * (1 << 22), {"status_code": 500}, "answered 500"),
    "tokens that are no numbers": (event_of(token_ids=["a", 1.5]), {}, "does not answer like"),
    "tokens that are too large": (event_of(token_ids=[1 << 40]), {}, "does not answer like"),
    "choices that are a number": ('data: {"choices": 7}\n\n', {}, "does not answer like"),
    "an event that is a number": ("data: 7\n\n", {}, "does not answer like"),
    "a deep event": ("data: " + "[" * 100_000 + "\n\n", {}, "not JSON"),
}  # fmt: skip


@pytest.mark.parametrize("name", STREAM_FAILURES)
async def test_a_stream_that_fails_raises_one_error_with_the_reason(tokenizer: HFTokenizer, name: str) -> None:
    body, fields, message = STREAM_FAILURES[name]
    shown = await outcome(ends_badly(tokenizer, body, **fields), tokenizer)
    assert message in shown
    assert "SECRET" not in shown


async def test_a_reason_of_a_server_has_no_key_and_a_bound(tokenizer: HFTokenizer) -> None:
    respond = ends_badly(tokenizer, event_of(token_ids=[2], finish_reason=f"no {KEY} {'x' * 999}"))
    remote = RemoteModel("http://one/v1", "model", KEY)
    (delta,) = await deltas(OpenAIEngine(remote, tokenizer, transport=Fleet(one=respond)), "?")
    assert delta.finish_reason == f"no <API key> {'x' * 999}"[:500]


@pytest.mark.parametrize("key", ["\nKEY", "KEY \t\r\n", "KEY"])
async def test_white_space_around_a_key_is_not_sent(tokenizer: HFTokenizer, key: str) -> None:
    server = FakeServer(tokenizer, REPLY)
    seen = set[str]()

    def respond(request: httpx.Request) -> httpx.Response:
        seen.add(request.headers["Authorization"])
        return server(request)

    assert await outcome(respond, tokenizer, api_key=key) == REPLY
    assert seen == {"Bearer KEY"}


@pytest.mark.parametrize("key", ["SECRÉT", "SECRET\nX: y", "SECRET\0", "SECRET key", "SECRET\ud800", "\x7fSECRET"])
async def test_a_key_that_no_header_may_have_is_refused_before_a_request(tokenizer: HFTokenizer, key: str) -> None:
    shown = await outcome(raising(AssertionError("a request")), tokenizer, api_key=key)
    assert "the target's API key has a character that no HTTP header may have" in shown
    assert "SECR" not in shown


class Silent(httpx.AsyncByteStream):
    """A stream that says nothing, by the events of a proxy."""

    def __init__(self, event: str) -> None:
        self._event = event

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield event_of(text="a", token_ids=[2]).encode()
        while True:
            await asyncio.sleep(5)
            yield self._event.encode()


@pytest.mark.parametrize(
    "event",
    [
        *(": keep-alive\n\n", "data:\n\n", "data: {}\n\n", event_of(), 'data: {"choices": []}\n\n'),
        *('data: {"type": "ping"}\n\n', 'event: ping\ndata: {"time": 1}\n\n'),
        'data: {"choices": [], "usage": {"prompt_tokens": 3}}\n\n',
        *(event_of(token_ids=[], prompt_token_ids=[1]), event_of(token_ids=[], logprobs={"tokens": []})),
    ],
)
def test_empty_events_are_no_sign_of_life(tokenizer: HFTokenizer, event: str) -> None:
    respond = ends_badly(tokenizer, "", content=None, stream=Silent(event))
    remote = RemoteModel("http://one/v1", "model", timeout=30.0, max_retries=0)
    engine = OpenAIEngine(remote, tokenizer, transport=Fleet(one=respond))
    asyncio.run(engine.connect())
    with pytest.raises(EngineError, match="the target at http://one/v1 timed out: it sent nothing of a reply for 30 s"):
        run_in_virtual_time(text(engine))


def test_a_server_that_says_nothing_fails_the_start_once(tokenizer: HFTokenizer) -> None:
    requests: list[str] = []

    def respond(request: httpx.Request) -> httpx.Response:
        requests.append(request.url.path)
        return httpx.Response(200, stream=Silent(": keep-alive\n\n"))

    engine = OpenAIEngine(RemoteModel("http://one/v1", "model"), tokenizer, transport=Fleet(one=respond))
    with pytest.raises(EngineStartError, match="timed out: it sent nothing of a reply for 30 s"):
        run_in_virtual_time(engine.connect())
    with pytest.raises(EngineError, match="timed out: it sent nothing of a reply for 120 s"):
        run_in_virtual_time(engine._probe({"prompt": "a"}))
    assert requests == ["/v1/models", "/v1/completions"], "a further attempt would hang as long"


async def test_an_engine_on_a_server_works_in_a_forked_child(tokenizer: HFTokenizer) -> None:
    engine = engine_on({"one": FakeServer(tokenizer, REPLY)}, tokenizer)
    await engine.connect()
    client = engine.server._client
    engine.server._process -= 1  # as in a forked child
    assert await text(engine) == REPLY
    assert engine.server._client is not client, "its connections are the parent's"
