"""Replies in a given form: JSON by schema, by vLLM's guided decoding, or by a tool call."""

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
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.output_parsers import BaseOutputParser, BaseTransformOutputParser, JsonOutputParser
from langchain_core.outputs import ChatGeneration, Generation
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_json_schema
from langchain_core.utils.json import parse_json_markdown
from pydantic import BaseModel, ConfigDict, TypeAdapter
from pydantic.errors import PydanticUserError
from pydantic.v1 import BaseModel as BaseModelV1
from typing_extensions import is_typeddict

from lookahead_agent.engines.json_schema import KEYWORDS, relocated, target
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.generation.tool_calls import loads

logger = logging.getLogger(__name__)

Method = Literal["json_schema", "function_calling", "json_mode"]

_VALUE = "value"  # The argument of a call whose schema's values are no objects
_LONGEST_NAME = 64
_NOTHING = object()


def _as_it_is(value: Any) -> Any:
    return value


def _validated(adapter: TypeAdapter[Any], value: Any) -> Any:
    # As JSON: a strict model takes a date's text from nowhere else.
    return adapter.validate_json(json.dumps(value))


@dataclass(frozen=True)
class Form:
    """The form that a schema of structured output describes, by a name that may be a tool's."""

    name: str
    description: str
    json_schema: dict[str, Any]
    read: Callable[[Any], Any] = _as_it_is  # makes the result of a JSON value; raises ValueError if that is none

    @classmethod
    def of(cls, schema: Any) -> Form:
        """The form of a type, a function, a tool, a JSON schema, or OpenAI's form of one; else ConfigurationError."""
        try:
            if isinstance(schema, Mapping):
                return _form_of_mapping(schema)
            if isinstance(schema, type) and issubclass(schema, BaseModelV1):
                return _form(schema.schema(), schema.__name__, schema.parse_obj)
            if is_typeddict(schema):
                with suppress(RecursionError):  # it refers to itself, which LangChain's descriptions do not know
                    return _form(convert_to_json_schema(schema))
            if isinstance(schema, BaseTool) or isfunction(schema):
                return _form(convert_to_json_schema(schema))
            adapter: TypeAdapter[Any] = TypeAdapter(schema)
            return _form(adapter.json_schema(), getattr(schema, "__name__", ""), bound(_validated, adapter))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, PydanticUserError) as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise ConfigurationError(f"this is not a schema of structured output: {reason[0]}") from error

    @cached_property
    def response_format(self) -> dict[str, Any]:
        """The form as OpenAI's `response_format`."""
        return {"type": "json_schema", "json_schema": {"name": self.name, "schema": self.json_schema}}

    @cached_property
    def tool(self) -> dict[str, Any]:
        """A tool in OpenAI's format, a call of which has a value of the form as its arguments."""
        if self.is_object:
            parameters = {key: value for key, value in self.json_schema.items() if key != "$ref"} | dict(self._root)
        else:
            value = relocated(self.json_schema, f"/properties/{_VALUE}")
            parameters = {"type": "object", "properties": {_VALUE: value}, "required": [_VALUE]}
            parameters["additionalProperties"] = False
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    @property
    def is_object(self) -> bool:
        """Whether all its values are JSON objects."""
        return self._root.get("type") == "object"

    @cached_property
    def _root(self) -> Mapping[str, Any]:
        """The schema, or the definition in it that it is, as of a class that refers to itself."""
        match self.json_schema:
            case {"$ref": str() as ref} if isinstance(found := target(self.json_schema, ref), Mapping):
                return found
        return self.json_schema


def callback_schema(schema: Any, form: Form) -> Any:
    """A schema as LangChain tells its callbacks of it: a Pydantic class as it is, where LangChain can convert it."""
    # A tool is taken as it is. LangChain's conversion fails for root models and types, with errors that end the call.
    if isinstance(schema, type) and issubclass(schema, BaseModel):
        try:
            convert_to_json_schema(schema)
        except Exception:
            logger.debug("callbacks get the tool of %s", form.name, exc_info=True)
        else:
            return schema
    return form.tool


def _form(schema: dict[str, Any], name: str = "", read: Callable[[Any], Any] = _as_it_is) -> Form:
    name = re.sub(r"[^a-zA-Z0-9_-]+", "_", str(schema.get("title") or name)).strip("_")[:_LONGEST_NAME]
    description = schema.get("description")
    return Form(name or "answer", description if isinstance(description, str) else "", schema, read)


