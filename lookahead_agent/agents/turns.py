"""Turns of an agent's model: middleware that takes them, the labels of their calls, and the last turn."""

import re
import uuid
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from langchain.agents.middleware import AgentMiddleware, AgentState, ModelRequest, ModelResponse, hook_config
from langchain_core.messages import (
    AIMessage,
    AnyMessage,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    ToolCall,
    ToolMessage,
)
from langchain_core.runnables import Runnable

from lookahead_agent.agents.run_record import (
    DIRECT,
    REPEATED,
    conversation_with_results,
    messages_of_run,
    result_blocks,
    since_last_question,
    turn_number,
    with_question,
)

Handler = Callable[[ModelRequest[Any]], ModelResponse[Any]]
AsyncHandler = Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]


class ModelCall(NamedTuple):
    """A call of the agent's model in a turn."""

    request: ModelRequest[Any]
    model: Runnable[Any, AIMessage] | None = None  # called with `messages` in place of the request, past middleware
    messages: Sequence[BaseMessage] = ()
    plan: int | None = None  # number of the plan that the call requests, if any
    earlier: Sequence[Any] = ()  # the plans before it


Turn = Generator[ModelCall, ModelResponse[Any], ModelResponse[Any]]
"""Yields the model calls of a turn, receives the response to each, and returns the response of the turn."""


class TurnMiddleware(AgentMiddleware[Any, Any, Any]):
    """Middleware that describes a turn once, for sync and async agents."""

    def turn(self, request: ModelRequest[Any]) -> Turn:
        """Take the model's next turn."""
        raise NotImplementedError

    def wrap_model_call(self, request: ModelRequest[Any], handler: Handler) -> ModelResponse[Any]:
        """Take the next turn."""
        turn: Turn = self.turn(request)
        response: Any = None
        while True:
            try:
                model_call = turn.send(response)
            except StopIteration as end:
                return cast("ModelResponse[Any]", end.value)
            response = self.ask(model_call, handler)

    async def awrap_model_call(self, request: ModelRequest[Any], handler: AsyncHandler) -> ModelResponse[Any]:
        """Run `wrap_model_call` in an event loop."""
        turn: Turn = self.turn(request)
        response: Any = None
        while True:
            try:
                model_call = turn.send(response)
            except StopIteration as end:
                return cast("ModelResponse[Any]", end.value)
            response = await self.aask(model_call, handler)

    def ask(self, model_call: ModelCall, handler: Handler) -> ModelResponse[Any]:
        """Call the model."""
        if model_call.model is None:
            return handler(model_call.request)
        return ModelResponse(result=[model_call.model.invoke(model_call.messages)])

    async def aask(self, model_call: ModelCall, handler: AsyncHandler) -> ModelResponse[Any]:
        """Run `ask` in an event loop."""
        if model_call.model is None:
            return await handler(model_call.request)
        return ModelResponse(result=[await model_call.model.ainvoke(model_call.messages)])


def turns_of(messages: Sequence[AnyMessage]) -> list[tuple[AIMessage, list[ToolMessage]]]:
    """Return the model's replies among the messages of a run, each with its tool results."""
    turns: list[tuple[AIMessage, list[ToolMessage]]] = []
    for message in messages:
        if isinstance(message, AIMessage):
            turns.append((message, []))
        elif isinstance(message, ToolMessage) and turns:
            turns[-1][1].append(message)
    return turns


def has_failed(results: Sequence[ToolMessage]) -> bool:
    """Whether there were calls and all of them failed."""
    return bool(results) and all(result.status == "error" for result in results)


def is_repetition(turns: Sequence[tuple[AIMessage, list[ToolMessage]]]) -> bool:
    """Whether the last turn repeats the calls of the turn before, or of an earlier turn in which all calls failed.

    Another line of the same plan may make the call of the line before again, unless it failed.
    """
    if not turns or not (calls := calls_of(last := turns[-1][0])):
        return False
    before = turns[:-1]
    return any(
        calls == calls_of(reply) and (has_failed(results) or (turn == len(before) and not _is_next_line(last, reply)))
        for turn, (reply, results) in enumerate(before, 1)
    )


def _is_next_line(reply: AIMessage, before: AIMessage) -> bool:
    """Whether the calls of two replies are different lines of one plan."""
    calls = [*before.tool_calls, *reply.tool_calls]
    lines = {line for call in calls if (line := plan_line(call["id"] or "")) is not None}
    return len(lines) == len(calls) and len({line.plan for line in lines}) == 1


