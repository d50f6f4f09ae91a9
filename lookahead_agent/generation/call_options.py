"""What one call of the chat model may set."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from lookahead_agent.engines.json_schema import check_schema
from lookahead_agent.errors import ConfigurationError, check_encodable
from lookahead_agent.generation.constraints import call_constraint, call_or_form_constraint, constraint
from lookahead_agent.generation.tool_choice import openai_tools, required_choice, select_tools


def _number(value: Any) -> Any:
    # pydantic takes True for 1, which nobody means.
    if isinstance(value, bool):
        raise ValueError("Input should be a number")
    return value


def _stops(value: Any) -> Any:
    value = [value] if isinstance(value, str) else value
    if isinstance(value, (list, tuple)) and "" in value:
        raise ValueError("stop is one text or several, none of them empty")
    try:
        check_encodable(value, "stop")
    except ConfigurationError as error:
        raise ValueError(str(error)) from None
    return value


_Number = BeforeValidator(_number)
_INT32 = 2**31  # the engine keeps these in 32 bits, and a seed in 64

DEFAULT_MAX_TOKENS = 1024
MaxTokens = Annotated[int, Field(ge=1, lt=_INT32), _Number]


class SamplingArguments(BaseModel):
    """How tokens are chosen and where a reply ends: the same bounds for fields, arguments of calls and requests."""

    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False), _Number] | None = None
    """0 takes the likeliest token; None: what the model's makers recommend."""
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False), _Number] | None = None
    """Probability mass that is sampled from; None: what the model's makers recommend."""
    top_k: Annotated[int, Field(ge=0, lt=_INT32), _Number] | None = None
    """Number of likeliest tokens that are sampled from, 0 for all; None: what the model's makers recommend."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63), _Number] | None = None
    """Makes sampling repeatable for policies that do not depend on timing (off, exact)."""
    max_tokens: MaxTokens | None = None
    """Most tokens of a reply."""
    stop: (
        Annotated[
            list[Annotated[str, Field(strict=True)]],
            Field(fail_fast=True),
            BeforeValidator(_stops, json_schema_input_type=str | list[str]),
        ]
        | None
    ) = None
    """Texts that end a reply, or one; they are not part of it."""

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> Self:
        """Check values.

        Raises:
            ConfigurationError: One is unknown or out of its range.
        """
        try:
            return cls.model_validate(options)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            name = ".".join(str(part) for part in problem["loc"])
            if problem["type"] == "extra_forbidden":
                known = ", ".join(sorted(cls.model_fields))
                raise ConfigurationError(f"a call takes no argument {name!r}; it takes {known}") from error
            raise ConfigurationError(f"{name}={reprlib.repr(problem['input'])}: {problem['msg']}") from error


class CallOptions(SamplingArguments):
    """Keyword arguments of a call, by the same rules as the constructor's.

    Attributes:
        policy: Of this call.
        tools: Tools in OpenAI's format, or what can be converted to it.
        tool_choice: Given in any of the forms that `bind_tools` takes; once read, "required": the reply must be a tool
            call, and `tools` has those that it may call.
        parallel_tool_calls: Whether a reply may call several tools; None: as the model wants, one if a call is
            required.
        response_format: `{"type": "json_schema", "json_schema": {"name": …, "schema": …}}`, `{"type": "json_object"}`
            or `{"type": "text"}`.
        template_arguments: Further variables of the model's chat template, such as `enable_thinking`.
        node: Name or path of the node that the reply belongs to; None: the LangGraph node that calls. Policies and
            metadata go by it.
        action_markers: Texts that open an action region, such as "Plan:": from the end of the first one on, only the
            target writes.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    policy: Any = None
    tools: Annotated[list[dict[str, Any]], BeforeValidator(lambda value: openai_tools(value or ()))] = Field(
        default_factory=list
    )
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    template_arguments: dict[str, Any] = Field(default_factory=dict)
    node: str | None = None
    action_markers: tuple[Annotated[str, Field(min_length=1)], ...] = ()

    _form: dict[str, Any] | None = PrivateAttr(None)
    _structured: dict[str, Any] | None = PrivateAttr(None)

    @property
    def form(self) -> dict[str, Any] | None:
        """The constraint of the `response_format`; None: free text."""
        return self._form

    @property
    def structured(self) -> dict[str, Any] | None:
        """The constraint on the reply, for `Sampling.structured`: a call, the form, or either; None: free text."""
        return self._structured

    @field_validator("tools", "response_format", "template_arguments", "node", "action_markers")
    @classmethod
    def _encodable(cls, value: Any, info: ValidationInfo) -> Any:
        check_encodable(value, str(info.field_name))
        return value

    @field_validator("response_format")
    @classmethod
    def _known_format(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        try:
            constraint(value)
        except ConfigurationError as error:
            raise ValueError(str(error)) from None
        return value

    @model_validator(mode="after")
    def _go_together(self) -> Self:
        if "tool_choice" in self.model_fields_set:
            self.tools, self.tool_choice = select_tools(self.tools, self.tool_choice), required_choice(self.tool_choice)
        form = constraint(self.response_format) if self.response_format is not None else None
        several = self.parallel_tool_calls is True
        if self.tool_choice is not None and form is not None:
            raise ConfigurationError("a reply cannot be a tool call and in a response_format at once")
        if self.tool_choice is not None and not self.tools:
            raise ConfigurationError("a tool call is required, but there are no tools")
        if form is None and self.tool_choice is None:
            return self
        # What is too large for a grammar is refused before it is copied, and all together.
        for schema in (form or {}, *({"json": tool["function"].get("parameters") or {}} for tool in self.tools)):
            if "json" in schema:
                check_schema(schema["json"])
        self._form = self._structured = form
        if form is None:
            self._structured = call_constraint(self.tools, several=several)
        elif self.tools:
            self._structured = call_or_form_constraint(self.tools, form, several=several)
        if self.tools and self._structured is not None and "json" in self._structured:
            check_schema(self._structured["json"])
        return self
