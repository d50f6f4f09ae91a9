"""Middleware for a thought before a turn, and for the decision between a call and the answer by guided decoding."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from langchain.agents.middleware import ModelRequest, ModelResponse
from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, SystemMessage, ToolMessage

from lookahead_agent.agents.prompts import describe_tools
from lookahead_agent.agents.run_record import conversation_with_results, messages_of_run, since_last_question
from lookahead_agent.agents.turns import (
    FINISHER,
    ModelCall,
    Turn,
    TurnMiddleware,
    bind_node,
    calls_of,
    has_failed,
    is_repetition,
    lookahead_settings,
    turns_of,
)

REASONING_KEY = "reasoning_content"  # Key of a reply's reasoning in `additional_kwargs`
THINKER = """You think for an assistant that answers a question with tools. Say in one or two short sentences what is \
known so far and what is to be done next. Use what tools say, make nothing up, and write no code and no calls."""

FIRST_THOUGHT = "With which tool, or which ones in turn, is this done? Say in one sentence what each does."
FAILURE_THOUGHT = "Why did the last call fail, and how can it be done in another way? Answer in one sentence."
NEXT_THOUGHT = "What do the results say about the question, and what is to be done next? Answer in one sentence."

_BEFORE_THOUGHT = "content_before_thought"
"""Key in `additional_kwargs` of a message's own content, before a thought was appended to it."""
READY_NAME = "ready_to_answer"
READY: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": READY_NAME,
        "description": "The results say all that was asked for, and nothing is left to do: answer now.",
        "parameters": {"type": "object", "properties": {}},
    },
}


@dataclass(eq=False)
class ThinkingMiddleware(TurnMiddleware):
    """Makes the model think in a few sentences before each of its turns that may call tools.

    The thought is a separate call with a policy of its own: `policies={"thinker": "balanced"}`. It is the content of
    the message that has the turn's tool calls. In an answer it is the `reasoning_content`, as with reasoning models.
    """

    prompt: str = THINKER  # system prompt of the thought; the agent's own and the description of its tools follow
    _: KW_ONLY
    node: str = "thinker"  # label of the thought's call
    # Whether each turn has a thought. False: only the first turn, if there are several tools to choose from, and turns
    # after calls that failed.
    each_turn: bool = True

    def turn(self, request: ModelRequest[Any]) -> Turn:
        """Think, then take the turn."""
        if not self._is_needed(request):
            return (yield ModelCall(request))
        # A small model would continue with code, which belongs to the next turn.
        thinker = bind_node(request, self.node).bind(stop=["\n"])
        thought = (yield ModelCall(request, thinker, self._messages(request))).result[0].text.strip()
        return _with_thought((yield ModelCall(_after_thought(request, thought))), thought)

    def _is_needed(self, request: ModelRequest[Any]) -> bool:
        if self.each_turn or not request.tools:
            return bool(request.tools)
        turns = turns_of(messages_of_run(request.state))
        return has_failed(turns[-1][1]) if turns else len(request.tools) > 1

    def _messages(self, request: ModelRequest[Any]) -> list[BaseMessage]:
        parts = [self.prompt, request.system_prompt or "", f"Tools:\n{describe_tools(request.tools)}"]
        system = SystemMessage("\n\n".join(filter(None, parts)))
        turns = turns_of(messages_of_run(request.state))
        task = FIRST_THOUGHT if not turns else FAILURE_THOUGHT if has_failed(turns[-1][1]) else NEXT_THOUGHT
        return [system, *conversation_with_results(request.messages, "Results so far", task)]


def _after_thought(request: ModelRequest[Any], thought: str) -> ModelRequest[Any]:
    """Append the thought to the request's last message: chat templates reject two messages of one role."""
    if not thought or not request.messages:
        return request
    last = request.messages[-1]
    known = {**last.additional_kwargs, _BEFORE_THOUGHT: last.content}
    changed = last.model_copy(update={"content": f"{last.text}\n\nThought: {thought}", "additional_kwargs": known})
    return request.override(messages=[*request.messages[:-1], changed])