def calls_of(reply: AIMessage) -> list[tuple[str, dict[str, Any]]]:
    """Return names and arguments of a reply's calls."""
    return [(call["name"], call["args"]) for call in reply.tool_calls]


class LineOfPlan(NamedTuple):
    """The plan that a call belongs to, and the number of its line."""

    plan: int
    line: int


_CALL_ID = re.compile(r"plan-(\d+)-(\d+)-[0-9a-f]{8}")


def plan_call(plan: int, line: int, name: str, arguments: dict[str, Any]) -> ToolCall:
    """Return a tool call whose id encodes its plan and line."""
    return ToolCall(name=name, args=arguments, id=f"plan-{plan}-{line}-{uuid.uuid4().hex[:8]}", type="tool_call")


def plan_line(call_id: str) -> LineOfPlan | None:
    """Return the plan and line that the id of a call encodes; None if another call has it."""
    return LineOfPlan(int(found[1]), int(found[2])) if (found := _CALL_ID.fullmatch(call_id)) else None


def lookahead_settings(model: object, *, node: str, action_markers: Sequence[str] = ()) -> dict[str, Any]:
    """Return settings of one `ChatLookahead` call, for `ModelRequest.model_settings` or `bind`; none for other models.

    Args:
        model: The chat model that is called.
        node: Label of the call, which `policies` and the reply's metadata use.
        action_markers: Texts after which a reply is action: no draft step is accepted there.
    """
    if _as_lookahead(model) is None:
        return {}
    return {"node": node, **({"action_markers": tuple(action_markers)} if action_markers else {})}


_MAX_TOKENS, _MAX_THINKING_TOKENS = 1024, 8192
"""Tokens of a template's reply by a model without a limit of its own, and by one that thinks, or may think."""


def reply_limit(model: object) -> dict[str, int]:
    """Return the `max_tokens` of a template's calls; nothing for other models, and for one that has its own limit.

    A small model may repeat itself until the context is full.
    """
    while (inner := getattr(model, "bound", None)) is not None:
        if "max_tokens" in getattr(model, "kwargs", {}):
            return {}
        model = inner
    if (found := _as_lookahead(model)) is None or found.max_tokens is not None:
        return {}
    thinks = (found.profile or {}).get("reasoning_output") is not False
    return {"max_tokens": _MAX_THINKING_TOKENS if thinks else _MAX_TOKENS}


def warm(model: object, messages: Sequence[BaseMessage], *, node: str) -> None:
    """Have a `ChatLookahead` prefill the beginning of a node's next prompts, by its `warm`; other models do nothing.

    Args:
        model: The chat model that will be called.
        messages: Beginning of the prompts. A human message follows.
        node: Label of the calls.
    """
    if (found := _as_lookahead(model)) is not None:
        found.warm([*messages, HumanMessage("")], node=node)


def _as_lookahead(model: object) -> Any:
    """Return the `ChatLookahead` behind a model with bound arguments; None if it is another model."""
    while (inner := getattr(model, "bound", None)) is not None:
        model = inner
    # LangChain's type tells it, since importing the chat model takes seconds.
    return model if getattr(model, "_llm_type", None) == "lookahead" else None


def bind_node(request: ModelRequest[Any], node: str) -> Runnable[Any, AIMessage]:
    """Bind the label `node` to the request's model."""
    settings = lookahead_settings(request.model, node=node)
    return request.model.bind(**{**reply_limit(request.model), **request.model_settings, **settings})


MODEL_CALLS = 12  # Default maximum of model turns per question
RETRIES = 2  # Maximum number of retries after failed calls
MAX_REJECTIONS = 2  # Turns in which a person may reject the calls of a tool

REFUSED = "refused"
"""Artifact of a result by an agent behind a tool, whose run ended because a person rejected its calls."""


FINISHER = """You answer a question from the results of tools that were called. Say in one or two short sentences what \
the results say, and what is missing, if something is. Add nothing that the results do not say."""


