from __future__ import annotations

import copy
import datetime
import json
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypedDict, get_args

import pytest
import typing_extensions
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.exceptions import OutputParserException
from langchain_core.utils.function_calling import convert_to_json_schema
from pydantic import BaseModel, ConfigDict, RootModel, TypeAdapter
from pydantic.v1 import BaseModel as BaseModelV1

from lookahead_agent import ChatLookahead
from lookahead_agent.chat.structured_output import Form, Method
from lookahead_agent.engines import ScriptedEngine, ScriptedTokenizer
from lookahead_agent.engines.chat_template import ThinkingTags
from lookahead_agent.engines.json_schema import relocate, subschemas
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.runtime.engine_set import EngineSet
from tests.unit.chat import EqualTextEmbedder, reply_script, scripted_chat


class Answer(BaseModel):
    """An answer."""

    number: int
    unit: str = "m"


class AnswerV1(BaseModelV1):
    """An answer."""

    number: int


class AnswerDict(TypedDict):
    """An answer."""

    number: int


JSON_SCHEMA = {
    "title": "answer",
    "type": "object",
    "properties": {"number": {"type": "integer"}},
    "required": ["number"],
}
FUNCTION = {"name": "answer", "description": "An answer.", "parameters": JSON_SCHEMA}
CALL = '{"name": "%s", "arguments": {"number": 4}}'


def requested_constraints(llm: ChatLookahead) -> list[Any]:
    assert llm.engines is not None
    assert isinstance(llm.engines.target, ScriptedEngine)
    return [sampling.structured for _, sampling in llm.engines.target.requests]


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (Answer, Answer(number=4)),
        (AnswerV1, AnswerV1(number=4)),
        (AnswerDict, {"number": 4}),
        (JSON_SCHEMA, {"number": 4}),
        (FUNCTION, {"number": 4}),
    ],
)
def test_schema_types_parse_with_each_method_and_constrain_the_engine(schema: Any, expected: Any) -> None:
    llm = scripted_chat('{"number": 4}')
    for method in ("json_schema", "json_mode"):
        structured = llm.with_structured_output(schema, method=method)  # type: ignore[arg-type]
        assert structured.invoke("?") == expected
        assert list(structured.stream("?"))[-1] == expected
    json_schema, _, json_mode, _ = requested_constraints(llm)
    assert json_schema["json"]["properties"]["number"]["type"] == "integer"
    assert json_mode == {"json_object": True}
    name = getattr(schema, "__name__", "answer")
    function_calling = scripted_chat(CALL % name).with_structured_output(schema, method="function_calling")
    assert function_calling.invoke("?") == expected


def test_structured_output_sends_no_request_to_the_draft() -> None:
    llm = scripted_chat('{"number": 4}')
    llm.with_structured_output(Answer).invoke("?")
    assert llm.engines is not None
    assert isinstance(llm.engines.draft, ScriptedEngine)
    assert llm.engines.draft.requests == []


def test_reply_that_violates_the_schema_is_a_parsing_error() -> None:
    llm = scripted_chat('{"number": "four"}')
    with pytest.raises(OutputParserException):
        llm.with_structured_output(Answer).invoke("?")
    result: Any = llm.with_structured_output(Answer, include_raw=True).invoke("?")
    assert result["parsed"] is None
    assert isinstance(result["parsing_error"], OutputParserException)
    assert result["raw"].text == '{"number": "four"}'
    valid: Any = scripted_chat('{"number": 4}').with_structured_output(Answer, include_raw=True).invoke("?")
    assert (valid["parsed"], valid["parsing_error"]) == (Answer(number=4), None)


@pytest.mark.parametrize("schema", [Answer, {"title": "a", "type": "object", "properties": {}}, None])
def test_truncated_json_raises_instead_of_being_completed(schema: Any) -> None:
    """LangChain's parsers would complete a truncated number to a shorter one."""
    structured = scripted_chat('{"number": 4711, "more": 1}', max_tokens=2)
    method: Any = "json_schema" if schema else "json_mode"
    with pytest.raises(OutputParserException, match="max_tokens"):
        structured.with_structured_output(schema, method=method).invoke("?")
    with pytest.raises(OutputParserException, match="not JSON"):
        scripted_chat('{"number": 4').with_structured_output(schema, method=method).invoke("?")
    fenced = scripted_chat('```json\n{"number": 4}\n```').with_structured_output(schema, method=method).invoke("?")
    assert fenced in ({"number": 4}, Answer(number=4))