def _with_thought(response: ModelResponse[Any], thought: str) -> ModelResponse[Any]:
    """Add the thought to the reply: beside calls as its text, beside an answer as its reasoning."""
    reply = response.result[0] if response.result else None
    if not thought or not isinstance(reply, AIMessage):
        return response
    if reply.tool_calls or reply.invalid_tool_calls:
        changed = reply.model_copy(update={"content": thought})
    else:
        reasoning = {**reply.additional_kwargs, REASONING_KEY: thought}
        changed = reply.model_copy(update={"additional_kwargs": reasoning})
    return replace(response, result=[changed, *response.result[1:]])


@dataclass(eq=False)
class CallOrAnswerMiddleware(TurnMiddleware):
    """Makes the model decide in each turn, by guided decoding, between a tool call and the answer.

    Small models write code, or a call in a form of their own, instead of a tool call. Here a turn is a call that fits
    its tool's schema, or a call of `ready_to_answer`, after which the model answers from the results. A model that
    repeats its last call, or a failed one, decides once more, for another tool or the answer. If it then repeats an
    earlier call, it answers.
    """

    prompt: str  # system prompt of the decision; the agent's own follows it
    _: KW_ONLY
    finisher: str = "finisher"  # label of the answer's call
    finisher_prompt: str = FINISHER  # system prompt of the answer

    def turn(self, request: ModelRequest[Any]) -> Turn:
        """Decide, and answer if the model decides to."""
        if not request.tools:
            return (yield ModelCall(request))
        response = yield ModelCall(self._decision(request))
        reply, turns = _reply(response), turns_of(messages_of_run(request.state))
        repeated = {call["name"] for call in reply.tool_calls} if is_repetition([*turns, (reply, [])]) else set()
        others = [tool for tool in request.tools if isinstance(tool, dict) or tool.name not in repeated]
        if repeated and others:
            response = yield ModelCall(self._decision(request, [*others, READY]))
            calls = calls_of(_reply(response))
            if calls and any(calls == calls_of(before) for before, _ in turns):
                return (yield ModelCall(self._answer(request)))
        return _without_ready(response) or (yield ModelCall(self._answer(request)))

    def _decision(self, request: ModelRequest[Any], tools: Sequence[Any] = ()) -> ModelRequest[Any]:
        system = "\n\n".join(filter(None, [self.prompt, request.system_prompt]))
        return request.override(
            system_message=SystemMessage(system),
            messages=conversation_with_results(request.messages, "Results so far", explained=True),
            tools=[*tools] or [*request.tools, READY],
            tool_choice="any",
        )

    def _answer(self, request: ModelRequest[Any]) -> ModelRequest[Any]:
        settings = {**request.model_settings, **lookahead_settings(request.model, node=self.finisher)}
        messages = [
            message.model_copy(update={"content": message.additional_kwargs[_BEFORE_THOUGHT]})
            if _BEFORE_THOUGHT in message.additional_kwargs
            else message
            for message in request.messages
        ]
        answer = request.override(tools=[], model_settings=settings, messages=messages)
        if not any(isinstance(message, ToolMessage) for message in since_last_question(messages)):
            return answer
        system = "\n\n".join(filter(None, [self.finisher_prompt, request.system_prompt]))
        results: list[AnyMessage] = conversation_with_results(messages, "Results")
        return answer.override(system_message=SystemMessage(system), messages=results)


def _reply(response: ModelResponse[Any]) -> AIMessage:
    reply = response.result[0] if response.result else None
    return reply if isinstance(reply, AIMessage) else AIMessage("")


def _without_ready(response: ModelResponse[Any]) -> ModelResponse[Any] | None:
    """Return the response with its tool calls only; None: the model is ready to answer."""
    reply = _reply(response)
    calls = [call for call in reply.tool_calls if call["name"] != READY_NAME]
    if len(calls) == len(reply.tool_calls):
        return response
    if not calls and not reply.invalid_tool_calls:
        return None
    return replace(response, result=[reply.model_copy(update={"tool_calls": calls}), *response.result[1:]])
