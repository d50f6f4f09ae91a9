"""Every field of a request works or is refused by name, and a request is read in time linear in its length."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest

from lookahead_agent.engines import ScriptedEngine
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.server import ServerSettings
from lookahead_agent.server.body import BodyReader
from lookahead_agent.server.clients import Client
from lookahead_agent.server.errors import RefusedError
from lookahead_agent.server.protocol import ChatRequestBody, CompletionRequestBody
from lookahead_agent.server.writer import ReplyWriter
from tests.unit.chat import scripted_chat
from tests.unit.serving import serving

CHAT = {"messages": [{"role": "user", "content": "?"}]}
TEXT = {"prompt": "assistant: "}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}

# Fields of OpenAI's and vLLM's APIs, with a value that would have an effect.
REFUSED: dict[str, Any] = {
    **{
        "audio": {"voice": "alloy", "format": "wav"},
        "modalities": ["text", "audio"],
        "prediction": {"type": "content"},
    },
    **{"function_call": "auto", "functions": [{"name": "f"}], "logit_bias": {"1": 5}, "logprobs": True},
    **{
        "top_logprobs": 3,
        "presence_penalty": 1,
        "frequency_penalty": 1,
        "reasoning_effort": "high",
        "verbosity": "low",
    },
    **{
        "service_tier": "flex",
        "store": True,
        "metadata": {"a": "b"},
        "web_search_options": {},
        "safety_identifier": "u",
    },
    **{"prompt_cache_key": "k", "prompt_cache_retention": "24h", "best_of": 2, "use_beam_search": True, "min_p": 0.1},
    **{"repetition_penalty": 1.1, "length_penalty": 1.1, "stop_token_ids": [1], "include_stop_str_in_output": True},
    **{"ignore_eos": True, "min_tokens": 5, "skip_special_tokens": False, "spaces_between_special_tokens": False},
    **{"truncate_prompt_tokens": 5, "prompt_logprobs": 1, "allowed_token_ids": [1], "bad_words": ["a"], "echo": True},
    **{"add_generation_prompt": False, "continue_final_message": True, "add_special_tokens": True, "documents": [{}]},
    **{"chat_template": "{{ 1 }}", "mm_processor_kwargs": {}, "guided_json": {}, "guided_regex": "a", "priority": 1},
    **{"guided_choice": ["a"], "structured_outputs": {"regex": "a"}, "logits_processors": ["a"], "request_id": "a"},
    **{"return_token_ids": True, "return_tokens_as_token_ids": True, "kv_transfer_params": {}, "vllm_xargs": {}},
    **{"include_reasoning": False, "reasoning": True, "num_predict": 5, "options": {"num_ctx": 5}, "think": False},
    **{"extra_body": {"a": 1}, "timeout": 5, "max_output_tokens": 5, "input": "?", "instructions": "a", "suffix": "a"},
}
WORKING: dict[str, Any] = {
    **{"model": "qwen2.5-coder-1.5b", "n": 2, "stream": True, "seed": 1, "temperature": 0.5, "top_p": 0.5, "top_k": 5},
    **{"max_tokens": 3, "stop": "\n\n", "user": "u", "policy": "off", "node": "planner", "cache_salt": "mine"},
    **{"response_format": {"type": "json_object"}},
}
WORKING_IN_CHAT: dict[str, Any] = {
    **{"max_completion_tokens": 3, "tools": [TOOL], "parallel_tool_calls": False, "tool_choice": "none"},
    **{"chat_template_kwargs": {"enable_thinking": False}, "store": False, "metadata": {}, "logprobs": False},
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(scripted_chat('{"a": 1}', policy="off")) as (address, _):
        yield address


def test_every_field_works_or_is_refused_by_name(url: str) -> None:
    with httpx.Client(base_url=url, timeout=30) as client:
        for path, body, more in (
            ("/v1/chat/completions", CHAT, WORKING_IN_CHAT),
            ("/v1/completions", TEXT, {"best_of": 1, "echo": False}),
        ):
            for name, value in (WORKING | more).items():
                assert client.post(path, json=body | {name: value}).status_code == 200, name
                assert client.post(path, json=body | {name: None}).status_code == 200, name
            for name, value in REFUSED.items():
                response = client.post(path, json=body | {name: value})
                assert response.status_code == 400, name
                error = response.json()["error"]
                assert name.removeprefix("top_") in f"{error['message']} {error['param']}", (name, error)
        limits = client.post("/v1/chat/completions", json=CHAT | {"max_tokens": 1, "max_completion_tokens": 2})
        assert limits.status_code == 400
        assert limits.json()["error"]["message"].startswith("body: max_tokens and max_completion_tokens are one option")
        for options in ({"include_obfuscation": True}, {"chunk_size": 5}):
            response = client.post("/v1/chat/completions", json=CHAT | {"stream": True, "stream_options": options})
            assert response.status_code == 400
            assert next(iter(options)) in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "json_object", "schema": {"type": "object", "required": ["a"]}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object", "required": ["a"]}}},
    ],
)
def test_a_schema_reaches_the_engine_in_both_forms(response_format: dict[str, Any]) -> None:
    llm = scripted_chat('{"a": 1}', policy="off")
    with serving(llm) as (url, _):
        body = CHAT | {"response_format": response_format}
        assert httpx.post(url + "/v1/chat/completions", json=body, timeout=30).status_code == 200
        unknown = body | {"response_format": response_format | {"grammar": "a"}}
        response = httpx.post(url + "/v1/chat/completions", json=unknown, timeout=30)
        assert response.status_code == 400
        assert "grammar" in response.json()["error"]["message"]
    assert llm.engines is not None
    assert isinstance(llm.engines.target, ScriptedEngine)
    structured = [sampling.structured for _, sampling in llm.engines.target.requests]
    assert structured == [{"json": {"type": "object", "required": ["a"]}}]


def long_bodies(length: int) -> Iterator[tuple[type[ChatRequestBody | CompletionRequestBody], bytes]]:
    """Bodies of nested and repeated quotes, brackets, tags, fences and names."""

    def chat(**fields: Any) -> tuple[type[ChatRequestBody], bytes]:
        return ChatRequestBody, json.dumps(CHAT | fields).encode()

    for part in ('"', '\\"', "\\", "{", "[", "[]", "<tool_call>", "```\n", "<think>", "é", "\n", "{% ", "$ref"):
        text = part * (length // len(part))
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": text}}
        history = [{"role": "assistant", "content": text, "tool_calls": [call]}]
        history += [{"role": "tool", "tool_call_id": "1", "content": text}, {"role": "user", "content": text}]
        yield chat(messages=history)
        yield ChatRequestBody, b'{"messages": ' + text.encode()
        yield chat(**{text: 1})
        yield chat(stop=[text[: length // 16] + str(number) for number in range(16)])
        yield chat(policy=text, cache_salt=text, user=text)
        yield chat(tools=[{"type": "function", "function": {"name": "f", "parameters": {"pattern": text}}}])
        yield CompletionRequestBody, json.dumps({"prompt": text}).encode()
    yield chat(messages=CHAT["messages"] * (length // 40))
    yield ChatRequestBody, b'{"seed": ' + b"9" * length + b"}"
    yield ChatRequestBody, ("{" + ",".join(f'"a{number}": 1' for number in range(length // 12)) + ', "a0": 1}').encode()
    yield ChatRequestBody, ("{" + '"a": 1,' * (length // 7) + '"a": 1}').encode()
    yield ChatRequestBody, b'{"messages": "' + b"\\ud83d" * (length // 6) + b'"}'
    for schema in (
        {"properties": {f"a{number}": {"type": "string"} for number in range(length // 30)}},
        {"$defs": {f"a{number}": {"$ref": f"#/$defs/a{number + 1}"} for number in range(length // 40)}, "$ref": "#"},
        {"anyOf": [{}] * (length // 4)},
        {"required": ["a"] * (length // 5)},
    ):
        yield chat(response_format={"type": "json_object", "schema": schema})


async def test_reading_a_long_request_is_quick() -> None:
    """The bound is many times what it takes: a quadratic step would take minutes."""
    writer = ReplyWriter(scripted_chat("Fine.", policy="off"), ServerSettings())
    bodies, client = BodyReader(20), Client(has_key=False)
    for model, data in long_bodies(1 << 16):
        began = time.process_time()
        with suppress(RefusedError, ConfigurationError):
            writer.requests(await bodies.parse(data, model, 8192), client, None, None)
        assert time.process_time() - began < 2, data[:200]
