"""Middleware for agents made by `langchain.agents.create_agent`: policies, and calls that could not be read."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from langchain_core.messages import AIMessage, AnyMessage, ToolMessage

from lookahead_agent.errors import MissingExtraError
from lookahead_agent.generation.tool_calls import invalid_call_messages
from lookahead_agent.policy import PolicyLike, as_policy

try:
    from langchain.agents.middleware import AgentMiddleware, AgentState, ModelRequest, ModelResponse, hook_config
except ImportError as error:
    raise MissingExtraError("the middleware needs langchain: pip install 'lookahead-agent[agents]'") from error

Chooser = Callable[[ModelRequest[Any]], PolicyLike | None]
"""Given what the agent is about to ask, the policy for it; None: the model chooses as ever."""


def lookahead_settings(model: object, *, node: str, action_markers: Sequence[str] = ()) -> dict[str, Any]:
    """Arguments of one call of a `ChatLookahead`, for `ModelRequest.model_settings` or `bind`.

    Args:
        model: The chat model that is called; another class takes no such arguments and gets none.
        node: Name of the call, by which `policies` and the reply's metadata go.
        action_markers: Texts after which a reply is action; no draft step is accepted behind them.
    """
    # Such a model exists only where its module is loaded, which takes seconds.
    module = sys.modules.get("lookahead_agent.chat.model")
    while (inner := getattr(model, "bound", None)) is not None:
        model = inner  # of a model with bound arguments
    if module is None or not isinstance(model, module.ChatLookahead):
        return {}
    return {"node": node, **({"action_markers": tuple(action_markers)} if action_markers else {})}


class LookaheadPolicyMiddleware(AgentMiddleware[Any, Any, Any]):
    """Chooses the verifier policy of each model call of an agent.

    In such an agent every call comes from one node, "model", so `policies` cannot tell planning from acting; this can:

        ```python
        agent = create_agent(
            llm, tools, middleware=[LookaheadPolicyMiddleware(planning="balanced", acting="strict")]
        )
        ```

    Args:
        planning: Policy until the first tool has answered; None: the model chooses as ever.
        acting: Policy from then on.
        choose: Decides instead of the two, by the request (its messages, tools and state).

    Raises:
        PolicyError: A policy that does not exist.
        TypeError: `choose` and one of the others.
    """

    def __init__(
        self,
        planning: PolicyLike | None = None,
        acting: PolicyLike | None = None,
        *,
        choose: Chooser | None = None,
    ) -> None:
        super().__init__()
        if choose is not None and (planning is not None or acting is not None):
            raise TypeError("give either choose, or planning and acting")
        for policy in (planning, acting):
            if policy is not None:
                as_policy(policy)
        self._planning = planning
        self._acting = acting
        self._choose = choose or self._by_progress

    def _by_progress(self, request: ModelRequest[Any]) -> PolicyLike | None:
        has_acted = any(isinstance(message, ToolMessage) for message in request.messages)
        return self._acting if has_acted else self._planning

    def _with_policy(self, request: ModelRequest[Any]) -> ModelRequest[Any]:
        policy = self._choose(request)
        if policy is None:
            return request
        return request.override(model_settings={**request.model_settings, "policy": as_policy(policy)})

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        """Ask the model under the chosen policy."""
        return handler(self._with_policy(request))

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelResponse[Any]:
        """`wrap_model_call` for agents that run in an event loop."""
        return await handler(self._with_policy(request))


class InvalidToolCallMiddleware(AgentMiddleware[Any, Any, Any]):
    """Tells the model which of its tool calls could not be read, and lets it try again.

    Without it such an agent ends with an empty answer, for LangChain reads `tool_calls` alone:

        ```python
        agent = create_agent(llm, tools, middleware=[InvalidToolCallMiddleware(max_retries=2)])
        ```

    Each such call is answered by a `ToolMessage` of the status "error" that says what was wrong. After `max_retries`
    replies in a row without any call that could be read, the agent ends with a message that says so.

    Args:
        max_retries: How often in a row the model may try again, at least 0.

    Raises:
        ValueError: A negative number of retries.
    """

    def __init__(self, max_retries: int = 2) -> None:
        super().__init__()
        if max_retries < 0:
            raise ValueError("max_retries is at least 0")
        self.max_retries = max_retries

    @hook_config(can_jump_to=["model", "end"])
    def after_model(self, state: AgentState[Any], runtime: Any) -> dict[str, Any] | None:
        """Answer the calls that could not be read."""
        reply = state["messages"][-1]
        if not isinstance(reply, AIMessage) or not reply.invalid_tool_calls:
            return None
        told: list[AnyMessage] = [*invalid_call_messages(reply)]
        if reply.tool_calls:
            return {"messages": told}
        failures = _failures(state["messages"])
        if failures <= self.max_retries:
            return {"messages": told, "jump_to": "model"}
        told.append(AIMessage(f"{failures} replies in a row had tool calls that could not be read; {told[-1].text}"))
        return {"messages": told, "jump_to": "end"}

    @hook_config(can_jump_to=["model", "end"])
    async def aafter_model(self, state: AgentState[Any], runtime: Any) -> dict[str, Any] | None:
        """`after_model` for agents that run in an event loop."""
        return self.after_model(state, runtime)


def _failures(messages: Sequence[AnyMessage]) -> int:
    """Replies in a row, up to the last message, whose calls could not be read."""
    count = 0
    for message in reversed(messages):
        if isinstance(message, AIMessage) and message.invalid_tool_calls and not message.tool_calls:
            count += 1
        elif not (isinstance(message, ToolMessage) and message.status == "error"):
            break
    return count
