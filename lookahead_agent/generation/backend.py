"""One reply: what is asked, and what is told while it is generated."""

from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any, Literal

from langchain_core.messages import InvalidToolCall, ToolCall
from pydantic import TypeAdapter
from pydantic_core import PydanticSerializationError

from lookahead_agent.decoding import StepEvent
from lookahead_agent.engines.protocol import Sampling
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.policy import VerifierPolicy


@dataclass(frozen=True)
class GenerateRequest:
    """A reply to generate, with everything decided."""

    id: str
    sampling: Sampling  # `structured` constrains the reply to tool calls or a form
    policy: VerifierPolicy
    selection_rule: str | None = None  # the rule that chose the policy
    node: str = ""  # path of the LangGraph node that calls ("outer:inner"); "" outside a graph
    messages: list[dict[str, Any]] | None = None  # the conversation, for the chat template; None: `prompt` is given
    prompt: str | list[int] = ""  # text or token ids, without a chat template
    question: str = ""  # the text that the reply answers
    tools: list[dict[str, Any]] = field(default_factory=list)  # tools that the reply may call, in OpenAI's format
    must_call: bool = False
    parallel_tool_calls: bool | None = None
    form: dict[str, Any] | None = None  # the constraint of the call's `response_format`; None: free text
    template_arguments: dict[str, Any] = field(default_factory=dict)
    action_markers: tuple[str, ...] = ()
    """Texts from whose end on only the target writes, as after the opening of a tool call."""
    tool_parser: str | None = None
    target_timeout: float | None = None  # seconds without a token after which the target has failed; None: never
    audit_rate: float = 0.0


@dataclass(frozen=True)
class TextDelta:
    """Text that is certain to be part of the reply."""

    kind: Literal["thinking", "answer"]
    text: str


@dataclass(frozen=True)
class ChatReply:
    """A finished reply: its text without thinking and tool calls, and these apart."""

    content: str
    thinking: str
    tool_calls: list[ToolCall]
    invalid_tool_calls: list[InvalidToolCall]  # Calls that could not be read, with the reason
    finish_reason: str
    """"length": the reply or the context ran out of tokens; "tool_calls": the reply ended otherwise and has calls that
    can be carried out; "stop": neither."""
    prompt_tokens: int
    thinking_tokens: int  # how many of the reply's tokens are thinking, without its tags
    token_ids: list[int]
    lookahead: dict[str, Any]  # the metadata that `ChatLookahead` documents


GenerateEvent = TextDelta | StepEvent | ChatReply
"""Text and steps while they are written, and at last the finished reply."""


_KINDS: dict[str, type[GenerateEvent]] = {"text": TextDelta, "step": StepEvent, "reply": ChatReply}


def event_to_json(event: GenerateEvent) -> dict[str, Any]:
    """An event as JSON values: `{kind: fields}`."""
    kind = next(kind for kind, cls in _KINDS.items() if isinstance(event, cls))
    return {kind: asdict(event)}


def event_from_json(written: dict[str, Any]) -> GenerateEvent:
    """The event that `event_to_json` has written; raises KeyError, TypeError or ValueError if it is none."""
    ((kind, fields),) = written.items()
    return _KINDS[kind](**fields)


def request_to_json(request: GenerateRequest) -> dict[str, Any]:
    """A request as JSON values; raises ConfigurationError if it holds something that JSON cannot say."""
    try:
        written: dict[str, Any] = _adapter().dump_python(request, mode="json", exclude_unset=True)
    except PydanticSerializationError as error:
        raise ConfigurationError(f"{error}: use_daemon=False takes engines of this process") from None
    return written


def request_from_json(written: Any) -> GenerateRequest:
    """The request that `request_to_json` has written; raises ValueError if it is none."""
    request = _adapter().validate_python(written)
    rule = request.selection_rule
    return request if rule is None else replace(request, policy=request.policy.with_selection_rule(rule))


@cache
def _adapter() -> TypeAdapter[GenerateRequest]:
    # Made when a server is first involved: it takes pydantic milliseconds.
    return TypeAdapter(GenerateRequest)
