from __future__ import annotations

import datetime
import ipaddress
import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from lookahead_agent.engines import ScriptedEngine
from lookahead_agent.engines.json_schema import (
    check_schema,
    composes,
    for_llguidance,
    refers_to_itself,
    relocate,
    target,
)
from lookahead_agent.errors import ConfigurationError
from tests.unit.chat import scripted_chat

INTEGER = {"type": "integer"}


def reference_tree(levels: int, width: int) -> dict[str, Any]:
    """Return a small schema with a tree of references, which grows exponentially if they are inlined."""
    defs: dict[str, Any] = {
        f"L{level}": {
            "type": "object",
            "properties": {f"p{each}": {"$ref": f"#/$defs/L{level + 1}"} for each in range(width)},
            "required": [f"p{each}" for each in range(width)],
        }
        for level in range(levels)
    }
    return {"$ref": "#/$defs/L0", "$defs": defs | {f"L{levels}": INTEGER}}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = INTEGER
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def objects(names: str, *, required: bool = False) -> list[dict[str, Any]]:
    return [
        {"type": "object", "properties": {name: INTEGER}, **({"required": [name]} if required else {})}
        for name in names
    ]


REFUSED: dict[str, tuple[Any, str]] = {
    "bytes": ({"enum": ["x" * 300_000]}, "262,144 bytes"),
    "enum": ({"enum": list(range(20_000))}, "10,000 values in enums"),
    "enums": ({"anyOf": [{"enum": list(range(6_000))}, {"enum": list(range(6_000))}]}, "10,000 values in enums"),
    "maxItems": ({"type": "array", "maxItems": 10**7}, "10,000 as its maxItems"),
    "minItems": ({"type": "array", "minItems": 10**7}, "10,000 as its minItems"),
    "items together": (
        {"type": "object", "properties": {str(each): {"type": "array", "maxItems": 9_000} for each in range(3)}},
        "20,000 as the sum",
    ),
    "maxLength": ({"type": "string", "maxLength": 2**31}, "as its maxLength"),
    "maxProperties": ({"type": "object", "maxProperties": 2**70}, "as its maxProperties"),
    "levels": (nested(70), "64 levels"),
    "more levels than Python has": (nested(sys.getrecursionlimit()), "64 levels"),
    "levels by references": (
        {"$ref": "#/$defs/0", "$defs": {str(n): {"anyOf": [{"$ref": f"#/$defs/{n + 1}"}]} for n in range(1_000)}},
        "600 levels",
    ),
    "objects": ({"type": "object", "properties": {str(n): INTEGER for n in range(5_000)}}, "4,000 objects"),
    "optional": ({"type": "object", "properties": {str(n): INTEGER for n in range(401)}}, "400 optional"),
    "alternatives": ({"anyOf": objects("".join(map(chr, range(500, 1_000))))}, "400 alternatives"),
    "combined": ({"allOf": [{"anyOf": objects("ab")} for _ in range(6)]}, "50 alternatives that are combined"),
    "combined by reference": (
        {"allOf": [{"$ref": "#/$defs/x"}] * 6, "$defs": {"x": {"oneOf": objects("ab")}}},
        "50 alternatives that are combined",
    ),
    "multipleOf": ({"type": "integer", "multipleOf": 1_000_003}, "multipleOf"),
    "common multiple": ({"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}, "multipleOf"),
    "empty enum": ({"type": "object", "properties": {"b": {"enum": []}}}, "at least one"),
    "empty alternatives": ({"oneOf": []}, "at least one"),
    "not JSON": ({"enum": [{1}]}, "is JSON"),
    "not a number": ({"const": float("nan")}, "is JSON"),
}
ACCEPTED: dict[str, dict[str, Any]] = {
    "references": reference_tree(12, 10),
    "long enum": {"enum": list(range(9_000))},
    "long text": {"type": "string", "minLength": 5, "maxLength": 10**9},
    "nested lists": {"type": "array", "maxItems": 1000, "items": {"type": "array", "maxItems": 1000, "items": INTEGER}},
    "refers to itself": {"type": "object", "properties": {"next": {"$ref": "#"}}},
    "refers to nothing": {"$ref": "#/$defs/nothing"},
    "refers in a circle": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
    "round multiple": {"multipleOf": 10**6},
    "small multiple": {"multipleOf": 0.0001},
    "many fields": {
        "type": "object",
        "properties": {str(n): INTEGER for n in range(1_500)},
        "required": [*map(str, range(1_500))],
    },
    "alternatives": {"oneOf": objects("".join(map(chr, range(500, 690))), required=True)},
    "keywords of other types": {"enum": 3, "required": 1, "properties": 2, "anyOf": {}, "maxItems": "x", "$ref": 7},
}


@pytest.mark.parametrize("name", REFUSED)
def test_schema_beyond_a_limit_is_refused(name: str) -> None:
    schema, limit = REFUSED[name]
    with pytest.raises(ConfigurationError, match=limit):
        check_schema(schema)


@pytest.mark.parametrize("name", ACCEPTED)
def test_schema_within_the_limits_is_accepted(name: str) -> None:
    check_schema(ACCEPTED[name])


@pytest.mark.parametrize("name", sorted(REFUSED.keys() - {"not JSON", "not a number"}))
@pytest.mark.parametrize("usage", ["form", "call", "either"])
def test_no_engine_receives_a_refused_schema(name: str, usage: str) -> None:
    llm = scripted_chat("{}")
    inner = REFUSED[name][0]
    schema = inner if "$defs" in inner else {"type": "object", "properties": {"a": inner}}
    tool = {"type": "function", "function": {"name": "bomb", "description": "", "parameters": schema}}
    response_format = {"type": "json_schema", "json_schema": {"name": "bomb", "schema": schema}}
    options: dict[str, Any] = {
        "form": {"response_format": response_format},
        "call": {"tools": [tool], "tool_choice": "required"},
        "either": {"tools": [tool], "response_format": {"type": "json_object"}},
    }[usage]
    with pytest.raises(ConfigurationError, match="JSON schema"):
        llm.invoke("?", **options)
    assert llm.engines is not None
    assert isinstance(llm.engines.target, ScriptedEngine)
    assert llm.engines.target.requests == []


def test_references_are_never_inlined() -> None:
    """The inlined schema would have a million million integers."""
    tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": reference_tree(12, 10)}}
    llm = scripted_chat('{"name": "f", "arguments": {}}')
    assert llm.invoke("?", tools=[tool], tool_choice="required").tool_calls[0]["name"] == "f"
    assert llm.engines is not None
    assert isinstance(llm.engines.target, ScriptedEngine)
    (constraint,) = [sampling.structured for _, sampling in llm.engines.target.requests]
    assert constraint is not None
    assert len(json.dumps(constraint)) < 20_000
    check_schema(constraint["json"])


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "object", "properties": {"a": INTEGER}}, False),
        ({"anyOf": objects("ab")}, False),
        ({"allOf": objects("a")}, False),
        ({"allOf": objects("ab")}, True),
        ({"properties": {"a": INTEGER}, "anyOf": objects("b")}, True),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b", "properties": {}}, "b": INTEGER}}, True),
    ],
)
def test_composes_detects_objects_described_in_several_places(schema: dict[str, Any], expected: bool) -> None:
    assert composes(schema) is expected


