"""Middleware for agents of `langchain.agents.create_agent`: `standard_middleware`, and the policy of each call."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from langchain.agents.middleware import (
    AgentMiddleware,
    HumanInTheLoopMiddleware,
    ModelRequest,
    ToolErrorMiddleware,
    ToolRetryMiddleware,
)
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import ToolMessage
from langchain_core.tools import BaseTool

from lookahead_agent.agents.run_record import ContainedToolMiddleware, RunRecordMiddleware, contain_middleware
from lookahead_agent.agents.tool_results import FitContextMiddleware, InvalidToolCallMiddleware, ToolResultMiddleware
from lookahead_agent.agents.tool_schemas import check_tools
from lookahead_agent.agents.tool_use import error_text, is_read_only
from lookahead_agent.agents.turns import (
    FINISHER,
    MODEL_CALLS,
    FinalAnswerMiddleware,
    ModelCall,
    Turn,
    TurnMiddleware,
    lookahead_settings,
)
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
    """Return the middleware that every agent with tools needs, the outermost first; an agent's own flow follows it.

    The model sees errors of tools with the tool's arguments. A lost connection is retried for tools that only read
    (`metadata={"readOnlyHint": True}`). Results are truncated to fit into the context. Invalid tool calls are explained
    to the model. A person must approve calls of `ask_before`. A run ends with an answer, even at a limit: see
    `FinalAnswerMiddleware`.

    Args:
        llm: The agent's model.
        tools: The agent's tools.
        model_calls: Maximum number of model turns per question.
        ask_before: Names of tools before which the graph stops, by LangChain's `HumanInTheLoopMiddleware`. It resumes
            with `Command(resume={"decisions": [{"type": "approve"}]})`; needs a checkpointer.
        middleware: The caller's own, which sees errors as tools raise them, and encloses the agent's flow. It replaces
            standard middleware of the same name. `SystemExit` and the like in its hooks end the run with an error.
        node: Label of the model's turns.
        finisher: Label of the last turn.
        finisher_prompt: System prompt of the last turn.

    Raises:
        ConfigurationError: The schema of a tool is too large, or refers to something outside of it.
        ValueError: `ask_before` names an unknown tool, or `model_calls` is below 1.
    """
    if unknown := sorted(set(ask_before) - {tool.name for tool in tools}):
        raise ValueError(f"ask_before names tools that there are not: {', '.join(unknown)}")
    check_tools(tools)
    for entry in middleware:
        contain_middleware(entry)
    is_lookahead = bool(lookahead_settings(llm, node=node))
    repeatable: list[BaseTool | str] = [tool for tool in tools if is_read_only(tool) and tool.name not in ask_before]
    standard: list[AgentMiddleware[Any, Any, Any]] = [
        ToolResultMiddleware(llm, exact=is_lookahead),
        ToolErrorMiddleware(lambda error, _: error_text(error)),
        RunRecordMiddleware(),
        *middleware,
        # Other calls may have had their effect before the connection was lost.
        ToolRetryMiddleware(
            max_retries=1, tools=repeatable, retry_on=(ConnectionError,), on_failure="error", initial_delay=0.1
        ),
        *([HumanInTheLoopMiddleware(dict.fromkeys(ask_before, True))] if ask_before else []),
        # `FinalAnswerMiddleware` ends the run before this limit.
        InvalidToolCallMiddleware(max_retries=model_calls),
        FitContextMiddleware(llm, exact=is_lookahead),
        FinalAnswerMiddleware(model_calls=model_calls, node=node, finisher=finisher, prompt=finisher_prompt),
        ContainedToolMiddleware(),
    ]
    # `create_agent` accepts one middleware per name.
    caller_names = {entry.name for entry in middleware}
    return [entry for entry in standard if entry in middleware or entry.name not in caller_names]


@dataclass(eq=False)
class LookaheadPolicyMiddleware(TurnMiddleware):
    """Chooses the verifier policy of each model call of an agent.

    All calls of such an agent come from one node, "model", so `policies` cannot tell planning from acting. This can:

        ```python
        agent = create_agent(llm, tools, middleware=[LookaheadPolicyMiddleware(planning="balanced", acting="strict")])
        ```

    Args:
        planning: Policy until the first tool result; None: the model's own choice.
        acting: Policy from then on.

    Raises:
        PolicyError: A policy does not exist.
    """

    planning: PolicyLike | None = None
    acting: PolicyLike | None = None

    def __post_init__(self) -> None:
        for policy in (self.planning, self.acting):
            if policy is not None:
                as_policy(policy)

    def turn(self, request: ModelRequest[Any]) -> Turn:
        """Call the model under the chosen policy."""
        has_acted = any(isinstance(message, ToolMessage) for message in request.messages)
        policy = self.acting if has_acted else self.planning
        settings = {**request.model_settings, **({} if policy is None else {"policy": as_policy(policy)})}
        return (yield ModelCall(request.override(model_settings=settings)))