def test_invalid_schemas_methods_and_response_formats_raise() -> None:
    llm = scripted_chat("{}")
    with pytest.raises(ConfigurationError, match="needs a schema"):
        llm.with_structured_output(None)
    with pytest.raises(ConfigurationError, match="not a schema"):
        llm.with_structured_output({"nonsense": 1})
    with pytest.raises(ConfigurationError, match="method is"):
        llm.with_structured_output(Answer, method="xml")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="strict=True"):
        llm.with_structured_output(Answer, method="json_mode", strict=True)
    with pytest.raises(ConfigurationError, match="response_format"):
        llm.invoke("?", response_format={"type": "xml"})
    with pytest.raises(ConfigurationError, match="at once"):
        llm.bind_tools([Answer], tool_choice="any").invoke("?", response_format={"type": "json_object"})
    assert llm.with_structured_output(None, method="json_mode").invoke("?") == {}


@pytest.mark.parametrize("opens_thinking", [True, False])
@pytest.mark.parametrize("forced", [True, False])
def test_only_the_answer_after_the_thinking_is_constrained(opens_thinking: bool, forced: bool) -> None:
    tokenizer = ScriptedTokenizer(ThinkingTags(), opens_thinking=opens_thinking)
    answer = CALL % "Answer" if forced else '{"number": 4}'
    reply = f"I think.\n\nSo I do.\n</think>{answer}"

    def script(_: str) -> str:
        return f"<think>\n{reply}"  # the engine skips the part that the prompt already contains

    target = ScriptedEngine(tokenizer, reply_script(script, seconds=0.2))
    draft = ScriptedEngine(tokenizer, reply_script(script))
    llm = ChatLookahead(engines=EngineSet(target, draft, EqualTextEmbedder()))
    method: Any = "function_calling" if forced else "json_schema"
    result: Any = llm.with_structured_output(Answer, method=method, include_raw=True).invoke("?")
    assert result["parsed"] == Answer(number=4)
    metadata = result["raw"].response_metadata["lookahead"]
    assert metadata["accepted"] > 0, "thinking is speculated on"
    assert result["raw"].content_blocks[0] == {"type": "reasoning", "reasoning": "I think.\n\nSo I do."}
    constrained_prompts = [prompt for prompt, sampling in target.requests if sampling.structured]
    assert tokenizer.decode(constrained_prompts[-1]).endswith("</think>")
    assert all(sampling.structured is None for _, sampling in draft.requests)


@pytest.mark.parametrize(
    ("thinking", "max_tokens"),
    [
        ("I think. " + "And so on. " * 50, 20),  # max_tokens truncates the thinking
        ("I think.", 500),  # the reply ends inside the thinking
        ("I think.\n</think>", 5),  # max_tokens leaves no token for the answer
    ],
)
def test_finish_reason_is_length_if_thinking_leaves_no_room_for_the_answer(thinking: str, max_tokens: int) -> None:
    tokenizer = ScriptedTokenizer(thinking=ThinkingTags())
    target = ScriptedEngine(tokenizer, reply_script(lambda _: f"<think>\n{thinking}"))
    llm = ChatLookahead(engines=EngineSet(target), policy="off", max_tokens=max_tokens)
    message = llm.invoke("?", response_format={"type": "json_object"})
    assert (message.text, message.response_metadata["finish_reason"]) == ("", "length")
    assert message.additional_kwargs["reasoning_content"].startswith("I think.")


class City(BaseModel):
    name: str
    population: int


PRETTY = '{\n\n"name": "Bonn\\n\\nEND",\n"population": 330\n}'


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("policy", ["off", "balanced", r"balanced:delimiter=/\n+/:depth=4", "exact:max_step_tokens=3"])
@pytest.mark.parametrize("forced", [False, True])
def test_structured_output_is_one_request_that_no_stop_string_or_delimiter_ends(
    forced: bool, policy: str, temperature: float, seed: int | None
) -> None:
    reply = f'{{"name": "City", "arguments": {PRETTY}}}' if forced else PRETTY
    llm = scripted_chat(reply, stop=["END"])
    method: Any = "function_calling" if forced else "json_schema"
    result: Any = llm.with_structured_output(City, method=method, include_raw=True).invoke(
        "?", policy=policy, temperature=temperature, seed=seed
    )
    assert result["parsed"] == City(name="Bonn\n\nEND", population=330)
    assert result["raw"].response_metadata["finish_reason"] == ("tool_calls" if forced else "stop")
    (constraint,) = requested_constraints(llm)
    assert constraint is not None
    assert result["raw"].response_metadata["lookahead"]["steps"] == 1


