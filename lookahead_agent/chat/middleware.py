"""Policies for agents made by `langchain.agents.create_agent`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from langchain_core.messages import ToolMessage

from lookahead_agent.errors import MissingExtraError
from lookahead_agent.policy import PolicyLike, as_policy

try:
    from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse
except ImportError as error:
    raise MissingExtraError("the middleware needs langchain: pip install 'lookahead-agent[agents]'") from error

Chooser = Callable[[ModelRequest[Any]], PolicyLike | None]
"""Given what the agent is about to ask, the policy for it; None: the model chooses as ever."""


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
