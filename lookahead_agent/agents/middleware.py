"""Middleware for agents made by `langchain.agents.create_agent`: `standard_middleware`, thoughts and policies."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, SystemMessage, ToolMessage
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool

from lookahead_agent.agents.prompts import (
    REPEATED,
    conversation_with_results,
    describe_tools,
    result_blocks,
    this_question,
)
from lookahead_agent.agents.tool_results import FitContextEdit, ToolResultMiddleware
from lookahead_agent.agents.tool_use import error_text
from lookahead_agent.errors import MissingExtraError
from lookahead_agent.generation.tool_calls import invalid_call_messages
from lookahead_agent.policy import PolicyLike, as_policy

try:
    from langchain.agents.middleware import (
        AgentMiddleware,
        AgentState,
        ContextEditingMiddleware,
        HumanInTheLoopMiddleware,
        ModelRequest,
        ModelResponse,
        ToolErrorMiddleware,
        ToolRetryMiddleware,
        hook_config,
    )
except ImportError as error:
    raise MissingExtraError("the middleware needs langchain: pip install 'lookahead-agent[agents]'") from error

Chooser = Callable[[ModelRequest[Any]], PolicyLike | None]
"""Given what the agent is about to ask, the policy for it; None: the model chooses as ever."""

MODEL_CALLS = 12
"""Turns of the model on one question."""
REASONING_KEY = "reasoning_content"
"""Key of `additional_kwargs` under which a reply has its reasoning."""
RETRIES = 2
"""How often the model may try again after calls that failed."""

THINKER = """You think for an assistant that answers a question with tools. Say in one or two short sentences what is \
known so far and what is to be done next. Use what tools say, make nothing up, and write no code and no calls."""

FIRST_THOUGHT = "Which facts or files have to be looked up first, and with which tool? Answer in one sentence."
FAILURE_THOUGHT = "Why did the last call fail, and how can it be done in another way? Answer in one sentence."
NEXT_THOUGHT = "What do the results say about the question, and what is to be done next? Answer in one sentence."

ACTOR = """You carry out a task with tools, one call at a time. Make the call that the next step needs. Call \
"ready_to_answer" when the results say all that was asked for and nothing is left to do."""

FINISHER = """You answer a question from the results of tools that were called. Say in one or two short sentences what \
the results say, and what is missing, if something is. Add nothing that the results do not say."""

_BEFORE_THOUGHT = "content_before_thought"
"""Key of `additional_kwargs` under which a message that a thought was added to has its own content."""
READY_NAME = "ready_to_answer"
READY: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": READY_NAME,
        "description": "The results say all that was asked for, and nothing is left to do: answer now.",
        "parameters": {"type": "object", "properties": {}},
    },
}


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
    made: list[AgentMiddleware[Any, Any, Any]] = [
        ToolResultMiddleware(llm, exact=ours),
        ToolErrorMiddleware(lambda error, _: error_text(error)),
        *middleware,
    ]
    # What a person has approved is done once.
    if repeatable := [tool.name for tool in tools if tool.name not in ask_before]:
        made.append(
            ToolRetryMiddleware(
                max_retries=1, tools=[*repeatable], retry_on=(ConnectionError,), on_failure="error", initial_delay=0.1
            )
        )
    if ask_before:
        made.append(HumanInTheLoopMiddleware(dict.fromkeys(ask_before, True)))
    made += [
        # `FinalAnswerMiddleware` ends the run before this one does.
        InvalidToolCallMiddleware(max_retries=model_calls),
        ContextEditingMiddleware(edits=[FitContextEdit(llm)], token_count_method="model" if ours else "approximate"),
        FinalAnswerMiddleware(model_calls=model_calls, node=node, finisher=finisher, prompt=finisher_prompt),
    ]
    # An agent takes one of a name.
    theirs = {one.name for one in middleware}
    return [one for one in made if one in middleware or one.name not in theirs]


class FinalAnswerMiddleware(AgentMiddleware[Any, Any, Any]):
    """Ends a run with an answer in place of a loop, a limit or nothing.

    The model gets a last turn, without tools, in which it says what the results say and what is missing, if

    - it has used all but one of its turns,
    - it makes the same calls as in the turn before (which are not made again),
    - its calls failed in several turns in a row, or
    - it neither called a tool nor answered.

    All of that is read from the messages since the last question, so that a thread's next question begins anew.

    Args:
        model_calls: Turns of the model on one question, the last included.
        retries: Turns in a row that may fail after a first one.
        node: Name of the model's turns; None: that of LangGraph's node.
        finisher: Name of the last turn.
        prompt: System prompt of the last turn.

    Raises:
        ValueError: No turn, or a negative number of retries.
    """

    def __init__(
        self,
        *,
        model_calls: int = MODEL_CALLS,
        retries: int = RETRIES,
        node: str | None = None,
        finisher: str = "finisher",
        prompt: str = FINISHER,
    ) -> None:
        super().__init__()
        if model_calls < 1 or retries < 0:
            raise ValueError("model_calls is at least 1 and retries at least 0")
        self._model_calls = model_calls
        self._retries = retries
        self._node = node
        self._finisher = finisher
        self._prompt = prompt

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        """Let the model take its turn, or its last one."""
        if not self._is_last(request.state["messages"]):
            return handler(self._with_name(request))
        return self._answered(request, _named(request, self._finisher).invoke(self._last_messages(request)))

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelResponse[Any]:
        """`wrap_model_call` for agents that run in an event loop."""
        if not self._is_last(request.state["messages"]):
            return await handler(self._with_name(request))
        return self._answered(request, await _named(request, self._finisher).ainvoke(self._last_messages(request)))

    @hook_config(can_jump_to=["model"])
    def after_model(self, state: AgentState[Any], runtime: Any) -> dict[str, Any] | None:
        """Have a last turn after the same calls, which are not made again, and after an empty reply."""
        turns = _turns(state["messages"])
        reply = turns[-1][0]
        if len(turns) > 1 and reply.tool_calls and _calls(reply) == _calls(turns[-2][0]):
            told = [
                ToolMessage(
                    "Not called again: the call before was the same.",
                    tool_call_id=call["id"] or "",
                    name=call["name"],
                    status="error",
                    additional_kwargs={REPEATED: True},
                )
                for call in reply.tool_calls
            ]
            return {"messages": told, "jump_to": "model"}
        if not reply.tool_calls and not reply.invalid_tool_calls and not reply.text.strip():
            return {"jump_to": "model"}
        return None

    @hook_config(can_jump_to=["model"])
    async def aafter_model(self, state: AgentState[Any], runtime: Any) -> dict[str, Any] | None:
        """`after_model` for agents that run in an event loop."""
        return self.after_model(state, runtime)

    def _with_name(self, request: ModelRequest[Any]) -> ModelRequest[Any]:
        if self._node is None:
            return request
        settings = lookahead_settings(request.model, node=self._node)
        return request.override(model_settings={**settings, **request.model_settings})

    def _is_last(self, messages: Sequence[AnyMessage]) -> bool:
        turns = _turns(messages)
        if not turns:
            return self._model_calls == 1
        if len(turns) >= self._model_calls - 1:
            return True
        (reply, _), before = turns[-1], turns[:-1]
        if not reply.tool_calls and not reply.invalid_tool_calls and not reply.text.strip():
            return True
        if before and reply.tool_calls and _calls(reply) == _calls(before[-1][0]):
            return True
        failed = [_failed(results) for _, results in turns]
        return len(failed) > self._retries and all(failed[-self._retries - 1 :])

    def _last_messages(self, request: ModelRequest[Any]) -> list[BaseMessage]:
        return [SystemMessage(self._prompt), *conversation_with_results(request.messages, "Results")]

    def _answered(self, request: ModelRequest[Any], reply: AIMessage) -> ModelResponse[Any]:
        if not reply.text.strip():
            results = result_blocks(this_question(request.messages))
            reply = reply.model_copy(update={"content": f"The model wrote no answer. Results:\n\n{results}"})
        return ModelResponse(result=[reply.model_copy(update={"tool_calls": [], "invalid_tool_calls": []})])


def _turns(messages: Sequence[AnyMessage]) -> list[tuple[AIMessage, list[ToolMessage]]]:
    """The model's replies since the last question, each with what its tools said."""
    turns: list[tuple[AIMessage, list[ToolMessage]]] = []
    for message in this_question(messages):
        if isinstance(message, AIMessage):
            turns.append((message, []))
        elif isinstance(message, ToolMessage) and turns:
            turns[-1][1].append(message)
    return turns


