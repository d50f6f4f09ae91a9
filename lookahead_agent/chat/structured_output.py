"""Structured output: schemas of replies, and the parsers of their JSON or tool calls."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from functools import partial as bound
from inspect import isfunction
from operator import itemgetter
from typing import Any, Literal

from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.output_parsers import BaseOutputParser, BaseTransformOutputParser
from langchain_core.outputs import ChatGeneration, Generation
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_json_schema
from langchain_core.utils.json import parse_json_markdown
from pydantic import BaseModel, ConfigDict, TypeAdapter
from pydantic.errors import PydanticUserError
from pydantic.v1 import BaseModel as BaseModelV1
from pydantic_core import from_json
from typing_extensions import is_typeddict

from lookahead_agent.engines.json_schema import KEYWORDS, relocate, target
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.generation.tool_calls import loads, reject_duplicates

logger = logging.getLogger(__name__)

Method = Literal["json_schema", "function_calling", "json_mode"]

_VALUE = "value"  # Argument of the tool call if the values of its schema are not objects
_MAX_NAME_LENGTH = 64
_UNSET: Any = object()
_PARSES_PER_LENGTH = 16  # parses of a stream while its text grows by its length, at most
_LONG = 1 << 16  # characters of a text that is parsed only once while it doubles


def _identity(value: Any) -> Any:
    return value


def _validate(adapter: TypeAdapter[Any], value: Any) -> Any:
    # The value is validated as JSON: in strict mode, Pydantic reads a date from text only there.
    return adapter.validate_json(json.dumps(value))


@dataclass(frozen=True)
class Form:
    """A schema of structured output, with a name that a tool can have."""

    name: str
    description: str
    json_schema: dict[str, Any]
    read: Callable[[Any], Any] = _identity  # converts a JSON value to the result; raises ValueError if it is invalid

    @classmethod
    def of(cls, schema: Any) -> Form:
        """Create a form from a type, function, tool, JSON schema or OpenAI's format of one; else ConfigurationError."""
        try:
            if isinstance(schema, Mapping):
                return _form_of_mapping(schema)
            if isinstance(schema, type) and issubclass(schema, BaseModelV1):
                return _form(schema.schema(), schema.__name__, schema.parse_obj)
            if is_typeddict(schema):
                with suppress(RecursionError):  # LangChain cannot convert a recursive type
                    return _form(convert_to_json_schema(schema))
            if isinstance(schema, BaseTool) or isfunction(schema):
                return _form(convert_to_json_schema(schema))
            adapter: TypeAdapter[Any] = TypeAdapter(schema)
            return _form(adapter.json_schema(), getattr(schema, "__name__", ""), bound(_validate, adapter))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, PydanticUserError) as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise ConfigurationError(f"this is not a schema of structured output: {reason[0]}") from error

    @cached_property
    def response_format(self) -> dict[str, Any]:
        """The form as OpenAI's `response_format`."""
        return {"type": "json_schema", "json_schema": {"name": self.name, "schema": self.json_schema}}

    @cached_property
    def tool(self) -> dict[str, Any]:
        """A tool in OpenAI's format whose arguments are a value of the form."""
        if self.is_object:
            parameters = {key: value for key, value in self.json_schema.items() if key != "$ref"} | dict(self._root)
        else:
            value = relocate(self.json_schema, f"/properties/{_VALUE}")
            parameters = {"type": "object", "properties": {_VALUE: value}, "required": [_VALUE]}
            parameters["additionalProperties"] = False
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    @property
    def is_object(self) -> bool:
        """Whether every value of the form is a JSON object."""
        return self._root.get("type") == "object"

    @cached_property
    def _root(self) -> Mapping[str, Any]:
        """The schema, or the definition that its `$ref` names, as for a class that refers to itself."""
        match self.json_schema:
            case {"$ref": str() as ref} if isinstance(found := target(self.json_schema, ref), Mapping):
                return found
        return self.json_schema


