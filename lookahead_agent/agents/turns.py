"""Turns of an agent's model: those that its messages tell of, and middleware that takes them by one generator."""

from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any, NamedTuple, cast

from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse
from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, ToolMessage
from langchain_core.runnables import Runnable

from lookahead_agent.agents.prompts import lookahead_settings, this_question


class Asked(NamedTuple):
    """A question to the agent's model in a turn."""

    request: ModelRequest[Any]
    model: Runnable[Any, AIMessage] | None = None  # that is asked `messages` beside the turn, past other middleware
    messages: Sequence[BaseMessage] = ()
    plan: int | None = None  # number of the plan that is asked for, if one is


Turn = Generator[Asked, ModelResponse[Any], ModelResponse[Any]]
"""Questions of a turn, each of which is sent its response; returns the response of the turn."""


class TurnMiddleware(AgentMiddleware[Any, Any, Any]):
    """Middleware with one description of a turn, for agents that run in an event loop and for others."""

    def turn(self, request: ModelRequest[Any]) -> Turn:
        """Take the model's next turn."""
        raise NotImplementedError

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        """Take the next turn."""
        turn: Turn = self.turn(request)
        response: Any = None
        while True:
            try:
                asked = turn.send(response)
            except StopIteration as end:
                return cast("ModelResponse[Any]", end.value)
            response = self.ask(asked, handler)

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelResponse[Any]:
        """`wrap_model_call` for agents that run in an event loop."""
        turn: Turn = self.turn(request)
        response: Any = None
        while True:
            try:
                asked = turn.send(response)
            except StopIteration as end:
                return cast("ModelResponse[Any]", end.value)
            response = await self.aask(asked, handler)

    def ask(self, asked: Asked, handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]) -> ModelResponse[Any]:
        """The response to a question."""
        if asked.model is None:
            return handler(asked.request)
        return ModelResponse(result=[asked.model.invoke(asked.messages)])

    async def aask(
        self, asked: Asked, handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelResponse[Any]:
        """`ask` in an event loop."""
        if asked.model is None:
            return await handler(asked.request)
        return ModelResponse(result=[await asked.model.ainvoke(asked.messages)])


def turns_of(messages: Sequence[AnyMessage]) -> list[tuple[AIMessage, list[ToolMessage]]]:
    """The model's replies since the last question, each with what its tools said."""
    turns: list[tuple[AIMessage, list[ToolMessage]]] = []
    for message in this_question(messages):
        if isinstance(message, AIMessage):
            turns.append((message, []))
        elif isinstance(message, ToolMessage) and turns:
            turns[-1][1].append(message)
    return turns


def has_failed(results: Sequence[ToolMessage]) -> bool:
    """Whether there were calls, and none of them went well."""
    return bool(results) and all(result.status == "error" for result in results)


def is_repetition(turns: Sequence[tuple[AIMessage, list[ToolMessage]]]) -> bool:
    """Whether the last turn makes the calls of the turn before, or those of an earlier turn in which all failed."""
    if not turns or not (calls := calls_of(turns[-1][0])):
        return False
    before = turns[:-1]
    return any(
        calls == calls_of(reply) and (turn == len(before) or has_failed(results))
        for turn, (reply, results) in enumerate(before, 1)
    )


def calls_of(reply: AIMessage) -> list[tuple[str, dict[str, Any]]]:
    """Names and arguments of a reply's calls."""
    return [(call["name"], call["args"]) for call in reply.tool_calls]


def named_call(request: ModelRequest[Any], node: str) -> Runnable[Any, AIMessage]:
    """The request's model, whose call has that name."""
    return request.model.bind(**{**request.model_settings, **lookahead_settings(request.model, node=node)})
