"""One set of rules for sampling, stops and tools: in the constructor, in a call, bound, assigned, and over HTTP."""

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

from lookahead_agent import ChatLookahead, VerifierPolicy
from lookahead_agent.engines import ScriptedEngine
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.generation.call_options import CallOptions, SamplingArguments, choose_tools, openai_tools
from lookahead_agent.server.protocol import ChatRequestBody, CompletionRequestBody
from tests.unit.chat import scripted_chat
from tests.unit.serving import serving

TALE = "Nice day. END of story."
BEFORE = "Nice day. "
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
async def test_a_stop_is_a_text_or_several_wherever_it_is_given(stop: Any) -> None:
    assert scripted_chat(TALE, policy="off", stop=stop).invoke("q").text == BEFORE
    llm = scripted_chat(TALE, policy="off")
    assert llm.invoke("q", stop=stop).text == BEFORE
    assert llm.bind(stop=stop).invoke("q").text == BEFORE
    assert (await llm.bind(stop=stop).ainvoke("q")).text == BEFORE
    assert "".join(chunk.text for chunk in llm.stream("q", stop=stop)) == BEFORE
    assert "".join([chunk.text async for chunk in llm.astream("q", stop=stop)]) == BEFORE
    assert [reply.text for reply in llm.batch(["q", "q"], stop=stop)] == [BEFORE] * 2
    assert [reply.text for reply in await llm.abatch(["q"], stop=stop)] == [BEFORE]
    assert llm.bind_tools([add]).bind(stop=stop).invoke("q").text == BEFORE
    chosen = llm.configurable_fields(stop=ConfigurableField("ends"))
    assert chosen.invoke("q", {"configurable": {"ends": stop}}).text == BEFORE


def test_a_stop_that_is_assigned_or_copied_in_is_read_too() -> None:
    llm = scripted_chat(TALE, policy="off")
    llm.stop = "END"  # type: ignore[assignment]
    assert llm.invoke("q").text == BEFORE
    assert scripted_chat(TALE, policy="off").model_copy(update={"stop": "END"}).invoke("q").text == BEFORE


def test_no_stops_at_a_call_are_no_stops() -> None:
    llm = scripted_chat(TALE, policy="off", stop="END")
    assert llm.invoke("q", stop=[]).text == TALE
    assert llm.invoke("q", stop=None).text == BEFORE


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE)
def test_what_is_out_of_range_is_refused_wherever_it_is_given(name: str, value: Any) -> None:
    llm = scripted_chat(TALE, policy="off")
    with pytest.raises(ValidationError, match=name):
        scripted_chat(TALE, **{name: value})
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


def test_fields_calls_and_requests_have_their_bounds_from_one_place() -> None:

    for name in SamplingArguments.model_fields.keys() - {"max_tokens"}:
        fields = [
            model.model_fields[name]
            for model in (ChatLookahead, CallOptions, ChatRequestBody, CompletionRequestBody, SamplingArguments)
        ]
        assert all(field.annotation == fields[-1].annotation for field in fields), name


def test_the_last_seed_is_one_and_several_choices_go_on_from_it() -> None:
    llm = scripted_chat(TALE, policy="off", temperature=1.0)
    with serving(llm) as (url, _):
        body = {"messages": [{"role": "user", "content": "q"}], "seed": 2**63 - 1, "n": 2}
        reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 200
    assert isinstance(llm.engines.target, ScriptedEngine)  # type: ignore[union-attr]
    requests = llm.engines.target.requests  # type: ignore[union-attr]
    assert len({sampling.seed for _, sampling in requests}) >= 2


