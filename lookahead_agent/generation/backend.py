"""The request and the events of one reply, and their JSON form for the daemon."""

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
    """One reply to generate, with every option resolved."""

    id: str
    sampling: Sampling  # `structured` constrains the reply to tool calls or a form
    policy: VerifierPolicy
    selection_rule: str | None = None  # the rule that chose the policy
    node: str = ""  # path of the calling LangGraph node ("outer:inner"); "" outside a graph
    thread: str | None = None  # LangGraph's `thread_id`, whose replies go to one replica; None: by the prompt
    messages: list[dict[str, Any]] | None = None  # the conversation, for the chat template; None: use `prompt`
    prompt: str | list[int] = ""  # text or token ids, without a chat template
    question: str = ""  # the text that the reply answers
    tools: list[dict[str, Any]] = field(default_factory=list)  # tools that the reply may call, in OpenAI's format
    must_call: bool = False
    parallel_tool_calls: bool | None = None
    form: dict[str, Any] | None = None  # the constraint of the call's `response_format`; None: free text
    template_arguments: dict[str, Any] = field(default_factory=dict)
    thinking_tokens: int | None = None  # most tokens of the thinking; None: any number
    action_markers: tuple[str, ...] = ()
    """Texts after which only the target writes, as after the opening of a tool call."""
    tool_parser: str | None = None
    target_timeout: float | None = None  # seconds without a token after which the target has failed; None: never
    stall_timeout: float | None = 120.0  # seconds without a token to anybody, likewise; None: never
    audit_rate: float = 0.0


@dataclass(frozen=True)
class TextDelta:
    """Text that is certain to be part of the reply."""

    kind: Literal["thinking", "answer"]
    text: str


@dataclass(frozen=True)
class ChatReply:
    """A finished reply, with its answer, thinking and tool calls apart."""

    content: str
    thinking: str
    tool_calls: list[ToolCall]
    invalid_tool_calls: list[InvalidToolCall]  # calls that could not be parsed, with the reason
    finish_reason: str
    """"length": the reply ran out of tokens, or its form is incomplete; "tool_calls": the reply ended and has valid
    calls; "stop": neither; other values come from the target's engine."""
    prompt_tokens: int
    thinking_tokens: int  # tokens of the reply that are thinking, without its tags
    token_ids: list[int]
    lookahead: dict[str, Any]  # becomes `response_metadata["lookahead"]`


GenerateEvent = TextDelta | StepEvent | ChatReply
"""The text and the steps of a reply while they are generated, then the finished reply."""


LIVE_EVENTS: tuple[type[GenerateEvent], ...] = (TextDelta, StepEvent)
"""The events of a reply while it is generated."""
_KINDS: dict[str, type[GenerateEvent]] = {"text": TextDelta, "step": StepEvent, "reply": ChatReply}


def event_to_json(event: GenerateEvent) -> dict[str, Any]:
    """Convert an event to JSON values: `{kind: fields}`."""
    kind = next(kind for kind, cls in _KINDS.items() if isinstance(event, cls))
    return {kind: asdict(event)}


def event_from_json(serialized: dict[str, Any]) -> GenerateEvent:
    """Restore an event from `event_to_json`; raises KeyError, TypeError or ValueError if it is invalid."""
    ((kind, fields),) = serialized.items()
    return _KINDS[kind](**fields)


def request_to_json(request: GenerateRequest) -> dict[str, Any]:
    """Convert a request to JSON values; raises ConfigurationError for a value that JSON cannot represent."""
    try:
        serialized: dict[str, Any] = _adapter().dump_python(request, mode="json", exclude_unset=True)
    except PydanticSerializationError as error:
        raise ConfigurationError(f"{error}: use_daemon=False takes engines of this process") from None
    return serialized


def request_from_json(serialized: Any) -> GenerateRequest:
    """Restore a request from `request_to_json`; raises ValueError if it is invalid."""
    request = _adapter().validate_python(serialized)
    rule = request.selection_rule
    return request if rule is None else replace(request, policy=request.policy.with_selection_rule(rule))


@cache
def _adapter() -> TypeAdapter[GenerateRequest]:
    # Built on first use: it takes pydantic milliseconds, and only the daemon needs it.
    return TypeAdapter(GenerateRequest)