def callback_schema(schema: Any, form: Form) -> Any:
    """Return a schema for LangChain's callbacks: a Pydantic class that LangChain can convert, else the form's tool."""
    # LangChain's conversion fails for root models and types, with errors that end the call; a tool needs none.
    if isinstance(schema, type) and issubclass(schema, BaseModel):
        try:
            convert_to_json_schema(schema)
        except Exception:
            logger.debug("callbacks get the tool of %s", form.name, exc_info=True)
        else:
            return schema
    return form.tool


def _form(schema: dict[str, Any], name: str = "", read: Callable[[Any], Any] = _identity) -> Form:
    name = re.sub(r"[^a-zA-Z0-9_-]+", "_", str(schema.get("title") or name)).strip("_")[:_MAX_NAME_LENGTH]
    description = schema.get("description")
    return Form(name or "answer", description if isinstance(description, str) else "", schema, read)


def _form_of_mapping(schema: Mapping[str, Any]) -> Form:
    match schema:
        case {"type": "json_schema", "json_schema": {"schema": dict() as inner, **rest}}:
            return _form(inner, str(rest.get("name") or ""))
        case {"type": "function", "function": dict() as function} | ({"name": str()} as function):
            schemas = (function.get(key) for key in ("parameters", "input_schema", "schema"))
            parameters = next((found for found in schemas if found), {"type": "object"})
            if not isinstance(parameters, dict):
                raise TypeError("the parameters of a function are a JSON schema")
            return Form(
                str(function["name"]), str(function.get("description") or _form(parameters).description), parameters
            )
    if schema and not schema.keys() & (KEYWORDS | {"title", "description"}):
        raise ValueError(f"a JSON schema has none of the keys {', '.join(map(repr, schema))}")
    return _form(dict(schema))


class FormParser(BaseTransformOutputParser[Any]):
    """Parses a reply in a form: its text, or the arguments of its tool call."""

    # Only a complete value is a result. LangChain's parsers complete truncated JSON while a stream runs, so half an
    # argument would pass for a whole one.

    model_config = ConfigDict(arbitrary_types_allowed=True)

    form: Form | None = None  # None: any JSON value
    called: bool = False  # whether the value is the arguments of a call of the form's tool

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """Parse a reply; with `partial`, parse the beginning of one, or return None."""
        generation = result[0]
        value = self._parse_call(generation, partial) if self.called else self._parse_text(generation, partial)
        if self.form is None or (partial and value is None):
            return value
        try:
            return self.form.read(value)
        except (ValueError, TypeError) as error:
            if partial:
                return None
            name = self.form.name
            written = json.dumps(value, ensure_ascii=False)
            raise OutputParserException(
                f"the reply is not of the form {name}: {error}; it is {written}", llm_output=written
            ) from error

    def parse(self, text: str) -> Any:
        """Parse a complete text."""
        return self.parse_result([Generation(text=text)])

    def _parse_text(self, generation: Generation, partial: bool) -> Any:
        if partial:
            with suppress(ValueError):
                return parse_json_markdown(generation.text.strip(), parser=_partial_loads)
            return None
        try:
            return parse_json_markdown(
                generation.text.strip(), parser=bound(loads, object_pairs_hook=reject_duplicates)
            )
        except ValueError as error:
            raise _parsing_error(generation, f"is not JSON ({error})") from error

    def _parse_call(self, generation: Generation, partial: bool) -> Any:
        message = generation.message if isinstance(generation, ChatGeneration) else None
        calls = message.tool_calls if isinstance(message, AIMessage) else []
        if partial and not calls:
            return None
        assert self.form is not None
        for call in calls:
            if call["name"] == self.form.name:
                try:
                    return call["args"] if self.form.is_object else call["args"][_VALUE]
                except KeyError as error:
                    raise _parsing_error(generation, f"has no {error} in its call of {self.form.name}") from error
        raise _parsing_error(generation, f"has no whole call of {self.form.name}")

    # A stream yields partial results that differ from the one before, and then the complete result. Each is a whole
    # value, so a long reply is parsed only after it has grown by a share of its length.

    def _transform(self, input: Iterator[str | BaseMessage]) -> Iterator[Any]:
        whole, last = _GrowingReply(), _UNSET
        for chunk in input:
            if whole.add(chunk):
                for result in self._new_results(whole.sum(), last, partial=True):
                    yield (last := result)
        yield from self._new_results(whole.sum(), last, partial=False)

    async def _atransform(self, input: AsyncIterator[str | BaseMessage]) -> AsyncIterator[Any]:
        whole, last = _GrowingReply(), _UNSET
        async for chunk in input:
            if whole.add(chunk):
                for result in self._new_results(whole.sum(), last, partial=True):
                    yield (last := result)
        for result in self._new_results(whole.sum(), last, partial=False):
            yield result

    def _new_results(self, whole: Any, last: Any, *, partial: bool) -> list[Any]:
        """Return the result so far unless it equals the last one; raises OutputParserException for an invalid reply."""
        if whole is None:
            return []
        is_message = isinstance(whole, BaseMessage)
        generation = ChatGeneration(message=whole) if is_message else Generation(text=whole)
        result = self.parse_result([generation], partial=partial)
        # True and 1 are equal, but not the same result.
        unchanged = type(result) is type(last) and result == last
        return [] if unchanged or (partial and result is None) else [result]