def _failed(results: Sequence[ToolMessage]) -> bool:
    """Whether there were calls, and none of them went well."""
    return bool(results) and all(result.status == "error" for result in results)


def _calls(reply: AIMessage) -> list[tuple[str, dict[str, Any]]]:
    return [(call["name"], call["args"]) for call in reply.tool_calls]


class ThinkingMiddleware(AgentMiddleware[Any, Any, Any]):
    """Has the model think in a few sentences before each of its turns.

    The thought is a call of its own, with a policy of its own: `policies={"thinker": "balanced"}`. It is the content of
    the message that has the turn's tool calls; of an answer it is the `reasoning_content`, as with models that think.

        ```python
        agent = create_agent(llm, tools, middleware=[*standard_middleware(llm, tools), ThinkingMiddleware()])
        ```

    A turn that may call no tools needs no thought.

    Args:
        prompt: System prompt of the thought. The agent's own follows, and the tools with arguments and descriptions.
        node: Name of the thought's call.
        each_turn: Whether there is a thought before each turn. False: before the first one, if there are several tools
            to choose from, and after calls that failed.
    """

    def __init__(self, prompt: str = THINKER, *, node: str = "thinker", each_turn: bool = True) -> None:
        super().__init__()
        self._prompt = prompt
        self._node = node
        self._each_turn = each_turn

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        """Think, and then take the turn."""
        if not self._is_needed(request):
            return handler(request)
        thought = self._thinker(request).invoke(self._messages(request)).text.strip()
        return _with_thought(handler(_after_thought(request, thought)), thought)

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelResponse[Any]:
        """`wrap_model_call` for agents that run in an event loop."""
        if not self._is_needed(request):
            return await handler(request)
        thought = (await self._thinker(request).ainvoke(self._messages(request))).text.strip()
        return _with_thought(await handler(_after_thought(request, thought)), thought)

    def _is_needed(self, request: ModelRequest[Any]) -> bool:
        if self._each_turn or not request.tools:
            return bool(request.tools)
        turns = _turns(request.messages)
        return _failed(turns[-1][1]) if turns else len(request.tools) > 1

    def _thinker(self, request: ModelRequest[Any]) -> Runnable[Any, AIMessage]:
        # A small model goes on with code, which is the next turn's.
        return _named(request, self._node).bind(stop=["\n"])

    def _messages(self, request: ModelRequest[Any]) -> list[BaseMessage]:
        parts = [self._prompt, request.system_prompt or "", f"Tools:\n{describe_tools(request.tools)}"]
        system = SystemMessage("\n\n".join(filter(None, parts)))
        turns = _turns(request.messages)
        asked = FIRST_THOUGHT if not turns else FAILURE_THOUGHT if _failed(turns[-1][1]) else NEXT_THOUGHT
        return [system, *conversation_with_results(request.messages, "Results so far", asked)]


