"""What one call of the chat model may set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from lookahead_agent.errors import ConfigurationError
from lookahead_agent.replies.structured_output import constraint


class CallOptions(BaseModel):
    """Keyword arguments of a call, by the same rules as the constructor's.

    Attributes:
        policy: Of this call.
        temperature: See `ChatLookahead`, as of the next four.
        top_p: Probability mass that is sampled from.
        top_k: Number of likeliest tokens that are sampled from.
        seed: Makes sampling repeatable.
        max_tokens: Most tokens of the reply.
        tools: Tools in OpenAI's format.
        tool_choice: "required": the reply must be a tool call.
        parallel_tool_calls: Whether a reply may call several tools; None: as the model wants, one if a call is
            required.
        response_format: `{"type": "json_schema", "json_schema": {"name": …, "schema": …}}`, `{"type": "json_object"}`
            or `{"type": "text"}`.
        template_arguments: Further variables of the model's chat template, such as `enable_thinking`.
        node: Name or path of the graph's node, of calls that come from another process.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    policy: Any = None
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    seed: int | None = None
    max_tokens: int | None = Field(None, ge=1)
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: Literal["required"] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    template_arguments: dict[str, Any] = Field(default_factory=dict)
    node: str | None = None

    @field_validator("response_format")
    @classmethod
    def _known_format(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        try:
            constraint(value)
        except ConfigurationError as error:
            raise ValueError(str(error)) from None
        return value

    @property
    def structured(self) -> dict[str, Any] | None:
        """The constraint that `response_format` puts on the reply, for `Sampling.structured`."""
        return constraint(self.response_format)

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> CallOptions:
        """Check the keyword arguments of a call.

        Raises:
            ConfigurationError: One is unknown or out of its range, or two contradict each other.
        """
        try:
            chosen = cls.model_validate(options)
        except ValidationError as error:
            problem = error.errors()[0]
            name = ".".join(str(part) for part in problem["loc"])
            if problem["type"] == "extra_forbidden":
                known = ", ".join(sorted([*cls.model_fields, "stop"]))
                raise ConfigurationError(f"a call takes no argument {name!r}; it takes {known}") from error
            raise ConfigurationError(f"{name}={problem['input']!r}: {problem['msg']}") from error
        if chosen.tool_choice is not None and chosen.structured is not None:
            raise ConfigurationError("a reply cannot be a tool call and in a response_format at once")
        if chosen.tool_choice is not None and not chosen.tools:
            raise ConfigurationError("a tool call is required, but there are no tools")
        return chosen
