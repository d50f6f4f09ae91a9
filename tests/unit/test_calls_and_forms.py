"""Calls with tools and a response format: the model calls a tool or answers in the format."""

from __future__ import annotations

import json
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import StructuredTool, tool
from pydantic import BaseModel
from starlette.testclient import TestClient

from lookahead_agent import ChatLookahead
from lookahead_agent.chat.structured_output import Form
from lookahead_agent.engines import ScriptedEngine, ScriptedTokenizer
from lookahead_agent.engines.chat_template import ThinkingTags
from lookahead_agent.engines.json_schema import target
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.generation.call_options import CallOptions, openai_tools
from lookahead_agent.runtime.engine_set import EngineSet
from lookahead_agent.server import ServerSettings
from lookahead_agent.server.app import create_app
from tests.unit.chat import EqualTextEmbedder, reply_script, scripted_chat
from tests.unit.test_json_schema import reference_tree

JSON_OBJECT = {"type": "json_object"}
ARGUMENTS = {"city": "Bonn"}
BARE = json.dumps({"name": "thermometer", "arguments": ARGUMENTS})
TAGGED = f"<tool_call>\n{BARE}\n</tool_call>"


class Weather(BaseModel):
    degrees: int


@tool
def thermometer(city: str) -> str:
    """Measures the temperature in a city."""
    return "17"


def constraints(llm: ChatLookahead) -> list[Any]:
    assert llm.engines is not None
    assert isinstance(llm.engines.target, ScriptedEngine)
    return [sampling.structured for _, sampling in llm.engines.target.requests if sampling.structured is not None]


def client_of(llm: ChatLookahead) -> TestClient:
    return TestClient(create_app(llm, ServerSettings()), base_url="http://localhost")


async def replies_of_all_methods(llm: ChatLookahead, **options: Any) -> list[AIMessage]:
    """Replies of `invoke`, `ainvoke`, `stream` and `astream`."""
    bound = llm.bind_tools([thermometer], **options)
    streamed: Any = None
    for chunk in bound.stream("?"):
        streamed = chunk if streamed is None else streamed + chunk
    astreamed: Any = None
    async for chunk in bound.astream("?"):
        astreamed = chunk if astreamed is None else astreamed + chunk
    return [bound.invoke("?"), await bound.ainvoke("?"), streamed, astreamed]


@pytest.mark.parametrize("response_format", [JSON_OBJECT, Form.of(Weather).response_format])
@pytest.mark.parametrize("text", [BARE, TAGGED])
async def test_tool_call_is_parsed_in_spite_of_a_response_format(text: str, response_format: dict[str, Any]) -> None:
    llm = scripted_chat(text)
    for message in await replies_of_all_methods(llm, response_format=response_format):
        assert [(call["name"], call["args"]) for call in message.tool_calls] == [("thermometer", ARGUMENTS)]
        assert (message.text, message.invalid_tool_calls) == ("", [])
        assert message.response_metadata["finish_reason"] == "tool_calls"
    assert len(constraints(llm)) == 4


@pytest.mark.parametrize(
    ("response_format", "text"),
    [
        (JSON_OBJECT, '{"degrees": 17}'),
        (JSON_OBJECT, '{"name": "thermostat", "arguments": {}}'),
        (Form.of(Weather).response_format, '{"degrees": 17}'),
        (Form.of(list[int]).response_format, "[]"),
    ],
)
async def test_answer_in_the_response_format_is_no_tool_call(response_format: dict[str, Any], text: str) -> None:
    for message in await replies_of_all_methods(scripted_chat(text), response_format=response_format):
        assert (message.text, message.tool_calls, message.invalid_tool_calls) == (text, [], [])
        assert message.response_metadata["finish_reason"] == "stop"


@pytest.mark.parametrize("text", ["It is 17 degrees.", "", "17", '{"degrees": 17}'])
def test_reply_that_begins_no_call_is_constrained_to_the_response_format(text: str) -> None:
    llm = scripted_chat(text)
    llm.bind_tools([thermometer]).invoke("?", response_format=Form.of(Weather).response_format)
    assert constraints(llm) == [{"json": Weather.model_json_schema()}]