@dataclass(eq=False, kw_only=True)
class FinalAnswerMiddleware(TurnMiddleware):
    """Ends a run with an answer instead of a loop, a limit or an empty reply.

    In a last turn without tools, the model states what the results say and what is missing. This turn is at the limit,
    after an empty reply, after several turns whose calls failed, and after a person rejected a tool's calls twice in a
    row. It also follows calls that repeat the turn before or that failed before, which are skipped. The record of the
    run shows all of that (`RunRecordMiddleware`); without it, the messages since the last question do.

    Raises:
        ValueError: `model_calls` is below 1.
    """

    model_calls: int = MODEL_CALLS  # maximum number of turns per question, the last included; at least 1
    node: str  # label of the model's turns
    finisher: str = "finisher"  # label of the last turn
    prompt: str = FINISHER  # system prompt of the last turn

    def __post_init__(self) -> None:
        if self.model_calls < 1:
            raise ValueError("model_calls is at least 1")

    def turn(self, request: ModelRequest[Any]) -> Turn:
        """Let the model take its turn, or its last one."""
        request = with_question(request)
        if not self._is_last(request.state):
            limit = reply_limit(request.model)
            settings = limit | lookahead_settings(request.model, node=self.node) | request.model_settings
            return (yield ModelCall(request.override(model_settings=settings)))
        messages = [SystemMessage(self.prompt), *conversation_with_results(request.messages, "Results")]
        reply = (yield ModelCall(request, bind_node(request, self.finisher), messages)).result[0]
        if not reply.text.strip():
            results = result_blocks(since_last_question(request.messages))
            reply = reply.model_copy(update={"content": f"The model wrote no answer. Results:\n\n{results}"})
        return ModelResponse(result=[reply.model_copy(update={"tool_calls": [], "invalid_tool_calls": []})])

    @hook_config(can_jump_to=["model"])
    def after_model(self, state: AgentState[Any], runtime: Any) -> dict[str, Any] | None:
        """Go to the last turn after repeated calls, which are skipped, or after an empty reply."""
        if not (turns := turns_of(messages_of_run(state))):
            return None
        reply, results = turns[-1]
        answered = {result.tool_call_id for result in results}
        skipped = [
            ToolMessage(
                "Not called again: the same call was made before.",
                tool_call_id=call["id"] or "",
                name=call["name"],
                status="error",
                additional_kwargs={REPEATED: True},
            )
            for call in reply.tool_calls
            if call["id"] not in answered
        ]
        if skipped and is_repetition(turns):
            return {"messages": skipped, "jump_to": "model"}
        return {"jump_to": "model"} if _is_empty(reply) else None

    def _is_last(self, state: Mapping[str, Any]) -> bool:
        turns = turns_of(messages_of_run(state))
        number = turn_number(state) or len(turns) + 1
        if (at_limit := number >= self.model_calls) or not turns:
            return at_limit
        if _is_empty(turns[-1][0]) or is_repetition(turns) or _is_refused(turns):
            return True
        failed = [has_failed(results) for _, results in turns]
        return len(failed) > RETRIES and all(failed[-RETRIES - 1 :])


def is_rejection(result: ToolMessage) -> bool:
    """Whether a person rejected the call, by LangChain's `HumanInTheLoopMiddleware`."""
    decision = result.additional_kwargs.get("lc_data")
    if isinstance(decision, Mapping) and "decision" in decision:
        return bool(decision["decision"] == "reject")
    return result.status == "error" and result.text.startswith("User rejected the tool call for ")


def _is_refused(turns: Sequence[tuple[AIMessage, list[ToolMessage]]]) -> bool:
    """Whether a person rejected the calls of one tool in its last turns, or an agent behind a tool ended so."""
    rejected: dict[str | None, list[bool]] = {}
    for _, results in turns:
        for name in {result.name for result in results}:
            own = [result for result in results if result.name == name]
            if any(result.artifact == REFUSED for result in own):
                return True
            rejected.setdefault(name, []).append(any(map(is_rejection, own)))
    return any(len(last := flags[-MAX_REJECTIONS:]) == MAX_REJECTIONS and all(last) for flags in rejected.values())


def outcome(messages: Sequence[AnyMessage]) -> tuple[str, str | None]:
    """Return the answer of an agent behind a tool, and the tool's artifact: `REFUSED`, `DIRECT` or None."""
    if isinstance(messages[-1], ToolMessage):
        return messages[-1].text, DIRECT
    return messages[-1].text, REFUSED if _is_refused(turns_of(since_last_question(messages))) else None


def _is_empty(reply: AIMessage) -> bool:
    return not (reply.tool_calls or reply.invalid_tool_calls or reply.text.strip())
