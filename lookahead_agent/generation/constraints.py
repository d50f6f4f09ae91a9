"""Constraints on replies: the schemas by which vLLM's guided decoding holds them to a form, or to tool calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from lookahead_agent.engines.json_schema import relocated
from lookahead_agent.errors import ConfigurationError


def constraint(response_format: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The constraint of an OpenAI `response_format`, for `Sampling.structured`; None: free text."""
    match response_format:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"json_object": True}
        case {"type": "json_schema", "json_schema": {"schema": dict() as schema}}:
            return {"json": schema}
    raise ConfigurationError(
        'response_format is {"type": "text"}, {"type": "json_object"} or '
        '{"type": "json_schema", "json_schema": {"name": …, "schema": …}}'
    )


def call_constraint(
    tools: Sequence[Mapping[str, Any]], *, several: bool, form: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The constraint for a reply that is a call of one of these tools, or of `several` in a list, or in a form."""
    if form is not None and "json" not in form:
        return dict(form)  # a call is an object too
    if form is None and several:
        return {"json": {"type": "array", "items": {"anyOf": _calls(tools, "/items/anyOf")}, "minItems": 1}}
    choices = _calls(tools, "/anyOf")
    if form is not None and several:
        at = f"/anyOf/{len(choices)}/items/anyOf"
        choices.append({"type": "array", "items": {"anyOf": _calls(tools, at)}, "minItems": 1})
    if form is not None:
        choices.append(relocated(form["json"], f"/anyOf/{len(choices)}"))
    return {"json": {"anyOf": choices}}


def _calls(tools: Sequence[Mapping[str, Any]], at: str) -> list[dict[str, Any]]:
    """The schema of a call of each tool; `at` is the place of their list, as a JSON pointer."""
    return [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool["function"]["name"]},
                "arguments": relocated(
                    tool["function"].get("parameters") or {"type": "object"},
                    f"{at}/{index}/properties/arguments",
                ),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for index, tool in enumerate(tools)
    ]


def is_json(text: str) -> bool:
    """Whether a text is one whole JSON value."""
    try:
        loads(text)
    except ValueError:
        return False
    return True


def is_call(text: str, tools: Sequence[Mapping[str, Any]], form: Mapping[str, Any]) -> bool:
    """Whether a reply under `call_constraint` is a call, or a list of calls.

    A form that describes the fields of a call itself is what is meant by them.
    """
    described = form.get("json", {}).get("properties")
    if isinstance(described, Mapping) and {"name", "arguments"} <= described.keys():
        return False
    names = {tool["function"]["name"] for tool in tools}
    try:
        value = loads(text)
    except ValueError:
        return False
    calls = value if isinstance(value, list) and value else [value]
    return all(
        isinstance(call, dict)
        and call.keys() == {"name", "arguments"}
        and isinstance(call["name"], str)
        and call["name"] in names
        and isinstance(call["arguments"], dict)
        for call in calls
    )


def loads(text: str) -> Any:
    """The value of a JSON text; raises ValueError if it is none, as NaN."""
    return json.loads(text, strict=False, parse_constant=_refuse)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