@pytest.mark.parametrize("text", [BARE, TAGGED, f"Let me see.\n{TAGGED}", TAGGED[:30]])
def test_reply_that_begins_a_call_is_constrained_to_the_tools(text: str) -> None:
    llm = scripted_chat(text)
    message = llm.bind_tools([thermometer]).invoke("?", response_format=Form.of(Weather).response_format)
    (constraint,) = constraints(llm)
    (call,) = constraint["json"]["anyOf"]
    assert call["properties"]["name"] == {"const": "thermometer"}
    metadata = message.response_metadata["lookahead"]
    assert metadata["steps"] == 1
    assert metadata["tokens"]["target"]["committed"] == message.usage_metadata["output_tokens"]  # type: ignore[index]
    assert metadata["tokens"]["target"]["aborted"] > 0


async def test_parallel_calls_may_replace_the_answer() -> None:
    llm = scripted_chat(f"[{BARE}, {BARE}]")
    options = {"parallel_tool_calls": True, "response_format": Form.of(Weather).response_format}
    for message in await replies_of_all_methods(llm, **options):
        assert [call["args"] for call in message.tool_calls] == [ARGUMENTS, ARGUMENTS]


BROKEN = TAGGED.replace('"Bonn"', "Bonn")
TWO_CALLS = [
    f"{TAGGED}\n{TAGGED}",
    f"{BROKEN}\n{TAGGED}",
    f"{BARE}\n{BARE}",
    f"[{BARE}, {BARE}]",
    f"{BROKEN}\n{BROKEN}",
]


@pytest.mark.parametrize("text", TWO_CALLS)
@pytest.mark.parametrize(
    ("options", "single"),
    [
        ({"parallel_tool_calls": False}, True),
        ({"parallel_tool_calls": False, "tool_choice": "any"}, True),
        ({"parallel_tool_calls": False, "tool_choice": "thermometer"}, True),
        ({"parallel_tool_calls": False, "response_format": JSON_OBJECT}, True),
        ({"parallel_tool_calls": False, "response_format": Form.of(Weather).response_format}, True),
        ({"tool_choice": "any"}, False),
        ({"parallel_tool_calls": True, "tool_choice": "any"}, False),
        ({}, False),
    ],
)
async def test_without_parallel_calls_a_reply_has_one_call_whatever_the_engine_writes(
    text: str, options: dict[str, Any], single: bool
) -> None:
    for message in await replies_of_all_methods(scripted_chat(text, policy="off"), **options):
        found = len(message.tool_calls) + len(message.invalid_tool_calls)
        assert found == 1 if single else found >= 1
        assert not single or bool(message.tool_calls) == (text != TWO_CALLS[-1])


OTHER = json.dumps({"name": "delete_all", "arguments": {}})


@pytest.mark.parametrize("text", [OTHER, f"<tool_call>{OTHER}</tool_call>{TAGGED}"])
@pytest.mark.parametrize("parallel", [True, False])
def test_a_required_call_of_another_tool_is_invalid_whatever_the_engine_writes(text: str, parallel: bool) -> None:
    llm = scripted_chat(text, policy="off")
    message = llm.bind_tools([thermometer], tool_choice="thermometer", parallel_tool_calls=parallel).invoke("?")
    assert [call["name"] for call in message.tool_calls] == ["thermometer"] * (BARE in text)
    reasons = [(call["name"], call["error"]) for call in message.invalid_tool_calls]
    expected = [("delete_all", "not a tool call: the reply had to call thermometer")]
    assert reasons == ([] if BARE in text and not parallel else expected)


SCHEMA = Weather.model_json_schema()


@pytest.mark.parametrize("strict", [{}, {"strict": True}, {"description": "How warm it is."}])
def test_a_schema_of_a_json_object_constrains_the_reply_as_a_json_schema_does(strict: dict[str, Any]) -> None:
    formats: list[dict[str, Any]] = [
        {"type": "json_object", "schema": SCHEMA},
        {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, **strict}},
    ]
    for response_format in formats:
        llm = scripted_chat('{"degrees": 17}')
        llm.invoke("?", response_format=response_format)
        body = {"messages": [{"role": "user", "content": "?"}], "response_format": response_format}
        assert client_of(llm).post("/v1/chat/completions", json=body).status_code == 200
        assert constraints(llm) == [{"json": SCHEMA}] * 2


