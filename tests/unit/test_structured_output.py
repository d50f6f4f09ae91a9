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
from lookahead_agent.engines.json_schema import relocated, subschemas
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


def requested(llm: ChatLookahead) -> list[Any]:
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
def test_schemas(schema: Any, expected: Any) -> None:
    llm = scripted_chat('{"number": 4}')
    for method in ("json_schema", "json_mode"):
        structured = llm.with_structured_output(schema, method=method)  # type: ignore[arg-type]
        assert structured.invoke("?") == expected
        assert list(structured.stream("?"))[-1] == expected
    by_schema, _, in_mode, _ = requested(llm)
    assert by_schema["json"]["properties"]["number"]["type"] == "integer"
    assert in_mode == {"json_object": True}
    name = getattr(schema, "__name__", "answer")
    called = scripted_chat(CALL % name).with_structured_output(schema, method="function_calling")
    assert called.invoke("?") == expected


def test_the_reply_is_the_targets_alone() -> None:
    llm = scripted_chat('{"number": 4}')
    llm.with_structured_output(Answer).invoke("?")
    assert llm.engines is not None
    assert isinstance(llm.engines.draft, ScriptedEngine)
    assert llm.engines.draft.requests == []


def test_what_does_not_fit() -> None:
    llm = scripted_chat('{"number": "four"}')
    with pytest.raises(OutputParserException):
        llm.with_structured_output(Answer).invoke("?")
    result: Any = llm.with_structured_output(Answer, include_raw=True).invoke("?")
    assert result["parsed"] is None
    assert isinstance(result["parsing_error"], OutputParserException)
    assert result["raw"].text == '{"number": "four"}'
    fine: Any = scripted_chat('{"number": 4}').with_structured_output(Answer, include_raw=True).invoke("?")
    assert (fine["parsed"], fine["parsing_error"]) == (Answer(number=4), None)


@pytest.mark.parametrize("schema", [Answer, {"title": "a", "type": "object", "properties": {}}, None])
def test_half_a_reply_is_not_completed(schema: Any) -> None:
    """LangChain's parsers would make 4 of 4711 here."""
    structured = scripted_chat('{"number": 4711, "more": 1}', max_tokens=2)
    method: Any = "json_schema" if schema else "json_mode"
    with pytest.raises(OutputParserException, match="max_tokens"):
        structured.with_structured_output(schema, method=method).invoke("?")
    with pytest.raises(OutputParserException, match="not JSON"):
        scripted_chat('{"number": 4').with_structured_output(schema, method=method).invoke("?")
    fenced = scripted_chat('```json\n{"number": 4}\n```').with_structured_output(schema, method=method).invoke("?")
    assert fenced in ({"number": 4}, Answer(number=4))


def test_bad_arguments() -> None:
    llm = scripted_chat("{}")
    with pytest.raises(ConfigurationError, match="needs a schema"):
        llm.with_structured_output(None)
    with pytest.raises(ConfigurationError, match="not a schema"):
        llm.with_structured_output({"nonsense": 1})
    with pytest.raises(ConfigurationError, match="method is"):
        llm.with_structured_output(Answer, method="xml")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="response_format"):
        llm.invoke("?", response_format={"type": "xml"})
    with pytest.raises(ConfigurationError, match="at once"):
        llm.bind_tools([Answer], tool_choice="any").invoke("?", response_format={"type": "json_object"})
    assert llm.with_structured_output(None, method="json_mode").invoke("?") == {}


@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("forced", [True, False])
def test_a_model_that_thinks_first_thinks_freely_and_then_keeps_to_the_form(opened: bool, forced: bool) -> None:
    tokenizer = ScriptedTokenizer(ThinkingTags(), opens_thinking=opened)
    answer = CALL % "Answer" if forced else '{"number": 4}'
    reply = f"I think.\n\nSo I do.\n</think>{answer}"

    def script(_: str) -> str:
        return f"<think>\n{reply}"  # the part of it that the prompt has already is not written again

    target = ScriptedEngine(tokenizer, reply_script(script, seconds=0.2))
    draft = ScriptedEngine(tokenizer, reply_script(script))
    llm = ChatLookahead(engines=EngineSet(target, draft, EqualTextEmbedder()))
    method: Any = "function_calling" if forced else "json_schema"
    result: Any = llm.with_structured_output(Answer, method=method, include_raw=True).invoke("?")
    assert result["parsed"] == Answer(number=4)
    figures = result["raw"].response_metadata["lookahead"]
    assert figures["accepted"] > 0, "thoughts are speculated on"
    assert result["raw"].content_blocks[0] == {"type": "reasoning", "reasoning": "I think.\n\nSo I do."}
    constrained = [prompt for prompt, sampling in target.requests if sampling.structured]
    assert tokenizer.decode(constrained[-1]).endswith("</think>")
    assert all(sampling.structured is None for _, sampling in draft.requests)


