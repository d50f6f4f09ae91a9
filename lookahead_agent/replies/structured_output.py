"""Replies in a given form: JSON by schema, by vLLM's guided decoding, or by a tool call."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial as bound
from operator import itemgetter
from typing import Any, Literal

from langchain_core.exceptions import OutputParserException
from langchain_core.output_parsers import (
    BaseCumulativeTransformOutputParser,
    BaseOutputParser,
    JsonOutputKeyToolsParser,
    JsonOutputParser,
    PydanticOutputParser,
    PydanticToolsParser,
)
from langchain_core.outputs import ChatGeneration, Generation
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.json import parse_json_markdown
from langchain_core.utils.pydantic import is_basemodel_subclass

from lookahead_agent.errors import ConfigurationError

Method = Literal["json_schema", "function_calling", "json_mode"]


def constraint(response_format: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The constraint of an OpenAI `response_format`, for `Sampling.structured`; None: free text.

    Raises:
        ConfigurationError: It is none of the known formats.
    """
    match response_format:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"json_object": True}
        case {"type": "json_schema", "json_schema": {"schema": dict() as schema}}:
            return {"json": schema, "disable_any_whitespace": True}
    raise ConfigurationError(
        'response_format is {"type": "text"}, {"type": "json_object"} or '
        '{"type": "json_schema", "json_schema": {"name": …, "schema": …}}'
    )


def schema_format(schema: Mapping[str, Any] | type) -> dict[str, Any]:
    """The `response_format` of a Pydantic class, a TypedDict, a JSON schema or an OpenAI function.

    Raises:
        ConfigurationError: It is something else.
    """
    try:
        converted = convert_to_json_schema(schema)  # type: ignore[arg-type]
    except (ValueError, TypeError) as error:
        raise ConfigurationError(f"this is not a schema of structured output: {error}") from error
    name = converted.get("title") or "answer"
    return {"type": "json_schema", "json_schema": {"name": name, "schema": converted}}


def text_parser(schema: Mapping[str, Any] | type | None) -> BaseOutputParser[Any]:
    """Reads a reply that is JSON."""
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        return _WholeJsonParser(reader=PydanticOutputParser(pydantic_object=schema))
    return _WholeJsonParser(reader=JsonOutputParser())


class _WholeJsonParser(BaseCumulativeTransformOutputParser[Any]):
    """Reads JSON that is whole. LangChain's own completes what was cut off, and half an argument passes for a whole."""

    reader: JsonOutputParser

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        if not partial:
            _check_whole(result[0])
        return self.reader.parse_result(result, partial=partial)

    def parse(self, text: str) -> Any:
        return self.parse_result([Generation(text=text)])

    def get_format_instructions(self) -> str:
        return self.reader.get_format_instructions()


def _check_whole(generation: Generation) -> None:
    """Raises OutputParserException: The reply is not one whole JSON value."""
    try:
        parse_json_markdown(generation.text.strip(), parser=bound(json.loads, strict=False))
    except json.JSONDecodeError as error:
        metadata = generation.message.response_metadata if isinstance(generation, ChatGeneration) else {}
        cut = metadata.get("finish_reason") == "length"
        why = "was cut off at max_tokens, which should be raised" if cut else f"is not JSON ({error})"
        raise OutputParserException(f"the reply {why}", llm_output=generation.text) from error


def tool_parser(schema: Mapping[str, Any] | type) -> BaseOutputParser[Any]:
    """Reads a reply that is a call of the tool that a schema stands for."""
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        return PydanticToolsParser(tools=[schema], first_tool_only=True)
    name = convert_to_openai_tool(schema)["function"]["name"]
    return JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)


def parsed(llm: Runnable[Any, Any], parser: BaseOutputParser[Any], *, include_raw: bool) -> Runnable[Any, Any]:
    """A model followed by a parser.

    Args:
        llm: The model.
        parser: Reads its reply.
        include_raw: Whether to return `{"raw": message, "parsed": …, "parsing_error": …}` and not to raise.
    """
    if not include_raw:
        return llm | parser
    read = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    unread = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=llm) | read.with_fallbacks(
        [unread], exceptions_to_handle=(OutputParserException, ValueError), exception_key="parsing_error"
    )
