"""Options of sampling, stops and tools follow one set of rules in fields, calls, `bind`, assignments and HTTP."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.runnables import ConfigurableField
from langchain_core.tools import tool
from pydantic import BaseModel, ValidationError

from lookahead_agent import VerifierPolicy
from lookahead_agent.engines import ScriptedEngine
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.generation.call_options import CallOptions, choose_tools, openai_tools
from tests.unit.chat import scripted_chat
from tests.unit.serving import serving

REPLY = "Nice day. END of story."
BEFORE_STOP = "Nice day. "
CALL = '{"name":"add","arguments":{"a":1,"b":2}}'

OUT_OF_RANGE: list[tuple[str, Any]] = [
    ("stop", ""),
    ("stop", [""]),
    ("stop", ["END", ""]),
    ("stop", [1]),
    ("stop", b"END"),
    ("stop", 3),
    ("stop", {"END": 1}),
    ("stop", "a\ud83d"),
    ("temperature", -0.1),
    ("temperature", 2.5),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", True),
    ("temperature", "warm"),
    ("temperature", 10**400),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_p", math.nan),
    ("top_k", -1),
    ("top_k", 2**70),
    ("top_k", True),
    ("top_k", 1.5),
    ("seed", 2**70),
    ("seed", -(2**63) - 1),
    ("seed", True),
    ("seed", "7.5"),
    ("max_tokens", 0),
    ("max_tokens", 2**70),
    ("max_tokens", True),
    ("max_tokens", math.nan),
]


@tool
def add(a: int, b: int) -> int:
    """Add."""
    return a + b


@tool
def sub(a: int, b: int) -> int:
    """Subtract."""
    return a - b


@pytest.mark.parametrize("stop", ["END", ["END"], ("END",), ["nowhere", "END"]])
async def test_stop_may_be_one_or_several_texts_in_every_kind_of_call(stop: Any) -> None:
    assert scripted_chat(REPLY, policy="off", stop=stop).invoke("q").text == BEFORE_STOP
    llm = scripted_chat(REPLY, policy="off")
    assert llm.invoke("q", stop=stop).text == BEFORE_STOP
    assert llm.bind(stop=stop).invoke("q").text == BEFORE_STOP
    assert (await llm.bind(stop=stop).ainvoke("q")).text == BEFORE_STOP
    assert "".join(chunk.text for chunk in llm.stream("q", stop=stop)) == BEFORE_STOP
    assert "".join([chunk.text async for chunk in llm.astream("q", stop=stop)]) == BEFORE_STOP
    assert [reply.text for reply in llm.batch(["q", "q"], stop=stop)] == [BEFORE_STOP] * 2
    assert [reply.text for reply in await llm.abatch(["q"], stop=stop)] == [BEFORE_STOP]
    assert llm.bind_tools([add]).bind(stop=stop).invoke("q").text == BEFORE_STOP
    configurable = llm.configurable_fields(stop=ConfigurableField("ends"))
    assert configurable.invoke("q", {"configurable": {"ends": stop}}).text == BEFORE_STOP


def test_assigned_and_copied_stops_apply() -> None:
    llm = scripted_chat(REPLY, policy="off")
    llm.stop = "END"  # type: ignore[assignment]
    assert llm.invoke("q").text == BEFORE_STOP
    assert scripted_chat(REPLY, policy="off").model_copy(update={"stop": "END"}).invoke("q").text == BEFORE_STOP


def test_empty_stops_of_a_call_override_those_of_the_model() -> None:
    llm = scripted_chat(REPLY, policy="off", stop="END")
    assert llm.invoke("q", stop=[]).text == REPLY
    assert llm.invoke("q", stop=None).text == BEFORE_STOP


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE)
def test_out_of_range_options_are_rejected_before_the_engine_gets_a_request(name: str, value: Any) -> None:
    llm = scripted_chat(REPLY, policy="off")
    with pytest.raises(ValidationError, match=name):
        scripted_chat(REPLY, **{name: value})
    calls: list[Callable[[], Any]] = [
        lambda: llm.invoke("q", **{name: value}),
        lambda: llm.bind(**{name: value}).invoke("q"),
        lambda: list(llm.stream("q", **{name: value})),
        lambda: llm.batch(["q"], **{name: value}),
        lambda: llm.model_copy(update={name: value}).invoke("q"),
    ]
    for call in calls:
        with pytest.raises(ConfigurationError, match=name) as error:
            call()
        assert len(str(error.value)) < 300
    assert isinstance(llm.engines.target, ScriptedEngine)  # type: ignore[union-attr]
    assert llm.engines.target.requests == []  # type: ignore[union-attr]


def test_two_choices_from_the_largest_seed_have_different_seeds() -> None:
    llm = scripted_chat(REPLY, policy="off", temperature=1.0)
    with serving(llm) as (url, _):
        body = {"messages": [{"role": "user", "content": "q"}], "seed": 2**63 - 1, "n": 2}
        reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 200
    assert isinstance(llm.engines.target, ScriptedEngine)  # type: ignore[union-attr]
    requests = llm.engines.target.requests  # type: ignore[union-attr]
    assert len({sampling.seed for _, sampling in requests}) >= 2


def test_server_rejects_the_same_out_of_range_options() -> None:
    with serving(scripted_chat(REPLY, policy="off")) as (url, _):
        for name, value in OUT_OF_RANGE:
            if isinstance(value, bytes):
                continue
            for path, prompt in (
                ("chat/completions", {"messages": [{"role": "user", "content": "q"}]}),
                ("completions", {"prompt": "q"}),
            ):
                body = json.dumps({**prompt, name: value})
                headers = {"content-type": "application/json"}
                reply = httpx.post(f"{url}/v1/{path}", content=body, headers=headers, timeout=60)
                assert reply.status_code == 400, (name, value, reply.text)
                message = reply.json()["error"]["message"]
                assert name in message or "the body is not JSON" in message, (name, value)
        reply = httpx.post(f"{url}/v1/completions", json={"prompt": "q", "stop": "END"}, timeout=60)
        assert reply.json()["choices"][0]["text"] == BEFORE_STOP


@pytest.mark.parametrize(
    "choice",
    [
        "any",
        "required",
        True,
        {"type": "any"},
        {"type": "required"},
        "add",
        {"type": "tool", "name": "add"},
        {"type": "function", "name": "add"},
        {"type": "function", "function": {"name": "add"}},
        {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "required", "tools": [{"type": "function", "name": "add"}]},
        },
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "function": {"name": "add"}}]},
    ],
)
def test_every_usual_format_of_a_tool_choice_forces_a_call(choice: Any) -> None:
    llm = scripted_chat(CALL, policy="off")
    assert llm.bind_tools([add, sub], tool_choice=choice).invoke("q").tool_calls[0]["name"] == "add"
    assert llm.bind_tools([add, sub]).invoke("q", tool_choice=choice).tool_calls[0]["name"] == "add"
    assert llm.invoke("q", tools=[add, sub], tool_choice=choice).tool_calls[0]["name"] == "add"
    named = choice not in ("any", "required", True) and choice not in ({"type": "any"}, {"type": "required"})
    options = CallOptions.read({"tools": [add, sub], "tool_choice": choice})
    assert [spec["function"]["name"] for spec in options.tools] == (["add"] if named else ["add", "sub"])
    assert options.tool_choice == "required"
    assert CallOptions.read(options.model_dump(exclude_unset=True)) == options


@pytest.mark.parametrize("choice", [None, "auto", False, {"type": "auto"}])
def test_auto_tool_choice_keeps_the_tools_and_forces_no_call(choice: Any) -> None:
    options = CallOptions.read({"tools": [add], "tool_choice": choice})
    assert options.tool_choice is None
    assert len(options.tools) == 1


@pytest.mark.parametrize("choice", ["none", {"type": "none"}])
def test_tool_choice_none_removes_the_tools(choice: Any) -> None:
    options = CallOptions.read({"tools": [add], "tool_choice": choice})
    assert options.tool_choice is None
    assert options.tools == []


@pytest.mark.parametrize(
    "choice",
    [
        "mul",
        "",
        3,
        {},
        [],
        {"type": "tool"},
        {"type": "function"},
        {"type": "function", "function": {}},
        {"type": "web_search_preview"},
        {"functionCallingConfig": {"mode": "ANY"}},
        {"type": "allowed_tools", "tools": []},
        {"type": "allowed_tools", "mode": "add", "tools": [{"type": "function", "name": "add"}]},
        {"type": "tool", "name": "mul"},
    ],
)
def test_other_tool_choices_raise_a_configuration_error(choice: Any) -> None:
    llm = scripted_chat(CALL, policy="off")
    with pytest.raises(ConfigurationError, match="tool_choice"):
        llm.bind_tools([add], tool_choice=choice)
    with pytest.raises(ConfigurationError, match="tool_choice"):
        llm.invoke("q", tools=[add], tool_choice=choice)


@pytest.mark.parametrize(
    "unsupported",
    [
        {"type": "web_search_preview"},
        {"type": "web_search_preview_2025_03_11"},
        {"type": "code_interpreter", "container": {"type": "auto"}},
        {"type": "mcp", "server_label": "x"},
        {"type": "computer_20250124", "name": "computer"},
        {"type": "custom", "name": "code"},
        {"type": "function"},
        {"type": "function", "function": {}},
        {"type": "function", "function": {"name": ""}},
        {"type": "function", "function": {"name": "f", "parameters": 3}},
        {"type": "function", "function": "f"},
        {},
        3,
        "add",
        None,
    ],
)
def test_unsupported_tools_raise_a_configuration_error(unsupported: Any) -> None:
    llm = scripted_chat("Hello.", policy="off")
    for call in (
        lambda: llm.bind_tools([unsupported]),
        lambda: llm.bind_tools([unsupported, add], tool_choice="any"),
        lambda: llm.invoke("q", tools=[unsupported]),
        lambda: llm.bind(tools=[unsupported]).invoke("q"),
    ):
        with pytest.raises(ConfigurationError, match="tool"):
            call()


def test_tools_in_other_formats_become_openai_functions() -> None:
    class Multiply(BaseModel):
        """Multiply."""

        a: int

    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tools: list[Any] = [
        add,
        Multiply,
        {"name": "anthropic", "description": "d", "input_schema": schema},
        {"type": "custom", "name": "typed", "input_schema": schema},
        {"type": "function", "name": "responses", "description": "d", "parameters": schema},
        {"title": "titled", "description": "d", **schema},
        {"type": "function", "function": {"name": "openai", "parameters": schema}},
    ]
    options = CallOptions.read({"tools": tools})
    assert [spec["type"] for spec in options.tools] == ["function"] * 7
    names = [spec["function"]["name"] for spec in options.tools]
    assert names == ["add", "Multiply", "anthropic", "typed", "responses", "titled", "openai"]
    assert all("a" in spec["function"]["parameters"]["properties"] for spec in options.tools)


LONE = "half \ud83d of it"


@pytest.mark.parametrize(
    "options",
    [
        {"tools": [{"type": "function", "function": {"name": "f", "description": LONE}}]},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {LONE: {}}}}]},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [LONE]}}}},
        {"template_arguments": {"date": [LONE]}},
        {"stop": [LONE]},
        {"policy": {"verifier": "exact", "delimiter": LONE}},
    ],
)
def test_lone_surrogate_is_rejected_with_its_position(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"character \d+ is the lone surrogate U\+D83D") as error:
        scripted_chat("Hello.").invoke("q", **options)
    assert str(error.value).encode()


@pytest.mark.parametrize("fields", [{"similarity": math.nan}, {"draft_temperature": math.inf, "width": 2}])
def test_numbers_of_a_policy_must_be_finite(fields: dict[str, float]) -> None:
    with pytest.raises(ValidationError, match="finite"):
        VerifierPolicy(verifier="embedding", **fields)  # type: ignore[arg-type]


WORDS = st.sampled_from(
    [
        *("type", "function", "name", "tool", "any", "parameters", "allowed_tools", "tools", "mode", "input_schema"),
        *("title", "properties", "json_schema", "schema", "custom", "toolSpec", "required", "add", "\ud83d", ""),
    ]
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(sorted(CallOptions.model_fields)), ANYTHING, max_size=3))
@settings(max_examples=300, deadline=None)
def test_arbitrary_options_are_read_or_raise_a_configuration_error(options: dict[str, Any]) -> None:
    try:
        CallOptions.read(options)
    except ConfigurationError as error:
        str(error).encode()


@given(st.lists(ANYTHING, max_size=2), ANYTHING)
@settings(max_examples=300, deadline=None)
def test_arbitrary_tools_and_choices_are_read_or_raise_a_configuration_error(tools: list[Any], choice: Any) -> None:
    try:
        chosen, _ = choose_tools(openai_tools(tools), choice)
    except ConfigurationError as error:
        str(error).encode()
    else:
        assert all(isinstance(spec["function"]["name"], str) for spec in chosen)
