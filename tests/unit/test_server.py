from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from lookahead_agent import ChatLookahead
from lookahead_agent.engines import ScriptedEngine, ScriptedStep, ScriptedTokenizer
from lookahead_agent.engines.chat_template import ThinkingTags
from lookahead_agent.errors import ConfigurationError, EngineError
from lookahead_agent.runtime.engine_set import EngineSet
from lookahead_agent.server.errors import refusal
from tests.unit.chat import EqualTextEmbedder, reply_script, scripted_chat, scripted_engines
from tests.unit.serving import serving
from tests.unit.test_messages import WHOLE, _tokenizer, chat_with
from tests.waiting import wait_until

REPLY = "First this.\n\nThen that.\n\nIt is 4."
CHAT = {"messages": [{"role": "user", "content": "What is it?"}]}
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(
        scripted_chat(REPLY, policies={"planner": "exact", "solver": "exact:depth=2"}), max_tokens=100, max_choices=3
    ) as (address, _):
        yield address


def post(url: str, body: dict[str, Any], path: str = "/v1/chat/completions", **headers: str) -> httpx.Response:
    return httpx.post(url + path, json=body, headers=headers, timeout=30)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_chat_completion_has_reply_usage_and_speculation_statistics(url: str) -> None:
    body = post(url, CHAT).json()
    (choice,) = body["choices"]
    assert choice["message"]["content"] == REPLY
    assert choice["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] > 0
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + body["usage"]["completion_tokens"]
    assert body["lookahead"] == [
        {"policy": "balanced", "steps": 3, "accepted": 3, "acceptance_rate": 1.0}
        | {"thinking_ended_by_budget": False, "speculation_disabled": False}
    ]


def test_a_streamed_chat_completion_has_deltas_and_usage(url: str) -> None:
    response = post(url, CHAT | {"stream": True, "stream_options": {"include_usage": True}})
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events(response)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert deltas[0]["role"] == "assistant"
    assert "".join(delta.get("content", "") for delta in deltas) == REPLY
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks if chunk["choices"]][-1] == "stop"
    assert chunks[-1]["usage"]["completion_tokens"] > 0
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_n_choices_share_the_prompt_tokens_and_are_indexed(url: str) -> None:
    body = post(url, CHAT | {"n": 3, "seed": 5}).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    single = post(url, CHAT).json()["usage"]
    assert body["usage"]["prompt_tokens"] == single["prompt_tokens"]
    assert body["usage"]["completion_tokens"] == 3 * single["completion_tokens"]
    chunks = events(post(url, CHAT | {"n": 2, "stream": True}))
    for index in range(2):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(choice["delta"].get("content", "") for choice in own) == REPLY


def test_each_choice_has_its_own_seed() -> None:
    llm = scripted_chat(REPLY, temperature=1.0, policy="off")
    with serving(llm) as (url, _):
        post(url, CHAT | {"n": 2, "seed": 5})
    assert llm.engines is not None
    assert isinstance(llm.engines.target, ScriptedEngine)
    seeds = [sampling.seed for _, sampling in llm.engines.target.requests]
    assert len(set(seeds)) == len(seeds) == 6, "two replies of three steps each"


@pytest.mark.parametrize(
    ("headers", "extra", "policy"),
    [
        ({}, {}, "balanced"),
        ({"X-Lookahead-Policy": "off"}, {}, "off"),
        ({}, {"policy": "exact"}, "exact"),
        ({}, {"policy": "cascade"}, "cascade"),
        ({"X-Lookahead-Policy": "off"}, {"policy": "exact"}, "off"),
        ({}, {"policy": "exact:depth=2"}, "exact:depth=2"),
        ({"X-Lookahead-Node": "planner"}, {}, "exact"),
        ({}, {"node": "outer:planner"}, "exact"),
    ],
)
def test_header_body_or_node_sets_policy(url: str, headers: dict[str, str], extra: dict[str, Any], policy: str) -> None:
    assert post(url, CHAT | extra, **headers).json()["lookahead"][0]["policy"] == policy


def test_chat_template_kwargs_set_variables_of_the_template(tmp_path: Path) -> None:
    llm, prompts = chat_with(_tokenizer(tmp_path, WHOLE + "{{ 'Do not think.' if enable_thinking is false }}"))
    with serving(llm) as (url, _):
        for value in (False, True):
            assert post(url, CHAT | {"chat_template_kwargs": {"enable_thinking": value}}).status_code == 200
    assert [prompt.endswith("Do not think.") for prompt in prompts] == [True, False]