@pytest.mark.parametrize(
    "text",
    ["", "no", '{"number": 4', '{"number": 4} and so on', '{"number": NaN}', "[1,]"],
)
@pytest.mark.parametrize("response_format", [{"type": "json_object"}, Form.of(Answer).response_format])
def test_finish_reason_is_length_if_the_reply_is_not_json(text: str, response_format: dict[str, Any]) -> None:
    message = scripted_chat(text).invoke("?", response_format=response_format)
    assert (message.text, message.response_metadata["finish_reason"]) == (text, "length")
    complete = scripted_chat(' {"number": 4}').invoke("?", response_format=response_format)
    assert complete.response_metadata["finish_reason"] == "stop"


@pytest.mark.parametrize("method", ["json_schema", "json_mode"])
def test_a_key_that_occurs_twice_is_a_parsing_error(method: Any) -> None:
    llm = scripted_chat('{"number": 4, "number": 5}', policy="off").with_structured_output(Answer, method=method)
    with pytest.raises(OutputParserException, match="it has the key 'number' twice"):
        llm.invoke("?")


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Tree(BaseModel):
    value: int
    children: list[Tree] = []


@dataclass
class Point:
    x: int
    when: datetime.date


class Numbers(RootModel[list[int]]):
    pass


class Inner(BaseModel):
    color: Color


class Outer(BaseModel):
    model_config = ConfigDict(strict=True, title="An outer thing")
    inner: Inner
    day: datetime.date


class Linked(typing_extensions.TypedDict, total=False):
    next: Linked


CASES: list[tuple[Any, str, Any]] = [
    ({"type": "array", "items": {"type": "integer"}}, "[1, 2]", [1, 2]),
    ({"enum": ["a", "b", 3, None]}, '"b"', "b"),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, '{"a": 1}', {"a": 1}),
    ({"type": ["string", "null"]}, "null", None),
    ({"anyOf": [{"$ref": "#/$defs/A"}], "$defs": {"A": {"type": "boolean"}}}, "false", False),
    ({"type": "array", "items": {"$ref": "#"}}, "[[], [[]]]", [[], [[]]]),
    ({}, '"x"', "x"),
    (JSON_SCHEMA, '{"number": 4}', {"number": 4}),
    (FUNCTION, '{"number": 4}', {"number": 4}),
    ({"type": "function", "function": FUNCTION}, '{"number": 4}', {"number": 4}),
    ({"name": "answer", "input_schema": JSON_SCHEMA}, '{"number": 4}', {"number": 4}),
    (Answer, '{"number": 4}', Answer(number=4)),
    (AnswerDict, '{"number": 4}', {"number": 4}),
    (Linked, '{"next": {"next": {}}}', {"next": {"next": {}}}),
    (Tree, '{"value": 1, "children": [{"value": 2}]}', Tree(value=1, children=[Tree(value=2)])),
    (Numbers, "[1, 2]", Numbers([1, 2])),
    (RootModel[dict[str, int]], '{"a": 1}', RootModel[dict[str, int]]({"a": 1})),
    (Color, '"blue"', Color.BLUE),
    (list[Color], '["blue"]', [Color.BLUE]),
    (Point, '{"x": 1, "when": "2026-01-02"}', Point(1, datetime.date(2026, 1, 2))),
    (
        Outer,
        '{"inner": {"color": "red"}, "day": "2026-01-02"}',
        Outer(inner=Inner(color=Color.RED), day=datetime.date(2026, 1, 2)),
    ),
]


@pytest.mark.parametrize("include_raw", [False, True])
@pytest.mark.parametrize("method", get_args(Method))
@pytest.mark.parametrize(("schema", "text", "expected"), CASES)
async def test_every_schema_parses_with_each_method_sync_async_and_streamed(
    schema: Any, text: str, expected: Any, method: Any, include_raw: bool
) -> None:
    form = Form.of(schema)
    reply = text
    if method == "function_calling":
        arguments = text if form.is_object else f'{{"value": {text}}}'
        reply = f'{{"name": "{form.name}", "arguments": {arguments}}}'
    llm = scripted_chat(reply)
    structured = llm.with_structured_output(schema, method=method, include_raw=include_raw)
    results = [structured.invoke("?"), await structured.ainvoke("?")]
    if include_raw:
        streamed: dict[str, Any] = {}
        for part in structured.stream("?"):
            streamed |= part
        results.append(streamed)
    else:
        results += [list(structured.stream("?"))[-1], [result async for result in structured.astream("?")][-1]]
    for result in results:
        value = result["parsed"] if include_raw else result
        assert value == expected
        assert type(value) is type(expected)
    assert len(requested_constraints(llm)) == len(results)
    for constraint in requested_constraints(llm):
        if method == "json_schema":
            assert constraint == {"json": form.json_schema}
        if method == "json_mode":
            assert constraint == {"json_object": True}


