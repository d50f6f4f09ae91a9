"""Requests of OpenAI's API; unsupported fields return an error."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from lookahead_agent.generation.call_options import MaxTokens, SamplingArguments, ThinkingTokens

_MAX_MESSAGES = 10_000
MAX_TOOLS = 512
_MAX_PARTS = 4096
_MAX_STOPS = 16
_NO_LOGPROBS = "logprobs are not supported: the target never gave those of a draft's step that was accepted"


class RequestModel(BaseModel):
    """An object that a client sends: null fields count as missing, and a single error reports unknown fields."""

    # Validation of a list stops at its first invalid item (`fail_fast`), so that invalid bodies cost no more time.

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        present = fields
        if any(value is None for value in fields.values()):
            present = {name: value for name, value in fields.items() if value is not None}
        if cls.model_config.get("extra") == "forbid" and (unknown := present.keys() - cls.__pydantic_fields__.keys()):
            raise PydanticCustomError("extra_forbidden", "there is no field {name}", {"name": repr(min(unknown)[:80])})
        return present


class HistoryModel(RequestModel):
    """A part of the conversation; unknown fields are ignored, since client libraries add some to earlier replies."""

    model_config = ConfigDict(extra="ignore")


class _ContentPart(HistoryModel):
    """A content part of a message; the message conversion checks whether the model supports its type."""

    type: str
    text: str | None = None
    refusal: str | None = None


Content = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[_ContentPart], Field(fail_fast=True, max_length=_MAX_PARTS), Tag("parts")],
    Discriminator(lambda value: "parts" if isinstance(value, list) else "text"),
]


class _FunctionCall(HistoryModel):
    """The function call of an earlier reply as the model wrote it, possibly without a name or valid JSON."""

    name: str | None = None
    arguments: str | None = None


class _ToolCall(HistoryModel):
    id: str | None = None
    type: Literal["function"] | None = "function"
    function: _FunctionCall
    index: int | None = None


class Message(HistoryModel):
    """A message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[_ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    function_call: _FunctionCall | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def _check_required(self) -> Message:
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("a tool's message needs its tool_call_id")
        if self.role == "function" and self.name is None:
            raise ValueError("a function's message needs its name")
        if self.content is None and self.role in ("system", "developer", "user"):
            raise ValueError("the message has no content")
        return self


class _Function(RequestModel):
    name: str = Field(pattern=r"^[\w.:-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(RequestModel):
    type: Literal["function"]
    function: _Function


class _StreamOptions(RequestModel):
    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None  # no chunk is padded


class Sampled(RequestModel, SamplingArguments):
    """Fields of both endpoints; unsupported sampling options (penalties, biases) return an error."""

    model: str | None = None
    n: int = Field(1, ge=1)
    stream: bool = False
    stream_options: _StreamOptions | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None
    user: str | None = None
    policy: str | None = None  # name of the policy, like the header X-Lookahead-Policy
    node: str | None = Field(None, max_length=256)  # name of the node, like the header X-Lookahead-Node
    response_format: dict[str, Any] | None = None
    cache_salt: str | None = Field(None, min_length=1)  # prompts of another salt are never in the prefix cache

    @model_validator(mode="after")
    def _check_supported(self) -> Sampled:
        for name in ("presence_penalty", "frequency_penalty", "logit_bias"):
            if getattr(self, name):
                raise ValueError(f"{name} is not supported: steps are exchanged between two models")
        if len(self.stop or ()) > _MAX_STOPS:
            raise ValueError(f"stop is up to {_MAX_STOPS} texts")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options are for stream=true")
        return self


class ChatRequestBody(Sampled):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(fail_fast=True)] = Field(min_length=1, max_length=_MAX_MESSAGES)
    max_completion_tokens: MaxTokens | None = None
    tools: Annotated[list[_Tool], Field(fail_fast=True)] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_tokens: ThinkingTokens | None = None
    thinking_token_budget: Literal[-1] | ThinkingTokens | None = None  # vLLM's name; -1: no budget
    logprobs: bool | None = None
    top_logprobs: int | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_chat_fields(self) -> ChatRequestBody:
        if self.logprobs or self.top_logprobs:
            raise ValueError(_NO_LOGPROBS)
        if self.store or self.metadata:
            raise ValueError("store and metadata are not supported: the server stores no reply")
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise ValueError("tool_choice is for requests with tools")
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens are one option: leave one of them out")
        self.max_tokens = self.max_completion_tokens or self.max_tokens
        if self.thinking_token_budget is not None:
            if self.thinking_tokens is not None:
                raise ValueError("thinking_tokens and thinking_token_budget are one option: leave one of them out")
            self.thinking_tokens = None if self.thinking_token_budget < 0 else self.thinking_token_budget
        return self


class CompletionRequestBody(Sampled):
    """Body of `/v1/completions`."""

    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True)]
        | Annotated[list[int], Field(fail_fast=True)]
        | Annotated[list[Annotated[list[int], Field(fail_fast=True)]], Field(fail_fast=True)]
    )
    max_tokens: MaxTokens | None = 16
    logprobs: int | None = None
    echo: bool = False
    suffix: str | None = None
    best_of: int | None = None

    @model_validator(mode="after")
    def _check_completion_fields(self) -> CompletionRequestBody:
        if self.logprobs is not None:
            raise ValueError(_NO_LOGPROBS)
        if self.echo or self.suffix or self.best_of not in (None, 1):
            raise ValueError("echo, suffix and best_of are not supported")
        if not self.prompt or (isinstance(self.prompt, list) and not all(prompt != [] for prompt in self.prompt)):
            raise ValueError("the prompt is empty")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list, also if `prompt` is a single one."""
        is_single = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return cast("list[str | list[int]]", [self.prompt] if is_single else self.prompt)