def test_more_tokens_than_the_limit_are_cut_to_it() -> None:
    with serving(scripted_chat(REPLY), max_tokens=3) as (address, _):
        for fields in ({"max_tokens": 4}, {"max_tokens": 128_000}, {"max_completion_tokens": 16_384}):
            answer = post(address, CHAT | fields).json()
            assert answer["choices"][0]["finish_reason"] == "length"
            assert answer["usage"]["completion_tokens"] == 3
        text = post(address, {"prompt": "assistant: ", "max_tokens": 8192}, "/v1/completions").json()
        assert text["choices"][0]["finish_reason"] == "length"
        assert post(address, CHAT | {"max_tokens": 0}).status_code == 400


def test_stop_strings_and_max_tokens_end_the_reply(url: str) -> None:
    assert post(url, CHAT | {"stop": "that"}).json()["choices"][0]["message"]["content"] == "First this.\n\nThen "
    choice = post(url, CHAT | {"max_tokens": 3}).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert post(url, CHAT | {"max_completion_tokens": 3}).json()["usage"]["completion_tokens"] == 3


def test_completions_take_texts_and_token_ids(url: str) -> None:
    body = {"prompt": "assistant: ", "max_tokens": 50}
    reply = post(url, body, "/v1/completions").json()
    assert reply["choices"][0]["text"] == REPLY
    assert (
        post(url, body | {"prompt": ["assistant: ", "Hello. assistant: "]}, "/v1/completions").json()["choices"][1][
            "index"
        ]
        == 1
    )
    chunks = events(post(url, body | {"stream": True}, "/v1/completions"))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == REPLY
    ids = post(url, body | {"prompt": [1, 2, 3]}, "/v1/completions")
    assert ids.json()["usage"]["prompt_tokens"] == 3
    for wrong in ([10**9], [], [[]], [-1]):
        assert post(url, body | {"prompt": wrong}, "/v1/completions").status_code == 400
    assert post(url, body | {"prompt": ["a", "b", "c", "d"]}, "/v1/completions").status_code == 400


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "?"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "content"),
        ({"messages": [{"role": "tool", "content": "3"}]}, "tool_call_id"),
        ({"logprobs": True}, "logprobs are not supported"),
        ({"logit_bias": {"1": 5}}, "logit_bias is not supported"),
        ({"presence_penalty": 1}, "presence_penalty is not supported"),
        ({"temperature": -1}, "temperature"),
        ({"n": 4}, "n is at most 3"),
        ({"stop": [""]}, "none of them empty"),
        ({"beams": 4}, "beams"),
        ({"policy": "lenient"}, "takes a policy's name"),
        ({"policy": "certified"}, "takes a policy's name"),
        ({"policy": "verifiers.py"}, "takes a policy's name"),
        ({"policy": "balanced:depth=3"}, "takes a policy's name"),
        ({"policy": r"balanced:delimiter=/(?:.+)+\x00/"}, "takes a policy's name"),
        ({"policy": "risk=0.5"}, "takes a policy's name"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "reads no chat_template"),
        ({"chat_template_kwargs": {"tools": []}}, "reads no tools"),
        ({"chat_template_kwargs": {"truncation": True, "max_length": 3}}, "reads no max_length, truncation"),
        ({"policy": {"verifier": "judge", "p_aligned": 0.9}}, "policy: Input should be a valid string"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"tool_choice": "required"}, "requests with tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "not one of the tools"),
        ({"stream_options": {"include_usage": True}}, "stream=true"),
    ],
)
def test_invalid_requests_return_400_with_a_reason(url: str, change: dict[str, Any], message: str) -> None:
    for stream in (False, True):
        response = post(url, CHAT | ({"stream": True} if stream and "stream_options" not in change else {}) | change)
        assert response.status_code == 400
        error = response.json()["error"]
        assert message in error["message"]
        assert error["type"] == "invalid_request_error"


