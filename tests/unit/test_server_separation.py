"""Clients of a server neither start models, nor see each other's prompts, nor shut each other out."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr, ValidationError

from lookahead_agent import ChatLookahead
from lookahead_agent.engines import ScriptedEngine, ScriptedTokenizer
from lookahead_agent.engines.scripted import ScriptedStep, reply_script
from lookahead_agent.errors import ConfigurationError, EngineError, PolicyError
from lookahead_agent.generation.local_backend import LocalBackend
from lookahead_agent.policy import as_policy
from lookahead_agent.runtime.engine_selection import RuntimeSpec
from lookahead_agent.runtime.engine_set import EngineSet
from lookahead_agent.runtime.runtime import Runtime
from lookahead_agent.server import ServerSettings
from lookahead_agent.server.clients import Admission, Client, Clients
from lookahead_agent.server.errors import ErrorReplies, RefusedError, refusal
from lookahead_agent.server.models import RunningModels
from tests.unit import test_runtime
from tests.unit.chat import EqualTextEmbedder, scripted_chat
from tests.unit.serving import serving
from tests.waiting import wait_until

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "the patient has diabetes"}]}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


class Pool(test_runtime.Pool):
    """Starts scripted engines that reply."""

    def acquire(self, config: Any) -> Any:
        super().acquire(config)
        return ScriptedEngine(test_runtime.TOKENIZER, reply_script("Fine."))


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    test_runtime.HUB.append(tmp_path)
    yield Pool()
    test_runtime.HUB.clear()


def chat_on(pool: Pool, policy: str = "exact") -> tuple[ChatLookahead, Runtime]:
    """A chat model on a runtime whose engines are started by a pool, without a draft engine."""
    runtime = test_runtime.runtime_on(pool, RuntimeSpec(test_runtime.MODELS), expects_draft=False)
    llm = scripted_chat("unused", policy=policy, max_tokens=20)
    llm._backend = LocalBackend(runtime=runtime)
    return llm, runtime


@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        ({"X-Lookahead-Policy": "random"}, {}),
        ({"X-Lookahead-Policy": "specreason"}, {}),
        ({}, {"policy": "random"}),
        ({}, {"policy": "score"}),
    ],
)
def test_a_requests_policy_starts_no_models(pool: Pool, headers: dict[str, str], fields: dict[str, str]) -> None:
    llm, runtime = chat_on(pool)
    with serving(llm) as (url, _):
        assert httpx.post(url + CHAT, json=BODY).status_code == 200
        engines = runtime.running
        for body in (BODY | fields, BODY | fields | {"stream": True}):
            response = httpx.post(url + CHAT, json=body, headers=headers)
            assert response.status_code == 400
            assert "needs models that do not run here (draft)" in response.json()["error"]["message"]
            assert "--start-models" in response.json()["error"]["message"]
        text = httpx.post(url + "/v1/completions", json={"prompt": "assistant: ", **fields}, headers=headers)
        assert text.status_code == 400
        assert runtime.running is engines
        assert httpx.post(url + CHAT, json=BODY | {"policy": "strict"}).status_code == 200, "it can do without a draft"


def test_the_owner_can_let_requests_start_models(pool: Pool) -> None:
    llm, runtime = chat_on(pool)
    with serving(llm, start_models=True) as (url, _):
        engines = runtime.running
        assert httpx.post(url + CHAT, json=BODY | {"policy": "random"}, timeout=30).status_code == 200
        assert runtime.running is not engines


def test_missing_models_are_named_by_role() -> None:
    tokenizer = ScriptedTokenizer()
    target, draft, judge = (ScriptedEngine(tokenizer, reply_script("Fine.")) for _ in range(3))
    cases = [
        (EngineSet(target), "random", "draft"),
        (EngineSet(target), "balanced", None),  # the target writes alone
        (EngineSet(target, draft), "balanced", "embedding"),
        (EngineSet(target, draft, EqualTextEmbedder()), "balanced", None),
        (EngineSet(target, draft), "judge", None),  # the target judges
        (EngineSet(target, draft), "random", None),
    ]
    for engines, name, missing in cases:
        models = RunningModels(ChatLookahead(engines=engines, policy="off"))
        if missing is None:
            models.check(as_policy(name))
        else:
            with pytest.raises(PolicyError, match=rf"do not run here \({missing}\)"):
                models.check(as_policy(name))
    own = RunningModels(ChatLookahead(engines=EngineSet(target), policy="off", policies={"planner": "random"}))
    own.check(as_policy("exact:depth=3"))  # the owner's own policies need a draft too
    without = EngineSet(target, draft)
    without.judge = None  # the requested judge did not start
    with pytest.raises(PolicyError, match=r"do not run here \(judge\)"):
        RunningModels(ChatLookahead(engines=without, policy="off")).check(as_policy("judge:depth=2"))
    assert judge.healthy


def test_a_judge_and_an_embedder_of_their_own_are_not_started_by_requests(pool: Pool) -> None:
    models = test_runtime.MODELS
    own_judge = models.__class__(**{**vars(models), "judge": models.embedding})
    runtime = test_runtime.runtime_on(pool, RuntimeSpec(own_judge), expects_draft=True)
    llm = scripted_chat("unused", policy="exact:depth=2", max_tokens=20)
    llm._backend = LocalBackend(runtime=runtime)
    llm.start()
    try:
        checked = RunningModels(llm)
        checked.check(as_policy("exact"))
        with pytest.raises(PolicyError, match=r"do not run here \(judge\)"):
            checked.check(as_policy("judge"))
        with pytest.raises(PolicyError, match=r"do not run here \(embedding\)"):
            checked.check(as_policy("embedding"))
    finally:
        llm.close()


# Keys


def test_keys_are_stripped_or_refused_and_never_shown() -> None:
    assert [key.get_secret_value() for key in ServerSettings.model_validate({"api_key": " a\n"}).api_key] == ["a"]
    several = ServerSettings.model_validate({"api_key": ["hidden-1", SecretStr("hidden-2\r\n")]})
    assert [key.get_secret_value() for key in several.api_key] == ["hidden-1", "hidden-2"]
    assert "hidden" not in repr(several)
    for bad in ("", " ", "hidden key", "hidden\x00", "hiddené", ["hidden", ""], ["hidden", 5], [["hidden"]]):
        with pytest.raises(ValidationError) as error:
            ServerSettings.model_validate({"api_key": bad})
        assert "hidden" not in str(error.value)
    assert ServerSettings.model_validate({"api_key": None}).api_key == ()


def test_any_of_several_keys_is_accepted_and_only_a_whole_one() -> None:
    clients = Clients([SecretStr("first-key"), SecretStr("second-key")])
    first, second = (clients.authenticate(f"Bearer {key}") for key in ("first-key", "second-key"))
    assert first is not second
    assert clients.authenticate("bearer  first-key ") is first
    wrong = (
        None,
        "",
        "Bearer",
        "Bearer ",
        "first-key",
        "Basic first-key",
        "Bearer first",
        "Bearer first-keysecond-key",
    )
    for header in (*wrong, "Bearer first-key second-key", "Bearer \xff", "Bearer FIRST-KEY"):
        with pytest.raises(RefusedError) as error:
            clients.authenticate(header)
        assert error.value.status == 401


def test_no_answer_and_no_log_contains_a_key(caplog: pytest.LogCaptureFixture) -> None:
    key, other = "key-of-one-client-4711", "key-of-another-4712"
    caplog.set_level(logging.DEBUG)
    tokenizer = ScriptedTokenizer()
    failing = ScriptedEngine(tokenizer, [ScriptedStep("So.\n\n"), ScriptedStep("x", error="no memory")])
    bodies: list[Any] = [
        *({"messages": []}, {"beams": 1}, BODY | {"policy": "lenient"}, BODY | {"model": "x"}, BODY | {"n": 99}),
        *(BODY | {"max_tokens": -1}, BODY, BODY | {"stream": True}, [], "text", BODY | {"logprobs": True}),
    ]
    with serving(ChatLookahead(engines=EngineSet(failing), policy="off"), api_key=[key, other]) as (url, writer):
        texts = [str(vars(writer.settings)), repr(writer.settings)]
        with httpx.Client(base_url=url) as client:
            for headers in (bearer(key), bearer(other), {"Authorization": f"Basic {key}"}, bearer(f"{key} {other}")):
                sent = headers | {"X-Api-Key": "x"}
                answers = [client.post(CHAT, json=body, headers=sent) for body in bodies]
                answers += [client.post(CHAT, content=b"{", headers=sent | {"Content-Type": "application/json"})]
                answers += [client.get(path, headers=sent) for path in ("/v1/models", "/metrics", "/health", "/nope")]
                texts += [answer.text + str(answer.headers) for answer in answers]
    assert caplog.records
    for secret in (key, other):
        assert not [text for text in texts if secret in text]
        own = [record for record in caplog.records if record.name.startswith(("lookahead_agent", "uvicorn"))]
        assert not [record for record in own if secret in logging.Formatter().format(record)]


@pytest.mark.parametrize(
    "error",
    [
        RefusedError(418, "m"),
        ConfigurationError("c"),
        PolicyError("p"),
        EngineError("e"),
        ValueError("v"),
        KeyError("k"),
    ],
)
def test_every_error_becomes_an_answer_of_bounded_length(error: Exception) -> None:
    statuses: list[int] = []
    refused, content = ErrorReplies(statuses.append).describe(error)
    assert statuses == [refused.status] == [refusal(error).status]
    assert content["error"].keys() == {"message", "type", "param", "code"}
    long = ErrorReplies(statuses.append).describe(RefusedError(400, "x" * 10**6, param="y" * 10**6))[1]["error"]
    assert max(len(long["message"]), len(long["param"])) <= 1000


# Caches


def cached_chat() -> ChatLookahead:
    engine = ScriptedEngine(ScriptedTokenizer(), reply_script("Fine."), prefix_cache=True)
    return ChatLookahead(engines=EngineSet(engine), policy="off", max_tokens=20)


def cached_tokens(url: str, key: str | None = None, **fields: Any) -> int:
    answer = httpx.post(url + CHAT, json=BODY | fields, headers=bearer(key) if key else {}).json()
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_client_sees_only_its_own_prompts_in_the_cache() -> None:
    llm = cached_chat()
    with serving(llm, api_key=["victim", "attacker"]) as (url, _):
        assert cached_tokens(url, "victim") == 0
        assert cached_tokens(url, "attacker") == 0
        assert cached_tokens(url, "victim") > 0
        assert cached_tokens(url, "attacker") > 0, "its own"
        assert cached_tokens(url, "attacker", cache_salt="mine") == 0
        assert cached_tokens(url, "attacker", cache_salt="mine") > 0
        assert cached_tokens(url, "victim", cache_salt="mine") == 0, "a salt of one client means nothing for another"
        text = {"prompt": "assistant: ", "max_tokens": 1}
        salts = [httpx.post(url + "/v1/completions", json=text, headers=bearer(key)) for key in ("victim", "attacker")]
        assert [answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in salts] == [0, 0]
        assert httpx.get(url + "/metrics").status_code == 401
        assert httpx.get(url + "/metrics", headers=bearer("attacker")).status_code == 200
        assert llm.engines is not None
        assert isinstance(llm.engines.target, ScriptedEngine)
        used = {sampling.cache_salt for _, sampling in llm.engines.target.requests}
        assert None not in used
        assert not [salt for salt in used if salt and ("victim" in salt or "attacker" in salt or "mine" in salt)]
        assert cached_tokens(url, "victim", n=2) > 0
    assert Client(has_key=True).cache_salt(None) != Client(has_key=True).cache_salt(None), (
        "a random number, not the key"
    )


@pytest.mark.parametrize("verifier", ["judge", "score", "likelihood"])
def test_verifiers_ask_with_the_salt_of_the_client(verifier: str) -> None:
    tokenizer = ScriptedTokenizer()
    scripts = [reply_script("So it is 4.\n\nDone."), reply_script("It is 4.\n\nDone.")]
    target, draft = (
        ScriptedEngine(tokenizer, script, logprobs={"yes": -0.1, "no": -3.0, "7": -0.1}) for script in scripts
    )
    policy = as_policy("balanced").with_verifier({"verifier": verifier})
    llm = ChatLookahead(engines=EngineSet(target, draft), policy=policy, max_tokens=20)
    with serving(llm, api_key=["one", "two"]) as (url, _):
        for key in ("one", "two", "one"):
            assert httpx.post(url + CHAT, json=BODY, headers=bearer(key)).status_code == 200
    asked = {sampling.cache_salt for _, sampling in target.requests if sampling.logprobs or sampling.prompt_logprobs}
    written = {sampling.cache_salt for _, sampling in [*target.requests, *draft.requests]}
    assert asked == written
    assert len(asked - {None}) == len(asked) == 2


def test_without_keys_a_request_may_have_its_own_cache_salt() -> None:
    with serving(cached_chat()) as (url, _):
        assert cached_tokens(url) == 0
        assert cached_tokens(url) > 0
        assert cached_tokens(url, cache_salt="mine") == 0
        assert cached_tokens(url, cache_salt="mine") > 0
        assert httpx.post(url + CHAT, json=BODY | {"cache_salt": ""}).status_code == 400
        assert httpx.post(url + CHAT, json=BODY | {"cache_salt": 5}).status_code == 400
        assert httpx.get(url + "/metrics").status_code == 200


# Shares


async def hold(admission: Admission, owner: object, number: int) -> list[asyncio.Task[None]]:
    """Begin `number` replies of an owner, which run until they are cancelled."""

    async def reply() -> None:
        async with admission.slot(owner):
            await asyncio.Event().wait()

    tasks = [asyncio.create_task(reply()) for _ in range(number)]
    await asyncio.sleep(0)
    return tasks


async def end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_requests_of_many_replies_leave_slots_to_others() -> None:
    admission = Admission(32, 64, longest=8)
    attack = [task for _ in range(12) for task in await hold(admission, object(), 8)]
    assert admission.running + admission.waiting == 96
    assert admission.running < 32
    other = await hold(admission, object(), 1)
    assert admission.running + admission.waiting == 97
    running = admission.running
    await end(other)
    assert admission.running == running - 1
    refused = (await hold(admission, attack, 1))[0]
    refused_too = await hold(admission, attack, 1)
    await end([refused, *refused_too])
    await end(attack)
    assert (admission.running, admission.waiting) == (0, 0)


async def test_no_client_fills_the_slots_or_the_queue() -> None:
    admission = Admission(32, 64, share=16, longest=8)
    attack = await hold(admission, "attacker", 200)
    refusals = [task.exception() for task in attack if task.done()]
    assert all(isinstance(error, RefusedError) and error.status == 429 for error in refusals)
    assert (admission.running, admission.waiting) == (17, 32)
    others = await hold(admission, "other", 15)
    assert (admission.running, admission.waiting) == (32, 32)
    more = await hold(admission, "other", 3)
    assert admission.waiting == 35
    await end(attack[:17])
    assert admission.waiting < 35
    assert admission.running == 32
    await end([*attack, *others, *more])
    assert (admission.running, admission.waiting) == (0, 0)


async def test_free_slots_go_to_the_client_with_the_fewest() -> None:
    admission = Admission(4, 8, share=2, longest=8)
    first = await hold(admission, "a", 8)
    second = await hold(admission, "b", 4)
    assert (admission.running, admission.waiting) == (4, 8)
    await end(first[:3])  # the running ones of "a"
    order = [admission.running, admission.waiting]
    assert order[0] == 4
    await end(second[:1])
    assert admission.running == 4
    await end([*first, *second])
    assert (admission.running, admission.waiting) == (0, 0)


async def test_a_client_without_a_reply_waits_though_another_one_fills_the_queue() -> None:
    admission = Admission(2, 2, longest=8, reserves=True)
    first = await hold(admission, "a", 4)
    second = await hold(admission, "b", 1)
    assert (admission.running, admission.waiting) == (2, 3)
    for owner in ("a", "b"):
        with pytest.raises(RefusedError):
            async with admission.slot(owner):
                pass
    await end(first[:1])
    assert (admission.running, admission.waiting) == (2, 2)
    await end([*first, *second])
    assert (admission.running, admission.waiting) == (0, 0)


async def test_a_cancelled_wait_gives_its_slot_back() -> None:
    admission = Admission(1, 2)
    (running,) = await hold(admission, "a", 1)
    (waiting,) = await hold(admission, "b", 1)
    running.cancel()
    waiting.cancel()  # in the same turn of the loop in which it gets the slot
    await asyncio.gather(running, waiting, return_exceptions=True)
    assert (admission.running, admission.waiting) == (0, 0)
    (again,) = await hold(admission, "c", 1)
    assert admission.running == 1
    await end([again])


def slow_chat() -> ChatLookahead:
    """Replies hang, unless they have at most three tokens."""
    engine = ScriptedEngine(ScriptedTokenizer(), [ScriptedStep("One two three."), ScriptedStep("x", hangs=True)])
    return ChatLookahead(engines=EngineSet(engine), policy="off", max_tokens=50)


@pytest.mark.parametrize("keys", [[], ["shared"], ["one", "two"]])
async def test_twelve_requests_of_eight_replies_do_not_shut_others_out(keys: list[str]) -> None:
    with serving(slow_chat(), api_key=keys) as (url, writer):
        async with httpx.AsyncClient(base_url=url, timeout=30, limits=httpx.Limits(max_connections=None)) as client:
            greedy = bearer(keys[0]) if keys else {}
            attack = [asyncio.create_task(client.post(CHAT, json=BODY | {"n": 8}, headers=greedy)) for _ in range(12)]
            await wait_until(lambda: writer.admission.running + writer.admission.waiting >= 32)
            for _ in range(3):
                fields = {"max_tokens": 3}
                response = await client.post(CHAT, json=BODY | fields, headers=bearer(keys[-1]) if keys else {})
                assert response.status_code == 200, response.text
            for task in attack:
                task.cancel()
            await asyncio.gather(*attack, return_exceptions=True)
        await wait_until(lambda: writer.admission.running == writer.admission.waiting == 0)


def test_json_of_the_metadata_has_no_salt() -> None:
    with serving(cached_chat(), api_key="one") as (url, writer):
        answer = httpx.post(url + CHAT, json=BODY | {"cache_salt": "mine"}, headers=bearer("one")).json()
        salt = writer.clients.authenticate("Bearer one").cache_salt("mine")
    assert salt is not None
    assert salt not in json.dumps(answer)