def _form_of_mapping(schema: Mapping[str, Any]) -> Form:
    match schema:
        case {"type": "json_schema", "json_schema": {"schema": dict() as inner, **rest}}:
            return _form(inner, str(rest.get("name") or ""))
        case {"type": "function", "function": dict() as function} | ({"name": str()} as function):
            given = (function.get(key) for key in ("parameters", "input_schema", "schema"))
            parameters = next((found for found in given if found), {"type": "object"})
            if not isinstance(parameters, dict):
                raise TypeError("the parameters of a function are a JSON schema")
            return Form(
                str(function["name"]), str(function.get("description") or _form(parameters).description), parameters
            )
    if schema and not schema.keys() & (KEYWORDS | {"title", "description"}):
        raise ValueError(f"a JSON schema has none of the keys {', '.join(map(repr, schema))}")
    return _form(dict(schema))


class FormParser(BaseTransformOutputParser[Any]):
    """Reads a reply in a form: its text, or the arguments of its call."""

    # Only a whole value is a result. LangChain's own parsers, which are asked for what is known of a stream before its
    # end, complete what was cut off, and half an argument passes for a whole.

    model_config = ConfigDict(arbitrary_types_allowed=True)

    form: Form | None = None  # None: any JSON value
    called: bool = False  # whether the value is in a call of the form's tool

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """The result of a reply; `partial`: of what has come of it, or None."""
        generation = result[0]
        value = self._called(generation, partial) if self.called else self._written(generation, partial)
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
                f"the reply is no {name}: {error}; it is {written}", llm_output=written
            ) from error

    def parse(self, text: str) -> Any:
        """The result of a whole text."""
        return self.parse_result([Generation(text=text)])

    def _written(self, generation: Generation, partial: bool) -> Any:
        if partial:
            return JsonOutputParser().parse_result([generation], partial=True)
        try:
            return parse_json_markdown(generation.text.strip(), parser=loads)
        except ValueError as error:
            raise _unreadable(generation, f"is not JSON ({error})") from error

    def _called(self, generation: Generation, partial: bool) -> Any:
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
                    raise _unreadable(generation, f"has no {error} in its call of {self.form.name}") from error
        raise _unreadable(generation, f"has no whole call of {self.form.name}")

    # Of a stream comes what is known of it, each time that tells more, and at last the whole.

    def _transform(self, input: Iterator[str | BaseMessage]) -> Iterator[Any]:
        whole: Any = None
        last: Any = _NOTHING
        for chunk in input:
            whole = chunk if whole is None else whole + chunk
            for result in self._news(whole, last, partial=True):
                yield (last := result)
        yield from self._news(whole, last, partial=False)

    async def _atransform(self, input: AsyncIterator[str | BaseMessage]) -> AsyncIterator[Any]:
        whole: Any = None
        last: Any = _NOTHING
        async for chunk in input:
            whole = chunk if whole is None else whole + chunk
            for result in self._news(whole, last, partial=True):
                yield (last := result)
        for result in self._news(whole, last, partial=False):
            yield result

    def _news(self, whole: Any, last: Any, *, partial: bool) -> list[Any]:
        """The result of what has come, unless it was the last one told; raises OutputParserException if it is none."""
        if whole is None:
            return []
        is_message = isinstance(whole, BaseMessage)
        generation = ChatGeneration(message=whole) if is_message else Generation(text=whole)
        result = self.parse_result([generation], partial=partial)
        # True and 1 are equal, and not the same.
        told = type(result) is type(last) and result == last
        return [] if told or (partial and result is None) else [result]


def _unreadable(generation: Generation, why: str) -> OutputParserException:
    metadata = generation.message.response_metadata if isinstance(generation, ChatGeneration) else {}
    if metadata.get("finish_reason") == "length":
        why += ": it ended before its form did, as where max_tokens cut it off, which should be raised then"
    return OutputParserException(f"the reply {why}", llm_output=generation.text)


def with_parser(llm: Runnable[Any, Any], parser: BaseOutputParser[Any], *, include_raw: bool) -> Runnable[Any, Any]:
    """A model and the parser of its reply; `include_raw`: errors are returned beside the message, and not raised."""
    if not include_raw:
        return llm | parser
    read = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    unread = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=llm) | read.with_fallbacks(
        [unread], exceptions_to_handle=(OutputParserException, ValueError), exception_key="parsing_error"
    )
