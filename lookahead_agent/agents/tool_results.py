"""What models get back from tools: errors with the tool's arguments, and results that fit into the context."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from langchain.agents.middleware import (
    AgentMiddleware,
    ClearToolUsesEdit,
    ContextEditingMiddleware,
    ModelRequest,
    ModelResponse,
    ToolCallRequest,
)
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.messages.utils import count_tokens_approximately
from langgraph.types import Command

from lookahead_agent.agents.prompts import describe_tools
from lookahead_agent.agents.tool_use import cut, cut_line, error_text, in_both_worlds
from lookahead_agent.agents.turns import AsyncHandler

CountTokens = Callable[[Sequence[BaseMessage]], int]
ToolResult = ToolMessage | Command[Any]

_SHARE = 4  # A result takes at most one part in so many of the model's context
_KEPT = 3  # Results that older ones make room for
_CLEARED = "(cleared, for the conversation was too long; call the tool again if this is needed)"
_FAILED = "The same call would fail again: call the tool with other arguments, or call another tool."
_REST = "ask the tool for less at once"


@dataclass(eq=False)
class ToolResultMiddleware(AgentMiddleware[Any, Any, Any]):
    """Makes of a tool's result a text that its model `llm` can use.

    A result that takes more than a quarter of the model's context is cut, with a line that says so. An error comes with
    the tool's arguments and description, so that the model can call it again.
    """

    llm: BaseChatModel
    _: KW_ONLY
    exact: bool = False  # whether the model counts the tokens; otherwise LangChain estimates their number

    def wrap_tool_call(self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], ToolResult]) -> ToolResult:
        """Make the call, also of a tool that is a coroutine alone."""
        tool = request.tool
        return self._readable(request, handler(request.override(tool=in_both_worlds(tool)) if tool else request))

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
            # The tool cancelled a scope of its own, and nobody the call.
            call = request.tool_call
            result = ToolMessage(error_text(error), tool_call_id=call["id"], name=call["name"], status="error")
        # Counting tokens may read the tokenizer's files.
        return await asyncio.to_thread(self._readable, request, result)

    def _readable(self, request: ToolCallRequest, result: ToolResult) -> ToolResult:
        if not isinstance(result, ToolMessage) or not isinstance(result.content, str):
            return result
        # A result that no message can carry would end the run where it is saved.
        text = self._fitting(result.content.encode(errors="replace").decode())
        if result.status == "error" and request.tool is not None:
            text += f"\n\nThe tool is:\n{describe_tools([request.tool])}\n{_FAILED}"
        return result.model_copy(update={"content": text})

    def _fitting(self, text: str) -> str:
        text = cut(text, _REST)
        context = (self.llm.profile or {}).get("max_input_tokens")
        # A token has a character at least, so that most results need no counting.
        if context is None or len(text) <= (most := context // _SHARE):
            return text
        tokens = self.llm.get_num_tokens(text) if self.exact else count_tokens_approximately([HumanMessage(text)])
        if tokens <= most:
            return text
        shown = max(1, len(text) * most // tokens)
        return text[:shown] + cut_line(shown, len(text), _REST)


class FitContextMiddleware(ContextEditingMiddleware):
    """`ContextEditingMiddleware` after whose edit the messages fit into the model's context.

    As long as they do not, older results are cleared, then earlier questions are left out, and then the longest texts
    of the tools and of the model are cut to half their length. The graph's state keeps all of them. A model whose
    context is not known is left to itself.
    """

    name = "ContextEditingMiddleware"

    def __init__(self, llm: BaseChatModel, *, exact: bool = False) -> None:
        super().__init__(edits=[self], token_count_method="model" if exact else "approximate")
        self.llm = llm

    async def awrap_model_call(self, request: ModelRequest[Any], handler: AsyncHandler) -> ModelResponse[Any]:
        """Edit the messages, counting tokens in a thread, and ask."""
        edited: list[ModelRequest[Any]] = []

        def keep(changed: ModelRequest[Any]) -> ModelResponse[Any]:
            edited.append(changed)
            return ModelResponse(result=[])

        await asyncio.to_thread(self.wrap_model_call, request, keep)
        return await handler(edited[0])

    def apply(self, messages: list[AnyMessage], *, count_tokens: CountTokens) -> None:
        """Edit the messages in place."""
        profile = self.llm.profile or {}
        if (context := profile.get("max_input_tokens")) is None:
            return
        longest_reply = profile.get("max_output_tokens") or context
        # An agent's own prompts, such as a planner's with its tools, come on top of what is counted.
        room = context - min(longest_reply, context // 4) - context // 16
        ClearToolUsesEdit(trigger=room, keep=_KEPT, placeholder=_CLEARED).apply(messages, count_tokens=count_tokens)
        while count_tokens(messages) > room:
            questions = [index for index, message in enumerate(messages) if isinstance(message, HumanMessage)]
            if len(questions) > 1:
                del messages[: questions[1]]
            elif not _halve_a_text(messages):
                return


def _halve_a_text(messages: list[AnyMessage]) -> bool:
    """Cut the longest text of a tool, or where there is none of the model."""
    for kind in (ToolMessage, AIMessage):
        ours = [index for index, message in enumerate(messages) if isinstance(message, kind)]
        longest = max(ours, key=lambda index: len(messages[index].text), default=None)
        if longest is not None and len(text := messages[longest].text) > 200:
            shown = text[: len(text) // 2 - 100]
            halved = shown + cut_line(len(shown), len(text), _REST)
            messages[longest] = messages[longest].model_copy(update={"content": halved})
            return True
    return False
