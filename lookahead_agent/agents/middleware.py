"""Middleware for agents made by `langchain.agents.create_agent`: `standard_middleware`, policies, unreadable calls."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from langchain.agents.middleware import (
    AgentMiddleware,
    AgentState,
    HumanInTheLoopMiddleware,
    ModelRequest,
    ToolErrorMiddleware,
    ToolRetryMiddleware,
    hook_config,
)
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AnyMessage, ToolMessage
from langchain_core.tools import BaseTool

from lookahead_agent.agents.prompts import lookahead_settings
from lookahead_agent.agents.tool_results import FitContextMiddleware, ToolResultMiddleware
from lookahead_agent.agents.tool_use import error_text
from lookahead_agent.agents.turns import FINISHER, MODEL_CALLS, Asked, FinalAnswerMiddleware, Turn, TurnMiddleware
from lookahead_agent.generation.tool_calls import invalid_call_messages
from lookahead_agent.policy import PolicyLike, as_policy


def standard_middleware(
    llm: BaseChatModel,
    tools: Sequence[BaseTool],
    *,
    model_calls: int = MODEL_CALLS,
    ask_before: Collection[str] = (),
    middleware: Sequence[AgentMiddleware[Any, Any, Any]] = (),
    node: str = "actor",
    finisher: str = "finisher",
    finisher_prompt: str = FINISHER,
) -> list[AgentMiddleware[Any, Any, Any]]:
    """What every agent with tools needs, from the outermost to the innermost; an agent's own flow follows it.

    Errors of tools are told to the model with the tool's arguments; lost connections are tried again; results fit into
    the context; calls that cannot be read are explained. A person is asked before some tools. A run ends with an
    answer, also at a limit: see `FinalAnswerMiddleware`.

    Args:
        llm: The agent's model.
        tools: The agent's tools.
        model_calls: Turns of the model on one question.
        ask_before: Names of tools before which the graph stops, by LangChain's `HumanInTheLoopMiddleware`. It goes on
            with `Command(resume={"decisions": [{"type": "approve"}]})`; needs a checkpointer.
        middleware: The caller's own, which sees errors of tools as they are raised, and encloses the agent's flow. One
            of the same class as one of these takes its place.
        node: Name of the model's turns.
        finisher: Name of the last turn.
        finisher_prompt: System prompt of the last turn.

    Raises:
        ValueError: `ask_before` names no tool, or no turn is left for the model.
    """
    if unknown := sorted(set(ask_before) - {tool.name for tool in tools}):
        raise ValueError(f"ask_before names tools that there are not: {', '.join(unknown)}")
    ours = bool(lookahead_settings(llm, node=node))
    repeatable: list[BaseTool | str] = [tool for tool in tools if tool.name not in ask_before]
    made: list[AgentMiddleware[Any, Any, Any]] = [
        ToolResultMiddleware(llm, exact=ours),
        ToolErrorMiddleware(lambda error, _: error_text(error)),
        *middleware,
        # A call that a person has approved is made once.
        ToolRetryMiddleware(
            max_retries=1, tools=repeatable, retry_on=(ConnectionError,), on_failure="error", initial_delay=0.1
        ),
        *([HumanInTheLoopMiddleware(dict.fromkeys(ask_before, True))] if ask_before else []),
        # `FinalAnswerMiddleware` ends the run before this one does.
        InvalidToolCallMiddleware(max_retries=model_calls),
        FitContextMiddleware(llm, exact=ours),
        FinalAnswerMiddleware(model_calls=model_calls, node=node, finisher=finisher, prompt=finisher_prompt),
    ]
    # An agent takes one of a name.
    theirs = {one.name for one in middleware}
    return [one for one in made if one in middleware or one.name not in theirs]


@dataclass(eq=False)
class LookaheadPolicyMiddleware(TurnMiddleware):
    """Chooses the verifier policy of each model call of an agent.

    In such an agent every call comes from one node, "model", so `policies` cannot tell planning from acting; this can:

        ```python
        agent = create_agent(llm, tools, middleware=[LookaheadPolicyMiddleware(planning="balanced", acting="strict")])
        ```

    Args:
        planning: Policy until the first tool has answered; None: the model chooses as ever.
        acting: Policy from then on.

    Raises:
        PolicyError: A policy that does not exist.
    """

    planning: PolicyLike | None = None
    acting: PolicyLike | None = None

    def __post_init__(self) -> None:
        for policy in (self.planning, self.acting):
            if policy is not None:
                as_policy(policy)

    def turn(self, request: ModelRequest[Any]) -> Turn:
        """Ask the model under the chosen policy."""
        has_acted = any(isinstance(message, ToolMessage) for message in request.messages)
        policy = self.acting if has_acted else self.planning
        settings = {**request.model_settings, **({} if policy is None else {"policy": as_policy(policy)})}
        return (yield Asked(request.override(model_settings=settings)))


@dataclass(eq=False)
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

    max_retries: int = 2

    def __post_init__(self) -> None:
        if self.max_retries < 0:
            raise ValueError("max_retries is at least 0")

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


def _failures(messages: Sequence[AnyMessage]) -> int:
    """Replies in a row, up to the last message, whose calls could not be read."""
    count = 0
    for message in reversed(messages):
        if isinstance(message, AIMessage) and message.invalid_tool_calls and not message.tool_calls:
            count += 1
        elif not (isinstance(message, ToolMessage) and message.status == "error"):
            break
    return count
