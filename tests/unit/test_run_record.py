"""Runs of templates beside middleware and people that change their messages and calls, and empty questions."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import (
    AgentMiddleware,
    ClearToolUsesEdit,
    ContextEditingMiddleware,
    HumanInTheLoopMiddleware,
    SummarizationMiddleware,
    before_model,
)
from langchain_core.messages import (
    AIMessage,
    AnyMessage,
    BaseMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
    trim_messages,
)
from langchain_core.tools import BaseTool, StructuredTool, tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph.message import REMOVE_ALL_MESSAGES
from langgraph.types import Command

from lookahead_agent.agents.middleware import standard_middleware
from lookahead_agent.agents.templates import (
    build_llm_compiler,
    build_plan_execute,
    build_react,
    build_reflection,
    build_rewoo,
    build_self_consistency,
    build_supervisor,
)
from lookahead_agent.agents.tool_results import InvalidToolCallMiddleware
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.testing import scripted_chat

THREAD: Any = {"configurable": {"thread_id": "1"}}
MODEL_CALLS = 5
MANY = 40
PLANS = [build_plan_execute, build_rewoo, build_llm_compiler]
PLAN = "\n".join(f'{number}. fetch("a{number}")' for number in range(1, 9)) + '\n9. fetch("$1+$8")'
READ_ONLY = {"readOnlyHint": True}


class Runaway(BaseException):
    """A run does not end."""


class Script:
    """A model that never stops calling `fetch`; it records its prompts and the tool's arguments."""

    def __init__(self, plan: str = PLAN) -> None:
        self.prompts: list[str] = []
        self.fetched: list[str] = []
        self._plan = plan
        self._replies: dict[str, str] = {}
        self.llm = scripted_chat(self._reply, policy="off")
        self.fetch = StructuredTool.from_function(self._fetch, name="fetch", metadata=READ_ONLY)

    def _fetch(self, x: str) -> str:
        """Fetch something."""
        self.fetched.append(x)
        if len(self.fetched) > MANY:
            raise Runaway
        return f"result of {x}"

    def _reply(self, prompt: str) -> str:
        if prompt not in self._replies:
            self.prompts.append(prompt)
            number = len(self.prompts)
            call = json.dumps({"name": "fetch", "arguments": {"x": f"c{number}"}})
            if "You solve problems" in prompt:
                reply = f"I do it.\n\nPlan:\n{self._plan}"
            elif "You answer a question" in prompt:
                reply = "The answer."
            elif "You think for" in prompt:
                reply = "I think."
            elif "You carry out" in prompt:
                reply = call
            else:
                reply = f"<tool_call>{call}</tool_call>" if "tools:" in prompt else "SUMMARY"
            self._replies[prompt] = reply
        return self._replies[prompt]

    @property
    def last_prompt(self) -> str:
        return next(prompt for prompt in reversed(self.prompts) if "You answer a question" in prompt)


@before_model
def trim(state: Any, runtime: Any) -> dict[str, Any]:
    kept = trim_messages(state["messages"], max_tokens=2, token_counter=len)
    return {"messages": [RemoveMessage(REMOVE_ALL_MESSAGES), *kept]}


@before_model
def remove_all_but_the_last(state: Any, runtime: Any) -> dict[str, Any]:
    return {"messages": [RemoveMessage(str(message.id)) for message in state["messages"][:-1]]}


@before_model
def copy_without_ids(state: Any, runtime: Any) -> dict[str, Any]:
    copies = [message.model_copy(update={"id": None}) for message in state["messages"]]
    return {"messages": [RemoveMessage(REMOVE_ALL_MESSAGES), *copies]}


@before_model
def remind(state: Any, runtime: Any) -> dict[str, Any]:
    return {"messages": [HumanMessage(f"Remember to be brief ({len(state['messages'])}).")]}


class TrimTheRequest(AgentMiddleware[Any, Any, Any]):
    def wrap_model_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
        return handler(request.override(messages=request.messages[-1:]))

    async def awrap_model_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
        return await handler(request.override(messages=request.messages[-1:]))


def clear_results(llm: Any) -> AgentMiddleware[Any, Any, Any]:
    return ContextEditingMiddleware(edits=[ClearToolUsesEdit(trigger=1, keep=0)])


def summarize(llm: Any) -> AgentMiddleware[Any, Any, Any]:
    return SummarizationMiddleware(llm, trigger=("messages", 4), keep=("messages", 1))