@pytest.mark.parametrize(
    ("response_format", "name"),
    [
        ({"type": "text", "schema": SCHEMA}, "schema"),
        ({"type": "json_object", "schema": "x"}, "schema"),
        ({"type": "json_object", "json_schema": {"schema": SCHEMA}}, "json_schema"),
        ({"type": "json_object", "required": []}, "required"),
        ({"type": "json_schema", "schema": SCHEMA}, "schema"),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "mode": 1}}, "json_schema.mode"),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}, "extra": 1}, "extra"),
    ],
)
def test_a_part_of_a_response_format_without_effect_is_refused_by_name(
    response_format: dict[str, Any], name: str
) -> None:
    llm = scripted_chat('{"degrees": 17}')
    with pytest.raises(ConfigurationError, match=f"not an object with .*'{name}'"):
        llm.invoke("?", response_format=response_format)
    body = {"messages": [{"role": "user", "content": "?"}], "response_format": response_format}
    response = client_of(llm).post("/v1/chat/completions", json=body)
    assert (response.status_code, name in response.json()["error"]["message"]) == (400, True)


def test_a_part_of_a_tool_choice_without_effect_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="tool_choice has 'cache_control'"):
        scripted_chat(BARE).bind_tools([thermometer], tool_choice={"type": "any", "cache_control": {}})


@pytest.mark.parametrize("choice", [{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "thermometer"}])
def test_anthropics_choice_without_parallel_calls_gives_one_call(choice: dict[str, Any]) -> None:
    llm = scripted_chat(TAGGED + TAGGED)
    one = choice | {"disable_parallel_tool_use": True}
    tools: list[Any] = [thermometer]
    assert len(llm.bind_tools(tools, tool_choice=one).invoke("?").tool_calls) == 1
    assert len(llm.invoke("?", tools=tools, tool_choice=one).tool_calls) == 1
    body = {"messages": [{"role": "user", "content": "?"}], "tools": openai_tools(tools), "tool_choice": one}
    message = client_of(llm).post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert len(message["tool_calls"]) == 1
    several = choice | {"disable_parallel_tool_use": False}
    assert CallOptions(tools=tools, tool_choice=several).parallel_tool_calls is True
    contradiction = {"parallel_tool_calls": True, "tool_choice": one}
    wrongs: list[dict[str, Any]] = [contradiction, {"tool_choice": choice | {"disable_parallel_tool_use": 1}}]
    for wrong in wrongs:
        with pytest.raises(ConfigurationError, match="disable_parallel_tool_use is true or false"):
            llm.bind_tools(tools, **wrong)


@pytest.mark.parametrize("response_format", [ProviderStrategy(Weather), Weather])
@pytest.mark.parametrize("tagged", [True, False])
async def test_agent_calls_a_tool_before_its_structured_response(tagged: bool, response_format: Any) -> None:
    def reply(prompt: str) -> str:
        return '{"degrees": 17}' if "17" in prompt else TAGGED if tagged else BARE

    llm = scripted_chat(reply)
    agent = create_agent(llm, [thermometer], response_format=response_format)
    for result in (
        agent.invoke({"messages": [("user", "How warm is Bonn?")]}),
        await agent.ainvoke({"messages": [("user", "How warm is Bonn?")]}),
        list(agent.stream({"messages": [("user", "How warm is Bonn?")]}, stream_mode="values"))[-1],
    ):
        assert result["structured_response"] == Weather(degrees=17)
        tool_results = [message.content for message in result["messages"] if isinstance(message, ToolMessage)]
        assert tool_results == ["17"]


@pytest.mark.parametrize("text", [BARE, '{"degrees": 17}'])
def test_thinking_is_unconstrained_before_a_call_or_an_answer(text: str) -> None:
    tokenizer = ScriptedTokenizer(ThinkingTags(), opens_thinking=True)
    script = reply_script(lambda _: f"<think>\nLet me see.\n\nSo it is.\n</think>{text}")
    target = ScriptedEngine(tokenizer, script)
    llm = ChatLookahead(engines=EngineSet(target, ScriptedEngine(tokenizer, script), EqualTextEmbedder()), stop=["see"])
    message = llm.bind_tools([thermometer]).invoke("?", response_format=Form.of(Weather).response_format)
    assert [call["args"] for call in message.tool_calls] == ([ARGUMENTS] if text == BARE else [])
    assert message.text == ("" if text == BARE else text)
    assert message.additional_kwargs["reasoning_content"] == "Let me see.\n\nSo it is."
    assert [bool(sampling.structured) for _, sampling in target.requests][-1] is True
    assert sum(sampling.structured is not None for _, sampling in target.requests) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", [BARE, TAGGED, '{"degrees": 17}'])