def test_an_unknown_model_returns_404(url: str) -> None:
    response = post(url, CHAT | {"model": "gpt-9"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    (model,) = httpx.get(url + "/v1/models").json()["data"]
    assert post(url, CHAT | {"model": model["id"]}).status_code == 200
    assert model["max_model_len"] > 0


def test_unknown_paths_wrong_methods_and_malformed_json_are_rejected(url: str) -> None:
    assert httpx.get(url + "/v1/engines").status_code == 404
    assert httpx.get(url + "/v1/chat/completions").status_code == 405
    response = httpx.post(url + "/v1/chat/completions", content=b"{oops", headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert "error" in response.json()


def test_thinking_is_returned_as_reasoning_content_and_as_reasoning() -> None:
    tokenizer = ScriptedTokenizer(thinking=ThinkingTags())
    engine = ScriptedEngine(tokenizer, reply_script(lambda _: "<think>I think.\n\nSo.</think>\n\nIt is 4."))
    with serving(ChatLookahead(engines=EngineSet(engine), policy="off")) as (url, _):
        message = post(url, CHAT).json()["choices"][0]["message"]
        deltas = [chunk["choices"][0]["delta"] for chunk in events(post(url, CHAT | {"stream": True}))]
    assert message["content"] == "It is 4."
    for name in ("reasoning_content", "reasoning"):
        assert message[name] == "I think.\n\nSo."
        assert "".join(delta.get(name, "") for delta in deltas) == "I think.\n\nSo."
    assert "".join(delta.get("content", "") for delta in deltas) == "It is 4."


def test_the_api_key_is_required_except_for_health() -> None:
    with serving(scripted_chat(REPLY), api_key="secret") as (url, _):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            response = post(url, CHAT, **headers)
            assert response.status_code == 401
            assert response.json()["error"]["type"] == "authentication_error"
        assert httpx.get(url + "/v1/models").status_code == 401
        assert post(url, CHAT, Authorization="Bearer secret").status_code == 200
        assert httpx.get(url + "/health").status_code == 200


def test_oversized_bodies_return_413() -> None:
    with serving(scripted_chat(REPLY), max_body_bytes=1000) as (url, _):
        body = json.dumps({"messages": [{"role": "user", "content": "x" * 2000}]}).encode()
        request = {"url": url + "/v1/chat/completions", "headers": {"Content-Type": "application/json"}}
        assert httpx.post(**request, content=body).status_code == 413

        def chunks() -> Iterator[bytes]:
            yield body

        assert httpx.post(**request, content=chunks()).status_code == 413
        assert post(url, CHAT).status_code == 200


def test_prompts_beyond_the_context_return_context_length_exceeded() -> None:
    with serving(ChatLookahead(engines=scripted_engines(REPLY, context_length=60))) as (url, _):
        assert post(url, CHAT).status_code == 200
        response = post(url, {"messages": [{"role": "user", "content": "word " * 90}]})
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"


def slow_chat(seconds: float = 30.0) -> ChatLookahead:
    tokenizer = ScriptedTokenizer()
    steps = [ScriptedStep("First this.\n\n"), ScriptedStep("Then that.\n\n", seconds), ScriptedStep("It is 4.")]
    return ChatLookahead(
        engines=EngineSet(ScriptedEngine(tokenizer, steps), ScriptedEngine(tokenizer, steps), EqualTextEmbedder())
    )


def in_flight(llm: ChatLookahead) -> int:
    assert llm.engines is not None
    assert llm.engines.draft is not None
    return llm.engines.target.in_flight + llm.engines.draft.in_flight


async def test_requests_beyond_the_queue_return_429() -> None:
    llm = slow_chat()
    with serving(llm, concurrent=2, queue=1) as (url, writer):
        async with httpx.AsyncClient(timeout=60) as client:
            waiting = [asyncio.create_task(client.post(url + "/v1/chat/completions", json=CHAT)) for _ in range(3)]
            await wait_until(lambda: writer.admission.running == 2 and writer.admission.waiting == 1)
            refused = await client.post(url + "/v1/chat/completions", json=CHAT)
            assert refused.status_code == 429
            assert int(refused.headers["Retry-After"]) >= 1
            assert refused.json()["error"]["type"] == "rate_limit_error"
            streamed = await client.post(url + "/v1/chat/completions", json=CHAT | {"stream": True})
            assert streamed.status_code == 429
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        await wait_until(lambda: in_flight(llm) == 0 and writer.admission.running == writer.admission.waiting == 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_disconnects_aborts_its_engine_requests(stream: bool) -> None:
    llm = slow_chat()
    with serving(llm) as (url, writer):
        async with httpx.AsyncClient(timeout=60) as client:

            async def read_reply() -> None:
                body = CHAT | {"stream": stream}
                async with client.stream("POST", url + "/v1/chat/completions", json=body) as response:
                    async for _ in response.aiter_lines():
                        continue

            task = asyncio.create_task(read_reply())
            await wait_until(lambda: in_flight(llm) > 0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await wait_until(lambda: in_flight(llm) == 0 and writer.admission.running == 0)


def test_shutdown_waits_for_running_requests() -> None:
    with ThreadPoolExecutor() as threads:
        with serving(slow_chat(1.0)) as (url, writer):
            pending = threads.submit(post, url, CHAT)
            asyncio.run(wait_until(lambda: writer.admission.running == 1))
        assert pending.result().json()["choices"][0]["message"]["content"].endswith("It is 4.")


def failing_chat(error: str) -> ChatLookahead:
    tokenizer = ScriptedTokenizer()
    steps = [ScriptedStep("First this.\n\n"), ScriptedStep("x", error=error)]
    return ChatLookahead(engines=EngineSet(ScriptedEngine(tokenizer, steps)), policy="off")


def test_engine_errors_are_logged_but_not_disclosed(caplog: pytest.LogCaptureFixture) -> None:
    with serving(failing_chat("cannot read /srv/models/secret-name/config.json")) as (url, _):
        response = post(url, CHAT)
        assert response.status_code == 500
        assert "secret-name" not in response.text
        assert "Traceback" not in response.text
        *_, last = events(post(url, CHAT | {"stream": True}))
        assert last["error"]["type"] == "server_error"
        assert "secret-name" not in json.dumps(last)
    assert any("secret-name" in record.message for record in caplog.records)


def test_configuration_errors_hide_paths_and_urls() -> None:
    refused = refusal(ConfigurationError("/srv/models/qwen has no chat template; see http://10.0.0.3:8000/v1"))
    assert (refused.status, refused.message) == (400, "… has no chat template; see …")
    assert refusal(EngineError("x")).status == 500


def test_metrics_count_replies_steps_and_tokens_by_node_and_policy() -> None:
    llm = scripted_chat(REPLY, lambda _: "First this.\n\nThen  that.\n\nIt is 4.", policies={"planner": "exact"})
    with serving(llm) as (url, _):
        post(url, CHAT, **{"X-Lookahead-Node": "planner"})
        with httpx.Client(base_url=url, timeout=30) as client:
            for number in range(40):
                headers = {"X-Lookahead-Node": f"made up {number}"}
                client.post("/v1/responses", json={"input": "?", "store": False}, headers=headers)
        post(url, CHAT | {"policy": "exact"})
        post(url, CHAT | {"n": 0})
        text = httpx.get(url + "/metrics").text
    assert 'lookahead_steps_total{node="planner",policy="exact",source="draft"} 2.0' in text
    assert 'lookahead_steps_total{node="planner",policy="exact",source="target"} 1.0' in text
    assert 'lookahead_steps_total{node="made up 0",policy="balanced",source="draft"} 2.0' in text
    assert 'lookahead_replies_total{finish_reason="stop",node="made up 31",policy="balanced"} 1.0' in text
    assert 'lookahead_replies_total{finish_reason="stop",node="other",policy="balanced"} 8.0' in text
    assert "made up 32" not in text
    assert 'lookahead_replies_total{finish_reason="stop",node="",policy="exact"} 1.0' in text
    assert 'lookahead_tokens_total{fate="committed",model="draft",node="planner",policy="exact"}' in text
    assert 'lookahead_refused_total{status="400"} 1.0' in text
    prompt_lines = [line for line in text.splitlines() if 'prompt_tokens_total{model="draft",node="planner"' in line]
    assert [float(line.split()[-1]) > 0 for line in sorted(prompt_lines)] == [False, True], "all prefilled, none cached"
    for histogram in ("reply", "prompt", "writing"):
        assert f'lookahead_{histogram}_seconds_count{{node="planner",policy="exact"}} 1.0' in text
    assert "lookahead_running 0.0" in text
    assert 'lookahead_audited_steps{outcome="agreed"} 0.0' in text
    assert "lookahead_tightened_policies 0.0" in text


def test_health_returns_503_after_an_engine_has_ended() -> None:
    llm = scripted_chat(REPLY)
    with serving(llm) as (url, _):
        assert httpx.get(url + "/health").json()["status"] == "ok"
        assert llm.engines is not None
        llm.engines.target.close()
        response = httpx.get(url + "/health")
    assert response.status_code == 503
    assert response.json()["status"] == "failing"