def offload(llm: Any) -> AgentMiddleware[Any, Any, Any]:
    from deepagents.backends import StateBackend
    from deepagents.middleware.summarization import SummarizationMiddleware as Offloading

    return Offloading(llm, backend=StateBackend(), trigger=("messages", 4), keep=("messages", 1))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "summaries": summarize,
    "offloading": offload,
    "context editing": clear_results,
    "trimmed state": lambda llm: trim,
    "removed messages": lambda llm: remove_all_but_the_last,
    "copies": lambda llm: copy_without_ids,
    "reminders": lambda llm: remind,
    "trimmed request": lambda llm: TrimTheRequest(),
}


def standard_agent(llm: Any, tools: Sequence[BaseTool], **options: Any) -> Any:
    return create_agent(llm, tools, middleware=standard_middleware(llm, tools, **options))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("build", [standard_agent, build_react, build_plan_execute, build_llm_compiler])
async def test_limits_questions_and_plans_outlive_what_middleware_does_to_messages(build: Any, change: str) -> None:
    script = Script()
    is_plan = build in PLANS
    options = {} if is_plan else {"model_calls": MODEL_CALLS}
    graph = build(script.llm, [script.fetch], middleware=[CHANGES[change](script.llm)], **options)
    state = await graph.ainvoke({"messages": [HumanMessage("What is ZEBRA?")]})
    assert state["messages"][-1].text == "The answer."
    assert "What is ZEBRA?" in script.last_prompt
    if is_plan:
        assert script.fetched[-1] == "result of a1+result of a8"
        assert len(script.fetched) == 9, "no call is repeated"
    else:
        assert len(script.fetched) == MODEL_CALLS - 1
    assert "run_record" not in state


def test_second_question_of_a_thread_is_not_the_first_one_after_a_summary() -> None:
    script = Script('1. fetch("a")\n2. fetch("b")')
    graph = build_plan_execute(script.llm, [script.fetch], InMemorySaver(), middleware=[summarize(script.llm)])
    for question in ("What is ZEBRA?", "What is YAK?"):
        graph.invoke({"messages": [HumanMessage(question)]}, THREAD)
        assert question in script.last_prompt
    assert sorted(script.fetched) == ["a", "a", "b", "b"]


def test_invalid_calls_end_an_agent_beside_summaries() -> None:
    @tool
    def look_up(word: str) -> str:
        """Look a word up."""
        return word

    count = 0

    def reply(prompt: str) -> str:
        nonlocal count
        if "tools:" not in prompt:
            return "SUMMARY"
        count += 1
        return '<tool_call>{"name": "look_up", "arguments": {"word": </tool_call>'

    llm = scripted_chat(reply, policy="off")
    summary = SummarizationMiddleware(llm, trigger=("messages", 2), keep=("messages", 1))
    agent: Any = create_agent(llm, [look_up], middleware=[summary, InvalidToolCallMiddleware(max_retries=2)])
    messages = agent.invoke({"messages": [HumanMessage("?")]}, {"recursion_limit": 60})["messages"]
    assert "3 replies in a row" in messages[-1].text


# People


made: list[tuple[str, str]] = []


@tool
def book(city: str) -> str:
    """Book a room; returns its number."""
    made.append(("book", city))
    return "4711"


@tool
def pay(number: str) -> str:
    """Pay for a room."""
    made.append(("pay", number))
    return f"paid {number}"


@tool(return_direct=True)
def ticket(subject: str) -> str:
    """Open a ticket."""
    return "Ticket 4711 is open."


def decide(build: Any, decision: dict[str, Any], **options: Any) -> tuple[list[str], str]:
    """Return the prompts of a run in which a person decides, and its answer."""
    made.clear()
    prompts: list[str] = []

    def reply(prompt: str) -> str:
        prompts.append(prompt)
        if "You solve problems" in prompt:
            return 'I book and pay.\n\nPlan:\n1. book(city="Bonn")\n2. pay(number="$1")'
        if "You carry out one line" in prompt:
            return json.dumps({"name": "book", "arguments": {"city": f"Bonn {len(prompts)}"}})
        return "Done."

    graph = build(scripted_chat(reply, policy="off"), [book, pay], InMemorySaver(), **options)
    state = graph.invoke({"messages": [HumanMessage("Book and pay.")]}, THREAD)
    asked = 0
    while "__interrupt__" in state:
        asked += 1
        assert asked <= 2, "a person is asked at most twice"
        resume = (
            decision if isinstance(state["__interrupt__"][0].value.get("args"), dict) else {"decisions": [decision]}
        )
        state = graph.invoke(Command(resume=resume), THREAD)
    return prompts, state["messages"][-1].text