def test_server_returns_a_call_or_an_answer_in_the_response_format(text: str, stream: bool) -> None:
    client = client_of(scripted_chat(text))
    body = {
        "messages": [{"role": "user", "content": "?"}],
        "tools": [{"type": "function", "function": {"name": "thermometer", "parameters": {"type": "object"}}}],
        "response_format": Form.of(Weather).response_format,
        "stream": stream,
    }
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    if stream:
        chunks = [json.loads(line[6:]) for line in response.text.split("\n") if line.startswith("data: {")]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
        content = "".join(delta.get("content") or "" for delta in deltas)
        calls = [call for delta in deltas for call in delta.get("tool_calls") or ()]
    else:
        message = response.json()["choices"][0]["message"]
        content, calls = message["content"] or "", message["tool_calls"] or []
    is_answer = "degrees" in text
    assert content == (text if is_answer else "")
    assert [json.loads(call["function"]["arguments"]) for call in calls] == ([] if is_answer else [ARGUMENTS])


@pytest.mark.parametrize(
    "schema",
    [{"enum": list(range(20_000))}, {"type": "array", "maxItems": 10**7}, {"type": "string", "maxLength": 2**40}],
)
@pytest.mark.parametrize("place", ["form", "call"])
def test_server_answers_a_schema_bomb_with_status_400(schema: dict[str, Any], place: str) -> None:
    parameters = {"type": "object", "properties": {"a": schema}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    response_format = {"response_format": {"type": "json_schema", "json_schema": {"name": "f", "schema": schema}}}
    body = {"messages": [{"role": "user", "content": "?"}]}
    option = response_format if place == "form" else {"tools": tools, "tool_choice": "required"}
    response = client_of(scripted_chat("{}")).post("/v1/chat/completions", json=body | option)
    assert response.status_code == 400
    assert "JSON schema has at most" in response.json()["error"]["message"]


def test_forced_call_with_a_response_format_is_rejected() -> None:
    llm = scripted_chat(BARE)
    with pytest.raises(ConfigurationError, match="at once"):
        llm.bind_tools([thermometer], tool_choice="any").invoke("?", response_format=JSON_OBJECT)


class Branch(BaseModel):
    """A branch."""

    length: int
    next: Branch | None = None


@tool
def climb(branch: Branch) -> str:
    """Climb."""
    return ""


def climb_function(branch: Branch) -> str:
    """Climb."""
    return ""


@pytest.mark.parametrize(("offered", "path"), [(Branch, ()), (climb, ("branch",)), (climb_function, ("branch",))])
def test_recursive_parameters_keep_their_references(offered: Any, path: tuple[str, ...]) -> None:
    llm = scripted_chat(json.dumps({"name": getattr(offered, "name", None) or offered.__name__, "arguments": {}}))
    assert llm.bind_tools([offered], tool_choice="any").invoke("?").tool_calls
    (constraint,) = constraints(llm)
    schema = constraint["json"]
    part = schema["anyOf"][0]["properties"]["arguments"]
    assert part["type"] == "object"
    for name in path:
        part = target(schema, part["properties"][name]["$ref"])
    for _ in range(3):
        assert part["properties"]["length"]["type"] == "integer"
        part = target(schema, part["properties"]["next"]["anyOf"][0]["$ref"])


def test_references_of_a_tool_schema_are_not_expanded() -> None:
    schema = reference_tree(12, 10)
    offered = StructuredTool(name="f", description="F.", args_schema=schema, func=print)
    llm = scripted_chat('{"name": "f", "arguments": {}}')
    assert llm.bind_tools([offered], tool_choice="f").invoke("?").tool_calls[0]["name"] == "f"
    (constraint,) = constraints(llm)
    assert len(json.dumps(constraint)) < 20_000