def test_a_server_refuses_the_same() -> None:

    with serving(scripted_chat(TALE, policy="off")) as (url, _):
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
                assert name in message or "the body is no JSON" in message, (name, value)
        reply = httpx.post(f"{url}/v1/completions", json={"prompt": "q", "stop": "END"}, timeout=60)
        assert reply.json()["choices"][0]["text"] == BEFORE


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
def test_every_usual_form_of_a_tool_choice_forces_a_call(choice: Any) -> None:
    llm = scripted_chat(CALL, policy="off")
    assert llm.bind_tools([add, sub], tool_choice=choice).invoke("q").tool_calls[0]["name"] == "add"
    assert llm.bind_tools([add, sub]).invoke("q", tool_choice=choice).tool_calls[0]["name"] == "add"
    assert llm.invoke("q", tools=[add, sub], tool_choice=choice).tool_calls[0]["name"] == "add"
    named = choice not in ("any", "required", True) and choice not in ({"type": "any"}, {"type": "required"})
    read = CallOptions.read({"tools": [add, sub], "tool_choice": choice})
    assert [each["function"]["name"] for each in read.tools] == (["add"] if named else ["add", "sub"])
    assert read.tool_choice == "required"
    assert CallOptions.read(read.model_dump(exclude_unset=True)) == read


@pytest.mark.parametrize("choice", [None, "auto", False, {"type": "auto"}])
def test_a_choice_may_leave_it_to_the_model(choice: Any) -> None:
    read = CallOptions.read({"tools": [add], "tool_choice": choice})
    assert read.tool_choice is None
    assert len(read.tools) == 1


@pytest.mark.parametrize("choice", ["none", {"type": "none"}])
def test_a_choice_may_forbid_calls(choice: Any) -> None:
    read = CallOptions.read({"tools": [add], "tool_choice": choice})
    assert read.tool_choice is None
    assert read.tools == []


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
def test_other_choices_are_refused_in_words(choice: Any) -> None:
    llm = scripted_chat(CALL, policy="off")
    with pytest.raises(ConfigurationError, match="tool_choice"):
        llm.bind_tools([add], tool_choice=choice)
    with pytest.raises(ConfigurationError, match="tool_choice"):
        llm.invoke("q", tools=[add], tool_choice=choice)


@pytest.mark.parametrize(
    "given",
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
def test_what_is_no_function_is_refused_in_words(given: Any) -> None:
    llm = scripted_chat("Hello.", policy="off")
    for call in (
        lambda: llm.bind_tools([given]),
        lambda: llm.bind_tools([given, add], tool_choice="any"),
        lambda: llm.invoke("q", tools=[given]),
        lambda: llm.bind(tools=[given]).invoke("q"),
    ):
        with pytest.raises(ConfigurationError, match="tool"):
            call()


def test_tools_in_other_formats_become_functions() -> None:
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
    read = CallOptions.read({"tools": tools})
    assert [each["type"] for each in read.tools] == ["function"] * 7
    names = [each["function"]["name"] for each in read.tools]
    assert names == ["add", "Multiply", "anthropic", "typed", "responses", "titled", "openai"]
    assert all("a" in each["function"]["parameters"]["properties"] for each in read.tools)


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
def test_half_a_character_is_refused_and_the_error_says_where(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"character \d+ is the lone surrogate U\+D83D") as error:
        scripted_chat("Hello.").invoke("q", **options)
    assert str(error.value).encode()


@pytest.mark.parametrize("fields", [{"similarity": math.nan}, {"draft_temperature": math.inf, "width": 2}])
def test_a_policy_has_finite_numbers(fields: dict[str, float]) -> None:
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
def test_whatever_is_given_is_read_or_refused_in_words(options: dict[str, Any]) -> None:
    try:
        CallOptions.read(options)
    except ConfigurationError as error:
        str(error).encode()


@given(st.lists(ANYTHING, max_size=2), ANYTHING)
@settings(max_examples=300, deadline=None)
def test_whatever_is_a_tool_or_a_choice_is_read_or_refused_in_words(tools: list[Any], choice: Any) -> None:
    try:
        chosen, _ = choose_tools(openai_tools(tools), choice)
    except ConfigurationError as error:
        str(error).encode()
    else:
        assert all(isinstance(each["function"]["name"], str) for each in chosen)