EDIT = {"type": "edit", "edited_action": {"name": "book", "args": {"city": "Rome"}}}
ASKING: dict[str, dict[str, Any]] = {
    "ask_before": {"ask_before": ["book"]},
    "own middleware": {"middleware": [HumanInTheLoopMiddleware({"book": True})]},
    "per call": {"middleware": [HumanInTheLoopMiddleware({"book": True}, interrupt_mode="per_call")]},
}


@pytest.mark.parametrize("build", PLANS)
@pytest.mark.parametrize("asking", ASKING)
def test_result_of_an_edited_call_is_what_the_tool_returned(build: Any, asking: str) -> None:
    prompts, _ = decide(build, EDIT, **ASKING[asking])
    assert made == [("book", "Rome"), ("pay", "4711")]
    assert '[1] book(city="Rome")' in prompts[-1], "the finisher sees the call that ran"


@pytest.mark.parametrize("build", PLANS)
def test_answer_of_a_person_is_the_result_and_a_rejection_is_none(build: Any) -> None:
    decide(build, {"type": "respond", "message": "0815"}, ask_before=["book"])
    assert made == [("pay", "0815")]
    _, answer = decide(build, {"type": "reject", "message": "Not there."}, ask_before=["book"])
    assert (made, answer) == ([], "Done.")


def specialists(llm: Any, tools: Any, saver: Any = None, **options: Any) -> Any:
    return build_supervisor(llm, {"office": tools}, saver, **options)


@pytest.mark.parametrize("build", [build_react, specialists])
def test_person_who_rejects_is_asked_twice_at_most(build: Any) -> None:
    said: dict[str, str] = {}

    def reply(prompt: str) -> str:
        number = len(said)
        if "You lead" in prompt:
            return said.setdefault(prompt, json.dumps({"name": "office", "arguments": {"task": f"Book {number}."}}))
        if "You carry out" in prompt:
            return said.setdefault(prompt, json.dumps({"name": "book", "arguments": {"city": f"Bonn {number}"}}))
        return "Not booked."

    made.clear()
    graph = build(scripted_chat(reply, policy="off"), [book], InMemorySaver(), ask_before=["book"])
    state = graph.invoke({"messages": [HumanMessage("Book a room.")]}, THREAD)
    asked = 0
    while "__interrupt__" in state:
        asked += 1
        state = graph.invoke(Command(resume={"decisions": [{"type": "reject"}]}), THREAD)
    assert (asked, made, state["messages"][-1].text) == (2, [], "Not booked.")


@pytest.mark.parametrize("build", [build_react, *PLANS, specialists])
def test_result_of_a_tool_that_returns_directly_is_the_answer(build: Any) -> None:
    prompts: list[str] = []

    def reply(prompt: str) -> str:
        prompts.append(prompt)
        if "You solve problems" in prompt:
            return 'I open one.\n\nPlan:\n1. ticket("printer")'
        if "You lead" in prompt:
            return json.dumps({"name": "office", "arguments": {"task": "Open a ticket."}})
        if "You carry out" in prompt:
            return json.dumps({"name": "ticket", "arguments": {"subject": "printer"}})
        return "I opened some ticket."

    reading = ticket.model_copy(update={"metadata": READ_ONLY})
    graph = build(scripted_chat(reply, policy="off"), [reading], InMemorySaver())
    for question in ("The printer is broken.", "It still is."):
        state = graph.invoke({"messages": [HumanMessage(question)]}, THREAD)
        assert state["messages"][-1].text == "Ticket 4711 is open."
    assert any("Ticket 4711 is open." in prompt for prompt in prompts), "the next question's prompts have the answer"


@pytest.mark.parametrize("build", PLANS)
@pytest.mark.parametrize("plan", ['1. ticket("a")\n2. book("Bonn")', '1. book("Bonn")\n2. ticket("a")'])
def test_tool_that_returns_directly_beside_others_in_a_plan_has_the_last_word(build: Any, plan: str) -> None:
    made.clear()
    llm = scripted_chat(lambda prompt: f"I do it.\n\nPlan:\n{plan}" if "You solve problems" in prompt else "Done.")
    state = build(llm, [ticket, book]).invoke({"messages": [HumanMessage("The printer is broken.")]})
    assert state["messages"][-1].text == "Ticket 4711 is open."
    assert len(made) <= 1


