"""Structured output in real vLLM: replies are JSON of the schema, and an unsupported schema is a clear error."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, Literal

import pytest
from langchain_core.tools import tool
from pydantic import BaseModel, Field

from lookahead_agent import ChatLookahead
from lookahead_agent.chat.structured_output import Form
from lookahead_agent.engines import Sampling
from lookahead_agent.engines.vllm_engine import VLLMEngine
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.policy import as_policy
from tests.integration.tiny_models import questions
from tests.unit.test_json_schema import reference_tree

REFUSED: dict[str, dict[str, Any]] = {
    "type": {"type": "str"},
    "reference": {"$ref": "#/$defs/nothing"},
    "remote reference": {"$ref": "https://example.org/schema.json"},
    "pattern": {"type": "string", "pattern": "([a"},
    "contradiction": {"type": "integer", "minimum": 5, "maximum": 3},
    "empty enum": {"enum": []},
    "keyword": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
}
LARGE: dict[str, dict[str, Any]] = {
    "enum": {"enum": [f"value {number}" for number in range(10_000)]},
    "text": {"type": "string", "minLength": 3, "maxLength": 10**9},
    "lists": {"type": "array", "maxItems": 5_000, "items": {"type": "array", "maxItems": 5_000, "items": {}}},
    "references": reference_tree(12, 10),
    "patterns": {"type": "string", "pattern": "^((a{1,999}|b{3,500}){1,999}){1,999}$"},
}


class Small(BaseModel):
    first: bool
    kind: Literal["a", "b"]
    numbers: list[Literal[1, 2]] = Field(max_length=3)
    counts: dict[Literal["a b", "c|d"], bool]


@tool
def measure(unit: Literal["m", "s"]) -> str:
    """Measure."""
    return unit


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}


@pytest.mark.parametrize("policy", ["off", "exact", r"balanced:delimiter=/\s+/:max_step_tokens=2"])
@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_structured_output_is_complete_and_compact(tiny: ChatLookahead, policy: str, seed: int | None) -> None:
    structured = tiny.bind(response_format=Form.of(Small).response_format, temperature=1.0, seed=seed, policy=policy)
    message = structured.invoke("A two?", stop=['"', "b"])
    assert message.response_metadata["finish_reason"] == "stop"
    assert Small.model_validate_json(message.text)
    # The grammar allows duplicate keys, so the text may differ from the serialized value.
    assert not re.search(r"\s", re.sub(r'"(?:[^"\\]|\\.)*"', "", message.text))
    assert json.loads(message.text).keys() == {"first", "kind", "numbers", "counts"}
    reply = tiny.bind_tools([measure], tool_choice="any").invoke("A two?", temperature=1.0, seed=seed, policy=policy)
    (call,) = reply.tool_calls
    assert call["args"] in ({"unit": "m"}, {"unit": "s"})


def test_object_of_all_of_has_the_properties_of_every_part(tiny: ChatLookahead) -> None:
    parts = [
        {"type": "object", "properties": {name: {"enum": [number]}}, "required": [name]}
        for number, name in enumerate("ab")
    ]
    schema = {"allOf": parts, "maxProperties": 2}
    message = tiny.invoke("A two?", response_format=json_schema(schema), temperature=1.0)
    assert json.loads(message.text) == {"a": 0, "b": 1}


@pytest.mark.parametrize("name", REFUSED)
def test_schema_that_vllm_rejects_raises_a_configuration_error(tiny: ChatLookahead, name: str) -> None:
    schema = {"type": "object", "properties": {"a": REFUSED[name]}, "required": ["a"]}
    function = {"type": "function", "function": {"name": "f", "description": "", "parameters": schema}}
    both = {"tools": [function], "response_format": json_schema({"type": "object"})}
    for options in (
        {"response_format": json_schema(schema)},
        {"tools": [function], "tool_choice": "required"},
        # If no text satisfies one of two alternatives, the grammar keeps the other.
        *([both] if name != "contradiction" else []),
    ):
        with pytest.raises(
            ConfigurationError,
            match=r"vLLM refuses the request: |JSON schema (has at least one|refers to .* never fetched)",
        ):
            tiny.invoke("A two?", **options)
    assert tiny.invoke("A two?", max_tokens=2).response_metadata["token_ids"]


async def test_engine_check_rejects_unsupported_schemas_before_generation(tiny: ChatLookahead) -> None:
    assert tiny.backend.runtime is not None
    async with tiny.backend.runtime.engines(as_policy("off")) as engines:
        target = engines.target
        assert isinstance(target, VLLMEngine)
        for schema in REFUSED.values():
            with pytest.raises(ConfigurationError, match="vLLM refuses the request: "):
                await target.check(Sampling(max_tokens=9, structured={"json": schema}))
        await target.check(Sampling(max_tokens=9, structured={"json": LARGE["enum"]}))


async def test_other_requests_are_answered_while_large_schemas_compile(tiny: ChatLookahead) -> None:
    large = [
        asyncio.create_task(tiny.ainvoke("A two?", response_format=json_schema(schema), temperature=1.0, max_tokens=12))
        for schema in LARGE.values()
    ]
    async with asyncio.timeout(20):
        others = [await tiny.ainvoke(question, max_tokens=4) for question in questions(4, seed=2)]
    assert all(other.response_metadata["token_ids"] for other in others)
    async with asyncio.timeout(60):
        replies = await asyncio.gather(*large)
    assert all(message.response_metadata["token_ids"] for message in replies)
    assert replies[0].text.startswith('"value ')
    assert replies[3].text.startswith('{"p0":{"p0":')


def test_reply_without_a_tool_call_follows_the_response_format(tiny: ChatLookahead) -> None:
    llm = tiny.bind_tools([measure]).bind(response_format=Form.of(Small).response_format)
    for question in questions(4, seed=3):
        message = llm.invoke(question)
        assert Small.model_validate_json(message.text)
        assert message.tool_calls == []