@pytest.mark.parametrize(
    ("thought", "max_tokens"),
    [
        ("I think. " + "And so on. " * 50, 20),  # it is cut off
        ("I think.", 500),  # it ends the reply
        ("I think.\n</think>", 5),  # nothing is left for the answer
    ],
)
def test_thinking_without_room_for_an_answer_has_not_stopped(thought: str, max_tokens: int) -> None:
    tokenizer = ScriptedTokenizer(thinking=ThinkingTags())
    target = ScriptedEngine(tokenizer, reply_script(lambda _: f"<think>\n{thought}"))
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
def test_a_form_is_one_request_and_nothing_ends_it_before_its_end(
    forced: bool, policy: str, temperature: float, seed: int | None
) -> None:
    written = f'{{"name": "City", "arguments": {PRETTY}}}' if forced else PRETTY
    llm = scripted_chat(written, stop=["END"])
    method: Any = "function_calling" if forced else "json_schema"
    result: Any = llm.with_structured_output(City, method=method, include_raw=True).invoke(
        "?", policy=policy, temperature=temperature, seed=seed
    )
    assert result["parsed"] == City(name="Bonn\n\nEND", population=330)
    assert result["raw"].response_metadata["finish_reason"] == ("tool_calls" if forced else "stop")
    (constraint,) = requested(llm)
    assert constraint is not None
    assert result["raw"].response_metadata["lookahead"]["steps"] == 1


@pytest.mark.parametrize("text", ["", "no", '{"number": 4', '{"number": 4} and so on', '{"number": NaN}', "[1,]"])
@pytest.mark.parametrize("form", [{"type": "json_object"}, Form.of(Answer).response_format])
def test_a_reply_that_is_not_json_has_not_stopped(text: str, form: dict[str, Any]) -> None:
    message = scripted_chat(text).invoke("?", response_format=form)
    assert (message.text, message.response_metadata["finish_reason"]) == (text, "length")
    whole = scripted_chat(' {"number": 4}').invoke("?", response_format=form)
    assert whole.response_metadata["finish_reason"] == "stop"


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
async def test_every_schema_in_every_method(
    schema: Any, text: str, expected: Any, method: Any, include_raw: bool
) -> None:
    form = Form.of(schema)
    written = text
    if method == "function_calling":
        arguments = text if form.is_object else f'{{"value": {text}}}'
        written = f'{{"name": "{form.name}", "arguments": {arguments}}}'
    llm = scripted_chat(written)
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
    assert len(requested(llm)) == len(results)
    for constraint in requested(llm):
        if method == "json_schema":
            assert constraint == {"json": form.json_schema}
        if method == "json_mode":
            assert constraint == {"json_object": True}


def test_json_schemas_of_classes_are_pydantics() -> None:
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
def test_a_schema_reaches_the_engine_unchanged_and_a_value_comes_back(
    schema: dict[str, Any], defined: dict[str, Any], value: Any, method: Any
) -> None:
    schema = schema | {"$defs": {"x": defined}}
    before = copy.deepcopy(schema)
    form = Form.of(schema)
    if method == "function_calling" and form.is_object and not isinstance(value, dict):
        value = {"is": value}
    written = json.dumps(value)
    if method == "function_calling":
        written = json.dumps({"name": form.name, "arguments": value if form.is_object else {"value": value}})
    llm = scripted_chat(lambda _: written)
    assert llm.with_structured_output(schema, method=method).invoke("?") == value
    (constraint,) = requested(llm)
    assert schema == before
    if method == "json_schema":
        assert constraint == {"json": schema}
    elif method == "function_calling":
        at = "/anyOf/0/properties/arguments" + ("" if form.is_object else "/properties/value")
        expected = form.tool["function"]["parameters"] if form.is_object else schema
        (call,) = constraint["json"]["anyOf"]
        inner = call["properties"]["arguments"]
        assert (inner if form.is_object else inner["properties"]["value"]) == relocated(expected, at)
        assert "#/$defs" not in json.dumps(
            [ref for part in subschemas(constraint["json"]) for ref in [part.get("$ref")]]
        )


@pytest.mark.parametrize("method", get_args(Method))
@pytest.mark.parametrize("schema", [{"nonsense": 1}, 3, "text", {"name": "f", "parameters": [1]}, object()])
def test_what_is_no_schema_is_refused_in_words(schema: Any, method: Any) -> None:
    with pytest.raises(ConfigurationError, match="not a schema"):
        scripted_chat("{}").with_structured_output(schema, method=method)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
async def test_a_stream_that_breaks_off_says_so_at_its_end(method: Any) -> None:
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
def test_callbacks_are_told_the_schema_as_langchain_converts_it(schema: Any, method: Any) -> None:
    """Also of those that it cannot convert: then they are told of the tool, and the call goes on."""
    told: list[Any] = []

    class Told(BaseCallbackHandler):
        def on_chat_model_start(self, *_: Any, options: dict[str, Any], **__: Any) -> None:
            told.append(options["ls_structured_output_format"]["schema"])

    chat = scripted_chat("{", policy="off").with_structured_output(schema, method=method, include_raw=True)
    chat.invoke("?", {"callbacks": [Told()]})
    assert told[0]["title"] == schema.__name__
    if schema in (Answer, City):
        assert told[0] == convert_to_json_schema(schema)