def test_json_schema_of_a_class_is_pydantics() -> None:
    for cls in (Answer, Tree, Numbers, Outer):
        assert Form.of(cls).json_schema == cls.model_json_schema()
    assert Form.of(dict[str, Tree]).json_schema == TypeAdapter(dict[str, Tree]).json_schema()
    assert Form.of(JSON_SCHEMA).json_schema == JSON_SCHEMA


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
SCHEMAS = st.recursive(
    st.sampled_from([{"type": kind} for kind in ("integer", "string", "boolean", "null", "number")])
    | st.just({"$ref": "#/$defs/x"})
    | st.just({"$ref": "#"})
    | st.lists(JSON, min_size=1, max_size=4).map(lambda values: {"enum": values})
    | JSON.map(lambda value: {"const": value}),
    lambda inner: st.one_of(
        inner.map(lambda items: {"type": "array", "items": items, "maxItems": 7}),
        inner.map(lambda values: {"type": "object", "additionalProperties": values}),
        st.lists(inner, min_size=1, max_size=3).map(lambda choices: {"anyOf": choices}),
        st.dictionaries(st.text(max_size=8), inner, max_size=3).map(
            lambda named: {"type": "object", "properties": named, "required": list(named)}
        ),
    ),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(SCHEMAS, SCHEMAS, JSON, st.sampled_from(get_args(Method)))
def test_schema_reaches_the_engine_unchanged_and_the_value_is_parsed(
    schema: dict[str, Any], definition: dict[str, Any], value: Any, method: Any
) -> None:
    schema = schema | {"$defs": {"x": definition}}
    original = copy.deepcopy(schema)
    form = Form.of(schema)
    if method == "function_calling" and form.is_object and not isinstance(value, dict):
        value = {"is": value}
    reply = json.dumps(value)
    if method == "function_calling":
        reply = json.dumps({"name": form.name, "arguments": value if form.is_object else {"value": value}})
    llm = scripted_chat(lambda _: reply)
    assert llm.with_structured_output(schema, method=method).invoke("?") == value
    (constraint,) = requested_constraints(llm)
    assert schema == original
    if method == "json_schema":
        assert constraint == {"json": schema}
    elif method == "function_calling":
        pointer = "/anyOf/0/properties/arguments" + ("" if form.is_object else "/properties/value")
        expected = form.tool["function"]["parameters"] if form.is_object else schema
        (call,) = constraint["json"]["anyOf"]
        arguments = call["properties"]["arguments"]
        assert (arguments if form.is_object else arguments["properties"]["value"]) == relocate(expected, pointer)
        assert "#/$defs" not in json.dumps(
            [ref for part in subschemas(constraint["json"]) for ref in [part.get("$ref")]]
        )


@pytest.mark.parametrize("method", get_args(Method))
@pytest.mark.parametrize("schema", [{"nonsense": 1}, 3, "text", {"name": "f", "parameters": [1]}, object()])
def test_non_schema_raises_a_configuration_error(schema: Any, method: Any) -> None:
    with pytest.raises(ConfigurationError, match="not a schema"):
        scripted_chat("{}").with_structured_output(schema, method=method)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
async def test_truncated_json_raises_in_stream_astream_and_invoke(method: Any) -> None:
    text = '{"number": 47' if method == "json_schema" else CALL[:-4] % "answer"
    structured = scripted_chat(text).with_structured_output(JSON_SCHEMA, method=method)
    with pytest.raises(OutputParserException):
        list(structured.stream("?"))
    with pytest.raises(OutputParserException):
        [result async for result in structured.astream("?")]
    with pytest.raises(OutputParserException):
        structured.invoke("?")


@pytest.mark.parametrize("schema", [Answer, City, Tree, Numbers, Color])
@pytest.mark.parametrize("method", get_args(Method))
def test_callbacks_receive_the_schema_as_langchain_converts_it(schema: Any, method: Any) -> None:
    """If LangChain cannot convert the schema, callbacks receive the tool's schema and the call continues."""
    received: list[Any] = []

    class SchemaRecorder(BaseCallbackHandler):
        def on_chat_model_start(self, *_: Any, options: dict[str, Any], **__: Any) -> None:
            received.append(options["ls_structured_output_format"]["schema"])

    chat = scripted_chat("{", policy="off").with_structured_output(schema, method=method, include_raw=True)
    chat.invoke("?", {"callbacks": [SchemaRecorder()]})
    assert received[0]["title"] == schema.__name__
    if schema in (Answer, City):
        assert received[0] == convert_to_json_schema(schema)
