"""Answers to a model's calls: results that fit into the context, errors with the tool's arguments, invalid calls."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import lru_cache
from typing import Annotated, Any

from langchain.agents.middleware import (
    AgentMiddleware,
    AgentState,
    ClearToolUsesEdit,
    ContextEditingMiddleware,
    ModelRequest,
    ModelResponse,
    ToolCallRequest,
    hook_config,
)
from langchain.agents.middleware.types import PrivateStateAttr
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, HumanMessage, InvalidToolCall, ToolMessage
from langchain_core.messages.utils import count_tokens_approximately
from langchain_core.tools import BaseTool
from langgraph.types import Command

from lookahead_agent.agents.prompts import describe_tools
from lookahead_agent.agents.run_record import TOOL_HEADING, ToolResult
from lookahead_agent.agents.tool_schemas import describe_function
from lookahead_agent.agents.tool_use import error_text, truncate, with_sync_call
from lookahead_agent.agents.turns import AsyncHandler

CountTokens = Callable[[Sequence[BaseMessage]], int]

_SHARE = 4  # A result takes at most the context divided by this
_KEPT = 3  # Number of latest results that are never cleared
_CLEARED = "(cleared, for the conversation was too long; call the tool again if this is needed)"
_FAILED = "The same call would fail again: call the tool with other arguments, or call another tool."
_MARKUP = 64  # most tokens that a chat template adds to a message
_TOOL_MARKUP = 512  # most tokens that a chat template adds to the tools
_EMPTY = "(the result is empty)"
_REST = "ask the tool for less at once"


@dataclass(eq=False)
class ToolResultMiddleware(AgentMiddleware[Any, Any, Any]):
    """Converts a tool's result to a text that its model `llm` can use.

    A result longer than a quarter of the model's context is truncated, with a notice. If the model reads text only, a
    note replaces each picture and file of a result. An error includes the tool's arguments and description, so that
    the model can retry the call.
    """

    llm: BaseChatModel
    _: KW_ONLY
    exact: bool = False  # whether the model counts tokens; otherwise LangChain estimates their number

    def wrap_tool_call(self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], ToolResult]) -> ToolResult:
        """Call the tool, even if it has a coroutine only."""
        tool = request.tool
        return self._readable(request, handler(request.override(tool=with_sync_call(tool)) if tool else request))

    async def awrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Awaitable[ToolResult]]
    ) -> ToolResult:
        """`wrap_tool_call` for agents that run in an event loop."""
        try:
            result = await handler(request)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # The tool cancelled a scope of its own; the call was not cancelled.
            call = request.tool_call
            result = ToolMessage(error_text(error), tool_call_id=call["id"], name=call["name"], status="error")
        # This runs in a thread, because counting tokens may read the tokenizer's files.
        return await asyncio.to_thread(self._readable, request, result)

    def _readable(self, request: ToolCallRequest, result: ToolResult) -> ToolResult:
        if isinstance(result, Command):
            update = result.update
            if not isinstance(update, dict) or not isinstance(messages := update.get("messages"), list):
                return result
            readable = [self._convert(request, each) if isinstance(each, ToolMessage) else each for each in messages]
            return replace(result, update={**update, "messages": readable})
        return self._convert(request, result)

    def _convert(self, request: ToolCallRequest, message: ToolMessage) -> ToolMessage:
        content = message.content
        if isinstance(content, list) and self._reads_text_only:
            content = "\n".join(filter(None, map(describe_block, content)))
        explanation = ""
        if message.status == "error" and request.tool is not None:
            explanation = f"{TOOL_HEADING}{describe_tools([request.tool])}\n{_FAILED}"
        if isinstance(content, str):
            # A lone surrogate would fail the run when its state is saved.
            text = (self._fit(content.encode(errors="replace").decode()) if content.strip() else _EMPTY) + explanation
            return message.model_copy(update={"content": text})
        media = [block for block in content if not _is_text(block)]
        text = self._fit("\n".join(describe_block(block) for block in content if _is_text(block))) + explanation
        text = text if text.strip() or media else _EMPTY
        return message.model_copy(update={"content": [{"type": "text", "text": text}, *media] if text else media})

    @property
    def _reads_text_only(self) -> bool:
        profile: Mapping[str, Any] = self.llm.profile or {}
        return all(profile.get(f"{kind}_inputs") is False for kind in ("image", "audio", "video"))

    def _fit(self, text: str) -> str:
        text = truncate(text, _REST)
        context = (self.llm.profile or {}).get("max_input_tokens")
        # A token has at least one character, so most results need no counting.
        if context is None or len(text) <= (limit := context // _SHARE):
            return text
        tokens = self.llm.get_num_tokens(text) if self.exact else count_tokens_approximately([HumanMessage(text)])
        if tokens <= limit:
            return text
        return truncate(text, _REST, max(1, len(text) * limit // tokens))


def describe_block(block: Any) -> str:
    """Return the text of a part of a result; for a picture or a file, a note that it is left out."""
    match block:
        case str() as text:
            return text
        case {"text": str() as text}:
            return text
        case {"type": "json", "json": value} | {"type": "non_standard", "value": value}:
            return json.dumps(value, ensure_ascii=False, default=str)
        case {"type": "document", "source": {"type": "text", "data": str() as text}}:
            return text
        case {"type": "search_result", "content": [*parts]}:
            about = [block.get("title"), block.get("source")]
            return "\n".join([*(str(each) for each in about if each), *map(describe_block, parts)])
        case {"type": kind}:
            url, media_type = block.get("url") or block.get("image_url"), block.get("mime_type")
            url = url.get("url") if isinstance(url, Mapping) else url
            kind = str(kind).removesuffix("_url").replace("_", " ")
            known = [f"of the type {media_type}"] if media_type else []
            known += [f"at {url[:500]}"] if isinstance(url, str) and url.startswith(("http:", "https:")) else []
            return f"({' '.join([kind, *known])} is left out: the model reads text only)"
    return json.dumps(block, ensure_ascii=False, default=str)


def _is_text(block: Any) -> bool:
    return isinstance(block, str) or (isinstance(block, Mapping) and block.get("type") in ("text", "json"))


class FitContextMiddleware(ContextEditingMiddleware):
    """`ContextEditingMiddleware` that makes the messages fit into the model's context.

    It clears older results, then drops earlier questions, and then halves the longest texts of the tools and of the
    model. The graph's state keeps all of them. Without a known context size, the messages stay as they are.
    """

    name = "ContextEditingMiddleware"

    def __init__(self, llm: BaseChatModel, *, exact: bool = False) -> None:
        super().__init__(edits=[self], token_count_method="model" if exact else "approximate")
        self.llm = llm
        self._count = lru_cache(maxsize=256)(llm.get_num_tokens)
        self._schemas: tuple[list[Any], list[str]] = ([], [])  # the tools of the last turn, and their schemas as texts

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> Any:
        """Edit the messages, unless they are certain to fit, and call the model."""
        return handler(request) if self._is_sure_to_fit(request) else super().wrap_model_call(request, handler)

    def _is_sure_to_fit(self, request: ModelRequest[Any]) -> bool:
        """Whether an upper bound of the prompt's length fits, for which only new messages are tokenized."""
        if (room := self._room) is None:
            return True
        if self.token_count_method != "model":  # an estimate costs less than its bound
            return False
        system = [request.system_message] if request.system_message is not None else []
        texts = [*map(_all_text, (*system, *request.messages)), *self._schema_texts(request.tools)]
        markup = _MARKUP * len(texts) + (_TOOL_MARKUP if request.tools else 0)
        # A token has at least one byte, so a short prompt needs no counting.
        if markup + sum(len(text.encode(errors="replace")) for text in texts) <= room:
            return True
        return markup + sum(map(self._count, texts)) <= room

    def _schema_texts(self, tools: Sequence[BaseTool | dict[str, Any]]) -> list[str]:
        """Return the schemas of tools as texts; an agent's turns have the same tools."""
        known, texts = self._schemas
        if len(known) != len(tools) or any(old is not new for old, new in zip(known, tools, strict=True)):
            schemas = (tool if isinstance(tool, dict) else describe_function(tool) for tool in tools)
            texts = [json.dumps(schema, default=str) for schema in schemas]
            self._schemas = [*tools], texts
        return texts

    @property
    def _room(self) -> int | None:
        """The most tokens of messages; None: the size of the context is unknown."""
        profile = self.llm.profile or {}
        if (context := profile.get("max_input_tokens")) is None:
            return None
        longest_reply = profile.get("max_output_tokens") or context
        # The reserve is for an agent's own prompts, such as a planner's with its tools, which are not counted.
        return context - min(longest_reply, context // 4) - context // 16

    async def awrap_model_call(self, request: ModelRequest[Any], handler: AsyncHandler) -> ModelResponse[Any]:
        """Edit the messages in a thread, which counts tokens, and call the model."""
        edited: list[ModelRequest[Any]] = []

        def capture(changed: ModelRequest[Any]) -> ModelResponse[Any]:
            edited.append(changed)
            return ModelResponse(result=[])

        await asyncio.to_thread(self.wrap_model_call, request, capture)
        return await handler(edited[0])

    def apply(self, messages: list[AnyMessage], *, count_tokens: CountTokens) -> None:
        """Edit the messages in place."""
        if (room := self._room) is None:
            return
        ClearToolUsesEdit(trigger=room, keep=_KEPT, placeholder=_CLEARED).apply(messages, count_tokens=count_tokens)
        while count_tokens(messages) > room:
            questions = [index for index, message in enumerate(messages) if isinstance(message, HumanMessage)]
            if len(questions) > 1:
                del messages[: questions[1]]
            elif not _halve_a_text(messages):
                return


def _all_text(message: AnyMessage) -> str:
    """Return everything in a message that a chat template may write."""
    parts: list[Any] = [message.content, message.name, message.additional_kwargs.get("reasoning_content")]
    if isinstance(message, AIMessage):
        parts += [message.tool_calls, message.invalid_tool_calls]
    return "\n".join(str(part) for part in parts if part)


def _halve_a_text(messages: list[AnyMessage]) -> bool:
    """Halve the longest text of a tool, or else of the model; False if no text is long enough."""
    for kind in (ToolMessage, AIMessage):
        indices = [index for index, message in enumerate(messages) if isinstance(message, kind)]
        longest = max(indices, key=lambda index: len(messages[index].text), default=None)
        if longest is not None and len(text := messages[longest].text) > 200:
            halved = truncate(text, _REST, len(text) // 2 - 100)
            messages[longest] = messages[longest].model_copy(update={"content": halved})
            return True
    return False


class InvalidCallState(AgentState[Any], total=False):
    """The state of an agent with `InvalidToolCallMiddleware`."""

    invalid_replies: Annotated[int, PrivateStateAttr]  # number of replies in a row with invalid calls only


@dataclass(eq=False)
class InvalidToolCallMiddleware(AgentMiddleware[Any, Any, Any]):
    """Tells the model which of its tool calls were invalid, and lets it retry.

    Without it such an agent ends with an empty answer, because LangChain reads only `tool_calls`:

        ```python
        agent = create_agent(llm, tools, middleware=[InvalidToolCallMiddleware(max_retries=2)])
        ```

    Each invalid call gets a `ToolMessage` of the status "error" that explains the error. After `max_retries` retries in
    a row without any valid call, the agent ends with a message that says so.

    Args:
        max_retries: Maximum number of retries in a row, at least 0.

    Raises:
        ValueError: `max_retries` is negative.
    """

    state_schema = InvalidCallState
    max_retries: int = 2

    def __post_init__(self) -> None:
        if self.max_retries < 0:
            raise ValueError("max_retries is at least 0")

    @hook_config(can_jump_to=["model", "end"])
    def after_model(self, state: AgentState[Any], runtime: Any) -> dict[str, Any] | None:
        """Answer the invalid calls."""
        reply = state["messages"][-1]
        failures: int = state.get("invalid_replies", 0)  # type: ignore[assignment]
        if not isinstance(reply, AIMessage) or not reply.invalid_tool_calls:
            return {"invalid_replies": 0} if failures else None
        notes: list[AnyMessage] = [*map(_explain_invalid, reply.invalid_tool_calls)]
        if reply.tool_calls:
            return {"messages": notes, "invalid_replies": 0}
        if failures < self.max_retries:
            return {"messages": notes, "jump_to": "model", "invalid_replies": failures + 1}
        problem = f"{failures + 1} replies in a row had tool calls that could not be read; {notes[-1].text}"
        return {"messages": [*notes, AIMessage(problem)], "jump_to": "end", "invalid_replies": 0}


def _explain_invalid(call: InvalidToolCall) -> ToolMessage:
    """Return a message with the error of an invalid call, for the model."""
    reason, name = call.get("error") or "its arguments are not a JSON object", call.get("name")
    # Small models call again only if the message names the tool.
    instruction = f"Call {name or 'the tool'} again, with arguments that are one JSON object."
    text = f"Error: this call could not be read ({reason}). {instruction}"
    return ToolMessage(text, tool_call_id=call.get("id") or "", name=name, status="error")