SCHEMAS = st.recursive(
    st.sampled_from(
        [INTEGER, {"$ref": "#"}, {"$ref": "#/$defs/~1 ~0%25"}, {"const": {"$ref": "#"}}, {"$ref": "#anchor"}]
    ),
    lambda inner: st.one_of(
        inner.map(lambda items: {"type": "array", "items": items}),
        st.lists(inner, min_size=1, max_size=3).map(lambda choices: {"anyOf": choices}),
        st.dictionaries(st.sampled_from(["a", "$ref", "items"]), inner, max_size=3).map(
            lambda named: {"properties": named}
        ),
    ),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(SCHEMAS, SCHEMAS)
def test_references_of_a_relocated_schema_keep_their_targets(schema: dict[str, Any], defined: dict[str, Any]) -> None:
    schema = {**schema, "$defs": {"/ ~%": defined}}
    outer = {"anyOf": [INTEGER, {"type": "array", "items": relocate(schema, "/anyOf/1/items")}]}

    def assert_same(inside: Any, original: Any) -> None:
        if isinstance(original, dict):
            assert inside.keys() == original.keys()
            for key, value in original.items():
                if key == "$ref" and isinstance(value, str) and value != "#anchor" and inside[key] != value:
                    assert (target(outer, inside[key]) is None) == (target(schema, value) is None)
                    assert inside[key] == "#/anyOf/1/items" + value[1:]
                else:
                    assert_same(inside[key], value)
        elif isinstance(original, list):
            assert len(inside) == len(original)
            for one, other in zip(inside, original, strict=True):
                assert_same(one, other)
        else:
            assert inside == original

    inside = outer["anyOf"][1]["items"]  # type: ignore[index]
    assert_same(inside, schema)
    assert target(outer, "#/anyOf/1/items") == inside
    assert relocate(schema, "") == schema


@pytest.mark.parametrize(
    ("names", "pattern"),
    [
        ({"enum": ["a b", "c|d"]}, r"^(?:a\ b|c\|d)$"),
        ({"const": "k"}, "^(?:k)$"),
        ({"pattern": "^x"}, "^x"),
        ({"$ref": "#/$defs/K"}, "^(?:k)$"),
    ],
)
def test_property_names_become_a_pattern_property(names: dict[str, Any], pattern: str) -> None:
    schema = {"type": "array", "items": {"type": "object", "propertyNames": names, "additionalProperties": INTEGER}}
    full = schema | {"$defs": {"K": {"enum": ["k"]}}}
    result = for_llguidance(full)
    assert result["items"] == {"type": "object", "patternProperties": {pattern: INTEGER}, "additionalProperties": False}
    assert "propertyNames" in full["items"], "the caller's schema is not modified"


@pytest.mark.parametrize(
    "schema",
    [
        {"propertyNames": {"maxLength": 3}},
        {"propertyNames": {"enum": [1]}},
        {"propertyNames": {"enum": []}},
        {"propertyNames": {"$ref": "#/$defs/nothing"}},
        {"propertyNames": {"const": "a"}, "properties": {"a": INTEGER}},
    ],
)
def test_unsupported_property_names_are_left_unchanged(schema: dict[str, Any]) -> None:
    assert for_llguidance(schema) == schema


class Formats(pydantic.BaseModel):
    data: bytes
    key: pydantic.SecretStr
    place: Path
    network: ipaddress.IPv4Network
    day: datetime.date
    code: pydantic.Json[int]


def test_only_formats_that_llguidance_supports_are_kept() -> None:
    schema = Formats.model_json_schema()
    converted = for_llguidance(schema)
    kept = {name: part["format"] for name, part in converted["properties"].items() if "format" in part}
    assert kept == {"day": "date"}
    assert LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(converted))) == ""
    assert LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(schema))) != ""
    assert for_llguidance({"properties": {"format": {"const": "binary"}}}) == {
        "properties": {"format": {"const": "binary"}}
    }


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"$ref": "http://127.0.0.1:9/x"}, "http://127.0.0.1:9/x, which is never fetched"),
        ({"properties": {"a": {"$ref": "file:///etc/passwd#/a"}}}, "file:///etc/passwd, which is never fetched"),
        ({"const": "\ud800"}, "the lone surrogate U\\+D800"),
        ({"properties": {"\udfff": {}}}, "the lone surrogate U\\+DFFF"),
        ({"minimum": 10**400}, "minimum of a JSON schema is at most 1e\\+300"),
        ({"$ref": "#/" + "[" * 3, "anyOf": 10**5000}, "a JSON schema is JSON"),
    ],
)
def test_a_hostile_schema_is_one_error(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_schema(schema)


def test_schemas_of_two_kilobytes_are_read_in_linear_time() -> None:
    for keyword in ("allOf", "anyOf", "oneOf"):
        chain: dict[str, Any] = {"d0": {"type": "string"}}
        for number in range(1, 30):
            chain[f"d{number}"] = {keyword: [{"$ref": f"#/$defs/d{number - 1}"}] * 2}
        schema = {"$ref": "#/$defs/d29", "$defs": chain}
        with suppress(ConfigurationError):
            check_schema(schema)
        assert not refers_to_itself(schema)
    check_schema({"anyOf": [{"$ref": "#/anyOf/" + "9" * 5000}, {"$ref": "#/anyOf/0"}]})