def _named(request: ModelRequest[Any], node: str) -> Runnable[Any, AIMessage]:
    """The request's model, whose call has that name."""
    return request.model.bind(**{**request.model_settings, **lookahead_settings(request.model, node=node)})


def _after_thought(request: ModelRequest[Any], thought: str) -> ModelRequest[Any]:
    """The request whose last message ends with the thought: chat templates refuse two messages of one role."""
    if not thought or not request.messages:
        return request
    last = request.messages[-1]
    known = {**last.additional_kwargs, _BEFORE_THOUGHT: last.content}
    said = last.model_copy(update={"content": f"{last.text}\n\nThought: {thought}", "additional_kwargs": known})
    return request.override(messages=[*request.messages[:-1], said])


def _without_thought(messages: Sequence[AnyMessage]) -> list[AnyMessage]:
    """The messages as they are in the graph's state."""
    return [
        message.model_copy(update={"content": message.additional_kwargs[_BEFORE_THOUGHT]})
        if _BEFORE_THOUGHT in message.additional_kwargs
        else message
        for message in messages
    ]


def _with_thought(response: ModelResponse[Any], thought: str) -> ModelResponse[Any]:
    """The response whose reply has the thought: beside calls as its text, beside an answer as its reasoning."""
    reply = response.result[0] if response.result else None
    if not thought or not isinstance(reply, AIMessage):
        return response
    if reply.tool_calls or reply.invalid_tool_calls:
        changed = reply.model_copy(update={"content": thought})
    else:
        reasoning = {**reply.additional_kwargs, REASONING_KEY: thought}
        changed = reply.model_copy(update={"additional_kwargs": reasoning})
    return replace(response, result=[changed, *response.result[1:]])


