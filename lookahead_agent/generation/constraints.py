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


def call_constraint(tools: Sequence[Mapping[str, Any]], *, several: bool) -> dict[str, Any]:
    """The constraint for a reply that is a call of one of these tools, or of `several` in a list."""
    if several:
        return {"json": {"type": "array", "items": {"anyOf": _calls(tools, "/items/anyOf")}, "minItems": 1}}
    return {"json": {"anyOf": _calls(tools, "/anyOf")}}


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


def loads(text: str) -> Any:
    """The value of a JSON text; raises ValueError if it is none, as NaN."""
    return json.loads(text, strict=False, parse_constant=_refuse)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
