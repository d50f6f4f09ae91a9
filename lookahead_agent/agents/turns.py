"""Turns of an agent's model: those that its messages tell of, middleware that takes them, and the last turn."""

from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from langchain.agents.middleware import AgentMiddleware, AgentState, ModelRequest, ModelResponse, hook_config
from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, SystemMessage, ToolMessage
from langchain_core.runnables import Runnable

from lookahead_agent.agents.prompts import (
    REPEATED,
    conversation_with_results,
    lookahead_settings,
    result_blocks,
    this_question,
)

Handler = Callable[[ModelRequest[Any]], ModelResponse[Any]]
AsyncHandler = Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]


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

    def wrap_model_call(self, request: ModelRequest[Any], handler: Handler) -> ModelResponse[Any]:
        """Take the next turn."""
        turn: Turn = self.turn(request)
        response: Any = None
        while True:
            try:
                asked = turn.send(response)
            except StopIteration as end:
                return cast("ModelResponse[Any]", end.value)
            response = self.ask(asked, handler)

    async def awrap_model_call(self, request: ModelRequest[Any], handler: AsyncHandler) -> ModelResponse[Any]:
        """`wrap_model_call` for agents that run in an event loop."""
        turn: Turn = self.turn(request)
        response: Any = None
        while True:
            try:
                asked = turn.send(response)
            except StopIteration as end:
                return cast("ModelResponse[Any]", end.value)
            response = await self.aask(asked, handler)

    def ask(self, asked: Asked, handler: Handler) -> ModelResponse[Any]:
        """The response to a question."""
        if asked.model is None:
            return handler(asked.request)
        return ModelResponse(result=[asked.model.invoke(asked.messages)])

    async def aask(self, asked: Asked, handler: AsyncHandler) -> ModelResponse[Any]:
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


MODEL_CALLS = 12  # Turns of the model on one question
RETRIES = 2  # How often the model may try again after calls that failed


FINISHER = """You answer a question from the results of tools that were called. Say in one or two short sentences what \
the results say, and what is missing, if something is. Add nothing that the results do not say."""


@dataclass(eq=False, kw_only=True)
class FinalAnswerMiddleware(TurnMiddleware):
    """Ends a run with an answer in place of a loop, a limit or nothing.

    The model gets a last turn, without tools, in which it says what the results say and what is missing. This follows
    the last but one of its turns, calls that repeat the turn before or that failed before (they are not made again),
    several turns whose calls failed, and an empty reply. All of that is read from the messages since the last question.

    Raises:
        ValueError: No turn.
    """

    model_calls: int = MODEL_CALLS  # turns of the model on one question, the last included; at least 1
    node: str  # name of the model's turns
    finisher: str = "finisher"  # name of the last turn
    prompt: str = FINISHER  # system prompt of the last turn

    def __post_init__(self) -> None:
        if self.model_calls < 1:
            raise ValueError("model_calls is at least 1")

    def turn(self, request: ModelRequest[Any]) -> Turn:
        """Let the model take its turn, or its last one."""
        if not self._is_last(request.state["messages"]):
            settings = lookahead_settings(request.model, node=self.node) | request.model_settings
            return (yield Asked(request.override(model_settings=settings)))
        asked = [SystemMessage(self.prompt), *conversation_with_results(request.messages, "Results")]
        reply = (yield Asked(request, named_call(request, self.finisher), asked)).result[0]
        if not reply.text.strip():
            results = result_blocks(this_question(request.messages))
            reply = reply.model_copy(update={"content": f"The model wrote no answer. Results:\n\n{results}"})
        return ModelResponse(result=[reply.model_copy(update={"tool_calls": [], "invalid_tool_calls": []})])

    @hook_config(can_jump_to=["model"])
    def after_model(self, state: AgentState[Any], runtime: Any) -> dict[str, Any] | None:
        """Have a last turn after the same calls, which are not made again, and after an empty reply."""
        turns = turns_of(state["messages"])
        reply = turns[-1][0]
        if is_repetition(turns):
            told = [
                ToolMessage(
                    "Not called again: the same call was made before.",
                    tool_call_id=call["id"] or "",
                    name=call["name"],
                    status="error",
                    additional_kwargs={REPEATED: True},
                )
                for call in reply.tool_calls
            ]
            return {"messages": told, "jump_to": "model"}
        return {"jump_to": "model"} if _is_empty(reply) else None

    def _is_last(self, messages: Sequence[AnyMessage]) -> bool:
        turns = turns_of(messages)
        if (at_limit := len(turns) >= self.model_calls - 1) or not turns:
            return at_limit
        if _is_empty(turns[-1][0]) or is_repetition(turns):
            return True
        failed = [has_failed(results) for _, results in turns]
        return len(failed) > RETRIES and all(failed[-RETRIES - 1 :])


def _is_empty(reply: AIMessage) -> bool:
    return not (reply.tool_calls or reply.invalid_tool_calls or reply.text.strip())
