"""Forms in real vLLM: what is written is JSON of the schema, and what cannot be is refused in words."""

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
from tests.unit.test_json_schema import chain

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
    "references": chain(12, 10),
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


def form(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}


@pytest.mark.parametrize("policy", ["off", "exact", r"balanced:delimiter=/\s+/:max_step_tokens=2"])
@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_a_form_is_whole_and_has_no_white_space(tiny: ChatLookahead, policy: str, seed: int | None) -> None:
    asked = tiny.bind(response_format=Form.of(Small).response_format, temperature=1.0, seed=seed, policy=policy)
    message = asked.invoke("A two?", stop=['"', "b"])
    assert message.response_metadata["finish_reason"] == "stop"
    assert Small.model_validate_json(message.text)
    # A grammar lets a key come twice, so that the text is not what its value would be written as.
    assert not re.search(r"\s", re.sub(r'"(?:[^"\\]|\\.)*"', "", message.text))
    assert json.loads(message.text).keys() == {"first", "kind", "numbers", "counts"}
    called = tiny.bind_tools([measure], tool_choice="any").invoke("A two?", temperature=1.0, seed=seed, policy=policy)
    (call,) = called.tool_calls
    assert call["args"] in ({"unit": "m"}, {"unit": "s"})


def test_an_object_that_is_composed_is_not_closed(tiny: ChatLookahead) -> None:
    parts = [
        {"type": "object", "properties": {name: {"enum": [number]}}, "required": [name]}
        for number, name in enumerate("ab")
    ]
    closed = {"allOf": parts, "maxProperties": 2}
    message = tiny.invoke("A two?", response_format=form(closed), temperature=1.0)
    assert json.loads(message.text) == {"a": 0, "b": 1}


@pytest.mark.parametrize("name", REFUSED)
def test_what_vllm_refuses_is_the_callers(tiny: ChatLookahead, name: str) -> None:
    inside = {"type": "object", "properties": {"a": REFUSED[name]}, "required": ["a"]}
    called = {"type": "function", "function": {"name": "f", "description": "", "parameters": inside}}
    either = {"tools": [called], "response_format": form({"type": "object"})}
    for options in (
        {"response_format": form(inside)},
        {"tools": [called], "tool_choice": "required"},
        # Where nothing satisfies one of two, the other is left.
        *([either] if name != "contradiction" else []),
    ):
        with pytest.raises(ConfigurationError, match=r"vLLM refuses the request: |JSON schema has at least one"):
            tiny.invoke("A two?", **options)
    assert tiny.invoke("A two?", max_tokens=2).response_metadata["token_ids"]


async def test_a_form_is_checked_before_anything_is_written(tiny: ChatLookahead) -> None:
    assert tiny.backend.runtime is not None
    async with tiny.backend.runtime.engines(as_policy("off")) as engines:
        target = engines.target
        assert isinstance(target, VLLMEngine)
        for schema in REFUSED.values():
            with pytest.raises(ConfigurationError, match="vLLM refuses the request: "):
                await target.check(Sampling(max_tokens=9, structured={"json": schema}))
        await target.check(Sampling(max_tokens=9, structured={"json": LARGE["enum"]}))


async def test_large_schemas_are_written_while_others_are_answered(tiny: ChatLookahead) -> None:
    large = [
        asyncio.create_task(tiny.ainvoke("A two?", response_format=form(schema), temperature=1.0, max_tokens=12))
        for schema in LARGE.values()
    ]
    async with asyncio.timeout(20):
        others = [await tiny.ainvoke(question, max_tokens=4) for question in questions(4, seed=2)]
    assert all(other.response_metadata["token_ids"] for other in others)
    async with asyncio.timeout(60):
        written = await asyncio.gather(*large)
    assert all(message.response_metadata["token_ids"] for message in written)
    assert written[0].text.startswith('"value ')
    assert written[3].text.startswith('{"p0":{"p0":')


def test_a_model_that_begins_no_call_answers_in_the_form(tiny: ChatLookahead) -> None:
    asked = tiny.bind_tools([measure]).bind(response_format=Form.of(Small).response_format)
    for question in questions(4, seed=3):
        message = asked.invoke(question)
        assert Small.model_validate_json(message.text)
        assert message.tool_calls == []