class _GrowingReply:
    """The sum of a stream's chunks, which are added up when it is asked for."""

    def __init__(self) -> None:
        self._whole: Any = None
        self._chunks: list[Any] = []
        self._length = 0  # characters of text
        self._parse_at = 0  # length from which the sum is parsed again

    def add(self, chunk: str | BaseMessage) -> bool:
        """Add a chunk, and return whether the sum is to be parsed."""
        self._chunks.append(chunk)
        self._length += len(chunk if isinstance(chunk, str) else chunk.text)
        has_calls = isinstance(chunk, AIMessageChunk) and bool(chunk.tool_call_chunks)
        if self._length < self._parse_at and not has_calls:
            return False
        share = max(1 / _PARSES_PER_LENGTH, self._length / _LONG)
        self._parse_at = self._length + int(self._length * share)
        return True

    def sum(self) -> Any:
        """Return the sum of all chunks; None before the first one."""
        if self._chunks and isinstance(self._chunks[0], str):
            self._whole = "".join([self._whole or "", *self._chunks])
        elif self._chunks:
            first, *rest = self._chunks if self._whole is None else [self._whole, *self._chunks]
            self._whole = first + rest if rest else first
        self._chunks.clear()
        return self._whole


def _partial_loads(text: str) -> Any:
    """Parse the beginning of JSON in linear time; an unfinished text is complete. Raises JSONDecodeError."""
    try:
        return from_json(text, allow_partial="trailing-strings", allow_inf_nan=False)
    except ValueError as error:
        raise json.JSONDecodeError(str(error), text, 0) from None


def _parsing_error(generation: Generation, why: str) -> OutputParserException:
    metadata = generation.message.response_metadata if isinstance(generation, ChatGeneration) else {}
    if metadata.get("finish_reason") == "length":
        why += ": it ended before its form did, as where max_tokens cut it off, which should be raised then"
    return OutputParserException(f"the reply {why}", llm_output=generation.text)


def with_parser(llm: Runnable[Any, Any], parser: BaseOutputParser[Any], *, include_raw: bool) -> Runnable[Any, Any]:
    """Chain a model and a parser; `include_raw` returns parsing errors beside the message instead of raising them."""
    if not include_raw:
        return llm | parser
    with_result = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    without_result = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=llm) | with_result.with_fallbacks(
        [without_result], exceptions_to_handle=(OutputParserException, ValueError), exception_key="parsing_error"
    )