# Effects


@pytest.mark.parametrize("build", PLANS)
@pytest.mark.parametrize("hint", [None, False])
@pytest.mark.parametrize("error", [ValueError, ConnectionError])
def test_call_that_may_have_had_its_effect_is_not_made_again(build: Any, hint: bool | None, error: Any) -> None:
    sent: list[str] = []

    def send(to: str) -> str:
        """Send a mail."""
        sent.append(to)
        raise error("the server closed the connection after the mail was sent")

    def reply(prompt: str) -> str:
        if "You solve problems" in prompt:
            return 'I send it.\n\nPlan:\n1. send("ann")\n'
        return json.dumps({"name": "send", "arguments": {"to": "ann"}}) if "You carry out" in prompt else "Not sent."

    metadata = None if hint is None else {"readOnlyHint": hint}
    graph = build(scripted_chat(reply, policy="off"), [StructuredTool.from_function(send, metadata=metadata)])
    messages = graph.invoke({"messages": [HumanMessage("Mail Ann.")]})["messages"]
    assert sent == ["ann"]
    identifiers = [message.tool_call_id for message in messages if isinstance(message, ToolMessage)]
    assert len(identifiers) == len({*identifiers})


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_failure_of_an_early_call_is_its_result(asynchronous: bool) -> None:
    script = Script('1. fetch("a")\n2. fetch("b")')
    count = 0

    def fail(x: str) -> str:
        """Fetch something."""
        nonlocal count
        count += 1
        raise ConnectionError("lost")

    failing = StructuredTool.from_function(fail, name="fetch", metadata=READ_ONLY)
    graph = build_llm_compiler(script.llm, [failing], max_plans=1, model_calls=2)
    inputs: Any = {"messages": [HumanMessage("?")]}
    state = await graph.ainvoke(inputs) if asynchronous else graph.invoke(inputs)
    results = [message for message in state["messages"] if isinstance(message, ToolMessage)]
    assert [(result.status, "lost" in result.text) for result in results] == [("error", True)] * 2
    assert count == 2


# Empty questions


EMPTY: list[list[BaseMessage]] = [
    [],
    [HumanMessage("")],
    [HumanMessage(" \n\t ")],
    [HumanMessage([])],
    [HumanMessage([""])],
    [HumanMessage([{"type": "text", "text": " "}])],
    [HumanMessage([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}])],
    [HumanMessage([{"type": "file", "base64": "AA==", "mime_type": "application/pdf"}])],
    [SystemMessage("Be brief.")],
    [AIMessage("Hello!")],
    [AIMessage("")],
    [SystemMessage("Be brief."), HumanMessage("")],
    [HumanMessage("What is tea?"), AIMessage("A drink."), HumanMessage("")],
    [HumanMessage("What is tea?"), AIMessage("A drink."), HumanMessage(" ")],
    [ToolMessage("a", tool_call_id="1")],
]


def without_tools(build: Any) -> Any:
    return lambda llm, tools: build(llm)


ALL: dict[str, Any] = {
    "plan_execute": build_plan_execute,
    "react": build_react,
    "rewoo": build_rewoo,
    "llm_compiler": build_llm_compiler,
    "supervisor": specialists,
    "reflection": without_tools(build_reflection),
    "self_consistency": without_tools(build_self_consistency),
}


@pytest.mark.parametrize("name", ALL)
async def test_empty_question_is_one_clear_error_before_any_call(name: str) -> None:
    prompts: list[str] = []

    def reply(prompt: str) -> str:
        prompts.append(prompt)
        return "No."

    graph = ALL[name](scripted_chat(reply, policy="off"), [book])
    for messages in EMPTY:
        inputs: Any = {"messages": messages}
        with pytest.raises(ConfigurationError, match=r"the question is empty|there is no question"):
            graph.invoke(inputs)
        with pytest.raises(ConfigurationError, match=r"the question is empty|there is no question"):
            await graph.ainvoke(inputs)
    assert prompts == []


def test_question_may_follow_the_answer_of_another_agent() -> None:
    script = Script('1. fetch("a")')
    messages: list[AnyMessage] = [HumanMessage("What is tea?"), AIMessage("I do not know.", name="other")]
    inputs: Any = {"messages": messages}
    assert build_rewoo(script.llm, [script.fetch]).invoke(inputs)["messages"][-1].text == "The answer."