class CallOrAnswerMiddleware(AgentMiddleware[Any, Any, Any]):
    """Has the model decide in each turn, by guided decoding, for the call of a tool or for the answer.

    Small models write code, or a call in a form of their own, where they should call a tool. Here a turn is a call that
    fits its tool's schema, or one of `ready_to_answer`. After that the model answers from the results. A model that
    repeats a call that failed decides once more, for another tool.

    Args:
        prompt: System prompt of the decision; the agent's own follows.
        finisher: Name of the answer's call.
        finisher_prompt: System prompt of the answer.
    """

    def __init__(self, prompt: str = ACTOR, *, finisher: str = "finisher", finisher_prompt: str = FINISHER) -> None:
        super().__init__()
        self._prompt = prompt
        self._finisher = finisher
        self._finisher_prompt = finisher_prompt

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        """Decide, and answer if that is the decision."""
        if not request.tools:
            return handler(request)
        response = handler(self._decision(request))
        if others := _other_tools(request, response):
            response = handler(self._decision(request, others))
        return _without_ready(response) or handler(self._answer(request))

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelResponse[Any]:
        """`wrap_model_call` for agents that run in an event loop."""
        if not request.tools:
            return await handler(request)
        response = await handler(self._decision(request))
        if others := _other_tools(request, response):
            response = await handler(self._decision(request, others))
        return _without_ready(response) or await handler(self._answer(request))

    def _decision(self, request: ModelRequest[Any], tools: Sequence[Any] = ()) -> ModelRequest[Any]:
        system = "\n\n".join(filter(None, [self._prompt, request.system_prompt]))
        return request.override(
            system_message=SystemMessage(system),
            messages=conversation_with_results(request.messages, "Results so far"),
            tools=[*tools] or [*request.tools, READY],
            tool_choice="any",
        )

    def _answer(self, request: ModelRequest[Any]) -> ModelRequest[Any]:
        settings = {**request.model_settings, **lookahead_settings(request.model, node=self._finisher)}
        messages = _without_thought(request.messages)
        answer = request.override(tools=[], model_settings=settings, messages=messages)
        if not any(isinstance(message, ToolMessage) for message in this_question(messages)):
            return answer
        system = "\n\n".join(filter(None, [self._finisher_prompt, request.system_prompt]))
        results: list[AnyMessage] = conversation_with_results(messages, "Results")
        return answer.override(system_message=SystemMessage(system), messages=results)


def _other_tools(request: ModelRequest[Any], response: ModelResponse[Any]) -> list[Any]:
    """The tools that are left to a reply which repeats calls that failed in the turn before; none: it does not."""
    turns, reply = _turns(request.messages), response.result[0] if response.result else None
    if not turns or not isinstance(reply, AIMessage) or not reply.tool_calls:
        return []
    before, results = turns[-1]
    if not _failed(results) or _calls(before) != _calls(reply):
        return []
    failed = {call["name"] for call in reply.tool_calls}
    return [tool for tool in request.tools if isinstance(tool, dict) or tool.name not in failed]


def _without_ready(response: ModelResponse[Any]) -> ModelResponse[Any] | None:
    """The response with the calls of tools alone; None: the model is ready to answer."""
    reply = response.result[0] if response.result else None
    if not isinstance(reply, AIMessage) or all(call["name"] != READY_NAME for call in reply.tool_calls):
        return response
    calls = [call for call in reply.tool_calls if call["name"] != READY_NAME]
    if not calls and not reply.invalid_tool_calls:
        return None
    return replace(response, result=[reply.model_copy(update={"tool_calls": calls}), *response.result[1:]])


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
